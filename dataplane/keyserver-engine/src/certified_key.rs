//! [`CertifiedPrivateKey`]: a sealed key with its certificates, ready for handshakes. `provision` and `tenant_key_files` obtain the
//! certificates.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use canal_model::identity::Identity;
use canal_model::ids::TenantName;
use canal_tls::spki_hash;
use canal_tls::{ClientTemplate, PeerVerifier};
use canal_wire::keyrpc::{KeyName, SpkiHash};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, ServerConfig};
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate};

use crate::key::{PrivateKey, TlsKey};
use crate::secret_capture::SecretCapture;

/// Protocol lists for which configurations are cached; a requester has one or two. At the limit the
/// oldest is dropped, and built again if a requester has it.
const CONFIGS_MAX: usize = 8;

type Protocols = Vec<Vec<u8>>;

/// Configurations by list of protocols.
struct ConfigCache<T>(Mutex<Vec<(Protocols, Arc<T>)>>);

impl<T> Default for ConfigCache<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> ConfigCache<T> {
    fn of(
        &self,
        alpn: &[Vec<u8>],
        make: impl FnOnce() -> Result<T, rustls::Error>,
    ) -> Result<Arc<T>, rustls::Error> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, config)) = known.iter().find(|(p, _)| p == alpn) {
            return Ok(config.clone());
        }
        let config = Arc::new(make()?);
        if known.len() >= CONFIGS_MAX {
            known.remove(0);
        }
        known.push((alpn.to_vec(), config.clone()));
        Ok(config)
    }
}

/// A sealed key with its certificates, immutable except for caches and the record of its use.
pub struct CertifiedPrivateKey {
    pub name: KeyName,
    pub tenant: TenantName,
    pub key: Arc<PrivateKey>,
    /// Hash of the key's SubjectPublicKeyInfo (SPKI).
    pub spki: SpkiHash,
    /// Certificates of the key, leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    pub not_before: SystemTime,
    pub not_after: SystemTime,
    resolver: Arc<SingleCertAndKey>,
    verifier: Option<PeerVerifier>,
    servers: ConfigCache<ServerConfig>,
    clients: ConfigCache<ClientTemplate>,
    is_used: AtomicBool,
}

impl fmt::Debug for CertifiedPrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Certified({}, until {:?})", self.name, self.not_after)
    }
}

impl CertifiedPrivateKey {
    /// Combines a key with its certificates. Without a `verifier` the key signs, but performs no
    /// handshakes.
    ///
    /// # Errors
    /// The chain is empty, its leaf is unreadable, or the leaf is for another key.
    pub fn new(
        name: KeyName,
        tenant: TenantName,
        key: Arc<PrivateKey>,
        chain: Vec<CertificateDer<'static>>,
        verifier: Option<PeerVerifier>,
    ) -> Result<Self, String> {
        let leaf = chain
            .first()
            .ok_or("it contains no certificate; fix: write certificates in PEM, leaf first")?;
        let (_, x) = X509Certificate::from_der(leaf)
            .map_err(|e| format!("its leaf cannot be read: {e}; fix: issue it again"))?;
        if x.public_key().raw != key.public().as_ref() {
            return Err("the certificate is for another key; fix: write the private key of this certificate".into());
        }
        let spki = spki_hash(x.public_key().raw);
        let time = |t: ASN1Time| {
            SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(t.timestamp()).unwrap_or(0))
        };
        let (not_before, not_after) = (time(x.validity().not_before), time(x.validity().not_after));
        let resolver = CertifiedKey::new(chain.clone(), Arc::new(TlsKey(key.clone())));
        let resolver = Arc::new(SingleCertAndKey::from(resolver));
        Ok(Self {
            name,
            tenant,
            key,
            spki,
            chain,
            not_before,
            not_after,
            resolver,
            verifier,
            servers: ConfigCache::default(),
            clients: ConfigCache::default(),
            is_used: AtomicBool::new(false),
        })
    }

    /// Returns whether the certificate is valid at `now`.
    pub fn valid_at(&self, now: SystemTime) -> bool {
        self.not_before <= now && now < self.not_after
    }

    /// Records that a requester wants to use the key.
    pub(crate) fn mark_used(&self) {
        self.is_used.store(true, Relaxed);
    }

    /// Returns whether a requester ever wanted to use the key.
    pub(crate) fn is_used(&self) -> bool {
        self.is_used.load(Relaxed)
    }

    /// Returns the verifier of handshake peers; `None`: the key performs no handshakes.
    pub fn peer_verifier(&self) -> Option<&PeerVerifier> {
        self.verifier.as_ref()
    }

    /// Returns the configuration for the server side of handshakes.
    ///
    /// # Errors
    /// The key performs no handshakes, or rustls refuses the configuration.
    pub fn server_config(&self, alpn: &[Vec<u8>]) -> Result<Arc<ServerConfig>, rustls::Error> {
        self.servers.of(alpn, || {
            let mut config =
                canal_tls::server_config(self.resolver.clone(), self.own_verifier()?, alpn)?;
            config.key_log = Arc::new(SecretCapture);
            Ok(config)
        })
    }

    /// Returns the configuration for the client side of one handshake.
    ///
    /// # Errors
    /// The key performs no handshakes, or rustls refuses the configuration.
    pub fn client_config(
        &self,
        alpn: &[Vec<u8>],
        expected: &Arc<[Identity]>,
    ) -> Result<Arc<ClientConfig>, rustls::Error> {
        let make = || {
            ClientTemplate::new(
                self.resolver.clone(),
                self.own_verifier()?,
                expected.clone(),
                alpn,
                Some(Arc::new(SecretCapture)),
            )
        };
        Ok(self.clients.of(alpn, make)?.towards(expected))
    }

    /// Returns the configuration for connections to this process itself, whose secrets are not
    /// captured.
    ///
    /// # Errors
    /// The key performs no handshakes, or rustls refuses the configuration.
    pub fn own_server_config(&self, alpn: &[Vec<u8>]) -> Result<Arc<ServerConfig>, rustls::Error> {
        Ok(Arc::new(canal_tls::server_config(
            self.resolver.clone(),
            self.own_verifier()?,
            alpn,
        )?))
    }

    fn own_verifier(&self) -> Result<PeerVerifier, rustls::Error> {
        self.verifier
            .clone()
            .ok_or_else(|| rustls::Error::General(format!("{} signs only", self.name)))
    }
}
