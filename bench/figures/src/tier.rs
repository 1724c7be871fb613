//! A tier of some size, planned: services with seeded weights on backends in AZs. No replicas: figures are about backends.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use canal_model::fleet::{Demand, Demands, Fleet, Ownership, Rules};
use canal_model::ids::{AzName, BackendName, ServiceId, Vni};
use canal_model::plan::{Note, Plan};

/// How large a tier, and by which rules.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Size {
    #[arg(long, default_value_t = 1000)]
    pub(crate) services: u32,
    #[arg(long, default_value_t = 40)]
    pub(crate) backends: u32,
    /// At most 7.
    #[arg(long, default_value_t = 2)]
    pub(crate) azs: u32,
    /// Backends of a service in its home AZ.
    #[arg(long, default_value_t = 2)]
    pub(crate) home: usize,
    /// Backends of a service in other AZs.
    #[arg(long, default_value_t = 1)]
    pub(crate) away: usize,
    /// Weights of services are 1 to this, by the seed; 1 makes all alike.
    #[arg(long, default_value_t = 1)]
    pub(crate) heaviest: u32,
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// A planned tier, in numbers.
pub(crate) struct Tier {
    /// Each service's backends, sorted.
    pub(crate) services: Vec<Vec<usize>>,
    pub(crate) weights: Vec<u32>,
    /// The AZ of each backend.
    pub(crate) azs: Vec<usize>,
    /// Services that share all backends with another, as the planner says.
    pub(crate) shared: usize,
    /// Services with fewer backends than asked for.
    pub(crate) few: usize,
    /// What the linter found.
    pub(crate) findings: usize,
    /// What the planner needed.
    pub(crate) took: Duration,
}

impl Size {
    pub(crate) fn tier(&self) -> anyhow::Result<Tier> {
        ensure!((1..=7).contains(&self.azs), "{} AZs are out of range: use 1 to 7", self.azs);
        ensure!(self.backends >= self.azs, "{} backends in {} AZs: use one for each at least", self.backends, self.azs);
        let az = |n: u32| AzName::new(&format!("az{}", n + 1)).context("an AZ's name");
        let mut fleet = Fleet::default();
        for n in 0..self.azs {
            fleet.azs.insert(az(n)?, n as u8 + 1);
        }
        for n in 0..self.backends {
            fleet.backends.insert(BackendName::new(&format!("backend-{n:05}"))?, az(n % self.azs)?);
        }
        let rules = Rules { home: self.home, away: self.away, ..Rules::default() };
        let mut demands = Demands { rules, ..Demands::default() };
        let mut draw = Draw::new(self.seed);
        for n in 1..=self.services {
            let key = format!("tenant/shop/service-{n}").parse()?;
            let weight = 1 + draw.below(u64::from(self.heaviest.max(1))) as u32;
            demands.services.insert(ServiceId::new(n)?, Demand { key, vni: Vni::new(1)?, weight, home: None });
        }
        let start = Instant::now();
        let plan = canal_planner::plan(&fleet, &demands, &Ownership::default(), None);
        let took = start.elapsed();
        let findings = canal_planlint::check(&fleet, &demands, &plan).len();
        Ok(Tier { took, findings, ..Tier::new(&fleet, &demands, &plan) })
    }
}

impl Tier {
    fn new(fleet: &Fleet, demands: &Demands, plan: &Plan) -> Tier {
        let slots: BTreeMap<&BackendName, usize> = fleet.backends.keys().zip(0..).collect();
        let zones: BTreeMap<&AzName, usize> = fleet.azs.keys().zip(0..).collect();
        let services = plan.services.values().map(|service| {
            let mut backends: Vec<usize> = service.placement.iter().flat_map(|placement| placement.all()).map(|name| slots[name]).collect();
            backends.sort_unstable();
            backends
        });
        let count = |wanted: fn(&Note) -> bool| plan.notes.iter().filter(|note| wanted(note)).count();
        Tier {
            services: services.collect(),
            weights: demands.services.values().map(|demand| demand.weight).collect(),
            azs: fleet.backends.values().map(|az| zones[az]).collect(),
            shared: count(|note| matches!(note, Note::Shared { .. })),
            few: count(|note| matches!(note, Note::FewAtHome { .. } | Note::FewAway { .. })),
            findings: 0,
            took: Duration::ZERO,
        }
    }
}

/// How many members two sorted lists share.
pub(crate) fn overlap(one: &[usize], other: &[usize]) -> usize {
    one.iter().filter(|backend| other.contains(backend)).count()
}

/// Seeded numbers: splitmix64.
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(seed: u64) -> Draw {
        Draw(seed)
    }
    /// 0 to `limit - 1`; `limit` is small beside 2^64, so that the remainder is even enough.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % limit.max(1)
    }
}
