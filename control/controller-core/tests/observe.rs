//! Tests of observations through the controller: which operator sees what, how much is buffered for
//! a slow reader, and how an observation ends.

use std::time::{Duration, Instant};

use canal_controller_core::{ControllerLimits, OBSERVATIONS_PER_OPERATOR_MAX};
use canal_wire::api::admin_client::AdminClient;
use canal_wire::api::observe_request::Subject;
use canal_wire::api::{ObserveEvent, ObserveRequest};
use canal_wire::observe::observation_client::ObservationClient;
use canal_wire::observe::observe_order::Order;
use canal_wire::observe::{ObserveAnswer, ObserveBegin, ObserveEnd, ObserveOrder};
use canal_wire::{OBSERVE_ANSWER_COST, OBSERVE_DATA_BYTES_MAX, OBSERVE_WINDOW_BYTES};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Status, Streaming};

use crate::fixture::{ControllerFixture, PRINCIPALS, wait_limit, with_token, write_principals};

/// A fake data plane as the controller sees it.
struct Plane {
    answers: mpsc::Sender<ObserveAnswer>,
    orders: Streaming<ObserveOrder>,
}

impl Plane {
    async fn connect(fixture: &ControllerFixture, token: &str) -> Self {
        let (answers, outbound) = mpsc::channel(16);
        let subjects = [
            Subject::Tap,
            Subject::Logs,
            Subject::ConfigDump,
            Subject::Metrics,
        ]
        .map(|s| s as i32)
        .to_vec();
        answers
            .send(ObserveAnswer {
                subjects,
                ..ObserveAnswer::default()
            })
            .await
            .unwrap();
        let mut client = ObservationClient::new(fixture.channel().await);
        let orders = client
            .serve(with_token(ReceiverStream::new(outbound), token))
            .await
            .unwrap()
            .into_inner();
        Self { answers, orders }
    }

    async fn order(&mut self) -> (u64, Order) {
        let order = tokio::time::timeout(wait_limit(), self.orders.message())
            .await
            .expect("an order")
            .unwrap()
            .unwrap();
        (order.id, order.order.unwrap())
    }

    async fn begin(&mut self) -> (u64, ObserveBegin) {
        loop {
            if let (id, Order::Begin(begin)) = self.order().await {
                return (id, begin);
            }
        }
    }

    async fn send_answer(&self, id: u64, data: &[u8]) {
        self.answers
            .send(ObserveAnswer {
                id,
                data: data.to_vec(),
                ..ObserveAnswer::default()
            })
            .await
            .unwrap();
    }
}

async fn observe(
    fixture: &ControllerFixture,
    token: &'static str,
    request: ObserveRequest,
) -> Result<Streaming<ObserveEvent>, Status> {
    let mut operator = fixture.admin(token).await;
    operator
        .client
        .observe(with_token(request, token))
        .await
        .map(tonic::Response::into_inner)
}

fn tap(tenant: &str, gateways: &[&str]) -> ObserveRequest {
    let data_planes = gateways.iter().map(ToString::to_string).collect();
    ObserveRequest {
        subject: Subject::Tap.into(),
        tenant: tenant.into(),
        data_planes,
        ..ObserveRequest::default()
    }
}

/// Begins an observation that must be accepted, once the data planes are registered.
async fn begun(
    fixture: &ControllerFixture,
    token: &'static str,
    request: ObserveRequest,
) -> (Streaming<ObserveEvent>, Vec<String>) {
    let until = Instant::now() + wait_limit();
    loop {
        match observe(fixture, token, request.clone()).await {
            Ok(mut events) => {
                let first = events.message().await.unwrap().unwrap();
                return (events, first.listening);
            }
            Err(status) if status.code() == Code::NotFound && Instant::now() < until => {
                tokio::time::sleep(Duration::from_millis(5)).await
            }
            Err(status) => panic!("{status}"),
        }
    }
}

