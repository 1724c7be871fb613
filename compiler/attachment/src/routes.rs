//! Attachment of one route: which listeners its parents name, which of these allow it, and for
//! which hosts. A route that attaches to nothing gets a diagnostic of its own and changes nothing
//! else.

use std::collections::BTreeSet;

use canal_model::diagnostic::Diagnostic;
use canal_model::ids::{Namespace, ObjectName, ServiceKey};
use canal_model::policy::Document;
use canal_model::policy::gateway_api::ParentRef;
use canal_model::program::HostMatch;

use crate::listeners::{GatewayListeners, PlacedListener, TenantListeners};
use crate::{DocumentReport, GROUP, hostname};

/// Maximum number of Gateways and ListenerSets that one route names (Gateway API allows 32).
pub const LISTENER_PARENTS_PER_ROUTE_MAX: usize = 32;
/// Maximum number of hosts of one route, counted once for each listener that it attaches to.
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
    /// Index of the parent in the route.
    pub parent: usize,
}

impl TenantListeners {
    /// Attaches a route to listeners. Only parents that have listeners count.
    pub fn attach(
        &self,
        route: &RouteParents<'_>,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Vec<Attachment> {
        let mut report = DocumentReport {
            document: route.document,
            diagnostics,
        };
        // The compiler reports hosts that are broken.
        let hosts: Vec<HostMatch> = route
            .hostnames
            .iter()
            .filter_map(|written| hostname::parse(written).ok())
            .collect();
        let mut attachments: Vec<Attachment> = Vec::new();
        let mut known = BTreeSet::new();
        let mut hosts_left = ATTACHED_HOSTS_PER_ROUTE_MAX;
        let listed = route.parents.iter().enumerate();
        for (count, (parent, written)) in listed
            .filter(|(_, written)| is_listener_parent(written))
            .enumerate()
        {
            if count == LISTENER_PARENTS_PER_ROUTE_MAX {
                let problem = format!(
                    "the route has more than {LISTENER_PARENTS_PER_ROUTE_MAX} parents with listeners; this one and those behind it are left out"
                );
                report.error(
                    format!("spec.parentRefs[{parent}]"),
                    problem,
                    "split the route",
                );
                break;
            }
            match self.attach_to(route, written, &hosts) {
                Ok((gateway, listeners)) => {
                    for (listener, hosts) in listeners {
                        let Some(left) = hosts_left.checked_sub(hosts.len()) else {
                            let problem = format!(
                                "the route has more than {ATTACHED_HOSTS_PER_ROUTE_MAX} hosts on its listeners together; the rest is left out"
                            );
                            let field = format!("spec.parentRefs[{parent}]");
                            report.error(field, problem, "split the route");
                            return attachments;
                        };
                        hosts_left = left;
                        // Two parents may name one listener.
                        if known.insert((&gateway.service, listener)) {
                            attachments.push(Attachment {
                                gateway: gateway.service.clone(),
                                listener,
                                hosts,
                                parent,
                            });
                        }
                    }
                }
                Err(Unattached {
                    field,
                    problem,
                    fix,
                }) => report.warning(format!("spec.parentRefs[{parent}]{field}"), problem, fix),
            }
        }
        attachments
    }

    /// Returns the listeners of one parent on which the route may be, with their hosts.
    fn attach_to(
        &self,
        route: &RouteParents<'_>,
        parent: &ParentRef,
        hosts: &[HostMatch],
    ) -> Result<(&GatewayListeners, Vec<HostsOnListener>), Unattached> {
        let namespace = parent.namespace.as_ref().unwrap_or(route.namespace);
        let object = format!("{} {namespace}/{}", parent.kind, parent.name);
        let gateway = self.gateway_of(namespace, parent, &object)?;
        let set = (parent.kind == "ListenerSet").then(|| (namespace.clone(), parent.name.clone()));
        let named: Vec<(usize, &PlacedListener)> = gateway
            .listeners
            .iter()
            .enumerate()
            .filter(|(_, listener)| listener.listener_set == set && is_named(listener, parent))
            .collect();
        if named.is_empty() {
            return Err(no_listener(&object, parent));
        }
        let allowing: Vec<(usize, &PlacedListener)> = named
            .into_iter()
            .filter(|(_, listener)| {
                listener.takes_http_routes
                    && listener
                        .allowed
                        .has(&listener.namespace, route.namespace, &self.namespaces)
            })
            .collect();
        if allowing.is_empty() {
            return Err(Unattached {
                field: "",
                problem: format!(
                    "no listener of {object} allows HTTPRoutes of namespace {}",
                    route.namespace
                ),
                fix: "allow them in the listener's allowedRoutes",
            });
        }
        let open: Vec<(usize, &PlacedListener)> = allowing
            .iter()
            .copied()
            .filter(|(_, listener)| listener.listener.closed.is_none())
            .collect();
        if open.is_empty() {
            let problem = allowing
                .iter()
                .find_map(|(_, listener)| listener.listener.closed.as_ref())
                .map_or("", |fault| fault.problem.as_str());
            return Err(Unattached {
                field: "",
                problem: format!("the route's listeners of {object} are closed: {problem}"),
                fix: "fix the listener",
            });
        }
        let shared: Vec<HostsOnListener> = open
            .into_iter()
            .map(|(at, listener)| (at, shared_hosts(listener, route, hosts)))
            .filter(|(_, hosts)| !hosts.is_empty())
            .collect();
        if shared.is_empty() {
            return Err(Unattached {
                field: "",
                problem: format!("no listener of {object} has a hostname in common with the route"),
                fix: "correct the hostnames of the route or of the listener",
            });
        }
        Ok((gateway, shared))
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
            field: ".name",
            problem: format!("there is no {object}"),
            fix: "create it or correct the name",
        };
        let key = if parent.kind == "ListenerSet" {
            match self.listener_sets.get(&own) {
                None => return Err(missing()),
                Some(None) => {
                    return Err(Unattached {
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
                field: ".name",
                problem: format!("{object} is not Canal's"),
                fix: "see what is reported of its GatewayClass",
            }),
            Some(Some(gateway)) => Ok(gateway),
        }
    }
}

/// A listener by its index, and the hosts for which a route is on it.
type HostsOnListener = (usize, Vec<Option<HostMatch>>);

/// The reason why a parent attaches a route to nothing.
struct Unattached {
    /// Field in the parent, with its dot.
    field: &'static str,
    problem: String,
    fix: &'static str,
}

fn is_named(listener: &PlacedListener, parent: &ParentRef) -> bool {
    parent
        .section_name
        .as_ref()
        .is_none_or(|name| *name == listener.section.as_str())
        && parent
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
        .map(|name| format!(" named {:?}", name.chars().take(80).collect::<String>()));
    let port = parent.port.map(|port| format!(" with port {port}"));
    Unattached {
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

/// Returns the hosts of a route that overlap that of a listener, without repetition.
fn shared_hosts(
    listener: &PlacedListener,
    route: &RouteParents<'_>,
    hosts: &[HostMatch],
) -> Vec<Option<HostMatch>> {
    if route.hostnames.is_empty() {
        return vec![None];
    }
    let own = listener.listener.host.as_ref();
    let mut shared: Vec<Option<HostMatch>> = hosts
        .iter()
        .filter(|host| hostname::overlap(own, Some(host)))
        .map(|host| Some(host.clone()))
        .collect();
    shared.sort();
    shared.dedup();
    shared
}
