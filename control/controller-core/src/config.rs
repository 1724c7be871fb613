//! The controller's configuration and limits, and the errors that prevent its start. It opens no
//! file or socket. Start at [`ControllerConfig`].

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use canal_access::principals::PrincipalsError;
use canal_access::shares::{
    COMPILED_BYTES_MAX, COMPILED_RESOURCES_MAX, CONFIGURATION_BYTES_MAX, QUEUED_CHANGE_BYTES_MAX,
    QUEUED_CHANGES_MAX, ROUTE_TABLE_BYTES_MAX,
};
use canal_access::{
    CONNECTIONS_MAX, FILES_RESERVED, HANDSHAKE_TIMEOUT, ListenError, SharedCapacities,
    UNAUTHENTICATED_MAX,
};
use canal_ca::ControllerCaError;
use canal_fleet::SilenceTimeouts;
use canal_model::share::Shares;
use canal_operators_api::OBSERVATIONS_MAX;
use canal_sources::WatchError;
use canal_southbound::{STREAMS_MAX, SessionLimits};
use canal_store::StoreError;
use canal_trust::jwks::JwksOptions;
use canal_trust::{CertificateRate, ISSUED_MAX, PROVIDER_RATE, TENANT_RATE, TrustOptions};

/// Default of the limit [`ControllerLimits::request_bytes`].
/// All files of a tenant's folder may have as many bytes (`TENANT_BYTES_MAX`), so that `canal
/// apply` accepts what a folder may hold.
pub const REQUEST_BYTES_MAX: usize = 64 << 20;
/// Interval of HTTP/2 PINGs to a silent client, and the timeout of the answer: a half-open
/// connection is detected within half a minute.
const PING: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(20));

/// Configuration of the controller process.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// Address for data planes and operators; with port 0 the kernel chooses the port.
    pub listen: SocketAddr,
    /// Address of the admin port; keep it on localhost. `/config_dump` is served only on
    /// [`canal_runtime::admin::SOCKET_NAME`] in the store's folder.
    pub admin: Option<SocketAddr>,
    /// Address of the metrics port.
    pub metrics: Option<SocketAddr>,
    /// Folder of the store and of the admin socket.
    pub data_dir: PathBuf,
    /// Folder with one folder of YAML files per tenant; `None` if the API is the only source.
    pub config_dir: Option<PathBuf>,
    /// File with the principals that may connect.
    pub principals: PathBuf,
    /// Folder of the controller's own CA.
    pub infra_dir: PathBuf,
    /// Lifetime of workload certificates in seconds.
    pub svid_seconds: u64,
    /// Options of the tenants' certificate authorities.
    pub trust: TrustOptions,
    /// Options for fetching JWT key sets.
    pub jwks: JwksOptions,
    /// Limits of the controller's services and of its store.
    pub limits: ControllerLimits,
}

/// Limits of the controller; the defaults are the constants of this crate and of the store.
#[derive(Debug, Clone)]
pub struct ControllerLimits {
    /// Limits of the store; see [`canal_store::StoreLimits`].
    pub store: canal_store::StoreLimits,
    /// Maximum number of open streams; the default is [`crate::STREAMS_MAX`].
    pub streams: usize,
    /// Maximum number of authorized connections; the default is [`crate::CONNECTIONS_MAX`].
    pub connections: usize,
    /// Maximum number of names of one stream; the default is [`crate::NAMES_MAX`].
    pub names: usize,
    /// Maximum bytes of one southbound response; the default is [`crate::RESPONSE_BYTES_MAX`].
    pub response_bytes: usize,
    /// Maximum number of splits of refused responses; the default is [`crate::NACK_SPLITS_MAX`].
    pub nack_splits: usize,
    /// Maximum bytes of one request: an Apply with many files, or the first request of a subscriber
    /// that holds many resources.
    pub request_bytes: usize,
    /// Time after which a connection without a request that has a valid token is closed.
    pub handshake: Duration,
    /// Maximum number of certificates in the issuance log; the default is [`crate::ISSUED_MAX`].
    pub issued: usize,
    /// Timeouts for edges and replicas that do not report.
    pub fleet: SilenceTimeouts,
    /// Maximum number of waiting changes of all tenants; the default is
    /// [`crate::QUEUED_CHANGES_MAX`].
    pub queued_changes: u64,
    /// Maximum bytes of waiting changes; the default is [`crate::QUEUED_CHANGE_BYTES_MAX`].
    pub queued_change_bytes: u64,
    /// Maximum bytes of all tenants' objects; the default is [`crate::CONFIGURATION_BYTES_MAX`].
    pub configuration_bytes: u64,
    /// Maximum bytes of compiled resources; the default is [`crate::COMPILED_BYTES_MAX`].
    pub compiled_bytes: u64,
    /// Maximum number of compiled resources; the default is [`crate::COMPILED_RESOURCES_MAX`].
    pub compiled_resources: u64,
    /// Maximum bytes of all tenants' route tables in a gateway; the default is
    /// [`crate::ROUTE_TABLE_BYTES_MAX`].
    pub route_table_bytes: u64,
    /// Number of changes that are compiled at once, each of another tenant, and of dry runs.
    pub compile_workers: usize,
    /// Shares of tenants for which the provider configured none.
    pub shares: Shares,
    /// Maximum number of connections that have not sent a valid token; the default is
    /// [`crate::UNAUTHENTICATED_MAX`].
    pub unauthenticated: usize,
    /// Rate at which one data plane of a tenant may request certificates; the default is
    /// [`crate::TENANT_RATE`].
    pub tenant_rate: CertificateRate,
    /// Rate at which one component of the provider may request certificates; the default is
    /// [`crate::PROVIDER_RATE`].
    pub provider_rate: CertificateRate,
    /// Interval of HTTP/2 PINGs to a silent client, and the timeout of the answer.
    pub ping: (Duration, Duration),
}

