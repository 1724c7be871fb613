//! Attachment of one route: which listeners its parents name, which of these allow it, and for
//! which hosts. A route that attaches to nothing gets a diagnostic of its own and changes nothing
//! else.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::diagnostic::Diagnostic;
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName, ServiceKey};
use canal_model::policy::gateway_api::ParentRef;
use canal_model::policy::{Document, ObjectKind};
use canal_model::program::HostMatch;

use crate::kinds::KindHosts;
use crate::listeners::{
    COMPARISONS_PER_TENANT_MAX, GatewayListeners, PlacedListener, TenantListeners,
};
use crate::{DocumentReport, GROUP, hostname, shorten};

/// Maximum number of Gateways and ListenerSets that one route names (Gateway API allows 32).
pub const LISTENER_PARENTS_PER_ROUTE_MAX: usize = 32;
/// Maximum number of hosts of one route, counted once for each listener that it attaches to.
/// These are one host on each listener of 32 Gateways of the largest size
/// ([`LISTENER_PARENTS_PER_ROUTE_MAX`], `LISTENERS_PER_GATEWAY_MAX`).
pub const ATTACHED_HOSTS_PER_ROUTE_MAX: usize = 16_384;

/// Returns whether a parent is one that has listeners.
pub fn is_listener_parent(parent: &ParentRef) -> bool {
    parent.group == GROUP && (parent.kind == "Gateway" || parent.kind == "ListenerSet")
}

/// The parents and hosts of a route.
#[derive(Debug, Clone, Copy)]
pub struct RouteParents<'a> {
    pub document: &'a Document,
    pub namespace: &'a Namespace,
    pub parents: &'a [ParentRef],
    /// Hosts as written; an empty list means any host.
    pub hostnames: &'a [String],
}

/// A route on one listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// The service that stands for the Gateway.
    pub gateway: ServiceKey,
    /// Index of the listener in [`GatewayListeners::listeners`].
    pub listener: usize,
    /// Hosts of the route that overlap the listener's; `None` means any host. Never empty. They keep
    /// the route's form, because precedence among routes compares what each of them names.
    pub hosts: Vec<Option<HostMatch>>,
    /// Index of the parent in the route, or of the Gateway in the VirtualService.
    pub parent: usize,
}

/// A route on all its listeners.
#[derive(Debug, Default)]
pub struct AttachedRoute {
    pub attachments: Vec<Attachment>,
    /// Gateways with a closed listener on which the route would be if it were open.
    pub closed_gateways: BTreeSet<ServiceKey>,
}

impl TenantListeners {
    /// Attaches a route to listeners. Only parents that have listeners count.
    pub fn attach(
        &mut self,
        route: &RouteParents<'_>,
        sink: &mut dyn FnMut(Diagnostic),
    ) -> AttachedRoute {
        let document = route.document;
        let mut report = DocumentReport { document, sink };
        // The compiler reports hosts that are broken.
        let hosts: BTreeSet<HostMatch> = route
            .hostnames
            .iter()
            .filter_map(|written| hostname::parse(written).ok())
            .collect();
        let mut found = RouteAttachments {
            route,
            hosts,
            attached: BTreeSet::new(),
            on_closed: BTreeSet::new(),
            attachments: Vec::new(),
            hosts_left: ATTACHED_HOSTS_PER_ROUTE_MAX,
            comparisons_left: self.comparisons_left,
            kind: document.object.kind(),
            // The hosts are moved for the call, and given back below.
            kind_hosts: self.kind_hosts.take(),
        };
        let mut distinct: Vec<&ParentRef> = Vec::new();
        let listed = route.parents.iter().enumerate();
        for (at, written) in listed.filter(|(_, written)| is_listener_parent(written)) {
            // A parent that is named twice is attached to once.
            if distinct.contains(&written) {
                continue;
            }
            let field = format!("spec.parentRefs[{at}]");
            if distinct.len() == LISTENER_PARENTS_PER_ROUTE_MAX {
                let problem = format!(
                    "the route has more than {LISTENER_PARENTS_PER_ROUTE_MAX} parents with listeners; this one and those behind it are left out"
                );
                report.error(Code::LimitExceeded, field, problem, "split the route");
                break;
            }
            distinct.push(written);
            match self.attach_to(at, written, &mut found) {
                Ok(()) => {}
                // The limit counts all parents together, so those behind this one would exceed it
                // too.
                Err(AttachStop::Limit { problem, fix }) => {
                    report.error(Code::LimitExceeded, field, problem, fix);
                    break;
                }
                Err(AttachStop::Parent(Unattached {
                    code,
                    field: inner,
                    problem,
                    fix,
                })) => report.warning(code, field + inner, problem, fix),
            }
        }
        let RouteAttachments {
            attachments,
            comparisons_left,
            kind_hosts,
            on_closed,
            ..
        } = found;
        let on_closed: Vec<(ServiceKey, usize)> = on_closed
            .into_iter()
            .map(|(gateway, listener)| (gateway.clone(), listener))
            .collect();
        let closed_gateways = on_closed.iter().map(|(gateway, _)| gateway.clone());
        let attached = AttachedRoute {
            attachments,
            closed_gateways: closed_gateways.collect(),
        };
        for key in on_closed {
            *self.closed_routes.entry(key).or_default() += 1;
        }
        self.comparisons_left = comparisons_left;
        self.kind_hosts = kind_hosts;
        attached
    }

