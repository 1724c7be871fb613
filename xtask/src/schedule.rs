//! Runs jobs side by side within the machine's capacity, stores their output in files, prints what a reader needs, and counts. It decides
//! nothing about a test.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::failures::{Failures, without_caught_panics};
use crate::jobs::{COMPUTING_MAX, E2E_SUITE, Job, JobOutput, PARTS_MAX};
use crate::programs::{self, CargoMessage};
use crate::report::{Count, Report, read_line};

/// A job that ended: what it printed, what of it were findings of the lints, and how it ended.
#[derive(Default)]
struct ProgramResult {
    job: Job,
    lines: Vec<String>,
    findings: u64,
    status: Option<bool>,
    error: String,
    took: Duration,
}

/// What running jobs say.
enum JobEvent {
    /// The build made a program: its jobs, or why it does not list its tests.
    Built(anyhow::Result<Vec<Job>>),
    Ended(ProgramResult),
}

/// The jobs that wait and those that run.
pub(crate) struct JobSchedule<'a> {
    root: PathBuf,
    logs: PathBuf,
    is_wanted: &'a dyn Fn(&str) -> bool,
    waiting: Vec<Job>,
    /// The command of each job that there is or was, by its name.
    names: BTreeMap<String, Vec<OsString>>,
    tests: u64,
    running: Vec<RunningJob>,
    events: (Sender<JobEvent>, Receiver<JobEvent>),
}

/// What a running job takes.
struct RunningJob {
    name: String,
    parts: usize,
    is_cargo: bool,
    computes: bool,
}

impl<'a> JobSchedule<'a> {
    /// Without jobs. The folder `logs` is emptied, and gets a file for each job.
    pub(crate) fn new(root: &Path, logs: &Path, is_wanted: &'a dyn Fn(&str) -> bool) -> anyhow::Result<Self> {
        if logs.exists() {
            std::fs::remove_dir_all(logs)?;
        }
        std::fs::create_dir_all(logs).with_context(|| logs.display().to_string())?;
        let (root, logs) = (root.to_owned(), logs.to_owned());
        let (waiting, names, running, tests) = (Vec::new(), BTreeMap::new(), Vec::new(), 0);
        Ok(Self { root, logs, is_wanted, waiting, names, tests, running, events: channel() })
    }

    /// Adds the jobs of the suites that are wanted. A job that is there already is not added again: cargo names a program that was built before
    /// the others a second time.
    pub(crate) fn add(&mut self, jobs: Vec<Job>) -> anyhow::Result<()> {
        for job in jobs {
            if let Some(command) = self.names.get(&job.name) {
                anyhow::ensure!(*command == job.command, "two test programs are named `{}`: rename one of their targets", job.name);
                continue;
            }
            self.names.insert(job.name.clone(), job.command.clone());
            self.tests += job.listed.unwrap_or(0);
            self.waiting.extend(Some(job).filter(|job| (self.is_wanted)(job.suite)));
        }
        self.waiting.sort_by_key(Job::position);
        Ok(())
    }

    /// Runs all jobs, and those of the programs that they build, in the order of their positions as far as there is room.
    pub(crate) fn run(mut self, report: &mut Report, failures: &mut Failures) -> anyhow::Result<()> {
        loop {
            while let Some(next) = decide_next(&self.waiting, &self.running) {
                let job = self.waiting.remove(next);
                println!("== {} begins", job.name);
                self.running.push(RunningJob::of(&job));
                begin(job, &self.root, &self.events.0);
            }
            if self.running.is_empty() {
                println!("== {} tests are listed by {} programs", self.tests, self.names.len());
                return Ok(());
            }
            match self.events.1.recv().context("the end of a program was lost")? {
                JobEvent::Built(jobs) => self.add(jobs?)?,
                JobEvent::Ended(ended) => {
                    self.running.retain(|running| running.name != ended.job.name);
                    self.tell(&ended, report, failures)?;
                }
            }
        }
    }

    fn tell(&self, ended: &ProgramResult, report: &mut Report, failures: &mut Failures) -> anyhow::Result<()> {
        let count = decide_count(ended);
        let (name, Count { passed, failed, skipped, .. }) = (&ended.job.name, count);
        println!("== {name}, {} s: {passed} passed, {failed} failed, {skipped} skipped", ended.took.as_secs());
        decide_shown(ended, count).for_each(|line| println!("{line}"));
        if ended.status != Some(true) {
            println!("== {name} did not end well {}", ended.error);
        }
        std::fs::write(self.logs.join(format!("{name}.log")), ended.lines.join("\n") + "\n")?;
        ended.lines.iter().for_each(|line| failures.read_line(line));
        report.add(ended.job.suite, name, ended.took, count);
        Ok(())
    }
}

