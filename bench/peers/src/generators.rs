//! wrk and h2load: runs them on the load's core, and reads their reports.

use std::process::Command;

use anyhow::Context;

use crate::process::LOAD_CORE;

/// Counts and times that a load generator measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GeneratorReport {
    pub ok: u64,
    pub failed: u64,
}

pub fn wrk(words: &[&str]) -> anyhow::Result<GeneratorReport> {
    let text = run("wrk", words)?;
    read_wrk(&text).with_context(|| format!("wrk printed unexpected output: {text}"))
}

pub fn h2load(words: &[&str]) -> anyhow::Result<GeneratorReport> {
    let text = run("h2load", words)?;
    read_h2load(&text).with_context(|| format!("h2load printed unexpected output: {text}"))
}

fn run(program: &str, words: &[&str]) -> anyhow::Result<String> {
    let out = Command::new("taskset")
        .args(["-c", LOAD_CORE, program])
        .args(words)
        .output()?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    anyhow::ensure!(
        out.status.success(),
        "{program} failed: {text}{}",
        String::from_utf8_lossy(&out.stderr)
    );
    Ok(text)
}

/// Reads `  123456 requests in 5.00s, …`, and `Non-2xx or 3xx responses: 7` if there were any.
fn read_wrk(text: &str) -> Option<GeneratorReport> {
    let line = |part: &str| text.lines().find(|l| l.contains(part));
    let done: u64 = line(" requests in ")?
        .split_whitespace()
        .next()?
        .parse()
        .ok()?;
    let bad = line("Non-2xx")
        .and_then(|l| l.rsplit(' ').next()?.parse().ok())
        .unwrap_or(0);
    let errors: u64 = line("Socket errors")
        .map(|l| {
            l.split(|c: char| !c.is_ascii_digit())
                .filter_map(|w| w.parse::<u64>().ok())
                .sum()
        })
        .unwrap_or(0);
    Some(GeneratorReport {
        ok: done.saturating_sub(bad),
        failed: bad + errors,
    })
}

/// Reads `requests: 100 total, 100 started, 100 done, 100 succeeded, 0 failed, 0 errored, 0
/// timeout`.
fn read_h2load(text: &str) -> Option<GeneratorReport> {
    let line = text.lines().find(|l| l.starts_with("requests:"))?;
    let n = |what: &str| -> Option<u64> {
        line.split(", ")
            .find(|p| p.ends_with(what))?
            .rsplit(' ')
            .nth(1)?
            .parse()
            .ok()
    };
    Some(GeneratorReport {
        ok: n("succeeded")?,
        failed: n("failed")? + n("errored")?,
    })
}

#[cfg(test)]
mod tests {
    use super::GeneratorReport;

    #[test]
    fn outputs_are_read() {
        let wrk = "Running\n  1234 requests in 5.00s, 1MB read\n  Socket errors: connect 1, read 2, write 0, timeout 0\n  Non-2xx or 3xx responses: 7\n";
        assert_eq!(
            super::read_wrk(wrk),
            Some(GeneratorReport {
                ok: 1227,
                failed: 10
            })
        );
        let h2 = "requests: 100 total, 100 started, 99 done, 98 succeeded, 1 failed, 1 errored, 0 timeout\n";
        assert_eq!(
            super::read_h2load(h2),
            Some(GeneratorReport { ok: 98, failed: 2 })
        );
    }
}