    /// Attaches a route to the listeners of one parent. An HTTPRoute and a GRPCRoute share no host:
    /// a listener that has it by the other is reported, even if other listeners took the route.
    fn attach_to<'a>(
        &'a self,
        at: usize,
        parent: &ParentRef,
        found: &mut RouteAttachments<'a>,
    ) -> Result<(), AttachStop> {
        let route = found.route;
        let namespace = parent.namespace.as_ref().unwrap_or(route.namespace);
        let object = format!("{} {namespace}/{}", parent.kind, parent.name);
        let gateway = self.gateway_of(namespace, parent, &object)?;
        // Comparisons are charged before they are made, so that a tenant cannot exceed its limit.
        found.charge(gateway.listeners.len())?;
        let set = (parent.kind == "ListenerSet").then(|| (namespace.clone(), parent.name.clone()));
        let listeners = gateway.listeners.iter().enumerate();
        let named: Vec<(usize, &PlacedListener)> = listeners
            .filter(|(_, listener)| listener.listener_set == set && is_named(listener, parent))
            .collect();
        if named.is_empty() {
            return Err(no_listener(&object, parent).into());
        }
        let mut allowing: Vec<(usize, &PlacedListener)> = Vec::new();
        for (at, listener) in named {
            found.charge(listener.allowed.comparisons())?;
            let (own, namespaces) = (&listener.namespace, &self.namespaces);
            if listener.route_kinds.contains(&found.kind)
                && listener.allowed.has(own, route.namespace, namespaces)
            {
                allowing.push((at, listener));
            }
        }
        if allowing.is_empty() {
            let (kind, from) = (found.kind, route.namespace);
            return Err(AttachStop::Parent(Unattached {
                code: Code::RouteNotAllowed,
                field: "",
                problem: format!("no listener of {object} allows {kind}s of namespace {from}"),
                fix: "allow them in the listener's allowedRoutes",
            }));
        }
        // One open listener is enough: a closed one has its own diagnostic.
        let is_open = |listener: &PlacedListener| listener.listener.closed.is_none();
        found.count_on_closed(gateway, &allowing)?; // `attachedRoutes` counts closed ones too.
        if !allowing.iter().any(|(_, listener)| is_open(listener)) {
            // All of them are closed, so there is always a fault to name.
            let mut faults = allowing.iter().map(|(_, it)| it.listener.closed.as_ref());
            let problem = faults
                .find_map(|it| it)
                .map_or("", |it| it.problem.as_str());
            return Err(AttachStop::Parent(Unattached {
                code: Code::ListenerClosed,
                field: "",
                problem: format!("the route's listeners of {object} are closed: {problem}"),
                fix: "fix the listener",
            }));
        }
        let mut has_hosts = false;
        let mut of_other_kind = None;
        for (listener, placed) in allowing.into_iter().filter(|(_, it)| is_open(it)) {
            match found.add(at, gateway, listener, placed)? {
                AddResult::Added => has_hosts = true,
                // Another listener of the parent may have a host of the route.
                AddResult::NoHost => {}
                AddResult::OtherKind => of_other_kind = Some(&placed.listener.name),
            }
        }
        if let Some(name) = of_other_kind {
            // Only HTTPRoutes and GRPCRoutes take hosts from each other.
            let is_grpc = found.kind == ObjectKind::GrpcRoute;
            let other = [ObjectKind::GrpcRoute, ObjectKind::HttpRoute][usize::from(is_grpc)];
            return Err(AttachStop::Parent(Unattached {
                code: Code::HostnameTaken,
                field: "",
                problem: format!(
                    "an older {other} has a hostname of the route on listener {name} of {object}, so the route is not on it"
                ),
                fix: "give the two routes different hostnames or listeners",
            }));
        }
        if !has_hosts {
            return Err(AttachStop::Parent(Unattached {
                code: Code::NoMatchingListenerHostname,
                field: "",
                problem: format!("no listener of {object} has a hostname in common with the route"),
                fix: "correct the hostnames of the route or of the listener",
            }));
        }
        Ok(())
    }

    /// Returns the Gateway that a parent names, by itself or by a ListenerSet.
    fn gateway_of(
        &self,
        namespace: &Namespace,
        parent: &ParentRef,
        object: &str,
    ) -> Result<&GatewayListeners, Unattached> {
        let own: (Namespace, ObjectName) = (namespace.clone(), parent.name.clone());
        let missing = || Unattached {
            code: Code::UnresolvedParent,
            field: ".name",
            problem: format!("there is no {object}"),
            fix: "create it or correct the name",
        };
        let key = if parent.kind == "ListenerSet" {
            match self.listener_sets.get(&own) {
                None => return Err(missing()),
                Some(None) => {
                    return Err(Unattached {
                        code: Code::UnresolvedParent,
                        field: ".name",
                        problem: format!("{object} adds no listeners to a Gateway of Canal's"),
                        fix: "see what is reported of it",
                    });
                }
                Some(Some(gateway)) => gateway.clone(),
            }
        } else {
            own
        };
        match self.gateways.get(&key) {
            None => Err(missing()),
            Some(None) => Err(Unattached {
                code: Code::ForeignGatewayClass,
                field: ".name",
                problem: format!("{object} is not Canal's"),
                fix: "see what is reported of its GatewayClass",
            }),
            Some(Some(gateway)) => Ok(gateway),
        }
    }
}

