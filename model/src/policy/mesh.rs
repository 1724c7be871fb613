//! Canal's own objects (`canal.mesh/v1`): what neither Kubernetes nor Istio has. Only the provider writes these two.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;

use super::Metadata;
use crate::ids::{AzName, TrustDomain, Vni};
use crate::program::OutsideMesh;

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
