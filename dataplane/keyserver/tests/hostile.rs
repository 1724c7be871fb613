//! Requesters and tenants that misbehave: garbage, floods, silence, strangers; nobody else notices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::rig::*;
use canal_keys::limits::{FIRST_BYTE_TIMEOUT, HANDSHAKE_BYTES_MAX, OUTBOX_MAX, REQUESTER_CHANNELS_MAX, Shares, UNAUTHENTICATED_PER_IP_MAX};
use canal_kit::testing::{TestCa, identity};
use canal_model::program::Resource;
use canal_model::share::ShareKind;
use canal_wire::keyrpc::{Begin, FRAME_MAX, KeyName, Refusal, Request, Role};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

fn sign(id: &str, scheme: u16, deadline_ms: u32) -> (KeyName, u16, u32) {
    (KeyName::Identity(identity(id)), scheme, deadline_ms)
}

fn ask(channel: &Channel, (key, scheme, deadline_ms): (KeyName, u16, u32)) -> Call {
    channel.ask(&Request::Sign { key, shown: None, scheme, deadline_ms, input: &verify_input() })
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_costs_one_request_or_one_channel() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let good = rig.channel(NODE).await;
    let bad = rig.channel(NODE).await;
    // A frame whose body means nothing.
    for (id, body) in [(1_000_001u64, &[0x7fu8][..]), (1_000_002, &[1, 0xff, 0xff]), (1_000_003, &[6, 1]), (1_000_004, &[0x86])] {
        let mut call = bad.listen(id);
        let length = u32::try_from(8 + body.len()).unwrap();
        bad.raw([&length.to_be_bytes()[..], &id.to_be_bytes(), body].concat());
        assert_eq!(call.refusal().await, Refusal::Malformed, "{body:?}");
    }
    assert!(bad.lives().await);
    let mut begun = bad.begin(WEB, Role::Client, &[PEER], 0);
    assert!(matches!(begun.next().await, Said::Send(_)));
    let begin = Begin { identity: identity(WEB), role: Role::Client, alpn: vec![], expected: vec![], deadline_ms: 0, bytes: b"" };
    bad.say(begun.id, &Request::Begin(begin));
    assert_eq!(begun.refusal().await, Refusal::DuplicateRequest);
    let mut unknown = bad.listen(77_777);
    bad.say(77_777, &Request::More { bytes: b"x" });
    assert_eq!(unknown.refusal().await, Refusal::UnknownRequest);
    bad.say(88_888, &Request::Abandon);
    assert!(bad.lives().await);
    // Bytes that are no frame end the channel, and what was under way on it.
    for bytes in [vec![0xff; 64], vec![0; 64], u32::try_from(FRAME_MAX).unwrap().to_be_bytes().to_vec(), b"GET / HTTP/1.1\r\n\r\n".to_vec()]
    {
        let channel = rig.channel(NODE).await;
        let mut begun = channel.begin(WEB, Role::Client, &[PEER], 0);
        assert!(matches!(begun.next().await, Said::Send(_)));
        channel.raw(bytes);
        assert_eq!(begun.next().await, Said::End);
    }
    assert_eq!(rig.value("canal_key_channels_ended_total{reason=\"malformed\"}"), 4.0);
    assert!(good.lives().await);
    drop(bad);
    until("all is given back", || rig.value("canal_key_under_way") == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peers_garbage_is_its_own_handshakes_end() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let channel = rig.channel(NODE).await;
    let mut call = channel.begin(WEB, Role::Server, &[], 0);
    channel.say(call.id, &Request::More { bytes: b"GET / HTTP/1.1\r\n\r\n" });
    assert_eq!(call.refusal().await, Refusal::PeerProtocol);
    // Records that never make a message.
    let mut call = channel.begin(WEB, Role::Server, &[], 0);
    let record = [&[22, 3, 1, 0x40, 0][..], &[1, 0, 0xff, 0xff], &[0; (16 << 10) - 4]].concat();
    for _ in 0..=HANDSHAKE_BYTES_MAX / record.len() + 1 {
        channel.say(call.id, &Request::More { bytes: &record });
    }
    let refused = call.refusal().await;
    assert!(matches!(refused, Refusal::HandshakeBytes | Refusal::PeerProtocol), "{refused}");
    assert!(channel.lives().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_peers_run_out_of_time() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let channel = rig.channel(NODE).await;
    let begun = Instant::now();
    let mut calls: Vec<_> = (0..20).map(|_| channel.begin(WEB, Role::Server, &[], 200)).collect();
    for call in &mut calls {
        assert_eq!(call.refusal().await, Refusal::HandshakeTime);
    }
    assert!(begun.elapsed() >= Duration::from_millis(200) && begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    assert_eq!(rig.value("canal_key_under_way"), 0.0);
    assert_eq!(rig.value("canal_key_refusals_total{name=\"handshake_time\",tenant=\"alpha\"}"), 20.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_delays_only_its_own_tenant() {
    let rig = Rig::start(Setting { shares: Shares { requester: 2048, tenant: 512, ..Shares::default() }, ..Setting::default() }).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let (flood, quiet) = (rig.channel(NODE).await, rig.channel(BETA_NODE).await);
    let rsa = rig.channel(RSA_NODE).await;
    let ca = rig.ca("beta");
    let id = PEER.replace("alpha", "beta");
    let peers = Peers::new(ca, &ca.issue_with(&identity(&id), |_| {}), "beta.example", &[OTHER]);
    let done = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut tasks = Vec::new();
    for (channel, id, scheme) in [(flood, WEB, 0x0403), (rsa, SLOW, 0x0804)] {
        let done = done.clone();
        tasks.push(tokio::spawn(async move {
            let mut refused = 0;
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                // More than its share at once.
                let mut calls: Vec<_> = (0..2000).map(|_| ask(&channel, sign(id, scheme, 0))).collect();
                for call in &mut calls {
                    match call.next().await {
                        Said::Signature(_) => {}
                        Said::Refused(Refusal::TenantBusy | Refusal::Deadline, _) => refused += 1,
                        other => panic!("{other:?}"),
                    }
                    channel.forget(call);
                }
            }
            refused
        }));
    }
    until("the flood", || rig.value("canal_key_under_way") > 600.0).await;
    let mut longest = Duration::ZERO;
    for _ in 0..30 {
        let begun = Instant::now();
        let said = quiet.shake(OTHER, &mut peers.client()).await;
        assert!(matches!(said, Said::Done { .. }), "{said:?}");
        longest = longest.max(begun.elapsed());
    }
    done.store(true, std::sync::atomic::Ordering::Relaxed);
    for task in tasks {
        assert!(task.await.unwrap() > 0, "the flood was not above its share");
    }
    assert!(longest < Duration::from_secs(2), "the longest of the quiet tenant's took {longest:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_late_is_not_worked_on() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let rsa = rig.channel(RSA_NODE).await;
    let mut calls: Vec<_> = (0..1500).map(|_| ask(&rsa, sign(SLOW, 0x0804, 80))).collect();
    let (mut signed, mut late) = (0, 0);
    for call in &mut calls {
        match call.next().await {
            Said::Signature(_) => signed += 1,
            Said::Refused(Refusal::Deadline, _) => late += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(signed > 0 && late > 0, "{signed} signed, {late} late");
    assert_eq!(rig.value("canal_key_operations_total{kind=\"sign\",algorithm=\"rsa\",tenant=\"rsa\"}"), f64::from(signed));
    assert_eq!(rig.value("canal_key_refusals_total{name=\"deadline\",tenant=\"rsa\"}"), f64::from(late));
    // Abandoned ones neither: each is right behind what it abandons, which takes far longer to sign than to read.
    for _ in 0..400 {
        let call = ask(&rsa, sign(SLOW, 0x0804, 0));
        rsa.say(call.id, &Request::Abandon);
    }
    until("all is given back", || rig.value("canal_key_under_way") == 0.0).await;
    let worked = rig.value("canal_key_operations_total{kind=\"sign\",algorithm=\"rsa\",tenant=\"rsa\"}");
    assert!(worked < f64::from(signed) + 400.0, "{worked} of {signed} and 400");
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_get_no_channel() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    let refused = |reason: &str| rig.value(&format!("canal_key_strangers_total{{reason=\"{reason}\"}}"));
    // Not by this authority; a tenant's identity; a component that asks no key server.
    let other = TestCa::new("other");
    for (ca, component, reason) in [
        (&other, NODE, "handshake"),
        (&rig.authorities.infra, WEB, "handshake"),
        (&rig.authorities.infra, "spiffe://components.canal/ns/canal-system/sa/keyserver.ks-2", "not_a_requester"),
        (&rig.authorities.infra, "spiffe://components.canal/ns/alpha/sa/gateway.g1", "not_a_requester"),
    ] {
        let before = refused(reason);
        if let Ok(mut stream) = dial(rig.address, ca, component).await {
            // TLS 1.3 tells of a server's refusal at the first read.
            let mut byte = [0];
            assert!(!matches!(stream.read(&mut byte).await, Ok(n) if n > 0), "{component}");
        }
        until(component, || refused(reason) == before + 1.0).await;
    }
    let mut plain = TcpStream::connect(rig.address).await.unwrap();
    plain.write_all(b"\x00\x00\x00\x09\x00\x00\x00\x00\x00\x00\x00\x01\x06").await.unwrap();
    let mut rest = Vec::new();
    let _ = plain.read_to_end(&mut rest).await;
    until("plain bytes", || refused("handshake") == 3.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_of_sixteen_addresses_keep_nobody_out() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    let ended = |reason: &str| rig.value(&format!("canal_key_strangers_total{{reason=\"{reason}\"}}"));
    let mut silent = Vec::new();
    for n in 2..18 {
        for _ in 0..UNAUTHENTICATED_PER_IP_MAX {
            silent.push(connect_from(&format!("127.0.0.{n}"), rig.address).await.unwrap());
        }
    }
    until("the pool is full", || ended("gave_way") > 0.0).await;
    // A newcomer in the attacker's own network, and one elsewhere: at once, not when the silent ones' time is over.
    for (from, component) in [("127.0.0.1", NODE), ("127.1.0.1", BETA_NODE)] {
        let begun = Instant::now();
        assert!(rig.channel_from(from, component).await.lives().await, "{from}");
        assert!(begun.elapsed() < FIRST_BYTE_TIMEOUT, "{from}: {:?}", begun.elapsed());
    }
    assert_eq!(ended("limit"), 0.0);
    // Whoever says nothing has two seconds.
    let begun = Instant::now();
    let mut last = connect_from("127.0.0.2", rig.address).await.unwrap();
    assert_eq!(last.read(&mut [0]).await.unwrap_or(0), 0);
    assert!(begun.elapsed() < FIRST_BYTE_TIMEOUT + Duration::from_secs(1), "{:?}", begun.elapsed());
    until("the silent ones are counted", || ended("silent") > 0.0).await;
    drop(silent);
    assert!(rig.channel(NODE).await.lives().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn half_open_handshakes_of_one_tenant_leave_a_gateway_to_the_others() {
    let rig = Rig::start(Setting { shares: Shares { requester: 32, ..Shares::default() }, ..Setting::default() }).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let gateway = rig.channel(GATEWAY).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        let mut call = gateway.begin(GATE, Role::Client, &[PEER], 0);
        assert!(matches!(call.next().await, Said::Send(_)));
        held.push(call);
    }
    // 13 % of what the gateway may have under way.
    assert_eq!(gateway.begin(GATE, Role::Client, &[PEER], 0).refusal().await, Refusal::TenantBusy);
    assert_eq!(rig.value("canal_key_refusals_total{name=\"tenant_busy\",tenant=\"alpha\"}"), 1.0);
    let share = |metric: &str| rig.value(&format!("canal_share_{metric}{{limit=\"key_server_requests\",tenant=\"alpha\"}}"));
    assert_eq!((share("used"), share("max"), share("refused_total"), share("revoked_total")), (4.0, 4.0, 1.0, 0.0));
    drop((held, gateway));
    until("given back", || share("used") == 0.0).await;
    assert_eq!(share("refused_total"), 1.0, "it does not go with the gateway");
}

#[tokio::test(flavor = "multi_thread")]
async fn shares_that_the_provider_wrote_hold_when_they_are_told() {
    let rig = Rig::start(Setting { shares: Shares { requester: 32, ..Shares::default() }, ..Setting::default() }).await;
    let told = |written: &[(ShareKind, &str)]| {
        let mut all = rig.usual();
        let Some(Resource::Tenant(alpha)) = Arc::get_mut(&mut all[0]) else { panic!("alpha comes first") };
        written.iter().for_each(|(kind, share)| alpha.shares.set(*kind, share.parse().unwrap()));
        rig.tell(&all);
    };
    told(&[(ShareKind::KeyServerRequests, "2"), (ShareKind::MetricSeries, "7")]);
    rig.provisioned().await;
    let gateway = rig.channel(GATEWAY).await;
    let begun = async || {
        let mut call = gateway.begin(GATE, Role::Client, &[PEER], 0);
        (matches!(call.next().await, Said::Send(_)), call)
    };
    let held = [begun().await, begun().await];
    assert!(held.iter().all(|(has_begun, _)| *has_begun));
    assert_eq!(gateway.begin(GATE, Role::Client, &[PEER], 0).refusal().await, Refusal::TenantBusy);
    assert_eq!(rig.value("canal_share_max{limit=\"metric_series\",tenant=\"alpha\"}"), 7.0);
    // More, while the gateway has some under way.
    told(&[(ShareKind::KeyServerRequests, "50%")]);
    for n in 2..16 {
        assert!(begun().await.0, "{n}");
    }
    assert_eq!(rig.value("canal_share_max{limit=\"metric_series\",tenant=\"alpha\"}"), 1000.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn channels_have_their_limit() {
    let rig = Rig::start(Setting { shares: Shares { channels: 12, ..Shares::default() }, ..Setting::default() }).await;
    let refused = async |component: &str| rig.channel(component).await.ask(&Request::Ping).next().await == Said::End;
    let mut held = Vec::new();
    // One tenant's nodes have a quarter.
    for n in 0..3 {
        held.push(rig.channel(&NODE.replace("n1", &format!("n{n}"))).await);
        assert!(held[n].lives().await);
    }
    assert!(refused(&NODE.replace("n1", "n7")).await);
    for component in [GATEWAY, BETA_NODE, RSA_NODE] {
        for _ in 0..3 {
            held.push(rig.channel(component).await);
            assert!(held[held.len() - 1].lives().await, "{component}");
        }
    }
    assert!(refused(&NODE.replace("alpha", "gamma")).await);
    assert_eq!(rig.value("canal_limit_refused_total{limit=\"key_channels\"}"), 1.0);
    assert_eq!(rig.value("canal_key_strangers_total{reason=\"limit\"}"), 2.0);
    drop(held);
    until("given back", || rig.value("canal_limit_used{limit=\"key_channels\"}") == 0.0).await;
    assert!(!refused(NODE).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_requester_has_so_many_channels() {
    let rig = Rig::start(Setting::default()).await;
    let mut held = Vec::new();
    for _ in 0..REQUESTER_CHANNELS_MAX {
        let channel = rig.channel(NODE).await;
        assert!(channel.lives().await);
        held.push(channel);
    }
    assert_eq!(rig.channel(NODE).await.ask(&Request::Ping).next().await, Said::End);
    assert!(rig.channel(&NODE.replace("n1", "n2")).await.lives().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_comes_again_is_another_request() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let rsa = rig.channel(RSA_NODE).await;
    let input = verify_input();
    let key = || KeyName::Identity(identity(SLOW));
    let mut call = rsa.listen(5);
    for _ in 0..200 {
        rsa.say(5, &Request::Sign { key: key(), shown: None, scheme: 0x0804, deadline_ms: 0, input: &input });
        rsa.say(5, &Request::Abandon);
    }
    rsa.say(5, &Request::Chain { key: key() });
    // Answers of signatures that were done before they were abandoned may come first.
    loop {
        match call.next().await {
            Said::Signature(_) => {}
            Said::Certificates(_) => break,
            other => panic!("{other:?}"),
        }
    }
    until("all is given back", || rig.value("canal_key_under_way") == 0.0).await;
    rsa.say(5, &Request::Ping);
    assert_eq!(call.next().await, Said::Pong, "nothing of the abandoned ones");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_read_is_closed() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let mut stream = dial(rig.address, &rig.authorities.infra, NODE).await.unwrap();
    let mut chain = Vec::new();
    Request::Chain { key: KeyName::Identity(identity(WEB)) }.encode(1, &mut chain).unwrap();
    let many = chain.repeat(200);
    let mut sent = 0;
    // Each answer is some 500 bytes; the kernel's buffers take some of them.
    while sent < 40 * OUTBOX_MAX / 500 {
        match tokio::time::timeout(Duration::from_secs(10), stream.write_all(&many)).await {
            Ok(Ok(())) => sent += 200,
            _ => break,
        }
    }
    until("the end of the channel", || rig.value("canal_key_channels_ended_total{reason=\"slow_reader\"}") == 1.0).await;
    assert!(rig.channel(NODE).await.lives().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_lets_what_is_under_way_end() {
    let rig = Rig::start(Setting::default()).await;
    rig.tell(&rig.usual());
    rig.provisioned().await;
    let (channel, idle) = (rig.channel(NODE).await, rig.channel(BETA_NODE).await);
    assert!(idle.lives().await);
    let mut idle_call = idle.listen(5);
    let mut call = channel.begin(WEB, Role::Client, &[PEER], 0);
    let Said::Send(hello) = call.next().await else { panic!("no ClientHello") };
    rig.trigger.drain(Duration::from_secs(20));
    assert_eq!(idle_call.next().await, Said::End, "an idle channel closes");
    // Each channel hears of the drain by itself.
    let refused = loop {
        let mut late = channel.begin(WEB, Role::Client, &[PEER], 0);
        match late.next().await {
            Said::Send(_) => channel.say(late.id, &Request::Abandon),
            Said::Refused(name, _) => break name,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused, Refusal::Draining);
    let peers = Peers::new(rig.ca("alpha"), &rig.ca("alpha").issue_with(&identity(PEER), |_| {}), "alpha.example", &[WEB]);
    let mut server = peers.server();
    hear(&mut server, &hello);
    channel.say(call.id, &Request::More { bytes: &flight(&mut server) });
    assert!(matches!(call.next().await, Said::Done { .. }));
    assert_eq!(call.next().await, Said::End);
    assert_eq!(rig.value("canal_key_channels_ended_total{reason=\"drained\"}"), 2.0);
}
