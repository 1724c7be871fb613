//! Tests of the scheduler, on a clock that only the tests' own tasks advance.

use canal_runtime::metrics::{MetricFamily, Registry};
use tokio::runtime::{Builder, LocalOptions};

use std::pin::pin;

use super::*;

thread_local! {
    static PASSED: Cell<Duration> = const { Cell::new(Duration::ZERO) };
}

fn now() -> u64 {
    u64::try_from(PASSED.get().as_nanos()).unwrap_or(u64::MAX)
}

fn micros(n: u64) -> Duration {
    Duration::from_micros(n)
}

/// A scheduler with its tenants, and the order in which their tasks ran.
struct Bench {
    scheduler: Scheduler,
    registry: Registry,
    order: Rc<RefCell<Vec<&'static str>>>,
}

impl Bench {
    /// Runs `test` on a new worker runtime.
    fn run<R: Future<Output = ()>>(test: impl FnOnce(Rc<Self>) -> R) {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build_local(LocalOptions::default())
            .unwrap();
        runtime.block_on(async {
            let bench = Self {
                scheduler: Scheduler::with_clock(now),
                registry: Registry::new(),
                order: Rc::default(),
            };
            tokio::task::spawn_local(bench.scheduler.clone().rounds());
            test(Rc::new(bench)).await;
        });
    }

    fn tenant(&self, name: &'static str, weight: u64) -> Rc<TenantQueue> {
        let cpu =
            self.registry
                .seconds(MetricFamily::new("cpu_seconds_total", "CPU.", &["tenant"]));
        let mut shares = Shares::default();
        shares.set(ShareKind::GatewayCpu, Share::Amount(weight));
        self.scheduler
            .queue(&shares, self.registry.shard().counter(&cpu, &[name]))
    }

    /// Spawns a task that becomes ready again immediately, `turns` times, and works for `each` in
    /// every turn.
    fn busy(
        self: &Rc<Self>,
        tenant: &Rc<TenantQueue>,
        name: &'static str,
        each: Duration,
        turns: usize,
    ) -> tokio::task::JoinHandle<()> {
        let (tenant, bench) = (tenant.clone(), self.clone());
        tokio::task::spawn_local(async move {
            let mut left = turns;
            let work = std::future::poll_fn(|cx| {
                PASSED.set(PASSED.get() + each);
                bench.order.borrow_mut().push(name);
                left -= 1;
                if left == 0 {
                    return Poll::Ready(());
                }
                cx.waker().wake_by_ref();
                Poll::Pending
            });
            Scheduler::run(&tenant, pin!(work)).await;
        })
    }

    /// Returns how often each of `names` is among the first `turns`.
    fn counts<const N: usize>(&self, turns: usize, names: [&str; N]) -> [usize; N] {
        let order = self.order.borrow();
        assert!(order.len() >= turns, "{} turns", order.len());
        names.map(|name| order[..turns].iter().filter(|n| **n == name).count())
    }
}

#[test]
fn credit_pays_debts_first_and_is_not_saved() {
    for (credit, quantum, rounds, after) in [
        (0, 500, 1, 500),
        (400, 500, 1, 500),
        (-200, 500, 1, 300),
        (-1200, 500, 2, -200),
        (500, 500, 1000, 500),
        (i64::MIN, 500, 1, i64::MIN + 500),
    ] {
        assert_eq!(
            decide_credit(credit, quantum, rounds),
            after,
            "{credit} {quantum} {rounds}"
        );
    }
    for (credit, quantum, rounds) in [
        (0, 500, 1),
        (-499, 500, 1),
        (-500, 500, 2),
        (-10_000, 500, 21),
    ] {
        assert_eq!(decide_wait(credit, quantum), rounds, "{credit}");
        assert!(
            decide_credit(credit, quantum, rounds) > 0
                && decide_credit(credit, quantum, rounds - 1) <= 0
        );
    }
}

#[test]
fn weights_are_bounded_and_default_to_one_quantum() {
    let of = |share| {
        let mut shares = Shares::default();
        shares.set(ShareKind::GatewayCpu, share);
        quantum_of(&shares)
    };
    assert_eq!(quantum_of(&Shares::default()), 500_000);
    assert_eq!(of(Share::Amount(200)), 1_000_000);
    assert_eq!(of(Share::Percent(50)), 250_000);
    assert_eq!(of(Share::Amount(u64::MAX)), of(Share::Amount(WEIGHT_MAX)));
    assert!(of(Share::Amount(1)) > 0);
}

#[test]
fn time_is_divided_by_weight_and_not_by_number_of_tasks() {
    Bench::run(|bench| async move {
        let (many, few, heavy) = (
            bench.tenant("many", 100),
            bench.tenant("few", 100),
            bench.tenant("heavy", 200),
        );
        let mut tasks: Vec<_> = (0..50)
            .map(|_| bench.busy(&many, "many", micros(50), 200))
            .collect();
        tasks.push(bench.busy(&few, "few", micros(50), 1_000));
        tasks.extend((0..2).map(|_| bench.busy(&heavy, "heavy", micros(50), 1_000)));
        for task in tasks {
            task.await.unwrap();
        }
        let [many, few, heavy] = bench.counts(2_000, ["many", "few", "heavy"]);
        // The shares are a quarter, a quarter and a half, in quanta of ten turns each.
        assert!(
            (450..=550).contains(&many)
                && (450..=550).contains(&few)
                && (930..=1_070).contains(&heavy),
            "{many} {few} {heavy}"
        );
    });
}

