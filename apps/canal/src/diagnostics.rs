//! Diagnostics of the controller and the compiler as lines and as JSON. Knows no verb.

use canal_wire::api::{Change, Diagnostic, Severity, change};
use serde_json::{Value, json};

/// `file:line:column: error: object: field: problem`, then the mend.
pub(crate) fn lines(diagnostics: &[Diagnostic]) -> Vec<String> {
    diagnostics.iter().flat_map(one).collect()
}

fn one(diagnostic: &Diagnostic) -> Vec<String> {
    let Diagnostic { file, line, column, object, field, problem, mend, .. } = diagnostic;
    let spot = match (line, column) {
        (0, _) => String::new(),
        (line, 0) => format!(":{line}"),
        (line, column) => format!(":{line}:{column}"),
    };
    let place = if file.is_empty() { String::new() } else { format!("{file}{spot}: ") };
    let parts = [object, field, problem].into_iter().filter(|p| !p.is_empty()).cloned().collect::<Vec<_>>();
    let mut lines = vec![format!("{place}{}: {}", severity(diagnostic), parts.join(": "))];
    if !mend.is_empty() {
        lines.push(format!("  mend: {mend}"));
    }
    lines
}

fn severity(diagnostic: &Diagnostic) -> &'static str {
    match diagnostic.severity() {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}

/// Whether any of them is an error.
pub(crate) fn any_error(diagnostics: &[Diagnostic]) -> bool {
    diagnostics.iter().any(|d| d.severity() == Severity::Error)
}

/// All as JSON.
pub(crate) fn values(diagnostics: &[Diagnostic]) -> Value {
    let value = |d: &Diagnostic| {
        json!({
            "severity": severity(d), "file": d.file, "line": d.line, "column": d.column,
            "object": d.object, "field": d.field, "problem": d.problem, "mend": d.mend,
        })
    };
    diagnostics.iter().map(value).collect()
}

/// What a change was.
pub(crate) fn what(change: &Change) -> &'static str {
    match change.what() {
        change::What::Created => "created",
        change::What::Changed => "changed",
        change::What::Unchanged => "unchanged",
        change::What::Deleted => "deleted",
    }
}

/// `HTTPRoute bookinfo/reviews`.
pub(crate) fn object(change: &Change) -> String {
    let Change { kind, namespace, name, .. } = change;
    if namespace.is_empty() { format!("{kind} {name}") } else { format!("{kind} {namespace}/{name}") }
}

/// Changes as JSON, without their texts.
pub(crate) fn changes(changes: &[Change]) -> Value {
    let value = |c: &Change| json!({ "what": what(c), "kind": c.kind, "namespace": c.namespace, "name": c.name });
    changes.iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diagnostic_reads_like_a_compilers() {
        let diagnostic = Diagnostic {
            severity: Severity::Error as i32,
            file: "routes.yaml".into(),
            line: 12,
            column: 3,
            object: "HTTPRoute bookinfo/reviews".into(),
            field: "spec.rules[0]".into(),
            problem: "no such service".into(),
            mend: "name a Service".into(),
        };
        let want = ["routes.yaml:12:3: error: HTTPRoute bookinfo/reviews: spec.rules[0]: no such service", "  mend: name a Service"];
        assert_eq!(lines(std::slice::from_ref(&diagnostic)), want);
        assert!(any_error(&[diagnostic]));
    }
}
