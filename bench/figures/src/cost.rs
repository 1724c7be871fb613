//! Table 5 as a cost model: VMs of a region before and after redirectors and tunnels. Nothing is
//! measured here. Costs are measurements of `canal-bench-tier`, or arguments. Every cost and every
//! assumption is printed with the result.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use serde_json::Value;

/// The measurements, with the machine and the commands that made them.
const MEASURED: &str = include_str!("../measured.json");

/// Measured costs, and properties of a region. A missing value is taken from the file of
/// measurements.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Flags {
    /// Figures that `canal-bench-tier PART --json FILE` measured. Default: those that were measured
    /// for this version
    #[arg(long, value_name = "FILE")]
    measurements_file: Option<PathBuf>,
    /// Use the figures of a load with a connection for each request, instead of keep-alive
    #[arg(long)]
    connection_per_request: bool,
    /// CPU of the gateway's L7 work per request, µs
    #[arg(long)]
    l7_us: Option<f64>,
    /// CPU of the redirector per packet, µs
    #[arg(long)]
    redirector_us: Option<f64>,
    /// Packets into a replica per request
    #[arg(long)]
    packets: Option<f64>,
    /// CPU of taking a packet out of its tunnel, µs
    #[arg(long)]
    tunnel_us: Option<f64>,
    /// CPU of a load balancer's hop per request, µs
    #[arg(long)]
    lb_us: Option<f64>,
    /// Client sessions of a replica
    #[arg(long)]
    sessions: Option<f64>,
    /// Sessions at the underlay of a replica with tunnels
    #[arg(long)]
    tunnel_sessions: Option<f64>,
    /// Sessions of a replica to endpoints, for each client session: they count against the
    /// underlay's limit too
    #[arg(long)]
    upstream: Option<f64>,
    /// Maximum fill level of the session table. Default: §3.2's 90 %
    #[arg(long, default_value_t = 0.9)]
    session_level: f64,
    /// CPU in use when sessions are at that level. Default: §3.2's 20 %
    #[arg(long, default_value_t = 0.2)]
    cpu_at_level: f64,
    /// Maximum CPU utilization of a VM. Default: assumed; the paper gives none. The rows below the
    /// result show others
    #[arg(long, default_value_t = 0.35)]
    cpu_level: f64,
}

/// All inputs of the model.
#[derive(Debug, Clone, PartialEq)]
struct Costs {
    l7_us: f64,
    redirector_us: f64,
    packets: f64,
    tunnel_us: f64,
    lb_us: f64,
    sessions: f64,
    tunnel_sessions: f64,
    upstream: f64,
    session_level: f64,
    cpu_at_level: f64,
    cpu_level: f64,
    /// Source of each measured value.
    sources: Vec<String>,
}

impl Flags {
    fn costs(&self) -> anyhow::Result<Costs> {
        let text = match &self.measurements_file {
            Some(file) => {
                std::fs::read_to_string(file).with_context(|| file.display().to_string())?
            }
            None => MEASURED.to_string(),
        };
        self.costs_of(&serde_json::from_str(&text).context("the measured figures")?)
    }

    /// Returns the costs; flags override measurements.
    fn costs_of(&self, measured: &Value) -> anyhow::Result<Costs> {
        let load = if self.connection_per_request {
            "connection_per_request"
        } else {
            "keep_alive"
        };
        let packets = number(measured, &format!("/cost/{load}/packets"))?;
        // Measured costs are per request; the model counts per packet.
        let redirector = number(measured, &format!("/cost/{load}/redirector_us"))? / packets;
        let (count, replicas) = (
            number(measured, "/sessions/count")?,
            number(measured, "/sessions/aggregated/replicas")?,
        );
        let inside = number(measured, "/sessions/aggregated/inside")?;
        let sections = ["cost", "disaggregation", "hop", "sessions"];
        let source = |section: &str| {
            format!(
                "{} ({})",
                text(measured, section, "command"),
                text(measured, section, "machine")
            )
        };
        let l7_us = self
            .l7_us
            .map_or_else(|| number(measured, &format!("/cost/{load}/l7_us")), Ok)?;
        // Compared with a gateway at the same rate: a process that is often idle costs more per
        // request than a busy one.
        let balancer = || {
            Ok::<_, anyhow::Error>(
                l7_us * number(measured, "/hop/lb_us")? / number(measured, "/hop/gateway_us")?,
            )
        };
        // A flag replaces what was measured.
        Ok(Costs {
            l7_us,
            redirector_us: self.redirector_us.unwrap_or(redirector),
            packets: self.packets.unwrap_or(packets),
            tunnel_us: self.tunnel_us.map_or_else(
                || Ok::<_, anyhow::Error>(number(measured, "/disaggregation/tunnel_ns")? / 1e3),
                Ok,
            )?,
            lb_us: self.lb_us.map_or_else(balancer, Ok)?,
            // The measurement counts the sessions of all replicas, the model those of one.
            sessions: self.sessions.unwrap_or(count / replicas),
            tunnel_sessions: match self.tunnel_sessions {
                Some(sessions) => sessions,
                None => number(measured, "/sessions/aggregated/underlay")? / replicas,
            },
            // Each client session has one socket; the others inside the replicas lead to endpoints.
            upstream: self.upstream.unwrap_or(inside / count - 1.0),
            session_level: self.session_level,
            cpu_at_level: self.cpu_at_level,
            cpu_level: self.cpu_level,
            sources: sections.map(source).to_vec(),
        })
    }
}

