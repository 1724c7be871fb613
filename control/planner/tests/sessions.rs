//! Tests of sessions during planned and unplanned changes of the fleet, in a model of the tier in
//! which every message may be late.

use crate::sim::events::{AZS, SimEvent, apply};
use crate::sim::{PacketFate, SimSession, SimTier, az, id, number};
use canal_model::fleet::ReplicaState;
use proptest::prelude::*;

/// Replicas that join in one test, at most.
/// The number was chosen; joins beyond it do nothing.
const REPLICAS_MAX: usize = 24;

fn planned() -> impl Strategy<Value = SimEvent> {
    prop_oneof![
        3 => (0..7usize).prop_map(SimEvent::Join),
        3 => any::<usize>().prop_map(SimEvent::Activate),
        3 => any::<usize>().prop_map(SimEvent::Drain),
        1 => any::<usize>().prop_map(SimEvent::Undrain),
        1 => (1..6u32).prop_map(SimEvent::Demand),
        12 => Just(SimEvent::Plan),
        12 => any::<usize>().prop_map(SimEvent::DeliverTables),
        6 => (0..3usize).prop_map(SimEvent::DeliverEdgeTables),
        14 => any::<usize>().prop_map(SimEvent::Scan),
        14 => any::<usize>().prop_map(SimEvent::DeliverReport),
        6 => (0..3usize).prop_map(SimEvent::DeliverEdgeReport),
        20 => (1..5u32, 0..3usize, 0..128usize).prop_map(|(service, az, bucket)| SimEvent::Open(service, az, bucket)),
        10 => any::<usize>().prop_map(SimEvent::Close),
    ]
}

fn anything() -> impl Strategy<Value = SimEvent> {
    prop_oneof![
        12 => planned(),
        1 => any::<usize>().prop_map(SimEvent::Crash),
        1 => any::<usize>().prop_map(SimEvent::ProbeDown),
        2 => any::<usize>().prop_map(SimEvent::ProbeUp),
        1 => any::<usize>().prop_map(SimEvent::Forget),
    ]
}

fn tier() -> SimTier {
    let mut tier = SimTier::new(&[("a1", 2), ("a2", 2), ("b1", 2), ("b2", 1)], 3);
    tier.plan();
    tier.deliver_all();
    tier
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// With planned changes, the owner of every session stays in its chain, however late messages
    /// are.
    #[test]
    fn no_owner_is_dropped_by_planned_changes(events in proptest::collection::vec(planned(), 1..250)) {
        let mut tier = tier();
        for event in events {
            apply(&mut tier, event, REPLICAS_MAX);
            prop_assert!(tier.orphans().is_empty(), "{:?}", tier.orphans());
        }
    }

    /// While tables of two successive plans are in use, each packet of a session finds its owner.
    #[test]
    fn packets_find_their_owner_while_a_plan_spreads(events in proptest::collection::vec(planned(), 1..250)) {
        let mut tier = tier();
        for event in events {
            if matches!(event, SimEvent::Plan) {
                tier.deliver_all();
            }
            apply(&mut tier, event, REPLICAS_MAX);
            for session in &tier.sessions {
                prop_assert!(tier.reaches(session), "{session:?}");
            }
        }
    }

    /// No session is reset, however many tables are in use. At worst, TCP sends the packet again.
    #[test]
    fn no_session_is_reset_however_late_tables_are(events in proptest::collection::vec(planned(), 1..250)) {
        let mut tier = tier();
        for event in events {
            apply(&mut tier, event, REPLICAS_MAX);
            for session in &tier.sessions {
                prop_assert!(tier.send(session) != PacketFate::Reset, "{session:?}");
            }
        }
    }

    /// A client repeats its SYN while heads change and tables are late, so that several replicas
    /// have a request, and accepts any of their SYN-ACKs. Its acknowledgment is never answered with
    /// a reset.
    #[test]
    fn a_retransmitted_syn_loses_no_session(
        events in proptest::collection::vec((planned(), any::<bool>()), 1..250),
        (service, at, bucket) in (1..4u32, 0..3usize, 0..128usize),
    ) {
        let mut tier = tier();
        // The requests of the client under test; no event closes them.
        let mut requests = Vec::new();
        for (event, again) in events {
            if matches!(event, SimEvent::Close(_)) {
                continue;
            }
            apply(&mut tier, event, REPLICAS_MAX);
            if again {
                requests.extend(tier.open(id(service), &az(AZS[at]), bucket));
            }
            for answered in &requests {
                let session = (id(service), az(AZS[at]), bucket, *answered);
                prop_assert!(tier.acknowledge(&session, &requests, false) != PacketFate::Reset, "{session:?} of {requests:?}");
            }
        }
    }

    /// With unplanned failures too, every plan and every transition passes the linter
    /// (`SimTier::plan` runs it), and the tier settles.
    #[test]
    fn any_sequence_obeys_the_rules(events in proptest::collection::vec(anything(), 1..250)) {
        let mut tier = tier();
        for event in events {
            apply(&mut tier, event, REPLICAS_MAX);
        }
        tier.sessions.clear();
        tier.replicas.values_mut().for_each(|replica| replica.up = true);
        // Rebalancing moves one service per wave, and six services have at most three backends
        // each.
        for _ in 0..18 {
            tier.settle();
            tier.leave();
        }
        let before = tier.newest().number;
        tier.settle();
        prop_assert_eq!(before, tier.newest().number, "it never rests");
        for table in tier.newest().services.values().flat_map(|service| service.tables.values()) {
            prop_assert!(table.chains.iter().flatten().all(|member| !member.is_owner()));
        }
    }
}

