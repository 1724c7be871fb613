//! The page `docs/compatibility-policy.md`: the documents of policy that Canal does not load, by name,
//! with the reason that the specification of their API gives for it. It evaluates nothing. Start at
//! [`PolicyDocument::add`].

use std::fmt::Write;

use crate::corpus::Corpus;
use crate::evaluation::DocumentVerdict;

/// Share of the documents of kinds that are due, of each corpus, that are to be loaded, in percent.
/// The goal for the corpora; nobody derived it from another number.
pub(crate) const LOADED_PERCENT_MIN: usize = 95;

const HEAD: &str = "# Documents of policy that Canal does not load

`canal-corpora --write-policy docs/compatibility-policy.md` writes this page; do not edit it. It reads
every document of a group of Istio's or Gateway API's in the corpora, compiles the objects of a file in
a tenant, and lists each document of which Canal does not do what it says. The last column is what the
specification says about it; a document without such a reason is a gap of Canal.
";

/// Kinds that extend Envoy, and what their specification says. They are listed and not counted.
const LEFT_OUT: [(&str, &str); 2] = [
    (
        "EnvoyFilter",
        "EnvoyFilter: it customizes the Envoy configuration that istiod generates; Canal runs no Envoy",
    ),
    (
        "WasmPlugin",
        "WasmPlugin: it extends the Istio proxy by WebAssembly filters; Canal runs no Envoy",
    ),
];

/// Kinds of documents with a part of what Canal reports of them, and what the specification says.
const REASONS: [(&str, &str, &str); 10] = [
    (
        "Gateway",
        "port 15008",
        "ListenerConditionReason PortUnavailable: the port is not supported by the implementation",
    ),
    (
        "Gateway",
        "UDP listeners are not served",
        "ListenerConditionReason UnsupportedProtocol; feature UDPRoute is not claimed",
    ),
    (
        "Gateway",
        "TLS is not terminated for TLSRoutes",
        "TLSRouteModeTerminate is an extended feature",
    ),
    (
        "TLSRoute",
        "TLS is not terminated for TLSRoutes",
        "TLSRouteModeTerminate is an extended feature",
    ),
    (
        "Gateway",
        "spec.tls.backend",
        "GatewayBackendClientCertificate is an extended feature",
    ),
    (
        "BackendTLSPolicy",
        "is not supported in this version",
        "BackendTLSPolicy is an extended feature of the profiles of Gateways",
    ),
    (
        "UDPRoute",
        "is not supported in",
        "UDPRoute is a feature of the profile GATEWAY-UDP only",
    ),
    (
        "HTTPRoute",
        "a filter of type URLRewrite for one backend",
        "HTTPBackendRef.filters: support is implementation-specific; feature HTTPRouteBackendURLRewrite",
    ),
    (
        "HTTPRoute",
        "cannot attach to ServiceImport",
        "ParentReference.kind: support of other kinds is implementation-specific",
    ),
    (
        "TCPRoute",
        "attach to listeners of Gateways only",
        "ParentReference: Services are parents in the profiles of meshes, which have no TCPRoute",
    ),
];

/// The page, as far as it is written.
pub(crate) struct PolicyDocument {
    text: String,
    is_bar_held: bool,
}

impl Default for PolicyDocument {
    fn default() -> Self {
        Self {
            text: HEAD.to_owned(),
            is_bar_held: true,
        }
    }
}

