//! `canal logs`: what a host's process wrote, from the world's log files; and a data plane's log level.

use std::io::{SeekFrom, Write};
use std::time::Duration;

use clap::Args;
use tokio::io::{AsyncBufReadExt, AsyncSeekExt, BufReader};

use crate::dataplane::{self, Page};
use crate::exit::{Exit, Failure, Outcome};
use crate::realm::{Realm, RealmArgs};

/// How often a followed log is looked at.
const POLL: Duration = Duration::from_millis(200);

/// Shows a host's log
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal logs gw-1 --follow
  canal logs alpha/bookinfo/reviews-v1-0 --tail 20
  canal logs alpha-n1 --level debug        # a data plane says more from now on; nothing is restarted")]
pub(crate) struct LogsArgs {
    /// Host or pod, as `canal world list` names it
    host: String,
    /// Go on as lines are written
    #[arg(short, long)]
    follow: bool,
    /// Only the last lines
    #[arg(short = 'n', long, value_name = "LINES")]
    tail: Option<usize>,
    /// Set the data plane's log level instead: error, warn, info, debug or trace
    #[arg(long, conflicts_with_all = ["follow", "tail"])]
    level: Option<String>,
    #[command(flatten)]
    realm: RealmArgs,
}

pub(crate) async fn run(args: LogsArgs) -> Outcome {
    let realm = Realm::open(args.realm.world.as_deref())?;
    if let Some(level) = &args.level {
        let path = format!("/logging?level={level}");
        let answer = dataplane::post(&realm, &args.host, Page::Admin, &path).await?;
        return crate::output::line(String::from_utf8_lossy(&answer).trim_end());
    }
    let path = realm.log_path(&args.host)?;
    let missing = |problem: std::io::Error| {
        Failure::new(Exit::Missing, path.display().to_string(), problem.to_string(), "the host has not written anything yet")
    };
    let mut log = tokio::fs::File::open(&path).await.map_err(missing)?;
    if let Some(lines) = args.tail {
        let text = tokio::fs::read(&path).await.map_err(missing)?;
        log.seek(SeekFrom::Start(start_of_last(&text, lines))).await.map_err(missing)?;
    }
    copy(log, args.follow).await.map_err(|problem| match problem.kind() {
        std::io::ErrorKind::BrokenPipe => Failure::told(Exit::Done),
        _ => Failure::failed(path.display().to_string(), problem, ""),
    })
}

/// Where the last `lines` lines begin.
fn start_of_last(text: &[u8], lines: usize) -> u64 {
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    let starts = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
    match lines {
        0 => text.len() as u64,
        _ => starts.take(lines).nth(lines - 1).unwrap_or(0) as u64,
    }
}

async fn copy(log: tokio::fs::File, follow: bool) -> std::io::Result<()> {
    let mut reader = BufReader::new(log);
    let mut out = std::io::stdout();
    loop {
        let piece = reader.fill_buf().await?;
        if piece.is_empty() {
            out.flush()?;
            if !follow {
                return Ok(());
            }
            tokio::time::sleep(POLL).await;
            rewind_if_cut(&mut reader).await?;
            continue;
        }
        let length = piece.len();
        out.write_all(piece)?;
        reader.consume(length);
    }
}

/// The world cuts a log that grew too long: start over where it is shorter than what was read.
async fn rewind_if_cut(reader: &mut BufReader<tokio::fs::File>) -> std::io::Result<()> {
    let position = reader.stream_position().await?;
    if reader.get_ref().metadata().await?.len() < position {
        reader.seek(SeekFrom::Start(0)).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_counted_from_the_end() {
        for (text, lines, want) in
            [("a\nb\nc\n", 1, 4), ("a\nb\nc\n", 2, 2), ("a\nb\nc", 1, 4), ("a\nb\n", 9, 0), ("", 3, 0), ("a\n", 0, 2)]
        {
            assert_eq!(start_of_last(text.as_bytes(), lines), want, "{text:?} {lines}");
        }
    }
}
