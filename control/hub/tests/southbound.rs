//! What data planes are told, over real TLS streams: scope, order, reconnect, refusal, coalescing, isolation, bytes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::rig;
use crate::rig::{PATIENCE, Rig, Subscriber, pod, route, service, tenant};
use canal_hub::Limits;
use canal_model::program::{Kind, Resource, RouteAction};

#[tokio::test]
async fn a_node_never_sees_another_tenant() {
    let rig = Rig::two_tenants().await;
    for (token, own, foreign) in [("n1", "alpha", "beta"), ("m1", "beta", "alpha")] {
        let mut s = rig.subscribe(token).await;
        s.settle().await;
        assert!(s.has(Kind::Tenant, own) && s.has(Kind::Service, &format!("{own}/shop/a")), "{:?}", s.names());
        assert!(s.names().iter().all(|n| !n.contains(foreign)), "{token} sees {:?}", s.names());
        let workloads: Vec<&String> = s.held.keys().filter(|(k, _)| *k == Kind::Workload).map(|(_, n)| n).collect();
        assert_eq!(workloads, [&format!("{own}/shop/a-0")], "only those it runs");
    }
    let mut root = rig.admin("root").await;
    let mut alpha = rig.subscribe("n1").await;
    let mut g1 = rig.subscribe("g1").await;
    alpha.settle().await;
    g1.settle().await;
    root.must_apply("beta", &[&route("r", "a", &[("b", 1)])]).await;
    assert_eq!((alpha.settle().await, g1.settle().await), (vec![], vec![]), "beta's change is not alpha's business");
    assert!(!g1.names().iter().any(|n| n.contains("beta")), "g1 serves alpha only");
}

#[tokio::test]
async fn tokens_decide_who_may_connect() {
    let rig = Rig::two_tenants().await;
    for (token, code) in
        [("nobody", tonic::Code::Unauthenticated), ("", tonic::Code::Unauthenticated), ("root", tonic::Code::PermissionDenied)]
    {
        let Err(refused) = Subscriber::try_open(rig.channel().await, token, BTreeMap::new()).await else { panic!("{token} was let in") };
        assert_eq!(refused.code(), code, "{token:?}: {refused}");
    }
    assert!(rig.metric("canal_controller_refused_total{reason=\"unknown_token\"}").await >= 1.0);
    assert!(rig.metric("canal_controller_refused_total{reason=\"subscribe_operator\"}").await >= 1.0);
}

#[tokio::test]
async fn one_batch_is_ordered_so_that_nothing_dangles() {
    let rig = Rig::two_tenants().await;
    let mut s = rig.subscribe("g1").await;
    let first = s.settle().await;
    let kinds: Vec<&str> = first.iter().map(|l| l.split(' ').next().unwrap()).collect();
    let all: Vec<String> = Kind::ALL.iter().filter(|kind| **kind != Kind::Manifest).map(|kind| format!("{kind:?}")).collect();
    assert_eq!(kinds, all, "parents first");
    let mut ann = rig.admin("ann").await;
    ann.must_apply("alpha", &[&service(1, "c", 3), &pod(1, "c-0", "c", "n1", 3, true), &route("r", "a", &[("c", 1)])]).await;
    let added = s.settle().await;
    assert_eq!(
        added,
        ["Service +alpha/shop/c", "Workload +alpha/shop/c-0", "Route +alpha/HTTPRoute/shop/r/a.0"].map(String::from),
        "{added:?}"
    );
    let all = [("httproute", "shop", "r"), ("pod", "shop", "c-0"), ("svc", "shop", "c")];
    assert!(ann.delete("alpha", &all, false).await.unwrap().accepted);
    let gone = s.settle().await;
    assert_eq!(
        gone,
        ["Route -alpha/HTTPRoute/shop/r/a.0", "Workload -alpha/shop/c-0", "Service -alpha/shop/c"].map(String::from),
        "{gone:?}"
    );
}

