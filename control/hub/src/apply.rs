//! Decides what an Apply, Diff or Delete would do to a tenant, and every reason why it may not. Pure: the writer carries it out.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::diagnostic::{Diagnostic, Origin, Severity};
use canal_model::ids::{Namespace, ObjectName};
use canal_model::policy::{Document, ObjectKey, ObjectKind};
use canal_sources::parse;
use canal_store::{Edit, OBJECT_BYTES_MAX};
use canal_wire::api::{self, change::What};
use similar::TextDiff;

use crate::tenant::{Applied, TenantSources};

/// What the writer is asked to do with one tenant's objects.
#[derive(Debug, Clone)]
pub(crate) enum Wish {
    Apply(Vec<api::File>),
    Delete {
        objects: Vec<api::ObjectRef>,
        ignore_missing: bool,
    },
    /// Every applied object, read or not.
    DeleteAll,
}

impl Wish {
    /// Bytes that it holds while it waits.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes: usize = match self {
            Self::Apply(files) => files.iter().map(|f| f.path.len() + f.yaml.len()).sum(),
            Self::Delete { objects, .. } => objects.iter().map(|o| o.kind.len() + o.namespace.len() + o.name.len()).sum(),
            Self::DeleteAll => 0,
        };
        bytes as u64
    }
}

/// What would be done. It holds only if no diagnostic is an error and the compiler finds none either.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The tenant afterwards.
    pub(crate) after: TenantSources,
    pub(crate) edits: Vec<Edit>,
    pub(crate) changes: Vec<api::Change>,
    pub(crate) diagnostics: Vec<Diagnostic>,
    /// The objects the wish names.
    pub(crate) named: BTreeSet<ObjectKey>,
}

/// Reads a wish against the tenant as it is. `rows`: all that the store has of it, for [`Wish::DeleteAll`]. `is_provider`: the caller may
/// write what decides about isolation.
pub(crate) fn decide(before: &TenantSources, wish: Wish, rows: Vec<canal_store::ObjectKey>, is_provider: bool, now: u64) -> Plan {
    let mut plan = Plan { after: before.clone(), edits: Vec::new(), changes: Vec::new(), diagnostics: Vec::new(), named: BTreeSet::new() };
    match wish {
        Wish::Apply(files) => {
            plan.diagnostics.extend(before.set_aside.clone());
            plan.apply(before, &files, is_provider, now);
        }
        Wish::Delete { objects, ignore_missing } => plan.delete(before, &objects, ignore_missing, is_provider),
        Wish::DeleteAll => plan.delete_all(rows, is_provider),
    }
    plan
}

impl Plan {
    /// A plan that changes nothing, because of `fault`.
    pub(crate) fn refused(before: &TenantSources, fault: Diagnostic) -> Self {
        Self { after: before.clone(), edits: Vec::new(), changes: Vec::new(), diagnostics: vec![fault], named: BTreeSet::new() }
    }

    fn apply(&mut self, before: &TenantSources, files: &[api::File], is_provider: bool, now: u64) {
        let mut documents: BTreeMap<ObjectKey, Document> = BTreeMap::new();
        for file in files {
            let parsed = parse(&file.path, &file.yaml);
            self.diagnostics.extend(parsed.diagnostics);
            for document in parsed.documents {
                let key = document.object.key();
                if let Some(first) = documents.get(&key) {
                    let problem = format!("the object stands in {} too", first.origin);
                    self.refuse(Some(document.origin), Some(key), problem, "keep one of them");
                    continue;
                }
                documents.insert(key, document);
            }
        }
        if documents.is_empty() && self.diagnostics.is_empty() {
            self.refuse(None, None, "there is no object in the request".into(), "send at least one YAML document");
        }
        for (key, document) in documents {
            self.named.insert(key.clone());
            self.may_touch(before, &key, Some(&document.origin), is_provider);
            if document.text.len() > OBJECT_BYTES_MAX {
                let problem = format!("the object has {} bytes and may have {OBJECT_BYTES_MAX}", document.text.len());
                self.refuse(Some(document.origin.clone()), Some(key.clone()), problem, "split it");
            }
            self.put(before, key, document, now);
        }
    }

    fn put(&mut self, before: &TenantSources, key: ObjectKey, document: Document, now: u64) {
        let old = before.applied.get(&key);
        let what = match old {
            None => What::Created,
            Some(a) if a.document.text == document.text => What::Unchanged,
            Some(_) => What::Changed,
        };
        let old_text = old.map_or("", |a| &a.document.text);
        self.changes.push(change(what, &key, old_text, &document.text));
        if what == What::Unchanged {
            return;
        }
        let created = old.and_then(|a| a.document.object.metadata().creation_timestamp).map_or(now, |t| t.0);
        let row = row_key(before, &key);
        self.after.unreadable.remove(&row);
        self.edits.push(Edit::Put { key: row, yaml: document.text.to_string() });
        self.after.applied.insert(key, Applied::new(document, created));
    }

