//! Coarse deadlines: a worker's one sweep looks at all of them every [`TICK`], so that arming one costs two stores and no timer wheel.
//! What a deadline means is its owner's business; who is late is told by name.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use slab::Slab;
use tokio::time::Instant;

/// How often deadlines are looked at; they fire up to so much late.
pub(crate) const TICK: Duration = Duration::from_millis(100);

/// No tenant's number.
const NOBODY: u32 = u32::MAX;

/// What ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Late {
    /// The request's head did not arrive.
    Head,
    /// No next request on a kept connection.
    Idle,
    /// The client sent or took no byte of a body.
    Client,
    /// The client was too slow with the beginning of a body that an authorizer is shown.
    ShownBody,
    /// The upstream sent or took no byte.
    Upstream,
    /// The last answer was not taken.
    Linger,
    /// The worker drains, or asks its clients to leave, and this connection is idle.
    Drain,
}

impl Late {
    pub(crate) const ALL: [Late; 7] = [Late::Head, Late::Idle, Late::Client, Late::ShownBody, Late::Upstream, Late::Linger, Late::Drain];

    /// The counter label.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Late::Head => "request_head",
            Late::Idle => "idle",
            Late::Client => "client_stalled",
            Late::ShownBody => "shown_body",
            Late::Upstream => "upstream_stalled",
            Late::Linger => "linger",
            Late::Drain => "drain",
        }
    }
}

#[derive(Debug)]
struct Slot {
    due: Cell<Option<Instant>>,
    what: Cell<Late>,
    fired: Cell<Option<Late>>,
    /// The tenant whose policies' changes its owner wants to be woken for.
    tenant: Cell<u32>,
    waker: RefCell<Option<Waker>>,
}

#[derive(Debug)]
struct Inner {
    slots: RefCell<Slab<Rc<Slot>>>,
    now: Cell<Instant>,
    /// Since when the worker drains, and how long an idle connection may stay then.
    draining: Cell<Option<Instant>>,
    /// How much earlier than armed idle connections are late.
    haste: Cell<Duration>,
}

/// The worker's clock. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Clock {
    inner: Rc<Inner>,
}

impl Clock {
    pub(crate) fn new() -> Self {
        let inner = Inner {
            slots: RefCell::default(),
            now: Cell::new(Instant::now()),
            draining: Cell::new(None),
            haste: Cell::new(Duration::ZERO),
        };
        Self { inner: Rc::new(inner) }
    }

    /// The time of the last sweep.
    #[inline]
    pub(crate) fn now(&self) -> Instant {
        self.inner.now.get()
    }

    /// Wakes whoever watches this tenant's policies.
    pub(crate) fn wake(&self, tenant: u32) {
        for (_, slot) in self.inner.slots.borrow().iter() {
            if slot.tenant.get() == tenant
                && let Some(waker) = slot.waker.borrow_mut().take()
            {
                waker.wake();
            }
        }
    }

    /// From now on idle connections have until `until`.
    pub(crate) fn drain(&self, until: Instant) {
        self.inner.draining.set(Some(until));
    }

    /// From now on idle connections are late so much earlier; zero ends it.
    pub(crate) fn hasten(&self, by: Duration) {
        self.inner.haste.set(by);
    }

    /// A deadline of one owner, not armed.
    pub(crate) fn timer(&self) -> Timer {
        let slot = Slot {
            due: Cell::new(None),
            what: Cell::new(Late::Idle),
            fired: Cell::new(None),
            tenant: Cell::new(NOBODY),
            waker: RefCell::new(None),
        };
        let slot = Rc::new(slot);
        let key = self.inner.slots.borrow_mut().insert(slot.clone());
        Timer { clock: self.clone(), slot, key }
    }

