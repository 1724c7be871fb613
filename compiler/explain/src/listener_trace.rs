//! Describes which listener of a Gateway takes a connection or a request and why the others do not,
//! and what the gateway does with TLS. The oracle decides. Start at [`trace_listeners`].

use canal_compiler::ir_ingress::{GatewayIr, ListenerIr};
use canal_compiler::oracle::host_holds;
use canal_compiler::oracle_ingress::{listener_for, protocol_of, validation_of};
use canal_compiler::text;
use canal_model::client_validation::ClientValidationMode;
use canal_model::ids::SecretKey;
use canal_model::ingress::{Listener, ListenerProtocol, host_order};

use super::arrival_description::ArrivalDescription;

/// One listener of a Gateway, and why it takes a connection or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenerTrace {
    pub name: String,
    pub port: u16,
    pub protocol: String,
    /// The host of the requests or connections that the listener takes, as text.
    pub host: String,
    /// True if the client dials the listener's port.
    pub is_of_port: bool,
    /// True if the listener takes the connection, or the request of a plaintext connection.
    pub is_chosen: bool,
    pub why: String,
}

/// The name by which a port selects one of its listeners, in its normal form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SelectingName {
    /// Host of a request in plaintext.
    Host(String),
    /// Server name of a TLS handshake; empty if the client sends none.
    ServerName(String),
    /// A port for TCP has one listener.
    None,
}

impl SelectingName {
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Host(name) | Self::ServerName(name) => name,
            Self::None => "",
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Host(name) => format!("host {name:?}"),
            Self::ServerName(name) if name.is_empty() => "a client without server name".to_owned(),
            Self::ServerName(name) => format!("server name {name:?}"),
            Self::None => "any client".to_owned(),
        }
    }
}

/// Returns the trace of each listener for a connection to a port.
pub(super) fn trace_listeners(
    gateway: &GatewayIr,
    port: u16,
    name: &SelectingName,
) -> Vec<ListenerTrace> {
    let chosen = protocol_of(gateway, port).and_then(|_| listener_for(gateway, port, name.text()));
    let chosen = chosen.map(|it| &it.listener);
    let listeners = gateway.listeners.iter().map(|it| &it.listener);
    let traces = listeners.map(|listener| {
        let is_selected = chosen.is_some_and(|chosen| chosen.name == listener.name);
        ListenerTrace {
            name: listener.name.clone(),
            port: listener.port,
            protocol: listener.protocol.to_string(),
            host: text::host(listener.host.as_ref()),
            is_of_port: listener.port == port,
            is_chosen: is_selected && listener.closed.is_none(),
            why: describe_choice(listener, port, name, chosen),
        }
    });
    traces.collect()
}

fn describe_choice(
    listener: &Listener,
    port: u16,
    name: &SelectingName,
    chosen: Option<&Listener>,
) -> String {
    if listener.port != port {
        return format!("its port is not {port}");
    }
    let is_for_name = listener
        .host
        .as_ref()
        .is_none_or(|host| host_holds(host, name.text()));
    let closed = listener.closed.as_ref();
    let closed = closed.map(|fault| format!("{}: {}", fault.reason.as_str(), fault.problem));
    let is_selected = chosen.is_some_and(|chosen| chosen.name == listener.name);
    match (closed, chosen) {
        // A closed listener keeps its host, so that no other listener answers for it.
        (Some(why), _) if is_selected => format!("selected, but closed ({why})"),
        (Some(why), _) => format!("closed ({why})"),
        (None, _) if is_selected => format!("selected for {}", name.describe()),
        (None, _) if !is_for_name => format!("its host is not for {}", name.describe()),
        (None, Some(chosen))
            if host_order(chosen.host.as_ref()) < host_order(listener.host.as_ref()) =>
        {
            let more = text::host(chosen.host.as_ref());
            format!("its host is less specific than {more}")
        }
        // The port has no protocol that the gateway serves, or a listener before has the same host.
        (None, _) => "another listener of the port comes first".to_owned(),
    }
}

/// Describes what the gateway does with the TLS of a connection that a listener takes.
pub(super) fn describe_tls(
    gateway: &GatewayIr,
    arrival: &ArrivalDescription,
    protocol: Option<&ListenerProtocol>,
    listener: Option<&ListenerIr>,
) -> String {
    let listener = listener.map(|it| &it.listener);
    let open = listener.filter(|it| it.closed.is_none());
    match (protocol, arrival.is_tls, open) {
        (Some(ListenerProtocol::Tcp), true, _) => {
            "not read: the connection is relayed as it is".to_owned()
        }
        (
            Some(ListenerProtocol::Https | ListenerProtocol::Tls | ListenerProtocol::TerminatedTls),
            true,
            Some(listener),
        ) => {
            if !listener.protocol.terminates_tls() {
                return "passed through: the backend terminates it".to_owned();
            }
            let certificates = describe_certificates(gateway, listener, arrival);
            let clients = describe_clients(gateway, arrival);
            format!("terminated with {certificates}; {clients}")
        }
        (_, true, _) => "no handshake".to_owned(),
        (_, false, _) => "none".to_owned(),
    }
}

/// Names the certificates of a listener from which the handshake takes one: those that match the
/// server name best.
fn describe_certificates(
    gateway: &GatewayIr,
    listener: &Listener,
    arrival: &ArrivalDescription,
) -> String {
    let server_name = arrival.server_name.as_deref().unwrap_or_default();
    let server_name = server_name.to_ascii_lowercase();
    let rank = |secret: &SecretKey| {
        let names = gateway.certificates.get(secret).map(|it| &it.names);
        let ranks = names.into_iter().flatten();
        ranks
            .map(|name| certificate_rank(name, &server_name))
            .min()
            .unwrap_or(2)
    };
    let best = listener.certificates.iter().map(rank).min();
    let fitting = listener.certificates.iter();
    let fitting = fitting.filter(|secret| Some(rank(secret)) == best);
    let texts: Vec<String> = fitting
        .map(|secret| {
            let (namespace, name) = secret;
            let names = gateway.certificates.get(secret);
            let names = names.map(|it| it.names.join(", ")).unwrap_or_default();
            format!("the certificate of Secret {namespace}/{name} for {names}")
        })
        .collect();
    // Of equally good certificates, that with an ECDSA key precedes one with an RSA key.
    texts.join(" or ")
}

/// Returns the rank of a certificate's name for a server name; the best one has the lowest. A
/// wildcard stands for one label.
fn certificate_rank(name: &str, server_name: &str) -> u8 {
    let label = name
        .strip_prefix('*')
        .and_then(|domain| server_name.strip_suffix(domain));
    if name == server_name {
        0
    } else if label.is_some_and(|label| !label.is_empty() && !label.contains('.')) {
        1
    } else {
        2
    }
}

fn describe_clients(gateway: &GatewayIr, arrival: &ArrivalDescription) -> String {
    let server_name = arrival.server_name.as_deref();
    let Some(validation) = validation_of(gateway, arrival.port, server_name) else {
        return "the client is not asked for a certificate".to_owned();
    };
    let count = validation.authorities.count;
    let mode = validation.mode.as_str();
    match validation.mode {
        ClientValidationMode::AllowValidOnly => {
            format!(
                "the client needs a certificate that one of {count} authorities issued ({mode})"
            )
        }
        ClientValidationMode::AllowValidOrNone => format!(
            "the client is asked for a certificate of one of {count} authorities, and refused with another one ({mode})"
        ),
        ClientValidationMode::AllowInsecureFallback => format!(
            "the client is asked for a certificate of one of {count} authorities, and served without one too ({mode})"
        ),
    }
}
