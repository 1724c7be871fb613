//! Table 5 as a cost model: VMs of a region before and after redirectors and tunnels. Nothing is measured here: costs are arguments, and
//! every assumption is printed with the result.

use std::fmt::Write;

use anyhow::ensure;

/// Measured costs, and what a region is like.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Costs {
    /// CPU of the gateway's L7 work per request, µs. Default: 13.5 × the redirector's, the middle of the paper's 12 to 15 (§4.4).
    #[arg(long, default_value_t = 27.0)]
    l7_us: f64,
    /// CPU of the redirector per packet, µs. Default: assumed; measure it.
    #[arg(long, default_value_t = 0.2)]
    redirector_us: f64,
    /// Packets into a replica per request. Default: assumed (request, acknowledgement, and the endpoint's answers).
    #[arg(long, default_value_t = 10.0)]
    packets: f64,
    /// CPU of taking a packet out of its tunnel, µs. Default: assumed; measure it.
    #[arg(long, default_value_t = 0.2)]
    tunnel_us: f64,
    /// CPU of a load balancer's hop per request, µs. Default: assumed, as the redirector's work twice over.
    #[arg(long, default_value_t = 4.0)]
    lb_us: f64,
    /// Sessions at the underlay of a replica without tunnels. Default: the 100,000 client sessions.
    #[arg(long, default_value_t = 100_000.0)]
    sessions: f64,
    /// Sessions at the underlay of a replica with tunnels. Default: 10 × cores for 4 cores (§4.4).
    #[arg(long, default_value_t = 40.0)]
    tunnel_sessions: f64,
    /// Sessions of a replica to endpoints, for each client session: they need room at the underlay, too. Default: assumed pooling.
    #[arg(long, default_value_t = 0.5)]
    upstream: f64,
    /// How full the session table may be. Default: §3.2's 90 %.
    #[arg(long, default_value_t = 0.9)]
    session_level: f64,
    /// CPU in use when sessions are at that level. Default: §3.2's 20 %.
    #[arg(long, default_value_t = 0.2)]
    cpu_at_level: f64,
    /// How busy a VM's CPU may be. Default: assumed; the paper gives none. The rows below the result show others.
    #[arg(long, default_value_t = 0.35)]
    cpu_level: f64,
}

/// The paper's Table 5 in percent: redirector, tunneling, both.
const PAPER: [(&str, f64, f64, f64); 4] =
    [("Region1", 47.5, 32.2, 64.4), ("Region2", 45.1, 45.3, 69.9), ("Region3", 32.1, 33.6, 54.9), ("Region4", 36.7, 36.5, 59.9)];

/// VMs, relative to the replicas before.
struct Vms {
    before: f64,
    redirector: f64,
    both: f64,
}

impl Costs {
    fn vms(&self, cpu_level: f64) -> Vms {
        // One replica VM before is full of sessions: it has `session_level` of its table in use and `cpu_at_level` of its CPU.
        let own = 1.0 + self.upstream;
        // A load balancer VM has the same table and holds each client session once; its CPU per request beside a replica's.
        let lb_by_sessions = 1.0 / own;
        let lb_by_cpu = self.cpu_at_level * (self.lb_us / self.l7_us) / cpu_level;
        let balancers = f64::max(lb_by_sessions, lb_by_cpu);
        let redirector = self.packets * self.redirector_us / self.l7_us;
        let tunnel = self.packets * self.tunnel_us / self.l7_us;
        let replicas = |sessions: f64, more: f64| f64::max(sessions, self.cpu_at_level * (1.0 + more) / cpu_level);
        // Tunnels aggregate client sessions; those to endpoints cross the same edge and ride in the same tunnels.
        let aggregated = self.tunnel_sessions / (self.sessions * own);
        Vms {
            before: replicas(1.0, 0.0) + balancers,
            redirector: replicas(1.0, redirector),
            both: replicas(aggregated, redirector + tunnel),
        }
    }

    fn check(&self) -> anyhow::Result<()> {
        let shares = [("session-level", self.session_level), ("cpu-at-level", self.cpu_at_level), ("cpu-level", self.cpu_level)];
        for (name, share) in shares {
            ensure!(share > 0.0 && share <= 1.0, "--{name} {share} is out of range: use a share above 0, to 1");
        }
        let costs = [("l7-us", self.l7_us), ("sessions", self.sessions)];
        for (name, cost) in costs {
            ensure!(cost > 0.0, "--{name} {cost} is out of range: use a positive number");
        }
        Ok(())
    }
}

impl Vms {
    /// Percent saved by the redirector, by tunnels of what is left, and by both.
    fn saved(&self) -> (f64, f64, f64) {
        let saved = |from: f64, to: f64| 100.0 * (1.0 - to / from);
        (saved(self.before, self.redirector), saved(self.redirector, self.both), saved(self.before, self.both))
    }
}

pub(crate) fn figure(costs: &Costs) -> anyhow::Result<String> {
    costs.check()?;
    let mut text = String::new();
    assumptions(&mut text, costs)?;
    let vms = costs.vms(costs.cpu_level);
    let [before, redirector, both] = [vms.before, vms.redirector, vms.both].map(|vms| 100.0 * vms);
    writeln!(text, "\nVMs for each 100 replicas: before {before:.0}, with redirectors {redirector:.0}, with tunnels as well {both:.0}")?;
    writeln!(text, "\n             redirector  tunneling (of what is left)  both")?;
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
    for level in [0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8] {
        writeln!(text, "{}", row(&format!("{:.0} %", 100.0 * level), costs.vms(level).saved()))?;
    }
    Ok(text)
}

fn row(name: &str, (redirector, tunneling, both): (f64, f64, f64)) -> String {
    format!("{name:<12} {redirector:>8.1} % {tunneling:>9.1} % {both:>24.1} %")
}

fn assumptions(text: &mut String, costs: &Costs) -> std::fmt::Result {
    let [full, used, level] = [costs.session_level, costs.cpu_at_level, costs.cpu_level].map(|share| 100.0 * share);
    let (redirector, tunnels) = (costs.packets * costs.redirector_us, costs.packets * costs.tunnel_us);
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
        "  load balancers are VMs of the same kind and hold each client session once; a replica holds {} more for each, to endpoints.",
        costs.upstream
    )?;
    writeln!(
        text,
        "  per request: L7 {} µs, redirector {redirector} µs ({:.1} × less), tunnels {tunnels} µs, load balancer {} µs.",
        costs.l7_us,
        costs.l7_us / redirector,
        costs.lb_us
    )?;
    let sessions = costs.sessions * (1.0 + costs.upstream);
    writeln!(text, "  sessions of a replica at the underlay: {sessions} without tunnels, {} with.", costs.tunnel_sessions)
}

/// What the paper's regions must be like if this model is right.
fn implied(text: &mut String, costs: &Costs) -> std::fmt::Result {
    let range = |values: [f64; 4]| (values.iter().copied().fold(f64::MAX, f64::min), values.iter().copied().fold(f64::MIN, f64::max));
    let work = 1.0 + costs.packets * (costs.redirector_us + costs.tunnel_us) / costs.l7_us;
    let (least, most) = range(PAPER.map(|(_, _, tunneling, _)| 100.0 * costs.cpu_at_level * work / (1.0 - tunneling / 100.0)));
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

    #[test]
    fn the_papers_columns_multiply() {
        for (name, redirector, tunneling, both) in PAPER {
            let product = 100.0 * (1.0 - (1.0 - redirector / 100.0) * (1.0 - tunneling / 100.0));
            assert!((product - both).abs() < 0.15, "{name}: {product}");
        }
    }
}
