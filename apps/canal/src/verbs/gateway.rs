//! `canal gateway`: the replicas of the cloud tier: list, status, drain, undrain, replace, scale,
//! forget. This module waits; the controller decides where sessions go. It creates hosts only if
//! the mesh runs in a world; elsewhere the operator starts the processes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_json_api::v1::{FleetView, ReplicaListView, ReplicaOrderView, ServicePlacementView};
use canal_wire::api::{
    ExplainRequest, ExplainResponse, FleetRequest, FleetResponse, ReplicaRequest, ReplicaStatus,
};
use clap::{Args, Subcommand};

use crate::admin::{self, Admin, MeshArgs};
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::output::{self, OutputArgs, ProgressLine, TextTable, span};
use crate::running_world::RunningWorld;

/// Interval between two queries of a waiting verb. Replicas report every 200 ms while their tables
/// move, and once a second otherwise, so that a wait ends soon after the report.
const POLL: Duration = Duration::from_millis(200);
/// Time in which a drain order, and the tables that result from it, reach edges and replicas. The
/// tables go out over their streams as soon as the planner has made them. Nobody measured this
/// value, which has to exceed a pass of the planner and the delivery.
const ORDER_SPREADS_WITHIN: Duration = Duration::from_millis(500);

/// Handles the gateway replicas of the cloud tier
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal gateway list
  canal gateway drain gw-2 --timeout 120
  canal gateway scale b1 3")]
pub(crate) struct GatewayArgs {
    #[command(subcommand)]
    verb: GatewayVerb,
}

#[derive(Debug, Subcommand)]
enum GatewayVerb {
    /// Lists replicas: state, health, sessions, buckets
    #[command(
        after_help = "Examples:\n  canal gateway list\n  canal gateway list -o json | jq '.replicas[] | select(.up | not)'"
    )]
    List(ShowArgs),
    /// Shows edges, the AZs of services, and the effect of failures; or all about one service
    #[command(
        after_help = "Examples:\n  canal gateway status\n  canal gateway status alpha/bookinfo/reviews"
    )]
    Status {
        /// tenant/namespace/name
        service: Option<String>,
        #[command(flatten)]
        show: ShowArgs,
    },
    /// Sends a replica no new sessions, requests that clients leave it, and waits until no session
    /// is left
    #[command(
        after_help = "Examples:\n  canal gateway drain gw-2\n  canal gateway drain gw-2 --timeout 0     # only order it"
    )]
    Drain(WaitArgs),
    /// Revokes the order to drain
    #[command(after_help = "Examples:\n  canal gateway undrain gw-2")]
    Undrain(NameArgs),
    /// Starts a new replica beside the old one, drains the old one, and removes it
    #[command(after_help = "Examples:\n  canal gateway replace gw-2 --by gw-5")]
    Replace {
        /// Name of the new replica [default: the backend's name and a free number]
        #[arg(long, value_name = "NAME")]
        by: Option<String>,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Adds replicas to a backend, or drains and removes some
    #[command(
        after_help = "Examples:\n  canal gateway scale b1 3\n  canal gateway scale b9 1 --az az2      # a new backend"
    )]
    Scale {
        /// The backend
        backend: String,
        /// Desired number of replicas
        replicas: usize,
        /// AZ of a backend that has no replica yet
        #[arg(long)]
        az: Option<String>,
        #[command(flatten)]
        limit: LimitArgs,
        #[command(flatten)]
        show: ShowArgs,
    },
    /// Declares a silent replica gone: its sessions count as ended, its number becomes free
    #[command(after_help = "Examples:\n  canal gateway forget gw-2")]
    Forget(NameArgs),
}

