//! The fleet over the wire: replicas and edges report and subscribe as data planes do; what they are told is judged.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::rig;
use crate::rig::{PATIENCE, Rig, Subscriber, pod, service, with_token};
use canal_hub::{FleetTimes, Limits};
use canal_model::program::{BucketTable, GatewayAddress, Kind, Resource};
use canal_wire::fleet::fleet_client::FleetClient;
use canal_wire::fleet::{EdgeOrders, EdgeState, Owned, ReplicaOrders, ReplicaState, Seen};
use tonic::transport::Channel;
use tonic::{Code, Status};

const PRINCIPALS: [(&str, &str); 11] = [
    ("r1", "kind: gateway, name: r1, az: az1, backend: b1"),
    ("r2", "kind: gateway, name: r2, az: az1, backend: b1"),
    ("r3", "kind: gateway, name: r3, az: az1, backend: b2"),
    ("r4", "kind: gateway, name: r4, az: az2, backend: b3"),
    ("e1", "kind: edge, name: e1, az: az1"),
    ("e1b", "kind: edge, name: e1b, az: az1"),
    ("e2", "kind: edge, name: e2, az: az2"),
    ("n1", "kind: node, name: n1, tenant: alpha, az: az1"),
    ("m1", "kind: node, name: m1, tenant: beta, az: az1"),
    ("root", "kind: operator, name: root"),
    ("ann", "kind: operator, name: ann, tenant: alpha"),
];

fn tier_tenant(name: &str, vni: u8) -> String {
    let object = format!(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: {name}}}\nspec: {{vni: {vni}, trustDomain: {name}.example, \
         podCidrs: [10.1.0.0/17], gatewayCidrs: [10.1.192.0/18]}}\n"
    );
    [object, service(1, "a", 1), pod(1, "a-0", "a", "n1", 1, true)].join("---\n")
}

fn times() -> FleetTimes {
    let ms = Duration::from_millis;
    FleetTimes { edge_silent: ms(600), replica_silent: ms(800), gone: ms(1200), grace: ms(1500), lag: ms(1500) }
}

