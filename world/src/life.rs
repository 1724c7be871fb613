//! The life of one host's process: wait, start, attend, end, start again. One thread per host,
//! which moves into the namespaces it looks from. Knows nothing of the other hosts.

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

use crate::error::{Result, Tried};
use crate::seat::{Condition, Job, Seat};
use crate::topology::Restart;
use crate::{cgroup, launch, probe, sys};

/// Waits between restarts: doubling from the first to the last.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// A process that lived this long starts again with the shortest pause.
const LIVED_WELL: Duration = Duration::from_secs(10);
/// How long a process may take to end after SIGTERM: longer than data planes drain by default.
const GRACE: Duration = Duration::from_secs(35);
/// How often an unmet condition is looked at.
const IMPATIENCE: Duration = Duration::from_millis(50);
/// A probe that fails is asked again after this time, doubled each time up to its period.
const RETRY_MIN: Duration = Duration::from_millis(20);
/// Failed probes in a row that make a ready host unready.
const FAILURES_TO_UNREADY: u32 = 2;

/// Where a host's process stands.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Phase {
    /// The host has no process of its own.
    #[default]
    Idle,
    /// Something must hold before the start.
    Waiting {
        /// What.
        until: String,
    },
    /// It runs.
    Running,
    /// It ended, or could not be started, and starts again soon.
    Pausing {
        /// How it ended.
        how: String,
    },
    /// It ended and stays so.
    Ended {
        /// How it ended.
        how: String,
        /// With exit status 0.
        well: bool,
    },
    /// It was stopped on request.
    Stopped,
}

/// What is known about a host's process right now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pulse {
    /// Where it stands.
    pub phase: Phase,
    /// Its process id while it runs.
    pub pid: Option<u32>,
    /// It runs and its probe, if any, succeeds; or it ended well and need not run.
    pub ready: bool,
    /// Starts after the first.
    pub restarts: u32,
}

/// The pulses of all hosts; everyone may wait for changes.
#[derive(Debug, Default)]
pub(crate) struct Board {
    pulses: Mutex<BTreeMap<String, Pulse>>,
    changed: Condvar,
}

impl Board {
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Pulse>> {
        // A panicking writer leaves a pulse half told at worst.
        self.pulses.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Changes a host's pulse, and wakes waiters if it differs.
    pub(crate) fn update(&self, host: &str, change: impl FnOnce(&mut Pulse)) {
        let mut pulses = self.lock();
        let pulse = pulses.entry(host.to_owned()).or_default();
        let before = pulse.clone();
        change(pulse);
        if *pulse != before {
            self.changed.notify_all();
        }
    }

    pub(crate) fn forget(&self, host: &str) {
        self.lock().remove(host);
        self.changed.notify_all();
    }

    /// Wakes after the next change or at the latest after `timeout`.
    pub(crate) fn wait<'b>(
        &self,
        pulses: MutexGuard<'b, BTreeMap<String, Pulse>>,
        timeout: Duration,
    ) -> MutexGuard<'b, BTreeMap<String, Pulse>> {
        let waited = self.changed.wait_timeout(pulses, timeout);
        waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0
    }
}

/// What a life is told to do. The sender hears back when it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Run, if not running.
    Start,
    /// End, and stay ended.
    Stop,
    /// End without warning, and stay ended: the machine under it is gone.
    Fall,
    /// End and run again at once.
    Restart,
    /// End, and end the life too.
    Quit,
}

/// The sending side of a life's orders.
#[derive(Debug)]
pub(crate) struct Orders {
    queue: Sender<(Order, Sender<()>)>,
    bell: PipeWriter,
}

impl Orders {
    /// Gives an order; the receiver tells when it has been carried out (or the life is over).
    pub(crate) fn give(&self, order: Order) -> Receiver<()> {
        let (done, heard) = channel();
        // A life that is over has carried out every order there could be.
        let _ = self.queue.send((order, done));
        let _ = (&self.bell).write_all(&[1]);
        heard
    }
}

/// One host's life.
pub(crate) struct Life {
    seat: Seat,
    job: Job,
    board: Arc<Board>,
    queue: Receiver<(Order, Sender<()>)>,
    bell: PipeReader,
    pause: Duration,
}

/// What comes next.
enum Next {
    Start,
    Attend(Child, OwnedFd),
    Rest,
    Quit,
}

/// Why a wait is over.
enum Event {
    Order(Order, Sender<()>),
    Exit,
    Time,
}

