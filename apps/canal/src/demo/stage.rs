//! The demo's world while the demo runs: brought up from the YAML that is built in, clients run in its pods, removed at the end.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_world::Host;
use serde_json::Value;
use tokio::process::Child;

use crate::admin::{self, Admin};
use crate::demo::screen::{Promise, Screen};
use crate::exit::{Exit, Failure, Outcome};
use crate::realm::{self, Realm};
use crate::signals::Stop;
use crate::verbs::status;
use crate::{scenery, verbs};

/// One client must end in this time.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(45);
/// The world must be whole in this time.
const UP_TIMEOUT: Duration = Duration::from_secs(60);
/// How often readiness is looked at.
const POLL: Duration = Duration::from_millis(100);

/// The client pod near the page, of a tenant.
pub(crate) fn client(tenant: &str) -> String {
    format!("{tenant}/bookinfo/client-0")
}

/// The world, and the controller's API.
pub(crate) struct Stage {
    pub(crate) realm: Arc<Realm>,
    pub(crate) admin: Admin,
}

/// What a client said.
#[derive(Debug)]
pub(crate) struct Said {
    /// `None` when a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Said {
    /// Output for a promise: what it printed, or why it failed, on one short line.
    pub(crate) fn brief(&self) -> String {
        let text = if self.stdout.trim().is_empty() { self.stderr.trim() } else { self.stdout.trim() };
        let line: String = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(160).collect();
        match self.code {
            Some(0) => line,
            Some(code) => format!("exit {code}: {line}"),
            None => format!("killed: {line}"),
        }
    }
}

impl Stage {
    /// Brings the world up and waits until all of it is ready and every data plane has its configuration.
    pub(crate) async fn up(screen: &mut Screen, stop: &mut Stop) -> Outcome<Self> {
        let step = screen.begin(
            "The world comes up: two AZs, each with an edge, two gateway replicas and a key server; three tenants with the same addresses",
        );
        let started = Instant::now();
        let scenery = scenery::demo()?;
        let realm = realm::up_ephemeral(scenery.topology.clone(), scenery::free_name("demo")?).await?;
        let ready = tokio::select! {
            () = stop.wait() => Err(Failure::new(Exit::Interrupted, "demo", "interrupted while the world came up", "")),
            ready = Self::whole(&realm) => ready,
        };
        let ready = match ready {
            Ok(ready) => ready,
            Err(failure) => {
                // Nothing may stay behind; the failure is what there is to tell.
                let _ = realm.down().await;
                return Err(failure);
            }
        };
        let (admin, hosts, generation) = ready;
        let seen =
            format!("{hosts} processes ready, generation {generation} on every data plane, after {:.1} s", started.elapsed().as_secs_f64());
        let expected = format!("all processes ready and all data planes configured within {} s", UP_TIMEOUT.as_secs());
        screen.end(step, Ok(vec![Promise::new(true, expected, seen)]));
        Ok(Self { realm, admin })
    }

    /// The admin client, the number of processes and the generation once all is ready.
    async fn whole(realm: &Arc<Realm>) -> Outcome<(Admin, usize, u64)> {
        let all = async {
            let hosts = ready(realm).await?;
            scenery::dress_demo(realm).await?;
            let mut admin = admin::connect_in(realm.clone()).await?;
            let planes = realm.hosts()?.iter().filter(|host| is_plane(host)).count();
            loop {
                let status = status::converged(&mut admin, 1).await?;
                if status.subscribers.iter().filter(|s| s.connected).count() >= planes {
                    return Ok((admin, hosts, status.generation));
                }
                tokio::time::sleep(POLL).await;
            }
        };
        match tokio::time::timeout(UP_TIMEOUT, all).await {
            Ok(whole) => whole,
            Err(_) => Err(Failure::failed("demo", unready(realm)?, "`canal up demo` keeps the world; `canal logs HOST` tells why")),
        }
    }

    /// Runs a client in a pod to its end.
    pub(crate) async fn run(&self, host: &str, argv: &[&str]) -> Outcome<Said> {
        self.listen(self.spawn(host, argv)?, argv).await
    }

