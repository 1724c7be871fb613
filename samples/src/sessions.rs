//! Many long-lived TCP sessions with an echo server. It opens them at a rate and exchanges a
//! message on each in intervals. It counts every session that breaks, and how long its client waits
//! for the next answer. Sessions, rate and time are bounded. Start at [`run`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::listen::stopped;

/// Maximum number of sessions of a run. Sessions are spread over several targets: one has 28,232
/// source ports (Linux's default).
const SESSIONS_MAX: usize = 200_000;
/// Bytes of one exchange in each direction. Small enough for one segment.
const MESSAGE_BYTES: usize = 32;
/// Maximum number of breaks that the report describes individually. They are for a person who reads
/// the report; the number of all breaks is in it too.
const BREAKS_REPORTED_MAX: usize = 50;
/// Pause before a broken session is opened again: long enough not to spin, too short to hide a gap.
const PAUSE: Duration = Duration::from_millis(20);

/// Number, rate and timing of the sessions.
#[derive(Debug, Clone, Args)]
pub struct HeldSessionsArgs {
    /// Echo servers, e.g. 10.1.192.5:7000; sessions take them in turn
    #[arg(required = true)]
    pub addresses: Vec<String>,
    /// Number of sessions to hold open
    #[arg(short = 'n', long, default_value_t = 100)]
    pub count: usize,
    /// Number of sessions opened each second
    #[arg(long, default_value_t = 1000.0)]
    pub open_rate: f64,
    /// Pause between two exchanges of a session, in milliseconds
    #[arg(long, default_value_t = 1000)]
    pub interval_ms: u64,
    /// How long a connect or an exchange may take, in milliseconds; then the session counts as
    /// broken
    #[arg(long, default_value_t = 5000)]
    pub patience_ms: u64,
    /// Seconds after which all sessions are closed
    #[arg(short, long, default_value_t = 10.0)]
    pub duration: f64,
}

/// Counts of one session, including the times it was opened again.
#[derive(Debug, Default)]
struct SessionTally {
    sessions_opened: u64,
    exchanges: u64,
    /// Number of sessions that were open and had been answered at the end of the run.
    sessions_held: u64,
    /// Number of sessions that ended too early, by kind of error.
    broken: BTreeMap<String, u64>,
    /// Number of broken sessions that never got an answer, because they had just been opened.
    unanswered: u64,
    /// The first breaks: time, local port, number of exchanges, and reason.
    breaks: Vec<Value>,
    /// Number of failed connects, by kind of error.
    unopened: BTreeMap<String, u64>,
    /// Longest time from a break, or from the first connect, to the next answer.
    gap_max: Duration,
}

impl SessionTally {
    fn merge(&mut self, other: SessionTally) {
        self.sessions_opened += other.sessions_opened;
        self.exchanges += other.exchanges;
        self.sessions_held += other.sessions_held;
        self.unanswered += other.unanswered;
        for (from, into) in [
            (other.broken, &mut self.broken),
            (other.unopened, &mut self.unopened),
        ] {
            for (kind, n) in from {
                *into.entry(kind).or_default() += n;
            }
        }
        self.gap_max = self.gap_max.max(other.gap_max);
        self.breaks.extend(other.breaks);
        self.breaks.truncate(BREAKS_REPORTED_MAX);
    }
}

/// End of a run: its time is over, which cuts everything, or the stop signal arrived. After the
/// signal an open session makes one more exchange, and a broken session gets one more attempt. The
/// report then shows the state after the test's change.
#[derive(Clone)]
struct RunEnd {
    at: Instant,
    stop: watch::Receiver<bool>,
}

impl RunEnd {
    fn is_over(&self) -> bool {
        Instant::now() >= self.at
    }

    fn is_stopped(&self) -> bool {
        *self.stop.borrow()
    }

    async fn reached(&self) {
        let mut stop = self.stop.clone();
        // The result does not matter: both are the end.
        let _ = tokio::time::timeout_at(self.at, stopped(&mut stop)).await;
    }

    /// Waits for this time, or until the run ends.
    async fn sleep(&self, time: Duration) {
        let _ = tokio::time::timeout(time, self.reached()).await;
    }
}