#[derive(Debug, Args)]
struct ShowArgs {
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
struct NameArgs {
    /// The replica
    replica: String,
    #[command(flatten)]
    show: ShowArgs,
}

#[derive(Debug, Args)]
struct LimitArgs {
    /// Wait at most this many seconds; 0: do not wait
    // Persistent sessions may need minutes to end. Nobody measured this value.
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    timeout: u64,
}

#[derive(Debug, Args)]
struct WaitArgs {
    #[command(flatten)]
    name: NameArgs,
    #[command(flatten)]
    limit: LimitArgs,
}

pub(crate) async fn run(args: GatewayArgs) -> VerbResult {
    match args.verb {
        GatewayVerb::List(show) => list(&show).await,
        GatewayVerb::Status {
            service: None,
            show,
        } => status(&show).await,
        GatewayVerb::Status {
            service: Some(service),
            show,
        } => explain(service, &show).await,
        GatewayVerb::Drain(args) => drain(&args).await,
        GatewayVerb::Undrain(args) => {
            let mut tier = TierHandle::open(&args.show.mesh).await?;
            let done = tier.admin.undrain_replica(named(&args.replica)).await;
            print_replica(
                &args,
                done.map_err(|s| admin::refused(&s))?.into_inner().replica,
            )
        }
        GatewayVerb::Forget(args) => {
            let mut tier = TierHandle::open(&args.show.mesh).await?;
            let done = tier.admin.forget_replica(named(&args.replica)).await;
            print_replica(
                &args,
                done.map_err(|s| admin::refused(&s))?.into_inner().replica,
            )
        }
        GatewayVerb::Replace { by, wait } => replace(by, &wait).await,
        GatewayVerb::Scale {
            backend,
            replicas,
            az,
            limit,
            show,
        } => scale(&backend, replicas, az.as_deref(), &limit, &show).await,
    }
}

/// Connection to the mesh, and the world in which it runs, if any.
struct TierHandle {
    admin: Admin,
    running: Option<Arc<RunningWorld>>,
    progress: ProgressLine,
}

fn named(replica: &str) -> ReplicaRequest {
    ReplicaRequest {
        name: replica.to_owned(),
    }
}

impl TierHandle {
    async fn open(mesh: &MeshArgs) -> VerbResult<Self> {
        let running = match mesh.server {
            Some(_) => None,
            None => Some(RunningWorld::open(mesh.world.as_deref())?),
        };
        let admin = match &running {
            Some(running) => admin::connect_in(running.clone()).await?,
            None => admin::connect(mesh).await?,
        };
        Ok(Self {
            admin,
            running,
            progress: ProgressLine::new(),
        })
    }

    async fn fetch(&mut self) -> VerbResult<FleetResponse> {
        Ok(self
            .admin
            .fleet(FleetRequest {})
            .await
            .map_err(|status| admin::refused(&status))?
            .into_inner())
    }

    async fn replica(&mut self, name: &str) -> VerbResult<Option<ReplicaStatus>> {
        Ok(self
            .fetch()
            .await?
            .replicas
            .into_iter()
            .find(|r| r.name == name))
    }

    /// Waits until `done` returns true for the replica. `None` stands for a replica that is not
    /// registered.
    async fn wait(
        &mut self,
        name: &str,
        seconds: u64,
        what: &str,
        done: impl Fn(Option<&ReplicaStatus>) -> bool,
    ) -> VerbResult {
        let until = Instant::now() + Duration::from_secs(seconds);
        let mut last_line = String::new();
        loop {
            let replica = self.replica(name).await?;
            if done(replica.as_ref()) {
                return Ok(());
            }
            let now = replica
                .as_ref()
                .map_or_else(|| "not registered".to_owned(), progress_line);
            if Instant::now() >= until {
                let fix = "it continues by itself: the remaining sessions are streams that their clients keep open; check with `canal gateway list`, or wait longer with --timeout";
                return Err(VerbError::new(
                    ExitStatus::Partial,
                    name,
                    format!("not {what} within {seconds} s: {now}"),
                    fix,
                ));
            }
            if now != last_line {
                self.progress.print_line(&format!("{name}: {now}"));
                last_line = now;
            }
            tokio::time::sleep(POLL).await;
        }
    }

