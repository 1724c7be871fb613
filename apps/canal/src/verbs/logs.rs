//! `canal logs`: the output of a host's process, from the world's log files; outside a world the
//! access log of a data plane, through the controller. It can also set a data plane's log level.

use std::io::{SeekFrom, Write};
use std::time::Duration;

use canal_wire::api::ObserveRequest;
use canal_wire::api::observe_request::Subject;
use clap::Args;
use tokio::io::{AsyncBufReadExt, AsyncSeekExt, BufReader};

use crate::admin::{self, MeshArgs};
use crate::dataplane::{self, AdminPage};
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::running_world::RunningWorld;
use crate::{observe, signals};

/// Interval between two reads of a followed log.
/// An operator does not notice the delay, and a read without news costs little.
const POLL: Duration = Duration::from_millis(200);

/// Shows the log of a host's processes
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal logs gw-1 --follow
  canal logs alpha/bookinfo/reviews-v1-0 --tail 20
  canal logs alpha-n1 --level debug        # the data plane logs more from now on, without a restart
  canal logs gw-1 --access --tenant alpha  # only the access log, as for an operator outside the world

With --server, or with --access in a world, it is the data plane's access log, through the controller: the newest lines,
which the process keeps in memory, and with --follow those to come. A tenant's operator gets its tenant's lines.")]
pub(crate) struct LogsArgs {
    /// Host or pod, by its name in `canal world list`; a node or gateway, by its name in `canal
    /// status`
    host: String,
    /// Continue as lines are written
    #[arg(short, long)]
    follow: bool,
    /// Only the last lines
    #[arg(short = 'n', long, value_name = "LINES")]
    tail: Option<usize>,
    /// Set the data plane's log level instead: error, warn, info, debug or trace
    #[arg(long, conflicts_with_all = ["follow", "tail", "access"])]
    level: Option<String>,
    /// In a world: only the access log, through the controller
    #[arg(long)]
    access: bool,
    /// Only this tenant's lines of a gateway's access log
    #[arg(short, long, env = "CANAL_TENANT")]
    tenant: Option<String>,
    #[command(flatten)]
    mesh: MeshArgs,
}

pub(crate) async fn run(args: LogsArgs) -> VerbResult {
    if args.mesh.server.is_some() && args.level.is_some() {
        let fix = "run on the data plane's host: curl --unix-socket DATA-DIR/admin.sock -X POST http://localhost/logging?level=debug";
        return Err(VerbError::new(
            ExitStatus::Usage,
            "--level",
            "is for worlds: all tenants of a data plane share its log level",
            fix,
        ));
    }
    // The process log is a file of a world's host. The controller relays only access logs.
    if args.mesh.server.is_some() || args.access {
        return access_log(&args).await;
    }
    let running = RunningWorld::open(args.mesh.world.as_deref())?;
    if let Some(level) = &args.level {
        let path = format!("/logging?level={level}");
        let answer = dataplane::post(&running, &args.host, AdminPage::Admin, &path).await?;
        return crate::output::line(String::from_utf8_lossy(&answer).trim_end());
    }
    let path = running.log_path(&args.host)?;
    let missing = |problem: std::io::Error| {
        VerbError::new(
            ExitStatus::Missing,
            path.display().to_string(),
            problem.to_string(),
            "wait until the host has written something",
        )
    };
    let mut log = tokio::fs::File::open(&path).await.map_err(missing)?;
    if let Some(lines) = args.tail {
        let text = tokio::fs::read(&path).await.map_err(missing)?;
        log.seek(SeekFrom::Start(start_of_last(&text, lines)))
            .await
            .map_err(missing)?;
    }
    copy(log, args.follow)
        .await
        .map_err(|problem| match problem.kind() {
            // The reader of the output has ended, for example `head`.
            std::io::ErrorKind::BrokenPipe => VerbError::already_printed(ExitStatus::Done),
            _ => VerbError::failed(
                path.display().to_string(),
                problem,
                "make the log readable, or free some space where the output goes",
            ),
        })
}

/// Prints the access log of a data plane, from the process's memory.
async fn access_log(args: &LogsArgs) -> VerbResult {
    let mut admin = admin::connect(&args.mesh).await?;
    let request = ObserveRequest {
        tail: args
            .tail
            .map_or(u32::MAX, |lines| u32::try_from(lines).unwrap_or(u32::MAX)),
        follow: args.follow,
        ..observe::request(
            Subject::Logs,
            args.tenant.as_deref(),
            std::slice::from_ref(&args.host),
        )
    };
    let observation = observe::begin(&mut admin, request).await?;
    let mut stop = signals::watch()?;
    let each = |line: &str| crate::output::line(&observe::printable(line)).map(|()| true);
    observation.lines(&mut stop, each).await
}

/// Returns the offset at which the last `lines` lines begin.
fn start_of_last(text: &[u8], lines: usize) -> u64 {
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    let starts = body
        .iter()
        .enumerate()
        .rev()
        .filter(|(_, byte)| **byte == b'\n')
        .map(|(at, _)| at + 1);
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

/// Restarts at the beginning if the file is shorter than what was read: the world truncates logs
/// that grow too long.
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
        for (text, lines, want) in [
            ("a\nb\nc\n", 1, 4),
            ("a\nb\nc\n", 2, 2),
            ("a\nb\nc", 1, 4),
            ("a\nb\n", 9, 0),
            ("", 3, 0),
            ("a\n", 0, 2),
        ] {
            assert_eq!(
                start_of_last(text.as_bytes(), lines),
                want,
                "{text:?} {lines}"
            );
        }
    }
}
