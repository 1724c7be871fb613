//! [`ProcessSupervisor`]: runs one host's process. It waits for the start conditions, starts the process, probes it, ends it and restarts
//! it. Each host has one thread, which moves into the namespace from which it probes. A process
//! supervisor has no data of other hosts. Start at [`ProcessSupervisor::begin`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, ExitStatus};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::error::{IoContext, Result};
use crate::host_environment::{HostEnvironment, ManagedProcess, StartCondition};
use crate::topology::Restart;
use crate::{cgroup, launch, listeners, probe, sys};

/// Pause before a restart: it doubles from `PAUSE_MIN` to `PAUSE_MAX`. The first is short, because
/// tests wait for a killed process; the longest keeps a process that never starts from using the
/// CPU.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A process that ran this long is restarted with the shortest pause. Twice the longest pause.
const BACKOFF_RESET_AFTER: Duration = Duration::from_secs(10);
/// Time that a process gets to end after SIGTERM: longer than data planes drain by default. That is
/// 30 s (`--drain-seconds`), and 2 s for tasks after it.
const GRACE: Duration = Duration::from_secs(35);
/// Interval between two checks of an unmet start condition. Nobody measured the value; each start
/// condition adds half of it on average to the start of a world.
const CONDITION_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// First interval after a failed probe. It doubles with each failure, up to the probe's period. A
/// process is ready some tens of milliseconds after its start.
const RETRY_MIN: Duration = Duration::from_millis(20);
/// Failed probes in a row that make a ready host unready. One may be a machine that is busy, and a
/// readiness that flaps confuses tests.
const FAILURES_TO_UNREADY: u32 = 2;

/// Phase of a host's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessPhase {
    /// The host has no process of its own.
    #[default]
    Idle,
    /// The process waits for a start condition.
    Waiting {
        /// Start condition that is not yet met.
        until: String,
    },
    Running,
    /// The process ended, or could not be started, and is restarted soon.
    Pausing {
        /// Exit status, or the error of the start.
        how: String,
    },
    /// The process ended and is not restarted.
    Ended {
        /// Exit status, or the error of the start.
        how: String,
        /// True if the exit status is 0.
        well: bool,
    },
    /// The process was stopped on request.
    Stopped,
}

/// Current status of a host's process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessStatus {
    pub phase: ProcessPhase,
    /// Process id while the process runs.
    pub pid: Option<u32>,
    /// The process runs and its probe, if any, succeeds; or it ended with status 0 and is not
    /// restarted.
    pub ready: bool,
    /// Number of starts after the first.
    pub restarts: u32,
}

/// Status of the processes of all hosts. Any thread can wait for changes.
#[derive(Debug, Default)]
pub(crate) struct ProcessStatusTable {
    statuses: Mutex<BTreeMap<String, ProcessStatus>>,
    changed: Condvar,
}

impl ProcessStatusTable {
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, ProcessStatus>> {
        // A panicking writer leaves at worst a partly updated status.
        self.statuses
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Changes a host's status, and wakes the waiting threads if it differs.
    pub(crate) fn update(&self, host: &str, change: impl FnOnce(&mut ProcessStatus)) {
        let mut statuses = self.lock();
        let status = statuses.entry(host.to_owned()).or_default();
        let before = status.clone();
        change(status);
        if *status != before {
            self.changed.notify_all();
        }
    }

    pub(crate) fn forget(&self, host: &str) {
        self.lock().remove(host);
        self.changed.notify_all();
    }

    /// Returns after the next change, or at the latest after `timeout`.
    pub(crate) fn wait<'b>(
        &self,
        statuses: MutexGuard<'b, BTreeMap<String, ProcessStatus>>,
        timeout: Duration,
    ) -> MutexGuard<'b, BTreeMap<String, ProcessStatus>> {
        let waited = self.changed.wait_timeout(statuses, timeout);
        waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0
    }
}

/// A command for a process supervisor. The sender is notified when it is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcessCommand {
    /// Starts the process if it is not running.
    Start,
    /// Ends the process, which stays ended.
    Stop,
    /// Kills the process without SIGTERM, as if the machine under it had failed. It stays ended.
    Kill,
    /// Ends the process and starts it again at once.
    Restart,
    /// Ends the process and the process supervisor.
    Quit,
}

