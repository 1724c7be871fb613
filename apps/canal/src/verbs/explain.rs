//! `canal explain`: what happens to a request, hop by hop, which rule and which policy decide, and why
//! the others do not. It evaluates the compiler's oracle and sends no request. Start at [`run`].

mod arrival;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use canal_compiler::ir::Ir;
use canal_compiler::oracle::{OracleClient, OracleRequest};
use canal_compiler::{CompileInput, build_ir, service_keys};
use canal_explain::{
    EnforcementPoint, Explanation, HopDecision, HopExplanation, MatchStanding, MatchTrace,
    RequestDescription, explain,
};
use canal_model::identity::Identity;
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::{Document, Object};
use canal_oracle::authorization::OracleTruth;
use canal_wire::api::GetRequest;
use clap::Args;
use serde_json::{Value, json};

use crate::admin::{self, MeshArgs};
use crate::exit::{ExitStatus, VerbError, VerbResult as Done};
use crate::files;
use crate::output::{self, OutputArgs};
use crate::tenant;

/// Explains which route and which policy decide about a request, inside the mesh or to a Gateway
#[derive(Debug, Args)]
#[command(
    after_help = "A request inside the mesh is named by --from and --to. A request of a client outside the mesh is named
by its URL, as curl names it, and by the Gateway at which it arrives. tls://HOST and tcp://HOST:PORT are
connections whose bytes the Gateway relays.

Examples:
  canal explain --tenant alpha --from front/caller --to shop/web:80 --method POST --path /items
  canal explain -f policies/ --from front/caller --to shop/cache:6379         # without a controller
  canal explain -f policies/ --from 10.1.0.3 --to shop/web:80 --direct        # plaintext, straight to the pods
  canal explain -f policies/ --from - --to shop/web:443 --sni shop.example.com --header x-a=1 -o json
  canal explain https://shop.example.com/cart --gateway infra/public --from-ip 203.0.113.7
  canal explain https://192.0.2.7/ --sni shop.example.com --host shop.example.com -X POST -H x-a:1
  canal explain tls://db.example.com --gateway infra/public --listener postgres"
)]
pub(crate) struct ExplainArgs {
    /// URL that a client outside the mesh requests from a Gateway, instead of --from and --to
    #[arg(value_name = "URL", conflicts_with_all = ["from", "to", "path", "direct"])]
    url: Option<String>,
    /// The client: namespace/account, spiffe://…, an address of a client without identity, or `-`
    #[arg(
        long,
        value_name = "WHO",
        allow_hyphen_values = true,
        required_unless_present = "url"
    )]
    from: Option<String>,
    /// The service: namespace/service:port, or service:port in namespace `default`
    #[arg(long, value_name = "SERVICE:PORT", required_unless_present = "url")]
    to: Option<String>,
    /// Gateway of the URL, as namespace/name; with its kind in front if two have the name [default: the
    /// one with the URL's address, or the only one]
    #[arg(long, value_name = "GATEWAY", requires = "url")]
    gateway: Option<String>,
    /// Listener of the Gateway whose port the client dials [default: the URL's port]
    #[arg(long, value_name = "NAME", requires = "url")]
    listener: Option<String>,
    /// The client presents a certificate of the listener's authorities
    #[arg(long, requires = "url")]
    client_certificate: bool,
    /// Files or directories of the tenant's objects, instead of the controller's; `-` is stdin
    #[arg(short, long = "filename", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// HTTP method
    #[arg(short = 'X', long, default_value = "GET")]
    method: String,
    /// Path and query, as sent
    #[arg(long, default_value = "/")]
    path: String,
    /// Host or :authority [default: the URL's host, or the service's name]
    #[arg(long)]
    host: Option<String>,
    /// Header of the request, also as `NAME: VALUE`; may be repeated
    #[arg(short = 'H', long = "header", value_name = "NAME=VALUE")]
    headers: Vec<String>,
    /// Claims of a JWT with a valid signature, as JSON
    #[arg(long, value_name = "JSON")]
    jwt_claims: Option<String>,
    /// Address of the client [default: that of a pod with the identity]
    #[arg(long, value_name = "ADDRESS")]
    from_ip: Option<IpAddr>,
    /// Server name of the client's TLS; empty for none [default: the URL's host]
    #[arg(long, value_name = "NAME")]
    sni: Option<String>,
    /// Directly to the pods, without gateways
    #[arg(long)]
    direct: bool,
    #[command(flatten)]
    tenant: tenant::TenantArgs,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// The tenant's name and objects.
