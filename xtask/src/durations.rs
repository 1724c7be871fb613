//! How long each job took the last time, which says in which order jobs begin and when one is ended. It measures nothing.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// Where the seconds of each job stay from run to run.
const FILE: &str = "target/test-durations.json";
/// A job has ten times as long as the last time, within these.
const LIMIT_FACTOR: u32 = 10;
const LIMIT_MIN: Duration = Duration::from_secs(300);
const LIMIT_MAX: Duration = Duration::from_secs(900);
/// Seconds of a job of which nothing is known.
const UNKNOWN: u64 = 5;

/// The build, beside the jobs.
pub(crate) const BUILD: &str = "build";

/// Seconds on two cores, for a machine on which nothing ran yet. What takes less than ten is not listed.
const FIRST: [(&str, u64); 49] = [
    ("run", 1_200),
    (BUILD, 480),
    ("doc tests", 90),
    ("plain", 90),
    ("lint", 240),
    ("benches", 90),
    ("canal-e2e addresses", 30),
    ("canal-e2e adversary", 90),
    ("canal-e2e attacks", 150),
    ("canal-e2e cases", 60),
    ("canal-e2e config", 40),
    ("canal-e2e direct", 40),
    ("canal-e2e dns", 24),
    ("canal-e2e edges", 90),
    ("canal-e2e exchanges", 80),
    ("canal-e2e external_ca", 60),
    ("canal-e2e failure", 125),
    ("canal-e2e icmp", 37),
    ("canal-e2e identity", 90),
    ("canal-e2e keys_at_rest", 78),
    ("canal-e2e keyserver", 80),
    ("canal-e2e mtu", 40),
    ("canal-e2e observe", 30),
    ("canal-e2e policies", 25),
    ("canal-e2e protocols", 120),
    ("canal-e2e proxyless", 29),
    ("canal-e2e scaleout", 130),
    ("canal-e2e sockets", 20),
    ("canal-e2e software", 170),
    ("canal-e2e tier", 60),
    ("canal-e2e underlay", 27),
    ("canal-e2e zerotrust", 27),
    ("canal-compiler size", 10),
    ("canal-edge process", 15),
    ("canal-gateway-engine loopback", 70),
    ("canal-hbone", 30),
    ("canal-identity", 50),
    ("canal-keyserver-engine", 23),
    ("canal-keyserver-engine requests", 19),
    ("canal-node-proxy inbound", 14),
    ("canal-node-proxy outbound", 25),
    ("canal-offload edge_forwarding", 15),
    ("canal-offload pod_guard", 13),
    ("canal-planner placement", 40),
    ("canal-planner sessions", 30),
    ("canal-world", 13),
    ("canal-world links", 40),
    ("canal-world network", 18),
    ("canal-world tier", 13),
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
        for (name, seconds) in [("short", 1), ("middle", 50), ("long", 200)] {
            durations.record(name, Duration::from_secs(seconds));
        }
        for (name, expected) in [("short", 300), ("middle", 500), ("long", 900), ("never seen", 300), ("canal-e2e failure", 900)] {
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
