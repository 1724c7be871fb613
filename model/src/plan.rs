//! Output of the planner: the placement of services, their gateway numbers, and their bucket tables
//! with what is known about owners. A plan is immutable and names its parent. Deciding is the
//! planner's task, and publishing a plan to data planes is the controller's.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::fleet::{Demands, Placement};
use crate::ids::{AzName, ReplicaNumber, ServiceId, ServiceKey, TenantName, Vni};
use crate::ingress::is_gateway_service;
use crate::program::{BUCKETS, BucketTable, CHAIN_LENGTH_MAX};

/// A complete plan. It can be stored on disk (serde), and it is the parent of the next plan.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Plan {
    /// Number of the plan, incremented with each change. It is also the version of the tables that
    /// this plan changed. The first plan has 1.
    pub number: u32,
    /// Number of the plan from which this one was made; 0 for none.
    pub parent: u32,
    pub services: BTreeMap<ServiceId, PlannedService>,
    /// Constraints that could not be met, and why.
    pub notes: Vec<UnmetConstraint>,
}

/// The planned state of one service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedService {
    pub key: ServiceKey,
    pub vni: Vni,
    /// Gateway number: it selects the service's address in each AZ's part of the tenant's ranges.
    /// It counts from 1. A service keeps its number; that of a Gateway changes with its address and
    /// with the ranges of the pool, and is 0 without an address.
    pub number: u32,
    /// The network that has the addresses of a Gateway; `None` for any other service, and for a
    /// Gateway without an address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<IngressNetwork>,
    /// Placement of the service; `None` if there is no backend at all.
    pub placement: Option<Placement>,
    /// Bucket tables by AZ. An AZ that the service left keeps its table while sessions are there.
    #[serde(serialize_with = "tables_out", deserialize_with = "tables_in")]
    pub tables: BTreeMap<AzName, Arc<PlannedTable>>,
}

/// A network of clients outside the mesh, which has addresses of Gateways.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IngressNetwork {
    /// The tenant that is the network.
    pub tenant: TenantName,
    pub vni: Vni,
    /// The Gateway's addresses in the parts of all AZs, also of AZs that the fleet does not have.
    /// The Gateway keeps them when an edit of the ranges gives them another number. A plan of an
    /// older version has none.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub addresses: BTreeSet<IpAddr>,
}

impl PlannedService {
    /// Returns the ranges that have the service's addresses; none for a Gateway without an address,
    /// or whose addresses are only reserved because their network is absent.
    pub fn ranges<'a>(&self, demands: &'a Demands) -> &'a [IpNet] {
        let is_absent = match &self.network {
            Some(network) => !demands.ingress.networks.contains_key(&network.tenant),
            None => is_gateway_service(&self.key),
        };
        if is_absent {
            return &[];
        }
        let ranges = demands.ranges.get(self.address_owner());
        ranges.map_or(&[], Vec::as_slice)
    }

    /// Returns the tenant whose ranges have the service's addresses.
    pub fn address_owner(&self) -> &TenantName {
        let network = self.network.as_ref();
        network.map_or(&self.key.tenant, |network| &network.tenant)
    }
}

/// A bucket table with the planner's knowledge about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedTable {
    /// Number of the plan that last changed the chains.
    pub version: u32,
    /// Version that all live replicas of the table and its edge have confirmed by reports: each has
    /// at least this version.
    pub confirmed: u32,
    /// Number of reports received when `confirmed` was reached. Only session scans that began later
    /// prove that a replica owns nothing.
    #[serde(rename = "heard")]
    pub reports_received: u64,
    /// Number of the plan in which the service left this AZ; 0 while the AZ serves it.
    pub closing: u32,
    /// Exactly [`BUCKETS`] chains; the first member of each is the head.
    #[serde(serialize_with = "chains_out", deserialize_with = "chains_in")]
    pub chains: Vec<Vec<ChainMember>>,
}

/// One replica in a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChainMember {
    pub replica: ReplicaNumber,
    /// 0 if the replica is the head, or a standby that owns nothing. Any other value makes it an
    /// *owner*, which may own sessions. It stays an owner until it reports that it owns none, at
    /// this version of the table or a later one.
    pub owner_until_version: u32,
}

impl ChainMember {
    /// Returns whether the replica may own sessions although it is not the head.
    pub fn is_owner(&self) -> bool {
        self.owner_until_version != 0
    }
}

impl Plan {
    /// Returns the service's table in the AZ in the form that data planes receive.
    pub fn table(&self, service: ServiceId, az: &AzName) -> Option<BucketTable> {
        let planned = self.services.get(&service)?;
        let table = planned.tables.get(az)?;
        Some(BucketTable {
            service: planned.key.clone(),
            id: service,
            az: az.clone(),
            vni: planned.vni,
            version: table.version,
            chains: table
                .chains
                .iter()
                .map(|chain| chain.iter().map(|member| member.replica).collect())
                .collect(),
        })
    }
    /// Returns the number of chains that contain the replica. A draining replica with 0 may leave.
    pub fn members(&self, replica: ReplicaNumber) -> usize {
        let tables = self
            .services
            .values()
            .flat_map(|service| service.tables.values());
        tables
            .flat_map(|table| &table.chains)
            .flatten()
            .filter(|member| member.replica == replica)
            .count()
    }
    /// Returns the argument of [`crate::fleet::Ownership::after`] for a controller that starts with
    /// this plan.
    pub fn reports_received(&self) -> u64 {
        self.services
            .values()
            .flat_map(|service| service.tables.values())
            .map(|table| table.reports_received)
            .max()
            .unwrap_or(0)
    }
}

