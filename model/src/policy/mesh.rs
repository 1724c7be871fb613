//! Canal's own objects (`canal.mesh/v1`): what neither Kubernetes nor Istio has. Only the provider writes Tenants and Gateways.

use std::net::IpAddr;
use std::num::NonZeroU32;

use ipnet::IpNet;
use serde::Deserialize;

use super::Metadata;
use crate::ids::{AzName, ObjectName, TrustDomain, Vni};
use crate::program::OutsideMesh;

/// Annotation of a Service: the AZ it lives in.
pub const HOME_AZ_ANNOTATION: &str = "canal.mesh/home-az";

/// `canal.mesh/v1 Tenant`; its name is the tenant's.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Tenant {
    pub metadata: Metadata,
    pub spec: TenantSpec,
}

/// `spec:` of a Tenant.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantSpec {
    pub vni: Vni,
    pub trust_domain: TrustDomain,
    /// Where the tenant's pods have their addresses.
    pub pod_cidrs: Vec<IpNet>,
    /// Where the tenant's services have their addresses; empty: not checked.
    #[serde(default)]
    pub service_cidrs: Vec<IpNet>,
    /// Where the tenant's services have their gateway addresses. With it the tenant is on the cloud tier. Ranges of one family follow each
    /// other in the order written, so a new one goes to the end.
    #[serde(default)]
    pub gateway_cidrs: Vec<IpNet>,
    /// The AZ in which the tenant's services live, where they do not say otherwise themselves ([`HOME_AZ_ANNOTATION`]).
    #[serde(default)]
    pub home_az: Option<AzName>,
    /// What happens to connections that leave the mesh.
    #[serde(default, deserialize_with = "outside")]
    pub outside: OutsideMesh,
}

fn outside<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<OutsideMesh, D::Error> {
    #[derive(Deserialize)]
    enum Word {
        Deny,
        Passthrough,
    }
    Ok(match Word::deserialize(deserializer)? {
        Word::Deny => OutsideMesh::Deny,
        Word::Passthrough => OutsideMesh::Passthrough,
    })
}

/// `canal.mesh/v1 Gateway`; its name is the replica's. One per tenant that the replica serves.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Gateway {
    pub metadata: Metadata,
    pub spec: GatewaySpec,
}

/// `spec:` of a Gateway.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct GatewaySpec {
    pub az: AzName,
    /// The replica's addresses in the tenant's overlay.
    pub addresses: Vec<IpAddr>,
    /// Takes no new connections.
    #[serde(default)]
    pub draining: bool,
}

/// `canal.mesh/v1 Throttle`: early limits of one service, or of the whole tenant, at each gateway replica.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Throttle {
    pub metadata: Metadata,
    pub spec: ThrottleSpec,
}

/// `spec:` of a Throttle. A limit that is absent is none.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ThrottleSpec {
    /// A Service in the Throttle's namespace; `None`: the whole tenant.
    #[serde(default)]
    pub target_ref: Option<TargetRef>,
    /// New sessions.
    #[serde(default)]
    pub sessions: Option<ThrottleRate>,
    #[serde(default)]
    pub packets: Option<ThrottleRate>,
}

/// What a Throttle is for (Gateway API's LocalPolicyTargetReference).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct TargetRef {
    /// Empty: Kubernetes' own objects.
    #[serde(default)]
    pub group: String,
    pub kind: String,
    pub name: ObjectName,
}

/// So many per second, and so many at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ThrottleRate {
    pub per_second: NonZeroU32,
    /// `None`: those of one second.
    #[serde(default)]
    pub burst: Option<NonZeroU32>,
}
