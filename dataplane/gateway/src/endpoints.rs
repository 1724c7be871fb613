//! A worker's view of endpoints: how busy each is, whether it failed lately, and the connections kept to it. It opens none (`upstream` does) and
//! does not choose among them (`pick` does).

mod http2;

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use canal_model::ids::{AzName, Vni};
use tokio::time::Instant;

pub(crate) use http2::{Multiplexed, Place};

use crate::io::Io;
use crate::snapshot::{Endpoint, EndpointSet, Slot, Snapshot};

/// Failures in a row after which an endpoint's time out of use no longer grows: 2^4.
const DOUBLINGS_MAX: u32 = 4;
/// Above all numbers that snapshots give to endpoint sets.
const DIRECT: u64 = 1 << 63;

/// Tells endpoints apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    /// An endpoint of a service.
    Listed(u64),
    /// An address of a tenant's pod that was dialled itself; the tenant's number and VNI.
    Direct(u32, Option<Vni>, SocketAddr),
}

/// One endpoint as this worker knows it.
#[derive(Debug)]
pub(crate) struct EndpointState {
    /// Requests and relays that go there now.
    pub(crate) in_flight: Cell<u32>,
    failures: Cell<u32>,
    out_until: Cell<Option<Instant>>,
    idle: RefCell<Vec<Kept>>,
    http2: RefCell<Vec<Rc<Multiplexed>>>,
}

/// A connection without a request.
#[derive(Debug)]
struct Kept {
    io: Io,
    since: Instant,
}

impl EndpointState {
    fn new() -> Self {
        Self {
            in_flight: Cell::new(0),
            failures: Cell::new(0),
            out_until: Cell::new(None),
            idle: RefCell::default(),
            http2: RefCell::default(),
        }
    }

    /// Failed lately: to be used only if there is no other.
    pub(crate) fn is_out(&self, now: Instant) -> bool {
        self.out_until.get().is_some_and(|until| now < until)
    }

    /// A connect failed; true if it was in use until now.
    pub(crate) fn failed(&self, now: Instant, base: Duration) -> bool {
        let fresh = !self.is_out(now);
        let failures = self.failures.get().min(DOUBLINGS_MAX);
        self.out_until.set(Some(now + base * (1 << failures)));
        self.failures.set(failures + 1);
        fresh
    }

    /// A connect worked.
    pub(crate) fn succeeded(&self) {
        self.failures.set(0);
        self.out_until.set(None);
    }

    /// A kept connection, if there is one that still works.
    pub(crate) fn take_kept(&self) -> Option<Io> {
        let mut idle = self.idle.borrow_mut();
        while let Some(mut kept) = idle.pop() {
            if !kept.io.is_stale() {
                return Some(kept.io);
            }
        }
        None
    }

    /// Keeps a connection for the next request, unless `max` are kept; false if it was not kept.
    pub(crate) fn keep(&self, io: Io, max: usize, now: Instant) -> bool {
        let mut idle = self.idle.borrow_mut();
        let room = idle.len() < max;
        if room {
            idle.push(Kept { io, since: now });
        }
        room
    }
}

/// An endpoint set with this worker's state of each endpoint.
#[derive(Debug)]
pub(crate) struct SetView {
    pub(crate) set: Arc<EndpointSet>,
    pub(crate) states: Vec<Rc<EndpointState>>,
    /// Places of the endpoints in the preferred AZ; empty if none or all are.
    pub(crate) near: Vec<u32>,
}

/// One endpoint that was chosen, counted as busy until dropped.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) view: Rc<SetView>,
    pub(crate) at: usize,
}

impl Chosen {
    pub(crate) fn new(view: &Rc<SetView>, at: usize) -> Self {
        let state = &view.states[at];
        state.in_flight.set(state.in_flight.get() + 1);
        Self { view: view.clone(), at }
    }
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.view.set.endpoints[self.at]
    }
    pub(crate) fn state(&self) -> &Rc<EndpointState> {
        &self.view.states[self.at]
    }
}

/// What a request was for, as far as it came: the set, and the endpoint in it once one was chosen.
pub(crate) type Target = Option<(Rc<SetView>, Option<usize>)>;

