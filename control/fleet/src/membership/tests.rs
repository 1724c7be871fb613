//! Histories of a small fleet under a simulated clock.

use canal_compiler::scope::BackendScope;
use canal_model::fleet::{BucketSet, OwnedBuckets};
use canal_model::ids::ServiceId;

use super::*;

const MS: Duration = Duration::from_millis(1);

/// A fleet, its clock, and the last published generation.
struct MembershipFixture {
    membership: Membership,
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
    StoredEdge {
        name: format!("e{az}").parse().unwrap(),
        az: format!("az{az}").parse().unwrap(),
        underlay: Ipv4Addr::new(250, az, 0, 2),
        anycast: None,
    }
}

fn name(n: &str) -> ReplicaName {
    n.parse().unwrap()
}

impl MembershipFixture {
    fn new(stored: StoredFleet) -> Self {
        let now = Instant::now();
        Self {
            membership: Membership::new(stored, &Plan::default(), SilenceTimeouts::default(), now),
            begun: now,
            now,
            generation: 0,
        }
    }

    /// Returns replicas a and b of az1, c of az2, and their edges, all active and up.
    fn running() -> Self {
        let mut s = Self::new(StoredFleet::default());
        for (n, number, backend, az) in [("a", 1, "b1", 1), ("b", 2, "b2", 1), ("c", 3, "b3", 2)] {
            s.membership
                .register_replica(row(n, number, backend, az), s.now);
        }
        s.membership.register_edge(edge_row(1), &[]);
        s.membership.register_edge(edge_row(2), &[]);
        s.publish(&["t"]);
        s.all_report();
        s.membership.observe(s.now);
        assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
        s
    }

    /// Publishes these tenants to every backend.
    fn publish(&mut self, tenants: &[&str]) {
        self.generation += 1;
        let mut w = TierPlacement::default();
        for m in self.membership.members().values() {
            w.replicas.insert(m.row.name.clone(), m.row.backend.clone());
            let held = BackendScope {
                tenants: tenants.iter().map(|t| t.parse().unwrap()).collect(),
                ..BackendScope::default()
            };
            w.backends.insert(m.row.backend.clone(), held);
        }
        self.membership.published(
            Generation(self.generation),
            self.generation as u32,
            &w,
            self.now,
        );
    }

    fn report(
        &mut self,
        n: &str,
        change: impl FnOnce(&mut ReplicaReport, &mut DeliveryProgress),
    ) -> bool {
        let member = &self.membership.members()[&name(n)];
        let newest = Generation(self.generation);
        let mut report = ReplicaReport {
            backend: member.row.backend.clone(),
            az: member.row.az.clone(),
            underlay: member.row.underlay,
            generation: newest,
            draining: false,
            leaving: false,
            owned: BTreeMap::new(),
            scanned_after: Some(self.membership.mark()),
            sessions: 0,
            accepted: 0,
            version: String::new(),
            cores: 2,
            tunnel_ports: Arc::default(),
            session_answers: Vec::new(),
        };
        let mut known = DeliveryProgress {
            acked_through: newest,
            content: newest,
            ..DeliveryProgress::default()
        };
        change(&mut report, &mut known);
        self.membership
            .record_replica_report(&name(n), report, known, self.now)
    }

    fn edge_report(&self, az: u8, host: u8, end: u8, seen: &[(&str, bool)]) -> EdgeReport {
        EdgeReport {
            az: format!("az{az}").parse().unwrap(),
            underlay: Ipv4Addr::new(250, az, 0, host),
            tunnel_end: Ipv4Addr::new(250, az, 0, end),
            generation: Generation(self.generation),
            replicas_up: seen.iter().map(|(n, up)| (name(n), *up)).collect(),
            version: String::new(),
            tunnels_version: 0,
            paths: Vec::new(),
        }
    }

    fn edge(&mut self, az: u8, seen: &[(&str, bool)]) -> bool {
        self.edge_as(&format!("e{az}"), self.edge_report(az, 2, 2, seen))
    }

