//! What may happen to the tier from one moment to the next. Which of it happens when, the tests choose.

use canal_model::fleet::ReplicaState;
use canal_model::ids::ReplicaNumber;

use super::{Tier, az, demand, id};

/// One thing that happens. Numbers choose among what is there.
#[derive(Debug, Clone)]
pub(crate) enum Event {
    Join(usize),
    Activate(usize),
    Drain(usize),
    Undrain(usize),
    Demand(u32),
    Plan,
    Deliver(usize),
    DeliverEdge(usize),
    Look(usize),
    Hear,
    HearEdge(usize),
    Open(u32, usize, usize),
    Close(usize),
    Die(usize),
    Flap(usize),
    Rise(usize),
    Forget(usize),
}

const BACKENDS: [&str; 7] = ["a1", "a2", "a3", "b1", "b2", "b3", "c1"];
pub(crate) const AZS: [&str; 3] = ["a", "b", "c"];

/// The event happens; no more than `most` replicas join.
pub(crate) fn apply(tier: &mut Tier, event: Event, most: usize) {
    let pick = |at: usize, wanted: &dyn Fn(ReplicaState, bool) -> bool| {
        let found: Vec<_> = tier.replicas.values().filter(|r| wanted(r.state, r.up)).map(|r| r.number).collect();
        (!found.is_empty()).then(|| found[at % found.len()])
    };
    let any_of = |at| pick(at, &|_, _| true);
    match event {
        Event::Join(backend) if tier.replicas.len() < most => tier.join(BACKENDS[backend], ReplicaState::Joining),
        Event::Join(_) => {}
        Event::Activate(at) => set(tier, pick(at, &|state, _| state == ReplicaState::Joining), ReplicaState::Active),
        Event::Drain(at) => set(tier, pick(at, &|state, _| state == ReplicaState::Active), ReplicaState::Draining),
        Event::Undrain(at) => set(tier, pick(at, &|state, _| state == ReplicaState::Draining), ReplicaState::Active),
        Event::Demand(n) => _ = tier.demands.services.insert(id(n), demand(n)),
        Event::Plan => {
            tier.plan();
            tier.leave();
        }
        Event::Deliver(at) => {
            if let Some(replica) = any_of(at) {
                let newest = tier.plans.len() - 1;
                tier.has.insert(replica, newest);
            }
        }
        Event::DeliverEdge(at) => _ = tier.edges.insert(az(AZS[at]), tier.plans.len() - 1),
        Event::Look(at) => {
            if let Some(replica) = pick(at, &|_, up| up) {
                tier.look(replica);
            }
        }
        Event::Hear => tier.hear(),
        Event::HearEdge(at) => tier.hear_edge(az(AZS[at])),
        Event::Open(service, at, bucket) => _ = tier.open(id(service), &az(AZS[at]), bucket),
        Event::Close(at) => {
            if !tier.sessions.is_empty() {
                tier.sessions.swap_remove(at % tier.sessions.len());
            }
        }
        Event::Die(at) => {
            if let Some(replica) = any_of(at) {
                tier.replicas.get_mut(&replica).unwrap().up = false;
                tier.sessions.retain(|session| session.3 != replica);
            }
        }
        Event::Flap(at) => {
            if let Some(replica) = any_of(at) {
                tier.replicas.get_mut(&replica).unwrap().up = false;
            }
        }
        Event::Rise(at) => {
            if let Some(replica) = pick(at, &|_, up| !up) {
                tier.replicas.get_mut(&replica).unwrap().up = true;
            }
        }
        Event::Forget(at) => {
            if let Some(replica) = pick(at, &|_, up| !up) {
                tier.forget(replica);
            }
        }
    }
}

fn set(tier: &mut Tier, replica: Option<ReplicaNumber>, state: ReplicaState) {
    if let Some(replica) = replica {
        tier.replicas.get_mut(&replica).unwrap().state = state;
    }
}