/// A drained head has scanned its sessions. The new head is late and forwards one more SYN to it.
/// Then all confirm the new table, and after that arrives the report of the scan. It does not prove
/// that the drained replica owns nothing.
#[test]
fn a_scan_from_before_the_confirmation_proves_nothing_however_late_its_report_is() {
    let mut tier = SimTier::new(&[("a1", 3)], 1);
    tier.settle();
    let (service, home) = (id(1), az("a"));
    // Bucket 5 stands for any bucket.
    let old = tier.open(service, &home, 5).unwrap();
    // Only the session after the drain counts.
    tier.sessions.clear();
    tier.replicas.get_mut(&old).unwrap().state = ReplicaState::Draining;
    tier.plan();
    let newest = tier.plans.len() - 1;
    let chain = &tier.newest().services[&service].tables[&home].chains[5];
    let late = chain[0].replica;
    assert!(
        late != old
            && chain
                .iter()
                .any(|member| member.replica == old && member.is_owner()),
        "{chain:?}"
    );
    // The edges use the new table and report it, so the plan waits only for the late replica.
    tier.edges.values_mut().for_each(|has| *has = newest);
    AZS.iter()
        .for_each(|name| tier.deliver_edge_report(az(name)));
    let prompt: Vec<_> = tier
        .replicas
        .keys()
        .copied()
        .filter(|replica| *replica != late)
        .collect();
    for replica in prompt {
        tier.has.insert(replica, newest);
        tier.scan(replica);
        tier.deliver_report(replica);
    }
    tier.scan(old);
    assert_eq!(
        tier.open(service, &home, 5),
        Some(old),
        "the new head has the table of before"
    );
    tier.has.insert(late, newest);
    tier.scan(late);
    tier.deliver_report(late);
    tier.plan();
    tier.deliver_report(old);
    tier.plan();
    tier.deliver_all();
    assert_eq!(tier.orphans(), Vec::<&SimSession>::new());
    assert!(tier.sessions.iter().all(|session| tier.reaches(session)));
    tier.sessions.clear();
    tier.settle();
    assert_eq!(tier.newest().members(old), 0, "later scans find nothing");
}

/// The head changes between a SYN and its repetition, so the new head has a request too. If any
/// request owned any answer, the new head would reset the session that the client has with the old
/// head. By the rule, the answer is forwarded to its owner.
#[test]
fn an_answer_to_the_old_heads_syn_ack_passes_the_new_heads_request() {
    let mut tier = SimTier::new(&[("a1", 2), ("a2", 1)], 1);
    tier.settle();
    let service = id(1);
    let home = tier.newest().services[&service]
        .placement
        .as_ref()
        .unwrap()
        .home
        .clone();
    let old = tier.open(service, &home, 5).unwrap();
    tier.replicas.get_mut(&old).unwrap().state = ReplicaState::Draining;
    tier.join("a1", ReplicaState::Active);
    for _ in 0..4 {
        tier.settle();
    }
    let new = tier.open(service, &home, 5).unwrap();
    assert_ne!(old, new, "the head has changed");
    let requests = [old, new];
    let session = |owner| (service, home.clone(), 5, owner);
    assert_eq!(
        tier.acknowledge(&session(old), &requests, true),
        PacketFate::Reset,
        "the rule that was"
    );
    for owner in requests {
        assert_eq!(
            tier.acknowledge(&session(owner), &requests, false),
            PacketFate::Found
        );
    }
}

/// Two replicas drain one after the other, and their sessions survive. A third joins, and a
/// redirector with an old table gets the packet.
#[test]
fn a_redirector_with_an_old_table_forwards_unowned_sessions() {
    let mut tier = SimTier::new(&[("a1", 2), ("a2", 1)], 1);
    tier.demands.rules.standby = 0;
    tier.settle();
    let service = id(1);
    let home = tier.newest().services[&service]
        .placement
        .as_ref()
        .unwrap()
        .home
        .clone();
    let owner = tier.open(service, &home, 5).unwrap();
    for _ in 0..2 {
        let head = tier.newest().services[&service].tables[&home].chains[5][0].replica;
        tier.replicas.get_mut(&head).unwrap().state = ReplicaState::Draining;
        tier.join("a1", ReplicaState::Active);
        tier.plan();
        let late = tier.has.clone();
        tier.deliver_all();
        if head != owner {
            // Every replica except the last head has the newest plan.
            tier.has.insert(head, late[&head]);
        }
    }
    let chain: Vec<u16> = tier.newest().services[&service].tables[&home].chains[5]
        .iter()
        .map(|member| member.replica.get())
        .collect();
    assert_eq!(chain.len(), 3, "{chain:?}");
    assert_eq!(number(chain[2].into()), owner);
    assert!(tier.reaches(&tier.sessions[0]));
}
