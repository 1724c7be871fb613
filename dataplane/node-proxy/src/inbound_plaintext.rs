//! Path of a connection into a pod without mTLS, where policies apply to plaintext: accept (in
//! [`crate::accept`]) → permit → connect → copy → close.
//!
//! [`crate::routing`] decides. Where no policy applies, the kernel delivers the connection without
//! this process.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use canal_net::sys;
use canal_runtime::drain::DrainWatcher;
use tokio::net::TcpStream;

use crate::delivery;
use crate::outbound::{finish, wait_for_reset};
use crate::plaintext_capture::is_probe;
use crate::pod_context::PodContext;
use crate::refusal::NodeRefusal;
use crate::routing::decide_plain;
use crate::telemetry::{CUT, ConnectionFailure, EndpointLabels, FlowRecord, RESET, Reporter};
use crate::worker::WorkerLocal;

/// Carries one connection from its accept to its end. Refused connections are reset.
pub(crate) async fn carry(
    local: Rc<WorkerLocal>,
    context: Arc<PodContext>,
    mut client: TcpStream,
    peer: SocketAddr,
    drain: DrainWatcher,
) {
    let started = Instant::now();
    let refuse = |reason: NodeRefusal, destination, why: &str, client: TcpStream| {
        local.records.refused(
            Reporter::Destination,
            reason,
            peer,
            destination,
            &context.labels.load(),
            why,
        );
        sys::reset_on_close(&client);
    };
    let Some(destination) = context.plaintext.destination(&client) else {
        return refuse(
            NodeRefusal::ReservedPort,
            None,
            "the proxy's own port was dialled",
            client,
        );
    };
    let policy = context.policy.load_full();
    let pod = context.pod.load_full();
    let admission = match decide_plain(
        &policy,
        destination,
        peer,
        is_probe(local.shared.allow_node_probes, &pod.probe_ports),
    ) {
        Ok(admission) => admission,
        Err(no) => {
            local
                .records
                .record_authorization(&context.pod.load(), &policy, None, Some(&no));
            return refuse(no.refusal, Some(destination), &no.why, client);
        }
    };
    local
        .records
        .record_authorization(&context.pod.load(), &policy, Some(&admission.query), None);
    // Registered before the first await, so that no policy change is missed.
    let mut open = local.open.register(&context, admission.query, policy);
    // After the authorization, so that refused peers occupy none of the pod's connections.
    let Some(_permit) = context.plain.take() else {
        return refuse(
            NodeRefusal::ConnectionLimit,
            Some(destination),
            "plaintext connections",
            client,
        );
    };
    let flow = flow(&context, peer, destination, started);
    let meter = local.records.count_opened(&flow);
    // Nothing reads the client during the dial, so its end and lost admission are watched here.
    let connected = tokio::select! {
        connected = delivery::dial(&context, admission.target, admission.client, peer.ip()) => connected.map_err(|no| (ConnectionFailure::from(no.refusal), no.why)),
        () = wait_for_reset(&client) => Err((RESET, "the peer closed the connection".to_string())),
        no = open.over() => Err(local.records.cut(&no)),
        () = drain.forced() => Err((CUT, String::new())),
    };
    match connected {
        Ok(mut app) => {
            finish(
                &local,
                &flow,
                &mut client,
                &mut app,
                &meter,
                &drain,
                Some(&mut open),
            )
            .await
        }
        Err((fault, why)) => {
            sys::reset_on_close(&client);
            local.records.closed(&flow, &meter, Some((&fault, &why)));
        }
    }
}

fn flow(
    context: &PodContext,
    peer: SocketAddr,
    destination: SocketAddr,
    started: Instant,
) -> FlowRecord {
    FlowRecord {
        reporter: Reporter::Destination,
        source: Arc::new(EndpointLabels::default()),
        destination: context.labels.load_full(),
        service: None,
        mutual_tls: false,
        source_address: peer,
        destination_address: destination,
        authority: String::new(),
        is_direct: false,
        started,
    }
}
