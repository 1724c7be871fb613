//! rustls configurations of the mesh, for any key that can sign: TLS 1.3 only, no SNI, no resumption. What peers must be is `verify`'s.

use std::sync::Arc;

use canal_model::identity::Identity;
use canal_wire::hbone::ALPN;
use rustls::client::{ResolvesClientCert, Resumption};
use rustls::server::{NoServerSessionStorage, ResolvesServerCert};
use rustls::version::TLS13;
use rustls::{ClientConfig, Error, KeyLog, ServerConfig};

use super::provider;
use super::verify::{ClientVerifier, Judge, ServerVerifier};

/// What HBONE speaks.
pub(super) fn mesh_alpn() -> [Vec<u8>; 1] {
    [ALPN.to_vec()]
}

/// The accepting side with any key: who may come is the judge's, a member of the own trust domain or of a federated one.
pub fn server(key: Arc<dyn ResolvesServerCert>, judge: Judge, alpn: &[Vec<u8>]) -> Result<ServerConfig, Error> {
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::new(ClientVerifier::new(judge)))
        .with_cert_resolver(key);
    config.alpn_protocols = alpn.to_vec();
    // Clients of the mesh do not resume (features.md A.2), so tickets would be sent for nothing.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(config)
}

/// The connecting side with any key, to one of `expected`. For more than one connection there is [`ClientTemplate`].
pub fn client(key: Arc<dyn ResolvesClientCert>, judge: Judge, expected: Arc<[Identity]>, alpn: &[Vec<u8>]) -> Result<ClientConfig, Error> {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(ServerVerifier::new(judge, expected)))
        .with_client_cert_resolver(key);
    config.alpn_protocols = alpn.to_vec();
    config.enable_sni = false;
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// Configurations of the connecting side for one key and one judge, which differ in whom they take: what is the same is made once. Nothing in one
/// remembers a connection, so that connections to the same peers share it.
#[derive(Debug)]
pub struct ClientTemplate {
    judge: Judge,
    /// Whom `config` takes.
    expected: Arc<[Identity]>,
    config: Arc<ClientConfig>,
}

impl ClientTemplate {
    /// `expected`: whom connections will be made to, or most of them. `secrets` is told each handshake's secrets.
    pub fn new(
        key: Arc<dyn ResolvesClientCert>,
        judge: Judge,
        expected: Arc<[Identity]>,
        alpn: &[Vec<u8>],
        secrets: Option<Arc<dyn KeyLog>>,
    ) -> Result<Self, Error> {
        let mut config = client(key, judge.clone(), expected.clone(), alpn)?;
        if let Some(secrets) = secrets {
            config.key_log = secrets;
        }
        Ok(Self { judge, expected, config: Arc::new(config) })
    }

    /// For a connection to one of `expected` and nobody else.
    pub fn towards(&self, expected: &Arc<[Identity]>) -> Arc<ClientConfig> {
        if *expected == self.expected {
            return self.config.clone();
        }
        let mut config = ClientConfig::clone(&self.config);
        config.dangerous().set_certificate_verifier(Arc::new(ServerVerifier::new(self.judge.clone(), expected.clone())));
        Arc::new(config)
    }
}
