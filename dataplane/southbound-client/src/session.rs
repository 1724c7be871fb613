//! One stream to one controller: it sends requests, receives responses, and answers with ACK or
//! NACK. It joins the parts of a response. It ends with a reason, and does not reconnect.

use std::time::Duration;

use canal_model::program::ResourceKind;
use canal_wire::discovery::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use canal_wire::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, Node, Status};
use canal_wire::southbound::parts::ResponseJoiner;
use canal_wire::southbound::{self as wire, RESPONSE_PARTS_FEATURE};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};

use super::SubscriberConfig;
use super::counts::EXHAUSTED;
use super::share_report::{self, ShareReporter};
use super::state::ResourceState;
use super::state_owner::{NackReply, StateOwner, StoreMatch};
use crate::controller_client::{self, ControllerConnectError, ControllerConnection};

/// End of a stream. `reason` is the label value of `canal_southbound_reconnects_total`.
#[derive(Debug)]
pub(super) struct StreamEndReason {
    pub(super) reason: &'static str,
    pub(super) why: String,
}

/// Maximum length of a NACK text in bytes. It names the first refused resources; the controller
/// shows it to an operator.
const NACK_TEXT_MAX: usize = 4096;

/// Maximum bytes of the names and versions of held resources in one request. A longer list takes
/// several requests, because the controller keeps a buffer for the largest request as long as the
/// stream is open. As long as one message of the controller (`PART_BYTES_MAX`).
pub(super) const LISTED_BYTES_MAX: usize = 512 << 10;

/// Approximate bytes of an entry of the list beside its name and version.
const LISTED_ENTRY_BYTES: usize = 16;

/// Intervals and timeouts of a stream: PING interval and timeout, timeout of the first answer,
/// backoff, pause between writes, and interval of share reports.
#[derive(Debug, Clone, Copy)]
pub(super) struct StreamTiming {
    pub(super) keepalive: (Duration, Duration),
    pub(super) first_answer: Duration,
    pub(super) backoff: (Duration, Duration),
    pub(super) write: Duration,
    pub(super) shares: Duration,
}

impl Default for StreamTiming {
    fn default() -> Self {
        Self {
            keepalive: controller_client::KEEPALIVE,
            // A controller that starts compiles all tenants before it answers; nobody measured the
            // longest.
            first_answer: Duration::from_secs(30),
            // The first is short, because another controller usually serves; the longest keeps a
            // fleet's attempts at a dead controller few.
            backoff: (Duration::from_millis(10), Duration::from_secs(15)),
            // A state that a restart reads may be as old; the controller sends what is missing.
            write: Duration::from_secs(1),
            shares: share_report::REPORT_INTERVAL,
        }
    }
}

/// Follows one controller until the stream ends. `holder` applies every response, and `shown`
/// publishes the connection.
pub(super) async fn follow(
    config: &SubscriberConfig,
    timing: &StreamTiming,
    attempt: usize,
    holder: &mut StateOwner,
    (reporter, shown): (&ShareReporter, &watch::Sender<Option<ControllerConnection>>),
) -> StreamEndReason {
    let connection = match holder
        .persist_while(config.controller.connect_with(attempt, timing.keepalive))
        .await
    {
        Ok(c) => c,
        Err(e) => {
            // Only a connection may succeed when it is tried again; the configuration needs an
            // operator.
            let reason = if matches!(e, ControllerConnectError::Connect { .. }) {
                "connect"
            } else {
                "configuration"
            };
            return StreamEndReason {
                reason,
                why: e.to_string(),
            };
        }
    };
    let first = holder.with_wanted_state(|state| first_requests(config, state));
    // The channel has capacity for every first request, because none is taken before the call, and
    // for an answer to every response in flight. The controller has 64 of these at most.
    let (requests, outbound) = mpsc::channel(first.len() + 64);
    for request in first {
        if requests.send(request).await.is_err() {
            return StreamEndReason {
                reason: "closed",
                why: "the stream ended before it began".into(),
            };
        }
    }
    let mut client = AggregatedDiscoveryServiceClient::new(connection.channel.clone())
        .max_decoding_message_size(canal_wire::MESSAGE_BYTES_MAX)
        .max_encoding_message_size(canal_wire::MESSAGE_BYTES_MAX);
    let call = client.delta_aggregated_resources(connection.request(ReceiverStream::new(outbound)));
    let mut responses = match holder
        .persist_while(tokio::time::timeout(timing.first_answer, call))
        .await
    {
        Ok(Ok(r)) => r.into_inner(),
        Ok(Err(status)) => {
            let ended = of_status(&connection, &status);
            // The controller refused the call before it read what this data plane lists, so a
            // shorter list would not help.
            let reason = if ended.reason == EXHAUSTED {
                "full"
            } else {
                ended.reason
            };
            return StreamEndReason { reason, ..ended };
        }
        Err(_) => return no_answer(timing.first_answer),
    };
    holder.connected(&connection.address);
    shown.send_replace(Some(connection.clone()));
    tokio::select! {
        ended = receive(&connection, &mut responses, &requests, timing, holder) => ended,
        never = reporter.run(&connection, timing.shares) => match never {},
    }
}

