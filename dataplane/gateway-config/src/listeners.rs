//! The listeners of a Gateway: which routes apply to a request, by the port at which it arrived and
//! its host. `canal_compiler`'s `oracle_ingress` defines the meaning. Start with
//! [`ListenerIndex::find`].

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_model::listener_filters::ListenerFilter;
use canal_model::program::{
    HostMatch, IngressGateway, IngressListener, RouteObject, RouteRule, VirtualHost,
};
use canal_model::route_table::RouteTable;
use canal_router::HostTable;
use hashbrown::HashMap;

/// A Gateway's listeners by port and host.
#[derive(Debug)]
pub(crate) struct ListenerIndex {
    pub(crate) gateway: Arc<IngressGateway>,
    ports: HashMap<u16, HostTable<ListenerHosts>>,
    /// True if a listener has filters. Nearly no Gateway has one.
    has_filters: bool,
}

/// The hosts of one listener, each with the position of its routes.
#[derive(Debug, Default)]
struct ListenerHosts {
    is_open: bool,
    /// `None` if there are none.
    filters: Option<Arc<[ListenerFilter]>>,
    hosts: HostTable<usize>,
}

impl ListenerIndex {
    /// Builds the index, and the tables of rules to which it refers by position. Hosts with the
    /// same routes share a table.
    pub(crate) fn new(
        gateway: Arc<IngressGateway>,
        rules: &[Arc<RouteRule>],
    ) -> (Self, Vec<RouteTable>) {
        let mut by_route: BTreeMap<RouteObject, Vec<&Arc<RouteRule>>> = BTreeMap::new();
        for rule in rules {
            by_route.entry(rule.key.route()).or_default().push(rule);
        }
        let mut tables = Vec::new();
        let mut known = BTreeMap::new();
        let mut table_of = |host: &VirtualHost| {
            *known.entry(host.routes.clone()).or_insert_with(|| {
                let routes = host.routes.iter();
                let rules = routes.flat_map(|route| by_route.get(route).into_iter().flatten());
                tables.push(RouteTable::new(rules.map(|rule| (*rule).clone()).collect()));
                tables.len() - 1
            })
        };
        let mut ports: HashMap<u16, HostTable<ListenerHosts>> = HashMap::new();
        for listener in in_order_of_precedence(gateway.listeners.iter()) {
            let mut hosts = HostTable::new();
            for host in &listener.virtual_hosts {
                hosts.insert(&host_text(host.host.as_ref()), table_of(host));
            }
            let is_open = listener.is_open;
            let has_filters = !listener.filters.is_empty();
            let filters = has_filters.then(|| listener.filters.clone().into());
            ports.entry(listener.port).or_default().insert(
                &host_text(listener.host.as_ref()),
                ListenerHosts {
                    is_open,
                    filters,
                    hosts,
                },
            );
        }
        let has_filters = gateway.listeners.iter().any(|it| !it.filters.is_empty());
        let index = Self {
            gateway,
            ports,
            has_filters,
        };
        (index, tables)
    }

    /// Returns the filters of the listener that takes a request, if it has any. A closed listener
    /// refuses its requests without them.
    pub(crate) fn filters(&self, port: u16, host: &[u8]) -> Option<&Arc<[ListenerFilter]>> {
        if !self.has_filters {
            return None;
        }
        let listener = self.ports.get(&port)?.get(host)?;
        listener.filters.as_ref().filter(|_| listener.is_open)
    }

    /// Visits the tables that apply to a request, the one of the most specific host first, until
    /// `visit` returns a result. A closed listener has none.
    pub(crate) fn find<R>(
        &self,
        port: u16,
        host: &[u8],
        mut visit: impl FnMut(usize) -> Option<R>,
    ) -> Option<R> {
        let listener = self.ports.get(&port)?.get(host)?;
        if !listener.is_open {
            return None;
        }
        listener.hosts.find(host, |table| visit(*table))
    }

    /// True if another listener of the port than that of the server name has the most specific host
    /// for a request. A host that no listener has misdirects nothing: it gets 404.
    pub(crate) fn is_misdirected(&self, port: u16, server_name: Option<&str>, host: &[u8]) -> bool {
        let Some(listeners) = self.ports.get(&port) else {
            return false;
        };
        let of_connection = listeners.get(server_name.unwrap_or_default().as_bytes());
        let of_request = listeners.get(host);
        of_request.is_some_and(|it| !of_connection.is_some_and(|own| std::ptr::eq(own, it)))
    }

    pub(crate) fn has_port(&self, port: u16) -> bool {
        self.ports.contains_key(&port)
    }
}

/// Sorts listeners so that of two with the same host the one that decides is the last: the open one,
/// else the first. Entries that are inserted later replace earlier ones.
pub(crate) fn in_order_of_precedence<'a>(
    listeners: impl Iterator<Item = &'a IngressListener>,
) -> Vec<&'a IngressListener> {
    let mut listeners: Vec<_> = listeners.collect();
    listeners.reverse();
    listeners.sort_by_key(|it| it.is_open);
    listeners
}

/// Returns a host as it is written in a [`HostTable`].
pub(crate) fn host_text(host: Option<&HostMatch>) -> String {
    match host {
        Some(HostMatch::Exact(name)) => name.clone(),
        Some(HostMatch::Suffix(domain)) => format!("*{domain}"),
        None => "*".to_owned(),
    }
}
