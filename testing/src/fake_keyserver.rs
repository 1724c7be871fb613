//! A fake key server that a test scripts: it has the certificates that it is given, performs
//! handshakes and signs, stays silent or refuses. It runs rustls in place of the real key server.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use canal_model::identity::Identity;
use canal_tls::{Certificate, PeerVerifier, TrustView, spki_hash};
use canal_wire::keyrpc::{
    self, HandshakeResult, HandshakeRole, KeyName, KeyRefusal, KeyRequest, KeyResponse, SpkiHash,
};
use rustls::{Connection, KeyLog};
use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{TestCa, identity};

/// Behavior of the fake towards requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FakeBehavior {
    Well,
    /// The fake reads requests but answers only PINGs.
    Slow,
    /// The fake answers nothing at all.
    Mute,
    Refusing(KeyRefusal),
}

#[derive(Debug)]
struct Inner {
    certificates: Mutex<HashMap<String, Arc<Certificate>>>,
    behavior: Mutex<FakeBehavior>,
    requests: AtomicUsize,
    abandoned: AtomicUsize,
}

/// The fake key server. Dropping it stops its server.
#[derive(Debug)]
pub struct FakeKeyServer {
    pub address: SocketAddr,
    inner: Arc<Inner>,
    task: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct FakeSecrets(Mutex<HashMap<String, Vec<u8>>>);

impl KeyLog for FakeSecrets {
    fn log(&self, label: &str, _: &[u8], secret: &[u8]) {
        self.0
            .lock()
            .expect("no panic")
            .insert(label.into(), secret.to_vec());
    }
}

struct FakeHandshake {
    connection: Connection,
    secrets: Arc<FakeSecrets>,
    input: Vec<u8>,
    received: usize,
    verifier: PeerVerifier,
    expected: Option<Arc<[Identity]>>,
}

impl FakeKeyServer {
    /// Starts the fake on a free loopback port, as the provider's key server `name`, with a
    /// certificate of the component CA `components`.
    pub async fn start(components: &TestCa, name: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let own = components.issue(&identity(&format!(
            "spiffe://components.canal/ns/canal-system/sa/keyserver.{name}"
        )));
        let inner = Arc::new(Inner {
            certificates: Mutex::default(),
            behavior: Mutex::new(FakeBehavior::Well),
            requests: AtomicUsize::new(0),
            abandoned: AtomicUsize::new(0),
        });
        let verifier = PeerVerifier::new(
            own.identity().trust_domain.clone(),
            own.bundle(),
            TrustView::without_bundles(),
        )
        .expect("a right bundle");
        let config =
            canal_tls::server_config(own.signing().clone(), verifier, &[keyrpc::ALPN.to_vec()])
                .expect("a right configuration");
        let (acceptor, address, all) = (
            TlsAcceptor::from(Arc::new(config)),
            listener.local_addr().expect("bound"),
            inner.clone(),
        );
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((tcp, _)) = listener.accept().await {
                let (acceptor, inner) = (acceptor.clone(), all.clone());
                connections.spawn(async move { inner.serve(acceptor, tcp).await });
            }
        });
        Self {
            address,
            inner,
            task,
        }
    }

    /// Adds a key and certificate under a name: an identity, or another text form of a [`KeyName`].
    pub fn hold(&self, name: &str, certificate: Certificate) {
        self.inner
            .certificates
            .lock()
            .expect("no panic")
            .insert(name.into(), Arc::new(certificate));
    }

    pub fn set_behavior(&self, behavior: FakeBehavior) {
        *self.inner.behavior.lock().expect("no panic") = behavior;
    }

    /// Returns the number of handshakes, signatures and chains requested so far.
    pub fn request_count(&self) -> usize {
        self.inner.requests.load(Relaxed)
    }

    /// Returns the number of abandoned requests.
    pub fn abandoned(&self) -> usize {
        self.inner.abandoned.load(Relaxed)
    }
}

