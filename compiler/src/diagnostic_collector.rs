//! Collects the diagnostics of all stages of one compile. It contains no rules.

use std::collections::HashSet;

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::policy::Document;

/// The diagnostics of one compile.
#[derive(Default)]
pub(crate) struct DiagnosticCollector {
    diagnostics: Vec<Diagnostic>,
}

impl DiagnosticCollector {
    /// Reports an error: a part of the object does not work as written.
    pub(crate) fn error(&mut self, document: &Document, field: impl Into<String>, problem: impl Into<String>, fix: impl Into<String>) {
        self.push(Severity::Error, document, field.into(), problem.into(), fix.into());
    }

    /// Reports a warning: a part of the object may not be meant as written.
    pub(crate) fn warning(&mut self, document: &Document, field: impl Into<String>, problem: impl Into<String>, fix: impl Into<String>) {
        self.push(Severity::Warning, document, field.into(), problem.into(), fix.into());
    }

    /// Reports an error about the tenant as a whole.
    pub(crate) fn general(&mut self, problem: impl Into<String>, fix: impl Into<String>) {
        let (problem, fix) = (problem.into(), fix.into());
        self.diagnostics.push(Diagnostic { severity: Severity::Error, origin: None, object: None, field: String::new(), problem, fix });
    }

    fn push(&mut self, severity: Severity, document: &Document, field: String, problem: String, fix: String) {
        let (origin, object) = (Some(document.origin.clone()), Some(document.object.key()));
        self.diagnostics.push(Diagnostic { severity, origin, object, field, problem, fix });
    }

    /// Returns all diagnostics: errors first, then by object, then in the order of reporting. Duplicates are removed.
    pub(crate) fn into_sorted(mut self) -> Vec<Diagnostic> {
        let mut told = HashSet::new();
        self.diagnostics.retain(|diagnostic| told.insert(diagnostic.clone()));
        self.diagnostics.sort_by(|a, b| (a.severity, &a.object, &a.origin).cmp(&(b.severity, &b.object, &b.origin)));
        self.diagnostics
    }
}