fn number(measured: &Value, path: &str) -> anyhow::Result<f64> {
    let number = measured
        .pointer(path)
        .and_then(Value::as_f64)
        .filter(|n| n.is_finite() && *n >= 0.0);
    let part = path.split('/').nth(1).unwrap_or_default();
    number.with_context(|| {
        format!(
            "{path} is not among the measured figures; fix: run `canal-bench-tier {part} --json FILE`"
        )
    })
}

fn text<'a>(measured: &'a Value, section: &str, what: &str) -> &'a str {
    measured[section][what].as_str().unwrap_or("not said")
}

/// The paper's Table 5 in percent: redirector, tunneling, both.
const PAPER: [(&str, f64, f64, f64); 4] = [
    ("Region1", 47.5, 32.2, 64.4),
    ("Region2", 45.1, 45.3, 69.9),
    ("Region3", 32.1, 33.6, 54.9),
    ("Region4", 36.7, 36.5, 59.9),
];

/// Numbers of VMs, relative to the replicas before.
struct Vms {
    before: f64,
    redirector: f64,
    both: f64,
}

impl Costs {
    fn vms(&self, cpu_level: f64) -> Vms {
        // One replica VM before is full of sessions: `session_level` of its table and
        // `cpu_at_level` of its CPU are in use.
        let own = 1.0 + self.upstream;
        // A load balancer VM has the same table and holds each client session once; its CPU per
        // request is relative to a replica's.
        let lb_by_sessions = 1.0 / own;
        let lb_by_cpu = self.cpu_at_level * (self.lb_us / self.l7_us) / cpu_level;
        let balancers = f64::max(lb_by_sessions, lb_by_cpu);
        let redirector = self.packets * self.redirector_us / self.l7_us;
        let tunnel = self.packets * self.tunnel_us / self.l7_us;
        let replicas = |sessions: f64, more: f64| {
            f64::max(sessions, self.cpu_at_level * (1.0 + more) / cpu_level)
        };
        // Tunnels aggregate client sessions. Sessions to endpoints cross the same edge and use the
        // same tunnels.
        let aggregated = self.tunnel_sessions / (self.sessions * own);
        Vms {
            before: replicas(1.0, 0.0) + balancers,
            redirector: replicas(1.0, redirector),
            both: replicas(aggregated, redirector + tunnel),
        }
    }

    fn check(&self) -> anyhow::Result<()> {
        let shares = [
            ("session-level", self.session_level),
            ("cpu-at-level", self.cpu_at_level),
            ("cpu-level", self.cpu_level),
        ];
        for (name, share) in shares {
            ensure!(
                share > 0.0 && share <= 1.0,
                "--{name} {share} is out of range; fix: use a share above 0, to 1"
            );
        }
        let costs = [("l7-us", self.l7_us), ("sessions", self.sessions)];
        for (name, cost) in costs {
            ensure!(
                cost.is_finite() && cost > 0.0,
                "--{name} {cost} is out of range; fix: use a positive number"
            );
        }
        let more = [
            ("redirector-us", self.redirector_us),
            ("packets", self.packets),
            ("tunnel-us", self.tunnel_us),
            ("lb-us", self.lb_us),
            ("tunnel-sessions", self.tunnel_sessions),
            ("upstream", self.upstream),
        ];
        for (name, cost) in more {
            ensure!(
                cost.is_finite() && cost >= 0.0,
                "--{name} {cost} is out of range; fix: use a number of 0 or more"
            );
        }
        Ok(())
    }
}