/// A controller with tenants alpha and beta on the tier, at the same addresses.
async fn tier() -> Rig {
    let limits = Limits { fleet: times(), ..Limits::default() };
    let rig = Rig::with(limits, |config| {
        for (name, vni) in [("alpha", 1), ("beta", 2)] {
            std::fs::create_dir(config.join(name)).unwrap();
            std::fs::write(config.join(name).join("all.yaml"), tier_tenant(name, vni)).unwrap();
        }
    });
    let rig = rig.await;
    rig::write_principals(&rig.config.principals, &PRINCIPALS);
    let until = Instant::now() + PATIENCE;
    while rig.metric("canal_controller_generation").await < 1.0 || !knows(&rig, "e1").await {
        assert!(Instant::now() < until, "the principals were not read again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    rig
}

async fn knows(rig: &Rig, token: &'static str) -> bool {
    Subscriber::try_open(rig.channel().await, token, BTreeMap::new()).await.is_ok()
}

/// A replica as a data plane would be: it subscribes and reports.
struct Ship {
    token: &'static str,
    client: FleetClient<Channel>,
    south: Subscriber,
    state: ReplicaState,
}

impl Ship {
    async fn launch(rig: &Rig, token: &'static str, backend: &str, az: &str, underlay: &str) -> Self {
        let client = FleetClient::new(rig.channel().await);
        let state = ReplicaState { backend: backend.into(), az: az.into(), underlay: underlay.into(), ..ReplicaState::default() };
        Self { token, client, south: rig.subscribe(token).await, state }
    }

    async fn report(&mut self) -> Result<ReplicaOrders, Status> {
        self.state.generation = self.south.content;
        self.client.replica_report(with_token(self.state.clone(), self.token)).await.map(tonic::Response::into_inner)
    }

    /// The same process after its controller was restarted: it holds what it held.
    async fn reconnect(&mut self, rig: &Rig) {
        let (held, content) = (self.south.held.clone(), self.south.content);
        self.client = FleetClient::new(rig.channel().await);
        self.south = Subscriber::open(rig.channel().await, self.token, held).await;
        self.south.content = content;
    }

    /// Takes what comes, and reports.
    async fn turn(&mut self) -> ReplicaOrders {
        self.south.drain(Duration::from_millis(10)).await;
        self.report().await.unwrap()
    }
}

/// An edge as a data plane would be.
struct Rim {
    token: &'static str,
    client: FleetClient<Channel>,
    south: Subscriber,
    state: EdgeState,
}

impl Rim {
    async fn launch(rig: &Rig, token: &'static str, az: &str, underlay: &str) -> Self {
        let client = FleetClient::new(rig.channel().await);
        let state = EdgeState { az: az.into(), underlay: underlay.into(), ..EdgeState::default() };
        Self { token, client, south: rig.subscribe(token).await, state }
    }

    fn sees(&mut self, seen: &[(&str, bool)]) {
        self.state.seen = seen.iter().map(|(replica, up)| Seen { replica: replica.to_string(), up: *up }).collect();
    }

    async fn report(&mut self) -> Result<EdgeOrders, Status> {
        self.state.generation = self.south.generation;
        self.client.edge_report(with_token(self.state.clone(), self.token)).await.map(tonic::Response::into_inner)
    }

    async fn turn(&mut self) -> EdgeOrders {
        self.south.drain(Duration::from_millis(10)).await;
        self.report().await.unwrap()
    }
}

fn tables(south: &Subscriber) -> BTreeMap<String, BucketTable> {
    let of = |(key, (_, resource)): (&(Kind, String), &(String, Resource))| match resource {
        Resource::Table(t) => Some((key.1.clone(), t.clone())),
        _ => None,
    };
    south.held.iter().filter_map(of).collect()
}

fn addresses(south: &Subscriber) -> BTreeMap<String, GatewayAddress> {
    let of = |(key, (_, resource)): (&(Kind, String), &(String, Resource))| match resource {
        Resource::Address(a) => Some((key.1.clone(), a.clone())),
        _ => None,
    };
    south.held.iter().filter_map(of).collect()
}

fn heads(table: &BucketTable) -> BTreeSet<u16> {
    table.chains.iter().filter_map(|c| c.first()).map(|n| n.get()).collect()
}

/// Lets everybody take and report until `done` holds.
async fn sail(ships: &mut [&mut Ship], rims: &mut [&mut Rim], what: &str, done: impl Fn(&[&mut Ship], &[&mut Rim]) -> bool) {
    let until = Instant::now() + PATIENCE;
    while !done(ships, rims) {
        assert!(Instant::now() < until, "{what} did not come to be");
        for ship in ships.iter_mut() {
            ship.turn().await;
        }
        for rim in rims.iter_mut() {
            rim.turn().await;
        }
    }
}

#[tokio::test]
async fn a_registered_replica_and_its_edge_get_tables() {
    let rig = tier().await;
    let mut r1 = Ship::launch(&rig, "r1", "b1", "az1", "250.1.0.3").await;
    let mut r2 = Ship::launch(&rig, "r2", "b1", "az1", "250.1.0.4").await;
    let mut e1 = Rim::launch(&rig, "e1", "az1", "250.1.0.2").await;
    let mut node = rig.subscribe("n1").await;
    assert_eq!(r1.turn().await.number, 1);
    assert_eq!(r2.turn().await.number, 2);
    e1.sees(&[("r1", true), ("r2", true)]);
    let has_all = |south: &Subscriber| {
        let t = tables(south);
        t.len() == 4 && t.values().all(|t| heads(t) == [1, 2].into())
    };
    sail(&mut [&mut r1, &mut r2], &mut [&mut e1], "tables with both heads", |ships, rims| {
        ships.iter().all(|s| has_all(&s.south)) && rims.iter().all(|r| has_all(&r.south) && addresses(&r.south).values().all(|a| a.open))
    })
    .await;
    let own = addresses(&e1.south);
    let names: Vec<&str> = own.keys().map(String::as_str).collect();
    let both = |t: &str| [format!("{t}/canal-system/gateway@az1"), format!("{t}/shop/a@az1")];
    assert_eq!(names, [both("alpha"), both("beta")].concat());
    for tenant in ["alpha", "beta"] {
        assert_eq!(own[&format!("{tenant}/canal-system/gateway@az1")].addresses, ["10.1.200.1".parse::<std::net::IpAddr>().unwrap()]);
    }
    assert_eq!(own.values().map(|a| a.id).collect::<BTreeSet<_>>().len(), 4, "ids are of one space");
    node.settle().await;
    assert!(addresses(&node).keys().all(|n| n.starts_with("alpha/")) && addresses(&node).len() == 2, "{:?}", node.names());
    assert!(tables(&node).is_empty() && !node.names().iter().any(|n| n.starts_with("Replica")), "{:?}", node.names());
    let orders = r1.turn().await;
    assert_eq!((orders.edge.as_str(), orders.drain), ("250.1.0.2", false));
    assert_eq!(orders.hosts, ["250.1.0.2", "250.1.0.3", "250.1.0.4"]);
    assert!(!e1.south.names().iter().any(|n| n.starts_with("Service") || n.starts_with("Workload") || n.starts_with("Route")));
}

#[tokio::test]
async fn numbers_and_tables_survive_restarts_and_come_back_only_after_forgetting() {
    let mut rig = tier().await;
    let mut r1 = Ship::launch(&rig, "r1", "b1", "az1", "250.1.0.3").await;
    let mut r3 = Ship::launch(&rig, "r3", "b2", "az1", "250.1.0.5").await;
    let mut e1 = Rim::launch(&rig, "e1", "az1", "250.1.0.2").await;
    e1.sees(&[("r1", true), ("r3", true)]);
    let whole = |s: &Subscriber| tables(s).len() == 4 && tables(s).values().all(|t| heads(t) == [1, 2].into());
    sail(&mut [&mut r1, &mut r3], &mut [&mut e1], "tables", |_, rims| whole(&rims[0].south)).await;
    let mut root = rig.admin("root").await;
    wait_quiet(&mut [&mut r1, &mut r3], &mut [&mut e1], &mut root).await;
    let before = (tables(&e1.south), addresses(&e1.south), root.fleet().await.unwrap().plan);
    rig.stop().await;
    rig.start().await;
    let mut root = rig.admin("root").await;
    let mut fresh = rig.subscribe("e1").await;
    fresh.settle().await;
    assert_eq!((tables(&fresh), addresses(&fresh), root.fleet().await.unwrap().plan), before, "a restart changes nothing");
    // They come back, each at its own time, and still nothing changes.
    drop(fresh);
    let mut e1 = Rim::launch(&rig, "e1", "az1", "250.1.0.2").await;
    e1.sees(&[("r1", true), ("r3", true)]);
    r3.reconnect(&rig).await;
    assert_eq!(r3.turn().await.number, 2);
    r1.reconnect(&rig).await;
    assert_eq!(r1.turn().await.number, 1);
    let until = Instant::now() + Duration::from_millis(2500);
    while Instant::now() < until {
        r1.turn().await;
        r3.turn().await;
        e1.turn().await;
    }
    assert_eq!((tables(&e1.south), addresses(&e1.south)), (before.0, before.1));
    // Nothing differed for them, so that they report the old generation; they are as good as before, and can drain.
    let states = root.fleet().await.unwrap().replicas.into_iter().map(|r| r.state).collect::<Vec<_>>();
    assert_eq!(states, ["active", "active"]);
    root.drain("r1").await.unwrap();
    let without = |s: &Subscriber| tables(s).values().all(|t| t.chains.iter().flatten().all(|n| n.get() == 2));
    sail(&mut [&mut r1, &mut r3], &mut [&mut e1], "tables without r1", |_, rims| without(&rims[0].south)).await;

    // r1 leaves; its number is free once no table has it, and the next newcomer gets it.
    r1.state.leaving = true;
    r1.report().await.unwrap();
    e1.sees(&[("r1", false), ("r3", true)]);
    let only = |s: &Subscriber| tables(s).values().all(|t| t.chains.iter().flatten().all(|n| n.get() == 2));
    sail(&mut [&mut r3], &mut [&mut e1], "tables without r1", |_, rims| only(&rims[0].south)).await;
    let until = Instant::now() + PATIENCE;
    while root.fleet().await.unwrap().replicas.iter().any(|r| r.name == "r1") {
        assert!(Instant::now() < until, "r1 is not forgotten");
        r3.turn().await;
        e1.turn().await;
    }
    let mut r2 = Ship::launch(&rig, "r2", "b1", "az1", "250.1.0.4").await;
    assert_eq!(r2.turn().await.number, 1);
}

/// Lets everybody report until nothing is in motion.
async fn wait_quiet(ships: &mut [&mut Ship], rims: &mut [&mut Rim], root: &mut rig::Operator) {
    let until = Instant::now() + PATIENCE;
    let mut quiet = 0;
    while quiet < 3 {
        assert!(Instant::now() < until, "it does not come to rest: {:?}", root.fleet().await);
        for ship in ships.iter_mut() {
            ship.turn().await;
        }
        for rim in rims.iter_mut() {
            rim.turn().await;
        }
        let fleet = root.fleet().await.unwrap();
        assert_eq!(fleet.findings, [""; 0], "the linter agrees with the planner");
        quiet = if fleet.tables_waiting == 0 && fleet.services.iter().all(|s| !s.in_motion) { quiet + 1 } else { 0 };
    }
}

#[tokio::test]
async fn strangers_and_liars_are_refused_by_name() {
    let rig = tier().await;
    let mut r1 = Ship::launch(&rig, "r1", "b1", "az1", "250.1.0.3").await;
    r1.turn().await;
    let replica = |backend: &str, az: &str, underlay: &str| ReplicaState {
        backend: backend.into(),
        az: az.into(),
        underlay: underlay.into(),
        ..ReplicaState::default()
    };
    let many = ReplicaState {
        owned: (0..=canal_hub::OWNED_MAX).map(|i| Owned { service: i as u32 + 1, ..Owned::default() }).collect(),
        ..replica("b1", "az1", "250.1.0.3")
    };
    let cases = [
        ("nobody", replica("b1", "az1", "250.1.0.9"), Code::Unauthenticated, "unknown_token"),
        ("n1", replica("b1", "az1", "250.1.0.9"), Code::PermissionDenied, "not_a_replica"),
        ("e1", replica("b1", "az1", "250.1.0.9"), Code::PermissionDenied, "not_a_replica"),
        ("root", replica("b1", "az1", "250.1.0.9"), Code::PermissionDenied, "not_a_replica"),
        ("r2", replica("b2", "az1", "250.1.0.9"), Code::PermissionDenied, "backend"),
        ("r2", replica("b1", "az2", "250.2.0.9"), Code::PermissionDenied, "az"),
        ("r2", replica("b1", "az1", "10.1.0.9"), Code::InvalidArgument, "underlay"),
        ("r2", replica("b1", "az1", "250.9.0.9"), Code::InvalidArgument, "underlay"),
        ("r2", replica("b1", "az1", "250.0.0.9"), Code::InvalidArgument, "underlay"),
        ("r2", replica("b1", "az1", "here"), Code::InvalidArgument, "underlay"),
        ("r2", replica("b1", "az1", "250.1.0.3"), Code::FailedPrecondition, "underlay_taken"),
        ("r2", replica("b1", "az1", "250.2.0.3"), Code::FailedPrecondition, "az_number"),
        ("r4", replica("b3", "az2", "250.1.0.9"), Code::FailedPrecondition, "az_number_taken"),
        ("r1", replica("b1", "az1", "250.1.0.9"), Code::FailedPrecondition, "registered_otherwise"),
        ("r2", replica("B!", "az1", "250.1.0.9"), Code::InvalidArgument, "form"),
        ("r1", many, Code::InvalidArgument, "entries"),
    ];
    let mut client = FleetClient::new(rig.channel().await);
    let reasons: BTreeSet<&str> = cases.iter().map(|c| c.3).collect();
    for (token, state, code, reason) in cases {
        let refused = client.replica_report(with_token(state.clone(), token)).await.expect_err(reason);
        assert_eq!(refused.code(), code, "{token} {reason}: {refused}");
    }
    let edge = |az: &str, underlay: &str, n: usize| EdgeState {
        az: az.into(),
        underlay: underlay.into(),
        seen: (0..n).map(|i| Seen { replica: format!("r{i}"), up: true }).collect(),
        ..EdgeState::default()
    };
    client.edge_report(with_token(edge("az1", "250.1.0.2", 1), "e1")).await.unwrap();
    for (token, state, reason) in [
        ("r1", edge("az1", "250.1.0.9", 0), "not_an_edge"),
        ("e2", edge("az1", "250.1.0.9", 0), "az"),
        ("e1", edge("az1", "250.1.0.3", 0), "underlay_taken"),
        ("e1", edge("az1", "250.1.0.2", canal_hub::SEEN_MAX + 1), "entries"),
        ("e1b", edge("az1", "250.1.0.8", 0), "az_has_edge"),
    ] {
        client.edge_report(with_token(state, token)).await.expect_err(reason);
        let line = format!("canal_controller_fleet_reports_refused_total{{reason=\"{reason}\"}}");
        assert!(rig.metric(&line).await >= 1.0, "{line}");
    }
    for reason in reasons.into_iter().filter(|r| *r != "unknown_token") {
        let line = format!("canal_controller_fleet_reports_refused_total{{reason=\"{reason}\"}}");
        assert!(rig.metric(&line).await >= 1.0, "{line}");
    }
    assert_eq!(rig.admin("root").await.fleet().await.unwrap().replicas.len(), 1, "nobody got in");
}

#[tokio::test]
async fn a_replica_gets_sessions_only_once_it_knows_the_tenant() {
    let rig = tier().await;
    let mut r1 = Ship::launch(&rig, "r1", "b1", "az1", "250.1.0.3").await;
    let mut e1 = Rim::launch(&rig, "e1", "az1", "250.1.0.2").await;
    e1.sees(&[("r1", true), ("r2", true)]);
    let has = |s: &Subscriber, want: &[u16]| {
        tables(s).len() == 4 && tables(s).values().all(|t| heads(t) == want.iter().copied().collect::<BTreeSet<_>>())
    };
    sail(&mut [&mut r1], &mut [&mut e1], "tables", |_, rims| has(&rims[0].south, &[1])).await;
    // r2 reports but does not take what it is told: it joins, and no table has it.
    let mut r2 = Ship::launch(&rig, "r2", "b1", "az1", "250.1.0.4").await;
    for _ in 0..20 {
        r2.report().await.unwrap();
        r1.turn().await;
        e1.turn().await;
    }
    let mut root = rig.admin("root").await;
    let states = |f: &canal_wire::api::FleetResponse| f.replicas.iter().map(|r| format!("{} {}", r.name, r.state)).collect::<Vec<_>>();
    assert_eq!(states(&root.fleet().await.unwrap()), ["r1 active", "r2 joining"]);
    assert!(tables(&e1.south).values().all(|t| t.chains.iter().flatten().all(|n| n.get() == 1)), "{:?}", tables(&e1.south));
    sail(&mut [&mut r1, &mut r2], &mut [&mut e1], "both heads", |_, rims| has(&rims[0].south, &[1, 2])).await;
    // A new tenant: both know it before the edge is told of a table.
    let third = tier_tenant("gamma", 3).replace("n1", "g1");
    rig.write("gamma/all.yaml", &third);
    let until = Instant::now() + PATIENCE;
    // Turns, once the tables wait.
    let mut waited = 0;
    while waited < 20 {
        // Only r1 takes what it is told.
        r1.turn().await;
        r2.report().await.unwrap();
        e1.turn().await;
        assert!(!tables(&e1.south).keys().any(|n| n.starts_with("gamma")), "a table before both knew the tenant");
        let waits = r1.south.has(Kind::Service, "gamma/shop/a") && rig.metric("canal_controller_fleet_tables_waiting").await >= 1.0;
        waited += u32::from(waits);
        assert!(Instant::now() < until, "no table waits");
    }
    let done = |s: &Subscriber| tables(s).len() == 6 && tables(s).values().all(|t| heads(t) == [1, 2].into());
    sail(&mut [&mut r1, &mut r2], &mut [&mut e1], "gamma's tables", |_, rims| done(&rims[0].south)).await;
    wait_quiet(&mut [&mut r1, &mut r2], &mut [&mut e1], &mut root).await;
}

/// All buckets of every service that the replica knows of, as if it had a session in each.
fn owns_all(ship: &mut Ship) {
    let own = tables(&ship.south);
    ship.state.owned =
        own.values().map(|t| Owned { service: t.id.get(), table_version: t.version, buckets: vec![0xff; 16], sessions: 128 }).collect();
    ship.state.sessions = 128 * own.len() as u64;
}

#[tokio::test]
async fn a_draining_replica_keeps_what_it_owns_until_it_says_that_it_owns_nothing() {
    let rig = tier().await;
    let mut r1 = Ship::launch(&rig, "r1", "b1", "az1", "250.1.0.3").await;
    let mut r2 = Ship::launch(&rig, "r2", "b1", "az1", "250.1.0.4").await;
    let mut e1 = Rim::launch(&rig, "e1", "az1", "250.1.0.2").await;
    e1.sees(&[("r1", true), ("r2", true)]);
    let both = |s: &Subscriber| tables(s).len() == 4 && tables(s).values().all(|t| heads(t) == [1, 2].into());
    sail(&mut [&mut r1, &mut r2], &mut [&mut e1], "tables", |_, rims| both(&rims[0].south)).await;
    let headed = |s: &Subscriber| -> Vec<(String, usize)> {
        let of = |(name, t): (String, BucketTable)| {
            (0..t.chains.len()).filter(|b| t.chains[*b][0].get() == 1).map(|b| (name.clone(), b)).collect::<Vec<_>>()
        };
        tables(s).into_iter().flat_map(of).collect()
    };
    let owned = headed(&e1.south);
    assert!(owned.len() > 100, "{}", owned.len());
    let mut root = rig.admin("root").await;
    assert!(rig.admin("ann").await.drain("r1").await.is_err_and(|s| s.code() == Code::PermissionDenied), "the tier is the provider's");
    assert!(root.drain("r9").await.is_err_and(|s| s.code() == Code::NotFound));
    owns_all(&mut r1);
    root.drain("r1").await.unwrap();
    let until = Instant::now() + Duration::from_millis(1200);
    while Instant::now() < until {
        owns_all(&mut r1);
        let orders = r1.turn().await;
        assert!(orders.drain);
        r2.turn().await;
        e1.turn().await;
        let now = tables(&e1.south);
        let kept = |(name, bucket): &(String, usize)| now[name].chains[*bucket].iter().any(|n| n.get() == 1);
        assert!(owned.iter().all(kept), "an owner was dropped");
    }
    assert!(headed(&e1.south).is_empty(), "it is no head any more");
    assert_eq!(r1.turn().await.next_ms, 200, "tables are in motion");
    let row = root.fleet().await.unwrap().replicas.remove(0);
    assert_eq!((row.state.as_str(), row.drain_ordered, row.heads, row.up), ("draining", true, 0, true));
    assert!(row.owners as usize >= owned.len() && row.sessions > 0, "{row:?}");
    assert!(rig.metric("canal_controller_fleet_owners_kept_total").await >= owned.len() as f64);
    // Its sessions end.
    (r1.state.owned, r1.state.sessions) = (Vec::new(), 0);
    let free = |s: &Subscriber| tables(s).values().all(|t| t.chains.iter().flatten().all(|n| n.get() == 2));
    sail(&mut [&mut r1, &mut r2], &mut [&mut e1], "chains without r1", |_, rims| free(&rims[0].south)).await;
    // Back again.
    root.undrain("r1").await.unwrap();
    sail(&mut [&mut r1, &mut r2], &mut [&mut e1], "both heads again", |_, rims| both(&rims[0].south)).await;
    wait_quiet(&mut [&mut r1, &mut r2], &mut [&mut e1], &mut root).await;
}

#[tokio::test]
async fn a_silent_edge_closes_its_az_and_a_dead_replica_is_left_in_bounded_time() {
    let rig = tier().await;
    let mut r1 = Ship::launch(&rig, "r1", "b1", "az1", "250.1.0.3").await;
    let mut r4 = Ship::launch(&rig, "r4", "b3", "az2", "250.2.0.3").await;
    let mut e1 = Rim::launch(&rig, "e1", "az1", "250.1.0.2").await;
    let mut e2 = Rim::launch(&rig, "e2", "az2", "250.2.0.2").await;
    let mut node = rig.subscribe("n1").await;
    e1.sees(&[("r1", true)]);
    e2.sees(&[("r4", true)]);
    let open = |s: &Subscriber| addresses(s).len() == 2 && addresses(s).values().all(|a| a.open);
    let all_open = |ships: &[&mut Ship], rims: &[&mut Rim]| {
        rims.iter().all(|r| addresses(&r.south).len() == 4 && addresses(&r.south).values().all(|a| a.open)) && !ships.is_empty()
    };
    sail(&mut [&mut r1, &mut r4], &mut [&mut e1, &mut e2], "open addresses", all_open).await;
    node.settle().await;
    let names: BTreeSet<String> = addresses(&node).into_keys().collect();
    let want = ["alpha/canal-system/gateway@az1", "alpha/canal-system/gateway@az2", "alpha/shop/a@az1", "alpha/shop/a@az2"];
    assert_eq!(names, want.map(String::from).into());
    // Foreign tables reach nobody.
    assert!(tables(&e1.south).keys().all(|n| n.ends_with("@az1")) && tables(&r1.south).keys().all(|n| n.ends_with("@az1")));
    assert!(tables(&e2.south).keys().all(|n| n.ends_with("@az2")) && tables(&r4.south).keys().all(|n| n.ends_with("@az2")));
    // The edge of az2 falls silent.
    let begun = Instant::now();
    let closed = loop {
        r1.turn().await;
        r4.turn().await;
        e1.turn().await;
        node.drain(Duration::from_millis(5)).await;
        let shut: Vec<bool> = addresses(&node).iter().filter(|(n, _)| n.ends_with("@az2")).map(|(_, a)| !a.open).collect();
        if shut == [true, true] {
            break begun.elapsed();
        }
        assert!(begun.elapsed() < Duration::from_secs(3), "az2 stays open");
    };
    assert!(closed >= Duration::from_millis(300) && closed < Duration::from_millis(1600), "{closed:?}");
    assert!(addresses(&node).iter().filter(|(n, _)| n.ends_with("@az1")).all(|(_, a)| a.open));
    assert!(rig.metric("canal_controller_fleet_azs_closed_total").await >= 1.0);
    // It is back, and says that its replica is dead.
    e2.sees(&[("r4", false)]);
    let down = |s: &Subscriber| s.held.iter().any(|((_, n), (_, r))| n == "r4" && matches!(r, Resource::Replica(r) if !r.up));
    sail(&mut [&mut r1, &mut r4], &mut [&mut e1, &mut e2], "r4 down", |ships, _| down(&ships[0].south)).await;
    e2.sees(&[("r4", true)]);
    sail(&mut [&mut r1, &mut r4], &mut [&mut e1, &mut e2], "open addresses again", all_open).await;
    node.settle().await;
    assert!(open(&node) || addresses(&node).values().all(|a| a.open));
    // r4's process is gone without a word: after the silence, and by its edge's word, so is the replica.
    e2.sees(&[("r4", false)]);
    let until = Instant::now() + PATIENCE;
    let mut root = rig.admin("root").await;
    while root.fleet().await.unwrap().replicas.iter().any(|r| r.name == "r4") {
        assert!(Instant::now() < until, "r4 is not forgotten: {:?}", root.fleet().await);
        r1.turn().await;
        e1.turn().await;
        e2.turn().await;
    }
    assert!(root.forget("r1").await.is_err_and(|s| s.code() == Code::FailedPrecondition), "it is alive");
}

#[tokio::test]
async fn a_gateway_has_the_identity_of_tenants_on_its_backend_only() {
    let rig = tier().await;
    let name = canal_model::identity::gateway_identity("alpha.example".parse().unwrap()).to_string();
    let refused = rig.certificate("r1", Some(&name), None).await.expect_err("not registered");
    assert_eq!(refused.code(), Code::PermissionDenied);
    let mut r1 = Ship::launch(&rig, "r1", "b1", "az1", "250.1.0.3").await;
    let mut e1 = Rim::launch(&rig, "e1", "az1", "250.1.0.2").await;
    e1.sees(&[("r1", true)]);
    sail(&mut [&mut r1], &mut [&mut e1], "tables", |ships, _| tables(&ships[0].south).len() == 4).await;
    rig.certificate("r1", Some(&name), None).await.unwrap();
    for token in ["r4", "e1"] {
        let refused = rig.certificate(token, Some(&name), None).await.expect_err(token);
        assert_eq!(refused.code(), Code::PermissionDenied, "{token}");
    }
}

#[tokio::test]
async fn a_tenants_operator_sees_its_own_services_and_nothing_of_others() {
    let rig = tier().await;
    let mut r1 = Ship::launch(&rig, "r1", "b1", "az1", "250.1.0.3").await;
    let mut e1 = Rim::launch(&rig, "e1", "az1", "250.1.0.2").await;
    e1.sees(&[("r1", true)]);
    let served = |s: &Subscriber| tables(s).len() == 4 && tables(s).values().all(|t| heads(t) == [1].into());
    sail(&mut [&mut r1], &mut [&mut e1], "tables", |_, rims| served(&rims[0].south)).await;
    let (mut root, mut ann) = (rig.admin("root").await, rig.admin("ann").await);
    let own = ann.fleet().await.unwrap();
    assert!(own.replicas.is_empty() && own.edges.is_empty() && own.blast.is_empty(), "{own:?}");
    assert_eq!(own.services.iter().map(|s| s.service.as_str()).collect::<Vec<_>>(), ["alpha/canal-system/gateway", "alpha/shop/a"]);
    assert!(!format!("{own:?}").contains("beta"), "{own:?}");
    let all = root.fleet().await.unwrap();
    assert_eq!((all.services.len(), all.replicas.len(), all.edges.len(), all.blast.len()), (4, 1, 1, 1));
    let why = root.explain("beta/shop/a").await.unwrap();
    let seats: Vec<(String, u32)> = why.tables[0].seats.iter().map(|s| (s.replica.clone(), s.heads)).collect();
    assert_eq!((why.tables.len(), seats), (1, vec![("r1".to_owned(), 128)]));
    assert!(why.notes.iter().any(|n| n.contains("add backends")), "{:?}", why.notes);
    assert!(ann.explain("beta/shop/a").await.is_err_and(|s| s.code() == Code::PermissionDenied));
    assert!(ann.explain("alpha/shop/none").await.is_err_and(|s| s.code() == Code::NotFound));
    assert!(ann.explain("alpha/shop/a").await.unwrap().tables[0].seats.is_empty(), "replicas are the provider's");
}
