//! A key server on loopback with certificate authorities of the test's own, requesters that speak the protocol, and rustls as their peers.

#![allow(dead_code, unreachable_pub, reason = "each test uses a part of it")]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use canal_keys::lanes::LaneConfig;
use canal_keys::limits::Shares;
use canal_keys::provision::{Issue, Issued, Issuing, NotIssued};
use canal_keys::{Engine, EngineConfig};
use canal_kit::drain::{self, Trigger};
use canal_kit::metrics::Registry;
use canal_kit::testing::{self, TestCa, identity};
use canal_kit::tls::{Judge, TrustView, client_config, provider, server_config};
use canal_model::identity::Identity;
use canal_model::ids::{ServiceKey, Vni};
use canal_model::principal::Principal;
use canal_model::program::{OutsideMesh, Resource, Tenant};
use canal_model::trust::{Entitlement, KeyAlgorithm, KeyPlace, KeyPolicy, Requester};
use canal_wire::keyrpc::{ALPN, Begin, Refusal, Request, Response, Role, split};
use rcgen::CertificateParams;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConnection, Connection, ServerConnection};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

pub const WEB: &str = "spiffe://alpha.example/ns/shop/sa/web";
pub const API: &str = "spiffe://alpha.example/ns/shop/sa/api";
pub const GATE: &str = "spiffe://alpha.example/ns/canal-system/sa/gateway";
pub const SLOW: &str = "spiffe://rsa.example/ns/shop/sa/slow";
pub const OTHER: &str = "spiffe://beta.example/ns/shop/sa/other";
/// Components.
pub const NODE: &str = "spiffe://components.canal/ns/alpha/sa/node.n1";
pub const RSA_NODE: &str = "spiffe://components.canal/ns/rsa/sa/node.n1";
pub const BETA_NODE: &str = "spiffe://components.canal/ns/beta/sa/node.n1";
pub const GATEWAY: &str = "spiffe://components.canal/ns/canal-system/sa/gateway.g1";
/// No step of a test takes longer.
pub const SOON: Duration = Duration::from_secs(30);

type Change = Box<dyn Fn(&mut CertificateParams) + Send + Sync>;

/// The authorities, and what they do for the key server.
pub struct Authorities {
    pub infra: TestCa,
    pub tenants: HashMap<String, TestCa>,
    pub asked: Mutex<Vec<String>>,
    /// Nothing is issued to tenants' identities.
    pub refuses: AtomicBool,
    pub delay_ms: AtomicU64,
    pub change: Mutex<Option<Change>>,
    pub at_once: (AtomicUsize, AtomicUsize),
}

impl Issue for Authorities {
    fn issue<'a>(&'a self, identity: &'a Identity, service: Option<&'a ServiceKey>, csr: String) -> Issuing<'a> {
        Box::pin(async move {
            let name = service.map_or(identity.to_string(), |s| format!("{identity} for {s}"));
            self.asked.lock().unwrap().push(name);
            let domain = identity.trust_domain.as_str();
            let Some(ca) = self.tenants.get(domain) else {
                return Ok(Issued { chain: vec![self.infra.sign_request(&csr, |_| {})], bundle: self.infra.root_pem() });
            };
            self.at_once.1.fetch_max(self.at_once.0.fetch_add(1, Relaxed) + 1, Relaxed);
            tokio::time::sleep(Duration::from_millis(self.delay_ms.load(Relaxed))).await;
            self.at_once.0.fetch_sub(1, Relaxed);
            if self.refuses.load(Relaxed) {
                return Err(NotIssued { reason: "refused", text: "the test issues nothing".into() });
            }
            let change = |p: &mut CertificateParams| {
                if let Some(change) = &*self.change.lock().unwrap() {
                    change(p);
                }
            };
            Ok(Issued { chain: vec![ca.sign_request(&csr, change)], bundle: ca.root_pem() })
        })
    }
}

/// A key server and all around it.
pub struct Rig {
    pub engine: Engine,
    pub registry: Registry,
    pub address: SocketAddr,
    pub authorities: Arc<Authorities>,
    pub trigger: Trigger,
    _whole: drain::Drain,
}

/// How the key server is.
pub struct Setting {
    pub workers: usize,
    pub shares: Shares,
    pub tls_dir: Option<PathBuf>,
}

impl Default for Setting {
    fn default() -> Self {
        Self { workers: 1, shares: Shares::default(), tls_dir: None }
    }
}

pub fn tenant(name: &str, algorithm: KeyAlgorithm) -> Arc<Resource> {
    Arc::new(Resource::Tenant(Tenant {
        name: name.parse().unwrap(),
        vni: Vni::new(7).unwrap(),
        trust_domain: format!("{name}.example").parse().unwrap(),
        pod_cidrs: vec![],
        gateway_cidrs: vec![],
        outside: OutsideMesh::Deny,
        resolvers: Vec::new(),
        keys: KeyPolicy { place: KeyPlace::KeyServer, algorithm, local_fallback: false },
        shares: Default::default(),
    }))
}

