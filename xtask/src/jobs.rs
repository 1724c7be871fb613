//! What runs as one process: a test program, one module of a suite, a command of cargo's, or a rule of the house. It says how much of the machine
//! each needs, and runs nothing.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The suite of whole meshes in worlds.
pub(crate) const E2E_SUITE: &str = "e2e";
/// Parts of a machine with two cores. With six at once, one run reached a load of 90 and bounds of a second did not hold.
pub(crate) const PARTS_MAX: usize = 4;
/// Parts that a program needs which mostly waits: for certificates to end, for loads of a few requests a second.
pub(crate) const WAITS: usize = 1;
/// For one that works for a third of its time.
pub(crate) const WORKS: usize = 2;
/// For one that bounds what a fault or a planned change may cost, within a second or to no request: beside one of its kind, or some that wait.
pub(crate) const BOUNDS: usize = 3;
/// For one that takes the whole machine: it floods, does all that can be done in a minute, or looks at who is faster, as h2spec does where it
/// breaks a rule and an answer is under way already.
pub(crate) const ALONE: usize = PARTS_MAX;
/// For one that only computes: compilers, and programs that measure no time. It takes no part, because it gets the processors only when no other
/// program wants them.
pub(crate) const COMPUTES: usize = 0;
/// How many of those run at once, beside a command of cargo's.
pub(crate) const COMPUTING_MAX: usize = 1;

/// What is known of the jobs, in the order in which they begin: what cargo does, because it builds others; what needs the quietest machine; then
/// the longest. One that is not known begins last: a mesh alone, any other as one that works.
const KNOWN: &[(&str, usize)] = &[
    ("tests", COMPUTES),
    ("lint", COMPUTES),
    ("plain", COMPUTES),
    ("doc tests", COMPUTES),
    ("tidy", COMPUTES),
    ("canal-e2e http2", ALONE),
    ("canal-e2e cases", ALONE),
    ("canal-e2e config", ALONE),
    ("canal-e2e exhaustion", ALONE),
    ("canal-e2e tier", ALONE),
    ("canal-e2e software", ALONE),
    ("canal-e2e chaos", ALONE),
    ("canal-e2e drain", ALONE),
    ("canal-e2e attacks", WAITS),
    ("canal-e2e failure", WAITS),
    ("canal-e2e identity", WAITS),
    ("canal-e2e scaleout", BOUNDS),
    ("canal-e2e throttle", BOUNDS),
    ("canal-e2e keyserver", BOUNDS),
    ("canal-e2e edges", BOUNDS),
    ("canal-e2e external_ca", WAITS),
    ("canal-e2e exchanges", BOUNDS),
    ("canal-e2e zerotrust", WAITS),
    ("canal-e2e protocols", WORKS),
    ("canal-e2e keys_at_rest", WORKS),
    ("canal-e2e proxyless", WORKS),
    ("canal-e2e direct", WORKS),
    ("canal-e2e mtu", WORKS),
    ("canal-e2e observe", WORKS),
    ("canal-e2e addresses", WORKS),
    ("canal-e2e policies", WORKS),
    ("canal-e2e adversary", WAITS),
    ("canal-e2e underlay", WORKS),
    ("canal-e2e icmp", WAITS),
    ("canal-e2e sockets", WAITS),
    ("canal-e2e dns", WAITS),
    ("canal-e2e", WAITS),
    // The longest of the programs with namespaces or servers of their own, whose verdicts are counts and answers. The others are alike.
    ("canal-gateway-engine loopback", WORKS),
    ("canal-identity", WORKS),
    ("canal-hbone", WORKS),
    ("canal-world links", WORKS),
    ("canal-node-proxy outbound", WORKS),
    ("canal-offload replicas", WORKS),
    // Pure programs, which measure no time.
    ("canal-differential guarded", COMPUTES),
    ("canal-differential generated", COMPUTES),
    ("canal-differential cases", COMPUTES),
    ("canal-differential limits", COMPUTES),
    ("canal-differential shares", COMPUTES),
    ("canal-compiler properties", COMPUTES),
    ("canal-compiler golden", COMPUTES),
    ("canal-compiler limits", COMPUTES),
    ("canal-compiler policy_limits", COMPUTES),
    ("canal-compiler tenants", COMPUTES),
    ("canal-compiler", COMPUTES),
    ("canal-planner sessions", COMPUTES),
    ("canal-planner tables", COMPUTES),
    ("canal-planner", COMPUTES),
    ("canal-h1 property", COMPUTES),
    ("canal-h1 table", COMPUTES),
    ("canal-h1 writing", COMPUTES),
    ("canal-h1", COMPUTES),
    ("canal-router reference", COMPUTES),
    ("canal-router table", COMPUTES),
    ("canal-router", COMPUTES),
    ("canal-authorization guard", COMPUTES),
    ("canal-authorization", COMPUTES),
    ("canal-wire", COMPUTES),
    ("canal-model", COMPUTES),
    ("canal-planner placement", COMPUTES),
    ("canal-compiler size", COMPUTES),
    // They leave remains of worlds behind, which every other world takes away; and one that says how fast a controller is.
    ("canal-world leftovers", ALONE),
    ("canal-world cleanup", ALONE),
    ("canal-controller-core scale", ALONE),
];

