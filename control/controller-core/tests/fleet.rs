//! Tests of the fleet over the wire: fake replicas and edges report and subscribe as data planes
//! do. The tests check what they receive.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::fixture::{ControllerFixture, ManualSubscriber, Operator, wait_limit, with_token};
use canal_model::program::{BucketTable, Resource, ResourceKind};
use canal_timing::{assert_time, slack};
use canal_wire::fleet::fleet_client::FleetClient;
use canal_wire::fleet::{
    EdgeReportRequest, FoundSession, FoundSessions, ReplicaProbe, SessionPath, SessionQuery,
};
use tonic::Code;
use tonic::transport::Channel;

mod data_planes;
mod misnamed_replicas;
mod tier;

use data_planes::{
    FakeEdge, FakeReplica, addresses, heads, owns_all, report_until, tables, wait_quiet,
};
use misnamed_replicas::misnamed_replicas;
use tier::{patient_times, tier, tier_tenant, tier_with, times};

#[tokio::test]
async fn a_registered_replica_and_its_edge_get_tables() {
    let fixture = tier().await;
    let mut r1 = FakeReplica::launch(&fixture, "r1", "b1", "az1", "250.1.0.3").await;
    let mut r2 = FakeReplica::launch(&fixture, "r2", "b1", "az1", "250.1.0.4").await;
    let mut e1 = FakeEdge::launch(&fixture, "e1", "az1", "250.1.0.2").await;
    let mut node = fixture.subscribe("n1").await;
    assert_eq!(r1.sync_and_report().await.number, 1);
    assert_eq!(r2.sync_and_report().await.number, 2);
    e1.sees(&[("r1", true), ("r2", true)]);
    let has_all = |subscriber: &ManualSubscriber| {
        let t = tables(subscriber);
        // Two tenants with a service and a gateway each make four tables.
        t.len() == 4 && t.values().all(|t| heads(t) == [1, 2].into())
    };
    report_until(
        &mut [&mut r1, &mut r2],
        &mut [&mut e1],
        "tables with both heads",
        |replicas, edges| {
            replicas.iter().all(|s| has_all(&s.subscriber))
                && edges.iter().all(|r| {
                    has_all(&r.subscriber) && addresses(&r.subscriber).values().all(|a| a.open)
                })
        },
    )
    .await;
    let own = addresses(&e1.subscriber);
    let names: Vec<&str> = own.keys().map(String::as_str).collect();
    let both = |t: &str| {
        [
            format!("{t}/canal-system/gateway@az1"),
            format!("{t}/shop/a@az1"),
        ]
    };
    assert_eq!(names, [both("alpha"), both("beta")].concat());
    for tenant in ["alpha", "beta"] {
        // The first address of the eighth of gatewayCidrs that az1 has, which is AZ number 1. Both
        // tenants use the same range.
        assert_eq!(
            own[&format!("{tenant}/canal-system/gateway@az1")].addresses,
            ["10.1.200.1".parse::<std::net::IpAddr>().unwrap()]
        );
    }
    assert_eq!(
        own.values().map(|a| a.id).collect::<BTreeSet<_>>().len(),
        4,
        "ids are of one space"
    );
    node.settle().await;
    // A node of alpha sees the addresses of its own tenant, and no table.
    assert!(
        addresses(&node).keys().all(|n| n.starts_with("alpha/")) && addresses(&node).len() == 2,
        "{:?}",
        node.names()
    );
    assert!(
        tables(&node).is_empty() && !node.names().iter().any(|n| n.starts_with("Replica")),
        "{:?}",
        node.names()
    );
    // The edge of its AZ, and no request to drain.
    let orders = r1.sync_and_report().await;
    assert_eq!((orders.edge.as_str(), orders.drain), ("250.1.0.2", false));
    assert_eq!(orders.hosts, ["250.1.0.2", "250.1.0.3", "250.1.0.4"]);
    // An edge steers sessions by tables; services, workloads and routes are for gateways.
    assert!(
        !e1.subscriber
            .names()
            .iter()
            .any(|n| n.starts_with("Service")
                || n.starts_with("Workload")
                || n.starts_with("Route"))
    );
}

