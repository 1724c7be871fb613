//! Lifecycle of the subscription: it connects, follows, loses the controller, and boots without it.

use std::sync::atomic::Ordering::Relaxed;

use canal_model::program::ResourceKind;
use canal_testing::{FakeController, FakeStream};
use canal_wire::southbound::state_file::FORMAT;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use super::fixture::{
    SubscriptionFixture, WRITE_INTERVAL, ms, refused, response, service, tenant, until,
};
use crate::{Subscriber, UpdateSource};

/// Answers the first requests of both kinds and expects the ACKs.
async fn serve_all(stream: &mut FakeStream, generation: u64) {
    let tenants = response(
        generation,
        ResourceKind::Tenant,
        &[tenant("alpha", 1), tenant("beta", 2)],
        &[],
    );
    let services = response(generation, ResourceKind::Service, &[service("a", 1)], &[]);
    for _ in 0..2 {
        stream.receive().await.unwrap();
    }
    assert_eq!(stream.exchange(tenants).await.error_detail, None);
    assert_eq!(stream.exchange(services).await.error_detail, None);
}

async fn started(fixture: &SubscriptionFixture) -> (FakeController, FakeStream, Subscriber) {
    let mut controller = FakeController::start().await;
    let subscriber = fixture.start(&controller);
    let mut stream = controller.stream().await;
    serve_all(&mut stream, 5).await;
    (controller, stream, subscriber)
}

#[tokio::test]
async fn a_first_start_subscribes_acks_and_is_ready_when_every_kind_was_answered() {
    let fixture = SubscriptionFixture::new();
    let mut controller = FakeController::start().await;
    let subscriber = fixture.start(&controller);
    let mut stream = controller.stream().await;
    let (first, second) = (
        stream.receive().await.unwrap(),
        stream.receive().await.unwrap(),
    );
    let node = first.node.unwrap();
    assert_eq!(
        (node.id.as_str(), node.user_agent_version.as_str()),
        ("node~n1", "1.0")
    );
    assert!(first.type_url.ends_with("Tenant") && second.type_url.ends_with("Service"));
    assert_eq!(first.resource_names_subscribe, ["*"]);
    assert!(first.initial_resource_versions.is_empty() && second.node.is_none());
    let ack = stream
        .exchange(response(
            5,
            ResourceKind::Tenant,
            &[tenant("alpha", 1)],
            &[],
        ))
        .await;
    assert_eq!(
        // The fake controller's nonce is `n` and the generation.
        (ack.response_nonce.as_str(), ack.error_detail),
        ("n5", None)
    );
    assert!(
        !subscriber.ready() && !fixture.snapshot().exists(),
        "half a state is not one"
    );
    // An empty response counts as an answer.
    stream
        .exchange(response(5, ResourceKind::Service, &[], &[]))
        .await;
    subscriber.until_ready().await;
    assert!(
        fixture.snapshot().exists(),
        "the first full state is on disk at once"
    );
    assert_eq!(
        fixture.updates(),
        [(
            UpdateSource::Controller,
            5,
            vec!["alpha".into()],
            vec![],
            (1, 0)
        )]
    );
    let status = subscriber.status();
    assert!(
        status.connected
            && status.live
            && status.generation == 5
            && status.resources["Tenant"] == 1,
        "{status:?}"
    );
    assert_eq!(subscriber.state().count(ResourceKind::Tenant), 1);
}

#[tokio::test]
async fn a_reconnect_names_known_versions_and_changes_apply_once() {
    let fixture = SubscriptionFixture::new();
    let (controller, stream, subscriber) = started(&fixture).await;
    drop(stream);
    fixture.updates();
    let mut controller = controller.restart().await;
    let mut stream = controller.stream().await;
    let initial = stream.receive().await.unwrap().initial_resource_versions;
    assert_eq!(initial.len(), 2);
    assert_eq!(initial["alpha"], "v5");
    assert_eq!(
        stream.receive().await.unwrap().initial_resource_versions["alpha/shop/a"],
        "v5"
    );
    stream
        .exchange(response(
            6,
            ResourceKind::Tenant,
            &[tenant("beta", 7)],
            &["alpha"],
        ))
        .await;
    stream
        .exchange(response(6, ResourceKind::Service, &[], &[]))
        .await;
    assert_eq!(
        fixture.updates(),
        [(
            UpdateSource::Controller,
            6,
            vec!["beta".into()],
            vec!["alpha".into()],
            (1, 1)
        )]
    );
    assert!(fixture.metric("canal_southbound_reconnects_total{reason=\"closed\"}") >= 1);
    assert_eq!(subscriber.status().generation, 6);
}

