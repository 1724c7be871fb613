//! The agent against maps in memory, a table of sockets in memory, and a controller that hears it over TLS.

use std::collections::HashMap;

use canal_kit::drain::{self, Trigger};
use canal_kit::southbound::State;
use canal_kit::testing::FakeController;
use canal_model::ids::{Generation, ServiceId};
use canal_wire::fleet::{ReplicaOrders, ReplicaState};
use canal_wire::tier;

use super::*;
use crate::content::tests::{replica, table_of};
use crate::keeper::tests::Shared;
use crate::sockets::OfService;

struct Rig {
    agent: Agent,
    memory: Shared,
    controller: FakeController,
    registry: Registry,
    found: Found,
    folder: tempfile::TempDir,
    _trigger: Trigger,
}

/// What a look finds: sessions, or an answer that cannot be read.
type Found = Arc<Mutex<Option<Owned>>>;

/// The bucket of a session at port 80 from 10.1.1.9.
fn bucket(service: u32, port: u16) -> u128 {
    1 << tier::bucket(format!("10.1.1.9:{port}").parse().unwrap(), 80, ServiceId::new(service).unwrap())
}

/// One session of each of these services from these ports.
fn sessions(found: &Found, all: &[(u32, u16)]) {
    let one =
        |(service, port): &(u32, u16)| (ServiceId::new(*service).unwrap(), OfService { buckets: bucket(*service, *port), sessions: 1 });
    *found.lock().unwrap() = Some(all.iter().map(one).collect());
}

impl Rig {
    async fn new(orders: ReplicaOrders) -> Self {
        let controller = FakeController::start().await;
        controller.reports.heard().replica_orders = orders;
        let folder = tempfile::tempdir().unwrap();
        let found = Found::new(Mutex::new(Some(Owned::new())));
        let seen = found.clone();
        let (trigger, drain) = drain::tree();
        let (memory, registry) = (Shared::default(), Registry::new());
        let config = Config {
            az: "az1".parse().unwrap(),
            backend: "b1".parse().unwrap(),
            underlay: Ipv4Addr::new(250, 1, 0, 1),
            version: "1".into(),
            controller: Some(controller.reached_through(folder.path(), controller.address)),
            orders: folder.path().join("orders.json"),
            sockets: Sockets::of(move |_| seen.lock().unwrap().clone().ok_or(LookError::Format("a test's"))),
        };
        let agent = Agent::start(config, Box::new(memory.clone()), Box::new(|| (3, 9)), &registry, &drain).unwrap();
        Self { agent, memory, controller, registry, found, folder, _trigger: trigger }
    }

    fn apply(&self, resources: Vec<Arc<Resource>>, generation: u64) {
        let update =
            Update { origin: Origin::Controller, generation: Generation(generation), upserts: resources.clone(), removals: vec![] };
        self.agent.apply(&update, &State::of_resources(resources, Generation(generation)));
    }