/// Sending side of a process supervisor's commands.
#[derive(Debug)]
pub(crate) struct ProcessCommandSender {
    queue: Sender<(ProcessCommand, Sender<()>)>,
    wakeup: PipeWriter,
}

impl ProcessCommandSender {
    /// Sends a command. The receiver gets a message when the command has been carried out, or is
    /// closed when the process supervisor has ended.
    pub(crate) fn send(&self, order: ProcessCommand) -> Receiver<()> {
        let (done, exited) = channel();
        // An error means that the process supervisor has ended, so nothing remains to be carried
        // out.
        let _ = self.queue.send((order, done));
        let _ = (&self.wakeup).write_all(&[1]);
        exited
    }
}

/// Runs the process of one host.
pub(crate) struct ProcessSupervisor {
    environment: HostEnvironment,
    job: ManagedProcess,
    statuses: Arc<ProcessStatusTable>,
    queue: Receiver<(ProcessCommand, Sender<()>)>,
    wakeup_reader: PipeReader,
    pause: Duration,
}

/// Next step of a process supervisor.
enum SupervisorStep {
    Start,
    Attend(Child, OwnedFd),
    Rest,
    Quit,
}

/// Reason why a wait ended.
enum WaitEnd {
    Order(ProcessCommand, Sender<()>),
    Exit,
    Time,
}

impl ProcessSupervisor {
    /// Starts a process supervisor on its own thread, for a host with a process.
    pub(crate) fn begin(
        environment: HostEnvironment,
        job: ManagedProcess,
        statuses: Arc<ProcessStatusTable>,
    ) -> Result<ProcessCommandSender> {
        let (wakeup_reader, wakeup_writer) =
            std::io::pipe().tried("cannot create a pipe for", &environment.name)?;
        let (queue, orders) = channel();
        let name = environment.name.clone();
        let supervisor = Self {
            environment,
            job,
            statuses,
            queue: orders,
            wakeup_reader,
            pause: PAUSE_MIN,
        };
        // A small stack, because each host has such a thread.
        let thread = std::thread::Builder::new()
            .name("life".into())
            .stack_size(256 * 1024);
        thread
            .spawn(move || supervisor.run())
            .tried("cannot start a thread for", name)?;
        Ok(ProcessCommandSender {
            queue,
            wakeup: wakeup_writer,
        })
    }

    fn run(mut self) {
        let mut next = SupervisorStep::Start;
        loop {
            next = match next {
                SupervisorStep::Start => self.start(),
                SupervisorStep::Attend(child, pidfd) => self.attend(child, &pidfd),
                SupervisorStep::Rest => self.idle(None),
                SupervisorStep::Quit => break,
            }
        }
        self.statuses.forget(&self.environment.name);
    }

    fn show(&self, phase: ProcessPhase) {
        let ready = matches!(phase, ProcessPhase::Ended { well: true, .. });
        self.statuses.update(&self.environment.name, |status| {
            *status = ProcessStatus {
                phase,
                pid: None,
                ready,
                restarts: status.restarts,
            };
        });
    }

    /// Clears the process ID and the readiness of the last process. A start is confirmed only
    /// afterwards, because the next waiter for readiness must not see that of the last process.
    fn clear_process(&self) {
        self.statuses.update(&self.environment.name, |status| {
            status.pid = None;
            status.ready = false;
        });
    }