    async fn drain(&mut self, name: &str, seconds: u64) -> VerbResult {
        self.admin
            .drain_replica(named(name))
            .await
            .map_err(|status| admin::refused(&status))?;
        if seconds == 0 {
            return Ok(());
        }
        // Reports from before this time do not show the effect of the order.
        let ordered = Instant::now();
        self.wait(name, seconds, "drained", |r| {
            r.is_none_or(|r| is_drained(r, ordered.elapsed()))
        })
        .await
    }

    /// Starts a new replica: in a world directly, elsewhere by asking the operator. Returns when
    /// the replica accepts sessions.
    async fn start(&mut self, name: &str, az: &str, backend: &str, seconds: u64) -> VerbResult {
        match &self.running {
            Some(running) => running.add_gateway(name, az, backend).await?,
            None => eprintln!(
                "start now: canal-gateway --replica {name} --az {az} --backend {backend} with its token; this waits for it"
            ),
        }
        if seconds == 0 {
            return Ok(());
        }
        self.wait(name, seconds, "active", |r| {
            r.is_some_and(|r| r.state == "active" && r.up)
        })
        .await
    }

    /// Removes a drained replica from the mesh.
    async fn remove(&mut self, name: &str, seconds: u64) -> VerbResult {
        match &self.running {
            Some(running) => running.remove_gateway(name).await?,
            None => {
                eprintln!("stop now: the process of {name}; this command waits until it has ended")
            }
        }
        if seconds == 0 {
            return Ok(());
        }
        self.wait(name, seconds, "gone", |r| {
            r.is_none_or(|r| r.state == "gone")
        })
        .await
    }