/// Checks that a refusal of the whole and a panic lead to the one tenant that causes them.
async fn trace_a_panic_to_its_tenant(stream: &mut FakeStream, subscriber: &Subscriber) {
    let nack = stream
        .exchange(response(
            8,
            ResourceKind::Tenant,
            &[tenant("panic", 3), tenant("gamma", 3), tenant("zeta", 5)],
            &[],
        ))
        .await;
    assert!(
        nack.error_detail
            .as_ref()
            .unwrap()
            .message
            .contains("tripped by"),
        "a panic is a refusal"
    );
    assert_eq!(refused(&nack), ["panic"]);
    assert_eq!(
        subscriber.state().count(ResourceKind::Tenant),
        4,
        "alpha, beta, gamma and zeta"
    );
}

#[tokio::test]
async fn bad_resource_is_refused_by_name_and_the_rest_is_applied() {
    let fixture = SubscriptionFixture::new();
    let (_controller, mut stream, subscriber) = started(&fixture).await;
    fixture.updates();
    let mut bad = response(
        6,
        ResourceKind::Tenant,
        &[tenant("alpha", 9), tenant("gamma", 3)],
        &["beta"],
    );
    // Bytes that are no protobuf message.
    bad.resources[1].resource.as_mut().unwrap().value = vec![0xff; 9];
    let nack = stream.exchange(bad).await;
    assert_eq!(
        (nack.response_nonce.as_str(), refused(&nack)),
        ("n6", vec!["gamma".to_string()])
    );
    assert!(nack.error_detail.unwrap().message.contains("gamma"));
    assert_eq!(
        fixture.updates(),
        [(
            UpdateSource::Controller,
            6,
            vec!["alpha".into()],
            vec!["beta".into()],
            (1, 1)
        )]
    );

    fixture.unusable.lock().unwrap().insert("delta".into());
    let nack = stream
        .exchange(response(
            7,
            ResourceKind::Tenant,
            &[tenant("delta", 3), tenant("beta", 4)],
            &[],
        ))
        .await;
    assert_eq!(refused(&nack), ["delta"]);
    assert!(subscriber.status().nack["Tenant"].contains("cannot be used"));
    let names: Vec<_> = fixture
        .updates()
        .into_iter()
        .map(|update| update.2)
        .collect();
    assert_eq!(
        names,
        [vec!["delta".to_string(), "beta".into()], vec![]],
        "a removal is one more call"
    );

    // This brings generation 8.
    trace_a_panic_to_its_tenant(&mut stream, &subscriber).await;

    let nack = stream
        .exchange(response(4, ResourceKind::Tenant, &[], &["alpha", "beta"]))
        .await;
    assert!(
        nack.error_detail
            .as_ref()
            .unwrap()
            .message
            .contains("generation 4 is older than 8")
    );
    assert!(refused(&nack).is_empty(), "no part of it was accepted");
    // The caller refused delta and the resource that made it panic.
    for (reason, n) in [("bad_resource", 1), ("refused", 2), ("stale_generation", 1)] {
        assert_eq!(
            fixture.metric(&format!(
                "canal_southbound_nacks_total{{kind=\"Tenant\",reason=\"{reason}\"}}"
            )),
            n
        );
    }
    assert_eq!(
        fixture
            .metric("canal_southbound_refused_resources_total{kind=\"Tenant\",reason=\"refused\"}"),
        2
    );
    assert_eq!(
        stream
            .exchange(response(9, ResourceKind::Tenant, &[], &["beta"]))
            .await
            .error_detail,
        None
    );
    assert!(subscriber.status().nack.is_empty());
}

