//! A worker's view of endpoints: how busy each is, whether it failed lately, and the connections kept to it. Connects on demand; it does not
//! choose (`pick` does) and speaks no HTTP/1.1 (`forward` does).

mod http2;

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use canal_kit::hbone::{Authority, Target};
use canal_kit::sys::{self, ConnectOptions};
use canal_model::identity::Identity;
use canal_model::ids::Vni;
use canal_model::program::Tunnel;
use canal_wire::hbone::HBONE_PORT;
use http::HeaderMap;
use tokio::time::Instant;

use http2::Multiplexed;
pub(crate) use http2::{Place, place};

use crate::body::Wire;
use crate::buffer::Inbox;
use crate::fault::Fault;
use crate::io::Io;
use crate::snapshot::{Endpoint, EndpointSet, Slot, Snapshot, TenantTls};
use crate::worker::Worker;

/// A TCP connect or a tunnel that takes longer has failed; the client waits meanwhile, so it is shorter than the kit's own limits.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Failures in a row after which an endpoint's time out of use no longer grows: 2^4.
const DOUBLINGS_MAX: u32 = 4;

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
}

impl Upstreams {
    /// This worker's view of the set behind `slot`, made anew when the set has changed.
    pub(crate) fn view(&self, snapshot: &Snapshot, slot: Slot, az: Option<&str>) -> Option<Rc<SetView>> {
        let set = snapshot.set(slot)?;
        if let Some(view) = self.views.borrow().get(&slot)
            && view.set.id == set.id
        {
            return Some(view.clone());
        }
        let view = Rc::new(self.look_up(set, az));
        self.views.borrow_mut().insert(slot, view.clone());
        Some(view)
    }

