//! The conditions of a tenant's objects of Gateway API, as the controller computes them. They show
//! what the compiler decides and not what data planes run. The addresses of Gateways are those of
//! the plan in force. Start at [`fetch`].

use canal_wire::api::{Condition, ConditionsRequest, ConditionsResponse, ObjectStatus};
use serde_json::{Value, json};

use crate::admin::{self, Admin};
use crate::exit::VerbResult;
use crate::tenant::{self, TenantArgs};

/// Requests the conditions of a tenant's objects.
pub(crate) async fn fetch(
    admin: &mut Admin,
    tenant: &TenantArgs,
    namespace: Option<&str>,
) -> VerbResult<ConditionsResponse> {
    let tenant = tenant::decide(tenant, admin).await?;
    let namespace = namespace.unwrap_or_default().to_owned();
    let request = ConditionsRequest { tenant, namespace };
    let answer = admin.conditions(request).await;
    let mut parts = answer.map_err(|it| admin::refused(&it))?.into_inner();
    let mut all = ConditionsResponse::default();
    while let Some(part) = parts.message().await.map_err(|it| admin::refused(&it))? {
        all.objects.extend(part.objects);
        all.withheld.extend(part.withheld);
    }
    Ok(all)
}

/// Returns the lines for people.
pub(crate) fn lines(all: &ConditionsResponse) -> Vec<String> {
    let mut lines = Vec::new();
    if !all.withheld.is_empty() {
        lines.push("the newest configuration is withheld, and the one before is in force:".into());
    }
    let reasons = all.withheld.iter();
    lines.extend(reasons.map(|it| format!("  {}; fix: {}", it.problem, it.fix)));
    lines.extend(all.objects.iter().flat_map(lines_of));
    lines
}

fn lines_of(object: &ObjectStatus) -> Vec<String> {
    let ObjectStatus {
        kind,
        namespace,
        name,
        ..
    } = object;
    let mut lines = vec![format!("{kind} {namespace}/{name}")];
    if object.is_withheld {
        lines.push("  its newest text is withheld".to_owned());
    }
    if !object.addresses.is_empty() {
        lines.push(format!("  addresses: {}", object.addresses.join(", ")));
    }
    let add = |lines: &mut Vec<String>, indent: &str, conditions: &[Condition]| {
        lines.extend(
            conditions
                .iter()
                .map(|it| format!("{indent}{}", text_of(it))),
        );
    };
    add(&mut lines, "  ", &object.conditions);
    // Objects without this field have 0, so 0 is not shown.
    if object.attached_listener_sets > 0 {
        lines.push(format!(
            "  attachedListenerSets={}",
            object.attached_listener_sets
        ));
    }
    for listener in &object.listeners {
        lines.push(format!(
            "  listener {}: attachedRoutes={} supportedKinds={}",
            listener.name,
            listener.attached_routes,
            listener.supported_kinds.join(",")
        ));
        add(&mut lines, "    ", &listener.conditions);
    }
    for parent in &object.parents {
        lines.push(format!("  parent {}:", parent.parent));
        add(&mut lines, "    ", &parent.conditions);
    }
    lines
}

/// Returns a condition as `Accepted=False (Invalid: no listener is open)`.
fn text_of(condition: &Condition) -> String {
    let Condition {
        r#type,
        reason,
        message,
        ..
    } = condition;
    let status = status_of(condition);
    match message.as_str() {
        "" => format!("{type}={status} ({reason})"),
        message => format!("{type}={status} ({reason}: {message})"),
    }
}

fn status_of(condition: &Condition) -> &'static str {
    if condition.is_true { "True" } else { "False" }
}

/// Returns the conditions in the form of the `status` of Gateway API's objects.
pub(crate) fn value(all: &ConditionsResponse) -> Value {
    let list = |conditions: &[Condition]| -> Vec<Value> {
        let conditions = conditions.iter();
        conditions
            .map(|it| {
                json!({ "type": it.r#type, "status": status_of(it), "reason": it.reason, "message": it.message })
            })
            .collect()
    };
    let objects = all.objects.iter().map(|object| {
        let listeners = object.listeners.iter().map(|listener| {
            json!({
                "name": listener.name,
                "attachedRoutes": listener.attached_routes,
                "supportedKinds": listener.supported_kinds,
                "conditions": list(&listener.conditions),
            })
        });
        let parents = object.parents.iter().map(|parent| {
            let conditions = list(&parent.conditions);
            json!({ "index": parent.index, "parent": parent.parent, "conditions": conditions })
        });
        json!({
            "object": format!("{} {}/{}", object.kind, object.namespace, object.name),
            "kind": object.kind,
            "namespace": object.namespace,
            "name": object.name,
            "withheld": object.is_withheld,
            "conditions": list(&object.conditions),
            "addresses": object.addresses,
            "attachedListenerSets": object.attached_listener_sets,
            "listeners": listeners.collect::<Vec<_>>(),
            "parents": parents.collect::<Vec<_>>(),
        })
    });
    objects.collect()
}

#[cfg(test)]
mod tests {
    use canal_wire::api::{Diagnostic, ParentStatus};

    use super::*;

    #[test]
    fn a_route_shows_its_status_at_each_parent() {
        let condition = Condition {
            r#type: "Accepted".to_owned(),
            is_true: false,
            reason: "NoMatchingParent".to_owned(),
            message: "there is no Gateway shop/edge".to_owned(),
        };
        let route = ObjectStatus {
            kind: "HTTPRoute".to_owned(),
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            parents: vec![ParentStatus {
                index: 0,
                parent: "Gateway shop/edge".to_owned(),
                conditions: vec![condition],
            }],
            ..ObjectStatus::default()
        };
        let found = ConditionsResponse {
            objects: vec![route],
            ..ConditionsResponse::default()
        };
        let text = lines(&found).join("\n");
        assert!(text.contains("parent Gateway shop/edge:"), "{text}");
        assert!(
            text.contains("Accepted=False (NoMatchingParent: there is no Gateway shop/edge)"),
            "{text}"
        );
        let shown = &value(&found)[0]["parents"][0];
        assert_eq!(shown["conditions"][0]["reason"], "NoMatchingParent");
        assert_eq!(shown["index"], 0);
    }

    #[test]
    fn withheld_configuration_is_shown_with_its_reasons() {
        let found = ConditionsResponse {
            objects: vec![ObjectStatus {
                kind: "Gateway".to_owned(),
                namespace: "shop".to_owned(),
                name: "edge".to_owned(),
                is_withheld: true,
                ..ObjectStatus::default()
            }],
            withheld: vec![Diagnostic {
                problem: "a share is exceeded".to_owned(),
                fix: "delete objects".to_owned(),
                ..Diagnostic::default()
            }],
        };
        let expected = [
            "the newest configuration is withheld, and the one before is in force:",
            "  a share is exceeded; fix: delete objects",
            "Gateway shop/edge",
            "  its newest text is withheld",
        ];
        assert_eq!(lines(&found), expected);
        assert_eq!(value(&found)[0]["withheld"], true);
    }
}
