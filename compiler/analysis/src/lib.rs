//! AnalysisDiagnostics about the objects of one tenant beyond what compiling them needs: rules that no request
//! reaches, subsets that nothing uses, selectors that select no pod, and others. Pure: it reads
//! documents and the IR that was compiled from them. It changes nothing that data planes receive.
//!
//! Each diagnostic has a code of its own. Its position is that of the object;
//! `canal_sources::pinpoint` finds that of the field. Start at [`analyze`].

#![forbid(unsafe_code)]

pub mod conditions;
mod coverage;
mod namespaces;
mod ports;
mod regexes;
mod selectors;
mod shadowing;
mod subsets;
mod versions;

use std::sync::Arc;

use canal_ir::ir::Ir;
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode;
use canal_model::policy::Document;

/// The codes that only the analysis reports.
pub const CODES: [DiagnosticCode; 12] = [
    DiagnosticCode::UnknownNamespace,
    DiagnosticCode::DeprecatedApi,
    DiagnosticCode::PortWithoutProtocol,
    DiagnosticCode::SelectorMatchesNoPod,
    DiagnosticCode::ConflictingTargetPorts,
    DiagnosticCode::ShadowedRule,
    DiagnosticCode::ShadowedMatch,
    DiagnosticCode::UnusedSubset,
    DiagnosticCode::SubsetMatchesNoPod,
    DiagnosticCode::CostlyRegex,
    DiagnosticCode::PolicyMatchesNoPod,
    DiagnosticCode::ClaimsWithoutAuthentication,
];

/// Analyzes the objects of one tenant. `ir` was compiled from the documents; without it, the
/// diagnostics about routes are left out. The order is that of the objects' positions.
pub fn analyze(documents: &[Arc<Document>], ir: Option<&Ir>) -> Vec<Diagnostic> {
    let mut diagnostics = AnalysisDiagnostics::default();
    namespaces::check(documents, &mut diagnostics);
    versions::check(documents, &mut diagnostics);
    selectors::check(documents, &mut diagnostics);
    subsets::check(documents, &mut diagnostics);
    if let Some(ir) = ir {
        ports::check(documents, ir, &mut diagnostics);
        ports::check_targets(documents, ir, &mut diagnostics);
        shadowing::check(documents, ir, &mut diagnostics);
        regexes::check(documents, ir, &mut diagnostics);
    }
    let mut found = diagnostics.0;
    found.sort_by(|a, b| (&a.origin, a.code, &a.field).cmp(&(&b.origin, b.code, &b.field)));
    found.dedup();
    found
}

/// The diagnostics that were found so far.
#[derive(Default)]
struct AnalysisDiagnostics(Vec<Diagnostic>);

impl AnalysisDiagnostics {
    /// Adds a warning about a field of an object.
    fn warn(
        &mut self,
        code: DiagnosticCode,
        document: &Document,
        field: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.0.push(Diagnostic {
            severity: Severity::Warning,
            code,
            origin: Some(document.origin.clone()),
            object: Some(document.object.key()),
            field: field.into(),
            problem: problem.into(),
            fix: fix.into(),
        });
    }
}
