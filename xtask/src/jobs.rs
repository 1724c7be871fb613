//! What runs as one process: a test program, one module of a suite, or a command of cargo's. It says how much of the machine each needs, and runs
//! nothing.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Parts of the machine: for two cores.
pub(crate) const ROOM: usize = 4;
/// Parts that a program needs which mostly waits: for certificates to end, for loads of a few requests a second.
pub(crate) const WAITS: usize = 1;
/// For one that keeps a core busy.
pub(crate) const WORKS: usize = 2;
/// For one that bounds what a fault or a planned change may cost, within a second or to no request: beside one that waits, and no other.
pub(crate) const BOUNDS: usize = 3;
/// For one that takes the whole machine: it floods, does all that can be done in a minute, or looks at who is faster, as h2spec does where it
/// breaks a rule and an answer is under way already.
pub(crate) const ALONE: usize = ROOM;

/// What is known of the jobs, in the order in which they begin: the one that needs the quietest machine first, then those beside which only what
/// waits may run, while there is some; then what cargo checks, then the longest. One that is not known runs alone, at the end.
const KNOWN: [(&str, usize); 92] = [
    ("canal-e2e http2", ALONE),
    ("canal-e2e tier", BOUNDS),
    ("canal-e2e drain", BOUNDS),
    ("canal-e2e throttle", BOUNDS),
    ("canal-e2e keyserver", BOUNDS),
    ("lint", WORKS),
    ("plain", WORKS),
    ("doc tests", WORKS),
    ("canal-e2e failure", WAITS),
    ("canal-e2e attacks", WAITS),
    ("canal-e2e identity", WAITS),
    ("canal-e2e protocols", WORKS),
    ("canal-e2e external_ca", WAITS),
    ("canal-e2e keys_at_rest", WORKS),
    ("canal-e2e proxyless", WORKS),
    ("canal-e2e mtu", WORKS),
    ("canal-e2e zerotrust", WAITS),
    ("canal-e2e policies", WORKS),
    ("canal-e2e adversary", WAITS),
    ("canal-e2e underlay", WORKS),
    ("canal-e2e icmp", WAITS),
    ("canal-e2e dns", WAITS),
    ("canal-e2e", WAITS),
    // Pure programs, which measure no time.
    ("canal-differential guarded", WORKS),
    ("canal-differential generated", WORKS),
    ("canal-differential cases", WORKS),
    ("canal-differential limits", WORKS),
    ("canal-differential shares", WORKS),
    // Its own namespaces, and more patience than any of them needs.
    ("canal-histories replay", WORKS),
    ("canal-histories", WORKS),
    ("canal-compiler properties", WORKS),
    ("canal-compiler golden", WORKS),
    ("canal-compiler limits", WORKS),
    ("canal-compiler policy_limits", WORKS),
    ("canal-compiler tenants", WORKS),
    ("canal-compiler", WORKS),
    ("canal-planner sessions", WORKS),
    ("canal-planner tables", WORKS),
    ("canal-planner", WORKS),
    ("canal-h1 property", WORKS),
    ("canal-h1 table", WORKS),
    ("canal-h1 writing", WORKS),
    ("canal-h1", WORKS),
    ("canal-router reference", WORKS),
    ("canal-router table", WORKS),
    ("canal-router", WORKS),
    ("canal-guard guard", WORKS),
    ("canal-guard", WORKS),
    ("canal-wire", WORKS),
    ("canal-model", WORKS),
    ("xtask", WORKS),
    ("canal-planner placement", WORKS),
    ("canal-compiler size", WORKS),
    // Programs with worlds, namespaces or servers of their own, whose verdicts are counts and answers: two run side by side.
    ("canal-gateway-engine loopback", WORKS),
    ("canal-kit", WORKS),
    ("canal-offload replicas", WORKS),
    ("canal-node-proxy outbound", WORKS),
    ("canal-keys requests", WORKS),
    // Its own memory and files only, which no other program's are among.
    ("canal-keys leaks", WORKS),
    ("canal-world network", WORKS),
    ("canal-offload edge_road", WORKS),
    ("canal-edge process", WORKS),
    ("canal-world tier", WORKS),
    ("canal-node-proxy inbound", WORKS),
    ("canal-world keys", WORKS),
    ("canal-hub fleet", WORKS),
    ("canal-hub southbound", WORKS),
    ("canal-offload redirector", WORKS),
    ("canal-offload tier_road", WORKS),
    ("canal-offload pod_guard", WORKS),
    ("canal-redirector replica", WORKS),
    ("canal-hub trust", WORKS),
    ("canal-sources watch", WORKS),
    ("canal-world", WORKS),
    ("canal-keys", WORKS),
    ("canal mesh", WORKS),
    ("canal-node process", WORKS),
    ("canal-offload nft_guard", WORKS),
    ("canal-world life", WORKS),
    ("canal-hub jwks", WORKS),
    ("canal-keys hostile", WORKS),
    ("canal-store kill", WORKS),
    ("canal-hub", WORKS),
    ("canal-hub files", WORKS),
    ("canal-hub isolation", WORKS),
    ("canal-edge-agent", WORKS),
    ("canal-sources directory", WORKS),
    ("canal-world remains", WORKS),
    ("canal-offload interface_guard", WORKS),
    ("canal-e2e chaos", ALONE),
    ("canal-e2e exhaustion", ALONE),
    ("canal-e2e config", ALONE),
];

