//! Diagnostics of the controller and the compiler, as lines. The functions are independent of the
//! verbs.

use canal_json_api::v1::ChangeKindView;
use canal_wire::api::{Change, Diagnostic, Severity};

/// Returns `file:line:column: error[code]: object: field: problem`, then the fix.
pub(crate) fn lines(diagnostics: &[Diagnostic]) -> Vec<String> {
    diagnostics.iter().flat_map(diagnostic_lines).collect()
}

fn diagnostic_lines(diagnostic: &Diagnostic) -> Vec<String> {
    let Diagnostic {
        file,
        line,
        column,
        object,
        field,
        problem,
        fix,
        code,
        ..
    } = diagnostic;
    // Positions count from 1; 0 means that the compiler knows no line or no column.
    let position = match (line, column) {
        (0, _) => String::new(),
        (line, 0) => format!(":{line}"),
        (line, column) => format!(":{line}:{column}"),
    };
    let location = if file.is_empty() {
        String::new()
    } else {
        format!("{file}{position}: ")
    };
    let parts = [object, field, problem]
        .into_iter()
        .filter(|p| !p.is_empty())
        .cloned()
        .collect::<Vec<_>>();
    // A controller of an older release sends no code.
    let code = match code.is_empty() {
        true => String::new(),
        false => format!("[{code}]"),
    };
    let mut lines = vec![format!(
        "{location}{}{code}: {}",
        severity(diagnostic),
        parts.join(": ")
    )];
    if !fix.is_empty() {
        lines.push(format!("  fix: {fix}"));
    }
    lines
}

fn severity(diagnostic: &Diagnostic) -> &'static str {
    match diagnostic.severity() {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}

/// Returns whether any of them is an error.
pub(crate) fn any_error(diagnostics: &[Diagnostic]) -> bool {
    diagnostics.iter().any(|d| d.severity() == Severity::Error)
}

/// Returns the kind of a change.
pub(crate) fn what(change: &Change) -> &'static str {
    ChangeKindView::from(change.what()).as_str()
}

/// Returns the line for changes that the controller left out of its answer, if there are any.
pub(crate) fn left_out(changes: u64) -> Option<String> {
    (changes > 0).then(|| format!("{changes} more changes do not fit into the answer; send fewer objects at once to see all of them"))
}

/// Returns the name of a changed object, such as `HTTPRoute bookinfo/reviews`.
pub(crate) fn object(change: &Change) -> String {
    let Change {
        kind,
        namespace,
        name,
        ..
    } = change;
    if namespace.is_empty() {
        format!("{kind} {name}")
    } else {
        format!("{kind} {namespace}/{name}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_that_are_left_out_have_a_line() {
        assert_eq!(left_out(0), None);
        assert!(left_out(12).is_some_and(|line| line.starts_with("12 more changes do not fit")));
    }

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
            fix: "name a Service".into(),
            code: "CANAL0408".into(),
        };
        let want = [
            "routes.yaml:12:3: error[CANAL0408]: HTTPRoute bookinfo/reviews: spec.rules[0]: no such service",
            "  fix: name a Service",
        ];
        assert_eq!(lines(std::slice::from_ref(&diagnostic)), want);
        assert!(any_error(&[diagnostic]));
    }
}
