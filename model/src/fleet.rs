//! Input of the planner: the fleet of backends and replicas, the demands of services, and the
//! ownership reports of replicas. Types only: nothing is decided here. The planner's decisions are
//! in [`crate::plan`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::ids::{
    AzName, BackendName, ReplicaName, ReplicaNumber, ServiceId, ServiceKey, TenantName, Vni,
};
use crate::program::BUCKETS;
use crate::share::Share;

/// State in a replica's life cycle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum ReplicaState {
    /// The replica is registered but does not yet have everything that it needs to serve.
    #[default]
    Joining,
    /// The replica may be the head of a chain.
    Active,
    /// The replica gets no new sessions and keeps the sessions that it owns.
    Draining,
}

/// A replica as the planner sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetReplica {
    pub name: ReplicaName,
    pub number: ReplicaNumber,
    pub backend: BackendName,
    pub az: AzName,
    /// The underlay address, which is in 250.0.0.0/8.
    pub underlay: Ipv4Addr,
    pub state: ReplicaState,
    /// False if the edge of the replica's AZ finds it down.
    pub up: bool,
}

/// All backends and replicas of the tier. A replica that is absent is forgotten: its sessions count
/// as gone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fleet {
    /// Number of each AZ, 1 to 7: it selects the AZ's part of gateway ranges.
    pub azs: BTreeMap<AzName, u8>,
    /// Backends that may serve services. Removing one moves its services away while its replicas
    /// keep their sessions.
    pub backends: BTreeMap<BackendName, AzName>,
    pub replicas: BTreeMap<ReplicaNumber, FleetReplica>,
}

impl Fleet {
    /// Builds the fleet of the given replicas.
    ///
    /// A backend exists while one of its replicas is not draining, whether that replica is up or
    /// down. A backend is in the AZ of its replica with the lowest number; its replicas in other
    /// AZs serve nothing.
    pub fn of(
        azs: BTreeMap<AzName, u8>,
        replicas: impl IntoIterator<Item = FleetReplica>,
    ) -> Fleet {
        let replicas: BTreeMap<ReplicaNumber, FleetReplica> =
            replicas.into_iter().map(|r| (r.number, r)).collect();
        let mut backends = BTreeMap::new();
        for replica in replicas
            .values()
            .filter(|r| r.state != ReplicaState::Draining)
        {
            backends
                .entry(replica.backend.clone())
                .or_insert_with(|| replica.az.clone());
        }
        Fleet {
            azs,
            backends,
            replicas,
        }
    }
}

/// Number of backends that a service gets, and of replicas in its chains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardingRules {
    /// Minimum number of backends in the home AZ. `home + away` is cut to
    /// [`ShardingRules::BACKENDS_PER_SERVICE_MAX`].
    pub home: usize,
    /// Minimum number of backends in other AZs.
    pub away: usize,
    /// Number of live replicas behind each head, if there are enough.
    pub standby: usize,
}

impl ShardingRules {
    /// Maximum number of backends of a service.
    /// A set of backends then fits into 128 bits, with 16 for each (`canal_planner`).
    pub const BACKENDS_PER_SERVICE_MAX: usize = 8;
}

impl Default for ShardingRules {
    fn default() -> Self {
        ShardingRules {
            // The loss of one backend leaves another at home.
            home: 2,
            // The loss of the home AZ leaves one elsewhere.
            away: 1,
            // If the head and one of these are lost at once, new sessions still find a replica.
            // Nobody measured longer chains, which cost packets more hops.
            standby: 2,
        }
    }
}

/// The demand of one service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    pub key: ServiceKey,
    pub vni: Vni,
    /// Expected load in any unit that is the same for all services, e.g. sessions. 0 counts as 1.
    pub weight: u32,
    /// Home AZ that the tenant requests for the service.
    pub home: Option<AzName>,
}

/// The demands of all services.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Demands {
    pub services: BTreeMap<ServiceId, Demand>,
    /// The address ranges in `gatewayCidrs` of each tenant.
    pub ranges: BTreeMap<TenantName, Vec<IpNet>>,
    pub ingress: IngressDemands,
    pub rules: ShardingRules,
}

/// The demands of Gateways for addresses on networks of clients.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IngressDemands {
    /// VNIs of the ingress networks; their ranges are in [`Demands::ranges`].
    pub networks: BTreeMap<TenantName, Vni>,
    /// All Gateways, with the addresses that they request; one without addresses gets any.
    pub requested: BTreeMap<ServiceId, Vec<IpAddr>>,
    /// Each tenant's share of the addresses of all ingress networks.
    pub max: BTreeMap<TenantName, Share>,
}

/// A set of buckets of one service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BucketSet(pub u128);

const _: () = assert!(BUCKETS == u128::BITS as usize);

