//! Objects that users write: Kubernetes, Gateway API, Istio and Canal objects as typed structs.
//! `control/sources` reads them from YAML, and `compiler` interprets them together. A field that is
//! missing here is not supported, and `sources` refuses it by name. Start at [`Object`] and
//! [`Document`].

pub mod attempts;
pub mod canal;
pub mod config_map;
pub mod cors;
pub mod endpoints;
pub mod external_auth;
pub mod faults;
pub mod frontend_tls;
pub mod gateway_api;
pub mod istio;
pub mod istio_gateway;
pub mod istio_security;
pub mod kubernetes;
pub mod listeners;
pub mod load_balancing;
mod metadata;
pub mod mirrors;
pub mod preferences;
pub mod secret;
pub mod trust_bundle;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use metadata::{Metadata, READ_ANNOTATIONS, Timestamp};

use crate::diagnostic::SourceLocation;
use crate::ids::{IdError, Namespace, ObjectName};

/// One object of any kind that Canal reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Object {
    Pod(kubernetes::Pod),
    Service(kubernetes::Service),
    EndpointSlice(endpoints::EndpointSlice),
    Endpoints(endpoints::Endpoints),
    Namespace(kubernetes::NamespaceObject),
    ServiceAccount(kubernetes::ServiceAccountObject),
    Secret(secret::Secret),
    ConfigMap(config_map::ConfigMap),
    ClusterTrustBundle(trust_bundle::ClusterTrustBundle),
    HttpRoute(gateway_api::HttpRoute),
    GrpcRoute(gateway_api::GrpcRoute),
    UdpRoute(gateway_api::UdpRoute),
    TlsRoute(gateway_api::TlsRoute),
    TcpRoute(gateway_api::TcpRoute),
    ReferenceGrant(gateway_api::ReferenceGrant),
    IstioGateway(istio_gateway::IstioGateway),
    VirtualService(istio::VirtualService),
    DestinationRule(istio::DestinationRule),
    Tenant(canal::Tenant),
    GatewayReplica(canal::GatewayReplica),
    GatewayClass(listeners::GatewayClass),
    Gateway(listeners::Gateway),
    ListenerSet(listeners::ListenerSet),
    Node(kubernetes::Node),
    Throttle(canal::Throttle),
    AuthorizationPolicy(istio_security::AuthorizationPolicy),
    RequestAuthentication(istio_security::RequestAuthentication),
    PeerAuthentication(istio_security::PeerAuthentication),
    ExternalAuthorizer(canal::ExternalAuthorizer),
    Federation(canal::Federation),
    KeyServer(canal::KeyServer),
    Termination(canal::Termination),
    OffloadPreference(preferences::OffloadPreference),
    TrafficPriority(preferences::TrafficPriority),
}

/// The kinds of objects, in the order of listings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ObjectKind {
    Tenant,
    GatewayReplica,
    Node,
    Namespace,
    ServiceAccount,
    Secret,
    ConfigMap,
    ClusterTrustBundle,
    Service,
    EndpointSlice,
    Endpoints,
    Pod,
    GatewayClass,
    Gateway,
    ListenerSet,
    HttpRoute,
    GrpcRoute,
    UdpRoute,
    TlsRoute,
    TcpRoute,
    ReferenceGrant,
    /// A Gateway of `networking.istio.io`; [`ObjectKind::Gateway`] is one of Gateway API.
    IstioGateway,
    VirtualService,
    DestinationRule,
    Throttle,
    AuthorizationPolicy,
    RequestAuthentication,
    PeerAuthentication,
    ExternalAuthorizer,
    Federation,
    KeyServer,
    Termination,
    OffloadPreference,
    TrafficPriority,
}

impl ObjectKind {
    /// All kinds of objects, in the order of listings.
    pub const ALL: [ObjectKind; 34] = [
        ObjectKind::Tenant,
        ObjectKind::GatewayReplica,
        ObjectKind::Node,
        ObjectKind::Namespace,
        ObjectKind::ServiceAccount,
        ObjectKind::Secret,
        ObjectKind::ConfigMap,
        ObjectKind::ClusterTrustBundle,
        ObjectKind::Service,
        ObjectKind::EndpointSlice,
        ObjectKind::Endpoints,
        ObjectKind::Pod,
        ObjectKind::GatewayClass,
        ObjectKind::Gateway,
        ObjectKind::ListenerSet,
        ObjectKind::HttpRoute,
        ObjectKind::GrpcRoute,
        ObjectKind::UdpRoute,
        ObjectKind::TlsRoute,
        ObjectKind::TcpRoute,
        ObjectKind::ReferenceGrant,
        ObjectKind::IstioGateway,
        ObjectKind::VirtualService,
        ObjectKind::DestinationRule,
        ObjectKind::Throttle,
        ObjectKind::AuthorizationPolicy,
        ObjectKind::RequestAuthentication,
        ObjectKind::PeerAuthentication,
        ObjectKind::ExternalAuthorizer,
        ObjectKind::Federation,
        ObjectKind::KeyServer,
        ObjectKind::Termination,
        ObjectKind::OffloadPreference,
        ObjectKind::TrafficPriority,
    ];

