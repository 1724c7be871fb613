//! SPIFFE Workload API as an application in a pod uses it: both sockets, renewal, changes of
//! bundles, and limits. Each test has two threads: `LabNetns::within` blocks one of them.

use std::os::linux::net::SocketAddrExt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use crate::fixture::lab;
use canal_identity::certs::CertificateClient;
use canal_model::program::Resource;
use canal_model::trust::{KeyAlgorithm, TrustBundle};
use canal_net::sys::{self, ConnectOptions, Netns};
use canal_node_proxy::workload_api::generated::spiffe_workload_api_client::SpiffeWorkloadApiClient;
use canal_node_proxy::workload_api::generated::{
    JwtBundlesRequest, JwtsvidRequest, ValidateJwtsvidRequest, X509BundlesRequest, X509svidRequest,
    X509svidResponse,
};
use canal_node_proxy::workload_api::{
    ABSTRACT_SOCKET, CONNECTIONS_MAX, PORT, STREAMS_MAX, WorkloadApi, WorkloadApis,
};
use canal_runtime::metrics::Registry;
use canal_testing::{FakeController, TestCa, identity};
use canal_timing::deadline;
use canal_tls::TrustStore;
use canal_wire::citadel::IstioCertificateResponse;
use hyper_util::rt::TokioIo;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Request, Streaming};

const IDENTITY: &str = "spiffe://alpha.example/ns/b/sa/app";

/// A pod's namespace with the API in it, and the fake controller that certifies.
struct ApiPod {
    ns: lab::LabNetns,
    netns: Arc<Netns>,
    registry: Registry,
    apis: WorkloadApis,
    ca: Arc<TestCa>,
    issued: Arc<AtomicU64>,
    /// Validity of certificates that are issued from now on.
    life: Arc<Mutex<Duration>>,
    _controller: FakeController,
    _dir: tempfile::TempDir,
}

const UNTIL_TIMEOUT: Duration = Duration::from_secs(5);

