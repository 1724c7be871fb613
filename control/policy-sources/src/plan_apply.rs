//! Decides what an Apply, Diff or Delete request does to a tenant, and finds every reason to refuse
//! it. Pure: the catalog writer carries out the plan. Start at [`decide`].

use std::collections::{BTreeMap, BTreeSet};

use canal_model::diagnostic::{Diagnostic, Severity, SourceLocation};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{Namespace, ObjectName};
use canal_model::policy::{Document, ObjectKey, ObjectKind};
use canal_sources::parse;
use canal_store::{OBJECT_BYTES_MAX, ObjectEdit};
use canal_wire::api::{self, change::ChangeKind};

use crate::answer::ChangeList;
use crate::applied::AppliedObjects;
use crate::source::PolicySource;
use crate::tenant_sources::TenantSources;

/// A request to change one tenant's applied objects.
#[derive(Debug, Clone)]
pub enum WriteRequest {
    Apply(Vec<api::File>),
    /// The dry run of an Apply, for the texts of its changes.
    Diff(Vec<api::File>),
    Delete {
        objects: Vec<api::ObjectRef>,
        ignore_missing: bool,
    },
    /// Deletes every applied object, whether or not this build can read it.
    DeleteAll,
}

impl WriteRequest {
    /// Returns the bytes that the request occupies while it waits.
    pub fn bytes(&self) -> u64 {
        let bytes: usize = match self {
            Self::Apply(files) | Self::Diff(files) => {
                files.iter().map(|f| f.path.len() + f.yaml.len()).sum()
            }
            Self::Delete { objects, .. } => objects
                .iter()
                .map(|o| o.kind.len() + o.namespace.len() + o.name.len())
                .sum(),
            Self::DeleteAll => 0,
        };
        bytes as u64
    }
}

/// The changes that a write request would make. They are valid only if no diagnostic is an error,
/// and the compiler finds no error either.
#[derive(Debug)]
pub(crate) struct ApplyPlan {
    /// Sources of the tenant after the change.
    pub(crate) after: TenantSources,
    pub(crate) edits: Vec<ObjectEdit>,
    pub(crate) changes: ChangeList,
    pub(crate) diagnostics: Vec<Diagnostic>,
    /// Objects that the request names.
    pub(crate) named: BTreeSet<ObjectKey>,
    /// Bytes of the objects that were read, if they are more than the tenant may have. The rest was
    /// not read then, and nothing is planned.
    pub(crate) excess_bytes: Option<u64>,
}

/// Permissions of the operator who writes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WritePermission {
    /// Allows objects that decide about isolation.
    pub(crate) is_provider: bool,
    /// Maximum bytes of the tenant's objects.
    pub(crate) bytes_max: u64,
}

/// Plans a write request against the current sources of the tenant. `rows` are all of its rows in
/// the store, for [`WriteRequest::DeleteAll`].
pub(crate) fn decide(
    before: &TenantSources,
    request: &WriteRequest,
    rows: Vec<canal_store::StoredObjectKey>,
    may: WritePermission,
    now: u64,
) -> ApplyPlan {
    let is_provider = may.is_provider;
    let mut plan = ApplyPlan::nothing(before, matches!(request, WriteRequest::Diff(_)));
    match request {
        WriteRequest::Apply(files) | WriteRequest::Diff(files) => {
            // Nothing can be added to a tenant whose stored objects were not loaded.
            plan.diagnostics
                .extend(before.applied().set_aside_reason().cloned());
            plan.apply(before, files, may, now);
        }
        WriteRequest::Delete {
            objects,
            ignore_missing,
        } => plan.delete(before, objects, *ignore_missing, is_provider),
        WriteRequest::DeleteAll => plan.delete_all(rows, is_provider),
    }
    plan
}

impl ApplyPlan {
    /// Returns a plan that changes nothing because of `fault`.
    pub(crate) fn refused(before: &TenantSources, fault: Diagnostic) -> Self {
        Self {
            diagnostics: vec![fault],
            ..Self::nothing(before, false)
        }
    }

    fn nothing(before: &TenantSources, has_texts: bool) -> Self {
        Self {
            after: before.clone(),
            edits: Vec::new(),
            changes: ChangeList::new(has_texts),
            diagnostics: Vec::new(),
            named: BTreeSet::new(),
            excess_bytes: None,
        }
    }

