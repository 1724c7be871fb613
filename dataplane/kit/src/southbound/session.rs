//! One stream to one controller: requests out, responses in, ack or nack. It ends with the reason why.

use std::time::Duration;

use canal_model::program::Kind;
use canal_wire::discovery::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use canal_wire::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, Node, Status};
use canal_wire::southbound as wire;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};

use super::SubscriberConfig;
use super::held::{Holder, StoreMatch};
use super::intake::Nack;
use super::share_report::{self, ShareReporter};
use super::state::State;
use crate::controller::{self, Connection, ControllerError};

/// How a stream ended; the label `reason` of `canal_southbound_reconnects_total`.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) reason: &'static str,
    pub(super) why: String,
}

/// Longest text of a nack, bytes.
const NACK_TEXT_MAX: usize = 4096;

/// PING towards the controller, and how long the first answer to a subscription may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timing {
    pub(super) keepalive: (Duration, Duration),
    pub(super) first_answer: Duration,
    pub(super) backoff: (Duration, Duration),
    pub(super) write: Duration,
    pub(super) shares: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            keepalive: controller::KEEPALIVE,
            first_answer: Duration::from_secs(30),
            backoff: (Duration::from_millis(10), Duration::from_secs(15)),
            write: Duration::from_secs(1),
            shares: share_report::REPORT_INTERVAL,
        }
    }
}

/// Follows one controller until the stream ends. `holder` is told of every response.
pub(super) async fn follow(
    config: &SubscriberConfig,
    timing: &Timing,
    attempt: usize,
    holder: &mut Holder,
    reporter: &ShareReporter,
) -> Ended {
    let connection = match holder.meanwhile(config.controller.connect_with(attempt, timing.keepalive)).await {
        Ok(c) => c,
        Err(e) => {
            let reason = if matches!(e, ControllerError::Connect { .. }) { "connect" } else { "configuration" };
            return Ended { reason, why: e.to_string() };
        }
    };
    // Room for every first request and an answer to every response in flight.
    let (requests, outbound) = mpsc::channel(64);
    for request in holder.with_wanted_state(|state| first_requests(config, state)) {
        if requests.send(request).await.is_err() {
            return Ended { reason: "closed", why: "the stream ended before it began".into() };
        }
    }
    let mut client = AggregatedDiscoveryServiceClient::new(connection.channel.clone())
        .max_decoding_message_size(canal_wire::MESSAGE_BYTES_MAX)
        .max_encoding_message_size(canal_wire::MESSAGE_BYTES_MAX);
    let call = client.delta_aggregated_resources(connection.request(ReceiverStream::new(outbound)));
    let mut responses = match holder.meanwhile(tokio::time::timeout(timing.first_answer, call)).await {
        Ok(Ok(r)) => r.into_inner(),
        Ok(Err(status)) => return of_status(&connection, &status),
        Err(_) => return mute(timing.first_answer),
    };
    holder.connected(&connection.address);
    tokio::select! {
        ended = receive(&connection, &mut responses, &requests, timing, holder) => ended,
        never = reporter.run(&connection, timing.shares) => match never {},
    }
}

async fn receive(
    connection: &Connection,
    responses: &mut Streaming<DeltaDiscoveryResponse>,
    requests: &mpsc::Sender<DeltaDiscoveryRequest>,
    timing: &Timing,
    holder: &mut Holder,
) -> Ended {
    let mut answered = false;
    loop {
        let next = async {
            if answered {
                return Ok(responses.message().await);
            }
            // A wildcard subscription is always answered, if only with nothing; later silence may just mean that nothing changes.
            tokio::time::timeout(timing.first_answer, responses.message()).await
        };
        let response = match holder.meanwhile(next).await {
            Ok(Ok(Some(r))) => r,
            Ok(Ok(None)) => return Ended { reason: "closed", why: "the controller ended the stream".into() },
            Ok(Err(status)) => return of_status(connection, &status),
            Err(_) => return mute(timing.first_answer),
        };
        answered = true;
        match wire::store_of(&response).map(|store| store.map(|store| holder.meet_store(store))) {
            Ok(None | Some(StoreMatch::Same)) => {}
            Ok(Some(StoreMatch::Restart)) => {
                return Ended { reason: "other_store", why: "the controller has another store than the state that was asked for".into() };
            }
            Err(e) => return Ended { reason: "error", why: e.to_string() },
        }
        let verdict = holder.take(&response);
        let answer = DeltaDiscoveryRequest {
            type_url: response.type_url,
            response_nonce: response.nonce,
            error_detail: verdict.err().map(status),
            ..DeltaDiscoveryRequest::default()
        };
        if requests.send(answer).await.is_err() {
            return Ended { reason: "closed", why: "the controller stopped listening".into() };
        }
        if std::mem::take(&mut holder.resync) {
            return Ended {
                reason: "resync",
                why: "the data plane refused resources that it had acknowledged; they are asked for again".into(),
            };
        }
    }
}

fn status(Nack { mut text, named }: Nack) -> Status {
    if text.len() > NACK_TEXT_MAX {
        let end = text.floor_char_boundary(NACK_TEXT_MAX);
        text.truncate(end);
    }
    let details = if named.is_empty() { Vec::new() } else { vec![wire::refused::pack(named)] };
    Status { code: Code::InvalidArgument as i32, message: text, details }
}

/// One wildcard subscription per kind, with what is held, so that only differences are sent.
fn first_requests(config: &SubscriberConfig, state: &State) -> Vec<DeltaDiscoveryRequest> {
    let node = Node { id: config.node.clone(), user_agent_name: "canal".into(), user_agent_version: config.version.clone() };
    let request = |(i, kind): (usize, &Kind)| DeltaDiscoveryRequest {
        node: (i == 0).then(|| node.clone()),
        type_url: wire::type_url(*kind).into(),
        resource_names_subscribe: vec!["*".into()],
        initial_resource_versions: state.held(*kind).map(|(name, h)| (name.to_string(), h.version.to_string())).collect(),
        ..DeltaDiscoveryRequest::default()
    };
    // Manifests last: the controller seals what was subscribed to before.
    let (last, first): (Vec<&Kind>, Vec<&Kind>) = config.kinds.iter().partition(|kind| **kind == Kind::Manifest);
    first.into_iter().chain(last).enumerate().map(request).collect()
}

fn mute(limit: Duration) -> Ended {
    Ended { reason: "stale", why: format!("connected, but no answer in {limit:?}") }
}

fn of_status(connection: &Connection, status: &tonic::Status) -> Ended {
    let reason = match status.code() {
        _ if connection.is_mute() => "stale",
        Code::Unauthenticated | Code::PermissionDenied => "unauthenticated",
        Code::Unavailable | Code::Aborted => "closed",
        _ => "error",
    };
    Ended { reason, why: format!("{}: {}", status.code(), status.message()) }
}