impl RunningJob {
    fn of(job: &Job) -> Self {
        Self { name: job.name.clone(), parts: job.parts(), is_cargo: job.is_cargo, computes: job.computes() }
    }
}

/// The job that begins next: the first for which there is room.
fn decide_next(waiting: &[Job], running: &[RunningJob]) -> Option<usize> {
    let free = PARTS_MAX.saturating_sub(running.iter().map(|job| job.parts).sum());
    let is_cargo_running = running.iter().any(|job| job.is_cargo);
    let computing = running.iter().filter(|job| job.computes && !job.is_cargo).count();
    waiting.iter().position(|job| {
        let has_turn = if job.is_cargo { !is_cargo_running } else { !job.computes() || computing < COMPUTING_MAX };
        job.parts() <= free && has_turn
    })
}

/// Returns the lines to show. Of a failed job, these are all except panics that passing tests caught; of `e2e`, the measurements; of
/// others, only the reasons for skipped tests. More lines would hide the failures.
fn decide_shown(ended: &ProgramResult, count: Count) -> impl Iterator<Item = &String> {
    let is_shown_whole = count.failed > 0 || ended.job.suite == E2E_SUITE;
    without_caught_panics(&ended.lines).filter(move |line| is_shown_whole || line.contains("SKIPPED:"))
}

