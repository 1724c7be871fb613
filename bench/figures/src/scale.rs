//! The controller's cost of planning: a whole tier at first, a pass without changes, and changes of
//! the fleet. This is the time of the planner alone, on this machine; the controller also reads
//! reports and publishes.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::Context;
use canal_model::fleet::{
    Demand, Demands, Fleet, FleetReplica, OwnerReport, Ownership, ReplicaState,
};
use canal_model::ids::{AzName, BackendName, ReplicaNumber, ServiceId, Vni};
use canal_model::plan::Plan;

#[derive(clap::Args)]
pub(crate) struct ScaleArgs {
    // As many services as an edge's maps hold (16,384), rounded down.
    #[arg(long, default_value_t = 16_000)]
    services: u32,
    // The number was chosen; figure 19 uses the same.
    #[arg(long, default_value_t = 40)]
    backends: u32,
    /// Replicas of each backend.
    #[arg(long, default_value_t = 2)]
    replicas: u32,
}

/// The AZs of the figure.
/// The fewest with which services have backends away from home.
const AZS: u32 = 2;
/// Number of times that a plan is made. The quickest counts, because others use the machine too.
const REPETITIONS: usize = 3;

struct ScaleTier {
    azs: BTreeMap<AzName, u8>,
    replicas: BTreeMap<ReplicaNumber, FleetReplica>,
    demands: Demands,
    ownership: Ownership,
    plan: Option<Plan>,
    text: String,
}

impl ScaleTier {
    fn join(&mut self, backend: u32, replicas: u32) -> anyhow::Result<()> {
        for _ in 0..replicas {
            let number = self
                .replicas
                .keys()
                .last()
                .map_or(1, |last| u32::from(last.get()) + 1);
            let az = backend % AZS;
            let replica = FleetReplica {
                name: format!("replica-{number}").parse()?,
                number: ReplicaNumber::new(number)?,
                backend: BackendName::new(&format!("backend-{backend:05}"))?,
                az: AzName::new(&format!("az{}", az + 1))?,
                underlay: [250, az as u8 + 1, (number >> 8) as u8, number as u8].into(),
                state: ReplicaState::Active,
                up: true,
            };
            self.replicas.insert(replica.number, replica);
        }
        Ok(())
    }

    /// Delivers the plan to all replicas; each owns only the sessions that the plan assigns to it.
    fn deliver(&mut self) {
        let plan = self.plan.as_ref().map_or(0, |plan| plan.number);
        for number in self.replicas.keys() {
            let scanned_after = self.ownership.last_report_number();
            self.ownership.record_report(
                *number,
                OwnerReport {
                    plan,
                    scanned_after,
                    owned: BTreeMap::new(),
                },
            );
        }
        self.azs
            .keys()
            .for_each(|az| self.ownership.record_edge_report(az.clone(), plan));
    }

    fn measure(&mut self, what: &str) -> anyhow::Result<()> {
        let fleet = Fleet::of(self.azs.clone(), self.replicas.values().cloned());
        let mut best: Option<(Duration, Plan)> = None;
        for _ in 0..REPETITIONS {
            let begun = Instant::now();
            let next =
                canal_planner::plan(&fleet, &self.demands, &self.ownership, self.plan.as_ref());
            let took = begun.elapsed();
            if best.as_ref().is_none_or(|(least, _)| took < *least) {
                best = Some((took, next));
            }
        }
        let (took, next) = best.context("a plan was made")?;
        let of = |id| self.plan.as_ref().and_then(|plan| plan.services.get(id));
        let moved = next
            .services
            .iter()
            .filter(|(id, service)| of(id).is_some_and(|old| old.placement != service.placement))
            .count();
        let tables = next.services.iter().map(|(id, service)| {
            let old = |az: &AzName| {
                of(id)
                    .and_then(|old| old.tables.get(az))
                    .map(|table| table.version)
            };
            service
                .tables
                .iter()
                .filter(|(az, table)| old(az) != Some(table.version))
                .count()
        });
        writeln!(
            self.text,
            "{what:<44} {:>8.1} ms   {moved:>6}   {:>6}",
            took.as_secs_f64() * 1e3,
            tables.sum::<usize>()
        )?;
        self.plan = Some(next);
        Ok(())
    }
}

pub(crate) fn figure(arguments: &ScaleArgs) -> anyhow::Result<String> {
    let ScaleArgs {
        services,
        backends,
        replicas,
    } = *arguments;
    let mut azs = BTreeMap::new();
    for az in 0..AZS {
        // Numbers of AZs begin at 1.
        azs.insert(AzName::new(&format!("az{}", az + 1))?, az as u8 + 1);
    }
    let (demands, ownership) = (Demands::default(), Ownership::default());
    let mut tier = ScaleTier {
        azs,
        replicas: BTreeMap::new(),
        demands,
        ownership,
        plan: None,
        text: String::new(),
    };
    // The range has an address in each AZ for every service.
    tier.demands
        .ranges
        .insert("tenant".parse()?, vec!["10.128.0.0/9".parse()?]);
    for n in 1..=services {
        let key = format!("tenant/shop/service-{n}").parse()?;
        tier.demands.services.insert(
            ServiceId::new(n)?,
            Demand {
                key,
                vni: Vni::new(1)?,
                // Weights 1 to 4, since equal weights would make planning easier than it is.
                weight: 1 + n % 4,
                home: None,
            },
        );
    }
    for backend in 0..backends {
        tier.join(backend, replicas)?;
    }
    writeln!(
        tier.text,
        "{services} services, {backends} backends of {replicas} replicas, {AZS} AZs"
    )?;
    writeln!(
        tier.text,
        "{:<44} {:>11}   {:>6}   {:>6}",
        "", "planned in", "moved", "tables"
    )?;
    tier.measure("all of it, for the first time")?;
    // The plan is in force only when all replicas have reported it.
    tier.deliver();
    tier.measure("nothing changed")?;
    tier.join(0, 1)?;
    tier.measure("a replica joined")?;
    tier.measure("nothing changed since, and tables in motion")?;
    // A moved bucket needs two reports: that the tables arrived, and that no session is left.
    for what in [
        "all have the tables",
        "all reported that they own no other sessions",
    ] {
        tier.deliver();
        tier.measure(what)?;
    }
    tier.join(backends, replicas)?;
    tier.measure("a new backend: the first wave")?;
    let mut waves = 1;
    // The planner moves a part of the services at a time; the loop ends when it moves none.
    loop {
        tier.deliver();
        let before = tier.plan.clone();
        let length = tier.text.len();
        tier.measure("")?;
        // The waves are only counted, so their lines are removed.
        tier.text.truncate(length);
        if before == tier.plan {
            break;
        }
        waves += 1;
    }
    writeln!(tier.text, "{waves} plans until it has its part")?;
    tier.measure("nothing changed")?;
    // Any backend would do; the others must take over its buckets.
    tier.replicas
        .retain(|_, replica| replica.backend.as_str() != "backend-00001");
    tier.measure("a backend was removed")?;
    Ok(tier.text)
}
