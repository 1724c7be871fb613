//! A fake controller that a test scripts: it passes streams to the test, issues certificates as the
//! test says, and counts calls. It implements no logic of the real controller.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use canal_southbound_client::controller_client::ControllerEndpoint;
use canal_wire::citadel::istio_certificate_service_server::{
    IstioCertificateService, IstioCertificateServiceServer,
};
use canal_wire::citadel::{IstioCertificateRequest, IstioCertificateResponse};
use canal_wire::discovery::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use canal_wire::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use canal_wire::fleet::fleet_server::FleetServer;
use canal_wire::observe::observation_server::{Observation, ObservationServer};
use canal_wire::observe::{ObserveAnswer, ObserveOrder};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Request, Response, Status, Streaming};

use super::{FakeFleetService, TestCa};

/// Time that a fake waits for the port of its predecessor. It only ends a hang.
const BIND_TIMEOUT: Duration = Duration::from_secs(60);
/// The bearer token that the fake accepts.
pub const TOKEN: &str = "right";

type FakeIssueFn =
    Box<dyn FnMut(IstioCertificateRequest) -> Result<IstioCertificateResponse, Status> + Send>;

/// One subscriber's stream, whose responses the test sends.
pub struct FakeStream {
    requests: Streaming<DeltaDiscoveryRequest>,
    responses: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
}

impl FakeStream {
    /// Returns the subscriber's next message; `None` at the end.
    pub async fn receive(&mut self) -> Option<DeltaDiscoveryRequest> {
        self.requests.message().await.ok().flatten()
    }
    /// Sends a response without waiting for the answer.
    pub async fn send(&self, response: DeltaDiscoveryResponse) {
        let _ = self.responses.send(Ok(response)).await;
    }
    /// Ends the stream with an error.
    pub async fn fail(self, status: Status) {
        let _ = self.responses.send(Err(status)).await;
    }
    /// Sends a response and returns the answer.
    pub async fn exchange(&mut self, response: DeltaDiscoveryResponse) -> DeltaDiscoveryRequest {
        self.send(response).await;
        self.receive().await.expect("an answer")
    }
}

/// A data plane's observation stream, whose orders the test sends.
pub struct FakeObservation {
    answers: Streaming<ObserveAnswer>,
    orders: mpsc::Sender<Result<ObserveOrder, Status>>,
}

impl FakeObservation {
    /// Returns the data plane's next message; `None` at the end.
    pub async fn receive(&mut self) -> Option<ObserveAnswer> {
        self.answers.message().await.ok().flatten()
    }
    /// Sends an order without waiting for the answer.
    pub async fn send(&self, order: ObserveOrder) {
        let _ = self.orders.send(Ok(order)).await;
    }
}

struct FakeObserver(mpsc::Sender<FakeObservation>);

#[tonic::async_trait]
impl Observation for FakeObserver {
    type ServeStream = ReceiverStream<Result<ObserveOrder, Status>>;

    async fn serve(
        &self,
        request: Request<Streaming<ObserveAnswer>>,
    ) -> Result<Response<Self::ServeStream>, Status> {
        authenticate(&request)?;
        let (orders, out) = mpsc::channel(16);
        // Most tests take no observation streams, so the channel may be full.
        let _ = self.0.try_send(FakeObservation {
            answers: request.into_inner(),
            orders,
        });
        Ok(Response::new(ReceiverStream::new(out)))
    }
}

struct FakeDiscovery {
    streams: mpsc::Sender<FakeStream>,
    /// Number of streams to refuse.
    refusals: Arc<AtomicUsize>,
}
struct FakeCa {
    issue: Arc<Mutex<FakeIssueFn>>,
    now: AtomicUsize,
    most: Arc<AtomicUsize>,
}

#[allow(clippy::result_large_err, reason = "tonic's own error type")]
pub(super) fn authenticate<T>(r: &Request<T>) -> Result<(), Status> {
    let given = r
        .metadata()
        .get("authorization")
        .and_then(|v| v.to_str().ok());
    if given == Some(&format!("Bearer {TOKEN}")) {
        Ok(())
    } else {
        Err(Status::unauthenticated("unknown token"))
    }
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for FakeDiscovery {
    type DeltaAggregatedResourcesStream = ReceiverStream<Result<DeltaDiscoveryResponse, Status>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        authenticate(&request)?;
        if self
            .refusals
            .fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1))
            .is_ok()
        {
            return Err(Status::resource_exhausted("no more streams"));
        }
        let (responses, out) = mpsc::channel(16);
        let _ = self
            .streams
            .send(FakeStream {
                requests: request.into_inner(),
                responses,
            })
            .await;
        Ok(Response::new(ReceiverStream::new(out)))
    }
}

#[tonic::async_trait]
impl IstioCertificateService for FakeCa {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        authenticate(&request)?;
        self.most
            .fetch_max(self.now.fetch_add(1, Relaxed) + 1, Relaxed);
        // The pause is long enough for concurrent requests to overlap.
        tokio::time::sleep(Duration::from_millis(5)).await;
        self.now.fetch_sub(1, Relaxed);
        let mut issue = self.issue.lock().expect("no panic while issuing");
        issue(request.into_inner()).map(Response::new)
    }
}

