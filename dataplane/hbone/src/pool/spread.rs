//! Spread of one source's streams to one service over connections, and the bucket of the cloud tier
//! that each connection leads to. The code is pure: it opens nothing, and the pool assigns the
//! streams. Start at [`SpreadLoad::target`] and [`Steering::bucket`].

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use canal_model::ids::ServiceId;
use canal_model::program::BUCKETS;
use canal_wire::hbone as wire;
use canal_wire::tier;
use tokio::time::Instant;

/// Time over which the rate of new streams is averaged. A short burst is not a lasting load. Nobody
/// measured this value.
const RATE_WINDOW: Duration = Duration::from_secs(5);
/// Step between buckets, coprime to their number and near its golden section. Any run of positions
/// leads to buckets that are far apart. A run as long as the number of buckets leads to each bucket
/// once.
const STRIDE: u32 = 79;
/// Spreads the first connections of one pod to many services over the buckets. It is 2^32 divided
/// by the golden ratio (Knuth's multiplicative hash).
const SERVICE_FACTOR: u32 = 0x9E37_79B1;
/// Range of the source ports: the default `ip_local_port_range` of Linux.
const PORTS: std::ops::Range<u16> = 32768..61000;

/// Configuration of the spread of streams over connections.
#[derive(Debug, Clone)]
pub struct SpreadConfig {
    /// Connections of one worker, unless all are full.
    pub connections_max: u32,
    /// Number of open streams that justify one connection.
    pub streams_per_connection: u32,
    /// Number of new streams per second that justify one connection.
    pub rate_per_connection: u32,
    /// Age after which a connection takes no new streams. It varies by a fifth, so that a process
    /// does not replace all connections at once.
    pub age: Duration,
    /// Number of streams that a connection carries in its lifetime.
    pub lifetime_streams_max: u32,
    /// Time without a stream after which a connection is closed, except the first one.
    pub idle: Duration,
    /// Index of the worker and number of workers. Together the workers take every position once.
    pub worker: (u32, u32),
}

impl Default for SpreadConfig {
    fn default() -> Self {
        Self {
            connections_max: wire::SPREAD_CONNECTIONS_MAX,
            streams_per_connection: wire::SPREAD_STREAMS_PER_CONNECTION,
            rate_per_connection: wire::SPREAD_RATE_PER_CONNECTION,
            age: Duration::from_secs(wire::SPREAD_AGE_SECONDS),
            lifetime_streams_max: wire::SPREAD_LIFETIME_STREAMS_MAX,
            idle: Duration::from_secs(wire::SPREAD_IDLE_SECONDS),
            worker: (0, 1),
        }
    }
}

impl SpreadConfig {
    /// Returns the age limit of a new connection, from a random number below 1.
    pub(super) fn age_limit(&self, random: f64) -> Duration {
        self.age.mul_f64(0.8 + 0.4 * random)
    }

    /// Returns the worker's own `nth` position among the positions of all workers.
    fn position(&self, nth: u32) -> u32 {
        nth.wrapping_mul(self.worker.1).wrapping_add(self.worker.0)
    }
}

/// Steers connections to one service on the cloud tier. The edge selects the replica by an unkeyed
/// hash (`bpf/abi/tier.h`) over the client's address and port, so the port determines the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steering {
    /// Address of the pod, as the edge sees it.
    pub source: IpAddr,
    pub service: ServiceId,
}

impl Steering {
    /// Returns the bucket of a worker's `nth` connection. Pods with consecutive addresses start at
    /// distant buckets.
    pub fn bucket(&self, config: &SpreadConfig, nth: u32) -> usize {
        let low = match self.source {
            IpAddr::V4(v4) => v4.to_bits(),
            IpAddr::V6(v6) => v6.to_bits() as u32,
        };
        let mixed = low.wrapping_add(self.service.get().wrapping_mul(SERVICE_FACTOR) >> 16);
        let begin = mixed.reverse_bits() >> (u32::BITS - BUCKETS.ilog2());
        begin
            .wrapping_add(config.position(nth))
            .wrapping_mul(STRIDE) as usize
            % BUCKETS
    }

    /// Returns source ports from which a connection to `port` leads to `bucket`, in an order that
    /// begins at `random`.
    pub fn ports(self, bucket: usize, port: u16, random: u16) -> impl Iterator<Item = u16> {
        let begin = random % PORTS.len() as u16;
        let all = (PORTS.start + begin..PORTS.end).chain(PORTS.start..PORTS.start + begin);
        all.filter(move |own| {
            tier::bucket(SocketAddr::new(self.source, *own), port, self.service) == bucket
        })
    }
}

/// Load of one source's streams to one service.
#[derive(Debug, Default)]
pub(super) struct SpreadLoad {
    /// Sum of the streams begun, in which older streams count exponentially less.
    begun: Cell<f64>,
    last: Cell<Option<Instant>>,
}

