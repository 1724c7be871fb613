//! Drives a proxy for a bounded time, at its maximum or at a stated rate, and divides its CPU time
//! by the number of responses. The load generator depends on the case and is the same for all
//! proxies.

use std::sync::Arc;

use canal_bench_peers::canal::{TOKEN, service_address};
use canal_bench_peers::generators::{self, GeneratorReport};
use canal_bench_peers::process::PinnedProcess;
use rustls::ClientConfig;

use crate::asker::{self, AskerManner, AskerPlan};
use crate::case::{ProxyCase, SERVICES};
use crate::peers::SECURE_SERVICE;

/// Warm-up before the measurement if not all services are visited: the argument of h2load, and the
/// seconds for the others.
const WARM: (&str, f64) = ("-D500ms", 0.5);

/// Rate at which a load sends its requests.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LoadPace {
    /// Each connection sends the next request after a response.
    Saturated,
    /// Requests per second.
    Rate(f64),
}

/// The figures of one measured run.
#[derive(Clone, Copy)]
pub(crate) struct LoadSample {
    pub(crate) requests: u64,
    pub(crate) failed: u64,
    pub(crate) per_second: f64,
    pub(crate) user_us: f64,
    pub(crate) sys_us: f64,
    /// Utilization of the proxy's core, 0 to 1.
    pub(crate) busy: f64,
    pub(crate) rss_mib: f64,
}

impl LoadSample {
    pub(crate) fn cpu(&self) -> f64 {
        self.user_us + self.sys_us
    }
}

/// Load on one kind of proxy in one case.
pub(crate) struct ProxyLoad {
    pub(crate) case: ProxyCase,
    /// True if tunnels are HBONE; other proxies have streams.
    pub(crate) is_canal: bool,
    pub(crate) tls: Arc<ClientConfig>,
}

impl ProxyLoad {
    /// Makes the proxy open its persistent connections.
    pub(crate) fn warm(&self, proxy: &PinnedProcess) -> anyhow::Result<()> {
        match self.case {
            ProxyCase::Close => wrk(self.case, proxy, 1).map(drop),
            ProxyCase::ManyServices => asker::visit(&self.plan(proxy, LoadPace::Saturated, 0.0)),
            ProxyCase::OneService | ProxyCase::Mtls => {
                asker::run_load(&self.plan(proxy, LoadPace::Saturated, WARM.1), &|| {
                    proxy.cpu_us()
                })
                .map(drop)
            }
            ProxyCase::Http1 | ProxyCase::H2c | ProxyCase::Policies => {
                h2load(self.case, proxy, WARM.0, None).map(drop)
            }
        }
    }

    pub(crate) fn measure(
        &self,
        proxy: &PinnedProcess,
        pace: LoadPace,
        seconds: u32,
    ) -> anyhow::Result<LoadSample> {
        // wrk and h2load cannot send these loads.
        let is_own = self.case.is_tls()
            || matches!((self.case, pace), (ProxyCase::Close, LoadPace::Rate(_)));
        let (GeneratorReport { ok, failed }, seconds, cpu) = if is_own {
            let window = asker::run_load(&self.plan(proxy, pace, f64::from(seconds)), &|| {
                proxy.cpu_us()
            })?;
            (window.answers, window.seconds, window.cpu)
        } else {
            // CPU time is read outside the run, so start and end of the generator count as well.
            let before = proxy.cpu_us()?;
            // wrk speaks HTTP/1.1 only and has no rate, so h2load makes the other loads.
            let answers = match (self.case, pace) {
                (ProxyCase::H2c, LoadPace::Saturated) => {
                    h2load(self.case, proxy, &format!("-D{seconds}"), None)?
                }
                (_, LoadPace::Saturated) => wrk(self.case, proxy, seconds)?,
                (_, LoadPace::Rate(rate)) => {
                    h2load(self.case, proxy, &format!("-D{seconds}"), Some(rate))?
                }
            };
            let after = proxy.cpu_us()?;
            (
                answers,
                f64::from(seconds),
                (after.0 - before.0, after.1 - before.1),
            )
        };
        anyhow::ensure!(ok > 0, "{}: no request was answered", self.case.name());
        let n = ok as f64;
        Ok(LoadSample {
            requests: ok,
            failed,
            per_second: n / seconds,
            user_us: cpu.0 / n,
            sys_us: cpu.1 / n,
            // A core has 10^6 µs per second.
            busy: (cpu.0 + cpu.1) / (seconds * 1e6),
            rss_mib: proxy.rss_mib()?,
        })
    }

    fn plan(&self, proxy: &PinnedProcess, pace: LoadPace, seconds: f64) -> AskerPlan {
        let manner = match (self.case, self.is_canal) {
            (ProxyCase::Close, _) => AskerManner::Connection,
            (ProxyCase::Mtls, true) => AskerManner::ReusedTunnel,
            (_, true) => AskerManner::Tunnel,
            (_, false) => AskerManner::Stream,
        };
        let name = |n| {
            if self.is_canal {
                format!("{}:80", service_address(n))
            } else {
                format!("s{n}")
            }
        };
        let services = match self.case {
            ProxyCase::ManyServices => (0..SERVICES).map(name).collect(),
            ProxyCase::Mtls if self.is_canal => vec![SECURE_SERVICE.to_owned()],
            _ => vec![name(0)],
        };
        let rate = if let LoadPace::Rate(rate) = pace {
            Some(rate)
        } else {
            None
        };
        let tls = self.case.is_tls().then(|| self.tls.clone());
        AskerPlan {
            manner,
            address: proxy.address,
            tls,
            size: self.case.size(),
            services,
            rate,
            seconds,
        }
    }
}

fn url(case: ProxyCase, proxy: &PinnedProcess) -> String {
    format!("http://{}{}", proxy.address, case.path())
}

/// Returns the field that a request has in addition to the generator's own.
fn field(case: ProxyCase) -> Option<String> {
    match case {
        ProxyCase::Policies => Some(format!("authorization: Bearer {TOKEN}")),
        ProxyCase::Close => Some("connection: close".into()),
        _ => None,
    }
}

fn wrk(case: ProxyCase, proxy: &PinnedProcess, seconds: u32) -> anyhow::Result<GeneratorReport> {
    let (connections, _) = case.size();
    let mut words = vec![
        "-t1".into(),
        format!("-c{connections}"),
        format!("-d{seconds}s"),
    ];
    words.extend(
        field(case)
            .into_iter()
            .flat_map(|field| ["-H".into(), field]),
    );
    words.push(url(case, proxy));
    generators::wrk(&words.iter().map(String::as_str).collect::<Vec<_>>())
}

fn h2load(
    case: ProxyCase,
    proxy: &PinnedProcess,
    duration: &str,
    rate: Option<f64>,
) -> anyhow::Result<GeneratorReport> {
    let (connections, streams) = case.size();
    let mut words = vec![
        "-t1".into(),
        format!("-c{connections}"),
        format!("-m{streams}"),
        duration.into(),
    ];
    if case != ProxyCase::H2c {
        words.push("--h1".into());
    }
    // The generator has a rate per connection.
    words.extend(rate.map(|rate| format!("--rps={}", rate / connections as f64)));
    words.extend(
        field(case)
            .into_iter()
            .flat_map(|field| ["-H".into(), field]),
    );
    words.push(url(case, proxy));
    generators::h2load(&words.iter().map(String::as_str).collect::<Vec<_>>())
}
