//! SPIFFE mTLS as HBONE needs it: TLS 1.3 only, AES-GCM only, ALPN `h2`, no SNI, no resumption; who may talk to whom is decided by
//! URI SANs. Certificates come from [`crate::certs`] or [`crate::testing`]; nothing is renewed here.

mod certificate;
mod verify;

use std::io;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime};

use canal_model::identity::{Identity, Peer};
use canal_model::ids::TenantName;
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{self, cipher_suite, kx_group};
use rustls_pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

pub use certificate::{Certificate, CertificateError, Credential, CredentialWriter};
pub use verify::PeerRefused;

/// A handshake that takes longer has failed.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a TLS connection did not come up. The texts name what was expected and what was seen.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// There is no certificate for the own identity (yet, or any more).
    #[error("no valid certificate for {0}; is the controller reachable, and does this identity run here?")]
    NoCertificate(Identity),
    /// The peer's certificate is not the one this connection is for.
    #[error("{0}")]
    Peer(PeerRefused),
    /// The protocol failed, here or (as an alert) there.
    #[error("TLS handshake: {0}")]
    Protocol(rustls::Error),
    /// The transport failed.
    #[error("TLS handshake: {0}")]
    Io(io::Error),
    /// No end within [`HANDSHAKE_TIMEOUT`].
    #[error("TLS handshake: no end in {0:?}")]
    Timeout(Duration),
}

/// The accepting side: one tenant, one identity, always with the current certificate.
#[derive(Debug, Clone)]
pub struct ServerIdentity {
    tenant: TenantName,
    credential: Credential,
}

/// The connecting side: one identity, always with the current certificate.
#[derive(Debug, Clone)]
pub struct ClientIdentity {
    credential: Credential,
}

impl ServerIdentity {
    /// `tenant` is the owner of the credential's trust domain; every accepted peer is its member.
    pub fn new(tenant: TenantName, credential: Credential) -> Self {
        Self { tenant, credential }
    }

    /// The credential it proves itself with.
    pub fn credential(&self) -> &Credential {
        &self.credential
    }

    /// Handshake as the server. The peer must prove a certificate that chains to the tenant's bundle and holds an identity
    /// of the same trust domain. Fails after [`HANDSHAKE_TIMEOUT`].
    pub async fn accept<IO: AsyncRead + AsyncWrite + Unpin>(&self, io: IO) -> Result<(server::TlsStream<IO>, Peer), TlsError> {
        let own = usable(&self.credential)?;
        let stream = in_time(TlsAcceptor::from(own.server_config()).accept(io)).await?;
        let identity = seen(stream.get_ref().1.peer_certificates(), |id| id.trust_domain == own.identity().trust_domain)?;
        Ok((stream, Peer { tenant: self.tenant.clone(), identity }))
    }
}

impl ClientIdentity {
    /// A client that proves `credential`.
    pub fn new(credential: Credential) -> Self {
        Self { credential }
    }

    /// The credential it proves itself with.
    pub fn credential(&self) -> &Credential {
        &self.credential
    }

    /// This identity with the certificate it has now, so that a caller knows which one a handshake proved.
    pub fn pinned(&self) -> Result<PinnedIdentity, TlsError> {
        usable(&self.credential).map(PinnedIdentity)
    }

    /// [`ClientIdentity::pinned`], then [`PinnedIdentity::connect`].
    pub async fn connect<IO: AsyncRead + AsyncWrite + Unpin>(
        &self,
        io: IO,
        expected: &Arc<[Identity]>,
    ) -> Result<(client::TlsStream<IO>, Identity), TlsError> {
        self.pinned()?.connect(io, expected).await
    }
}

/// A client with one certificate.
#[derive(Debug, Clone)]
pub struct PinnedIdentity(Arc<Certificate>);

impl PinnedIdentity {
    /// What it proves.
    pub fn certificate(&self) -> &Arc<Certificate> {
        &self.0
    }

    /// Handshake as the client. The peer must chain to the own bundle and hold any one of `expected`, of which it returns the
    /// one seen. DNS names are ignored. A refusal by the server shows only at the first read (TLS 1.3, RFC 8446 §4.4).
    pub async fn connect<IO: AsyncRead + AsyncWrite + Unpin>(
        &self,
        io: IO,
        expected: &Arc<[Identity]>,
    ) -> Result<(client::TlsStream<IO>, Identity), TlsError> {
        let config = self.0.client_config(expected);
        // Never sent (SNI is off) nor compared (DNS is ignored), as in ztunnel.
        let no_name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
        let stream = in_time(TlsConnector::from(config).connect(no_name, io)).await?;
        let identity = seen(stream.get_ref().1.peer_certificates(), |id| expected.contains(id))?;
        Ok((stream, identity))
    }
}

fn usable(credential: &Credential) -> Result<Arc<Certificate>, TlsError> {
    let missing = || TlsError::NoCertificate(credential.identity().clone());
    credential.current().filter(|c| c.valid_at(SystemTime::now())).ok_or_else(missing)
}

async fn in_time<T>(handshake: impl Future<Output = io::Result<T>>) -> Result<T, TlsError> {
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await {
        Ok(done) => done.map_err(TlsError::from),
        Err(_) => Err(TlsError::Timeout(HANDSHAKE_TIMEOUT)),
    }
}

/// The identity the verifier accepted; read again from the leaf, because rustls keeps certificates, not verdicts.
fn seen(chain: Option<&[CertificateDer<'static>]>, accepted: impl Fn(&Identity) -> bool) -> Result<Identity, TlsError> {
    let uris = chain.and_then(<[_]>::first).map(verify::uris).transpose().map_err(TlsError::Protocol)?.unwrap_or_default();
    let found = uris.iter().find_map(|u| u.parse().ok().filter(|id| accepted(id)));
    found.ok_or(TlsError::Protocol(rustls::Error::NoCertificatesPresented))
}

impl From<io::Error> for TlsError {
    fn from(e: io::Error) -> Self {
        match e.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            Some(rustls::Error::InvalidCertificate(rustls::CertificateError::Other(o))) => match o.0.downcast_ref::<PeerRefused>() {
                Some(refused) => TlsError::Peer(refused.clone()),
                None => TlsError::Protocol(rustls::Error::InvalidCertificate(rustls::CertificateError::Other(o.clone()))),
            },
            Some(other) => TlsError::Protocol(other.clone()),
            None => TlsError::Io(e),
        }
    }
}

/// The algorithms of the mesh: X25519MLKEM768 preferred, then X25519, then P-256; AES-256-GCM, then AES-128-GCM.
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        Arc::new(CryptoProvider {
            cipher_suites: vec![cipher_suite::TLS13_AES_256_GCM_SHA384, cipher_suite::TLS13_AES_128_GCM_SHA256],
            kx_groups: vec![kx_group::X25519MLKEM768, kx_group::X25519, kx_group::SECP256R1],
            ..aws_lc_rs::default_provider()
        })
    });
    PROVIDER.clone()
}

#[cfg(test)]
mod tests;
