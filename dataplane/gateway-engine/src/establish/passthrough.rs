//! Reads the server name of a client whose TLS is passed through. The bytes that are read for it
//! belong to the connection, and are relayed. Nothing is decrypted. Start with
//! [`read_server_name`].

use std::rc::Rc;

use canal_gateway_config::PortClients;
use canal_gateway_io::buffer::Inbox;
use canal_gateway_io::clock::TimeoutKind;
use canal_gateway_io::io::Io;
use canal_identity::{ClientHelloReader, ClientHelloState};
use tokio::net::TcpStream;

use super::terminate::ClientTransport;
use crate::permit::ConnectionPermit;
use crate::worker::Worker;

/// Maximum length of the records with a ClientHello, in bytes. Those with post-quantum keys have
/// less than 2 KiB.
pub(super) const CLIENT_HELLO_BYTES_MAX: usize = 16 << 10;

/// Reads until the ClientHello is complete. It counts as a handshake in progress until then.
///
/// # Errors
/// The reason for the refusal, as a counter label. The connection is reset.
pub(super) async fn read_server_name(
    worker: &Rc<Worker>,
    stream: TcpStream,
    permit: &ConnectionPermit,
) -> Result<ClientTransport, &'static str> {
    let handshake = permit.begin_handshake()?;
    let mut io = Io::Tcp(stream);
    let mut inbox = Inbox::new(&worker.blocks);
    let read = handshake.run(read_hello(worker, &mut io, &mut inbox)).await;
    let server_name = match read {
        Ok(Ok(name)) => name,
        Ok(Err(why)) | Err(why) => {
            io.abort();
            return Err(why);
        }
    };
    drop(handshake);
    permit.end_handshake(false);
    Ok(ClientTransport {
        io,
        tls: false,
        server_name,
        peer: None,
        certificate: None,
        clients: PortClients::Unasked,
        inbox: Some(inbox),
    })
}

async fn read_hello(
    worker: &Worker,
    io: &mut Io,
    inbox: &mut Inbox,
) -> Result<Option<String>, &'static str> {
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
            Ok(ClientHelloState::Complete(name)) => return Ok(name),
            Ok(ClientHelloState::Incomplete) if inbox.len() >= CLIENT_HELLO_BYTES_MAX => {
                return Err("client_hello_bytes");
            }
            Ok(ClientHelloState::Incomplete) => {}
            Err(_) => return Err("tls_protocol"),
        }
    }
}
