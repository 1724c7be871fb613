//! Which routes of a tenant depend on each other: those that route one Service, and VirtualServices
//! with their delegates. Routes that are not connected are compiled independently. Start at
//! [`RouteGraph::connected`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_attachment::{MESH, is_listener_parent};
use canal_model::ids::{Namespace, ObjectName, ServiceKey, TenantName};
use canal_model::policy::gateway_api::ParentRef;
use canal_model::policy::istio::VirtualService;
use canal_model::policy::{Document, Metadata, Object, ObjectKey, ObjectKind};

use super::document_changes::DocumentChanges;
use crate::limits::HOSTS_PER_ROUTE_MAX;
use crate::names;
use crate::resolve::parent_service;

/// Maximum number of links of a tenant's routes. A tenant with more has no graph, so that the whole
/// tenant is compiled for each change.
/// A few bytes of text are a link, which takes about half a kilobyte as long as the tenant exists: so
/// these are 64 MiB. 100,000 routes may have one parent each.
const LINKS_PER_TENANT_MAX: usize = 131_072;

/// What routes have in common if one of them can change the other's rules.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RouteLink {
    /// A Service that the route's parents or hosts name, whether or not it exists.
    Service(ServiceKey),
    /// A VirtualService: the route itself, or an object to which it delegates.
    VirtualService(Namespace, ObjectName),
}

/// A route and what connects it with others.
#[derive(Debug, Clone)]
pub(super) struct LinkedRoute {
    pub(super) document: Arc<Document>,
    pub(super) links: BTreeSet<RouteLink>,
    /// Whether it names a Gateway, of which the routes share listeners and limits.
    pub(super) is_on_gateway: bool,
}

/// The HTTPRoutes, GRPCRoutes and VirtualServices of a tenant. Other routes have no rules on
/// Services.
#[derive(Debug, Default)]
pub(super) struct RouteGraph {
    routes: BTreeMap<ObjectKey, LinkedRoute>,
    linked: BTreeMap<RouteLink, BTreeSet<ObjectKey>>,
    /// Number of the links of all routes.
    links: usize,
    grpc_routes: usize,
}

impl LinkedRoute {
    /// Reads the links of a route; `None` for objects of other kinds.
    pub(super) fn of(tenant: &TenantName, document: &Arc<Document>) -> Option<Self> {
        let (links, is_on_gateway) = match &document.object {
            Object::HttpRoute(route) => {
                of_parents(tenant, &route.metadata, &route.spec.parent_refs)
            }
            Object::GrpcRoute(route) => {
                of_parents(tenant, &route.metadata, &route.spec.parent_refs)
            }
            Object::VirtualService(route) => of_virtual_service(tenant, route),
            _ => return None,
        };
        Some(Self {
            document: document.clone(),
            links,
            is_on_gateway,
        })
    }
}

fn of_parents(
    tenant: &TenantName,
    metadata: &Metadata,
    parents: &[ParentRef],
) -> (BTreeSet<RouteLink>, bool) {
    let services = parents
        .iter()
        // A parent that is refused connects nothing.
        .filter_map(|parent| parent_service(tenant, &metadata.namespace, parent).ok());
    (
        services.map(RouteLink::Service).collect(),
        parents.iter().any(is_listener_parent),
    )
}

fn of_virtual_service(tenant: &TenantName, route: &VirtualService) -> (BTreeSet<RouteLink>, bool) {
    let own = &route.metadata.namespace;
    // Further hosts are left out.
    let hosts = route.spec.hosts.iter().take(HOSTS_PER_ROUTE_MAX);
    let services = hosts.filter_map(|host| names::service(tenant, own, host));
    let rules = route.spec.http.iter();
    let delegates = rules.filter_map(|rule| rule.delegate.as_ref());
    let named = delegates.map(|it| (it.namespace.as_ref().unwrap_or(own), &it.name));
    let objects = named.chain([(own, &route.metadata.name)]);
    let objects =
        objects.map(|(namespace, name)| RouteLink::VirtualService(namespace.clone(), name.clone()));
    (
        services.map(RouteLink::Service).chain(objects).collect(),
        route.spec.gateways.iter().any(|gateway| gateway != MESH),
    )
}

impl RouteGraph {
    /// Reads the routes among the documents of a tenant; `None` if they have too many links.
    pub(super) fn new(tenant: &TenantName, documents: &[Arc<Document>]) -> Option<Self> {
        let mut graph = Self::default();
        for document in documents {
            if let Some(route) = LinkedRoute::of(tenant, document) {
                if !graph.has_room_for(route.links.len()) {
                    return None;
                }
                graph.insert(document.object.key(), route);
            }
        }
        Some(graph)
    }

