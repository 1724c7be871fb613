//! The listeners of Gateways in the intermediate representation. A Gateway is a service to which
//! clients outside the mesh connect; its listeners say which hosts they may ask for, and these which
//! routes apply. `oracle_ingress` defines the meaning.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use canal_model::client_validation::ClientValidation;
use canal_model::ids::{SecretKey, ServiceId, ServiceKey};
use canal_model::ingress::{GatewayCertificates, Listener, ListenerProtocol};
use canal_model::program::{
    HttpMatch, IngressGateway, IngressListener, ListenerCertificate, RelayProtocol, RouteRule,
    VirtualHost, filtering_ports, terminating_ports,
};
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
    /// Number of proxies between clients and the Gateway that append to `x-forwarded-for`.
    pub trusted_proxies: u8,
    /// Ports at which connections begin with a header of the PROXY protocol.
    pub proxied_ports: BTreeSet<u16>,
    pub listeners: Vec<ListenerIr>,
    /// The certificates that open listeners name.
    pub certificates: GatewayCertificates,
    /// How ports for HTTPS validate clients' certificates.
    pub client_validations: Vec<ClientValidation>,
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
    /// Number of routes of a closed listener that would be on it if it were open. It is for the
    /// listener's status only.
    pub closed_routes: usize,
}

impl GatewayIr {
    /// Returns the protocol of each port that is served: that of the port's open listeners, which
    /// have one in common, or that of a closed one if none is open. Listeners of another protocol
    /// are closed.
    pub fn ports(&self) -> BTreeMap<u16, ListenerProtocol> {
        let is_served = |it: &&Listener| !matches!(it.protocol, ListenerProtocol::Other(_));
        let served = || {
            self.listeners
                .iter()
                .map(|it| &it.listener)
                .filter(is_served)
        };
        let open = served().filter(|it| it.closed.is_none());
        let mut ports = BTreeMap::new();
        for listener in open.chain(served()) {
            let protocol = ports.entry(listener.port);
            protocol.or_insert_with(|| listener.protocol.clone());
        }
        ports
    }

    /// Returns the Gateway as gateway replicas serve it, its certificates, and its rules. `None` if
    /// no port is served.
    pub fn into_program(self) -> Option<(IngressGateway, Vec<ListenerCertificate>, RouteTable)> {
        let ports = self.ports();
        let listeners = self.listeners.into_iter().filter_map(|it| {
            let protocol = ports.get(&it.listener.port)?;
            let own = &it.listener.protocol;
            // Of listeners with different protocols on one port, only those with the port's
            // protocol are served. The others are closed listeners of it.
            let is_open = it.listener.closed.is_none() && own.shares_port_with(protocol);
            let protocol = if own.shares_port_with(protocol) {
                own
            } else {
                protocol
            };
            // No key is sent for a closed listener.
            let certificates = if is_open {
                it.listener.certificates
            } else {
                Vec::new()
            };
            Some(IngressListener {
                is_open,
                name: it.listener.name,
                port: it.listener.port,
                host: it.listener.host,
                certificates: protocol.terminates_tls().then_some(certificates),
                relay: match protocol {
                    ListenerProtocol::Tls => Some(RelayProtocol::TlsPassthrough),
                    ListenerProtocol::TerminatedTls => Some(RelayProtocol::TerminatedTls),
                    ListenerProtocol::Tcp => Some(RelayProtocol::Tcp),
                    // HTTP and HTTPS are served; `ports` has no other protocol.
                    _ => None,
                },
                // A closed listener has no routes, so nothing would follow its filters.
                filters: if is_open {
                    it.listener.filters
                } else {
                    Vec::new()
                },
                virtual_hosts: it.virtual_hosts,
            })
        });
        let mut listeners: Vec<IngressListener> = listeners.collect();
        // The wire format keeps listeners that relay apart from the others, because older gateways
        // would serve them as HTTP, or pass through what is to be terminated, and so does it keep
        // those of ports with filters. No port has two of these kinds, so their order decides nothing.
        let terminating = terminating_ports(&listeners);
        let filtering = filtering_ports(&listeners);
        let mut proxied_ports = self.proxied_ports;
        proxied_ports.retain(|port| ports.contains_key(port));
        listeners.sort_by_key(|it| {
            let is_proxied = proxied_ports.contains(&it.port);
            let is_terminating = terminating.contains(&it.port);
            let is_filtering = filtering.contains(&it.port);
            (
                is_filtering,
                is_proxied && !is_filtering,
                it.relay.is_some(),
                is_terminating,
            )
        });
        let id = self.id.filter(|_| !listeners.is_empty())?;
        // A listener may have been closed after its certificates were found.
        let named: BTreeSet<&SecretKey> = listeners
            .iter()
            .flat_map(|it| it.certificates.iter().flatten())
            .collect();
        let certificates = self.certificates.into_iter();
        let certificates = certificates.filter(|(secret, _)| named.contains(secret));
        let certificates = certificates.map(|(secret, certificate)| ListenerCertificate {
            gateway: self.service.clone(),
            id,
            secret,
            certificate,
        });
        let certificates = certificates.collect();
        let gateway = IngressGateway {
            key: self.service,
            id,
            listeners,
            client_validations: self.client_validations,
            trusted_proxies: self.trusted_proxies,
            proxied_ports,
        };
        Some((gateway, certificates, self.routes))
    }

