//! Runs jobs side by side within the machine's capacity, longest first, and prints each job that
//! ended. It decides no verdict.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use anyhow::Context;

use crate::count::Count;
use crate::durations::Durations;
use crate::jobs::{Job, JobOutput, WORKS};
use crate::process::{self, EndedProcess, ProcessEnd, TimeLimit};
use crate::report::RunClock;
use crate::spare::{self, SpareParts};
use crate::tiers::TimedTests;
use crate::verdict::{JobResult, decide_result};

/// Maximum number of lines of a failed check that are shown immediately. Output of failed tests is
/// shown at the end of the run.
/// About one screen. The log has the whole output.
const SHOWN_MAX: usize = 60;

/// Settings that all jobs of a run share.
pub(crate) struct RunContext<'a> {
    pub(crate) logs: &'a Path,
    pub(crate) clock: RunClock,
    pub(crate) timed: &'a TimedTests,
    pub(crate) environment: Vec<(&'static str, OsString)>,
    /// Parts of the machine, and its cores.
    pub(crate) capacity: usize,
    pub(crate) cores: usize,
}

/// Resources that a running job uses.
#[derive(Debug, Clone)]
struct RunningJob {
    name: String,
    parts: usize,
    is_cargo: bool,
    computes: bool,
}

impl RunningJob {
    fn of(job: &Job) -> Self {
        Self {
            name: job.name.clone(),
            parts: job.parts(),
            is_cargo: job.is_cargo,
            computes: job.computes(),
        }
    }
}

/// Runs all jobs, longest first as far as capacity is free, and records the duration of each.
pub(crate) fn run(
    mut jobs: Vec<Job>,
    context: &RunContext<'_>,
    durations: &mut Durations,
) -> anyhow::Result<Vec<JobResult>> {
    // Durations come from earlier runs; an unknown job has a default.
    sort(&mut jobs, durations);
    let mut waiting = VecDeque::from(jobs);
    let (mut running, mut results): (Vec<RunningJob>, Vec<JobResult>) = (Vec::new(), Vec::new());
    let (events, ended) = channel();
    let mut spare = SpareParts::new(context.capacity);
    loop {
        while let Some(next) = decide_next(&waiting, &running, context, spare.update()) {
            let job = waiting.remove(next).context("the next job waits")?;
            println!(
                "{} {} begins, {} s expected",
                context.clock.stamp(),
                job.name,
                durations.expected(&job.name).as_secs()
            );
            running.push(RunningJob::of(&job));
            begin(
                job,
                context,
                TimeLimit::of(durations.limit(&running[running.len() - 1].name)),
                &events,
            );
        }
        if running.is_empty() {
            return Ok(results);
        }
        let (job, ended): (Job, EndedProcess) = match ended.recv_timeout(spare::INTERVAL) {
            Ok(end) => end,
            // Other programs may have left capacity free meanwhile.
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => anyhow::bail!("the end of a program was lost"),
        };
        running.retain(|running| running.name != job.name);
        let result = decide_result(job, &ended, context.timed);
        // A job that was stopped says nothing about its duration.
        if matches!(ended.end, ProcessEnd::Exited(_)) {
            durations.record(&result.job.name, result.counted);
        }
        print_result(&result, context.clock);
        results.push(result);
    }
}

/// Runs a check, which is no test, while the caller continues.
pub(crate) fn run_check(
    job: Job,
    logs: &Path,
    clock: RunClock,
    expected: Duration,
    hard: Duration,
) -> JobResult {
    println!(
        "{} {} begins, {} s expected",
        clock.stamp(),
        job.name,
        expected.as_secs()
    );
    let ended = execute_in(
        &job,
        &logs.join(format!("{}.log", job.name)),
        &[],
        TimeLimit::of(hard),
    );
    let result = decide_result(job, &ended, &TimedTests::default());
    print_result(&result, clock);
    result
}

/// Runs a job once more, alone, with its log beside that of the first run.
pub(crate) fn run_alone(job: Job, context: &RunContext<'_>, hard: Duration) -> JobResult {
    println!(
        "{} {} runs once more, alone",
        context.clock.stamp(),
        job.name
    );
    let ended = execute(
        &job,
        context,
        TimeLimit::of(hard),
        &format!("{}.second", job.name),
    );
    let result = decide_result(job, &ended, context.timed);
    print_result(&result, context.clock);
    result
}