/// Checks that the number of a replica that leaves is free once no table contains it, and that the
/// next new replica gets it.
async fn reuse_the_number_of_r1(
    fixture: &ControllerFixture,
    mut r1: FakeReplica,
    r3: &mut FakeReplica,
    e1: &mut FakeEdge,
    root: &mut Operator,
) {
    r1.state.terminating = true;
    r1.report().await.unwrap();
    e1.sees(&[("r1", false), ("r3", true)]);
    let only = |s: &ManualSubscriber| {
        tables(s)
            .values()
            .all(|t| t.chains.iter().flatten().all(|n| n.get() == 2))
    };
    report_until(&mut [r3], &mut [e1], "tables without r1", |_, edges| {
        only(&edges[0].subscriber)
    })
    .await;
    let until = Instant::now() + wait_limit();
    while root
        .fleet()
        .await
        .unwrap()
        .replicas
        .iter()
        .any(|r| r.name == "r1")
    {
        assert!(Instant::now() < until, "r1 is not forgotten");
        r3.sync_and_report().await;
        e1.sync_and_report().await;
    }
    let mut r2 = FakeReplica::launch(fixture, "r2", "b1", "az1", "250.1.0.4").await;
    assert_eq!(r2.sync_and_report().await.number, 1);
}

#[tokio::test]
async fn numbers_and_tables_survive_restarts_and_come_back_only_after_forgetting() {
    let mut fixture = tier().await;
    let mut r1 = FakeReplica::launch(&fixture, "r1", "b1", "az1", "250.1.0.3").await;
    let mut r3 = FakeReplica::launch(&fixture, "r3", "b2", "az1", "250.1.0.5").await;
    let mut e1 = FakeEdge::launch(&fixture, "e1", "az1", "250.1.0.2").await;
    e1.sees(&[("r1", true), ("r3", true)]);
    // The replicas are numbered in the order of their registration.
    let whole = |s: &ManualSubscriber| {
        tables(s).len() == 4 && tables(s).values().all(|t| heads(t) == [1, 2].into())
    };
    report_until(
        &mut [&mut r1, &mut r3],
        &mut [&mut e1],
        "tables",
        |_, edges| whole(&edges[0].subscriber),
    )
    .await;
    let mut root = fixture.admin("root").await;
    wait_quiet(&mut [&mut r1, &mut r3], &mut [&mut e1], &mut root).await;
    let before = (
        tables(&e1.subscriber),
        addresses(&e1.subscriber),
        root.fleet().await.unwrap().plan,
    );
    fixture.stop().await;
    fixture.start().await;
    let mut root = fixture.admin("root").await;
    let mut fresh = fixture.subscribe("e1").await;
    fresh.settle().await;
    assert_eq!(
        (
            tables(&fresh),
            addresses(&fresh),
            root.fleet().await.unwrap().plan
        ),
        before,
        "a restart changes nothing"
    );
    // The members come back, each at its own time, and still nothing changes.
    drop(fresh);
    let mut e1 = FakeEdge::launch(&fixture, "e1", "az1", "250.1.0.2").await;
    e1.sees(&[("r1", true), ("r3", true)]);
    r3.reconnect(&fixture).await;
    assert_eq!(r3.sync_and_report().await.number, 2);
    r1.reconnect(&fixture).await;
    assert_eq!(r1.sync_and_report().await.number, 1);
    // Longer than the grace time, in which the last plan stays whichever replicas report.
    let until = Instant::now() + times().grace + slack() * Duration::from_secs(1);
    while Instant::now() < until {
        r1.sync_and_report().await;
        r3.sync_and_report().await;
        e1.sync_and_report().await;
    }
    assert_eq!(
        (tables(&e1.subscriber), addresses(&e1.subscriber)),
        (before.0, before.1)
    );
    // Nothing differed for them, so they report the old generation. They are as good as before, and
    // can drain.
    let states = root
        .fleet()
        .await
        .unwrap()
        .replicas
        .into_iter()
        .map(|r| r.state)
        .collect::<Vec<_>>();
    assert_eq!(states, ["active", "active"]);
    root.drain("r1").await.unwrap();
    let without = |s: &ManualSubscriber| {
        tables(s)
            .values()
            .all(|t| t.chains.iter().flatten().all(|n| n.get() == 2))
    };
    report_until(
        &mut [&mut r1, &mut r3],
        &mut [&mut e1],
        "tables without r1",
        |_, edges| without(&edges[0].subscriber),
    )
    .await;

    reuse_the_number_of_r1(&fixture, r1, &mut r3, &mut e1, &mut root).await;
}