/// Waits until `holds` returns true.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        let waited = started.elapsed();
        assert!(waited < deadline(UNTIL_TIMEOUT), "never: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

impl ApiPod {
    async fn new() -> Self {
        let (ns, dir, registry) = (
            lab::LabNetns::bare(),
            tempfile::tempdir().unwrap(),
            Registry::new(),
        );
        let netns = Arc::new(Netns::open(ns.path()).unwrap());
        let controller = FakeController::start().await;
        let (ca, issued, life) = (
            Arc::new(TestCa::new("alpha")),
            Arc::new(AtomicU64::new(0)),
            // Longer than the tests, so that only a test that sets another life has renewals.
            Arc::new(Mutex::new(Duration::from_secs(3600))),
        );
        let (ca_, issued_, life_) = (ca.clone(), issued.clone(), life.clone());
        controller.issue(move |request| {
            issued_.fetch_add(1, Relaxed);
            let until = SystemTime::now() + *life_.lock().unwrap();
            let leaf = ca_.sign_request(&request.csr, |p| {
                (p.not_before, p.not_after) = (SystemTime::now().into(), until.into())
            });
            Ok(IstioCertificateResponse {
                cert_chain: vec![leaf, ca_.root_pem()],
            })
        });
        let issuer = CertificateClient::new(
            controller.reached_through(dir.path(), controller.address),
            // The client requests certificates for an hour, which the controller here does not
            // heed.
            Duration::from_secs(3600),
        );
        let apis = WorkloadApis::new(issuer, &registry);
        Self {
            ns,
            netns,
            registry,
            apis,
            ca,
            issued,
            life,
            _controller: controller,
            _dir: dir,
        }
    }

    fn serve(&self) -> WorkloadApi {
        let trust = TrustStore::new(&self.registry).view(&"alpha".parse().unwrap());
        self.apis.start(
            &self.netns,
            identity(IDENTITY),
            KeyAlgorithm::EcdsaP256,
            trust,
        )
    }

    async fn client(&self, endpoint: ApiEndpoint) -> SpiffeWorkloadApiClient<Channel> {
        let started = Instant::now();
        loop {
            let dialler = Dialler {
                netns: self.netns.clone(),
                endpoint,
            };
            if let Ok(channel) = Endpoint::from_static("http://localhost")
                .connect_with_connector(dialler)
                .await
            {
                return SpiffeWorkloadApiClient::new(channel);
            }
            let waited = started.elapsed();
            assert!(
                waited < deadline(UNTIL_TIMEOUT),
                "{endpoint:?}: no process serves"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn metric(&self, series: &str) -> f64 {
        let text = self.registry.render();
        let line = text.lines().find(|l| l.starts_with(series));
        line.map_or(0.0, |l| l.rsplit(' ').next().unwrap().parse().unwrap())
    }
}

#[derive(Debug, Clone, Copy)]
enum ApiEndpoint {
    Tcp,
    Abstract,
}

trait TestApiStream: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> TestApiStream for T {}

/// Dials the API from inside the pod.
#[derive(Clone)]
struct Dialler {
    netns: Arc<Netns>,
    endpoint: ApiEndpoint,
}

impl tonic::codegen::Service<Uri> for Dialler {
    type Response = TokioIo<Pin<Box<dyn TestApiStream>>>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { netns, endpoint } = self.clone();
        Box::pin(async move {
            let io: Pin<Box<dyn TestApiStream>> = match endpoint {
                ApiEndpoint::Tcp => {
                    let to = format!("127.0.0.1:{PORT}").parse().unwrap();
                    let tcp = sys::connect(Some(&netns), to, &ConnectOptions::default()).await;
                    Box::pin(tcp.map_err(|e| std::io::Error::other(e.to_string()))?)
                }
                ApiEndpoint::Abstract => {
                    let name = std::os::unix::net::SocketAddr::from_abstract_name(ABSTRACT_SOCKET)?;
                    let unix = netns
                        .enter(|| std::os::unix::net::UnixStream::connect_addr(&name))
                        .unwrap()?;
                    unix.set_nonblocking(true)?;
                    Box::pin(tokio::net::UnixStream::from_std(unix)?)
                }
            };
            Ok(TokioIo::new(io))
        })
    }
}

fn with_header<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request
        .metadata_mut()
        .insert("workload.spiffe.io", "true".parse().unwrap());
    request
}

async fn next<T>(stream: &mut Streaming<T>) -> T {
    tokio::time::timeout(
        canal_timing::deadline(Duration::from_secs(20)),
        stream.message(),
    )
    .await
    .expect("an answer in time")
    .unwrap()
    .expect("no end")
}

/// Checks that the key belongs to the leaf, and that the bundle is the CA's root.
fn check(answer: &X509svidResponse, ca: &TestCa) {
    let [svid] = &answer.svids[..] else {
        panic!("{} SVIDs", answer.svids.len())
    };
    assert_eq!(svid.spiffe_id, IDENTITY);
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(svid.x509_svid_key.clone()));
    let chain = vec![CertificateDer::from(svid.x509_svid.clone())];
    rustls::sign::CertifiedKey::from_der(
        chain,
        key,
        &rustls::crypto::aws_lc_rs::default_provider(),
    )
    .expect("key and leaf belong together");
    use rustls::pki_types::pem::PemObject;
    assert_eq!(
        svid.bundle,
        CertificateDer::from_pem_slice(ca.root_pem().as_bytes())
            .unwrap()
            .to_vec()
    );
}

fn bundle(ca: &TestCa, trust_domain: &str, federated: bool) -> TrustBundle {
    match &*ca.bundle("alpha", trust_domain, federated, vec![]) {
        Resource::Bundle(b) => b.clone(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_application_is_handed_its_own_certificate_over_both_sockets() {
    let pod = ApiPod::new().await;
    let _api = pod.serve();
    let mut leaves = Vec::new();
    for endpoint in [ApiEndpoint::Tcp, ApiEndpoint::Abstract] {
        let mut stream = pod
            .client(endpoint)
            .await
            .fetch_x509svid(with_header(X509svidRequest {}))
            .await
            .unwrap()
            .into_inner();
        let answer = next(&mut stream).await;
        check(&answer, &pod.ca);
        assert!(answer.federated_bundles.is_empty());
        leaves.push(answer.svids[0].x509_svid.clone());
    }
    assert_eq!(
        (leaves[0] == leaves[1], pod.issued.load(Relaxed)),
        (true, 1),
        "one key for the pod"
    );
    assert_eq!(
        pod.metric("canal_workload_api_keys_total{result=\"certified\"}"),
        1.0
    );
    // The API is reachable only inside the pod.
    assert!(std::net::TcpStream::connect(("127.0.0.1", PORT)).is_err());
    let name = std::os::unix::net::SocketAddr::from_abstract_name(ABSTRACT_SOCKET).unwrap();
    assert!(std::os::unix::net::UnixStream::connect_addr(&name).is_err());
    let other = lab::LabNetns::bare();
    assert!(other.within(|| std::net::TcpStream::connect(("127.0.0.1", PORT)).is_err()));
}

// A second worker, because calls into the pod's namespace block one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewals_and_bundles_are_pushed() {
    let pod = ApiPod::new().await;
    // The gate has time to check the first certificate before it is renewed at half of its life.
    *pod.life.lock().unwrap() = Duration::from_secs(if canal_timing::is_timed() { 4 } else { 16 });
    let api = pod.serve();
    let mut client = pod.client(ApiEndpoint::Tcp).await;
    let mut svids = client
        .fetch_x509svid(with_header(X509svidRequest {}))
        .await
        .unwrap()
        .into_inner();
    let first = next(&mut svids).await;
    check(&first, &pod.ca);
    // The second certificate shall not be renewed during the test.
    *pod.life.lock().unwrap() = Duration::from_secs(3600);
    let second = next(&mut svids).await;
    check(&second, &pod.ca);
    assert_ne!(
        (&first.svids[0].x509_svid_key, &first.svids[0].x509_svid),
        (&second.svids[0].x509_svid_key, &second.svids[0].x509_svid)
    );

    let mut bundles = client
        .fetch_x509_bundles(with_header(X509BundlesRequest {}))
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        next(&mut bundles)
            .await
            .bundles
            .keys()
            .map(String::as_str)
            .collect::<Vec<_>>(),
        ["spiffe://alpha.example"]
    );
    let friends = TestCa::new("friends");
    let changes = [
        bundle(&pod.ca, "alpha.example", false),
        bundle(&friends, "friend.example", true),
    ];
    // The second call repeats the state, which must not be pushed again.
    api.notify(&changes);
    api.notify(&changes);
    let third = next(&mut svids).await;
    assert_eq!(
        third
            .federated_bundles
            .keys()
            .map(String::as_str)
            .collect::<Vec<_>>(),
        ["spiffe://friend.example"]
    );
    assert_eq!(third.svids, second.svids);
    assert_eq!(next(&mut bundles).await.bundles.len(), 2);
    // Nothing announces that no message comes, so the test can only wait a moment.
    let quiet = tokio::time::timeout(Duration::from_millis(300), svids.message()).await;
    assert!(
        quiet.is_err(),
        "nothing changed, nothing is said: {quiet:?}"
    );

    // The pod is gone: its streams end and its sockets close.
    drop(api);
    let end = tokio::time::timeout(
        canal_timing::deadline(Duration::from_secs(5)),
        svids.message(),
    )
    .await
    .expect("an end in time");
    assert!(!matches!(end, Ok(Some(_))), "{end:?}");
    until("the socket closes", || {
        pod.ns
            .within(|| std::net::TcpStream::connect(("127.0.0.1", PORT)).is_err())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_have_the_standards_codes() {
    let pod = ApiPod::new().await;
    let _api = pod.serve();
    let mut client = pod.client(ApiEndpoint::Abstract).await;
    let without = client.fetch_x509svid(X509svidRequest {}).await.unwrap_err();
    assert_eq!(without.code(), Code::InvalidArgument, "{without}");
    assert_eq!(
        client
            .fetch_x509_bundles(X509BundlesRequest {})
            .await
            .unwrap_err()
            .code(),
        Code::InvalidArgument
    );
    let mut lies = Request::new(X509svidRequest {});
    lies.metadata_mut()
        .insert("workload.spiffe.io", "yes".parse().unwrap());
    assert_eq!(
        client.fetch_x509svid(lies).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    let audience = vec!["x".to_string()];
    let jwt = client
        .fetch_jwtsvid(with_header(JwtsvidRequest {
            audience,
            ..Default::default()
        }))
        .await
        .unwrap_err();
    assert_eq!(
        (jwt.code(), jwt.message().contains("X.509-SVIDs only")),
        (Code::Unimplemented, true)
    );
    assert_eq!(
        client
            .fetch_jwt_bundles(with_header(JwtBundlesRequest {}))
            .await
            .unwrap_err()
            .code(),
        Code::Unimplemented
    );
    let long = ValidateJwtsvidRequest {
        audience: String::new(),
        // A request may have 4 KiB (`REQUEST_BYTES_MAX`).
        svid: "x".repeat(5 << 10),
    };
    assert_eq!(
        client
            .validate_jwtsvid(with_header(long))
            .await
            .unwrap_err()
            .code(),
        Code::OutOfRange,
        "beyond the limit of a request"
    );
    let short = ValidateJwtsvidRequest::default();
    assert_eq!(
        client
            .validate_jwtsvid(with_header(short))
            .await
            .unwrap_err()
            .code(),
        Code::Unimplemented
    );
    let count = |method: &str, result: &str| {
        pod.metric(&format!(
            "canal_workload_api_requests_total{{method=\"{method}\",result=\"{result}\"}}"
        ))
    };
    assert_eq!(
        (
            // One request without the header, and one with a wrong value of it.
            count("FetchX509SVID", "no_metadata"),
            count("FetchJWTSVID", "unimplemented")
        ),
        (2.0, 1.0)
    );
}

// A second worker, because calls into the pod's namespace block one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_and_connections_are_limited_by_name() {
    let pod = ApiPod::new().await;
    let _api = pod.serve();
    let mut open = Vec::new();
    let mut client = pod.client(ApiEndpoint::Tcp).await;
    // Half of the streams on each socket: the limit is the pod's, not a connection's.
    for _ in 0..STREAMS_MAX / 2 {
        open.push(
            client
                .fetch_x509svid(with_header(X509svidRequest {}))
                .await
                .unwrap(),
        );
    }
    let mut other = pod.client(ApiEndpoint::Abstract).await;
    for _ in STREAMS_MAX / 2..STREAMS_MAX {
        open.push(
            other
                .fetch_x509svid(with_header(X509svidRequest {}))
                .await
                .unwrap(),
        );
    }
    let beyond = other
        .fetch_x509svid(with_header(X509svidRequest {}))
        .await
        .unwrap_err();
    assert_eq!(beyond.code(), Code::ResourceExhausted);
    assert_eq!(
        pod.metric("canal_limit_refused_total{limit=\"pod_workload_api_streams\"}"),
        1.0
    );
    drop(open);

    let dial = || {
        pod.ns
            .within(|| std::net::TcpStream::connect(("127.0.0.1", PORT)).unwrap())
    };
    // The two clients above hold a connection each.
    let mut held: Vec<_> = (2..CONNECTIONS_MAX).map(|_| dial()).collect();
    until("all connections", || {
        pod.metric("canal_limit_used{limit=\"pod_workload_api_connections\"}")
            == CONNECTIONS_MAX as f64
    })
    .await;
    // One more than the limit.
    let mut beyond = dial();
    beyond
        .set_read_timeout(Some(canal_timing::deadline(Duration::from_secs(5))))
        .unwrap();
    let end = tokio::task::spawn_blocking(move || std::io::Read::read(&mut beyond, &mut [0; 64]))
        .await
        .unwrap();
    assert!(matches!(end, Ok(0) | Err(_)), "closed: {end:?}");
    assert_eq!(
        pod.metric("canal_limit_refused_total{limit=\"pod_workload_api_connections\"}"),
        1.0
    );
    held.clear();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_in_use_by_the_application_is_bound_when_free() {
    let pod = ApiPod::new().await;
    let holder = pod.ns.listen(&format!("127.0.0.1:{PORT}"));
    let _api = pod.serve();
    until("the port is in use", || {
        pod.metric("canal_workload_api_listen_failures_total") >= 1.0
    })
    .await;
    drop(holder);
    let mut stream = pod
        .client(ApiEndpoint::Tcp)
        .await
        .fetch_x509svid(with_header(X509svidRequest {}))
        .await
        .unwrap()
        .into_inner();
    check(&next(&mut stream).await, &pod.ca);
}
