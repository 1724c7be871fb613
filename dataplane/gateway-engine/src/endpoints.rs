//! A worker's view of endpoints: requests in flight, recent failures, and idle connections.
//!
//! It opens no connections (`upstream` does) and does not select endpoints (`balance` does). Start
//! with [`Upstreams::view`].

mod http2;

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, SocketAddr};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use canal_gateway_config::{Endpoint, EndpointSet, EndpointSetId, Snapshot};
use canal_gateway_io::io::Io;
use canal_gateway_limits::retry_budget::RetryBudget;
use canal_model::ids::{AzName, Vni};
use tokio::time::Instant;

pub(crate) use http2::{Http2Upstream, StreamPermit};

/// Number of consecutive failures after which the ejection time no longer doubles; the largest
/// factor is 2^4. The longest ejection is 16 s, so a repaired endpoint is used again within that
/// time.
const DOUBLINGS_MAX: u32 = 4;
/// Lowest ID of sets that belong to no snapshot; it is above all IDs that snapshots assign.
const DIRECT: u64 = 1 << 63;

/// Identifies an endpoint in a worker's table of endpoint states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum EndpointKey {
    /// An endpoint of a service.
    Listed(u64),
    /// A tenant's pod that was dialled by its own address: the tenant's number, its VNI, the
    /// address.
    Direct(u32, Option<Vni>, SocketAddr),
}

/// Most idle HTTP/1.1 connections to one endpoint for the same client. They are among the 256 of an
/// endpoint, so that 32 clients can keep as many.
const IDLE_PER_CLIENT_MAX: usize = 8;

/// The client that owns a connection, where clients do not share them. Such a connection carries
/// requests of one identity at one address, and the endpoint is informed of both.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PoolClient {
    /// `None` if the client proved no identity.
    pub(crate) principal: Option<String>,
    pub(crate) address: IpAddr,
}

/// One endpoint's state on this worker.
#[derive(Debug)]
pub(crate) struct EndpointState {
    /// Requests and relays that currently use the endpoint.
    pub(crate) in_flight: Cell<u32>,
    failures: Cell<u32>,
    /// End of the ejection, if the endpoint is ejected.
    out_until: Cell<Option<Instant>>,
    idle: RefCell<Vec<IdleConnection>>,
    http2: RefCell<Vec<Rc<Http2Upstream>>>,
}

/// A connection without a request.
#[derive(Debug)]
struct IdleConnection {
    io: Io,
    since: Instant,
    /// The endpoint's address to which the connection leads.
    address: SocketAddr,
    /// `None` if any client may use it.
    client: Option<Rc<PoolClient>>,
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

    /// True if the endpoint failed recently; then it is used only if there is no other.
    pub(crate) fn is_ejected(&self, now: Instant) -> bool {
        self.out_until.get().is_some_and(|until| now < until)
    }

    /// Records a failed connect. Returns true if the endpoint was not ejected before.
    pub(crate) fn failed(&self, now: Instant, base: Duration) -> bool {
        let fresh = !self.is_ejected(now);
        let failures = self.failures.get().min(DOUBLINGS_MAX);
        self.out_until.set(Some(now + base * (1 << failures)));
        self.failures.set(failures + 1);
        fresh
    }

    /// Records a successful connect, which ends the ejection.
    pub(crate) fn succeeded(&self) {
        self.failures.set(0);
        self.out_until.set(None);
    }

    /// Takes a working idle connection to `address` that belongs to `client`, or to no client if
    /// `None`.
    pub(crate) fn take_idle(&self, address: SocketAddr, client: Option<&PoolClient>) -> Option<Io> {
        let mut idle = self.idle.borrow_mut();
        // The newest connection comes first. Where clients share connections, that is the last in
        // the list.
        while let Some(at) = idle
            .iter()
            .rposition(|other| other.address == address && other.client.as_deref() == client)
        {
            let mut idle_connection = idle.remove(at);
            if !idle_connection.io.is_stale() {
                return Some(idle_connection.io);
            }
        }
        None
    }