/// Checks that edges are refused that report for another edge, or more than an edge may.
async fn refuse_misnamed_edges(fixture: &ControllerFixture, client: &mut FleetClient<Channel>) {
    let edge = |az: &str, underlay: &str, n: usize| EdgeReportRequest {
        az: az.into(),
        underlay: underlay.into(),
        seen: (0..n)
            .map(|i| ReplicaProbe {
                replica: format!("r{i}"),
                up: true,
            })
            .collect(),
        ..EdgeReportRequest::default()
    };
    client
        .edge_report(with_token(edge("az1", "250.1.0.2", 1), "e1"))
        .await
        .unwrap();
    for (token, state, reason) in [
        ("r1", edge("az1", "250.1.0.9", 0), "not_an_edge"),
        ("e2", edge("az1", "250.1.0.9", 0), "az"),
        ("e1", edge("az1", "250.1.0.3", 0), "underlay_taken"),
        (
            "e1",
            edge("az1", "250.1.0.2", canal_controller_core::SEEN_MAX + 1),
            "entries",
        ),
        ("e1b", edge("az1", "250.1.0.8", 0), "tunnel_end"),
    ] {
        client
            .edge_report(with_token(state, token))
            .await
            .expect_err(reason);
        let line = format!("canal_controller_fleet_reports_refused_total{{reason=\"{reason}\"}}");
        assert!(fixture.metric(&line).await >= 1.0, "{line}");
    }
}

#[tokio::test]
async fn unknown_and_misnamed_replicas_are_refused_by_name() {
    let fixture = tier().await;
    let mut r1 = FakeReplica::launch(&fixture, "r1", "b1", "az1", "250.1.0.3").await;
    r1.sync_and_report().await;
    let cases = misnamed_replicas();
    let mut client = FleetClient::new(fixture.channel().await);
    let reasons: BTreeSet<&str> = cases.iter().map(|c| c.3).collect();
    for (token, state, code, reason) in cases {
        let refused = client
            .replica_report(with_token(state.clone(), token))
            .await
            .expect_err(reason);
        assert_eq!(refused.code(), code, "{token} {reason}: {refused}");
    }
    refuse_misnamed_edges(&fixture, &mut client).await;
    for reason in reasons.into_iter().filter(|r| *r != "unknown_token") {
        let line = format!("canal_controller_fleet_reports_refused_total{{reason=\"{reason}\"}}");
        assert!(fixture.metric(&line).await >= 1.0, "{line}");
    }
    assert_eq!(
        fixture
            .admin("root")
            .await
            .fleet()
            .await
            .unwrap()
            .replicas
            .len(),
        1,
        "no session was admitted"
    );
}