    /// Plans an Apply: parses all files and collects all their errors, unless the objects turn out
    /// to be more than the tenant may have.
    fn apply(
        &mut self,
        before: &TenantSources,
        files: &[api::File],
        may: WritePermission,
        now: u64,
    ) {
        let mut documents: BTreeMap<ObjectKey, Document> = BTreeMap::new();
        let mut bytes = 0;
        for file in files {
            let parsed = parse(&file.path, &file.yaml);
            self.diagnostics.extend(parsed.diagnostics);
            for document in parsed.documents {
                let key = document.object.key();
                // The same object twice refuses the request, so that neither text wins silently.
                if let Some(first) = documents.get(&key) {
                    let problem = format!("the object is also in {}", first.origin);
                    self.refuse(
                        Some(document.origin),
                        Some(key),
                        problem,
                        "keep one of them",
                    );
                    continue;
                }
                bytes += document.text.len() as u64;
                documents.insert(key, document);
            }
            // An object takes many times its text, so the rest of a request that will be refused is
            // not read.
            if bytes > may.bytes_max {
                self.excess_bytes = Some(bytes);
                return;
            }
        }
        // A file that could not be parsed has diagnostics, which say more.
        if documents.is_empty() && self.diagnostics.is_empty() {
            self.refuse(
                None,
                None,
                "there is no object in the request".into(),
                "send at least one YAML document",
            );
        }
        for (key, document) in documents {
            self.named.insert(key.clone());
            self.may_touch(before, &key, Some(&document.origin), may.is_provider);
            if document.text.len() > OBJECT_BYTES_MAX {
                let problem = format!(
                    "the object has {} bytes; at most {OBJECT_BYTES_MAX} are allowed",
                    document.text.len()
                );
                self.refuse(
                    Some(document.origin.clone()),
                    Some(key.clone()),
                    problem,
                    "split it",
                );
            }
            // Also after a refusal, so that the compiler's errors are reported with the others.
            self.put(before, key, document, now);
        }
    }

    /// Plans to create or change one object.
    fn put(&mut self, before: &TenantSources, key: ObjectKey, document: Document, now: u64) {
        let old = before.applied().find(&key);
        let what = match old {
            None => ChangeKind::Created,
            Some(old) if old.text == document.text => ChangeKind::Unchanged,
            Some(_) => ChangeKind::Changed,
        };
        let old_text = old.map_or("", |old| old.shown_text());
        self.changes
            .add(what, &key, old_text, document.shown_text());
        if what == ChangeKind::Unchanged {
            return;
        }
        // A changed object keeps its creation time, which decides conflicts between objects.
        let created = old
            .and_then(|old| old.object.metadata().creation_timestamp)
            .map_or(now, |t| t.0);
        let row = row_key(before, &key);
        self.after.applied_mut().forget_unreadable(&row);
        self.edits.push(ObjectEdit::Put {
            key: row,
            yaml: document.text.to_string(),
        });
        self.after.applied_mut().put(document, created);
    }

    /// Plans to delete the named objects.
    fn delete(
        &mut self,
        before: &TenantSources,
        objects: &[api::ObjectRef],
        ignore_missing: bool,
        is_provider: bool,
    ) {
        // An empty list is more likely a mistake than an order to do nothing.
        if objects.is_empty() {
            self.refuse(
                None,
                None,
                "the request names no object".into(),
                "name kind, namespace and name",
            );
        }
        for object in objects {
            let key = match read_key(object) {
                Ok(key) => key,
                Err(problem) => {
                    self.refuse(
                        None,
                        None,
                        problem,
                        "write kind, namespace and name as `canal get` shows them",
                    );
                    continue;
                }
            };
            // An object that is named twice is deleted once.
            if !self.named.insert(key.clone()) {
                continue;
            }
            self.may_touch(before, &key, None, is_provider);
            let row = row_key(before, &key);
            let unreadable = self.after.applied_mut().forget_unreadable(&row);
            match self.after.applied_mut().remove(&key) {
                Some(old) => {
                    self.changes.add(ChangeKind::Deleted, &key, &old.text, "");
                    self.edits.push(ObjectEdit::Delete { key: row });
                }
                // An object that this build cannot read can still be deleted.
                None if unreadable => {
                    self.changes.add(ChangeKind::Deleted, &key, "", "");
                    self.edits.push(ObjectEdit::Delete { key: row });
                }
                // An object that comes from a file already has an error from `may_touch`.
                None if ignore_missing || before.preferred_to_applied(&key).is_some() => {}
                None => self.refuse(
                    None,
                    Some(key),
                    "there is no such object".into(),
                    "name an object that `canal get` shows",
                ),
            }
        }
    }