impl SpreadLoad {
    /// Counts a new stream in the rate.
    pub(super) fn record(&self, now: Instant) {
        let since = self
            .last
            .replace(Some(now))
            .map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        self.begun
            .set(self.begun.get() * (-since.as_secs_f64() / RATE_WINDOW.as_secs_f64()).exp() + 1.0);
    }

    /// Returns the number of connections that the open streams and the rate of new ones justify.
    pub(super) fn target(&self, open: u32, config: &SpreadConfig) -> u32 {
        let rate = self.begun.get() / RATE_WINDOW.as_secs_f64();
        let by_rate = (rate / f64::from(config.rate_per_connection)).ceil() as u32;
        open.div_ceil(config.streams_per_connection)
            .max(by_rate)
            .clamp(1, config.connections_max)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn steering(source: &str, service: u32) -> Steering {
        Steering {
            source: source.parse().unwrap(),
            service: ServiceId::new(service).unwrap(),
        }
    }

    #[test]
    fn the_workers_of_a_node_take_each_bucket_once_before_any_twice() {
        for workers in [1, 2, 3, 4, 16] {
            for (source, service) in [("10.1.0.9", 1), ("10.1.77.200", 4711), ("fd00:1::9", 7)] {
                let mut seen = BTreeSet::new();
                for nth in 0..BUCKETS as u32 / workers {
                    for worker in 0..workers {
                        let config = SpreadConfig {
                            worker: (worker, workers),
                            ..SpreadConfig::default()
                        };
                        seen.insert(steering(source, service).bucket(&config, nth));
                    }
                }
                assert_eq!(
                    seen.len() as u32,
                    BUCKETS as u32 / workers * workers,
                    "{workers} workers of {source}"
                );
            }
        }
    }

    /// The result must hold if the table assigns bucket heads in runs or in turns.
    #[test]
    fn few_connections_reach_most_of_six_replicas() {
        let (runs, turns) = (
            |bucket: usize| bucket * 6 / BUCKETS,
            |bucket: usize| bucket % 6,
        );
        for last in 0..=255 {
            let steering = steering(&format!("10.1.0.{last}"), 7);
            let buckets = || (0..8).map(|nth| steering.bucket(&SpreadConfig::default(), nth));
            let distinct =
                |heads: fn(usize) -> usize| buckets().map(heads).collect::<BTreeSet<_>>().len();
            assert!(
                distinct(runs) >= 5 && distinct(turns) >= 3,
                "{last}: {:?}",
                buckets().collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn pods_with_one_connection_each_are_spread_over_all_buckets() {
        let first =
            |last| steering(&format!("10.1.0.{last}"), 7).bucket(&SpreadConfig::default(), 0);
        assert_eq!((0..128).map(first).collect::<BTreeSet<_>>().len(), BUCKETS);
        let of_services: BTreeSet<_> = (1..64)
            .map(|id| steering("10.1.0.9", id).bucket(&SpreadConfig::default(), 0))
            .collect();
        assert!(of_services.len() > 24, "{}", of_services.len());
    }

    #[test]
    fn every_bucket_has_ports() {
        let steering = steering("10.1.0.9", 7);
        for bucket in 0..BUCKETS {
            let ports: Vec<u16> = steering.ports(bucket, 15008, 65535).take(20).collect();
            assert_eq!(ports.len(), 20);
            let leads = |port: &u16| {
                tier::bucket(
                    SocketAddr::new(steering.source, *port),
                    15008,
                    steering.service,
                )
            };
            assert!(
                ports
                    .iter()
                    .all(|port| PORTS.contains(port) && leads(port) == bucket)
            );
        }
    }

    #[test]
    fn connections_follow_open_streams_and_a_rate_that_lasts() {
        let config = SpreadConfig {
            streams_per_connection: 4,
            rate_per_connection: 5,
            ..SpreadConfig::default()
        };
        let begun = Instant::now();
        let after = |per_second: u32, seconds: u32| {
            let load = SpreadLoad::default();
            (0..per_second * seconds)
                .for_each(|n| load.record(begun + Duration::from_secs(1) * n / per_second));
            load
        };
        for (open, per_second, seconds, want) in [
            (1, 1, 60, 1),
            (4, 0, 1, 1),
            (5, 0, 1, 2),
            (32, 0, 1, 8),
            (1000, 0, 1, 16),
            (1, 24, 60, 5),
            (1, 50, 1, 2),
            (1, 1000, 60, 16),
        ] {
            let load = after(per_second, seconds);
            assert_eq!(
                load.target(open, &config),
                want,
                "{open} open, {per_second}/s for {seconds} s"
            );
        }
        let load = after(24, 60);
        load.record(begun + Duration::from_secs(120));
        assert_eq!(load.target(1, &config), 1, "a rate is forgotten");
    }

    #[test]
    fn ages_differ_by_a_fifth() {
        let config = SpreadConfig::default();
        assert_eq!(
            (
                config.age_limit(0.0).as_secs(),
                config.age_limit(1.0).as_secs()
            ),
            (480, 720)
        );
    }
}
