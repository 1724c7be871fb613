//! Keys that sign remotely: rustls runs here, and a key server makes its signatures. rustls' signer
//! is synchronous, so the step that signs runs on one of a few dedicated threads and never on a
//! worker. When all threads are in use and the queue is full, the next handshake is refused at
//! once. Start with [`RemoteKey`].

use std::cell::RefCell;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use canal_model::trust::KeyServer;
use canal_tls::{KeyServerError, TlsError, spki_hash};
use canal_wire::keyrpc::{CHAIN_LIFE, KeyName, SpkiHash};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::{CertifiedKey, Signer, SigningKey};
use rustls::{ServerConfig, SignatureAlgorithm, SignatureScheme};
use rustls_pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_rustls::Accept;
use tokio_rustls::server::{StartHandshake, TlsStream};
use x509_parser::prelude::{FromDer, X509Certificate};
use x509_parser::public_key::PublicKey;

use super::key_client::{KeyClient, KeyServerOrder};

/// Time for which a client that must send another key share (HelloRetryRequest) may occupy a
/// thread. It is far below the 10 s of a handshake, because other handshakes wait for the thread.
const SECOND_HELLO_TIMEOUT: Duration = Duration::from_secs(1);

/// State of the handshake for which a thread signs.
struct SigningContext {
    has_signed: bool,
    failed: Option<KeyServerError>,
}

thread_local! {
    static NOW: RefCell<Option<SigningContext>> = const { RefCell::new(None) };
}

/// A remote key with its current certificates.
#[derive(Clone)]
pub struct RemoteKey {
    inner: Arc<Inner>,
}

struct Inner {
    requester: KeyClient,
    servers: KeyServerOrder,
    key: KeyName,
    presented: ArcSwapOption<PresentedCertificate>,
}

/// The certificates that peers get.
struct PresentedCertificate {
    since: Instant,
    spki: SpkiHash,
    certified: Arc<CertifiedKey>,
}

impl Inner {
    /// Drops the cached certificates of a key with which no server signs any more, so that the next
    /// handshake requests the current ones.
    fn forget(&self, spki: &SpkiHash) {
        let presented = self.presented.load();
        if presented.as_ref().is_some_and(|shown| shown.spki == *spki) {
            self.presented.compare_and_swap(&presented, None);
        }
    }
}

impl fmt::Debug for RemoteKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Signed({})", self.inner.key)
    }
}

impl RemoteKey {
    /// Creates a key of the tenant's own key server, which may refuse at any time.
    pub fn by_tenant(requester: &KeyClient, server: &KeyServer, key: KeyName) -> Self {
        Self::new(requester, requester.of_tenant(server), key)
    }

    /// Creates a key of the provider's key servers.
    pub fn by_provider(requester: &KeyClient, key: KeyName) -> Self {
        Self::new(requester, requester.provider(), key)
    }

    fn new(requester: &KeyClient, servers: KeyServerOrder, key: KeyName) -> Self {
        Self {
            inner: Arc::new(Inner {
                requester: requester.clone(),
                servers,
                key,
                presented: ArcSwapOption::empty(),
            }),
        }
    }

    /// Returns the certificates, with a key that signs remotely. If they cannot be renewed, the
    /// last ones stay in use, because the key server decides at each signature anyway.
    ///
    /// # Errors
    /// No certificates were ever received, and no key server answers or the answer is unusable.
    pub async fn certified(&self) -> Result<Arc<CertifiedKey>, KeyServerError> {
        let presented = self.inner.presented.load_full();
        if let Some(shown) = presented
            .as_deref()
            .filter(|shown| shown.since.elapsed() < CHAIN_LIFE)
        {
            return Ok(shown.certified.clone());
        }
        match self
            .inner
            .requester
            .chain(&self.inner.servers, self.inner.key.clone())
            .await
        {
            Ok((chain, servers)) => {
                let shown = self.to_show(chain, servers)?;
                let certified = shown.certified.clone();
                self.inner.presented.store(Some(Arc::new(shown)));
                Ok(certified)
            }
            Err(e) => presented.map(|shown| shown.certified.clone()).ok_or(e),
        }
    }

