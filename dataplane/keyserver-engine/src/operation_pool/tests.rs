//! Tests of when operations start, which are batched, and that no queue or tenant waits for
//! another.

use std::sync::mpsc;

use super::*;

/// Operation that reports its start, and waits for permission to end.
struct GatedWork {
    name: &'static str,
    started: mpsc::Sender<&'static str>,
    go: Option<mpsc::Receiver<()>>,
    completions: mpsc::Sender<&'static str>,
}

impl PoolTask for GatedWork {
    type Answer = ();
    fn work(&mut self) {
        self.started.send(self.name).unwrap();
        if let Some(go) = &self.go {
            go.recv().unwrap();
        }
    }
    fn answer(self, (): ()) {
        self.completions.send(self.name).unwrap();
    }
}

struct PoolFixture {
    registry: Registry,
    pool: OperationPool<GatedWork>,
    started: (mpsc::Sender<&'static str>, mpsc::Receiver<&'static str>),
    completions: (mpsc::Sender<&'static str>, mpsc::Receiver<&'static str>),
}

/// Time for what must happen, on a quiet machine.
const SOON: Duration = Duration::from_secs(10);

impl PoolFixture {
    fn new(workers: usize) -> Self {
        let registry = Registry::new();
        let pool = OperationPool::start(
            OperationPoolConfig {
                workers,
                linger: Duration::ZERO,
            },
            &registry,
        )
        .unwrap();
        Self {
            registry,
            pool,
            started: mpsc::channel(),
            completions: mpsc::channel(),
        }
    }
    fn push(&self, queue: OperationQueue, tenant: &str, name: &'static str) {
        self.push_with(queue, tenant, name, None);
    }
    /// Queues an operation that waits until something is sent.
    fn hold(&self, queue: OperationQueue, tenant: &str, name: &'static str) -> mpsc::Sender<()> {
        let (go, wait) = mpsc::channel();
        self.push_with(queue, tenant, name, Some(wait));
        go
    }
    fn push_with(
        &self,
        queue: OperationQueue,
        tenant: &str,
        name: &'static str,
        go: Option<mpsc::Receiver<()>>,
    ) {
        let work = GatedWork {
            name,
            started: self.started.0.clone(),
            go,
            completions: self.completions.0.clone(),
        };
        self.pool.push(queue, &tenant.parse().unwrap(), work);
    }
    fn started(&self) -> &'static str {
        self.started
            .1
            .recv_timeout(canal_timing::deadline(SOON))
            .unwrap()
    }
    fn wait_for_completion(&self) -> &'static str {
        self.completions
            .1
            .recv_timeout(canal_timing::deadline(SOON))
            .unwrap()
    }
    fn shows(&self, line: &str) {
        let text = self.registry.render();
        assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
    }
}

#[test]
fn a_single_request_at_a_time_is_never_delayed() {
    let fixture = PoolFixture::new(1);
    for _ in 0..500 {
        fixture.push(OperationQueue::Ecdsa, "alpha", "x");
        fixture.wait_for_completion();
    }
    fixture.shows("canal_key_operations_queued_total{algorithm=\"ecdsa\"} 0");
    fixture.shows("canal_key_batch_size_bucket{algorithm=\"ecdsa\",le=\"1\"} 500");
    fixture.shows("canal_key_batch_wait_seconds_sum{algorithm=\"ecdsa\"} 0");
}

#[test]
fn concurrent_operations_are_batched_and_tenants_take_turns() {
    let fixture = PoolFixture::new(1);
    let go = fixture.hold(OperationQueue::Ecdsa, "loud", "first");
    assert_eq!(fixture.started(), "first");
    for name in ["a", "b", "c"] {
        fixture.push(OperationQueue::Ecdsa, "loud", name);
    }
    fixture.push(OperationQueue::Ecdsa, "quiet", "q");
    go.send(()).unwrap();
    let order: Vec<_> = (0..5).map(|_| fixture.wait_for_completion()).collect();
    assert_eq!(order, ["first", "a", "q", "b", "c"]);
    fixture.shows("canal_key_operations_queued_total{algorithm=\"ecdsa\"} 4");
    fixture.shows("canal_key_batch_size_sum{algorithm=\"ecdsa\"} 5");
    fixture.shows("canal_key_batch_size_count{algorithm=\"ecdsa\"} 2");
}

#[test]
fn short_operations_of_a_batch_are_answered_together() {
    let fixture = PoolFixture::new(1);
    let go = fixture.hold(OperationQueue::Ecdsa, "alpha", "first");
    fixture.started();
    let second = fixture.hold(OperationQueue::Ecdsa, "alpha", "second");
    let third = fixture.hold(OperationQueue::Ecdsa, "alpha", "third");
    go.send(()).unwrap();
    assert_eq!(
        (fixture.wait_for_completion(), fixture.started()),
        ("first", "second"),
        "alone it was answered at once"
    );
    second.send(()).unwrap();
    assert_eq!(fixture.started(), "third");
    assert!(
        fixture.completions.1.try_recv().is_err(),
        "the second's answer waits for the third's"
    );
    third.send(()).unwrap();
    assert_eq!(
        (fixture.wait_for_completion(), fixture.wait_for_completion()),
        ("second", "third")
    );
}

#[test]
fn a_long_line_is_received_in_parts() {
    let fixture = PoolFixture::new(1);
    let go = fixture.hold(OperationQueue::Rsa, "alpha", "first");
    fixture.started();
    for _ in 0..2 * RSA_BATCH_MAX {
        fixture.push(OperationQueue::Rsa, "alpha", "x");
    }
    assert_eq!(
        fixture.pool.depth(OperationQueue::Rsa),
        2 * RSA_BATCH_MAX + 1
    );
    go.send(()).unwrap();
    (0..=2 * RSA_BATCH_MAX).for_each(|_| assert!(!fixture.wait_for_completion().is_empty()));
    fixture.shows("canal_key_batch_size_count{algorithm=\"rsa\"} 3");
    fixture.shows("canal_key_batch_size_bucket{algorithm=\"rsa\",le=\"8\"} 3");
}

#[test]
fn rsa_does_not_hold_up_ecdsa() {
    let fixture = PoolFixture::new(1);
    let go = fixture.hold(OperationQueue::Rsa, "alpha", "slow");
    assert_eq!(fixture.started(), "slow");
    fixture.push(OperationQueue::Ecdsa, "alpha", "quick");
    assert_eq!(fixture.wait_for_completion(), "quick");
    go.send(()).unwrap();
    assert_eq!(fixture.wait_for_completion(), "slow");
}

#[test]
fn a_second_worker_has_its_part() {
    let fixture = PoolFixture::new(2);
    let first = fixture.hold(OperationQueue::Ecdsa, "alpha", "one");
    let second = fixture.hold(OperationQueue::Ecdsa, "alpha", "two");
    let mut both = [fixture.started(), fixture.started()];
    both.sort_unstable();
    assert_eq!(both, ["one", "two"]);
    first.send(()).unwrap();
    second.send(()).unwrap();
    fixture.shows("canal_key_operations_queued_total{algorithm=\"ecdsa\"} 0");
}

#[test]
fn a_channel_ends_after_its_queued_frames() {
    let fixture = PoolFixture::new(1);
    let go = fixture.hold(OperationQueue::Ecdsa, "alpha", "first");
    fixture.started();
    fixture.push(OperationQueue::Ecdsa, "alpha", "last");
    go.send(()).unwrap();
    drop(fixture.pool);
    assert_eq!(
        (
            fixture.completions.1.recv().unwrap(),
            fixture.completions.1.recv().unwrap()
        ),
        ("first", "last")
    );
}
