//! The duration of each job in the last run. It decides the order in which jobs begin and the time
//! limit of each. It measures nothing.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// File with the seconds of each job, kept from run to run.
const FILE: &str = "target/test-durations.json";
/// The time limit of a job is this multiple of its last duration, within the bounds below.
/// Ten leaves room for a machine that others use too.
const LIMIT_FACTOR: u32 = 10;
/// Minimum time limit. A short job that meets a busy machine must not be killed. Nobody measured
/// this value.
const LIMIT_MIN: Duration = Duration::from_secs(600);
/// Maximum time limit, because a job that hangs delays the end of the run.
const LIMIT_MAX: Duration = Duration::from_secs(900);
/// Expected seconds of a job that never ran.
/// Most jobs are shorter than ten seconds. The order of jobs is all that it changes, because the
/// least time limit is far above.
const UNKNOWN: u64 = 5;

/// Key of the build in the table of durations.
pub(crate) const BUILD: &str = "build";

/// Seconds on two cores, for a machine on which no run has ended yet. Jobs below ten seconds are
/// not listed.
const FIRST: [(&str, u64); 58] = [
    ("run", 1_200),
    (BUILD, 420),
    ("benches", 90),
    ("canal-authorization guard", 11),
    ("canal-compiler limits", 29),
    ("canal-compiler properties", 16),
    ("canal-controller-core fleet", 34),
    ("canal-controller-core southbound", 18),
    ("canal-differential guarded", 26),
    ("canal-differential shares", 18),
    ("canal-e2e adversary", 90),
    ("canal-e2e attacks", 202),
    ("canal-e2e cases", 33),
    ("canal-e2e config", 17),
    ("canal-e2e dns", 14),
    ("canal-e2e drain", 19),
    ("canal-e2e edges", 24),
    ("canal-e2e exchanges", 13),
    ("canal-e2e exhaustion", 17),
    ("canal-e2e external_ca", 10),
    ("canal-e2e failure", 121),
    ("canal-e2e icmp", 32),
    ("canal-e2e identity", 87),
    ("canal-e2e keys_at_rest", 66),
    ("canal-e2e keyserver", 17),
    ("canal-e2e mtu", 40),
    ("canal-e2e observe", 16),
    ("canal-e2e policies", 30),
    ("canal-e2e protocols", 157),
    ("canal-e2e proxyless", 26),
    ("canal-e2e scaleout", 13),
    ("canal-e2e sockets", 12),
    ("canal-e2e tier", 92),
    ("canal-e2e underlay", 15),
    ("canal-e2e zerotrust", 20),
    ("canal-edge process", 11),
    ("canal-gateway-engine loopback", 63),
    ("canal-h1 property", 11),
    ("canal-hbone", 17),
    ("canal-identity", 127),
    ("canal-keyserver-engine requests", 22),
    ("canal-node process", 10),
    ("canal-node-proxy inbound", 13),
    ("canal-node-proxy outbound", 38),
    ("canal-offload edge_forwarding", 15),
    ("canal-offload pod_guard", 14),
    ("canal-offload replicas", 21),
    ("canal-offload tier_forwarding", 13),
    ("canal-planner placement", 41),
    ("canal-planner sessions", 75),
    ("canal-runtime", 11),
    ("canal-southbound-client", 20),
    ("canal-world keys", 11),
    ("canal-world links", 19),
    ("canal-world network", 18),
    ("canal-world tier", 14),
    ("lint", 240),
    ("plain", 90),
];

/// Seconds by the names of jobs.
#[derive(Debug, Default)]
pub(crate) struct Durations {
    last: BTreeMap<String, f64>,
}

impl Durations {
    /// Reads the durations of earlier runs. Returns none if there was no run.
    pub(crate) fn read(root: &Path) -> Self {
        let text = std::fs::read_to_string(root.join(FILE)).unwrap_or_default();
        let all: Value = serde_json::from_str(&text).unwrap_or_default();
        let rows = all.as_object().into_iter().flatten();
        Self {
            last: rows
                .filter_map(|(name, seconds)| Some((name.clone(), seconds.as_f64()?)))
                .collect(),
        }
    }

    pub(crate) fn record(&mut self, name: &str, took: Duration) {
        self.last
            .insert(name.to_owned(), (took.as_secs_f64() * 10.0).round() / 10.0);
    }

    pub(crate) fn write(&self, root: &Path) -> anyhow::Result<()> {
        std::fs::write(
            root.join(FILE),
            serde_json::to_string_pretty(&self.last)? + "\n",
        )?;
        Ok(())
    }

    /// Returns the job's duration in the last run, or else its listed duration.
    pub(crate) fn expected(&self, name: &str) -> Duration {
        let first = || {
            FIRST
                .iter()
                .find(|(known, _)| *known == name)
                .map_or(UNKNOWN, |(_, seconds)| *seconds)
        };
        let last = self
            .last
            .get(name)
            .and_then(|seconds| Duration::try_from_secs_f64(*seconds).ok());
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
        for (name, expected) in [
            ("short", 600),
            ("middle", 700),
            ("long", 900),
            ("never seen", 600),
            ("canal-e2e failure", 900),
        ] {
            assert_eq!(
                durations.limit(name),
                Duration::from_secs(expected),
                "{name}"
            );
        }
        assert_eq!(
            durations.expected("canal-e2e failure"),
            Duration::from_secs(121)
        );
        durations.record("canal-e2e failure", Duration::from_millis(9_960));
        assert_eq!(
            durations.expected("canal-e2e failure"),
            Duration::from_secs(10),
            "the last time goes before the table"
        );
    }

    #[test]
    fn durations_are_read_as_they_were_written() {
        let root =
            std::env::temp_dir().join(format!("canal-xtask-durations-{}", std::process::id()));
        std::fs::create_dir_all(root.join("target")).unwrap();
        let mut durations = Durations::read(&root);
        durations.record("a", Duration::from_millis(1_500));
        durations.write(&root).unwrap();
        assert_eq!(
            Durations::read(&root).expected("a"),
            Duration::from_millis(1_500)
        );
        std::fs::remove_dir_all(root).unwrap();
    }
}
