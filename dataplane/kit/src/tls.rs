//! SPIFFE mTLS as HBONE needs it: TLS 1.3 only, AES-GCM only, ALPN `h2`, no SNI, no resumption; who may talk to whom is decided by
//! URI SANs. Certificates come from [`crate::certs`] or [`crate::testing`]; nothing is renewed here.

mod certificate;
mod verify;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use canal_model::identity::{Identity, Peer};
use canal_model::ids::TenantName;
use rustls::crypto::CryptoProvider;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{client, server};

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
        let _ = io;
        unreachable!("body lands in the next commit")
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

    /// Handshake as the client. The peer must chain to the own bundle and hold any one of `expected`, of which it returns the
    /// one seen. DNS names are ignored. A refusal by the server shows only at the first read (TLS 1.3, RFC 8446 §4.4).
    pub async fn connect<IO: AsyncRead + AsyncWrite + Unpin>(
        &self,
        io: IO,
        expected: &Arc<[Identity]>,
    ) -> Result<(client::TlsStream<IO>, Identity), TlsError> {
        let _ = (io, expected);
        unreachable!("body lands in the next commit")
    }
}

/// The algorithms of the mesh: X25519MLKEM768 preferred, then X25519, then P-256; AES-256-GCM, then AES-128-GCM.
pub fn provider() -> Arc<CryptoProvider> {
    unreachable!("body lands in the next commit")
}
