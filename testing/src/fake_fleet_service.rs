//! A fake fleet service: it records the reports of replicas and edges, and answers with the orders
//! that a test sets.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_wire::fleet::fleet_server::Fleet;
use canal_wire::fleet::{
    EdgeReportRequest, EdgeReportResponse, ReplicaReportRequest, ReplicaReportResponse,
    ShareReportAnswer, ShareState,
};
use tonic::{Request, Response, Status};

use super::fake_controller::authenticate;

/// Recorded reports, and the orders with which they are answered.
#[derive(Debug, Default)]
pub struct ReportLog {
    pub replicas: Vec<ReplicaReportRequest>,
    pub edges: Vec<EdgeReportRequest>,
    pub shares: Vec<ShareState>,
    pub replica_orders: ReplicaReportResponse,
    pub edge_orders: EdgeReportResponse,
}

/// The fake fleet service. Clones share the same log.
#[derive(Debug, Clone, Default)]
pub struct FakeFleetService(Arc<Mutex<ReportLog>>);

impl FakeFleetService {
    /// Returns the recorded reports and the answers, which the test may change.
    pub fn report_log(&self) -> MutexGuard<'_, ReportLog> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[tonic::async_trait]
impl Fleet for FakeFleetService {
    async fn replica_report(
        &self,
        request: Request<ReplicaReportRequest>,
    ) -> Result<Response<ReplicaReportResponse>, Status> {
        authenticate(&request)?;
        let mut heard = self.report_log();
        heard.replicas.push(request.into_inner());
        Ok(Response::new(heard.replica_orders.clone()))
    }

    async fn edge_report(
        &self,
        request: Request<EdgeReportRequest>,
    ) -> Result<Response<EdgeReportResponse>, Status> {
        authenticate(&request)?;
        let mut heard = self.report_log();
        heard.edges.push(request.into_inner());
        Ok(Response::new(heard.edge_orders.clone()))
    }

    async fn share_report(
        &self,
        request: Request<ShareState>,
    ) -> Result<Response<ShareReportAnswer>, Status> {
        authenticate(&request)?;
        self.report_log().shares.push(request.into_inner());
        Ok(Response::new(ShareReportAnswer {}))
    }
}
