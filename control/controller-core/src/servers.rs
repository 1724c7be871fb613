//! The sockets of the controller and the services on them: one TLS listener for data planes and
//! operators, and the admin endpoints. It builds each service from the handles that it needs. Start
//! at [`spawn`].

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use canal_access::admission::{self, Sources};
use canal_access::{ControlListener, ListenError, UnreadAnswers};
use canal_ca::ControllerCa;
use canal_fleet::FleetService;
use canal_json_api::{JsonApi, JsonApiLimits};
use canal_operators_api::{
    AdminAcceptor, AdminEndpoint, AdminService, ConditionsService, ObservationService,
    PagesContext, admin_server,
};
use canal_southbound::{DiscoveryContext, DiscoveryService};
use canal_trust::CertificateService;
use canal_wire::api::admin_server::AdminServer;
use canal_wire::citadel::istio_certificate_service_server::IstioCertificateServiceServer;
use canal_wire::discovery::aggregated_discovery_service_server::AggregatedDiscoveryServiceServer;
use canal_wire::fleet::fleet_server::FleetServer;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;

use crate::config::{ControllerConfig, ControllerError, ControllerLimits};
use crate::parts::ControllerParts;

/// The sockets that the controller listens on. They are bound before any task starts, so that a
/// port in use ends the process at once.
pub(crate) struct ControllerPorts {
    /// TLS listener for data planes and operators.
    listener: ControlListener,
    /// Admin socket in the data directory.
    socket: AdminAcceptor,
    admin: Option<TcpListener>,
    metrics: Option<TcpListener>,
}

impl ControllerPorts {
    /// Binds all of the sockets.
    ///
    /// # Errors
    /// A [`ControllerError`] that names the address that cannot be bound.
    pub(crate) async fn bind(
        config: &ControllerConfig,
        infra: Arc<ControllerCa>,
    ) -> Result<Self, ControllerError> {
        Ok(Self {
            listener: ControlListener::bind(config.listen, infra, config.limits.handshake).await?,
            socket: admin_server::bind_socket(&config.data_dir)?,
            admin: bind_endpoint(config.admin, "--admin-addr").await?,
            metrics: bind_endpoint(config.metrics, "--metrics-addr").await?,
        })
    }

    /// Returns the address of the TLS listener.
    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.address()
    }

    /// Returns the address of the admin port, if there is one.
    pub(crate) fn admin_address(&self) -> io::Result<Option<SocketAddr>> {
        self.admin.as_ref().map(TcpListener::local_addr).transpose()
    }

    /// Returns the address of the metrics port, if there is one.
    pub(crate) fn metrics_address(&self) -> io::Result<Option<SocketAddr>> {
        self.metrics
            .as_ref()
            .map(TcpListener::local_addr)
            .transpose()
    }
}

/// Binds the listener of a TCP admin endpoint, if it has an address.
async fn bind_endpoint(
    address: Option<SocketAddr>,
    flag: &'static str,
) -> Result<Option<TcpListener>, ListenError> {
    match address {
        Some(address) => Ok(Some(admin_server::bind(address, flag).await?)),
        None => Ok(None),
    }
}

/// Serves all sockets until the controller stops.
pub(crate) fn spawn(
    tasks: &TaskTracker,
    ports: ControllerPorts,
    parts: ControllerParts,
    limits: &ControllerLimits,
    svid_seconds: u64,
) {
    let ControllerPorts {
        listener,
        socket,
        admin,
        metrics,
    } = ports;
    let pages = Arc::new(PagesContext {
        catalog: parts.catalog.clone(),
        subscribers: parts.subscribers.clone(),
        fleet: parts.fleet.clone(),
        trust: parts.trust.clone(),
        health: parts.health.clone(),
        limits: parts.limits.clone(),
        metrics: parts.metrics.clone(),
        stopping: parts.stopping.clone(),
    });
    tasks.spawn(admin_server::serve(
        socket,
        AdminEndpoint::Socket,
        pages.clone(),
    ));
    for (listener, endpoint) in [
        (admin, AdminEndpoint::Admin),
        (metrics, AdminEndpoint::Metrics),
    ] {
        // Both listeners are optional; the Unix socket is always served.
        if let Some(listener) = listener {
            tasks.spawn(admin_server::serve(
                AdminAcceptor::Tcp(listener),
                endpoint,
                pages.clone(),
            ));
        }
    }
    let server = ControllerServices::of(&parts, limits, svid_seconds);
    tasks.spawn(serve(listener, parts, server, limits.clone()));
}

/// The gRPC services for data planes and operators.
struct ControllerServices {
    southbound: DiscoveryService,
    certificates: CertificateService,
    fleet: FleetService,
    admin: Arc<AdminService>,
}