    /// Returns a name that no replica and no host has.
    async fn free_name(&mut self, backend: &str) -> VerbResult<String> {
        let mut taken: BTreeSet<String> = self
            .fetch()
            .await?
            .replicas
            .into_iter()
            .map(|r| r.name)
            .collect();
        if let Some(running) = &self.running {
            taken.extend(
                running
                    .hosts()?
                    .into_iter()
                    .map(|host| host.environment.name),
            );
        }
        Ok(decide_name(backend, &taken))
    }
}

fn decide_name(backend: &str, taken: &BTreeSet<String>) -> String {
    let names = (1..).map(|n: u32| format!("{backend}-{n}"));
    names
        .into_iter()
        .find(|name| !taken.contains(name))
        .unwrap_or_default()
}

/// Returns whether a replica gets no new sessions and has none left. Buckets that it still owns
/// belong to sessions that have ended; it remembers them for late packets (TIME_WAIT), so it may
/// end in spite of them. A report from before the order took effect does not count.
fn is_drained(r: &ReplicaStatus, since_order: Duration) -> bool {
    let heard_after =
        Duration::from_millis(r.since_last_report_ms) + ORDER_SPREADS_WITHIN <= since_order;
    r.state == "gone" || (r.state == "draining" && heard_after && r.heads == 0 && r.sessions == 0)
}

fn progress_line(r: &ReplicaStatus) -> String {
    let owner = if r.sessions == 0 {
        String::new()
    } else {
        format!(", owner in {}", r.owners)
    };
    format!(
        "{}, {} sessions, head of {} buckets{owner}",
        r.state, r.sessions, r.heads
    )
}

async fn list(show: &ShowArgs) -> VerbResult {
    let fleet = TierHandle::open(&show.mesh).await?.fetch().await?;
    output::print_view(
        show.output.format,
        ReplicaListView::from(&fleet.replicas[..]),
        || replica_lines(&fleet.replicas),
    )
}

async fn status(show: &ShowArgs) -> VerbResult {
    let fleet = TierHandle::open(&show.mesh).await?.fetch().await?;
    output::print_view(show.output.format, FleetView::from(&fleet), || {
        fleet_lines(&fleet)
    })
}

async fn explain(service: String, show: &ShowArgs) -> VerbResult {
    let mut tier = TierHandle::open(&show.mesh).await?;
    let explained = tier
        .admin
        .explain_service(ExplainRequest { service })
        .await
        .map_err(|status| admin::refused(&status))?
        .into_inner();
    output::print_view(
        show.output.format,
        ServicePlacementView::from(&explained),
        || explained_lines(&explained),
    )
}

async fn drain(args: &WaitArgs) -> VerbResult {
    let mut tier = TierHandle::open(&args.name.show.mesh).await?;
    tier.drain(&args.name.replica, args.limit.timeout).await?;
    let replica = tier.replica(&args.name.replica).await?;
    print_replica(&args.name, replica)
}

async fn replace(by: Option<String>, args: &WaitArgs) -> VerbResult {
    let (name, seconds) = (&args.name.replica, args.limit.timeout);
    let mut tier = TierHandle::open(&args.name.show.mesh).await?;
    let missing = || {
        VerbError::new(
            ExitStatus::Missing,
            name,
            "no such replica is registered",
            "name one that `canal gateway list` shows",
        )
    };
    let old = tier.replica(name).await?.ok_or_else(missing)?;
    let new = match by {
        Some(new) => new,
        None => tier.free_name(&old.backend).await?,
    };
    // The new replica serves before the old one drains.
    tier.start(&new, &old.az, &old.backend, seconds).await?;
    tier.drain(name, seconds).await?;
    tier.remove(name, seconds).await?;
    let replica = tier.replica(&new).await?;
    print_replica(
        &NameArgs {
            replica: new,
            show: args.name.show.again(),
        },
        replica,
    )
}

/// Result of a scaling decision: replicas to add, or names to remove. Draining replicas are removed
/// first, then those with the fewest sessions.
#[derive(Debug, PartialEq, Eq)]
enum Scaling {
    Add(usize),
    Remove(Vec<String>),
}

fn decide_scaling(replicas: &[&ReplicaStatus], wanted: usize) -> Scaling {
    let mut there: Vec<&&ReplicaStatus> = replicas.iter().filter(|r| r.state != "gone").collect();
    if there.len() <= wanted {
        return Scaling::Add(wanted - there.len());
    }
    there.sort_by_key(|r| {
        (
            r.state != "draining",
            r.sessions,
            std::cmp::Reverse(r.number),
        )
    });
    let surplus = there.len() - wanted;
    Scaling::Remove(
        there
            .into_iter()
            .take(surplus)
            .map(|r| r.name.clone())
            .collect(),
    )
}

async fn scale(
    backend: &str,
    wanted: usize,
    az: Option<&str>,
    limit: &LimitArgs,
    show: &ShowArgs,
) -> VerbResult {
    let mut tier = TierHandle::open(&show.mesh).await?;
    let fleet = tier.fetch().await?;
    let own: Vec<&ReplicaStatus> = fleet
        .replicas
        .iter()
        .filter(|r| r.backend == backend)
        .collect();
    // New replicas go to the AZ of the backend's first replica.
    // The planner keeps a backend in one AZ, so --az counts for a new backend only.
    let home = own
        .first()
        .map(|r| r.az.clone())
        .or(az.map(ToOwned::to_owned));
    match decide_scaling(&own, wanted) {
        Scaling::Add(count) => {
            for _ in 0..count {
                let fix = "name the AZ of a new backend with --az";
                let az = home.clone().ok_or_else(|| {
                    VerbError::new(
                        ExitStatus::Missing,
                        backend,
                        "no replica of this backend is registered",
                        fix,
                    )
                })?;
                let name = tier.free_name(backend).await?;
                tier.start(&name, &az, backend, limit.timeout).await?;
            }
        }
        Scaling::Remove(names) => {
            // One after the other: the sessions of each move to replicas that stay.
            for name in names {
                tier.drain(&name, limit.timeout).await?;
                tier.remove(&name, limit.timeout).await?;
            }
        }
    }
    let fleet = tier.fetch().await?;
    let own: Vec<ReplicaStatus> = fleet
        .replicas
        .into_iter()
        .filter(|r| r.backend == backend)
        .collect();
    output::print_view(show.output.format, ReplicaListView::from(&own[..]), || {
        replica_lines(&own)
    })
}

impl ShowArgs {
    fn again(&self) -> ShowArgs {
        ShowArgs {
            mesh: self.mesh.clone(),
            output: self.output.clone(),
        }
    }
}

/// Prints the state of a replica. A replica that is no longer registered is no error.
fn print_replica(args: &NameArgs, replica: Option<ReplicaStatus>) -> VerbResult {
    output::print_view(
        args.show.output.format,
        ReplicaOrderView::new(&args.replica, replica.as_ref()),
        || match &replica {
            Some(r) => vec![format!("{}: {}", r.name, progress_line(r))],
            None => vec![format!("{}: not registered any more", args.replica)],
        },
    )
}

fn replica_lines(replicas: &[ReplicaStatus]) -> Vec<String> {
    if replicas.is_empty() {
        return vec!["no replica is registered".to_owned()];
    }
    let mut table = TextTable::new(&[
        "NAME",
        "NUMBER",
        "AZ",
        "BACKEND",
        "STATE",
        "HEALTH",
        "SESSIONS",
        "HEADS",
        "OWNERS",
        "GENERATION",
        "LAST REPORT",
    ]);
    for r in replicas {
        table.row([
            r.name.clone(),
            r.number.to_string(),
            r.az.clone(),
            r.backend.clone(),
            r.state.clone(),
            if r.up { "up" } else { "down" }.to_owned(),
            r.sessions.to_string(),
            r.heads.to_string(),
            r.owners.to_string(),
            r.generation.to_string(),
            if r.since_last_report_ms == 0 {
                "not yet".to_owned()
            } else {
                format!("{} ago", span(r.since_last_report_ms))
            },
        ]);
    }
    table.lines()
}

fn fleet_lines(fleet: &FleetResponse) -> Vec<String> {
    let mut lines = vec![
        format!(
            "plan {}, {} tables wait for their replicas",
            fleet.plan, fleet.tables_waiting
        ),
        String::new(),
    ];
    let mut edges = TextTable::new(&[
        "EDGE",
        "AZ",
        "UNDERLAY",
        "TUNNEL END",
        "STATE",
        "GENERATION",
    ]);
    for e in &fleet.edges {
        let state = if e.reporting { "reporting" } else { "silent" };
        edges.row([
            e.name.clone(),
            e.az.clone(),
            e.underlay.clone(),
            e.tunnel_end.clone(),
            state.to_owned(),
            e.generation.to_string(),
        ]);
    }
    lines.extend(edges.lines());
    lines.push(String::new());
    lines.extend(replica_lines(&fleet.replicas));
    lines.push(String::new());
    let mut services =
        TextTable::new(&["SERVICE", "ID", "HOME", "OPEN IN", "MIGRATING", "BACKENDS"]);
    for s in &fleet.services {
        let motion = if s.migrating { "yes" } else { "no" };
        services.row([
            s.service.clone(),
            s.id.to_string(),
            s.home_az.clone(),
            s.open_azs.join(","),
            motion.to_owned(),
            s.backends.join(", "),
        ]);
    }
    lines.extend(services.lines());
    // The controller shows the blast radius only to the provider.
    if !fleet.blast.is_empty() {
        lines.push(String::new());
        let mut blast = TextTable::new(&["BACKENDS FAILING AT ONCE", "SERVICES LOST ON AVERAGE"]);
        for b in &fleet.blast {
            // The averages may be far below one service, so they have three decimals.
            blast.row([b.failed.to_string(), format!("{:.3}", b.expected_services)]);
        }
        lines.extend(blast.lines());
    }
    lines.extend(
        fleet
            .unmet_constraints
            .iter()
            .map(|note| format!("unmet constraint: {note}")),
    );
    // In capitals, because a plan must never break a rule.
    lines.extend(
        fleet
            .findings
            .iter()
            .map(|finding| format!("VIOLATION: {finding}")),
    );
    lines
}

fn explained_lines(explained: &ExplainResponse) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(s) = &explained.service {
        lines.push(format!(
            "{} (id {}, gateway number {})",
            s.service, s.id, s.gateway_number
        ));
        lines.push(format!(
            "home AZ {}, backends {}",
            s.home_az,
            s.backends.join(", ")
        ));
    }
    for t in &explained.tables {
        // A closing table is in use whether it is open or not.
        let state = match (t.closing, t.open) {
            (true, _) => "closing; in use for its sessions",
            (false, true) => "open",
            (false, false) => "closed",
        };
        lines.push(String::new());
        lines.push(format!(
            "{}: {state}, table version {}, at {}",
            t.az,
            t.version,
            t.addresses.join(", ")
        ));
        let mut chain_table = TextTable::new(&["REPLICA", "HEAD OF", "OWNER IN", "STANDBY IN"]);
        for s in &t.members {
            chain_table.row([
                s.replica.clone(),
                s.heads.to_string(),
                s.owners.to_string(),
                s.standbys.to_string(),
            ]);
        }
        // A table without members would print only its head line.
        if !t.members.is_empty() {
            lines.extend(chain_table.lines());
        }
    }
    lines.extend(
        explained
            .unmet_constraints
            .iter()
            .map(|note| format!("unmet constraint: {note}")),
    );
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replica(name: &str, number: u32, state: &str, sessions: u64) -> ReplicaStatus {
        ReplicaStatus {
            name: name.into(),
            number,
            state: state.into(),
            sessions,
            ..ReplicaStatus::default()
        }
    }

