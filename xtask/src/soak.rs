//! The long runs: `cargo xtask soak [PART…]` runs named parts in full that `make test` runs
//! shortened or not at all. Each part prints its seed and writes a report, which is committed. It
//! decides no verdict on a single test.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime};

use anyhow::Context;

use crate::count::{Count, read_line};
use crate::host;
use crate::tree::SourceTree;

/// Maximum minutes of a part, so that a part and its build fit into one session.
/// The hour was chosen.
const MINUTES_MAX: u64 = 60;
/// Lines of a part's output in its report. The last lines have the totals.
/// About one screen.
const LINES_MAX: usize = 60;
/// Variable set for every part: tests that `make test` shortens run in full.
const WHOLE: &str = "CANAL_SOAK";
/// Environment variable that is set for every part: it enables assertions on time, rates and losses
/// (`testing/timing`).
const TIMED: &str = "CANAL_TIMING";
/// Build of a part that runs in worlds: the programs that the worlds start are included.
const PROGRAMS: &[&str] = &[
    "test",
    "--workspace",
    "--bins",
    "--tests",
    "--locked",
    "--no-run",
];
/// Variable from which seeded parts read their first seed.
const SEED: &str = "CANAL_SEED";

/// A long run.
struct SoakPart {
    name: &'static str,
    what: &'static str,
    /// Minutes after which the part is ended and counts as failed.
    minutes: u64,
    /// Cargo commands of the build, which is not timed, and of the run.
    build: &'static [&'static str],
    run: &'static [&'static str],
    /// True if cases come from a seed: `CANAL_SEED`, or one made from the time of day.
    is_seeded: bool,
    /// True if the output has libtest's counts; otherwise only the status counts.
    counts_tests: bool,
}

/// The parts. Release builds run the full numbers of cases, the test profile the shortened ones.
const PARTS: [SoakPart; 9] = [
    SoakPart {
        name: "compare",
        what: "generated tenants and policies on every target beside the oracle: 9,000 and 4,000 tenants, 6,000 broken policies; 50,000 requests to a running gateway",
        minutes: 30,
        build: &[
            "test",
            "--release",
            "--locked",
            "-p",
            "canal-differential",
            "--test",
            "suite",
            "--no-run",
        ],
        run: &[
            "test",
            "--release",
            "--locked",
            "-p",
            "canal-differential",
            "--test",
            "suite",
            "--",
            "--nocapture",
            "--test-threads=1",
        ],
        is_seeded: true,
        counts_tests: true,
    },
    SoakPart {
        name: "services",
        what: "a controller with 16,000 services: an AZ is closed as fast as with a few",
        minutes: 30,
        build: &[
            "test",
            "--release",
            "--locked",
            "-p",
            "canal-controller-core",
            "--test",
            "suite",
            "--no-run",
        ],
        run: &[
            "test",
            "--release",
            "--locked",
            "-p",
            "canal-controller-core",
            "--test",
            "suite",
            "--",
            "scale::",
            "--nocapture",
            "--test-threads=1",
        ],
        is_seeded: false,
        counts_tests: true,
    },
    SoakPart {
        name: "keys",
        what: "a key server under 1,000,000 signatures and 100,000 handshakes leaves no memory and no file behind",
        minutes: 45,
        build: &[
            "bench",
            "--locked",
            "-p",
            "canal-keyserver-engine",
            "--bench",
            "soak",
            "--no-run",
        ],
        run: &[
            "bench",
            "--locked",
            "-p",
            "canal-keyserver-engine",
            "--bench",
            "soak",
        ],
        is_seeded: false,
        counts_tests: false,
    },
    SoakPart {
        name: "chaos",
        what: "30 minutes of random kills, cuts, drains, scale events, policy changes and rotations under two tenants with the same addresses",
        minutes: 45,
        build: PROGRAMS,
        run: &[
            "test",
            "--workspace",
            "--locked",
            "--test",
            "meshes",
            "--",
            "chaos::",
            "--nocapture",
            "--test-threads=1",
        ],
        is_seeded: true,
        counts_tests: true,
    },
    SoakPart {
        name: "exhaustion",
        what: "one tenant takes every limit that tenants share, 15 s each, while another is watched",
        minutes: 30,
        build: PROGRAMS,
        run: &[
            "test",
            "--workspace",
            "--locked",
            "--test",
            "meshes",
            "--",
            "exhaustion::",
            "--nocapture",
            "--test-threads=1",
        ],
        is_seeded: false,
        counts_tests: true,
    },
    SoakPart {
        name: "exchanges",
        what: "3,000 POSTs that meet a close, by Canal, nginx, HAProxy and Envoy, and 1,000 uploads refused unread per client, with and without mesh",
        minutes: 45,
        build: PROGRAMS,
        run: &[
            "test",
            "--workspace",
            "--locked",
            "--test",
            "meshes",
            "--",
            "exchanges::",
            "--nocapture",
            "--test-threads=1",
        ],
        is_seeded: false,
        counts_tests: true,
    },
    SoakPart {
        name: "software",
        what: "foreign software, unmodified, with and without the mesh: PostgreSQL, MariaDB, Redis, RabbitMQ, NATS, mail, FTP, SSH, gRPC and more",
        minutes: 20,
        build: PROGRAMS,
        run: &[
            "test",
            "--workspace",
            "--locked",
            "--test",
            "meshes",
            "--",
            "software::",
            "--nocapture",
            "--test-threads=1",
        ],
        is_seeded: false,
        counts_tests: true,
    },
    SoakPart {
        name: "changes",
        what: "1,000 changes, one by one through the command line, under a load that follows each of them",
        minutes: 15,
        build: PROGRAMS,
        run: &[
            "test",
            "--workspace",
            "--locked",
            "--test",
            "meshes",
            "--",
            "config::",
            "--nocapture",
            "--test-threads=1",
        ],
        is_seeded: false,
        counts_tests: true,
    },
    SoakPart {
        name: "tier",
        what: "planned changes for two minutes and all kinds of deaths of the cloud tier, backends of two replicas",
        minutes: 15,
        build: PROGRAMS,
        run: &[
            "test",
            "--workspace",
            "--locked",
            "--test",
            "meshes",
            "--",
            "tier::",
            "--nocapture",
            "--test-threads=1",
        ],
        is_seeded: false,
        counts_tests: true,
    },
];

