//! [`PodContext`]: a pod as the workers serve it, with its namespace, identity, limits and original destinations.
//!
//! [`crate::pod_reconciler`] creates and ends it; [`crate::accept`] listens in it.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use canal_identity::{ClientIdentity, ServerIdentity};
use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use canal_model::trust::KeyPolicy;
use canal_net::sys::{self, Netns, SysError};
use canal_offload::delivery::Delivery;
use canal_runtime::limits::Limit;
use canal_runtime::metrics::Registry;
use canal_tls::Credential;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::authorization::{PodPolicy, PolicySources};
use crate::capture::{CaptureMode, OriginSource};
use crate::config::PodLimits;
use crate::packets::PacketCounts;
use crate::plaintext_state::PlaintextState;
use crate::pod::LocalPod;
use crate::telemetry::EndpointLabels;
use crate::unauthenticated::UnauthenticatedConnections;

/// Maximum time that a connection waits for the pod's certificate, and before that for the first
/// snapshot. The first connections may precede both. One certificate request may take as long.
pub(crate) const IDENTITY_TIMEOUT: Duration = Duration::from_secs(10);

/// Credentials of a pod, which exist once its tenant is known.
#[derive(Debug)]
pub struct PodIdentity {
    pub trust_domain: TrustDomain,
    /// Key policy of the tenant, which the credentials follow.
    pub keys: KeyPolicy,
    pub identity: Identity,
    /// Receives the certificate if the key is on this node; `None`: the key is in key servers.
    pub credential: Option<Credential>,
    pub client: ClientIdentity,
    pub server: ServerIdentity,
}

/// One pod with the state that its connections share.
#[derive(Debug)]
pub struct PodContext {
    pub pod: ArcSwap<LocalPod>,
    /// Labels of the pod in metrics and logs.
    pub labels: ArcSwap<EndpointLabels>,
    pub netns: Arc<Netns>,
    cookie: u64,
    origins: OriginSource,
    pub mode: CaptureMode,
    pub identity: ArcSwapOption<PodIdentity>,
    identified: Notify,
    pub outbound: Limit,
    pub inbound: Limit,
    pub hbone: Limit,
    /// HBONE connections whose peer has not authenticated yet.
    pub unauthenticated: UnauthenticatedConnections,
    pub plain: Limit,
    /// Policies that decide on connections into the pod.
    pub policy: ArcSwap<PodPolicy>,
    /// Sources from which `policy` was compiled.
    pub basis: ArcSwapOption<PolicySources>,
    pub plaintext: PlaintextState,
    /// Client addresses from which the pod's applications can be dialed.
    pub delivery: Delivery,
    /// Counts of the pod's packets that the mesh does not carry.
    pub packets: PacketCounts,
    /// Open listeners on all workers, without those for plaintext.
    listeners: AtomicU64,
}

impl PodContext {
    /// Creates the context of a captured pod.
    ///
    /// # Errors
    /// The pod's network namespace cannot be opened, or its cookie cannot be read.
    pub fn new(
        pod: LocalPod,
        labels: EndpointLabels,
        mode: CaptureMode,
        origins: OriginSource,
        limits: &PodLimits,
        registry: &Registry,
    ) -> Result<Self, SysError> {
        let netns = Netns::open(&pod.netns)?;
        let refused = |source| SysError::Netns {
            path: pod.netns.clone(),
            source,
        };
        let cookie = netns
            .enter(|| {
                sys::netns_cookie(std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?.as_fd())
            })?
            .map_err(refused)?;
        Ok(Self {
            pod: ArcSwap::from_pointee(pod),
            labels: ArcSwap::from_pointee(labels),
            netns: Arc::new(netns),
            cookie,
            origins,
            mode,
            identity: ArcSwapOption::empty(),
            identified: Notify::new(),
            outbound: Limit::new(registry, "pod_outbound_connections", limits.outbound),
            inbound: Limit::new(registry, "pod_inbound_tunnels", limits.inbound),
            hbone: Limit::new(registry, "pod_hbone_connections", limits.hbone),
            unauthenticated: UnauthenticatedConnections::new(registry, limits.unauthenticated()),
            plain: Limit::new(registry, "pod_plaintext_connections", limits.inbound),
            policy: ArcSwap::default(),
            basis: ArcSwapOption::empty(),
            plaintext: PlaintextState::default(),
            delivery: Delivery::default(),
            packets: PacketCounts::default(),
            listeners: AtomicU64::new(0),
        })
    }

    /// Sets the identity when the tenant becomes known or changes its keys or trust domain, and
    /// wakes waiting connections.
    pub fn identify(&self, identity: Arc<PodIdentity>) {
        self.identity.store(Some(identity));
        self.identified.notify_waiters();
    }

    /// Returns the identity as soon as there is one; `None`: not within [`IDENTITY_TIMEOUT`].
    pub(crate) async fn identity(&self) -> Option<Arc<PodIdentity>> {
        let identified = async {
            loop {
                // Registered before the check, so that a notification in between is not lost.
                let identified = self.identified.notified();
                if let Some(identity) = self.identity.load_full() {
                    return identity;
                }
                identified.await;
            }
        };
        tokio::time::timeout(IDENTITY_TIMEOUT, identified)
            .await
            .ok()
    }

    /// Takes the original destination of an accepted connection.
    pub fn origin(&self, accepted: &TcpStream, peer: SocketAddr) -> Option<SocketAddr> {
        self.origins.take(self.cookie, accepted, peer)
    }

    /// Returns the number of open listeners on all workers, without those for plaintext.
    pub fn listeners(&self) -> u64 {
        self.listeners.load(Relaxed)
    }

    /// Counts a listener that a worker opened for the pod's own connections or for those of the
    /// mesh.
    pub(crate) fn count_listener(&self) {
        self.listeners.fetch_add(1, Relaxed);
    }

    /// Counts that a worker closed such a listener.
    pub(crate) fn closed(&self) {
        self.listeners.fetch_sub(1, Relaxed);
    }
}
