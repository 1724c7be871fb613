//! The listeners of Gateways in the intermediate representation. A Gateway is a service to which
//! clients outside the mesh connect; its listeners say which hosts they may ask for, and these which
//! routes apply. `oracle_ingress` defines the meaning.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use canal_model::ids::{Namespace, ObjectName, ServiceKey};
use canal_model::ingress::Listener;
use canal_model::program::{HostMatch, HttpMatch, RouteRule};
use canal_model::route_table::RouteTable;

use crate::text;

/// One Gateway of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayIr {
    /// The service that stands for the Gateway.
    pub service: ServiceKey,
    /// Addresses that the Gateway requests; if there are none, it gets one.
    pub addresses: Vec<IpAddr>,
    pub listeners: Vec<ListenerIr>,
    /// Rules of all routes that are on a listener, in match order. Each applies on the virtual hosts
    /// that name its route.
    pub routes: RouteTable,
}

/// A listener with the hosts of its routes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerIr {
    pub listener: Listener,
    /// Hosts of the listener's routes as these name them, the most specific first.
    pub virtual_hosts: Vec<VirtualHost>,
}

/// A host on a listener, and the HTTPRoutes that apply to requests for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualHost {
    /// The host; `None` means any.
    pub host: Option<HostMatch>,
    /// HTTPRoutes by namespace and name.
    pub routes: BTreeSet<(Namespace, ObjectName)>,
}

impl GatewayIr {
    /// Iterates over the rules and matches of a virtual host in match order.
    pub fn matches<'a>(
        &'a self,
        host: &'a VirtualHost,
    ) -> impl Iterator<Item = (&'a RouteRule, &'a HttpMatch)> + Clone {
        let all = self.routes.order().iter().map(|at| self.routes.entry(*at));
        all.filter(|(rule, _)| {
            let route = (rule.key.namespace.clone(), rule.key.name.clone());
            host.routes.contains(&route)
        })
        .map(|(rule, http)| (&**rule, http))
    }
}

impl fmt::Display for GatewayIr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        let addresses = match addresses.as_slice() {
            [] => "an address of the pool".to_owned(),
            some => some.join(" "),
        };
        writeln!(f, "ingress {} at {addresses}", self.service)?;
        for ListenerIr {
            listener,
            virtual_hosts,
        } in &self.listeners
        {
            let host = text::host(listener.host.as_ref());
            let (name, port, protocol) = (&listener.name, listener.port, &listener.protocol);
            write!(f, "  listener {name} {protocol} {port} for {host}")?;
            match &listener.closed {
                Some(fault) => writeln!(f, " closed {}: {}", fault.reason.as_str(), fault.problem)?,
                None => writeln!(f)?,
            }
            for host in virtual_hosts {
                writeln!(f, "    host {}", text::host(host.host.as_ref()))?;
                for (number, (rule, http)) in (1..).zip(self.matches(host)) {
                    writeln!(
                        f,
                        "      {number} {} => {}{}{} [{}]",
                        text::http_match(http),
                        text::action(&rule.action),
                        text::filters(rule),
                        text::attempts(rule.attempts.as_deref()),
                        text::origin(&rule.key)
                    )?;
                }
            }
            writeln!(f, "    else => 404")?;
        }
        Ok(())
    }
}