#[tokio::test]
async fn a_replica_gets_sessions_only_after_it_acknowledged_the_tenant() {
    let fixture = tier().await;
    let mut r1 = FakeReplica::launch(&fixture, "r1", "b1", "az1", "250.1.0.3").await;
    let mut e1 = FakeEdge::launch(&fixture, "e1", "az1", "250.1.0.2").await;
    e1.sees(&[("r1", true), ("r2", true)]);
    let has = |s: &ManualSubscriber, want: &[u16]| {
        tables(s).len() == 4
            && tables(s)
                .values()
                .all(|t| heads(t) == want.iter().copied().collect::<BTreeSet<_>>())
    };
    report_until(&mut [&mut r1], &mut [&mut e1], "tables", |_, edges| {
        has(&edges[0].subscriber, &[1])
    })
    .await;
    // r2 reports but does not acknowledge its resources: it is joining, and no table contains it.
    let mut r2 = FakeReplica::launch(&fixture, "r2", "b1", "az1", "250.1.0.4").await;
    // 20 turns take at least 400 ms, in which the reconciler runs several times.
    for _ in 0..20 {
        r2.report().await.unwrap();
        r1.sync_and_report().await;
        e1.sync_and_report().await;
    }
    let mut root = fixture.admin("root").await;
    let states = |f: &canal_wire::api::FleetResponse| {
        f.replicas
            .iter()
            .map(|r| format!("{} {}", r.name, r.state))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        states(&root.fleet().await.unwrap()),
        ["r1 active", "r2 joining"]
    );
    assert!(
        tables(&e1.subscriber)
            .values()
            .all(|t| t.chains.iter().flatten().all(|n| n.get() == 1)),
        "{:?}",
        tables(&e1.subscriber)
    );
    report_until(
        &mut [&mut r1, &mut r2],
        &mut [&mut e1],
        "both heads",
        |_, edges| has(&edges[0].subscriber, &[1, 2]),
    )
    .await;
    // A new tenant: both replicas have it before the edge gets a table.
    let third = tier_tenant("gamma", 3);
    fixture.write("gamma/all.yaml", &third);
    let until = Instant::now() + wait_limit();
    // Number of turns for which the tables have waited.
    let mut waited = 0;
    while waited < 20 {
        // Only r1 acknowledges its resources.
        r1.sync_and_report().await;
        r2.report().await.unwrap();
        e1.sync_and_report().await;
        assert!(
            !tables(&e1.subscriber)
                .keys()
                .any(|n| n.starts_with("gamma")),
            "a table was published before both acknowledged the tenant"
        );
        // Turns count only once the tables wait for r2: before, the new tenant was not compiled
        // yet.
        let waits = r1.subscriber.has(ResourceKind::Service, "gamma/shop/a")
            && fixture
                .metric("canal_controller_fleet_tables_waiting")
                .await
                >= 1.0;
        waited += u32::from(waits);
        assert!(Instant::now() < until, "no table waits");
    }
    // Gamma has a table of its service and one of its gateway too.
    let done = |s: &ManualSubscriber| {
        tables(s).len() == 6 && tables(s).values().all(|t| heads(t) == [1, 2].into())
    };
    report_until(
        &mut [&mut r1, &mut r2],
        &mut [&mut e1],
        "gamma's tables",
        |_, edges| done(&edges[0].subscriber),
    )
    .await;
    wait_quiet(&mut [&mut r1, &mut r2], &mut [&mut e1], &mut root).await;
}

/// Checks what the fleet shows of the draining r1, which owns sessions in this many buckets at
/// least.
async fn check_a_draining_owner(
    fixture: &ControllerFixture,
    r1: &mut FakeReplica,
    root: &mut Operator,
    owned: usize,
) {
    assert_eq!(
        r1.sync_and_report().await.next_ms,
        200,
        "tables are in motion"
    );
    let row = root.fleet().await.unwrap().replicas.remove(0);
    assert_eq!(
        (row.state.as_str(), row.drain_requested, row.heads, row.up),
        ("draining", true, 0, true)
    );
    assert!(row.owners as usize >= owned && row.sessions > 0, "{row:?}");
    assert!(
        fixture
            .metric("canal_controller_fleet_owners_retained_total")
            .await
            >= owned as f64
    );
}

/// Checks that only the provider's operator drains a replica, and only one that there is.
async fn refuse_wrong_drains(fixture: &ControllerFixture, root: &mut Operator) {
    assert!(
        fixture
            .admin("ann")
            .await
            .drain("r1")
            .await
            .is_err_and(|s| s.code() == Code::PermissionDenied),
        "the tier is the provider's"
    );
    assert!(
        root.drain("r9")
            .await
            .is_err_and(|s| s.code() == Code::NotFound)
    );
}