impl Life {
    /// Starts the life of a seat with a job, on its own thread.
    pub(crate) fn begin(seat: Seat, job: Job, board: Arc<Board>) -> Result<Orders> {
        let (bell, ring) = std::io::pipe().tried("cannot make a pipe for", &seat.name)?;
        let (queue, orders) = channel();
        let name = seat.name.clone();
        let life = Self { seat, job, board, queue: orders, bell, pause: PAUSE_MIN };
        // A small stack: there is one such thread per host.
        let thread = std::thread::Builder::new().name("life".into()).stack_size(256 * 1024);
        thread.spawn(move || life.run()).tried("cannot start a thread for", name)?;
        Ok(Orders { queue, bell: ring })
    }

    fn run(mut self) {
        let mut next = Next::Start;
        loop {
            next = match next {
                Next::Start => self.start(),
                Next::Attend(child, pidfd) => self.attend(child, &pidfd),
                Next::Rest => self.idle(None),
                Next::Quit => break,
            }
        }
        self.board.forget(&self.seat.name);
    }

    fn show(&self, phase: Phase) {
        let ready = matches!(phase, Phase::Ended { well: true, .. });
        self.board.update(&self.seat.name, |pulse| {
            *pulse = Pulse { phase, pid: None, ready, restarts: pulse.restarts };
        });
    }

    /// Waits for an order, the end of the process, or the time.
    fn wait(&mut self, pidfd: Option<&OwnedFd>, timeout: Option<Duration>) -> Event {
        if let Ok((order, done)) = self.queue.try_recv() {
            return Event::Order(order, done);
        }
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut fds = vec![PollFd::new(&self.bell, PollFlags::IN)];
        fds.extend(pidfd.map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
        // An interrupted poll is a short one.
        let _ = poll(&mut fds, timeout.as_ref());
        let rang = !fds[0].revents().is_empty();
        let ended = fds.get(1).is_some_and(|fd| !fd.revents().is_empty());
        if rang {
            let mut byte = [0];
            if (&self.bell).read(&mut byte).is_ok_and(|count| count == 0) {
                // The supervisor's side is gone: nobody will ever ask again.
                return Event::Order(Order::Quit, channel().0);
            }
            if let Ok((order, done)) = self.queue.try_recv() {
                return Event::Order(order, done);
            }
        }
        if ended { Event::Exit } else { Event::Time }
    }

    /// Not running: until an order comes, or the pause is over.
    fn idle(&mut self, pause: Option<Duration>) -> Next {
        let until = pause.map(|pause| Instant::now() + pause);
        loop {
            match self.wait(None, until.map(|until| until.saturating_duration_since(Instant::now()))) {
                Event::Order(order, done) => {
                    let next = idle_order(order);
                    if matches!(next, Next::Rest) {
                        self.show(Phase::Stopped);
                    }
                    let _ = done.send(());
                    return next;
                }
                Event::Exit | Event::Time if until.is_some_and(|until| Instant::now() >= until) => return Next::Start,
                Event::Exit | Event::Time => {}
            }
        }
    }

    /// Waits for the conditions, then starts the process and takes up the post to attend it.
    fn start(&mut self) -> Next {
        if let Err(error) = sys::move_thread_into(&self.seat.netns) {
            return self.after_end(&format!("cannot enter {}: {error}", self.seat.netns.display()), false);
        }
        while let Some(unmet) = self.job.after.iter().find(|condition| !met(condition)) {
            let until = unmet.to_string();
            self.show(Phase::Waiting { until });
            if let Event::Order(order, done) = self.wait(None, Some(IMPATIENCE)) {
                let next = idle_order(order);
                if matches!(next, Next::Rest) {
                    self.show(Phase::Stopped);
                }
                let _ = done.send(());
                if !matches!(next, Next::Start) {
                    return next;
                }
            }
        }
        match self.spawn() {
            Ok((child, pidfd)) => {
                if let Err(error) = sys::move_thread_into(&self.seat.vantage) {
                    self.note(&format!("readiness is asked from inside: {error}"));
                }
                let ready = self.job.process.readiness.is_none();
                self.board.update(&self.seat.name, |pulse| {
                    *pulse = Pulse { phase: Phase::Running, pid: Some(child.id()), ready, restarts: pulse.restarts };
                });
                Next::Attend(child, pidfd)
            }
            Err(error) => self.after_end(&error.to_string(), false),
        }
    }

    fn spawn(&self) -> Result<(Child, OwnedFd)> {
        let mut command = launch::command(&self.seat, &self.job.argv)?;
        launch::log_to(&mut command, &self.seat)?;
        self.note(&format!("start: {}", self.job.argv.join(" ")));
        let child = command.spawn().tried("cannot start", &self.job.argv[0])?;
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).tried("cannot watch", &self.job.argv[0])?;
        Ok((child, pidfd))
    }

