//! Operators observe data planes. This module has the streams that data planes keep open for that,
//! and the observations on them. `target` decides which operator may see what. This module passes
//! on the answers of data planes without reading them. Start at [`begin`] for operators, and at
//! [`ObservationService`] for data planes.

mod link;
mod relay;
mod target;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use canal_access::Authenticator;
use canal_catalog::Catalog;
use canal_controller_metrics::ControllerMetrics;
use canal_model::principal::Principal;
use canal_runtime::TenantLimit;
use canal_wire::observe::observe_order::Order;
use canal_wire::observe::{ObserveAnswer, ObserveBegin, ObserveOrder, Subject};
use canal_wire::{OBSERVATIONS_PER_DATA_PLANE_MAX, OBSERVE_ANSWER_COST, OBSERVE_WINDOW_BYTES};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::Status;

pub use link::ObservationService;
pub use relay::ObservationStream;
pub(crate) use relay::begin;

/// Maximum number of observations of all operators at once; each may be of several data planes.
/// A tenant's default share is 57: 25 % of what the provider's part leaves. Each has at most
/// `OBSERVE_WINDOW_BYTES` (256 KiB) unread from each of its data planes. Nobody measured this
/// value.
pub const OBSERVATIONS_MAX: usize = 256;
/// Maximum number of observations of one operator at once.
/// A person reads fewer at once; it stops a script that opens more and more.
pub const OBSERVATIONS_PER_OPERATOR_MAX: usize = 8;
/// Time within which a dump or metrics must be read.
/// Data planes have the same timeout for them (docs/operations/limits.md).
const WHOLE_ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of orders that a data plane has not read yet; a data plane that exceeds it gets
/// no more observations.
/// These are 16 for each of the 64 observations that a data plane may have
/// (`OBSERVATIONS_PER_DATA_PLANE_MAX`). Nobody measured this value.
const ORDERS_MAX: usize = 1024;
/// Bytes of credit that are given back at once: a part of the window, so that few orders are enough
/// for many answers.
/// A quarter was chosen: the data plane still has three quarters to send while the order is on its
/// way.
const CREDIT_BYTES: u64 = OBSERVE_WINDOW_BYTES / 4;

/// Handles of the controller that observations use.
pub struct ObservationContext {
    pub catalog: watch::Receiver<Arc<Catalog>>,
    pub clients: Authenticator,
    pub registry: Arc<ObservationRegistry>,
    /// Limit on observations that are open at once.
    pub limit: TenantLimit,
    pub metrics: Arc<ControllerMetrics>,
    /// Canceled when the controller is to stop.
    pub stopping: CancellationToken,
}

/// The streams of data planes and the observations on them.
#[derive(Default)]
pub struct ObservationRegistry {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// Number that was last given to a stream or a session.
    last: u64,
    links: BTreeMap<Principal, DataPlaneStream>,
    /// Number of open observations by operator.
    operators: BTreeMap<Principal, usize>,
}

/// Sender of a data plane's orders, with a queue of [`ORDERS_MAX`] orders.
type OrderSender = mpsc::Sender<Result<ObserveOrder, Status>>;

/// The stream that a data plane keeps open for observations.
struct DataPlaneStream {
    number: u64,
    orders: OrderSender,
    subjects: BTreeSet<Subject>,
    sessions: BTreeMap<u64, ObservationPart>,
    superseded: CancellationToken,
}

/// One data plane's part of an observation.
struct ObservationPart {
    events: mpsc::UnboundedSender<SessionEvent>,
    /// Cost of the answers that were not read yet; the window [`OBSERVE_WINDOW_BYTES`] bounds it.
    /// It guards no other data, so that its accesses are `Relaxed`.
    queued: Arc<AtomicU64>,
}

/// An event of one session for the reader of the observation.
#[derive(Debug)]
pub(crate) struct SessionEvent {
    session: u64,
    data: Vec<u8>,
    dropped: u64,
    cost: u64,
    /// Reason and explanation, if nothing more comes.
    end: Option<(String, String)>,
}

impl SessionEvent {
    fn session_end(session: u64, reason: &str, why: impl Into<String>) -> Self {
        Self {
            session,
            data: Vec::new(),
            dropped: 0,
            cost: 0,
            end: Some((reason.into(), why.into())),
        }
    }
}

/// A data plane that serves observations.
#[derive(Debug, Clone)]
pub(crate) struct Observable {
    pub(crate) principal: Principal,
    pub(crate) subjects: BTreeSet<Subject>,
}