impl Drop for Chosen {
    fn drop(&mut self) {
        let state = &self.view.states[self.at];
        state.in_flight.set(state.in_flight.get() - 1);
    }
}

/// All endpoints this worker has used.
#[derive(Default)]
pub(crate) struct Upstreams {
    views: RefCell<hashbrown::HashMap<Slot, Rc<SetView>>>,
    states: RefCell<hashbrown::HashMap<Key, Weak<EndpointState>>>,
    /// The AZ whose endpoints are preferred.
    az: Option<AzName>,
    /// Of the last set that no snapshot holds.
    direct: Cell<u64>,
}

impl Upstreams {
    /// None yet; endpoints in `az` will be preferred.
    pub(crate) fn new(az: Option<AzName>) -> Self {
        Self { az, ..Self::default() }
    }

    /// This worker's view of the set behind `slot`, made anew when the set has changed.
    pub(crate) fn view(&self, snapshot: &Snapshot, slot: Slot) -> Option<Rc<SetView>> {
        let set = snapshot.set(slot)?;
        if let Some(view) = self.views.borrow().get(&slot)
            && view.set.id == set.id
        {
            return Some(view.clone());
        }
        let view = Rc::new(self.look_up(set));
        self.views.borrow_mut().insert(slot, view.clone());
        Some(view)
    }

    fn look_up(&self, set: &Arc<EndpointSet>) -> SetView {
        let az = self.az.as_ref().map(|az| az.as_str());
        let states = set.endpoints.iter().map(|e| self.state(Key::Listed(e.id))).collect();
        let near: Vec<u32> =
            (0u32..).zip(set.endpoints.iter()).filter(|(_, e)| Some(e.workload.az.as_str()) == az).map(|(n, _)| n).collect();
        let near = if near.len() == set.endpoints.len() { Vec::new() } else { near };
        SetView { set: set.clone(), states, near }
    }

    /// A number for a set that no snapshot holds.
    pub(crate) fn direct_id(&self) -> u64 {
        self.direct.set(self.direct.get() + 1);
        DIRECT | self.direct.get()
    }

    /// A view of one endpoint that no slot names: a pod dialled by its address.
    pub(crate) fn direct(&self, set: EndpointSet, tenant: u32) -> Rc<SetView> {
        let states = set.endpoints.iter().map(|e| self.state(Key::Direct(tenant, e.workload.vni, e.address))).collect();
        Rc::new(SetView { set: Arc::new(set), states, near: Vec::new() })
    }

    fn state(&self, key: Key) -> Rc<EndpointState> {
        let mut states = self.states.borrow_mut();
        if let Some(state) = states.get(&key).and_then(Weak::upgrade) {
            return state;
        }
        let state = Rc::new(EndpointState::new());
        states.insert(key, Rc::downgrade(&state));
        state
    }

    /// Closes kept connections that are old or that the peer closed, and forgets sets that have changed.
    pub(crate) fn sweep(&self, snapshot: &Snapshot, now: Instant, idle: Duration) {
        self.views.borrow_mut().retain(|slot, view| snapshot.set(*slot).is_some_and(|set| set.id == view.set.id));
        self.states.borrow_mut().retain(|_, state| match state.upgrade() {
            Some(state) => {
                state.idle.borrow_mut().retain_mut(|kept| now < kept.since + idle && !kept.io.is_stale());
                state.http2.borrow_mut().retain(|m| m.keep(now, idle));
                true
            }
            None => false,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_at_one_address_in_two_networks_have_two_states() {
        let upstreams = Upstreams::default();
        let address = "10.1.1.2:8080".parse().unwrap();
        let state = |tenant, vni: u32| upstreams.state(Key::Direct(tenant, Some(Vni::new(vni).unwrap()), address));
        let (one, again, two, renumbered) = (state(0, 101), state(0, 101), state(1, 102), state(0, 103));
        assert!(Rc::ptr_eq(&one, &again) && !Rc::ptr_eq(&one, &two) && !Rc::ptr_eq(&one, &renumbered));
    }
}