    /// Reports as this edge, which is registered if it is new.
    fn edge_as(&mut self, edge: &str, report: EdgeReport) -> bool {
        let edge: EdgeName = edge.parse().unwrap();
        if let Some(replaces) = self
            .membership
            .check_edge(&edge, &report, self.now)
            .unwrap()
        {
            let anycast = Some(report.tunnel_end).filter(|end| *end != report.underlay);
            let row = StoredEdge {
                name: edge.clone(),
                az: report.az.clone(),
                underlay: report.underlay,
                anycast,
            };
            self.membership.register_edge(row, &replaces);
        }
        let generation = report.generation;
        self.membership.record_edge_report(
            &edge,
            report,
            DeliveryProgress {
                acked_through: generation,
                content: generation,
                ..DeliveryProgress::default()
            },
            self.now,
        )
    }

    fn all_report(&mut self) {
        for n in ["a", "b", "c"] {
            self.report(n, |_, _| {});
        }
        self.edge(1, &[("a", true), ("b", true)]);
        self.edge(2, &[("c", true)]);
    }

    /// Lets time pass; `each` runs every 200 ms.
    fn pass(&mut self, span: Duration, mut each: impl FnMut(&mut Self)) -> MembershipUpdate {
        let until = self.now + span;
        let mut all = MembershipUpdate::default();
        while self.now < until {
            self.now += 200 * MS;
            each(self);
            let seen = self.membership.observe(self.now);
            all.changed |= seen.changed;
            all.closed.extend(seen.closed);
            all.gone.extend(seen.gone);
            all.rows.extend(seen.rows);
        }
        all
    }

    /// Returns `name:State+` for each replica, with `-` if it is down, as the planner sees them.
    fn states(&self) -> String {
        let fleet = self.membership.fleet(self.now);
        let word =
            |r: &FleetReplica| format!("{}:{:?}{}", r.name, r.state, if r.up { '+' } else { '-' });
        fleet
            .replicas
            .values()
            .map(word)
            .collect::<Vec<_>>()
            .join(" ")
    }
}

#[test]
fn a_silent_edge_times_out_and_its_reports_expire() {
    let mut s = MembershipFixture::running();
    let others = |s: &mut MembershipFixture| {
        for n in ["a", "b", "c"] {
            s.report(n, |_, _| {});
        }
        s.edge(1, &[("a", true), ("b", false)]);
    };
    assert!(s.pass(1400 * MS, others).closed.is_empty());
    let closed = s.pass(200 * MS, others).closed;
    assert_eq!(
        closed.iter().map(AzName::as_str).collect::<Vec<_>>(),
        ["az2"]
    );
    assert_eq!(
        s.states(),
        "a:Active+ b:Active- c:Active+",
        "b is down by its edge; no edge reports c, but c reports itself"
    );
    let quiet = |s: &mut MembershipFixture| {
        s.edge(1, &[("a", true), ("b", true)]);
    };
    s.pass(2800 * MS, quiet);
    assert_eq!(
        s.states(),
        "a:Active+ b:Active+ c:Active+",
        "three seconds are not over"
    );
    s.pass(400 * MS, quiet);
    assert_eq!(
        s.states(),
        "a:Active+ b:Active+ c:Active-",
        "c is down, the others have their edge's word"
    );
    assert!(s.edge(2, &[("c", true)]), "an edge that is back is news");
    s.membership.observe(s.now);
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
}

/// Returns a fleet with two edges of az1 that share one tunnel end.
fn with_two_edges() -> MembershipFixture {
    let mut s = MembershipFixture::new(StoredFleet::default());
    for (n, number, backend) in [("a", 1, "b1"), ("b", 2, "b2")] {
        s.membership
            .register_replica(row(n, number, backend, 1), s.now);
    }
    s.publish(&["t"]);
    s.membership.note_plan(Generation(s.generation), 5);
    two_report(&mut s, true);
    s.membership.observe(s.now);
    assert_eq!(s.states(), "a:Active+ b:Active+");
    s
}

