//! Histories of a small fleet with the time in hand.

use canal_compiler::scope::Held;
use canal_model::fleet::{Buckets, OwnedBuckets};
use canal_model::ids::ServiceId;

use super::*;

const MS: Duration = Duration::from_millis(1);

/// A fleet, its clock, and what was written down.
struct Scene {
    roster: Roster,
    begun: Instant,
    now: Instant,
    generation: u64,
}

fn row(name: &str, number: u32, backend: &str, az: u8) -> StoredReplica {
    StoredReplica {
        name: name.parse().unwrap(),
        number: ReplicaNumber::new(number).unwrap(),
        backend: backend.parse().unwrap(),
        az: format!("az{az}").parse().unwrap(),
        underlay: Ipv4Addr::new(250, az, 0, 10 + number as u8),
        state: ReplicaState::Joining,
        drain: false,
    }
}

fn edge_row(az: u8) -> StoredEdge {
    StoredEdge { name: format!("e{az}").parse().unwrap(), az: format!("az{az}").parse().unwrap(), underlay: Ipv4Addr::new(250, az, 0, 2) }
}

fn name(n: &str) -> ReplicaName {
    n.parse().unwrap()
}

impl Scene {
    fn new(stored: StoredFleet) -> Self {
        let now = Instant::now();
        Self { roster: Roster::new(stored, &Plan::default(), FleetTimes::default(), now), begun: now, now, generation: 0 }
    }

    /// Replicas a and b of az1, c of az2, their edges, all active and up.
    fn running() -> Self {
        let mut s = Self::new(StoredFleet::default());
        for (n, number, backend, az) in [("a", 1, "b1", 1), ("b", 2, "b2", 1), ("c", 3, "b3", 2)] {
            s.roster.enter(row(n, number, backend, az), s.now);
        }
        s.roster.enter_edge(edge_row(1));
        s.roster.enter_edge(edge_row(2));
        s.publish(&["t"]);
        s.all_report();
        s.roster.observe(s.now);
        assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
        s
    }

    /// Every backend is told of these tenants.
    fn publish(&mut self, tenants: &[&str]) {
        self.generation += 1;
        let mut w = Whereabouts::default();
        for m in self.roster.members().values() {
            w.replicas.insert(m.row.name.clone(), m.row.backend.clone());
            let held = Held { tenants: tenants.iter().map(|t| t.parse().unwrap()).collect(), ..Held::default() };
            w.backends.insert(m.row.backend.clone(), held);
        }
        self.roster.published(Generation(self.generation), self.generation as u32, &w, self.now);
    }

    fn report(&mut self, n: &str, change: impl FnOnce(&mut ReplicaReport, &mut Known)) -> bool {
        let member = &self.roster.members()[&name(n)];
        let newest = Generation(self.generation);
        let mut report = ReplicaReport {
            backend: member.row.backend.clone(),
            az: member.row.az.clone(),
            underlay: member.row.underlay,
            generation: newest,
            draining: false,
            leaving: false,
            owned: BTreeMap::new(),
            sessions: 0,
            accepted: 0,
            version: String::new(),
        };
        let mut known = Known { whole: newest, content: newest, ..Known::default() };
        change(&mut report, &mut known);
        self.roster.hear_replica(&name(n), report, known, self.now)
    }

    fn edge(&mut self, az: u8, seen: &[(&str, bool)]) -> bool {
        let newest = Generation(self.generation);
        let report = EdgeReport {
            az: format!("az{az}").parse().unwrap(),
            underlay: Ipv4Addr::new(250, az, 0, 2),
            generation: newest,
            seen: seen.iter().map(|(n, up)| (name(n), *up)).collect(),
            version: String::new(),
        };
        self.roster.hear_edge(report, Known { whole: newest, content: newest, ..Known::default() }, self.now)
    }

    fn all_report(&mut self) {
        for n in ["a", "b", "c"] {
            self.report(n, |_, _| {});
        }
        self.edge(1, &[("a", true), ("b", true)]);
        self.edge(2, &[("c", true)]);
    }

