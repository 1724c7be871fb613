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
use canal_model::share::Shares;
use canal_policy_sources::{Preparer, ReadContent, SourceState, TenantSources};
use canal_store::{Store, StoreLimits};

use crate::compiler::{TENANT, change, documents};

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
        let capacities = SharedCapacities {
            queued_changes: 256,
            queued_change_bytes: 1 << 30,
            configuration_bytes: 1 << 40,
            compiled_bytes: 1 << 40,
            compiled_resources: 1 << 40,
            route_table_bytes: 1 << 40,
            connections: 1,
            unauthenticated: 1,
            certificates: 1,
            streams: 1,
            observations: 1,
            shares: Shares::default(),
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
    pub fn change(&mut self, number: usize) -> Duration {
        change(&mut self.documents, number);
        self.publish()
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
        assert!(
            validated.objections.is_empty(),
            "the tenant has no share that it exceeds"
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
