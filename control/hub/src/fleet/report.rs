//! What edges and replicas report, read once and checked; and why a report is refused. No state is kept here.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use canal_model::fleet::{Buckets, OwnedBuckets};
use canal_model::ids::{AzName, BackendName, Generation, ReplicaName, ServiceId};
use canal_store::StoreError;
use canal_wire::fleet::{EdgeState, ReplicaState};
use tonic::Code;

/// Services that one replica may own sessions of; what its redirector has room for.
pub const OWNED_MAX: usize = 16_384;
/// Replicas that one edge may speak of.
pub const SEEN_MAX: usize = 4095;
/// First octet of every host of the tier.
const TIER_OCTET: u8 = 250;

/// A replica's report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReplicaReport {
    pub(crate) backend: BackendName,
    pub(crate) az: AzName,
    pub(crate) underlay: Ipv4Addr,
    pub(crate) generation: Generation,
    pub(crate) draining: bool,
    pub(crate) leaving: bool,
    pub(crate) owned: BTreeMap<ServiceId, OwnedBuckets>,
    pub(crate) sessions: u64,
    pub(crate) accepted: u64,
    pub(crate) version: String,
}

/// An edge's report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EdgeReport {
    pub(crate) az: AzName,
    pub(crate) underlay: Ipv4Addr,
    pub(crate) generation: Generation,
    pub(crate) seen: BTreeMap<ReplicaName, bool>,
    pub(crate) version: String,
}

/// Why a report is not heard. The texts say what would have to be so.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("{0} is no gateway replica; report with a gateway's token")]
    NotAReplica(String),
    #[error("{0} is no edge; report with an edge's token")]
    NotAnEdge(String),
    #[error("{0} is no data plane; report with a data plane's token")]
    NotADataPlane(String),
    #[error("the report has {bytes} bytes, at most {limit} are taken")]
    Bytes { bytes: usize, limit: usize },
    #[error("{0}")]
    Form(String),
    #[error("the token is for backend {wanted}, the report names {given}")]
    Backend { wanted: BackendName, given: BackendName },
    #[error("the token is for AZ {wanted}, the report names {given}")]
    Az { wanted: AzName, given: AzName },
    #[error("{0} is no address of the tier; a host of AZ number a has one of 250.a.0.0/16, with a from 1 to 7")]
    Underlay(String),
    #[error("{underlay} is already the address of {holder}; give each host its own")]
    UnderlayTaken { underlay: Ipv4Addr, holder: String },
    #[error("AZ {az} has number {wanted}, but the address says {given}; an AZ keeps its number")]
    AzNumber { az: AzName, wanted: u8, given: u8 },
    #[error("number {number} is that of AZ {holder}, not of {az}; give each AZ its own 250.a.0.0/16")]
    AzNumberTaken { az: AzName, number: u8, holder: AzName },
    #[error("{0} is registered with another backend, AZ or address and was heard a moment ago; stop that process, or forget the replica")]
    RegisteredOtherwise(ReplicaName),
    #[error("{holder} speaks for AZ {az} and was heard a moment ago; an AZ has one edge")]
    AzHasEdge { az: AzName, holder: String },
    #[error("{given} entries in one report, at most {limit} are taken")]
    Entries { given: usize, limit: usize },
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Refusal {
    /// The name of the refusal, for a counter.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::NotAReplica(_) => "not_a_replica",
            Self::NotAnEdge(_) => "not_an_edge",
            Self::NotADataPlane(_) => "not_a_data_plane",
            Self::Bytes { .. } => "bytes",
            Self::Form(_) => "form",
            Self::Backend { .. } => "backend",
            Self::Az { .. } => "az",
            Self::Underlay(_) => "underlay",
            Self::UnderlayTaken { .. } => "underlay_taken",
            Self::AzNumber { .. } => "az_number",
            Self::AzNumberTaken { .. } => "az_number_taken",
            Self::RegisteredOtherwise(_) => "registered_otherwise",
            Self::AzHasEdge { .. } => "az_has_edge",
            Self::Entries { .. } => "entries",
            Self::Store(e) => e.name(),
        }
    }

    pub(crate) fn code(&self) -> Code {
        match self {
            Self::NotAReplica(_) | Self::NotAnEdge(_) | Self::NotADataPlane(_) | Self::Backend { .. } | Self::Az { .. } => {
                Code::PermissionDenied
            }
            Self::Form(_) | Self::Underlay(_) | Self::Entries { .. } | Self::Bytes { .. } => Code::InvalidArgument,
            Self::UnderlayTaken { .. }
            | Self::AzNumber { .. }
            | Self::AzNumberTaken { .. }
            | Self::RegisteredOtherwise(_)
            | Self::AzHasEdge { .. } => Code::FailedPrecondition,
            Self::Store(e) if e.is_limit() => Code::ResourceExhausted,
            Self::Store(_) => Code::Unavailable,
        }
    }
}

/// The number of the AZ that has this address.
pub(crate) fn az_number(underlay: Ipv4Addr) -> u8 {
    underlay.octets()[1]
}

fn underlay(text: &str) -> Result<Ipv4Addr, Refusal> {
    let address: Ipv4Addr = text.parse().map_err(|_| Refusal::Underlay(text.chars().take(60).collect()))?;
    match address.octets() {
        [TIER_OCTET, 1..=7, ..] => Ok(address),
        _ => Err(Refusal::Underlay(address.to_string())),
    }
}

fn form<T, E: std::fmt::Display>(r: Result<T, E>) -> Result<T, Refusal> {
    r.map_err(|e| Refusal::Form(e.to_string()))
}

fn bounded(given: usize, limit: usize) -> Result<(), Refusal> {
    if given > limit { Err(Refusal::Entries { given, limit }) } else { Ok(()) }
}

impl ReplicaReport {
    /// Reads what came over the wire.
    pub(crate) fn read(m: ReplicaState) -> Result<Self, Refusal> {
        bounded(m.owned.len(), OWNED_MAX)?;
        let mut owned = BTreeMap::new();
        for o in &m.owned {
            let id = form(ServiceId::new(o.service))?;
            owned.insert(id, OwnedBuckets { version: o.table_version, buckets: Buckets::from_bytes(&o.buckets) });
        }
        Ok(Self {
            backend: form(BackendName::new(&m.backend))?,
            az: form(AzName::new(&m.az))?,
            underlay: underlay(&m.underlay)?,
            generation: Generation(m.generation),
            draining: m.draining,
            leaving: m.leaving,
            owned,
            sessions: m.sessions,
            accepted: m.accepted,
            version: m.version.chars().take(100).collect(),
        })
    }
}

impl EdgeReport {
    /// Reads what came over the wire.
    pub(crate) fn read(m: EdgeState) -> Result<Self, Refusal> {
        bounded(m.seen.len(), SEEN_MAX)?;
        let seen = m.seen.iter().map(|s| Ok((form(ReplicaName::new(&s.replica))?, s.up))).collect::<Result<_, Refusal>>()?;
        Ok(Self {
            az: form(AzName::new(&m.az))?,
            underlay: underlay(&m.underlay)?,
            generation: Generation(m.generation),
            seen,
            version: m.version.chars().take(100).collect(),
        })
    }
}