impl Drop for FakeKeyServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Inner {
    async fn serve(&self, acceptor: TlsAcceptor, tcp: TcpStream) -> io::Result<()> {
        let mut stream = acceptor.accept(tcp).await?;
        let (mut buffer, mut handshakes) = (Vec::new(), HashMap::new());
        loop {
            if stream.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
            let (mut out, mut at) = (Vec::new(), 0);
            while let Some((frame, length)) =
                keyrpc::split(&buffer[at..]).expect("the client speaks the protocol")
            {
                at += length;
                self.answer(
                    &mut handshakes,
                    frame.id,
                    frame.request().expect("the client speaks the protocol"),
                    &mut out,
                );
            }
            buffer.drain(..at);
            stream.write_all(&out).await?;
            stream.flush().await?;
            // Requests that arrive during the pause form a batch.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    fn answer(
        &self,
        handshakes: &mut HashMap<u64, FakeHandshake>,
        id: u64,
        request: KeyRequest<'_>,
        out: &mut Vec<u8>,
    ) {
        let behavior = *self.behavior.lock().expect("no panic");
        let is_operation = matches!(
            request,
            KeyRequest::Begin(_) | KeyRequest::Sign { .. } | KeyRequest::Chain { .. }
        );
        self.requests.fetch_add(is_operation.into(), Relaxed);
        match (behavior, is_operation) {
            // A mute server does not even answer PINGs.
            (FakeBehavior::Mute, _) => return,
            // A slow server still answers PINGs, so that clients see that it lives.
            // `Abandon` has no answer that could be late.
            (FakeBehavior::Slow, _)
                if !matches!(request, KeyRequest::Ping | KeyRequest::Abandon) =>
            {
                return;
            }
            (FakeBehavior::Refusing(name), true) => {
                return refuse(name, "the test configured it", id, out);
            }
            // Everything else is answered as the real server does it.
            _ => {}
        }
        match request {
            KeyRequest::Ping => encode_response(&KeyResponse::Pong, id, out),
            KeyRequest::Abandon => {
                handshakes.remove(&id);
                self.abandoned.fetch_add(1, Relaxed);
            }
            KeyRequest::Begin(b) => {
                let Some(certificate) = self.find(&KeyName::Identity(b.identity.clone())) else {
                    return unknown(id, out);
                };
                let expected: Arc<[Identity]> = b.expected.clone().into();
                handshakes.insert(
                    id,
                    FakeHandshake::new(&certificate, b.role, &b.alpn, expected),
                );
                step(handshakes, id, b.bytes, out);
            }
            KeyRequest::More { bytes } => step(handshakes, id, bytes, out),
            KeyRequest::Chain { key } => match self.find(&key) {
                Some(certificate) => encode_response(
                    &KeyResponse::Certificates {
                        chain: certificate.chain().iter().map(|c| &**c).collect(),
                    },
                    id,
                    out,
                ),
                None => unknown(id, out),
            },
            KeyRequest::Sign {
                key,
                presented: claimed,
                scheme,
                input,
                ..
            } => {
                let Some(certificate) = self.find(&key) else {
                    return unknown(id, out);
                };
                // Like the real server, the fake signs only with the key of the presented
                // certificate.
                if claimed.is_some_and(|claimed| claimed != spki_of(&certificate.chain()[0])) {
                    return refuse(KeyRefusal::OtherKey, "the test gave it another", id, out);
                }
                match certificate.certified().key.choose_scheme(&[scheme.into()]) {
                    Some(signer) => encode_response(
                        &KeyResponse::Signature {
                            bytes: &signer.sign(input).expect("it signs"),
                        },
                        id,
                        out,
                    ),
                    None => refuse(KeyRefusal::Scheme, "", id, out),
                }
            }
        }
    }

    fn find(&self, key: &KeyName) -> Option<Arc<Certificate>> {
        self.certificates
            .lock()
            .expect("no panic")
            .get(&key.to_string())
            .cloned()
    }
}

fn spki_of(leaf: &[u8]) -> SpkiHash {
    spki_hash(
        X509Certificate::from_der(leaf)
            .expect("a certificate")
            .1
            .public_key()
            .raw,
    )
}

fn unknown(id: u64, out: &mut Vec<u8>) {
    refuse(
        KeyRefusal::NotEntitled,
        "the test gave it no key of this name",
        id,
        out,
    );
}

fn refuse(name: KeyRefusal, text: &str, id: u64, out: &mut Vec<u8>) {
    encode_response(&KeyResponse::Refused { name, text }, id, out);
}

fn encode_response(response: &KeyResponse<'_>, id: u64, out: &mut Vec<u8>) {
    response.encode(id, out).expect("short enough");
}

impl FakeHandshake {
    fn new(
        certificate: &Certificate,
        role: HandshakeRole,
        alpn: &[&[u8]],
        expected: Arc<[Identity]>,
    ) -> Self {
        let verifier = PeerVerifier::new(
            certificate.identity().trust_domain.clone(),
            certificate.bundle(),
            TrustView::without_bundles(),
        )
        .expect("a right bundle");
        let alpn: Vec<_> = alpn.iter().map(|p| p.to_vec()).collect();
        let secrets = Arc::new(FakeSecrets::default());
        let (connection, expected): (Connection, _) = match role {
            HandshakeRole::Server => {
                let mut config = canal_tls::server_config(
                    certificate.signing().clone(),
                    verifier.clone(),
                    &alpn,
                )
                .expect("a right configuration");
                // TLS libraries give traffic secrets only to a key log.
                config.key_log = secrets.clone();
                (
                    rustls::ServerConnection::new(Arc::new(config))
                        .expect("a connection")
                        .into(),
                    None,
                )
            }
            HandshakeRole::Client => {
                let config = canal_tls::client_config(
                    certificate.signing().clone(),
                    verifier.clone(),
                    expected.clone(),
                    &alpn,
                );
                let mut config = config.expect("a right configuration");
                config.key_log = secrets.clone();
                // The peer is verified by its identity, so that the name does not matter.
                let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
                (
                    rustls::ClientConnection::new(Arc::new(config), name)
                        .expect("a connection")
                        .into(),
                    Some(expected),
                )
            }
        };
        Self {
            connection,
            secrets,
            input: Vec::new(),
            received: 0,
            verifier,
            expected,
        }
    }