impl PolicyDocument {
    /// Adds a corpus. Returns its figure beside the bar.
    pub(crate) fn add(&mut self, corpus: &Corpus, documents: &[DocumentVerdict]) -> String {
        let policy = documents.iter().filter(|it| it.kind.is_policy());
        let (left_out, counted): (Vec<_>, Vec<_>) =
            policy.partition(|it| left_out(it).is_some() && !it.is_loaded());
        let loaded_policy = counted.iter().filter(|it| it.is_loaded()).count();
        let due = documents.iter().filter(|it| it.kind.is_due());
        let (loaded, missing): (Vec<_>, Vec<_>) = due.partition(|it| it.is_loaded());
        let (loaded, all) = (loaded.len(), loaded.len() + missing.len());
        // The other kinds are listed below, and are no part of the bar.
        let is_held = loaded * 100 >= all * LOADED_PERCENT_MIN;
        self.is_bar_held &= is_held;
        let percent = (loaded * 100).checked_div(all).unwrap_or(100);
        let figure = format!(
            "{loaded} of {all} documents of kinds that are due are loaded ({percent} %; the bar is {LOADED_PERCENT_MIN} %); of all documents of policy {loaded_policy} of {}, and {} more are left out of the count",
            counted.len(),
            left_out.len()
        );
        // Writing to a String cannot fail.
        let _ = write!(
            self.text,
            "\n## {}\n\n`{}` of `{}` {}: {figure}.\n\n| document | kind | what Canal reports | what the specification says |\n|---|---|---|---|\n",
            corpus.name,
            corpus.folder(),
            corpus.module,
            corpus.version
        );
        let missing = counted.into_iter().filter(|it| !it.is_loaded());
        for document in missing {
            let reason = reason(document).unwrap_or("nothing: Canal lacks it");
            self.row(document, reason);
        }
        for document in left_out {
            let reason = self::left_out(document).unwrap_or_default();
            self.row(document, &format!("left out of the count. {reason}"));
        }
        let word = if is_held { "held" } else { "MISSED" };
        format!("{}: {word}: {figure}", corpus.name)
    }

    fn row(&mut self, document: &DocumentVerdict, reason: &str) {
        let problem = document.problem_text().replace('|', "\\|");
        let _ = writeln!(
            self.text,
            "| `{}` | {} | {problem} | {reason} |",
            document.position(),
            document.kind.kind,
        );
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns whether enough documents of every corpus are loaded.
    pub(crate) fn is_bar_held(&self) -> bool {
        self.is_bar_held
    }
}

fn left_out(document: &DocumentVerdict) -> Option<&'static str> {
    let mut kinds = LEFT_OUT.iter();
    let found = kinds.find(|(kind, _)| *kind == document.kind.kind);
    found.map(|(_, reason)| *reason)
}

fn reason(document: &DocumentVerdict) -> Option<&'static str> {
    let problem = document.problem_text();
    let mut reasons = REASONS.iter();
    let found =
        reasons.find(|(kind, part, _)| *kind == document.kind.kind && problem.contains(part));
    found.map(|(_, _, reason)| *reason)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::CORPORA;
    use crate::evaluation::evaluate_file;
    use crate::surroundings::Surroundings;

    #[test]
    fn a_document_that_is_not_loaded_has_its_row() {
        let text = "apiVersion: networking.istio.io/v1\nkind: EnvoyFilter\nmetadata: {name: a}\n\
                    ---\napiVersion: gateway.networking.k8s.io/v1\nkind: BackendTLSPolicy\nmetadata: {name: a}\n\
                    ---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: a}\n\
                    spec: {gatewayClassName: canal, listeners: [{name: dns, port: 53, protocol: UDP}]}\n";
        let documents = evaluate_file(&Surroundings::new([]), "a.yaml", text);
        let mut page = PolicyDocument::default();
        let figure = page.add(&CORPORA[0], &documents);
        assert!(
            figure.contains("MISSED: 0 of 1 documents of kinds that are due are loaded (0 %; the bar is 95 %); of all documents of policy 0 of 2, and 1 more are left out"),
            "{figure}"
        );
        assert!(!page.is_bar_held());
        let text = page.text();
        for part in [
            "| `a.yaml:1` | EnvoyFilter | ",
            "| left out of the count. EnvoyFilter: it customizes",
            "| `a.yaml:5` | BackendTLSPolicy | ",
            " | BackendTLSPolicy is an extended feature of",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
