//! Tests of the function that applies a plan: what is stored, in force and published afterwards,
//! and what is refused.

use std::net::Ipv4Addr;

use canal_controller_metrics::GaugeValues;
use canal_model::fleet::{Demand, FleetReplica, ReplicaState};
use canal_model::ids::{ReplicaNumber, ServiceId, ServiceKey, Vni};
use canal_store::{StoreError, StoreLimits, StoredReplica};

use super::*;
use crate::SilenceTimeouts;

/// A reconciler, and the queue of its catalog writer.
struct ApplyFixture {
    _dir: tempfile::TempDir,
    context: ReconcilerContext,
    reconciler: FleetReconciler,
    updates: mpsc::Receiver<TierUpdate>,
    _catalogs: watch::Sender<Arc<Catalog>>,
}

impl ApplyFixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Arc::new(Store::open(dir.path(), StoreLimits::default()).unwrap());
        let fleet = Arc::new(FleetHandle::open(&store, SilenceTimeouts::default()).unwrap());
        let (catalogs, catalog) = watch::channel(Arc::new(Catalog::default()));
        let (sender, updates) = mpsc::channel(1);
        let context = ReconcilerContext {
            fleet,
            catalog,
            store,
            metrics: Arc::default(),
            updates: sender,
        };
        Self {
            _dir: dir,
            reconciler: FleetReconciler::new(context.clone()),
            context,
            updates,
            _catalogs: catalogs,
        }
    }

    /// Applies a plan for these services while the writer answers so, and returns what the writer
    /// was given.
    async fn apply(
        &mut self,
        plan: &Arc<Plan>,
        services: u32,
        answer: Result<Generation, StoreError>,
    ) -> (Result<AppliedPlan, PlanRefusal>, TierState) {
        let Self {
            reconciler,
            updates,
            ..
        } = self;
        let applying = reconciler.apply_plan(plan.clone(), Arc::new(demands(services)));
        let writing = async {
            let update = updates.recv().await.unwrap();
            update.reply.send(answer).unwrap();
            update.tier
        };
        tokio::join!(applying, writing)
    }

    /// Returns the numbers of the plan on disk and of the plan in force.
    fn numbers(&self) -> (u32, u32) {
        let stored = self.context.store.plan().unwrap();
        (stored.number, self.context.fleet.plan().number)
    }

    fn refused(&self, reason: &str) -> bool {
        let line = format!("canal_controller_fleet_plans_refused_total{{reason=\"{reason}\"}} 1\n");
        self.context
            .metrics
            .render(&GaugeValues::default())
            .contains(&line)
    }
}

fn demands(services: u32) -> Demands {
    let mut demands = Demands::default();
    for n in 1..=services {
        let key: ServiceKey = format!("alpha/shop/s{n}").parse().unwrap();
        demands
            .ranges
            .insert(key.tenant.clone(), vec!["10.1.192.0/18".parse().unwrap()]);
        demands.services.insert(
            ServiceId::new(n).unwrap(),
            Demand {
                key,
                vni: Vni::new(1).unwrap(),
                weight: 1,
                home: None,
            },
        );
    }
    demands
}

fn plan(services: u32, parent: Option<&Plan>) -> Arc<Plan> {
    let replica = FleetReplica {
        name: "r1".parse().unwrap(),
        number: ReplicaNumber::new(1).unwrap(),
        backend: "b1".parse().unwrap(),
        az: "az1".parse().unwrap(),
        underlay: Ipv4Addr::new(250, 1, 0, 3),
        state: ReplicaState::Active,
        up: true,
    };
    let fleet = Fleet::of([("az1".parse().unwrap(), 1)].into(), [replica]);
    let ownership = Ownership::default();
    Arc::new(canal_planner::plan(
        &fleet,
        &demands(services),
        &ownership,
        parent,
    ))
}

fn tables(tier: &TierState) -> usize {
    tier.tenants
        .values()
        .map(|placement| placement.tables.len())
        .sum()
}

#[tokio::test]
async fn an_applied_plan_is_on_disk_in_force_and_published() {
    let mut fixture = ApplyFixture::new();
    let first = plan(1, None);
    let (applied, tier) = fixture.apply(&first, 1, Ok(Generation(7))).await;
    let wanted = AppliedPlan {
        generation: Generation(7),
        waiting: Default::default(),
    };
    assert_eq!(applied.unwrap(), wanted);
    assert_eq!((fixture.numbers(), tables(&tier)), ((1, 1), 1));
    assert_eq!(fixture.context.store.plan().unwrap(), *first);
    // The writer would not answer a second time.
    let again = fixture
        .reconciler
        .apply_plan(first.clone(), Arc::new(demands(1)))
        .await;
    assert_eq!(again.unwrap(), wanted);
    let second = plan(2, Some(&first));
    let (applied, tier) = fixture.apply(&second, 2, Ok(Generation(8))).await;
    assert_eq!(applied.unwrap().generation, Generation(8));
    assert_eq!((fixture.numbers(), tables(&tier)), ((2, 2), 2));
}

#[tokio::test]
async fn a_table_waits_until_its_new_replica_has_the_tenant() {
    let mut fixture = ApplyFixture::new();
    let row = StoredReplica {
        name: "r1".parse().unwrap(),
        number: ReplicaNumber::new(1).unwrap(),
        backend: "b1".parse().unwrap(),
        az: "az1".parse().unwrap(),
        underlay: Ipv4Addr::new(250, 1, 0, 3),
        state: ReplicaState::Active,
        drain: false,
    };
    let fleet = fixture.context.fleet.clone();
    fleet.membership().register_replica(row, Instant::now());
    let first = plan(1, None);
    let (applied, tier) = fixture.apply(&first, 1, Ok(Generation(7))).await;
    let table = (ServiceId::new(1).unwrap(), "az1".parse().unwrap());
    assert_eq!(applied.unwrap().waiting, [table].into());
    assert_eq!((fixture.numbers(), tables(&tier)), ((1, 1), 0));
    assert_eq!(fleet.counts().waiting, 1);
}

#[tokio::test]
async fn a_plan_of_another_parent_is_refused_and_changes_nothing() {
    let mut fixture = ApplyFixture::new();
    let (applied, _) = fixture.apply(&plan(1, None), 1, Ok(Generation(7))).await;
    applied.unwrap();
    let refused = fixture
        .reconciler
        .apply_plan(plan(2, None), Arc::new(demands(2)))
        .await;
    let Err(PlanRefusal::Outdated { parent, in_force }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!((parent, in_force), (0, 1));
    assert_eq!(fixture.numbers(), (1, 1));
    assert_eq!(fixture.context.fleet.plan().services.len(), 1);
    assert!(fixture.updates.try_recv().is_err());
    assert!(fixture.refused("outdated"));
}

#[tokio::test]
async fn a_plan_that_could_not_be_published_is_in_force_and_may_be_applied_again() {
    let mut fixture = ApplyFixture::new();
    let first = plan(1, None);
    let disk = StoreError::Disk {
        path: "state.redb".into(),
        why: "full".into(),
    };
    let (applied, _) = fixture.apply(&first, 1, Err(disk)).await;
    assert!(
        matches!(applied, Err(PlanRefusal::NotPublished(_))),
        "{applied:?}"
    );
    assert_eq!(fixture.numbers(), (1, 1));
    assert!(fixture.refused("not_published"));
    let (applied, tier) = fixture.apply(&first, 1, Ok(Generation(8))).await;
    assert_eq!(applied.unwrap().generation, Generation(8));
    assert_eq!(tables(&tier), 1);
}
