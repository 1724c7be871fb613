//! What the planner knows: the fleet of backends and replicas, what services demand of it, and what replicas said they own. Types
//! only: nothing is decided here, and what was decided is in [`crate::plan`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::ids::{AzName, BackendName, ReplicaName, ReplicaNumber, ServiceId, ServiceKey, TenantName, Vni};
use crate::program::BUCKETS;

/// Where a replica is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum ReplicaState {
    /// Registered; it has not yet all it needs to serve.
    #[default]
    Joining,
    /// It may be a head.
    Active,
    /// It wants no new sessions, and keeps those it owns.
    Draining,
}

/// A replica as the planner sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetReplica {
    pub name: ReplicaName,
    pub number: ReplicaNumber,
    pub backend: BackendName,
    pub az: AzName,
    /// Underlay address, from 250.0.0.0/8.
    pub underlay: Ipv4Addr,
    pub state: ReplicaState,
    /// False: its AZ's edge finds it dead.
    pub up: bool,
}

/// All backends and replicas of the tier. What is absent is forgotten: its sessions count as gone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fleet {
    /// The number of each AZ, 1 to 7: which part of gateway ranges is its own.
    pub azs: BTreeMap<AzName, u8>,
    /// Backends that may hold services. Taking one out moves its services away while its replicas keep their sessions.
    pub backends: BTreeMap<BackendName, AzName>,
    pub replicas: BTreeMap<ReplicaNumber, FleetReplica>,
}

impl Fleet {
    /// The fleet of these replicas: a backend exists while one of its replicas is not draining, dead or not. A backend is in the AZ
    /// of its replica with the lowest number; replicas of it elsewhere serve nothing.
    pub fn of(azs: BTreeMap<AzName, u8>, replicas: impl IntoIterator<Item = FleetReplica>) -> Fleet {
        let replicas: BTreeMap<ReplicaNumber, FleetReplica> = replicas.into_iter().map(|r| (r.number, r)).collect();
        let mut backends = BTreeMap::new();
        for replica in replicas.values().filter(|r| r.state != ReplicaState::Draining) {
            backends.entry(replica.backend.clone()).or_insert_with(|| replica.az.clone());
        }
        Fleet { azs, backends, replicas }
    }
}

/// How many backends a service gets, and how long chains are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// Backends in the home AZ at least. `home + away` is at most [`Rules::MOST`]; what is above is cut.
    pub home: usize,
    /// Backends in other AZs at least.
    pub away: usize,
    /// Live replicas behind each head, where there are so many.
    pub standby: usize,
}

impl Rules {
    /// Backends of a service at most.
    pub const MOST: usize = 8;
}

impl Default for Rules {
    fn default() -> Self {
        Rules { home: 2, away: 1, standby: 2 }
    }
}

/// What one service demands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Demand {
    pub key: ServiceKey,
    pub vni: Vni,
    /// Its expected load in any unit that is the same for all, e.g. sessions. 0 counts as 1.
    pub weight: u32,
    /// The AZ that its tenant asked for.
    pub home: Option<AzName>,
}

/// What all services demand.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Demands {
    pub services: BTreeMap<ServiceId, Demand>,
    /// `gatewayCidrs` by tenant.
    pub ranges: BTreeMap<TenantName, Vec<IpNet>>,
    pub rules: Rules,
}

/// A set of buckets of one service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Buckets(pub u128);

const _: () = assert!(BUCKETS == u128::BITS as usize);

impl Buckets {
    /// As reports carry them: bucket 0 is the least significant bit of the first byte. Missing bytes are zero.
    pub fn from_bytes(bytes: &[u8]) -> Buckets {
        let mut all = [0; BUCKETS / 8];
        let length = bytes.len().min(all.len());
        all[..length].copy_from_slice(&bytes[..length]);
        Buckets(u128::from_le_bytes(all))
    }
    /// Is the bucket in the set?
    pub fn has(self, bucket: usize) -> bool {
        bucket < BUCKETS && self.0 >> bucket & 1 == 1
    }
    /// The set with the bucket.
    pub fn with(self, bucket: usize) -> Buckets {
        if bucket < BUCKETS { Buckets(self.0 | 1 << bucket) } else { self }
    }
}