#[tokio::test]
async fn the_client_boots_from_the_state_file_and_resumes_from_it() {
    let fixture = SubscriptionFixture::new();
    let (controller, stream, subscriber) = started(&fixture).await;
    subscriber.stop().await;
    drop(stream);
    let address = controller.address;
    drop(controller);
    fixture.updates();

    let elsewhere = FakeController::start().await;
    let subscriber = fixture.start_through(&elsewhere, address);
    assert!(subscriber.ready() && !subscriber.status().live);
    let (origin, generation, mut names, _, counts) = fixture.updates().remove(0);
    // A whole state arrives in no particular order.
    names.sort();
    assert_eq!(
        (origin, generation, counts),
        (UpdateSource::Snapshot, 5, (2, 1))
    );
    assert_eq!(names, ["alpha", "alpha/shop/a", "beta"]);
    // At the second failure the subscriber has come back from its first wait.
    until("it tries to connect", || {
        fixture.metric("canal_southbound_reconnects_total{reason=\"connect\"}") >= 2
    })
    .await;
    assert!(subscriber.status().error.contains("check that it is up"));
    subscriber.stop().await;

    let mut elsewhere = elsewhere;
    let subscriber = fixture.start(&elsewhere);
    let mut stream = elsewhere.stream().await;
    assert_eq!(
        stream
            .receive()
            .await
            .unwrap()
            .initial_resource_versions
            // Two tenants; the service is listed in the request for its own kind.
            .len(),
        2
    );
    stream.receive().await.unwrap();
    // A state from disk is not rolled back to an older generation either.
    let nack = stream
        .exchange(response(3, ResourceKind::Tenant, &[], &[]))
        .await;
    assert!(nack.error_detail.unwrap().message.contains("older"));
    drop(subscriber);
}

#[tokio::test]
async fn a_snapshot_that_is_not_whole_is_refused_by_name_and_never_served() {
    let good = {
        let fixture = SubscriptionFixture::new();
        let (_controller, _stream, subscriber) = started(&fixture).await;
        subscriber.stop().await;
        std::fs::read(fixture.snapshot()).unwrap()
    };
    let flip = |at: usize| {
        let mut b = good.clone();
        b[at] ^= 1;
        b
    };
    // Each change of a bit or of the length must change the digest.
    let cases: [(&str, Vec<u8>, &str); 9] = [
        ("torn", good[..good.len() / 2].to_vec(), "digest"),
        ("one byte short", good[..good.len() - 1].to_vec(), "digest"),
        ("grown", [&good[..], b"x"].concat(), "digest"),
        (
            "a bit flipped in the content",
            flip(good.len() / 3),
            "digest",
        ),
        (
            "a bit flipped in the digest",
            flip(good.len() - 1),
            "digest",
        ),
        ("empty", Vec::new(), "digest"),
        (
            "format of the future",
            signed(&prost::Message::encode_to_vec(&format(FORMAT + 1, &[]))),
            "format",
        ),
        // This file is valid except for its format. It was written before policies existed, so a
        // boot from it would miss them without an error.
        (
            "format of the past",
            signed(&prost::Message::encode_to_vec(&older(&good))),
            "format",
        ),
        (
            "a resource of no sense",
            signed(&prost::Message::encode_to_vec(&format(FORMAT, &[1, 2, 3]))),
            "resource",
        ),
    ];
    for (name, bytes, reason) in cases {
        let fixture = SubscriptionFixture::new();
        std::fs::create_dir_all(fixture.snapshot().parent().unwrap()).unwrap();
        std::fs::write(fixture.snapshot(), bytes).unwrap();
        let mut controller = FakeController::start().await;
        let subscriber = fixture.start(&controller);
        assert!(!subscriber.ready(), "{name}");
        assert_eq!(
            fixture.metric(&format!(
                "canal_southbound_state_file_rejected_total{{reason=\"{reason}\"}}"
            )),
            1,
            "{name}"
        );
        assert!(fixture.updates().is_empty(), "{name}");
        let mut stream = controller.stream().await;
        serve_all(&mut stream, 5).await;
        subscriber.until_ready().await;
    }
    // A file that the data plane refuses is as bad as a torn one.
    let fixture = SubscriptionFixture::new();
    std::fs::create_dir_all(fixture.snapshot().parent().unwrap()).unwrap();
    std::fs::write(fixture.snapshot(), &good).unwrap();
    fixture.refuse.store(true, Relaxed);
    let controller = FakeController::start().await;
    assert!(!fixture.start(&controller).ready());
    assert_eq!(
        fixture.metric("canal_southbound_state_file_rejected_total{reason=\"refused\"}"),
        1
    );
}