/// Connects like [`ControllerFixture::channel`], as a client that takes 64 KiB without reading.
async fn narrow_channel(fixture: &ControllerFixture) -> Channel {
    let root = std::fs::read_to_string(fixture.config.infra_dir.join("root.pem")).unwrap();
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(root))
        .domain_name(canal_wire::CONTROLLER_NAME);
    let endpoint = Endpoint::from_shared(format!("https://{}", fixture.controller().address()))
        .unwrap()
        .tls_config(tls)
        .unwrap();
    endpoint
        .initial_stream_window_size(65_535)
        .initial_connection_window_size(65_535)
        .connect()
        .await
        .unwrap()
}

async fn next(events: &mut Streaming<ObserveEvent>) -> ObserveEvent {
    tokio::time::timeout(wait_limit(), events.message())
        .await
        .expect("an event")
        .unwrap()
        .expect("no end")
}

async fn code(fixture: &ControllerFixture, token: &'static str, request: ObserveRequest) -> Code {
    observe(fixture, token, request)
        .await
        .err()
        .map_or(Code::Ok, |status| status.code())
}

fn logs(name: &str) -> ObserveRequest {
    ObserveRequest {
        subject: Subject::Logs.into(),
        tail: 9,
        ..tap("", &[name])
    }
}

fn dump(name: &str) -> ObserveRequest {
    ObserveRequest {
        subject: Subject::ConfigDump.into(),
        ..tap("", &[name])
    }
}

/// Checks which operators observe which data planes and services.
async fn check_who_observes_what(fixture: &ControllerFixture) {
    for (token, request, want) in [
        ("ann", tap("beta", &[]), Code::PermissionDenied),
        ("ann", tap("", &["g2"]), Code::NotFound),
        ("ann", logs("m1"), Code::NotFound),
        ("ann", dump("m1"), Code::NotFound),
        ("bob", dump("n1"), Code::NotFound),
        ("root", tap("nosuch", &[]), Code::NotFound),
        ("root", tap("", &["g9"]), Code::NotFound),
        (
            "ann",
            ObserveRequest {
                service: "shop/nosuch".into(),
                ..tap("", &[])
            },
            Code::NotFound,
        ),
        ("g1", tap("", &[]), Code::PermissionDenied),
        (
            "ann",
            ObserveRequest {
                service: "shop/a".into(),
                ..tap("", &[])
            },
            Code::Ok,
        ),
    ] {
        assert_eq!(
            code(fixture, token, request.clone()).await,
            want,
            "{token} {request:?}"
        );
    }
}

#[tokio::test]
async fn a_tenants_operator_sees_its_own_and_the_provider_all() {
    let fixture = ControllerFixture::two_tenants().await;
    let (mut g1, mut g2) = (
        Plane::connect(&fixture, "g1").await,
        Plane::connect(&fixture, "g2").await,
    );
    let (mut n1, _m1) = (
        Plane::connect(&fixture, "n1").await,
        Plane::connect(&fixture, "m1").await,
    );

    // g1 is alpha's and g2 beta's gateway; g1 itself filters what it sends for ann.
    let (mut events, listening) = begun(&fixture, "ann", tap("", &[])).await;
    assert_eq!(listening, ["g1"]);
    let (id, begin) = g1.begin().await;
    assert_eq!(begin.tenant, "alpha");
    g1.send_answer(id, b"{}\n").await;
    let event = next(&mut events).await;
    assert_eq!(
        (event.source.as_str(), event.data.as_slice()),
        ("g1", b"{}\n".as_slice())
    );

    let (_all, listening) = begun(&fixture, "root", tap("", &[])).await;
    assert_eq!(listening, ["g1", "g2"]);
    // No tenant means all of them, because root is the provider's operator.
    assert!(g2.begin().await.1.tenant.is_empty());

    let (mut own, _) = begun(&fixture, "ann", logs("n1")).await;
    let (id, begin) = n1.begin().await;
    // 9 is the number of lines that `logs` requests.
    assert_eq!(
        (begin.tenant.as_str(), begin.tail),
        ("", 9),
        "a node has one tenant only, so none is named"
    );
    let end = Some(ObserveEnd::default());
    n1.answers
        .send(ObserveAnswer {
            id,
            data: b"line\n".to_vec(),
            end,
            ..ObserveAnswer::default()
        })
        .await
        .unwrap();
    let event = next(&mut own).await;
    assert!(event.data == b"line\n" && event.ended.unwrap().reason.is_empty());
    assert!(own.message().await.unwrap().is_none(), "all have ended");

    check_who_observes_what(&fixture).await;
    // An operator's token opens no data plane's stream.
    let mut client = ObservationClient::new(fixture.channel().await);
    let refused = client
        .serve(with_token(tokio_stream::empty(), "root"))
        .await
        .err()
        .unwrap();
    assert_eq!(refused.code(), Code::PermissionDenied);
}