/// Sorts jobs by the order in which they begin. Jobs with many parts come first, because the
/// capacity for them is never free later. Long jobs come before short ones, so that none of them is
/// the last.
fn sort(jobs: &mut [Job], durations: &Durations) {
    jobs.sort_by_cached_key(|job| {
        (
            std::cmp::Reverse((job.parts().max(WORKS), durations.expected(&job.name))),
            job.name.clone(),
        )
    });
}

/// Estimates from the last durations how long the jobs take side by side.
pub(crate) fn expected(jobs: &[Job], durations: &Durations, capacity: usize) -> Duration {
    let seconds = |job: &Job| durations.expected(&job.name).as_secs_f64();
    let all: f64 = jobs
        .iter()
        .map(|job| seconds(job) * job.parts() as f64)
        .sum();
    let longest = jobs.iter().map(seconds).fold(0.0, f64::max);
    Duration::from_secs_f64((all / capacity as f64).max(longest))
}

/// Returns the job that begins next: the first that fits into the free capacity. Jobs that only
/// compute run one at a time beside others, and one per core when no other job waits. Spare parts
/// are not used by a job with more parts than [`WORKS`], nor while one runs.
fn decide_next(
    waiting: &VecDeque<Job>,
    running: &[RunningJob],
    context: &RunContext<'_>,
    spare: usize,
) -> Option<usize> {
    let spare = if running.iter().any(|job| job.parts > WORKS) {
        0
    } else {
        spare
    };
    let free = (context.capacity + spare).saturating_sub(running.iter().map(|job| job.parts).sum());
    let is_cargo_running = running.iter().any(|job| job.is_cargo);
    let computing = running
        .iter()
        .filter(|job| job.computes && !job.is_cargo)
        .count();
    let is_rest = free >= WORKS && waiting.iter().all(Job::computes);
    let computing_max = if is_rest { context.cores.max(1) } else { 1 };
    waiting.iter().position(|job| {
        let has_turn = if job.is_cargo {
            !is_cargo_running
        } else {
            !job.computes() || computing < computing_max
        };
        job.parts() <= free && has_turn
    })
}

fn begin(
    job: Job,
    context: &RunContext<'_>,
    limit: TimeLimit,
    events: &Sender<(Job, EndedProcess)>,
) {
    let (logs, environment, events) = (
        context.logs.to_owned(),
        context.environment.clone(),
        events.clone(),
    );
    std::thread::spawn(move || {
        let ended = execute_in(
            &job,
            &logs.join(format!("{}.log", job.name)),
            &environment,
            limit,
        );
        // The receiver is gone only after the run has failed.
        let _ = events.send((job, ended));
    });
}

fn execute(job: &Job, context: &RunContext<'_>, limit: TimeLimit, name: &str) -> EndedProcess {
    execute_in(
        job,
        &context.logs.join(format!("{name}.log")),
        &context.environment,
        limit,
    )
}

