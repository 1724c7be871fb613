//! What users write: Kubernetes, Gateway API, Istio and Canal objects as typed structs. Reading them from YAML is `control/sources`;
//! what they mean together is `compiler`. A field that is not here is not supported, and `sources` refuses it by name.

pub mod istio;
pub mod kubernetes;
pub mod mesh;
mod metadata;
pub mod route;
pub mod security;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use metadata::{Metadata, READ_ANNOTATIONS, Timestamp};

use crate::diagnostic::Origin;
use crate::ids::{IdError, Namespace, ObjectName};

/// One object of any kind that Canal reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Object {
    Pod(kubernetes::Pod),
    Service(kubernetes::Service),
    HttpRoute(route::HttpRoute),
    UdpRoute(route::UdpRoute),
    ReferenceGrant(route::ReferenceGrant),
    VirtualService(istio::VirtualService),
    DestinationRule(istio::DestinationRule),
    Tenant(mesh::Tenant),
    Gateway(mesh::Gateway),
    Node(kubernetes::Node),
    Throttle(mesh::Throttle),
    AuthorizationPolicy(security::AuthorizationPolicy),
    RequestAuthentication(security::RequestAuthentication),
    PeerAuthentication(security::PeerAuthentication),
    ExternalAuthorizer(mesh::ExternalAuthorizer),
    Federation(mesh::Federation),
    KeyServer(mesh::KeyServer),
    Termination(mesh::Termination),
}

/// The kinds of objects, in the order in which listings show them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ObjectKind {
    Tenant,
    Gateway,
    Node,
    Service,
    Pod,
    HttpRoute,
    UdpRoute,
    ReferenceGrant,
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
}

impl ObjectKind {
    /// All kinds.
    pub const ALL: [ObjectKind; 18] = [
        ObjectKind::Tenant,
        ObjectKind::Gateway,
        ObjectKind::Node,
        ObjectKind::Service,
        ObjectKind::Pod,
        ObjectKind::HttpRoute,
        ObjectKind::UdpRoute,
        ObjectKind::ReferenceGrant,
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
    ];

    /// The `kind:` in YAML.
    pub fn as_str(self) -> &'static str {
        match self {
            ObjectKind::Tenant => "Tenant",
            ObjectKind::Gateway => "Gateway",
            ObjectKind::Node => "Node",
            ObjectKind::Service => "Service",
            ObjectKind::Pod => "Pod",
            ObjectKind::HttpRoute => "HTTPRoute",
            ObjectKind::UdpRoute => "UDPRoute",
            ObjectKind::ReferenceGrant => "ReferenceGrant",
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
        }
    }

    /// The accepted values of `apiVersion:`; the first is the one to write.
    pub fn api_versions(self) -> &'static [&'static str] {
        match self {
            ObjectKind::Tenant | ObjectKind::Gateway | ObjectKind::Throttle => &["canal.mesh/v1"],
            ObjectKind::ExternalAuthorizer | ObjectKind::Federation | ObjectKind::KeyServer | ObjectKind::Termination => &["canal.mesh/v1"],
            ObjectKind::AuthorizationPolicy | ObjectKind::RequestAuthentication | ObjectKind::PeerAuthentication => {
                &["security.istio.io/v1", "security.istio.io/v1beta1"]
            }
            ObjectKind::Service | ObjectKind::Pod | ObjectKind::Node => &["v1"],
            ObjectKind::HttpRoute => &["gateway.networking.k8s.io/v1", "gateway.networking.k8s.io/v1beta1"],
            ObjectKind::UdpRoute => &["gateway.networking.k8s.io/v1alpha2"],
            ObjectKind::ReferenceGrant => &["gateway.networking.k8s.io/v1", "gateway.networking.k8s.io/v1beta1"],
            ObjectKind::VirtualService | ObjectKind::DestinationRule => {
                &["networking.istio.io/v1", "networking.istio.io/v1beta1", "networking.istio.io/v1alpha3"]
            }
        }
    }

    /// True for the kinds that only the provider of the mesh may write: they decide about isolation.
    pub fn is_providers(self) -> bool {
        matches!(self, ObjectKind::Tenant | ObjectKind::Gateway | ObjectKind::Node)
    }

    /// As a user of a CLI writes it: any case, singular or plural, or the usual short name.
    pub fn from_word(word: &str) -> Option<Self> {
        let word = word.to_ascii_lowercase();
        Some(match word.as_str() {
            "tenant" | "tenants" => ObjectKind::Tenant,
            "gateway" | "gateways" | "gw" => ObjectKind::Gateway,
            "node" | "nodes" | "no" => ObjectKind::Node,
            "service" | "services" | "svc" => ObjectKind::Service,
            "pod" | "pods" | "po" => ObjectKind::Pod,
            "httproute" | "httproutes" => ObjectKind::HttpRoute,
            "udproute" | "udproutes" => ObjectKind::UdpRoute,
            "referencegrant" | "referencegrants" | "refgrant" => ObjectKind::ReferenceGrant,
            "virtualservice" | "virtualservices" | "vs" => ObjectKind::VirtualService,
            "destinationrule" | "destinationrules" | "dr" => ObjectKind::DestinationRule,
            "throttle" | "throttles" => ObjectKind::Throttle,
            "authorizationpolicy" | "authorizationpolicies" | "ap" => ObjectKind::AuthorizationPolicy,
            "requestauthentication" | "requestauthentications" | "ra" => ObjectKind::RequestAuthentication,
            "peerauthentication" | "peerauthentications" | "pa" => ObjectKind::PeerAuthentication,
            "externalauthorizer" | "externalauthorizers" => ObjectKind::ExternalAuthorizer,
            "federation" | "federations" => ObjectKind::Federation,
            "keyserver" | "keyservers" => ObjectKind::KeyServer,
            "termination" | "terminations" => ObjectKind::Termination,
            _ => return None,
        })
    }
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Names one object inside a tenant; written `Kind namespace/name`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    pub kind: ObjectKind,
    /// `default` for the kinds that have no namespace.
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
        let form = || IdError::Form { what: "object", given: s.chars().take(120).collect(), form: "Kind namespace/name" };
        let (kind, rest) = s.split_once(' ').ok_or_else(form)?;
        let (namespace, name) = rest.split_once('/').ok_or_else(form)?;
        let kind = ObjectKind::from_word(kind).ok_or_else(form)?;
        Ok(Self { kind, namespace: Namespace::new(namespace)?, name: ObjectName::new(name)? })
    }
}

