//! Faults of listeners, made of problems of any length and of fields that the reader rejected.

use std::sync::Arc;

use canal_model::ingress::{ListenerFault, ListenerFaultReason};
use canal_model::policy::RejectedField;

use crate::shorten;

/// Maximum length of the description of a fault, in characters: each listener that it closes has
/// it in its diagnostics.
/// With all 4,096 listeners of a tenant (`LISTENERS_PER_TENANT_MAX`) the texts have 1.6 million
/// characters at most.
const FAULT_CHARACTERS_MAX: usize = 400;

/// Returns a fault with the beginning of the problem.
pub(crate) fn fault(reason: ListenerFaultReason, problem: impl Into<String>) -> Arc<ListenerFault> {
    let mut problem: String = problem.into();
    if let Some((end, _)) = problem.char_indices().nth(FAULT_CHARACTERS_MAX) {
        problem.truncate(end);
    }
    Arc::new(ListenerFault { reason, problem })
}

pub(crate) fn fault_of(rejected: &RejectedField) -> Arc<ListenerFault> {
    fault(
        ListenerFaultReason::Invalid,
        format!("{}: {}", shorten(&rejected.field), rejected.problem),
    )
}

/// Returns whether a field is `outer` or inside it.
pub(crate) fn is_within(field: &str, outer: &str) -> bool {
    field
        .strip_prefix(outer)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}
