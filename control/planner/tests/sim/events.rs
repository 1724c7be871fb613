//! The events of the simulated tier, and their effects. The tests choose which event happens when.

use canal_model::fleet::ReplicaState;
use canal_model::ids::ReplicaNumber;

use super::{SimTier, az, demand, id};

/// One event. The numbers select among the existing replicas, AZs or sessions.
#[derive(Debug, Clone)]
pub(crate) enum SimEvent {
    Join(usize),
    Activate(usize),
    Drain(usize),
    Undrain(usize),
    Demand(u32),
    Plan,
    DeliverTables(usize),
    DeliverEdgeTables(usize),
    Scan(usize),
    DeliverReport(usize),
    DeliverEdgeReport(usize),
    Open(u32, usize, usize),
    Close(usize),
    Crash(usize),
    ProbeDown(usize),
    ProbeUp(usize),
    Forget(usize),
}

const BACKENDS: [&str; 7] = ["a1", "a2", "a3", "b1", "b2", "b3", "c1"];
pub(crate) const AZS: [&str; 3] = ["a", "b", "c"];

/// Applies the event. At most `most` replicas join.
pub(crate) fn apply(tier: &mut SimTier, event: SimEvent, most: usize) {
    let pick = |at: usize, wanted: &dyn Fn(ReplicaState, bool) -> bool| {
        let found: Vec<_> = tier
            .replicas
            .values()
            .filter(|r| wanted(r.state, r.up))
            .map(|r| r.number)
            .collect();
        (!found.is_empty()).then(|| found[at % found.len()])
    };
    let any_of = |at| pick(at, &|_, _| true);
    match event {
        SimEvent::Join(backend) if tier.replicas.len() < most => {
            tier.join(BACKENDS[backend], ReplicaState::Joining)
        }
        // The fleet is full.
        SimEvent::Join(_) => {}
        SimEvent::Activate(at) => set(
            tier,
            pick(at, &|state, _| state == ReplicaState::Joining),
            ReplicaState::Active,
        ),
        SimEvent::Drain(at) => set(
            tier,
            pick(at, &|state, _| state == ReplicaState::Active),
            ReplicaState::Draining,
        ),
        SimEvent::Undrain(at) => set(
            tier,
            pick(at, &|state, _| state == ReplicaState::Draining),
            ReplicaState::Active,
        ),
        SimEvent::Demand(n) => _ = tier.demands.services.insert(id(n), demand(n)),
        SimEvent::Plan => {
            tier.plan();
            tier.leave();
        }
        SimEvent::DeliverTables(at) => {
            if let Some(replica) = any_of(at) {
                let newest = tier.plans.len() - 1;
                tier.has.insert(replica, newest);
            }
        }
        SimEvent::DeliverEdgeTables(at) => _ = tier.edges.insert(az(AZS[at]), tier.plans.len() - 1),
        SimEvent::Scan(at) => {
            // Neither a crashed replica scans, nor one with a failed probe: they are the same here.
            if let Some(replica) = pick(at, &|_, up| up) {
                tier.scan(replica);
            }
        }
        // The replica may have gone down after it sent the report.
        SimEvent::DeliverReport(at) => {
            if let Some(replica) = any_of(at) {
                tier.deliver_report(replica);
            }
        }
        SimEvent::DeliverEdgeReport(at) => tier.deliver_edge_report(az(AZS[at])),
        SimEvent::Open(service, at, bucket) => _ = tier.open(id(service), &az(AZS[at]), bucket),
        SimEvent::Close(at) => {
            if !tier.sessions.is_empty() {
                tier.sessions.swap_remove(at % tier.sessions.len());
            }
        }
        SimEvent::Crash(at) => {
            if let Some(replica) = any_of(at) {
                tier.replicas.get_mut(&replica).unwrap().up = false;
                // The sessions of a process end with it.
                tier.sessions.retain(|session| session.3 != replica);
            }
        }
        SimEvent::ProbeDown(at) => {
            if let Some(replica) = any_of(at) {
                // Only the edges see this replica as down: its process goes on, and its sessions
                // with it.
                tier.replicas.get_mut(&replica).unwrap().up = false;
            }
        }
        SimEvent::ProbeUp(at) => {
            if let Some(replica) = pick(at, &|_, up| !up) {
                tier.replicas.get_mut(&replica).unwrap().up = true;
            }
        }
        SimEvent::Forget(at) => {
            if let Some(replica) = pick(at, &|_, up| !up) {
                tier.forget(replica);
            }
        }
    }
}

fn set(tier: &mut SimTier, replica: Option<ReplicaNumber>, state: ReplicaState) {
    if let Some(replica) = replica {
        tier.replicas.get_mut(&replica).unwrap().state = state;
    }
}