impl Vms {
    /// Returns the percentages saved by the redirector, by tunnels of the rest, and by both.
    fn saved(&self) -> (f64, f64, f64) {
        let saved = |from: f64, to: f64| 100.0 * (1.0 - to / from);
        (
            saved(self.before, self.redirector),
            saved(self.redirector, self.both),
            saved(self.before, self.both),
        )
    }
}

pub(crate) fn figure(flags: &Flags) -> anyhow::Result<String> {
    let costs = &flags.costs()?;
    costs.check()?;
    let mut text = String::new();
    assumptions(&mut text, costs)?;
    let vms = costs.vms(costs.cpu_level);
    let [before, redirector, both] = [vms.before, vms.redirector, vms.both].map(|vms| 100.0 * vms);
    writeln!(
        text,
        "\nVMs for each 100 replicas: before {before:.0}, with redirectors {redirector:.0}, with tunnels as well {both:.0}"
    )?;
    writeln!(
        text,
        "\n             redirector  tunneling (of what is left)  both"
    )?;
    writeln!(text, "{}", row("Canal", vms.saved()))?;
    for (name, redirector, tunneling, both) in PAPER {
        writeln!(text, "{}", row(name, (redirector, tunneling, both)))?;
    }
    writeln!(
        text,
        "(the paper's columns multiply: both = 1 - (1 - redirector)(1 - tunneling), so tunneling is of what redirectors leave)"
    )?;
    implied(&mut text, costs)?;
    writeln!(text, "\nby how busy a CPU may be")?;
    // The levels surround the default, so that the reader sees how far the result depends on it.
    for level in [0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8] {
        writeln!(
            text,
            "{}",
            row(&format!("{:.0} %", 100.0 * level), costs.vms(level).saved())
        )?;
    }
    writeln!(
        text,
        "\nby a load balancer's CPU per request: one that forwards packets, and the measured one, which is a TCP proxy"
    )?;
    // 2 and 10 µs stand for a balancer that forwards packets; the third value is the measured TCP
    // proxy.
    for lb_us in [2.0, 10.0, costs.lb_us] {
        writeln!(
            text,
            "{}",
            row(
                &format!("{lb_us:.1} µs"),
                Costs {
                    lb_us,
                    ..costs.clone()
                }
                .vms(costs.cpu_level)
                .saved()
            )
        )?;
    }
    writeln!(text, "\nby sessions to endpoints for each client session")?;
    // 0 means that all requests share few endpoint connections, 1 that each client has its own.
    for upstream in [0.0, 0.25, 0.5, 1.0] {
        writeln!(
            text,
            "{}",
            row(
                &format!("{upstream}"),
                Costs {
                    upstream,
                    ..costs.clone()
                }
                .vms(costs.cpu_level)
                .saved()
            )
        )?;
    }
    Ok(text)
}

fn row(name: &str, (redirector, tunneling, both): (f64, f64, f64)) -> String {
    format!("{name:<12} {redirector:>8.1} % {tunneling:>9.1} % {both:>24.1} %")
}

fn assumptions(text: &mut String, costs: &Costs) -> std::fmt::Result {
    let [full, used, level] =
        [costs.session_level, costs.cpu_at_level, costs.cpu_level].map(|share| 100.0 * share);
    let (redirector, tunnels) = (
        costs.packets * costs.redirector_us,
        costs.packets * costs.tunnel_us,
    );
    writeln!(text, "measured, where no flag says otherwise")?;
    for source in &costs.sources {
        writeln!(text, "  {source}")?;
    }
    writeln!(text, "assumptions")?;
    writeln!(
        text,
        "  a VM is bounded by sessions at the underlay or by CPU, whichever is reached first; memory and the least number of VMs"
    )?;
    writeln!(
        text,
        "  that a backend needs are not counted. Full of sessions ({full:.0} %), a replica uses {used:.0} % of its CPU; it may use {level:.0} %."
    )?;
    writeln!(
        text,
        "  load balancers are VMs of the same kind and hold each client session once; a replica holds {:.2} more for each, to endpoints.",
        costs.upstream
    )?;
    writeln!(
        text,
        "  per request: L7 {:.1} µs, redirector {redirector:.2} µs ({:.0} × less), tunnels {tunnels:.2} µs, load balancer {:.1} µs.",
        costs.l7_us,
        costs.l7_us / redirector,
        costs.lb_us
    )?;
    let sessions = costs.sessions * (1.0 + costs.upstream);
    writeln!(
        text,
        "  sessions of a replica at the underlay: {sessions:.0} without tunnels, {:.0} with.",
        costs.tunnel_sessions
    )
}