/// A constraint that a plan could not meet, and why. Plans list them sorted by service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum UnmetConstraint {
    /// The service has fewer backends in its home AZ than requested, because the AZ has no more.
    FewAtHome {
        service: ServiceKey,
        az: AzName,
        #[serde(rename = "wanted")]
        required: usize,
        #[serde(rename = "given")]
        assigned: usize,
    },
    /// The service has fewer backends in other AZs than requested, because these AZs have no more.
    FewAway {
        service: ServiceKey,
        #[serde(rename = "wanted")]
        required: usize,
        #[serde(rename = "given")]
        assigned: usize,
    },
    /// All backends of the service are also another service's: no other combination is free.
    Shared {
        service: ServiceKey,
        with: ServiceKey,
    },
    /// The tenant requests an AZ that has no backends.
    HomeUnknown { service: ServiceKey, az: AzName },
    /// The fleet has no backend at all.
    NoBackend { service: ServiceKey },
    /// No replica that may be a head is up in this AZ.
    NoReplica { service: ServiceKey, az: AzName },
    /// Buckets keep their head because their chains are full of owners.
    Held {
        service: ServiceKey,
        az: AzName,
        buckets: Vec<u8>,
        owners: Vec<ReplicaNumber>,
    },
    /// The service has no gateway address in this AZ; `why` is the reason.
    NoAddress {
        service: ServiceKey,
        tenant: TenantName,
        az: AzName,
        why: String,
    },
}

impl fmt::Display for UnmetConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnmetConstraint::FewAtHome {
                service,
                az,
                required,
                assigned,
            } => {
                write!(
                    f,
                    "{service}: {assigned} of {required} backends in its home AZ {az}; fix: add backends there"
                )
            }
            UnmetConstraint::FewAway {
                service,
                required,
                assigned,
            } => {
                write!(
                    f,
                    "{service}: {assigned} of {required} backends outside its home AZ; fix: add backends in another AZ"
                )
            }
            UnmetConstraint::Shared { service, with } => {
                write!(
                    f,
                    "{service}: it shares all its backends with {with}, so one failure may affect both; fix: add backends"
                )
            }
            UnmetConstraint::HomeUnknown { service, az } => {
                write!(
                    f,
                    "{service}: its tenant requests home AZ {az}, which has no backend; fix: add one there, or change the tenant"
                )
            }
            UnmetConstraint::NoBackend { service } => {
                write!(
                    f,
                    "{service}: there is no gateway backend; fix: start a replica"
                )
            }
            UnmetConstraint::NoReplica { service, az } => {
                write!(
                    f,
                    "{service}: no active replica of its backends is up in {az}; fix: start or undrain one"
                )
            }
            UnmetConstraint::Held {
                service,
                az,
                buckets,
                owners,
            } => write!(
                f,
                "{service}: {} buckets in {az} keep their head, their chains are full of sessions of replicas {}; fix: let drains end first",
                buckets.len(),
                owners
                    .iter()
                    .map(|n| n.get().to_string())
                    .collect::<Vec<_>>()
                    .join(", "),
            ),
            UnmetConstraint::NoAddress {
                service, az, why, ..
            } => write!(f, "{service}: no gateway address in {az}: {why}"),
        }
    }
}

fn tables_out<S: Serializer>(
    tables: &BTreeMap<AzName, Arc<PlannedTable>>,
    s: S,
) -> Result<S::Ok, S::Error> {
    s.collect_map(tables.iter().map(|(az, table)| (az, table.as_ref())))
}

fn tables_in<'de, D: Deserializer<'de>>(
    d: D,
) -> Result<BTreeMap<AzName, Arc<PlannedTable>>, D::Error> {
    let plain = BTreeMap::<AzName, PlannedTable>::deserialize(d)?;
    Ok(plain
        .into_iter()
        .map(|(az, table)| (az, Arc::new(table)))
        .collect())
}

/// Writes the chains of a table as one text, so that a plan of thousands of services stays small
/// and readable.
///
/// Example: in `7 3@12 9,…`, replica 7 is the head, replica 3 lost the head at version 12, and
/// replica 9 is a standby.
fn chains_out<S: Serializer>(chains: &[Vec<ChainMember>], s: S) -> Result<S::Ok, S::Error> {
    let mut text = String::with_capacity(chains.len() * 12);
    for (bucket, chain) in chains.iter().enumerate() {
        if bucket > 0 {
            text.push(',');
        }
        for (place, member) in chain.iter().enumerate() {
            if place > 0 {
                text.push(' ');
            }
            text += &member.replica.get().to_string();
            if member.owner_until_version > 0 {
                text.push('@');
                text += &member.owner_until_version.to_string();
            }
        }
    }
    s.serialize_str(&text)
}

fn chains_in<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Vec<ChainMember>>, D::Error> {
    use serde::de::Error;
    let text = String::deserialize(d)?;
    let number = |part: &str| {
        part.parse::<u32>()
            .map_err(|_| D::Error::custom(format!("{part:?} in a chain is not a number")))
    };
    let member = |part: &str| {
        let (replica, left) = match part.split_once('@') {
            Some((replica, left)) => (number(replica)?, number(left)?),
            None => (number(part)?, 0),
        };
        Ok(ChainMember {
            replica: ReplicaNumber::new(replica).map_err(D::Error::custom)?,
            owner_until_version: left,
        })
    };
    let chains: Vec<Vec<ChainMember>> = text
        .split(',')
        .map(|chain| {
            chain
                .split(' ')
                .filter(|part| !part.is_empty())
                .map(member)
                .collect()
        })
        .collect::<Result<_, D::Error>>()?;
    if chains.len() != BUCKETS || chains.iter().any(|chain| chain.len() > CHAIN_LENGTH_MAX) {
        return Err(D::Error::custom(format!(
            "a table has {BUCKETS} chains of at most {CHAIN_LENGTH_MAX} replicas"
        )));
    }
    Ok(chains)
}
