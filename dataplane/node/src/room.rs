//! One pod as the workers serve it: its namespace, its identity, its limits, and where its captured connections were going. Made and
//! ended by [`crate::pods`]; listened in by [`crate::accept`].

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use canal_kit::limits::Limit;
use canal_kit::metrics::Registry;
use canal_kit::sys::{self, Netns, SysError};
use canal_kit::tls::{ClientIdentity, Credential, ServerIdentity};
use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use canal_model::trust::KeyPolicy;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::authorization::{Basis, PodPolicy};
use crate::capture::{Mode, OriginSource};
use crate::config::Limits;
use crate::packets::PacketCounts;
use crate::plaintext::Plaintext;
use crate::pod::Pod;
use crate::telemetry::Party;
use crate::unauthenticated::UnauthenticatedConnections;

/// A pod's first connections may come before its certificate, or before all that the node starts from; they wait so long for each.
pub(crate) const IDENTITY_PATIENCE: Duration = Duration::from_secs(10);

/// A pod's proofs of who it is; there once its tenant is known.
#[derive(Debug)]
pub struct RoomIdentity {
    pub trust_domain: TrustDomain,
    /// As the tenant wants them.
    pub keys: KeyPolicy,
    pub identity: Identity,
    /// Where its certificate comes to, if its key is here; else key servers have it.
    pub credential: Option<Credential>,
    pub client: ClientIdentity,
    pub server: ServerIdentity,
}

/// A pod with its place on this node.
#[derive(Debug)]
pub struct Room {
    pub pod: ArcSwap<Pod>,
    /// As metrics and logs name it.
    pub party: ArcSwap<Party>,
    pub netns: Arc<Netns>,
    cookie: u64,
    origins: OriginSource,
    pub mode: Mode,
    pub identity: ArcSwapOption<RoomIdentity>,
    identified: Notify,
    pub outbound: Limit,
    pub inbound: Limit,
    pub hbone: Limit,
    /// Of those, the ones whose peer has not authenticated.
    pub unauthenticated: UnauthenticatedConnections,
    pub plain: Limit,
    /// Who may come in.
    pub policy: ArcSwap<PodPolicy>,
    /// What that was made of.
    pub basis: ArcSwapOption<Basis>,
    pub plaintext: Plaintext,
    /// What became of the pod's packets that the mesh does not carry.
    pub packets: PacketCounts,
    /// Listeners open now, over all workers.
    listeners: AtomicU64,
}

impl Room {
    /// The room of a pod that was captured.
    pub fn new(pod: Pod, party: Party, mode: Mode, origins: OriginSource, limits: &Limits, registry: &Registry) -> Result<Self, SysError> {
        let netns = Netns::open(&pod.netns)?;
        let refused = |source| SysError::Netns { path: pod.netns.clone(), source };
        let cookie = netns.enter(|| sys::netns_cookie(std::net::UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?.as_fd()))?.map_err(refused)?;
        Ok(Self {
            pod: ArcSwap::from_pointee(pod),
            party: ArcSwap::from_pointee(party),
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
            plaintext: Plaintext::default(),
            packets: PacketCounts::default(),
            listeners: AtomicU64::new(0),
        })
    }

    /// Its tenant is known now, or wants it otherwise.
    pub fn identify(&self, identity: Arc<RoomIdentity>) {
        self.identity.store(Some(identity));
        self.identified.notify_waiters();
    }

    /// Its identity as soon as it has one; `None`: not within [`IDENTITY_PATIENCE`].
    pub(crate) async fn identity(&self) -> Option<Arc<RoomIdentity>> {
        let identified = async {
            loop {
                let identified = self.identified.notified();
                if let Some(identity) = self.identity.load_full() {
                    return identity;
                }
                identified.await;
            }
        };
        tokio::time::timeout(IDENTITY_PATIENCE, identified).await.ok()
    }

    /// Where an accepted connection was going, and forgets it.
    pub fn origin(&self, accepted: &TcpStream, peer: SocketAddr) -> Option<SocketAddr> {
        self.origins.take(self.cookie, accepted, peer)
    }

    /// Listeners open now, but for those of plaintext.
    pub fn listeners(&self) -> u64 {
        self.listeners.load(Relaxed)
    }

    /// A worker listens for the pod's own connections, or for those of the mesh.
    pub(crate) fn opened(&self) {
        self.listeners.fetch_add(1, Relaxed);
    }

    /// It does not any more.
    pub(crate) fn closed(&self) {
        self.listeners.fetch_sub(1, Relaxed);
    }
}
