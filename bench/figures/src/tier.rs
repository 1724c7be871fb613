//! A planned tier of some size: services with seeded weights on backends in AZs. It has no
//! replicas, because the figures are about backends.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use canal_model::fleet::{Demand, Demands, Fleet, Ownership, ShardingRules};
use canal_model::ids::{AzName, BackendName, ServiceId, Vni};
use canal_model::plan::{Plan, UnmetConstraint};

/// Size of the tier, and its sharding rules.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct TierSize {
    // Enough that pairs of services share backends by chance, and few enough to compare all pairs.
    #[arg(long, default_value_t = 1000)]
    pub(crate) services: u32,
    // The number was chosen.
    #[arg(long, default_value_t = 40)]
    pub(crate) backends: u32,
    /// Number of AZs, at most 7.
    #[arg(long, default_value_t = 2)]
    pub(crate) azs: u32,
    /// Backends of a service in its home AZ.
    #[arg(long, default_value_t = 2)]
    pub(crate) home: usize,
    /// Backends of a service in other AZs.
    #[arg(long, default_value_t = 1)]
    pub(crate) away: usize,
    /// Maximum weight of a service; weights are drawn from 1 to this. With 1 all services are
    /// equal.
    #[arg(long, default_value_t = 1)]
    pub(crate) heaviest: u32,
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// A planned tier, in numbers.
pub(crate) struct PlannedTier {
    /// Backends of each service, sorted.
    pub(crate) services: Vec<Vec<usize>>,
    pub(crate) weights: Vec<u32>,
    /// The AZ of each backend.
    pub(crate) azs: Vec<usize>,
    /// Number of services that share all backends with another, according to the planner.
    pub(crate) shared: usize,
    /// Number of services with fewer backends than requested.
    pub(crate) few: usize,
    /// Number of violations that planlint found.
    pub(crate) findings: usize,
    /// Time that the planner needed.
    pub(crate) took: Duration,
}

impl TierSize {
    pub(crate) fn tier(&self) -> anyhow::Result<PlannedTier> {
        // An AZ has one of the eighths 1 to 7 of a tenant's gateway range (canal_planner::address).
        ensure!(
            (1..=7).contains(&self.azs),
            "{} AZs are out of range; fix: use 1 to 7",
            self.azs
        );
        ensure!(
            self.backends >= self.azs,
            "{} backends in {} AZs are too few; fix: use one for each at least",
            self.backends,
            self.azs
        );
        let az = |n: u32| AzName::new(&format!("az{}", n + 1)).context("an AZ's name");
        let mut fleet = Fleet::default();
        for n in 0..self.azs {
            // Numbers of AZs begin at 1.
            fleet.azs.insert(az(n)?, n as u8 + 1);
        }
        for n in 0..self.backends {
            // Backends are dealt to AZs in turn, so that AZs differ by one at the most.
            fleet.backends.insert(
                BackendName::new(&format!("backend-{n:05}"))?,
                az(n % self.azs)?,
            );
        }
        let rules = ShardingRules {
            home: self.home,
            away: self.away,
            ..ShardingRules::default()
        };
        let mut demands = Demands {
            rules,
            ..Demands::default()
        };
        let mut draw = SeededRng::new(self.seed);
        for n in 1..=self.services {
            let key = format!("tenant/shop/service-{n}").parse()?;
            // Weights are drawn at random, since real services differ; the seed repeats a figure.
            let weight = 1 + draw.below(u64::from(self.heaviest.max(1))) as u32;
            demands.services.insert(
                ServiceId::new(n)?,
                Demand {
                    key,
                    vni: Vni::new(1)?,
                    weight,
                    home: None,
                },
            );
        }
        let start = Instant::now();
        let plan = canal_planner::plan(&fleet, &demands, &Ownership::default(), None);
        let took = start.elapsed();
        let findings = canal_planlint::check(&fleet, &demands, &plan).len();
        Ok(PlannedTier {
            took,
            findings,
            ..PlannedTier::new(&fleet, &demands, &plan)
        })
    }
}

impl PlannedTier {
    fn new(fleet: &Fleet, demands: &Demands, plan: &Plan) -> PlannedTier {
        let slots: BTreeMap<&BackendName, usize> = fleet.backends.keys().zip(0..).collect();
        let zones: BTreeMap<&AzName, usize> = fleet.azs.keys().zip(0..).collect();
        let services = plan.services.values().map(|service| {
            let mut backends: Vec<usize> = service
                .placement
                .iter()
                .flat_map(|placement| placement.all())
                .map(|name| slots[name])
                .collect();
            backends.sort_unstable();
            backends
        });
        let count = |wanted: fn(&UnmetConstraint) -> bool| {
            plan.notes.iter().filter(|note| wanted(note)).count()
        };
        PlannedTier {
            services: services.collect(),
            weights: demands
                .services
                .values()
                .map(|demand| demand.weight)
                .collect(),
            azs: fleet.backends.values().map(|az| zones[az]).collect(),
            shared: count(|note| matches!(note, UnmetConstraint::Shared { .. })),
            few: count(|note| {
                matches!(
                    note,
                    UnmetConstraint::FewAtHome { .. } | UnmetConstraint::FewAway { .. }
                )
            }),
            findings: 0,
            took: Duration::ZERO,
        }
    }
}

/// Returns the number of members that two sorted lists share.
pub(crate) fn overlap(one: &[usize], other: &[usize]) -> usize {
    one.iter().filter(|backend| other.contains(backend)).count()
}

/// A generator of seeded random numbers (splitmix64).
pub(crate) struct SeededRng(u64);

impl SeededRng {
    pub(crate) fn new(seed: u64) -> SeededRng {
        SeededRng(seed)
    }
    /// Returns a number from 0 to `limit - 1`; `limit` is small compared with 2^64, so that the
    /// remainder is even enough.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % limit.max(1)
    }
}