fn replicas_report(s: &mut MembershipFixture) {
    for n in ["a", "b"] {
        s.report(n, |_, _| {});
    }
}

/// Reports as both edges; `b` is the state in which the second sees replica b.
fn two_report(s: &mut MembershipFixture, b: bool) {
    replicas_report(s);
    s.edge_as("e1", s.edge_report(1, 2, 99, &[("a", true), ("b", true)]));
    s.edge_as("e2", s.edge_report(1, 3, 99, &[("a", true), ("b", b)]));
}

/// An earlier version allowed one edge per AZ: it refused the second edge, and closed the AZ with
/// its only edge.
#[test]
fn an_az_stays_open_while_one_of_its_edges_reports() {
    let az = || "az1".parse::<AzName>().unwrap();
    let mut s = with_two_edges();
    let first_alone = |s: &mut MembershipFixture| {
        replicas_report(s);
        s.edge_as("e1", s.edge_report(1, 2, 99, &[("a", true), ("b", true)]));
    };
    let seen = s.pass(3000 * MS, first_alone);
    assert!(
        seen.changed && seen.closed.is_empty() && s.membership.edges().is_alive(&az()),
        "{seen:?}"
    );
    assert_eq!(
        (s.states().as_str(), s.membership.ownership().edge(&az())),
        ("a:Active+ b:Active+", Some(5))
    );
    // After the longer timeout the silent edge is forgotten, and its address is free.
    s.pass(30_000 * MS, first_alone);
    assert_eq!(s.membership.edges().values().count(), 1);
    let closed = s.pass(2000 * MS, replicas_report).closed;
    assert_eq!(closed, [az()], "the last one");
}

/// An edge that did not receive a table yet would send sessions to owners that the planner believes
/// to be free.
#[test]
fn tables_count_as_spread_when_all_edges_of_the_az_have_them() {
    let mut s = with_two_edges();
    let of_az = |s: &MembershipFixture| s.membership.ownership().edge(&"az1".parse().unwrap());
    assert_eq!(of_az(&s), Some(5));
    s.publish(&["t"]);
    s.membership.note_plan(Generation(s.generation), 6);
    s.edge_as("e1", s.edge_report(1, 2, 99, &[]));
    assert_eq!(of_az(&s), Some(5), "e2 has the tables before");
    s.edge_as("e2", s.edge_report(1, 3, 99, &[]));
    assert_eq!(of_az(&s), Some(6));
    // An edge that joins has the tables that it reports.
    let old = EdgeReport {
        generation: Generation(s.generation - 1),
        ..s.edge_report(1, 4, 99, &[])
    };
    s.edge_as("e3", old);
    assert_eq!(of_az(&s), Some(5));
}

#[test]
fn a_replica_is_down_when_no_edge_of_its_az_reaches_it() {
    let mut s = with_two_edges();
    s.pass(400 * MS, |s| two_report(s, false));
    assert_eq!(s.states(), "a:Active+ b:Active+", "one edge reaches it");
    s.pass(400 * MS, |s| {
        replicas_report(s);
        s.edge_as("e1", s.edge_report(1, 2, 99, &[("a", true), ("b", false)]));
        s.edge_as("e2", s.edge_report(1, 3, 99, &[("a", true), ("b", false)]));
    });
    assert_eq!(s.states(), "a:Active+ b:Active-");
}

