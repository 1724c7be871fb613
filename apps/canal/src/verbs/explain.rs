//! `canal explain`: what becomes of a request, hop by hop, and which policy decides. Asks the compiler's oracle: nothing is sent.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use canal_compiler::ir::Ir;
use canal_compiler::oracle::Request;
use canal_compiler::oracle_authorization::Truth;
use canal_compiler::oracle_journey::{Explained, Hop, Journey, Outcome, Step, explain};
use canal_compiler::{Input, build_ir, service_keys};
use canal_model::identity::Identity;
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::{Document, Object};
use canal_wire::api::GetRequest;
use clap::Args;
use serde_json::{Value, json};

use crate::admin::{self, MeshArgs};
use crate::exit::{Exit, Failure, Outcome as Done};
use crate::files;
use crate::output::{self, OutputArgs};
use crate::tenant;

/// Explains which route and which policy decide about a request
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal explain --tenant alpha --from front/caller --to shop/web:80 --method POST --path /items
  canal explain -f policies/ --from front/caller --to shop/cache:6379         # without a controller
  canal explain -f policies/ --from 10.1.0.3 --to shop/web:80 --direct        # plaintext, straight to the pods
  canal explain -f policies/ --from - --to shop/web:443 --sni shop.example.com --header x-a=1 -o json")]
