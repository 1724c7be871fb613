//! Opens new connections to an echo server, each with one exchange, and closes them: as fast as
//! they end, or at a rate. It counts every failure and does not retry. It uses no protocol above
//! TCP, so that the cost of a new connection is not hidden. Start at [`run`].

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::load::RequestSchedule;
use crate::load::tally::{LoadTally, RequestOutcome};

/// Maximum number of connections at once. Below the 28,232 ephemeral ports of one address (Linux's
/// default), so that a failure is the mesh's.
const AT_ONCE_MAX: usize = 10_000;
/// Bytes of the exchange in each direction. Small enough for one segment, so that the time is that
/// of the connection.
const MESSAGE_BYTES: usize = 64;

/// Number, rate and timing of the connections.
#[derive(Debug, Clone, Args)]
pub struct ConnectionsArgs {
    /// Address of the echo server, e.g. 10.1.192.5:7000
    pub address: String,
    /// Maximum number of connections open at once
    #[arg(short = 'c', long, default_value_t = 4)]
    pub at_once: usize,
    /// Number of seconds that the run lasts
    #[arg(short, long, default_value_t = 10.0)]
    pub duration: f64,
    /// New connections per second; without it, the next follows as soon as one has ended
    #[arg(short, long)]
    pub rate: Option<f64>,
    /// Longest time from the connect to the whole answer, in milliseconds
    #[arg(long, default_value_t = 10_000)]
    pub timeout_ms: u64,
}

/// Opens the connections. The JSON's `ok` is true if none failed.
///
/// # Errors
///
/// An argument is out of range, or a client's task failed.
pub async fn run(args: &ConnectionsArgs) -> anyhow::Result<Value> {
    if args.at_once == 0 || args.at_once > AT_ONCE_MAX {
        bail!(
            "--at-once {} is out of range; fix: use 1 to {AT_ONCE_MAX}",
            args.at_once
        );
    }
    if args
        .rate
        .is_some_and(|rate| !(rate > 0.0 && rate.is_finite()))
    {
        bail!("--rate must be more than 0");
    }
    let duration = Duration::try_from_secs_f64(args.duration)
        .context("--duration is not a number of seconds")?;
    let (args, tickets) = (
        Arc::new(args.clone()),
        Arc::new(RequestSchedule::new(u64::MAX, duration, args.rate)),
    );
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..args.at_once {
        clients.spawn(work(args.clone(), tickets.clone()));
    }
    let mut total = LoadTally::new(tickets.started, false);
    while let Some(client) = clients.join_next().await {
        total.merge(client.context("a client's task failed")?);
    }
    Ok(total.report(tickets.started.elapsed()))
}

async fn work(args: Arc<ConnectionsArgs>, tickets: Arc<RequestSchedule>) -> LoadTally {
    let mut tally = LoadTally::new(tickets.started, false);
    while let Some((number, due)) = tickets.take() {
        tokio::time::sleep_until(due).await;
        let outcome = match tokio::time::timeout(
            Duration::from_millis(args.timeout_ms),
            exchange(&args.address, number),
        )
        .await
        {
            Ok(Ok(())) => RequestOutcome::answered(None, None),
            Ok(Err((step, problem))) => RequestOutcome::failed(step, problem.to_string()),
            Err(_) => RequestOutcome::failed(
                "timeout",
                format!("no whole answer in {} ms", args.timeout_ms),
            ),
        };
        tally.count(due, outcome);
    }
    tally
}

/// Runs one connection from its connect to its close. The error contains the step that failed.
async fn exchange(address: &str, number: u64) -> Result<(), (&'static str, std::io::Error)> {
    let mut stream = TcpStream::connect(address)
        .await
        .map_err(|e| ("connect", e))?;
    let mut message = [0; MESSAGE_BYTES];
    message[..8].copy_from_slice(&number.to_be_bytes());
    stream.write_all(&message).await.map_err(|e| ("write", e))?;
    let mut answer = [0; MESSAGE_BYTES];
    stream
        .read_exact(&mut answer)
        .await
        .map_err(|e| ("read", e))?;
    if answer == message {
        Ok(())
    } else {
        Err(("answer", std::io::ErrorKind::InvalidData.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::{TcpServerMode, serve};

    #[tokio::test]
    async fn answers_are_counted_and_so_are_resets() {
        for (mode, is_ok) in [(TcpServerMode::Echo, true), (TcpServerMode::Reset, false)] {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let (stop, stopped) = tokio::sync::watch::channel(false);
            let server = tokio::spawn(serve(listener, mode, stopped));
            let args = ConnectionsArgs {
                address,
                at_once: 2,
                duration: 0.2,
                rate: Some(100.0),
                timeout_ms: 5_000,
            };
            let report = run(&args).await.unwrap();
            let counted = if is_ok {
                &report["succeeded"]
            } else {
                &report["failed_by_kind"]["read"]
            };
            assert_eq!(
                (&report["ok"], counted),
                (&is_ok.into(), &20.into()),
                "{report:#}"
            );
            stop.send_replace(true);
            server.await.unwrap();
        }
    }
}