/// What a replica owns of one service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OwnedBuckets {
    /// Version of the service's table when it was looked at.
    pub version: u32,
    pub buckets: Buckets,
}

/// A replica's report, whole.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OwnerReport {
    /// Number of the newest plan all of whose tables the replica had before it looked. Stands for services that it owns nothing of.
    pub plan: u32,
    /// Services that it owns sessions of, half-open ones included.
    pub owned: BTreeMap<ServiceId, OwnedBuckets>,
}

/// The last report of each replica and edge, and the order in which they came.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ownership {
    heard: u64,
    replicas: BTreeMap<ReplicaNumber, (u64, OwnerReport)>,
    edges: BTreeMap<AzName, u32>,
}

impl Ownership {
    /// Nothing was heard yet; later reports count as newer than `heard`, which is what [`crate::plan::Plan::heard`] says after a restart.
    pub fn after(heard: u64) -> Ownership {
        Ownership { heard, ..Ownership::default() }
    }
    /// A replica's newest report.
    pub fn hear(&mut self, replica: ReplicaNumber, report: OwnerReport) {
        self.heard += 1;
        self.replicas.insert(replica, (self.heard, report));
    }
    /// The newest plan that an AZ's edge has all tables of.
    pub fn hear_edge(&mut self, az: AzName, plan: u32) {
        self.heard += 1;
        self.edges.insert(az, plan);
    }
    /// The replica was forgotten, or its number has a new owner.
    pub fn forget(&mut self, replica: ReplicaNumber) {
        self.replicas.remove(&replica);
    }
    /// The edge is gone; nothing waits for it.
    pub fn forget_edge(&mut self, az: &AzName) {
        self.edges.remove(az);
    }
    /// How many reports were heard in all.
    pub fn heard(&self) -> u64 {
        self.heard
    }
    /// When the replica's last report was heard, and what it says.
    pub fn report(&self, replica: ReplicaNumber) -> Option<(u64, &OwnerReport)> {
        self.replicas.get(&replica).map(|(heard, report)| (*heard, report))
    }
    /// The plan that the AZ's edge has; `None` if there is no edge to wait for.
    pub fn edge(&self, az: &AzName) -> Option<u32> {
        self.edges.get(az).copied()
    }
}

impl OwnerReport {
    /// Which version of the service's table the replica had.
    pub fn version(&self, service: ServiceId) -> u32 {
        self.owned.get(&service).map_or(self.plan, |owned| owned.version)
    }
    /// Does it own sessions of the bucket?
    pub fn owns(&self, service: ServiceId, bucket: usize) -> bool {
        self.owned.get(&service).is_some_and(|owned| owned.buckets.has(bucket))
    }
}

/// Where a service lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    pub home: AzName,
    /// Its backends by AZ; no AZ has an empty set.
    pub backends: BTreeMap<AzName, BTreeSet<BackendName>>,
}

impl Placement {
    /// All backends, sorted by AZ and name.
    pub fn all(&self) -> impl Iterator<Item = &BackendName> {
        self.backends.values().flatten()
    }
    /// Does the service live on this backend in this AZ?
    pub fn has(&self, az: &AzName, backend: &BackendName) -> bool {
        self.backends.get(az).is_some_and(|names| names.contains(backend))
    }
    /// Backends in the home AZ.
    pub fn at_home(&self) -> usize {
        self.backends.get(&self.home).map_or(0, BTreeSet::len)
    }
    /// Backends elsewhere.
    pub fn away(&self) -> usize {
        self.all().count() - self.at_home()
    }
}
