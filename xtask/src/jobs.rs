//! Jobs: each runs as one process. A job is a test program, one module of a suite, a cargo command,
//! or a check of `xtask`. This module decides how much of the machine a job needs and which tests
//! it runs. It runs nothing.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The suite of whole meshes in worlds.
pub(crate) const E2E_SUITE: &str = "e2e";
/// Parts of the machine for a program that uses half a core or less. It waits for certificates to
/// expire, or for loads of a few requests per second. Also for a program that uses one core,
/// because it only computes.
pub(crate) const WAITS: usize = 1;
/// Parts that every other program needs, also one that ran never before.
/// With two parts for each core, one of these runs on each core.
pub(crate) const WORKS: usize = 2;
/// Minimum number of parts of a machine, which otherwise has two for each core and one more. With
/// six on two cores, the worlds' programs stood still for longer than the attempt timeouts of the
/// mesh.
const PARTS_MIN: usize = 5;
/// Parts for each core: one job that takes two ([`WORKS`]) keeps a core busy.
const PARTS_PER_CORE: usize = 2;

/// Programs that mostly wait.
const WAITING: [&str; 5] = [
    "canal-e2e adversary",
    "canal-e2e attacks",
    "canal-e2e external_ca",
    "canal-e2e failure",
    "canal-e2e identity",
];

/// Packages whose programs are pure: they measure no time and open no socket, so they give the same
/// answer in every run.
const PURE: [&str; 9] = [
    "canal-authorization",
    "canal-compiler",
    "canal-differential",
    "canal-h1",
    "canal-ir",
    "canal-model",
    "canal-planner",
    "canal-router",
    "canal-wire",
];

/// Modules of pure packages that open sockets all the same.
const SOCKET_MODULES: [&str; 1] = ["canal-differential running"];

/// Programs that create network namespaces or worlds, or start the programs of the mesh in them. An
/// entry names a whole package, or one program of a package.
const WORLDS: [&str; 16] = [
    "canal admin",
    "canal cli",
    "canal mesh",
    "canal-bench-keys",
    "canal-bench-peers",
    "canal-bench-tier",
    "canal-edge process",
    "canal-edge real_controller",
    "canal-gateway-engine loopback",
    "canal-histories",
    "canal-net",
    "canal-node process",
    "canal-offload",
    "canal-redirector-agent dns",
    "canal-redirector-agent replica",
    "canal-world",
];
/// Packages whose integration-test modules all create namespaces or worlds; their library tests do
/// not.
const WORLD_MODULES: [&str; 2] = ["canal-node-proxy", "canal-e2e"];

/// Kind of output that a job prints. It decides how the verdict is read from the output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum JobOutput {
    /// libtest's counts.
    #[default]
    Tests,
    /// Text that is not parsed: the job is one check.
    Text,
    /// Cargo's JSON messages, which contain the findings of the lints.
    Artifacts,
}

/// One process that runs tests or checks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Job {
    pub(crate) suite: &'static str,
    /// Name of the package, and of the module or program if the package has several.
    pub(crate) name: String,
    /// The program and its arguments, without the names of tests.
    pub(crate) command: Vec<OsString>,
    /// Environment variables that are set in addition to those of this process.
    pub(crate) environment: Vec<(&'static str, OsString)>,
    pub(crate) folder: PathBuf,
    /// The tests of a test program that run; all of them must end.
    pub(crate) tests: Vec<String>,
    /// True if the program has other tests too, so that the names of those that run are its
    /// arguments.
    pub(crate) is_part: bool,
    pub(crate) output: JobOutput,
    /// True if the job runs cargo. Only one such job runs at a time, because the second would wait
    /// for the lock of the first.
    pub(crate) is_cargo: bool,
}

impl Job {
    /// Returns the parts of the machine that the job needs.
    pub(crate) fn parts(&self) -> usize {
        match self.name.as_str() {
            name if self.computes() || WAITING.contains(&name) => WAITS,
            _ => WORKS,
        }
    }

    /// True for a compiler or a pure program, which only compute. One of each kind runs at a time.
    pub(crate) fn computes(&self) -> bool {
        self.is_cargo || self.is_pure()
    }

    fn is_pure(&self) -> bool {
        PURE.contains(&self.package()) && !SOCKET_MODULES.contains(&self.name.as_str())
    }