    fn look_up(&self, set: &Arc<EndpointSet>, az: Option<&str>) -> SetView {
        let states = set.endpoints.iter().map(|e| self.state(Key::Listed(e.id))).collect();
        let near: Vec<u32> =
            (0u32..).zip(set.endpoints.iter()).filter(|(_, e)| Some(e.workload.az.as_str()) == az).map(|(n, _)| n).collect();
        let near = if near.len() == set.endpoints.len() { Vec::new() } else { near };
        SetView { set: set.clone(), states, near }
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

/// A connection for one HTTP/1.1 exchange.
pub(crate) struct Lease {
    pub(crate) wire: Wire,
    /// It carried a request before.
    pub(crate) reused: bool,
}

/// A kept connection to the endpoint if there is one that still works.
pub(crate) fn kept(worker: &Worker, chosen: &Chosen) -> Option<Lease> {
    let mut idle = chosen.state().idle.borrow_mut();
    while let Some(mut kept) = idle.pop() {
        if !kept.io.is_stale() {
            worker.counts.reused.inc();
            return Some(Lease { wire: Wire::new(kept.io, Inbox::new(&worker.blocks)), reused: true });
        }
    }
    None
}

/// A new connection for HTTP/1.1.
pub(crate) async fn fresh(worker: &Worker, chosen: &Chosen, introduction: Introduction<'_>) -> Result<Lease, Fault> {
    let io = connect(worker, chosen, introduction).await?;
    Ok(Lease { wire: Wire::new(io, Inbox::new(&worker.blocks)), reused: false })
}

/// Keeps the connection for the next request, unless enough are kept.
pub(crate) fn keep(worker: &Worker, chosen: &Chosen, wire: Wire) {
    let mut idle = chosen.state().idle.borrow_mut();
    // Bytes that nobody asked for make it unusable: they would be read as the answer to someone else's request.
    if wire.inbox.is_empty()
        && wire.outbox.is_empty()
        && idle.len() < worker.shared.config.limits.idle_per_endpoint
        && !worker.is_draining()
    {
        idle.push(Kept { io: wire.io, since: worker.clock.now() });
    } else {
        worker.counts.not_kept.inc();
    }
}

/// What the other end of a new tunnel is told.
pub(crate) struct Introduction<'a> {
    /// The gateway's identity in the tenant; `None` where none is issued.
    pub(crate) tls: Option<&'a TenantTls>,
    /// For a connection that carries one client's bytes only: who it is. Pooled connections say nothing of any client.
    pub(crate) headers: HeaderMap,
}

/// A new connection to the endpoint, by tunnel or in plain text as its workload says. Marks the endpoint by the outcome.
pub(crate) async fn connect(worker: &Worker, chosen: &Chosen, introduction: Introduction<'_>) -> Result<Io, Fault> {
    let endpoint = chosen.endpoint();
    let opened = match endpoint.workload.tunnel {
        Tunnel::None => plain(worker, endpoint).await,
        Tunnel::Hbone => tunnel(worker, endpoint, introduction).await,
    };
    match opened {
        Ok(io) => {
            chosen.state().succeeded();
            worker.counts.connects_ok.inc();
            Ok(io)
        }
        Err(Unopened { why, shortage }) => {
            worker.counts.connects_failed.inc();
            if let Some(what) = shortage {
                worker.counts.short_of(what);
            } else if chosen.state().failed(Instant::now(), worker.shared.config.times.ejection) {
                worker.counts.ejections.inc();
            }
            Err(Fault::Connect { why })
        }
    }
}

/// Why there is no connection, and what this machine lacks if that is why: then the endpoint is as good as before.
struct Unopened {
    why: String,
    shortage: Option<&'static str>,
}

impl From<String> for Unopened {
    fn from(why: String) -> Self {
        Self { why, shortage: None }
    }
}

/// The mark of connections to an endpoint: inside the tier the tenant's VNI, without which nothing is dialled, because there the mark alone
/// says in whose network the address is.
fn decide_mark(tier: bool, endpoint: &Endpoint) -> Result<Option<u32>, String> {
    match (tier, endpoint.workload.vni) {
        (false, _) => Ok(None),
        (true, Some(vni)) => Ok(Some(vni.get())),
        (true, None) => Err(format!("{}: the tenant's network is not known", endpoint.address)),
    }
}

async fn plain(worker: &Worker, endpoint: &Endpoint) -> Result<Io, Unopened> {
    let (address, tier) = (endpoint.address, worker.shared.config.tier.as_ref());
    let bind = tier.and_then(|t| t.sources.towards(address.ip()));
    let mark = decide_mark(tier.is_some(), endpoint)?;
    let options = ConnectOptions { bind, mark, timeout: CONNECT_TIMEOUT, ..ConnectOptions::default() };
    let failed = |e: sys::SysError| Unopened { shortage: e.shortage(), why: e.to_string() };
    sys::connect(None, address, &options).await.map(Io::Tcp).map_err(failed)
}

async fn tunnel(worker: &Worker, endpoint: &Endpoint, introduction: Introduction<'_>) -> Result<Io, Unopened> {
    let Some(tls) = introduction.tls else {
        return Err(format!("{}: the gateway has no identity in this tenant", endpoint.address).into());
    };
    let expected: Arc<[Identity]> = endpoint.workload.identity.clone();
    let address = SocketAddr::new(endpoint.address.ip(), HBONE_PORT);
    let mark = decide_mark(worker.shared.config.tier.is_some(), endpoint)?;
    let target = Target { source: tls.client.clone(), expected, address, netns: None, mark };
    let authority = Authority::Address(endpoint.address);
    match worker.tunnels.open(&target, &authority, introduction.headers).await {
        Ok(opened) => Ok(Io::Tunnel(Box::new(opened.stream))),
        Err(e) => Err(e.to_string().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::build::tests::set_of;

    #[test]
    fn pods_at_one_address_in_two_networks_have_two_states() {
        let upstreams = Upstreams::default();
        let address = "10.1.1.2:8080".parse().unwrap();
        let state = |tenant, vni: u32| upstreams.state(Key::Direct(tenant, Some(Vni::new(vni).unwrap()), address));
        let (one, again, two, renumbered) = (state(0, 101), state(0, 101), state(1, 102), state(0, 103));
        assert!(Rc::ptr_eq(&one, &again) && !Rc::ptr_eq(&one, &two) && !Rc::ptr_eq(&one, &renumbered));
    }

    #[test]
    fn inside_the_tier_nothing_is_dialled_without_a_mark() {
        let set = set_of(1);
        let endpoint = &set.endpoints[0];
        assert_eq!(endpoint.workload.vni, None, "its tenant was not told");
        assert!(decide_mark(true, endpoint).is_err());
        assert_eq!(decide_mark(false, endpoint), Ok(None));
    }
}
