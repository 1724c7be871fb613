//! Views of objects, of changes to them, and of the diagnostics about them; bodies of the requests
//! that write them.

use canal_wire::api;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Severity of a diagnostic: an error or a warning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SeverityView {
    Error,
    Warning,
}

/// A problem of an object and how to fix it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiagnosticView {
    pub severity: SeverityView,
    /// Stable code, e.g. `CANAL0102`; empty if the controller has none for it.
    pub code: String,
    /// File of the object; empty if it was applied.
    pub file: String,
    /// Position in the file, from 1; 0 if it is unknown.
    pub line: u32,
    pub column: u32,
    /// Kind, namespace and name, e.g. `HTTPRoute bookinfo/reviews`.
    pub object: String,
    /// Path of the field, e.g. `spec.rules[0].backendRefs[1].name`.
    pub field: String,
    pub problem: String,
    pub fix: String,
}

impl From<&api::Diagnostic> for DiagnosticView {
    fn from(diagnostic: &api::Diagnostic) -> Self {
        Self {
            severity: match diagnostic.severity() {
                api::Severity::Error => SeverityView::Error,
                api::Severity::Warning => SeverityView::Warning,
            },
            code: diagnostic.code.clone(),
            file: diagnostic.file.clone(),
            line: diagnostic.line,
            column: diagnostic.column,
            object: diagnostic.object.clone(),
            field: diagnostic.field.clone(),
            problem: diagnostic.problem.clone(),
            fix: diagnostic.fix.clone(),
        }
    }
}

/// Converts a list of messages to views.
pub(super) fn views<'a, M, V: From<&'a M>>(messages: &'a [M]) -> Vec<V> {
    messages.iter().map(V::from).collect()
}

/// Kind of a change to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKindView {
    Created,
    Changed,
    Unchanged,
    Deleted,
}

impl ChangeKindView {
    /// Returns the word that the view shows.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Changed => "changed",
            Self::Unchanged => "unchanged",
            Self::Deleted => "deleted",
        }
    }
}

impl From<api::change::ChangeKind> for ChangeKindView {
    fn from(kind: api::change::ChangeKind) -> Self {
        match kind {
            api::change::ChangeKind::Created => Self::Created,
            api::change::ChangeKind::Changed => Self::Changed,
            api::change::ChangeKind::Unchanged => Self::Unchanged,
            api::change::ChangeKind::Deleted => Self::Deleted,
        }
    }
}

/// A change to one object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChangeView {
    pub change: ChangeKindView,
    pub kind: String,
    pub namespace: String,
    pub name: String,
    /// Unified diff of the object's text. Only the response to a diff has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub diff: Option<String>,
}

impl ChangeView {
    fn without_diff(change: &api::Change) -> Self {
        Self {
            change: change.what().into(),
            kind: change.kind.clone(),
            namespace: change.namespace.clone(),
            name: change.name.clone(),
            diff: None,
        }
    }
}

/// Result of an apply or delete request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WriteResultView {
    /// If false, nothing was changed, and the diagnostics contain the reasons.
    pub accepted: bool,
    pub dry_run: bool,
    /// Generation of the configuration after the request.
    pub generation: u64,
    pub changes: Vec<ChangeView>,
    /// Number of further changes that do not fit into the response. They are applied like the
    /// others.
    pub changes_left_out: u64,
    pub diagnostics: Vec<DiagnosticView>,
}

impl WriteResultView {
    /// Creates the view of an apply request's result.
    pub fn of_apply(response: &api::ApplyResponse, dry_run: bool) -> Self {
        Self {
            accepted: response.accepted,
            dry_run,
            generation: response.generation,
            changes: response
                .changes
                .iter()
                .map(ChangeView::without_diff)
                .collect(),
            changes_left_out: response.changes_left_out,
            diagnostics: views(&response.diagnostics),
        }
    }
}