/// What a job prints, which says how it is judged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum JobOutput {
    /// libtest's counts.
    #[default]
    Tests,
    /// Nothing that is read: the job is one check.
    Text,
    /// Messages of cargo's, which name test programs and findings of the lints.
    Artifacts,
}

/// One process that runs tests or checks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Job {
    pub(crate) suite: &'static str,
    /// Name of the package, and of the module or program if the package has several.
    pub(crate) name: String,
    pub(crate) command: Vec<OsString>,
    /// Variables of its environment, beside those of this process.
    pub(crate) environment: Vec<(&'static str, OsString)>,
    pub(crate) folder: PathBuf,
    /// Number of tests that the program lists; all of them must run.
    pub(crate) listed: Option<u64>,
    pub(crate) output: JobOutput,
    /// Only one job of cargo's runs at a time, because the second would wait for the first.
    pub(crate) is_cargo: bool,
}

impl Job {
    /// Returns the position in the order in which jobs start.
    pub(crate) fn position(&self) -> usize {
        KNOWN.iter().position(|(known, _)| *known == self.name).unwrap_or(KNOWN.len())
    }

    /// Returns the parts of the machine that the job needs.
    pub(crate) fn parts(&self) -> usize {
        let unknown = if self.suite == E2E_SUITE { ALONE } else { WORKS };
        KNOWN.get(self.position()).map_or(unknown, |(_, parts)| *parts)
    }

    /// It only computes, and leaves the processors to every other program.
    pub(crate) fn computes(&self) -> bool {
        self.parts() == COMPUTES
    }

    /// The words of its command, at the lowest priority where it only computes. A session of its own and the class `idle` are both needed: the
    /// kernel shares processors among sessions first (`autogroup`), and a priority counts within one only. It ends with this process.
    pub(crate) fn words(&self) -> Vec<OsString> {
        const LAST: &str = r#"{ echo 19 >/proc/self/autogroup; } 2>/dev/null; exec nice -n 19 chrt --idle 0 "$@""#;
        let last: &[&str] = if self.computes() { &["setpriv", "--pdeathsig", "TERM", "setsid", "sh", "-c", LAST, "sh"] } else { &[] };
        last.iter().map(OsString::from).chain(self.command.iter().cloned()).collect()
    }
}

/// A command of cargo's.
pub(crate) fn cargo_job(root: &Path, suite: &'static str, name: &str, arguments: &[&str]) -> Job {
    Job {
        suite,
        name: name.to_owned(),
        command: ["cargo"].iter().chain(arguments).map(OsString::from).collect(),
        folder: root.to_owned(),
        output: JobOutput::Text,
        is_cargo: true,
        ..Job::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_mesh_runs_alone_and_last() {
        let job = |suite, name: &str| Job { suite, name: name.into(), ..Job::default() };
        assert_eq!((job(E2E_SUITE, "canal-e2e http2").parts(), job("build", "tests").position()), (ALONE, 0));
        assert_eq!(job(E2E_SUITE, "canal-e2e edges").parts(), BOUNDS);
        assert_eq!((job(E2E_SUITE, "new").parts(), job(E2E_SUITE, "new").position()), (ALONE, KNOWN.len()));
        assert_eq!((job("unit", "new").parts(), job("unit", "new").position()), (WORKS, KNOWN.len()));
    }

    #[test]
    fn what_only_computes_leaves_the_processors_to_others() {
        let words = |name: &str| Job { name: name.into(), command: vec!["program".into()], ..Job::default() }.words();
        assert_eq!(words("canal-e2e tier"), ["program"]);
        let last = words("canal-model");
        assert!(last.len() > 1 && last.iter().any(|word| word.to_string_lossy().contains("chrt --idle 0")), "{last:?}");
        assert_eq!(last.last().unwrap(), "program");
    }
}