/// Returns the same state in the format of an earlier build.
fn older(good: &[u8]) -> canal_wire::program::StateFile {
    let snapshot: canal_wire::program::StateFile = prost::Message::decode(good).unwrap();
    canal_wire::program::StateFile {
        format: FORMAT - 1,
        digest: Vec::new(),
        ..snapshot
    }
}

fn format(format: u32, resource: &[u8]) -> canal_wire::program::StateFile {
    let type_url = ResourceKind::Tenant.type_url().into();
    let entry = canal_wire::program::state_file::Entry {
        type_url,
        name: "alpha".into(),
        version: "1".into(),
        resource: resource.to_vec(),
    };
    canal_wire::program::StateFile {
        format,
        generation: 1,
        entries: vec![entry],
        digest: Vec::new(),
        store: String::new(),
    }
}

fn signed(content: &[u8]) -> Vec<u8> {
    use sha2::{Digest, Sha256};
    [content, &[34, 32], &Sha256::digest(content)[..]].concat()
}

#[tokio::test]
async fn the_state_file_matches_the_proto() {
    use prost::Message;
    use sha2::{Digest, Sha256};
    let fixture = SubscriptionFixture::new();
    let (_controller, _stream, subscriber) = started(&fixture).await;
    subscriber.stop().await;
    let bytes = std::fs::read(fixture.snapshot()).unwrap();
    let mut snapshot = canal_wire::program::StateFile::decode(&bytes[..]).unwrap();
    let digest = std::mem::take(&mut snapshot.digest);
    assert_eq!(
        (snapshot.format, snapshot.generation, snapshot.entries.len()),
        (FORMAT, 5, 3)
    );
    assert_eq!(digest, Sha256::digest(snapshot.encode_to_vec())[..]);
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(fixture.snapshot()).unwrap().permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn writes_are_spaced_out_and_the_last_state_is_on_disk_at_the_end() {
    let fixture = SubscriptionFixture::new();
    let begun = std::time::Instant::now();
    let (_controller, mut stream, subscriber) = started(&fixture).await;
    for generation in 6..40 {
        stream
            .exchange(response(
                generation,
                ResourceKind::Service,
                &[service("a", generation as u32)],
                &[],
            ))
            .await;
    }
    let writes = fixture.metric("canal_southbound_state_file_writes_total{result=\"ok\"}");
    let waited = begun.elapsed();
    let spaced = 2 + waited.as_millis() / WRITE_INTERVAL.as_millis();
    assert!(
        u128::from(writes) <= spaced,
        "{writes} writes for 34 changes in {waited:?}"
    );
    canal_timing::timed!(writes < 10, "few writes for 34 changes in a moment");
    let text = |fixture: &SubscriptionFixture| std::fs::read(fixture.snapshot()).unwrap();
    until("a pause later the disk has caught up", || {
        text(&fixture).windows(3).any(|w| w == b"v39")
    })
    .await;
    stream
        .exchange(response(
            40,
            ResourceKind::Service,
            &[service("a", 40)],
            &[],
        ))
        .await;
    subscriber.stop().await;
    assert!(text(&fixture).windows(3).any(|w| w == b"v40"));
}

#[tokio::test]
async fn a_drain_waits_for_the_disk_and_not_for_the_subscription() {
    let fixture = SubscriptionFixture::new();
    let (_controller, mut stream, subscriber) = started(&fixture).await;
    stream
        .exchange(response(
            6,
            ResourceKind::Service,
            &[service("late", 6)],
            &[],
        ))
        .await;
    let snapshot = fixture.snapshot();
    let (_folder, mut trigger) = fixture.only_subscriber();
    let start = std::time::Instant::now();
    // 10 s are far more than a write takes, so the drain is not forced.
    trigger.drain(ms(10_000));
    // The state is on disk when the drain ends, so only the tasks' end is left.
    assert!(trigger.finished(ms(100)).await);
    canal_timing::assert_time(
        "time until a drained subscriber has written its state",
        start.elapsed(),
        // Ten times `WRITE_INTERVAL`, for which a change may wait before it is written.
        ms(2000),
    );
    assert!(
        std::fs::read(snapshot)
            .unwrap()
            .windows(4)
            .any(|w| w == b"late")
    );
    // The subscription still follows the controller, because a draining data plane may need a
    // change.
    assert_eq!(
        stream
            .exchange(response(
                7,
                ResourceKind::Service,
                &[],
                &["alpha/shop/late"]
            ))
            .await
            .error_detail,
        None
    );
    drop(subscriber);
}

#[tokio::test]
async fn a_failed_state_file_write_stops_nothing() {
    let fixture = SubscriptionFixture::new();
    // A file already has the name of the folder.
    std::fs::write(fixture.folder.path().join("data"), "in the way").unwrap();
    let (_controller, _stream, subscriber) = started(&fixture).await;
    subscriber.until_ready().await;
    until("it is tried again", || {
        fixture.metric("canal_southbound_state_file_writes_total{result=\"error\"}") >= 2
    })
    .await;
    std::fs::remove_file(fixture.folder.path().join("data")).unwrap();
    until("and heals", || fixture.snapshot().exists()).await;
}

/// Forwards bytes until it is stopped, and then leaves the connections open, like a controller that
/// hangs.
async fn hanging(
    to: std::net::SocketAddr,
) -> (std::net::SocketAddr, tokio::sync::watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (hang, hung) = tokio::sync::watch::channel(false);
    tokio::spawn(async move {
        loop {
            let mut near = listener.accept().await.unwrap().0;
            let mut hung = hung.clone();
            tokio::spawn(async move {
                let mut far = TcpStream::connect(to).await.unwrap();
                let hung = async { hung.wait_for(|h| *h).await.map(|_| ()) };
                let ended = tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => true,
                    _ = hung => false,
                };
                if !ended {
                    std::future::pending::<()>().await;
                }
                let _ = near.shutdown().await;
            });
        }
    });
    (address, hang)
}

