//! Finds objects whose `apiVersion` or kind its API has deprecated.

use std::sync::Arc;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::{Document, ObjectKind};

use crate::AnalysisDiagnostics;

/// Group of Gateway API, whose versions before v1 are deprecated for each kind that is in v1.
const GATEWAY_API: &str = "gateway.networking.k8s.io/";

pub(crate) fn check(documents: &[Arc<Document>], report: &mut AnalysisDiagnostics) {
    for document in documents {
        let kind = document.object.kind();
        if kind == ObjectKind::Endpoints {
            let problem = "Kubernetes has deprecated Endpoints since version 1.33";
            let fix = "write an EndpointSlice";
            report.warn(Code::DeprecatedApi, document, "kind", problem, fix);
            continue;
        }
        let Some(newest) = kind.api_versions().first() else {
            continue;
        };
        let written = api_version(&document.text);
        let is_in_v1 = newest.ends_with("/v1") && newest.starts_with(GATEWAY_API);
        // Gateway API still serves ReferenceGrants of v1beta1 without a warning.
        if is_in_v1 && kind != ObjectKind::ReferenceGrant && written != *newest {
            let problem = format!("Gateway API has deprecated {written:?} for {kind}");
            let fix = format!("write apiVersion: {newest}");
            report.warn(Code::DeprecatedApi, document, "apiVersion", problem, fix);
        }
    }
}

/// Returns the `apiVersion` of a document, in block or in flow style.
fn api_version(text: &str) -> &str {
    let rest = text.split_once("apiVersion").map_or("", |(_, rest)| rest);
    let is_mark = |c: char| c.is_whitespace() || matches!(c, ':' | '"' | '\'');
    let rest = rest.trim_start_matches(is_mark);
    let end = rest.find(|c: char| c.is_whitespace() || matches!(c, ',' | '"' | '\'' | '}'));
    &rest[..end.unwrap_or(rest.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_in_each_style() {
        for text in [
            "apiVersion: v1\nkind: Service",
            "kind: Service\napiVersion: \"v1\"\n",
            "{\"apiVersion\": \"v1\", \"kind\": \"Service\"}",
            "{apiVersion: v1}",
        ] {
            assert_eq!(api_version(text), "v1", "{text}");
        }
    }
}
