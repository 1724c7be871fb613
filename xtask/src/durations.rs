//! How long each job took the last time, which says in which order jobs begin and when one is ended. It measures nothing.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// Where the seconds of each job stay from run to run.
const FILE: &str = "target/test-durations.json";
/// A job has ten times as long as the last time, within these.
const LIMIT_FACTOR: u32 = 10;
const LIMIT_MIN: Duration = Duration::from_secs(600);
const LIMIT_MAX: Duration = Duration::from_secs(900);
/// Seconds of a job of which nothing is known.
const UNKNOWN: u64 = 5;

/// The build, beside the jobs.
pub(crate) const BUILD: &str = "build";

/// Seconds on two cores, for a machine on which nothing ran yet. What takes less than ten is not listed.
const FIRST: [(&str, u64); 61] = [
    ("run", 1_200),
    (BUILD, 480),
    ("benches", 90),
    ("canal mesh", 13),
    ("canal-authorization guard", 21),
    ("canal-compiler limits", 76),
    ("canal-compiler policy_limits", 12),
    ("canal-compiler properties", 47),
    ("canal-compiler size", 14),
    ("canal-controller-core fleet", 33),
    ("canal-controller-core southbound", 23),
    ("canal-differential generated", 13),
    ("canal-differential guarded", 68),
    ("canal-differential shares", 10),
    ("canal-e2e adversary", 137),
    ("canal-e2e attacks", 300),
    ("canal-e2e cases", 64),
    ("canal-e2e config", 19),
    ("canal-e2e dns", 41),
    ("canal-e2e drain", 25),
    ("canal-e2e edges", 34),
    ("canal-e2e exchanges", 18),
    ("canal-e2e exhaustion", 60),
    ("canal-e2e external_ca", 75),
    ("canal-e2e failure", 125),
    ("canal-e2e icmp", 55),
    ("canal-e2e identity", 140),
    ("canal-e2e keys_at_rest", 89),
    ("canal-e2e keyserver", 31),
    ("canal-e2e mtu", 34),
    ("canal-e2e observe", 15),
    ("canal-e2e policies", 35),
    ("canal-e2e protocols", 254),
    ("canal-e2e proxyless", 33),
    ("canal-e2e scaleout", 61),
    ("canal-e2e sockets", 32),
    ("canal-e2e software", 11),
    ("canal-e2e tier", 82),
    ("canal-e2e underlay", 16),
    ("canal-e2e zerotrust", 71),
    ("canal-edge process", 12),
    ("canal-gateway-engine loopback", 62),
    ("canal-h1 property", 85),
    ("canal-hbone", 20),
    ("canal-histories replay", 18),
    ("canal-identity", 120),
    ("canal-keyserver-engine", 25),
    ("canal-keyserver-engine requests", 23),
    ("canal-node-proxy inbound", 15),
    ("canal-node-proxy outbound", 41),
    ("canal-offload edge_forwarding", 18),
    ("canal-offload pod_guard", 15),
    ("canal-planner placement", 60),
    ("canal-planner sessions", 106),
    ("canal-world", 19),
    ("canal-world links", 18),
    ("canal-world network", 19),
    ("canal-world tier", 19),
    ("doc tests", 60),
    ("lint", 240),
    ("plain", 90),
];

/// Seconds by the names of jobs.
#[derive(Debug, Default)]
pub(crate) struct Durations {
    last: BTreeMap<String, f64>,
}

impl Durations {
    /// Those of the runs before; none if there was none.
    pub(crate) fn read(root: &Path) -> Self {
        let text = std::fs::read_to_string(root.join(FILE)).unwrap_or_default();
        let all: Value = serde_json::from_str(&text).unwrap_or_default();
        let rows = all.as_object().into_iter().flatten();
        Self { last: rows.filter_map(|(name, seconds)| Some((name.clone(), seconds.as_f64()?))).collect() }
    }

    pub(crate) fn record(&mut self, name: &str, took: Duration) {
        self.last.insert(name.to_owned(), (took.as_secs_f64() * 10.0).round() / 10.0);
    }

    pub(crate) fn write(&self, root: &Path) -> anyhow::Result<()> {
        std::fs::write(root.join(FILE), serde_json::to_string_pretty(&self.last)? + "\n")?;
        Ok(())
    }

    /// Returns how long the job took the last time, or is known to take.
    pub(crate) fn expected(&self, name: &str) -> Duration {
        let first = || FIRST.iter().find(|(known, _)| *known == name).map_or(UNKNOWN, |(_, seconds)| *seconds);
        let last = self.last.get(name).and_then(|seconds| Duration::try_from_secs_f64(*seconds).ok());
        last.unwrap_or_else(|| Duration::from_secs(first()))
    }

    /// Returns the time after which the job is ended.
    pub(crate) fn limit(&self, name: &str) -> Duration {
        (self.expected(name) * LIMIT_FACTOR).clamp(LIMIT_MIN, LIMIT_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_has_ten_times_as_long_as_the_last_time_within_bounds() {
        let mut durations = Durations::default();
        for (name, seconds) in [("short", 1), ("middle", 70), ("long", 200)] {
            durations.record(name, Duration::from_secs(seconds));
        }
        for (name, expected) in [("short", 600), ("middle", 700), ("long", 900), ("never seen", 600), ("canal-e2e failure", 900)] {
            assert_eq!(durations.limit(name), Duration::from_secs(expected), "{name}");
        }
        assert_eq!(durations.expected("canal-e2e failure"), Duration::from_secs(125));
        durations.record("canal-e2e failure", Duration::from_millis(9_960));
        assert_eq!(durations.expected("canal-e2e failure"), Duration::from_secs(10), "the last time goes before the table");
    }

    #[test]
    fn durations_are_read_as_they_were_written() {
        let root = std::env::temp_dir().join(format!("canal-xtask-durations-{}", std::process::id()));
        std::fs::create_dir_all(root.join("target")).unwrap();
        let mut durations = Durations::read(&root);
        durations.record("a", Duration::from_millis(1_500));
        durations.write(&root).unwrap();
        assert_eq!(Durations::read(&root).expected("a"), Duration::from_millis(1_500));
        std::fs::remove_dir_all(root).unwrap();
    }
}
