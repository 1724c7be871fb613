//! Coarse deadlines. One sweep per worker checks all of them every [`TICK`], so arming one costs
//! two stores and no timer wheel.
//!
//! The owner decides what follows when a deadline passes; it learns the [`TimeoutKind`]. Start with
//! [`Clock::timer`].

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use slab::Slab;
use tokio::time::Instant;

/// Interval of the sweep. Deadlines fire up to this much late. The shortest default timeout that it
/// serves is 2 s (`linger`), so a tenth of a second does not matter. It is the worker's heartbeat
/// too.
pub const TICK: Duration = Duration::from_millis(100);

/// A number that no tenant has.
const NOBODY: u32 = u32::MAX;

/// Kind of timeout; the names are values of the label `what` of `canal_gateway_timeouts_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TimeoutKind {
    /// The head of the request did not arrive.
    Head,
    /// No next request arrived on an idle connection.
    Idle,
    /// The client neither sent nor accepted a byte of a body.
    Client,
    /// The client sent the beginning of a body that an authorizer needs too slowly.
    ShownBody,
    /// The upstream neither sent nor accepted a byte.
    Upstream,
    /// The rule's time for the whole request has passed.
    RouteRequest,
    /// The rule's time for one attempt has passed.
    RouteAttempt,
    /// The client did not read the last response.
    Linger,
    /// The worker drains, or runs a soft drain, and this connection is idle.
    Drain,
}

impl TimeoutKind {
    pub const ALL: [TimeoutKind; 9] = [
        TimeoutKind::Head,
        TimeoutKind::Idle,
        TimeoutKind::Client,
        TimeoutKind::ShownBody,
        TimeoutKind::Upstream,
        TimeoutKind::RouteRequest,
        TimeoutKind::RouteAttempt,
        TimeoutKind::Linger,
        TimeoutKind::Drain,
    ];

    /// Returns the value of the counter's label.
    pub fn name(self) -> &'static str {
        match self {
            TimeoutKind::Head => "request_head",
            TimeoutKind::Idle => "idle",
            TimeoutKind::Client => "client_stalled",
            TimeoutKind::ShownBody => "shown_body",
            TimeoutKind::Upstream => "upstream_stalled",
            TimeoutKind::RouteRequest => "route_request",
            TimeoutKind::RouteAttempt => "route_attempt",
            TimeoutKind::Linger => "linger",
            TimeoutKind::Drain => "drain",
        }
    }
}

#[derive(Debug)]
struct DeadlineSlot {
    due: Cell<Option<Instant>>,
    what: Cell<TimeoutKind>,
    fired: Cell<Option<TimeoutKind>>,
    /// Tenant whose policy changes wake the owner.
    tenant: Cell<u32>,
    waker: RefCell<Option<Waker>>,
}

#[derive(Debug)]
struct Inner {
    slots: RefCell<Slab<Rc<DeadlineSlot>>>,
    now: Cell<Instant>,
    /// Time until which idle connections may stay while the worker drains; `None` if it does not
    /// drain.
    draining: Cell<Option<Instant>>,
    /// Time by which the deadlines of idle connections are brought forward.
    speedup: Cell<Duration>,
}

/// A worker's clock. Clones share it.
#[derive(Debug, Clone)]
pub struct Clock {
    inner: Rc<Inner>,
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock {
    pub fn new() -> Self {
        let inner = Inner {
            slots: RefCell::default(),
            now: Cell::new(Instant::now()),
            draining: Cell::new(None),
            speedup: Cell::new(Duration::ZERO),
        };
        Self {
            inner: Rc::new(inner),
        }
    }

    /// Returns the time of the last sweep.
    #[inline]
    pub fn now(&self) -> Instant {
        self.inner.now.get()
    }

    /// Wakes all owners that watch the policies of this tenant.
    pub fn wake(&self, tenant: u32) {
        for (_, slot) in self.inner.slots.borrow().iter() {
            if slot.tenant.get() == tenant
                && let Some(waker) = slot.waker.borrow_mut().take()
            {
                waker.wake();
            }
        }
    }

    /// Closes idle connections at `until` at the latest, from now on.
    pub fn drain(&self, until: Instant) {
        self.inner.draining.set(Some(until));
    }

    /// Brings the deadlines of idle connections forward by `by`, from now on; zero ends it.
    pub fn expire_idle(&self, by: Duration) {
        self.inner.speedup.set(by);
    }

    /// Creates a deadline for one owner, not armed.
    pub fn timer(&self) -> Timer {
        let slot = DeadlineSlot {
            due: Cell::new(None),
            what: Cell::new(TimeoutKind::Idle),
            fired: Cell::new(None),
            tenant: Cell::new(NOBODY),
            waker: RefCell::new(None),
        };
        let slot = Rc::new(slot);
        let key = self.inner.slots.borrow_mut().insert(slot.clone());
        Timer {
            clock: self.clone(),
            slot,
            key,
        }
    }

    /// Fires the deadlines that are due at `now`.
    pub fn sweep(&self, now: Instant) {
        self.inner.now.set(now);
        let drained = self.inner.draining.get().is_some_and(|until| until <= now);
        let hastened = now + self.inner.speedup.get();
        // Waking only marks tasks as runnable. No task runs inside this loop, so none changes the
        // slab.
        for (_, slot) in self.inner.slots.borrow().iter() {
            let Some(due) = slot.due.get() else { continue };
            let idle = slot.what.get() == TimeoutKind::Idle;
            // Only idle connections may fire early, for a drain or a soft drain.
            if due > now && !(idle && (drained || due <= hastened)) {
                continue;
            }
            slot.due.set(None);
            slot.fired.set(Some(if due > now {
                TimeoutKind::Drain
            } else {
                slot.what.get()
            }));
            if let Some(waker) = slot.waker.borrow_mut().take() {
                waker.wake();
            }
        }
    }

    /// Sweeps forever, and calls `swept` after each sweep.
    pub async fn run(&self, swept: impl Fn()) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.sweep(ticks.tick().await);
            swept();
        }
    }
}

