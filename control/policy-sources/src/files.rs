//! The source "files": converts what `canal-sources` reads in the tenants' folders, and passes it
//! to the change queue. It distinguishes a folder that vanished from one that was emptied. Start at
//! [`follow`].

use std::path::{Path, PathBuf};
use std::sync::Arc;

use canal_catalog::PolicyOrigin;
use canal_controller_metrics::ControllerMetrics;
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::TenantName;
use canal_sources::{DirectoryWatch, ScanResult, TenantFiles};

use crate::changes::PendingChanges;
use crate::source::{ReadContent, SourceHealth, SourceState, SourceUpdate};

/// Converts the result of a scan of the directory `root`.
pub fn update_of(scan: ScanResult, root: &Path) -> SourceUpdate {
    let state_of = |files: TenantFiles| {
        let is_empty = files.documents.is_empty() && files.diagnostics.is_empty();
        // A vanished directory has no documents either, but means something else than an empty one.
        let state = if is_empty && !root.join(files.tenant.as_str()).is_dir() {
            SourceState::Gone {
                origin: PolicyOrigin::Files,
                finding: vanished(&files.tenant),
            }
        } else {
            SourceState::Read(Arc::new(ReadContent::new(
                PolicyOrigin::Files,
                files.documents,
                files.diagnostics,
            )))
        };
        (files.tenant, state)
    };
    SourceUpdate {
        origin: PolicyOrigin::Files,
        tenants: scan.changed.into_iter().map(state_of).collect(),
        findings: scan.diagnostics,
    }
}

/// Returns the diagnostic of a tenant whose folder vanished although it had objects.
pub(crate) fn vanished(tenant: &TenantName) -> Diagnostic {
    Diagnostic {
        severity: Severity::Error,
        code: Code::StaleObjects,
        origin: None,
        object: None,
        field: String::new(),
        problem: format!("the folder of tenant {tenant} has vanished; its content stays in force"),
        fix: "restore it, or create an empty folder to remove the objects".into(),
    }
}

/// Passes every change of the directories to the change queue.
pub async fn follow(
    mut watch: DirectoryWatch,
    root: PathBuf,
    changes: Arc<PendingChanges>,
    health: Arc<SourceHealth>,
    metrics: Arc<ControllerMetrics>,
) {
    while let Some(scan) = watch.next().await {
        let update = update_of(scan, &root);
        health.record(&update);
        changes.apply_update(update);
    }
    tracing::error!(
        "sources: the configuration directory is no longer watched, so changes to files are not applied; fix: restart the controller"
    );
    metrics.refuse("watch_ended");
}
