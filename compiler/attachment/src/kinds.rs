//! Kinds of routes on listeners: which a listener takes, and which hosts the routes of each kind have
//! there. HTTPRoutes and GRPCRoutes have no host of a listener in common (Gateway API v1.7.0,
//! GRPCRouteSpec.hostnames): the older route keeps it.

use std::collections::BTreeSet;
use std::ops::Bound;

use canal_model::ingress::ListenerProtocol;
use canal_model::policy::ObjectKind;
use canal_model::program::HostMatch;

/// Returns the kinds of routes that Canal can attach to a listener of a protocol.
pub(crate) fn route_kinds(protocol: &ListenerProtocol) -> &'static [ObjectKind] {
    match protocol {
        ListenerProtocol::Http | ListenerProtocol::Https => {
            &[ObjectKind::HttpRoute, ObjectKind::GrpcRoute]
        }
        ListenerProtocol::Tls | ListenerProtocol::TerminatedTls => &[ObjectKind::TlsRoute],
        ListenerProtocol::Tcp => &[ObjectKind::TcpRoute],
        // The listener is closed. What its routes may be is not known.
        ListenerProtocol::Other(_) => &[
            ObjectKind::HttpRoute,
            ObjectKind::GrpcRoute,
            ObjectKind::TlsRoute,
            ObjectKind::TcpRoute,
        ],
    }
}

/// The hosts of the routes on one listener, by their kind.
#[derive(Debug, Default)]
pub(crate) struct KindHosts {
    http: HostSet,
    grpc: HostSet,
}

impl KindHosts {
    /// Adds the hosts of a route, unless a route of the other kind has one of them. Returns whether
    /// it added them.
    pub(crate) fn add(&mut self, kind: ObjectKind, hosts: &[Option<HostMatch>]) -> bool {
        let (own, others) = match kind {
            ObjectKind::GrpcRoute => (&mut self.grpc, &self.http),
            _ => (&mut self.http, &self.grpc),
        };
        let keys: Vec<String> = hosts.iter().map(|host| reversed(host.as_ref())).collect();
        let is_free = !keys.iter().any(|key| others.overlaps(key));
        if is_free {
            own.0.extend(keys);
        }
        is_free
    }
}

/// Hosts in reversed form: every host that `*.example.com` matches begins with `moc.elpmaxe.`.
#[derive(Debug, Default)]
struct HostSet(BTreeSet<String>);

impl HostSet {
    /// Returns whether a name that the host matches is one that a host of the set matches.
    fn overlaps(&self, key: &str) -> bool {
        // Hosts that contain this one. Any host is written as an empty text.
        let ends = key.match_indices('.').map(|(at, _)| at + 1);
        let mut outer = std::iter::once(0).chain(ends);
        if self.0.contains(key) || outer.any(|end| self.0.contains(&key[..end])) {
            return true;
        }
        // Hosts that this one contains: only a pattern contains other hosts.
        let is_pattern = key.is_empty() || key.ends_with('.');
        let from: (Bound<&str>, Bound<&str>) = (Bound::Included(key), Bound::Unbounded);
        let mut inner = self.0.range::<str, _>(from);
        is_pattern && inner.next().is_some_and(|host| host.starts_with(key))
    }
}

fn reversed(host: Option<&HostMatch>) -> String {
    match host {
        None => String::new(),
        Some(HostMatch::Exact(text) | HostMatch::Suffix(text)) => text.chars().rev().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hostname::{overlap, parse};

    #[test]
    fn host_sets_overlap_as_their_hosts_do() {
        let texts = [
            "",
            "example.com",
            "a.example.com",
            "b.a.example.com",
            "*.example.com",
            "*.a.example.com",
            "*.com",
            "*.badexample.com",
            "xexample.com",
            "com",
        ];
        let hosts = texts.map(|text| (!text.is_empty()).then(|| parse(text).unwrap()));
        for a in &hosts {
            let set = HostSet([reversed(a.as_ref())].into());
            for b in &hosts {
                let found = set.overlaps(&reversed(b.as_ref()));
                assert_eq!(found, overlap(a.as_ref(), b.as_ref()), "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn the_first_route_of_a_host_keeps_it_from_the_other_kind() {
        let host = |text: &str| vec![Some(parse(text).unwrap())];
        let mut hosts = KindHosts::default();
        assert!(hosts.add(ObjectKind::GrpcRoute, &host("*.example.com")));
        assert!(!hosts.add(ObjectKind::HttpRoute, &host("a.example.com")));
        assert!(hosts.add(ObjectKind::GrpcRoute, &host("a.example.com")));
        assert!(hosts.add(ObjectKind::HttpRoute, &host("example.com")));
        assert!(!hosts.add(ObjectKind::HttpRoute, &[None]));
    }
}
