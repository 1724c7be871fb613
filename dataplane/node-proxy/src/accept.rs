//! Phase *accept*, the first of all paths: each worker's listeners in a pod. The listener decides
//! which path serves a connection.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use canal_net::sys::{self, ListenOptions, SysError};
use canal_net::worker::Workers;
use canal_runtime::backoff::Backoff;
use canal_runtime::drain::{DrainPhase, DrainWatcher};
use canal_wire::hbone::{HBONE_PORT, INBOUND_PLAINTEXT_PORT, OUTBOUND_PORT, PROXY_MARK};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::pod_context::PodContext;
use crate::worker::{self, WorkerLocal};
use crate::{inbound, inbound_plaintext, outbound};

/// Kind of connection that a listener accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ListenerRole {
    Outbound,
    Inbound,
    Plain,
}

/// Listeners of a pod on each worker. Capture rewrites destinations to many addresses that are
/// local to the namespace. The outbound listeners accept all of them and drop packets that do not
/// arrive by loopback, so nothing from outside reaches them.
const LISTENERS: [(ListenerRole, SocketAddr); 4] = [
    (
        ListenerRole::Outbound,
        SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), OUTBOUND_PORT),
    ),
    (
        ListenerRole::Outbound,
        SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), OUTBOUND_PORT),
    ),
    (
        ListenerRole::Inbound,
        SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), HBONE_PORT),
    ),
    (
        ListenerRole::Inbound,
        SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), HBONE_PORT),
    ),
];

/// Listeners for captured plaintext. They accept any address, because nftables redirects
/// connections to the pod's own. A client that dials this port directly is refused, as one that
/// dials it through a tunnel is.
const PLAIN_LISTENERS: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), INBOUND_PLAINTEXT_PORT),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), INBOUND_PLAINTEXT_PORT),
];

/// Makes every worker listen in the pod until `drain`.
pub fn open(workers: &Workers, context: &Arc<PodContext>, drain: &DrainWatcher) {
    for k in 0..workers.count() {
        let (context, drain) = (context.clone(), drain.clone());
        workers.spawn(k, move || async move {
            if let Some(local) = worker::here() {
                serve(&local, &context, &drain);
            }
        });
    }
}

/// Runs one worker's four listeners of a pod until the drain, and its plaintext listeners while
/// they are wanted.
fn serve(local: &Rc<WorkerLocal>, context: &Arc<PodContext>, drain: &DrainWatcher) {
    for (listener_kind, address) in LISTENERS {
        let (local_, context, drain) = (local.clone(), context.clone(), drain.clone());
        local.spawn(async move {
            keep_open(&local_, &context, listener_kind, address, &drain, None).await;
        });
    }
    for address in PLAIN_LISTENERS {
        let (local_, context, drain) = (local.clone(), context.clone(), drain.clone());
        local.spawn(async move { keep_plain(&local_, &context, address, &drain).await });
    }
}

async fn keep_plain(
    local: &Rc<WorkerLocal>,
    context: &Arc<PodContext>,
    address: SocketAddr,
    drain: &DrainWatcher,
) {
    let mut wanted = context.plaintext.must_listen();
    loop {
        tokio::select! {
            changed = wanted.wait_for(|wanted| *wanted) => if changed.is_err() { return },
            () = drain.draining() => return,
        }
        let mut until = wanted.clone();
        if !keep_open(
            local,
            context,
            ListenerRole::Plain,
            address,
            drain,
            Some(&mut until),
        )
        .await
        {
            return;
        }
    }
}

