//! Defines what the listeners of a Gateway mean that relay connections: a slow and simple interpreter
//! of connections by clients outside the mesh. [`crate::oracle_ingress`] defines what listeners for
//! requests mean.
//!
//! The rules, which every faster implementation must follow:
//! - A port for TCP has one listener, and any bytes are relayed as they are.
//! - A port for TLS resets a connection without TLS. The server name of the ClientHello selects the
//!   listener, as the host of a request does; without a server name, only a listener for any host
//!   matches.
//! - A listener that terminates TLS performs the handshake, and backends get the plaintext. One that
//!   passes TLS through performs none, and backends get all bytes of the client.
//! - If no listener has the server name, the handshake fails on a port where a listener terminates
//!   TLS; elsewhere the connection is reset. So does the handshake with a closed listener that would
//!   terminate it.
//! - Of the listener's rules, that of the most specific host decides, as its route names it. If none
//!   has the server name, the connection is reset: after the handshake, if there is one.

use std::sync::Arc;

use canal_model::ingress::{Listener, ListenerFault, ListenerProtocol};

use crate::ir_ingress::GatewayIr;
use crate::oracle::{OracleClient, OracleRequest, RoutingVerdict, normal_host, verdict_of};
use crate::oracle_ingress::{ArrivalTransport, deciding_rule, listener_for, protocol_of};

/// The decision about a connection that arrived at a Gateway's port that relays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RelayVerdict {
    /// No listener that relays has the port.
    NoListener,
    /// The port is for TLS and the connection is in plaintext: it is reset.
    WrongTransport,
    /// No listener of the port has the server name, on a port where one terminates TLS: the handshake
    /// fails.
    NoServerName,
    /// The listener of the server name would terminate TLS and is closed: the handshake fails.
    ClosedToHandshakes(Arc<ListenerFault>),
    /// No listener has the server name, or that which has it is closed: the connection is reset.
    NoRoute,
    /// The listener's routes decide.
    Relayed {
        /// Name of the listener.
        listener: String,
        /// Whether backends get the plaintext of TLS that the gateway terminates.
        is_terminated: bool,
        verdict: RoutingVerdict,
    },
}

/// Returns the decision about a connection to a port of a Gateway.
pub fn decide(gateway: &GatewayIr, transport: ArrivalTransport<'_>, port: u16) -> RelayVerdict {
    let Some(protocol) = protocol_of(gateway, port) else {
        return RelayVerdict::NoListener;
    };
    let name = match (protocol, transport) {
        (ListenerProtocol::Tcp, _) => None,
        (ListenerProtocol::Tls | ListenerProtocol::TerminatedTls, transport) => match transport {
            ArrivalTransport::Plaintext => return RelayVerdict::WrongTransport,
            ArrivalTransport::Tls(name) => name,
        },
        // Listeners for requests relay nothing.
        _ => return RelayVerdict::NoListener,
    };
    // TCP and clients without SNI have no name; only listeners for all hosts match the empty text.
    let name = normal_host(name.unwrap_or_default());
    // A closed listener of another protocol is one of its port's.
    let terminates = |listener: &Listener| match listener.protocol.shares_port_with(protocol) {
        true => listener.protocol == ListenerProtocol::TerminatedTls,
        false => *protocol == ListenerProtocol::TerminatedTls,
    };
    let mut of_port = gateway.listeners.iter().map(|it| &it.listener);
    let is_terminating = of_port.any(|it| it.port == port && terminates(it));
    let Some(own) = listener_for(gateway, port, &name) else {
        // Only a listener that terminates TLS can fail the handshake; others reset the connection.
        return match is_terminating {
            true => RelayVerdict::NoServerName,
            false => RelayVerdict::NoRoute,
        };
    };
    let is_terminated = terminates(&own.listener);
    // Only a listener that terminates TLS can fail the handshake; a closed one has no routes.
    if let Some(fault) = &own.listener.closed {
        return match is_terminated {
            true => RelayVerdict::ClosedToHandshakes(fault.clone()),
            false => RelayVerdict::NoRoute,
        };
    }
    // A connection has no path and no headers. All rules of such routes match.
    let connection = OracleRequest {
        service: gateway.service.clone(),
        port,
        host: name.clone(),
        method: String::new(),
        target: "/".to_owned(),
        headers: Vec::new(),
        client: OracleClient::default(),
    };
    RelayVerdict::Relayed {
        listener: own.listener.name.clone(),
        is_terminated,
        verdict: match deciding_rule(gateway, own, &name, &connection) {
            Some((rule, http)) => verdict_of(rule, http, &connection),
            None => RoutingVerdict::NoRule,
        },
    }
}
