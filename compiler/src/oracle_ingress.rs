//! Defines what the listeners of a Gateway mean: a slow and simple interpreter of requests by
//! clients outside the mesh. It knows no target; [`crate::oracle`] defines what a match means.
//!
//! The rules, which every faster implementation must follow:
//! - A request belongs to one listener of the port that it arrived at: the one with the most
//!   specific host that matches. A closed listener keeps its host, so that no other listener answers
//!   for it.
//! - Of the listener's rules that match, that of the most specific host decides, as its route names
//!   it; of those of one host, the first in match order. If none matches, the response is 404.
//! - If a match of the listener requires more of the path than `/`, the path is compared in its
//!   normalized form.

use std::net::IpAddr;
use std::sync::Arc;

use canal_model::ids::ServiceKey;
use canal_model::ingress::{ListenerFault, host_order};
use canal_model::program::{HostMatch, HttpMatch, RouteRule};

use crate::ir::Ir;
use crate::ir_ingress::{GatewayIr, ListenerIr};
use crate::oracle::{
    OracleRequest, RoutingVerdict, first_match, host_holds, normal_host, verdict_of,
};

/// The decision about a request that arrived at a Gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IngressVerdict {
    /// No listener has the port: the connection is refused.
    NoListener,
    /// No listener of the port has the request's host: 404.
    NoHost,
    /// The listener of the host is closed: 404.
    Closed(Arc<ListenerFault>),
    /// The listener's routes decide.
    Routed {
        /// Name of the listener.
        listener: String,
        verdict: RoutingVerdict,
    },
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
pub fn decide(gateway: &GatewayIr, request: &OracleRequest) -> IngressVerdict {
    let on_port = || {
        gateway
            .listeners
            .iter()
            .filter(|it| it.listener.port == request.port)
    };
    if on_port().next().is_none() {
        return IngressVerdict::NoListener;
    }
    let host = normal_host(&request.host);
    let chosen = on_port()
        .filter(|it| is_for(it.listener.host.as_ref(), &host))
        .min_by_key(|it| {
            // A listener whose host is broken has none, and closes no other one.
            let is_closed = it.listener.closed.is_some();
            (host_order(it.listener.host.as_ref()), is_closed)
        });
    let Some(chosen) = chosen else {
        return IngressVerdict::NoHost;
    };
    if let Some(fault) = &chosen.listener.closed {
        return IngressVerdict::Closed(fault.clone());
    }
    IngressVerdict::Routed {
        listener: chosen.listener.name.clone(),
        verdict: match deciding_rule(gateway, chosen, &host, request) {
            Some((rule, http)) => verdict_of(rule, http, request),
            None => RoutingVerdict::NoRule,
        },
    }
}

fn is_for(written: Option<&HostMatch>, host: &str) -> bool {
    written.is_none_or(|written| host_holds(written, host))
}

fn deciding_rule<'a>(
    gateway: &'a GatewayIr,
    listener: &'a ListenerIr,
    host: &str,
    request: &OracleRequest,
) -> Option<(&'a RouteRule, &'a HttpMatch)> {
    let all = listener.virtual_hosts.iter();
    let matching = all.clone().filter(|it| is_for(it.host.as_ref(), host));
    let all = all.flat_map(|host| gateway.matches(host));
    let candidates = matching.flat_map(|host| gateway.matches(host));
    first_match(all, candidates, request)
}