    fn to_show(
        &self,
        chain: Vec<Vec<u8>>,
        servers: KeyServerOrder,
    ) -> Result<PresentedCertificate, KeyServerError> {
        let wrong = |what| KeyServerError::Answer {
            server: self.inner.key.to_string(),
            what,
        };
        let chain: Vec<_> = chain.into_iter().map(CertificateDer::from).collect();
        let leaf = chain.first().ok_or_else(|| wrong("no certificates"))?;
        let (_, x) = X509Certificate::from_der(leaf)
            .map_err(|_| wrong("a certificate that cannot be read"))?;
        let (algorithm, schemes) = match x.public_key().parsed() {
            Ok(PublicKey::RSA(_)) => (SignatureAlgorithm::RSA, RSA),
            Ok(PublicKey::EC(point)) if point.key_size() <= 256 => {
                (SignatureAlgorithm::ECDSA, P256)
            }
            Ok(PublicKey::EC(_)) => (SignatureAlgorithm::ECDSA, P384),
            _ => return Err(wrong("a certificate of an unknown kind of key")),
        };
        let spki = spki_hash(x.public_key().raw);
        let key = RemoteSigningKey {
            signed: Arc::downgrade(&self.inner),
            servers,
            spki,
            algorithm,
            schemes,
        };
        Ok(PresentedCertificate {
            since: Instant::now(),
            spki,
            certified: Arc::new(CertifiedKey::new(chain, Arc::new(key))),
        })
    }

    /// Continues a handshake whose ClientHello was read, with a configuration that presents
    /// [`RemoteKey::certified`]. Only the step that signs leaves the calling thread.
    ///
    /// # Errors
    /// The handshake fails, no thread is free, or no key server signs.
    pub async fn handshake<IO>(
        &self,
        start: StartHandshake<IO>,
        config: Arc<ServerConfig>,
    ) -> Result<TlsStream<IO>, TlsError>
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let runtime = tokio::runtime::Handle::current();
        let job = move || {
            // Timers and sockets of the handshake need a runtime, and this thread belongs to none.
            let _in = runtime.enter();
            NOW.set(Some(SigningContext {
                has_signed: false,
                failed: None,
            }));
            let mut step = HandshakeProgress::Going(start.into_stream_with(config, |_| {}));
            if NOW.with_borrow(|now| now.as_ref().is_some_and(|n| !n.has_signed)) {
                // The client must send another key share first; the step after that signs.
                if let HandshakeProgress::Going(accept) = step {
                    let limited =
                        async { tokio::time::timeout(SECOND_HELLO_TIMEOUT, accept).await };
                    step = HandshakeProgress::Over(
                        runtime
                            .block_on(limited)
                            .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())),
                    );
                }
            }
            let failed = NOW.take().and_then(|n| n.failed);
            // If the receiver is gone, the connection ends here.
            let _ = sender.send((step, failed));
        };
        if let Err(busy) = self.inner.requester.threads().run(Box::new(job)) {
            self.inner.requester.counts().busy();
            return Err(TlsError::KeyServer(busy));
        }
        let (step, failed) = receiver
            .await
            // The job panicked, or no thread is left to run it: no key server was at fault.
            .map_err(|_| TlsError::KeyServer(KeyServerError::Busy))?;
        let ended = match step {
            HandshakeProgress::Going(accept) => accept.await,
            HandshakeProgress::Over(ended) => ended,
        };
        match (ended, failed) {
            (Ok(stream), _) => Ok(stream),
            // rustls reports only that signing failed; `why` says what the key server answered.
            (Err(_), Some(why)) => Err(TlsError::KeyServer(why)),
            (Err(e), None) => Err(e.into()),
        }
    }
}

enum HandshakeProgress<IO> {
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
struct RemoteSigningKey {
    /// Owner of the key, which lives as long as a handshake uses it.
    signed: Weak<Inner>,
    /// Key servers, starting with the one that gave the certificates.
    servers: KeyServerOrder,
    spki: SpkiHash,
    algorithm: SignatureAlgorithm,
    schemes: &'static [SignatureScheme],
}

impl SigningKey for RemoteSigningKey {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        let scheme = self.schemes.iter().find(|s| offered.contains(s))?;
        Some(Box::new(RemoteSchemeSigner {
            key: self.clone(),
            scheme: *scheme,
        }))
    }
    fn algorithm(&self) -> SignatureAlgorithm {
        self.algorithm
    }
}

#[derive(Debug)]
struct RemoteSchemeSigner {
    key: RemoteSigningKey,
    scheme: SignatureScheme,
}

impl Signer for RemoteSchemeSigner {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        let here = NOW.with_borrow_mut(|now| now.as_mut().map(|n| n.has_signed = true).is_some());
        if !here {
            // Waiting here would stop a worker with all its connections.
            return Err(rustls::Error::General(
                "this key can sign only on handshake threads".into(),
            ));
        }
        let RemoteSigningKey {
            signed,
            servers,
            spki,
            ..
        } = &self.key;
        let signed = signed
            .upgrade()
            .ok_or_else(|| rustls::Error::General("the key is no longer in use".into()))?;
        let signature = signed.requester.sign(
            servers,
            signed.key.clone(),
            *spki,
            self.scheme.into(),
            message,
        );
        futures::executor::block_on(signature).map_err(|e| {
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

/// Presents one key for every ClientHello.
#[derive(Debug)]
pub struct FixedCertResolver(pub Arc<CertifiedKey>);

impl ResolvesServerCert for FixedCertResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}
