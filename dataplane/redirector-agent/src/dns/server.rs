//! Sockets of the DNS service: one UDP socket for all tenants, and TCP connections that the gateway passes on.
//!
//! The local address of a query determines its tenant, and is the source of the response.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use canal_model::ids::AzName;
use canal_model::program::ResourceKind;
use canal_runtime::drain::DrainWatcher;
use canal_runtime::limits::Limit;
use canal_runtime::metrics::{CounterFamily, MetricFamily, Registry};
use canal_southbound_client::{ResourceState, Update, UpdateSource};
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpStream, UdpSocket};

use super::answer::{DnsReply, DnsTransport, decide_reply};
use super::zone::{DnsZones, concerns, decide_zones};

/// Timeout of a TCP client that sends nothing, or reads its response too slowly.
const IDLE: Duration = Duration::from_secs(10);
/// TCP connections at once, at most.
const CONNECTIONS_MAX: u64 = 256;
/// Datagrams that are received in one call.
const BATCH: usize = 4;
/// Buffer for one datagram in bytes; the kernel may have joined several in it.
const DATAGRAM_MAX: usize = 65_535;
/// Highest descriptor to which the UDP socket is moved: the kernel's table of a process's files needs 8 bytes for each.
const NUMBER_MAX: i32 = 0xffff;

/// The UDP socket could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("DNS on UDP {address}: {what}: {source}; is another name service there, or does the process lack CAP_NET_BIND_SERVICE?")]
pub struct DnsError {
    address: SocketAddr,
    what: &'static str,
    source: io::Error,
}

/// A running DNS service. Clones share it.
#[derive(Clone)]
pub struct DnsServer {
    inner: Arc<Inner>,
}

struct Inner {
    az: AzName,
    zones: ArcSwap<DnsZones>,
    socket: UdpSocket,
    queries: CounterFamily,
    connections: Limit,
    runtime: tokio::runtime::Handle,
}

impl DnsServer {
    /// Opens the UDP socket, and answers queries until `drain` is forced. The port must be 53, because responses carry it.
    ///
    /// # Errors
    /// The socket cannot be opened, bound or registered.
    pub fn start(address: SocketAddr, az: AzName, registry: &Registry, drain: &DrainWatcher) -> Result<Self, DnsError> {
        let at = |what| move |source| DnsError { address, what, source };
        let socket = open(address).map_err(at("opening the socket"))?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket)).map_err(at("asking for addresses"))?;
        let socket = UdpSocket::from_std(socket.into()).map_err(at("registering"))?;
        let family =
            MetricFamily::new("canal_dns_queries_total", "DNS queries, by transport and by what became of them.", &["transport", "result"]);
        let inner = Arc::new(Inner {
            az,
            zones: ArcSwap::default(),
            socket,
            queries: registry.counters(family),
            connections: Limit::new(registry, "dns_connections", CONNECTIONS_MAX),
            runtime: tokio::runtime::Handle::current(),
        });
        let (serving, end) = (inner.clone(), drain.watcher());
        tokio::spawn(async move {
            tokio::select! {
                () = serving.datagrams(&state) => {}
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

    /// Applies a state to the zones, if it concerns them.
    pub fn apply(&self, update: &Update, state: &ResourceState) {
        let removed = |k: &ResourceKind| matches!(k, ResourceKind::Address | ResourceKind::Service | ResourceKind::Table);
        let first = self.inner.zones.load().generation == 0 || update.origin == UpdateSource::Snapshot;
        if first || update.upserts.iter().any(|r| concerns(r)) || update.removals.iter().any(|(k, _)| removed(k)) {
            let all = [ResourceKind::Address, ResourceKind::Service, ResourceKind::Table].into_iter().flat_map(|kind| state.of(kind));
            self.inner.zones.store(Arc::new(decide_zones(all, update.generation.0)));
        }
    }

    /// Serves a TCP connection that arrived at port 53 of a service address. It may be called on any thread.
    pub fn take(&self, stream: std::net::TcpStream) {
        let inner = self.inner.clone();
        let Some(permit) = inner.connections.take() else { return inner.count("tcp", "too_many") };
        inner.runtime.clone().spawn(async move {
            let _permit = permit;
            let served = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream));
            if let Ok(stream) = served {
                inner.connection(stream).await;
            }
        });
    }
}

