//! [`DemoWorld`]: the demo's world while the demo runs. It is brought up from the built-in YAML, runs clients in its pods, and is removed
//! at the end.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_world::HostStatus;
use serde_json::Value;
use tokio::process::Child;

use crate::admin::{self, Admin};
use crate::demo::screen::{DemoOutput, Expectation};
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::running_world::{self, RunningWorld};
use crate::signals::StopSignal;
use crate::verbs::status;
use crate::{bundled_topology, verbs};

/// Timeout of one client's run.
/// The longest load lasts 30 s, which leaves half as much for a busy machine.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(45);
/// Timeout for the world to be completely ready.
/// `canal up` waits as long by default.
const UP_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between two readiness checks.
/// An operator does not notice the delay, and a check is a few requests.
const POLL: Duration = Duration::from_millis(100);

/// Returns the client pod of a tenant near the page.
pub(crate) fn client(tenant: &str) -> String {
    format!("{tenant}/bookinfo/client-0")
}

/// The running world, and a client of the controller's API.
pub(crate) struct DemoWorld {
    pub(crate) running: Arc<RunningWorld>,
    pub(crate) admin: Admin,
}

/// Output and exit code of a client.
#[derive(Debug)]
pub(crate) struct ClientOutput {
    /// Exit code; `None` if a signal ended the client.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl ClientOutput {
    /// Returns the output for an expectation: what the client printed, or why it failed, on one
    /// short line.
    pub(crate) fn brief(&self) -> String {
        let text = if self.stdout.trim().is_empty() {
            self.stderr.trim()
        } else {
            self.stdout.trim()
        };
        let line: String = text
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
            .chars()
            // An expectation's line stays at two lines of a terminal.
            .take(160)
            .collect();
        match self.code {
            Some(0) => line,
            Some(code) => format!("exit {code}: {line}"),
            None => format!("killed: {line}"),
        }
    }
}

impl DemoWorld {
    /// Brings the world up, and waits until it is completely ready and every data plane has its
    /// configuration.
    pub(crate) async fn up(screen: &mut DemoOutput, stop: &mut StopSignal) -> VerbResult<Self> {
        let step = screen.begin(
            "The world comes up: two AZs, each with an edge, two gateway replicas and a key server; three tenants with the same addresses",
        );
        let started = Instant::now();
        let scenery = bundled_topology::demo()?;
        let running = running_world::up_ephemeral(
            scenery.topology.clone(),
            bundled_topology::free_name("demo")?,
        )
        .await?;
        let ready = tokio::select! {
            () = stop.wait() => Err(VerbError::new(ExitStatus::Interrupted, "demo", "interrupted while the world came up", "")),
            ready = Self::wait_until_ready(&running) => ready,
        };
        let ready = match ready {
            Ok(ready) => ready,
            Err(failure) => {
                // Nothing may remain. Only the original error is reported.
                let _ = running.down().await;
                return Err(failure);
            }
        };
        let (admin, hosts, generation) = ready;
        let seen = format!(
            "{hosts} processes ready, generation {generation} on every data plane, after {:.1} s",
            started.elapsed().as_secs_f64()
        );
        let expected = format!(
            "all processes ready and all data planes configured within {} s",
            UP_TIMEOUT.as_secs()
        );
        screen.end(step, Ok(vec![Expectation::new(true, expected, seen)]));
        Ok(Self { running, admin })
    }

    /// Returns the admin client, the number of processes and the generation once all is ready.
    async fn wait_until_ready(running: &Arc<RunningWorld>) -> VerbResult<(Admin, usize, u64)> {
        let all = async {
            let hosts = ready(running).await?;
            bundled_topology::install_demo_keys(running).await?;
            let mut admin = admin::connect_in(running.clone()).await?;
            let planes = running
                .hosts()?
                .iter()
                .filter(|host| is_plane(host))
                .count();
            loop {
                let status = status::converged(&mut admin, 1).await?;
                if status.subscribers.iter().filter(|s| s.connected).count() >= planes {
                    return Ok((admin, hosts, status.generation));
                }
                tokio::time::sleep(POLL).await;
            }
        };
        match tokio::time::timeout(UP_TIMEOUT, all).await {
            Ok(started) => started,
            Err(_) => Err(VerbError::failed(
                "demo",
                unready(running)?,
                "keep the world with `canal up demo`, and read `canal logs HOST`",
            )),
        }
    }

    /// Runs a client in a pod to its end.
    pub(crate) async fn run(&self, host: &str, argv: &[&str]) -> VerbResult<ClientOutput> {
        self.listen(self.spawn(host, argv)?, argv).await
    }

