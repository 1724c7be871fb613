//! The test programs of the workspace: builds them, lists their tests, and makes a job of each program, and of each module of a `suite`. It runs no
//! test.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use serde_json::Value;

use crate::jobs::Job;
use crate::tree::Tree;

/// The package whose programs are the suite `e2e`, and that suite's name.
const E2E: &str = "tests/e2e";
pub(crate) const E2E_SUITE: &str = "e2e";
/// The integration tests of a package with several files: each module is a process of its own, so that none sees another's memory, files, worlds
/// and limits.
const SUITE: &str = "suite";

/// A test program that cargo built.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Program {
    folder: PathBuf,
    target: String,
    is_library: bool,
    path: PathBuf,
}

/// Runs cargo, which reports what it built in JSON; none if that failed.
pub(crate) fn build(root: &Path, arguments: &[&str]) -> anyhow::Result<Option<Vec<Program>>> {
    let mut cargo = Command::new("cargo").args(arguments).current_dir(root).stdout(Stdio::piped()).spawn()?;
    let mut programs = Vec::new();
    for line in BufReader::new(cargo.stdout.take().context("cargo has no output")?).lines() {
        programs.extend(program(&line?));
    }
    Ok(cargo.wait()?.success().then_some(programs))
}

/// The test program that a line of cargo's names (<https://doc.rust-lang.org/cargo/reference/external-tools.html#json-messages>).
fn program(line: &str) -> Option<Program> {
    let message: Value = serde_json::from_str(line).ok()?;
    let path = message["executable"].as_str().filter(|_| message["profile"]["test"] == true)?.into();
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
    let is_library = message["target"]["kind"].as_array()?.iter().any(|kind| kind == "lib");
    Some(Program { folder, target: message["target"]["name"].as_str()?.to_owned(), is_library, path })
}

/// A job for each program and for each module of a suite that has tests.
pub(crate) fn jobs(tree: &Tree, programs: &[Program]) -> anyhow::Result<Vec<Job>> {
    let mut jobs = Vec::new();
    for program in programs {
        let listed = list(program)?;
        let package = package_name(&program.folder)?;
        jobs.extend(decide_jobs(program, &package, &listed, program.folder == tree.root.join(E2E)));
    }
    let names: BTreeSet<&str> = jobs.iter().map(|job| job.name.as_str()).collect();
    anyhow::ensure!(names.len() == jobs.len(), "two test programs have one name");
    Ok(jobs)
}

/// The names of a program's tests.
fn list(program: &Program) -> anyhow::Result<Vec<String>> {
    let out = Command::new(&program.path).args(["--list", "--format", "terse"]).current_dir(&program.folder).output()?;
    anyhow::ensure!(out.status.success(), "{} does not list its tests", program.path.display());
    Ok(String::from_utf8_lossy(&out.stdout).lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

fn package_name(folder: &Path) -> anyhow::Result<String> {
    let manifest = folder.join("Cargo.toml");
    let text = std::fs::read_to_string(&manifest).with_context(|| manifest.display().to_string())?;
    let name = text.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
    Ok(name.with_context(|| format!("{}: no name", manifest.display()))?.to_owned())
}

fn decide_jobs(program: &Program, package: &str, listed: &[String], is_e2e: bool) -> Vec<Job> {
    let mut processes: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for test in listed {
        let module = test.split_once("::").map_or("", |(module, _)| module);
        let name = match program.target.as_str() {
            SUITE => format!("{package} {module}").trim_end().to_owned(),
            _ if program.is_library || program.target == package => package.to_owned(),
            target => format!("{package} {target}"),
        };
        processes.entry(name).or_default().push(test);
    }
    let job = |(name, tests): (String, Vec<&str>)| {
        let mut command: Vec<OsString> = vec![program.path.clone().into()];
        // The tests of a module of `e2e` share a world, so they run one by one. Of others, what passing tests print is shown too, or nobody would
        // see a `SKIPPED:`.
        let how: &[&str] = if is_e2e { &["--test-threads=1", "--nocapture"] } else { &["--show-output"] };
        command.extend(how.iter().map(OsString::from));
        if program.target == SUITE {
            command.push("--exact".into());
            command.extend(tests.iter().map(OsString::from));
        }
        Job {
            suite: if is_e2e { E2E_SUITE } else { "unit" },
            name,
            command,
            folder: program.folder.clone(),
            listed: Some(tests.len() as u64),
            counts_tests: true,
            is_cargo: false,
        }
    };
    processes.into_iter().map(job).collect()
}

/// The packages whose documentation has code, which cargo runs as tests.
pub(crate) fn documented(tree: &Tree) -> BTreeSet<String> {
    let has_code = |text: &str| text.lines().map(str::trim_start).any(|line| line.starts_with("/// ```") || line.starts_with("//! ```"));
    let files = tree.with_suffix(".rs").filter(|(_, text)| has_code(text));
    files.filter_map(|(path, _)| package_name(&tree.root.join(path.split_once("/src/")?.0)).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suite(target: &str, is_library: bool) -> Program {
        Program { folder: "/repo/control/hub".into(), target: target.into(), is_library, path: "/x".into() }
    }

    #[test]
    fn cargo_messages_name_test_programs() {
        let line = |kind: &str, test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/repo/control/hub/Cargo.toml","target":{{"name":"suite","kind":["{kind}"]}},"profile":{{"test":{test}}},"executable":"/x"}}"#
            )
        };
        assert_eq!(program(&line("test", true)), Some(suite("suite", false)));
        assert_eq!(program(&line("lib", true)), Some(suite("suite", true)));
        assert_eq!(program(&line("bin", false)), None);
        assert_eq!(program("no JSON"), None);
    }

    #[test]
    fn each_module_of_a_suite_is_a_process() {
        let tests = ["api::a", "fleet::b", "api::c::d"].map(String::from);
        let all = |program: &Program, is_e2e| -> Vec<(String, u64, String)> {
            let jobs = decide_jobs(program, "canal-hub", &tests, is_e2e);
            jobs.into_iter().map(|job| (job.name, job.listed.unwrap(), job.command.join(" ".as_ref()).into_string().unwrap())).collect()
        };
        let row = |name: &str, listed: u64, command: &str| (name.to_owned(), listed, command.to_owned());
        let expected = [
            row("canal-hub api", 2, "/x --show-output --exact api::a api::c::d"),
            row("canal-hub fleet", 1, "/x --show-output --exact fleet::b"),
        ];
        assert_eq!(all(&suite("suite", false), false), expected);
        assert_eq!(all(&suite("suite", false), true)[1].2, "/x --test-threads=1 --nocapture --exact fleet::b");
        assert_eq!(all(&suite("canal_hub", true), false), [row("canal-hub", 3, "/x --show-output")]);
        assert_eq!(all(&suite("leaks", false), false), [row("canal-hub leaks", 3, "/x --show-output")]);
    }
}
