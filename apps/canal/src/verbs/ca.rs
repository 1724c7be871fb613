//! `canal ca`: who vouches for a tenant's identities. Shows roots, replaces them, revokes and restores.

use canal_wire::api::{RevokeRequest, RotateRequest, TrustDomainStatus, TrustRequest, TrustResponse};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::admin::{self, MeshArgs};
use crate::exit::Outcome;
use crate::output::{self, OutputArgs, Table};
use crate::tenant::{self, TenantArgs};

/// Shows certificate authorities, replaces roots, revokes identities
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal ca status
  canal ca rotate --tenant alpha
  canal ca revoke --tenant alpha --identity spiffe://alpha.example/ns/shop/sa/cart")]
pub(crate) struct CaArgs {
    #[command(subcommand)]
    verb: CaVerb,
}

#[derive(Debug, Subcommand)]
enum CaVerb {
    /// Shows each trust domain's roots, the phase of a replacement and who is in its way
    #[command(after_help = "Examples:
  canal ca status
  canal ca status --tenant alpha --certificates -o json | jq '.domains[0].certificates'")]
    Status(StatusArgs),
    /// Prints the roots of a tenant's trust domain, PEM: what clients without a node proxy trust
    #[command(after_help = "Examples:
  canal ca bundle --tenant alpha > alpha.pem && curl --cacert alpha.pem https://web.shop.svc.cluster.local
  canal ca bundle --tenant alpha")]
    Bundle(BundleArgs),
    /// Replaces the root that Canal made: announced, then signing, then the old one goes; no request is lost
    #[command(after_help = "Examples:
  canal ca rotate --tenant alpha
  canal ca rotate --tenant alpha --force    # takes the next step at once, whoever is in the way")]
    Rotate(RotateArgs),
    /// Revokes a certificate, or all of an identity, which gets none until it is restored
    #[command(after_help = "Examples:
  canal ca revoke --tenant alpha --identity spiffe://alpha.example/ns/shop/sa/cart
  canal ca revoke --tenant alpha --serial 5f0c8a1e3b7d42469a0e6f0c2d1b3a4c
  canal ca revoke --tenant canal-system --identity spiffe://components.canal/ns/alpha/sa/node.n1    # a part of Canal")]
    Revoke(RevokeArgs),
    /// Lets a revoked identity have certificates again; those that were revoked stay so
    #[command(after_help = "Examples:
  canal ca restore --tenant alpha --identity spiffe://alpha.example/ns/shop/sa/cart")]
    Restore(RestoreArgs),
}

