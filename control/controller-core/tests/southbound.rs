//! Tests of what data planes receive over real TLS streams: scope, order, reconnect, refusal,
//! coalescing, isolation, bytes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::fixture;
use crate::fixture::{
    ControllerFixture, ManualSubscriber, pod, route, service, tenant, wait_limit,
};
use canal_controller_core::ControllerLimits;
use canal_model::program::{Resource, ResourceKind, RouteAction};
use canal_timing::{assert_time, slack};

#[tokio::test]
async fn a_node_never_sees_another_tenant() {
    let fixture = ControllerFixture::two_tenants().await;
    for (token, own, foreign) in [("n1", "alpha", "beta"), ("m1", "beta", "alpha")] {
        let mut s = fixture.subscribe(token).await;
        s.settle().await;
        assert!(
            s.has(ResourceKind::Tenant, own)
                && s.has(ResourceKind::Service, &format!("{own}/shop/a")),
            "{:?}",
            s.names()
        );
        assert!(
            s.names().iter().all(|n| !n.contains(foreign)),
            "{token} sees {:?}",
            s.names()
        );
        let workloads: Vec<&String> = s
            .resources
            .keys()
            .filter(|(k, _)| *k == ResourceKind::Workload)
            .map(|(_, n)| n)
            .collect();
        assert_eq!(
            workloads,
            [&format!("{own}/shop/a-0")],
            "a node sees only the workloads that it runs"
        );
    }
    let mut root = fixture.admin("root").await;
    let mut alpha = fixture.subscribe("n1").await;
    let mut g1 = fixture.subscribe("g1").await;
    alpha.settle().await;
    g1.settle().await;
    root.must_apply("beta", &[&route("r", "a", &[("b", 1)])])
        .await;
    assert_eq!(
        (alpha.settle().await, g1.settle().await),
        (vec![], vec![]),
        "beta's change is not alpha's business"
    );
    assert!(
        !g1.names().iter().any(|n| n.contains("beta")),
        "g1 serves alpha only"
    );
}

/// Checks the account, the services and the own ports of the one direct endpoint.
fn check_direct_endpoint(n1: &ManualSubscriber) {
    let held = n1
        .resources
        .get(&(ResourceKind::DirectEndpoint, "alpha/shop/cache-0".into()))
        .map(|(_, resource)| resource.clone());
    let Some(Resource::DirectEndpoint(endpoint)) = held else {
        panic!("{held:?}")
    };
    assert_eq!(
        (
            endpoint.service_account.as_str(),
            endpoint.serves.len(),
            endpoint.own_ports
        ),
        ("cache", 1, [80].into())
    );
}

/// Nodes receive the ready pods behind direct ports, one message for each change. Gateways, other
/// tenants, and nodes of a tenant whose port is no longer direct do not.
#[tokio::test]
async fn ready_pods_of_direct_ports_are_sent_to_nodes_of_their_tenant() {
    let fixture = ControllerFixture::two_tenants().await;
    let (mut root, mut ann) = (fixture.admin("root").await, fixture.admin("ann").await);
    // A port named `redis` is a direct port unless the annotation below says otherwise.
    let cache = |annotations: &str| {
        service(1, "cache", 9)
            .replace("name: http", "name: redis")
            .replace("namespace: shop}", annotations)
    };
    let plain = "namespace: shop}";
    ann.must_apply("alpha", &[&cache(plain)]).await;
    root.must_apply(
        "alpha",
        &[
            // Neither pod is on n1, so it can know them only as direct endpoints.
            &pod(1, "cache-0", "cache", "n2", 7, true),
            &pod(1, "cache-1", "cache", "n2", 8, false),
        ],
    )
    .await;
    let (mut n1, mut m1, mut g1) = (
        fixture.subscribe("n1").await,
        fixture.subscribe("m1").await,
        fixture.subscribe("g1").await,
    );
    for s in [&mut n1, &mut m1, &mut g1] {
        s.settle().await;
    }
    let direct = |s: &ManualSubscriber| {
        s.names()
            .into_iter()
            .filter(|name| name.starts_with("DirectEndpoint"))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        direct(&n1),
        ["DirectEndpoint alpha/shop/cache-0"],
        "the pod that is not ready is sent to no node"
    );
    assert!(
        !n1.has(ResourceKind::Workload, "alpha/shop/cache-0"),
        "the workload belongs to another node"
    );
    assert!(direct(&m1).is_empty() && direct(&g1).is_empty());
    check_direct_endpoint(&n1);
    root.must_apply("alpha", &[&pod(1, "cache-1", "cache", "n2", 8, true)])
        .await;
    assert_eq!(
        n1.settle().await,
        ["DirectEndpoint +alpha/shop/cache-1"],
        "one change is one message"
    );
    let policy = |namespace: &str| {
        format!(
            "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: who, namespace: shop}}\nspec: \
             {{selector: {{matchLabels: {{app: cache}}}}, action: ALLOW, rules: [{{from: [{{source: {{namespaces: [{namespace}]}}}}]}}]}}\n"
        )
    };
    // Policies are evaluated for the workloads of n1, which gets a second one in `shop`.
    root.must_apply("alpha", &[&pod(1, "web-0", "web", "n1", 9, true)])
        .await;
    n1.settle().await;
    ann.must_apply("alpha", &[&policy("front")]).await;
    n1.settle().await;
    assert!(
        direct(&n1).is_empty(),
        "no workload of n1 is let in: {:?}",
        n1.names()
    );
    ann.must_apply("alpha", &[&policy("shop")]).await;
    n1.settle().await;
    assert_eq!(direct(&n1).len(), 2, "a workload of n1 is let in again");
    ann.must_apply(
        "alpha",
        &[&cache(
            "namespace: shop, annotations: {canal.mesh/direct: \"false\"}}",
        )],
    )
    .await;
    n1.settle().await;
    assert!(
        direct(&n1).is_empty(),
        "the port is not direct any more: {:?}",
        n1.names()
    );
    assert!(m1.settle().await.is_empty(), "beta receives nothing of it");
}

