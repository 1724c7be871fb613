//! Defines what the listeners of a Gateway mean: a slow and simple interpreter of requests by
//! clients outside the mesh. It knows no target; [`crate::oracle`] defines what a match means.
//!
//! The rules, which every faster implementation must follow:
//! - A port is of one protocol, that of its open listeners; if none is open, that of the first one
//!   whose protocol is served. A port for HTTPS resets a connection without TLS.
//! - A port for TLS or TCP reads no requests: it relays connections, for which
//!   [`crate::oracle_relay`] answers. This interpreter answers for requests only.
//! - A TLS handshake belongs to one listener: the one with the most specific host that matches the
//!   client's server name. Without a server name, only a listener for any host matches. The
//!   handshake fails if there is none, or if it is closed.
//! - At a port of the PROXY protocol, a connection that does not begin with its header is reset before
//!   anything else is read. The interpreter answers for one whose header is valid.
//! - A listener with a validation of clients asks for certificates. In the mode `AllowValidOnly` the
//!   handshake fails without one that its authorities issued for clients, and in the mode
//!   `AllowValidOrNone` with another one. The interpreter knows no certificates: it answers for
//!   a client that the listener accepts.
//! - A request on a connection with TLS that belongs to another listener than the connection gets
//!   421.
//! - A request belongs to one listener of the port that it arrived at: the one with the most
//!   specific host that matches. A closed listener keeps its host, so that no other listener answers
//!   for it.
//! - The filters of the listener run first, in order. Each may refuse the request, or set headers
//!   that rules match, but not its host. The interpreter calls no authorizer: it answers for a request
//!   as the last filter left it. A filter that could not be resolved refuses all requests with 500. A
//!   preflight that the gateway answers for the rule which it matches passes no other filter.
//! - A rule that names a port applies on that port's listeners only.
//! - Of the listener's rules that match, that of the most specific host decides, as its route names
//!   it; of those of one host, the first in match order. If none matches, the response is 404.
//! - If a match of the listener requires more of the path than `/`, the path is compared in its
//!   normalized form.

use std::net::IpAddr;
use std::sync::Arc;

use canal_model::client_validation::ClientValidation;
use canal_model::ids::ServiceKey;
use canal_model::ingress::{ListenerFault, ListenerProtocol, host_order};
use canal_model::listener_filters::ListenerFilter;
use canal_model::program::{HostMatch, HttpMatch, RouteRule};

use crate::ir::Ir;
use crate::ir_ingress::{GatewayIr, ListenerIr};
use crate::oracle::{
    OracleRequest, RoutingVerdict, first_match, host_holds, normal_host, verdict_of,
};

/// The decision about a request that arrived at a Gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IngressVerdict {
    /// No listener for HTTP or HTTPS has the port: the connection is refused.
    NoListener,
    /// The port is for HTTPS and the connection is in plaintext, or the other way round: no request
    /// is read.
    WrongTransport,
    /// No listener of the port has the connection's server name: the handshake fails.
    NoServerName,
    /// The listener of the server name is closed: the handshake fails.
    ClosedToHandshakes(Arc<ListenerFault>),
    /// The request belongs to another listener than its connection: 421.
    Misdirected,
    /// No listener of the port has the request's host: 404.
    NoHost,
    /// The listener of the host is closed: 404.
    Closed(Arc<ListenerFault>),
    /// A filter of the listener, by its name, could not be resolved: 500.
    RefusedByFilter(String),
    /// The listener's routes decide, once its filters have allowed the request.
    Routed {
        /// Name of the listener.
        listener: String,
        verdict: RoutingVerdict,
    },
}

/// How a client connects to a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArrivalTransport<'a> {
    Plaintext,
    /// TLS with this server name (SNI), if the client sends one.
    Tls(Option<&'a str>),
}

/// Returns the Gateway that has an address, if a Gateway requests it.
pub fn gateway_at(ir: &Ir, address: IpAddr) -> Option<&GatewayIr> {
    ir.ingress
        .iter()
        .find(|gateway| gateway.addresses.contains(&address))
}

/// Returns the Gateway for which a service stands.
pub fn gateway_of<'a>(ir: &'a Ir, service: &ServiceKey) -> Option<&'a GatewayIr> {
    ir.ingress
        .iter()
        .find(|gateway| gateway.service == *service)
}