    fn delete(&mut self, before: &TenantSources, objects: &[api::ObjectRef], ignore_missing: bool, is_provider: bool) {
        if objects.is_empty() {
            self.refuse(None, None, "the request names no object".into(), "name kind, namespace and name");
        }
        for object in objects {
            let key = match read_key(object) {
                Ok(key) => key,
                Err(problem) => {
                    self.refuse(None, None, problem, "write kind, namespace and name as `canal get` shows them");
                    continue;
                }
            };
            if !self.named.insert(key.clone()) {
                continue;
            }
            self.may_touch(before, &key, None, is_provider);
            let row = row_key(before, &key);
            let unreadable = self.after.unreadable.remove(&row).is_some();
            match self.after.applied.remove(&key) {
                Some(old) => {
                    self.changes.push(change(What::Deleted, &key, &old.document.text, ""));
                    self.edits.push(Edit::Delete { key: row });
                }
                None if unreadable => {
                    self.changes.push(change(What::Deleted, &key, "", ""));
                    self.edits.push(Edit::Delete { key: row });
                }
                None if ignore_missing || before.file_of(&key).is_some() => {}
                None => self.refuse(None, Some(key), "there is no such object".into(), "name an object that `canal get` shows"),
            }
        }
    }

    fn delete_all(&mut self, rows: Vec<canal_store::ObjectKey>, is_provider: bool) {
        if !is_provider {
            let problem = "only the provider deletes all objects of a tenant at once".into();
            return self.refuse(None, None, problem, "name the objects, or ask the provider of the mesh");
        }
        self.after.applied.clear();
        self.after.unreadable.clear();
        self.after.set_aside = None;
        for key in rows {
            let (kind, namespace, name) = (key.kind.clone(), key.namespace.clone(), key.name.clone());
            self.changes.push(api::Change { what: What::Deleted.into(), kind, namespace, name, diff: String::new() });
            self.edits.push(Edit::Delete { key });
        }
    }

    fn may_touch(&mut self, before: &TenantSources, key: &ObjectKey, origin: Option<&Origin>, is_provider: bool) {
        if key.kind.is_providers() && !is_provider {
            let problem = format!("a {} decides about isolation, so only the provider writes it", key.kind);
            self.refuse(origin.cloned(), Some(key.clone()), problem, "ask the provider of the mesh");
        }
        if let Some(file) = before.file_of(key) {
            let problem = format!("the object comes from the file {file} of the controller");
            self.refuse(origin.cloned(), Some(key.clone()), problem, "change it there, or take it out of the file first");
        }
    }

    fn refuse(&mut self, origin: Option<Origin>, object: Option<ObjectKey>, problem: String, mend: &str) {
        let field = String::new();
        self.diagnostics.push(Diagnostic { severity: Severity::Error, origin, object, field, problem, mend: mend.into() });
    }

    /// Adds what the compiler says of the tenant afterwards: all of it on the objects named, and errors elsewhere that were not there
    /// before. An apply may not break others; an object that is to go may, since what is left of it fails closed.
    pub(crate) fn judge(&mut self, was: &[Diagnostic], is: &[Diagnostic], is_delete: bool) {
        let known: BTreeSet<_> = was.iter().map(essence).collect();
        let said: BTreeSet<_> = self.diagnostics.iter().map(|d| (d.object.clone(), d.field.clone())).collect();
        for d in is {
            let is_named = d.object.as_ref().is_some_and(|o| self.named.contains(o));
            let is_new_error = d.severity == Severity::Error && !known.contains(&essence(d));
            let is_said = said.contains(&(d.object.clone(), d.field.clone()));
            if (is_named || is_new_error) && !is_said {
                let mut d = d.clone();
                if is_delete {
                    d.severity = Severity::Warning;
                }
                self.diagnostics.push(d);
            }
        }
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.diagnostics.iter().any(|d| d.severity == Severity::Error)
    }
}

/// A finding without its place: moving lines does not make it a new one.
fn essence(d: &Diagnostic) -> (Option<ObjectKey>, String, String) {
    (d.object.clone(), d.field.clone(), d.problem.clone())
}

fn row_key(tenant: &TenantSources, key: &ObjectKey) -> canal_store::ObjectKey {
    canal_store::ObjectKey {
        tenant: tenant.name.clone(),
        kind: key.kind.as_str().into(),
        namespace: key.namespace.to_string(),
        name: key.name.to_string(),
    }
}

fn read_key(object: &api::ObjectRef) -> Result<ObjectKey, String> {
    let kind = ObjectKind::from_word(&object.kind).ok_or_else(|| format!("the kind {:?} is not known", object.kind))?;
    let namespace = if object.namespace.is_empty() { "default" } else { object.namespace.as_str() };
    let namespace = Namespace::new(namespace).map_err(|e| e.to_string())?;
    Ok(ObjectKey { kind, namespace, name: ObjectName::new(&object.name).map_err(|e| e.to_string())? })
}

fn change(what: What, key: &ObjectKey, old: &str, new: &str) -> api::Change {
    let diff = if what == What::Unchanged {
        String::new()
    } else {
        TextDiff::from_lines(old, new).unified_diff().header(&format!("{key} (now)"), &format!("{key} (then)")).to_string()
    };
    api::Change { what: what.into(), kind: key.kind.to_string(), namespace: key.namespace.to_string(), name: key.name.to_string(), diff }
}
