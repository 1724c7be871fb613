//! Keys that sign elsewhere: rustls runs here, and its signatures are a key server's. rustls' signer is synchronous, so the step that signs
//! runs on one of a few threads of its own, never on a worker; when all are taken and as many wait, the next is refused at once.

use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use canal_model::trust::KeyServer;
use canal_wire::keyrpc::{KeyName, SpkiHash};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::{CertifiedKey, Signer, SigningKey};
use rustls::{ServerConfig, SignatureAlgorithm, SignatureScheme};
use rustls_pki_types::CertificateDer;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_rustls::Accept;
use tokio_rustls::server::{StartHandshake, TlsStream};
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::public_key::PublicKey;

use super::KeyError;
use super::requester::{Requester, Servers};
use crate::tls::TlsError;

/// Handshakes that may be signing at once in a process.
pub const THREADS: usize = 4;
/// Handshakes that may wait for a thread.
pub const WAITING_MAX: usize = 64;
/// Certificates of a key that signs elsewhere are asked for anew after; until then they are shown, so a key server keeps a key as long when it
/// has made or read the next.
pub const CHAIN_LIFE: Duration = Duration::from_secs(60);
/// A client that was asked for another key share (HelloRetryRequest) may keep a thread so long.
const RETRY_PATIENCE: Duration = Duration::from_secs(1);

type Job = Box<dyn FnOnce() + Send>;

/// The threads. They end with the last clone.
#[derive(Clone)]
pub(super) struct Threads {
    jobs: SyncSender<Job>,
}

impl Threads {
    pub(super) fn start(threads: usize, waiting: usize) -> Self {
        let (jobs, queue) = sync_channel::<Job>(waiting);
        let queue = Arc::new(Mutex::new(queue));
        for n in 0..threads {
            let queue = queue.clone();
            let named = std::thread::Builder::new().name(format!("canal-handshake-{n}"));
            if let Err(error) = named.spawn(move || work(&queue)) {
                tracing::error!(%error, "a handshake thread could not be started");
            }
        }
        Self { jobs }
    }

    fn run(&self, job: Job) -> Result<(), KeyError> {
        self.jobs.try_send(job).map_err(|e| match e {
            TrySendError::Full(_) | TrySendError::Disconnected(_) => KeyError::Busy,
        })
    }
}

fn work(queue: &Mutex<Receiver<Job>>) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = job else { return };
        // One handshake's panic is not the thread's end; its connection is dropped with it.
        let _ = catch_unwind(AssertUnwindSafe(job));
    }
}

/// What a thread is signing for.
struct Now {
    asked: bool,
    failed: Option<KeyError>,
}

thread_local! {
    static NOW: RefCell<Option<Now>> = const { RefCell::new(None) };
}

/// A key that is elsewhere, with its certificates as they are now.
#[derive(Clone)]
pub struct Signed {
    inner: Arc<Inner>,
}

struct Inner {
    requester: Requester,
    servers: Servers,
    key: KeyName,
    shown: ArcSwapOption<Shown>,
}

/// What peers are shown.
struct Shown {
    since: Instant,
    spki: SpkiHash,
    certified: Arc<CertifiedKey>,
}

/// SHA-256 of a SubjectPublicKeyInfo, DER.
pub fn spki_hash(spki: &[u8]) -> SpkiHash {
    Sha256::digest(spki).into()
}

impl Inner {
    /// Nobody signs with this key now, so the next handshake shows what there is then.
    fn forget(&self, spki: &SpkiHash) {
        let held = self.shown.load();
        if held.as_ref().is_some_and(|shown| shown.spki == *spki) {
            self.shown.compare_and_swap(&held, None);
        }
    }
}

impl fmt::Debug for Signed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Signed({})", self.inner.key)
    }
}

impl Signed {
    /// A key of the tenant's own key server, which may refuse at any time.
    pub fn by_tenant(requester: &Requester, server: &KeyServer, key: KeyName) -> Self {
        Self::new(requester, requester.of_tenant(server), key)
    }

    /// A key of the provider's key servers.
    pub fn by_provider(requester: &Requester, key: KeyName) -> Self {
        Self::new(requester, requester.provider(), key)
    }

    fn new(requester: &Requester, servers: Servers, key: KeyName) -> Self {
        Self { inner: Arc::new(Inner { requester: requester.clone(), servers, key, shown: ArcSwapOption::empty() }) }
    }

    /// The certificates with the key that signs elsewhere. Where they cannot be had anew, the last ones serve on: the key server's word counts
    /// at each signature.
    pub async fn certified(&self) -> Result<Arc<CertifiedKey>, KeyError> {
        let held = self.inner.shown.load_full();
        if let Some(shown) = held.as_deref().filter(|shown| shown.since.elapsed() < CHAIN_LIFE) {
            return Ok(shown.certified.clone());
        }
        match self.inner.requester.chain(&self.inner.servers, self.inner.key.clone()).await {
            Ok((chain, servers)) => {
                let shown = self.to_show(chain, servers)?;
                let certified = shown.certified.clone();
                self.inner.shown.store(Some(Arc::new(shown)));
                Ok(certified)
            }
            Err(e) => held.map(|shown| shown.certified.clone()).ok_or(e),
        }
    }

