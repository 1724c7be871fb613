//! `canal status`: the connected data planes, the generation that each runs, and the objects of
//! each tenant. Start at [`run`].

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use canal_json_api::v1::{StatusView, SubscriberView};
use canal_wire::api::{ShareUse, StatusRequest, StatusResponse, Subscriber};
use clap::Args;
use serde_json::{Value, json};

use crate::admin::{self, Admin, MeshArgs};
use crate::dataplane;
use crate::diagnostics;
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::output::{self, OutputArgs, TextTable, size, span};
use crate::running_world::{HostKindFilter, RunningWorld};
use crate::tenant::TenantArgs;
use crate::verbs::conditions;

/// Interval between two queries of a waiting verb.
/// Changes spread within a second, of which a scripted wait should add little.
const POLL: Duration = Duration::from_millis(50);

/// Shows data planes, generations and tenants
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  canal status
  canal status --conditions --tenant alpha   # Gateways, listeners and routes, as Gateway API defines
  canal status --check              # exit code 4 unless all data planes are connected and up to date
  canal status -o json | jq '.subscribers[] | select(.converged | not)'")]
pub(crate) struct StatusArgs {
    /// End with exit code 4 unless every data plane is connected and runs the newest generation in
    /// its scope
    #[arg(long)]
    check: bool,
    /// Show the conditions of a tenant's objects of Gateway API instead
    #[arg(long, conflicts_with = "check")]
    conditions: bool,
    /// Namespace of the objects whose conditions are shown [default: all]
    #[arg(short, long, requires = "conditions")]
    namespace: Option<String>,
    #[command(flatten)]
    tenant: TenantArgs,
    #[command(flatten)]
    mesh: MeshArgs,
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn run(args: StatusArgs) -> VerbResult {
    let mut admin = admin::connect(&args.mesh).await?;
    if args.conditions {
        let found = conditions::fetch(&mut admin, &args.tenant, args.namespace.as_deref()).await?;
        return output::print(args.output.format, &conditions::value(&found), || {
            conditions::lines(&found)
        });
    }
    let status = fetch(&mut admin).await?;
    let now_ms = now_ms();
    let servers = key_servers(&args.mesh).await?;
    let mut shown = output::view_value(StatusView::from(&status))?;
    shown["key_servers"] = servers
        .iter()
        .map(|(name, hardware)| json!({ "name": name, "hardware": hardware }))
        .collect();
    output::print(args.output.format, &shown, || {
        [lines(&status, now_ms), hardware_lines(&servers)].concat()
    })?;
    if args.check && !decide_converged(&status, 0, true) {
        return Err(VerbError::new(
            ExitStatus::Partial,
            "status",
            "not every data plane is connected and up to date",
            "read the logs of those that the table shows as away or incomplete",
        ));
    }
    Ok(())
}

/// Returns the world's key servers, with the cryptographic hardware features that each reports. The
/// value is null for a key server that does not answer.
async fn key_servers(mesh: &MeshArgs) -> VerbResult<Vec<(String, Value)>> {
    if mesh.server.is_some() {
        return Ok(Vec::new());
    }
    let running = RunningWorld::open(mesh.world.as_deref())?;
    let mut servers = Vec::new();
    for name in running.names_of(HostKindFilter::KeyServer)? {
        let dump = dataplane::get(&running, &name, dataplane::AdminPage::Admin, "/config_dump")
            .await
            .ok();
        let dump = dump
            .and_then(|bytes| serde_json::from_slice::<Value>(&bytes).ok())
            .unwrap_or_default();
        servers.push((name, dump["engine"]["hardware"].clone()));
    }
    Ok(servers)
}

fn hardware_lines(servers: &[(String, Value)]) -> Vec<String> {
    if servers.is_empty() {
        return Vec::new();
    }
    let mut table = TextTable::new(&["KEY SERVER", "HARDWARE"]);
    for (name, hardware) in servers {
        let feature = |feature: &Value| {
            let word = match (feature["present"] == true, feature["used"] == true) {
                (true, true) => "used",
                (true, false) => "present, not used",
                (false, _) => "absent",
            };
            format!("{} {word}", feature["name"].as_str().unwrap_or("?"))
        };
        let text = hardware
            .as_array()
            .map(|all| all.iter().map(feature).collect::<Vec<_>>().join("; "));
        table.row([
            name.clone(),
            text.unwrap_or_else(|| "does not answer".to_owned()),
        ]);
    }
    [vec![String::new()], table.lines()].concat()
}

/// Requests the status from the controller.
pub(crate) async fn fetch(admin: &mut Admin) -> VerbResult<StatusResponse> {
    Ok(admin
        .status(StatusRequest {})
        .await
        .map_err(|status| admin::refused(&status))?
        .into_inner())
}

/// Waits until every connected data plane runs its part of `generation`. Returns the last answer.
pub(crate) async fn converged(admin: &mut Admin, generation: u64) -> VerbResult<StatusResponse> {
    loop {
        let status = fetch(admin).await?;
        if decide_converged(&status, generation, false) {
            return Ok(status);
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Returns whether all (or all connected) data planes are up to date, at `generation` or later.
fn decide_converged(status: &StatusResponse, generation: u64, all: bool) -> bool {
    let good = |s: &Subscriber| SubscriberView::is_converged(s) && (s.connected || !all);
    status.generation >= generation
        && status
            .subscribers
            .iter()
            .filter(|s| s.connected || all)
            .all(good)
}

fn now_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Returns which tenant uses how much of which limit. The table is empty if nothing is used.
fn share_lines(shares: &[ShareUse]) -> Vec<String> {
    if shares.is_empty() {
        return Vec::new();
    }
    let mut table = TextTable::new(&[
        "LIMIT", "AT", "TENANT", "USED", "SHARE", "REFUSED", "REVOKED",
    ]);
    for s in shares {
        let amount = |n: u64| {
            if s.unit == "bytes" {
                size(n)
            } else {
                n.to_string()
            }
        };
        table.row([
            s.limit.clone(),
            s.component.clone(),
            if s.tenant.is_empty() {
                "(provider)".to_owned()
            } else {
                s.tenant.clone()
            },
            amount(s.used),
            amount(s.max),
            s.refused.to_string(),
            s.revoked.to_string(),
        ]);
    }
    [vec![String::new()], table.lines()].concat()
}

/// Returns the answer as tables.
pub(crate) fn lines(status: &StatusResponse, now_ms: u64) -> Vec<String> {
    let mut lines = vec![
        format!(
            "controller {}, generation {}, store {}",
            status.version, status.generation, status.store
        ),
        String::new(),
    ];
    let mut planes = TextTable::new(&[
        "KIND",
        "NAME",
        "AZ",
        "TENANT",
        "STATE",
        "GENERATION",
        "RESOURCES",
        "SENT",
        "SEEN",
        "REFUSAL",
    ]);
    for s in &status.subscribers {
        planes.row([
            s.kind.clone(),
            s.name.clone(),
            s.az.clone(),
            // Gateways, edges and the provider's key servers belong to no tenant.
            if s.tenant.is_empty() {
                "all".to_owned()
            } else {
                s.tenant.clone()
            },
            if s.connected { "connected" } else { "away" }.to_owned(),
            generation(s),
            s.resources.to_string(),
            size(s.bytes_sent),
            // The controller's clock may be ahead of this host's, hence the saturation.
            format!("{} ago", span(now_ms.saturating_sub(s.last_seen_ms))),
            s.nack.clone(),
        ]);
    }
    match status.subscribers.is_empty() {
        true => lines.push("no data plane has connected yet".to_owned()),
        false => lines.extend(planes.lines()),
    }
    lines.push(String::new());
    let mut tenants = TextTable::new(&[
        "TENANT",
        "SERVICES",
        "WORKLOADS",
        "READY",
        "ROUTES",
        "ERRORS",
        "WARNINGS",
    ]);
    for t in &status.tenants {
        let count = |n: u64| n.to_string();
        tenants.row([
            t.tenant.clone(),
            count(t.services),
            count(t.workloads),
            count(t.workloads_ready),
            count(t.routes),
            count(t.errors),
            count(t.warnings),
        ]);
    }
    lines.extend(tenants.lines());
    // The mesh does not encrypt these packets, which operators must notice.
    let in_the_clear = status.tenants.iter().filter(|t| t.outside_passes).map(|t| {
        format!(
            "tenant {}: outside: Passthrough: UDP, SCTP, ICMP and raw packets of its pods, and TCP to what is not in the mesh, travel in the clear",
            t.tenant
        )
    });
    lines.extend(in_the_clear);
    lines.extend(share_lines(&status.shares));
    if !status.diagnostics.is_empty() {
        lines.push(String::new());
        lines.extend(diagnostics::lines(&status.diagnostics));
    }
    lines
}

/// Returns `7`, or `5 of 7` if the data plane lags.
fn generation(s: &Subscriber) -> String {
    match SubscriberView::is_converged(s) {
        true => s.generation_acked.to_string(),
        false => format!("{} of {}", s.generation_acked, s.generation_wanted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subscriber(connected: bool, wanted: u64, acked: u64, nack: &str) -> Subscriber {
        Subscriber {
            connected,
            generation_wanted: wanted,
            generation_acked: acked,
            nack: nack.into(),
            ..Subscriber::default()
        }
    }

    #[test]
    fn convergence_needs_every_connected_subscriber() {
        // `generation` is to be reached; `all` counts subscribers that are away too. A subscriber
        // has: connected, generation wanted, generation acknowledged, its last NACK.
        for (name, subscribers, generation, all, want) in [
            (
                "up to date",
                vec![subscriber(true, 5, 5, "")],
                5,
                true,
                true,
            ),
            (
                "one lags",
                vec![subscriber(true, 5, 5, ""), subscriber(true, 5, 4, "")],
                5,
                true,
                false,
            ),
            (
                "one refused",
                vec![subscriber(true, 5, 5, "bad")],
                5,
                true,
                false,
            ),
            (
                "one is away",
                vec![subscriber(true, 5, 5, ""), subscriber(false, 5, 3, "")],
                5,
                true,
                false,
            ),
            (
                "one is away, only connected ones count",
                vec![subscriber(true, 5, 5, ""), subscriber(false, 5, 3, "")],
                5,
                false,
                true,
            ),
            (
                "the controller itself is behind",
                vec![subscriber(true, 5, 5, "")],
                6,
                false,
                false,
            ),
        ] {
            let status = StatusResponse {
                generation: 5,
                subscribers,
                ..StatusResponse::default()
            };
            assert_eq!(decide_converged(&status, generation, all), want, "{name}");
        }
    }

    #[test]
    fn hardware_is_described_in_words() {
        let hardware = json!([{"name": "vaes", "present": true, "used": true}, {"name": "qat", "present": true, "used": false}, {"name": "sha"}]);
        let lines = hardware_lines(&[
            ("ks-1".to_owned(), hardware),
            ("ks-2".to_owned(), Value::Null),
        ])
        .join("\n");
        assert!(
            lines.contains("vaes used; qat present, not used; sha absent")
                && lines.contains("does not answer"),
            "{lines}"
        );
        assert!(hardware_lines(&[]).is_empty());
    }

    #[test]
    fn status_names_tenants_whose_packets_leave_unencrypted() {
        let tenant = |name: &str, outside_passes| canal_wire::api::TenantStatus {
            tenant: name.into(),
            outside_passes,
            ..Default::default()
        };
        let status = StatusResponse {
            tenants: vec![tenant("alpha", false), tenant("beta", true)],
            ..StatusResponse::default()
        };
        let report = lines(&status, 0).join("\n");
        assert!(
            report.contains("tenant beta: outside: Passthrough: UDP, SCTP, ICMP and raw packets"),
            "{report}"
        );
        assert!(!report.contains("tenant alpha: outside"), "{report}");
    }

    #[test]
    fn shares_are_listed_by_limit_and_tenant() {
        let share = |tenant: &str, unit: &str, used| ShareUse {
            component: "controller".into(),
            limit: "certificates".into(),
            tenant: tenant.into(),
            unit: unit.into(),
            used,
            max: 2048,
            refused: 3,
            revoked: 4,
        };
        let lines = share_lines(&[share("alpha", "certificates", 7), share("", "bytes", 1024)]);
        let words = |line: &String| {
            line.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            words(&lines[2]),
            ["certificates", "controller", "alpha", "7", "2048", "3", "4"]
        );
        assert!(
            lines[3].contains("(provider)") && !lines[3].contains("1024"),
            "{}",
            lines[3]
        );
        assert!(share_lines(&[]).is_empty());
    }

    #[test]
    fn a_lagging_data_plane_shows_both_generations() {
        assert_eq!(generation(&subscriber(true, 7, 5, "")), "5 of 7");
        assert_eq!(generation(&subscriber(true, 7, 7, "")), "7");
    }
}