#[tokio::test]
async fn only_known_tokens_may_connect() {
    let fixture = ControllerFixture::two_tenants().await;
    for (token, code) in [
        ("nobody", tonic::Code::Unauthenticated),
        ("", tonic::Code::Unauthenticated),
        ("root", tonic::Code::PermissionDenied),
    ] {
        let Err(refused) =
            ManualSubscriber::try_open(fixture.channel().await, token, BTreeMap::new()).await
        else {
            panic!("{token} was let in")
        };
        assert_eq!(refused.code(), code, "{token:?}: {refused}");
    }
    assert!(
        fixture
            .metric("canal_controller_refused_total{reason=\"unknown_token\"}")
            .await
            >= 1.0
    );
    assert!(
        fixture
            .metric("canal_controller_refused_total{reason=\"subscribe_operator\"}")
            .await
            >= 1.0
    );
}

#[tokio::test]
async fn one_batch_is_ordered_without_dangling_references() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut s = fixture.subscribe("g1").await;
    let first = s.settle().await;
    let kinds: Vec<&str> = first.iter().map(|l| l.split(' ').next().unwrap()).collect();
    let all: Vec<String> = ResourceKind::ALL
        .iter()
        // The log omits manifests.
        .filter(|kind| **kind != ResourceKind::Manifest)
        .map(|kind| format!("{kind:?}"))
        .collect();
    assert_eq!(kinds, all, "parents first");
    let mut ann = fixture.admin("ann").await;
    ann.must_apply(
        "alpha",
        &[
            &service(1, "c", 3),
            &pod(1, "c-0", "c", "n1", 3, true),
            &route("r", "a", &[("c", 1)]),
        ],
    )
    .await;
    let added = s.settle().await;
    // A rule is named after its route, its parent Service and its position in the route.
    assert_eq!(
        added,
        [
            "Service +alpha/shop/c",
            "Workload +alpha/shop/c-0",
            "Route +alpha/HTTPRoute/shop/r/a.0"
        ]
        .map(String::from),
        "{added:?}"
    );
    let all = [
        ("httproute", "shop", "r"),
        ("pod", "shop", "c-0"),
        ("svc", "shop", "c"),
    ];
    assert!(ann.delete("alpha", &all, false).await.unwrap().accepted);
    let gone = s.settle().await;
    assert_eq!(
        gone,
        [
            "Route -alpha/HTTPRoute/shop/r/a.0",
            "Workload -alpha/shop/c-0",
            "Service -alpha/shop/c"
        ]
        .map(String::from),
        "{gone:?}"
    );
}

