//! Decides which request of conditions is compiled next: a limited number at once, tenants in turn,
//! and for each tenant one answer in memory. It does not know what is compiled. Start at
//! [`ConditionsTurns::run`].

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use canal_model::ids::TenantName;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Number of tenants that are compiled at once for requests of conditions. Further requests wait, so
/// that operators who ask often do not take the processors from the compilation of changes.
pub const CONDITIONS_AT_ONCE_MAX: usize = 1;
/// Maximum number of requests for the conditions of one tenant that wait, are compiled or have an
/// answer that was not read yet.
/// A waiting request keeps only its message. Nobody measured this value; it lets a few operators of
/// a tenant ask at the same time.
pub const CONDITIONS_PER_TENANT_MAX: usize = 8;

/// Reason why nothing was compiled for a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TurnError {
    /// The tenant has [`CONDITIONS_PER_TENANT_MAX`] requests already.
    Busy,
    /// The work panicked, which is a bug in the controller.
    Panic,
    /// The controller is stopping.
    Stopping,
}

/// The requests of conditions of all tenants.
#[derive(Debug)]
pub(super) struct ConditionsTurns {
    /// Each request takes one permit while it is compiled. Permits go to requests in the order in
    /// which they began to wait, of which each tenant has one at most: so tenants take turns.
    compiling: Arc<Semaphore>,
    tenants: Mutex<BTreeMap<TenantName, ConditionsQueue>>,
}

/// The requests of one tenant.
#[derive(Debug)]
struct ConditionsQueue {
    open: usize,
    /// Has one permit, which a request keeps from before its compilation until its answer was read.
    answer: Arc<Semaphore>,
}

/// A request that counts against its tenant's maximum until it is dropped.
#[derive(Debug)]
struct OpenRequest {
    turns: Arc<ConditionsTurns>,
    tenant: TenantName,
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        if let Entry::Occupied(mut queue) = self.turns.tenants().entry(self.tenant.clone()) {
            queue.get_mut().open -= 1;
            if queue.get().open == 0 {
                queue.remove();
            }
        }
    }
}

/// The right to keep a tenant's answer in memory. The tenant's next request begins when it is
/// dropped.
#[derive(Debug)]
pub(super) struct AnswerPermit {
    _answer: OwnedSemaphorePermit,
    _request: OpenRequest,
}

