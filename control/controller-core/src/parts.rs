//! Opens the store and the CA, and builds the parts of the controller on them. Only this
//! crate knows all parts; each gets the handles that it needs. No task is started here. Start at
//! [`RoomHandles::build`].

use std::path::Path;
use std::sync::Arc;

use canal_access::{Authenticator, Principals, TenantLimits, now_seconds};
use canal_ca::{ControllerCa, ControllerCaError};
use canal_catalog::Catalog;
use canal_controller_metrics::ControllerMetrics;
use canal_fleet::FleetHandle;
use canal_operators_api::ObservationContext;
use canal_policy_sources::{Basis, Commit, PendingChanges, Preparer, SourceHealth};
use canal_southbound::Subscribers;
use canal_store::{Store, StoreKey};
use canal_trust::{FetchClient, TrustAuthorities};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::config::{ControllerConfig, ControllerError};

/// Default file of TLS roots for https, where Debian and most other distributions install it.
const TLS_ROOTS: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The handles of all parts of the controller. Each part gets only those that it needs.
#[derive(Clone)]
pub(crate) struct ControllerParts {
    pub(crate) catalog: watch::Receiver<Arc<Catalog>>,
    pub(crate) clients: Authenticator,
    pub(crate) store: Arc<Store>,
    pub(crate) trust: Arc<TrustAuthorities>,
    pub(crate) subscribers: Arc<Subscribers>,
    pub(crate) observations: Arc<ObservationContext>,
    pub(crate) fleet: Arc<FleetHandle>,
    pub(crate) changes: Arc<PendingChanges>,
    pub(crate) health: Arc<SourceHealth>,
    pub(crate) limits: Arc<TenantLimits>,
    pub(crate) metrics: Arc<ControllerMetrics>,
    /// Canceled when the controller is to stop.
    pub(crate) stopping: CancellationToken,
}

/// Seals the key of the controller's own root in the same way as the keys in the store.
struct InfraSealer<'k>(&'k StoreKey);

/// Context of the sealed root key: it can only be unsealed with the same context.
const INFRA_SEAL_CONTEXT: &str = "infra/root.key";

impl canal_ca::KeySealer for InfraSealer<'_> {
    fn seal(&self, plain: &[u8]) -> Result<Vec<u8>, String> {
        self.0
            .seal(plain, INFRA_SEAL_CONTEXT)
            .map_err(|e| e.to_string())
    }
    fn unseal(&self, sealed: &[u8]) -> Result<zeroize::Zeroizing<Vec<u8>>, String> {
        self.0
            .unseal(sealed, INFRA_SEAL_CONTEXT)
            .map_err(|e| e.to_string())
    }
}

/// Opens the CA of Canal's own components. Its key is sealed if the store has a key for that.
fn open_infra(
    config: &ControllerConfig,
    key: Option<&StoreKey>,
) -> Result<ControllerCa, ControllerCaError> {
    let sealer = key.map(InfraSealer);
    let sealer = sealer
        .as_ref()
        .map(|sealer| sealer as &dyn canal_ca::KeySealer);
    ControllerCa::open_sealed(&config.infra_dir, now_seconds(), sealer)
}

/// Store, CA and HTTP client, which are opened before the parts that use them are built.
pub(crate) struct OpenedFiles {
    pub(crate) infra: Arc<ControllerCa>,
    pub(crate) store: Arc<Store>,
    /// HTTP client for external CAs and key sets.
    pub(crate) client: FetchClient,
}

impl OpenedFiles {
    /// Opens the store and the CA of Canal's own components.
    ///
    /// # Errors
    /// A [`ControllerError`] that names what cannot be used.
    pub(crate) fn open(config: &ControllerConfig) -> Result<Self, ControllerError> {
        let key = config
            .trust
            .key_file
            .as_deref()
            .map(StoreKey::read)
            .transpose()?;
        let infra = Arc::new(open_infra(config, key.as_ref())?);
        let store = Arc::new(Store::open_with(
            &config.data_dir,
            config.limits.store,
            key,
        )?);
        let client = FetchClient::of_file(
            config
                .trust
                .tls_roots
                .as_deref()
                .unwrap_or(Path::new(TLS_ROOTS)),
        )?;
        Ok(Self {
            infra,
            store,
            client,
        })
    }
}

impl ControllerParts {
    /// Builds the parts of the controller. `catalog` and `principals` change while it runs.
    ///
    /// # Errors
    /// The store cannot be read, or the CA could not issue.
    pub(crate) fn build(
        config: &ControllerConfig,
        files: &OpenedFiles,
        catalog: watch::Receiver<Arc<Catalog>>,
        principals: watch::Receiver<Arc<Principals>>,
        (basis, commits): (watch::Receiver<Arc<Basis>>, mpsc::Sender<Commit>),
    ) -> Result<(Self, Arc<Preparer>), ControllerError> {
        let store = files.store.clone();
        let metrics = Arc::new(ControllerMetrics::default());
        let limits = Arc::new(TenantLimits::new(&config.limits.capacities()));
        let preparer = Arc::new(Preparer {
            store: store.clone(),
            metrics: metrics.clone(),
            limits: limits.clone(),
            compilers: Default::default(),
        });
        let components = files
            .infra
            .of_components()
            .map_err(|e| ControllerCaError::Signing(e.to_string()))?;
        let issued = limits.certificates.clone();
        let trust = TrustAuthorities::open(
            store.clone(),
            metrics.clone(),
            components,
            &config.trust,
            &files.client,
            issued,
        )?;
        let clients = Authenticator::new(principals, metrics.clone());
        let stopping = CancellationToken::new();
        let observations = ObservationContext {
            catalog: catalog.clone(),
            clients: clients.clone(),
            registry: Arc::default(),
            limit: limits.observations.clone(),
            metrics: metrics.clone(),
            stopping: stopping.clone(),
        };
        let parts = Self {
            catalog,
            clients,
            trust: Arc::new(trust),
            subscribers: Subscribers::new(limits.streams.clone()),
            observations: Arc::new(observations),
            fleet: Arc::new(FleetHandle::open(&store, config.limits.fleet)?),
            changes: PendingChanges::new(
                preparer.clone(),
                basis,
                commits,
                config.limits.compile_workers,
            ),
            health: Arc::default(),
            store,
            limits,
            metrics,
            stopping,
        };
        Ok((parts, preparer))
    }
}