    /// Waits for a command, the end of the process, or the timeout.
    fn wait(&mut self, pidfd: Option<&OwnedFd>, timeout: Option<Duration>) -> WaitEnd {
        if let Ok((order, done)) = self.queue.try_recv() {
            return WaitEnd::Order(order, done);
        }
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut fds = vec![PollFd::new(&self.wakeup_reader, PollFlags::IN)];
        fds.extend(pidfd.map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
        // An interrupted poll counts as a short one.
        let _ = poll(&mut fds, timeout.as_ref());
        let rang = !fds[0].revents().is_empty();
        let ended = fds.get(1).is_some_and(|fd| !fd.revents().is_empty());
        if rang {
            let mut byte = [0];
            if (&self.wakeup_reader)
                .read(&mut byte)
                .is_ok_and(|count| count == 0)
            {
                // The sending side is gone: no command can arrive any more.
                return WaitEnd::Order(ProcessCommand::Quit, channel().0);
            }
            if let Ok((order, done)) = self.queue.try_recv() {
                return WaitEnd::Order(order, done);
            }
        }
        if ended { WaitEnd::Exit } else { WaitEnd::Time }
    }

    /// Waits without a running process until a command arrives or the pause is over.
    fn idle(&mut self, pause: Option<Duration>) -> SupervisorStep {
        let until = pause.map(|pause| Instant::now() + pause);
        loop {
            match self.wait(
                None,
                until.map(|until| until.saturating_duration_since(Instant::now())),
            ) {
                WaitEnd::Order(order, done) => {
                    let next = idle_order(order);
                    if matches!(next, SupervisorStep::Rest) {
                        self.show(ProcessPhase::Stopped);
                    } else {
                        // A process that ended with status 0 counts as ready.
                        self.clear_process();
                    }
                    let _ = done.send(());
                    return next;
                }
                WaitEnd::Exit | WaitEnd::Time
                    if until.is_some_and(|until| Instant::now() >= until) =>
                {
                    return SupervisorStep::Start;
                }
                WaitEnd::Exit | WaitEnd::Time => {}
            }
        }
    }

    /// Waits for the start conditions, then starts the process.
    fn start(&mut self) -> SupervisorStep {
        // Listener conditions are checked in the host's own namespace.
        if let Err(error) = sys::move_thread_into(&self.environment.netns) {
            return self.after_end(
                &format!("cannot enter {}: {error}", self.environment.netns.display()),
                false,
            );
        }
        while let Some(unmet) = self
            .job
            .after
            .iter()
            .find(|condition| !condition_holds(condition))
        {
            let until = unmet.to_string();
            // The phase names the condition, so that `canal world status` shows what is missing.
            self.show(ProcessPhase::Waiting { until });
            if let WaitEnd::Order(order, done) = self.wait(None, Some(CONDITION_POLL_INTERVAL)) {
                let next = idle_order(order);
                if matches!(next, SupervisorStep::Rest) {
                    self.show(ProcessPhase::Stopped);
                }
                // The sender of the order may have given up waiting.
                let _ = done.send(());
                // An order to start changes nothing here: the process still waits for its
                // conditions.
                if !matches!(next, SupervisorStep::Start) {
                    return next;
                }
            }
        }
        match self.spawn() {
            Ok((child, pidfd)) => {
                // A pod is probed from its node, so that the capture in the pod is not involved.
                // Without that namespace the probes still run, from the host's own.
                if let Err(error) = sys::move_thread_into(&self.environment.probe_netns) {
                    self.note(&format!("the readiness probe from inside failed: {error}"));
                }
                // A process without a probe is ready as soon as it runs.
                let ready = self.job.process.readiness.is_none();
                self.statuses.update(&self.environment.name, |status| {
                    *status = ProcessStatus {
                        phase: ProcessPhase::Running,
                        pid: Some(child.id()),
                        ready,
                        restarts: status.restarts,
                    };
                });
                SupervisorStep::Attend(child, pidfd)
            }
            Err(error) => self.after_end(&error.to_string(), false),
        }
    }

    fn spawn(&self) -> Result<(Child, OwnedFd)> {
        let mut command = launch::command(&self.environment, &self.job.argv)?;
        launch::log_to(&mut command, &self.environment)?;
        self.note(&format!("start: {}", self.job.argv.join(" ")));
        let child = command.spawn().tried("cannot start", &self.job.argv[0])?;
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())
            .tried("cannot watch", &self.job.argv[0])?;
        Ok((child, pidfd))
    }

    /// Writes a line of the supervisor's own to the host's log.
    fn note(&self, text: &str) {
        let opened = File::options()
            .create(true)
            .append(true)
            .open(&self.environment.log);
        // The process itself notices when its log cannot be written.
        let _ = opened.and_then(|mut file| writeln!(file, "[world] {text}"));
    }

