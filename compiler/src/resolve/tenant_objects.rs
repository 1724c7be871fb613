//! Sorts the tenant's documents by kind: each object once, the oldest first.

use std::collections::BTreeMap;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::canal::{
    ExternalAuthorizer, Federation, GatewayReplica, KeyServer, Tenant, Termination, Throttle,
};
use canal_model::policy::config_map::ConfigMap;
use canal_model::policy::endpoints::{EndpointSlice, Endpoints};
use canal_model::policy::gateway_api::{
    GrpcRoute, HttpRoute, ReferenceGrant, TcpRoute, TlsRoute, UdpRoute,
};
use canal_model::policy::istio::{DestinationRule, VirtualService};
use canal_model::policy::istio_gateway::IstioGateway;
use canal_model::policy::istio_security::{
    AuthorizationPolicy, PeerAuthentication, RequestAuthentication,
};
use canal_model::policy::kubernetes::{NamespaceObject, Node, Pod, Service};
use canal_model::policy::listeners::{Gateway, GatewayClass, ListenerSet};
use canal_model::policy::preferences::{OffloadPreference, TrafficPriority};
use canal_model::policy::secret::Secret;
use canal_model::policy::trust_bundle::ClusterTrustBundle;
use canal_model::policy::{Document, Object, ObjectKey, ObjectKind};

pub(crate) use canal_diagnostics::Sourced;

use crate::CompileInput;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::OBJECTS_PER_TENANT_MAX;
use crate::precedence::seniority;

/// All objects of a tenant, sorted by kind.
#[derive(Default)]
pub(crate) struct TenantObjects<'a> {
    pub(crate) tenants: Vec<Sourced<'a, Tenant>>,
    pub(crate) gateway_replicas: Vec<Sourced<'a, GatewayReplica>>,
    pub(crate) gateway_classes: Vec<Sourced<'a, GatewayClass>>,
    pub(crate) gateways: Vec<Sourced<'a, Gateway>>,
    pub(crate) listener_sets: Vec<Sourced<'a, ListenerSet>>,
    pub(crate) namespaces: Vec<Sourced<'a, NamespaceObject>>,
    pub(crate) secrets: Vec<Sourced<'a, Secret>>,
    pub(crate) config_maps: Vec<Sourced<'a, ConfigMap>>,
    pub(crate) trust_bundles: Vec<Sourced<'a, ClusterTrustBundle>>,
    pub(crate) nodes: Vec<Sourced<'a, Node>>,
    pub(crate) services: Vec<Sourced<'a, Service>>,
    pub(crate) endpoint_slices: Vec<Sourced<'a, EndpointSlice>>,
    pub(crate) endpoints: Vec<Sourced<'a, Endpoints>>,
    pub(crate) pods: Vec<Sourced<'a, Pod>>,
    pub(crate) http_routes: Vec<Sourced<'a, HttpRoute>>,
    pub(crate) grpc_routes: Vec<Sourced<'a, GrpcRoute>>,
    pub(crate) udp_routes: Vec<Sourced<'a, UdpRoute>>,
    pub(crate) tls_routes: Vec<Sourced<'a, TlsRoute>>,
    pub(crate) tcp_routes: Vec<Sourced<'a, TcpRoute>>,
    pub(crate) grants: Vec<Sourced<'a, ReferenceGrant>>,
    pub(crate) istio_gateways: Vec<Sourced<'a, IstioGateway>>,
    pub(crate) virtual_services: Vec<Sourced<'a, VirtualService>>,
    pub(crate) destination_rules: Vec<Sourced<'a, DestinationRule>>,
    pub(crate) throttles: Vec<Sourced<'a, Throttle>>,
    pub(crate) authorization_policies: Vec<Sourced<'a, AuthorizationPolicy>>,
    pub(crate) request_authentications: Vec<Sourced<'a, RequestAuthentication>>,
    pub(crate) peer_authentications: Vec<Sourced<'a, PeerAuthentication>>,
    pub(crate) external_authorizers: Vec<Sourced<'a, ExternalAuthorizer>>,
    pub(crate) federations: Vec<Sourced<'a, Federation>>,
    pub(crate) key_servers: Vec<Sourced<'a, KeyServer>>,
    pub(crate) terminations: Vec<Sourced<'a, Termination>>,
    pub(crate) offload_preferences: Vec<Sourced<'a, OffloadPreference>>,
    pub(crate) traffic_priorities: Vec<Sourced<'a, TrafficPriority>>,
}

impl<'a> TenantObjects<'a> {
    pub(crate) fn collect(input: &CompileInput<'a>, report: &mut DiagnosticCollector) -> Self {
        let mut unique: BTreeMap<ObjectKey, &Document> = BTreeMap::new();
        for document in input.documents.iter().map(AsRef::as_ref) {
            let key = document.object.key();
            let Some(other) = unique.get(&key).copied() else {
                unique.insert(key, document);
                continue;
            };
            // The position decides between duplicates, so that the result does not depend on the
            // order of the documents.
            let (first, second) = if other.origin <= document.origin {
                (other, document)
            } else {
                (document, other)
            };
            let problem = format!(
                "this object is also defined in {}; that definition is used",
                first.origin
            );
            report.error(
                Code::DuplicateObject,
                second,
                "metadata.name",
                problem,
                "remove one of them or rename it",
            );
            unique.insert(key, first);
        }
        let mut documents: Vec<&Document> = unique.into_values().collect();
        // The last ones are left out if there are too many, which must not open anything.
        documents.sort_by(|a, b| {
            (rank(a.object.kind()), seniority(a)).cmp(&(rank(b.object.kind()), seniority(b)))
        });
        if documents.len() > OBJECTS_PER_TENANT_MAX {
            let problem = format!(
                "the tenant has {} objects, more than {OBJECTS_PER_TENANT_MAX}; the rest is left out",
                documents.len()
            );
            report.general(
                Code::LimitExceeded,
                problem,
                "remove objects or split the tenant",
            );
            documents.truncate(OBJECTS_PER_TENANT_MAX);
        }
        Self::of(documents)
    }