    /// Lets time pass; `each` is what still happens every 200 ms.
    fn pass(&mut self, span: Duration, mut each: impl FnMut(&mut Self)) -> Observed {
        let until = self.now + span;
        let mut all = Observed::default();
        while self.now < until {
            self.now += 200 * MS;
            each(self);
            let seen = self.roster.observe(self.now);
            all.changed |= seen.changed;
            all.closed.extend(seen.closed);
            all.gone.extend(seen.gone);
            all.rows.extend(seen.rows);
        }
        all
    }

    /// `name:State+` for each, `-` where it is down, as the planner sees them.
    fn states(&self) -> String {
        let fleet = self.roster.fleet(self.now);
        let word = |r: &FleetReplica| format!("{}:{:?}{}", r.name, r.state, if r.up { '+' } else { '-' });
        fleet.replicas.values().map(word).collect::<Vec<_>>().join(" ")
    }
}

#[test]
fn a_silent_edge_is_noticed_in_time_and_its_word_is_gone_with_it() {
    let mut s = Scene::running();
    let others = |s: &mut Scene| {
        for n in ["a", "b", "c"] {
            s.report(n, |_, _| {});
        }
        s.edge(1, &[("a", true), ("b", false)]);
    };
    assert!(s.pass(1400 * MS, others).closed.is_empty());
    let closed = s.pass(200 * MS, others).closed;
    assert_eq!(closed.iter().map(AzName::as_str).collect::<Vec<_>>(), ["az2"]);
    assert_eq!(s.states(), "a:Active+ b:Active- c:Active+", "b is down by its edge, c has nobody's word and reports");
    let quiet = |s: &mut Scene| {
        s.edge(1, &[("a", true), ("b", true)]);
    };
    s.pass(2800 * MS, quiet);
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+", "three seconds are not over");
    s.pass(400 * MS, quiet);
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active-", "c is down, the others have their edge's word");
    assert!(s.edge(2, &[("c", true)]), "an edge that is back is news");
    s.roster.observe(s.now);
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
}

#[test]
fn a_replica_is_gone_when_it_is_silent_for_long_and_dead_by_its_edge() {
    let mut s = Scene::running();
    let word = |up: bool| {
        move |s: &mut Scene| {
            s.edge(1, &[("a", up), ("b", true)]);
            s.edge(2, &[("c", true)]);
            for n in ["b", "c"] {
                s.report(n, |_, _| {});
            }
        }
    };
    assert!(s.pass(60_000 * MS, word(true)).gone.is_empty(), "its edge sees it: the path of its reports is broken, it is not");
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
    assert_eq!(s.pass(200 * MS, word(false)).gone, [name("a")]);
    assert_eq!(s.states(), "b:Active+ c:Active+");
    // It is freed once the tables that do not have it were told, and everybody has them.
    let plan = Plan::default();
    s.generation += 1;
    let newest = Generation(s.generation);
    assert!(s.roster.forgettable(&plan, newest).is_empty(), "nobody acknowledged yet");
    word(false)(&mut s);
    assert_eq!(s.roster.forgettable(&plan, newest), [name("a")]);
    s.roster.forget(&name("a"));
    assert_eq!(s.roster.members().len(), 2);
}

#[test]
fn nobody_heard_is_the_controllers_own_fault() {
    let mut s = Scene::running();
    let seen = s.pass(120_000 * MS, |_| {});
    assert!(seen.closed.is_empty() && seen.gone.is_empty() && s.roster.is_blind(s.now), "{seen:?}");
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
    // The first who is back does not make the others look dead; after the grace, silence counts again.
    let first = |s: &mut Scene| {
        s.report("a", |_, _| {});
    };
    s.pass(4400 * MS, first);
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
    let late = s.pass(1000 * MS, first);
    assert_eq!((s.states().as_str(), late.closed.len()), ("a:Active+ b:Active- c:Active-", 2));
}

