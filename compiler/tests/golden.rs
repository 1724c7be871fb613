//! Golden tests: each `tests/golden/compiler/NAME.yaml` is compiled and compared with its golden
//! texts. `CANAL_BLESS=1` rewrites the texts.
//!
//! Directives in the YAML files:
//! - `#with NAME` puts `_NAME.yaml` before the file.
//! - `#? METHOD SERVICE:PORT HOST TARGET [header:value …] [:attribute=value …]` is a request for the
//!   oracle, with attributes of its client; its decision is golden too.
//! - `#> METHOD GATEWAY:PORT[,SNI] HOST TARGET [header:value …]` is a request by a client outside the mesh;
//!   GATEWAY is a Gateway's namespace and name, or an address that it requests.
//! - `#! FROM SERVICE:PORT [name=value …]` explains a request on its whole path. FROM is an
//!   identity `NAMESPACE/ACCOUNT` or `spiffe://…`, the address of a client without one, or `-`.
//! - `#!> METHOD GATEWAY:PORT[,SNI] HOST TARGET [header:value …] [from=ADDRESS]` explains such a
//!   request, and `#!> CONNECTION GATEWAY:PORT[,SNI]` a connection.
//! - `$CERTIFICATE(NAME)` and `$KEY(NAME)` stand for a certificate for the host and its key, in
//!   base64 of PEM.
//! - `#jwks URI KEYS` is a key set that the controller has fetched.

#[path = "golden/certificates.rs"]
mod certificates;
#[path = "golden/explained_arrival.rs"]
mod explained_arrival;
#[path = "golden/ingress.rs"]
mod ingress;
#[path = "golden/journey.rs"]
mod journey;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use canal_compiler::ir::Ir;
use canal_compiler::oracle::{
    OracleClient, OracleRequest, RoutingVerdict, decide, deciding_rule, endpoints, forwarded,
};
use canal_compiler::{CompileInput, build_ir, compile, lower, service_keys, text};
use canal_model::client_attributes::ClientAttribute;
use canal_model::diagnostic::Diagnostic;
use canal_model::ids::{AzName, NodeName, ReplicaName, ServiceId, ServiceKey, TenantName};
use canal_model::policy::Document;
use canal_model::program::{Resource, RouteAction};
use canal_sources::{parse, pinpoint};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/compiler")
}

#[test]
fn policies_compile_to_their_golden_texts() {
    let mut names: Vec<PathBuf> = fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    names.retain(|path| {
        path.extension().is_some_and(|e| e == "yaml")
            && !path.file_name().unwrap().to_string_lossy().starts_with('_')
    });
    names.sort();
    assert!(names.len() >= 10, "the golden policies are not there");
    let differing: Vec<String> = names.iter().flat_map(|path| check(path)).collect();
    assert!(
        differing.is_empty(),
        "these differ from what is blessed (CANAL_BLESS=1 writes them anew):\n{}",
        differing.join("\n")
    );
}

/// Every golden text has its policy file: a renamed policy must not leave old texts behind.
#[test]
fn no_golden_text_is_an_orphan() {
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        assert!(
            path.with_extension("yaml").exists(),
            "{} has no policy",
            path.display()
        );
    }
}