    /// Sorts documents by kind. Within a kind they keep their order.
    pub(crate) fn of(documents: impl IntoIterator<Item = &'a Document>) -> Self {
        let mut corpus = TenantObjects::default();
        documents
            .into_iter()
            .for_each(|document| corpus.add(document));
        corpus
    }

    fn add(&mut self, document: &'a Document) {
        match &document.object {
            Object::Tenant(object) => self.tenants.push(Sourced { document, object }),
            Object::GatewayReplica(object) => {
                self.gateway_replicas.push(Sourced { document, object })
            }
            Object::GatewayClass(object) => self.gateway_classes.push(Sourced { document, object }),
            Object::Gateway(object) => self.gateways.push(Sourced { document, object }),
            Object::ListenerSet(object) => self.listener_sets.push(Sourced { document, object }),
            Object::Namespace(object) => self.namespaces.push(Sourced { document, object }),
            Object::Secret(object) => self.secrets.push(Sourced { document, object }),
            Object::ConfigMap(object) => self.config_maps.push(Sourced { document, object }),
            Object::ClusterTrustBundle(object) => {
                self.trust_bundles.push(Sourced { document, object })
            }
            Object::Node(object) => self.nodes.push(Sourced { document, object }),
            Object::Service(object) => self.services.push(Sourced { document, object }),
            Object::Pod(object) => self.pods.push(Sourced { document, object }),
            Object::EndpointSlice(object) => {
                self.endpoint_slices.push(Sourced { document, object })
            }
            Object::Endpoints(object) => self.endpoints.push(Sourced { document, object }),
            // Nothing refers to these by more than their names, which need no object.
            Object::ServiceAccount(_) => {}
            Object::HttpRoute(object) => self.http_routes.push(Sourced { document, object }),
            Object::GrpcRoute(object) => self.grpc_routes.push(Sourced { document, object }),
            Object::UdpRoute(object) => self.udp_routes.push(Sourced { document, object }),
            Object::TlsRoute(object) => self.tls_routes.push(Sourced { document, object }),
            Object::TcpRoute(object) => self.tcp_routes.push(Sourced { document, object }),
            Object::ReferenceGrant(object) => self.grants.push(Sourced { document, object }),
            Object::IstioGateway(object) => self.istio_gateways.push(Sourced { document, object }),
            Object::VirtualService(object) => {
                self.virtual_services.push(Sourced { document, object })
            }
            Object::DestinationRule(object) => {
                self.destination_rules.push(Sourced { document, object })
            }
            Object::Throttle(object) => self.throttles.push(Sourced { document, object }),
            Object::AuthorizationPolicy(object) => self
                .authorization_policies
                .push(Sourced { document, object }),
            Object::RequestAuthentication(object) => self
                .request_authentications
                .push(Sourced { document, object }),
            Object::PeerAuthentication(object) => {
                self.peer_authentications.push(Sourced { document, object })
            }
            Object::ExternalAuthorizer(object) => {
                self.external_authorizers.push(Sourced { document, object })
            }
            Object::Federation(object) => self.federations.push(Sourced { document, object }),
            Object::KeyServer(object) => self.key_servers.push(Sourced { document, object }),
            Object::Termination(object) => self.terminations.push(Sourced { document, object }),
            Object::OffloadPreference(object) => {
                self.offload_preferences.push(Sourced { document, object })
            }
            Object::TrafficPriority(object) => {
                self.traffic_priorities.push(Sourced { document, object })
            }
        }
    }
}

/// Returns the rank of a kind; kinds with the highest rank are left out first if there are too many
/// objects. Before those without an effect come pods, before them services. Leaving out a policy, a
/// route or a throttle would open what it restricts.
fn rank(kind: ObjectKind) -> u8 {
    match kind {
        ObjectKind::Tenant => 0,
        ObjectKind::GatewayReplica | ObjectKind::Node => 1,
        ObjectKind::AuthorizationPolicy
        | ObjectKind::RequestAuthentication
        | ObjectKind::PeerAuthentication
        | ObjectKind::Termination => 1,
        ObjectKind::ExternalAuthorizer | ObjectKind::KeyServer | ObjectKind::Federation => 1,
        ObjectKind::HttpRoute
        | ObjectKind::GrpcRoute
        | ObjectKind::UdpRoute
        | ObjectKind::TlsRoute
        | ObjectKind::TcpRoute
        | ObjectKind::VirtualService
        | ObjectKind::Throttle => 2,
        ObjectKind::GatewayClass | ObjectKind::Gateway | ObjectKind::ListenerSet => 2,
        ObjectKind::IstioGateway => 2,
        // A listener may exclude namespaces by their labels.
        ObjectKind::Namespace => 2,
        ObjectKind::DestinationRule | ObjectKind::ReferenceGrant => 3,
        // A listener without its certificates is closed.
        ObjectKind::Secret | ObjectKind::ConfigMap | ObjectKind::ClusterTrustBundle => 3,
        ObjectKind::Service | ObjectKind::EndpointSlice | ObjectKind::Endpoints => 4,
        ObjectKind::Pod => 5,
        // Without these, traffic takes the usual path in the usual order.
        ObjectKind::OffloadPreference | ObjectKind::TrafficPriority => 6,
        ObjectKind::ServiceAccount => 6,
    }
}
