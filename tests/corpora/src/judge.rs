//! What Canal makes of each document of a file: it is loaded as written, or something in it is
//! reported. The module reads one document at a time and does not compile several objects together.

use std::fmt;

use canal_model::diagnostic::Severity;
use canal_yaml::tree::{self, YamlNode};

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
pub(crate) struct JudgedDocument {
    pub(crate) kind: KindName,
    path: String,
    line: usize,
    /// The first error, else the first warning; `None` if the document is loaded as written.
    problem: Option<String>,
}

impl JudgedDocument {
    pub(crate) fn is_loaded(&self) -> bool {
        self.problem.is_none()
    }
}

impl fmt::Display for JudgedDocument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let problem = self.problem.as_deref().unwrap_or("loaded");
        write!(f, "{}:{}: {}: {problem}", self.path, self.line, self.kind)
    }
}

/// Judges each Kubernetes object of a file. Documents without `apiVersion` and `kind`, such as the
/// values of a chart, are no objects and are left out.
pub(crate) fn judge_file(path: &str, text: &str) -> Vec<JudgedDocument> {
    documents(text)
        .into_iter()
        .filter_map(|(line, text)| judge_document(path, line, text))
        .collect()
}

/// Judges the document that begins at a line of a file.
pub(crate) fn judge_document(path: &str, line: usize, text: &str) -> Option<JudgedDocument> {
    let kind = kind_of(text)?;
    let parsed = canal_sources::parse(path, text);
    let worst = parsed
        .diagnostics
        .iter()
        .min_by_key(|diagnostic| diagnostic.severity != Severity::Error);
    let problem = match worst {
        Some(diagnostic) if diagnostic.field.is_empty() => Some(diagnostic.problem.clone()),
        Some(diagnostic) => Some(format!("{}: {}", diagnostic.field, diagnostic.problem)),
        None if parsed.documents.is_empty() => Some("Canal creates no object from it".to_owned()),
        None => None,
    };
    Some(JudgedDocument {
        kind,
        path: path.to_owned(),
        line,
        problem,
    })
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

    #[test]
    fn each_document_has_an_outcome_with_its_reason() {
        let text = "apiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: b}\nspec: {ports: [{port: 80}]}\n\
                    ---\nvalues: 1\n---\napiVersion: networking.istio.io/v1\nkind: EnvoyFilter\nmetadata: {name: a}\n";
        let judged = judge_file("a.yaml", text);
        let kinds: Vec<String> = judged
            .iter()
            .map(|document| document.kind.to_string())
            .collect();
        assert_eq!(kinds, ["Service", "EnvoyFilter.networking.istio.io"]);
        assert!(judged[0].is_loaded(), "{}", judged[0]);
        assert!(!judged[1].is_loaded());
        assert_eq!(judged[1].line, 8);
        assert!(judged[0].kind.is_due() && !judged[0].kind.is_policy());
        assert!(!judged[1].kind.is_due() && judged[1].kind.is_policy());
    }
}
