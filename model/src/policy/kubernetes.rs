//! Pods, Services and Nodes (`v1`), reduced to the fields that a mesh needs. Images, volumes and
//! other fields of containers are not read. The structs mirror the YAML; the compiler validates and
//! interprets them.

use std::net::IpAddr;
use std::num::NonZeroU16;

use ipnet::IpNet;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use super::Metadata;
use crate::ids::{NodeName, ServiceAccount};
use crate::program::Labels;

/// Annotation `canal.mesh/tunnel: none`: the pod's node runs no proxy, so the pod is reached by
/// plain TCP.
pub const TUNNEL_ANNOTATION: &str = "canal.mesh/tunnel";
/// Annotation that names the availability zone of the pod's node.
pub const AZ_ANNOTATION: &str = "canal.mesh/az";
/// Annotation of a Service, `per-client` or `shared`: which clients' requests share a gateway's
/// HTTP connections to its endpoints.
pub const UPSTREAM_POOL_ANNOTATION: &str = "canal.mesh/upstream-pool";
/// Annotation of a Service, `strict` or `legacy`: whether policies let path parameters and escapes
/// that are not UTF-8 pass.
pub const POLICY_PATHS_ANNOTATION: &str = "canal.mesh/policy-paths";
/// The standard Kubernetes label for the zone of a node.
pub const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// Annotation of a Service, `"true"` or `"false"`: whether nodes connect to its ports without a
/// gateway. If unset, they do for ports that are declared TCP or TLS.
pub const DIRECT_ANNOTATION: &str = "canal.mesh/direct";
/// Annotation of a Node: the MAC address of its tunnel device, such as `02:00:5e:10:00:01`.
pub const VTEP_MAC_ANNOTATION: &str = "canal.mesh/vtep-mac";

/// An object of kind Pod (`v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Pod {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: PodSpec,
    #[serde(default)]
    pub status: PodStatus,
}

/// The content of `spec:` in a Pod.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// Name of the node; `None` until the pod is scheduled.
    pub node_name: Option<NodeName>,
    /// Service account of the pod; `None` means Kubernetes' `default`.
    pub service_account_name: Option<ServiceAccount>,
    /// The pod uses its node's network, so it has no identity of its own.
    pub host_network: bool,
    pub containers: Vec<Container>,
    pub init_containers: Vec<Container>,
}

impl PodSpec {
    /// Returns the ports of the containers that run as long as the pod does. An init container does
    /// so if its `restartPolicy` is `Always` (a native sidecar); Kubernetes looks for a named port
    /// there after all other containers.
    pub fn ports(&self) -> impl Iterator<Item = &ContainerPort> {
        let sidecars = self
            .init_containers
            .iter()
            .filter(|container| container.restart_policy.as_deref() == Some("Always"));
        self.containers
            .iter()
            .chain(sidecars)
            .flat_map(|container| &container.ports)
    }
}

/// A container; only the names of its ports are used.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    pub name: String,
    pub restart_policy: Option<String>,
    pub ports: Vec<ContainerPort>,
}

/// A port on which a container declares that it listens.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerPort {
    #[serde(default)]
    pub name: String,
    pub container_port: NonZeroU16,
    #[serde(default)]
    pub protocol: Transport,
}

/// The content of `status:` in a Pod.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    pub phase: PodPhase,
    #[serde(rename = "podIP")]
    pub pod_ip: Option<IpAddr>,
    #[serde(rename = "podIPs")]
    pub pod_ips: Vec<PodIp>,
    pub conditions: Vec<PodCondition>,
}

/// Phase of a pod's life cycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum PodPhase {
    Pending,
    #[default]
    Running,
    Succeeded,
    Failed,
    Unknown,
}

/// One address of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PodIp {
    pub ip: IpAddr,
}

/// One condition of a status.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PodCondition {
    #[serde(rename = "type")]
    pub kind: String,
    /// State of the condition: `True`, `False` or `Unknown`.
    pub status: String,
}

/// An object of kind Service (`v1`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Service {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: ServiceSpec,
}

