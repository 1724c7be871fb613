//! The test programs of the workspace. Reads cargo's messages about them, lists their tests, and
//! makes a job of each program and of each module of a `suite`. It runs no test.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use serde_json::Value;

use crate::jobs::{E2E_SUITE, Job};
use crate::tree::SourceTree;

/// Package with the programs of the suite `e2e`.
const E2E: &str = "tests/e2e";
/// Names of integration-test programs that consist of modules. Each module runs as a process of its
/// own, so that modules share no memory, files, worlds and limits. The program of [`E2E`] has
/// another name, so that it can be built alone.
const SUITES: [&str; 2] = ["suite", "meshes"];
/// Programs whose tests mostly wait, so that more of them run at once than the machine has
/// processors.
const WAITING: [&str; 3] = [
    "canal-gateway-engine loopback",
    "canal-identity",
    "canal-hbone",
];
const WAITING_THREADS: &str = "--test-threads=6";
/// Environment variable that makes cargo compile with clippy's compiler driver, so that lints need
/// no second compilation. The findings are warnings in cargo's messages.
pub(crate) const LINTED: (&str, &str) = ("RUSTC_WORKSPACE_WRAPPER", "clippy-driver");

/// A test program that cargo built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TestProgram {
    folder: PathBuf,
    target: String,
    is_library: bool,
    path: PathBuf,
}

/// Content of one line of cargo's output
/// (<https://doc.rust-lang.org/cargo/reference/external-tools.html#json-messages>).
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CargoMessage {
    Built(TestProgram),
    /// A warning or an error, as the compiler shows it.
    Finding {
        text: String,
        is_error: bool,
    },
    /// A message of a kind that is not used here.
    Other,
    /// Text that is not JSON.
    Words,
}

pub(crate) fn read_message(line: &str) -> CargoMessage {
    let Some(message) = line
        .starts_with('{')
        .then(|| serde_json::from_str::<Value>(line).ok())
        .flatten()
    else {
        return CargoMessage::Words;
    };
    let found = &message["message"];
    // The compiler's summary, "3 warnings emitted", has no position. An error of the linker has
    // none either.
    let has_place = found["spans"]
        .as_array()
        .is_some_and(|spans| !spans.is_empty());
    match (message["reason"].as_str(), found["level"].as_str()) {
        (Some("compiler-message"), Some(level))
            if level == "error" || level == "warning" && has_place =>
        {
            let text = found["rendered"]
                .as_str()
                .unwrap_or_default()
                .trim_end()
                .to_owned();
            CargoMessage::Finding {
                text,
                is_error: level == "error",
            }
        }
        (Some("compiler-artifact"), _) => {
            program(&message).map_or(CargoMessage::Other, CargoMessage::Built)
        }
        _ => CargoMessage::Other,
    }
}

/// Returns the test program that a message names; `None` for a benchmark that is built with the
/// tests.
fn program(message: &Value) -> Option<TestProgram> {
    let path = message["executable"]
        .as_str()
        .filter(|_| message["profile"]["test"] == true)?
        .into();
    let folder = Path::new(message["manifest_path"].as_str()?)
        .parent()?
        .to_owned();
    let has_kind = |wanted: &str| {
        message["target"]["kind"]
            .as_array()
            .is_some_and(|kinds| kinds.iter().any(|kind| kind == wanted))
    };
    let target = message["target"]["name"].as_str()?.to_owned();
    (!has_kind("bench")).then_some(TestProgram {
        folder,
        target,
        is_library: has_kind("lib"),
        path,
    })
}

/// Returns the jobs of all programs: one for each program, or for each module of a suite that has
/// tests. Cargo reports a program twice if two of its units need it.
pub(crate) fn jobs(root: &Path, programs: &[TestProgram]) -> anyhow::Result<Vec<Job>> {
    let mut jobs: BTreeMap<String, Job> = BTreeMap::new();
    for program in programs {
        let package = package_name(&program.folder)?;
        for job in decide_jobs(
            program,
            &package,
            &list(program)?,
            program.folder == root.join(E2E),
        ) {
            let (name, command) = (job.name.clone(), job.command.clone());
            if let Some(other) = jobs.insert(name, job) {
                anyhow::ensure!(
                    other.command == command,
                    "two test programs are named `{}`: rename one of their targets",
                    other.name
                );
            }
        }
    }
    Ok(jobs.into_values().collect())
}

/// Returns the names of a program's tests.
fn list(program: &TestProgram) -> anyhow::Result<Vec<String>> {
    let out = Command::new(&program.path)
        .args(["--list", "--format", "terse"])
        .current_dir(&program.folder)
        .output()?;
    anyhow::ensure!(
        out.status.success(),
        "{} does not list its tests",
        program.path.display()
    );
    Ok(String::from_utf8_lossy(&out.stdout)
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .map(str::to_owned)
        .collect())
}

fn package_name(folder: &Path) -> anyhow::Result<String> {
    let manifest = folder.join("Cargo.toml");
    let text =
        std::fs::read_to_string(&manifest).with_context(|| manifest.display().to_string())?;
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
    Ok(name
        .with_context(|| format!("{}: no name", manifest.display()))?
        .to_owned())
}

