//! Divides a worker's CPU time among tenants by deficit round robin, and accounts for what each
//! tenant uses.
//!
//! It knows neither sockets nor requests, and never preempts a running task.
//! `docs/design/0007-fairness.md` explains the design. Start with [`Scheduler::run`].

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use canal_model::share::{Share, ShareKind, Shares};
use canal_net::sys::monotonic_nanos;
use canal_runtime::metrics::Counter;

/// CPU time per round of a tenant with weight 100 while other tenants wait. Ten to twenty requests
/// take this long. A tenant waits 0.5 ms for each other tenant that is ready.
const QUANTUM: Duration = Duration::from_micros(500);
/// Weight to which [`QUANTUM`] applies.
const WEIGHT: u64 = 100;
/// Largest effective weight; a round must stay short. With it a tenant has 50 ms of a round.
const WEIGHT_MAX: u64 = 10_000;

/// A worker's scheduler. Clones share it.
#[derive(Clone)]
pub struct Scheduler {
    inner: Rc<Inner>,
}

struct Inner {
    /// Number of the current round. In each round a tenant may use its quantum.
    round: Cell<u64>,
    /// True if a task has run since this round began.
    has_run: Cell<bool>,
    /// Tenants with ready tasks but no credit, in the order in which they ran out of credit.
    waiting: RefCell<VecDeque<Rc<TenantQueue>>>,
    /// Waker of the task that begins rounds, while it sleeps.
    rounds: RefCell<Option<Waker>>,
    /// Returns the time in nanoseconds; tests replace it.
    now: fn() -> u64,
}

/// One tenant's credit on a worker, and its tasks that wait for the next round.
pub struct TenantQueue {
    scheduler: Rc<Inner>,
    /// Nanoseconds that the tenant may run before other ready tenants; negative after a task that
    /// ran long.
    credit: Cell<i64>,
    /// Round in which `credit` was last refilled.
    round: Cell<u64>,
    quantum: Cell<i64>,
    /// Ready tasks, in the order in which they became ready.
    parked: RefCell<VecDeque<Rc<TaskState>>>,
    /// True while the tenant is in [`Inner::waiting`].
    is_listed: Cell<bool>,
    /// True while a task that was taken out of `parked` has not run yet.
    has_grant: Cell<bool>,
    cpu: Counter,
}

/// Scheduling state of a tenant's task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WaitPhase {
    /// The task waits for its own events.
    Free,
    /// The task is ready and waits for its turn.
    Parked,
    /// The task may run now.
    Granted,
    Gone,
}

struct TaskState {
    phase: Cell<WaitPhase>,
    waker: RefCell<Option<Waker>>,
}

/// Registration of a task in its tenant's queue, until dropped.
struct TaskGuard {
    tenant: Rc<TenantQueue>,
    state: Rc<TaskState>,
}

/// Returns a tenant's quantum in nanoseconds.
fn quantum_of(shares: &Shares) -> i64 {
    let weight = match shares.get(ShareKind::GatewayCpu) {
        Share::Amount(weight) => weight.min(WEIGHT_MAX),
        Share::Percent(percent) => u64::from(percent),
    };
    // The result is at most 50 ms.
    i64::try_from(QUANTUM.as_nanos() as u64 * weight / WEIGHT)
        .unwrap_or(i64::MAX)
        .max(1)
}

/// Returns the credit after `rounds` more rounds. A debt is paid first, and unused credit is not
/// saved.
fn decide_credit(credit: i64, quantum: i64, rounds: u64) -> i64 {
    let earned = quantum.saturating_mul(i64::try_from(rounds).unwrap_or(i64::MAX));
    credit.saturating_add(earned).min(quantum)
}

/// Returns the number of rounds until a tenant may run again.
fn decide_wait(credit: i64, quantum: i64) -> u64 {
    (1 - credit.min(0))
        .unsigned_abs()
        .div_ceil(quantum.unsigned_abs())
}

impl Default for Scheduler {
    fn default() -> Self {
        Self::new()
    }
}

impl Scheduler {
    pub fn new() -> Self {
        Self::with_clock(monotonic_nanos)
    }

    fn with_clock(now: fn() -> u64) -> Self {
        let inner = Inner {
            round: Cell::new(0),
            has_run: Cell::new(false),
            waiting: RefCell::default(),
            rounds: RefCell::default(),
            now,
        };
        Self {
            inner: Rc::new(inner),
        }
    }

