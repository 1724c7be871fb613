//! Hears what replicas and edges report, and orders what a test says.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_wire::fleet::fleet_server::Fleet;
use canal_wire::fleet::{EdgeOrders, EdgeState, ReplicaOrders, ReplicaState, ShareReportAnswer, ShareState};
use tonic::{Request, Response, Status};

use super::fake::authenticate;

/// What was heard, and what is answered.
#[derive(Debug, Default)]
pub struct Heard {
    pub replicas: Vec<ReplicaState>,
    pub edges: Vec<EdgeState>,
    pub shares: Vec<ShareState>,
    pub replica_orders: ReplicaOrders,
    pub edge_orders: EdgeOrders,
}

/// Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Reports(Arc<Mutex<Heard>>);

impl Reports {
    /// What was heard, to look at and to change what is answered.
    pub fn heard(&self) -> MutexGuard<'_, Heard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[tonic::async_trait]
impl Fleet for Reports {
    async fn replica_report(&self, request: Request<ReplicaState>) -> Result<Response<ReplicaOrders>, Status> {
        authenticate(&request)?;
        let mut heard = self.heard();
        heard.replicas.push(request.into_inner());
        Ok(Response::new(heard.replica_orders.clone()))
    }

    async fn edge_report(&self, request: Request<EdgeState>) -> Result<Response<EdgeOrders>, Status> {
        authenticate(&request)?;
        let mut heard = self.heard();
        heard.edges.push(request.into_inner());
        Ok(Response::new(heard.edge_orders.clone()))
    }

    async fn share_report(&self, request: Request<ShareState>) -> Result<Response<ShareReportAnswer>, Status> {
        authenticate(&request)?;
        self.heard().shares.push(request.into_inner());
        Ok(Response::new(ShareReportAnswer {}))
    }
}