fn decide_jobs(program: &TestProgram, package: &str, listed: &[String], is_e2e: bool) -> Vec<Job> {
    let mut processes: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for test in listed {
        let module = test.split_once("::").map_or("", |(module, _)| module);
        let name = match program.target.as_str() {
            suite if SUITES.contains(&suite) => format!("{package} {module}").trim_end().to_owned(),
            _ if program.is_library => package.to_owned(),
            // A package may have a library and a program of its own name, both with tests.
            target if target == package => format!("{package} program"),
            target => format!("{package} {target}"),
        };
        processes.entry(name).or_default().push(test);
    }
    let job = |(name, tests): (String, Vec<&str>)| {
        let mut command: Vec<OsString> = vec![program.path.clone().into()];
        // The tests of a module of `e2e` share a world, so they run one by one. Other programs also
        // show the output of passing tests, because a `SKIPPED:` line would be hidden otherwise.
        let how: &[&str] = match name.as_str() {
            _ if is_e2e => &["--test-threads=1", "--nocapture"],
            waiting if WAITING.contains(&waiting) => &["--show-output", WAITING_THREADS],
            _ => &["--show-output"],
        };
        command.extend(how.iter().map(OsString::from));
        Job {
            suite: if is_e2e { E2E_SUITE } else { "unit" },
            name,
            command,
            folder: program.folder.clone(),
            tests: tests.into_iter().map(str::to_owned).collect(),
            is_part: SUITES.contains(&program.target.as_str()),
            ..Job::default()
        }
    };
    processes.into_iter().map(job).collect()
}

/// Returns the names of the workspace's packages.
pub(crate) fn packages(tree: &SourceTree) -> anyhow::Result<BTreeSet<String>> {
    let folders = tree
        .with_suffix("/Cargo.toml")
        .filter_map(|(path, _)| tree.root.join(path).parent().map(Path::to_owned));
    folders.map(|folder| package_name(&folder)).collect()
}

/// Returns the packages whose documentation contains code, which cargo runs as tests.
pub(crate) fn documented(tree: &SourceTree) -> BTreeSet<String> {
    let has_code = |text: &str| {
        text.lines()
            .map(str::trim_start)
            .any(|line| line.starts_with("/// ```") || line.starts_with("//! ```"))
    };
    let files = tree.with_suffix(".rs").filter(|(_, text)| has_code(text));
    files
        .filter_map(|(path, _)| package_name(&tree.root.join(path.split_once("/src/")?.0)).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suite(target: &str, is_library: bool) -> TestProgram {
        TestProgram {
            folder: "/repo/control/controller-core".into(),
            target: target.into(),
            is_library,
            path: "/x".into(),
        }
    }

    #[test]
    fn cargo_messages_name_test_programs() {
        let line = |kind: &str, test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/repo/control/controller-core/Cargo.toml","target":{{"name":"suite","kind":["{kind}"]}},"profile":{{"test":{test}}},"executable":"/x"}}"#
            )
        };
        assert_eq!(
            read_message(&line("test", true)),
            CargoMessage::Built(suite("suite", false))
        );
        assert_eq!(
            read_message(&line("lib", true)),
            CargoMessage::Built(suite("suite", true))
        );
        assert_eq!(read_message(&line("bin", false)), CargoMessage::Other);
        assert_eq!(
            read_message(&line("bench", true)),
            CargoMessage::Other,
            "a bench is no test"
        );
        assert_eq!(read_message("   Compiling xtask"), CargoMessage::Words);
    }

    #[test]
    fn warnings_of_the_compiler_are_findings() {
        let line = |level: &str, spans: &str| {
            format!(
                r#"{{"reason":"compiler-message","message":{{"level":"{level}","spans":[{spans}],"rendered":"{level}: unused\n"}}}}"#
            )
        };
        let finding = |level: &str, is_error| CargoMessage::Finding {
            text: format!("{level}: unused"),
            is_error,
        };
        assert_eq!(
            read_message(&line("warning", "{}")),
            finding("warning", false)
        );
        assert_eq!(read_message(&line("error", "{}")), finding("error", true));
        assert_eq!(read_message(&line("note", "{}")), CargoMessage::Other);
        assert_eq!(
            read_message(&line("warning", "")),
            CargoMessage::Other,
            "a summary"
        );
    }

    #[test]
    fn each_module_of_a_suite_is_a_process() {
        // `suite` programs run each module in a process; other names run as one process.
        let tests = ["api::a", "fleet::b", "api::c::d"].map(String::from);
        let all = |program: &TestProgram, is_e2e| -> Vec<(String, usize, String)> {
            let jobs = decide_jobs(program, "canal-controller-core", &tests, is_e2e);
            let words = |job: &Job| job.words().join(" ".as_ref()).into_string().unwrap();
            jobs.iter()
                .map(|job| (job.name.clone(), job.tests.len(), words(job)))
                .collect()
        };
        let row = |name: &str, listed: usize, command: &str| {
            (name.to_owned(), listed, command.to_owned())
        };
        let expected = [
            row(
                "canal-controller-core api",
                2,
                "/x --show-output --exact api::a api::c::d",
            ),
            row(
                "canal-controller-core fleet",
                1,
                "/x --show-output --exact fleet::b",
            ),
        ];
        assert_eq!(all(&suite("suite", false), false), expected);
        // End-to-end tests use the whole machine, so their tests run one by one.
        assert_eq!(
            all(&suite("suite", false), true)[1].2,
            "/x --test-threads=1 --nocapture --exact fleet::b"
        );
        assert_eq!(
            // The tests of a library have the crate's name, and those of its program a word more.
            all(&suite("canal_controller_core", true), false),
            [row("canal-controller-core", 3, "/x --show-output")]
        );
        assert_eq!(
            all(&suite("canal-controller-core", false), false),
            [row("canal-controller-core program", 3, "/x --show-output")]
        );
        assert_eq!(
            all(&suite("leaks", false), false),
            [row("canal-controller-core leaks", 3, "/x --show-output")]
        );
    }
}