impl ConditionsTurns {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            compiling: Arc::new(Semaphore::new(CONDITIONS_AT_ONCE_MAX)),
            tenants: Mutex::default(),
        })
    }

    fn tenants(&self) -> MutexGuard<'_, BTreeMap<TenantName, ConditionsQueue>> {
        // No code panics between two writes to the map.
        self.tenants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a turn of the tenant, then runs what `begin` returns on a thread of its own.
    ///
    /// # Errors
    /// The reason why there is no result.
    pub(super) async fn run<T, W>(
        self: &Arc<Self>,
        tenant: &TenantName,
        begin: impl FnOnce() -> W,
    ) -> Result<(T, AnswerPermit), TurnError>
    where
        T: Send + 'static,
        W: FnOnce() -> T + Send + 'static,
    {
        let (request, answer) = self.open(tenant).ok_or(TurnError::Busy)?;
        // Nothing closes the semaphores.
        let stopping = |_| TurnError::Stopping;
        let answer = answer.acquire_owned().await.map_err(stopping)?;
        let turn = self.compiling.clone().acquire_owned().await;
        let turn = turn.map_err(stopping)?;
        let work = begin();
        // The thread cannot be stopped when the client resets the request, so the turn must end with
        // the thread and not with the request.
        let work = move || {
            let _turn = turn;
            work()
        };
        let result = tokio::task::spawn_blocking(work).await;
        let permit = AnswerPermit {
            _answer: answer,
            _request: request,
        };
        result
            .map(|result| (result, permit))
            .map_err(|e| match e.is_panic() {
                true => TurnError::Panic,
                false => TurnError::Stopping,
            })
    }

    /// Counts a request of the tenant; `None` if it has too many.
    fn open(self: &Arc<Self>, tenant: &TenantName) -> Option<(OpenRequest, Arc<Semaphore>)> {
        let mut tenants = self.tenants();
        let queue = tenants
            .entry(tenant.clone())
            .or_insert_with(|| ConditionsQueue {
                open: 0,
                answer: Arc::new(Semaphore::new(1)),
            });
        if queue.open == CONDITIONS_PER_TENANT_MAX {
            return None;
        }
        queue.open += 1;
        let request = OpenRequest {
            turns: self.clone(),
            tenant: tenant.clone(),
        };
        Some((request, queue.answer.clone()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::sync::mpsc;

    use tokio::task::JoinHandle;

    use super::*;

    /// The result of a request that did not panic.
    type Outcome = Result<AnswerPermit, TurnError>;

    /// Requests whose work waits until the test lets it end.
    struct TurnsFixture {
        turns: Arc<ConditionsTurns>,
        begun: Arc<AtomicUsize>,
        running: Arc<AtomicUsize>,
        most: Arc<AtomicUsize>,
    }

    /// A request that was sent, and the sender that ends its work when it is dropped.
    struct BlockedRequest {
        task: JoinHandle<Outcome>,
        end: mpsc::Sender<()>,
    }

    impl TurnsFixture {
        fn new() -> Self {
            Self {
                turns: ConditionsTurns::new(),
                begun: Arc::default(),
                running: Arc::default(),
                most: Arc::default(),
            }
        }

        /// Sends a request and lets it come as far as it can.
        async fn send(&self, tenant: &str) -> BlockedRequest {
            let tenant: TenantName = tenant.parse().unwrap();
            let turns = self.turns.clone();
            let (begun, running, most) =
                (self.begun.clone(), self.running.clone(), self.most.clone());
            let (end, ended) = mpsc::channel::<()>();
            let task = tokio::spawn(async move {
                let begin = move || {
                    begun.fetch_add(1, SeqCst);
                    move || {
                        most.fetch_max(running.fetch_add(1, SeqCst) + 1, SeqCst);
                        let _ = ended.recv();
                        running.fetch_sub(1, SeqCst);
                    }
                };
                turns.run(&tenant, begin).await.map(|((), permit)| permit)
            });
            self.poll_all().await;
            BlockedRequest { task, end }
        }

        /// Lets all tasks run until they wait. The test's runtime has one thread, so that few passes
        /// are enough.
        async fn poll_all(&self) {
            for _ in 0..64 {
                tokio::task::yield_now().await;
            }
        }

        fn begun(&self) -> usize {
            self.begun.load(SeqCst)
        }
    }

    impl BlockedRequest {
        /// Ends the work and returns the result of the request.
        async fn finish(self) -> Outcome {
            drop(self.end);
            self.task.await.unwrap()
        }

        /// Cancels the request, as a client does that resets its stream. Its work goes on.
        async fn cancel(self) -> mpsc::Sender<()> {
            self.task.abort();
            assert!(self.task.await.unwrap_err().is_cancelled());
            self.end
        }
    }

    #[tokio::test]
    async fn requests_beyond_the_limit_wait() {
        let fixture = TurnsFixture::new();
        let mut sent = Vec::new();
        for n in 0..4 * CONDITIONS_AT_ONCE_MAX {
            sent.push(fixture.send(&format!("t{n}")).await);
        }
        for (done, request) in sent.into_iter().enumerate() {
            assert_eq!(fixture.begun(), done + CONDITIONS_AT_ONCE_MAX);
            request.finish().await.unwrap();
            fixture.poll_all().await;
        }
        assert_eq!(fixture.most.load(SeqCst), CONDITIONS_AT_ONCE_MAX);
    }

    #[tokio::test]
    async fn a_cancelled_request_keeps_its_turn_while_its_thread_works() {
        let fixture = TurnsFixture::new();
        let mut threads = vec![fixture.send("alpha").await.cancel().await];
        // Each of these would begin if the turn ended with the cancelled request.
        for _ in 0..100 {
            threads.push(fixture.send("alpha").await.cancel().await);
        }
        let other = fixture.send("beta").await;
        assert_eq!(fixture.begun(), 1);
        drop(threads);
        other.finish().await.unwrap();
        assert_eq!((fixture.begun(), fixture.most.load(SeqCst)), (2, 1));
        assert!(
            fixture.turns.tenants().is_empty(),
            "nothing is left of them"
        );
    }

    #[tokio::test]
    async fn tenants_take_turns() {
        let fixture = TurnsFixture::new();
        let first = fixture.send("alpha").await;
        let second = fixture.send("alpha").await;
        let third = fixture.send("alpha").await;
        let other = fixture.send("beta").await;
        let unread = first.finish().await.unwrap();
        // The answer is not read, so that alpha's next request does not begin; beta's does.
        other.finish().await.unwrap();
        fixture.poll_all().await;
        assert_eq!(fixture.begun(), 2);
        drop(unread);
        second.finish().await.unwrap();
        third.finish().await.unwrap();
        assert_eq!(fixture.begun(), 4);
    }

    #[tokio::test]
    async fn a_tenant_with_too_many_requests_is_refused() {
        let fixture = TurnsFixture::new();
        let mut sent = Vec::new();
        for _ in 0..CONDITIONS_PER_TENANT_MAX {
            sent.push(fixture.send("alpha").await);
        }
        let beyond = fixture.send("alpha").await.finish().await;
        assert_eq!(beyond.err(), Some(TurnError::Busy));
        // Its turn comes after the first of alpha.
        sent.insert(1, fixture.send("beta").await);
        for request in sent {
            request.finish().await.unwrap();
        }
        fixture.send("alpha").await.finish().await.unwrap();
    }

    #[tokio::test]
    async fn a_panic_ends_its_turn() {
        let fixture = TurnsFixture::new();
        let tenant = "alpha".parse().unwrap();
        let work = || || -> u8 { panic!("expected in this test") };
        let found = fixture.turns.run(&tenant, work).await;
        assert_eq!(found.err(), Some(TurnError::Panic));
        fixture.send("alpha").await.finish().await.unwrap();
    }
}
