//! Many long-lived TCP sessions with an echo server: opens them at a rate, lets each say something now and then, counts every one that
//! breaks and how long its client waits for the next answer. Bounded in count, rate and time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use clap::Args;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Largest number of sessions.
const SESSIONS_MAX: usize = 200_000;
/// Bytes of one exchange in each direction.
const MESSAGE_BYTES: usize = 32;
/// Breaks that the report tells one by one.
const BREAKS_TOLD: usize = 50;
/// Pause before a broken session is opened again: enough not to spin, too little to hide a gap.
const PAUSE: Duration = Duration::from_millis(20);

/// What sessions to hold.
#[derive(Debug, Clone, Args)]
pub struct SessionsArgs {
    /// Echo servers, e.g. 10.1.192.5:7000; sessions take them in turn
    #[arg(required = true)]
    pub addresses: Vec<String>,
    /// Sessions to hold
    #[arg(short = 'n', long, default_value_t = 100)]
    pub count: usize,
    /// Sessions opened per second
    #[arg(long, default_value_t = 1000.0)]
    pub open_rate: f64,
    /// Pause between two exchanges of a session, in milliseconds
    #[arg(long, default_value_t = 1000)]
    pub interval_ms: u64,
    /// How long a connect or an exchange may take, in milliseconds; then the session counts as broken
    #[arg(long, default_value_t = 5000)]
    pub patience_ms: u64,
    /// Seconds after which all sessions are closed
    #[arg(short, long, default_value_t = 10.0)]
    pub duration: f64,
}

/// What one session, with all its lives, went through.
#[derive(Debug, Default)]
struct Tally {
    opened: u64,
    exchanges: u64,
    /// Whether it was open, and had been answered, when the time was over.
    held: u64,
    /// Sessions that ended before their time, by kind.
    broken: BTreeMap<String, u64>,
    /// Those of them that never had an answer: they had just been opened.
    unanswered: u64,
    /// The first that broke: when, from which port, after how many exchanges, and why.
    breaks: Vec<Value>,
    /// Connects that failed, by kind.
    unopened: BTreeMap<String, u64>,
    /// Longest time from a break, or from the first connect, to the next answer.
    gap_max: Duration,
}

impl Tally {
    fn merge(&mut self, other: Tally) {
        self.opened += other.opened;
        self.exchanges += other.exchanges;
        self.held += other.held;
        self.unanswered += other.unanswered;
        for (from, into) in [(other.broken, &mut self.broken), (other.unopened, &mut self.unopened)] {
            for (kind, n) in from {
                *into.entry(kind).or_default() += n;
            }
        }
        self.gap_max = self.gap_max.max(other.gap_max);
        self.breaks.extend(other.breaks);
        self.breaks.truncate(BREAKS_TOLD);
    }
}

/// Holds the sessions. The JSON's `ok` is true when none broke and each could be opened at once.
pub async fn run(args: &SessionsArgs) -> anyhow::Result<Value> {
    if args.count == 0 || args.count > SESSIONS_MAX {
        bail!("--count {}: use 1 to {SESSIONS_MAX}", args.count);
    }
    let is_rate = args.open_rate > 0.0 && args.open_rate.is_finite();
    if !is_rate || !(0.0..=3600.0).contains(&args.duration) {
        bail!("--open-rate must be more than 0, --duration 0 to 3600 seconds");
    }
    let (started, args) = (Instant::now(), Arc::new(args.clone()));
    let end = started + Duration::from_secs_f64(args.duration);
    let mut sessions = tokio::task::JoinSet::new();
    for number in 0..args.count {
        sessions.spawn(hold(args.clone(), number, started, end));
    }
    let mut whole = Tally::default();
    while let Some(session) = sessions.join_next().await {
        whole.merge(session?);
    }
    let (broken, unopened) = (whole.broken.values().sum::<u64>(), whole.unopened.values().sum::<u64>());
    Ok(json!({
        "ok": broken == 0 && unopened == 0 && whole.opened >= args.count as u64,
        "sessions": args.count, "opened": whole.opened, "held": whole.held, "exchanges": whole.exchanges, "broken": broken, "unopened": unopened,
        "broken_by": whole.broken, "unanswered": whole.unanswered, "breaks": whole.breaks, "unopened_by": whole.unopened, "gap_ms_max": whole.gap_max.as_secs_f64() * 1e3,
    }))
}