#[tokio::test]
async fn a_reconnect_brings_only_changes_even_after_a_restart() {
    let mut rig = Rig::two_tenants().await;
    let mut s = rig.subscribe("g1").await;
    s.settle().await;
    let (held, generation) = (s.held.clone(), s.generation);
    drop(s);
    rig.admin("ann").await.must_apply("alpha", &[&route("r", "a", &[("b", 1)])]).await;
    rig.stop().await;
    rig.start().await;
    let mut s = Subscriber::open(rig.channel().await, "g1", held).await;
    let lines: Vec<String> = s.settle().await.into_iter().filter(|l| l.contains(' ')).collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("Route +"), "{lines:?}");
    assert!(s.generation > generation, "generations go on across a restart");
}

#[tokio::test]
async fn a_nack_carries_its_reason_and_stops_nobody() {
    let rig = Rig::two_tenants().await;
    let (mut root, mut ann) = (rig.admin("root").await, rig.admin("ann").await);
    let mut s = rig.subscribe("g1").await;
    s.settle().await;
    s.refuses.insert("alpha/shop/c".into());
    ann.must_apply("alpha", &[&service(1, "c", 3), &service(1, "d", 4)]).await;
    s.settle().await;
    assert!(s.has(Kind::Service, "alpha/shop/d") && !s.has(Kind::Service, "alpha/shop/c"));
    let row = root.subscriber("g1").await;
    assert_eq!((row.nack.as_str(), row.version.as_str()), ("alpha/shop/c is not good", "1.2.3"));
    assert!(row.nacks >= 1 && row.generation_acked < row.generation_wanted, "{row:?}");
    let seen_by_tenant = ann.subscriber("g1").await;
    assert_eq!(seen_by_tenant.nack, "Service alpha/shop/c: alpha/shop/c is not good", "of refusals a tenant is told its own");
    assert!(rig.metric("canal_controller_nacks_total{type=\"Service\"}").await >= 1.0);

    ann.must_apply("alpha", &[&service(1, "e", 5)]).await;
    assert_eq!(s.settle().await, ["Service +alpha/shop/e"], "the refused one is not sent again, others are");
    s.refuses.clear();
    ann.must_apply("alpha", &[&service(1, "c", 33)]).await;
    assert_eq!(s.settle().await, ["Service +alpha/shop/c"]);
    assert_eq!(root.subscriber("g1").await.nack, "");
    root.converged().await;
}

#[tokio::test]
async fn a_thousand_changes_converge_in_few_messages() {
    let rig = Rig::two_tenants().await;
    let (mut root, mut ann) = (rig.admin("root").await, rig.admin("ann").await);
    ann.must_apply("alpha", &[&route("r", "a", &[("a", 0), ("b", 100)])]).await;
    let mut slow = rig.subscribe("g1").await;
    slow.settle().await;
    let before = root.subscriber("g1").await.responses_sent;
    let mut last = 0;
    let begun = Instant::now();
    for i in 1..=1000u32 {
        let generation = ann.must_apply("alpha", &[&route("r", "a", &[("a", i), ("b", 1000 - i.min(1000))])]).await;
        assert!(generation > last, "{generation} after {last}");
        last = generation;
        // It answers one message in fifty changes: the rest must gather, not queue.
        if i % 50 == 0
            && let Some(response) = slow.next(Duration::from_millis(0)).await
        {
            slow.answer(response).await;
        }
    }
    let took = begun.elapsed();
    slow.settle().await;
    let status = root.converged().await;
    let row = status.subscribers.into_iter().find(|s| s.name == "g1").unwrap();
    assert_eq!((row.generation_wanted, row.generation_acked), (last, last));
    assert!(row.responses_sent - before <= 30, "{} messages for 1000 changes", row.responses_sent - before);
    let weights = slow.held.values().find_map(|(_, r)| match r {
        Resource::Route(r) => match &r.action {
            RouteAction::Split(b) => Some(b.iter().map(|b| b.weight).collect::<Vec<_>>()),
            RouteAction::Refuse { .. } => None,
        },
        _ => None,
    });
    assert_eq!(weights, Some(vec![1000, 0]), "the newest state");
    println!("1000 changes in {took:?}, {} messages", row.responses_sent - before);
}

