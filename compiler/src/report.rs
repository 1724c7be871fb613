//! Where the stages leave their findings. Holds no rules.

use std::collections::HashSet;

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::policy::Document;

/// The findings of one compile.
#[derive(Default)]
pub(crate) struct Report {
    diagnostics: Vec<Diagnostic>,
}

impl Report {
    /// Something does not work as written.
    pub(crate) fn error(&mut self, document: &Document, field: impl Into<String>, problem: impl Into<String>, mend: impl Into<String>) {
        self.push(Severity::Error, document, field.into(), problem.into(), mend.into());
    }

    /// Something may not be meant as written.
    pub(crate) fn warning(&mut self, document: &Document, field: impl Into<String>, problem: impl Into<String>, mend: impl Into<String>) {
        self.push(Severity::Warning, document, field.into(), problem.into(), mend.into());
    }

    /// Something about the tenant as a whole.
    pub(crate) fn general(&mut self, problem: impl Into<String>, mend: impl Into<String>) {
        let (problem, mend) = (problem.into(), mend.into());
        self.diagnostics.push(Diagnostic { severity: Severity::Error, origin: None, object: None, field: String::new(), problem, mend });
    }

    fn push(&mut self, severity: Severity, document: &Document, field: String, problem: String, mend: String) {
        let (origin, object) = (Some(document.origin.clone()), Some(document.object.key()));
        self.diagnostics.push(Diagnostic { severity, origin, object, field, problem, mend });
    }

    /// All findings: errors first, then by object, then in the order found. What was met on several ways is told once.
    pub(crate) fn into_sorted(mut self) -> Vec<Diagnostic> {
        let mut told = HashSet::new();
        self.diagnostics.retain(|diagnostic| told.insert(diagnostic.clone()));
        self.diagnostics.sort_by(|a, b| (a.severity, &a.object, &a.origin).cmp(&(b.severity, &b.object, &b.origin)));
        self.diagnostics
    }
}