#[test]
fn a_restart_of_the_controller_changes_nothing_until_the_grace_is_over() {
    let mut a = row("a", 1, "b1", 1);
    a.state = ReplicaState::Active;
    let mut b = row("b", 2, "b2", 1);
    (b.state, b.drain) = (ReplicaState::Draining, true);
    let mut c = row("c", 3, "b3", 2);
    c.state = ReplicaState::Draining;
    let azs = BTreeMap::from([("az1".parse().unwrap(), 1), ("az2".parse().unwrap(), 2)]);
    let mut s = Scene::new(StoredFleet { replicas: vec![a, b, c], edges: vec![edge_row(1), edge_row(2)], azs });
    let all = "a:Active+ b:Draining+ c:Draining+";
    assert_eq!(s.states(), all);
    s.pass(10_000 * MS, |_| {});
    assert_eq!(s.states(), all, "nobody came yet");
    let edge = |s: &Scene, az: &str| s.roster.ownership().edge(&az.parse().unwrap());
    assert_eq!((edge(&s, "az1"), edge(&s, "az2")), (Some(0), Some(0)), "what edges have that were not heard is waited for");
    s.publish(&["t"]);
    s.report("a", |_, known| known.whole = Generation(0));
    s.roster.observe(s.now);
    assert_eq!(s.states(), all, "an active one needs not prove itself again");
    s.report("c", |_, _| {});
    s.report("b", |_, _| {});
    s.roster.observe(s.now);
    assert_eq!(s.states(), "a:Active+ b:Draining+ c:Active+", "c does not want to drain any more, b is ordered to");
    let grace = FleetTimes::default().grace;
    s.pass(grace, |s| _ = s.edge(1, &[("a", true), ("b", true)]));
    assert_eq!((edge(&s, "az1"), edge(&s, "az2")), (Some(1), None), "who does not come within the grace is waited for no longer");
    assert_eq!(s.begun.elapsed().as_secs(), 0, "no test waits for real time");
}

#[test]
fn who_lacks_a_tenant_takes_no_sessions_of_it() {
    let mut s = Scene::running();
    let tenant = |t: &str| t.parse::<TenantName>().unwrap();
    let a = ReplicaNumber::new(1).unwrap();
    assert!(s.roster.is_ready(a, &tenant("t")) && !s.roster.is_ready(a, &tenant("u")));
    s.publish(&["t", "u"]);
    let old = Generation(s.generation - 1);
    let lag = move |s: &mut Scene| {
        s.all_report();
        s.report("a", |report, known| (report.generation, known.whole) = (old, old));
    };
    s.pass(4000 * MS, lag);
    assert!(!s.roster.is_ready(a, &tenant("u")) && s.roster.is_ready(ReplicaNumber::new(2).unwrap(), &tenant("u")));
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+", "it may take a while");
    s.pass(2000 * MS, lag);
    assert_eq!(s.states(), "a:Joining+ b:Active+ c:Active+", "too long: the others go on without it");
    s.all_report();
    assert!(s.roster.is_ready(a, &tenant("u")));
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
    // A new process of the same name has nothing yet.
    s.report("a", |report, known| (report.generation, *known) = (Generation(0), Known::default()));
    s.roster.observe(s.now);
    assert_eq!(s.states(), "a:Joining+ b:Active+ c:Active+");
    // A dead one is waited for by nobody.
    s.edge(1, &[("a", false), ("b", true)]);
    s.roster.observe(s.now);
    assert!(s.roster.is_ready(a, &tenant("u")));
}

