//! TLS of clients without a node proxy ends here, where a Termination says so: told from plaintext by the first byte, the server name held
//! against the service's, the client's certificate (if it shows one) taken for its identity. Handshakes are the kit's.

use std::rc::Rc;
use std::time::Duration;

use canal_kit::tls::Standing;
use canal_model::identity::Peer;
use canal_model::program::AppProtocol;
use tokio::net::TcpStream;

use crate::clock::Late;
use crate::io::{Io, Tls};
use crate::permit::ConnectionPermit;
use crate::snapshot::TerminationView;
use crate::worker::Worker;

/// The first byte of a TLS record with a handshake message (RFC 8446 §5.1); no text of HTTP begins with it.
const HANDSHAKE: u8 = 0x16;

/// A client's connection behind the door.
pub(super) struct Entered {
    pub(super) io: Io,
    /// TLS ended here.
    pub(super) tls: bool,
    pub(super) server_name: Option<String>,
    pub(super) peer: Option<(Peer, Standing)>,
}

impl Entered {
    pub(super) fn plain(stream: TcpStream) -> Self {
        Self { io: Io::Tcp(stream), tls: false, server_name: None, peer: None }
    }
}

/// What the first byte says of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Opening {
    Tls,
    Plain,
    /// The client said nothing in time: a protocol in which servers speak first is plain.
    Silent,
    Gone,
}

/// Whether a connection may go on, and how.
fn decide(opening: Opening, view: &TerminationView) -> Result<bool, &'static str> {
    match opening {
        _ if view.is_broken() => Err("termination_broken"),
        Opening::Tls => Ok(true),
        Opening::Gone => Err("gone"),
        Opening::Plain | Opening::Silent if view.required => Err("plaintext_refused"),
        Opening::Plain | Opening::Silent => Ok(false),
    }
}

async fn listen(worker: &Worker, stream: &TcpStream, patience: Duration) -> Opening {
    let timer = worker.clock.timer();
    timer.arm(Late::Head, patience);
    let mut first = [0u8];
    match timer.within(stream.peek(&mut first)).await {
        Ok(Ok(1..)) if first[0] == HANDSHAKE => Opening::Tls,
        Ok(Ok(1..)) => Opening::Plain,
        Ok(_) => Opening::Gone,
        Err(_) => Opening::Silent,
    }
}

/// Lets a client in, or says why not.
pub(super) async fn enter(
    worker: &Rc<Worker>,
    stream: TcpStream,
    view: &TerminationView,
    protocol: AppProtocol,
    permit: &ConnectionPermit,
) -> Result<Entered, &'static str> {
    let times = &worker.shared.config.times;
    let silent = !view.required && matches!(protocol, AppProtocol::Tcp | AppProtocol::Detect);
    let opening = listen(worker, &stream, if silent { times.sniff } else { times.head }).await;
    let refused = |stream: &TcpStream, why| {
        canal_kit::sys::reset_on_close(stream);
        Err(why)
    };
    match decide(opening, view) {
        Ok(false) => return Ok(Entered::plain(stream)),
        Err(why) => return refused(&stream, why),
        Ok(true) => {}
    }
    let Some(terminator) = &view.terminator else { return refused(&stream, "no_certificate") };
    let handshake = permit.begin_handshake()?;
    let terminated = terminator.accept(stream).await.map_err(|e| {
        tracing::debug!(error = %e, "TLS with a client without a node proxy failed");
        super::tls_reason(&e)
    })?;
    drop(handshake);
    permit.end_handshake(terminated.peer.is_some());
    if !view.is_named(terminated.server_name.as_deref()) {
        return Err("wrong_server_name");
    }
    let io = Io::Tls(Box::new(Tls::new(terminated.stream)));
    Ok(Entered { io, tls: true, server_name: terminated.server_name, peer: terminated.peer })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plaintext_is_refused_where_tls_is_required_and_all_is_where_it_is_broken() {
        let view = |required, broken| TerminationView::of(required, broken, &["web.default.svc.cluster.local", "web"]);
        for (opening, required, broken, want) in [
            (Opening::Tls, false, false, Ok(true)),
            (Opening::Tls, true, false, Ok(true)),
            (Opening::Plain, false, false, Ok(false)),
            (Opening::Plain, true, false, Err("plaintext_refused")),
            (Opening::Silent, false, false, Ok(false)),
            (Opening::Silent, true, false, Err("plaintext_refused")),
            (Opening::Gone, false, false, Err("gone")),
            (Opening::Tls, false, true, Err("termination_broken")),
            (Opening::Plain, false, true, Err("termination_broken")),
        ] {
            assert_eq!(decide(opening, &view(required, broken)), want, "{opening:?} {required} {broken}");
        }
        for (name, want) in [(Some("web"), true), (Some("web.default.svc.cluster.local"), true), (Some("db"), false), (None, false)] {
            assert_eq!(view(false, false).is_named(name), want, "{name:?}");
        }
    }
}
