//! Connections to a socket of the same kernel, from an address and port that the caller names. The
//! address may be foreign to this namespace. `canal-offload` configures the namespace so that
//! answers return. The caller decides which address is used.

use std::io;
use std::net::{IpAddr, SocketAddr};

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::TcpStream;

use super::{CONNECT_TIMEOUT, Netns, SysError, at, established, set_option, tune_local};

/// Options of a connection to an application.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeliveryOptions {
    pub mark: u32,
    /// Address that the application sees as its client.
    pub source: IpAddr,
    /// The source is not an address of the namespace (`IP_TRANSPARENT`).
    pub is_foreign: bool,
    /// The connection uses the loopback device (`SO_BINDTODEVICE`), so that it counts as local to
    /// the pod.
    pub on_loopback: bool,
}

/// Connects to `address` in `netns` from the first of `ports` that is free. A port is free if no
/// open connection to `address` uses it. The kernel reuses a port in TIME_WAIT, because the port is
/// named explicitly.
///
/// # Errors
/// The thread cannot enter `netns`, all ports are in use, a call on the socket fails, or the peer
/// refuses or does not answer in time.
pub async fn connect_from(
    netns: &Netns,
    address: SocketAddr,
    options: &DeliveryOptions,
    ports: impl Iterator<Item = u16>,
) -> Result<TcpStream, SysError> {
    let socket = netns.enter(|| {
        let mut tried = 0;
        for port in ports {
            tried += 1;
            match begin(address, options, port) {
                Ok(socket) => return Ok(socket),
                // The next port may be free.
                Err(SysError::Socket {
                    what: "bind" | "connect",
                    source,
                    ..
                }) if is_port_in_use(&source) => {}
                Err(e) => return Err(e),
            }
        }
        Err(SysError::SourcePorts {
            address,
            source_ip: options.source,
            tried,
        })
    })??;
    established(socket, address, CONNECT_TIMEOUT).await
}

fn is_port_in_use(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EADDRINUSE | libc::EADDRNOTAVAIL)
    )
}

fn begin(address: SocketAddr, options: &DeliveryOptions, port: u16) -> Result<Socket, SysError> {
    let source = SocketAddr::new(options.source, port);
    let s = at(
        "socket",
        address,
        Socket::new(
            Domain::for_address(address),
            Type::STREAM.nonblocking(),
            Some(Protocol::TCP),
        ),
    )?;
    at("SO_MARK", address, s.set_mark(options.mark))?;
    if options.is_foreign {
        at(
            "IP_TRANSPARENT",
            address,
            transparent(&s, address.is_ipv4()),
        )?;
    }
    if options.on_loopback {
        at("SO_BINDTODEVICE", address, s.bind_device(Some(b"lo")))?;
    }
    // The port may be shared with other connections, and an application may later listen on it.
    at("SO_REUSEADDR", address, s.set_reuse_address(true))?;
    at("bind", source, s.bind(&source.into()))?;
    at("keepalive", address, tune_local(SockRef::from(&s)))?;
    match s.connect(&address.into()) {
        Ok(()) => Ok(s),
        Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok(s),
        Err(source) => Err(SysError::Socket {
            what: "connect",
            address,
            source,
        }),
    }
}

fn transparent(socket: &Socket, is_ipv4: bool) -> io::Result<()> {
    let on: libc::c_int = 1;
    let (level, name) = if is_ipv4 {
        (libc::SOL_IP, libc::IP_TRANSPARENT)
    } else {
        (libc::SOL_IPV6, libc::IPV6_TRANSPARENT)
    };
    set_option(socket, level, name, &on.to_ne_bytes())
}
