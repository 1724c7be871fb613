//! The live view of a world: processes, connections, generations and requests. [`WorldSampler`]
//! collects samples, pure functions turn them into lines, and [`Canvas`] draws them.

use std::collections::BTreeMap;
use std::io::{Stdout, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_wire::api::StatusResponse;
use canal_world::HostStatus;
use crossterm::terminal::{self, ClearType, EnterAlternateScreen, LeaveAlternateScreen};
use crossterm::{cursor, execute, queue, style};

use crate::admin::{self, Admin};
use crate::dataplane::{self, AdminPage};
use crate::exit::VerbResult;
use crate::metrics::{self, Sample};
use crate::output::{TextTable, size};
use crate::running_world::{self, HostKindFilter, RunningWorld};
use crate::verbs::status;

/// Sample of one world at one time.
struct WorldSample {
    at: Instant,
    hosts: Vec<HostStatus>,
    /// `Err` contains the reason why the controller gave no answer.
    status: Result<StatusResponse, String>,
    /// Total requests over all gateways by tenant, service and class of status, which are joined by
    /// tabs.
    requests: BTreeMap<String, f64>,
    /// CPU time of the mesh's own processes.
    cpu: BTreeMap<String, Duration>,
}

/// Samples a world repeatedly. It remembers the last sample, for rates.
pub(crate) struct WorldSampler {
    running: Arc<RunningWorld>,
    admin: Option<Admin>,
    last: Option<WorldSample>,
}

impl WorldSampler {
    pub(crate) fn new(running: Arc<RunningWorld>) -> Self {
        Self {
            running,
            admin: None,
            last: None,
        }
    }

    /// Returns the current lines of the view.
    pub(crate) async fn refresh(&mut self) -> VerbResult<Vec<String>> {
        let current = self.observe().await?;
        let lines = lines(self.running.name(), &current, self.last.as_ref());
        self.last = Some(current);
        Ok(lines)
    }

    /// Returns one line per host and data plane, without values that change permanently.
    pub(crate) async fn states(&mut self) -> VerbResult<Vec<String>> {
        let current = self.observe().await?;
        let hosts = current
            .hosts
            .iter()
            .filter(|h| h.environment.job.is_some())
            .map(|h| {
                format!(
                    "{}: {}",
                    h.environment.name,
                    running_world::phase(&h.process)
                )
            });
        let planes = current.status.iter().flat_map(|s| &s.subscribers).map(|s| {
            let state = if s.connected { "connected" } else { "away" };
            format!(
                "{} {}, generation {} of {}",
                s.name, state, s.generation_acked, s.generation_wanted
            )
        });
        Ok(hosts.chain(planes).collect())
    }

    async fn observe(&mut self) -> VerbResult<WorldSample> {
        let hosts = self.running.hosts()?;
        let status = self.status().await;
        let mut requests = BTreeMap::new();
        for gateway in self.running.names_of(HostKindFilter::Gateway)? {
            // A replica that is down returns no metrics. The list of processes shows that it is
            // down.
            if let Ok(text) =
                dataplane::get(&self.running, &gateway, AdminPage::Metrics, "/metrics").await
            {
                count_requests(
                    &mut requests,
                    &metrics::parse(&String::from_utf8_lossy(&text)),
                );
            }
        }
        let mesh = hosts.iter().filter(|host| is_mesh(host));
        let cpu = mesh
            .filter_map(|host| {
                Some((
                    host.environment.name.clone(),
                    self.running.cpu(&host.environment.name).ok()?.total(),
                ))
            })
            .collect();
        Ok(WorldSample {
            at: Instant::now(),
            hosts,
            status,
            requests,
            cpu,
        })
    }

    async fn status(&mut self) -> Result<StatusResponse, String> {
        if self.admin.is_none() {
            self.admin = Some(
                admin::connect_in(self.running.clone())
                    .await
                    .map_err(|failure| failure.what)?,
            );
        }
        let Some(admin) = &mut self.admin else {
            return Err("not connected".to_owned());
        };
        let answer = status::fetch(admin).await;
        if answer.is_err() {
            self.admin = None;
        }
        answer.map_err(|failure| failure.what)
    }
}

fn is_mesh(host: &HostStatus) -> bool {
    matches!(
        host.environment.kind.as_str(),
        "controller" | "edge" | "gateway" | "node" | "keyServer"
    )
}

fn count_requests(counts: &mut BTreeMap<String, f64>, samples: &[Sample]) {
    let label = |sample: &Sample, name: &str| {
        sample
            .labels
            .get(name)
            .cloned()
            .unwrap_or_else(|| "-".to_owned())
    };
    for sample in samples.iter().filter(|s| s.name == "istio_requests_total") {
        let class = label(sample, "response_code")
            .chars()
            .take(1)
            .collect::<String>()
            + "xx";
        let key = format!(
            "{}\t{}\t{class}",
            label(sample, "tenant"),
            label(sample, "destination_service")
        );
        *counts.entry(key).or_default() += sample.value;
    }
}

/// Returns the lines of the whole view.
fn lines(world: &str, current: &WorldSample, last: Option<&WorldSample>) -> Vec<String> {
    let ready = current
        .hosts
        .iter()
        .filter(|h| h.environment.job.is_some() && h.process.ready)
        .count();
    let all = current
        .hosts
        .iter()
        .filter(|h| h.environment.job.is_some())
        .count();
    let mut lines = vec![
        format!("world {world}: {ready} of {all} processes ready    ctrl-c takes it down"),
        String::new(),
    ];
    lines.extend(mesh_lines(current, last));
    lines.push(String::new());
    lines.extend(request_lines(current, last));
    let troubled: Vec<String> = current
        .hosts
        .iter()
        .filter(|h| h.environment.job.is_some() && !h.process.ready)
        .map(|h| {
            format!(
                "{}: {}",
                h.environment.name,
                running_world::phase(&h.process)
            )
        })
        .collect();
    if !troubled.is_empty() {
        lines.extend([String::new(), "NOT READY".to_owned()]);
        lines.extend(troubled);
    }
    lines
}

/// Returns the mesh's own processes with their state in the control plane.
fn mesh_lines(current: &WorldSample, last: Option<&WorldSample>) -> Vec<String> {
    let mut table = TextTable::new(&[
        "PROCESS",
        "KIND",
        "AZ",
        "STATE",
        "CPU",
        "RESTARTS",
        "CONTROLLER",
        "GENERATION",
        "SENT",
    ]);
    for host in current.hosts.iter().filter(|host| is_mesh(host)) {
        let name = &host.environment.name;
        let subscriber = current
            .status
            .as_ref()
            .ok()
            .and_then(|s| s.subscribers.iter().find(|s| s.name == *name));
        let (connection, generation, sent) = match subscriber {
            Some(s) => (
                if s.connected { "connected" } else { "away" }.to_owned(),
                format!("{} of {}", s.generation_acked, s.generation_wanted),
                size(s.bytes_sent),
            ),
            // The controller does not subscribe to itself. Its row shows the generation that it
            // publishes, or the reason why it gave no answer.
            None if host.environment.kind == "controller" => match &current.status {
                Ok(status) => (
                    "answers".to_owned(),
                    status.generation.to_string(),
                    String::new(),
                ),
                Err(problem) => (problem.clone(), String::new(), String::new()),
            },
            // The process has not subscribed yet, or the controller gave no answer.
            None => ("-".to_owned(), String::new(), String::new()),
        };
        // A use needs two samples of the same process.
        let cpu = busy(current, last, name)
            .map_or_else(|| "-".to_owned(), |share| format!("{share:.0} %"));
        table.row([
            name.clone(),
            host.environment.kind.clone(),
            host.environment.az.clone(),
            running_world::phase(&host.process),
            cpu,
            host.process.restarts.to_string(),
            connection,
            generation,
            sent,
        ]);
    }
    table.lines()
}

/// Returns the CPU use since the last sample, in percent of one core.
fn busy(current: &WorldSample, last: Option<&WorldSample>, host: &str) -> Option<f64> {
    let last = last?;
    let used = current.cpu.get(host)?.checked_sub(*last.cpu.get(host)?)?;
    Some(100.0 * used.as_secs_f64() / current.at.duration_since(last.at).as_secs_f64().max(1e-3))
}

/// Returns requests per second by service and class of status.
fn request_lines(current: &WorldSample, last: Option<&WorldSample>) -> Vec<String> {
    let mut table = TextTable::new(&["TENANT", "SERVICE", "STATUS", "REQUESTS", "PER SECOND"]);
    for (key, total) in &current.requests {
        let mut parts = key.split('\t');
        let mut part = || parts.next().unwrap_or_default().to_owned();
        let (tenant, service, class) = (part(), part(), part());
        let rate = last.map(|last| {
            let before = last.requests.get(key).copied().unwrap_or(0.0);
            (total - before).max(0.0) / current.at.duration_since(last.at).as_secs_f64().max(1e-3)
        });
        let rate = rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
        table.row([tenant, service, class, format!("{total:.0}"), rate]);
    }
    match current.requests.is_empty() {
        true => vec![
            "no requests through the gateways yet; try".to_owned(),
            "  canal world exec alpha/bookinfo/client-0 -- curl -s http://productpage:9080/"
                .to_owned(),
        ],
        false => table.lines(),
    }
}

/// The terminal's alternate screen. The normal screen returns when this is dropped.
pub(crate) struct Canvas {
    out: Stdout,
}

impl Canvas {
    pub(crate) fn open() -> std::io::Result<Self> {
        let mut out = std::io::stdout();
        execute!(out, EnterAlternateScreen, cursor::Hide)?;
        Ok(Self { out })
    }

    /// Draws lines from the top, cut to the terminal's size.
    pub(crate) fn draw(&mut self, lines: &[String]) -> std::io::Result<()> {
        let (width, height) = terminal::size()?;
        for (row, line) in (0..height).zip(
            lines
                .iter()
                .map(String::as_str)
                .chain(std::iter::repeat("")),
        ) {
            let line: String = line.chars().take(usize::from(width)).collect();
            queue!(
                self.out,
                cursor::MoveTo(0, row),
                terminal::Clear(ClearType::CurrentLine),
                style::Print(line)
            )?;
        }
        self.out.flush()
    }
}

impl Drop for Canvas {
    fn drop(&mut self) {
        // A terminal that is gone needs no restoring.
        let _ = execute!(self.out, cursor::Show, LeaveAlternateScreen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at: Instant, requests: f64, cpu_ms: u64) -> WorldSample {
        WorldSample {
            at,
            hosts: vec![],
            status: Err("down".into()),
            requests: [("alpha\treviews.bookinfo\t2xx".to_owned(), requests)].into(),
            cpu: [("gw-1".to_owned(), Duration::from_millis(cpu_ms))].into(),
        }
    }

    #[test]
    fn rates_are_differences_over_time() {
        let start = Instant::now();
        let (first, second) = (
            sample(start, 100.0, 500),
            sample(start + Duration::from_secs(2), 300.0, 1_000),
        );
        assert_eq!(
            busy(&second, Some(&first), "gw-1").map(f64::round),
            Some(25.0)
        );
        assert_eq!(busy(&second, None, "gw-1"), None);
        let lines = request_lines(&second, Some(&first));
        assert!(
            lines[1].contains("reviews.bookinfo") && lines[1].ends_with("100.0"),
            "{lines:?}"
        );
    }

    #[test]
    fn requests_are_counted_by_service_and_class() {
        let text = "istio_requests_total{destination_service=\"a\",response_code=\"200\"} 3\nistio_requests_total{destination_service=\"a\",response_code=\"204\"} 4\nother 1\n";
        let mut counts = BTreeMap::new();
        count_requests(&mut counts, &metrics::parse(text));
        assert_eq!(counts.values().copied().collect::<Vec<_>>(), [7.0]);
    }
}