#[tokio::test]
async fn a_reconnect_brings_only_changes_even_after_a_restart() {
    let mut fixture = ControllerFixture::two_tenants().await;
    let mut s = fixture.subscribe("g1").await;
    s.settle().await;
    let (held, generation) = (s.resources.clone(), s.generation);
    drop(s);
    fixture
        .admin("ann")
        .await
        .must_apply("alpha", &[&route("r", "a", &[("b", 1)])])
        .await;
    fixture.stop().await;
    fixture.start().await;
    let mut s = ManualSubscriber::open(fixture.channel().await, "g1", held).await;
    let lines: Vec<String> = s
        .settle()
        .await
        .into_iter()
        .filter(|l| l.contains(' '))
        .collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].starts_with("Route +"), "{lines:?}");
    assert!(
        s.generation > generation,
        "generations go on across a restart"
    );
}

#[tokio::test]
async fn a_nack_carries_its_reason_and_blocks_no_other() {
    let fixture = ControllerFixture::two_tenants().await;
    let (mut root, mut ann) = (fixture.admin("root").await, fixture.admin("ann").await);
    let mut s = fixture.subscribe("g1").await;
    s.settle().await;
    s.refuses.insert("alpha/shop/c".into());
    ann.must_apply("alpha", &[&service(1, "c", 3), &service(1, "d", 4)])
        .await;
    s.settle().await;
    assert!(
        s.has(ResourceKind::Service, "alpha/shop/d")
            && !s.has(ResourceKind::Service, "alpha/shop/c")
    );
    let row = root.subscriber("g1").await;
    assert_eq!(
        // 1.2.3 is the version that the fixture's subscribers report.
        (row.nack.as_str(), row.version.as_str()),
        ("alpha/shop/c is not good", "1.2.3")
    );
    assert!(
        row.nacks >= 1 && row.generation_acked < row.generation_wanted,
        "{row:?}"
    );
    let seen_by_tenant = ann.subscriber("g1").await;
    assert_eq!(
        seen_by_tenant.nack, "Service alpha/shop/c: alpha/shop/c is not good",
        "a tenant sees only its own refusals"
    );
    assert!(
        fixture
            .metric("canal_controller_nacks_total{type=\"Service\"}")
            .await
            >= 1.0
    );

    ann.must_apply("alpha", &[&service(1, "e", 5)]).await;
    assert_eq!(
        s.settle().await,
        ["Service +alpha/shop/e"],
        "the refused one is not sent again, others are"
    );
    s.refuses.clear();
    // Another address, so that the resource differs from the refused one.
    ann.must_apply("alpha", &[&service(1, "c", 33)]).await;
    assert_eq!(s.settle().await, ["Service +alpha/shop/c"]);
    assert_eq!(root.subscriber("g1").await.nack, "");
    root.converged().await;
}

#[tokio::test]
async fn a_thousand_changes_converge_in_few_messages() {
    let fixture = ControllerFixture::two_tenants().await;
    let (mut root, mut ann) = (fixture.admin("root").await, fixture.admin("ann").await);
    ann.must_apply("alpha", &[&route("r", "a", &[("a", 0), ("b", 100)])])
        .await;
    let mut slow = fixture.subscribe("g1").await;
    slow.settle().await;
    let before = root.subscriber("g1").await.responses_sent;
    let mut last = 0;
    let begun = Instant::now();
    for i in 1..=1000u32 {
        let generation = ann
            // The sum of the weights is always 1,000, and each change differs from the one before.
            .must_apply("alpha", &[&route("r", "a", &[("a", i), ("b", 1000 - i)])])
            .await;
        assert!(generation > last, "{generation} after {last}");
        last = generation;
        // The subscriber answers one message in fifty changes: the rest must gather, not queue.
        if i % 50 == 0
            && let Some(response) = slow.next(Duration::from_millis(0)).await
        {
            slow.answer(response).await;
        }
    }
    let took = begun.elapsed();
    slow.settle().await;
    let status = root.converged().await;
    let row = status
        .subscribers
        .into_iter()
        .find(|s| s.name == "g1")
        .unwrap();
    assert_eq!((row.generation_wanted, row.generation_acked), (last, last));
    // 20 responses are acknowledged during the changes; the other 10 leave a margin for the end.
    assert!(
        row.responses_sent - before <= 30,
        "{} messages for 1000 changes",
        row.responses_sent - before
    );
    let weights = slow.resources.values().find_map(|(_, r)| match r {
        Resource::Route(r) => match &r.action {
            RouteAction::Split(b) => Some(b.iter().map(|b| b.weight).collect::<Vec<_>>()),
            RouteAction::Answer(_) | RouteAction::Refuse { .. } => None,
        },
        _ => None,
    });
    assert_eq!(weights, Some(vec![1000, 0]), "the newest state");
    println!(
        "1000 changes in {took:?}, {} messages",
        row.responses_sent - before
    );
}

