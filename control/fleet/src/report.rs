//! Reports of edges and replicas, parsed and checked once, and the reasons to refuse a report. This
//! module has no state.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use canal_model::fleet::{BucketSet, OwnedBuckets};
use canal_model::ids::{AzName, BackendName, EdgeName, Generation, ReplicaName, ServiceId};
use canal_southbound::ShareReportError;
use canal_store::StoreError;
use canal_wire::fleet::{
    EdgeReportRequest, FoundSessions, ReplicaReportRequest, ReportMark, SessionPath,
};
use canal_wire::tier::{SESSION_QUERIES_MAX, TUNNELS_MAX};
use tonic::Code;

/// Maximum number of services of which one replica may own sessions; its redirector has the
/// capacity for as many.
pub const OWNED_MAX: usize = 16_384;
/// Maximum number of replicas in one edge's report.
/// A fleet has no more replica numbers (`ReplicaNumber::MAX`).
pub const SEEN_MAX: usize = 4095;
/// Maximum number of edges of one AZ.
/// All of them probe the same replicas every 200 ms, so it also bounds the probes that a replica
/// answers: 80 a second. Nobody measured this value.
pub(super) const EDGES_MAX: usize = 16;
/// First octet of the address of every host of the tier.
/// The provider reserves 240.0.0.0/4 for Canal (docs/operations/tenants.md); 250.a.0.0/16 are the
/// hosts of AZ a.
const TIER_OCTET: u8 = 250;

/// A replica's report after it was checked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ReplicaReport {
    pub(crate) backend: BackendName,
    pub(crate) az: AzName,
    pub(crate) underlay: Ipv4Addr,
    pub(crate) generation: Generation,
    pub(crate) draining: bool,
    pub(crate) leaving: bool,
    pub(crate) owned: BTreeMap<ServiceId, OwnedBuckets>,
    /// Mark of the newest response that the replica had when it began the scans of which `owned` is
    /// the result, if it knows marks.
    pub(crate) scanned_after: Option<ReportMark>,
    pub(crate) sessions: u64,
    pub(crate) accepted: u64,
    pub(crate) version: String,
    /// Number of cores that receive the replica's packets.
    pub(crate) cores: u32,
    /// Source ports of tunnels that spread over these cores, in the form in which they arrived.
    pub(crate) tunnel_ports: Arc<[u8]>,
    /// Sessions of clients that operators query, each with the number of the query.
    pub(crate) session_answers: Vec<FoundSessions>,
}

/// An edge's report after it was checked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EdgeReport {
    pub(crate) az: AzName,
    pub(crate) underlay: Ipv4Addr,
    /// Address at which the tunnels end that the edge serves: its own address, or one that all
    /// edges of its AZ share.
    pub(crate) tunnel_end: Ipv4Addr,
    pub(crate) generation: Generation,
    pub(crate) replicas_up: BTreeMap<ReplicaName, bool>,
    pub(crate) version: String,
    pub(crate) tunnels_version: u64,
    /// Paths on which the edge sends sessions that operators query.
    pub(crate) paths: Vec<SessionPath>,
}

/// Reason why a report is refused. Each text states the condition that the report violates.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReportError {
    #[error("{0} is not a gateway replica; fix: report with a gateway's token")]
    NotAReplica(String),
    #[error("{0} is not an edge; fix: report with an edge's token")]
    NotAnEdge(String),
    #[error("{0}")]
    Form(String),
    #[error(
        "the token is for backend {expected}, the report names {reported}; fix: start the replica with --backend {expected}"
    )]
    Backend {
        expected: BackendName,
        reported: BackendName,
    },
    #[error(
        "the token is for AZ {expected}, the report names {reported}; fix: start the process with --az {expected}"
    )]
    Az { expected: AzName, reported: AzName },
    #[error(
        "{0} is not an address of the tier; fix: give a host of AZ number a, from 1 to 7, one of 250.a.0.0/16"
    )]
    Underlay(String),
    #[error("{underlay} is already the address of {holder}; fix: give each host its own")]
    UnderlayTaken { underlay: Ipv4Addr, holder: String },
    #[error(
        "AZ {az} has number {expected}, but the address has {reported}; fix: give the host an address of 250.{expected}.0.0/16"
    )]
    AzNumber {
        az: AzName,
        expected: u8,
        reported: u8,
    },
    #[error(
        "number {number} is that of AZ {holder}, not of {az}; fix: give each AZ its own 250.a.0.0/16"
    )]
    AzNumberTaken {
        az: AzName,
        number: u8,
        holder: AzName,
    },
    #[error(
        "{0} is registered with another backend, AZ or address and reported a moment ago; fix: stop that process, or forget the replica"
    )]
    RegisteredOtherwise(ReplicaName),
    #[error(
        "AZ {az}: edge {holder}, which reported a moment ago, serves tunnels at {expected}, this one at {reported}; fix: start all edges of an AZ with the \
         same --anycast"
    )]
    TunnelEnd {
        az: AzName,
        holder: EdgeName,
        expected: Ipv4Addr,
        reported: Ipv4Addr,
    },
    #[error("AZ {az} has {limit} edges already; fix: stop one of them")]
    Edges { az: AzName, limit: usize },
    #[error(
        "{reported} entries in one report; at most {limit} are accepted; fix: run a data plane of the controller's version"
    )]
    Entries { reported: usize, limit: usize },
    #[error(transparent)]
    Shares(#[from] ShareReportError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ReportError {
    /// Returns the name of the refusal for a counter.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::NotAReplica(_) => "not_a_replica",
            Self::NotAnEdge(_) => "not_an_edge",
            Self::Form(_) => "form",
            Self::Backend { .. } => "backend",
            Self::Az { .. } => "az",
            Self::Underlay(_) => "underlay",
            Self::UnderlayTaken { .. } => "underlay_taken",
            Self::AzNumber { .. } => "az_number",
            Self::AzNumberTaken { .. } => "az_number_taken",
            Self::RegisteredOtherwise(_) => "registered_otherwise",
            Self::TunnelEnd { .. } => "tunnel_end",
            Self::Edges { .. } => "edges",
            Self::Entries { .. } => "entries",
            Self::Shares(e) => e.name(),
            Self::Store(e) => e.name(),
        }
    }

    /// Returns the gRPC status code of the refusal.
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::NotAReplica(_)
            | Self::NotAnEdge(_)
            | Self::Shares(ShareReportError::NotADataPlane(_))
            | Self::Backend { .. }
            | Self::Az { .. } => Code::PermissionDenied,
            Self::Shares(_) | Self::Form(_) | Self::Underlay(_) | Self::Entries { .. } => {
                Code::InvalidArgument
            }
            Self::UnderlayTaken { .. }
            | Self::AzNumber { .. }
            | Self::AzNumberTaken { .. }
            | Self::RegisteredOtherwise(_)
            | Self::TunnelEnd { .. } => Code::FailedPrecondition,
            Self::Edges { .. } => Code::ResourceExhausted,
            Self::Store(e) if e.is_limit() => Code::ResourceExhausted,
            Self::Store(_) => Code::Unavailable,
        }
    }
}

