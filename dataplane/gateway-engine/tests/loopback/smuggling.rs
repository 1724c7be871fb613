//! The codec's table of malformed messages, sent to a real server. A message to be refused is
//! refused by its name and reaches no endpoint; an accepted message arrives as the table specifies.

use std::sync::{Arc, Mutex};

use canal_gateway_engine::GatewayTimeouts;
use canal_h1::cases::{RequestCase, RequestWant, ResponseWant, requests, responses};
use canal_h1::{Framing, MessageRefusal, RequestKind};
use tokio::io::AsyncWriteExt;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture};
use crate::origin::{OriginServer, Peer};

/// Requests that arrived at the endpoint: heads and decoded bodies.
type Arrived = Arc<Mutex<Vec<(String, Vec<u8>)>>>;

async fn recorder() -> (OriginServer, Arrived) {
    let arrived = Arrived::default();
    let seen = arrived.clone();
    let origin = OriginServer::each(move |mut peer: Peer| {
        let seen = seen.clone();
        async move {
            while let Some(request) = peer.request().await {
                seen.lock().unwrap().push(request);
                peer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    .await;
            }
        }
    })
    .await;
    (origin, arrived)
}

fn times() -> GatewayTimeouts {
    // Unfinished messages time out soon; no message of the table is slow on purpose.
    GatewayTimeouts {
        client: std::time::Duration::from_millis(400) * canal_timing::slack(),
        ..GatewayTimeouts::default()
    }
}

#[tokio::test]
async fn every_request_of_the_table_has_its_expected_result() {
    let (origin, arrived) = recorder().await;
    let fixture = GatewayFixture::new(
        EngineSetup {
            times: times(),
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let (mut refused, mut passed) = (0, 0);
    // This port accepts HTTP/2 as well, so the HTTP/2 preface is valid here.
    let for_http1 = |case: &RequestCase| {
        !matches!(case.want, RequestWant::Refuse(MessageRefusal::Http2Preface))
    };
    for case in requests().into_iter().filter(for_http1) {
        arrived.lock().unwrap().clear();
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(&case.bytes).await;
        // The client sends nothing more, even if the server waits for it.
        let _ = client.stream.shutdown().await;
        let answer = client.answer().await;
        match case.want {
            RequestWant::Refuse(refusal) | RequestWant::RefuseBody(refusal) => {
                refused += 1;
                let name = format!("reason=\"{}\"", refusal.name());
                // A client that ends within its body may be closed without an answer.
                if refusal != MessageRefusal::TruncatedBody {
                    let answer = answer.unwrap_or_else(|| panic!("{}: no answer", case.name));
                    assert_eq!(
                        answer.status,
                        refusal.status(),
                        "{}: {}",
                        case.name,
                        answer.head
                    );
                    assert_eq!(answer.field("connection"), Some("close"), "{}", case.name);
                    assert!(client.closed().await, "{}: reset", case.name);
                    assert!(
                        fixture.metric("canal_gateway_refused_requests_total", &[&name]) > 0.0,
                        "{}: {name} not counted",
                        case.name
                    );
                }
                assert!(
                    arrived.lock().unwrap().is_empty(),
                    "{}: reached the endpoint",
                    case.name
                );
            }
            RequestWant::Accept(accepted) if accepted.forwarded.starts_with("CONNECT") => {
                // A CONNECT is well-formed, but this port serves none.
                assert_eq!(answer.map(|a| a.status), Some(405), "{}", case.name);
            }
            RequestWant::Accept(accepted) => {
                passed += 1;
                assert_eq!(answer.map(|a| a.status), Some(200), "{}", case.name);
                let (head, body) = arrived.lock().unwrap()[0].clone();
                // The table does not contain long heads; they are forwarded unchanged. Chunked
                // messages get a new framing field.
                if !accepted.forwarded.is_empty() {
                    assert_eq!(
                        without_additions(&head),
                        accepted.forwarded,
                        "{}",
                        case.name
                    );
                } else if accepted.framing != Framing::Chunked {
                    let came = String::from_utf8_lossy(
                        &case.bytes
                            [..case.bytes.len() - accepted.payload.len() - accepted.rest.len()],
                    );
                    assert!(without_additions(&head) == came, "{}: {head}", case.name);
                }
                assert_eq!(
                    String::from_utf8_lossy(&body),
                    accepted.payload,
                    "{}",
                    case.name
                );
            }
        }
    }
    // A filter or a table that leaves nearly no case would make the test pass in vain.
    assert!(
        refused >= 60 && passed >= 10,
        "{refused} refused, {passed} passed"
    );
}

/// Returns the head without the fields that the gateway adds.
fn without_additions(head: &str) -> String {
    let added = [
        "x-forwarded-for: 127.0.0.1",
        "x-forwarded-proto: http",
        "x-request-id: ",
    ];
    let kept = head
        .split_inclusive("\r\n")
        .filter(|line| !added.iter().any(|a| line.starts_with(a)));
    kept.collect()
}

#[tokio::test]
async fn no_malformed_answer_of_the_table_reaches_a_client_as_a_success() {
    let mut refused = 0;
    for case in responses().filter(|case| matches!(case.request_kind, RequestKind::Ordinary)) {
        let bytes = case.bytes.to_vec();
        let origin = OriginServer::each(move |mut peer: Peer| {
            let bytes = bytes.clone();
            async move {
                peer.request().await;
                peer.write(&bytes).await;
            }
        })
        .await;
        let fixture = GatewayFixture::new(
            EngineSetup {
                times: times(),
                ..EngineSetup::default()
            },
            &[origin.address],
        );
        let mut client = HttpClient::connect(fixture.web).await;
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
        if matches!(case.want, ResponseWant::Refuse(_)) {
            refused += 1;
            let answer = client
                .answer()
                .await
                .unwrap_or_else(|| panic!("{}: no answer", case.name));
            assert_eq!(answer.status, 502, "{}: {}", case.name, answer.head);
        }
    }
    assert!(refused >= 10, "{refused}");
}