#[tokio::test]
async fn a_stuck_subscriber_delays_no_other() {
    let fixture = ControllerFixture::two_tenants().await;
    let (mut root, mut ann) = (fixture.admin("root").await, fixture.admin("ann").await);
    // These subscribers neither read nor answer, and their connections stay open.
    let _stuck: Vec<ManualSubscriber> =
        vec![fixture.subscribe("n1").await, fixture.subscribe("g1").await];
    let mut quick = fixture.subscribe("n2").await;
    quick.settle().await;
    let mut worst = Duration::ZERO;
    // Fewer than the 64 responses that may wait for a stuck stream (`PENDING_MAX`); the number was
    // chosen.
    for i in 0..50u8 {
        let name = format!("s{i}");
        let begun = Instant::now();
        // The fixture's own Services have the numbers below 10.
        ann.must_apply("alpha", &[&service(1, &name, 10 + i)]).await;
        quick
            .until(&name, |held| {
                held.contains_key(&(ResourceKind::Service, format!("alpha/shop/{name}")))
            })
            .await;
        worst = worst.max(begun.elapsed());
    }
    assert_time(
        "longest time of a change to a subscriber beside a stuck one",
        worst,
        // A quiet machine needs a hundredth of it (docs/timing.md).
        Duration::from_secs(1),
    );
    let rows: BTreeMap<String, bool> = root
        .status()
        .await
        .subscribers
        .into_iter()
        .map(|s| (s.name.clone(), s.generation_acked >= s.generation_wanted))
        .collect();
    assert_eq!(
        rows,
        [
            ("n1".into(), false),
            ("n2".into(), true),
            ("g1".into(), false)
        ]
        .into()
    );
    assert!(fixture.metric("canal_controller_unacked_seconds_max").await > 0.0);
}

/// Number of pods in the test below. They are on one other node, so that a change on n1 stands
/// alone.
const FLEET: u16 = 10_000;

#[tokio::test]
async fn one_pod_among_ten_thousand_is_one_small_message() {
    let mut all = vec![tenant("alpha", 1)];
    all.extend((0..FLEET).map(|i| pod(1, &format!("p{i}"), "a", "n9", 100 + i, true)));
    let fixture = ControllerFixture::with(ControllerLimits::default(), |config| {
        std::fs::create_dir(config.join("alpha")).unwrap();
        std::fs::write(config.join("alpha/all.yaml"), all.join("---\n")).unwrap();
    })
    .await;
    let relay = Relay::to(fixture.controller().address()).await;
    let mut g1 = ManualSubscriber::open(
        fixture.channel_to(relay.address).await,
        "g1",
        BTreeMap::new(),
    )
    .await;
    g1.until("the fleet", |held| held.len() > usize::from(FLEET))
        .await;
    g1.settle().await;
    let (before, down) = (
        fixture
            .admin("root")
            .await
            .subscriber("g1")
            .await
            .bytes_sent,
        relay.down(),
    );

    let mut root = fixture.admin("root").await;
    // The pod's address is above those of the fleet.
    let begun = Instant::now();
    root.must_apply("alpha", &[&pod(1, "new", "a", "n1", 30_000, true)])
        .await;
    g1.until("the pod", |held| {
        held.contains_key(&(ResourceKind::Workload, "alpha/shop/new".into()))
    })
    .await;
    let took = begun.elapsed();
    assert_eq!(
        g1.log.last().map(String::as_str),
        Some("Workload +alpha/shop/new")
    );
    g1.settle().await;
    let (sent, wire) = (
        root.subscriber("g1").await.bytes_sent - before,
        relay.down() - down,
    );
    // 2 KiB hold one Workload with its envelope, and are far less than 10,000 of them.
    assert!(
        sent <= 2048 && wire <= 2048,
        "{sent} bytes of message, {wire} bytes on the wire"
    );
    let compile = fixture.metric("canal_controller_compile_seconds_sum").await
        / fixture
            .metric("canal_controller_compile_seconds_count")
            .await;
    println!(
        "{sent} bytes of message, {wire} on the wire with TLS and HTTP/2, {took:?} from apply to receipt, {compile:.4} s per compile"
    );
}