const _: () = {
    let mut n = 0;
    while n < PARTS.len() {
        assert!(PARTS[n].minutes > 0 && PARTS[n].minutes <= MINUTES_MAX);
        n += 1;
    }
};

/// Facts about a run that its report states.
struct Run {
    commit: String,
    machine: String,
    day: String,
    seed: Option<u64>,
    seconds: u64,
    count: Count,
    lines: Vec<String>,
}

/// Returns the list of parts for the help text.
pub(crate) fn list() -> String {
    PARTS
        .iter()
        .map(|part| {
            format!(
                "                  {:<10}{} (at most {} minutes)\n",
                part.name, part.what, part.minutes
            )
        })
        .collect()
}

/// Runs the named parts, or all if none is named. Returns true if nothing failed.
pub(crate) fn run(wanted: &[&str]) -> anyhow::Result<bool> {
    if let Some(bad) = wanted
        .iter()
        .find(|w| !PARTS.iter().any(|part| part.name == **w))
    {
        anyhow::bail!(
            "no part {bad:?}; fix: name one of {}",
            PARTS.each_ref().map(|part| part.name).join(", ")
        );
    }
    let tree = SourceTree::read()?;
    let mut total = Count::default();
    for part in PARTS
        .iter()
        .filter(|part| wanted.is_empty() || wanted.contains(&part.name))
    {
        let run = run_part(&tree.root, part)?;
        total.add(run.count);
        let path = format!("docs/soak/{}.md", part.name);
        std::fs::create_dir_all(tree.root.join("docs/soak"))?;
        std::fs::write(tree.root.join(&path), render(part, &run)).with_context(|| path.clone())?;
        println!("== soak {}: {} s, report in {path}", part.name, run.seconds);
    }
    println!(
        "{} passed, {} failed, {} skipped",
        total.passed, total.failed, total.skipped
    );
    Ok(total.failed == 0)
}

fn run_part(root: &Path, part: &SoakPart) -> anyhow::Result<Run> {
    println!("== soak {}: {}", part.name, part.what);
    let commit = commit(root)?;
    let built = Command::new("cargo")
        .args(part.build)
        .current_dir(root)
        .status()?;
    anyhow::ensure!(built.success(), "{}: the build failed", part.name);
    let seed = part.is_seeded.then(seed).transpose()?;
    println!("== soak {}: seed {}", part.name, seed_text(seed));
    let started = Instant::now();
    let mut command = Command::new("timeout");
    command
        .args(["--kill-after=30", &format!("{}m", part.minutes), "cargo"])
        .args(part.run)
        .current_dir(root);
    command.env(WHOLE, "1").env(TIMED, "1");
    if let Some(seed) = seed {
        command.env(SEED, seed.to_string());
    }
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut lines = Vec::new();
    for line in BufReader::new(child.stdout.take().context("cargo has no output")?).lines() {
        lines.push(line?);
        writeln!(std::io::stdout(), "{}", lines[lines.len() - 1])?;
    }
    let is_well = child.wait()?.success();
    let (machine, day) = (host::machine()?, host::day()?);
    Ok(Run {
        commit,
        machine,
        day,
        seed,
        seconds: started.elapsed().as_secs(),
        count: decide_count(part, &lines, is_well),
        lines,
    })
}

/// Returns the count of a part. A part in which no test ran has failed.
fn decide_count(part: &SoakPart, lines: &[String], is_well: bool) -> Count {
    if !part.counts_tests {
        return Count::of(is_well);
    }
    let mut count = Count::default();
    lines.iter().for_each(|line| count.add(read_line(line)));
    if !is_well || count.passed == 0 {
        count.failed = count.failed.max(1);
    }
    count
}

