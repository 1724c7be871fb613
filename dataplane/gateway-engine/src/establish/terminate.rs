//! Terminates TLS of clients without a node proxy, on ports with a Termination and on ports of
//! Gateways.
//!
//! The first byte separates TLS from plaintext. The server name must be one of the service's names.
//! A client certificate, if the client presents one, determines its identity. The handshakes are
//! done by `canal_identity`. Start with [`terminate`].

use std::rc::Rc;
use std::time::Duration;

use canal_gateway_config::{
    ListenerClients, ListenerTermination, PortTermination, TerminationView,
};
use canal_gateway_io::buffer::Inbox;
use canal_gateway_io::clock::TimeoutKind;
use canal_gateway_io::io::{Io, TlsIo};
use canal_identity::{
    ClientCertificate, ListenerClient, TerminatedConnection, accept_by_server_name,
};
use canal_model::identity::VerifiedPeer;
use canal_model::program::AppProtocol;
use canal_tls::{PeerTrustWatch, TlsError};
use tokio::net::TcpStream;

use super::passthrough;
use crate::permit::ConnectionPermit;
use crate::worker::Worker;

/// First byte of a TLS handshake record (RFC 8446 §5.1). No HTTP message begins with it.
const HANDSHAKE: u8 = 0x16;

/// A client's connection after a possible TLS termination.
pub(super) struct ClientTransport {
    pub(super) io: Io,
    /// True if TLS was terminated here.
    pub(super) tls: bool,
    pub(super) server_name: Option<String>,
    pub(super) peer: Option<(VerifiedPeer, PeerTrustWatch)>,
    /// The valid certificate of a client that a listener validated.
    pub(super) certificate: Option<ClientCertificate>,
    /// How the listener validated clients at the handshake.
    pub(super) clients: ListenerClients,
    /// Bytes that were read and belong to the connection.
    pub(super) inbox: Option<Inbox>,
}

impl ClientTransport {
    pub(super) fn plain(stream: TcpStream) -> Self {
        Self {
            io: Io::Tcp(stream),
            tls: false,
            server_name: None,
            peer: None,
            certificate: None,
            clients: ListenerClients::Unasked,
            inbox: None,
        }
    }
}

/// Classification of a connection by its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FirstByte {
    Tls,
    Plain,
    /// The client sent nothing in time. That counts as plaintext, as in protocols where the server
    /// sends first.
    Silent,
    Gone,
}

/// Decides whether the connection is accepted; true means with TLS.
fn decide(opening: FirstByte, view: &TerminationView) -> Result<bool, &'static str> {
    match opening {
        _ if view.is_broken() => Err("termination_broken"),
        FirstByte::Tls => Ok(true),
        FirstByte::Gone => Err("gone"),
        FirstByte::Plain | FirstByte::Silent if view.required => Err("plaintext_refused"),
        FirstByte::Plain | FirstByte::Silent => Ok(false),
    }
}

async fn listen(worker: &Worker, stream: &TcpStream, timeout: Duration) -> FirstByte {
    let timer = worker.clock.timer();
    timer.arm(TimeoutKind::Head, timeout);
    let mut first = [0u8];
    match timer.within(stream.peek(&mut first)).await {
        Ok(Ok(1..)) if first[0] == HANDSHAKE => FirstByte::Tls,
        Ok(Ok(1..)) => FirstByte::Plain,
        Ok(_) => FirstByte::Gone,
        Err(_) => FirstByte::Silent,
    }
}

/// Accepts a client's connection to a port where TLS terminates.
///
/// # Errors
/// The reason for the refusal, as a counter label.
pub(super) async fn terminate(
    worker: &Rc<Worker>,
    stream: TcpStream,
    port: &PortTermination,
    protocol: AppProtocol,
    permit: &ConnectionPermit,
) -> Result<ClientTransport, &'static str> {
    match port {
        PortTermination::Service(view) => {
            terminate_tls(worker, stream, view, protocol, permit).await
        }
        PortTermination::Gateway(listeners) => {
            terminate_listener_tls(worker, stream, listeners, permit).await
        }
        PortTermination::Passthrough => {
            if let Some(why) = refuse_without_tls(worker, &stream).await {
                return Err(why);
            }
            passthrough::accept_by_hello(worker, stream, None, permit).await
        }
        PortTermination::Relay(listeners) => {
            if let Some(why) = refuse_without_tls(worker, &stream).await {
                return Err(why);
            }
            passthrough::accept_by_hello(worker, stream, Some(listeners), permit).await
        }
    }
}

/// Returns why a connection to a port for TLS is refused, if its first byte is not one of TLS. Such a
/// connection is reset.
async fn refuse_without_tls(worker: &Worker, stream: &TcpStream) -> Option<&'static str> {
    let why = match listen(worker, stream, worker.shared.config.times.head).await {
        FirstByte::Tls => return None,
        FirstByte::Gone => "gone",
        FirstByte::Plain => "plaintext_refused",
        FirstByte::Silent => "tls_timeout",
    };
    canal_net::sys::reset_on_close(stream);
    Some(why)
}