impl ControllerServices {
    fn of(parts: &ControllerParts, limits: &ControllerLimits, svid_seconds: u64) -> Self {
        let discovery = DiscoveryContext {
            catalog: parts.catalog.clone(),
            clients: parts.clients.clone(),
            subscribers: parts.subscribers.clone(),
            metrics: parts.metrics.clone(),
            subscription_bytes: parts.limits.subscription_bytes.clone(),
            session: limits.session(),
            store: parts.store.id(),
            stopping: parts.stopping.clone(),
        };
        Self {
            southbound: DiscoveryService {
                shared: Arc::new(discovery),
            },
            certificates: CertificateService {
                catalog: parts.catalog.clone(),
                trust: parts.trust.clone(),
                metrics: parts.metrics.clone(),
                svid_seconds,
                tenant_rate: limits.tenant_rate,
                provider_rate: limits.provider_rate,
            },
            fleet: FleetService {
                fleet: parts.fleet.clone(),
                catalog: parts.catalog.clone(),
                principals: parts.clients.principals(),
                subscribers: parts.subscribers.clone(),
                store: parts.store.clone(),
                metrics: parts.metrics.clone(),
            },
            admin: Arc::new(AdminService {
                catalog: parts.catalog.clone(),
                changes: parts.changes.clone(),
                health: parts.health.clone(),
                subscribers: parts.subscribers.clone(),
                observations: parts.observations.clone(),
                conditions: ConditionsService::new(
                    parts.catalog.clone(),
                    parts.fleet.clone(),
                    parts.limits.clone(),
                    parts.metrics.clone(),
                ),
                fleet: parts.fleet.clone(),
                trust: parts.trust.clone(),
                store: parts.store.clone(),
                limits: parts.limits.clone(),
                metrics: parts.metrics.clone(),
            }),
        }
    }
}

/// Accepts connections and serves the gRPC services until the controller stops.
async fn serve(
    listener: ControlListener,
    parts: ControllerParts,
    services: ControllerServices,
    limits: ControllerLimits,
) {
    // One place is enough: the task of a handshake waits with its connection until the server takes
    // it.
    let (sender, connections) = mpsc::channel(1);
    // The owners of source addresses must be known before the first connection is accepted.
    let catalogs = parts.catalog.clone();
    let (sources_now, sources) = watch::channel(Arc::new(Sources::of(&catalogs.borrow().clone())));
    tokio::spawn(admission::follow(catalogs, sources_now));
    let accounts = (parts.limits.clone(), sources);
    tokio::spawn(listener.run(
        sender,
        parts.metrics.clone(),
        accounts,
        parts.stopping.clone(),
    ));
    let answers = UnreadAnswers::new(parts.metrics.clone());
    let json = json_api(&services.admin, &parts, &limits, &answers);
    let admin = AdminServer::from_arc(services.admin)
        .max_decoding_message_size(limits.request_bytes)
        .max_encoding_message_size(canal_wire::MESSAGE_BYTES_MAX);
    let southbound = AggregatedDiscoveryServiceServer::new(services.southbound)
        .max_decoding_message_size(limits.request_bytes)
        .max_encoding_message_size(canal_wire::MESSAGE_BYTES_MAX);
    // A CSR has at most CSR_BYTES_MAX (16 KiB), far below tonic's own maximum of 4 MiB.
    let certificates = IstioCertificateServiceServer::new(services.certificates);
    let fleet = FleetServer::new(services.fleet).max_decoding_message_size(limits.request_bytes);
    let observations = ObservationService::server(&parts.observations);
    let clients = &parts.clients;
    let server = Server::builder()
        .http2_keepalive_interval(Some(limits.ping.0))
        .http2_keepalive_timeout(Some(limits.ping.1))
        .add_service(InterceptedService::new(southbound, clients.interceptor()))
        .add_service(InterceptedService::new(certificates, clients.interceptor()))
        .add_service(InterceptedService::new(fleet, clients.interceptor()))
        .add_service(InterceptedService::new(observations, clients.interceptor()))
        .add_service(InterceptedService::new(
            answers.counted(admin),
            answers.interceptor(clients.interceptor()),
        ))
        // The pages for browsers authenticate by themselves, with the same interceptor.
        .add_service(answers.counted(json));
    let stopping = parts.stopping.clone();
    let done = server.serve_with_incoming_shutdown(ReceiverStream::new(connections), async move {
        stopping.cancelled().await
    });
    // The task ends with its server, so nothing is left but to report the error.
    if let Err(e) = done.await {
        tracing::error!(error = %e, "controller: the gRPC server ended");
    }
}

/// Creates the HTTP/JSON face of the operators' API, with the authentication and the limits of the
/// gRPC services.
fn json_api(
    admin: &Arc<AdminService>,
    parts: &ControllerParts,
    limits: &ControllerLimits,
    answers: &UnreadAnswers,
) -> JsonApi<AdminService, impl Interceptor + Clone + Send + Sync + 'static + use<>> {
    let limits = JsonApiLimits {
        request_bytes: limits.request_bytes,
        response_bytes: canal_wire::MESSAGE_BYTES_MAX,
    };
    let metrics = parts.metrics.clone();
    JsonApi::new(
        admin.clone(),
        answers.interceptor(parts.clients.interceptor()),
        limits,
        move |refusal| metrics.refuse(refusal.name()),
    )
}