    /// Returns the name of the kind among all kinds: the value of `kind:` in YAML, with its group if
    /// another kind has the same.
    pub fn as_str(self) -> &'static str {
        match self {
            ObjectKind::Tenant => "Tenant",
            ObjectKind::GatewayReplica => "GatewayReplica",
            ObjectKind::Node => "Node",
            ObjectKind::Namespace => "Namespace",
            ObjectKind::ServiceAccount => "ServiceAccount",
            ObjectKind::Secret => "Secret",
            ObjectKind::ConfigMap => "ConfigMap",
            ObjectKind::ClusterTrustBundle => "ClusterTrustBundle",
            ObjectKind::Service => "Service",
            ObjectKind::EndpointSlice => "EndpointSlice",
            ObjectKind::Endpoints => "Endpoints",
            ObjectKind::Pod => "Pod",
            ObjectKind::GatewayClass => "GatewayClass",
            ObjectKind::Gateway => "Gateway",
            ObjectKind::ListenerSet => "ListenerSet",
            ObjectKind::HttpRoute => "HTTPRoute",
            ObjectKind::GrpcRoute => "GRPCRoute",
            ObjectKind::UdpRoute => "UDPRoute",
            ObjectKind::TlsRoute => "TLSRoute",
            ObjectKind::TcpRoute => "TCPRoute",
            ObjectKind::ReferenceGrant => "ReferenceGrant",
            ObjectKind::IstioGateway => "Gateway.networking.istio.io",
            ObjectKind::VirtualService => "VirtualService",
            ObjectKind::DestinationRule => "DestinationRule",
            ObjectKind::Throttle => "Throttle",
            ObjectKind::AuthorizationPolicy => "AuthorizationPolicy",
            ObjectKind::RequestAuthentication => "RequestAuthentication",
            ObjectKind::PeerAuthentication => "PeerAuthentication",
            ObjectKind::ExternalAuthorizer => "ExternalAuthorizer",
            ObjectKind::Federation => "Federation",
            ObjectKind::KeyServer => "KeyServer",
            ObjectKind::Termination => "Termination",
            ObjectKind::OffloadPreference => "OffloadPreference",
            ObjectKind::TrafficPriority => "TrafficPriority",
        }
    }

    /// Returns the value of `kind:` in YAML.
    pub fn yaml_kind(self) -> &'static str {
        match self {
            ObjectKind::IstioGateway => "Gateway",
            other => other.as_str(),
        }
    }

    /// Returns the accepted values of `apiVersion:`; the first is the recommended one.
    /// Older versions are accepted, because manifests that are still in use name them.
    pub fn api_versions(self) -> &'static [&'static str] {
        match self {
            ObjectKind::Tenant | ObjectKind::GatewayReplica | ObjectKind::Throttle => {
                &["canal.mesh/v1"]
            }
            ObjectKind::ExternalAuthorizer
            | ObjectKind::Federation
            | ObjectKind::KeyServer
            | ObjectKind::Termination
            | ObjectKind::OffloadPreference
            | ObjectKind::TrafficPriority => &["canal.mesh/v1"],
            ObjectKind::AuthorizationPolicy
            | ObjectKind::RequestAuthentication
            | ObjectKind::PeerAuthentication => {
                &["security.istio.io/v1", "security.istio.io/v1beta1"]
            }
            ObjectKind::Service | ObjectKind::Pod | ObjectKind::Node => &["v1"],
            ObjectKind::Endpoints | ObjectKind::Namespace => &["v1"],
            ObjectKind::ServiceAccount | ObjectKind::Secret | ObjectKind::ConfigMap => &["v1"],
            ObjectKind::ClusterTrustBundle => &[
                "certificates.k8s.io/v1beta1",
                "certificates.k8s.io/v1alpha1",
            ],
            ObjectKind::EndpointSlice => &["discovery.k8s.io/v1"],
            ObjectKind::GatewayClass | ObjectKind::Gateway | ObjectKind::HttpRoute => &[
                "gateway.networking.k8s.io/v1",
                "gateway.networking.k8s.io/v1beta1",
            ],
            // Gateway API served v1alpha2 until v1.2.
            ObjectKind::GrpcRoute => &[
                "gateway.networking.k8s.io/v1",
                "gateway.networking.k8s.io/v1alpha2",
            ],
            ObjectKind::ListenerSet => &["gateway.networking.k8s.io/v1"],
            ObjectKind::TlsRoute => &[
                "gateway.networking.k8s.io/v1",
                "gateway.networking.k8s.io/v1alpha3",
                "gateway.networking.k8s.io/v1alpha2",
            ],
            // In v1 since Gateway API v1.6.
            ObjectKind::TcpRoute | ObjectKind::UdpRoute => &[
                "gateway.networking.k8s.io/v1",
                "gateway.networking.k8s.io/v1alpha2",
            ],
            ObjectKind::ReferenceGrant => &[
                "gateway.networking.k8s.io/v1",
                "gateway.networking.k8s.io/v1beta1",
            ],
            ObjectKind::IstioGateway | ObjectKind::VirtualService | ObjectKind::DestinationRule => {
                &[
                    "networking.istio.io/v1",
                    "networking.istio.io/v1beta1",
                    "networking.istio.io/v1alpha3",
                ]
            }
        }
    }

    /// Returns whether only the provider of the mesh may write objects of this kind, because they
    /// decide about isolation.
    pub fn is_providers(self) -> bool {
        matches!(
            self,
            ObjectKind::Tenant | ObjectKind::GatewayReplica | ObjectKind::Node
        )
    }

    /// Parses a kind as users of a CLI write it: in any case, singular or plural, or the usual
    /// short name.
    pub fn from_word(word: &str) -> Option<Self> {
        let word = word.to_ascii_lowercase();
        Some(match word.as_str() {
            "tenant" | "tenants" => ObjectKind::Tenant,
            "gatewayreplica" | "gatewayreplicas" => ObjectKind::GatewayReplica,
            "node" | "nodes" | "no" => ObjectKind::Node,
            "namespace" | "namespaces" | "ns" => ObjectKind::Namespace,
            "serviceaccount" | "serviceaccounts" | "sa" => ObjectKind::ServiceAccount,
            "secret" | "secrets" => ObjectKind::Secret,
            "configmap" | "configmaps" | "cm" => ObjectKind::ConfigMap,
            "clustertrustbundle" | "clustertrustbundles" => ObjectKind::ClusterTrustBundle,
            "service" | "services" | "svc" => ObjectKind::Service,
            "endpointslice" | "endpointslices" => ObjectKind::EndpointSlice,
            "endpoints" | "ep" => ObjectKind::Endpoints,
            "pod" | "pods" | "po" => ObjectKind::Pod,
            "gatewayclass" | "gatewayclasses" | "gc" => ObjectKind::GatewayClass,
            // As for kubectl: `gtw` is Gateway API's short name, and `gw` below is Istio's.
            "gateway" | "gateways" | "gtw" => ObjectKind::Gateway,
            "listenerset" | "listenersets" | "lset" => ObjectKind::ListenerSet,
            "httproute" | "httproutes" => ObjectKind::HttpRoute,
            "grpcroute" | "grpcroutes" => ObjectKind::GrpcRoute,
            "udproute" | "udproutes" => ObjectKind::UdpRoute,
            "tlsroute" | "tlsroutes" => ObjectKind::TlsRoute,
            "tcproute" | "tcproutes" => ObjectKind::TcpRoute,
            "referencegrant" | "referencegrants" | "refgrant" => ObjectKind::ReferenceGrant,
            "gateway.networking.istio.io" | "gateways.networking.istio.io" | "gw" => {
                ObjectKind::IstioGateway
            }
            "virtualservice" | "virtualservices" | "vs" => ObjectKind::VirtualService,
            "destinationrule" | "destinationrules" | "dr" => ObjectKind::DestinationRule,
            "throttle" | "throttles" => ObjectKind::Throttle,
            "authorizationpolicy" | "authorizationpolicies" | "ap" => {
                ObjectKind::AuthorizationPolicy
            }
            "requestauthentication" | "requestauthentications" | "ra" => {
                ObjectKind::RequestAuthentication
            }
            "peerauthentication" | "peerauthentications" | "pa" => ObjectKind::PeerAuthentication,
            "externalauthorizer" | "externalauthorizers" => ObjectKind::ExternalAuthorizer,
            "federation" | "federations" => ObjectKind::Federation,
            "keyserver" | "keyservers" => ObjectKind::KeyServer,
            "termination" | "terminations" => ObjectKind::Termination,
            "offloadpreference" | "offloadpreferences" => ObjectKind::OffloadPreference,
            "trafficpriority" | "trafficpriorities" => ObjectKind::TrafficPriority,
            _ => return None,
        })
    }
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Identifies one object inside a tenant; written `Kind namespace/name`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    pub kind: ObjectKind,
    /// Namespace of the object; `default` for kinds that have no namespace.
    pub namespace: Namespace,
    pub name: ObjectName,
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.kind, self.namespace, self.name)
    }
}

