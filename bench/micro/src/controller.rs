//! The controller's own work for a change of one route of the tenant of [`CompileBench`]: from the
//! objects that were read to the state that subscribers are sent. Reading the file, the clock of the
//! store and the streams are not a part of it.
//!
//! [`CompileBench`]: crate::CompileBench

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_access::{SharedCapacities, TenantLimits};
use canal_catalog::{PolicyOrigin, TenantCatalog};
use canal_controller_metrics::ControllerMetrics;
use canal_model::ids::Generation;
use canal_model::policy::Document;
use canal_model::share::{Share, ShareKind, Shares};
use canal_policy_sources::{Preparer, ReadContent, SourceState, TenantSources};
use canal_store::{Store, StoreLimits};

use crate::compiler::{RULES_PER_SERVICE, TENANT, change, documents};

/// Bytes and resources that the tenant may have: more than it takes, so that no share withholds it.
const UNBOUNDED: u64 = 1 << 40;

/// A controller without a network, which has compiled the tenant.
pub struct ControllerBench {
    preparer: Preparer,
    documents: Vec<Arc<Document>>,
    sources: Option<Arc<TenantSources>>,
    catalog: Option<TenantCatalog>,
    generation: u64,
    /// Keeps the folder of the store.
    _folder: tempfile::TempDir,
}

impl ControllerBench {
    /// Reads and compiles the tenant.
    ///
    /// # Panics
    /// Panics if there is no room for the store in the folder for temporary files.
    pub fn new() -> Self {
        let folder = tempfile::TempDir::new().expect("a folder for temporary files");
        let store = Store::open(folder.path(), StoreLimits::default()).expect("a new store");
        // The tenant is larger than the default shares permit.
        let mut shares = Shares::default();
        for kind in [
            ShareKind::ConfigurationBytes,
            ShareKind::CompiledBytes,
            ShareKind::CompiledResources,
            ShareKind::RouteTableBytes,
        ] {
            shares.set(kind, Share::Amount(UNBOUNDED));
        }
        let capacities = SharedCapacities {
            // Nobody measured the queue. The bench has no connections or streams, so 1 of each will
            // do.
            queued_changes: 256,
            queued_change_bytes: 1 << 30,
            configuration_bytes: UNBOUNDED,
            compiled_bytes: UNBOUNDED,
            compiled_resources: UNBOUNDED,
            route_table_bytes: UNBOUNDED,
            connections: 1,
            unauthenticated: 1,
            certificates: 1,
            streams: 1,
            observations: 1,
            shares,
        };
        let mut bench = Self {
            preparer: Preparer {
                store: Arc::new(store),
                metrics: Arc::new(ControllerMetrics::default()),
                limits: Arc::new(TenantLimits::new(&capacities)),
                compilers: Default::default(),
            },
            documents: documents(),
            sources: None,
            catalog: None,
            generation: 0,
            _folder: folder,
        };
        bench.publish();
        bench
    }

    /// Replaces a route, and returns the time until the next state of the tenant is there. Each
    /// `number` gives other content to another route.
    ///
    /// # Panics
    /// Panics if the next state has other changes than the rules of the route.
    pub fn change(&mut self, number: usize) -> Duration {
        change(&mut self.documents, number);
        let took = self.publish();
        let catalog = self.catalog.as_ref().expect("a state was published");
        let changed = catalog
            .entries
            .values()
            .filter(|entry| entry.changed == Generation(self.generation))
            .count();
        assert_eq!(changed, RULES_PER_SERVICE, "each rule of the route");
        took
    }

    fn publish(&mut self) -> Duration {
        let documents = self.documents.clone();
        let before = self.sources.take();
        let begun = Instant::now();
        let content = ReadContent::new(PolicyOrigin::Files, documents, Vec::new());
        let mut after = match &before {
            Some(before) => before.as_ref().clone(),
            None => TenantSources::new(TENANT.parse().expect("the name is valid")),
        };
        after.take_state(SourceState::Read(Arc::new(content)));
        let prepared = self.preparer.sources_after(before.clone(), after);
        let validated = prepared.validated.expect("the store has IDs");
        let objections = &validated.objections;
        assert!(
            objections.is_empty(),
            "the tenant exceeds no share: {objections:?}"
        );
        self.generation += 1;
        let generation = Generation(self.generation);
        let next = TenantCatalog::next(self.catalog.as_ref(), validated.compiled, generation);
        let took = begun.elapsed();
        // The state before is dropped outside the time, as its last reader drops it.
        self.catalog = black_box(Some(next));
        self.sources = Some(prepared.after);
        took
    }
}

impl Default for ControllerBench {
    fn default() -> Self {
        Self::new()
    }
}
