//! SPIFFE mTLS for HBONE: TLS 1.3 only, AES-GCM only, ALPN `h2`, no SNI, no resumption. URI SANs
//! and the newest trust bundles decide which peers may connect. The crate has the parts of a
//! handshake and of a connection: certificates, trust, the verification of peers, and the record
//! layer for handshakes of key servers. It renews no certificate and does not know where a key is;
//! `canal-identity` does both. Start with [`PeerVerifier`] and [`MtlsStream`].

#![forbid(unsafe_code)]

mod certificate;
mod chain_cache;
mod config;
mod handshake_failure;
mod leaf_cache;
mod record;
mod remote;
mod secret_buffer;
mod stream;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod transport;
mod trust;
mod verified_chain;
mod verify;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{self, cipher_suite, kx_group};

pub use certificate::{Certificate, CertificateError, Credential, CredentialWriter, spki_hash};
pub use chain_cache::CHAINS_MAX;
pub use config::{ClientTemplate, client as client_config, mesh_alpn, server as server_config};
pub use handshake_failure::{
    HandshakeFailure, KeyServerError, PeerIdentityError, TlsError, of_rustls,
};
pub use leaf_cache::leaf_of;
pub use record::{
    EndpointRole, RecordError, RecordStream, TrafficSecrets as RecordSecrets, traffic,
};
pub use remote::RemoteHandshakeResult;
pub use secret_buffer::SecretBuffer;
pub use stream::{Inner, MtlsStream, PrefixedStream};
pub use transport::{RotateHint, Transport};
pub use trust::{
    EXPIRED_PEER_TIMEOUT, PeerTrustWatch, TrustLoss, TrustSnapshot, TrustStore, TrustView,
    UnusableBundle,
};
pub use verified_chain::{PeerLeaf, PeerRole};
pub use verify::{ClientVerifier, PeerVerifier, ServerVerifier, subject_of};

/// Timeout of a TLS handshake. TCP repeats a lost segment five times within it (after 0.2 s,
/// doubling).
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time that a handshake waits for the first certificate of this side's identity. Half of a
/// handshake, so that the peer still hears the cause.
pub const FIRST_CERTIFICATE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of certificates in a peer's chain, the leaf included. The mesh's own chains have
/// two or three; each further one costs a signature check.
pub const CHAIN_CERTIFICATES_MAX: usize = 8;
/// Maximum size of a peer's chain in bytes. 4 KiB for each certificate.
pub const CHAIN_BYTES_MAX: usize = 32 << 10;

/// Returns the algorithms of the mesh: X25519MLKEM768 preferred, then X25519, then P-256;
/// AES-256-GCM, then AES-128-GCM.
pub fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        Arc::new(CryptoProvider {
            cipher_suites: vec![
                cipher_suite::TLS13_AES_256_GCM_SHA384,
                cipher_suite::TLS13_AES_128_GCM_SHA256,
            ],
            kx_groups: vec![
                kx_group::X25519MLKEM768,
                kx_group::X25519,
                kx_group::SECP256R1,
            ],
            ..aws_lc_rs::default_provider()
        })
    });
    PROVIDER.clone()
}

/// Returns whether this kernel accepts new keys for a connection that it encrypts, for tests.
#[cfg(feature = "testing")]
pub fn kernel_rekeys() -> bool {
    record::kernel_rekeys()
}
