//! The listeners of Gateways in the intermediate representation. A Gateway is a service to which
//! clients outside the mesh connect; its listeners say which hosts they may ask for, and these which
//! routes apply. `oracle_ingress` defines the meaning.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use canal_model::ids::{ServiceId, ServiceKey};
use canal_model::ingress::{Listener, ListenerProtocol};
use canal_model::program::{HttpMatch, IngressGateway, IngressListener, RouteRule, VirtualHost};
use canal_model::route_table::RouteTable;

use crate::text;

/// One Gateway of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayIr {
    /// The service that stands for the Gateway.
    pub service: ServiceKey,
    /// Id of that service; `None` if it has none yet, so that the Gateway is not served.
    pub id: Option<ServiceId>,
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

impl GatewayIr {
    /// Returns the Gateway as gateway replicas serve it, and its rules. A port is served if one of
    /// its listeners is for HTTP; the others of that port are closed. `None` if no port is served.
    pub fn into_program(self) -> Option<(IngressGateway, RouteTable)> {
        let is_http = |listener: &Listener| listener.protocol == ListenerProtocol::Http;
        let served: BTreeSet<u16> = self
            .listeners
            .iter()
            .filter(|it| is_http(&it.listener))
            .map(|it| it.listener.port)
            .collect();
        let listeners = self.listeners.into_iter();
        let listeners = listeners.filter(|it| served.contains(&it.listener.port));
        let listeners: Vec<IngressListener> = listeners
            .map(|it| IngressListener {
                is_open: it.listener.closed.is_none() && is_http(&it.listener),
                name: it.listener.name,
                port: it.listener.port,
                host: it.listener.host,
                virtual_hosts: it.virtual_hosts,
            })
            .collect();
        let gateway = IngressGateway {
            key: self.service,
            id: self.id.filter(|_| !listeners.is_empty())?,
            listeners,
        };
        Some((gateway, self.routes))
    }

    /// Iterates over the rules and matches of a virtual host in match order.
    pub fn matches<'a>(
        &'a self,
        host: &'a VirtualHost,
    ) -> impl Iterator<Item = (&'a RouteRule, &'a HttpMatch)> + Clone {
        let all = self.routes.order().iter().map(|at| self.routes.entry(*at));
        all.filter(|(rule, _)| host.routes.contains(&rule.key.route()))
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
                    writeln!(f, "      {number} {}", text::match_of_rule(rule, http))?;
                }
            }
            writeln!(f, "    else => 404")?;
        }
        Ok(())
    }
}