/// The content of `spec:` in a Service.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ServiceSpec {
    #[serde(rename = "type")]
    pub kind: ServiceType,
    #[serde(rename = "clusterIP")]
    pub cluster_ip: ClusterIp,
    #[serde(rename = "clusterIPs")]
    pub cluster_ips: Vec<ClusterIp>,
    pub ports: Vec<ServicePort>,
    /// Labels of the endpoints' pods. If empty, EndpointSlices and Endpoints name the endpoints.
    pub selector: Labels,
    pub session_affinity: SessionAffinity,
}

/// The type of a Service. Inside the mesh all types behave alike, except `ExternalName`, which has
/// no endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum ServiceType {
    #[default]
    ClusterIP,
    NodePort,
    LoadBalancer,
    ExternalName,
}

/// A cluster IP as written: an address, `None` (headless), or not set yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize)]
#[serde(try_from = "String")]
pub enum ClusterIp {
    #[default]
    Unset,
    Headless,
    Address(IpAddr),
}

impl TryFrom<String> for ClusterIp {
    type Error = String;
    fn try_from(s: String) -> Result<Self, String> {
        match s.as_str() {
            "" => Ok(ClusterIp::Unset),
            "None" => Ok(ClusterIp::Headless),
            address => match address.parse() {
                Ok(address) => Ok(ClusterIp::Address(address)),
                Err(_) => Err(format!(
                    "{s:?} is not an IP address; fix: write an IPv4 or IPv6 address, or \"None\" for a headless service"
                )),
            },
        }
    }
}

/// Session affinity: binds a client's connections to one endpoint. It is read, and not acted on
/// yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum SessionAffinity {
    #[default]
    None,
    ClientIP,
}

/// One port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServicePort {
    #[serde(default)]
    pub name: String,
    pub port: NonZeroU16,
    /// Port on the pod; `None` means the value of `port`.
    #[serde(default)]
    pub target_port: Option<TargetPort>,
    #[serde(default)]
    pub protocol: Transport,
    /// Application protocol (Kubernetes KEP-2433), e.g. `http`, `kubernetes.io/h2c`, `grpc`, `tcp`.
    #[serde(default)]
    pub app_protocol: Option<String>,
}

/// The transport protocol of a port. Canal carries TCP. Of UDP it only opens the pod ports that a
/// UDPRoute names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Transport {
    #[default]
    Tcp,
    Udp,
    Sctp,
}

/// A port on the pod: its number, or the name of a container's port.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum TargetPort {
    Number(NonZeroU16),
    Name(String),
}

impl<'de> Deserialize<'de> for TargetPort {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberOrName;
        impl Visitor<'_> for NumberOrName {
            type Value = TargetPort;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a port number from 1 to 65535 or the name of a container port")
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<TargetPort, E> {
                let port = u16::try_from(number).ok().and_then(NonZeroU16::new);
                port.map(TargetPort::Number)
                    .ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(number), &self))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<TargetPort, E> {
                match u64::try_from(number) {
                    Ok(number) => self.visit_u64(number),
                    Err(_) => Err(E::invalid_value(de::Unexpected::Signed(number), &self)),
                }
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<TargetPort, E> {
                Ok(TargetPort::Name(name.to_owned()))
            }
        }
        deserializer.deserialize_any(NumberOrName)
    }
}

/// An object of kind Namespace (`v1`): its name and labels.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct NamespaceObject {
    pub metadata: Metadata,
}

/// An object of kind ServiceAccount (`v1`). Pods have the accounts that they name, whether or not
/// these have objects.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ServiceAccountObject {
    pub metadata: Metadata,
}

/// An object of kind Node (`v1`), with the fields that the cloud tier needs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Node {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: NodeSpec,
    #[serde(default)]
    pub status: NodeStatus,
}

/// The content of `spec:` in a Node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    #[serde(rename = "podCIDR")]
    pub pod_cidr: Option<IpNet>,
    /// Pod ranges of the node; if not empty, `pod_cidr` is ignored.
    #[serde(rename = "podCIDRs")]
    pub pod_cidrs: Vec<IpNet>,
}

/// The content of `status:` in a Node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    pub addresses: Vec<NodeAddress>,
}

/// One address of a Node; `InternalIP` is the address of its tunnel endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct NodeAddress {
    #[serde(rename = "type")]
    pub kind: String,
    /// An IP address, or a host name for some values of `kind`.
    pub address: String,
}