    #[test]
    fn a_replica_is_drained_when_nothing_is_left_and_nothing_can_come() {
        let status = |state: &str, heads, owners, sessions| ReplicaStatus {
            heads,
            owners,
            since_last_report_ms: 300,
            ..replica("g", 1, state, sessions)
        };
        let drained = |state: &str, heads, owners, sessions| {
            is_drained(
                &status(state, heads, owners, sessions),
                Duration::from_secs(1),
            )
        };
        assert!(
            drained("draining", 0, 0, 0)
                && drained("draining", 0, 2, 0)
                && drained("gone", 3, 0, 9)
        );
        assert!(
            !drained("draining", 1, 0, 0)
                && !drained("draining", 0, 2, 1)
                && !drained("active", 0, 0, 0)
        );
        assert!(
            !is_drained(&status("draining", 0, 0, 0), Duration::from_millis(700)),
            "the report is older than the order"
        );
    }

    #[test]
    fn scaling_adds_replicas_or_removes_the_least_used() {
        let all = [
            replica("a", 1, "active", 5),
            replica("b", 2, "active", 1),
            replica("c", 3, "draining", 9),
            replica("d", 4, "gone", 0),
        ];
        let all: Vec<&ReplicaStatus> = all.iter().collect();
        let remove =
            |names: &[&str]| Scaling::Remove(names.iter().map(ToString::to_string).collect());
        for (wanted, want) in [
            (5, Scaling::Add(2)),
            (3, Scaling::Add(0)),
            (2, remove(&["c"])),
            (1, remove(&["c", "b"])),
            (0, remove(&["c", "b", "a"])),
        ] {
            assert_eq!(decide_scaling(&all, wanted), want, "{wanted}");
        }
    }

    #[test]
    fn a_new_replica_has_an_unused_name() {
        let taken = ["b1-1", "b1-2", "gw-1"].map(ToOwned::to_owned).into();
        assert_eq!(
            (decide_name("b1", &taken), decide_name("gw", &taken)),
            ("b1-3".to_owned(), "gw-2".to_owned())
        );
    }
}