/// The attachments of one route so far, and what further ones may cost.
struct RouteAttachments<'a> {
    route: &'a RouteParents<'a>,
    hosts: BTreeSet<HostMatch>,
    /// Listeners to which the route is attached; two parents may name one listener.
    attached: BTreeSet<(&'a ServiceKey, usize)>,
    /// Closed listeners to which the route would be attached if they were open.
    on_closed: BTreeSet<(&'a ServiceKey, usize)>,
    attachments: Vec<Attachment>,
    hosts_left: usize,
    comparisons_left: usize,
    kind: ObjectKind,
    kind_hosts: Option<BTreeMap<ServiceKey, BTreeMap<usize, KindHosts>>>,
}

impl<'a> RouteAttachments<'a> {
    /// Counts comparisons before they are made.
    fn charge(&mut self, count: usize) -> Result<(), AttachStop> {
        match self.comparisons_left.checked_sub(count) {
            Some(left) => {
                self.comparisons_left = left;
                Ok(())
            }
            None => {
                // Later routes get nothing either, whatever they would cost: what is attached
                // depends on the order of the routes only.
                self.comparisons_left = 0;
                Err(AttachStop::Limit {
                    problem: format!(
                        "with this one the tenant's routes need more than {COMPARISONS_PER_TENANT_MAX} comparisons with listeners; the rest of the route and the routes behind it are left out"
                    ),
                    fix: "name listeners by sectionName, or use fewer hosts and smaller selectors",
                })
            }
        }
    }

    /// Returns the hosts of the route that overlap a listener's.
    fn shared_hosts(
        &mut self,
        placed: &PlacedListener,
    ) -> Result<Vec<Option<HostMatch>>, AttachStop> {
        if self.route.hostnames.is_empty() {
            // A route without hostnames has all hosts of the listener.
            return Ok(vec![None]);
        }
        self.charge(self.hosts.len())?;
        let own = placed.listener.host.as_ref();
        let shared = self.hosts.iter();
        let shared = shared.filter(|host| hostname::overlap(own, Some(host)));
        Ok(shared.cloned().map(Some).collect())
    }

    /// Counts the route on the closed ones of the listeners that allow it.
    fn count_on_closed(
        &mut self,
        gateway: &'a GatewayListeners,
        allowing: &[(usize, &PlacedListener)],
    ) -> Result<(), AttachStop> {
        let is_closed = |(_, it): &&(usize, &PlacedListener)| it.listener.closed.is_some();
        for (at, listener) in allowing.iter().filter(is_closed) {
            if !self.shared_hosts(listener)?.is_empty() {
                self.on_closed.insert((&gateway.service, *at));
            }
        }
        Ok(())
    }

    /// Attaches the route to a listener that allows it.
    fn add(
        &mut self,
        parent: usize,
        gateway: &'a GatewayListeners,
        listener: usize,
        placed: &PlacedListener,
    ) -> Result<AddResult, AttachStop> {
        // Another parent of the route has named the listener already.
        if self.attached.contains(&(&gateway.service, listener)) {
            return Ok(AddResult::Added);
        }
        let hosts = self.shared_hosts(placed)?;
        if hosts.is_empty() {
            return Ok(AddResult::NoHost);
        }
        let Some(left) = self.hosts_left.checked_sub(hosts.len()) else {
            return Err(AttachStop::Limit {
                problem: format!(
                    "the route has more than {ATTACHED_HOSTS_PER_ROUTE_MAX} hosts on its listeners together; the rest is left out"
                ),
                fix: "split the route",
            });
        };
        if let Some(all) = &mut self.kind_hosts {
            let of_gateway = all.entry(gateway.service.clone()).or_default();
            let on_listener = of_gateway.entry(listener).or_default();
            if !on_listener.add(self.kind, &hosts) {
                return Ok(AddResult::OtherKind);
            }
        }
        self.hosts_left = left;
        self.attached.insert((&gateway.service, listener));
        self.attachments.push(Attachment {
            gateway: gateway.service.clone(),
            listener,
            hosts,
            parent,
        });
        Ok(AddResult::Added)
    }
}

/// The result of attaching a route to one listener.
enum AddResult {
    Added,
    /// The route and the listener have no host in common.
    NoHost,
    /// An older route of the other kind has one of the hosts.
    OtherKind,
}

/// The reason why a route attaches to no further listener of a parent.
enum AttachStop {
    /// The parent attaches the route to nothing.
    Parent(Unattached),
    /// A limit is reached, which concerns the parents behind it too.
    Limit { problem: String, fix: &'static str },
}

impl From<Unattached> for AttachStop {
    fn from(unattached: Unattached) -> Self {
        Self::Parent(unattached)
    }
}

/// The reason why a parent attaches a route to nothing.
struct Unattached {
    code: Code,
    /// Field in the parent, with its dot.
    field: &'static str,
    problem: String,
    fix: &'static str,
}

fn is_named(listener: &PlacedListener, parent: &ParentRef) -> bool {
    parent.section_name.as_ref().is_none_or(|name| {
        listener
            .section
            .as_ref()
            .is_some_and(|own| name == own.as_str())
    }) && parent
        .port
        .is_none_or(|port| port.get() == listener.listener.port)
}

fn no_listener(object: &str, parent: &ParentRef) -> Unattached {
    let field = if parent.section_name.is_some() {
        ".sectionName"
    } else {
        ".port"
    };
    let name = parent
        .section_name
        .as_ref()
        .map(|name| format!(" named {:?}", shorten(name)));
    let port = parent.port.map(|port| format!(" with port {port}"));
    Unattached {
        code: Code::NoMatchingListener,
        field: if name.is_some() || port.is_some() {
            field
        } else {
            ""
        },
        problem: format!(
            "{object} has no listener{}{}",
            name.unwrap_or_default(),
            port.unwrap_or_default()
        ),
        fix: "name a listener that it has, or remove the field",
    }
}
