//! The road of a connection that comes into a pod without mTLS, where policies want a look at it: accept (in [`crate::accept`]) → permit →
//! connect → copy → close. Who may come in is decided in [`crate::decide`]; where no policy asks, the kernel leads it past this process.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use canal_kit::drain::Drain;
use canal_kit::sys::{self, ConnectOptions};
use canal_wire::hbone::PROXY_MARK;
use tokio::net::TcpStream;

use crate::decide::decide_plain;
use crate::guard::is_probe;
use crate::outbound::{finish, gone};
use crate::refusal::Refusal;
use crate::room::Room;
use crate::telemetry::{CUT, Fault, Flow, Party, RESET, Reporter};
use crate::worker::Local;

/// Carries one connection from its accept to its end. What is refused is reset.
pub(crate) async fn carry(local: Rc<Local>, room: Arc<Room>, mut client: TcpStream, peer: SocketAddr, drain: Drain) {
    let started = Instant::now();
    let refuse = |reason: Refusal, destination, why: &str, client: TcpStream| {
        local.records.refused(Reporter::Destination, reason, peer, destination, &room.party.load(), why);
        sys::reset_on_close(&client);
    };
    let Some(destination) = room.plaintext.destination(&client) else {
        return refuse(Refusal::ReservedPort, None, "the proxy's own port was dialled", client);
    };
    let policy = room.policy.load_full();
    let pod = room.pod.load_full();
    let admission = match decide_plain(&policy, destination, peer, is_probe(local.shared.trusts_node, &pod.probe_ports)) {
        Ok(admission) => admission,
        Err(no) => {
            local.records.judged(&room.pod.load(), &policy, None, Some(&no));
            return refuse(no.refusal, Some(destination), &no.why, client);
        }
    };
    local.records.judged(&room.pod.load(), &policy, Some(&admission.question), None);
    let mut held = local.open.hold(&room, admission.question, policy);
    let Some(_permit) = room.plain.take() else {
        return refuse(Refusal::ConnectionLimit, Some(destination), "plaintext connections", client);
    };
    let flow = flow(&room, peer, destination, started);
    let meter = local.records.opened(&flow);
    let options = ConnectOptions { mark: Some(PROXY_MARK), local: true, ..ConnectOptions::default() };
    let connected = tokio::select! {
        connected = sys::connect(Some(&room.netns), admission.target, &options) => connected.map_err(|e| (Fault::from(Refusal::ApplicationDown), e.to_string())),
        () = gone(&client) => Err((RESET, "the peer gave up".to_string())),
        no = held.over() => Err(local.records.cut(&no)),
        () = drain.forced() => Err((CUT, String::new())),
    };
    match connected {
        Ok(mut app) => finish(&local, &flow, &mut client, &mut app, &meter, &drain, Some(&mut held)).await,
        Err((fault, why)) => {
            sys::reset_on_close(&client);
            local.records.closed(&flow, &meter, Some((&fault, &why)));
        }
    }
}

fn flow(room: &Room, peer: SocketAddr, destination: SocketAddr, started: Instant) -> Flow {
    Flow {
        reporter: Reporter::Destination,
        source: Arc::new(Party::default()),
        destination: room.party.load_full(),
        service: None,
        mutual_tls: false,
        source_address: peer,
        destination_address: destination,
        authority: String::new(),
        started,
    }
}