/// Returns the seed of the environment, or one that no earlier run used.
fn seed() -> anyhow::Result<u64> {
    if let Ok(text) = std::env::var(SEED) {
        return text
            .parse()
            .with_context(|| format!("{SEED}={text}: not a number; fix: give an unsigned number"));
    }
    // Seeds count upwards from the first, so that two runs share no case.
    Ok(SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)?
        .as_secs()
        * 10_000)
}

fn seed_text(seed: Option<u64>) -> String {
    seed.map_or_else(
        || "none, because it uses no random numbers".to_owned(),
        |seed| seed.to_string(),
    )
}

/// Returns the commit that runs, and whether the files differ from it.
fn commit(root: &Path) -> anyhow::Result<String> {
    let (commit, is_changed) = host::commit(root)?;
    Ok(if is_changed {
        format!("{commit} with changes")
    } else {
        commit
    })
}

fn render(part: &SoakPart, run: &Run) -> String {
    let count = run.count;
    let mut text = format!(
        "# Soak: {}\n\n{}. `make soak PART={}` writes this file.\n\n| | |\n|---|---|\n",
        part.name, part.what, part.name
    );
    let counts = format!(
        "{} passed, {} failed, {} skipped",
        count.passed, count.failed, count.skipped
    );
    let seed = seed_text(run.seed);
    for (name, value) in [
        ("commit", run.commit.as_str()),
        ("machine", &run.machine),
        ("day", &run.day),
        ("seed", &seed),
        ("seconds", &run.seconds.to_string()),
        ("counts", &counts),
    ] {
        let _ = writeln!(text, "| {name} | {value} |");
    }
    // libtest's line for every test is already in the counts.
    let is_own = |line: &&String| {
        !line.is_empty()
            && !["running ", "test "]
                .iter()
                .any(|start| line.starts_with(start))
    };
    text.push_str("\n```text\n");
    let own: Vec<&String> = run.lines.iter().filter(is_own).collect();
    own[own.len().saturating_sub(LINES_MAX)..]
        .iter()
        .for_each(|line| text.push_str(&format!("{}\n", line.trim_end())));
    text.push_str("```\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_distinct_and_name_packages_that_exist() {
        let tree = SourceTree::read().unwrap();
        for (n, part) in PARTS.iter().enumerate() {
            assert!(
                PARTS[..n].iter().all(|other| other.name != part.name),
                "{}",
                part.name
            );
            // A command for the whole workspace names no package.
            for command in [part.build, part.run]
                .into_iter()
                .filter(|command| !command.contains(&"--workspace"))
            {
                let package = command
                    .iter()
                    .skip_while(|word| **word != "-p")
                    .nth(1)
                    .unwrap();
                let named = format!("name = \"{package}\"");
                assert!(
                    tree.with_suffix("Cargo.toml")
                        .any(|(_, text)| text.contains(&named)),
                    "{}: {package}",
                    part.name
                );
            }
            assert!(
                part.build.contains(&"--no-run"),
                "{}: the build is not part of the time",
                part.name
            );
            assert!(list().contains(part.what));
        }
    }

    #[test]
    fn part_without_a_test_has_failed() {
        let line = |text: &str| vec![text.to_owned()];
        for (lines, is_well, expected) in [
            (
                line("test result: ok. 2 passed; 0 failed; 0 ignored;"),
                true,
                (2, 0),
            ),
            (
                line("test result: ok. 2 passed; 0 failed; 0 ignored;"),
                false,
                (2, 1),
            ),
            (
                line("test result: ok. 0 passed; 0 failed; 0 ignored;"),
                true,
                (0, 1),
            ),
            (line(""), true, (0, 1)),
        ] {
            let count = decide_count(&PARTS[0], &lines, is_well);
            assert_eq!(
                (count.passed, count.failed),
                expected,
                "{lines:?} {is_well}"
            );
        }
        let status = |is_well| decide_count(&PARTS[2], &[], is_well).failed;
        assert_eq!((status(true), status(false)), (0, 1));
    }

    #[test]
    fn report_names_commit_machine_seed_and_counts() {
        let run = Run {
            commit: "abc".into(),
            machine: "2 × x".into(),
            day: "2026-01-01".into(),
            seed: Some(7),
            seconds: 61,
            count: Count {
                passed: 2,
                ..Count::default()
            },
            lines: [
                "running 2 tests",
                "test a ... ok",
                "5 tenants from seed 7",
                "",
            ]
            .map(String::from)
            .to_vec(),
        };
        let text = render(&PARTS[0], &run);
        for part in [
            "# Soak: compare\n",
            "| commit | abc |",
            "| seed | 7 |",
            "| counts | 2 passed, 0 failed, 0 skipped |",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(
            text.ends_with("```text\n5 tenants from seed 7\n```\n"),
            "{text}"
        );
    }
}
