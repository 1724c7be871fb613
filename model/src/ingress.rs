//! Listeners of Gateways: what clients outside the mesh may connect to, and the hosts whose routes
//! apply. A Gateway is a service of its tenant, to which only such clients connect. Start at
//! [`Listener`].

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use crate::certificate::ServingCertificate;
use crate::ids::{Namespace, ObjectName, SecretKey, ServiceKey, TenantName};
use crate::listener_filters::ListenerFilter;
use crate::policy::ObjectKind;
use crate::program::{HostMatch, Labels};

/// Ends the name of a Gateway's service. A Service's own name is one label, so the two never clash.
const GATEWAY_SUFFIX: &str = ".gateway";
/// Ends the name of the service of a Gateway of Istio, which may have the name of one of Gateway
/// API.
const ISTIO_GATEWAY_SUFFIX: &str = ".istio-gateway";

/// Labels of Canal's ingress, by which Gateways of Istio and policies select it: those of the ingress
/// gateway that Istio installs.
pub const ISTIO_INGRESS_LABELS: [(&str, &str); 2] =
    [("app", "istio-ingressgateway"), ("istio", "ingressgateway")];

/// Returns the key of the service that stands for a Gateway of Gateway API; `None` if the Gateway's
/// name is too long for it.
pub fn gateway_service(
    tenant: &TenantName,
    namespace: &Namespace,
    gateway: &ObjectName,
) -> Option<ServiceKey> {
    service_of(tenant, namespace, gateway, GATEWAY_SUFFIX)
}

/// Returns the key of the service that stands for a Gateway of Istio; `None` if the Gateway's name is
/// too long for it.
pub fn istio_gateway_service(
    tenant: &TenantName,
    namespace: &Namespace,
    gateway: &ObjectName,
) -> Option<ServiceKey> {
    service_of(tenant, namespace, gateway, ISTIO_GATEWAY_SUFFIX)
}

fn service_of(
    tenant: &TenantName,
    namespace: &Namespace,
    gateway: &ObjectName,
    suffix: &str,
) -> Option<ServiceKey> {
    Some(ServiceKey {
        tenant: tenant.clone(),
        namespace: namespace.clone(),
        name: ObjectName::new(&format!("{gateway}{suffix}")).ok()?,
    })
}

/// Returns whether a service stands for a Gateway.
pub fn is_gateway_service(key: &ServiceKey) -> bool {
    let name = key.name.as_str();
    name.ends_with(GATEWAY_SUFFIX) || name.ends_with(ISTIO_GATEWAY_SUFFIX)
}

/// Returns the kind and the name of the Gateway for which a service stands; `None` if it stands for
/// none.
pub fn gateway_object(key: &ServiceKey) -> Option<(ObjectKind, &str)> {
    let name = key.name.as_str();
    if let Some(name) = name.strip_suffix(ISTIO_GATEWAY_SUFFIX) {
        return Some((ObjectKind::IstioGateway, name));
    }
    let name = name.strip_suffix(GATEWAY_SUFFIX)?;
    Some((ObjectKind::Gateway, name))
}

/// Label by which policies select the pods of a Gateway (Gateway API's GatewayInfrastructure).
const GATEWAY_NAME_LABEL: &str = "gateway.networking.k8s.io/gateway-name";
/// Label by which policies select one Gateway of Istio, whatever its ingress.
const ISTIO_GATEWAY_NAME_LABEL: &str = "istio.io/gateway-name";

/// Returns the labels by which policies select the Gateway for which a service stands; `None` if it
/// stands for none.
pub fn gateway_labels(key: &ServiceKey) -> Option<Labels> {
    let (kind, name) = gateway_object(key)?;
    if kind == ObjectKind::IstioGateway {
        let own = (ISTIO_GATEWAY_NAME_LABEL, name);
        let labels = ISTIO_INGRESS_LABELS.into_iter().chain([own]);
        return Some(labels.map(|(k, v)| (k.into(), v.into())).collect());
    }
    Some(Labels::from([(GATEWAY_NAME_LABEL.into(), name.into())]))
}