    fn package(&self) -> &str {
        self.name.split(' ').next().unwrap_or_default()
    }

    /// Returns whether the job creates namespaces or worlds.
    pub(crate) fn needs_worlds(&self) -> bool {
        let is_module = self.name != self.package();
        let is_named = |name: &str| name == self.name || name == self.package();
        self.suite == E2E_SUITE
            || WORLDS.iter().any(|name| is_named(name))
            || is_module && WORLD_MODULES.contains(&self.package())
    }

    /// Returns whether a second run may give another result than the first one. Checks and pure
    /// programs are deterministic, so a second try would hide a defect.
    pub(crate) fn may_retry(&self) -> bool {
        self.output == JobOutput::Tests && !self.is_cargo && !self.is_pure()
    }

    /// Returns the same job with only these of its tests.
    pub(crate) fn only(&self, tests: Vec<String>) -> Self {
        Self {
            is_part: self.is_part || tests.len() != self.tests.len(),
            tests,
            ..self.clone()
        }
    }

    /// Returns the command line of the job.
    pub(crate) fn words(&self) -> Vec<OsString> {
        let mut words = self.command.clone();
        if self.is_part {
            words.push("--exact".into());
            words.extend(self.tests.iter().map(OsString::from));
        }
        words
    }
}

/// Returns the parts of a machine with so many cores.
pub(crate) fn capacity(cores: usize) -> usize {
    (PARTS_PER_CORE * cores + 1).max(PARTS_MIN)
}

/// Returns a job that runs a cargo command.
pub(crate) fn cargo_job(root: &Path, suite: &'static str, name: &str, arguments: &[&str]) -> Job {
    Job {
        suite,
        name: name.to_owned(),
        command: ["cargo"]
            .iter()
            .chain(arguments)
            .map(OsString::from)
            .collect(),
        folder: root.to_owned(),
        output: JobOutput::Text,
        is_cargo: true,
        ..Job::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(suite: &'static str, name: &str) -> Job {
        Job {
            suite,
            name: name.into(),
            command: vec!["program".into()],
            ..Job::default()
        }
    }

    #[test]
    fn an_unknown_job_runs_beside_others() {
        assert_eq!((capacity(1), capacity(2), capacity(8)), (5, 5, 17));
        for (suite, name, parts) in [
            (E2E_SUITE, "canal-e2e new", WORKS),
            ("unit", "new", WORKS),
            (E2E_SUITE, "canal-e2e failure", WAITS),
            (E2E_SUITE, "canal-e2e cases", WORKS),
            ("unit", "canal-model", WAITS),
            ("unit", "canal-planner sessions", WAITS),
        ] {
            assert_eq!(job(suite, name).parts(), parts, "{name}");
        }
    }

    #[test]
    fn names_are_passed_where_not_all_tests_run() {
        let whole = Job {
            tests: vec!["a".into(), "b".into()],
            ..job("unit", "canal-hbone")
        };
        assert_eq!(whole.words(), ["program"]);
        assert_eq!(
            whole.only(vec!["b".into()]).words(),
            ["program", "--exact", "b"]
        );
        assert_eq!(whole.only(whole.tests.clone()).words(), ["program"]);
    }

    #[test]
    fn pure_programs_and_checks_are_never_tried_again() {
        assert!(job("unit", "canal-hbone").may_retry());
        assert!(!job("unit", "canal-compiler golden").may_retry());
        assert!(!cargo_job(Path::new("/"), "unit", "doc tests", &[]).may_retry());
        assert!(
            !Job {
                output: JobOutput::Text,
                ..job("tidy", "tidy")
            }
            .may_retry()
        );
    }

    #[test]
    fn programs_with_worlds_are_known() {
        for (suite, name, expected) in [
            (E2E_SUITE, "canal-e2e new", true),
            ("unit", "canal-world", true),
            ("unit", "canal-world links", true),
            ("unit", "canal-offload sessions", true),
            ("unit", "canal-node-proxy outbound", true),
            ("unit", "canal-node-proxy", false),
            ("unit", "canal admin", true),
            ("unit", "canal explain", false),
            ("unit", "canal-model", false),
        ] {
            assert_eq!(job(suite, name).needs_worlds(), expected, "{name}");
        }
    }
}
