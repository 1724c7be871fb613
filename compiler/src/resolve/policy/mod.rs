//! Policies of zero trust: whom they are for, what they ask, and how a broken one fails closed.

pub(super) mod authentication;
pub(super) mod authorization;
pub(super) mod authorizer;
mod conditions;
mod enforceable;
pub(super) mod peer;
mod target;
mod values;

pub(super) use enforceable::Ground;

use canal_model::authorization::{PolicyKey, REASON_BYTES_MAX};
use canal_model::ids::TenantName;
use canal_model::policy::Metadata;

use super::corpus::Said;
use crate::report::Report;

/// One policy while it is read: what is wrong with it is told, and the first such thing breaks it.
struct Reading<'a, T> {
    said: &'a Said<'a, T>,
    report: &'a mut Report,
    broken: Option<String>,
}

impl<'a, T> Reading<'a, T> {
    /// What could not even be read breaks the policy; whoever read it told so.
    fn new(said: &'a Said<'a, T>, report: &'a mut Report) -> Self {
        let broken = said.document.faults.iter().find(|fault| fault.field.starts_with("spec"));
        let broken = broken.map(|fault| reason(&fault.field, &fault.problem));
        Self { said, report, broken }
    }

    /// Tells of something that breaks the policy.
    fn breaks(&mut self, field: impl Into<String>, problem: impl Into<String>, mend: impl Into<String>) {
        let (field, problem) = (field.into(), problem.into());
        self.broken.get_or_insert_with(|| reason(&field, &problem));
        self.report.error(self.said.document, field, problem, mend);
    }

    /// Tells of something that does not work, while the rest does.
    fn error(&mut self, field: impl Into<String>, problem: impl Into<String>, mend: impl Into<String>) {
        self.report.error(self.said.document, field, problem, mend);
    }

    fn warning(&mut self, field: impl Into<String>, problem: impl Into<String>, mend: impl Into<String>) {
        self.report.warning(self.said.document, field, problem, mend);
    }
}

/// Cut where it is too long for the wire.
fn reason(field: &str, problem: &str) -> String {
    let mut reason = format!("{field}: {problem}");
    reason.truncate(reason.floor_char_boundary(REASON_BYTES_MAX));
    reason
}

fn key(tenant: &TenantName, metadata: &Metadata) -> PolicyKey {
    PolicyKey { tenant: tenant.clone(), namespace: metadata.namespace.clone(), name: metadata.name.clone() }
}
