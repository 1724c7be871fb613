//! One pod as the workers serve it: its namespace, its identity, its limits, and where its captured connections were going. Made and
//! ended by [`crate::pods`].

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use canal_kit::backoff::Backoff;
use canal_kit::drain::Drain;
use canal_kit::limits::Limit;
use canal_kit::metrics::Registry;
use canal_kit::sys::{self, ListenOptions, Netns, SysError};
use canal_kit::tls::{ClientIdentity, Credential, ServerIdentity};
use canal_model::ids::TrustDomain;
use canal_wire::hbone::{HBONE_PORT, OUTBOUND_PORT};
use tokio::net::{TcpListener, TcpStream};

use crate::capture::{Mode, OriginSource};
use crate::config::Limits;
use crate::pod::Pod;
use crate::telemetry::Party;
use crate::worker::Local;
use crate::{inbound, outbound};

/// A pod's proofs of who it is; there once its tenant is known.
#[derive(Debug)]
pub struct RoomIdentity {
    pub trust_domain: TrustDomain,
    pub credential: Credential,
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
    pub outbound: Limit,
    pub inbound: Limit,
    pub hbone: Limit,
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
            outbound: Limit::new(registry, "pod_outbound_connections", limits.outbound),
            inbound: Limit::new(registry, "pod_inbound_tunnels", limits.inbound),
            hbone: Limit::new(registry, "pod_hbone_connections", limits.hbone),
            listeners: AtomicU64::new(0),
        })
    }

    /// Where an accepted connection was going, and forgets it.
    pub fn origin(&self, accepted: &TcpStream, peer: SocketAddr) -> Option<SocketAddr> {
        self.origins.take(self.cookie, accepted, peer)
    }

    /// Listeners open now.
    pub fn listeners(&self) -> u64 {
        self.listeners.load(Relaxed)
    }
}

/// What a listener's connections are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Door {
    Outbound,
    Inbound,
}

/// Where a pod is listened to. Capture rewrites to loopback only, so nothing from outside reaches the outbound door.
const DOORS: [(Door, SocketAddr); 4] = [
    (Door::Outbound, SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), OUTBOUND_PORT)),
    (Door::Outbound, SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::LOCALHOST), OUTBOUND_PORT)),
    (Door::Inbound, SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), HBONE_PORT)),
    (Door::Inbound, SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::UNSPECIFIED), HBONE_PORT)),
];

/// Opens a worker's four listeners of a pod and serves them until the drain.
pub(crate) fn serve(local: &Rc<Local>, room: &Arc<Room>, drain: &Drain) {
    for (door, address) in DOORS {
        local.spawn(keep_open(local.clone(), room.clone(), door, address, drain.clone()));
    }
}

/// A listener that cannot be opened is tried again: the address may be held by an application that has not stopped yet, and a pod that
/// nobody serves is refused, not open.
async fn keep_open(local: Rc<Local>, room: Arc<Room>, door: Door, address: SocketAddr, drain: Drain) {
    let options = ListenOptions { reuse_port: true, v6_only: true, ..ListenOptions::default() };
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(5));
    loop {
        match sys::listen(Some(&room.netns), address, &options) {
            Ok(listener) => {
                room.listeners.fetch_add(1, Relaxed);
                accept(&local, &room, door, listener, &drain).await;
                room.listeners.fetch_sub(1, Relaxed);
                return;
            }
            // A pod without IPv6 has nothing to listen to there, and nothing to capture.
            Err(SysError::Socket { source, .. }) if address.is_ipv6() && has_no_ipv6(&source) => return,
            Err(error) => {
                local.listen_failures.inc();
                tracing::warn!(pod = room.pod.load().uid, %error, "cannot listen in the pod; trying again");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.next_wait()) => {}
            () = drain.draining() => return,
        }
    }
}

fn has_no_ipv6(e: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let code = Errno::from_io_error(e);
    code == Some(Errno::AFNOSUPPORT) || code == Some(Errno::ADDRNOTAVAIL)
}

/// The first phase of both roads.
async fn accept(local: &Rc<Local>, room: &Arc<Room>, door: Door, listener: TcpListener, drain: &Drain) {
    loop {
        let accepted = tokio::select! {
            biased;
            () = drain.draining() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => admit(local, room, door, stream, peer, drain),
            Err(error) => {
                // Out of descriptors or memory: others must end first. The connection waits in the kernel.
                local.accept_failures.inc();
                tracing::warn!(pod = room.pod.load().uid, %error, "cannot accept");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
    // Whoever completed the handshake before the drain is served: closing the listener would reset them.
    let waiting = std::future::poll_fn(|cx| {
        let mut found = Vec::new();
        while let std::task::Poll::Ready(Ok(c)) = listener.poll_accept(cx) {
            found.push(c);
        }
        std::task::Poll::Ready(found)
    });
    for (stream, peer) in waiting.await {
        admit(local, room, door, stream, peer, drain);
    }
}

fn admit(local: &Rc<Local>, room: &Arc<Room>, door: Door, stream: TcpStream, peer: SocketAddr, drain: &Drain) {
    let (local_, room, drain) = (local.clone(), room.clone(), drain.clone());
    match door {
        Door::Outbound => local.spawn(outbound::carry(local_, room, stream, peer, drain)),
        Door::Inbound => local.spawn(inbound::greet(local_, room, stream, peer, drain)),
    }
}