#[tokio::test]
async fn a_subscriber_that_is_stuck_delays_nobody() {
    let rig = Rig::two_tenants().await;
    let (mut root, mut ann) = (rig.admin("root").await, rig.admin("ann").await);
    // Neither reads nor answers; its connection stays open.
    let _stuck: Vec<Subscriber> = vec![rig.subscribe("n1").await, rig.subscribe("g1").await];
    let mut quick = rig.subscribe("n2").await;
    quick.settle().await;
    let mut worst = Duration::ZERO;
    for i in 0..50u8 {
        let name = format!("s{i}");
        let begun = Instant::now();
        ann.must_apply("alpha", &[&service(1, &name, 10 + i)]).await;
        quick.until(&name, |held| held.contains_key(&(Kind::Service, format!("alpha/shop/{name}")))).await;
        worst = worst.max(begun.elapsed());
    }
    assert!(worst < Duration::from_secs(1), "a change took {worst:?} to the quick one");
    let rows: BTreeMap<String, bool> =
        root.status().await.subscribers.into_iter().map(|s| (s.name.clone(), s.generation_acked >= s.generation_wanted)).collect();
    assert_eq!(rows, [("n1".into(), false), ("n2".into(), true), ("g1".into(), false)].into());
    assert!(rig.metric("canal_controller_unacked_seconds_max").await > 0.0);
    println!("worst {worst:?}");
}

/// The fleet of the test below: pods on one other node, so that a change on n1 stands alone.
const FLEET: u16 = 10_000;

#[tokio::test]
async fn one_pod_among_ten_thousand_is_one_small_message() {
    let mut all = vec![tenant("alpha", 1)];
    all.extend((0..FLEET).map(|i| pod(1, &format!("p{i}"), "a", "n9", 100 + i, true)));
    let rig = Rig::with(Limits::default(), |config| {
        std::fs::create_dir(config.join("alpha")).unwrap();
        std::fs::write(config.join("alpha/all.yaml"), all.join("---\n")).unwrap();
    })
    .await;
    let relay = Relay::to(rig.hub().address()).await;
    let mut g1 = Subscriber::open(rig.channel_to(relay.address).await, "g1", BTreeMap::new()).await;
    g1.until("the fleet", |held| held.len() > usize::from(FLEET)).await;
    g1.settle().await;
    let (before, down) = (rig.admin("root").await.subscriber("g1").await.bytes_sent, relay.down());

    let mut root = rig.admin("root").await;
    let begun = Instant::now();
    root.must_apply("alpha", &[&pod(1, "new", "a", "n1", 30_000, true)]).await;
    g1.until("the pod", |held| held.contains_key(&(Kind::Workload, "alpha/shop/new".into()))).await;
    let took = begun.elapsed();
    assert_eq!(g1.log.last().map(String::as_str), Some("Workload +alpha/shop/new"));
    g1.settle().await;
    let (sent, wire) = (root.subscriber("g1").await.bytes_sent - before, relay.down() - down);
    assert!(sent <= 2048 && wire <= 2048, "{sent} bytes of message, {wire} bytes on the wire");
    let compile = rig.metric("canal_controller_compile_seconds_sum").await / rig.metric("canal_controller_compile_seconds_count").await;
    println!("{sent} bytes of message, {wire} on the wire with TLS and HTTP/2, {took:?} from apply to receipt, {compile:.4} s per compile");
}

