//! Parses and answers the requests of `#!` directives: `FROM SERVICE:PORT [name=value …]`. Names
//! are `method`, `path`, `host`, `ip`, `sni`, `jwt` (JSON without spaces) and `h:HEADER`. The word
//! `direct` bypasses the gateways.

use canal_compiler::ir::Ir;
use canal_compiler::oracle::{OracleClient, OracleRequest};
use canal_explain::{RequestDescription, explain};

pub(crate) fn answer(ir: &Ir, question: &str) -> String {
    let journey = read(ir, question);
    let explained = explain(ir, &journey).to_string();
    let lines: Vec<String> = explained.lines().map(|line| format!("  {line}")).collect();
    format!("{question}\n{}\n", lines.join("\n"))
}

fn read(ir: &Ir, question: &str) -> RequestDescription {
    let mut words = question.split_whitespace();
    let (Some(from), Some(to)) = (words.next(), words.next()) else {
        panic!("{question:?} is not a question")
    };
    let (service, port) = to
        .rsplit_once(':')
        .unwrap_or_else(|| panic!("{question:?}: SERVICE:PORT"));
    let request = OracleRequest {
        service: format!("{}/{service}", ir.tenant.name).parse().unwrap(),
        port: port.parse().unwrap(),
        // Without `host=` a client uses the service's name as the host.
        host: service.rsplit('/').next().unwrap_or_default().to_owned(),
        method: "GET".to_owned(),
        target: "/".to_owned(),
        headers: Vec::new(),
        client: OracleClient::default(),
    };
    let identity = match from {
        // The client is named by its identity, by NAMESPACE/ACCOUNT, or by its address alone. An
        // identity contains `/` too, so it is matched first.
        id if id.starts_with("spiffe://") => Some(id.parse().unwrap()),
        id if id.contains('/') => {
            let (namespace, account) = id.split_once('/').unwrap();
            Some(
                format!(
                    "spiffe://{}/ns/{namespace}/sa/{account}",
                    ir.tenant.trust_domain
                )
                .parse()
                .unwrap(),
            )
        }
        _ => None,
    };
    let mut journey = RequestDescription {
        identity,
        // A name is no address, so a client that is named has none unless `ip=` gives it.
        address: from.parse().ok(),
        direct: false,
        request,
        claims: None,
        server_name: None,
    };
    for word in words {
        // A word such as `direct` has no value.
        let (name, value) = word.split_once('=').unwrap_or((word, ""));
        match name {
            "method" => journey.request.method = value.to_owned(),
            "path" => journey.request.target = value.to_owned(),
            "host" => journey.request.host = value.to_owned(),
            "ip" => journey.address = Some(value.parse().unwrap()),
            "sni" => journey.server_name = Some(value.to_owned()),
            "jwt" => journey.claims = Some(serde_json::from_str(value).unwrap()),
            "direct" => journey.direct = true,
            _ => {
                let header = name
                    .strip_prefix("h:")
                    .unwrap_or_else(|| panic!("{question:?}: {name}"));
                journey
                    .request
                    .headers
                    .push((header.to_owned(), value.to_owned()));
            }
        }
    }
    journey
}
