//! The interface between a source of policy and the controller. A source provides a tenant's
//! objects. The compiler decides what they mean together. The order of [`PolicyOrigin`] decides
//! which of two objects with the same key is in force.
//!
//! Two sources implement [`PolicySource`]: [`ReadContent`], for a source that the controller reads
//! (files now), and [`crate::applied::AppliedObjects`], for one that operators write to (the API).
//! A new source that is read, for example Kubernetes, is a variant of [`PolicyOrigin`] and a task
//! in a crate of its own:
//!
//! 1. it makes a [`ReadContent`] of each tenant's objects and passes it on in a [`SourceUpdate`]
//!    (`PendingChanges::apply_update`);
//! 2. it watches the catalog, and writes the status of each of its objects
//!    (`TenantCatalog::status_of`) back to the source.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use canal_catalog::PolicyOrigin;
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::ids::TenantName;
use canal_model::policy::{Document, ObjectKey};

/// The objects and diagnostics that one source has of one tenant.
pub trait PolicySource: Debug {
    /// Returns which source it is, and with that its precedence.
    fn origin(&self) -> PolicyOrigin;

    /// Returns the tenant's objects in a stable order.
    fn documents(&self) -> Box<dyn Iterator<Item = &Arc<Document>> + '_>;

    /// Returns the object with this key, if the source has it.
    fn find(&self, key: &ObjectKey) -> Option<&Arc<Document>>;

    /// Returns the diagnostics about the source itself. Those about its objects are the compiler's.
    fn diagnostics(&self) -> Vec<Diagnostic>;

    /// Returns false if a part of the source could not be read, so that the tenant may have more
    /// objects than these.
    fn is_read(&self) -> bool;

    /// Returns true if the source has neither objects nor diagnostics of the tenant.
    fn is_empty(&self) -> bool {
        self.documents().next().is_none() && self.diagnostics().is_empty()
    }
}

/// A tenant's objects and diagnostics from a source that the controller reads, as of the last time
/// that it was readable.
#[derive(Debug)]
pub struct ReadContent {
    origin: PolicyOrigin,
    documents: Vec<Arc<Document>>,
    diagnostics: Vec<Diagnostic>,
    /// Position of each object in `documents`, from the first search on. A tenant with one source needs
    /// none.
    by_key: OnceLock<HashMap<ObjectKey, usize>>,
}

impl ReadContent {
    /// Creates the content of a source from the objects and diagnostics of one reading.
    pub fn new(
        origin: PolicyOrigin,
        documents: Vec<Arc<Document>>,
        diagnostics: Vec<Diagnostic>,
    ) -> Self {
        Self {
            origin,
            documents,
            diagnostics,
            by_key: OnceLock::new(),
        }
    }

    /// Returns the same objects with another diagnostic in place of those of the reading: the
    /// objects stay in force, and the diagnostic says why.
    pub(crate) fn retained(&self, finding: Diagnostic) -> Self {
        Self::new(self.origin, self.documents.clone(), vec![finding])
    }

    /// True if the objects and diagnostics are the same.
    pub(crate) fn is_same(&self, other: &ReadContent) -> bool {
        let same = |(a, b): (&Arc<Document>, &Arc<Document>)| Arc::ptr_eq(a, b) || a == b;
        self.diagnostics == other.diagnostics
            && self.documents.len() == other.documents.len()
            && self.documents.iter().zip(&other.documents).all(same)
    }
}

impl PolicySource for ReadContent {
    fn origin(&self) -> PolicyOrigin {
        self.origin
    }
    fn documents(&self) -> Box<dyn Iterator<Item = &Arc<Document>> + '_> {
        Box::new(self.documents.iter())
    }
    fn find(&self, key: &ObjectKey) -> Option<&Arc<Document>> {
        let by_key = self.by_key.get_or_init(|| {
            let documents = self.documents.iter().enumerate();
            documents.map(|(at, it)| (it.object.key(), at)).collect()
        });
        by_key.get(key).map(|at| &self.documents[*at])
    }
    fn diagnostics(&self) -> Vec<Diagnostic> {
        self.diagnostics.clone()
    }
    fn is_read(&self) -> bool {
        !self
            .diagnostics
            .iter()
            .any(|d| d.severity == Severity::Error && d.object.is_none())
    }
}

/// The state of one tenant in a source that is read.
#[derive(Debug, Clone)]
pub enum SourceState {
    /// The objects and diagnostics that the source has of the tenant.
    Read(Arc<ReadContent>),
    /// The source does not contain the tenant any more, for example because its folder is missing.
    /// If it had no objects before, the tenant is removed. If it had objects, they stay in force,
    /// and `finding` reports that.
    Gone {
        origin: PolicyOrigin,
        finding: Diagnostic,
    },
}

impl SourceState {
    /// Returns the source that has this state.
    pub fn origin(&self) -> PolicyOrigin {
        match self {
            Self::Read(content) => content.origin,
            Self::Gone { origin, .. } => *origin,
        }
    }
}

/// The changed states of some tenants in one source.
#[derive(Debug)]
pub struct SourceUpdate {
    /// The source that was read.
    pub origin: PolicyOrigin,
    /// Tenants that changed, with their new states.
    pub tenants: Vec<(TenantName, SourceState)>,
    /// Diagnostics of the source itself, which belong to no tenant.
    pub findings: Vec<Diagnostic>,
}

impl SourceUpdate {
    /// Returns an update in which nothing changed.
    pub fn nothing(origin: PolicyOrigin) -> Self {
        Self {
            origin,
            tenants: Vec::new(),
            findings: Vec::new(),
        }
    }
}

/// Sources that cannot be read completely, for `canal status` and the metrics.
#[derive(Debug, Default)]
pub struct SourceHealth {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// Time since which something about a tenant cannot be read in a source.
    stale: HashMap<(TenantName, PolicyOrigin), Instant>,
    findings: BTreeMap<PolicyOrigin, Vec<Diagnostic>>,
}

impl SourceHealth {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every update leaves the maps consistent, so a panic elsewhere does not spoil them.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records what an update says about its source.
    pub fn record(&self, update: &SourceUpdate) {
        for finding in &update.findings {
            tracing::error!(source = update.origin.label(), %finding, "sources: a part of a source cannot be read; its last good state stays in force");
        }
        let mut inner = self.lock();
        inner
            .findings
            .insert(update.origin, update.findings.clone());
        for (tenant, state) in &update.tenants {
            let is_stale = match state {
                SourceState::Gone { .. } => true,
                SourceState::Read(content) => !content.is_read(),
            };
            let key = (tenant.clone(), update.origin);
            if is_stale {
                inner.stale.entry(key).or_insert_with(Instant::now);
            } else {
                inner.stale.remove(&key);
            }
        }
    }

    /// Returns for how long something about the tenant has not been readable; zero if everything
    /// is.
    pub fn stale(&self, tenant: &TenantName) -> Duration {
        let inner = self.lock();
        let of_tenant = inner.stale.iter().filter(|((name, _), _)| name == tenant);
        of_tenant
            .map(|(_, since)| since.elapsed())
            .max()
            .unwrap_or_default()
    }

    /// Returns the diagnostics of the sources themselves.
    pub fn findings(&self) -> Vec<Diagnostic> {
        self.lock().findings.values().flatten().cloned().collect()
    }
}

#[cfg(test)]
mod tests;