/// One listener of a Gateway, of the Gateway's own or of a ListenerSet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// Name among the Gateway's listeners: that in the Gateway, or `namespace/set/name` for a
    /// listener of a ListenerSet.
    pub name: String,
    pub port: u16,
    pub protocol: ListenerProtocol,
    /// Host of the requests that the listener takes; `None` means any that no other listener of the
    /// port takes.
    pub host: Option<HostMatch>,
    /// Secrets with the certificates of a listener that terminates TLS, in the order in which it
    /// names them.
    pub certificates: Vec<SecretKey>,
    /// Filters of the requests of a listener for HTTP or HTTPS, in the order in which they run.
    pub filters: Vec<ListenerFilter>,
    /// The reason why the listener takes no requests, if it takes none.
    pub closed: Option<Arc<ListenerFault>>,
}

/// The certificates of a Gateway's listeners.
pub type GatewayCertificates = BTreeMap<SecretKey, Arc<ServingCertificate>>;

/// Protocols of listeners. Those that Canal does not serve are closed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ListenerProtocol {
    Http,
    Https,
    /// TLS that is passed through: the server name selects the routes.
    Tls,
    /// TLS that the gateway terminates and whose plaintext it relays: the server name selects the
    /// routes.
    TerminatedTls,
    Tcp,
    /// Any other protocol, as written.
    Other(String),
}

impl ListenerProtocol {
    /// Returns whether two listeners may share a port. Listeners for TLS may, whether they terminate
    /// it or not: both are selected by the server name.
    pub fn shares_port_with(&self, other: &Self) -> bool {
        let is_relayed_tls = |it: &Self| matches!(it, Self::Tls | Self::TerminatedTls);
        self == other || (is_relayed_tls(self) && is_relayed_tls(other))
    }

    /// Returns whether the gateway terminates TLS.
    pub fn terminates_tls(&self) -> bool {
        matches!(self, Self::Https | Self::TerminatedTls)
    }
}

impl fmt::Display for ListenerProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ListenerProtocol::Http => "HTTP",
            ListenerProtocol::Https => "HTTPS",
            ListenerProtocol::Tls => "TLS",
            ListenerProtocol::TerminatedTls => "TLS (terminated)",
            ListenerProtocol::Tcp => "TCP",
            ListenerProtocol::Other(protocol) => protocol,
        })
    }
}

/// The reason why a listener is closed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerFault {
    pub reason: ListenerFaultReason,
    /// Description of the problem: a sentence without a full stop, of limited length.
    pub problem: String,
}

/// Why a listener is closed, in the words of the Gateway API's conditions where it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ListenerFaultReason {
    /// A field is broken, or restricts the listener in a way that Canal does not support.
    Invalid,
    /// The whole Gateway has parameters or addresses that Canal does not support.
    InvalidParameters,
    UnsupportedAddress,
    UnsupportedProtocol,
    /// A field has a value that Canal does not support.
    UnsupportedValue,
    /// A filter of requests is of a type that Canal does not support.
    UnsupportedFilter,
    /// A filter of requests is broken.
    InvalidFilter,
    /// Another listener of the port has another protocol.
    ProtocolConflict,
    /// Another listener of the port has the same host.
    HostnameConflict,
    InvalidRouteKinds,
    /// No reference of the listener leads to a usable certificate.
    InvalidCertificateRef,
    /// A Secret or a ConfigMap of another namespace, which no ReferenceGrant allows.
    RefNotPermitted,
    /// No reference leads to usable certificates of authorities, by which clients are validated.
    InvalidCaCertificateRef,
    InvalidCaCertificateKind,
    /// A ConfigMap of authorities in another namespace, which no ReferenceGrant allows.
    CaRefNotPermitted,
}