    fn to_show(&self, chain: Vec<Vec<u8>>, servers: Servers) -> Result<Shown, KeyError> {
        let wrong = |what| KeyError::Answer { server: self.inner.key.to_string(), what };
        let chain: Vec<_> = chain.into_iter().map(CertificateDer::from).collect();
        let leaf = chain.first().ok_or_else(|| wrong("no certificates"))?;
        let (_, x) = X509Certificate::from_der(leaf).map_err(|_| wrong("a certificate that cannot be read"))?;
        let (algorithm, schemes) = match x.public_key().parsed() {
            Ok(PublicKey::RSA(_)) => (SignatureAlgorithm::RSA, RSA),
            Ok(PublicKey::EC(point)) if point.key_size() <= 256 => (SignatureAlgorithm::ECDSA, P256),
            Ok(PublicKey::EC(_)) => (SignatureAlgorithm::ECDSA, P384),
            _ => return Err(wrong("a certificate of an unknown kind of key")),
        };
        let spki = spki_hash(x.public_key().raw);
        let key = Elsewhere { signed: Arc::downgrade(&self.inner), servers, spki, algorithm, schemes };
        Ok(Shown { since: Instant::now(), spki, certified: Arc::new(CertifiedKey::new(chain, Arc::new(key))) })
    }

    /// Goes on with a handshake whose ClientHello was read, with a configuration that shows [`Signed::certified`]. Only the step that signs
    /// leaves the calling thread.
    pub async fn shake<IO>(&self, start: StartHandshake<IO>, config: Arc<ServerConfig>) -> Result<TlsStream<IO>, TlsError>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (tell, told) = oneshot::channel();
        let runtime = tokio::runtime::Handle::current();
        let job = move || {
            let _in = runtime.enter();
            NOW.set(Some(Now { asked: false, failed: None }));
            let mut step = Step::Going(start.into_stream_with(config, |_| {}));
            if NOW.with_borrow(|now| now.as_ref().is_some_and(|n| !n.asked)) {
                // The client must send another key share first; what follows signs as well.
                if let Step::Going(accept) = step {
                    let limited = async { tokio::time::timeout(RETRY_PATIENCE, accept).await };
                    step = Step::Over(runtime.block_on(limited).unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())));
                }
            }
            let failed = NOW.take().and_then(|n| n.failed);
            // Nobody waits any more: the connection ends here.
            let _ = tell.send((step, failed));
        };
        if let Err(busy) = self.inner.requester.threads().run(Box::new(job)) {
            self.inner.requester.counts().busy();
            return Err(TlsError::KeyServer(busy));
        }
        let (step, failed) = told.await.map_err(|_| TlsError::KeyServer(KeyError::Busy))?;
        let ended = match step {
            Step::Going(accept) => accept.await,
            Step::Over(ended) => ended,
        };
        match (ended, failed) {
            (Ok(stream), _) => Ok(stream),
            (Err(_), Some(why)) => Err(TlsError::KeyServer(why)),
            (Err(e), None) => Err(e.into()),
        }
    }
}

enum Step<IO> {
    Going(Accept<IO>),
    Over(std::io::Result<TlsStream<IO>>),
}

const RSA: &[SignatureScheme] = &[
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::RSA_PSS_SHA384,
    SignatureScheme::RSA_PSS_SHA512,
    SignatureScheme::RSA_PKCS1_SHA256,
    SignatureScheme::RSA_PKCS1_SHA384,
    SignatureScheme::RSA_PKCS1_SHA512,
];
const P256: &[SignatureScheme] = &[SignatureScheme::ECDSA_NISTP256_SHA256];
const P384: &[SignatureScheme] = &[SignatureScheme::ECDSA_NISTP384_SHA384];

#[derive(Debug, Clone)]
struct Elsewhere {
    /// Who shows it; there as long as a handshake is.
    signed: Weak<Inner>,
    /// The one that gave the certificates first.
    servers: Servers,
    spki: SpkiHash,
    algorithm: SignatureAlgorithm,
    schemes: &'static [SignatureScheme],
}

impl SigningKey for Elsewhere {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        let scheme = self.schemes.iter().find(|s| offered.contains(s))?;
        Some(Box::new(OneScheme { key: self.clone(), scheme: *scheme }))
    }
    fn algorithm(&self) -> SignatureAlgorithm {
        self.algorithm
    }
}

#[derive(Debug)]
struct OneScheme {
    key: Elsewhere,
    scheme: SignatureScheme,
}

impl Signer for OneScheme {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        let here = NOW.with_borrow_mut(|now| now.as_mut().map(|n| n.asked = true).is_some());
        if !here {
            // Waiting here would stop a worker with all its connections.
            return Err(rustls::Error::General("this key signs on handshake threads only".into()));
        }
        let Elsewhere { signed, servers, spki, .. } = &self.key;
        let signed = signed.upgrade().ok_or_else(|| rustls::Error::General("the key is not in use any more".into()))?;
        let asked = signed.requester.sign(servers, signed.key.clone(), *spki, self.scheme.into(), message);
        futures::executor::block_on(asked).map_err(|e| {
            signed.forget(spki);
            let text = e.to_string();
            NOW.with_borrow_mut(|now| now.as_mut().map(|n| n.failed = Some(e)));
            rustls::Error::General(text)
        })
    }
    fn scheme(&self) -> SignatureScheme {
        self.scheme
    }
}

/// Shows one key whatever is asked for.
#[derive(Debug)]
pub(crate) struct Always(pub(crate) Arc<CertifiedKey>);

impl ResolvesServerCert for Always {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}
