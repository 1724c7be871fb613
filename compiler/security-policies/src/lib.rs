//! Resolves policies of zero trust: their targets and conditions, and how a broken policy fails
//! closed. Pure, as the compiler is: equal input gives equal output. Start at
//! [`authorization::resolve`] and [`authentication::resolve`].

#![forbid(unsafe_code)]

pub mod authentication;
pub mod authorization;
pub mod authorizer;
mod conditions;
mod observability_check;
pub mod peer;
mod target;
pub mod values;

pub use observability_check::ReachablePods;
pub use target::PolicyTargets;

use canal_model::authorization::{PolicyKey, REASON_BYTES_MAX};
use canal_model::diagnostic_code::DiagnosticCode;
use canal_model::ids::TenantName;
use canal_model::policy::Metadata;

use canal_diagnostics::{DiagnosticCollector, Sourced};

/// The state of reading one policy: all problems are reported, and the first one that breaks the
/// policy is its reason.
struct PolicyResolver<'a, T> {
    source: &'a Sourced<'a, T>,
    report: &'a mut DiagnosticCollector,
    broken: Option<String>,
}

impl<'a, T> PolicyResolver<'a, T> {
    /// Starts reading a policy. A field that could not be parsed breaks the policy; the reader has
    /// already reported it.
    fn new(sourced: &'a Sourced<'a, T>, report: &'a mut DiagnosticCollector) -> Self {
        let broken = sourced
            .document
            .faults
            .iter()
            .find(|fault| fault.field.starts_with("spec"));
        let broken = broken.map(|fault| reason(&fault.field, &fault.problem));
        Self {
            source: sourced,
            report,
            broken,
        }
    }

    /// Reports a problem that breaks the policy.
    fn breaks(
        &mut self,
        code: DiagnosticCode,
        field: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) {
        let (field, problem) = (field.into(), problem.into());
        self.broken.get_or_insert_with(|| reason(&field, &problem));
        self.report
            .error(code, self.source.document, field, problem, fix);
    }

    /// Reports a problem that affects only a part of the policy.
    fn error(
        &mut self,
        code: DiagnosticCode,
        field: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.report
            .error(code, self.source.document, field, problem, fix);
    }

    fn warning(
        &mut self,
        code: DiagnosticCode,
        field: impl Into<String>,
        problem: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.report
            .warning(code, self.source.document, field, problem, fix);
    }
}

/// Formats the reason of a broken policy, truncated to the length that the wire allows.
fn reason(field: &str, problem: &str) -> String {
    let mut reason = format!("{field}: {problem}");
    reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
    reason
}

fn key(tenant: &TenantName, metadata: &Metadata) -> PolicyKey {
    PolicyKey {
        tenant: tenant.clone(),
        namespace: metadata.namespace.clone(),
        name: metadata.name.clone(),
    }
}
