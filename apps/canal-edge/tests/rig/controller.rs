//! A controller that a test plays: tells what it is told to tell, and remembers what edges report.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use canal_kit::testing::{TOKEN, TestCa};
use canal_model::program::{Kind, Resource};
use canal_wire::discovery::aggregated_discovery_service_server::{AggregatedDiscoveryService, AggregatedDiscoveryServiceServer};
use canal_wire::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource as Envelope};
use canal_wire::fleet::fleet_server::{Fleet, FleetServer};
use canal_wire::fleet::{EdgeOrders, EdgeState, ReplicaOrders, ReplicaState, ShareReportAnswer, ShareState};
use canal_wire::southbound::{encode, type_url};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

/// What an edge subscribes to.
const KINDS: [Kind; 5] = [Kind::Tenant, Kind::Node, Kind::Replica, Kind::Address, Kind::Table];

pub(crate) type Out = mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>;

/// What the test and the server share.
#[derive(Default)]
pub(crate) struct Desk {
    pub(crate) resources: Vec<Resource>,
    pub(crate) generation: u64,
    pub(crate) orders: EdgeOrders,
    pub(crate) reports: Vec<(Instant, EdgeState)>,
    /// Texts of nacks.
    pub(crate) nacks: Vec<String>,
    /// `node.id` of the subscribers.
    pub(crate) subscribers: Vec<String>,
    pub(crate) streams: Vec<Out>,
}

impl Desk {
    fn response(&self, kind: Kind, removed: &[String]) -> DeltaDiscoveryResponse {
        let generation = self.generation.to_string();
        let envelope = |r: &Resource| Envelope {
            name: r.name(),
            version: generation.clone(),
            resource: Some(prost_types::Any { type_url: type_url(kind).into(), value: encode(r) }),
        };
        DeltaDiscoveryResponse {
            system_version_info: generation.clone(),
            type_url: type_url(kind).into(),
            resources: self.resources.iter().filter(|r| r.kind() == kind).map(envelope).collect(),
            removed_resources: removed.to_vec(),
            nonce: format!("{generation}-{}", type_url(kind)),
            control_plane: None,
        }
    }
}

type Shared = Arc<Mutex<Desk>>;

#[allow(clippy::result_large_err, reason = "tonic's own error type")]
fn authenticate<T>(r: &Request<T>) -> Result<(), Status> {
    let given = r.metadata().get("authorization").and_then(|v| v.to_str().ok());
    if given == Some(&format!("Bearer {TOKEN}")) { Ok(()) } else { Err(Status::unauthenticated("unknown token")) }
}

struct Xds(Shared);
struct Reports(Shared);

#[tonic::async_trait]
impl AggregatedDiscoveryService for Xds {
    type DeltaAggregatedResourcesStream = ReceiverStream<Result<DeltaDiscoveryResponse, Status>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        authenticate(&request)?;
        let (out, responses) = mpsc::channel(64);
        let (mut requests, desk) = (request.into_inner(), self.0.clone());
        tokio::spawn(async move {
            let mut asked = Vec::new();
            while let Ok(Some(r)) = requests.message().await {
                let mut answer = None;
                {
                    let mut desk = desk.lock().unwrap();
                    if let Some(node) = r.node.filter(|n| !n.id.is_empty()) {
                        desk.subscribers.push(node.id);
                        desk.streams.push(out.clone());
                    }
                    if let Some(why) = r.error_detail {
                        desk.nacks.push(why.message);
                    }
                    if !asked.contains(&r.type_url) {
                        let kind = KINDS.into_iter().find(|k| type_url(*k) == r.type_url).expect("a kind that edges are told of");
                        answer = Some(desk.response(kind, &[]));
                        asked.push(r.type_url);
                    }
                }
                if let Some(a) = answer {
                    let _ = out.send(Ok(a)).await;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(responses)))
    }
}

#[tonic::async_trait]
impl Fleet for Reports {
    async fn replica_report(&self, _: Request<ReplicaState>) -> Result<Response<ReplicaOrders>, Status> {
        Err(Status::permission_denied("no replica is expected here"))
    }
    async fn edge_report(&self, request: Request<EdgeState>) -> Result<Response<EdgeOrders>, Status> {
        authenticate(&request)?;
        let mut desk = self.0.lock().unwrap();
        desk.reports.push((Instant::now(), request.into_inner()));
        Ok(Response::new(desk.orders.clone()))
    }
    async fn share_report(&self, request: Request<ShareState>) -> Result<Response<ShareReportAnswer>, Status> {
        authenticate(&request)?;
        Ok(Response::new(ShareReportAnswer {}))
    }
}

/// The controller. Dropping it kills it.
pub(crate) struct Controller {
    runtime: Option<Runtime>,
    pub(crate) desk: Shared,
    pub(crate) address: SocketAddr,
}

impl Controller {
    /// On `listener`; what is needed to reach it is written to `folder`.
    pub(crate) fn start(listener: std::net::TcpListener, folder: &Path, desk: Shared) -> Self {
        let infra = TestCa::new("infra");
        std::fs::write(folder.join("root.pem"), infra.root_pem()).unwrap();
        std::fs::write(folder.join("token"), TOKEN).unwrap();
        let address = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let own = infra.server(canal_wire::CONTROLLER_NAME);
        let tls = ServerTlsConfig::new().identity(Identity::from_pem(own.chain, own.key));
        let routes = Server::builder()
            .tls_config(tls)
            .unwrap()
            .add_service(AggregatedDiscoveryServiceServer::new(Xds(desk.clone())))
            .add_service(FleetServer::new(Reports(desk.clone())));
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let _ = routes.serve_with_incoming(TcpListenerStream::new(listener)).await;
        });
        Self { runtime: Some(runtime), desk, address }
    }

    /// Changes what is told, and tells it: all of each kind, and what is gone.
    pub(crate) fn tell(&self, change: impl FnOnce(&mut Vec<Resource>)) {
        let mut desk = self.desk.lock().unwrap();
        let names = |d: &Desk, k: Kind| d.resources.iter().filter(|r| r.kind() == k).map(Resource::name).collect::<Vec<_>>();
        let before: Vec<_> = KINDS.iter().map(|k| names(&desk, *k)).collect();
        change(&mut desk.resources);
        desk.generation += 1;
        for (kind, before) in KINDS.into_iter().zip(before) {
            let now = names(&desk, kind);
            let removed: Vec<String> = before.into_iter().filter(|n| !now.contains(n)).collect();
            let response = desk.response(kind, &removed);
            desk.streams.retain(|s| s.try_send(Ok(response.clone())).is_ok());
        }
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if let Some(r) = self.runtime.take() {
            r.shutdown_background();
        }
        self.desk.lock().unwrap().streams.clear();
    }
}