    /// Stores the connection that was used for `chosen`, unless `max` are idle already. Returns
    /// false if a connection was closed: this one or an older one. Among connections of single
    /// clients the oldest is replaced, so that clients that left block no others.
    pub(crate) fn return_idle(
        &self,
        io: Io,
        chosen: &SelectedEndpoint,
        max: usize,
        now: Instant,
    ) -> bool {
        let idle_connection = IdleConnection {
            io,
            since: now,
            address: chosen.address,
            client: chosen.client.clone(),
        };
        let mut idle = self.idle.borrow_mut();
        if idle_connection.client.is_some() {
            if idle
                .iter()
                .filter(|other| other.client == idle_connection.client)
                .count()
                >= IDLE_PER_CLIENT_MAX.min(max)
            {
                return false;
            }
            if idle.len() >= max {
                let Some(oldest) = idle.iter().position(|other| other.client.is_some()) else {
                    return false;
                };
                idle.remove(oldest);
                idle.push(idle_connection);
                return false;
            }
        }
        let has_capacity = idle.len() < max;
        if has_capacity {
            idle.push(idle_connection);
        }
        has_capacity
    }
}

/// An endpoint set with this worker's state of each endpoint.
#[derive(Debug)]
pub(crate) struct EndpointSetState {
    pub(crate) set: Arc<EndpointSet>,
    pub(crate) states: Vec<Rc<EndpointState>>,
    /// Positions of the endpoints in the preferred AZ; empty if none or all are in it.
    pub(crate) near: Vec<u32>,
    /// Requests and retries in progress; a changed set keeps those of the set before.
    pub(crate) budget: Rc<RetryBudget>,
    /// Position of the next endpoint in turn; `None` before the first request, which begins at a
    /// random one.
    pub(crate) turn: Cell<Option<usize>>,
}

/// An endpoint selected for a request, counted as busy until dropped.
#[derive(Debug)]
pub(crate) struct SelectedEndpoint {
    pub(crate) view: Rc<EndpointSetState>,
    pub(crate) at: usize,
    /// Address at which the endpoint is dialled; one of its addresses.
    pub(crate) address: SocketAddr,
    /// The client that alone may use the connection; `None` if any client may.
    pub(crate) client: Option<Rc<PoolClient>>,
}

impl SelectedEndpoint {
    /// Creates the selection for a client with this address; `None` stands for the gateway itself.
    pub(crate) fn new(view: &Rc<EndpointSetState>, at: usize, client: Option<IpAddr>) -> Self {
        let (state, endpoint) = (&view.states[at], &view.set.endpoints[at]);
        state.in_flight.set(state.in_flight.get() + 1);
        view.budget.begin_request();
        let address = client.map_or(endpoint.address, |client| endpoint.address_towards(client));
        Self {
            view: view.clone(),
            at,
            address,
            client: None,
        }
    }

    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.view.set.endpoints[self.at]
    }
    pub(crate) fn state(&self) -> &Rc<EndpointState> {
        &self.view.states[self.at]
    }
}

/// Target of a request as far as it is known: the set, and the endpoint in it once one is selected.
pub(crate) type RequestTarget = Option<(Rc<EndpointSetState>, Option<usize>)>;

impl Drop for SelectedEndpoint {
    fn drop(&mut self) {
        let state = &self.view.states[self.at];
        state.in_flight.set(state.in_flight.get() - 1);
        self.view.budget.end_request();
    }
}

/// All endpoints that this worker has used.
#[derive(Default)]
pub(crate) struct Upstreams {
    views: RefCell<hashbrown::HashMap<EndpointSetId, Rc<EndpointSetState>>>,
    states: RefCell<hashbrown::HashMap<EndpointKey, Weak<EndpointState>>>,
    /// AZ whose endpoints are preferred.
    az: Option<AzName>,
    /// ID of the last set that belongs to no snapshot.
    direct: Cell<u64>,
}