impl ObservationRegistry {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every update leaves the maps consistent, so a panic elsewhere does not spoil them.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the data planes that keep an observation stream open, and what each can show.
    pub(crate) fn observables(&self) -> Vec<Observable> {
        let inner = self.lock();
        let each = |(principal, link): (&Principal, &DataPlaneStream)| Observable {
            principal: principal.clone(),
            subjects: link.subjects.clone(),
        };
        inner.links.iter().map(each).collect()
    }

    /// Registers a data plane's stream in place of its earlier one.
    fn open_link(
        self: &Arc<Self>,
        principal: &Principal,
        subjects: BTreeSet<Subject>,
        orders: OrderSender,
    ) -> OpenLink {
        let superseded = CancellationToken::new();
        let mut inner = self.lock();
        inner.last += 1;
        let number = inner.last;
        let link = DataPlaneStream {
            number,
            orders,
            subjects,
            sessions: BTreeMap::new(),
            superseded: superseded.clone(),
        };
        if let Some(earlier) = inner.links.insert(principal.clone(), link) {
            earlier.superseded.cancel();
            earlier.end_all(
                "disconnected",
                "the data plane has reconnected; fix: start the observation again",
            );
        }
        OpenLink {
            registry: self.clone(),
            principal: principal.clone(),
            number,
            superseded,
        }
    }

    /// Opens a session on one data plane, whose answers go to `events`.
    fn open_session(
        self: &Arc<Self>,
        principal: &Principal,
        begin: ObserveBegin,
        events: &mpsc::UnboundedSender<SessionEvent>,
    ) -> OpenSession {
        let mut inner = self.lock();
        inner.last += 1;
        let id = inner.last;
        let queued = Arc::new(AtomicU64::new(0));
        let sent = match inner.links.get_mut(principal) {
            None => Err(("disconnected", "the data plane is not connected any more")),
            Some(link) if link.sessions.len() >= OBSERVATIONS_PER_DATA_PLANE_MAX => Err((
                "busy",
                "the data plane has the maximum number of observations; fix: end some of them",
            )),
            // Not awaited: a data plane that does not read must not hold the lock.
            Some(link) => match link.orders.try_send(Ok(ObserveOrder {
                id,
                order: Some(Order::Begin(begin)),
            })) {
                Ok(()) => {
                    link.sessions.insert(
                        id,
                        ObservationPart {
                            events: events.clone(),
                            queued: queued.clone(),
                        },
                    );
                    Ok(())
                }
                Err(_) => Err((
                    "busy",
                    "the data plane does not read queries; fix: check the process",
                )),
            },
        };
        if let Err((reason, why)) = sent {
            // Sending does not fail: the caller has the receiver.
            let _ = events.send(SessionEvent::session_end(id, reason, why));
        }
        OpenSession {
            registry: self.clone(),
            principal: principal.clone(),
            id,
            queued,
            owed: 0,
        }
    }

    /// Passes on an answer. One for which the data plane had no credit ends its session.
    fn take_answer(&self, principal: &Principal, number: u64, answer: ObserveAnswer) {
        let mut inner = self.lock();
        let Some(link) = inner
            .links
            .get_mut(principal)
            // The answer of an earlier connection belongs to a session that has ended.
            .filter(|link| link.number == number)
        else {
            return;
        };
        // The operator may have left meanwhile.
        let Some(session) = link.sessions.get(&answer.id) else {
            return;
        };
        let cost = answer.data.len() as u64 + OBSERVE_ANSWER_COST;
        let event = match answer.end {
            // The end of an observation needs no credit, so one answer without data may exceed the
            // window.
            _ if session.queued.load(Relaxed) + cost
                > OBSERVE_WINDOW_BYTES + OBSERVE_ANSWER_COST =>
            {
                // If the order does not fit, the answers that still come find no session.
                let _ = link.orders.try_send(Ok(ObserveOrder {
                    id: answer.id,
                    // The data plane does not read the value: that there is one ends the session.
                    order: Some(Order::End(true)),
                }));
                SessionEvent::session_end(
                    answer.id,
                    "over_credit",
                    "the data plane sent more than allowed; fix: check the process",
                )
            }
            end => {
                let end = end.map(|end| (end.reason, end.why));
                SessionEvent {
                    session: answer.id,
                    data: answer.data,
                    dropped: answer.dropped,
                    cost,
                    end,
                }
            }
        };
        session.queued.fetch_add(event.cost, Relaxed);
        let is_last = event.end.is_some();
        let is_read = session.events.send(event).is_ok();
        if is_last || !is_read {
            link.sessions.remove(&answer.id);
        }
    }

