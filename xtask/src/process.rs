//! Runs one process in a session of its own, with its output in a file, until it ends or reaches
//! its time limit. It decides no verdict. Start at [`run`].

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Lines of a test that waits for a machine-wide lock, and that has got it. The time between them
/// does not count against the limit. `world` prints them, past libtest's capture.
const WAITS_FOR_LOCK: &str = "WAITS FOR LOCK";
const HAS_LOCK: &str = "HAS LOCK";
/// Maximum wait for such a lock, because its holder may hang.
/// Above the duration of a whole run, in which other jobs may have the lock in turn.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(3_600);
/// Interval at which a process is polled.
/// Jobs take seconds, so that it adds nothing that matters.
const POLL: Duration = Duration::from_millis(50);
/// Time in which the child processes of an ended process must clean up and end.
/// They remove their worlds meanwhile. Nobody measured this value.
const GRACE: Duration = Duration::from_secs(10);

/// Time limits of a process and of its child processes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TimeLimit {
    pub(crate) hard: Duration,
    pub(crate) grace: Duration,
}

/// The way in which a process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ProcessEnd {
    /// The process ended by itself; true if it succeeded.
    Exited(bool),
    /// The process was killed at its time limit.
    Killed(Duration),
    NotStarted(String),
}

/// A process that ended, and its output.
#[derive(Debug)]
pub(crate) struct EndedProcess {
    pub(crate) end: ProcessEnd,
    pub(crate) lines: Vec<String>,
    pub(crate) took: Duration,
    /// Time without the waits for locks.
    pub(crate) counted: Duration,
}

impl TimeLimit {
    pub(crate) fn of(hard: Duration) -> Self {
        Self { hard, grace: GRACE }
    }
}

/// The time of a process that counts against its limit: all of it except waits for locks.
#[derive(Debug, Default)]
struct LimitClock {
    counted: Duration,
    waited: Duration,
    waiting: u32,
}

impl LimitClock {
    fn advance(&mut self, time: Duration) {
        *(if self.waiting > 0 {
            &mut self.waited
        } else {
            &mut self.counted
        }) += time;
    }

    fn read_line(&mut self, line: &str) {
        // A line of libtest may precede the marker on the same line.
        if line.ends_with(WAITS_FOR_LOCK) {
            self.waiting += 1;
        } else if line.ends_with(HAS_LOCK) {
            self.waiting = self.waiting.saturating_sub(1);
        }
    }

    fn is_over(&self, limit: TimeLimit) -> bool {
        self.counted >= limit.hard || self.waited >= LOCK_WAIT_MAX
    }
}

/// Runs a command line until it ends or reaches the limit. The file `log` receives the output of
/// the process and its children. A child that keeps the output open does not delay the end.
pub(crate) fn run(
    words: &[OsString],
    folder: &Path,
    environment: &[(&str, OsString)],
    log: &Path,
    limit: TimeLimit,
) -> EndedProcess {
    let started = Instant::now();
    let mut clock = LimitClock::default();
    let end = start(words, folder, environment, log)
        .and_then(|mut child| wait(&mut child, log, limit, &mut clock));
    let end = end.unwrap_or_else(|e| ProcessEnd::NotStarted(e.to_string()));
    let output = std::fs::read(log).unwrap_or_default();
    let lines = String::from_utf8_lossy(&output)
        .lines()
        .map(str::to_owned)
        .collect();
    EndedProcess {
        end,
        lines,
        took: started.elapsed(),
        counted: clock.counted,
    }
}

/// Starts the process in a session of its own. The kernel terminates it if this thread ends.
fn start(
    words: &[OsString],
    folder: &Path,
    environment: &[(&str, OsString)],
    log: &Path,
) -> std::io::Result<Child> {
    let output = File::create(log)?;
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "TERM", "setsid"])
        .args(words)
        .current_dir(folder)
        .env("CARGO_MANIFEST_DIR", folder);
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    command
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()
}

fn wait(
    child: &mut Child,
    log: &Path,
    limit: TimeLimit,
    clock: &mut LimitClock,
) -> std::io::Result<ProcessEnd> {
    let (mut output, mut unread) = (File::open(log)?, Vec::new());
    let mut looked = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            clock.advance(looked.elapsed());
            return Ok(ProcessEnd::Exited(status.success()));
        }
        if clock.is_over(limit) {
            end_session(child, limit.grace)?;
            return Ok(ProcessEnd::Killed(limit.hard));
        }
        std::thread::sleep(POLL);
        let now = Instant::now();
        clock.advance(now - looked);
        looked = now;
        output.read_to_end(&mut unread)?;
        if let Some(end) = unread.iter().rposition(|byte| *byte == b'\n') {
            let whole: Vec<u8> = unread.drain(..=end).collect();
            String::from_utf8_lossy(&whole)
                .lines()
                .for_each(|line| clock.read_line(line.trim_end()));
        }
    }
}