/// Runs the sessions until their duration is over or `stop` is true. The JSON's `ok` is true if
/// none broke and each could be opened at the first attempt.
///
/// # Errors
///
/// An argument is out of range, or a session's task failed.
pub async fn run(args: &HeldSessionsArgs, stop: watch::Receiver<bool>) -> anyhow::Result<Value> {
    if args.count == 0 || args.count > SESSIONS_MAX {
        bail!(
            "--count {} is out of range; fix: use 1 to {SESSIONS_MAX}",
            args.count
        );
    }
    let is_rate = args.open_rate > 0.0 && args.open_rate.is_finite();
    if !is_rate || !(0.0..=3600.0).contains(&args.duration) {
        bail!("--open-rate must be more than 0, --duration 0 to 3600 seconds");
    }
    let (started, args) = (Instant::now(), Arc::new(args.clone()));
    let end = RunEnd {
        at: started + Duration::from_secs_f64(args.duration),
        stop,
    };
    let mut sessions = tokio::task::JoinSet::new();
    for number in 0..args.count {
        sessions.spawn(hold(args.clone(), number, started, end.clone()));
    }
    let mut total = SessionTally::default();
    while let Some(session) = sessions.join_next().await {
        total.merge(session?);
    }
    let (broken, unopened) = (
        total.broken.values().sum::<u64>(),
        total.unopened.values().sum::<u64>(),
    );
    Ok(json!({
        "ok": broken == 0 && unopened == 0 && total.sessions_opened >= args.count as u64,
        "sessions": args.count, "opened": total.sessions_opened, "held": total.sessions_held, "exchanges": total.exchanges, "broken": broken, "unopened": unopened,
        "broken_by": total.broken, "unanswered": total.unanswered, "breaks": total.breaks, "unopened_by": total.unopened, "gap_ms_max": total.gap_max.as_secs_f64() * 1e3,
    }))
}

/// Runs one session until `end`, and opens it again whenever it breaks.
async fn hold(
    args: Arc<HeldSessionsArgs>,
    number: usize,
    started: Instant,
    end: RunEnd,
) -> SessionTally {
    let mut tally = SessionTally::default();
    // The start times spread the connects at --open-rate.
    let due = started + Duration::from_secs_f64(number as f64 / args.open_rate);
    end.sleep(due.saturating_duration_since(Instant::now()))
        .await;
    let mut gap_start = Instant::now();
    let mut has_survived = false;
    let mut is_last = false;
    while !end.is_over() && !is_last {
        is_last = end.is_stopped();
        // After the stop only a broken session gets another attempt.
        if is_last && has_survived {
            return tally;
        }
        match with_timeout(
            &args,
            &end,
            // Sessions are spread evenly over the addresses.
            TcpStream::connect(&args.addresses[number % args.addresses.len()]),
        )
        .await
        {
            Some(Ok(stream)) => {
                tally.sessions_opened += 1;
                // The port only identifies the session in the report.
                let (port, before) = (stream.local_addr().map_or(0, |a| a.port()), tally.exchanges);
                if let Some(problem) =
                    converse(stream, &args, number, &end, &mut gap_start, &mut tally).await
                {
                    *tally.broken.entry(problem.kind().to_string()).or_default() += 1;
                    let (at, exchanges) =
                        (started.elapsed().as_secs_f64(), tally.exchanges - before);
                    tally.unanswered += u64::from(exchanges == 0);
                    tally.breaks.push(json!({"at_s": at, "port": port, "exchanges": exchanges, "why": problem.to_string()}));
                } else {
                    // A session counts as held only if at least one exchange succeeded on it.
                    tally.sessions_held += u64::from(tally.exchanges > before);
                    has_survived = true;
                }
            }
            Some(Err(problem)) => {
                *tally
                    .unopened
                    .entry(problem.kind().to_string())
                    .or_default() += 1
            }
            // The run ended while the connect was pending; that is not a failure.
            None => return tally,
        }
        end.sleep(PAUSE).await;
    }
    tally
}

/// Exchanges messages until `end` (returns `None`) or until the session breaks.
async fn converse(
    mut stream: TcpStream,
    args: &HeldSessionsArgs,
    number: usize,
    end: &RunEnd,
    gap_start: &mut Instant,
    tally: &mut SessionTally,
) -> Option<std::io::Error> {
    // With Nagle's algorithm the times would measure it instead of the path. A stream without the
    // option works too.
    let _ = stream.set_nodelay(true);
    for turn in 0u64.. {
        // Only an exchange that begins after the stop shows that the session is open: the
        // connection may have broken in the pause.
        let is_last = end.is_stopped();
        let mut message = [0; MESSAGE_BYTES];
        // Number and turn make each message unique, so that an answer to another one is noticed.
        message[..8].copy_from_slice(&(number as u64).to_be_bytes());
        message[8..16].copy_from_slice(&turn.to_be_bytes());
        let exchange = async {
            stream.write_all(&message).await?;
            let mut back = [0; MESSAGE_BYTES];
            stream.read_exact(&mut back).await?;
            if back == message {
                Ok(())
            } else {
                Err(std::io::Error::other("another session's bytes"))
            }
        };
        match with_timeout(args, end, exchange).await {
            Some(Ok(())) => tally.exchanges += 1,
            Some(Err(problem)) => return Some(problem),
            // The run ended during the exchange, which says nothing about the session.
            None => return None,
        }
        // `gap_start` is older than this exchange if the session broke in between, so the gap
        // includes the time to open it again.
        tally.gap_max = tally.gap_max.max(gap_start.elapsed());
        end.sleep(Duration::from_millis(args.interval_ms)).await;
        *gap_start = Instant::now();
        if end.is_over() || is_last {
            return None;
        }
    }
    None
}