/// Returns the decision about a request. `request.service` has no meaning here: `gateway` is what
/// the client connected to, at `request.port`.
pub fn decide(
    gateway: &GatewayIr,
    transport: ArrivalTransport<'_>,
    request: &OracleRequest,
) -> IngressVerdict {
    let Some(protocol) = protocol_of(gateway, request.port) else {
        return IngressVerdict::NoListener;
    };
    let mut request = request.clone();
    request.client.is_tls = matches!(transport, ArrivalTransport::Tls(_));
    let request = &request;
    let host = normal_host(&request.host);
    let chosen = listener_for(gateway, request.port, &host);
    match (transport, protocol) {
        (ArrivalTransport::Plaintext, ListenerProtocol::Http) => {}
        (ArrivalTransport::Tls(name), ListenerProtocol::Https) => {
            let name = normal_host(name.unwrap_or_default());
            let Some(own) = listener_for(gateway, request.port, &name) else {
                return IngressVerdict::NoServerName;
            };
            if let Some(fault) = &own.listener.closed {
                return IngressVerdict::ClosedToHandshakes(fault.clone());
            }
            // The certificate and the client's validation are those of the handshake's listener.
            if chosen.is_some_and(|chosen| chosen.listener.name != own.listener.name) {
                return IngressVerdict::Misdirected;
            }
        }
        _ => return IngressVerdict::WrongTransport,
    }
    let Some(chosen) = chosen else {
        return IngressVerdict::NoHost;
    };
    if let Some(fault) = &chosen.listener.closed {
        return IngressVerdict::Closed(fault.clone());
    }
    if chosen.listener.filters.contains(&ListenerFilter::Refuse) {
        return IngressVerdict::RefusedByFilter(chosen.listener.name.clone());
    }
    IngressVerdict::Routed {
        listener: chosen.listener.name.clone(),
        verdict: match deciding_rule(gateway, chosen, &host, request) {
            Some((rule, http)) => verdict_of(rule, http, request),
            None => RoutingVerdict::NoRule,
        },
    }
}

/// Returns how the listener to which a handshake belongs validates clients, if it does.
pub fn validation_of<'a>(
    gateway: &'a GatewayIr,
    port: u16,
    server_name: Option<&str>,
) -> Option<&'a ClientValidation> {
    let name = normal_host(server_name.unwrap_or_default());
    let listener = &listener_for(gateway, port, &name)?.listener;
    let mut validations = gateway.client_validations.iter();
    validations.find(|it| it.is_for(port, &listener.name))
}

/// Returns the protocol of a port.
pub fn protocol_of(gateway: &GatewayIr, port: u16) -> Option<&ListenerProtocol> {
    let listeners = gateway.listeners.iter().map(|it| &it.listener);
    let served = listeners.filter(|it| {
        let is_served = !matches!(it.protocol, ListenerProtocol::Other(_));
        it.port == port && is_served
    });
    // The minimum is the first one of several.
    let chosen = served.min_by_key(|it| it.closed.is_some());
    chosen.map(|it| &it.protocol)
}

/// Returns the listener of a port with the most specific host that matches a name.
pub fn listener_for<'a>(gateway: &'a GatewayIr, port: u16, name: &str) -> Option<&'a ListenerIr> {
    let listeners = gateway.listeners.iter();
    let matching =
        listeners.filter(|it| it.listener.port == port && is_for(it.listener.host.as_ref(), name));
    matching.min_by_key(|it| {
        // A listener whose host is broken has none, and closes no other one.
        let is_closed = it.listener.closed.is_some();
        (host_order(it.listener.host.as_ref()), is_closed)
    })
}

fn is_for(written: Option<&HostMatch>, host: &str) -> bool {
    written.is_none_or(|written| host_holds(written, host))
}

pub fn deciding_rule<'a>(
    gateway: &'a GatewayIr,
    listener: &'a ListenerIr,
    host: &str,
    request: &OracleRequest,
) -> Option<(&'a RouteRule, &'a HttpMatch)> {
    let all = listener.virtual_hosts.iter();
    let matching = all.clone().filter(|it| is_for(it.host.as_ref(), host));
    let port = listener.listener.port;
    let all = all.flat_map(|host| gateway.matches(port, host));
    let candidates = matching.flat_map(|host| gateway.matches(port, host));
    first_match(all, candidates, request)
}
