//! When work starts, what is gathered, and that no queue or tenant waits for another.

use std::sync::mpsc;

use super::*;

/// Work that tells of its start and waits to be let go.
struct Step {
    name: &'static str,
    started: mpsc::Sender<&'static str>,
    go: Option<mpsc::Receiver<()>>,
    done: mpsc::Sender<&'static str>,
}

impl Work for Step {
    type Answer = ();
    fn work(&mut self) {
        self.started.send(self.name).unwrap();
        if let Some(go) = &self.go {
            go.recv().unwrap();
        }
    }
    fn answer(self, (): ()) {
        self.done.send(self.name).unwrap();
    }
}

struct Rig {
    registry: Registry,
    lanes: Lanes<Step>,
    started: (mpsc::Sender<&'static str>, mpsc::Receiver<&'static str>),
    done: (mpsc::Sender<&'static str>, mpsc::Receiver<&'static str>),
}

const SOON: Duration = Duration::from_secs(10);

impl Rig {
    fn new(workers: usize) -> Self {
        let registry = Registry::new();
        let lanes = Lanes::start(LaneConfig { workers, linger: Duration::ZERO }, &registry).unwrap();
        Self { registry, lanes, started: mpsc::channel(), done: mpsc::channel() }
    }
    fn push(&self, lane: Lane, tenant: &str, name: &'static str) {
        self.push_with(lane, tenant, name, None);
    }
    /// Held until something is sent.
    fn hold(&self, lane: Lane, tenant: &str, name: &'static str) -> mpsc::Sender<()> {
        let (go, wait) = mpsc::channel();
        self.push_with(lane, tenant, name, Some(wait));
        go
    }
    fn push_with(&self, lane: Lane, tenant: &str, name: &'static str, go: Option<mpsc::Receiver<()>>) {
        let work = Step { name, started: self.started.0.clone(), go, done: self.done.0.clone() };
        self.lanes.push(lane, &tenant.parse().unwrap(), work);
    }
    fn started(&self) -> &'static str {
        self.started.1.recv_timeout(SOON).unwrap()
    }
    fn done(&self) -> &'static str {
        self.done.1.recv_timeout(SOON).unwrap()
    }
    fn shows(&self, line: &str) {
        let text = self.registry.render();
        assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
    }
}

#[test]
fn one_at_a_time_never_waits() {
    let rig = Rig::new(1);
    for _ in 0..500 {
        rig.push(Lane::Ecdsa, "alpha", "x");
        rig.done();
    }
    rig.shows("canal_key_batch_waited_total{algorithm=\"ecdsa\"} 0");
    rig.shows("canal_key_batch_size_bucket{algorithm=\"ecdsa\",le=\"1\"} 500");
    rig.shows("canal_key_batch_wait_seconds_sum{algorithm=\"ecdsa\"} 0");
}

#[test]
fn what_comes_meanwhile_goes_together_and_tenants_take_turns() {
    let rig = Rig::new(1);
    let go = rig.hold(Lane::Ecdsa, "loud", "first");
    assert_eq!(rig.started(), "first");
    for name in ["a", "b", "c"] {
        rig.push(Lane::Ecdsa, "loud", name);
    }
    rig.push(Lane::Ecdsa, "quiet", "q");
    go.send(()).unwrap();
    let order: Vec<_> = (0..5).map(|_| rig.done()).collect();
    assert_eq!(order, ["first", "a", "q", "b", "c"]);
    rig.shows("canal_key_batch_waited_total{algorithm=\"ecdsa\"} 4");
    rig.shows("canal_key_batch_size_sum{algorithm=\"ecdsa\"} 5");
    rig.shows("canal_key_batch_size_count{algorithm=\"ecdsa\"} 2");
}

#[test]
fn short_operations_of_a_batch_are_answered_together() {
    let rig = Rig::new(1);
    let go = rig.hold(Lane::Ecdsa, "alpha", "first");
    rig.started();
    let second = rig.hold(Lane::Ecdsa, "alpha", "second");
    let third = rig.hold(Lane::Ecdsa, "alpha", "third");
    go.send(()).unwrap();
    assert_eq!((rig.done(), rig.started()), ("first", "second"), "alone it was answered at once");
    second.send(()).unwrap();
    assert_eq!(rig.started(), "third");
    assert!(rig.done.1.try_recv().is_err(), "the second's answer waits for the third's");
    third.send(()).unwrap();
    assert_eq!((rig.done(), rig.done()), ("second", "third"));
}

#[test]
fn a_long_line_is_taken_in_parts() {
    let rig = Rig::new(1);
    let go = rig.hold(Lane::Rsa, "alpha", "first");
    rig.started();
    for _ in 0..2 * RSA_BATCH_MAX {
        rig.push(Lane::Rsa, "alpha", "x");
    }
    assert_eq!(rig.lanes.depth(Lane::Rsa), 2 * RSA_BATCH_MAX + 1);
    go.send(()).unwrap();
    (0..=2 * RSA_BATCH_MAX).for_each(|_| assert!(!rig.done().is_empty()));
    rig.shows("canal_key_batch_size_count{algorithm=\"rsa\"} 3");
    rig.shows("canal_key_batch_size_bucket{algorithm=\"rsa\",le=\"8\"} 3");
}

#[test]
fn rsa_does_not_hold_up_ecdsa() {
    let rig = Rig::new(1);
    let go = rig.hold(Lane::Rsa, "alpha", "slow");
    assert_eq!(rig.started(), "slow");
    rig.push(Lane::Ecdsa, "alpha", "quick");
    assert_eq!(rig.done(), "quick");
    go.send(()).unwrap();
    assert_eq!(rig.done(), "slow");
}

#[test]
fn a_second_worker_has_its_part() {
    let rig = Rig::new(2);
    let first = rig.hold(Lane::Ecdsa, "alpha", "one");
    let second = rig.hold(Lane::Ecdsa, "alpha", "two");
    let mut both = [rig.started(), rig.started()];
    both.sort_unstable();
    assert_eq!(both, ["one", "two"]);
    first.send(()).unwrap();
    second.send(()).unwrap();
    rig.shows("canal_key_batch_waited_total{algorithm=\"ecdsa\"} 0");
}

#[test]
fn the_end_comes_after_what_was_queued() {
    let rig = Rig::new(1);
    let go = rig.hold(Lane::Ecdsa, "alpha", "first");
    rig.started();
    rig.push(Lane::Ecdsa, "alpha", "last");
    go.send(()).unwrap();
    drop(rig.lanes);
    assert_eq!((rig.done.1.recv().unwrap(), rig.done.1.recv().unwrap()), ("first", "last"));
}