    /// A line of ours in the host's log.
    fn note(&self, text: &str) {
        let opened = File::options().create(true).append(true).open(&self.seat.log);
        // A log that cannot be written is seen by the process itself.
        let _ = opened.and_then(|mut file| writeln!(file, "[world] {text}"));
    }

    /// The process runs: probe it until it ends or an order comes.
    fn attend(&mut self, mut child: Child, pidfd: &OwnedFd) -> Next {
        let born = Instant::now();
        let mut probe_at = Instant::now();
        let mut failures = 0;
        loop {
            let timeout = self.job.process.readiness.is_some().then(|| probe_at.saturating_duration_since(Instant::now()));
            match self.wait(Some(pidfd), timeout) {
                Event::Exit => {
                    if born.elapsed() > LIVED_WELL {
                        self.pause = PAUSE_MIN;
                    }
                    let status = child.wait();
                    let well = status.as_ref().is_ok_and(ExitStatus::success);
                    let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
                    self.sweep_out();
                    return self.after_end(&how, well);
                }
                Event::Order(Order::Start, done) => {
                    let _ = done.send(());
                }
                Event::Order(order, done) => {
                    self.end(&mut child, pidfd, order != Order::Fall);
                    let next = self.after_order(order);
                    let _ = done.send(());
                    return next;
                }
                Event::Time => probe_at = self.probe(&mut failures),
            }
        }
    }

    /// Probes once; returns when to probe next.
    fn probe(&self, failures: &mut u32) -> Instant {
        let started = Instant::now();
        let Some(readiness) = &self.job.process.readiness else { return started };
        let good = probe::holds(&readiness.check, &self.seat);
        *failures = if good { 0 } else { failures.saturating_add(1) };
        let mut ready = good;
        self.board.update(&self.seat.name, |pulse| {
            pulse.ready = good || (pulse.ready && *failures < FAILURES_TO_UNREADY);
            ready = pulse.ready;
        });
        let period = Duration::from_millis(readiness.period_ms);
        let retry = RETRY_MIN * (1 << (*failures).min(10));
        started + if ready { period } else { period.min(retry) }
    }

    /// Ends the process: politely if so wished, then not, with all it left in the cgroup.
    fn end(&mut self, child: &mut Child, pidfd: &OwnedFd, politely: bool) {
        if politely {
            probe::signal(pidfd, Signal::TERM);
            let deadline = Timespec::try_from(GRACE).ok();
            let _ = poll(&mut [PollFd::new(pidfd, PollFlags::IN)], deadline.as_ref());
        }
        probe::signal(pidfd, Signal::KILL);
        self.sweep_out();
        // It has been killed: waiting cannot hang, and the status no longer matters.
        let _ = child.wait();
    }

    /// What a process leaves behind dies with it, as in a container.
    fn sweep_out(&self) {
        if let Err(error) = cgroup::kill(&self.seat.cgroup) {
            self.note(&error.to_string());
        }
    }

    fn after_order(&mut self, order: Order) -> Next {
        self.pause = PAUSE_MIN;
        match order {
            Order::Start | Order::Restart => {
                self.board.update(&self.seat.name, |pulse| pulse.restarts += 1);
                Next::Start
            }
            Order::Stop | Order::Fall => {
                self.show(Phase::Stopped);
                Next::Rest
            }
            Order::Quit => Next::Quit,
        }
    }

    fn after_end(&mut self, how: &str, well: bool) -> Next {
        self.note(&format!("ended: {how}"));
        let how = how.to_owned();
        match self.job.process.restart {
            Restart::Never => {
                self.show(Phase::Ended { how, well });
                Next::Rest
            }
            Restart::Always => {
                self.show(Phase::Pausing { how });
                let pause = self.pause;
                self.pause = (pause * 2).min(PAUSE_MAX);
                let next = self.idle(Some(pause));
                if matches!(next, Next::Start) {
                    self.board.update(&self.seat.name, |pulse| pulse.restarts += 1);
                }
                next
            }
        }
    }
}

/// What an order means to a process that does not run.
fn idle_order(order: Order) -> Next {
    match order {
        Order::Start | Order::Restart => Next::Start,
        Order::Stop | Order::Fall => Next::Rest,
        Order::Quit => Next::Quit,
    }
}

fn met(condition: &Condition) -> bool {
    match condition {
        Condition::File(path) => path.exists(),
        Condition::Listener(port) => probe::has_listener(*port),
    }
}