pub fn entitlement(tenant: &str, requester: &str, identities: &[&str]) -> Arc<Resource> {
    let (kind, name) = requester.split_once('/').unwrap();
    let requester = match kind {
        "node" => Requester::Node(name.parse().unwrap()),
        _ => Requester::Gateway(name.parse().unwrap()),
    };
    let mut identities: Vec<_> = identities.iter().map(|i| identity(i)).collect();
    identities.sort();
    Arc::new(Resource::Entitlement(Entitlement { tenant: tenant.parse().unwrap(), requester, identities }))
}

impl Rig {
    pub async fn start(setting: Setting) -> Self {
        let names = ["alpha", "beta", "rsa"];
        let authorities = Arc::new(Authorities {
            infra: TestCa::new("infra"),
            tenants: names.iter().map(|n| (format!("{n}.example"), TestCa::new(n))).collect(),
            asked: Mutex::default(),
            refuses: AtomicBool::new(false),
            delay_ms: AtomicU64::new(0),
            change: Mutex::new(None),
            at_once: Default::default(),
        });
        let registry = Registry::new();
        let (trigger, whole) = drain::tree();
        let config = EngineConfig {
            principal: Principal::KeyServer {
                name: "ks-1".parse().unwrap(),
                az: "az1".parse().unwrap(),
                tenant: setting.tls_dir.as_ref().map(|_| "alpha".parse().unwrap()),
            },
            lanes: LaneConfig { workers: setting.workers, linger: Duration::from_millis(10) },
            shares: setting.shares,
            tls_dir: setting.tls_dir,
        };
        let engine = Engine::start(config, authorities.clone(), &registry, whole.watcher()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (serving, drain) = (engine.clone(), whole.clone());
        tokio::spawn(async move { serving.serve(listener, drain).await });
        let rig = Self { engine, registry, address, authorities, trigger, _whole: whole };
        until("its own certificate", || rig.engine.ready().is_ok()).await;
        rig
    }

    pub fn ca(&self, tenant: &str) -> &TestCa {
        &self.authorities.tenants[&format!("{tenant}.example")]
    }

    /// Tenants alpha and beta with ECDSA keys, rsa with RSA keys; a node of each, and a gateway of alpha's.
    pub fn usual(&self) -> Vec<Arc<Resource>> {
        let bundle = |t: &str| self.ca(t).bundle(t, &format!("{t}.example"), false, vec![]);
        vec![
            tenant("alpha", KeyAlgorithm::EcdsaP256),
            tenant("beta", KeyAlgorithm::EcdsaP256),
            tenant("rsa", KeyAlgorithm::Rsa2048),
            bundle("alpha"),
            bundle("beta"),
            bundle("rsa"),
            entitlement("alpha", "node/n1", &[WEB, API]),
            entitlement("alpha", "gateway/g1", &[GATE]),
            entitlement("beta", "node/n1", &[OTHER]),
            entitlement("rsa", "node/n1", &[SLOW]),
        ]
    }

    pub fn tell(&self, all: &[Arc<Resource>]) {
        self.engine.replace(all).unwrap();
    }

    /// All keys are there.
    pub async fn provisioned(&self) {
        until("all keys", || self.value("canal_key_certificates_missing") == 0.0).await;
    }

    pub async fn channel(&self, component: &str) -> Channel {
        Channel::connect(self.address, &self.authorities.infra, component).await.unwrap()
    }

    /// [`Rig::channel`] from another address.
    pub async fn channel_from(&self, from: &str, component: &str) -> Channel {
        let stream = connect_from(from, self.address).await.unwrap();
        Channel::over(greet(stream, &self.authorities.infra, component).await.unwrap())
    }

    /// The first line that begins so.
    pub fn value(&self, line: &str) -> f64 {
        let text = self.registry.render();
        let found = text.lines().find(|l| l.starts_with(line)).and_then(|l| l.rsplit_once(' '));
        found.map_or(0.0, |(_, value)| value.parse().unwrap())
    }
}

/// Waits for it.
pub async fn until(what: &str, is: impl Fn() -> bool) {
    let end = tokio::time::Instant::now() + SOON;
    while !is() {
        assert!(tokio::time::Instant::now() < end, "{what}: not in {SOON:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What a key server said.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    Send(Vec<u8>),
    Done {
        bytes: Vec<u8>,
        consumed: u32,
        suite: u16,
        alpn: Vec<u8>,
        secrets: (Vec<u8>, Vec<u8>),
        peer: String,
    },
    Signature(Vec<u8>),
    Certificates(Vec<Vec<u8>>),
    Refused(Refusal, String),
    Pong,
    /// The channel is closed.
    End,
}

fn owned(response: &Response<'_>) -> Said {
    match response {
        Response::Send { bytes } => Said::Send(bytes.to_vec()),
        Response::Done(d) => Said::Done {
            bytes: d.bytes.to_vec(),
            consumed: d.consumed,
            suite: d.suite,
            alpn: d.alpn.to_vec(),
            secrets: (d.client_traffic.to_vec(), d.server_traffic.to_vec()),
            peer: d.peer.to_string(),
        },
        Response::Signature { bytes } => Said::Signature(bytes.to_vec()),
        Response::Certificates { chain } => Said::Certificates(chain.iter().map(|c| c.to_vec()).collect()),
        Response::Refused { name, text } => Said::Refused(*name, (*text).to_string()),
        Response::Pong => Said::Pong,
    }
}

/// `None`: the channel is closed.
type Calls = Arc<Mutex<Option<HashMap<u64, mpsc::UnboundedSender<Said>>>>>;

/// A requester's end.
#[derive(Clone)]
pub struct Channel {
    out: mpsc::UnboundedSender<Vec<u8>>,
    calls: Calls,
    last: Arc<AtomicU64>,
}

/// One request.
pub struct Call {
    pub id: u64,
    said: mpsc::UnboundedReceiver<Said>,
}

impl Call {
    pub async fn next(&mut self) -> Said {
        let said = tokio::time::timeout(SOON, self.said.recv()).await.expect("an answer in time");
        said.unwrap_or(Said::End)
    }

    /// What was said already.
    pub fn ready(&mut self) -> Option<Said> {
        self.said.try_recv().ok()
    }

    /// The name of a refusal, behind whatever is said before.
    pub async fn refusal(&mut self) -> Refusal {
        loop {
            match self.next().await {
                Said::Send(_) => {}
                Said::Refused(name, text) => {
                    assert!(!text.is_empty(), "{name} says why");
                    return name;
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// TLS of a component towards the key server, which is believed to be one.
pub async fn dial(address: SocketAddr, ca: &TestCa, component: &str) -> std::io::Result<TlsStream<TcpStream>> {
    greet(TcpStream::connect(address).await?, ca, component).await
}

/// From a loopback address of one's choice.
pub async fn connect_from(from: &str, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = tokio::net::TcpSocket::new_v4()?;
    socket.bind(SocketAddr::new(from.parse().unwrap(), 0))?;
    socket.connect(to).await
}

async fn greet(stream: TcpStream, ca: &TestCa, component: &str) -> std::io::Result<TlsStream<TcpStream>> {
    stream.set_nodelay(true)?;
    let (key, judge) = proof(ca, component, ca, "components.canal");
    let expected = [
        identity("spiffe://components.canal/ns/canal-system/sa/keyserver.ks-1"),
        identity("spiffe://components.canal/ns/alpha/sa/keyserver.ks-1"),
    ];
    let config = client_config(key, judge, expected.into(), &[ALPN.to_vec()]).unwrap();
    TlsConnector::from(Arc::new(config)).connect(ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into()), stream).await
}

pub fn ders(pem: &str) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<_, _>>().unwrap()
}

fn resolver(issued: &testing::Issued) -> Arc<SingleCertAndKey> {
    let key = PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).unwrap();
    Arc::new(CertifiedKey::from_der(ders(&issued.chain), key, &provider()).unwrap().into())
}

fn proof(ca: &TestCa, id: &str, trusted: &TestCa, domain: &str) -> (Arc<SingleCertAndKey>, Judge) {
    let judge = Judge::new(domain.parse().unwrap(), &ders(&trusted.root_pem()), TrustView::untold()).unwrap();
    (resolver(&ca.issue_with(&identity(id), |_| {})), judge)
}

impl Channel {
    pub async fn connect(address: SocketAddr, ca: &TestCa, component: &str) -> std::io::Result<Self> {
        Ok(Self::over(dial(address, ca, component).await?))
    }

    fn over(stream: TlsStream<TcpStream>) -> Self {
        let (mut read, mut write) = tokio::io::split(stream);
        let (out, mut written) = mpsc::unbounded_channel::<Vec<u8>>();
        let calls: Calls = Arc::new(Mutex::new(Some(HashMap::new())));
        tokio::spawn(async move {
            while let Some(mut bytes) = written.recv().await {
                while let Ok(more) = written.try_recv() {
                    bytes.extend(more);
                }
                if write.write_all(&bytes).await.is_err() || write.flush().await.is_err() {
                    return;
                }
            }
            let _ = write.shutdown().await;
        });
        let waiting = calls.clone();
        tokio::spawn(async move {
            let mut buffer = Vec::new();
            while read.read_buf(&mut buffer).await.is_ok_and(|n| n > 0) {
                let mut at = 0;
                while let Some((frame, length)) = split(&buffer[at..]).unwrap() {
                    let said = owned(&frame.response().unwrap());
                    if let Some(call) = waiting.lock().unwrap().as_ref().and_then(|c| c.get(&frame.id)) {
                        let _ = call.send(said);
                    }
                    at += length;
                }
                buffer.drain(..at);
            }
            *waiting.lock().unwrap() = None;
        });
        Self { out, calls, last: Arc::default() }
    }

    pub fn raw(&self, bytes: Vec<u8>) {
        let _ = self.out.send(bytes);
    }

    pub fn say(&self, id: u64, request: &Request<'_>) {
        let mut bytes = Vec::new();
        request.encode(id, &mut bytes).unwrap();
        self.raw(bytes);
    }

    /// Waits for what is said to `id`.
    pub fn listen(&self, id: u64) -> Call {
        let (tell, said) = mpsc::unbounded_channel();
        if let Some(calls) = &mut *self.calls.lock().unwrap() {
            calls.insert(id, tell);
        }
        Call { id, said }
    }

    pub fn ask(&self, request: &Request<'_>) -> Call {
        let call = self.listen(self.last.fetch_add(1, Relaxed));
        self.say(call.id, request);
        call
    }

    pub fn begin(&self, id: &str, role: Role, expected: &[&str], deadline_ms: u32) -> Call {
        let expected = expected.iter().map(|e| identity(e)).collect();
        self.ask(&Request::Begin(Begin { identity: identity(id), role, alpn: vec![b"h2"], expected, deadline_ms, bytes: b"" }))
    }

    pub fn forget(&self, call: &Call) {
        if let Some(calls) = &mut *self.calls.lock().unwrap() {
            calls.remove(&call.id);
        }
    }

    /// Whether it answers.
    pub async fn lives(&self) -> bool {
        self.ask(&Request::Ping).next().await == Said::Pong
    }

    /// Relays a whole handshake; the last thing said.
    pub async fn shake(&self, id: &str, peer: &mut Connection) -> Said {
        let (role, expected) = match peer {
            Connection::Client(_) => (Role::Server, None),
            Connection::Server(_) => (Role::Client, Some(PEER)),
        };
        let mut call = self.begin(id, role, expected.as_slice(), 0);
        let mut said = if role == Role::Server { Said::Send(Vec::new()) } else { call.next().await };
        loop {
            match said {
                Said::Send(bytes) => hear(peer, &bytes),
                end => {
                    if let Said::Done { bytes, .. } = &end {
                        hear(peer, bytes);
                    }
                    self.forget(&call);
                    return end;
                }
            }
            let bytes = flight(peer);
            if !bytes.is_empty() {
                self.say(call.id, &Request::More { bytes: &bytes });
            }
            said = call.next().await;
        }
    }
}

pub const PEER: &str = "spiffe://alpha.example/ns/shop/sa/peer";

pub fn flight(peer: &mut Connection) -> Vec<u8> {
    let mut out = Vec::new();
    while peer.wants_write() {
        peer.write_tls(&mut out).unwrap();
    }
    out
}

pub fn hear(peer: &mut Connection, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        peer.read_tls(&mut bytes).unwrap();
        // What the peer thinks of it is seen in what it says.
        let _ = peer.process_new_packets();
    }
}

/// A peer with what `ca` issues for `id`, which expects one of `domain` as its own authority issues it.
pub struct Peers {
    key: Arc<SingleCertAndKey>,
    client: Arc<rustls::ClientConfig>,
    server: Arc<rustls::ServerConfig>,
}

impl Peers {
    pub fn new(ca: &TestCa, issued: &testing::Issued, domain: &str, expected: &[&str]) -> Self {
        let key = resolver(issued);
        let judge = Judge::new(domain.parse().unwrap(), &ders(&ca.root_pem()), TrustView::untold()).unwrap();
        let alpn = [b"h2".to_vec()];
        let expected: Arc<[Identity]> = expected.iter().map(|e| identity(e)).collect();
        let client = Arc::new(client_config(key.clone(), judge.clone(), expected, &alpn).unwrap());
        let server = Arc::new(server_config(key.clone(), judge, &alpn).unwrap());
        Self { key, client, server }
    }

    pub fn client(&self) -> Connection {
        ClientConnection::new(self.client.clone(), ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into())).unwrap().into()
    }

    pub fn server(&self) -> Connection {
        ServerConnection::new(self.server.clone()).unwrap().into()
    }
}

/// What TLS 1.3 signs.
pub fn verify_input() -> Vec<u8> {
    [&[0x20; 64][..], b"TLS 1.3, server CertificateVerify\0", &[7; 48]].concat()
}
