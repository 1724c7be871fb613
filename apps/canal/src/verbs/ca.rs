//! `canal ca`: the certificate authorities of tenants' identities. It shows and rotates roots,
//! revokes identities and restores them.

use canal_json_api::v1::TrustDomainListView;
use canal_wire::api::{RevokeRequest, RotateRequest, TrustRequest, TrustResponse};
use clap::{Args, Subcommand};

use crate::admin::{self, MeshArgs};
use crate::exit::VerbResult;
use crate::output::{self, OutputArgs, TextTable};
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
    /// Shows each trust domain's roots, the phase of a rotation and what blocks it
    #[command(after_help = "Examples:
  canal ca status
  canal ca status --tenant alpha --certificates -o json | jq '.domains[0].certificates'")]
    Status(CaStatusArgs),
    /// Prints the roots of a tenant's trust domain, PEM: what clients without a node proxy trust
    #[command(after_help = "Examples:
  canal ca bundle --tenant alpha > alpha.pem && curl --cacert alpha.pem https://web.shop.svc.cluster.local
  canal ca bundle --tenant alpha")]
    Bundle(BundleArgs),
    /// Replaces the root that Canal made: announced, then signing, then the old one goes; no
    /// request is lost
    #[command(after_help = "Examples:
  canal ca rotate --tenant alpha
  canal ca rotate --tenant alpha --force    # take the next step at once, without waiting")]
    Rotate(RotateArgs),
    /// Revokes a certificate, or all of an identity, which gets none until it is restored
    #[command(after_help = "Examples:
  canal ca revoke --tenant alpha --identity spiffe://alpha.example/ns/shop/sa/cart
  canal ca revoke --tenant alpha --serial 5f0c8a1e3b7d42469a0e6f0c2d1b3a4c
  canal ca revoke --tenant canal-system --identity spiffe://components.canal/ns/alpha/sa/node.n1    # a part of Canal")]
    Revoke(RevokeArgs),
    /// Allows certificates for a revoked identity again; revoked certificates stay revoked
    #[command(after_help = "Examples:
  canal ca restore --tenant alpha --identity spiffe://alpha.example/ns/shop/sa/cart")]
    Restore(RestoreArgs),
}

#[derive(Debug, Args)]
struct CaStatusArgs {
    /// Only this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Include the certificates in the issuance log
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
    /// Take the next step of a rotation in progress, whatever blocks it
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
    /// All certificates of this identity, including future ones
    #[arg(
        long,
        value_name = "SPIFFE-ID",
        required_unless_present = "serial",
        conflicts_with = "serial"
    )]
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

pub(crate) async fn run(args: CaArgs) -> VerbResult {
    match args.verb {
        CaVerb::Status(args) => status(args).await,
        CaVerb::Bundle(args) => {
            let mut admin = admin::connect(&args.mesh).await?;
            let tenant = tenant::decide(&args.tenant, &mut admin).await?;
            let answer = admin
                .trust(TrustRequest {
                    tenant,
                    certificates: false,
                })
                .await
                .map_err(|s| admin::refused(&s))?
                .into_inner();
            let roots: String = answer.domains.into_iter().flat_map(|d| d.bundle).collect();
            // `line` ends the text with a newline of its own.
            output::line(roots.trim_end())
        }
        CaVerb::Rotate(args) => {
            let mut admin = admin::connect(&args.mesh).await?;
            let tenant = tenant::decide(&args.tenant, &mut admin).await?;
            let answer = admin
                .rotate_root(RotateRequest {
                    tenant,
                    force: args.force,
                })
                .await;
            show(
                &args.output,
                &answer.map_err(|s| admin::refused(&s))?.into_inner(),
            )
        }
        CaVerb::Revoke(args) => {
            let mut admin = admin::connect(&args.mesh).await?;
            let tenant = tenant::decide(&args.tenant, &mut admin).await?;
            // clap requires exactly one of the two; the controller reads empty text as absent.
            let (identity, serial) = (
                args.identity.unwrap_or_default(),
                args.serial.unwrap_or_default(),
            );
            let answer = admin
                .revoke(RevokeRequest {
                    tenant,
                    identity,
                    serial,
                })
                .await;
            show(
                &args.output,
                &answer.map_err(|s| admin::refused(&s))?.into_inner(),
            )
        }
        CaVerb::Restore(args) => {
            let mut admin = admin::connect(&args.mesh).await?;
            let tenant = tenant::decide(&args.tenant, &mut admin).await?;
            let answer = admin
                .restore(RevokeRequest {
                    tenant,
                    identity: args.identity,
                    // Only identities are blocked; a revoked certificate stays revoked.
                    serial: String::new(),
                })
                .await;
            show(
                &args.output,
                &answer.map_err(|s| admin::refused(&s))?.into_inner(),
            )
        }
    }
}

