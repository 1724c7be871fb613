//! What Canal makes of each document of a file. The objects of the file are compiled together in
//! one tenant, and each diagnostic is counted against the document that it is about.

use std::collections::BTreeMap;
use std::fmt;

use canal_compiler::{CompileInput, build_ir, service_keys};
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::ids::{ServiceId, ServiceKey};
use canal_yaml::tree::{self, YamlNode};

use crate::outcome::{Meaning, meanings, reason_of};
use crate::surroundings::Surroundings;

/// A kind of Kubernetes object, by the group of its `apiVersion`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct KindName {
    /// The group, which is empty for Kubernetes' core kinds.
    pub(crate) group: String,
    pub(crate) kind: String,
}

impl fmt::Display for KindName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.group.as_str() {
            "" => f.write_str(&self.kind),
            group => write!(f, "{}.{group}", self.kind),
        }
    }
}

/// Groups whose documents are policy; the others are applications and their parts.
const POLICY_GROUPS: [&str; 6] = [
    "networking.istio.io",
    "security.istio.io",
    "telemetry.istio.io",
    "extensions.istio.io",
    "gateway.networking.k8s.io",
    "gateway.networking.x-k8s.io",
];

/// Kinds that Canal means to read in full in its first part of policy: all documents of these are
/// to load.
const DUE_KINDS: [(&str, &[&str]); 6] = [
    (
        "",
        &[
            "Service",
            "Endpoints",
            "Pod",
            "Namespace",
            "ServiceAccount",
            "Secret",
            "ConfigMap",
            "List",
        ],
    ),
    ("discovery.k8s.io", &["EndpointSlice"]),
    (
        "networking.istio.io",
        &["VirtualService", "DestinationRule", "Gateway"],
    ),
    (
        "security.istio.io",
        &[
            "AuthorizationPolicy",
            "RequestAuthentication",
            "PeerAuthentication",
        ],
    ),
    (
        "gateway.networking.k8s.io",
        &[
            "GatewayClass",
            "Gateway",
            "ListenerSet",
            "HTTPRoute",
            "GRPCRoute",
            "TLSRoute",
            "TCPRoute",
            "ReferenceGrant",
        ],
    ),
    ("gateway.networking.x-k8s.io", &["XListenerSet"]),
];

impl KindName {
    fn of(api_version: &str, kind: &str) -> Self {
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        Self {
            group: group.to_owned(),
            kind: kind.to_owned(),
        }
    }

    pub(crate) fn is_policy(&self) -> bool {
        POLICY_GROUPS.contains(&self.group.as_str())
    }

    pub(crate) fn is_due(&self) -> bool {
        DUE_KINDS
            .iter()
            .any(|(group, kinds)| *group == self.group && kinds.contains(&self.kind.as_str()))
    }
}

/// A document and what Canal reports of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DocumentVerdict {
    pub(crate) kind: KindName,
    path: String,
    line: usize,
    /// The first error, else the first warning, that says that Canal does not do what the document
    /// says; `None` if it is loaded.
    problem: Option<(String, String)>,
    /// Whether the document is loaded with a status that its API demands.
    pub(crate) has_status: bool,
}

impl DocumentVerdict {
    pub(crate) fn is_loaded(&self) -> bool {
        self.problem.is_none()
    }

    /// Returns the file and line of the document.
    pub(crate) fn position(&self) -> String {
        format!("{}:{}", self.path, self.line)
    }

    /// Returns what counts against the document; empty if it is loaded.
    pub(crate) fn problem_text(&self) -> String {
        match &self.problem {
            None => String::new(),
            Some((field, problem)) if field.is_empty() => problem.clone(),
            Some((field, problem)) => format!("{field}: {problem}"),
        }
    }

    /// Returns the reason why the document is not loaded, without what is particular to it.
    pub(crate) fn reason(&self) -> Option<String> {
        let (field, problem) = self.problem.as_ref()?;
        Some(reason_of(field, problem))
    }
}

