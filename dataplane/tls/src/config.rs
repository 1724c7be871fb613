//! rustls configurations of the mesh, for any key that can sign: TLS 1.3 only, no SNI, no
//! resumption. `verify` verifies the peers.

use std::sync::Arc;

use canal_model::identity::Identity;
use canal_wire::hbone::ALPN;
use rustls::client::{ResolvesClientCert, Resumption};
use rustls::server::{NoServerSessionStorage, ResolvesServerCert};
use rustls::version::TLS13;
use rustls::{ClientConfig, Error, KeyLog, ServerConfig};

use super::provider;
use super::verify::{ClientVerifier, PeerVerifier, ServerVerifier};

/// Returns the ALPN protocols of HBONE.
pub fn mesh_alpn() -> [Vec<u8>; 1] {
    [ALPN.to_vec()]
}

/// Builds the configuration of the accepting side with any key. The verifier accepts members of
/// this side's trust domain and of federated ones.
///
/// # Errors
/// rustls rejects the configuration.
pub fn server(
    key: Arc<dyn ResolvesServerCert>,
    verifier: PeerVerifier,
    alpn: &[Vec<u8>],
) -> Result<ServerConfig, Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(ClientVerifier::new(verifier)))
        .with_cert_resolver(key);
    config.alpn_protocols = alpn.to_vec();
    // Clients of the mesh do not resume sessions, as in ztunnel, so tickets would be useless.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(config)
}

/// Builds the configuration of the connecting side with any key, to one of `expected`. For several
/// connections use [`ClientTemplate`].
///
/// # Errors
/// rustls rejects the configuration.
pub fn client(
    key: Arc<dyn ResolvesClientCert>,
    verifier: PeerVerifier,
    expected: Arc<[Identity]>,
    alpn: &[Vec<u8>],
) -> Result<ClientConfig, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(ServerVerifier::new(verifier, expected)))
        .with_client_cert_resolver(key);
    config.alpn_protocols = alpn.to_vec();
    config.enable_sni = false;
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// Configurations of the connecting side for one key and one verifier, which differ in the expected
/// peers. The common part is built once. A configuration stores nothing about connections, so
/// connections to the same peers share it.
#[derive(Debug)]
pub struct ClientTemplate {
    verifier: PeerVerifier,
    /// Identities of which `config` accepts a peer.
    expected: Arc<[Identity]>,
    config: Arc<ClientConfig>,
}

impl ClientTemplate {
    /// Builds a template. `expected` are the peers of most connections, and `secrets` receives the
    /// secrets of each handshake.
    ///
    /// # Errors
    /// rustls rejects the configuration.
    pub fn new(
        key: Arc<dyn ResolvesClientCert>,
        verifier: PeerVerifier,
        expected: Arc<[Identity]>,
        alpn: &[Vec<u8>],
        secrets: Option<Arc<dyn KeyLog>>,
    ) -> Result<Self, Error> {
        let mut config = client(key, verifier.clone(), expected.clone(), alpn)?;
        if let Some(secrets) = secrets {
            config.key_log = secrets;
        }
        Ok(Self {
            verifier,
            expected,
            config: Arc::new(config),
        })
    }

    /// Returns the configuration for a connection to one of `expected` and no other peer.
    pub fn towards(&self, expected: &Arc<[Identity]>) -> Arc<ClientConfig> {
        if *expected == self.expected {
            return self.config.clone();
        }
        let mut config = ClientConfig::clone(&self.config);
        config
            .dangerous()
            .set_certificate_verifier(Arc::new(ServerVerifier::new(
                self.verifier.clone(),
                expected.clone(),
            )));
        Arc::new(config)
    }
}