#[test]
fn edges_of_an_az_share_one_unused_tunnel_address() {
    let mut s = with_two_edges();
    let check = |s: &MembershipFixture, edge: &str, report: EdgeReport| {
        s.membership
            .check_edge(&edge.parse().unwrap(), &report, s.now)
            .map_err(|e| e.name())
    };
    // The edges of az1 share the tunnel end .99; .98 and .4 are other addresses.
    assert_eq!(
        check(&s, "e3", s.edge_report(1, 4, 98, &[])),
        Err("tunnel_end")
    );
    assert_eq!(
        check(&s, "e3", s.edge_report(1, 4, 4, &[])),
        Err("tunnel_end"),
        "an edge that assumes that it is the only one"
    );
    assert_eq!(
        check(&s, "e3", s.edge_report(1, 4, 11, &[])),
        Err("underlay_taken"),
        "the address is a replica's"
    );
    assert_eq!(
        check(&s, "e3", s.edge_report(1, 99, 99, &[])),
        Err("underlay_taken")
    );
    assert_eq!(
        check(&s, "e3", s.edge_report(1, 4, 99, &[])),
        Ok(Some(vec![]))
    );
    assert_eq!(check(&s, "e2", s.edge_report(1, 3, 99, &[])), Ok(None));
    // The AZ is filled up to EDGES_MAX with edges of the right tunnel end.
    for n in 3..=EDGES_MAX as u8 {
        s.edge_as(&format!("e{n}"), s.edge_report(1, 100 + n, 99, &[]));
    }
    assert_eq!(
        check(&s, "more", s.edge_report(1, 200, 99, &[])),
        Err("edges")
    );
    // When all edges are silent, new ones may use another tunnel end.
    // 2 s are longer than the default of `edge_silent`, 1.5 s.
    s.pass(2000 * MS, replicas_report);
    // .11 is replica a, which still reports.
    assert_eq!(
        check(&s, "e3", s.edge_report(1, 4, 11, &[])),
        Err("underlay_taken")
    );
    // The silent edges would all be replaced.
    assert_eq!(
        check(&s, "more", s.edge_report(1, 200, 98, &[]))
            .unwrap()
            .unwrap()
            .len(),
        EDGES_MAX
    );
}

/// Edges take source ports from these reports: 10 per core of the replica, not of the edge.
#[test]
fn replica_tunnels_are_published_once_to_edges_of_the_az() {
    let mut s = MembershipFixture::running();
    let az: AzName = "az1".parse().unwrap();
    let before = s.membership.tunnels(&az).0;
    let ports = Arc::<[u8]>::from([0x9c, 0x40, 0x9c, 0x41]);
    s.report("b", |report, _| report.tunnel_ports = ports.clone());
    let (version, tunnels) = s.membership.tunnels(&az);
    assert_eq!(
        tunnels.collect::<Vec<_>>(),
        [(Ipv4Addr::new(250, 1, 0, 12), ports.clone())]
    );
    assert!(
        version > before
            && s.membership
                .tunnels(&"az2".parse().unwrap())
                .1
                .next()
                .is_none()
    );
    s.report("b", |report, _| report.tunnel_ports = ports.clone());
    assert_eq!(s.membership.tunnels(&az).0, version, "no news");
}

#[test]
fn a_replica_is_gone_when_silent_and_reported_down_by_its_edge() {
    let mut s = MembershipFixture::running();
    let word = |up: bool| {
        move |s: &mut MembershipFixture| {
            s.edge(1, &[("a", up), ("b", true)]);
            s.edge(2, &[("c", true)]);
            for n in ["b", "c"] {
                s.report(n, |_, _| {});
            }
        }
    };
    assert!(
        s.pass(60_000 * MS, word(true)).gone.is_empty(),
        "a replica that its edge sees up is not gone, although its reports are lost"
    );
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
    assert_eq!(s.pass(200 * MS, word(false)).gone, [name("a")]);
    assert_eq!(s.states(), "b:Active+ c:Active+");
    // The number is free once tables without the replica were published, and all members have them.
    let plan = Plan::default();
    s.generation += 1;
    let newest = Generation(s.generation);
    assert!(
        s.membership.forgettable(&plan, newest).is_empty(),
        "no subscriber has acknowledged yet"
    );
    word(false)(&mut s);
    assert_eq!(s.membership.forgettable(&plan, newest), [name("a")]);
    s.membership.forget(&name("a"));
    assert_eq!(s.membership.members().len(), 2);
}