impl fmt::Display for DocumentVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: ", self.position(), self.kind)?;
        match self.is_loaded() {
            true => f.write_str("loaded"),
            false => f.write_str(&self.problem_text()),
        }
    }
}

/// Evaluates each Kubernetes object of a file. Documents without `apiVersion` and `kind`, such as the
/// values of a chart, are no objects and are left out.
pub(crate) fn evaluate_file(
    surroundings: &Surroundings,
    path: &str,
    text: &str,
) -> Vec<DocumentVerdict> {
    let chunks = documents(text);
    let parsed = canal_sources::parse(path, text);
    let origins: Vec<usize> = parsed
        .documents
        .iter()
        .map(|document| document.origin.line as usize)
        .collect();
    let mut diagnostics = parsed.diagnostics;
    diagnostics.extend(compiled(surroundings, parsed.documents));
    let diagnostics = meanings(&diagnostics);
    // A document ends where the next one begins, and diagnostics give line numbers.
    let ends = chunks.iter().skip(1).map(|(line, _)| *line);
    let ends: Vec<usize> = ends.chain([usize::MAX]).collect();
    let evaluate = |((line, text), end): (&(usize, &str), usize)| {
        let lines = *line..end;
        let own: Vec<(&Diagnostic, Meaning)> = diagnostics
            .iter()
            .filter(|(it, _)| line_in(it, path).is_some_and(|at| lines.contains(&at)))
            .copied()
            .collect();
        // A document with neither a diagnostic nor an object was skipped silently, which is a
        // problem too.
        let problem = match worst(&own) {
            Some(diagnostic) => Some((diagnostic.field.clone(), diagnostic.problem.clone())),
            None if origins.iter().any(|at| lines.contains(at)) => None,
            None => Some((String::new(), "Canal makes no object of it".to_owned())),
        };
        // Istio and Gateway API demand a status for such an object, so it counts as loaded.
        let has_status =
            problem.is_none() && own.iter().any(|(_, meaning)| *meaning == Meaning::Demanded);
        Some(DocumentVerdict {
            kind: kind_of(text)?,
            path: path.to_owned(),
            line: *line,
            problem,
            has_status,
        })
    };
    chunks.iter().zip(ends).filter_map(evaluate).collect()
}

/// Returns the line of a diagnostic about the file.
fn line_in(diagnostic: &Diagnostic, path: &str) -> Option<usize> {
    let origin = diagnostic.origin.as_ref()?;
    (&*origin.file == path).then_some(origin.line as usize)
}

/// Returns the first error, else the first warning, that counts against its document.
fn worst<'d>(diagnostics: &[(&'d Diagnostic, Meaning)]) -> Option<&'d Diagnostic> {
    diagnostics
        .iter()
        .filter(|(_, meaning)| *meaning == Meaning::NotLoaded)
        .map(|(diagnostic, _)| *diagnostic)
        .min_by_key(|diagnostic| diagnostic.severity != Severity::Error)
}

/// Compiles the objects of a file with those around them, and returns what the compiler reports.
fn compiled(
    surroundings: &Surroundings,
    own: Vec<canal_model::policy::Document>,
) -> Vec<Diagnostic> {
    let documents = surroundings.around(own);
    let tenant = &surroundings.tenant;
    let service_ids: BTreeMap<ServiceKey, ServiceId> = service_keys(tenant, &documents)
        .into_iter()
        .zip((1..).map_while(|id| ServiceId::new(id).ok()))
        .collect();
    let input = CompileInput {
        tenant,
        documents: &documents,
        service_ids: &service_ids,
        jwks: &BTreeMap::new(),
    };
    let (ir, diagnostics) = build_ir(&input);
    assert!(ir.is_some(), "the surroundings have no tenant");
    diagnostics
}

fn kind_of(text: &str) -> Option<KindName> {
    let root = tree::parse(text).ok()?;
    let word = |field: &str| root.field(field).and_then(YamlNode::text);
    Some(KindName::of(word("apiVersion")?, word("kind")?))
}