struct ExplainInput {
    tenant: TenantName,
    documents: Vec<Arc<Document>>,
}

pub(crate) async fn run(args: ExplainArgs) -> Done {
    let explanation = if args.files.is_empty() {
        live(&args).await?
    } else {
        offline(&args)?
    };
    let ir = compiled(&explanation)?;
    let lines = |text: String| text.lines().map(str::to_owned).collect();
    if let Some(url) = &args.url {
        let explained = arrival::explain_url(&args, &ir, url)?;
        return output::print(
            args.output.format,
            &arrival::format_arrival(&explained),
            || lines(explained.to_string()),
        );
    }
    let request = describe(&args, &ir)?;
    if !ir.services.contains_key(&request.request.service) {
        let what = format!(
            "there is no Service {}/{}",
            request.request.service.namespace, request.request.service.name
        );
        return Err(VerbError::new(
            ExitStatus::Missing,
            "--to",
            what,
            "name one that `canal get services` lists",
        ));
    }
    let explained = explain(&ir, &request);
    output::print(args.output.format, &format_explanation(&explained), || {
        lines(explained.to_string())
    })
}

async fn live(args: &ExplainArgs) -> Done<ExplainInput> {
    let mut admin = admin::connect(&args.mesh).await?;
    let name = tenant::decide(&args.tenant, &mut admin).await?;
    let request = GetRequest {
        tenant: name.clone(),
        ..GetRequest::default()
    };
    let answer = admin
        .get(request)
        .await
        .map_err(|status| admin::refused(&status))?
        .into_inner();
    let texts = answer
        .objects
        .into_iter()
        .map(|object| (object.origin, object.yaml));
    Ok(ExplainInput {
        tenant: tenant_name(&name)?,
        documents: parsed(texts),
    })
}

fn offline(args: &ExplainArgs) -> Done<ExplainInput> {
    let texts = files::read(&args.files)?
        .into_iter()
        .map(|file| (file.path, file.yaml));
    let documents = parsed(texts);
    let mut tenants = documents
        .iter()
        .filter_map(|document| match &document.object {
            Object::Tenant(tenant) => Some(tenant.metadata.name.to_string()),
            _ => None,
        });
    let fix = "name files that include the Tenant object, or name the tenant with --tenant";
    let name = match (&args.tenant.tenant, tenants.next(), tenants.next()) {
        (Some(name), ..) => name.clone(),
        (None, Some(name), None) => name,
        (None, Some(_), Some(_)) => {
            return Err(VerbError::new(
                ExitStatus::Usage,
                "--tenant",
                "the files contain several Tenant objects",
                fix,
            ));
        }
        (None, None, _) => {
            return Err(VerbError::new(
                ExitStatus::Usage,
                "-f",
                "the files contain no Tenant object",
                fix,
            ));
        }
    };
    Ok(ExplainInput {
        tenant: tenant_name(&name)?,
        documents,
    })
}

fn tenant_name(name: &str) -> Done<TenantName> {
    TenantName::new(name)
        .map_err(|problem| VerbError::new(ExitStatus::Usage, "--tenant", problem.to_string(), ""))
}

/// Parses the texts and prints their diagnostics on stderr, because the answer describes the
/// objects in force.
fn parsed(texts: impl Iterator<Item = (String, String)>) -> Vec<Arc<Document>> {
    let mut documents = Vec::new();
    for (name, text) in texts {
        let parsed = canal_sources::parse(&name, &text);
        parsed
            .diagnostics
            .iter()
            .for_each(|diagnostic| eprintln!("{diagnostic}"));
        documents.extend(parsed.documents.into_iter().map(Arc::new));
    }
    documents
}