    fn delete_all(&mut self, rows: Vec<canal_store::StoredObjectKey>, is_provider: bool) {
        if !is_provider {
            let problem = "only the provider deletes all objects of a tenant at once".into();
            return self.refuse(
                None,
                None,
                problem,
                "name the objects, or contact the provider of the mesh",
            );
        }
        self.after.set_applied(AppliedObjects::default());
        for key in rows {
            let (kind, namespace, name) =
                (key.kind.clone(), key.namespace.clone(), key.name.clone());
            self.changes.push(api::Change {
                what: ChangeKind::Deleted.into(),
                kind,
                namespace,
                name,
                diff: String::new(),
            });
            self.edits.push(ObjectEdit::Delete { key });
        }
    }

    /// Adds an error for each rule that forbids the operator to change the object.
    fn may_touch(
        &mut self,
        before: &TenantSources,
        key: &ObjectKey,
        origin: Option<&SourceLocation>,
        is_provider: bool,
    ) {
        if key.kind.is_providers() && !is_provider {
            let problem = format!(
                "a {} affects the isolation of tenants, so only the provider may write it",
                key.kind
            );
            self.refuse(
                origin.cloned(),
                Some(key.clone()),
                problem,
                "contact the provider of the mesh",
            );
        }
        if let Some(preferred) = before.preferred_to_applied(key) {
            let problem = format!(
                "the object comes from the file {} of the controller",
                preferred.location()
            );
            self.refuse(
                origin.cloned(),
                Some(key.clone()),
                problem,
                "change it there, or remove it from the file first",
            );
        }
    }

    fn refuse(
        &mut self,
        origin: Option<SourceLocation>,
        object: Option<ObjectKey>,
        problem: String,
        fix: &str,
    ) {
        let field = String::new();
        self.diagnostics.push(Diagnostic {
            severity: Severity::Error,
            code: Code::WriteRefused,
            origin,
            object,
            field,
            problem,
            fix: fix.into(),
        });
    }

    /// Adds the compiler's diagnostics of the tenant after the change: all of them for the named
    /// objects, and for other objects only new errors. An apply must not break other objects. A
    /// delete may, because what remains fails closed.
    pub(crate) fn add_findings(&mut self, was: &[Diagnostic], is: &[Diagnostic], is_delete: bool) {
        let known: BTreeSet<_> = was.iter().map(essence).collect();
        let reported: BTreeSet<_> = self
            .diagnostics
            .iter()
            .map(|d| (d.object.clone(), d.field.clone()))
            .collect();
        for d in is {
            let is_named = d.object.as_ref().is_some_and(|o| self.named.contains(o));
            let is_new_error = d.severity == Severity::Error && !known.contains(&essence(d));
            let is_reported = reported.contains(&(d.object.clone(), d.field.clone()));
            if (is_named || is_new_error) && !is_reported {
                let mut d = d.clone();
                // Errors do not prevent a delete.
                if is_delete {
                    d.severity = Severity::Warning;
                }
                self.diagnostics.push(d);
            }
        }
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.diagnostics
            .iter()
            .any(|d| d.severity == Severity::Error)
    }
}

/// Identifies a diagnostic without its position: moved lines do not make it a new one.
fn essence(d: &Diagnostic) -> (Option<ObjectKey>, String, String) {
    (d.object.clone(), d.field.clone(), d.problem.clone())
}

fn row_key(tenant: &TenantSources, key: &ObjectKey) -> canal_store::StoredObjectKey {
    canal_store::StoredObjectKey {
        tenant: tenant.name.clone(),
        kind: key.kind.as_str().into(),
        namespace: key.namespace.to_string(),
        name: key.name.to_string(),
    }
}

fn read_key(object: &api::ObjectRef) -> Result<ObjectKey, String> {
    let kind = ObjectKind::from_word(&object.kind)
        .ok_or_else(|| format!("the kind {:?} is unknown", object.kind))?;
    let namespace = if object.namespace.is_empty() {
        "default"
    } else {
        object.namespace.as_str()
    };
    let namespace = Namespace::new(namespace).map_err(|e| e.to_string())?;
    Ok(ObjectKey {
        kind,
        namespace,
        name: ObjectName::new(&object.name).map_err(|e| e.to_string())?,
    })
}