    /// Sends an order for a session. Returns false if the session has ended or the queue is full.
    fn order(&self, principal: &Principal, id: u64, order: Order) -> bool {
        let inner = self.lock();
        let Some(link) = inner
            .links
            .get(principal)
            .filter(|link| link.sessions.contains_key(&id))
        else {
            return false;
        };
        link.orders
            .try_send(Ok(ObserveOrder {
                id,
                order: Some(order),
            }))
            .is_ok()
    }

    /// Counts one more observation of an operator; `None` if it has as many as it may.
    fn count_operator(self: &Arc<Self>, operator: &Principal) -> Option<OperatorCount> {
        let mut inner = self.lock();
        let count = inner.operators.entry(operator.clone()).or_insert(0);
        if *count >= OBSERVATIONS_PER_OPERATOR_MAX {
            return None;
        }
        *count += 1;
        Some(OperatorCount {
            registry: self.clone(),
            operator: operator.clone(),
        })
    }
}

impl DataPlaneStream {
    fn end_all(self, reason: &str, why: &str) {
        for (id, session) in self.sessions {
            // Sending fails only if the reader has left.
            let _ = session
                .events
                .send(SessionEvent::session_end(id, reason, why));
        }
    }
}

/// The registration of a data plane's stream; dropping it ends the stream's sessions.
struct OpenLink {
    registry: Arc<ObservationRegistry>,
    principal: Principal,
    number: u64,
    /// Canceled when a newer stream of the data plane replaces this one.
    superseded: CancellationToken,
}

impl Drop for OpenLink {
    fn drop(&mut self) {
        let mut inner = self.registry.lock();
        if inner
            .links
            .get(&self.principal)
            .is_some_and(|link| link.number == self.number)
            && let Some(link) = inner.links.remove(&self.principal)
        {
            link.end_all(
                "disconnected",
                "the data plane's connection to the controller ended",
            );
        }
    }
}

/// The reader's handle of a session; dropping it orders the data plane to stop.
struct OpenSession {
    registry: Arc<ObservationRegistry>,
    principal: Principal,
    id: u64,
    queued: Arc<AtomicU64>,
    /// Cost of answers that were read, and not given back as credit yet.
    owed: u64,
}

impl OpenSession {
    /// Records that the reader has taken answers of this cost, and returns credit.
    fn read(&mut self, cost: u64) {
        self.queued.fetch_sub(cost, Relaxed);
        self.owed += cost;
        // If the queue of orders is full, the next answer that is read tries again.
        if self.owed >= CREDIT_BYTES
            && self
                .registry
                .order(&self.principal, self.id, Order::Credit(self.owed))
        {
            self.owed = 0;
        }
    }
}

impl Drop for OpenSession {
    fn drop(&mut self) {
        self.registry
            .order(&self.principal, self.id, Order::End(true));
        let mut inner = self.registry.lock();
        if let Some(link) = inner.links.get_mut(&self.principal) {
            link.sessions.remove(&self.id);
        }
    }
}

/// A guard that counts as one of its operator's observations until it is dropped.
struct OperatorCount {
    registry: Arc<ObservationRegistry>,
    operator: Principal,
}

impl Drop for OperatorCount {
    fn drop(&mut self) {
        let mut inner = self.registry.lock();
        if let Some(count) = inner.operators.get_mut(&self.operator) {
            *count -= 1;
            if *count == 0 {
                inner.operators.remove(&self.operator);
            }
        }
    }
}

/// Returns the name that operators use for a data plane.
fn name_of(principal: &Principal) -> &str {
    match principal {
        Principal::Node { name, .. } => name.as_str(),
        Principal::Gateway { name, .. } => name.as_str(),
        Principal::Edge { name, .. } => name.as_str(),
        Principal::KeyServer { name, .. } | Principal::Operator { name, .. } => name.as_str(),
    }
}

