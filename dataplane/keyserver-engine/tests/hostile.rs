//! Requesters and tenants that misbehave: garbage, floods, silence, foreign certificates. Others
//! are not affected.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::fixture::*;
use canal_keyserver_engine::limits::{
    FIRST_BYTE_TIMEOUT, HANDSHAKE_BYTES_MAX, OUTBOX_MAX, QuotaShares, REQUESTER_CHANNELS_MAX,
    UNAUTHENTICATED_PER_IP_MAX,
};
use canal_model::program::Resource;
use canal_model::share::ShareKind;
use canal_testing::{TestCa, identity};
use canal_wire::keyrpc::{
    FRAME_MAX, HandshakeRequest, HandshakeRole, KeyName, KeyRefusal, KeyRequest,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

fn sign(id: &str, scheme: u16, deadline_ms: u32) -> (KeyName, u16, u32) {
    (KeyName::Identity(identity(id)), scheme, deadline_ms)
}

fn start_call(channel: &Channel, (key, scheme, deadline_ms): (KeyName, u16, u32)) -> Call {
    channel.start_call(&KeyRequest::Sign {
        key,
        presented: None,
        scheme,
        deadline_ms,
        input: &verify_input(),
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_costs_one_request_or_one_channel() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let good = fixture.channel(NODE).await;
    let bad = fixture.channel(NODE).await;
    // Frames whose bodies have no meaning, with IDs that no other request of the test has.
    // An unknown kind, a length beyond the body, a Ping with a body, and a response instead of a
    // request.
    for (id, body) in [
        (1_000_001u64, &[0x7fu8][..]),
        (1_000_002, &[1, 0xff, 0xff]),
        (1_000_003, &[6, 1]),
        (1_000_004, &[0x86]),
    ] {
        let mut call = bad.listen(id);
        let length = u32::try_from(8 + body.len()).unwrap();
        bad.raw([&length.to_be_bytes()[..], &id.to_be_bytes(), body].concat());
        assert_eq!(call.refusal().await, KeyRefusal::Malformed, "{body:?}");
    }
    assert!(bad.lives().await);
    let mut begun = bad.begin(WEB, HandshakeRole::Client, &[PEER], 0);
    assert!(matches!(begun.next().await, ServerReply::Send(_)));
    let begin = HandshakeRequest {
        identity: identity(WEB),
        role: HandshakeRole::Client,
        alpn: vec![],
        expected: vec![],
        deadline_ms: 0,
        bytes: b"",
    };
    // The id of the handshake in progress.
    bad.send_request(begun.id, &KeyRequest::Begin(begin));
    assert_eq!(begun.refusal().await, KeyRefusal::DuplicateRequest);
    let mut unknown = bad.listen(77_777);
    bad.send_request(77_777, &KeyRequest::More { bytes: b"x" });
    assert_eq!(unknown.refusal().await, KeyRefusal::UnknownRequest);
    // Abandon of an unknown id is no error: the response may have been sent already.
    bad.send_request(88_888, &KeyRequest::Abandon);
    assert!(bad.lives().await);
    // Bytes that are no frame end the channel, and its requests in progress. Their lengths are too
    // large, or 0, which is less than a request's ID and kind have.
    for bytes in [
        vec![0xff; 64],
        vec![0; 64],
        // The length does not count its own four bytes, so this frame is four bytes too long.
        u32::try_from(FRAME_MAX).unwrap().to_be_bytes().to_vec(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
    ] {
        let channel = fixture.channel(NODE).await;
        let mut begun = channel.begin(WEB, HandshakeRole::Client, &[PEER], 0);
        assert!(matches!(begun.next().await, ServerReply::Send(_)));
        channel.raw(bytes);
        assert_eq!(begun.next().await, ServerReply::End);
    }
    assert_eq!(
        fixture.value("canal_key_channels_ended_total{reason=\"malformed\"}"),
        4.0
    );
    assert!(good.lives().await);
    drop(bad);
    until("all is given back", || {
        fixture.value("canal_key_requests_in_flight") == 0.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peers_garbage_is_its_own_handshakes_end() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let channel = fixture.channel(NODE).await;
    let mut call = channel.begin(WEB, HandshakeRole::Server, &[], 0);
    channel.send_request(
        call.id,
        &KeyRequest::More {
            bytes: b"GET / HTTP/1.1\r\n\r\n",
        },
    );
    assert_eq!(call.refusal().await, KeyRefusal::PeerProtocol);
    // Records that never complete a message.
    let mut call = channel.begin(WEB, HandshakeRole::Server, &[], 0);
    let record = [
        &[22, 3, 1, 0x40, 0][..],
        &[1, 0, 0xff, 0xff],
        &[0; (16 << 10) - 4],
    ]
    .concat();
    for _ in 0..=HANDSHAKE_BYTES_MAX / record.len() + 1 {
        channel.send_request(call.id, &KeyRequest::More { bytes: &record });
    }
    let refused = call.refusal().await;
    assert!(
        matches!(
            refused,
            KeyRefusal::HandshakeBytes | KeyRefusal::PeerProtocol
        ),
        "{refused}"
    );
    assert!(channel.lives().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_peers_run_out_of_time() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let channel = fixture.channel(NODE).await;
    let begun = Instant::now();
    let mut calls: Vec<_> = (0..20)
        .map(|_| channel.begin(WEB, HandshakeRole::Server, &[], 200))
        .collect();
    for call in &mut calls {
        assert_eq!(call.refusal().await, KeyRefusal::HandshakeTime);
    }
    let waited = begun.elapsed();
    assert!(waited >= Duration::from_millis(200), "{waited:?}");
    canal_timing::assert_time(
        "time until silent handshakes run out of time",
        waited,
        Duration::from_secs(3),
    );
    assert_eq!(fixture.value("canal_key_requests_in_flight"), 0.0);
    assert_eq!(
        fixture.value("canal_key_refusals_total{name=\"handshake_time\",tenant=\"alpha\"}"),
        20.0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_delays_only_its_own_tenant() {
    let fixture = KeyServerFixture::start(ServerSetup {
        // The tenant's share is far below the requester's quota, so the tenant's is met first.
        shares: QuotaShares {
            requester: 2048,
            tenant: 512,
            ..QuotaShares::default()
        },
        ..ServerSetup::default()
    })
    .await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let (flood, quiet) = (
        fixture.channel(NODE).await,
        fixture.channel(BETA_NODE).await,
    );
    let rsa = fixture.channel(RSA_NODE).await;
    let ca = fixture.ca("beta");
    let id = PEER.replace("alpha", "beta");
    let peers = Peers::new(
        ca,
        &ca.issue_with(&identity(&id), |_| {}),
        "beta.example",
        &[OTHER],
    );
    let done = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut tasks = Vec::new();
    // The schemes are ecdsa_secp256r1_sha256 and rsa_pss_rsae_sha256.
    for (channel, id, scheme) in [(flood, WEB, 0x0403), (rsa, SLOW, 0x0804)] {
        let done = done.clone();
        tasks.push(tokio::spawn(async move {
            let mut refused = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                // More than the tenant's share at once, and less than the requester's quota.
                let mut calls: Vec<_> = (0..2000)
                    .map(|_| start_call(&channel, sign(id, scheme, 0)))
                    .collect();
                for call in &mut calls {
                    match call.next().await {
                        ServerReply::Signature(_) => {}
                        ServerReply::Refused(KeyRefusal::TenantBusy | KeyRefusal::Deadline, _) => {
                            refused += 1
                        }
                        other => panic!("{other:?}"),
                    }
                    channel.forget(call);
                }
            }
            refused
        }));
    }
    until("the flood", || {
        // More than one tenant's share, which is 512, so both floods have begun.
        fixture.value("canal_key_requests_in_flight") > 600.0
    })
    .await;
    let mut longest = Duration::ZERO;
    // Several handshakes, so that they meet the flood in all its phases.
    for _ in 0..30 {
        let begun = Instant::now();
        let said = quiet.run_handshake(OTHER, &mut peers.client()).await;
        assert!(matches!(said, ServerReply::Done { .. }), "{said:?}");
        longest = longest.max(begun.elapsed());
    }
    done.store(true, std::sync::atomic::Ordering::Relaxed);
    for task in tasks {
        assert!(task.await.unwrap() > 0, "the flood was not above its share");
    }
    canal_timing::assert_time(
        "longest handshake of a quiet tenant during a flood",
        longest,
        // A quiet tenant's handshakes take milliseconds; two seconds show that it waited behind the
        // flood.
        Duration::from_secs(2),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_operations_are_dropped() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    // The scheme 0x0804 is rsa_pss_rsae_sha256.
    let rsa = fixture.channel(RSA_NODE).await;
    // A request that waits behind no other is signed before its deadline. Of the others, a slow
    // machine may sign none within 80 ms.
    // 5 s are more than one signature takes.
    assert!(matches!(
        start_call(&rsa, sign(SLOW, 0x0804, 5_000)).next().await,
        ServerReply::Signature(_)
    ));
    // So many RSA signatures, within the tenant's share, take far longer than their deadline.
    let mut calls: Vec<_> = (0..1500)
        .map(|_| start_call(&rsa, sign(SLOW, 0x0804, 80)))
        .collect();
    let (mut signed, mut late) = (1, 0); // The first request was signed above.
    for call in &mut calls {
        match call.next().await {
            ServerReply::Signature(_) => signed += 1,
            ServerReply::Refused(KeyRefusal::Deadline, _) => late += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(late > 0, "{signed} signed, {late} late");
    assert_eq!(
        fixture.value("canal_key_operations_total{kind=\"sign\",algorithm=\"rsa\",tenant=\"rsa\"}"),
        f64::from(signed)
    );
    assert_eq!(
        fixture.value("canal_key_refusals_total{name=\"deadline\",tenant=\"rsa\"}"),
        f64::from(late)
    );
    // Abandoned requests are not worked on either: each Abandon follows its request directly, and
    // signing takes far longer than reading.
    // As many that at least one Abandon is read before its request is worked on.
    for _ in 0..400 {
        let call = start_call(&rsa, sign(SLOW, 0x0804, 0));
        rsa.send_request(call.id, &KeyRequest::Abandon);
    }
    until("all is given back", || {
        fixture.value("canal_key_requests_in_flight") == 0.0
    })
    .await;
    let worked =
        fixture.value("canal_key_operations_total{kind=\"sign\",algorithm=\"rsa\",tenant=\"rsa\"}");
    assert!(
        worked < f64::from(signed) + 400.0,
        "{worked} of {signed} and 400"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn unauthenticated_requesters_get_no_channel() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    let refused = |reason: &str| {
        fixture.value(&format!(
            "canal_key_unauthenticated_connections_total{{reason=\"{reason}\"}}"
        ))
    };
    // A foreign CA, a tenant's identity, and a component that uses no key server.
    let other = TestCa::new("other");
    for (ca, component, reason) in [
        (&other, NODE, "handshake"),
        (&fixture.authorities.infra, WEB, "handshake"),
        (
            &fixture.authorities.infra,
            "spiffe://components.canal/ns/canal-system/sa/keyserver.ks-2",
            "not_a_requester",
        ),
        // A gateway serves several tenants, so a certificate that puts it in one is not a
        // requester's.
        (
            &fixture.authorities.infra,
            "spiffe://components.canal/ns/alpha/sa/gateway.g1",
            "not_a_requester",
        ),
    ] {
        let before = refused(reason);
        if let Ok(mut stream) = dial(fixture.address, ca, component).await {
            // In TLS 1.3 a client learns of the server's refusal at the first read.
            let mut byte = [0];
            assert!(
                !matches!(stream.read(&mut byte).await, Ok(n) if n > 0),
                "{component}"
            );
        }
        until(component, || refused(reason) == before + 1.0).await;
    }
    // A whole ping frame, which an authenticated requester may send.
    let mut plain = TcpStream::connect(fixture.address).await.unwrap();
    // Length 9, id 1, kind 6 (Ping).
    plain
        .write_all(b"\x00\x00\x00\x09\x00\x00\x00\x00\x00\x00\x00\x01\x06")
        .await
        .unwrap();
    let mut rest = Vec::new();
    // The key server may also reset the connection.
    let _ = plain.read_to_end(&mut rest).await;
    // The two cases above with this reason, and the plain bytes.
    until("plain bytes", || refused("handshake") == 3.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_of_sixteen_addresses_block_no_other() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    let started = Instant::now();
    let ended = |reason: &str| {
        fixture.value(&format!(
            "canal_key_unauthenticated_connections_total{{reason=\"{reason}\"}}"
        ))
    };
    let mut silent = Vec::new();
    // On a slow machine the first ones have run out of time before the pool is full.
    while ended("displaced") == 0.0 {
        // Sixteen addresses with their maximum are twice the pool (`UNPROVED_MAX`).
        for n in 2..18 {
            for _ in 0..UNAUTHENTICATED_PER_IP_MAX {
                silent.push(
                    connect_from(&format!("127.0.0.{n}"), fixture.address)
                        .await
                        .unwrap(),
                );
            }
        }
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(SOON),
            "the pool is never full"
        );
    }
    // A new connection from the attacker's network, and one from elsewhere: admitted at once, not
    // after the silent ones' timeout.
    for (from, component) in [("127.0.0.1", NODE), ("127.1.0.1", BETA_NODE)] {
        let begun = Instant::now();
        assert!(
            fixture.channel_from(from, component).await.lives().await,
            "{from}"
        );
        canal_timing::assert_time(
            &format!("time until {from} is served beside silent connections"),
            begun.elapsed(),
            FIRST_BYTE_TIMEOUT,
        );
    }
    assert_eq!(ended("limit"), 0.0);
    // A silent connection has two seconds.
    let begun = Instant::now();
    let mut last = connect_from("127.0.0.2", fixture.address).await.unwrap();
    // A reset is a close, too.
    assert_eq!(last.read(&mut [0]).await.unwrap_or(0), 0);
    canal_timing::assert_time(
        "time until a silent connection is closed",
        begun.elapsed(),
        // A second for the close on a quiet machine.
        FIRST_BYTE_TIMEOUT + Duration::from_secs(1),
    );
    until("the silent ones are counted", || ended("silent") > 0.0).await;
    drop(silent);
    assert!(fixture.channel(NODE).await.lives().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn half_open_handshakes_of_one_tenant_leave_a_gateway_to_the_others() {
    let fixture = KeyServerFixture::start(ServerSetup {
        shares: QuotaShares {
            requester: 32,
            ..QuotaShares::default()
        },
        ..ServerSetup::default()
    })
    .await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let gateway = fixture.channel(GATEWAY).await;
    let mut calls = Vec::new();
    for _ in 0..4 {
        let mut call = gateway.begin(GATE, HandshakeRole::Client, &[PEER], 0);
        assert!(matches!(call.next().await, ServerReply::Send(_)));
        calls.push(call);
    }
    // The tenant's share is 13 %, which is 4 of 32, of the gateway's quota.
    assert_eq!(
        gateway
            .begin(GATE, HandshakeRole::Client, &[PEER], 0)
            .refusal()
            .await,
        KeyRefusal::TenantBusy
    );
    assert_eq!(
        fixture.value("canal_key_refusals_total{name=\"tenant_busy\",tenant=\"alpha\"}"),
        1.0
    );
    let share = |metric: &str| {
        fixture.value(&format!(
            "canal_share_{metric}{{limit=\"key_server_requests\",tenant=\"alpha\"}}"
        ))
    };
    assert_eq!(
        (
            share("used"),
            share("max"),
            share("refused_total"),
            share("revoked_total")
        ),
        (4.0, 4.0, 1.0, 0.0)
    );
    drop((calls, gateway));
    until("given back", || share("used") == 0.0).await;
    assert_eq!(
        share("refused_total"),
        1.0,
        "it does not go with the gateway"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn configured_shares_apply_when_they_arrive() {
    let fixture = KeyServerFixture::start(ServerSetup {
        shares: QuotaShares {
            requester: 32,
            ..QuotaShares::default()
        },
        ..ServerSetup::default()
    })
    .await;
    let publish_shares = |written: &[(ShareKind, &str)]| {
        let mut all = fixture.usual();
        let Some(Resource::Tenant(alpha)) = Arc::get_mut(&mut all[0]) else {
            panic!("alpha comes first")
        };
        written
            .iter()
            .for_each(|(kind, share)| alpha.shares.set(*kind, share.parse().unwrap()));
        fixture.publish(&all);
    };
    publish_shares(&[
        (ShareKind::KeyServerRequests, "2"),
        (ShareKind::MetricSeries, "7"),
    ]);
    fixture.provisioned().await;
    let gateway = fixture.channel(GATEWAY).await;
    let begun = async || {
        let mut call = gateway.begin(GATE, HandshakeRole::Client, &[PEER], 0);
        (matches!(call.next().await, ServerReply::Send(_)), call)
    };
    let handshakes = [begun().await, begun().await];
    assert!(handshakes.iter().all(|(has_begun, _)| *has_begun));
    assert_eq!(
        gateway
            .begin(GATE, HandshakeRole::Client, &[PEER], 0)
            .refusal()
            .await,
        KeyRefusal::TenantBusy
    );
    assert_eq!(
        fixture.value("canal_share_max{limit=\"metric_series\",tenant=\"alpha\"}"),
        7.0
    );
    // A larger share, while the gateway has requests in progress.
    publish_shares(&[(ShareKind::KeyServerRequests, "50%")]);
    // Half of the quota of 32. Two of these 16 handshakes are in progress already.
    for n in 2..16 {
        assert!(begun().await.0, "{n}");
    }
    assert_eq!(
        fixture.value("canal_share_max{limit=\"metric_series\",tenant=\"alpha\"}"),
        // No share of this kind is configured any more, so the default applies: a tenth of 10,000.
        1000.0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn channels_have_their_limit() {
    let fixture = KeyServerFixture::start(ServerSetup {
        // So few that a quarter is three.
        shares: QuotaShares {
            channels: 12,
            ..QuotaShares::default()
        },
        ..ServerSetup::default()
    })
    .await;
    let refused = async |component: &str| {
        fixture
            .channel(component)
            .await
            .start_call(&KeyRequest::Ping)
            .next()
            .await
            == ServerReply::End
    };
    let mut channels = Vec::new();
    // The nodes of one tenant have a quarter of the channels.
    for n in 0..3 {
        channels.push(fixture.channel(&NODE.replace("n1", &format!("n{n}"))).await);
        assert!(channels[n].lives().await);
    }
    // Nodes of a tenant share its quarter, whatever their names.
    assert!(refused(&NODE.replace("n1", "n7")).await);
    for component in [GATEWAY, BETA_NODE, RSA_NODE] {
        // Each of the others still has room of its own.
        for _ in 0..3 {
            channels.push(fixture.channel(component).await);
            assert!(channels[channels.len() - 1].lives().await, "{component}");
        }
    }
    // The four parts above fill the process's limit, so the first channel of gamma is one too
    // many.
    assert!(refused(&NODE.replace("alpha", "gamma")).await);
    // The limit of the process refuses gamma only; the quota of alpha refused the channel before.
    assert_eq!(
        fixture.value("canal_limit_refused_total{limit=\"key_channels\"}"),
        1.0
    );
    assert_eq!(
        fixture.value("canal_key_unauthenticated_connections_total{reason=\"limit\"}"),
        2.0
    );
    drop(channels);
    until("given back", || {
        fixture.value("canal_limit_used{limit=\"key_channels\"}") == 0.0
    })
    .await;
    assert!(!refused(NODE).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn channels_of_one_requester_are_limited() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    let mut channels = Vec::new();
    for _ in 0..REQUESTER_CHANNELS_MAX {
        let channel = fixture.channel(NODE).await;
        assert!(channel.lives().await);
        channels.push(channel);
    }
    assert_eq!(
        fixture
            .channel(NODE)
            .await
            .start_call(&KeyRequest::Ping)
            .next()
            .await,
        ServerReply::End
    );
    assert!(
        fixture
            .channel(&NODE.replace("n1", "n2"))
            .await
            .lives()
            .await
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reused_id_is_a_new_request() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let rsa = fixture.channel(RSA_NODE).await;
    let input = verify_input();
    let key = || KeyName::Identity(identity(SLOW));
    let mut call = rsa.listen(5);
    // Repeated, so that some requests are abandoned while they wait and some after they were
    // signed.
    for _ in 0..200 {
        rsa.send_request(
            5,
            &KeyRequest::Sign {
                key: key(),
                presented: None,
                // rsa_pss_rsae_sha256.
                scheme: 0x0804,
                deadline_ms: 0,
                input: &input,
            },
        );
        rsa.send_request(5, &KeyRequest::Abandon);
    }
    rsa.send_request(5, &KeyRequest::Chain { key: key() });
    // Responses to signatures that were done before they were abandoned may come first.
    loop {
        match call.next().await {
            ServerReply::Signature(_) => {}
            ServerReply::Certificates(_) => break,
            other => panic!("{other:?}"),
        }
    }
    until("all is given back", || {
        fixture.value("canal_key_requests_in_flight") == 0.0
    })
    .await;
    rsa.send_request(5, &KeyRequest::Ping);
    assert_eq!(
        call.next().await,
        ServerReply::Pong,
        "nothing of the abandoned ones"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_requester_that_does_not_read_is_closed() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let mut stream = dial(fixture.address, &fixture.authorities.infra, NODE)
        .await
        .unwrap();
    let mut chain = Vec::new();
    KeyRequest::Chain {
        key: KeyName::Identity(identity(WEB)),
    }
    .encode(1, &mut chain)
    .unwrap();
    let many = chain.repeat(200);
    let mut sent = 0;
    // Each response has some 500 bytes; the kernel's buffers absorb some of them.
    while sent < 40 * OUTBOX_MAX / 500 {
        match tokio::time::timeout(Duration::from_secs(10), stream.write_all(&many)).await {
            Ok(Ok(())) => sent += 200,
            _ => break,
        }
    }
    until("the end of the channel", || {
        fixture.value("canal_key_channels_ended_total{reason=\"slow_reader\"}") == 1.0
    })
    .await;
    assert!(fixture.channel(NODE).await.lives().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_lets_operations_in_progress_end() {
    let fixture = KeyServerFixture::start(ServerSetup::default()).await;
    fixture.publish(&fixture.usual());
    fixture.provisioned().await;
    let (channel, idle) = (
        fixture.channel(NODE).await,
        fixture.channel(BETA_NODE).await,
    );
    assert!(idle.lives().await);
    let mut idle_call = idle.listen(5);
    let mut call = channel.begin(WEB, HandshakeRole::Client, &[PEER], 0);
    let ServerReply::Send(hello) = call.next().await else {
        panic!("not a ClientHello")
    };
    // Longer than the handshake takes to end, so that the drain is not forced.
    fixture.trigger.drain(Duration::from_secs(20));
    assert_eq!(
        idle_call.next().await,
        ServerReply::End,
        "an idle channel closes"
    );
    // Each channel learns of the drain separately.
    let refused = loop {
        let mut late = channel.begin(WEB, HandshakeRole::Client, &[PEER], 0);
        match late.next().await {
            ServerReply::Send(_) => channel.send_request(late.id, &KeyRequest::Abandon),
            ServerReply::Refused(name, _) => break name,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused, KeyRefusal::Draining);
    let peers = Peers::new(
        fixture.ca("alpha"),
        &fixture.ca("alpha").issue_with(&identity(PEER), |_| {}),
        "alpha.example",
        &[WEB],
    );
    let mut server = peers.server();
    feed_peer(&mut server, &hello);
    channel.send_request(
        call.id,
        &KeyRequest::More {
            bytes: &flight(&mut server),
        },
    );
    assert!(matches!(call.next().await, ServerReply::Done { .. }));
    assert_eq!(call.next().await, ServerReply::End);
    assert_eq!(
        fixture.value("canal_key_channels_ended_total{reason=\"drained\"}"),
        2.0
    );
}