#[test]
fn a_light_tenant_waits_for_at_most_one_quantum_of_each_other_tenant() {
    Bench::run(|bench| async move {
        let (greedy, modest) = (bench.tenant("greedy", 100), bench.tenant("modest", 100));
        let tasks: Vec<_> = (0..500)
            .map(|_| bench.busy(&greedy, "greedy", micros(20), 20))
            .collect();
        tokio::task::yield_now().await;
        let mut worst = Duration::ZERO;
        for _ in 0..50 {
            let asked = PASSED.get();
            bench.busy(&modest, "modest", micros(10), 1).await.unwrap();
            worst = worst.max(PASSED.get() - asked);
        }
        // The wait is one quantum, the turn that exceeds it, and its own work. Without turns it
        // would be 500 × 20 µs.
        assert!(worst <= 2 * QUANTUM + micros(100), "{worst:?}");
        for task in tasks {
            task.await.unwrap();
        }
    });
}

#[test]
fn worker_is_never_idle_while_a_tenant_in_debt_is_ready() {
    Bench::run(|bench| async move {
        // Equal weights, so that only the debt decides.
        let (alone, other) = (bench.tenant("alone", 100), bench.tenant("other", 100));
        // A single turn of 3 s costs 6,000 quanta.
        bench
            .busy(&alone, "alone", Duration::from_secs(3), 1)
            .await
            .unwrap();
        let before = bench.scheduler.inner.round.get();
        let passes = Cell::new(0);
        let task = bench.busy(&alone, "alone", micros(100), 1);
        let counted = async {
            while !task.is_finished() {
                passes.set(passes.get() + 1);
                tokio::task::yield_now().await;
            }
        };
        counted.await;
        assert!(
            bench.scheduler.inner.round.get() - before >= 6_000,
            "the debt is written off in rounds"
        );
        // It would be 6,000 passes if each round waited for one.
        assert!(
            passes.get() < 10,
            "it waited for {} passes though nobody else was ready",
            passes.get()
        );
        // If another tenant is ready, the debt is paid in that tenant's time.
        bench.order.borrow_mut().clear();
        bench
            // Twenty rounds of debt.
            .busy(&alone, "alone", Duration::from_millis(10), 1)
            .await
            .unwrap();
        let tasks = [
            bench.busy(&alone, "alone", micros(100), 1),
            // The other tenant has 20 ms of work, twice what the debt costs.
            bench.busy(&other, "other", micros(100), 200),
        ];
        for task in tasks {
            task.await.unwrap();
        }
        let order = bench.order.borrow();
        let at = order.iter().rposition(|name| *name == "alone").unwrap();
        assert!(
            // A quantum is 500 µs, so these are 100 turns, give or take the quanta at both ends.
            (80..=130).contains(&at),
            "10 ms are 20 quanta, in which the other ran {at} times 100 µs"
        );
    });
}

#[test]
fn tasks_of_a_tenant_run_in_the_order_in_which_they_became_ready() {
    Bench::run(|bench| async move {
        let tenant = bench.tenant("t", 100);
        let names = ["a", "b", "c", "d"];
        let tasks: Vec<_> = names
            .iter()
            .map(|name| bench.busy(&tenant, name, micros(600), 25))
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        let order = bench.order.borrow();
        assert_eq!(order.len(), 100, "every turn was had");
        assert!(order.chunks(4).all(|turn| turn == names), "{order:?}");
    });
}

#[test]
fn tasks_that_end_while_waiting_block_no_other() {
    Bench::run(|bench| async move {
        let tenant = bench.tenant("t", 100);
        bench.busy(&tenant, "first", micros(600), 1).await.unwrap();
        let waiting: Vec<_> = (0..10)
            .map(|_| bench.busy(&tenant, "cut", micros(10), 1))
            .collect();
        let last = bench.busy(&tenant, "last", micros(10), 1);
        // After one pass all of them are parked, or one has been granted a turn.
        tokio::task::yield_now().await;
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
        tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), last)
            .await
            .expect("its turn comes")
            .unwrap();
        assert!(tenant.parked.borrow().is_empty());
    });
}

#[test]
fn time_is_counted_for_the_tenant_that_used_it() {
    Bench::run(|bench| async move {
        let (a, b) = (bench.tenant("a", 100), bench.tenant("b", 100));
        let tasks = [
            bench.busy(&a, "a", Duration::from_millis(5), 100),
            bench.busy(&b, "b", Duration::from_millis(1), 250),
        ];
        for task in tasks {
            task.await.unwrap();
        }
        let text = bench.registry.render();
        for line in [
            "cpu_seconds_total{tenant=\"a\"} 0.5",
            "cpu_seconds_total{tenant=\"b\"} 0.25",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
    });
}