/// Returns the number of the AZ that has this address.
pub(crate) fn az_number(underlay: Ipv4Addr) -> u8 {
    underlay.octets()[1]
}

/// Parses an address of the tier: 250.a.0.0/16, with an AZ number a from 1 to 7.
fn underlay(text: &str) -> Result<Ipv4Addr, ReportError> {
    let address: Ipv4Addr = text
        .parse()
        // The sender chose this text. An IPv4 address has at most 15 characters.
        .map_err(|_| ReportError::Underlay(text.chars().take(60).collect()))?;
    match address.octets() {
        [TIER_OCTET, 1..=7, ..] => Ok(address),
        _ => Err(ReportError::Underlay(address.to_string())),
    }
}

fn form<T, E: std::fmt::Display>(r: Result<T, E>) -> Result<T, ReportError> {
    r.map_err(|e| ReportError::Form(e.to_string()))
}

fn bounded(given: usize, limit: usize) -> Result<(), ReportError> {
    if given > limit {
        Err(ReportError::Entries {
            reported: given,
            limit,
        })
    } else {
        Ok(())
    }
}

impl ReplicaReport {
    /// Checks and converts what came over the wire.
    ///
    /// # Errors
    /// The first limit or form that the report does not keep to.
    pub(crate) fn read(m: ReplicaReportRequest) -> Result<Self, ReportError> {
        // The limits are checked before anything is converted.
        bounded(m.owned.len(), OWNED_MAX)?;
        bounded(m.tunnel_ports.len() / 2, TUNNELS_MAX)?;
        bounded(m.found.len(), SESSION_QUERIES_MAX)?;
        bounded(
            m.found.iter().map(|found| found.sessions.len()).sum(),
            OWNED_MAX,
        )?;
        let mut owned = BTreeMap::new();
        for o in &m.owned {
            let id = form(ServiceId::new(o.service))?;
            owned.insert(
                id,
                OwnedBuckets {
                    version: o.table_version,
                    buckets: BucketSet::from_bytes(&o.buckets),
                },
            );
        }
        Ok(Self {
            backend: form(BackendName::new(&m.backend))?,
            az: form(AzName::new(&m.az))?,
            underlay: underlay(&m.underlay)?,
            generation: Generation(m.generation),
            draining: m.draining,
            leaving: m.terminating,
            owned,
            scanned_after: m.scanned_after,
            sessions: m.sessions,
            accepted: m.accepted,
            version: m.version.chars().take(100).collect(),
            cores: m.cores,
            tunnel_ports: m.tunnel_ports.into(),
            session_answers: m.found,
        })
    }
}

impl EdgeReport {
    /// Checks and converts what came over the wire.
    ///
    /// # Errors
    /// The first limit or form that the report does not keep to.
    pub(crate) fn read(m: EdgeReportRequest) -> Result<Self, ReportError> {
        bounded(m.seen.len(), SEEN_MAX)?;
        let seen = m
            .seen
            .iter()
            .map(|s| Ok((form(ReplicaName::new(&s.replica))?, s.up)))
            .collect::<Result<_, ReportError>>()?;
        bounded(m.paths.len(), SESSION_QUERIES_MAX)?;
        let own = underlay(&m.underlay)?;
        Ok(Self {
            az: form(AzName::new(&m.az))?,
            underlay: own,
            tunnel_end: if m.anycast.is_empty() {
                own
            } else {
                underlay(&m.anycast)?
            },
            generation: Generation(m.generation),
            replicas_up: seen,
            version: m.version.chars().take(100).collect(),
            tunnels_version: m.tunnels_version,
            paths: m.paths,
        })
    }
}
