//! The name service's sockets: one UDP socket for all tenants, and TCP connections that the gateway hands over. Each query is its tenant's
//! whose address it came to; the answer goes out from there.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use canal_kit::drain::Drain;
use canal_kit::limits::Limit;
use canal_kit::metrics::{Counters, Family, Registry};
use canal_kit::southbound::{Origin, State, Update};
use canal_model::ids::AzName;
use canal_model::program::Kind;
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpStream, UdpSocket};

use super::answer::{Reply, Transport, decide_reply};
use super::zone::{Zones, concerns, decide_zones};

/// A client on TCP that sends nothing for so long, or takes its answer so slowly, is left.
const IDLE: Duration = Duration::from_secs(10);
/// TCP connections at once.
const CONNECTIONS_MAX: u64 = 256;
/// Datagrams taken in one go, and the room for each, which may hold several that the kernel joined.
const BATCH: usize = 4;
const DATAGRAM_MAX: usize = 65_535;
/// The highest number that the UDP socket is moved to: the kernel's table of a process's files has 8 bytes for each.
const NUMBER_MAX: i32 = 0xffff;

/// The socket could not be made.
#[derive(Debug, thiserror::Error)]
#[error("DNS on UDP {address}: {what}: {source}; is another name service there, or does the process lack CAP_NET_BIND_SERVICE?")]
pub struct DnsError {
    address: SocketAddr,
    what: &'static str,
    source: io::Error,
}

/// A running name service. Clones share it.
#[derive(Clone)]
pub struct Dns {
    inner: Arc<Inner>,
}

struct Inner {
    az: AzName,
    zones: ArcSwap<Zones>,
    socket: UdpSocket,
    queries: Counters,
    connections: Limit,
    runtime: tokio::runtime::Handle,
}

impl Dns {
    /// Opens the UDP socket and answers from then on, until `drain` is forced. The port must be 53: answers carry it.
    pub fn start(address: SocketAddr, az: AzName, registry: &Registry, drain: &Drain) -> Result<Self, DnsError> {
        let at = |what| move |source| DnsError { address, what, source };
        let socket = open(address).map_err(at("opening the socket"))?;
        let state = UdpSocketState::new(UdpSockRef::from(&socket)).map_err(at("asking for addresses"))?;
        let socket = UdpSocket::from_std(socket.into()).map_err(at("registering"))?;
        let family =
            Family::new("canal_dns_queries_total", "DNS queries, by transport and by what became of them.", &["transport", "result"]);
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

    /// The socket once more, for the redirector's door.
    pub fn door(&self) -> io::Result<OwnedFd> {
        self.inner.socket.as_fd().try_clone_to_owned()
    }

    /// Where it listens.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.inner.socket.local_addr()
    }

    /// Takes a state.
    pub fn apply(&self, update: &Update, state: &State) {
        let removed = |k: &Kind| matches!(k, Kind::Address | Kind::Service | Kind::Table);
        let first = self.inner.zones.load().generation == 0 || update.origin == Origin::Snapshot;
        if first || update.upserts.iter().any(|r| concerns(r)) || update.removals.iter().any(|(k, _)| removed(k)) {
            let all = [Kind::Address, Kind::Service, Kind::Table].into_iter().flat_map(|kind| state.of(kind));
            self.inner.zones.store(Arc::new(decide_zones(all, update.generation.0)));
        }
    }

    /// Serves a TCP connection that came to port 53 of a service address. May be called on any thread.
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

/// A socket for both families that may answer from addresses no device has.
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

/// The socket by a number that is higher than those of sessions. A process that is killed closes what it has from the highest number down,
/// which takes long where there are many sessions: a question that comes meanwhile lies in this socket and is lost, and those whose sessions
/// have just ended ask. Where so high a number is not to be had, the socket stays as it is.
fn dying_first(socket: Socket) -> Socket {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let number = i32::try_from(limit.saturating_sub(1)).unwrap_or(i32::MAX).min(NUMBER_MAX);
    rustix::io::fcntl_dupfd_cloexec(&socket, number).map_or(socket, Socket::from)
}

impl Inner {
    fn count(&self, transport: &str, result: &str) {
        self.queries.shared(&[transport, result]).inc();
    }

    fn reply(&self, query: &[u8], local: IpAddr, transport: Transport) -> Reply {
        let zones = self.zones.load();
        match zones.home(local) {
            Some(tenant) => decide_reply(query, &zones, tenant, &self.az, transport),
            None => Reply { bytes: None, result: "no_tenant" },
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
                for query in room[..meta.len.min(room.len())].chunks(meta.stride.max(1)) {
                    let reply = self.reply(query, local, Transport::Udp);
                    self.count("udp", reply.result);
                    if let Some(bytes) = reply.bytes {
                        self.send(state, meta.addr, local, &bytes);
                    }
                }
            }
        }
    }

    /// Best effort, as UDP is.
    fn send(&self, state: &UdpSocketState, to: SocketAddr, from: IpAddr, bytes: &[u8]) {
        let transmit = Transmit { destination: to, ecn: None, contents: bytes, segment_size: None, src_ip: Some(from) };
        let sent = self.socket.try_io(Interest::WRITABLE, || state.try_send(UdpSockRef::from(&self.socket), &transmit));
        if let Err(error) = sent {
            self.count("udp", "not_sent");
            tracing::debug!(%error, %to, "a DNS answer was not sent");
        }
    }

    /// One query after the other, each with its length before it (RFC 1035 4.2.2).
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
            let reply = self.reply(&room, local.ip(), Transport::Tcp);
            self.count("tcp", reply.result);
            let Some(bytes) = reply.bytes else { return };
            // The largest answer on TCP has a length of 16 bits.
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