/// The fake controller. Dropping it stops its server.
pub struct FakeController {
    infra: Arc<TestCa>,
    /// Address on which it listens.
    pub address: SocketAddr,
    streams: mpsc::Receiver<FakeStream>,
    refusals: Arc<AtomicUsize>,
    observations: mpsc::Receiver<FakeObservation>,
    issue: Arc<Mutex<FakeIssueFn>>,
    most: Arc<AtomicUsize>,
    /// Reports of replicas and edges.
    pub reports: FakeFleetService,
    server: JoinHandle<()>,
}

impl FakeController {
    /// Starts the fake on a free loopback port.
    pub async fn start() -> Self {
        Self::start_at(
            "127.0.0.1:0".parse().expect("an address"),
            Arc::new(TestCa::new("infra")),
        )
        .await
    }

    async fn start_at(address: SocketAddr, infra: Arc<TestCa>) -> Self {
        let started = Instant::now();
        let listener = loop {
            // The port of a predecessor that was stopped becomes free shortly.
            match TcpListener::bind(address).await {
                Ok(l) => break l,
                Err(e) => {
                    let waited = started.elapsed();
                    assert!(waited < BIND_TIMEOUT, "{address}: {e}");
                    // Short beside `BIND_TIMEOUT`.
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        };
        let address = listener.local_addr().expect("a bound socket");
        // A test has far fewer than 16 streams that it has not taken yet.
        let (tx, streams) = mpsc::channel(16);
        let (observed, observations) = mpsc::channel(16);
        let refuse: FakeIssueFn = Box::new(|_| Err(Status::unavailable("the test issues nothing")));
        let issue = Arc::new(Mutex::new(refuse));
        // `most` is the largest number of certificate requests at once, for tests of limits.
        let (most, reports) = (Arc::new(AtomicUsize::new(0)), FakeFleetService::default());
        let ca = FakeCa {
            issue: issue.clone(),
            now: AtomicUsize::new(0),
            most: most.clone(),
        };
        let refusals = Arc::new(AtomicUsize::new(0));
        let discovery = FakeDiscovery {
            streams: tx,
            refusals: refusals.clone(),
        };
        let own = infra.server(canal_wire::CONTROLLER_NAME);
        let tls = ServerTlsConfig::new().identity(Identity::from_pem(own.chain, own.key));
        let mut server = Server::builder()
            .tls_config(tls)
            .expect("a right certificate");
        let routes = server
            .add_service(
                AggregatedDiscoveryServiceServer::new(discovery)
                    .max_decoding_message_size(canal_wire::MESSAGE_BYTES_MAX),
            )
            .add_service(IstioCertificateServiceServer::new(ca))
            .add_service(ObservationServer::new(FakeObserver(observed)))
            .add_service(FleetServer::new(reports.clone()));
        let server = tokio::spawn(async move {
            // An error of the server shows as a failed connection of the test's client.
            let _ = routes
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await;
        });
        Self {
            infra,
            address,
            streams,
            refusals,
            observations,
            issue,
            most,
            reports,
            server,
        }
    }

    /// Stops the fake and starts another one at the same address.
    pub async fn restart(self) -> Self {
        let (address, infra) = (self.address, self.infra.clone());
        drop(self);
        Self::start_at(address, infra).await
    }

    /// Returns the endpoint to reach the fake through `address`. Root and token are written to
    /// `folder`.
    pub fn reached_through(&self, folder: &Path, address: SocketAddr) -> ControllerEndpoint {
        let (root, token) = (folder.join("root.pem"), folder.join("token"));
        std::fs::write(&root, self.infra.root_pem()).expect("a writable folder");
        std::fs::write(&token, TOKEN).expect("a writable folder");
        ControllerEndpoint {
            addresses: vec![address.to_string()],
            root,
            token,
        }
    }

    /// Refuses the next `count` streams, because there is no place.
    pub fn refuse_streams(&self, count: usize) {
        self.refusals.store(count, Relaxed);
    }

    /// Waits for the next subscriber's stream.
    pub async fn stream(&mut self) -> FakeStream {
        self.streams.recv().await.expect("the server runs")
    }

    /// Waits for the next data plane's observation stream.
    pub async fn observation(&mut self) -> FakeObservation {
        self.observations.recv().await.expect("the server runs")
    }

    /// Returns the maximum number of concurrent certificate requests so far.
    pub fn most_requests_at_once(&self) -> usize {
        self.most.load(Relaxed)
    }

    /// Sets the function that issues certificates from now on.
    pub fn issue(
        &self,
        issue: impl FnMut(IstioCertificateRequest) -> Result<IstioCertificateResponse, Status>
        + Send
        + 'static,
    ) {
        *self.issue.lock().expect("no panic while issuing") = Box::new(issue);
    }
}

impl Drop for FakeController {
    fn drop(&mut self) {
        self.server.abort();
    }
}
