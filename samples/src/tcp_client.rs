//! The client of [`crate::tcp`]: drives one mode and prints the observed result as JSON: the bytes,
//! and how the stream ended. Start at [`run`].

use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::tcp::{BANNER, TcpServerMode};
use canal_byte_pattern::{CHUNK_BYTES, Checker, fill};

/// Server, mode and amount of data.
#[derive(Debug, Clone, Args)]
pub struct TcpClientArgs {
    /// Server, e.g. 10.96.0.50:7000 or [fd00::50]:7000
    pub address: String,
    /// Mode of the server at that port
    #[arg(long, value_enum, default_value = "echo")]
    pub mode: TcpServerMode,
    /// Bytes to send (source: to receive)
    #[arg(long, default_value_t = 65536)]
    pub size: u64,
    /// Maximum duration of the run
    #[arg(long, default_value_t = 30_000)]
    pub timeout_ms: u64,
}

/// End of a stream as the client observed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamEnd {
    Closed,
    Reset,
}

/// Result that the client observed.
struct TcpClientResult {
    right: bool,
    sent: u64,
    received: u64,
    end: StreamEnd,
    report: Value,
}

/// Drives the mode. The JSON's `ok` is true if the bytes and the end of the stream were right.
///
/// # Errors
///
/// The connect or the transfer failed, or the run did not end in time.
pub async fn run(args: &TcpClientArgs) -> anyhow::Result<Value> {
    let started = Instant::now();
    let limit = Duration::from_millis(args.timeout_ms);
    let seen = tokio::time::timeout(limit, drive(args))
        .await
        .with_context(|| format!("not done in {} ms", args.timeout_ms))??;
    Ok(json!({
        "ok": seen.right, "mode": format!("{:?}", args.mode), "sent": seen.sent, "received": seen.received,
        "end": format!("{:?}", seen.end), "said": seen.report, "elapsed_ms": started.elapsed().as_secs_f64() * 1e3,
    }))
}

async fn drive(args: &TcpClientArgs) -> anyhow::Result<TcpClientResult> {
    let mut stream = TcpStream::connect(&args.address)
        .await
        .with_context(|| format!("connect to {}", args.address))?;
    // With Nagle's algorithm small writes would wait for acknowledgments.
    stream.set_nodelay(true)?;
    let (mut reader, mut writer) = stream.split();
    match args.mode {
        TcpServerMode::Echo => {
            // Both directions run at the same time, or a full window would block both ends. The 0
            // keeps none of the received bytes, which are only checked.
            let (sent, got) = tokio::join!(send(&mut writer, args.size), receive(&mut reader, 0));
            let (checker, end, _) = got?;
            let right = checker.length == args.size
                && checker.differs_at.is_none()
                && end == StreamEnd::Closed;
            Ok(TcpClientResult {
                right,
                sent: sent?,
                received: checker.length,
                end,
                report: Value::Null,
            })
        }
        TcpServerMode::Drain => {
            let sent = send(&mut writer, args.size).await?;
            // 4096 bytes are more than the server's report or banner.
            let (checker, end, text) = receive(&mut reader, 4096).await?;
            // Text that is no JSON gives a null, which is not right below.
            let report: Value = serde_json::from_slice(&text).unwrap_or_default();
            let right = report["length"].as_u64() == Some(args.size)
                && report["as_pattern"] == true
                && end == StreamEnd::Closed;
            Ok(TcpClientResult {
                right,
                sent,
                received: checker.length,
                end,
                report,
            })
        }
        TcpServerMode::Greet => {
            // The server has closed its side. Data that is sent now must still be carried.
            let (checker, end, text) = receive(&mut reader, 4096).await?;
            let sent = send(&mut writer, args.size).await?;
            let right = text == BANNER && end == StreamEnd::Closed && sent == args.size;
            Ok(TcpClientResult {
                right,
                sent,
                received: checker.length,
                end,
                report: Value::from(String::from_utf8_lossy(&text)),
            })
        }
        TcpServerMode::Source => {
            // The first line says how many bytes the server shall send.
            writer
                .write_all(format!("{}\n", args.size).as_bytes())
                .await?;
            let (checker, end, _) = receive(&mut reader, 0).await?;
            let right = checker.length == args.size
                && checker.differs_at.is_none()
                && end == StreamEnd::Closed;
            Ok(TcpClientResult {
                right,
                sent: 0,
                received: checker.length,
                end,
                report: Value::Null,
            })
        }
        TcpServerMode::Reset => {
            // The server resets after the first byte.
            writer.write_all(b"x").await?;
            let (checker, end, _) = receive(&mut reader, 0).await?;
            Ok(TcpClientResult {
                right: end == StreamEnd::Reset,
                sent: 1,
                received: checker.length,
                end,
                report: Value::Null,
            })
        }
        TcpServerMode::Stall => stall(args, &mut writer).await,
    }
}

/// Sends the stream, and closes this side.
async fn send(writer: &mut (impl AsyncWrite + Unpin), size: u64) -> anyhow::Result<u64> {
    let mut position = 0;
    while position < size {
        let length = usize::try_from(size - position)
            .unwrap_or(CHUNK_BYTES)
            .min(CHUNK_BYTES);
        writer
            .write_all(&fill(0, position, length))
            .await
            .with_context(|| format!("send after {position} bytes"))?;
        position += length as u64;
    }
    writer.shutdown().await.context("half-close")?;
    Ok(position)
}

/// Receives to the end, and returns the first `keep` bytes.
async fn receive(
    reader: &mut (impl AsyncRead + Unpin),
    keep: usize,
) -> anyhow::Result<(Checker, StreamEnd, Vec<u8>)> {
    let (mut checker, mut prefix) = (Checker::new(0), Vec::new());
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match reader.read(&mut buffer).await {
            Ok(0) => return Ok((checker, StreamEnd::Closed, prefix)),
            Ok(n) => {
                checker.take(&buffer[..n]);
                prefix.extend_from_slice(&buffer[..n.min(keep - prefix.len().min(keep))]);
            }
            Err(problem) if problem.kind() == std::io::ErrorKind::ConnectionReset => {
                return Ok((checker, StreamEnd::Reset, prefix));
            }
            Err(problem) => return Err(problem).context("receive"),
        }
    }
}

/// Sends until a second passes without progress. The result shows how much the path buffers for a
/// server that does not read.
async fn stall(
    args: &TcpClientArgs,
    writer: &mut (impl AsyncWrite + Unpin),
) -> anyhow::Result<TcpClientResult> {
    let mut sent = 0;
    while sent < args.size {
        let piece = fill(0, sent, CHUNK_BYTES);
        // A write that takes a second is blocked: all buffers are full.
        match tokio::time::timeout(Duration::from_secs(1), writer.write(&piece)).await {
            Ok(written) => sent += written.context("send")? as u64,
            Err(_) => {
                return Ok(TcpClientResult {
                    right: true,
                    sent,
                    received: 0,
                    end: StreamEnd::Closed,
                    report: Value::from("stopped"),
                });
            }
        }
    }
    Ok(TcpClientResult {
        right: false,
        sent,
        received: 0,
        end: StreamEnd::Closed,
        report: Value::from("never stopped"),
    })
}