#[test]
fn silence_of_all_replicas_marks_none_as_down() {
    let mut s = MembershipFixture::running();
    let seen = s.pass(120_000 * MS, |_| {});
    assert!(
        seen.closed.is_empty() && seen.gone.is_empty() && s.membership.is_cut_off(s.now),
        "{seen:?}"
    );
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
    // The first member that is back does not make the others appear down; after the grace time,
    // silence counts again.
    let first = |s: &mut MembershipFixture| {
        s.report("a", |_, _| {});
    };
    s.pass(4400 * MS, first);
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
    let late = s.pass(1000 * MS, first);
    assert_eq!(
        (s.states().as_str(), late.closed.len()),
        ("a:Active+ b:Active- c:Active-", 2)
    );
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
    let mut s = MembershipFixture::new(StoredFleet {
        replicas: vec![a, b, c],
        edges: vec![edge_row(1), edge_row(2)],
        azs,
    });
    let all = "a:Active+ b:Draining+ c:Draining+";
    assert_eq!(s.states(), all);
    // 10 s are longer than the grace period, which begins again while no member reports.
    s.pass(10_000 * MS, |_| {});
    assert_eq!(s.states(), all, "no replica has registered yet");
    let edge =
        |s: &MembershipFixture, az: &str| s.membership.ownership().edge(&az.parse().unwrap());
    assert_eq!(
        (edge(&s, "az1"), edge(&s, "az2")),
        (Some(0), Some(0)),
        "the plan waits for the state of edges that have not reported"
    );
    s.publish(&["t"]);
    s.report("a", |_, known| known.acked_through = Generation(0));
    s.membership.observe(s.now);
    assert_eq!(
        s.states(),
        all,
        "an active one needs not prove itself again"
    );
    s.report("c", |_, _| {});
    s.report("b", |_, _| {});
    s.membership.observe(s.now);
    assert_eq!(
        s.states(),
        "a:Active+ b:Draining+ c:Active+",
        "c no longer requests a drain, and an operator drains b"
    );
    let grace = SilenceTimeouts::default().grace;
    s.pass(grace, |s| _ = s.edge(1, &[("a", true), ("b", true)]));
    assert_eq!(
        (edge(&s, "az1"), edge(&s, "az2")),
        (Some(1), None),
        "after the grace period the plan no longer waits for the absent edge of az2"
    );
    // The test's time is simulated, so a second of real time would mean that something waits.
    canal_timing::assert_time(
        "real time of a test with simulated time",
        s.begun.elapsed(),
        std::time::Duration::from_secs(1),
    );
}

#[test]
fn a_replica_without_the_tenant_gets_none_of_its_sessions() {
    let mut s = MembershipFixture::running();
    let tenant = |t: &str| t.parse::<TenantName>().unwrap();
    let a = ReplicaNumber::new(1).unwrap();
    assert!(s.membership.is_ready(a, &tenant("t")) && !s.membership.is_ready(a, &tenant("u")));
    s.publish(&["t", "u"]);
    let old = Generation(s.generation - 1);
    // Replica a keeps reporting, but acknowledges no generation with the tenant u.
    let lag = move |s: &mut MembershipFixture| {
        s.all_report();
        s.report("a", |report, known| {
            (report.generation, known.acked_through) = (old, old)
        });
    };
    // 4 s are shorter than the default of `lag`, 5 s, and 6 s are longer.
    s.pass(4000 * MS, lag);
    assert!(
        !s.membership.is_ready(a, &tenant("u"))
            && s.membership
                .is_ready(ReplicaNumber::new(2).unwrap(), &tenant("u"))
    );
    assert_eq!(
        s.states(),
        "a:Active+ b:Active+ c:Active+",
        "a replica that is behind stays active for a while"
    );
    s.pass(2000 * MS, lag);
    assert_eq!(
        s.states(),
        "a:Joining+ b:Active+ c:Active+",
        "the other replicas go on without one that is behind for too long"
    );
    s.all_report();
    assert!(s.membership.is_ready(a, &tenant("u")));
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
    // A new process of the same name has no resources yet.
    s.report("a", |report, known| {
        (report.generation, *known) = (Generation(0), DeliveryProgress::default())
    });
    s.membership.observe(s.now);
    assert_eq!(s.states(), "a:Joining+ b:Active+ c:Active+");
    // No table waits for a replica that is down.
    s.edge(1, &[("a", false), ("b", true)]);
    s.membership.observe(s.now);
    assert!(s.membership.is_ready(a, &tenant("u")));
}