    /// Fires what is due at `now`.
    pub(crate) fn sweep(&self, now: Instant) {
        self.inner.now.set(now);
        let drained = self.inner.draining.get().is_some_and(|until| until <= now);
        let hastened = now + self.inner.haste.get();
        // Wakers only mark tasks as runnable; none of them runs, and so none touches the slab, in here.
        for (_, slot) in self.inner.slots.borrow().iter() {
            let Some(due) = slot.due.get() else { continue };
            let idle = slot.what.get() == Late::Idle;
            if due > now && !(idle && (drained || due <= hastened)) {
                continue;
            }
            slot.due.set(None);
            slot.fired.set(Some(if due > now { Late::Drain } else { slot.what.get() }));
            if let Some(waker) = slot.waker.borrow_mut().take() {
                waker.wake();
            }
        }
    }

    /// Sweeps for ever, and calls `swept` after each.
    pub(crate) async fn run(&self, swept: impl Fn()) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            self.sweep(ticks.tick().await);
            swept();
        }
    }
}

/// One deadline; gone when dropped.
#[derive(Debug)]
pub(crate) struct Timer {
    clock: Clock,
    slot: Rc<Slot>,
    key: usize,
}

impl Timer {
    /// Due `after` from now, for `what`; replaces what was armed.
    #[inline]
    pub(crate) fn arm(&self, what: Late, after: Duration) {
        self.arm_from(what, self.clock.now(), after);
    }

    /// Due `after` from `since`, which may have passed already.
    #[inline]
    pub(crate) fn arm_from(&self, what: Late, since: Instant, after: Duration) {
        self.slot.what.set(what);
        self.slot.fired.set(None);
        self.slot.due.set(Some(since + after));
    }

    /// Its owner is woken when this tenant's policies change, while it waits for the deadline; `None`: no more.
    #[inline]
    pub(crate) fn watch(&self, tenant: Option<u32>) {
        self.slot.tenant.set(tenant.unwrap_or(NOBODY));
    }

    /// Never due.
    #[inline]
    pub(crate) fn disarm(&self) {
        self.slot.due.set(None);
        self.slot.fired.set(None);
    }

    /// Armed, or fired and not seen yet.
    pub(crate) fn is_armed(&self) -> bool {
        self.slot.due.get().is_some() || self.slot.fired.get().is_some()
    }

    /// Ready once the deadline has passed.
    #[inline]
    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<Late> {
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

    /// `work`'s end, unless the deadline comes first.
    pub(crate) async fn within<T>(&self, work: impl Future<Output = T>) -> Result<T, Late> {
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
        idle.arm(Late::Idle, s(60));
        head.arm(Late::Head, s(10));
        clock.sweep(start + s(9));
        assert!(idle.poll(&cx).is_pending() && head.poll(&cx).is_pending() && none.poll(&cx).is_pending());
        clock.sweep(start + s(10));
        assert_eq!(head.poll(&cx), Poll::Ready(Late::Head));
        assert!(idle.poll(&cx).is_pending());
        clock.drain(start + s(12));
        clock.sweep(start + s(11));
        assert!(idle.poll(&cx).is_pending());
        clock.sweep(start + s(12));
        assert_eq!(idle.poll(&cx), Poll::Ready(Late::Drain));
        head.arm(Late::Head, s(1));
        assert!(head.poll(&cx).is_pending());
        drop((idle, head, none));
        assert!(clock.inner.slots.borrow().is_empty());
    }

    #[test]
    fn asked_to_leave_idle_connections_are_late_earlier_until_it_is_taken_back() {
        let clock = Clock::new();
        let (start, s) = (clock.now(), Duration::from_secs);
        let (idle, client) = (clock.timer(), clock.timer());
        let cx = Context::from_waker(Waker::noop());
        idle.arm(Late::Idle, s(60));
        client.arm(Late::Client, s(60));
        for (hasten, swept, late) in [(58, 1, false), (0, 3, false), (58, 3, true)] {
            clock.hasten(s(hasten));
            clock.sweep(start + s(swept));
            assert_eq!(idle.poll(&cx) == Poll::Ready(Late::Drain), late, "{hasten} s earlier, after {swept} s");
        }
        assert!(client.poll(&cx).is_pending(), "a message under way has its time");
    }
}