async fn receive(
    connection: &ControllerConnection,
    responses: &mut Streaming<DeltaDiscoveryResponse>,
    requests: &mpsc::Sender<DeltaDiscoveryRequest>,
    timing: &StreamTiming,
    holder: &mut StateOwner,
) -> StreamEndReason {
    let mut answered = false;
    let mut joiner = ResponseJoiner::default();
    loop {
        let next = async {
            if answered {
                return Ok(responses.message().await);
            }
            // A wildcard subscription is always answered, possibly with an empty response. Later
            // silence may just mean that nothing changes.
            tokio::time::timeout(timing.first_answer, responses.message()).await
        };
        let part = match holder.persist_while(next).await {
            Ok(Ok(Some(part))) => part,
            Ok(Ok(None)) => {
                return StreamEndReason {
                    reason: "closed",
                    why: "the controller ended the stream".into(),
                };
            }
            Ok(Err(status)) => return of_status(connection, &status),
            Err(_) => return no_answer(timing.first_answer),
        };
        // Any response shows that the controller works.
        answered = true;
        let response = match joiner.add(part) {
            Ok(Some(response)) => response,
            // Nothing is applied or answered before the last part has come.
            Ok(None) => continue,
            Err(e) => {
                return StreamEndReason {
                    reason: "error",
                    why: e.to_string(),
                };
            }
        };
        // Before the response is applied, because resources of two stores must not mix.
        match wire::store_of(&response).map(|store| store.map(|store| holder.compare_store(store)))
        {
            // Later responses of a stream need not name the store, and some controllers name none.
            Ok(None | Some(StoreMatch::Same)) => {}
            Ok(Some(StoreMatch::Restart)) => {
                return StreamEndReason {
                    reason: "other_store",
                    why: "the controller has another store than the requested state".into(),
                };
            }
            Err(e) => {
                return StreamEndReason {
                    reason: "error",
                    why: e.to_string(),
                };
            }
        }
        let verdict = holder.take(&response);
        let answer = DeltaDiscoveryRequest {
            type_url: response.type_url,
            response_nonce: response.nonce,
            error_detail: verdict.err().map(status),
            ..DeltaDiscoveryRequest::default()
        };
        if requests.send(answer).await.is_err() {
            return StreamEndReason {
                reason: "closed",
                why: "the controller closed its side of the stream".into(),
            };
        }
        if std::mem::take(&mut holder.resync) {
            return StreamEndReason {
                reason: "resync",
                why: "the data plane refused resources that it had acknowledged; requesting them again".into(),
            };
        }
    }
}

fn status(NackReply { mut text, named }: NackReply) -> Status {
    if text.len() > NACK_TEXT_MAX {
        let end = text.floor_char_boundary(NACK_TEXT_MAX);
        text.truncate(end);
    }
    let details = if named.is_empty() {
        Vec::new()
    } else {
        vec![wire::refused::pack(named)]
    };
    Status {
        code: Code::InvalidArgument as i32,
        message: text,
        details,
    }
}

/// Returns one wildcard subscription per kind, with the versions of the state, so that the
/// controller sends only differences.
fn first_requests(config: &SubscriberConfig, state: &ResourceState) -> Vec<DeltaDiscoveryRequest> {
    let node = Node {
        id: config.node.clone(),
        user_agent_name: "canal".into(),
        user_agent_version: config.version.clone(),
        client_features: vec![RESPONSE_PARTS_FEATURE.into()],
    };
    // Manifests come last: the controller seals the kinds that were subscribed to before.
    let (last, first): (Vec<&ResourceKind>, Vec<&ResourceKind>) = config
        .kinds
        .iter()
        .partition(|kind| **kind == ResourceKind::Manifest);
    let mut requests: Vec<_> = first
        .into_iter()
        .chain(last)
        .flat_map(|kind| subscription(*kind, state))
        .collect();
    if let Some(request) = requests.first_mut() {
        request.node = Some(node);
    }
    requests
}

/// Returns the requests that subscribe to one kind and list what the state has of it. The list
/// takes as many requests as it needs, because the resources of all tenants together may be too
/// many for one message.
fn subscription(kind: ResourceKind, state: &ResourceState) -> Vec<DeltaDiscoveryRequest> {
    let subscribe = vec!["*".to_string()];
    let mut requests = vec![DeltaDiscoveryRequest {
        type_url: kind.type_url().into(),
        resource_names_subscribe: subscribe,
        ..DeltaDiscoveryRequest::default()
    }];
    let mut bytes = 0;
    for (name, resource) in state.resources_of(kind) {
        let entry = name.len() + resource.version.len() + LISTED_ENTRY_BYTES;
        if bytes + entry > LISTED_BYTES_MAX {
            requests.push(DeltaDiscoveryRequest {
                type_url: kind.type_url().into(),
                ..DeltaDiscoveryRequest::default()
            });
            bytes = 0;
        }
        bytes += entry;
        if let Some(request) = requests.last_mut() {
            request
                .initial_resource_versions
                .insert(name.to_string(), resource.version.to_string());
        }
    }
    requests
}

fn no_answer(limit: Duration) -> StreamEndReason {
    StreamEndReason {
        reason: "stale",
        why: format!("connected, but no answer within {limit:?}"),
    }
}

fn of_status(connection: &ControllerConnection, status: &tonic::Status) -> StreamEndReason {
    let reason = match status.code() {
        _ if connection.is_mute() => "stale",
        Code::Unauthenticated | Code::PermissionDenied => "unauthenticated",
        Code::ResourceExhausted => EXHAUSTED,
        Code::Unavailable | Code::Aborted => "closed",
        _ => "error",
    };
    StreamEndReason {
        reason,
        why: format!("{}: {}", status.code(), status.message()),
    }
}
