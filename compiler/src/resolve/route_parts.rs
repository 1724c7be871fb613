//! The parts that the kinds of routes have in common, and which of the two kinds routes a port
//! of a Service that both name. It does not resolve the rules: see `http_route` and `grpc_route`.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::gateway_api::{GrpcRule, HttpRule, ParentRef, RelayRule};
use canal_model::policy::{Document, Metadata, ObjectKind};

use super::destination::DestinationIndex;
use super::http_route::{Parent, Parents, TableKey};
use super::tenant_objects::{Sourced, TenantObjects};
use crate::diagnostic_collector::DiagnosticCollector;
use crate::precedence::route_seniority;

/// The parts of a route.
pub(super) struct RouteParts<'a> {
    pub(super) metadata: &'a Metadata,
    pub(super) parent_refs: &'a [ParentRef],
    pub(super) hostnames: &'a [String],
    pub(super) rules: RuleList<'a>,
}

impl<'a> RouteParts<'a> {
    fn new(
        metadata: &'a Metadata,
        parent_refs: &'a [ParentRef],
        hostnames: &'a [String],
        rules: RuleList<'a>,
    ) -> Self {
        Self {
            metadata,
            parent_refs,
            hostnames,
            rules,
        }
    }
}

/// The rules of a route, which tell its kind.
#[derive(Clone, Copy)]
pub(super) enum RuleList<'a> {
    Http(&'a [HttpRule]),
    Grpc(&'a [GrpcRule]),
    Tls(&'a [RelayRule]),
    Tcp(&'a [RelayRule]),
}

impl RuleList<'_> {
    pub(super) fn kind(self) -> ObjectKind {
        match self {
            Self::Http(_) => ObjectKind::HttpRoute,
            Self::Grpc(_) => ObjectKind::GrpcRoute,
            Self::Tls(_) => ObjectKind::TlsRoute,
            Self::Tcp(_) => ObjectKind::TcpRoute,
        }
    }

    /// Returns whether the route is about connections and not about requests.
    pub(super) fn is_of_connections(self) -> bool {
        matches!(self, Self::Tls(_) | Self::Tcp(_))
    }

    pub(super) fn len(self) -> usize {
        match self {
            Self::Http(rules) => rules.len(),
            Self::Grpc(rules) => rules.len(),
            Self::Tls(rules) | Self::Tcp(rules) => rules.len(),
        }
    }
}

/// The routes of a tenant, and their documents.
pub(super) struct TenantRoutes<'a>(Vec<(&'a Document, RouteParts<'a>)>);

impl<'a> TenantRoutes<'a> {
    /// Collects the routes of all kinds, the oldest first: if two of them are in conflict on a
    /// listener, that one keeps its hosts.
    pub(super) fn collect(corpus: &TenantObjects<'a>) -> Self {
        let http = corpus.http_routes.iter().map(|it| {
            let spec = &it.object.spec;
            let rules = RuleList::Http(&spec.rules);
            let metadata = &it.object.metadata;
            (
                it.document,
                RouteParts::new(metadata, &spec.parent_refs, &spec.hostnames, rules),
            )
        });
        let grpc = corpus.grpc_routes.iter().map(|it| {
            let spec = &it.object.spec;
            let rules = RuleList::Grpc(&spec.rules);
            let metadata = &it.object.metadata;
            (
                it.document,
                RouteParts::new(metadata, &spec.parent_refs, &spec.hostnames, rules),
            )
        });
        let tls = corpus.tls_routes.iter().map(|it| {
            let spec = &it.object.spec;
            let rules = RuleList::Tls(&spec.rules);
            let metadata = &it.object.metadata;
            (
                it.document,
                RouteParts::new(metadata, &spec.parent_refs, &spec.hostnames, rules),
            )
        });
        let tcp = corpus.tcp_routes.iter().map(|it| {
            let spec = &it.object.spec;
            let rules = RuleList::Tcp(&spec.rules);
            let metadata = &it.object.metadata;
            // A TCP connection names no host.
            (
                it.document,
                RouteParts::new(metadata, &spec.parent_refs, &[], rules),
            )
        });
        let mut routes: Vec<_> = http.chain(grpc).chain(tls).chain(tcp).collect();
        // Routes of one kind are in order already.
        if !corpus.grpc_routes.is_empty() {
            // Only HTTPRoutes and GRPCRoutes can claim the same host of a listener.
            routes.sort_by_cached_key(|(document, _)| route_seniority(document));
        }
        Self(routes)
    }

    pub(super) fn sourced(&self) -> Vec<Sourced<'_, RouteParts<'a>>> {
        let routes = self.0.iter();
        routes
            .map(|(document, object)| Sourced { document, object })
            .collect()
    }
}

/// Takes the ports that GRPCRoutes route from the HTTPRoutes that name them too. Gateway API
/// (GEP-1294) applies routes of only one kind to a port of a Service: GRPCRoutes, if there are any.
pub(super) fn yield_to_grpc(
    routes: &[Sourced<'_, RouteParts<'_>>],
    of_services: &mut [Parents],
    to: &DestinationIndex<'_>,
    report: &mut DiagnosticCollector,
) {
    let is_grpc =
        |route: &Sourced<'_, RouteParts<'_>>| route.object.rules.kind() == ObjectKind::GrpcRoute;
    // Routes for the clients of one namespace neither take ports from the others nor lose any to them.
    let mut taken: BTreeMap<TableKey, BTreeSet<u16>> = BTreeMap::new();
    for (_, parents) in routes
        .iter()
        .zip(&*of_services)
        .filter(|(route, _)| is_grpc(route))
    {
        for parent in parents.keys() {
            let ports = taken.entry(parent.table()).or_default();
            ports.extend(ports_of(parent, to));
        }
    }
    if taken.is_empty() {
        return;
    }
    for (route, parents) in routes
        .iter()
        .zip(of_services)
        .filter(|(route, _)| !is_grpc(route))
    {
        for (parent, fault) in std::mem::take(parents) {
            let ports = ports_of(&parent, to);
            let of_grpc = taken.get(&parent.table());
            let (lost, kept): (Vec<u16>, Vec<u16>) = ports
                .into_iter()
                .partition(|port| of_grpc.is_some_and(|taken| taken.contains(port)));
            if lost.is_empty() {
                parents.insert(parent, fault);
                continue;
            }
            let lost: Vec<String> = lost.iter().map(ToString::to_string).collect();
            let problem = format!(
                "a GRPCRoute routes port {} of Service {}/{}, so this object does not",
                lost.join(", "),
                parent.service.namespace,
                parent.service.name
            );
            let fix = "name other ports, or write everything in GRPCRoutes";
            report.warning(
                Code::RouteConflict,
                route.document,
                "spec.parentRefs",
                problem,
                fix,
            );
            // Ports that no GRPCRoute names stay with this route.
            parents.extend(kept.into_iter().map(|port| {
                let port = Some(port);
                (
                    Parent {
                        port,
                        ..parent.clone()
                    },
                    fault.clone(),
                )
            }));
        }
    }
}

/// Returns the ports of a Service that a parent means.
fn ports_of(parent: &Parent, to: &DestinationIndex<'_>) -> Vec<u16> {
    let service = to.services.get(&parent.service);
    let ports = service.iter().flat_map(|service| &service.ports);
    let ports = ports.map(|port| port.port);
    ports
        .filter(|port| parent.port.is_none_or(|own| own == *port))
        .collect()
}