#[tokio::test]
async fn a_slow_reader_gets_one_window_and_blocks_no_other() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut g1 = Plane::connect(&fixture, "g1").await;
    let (mut fast, _) = begun(&fixture, "root", tap("", &[])).await;
    let (fast_id, _) = g1.begin().await;
    // HTTP/2 buffers 64 KiB of it on the path to the operator.
    let request = with_token(tap("", &[]), "ann");
    let mut slow = AdminClient::new(narrow_channel(&fixture).await)
        .observe(request)
        .await
        .unwrap()
        .into_inner();
    let (slow_id, _) = g1.begin().await;
    assert_eq!(next(&mut slow).await.listening, ["g1"]);

    // With its cost a piece counts for 32 KiB, so the window is exactly eight pieces.
    let piece = vec![b'x'; OBSERVE_DATA_BYTES_MAX - 64];
    let cost = piece.len() as u64 + OBSERVE_ANSWER_COST;
    let (mut credit, mut fast_credit, mut sent) = (OBSERVE_WINDOW_BYTES, OBSERVE_WINDOW_BYTES, 0);
    // The fast reader takes 64 pieces, eight windows, while the slow one reads nothing.
    for _ in 0..64 {
        while credit >= cost {
            g1.send_answer(slow_id, &piece).await;
            (credit, sent) = (credit - cost, sent + cost);
        }
        while fast_credit < cost {
            match g1.order().await {
                (id, Order::Credit(more)) if id == fast_id => fast_credit += more,
                (id, Order::Credit(more)) if id == slow_id => credit += more,
                other => panic!("{other:?}"),
            }
        }
        fast_credit -= cost;
        g1.send_answer(fast_id, &piece).await;
        assert_eq!(next(&mut fast).await.data.len(), piece.len());
    }
    // Answers that left the controller into the buffers on the path give their credit back, in
    // grants of a quarter of the window. HTTP/2's window takes one, the server's encoder about one
    // more, and the third is slack. Nobody measured it.
    assert!(
        sent <= OBSERVE_WINDOW_BYTES + (192 << 10),
        "what nobody read is not asked for: {sent}"
    );
    // Once the operator reads again, the controller grants new credit.
    let mut read = 0;
    while read < sent {
        read += next(&mut slow).await.data.len() as u64 + OBSERVE_ANSWER_COST;
    }
    while !matches!(g1.order().await, (id, Order::Credit(_)) if id == slow_id) {}
    // A session that gets more than there is credit for ends, and no other one.
    // Three windows in sequence are more than the credit, whatever was granted meanwhile.
    for _ in 0..3 * OBSERVE_WINDOW_BYTES / cost {
        g1.send_answer(slow_id, &piece).await;
    }
    let ended = loop {
        if let Some(ended) = next(&mut slow).await.ended {
            break ended;
        }
    };
    assert_eq!(ended.reason, "over_credit");
    g1.send_answer(fast_id, b"still\n").await;
    assert_eq!(next(&mut fast).await.data, b"still\n");
}

