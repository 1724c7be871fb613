//! The gRPC service `canal.fleet.v1.Fleet`: edges and replicas report, and receive their orders in
//! the response. Unauthenticated clients cost nothing. A report that is refused changes nothing.
//! Start at [`FleetService`].

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use canal_access::{AuthenticatedClient, Principals};
use canal_catalog::Catalog;
use canal_controller_metrics::{self as metrics, ControllerMetrics};
use canal_model::ids::{AzName, EdgeName, ReplicaName};
use canal_model::principal::Principal;
use canal_southbound::{ShareReport, Subscribers};
use canal_store::{Store, StoredEdge};
use canal_wire::fleet::fleet_server;
use canal_wire::fleet::{
    EdgeReportRequest, EdgeReportResponse, ReplicaReportRequest, ReplicaReportResponse,
    ReplicaTunnels, ShareReportAnswer, ShareState,
};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use crate::handle::FleetHandle;
use crate::membership::Membership;
use crate::report::{EdgeReport, ReplicaReport, ReportError, az_number};

/// Interval of a replica's reports in milliseconds.
/// A replica that no edge probes is down after 3 s of silence (`replica_silent`), so that two
/// reports may be lost.
const REPORT_MS: u32 = 1000;
/// Interval of an edge's reports, and of a replica's while tables of its services are in motion, in
/// milliseconds.
/// An edge counts as dead after 1.5 s of silence (`edge_silent`), so that six of its reports may be
/// lost. Buckets move only after reports, so more frequent ones shorten a move.
const REPORT_MOVING_MS: u32 = 200;

/// The service to which edges and replicas report.
pub struct FleetService {
    pub fleet: Arc<FleetHandle>,
    pub catalog: watch::Receiver<Arc<Catalog>>,
    pub principals: watch::Receiver<Arc<Principals>>,
    /// Registry of the data planes' acknowledged generations and of their reports on limits.
    pub subscribers: Arc<Subscribers>,
    pub store: Arc<Store>,
    pub metrics: Arc<ControllerMetrics>,
}

#[tonic::async_trait]
impl fleet_server::Fleet for FleetService {
    async fn replica_report(
        &self,
        request: Request<ReplicaReportRequest>,
    ) -> Result<Response<ReplicaReportResponse>, Status> {
        let caller = AuthenticatedClient::of(&request)?;
        let done = match &caller.principal {
            Principal::Gateway { name, az } => {
                self.handle_replica_report(&caller.principal, name, az, request.into_inner())
                    .await
            }
            other => Err(ReportError::NotAReplica(other.to_string())),
        };
        done.map(Response::new)
            .map_err(|refusal| self.refused(&caller.principal, &refusal))
    }

    async fn edge_report(
        &self,
        request: Request<EdgeReportRequest>,
    ) -> Result<Response<EdgeReportResponse>, Status> {
        let caller = AuthenticatedClient::of(&request)?;
        let done = match &caller.principal {
            Principal::Edge { name, az } => {
                self.handle_edge_report(&caller.principal, name, az, request.into_inner())
                    .await
            }
            other => Err(ReportError::NotAnEdge(other.to_string())),
        };
        done.map(Response::new)
            .map_err(|refusal| self.refused(&caller.principal, &refusal))
    }

    async fn share_report(
        &self,
        request: Request<ShareState>,
    ) -> Result<Response<ShareReportAnswer>, Status> {
        let caller = AuthenticatedClient::of(&request)?;
        let report = ShareReport::read(
            request.into_inner(),
            &caller.principal,
            &self.catalog.borrow(),
        );
        let report = report.map_err(|refusal| self.refused(&caller.principal, &refusal.into()))?;
        self.metrics
            .count(metrics::FLEET_REPORTS, &[("from", "shares")]);
        self.subscribers
            .note_shares(&caller.principal, Arc::new(report));
        Ok(Response::new(ShareReportAnswer {}))
    }
}

impl FleetService {
    /// Checks and records a replica's report, and returns its orders.
    async fn handle_replica_report(
        &self,
        principal: &Principal,
        name: &ReplicaName,
        az: &AzName,
        m: ReplicaReportRequest,
    ) -> Result<ReplicaReportResponse, ReportError> {
        let report = ReplicaReport::read(m)?;
        is_own_az(az, &report.az)?;
        if let Some(expected) = self
            .principals
            .borrow()
            .backend(principal)
            // A token of one backend must not put its replica into another one.
            .filter(|b| **b != report.backend)
        {
            return Err(ReportError::Backend {
                expected: expected.clone(),
                reported: report.backend,
            });
        }
        let fleet = &self.fleet;
        let is_registered = fleet
            .membership()
            .check_replica(name, &report, Instant::now())?;
        // A replica that leaves needs no number any more.
        if !is_registered && !report.leaving {
            self.register_unless_known(name, &report).await?;
        }
        let progress = self.subscribers.delivery_progress(principal);
        fleet
            .queries
            .record_replica_answers(name, &report.session_answers);
        let (orders, news) = {
            let mut membership = fleet.membership();
            let news = membership.record_replica_report(name, report, progress, Instant::now());
            (replica_orders(&membership, name), news)
        };
        self.metrics
            .count(metrics::FLEET_REPORTS, &[("from", "replica")]);
        // Each replica reports up to ten times a second; the planner runs only after a change.
        if news {
            fleet.wake.notify_one();
        }
        Ok(ReplicaReportResponse {
            queries: fleet.queries.of_replicas(),
            ..orders
        })
    }

