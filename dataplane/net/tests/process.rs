//! Behavior of a whole process: its end on signals and on a panic. Each case runs this test binary
//! again as a child process.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use canal_net::worker::{EXIT_PANIC, WorkerConfig, Workers};
use canal_runtime::drain;

const ROLE: &str = "CANAL_NET_TEST_ROLE";

/// Runs `test` of this binary again as a child process.
fn child(test: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", &format!("process::{test}"), "--nocapture"])
        .env(ROLE, "child")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn is_child() -> bool {
    std::env::var_os(ROLE).is_some()
}

/// Lines that a child prints.
struct ChildOutput(std::io::Lines<BufReader<ChildStdout>>);

impl ChildOutput {
    fn of(child: &mut Child) -> Self {
        Self(BufReader::new(child.stdout.take().unwrap()).lines())
    }

    /// Waits until the child has printed a line with the text.
    fn until(&mut self, text: &str) {
        assert!(
            self.0
                .by_ref()
                .map_while(Result::ok)
                .any(|line| line.contains(text)),
            "{text}"
        );
    }
}

fn terminate(child: &Child) {
    let id = child.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-TERM", &id])
            .status()
            .unwrap()
            .success()
    );
}

#[test]
fn a_panicking_root_ends_the_process_with_its_own_status() {
    if is_child() {
        let (_trigger, drain) = drain::tree();
        let config = WorkerConfig {
            count: 1,
            name: "w",
            pin: false,
        };
        let workers = Workers::start(config, drain, |_| async { panic!("on purpose") }).unwrap();
        workers.join();
        unreachable!("the process has ended");
    }
    let status = child("a_panicking_root_ends_the_process_with_its_own_status")
        .wait()
        .unwrap();
    assert_eq!(status.code(), Some(EXIT_PANIC));
}

/// Serves until it is drained, with one task that needs `work` to finish. It exits with 0 if all
/// tasks ended in order, and with 3 otherwise.
fn drained_process(work: Duration, limit: Duration) -> ! {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let done = runtime.block_on(async {
        let signals = drain::TerminationSignals::catch().unwrap();
        let (trigger, drain) = drain::tree();
        tokio::spawn(async move {
            drain.draining().await;
            println!("draining");
            tokio::select! {
                () = tokio::time::sleep(work) => {}
                () = drain.forced() => {
                    // This task ignores the forced drain.
                    std::future::pending::<()>().await;
                }
            }
        });
        let ending = tokio::spawn(drain::on_signals(
            signals,
            trigger,
            limit,
            Duration::from_millis(100),
        ));
        println!("ready");
        ending.await.unwrap()
    });
    std::process::exit(if done { 0 } else { 3 })
}

#[test]
fn sigterm_drains_and_work_in_hand_finishes() {
    if is_child() {
        drained_process(Duration::from_millis(300), Duration::from_secs(20));
    }
    let mut child = child("sigterm_drains_and_work_in_hand_finishes");
    let mut output = ChildOutput::of(&mut child);
    output.until("ready");
    let start = Instant::now();
    terminate(&child);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let waited = start.elapsed();
    assert!(
        waited >= Duration::from_millis(250),
        "{waited:?}: the work was cut short"
    );
    canal_timing::assert_time(
        "time until a drained process has ended",
        waited,
        Duration::from_secs(10),
    );
}

#[test]
fn a_second_signal_forces() {
    if is_child() {
        drained_process(Duration::from_secs(60), Duration::from_secs(60));
    }
    let mut child = child("a_second_signal_forces");
    let mut output = ChildOutput::of(&mut child);
    output.until("ready");
    let start = Instant::now();
    terminate(&child);
    // Two pending signals of one kind are one signal.
    output.until("draining");
    terminate(&child);
    assert_eq!(child.wait().unwrap().code(), Some(3));
    canal_timing::assert_time(
        "time until a process ends after a second signal",
        start.elapsed(),
        Duration::from_secs(10),
    );
}

#[test]
fn the_deadline_forces() {
    if is_child() {
        drained_process(Duration::from_secs(60), Duration::from_millis(200));
    }
    let mut child = child("the_deadline_forces");
    let mut output = ChildOutput::of(&mut child);
    output.until("ready");
    terminate(&child);
    assert_eq!(child.wait().unwrap().code(), Some(3));
}