    /// Iterates over the rules and matches of a virtual host at a port in match order.
    pub fn matches<'a>(
        &'a self,
        port: u16,
        host: &'a VirtualHost,
    ) -> impl Iterator<Item = (&'a RouteRule, &'a HttpMatch)> + Clone {
        let all = self.routes.on_port(port);
        all.filter(|(rule, _)| host.routes.contains(&rule.key.route()))
            .map(|(rule, http)| (&**rule, http))
    }
}

impl fmt::Display for GatewayIr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let addresses: Vec<String> = self.addresses.iter().map(ToString::to_string).collect();
        let addresses = match addresses.as_slice() {
            // A Gateway that requests no address gets one of the tenant's pool.
            [] => "an address of the pool".to_owned(),
            some => some.join(" "),
        };
        write!(f, "ingress {} at {addresses}", self.service)?;
        match self.trusted_proxies {
            0 => writeln!(f)?,
            proxies => writeln!(f, " trusted proxies {proxies}")?,
        }
        if !self.proxied_ports.is_empty() {
            writeln!(f, "  {}", text::proxied_ports(&self.proxied_ports))?;
        }
        for validation in &self.client_validations {
            writeln!(f, "  {}", text::client_validation(validation))?;
        }
        for ListenerIr {
            listener,
            virtual_hosts,
            ..
        } in &self.listeners
        {
            let host = text::host(listener.host.as_ref());
            let (name, port, protocol) = (&listener.name, listener.port, &listener.protocol);
            write!(f, "  listener {name} {protocol} {port} for {host}")?;
            match &listener.closed {
                Some(fault) => writeln!(f, " closed {}: {}", fault.reason.as_str(), fault.problem)?,
                None => writeln!(f)?,
            }
            for (namespace, name) in &listener.certificates {
                writeln!(f, "    certificate {namespace}/{name}")?;
            }
            for filter in &listener.filters {
                writeln!(f, "    filter {}", text::listener_filter(filter))?;
            }
            for host in virtual_hosts {
                writeln!(f, "    host {}", text::host(host.host.as_ref()))?;
                for (number, (rule, http)) in (1..).zip(self.matches(listener.port, host)) {
                    writeln!(f, "      {number} {}", text::match_of_rule(rule, http))?;
                }
            }
            // A relayed connection has no HTTP to answer 404 with.
            let otherwise = match listener.protocol {
                ListenerProtocol::Tls | ListenerProtocol::TerminatedTls | ListenerProtocol::Tcp => {
                    "reset"
                }
                _ => "404",
            };
            writeln!(f, "    else => {otherwise}")?;
        }
        Ok(())
    }
}