/// A resource that a replica refuses is lacking for its tenant alone, also for a restarted
/// process.
#[test]
fn refused_resource_makes_only_its_tenant_unready() {
    let mut s = MembershipFixture::running();
    let tenant = |t: &str| t.parse::<TenantName>().unwrap();
    let ready = |s: &MembershipFixture| {
        ["t", "u", "v"].map(|t| {
            s.membership
                .is_ready(ReplicaNumber::new(1).unwrap(), &tenant(t))
        })
    };
    // From now on the replica refuses a policy of t; u and v are new.
    s.publish(&["t", "u", "v"]);
    let refuses = |s: &mut MembershipFixture, at: u64| {
        s.all_report();
        s.report("a", |_, known| {
            _ = known.behind.insert("t".parse().unwrap(), Generation(at))
        });
    };
    // 8 s are longer than `lag`: a refusal of one tenant's resource is not a lag.
    s.pass(8000 * MS, |s| refuses(s, 1));
    assert_eq!(
        (s.states().as_str(), ready(&s)),
        ("a:Active+ b:Active+ c:Active+", [true; 3]),
        "t is served by what it had before"
    );
    // The process restarts, and refuses the policy before it has anything of t.
    s.report("a", |report, known| {
        (report.generation, *known) = (Generation(0), DeliveryProgress::default())
    });
    s.membership.observe(s.now);
    assert_eq!(
        (s.states().as_str(), ready(&s)),
        ("a:Joining+ b:Active+ c:Active+", [false; 3])
    );
    // At generation 0 the refusal is older than everything of t that the process could have.
    s.pass(8000 * MS, |s| refuses(s, 0));
    assert_eq!(
        (s.states().as_str(), ready(&s)),
        ("a:Active+ b:Active+ c:Active+", [false, true, true])
    );
    // The policy is fixed.
    s.all_report();
    assert_eq!(ready(&s), [true; 3]);
}

#[test]
fn a_report_stands_for_the_tables_of_its_generation_and_no_newer_ones() {
    // The fixture published generation 1 before: the publications are 1 to 5, with plans of the
    // same numbers.
    let mut s = MembershipFixture::running();
    for _ in 0..4 {
        s.publish(&["t"]);
    }
    // Plan 9 changed no table, so it replaces plan 5 at generation 5.
    s.membership.note_plan(Generation(5), 9);
    let plan = |s: &MembershipFixture| {
        s.membership
            .ownership()
            .report(ReplicaNumber::new(1).unwrap())
            .unwrap()
            .plan
    };
    for (what, reported, acked_through, content, want) in [
        ("as reported", 3, 5, 5, 3),
        ("not more than it acknowledged", 5, 2, 5, 2),
        (
            "a plan that changed no table is in the generation before",
            5,
            5,
            5,
            9,
        ),
        ("between two publications", 7, 7, 7, 9),
        ("nothing since concerned it", 2, 5, 2, 9),
        (
            "the controller has just started, and nothing differs",
            2,
            5,
            0,
            9,
        ),
        ("before all", 0, 5, 0, 0),
    ] {
        let known = DeliveryProgress {
            acked_through: Generation(acked_through),
            content: Generation(content),
            ..DeliveryProgress::default()
        };
        s.report("a", |report, k| {
            (report.generation, *k) = (Generation(reported), known)
        });
        assert_eq!(plan(&s), want, "{what}");
    }
    s.report("a", |_, _| {});
    assert!(!s.report("a", |_, _| {}), "the same again is no news");
    let owned = [(
        ServiceId::new(7).unwrap(),
        OwnedBuckets {
            version: 3,
            buckets: BucketSet(5),
        },
    )];
    assert!(
        s.report("a", |report, _| report.owned = owned.into()),
        "a report of other sessions is news"
    );
}