    /// Creates the queue of a tenant. Its CPU time is added to `cpu`.
    pub fn queue(&self, shares: &Shares, cpu: Counter) -> Rc<TenantQueue> {
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

    /// Runs a task of a tenant to its end, taking turns with other tenants' tasks.
    pub async fn run<T>(
        tenant: &Rc<TenantQueue>,
        mut task: Pin<&mut impl Future<Output = T>>,
    ) -> T {
        let state = Rc::new(TaskState {
            phase: Cell::new(WaitPhase::Free),
            waker: RefCell::default(),
        });
        let guard = TaskGuard {
            tenant: tenant.clone(),
            state,
        };
        std::future::poll_fn(|cx| guard.poll(cx, |cx| task.as_mut().poll(cx))).await
    }

    /// Runs a task of a tenant that may no longer exist; then the task runs without turns.
    pub async fn run_for<T>(
        tenant: Option<Rc<TenantQueue>>,
        task: Pin<&mut impl Future<Output = T>>,
    ) -> T {
        match tenant {
            Some(tenant) => Self::run(&tenant, task).await,
            None => task.await,
        }
    }

    /// Begins rounds for as long as the worker lives.
    pub async fn rounds(self) {
        loop {
            std::future::poll_fn(|cx| self.poll_waiting(cx)).await;
            // All tasks with credit run before this task continues, and the reactor polls the
            // kernel for new events.
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
    /// Refills the quantum of every waiting tenant, and grants a turn to the first task of each
    /// tenant with credit.
    fn begin_round(&self) {
        let mut waiting = self.waiting.borrow_mut();
        let mut rounds = 1;
        // If no task ran in the last round, rounds that would only pay debts are skipped, so that
        // the worker never idles.
        if !self.has_run.replace(false) {
            rounds = waiting
                .iter()
                .map(|tenant| tenant.rounds_to_wait())
                .min()
                .unwrap_or(1)
                .max(1);
        }
        self.round.set(self.round.get() + rounds);
        for _ in 0..waiting.len() {
            let Some(tenant) = waiting.pop_front() else {
                return;
            };
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
    /// Applies the shares that the provider set for the tenant.
    pub fn set_shares(&self, shares: &Shares) {
        self.quantum.set(quantum_of(shares));
    }

    fn rounds_to_wait(&self) -> u64 {
        decide_wait(self.credit.get(), self.quantum.get())
    }

    /// Brings the credit up to the current round and returns it.
    #[inline]
    fn fill(&self) -> i64 {
        let rounds = self.scheduler.round.get() - self.round.replace(self.scheduler.round.get());
        if rounds > 0 {
            self.credit
                .set(decide_credit(self.credit.get(), self.quantum.get(), rounds));
        }
        self.credit.get()
    }

    fn charge(&self, nanos: u64) {
        self.cpu.add(nanos);
        self.credit.set(
            self.credit
                .get()
                .saturating_sub(i64::try_from(nanos).unwrap_or(i64::MAX)),
        );
    }

    /// Grants a turn to the first parked task.
    fn grant(&self) {
        let mut parked = self.parked.borrow_mut();
        while let Some(task) = parked.pop_front() {
            if task.phase.get() != WaitPhase::Parked {
                continue;
            }
            task.phase.set(WaitPhase::Granted);
            self.has_grant.set(true);
            // Waking only marks the task as ready; nothing runs here.
            if let Some(waker) = &*task.waker.borrow() {
                waker.wake_by_ref();
            }
            return;
        }
    }

    /// Continues with the parked tasks, if there are any.
    #[inline]
    fn proceed(self: &Rc<Self>) {
        if !self.has_grant.get() && !self.parked.borrow().is_empty() {
            self.go_on();
        }
    }

    /// Continues with the parked tasks: now if there is credit, otherwise in a later round.
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
    fn poll<T>(
        &self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let tenant = &self.tenant;
        match self.state.phase.get() {
            WaitPhase::Parked => {
                self.remember(cx);
                return Poll::Pending;
            }
            WaitPhase::Granted => tenant.has_grant.set(false),
            // A task that becomes ready queues behind the parked ones, so that tasks run in that
            // order.
            WaitPhase::Free if tenant.fill() <= 0 || !tenant.parked.borrow().is_empty() => {
                self.park(cx);
                return Poll::Pending;
            }
            WaitPhase::Free | WaitPhase::Gone => {}
        }
        self.state.phase.set(WaitPhase::Free);
        let now = tenant.scheduler.now;
        let begun = now();
        let polled = poll(cx);
        tenant.charge(now().saturating_sub(begun));
        tenant.scheduler.has_run.set(true);
        tenant.proceed();
        polled
    }

    fn park(&self, cx: &Context<'_>) {
        self.state.phase.set(WaitPhase::Parked);
        self.remember(cx);
        self.tenant
            .parked
            .borrow_mut()
            .push_back(self.state.clone());
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
        // An unused turn goes to the next task.
        if self.state.phase.replace(WaitPhase::Gone) == WaitPhase::Granted {
            self.tenant.has_grant.set(false);
            self.tenant.proceed();
        }
    }
}

#[cfg(test)]
mod tests;