    /// Consumes complete records while the handshake lasts.
    fn take(&mut self, bytes: &[u8]) -> Result<(), rustls::Error> {
        self.input.extend_from_slice(bytes);
        self.received += bytes.len();
        while self.connection.is_handshaking() && self.input.len() >= 5 {
            let record_length = 5 + usize::from(u16::from_be_bytes([self.input[3], self.input[4]]));
            if self.input.len() < record_length {
                break;
            }
            let record: Vec<_> = self.input.drain(..record_length).collect();
            let mut rest = &record[..];
            while !rest.is_empty() {
                self.connection.read_tls(&mut rest).expect("memory");
                self.connection.process_new_packets()?;
            }
        }
        Ok(())
    }
}

fn step(handshakes: &mut HashMap<u64, FakeHandshake>, id: u64, bytes: &[u8], out: &mut Vec<u8>) {
    let Some(h) = handshakes.get_mut(&id) else {
        // The handshake ended before these bytes came.
        return;
    };
    let taken = h.take(bytes);
    let mut send = Vec::new();
    while h.connection.wants_write() {
        h.connection.write_tls(&mut send).expect("memory");
    }
    if let Err(e) = taken {
        // The alert first: a refusal ends the handshake, and the peer would never learn the reason.
        encode_response(&KeyResponse::Send { bytes: &send }, id, out);
        encode_response(
            &KeyResponse::Refused {
                name: KeyRefusal::PeerCertificate,
                text: &e.to_string(),
            },
            id,
            out,
        );
        handshakes.remove(&id);
        return;
    }
    if h.connection.is_handshaking() {
        if !send.is_empty() {
            encode_response(&KeyResponse::Send { bytes: &send }, id, out);
        }
        return;
    }
    let role = if h.expected.is_some() {
        canal_tls::PeerRole::Server
    } else {
        canal_tls::PeerRole::Client
    };
    let chain = h.connection.peer_certificates();
    let (peer, leaf) = h
        .verifier
        .peer(role, h.expected.as_ref(), chain)
        .expect("verified before");
    let secrets = h.secrets.0.lock().expect("no panic");
    let suite = h
        .connection
        .negotiated_cipher_suite()
        .expect("agreed")
        .suite()
        .into();
    let of = |label| canal_tls::traffic(suite, &secrets[label]).expect("of the suite");
    let done = HandshakeResult {
        bytes: &send,
        // Bytes after the handshake are the application's, so the client must know how many were
        // used.
        consumed: u32::try_from(h.received - h.input.len()).expect("small"),
        suite,
        alpn: h.connection.alpn_protocol().unwrap_or_default(),
        client_traffic: &of("CLIENT_TRAFFIC_SECRET_0"),
        server_traffic: &of("SERVER_TRAFFIC_SECRET_0"),
        peer,
        leaf: &chain.expect("mutual")[0],
        above: leaf.above(),
    };
    encode_response(&KeyResponse::Done(done), id, out);
    // The guard borrows from the handshake, which is removed next.
    drop(secrets);
    handshakes.remove(&id);
}