/// Resolves when a listener must close: on drain, or when it is no longer wanted.
async fn over(drain: &DrainWatcher, wanted: Option<&mut watch::Receiver<bool>>) {
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

/// Opens a listener and serves it until it must close. Returns whether it may be opened again,
/// because it closed only for not being wanted.
///
/// An address that is not available is retried: an application that has not stopped yet may occupy
/// it. A pod without listeners is refused, not open.
async fn keep_open(
    local: &Rc<WorkerLocal>,
    context: &Arc<PodContext>,
    listener_kind: ListenerRole,
    address: SocketAddr,
    drain: &DrainWatcher,
    mut wanted: Option<&mut watch::Receiver<bool>>,
) -> bool {
    // Accepted sockets inherit the mark. The kernel's connection list shows by it which connections
    // the proxy has.
    let mark = (listener_kind == ListenerRole::Plain).then_some(PROXY_MARK);
    // Only the pod's own captured connections may reach this listener, although its address is a
    // wildcard.
    let loopback_only = listener_kind == ListenerRole::Outbound;
    let options = ListenOptions {
        // Each worker listens on the same address, and the kernel spreads connections among them.
        reuse_port: true,
        // Another listener has the IPv4 address.
        v6_only: true,
        mark,
        loopback_only,
        ..ListenOptions::default()
    };
    // An application that is stopping frees the address soon; one that stays costs a try each 5 s.
    let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(5));
    loop {
        match sys::listen(Some(&context.netns), address, &options) {
            Ok(listener) => {
                record_listener(context, listener_kind, address, &listener);
                accept(local, context, listener_kind, listener, drain, wanted).await;
                match listener_kind {
                    ListenerRole::Plain => context.plaintext.closed(),
                    ListenerRole::Outbound | ListenerRole::Inbound => context.closed(),
                }
                return drain.phase() == DrainPhase::Running;
            }
            // A pod without IPv6 needs no IPv6 listener: it has no IPv6 connections to capture.
            Err(SysError::Socket { source, .. }) if address.is_ipv6() && has_no_ipv6(&source) => {
                return false;
            }
            Err(error) => {
                local.listen_failures.inc();
                tracing::warn!(pod = context.pod.load().uid, %error, "node: cannot listen in the pod; retrying");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(backoff.next_wait()) => {}
            () = over(drain, wanted.as_deref_mut()) => return drain.phase() == DrainPhase::Running,
        }
    }
}

fn record_listener(
    context: &PodContext,
    listener_kind: ListenerRole,
    address: SocketAddr,
    listener: &TcpListener,
) {
    if listener_kind != ListenerRole::Plain {
        context.count_listener();
    } else if let Err(error) = context.plaintext.add_listener(address.is_ipv4(), listener) {
        tracing::error!(pod = context.pod.load().uid, %error, "node: cannot register the pod's plaintext listener, so plaintext into the pod is refused");
    }
}

fn has_no_ipv6(e: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let code = Errno::from_io_error(e);
    code == Some(Errno::AFNOSUPPORT) || code == Some(Errno::ADDRNOTAVAIL)
}

/// Accepts connections until the listener must close.
async fn accept(
    local: &Rc<WorkerLocal>,
    context: &Arc<PodContext>,
    listener_kind: ListenerRole,
    listener: TcpListener,
    drain: &DrainWatcher,
    mut wanted: Option<&mut watch::Receiver<bool>>,
) {
    loop {
        let accepted = tokio::select! {
            biased;
            () = over(drain, wanted.as_deref_mut()) => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => admit(local, context, listener_kind, stream, peer, drain),
            Err(error) => {
                // The process is out of descriptors or memory: other connections must end first.
                // This one waits in the kernel.
                local.accept_failures.inc();
                tracing::warn!(pod = context.pod.load().uid, %error, "node: accepting a connection failed; retrying");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
    // Clients that completed the handshake before the drain are served: closing the listener would
    // reset them.
    let waiting = std::future::poll_fn(|cx| {
        let mut found = Vec::new();
        while let std::task::Poll::Ready(Ok(c)) = listener.poll_accept(cx) {
            found.push(c);
        }
        std::task::Poll::Ready(found)
    });
    for (stream, peer) in waiting.await {
        admit(local, context, listener_kind, stream, peer, drain);
    }
}

fn admit(
    local: &Rc<WorkerLocal>,
    context: &Arc<PodContext>,
    listener_kind: ListenerRole,
    stream: TcpStream,
    peer: SocketAddr,
    drain: &DrainWatcher,
) {
    let (local_, context, drain) = (local.clone(), context.clone(), drain.clone());
    match listener_kind {
        ListenerRole::Outbound => {
            local.spawn(outbound::carry(local_, context, stream, peer, drain))
        }
        ListenerRole::Inbound => {
            local.spawn(inbound::establish(local_, context, stream, peer, drain))
        }
        ListenerRole::Plain => local.spawn(inbound_plaintext::carry(
            local_, context, stream, peer, drain,
        )),
    }
}
