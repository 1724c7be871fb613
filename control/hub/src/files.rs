//! The tenants' directories as the writer takes them. Reading and watching is `canal-sources`'; here a folder that vanished is told
//! apart from one that was emptied, and what was read reaches the writer.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::ids::TenantName;
use canal_sources::{Scan, TenantFiles, Watch};

use crate::shared::Shared;
use crate::tenant::Files;

/// What was found in one tenant's directory.
#[derive(Debug, Clone)]
pub(crate) enum Found {
    Read(Arc<Files>),
    /// The directory is not there.
    Gone,
}

/// What was found in some tenants' directories.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    pub(crate) tenants: Vec<(TenantName, Found)>,
    /// What is wrong with the configuration directory itself.
    pub(crate) findings: Vec<Diagnostic>,
}

impl Reading {
    pub(crate) fn of(scan: Scan, root: &Path) -> Self {
        let found = |files: TenantFiles| {
            let says_nothing = files.documents.is_empty() && files.diagnostics.is_empty();
            let found = if says_nothing && !root.join(files.tenant.as_str()).is_dir() {
                Found::Gone
            } else {
                Found::Read(Arc::new(Files::new(files.documents, files.diagnostics)))
            };
            (files.tenant, found)
        };
        Self { tenants: scan.changed.into_iter().map(found).collect(), findings: scan.diagnostics }
    }
}

/// True where something in the files could not be read at all, so that what it says is not known.
pub(crate) fn is_unread(diagnostics: &[Diagnostic]) -> bool {
    diagnostics.iter().any(|d| d.severity == Severity::Error && d.object.is_none())
}

/// Hands every change to the writer.
pub(crate) async fn follow(mut watch: Watch, root: PathBuf, shared: Arc<Shared>) {
    while let Some(scan) = watch.next().await {
        let reading = Reading::of(scan, &root);
        shared.note_findings(&reading);
        shared.changes.take_reading(reading);
    }
    tracing::error!("the configuration directory is no longer watched; restart the controller to take up changes to files");
    shared.refuse("watch_ended");
}

impl Shared {
    /// Keeps what is wrong with the sources for `canal status` and the metrics.
    pub(crate) fn note_findings(&self, reading: &Reading) {
        for finding in &reading.findings {
            tracing::error!(%finding, "the configuration directory");
        }
        let mut sources = self.sources.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        sources.findings.clone_from(&reading.findings);
        for (tenant, found) in &reading.tenants {
            let is_stale = match found {
                Found::Gone => true,
                Found::Read(files) => is_unread(&files.diagnostics),
            };
            if is_stale {
                sources.stale.entry(tenant.clone()).or_insert_with(Instant::now);
            } else {
                sources.stale.remove(tenant);
            }
        }
    }
}