/// Opens a socket for both families that may send from addresses which no device has.
fn open(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
        socket.set_freebind_v6(true)?;
    } else {
        socket.set_freebind_v4(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    Ok(dying_first(socket))
}

/// Moves the socket to a descriptor above those of sessions. A killed process closes its descriptors from the highest to the lowest, which
/// takes long with many sessions. A query that arrives meanwhile waits in this socket and is lost, and clients whose sessions have just
/// ended send queries. If no such descriptor is available, the socket stays as it is.
fn dying_first(socket: Socket) -> Socket {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let number = i32::try_from(limit.saturating_sub(1)).unwrap_or(i32::MAX).min(NUMBER_MAX);
    rustix::io::fcntl_dupfd_cloexec(&socket, number).map_or(socket, Socket::from)
}

impl Inner {
    fn count(&self, transport: &str, result: &str) {
        self.queries.shared(&[transport, result]).inc();
    }

    fn reply(&self, query: &[u8], local: IpAddr, transport: DnsTransport) -> DnsReply {
        let zones = self.zones.load();
        match zones.home(local) {
            Some(tenant) => decide_reply(query, &zones, tenant, &self.az, transport),
            None => DnsReply { bytes: None, result: "no_tenant" },
        }
    }

    async fn datagrams(&self, state: &UdpSocketState) {
        let mut rooms = vec![vec![0u8; DATAGRAM_MAX]; BATCH];
        loop {
            if let Err(error) = self.socket.readable().await {
                tracing::error!(%error, "DNS over UDP ends");
                return;
            }
            let mut metas = [RecvMeta::default(); BATCH];
            let mut slices: Vec<IoSliceMut<'_>> = rooms.iter_mut().map(|room| IoSliceMut::new(room)).collect();
            let taken = self.socket.try_io(Interest::READABLE, || state.recv(UdpSockRef::from(&self.socket), &mut slices, &mut metas));
            drop(slices);
            for (room, meta) in rooms.iter().zip(&metas).take(taken.unwrap_or(0)) {
                let Some(local) = meta.dst_ip else {
                    self.count("udp", "no_address");
                    continue;
                };
                // The kernel may have joined several datagrams of equal size.
                for query in room[..meta.len.min(room.len())].chunks(meta.stride.max(1)) {
                    let reply = self.reply(query, local, DnsTransport::Udp);
                    self.count("udp", reply.result);
                    if let Some(bytes) = reply.bytes {
                        self.send(state, meta.addr, local, &bytes);
                    }
                }
            }
        }
    }

    /// Sends a response. A failure is only counted, because UDP is best effort.
    fn send(&self, state: &UdpSocketState, to: SocketAddr, from: IpAddr, bytes: &[u8]) {
        let transmit = Transmit { destination: to, ecn: None, contents: bytes, segment_size: None, src_ip: Some(from) };
        let sent = self.socket.try_io(Interest::WRITABLE, || state.try_send(UdpSockRef::from(&self.socket), &transmit));
        if let Err(error) = sent {
            self.count("udp", "not_sent");
            tracing::debug!(%error, %to, "a DNS answer was not sent");
        }
    }

    /// Answers one query after the other, each preceded by its length (RFC 1035 4.2.2).
    async fn connection(&self, mut stream: TcpStream) {
        let Ok(local) = stream.local_addr() else { return };
        let mut room = Vec::new();
        loop {
            let Ok(Ok(length)) = tokio::time::timeout(IDLE, stream.read_u16()).await else { return };
            room.resize(length.into(), 0);
            match tokio::time::timeout(IDLE, stream.read_exact(&mut room)).await {
                Ok(Ok(_)) => {}
                _ => return self.count("tcp", "torn"),
            }
            let reply = self.reply(&room, local.ip(), DnsTransport::Tcp);
            self.count("tcp", reply.result);
            let Some(bytes) = reply.bytes else { return };
            // Responses on TCP are limited to lengths of 16 bits.
            let length = bytes.len() as u16;
            let whole = [&length.to_be_bytes()[..], &bytes].concat();
            if !matches!(tokio::time::timeout(IDLE, stream.write_all(&whole)).await, Ok(Ok(()))) {
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
        let (socket, other) = (open("127.0.0.1:0".parse().unwrap()).unwrap(), std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
        let want = limit.min(u64::from(NUMBER_MAX.unsigned_abs()) + 1) as i32 - 1;
        assert!(socket.as_raw_fd() >= want && want > other.as_raw_fd(), "{} of {limit}, beside {}", socket.as_raw_fd(), other.as_raw_fd());
        assert!(rustix::io::fcntl_getfd(&socket).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        client.send_to(b"?", socket.local_addr().unwrap().as_socket().unwrap()).unwrap();
        socket.set_nonblocking(false).unwrap();
        let mut room = [std::mem::MaybeUninit::uninit(); 8];
        assert_eq!(socket.recv(&mut room).unwrap(), 1, "it is the same socket");
    }
}
