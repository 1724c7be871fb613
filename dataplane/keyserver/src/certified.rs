//! A sealed key with the certificates for it, ready for handshakes. Where the certificates come from is `provision`'s and `files`' business.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use canal_kit::keys::spki_hash;
use canal_kit::tls::{self, ClientTemplate, Judge};
use canal_model::identity::Identity;
use canal_model::ids::TenantName;
use canal_wire::keyrpc::{KeyName, SpkiHash};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, ServerConfig};
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate};

use crate::key::{PrivateKey, TlsKey};
use crate::secrets::Secrets;

/// Protocol lists that configurations are kept for; a requester has one or two.
const CONFIGS_MAX: usize = 8;

type Protocols = Vec<Vec<u8>>;

/// What was made for lists of protocols.
struct Kept<T>(Mutex<Vec<(Protocols, Arc<T>)>>);

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Kept<T> {
    fn of(&self, alpn: &[Vec<u8>], make: impl FnOnce() -> Result<T, rustls::Error>) -> Result<Arc<T>, rustls::Error> {
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

/// Immutable but for what is worked out once and kept.
pub struct Certified {
    pub name: KeyName,
    pub tenant: TenantName,
    pub key: Arc<PrivateKey>,
    /// The key's.
    pub spki: SpkiHash,
    /// Leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    pub not_before: SystemTime,
    pub not_after: SystemTime,
    resolver: Arc<SingleCertAndKey>,
    judge: Option<Judge>,
    servers: Kept<ServerConfig>,
    clients: Kept<ClientTemplate>,
    asked: AtomicBool,
}

impl fmt::Debug for Certified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Certified({}, until {:?})", self.name, self.not_after)
    }
}

impl Certified {
    /// Refuses a chain that is not for this key. Without `judge` it signs, but shakes no hands.
    pub fn new(
        name: KeyName,
        tenant: TenantName,
        key: Arc<PrivateKey>,
        chain: Vec<CertificateDer<'static>>,
        judge: Option<Judge>,
    ) -> Result<Self, String> {
        let leaf = chain.first().ok_or("it holds no certificate")?;
        let (_, x) = X509Certificate::from_der(leaf).map_err(|e| format!("its leaf cannot be read: {e}"))?;
        if x.public_key().raw != key.public().as_ref() {
            return Err("the certificate is for another key".into());
        }
        let spki = spki_hash(x.public_key().raw);
        let time = |t: ASN1Time| SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(t.timestamp()).unwrap_or(0));
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
            judge,
            servers: Kept::default(),
            clients: Kept::default(),
            asked: AtomicBool::new(false),
        })
    }

    /// Whether it may be shown to a peer at `now`.
    pub fn valid_at(&self, now: SystemTime) -> bool {
        self.not_before <= now && now < self.not_after
    }

    /// Somebody wants to use it.
    pub(crate) fn ask(&self) {
        self.asked.store(true, Relaxed);
    }

    /// Whether somebody ever wanted to use it.
    pub(crate) fn asked(&self) -> bool {
        self.asked.load(Relaxed)
    }

    /// What judges the peers of its handshakes; `None`: it shakes no hands.
    pub fn judge(&self) -> Option<&Judge> {
        self.judge.as_ref()
    }

    /// For the server's side of handshakes.
    pub fn server_config(&self, alpn: &[Vec<u8>]) -> Result<Arc<ServerConfig>, rustls::Error> {
        self.servers.of(alpn, || {
            let mut config = tls::server_config(self.resolver.clone(), self.own_judge()?, alpn)?;
            config.key_log = Arc::new(Secrets);
            Ok(config)
        })
    }

    /// For the client's side of one handshake.
    pub fn client_config(&self, alpn: &[Vec<u8>], expected: &Arc<[Identity]>) -> Result<Arc<ClientConfig>, rustls::Error> {
        let make = || ClientTemplate::new(self.resolver.clone(), self.own_judge()?, expected.clone(), alpn, Some(Arc::new(Secrets)));
        Ok(self.clients.of(alpn, make)?.towards(expected))
    }

    /// For accepting connections that are this process's own: their secrets go nowhere.
    pub fn own_server_config(&self, alpn: &[Vec<u8>]) -> Result<Arc<ServerConfig>, rustls::Error> {
        Ok(Arc::new(tls::server_config(self.resolver.clone(), self.own_judge()?, alpn)?))
    }

    fn own_judge(&self) -> Result<Judge, rustls::Error> {
        self.judge.clone().ok_or_else(|| rustls::Error::General(format!("{} signs only", self.name)))
    }
}