/// Returns the outcome of `work`, a timeout after `patience_ms`, or `None` once the run is over.
async fn with_timeout<T>(
    args: &HeldSessionsArgs,
    end: &RunEnd,
    work: impl Future<Output = std::io::Result<T>>,
) -> Option<std::io::Result<T>> {
    let deadline = Instant::now() + Duration::from_millis(args.patience_ms);
    match tokio::time::timeout_at(deadline.min(end.at), work).await {
        Ok(outcome) => Some(outcome),
        Err(_) if end.is_over() => None,
        Err(_) => Some(Err(std::io::ErrorKind::TimedOut.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    fn args(address: String, count: usize, duration: f64) -> HeldSessionsArgs {
        HeldSessionsArgs {
            addresses: vec![address],
            count,
            open_rate: 1000.0,
            interval_ms: 50,
            patience_ms: 5000,
            duration,
        }
    }

    fn unstopped() -> watch::Receiver<bool> {
        let (sender, receiver) = watch::channel(false);
        // Without its sender the channel would count as stopped.
        tokio::spawn(async move { sender.closed().await });
        receiver
    }

    /// Answers one message of a session.
    async fn answer(stream: &mut TcpStream) {
        let mut message = [0; MESSAGE_BYTES];
        stream.read_exact(&mut message).await.unwrap();
        stream.write_all(&message).await.unwrap();
    }

    #[tokio::test]
    async fn a_stop_ends_the_run_with_its_report() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (sender, stop) = watch::channel(false);
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            answer(&mut stream).await;
            // The second message shows that the answer to the first has arrived.
            let mut message = [0; MESSAGE_BYTES];
            stream.read_exact(&mut message).await.unwrap();
            sender.send_replace(true);
            stream.write_all(&message).await.unwrap();
            answer(&mut stream).await;
            (stream, sender)
        });
        let report = run(&args(address, 1, 3600.0), stop).await.unwrap();
        // The third exchange begins after the stop.
        assert_eq!(
            (&report["ok"], &report["held"], &report["exchanges"]),
            (&json!(true), &json!(1), &json!(3)),
            "{report}"
        );
        drop(server.await.unwrap());
    }

    #[tokio::test]
    async fn a_session_that_ended_before_the_stop_is_not_counted_as_open() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (sender, stop) = watch::channel(false);
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            answer(&mut stream).await;
            drop((stream, listener));
            sender.send_replace(true);
            sender
        });
        let hour = HeldSessionsArgs {
            interval_ms: 3_600_000,
            ..args(address, 1, 3600.0)
        };
        let report = run(&hour, stop).await.unwrap();
        assert_eq!(
            (&report["ok"], &report["held"], &report["broken"]),
            (&json!(false), &json!(0), &json!(1)),
            "{report}"
        );
        drop(server.await.unwrap());
    }

    #[tokio::test]
    async fn a_broken_session_is_counted_and_opened_again() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = tokio::spawn(async move {
            // The first connection is closed after one exchange; later ones stay open.
            for first in [true, false, false] {
                let (mut stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let mut message = [0; MESSAGE_BYTES];
                    while stream.read_exact(&mut message).await.is_ok() {
                        stream.write_all(&message).await.unwrap();
                        if first {
                            return;
                        }
                    }
                });
            }
        });
        let report = run(&args(address, 1, 0.6), unstopped()).await.unwrap();
        assert_eq!(
            (&report["broken"], &report["unopened"], &report["opened"]),
            (&json!(1), &json!(0), &json!(2)),
            "{report}"
        );
        assert_eq!(
            (&report["ok"], &report["held"], &report["unanswered"]),
            (&json!(false), &json!(1), &json!(0))
        );
        server.abort();
    }

    #[tokio::test]
    async fn a_session_without_an_answer_is_broken_once_patience_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        for (patience_ms, broken) in [(100, true), (60_000, false)] {
            let report = run(
                &HeldSessionsArgs {
                    patience_ms,
                    ..args(address.clone(), 1, 0.4)
                },
                unstopped(),
            )
            .await
            .unwrap();
            assert_eq!(
                report["broken_by"]["timed out"].as_u64().is_some(),
                broken,
                "{report}"
            );
            assert_eq!(report["held"], 0, "it never was answered");
            assert_eq!(report["unanswered"], report["broken"], "{report}");
        }
    }

    #[tokio::test]
    async fn failed_opens_are_counted() {
        let port = TcpListener::bind("127.0.0.1:0")
            .await
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let report = run(&args(format!("127.0.0.1:{port}"), 2, 0.2), unstopped())
            .await
            .unwrap();
        assert!(
            report["unopened"].as_u64().unwrap() >= 2 && report["held"] == 0,
            "{report}"
        );
        assert!(
            run(
                &args("127.0.0.1:1".into(), SESSIONS_MAX + 1, 1.0),
                unstopped()
            )
            .await
            .is_err()
        );
    }
}