impl Object {
    /// The kind.
    pub fn kind(&self) -> ObjectKind {
        match self {
            Object::Pod(_) => ObjectKind::Pod,
            Object::Service(_) => ObjectKind::Service,
            Object::HttpRoute(_) => ObjectKind::HttpRoute,
            Object::UdpRoute(_) => ObjectKind::UdpRoute,
            Object::ReferenceGrant(_) => ObjectKind::ReferenceGrant,
            Object::VirtualService(_) => ObjectKind::VirtualService,
            Object::DestinationRule(_) => ObjectKind::DestinationRule,
            Object::Tenant(_) => ObjectKind::Tenant,
            Object::Gateway(_) => ObjectKind::Gateway,
            Object::Node(_) => ObjectKind::Node,
            Object::Throttle(_) => ObjectKind::Throttle,
            Object::AuthorizationPolicy(_) => ObjectKind::AuthorizationPolicy,
            Object::RequestAuthentication(_) => ObjectKind::RequestAuthentication,
            Object::PeerAuthentication(_) => ObjectKind::PeerAuthentication,
            Object::ExternalAuthorizer(_) => ObjectKind::ExternalAuthorizer,
            Object::Federation(_) => ObjectKind::Federation,
            Object::KeyServer(_) => ObjectKind::KeyServer,
            Object::Termination(_) => ObjectKind::Termination,
        }
    }

    /// Name, namespace, labels and age.
    pub fn metadata(&self) -> &Metadata {
        match self {
            Object::Pod(o) => &o.metadata,
            Object::Service(o) => &o.metadata,
            Object::HttpRoute(o) => &o.metadata,
            Object::UdpRoute(o) => &o.metadata,
            Object::ReferenceGrant(o) => &o.metadata,
            Object::VirtualService(o) => &o.metadata,
            Object::DestinationRule(o) => &o.metadata,
            Object::Tenant(o) => &o.metadata,
            Object::Gateway(o) => &o.metadata,
            Object::Node(o) => &o.metadata,
            Object::Throttle(o) => &o.metadata,
            Object::AuthorizationPolicy(o) => &o.metadata,
            Object::RequestAuthentication(o) => &o.metadata,
            Object::PeerAuthentication(o) => &o.metadata,
            Object::ExternalAuthorizer(o) => &o.metadata,
            Object::Federation(o) => &o.metadata,
            Object::KeyServer(o) => &o.metadata,
            Object::Termination(o) => &o.metadata,
        }
    }

    /// The object's name among its tenant's objects.
    pub fn key(&self) -> ObjectKey {
        let metadata = self.metadata();
        ObjectKey { kind: self.kind(), namespace: metadata.namespace.clone(), name: metadata.name.clone() }
    }
}

/// One YAML document as it was read: the object, where it stands, its own text, and what could not be taken from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Document {
    pub object: Object,
    /// Where the document begins.
    pub origin: Origin,
    /// The document as written, without the `---` lines; it alone reads back to the same object and faults.
    pub text: Arc<str>,
    /// Fields that were refused, so that `object` says less than the user wrote. The compiler fails closed what they touch.
    pub faults: Vec<Fault>,
}

/// A field that was cut from an object because it is wrong or not supported. Its diagnostic was given by whoever read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// e.g. `spec.rules[0].filters`.
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
            let plural = word.strip_suffix("cy").map_or_else(|| format!("{word}s"), |stem| format!("{stem}cies"));
            assert_eq!(ObjectKind::from_word(&plural), Some(kind));
            assert!(!kind.api_versions().is_empty());
            let key: ObjectKey = format!("{kind} bookinfo/reviews").parse().unwrap();
            assert_eq!(key.to_string(), format!("{kind} bookinfo/reviews"));
        }
        assert_eq!(ObjectKind::from_word("Deployment"), None);
        assert!("HTTPRoute reviews".parse::<ObjectKey>().is_err());
    }
}
