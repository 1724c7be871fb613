//! Tests of the agent with maps in memory, sessions in memory, and a fake controller over TLS.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use canal_model::ids::{Generation, ServiceId};
use canal_runtime::drain::{self, DrainTrigger};
use canal_southbound_client::ResourceState;
use canal_testing::FakeController;
use canal_wire::fleet::{ReplicaReportRequest, ReplicaReportResponse, ReportMark, SessionQuery};
use canal_wire::tier;

use super::*;
use crate::desired_maps::tests::{replica, table_of};
use crate::map_reconciler::tests::SharedMemory;
use crate::session_scan::ServiceSessions;

struct AgentFixture {
    agent: RedirectorAgent,
    memory: SharedMemory,
    controller: FakeController,
    registry: Registry,
    scan_answer: ScanAnswer,
    folder: tempfile::TempDir,
    _trigger: DrainTrigger,
    search: SlowSearch,
}

/// The search for [`SLOW_PORT`]. It ends with the fixture.
#[derive(Clone, Default)]
struct SlowSearch {
    has_begun: Arc<AtomicBool>,
    is_over: Arc<AtomicBool>,
}

impl SlowSearch {
    fn run(&self) {
        self.has_begun.store(true, Relaxed);
        while !self.is_over.load(Relaxed) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A search for a client with this port lasts until the fixture is dropped.
const SLOW_PORT: u16 = 9;

/// Result of a scan: sessions, or a failure if `None`.
type ScanAnswer = Arc<Mutex<Option<OwnedSessions>>>;

/// Returns the bucket of a session from `port` of 10.1.1.9 to port 80, as a bit.
fn bucket(service: u32, port: u16) -> u128 {
    1 << tier::bucket(
        format!("10.1.1.9:{port}").parse().unwrap(),
        80,
        ServiceId::new(service).unwrap(),
    )
}

/// Makes scans find one session of each of these services from these ports.
fn sessions(found: &ScanAnswer, all: &[(u32, u16)]) {
    let one = |(service, port): &(u32, u16)| {
        (
            ServiceId::new(*service).unwrap(),
            ServiceSessions {
                buckets: bucket(*service, *port),
                sessions: 1,
            },
        )
    };
    *found.lock().unwrap() = Some(all.iter().map(one).collect());
}

impl Drop for AgentFixture {
    fn drop(&mut self) {
        self.search.is_over.store(true, Relaxed);
    }
}

/// Waits until `holds` returns true.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(Duration::from_secs(5)),
            "never: {what}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

impl AgentFixture {
    async fn new(orders: ReplicaReportResponse) -> Self {
        let controller = FakeController::start().await;
        controller.reports.report_log().replica_orders = orders;
        let folder = tempfile::tempdir().unwrap();
        let found = ScanAnswer::new(Mutex::new(Some(OwnedSessions::new())));
        let seen = found.clone();
        let search = SlowSearch::default();
        let running = search.clone();
        let (trigger, drain) = drain::tree();
        let (memory, registry) = (SharedMemory::default(), Registry::new());
        let config = ReplicaConfig {
            az: "az1".parse().unwrap(),
            backend: "b1".parse().unwrap(),
            underlay: Ipv4Addr::new(250, 1, 0, 1),
            version: "1".into(),
            controller: Some(controller.reached_through(folder.path(), controller.address)),
            orders: folder.path().join("orders.json"),
            sockets: SessionScanner::of(
                move |_| {
                    seen.lock()
                        .unwrap()
                        .clone()
                        .ok_or(SessionScanError::Format("a test's"))
                },
                move |client, _| {
                    if client.port() == SLOW_PORT {
                        running.run();
                        return Err(SessionScanError::Late);
                    }
                    Ok(vec![(ServiceId::new(7).unwrap(), client.port())])
                },
            ),
        };
        let agent = RedirectorAgent::start(
            config,
            Box::new(memory.clone()),
            // Sessions now, and accepted so far.
            Box::new(|| (3, 9)),
            &registry,
            &drain,
        )
        .unwrap();
        Self {
            agent,
            memory,
            controller,
            registry,
            scan_answer: found,
            folder,
            _trigger: trigger,
            search,
        }
    }

    fn apply(&self, resources: Vec<Arc<Resource>>, generation: u64) {
        let update = Update {
            origin: UpdateSource::Controller,
            generation: Generation(generation),
            upserts: resources.clone(),
            removals: vec![],
        };
        self.agent.apply(
            &update,
            &ResourceState::of_resources(resources, Generation(generation)),
        );
    }

    /// Waits for a report that matches `wanted`.
    async fn until(
        &self,
        what: &str,
        wanted: impl Fn(&ReplicaReportRequest) -> bool,
    ) -> ReplicaReportRequest {
        let found = std::cell::RefCell::new(None);
        let matches = || {
            *found.borrow_mut() = self
                .controller
                .reports
                .report_log()
                .replicas
                .last()
                .filter(|r| wanted(r))
                .cloned();
            found.borrow().is_some()
        };
        until(what, matches).await;
        found.take().unwrap()
    }
}

fn orders(drain: bool) -> ReplicaReportResponse {
    ReplicaReportResponse {
        number: 2,
        edge: "250.1.0.200".into(),
        hosts: vec!["250.1.0.1".into(), "250.1.0.200".into()],
        drain,
        next_ms: 100,
        ..ReplicaReportResponse::default()
    }
}

/// Checks that the maps have this replica's own entry and the hosts of the tier.
fn check_own_entry(fixture: &AgentFixture) {
    let m = fixture.memory.0.lock().unwrap();
    assert_eq!(m.own, Some((2, Some("250.1.0.200".parse().unwrap()))));
    assert_eq!(
        m.hosts,
        [
            ("250.1.0.1".parse().unwrap(), 2),
            ("250.1.0.200".parse().unwrap(), 0)
        ]
        .into()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_agent_registers_follows_orders_and_reports_owned_sessions_when_needed() {
    let fixture = AgentFixture::new(orders(false)).await;
    let first = fixture.until("registration", |_| true).await;
    assert_eq!(
        (
            first.backend.as_str(),
            first.underlay.as_str(),
            first.generation,
            first.sessions,
            first.accepted
        ),
        // The fixture always has 3 sessions, of 9 accepted ones.
        ("b1", "250.1.0.1", 0, 3, 9)
    );
    assert!(fixture.agent.ready().is_err());
    sessions(&fixture.scan_answer, &[(7, 40000), (8, 40001)]);
    // The replica is a head, so it does not report its owned sessions.
    fixture.apply(
        vec![
            table_of("alpha/default/web", 7, "az1", 4, &[2, 1]),
            replica("gw-2", 2, "250.1.0.1", true),
        ],
        10,
    );
    let head = fixture.until("generation 10", |r| r.generation == 10).await;
    assert!(head.owned.is_empty());
    assert_eq!(fixture.agent.ready(), Ok(()));
    check_own_entry(&fixture);
    // Behind another head it does, with the version of the table in its maps.
    fixture.apply(
        vec![table_of("alpha/default/web", 7, "az1", 5, &[1, 2])],
        11,
    );
    let behind = fixture
        .until("generation 11", |r| {
            r.generation == 11 && !r.owned.is_empty()
        })
        .await;
    let owned: HashMap<u32, _> = behind
        .owned
        .iter()
        .map(|o| (o.service, (o.table_version, o.buckets.clone(), o.sessions)))
        .collect();
    let bit = |id: u32, port: u16| bucket(id, port).to_le_bytes().to_vec();
    // The maps have no table of service 8: version 0 proves nothing.
    assert_eq!(
        owned,
        [(7, (5, bit(7, 40000), 1)), (8, (0, bit(8, 40001), 1))].into()
    );
    // Sessions that two scans do not find are gone.
    sessions(&fixture.scan_answer, &[]);
    fixture
        .until("nothing owned", |r| {
            r.generation == 11 && r.owned.is_empty()
        })
        .await;
    // A failed scan does not prove that there are no sessions.
    *fixture.scan_answer.lock().unwrap() = None;
    fixture.apply(
        vec![table_of("alpha/default/web", 7, "az1", 6, &[1, 2])],
        12,
    );
    let failed = || {
        fixture
            .registry
            .render()
            .contains("canal_redirector_session_scans_total{result=\"failed\"}")
    };
    until("a failed scan", failed).await;
    assert_eq!(fixture.agent.dump()["scanned_generation"], 11);
    assert!(
        fixture
            .controller
            .reports
            .report_log()
            .replicas
            .iter()
            .all(|r| r.generation < 12)
    );
}

/// A report that repeats an earlier scan must not look like one of a new scan. It therefore has the
/// mark from the begin of the scans.
#[tokio::test(flavor = "multi_thread")]
async fn a_report_has_the_mark_from_before_its_scans() {
    let fixture = AgentFixture::new(orders(false)).await;
    let answer = |number| {
        let mark = Some(ReportMark { session: 1, number });
        fixture.controller.reports.report_log().replica_orders = ReplicaReportResponse {
            mark,
            ..orders(false)
        };
    };
    let number = |report: &ReplicaReportRequest| report.scanned_after.map(|mark| mark.number);
    fixture
        .until("registration", |r| r.scanned_after.is_none())
        .await;
    answer(5);
    fixture
        .until("the mark, because the replica is no owner", |r| {
            number(r) == Some(5)
        })
        .await;
    // Behind another head it has to scan.
    fixture.apply(
        vec![
            table_of("alpha/default/web", 7, "az1", 5, &[1, 2]),
            replica("gw-2", 2, "250.1.0.1", true),
        ],
        11,
    );
    fixture.until("a scan", |r| r.generation == 11).await;
    answer(7);
    fixture
        .until("two scans later", |r| number(r) == Some(7))
        .await;
    *fixture.scan_answer.lock().unwrap() = None;
    let failed = || {
        fixture
            .registry
            .render()
            .contains("canal_redirector_session_scans_total{result=\"failed\"}")
    };
    until("a failed scan", failed).await;
    answer(9);
    let reports = || fixture.controller.reports.report_log().replicas.len();
    let before = reports();
    // A wrong mark would be in one of the next reports.
    until("three reports more", || reports() >= before + 3).await;
    assert_eq!(
        fixture
            .controller
            .reports
            .report_log()
            .replicas
            .iter()
            .filter_map(number)
            .max(),
        Some(7),
        "no scan after that succeeded"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_is_ordered_reported_and_ended_with_last_words() {
    let fixture = AgentFixture::new(orders(false)).await;
    fixture.until("registration", |_| true).await;
    fixture.controller.reports.report_log().replica_orders = orders(true);
    until("the order to drain", || {
        fixture.agent.dump()["orders"]["drain"] == true
    })
    .await;
    fixture.agent.drain();
    fixture
        .until("draining", |r| r.draining && !r.terminating)
        .await;
    fixture.agent.leave().await;
    fixture
        .until("leaving", |r| r.terminating && r.owned.is_empty())
        .await;
    // The next process knows its number and edge before any controller responds, and serves.
    let kept = read_orders(&fixture.folder.path().join("orders.json")).unwrap();
    assert_eq!(
        (kept.number, kept.edge, kept.drain),
        (2, Some("250.1.0.200".parse().unwrap()), false)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn orders_that_cannot_be_read_change_nothing() {
    let fixture = AgentFixture::new(ReplicaReportResponse {
        edge: "edge-1".into(),
        ..orders(false)
    })
    .await;
    fixture.apply(
        vec![table_of("alpha/default/web", 7, "az1", 4, &[2, 1])],
        10,
    );
    let refused = || {
        fixture
            .registry
            .render()
            .contains("canal_redirector_reports_total{result=\"bad_orders\"}")
    };
    until("orders that are refused", refused).await;
    assert_eq!(fixture.memory.0.lock().unwrap().own, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_soft_drain_starts_once_heads_moved_and_ends_with_an_undrain() {
    let fixture = AgentFixture::new(orders(false)).await;
    let mut parting = fixture.agent.soft_drain();
    let ordered = async |drain: bool| {
        fixture.controller.reports.report_log().replica_orders = orders(drain);
        until("the order", || {
            fixture.agent.dump()["orders"]["drain"] == drain
        })
        .await;
    };
    fixture.apply(
        vec![table_of("alpha/default/web", 7, "az1", 4, &[2, 1])],
        10,
    );
    ordered(true).await;
    assert!(!*parting.borrow_and_update(), "they would be back at once");
    fixture.apply(
        vec![table_of("alpha/default/web", 7, "az1", 5, &[1, 2])],
        11,
    );
    assert!(*parting.borrow_and_update());
    ordered(false).await;
    assert!(!*parting.borrow_and_update());
    fixture.agent.drain();
    assert!(
        *parting.borrow_and_update(),
        "its own drain is as good as an order"
    );
}

/// Edges need both values: cores determine how many tunnels they use, and ports determine which.
#[tokio::test(flavor = "multi_thread")]
async fn reports_name_receiving_cores_and_tunnels_of_the_az_s_edge() {
    let fixture = AgentFixture::new(orders(false)).await;
    let report = fixture.until("cores", |r| r.cores == 2).await;
    assert_eq!(
        report.tunnel_ports,
        [40_000u16.to_be_bytes(), 40_200u16.to_be_bytes()].concat()
    );
    fixture.controller.reports.report_log().replica_orders = ReplicaReportResponse {
        edge: "250.1.0.100".into(),
        ..orders(false)
    };
    fixture
        .until("another edge", |r| {
            r.tunnel_ports.ends_with(&40_100u16.to_be_bytes())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_query_for_a_session_is_answered_until_it_is_withdrawn() {
    let fixture = AgentFixture::new(orders(false)).await;
    let query = |id, client: &str| SessionQuery {
        id,
        client: client.into(),
        ..SessionQuery::default()
    };
    fixture.controller.reports.report_log().replica_orders = ReplicaReportResponse {
        queries: vec![query(3, "[fd00::9]:4000"), query(4, "nonsense")],
        ..orders(false)
    };
    let report = fixture.until("an answer", |r| !r.found.is_empty()).await;
    let answers: Vec<_> = report
        .found
        .iter()
        .map(|f| {
            (
                f.query,
                f.sessions
                    .iter()
                    .map(|s| (s.service, s.port))
                    .collect::<Vec<_>>(),
            )
        })
        .collect();
    assert_eq!(answers, [(3, vec![(7, 4000)])]);
    fixture.controller.reports.report_log().replica_orders = orders(false);
    fixture
        .until("no answer any more", |r| r.found.is_empty())
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_search_for_a_session_delays_no_report() {
    let fixture = AgentFixture::new(orders(false)).await;
    fixture.until("registration", |_| true).await;
    let query = SessionQuery {
        id: 5,
        client: format!("10.1.1.9:{SLOW_PORT}"),
        ..SessionQuery::default()
    };
    fixture.controller.reports.report_log().replica_orders = ReplicaReportResponse {
        queries: vec![query],
        ..orders(false)
    };
    until("the search", || fixture.search.has_begun.load(Relaxed)).await;
    let reports = || fixture.controller.reports.report_log().replicas.len();
    let (before, begun) = (reports(), Instant::now());
    until("three reports while the search runs", || {
        reports() >= before + 3
    })
    .await;
    canal_timing::assert_time(
        "time of three reports while a search runs",
        begun.elapsed(),
        Duration::from_millis(1200),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn moved_heads_are_reported_to_the_gateway_after_the_map_writes() {
    let fixture = AgentFixture::new(orders(false)).await;
    let heard: Arc<Mutex<Vec<(u32, HeadChange)>>> = Arc::default();
    let recorded = heard.clone();
    fixture
        .agent
        .rebalance_with(Box::new(move |service, change| {
            recorded.lock().unwrap().push((service.get(), change))
        }));
    fixture.until("registration", |_| true).await;
    until("the replica's number", || {
        fixture.agent.dump()["orders"]["number"] == 2
    })
    .await;
    // Versions 4 to 6 of the table have the replicas in turn as the head: first this one, which has
    // number 2.
    let other = |up| replica("gw-1", 1, "250.1.0.2", up);
    fixture.apply(
        vec![
            table_of("alpha/default/web", 7, "az1", 4, &[2, 1]),
            other(false),
        ],
        10,
    );
    fixture.apply(
        vec![
            table_of("alpha/default/web", 7, "az1", 5, &[1, 2]),
            other(false),
        ],
        11,
    );
    assert!(heard.lock().unwrap().is_empty(), "the new head is not up");
    fixture.apply(
        vec![
            table_of("alpha/default/web", 7, "az1", 5, &[1, 2]),
            other(true),
        ],
        12,
    );
    fixture.apply(
        vec![
            table_of("alpha/default/web", 7, "az1", 6, &[2, 1]),
            other(true),
        ],
        13,
    );
    // One bit for each bucket: all of them move.
    let moved = HeadChange {
        left: u128::MAX,
        returned: 0,
    };
    assert_eq!(
        *heard.lock().unwrap(),
        [
            (7, moved),
            (
                7,
                HeadChange {
                    left: 0,
                    returned: u128::MAX
                }
            )
        ]
    );
}

/// Name, purpose, results of the last scans, age and duration of the last one, and the expected
/// decision.
type ScanCase = (
    &'static str,
    ScanPurpose,
    SessionScan,
    Option<(Duration, Duration)>,
    ScanDecision,
);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Returns owned sessions of one service: one session, in the bucket of this port.
fn owned(port: u16) -> OwnedSessions {
    OwnedSessions::from([(
        ServiceId::new(7).unwrap(),
        ServiceSessions {
            buckets: bucket(7, port),
            sessions: 1,
        },
    )])
}

fn wants(generation: u64) -> ScanPurpose {
    ScanPurpose {
        needed: true,
        generation,
        versions: [(7, 3)].into(),
        ..ScanPurpose::default()
    }
}

fn session_scan(owned: OwnedSessions, before: OwnedSessions) -> SessionScan {
    SessionScan {
        owned,
        before,
        generation: 5,
        versions: [(7, 3)].into(),
        ..SessionScan::default()
    }
}

/// Returns a scan that found the same sessions as the one before it.
fn quiet() -> SessionScan {
    session_scan(owned(1), owned(1))
}

fn cases_of_purposes() -> Vec<ScanCase> {
    vec![
        (
            "nobody asks",
            ScanPurpose {
                needed: false,
                ..wants(6)
            },
            quiet(),
            None,
            ScanDecision::NotNeeded,
        ),
        ("the first", wants(5), quiet(), None, ScanDecision::Scan),
        // The last scan's age and duration: 150 ms are less than `SCAN_IDLE_INTERVAL`, 250 ms are
        // more.
        (
            "unchanged",
            wants(5),
            quiet(),
            Some((ms(150), ms(2))),
            ScanDecision::Pause,
        ),
        (
            "unchanged for long",
            wants(5),
            quiet(),
            Some((ms(250), ms(2))),
            ScanDecision::Scan,
        ),
        (
            "another state",
            wants(6),
            quiet(),
            Some((ms(150), ms(2))),
            ScanDecision::Scan,
        ),
        (
            "another table",
            ScanPurpose {
                versions: [(7, 4)].into(),
                ..wants(5)
            },
            quiet(),
            Some((ms(150), ms(2))),
            ScanDecision::Scan,
        ),
        (
            "draining",
            ScanPurpose {
                draining: true,
                ..wants(5)
            },
            quiet(),
            Some((ms(150), ms(2))),
            ScanDecision::Scan,
        ),
        (
            "a bucket was emptied",
            wants(5),
            session_scan(OwnedSessions::new(), owned(1)),
            Some((ms(150), ms(2))),
            ScanDecision::Scan,
        ),
    ]
}

fn cases_of_sessions_and_intervals() -> Vec<ScanCase> {
    let more = |n| {
        owned(1)
            .into_iter()
            .map(|(id, of)| (id, ServiceSessions { sessions: n, ..of }))
            .collect::<OwnedSessions>()
    };
    vec![
        (
            "a bucket more",
            wants(5),
            session_scan(owned(1), owned(2)),
            Some((ms(150), ms(2))),
            ScanDecision::Scan,
        ),
        (
            "sessions more",
            wants(5),
            session_scan(more(9), more(1)),
            Some((ms(150), ms(2))),
            ScanDecision::Pause,
        ),
        (
            "another state, but looks are slow",
            wants(6),
            quiet(),
            Some((ms(4900), ms(100))),
            ScanDecision::Pause,
        ),
        (
            "the same, after its rest",
            wants(6),
            quiet(),
            Some((ms(5000), ms(100))),
            ScanDecision::Scan,
        ),
    ]
}

#[test]
fn session_scans_follow_changes_with_a_minimum_interval() {
    let cases = cases_of_purposes()
        .into_iter()
        .chain(cases_of_sessions_and_intervals());
    let now = Instant::now() + Duration::from_secs(60);
    for (name, purpose, looked, last, want) in cases {
        let looked = SessionScan {
            last: last.map(|(ago, took)| (now - ago, took)),
            ..looked
        };
        assert_eq!(decide_turn(&purpose, &looked, now), want, "{name}");
    }
}