#[tokio::test]
async fn observations_are_bounded_and_counted_by_operator_and_by_tenant() {
    let fixture = ControllerFixture::with(ControllerLimits::default(), |config| {
        let alpha = crate::fixture::tenant("alpha", 1)
            // The share of the Tenant is below OBSERVATIONS_PER_OPERATOR_MAX, so it is reached
            // first.
            .replace("spec: {vni", "spec: {shares: {observations: 2}, vni");
        crate::fixture::write(config, "alpha/mesh.yaml", &alpha);
    })
    .await;
    let _g1 = Plane::connect(&fixture, "g1").await;
    let mut held = vec![
        begun(&fixture, "ann", tap("", &[])).await,
        begun(&fixture, "ann", tap("", &[])).await,
    ];
    let refused = observe(&fixture, "ann", tap("", &[])).await.err().unwrap();
    assert!(
        refused.code() == Code::ResourceExhausted && refused.message().contains("observations"),
        "{refused}"
    );
    let mut of_root = Vec::new();
    for _ in 0..OBSERVATIONS_PER_OPERATOR_MAX {
        of_root.push(begun(&fixture, "root", tap("", &[])).await);
    }
    let refused = observe(&fixture, "root", tap("", &[])).await.err().unwrap();
    assert!(
        refused.code() == Code::ResourceExhausted && refused.message().contains("fix: end one"),
        "{refused}"
    );
    for reason in ["observations", "observations_of_operator"] {
        assert!(
            fixture
                .metric(&format!(
                    "canal_controller_refused_total{{reason=\"{reason}\"}}"
                ))
                .await
                >= 1.0,
            "{reason}"
        );
    }
    let open = "canal_controller_observations{subject=\"tap\"}";
    // Two of ann, and OBSERVATIONS_PER_OPERATOR_MAX (8) of root.
    assert!((fixture.metric(open).await - 10.0).abs() < 0.1);
    let status = fixture.admin("ann").await.status().await;
    let row = status
        .shares
        .iter()
        .find(|row| row.limit == "observations" && row.component == "controller")
        .expect("its own use");
    assert_eq!((row.used, row.max), (2, 2));
    // An operator that leaves gives back its permits.
    held.clear();
    drop(of_root);
    let until = Instant::now() + wait_limit();
    while fixture.metric(open).await > 0.1 {
        assert!(Instant::now() < until, "places are not free");
        // Polls are cheap; the deadline bounds the wait.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    begun(&fixture, "ann", tap("", &[])).await;
}

#[tokio::test]
async fn an_observation_ends_with_its_data_plane_its_reader_or_its_token() {
    let mut fixture = ControllerFixture::two_tenants().await;
    let mut g1 = Plane::connect(&fixture, "g1").await;
    let (mut events, _) = begun(&fixture, "ann", tap("", &[])).await;
    g1.begin().await;
    drop(g1);
    assert_eq!(
        next(&mut events).await.ended.unwrap().reason,
        "disconnected"
    );
    assert!(events.message().await.unwrap().is_none());

    let mut g1 = Plane::connect(&fixture, "g1").await;
    let (left, _) = begun(&fixture, "ann", tap("", &[])).await;
    let (id, _) = g1.begin().await;
    drop(left);
    assert!(matches!(g1.order().await, (ended, Order::End(true)) if ended == id));

    let (mut revoked, _) = begun(&fixture, "ann", tap("", &[])).await;
    let others: Vec<_> = PRINCIPALS
        .iter()
        .copied()
        .filter(|(token, _)| *token != "ann")
        .collect();
    write_principals(&fixture.config.principals, &others);
    let end = tokio::time::timeout(wait_limit(), revoked.message())
        .await
        .unwrap()
        .unwrap_err();
    assert_eq!(end.code(), Code::Unauthenticated);
    fixture.stop().await;
}