#[derive(Debug, Args)]
struct StatusArgs {
    /// Only this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// The certificates on record too
    #[arg(long)]
    certificates: bool,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct BundleArgs {
    #[command(flatten)]
    tenant: TenantArgs,
    #[command(flatten)]
    mesh: MeshArgs,
}

#[derive(Debug, Args)]
struct RotateArgs {
    #[command(flatten)]
    tenant: TenantArgs,
    /// Take the next step of a replacement under way, whoever is in the way
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct RevokeArgs {
    #[command(flatten)]
    tenant: TenantArgs,
    /// All certificates of this identity, and whatever it might get
    #[arg(long, value_name = "SPIFFE-ID", required_unless_present = "serial", conflicts_with = "serial")]
    identity: Option<String>,
    /// One certificate, by its serial in hexadecimal
    #[arg(long, value_name = "HEX")]
    serial: Option<String>,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct RestoreArgs {
    #[command(flatten)]
    tenant: TenantArgs,
    /// The identity
    #[arg(long, value_name = "SPIFFE-ID")]
    identity: String,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn run(args: CaArgs) -> Outcome {
    match args.verb {
        CaVerb::Status(args) => status(args).await,
        CaVerb::Bundle(args) => {
            let mut admin = admin::connect(&args.mesh).await?;
            let tenant = tenant::decide(&args.tenant, &mut admin).await?;
            let answer = admin.trust(TrustRequest { tenant, certificates: false }).await.map_err(|s| admin::refused(&s))?.into_inner();
            let roots: String = answer.domains.into_iter().flat_map(|d| d.bundle).collect();
            output::line(roots.trim_end())
        }
        CaVerb::Rotate(args) => {
            let mut admin = admin::connect(&args.mesh).await?;
            let tenant = tenant::decide(&args.tenant, &mut admin).await?;
            let answer = admin.rotate_root(RotateRequest { tenant, force: args.force }).await;
            show(&args.output, &answer.map_err(|s| admin::refused(&s))?.into_inner())
        }
        CaVerb::Revoke(args) => {
            let mut admin = admin::connect(&args.mesh).await?;
            let tenant = tenant::decide(&args.tenant, &mut admin).await?;
            let (identity, serial) = (args.identity.unwrap_or_default(), args.serial.unwrap_or_default());
            let answer = admin.revoke(RevokeRequest { tenant, identity, serial }).await;
            show(&args.output, &answer.map_err(|s| admin::refused(&s))?.into_inner())
        }
        CaVerb::Restore(args) => {
            let mut admin = admin::connect(&args.mesh).await?;
            let tenant = tenant::decide(&args.tenant, &mut admin).await?;
            let answer = admin.restore(RevokeRequest { tenant, identity: args.identity, serial: String::new() }).await;
            show(&args.output, &answer.map_err(|s| admin::refused(&s))?.into_inner())
        }
    }
}

async fn status(args: StatusArgs) -> Outcome {
    let mut admin = admin::connect(&args.mesh).await?;
    let request = TrustRequest { tenant: args.tenant.unwrap_or_default(), certificates: args.certificates };
    let answer = admin.trust(request).await.map_err(|s| admin::refused(&s))?.into_inner();
    show(&args.output, &answer)
}

fn show(output: &OutputArgs, answer: &TrustResponse) -> Outcome {
    output::print(output.format, &value(answer), || lines(answer))
}

fn value(answer: &TrustResponse) -> Value {
    let domain = |d: &TrustDomainStatus| {
        let root = |r: &canal_wire::api::RootStatus| json!({ "fingerprint": r.fingerprint, "signs": r.signs, "not_after": r.not_after, "leaves": r.leaves });
        let certificate = |c: &canal_wire::api::IssuedCertificate| {
            json!({
                "serial": c.serial, "identity": c.identity, "holder": c.holder, "issued": c.issued, "not_after": c.not_after,
                "revoked": c.revoked, "root": c.root,
            })
        };
        json!({
            "tenant": d.tenant, "trust_domain": d.trust_domain, "source": d.source, "phase": d.phase, "since": d.since,
            "roots": d.roots.iter().map(root).collect::<Vec<_>>(), "waiting": d.waiting, "overdue": d.overdue, "issued": d.issued,
            "bundle": d.bundle, "revoked": d.revoked, "barred": d.barred, "crl_number": d.crl_number, "fault": d.fault,
            "certificates": d.certificates.iter().map(certificate).collect::<Vec<_>>(),
        })
    };
    json!({ "note": answer.note, "domains": answer.domains.iter().map(domain).collect::<Vec<_>>() })
}

fn lines(answer: &TrustResponse) -> Vec<String> {
    let mut table = Table::new(&["TENANT", "TRUST DOMAIN", "SOURCE", "PHASE", "ISSUED", "REVOKED", "ROOTS (leaves)"]);
    for d in &answer.domains {
        let root = |r: &canal_wire::api::RootStatus| {
            let signs = if r.signs { " signs" } else { "" };
            format!("{}{signs} ({})", r.fingerprint.get(..8).unwrap_or(&r.fingerprint), r.leaves)
        };
        let roots = d.roots.iter().map(root).collect::<Vec<_>>().join(", ");
        let phase = if d.overdue { format!("{} (overdue)", d.phase) } else { d.phase.clone() };
        table.row([d.tenant.clone(), d.trust_domain.clone(), d.source.clone(), phase, d.issued.to_string(), d.revoked.to_string(), roots]);
    }
    let mut lines: Vec<String> = Some(&answer.note).filter(|n| !n.is_empty()).cloned().into_iter().collect();
    lines.extend(table.lines());
    for d in &answer.domains {
        let about = |what: &str, text: &String| format!("{}: {what}: {text}", d.tenant);
        lines.extend(d.waiting.iter().map(|w| about("in the way", w)));
        lines.extend(d.barred.iter().map(|b| about("gets no certificates", b)));
        lines.extend(Some(&d.fault).filter(|f| !f.is_empty()).map(|f| about("fault", f)));
        let revoked = |c: &canal_wire::api::IssuedCertificate| if c.revoked { " revoked" } else { "" };
        lines
            .extend(d.certificates.iter().map(|c| format!("{} {} {} until {}{}", c.serial, c.identity, c.holder, c.not_after, revoked(c))));
    }
    lines
}

#[cfg(test)]
mod tests {
    use canal_wire::api::RootStatus;

    use super::*;

    #[test]
    fn a_replacement_under_way_says_who_is_in_its_way() {
        let root = |fingerprint: &str, signs| RootStatus { fingerprint: fingerprint.into(), signs, not_after: 9, leaves: 2 };
        let domain = TrustDomainStatus {
            tenant: "alpha".into(),
            trust_domain: "alpha.example".into(),
            source: "own".into(),
            phase: "announced".into(),
            roots: vec![root("aaaaaaaabbbb", true), root("cccccccc", false)],
            waiting: vec!["node alpha/n1: is not connected".into()],
            overdue: true,
            ..TrustDomainStatus::default()
        };
        let answer = TrustResponse { domains: vec![domain], note: "done".into() };
        let text = lines(&answer).join("\n");
        for part in ["done", "announced (overdue)", "aaaaaaaa signs (2), cccccccc (2)", "in the way: node alpha/n1: is not connected"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert_eq!(value(&answer)["domains"][0]["roots"][0]["signs"], true);
    }
}
