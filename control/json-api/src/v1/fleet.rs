//! Views of the cloud tier: edges, replicas, and the placement of services on them.

use canal_wire::api;
use serde::Serialize;

use super::objects::views;

/// State of the cloud tier.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FleetView {
    /// Number of the plan in force.
    pub plan: u32,
    /// Number of tables that wait until their new replicas have the tenant's resources.
    pub tables_waiting: u32,
    /// Constraints that the plan could not meet.
    pub unmet_constraints: Vec<String>,
    /// Rules that the plan violates, which is a defect of the controller.
    pub violations: Vec<String>,
    pub edges: Vec<EdgeView>,
    pub replicas: Vec<ReplicaView>,
    pub services: Vec<PlacedServiceView>,
    pub blast_radius: Vec<BlastRadiusView>,
}

impl From<&api::FleetResponse> for FleetView {
    fn from(fleet: &api::FleetResponse) -> Self {
        Self {
            plan: fleet.plan,
            tables_waiting: fleet.tables_waiting,
            unmet_constraints: fleet.unmet_constraints.clone(),
            violations: fleet.findings.clone(),
            edges: views(&fleet.edges),
            replicas: views(&fleet.replicas),
            services: views(&fleet.services),
            blast_radius: views(&fleet.blast),
        }
    }
}

/// The entry of an AZ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EdgeView {
    pub name: String,
    pub az: String,
    pub underlay: String,
    /// Address at which the tunnels of its AZ end.
    pub tunnel_end: String,
    /// True if the edge has reported within the time after which its AZ is closed.
    pub reporting: bool,
    pub generation: u64,
    pub version: String,
}

impl From<&api::EdgeStatus> for EdgeView {
    fn from(edge: &api::EdgeStatus) -> Self {
        Self {
            name: edge.name.clone(),
            az: edge.az.clone(),
            underlay: edge.underlay.clone(),
            tunnel_end: edge.tunnel_end.clone(),
            reporting: edge.reporting,
            generation: edge.generation,
            version: edge.version.clone(),
        }
    }
}

/// A gateway replica of the cloud tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReplicaView {
    pub name: String,
    pub number: u32,
    pub backend: String,
    pub az: String,
    pub underlay: String,
    /// `joining`, `active`, `draining` or `gone`.
    pub state: String,
    pub up: bool,
    /// True if an operator ordered the replica to drain.
    pub drain_requested: bool,
    pub sessions: u64,
    /// Number of sessions that it accepted since its process started.
    pub accepted: u64,
    pub generation: u64,
    /// Number of cores that receive its packets; 0 if it did not report them.
    pub cores: u32,
    /// Number of services of which the replica owns sessions.
    pub services: u32,
    /// Number of buckets of which it is the head.
    pub heads: u32,
    /// Number of buckets in whose chain it stays for its sessions.
    pub owners: u32,
    /// Milliseconds since its last report; 0 if none arrived since the controller started.
    pub since_last_report_ms: u64,
    pub version: String,
}

impl From<&api::ReplicaStatus> for ReplicaView {
    fn from(replica: &api::ReplicaStatus) -> Self {
        Self {
            name: replica.name.clone(),
            number: replica.number,
            backend: replica.backend.clone(),
            az: replica.az.clone(),
            underlay: replica.underlay.clone(),
            state: replica.state.clone(),
            up: replica.up,
            drain_requested: replica.drain_requested,
            sessions: replica.sessions,
            accepted: replica.accepted,
            generation: replica.generation,
            cores: replica.cores,
            services: replica.services,
            heads: replica.heads,
            owners: replica.owners,
            since_last_report_ms: replica.since_last_report_ms,
            version: replica.version.clone(),
        }
    }
}

/// Replicas of the cloud tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReplicaListView {
    pub replicas: Vec<ReplicaView>,
}

impl From<&[api::ReplicaStatus]> for ReplicaListView {
    fn from(replicas: &[api::ReplicaStatus]) -> Self {
        Self {
            replicas: views(replicas),
        }
    }
}

/// A replica after an operator's order for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReplicaOrderView {
    pub name: String,
    /// `null` if the replica is not registered any more.
    pub replica: Option<ReplicaView>,
}

impl ReplicaOrderView {
    /// Creates the view of an order for the replica `name`.
    pub fn new(name: &str, replica: Option<&api::ReplicaStatus>) -> Self {
        Self {
            name: name.to_owned(),
            replica: replica.map(ReplicaView::from),
        }
    }
}

/// The placement of a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PlacedServiceView {
    /// Name of the service, as `tenant/namespace/name`.
    pub service: String,
    pub id: u32,
    pub home_az: String,
    /// Backends with their AZ, such as `az1/b1`.
    pub backends: Vec<String>,
    /// AZs that accept new sessions.
    pub open_azs: Vec<String>,
    pub gateway_number: u32,
    /// True while sessions remain on former heads or in a former AZ.
    pub migrating: bool,
}

impl From<&api::PlacedService> for PlacedServiceView {
    fn from(service: &api::PlacedService) -> Self {
        Self {
            service: service.service.clone(),
            id: service.id,
            home_az: service.home_az.clone(),
            backends: service.backends.clone(),
            open_azs: service.open_azs.clone(),
            gateway_number: service.gateway_number,
            migrating: service.migrating,
        }
    }
}

/// Services that lose all their backends if `failed` backends fail at once.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct BlastRadiusView {
    pub failed: u32,
    /// Average number of such services over all combinations of backends.
    pub expected_services: f64,
}

impl From<&api::BlastRadius> for BlastRadiusView {
    fn from(blast: &api::BlastRadius) -> Self {
        Self {
            failed: blast.failed,
            expected_services: blast.expected_services,
        }
    }
}

/// The placement of one service, with its bucket tables.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ServicePlacementView {
    pub service: Option<PlacedServiceView>,
    pub unmet_constraints: Vec<String>,
    pub tables: Vec<BucketTableView>,
}

impl From<&api::ExplainResponse> for ServicePlacementView {
    fn from(explained: &api::ExplainResponse) -> Self {
        Self {
            service: explained.service.as_ref().map(PlacedServiceView::from),
            unmet_constraints: explained.unmet_constraints.clone(),
            tables: views(&explained.tables),
        }
    }
}

/// The bucket table of a service in one AZ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BucketTableView {
    pub az: String,
    pub version: u32,
    /// True if all replicas and the edge have reported this version. It is checked only while
    /// sessions move.
    pub confirmed: bool,
    /// True if the service left this AZ and the table remains for its sessions.
    pub closing: bool,
    pub open: bool,
    pub addresses: Vec<String>,
    pub members: Vec<TableMemberView>,
}

impl From<&api::ExplainedTable> for BucketTableView {
    fn from(table: &api::ExplainedTable) -> Self {
        Self {
            az: table.az.clone(),
            version: table.version,
            confirmed: table.confirmed,
            closing: table.closing,
            open: table.open,
            addresses: table.addresses.clone(),
            members: views(&table.members),
        }
    }
}

/// Numbers of buckets in whose chain a replica is, by its position.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TableMemberView {
    pub replica: String,
    pub heads: u32,
    pub owners: u32,
    pub standbys: u32,
}

impl From<&api::ExplainedMember> for TableMemberView {
    fn from(member: &api::ExplainedMember) -> Self {
        Self {
            replica: member.replica.clone(),
            heads: member.heads,
            owners: member.owners,
            standbys: member.standbys,
        }
    }
}