fn compiled(explanation: &ExplainInput) -> Done<Ir> {
    let keys = service_keys(&explanation.tenant, &explanation.documents);
    // The controller assigns other ids. No decision depends on them; a Service without one would be
    // left out.
    let service_ids: BTreeMap<ServiceKey, ServiceId> = keys
        .into_iter()
        .zip(1..)
        .filter_map(|(k, id)| Some((k, ServiceId::new(id).ok()?)))
        .collect();
    let (tenant, documents) = (&explanation.tenant, explanation.documents.as_slice());
    // The controller fetches key sets that are not files. Here their issuers are assumed to be
    // reachable.
    let known = |uris: &BTreeSet<String>| {
        uris.iter()
            .map(|uri| (uri.clone(), PLACEHOLDER_JWKS.to_owned()))
            .collect::<BTreeMap<_, _>>()
    };
    // The first pass finds the key sets that the policies name.
    let first = build_ir(&CompileInput {
        tenant,
        documents,
        service_ids: &service_ids,
        jwks: &BTreeMap::new(),
    })
    .0;
    // Without a valid Tenant object there is no IR, which the second pass reports.
    let jwks = first.map(|ir| known(&ir.security.jwks)).unwrap_or_default();
    let (ir, diagnostics) = build_ir(&CompileInput {
        tenant,
        documents,
        service_ids: &service_ids,
        jwks: &jwks,
    });
    // The answer describes what is in force, which may differ from the intention: a broken policy
    // denies.
    diagnostics
        .iter()
        .for_each(|diagnostic| eprintln!("{diagnostic}"));
    ir.ok_or_else(|| {
        VerbError::failed(
            format!("tenant {tenant}"),
            "has no valid Tenant object, so it is not served",
            "fix it first",
        )
    })
}

/// A key set in the form in which it could be fetched. No token is verified here.
const PLACEHOLDER_JWKS: &str = r#"{"keys":[{"kty":"EC"}]}"#;

fn describe(args: &ExplainArgs, ir: &Ir) -> Done<RequestDescription> {
    let usage =
        |place: &str, what: String, fix: &str| VerbError::new(ExitStatus::Usage, place, what, fix);
    // The command line is refused without both, unless it has a URL.
    let (from, to) = (args.from.as_deref(), args.to.as_deref());
    let (from, to) = (from.unwrap_or_default(), to.unwrap_or_default());
    // A missing port reads as empty, which the parser below refuses.
    let (name, port) = to.rsplit_once(':').unwrap_or((to, ""));
    let fix = "write namespace/service:port";
    let port: u16 = port
        .parse()
        .map_err(|_| usage("--to", format!("{to:?} has no port"), fix))?;
    // As with kubectl, a name without a namespace is in `default`.
    let full = if name.contains('/') {
        name.to_owned()
    } else {
        format!("default/{name}")
    };
    let service: ServiceKey = format!("{}/{full}", ir.tenant.name)
        .parse()
        .map_err(|problem| usage("--to", format!("{problem}"), fix))?;
    let headers = parse_headers(args)?;
    let claims = parse_claims(args)?;
    let (identity, address) = parse_client(from, ir)?;
    // Without --host, the client requests the service by its short name, as in `http://cart`.
    let host = args
        .host
        .clone()
        .unwrap_or_else(|| service.name.to_string());
    let request = OracleRequest {
        service,
        port,
        host,
        method: args.method.clone(),
        target: args.path.clone(),
        headers,
        client: OracleClient::default(),
    };
    Ok(RequestDescription {
        identity,
        // --from-ip replaces the address of a pod with the identity.
        address: args.from_ip.or(address),
        direct: args.direct,
        request,
        claims,
        // An empty `--sni` means a client that sends no server name.
        server_name: args.sni.clone().filter(|name| !name.is_empty()),
    })
}