    /// Starts a client in a pod. The client is killed when the demo ends.
    pub(crate) fn spawn(&self, host: &str, argv: &[&str]) -> VerbResult<Child> {
        let mut command = self.running.command(host, argv)?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command.spawn().map_err(|problem| {
            VerbError::failed(
                host,
                format!("{}: {problem}", argv.join(" ")),
                "install it with `make setup`",
            )
        })
    }

    /// Waits for a client's end.
    pub(crate) async fn listen(&self, child: Child, argv: &[&str]) -> VerbResult<ClientOutput> {
        let place = argv.join(" ");
        match tokio::time::timeout(CLIENT_TIMEOUT, child.wait_with_output()).await {
            Ok(Ok(output)) => Ok(ClientOutput {
                code: output.status.code(),
                stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
                stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            }),
            Ok(Err(problem)) => Err(VerbError::failed(place, problem, "run the demo again")),
            Err(_) => Err(VerbError::failed(
                place,
                format!("did not end within {} s", CLIENT_TIMEOUT.as_secs()),
                "run the demo on a machine with less load",
            )),
        }
    }

    /// Runs a client that prints JSON. A client that prints none failed before it began.
    pub(crate) async fn report(&self, host: &str, argv: &[&str]) -> VerbResult<Value> {
        let finished = self.run(host, argv).await?;
        parse(&finished, argv)
    }

    /// Runs `canal …` like an operator, and returns the printed lines. A verb that fails is an
    /// error.
    pub(crate) async fn canal(&self, argv: &[&str]) -> VerbResult<Vec<String>> {
        let failed = |problem: std::io::Error| {
            VerbError::failed(
                "canal",
                problem,
                "start `canal` from a file that still exists",
            )
        };
        let mut command = tokio::process::Command::new(std::env::current_exe().map_err(failed)?);
        command.args(argv).env("CANAL_WORLD", self.running.name());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let finished = self.listen(command.spawn().map_err(failed)?, argv).await?;
        match finished.code {
            Some(0) => Ok(finished.stdout.lines().map(ToOwned::to_owned).collect()),
            _ => Err(VerbError::failed(
                format!("canal {}", argv.join(" ")),
                finished.brief(),
                "",
            )),
        }
    }

    /// Applies YAML to a tenant, waits until every data plane runs it, and returns how long that
    /// took.
    pub(crate) async fn apply(
        &self,
        tenant: &str,
        name: &str,
        yaml: String,
    ) -> VerbResult<Duration> {
        verbs::apply::apply_text(&mut self.admin.clone(), tenant, name, yaml).await
    }

    /// Removes the world and reports the time.
    pub(crate) async fn down(self, screen: &mut DemoOutput) -> VerbResult {
        let started = Instant::now();
        drop(self.admin);
        self.running.down().await?;
        screen.print_line(&format!(
            "\nThe world was removed in {:.1} s.",
            started.elapsed().as_secs_f64()
        ));
        Ok(())
    }
}

/// Returns the JSON that a client printed.
pub(crate) fn parse(finished: &ClientOutput, argv: &[&str]) -> VerbResult<Value> {
    serde_json::from_str(&finished.stdout)
        .map_err(|_| VerbError::failed(argv.join(" "), finished.brief(), ""))
}

/// Waits until every process is ready, and returns their number.
async fn ready(running: &RunningWorld) -> VerbResult<usize> {
    loop {
        let hosts = running.hosts()?;
        let with_job = || hosts.iter().filter(|host| host.environment.job.is_some());
        if with_job().all(|host| host.process.ready) {
            return Ok(with_job().count());
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Returns whether a host runs a data plane. Nodes without a proxy run none, and subscribe to
/// nothing.
fn is_plane(host: &HostStatus) -> bool {
    matches!(
        host.environment.kind.as_str(),
        "edge" | "gateway" | "node" | "keyServer"
    ) && host.environment.job.is_some()
}

/// Lists the processes that are not ready, for the error.
fn unready(running: &RunningWorld) -> VerbResult<String> {
    let hosts = running.hosts()?;
    let waiting = hosts
        .iter()
        .filter(|host| host.environment.job.is_some() && !host.process.ready);
    let list: Vec<String> = waiting
        .map(|host| {
            format!(
                "{} ({})",
                host.environment.name,
                running_world::phase(&host.process)
            )
        })
        .collect();
    let pending = if list.is_empty() {
        "all processes are ready, but not all data planes are configured".to_owned()
    } else {
        list.join(", ")
    };
    Ok(format!(
        "not ready after {} s: {pending}",
        UP_TIMEOUT.as_secs()
    ))
}