    /// Checks a replica's report again while no other member registers, and registers the replica.
    async fn register_unless_known(
        &self,
        name: &ReplicaName,
        report: &ReplicaReport,
    ) -> Result<(), ReportError> {
        // A member that registered meanwhile may have the same underlay.
        let _alone = self.fleet.registration.lock().await;
        let is_registered = self
            .fleet
            .membership()
            .check_replica(name, report, Instant::now())?;
        if is_registered {
            return Ok(());
        }
        self.register(name, report).await
    }

    /// Registers a replica, in the store first.
    async fn register(
        &self,
        name: &ReplicaName,
        report: &ReplicaReport,
    ) -> Result<(), ReportError> {
        let (store, name, report) = (self.store.clone(), name.clone(), report.clone());
        let number = az_number(report.underlay);
        let stored = tokio::task::spawn_blocking(move || {
            store.register(
                &name,
                &report.backend,
                (&report.az, number),
                report.underlay,
            )
        });
        let row = stored.await.map_err(|_| {
            ReportError::Form("the replica could not be registered; fix: report again".into())
        })??;
        tracing::info!(
            target: "audit", replica = %row.name, number = row.number.get(), backend = %row.backend, az = %row.az, underlay = %row.underlay,
            "fleet: registered a replica"
        );
        self.metrics.count(metrics::FLEET_REGISTRATIONS, &[]);
        self.fleet
            .membership()
            .register_replica(row, Instant::now());
        self.fleet.wake.notify_one();
        Ok(())
    }

    /// Checks and records an edge's report, and returns its orders.
    async fn handle_edge_report(
        &self,
        principal: &Principal,
        name: &EdgeName,
        az: &AzName,
        m: EdgeReportRequest,
    ) -> Result<EdgeReportResponse, ReportError> {
        let report = EdgeReport::read(m)?;
        is_own_az(az, &report.az)?;
        let fleet = &self.fleet;
        let unknown = fleet
            .membership()
            .check_edge(name, &report, Instant::now())?;
        // An edge is on disk before its first report counts.
        if unknown.is_some() {
            // A member that registered meanwhile may have the same underlay.
            let _alone = fleet.registration.lock().await;
            let unknown = fleet
                .membership()
                .check_edge(name, &report, Instant::now())?;
            if let Some(replaces) = unknown {
                self.keep_edge(name, &report, replaces).await?;
            }
        }
        let progress = self.subscribers.delivery_progress(principal);
        fleet.queries.record_edge_answers(name, &report.paths);
        let (orders, news) = {
            let mut membership = fleet.membership();
            let (az, has) = (report.az.clone(), report.tunnels_version);
            let news = membership.record_edge_report(name, report, progress, Instant::now());
            (edge_orders(&membership, &az, has), news)
        };
        let queries = fleet.queries.of_edges(az);
        self.metrics
            .count(metrics::FLEET_REPORTS, &[("from", "edge")]);
        if news {
            fleet.wake.notify_one();
        }
        Ok(EdgeReportResponse { queries, ..orders })
    }

    /// Registers an edge in place of others, in the store first.
    async fn keep_edge(
        &self,
        name: &EdgeName,
        report: &EdgeReport,
        replaces: Vec<EdgeName>,
    ) -> Result<(), ReportError> {
        let anycast = Some(report.tunnel_end).filter(|end| *end != report.underlay);
        let row = StoredEdge {
            name: name.clone(),
            az: report.az.clone(),
            underlay: report.underlay,
            anycast,
        };
        let (store, stored, gone) = (self.store.clone(), row.clone(), replaces.clone());
        let stored = tokio::task::spawn_blocking(move || {
            store.put_edge(&stored, &gone, az_number(stored.underlay))
        });
        stored.await.map_err(|_| {
            ReportError::Form("the edge could not be stored; fix: report again".into())
        })??;
        tracing::info!(target: "audit", edge = %row.name, az = %row.az, underlay = %row.underlay, tunnels = %row.tunnel_end(), "fleet: registered an edge");
        self.fleet.membership().register_edge(row, &replaces);
        Ok(())
    }

