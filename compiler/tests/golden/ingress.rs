//! Parses and answers the requests of `#>` directives: `METHOD GATEWAY:PORT[,SNI] HOST TARGET
//! [header:value …]`. With a server name the connection has TLS; `-` stands for none. A Gateway of
//! Istio has the prefix `istio:`. `CONNECTION GATEWAY:PORT[,SNI]` is a connection whose bytes are
//! relayed.

use std::net::IpAddr;

use canal_compiler::ir::Ir;
use canal_compiler::ir_ingress::GatewayIr;
use canal_compiler::oracle::{OracleClient, OracleRequest, RoutingVerdict};
use canal_compiler::oracle_ingress::{
    ArrivalTransport, IngressVerdict, decide, gateway_at, gateway_of, validation_of,
};
use canal_compiler::oracle_relay::{self, RelayVerdict};
use canal_model::ids::{Namespace, ObjectName, ServiceKey, TenantName};
use canal_model::ingress::{gateway_service, istio_gateway_service};

use super::{parse_headers, verdict_text};

type ServiceFn = fn(&TenantName, &Namespace, &ObjectName) -> Option<ServiceKey>;

pub(crate) fn answer(ir: &Ir, arrival: &str) -> String {
    let words: Vec<&str> = arrival.split_whitespace().collect();
    let (method, gateway, rest) = match words.as_slice() {
        // CONNECTION stands for a connection without a request; otherwise the first word is a
        // method.
        [method @ "CONNECTION", gateway] => (*method, *gateway, None),
        [method, gateway, host, target, headers @ ..] => {
            (*method, *gateway, Some((*host, *target, headers)))
        }
        _ => panic!("{arrival:?} is not a request"),
    };
    let (gateway, transport) = match gateway.split_once(',') {
        None => (gateway, ArrivalTransport::Plaintext),
        // `-` stands for a TLS client that sends no server name.
        Some((gateway, "-")) => (gateway, ArrivalTransport::Tls(None)),
        Some((gateway, name)) => (gateway, ArrivalTransport::Tls(Some(name))),
    };
    let (gateway, port) = gateway.rsplit_once(':').unwrap();
    let Some(found) = gateway_named(ir, gateway) else {
        return format!("{arrival}\n  => no such Gateway\n");
    };
    let port = port.parse().unwrap();
    let Some((host, target, headers)) = rest else {
        let verdict = relay_text(ir, oracle_relay::decide(found, transport, port));
        return format!("{arrival}\n  => {verdict}\n");
    };
    let request = OracleRequest {
        service: found.service.clone(),
        port,
        host: host.to_owned(),
        method: method.to_owned(),
        target: target.to_owned(),
        headers: parse_headers(headers),
        client: OracleClient::default(),
    };
    let verdict = match decide(found, transport, &request) {
        IngressVerdict::NoListener => "no listener".to_owned(),
        IngressVerdict::WrongTransport => "the port has the other transport".to_owned(),
        IngressVerdict::NoServerName => "no listener has the server name".to_owned(),
        IngressVerdict::ClosedToHandshakes(fault) => {
            format!("no handshake, closed {}", fault.reason.as_str())
        }
        IngressVerdict::Misdirected => "421, misdirected".to_owned(),
        IngressVerdict::NoHost => "404, no listener has the host".to_owned(),
        IngressVerdict::Closed(fault) => format!("404, closed {}", fault.reason.as_str()),
        IngressVerdict::RefusedByFilter(listener) => {
            format!("500, a filter of {listener} could not be resolved")
        }
        IngressVerdict::Routed { listener, verdict } => {
            let validation = match transport {
                ArrivalTransport::Plaintext => None,
                ArrivalTransport::Tls(name) => validation_of(found, port, name),
            };
            // Most listeners do not validate clients; then nothing is added.
            let clients = validation.map_or(String::new(), |it| {
                format!(" ({} of clients)", it.mode.as_str())
            });
            format!("{listener}{clients}: {}", verdict_text(ir, verdict))
        }
    };
    format!("{arrival}\n  => {verdict}\n")
}

/// Returns the Gateway with an address or a name.
pub(crate) fn gateway_named<'a>(ir: &'a Ir, gateway: &str) -> Option<&'a GatewayIr> {
    if let Ok(address) = gateway.parse::<IpAddr>() {
        return gateway_at(ir, address);
    }
    let (service, gateway) = match gateway.strip_prefix("istio:") {
        Some(gateway) => (istio_gateway_service as ServiceFn, gateway),
        None => (gateway_service as ServiceFn, gateway),
    };
    let (namespace, name) = gateway.split_once('/').unwrap();
    let (namespace, name) = (namespace.parse().unwrap(), name.parse().unwrap());
    gateway_of(ir, &service(&ir.tenant.name, &namespace, &name).unwrap())
}

fn relay_text(ir: &Ir, verdict: RelayVerdict) -> String {
    match verdict {
        RelayVerdict::NoListener => "no listener that relays".to_owned(),
        RelayVerdict::WrongTransport => "reset, the port has the other transport".to_owned(),
        RelayVerdict::NoServerName => "no handshake, no listener has the server name".to_owned(),
        RelayVerdict::ClosedToHandshakes(fault) => {
            format!("no handshake, closed {}", fault.reason.as_str())
        }
        RelayVerdict::NoRoute => "reset, no open listener has the server name".to_owned(),
        RelayVerdict::Relayed {
            listener,
            is_terminated,
            verdict,
        } => {
            let how = match is_terminated {
                true => "terminated",
                false => "as it is",
            };
            let text = match verdict {
                RoutingVerdict::NoRule => "reset, no route has the server name".to_owned(),
                verdict => verdict_text(ir, verdict),
            };
            format!("{listener}, {how}: {text}")
        }
    }
}