/// S2: what a replica refuses of one tenant is lacking for that tenant alone, also for a process that starts anew.
#[test]
fn refused_resource_makes_only_its_tenant_unready() {
    let mut s = Scene::running();
    let tenant = |t: &str| t.parse::<TenantName>().unwrap();
    let ready = |s: &Scene| ["t", "u", "v"].map(|t| s.roster.is_ready(ReplicaNumber::new(1).unwrap(), &tenant(t)));
    // Of t a policy is refused from now on; u and v are new.
    s.publish(&["t", "u", "v"]);
    let refuses = |s: &mut Scene, at: u64| {
        s.all_report();
        s.report("a", |_, known| _ = known.behind.insert("t".parse().unwrap(), Generation(at)));
    };
    s.pass(8000 * MS, |s| refuses(s, 1));
    assert_eq!((s.states().as_str(), ready(&s)), ("a:Active+ b:Active+ c:Active+", [true; 3]), "t is served by what it had before");
    // The process starts anew, and refuses the policy before it had anything of t.
    s.report("a", |report, known| (report.generation, *known) = (Generation(0), Known::default()));
    s.roster.observe(s.now);
    assert_eq!((s.states().as_str(), ready(&s)), ("a:Joining+ b:Active+ c:Active+", [false; 3]));
    s.pass(8000 * MS, |s| refuses(s, 0));
    assert_eq!((s.states().as_str(), ready(&s)), ("a:Active+ b:Active+ c:Active+", [false, true, true]));
    // Mended.
    s.all_report();
    assert_eq!(ready(&s), [true; 3]);
}

#[test]
fn a_report_stands_for_the_tables_of_its_generation_and_no_newer_ones() {
    let mut s = Scene::running();
    for _ in 0..4 {
        s.publish(&["t"]);
    }
    s.roster.note_plan(Generation(5), 9);
    let plan = |s: &Scene| s.roster.ownership().report(ReplicaNumber::new(1).unwrap()).unwrap().1.plan;
    for (what, reported, whole, content, want) in [
        ("as reported", 3, 5, 5, 3),
        ("not more than it acknowledged", 5, 2, 5, 2),
        ("a plan that changed no table is in the generation before", 5, 5, 5, 9),
        ("between two publications", 7, 7, 7, 9),
        ("nothing since concerned it", 2, 5, 2, 9),
        ("the controller has just started, and nothing differs", 2, 5, 0, 9),
        ("before all", 0, 5, 0, 0),
    ] {
        let known = Known { whole: Generation(whole), content: Generation(content), ..Known::default() };
        s.report("a", |report, k| (report.generation, *k) = (Generation(reported), known));
        assert_eq!(plan(&s), want, "{what}");
    }
    s.report("a", |_, _| {});
    assert!(!s.report("a", |_, _| {}), "the same again is no news");
    let owned = [(ServiceId::new(7).unwrap(), OwnedBuckets { version: 3, buckets: Buckets(5) })];
    assert!(s.report("a", |report, _| report.owned = owned.into()), "sessions are");
}

#[test]
fn the_memory_of_publications_is_bounded() {
    let mut s = Scene::running();
    let first = s.generation as u32;
    let over = u32::try_from(PUBLICATIONS_MAX).unwrap() + 10;
    (0..over).for_each(|i| s.roster.note_plan(Generation(u64::from(10 + i)), 10 + i));
    assert_eq!(s.roster.plans.len(), PUBLICATIONS_MAX);
    assert_eq!(s.roster.plan_at(Generation(u64::from(first))), 0, "too far behind counts as having nothing");
    assert_eq!(s.roster.plan_at(Generation(u64::from(9 + over))), 9 + over);
}

#[test]
fn operators_orders_hold_and_the_living_are_not_forgotten() {
    let mut s = Scene::running();
    assert!(!s.roster.order_drain(&name("z"), true) && s.roster.order_drain(&name("a"), true));
    let seen = s.pass(200 * MS, Scene::all_report);
    assert_eq!((s.states().as_str(), seen.rows.len()), ("a:Draining+ b:Active+ c:Active+", 1));
    s.roster.order_drain(&name("a"), false);
    s.pass(200 * MS, Scene::all_report);
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
    assert_eq!((s.roster.declare_gone(&name("z"), s.now), s.roster.declare_gone(&name("a"), s.now)), (None, Some(false)));
    let without_a = |s: &mut Scene| {
        for n in ["b", "c"] {
            s.report(n, |_, _| {});
        }
    };
    s.pass(3200 * MS, without_a);
    assert_eq!(s.roster.declare_gone(&name("a"), s.now), Some(true));
    // Its last words do the same at once.
    s.report("b", |report, _| report.leaving = true);
    assert_eq!(s.states(), "c:Active+");
}
