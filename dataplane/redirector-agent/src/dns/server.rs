//! The DNS service: opens the UDP socket for all tenants, which `datagrams` serves, and serves the
//! TCP connections that the gateway passes on. It does not build responses.
//!
//! The local address of a query determines its tenant, and is the source of the response.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use canal_model::ids::{AzName, ServiceId, TenantName};
use canal_model::program::{Resource, ResourceKind};
use canal_model::share::ShareKind;
use canal_runtime::drain::{DrainObserver, DrainWatcher};
use canal_runtime::limits::show_shares;
use canal_runtime::metrics::{CounterFamily, MetricFamily, Registry};
use canal_runtime::{RevocationOrder, ShareHolder, TenantLimit, TenantLimitConfig};
use canal_southbound_client::{ResourceState, Update, UpdateSource};
use quinn_udp::{UdpSockRef, UdpSocketState};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::oneshot;

use super::answer::{DnsReply, DnsTransport, decide_reply};
use super::datagrams::DatagramService;
use super::zone::{DnsZones, concerns, decide_zones};

/// Timeout of a TCP client that sends nothing, or reads its response too slowly. RFC 7766 §6.2.3
/// recommends some seconds.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// TCP connections at once, at most. The tenants share them. Clients use TCP only where UDP failed,
/// or for long responses, which a service's addresses are not. Nobody measured the number.
const CONNECTIONS_MAX: u64 = 256;
/// Size in bytes that the kernel's queue of received datagrams should have. It has to hold what
/// arrives between two turns of the task. Nobody measured the value.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Highest descriptor to which the UDP socket is moved: the kernel's table of a process's files
/// needs 8 bytes for each. That is 512 KiB.
const NUMBER_MAX: i32 = 0xffff;

/// The UDP socket could not be opened.
#[derive(Debug, thiserror::Error)]
#[error(
    "DNS on UDP {address}: {what}: {source}; fix: stop another DNS server on this address, or give the process CAP_NET_BIND_SERVICE"
)]
pub struct DnsError {
    address: SocketAddr,
    what: &'static str,
    source: io::Error,
}

/// A running DNS service. Clones share it.
#[derive(Clone)]
pub struct DnsServer {
    inner: Arc<DnsState>,
}

pub(super) struct DnsState {
    az: AzName,
    zones: ArcSwap<DnsZones>,
    pub(super) socket: UdpSocket,
    queries: CounterFamily,
    /// Questions over UDP that were dropped, by tenant.
    dropped: CounterFamily,
    connections: TenantLimit,
    traffic: DrainObserver,
    runtime: tokio::runtime::Handle,
}

