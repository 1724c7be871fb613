//! The conditions of a tenant's objects of Gateway API, computed from the objects that a controller
//! has. It compiles them again here, so it shows what the compiler decides and not what data planes
//! run. Start at [`fetch`].

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_analysis::conditions::{ObjectConditions, StatusCondition, conditions};
use canal_compiler::{CompileInput, build_ir};
use canal_model::ids::TenantName;
use canal_wire::api::GetRequest;
use serde_json::{Value, json};

use crate::admin::{self, Admin};
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::tenant::{self, TenantArgs};
use crate::verbs::compile::ids;

/// Fetches the objects of a tenant and returns their conditions.
pub(crate) async fn fetch(
    admin: &mut Admin,
    tenant: &TenantArgs,
) -> VerbResult<Vec<ObjectConditions>> {
    let name = tenant::decide(tenant, admin).await?;
    let request = GetRequest {
        tenant: name.clone(),
        ..GetRequest::default()
    };
    let answer = admin
        .get(request)
        .await
        .map_err(|status| admin::refused(&status))?
        .into_inner();
    let tenant = TenantName::new(&name).map_err(|problem| {
        VerbError::new(ExitStatus::Usage, "--tenant", problem.to_string(), "")
    })?;
    let texts = answer.objects.iter();
    let texts = texts.map(|object| (object.origin.as_str(), object.yaml.as_str()));
    compile(&tenant, texts)
}

/// Compiles the texts of objects, and returns their conditions.
fn compile<'a>(
    tenant: &TenantName,
    texts: impl Iterator<Item = (&'a str, &'a str)>,
) -> VerbResult<Vec<ObjectConditions>> {
    let mut documents = Vec::new();
    for (file, text) in texts {
        let parsed = canal_sources::parse(file, text);
        documents.extend(parsed.documents.into_iter().map(Arc::new));
    }
    let service_ids = ids(tenant, &documents, &mut 1)?;
    let (ir, diagnostics) = build_ir(&CompileInput {
        tenant,
        documents: &documents,
        service_ids: &service_ids,
        jwks: &BTreeMap::new(),
    });
    let Some(ir) = ir else {
        return Err(VerbError::failed(
            format!("tenant {tenant}"),
            "has no valid Tenant object, so it is not served",
            "fix it first",
        ));
    };
    Ok(conditions(&documents, &ir, &diagnostics))
}

/// Returns the lines for people.
pub(crate) fn lines(all: &[ObjectConditions]) -> Vec<String> {
    let lines = all.iter().flat_map(|object| {
        let text = object.to_string();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    });
    lines.collect()
}

/// Returns the conditions in the form of the `status` of Gateway API's objects.
pub(crate) fn value(all: &[ObjectConditions]) -> Value {
    let list = |conditions: &[StatusCondition]| -> Vec<Value> {
        let conditions = conditions.iter();
        conditions
            .map(|it| {
                let status = if it.is_true { "True" } else { "False" };
                json!({ "type": it.kind, "status": status, "reason": it.reason, "message": it.message })
            })
            .collect()
    };
    let objects = all.iter().map(|object| {
        let listeners = object.listeners.iter().map(|listener| {
            let kinds = listener.supported_kinds.iter().map(|kind| kind.as_str());
            json!({
                "name": listener.name,
                "attachedRoutes": listener.attached_routes,
                "supportedKinds": kinds.collect::<Vec<_>>(),
                "conditions": list(&listener.conditions),
            })
        });
        let parents = object.parents.iter();
        let parents = parents.map(
            |parent| json!({ "parent": parent.parent, "conditions": list(&parent.conditions) }),
        );
        json!({
            "object": object.object.to_string(),
            "conditions": list(&object.conditions),
            "listeners": listeners.collect::<Vec<_>>(),
            "parents": parents.collect::<Vec<_>>(),
        })
    });
    objects.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_shows_its_status_at_each_parent() {
        let tenant = "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: demo}\n\
            spec: {vni: 100, trustDomain: demo.example, podCidrs: [10.1.0.0/16]}\n";
        let route = "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\n\
            metadata: {name: web, namespace: shop}\n\
            spec: {parentRefs: [{name: edge}], rules: [{backendRefs: [{name: web, port: 80}]}]}\n";
        let name = TenantName::new("demo").unwrap();
        let found = compile(&name, [("t.yaml", tenant), ("r.yaml", route)].into_iter()).unwrap();
        let text = lines(&found).join("\n");
        assert!(text.contains("parent Gateway shop/edge:"), "{text}");
        assert!(text.contains("Accepted=False (NoMatchingParent"), "{text}");
        let conditions = &value(&found)[0]["parents"][0]["conditions"];
        assert_eq!(conditions[0]["reason"], "NoMatchingParent");
    }
}