/// Prints the properties that the paper's regions must have if this model is right.
fn implied(text: &mut String, costs: &Costs) -> std::fmt::Result {
    let range = |values: [f64; 4]| {
        (
            values.iter().copied().fold(f64::MAX, f64::min),
            values.iter().copied().fold(f64::MIN, f64::max),
        )
    };
    let work = 1.0 + costs.packets * (costs.redirector_us + costs.tunnel_us) / costs.l7_us;
    let (least, most) =
        range(PAPER.map(|(_, _, tunneling, _)| {
            100.0 * costs.cpu_at_level * work / (1.0 - tunneling / 100.0)
        }));
    writeln!(
        text,
        "(by this model the paper's regions keep CPUs {least:.0} to {most:.0} % busy; the default lies between, so that row is no proof)"
    )?;
    let (least, most) = range(PAPER.map(|(_, redirector, _, _)| 100.0 / redirector - 2.0));
    writeln!(
        text,
        "(and have {least:.1} to {most:.1} sessions to endpoints for each client session, if load balancers are bounded by sessions)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measurements() -> Value {
        serde_json::from_str(MEASURED).unwrap()
    }

    #[test]
    fn the_committed_figures_are_whole_and_flags_go_before_them() {
        for connection_per_request in [false, true] {
            let flags = Flags {
                connection_per_request,
                ..Flags::default()
            };
            let costs = flags.costs_of(&measurements()).unwrap();
            assert!(
                costs
                    .sources
                    .iter()
                    .all(|s| s.contains("canal-bench-tier") && s.contains("Linux")),
                "{:?}",
                costs.sources
            );
            let given = Flags {
                l7_us: Some(27.0),
                lb_us: Some(4.0),
                packets: Some(10.0),
                redirector_us: Some(0.2),
                upstream: Some(0.5),
                ..flags
            };
            let want = Costs {
                l7_us: 27.0,
                lb_us: 4.0,
                packets: 10.0,
                redirector_us: 0.2,
                upstream: 0.5,
                ..costs
            };
            assert_eq!(given.costs_of(&measurements()).unwrap(), want);
        }
    }

    #[test]
    fn a_missing_figure_names_the_command_that_measures_it() {
        for section in ["cost", "disaggregation", "hop", "sessions"] {
            let mut without = measurements();
            without[section] = Value::Null;
            let error = Flags::default().costs_of(&without).unwrap_err().to_string();
            assert!(
                error.contains(&format!("canal-bench-tier {section} --json")),
                "{error}"
            );
        }
    }

    #[test]
    fn tunnels_save_vms_bound_by_sessions_and_not_vms_bound_by_cpu() {
        let costs = Costs {
            l7_us: 20.0,
            redirector_us: 0.5,
            packets: 2.0,
            tunnel_us: 0.5,
            lb_us: 0.0,
            sessions: 1000.0,
            tunnel_sessions: 20.0,
            upstream: 1.0,
            session_level: 0.9,
            cpu_at_level: 0.2,
            cpu_level: 1.0,
            sources: Vec::new(),
        };
        // Half a balancer for each replica; then a fifth of a replica, and a tenth more for
        // redirector and tunnels.
        // At full CPU, redirector and tunnels each add 2 x 0.5 / 20 = 0.05 of a replica. Without
        // sessions to endpoints, a balancer holds as many sessions as a replica.
        for (name, costs, want) in [
            ("sessions", costs.clone(), (1.5, 1.0, 0.22)),
            (
                "CPU",
                Costs {
                    cpu_at_level: 1.0,
                    ..costs.clone()
                },
                (1.5, 1.05, 1.1),
            ),
            (
                "no endpoints' sessions",
                Costs {
                    upstream: 0.0,
                    ..costs
                },
                (2.0, 1.0, 0.22),
            ),
        ] {
            let vms = costs.vms(costs.cpu_level);
            for (got, want) in [
                (vms.before, want.0),
                (vms.redirector, want.1),
                (vms.both, want.2),
            ] {
                assert!((got - want).abs() < 1e-9, "{name}: {got}, not {want}");
            }
        }
    }

    #[test]
    fn the_papers_columns_multiply() {
        for (name, redirector, tunneling, both) in PAPER {
            let product = 100.0 * (1.0 - (1.0 - redirector / 100.0) * (1.0 - tunneling / 100.0));
            assert!((product - both).abs() < 0.15, "{name}: {product}");
        }
    }
}
