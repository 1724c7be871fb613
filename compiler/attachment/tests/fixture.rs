//! Reads the objects of the tests, and shows what they were resolved to.

use canal_attachment::{ListenerObjects, TenantListeners, Written, resolve};
use canal_model::diagnostic::Diagnostic;
use canal_model::ids::TenantName;
use canal_model::policy::{Document, Object};

pub(crate) const GROUP: &str = "apiVersion: gateway.networking.k8s.io/v1";

/// Reads objects, which must be such that the reader has nothing to say unless `has_faults`.
pub(crate) fn read(text: &str, has_faults: bool) -> Vec<Document> {
    let parsed = canal_sources::parse("a.yaml", text);
    assert!(
        has_faults || parsed.diagnostics.is_empty(),
        "{:?}",
        parsed.diagnostics
    );
    parsed.documents
}

pub(crate) fn resolved(documents: &[Document]) -> (TenantListeners, Vec<Diagnostic>) {
    let mut objects = ListenerObjects::default();
    for document in documents {
        match &document.object {
            Object::GatewayClass(object) => objects.classes.push(Written { document, object }),
            Object::Gateway(object) => objects.gateways.push(Written { document, object }),
            Object::ListenerSet(object) => objects.listener_sets.push(Written { document, object }),
            Object::Namespace(object) => objects.namespaces.push(Written { document, object }),
            Object::Secret(object) => objects.secrets.push(Written { document, object }),
            Object::ConfigMap(object) => objects.config_maps.push(Written { document, object }),
            Object::ClusterTrustBundle(object) => {
                objects.trust_bundles.push(Written { document, object })
            }
            Object::IstioGateway(object) => {
                objects.istio_gateways.push(Written { document, object })
            }
            Object::ReferenceGrant(object) => objects.grants.push(Written { document, object }),
            _ => {}
        }
    }
    let mut found = Vec::new();
    let tenant = TenantName::new("alpha").unwrap();
    let all = resolve(&tenant, &objects, &mut |it| found.push(it));
    (all, found)
}

/// Returns what was reported, each as field and problem.
pub(crate) fn texts(found: &[Diagnostic]) -> Vec<String> {
    let text = |it: &Diagnostic| format!("{}: {}", it.field, it.problem);
    found.iter().map(text).collect()
}

pub(crate) fn gateway(name: &str, spec: &str) -> String {
    format!(
        "{GROUP}\nkind: Gateway\nmetadata: {{name: {name}, namespace: infra}}\nspec: {{gatewayClassName: canal, {spec}}}\n---\n"
    )
}

/// Returns for each listener its name, and the reason why it is closed.
pub(crate) fn listeners(all: &TenantListeners) -> Vec<(String, Option<&'static str>)> {
    let placed = all.gateways().flat_map(|gateway| &gateway.listeners);
    placed
        .map(|placed| {
            let closed = placed.listener.closed.as_ref();
            let reason = closed.map(|fault| fault.reason.as_str());
            (placed.listener.name.clone(), reason)
        })
        .collect()
}

pub(crate) fn listener_set(name: &str, namespace: &str, listeners: &str) -> String {
    format!(
        "{GROUP}\nkind: ListenerSet\nmetadata: {{name: {name}, namespace: {namespace}}}\n\
         spec: {{parentRef: {{name: web, namespace: infra}}, listeners: [{listeners}]}}\n---\n"
    )
}