async fn status(args: CaStatusArgs) -> VerbResult {
    let mut admin = admin::connect(&args.mesh).await?;
    let request = TrustRequest {
        tenant: args.tenant.unwrap_or_default(),
        certificates: args.certificates,
    };
    let answer = admin
        .trust(request)
        .await
        .map_err(|s| admin::refused(&s))?
        .into_inner();
    show(&args.output, &answer)
}

fn show(output: &OutputArgs, answer: &TrustResponse) -> VerbResult {
    output::print_view(output.format, TrustDomainListView::from(answer), || {
        lines(answer)
    })
}

fn lines(answer: &TrustResponse) -> Vec<String> {
    let mut table = TextTable::new(&[
        "TENANT",
        "TRUST DOMAIN",
        "SOURCE",
        "PHASE",
        "ISSUED",
        "REVOKED",
        "ROOTS (leaves)",
    ]);
    for d in &answer.domains {
        let root = |r: &canal_wire::api::RootStatus| {
            let signs = if r.signs { " signs" } else { "" };
            format!(
                "{}{signs} ({})",
                // Eight digits distinguish the few roots of a tenant.
                r.fingerprint.get(..8).unwrap_or(&r.fingerprint),
                r.leaves
            )
        };
        let roots = d.roots.iter().map(root).collect::<Vec<_>>().join(", ");
        let phase = if d.overdue {
            format!("{} (overdue)", d.phase)
        } else {
            d.phase.clone()
        };
        table.row([
            d.tenant.clone(),
            d.trust_domain.clone(),
            d.source.clone(),
            phase,
            d.issued.to_string(),
            d.revoked.to_string(),
            roots,
        ]);
    }
    // A response has a note only if the controller has something to explain.
    let mut lines: Vec<String> = Some(&answer.note)
        .filter(|n| !n.is_empty())
        .cloned()
        .into_iter()
        .collect();
    lines.extend(table.lines());
    for d in &answer.domains {
        let about = |what: &str, text: &String| format!("{}: {what}: {text}", d.tenant);
        lines.extend(d.waiting.iter().map(|w| about("the rotation waits for", w)));
        lines.extend(
            d.blocked_identities
                .iter()
                .map(|b| about("gets no certificates", b)),
        );
        lines.extend(
            Some(&d.error)
                .filter(|f| !f.is_empty())
                .map(|f| about("error", f)),
        );
        let revoked =
            |c: &canal_wire::api::IssuedCertificate| if c.revoked { " revoked" } else { "" };
        lines.extend(d.certificates.iter().map(|c| {
            format!(
                "{} {} {} until {}{}",
                c.serial,
                c.identity,
                c.holder,
                c.not_after,
                revoked(c)
            )
        }));
    }
    lines
}

#[cfg(test)]
mod tests {
    use canal_wire::api::{RootStatus, TrustDomainStatus};

    use super::*;

    #[test]
    fn a_rotation_in_progress_lists_pending_subscribers() {
        let root = |fingerprint: &str, signs| RootStatus {
            fingerprint: fingerprint.into(),
            signs,
            not_after: 9,
            leaves: 2,
        };
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
        let answer = TrustResponse {
            domains: vec![domain],
            note: "done".into(),
        };
        let text = lines(&answer).join("\n");
        for part in [
            "done",
            "announced (overdue)",
            "aaaaaaaa signs (2), cccccccc (2)",
            "the rotation waits for: node alpha/n1: is not connected",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
