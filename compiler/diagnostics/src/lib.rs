//! Collects the diagnostics of all stages of one compile, each once and within a limit, and keeps an
//! object together with the document that its diagnostics name. It contains no rules.

#![forbid(unsafe_code)]

use std::collections::HashSet;

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode;
use canal_model::policy::Document;

use canal_ir::limits::DIAGNOSTICS_OF_SEVERITY_MAX;

/// Number of collected diagnostics at which duplicates are removed and the limit is applied. One
/// object on many services repeats its mistakes for each, so the list would grow far beyond the
/// limit until the end.
/// At most half of them are left then, the limit of errors and that of warnings, so that the next
/// time comes after as many more.
const COMPACT_AT: usize = 4 * DIAGNOSTICS_OF_SEVERITY_MAX;

/// Maximum bytes of each text of a diagnostic; the rest is cut off.
/// A problem may repeat a text of the tenant, of megabytes, and is reported once for each Service that
/// it concerns. The longest sentences have a few hundred bytes.
pub const DIAGNOSTIC_TEXT_BYTES_MAX: usize = 4096;

/// The diagnostics of one compile.
#[derive(Default)]
pub struct DiagnosticCollector {
    diagnostics: Vec<Diagnostic>,
    /// Severities of which diagnostics were left out.
    left_out: HashSet<Severity>,
}

impl DiagnosticCollector {
    /// Reports an error: a part of the object does not work as written.
    pub fn error(
        &mut self,
        code: DiagnosticCode,
        document: &Document,
        field: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.push(
            (Severity::Error, code),
            document,
            field.into(),
            problem.into(),
            fix.into(),
        );
    }

    /// Reports that the object exceeds a limit.
    pub fn refuse_excess(
        &mut self,
        document: &Document,
        field: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.error(DiagnosticCode::LimitExceeded, document, field, problem, fix);
    }

    /// Reports a warning: a part of the object may not be meant as written.
    pub fn warning(
        &mut self,
        code: DiagnosticCode,
        document: &Document,
        field: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.push(
            (Severity::Warning, code),
            document,
            field.into(),
            problem.into(),
            fix.into(),
        );
    }

    /// Adds a diagnostic of another crate.
    pub fn add(&mut self, mut diagnostic: Diagnostic) {
        let Diagnostic {
            field,
            problem,
            fix,
            ..
        } = &mut diagnostic;
        for text in [field, problem, fix] {
            if text.len() > DIAGNOSTIC_TEXT_BYTES_MAX {
                text.truncate(text.floor_char_boundary(DIAGNOSTIC_TEXT_BYTES_MAX));
                // Truncating a text keeps its memory.
                text.shrink_to_fit();
            }
        }
        self.diagnostics.push(diagnostic);
        if self.diagnostics.len() >= COMPACT_AT {
            self.compact();
        }
    }

    /// Reports an error about the tenant as a whole.
    pub fn general(
        &mut self,
        code: DiagnosticCode,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) {
        let diagnostic = of_tenant((Severity::Error, code), problem.into(), fix.into());
        self.diagnostics.push(diagnostic);
    }

    fn push(
        &mut self,
        (severity, code): (Severity, DiagnosticCode),
        document: &Document,
        field: String,
        problem: String,
        fix: String,
    ) {
        let (origin, object) = (Some(document.origin.clone()), Some(document.object.key()));
        self.add(Diagnostic {
            severity,
            code,
            origin,
            object,
            field,
            problem,
            fix,
        });
    }

    /// Removes duplicates, and diagnostics beyond the limit.
    fn compact(&mut self) {
        let mut distinct = HashSet::new();
        self.diagnostics
            .retain(|diagnostic| distinct.insert(diagnostic.clone()));
        let (mut errors, mut warnings) = (0, 0);
        self.diagnostics.retain(|diagnostic| {
            let count = match diagnostic.severity {
                Severity::Error => &mut errors,
                Severity::Warning => &mut warnings,
            };
            *count += 1;
            let is_within = *count <= DIAGNOSTICS_OF_SEVERITY_MAX;
            if !is_within {
                self.left_out.insert(diagnostic.severity);
            }
            is_within
        });
    }

    /// Returns all diagnostics: errors first, then by object, then in the order of reporting.
    /// Duplicates are removed.
    pub fn into_sorted(mut self) -> Vec<Diagnostic> {
        self.compact();
        for severity in [Severity::Error, Severity::Warning]
            .into_iter()
            .filter(|severity| self.left_out.contains(severity))
        {
            let what = if severity == Severity::Error {
                "errors"
            } else {
                "warnings"
            };
            let problem = format!(
                "the tenant has more than {DIAGNOSTICS_OF_SEVERITY_MAX} {what}; the rest is left out"
            );
            self.diagnostics.push(of_tenant(
                (severity, DiagnosticCode::DiagnosticsLeftOut),
                problem,
                "correct those that are listed".to_owned(),
            ));
        }
        Self::sorted(self.diagnostics)
    }

    /// Sorts diagnostics as [`DiagnosticCollector::into_sorted`] does. Those of one object at one place
    /// keep their order.
    pub fn sorted(mut diagnostics: Vec<Diagnostic>) -> Vec<Diagnostic> {
        diagnostics.sort_by(|a, b| {
            (a.severity, &a.object, &a.origin).cmp(&(b.severity, &b.object, &b.origin))
        });
        diagnostics
    }
}

fn of_tenant(
    (severity, code): (Severity, DiagnosticCode),
    problem: String,
    fix: String,
) -> Diagnostic {
    Diagnostic {
        severity,
        code,
        origin: None,
        object: None,
        field: String::new(),
        problem,
        fix,
    }
}

/// An object together with its document.
pub struct Sourced<'a, T> {
    pub document: &'a Document,
    pub object: &'a T,
}

impl<T> Sourced<'_, T> {
    /// Returns the first fault in a field that starts with `prefix`, or in a field that contains
    /// it.
    pub fn fault(&self, prefix: &str) -> Option<&str> {
        let is_around = |field: &str| {
            prefix
                .strip_prefix(field)
                .is_some_and(|rest| rest.starts_with(['.', '[']))
        };
        let mut faults = self.document.faults.iter();
        faults
            .find(|fault| fault.field.starts_with(prefix) || is_around(&fault.field))
            .map(|fault| fault.problem.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_of_a_diagnostic_are_short() {
        let mut report = DiagnosticCollector::default();
        for text in ["é".repeat(DIAGNOSTIC_TEXT_BYTES_MAX), "short".to_owned()] {
            report.add(Diagnostic {
                severity: Severity::Warning,
                code: DiagnosticCode::InvalidValue,
                origin: None,
                object: None,
                field: text.clone(),
                problem: format!("a{text}"),
                fix: text,
            });
        }
        let found = report.into_sorted();
        let texts = found.iter().map(|it| [&it.field, &it.problem, &it.fix]);
        let lengths: Vec<_> = texts.map(|texts| texts.map(String::len)).collect();
        // One byte less where the limit is inside a character.
        let max = DIAGNOSTIC_TEXT_BYTES_MAX;
        assert_eq!(lengths, [[max, max - 1, max], [5, 6, 5]]);
        assert!(found[0].problem.capacity() < 2 * max);
    }
}