#[tokio::test]
async fn a_half_open_connection_is_found() {
    let (interval, timeout) = (
        slack() * Duration::from_millis(100),
        slack() * Duration::from_millis(500),
    );
    let limits = ControllerLimits {
        ping: (interval, timeout),
        ..ControllerLimits::default()
    };
    let fixture = ControllerFixture::with(limits, |_| {}).await;
    let relay = Relay::to(fixture.controller().address()).await;
    let mut s = ManualSubscriber::open(
        fixture.channel_to(relay.address).await,
        "n1",
        BTreeMap::new(),
    )
    .await;
    s.settle().await;
    let mut root = fixture.admin("root").await;
    tokio::time::sleep(2 * interval + timeout).await;
    assert!(
        root.subscriber("n1").await.connected,
        "one that answers PINGs stays, however quiet"
    );
    relay.freeze();
    let until = Instant::now() + wait_limit();
    while root.subscriber("n1").await.connected {
        assert!(Instant::now() < until, "a frozen path is not noticed");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A TCP relay that counts the bytes to the subscriber, and can stop forwarding.
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
        Self {
            address,
            frozen,
            down,
        }
    }

    fn freeze(&self) {
        self.frozen
            .store(true, std::sync::atomic::Ordering::Relaxed);
    }

    fn down(&self) -> u64 {
        self.down.load(std::sync::atomic::Ordering::Relaxed)
    }
}

#[tokio::test]
async fn principals_are_followed_and_a_revoked_token_ends_its_stream() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut n1 = fixture.subscribe("n1").await;
    let mut n2 = fixture.subscribe("n2").await;
    n1.settle().await;
    n2.settle().await;
    let path = &fixture.config.principals;
    std::fs::write(path, "- {this is: not a list of principals").unwrap();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    fixture
        .admin("root")
        .await
        .must_apply("alpha", &[&service(1, "c", 3)])
        .await;
    n1.until("c", |h| {
        h.contains_key(&(ResourceKind::Service, "alpha/shop/c".into()))
    })
    .await;
    let list = [
        ("n2", "kind: node, name: n2, tenant: alpha, az: az2"),
        ("fresh", "kind: node, name: n1, tenant: alpha, az: az1"),
    ];
    fixture::write_principals(path, &list);
    let ended = n1.end().await;
    assert_eq!(ended.code(), tonic::Code::Unauthenticated, "{ended}");
    let mut fresh = fixture.subscribe("fresh").await;
    fresh.settle().await;
    assert!(fresh.has(ResourceKind::Tenant, "alpha"));
    assert_eq!(
        n2.settle().await.len(),
        1,
        "n2 continues; it had c to receive"
    );
}

#[tokio::test]
async fn a_stream_names_the_store_first_and_a_lost_store_is_another_with_other_ids() {
    let mut fixture = ControllerFixture::two_tenants().await;
    let ids = |s: &ManualSubscriber| -> Vec<u32> {
        let services = s.resources.values().filter_map(|(_, r)| match r {
            Resource::Service(service) => Some(service.id.get()),
            _ => None,
        });
        services.collect()
    };
    let mut found = Vec::new();
    for _ in 0..2 {
        let mut s = fixture.subscribe("n1").await;
        let first = s.next(wait_limit()).await.unwrap();
        let store = canal_wire::southbound::store_of(&first)
            .unwrap()
            .expect("the first response names the store");
        s.answer(first).await;
        let second = s.next(wait_limit()).await.unwrap();
        assert_eq!(second.control_plane, None, "once is enough");
        s.answer(second).await;
        s.until("the services", |h| {
            h.contains_key(&(ResourceKind::Service, "alpha/shop/b".into()))
        })
        .await;
        assert_eq!(
            fixture.admin("ann").await.status().await.store,
            store.to_string()
        );
        found.push((store, ids(&s)));
        drop(s);
        fixture.stop().await;
        std::fs::remove_dir_all(&fixture.config.data_dir).unwrap();
        fixture.start().await;
    }
    assert_ne!(found[0].0, found[1].0);
    assert!(
        found[0].1.len() == 2 && found[0].1.iter().all(|id| !found[1].1.contains(id)),
        "{found:?}"
    );
}