    /// Returns whether the routes may have so many links more.
    pub(super) fn has_room_for(&self, links: usize) -> bool {
        self.links + links <= LINKS_PER_TENANT_MAX
    }

    pub(super) fn get(&self, key: &ObjectKey) -> Option<&LinkedRoute> {
        self.routes.get(key)
    }

    /// Returns the number of GRPCRoutes of the tenant.
    pub(super) fn grpc_routes(&self) -> usize {
        self.grpc_routes
    }

    /// Applies changes of documents to the routes and their links.
    pub(super) fn apply(&mut self, tenant: &TenantName, documents: &DocumentChanges) {
        for (key, change) in &documents.changed {
            let after = change.after.as_ref();
            match after.and_then(|after| LinkedRoute::of(tenant, after)) {
                Some(route) => self.insert(key.clone(), route),
                None => self.remove(key),
            }
        }
    }

    /// Adds or replaces a route.
    fn insert(&mut self, key: ObjectKey, route: LinkedRoute) {
        self.remove(&key);
        for link in &route.links {
            let linked = self.linked.entry(link.clone()).or_default();
            linked.insert(key.clone());
        }
        self.links += route.links.len();
        self.grpc_routes += usize::from(key.kind == ObjectKind::GrpcRoute);
        self.routes.insert(key, route);
    }

    /// Removes a route, if it exists.
    fn remove(&mut self, key: &ObjectKey) {
        let Some(route) = self.routes.remove(key) else {
            return;
        };
        self.links -= route.links.len();
        self.grpc_routes -= usize::from(key.kind == ObjectKind::GrpcRoute);
        for link in &route.links {
            let Some(linked) = self.linked.get_mut(link) else {
                continue;
            };
            linked.remove(key);
            if linked.is_empty() {
                self.linked.remove(link);
            }
        }
    }

    /// Returns the routes that are connected with one of these links, directly or through other
    /// routes; `None` if there are more than `max`.
    pub(super) fn connected(
        &self,
        links: BTreeSet<RouteLink>,
        max: usize,
    ) -> Option<(BTreeSet<ObjectKey>, BTreeSet<RouteLink>)> {
        let mut routes = BTreeSet::new();
        let mut waiting: Vec<RouteLink> = links.iter().cloned().collect();
        let mut reached = links;
        while let Some(link) = waiting.pop() {
            for key in self.linked.get(&link).into_iter().flatten() {
                if !routes.insert(key.clone()) {
                    continue;
                }
                if routes.len() > max {
                    return None;
                }
                for next in self.routes.get(key).iter().flat_map(|it| &it.links) {
                    if reached.insert(next.clone()) {
                        waiting.push(next.clone());
                    }
                }
            }
        }
        Some((routes, reached))
    }
}

#[cfg(test)]
mod tests {
    use canal_model::policy::istio::VirtualServiceSpec;

    use super::*;

    /// Returns a VirtualService with one host more than it may have.
    fn largest(number: usize) -> Arc<Document> {
        let hosts = (0..=HOSTS_PER_ROUTE_MAX).map(|at| format!("s-{at}"));
        let spec = VirtualServiceSpec {
            hosts: hosts.collect(),
            ..VirtualServiceSpec::default()
        };
        let metadata = Metadata {
            name: format!("vs-{number}").parse().unwrap(),
            namespace: "shop".parse().unwrap(),
            labels: Default::default(),
            annotations: Default::default(),
            creation_timestamp: None,
            deletion_timestamp: None,
        };
        Arc::new(Document {
            object: Object::VirtualService(VirtualService { metadata, spec }),
            origin: canal_model::diagnostic::SourceLocation {
                file: "a.yaml".into(),
                line: 1,
                column: 1,
            },
            text: "".into(),
            faults: Vec::new(),
        })
    }

    #[test]
    fn a_tenant_with_too_many_links_has_no_graph() {
        let tenant: TenantName = "alpha".parse().unwrap();
        // One link more for the object itself.
        let count = LINKS_PER_TENANT_MAX / (HOSTS_PER_ROUTE_MAX + 1);
        let mut documents: Vec<_> = (0..count).map(largest).collect();
        let graph = RouteGraph::new(&tenant, &documents).unwrap();
        assert_eq!(graph.links, count * (HOSTS_PER_ROUTE_MAX + 1));
        let rest = LINKS_PER_TENANT_MAX - graph.links;
        assert!(graph.has_room_for(rest) && !graph.has_room_for(rest + 1));
        documents.push(largest(count));
        assert!(RouteGraph::new(&tenant, &documents).is_none());
    }
}