impl DnsServer {
    /// Opens the UDP socket, and answers queries until `drain` is forced. The port must be 53,
    /// because responses carry it. Connections that wait for a query are closed when `traffic`
    /// drains.
    ///
    /// # Errors
    /// The socket cannot be opened, bound or registered.
    pub fn start(
        address: SocketAddr,
        az: AzName,
        registry: &Registry,
        drain: &DrainWatcher,
        traffic: DrainObserver,
    ) -> Result<Self, DnsError> {
        let at = |what| {
            move |source| DnsError {
                address,
                what,
                source,
            }
        };
        let socket = open(address).map_err(at("opening the socket"))?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket))
            .map_err(at("requesting the destination addresses"))?;
        let socket = UdpSocket::from_std(socket.into()).map_err(at("registering"))?;
        let family = MetricFamily::new(
            "canal_dns_queries_total",
            "DNS queries, by transport and result.",
            &["transport", "result"],
        );
        let dropped = "DNS questions over UDP that were dropped because a tenant had too many, by tenant and reason.";
        let dropped = MetricFamily::new(
            "canal_dns_dropped_questions_total",
            dropped,
            &["tenant", "reason"],
        );
        // An old connection has most likely had its answers; a new one still waits for them.
        let (kind, revocation_order) = (ShareKind::DnsConnections, RevocationOrder::OldestFirst);
        let connections = TenantLimit::new(TenantLimitConfig {
            kind,
            capacity: CONNECTIONS_MAX,
            // Only clients of tenants connect here, so the provider needs no reserve.
            reserve: 0,
            revocation_order,
        });
        show_shares(registry, &connections);
        let inner = Arc::new(DnsState {
            az,
            zones: ArcSwap::default(),
            socket,
            queries: registry.counters(family),
            dropped: registry.counters(dropped),
            connections,
            traffic,
            runtime: tokio::runtime::Handle::current(),
        });
        // Clients still send queries here while the drain lasts, so its begin does not stop the
        // service.
        let (serving, end) = (DatagramService::new(inner.clone(), state), drain.watcher());
        tokio::spawn(async move {
            tokio::select! {
                () = serving.run() => {}
                () = end.forced() => {}
            }
        });
        Ok(Self { inner })
    }

    /// Duplicates the UDP socket for socket steering.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn socket_fd(&self) -> io::Result<OwnedFd> {
        self.inner.socket.as_fd().try_clone_to_owned()
    }

    /// Returns the address of the UDP socket.
    ///
    /// # Errors
    /// The kernel cannot report the address.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.inner.socket.local_addr()
    }

    /// Applies a state to the zones and to the tenants' shares, if it concerns them.
    pub fn apply(&self, update: &Update, state: &ResourceState) {
        let removed = |k: &ResourceKind| {
            matches!(
                k,
                ResourceKind::Address | ResourceKind::Service | ResourceKind::Table
            )
        };
        // A first state lists everything that exists, without removals, so it is always applied.
        let first =
            self.inner.zones.load().generation == 0 || update.origin == UpdateSource::Snapshot;
        if first
            || update.upserts.iter().any(|r| concerns(r))
            || update.removals.iter().any(|(k, _)| removed(k))
        {
            let all = [
                ResourceKind::Address,
                ResourceKind::Service,
                ResourceKind::Table,
            ]
            .into_iter()
            .flat_map(|kind| state.of(kind));
            self.inner
                .zones
                .store(Arc::new(decide_zones(all, update.generation.0)));
        }
        let is_tenant = |r: &Arc<Resource>| matches!(**r, Resource::Tenant(_));
        if first
            || update.upserts.iter().any(is_tenant)
            || update
                .removals
                .iter()
                .any(|(kind, _)| *kind == ResourceKind::Tenant)
        {
            self.inner
                .connections
                .set_shares(state.of(ResourceKind::Tenant).filter_map(
                    |resource| match &**resource {
                        Resource::Tenant(tenant) => Some((&tenant.name, &tenant.shares)),
                        _ => None,
                    },
                ));
        }
    }

    /// Serves a TCP connection that arrived at port 53 of an address of `tenant`. It may be called
    /// on any thread. The future resolves when the connection has ended; dropping it ends the
    /// connection.
    pub fn take(
        &self,
        stream: std::net::TcpStream,
        tenant: &TenantName,
    ) -> impl Future<Output = ()> + Send + use<> {
        let inner = self.inner.clone();
        // A silent connection gives way to a new one: the oldest of the tenant itself, or of the
        // tenant with the most.
        let permit = inner
            .connections
            .take_replacing(&ShareHolder::Tenant(tenant.clone()), 1);
        let (mut open, ended) = oneshot::channel::<()>();
        match permit {
            Err(_) => inner.count("tcp", "too_many"),
            Ok(permit) => drop(inner.runtime.clone().spawn(async move {
                let served = stream
                    .set_nonblocking(true)
                    .and_then(|()| TcpStream::from_std(stream));
                let Ok(stream) = served else { return };
                tokio::select! {
                    // A query that has just arrived is answered first.
                    biased;
                    () = inner.connection(stream) => {}
                    () = permit.revoked() => inner.count("tcp", "displaced"),
                    () = open.closed() => {}
                }
            })),
        }
        async move {
            // The sender is dropped when the connection has ended.
            let _ = ended.await;
        }
    }
}

/// Opens a socket for both families that may send from addresses which no device has.
fn open(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::DGRAM,
        Some(Protocol::UDP),
    )?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
        socket.set_freebind_v6(true)?;
    } else {
        socket.set_freebind_v4(true)?;
    }
    // A process without the capability for more gets what the system allows.
    if rustix::net::sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER).is_err() {
        socket.set_recv_buffer_size(RECEIVE_BUFFER)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(dying_first(socket))
}