impl FromStr for ObjectKey {
    type Err = IdError;
    fn from_str(s: &str) -> Result<Self, IdError> {
        let form = || IdError::Form {
            what: "object",
            value: s.chars().take(120).collect(),
            form: "Kind namespace/name",
        };
        let (kind, rest) = s.split_once(' ').ok_or_else(form)?;
        let (namespace, name) = rest.split_once('/').ok_or_else(form)?;
        let kind = ObjectKind::from_word(kind).ok_or_else(form)?;
        Ok(Self {
            kind,
            namespace: Namespace::new(namespace)?,
            name: ObjectName::new(name)?,
        })
    }
}

impl Object {
    /// Returns the kind of the object.
    pub fn kind(&self) -> ObjectKind {
        match self {
            Object::Pod(_) => ObjectKind::Pod,
            Object::Service(_) => ObjectKind::Service,
            Object::EndpointSlice(_) => ObjectKind::EndpointSlice,
            Object::Endpoints(_) => ObjectKind::Endpoints,
            Object::Namespace(_) => ObjectKind::Namespace,
            Object::ServiceAccount(_) => ObjectKind::ServiceAccount,
            Object::Secret(_) => ObjectKind::Secret,
            Object::ConfigMap(_) => ObjectKind::ConfigMap,
            Object::ClusterTrustBundle(_) => ObjectKind::ClusterTrustBundle,
            Object::HttpRoute(_) => ObjectKind::HttpRoute,
            Object::GrpcRoute(_) => ObjectKind::GrpcRoute,
            Object::UdpRoute(_) => ObjectKind::UdpRoute,
            Object::TlsRoute(_) => ObjectKind::TlsRoute,
            Object::TcpRoute(_) => ObjectKind::TcpRoute,
            Object::ReferenceGrant(_) => ObjectKind::ReferenceGrant,
            Object::IstioGateway(_) => ObjectKind::IstioGateway,
            Object::VirtualService(_) => ObjectKind::VirtualService,
            Object::DestinationRule(_) => ObjectKind::DestinationRule,
            Object::Tenant(_) => ObjectKind::Tenant,
            Object::GatewayReplica(_) => ObjectKind::GatewayReplica,
            Object::GatewayClass(_) => ObjectKind::GatewayClass,
            Object::Gateway(_) => ObjectKind::Gateway,
            Object::ListenerSet(_) => ObjectKind::ListenerSet,
            Object::Node(_) => ObjectKind::Node,
            Object::Throttle(_) => ObjectKind::Throttle,
            Object::AuthorizationPolicy(_) => ObjectKind::AuthorizationPolicy,
            Object::RequestAuthentication(_) => ObjectKind::RequestAuthentication,
            Object::PeerAuthentication(_) => ObjectKind::PeerAuthentication,
            Object::ExternalAuthorizer(_) => ObjectKind::ExternalAuthorizer,
            Object::Federation(_) => ObjectKind::Federation,
            Object::KeyServer(_) => ObjectKind::KeyServer,
            Object::Termination(_) => ObjectKind::Termination,
            Object::OffloadPreference(_) => ObjectKind::OffloadPreference,
            Object::TrafficPriority(_) => ObjectKind::TrafficPriority,
        }
    }

