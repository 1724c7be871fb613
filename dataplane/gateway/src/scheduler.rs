//! CPU time of a worker divided among tenants: deficit round robin between tenants whose tasks are ready, and the account of what each used.
//! It knows no sockets and no requests, and never takes the worker from a task that runs. Why it is so: `docs/design/0007-fairness.md`.
//! Start at [`Scheduler::run`].

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use canal_kit::metrics::Counter;
use canal_kit::sys::monotonic_nanos;
use canal_model::share::{Share, ShareKind, Shares};

/// CPU time of a tenant of weight 100 in a round in which others wait. As long as ten to twenty requests take.
const QUANTUM: Duration = Duration::from_micros(500);
/// The weight that [`QUANTUM`] is for.
const WEIGHT: u64 = 100;
/// Weights beyond are as good as this one: a round must stay short.
const WEIGHT_MAX: u64 = 10_000;

/// A worker's scheduler. Clones are the same one.
#[derive(Clone)]
pub(crate) struct Scheduler {
    inner: Rc<Inner>,
}

struct Inner {
    /// Counts rounds; in each a tenant may use its quantum.
    round: Cell<u64>,
    /// Whether a task ran since this round began.
    has_run: Cell<bool>,
    /// Tenants that used up their credit while tasks of theirs are ready, in the order in which they did.
    waiting: RefCell<VecDeque<Rc<TenantQueue>>>,
    /// The task that begins rounds, while it sleeps.
    rounds: RefCell<Option<Waker>>,
    /// The time in nanoseconds; a test has its own.
    now: fn() -> u64,
}

/// One tenant's account at a worker, and its tasks that wait for the next round.
pub(crate) struct TenantQueue {
    scheduler: Rc<Inner>,
    /// Nanoseconds it may run before others that are ready; negative after a task that ran for long.
    credit: Cell<i64>,
    /// The round that `credit` was last filled up in.
    round: Cell<u64>,
    quantum: Cell<i64>,
    /// Tasks that are ready, in the order in which they became so.
    parked: RefCell<VecDeque<Rc<TaskState>>>,
    is_listed: Cell<bool>,
    /// A task was taken out of `parked` and has not run yet.
    has_grant: Cell<bool>,
    cpu: Counter,
}

/// What a task of a tenant is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Whatever the task itself waits for.
    Free,
    /// It is ready and waits for its turn.
    Parked,
    /// Its turn has come.
    Granted,
    Gone,
}

struct TaskState {
    phase: Cell<Phase>,
    waker: RefCell<Option<Waker>>,
}

/// A task's place in its tenant's queue, until it is dropped.
struct TaskGuard {
    tenant: Rc<TenantQueue>,
    state: Rc<TaskState>,
}

/// The quantum of a tenant, nanoseconds.
fn quantum_of(shares: &Shares) -> i64 {
    let weight = match shares.get(ShareKind::GatewayCpu) {
        Share::Amount(weight) => weight.min(WEIGHT_MAX),
        Share::Percent(percent) => u64::from(percent),
    };
    // At most 50 ms.
    i64::try_from(QUANTUM.as_nanos() as u64 * weight / WEIGHT).unwrap_or(i64::MAX).max(1)
}

/// The credit after `rounds` more rounds: what is owed is paid first, and what was not used is not saved.
fn decide_credit(credit: i64, quantum: i64, rounds: u64) -> i64 {
    let earned = quantum.saturating_mul(i64::try_from(rounds).unwrap_or(i64::MAX));
    credit.saturating_add(earned).min(quantum)
}

/// The rounds until a tenant may run again.
fn decide_wait(credit: i64, quantum: i64) -> u64 {
    (1 - credit.min(0)).unsigned_abs().div_ceil(quantum.unsigned_abs())
}

impl Scheduler {
    pub(crate) fn new() -> Self {
        Self::with_clock(monotonic_nanos)
    }

    fn with_clock(now: fn() -> u64) -> Self {
        let inner = Inner { round: Cell::new(0), has_run: Cell::new(false), waiting: RefCell::default(), rounds: RefCell::default(), now };
        Self { inner: Rc::new(inner) }
    }

    /// A queue for a tenant; its CPU time is added to `cpu`.
    pub(crate) fn queue(&self, shares: &Shares, cpu: Counter) -> Rc<TenantQueue> {
        let quantum = quantum_of(shares);
        Rc::new(TenantQueue {
            scheduler: self.inner.clone(),
            credit: Cell::new(quantum),
            round: Cell::new(self.inner.round.get()),
            quantum: Cell::new(quantum),
            parked: RefCell::default(),
            is_listed: Cell::new(false),
            has_grant: Cell::new(false),
            cpu,
        })
    }

    /// Runs a task of a tenant to its end, in turns with those of other tenants.
    pub(crate) async fn run<T>(tenant: &Rc<TenantQueue>, mut task: Pin<&mut impl Future<Output = T>>) -> T {
        let state = Rc::new(TaskState { phase: Cell::new(Phase::Free), waker: RefCell::default() });
        let guard = TaskGuard { tenant: tenant.clone(), state };
        std::future::poll_fn(|cx| guard.poll(cx, |cx| task.as_mut().poll(cx))).await
    }

