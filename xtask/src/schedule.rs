//! Runs jobs side by side as far as the machine has room, keeps what each prints in a file, shows of it what a reader needs, and counts. It decides
//! nothing about a test.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::failures::{Failures, without_caught_panics};
use crate::jobs::{Job, ROOM};
use crate::programs::E2E_SUITE;
use crate::report::{Count, Report, read_line};

/// A job that ended: what it printed, and how it ended.
struct Ended {
    job: Job,
    lines: Vec<String>,
    status: std::io::Result<bool>,
    took: Duration,
}

/// Runs all jobs, in the order of their positions as far as there is room. The folder `logs` is emptied, and gets a file for each job.
pub(crate) fn run(mut waiting: Vec<Job>, logs: &Path, report: &mut Report, failures: &mut Failures) -> anyhow::Result<()> {
    if logs.exists() {
        std::fs::remove_dir_all(logs)?;
    }
    std::fs::create_dir_all(logs).with_context(|| logs.display().to_string())?;
    waiting.sort_by_key(Job::position);
    let (sender, receiver) = channel();
    let mut free = ROOM;
    let mut running = 0;
    let mut is_cargo_running = false;
    loop {
        while let Some(next) = decide_next(&waiting, free, is_cargo_running) {
            let job = waiting.remove(next);
            println!("== {} begins", job.name);
            free -= job.parts();
            running += 1;
            is_cargo_running |= job.is_cargo;
            begin(job, &sender);
        }
        if running == 0 {
            return Ok(());
        }
        let ended: Ended = receiver.recv().context("the end of a program was lost")?;
        free += ended.job.parts();
        running -= 1;
        is_cargo_running &= !ended.job.is_cargo;
        let count = decide_count(&ended);
        let (name, Count { passed, failed, skipped, .. }) = (&ended.job.name, count);
        println!("== {name}, {} s: {passed} passed, {failed} failed, {skipped} skipped", ended.took.as_secs());
        decide_shown(&ended, count).for_each(|line| println!("{line}"));
        if !matches!(ended.status, Ok(true)) {
            println!("== {name} did not end well: {:?}", ended.status);
        }
        std::fs::write(logs.join(format!("{}.log", ended.job.name)), ended.lines.join("\n") + "\n")?;
        ended.lines.iter().for_each(|line| failures.hear(line));
        report.add(ended.job.suite, &ended.job.name, ended.took, count);
    }
}

/// The job that begins next: the first for which there is room.
fn decide_next(waiting: &[Job], free: usize, is_cargo_running: bool) -> Option<usize> {
    waiting.iter().position(|job| job.parts() <= free && !(job.is_cargo && is_cargo_running))
}

/// The lines that are shown: all of a job that failed, except panics that passing tests caught; of `e2e` what it measured; of others only why
/// tests were skipped. More would bury the failures.
fn decide_shown(ended: &Ended, count: Count) -> impl Iterator<Item = &String> {
    let is_shown_whole = count.failed > 0 || ended.job.suite == E2E_SUITE;
    without_caught_panics(&ended.lines).filter(move |line| is_shown_whole || line.contains("SKIPPED:"))
}

/// What a job counted. One that died without counting its failure, or did not run all tests that it lists, has failed.
fn decide_count(ended: &Ended) -> Count {
    let is_well = matches!(ended.status, Ok(true));
    if !ended.job.counts_tests {
        return Count::of(is_well);
    }
    let mut count = Count::default();
    ended.lines.iter().for_each(|line| count.add(read_line(line)));
    let is_whole = ended.job.listed.is_none_or(|listed| count.reported >= listed);
    if !is_whole {
        println!("== {}: {} of {} tests ended", ended.job.name, count.reported, ended.job.listed.unwrap_or_default());
    }
    if !is_well || !is_whole {
        count.failed = count.failed.max(1);
    }
    count
}

fn begin(job: Job, ended: &Sender<Ended>) {
    let ended = ended.clone();
    std::thread::spawn(move || {
        let (started, mut lines) = (Instant::now(), Vec::new());
        let status = listen(&job, &mut lines);
        let took = started.elapsed();
        // Nobody receives only after the run has failed already.
        let _ = ended.send(Ended { job, lines, status, took });
    });
}

