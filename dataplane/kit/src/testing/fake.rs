//! A controller that does what a test tells it: hands out streams, issues what it is told to, counts calls.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use canal_wire::citadel::istio_certificate_service_server::{IstioCertificateService, IstioCertificateServiceServer};
use canal_wire::citadel::{IstioCertificateRequest, IstioCertificateResponse};
use canal_wire::discovery::aggregated_discovery_service_server::{AggregatedDiscoveryService, AggregatedDiscoveryServiceServer};
use canal_wire::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use canal_wire::fleet::fleet_server::FleetServer;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

use super::{Reports, TestCa};
use crate::controller::Controller;

/// The token that is right.
pub const TOKEN: &str = "right";

type Issue = Box<dyn FnMut(IstioCertificateRequest) -> Result<IstioCertificateResponse, Status> + Send>;

/// One subscriber's stream, played by the test.
pub struct FakeStream {
    requests: Streaming<DeltaDiscoveryRequest>,
    responses: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
}

impl FakeStream {
    /// The subscriber's next message, `None` at the end.
    pub async fn hear(&mut self) -> Option<DeltaDiscoveryRequest> {
        self.requests.message().await.ok().flatten()
    }
    /// Sends, without waiting for the answer.
    pub async fn say(&self, response: DeltaDiscoveryResponse) {
        let _ = self.responses.send(Ok(response)).await;
    }
    /// Sends, and hears the answer.
    pub async fn ask(&mut self, response: DeltaDiscoveryResponse) -> DeltaDiscoveryRequest {
        self.say(response).await;
        self.hear().await.expect("an answer")
    }
}

struct Xds(mpsc::Sender<FakeStream>);
struct Ca {
    issue: Arc<Mutex<Issue>>,
    now: AtomicUsize,
    most: Arc<AtomicUsize>,
}

#[allow(clippy::result_large_err, reason = "tonic's own error type")]
pub(super) fn authenticate<T>(r: &Request<T>) -> Result<(), Status> {
    let given = r.metadata().get("authorization").and_then(|v| v.to_str().ok());
    if given == Some(&format!("Bearer {TOKEN}")) { Ok(()) } else { Err(Status::unauthenticated("unknown token")) }
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Xds {
    type DeltaAggregatedResourcesStream = ReceiverStream<Result<DeltaDiscoveryResponse, Status>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        authenticate(&request)?;
        let (responses, out) = mpsc::channel(16);
        let _ = self.0.send(FakeStream { requests: request.into_inner(), responses }).await;
        Ok(Response::new(ReceiverStream::new(out)))
    }
}

#[tonic::async_trait]
impl IstioCertificateService for Ca {
    async fn create_certificate(&self, request: Request<IstioCertificateRequest>) -> Result<Response<IstioCertificateResponse>, Status> {
        authenticate(&request)?;
        self.most.fetch_max(self.now.fetch_add(1, Relaxed) + 1, Relaxed);
        // Long enough for a crowd to gather.
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        self.now.fetch_sub(1, Relaxed);
        let mut issue = self.issue.lock().expect("no panic while issuing");
        issue(request.into_inner()).map(Response::new)
    }
}

/// The fake controller. Dropping it kills it.
pub struct FakeController {
    infra: Arc<TestCa>,
    /// Where it listens.
    pub address: SocketAddr,
    streams: mpsc::Receiver<FakeStream>,
    issue: Arc<Mutex<Issue>>,
    most: Arc<AtomicUsize>,
    /// Of replicas and edges.
    pub reports: Reports,
    server: JoinHandle<()>,
}

impl FakeController {
    /// On a free loopback port.
    pub async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().expect("an address"), Arc::new(TestCa::new("infra"))).await
    }

    async fn start_at(address: SocketAddr, infra: Arc<TestCa>) -> Self {
        let listener = loop {
            // The port of a killed predecessor is free within a moment.
            match TcpListener::bind(address).await {
                Ok(l) => break l,
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            }
        };
        let address = listener.local_addr().expect("a bound socket");
        let (tx, streams) = mpsc::channel(16);
        let refuse: Issue = Box::new(|_| Err(Status::unavailable("the test issues nothing")));
        let issue = Arc::new(Mutex::new(refuse));
        let (most, reports) = (Arc::new(AtomicUsize::new(0)), Reports::default());
        let ca = Ca { issue: issue.clone(), now: AtomicUsize::new(0), most: most.clone() };
        let own = infra.server(canal_wire::CONTROLLER_NAME);
        let tls = ServerTlsConfig::new().identity(Identity::from_pem(own.chain, own.key));
        let mut server = Server::builder().tls_config(tls).expect("a right certificate");
        let routes = server
            .add_service(AggregatedDiscoveryServiceServer::new(Xds(tx)).max_decoding_message_size(canal_wire::MESSAGE_BYTES_MAX))
            .add_service(IstioCertificateServiceServer::new(ca))
            .add_service(FleetServer::new(reports.clone()));
        let server = tokio::spawn(async move {
            let _ = routes.serve_with_incoming(TcpListenerStream::new(listener)).await;
        });
        Self { infra, address, streams, issue, most, reports, server }
    }

    /// Kills it and starts another at the same place.
    pub async fn restart(self) -> Self {
        let (address, infra) = (self.address, self.infra.clone());
        drop(self);
        Self::start_at(address, infra).await
    }

    /// How to reach it; its files are written to `folder`.
    pub fn reached_through(&self, folder: &Path, address: SocketAddr) -> Controller {
        let (root, token) = (folder.join("root.pem"), folder.join("token"));
        std::fs::write(&root, self.infra.root_pem()).expect("a writable folder");
        std::fs::write(&token, TOKEN).expect("a writable folder");
        Controller { addresses: vec![address.to_string()], root, token }
    }

    /// The next subscriber's stream.
    pub async fn stream(&mut self) -> FakeStream {
        self.streams.recv().await.expect("the server runs")
    }

    /// How many certificate requests were under way at once, at most.
    pub fn most_requests_at_once(&self) -> usize {
        self.most.load(Relaxed)
    }

    /// From now on certificates are issued so.
    pub fn issue(&self, issue: impl FnMut(IstioCertificateRequest) -> Result<IstioCertificateResponse, Status> + Send + 'static) {
        *self.issue.lock().expect("no panic while issuing") = Box::new(issue);
    }
}

impl Drop for FakeController {
    fn drop(&mut self) {
        self.server.abort();
    }
}