/// Splits a file at lines that begin with `---`, and returns each document with its first line.
fn documents(text: &str) -> Vec<(usize, &str)> {
    let mut documents = Vec::new();
    let (mut start, mut first_line, mut offset) = (0, 1, 0);
    for (n, line) in text.split_inclusive('\n').enumerate() {
        if line.starts_with("---") {
            documents.push((first_line, &text[start..offset]));
            start = offset + line.len();
            first_line = n + 2;
        }
        offset += line.len();
    }
    documents.push((first_line, &text[start..]));
    documents.retain(|(_, text)| !text.trim().is_empty());
    documents
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Evaluates a text and returns each document's kind, and the reason if it is not loaded.
    fn reasons_of(text: &str) -> Vec<(String, Option<String>)> {
        let documents = evaluate_file(&Surroundings::new([]), "a.yaml", text);
        let outcome = |document: &DocumentVerdict| (document.kind.kind.clone(), document.reason());
        documents.iter().map(outcome).collect()
    }

    #[test]
    fn each_document_has_an_outcome_with_its_reason() {
        let text = "apiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: b}\n\
                    spec: {selector: {app: a}, ports: [{port: 80}]}\n\
                    ---\nvalues: 1\n---\napiVersion: networking.istio.io/v1\nkind: EnvoyFilter\nmetadata: {name: a}\n";
        let documents = evaluate_file(&Surroundings::new([]), "a.yaml", text);
        let kinds: Vec<String> = documents
            .iter()
            .map(|document| document.kind.to_string())
            .collect();
        assert_eq!(kinds, ["Service", "EnvoyFilter.networking.istio.io"]);
        assert!(documents[0].is_loaded(), "{}", documents[0]);
        assert!(!documents[1].is_loaded());
        assert_eq!(documents[1].line, 8);
        assert!(documents[0].kind.is_due() && !documents[0].kind.is_policy());
        assert!(!documents[1].kind.is_due() && documents[1].kind.is_policy());
    }

    #[test]
    fn what_the_compiler_reports_counts_against_its_document() {
        let route = |parent: &str, rule: &str| {
            format!(
                "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: a}}\n\
                 spec: {{parentRefs: [{parent}], rules: [{rule}]}}\n---\n"
            )
        };
        let service = "{group: '', kind: Service, name: s}";
        let text = [
            route(service, "{backendRefs: [{name: s, port: 80}]}"),
            // The Gateway does not exist, so the route waits for it.
            route("{name: g}", "{backendRefs: [{name: s, port: 80}]}")
                .replace("name: a}", "name: b}"),
            // Without a backend the API demands 500, and a status.
            route(service, "{}").replace("name: a}", "name: c}"),
        ]
        .concat();
        let reasons: Vec<Option<String>> = reasons_of(&text)
            .into_iter()
            .map(|(_, reason)| reason)
            .collect();
        assert_eq!(reasons, [None, None, None]);
        let documents = evaluate_file(&Surroundings::new([]), "a.yaml", &text);
        let statuses: Vec<bool> = documents
            .iter()
            .map(|document| document.has_status)
            .collect();
        assert_eq!(statuses, [false, true, true]);
    }

    #[test]
    fn a_rule_that_is_closed_counts_against_its_document() {
        let text = "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: a}\n\
                    spec:\n  hosts: [s]\n  http:\n  - route: [{destination: {host: s}}]\n    fault: {abort: {http2Error: CANCEL}}\n";
        let [(kind, reason)] = reasons_of(text).try_into().unwrap();
        assert_eq!(kind, "VirtualService");
        assert_eq!(
            reason.as_deref(),
            Some(
                "spec.http[].fault.abort.http2Error: resets of HTTP/2 streams are not supported, as in Istio"
            )
        );
    }

    #[test]
    fn a_document_with_a_status_that_its_api_demands_is_loaded() {
        let group = "apiVersion: gateway.networking.k8s.io/v1";
        let gateway = "{gatewayClassName: canal, listeners: [{name: l, port: 80, protocol: HTTP, hostname: a.example.com}, \
                       {name: m, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: malformed}]}}]}";
        let route = |name: &str, rest: &str| {
            format!(
                "---\n{group}\nkind: HTTPRoute\nmetadata: {{name: {name}}}\n\
                 spec: {{{rest}, rules: [{{backendRefs: [{{name: s, port: 80}}]}}]}}\n"
            )
        };
        let text = [
            format!("{group}\nkind: Gateway\nmetadata: {{name: g}}\nspec: {gateway}\n"),
            route("a", "parentRefs: [{name: g, sectionName: x}]"),
            route("b", "parentRefs: [{name: g, port: 81}]"),
            route("c", "parentRefs: [{name: g, sectionName: l}], hostnames: [b.example.com]"),
            route("d, namespace: other", "parentRefs: [{name: g, namespace: default}]"),
            format!(
                "---\n{group}\nkind: ListenerSet\nmetadata: {{name: e}}\n\
                 spec: {{parentRef: {{name: g}}, listeners: [{{name: n, port: 82, protocol: HTTP}}]}}\n"
            ),
            "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {name: f}\n\
             spec: {hosts: [www.example.com], http: [{route: [{destination: {host: s}}]}]}\n"
                .to_owned(),
            "---\napiVersion: v1\nkind: Secret\nmetadata: {name: malformed}\n\
             type: kubernetes.io/tls\ndata: {tls.crt: SGVsbG8=, tls.key: SGVsbG8=}\n"
                .to_owned(),
        ]
        .concat();
        let documents = evaluate_file(&Surroundings::new([]), "a.yaml", &text);
        assert_eq!(documents.len(), 8);
        for document in &documents {
            assert!(document.is_loaded(), "{document}");
            let is_secret = document.kind.kind == "Secret";
            assert_eq!(document.has_status, !is_secret, "{document}");
        }
    }

    #[test]
    fn each_gateway_class_that_a_file_names_is_canals() {
        let gateway = |name: &str, class: &str, protocol: &str| {
            format!(
                "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: {name}}}\n\
                 spec: {{gatewayClassName: {class}, listeners: [{{name: l, port: 80, protocol: {protocol}}}]}}\n---\n"
            )
        };
        let class = "apiVersion: gateway.networking.k8s.io/v1\nkind: GatewayClass\nmetadata: {name: other}\n\
                     spec: {controllerName: example.com/controller}\n---\n";
        let text = [
            class,
            &gateway("a", "other", "HTTP"),
            &gateway("b", "unknown", "HTTP"),
            &gateway("c", "unknown", "UDP"),
        ]
        .concat();
        let reasons: Vec<Option<String>> = reasons_of(&text)
            .into_iter()
            .map(|(_, reason)| reason)
            .collect();
        assert_eq!(reasons[..3], [None, None, None]);
        let closed = "spec.listeners[].protocol: UDP listeners are not served in this version";
        assert_eq!(reasons[3].as_deref(), Some(closed));
    }

    #[test]
    fn the_suites_own_services_are_around_its_files() {
        let base = "apiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec: {selector: {a: b}, ports: [{port: 8080}]}\n";
        let surroundings = Surroundings::new([("base.yaml", base)]);
        let text = |port: u16| {
            format!(
                "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: a}}\n\
                 spec: {{parentRefs: [{{group: '', kind: Service, name: s}}], rules: [{{backendRefs: [{{name: s, port: {port}}}]}}]}}\n"
            )
        };
        for (port, has_status) in [(8080, false), (80, true)] {
            let [document] = evaluate_file(&surroundings, "a.yaml", &text(port))
                .try_into()
                .unwrap();
            assert!(document.is_loaded(), "{document}");
            assert_eq!(document.has_status, has_status, "{port}");
        }
    }
}
