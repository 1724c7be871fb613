//! Conditions of routes at each of their parents.

use std::collections::BTreeSet;
use std::sync::Arc;

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::ObjectKey;
use canal_model::policy::gateway_api::ParentRef;

use super::{
    ObjectConditions, ObjectDiagnostics, PARENTS_MAX, ParentConditions, StatusCondition, is_within,
    shortened,
};

pub(super) fn of_route(
    object: ObjectKey,
    parents: &[ParentRef],
    rules: usize,
    found: &ObjectDiagnostics<'_>,
) -> ObjectConditions {
    let resolved = resolved(found);
    let validity = RouteValidity::of(found, rules);
    let parents = parents
        .iter()
        .take(PARENTS_MAX)
        .enumerate()
        .filter_map(|(at, parent)| {
            let own = of_parent(at, found)?;
            let accepted = own
                .iter()
                .find_map(|it| rejection(it))
                .unwrap_or_else(|| validity.accepted());
            let mut conditions = vec![accepted, resolved.clone()];
            conditions.extend(validity.partially_invalid());
            Some(ParentConditions {
                index: at,
                parent: name_of(parent, &object),
                conditions,
            })
        });
    let parents = parents.collect();
    ObjectConditions {
        object,
        conditions: Vec::new(),
        attached_listener_sets: 0,
        listeners: Vec::new(),
        parents,
    }
}

/// Returns the conditions of a route that is not in force: no parent has accepted it.
pub(super) fn pending(
    object: ObjectKey,
    parents: &[ParentRef],
    found: &ObjectDiagnostics<'_>,
) -> ObjectConditions {
    let parents = parents
        .iter()
        .take(PARENTS_MAX)
        .enumerate()
        .filter_map(|(at, parent)| {
            of_parent(at, found)?;
            Some(ParentConditions {
                index: at,
                parent: name_of(parent, &object),
                conditions: vec![StatusCondition::pending("Accepted")],
            })
        });
    let parents = parents.collect();
    ObjectConditions {
        object,
        conditions: Vec::new(),
        attached_listener_sets: 0,
        listeners: Vec::new(),
        parents,
    }
}

/// Returns what is reported of a route at one parent; `None` if the parent belongs to another
/// controller, which writes the status there.
fn of_parent<'a>(at: usize, found: &ObjectDiagnostics<'a>) -> Option<Vec<&'a Diagnostic>> {
    let field = format!("spec.parentRefs[{at}]");
    let own = found.own.iter().copied();
    let own: Vec<&Diagnostic> = own.filter(|it| is_within(&it.field, &field)).collect();
    let is_foreign =
        |it: &&Diagnostic| matches!(it.code, Code::ForeignGatewayClass | Code::UnsupportedParent);
    (!own.iter().any(is_foreign)).then_some(own)
}

/// Returns the parent as `Gateway shop/edge, section web, port 80`.
fn name_of(parent: &ParentRef, route: &ObjectKey) -> String {
    let namespace = parent.namespace.as_ref().unwrap_or(&route.namespace);
    let mut name = format!("{} {namespace}/{}", parent.kind, parent.name);
    if let Some(section) = &parent.section_name {
        name.push_str(&format!(", section {section}"));
    }
    if let Some(port) = parent.port {
        name.push_str(&format!(", port {port}"));
    }
    name
}

/// Returns the condition `Accepted` of a parent at which the route does not apply.
fn rejection(found: &Diagnostic) -> Option<StatusCondition> {
    let reason = match found.code.description().condition {
        Some(("Accepted", reason)) => reason,
        _ if found.severity == Severity::Error => "UnsupportedValue",
        _ => return None,
    };
    Some(StatusCondition::negative(
        "Accepted",
        reason,
        &found.problem,
    ))
}

/// Returns the condition `ResolvedRefs`, which is the same at all parents.
fn resolved(found: &ObjectDiagnostics<'_>) -> StatusCondition {
    let mut own = found.own.iter();
    let unresolved = own.find_map(|it| match it.code.description().condition {
        Some(("ResolvedRefs", reason)) => Some(StatusCondition::negative(
            "ResolvedRefs",
            reason,
            &it.problem,
        )),
        _ => None,
    });
    unresolved.unwrap_or_else(|| StatusCondition::positive("ResolvedRefs", "ResolvedRefs"))
}

/// Which rules of a route are valid.
struct RouteValidity {
    /// The first problem that breaks a rule or the whole route, which all parents share.
    problem: Option<Arc<str>>,
    is_any_valid: bool,
}