/// Returns the golden files of one policy file that differ.
fn check(path: &Path) -> Vec<String> {
    let case = GoldenCase::read(path);
    let input = CompileInput {
        tenant: &case.tenant,
        documents: &case.documents,
        service_ids: &case.ids,
        jwks: &case.jwks,
    };
    let (ir, found) = build_ir(&input);
    let output = compile(&input);
    // Two paths of the compiler must agree: `build_ir` for the oracle, and `compile` for data
    // planes.
    assert_eq!(output.diagnostics, found, "{}", path.display());
    let mut texts = vec![("diagnostics", case.diagnostics(&found))];
    if let Some(ir) = &ir {
        texts.push(("ir", ir.to_string()));
        texts.extend(programs(ir, &output.resources));
        texts.push((
            "oracle",
            case.questions
                .iter()
                .map(|question| answer(ir, question))
                .collect(),
        ));
        texts.push((
            "ingress",
            case.arrivals
                .iter()
                .map(|arrival| ingress::answer(ir, arrival))
                .collect(),
        ));
        texts.push((
            "journeys",
            case.journeys
                .iter()
                .map(|journey| journey::answer(ir, journey))
                .collect(),
        ));
        let explained = case.explained_arrivals.iter();
        texts.push((
            "arrivals",
            explained
                .map(|arrival| explained_arrival::answer(ir, arrival))
                .collect(),
        ));
    }
    texts
        .into_iter()
        .filter_map(|(extension, text)| differs(&path.with_extension(extension), text.trim()))
        .collect()
}

fn differs(path: &Path, text: &str) -> Option<String> {
    let blessed = fs::read_to_string(path).unwrap_or_default();
    if blessed.trim() == text {
        return None;
    }
    if std::env::var_os("CANAL_BLESS").is_some() {
        match text {
            "" => fs::remove_file(path).unwrap(),
            _ => fs::write(path, format!("{text}\n")).unwrap(),
        }
        return None;
    }
    let line = blessed
        .trim()
        .lines()
        .zip(text.lines())
        .position(|(a, b)| a != b)
        .map_or(0, |at| at + 1);
    Some(format!("{}:{line}\n--- now\n{text}", path.display()))
}

fn show(resources: &[Resource]) -> String {
    resources
        .iter()
        .map(|resource| text::resource(resource) + "\n")
        .collect()
}