    /// Returns the name, namespace, labels and age of the object.
    pub fn metadata(&self) -> &Metadata {
        match self {
            Object::Pod(o) => &o.metadata,
            Object::Service(o) => &o.metadata,
            Object::EndpointSlice(o) => &o.metadata,
            Object::Endpoints(o) => &o.metadata,
            Object::Namespace(o) => &o.metadata,
            Object::ServiceAccount(o) => &o.metadata,
            Object::Secret(o) => &o.metadata,
            Object::ConfigMap(o) => &o.metadata,
            Object::ClusterTrustBundle(o) => &o.metadata,
            Object::HttpRoute(o) => &o.metadata,
            Object::GrpcRoute(o) => &o.metadata,
            Object::UdpRoute(o) => &o.metadata,
            Object::TlsRoute(o) => &o.metadata,
            Object::TcpRoute(o) => &o.metadata,
            Object::ReferenceGrant(o) => &o.metadata,
            Object::IstioGateway(o) => &o.metadata,
            Object::VirtualService(o) => &o.metadata,
            Object::DestinationRule(o) => &o.metadata,
            Object::Tenant(o) => &o.metadata,
            Object::GatewayReplica(o) => &o.metadata,
            Object::GatewayClass(o) => &o.metadata,
            Object::Gateway(o) => &o.metadata,
            Object::ListenerSet(o) => &o.metadata,
            Object::Node(o) => &o.metadata,
            Object::Throttle(o) => &o.metadata,
            Object::AuthorizationPolicy(o) => &o.metadata,
            Object::RequestAuthentication(o) => &o.metadata,
            Object::PeerAuthentication(o) => &o.metadata,
            Object::ExternalAuthorizer(o) => &o.metadata,
            Object::Federation(o) => &o.metadata,
            Object::KeyServer(o) => &o.metadata,
            Object::Termination(o) => &o.metadata,
            Object::OffloadPreference(o) => &o.metadata,
            Object::TrafficPriority(o) => &o.metadata,
        }
    }

