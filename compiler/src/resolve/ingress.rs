//! Resolves the listeners of Gateways, and attaches HTTPRoutes and GRPCRoutes to them.
//! `canal-attachment` decides which listeners take a route; the rules are compiled as those of
//! Services are.

use std::collections::BTreeMap;

use canal_attachment::{
    Attachment, ListenerObjects, RouteParents, TenantListeners, Written, is_listener_parent,
};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{ServiceId, ServiceKey};
use canal_model::ingress::gateway_service;
use canal_model::program::RouteObject;

use super::route_parts::RouteParts;
use super::tenant_objects::{Sourced, TenantObjects};
use crate::CompileInput;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::HOSTS_PER_ROUTE_MAX;
use crate::resource_budget::ResourceBudget;

/// Maximum length of the reason why rules refuse on a Gateway, in characters.
const FAULT_CHARACTERS_MAX: usize = 400;

/// The listeners of a tenant, and the routes on them.
#[derive(Default)]
pub(crate) struct Ingress {
    pub(crate) listeners: TenantListeners,
    /// Ids of the services that stand for Gateways; a Gateway without one is not served.
    pub(crate) ids: BTreeMap<ServiceKey, ServiceId>,
    /// Each attached route on each of its listeners.
    pub(crate) attachments: Vec<(RouteObject, Attachment)>,
}

/// Resolves the listeners, to which no route is attached yet. Gateways of a tenant that is not on
/// the cloud tier are not served.
pub(crate) fn resolve(
    input: &CompileInput<'_>,
    corpus: &TenantObjects<'_>,
    is_on_tier: bool,
    budget: &mut ResourceBudget,
    report: &mut DiagnosticCollector,
) -> Ingress {
    let objects = ListenerObjects {
        classes: written(&corpus.gateway_classes),
        gateways: written(&corpus.gateways),
        listener_sets: written(&corpus.listener_sets),
        namespaces: written(&corpus.namespaces),
        secrets: written(&corpus.secrets),
        config_maps: written(&corpus.config_maps),
        trust_bundles: written(&corpus.trust_bundles),
        grants: written(&corpus.grants),
        has_grpc_routes: !corpus.grpc_routes.is_empty(),
    };
    let listeners = canal_attachment::resolve(input.tenant, &objects, &mut |it| report.add(it));
    let certificates = listeners.gateways().flat_map(|it| it.certificates.values());
    for certificate in certificates {
        budget.add_certificate(certificate);
    }
    for validation in listeners.gateways().flat_map(|it| it.client_validations()) {
        budget.add_authorities(&validation.authorities);
    }
    let own = corpus.gateways.iter().filter(|gateway| {
        let metadata = &gateway.object.metadata;
        listeners.is_own(&metadata.namespace, &metadata.name)
    });
    let mut ids = BTreeMap::new();
    for gateway in own {
        let metadata = &gateway.object.metadata;
        let key = gateway_service(input.tenant, &metadata.namespace, &metadata.name);
        if !is_on_tier {
            report.error(
                Code::NotOnCloudTier,
                gateway.document,
                "spec",
                "the tenant is not on the cloud tier, so its Gateways have no address",
                "have the provider set gatewayCidrs in the Tenant",
            );
        } else if let Some((key, id)) =
            key.and_then(|key| input.service_ids.get(&key).map(|id| (key.clone(), *id)))
        {
            ids.insert(key, id);
        } else {
            report.error(
                Code::ServiceIdsExhausted,
                gateway.document,
                "",
                "all 16,777,215 service IDs are taken, so the Gateway has none",
                "remove Gateways and services that are not needed",
            );
        }
    }
    Ingress {
        listeners,
        ids,
        attachments: Vec::new(),
    }
}

fn written<'a, T>(objects: &[Sourced<'a, T>]) -> Vec<Written<'a, T>> {
    let written = objects.iter().map(|sourced| Written {
        document: sourced.document,
        object: sourced.object,
    });
    written.collect()
}

impl Ingress {
    /// Attaches a route to the listeners that its parents name. Returns the services that stand for
    /// their Gateways, each with the reason why the route's rules refuse there, if they do.
    pub(super) fn attach(
        &mut self,
        route: &Sourced<'_, RouteParts<'_>>,
        budget: &mut ResourceBudget,
        report: &mut DiagnosticCollector,
    ) -> BTreeMap<ServiceKey, Option<String>> {
        let spec = route.object;
        let metadata = spec.metadata;
        let mut gateways = BTreeMap::new();
        // A route with too many hosts has none that could be compared.
        if !spec.parent_refs.iter().any(is_listener_parent)
            || spec.hostnames.len() > HOSTS_PER_ROUTE_MAX
        {
            return gateways;
        }
        let parents = RouteParents {
            document: route.document,
            namespace: &metadata.namespace,
            parents: spec.parent_refs,
            hostnames: spec.hostnames,
        };
        let attachments = self.listeners.attach(&parents, &mut |it| report.add(it));
        let mut faults: BTreeMap<usize, Option<String>> = BTreeMap::new();
        for attachment in attachments {
            let field = format!("spec.parentRefs[{}]", attachment.parent);
            let fault = faults.entry(attachment.parent).or_insert_with(|| {
                // Each rule on each Gateway has the text.
                let fault = route.fault(&field)?;
                let short: String = fault.chars().take(FAULT_CHARACTERS_MAX).collect();
                Some(format!("{field}: {short}"))
            });
            let known: &mut Option<String> =
                gateways.entry(attachment.gateway.clone()).or_default();
            // Of several parents of one Gateway, the first that is broken gives the reason.
            if known.is_none() {
                known.clone_from(fault);
            }
            // The tenant's result is discarded, so the rest is not attached.
            if !budget.add_attachment(&attachment.hosts) {
                return BTreeMap::new();
            }
            let object = RouteObject {
                namespace: metadata.namespace.clone(),
                name: metadata.name.clone(),
                kind: spec.rules.kind().as_str().to_owned(),
            };
            self.attachments.push((object, attachment));
        }
        gateways
    }
}
