//! The first phase of all roads: each worker's listeners in a pod, and which road a connection takes by the listener that it came in on.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use canal_kit::backoff::Backoff;
use canal_kit::drain::{Drain, Phase};
use canal_kit::sys::{self, ListenOptions, SysError};
use canal_kit::worker::Workers;
use canal_wire::hbone::{HBONE_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT, PROXY_MARK};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::room::Room;
use crate::worker::{self, Local};
use crate::{inbound, outbound, plain};

/// What a listener's connections are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Door {
    Outbound,
    Inbound,
    Plain,
}

/// Where a pod is listened to. Capture rewrites to loopback only, so nothing from outside reaches the outbound door.
const DOORS: [(Door, SocketAddr); 4] = [
    (Door::Outbound, SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), OUTBOUND_PORT)),
    (Door::Outbound, SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), OUTBOUND_PORT)),
    (Door::Inbound, SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), HBONE_PORT)),
    (Door::Inbound, SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), HBONE_PORT)),
];

/// Where plaintext connections are taken to: any address, because nftables leads them to the pod's own. Who dials this port by hand is
/// refused like who dials it through a tunnel.
const PLAIN_DOORS: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), INBOUND_PLAINTEXT_PORT),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), INBOUND_PLAINTEXT_PORT),
];

/// Has every worker listen in `room` until `drain`.
pub fn open(workers: &Workers, room: &Arc<Room>, drain: &Drain) {
    for k in 0..workers.count() {
        let (room, drain) = (room.clone(), drain.clone());
        workers.spawn(k, move || async move {
            if let Some(local) = worker::here() {
                serve(&local, &room, &drain);
            }
        });
    }
}

/// Opens a worker's four listeners of a pod and serves them until the drain; those for plaintext while they are wanted.
fn serve(local: &Rc<Local>, room: &Arc<Room>, drain: &Drain) {
    for (door, address) in DOORS {
        let (local_, room, drain) = (local.clone(), room.clone(), drain.clone());
        local.spawn(async move {
            keep_open(&local_, &room, door, address, &drain, None).await;
        });
    }
    for address in PLAIN_DOORS {
        let (local_, room, drain) = (local.clone(), room.clone(), drain.clone());
        local.spawn(async move { keep_plain(&local_, &room, address, &drain).await });
    }
}

async fn keep_plain(local: &Rc<Local>, room: &Arc<Room>, address: SocketAddr, drain: &Drain) {
    let mut wanted = room.plaintext.wanted();
    loop {
        tokio::select! {
            changed = wanted.wait_for(|wanted| *wanted) => if changed.is_err() { return },
            () = drain.draining() => return,
        }
        let mut until = wanted.clone();
        if !keep_open(local, room, Door::Plain, address, drain, Some(&mut until)).await {
            return;
        }
    }
}

/// Resolves when a listener must close.
async fn over(drain: &Drain, wanted: Option<&mut watch::Receiver<bool>>) {
    let unwanted = async {
        match wanted {
            Some(wanted) => drop(wanted.wait_for(|wanted| !*wanted).await),
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = drain.draining() => {}
        () = unwanted => {}
    }
}

/// A listener that cannot be opened is tried again: the address may be held by an application that has not stopped yet, and a pod that
/// nobody serves is refused, not open. Whether it may be opened again, because it closed only for not being wanted.
async fn keep_open(
    local: &Rc<Local>,
    room: &Arc<Room>,
    door: Door,
    address: SocketAddr,
    drain: &Drain,
    mut wanted: Option<&mut watch::Receiver<bool>>,
) -> bool {
    // The mark passes on to what is accepted: the kernel's list of connections tells those that are in the proxy by it.
    let mark = (door == Door::Plain).then_some(PROXY_MARK);
    let options = ListenOptions { reuse_port: true, v6_only: true, mark, ..ListenOptions::default() };
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(5));
    loop {
        match sys::listen(Some(&room.netns), address, &options) {
            Ok(listener) => {
                opened(room, door, address, &listener);
                accept(local, room, door, listener, drain, wanted).await;
                match door {
                    Door::Plain => room.plaintext.closed(),
                    Door::Outbound | Door::Inbound => room.closed(),
                }
                return drain.phase() == Phase::Running;
            }
            // A pod without IPv6 has nothing to listen to there, and nothing to capture.
            Err(SysError::Socket { source, .. }) if address.is_ipv6() && has_no_ipv6(&source) => return false,
            Err(error) => {
                local.listen_failures.inc();
                tracing::warn!(pod = room.pod.load().uid, %error, "cannot listen in the pod; trying again");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.next_wait()) => {}
            () = over(drain, wanted.as_deref_mut()) => return drain.phase() == Phase::Running,
        }
    }
}

fn opened(room: &Room, door: Door, address: SocketAddr, listener: &TcpListener) {
    if door != Door::Plain {
        room.opened();
    } else if let Err(error) = room.plaintext.opened(address.is_ipv4(), listener) {
        tracing::error!(pod = room.pod.load().uid, %error, "plaintext into the pod is refused");
    }
}

fn has_no_ipv6(e: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let code = Errno::from_io_error(e);
    code == Some(Errno::AFNOSUPPORT) || code == Some(Errno::ADDRNOTAVAIL)
}

/// Takes what comes, until the listener must close.
async fn accept(
    local: &Rc<Local>,
    room: &Arc<Room>,
    door: Door,
    listener: TcpListener,
    drain: &Drain,
    mut wanted: Option<&mut watch::Receiver<bool>>,
) {
    loop {
        let accepted = tokio::select! {
            biased;
            () = over(drain, wanted.as_deref_mut()) => break,
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
        Door::Plain => local.spawn(plain::carry(local_, room, stream, peer, drain)),
    }
}
