//! Reads the ClientHello of a client whose connection is relayed. If the listener of its server name
//! passes TLS through, the bytes that were read belong to the connection and are relayed, and nothing
//! is decrypted; else the handshake continues with them. Start with [`accept_by_hello`].

use std::rc::Rc;

use canal_gateway_config::{ListenerClients, ListenerTermination};
use canal_gateway_io::buffer::Inbox;
use canal_gateway_io::clock::TimeoutKind;
use canal_gateway_io::io::Io;
use canal_identity::{ClientHelloReader, ReceivedHello, accept_received_hello};
use tokio::net::TcpStream;

use super::terminate::{ClientTransport, listener_transport};
use crate::permit::{ConnectionPermit, HandshakePermit};
use crate::worker::Worker;

/// Maximum length of the records with a ClientHello, in bytes. Those with post-quantum keys have
/// less than 2 KiB. It is the longest plaintext of one record (RFC 8446 §5.1).
pub(super) const CLIENT_HELLO_BYTES_MAX: usize = 16 << 10;

/// Reads until the ClientHello is complete, and terminates TLS if one of the port's `listeners` is to.
/// The connection counts as a handshake in progress until then.
///
/// # Errors
/// The reason for the refusal, as a counter label. The connection is reset, or the client gets an
/// alert.
pub(super) async fn accept_by_hello(
    worker: &Rc<Worker>,
    stream: TcpStream,
    listeners: Option<&ListenerTermination>,
    permit: &ConnectionPermit,
) -> Result<ClientTransport, &'static str> {
    let handshake = permit.begin_handshake()?;
    let mut io = Io::Tcp(stream);
    let mut inbox = Inbox::new(&worker.blocks);
    let read = handshake.run(read_hello(worker, &mut io, &mut inbox)).await;
    let hello = match read {
        Ok(Ok(hello)) => hello,
        Ok(Err(why)) | Err(why) => {
            io.abort();
            return Err(why);
        }
    };
    let server_name = hello.server_name();
    let terminating = listeners.filter(|it| !it.passes_through(server_name.as_deref()));
    let transport = match (terminating, io) {
        (Some(listeners), Io::Tcp(stream)) => {
            // The handshake has the bytes of the ClientHello already.
            drop(inbox);
            finish_handshake(worker, stream, hello, listeners, &handshake).await?
        }
        (_, io) => ClientTransport {
            io,
            tls: false,
            server_name,
            peer: None,
            certificate: None,
            clients: ListenerClients::Unasked,
            inbox: Some(inbox),
        },
    };
    drop(handshake);
    permit.end_handshake(false);
    Ok(transport)
}

/// Performs the rest of a handshake with the listener of the client's server name.
async fn finish_handshake(
    worker: &Worker,
    stream: TcpStream,
    hello: ReceivedHello,
    listeners: &ListenerTermination,
    handshake: &HandshakePermit,
) -> Result<ClientTransport, &'static str> {
    handshake.keep();
    let name = hello.server_name();
    let choice = listeners.choose(name.as_deref());
    let accepting = accept_received_hello(stream, hello, &listeners.trust, choice);
    listener_transport(worker, handshake.run(accepting).await?, listeners)
}

async fn read_hello(
    worker: &Worker,
    io: &mut Io,
    inbox: &mut Inbox,
) -> Result<ReceivedHello, &'static str> {
    let timer = worker.clock.timer();
    timer.arm(TimeoutKind::Head, worker.shared.config.times.head);
    let mut reader = ClientHelloReader::default();
    loop {
        let filled = timer.within(std::future::poll_fn(|cx| io.poll_fill(cx, inbox)));
        match filled.await {
            Ok(Ok(1..)) => {}
            Ok(Ok(0)) => return Err("gone"),
            Ok(Err(_)) => return Err("tls_io"),
            Err(late) => {
                worker.counts.late(late);
                return Err("tls_timeout");
            }
        }
        match reader.read(inbox.bytes()) {
            Ok(Some(hello)) => return Ok(hello),
            Ok(None) if inbox.len() >= CLIENT_HELLO_BYTES_MAX => return Err("client_hello_bytes"),
            Ok(None) => {}
            Err(_) => return Err("tls_protocol"),
        }
    }
}