#[test]
fn a_report_proves_by_the_mark_from_before_its_scans() {
    let mut s = MembershipFixture::running();
    let after = |s: &MembershipFixture| {
        s.membership
            .ownership()
            .report(ReplicaNumber::new(1).unwrap())
            .unwrap()
            .scanned_after
    };
    let mark = s.membership.mark();
    for (what, given, expected) in [
        ("a mark of this process", Some(mark), mark.number),
        (
            "a mark of an earlier process",
            Some(ReportMark {
                session: mark.session ^ 1,
                ..mark
            }),
            0,
        ),
        (
            "none: it arrives as the third after the mark",
            // An older replica sends no marks, and its drain must end too. Its report counts as
            // scanned after the two reports that came before it.
            None,
            mark.number + 2,
        ),
    ] {
        s.report("a", |report, _| report.scanned_after = given);
        assert_eq!(after(&s), expected, "{what}");
    }
    let mark = s.membership.mark();
    // The plan confirmed its last table two reports after the mark.
    s.membership.plan_reports_received = mark.number + 2;
    // A later scan is news only up to the reports that the plan has received.
    for (ahead, is_news) in [
        (0, true),
        (0, false),
        (1, true),
        (2, true),
        (2, false),
        (3, false),
        (9, false),
    ] {
        let given = ReportMark {
            number: mark.number + ahead,
            ..mark
        };
        assert_eq!(
            s.report("a", |report, _| report.scanned_after = Some(given)),
            is_news,
            "{ahead} reports after the mark"
        );
    }
}

#[test]
fn the_memory_of_publications_is_bounded() {
    let mut s = MembershipFixture::running();
    let first = s.generation as u32;
    let over = u32::try_from(PUBLICATIONS_MAX).unwrap() + 10;
    (0..over).for_each(|i| {
        s.membership
            .note_plan(Generation(u64::from(10 + i)), 10 + i)
    });
    assert_eq!(s.membership.plans.len(), PUBLICATIONS_MAX);
    assert_eq!(
        s.membership.plan_at(Generation(u64::from(first))),
        0,
        "a data plane that is too far behind counts as having no plan"
    );
    assert_eq!(
        s.membership.plan_at(Generation(u64::from(9 + over))),
        9 + over
    );
}

#[test]
fn operators_orders_hold_and_the_living_are_not_forgotten() {
    let mut s = MembershipFixture::running();
    assert!(
        !s.membership.order_drain(&name("z"), true) && s.membership.order_drain(&name("a"), true)
    );
    let seen = s.pass(200 * MS, MembershipFixture::all_report);
    assert_eq!(
        (s.states().as_str(), seen.rows.len()),
        ("a:Draining+ b:Active+ c:Active+", 1)
    );
    s.membership.order_drain(&name("a"), false);
    s.pass(200 * MS, MembershipFixture::all_report);
    assert_eq!(s.states(), "a:Active+ b:Active+ c:Active+");
    assert_eq!(
        (
            s.membership.declare_gone(&name("z"), s.now),
            s.membership.declare_gone(&name("a"), s.now)
        ),
        (None, Some(false))
    );
    let without_a = |s: &mut MembershipFixture| {
        for n in ["b", "c"] {
            s.report(n, |_, _| {});
        }
    };
    s.pass(3200 * MS, without_a);
    assert_eq!(s.membership.declare_gone(&name("a"), s.now), Some(true));
    // The last report of a replica that leaves has the same effect at once.
    s.report("b", |report, _| report.leaving = true);
    assert_eq!(s.states(), "c:Active+");
}