pub(crate) struct ExplainArgs {
    /// Who asks: namespace/account, spiffe://…, an address of a client without identity, or `-`
    #[arg(long, value_name = "WHO", allow_hyphen_values = true)]
    from: String,
    /// What is asked for: namespace/service:port, or service:port in namespace `default`
    #[arg(long, value_name = "SERVICE:PORT")]
    to: String,
    /// Files or directories of the tenant's objects, instead of the controller's; `-` is stdin
    #[arg(short, long = "filename", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// HTTP method
    #[arg(long, default_value = "GET")]
    method: String,
    /// Path and query, as sent
    #[arg(long, default_value = "/")]
    path: String,
    /// Host or :authority [default: the service's name]
    #[arg(long)]
    host: Option<String>,
    /// Header of the request; may be repeated
    #[arg(long = "header", value_name = "NAME=VALUE")]
    headers: Vec<String>,
    /// Claims of a well signed JWT, as JSON
    #[arg(long, value_name = "JSON")]
    jwt_claims: Option<String>,
    /// Address of who asks [default: that of a pod with the identity]
    #[arg(long, value_name = "ADDRESS")]
    from_ip: Option<IpAddr>,
    /// Server name of TLS that ends at the gateway
    #[arg(long, value_name = "NAME")]
    sni: Option<String>,
    /// Straight to the pods, past all gateways
    #[arg(long)]
    direct: bool,
    #[command(flatten)]
    tenant: tenant::TenantArgs,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// What the tenant says.
struct Said {
    tenant: TenantName,
    documents: Vec<Arc<Document>>,
}

pub(crate) async fn run(args: ExplainArgs) -> Done {
    let said = if args.files.is_empty() { live(&args).await? } else { offline(&args)? };
    let ir = compiled(&said)?;
    let journey = journey(&args, &ir)?;
    if !ir.services.contains_key(&journey.request.service) {
        let what = format!("there is no Service {}/{}", journey.request.service.namespace, journey.request.service.name);
        return Err(Failure::new(Exit::Missing, "--to", what, "`canal get services` lists what there is"));
    }
    let explained = explain(&ir, &journey);
    output::print(args.output.format, &value(&explained), || explained.to_string().lines().map(str::to_owned).collect())
}

async fn live(args: &ExplainArgs) -> Done<Said> {
    let mut admin = admin::connect(&args.mesh).await?;
    let name = tenant::decide(&args.tenant, &mut admin).await?;
    let request = GetRequest { tenant: name.clone(), ..GetRequest::default() };
    let answer = admin.get(request).await.map_err(|status| admin::refused(&status))?.into_inner();
    let texts = answer.objects.into_iter().map(|object| (object.origin, object.yaml));
    Ok(Said { tenant: tenant_name(&name)?, documents: parsed(texts) })
}

fn offline(args: &ExplainArgs) -> Done<Said> {
    let texts = files::read(&args.files)?.into_iter().map(|file| (file.path, file.yaml));
    let documents = parsed(texts);
    let mut tenants = documents.iter().filter_map(|document| match &document.object {
        Object::Tenant(tenant) => Some(tenant.metadata.name.to_string()),
        _ => None,
    });
    let mend = "name the files that hold the tenant's Tenant object, or the tenant with --tenant";
    let name = match (&args.tenant.tenant, tenants.next(), tenants.next()) {
        (Some(name), ..) => name.clone(),
        (None, Some(name), None) => name,
        (None, Some(_), Some(_)) => return Err(Failure::new(Exit::Usage, "--tenant", "the files hold several tenants", mend)),
        (None, None, _) => return Err(Failure::new(Exit::Usage, "-f", "the files hold no Tenant object", mend)),
    };
    Ok(Said { tenant: tenant_name(&name)?, documents })
}

fn tenant_name(name: &str) -> Done<TenantName> {
    TenantName::new(name).map_err(|problem| Failure::new(Exit::Usage, "--tenant", problem.to_string(), ""))
}

/// What is wrong with the texts goes to stderr: the answer is about what is in force.
fn parsed(texts: impl Iterator<Item = (String, String)>) -> Vec<Arc<Document>> {
    let mut documents = Vec::new();
    for (name, text) in texts {
        let parsed = canal_sources::parse(&name, &text);
        parsed.diagnostics.iter().for_each(|diagnostic| eprintln!("{diagnostic}"));
        documents.extend(parsed.documents.into_iter().map(Arc::new));
    }
    documents
}

fn compiled(said: &Said) -> Done<Ir> {
    let keys = service_keys(&said.tenant, &said.documents);
    let service_ids: BTreeMap<ServiceKey, ServiceId> =
        keys.into_iter().zip(1..).filter_map(|(k, id)| Some((k, ServiceId::new(id).ok()?))).collect();
    let (tenant, documents) = (&said.tenant, said.documents.as_slice());
    // Keys that are fetched are the controller's to have; here their issuers are believed to be reachable.
    let known = |uris: &BTreeSet<String>| uris.iter().map(|uri| (uri.clone(), BELIEVED.to_owned())).collect::<BTreeMap<_, _>>();
    let first = build_ir(&Input { tenant, documents, service_ids: &service_ids, jwks: &BTreeMap::new() }).0;
    let jwks = first.map(|ir| known(&ir.security.jwks)).unwrap_or_default();
    let (ir, diagnostics) = build_ir(&Input { tenant, documents, service_ids: &service_ids, jwks: &jwks });
    // The answer is about what is in force, which may not be what was meant: a broken policy denies.
    diagnostics.iter().for_each(|diagnostic| eprintln!("{diagnostic}"));
    ir.ok_or_else(|| Failure::failed(format!("tenant {tenant}"), "has no valid Tenant object, so nothing of it is served", "mend it first"))
}

/// A key set as it could be fetched; no token is verified here.
const BELIEVED: &str = r#"{"keys":[{"kty":"EC"}]}"#;

fn journey(args: &ExplainArgs, ir: &Ir) -> Done<Journey> {
    let usage = |place: &str, what: String, mend: &str| Failure::new(Exit::Usage, place, what, mend);
    let (name, port) = args.to.rsplit_once(':').unwrap_or((&args.to, ""));
    let mend = "write namespace/service:port";
    let port: u16 = port.parse().map_err(|_| usage("--to", format!("{:?} has no port", args.to), mend))?;
    let full = if name.contains('/') { name.to_owned() } else { format!("default/{name}") };
    let service: ServiceKey = format!("{}/{full}", ir.tenant.name).parse().map_err(|problem| usage("--to", format!("{problem}"), mend))?;
    let mut headers = Vec::new();
    for header in &args.headers {
        let Some((name, value)) = header.split_once('=') else {
            return Err(usage("--header", format!("{header:?} has no value"), "write name=value"));
        };
        headers.push((name.to_owned(), value.to_owned()));
    }
    let claims = args.jwt_claims.as_deref().map(serde_json::from_str::<Value>).transpose();
    let claims =
        claims.map_err(|problem| usage("--jwt-claims", problem.to_string(), "write JSON, as '{\"iss\":\"https://i\",\"sub\":\"u\"}'"))?;
    let (identity, address) = who(&args.from, ir)?;
    let host = args.host.clone().unwrap_or_else(|| service.name.to_string());
    let request = Request { service, port, host, method: args.method.clone(), target: args.path.clone(), headers };
    Ok(Journey { identity, address: args.from_ip.or(address), direct: args.direct, request, claims, server_name: args.sni.clone() })
}

/// An identity, or the address of somebody without one.
fn who(from: &str, ir: &Ir) -> Done<(Option<Identity>, Option<IpAddr>)> {
    if from == "-" {
        return Ok((None, None));
    }
    if let Ok(address) = from.parse() {
        return Ok((None, Some(address)));
    }
    let id = match from.split_once('/') {
        Some((namespace, account)) if !from.contains(':') && !account.contains('/') => {
            format!("spiffe://{}/ns/{namespace}/sa/{account}", ir.tenant.trust_domain)
        }
        _ if from.starts_with("spiffe://") => from.to_owned(),
        _ => format!("spiffe://{from}"),
    };
    let mend = "write namespace/account, spiffe://…, an address, or -";
    let id = id.parse().map_err(|problem| Failure::new(Exit::Usage, "--from", format!("{problem}"), mend))?;
    Ok((Some(id), None))
}

fn value(explained: &Explained) -> Value {
    json!({
        "route": explained.route,
        "passes": explained.passes(),
        "steps": explained.steps.iter().map(step).collect::<Vec<_>>(),
    })
}

fn step(step: &Step) -> Value {
    let hop = match step.hop {
        Hop::Gateway => "gateway",
        Hop::Node => "node",
    };
    let (outcome, why) = step.outcome.words();
    let policies = step.policies.iter().map(|policy| {
        let rules = policy.rules.iter().map(|(truth, why)| {
            let matches = match truth {
                Truth::Yes => json!(true),
                Truth::No => json!(false),
                Truth::Maybe(_) => Value::Null,
            };
            json!({ "matches": matches, "why": why })
        });
        json!({ "policy": policy.policy.to_string(), "what": policy.what, "rules": rules.collect::<Vec<_>>() })
    });
    json!({
        "hop": hop, "workload": step.workload, "outcome": outcome, "why": why, "policies": policies.collect::<Vec<_>>(),
        "countedOnly": step.hits, "denied": matches!(step.outcome, Outcome::Denies(_)),
    })
}