#[tokio::test]
async fn a_half_open_connection_is_found() {
    let limits = Limits { ping: (Duration::from_millis(100), Duration::from_millis(200)), ..Limits::default() };
    let rig = Rig::with(limits, |_| {}).await;
    let relay = Relay::to(rig.hub().address()).await;
    let mut s = Subscriber::open(rig.channel_to(relay.address).await, "n1", BTreeMap::new()).await;
    s.settle().await;
    let mut root = rig.admin("root").await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert!(root.subscriber("n1").await.connected, "one that answers PINGs stays, however quiet");
    relay.freeze();
    let until = Instant::now() + PATIENCE;
    while root.subscriber("n1").await.connected {
        assert!(Instant::now() < until, "a frozen path is not noticed");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A TCP relay that counts what goes down to the subscriber, and can stop moving anything.
struct Relay {
    address: std::net::SocketAddr,
    frozen: std::sync::Arc<std::sync::atomic::AtomicBool>,
    down: std::sync::Arc<std::sync::atomic::AtomicU64>,
}

impl Relay {
    async fn to(target: std::net::SocketAddr) -> Self {
        use std::sync::atomic::Ordering;
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let down = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let frozen = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (counter, stop) = (down.clone(), frozen.clone());
        tokio::spawn(async move {
            let (client, _) = listener.accept().await.unwrap();
            let server = tokio::net::TcpStream::connect(target).await.unwrap();
            let (mut from_client, mut to_client) = client.into_split();
            let (mut from_server, mut to_server) = server.into_split();
            tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
            let mut buffer = vec![0; 64 << 10];
            while let Ok(n @ 1..) = from_server.read(&mut buffer).await {
                if stop.load(Ordering::Relaxed) {
                    std::future::pending::<()>().await;
                }
                counter.fetch_add(n as u64, Ordering::Relaxed);
                if to_client.write_all(&buffer[..n]).await.is_err() {
                    return;
                }
            }
        });
        Self { address, frozen, down }
    }

    fn freeze(&self) {
        self.frozen.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    fn down(&self) -> u64 {
        self.down.load(std::sync::atomic::Ordering::Relaxed)
    }
}

#[tokio::test]
async fn principals_are_followed_and_a_revoked_token_ends_its_stream() {
    let rig = Rig::two_tenants().await;
    let mut n1 = rig.subscribe("n1").await;
    let mut n2 = rig.subscribe("n2").await;
    n1.settle().await;
    n2.settle().await;
    let path = &rig.config.principals;
    std::fs::write(path, "- {this is: not a list of principals").unwrap();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    rig.admin("root").await.must_apply("alpha", &[&service(1, "c", 3)]).await;
    n1.until("c", |h| h.contains_key(&(Kind::Service, "alpha/shop/c".into()))).await;
    let list = [("n2", "kind: node, name: n2, tenant: alpha, az: az2"), ("fresh", "kind: node, name: n1, tenant: alpha, az: az1")];
    rig::write_principals(path, &list);
    let ended = n1.end().await;
    assert_eq!(ended.code(), tonic::Code::Unauthenticated, "{ended}");
    let mut fresh = rig.subscribe("fresh").await;
    fresh.settle().await;
    assert!(fresh.has(Kind::Tenant, "alpha"));
    assert_eq!(n2.settle().await.len(), 1, "n2 goes on; it had c to take");
}

#[tokio::test]
async fn a_stream_names_the_store_first_and_a_lost_store_is_another_with_other_ids() {
    let mut rig = Rig::two_tenants().await;
    let ids = |s: &Subscriber| -> Vec<u32> {
        let services = s.held.values().filter_map(|(_, r)| match r {
            Resource::Service(service) => Some(service.id.get()),
            _ => None,
        });
        services.collect()
    };
    let mut found = Vec::new();
    for _ in 0..2 {
        let mut s = rig.subscribe("n1").await;
        let first = s.next(PATIENCE).await.unwrap();
        let store = canal_wire::southbound::store_of(&first).unwrap().expect("the first response names the store");
        s.answer(first).await;
        let second = s.next(PATIENCE).await.unwrap();
        assert_eq!(second.control_plane, None, "once is enough");
        s.answer(second).await;
        s.until("the services", |h| h.contains_key(&(Kind::Service, "alpha/shop/b".into()))).await;
        assert_eq!(rig.admin("ann").await.status().await.store, store.to_string());
        found.push((store, ids(&s)));
        drop(s);
        rig.stop().await;
        std::fs::remove_dir_all(&rig.config.data_dir).unwrap();
        rig.start().await;
    }
    assert_ne!(found[0].0, found[1].0);
    assert!(found[0].1.len() == 2 && found[0].1.iter().all(|id| !found[1].1.contains(id)), "{found:?}");
}
