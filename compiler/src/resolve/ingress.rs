//! Resolves the listeners of Gateways, and attaches HTTPRoutes and GRPCRoutes to them; see
//! `virtual_service` for VirtualServices. `canal-attachment` decides which listeners take a route;
//! the rules are compiled as those of Services are.

use std::collections::{BTreeMap, BTreeSet};

use canal_attachment::{
    AttachedRoute, Attachment, ListenerObjects, RouteParents, TenantListeners, Written,
    is_listener_parent,
};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName, ServiceId, ServiceKey};
use canal_model::ingress::{gateway_service, istio_gateway_service};
use canal_model::policy::{Document, Metadata};
use canal_model::program::{HttpMatch, PathMatch, RouteAction, RouteKey, RouteObject, RouteRule};
use canal_model::route_filters::{RedirectPort, RouteAnswer, UrlRedirect, UrlScheme};

use super::route_parts::RouteParts;
use super::tenant_objects::{Sourced, TenantObjects};
use crate::CompileInput;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::HOSTS_PER_ROUTE_MAX;
use crate::precedence;
use crate::resource_budget::ResourceBudget;

/// Maximum length of the reason why rules refuse on a Gateway, or why a filter closes a listener, in
/// characters.
/// Operators find the whole text in the diagnostic of the route.
pub(super) const FAULT_CHARACTERS_MAX: usize = 400;

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
        istio_gateways: written(&corpus.istio_gateways),
        has_grpc_routes: !corpus.grpc_routes.is_empty(),
    };
    let listeners = canal_attachment::resolve(input.tenant, &objects, &mut |it| report.add(it));
    let certificates = listeners.gateways().flat_map(|it| it.certificates.values());
    // The caller stops compiling if the budget is exceeded.
    for certificate in certificates {
        budget.add_certificate(certificate);
    }
    for validation in listeners.gateways().flat_map(|it| it.client_validations()) {
        budget.add_authorities(&validation.authorities);
    }
    let of_gateway_api = corpus.gateways.iter().map(|gateway| {
        let Metadata {
            namespace, name, ..
        } = &gateway.object.metadata;
        let is_own = listeners.is_own(namespace, name);
        let key = gateway_service(input.tenant, namespace, name);
        (gateway.document, is_own, key)
    });
    let of_istio = corpus.istio_gateways.iter().map(|gateway| {
        let Metadata {
            namespace, name, ..
        } = &gateway.object.metadata;
        let is_own = listeners.of_istio(namespace, name).is_some();
        let key = istio_gateway_service(input.tenant, namespace, name);
        (gateway.document, is_own, key)
    });
    let mut ids = BTreeMap::new();
    let all = of_gateway_api.chain(of_istio);
    for (document, _, key) in all.filter(|(_, is_own, _)| *is_own) {
        if !is_on_tier {
            report.error(
                Code::NotOnCloudTier,
                document,
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
                document,
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

/// Returns the rule by which a Gateway of Istio sends all requests of some servers to HTTPS.
fn redirect_rule(gateway: &Document, service: &ServiceKey) -> RouteRule {
    let metadata = gateway.object.metadata();
    RouteRule {
        key: RouteKey {
            tenant: service.tenant.clone(),
            kind: gateway.object.kind().as_str().to_owned(),
            namespace: metadata.namespace.clone(),
            name: metadata.name.clone(),
            rule: format!("{}.httpsRedirect", service.name),
        },
        parent: service.clone(),
        parent_port: None,
        consumer: None,
        hosts: Vec::new(),
        matches: vec![HttpMatch {
            precedence: precedence::istio(gateway, [0, 0]),
            path: PathMatch::StringPrefix("/".to_owned()),
            method: None,
            headers: Vec::new(),
            query: Vec::new(),
        }],
        // Istio keeps the host as the client sent it, with its port.
        action: RouteAction::Answer(Box::new(RouteAnswer::Redirect(UrlRedirect {
            status: 301,
            scheme: Some(UrlScheme::Https),
            host: None,
            port: RedirectPort::OfHost,
            path: None,
            query: None,
        }))),
        filters: None,
        attempts: None,
        faults: None,
        cors: None,
        mirrors: Vec::new(),
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
    /// Returns the ports of the listeners of a Gateway of Istio to which an object is attached, each
    /// once.
    pub(super) fn ports_of(
        &self,
        gateway: &(Namespace, ObjectName),
        attachments: &[Attachment],
    ) -> Vec<u16> {
        let own = attachments.iter();
        let ports: BTreeSet<u16> = own.filter_map(|it| self.port_of(gateway, it)).collect();
        ports.into_iter().collect()
    }

    /// Returns the port of the listener of a Gateway of Istio to which an object is attached.
    pub(super) fn port_of(
        &self,
        (namespace, name): &(Namespace, ObjectName),
        attachment: &Attachment,
    ) -> Option<u16> {
        let gateway = self.listeners.of_istio(namespace, name)?;
        let placed = gateway.listeners.get(attachment.listener)?;
        Some(placed.listener.port)
    }

    /// Puts the rule that sends all requests to HTTPS on the listeners that do nothing else, and
    /// returns the rule of each of their Gateways.
    pub(super) fn add_redirects(
        &mut self,
        corpus: &TenantObjects<'_>,
        budget: &mut ResourceBudget,
    ) -> Vec<RouteRule> {
        let mut rules = Vec::new();
        for sourced in &corpus.istio_gateways {
            let metadata = &sourced.object.metadata;
            let Some(gateway) = self.listeners.of_istio(&metadata.namespace, &metadata.name) else {
                continue;
            };
            let rule = redirect_rule(sourced.document, &gateway.service);
            let listeners = gateway.listeners.iter().enumerate();
            let redirects = listeners.filter(|(_, it)| it.redirects_to_https);
            let attachments = redirects.map(|(listener, placed)| Attachment {
                gateway: gateway.service.clone(),
                listener,
                hosts: vec![placed.listener.host.clone()],
                parent: 0,
            });
            let attachments: Vec<Attachment> = attachments.collect();
            if attachments.is_empty() {
                continue;
            }
            let object = rule.key.route();
            for attachment in attachments {
                if !budget.add_attachment(&attachment.hosts) {
                    return rules;
                }
                self.attachments.push((object.clone(), attachment));
            }
            if !budget.add_rule(&rule) {
                return rules;
            }
            rules.push(rule);
        }
        rules
    }

    /// Attaches a route to the listeners that its parents name. Returns the services that stand for
    /// their Gateways, each with the reason why the route's rules refuse there, if they do; and the
    /// Gateways of which a closed listener would take the route.
    pub(super) fn attach(
        &mut self,
        route: &Sourced<'_, RouteParts<'_>>,
        budget: &mut ResourceBudget,
        report: &mut DiagnosticCollector,
    ) -> (BTreeMap<ServiceKey, Option<String>>, BTreeSet<ServiceKey>) {
        let spec = route.object;
        let metadata = spec.metadata;
        let mut gateways = BTreeMap::new();
        // A route with too many hosts has none that could be compared.
        if !spec.parent_refs.iter().any(is_listener_parent)
            || spec.hostnames.len() > HOSTS_PER_ROUTE_MAX
        {
            return (gateways, BTreeSet::new());
        }
        let parents = RouteParents {
            document: route.document,
            namespace: &metadata.namespace,
            parents: spec.parent_refs,
            hostnames: spec.hostnames,
        };
        let AttachedRoute {
            attachments,
            closed_gateways,
        } = self.listeners.attach(&parents, &mut |it| report.add(it));
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
                return (BTreeMap::new(), closed_gateways);
            }
            let object = RouteObject {
                namespace: metadata.namespace.clone(),
                name: metadata.name.clone(),
                kind: spec.rules.kind().as_str().to_owned(),
            };
            self.attachments.push((object, attachment));
        }
        (gateways, closed_gateways)
    }
}