impl RouteValidity {
    fn of(found: &ObjectDiagnostics<'_>, rules: usize) -> Self {
        let faults = found.document.faults.iter();
        let faults = faults.map(|fault| (fault.field.as_str(), fault.problem.as_str()));
        let breaks = |it: &&&Diagnostic| {
            let condition = it.code.description().condition;
            let is_limit = matches!(it.code, Code::LimitExceeded | Code::RegexMemoryExceeded);
            it.severity == Severity::Error
                && (is_limit || condition.is_some_and(|(kind, _)| kind == "Accepted"))
        };
        let reported = found.own.iter().filter(breaks);
        let reported = reported.map(|it| (it.field.as_str(), it.problem.as_str()));
        let mut broken = BTreeSet::new();
        let mut is_whole_broken = false;
        let mut problem = None;
        for (field, text) in faults.chain(reported) {
            if !field.starts_with("spec") || is_within(field, "spec.parentRefs") {
                continue;
            }
            problem.get_or_insert_with(|| shortened(&format!("{field}: {text}")));
            match rule_of(field) {
                Some(rule) => drop(broken.insert(rule)),
                None => is_whole_broken = true,
            }
        }
        Self {
            problem,
            // A route without rules has one that matches everything.
            is_any_valid: !is_whole_broken && broken.len() < rules.max(1),
        }
    }

    fn accepted(&self) -> StatusCondition {
        match &self.problem {
            Some(problem) if !self.is_any_valid => {
                let condition = StatusCondition::negative("Accepted", "UnsupportedValue", "");
                let message = problem.clone();
                StatusCondition {
                    message,
                    ..condition
                }
            }
            _ => StatusCondition::positive("Accepted", "Accepted"),
        }
    }

    /// Returns the condition of a route of which some rules are broken and refuse their requests.
    fn partially_invalid(&self) -> Option<StatusCondition> {
        let problem = self.problem.as_ref().filter(|_| self.is_any_valid)?;
        Some(StatusCondition {
            is_true: true,
            message: problem.clone(),
            ..StatusCondition::negative("PartiallyInvalid", "UnsupportedValue", "")
        })
    }
}

/// Returns the index of the rule that a field is inside.
fn rule_of(field: &str) -> Option<usize> {
    let (at, _) = field.strip_prefix("spec.rules[")?.split_once(']')?;
    at.parse().ok()
}

#[cfg(test)]
mod tests {
    use canal_model::policy::{Document, Object};

    use super::super::MESSAGE_BYTES_MAX;
    use super::*;

    #[test]
    fn a_route_with_many_parents_and_a_long_problem_has_small_conditions() {
        let parents = vec!["{name: edge}"; PARENTS_MAX + 1].join(", ");
        let text = format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: a}}\n\
             spec: {{parentRefs: [{parents}], rules: [{{backendRefs: [{{name: web, port: 80}}]}}]}}\n"
        );
        let parsed = canal_sources::parse("a.yaml", &text);
        assert!(parsed.is_clean(), "{:?}", parsed.diagnostics);
        let document: &Document = &parsed.documents[0];
        let Object::HttpRoute(route) = &document.object else {
            panic!("{document:?}")
        };
        let problem = |code, field: &str| Diagnostic {
            severity: Severity::Error,
            code,
            origin: None,
            object: Some(document.object.key()),
            field: field.to_owned(),
            // Two bytes each, so the text has twice the limit.
            problem: "é".repeat(MESSAGE_BYTES_MAX),
            fix: String::new(),
        };
        let reported = [
            problem(Code::UnresolvedBackend, "spec.rules[0].backendRefs[0].name"),
            problem(Code::LimitExceeded, "spec.rules"),
        ];
        let own: Vec<&Diagnostic> = reported.iter().collect();
        let found = ObjectDiagnostics {
            document,
            own: &own,
        };
        let conditions = of_route(document.object.key(), &route.spec.parent_refs, 1, &found);
        assert_eq!(conditions.parents.len(), PARENTS_MAX);
        let [first, .., last] = conditions.parents.as_slice() else {
            panic!("{conditions}")
        };
        // Accepted is false by the second problem, and ResolvedRefs by the first.
        assert_eq!(first.conditions.len(), 2);
        for (one, other) in first.conditions.iter().zip(&last.conditions) {
            assert!(!one.is_true && one.message.len() > MESSAGE_BYTES_MAX / 2);
            assert!(one.message.len() <= MESSAGE_BYTES_MAX);
            assert!(
                Arc::ptr_eq(&one.message, &other.message),
                "all parents share the text"
            );
        }
    }
}