fn execute_in(
    job: &Job,
    log: &Path,
    environment: &[(&'static str, OsString)],
    limit: TimeLimit,
) -> EndedProcess {
    let all: Vec<(&str, OsString)> = environment
        .iter()
        .chain(&job.environment)
        .cloned()
        .collect();
    process::run(&job.words(), &job.folder, &all, log, limit)
}

fn print_result(result: &JobResult, clock: RunClock) {
    let (
        name,
        Count {
            passed,
            failed,
            skipped,
            ..
        },
    ) = (&result.job.name, result.count);
    println!(
        "{} {name}, {} s: {passed} passed, {failed} failed, {skipped} skipped",
        clock.stamp(),
        result.took.as_secs()
    );
    result.skips.iter().for_each(|line| println!("    {line}"));
    let is_check = result.job.output != JobOutput::Tests;
    for failure in &result.failures {
        println!("    {} {}", failure.test, failure.line());
        failure
            .message
            .iter()
            .take(SHOWN_MAX)
            .filter(|_| is_check)
            .for_each(|line| println!("    {line}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::jobs::{E2E_SUITE, WAITS};
    use crate::verdict::{decide_second_pass, join};

    fn named(names: &[&str]) -> VecDeque<Job> {
        let job = |name: &&str| Job {
            suite: "unit",
            name: (*name).to_owned(),
            is_cargo: ["doc", "plain"].contains(name),
            ..Job::default()
        };
        names.iter().map(job).collect()
    }

    fn with_context<T>(name: &str, use_it: impl FnOnce(&RunContext<'_>) -> T) -> T {
        let logs = std::env::temp_dir().join(format!("canal-xtask-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&logs).unwrap();
        let clock = RunClock::new(Duration::ZERO);
        let environment = vec![("CANAL_RUN_ID", OsString::from("a1"))];
        let timed = TimedTests::default();
        let result = use_it(&RunContext {
            logs: &logs,
            clock,
            timed: &timed,
            environment,
            capacity: 6,
            cores: 2,
        });
        std::fs::remove_dir_all(logs).unwrap();
        result
    }

    fn running_jobs(parts: usize) -> Vec<RunningJob> {
        vec![RunningJob {
            name: "another".into(),
            parts,
            is_cargo: false,
            computes: false,
        }]
    }

    #[test]
    fn first_job_that_fits_is_next() {
        with_context("fits", |context| {
            let waiting = named(&["unknown", "canal-e2e identity"]);
            for (free, expected) in [(6, Some(0)), (WORKS, Some(0)), (WAITS, Some(1)), (0, None)] {
                assert_eq!(
                    decide_next(&waiting, &running_jobs(6 - free), context, 0),
                    expected,
                    "{free} free"
                );
            }
            assert_eq!(decide_next(&named(&[]), &[], context, 0), None);
        });
    }

    #[test]
    fn spare_parts_are_used_but_not_beside_a_job_that_needs_more_than_others() {
        with_context("spare", |context| {
            let waiting = named(&["unknown"]);
            let two = |parts: [usize; 2]| [running_jobs(parts[0]), running_jobs(parts[1])].concat();
            for (running, spare, expected) in [
                (two([3, 3]), 0, None),
                (two([2, 2]), 0, Some(0)),
                (two([4, 2]), 2, None),
            ] {
                assert_eq!(
                    decide_next(&waiting, &running, context, spare),
                    expected,
                    "{running:?}"
                );
            }
            let three = [two([2, 2]), running_jobs(2)].concat();
            assert_eq!(
                (
                    decide_next(&waiting, &three, context, 1),
                    decide_next(&waiting, &three, context, 2)
                ),
                (None, Some(0))
            );
        });
    }

    #[test]
    fn the_longest_job_begins_first() {
        let mut durations = Durations::default();
        durations.record("b", Duration::from_secs(70));
        durations.record("canal-e2e identity", Duration::from_secs(140));
        let mut jobs = Vec::from(named(&["a", "canal-e2e identity", "b"]));
        sort(&mut jobs, &durations);
        assert_eq!(
            jobs.iter().map(|job| job.name.as_str()).collect::<Vec<_>>(),
            ["canal-e2e identity", "b", "a"]
        );
        assert_eq!(
            expected(&jobs, &durations, 6),
            Duration::from_secs(140),
            "no run is shorter than its longest job"
        );
        assert_eq!(
            expected(&jobs, &durations, 1),
            Duration::from_secs(140 + 2 * 70 + 2 * 5)
        );
    }

    #[test]
    fn one_cpu_bound_job_runs_at_a_time_until_only_such_jobs_wait() {
        with_context("computes", |context| {
            let waiting = named(&["doc", "plain", "canal-model", "canal-wire", "canal-e2e dns"]);
            let cargo = [RunningJob::of(&waiting[0])];
            assert_eq!(decide_next(&waiting, &[], context, 0), Some(0));
            assert_eq!(
                decide_next(&waiting, &cargo, context, 0),
                Some(2),
                "two commands of cargo's never run at once"
            );
            let both = [RunningJob::of(&waiting[0]), RunningJob::of(&waiting[2])];
            assert_eq!(decide_next(&waiting, &both, context, 0), Some(4));
            let rest = named(&["canal-wire"]);
            assert_eq!(
                decide_next(&rest, &both, context, 0),
                Some(0),
                "no other waits"
            );
            assert_eq!(
                decide_next(
                    &rest,
                    &[RunningJob::of(&waiting[2]), RunningJob::of(&waiting[3])],
                    context,
                    0
                ),
                None
            );
        });
    }

    /// Returns a fake test program: a script that prints the same output as libtest.
    fn planted(suite: &'static str, name: &str, script: &str) -> Job {
        let command = ["sh", "-c", script].map(OsString::from).to_vec();
        Job {
            suite,
            name: name.into(),
            command,
            folder: "/".into(),
            tests: vec!["one".into()],
            ..Job::default()
        }
    }

    const FAILS: &str = "printf 'test one ... FAILED\\n\\nfailures:\\n\\n---- one stdout ----\\nthread '; printf \"'one' (7) panicked at a.rs:1:1:\\nlost\\n\\n\
        failures:\\n    one\\n\\ntest result: FAILED. 0 passed; 1 failed; 0 ignored;\\n\"; exit 101";
    const PASSES: &str =
        "printf 'test one ... ok\\n\\ntest result: ok. 1 passed; 0 failed; 0 ignored;\\n'";

    #[test]
    fn planted_programs_are_checked_in_two_passes() {
        with_context("planted", |context| {
            // The mark exists after the first attempt, so that only that one fails.
            let mark = context.logs.join("mark");
            let once = format!(
                "if mkdir {} 2>/dev/null; then {FAILS}; else {PASSES}; fi",
                mark.display()
            );
            let jobs = vec![
                planted("unit", "good", PASSES),
                planted("unit", "bad", FAILS),
                planted(E2E_SUITE, "shaky", &once),
            ];
            let mut durations = Durations::default();
            let mut results = run(jobs, context, &mut durations).unwrap();
            // Jobs end in any order.
            results.sort_by_key(|result| result.job.name.clone());
            assert_eq!(
                results
                    .iter()
                    .map(|result| result.count.failed)
                    .collect::<Vec<_>>(),
                [1, 0, 1]
            );
            assert_eq!(results[0].failures[0].line(), "a.rs:1:1: lost");
            // Failed jobs run once more: `bad` fails again, and `shaky` is unstable.
            let again = decide_second_pass(&results);
            assert_eq!(again, [0, 2]);
            let mut ends = again.into_iter().map(|n| {
                let second = run_alone(results[n].retry(), context, Duration::from_secs(60));
                join(results[n].clone(), second)
            });
            let (bad, shaky) = (ends.next().unwrap(), ends.next().unwrap());
            assert_eq!((bad.0.count.failed, bad.1.len()), (1, 0));
            assert_eq!(
                (
                    shaky.0.count.passed,
                    shaky.0.count.failed,
                    shaky.1[0].line().as_str()
                ),
                (1, 0, "a.rs:1:1: lost")
            );
        });
    }

    #[test]
    fn a_planted_program_that_hangs_is_killed_and_its_test_named() {
        with_context("hangs", |context| {
            let job = planted("unit", "hung", "printf 'test one ... \\n'; sleep 1000");
            let limit = TimeLimit {
                hard: Duration::from_secs(1),
                grace: Duration::ZERO,
            };
            let ended = execute(&job, context, limit, "hung");
            let result = decide_result(job, &ended, context.timed);
            assert_eq!(
                (
                    result.failures[0].test.as_str(),
                    result.failures[0].line().as_str()
                ),
                ("one", "killed after 1 s")
            );
        });
    }

    #[test]
    fn a_job_has_the_run_id_and_its_output_has_an_end_marker() {
        with_context("environment", |context| {
            let job = planted("unit", "environment", "sleep 30 & echo $CANAL_RUN_ID");
            let ended = execute(
                &job,
                context,
                TimeLimit::of(Duration::from_secs(60)),
                "environment",
            );
            assert_eq!(
                (ended.end, ended.lines),
                (ProcessEnd::Exited(true), vec!["a1".to_owned()])
            );
        });
    }
}