/// Kills the process, and after the grace time all other processes of its session.
fn end_session(child: &mut Child, grace: Duration) -> std::io::Result<()> {
    child.kill()?;
    child.wait()?;
    let ended = Instant::now();
    while !members(child.id()).is_empty() && ended.elapsed() < grace {
        std::thread::sleep(POLL);
    }
    for member in members(child.id()) {
        // A process that has just ended needs no signal.
        let _ = kill_process(member, Signal::KILL);
    }
    Ok(())
}

/// Returns the running processes of a session.
fn members(session: u32) -> Vec<Pid> {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_member = |pid: &i32| {
        std::fs::read_to_string(format!("/proc/{pid}/stat"))
            .is_ok_and(|stat| is_of_session(&stat, session))
    };
    pids.filter(is_member).filter_map(Pid::from_raw).collect()
}

/// Reads `/proc/PID/stat`: the fields after the name in brackets are state, parent, group and
/// session.
fn is_of_session(stat: &str, session: u32) -> bool {
    let Some((_, fields)) = stat.rsplit_once(") ") else {
        return false;
    };
    let mut fields = fields.split(' ');
    fields.next().is_some_and(|state| state != "Z") && fields.nth(2) == Some(&session.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_script(name: &str, script: &str, hard: Duration) -> EndedProcess {
        let log =
            std::env::temp_dir().join(format!("canal-xtask-{}-{name}.log", std::process::id()));
        let words = ["sh", "-c", script].map(OsString::from);
        let ended = run(
            &words,
            Path::new("/"),
            &[("WORD", "two".into())],
            &log,
            TimeLimit {
                hard,
                grace: Duration::ZERO,
            },
        );
        std::fs::remove_file(log).unwrap();
        ended
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn output_of_a_process_is_read_to_its_end() {
        let ended = run_script("end", "echo one; echo $WORD >&2; exit 3", LONG);
        assert_eq!(
            (ended.end, ended.lines),
            (
                ProcessEnd::Exited(false),
                vec!["one".to_owned(), "two".to_owned()]
            )
        );
        let log = std::env::temp_dir().join(format!("canal-xtask-{}-none.log", std::process::id()));
        let none = run(
            &["true".into()],
            Path::new("/no/such/folder"),
            &[],
            &log,
            TimeLimit::of(LONG),
        );
        assert!(
            matches!(none.end, ProcessEnd::NotStarted(_)),
            "{:?}",
            none.end
        );
        std::fs::remove_file(log).unwrap();
    }

    #[test]
    fn a_process_that_hangs_is_ended_with_its_children() {
        let hard = Duration::from_millis(300);
        let ended = run_script("hang", "echo $$; sleep 1000 & sleep 1000", hard);
        assert_eq!(ended.end, ProcessEnd::Killed(hard));
        // A killed process stays a zombie until its new parent reaps it.
        let session = ended.lines[0].parse().unwrap();
        for _ in 0..1_000 {
            if members(session).is_empty() {
                return;
            }
            std::thread::sleep(POLL);
        }
        panic!("children of {session} live on");
    }

    #[test]
    fn a_child_that_holds_the_output_open_keeps_no_job() {
        let ended = run_script("child", "sleep 30 & echo $!; exit 0", LONG);
        assert_eq!(ended.end, ProcessEnd::Exited(true));
        let child = Pid::from_raw(ended.lines[0].parse().unwrap()).unwrap();
        kill_process(child, Signal::KILL).expect("the child outlived the job");
    }

    #[test]
    fn time_that_a_job_waits_for_a_lock_does_not_count() {
        let second = Duration::from_secs(1);
        let mut clock = LimitClock::default();
        clock.advance(second);
        for (line, counted, waited) in [
            ("test a ... WAITS FOR LOCK", 1, 1),
            ("WAITS FOR LOCK", 1, 2),
            ("HAS LOCK", 1, 3),
            ("test b ... ok", 1, 4),
            ("HAS LOCK", 2, 4),
        ] {
            clock.read_line(line);
            clock.advance(second);
            assert_eq!(
                (clock.counted, clock.waited),
                (second * counted, second * waited),
                "{line}"
            );
        }
        assert!(
            clock.is_over(TimeLimit::of(second * 2)) && !clock.is_over(TimeLimit::of(second * 3))
        );
        let ended = run_script(
            "lock",
            "echo WAITS FOR LOCK; sleep 1; echo HAS LOCK; exit 0",
            Duration::from_millis(500),
        );
        assert_eq!(ended.end, ProcessEnd::Exited(true));
    }

    #[test]
    fn the_session_of_a_process_is_read() {
        assert!(is_of_session("7 (a) b) S 1 6 5 0 -1", 5));
        assert!(!is_of_session("7 (a) S 1 5 6 0 -1", 5));
        assert!(!is_of_session("7 (a) Z 1 6 5 0 -1", 5), "it has ended");
    }
}
