//! Drives a proxy with wrk or h2load for a bounded time and divides its CPU time by the answers counted.

use canal_bench_peers::generators::{self, Answers};
use canal_bench_peers::process::Process;

use crate::Run;

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

    fn drive(self, proxy: &Process, seconds: u32) -> anyhow::Result<Answers> {
        let url = format!("http://{}/", proxy.address);
        match self {
            Case::Http1 => generators::wrk(&["-t1", "-c64", &format!("-d{seconds}s"), &url]),
            Case::H2c => generators::h2load(&["-t1", "-c16", "-m16", &format!("-D{seconds}"), &url]),
        }
    }
}

pub(crate) fn measure(proxy: &Process, case: Case, seconds: u32) -> anyhow::Result<Run> {
    case.drive(proxy, 1)?;
    let before = proxy.cpu_us()?;
    let Answers { ok, failed } = case.drive(proxy, seconds)?;
    let after = proxy.cpu_us()?;
    anyhow::ensure!(ok > 0, "{}: no request was answered", case.name());
    let n = ok as f64;
    Ok(Run { requests: ok, failed, user_us: (after.0 - before.0) / n, sys_us: (after.1 - before.1) / n, rss_mib: proxy.rss_mib()? })
}
