//! Drives a proxy with wrk or h2load for a bounded time and divides its CPU time by the answers counted.

use std::process::Command;

use anyhow::Context;

use crate::Run;
use crate::process::{LOAD_CORE, Process};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Case {
    /// wrk, 1 thread, 64 keep-alive connections, 23-byte answers.
    Http1,
    /// h2load, 16 connections x 16 streams, HTTP/2 without TLS in, HTTP/1.1 out.
    H2c,
}

impl Case {
    pub(crate) const ALL: [Case; 2] = [Case::Http1, Case::H2c];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Case::Http1 => "HTTP/1.1 keep-alive",
            Case::H2c => "h2c to HTTP/1.1",
        }
    }

    fn command(self, port: u16, seconds: u32) -> Vec<String> {
        let url = format!("http://127.0.0.1:{port}/");
        let words: Vec<String> = match self {
            Case::Http1 => format!("wrk -t1 -c64 -d{seconds}s {url}"),
            Case::H2c => format!("h2load -t1 -c16 -m16 -D{seconds} {url}"),
        }
        .split(' ')
        .map(str::to_string)
        .collect();
        words
    }
}

pub(crate) fn measure(proxy: &Process, case: Case, seconds: u32) -> anyhow::Result<Run> {
    drive(proxy, case, 1)?;
    let before = proxy.cpu_us()?;
    let (requests, failed) = drive(proxy, case, seconds)?;
    let after = proxy.cpu_us()?;
    anyhow::ensure!(requests > 0, "{}: no request was answered", case.name());
    let n = requests as f64;
    Ok(Run { requests, failed, user_us: (after.0 - before.0) / n, sys_us: (after.1 - before.1) / n, rss_mib: proxy.rss_mib()? })
}

fn drive(proxy: &Process, case: Case, seconds: u32) -> anyhow::Result<(u64, u64)> {
    let out = Command::new("taskset").args(["-c", LOAD_CORE]).args(case.command(proxy.port, seconds)).output()?;
    let text = String::from_utf8_lossy(&out.stdout);
    anyhow::ensure!(out.status.success(), "load generator failed: {text}{}", String::from_utf8_lossy(&out.stderr));
    match case {
        Case::Http1 => wrk(&text),
        Case::H2c => h2load(&text),
    }
    .with_context(|| format!("unexpected output: {text}"))
}

/// `  123456 requests in 5.00s, …`, and `Non-2xx or 3xx responses: 7` when there were any.
fn wrk(text: &str) -> Option<(u64, u64)> {
    let line = |part: &str| text.lines().find(|l| l.contains(part));
    let done = line(" requests in ")?.split_whitespace().next()?.parse().ok()?;
    let bad = line("Non-2xx").and_then(|l| l.rsplit(' ').next()?.parse().ok()).unwrap_or(0);
    let errors: u64 =
        line("Socket errors").map(|l| l.split(|c: char| !c.is_ascii_digit()).filter_map(|w| w.parse::<u64>().ok()).sum()).unwrap_or(0);
    Some((done, bad + errors))
}

/// `requests: 100 total, 100 started, 100 done, 100 succeeded, 0 failed, 0 errored, 0 timeout`.
fn h2load(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().find(|l| l.starts_with("requests:"))?;
    let n = |what: &str| -> Option<u64> { line.split(", ").find(|p| p.ends_with(what))?.rsplit(' ').nth(1)?.parse().ok() };
    Some((n("succeeded")?, n("failed")? + n("errored")?))
}

#[cfg(test)]
mod tests {
    #[test]
    fn outputs_are_read() {
        let wrk = "Running\n  1234 requests in 5.00s, 1MB read\n  Socket errors: connect 1, read 2, write 0, timeout 0\n  Non-2xx or 3xx responses: 7\n";
        assert_eq!(super::wrk(wrk), Some((1234, 10)));
        let h2 = "requests: 100 total, 100 started, 99 done, 98 succeeded, 1 failed, 1 errored, 0 timeout\n";
        assert_eq!(super::h2load(h2), Some((98, 2)));
    }
}