/// Returns the headers, each written as `NAME=VALUE` or, as for curl, as `NAME: VALUE`.
fn parse_headers(args: &ExplainArgs) -> Done<Vec<(String, String)>> {
    let parsed = args.headers.iter().map(|header| {
        let Some((name, value)) = header.split_once(['=', ':']) else {
            let what = format!("{header:?} has no value");
            let fix = "write name=value";
            return Err(VerbError::new(ExitStatus::Usage, "--header", what, fix));
        };
        let value = match header[name.len()..].starts_with(':') {
            true => value.trim_start(),
            false => value,
        };
        Ok((name.to_owned(), value.to_owned()))
    });
    parsed.collect()
}

fn parse_claims(args: &ExplainArgs) -> Done<Option<Value>> {
    let claims = args.jwt_claims.as_deref();
    claims
        .map(serde_json::from_str::<Value>)
        .transpose()
        .map_err(|problem| {
            let fix = "write JSON, as '{\"iss\":\"https://i\",\"sub\":\"u\"}'";
            VerbError::new(ExitStatus::Usage, "--jwt-claims", problem.to_string(), fix)
        })
}

/// Returns an identity, or the address of a client without one.
fn parse_client(from: &str, ir: &Ir) -> Done<(Option<Identity>, Option<IpAddr>)> {
    if from == "-" {
        return Ok((None, None));
    }
    if let Ok(address) = from.parse() {
        return Ok((None, Some(address)));
    }
    let id = match from.split_once('/') {
        Some((namespace, account)) if !from.contains(':') && !account.contains('/') => {
            format!(
                "spiffe://{}/ns/{namespace}/sa/{account}",
                ir.tenant.trust_domain
            )
        }
        _ if from.starts_with("spiffe://") => from.to_owned(),
        _ => format!("spiffe://{from}"),
    };
    let fix = "write namespace/account, spiffe://…, an address, or -";
    let id = id.parse().map_err(|problem| {
        VerbError::new(ExitStatus::Usage, "--from", format!("{problem}"), fix)
    })?;
    Ok((Some(id), None))
}

fn format_explanation(explained: &Explanation) -> Value {
    let refusals = explained
        .refusals
        .iter()
        .map(|(target, reason)| json!({ "target": target.to_string(), "why": reason.to_string() }));
    json!({
        "route": explained.route,
        "consumer": explained.consumer.as_ref().map(ToString::to_string),
        "matches": explained.matches.iter().map(format_match).collect::<Vec<_>>(),
        "path": explained.path.as_ref().map(ToString::to_string),
        "refusals": refusals.collect::<Vec<_>>(),
        "passes": explained.passes(),
        "steps": explained.steps.iter().map(format_step).collect::<Vec<_>>(),
    })
}

fn format_match(trace: &MatchTrace) -> Value {
    let (standing, why) = match &trace.standing {
        MatchStanding::Decides => ("decides", ""),
        MatchStanding::Unmet(why) => ("unmet", why.as_str()),
        MatchStanding::Later(why) => ("later", why.as_str()),
    };
    json!({
        "rule": trace.rule.to_string(),
        "conditions": trace.conditions,
        "standing": standing,
        "why": why,
    })
}

fn format_step(step: &HopExplanation) -> Value {
    let hop = match step.hop {
        EnforcementPoint::Gateway => "gateway",
        EnforcementPoint::Node => "node",
    };
    let (outcome, why) = step.outcome.words();
    let policies = step.policies.iter().map(|policy| {
        let rules = policy.rules.iter().map(|(truth, why)| {
            let matches = match truth {
                OracleTruth::Yes => json!(true),
                OracleTruth::No => json!(false),
                OracleTruth::Maybe(_) => Value::Null,
            };
            json!({ "matches": matches, "why": why })
        });
        json!({ "policy": policy.policy.to_string(), "what": policy.what, "rules": rules.collect::<Vec<_>>() })
    });
    json!({
        "hop": hop, "workload": step.workload, "outcome": outcome, "why": why, "policies": policies.collect::<Vec<_>>(),
        "countedOnly": step.hits, "denied": matches!(step.outcome, HopDecision::Denies(_)),
    })
}
