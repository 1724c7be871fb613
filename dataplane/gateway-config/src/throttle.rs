//! Throttles of requests: this replica's part of a limit, and the check of one request against it.
//! The check is GCRA in the virtual scheduling form of ITU-T I.371.
//!
//! It reads no clock. Start with [`RequestThrottle::admit`].

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use canal_model::ids::ReplicaNumber;
use canal_model::program::{BUCKETS, BucketTable, RateLimit};

/// Part of a bucket's limit for replicas that are in the bucket's chain but not its head. They
/// serve sessions that they still own. A tenth is divided among all of them, so that these sessions
/// continue and the total stays within 1.1 times the limit.
const FOLLOWERS_PART: f64 = 0.1;
/// Part of a limit for a replica that the bucket tables do not contain, or not yet. It is above
/// zero so that the interval between two requests stays finite. A hundred such replicas add a tenth
/// of the limit.
const PART_MIN: f64 = 0.001;
const SECOND: f64 = 1e9;

/// One throttle as this process enforces it. All workers share it, so that it is exact however
/// connections are distributed among them. Only requests of the tenant or service that it limits
/// access it.
#[derive(Debug, Default)]
pub struct RequestThrottle {
    /// Nanoseconds from one request to the next; 0 means no limit.
    interval: AtomicU64,
    /// Nanoseconds that a request may be early.
    tolerance: AtomicU64,
    /// Time at which the next request is due, in nanoseconds since the process started.
    next: AtomicU64,
}

/// Returns the time at which the next request is due, if a request at `now` may pass.
fn decide(next: u64, now: u64, interval: u64, tolerance: u64) -> Option<u64> {
    let due = next.max(now);
    (due - now <= tolerance).then(|| due.saturating_add(interval))
}

/// Returns the interval and the tolerance for a part of a rate, in nanoseconds.
fn decide_times(rate: RateLimit, part: f64) -> (u64, u64) {
    if rate.per_second == 0 {
        return (0, 0);
    }
    let interval = SECOND / (f64::from(rate.per_second) * part.clamp(PART_MIN, 1.0));
    // A part of the burst takes as long as the entire burst would. At least one request may be
    // early, because otherwise jitter would cost throughput.
    let burst = f64::from(rate.burst) / f64::from(rate.per_second) * SECOND;
    (interval as u64, (burst - interval).max(interval) as u64)
}

/// Admits a request if it is within all of `throttles`. Otherwise it counts against none of them.
pub fn admit_all<'a>(
    throttles: impl IntoIterator<Item = &'a RequestThrottle> + Clone,
    now: u64,
) -> bool {
    throttles
        .clone()
        .into_iter()
        .all(|throttle| throttle.has_room(now))
        && throttles.into_iter().all(|throttle| throttle.admit(now))
}

/// Returns the part of a service's sessions in one AZ that `own` serves.
pub(crate) fn decide_part(table: &BucketTable, own: ReplicaNumber) -> f64 {
    let part = |chain: &Vec<ReplicaNumber>| match chain.iter().position(|n| *n == own) {
        None => 0.0,
        Some(0) => 1.0,
        Some(_) => FOLLOWERS_PART / (chain.len() - 1) as f64,
    };
    table.chains.iter().map(part).sum::<f64>() / BUCKETS as f64
}

impl RequestThrottle {
    /// Sets the limit and this replica's part of it. Requests that were already admitted still
    /// count.
    pub fn set(&self, rate: RateLimit, part: f64) {
        let (interval, tolerance) = decide_times(rate, part);
        self.interval.store(interval, Relaxed);
        self.tolerance.store(tolerance, Relaxed);
    }

    /// True if a request may pass at `now`, in nanoseconds since the process started. Does not
    /// count it.
    pub fn has_room(&self, now: u64) -> bool {
        let interval = self.interval.load(Relaxed);
        interval == 0
            || decide(
                self.next.load(Relaxed),
                now,
                interval,
                self.tolerance.load(Relaxed),
            )
            .is_some()
    }