#[tokio::test]
async fn a_draining_replica_stays_owner_until_it_reports_no_sessions() {
    let fixture = tier_with(patient_times()).await;
    let mut r1 = FakeReplica::launch(&fixture, "r1", "b1", "az1", "250.1.0.3").await;
    let mut r2 = FakeReplica::launch(&fixture, "r2", "b1", "az1", "250.1.0.4").await;
    let mut e1 = FakeEdge::launch(&fixture, "e1", "az1", "250.1.0.2").await;
    e1.sees(&[("r1", true), ("r2", true)]);
    let both = |s: &ManualSubscriber| {
        tables(s).len() == 4 && tables(s).values().all(|t| heads(t) == [1, 2].into())
    };
    report_until(
        &mut [&mut r1, &mut r2],
        &mut [&mut e1],
        "tables",
        |_, edges| both(&edges[0].subscriber),
    )
    .await;
    // The buckets of which r1 is the head.
    let headed = |s: &ManualSubscriber| -> Vec<(String, usize)> {
        let of = |(name, t): (String, BucketTable)| {
            (0..t.chains.len())
                .filter(|b| t.chains[*b][0].get() == 1)
                .map(|b| (name.clone(), b))
                .collect::<Vec<_>>()
        };
        tables(s).into_iter().flat_map(of).collect()
    };
    let owned = headed(&e1.subscriber);
    // r1 is the head of half of the 128 buckets of four tables, about 256.
    assert!(owned.len() > 100, "{}", owned.len());
    let mut root = fixture.admin("root").await;
    refuse_wrong_drains(&fixture, &mut root).await;
    // The replica owns a session in each bucket, so that no chain may drop it.
    owns_all(&mut r1);
    root.drain("r1").await.unwrap();
    // Its buckets get other heads a few at a time. It stays in all of their chains, also for some
    // turns after it is the head of none.
    let until = Instant::now() + wait_limit();
    // Ten turns without head: an owner that is dropped with its last head would be noticed.
    let mut turns_without_head = 0;
    while turns_without_head < 10 {
        assert!(
            Instant::now() < until,
            "r1 is still the head of {} buckets",
            headed(&e1.subscriber).len()
        );
        owns_all(&mut r1);
        let orders = r1.sync_and_report().await;
        assert!(orders.drain);
        r2.sync_and_report().await;
        e1.sync_and_report().await;
        let now = tables(&e1.subscriber);
        let kept = |(name, bucket): &(String, usize)| {
            now[name].chains[*bucket].iter().any(|n| n.get() == 1)
        };
        assert!(owned.iter().all(kept), "an owner was dropped");
        turns_without_head = if headed(&e1.subscriber).is_empty() {
            turns_without_head + 1
        } else {
            0
        };
    }
    check_a_draining_owner(&fixture, &mut r1, &mut root, owned.len()).await;
    // The sessions of r1 end.
    (r1.state.owned, r1.state.sessions) = (Vec::new(), 0);
    let free = |s: &ManualSubscriber| {
        tables(s)
            .values()
            .all(|t| t.chains.iter().flatten().all(|n| n.get() == 2))
    };
    report_until(
        &mut [&mut r1, &mut r2],
        &mut [&mut e1],
        "chains without r1",
        |_, edges| free(&edges[0].subscriber),
    )
    .await;
    // r1 may take sessions again.
    root.undrain("r1").await.unwrap();
    report_until(
        &mut [&mut r1, &mut r2],
        &mut [&mut e1],
        "both heads again",
        |_, edges| both(&edges[0].subscriber),
    )
    .await;
    wait_quiet(&mut [&mut r1, &mut r2], &mut [&mut e1], &mut root).await;
}

fn all_open(replicas: &[&mut FakeReplica], edges: &[&mut FakeEdge]) -> bool {
    edges.iter().all(|r| {
        addresses(&r.subscriber).len() == 4 && addresses(&r.subscriber).values().all(|a| a.open)
    }) && !replicas.is_empty()
}

/// Checks that the edge of az2, which is back, reports its replica as down and as up again.
async fn follow_r4_down_and_up([r1, r4]: [&mut FakeReplica; 2], [e1, e2]: [&mut FakeEdge; 2]) {
    e2.sees(&[("r4", false)]);
    let down = |s: &ManualSubscriber| {
        s.resources
            .iter()
            .any(|((_, n), (_, r))| n == "r4" && matches!(r, Resource::Replica(r) if !r.up))
    };
    report_until(
        &mut [&mut *r1, &mut *r4],
        &mut [&mut *e1, &mut *e2],
        "r4 down",
        |replicas, _| down(&replicas[0].subscriber),
    )
    .await;
    e2.sees(&[("r4", true)]);
    report_until(
        &mut [&mut *r1, &mut *r4],
        &mut [&mut *e1, &mut *e2],
        "open addresses again",
        all_open,
    )
    .await;
}