/// Runs a job to its end; true when that was a good one.
fn listen(job: &Job, lines: &mut Vec<String>) -> std::io::Result<bool> {
    let (output, pipe) = std::io::pipe()?;
    let mut command = Command::new(&job.command[0]);
    command.args(&job.command[1..]).current_dir(&job.folder).env("CARGO_MANIFEST_DIR", &job.folder).stdin(Stdio::null());
    let mut child = command.stdout(pipe.try_clone()?).stderr(pipe).spawn()?;
    // The command holds the pipe's other end, which would never end.
    drop(command);
    for line in BufReader::new(output).split(b'\n') {
        lines.push(String::from_utf8_lossy(&line?).into_owned());
    }
    Ok(child.wait()?.success())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::{BOUNDS, WAITS, WORKS};

    fn named(names: &[&str]) -> Vec<Job> {
        let job = |name: &&str| Job { name: (*name).to_owned(), is_cargo: ["lint", "plain"].contains(name), ..Job::default() };
        names.iter().map(job).collect()
    }

    #[test]
    fn first_job_that_fits_is_next() {
        let e2e = ["chaos", "tier", "protocols", "identity", "unknown"].map(|name| format!("canal-e2e {name}"));
        let waiting = named(&e2e.each_ref().map(String::as_str));
        for (free, expected) in [(ROOM, Some(0)), (BOUNDS, Some(1)), (WORKS, Some(2)), (WAITS, Some(3)), (0, None)] {
            assert_eq!(decide_next(&waiting, free, false), expected, "{free} free");
        }
        assert_eq!(decide_next(&waiting[4..], ROOM - 1, false), None, "what is not known runs alone");
        assert_eq!(decide_next(&[], ROOM, false), None);
    }

    #[test]
    fn two_cargo_commands_never_run_at_once() {
        let waiting = named(&["lint", "plain", "canal-e2e dns"]);
        assert_eq!(decide_next(&waiting, WORKS, false), Some(0));
        assert_eq!(decide_next(&waiting, WORKS, true), Some(2));
    }

    #[test]
    fn job_that_dies_silently_has_failed() {
        let ended = |lines: &[&str], status, listed| Ended {
            job: Job { counts_tests: true, listed: Some(listed), ..Job::default() },
            lines: lines.iter().map(|line| (*line).to_owned()).collect(),
            status,
            took: Duration::ZERO,
        };
        let good = "test result: ok. 2 passed; 0 failed; 1 ignored;";
        for (what, lines, status, listed, expected) in [
            ("well", &[good][..], Ok(true), 3, (2, 0, 1)),
            ("killed at its end", &[good][..], Ok(false), 3, (2, 1, 1)),
            ("killed at once", &[][..], Ok(false), 3, (0, 1, 0)),
            ("never started", &[][..], Err(std::io::ErrorKind::NotFound.into()), 3, (0, 1, 0)),
            ("a test that is listed did not run", &[good][..], Ok(true), 4, (2, 1, 1)),
        ] {
            let count = decide_count(&ended(lines, status, listed));
            assert_eq!((count.passed, count.failed, count.skipped), expected, "{what}");
        }
    }

    #[test]
    fn only_failures_measurements_and_skips_are_shown() {
        let lines = ["test a ... ok", "SKIPPED: no BPF", "3 of 5"];
        let shown = |suite, is_well| -> Vec<String> {
            let job = Job { suite, ..Job::default() };
            let ended = Ended { job, lines: lines.map(str::to_owned).to_vec(), status: Ok(is_well), took: Duration::ZERO };
            decide_shown(&ended, Count::of(is_well)).cloned().collect()
        };
        assert_eq!(shown("unit", true), ["SKIPPED: no BPF"]);
        assert_eq!(shown(E2E_SUITE, true), lines);
        assert_eq!(shown("unit", false), lines);
    }

    #[test]
    fn output_of_a_job_is_read_to_its_end() {
        let mut lines = Vec::new();
        let words = ["sh", "-c", "echo one; echo two >&2; exit 3"];
        let job = Job { command: words.map(Into::into).to_vec(), folder: "/".into(), ..Job::default() };
        assert!(!listen(&job, &mut lines).unwrap());
        assert_eq!(lines, ["one", "two"]);
    }
}