    /// Counts and logs a report that is refused.
    fn refused(&self, principal: &Principal, refusal: &ReportError) -> Status {
        self.metrics
            .count(metrics::FLEET_REFUSALS, &[("reason", refusal.name())]);
        tracing::warn!(from = %principal, reason = refusal.name(), why = %refusal, "fleet: refused a report; the sender's last accepted report stays in use");
        Status::new(refusal.code(), refusal.to_string())
    }
}

fn is_own_az(wanted: &AzName, given: &AzName) -> Result<(), ReportError> {
    if wanted == given {
        Ok(())
    } else {
        Err(ReportError::Az {
            expected: wanted.clone(),
            reported: given.clone(),
        })
    }
}

/// Returns the addresses of the hosts that may send with the tier's VNI.
fn hosts(membership: &Membership) -> Vec<String> {
    let replicas = membership
        .members()
        .values()
        .map(|m| m.row.underlay.to_string());
    let ends: BTreeSet<Ipv4Addr> = membership
        .edges()
        .values()
        .map(|edge| edge.row.tunnel_end())
        .collect();
    ends.iter()
        .map(ToString::to_string)
        .chain(replicas)
        .collect()
}

/// Returns the orders of an edge; `has` is the version of the tunnels that it has.
fn edge_orders(membership: &Membership, az: &AzName, has: u64) -> EdgeReportResponse {
    let (tunnels_version, tunnels) = membership.tunnels(az);
    let tunnel = |(underlay, ports): (Ipv4Addr, Arc<[u8]>)| ReplicaTunnels {
        underlay: underlay.to_string(),
        ports: ports.to_vec(),
    };
    let tunnels = if has == tunnels_version {
        Vec::new()
    } else {
        tunnels.map(tunnel).collect()
    };
    EdgeReportResponse {
        hosts: hosts(membership),
        next_ms: REPORT_MOVING_MS,
        tunnels,
        tunnels_version,
        queries: Vec::new(),
    }
}

/// Returns the orders of a replica.
fn replica_orders(membership: &Membership, name: &ReplicaName) -> ReplicaReportResponse {
    let Some(member) = membership.members().get(name) else {
        // This is the last report of a replica that was never registered.
        return ReplicaReportResponse {
            next_ms: REPORT_MS,
            ..ReplicaReportResponse::default()
        };
    };
    let edge = membership.edges().tunnel_end(&member.row.az);
    ReplicaReportResponse {
        number: member.row.number.get().into(),
        edge: edge.map(|end| end.to_string()).unwrap_or_default(),
        hosts: hosts(membership),
        drain: member.row.drain,
        next_ms: if membership.is_moving(&member.row.backend) {
            REPORT_MOVING_MS
        } else {
            REPORT_MS
        },
        queries: Vec::new(),
        mark: Some(membership.mark()),
    }
}

#[cfg(test)]
mod tests {
    use canal_model::share::ShareKind;
    use canal_runtime::{RevocationOrder, TenantLimit, TenantLimitConfig};
    use canal_store::StoreLimits;

    use super::*;
    use crate::SilenceTimeouts;

    #[tokio::test]
    async fn of_two_new_replicas_with_one_underlay_only_one_is_registered() {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(Store::open(dir.path(), StoreLimits::default()).unwrap());
        let fleet = Arc::new(FleetHandle::open(&store, SilenceTimeouts::default()).unwrap());
        let (_catalogs, catalog) = watch::channel(Arc::new(Catalog::default()));
        let (_principals, principals) = watch::channel(Arc::new(Principals::default()));
        let streams = TenantLimit::new(TenantLimitConfig {
            kind: ShareKind::ControllerStreams,
            // The test opens no streams.
            capacity: 8,
            reserve: 0,
            revocation_order: RevocationOrder::OldestFirst,
        });
        let service = FleetService {
            fleet,
            catalog,
            principals,
            subscribers: Subscribers::new(streams),
            store,
            metrics: Arc::default(),
        };
        let az: AzName = "az1".parse().unwrap();
        let report = async |name: &str| {
            let name: ReplicaName = name.parse().unwrap();
            let principal = Principal::Gateway {
                name: name.clone(),
                az: az.clone(),
            };
            let request = ReplicaReportRequest {
                backend: "b1".to_owned(),
                az: az.to_string(),
                underlay: "250.1.0.3".to_owned(),
                ..ReplicaReportRequest::default()
            };
            service
                .handle_replica_report(&principal, &name, &az, request)
                .await
        };
        // `join!` polls r1 first, so r1 registers first.
        let (first, second) = tokio::join!(report("r1"), report("r2"));
        assert!(first.is_ok(), "{:?}", first.err());
        assert!(
            matches!(second, Err(ReportError::UnderlayTaken { .. })),
            "{second:?}"
        );
        assert_eq!(service.store.fleet().unwrap().replicas.len(), 1);
        assert!(report("r1").await.is_ok());
    }
}