    /// Waits for a report.
    async fn until(&self, what: &str, wanted: impl Fn(&ReplicaState) -> bool) -> ReplicaState {
        for _ in 0..500 {
            if let Some(last) = self.controller.reports.heard().replicas.last().filter(|r| wanted(r)) {
                return last.clone();
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{what}: {:?}", self.controller.reports.heard().replicas.last());
    }
}

fn orders(drain: bool) -> ReplicaOrders {
    ReplicaOrders { number: 2, edge: "250.1.0.200".into(), hosts: vec!["250.1.0.1".into(), "250.1.0.200".into()], drain, next_ms: 100 }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_registers_takes_orders_and_reports_what_it_owns_only_while_that_matters() {
    let rig = Rig::new(orders(false)).await;
    let first = rig.until("registration", |_| true).await;
    assert_eq!(
        (first.backend.as_str(), first.underlay.as_str(), first.generation, first.sessions, first.accepted),
        ("b1", "250.1.0.1", 0, 3, 9)
    );
    assert!(rig.agent.ready().is_err());
    sessions(&rig.found, &[(7, 40000), (8, 40001)]);
    // A head: nobody asks what it owns.
    rig.apply(vec![table_of("alpha/default/web", 7, "az1", 4, &[2, 1]), replica("gw-2", 2, "250.1.0.1", true)], 10);
    let head = rig.until("generation 10", |r| r.generation == 10).await;
    assert!(head.owned.is_empty());
    assert_eq!(rig.agent.ready(), Ok(()));
    {
        let m = rig.memory.0.lock().unwrap();
        assert_eq!(m.own, Some((2, Some("250.1.0.200".parse().unwrap()))));
        assert_eq!(m.hosts, [("250.1.0.1".parse().unwrap(), 2), ("250.1.0.200".parse().unwrap(), 0)].into());
    }
    // Behind another head: what it owns, by the version that its maps have.
    rig.apply(vec![table_of("alpha/default/web", 7, "az1", 5, &[1, 2])], 11);
    let behind = rig.until("generation 11", |r| r.generation == 11 && !r.owned.is_empty()).await;
    let owned: HashMap<u32, _> = behind.owned.iter().map(|o| (o.service, (o.table_version, o.buckets.clone(), o.sessions))).collect();
    let bit = |id: u32, port: u16| bucket(id, port).to_le_bytes().to_vec();
    // A service whose table it has no longer: version 0 proves nothing.
    assert_eq!(owned, [(7, (5, bit(7, 40000), 1)), (8, (0, bit(8, 40001), 1))].into());
    // Gone for two looks: gone.
    sessions(&rig.found, &[]);
    rig.until("nothing owned", |r| r.generation == 11 && r.owned.is_empty()).await;
    // What cannot be read is no proof that there is nothing.
    *rig.found.lock().unwrap() = None;
    rig.apply(vec![table_of("alpha/default/web", 7, "az1", 6, &[1, 2])], 12);
    for _ in 0..300 {
        if rig.registry.render().contains("canal_redirector_looks_total{result=\"failed\"}") {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(rig.agent.dump()["looked_at_generation"], 11);
    assert!(rig.controller.reports.heard().replicas.iter().all(|r| r.generation < 12));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_is_ordered_reported_and_ended_with_last_words() {
    let rig = Rig::new(orders(false)).await;
    rig.until("registration", |_| true).await;
    rig.controller.reports.heard().replica_orders = orders(true);
    let ordered = || rig.agent.dump()["orders"]["drain"] == true;
    for _ in 0..100 {
        if ordered() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(ordered(), "{}", rig.agent.dump());
    rig.agent.drain();
    rig.until("draining", |r| r.draining && !r.leaving).await;
    rig.agent.leave().await;
    rig.until("leaving", |r| r.leaving && r.owned.is_empty()).await;
    // The next process knows its number and edge before any controller answers, and serves.
    let kept = read_orders(&rig.folder.path().join("orders.json")).unwrap();
    assert_eq!((kept.number, kept.edge, kept.drain), (2, Some("250.1.0.200".parse().unwrap()), false));
}

#[tokio::test(flavor = "multi_thread")]
async fn orders_that_cannot_be_read_change_nothing() {
    let rig = Rig::new(ReplicaOrders { edge: "edge-1".into(), ..orders(false) }).await;
    rig.apply(vec![table_of("alpha/default/web", 7, "az1", 4, &[2, 1])], 10);
    for _ in 0..500 {
        if rig.registry.render().contains("canal_redirector_reports_total{result=\"bad_orders\"}") {
            assert_eq!(rig.memory.0.lock().unwrap().own, None);
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{}", rig.registry.render());
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_are_asked_to_leave_once_new_sessions_are_led_elsewhere_and_not_after_an_undrain() {
    let rig = Rig::new(orders(false)).await;
    let mut parting = rig.agent.parting();
    let ordered = async |drain: bool| {
        rig.controller.reports.heard().replica_orders = orders(drain);
        for _ in 0..200 {
            if rig.agent.dump()["orders"]["drain"] == drain {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("{}", rig.agent.dump());
    };
    rig.apply(vec![table_of("alpha/default/web", 7, "az1", 4, &[2, 1])], 10);
    ordered(true).await;
    assert!(!*parting.borrow_and_update(), "they would be back at once");
    rig.apply(vec![table_of("alpha/default/web", 7, "az1", 5, &[1, 2])], 11);
    assert!(*parting.borrow_and_update());
    ordered(false).await;
    assert!(!*parting.borrow_and_update());
    rig.agent.drain();
    assert!(*parting.borrow_and_update(), "its own drain is as good as an order");
}

/// Name, purpose, what the last look saw, how long ago it began and what it took, what follows.
type Case = (&'static str, Purpose, Looked, Option<(Duration, Duration)>, Turn);

#[test]
fn looks_are_made_when_something_moves_and_never_without_rest() {
    let ms = Duration::from_millis;
    let owned = |port: u16| Owned::from([(ServiceId::new(7).unwrap(), OfService { buckets: bucket(7, port), sessions: 1 })]);
    let more = |n| owned(1).into_iter().map(|(id, of)| (id, OfService { sessions: n, ..of })).collect::<Owned>();
    let wants = |generation| Purpose { needed: true, generation, versions: [(7, 3)].into(), ..Purpose::default() };
    let seen = |owned, before| Looked { owned, before, generation: 5, versions: [(7, 3)].into(), ..Looked::default() };
    let quiet = || seen(owned(1), owned(1));
    let cases: Vec<Case> = vec![
        ("nobody asks", Purpose { needed: false, ..wants(6) }, quiet(), None, Turn::Needless),
        ("the first", wants(5), quiet(), None, Turn::Look),
        ("all as it was", wants(5), quiet(), Some((ms(500), ms(2))), Turn::Rest),
        ("all as it was, for long", wants(5), quiet(), Some((ms(2000), ms(2))), Turn::Look),
        ("another state", wants(6), quiet(), Some((ms(500), ms(2))), Turn::Look),
        ("another table", Purpose { versions: [(7, 4)].into(), ..wants(5) }, quiet(), Some((ms(500), ms(2))), Turn::Look),
        ("draining", Purpose { draining: true, ..wants(5) }, quiet(), Some((ms(500), ms(2))), Turn::Look),
        ("a bucket was emptied", wants(5), seen(Owned::new(), owned(1)), Some((ms(500), ms(2))), Turn::Look),
        ("a bucket more", wants(5), seen(owned(1), owned(2)), Some((ms(500), ms(2))), Turn::Look),
        ("sessions more", wants(5), seen(more(9), more(1)), Some((ms(500), ms(2))), Turn::Rest),
        ("another state, but looks are slow", wants(6), quiet(), Some((ms(4900), ms(100))), Turn::Rest),
        ("the same, after its rest", wants(6), quiet(), Some((ms(5000), ms(100))), Turn::Look),
    ];
    let now = Instant::now() + Duration::from_secs(60);
    for (name, purpose, looked, last, want) in cases {
        let looked = Looked { last: last.map(|(ago, took)| (now - ago, took)), ..looked };
        assert_eq!(decide_turn(&purpose, &looked, now), want, "{name}");
    }
}