    /// Returns the object's key among its tenant's objects.
    pub fn key(&self) -> ObjectKey {
        let metadata = self.metadata();
        ObjectKey {
            kind: self.kind(),
            namespace: metadata.namespace.clone(),
            name: metadata.name.clone(),
        }
    }
}

/// One parsed YAML document: the object, its position, its own text, and the fields that were
/// rejected.
#[derive(Clone, PartialEq, Eq)]
pub struct Document {
    pub object: Object,
    /// Position of the document's first line.
    pub origin: SourceLocation,
    /// Text of the document as written, without the `---` lines. Parsing this text alone gives the
    /// same object and faults.
    pub text: Arc<str>,
    /// Rejected fields: `object` contains less than the user wrote. The compiler lets everything
    /// that they affect fail closed.
    pub faults: Vec<RejectedField>,
}

/// Text in place of that of a Secret.
const HIDDEN_TEXT: &str = "apiVersion: v1\nkind: Secret\n# Canal shows no data of Secrets.\n";

impl Document {
    /// Returns the text for people and dumps: that of a Secret is hidden.
    pub fn shown_text(&self) -> &str {
        match self.object {
            Object::Secret(_) => HIDDEN_TEXT,
            _ => &self.text,
        }
    }
}

impl fmt::Debug for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Document")
            .field("object", &self.object)
            .field("origin", &self.origin)
            .field("text", &self.shown_text())
            .field("faults", &self.faults)
            .finish()
    }
}

/// A field that was removed from an object because it is wrong or not supported. The reader has
/// already reported its diagnostic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RejectedField {
    /// Path of the field, e.g. `spec.rules[0].filters`.
    pub field: String,
    pub problem: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_one_spelling_and_reads_back() {
        for kind in ObjectKind::ALL {
            assert_eq!(ObjectKind::from_word(kind.as_str()), Some(kind));
            let word = kind.as_str().to_lowercase();
            let (word, group) = match word.split_once('.') {
                Some((word, group)) => (word.to_owned(), format!(".{group}")),
                None => (word, String::new()),
            };
            let ends_in_ies = word.ends_with("cy") || word.ends_with("ty");
            let plural = match word.strip_suffix('y') {
                Some(stem) if ends_in_ies => format!("{stem}ies"),
                _ if word.ends_with('s') => word,
                _ => format!("{word}s{group}"),
            };
            assert_eq!(ObjectKind::from_word(&plural), Some(kind));
            assert!(!kind.api_versions().is_empty());
            let key: ObjectKey = format!("{kind} bookinfo/reviews").parse().unwrap();
            assert_eq!(key.to_string(), format!("{kind} bookinfo/reviews"));
        }
        assert_eq!(ObjectKind::from_word("Deployment"), None);
        assert!("HTTPRoute reviews".parse::<ObjectKey>().is_err());
    }
}