impl BucketSet {
    /// Decodes the form used in reports: bucket 0 is the least significant bit of the first byte.
    /// Missing bytes are zero.
    pub fn from_bytes(bytes: &[u8]) -> BucketSet {
        let mut all = [0; BUCKETS / 8];
        let length = bytes.len().min(all.len());
        all[..length].copy_from_slice(&bytes[..length]);
        BucketSet(u128::from_le_bytes(all))
    }
    /// Returns whether the bucket is in the set.
    pub fn has(self, bucket: usize) -> bool {
        bucket < BUCKETS && self.0 >> bucket & 1 == 1
    }
    /// Returns the set with the bucket added.
    pub fn with(self, bucket: usize) -> BucketSet {
        if bucket < BUCKETS {
            BucketSet(self.0 | 1 << bucket)
        } else {
            self
        }
    }
}

/// Buckets of one service in which a replica owns sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OwnedBuckets {
    /// Version of the service's table at the time of the session scan.
    pub version: u32,
    pub buckets: BucketSet,
}

/// The complete ownership report of one replica.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnerReport {
    /// Number of the newest plan of which the replica had all tables before its session scan. It
    /// applies to services of which the replica owns nothing.
    pub plan: u32,
    /// Number of reports that the controller had received, as far as the replica knew when it began
    /// the older of its two session scans. What the controller knew at that number holds for every
    /// session that began later.
    pub scanned_after: u64,
    /// Services of which the replica owns sessions, half-open ones included.
    pub owned: BTreeMap<ServiceId, OwnedBuckets>,
}

/// The last report of each replica and edge, and the number of reports received.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ownership {
    reports_received: u64,
    replicas: BTreeMap<ReplicaNumber, OwnerReport>,
    edges: BTreeMap<AzName, u32>,
}

impl Ownership {
    /// Starts without reports. Later reports count as newer than `heard`, which is
    /// [`crate::plan::Plan::reports_received`] after a restart.
    pub fn after(heard: u64) -> Ownership {
        Ownership {
            reports_received: heard,
            ..Ownership::default()
        }
    }
    /// Records a replica's newest report.
    pub fn record_report(&mut self, replica: ReplicaNumber, report: OwnerReport) {
        self.reports_received += 1;
        self.replicas.insert(replica, report);
    }
    /// Records the newest plan of which an AZ's edge has all tables.
    pub fn record_edge_report(&mut self, az: AzName, plan: u32) {
        self.reports_received += 1;
        self.edges.insert(az, plan);
    }
    /// Removes the report of a replica that was forgotten, or whose number was reassigned.
    pub fn forget(&mut self, replica: ReplicaNumber) {
        self.replicas.remove(&replica);
    }
    /// Removes an edge that is gone, so that no table waits for it.
    pub fn forget_edge(&mut self, az: &AzName) {
        self.edges.remove(az);
    }
    /// Returns the number of reports received in total.
    pub fn last_report_number(&self) -> u64 {
        self.reports_received
    }
    /// Returns the replica's last report.
    pub fn report(&self, replica: ReplicaNumber) -> Option<&OwnerReport> {
        self.replicas.get(&replica)
    }
    /// Returns the newest plan that the AZ's edge has; `None` if there is no edge to wait for.
    pub fn edge(&self, az: &AzName) -> Option<u32> {
        self.edges.get(az).copied()
    }
}

impl OwnerReport {
    /// Returns the version of the service's table that the replica had.
    pub fn version(&self, service: ServiceId) -> u32 {
        self.owned
            .get(&service)
            .map_or(self.plan, |owned| owned.version)
    }
    /// Returns whether the replica owns sessions of the bucket.
    pub fn owns(&self, service: ServiceId, bucket: usize) -> bool {
        self.owned
            .get(&service)
            .is_some_and(|owned| owned.buckets.has(bucket))
    }
}

/// The AZs and backends that serve a service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    pub home: AzName,
    /// Backends of the service by AZ; no AZ has an empty set.
    pub backends: BTreeMap<AzName, BTreeSet<BackendName>>,
}

impl Placement {
    /// Iterates over all backends, sorted by AZ and name.
    pub fn all(&self) -> impl Iterator<Item = &BackendName> {
        self.backends.values().flatten()
    }
    /// Returns whether this backend in this AZ serves the service.
    pub fn has(&self, az: &AzName, backend: &BackendName) -> bool {
        self.backends
            .get(az)
            .is_some_and(|names| names.contains(backend))
    }
    /// Returns the number of backends in the home AZ.
    pub fn at_home(&self) -> usize {
        self.backends.get(&self.home).map_or(0, BTreeSet::len)
    }
    /// Returns the number of backends in other AZs.
    pub fn away(&self) -> usize {
        self.all().count() - self.at_home()
    }
}