#[tokio::test]
async fn a_mute_controller_is_found_and_counted_as_stale() {
    let fixture = SubscriptionFixture::new();
    let mut controller = FakeController::start().await;
    let (address, hang) = hanging(controller.address).await;
    let subscriber = fixture.start_through(&controller, address);
    let mut stream = controller.stream().await;
    serve_all(&mut stream, 5).await;
    subscriber.until_ready().await;
    hang.send_replace(true);
    until("the silence is noticed", || {
        fixture.metric("canal_southbound_reconnects_total{reason=\"stale\"}") >= 1
    })
    .await;
    assert!(subscriber.ready(), "the last good state stays in force");
    assert!(!subscriber.status().connected);
}

#[tokio::test]
async fn a_controller_that_answers_nothing_is_left() {
    let fixture = SubscriptionFixture::new();
    let mut controller = FakeController::start().await;
    let _subscriber = fixture.start(&controller);
    let _silent = controller.stream().await;
    let mut second = controller.stream().await;
    assert_eq!(
        fixture.metric("canal_southbound_reconnects_total{reason=\"stale\"}"),
        1
    );
    serve_all(&mut second, 5).await;
}

#[tokio::test]
async fn a_new_token_is_read_at_the_next_connect() {
    let fixture = SubscriptionFixture::new();
    let mut controller = FakeController::start().await;
    let subscriber = fixture.start(&controller);
    drop(controller.stream().await);
    std::fs::write(fixture.folder.path().join("token"), "wrong").unwrap();
    until("it is refused", || {
        fixture.metric("canal_southbound_reconnects_total{reason=\"unauthenticated\"}") >= 1
    })
    .await;
    assert!(subscriber.status().error.contains("unknown token"));
    std::fs::write(fixture.folder.path().join("token"), canal_testing::TOKEN).unwrap();
    let mut stream = controller.stream().await;
    serve_all(&mut stream, 5).await;
}