/// Checks that r4, whose process is gone without a last report, is forgotten after the timeout,
/// since its edge sees it down.
async fn forget_the_dead_r4(
    root: &mut Operator,
    r1: &mut FakeReplica,
    e1: &mut FakeEdge,
    e2: &mut FakeEdge,
) {
    e2.sees(&[("r4", false)]);
    let until = Instant::now() + wait_limit();
    while root
        .fleet()
        .await
        .unwrap()
        .replicas
        .iter()
        .any(|r| r.name == "r4")
    {
        assert!(
            Instant::now() < until,
            "r4 is not forgotten: {:?}",
            root.fleet().await
        );
        r1.sync_and_report().await;
        e1.sync_and_report().await;
        e2.sync_and_report().await;
    }
}

#[tokio::test]
async fn a_silent_edge_closes_its_az_and_a_dead_replica_is_left_in_bounded_time() {
    let fixture = tier().await;
    let mut r1 = FakeReplica::launch(&fixture, "r1", "b1", "az1", "250.1.0.3").await;
    let mut r4 = FakeReplica::launch(&fixture, "r4", "b3", "az2", "250.2.0.3").await;
    let mut e1 = FakeEdge::launch(&fixture, "e1", "az1", "250.1.0.2").await;
    let mut e2 = FakeEdge::launch(&fixture, "e2", "az2", "250.2.0.2").await;
    let mut node = fixture.subscribe("n1").await;
    e1.sees(&[("r1", true)]);
    e2.sees(&[("r4", true)]);
    report_until(
        &mut [&mut r1, &mut r4],
        &mut [&mut e1, &mut e2],
        "open addresses",
        all_open,
    )
    .await;
    node.settle().await;
    let names: BTreeSet<String> = addresses(&node).into_keys().collect();
    // Each of alpha's two services has one address in each AZ.
    let want = [
        "alpha/canal-system/gateway@az1",
        "alpha/canal-system/gateway@az2",
        "alpha/shop/a@az1",
        "alpha/shop/a@az2",
    ];
    assert_eq!(names, want.map(String::from).into());
    // No data plane gets tables of another AZ.
    assert!(
        tables(&e1.subscriber).keys().all(|n| n.ends_with("@az1"))
            && tables(&r1.subscriber).keys().all(|n| n.ends_with("@az1"))
    );
    assert!(
        tables(&e2.subscriber).keys().all(|n| n.ends_with("@az2"))
            && tables(&r4.subscriber).keys().all(|n| n.ends_with("@az2"))
    );
    // The edge of az2 falls silent, so its addresses close.
    let reported = Instant::now();
    e2.sync_and_report().await;
    let begun = Instant::now();
    let until = begun + wait_limit();
    let closed = loop {
        r1.sync_and_report().await;
        r4.sync_and_report().await;
        e1.sync_and_report().await;
        // Short beside the 600 ms of silence that are measured.
        node.drain(Duration::from_millis(5)).await;
        let shut: Vec<bool> = addresses(&node)
            .iter()
            .filter(|(n, _)| n.ends_with("@az2"))
            .map(|(_, a)| !a.open)
            .collect();
        if shut == [true, true] {
            break Instant::now();
        }
        assert!(Instant::now() < until, "az2 stays open");
    };
    let silent = closed.duration_since(reported);
    // A loose bound: it only has to show that the AZ was not closed at once.
    assert!(silent >= times().edge_silent / 2, "{silent:?}");
    assert_time(
        "time until a silent edge's AZ is closed",
        closed.duration_since(begun),
        // The 1.6 s are 1 s beyond the 600 ms of `edge_silent` in the timing tier.
        Duration::from_millis(1600),
    );
    assert!(
        addresses(&node)
            .iter()
            .filter(|(n, _)| n.ends_with("@az1"))
            .all(|(_, a)| a.open)
    );
    assert!(
        fixture
            .metric("canal_controller_fleet_azs_closed_total")
            .await
            >= 1.0
    );
    follow_r4_down_and_up([&mut r1, &mut r4], [&mut e1, &mut e2]).await;
    node.settle().await;
    assert!(addresses(&node).values().all(|a| a.open));
    let mut root = fixture.admin("root").await;
    forget_the_dead_r4(&mut root, &mut r1, &mut e1, &mut e2).await;
    assert!(
        root.forget("r1")
            .await
            .is_err_and(|s| s.code() == Code::FailedPrecondition),
        "a replica that reports cannot be forgotten"
    );
}