/// Moves the socket to a descriptor above those of sessions. A killed process closes its
/// descriptors from the highest to the lowest, which takes long with many sessions. A query that
/// arrives meanwhile waits in this socket and is lost, and clients whose sessions have just ended
/// send queries. If no such descriptor is available, the socket stays as it is.
fn dying_first(socket: Socket) -> Socket {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile)
        .current
        .unwrap_or(u64::MAX);
    let number = i32::try_from(limit.saturating_sub(1))
        .unwrap_or(i32::MAX)
        .min(NUMBER_MAX);
    rustix::io::fcntl_dupfd_cloexec(&socket, number).map_or(socket, Socket::from)
}

impl DnsState {
    pub(super) fn count(&self, transport: &str, result: &str) {
        self.queries.shared(&[transport, result]).inc();
    }

    /// Counts a question over UDP that was dropped, by the tenant of this tier service.
    pub(super) fn count_dropped(&self, service: ServiceId, reason: &str) {
        let zones = self.zones.load();
        let tenant = zones.tenant(service).map_or("", |tenant| tenant.as_str());
        self.dropped.shared(&[tenant, reason]).inc();
    }

    /// Returns whether queries to this address have a tenant.
    pub(super) fn has_home(&self, local: IpAddr) -> bool {
        self.zones.load().home(local).is_some()
    }

    pub(super) fn reply(&self, query: &[u8], local: IpAddr, transport: DnsTransport) -> DnsReply {
        let zones = self.zones.load();
        match zones.home(local) {
            Some(tenant) => decide_reply(query, &zones, tenant, &self.az, transport),
            None => DnsReply {
                bytes: None,
                result: "no_tenant",
            },
        }
    }

    /// Answers one query after the other, each preceded by its length (RFC 1035 4.2.2).
    async fn connection(&self, mut stream: TcpStream) {
        let Ok(local) = stream.local_addr() else {
            return;
        };
        let mut buffer = Vec::new();
        loop {
            let length = tokio::select! {
                length = tokio::time::timeout(IDLE_TIMEOUT, stream.read_u16()) => length,
                () = self.traffic.draining() => return,
            };
            let Ok(Ok(length)) = length else { return };
            buffer.resize(length.into(), 0);
            match tokio::time::timeout(IDLE_TIMEOUT, stream.read_exact(&mut buffer)).await {
                Ok(Ok(_)) => {}
                _ => return self.count("tcp", "torn"),
            }
            let reply = self.reply(&buffer, local.ip(), DnsTransport::Tcp);
            self.count("tcp", reply.result);
            let Some(bytes) = reply.bytes else { return };
            // Responses on TCP are limited to lengths of 16 bits.
            let length = bytes.len() as u16;
            let whole = [&length.to_be_bytes()[..], &bytes].concat();
            if !matches!(
                tokio::time::timeout(IDLE_TIMEOUT, stream.write_all(&whole)).await,
                Ok(Ok(()))
            ) {
                return self.count("tcp", "not_sent");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn the_socket_has_a_higher_number_than_any_session() {
        let (socket, other) = (
            open("127.0.0.1:0".parse().unwrap()).unwrap(),
            std::net::TcpListener::bind("127.0.0.1:0").unwrap(),
        );
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile)
            .current
            .unwrap_or(u64::MAX);
        let want = limit.min(u64::from(NUMBER_MAX.unsigned_abs()) + 1) as i32 - 1;
        assert!(
            socket.as_raw_fd() >= want && want > other.as_raw_fd(),
            "{} of {limit}, beside {}",
            socket.as_raw_fd(),
            other.as_raw_fd()
        );
        assert!(
            rustix::io::fcntl_getfd(&socket)
                .unwrap()
                .contains(rustix::io::FdFlags::CLOEXEC)
        );
        let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        client
            .send_to(b"?", socket.local_addr().unwrap().as_socket().unwrap())
            .unwrap();
        socket.set_nonblocking(false).unwrap();
        let mut buffer = [std::mem::MaybeUninit::uninit(); 8];
        assert_eq!(
            socket.recv(&mut buffer).unwrap(),
            1,
            "it is the same socket"
        );
    }
}