/// Returns the name of a subject in metrics and in the audit log.
fn subject_name(subject: Subject) -> &'static str {
    match subject {
        Subject::Unspecified => "unspecified",
        Subject::Tap => "tap",
        Subject::Logs => "logs",
        Subject::ConfigDump => "config_dump",
        Subject::Metrics => "metrics",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gateway() -> Principal {
        Principal::Gateway {
            name: "g1".parse().unwrap(),
            az: "az1".parse().unwrap(),
        }
    }

    type OrdersRead = mpsc::Receiver<Result<ObserveOrder, Status>>;

    fn link_of(registry: &Arc<ObservationRegistry>) -> (OpenLink, OrdersRead) {
        let (sender, orders) = mpsc::channel(ORDERS_MAX);
        (
            registry.open_link(&gateway(), BTreeSet::from([Subject::Tap]), sender),
            orders,
        )
    }

    fn order_in(orders: &mut OrdersRead) -> Option<Order> {
        orders.try_recv().ok()?.unwrap().order
    }

    fn answer(id: u64, bytes: usize) -> ObserveAnswer {
        ObserveAnswer {
            id,
            data: vec![b'x'; bytes],
            ..ObserveAnswer::default()
        }
    }

    #[test]
    fn unread_answers_are_bounded_by_the_window_and_reading_gives_credit() {
        let registry = Arc::new(ObservationRegistry::default());
        let (link, mut orders) = link_of(&registry);
        let (events, mut heard) = mpsc::unbounded_channel();
        let mut session = registry.open_session(&gateway(), ObserveBegin::default(), &events);
        let id = orders.try_recv().unwrap().unwrap().id;
        let take = |bytes| registry.take_answer(&gateway(), link.number, answer(id, bytes));
        for _ in 0..4 {
            take(60 << 10);
        }
        assert!(orders.try_recv().is_err());
        (0..2).for_each(|_| session.read(heard.try_recv().unwrap().cost));
        assert!(matches!(order_in(&mut orders), Some(Order::Credit(credit)) if credit > 120 << 10));
        take(60 << 10);
        take(60 << 10);
        // This answer is one more than there is credit for.
        take(60 << 10);
        let mut last = None;
        while let Ok(event) = heard.try_recv() {
            last = event.end;
        }
        assert_eq!(last.unwrap().0, "over_credit");
        assert!(matches!(order_in(&mut orders), Some(Order::End(true))));
    }

    #[test]
    fn sessions_end_with_their_stream_and_readers_that_leave_are_reported() {
        let registry = Arc::new(ObservationRegistry::default());
        let (events, mut heard) = mpsc::unbounded_channel();
        let lost = registry.open_session(&gateway(), ObserveBegin::default(), &events);
        assert_eq!(heard.try_recv().unwrap().end.unwrap().0, "disconnected");
        drop(lost);
        let (link, _orders) = link_of(&registry);
        let session = registry.open_session(&gateway(), ObserveBegin::default(), &events);
        let (newer, mut orders) = link_of(&registry);
        assert!(
            link.superseded.is_cancelled()
                && heard.try_recv().unwrap().end.unwrap().0 == "disconnected"
        );
        // The end of the older stream does not end the newer one.
        drop(link);
        assert_eq!(registry.observables().len(), 1);
        drop(session);
        let session = registry.open_session(&gateway(), ObserveBegin::default(), &events);
        drop(session);
        assert!(matches!(order_in(&mut orders), Some(Order::Begin(_))));
        assert!(matches!(order_in(&mut orders), Some(Order::End(true))));
        drop(newer);
        assert!(registry.observables().is_empty());
    }

    #[test]
    fn observations_of_one_operator_and_of_one_data_plane_are_bounded() {
        let registry = Arc::new(ObservationRegistry::default());
        let ann = Principal::Operator {
            name: "ann".parse().unwrap(),
            tenant: Some("alpha".parse().unwrap()),
        };
        let bob = Principal::Operator {
            name: "bob".parse().unwrap(),
            tenant: None,
        };
        let mut held: Vec<_> = (0..OBSERVATIONS_PER_OPERATOR_MAX)
            .map(|_| registry.count_operator(&ann).unwrap())
            .collect();
        assert!(registry.count_operator(&ann).is_none() && registry.count_operator(&bob).is_some());
        held.pop();
        assert!(registry.count_operator(&ann).is_some());

        let _link = link_of(&registry);
        let (events, mut heard) = mpsc::unbounded_channel();
        let open = |_| registry.open_session(&gateway(), ObserveBegin::default(), &events);
        let held: Vec<_> = (0..=OBSERVATIONS_PER_DATA_PLANE_MAX).map(open).collect();
        assert_eq!(heard.try_recv().unwrap().end.unwrap().0, "busy");
        assert!(heard.try_recv().is_err());
        drop(held);
    }
}