#[tokio::test]
async fn a_gateway_has_the_identity_of_tenants_on_its_backend_only() {
    let fixture = tier().await;
    let name =
        canal_model::identity::gateway_identity("alpha.example".parse().unwrap()).to_string();
    let refused = fixture
        .certificate("r1", Some(&name), None)
        .await
        .expect_err("not registered");
    assert_eq!(refused.code(), Code::PermissionDenied);
    let mut r1 = FakeReplica::launch(&fixture, "r1", "b1", "az1", "250.1.0.3").await;
    let mut e1 = FakeEdge::launch(&fixture, "e1", "az1", "250.1.0.2").await;
    e1.sees(&[("r1", true)]);
    report_until(&mut [&mut r1], &mut [&mut e1], "tables", |replicas, _| {
        tables(&replicas[0].subscriber).len() == 4
    })
    .await;
    fixture.certificate("r1", Some(&name), None).await.unwrap();
    for token in ["r4", "e1"] {
        let refused = fixture
            .certificate(token, Some(&name), None)
            .await
            .expect_err(token);
        assert_eq!(refused.code(), Code::PermissionDenied, "{token}");
    }
}

#[tokio::test]
async fn a_tenants_operator_sees_its_own_services_and_nothing_of_others() {
    let fixture = tier().await;
    let mut r1 = FakeReplica::launch(&fixture, "r1", "b1", "az1", "250.1.0.3").await;
    let mut e1 = FakeEdge::launch(&fixture, "e1", "az1", "250.1.0.2").await;
    e1.sees(&[("r1", true)]);
    let served = |s: &ManualSubscriber| {
        tables(s).len() == 4 && tables(s).values().all(|t| heads(t) == [1].into())
    };
    report_until(&mut [&mut r1], &mut [&mut e1], "tables", |_, edges| {
        served(&edges[0].subscriber)
    })
    .await;
    let (mut root, mut ann) = (fixture.admin("root").await, fixture.admin("ann").await);
    let own = ann.fleet().await.unwrap();
    assert!(
        own.replicas.is_empty() && own.edges.is_empty() && own.blast.is_empty(),
        "{own:?}"
    );
    // alpha's operator sees the two services of its tenant.
    assert_eq!(
        own.services
            .iter()
            .map(|s| s.service.as_str())
            .collect::<Vec<_>>(),
        ["alpha/canal-system/gateway", "alpha/shop/a"]
    );
    assert!(!format!("{own:?}").contains("beta"), "{own:?}");
    let all = root.fleet().await.unwrap();
    // Each tenant has two services. With one backend there is only the case that it fails.
    assert_eq!(
        (
            all.services.len(),
            all.replicas.len(),
            all.edges.len(),
            all.blast.len()
        ),
        (4, 1, 1, 1)
    );
    let why = root.explain("beta/shop/a").await.unwrap();
    let seats: Vec<(String, u32)> = why.tables[0]
        .members
        .iter()
        .map(|s| (s.replica.clone(), s.heads))
        .collect();
    // The only replica is the head of all 128 buckets.
    assert_eq!((why.tables.len(), seats), (1, vec![("r1".to_owned(), 128)]));
    assert!(
        why.unmet_constraints
            .iter()
            .any(|n| n.contains("add backends")),
        "{:?}",
        why.unmet_constraints
    );
    assert!(
        ann.explain("beta/shop/a")
            .await
            .is_err_and(|s| s.code() == Code::PermissionDenied)
    );
    assert!(
        ann.explain("alpha/shop/none")
            .await
            .is_err_and(|s| s.code() == Code::NotFound)
    );
    assert!(
        ann.explain("alpha/shop/a").await.unwrap().tables[0]
            .members
            .is_empty(),
        "replicas are the provider's"
    );
}