/// One session until `end`, opened again whenever it breaks.
async fn hold(args: Arc<SessionsArgs>, number: usize, started: Instant, end: Instant) -> Tally {
    let mut tally = Tally::default();
    tokio::time::sleep_until((started + Duration::from_secs_f64(number as f64 / args.open_rate)).min(end)).await;
    let mut whole_at = Instant::now();
    while Instant::now() < end {
        match within(&args, end, TcpStream::connect(&args.addresses[number % args.addresses.len()])).await {
            Some(Ok(stream)) => {
                tally.opened += 1;
                let (port, before) = (stream.local_addr().map_or(0, |a| a.port()), tally.exchanges);
                if let Some(problem) = converse(stream, &args, number, end, &mut whole_at, &mut tally).await {
                    *tally.broken.entry(problem.kind().to_string()).or_default() += 1;
                    let (at, exchanges) = (started.elapsed().as_secs_f64(), tally.exchanges - before);
                    tally.unanswered += u64::from(exchanges == 0);
                    tally.breaks.push(json!({"at_s": at, "port": port, "exchanges": exchanges, "why": problem.to_string()}));
                } else {
                    tally.held += u64::from(tally.exchanges > before);
                }
            }
            Some(Err(problem)) => *tally.unopened.entry(problem.kind().to_string()).or_default() += 1,
            None => return tally,
        }
        tokio::time::sleep_until((Instant::now() + PAUSE).min(end)).await;
    }
    tally
}

/// Exchanges messages until `end` (`None`) or until the session breaks.
async fn converse(
    mut stream: TcpStream,
    args: &SessionsArgs,
    number: usize,
    end: Instant,
    whole_at: &mut Instant,
    tally: &mut Tally,
) -> Option<std::io::Error> {
    // Without it the numbers say something of Nagle, not of the path.
    let _ = stream.set_nodelay(true);
    for turn in 0u64.. {
        let mut message = [0; MESSAGE_BYTES];
        message[..8].copy_from_slice(&(number as u64).to_be_bytes());
        message[8..16].copy_from_slice(&turn.to_be_bytes());
        let exchange = async {
            stream.write_all(&message).await?;
            let mut back = [0; MESSAGE_BYTES];
            stream.read_exact(&mut back).await?;
            if back == message { Ok(()) } else { Err(std::io::Error::other("another session's bytes")) }
        };
        match within(args, end, exchange).await {
            Some(Ok(())) => tally.exchanges += 1,
            Some(Err(problem)) => return Some(problem),
            None => return None,
        }
        tally.gap_max = tally.gap_max.max(whole_at.elapsed());
        let next = Instant::now() + Duration::from_millis(args.interval_ms);
        tokio::time::sleep_until(next.min(end)).await;
        *whole_at = Instant::now();
        if *whole_at >= end {
            return None;
        }
    }
    None
}

/// The outcome, patience's timeout, or `None` once the run is over.
async fn within<T>(args: &SessionsArgs, end: Instant, work: impl Future<Output = std::io::Result<T>>) -> Option<std::io::Result<T>> {
    let deadline = Instant::now() + Duration::from_millis(args.patience_ms);
    match tokio::time::timeout_at(deadline.min(end), work).await {
        Ok(outcome) => Some(outcome),
        Err(_) if Instant::now() >= end => None,
        Err(_) => Some(Err(std::io::ErrorKind::TimedOut.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    fn args(address: String, count: usize, duration: f64) -> SessionsArgs {
        SessionsArgs { addresses: vec![address], count, open_rate: 1000.0, interval_ms: 50, patience_ms: 5000, duration }
    }

    #[tokio::test]
    async fn a_broken_session_is_counted_and_opened_again() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = tokio::spawn(async move {
            // The first connection is closed after one exchange, later ones live.
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
        let report = run(&args(address, 1, 0.6)).await.unwrap();
        assert_eq!((&report["broken"], &report["unopened"], &report["opened"]), (&json!(1), &json!(0), &json!(2)), "{report}");
        assert_eq!((&report["ok"], &report["held"], &report["unanswered"]), (&json!(false), &json!(1), &json!(0)));
        server.abort();
    }

    #[tokio::test]
    async fn a_session_without_an_answer_is_broken_once_patience_ends() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        for (patience_ms, broken) in [(100, true), (60_000, false)] {
            let report = run(&SessionsArgs { patience_ms, ..args(address.clone(), 1, 0.4) }).await.unwrap();
            assert_eq!(report["broken_by"]["timed out"].as_u64().is_some(), broken, "{report}");
            assert_eq!(report["held"], 0, "it never was answered");
            assert_eq!(report["unanswered"], report["broken"], "{report}");
        }
    }

    #[tokio::test]
    async fn what_cannot_be_opened_is_counted() {
        let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        let report = run(&args(format!("127.0.0.1:{port}"), 2, 0.2)).await.unwrap();
        assert!(report["unopened"].as_u64().unwrap() >= 2 && report["held"] == 0, "{report}");
        assert!(run(&args("127.0.0.1:1".into(), SESSIONS_MAX + 1, 1.0)).await.is_err());
    }
}