/// One process that runs tests or checks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Job {
    pub(crate) suite: &'static str,
    /// The package, and the module or program where the package has several.
    pub(crate) name: String,
    pub(crate) command: Vec<OsString>,
    pub(crate) folder: PathBuf,
    /// Tests that the program lists; all of them must run.
    pub(crate) listed: Option<u64>,
    /// Its output has libtest's counts. A job without is one check.
    pub(crate) counts_tests: bool,
    /// Only one job of cargo's runs at a time, because the second would wait for the first.
    pub(crate) is_cargo: bool,
}

impl Job {
    /// The position in the order in which jobs begin.
    pub(crate) fn position(&self) -> usize {
        KNOWN.iter().position(|(known, _)| *known == self.name).unwrap_or(KNOWN.len())
    }

    /// Parts of the machine that it needs.
    pub(crate) fn parts(&self) -> usize {
        KNOWN.get(self.position()).map_or(ALONE, |(_, parts)| *parts)
    }
}

/// A command of cargo's. Beside programs it runs only when no program wants the core.
pub(crate) fn cargo_job(root: &Path, suite: &'static str, name: &str, arguments: &[&str], beside: bool) -> Job {
    let polite: &[&str] = if beside { &["nice", "-n", "19"] } else { &[] };
    let words = polite.iter().chain(&["cargo"]).chain(arguments);
    Job {
        suite,
        name: name.to_owned(),
        command: words.map(OsString::from).collect(),
        folder: root.to_owned(),
        is_cargo: true,
        ..Job::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_job_runs_alone_and_last() {
        let job = |name: &str| Job { name: name.into(), ..Job::default() };
        assert_eq!((job("canal-e2e http2").parts(), job("canal-e2e http2").position()), (ALONE, 0));
        assert_eq!(job("canal-e2e tier").parts(), BOUNDS);
        assert_eq!((job("new").parts(), job("new").position()), (ALONE, KNOWN.len()));
    }

    #[test]
    fn cargo_leaves_cores_to_programs() {
        let words = |beside| cargo_job(Path::new("/"), "lint", "lint", &["clippy", "--", "-D"], beside).command.join(" ".as_ref());
        assert_eq!(words(true), "nice -n 19 cargo clippy -- -D");
        assert_eq!(words(false), "cargo clippy -- -D");
    }
}