    /// Starts a client in a pod; it dies with the demo.
    pub(crate) fn spawn(&self, host: &str, argv: &[&str]) -> Outcome<Child> {
        let mut command = self.realm.command(host, argv)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command.spawn().map_err(|problem| Failure::failed(host, format!("{}: {problem}", argv.join(" ")), "install it with `make setup`"))
    }

    /// Waits for a client.
    pub(crate) async fn listen(&self, child: Child, argv: &[&str]) -> Outcome<Said> {
        let place = argv.join(" ");
        match tokio::time::timeout(CLIENT_TIMEOUT, child.wait_with_output()).await {
            Ok(Ok(output)) => Ok(Said {
                code: output.status.code(),
                stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
                stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            }),
            Ok(Err(problem)) => Err(Failure::failed(place, problem, "")),
            Err(_) => Err(Failure::failed(place, format!("did not end in {} s", CLIENT_TIMEOUT.as_secs()), "")),
        }
    }

    /// Runs a client that prints JSON; a client that prints none failed before it began.
    pub(crate) async fn report(&self, host: &str, argv: &[&str]) -> Outcome<Value> {
        let said = self.run(host, argv).await?;
        parse(&said, argv)
    }

    /// Runs `canal …` as an operator would, and gives its lines; a verb that fails is an error.
    pub(crate) async fn canal(&self, argv: &[&str]) -> Outcome<Vec<String>> {
        let failed = |problem: std::io::Error| Failure::failed("canal", problem, "");
        let mut command = tokio::process::Command::new(std::env::current_exe().map_err(failed)?);
        command.args(argv).env("CANAL_WORLD", self.realm.name());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let said = self.listen(command.spawn().map_err(failed)?, argv).await?;
        match said.code {
            Some(0) => Ok(said.stdout.lines().map(ToOwned::to_owned).collect()),
            _ => Err(Failure::failed(format!("canal {}", argv.join(" ")), said.brief(), "")),
        }
    }

    /// Applies YAML to a tenant and waits until every data plane runs it; how long that took.
    pub(crate) async fn apply(&self, tenant: &str, name: &str, yaml: String) -> Outcome<Duration> {
        verbs::apply::apply_text(&mut self.admin.clone(), tenant, name, yaml).await
    }

    /// Removes the world.
    pub(crate) async fn down(self, screen: &mut Screen) -> Outcome {
        let started = Instant::now();
        drop(self.admin);
        self.realm.down().await?;
        screen.say(&format!("\nThe world was removed in {:.1} s.", started.elapsed().as_secs_f64()));
        Ok(())
    }
}

/// The JSON a client printed.
pub(crate) fn parse(said: &Said, argv: &[&str]) -> Outcome<Value> {
    serde_json::from_str(&said.stdout).map_err(|_| Failure::failed(argv.join(" "), said.brief(), ""))
}

/// Waits until every process is ready; how many there are.
async fn ready(realm: &Realm) -> Outcome<usize> {
    loop {
        let hosts = realm.hosts()?;
        let with_job = || hosts.iter().filter(|host| host.seat.job.is_some());
        if with_job().all(|host| host.pulse.ready) {
            return Ok(with_job().count());
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Nodes without a proxy run nothing of ours, and subscribe to nothing.
fn is_plane(host: &Host) -> bool {
    matches!(host.seat.kind.as_str(), "edge" | "gateway" | "node" | "keyServer") && host.seat.job.is_some()
}

/// Who is not ready, for the failure.
fn unready(realm: &Realm) -> Outcome<String> {
    let hosts = realm.hosts()?;
    let waiting = hosts.iter().filter(|host| host.seat.job.is_some() && !host.pulse.ready);
    let list: Vec<String> = waiting.map(|host| format!("{} ({})", host.seat.name, realm::phase(&host.pulse))).collect();
    let whom = if list.is_empty() { "all processes are ready, but not all data planes are configured".to_owned() } else { list.join(", ") };
    Ok(format!("not whole after {} s: {whom}", UP_TIMEOUT.as_secs()))
}