impl Default for ControllerLimits {
    fn default() -> Self {
        let session = SessionLimits::default();
        Self {
            store: canal_store::StoreLimits::default(),
            streams: STREAMS_MAX,
            connections: CONNECTIONS_MAX,
            names: session.names,
            response_bytes: session.response_bytes,
            nack_splits: session.nack_splits,
            request_bytes: REQUEST_BYTES_MAX,
            handshake: HANDSHAKE_TIMEOUT,
            issued: ISSUED_MAX,
            fleet: SilenceTimeouts::default(),
            ping: PING,
            queued_changes: QUEUED_CHANGES_MAX,
            queued_change_bytes: QUEUED_CHANGE_BYTES_MAX,
            configuration_bytes: CONFIGURATION_BYTES_MAX,
            compiled_bytes: COMPILED_BYTES_MAX,
            compiled_resources: COMPILED_RESOURCES_MAX,
            route_table_bytes: ROUTE_TABLE_BYTES_MAX,
            // At least two, so that one tenant's change never delays those of all others.
            compile_workers: std::thread::available_parallelism().map_or(2, |n| n.get().max(2)),
            shares: Shares::default(),
            unauthenticated: UNAUTHENTICATED_MAX,
            tenant_rate: TENANT_RATE,
            provider_rate: PROVIDER_RATE,
        }
    }
}

impl ControllerLimits {
    /// Returns the limits that tenants share.
    pub(crate) fn capacities(&self) -> SharedCapacities {
        SharedCapacities {
            queued_changes: self.queued_changes,
            queued_change_bytes: self.queued_change_bytes,
            configuration_bytes: self.configuration_bytes,
            compiled_bytes: self.compiled_bytes,
            compiled_resources: self.compiled_resources,
            route_table_bytes: self.route_table_bytes,
            connections: self.connections as u64,
            unauthenticated: self.unauthenticated as u64,
            certificates: self.issued as u64,
            streams: self.streams as u64,
            observations: OBSERVATIONS_MAX as u64,
            shares: self.shares.clone(),
        }
    }

    /// Returns the limits of one subscriber stream.
    pub(crate) fn session(&self) -> SessionLimits {
        SessionLimits {
            names: self.names,
            response_bytes: self.response_bytes,
            nack_splits: self.nack_splits,
            ..SessionLimits::default()
        }
    }

    /// Returns the same limits, reduced for a process that may have `files` open files: connections
    /// leave [`FILES_RESERVED`] of them free.
    pub fn within(mut self, files: u64) -> Self {
        let most = usize::try_from(files.saturating_sub(FILES_RESERVED))
            .unwrap_or(usize::MAX)
            .max(2);
        if self.connections.saturating_add(self.unauthenticated) > most {
            // Unauthenticated connections get at most a quarter of the files.
            self.unauthenticated = self.unauthenticated.min(most / 4).max(1);
            self.connections = most - self.unauthenticated;
        }
        self
    }
}

/// Reason why the controller did not start.
#[derive(Debug, thiserror::Error)]
pub enum ControllerError {
    /// The store could not be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The controller's own CA could not be used.
    #[error(transparent)]
    Infra(#[from] ControllerCaError),
    /// The TLS roots for https could not be used.
    #[error("--tls-roots: {0}; fix: name a file with root certificates in PEM")]
    Tls(#[from] rustls::Error),
    /// A port or the admin socket could not be bound.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The principals file could not be used.
    #[error(transparent)]
    Principals(#[from] PrincipalsError),
    /// The configuration directory cannot be watched.
    #[error("--config-dir: {0}")]
    Sources(#[from] WatchError),
    /// The operating system refused another operation.
    #[error("the controller cannot start: {0}")]
    Io(#[from] io::Error),
}