impl ListenerFaultReason {
    /// Returns the reason as conditions, logs and counters spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Invalid => "Invalid",
            Self::InvalidParameters => "InvalidParameters",
            Self::UnsupportedAddress => "UnsupportedAddress",
            Self::UnsupportedProtocol => "UnsupportedProtocol",
            Self::UnsupportedValue | Self::UnsupportedFilter => "UnsupportedValue",
            Self::InvalidFilter => "InvalidListenerFilter",
            Self::ProtocolConflict => "ProtocolConflict",
            Self::HostnameConflict => "HostnameConflict",
            Self::InvalidRouteKinds => "InvalidRouteKinds",
            Self::InvalidCertificateRef => "InvalidCertificateRef",
            Self::RefNotPermitted | Self::CaRefNotPermitted => "RefNotPermitted",
            Self::InvalidCaCertificateRef => "InvalidCACertificateRef",
            Self::InvalidCaCertificateKind => "InvalidCACertificateKind",
        }
    }
}

/// What a tenant's objects ask of the tier's ingress.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IngressRequests {
    /// True if the tenant is an ingress network: its clients are outside the mesh, and its
    /// `gatewayCidrs` are the pool of addresses for the Gateways of all tenants.
    pub is_network: bool,
    /// Addresses that the Gateways request; one without addresses gets any.
    pub addresses: BTreeMap<ServiceKey, Vec<IpAddr>>,
}

/// Returns the order of hosts by specificity: the host that a request's name is compared with first
/// is the smallest. Exact names come before wildcards, long wildcards before short ones, and any
/// host is last.
pub fn host_order(host: Option<&HostMatch>) -> (u8, std::cmp::Reverse<usize>, Option<&HostMatch>) {
    let (class, length) = match host {
        Some(HostMatch::Exact(name)) => (0, name.len()),
        Some(HostMatch::Suffix(domain)) => (1, domain.len()),
        None => (2, 0),
    };
    (class, std::cmp::Reverse(length), host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_of_a_gateway_has_a_name_that_no_service_has() {
        let (tenant, namespace) = ("alpha".parse().unwrap(), "shop".parse().unwrap());
        let key = gateway_service(&tenant, &namespace, &"web".parse().unwrap()).unwrap();
        assert_eq!(key.to_string(), "alpha/shop/web.gateway");
        assert!(!key.name.is_label());
        let of_istio = istio_gateway_service(&tenant, &namespace, &"web".parse().unwrap()).unwrap();
        assert_eq!(of_istio.to_string(), "alpha/shop/web.istio-gateway");
        assert!(is_gateway_service(&key) && is_gateway_service(&of_istio));
        assert_eq!(gateway_object(&key), Some((ObjectKind::Gateway, "web")));
        assert_eq!(
            gateway_object(&of_istio),
            Some((ObjectKind::IstioGateway, "web"))
        );
        let labels = [&key, &of_istio].map(|key| gateway_labels(key).unwrap());
        assert_eq!(labels[0].len(), 1);
        assert_eq!(labels[1]["istio"], "ingressgateway");
        assert_eq!(labels[1][ISTIO_GATEWAY_NAME_LABEL], "web");
        let long = ObjectName::new(&format!("{}.a", "a".repeat(63))).unwrap();
        assert!(gateway_service(&tenant, &namespace, &long).is_some());
    }

    #[test]
    fn specific_hosts_come_first() {
        let exact = |name: &str| Some(HostMatch::Exact(name.to_owned()));
        let suffix = |name: &str| Some(HostMatch::Suffix(name.to_owned()));
        let mut hosts = [
            None,
            suffix(".example.com"),
            exact("b.example.com"),
            suffix(".a.example.com"),
            exact("c.a.example.com"),
        ];
        hosts.sort_by(|a, b| host_order(a.as_ref()).cmp(&host_order(b.as_ref())));
        let expected = [
            exact("c.a.example.com"),
            exact("b.example.com"),
            suffix(".a.example.com"),
            suffix(".example.com"),
            None,
        ];
        assert_eq!(hosts, expected);
    }
}
