//! Addresses on the loopback interface that only the calling process listens on, for programs that
//! a test starts and whose port it must know. A free port of 127.0.0.1 is no such address: another
//! process may have it before the program listens.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};

/// First port of these addresses. They are below the ports that Linux gives to clients and to
/// listeners on port 0.
const PORT_FIRST: u16 = 20_000;

/// Returns an address of 127.0.0.0/8 that this process has not yet been given, and that no other
/// process is given: it contains the process's id.
///
/// # Panics
/// Panics if the process requests more than about 45,000 addresses.
#[must_use]
pub fn own_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(PORT_FIRST);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    // The kernel gives ids of at most 22 bits. 127.0.0.0/16 stays free for programs that use
    // 127.0.0.1.
    let address = Ipv4Addr::new(127, 1 + (high & 0x3f), middle, low);
    let port = NEXT.fetch_add(1, Ordering::Relaxed);
    assert!(port >= PORT_FIRST, "a process has no more addresses");
    SocketAddr::from((address, port))
}
