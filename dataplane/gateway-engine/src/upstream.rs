//! Connections to endpoints: idle, shared or new, by tunnel or in plaintext.
//!
//! It does not select the endpoint (`balance` does) and does not implement HTTP/1.1 (`forward`
//! does). Start with [`connect`].

mod http2;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use canal_gateway_config::{Endpoint, TenantTls};
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_io::body::Http1Io;
use canal_gateway_io::buffer::Inbox;
use canal_gateway_io::io::Io;
use canal_hbone::{ConnectAuthority, TunnelTarget};
use canal_model::identity::Identity;
use canal_model::program::TunnelProtocol;
use canal_net::sys::{self, ConnectOptions};
use canal_wire::hbone::HBONE_PORT;
use http::HeaderMap;
use tokio::time::Instant;

pub(crate) use http2::{acquire_stream, final_response};

use crate::endpoints::SelectedEndpoint;
use crate::worker::Worker;

/// Timeout of a TCP connect or of opening a tunnel. The client waits in the meantime, so it is
/// shorter than the limits of `canal_net`. TCP repeats a lost SYN after 1 s and 3 s, so one or two
/// lost packets are no failure.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection for one HTTP/1.1 exchange.
pub(crate) struct UpstreamLease {
    pub(crate) wire: Http1Io,
    /// True if the connection carried a request before.
    pub(crate) reused: bool,
}

/// Takes a working idle connection to the endpoint, if there is one.
pub(crate) fn take_idle(worker: &Worker, chosen: &SelectedEndpoint) -> Option<UpstreamLease> {
    let io = chosen
        .state()
        .take_idle(chosen.address, chosen.client.as_deref())?;
    worker.counts.reused.inc();
    Some(UpstreamLease {
        wire: Http1Io::new(io, Inbox::new(&worker.blocks)),
        reused: true,
    })
}

/// Opens a new connection for HTTP/1.1.
pub(crate) async fn open_connection(
    worker: &Worker,
    chosen: &SelectedEndpoint,
    introduction: TunnelMetadata<'_>,
) -> Result<UpstreamLease, ProxyError> {
    let io = connect(worker, chosen, introduction).await?;
    Ok(UpstreamLease {
        wire: Http1Io::new(io, Inbox::new(&worker.blocks)),
        reused: false,
    })
}

/// Stores the connection for the next request, unless enough are idle.
pub(crate) fn return_idle(worker: &Worker, chosen: &SelectedEndpoint, wire: Http1Io) {
    // Unrequested bytes make the connection unusable: they would be read as the response to another
    // client's request.
    let usable = wire.inbox.is_empty() && wire.outbox.is_empty() && !worker.is_draining();
    let max = worker.shared.config.limits.idle_per_endpoint;
    if !usable
        || !chosen
            .state()
            .return_idle(wire.io, chosen, max, worker.clock.now())
    {
        worker.counts.not_kept.inc();
    }
}

/// Metadata that a new tunnel sends to its other end.
pub(crate) struct TunnelMetadata<'a> {
    /// The gateway's identity in the tenant; `None` if it has none.
    pub(crate) tls: Option<&'a TenantTls>,
    /// Headers that identify the client, for a connection that carries only that client's bytes. A
    /// pooled connection names no client.
    pub(crate) headers: HeaderMap,
}

/// Opens a new connection to the endpoint, by tunnel or in plaintext as its workload declares.
/// Ejects the endpoint after a failure and restores it after a success.
pub(crate) async fn connect(
    worker: &Worker,
    chosen: &SelectedEndpoint,
    introduction: TunnelMetadata<'_>,
) -> Result<Io, ProxyError> {
    let opened = match chosen.endpoint().workload.tunnel {
        TunnelProtocol::None => plain(worker, chosen).await,
        TunnelProtocol::Hbone => tunnel(worker, chosen, introduction).await,
    };
    match opened {
        Ok(io) => {
            chosen.state().succeeded();
            worker.counts.connects_ok.inc();
            Ok(io)
        }
        Err(ConnectFailure { why, shortage }) => {
            worker.counts.connects_failed.inc();
            // A local shortage is not the endpoint's failure, so it does not eject the endpoint.
            if let Some(what) = shortage {
                worker.counts.short_of(what);
            } else if chosen
                .state()
                .failed(Instant::now(), worker.shared.config.times.ejection)
            {
                worker.counts.ejections.inc();
            }
            Err(ProxyError::Connect { why })
        }
    }
}

/// Reason why there is no connection. `shortage` names a resource that this machine lacks; the
/// endpoint is not ejected then.
struct ConnectFailure {
    why: String,
    shortage: Option<&'static str>,
}

impl From<String> for ConnectFailure {
    fn from(why: String) -> Self {
        Self {
            why,
            shortage: None,
        }
    }
}

/// Returns the socket mark for connections to an endpoint. Inside the tier it is the tenant's VNI.
/// An endpoint without one is not dialled, because only the mark identifies the network to which
/// the address belongs.
fn decide_mark(tier: bool, endpoint: &Endpoint) -> Result<Option<u32>, String> {
    match (tier, endpoint.workload.vni) {
        (false, _) => Ok(None),
        (true, Some(vni)) => Ok(Some(vni.get())),
        (true, None) => Err(format!(
            "{}: the tenant's network is unknown",
            endpoint.address
        )),
    }
}

async fn plain(worker: &Worker, chosen: &SelectedEndpoint) -> Result<Io, ConnectFailure> {
    let (address, tier) = (chosen.address, worker.shared.config.tier.as_ref());
    let bind = tier.and_then(|t| t.sources.source_for(address.ip()));
    let mark = decide_mark(tier.is_some(), chosen.endpoint())?;
    let options = ConnectOptions {
        bind,
        mark,
        timeout: CONNECT_TIMEOUT,
        ..ConnectOptions::default()
    };
    let failed = |e: sys::SysError| ConnectFailure {
        shortage: e.exhausted_resource(),
        why: e.to_string(),
    };
    sys::connect(None, address, &options)
        .await
        .map(Io::Tcp)
        .map_err(failed)
}

async fn tunnel(
    worker: &Worker,
    chosen: &SelectedEndpoint,
    introduction: TunnelMetadata<'_>,
) -> Result<Io, ConnectFailure> {
    let Some(tls) = introduction.tls else {
        return Err(format!(
            "{}: the gateway has no identity in this tenant",
            chosen.address
        )
        .into());
    };
    let expected: Arc<[Identity]> = chosen.endpoint().workload.identity.clone();
    let address = SocketAddr::new(chosen.address.ip(), HBONE_PORT);
    let mark = decide_mark(worker.shared.config.tier.is_some(), chosen.endpoint())?;
    let target = TunnelTarget {
        source: tls.client.clone(),
        expected,
        address,
        netns: None,
        mark,
    };
    let authority = ConnectAuthority::Address(chosen.address);
    match worker
        .tunnels
        .open(&target, &authority, introduction.headers)
        .await
    {
        Ok(opened) => Ok(Io::Tunnel(Box::new(opened.stream))),
        Err(e) => Err(e.to_string().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use canal_gateway_config::testing::set_of;

    #[test]
    fn inside_the_tier_nothing_is_dialled_without_a_mark() {
        let set = set_of(1);
        let endpoint = &set.endpoints[0];
        assert_eq!(endpoint.workload.vni, None, "its tenant was not configured");
        assert!(decide_mark(true, endpoint).is_err());
        assert_eq!(decide_mark(false, endpoint), Ok(None));
    }
}
