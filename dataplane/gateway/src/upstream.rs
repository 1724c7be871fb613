//! Connections to endpoints: kept, shared or new, by tunnel or in plain text. It does not choose the endpoint (`pick` does) and speaks no
//! HTTP/1.1 (`forward` does).

mod http2;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use canal_kit::hbone::{Authority, Target};
use canal_kit::sys::{self, ConnectOptions};
use canal_model::identity::Identity;
use canal_model::program::Tunnel;
use canal_wire::hbone::HBONE_PORT;
use http::HeaderMap;
use tokio::time::Instant;

pub(crate) use http2::place;

use crate::body::Wire;
use crate::buffer::Inbox;
use crate::endpoints::Chosen;
use crate::fault::Fault;
use crate::io::Io;
use crate::snapshot::{Endpoint, TenantTls};
use crate::worker::Worker;

/// A TCP connect or a tunnel that takes longer has failed; the client waits meanwhile, so it is shorter than the kit's own limits.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection for one HTTP/1.1 exchange.
pub(crate) struct Lease {
    pub(crate) wire: Wire,
    /// It carried a request before.
    pub(crate) reused: bool,
}

/// A kept connection to the endpoint if there is one that still works.
pub(crate) fn kept(worker: &Worker, chosen: &Chosen) -> Option<Lease> {
    let io = chosen.state().take_kept()?;
    worker.counts.reused.inc();
    Some(Lease { wire: Wire::new(io, Inbox::new(&worker.blocks)), reused: true })
}

/// A new connection for HTTP/1.1.
pub(crate) async fn fresh(worker: &Worker, chosen: &Chosen, introduction: Introduction<'_>) -> Result<Lease, Fault> {
    let io = connect(worker, chosen, introduction).await?;
    Ok(Lease { wire: Wire::new(io, Inbox::new(&worker.blocks)), reused: false })
}

/// Keeps the connection for the next request, unless enough are kept.
pub(crate) fn keep(worker: &Worker, chosen: &Chosen, wire: Wire) {
    // Bytes that nobody asked for make it unusable: they would be read as the answer to someone else's request.
    let usable = wire.inbox.is_empty() && wire.outbox.is_empty() && !worker.is_draining();
    if !usable || !chosen.state().keep(wire.io, worker.shared.config.limits.idle_per_endpoint, worker.clock.now()) {
        worker.counts.not_kept.inc();
    }
}

/// What the other end of a new tunnel is told.
pub(crate) struct Introduction<'a> {
    /// The gateway's identity in the tenant; `None` where none is issued.
    pub(crate) tls: Option<&'a TenantTls>,
    /// For a connection that carries one client's bytes only: who it is. Pooled connections say nothing of any client.
    pub(crate) headers: HeaderMap,
}

/// A new connection to the endpoint, by tunnel or in plain text as its workload says. Marks the endpoint by the outcome.
pub(crate) async fn connect(worker: &Worker, chosen: &Chosen, introduction: Introduction<'_>) -> Result<Io, Fault> {
    let endpoint = chosen.endpoint();
    let opened = match endpoint.workload.tunnel {
        Tunnel::None => plain(worker, endpoint).await,
        Tunnel::Hbone => tunnel(worker, endpoint, introduction).await,
    };
    match opened {
        Ok(io) => {
            chosen.state().succeeded();
            worker.counts.connects_ok.inc();
            Ok(io)
        }
        Err(Unopened { why, shortage }) => {
            worker.counts.connects_failed.inc();
            if let Some(what) = shortage {
                worker.counts.short_of(what);
            } else if chosen.state().failed(Instant::now(), worker.shared.config.times.ejection) {
                worker.counts.ejections.inc();
            }
            Err(Fault::Connect { why })
        }
    }
}

/// Why there is no connection, and what this machine lacks if that is why: then the endpoint is as good as before.
struct Unopened {
    why: String,
    shortage: Option<&'static str>,
}

impl From<String> for Unopened {
    fn from(why: String) -> Self {
        Self { why, shortage: None }
    }
}

/// The mark of connections to an endpoint: inside the tier the tenant's VNI, without which nothing is dialled, because there the mark alone
/// says in whose network the address is.
fn decide_mark(tier: bool, endpoint: &Endpoint) -> Result<Option<u32>, String> {
    match (tier, endpoint.workload.vni) {
        (false, _) => Ok(None),
        (true, Some(vni)) => Ok(Some(vni.get())),
        (true, None) => Err(format!("{}: the tenant's network is not known", endpoint.address)),
    }
}

async fn plain(worker: &Worker, endpoint: &Endpoint) -> Result<Io, Unopened> {
    let (address, tier) = (endpoint.address, worker.shared.config.tier.as_ref());
    let bind = tier.and_then(|t| t.sources.towards(address.ip()));
    let mark = decide_mark(tier.is_some(), endpoint)?;
    let options = ConnectOptions { bind, mark, timeout: CONNECT_TIMEOUT, ..ConnectOptions::default() };
    let failed = |e: sys::SysError| Unopened { shortage: e.shortage(), why: e.to_string() };
    sys::connect(None, address, &options).await.map(Io::Tcp).map_err(failed)
}

async fn tunnel(worker: &Worker, endpoint: &Endpoint, introduction: Introduction<'_>) -> Result<Io, Unopened> {
    let Some(tls) = introduction.tls else {
        return Err(format!("{}: the gateway has no identity in this tenant", endpoint.address).into());
    };
    let expected: Arc<[Identity]> = endpoint.workload.identity.clone();
    let address = SocketAddr::new(endpoint.address.ip(), HBONE_PORT);
    let mark = decide_mark(worker.shared.config.tier.is_some(), endpoint)?;
    let target = Target { source: tls.client.clone(), expected, address, netns: None, mark };
    let authority = Authority::Address(endpoint.address);
    match worker.tunnels.open(&target, &authority, introduction.headers).await {
        Ok(opened) => Ok(Io::Tunnel(Box::new(opened.stream))),
        Err(e) => Err(e.to_string().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::build::tests::set_of;

    #[test]
    fn inside_the_tier_nothing_is_dialled_without_a_mark() {
        let set = set_of(1);
        let endpoint = &set.endpoints[0];
        assert_eq!(endpoint.workload.vni, None, "its tenant was not told");
        assert!(decide_mark(true, endpoint).is_err());
        assert_eq!(decide_mark(false, endpoint), Ok(None));
    }
}