impl From<&api::DeleteResponse> for WriteResultView {
    fn from(response: &api::DeleteResponse) -> Self {
        Self {
            accepted: response.accepted,
            dry_run: false,
            generation: response.generation,
            changes: response
                .changes
                .iter()
                .map(ChangeView::without_diff)
                .collect(),
            changes_left_out: response.changes_left_out,
            diagnostics: views(&response.diagnostics),
        }
    }
}

/// The changes that an apply request would make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiffView {
    pub changes: Vec<ChangeView>,
    /// Number of further changes that do not fit into the response.
    pub changes_left_out: u64,
    pub diagnostics: Vec<DiagnosticView>,
}

impl From<&api::DiffResponse> for DiffView {
    fn from(response: &api::DiffResponse) -> Self {
        let change = |change: &api::Change| ChangeView {
            diff: Some(change.diff.clone()),
            ..ChangeView::without_diff(change)
        };
        Self {
            changes: response.changes.iter().map(change).collect(),
            changes_left_out: response.changes_left_out,
            diagnostics: views(&response.diagnostics),
        }
    }
}

/// An object with the compiler's diagnostics about it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ObjectView {
    #[serde(rename = "apiVersion")]
    pub object_api_version: String,
    pub kind: String,
    pub namespace: String,
    pub name: String,
    /// `api`, or the file from which the object was read.
    pub origin: String,
    /// The object itself, in JSON; its text if it cannot be converted.
    pub object: Value,
    pub diagnostics: Vec<DiagnosticView>,
}

impl From<&api::Object> for ObjectView {
    fn from(object: &api::Object) -> Self {
        Self {
            object_api_version: object.api_version.clone(),
            kind: object.kind.clone(),
            namespace: object.namespace.clone(),
            name: object.name.clone(),
            origin: object.origin.clone(),
            object: serde_saphyr::from_str(&object.yaml)
                .unwrap_or_else(|_| Value::from(object.yaml.as_str())),
            diagnostics: views(&object.diagnostics),
        }
    }
}

/// A tenant's objects, sorted by kind, namespace and name.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ObjectListView {
    pub objects: Vec<ObjectView>,
}

impl From<&api::GetResponse> for ObjectListView {
    fn from(response: &api::GetResponse) -> Self {
        Self {
            objects: views(&response.objects),
        }
    }
}

/// Body of an apply or diff request.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApplyBody {
    /// Tenant; the operator's own if it is empty.
    #[serde(default)]
    pub tenant: String,
    pub files: Vec<FileBody>,
    #[serde(default)]
    pub dry_run: bool,
}

/// A text with one or more YAML documents.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileBody {
    /// Name of the text in diagnostics.
    pub path: String,
    pub yaml: String,
}

impl From<ApplyBody> for api::ApplyRequest {
    fn from(body: ApplyBody) -> Self {
        let files = body
            .files
            .into_iter()
            .map(|file| api::File {
                path: file.path,
                yaml: file.yaml,
            })
            .collect();
        Self {
            tenant: body.tenant,
            files,
            dry_run: body.dry_run,
        }
    }
}

/// Body of a delete request.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeleteBody {
    /// Tenant; the operator's own if it is empty.
    #[serde(default)]
    pub tenant: String,
    #[serde(default)]
    pub objects: Vec<ObjectRefBody>,
    #[serde(default)]
    pub ignore_missing: bool,
    /// Deletes all applied objects of the tenant; `objects` is then empty. Only the provider may do
    /// this.
    #[serde(default)]
    pub all: bool,
}

/// The kind, namespace and name of an object.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectRefBody {
    pub kind: String,
    #[serde(default)]
    pub namespace: String,
    pub name: String,
}

impl From<DeleteBody> for api::DeleteRequest {
    fn from(body: DeleteBody) -> Self {
        let object = |of: ObjectRefBody| api::ObjectRef {
            kind: of.kind,
            namespace: of.namespace,
            name: of.name,
        };
        Self {
            tenant: body.tenant,
            objects: body.objects.into_iter().map(object).collect(),
            ignore_missing: body.ignore_missing,
            all: body.all,
        }
    }
}
