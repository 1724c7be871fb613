//! SPIFFE mTLS as HBONE needs it: TLS 1.3 only, AES-GCM only, ALPN `h2`, no SNI, no resumption; who may talk to whom is decided by
//! URI SANs and the newest trust. Certificates come from [`crate::certs`] or [`crate::testing`]; nothing is renewed here.

mod cache;
mod certificate;
mod config;
mod identity;
mod leaf;
mod record;
mod refusal;
mod stream;
mod terminate;
mod trust;
mod verify;

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs::{self, cipher_suite, kx_group};

pub use cache::CHAINS_MAX;
pub use certificate::{Certificate, CertificateError, Credential, CredentialWriter};
pub use config::{ClientTemplate, client as client_config, server as server_config};
pub use identity::{ClientIdentity, PinnedIdentity, Proof, REMOTE_PROOF_LIFE, ServerIdentity};
pub use record::{RecordError, RecordStream, Secrets as RecordSecrets, Side, traffic};
pub use refusal::{PeerRefused, Refusal, TlsError, of_rustls};
pub use stream::{Stream, Transport, Worn};
pub use terminate::{Terminated, Terminator, Terms as TerminationTerms};
pub use trust::{EXPIRED_PEER_TIMEOUT, Fallen, PeerLeaf, Standing, Trust, TrustStore, TrustView};
pub use verify::{Judge, Role};

pub(crate) use leaf::leaf_of;

/// A handshake that takes longer has failed.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Handshakes wait so long for the own identity's first certificate.
pub const FIRST_PATIENCE: Duration = Duration::from_secs(5);
/// Most certificates of a peer's chain, the leaf included.
pub const CHAIN_CERTIFICATES_MAX: usize = 8;
/// Most bytes of a peer's chain.
pub const CHAIN_BYTES_MAX: usize = 32 << 10;

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