/// Lets r1 find a session of each service, and the edges a path of the session of `mine`.
async fn answer_queries(r1: &mut FakeReplica, edges: [&mut FakeEdge; 2], mine: u32, others: u32) {
    let queries = r1.sync_and_report().await.queries;
    // Both tenants have a client with this address.
    let session = |service| FoundSession { service, port: 80 };
    r1.state.found = queries
        .iter()
        .map(|q| FoundSessions {
            query: q.id,
            sessions: vec![session(mine), session(others)],
        })
        .collect();
    for edge in edges {
        let queries = edge.sync_and_report().await.queries;
        let path = |q: &SessionQuery| SessionPath {
            query: q.id,
            chain: vec![1],
            replica: 1,
            tunnel_port: 40_001,
            ..SessionPath::default()
        };
        edge.state.paths = queries
            .iter()
            .filter(|q| (q.service, q.port, q.client.as_str()) == (mine, 80, "10.1.1.9:4000"))
            .map(path)
            .collect();
    }
}

/// T16, and appendix A of the paper: two edges of one AZ share one tunnel end, and one client's
/// session is found through both.
#[tokio::test]
async fn a_client_s_session_is_found_by_replicas_and_the_edges_of_their_az() {
    let fixture = tier().await;
    let mut r1 = FakeReplica::launch(&fixture, "r1", "b1", "az1", "250.1.0.3").await;
    let mut e1 = FakeEdge::launch(&fixture, "e1", "az1", "250.1.0.2").await;
    let mut e1b = FakeEdge::launch(&fixture, "e1b", "az1", "250.1.0.5").await;
    // Two ports in network byte order: 40,000 and 40,001.
    r1.state.tunnel_ports = vec![0x9c, 0x40, 0x9c, 0x41];
    for edge in [&mut e1, &mut e1b] {
        edge.state.anycast = "250.1.255.1".into();
        edge.sees(&[("r1", true)]);
    }
    report_until(
        &mut [&mut r1],
        &mut [&mut e1, &mut e1b],
        "tables at both edges",
        |_, edges| edges.iter().all(|r| tables(&r.subscriber).len() == 4),
    )
    .await;
    let orders = r1.sync_and_report().await;
    assert_eq!(
        (orders.edge.as_str(), &orders.hosts[..]),
        (
            "250.1.255.1",
            &["250.1.255.1".to_string(), "250.1.0.3".to_string()][..]
        )
    );
    let response = e1.sync_and_report().await;
    assert_eq!(
        (response.tunnels.len(), &response.tunnels[0].ports),
        (1, &r1.state.tunnel_ports)
    );
    e1.state.tunnels_version = response.tunnels_version;
    assert!(
        e1.sync_and_report().await.tunnels.is_empty(),
        "tunnels that the edge has are not sent again"
    );

    let ids: BTreeMap<String, u32> = tables(&e1.subscriber)
        .values()
        .map(|t| (t.service.to_string(), t.id.get()))
        .collect();
    let (mine, others) = (ids["alpha/shop/a"], ids["beta/shop/a"]);
    let mut ann = fixture.admin("ann").await;
    let foreign = ann.find_sessions("beta", "10.1.1.9:4000").await;
    assert_eq!(foreign.unwrap_err().code(), Code::PermissionDenied);
    let without_port = ann.find_sessions("alpha", "10.1.1.9").await;
    assert_eq!(without_port.unwrap_err().code(), Code::InvalidArgument);
    // After a pause of the machine some answers come too late, so the query is repeated.
    let asked = tokio::spawn(async move {
        let until = Instant::now() + wait_limit();
        loop {
            let found = ann.find_sessions("", "10.1.1.9:4000").await;
            if found.as_ref().is_ok_and(|f| f.silent.is_empty()) || Instant::now() >= until {
                return found;
            }
        }
    });
    while !asked.is_finished() {
        answer_queries(&mut r1, [&mut e1, &mut e1b], mine, others).await;
    }
    let found = asked.await.unwrap().unwrap();
    assert_eq!(
        (found.sessions.len(), found.silent.len()),
        (1, 0),
        "{found:?}"
    );
    let session = &found.sessions[0];
    assert_eq!(
        (
            session.service.as_str(),
            session.owner.as_str(),
            session.az.as_str()
        ),
        ("alpha/shop/a", "r1", "az1")
    );
    let paths: Vec<_> = session
        .paths
        .iter()
        .map(|p| (p.edge.as_str(), p.replica.as_str(), p.tunnel_port))
        .collect();
    assert_eq!(paths, [("e1", "r1", 40_001), ("e1b", "r1", 40_001)]);
}