/// Returns the programs of a gateway that serves all services, of each node, of an edge and of the
/// provider's key server. Every resource that the compiler makes must be in one of them, and none
/// has another.
fn programs(ir: &Ir, resources: &[Resource]) -> [(&'static str, String); 4] {
    let az = AzName::new("az1").unwrap();
    let replica = ReplicaName::new("gw-all").unwrap();
    let placement = lower::placement_on(ir, &replica, &"b1".parse().unwrap());
    let gateway = lower::gateway(ir, &replica, &az, &placement);
    let edge = lower::edge(ir, &"e1".parse().unwrap(), &az, &placement);
    let key_server = lower::key_server(ir, &"k1".parse().unwrap(), &az, &placement);
    let mut sent: Vec<&Resource> = gateway.iter().chain(&edge).chain(&key_server).collect();
    // A node without workloads receives no resource that another node does not.
    let names: BTreeSet<&NodeName> = ir.workloads.iter().map(|workload| &workload.node).collect();
    let nodes: Vec<_> = names
        .iter()
        .map(|name| (name, lower::node(ir, name, &az, &placement)))
        .collect();
    sent.extend(nodes.iter().flat_map(|(_, program)| program));
    for resource in &sent {
        assert!(
            resources.contains(resource),
            "{} is not the compiler's",
            resource.name()
        );
    }
    for resource in resources {
        // Policies may leave a direct endpoint without a node that may reach it.
        let is_needed = !matches!(resource, Resource::DirectEndpoint(_));
        assert!(
            !is_needed || sent.contains(&resource),
            "nobody receives {}",
            resource.name()
        );
    }
    let node_texts = nodes
        .iter()
        .map(|(name, program)| format!("# node {name}\n{}\n", show(program)))
        .collect();
    // Every edge and every key server receives the tenant itself; alone it is no text.
    let beyond_tenant = |program: &[Resource]| {
        if program.len() > 1 {
            show(program)
        } else {
            String::new()
        }
    };
    [
        ("gateway", show(&gateway)),
        ("node", node_texts),
        ("edge", beyond_tenant(&edge)),
        ("key-server", beyond_tenant(&key_server)),
    ]
}

/// One policy file with its directives.
struct GoldenCase {
    tenant: TenantName,
    documents: Vec<Arc<Document>>,
    ids: BTreeMap<ServiceKey, ServiceId>,
    jwks: BTreeMap<String, String>,
    parsed: Vec<Diagnostic>,
    questions: Vec<String>,
    /// Requests by clients outside the mesh.
    arrivals: Vec<String>,
    /// Such requests and connections that are explained.
    explained_arrivals: Vec<String>,
    journeys: Vec<String>,
}

impl GoldenCase {
    fn read(path: &Path) -> Self {
        let own = fs::read_to_string(path).unwrap();
        let tenant = TenantName::new("alpha").unwrap();
        let (documents, parsed, questions) = (Vec::new(), Vec::new(), Vec::new());
        let mut case = GoldenCase {
            tenant,
            documents,
            ids: BTreeMap::new(),
            jwks: BTreeMap::new(),
            parsed,
            questions,
            arrivals: Vec::new(),
            explained_arrivals: Vec::new(),
            journeys: Vec::new(),
        };
        for line in own.lines() {
            // The lines after # are comments in YAML, so a file remains a policy as users write it.
            if let Some(name) = line.strip_prefix("#with ") {
                let name = format!("_{}.yaml", name.trim());
                case.add(&name, &fs::read_to_string(folder().join(&name)).unwrap());
            }
            if let Some((uri, keys)) = line
                .strip_prefix("#jwks ")
                .and_then(|line| line.split_once(' '))
            {
                case.jwks.insert(uri.to_owned(), keys.to_owned());
            }
            // `#!` is a request to explain, `#?` one to the oracle, and `#>` one that arrives at a
            // Gateway; `#!>` is such an arrival to explain.
            case.journeys
                .extend(line.strip_prefix("#! ").map(str::to_owned));
            case.explained_arrivals
                .extend(line.strip_prefix("#!> ").map(str::to_owned));
            case.questions
                .extend(line.strip_prefix("#? ").map(str::to_owned));
            case.arrivals
                .extend(line.strip_prefix("#> ").map(str::to_owned));
        }
        let own = certificates::fill_in(&own);
        case.add(&path.file_name().unwrap().to_string_lossy(), &own);
        // The ids follow the order of the names, so that a golden does not change with the order of
        // files.
        let keys = service_keys(&case.tenant, &case.documents);
        case.ids = keys
            .into_iter()
            .zip(1..)
            .map(|(key, id)| (key, ServiceId::new(id).unwrap()))
            .collect();
        case
    }

    fn add(&mut self, file: &str, text: &str) {
        let parsed = parse(file, text);
        self.documents
            .extend(parsed.documents.into_iter().map(Arc::new));
        self.parsed.extend(parsed.diagnostics);
    }

    fn diagnostics(&self, found: &[Diagnostic]) -> String {
        // The tests of the analysis show the codes.
        let text = |d: &Diagnostic| d.to_string().replacen(&format!("[{}]", d.code), "", 1);
        let mut out = String::new();
        for diagnostic in &self.parsed {
            writeln!(out, "{}", text(diagnostic)).unwrap();
        }
        for diagnostic in found {
            let mut diagnostic = diagnostic.clone();
            let document = self
                .documents
                .iter()
                .find(|d| Some(&d.origin) == diagnostic.origin.as_ref());
            if let Some(document) = document {
                diagnostic.origin = Some(pinpoint(
                    &document.text,
                    &document.origin,
                    &diagnostic.field,
                ));
            }
            writeln!(out, "{}", text(&diagnostic)).unwrap();
        }
        out
    }
}

/// Parses the attributes of a client, each written as `:NAME=VALUE`.
fn parse_client(attributes: &[&str]) -> OracleClient {
    let mut client = OracleClient::default();
    for attribute in attributes {
        let (name, value) = attribute.split_once('=').unwrap();
        match ClientAttribute::of_name(name).unwrap() {
            ClientAttribute::Scheme => client.is_tls = value == "https",
            ClientAttribute::SourceNamespace => client.namespace = Some(value.parse().unwrap()),
            ClientAttribute::SourceLabel(key) => {
                client.labels.insert(key.to_owned(), value.to_owned());
            }
        }
    }
    client
}

fn answer(ir: &Ir, question: &str) -> String {
    let words: Vec<&str> = question.split_whitespace().collect();
    let [method, service, host, target, headers @ ..] = words.as_slice() else {
        panic!("{question:?} is not a question")
    };
    let (service, port) = service.rsplit_once(':').unwrap();
    let (attributes, headers): (Vec<&str>, Vec<&str>) =
        headers.iter().partition(|word| word.starts_with(':'));
    let request = OracleRequest {
        service: format!("{}/{service}", ir.tenant.name).parse().unwrap(),
        port: port.parse().unwrap(),
        host: (*host).to_owned(),
        method: (*method).to_owned(),
        target: (*target).to_owned(),
        headers: parse_headers(&headers),
        client: parse_client(&attributes),
    };
    let mut text = verdict_text(ir, decide(ir, &request));
    // Backends without filters of their own get the same request.
    let rule = deciding_rule(ir, &request);
    let has_filters = rule.is_some_and(|rule| rule.filters.is_some());
    let backends = rule.map_or(&[][..], |rule| match &rule.action {
        RouteAction::Split(backends) => backends,
        RouteAction::Answer(_) | RouteAction::Refuse { .. } => &[],
    });
    for (at, backend) in backends.iter().enumerate() {
        let is_first = has_filters && at == 0;
        if let Some(sent) = forwarded(ir, &request, at)
            && (is_first || backend.filters.is_some())
        {
            write!(text, "\n    forwarded: {} {}", sent.host, sent.target).unwrap();
            for (name, value) in &sent.headers {
                write!(text, " {name}:{value}").unwrap();
            }
        }
    }
    format!("{question}\n  => {text}\n")
}

/// Parses the words `header:value` of a directive.
fn parse_headers(words: &[&str]) -> Vec<(String, String)> {
    let pairs = words.iter().map(|word| word.split_once(':').unwrap());
    pairs
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// Formats the decision about a request, with the endpoints of each backend.
fn verdict_text(ir: &Ir, verdict: RoutingVerdict) -> String {
    match verdict {
        RoutingVerdict::NoService => "no such service".to_owned(),
        RoutingVerdict::NoRule => "404".to_owned(),
        RoutingVerdict::Service { service, port } => format!("{service}:{port}"),
        RoutingVerdict::Answer { rule, answer } => {
            let mut text = format!("{} {} answers", rule.kind, rule.rule);
            match answer {
                // The oracle has no answer where the gateway refuses the request itself.
                None => text += " 400",
                Some(answer) => {
                    write!(text, " {}", answer.status).unwrap();
                    for (name, value) in &answer.headers {
                        write!(text, " {name}:{value}").unwrap();
                    }
                    write!(text, " {:?}", String::from_utf8_lossy(&answer.body)).unwrap();
                }
            }
            text
        }
        RoutingVerdict::Refuse { rule, status, .. } => {
            format!("refuse {status} by {} {}", rule.kind, rule.rule)
        }
        RoutingVerdict::Split {
            rule,
            backends,
            attempts,
            faults,
            cors,
            mirrors,
        } => {
            let attempts = text::attempts(attempts.as_deref());
            let faults = text::faults(faults.as_deref());
            let cors = text::cors(cors.as_deref());
            let mirrors = text::mirrors(&mirrors);
            let effects = [attempts, faults, cors, mirrors].concat();
            let mut shares = format!("{} {}{effects}", rule.kind, rule.rule);
            for backend in &backends {
                let able: Vec<String> = endpoints(ir, &backend.target)
                    .iter()
                    .map(|(w, port)| format!("{}:{port}", w.name))
                    .collect();
                let action = RouteAction::Split(vec![backend.clone()]);
                write!(
                    shares,
                    "\n    {} on [{}]",
                    text::action(&action),
                    able.join(" ")
                )
                .unwrap();
            }
            shares
        }
    }
}