/// Accepts a connection to a Gateway's port for HTTPS: the server name selects the listener.
async fn terminate_listener_tls(
    worker: &Rc<Worker>,
    stream: TcpStream,
    listeners: &ListenerTermination,
    permit: &ConnectionPermit,
) -> Result<ClientTransport, &'static str> {
    if let Some(why) = refuse_without_tls(worker, &stream).await {
        return Err(why);
    }
    let handshake = permit.begin_handshake()?;
    let accepting = accept_by_server_name(
        stream,
        &listeners.trust,
        || handshake.keep(),
        |name| listeners.choose(name),
    );
    let terminated = handshake.run(accepting).await?;
    let transport = listener_transport(worker, terminated, listeners)?;
    drop(handshake);
    // A listener's client has no identity of the mesh, so its connection may still have to give
    // way.
    permit.end_handshake(false);
    Ok(transport)
}

/// Returns the transport of a client whose TLS a listener terminated.
///
/// # Errors
/// The handshake failed; the error is a counter label.
pub(super) fn listener_transport(
    worker: &Worker,
    terminated: Result<TerminatedConnection<TcpStream>, TlsError>,
    listeners: &ListenerTermination,
) -> Result<ClientTransport, &'static str> {
    let terminated = terminated.map_err(|e| {
        tracing::debug!(error = %e, "gateway: a TLS handshake with a client of a listener failed, the connection is closed");
        listener_tls_reason(&e)
    })?;
    let certificate = match terminated.listener_client {
        Some(ListenerClient::Valid(certificate)) => Some(certificate),
        Some(ListenerClient::Unvalidated(why)) => {
            tracing::debug!(
                reason = why.name(),
                "gateway: a client of a listener has no valid certificate and is accepted (AllowInsecureFallback)"
            );
            worker.counts.insecure_clients.inc();
            None
        }
        None => None,
    };
    let clients = listeners.clients(terminated.server_name.as_deref());
    Ok(ClientTransport {
        io: Io::Tls(Box::new(TlsIo::new(terminated.stream))),
        tls: true,
        server_name: terminated.server_name,
        peer: None,
        certificate,
        clients: clients.clone(),
        inbox: None,
    })
}

/// Returns the reason why a handshake with a client of a listener failed.
fn listener_tls_reason(error: &TlsError) -> &'static str {
    if error.is_of_peer_certificate() {
        "client_certificate"
    } else {
        super::tls_reason(error)
    }
}

/// Accepts a client's connection to a service, with TLS or in plaintext.
async fn terminate_tls(
    worker: &Rc<Worker>,
    stream: TcpStream,
    view: &TerminationView,
    protocol: AppProtocol,
    permit: &ConnectionPermit,
) -> Result<ClientTransport, &'static str> {
    let times = &worker.shared.config.times;
    // Where plaintext is allowed and the server may send first, a silent client must not wait for
    // the head's timeout.
    let silent = !view.required && matches!(protocol, AppProtocol::Tcp | AppProtocol::Detect);
    let opening = listen(
        worker,
        &stream,
        if silent { times.sniff } else { times.head },
    )
    .await;
    let refused = |stream: &TcpStream, why| {
        canal_net::sys::reset_on_close(stream);
        Err(why)
    };
    match decide(opening, view) {
        Ok(false) => return Ok(ClientTransport::plain(stream)),
        Err(why) => return refused(&stream, why),
        Ok(true) => {}
    }
    let Some(terminator) = &view.terminator else {
        return refused(&stream, "no_certificate");
    };
    let handshake = permit.begin_handshake()?;
    let accepted = handshake
        .run(terminator.accept(stream, || handshake.keep()))
        .await?;
    let terminated = accepted.map_err(|e| {
        tracing::debug!(error = %e, "gateway: a TLS handshake with a client without a node proxy failed, the connection is closed");
        super::tls_reason(&e)
    })?;
    // The permit bounds handshakes in progress; the next one may begin now.
    drop(handshake);
    permit.end_handshake(terminated.peer.is_some());
    if !view.is_named(terminated.server_name.as_deref()) {
        return Err("wrong_server_name");
    }
    let io = Io::Tls(Box::new(TlsIo::new(terminated.stream)));
    Ok(ClientTransport {
        io,
        tls: true,
        server_name: terminated.server_name,
        peer: terminated.peer,
        certificate: None,
        clients: ListenerClients::Unasked,
        inbox: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plaintext_is_refused_where_tls_is_required_and_all_is_where_it_is_broken() {
        let view = |required, broken| {
            TerminationView::of(required, broken, &["web.default.svc.cluster.local", "web"])
        };
        for (opening, required, broken, want) in [
            (FirstByte::Tls, false, false, Ok(true)),
            (FirstByte::Tls, true, false, Ok(true)),
            (FirstByte::Plain, false, false, Ok(false)),
            (FirstByte::Plain, true, false, Err("plaintext_refused")),
            (FirstByte::Silent, false, false, Ok(false)),
            (FirstByte::Silent, true, false, Err("plaintext_refused")),
            (FirstByte::Gone, false, false, Err("gone")),
            (FirstByte::Tls, false, true, Err("termination_broken")),
            (FirstByte::Plain, false, true, Err("termination_broken")),
        ] {
            assert_eq!(
                decide(opening, &view(required, broken)),
                want,
                "{opening:?} {required} {broken}"
            );
        }
        for (name, want) in [
            (Some("web"), true),
            (Some("web.default.svc.cluster.local"), true),
            (Some("db"), false),
            (None, false),
        ] {
            assert_eq!(view(false, false).is_named(name), want, "{name:?}");
        }
    }
}