/// Returns the count of a job. A job that died without counting its failure, or did not run all tests that it lists, has failed.
fn decide_count(ended: &ProgramResult) -> Count {
    let is_well = ended.status == Some(true);
    if ended.job.output != JobOutput::Tests {
        return Count::of(is_well && ended.findings == 0);
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

fn begin(job: Job, root: &Path, events: &Sender<JobEvent>) {
    let (root, events) = (root.to_owned(), events.clone());
    std::thread::spawn(move || {
        let started = Instant::now();
        let mut ended = ProgramResult { job, ..ProgramResult::default() };
        match listen(&mut ended, &root, &events) {
            Ok(is_well) => ended.status = Some(is_well),
            Err(e) => ended.error = e.to_string(),
        }
        ended.took = started.elapsed();
        // Nobody receives only after the run has failed already.
        let _ = events.send(JobEvent::Ended(ended));
    });
}

/// Runs a job to its end; true when that was a good one.
fn listen(ended: &mut ProgramResult, root: &Path, events: &Sender<JobEvent>) -> std::io::Result<bool> {
    let (output, pipe) = std::io::pipe()?;
    let (job, words) = (&ended.job, ended.job.words());
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).current_dir(&job.folder).env("CARGO_MANIFEST_DIR", &job.folder).stdin(Stdio::null());
    command.envs(job.environment.iter().map(|(name, value)| (name, value)));
    let mut child = command.stdout(pipe.try_clone()?).stderr(pipe).spawn()?;
    // The command holds the write end of the pipe; without this, reading would never end.
    drop(command);
    for line in BufReader::new(output).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        if job.output != JobOutput::Artifacts {
            ended.lines.push(line);
            continue;
        }
        match programs::read_message(&line) {
            CargoMessage::Words => ended.lines.push(line),
            CargoMessage::Finding(text) => {
                ended.findings += 1;
                ended.lines.extend(text.lines().map(str::to_owned));
            }
            // Nobody receives only after the run has failed already.
            CargoMessage::Built(program) => drop(events.send(JobEvent::Built(programs::jobs(root, &program)))),
            CargoMessage::Other => {}
        }
    }
    Ok(child.wait()?.success())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::{ALONE, BOUNDS, WAITS, WORKS};

    fn named(names: &[&str]) -> Vec<Job> {
        let job =
            |name: &&str| Job { suite: E2E_SUITE, name: (*name).to_owned(), is_cargo: ["tests", "plain"].contains(name), ..Job::default() };
        names.iter().map(job).collect()
    }

    fn taken(parts: usize) -> Vec<RunningJob> {
        vec![RunningJob { name: "another".into(), parts, is_cargo: false, computes: false }]
    }

    #[test]
    fn first_job_that_fits_is_next() {
        let e2e = ["cases", "edges", "protocols", "identity", "unknown"].map(|name| format!("canal-e2e {name}"));
        let waiting = named(&e2e.each_ref().map(String::as_str));
        for (free, expected) in [(PARTS_MAX, Some(0)), (BOUNDS, Some(1)), (WORKS, Some(2)), (WAITS, Some(3)), (0, None)] {
            assert_eq!(decide_next(&waiting, &taken(PARTS_MAX - free)), expected, "{free} free");
        }
        assert_eq!(decide_next(&waiting[4..], &taken(1)), None, "what is not known runs alone");
        assert_eq!(decide_next(&[], &[]), None);
    }

    #[test]
    fn a_program_named_again_is_the_same_or_a_mistake() {
        let logs = std::env::temp_dir().join(format!("canal-xtask-{}", std::process::id()));
        let all = |_: &str| true;
        let mut schedule = JobSchedule::new(Path::new("/"), &logs, &all).unwrap();
        let job = |path: &str| Job { name: "canal-e2e dns".into(), command: vec![path.into()], listed: Some(2), ..Job::default() };
        schedule.add(vec![job("/a")]).unwrap();
        schedule.add(vec![job("/a")]).unwrap();
        assert_eq!((schedule.waiting.len(), schedule.tests), (1, 2));
        assert!(schedule.add(vec![job("/b")]).is_err_and(|e| e.to_string().contains("canal-e2e dns")));
        std::fs::remove_dir(logs).unwrap();
    }

    #[test]
    fn two_cargo_commands_never_run_at_once() {
        let waiting = named(&["tests", "plain", "canal-e2e dns"]);
        let cargo = [RunningJob::of(&waiting[0])];
        assert_eq!(decide_next(&waiting, &[]), Some(0));
        assert_eq!(decide_next(&waiting, &cargo), Some(2));
        assert_eq!(decide_next(&waiting[..2], &cargo), None);
    }

    #[test]
    fn what_computes_runs_beside_all_but_its_like() {
        let waiting = named(&["canal-model", "canal-wire"]);
        assert_eq!(decide_next(&waiting, &taken(ALONE)), Some(0));
        assert_eq!(decide_next(&waiting[1..], &[RunningJob::of(&waiting[0])]), None);
    }

    #[test]
    fn job_that_dies_silently_has_failed() {
        let ended = |lines: &[&str], status, listed| ProgramResult {
            job: Job { listed: Some(listed), ..Job::default() },
            lines: lines.iter().map(|line| (*line).to_owned()).collect(),
            status,
            ..ProgramResult::default()
        };
        let good = "test result: ok. 2 passed; 0 failed; 1 ignored;";
        for (what, lines, status, listed, expected) in [
            ("well", &[good][..], Some(true), 3, (2, 0, 1)),
            ("killed at its end", &[good][..], Some(false), 3, (2, 1, 1)),
            ("killed at once", &[][..], Some(false), 3, (0, 1, 0)),
            ("never started", &[][..], None, 3, (0, 1, 0)),
            ("a test that is listed did not run", &[good][..], Some(true), 4, (2, 1, 1)),
        ] {
            let count = decide_count(&ended(lines, status, listed));
            assert_eq!((count.passed, count.failed, count.skipped), expected, "{what}");
        }
    }

    #[test]
    fn a_build_with_findings_has_failed() {
        let job = Job { output: JobOutput::Artifacts, ..Job::default() };
        let ended = |status, findings| ProgramResult { job: job.clone(), status: Some(status), findings, ..ProgramResult::default() };
        assert_eq!(decide_count(&ended(true, 0)), Count::of(true));
        assert_eq!(decide_count(&ended(true, 1)), Count::of(false));
        assert_eq!(decide_count(&ended(false, 0)), Count::of(false));
    }

    #[test]
    fn only_failures_measurements_and_skips_are_shown() {
        let lines = ["test a ... ok", "SKIPPED: no BPF", "3 of 5"];
        let shown = |suite, is_well| -> Vec<String> {
            let job = Job { suite, ..Job::default() };
            let ended = ProgramResult { job, lines: lines.map(str::to_owned).to_vec(), status: Some(is_well), ..ProgramResult::default() };
            decide_shown(&ended, Count::of(is_well)).cloned().collect()
        };
        assert_eq!(shown("unit", true), ["SKIPPED: no BPF"]);
        assert_eq!(shown(E2E_SUITE, true), lines);
        assert_eq!(shown("unit", false), lines);
    }

    #[test]
    fn output_of_a_job_is_read_to_its_end() {
        let words = ["sh", "-c", "echo one; echo two >&2; exit 3"];
        let job = Job { name: "canal-e2e dns".into(), command: words.map(Into::into).to_vec(), folder: "/".into(), ..Job::default() };
        let mut ended = ProgramResult { job, ..ProgramResult::default() };
        assert!(!listen(&mut ended, Path::new("/"), &channel().0).unwrap());
        assert_eq!(ended.lines, ["one", "two"]);
    }
}