    /// Runs a task of a tenant that may be gone; then nobody's turn.
    pub(crate) async fn run_for<T>(tenant: Option<Rc<TenantQueue>>, task: Pin<&mut impl Future<Output = T>>) -> T {
        match tenant {
            Some(tenant) => Self::run(&tenant, task).await,
            None => task.await,
        }
    }

    /// Begins rounds for as long as the worker lives.
    pub(crate) async fn rounds(self) {
        loop {
            std::future::poll_fn(|cx| self.poll_waiting(cx)).await;
            // All tasks that have credit run before this comes back, and the kernel is asked for what has arrived.
            tokio::task::yield_now().await;
            self.inner.begin_round();
        }
    }

    fn poll_waiting(&self, cx: &Context<'_>) -> Poll<()> {
        if !self.inner.waiting.borrow().is_empty() {
            return Poll::Ready(());
        }
        *self.inner.rounds.borrow_mut() = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Inner {
    /// Gives every tenant that waits its quantum, and the first task of each that has credit its turn.
    fn begin_round(&self) {
        let mut waiting = self.waiting.borrow_mut();
        let mut rounds = 1;
        // Nobody else had anything to do: rounds that would only pay debts are skipped, so that the worker never idles.
        if !self.has_run.replace(false) {
            rounds = waiting.iter().map(|tenant| tenant.rounds_to_wait()).min().unwrap_or(1).max(1);
        }
        self.round.set(self.round.get() + rounds);
        for _ in 0..waiting.len() {
            let Some(tenant) = waiting.pop_front() else { return };
            if tenant.fill() > 0 {
                tenant.is_listed.set(false);
                tenant.grant();
            } else {
                waiting.push_back(tenant);
            }
        }
    }
}

impl TenantQueue {
    /// Takes over what the provider wrote for the tenant.
    pub(crate) fn set_shares(&self, shares: &Shares) {
        self.quantum.set(quantum_of(shares));
    }

    fn rounds_to_wait(&self) -> u64 {
        decide_wait(self.credit.get(), self.quantum.get())
    }

    /// Brings the credit up to this round.
    #[inline]
    fn fill(&self) -> i64 {
        let rounds = self.scheduler.round.get() - self.round.replace(self.scheduler.round.get());
        if rounds > 0 {
            self.credit.set(decide_credit(self.credit.get(), self.quantum.get(), rounds));
        }
        self.credit.get()
    }

    fn charge(&self, nanos: u64) {
        self.cpu.add(nanos);
        self.credit.set(self.credit.get().saturating_sub(i64::try_from(nanos).unwrap_or(i64::MAX)));
    }

    /// Gives the first task that waits its turn.
    fn grant(&self) {
        let mut parked = self.parked.borrow_mut();
        while let Some(task) = parked.pop_front() {
            if task.phase.get() != Phase::Parked {
                continue;
            }
            task.phase.set(Phase::Granted);
            self.has_grant.set(true);
            // Only marks the task as ready: nothing runs in here.
            if let Some(waker) = &*task.waker.borrow() {
                waker.wake_by_ref();
            }
            return;
        }
    }

    /// Goes on with the tasks that wait, if there are any.
    #[inline]
    fn proceed(self: &Rc<Self>) {
        if !self.has_grant.get() && !self.parked.borrow().is_empty() {
            self.go_on();
        }
    }

    /// Goes on with the tasks that wait: now if there is credit, else in a later round.
    fn go_on(self: &Rc<Self>) {
        if self.credit.get() > 0 {
            return self.grant();
        }
        if !self.is_listed.replace(true) {
            self.scheduler.waiting.borrow_mut().push_back(self.clone());
            if let Some(rounds) = self.scheduler.rounds.borrow_mut().take() {
                rounds.wake();
            }
        }
    }
}

impl TaskGuard {
    fn poll<T>(&self, cx: &mut Context<'_>, poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<T> {
        let tenant = &self.tenant;
        match self.state.phase.get() {
            Phase::Parked => {
                self.remember(cx);
                return Poll::Pending;
            }
            Phase::Granted => tenant.has_grant.set(false),
            // In the order in which tasks became ready.
            Phase::Free if tenant.fill() <= 0 || !tenant.parked.borrow().is_empty() => {
                self.park(cx);
                return Poll::Pending;
            }
            Phase::Free | Phase::Gone => {}
        }
        self.state.phase.set(Phase::Free);
        let now = tenant.scheduler.now;
        let begun = now();
        let polled = poll(cx);
        tenant.charge(now().saturating_sub(begun));
        tenant.scheduler.has_run.set(true);
        tenant.proceed();
        polled
    }

    fn park(&self, cx: &Context<'_>) {
        self.state.phase.set(Phase::Parked);
        self.remember(cx);
        self.tenant.parked.borrow_mut().push_back(self.state.clone());
        self.tenant.proceed();
    }

    fn remember(&self, cx: &Context<'_>) {
        let mut waker = self.state.waker.borrow_mut();
        match &mut *waker {
            Some(known) if known.will_wake(cx.waker()) => {}
            other => *other = Some(cx.waker().clone()),
        }
    }
}

impl Drop for TaskGuard {
    fn drop(&mut self) {
        self.state.waker.borrow_mut().take();
        // A turn that is not used goes to the next.
        if self.state.phase.replace(Phase::Gone) == Phase::Granted {
            self.tenant.has_grant.set(false);
            self.tenant.proceed();
        }
    }
}

#[cfg(test)]
mod tests;