impl Upstreams {
    /// Creates the table without endpoints; endpoints in `az` will be preferred.
    pub(crate) fn new(az: Option<AzName>) -> Self {
        Self {
            az,
            ..Self::default()
        }
    }

    /// Returns this worker's view of the set with ID `slot`, rebuilt when the set has changed.
    pub(crate) fn view(
        &self,
        snapshot: &Snapshot,
        slot: EndpointSetId,
    ) -> Option<Rc<EndpointSetState>> {
        let set = snapshot.set(slot)?;
        let (mut budget, mut turn) = (None, None);
        if let Some(view) = self.views.borrow().get(&slot) {
            if view.set.id == set.id {
                return Some(view.clone());
            }
            budget = Some(view.budget.clone());
            turn = view.turn.get();
        }
        let view = self.look_up(set, budget.unwrap_or_default());
        view.turn.set(turn);
        let view = Rc::new(view);
        self.views.borrow_mut().insert(slot, view.clone());
        Some(view)
    }

    fn look_up(&self, set: &Arc<EndpointSet>, budget: Rc<RetryBudget>) -> EndpointSetState {
        let az = self.az.as_ref().map(|az| az.as_str());
        let states = set
            .endpoints
            .iter()
            .map(|e| self.state(EndpointKey::Listed(e.id)))
            .collect();
        let near: Vec<u32> = (0u32..)
            .zip(set.endpoints.iter())
            .filter(|(_, e)| Some(e.workload.az.as_str()) == az)
            .map(|(n, _)| n)
            .collect();
        // If all endpoints are in the preferred AZ, the preference would change nothing.
        let near = if near.len() == set.endpoints.len() {
            Vec::new()
        } else {
            near
        };
        EndpointSetState {
            set: set.clone(),
            states,
            near,
            budget,
            turn: Cell::default(),
        }
    }

    /// Returns a new ID for a set that belongs to no snapshot.
    pub(crate) fn direct_id(&self) -> u64 {
        self.direct.set(self.direct.get() + 1);
        DIRECT | self.direct.get()
    }

    /// Returns a view of one endpoint without an ID in the snapshot: a pod dialled by its own
    /// address.
    pub(crate) fn direct(&self, set: EndpointSet, tenant: u32) -> Rc<EndpointSetState> {
        let states = set
            .endpoints
            .iter()
            .map(|e| self.state(EndpointKey::Direct(tenant, e.workload.vni, e.address)))
            .collect();
        Rc::new(EndpointSetState {
            set: Arc::new(set),
            states,
            near: Vec::new(),
            budget: Rc::default(),
            turn: Cell::default(),
        })
    }

    fn state(&self, key: EndpointKey) -> Rc<EndpointState> {
        let mut states = self.states.borrow_mut();
        if let Some(state) = states.get(&key).and_then(Weak::upgrade) {
            return state;
        }
        let state = Rc::new(EndpointState::new());
        states.insert(key, Rc::downgrade(&state));
        state
    }

    /// Closes idle connections that are too old or were closed by the peer, and drops views of sets
    /// that have changed.
    pub(crate) fn sweep(&self, snapshot: &Snapshot, now: Instant, idle: Duration) {
        self.views
            .borrow_mut()
            .retain(|slot, view| snapshot.set(*slot).is_some_and(|set| set.id == view.set.id));
        self.states
            .borrow_mut()
            .retain(|_, state| match state.upgrade() {
                Some(state) => {
                    state
                        .idle
                        .borrow_mut()
                        .retain_mut(|other| now < other.since + idle && !other.io.is_stale());
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
        let state = |tenant, vni: u32| {
            upstreams.state(EndpointKey::Direct(
                tenant,
                Some(Vni::new(vni).unwrap()),
                address,
            ))
        };
        let (one, again, two, renumbered) =
            (state(0, 101), state(0, 101), state(1, 102), state(0, 103));
        assert!(
            Rc::ptr_eq(&one, &again) && !Rc::ptr_eq(&one, &two) && !Rc::ptr_eq(&one, &renumbered)
        );
    }
}