    /// Probes the running process until it ends or a command arrives.
    fn attend(&mut self, mut child: Child, pidfd: &OwnedFd) -> SupervisorStep {
        let born = Instant::now();
        let mut probe_at = Instant::now();
        let mut failures = 0;
        loop {
            let timeout = self
                .job
                .process
                .readiness
                .is_some()
                .then(|| probe_at.saturating_duration_since(Instant::now()));
            match self.wait(Some(pidfd), timeout) {
                WaitEnd::Exit => {
                    if born.elapsed() > BACKOFF_RESET_AFTER {
                        self.pause = PAUSE_MIN;
                    }
                    let status = child.wait();
                    let well = status.as_ref().is_ok_and(ExitStatus::success);
                    let how =
                        status.map_or_else(|error| error.to_string(), |status| status.to_string());
                    self.sweep_out();
                    return self.after_end(&how, well);
                }
                // The process already runs.
                WaitEnd::Order(ProcessCommand::Start, done) => {
                    let _ = done.send(());
                }
                WaitEnd::Order(order, done) => {
                    self.end(&mut child, pidfd, order != ProcessCommand::Kill);
                    let next = self.after_order(order);
                    let _ = done.send(());
                    return next;
                }
                WaitEnd::Time => probe_at = self.probe(&mut failures),
            }
        }
    }

    /// Probes once, and returns when to probe next.
    fn probe(&self, failures: &mut u32) -> Instant {
        let started = Instant::now();
        let Some(readiness) = &self.job.process.readiness else {
            return started;
        };
        let good = probe::holds(&readiness.check, &self.environment);
        *failures = if good { 0 } else { failures.saturating_add(1) };
        let mut ready = good;
        self.statuses.update(&self.environment.name, |status| {
            // One failed probe does not make a ready host unready.
            status.ready = good || (status.ready && *failures < FAILURES_TO_UNREADY);
            ready = status.ready;
        });
        let period = Duration::from_millis(readiness.period_ms);
        let retry = RETRY_MIN * (1 << (*failures).min(10));
        started + if ready { period } else { period.min(retry) }
    }

    /// Ends the process with SIGTERM first if `politely`, then with SIGKILL, together with
    /// everything that it left in its cgroup.
    fn end(&mut self, child: &mut Child, pidfd: &OwnedFd, politely: bool) {
        if politely {
            probe::signal(pidfd, Signal::TERM);
            let deadline = Timespec::try_from(GRACE).ok();
            let _ = poll(&mut [PollFd::new(pidfd, PollFlags::IN)], deadline.as_ref());
        }
        probe::signal(pidfd, Signal::KILL);
        self.sweep_out();
        // The process has been killed, so waiting cannot hang. Its status is not needed.
        let _ = child.wait();
    }

    /// Kills what a process leaves behind, like a container runtime.
    fn sweep_out(&self) {
        if let Err(error) = cgroup::kill(&self.environment.cgroup) {
            self.note(&error.to_string());
        }
    }

    fn after_order(&mut self, order: ProcessCommand) -> SupervisorStep {
        self.pause = PAUSE_MIN;
        match order {
            ProcessCommand::Start | ProcessCommand::Restart => {
                self.statuses
                    .update(&self.environment.name, |status| status.restarts += 1);
                self.clear_process();
                SupervisorStep::Start
            }
            ProcessCommand::Stop | ProcessCommand::Kill => {
                self.show(ProcessPhase::Stopped);
                SupervisorStep::Rest
            }
            ProcessCommand::Quit => SupervisorStep::Quit,
        }
    }

    fn after_end(&mut self, how: &str, well: bool) -> SupervisorStep {
        self.note(&format!("ended: {how}"));
        let how = how.to_owned();
        match self.job.process.restart {
            Restart::Never => {
                self.show(ProcessPhase::Ended { how, well });
                SupervisorStep::Rest
            }
            Restart::Always => {
                self.show(ProcessPhase::Pausing { how });
                let pause = self.pause;
                self.pause = (pause * 2).min(PAUSE_MAX);
                let next = self.idle(Some(pause));
                if matches!(next, SupervisorStep::Start) {
                    self.statuses
                        .update(&self.environment.name, |status| status.restarts += 1);
                }
                next
            }
        }
    }
}

/// Returns what a command means while no process runs.
fn idle_order(order: ProcessCommand) -> SupervisorStep {
    match order {
        ProcessCommand::Start | ProcessCommand::Restart => SupervisorStep::Start,
        ProcessCommand::Stop | ProcessCommand::Kill => SupervisorStep::Rest,
        ProcessCommand::Quit => SupervisorStep::Quit,
    }
}

fn condition_holds(condition: &StartCondition) -> bool {
    match condition {
        StartCondition::File(path) => path.exists(),
        StartCondition::Listener(port) => listeners::has_listener(*port),
    }
}
