//! Pods, Services and Nodes (`v1`), reduced to what a mesh needs of them. Containers' images, volumes and the like are not kept.

use std::net::IpAddr;
use std::num::NonZeroU16;

use ipnet::IpNet;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use super::Metadata;
use crate::ids::{NodeName, ServiceAccount};
use crate::program::Labels;

/// Annotation `canal.mesh/tunnel: none`: the pod's node runs no proxy, reach it by plain TCP.
pub const TUNNEL_ANNOTATION: &str = "canal.mesh/tunnel";
/// Annotation that names the availability zone of the pod's node.
pub const AZ_ANNOTATION: &str = "canal.mesh/az";
/// The usual label with the zone of a node.
pub const ZONE_LABEL: &str = "topology.kubernetes.io/zone";
/// Annotation of a Node: the MAC of its tunnel device, as `02:00:5e:10:00:01`.
pub const VTEP_MAC_ANNOTATION: &str = "canal.mesh/vtep-mac";

/// `v1/Pod`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Pod {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: PodSpec,
    #[serde(default)]
    pub status: PodStatus,
}

/// `spec:` of a Pod.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// `None` until the pod is scheduled.
    pub node_name: Option<NodeName>,
    /// `None` is Kubernetes' `default`.
    pub service_account_name: Option<ServiceAccount>,
    /// The pod uses its node's network, so it has no identity of its own.
    pub host_network: bool,
    pub containers: Vec<Container>,
}

/// A container, for the names of its ports.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Container {
    pub name: String,
    pub ports: Vec<ContainerPort>,
}

/// A port that a container says it listens on.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerPort {
    #[serde(default)]
    pub name: String,
    pub container_port: NonZeroU16,
    #[serde(default)]
    pub protocol: Transport,
}

/// `status:` of a Pod.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    pub phase: PodPhase,
    #[serde(rename = "podIP")]
    pub pod_ip: Option<IpAddr>,
    #[serde(rename = "podIPs")]
    pub pod_ips: Vec<PodIp>,
    pub conditions: Vec<Condition>,
}

/// Where a pod is in its life.
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
pub struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
}

/// `v1/Service`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Service {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: ServiceSpec,
}

/// `spec:` of a Service.
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
    /// Empty: endpoints are given by someone else.
    pub selector: Labels,
    pub session_affinity: SessionAffinity,
}

/// How a Service is offered. Inside the mesh all are the same, but `ExternalName`, which has no endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum ServiceType {
    #[default]
    ClusterIP,
    NodePort,
    LoadBalancer,
    ExternalName,
}

/// A cluster IP as written: an address, `None` (headless), or nothing yet.
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
                Err(_) => Err(format!("{s:?} is not an IP address: write an IPv4 or IPv6 address, or \"None\" for a headless service")),
            },
        }
    }
}

/// Whether a client's connections stay on one endpoint. Only `None` is supported.
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
    /// `None`: the same as `port`.
    #[serde(default)]
    pub target_port: Option<TargetPort>,
    #[serde(default)]
    pub protocol: Transport,
    /// Kubernetes KEP-2433, e.g. `http`, `kubernetes.io/h2c`, `grpc`, `tcp`.
    #[serde(default)]
    pub app_protocol: Option<String>,
}

/// The transport of a port. Canal carries TCP.
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
                port.map(TargetPort::Number).ok_or_else(|| E::invalid_value(de::Unexpected::Unsigned(number), &self))
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

/// `v1/Node`, as the cloud tier needs it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Node {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: NodeSpec,
    #[serde(default)]
    pub status: NodeStatus,
}

/// `spec:` of a Node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    #[serde(rename = "podCIDR")]
    pub pod_cidr: Option<IpNet>,
    /// If not empty, this is used.
    #[serde(rename = "podCIDRs")]
    pub pod_cidrs: Vec<IpNet>,
}

/// `status:` of a Node.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    pub addresses: Vec<NodeAddress>,
}

/// One address of a Node; `InternalIP` is that of its tunnel end.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct NodeAddress {
    #[serde(rename = "type")]
    pub kind: String,
    /// A host name is possible too, by `kind`.
    pub address: String,
}