    /// Admits a request at `now`, in nanoseconds since the process started, and counts it; false if
    /// it exceeds the limit.
    pub fn admit(&self, now: u64) -> bool {
        let interval = self.interval.load(Relaxed);
        if interval == 0 {
            return true;
        }
        let tolerance = self.tolerance.load(Relaxed);
        self.next
            .try_update(Relaxed, Relaxed, |next| {
                decide(next, now, interval, tolerance)
            })
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use canal_model::ids::{ServiceId, Vni};

    use super::*;

    const MILLISECOND: u64 = 1_000_000;

    /// Returns how many requests pass if one arrives every `gap` nanoseconds for ten seconds.
    fn passed(throttle: &RequestThrottle, gap: u64) -> u64 {
        (0..10_000 * MILLISECOND / gap)
            .filter(|n| throttle.admit(n * gap))
            .count() as u64
    }

    #[test]
    fn admitted_requests_are_the_limit_and_one_burst() {
        for (per_second, burst, part) in [
            (100, 100, 1.0),
            (1000, 1, 1.0),
            (1000, 100, 0.25),
            (50, 200, 0.5),
            (7, 7, 1.0),
        ] {
            let throttle = RequestThrottle::default();
            throttle.set(RateLimit { per_second, burst }, part);
            let limit = 10.0 * f64::from(per_second) * part;
            let burst = (f64::from(burst) * part).max(2.0);
            let passed = passed(&throttle, 100_000) as f64;
            assert!(
                passed >= 0.99 * limit && passed <= limit + burst + 1.0,
                "{passed} of {limit} and {burst}"
            );
        }
    }

    /// A tenant's limit that refuses most requests must not use up the limit of the service to
    /// which they go.
    #[test]
    fn a_refusal_by_one_throttle_uses_no_token_of_another() {
        let [service, tenant] = [RequestThrottle::default(), RequestThrottle::default()];
        service.set(
            RateLimit {
                per_second: 100,
                burst: 1,
            },
            1.0,
        );
        tenant.set(
            RateLimit {
                per_second: 50,
                burst: 1,
            },
            1.0,
        );
        let both = [&service, &tenant];
        let (mut others, mut refused) = (0, 0);
        for n in 0..10_000 {
            let now = n * MILLISECOND;
            refused += u64::from(!admit_all(both, now));
            // Every 20 ms the service's own limit admits a request that the tenant's limit does not
            // cover.
            others += u64::from(n % 20 == 10 && service.admit(now));
        }
        assert!(
            refused > 9_000 && others >= 450,
            "{refused} refused, {others} of 500 others passed"
        );
    }

    #[test]
    fn below_the_limit_everything_passes() {
        let throttle = RequestThrottle::default();
        throttle.set(
            RateLimit {
                per_second: 100,
                burst: 10,
            },
            1.0,
        );
        assert_eq!(passed(&throttle, 11 * MILLISECOND), 10_000 / 11);
        throttle.set(RateLimit::default(), 1.0);
        assert_eq!(passed(&throttle, MILLISECOND), 10_000, "0 is no limit");
    }

    fn table(chains: impl IntoIterator<Item = Vec<u16>>) -> BucketTable {
        let number = |n: u16| ReplicaNumber::new(n.into()).unwrap();
        BucketTable {
            service: "alpha/default/web".parse().unwrap(),
            id: ServiceId::new(7).unwrap(),
            az: "az1".parse().unwrap(),
            vni: Vni::new(1).unwrap(),
            version: 1,
            chains: chains
                .into_iter()
                .map(|chain| chain.into_iter().map(number).collect())
                .collect(),
        }
    }

    #[test]
    fn parts_of_all_replicas_are_the_whole_within_a_tenth() {
        let even = table((0..BUCKETS as u16).map(|bucket| vec![1 + bucket % 4]));
        let moving =
            table((0..BUCKETS as u16).map(|bucket| vec![1 + bucket % 4, 1 + (bucket + 1) % 4, 5]));
        let of = |table: &BucketTable, n| decide_part(table, ReplicaNumber::new(n).unwrap());
        for n in 1..=4 {
            assert!((of(&even, n) - 0.25).abs() < 1e-9);
        }
        assert_eq!(of(&even, 5), 0.0);
        let whole: f64 = (1..=5).map(|n| of(&moving, n)).sum();
        assert!((1.0..=1.1 + 1e-9).contains(&whole), "{whole}");
        assert!(
            of(&moving, 5) > 0.0,
            "a replica whose buckets have moved away serves its open sessions"
        );
    }

    #[test]
    fn threads_together_admit_as_much_as_one() {
        let throttle = RequestThrottle::default();
        throttle.set(
            RateLimit {
                per_second: 1000,
                burst: 100,
            },
            1.0,
        );
        for threads in [1, 2, 4] {
            let passed: usize = std::thread::scope(|scope| {
                let each = || {
                    (0..10_000)
                        .filter(|_| throttle.admit(threads * 3600 * 1_000_000_000))
                        .count()
                };
                let all: Vec<_> = (0..threads).map(|_| scope.spawn(each)).collect();
                all.into_iter().map(|thread| thread.join().unwrap()).sum()
            });
            assert_eq!(
                passed, 100,
                "{threads} threads at one instant share one burst"
            );
        }
    }
}
