//! `canal.fleet.v1.Fleet`: edges and replicas report, and hear what is wanted of them. Strangers cost nothing; a report that is refused
//! changes nothing.

use std::sync::Arc;

use canal_model::ids::{AzName, EdgeName, ReplicaName};
use canal_model::principal::Principal;
use canal_store::StoredEdge;
use canal_wire::fleet::fleet_server;
use canal_wire::fleet::{EdgeOrders, EdgeState, ReplicaOrders, ReplicaState, ShareReportAnswer, ShareState};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::report::{EdgeReport, Refusal, ReplicaReport, az_number};
use super::roster::Roster;
use super::share_report::ShareReport;
use crate::metrics;
use crate::shared::Shared;

/// When a replica reports again, and when while tables of its services are in motion.
const REPORT_MS: u32 = 1000;
const REPORT_MOVING_MS: u32 = 200;

pub(crate) struct FleetService {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl fleet_server::Fleet for FleetService {
    async fn replica_report(&self, request: Request<ReplicaState>) -> Result<Response<ReplicaOrders>, Status> {
        let caller = self.shared.caller(&request)?;
        let done = match &caller.principal {
            Principal::Gateway { name, az } => self.hear_replica(&caller.principal, name, az, request.into_inner()).await,
            other => Err(Refusal::NotAReplica(other.to_string())),
        };
        done.map(Response::new).map_err(|refusal| self.refused(&caller.principal, &refusal))
    }

    async fn edge_report(&self, request: Request<EdgeState>) -> Result<Response<EdgeOrders>, Status> {
        let caller = self.shared.caller(&request)?;
        let done = match &caller.principal {
            Principal::Edge { name, az } => self.hear_edge(&caller.principal, name, az, request.into_inner()).await,
            other => Err(Refusal::NotAnEdge(other.to_string())),
        };
        done.map(Response::new).map_err(|refusal| self.refused(&caller.principal, &refusal))
    }

    async fn share_report(&self, request: Request<ShareState>) -> Result<Response<ShareReportAnswer>, Status> {
        let caller = self.shared.caller(&request)?;
        let report = ShareReport::read(request.into_inner(), &caller.principal, &self.shared.catalog.borrow());
        let report = report.map_err(|refusal| self.refused(&caller.principal, &refusal))?;
        self.shared.metrics.count(metrics::FLEET_REPORTS, &[("from", "shares")]);
        self.shared.subscribers.note_shares(&caller.principal, Arc::new(report));
        Ok(Response::new(ShareReportAnswer {}))
    }
}

impl FleetService {
    async fn hear_replica(&self, who: &Principal, name: &ReplicaName, az: &AzName, m: ReplicaState) -> Result<ReplicaOrders, Refusal> {
        let report = ReplicaReport::read(m)?;
        is_own_az(az, &report.az)?;
        if let Some(wanted) = self.shared.principals.borrow().backend(who).filter(|b| **b != report.backend) {
            return Err(Refusal::Backend { wanted: wanted.clone(), given: report.backend });
        }
        let fleet = &self.shared.fleet;
        let is_registered = fleet.roster().check_replica(name, &report, Instant::now())?;
        if !is_registered && !report.leaving {
            self.register(name, &report).await?;
        }
        let known = self.shared.subscribers.known(who);
        let (orders, news) = {
            let mut roster = fleet.roster();
            let news = roster.hear_replica(name, report, known, Instant::now());
            (replica_orders(&roster, name), news)
        };
        self.shared.metrics.count(metrics::FLEET_REPORTS, &[("from", "replica")]);
        if news {
            fleet.wake.notify_one();
        }
        Ok(orders)
    }

    async fn register(&self, name: &ReplicaName, report: &ReplicaReport) -> Result<(), Refusal> {
        let (store, name, report) = (self.shared.store.clone(), name.clone(), report.clone());
        let number = az_number(report.underlay);
        let kept = tokio::task::spawn_blocking(move || store.register(&name, &report.backend, (&report.az, number), report.underlay));
        let row = kept.await.map_err(|_| Refusal::Form("the replica could not be registered; report again".into()))??;
        tracing::info!(
            target: "audit", replica = %row.name, number = row.number.get(), backend = %row.backend, az = %row.az, underlay = %row.underlay,
            "registered a replica"
        );
        self.shared.metrics.count(metrics::FLEET_REGISTRATIONS, &[]);
        self.shared.fleet.roster().enter(row, Instant::now());
        self.shared.fleet.wake.notify_one();
        Ok(())
    }

    async fn hear_edge(&self, who: &Principal, name: &EdgeName, az: &AzName, m: EdgeState) -> Result<EdgeOrders, Refusal> {
        let report = EdgeReport::read(m)?;
        is_own_az(az, &report.az)?;
        let fleet = &self.shared.fleet;
        let is_known = fleet.roster().check_edge(name, &report, Instant::now())?;
        if !is_known {
            let row = StoredEdge { name: name.clone(), az: report.az.clone(), underlay: report.underlay };
            let (store, kept) = (self.shared.store.clone(), row.clone());
            let kept = tokio::task::spawn_blocking(move || store.put_edge(&kept, az_number(kept.underlay)));
            kept.await.map_err(|_| Refusal::Form("the edge could not be kept; report again".into()))??;
            tracing::info!(target: "audit", edge = %row.name, az = %row.az, underlay = %row.underlay, "took up an edge");
            fleet.roster().enter_edge(row);
        }
        let known = self.shared.subscribers.known(who);
        let (hosts, news) = {
            let mut roster = fleet.roster();
            let news = roster.hear_edge(report, known, Instant::now());
            (hosts(&roster), news)
        };
        self.shared.metrics.count(metrics::FLEET_REPORTS, &[("from", "edge")]);
        if news {
            fleet.wake.notify_one();
        }
        Ok(EdgeOrders { hosts, next_ms: REPORT_MOVING_MS })
    }

    fn refused(&self, who: &Principal, refusal: &Refusal) -> Status {
        self.shared.metrics.count(metrics::FLEET_REFUSALS, &[("reason", refusal.name())]);
        tracing::warn!(from = %who, reason = refusal.name(), why = %refusal, "refused a report");
        Status::new(refusal.code(), refusal.to_string())
    }
}

fn is_own_az(wanted: &AzName, given: &AzName) -> Result<(), Refusal> {
    if wanted == given { Ok(()) } else { Err(Refusal::Az { wanted: wanted.clone(), given: given.clone() }) }
}

/// Who may speak with the tier's VNI.
fn hosts(roster: &Roster) -> Vec<String> {
    let replicas = roster.members().values().map(|m| m.row.underlay.to_string());
    roster.edges().values().map(|e| e.row.underlay.to_string()).chain(replicas).collect()
}

fn replica_orders(roster: &Roster, name: &ReplicaName) -> ReplicaOrders {
    let Some(member) = roster.members().get(name) else {
        // Last words of one that was never registered.
        return ReplicaOrders { next_ms: REPORT_MS, ..ReplicaOrders::default() };
    };
    let edge = roster.edges().get(&member.row.az);
    ReplicaOrders {
        number: member.row.number.get().into(),
        edge: edge.map(|e| e.row.underlay.to_string()).unwrap_or_default(),
        hosts: hosts(roster),
        drain: member.row.drain,
        next_ms: if roster.is_moving(&member.row.backend) { REPORT_MOVING_MS } else { REPORT_MS },
    }
}
