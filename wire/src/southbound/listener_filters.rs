//! Wire form of listeners of ports on which one of them has filters of requests. They have a list of
//! their own, so that a data plane that does not know them does not serve their ports.

use std::collections::BTreeSet;

use canal_model::listener_filters as m;

use super::decode::DecodeContext;
use super::{ResourceDecodeError, route_authorizer};
use crate::program as w;

/// A listener of such a port, of which only the filters are checked.
pub(super) struct ReceivedListener {
    pub(super) listener: w::IngressListener,
    pub(super) filters: Vec<m::ListenerFilter>,
    pub(super) is_proxied: bool,
}

impl From<&m::ListenerFilter> for w::ListenerFilter {
    fn from(filter: &m::ListenerFilter) -> Self {
        use w::listener_filter::Filter;
        Self {
            filter: Some(match filter {
                m::ListenerFilter::Authorize(authorizer) => Filter::Authorizer(authorizer.into()),
                m::ListenerFilter::Refuse => Filter::Refuse(true),
            }),
        }
    }
}

/// Reads the list. `others` are the listeners of all other lists.
pub(super) fn decode<'a>(
    at: &DecodeContext<'_>,
    received: Vec<w::FilteringListener>,
    others: impl Iterator<Item = &'a w::IngressListener>,
) -> Result<Vec<ReceivedListener>, ResourceDecodeError> {
    let read = received.into_iter().map(|it| read_listener(at, it));
    let read = read.collect::<Result<Vec<_>, _>>()?;
    let ports: BTreeSet<u32> = read.iter().map(|it| it.listener.port).collect();
    let mut others = others;
    // A data plane that knows only the other list would serve the port without the filters.
    if let Some(it) = others.find(|it| ports.contains(&it.port)) {
        return at.err(
            "filtering_listeners",
            format!("port {} has listeners in another list", it.port),
        );
    }
    Ok(read)
}

fn read_listener(
    at: &DecodeContext<'_>,
    received: w::FilteringListener,
) -> Result<ReceivedListener, ResourceDecodeError> {
    let listener = at.need("filtering_listeners.listener", received.listener)?;
    // The bytes of a connection that is relayed are no requests.
    if listener.relay.is_some() {
        return at.err("filtering_listeners.relay", "is on a listener with filters");
    }
    let count = received.filters.len();
    at.at_most(
        "filtering_listeners.filters",
        count,
        m::LISTENER_FILTERS_MAX,
    )?;
    let filters = received.filters.into_iter().map(|it| read_filter(at, it));
    Ok(ReceivedListener {
        listener,
        filters: filters.collect::<Result<_, _>>()?,
        is_proxied: received.proxied,
    })
}

fn read_filter(
    at: &DecodeContext<'_>,
    received: w::ListenerFilter,
) -> Result<m::ListenerFilter, ResourceDecodeError> {
    use w::listener_filter::Filter;
    // A filter that this data plane does not know is absent here, and must not be skipped.
    Ok(
        match at.need("filtering_listeners.filters", received.filter)? {
            Filter::Authorizer(authorizer) => {
                m::ListenerFilter::Authorize(route_authorizer::decode(at, authorizer)?)
            }
            Filter::Refuse(_) => m::ListenerFilter::Refuse,
        },
    )
}
