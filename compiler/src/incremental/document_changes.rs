//! Finds the documents in which two inputs of one tenant differ. It does not know what documents
//! mean. Start at [`DocumentChanges::between`].

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use canal_model::policy::{Document, ObjectKey};

/// Maximum number of documents that are compared by content. A larger change is one of the whole
/// tenant.
const COMPARED_DOCUMENTS_MAX: usize = 1024;

/// The differences between two lists of documents.
pub(super) struct DocumentChanges {
    /// Documents of which the content differs, by the key of the object.
    pub(super) changed: BTreeMap<ObjectKey, DocumentChange>,
    /// Indexes of the old documents behind the common begin and before the common end of both lists.
    old: Range<usize>,
    /// Indexes of the new documents there.
    new: Range<usize>,
}

/// One object before and after a change; `None` where it does not exist.
#[derive(Default)]
pub(super) struct DocumentChange {
    pub(super) before: Option<Arc<Document>>,
    pub(super) after: Option<Arc<Document>>,
}

impl DocumentChanges {
    /// Compares two lists. A document that is the same allocation in both did not change. Returns
    /// `None` if too much differs, or if two documents have one key.
    pub(super) fn between(old: &[Arc<Document>], new: &[Arc<Document>]) -> Option<Self> {
        let is_same = |(a, b): &(&Arc<Document>, &Arc<Document>)| Arc::ptr_eq(a, b);
        let begin = old.iter().zip(new).take_while(is_same).count();
        let rest = old[begin..].iter().rev().zip(new[begin..].iter().rev());
        let end = rest.take_while(is_same).count();
        let (old_range, new_range) = (begin..old.len() - end, begin..new.len() - end);
        let mut gone: HashSet<*const Document> =
            old[old_range.clone()].iter().map(Arc::as_ptr).collect();
        let added = new[new_range.clone()].iter();
        let added: Vec<_> = added.filter(|it| !gone.remove(&Arc::as_ptr(it))).collect();
        if gone.len().max(added.len()) > COMPARED_DOCUMENTS_MAX {
            return None;
        }
        let removed = old[old_range.clone()].iter();
        let removed = removed.filter(|it| gone.contains(&Arc::as_ptr(it)));
        let mut changed: BTreeMap<ObjectKey, DocumentChange> = BTreeMap::new();
        for document in removed {
            let change = changed.entry(document.object.key()).or_default();
            if change.before.replace(document.clone()).is_some() {
                return None;
            }
        }
        for document in added {
            let change = changed.entry(document.object.key()).or_default();
            if change.after.replace(document.clone()).is_some() {
                return None;
            }
        }
        // A source that reads a file again makes new documents of all objects in it.
        changed.retain(|_, change| change.before != change.after);
        Some(Self {
            changed,
            old: old_range,
            new: new_range,
        })
    }

    /// Makes the old list equal to the new one.
    pub(super) fn apply(&self, old: &mut Vec<Arc<Document>>, new: &[Arc<Document>]) {
        old.splice(self.old.clone(), new[self.new.clone()].iter().cloned());
    }
}