/// One deadline, removed from the clock on drop.
#[derive(Debug)]
pub struct Timer {
    clock: Clock,
    slot: Rc<DeadlineSlot>,
    key: usize,
}

impl Timer {
    /// Arms the deadline to fire `after` from now with `what`. It replaces what was armed before.
    #[inline]
    pub fn arm(&self, what: TimeoutKind, after: Duration) {
        self.arm_from(what, self.clock.now(), after);
    }

    /// Arms the deadline to fire `after` from `since`, which may already have passed.
    #[inline]
    pub fn arm_from(&self, what: TimeoutKind, since: Instant, after: Duration) {
        self.slot.what.set(what);
        self.slot.fired.set(None);
        self.slot.due.set(Some(since + after));
    }

    /// Subscribes the owner to policy changes of this tenant: each change wakes it while it waits
    /// for the deadline. `None` unsubscribes.
    #[inline]
    pub fn watch(&self, tenant: Option<u32>) {
        self.slot.tenant.set(tenant.unwrap_or(NOBODY));
    }

    /// Disarms the deadline, so that it never fires.
    #[inline]
    pub fn disarm(&self) {
        self.slot.due.set(None);
        self.slot.fired.set(None);
    }

    /// True if the deadline is armed, or has fired and was not observed yet.
    pub fn is_armed(&self) -> bool {
        self.slot.due.get().is_some() || self.slot.fired.get().is_some()
    }

    /// Ready once the deadline has passed.
    #[inline]
    pub fn poll(&self, cx: &Context<'_>) -> Poll<TimeoutKind> {
        if let Some(late) = self.slot.fired.get() {
            return Poll::Ready(late);
        }
        let mut waker = self.slot.waker.borrow_mut();
        match &mut *waker {
            Some(known) if known.will_wake(cx.waker()) => {}
            other => *other = Some(cx.waker().clone()),
        }
        Poll::Pending
    }

    /// Runs `work` to its end.
    ///
    /// # Errors
    /// The deadline passed first.
    pub async fn within<T>(&self, work: impl Future<Output = T>) -> Result<T, TimeoutKind> {
        let mut work = pin!(work);
        std::future::poll_fn(|cx| match work.as_mut().poll(cx) {
            Poll::Ready(done) => Poll::Ready(Ok(done)),
            Poll::Pending => self.poll(cx).map(Err),
        })
        .await
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.clock.inner.slots.borrow_mut().remove(self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_fire_by_name_once_due_and_idle_ones_early_when_draining() {
        let clock = Clock::new();
        let start = clock.now();
        let s = Duration::from_secs;
        let (idle, head, none) = (clock.timer(), clock.timer(), clock.timer());
        let cx = Context::from_waker(Waker::noop());
        idle.arm(TimeoutKind::Idle, s(60));
        head.arm(TimeoutKind::Head, s(10));
        clock.sweep(start + s(9));
        assert!(
            idle.poll(&cx).is_pending()
                && head.poll(&cx).is_pending()
                && none.poll(&cx).is_pending()
        );
        clock.sweep(start + s(10));
        assert_eq!(head.poll(&cx), Poll::Ready(TimeoutKind::Head));
        assert!(idle.poll(&cx).is_pending());
        clock.drain(start + s(12));
        clock.sweep(start + s(11));
        assert!(idle.poll(&cx).is_pending());
        clock.sweep(start + s(12));
        assert_eq!(idle.poll(&cx), Poll::Ready(TimeoutKind::Drain));
        head.arm(TimeoutKind::Head, s(1));
        assert!(head.poll(&cx).is_pending());
        drop((idle, head, none));
        assert!(clock.inner.slots.borrow().is_empty());
    }

    #[test]
    fn a_soft_drain_shortens_idle_timeouts_until_it_is_revoked() {
        let clock = Clock::new();
        let (start, s) = (clock.now(), Duration::from_secs);
        let (idle, client) = (clock.timer(), clock.timer());
        let cx = Context::from_waker(Waker::noop());
        idle.arm(TimeoutKind::Idle, s(60));
        client.arm(TimeoutKind::Client, s(60));
        for (hasten, swept, late) in [(58, 1, false), (0, 3, false), (58, 3, true)] {
            clock.expire_idle(s(hasten));
            clock.sweep(start + s(swept));
            assert_eq!(
                idle.poll(&cx) == Poll::Ready(TimeoutKind::Drain),
                late,
                "{hasten} s earlier, after {swept} s"
            );
        }
        assert!(
            client.poll(&cx).is_pending(),
            "a message under way has its time"
        );
    }
}
