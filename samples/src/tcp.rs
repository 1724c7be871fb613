//! Plain TCP servers that end their streams in every manner that a relay must carry: echo,
//! half-closes from both sides, resets. Start at [`serve`].

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::listen::stopped;
use canal_byte_pattern::{CHUNK_BYTES, Checker, fill};

/// Behavior of a server on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TcpServerMode {
    /// Sends back what it receives; closes its side when the client has closed its own.
    Echo,
    /// Reads to the end, then answers `{length, sha256, as_pattern}` as one JSON line: needs the
    /// client's half-close.
    Drain,
    /// Sends a banner, closes its side at once, then reads to the end and logs the result.
    Greet,
    /// Reads a decimal size and a newline, sends that many deterministic bytes, closes.
    Source,
    /// Reads one byte, then resets the connection.
    Reset,
    /// Accepts and never reads: a client that sends must come to a stop.
    Stall,
}

/// Text that a [`TcpServerMode::Greet`] server sends.
pub const BANNER: &[u8] = b"canal tcp sample\n";
/// Maximum length of the line that [`TcpServerMode::Source`] reads, in bytes. A 64-bit number has
/// 20 digits.
const LINE_BYTES_MAX: usize = 32;

/// A mode and a port, written `mode=port`.
#[derive(Debug, Clone, Copy)]
pub struct TcpListenArg {
    pub mode: TcpServerMode,
    pub port: u16,
}

impl FromStr for TcpListenArg {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let problem = || {
            format!("{text:?} is not a mode and a port; fix: write it as mode=port, e.g. echo=7000")
        };
        let (mode, port) = text.split_once('=').ok_or_else(problem)?;
        let mode =
            <TcpServerMode as clap::ValueEnum>::from_str(mode, false).map_err(|_| problem())?;
        Ok(Self {
            mode,
            port: port.parse().map_err(|_| problem())?,
        })
    }
}

/// Serves one port until `stop`.
pub async fn serve(listener: TcpListener, mode: TcpServerMode, mut stop: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = stopped(&mut stop) => return,
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => { tokio::spawn(attend(stream, peer, mode, stop.clone())); }
                Err(problem) => {
                    eprintln!("canal-samples: accepting a connection failed: {problem}; retrying");
                    // The process is out of files: a pause keeps the loop from spinning.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            },
        }
    }
}

async fn attend(
    mut stream: TcpStream,
    peer: SocketAddr,
    mode: TcpServerMode,
    mut stop: watch::Receiver<bool>,
) {
    let _ = stream.set_nodelay(true);
    let served = match mode {
        TcpServerMode::Echo => echo(&mut stream).await,
        TcpServerMode::Drain => drain(&mut stream).await,
        TcpServerMode::Greet => send_banner(&mut stream).await,
        TcpServerMode::Source => source(&mut stream).await,
        TcpServerMode::Reset => reset(&mut stream).await,
        TcpServerMode::Stall => {
            stopped(&mut stop).await;
            Ok(())
        }
    };
    if let Err(problem) = served {
        eprintln!("canal-samples: {mode:?} with {peer}: {problem}");
    }
}

async fn echo(stream: &mut TcpStream) -> std::io::Result<()> {
    let (mut reader, mut writer) = stream.split();
    tokio::io::copy(&mut reader, &mut writer).await?;
    writer.shutdown().await
}

async fn read_all(stream: &mut TcpStream) -> std::io::Result<Checker> {
    let mut checker = Checker::new(0);
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        match stream.read(&mut buffer).await? {
            0 => return Ok(checker),
            n => checker.take(&buffer[..n]),
        }
    }
}

async fn drain(stream: &mut TcpStream) -> std::io::Result<()> {
    let checker = read_all(stream).await?;
    let (length, as_pattern) = (checker.length, checker.differs_at.is_none());
    let report = serde_json::json!({ "length": length, "as_pattern": as_pattern, "sha256": checker.sha256() });
    stream.write_all(format!("{report}\n").as_bytes()).await?;
    stream.shutdown().await
}

async fn send_banner(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.write_all(BANNER).await?;
    stream.shutdown().await?;
    let checker = read_all(stream).await?;
    println!(
        "greet: read {} bytes after closing our side, as_pattern={}",
        checker.length,
        checker.differs_at.is_none()
    );
    Ok(())
}

async fn source(stream: &mut TcpStream) -> std::io::Result<()> {
    let bad = || {
        std::io::Error::new(
            std::io::ErrorKind::InvalidData,
            "expected a decimal size and a newline",
        )
    };
    let mut line = Vec::new();
    loop {
        match stream.read_u8().await? {
            b'\n' => break,
            byte if line.len() < LINE_BYTES_MAX => line.push(byte),
            _ => return Err(bad()),
        }
    }
    let size: u64 = std::str::from_utf8(&line)
        .ok()
        .and_then(|t| t.trim().parse().ok())
        .ok_or_else(bad)?;
    let mut position = 0;
    while position < size {
        let length = usize::try_from(size - position)
            .unwrap_or(CHUNK_BYTES)
            .min(CHUNK_BYTES);
        stream.write_all(&fill(0, position, length)).await?;
        position += length as u64;
    }
    stream.shutdown().await
}

async fn reset(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.read_u8().await?;
    // Closing a socket with a zero linger time sends RST instead of FIN.
    socket2::SockRef::from(&*stream).set_linger(Some(Duration::ZERO))
}
