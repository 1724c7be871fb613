//! The source "API": the objects that operators applied, as the store has them. `plan_apply`
//! decides how a request changes them. Start at [`AppliedObjects`].

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_catalog::PolicyOrigin;
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::policy::{Document, Metadata, Object, ObjectKey, Timestamp};
use canal_sources::parse;
use canal_store::{ObjectMove, StoredObject, StoredObjectKey};

use crate::source::PolicySource;

/// The applied objects of one tenant.
#[derive(Debug, Clone, Default)]
pub struct AppliedObjects {
    objects: BTreeMap<ObjectKey, Arc<Document>>,
    /// Rows of the store that this build cannot read, or not completely, with the reason.
    unreadable: BTreeMap<StoredObjectKey, Diagnostic>,
    /// Set if the objects were not loaded at this start, because they have more bytes than the
    /// tenant's share.
    set_aside: Option<Diagnostic>,
}

impl AppliedObjects {
    /// Returns objects that were not loaded because of `excess`.
    pub fn set_aside(excess: Diagnostic) -> Self {
        Self {
            set_aside: Some(excess),
            ..Self::default()
        }
    }

    /// Returns the reason why the objects were not loaded, if they were not.
    pub fn set_aside_reason(&self) -> Option<&Diagnostic> {
        self.set_aside.as_ref()
    }

    /// True if this build cannot read some of the stored objects, or not completely.
    pub fn has_unreadable(&self) -> bool {
        !self.unreadable.is_empty()
    }

    /// Adds an object of the store. One that this build cannot read gets a diagnostic, and can
    /// still be deleted. Returns the move of a row whose object's kind has a new name.
    pub fn load(&mut self, object: StoredObject) -> Option<ObjectMove> {
        let StoredObject {
            key, yaml, created, ..
        } = object;
        let parsed = parse("api", &yaml);
        let fault = parsed
            .diagnostics
            .into_iter()
            .find(|d| d.severity == Severity::Error);
        match parsed.documents.into_iter().next() {
            Some(document) => {
                let to = StoredObjectKey {
                    kind: document.object.kind().as_str().to_owned(),
                    ..key.clone()
                };
                let yaml = document.text.to_string();
                self.put(document, created);
                self.unreadable.extend(fault.map(|f| (to.clone(), f)));
                (to.kind != key.kind).then_some(ObjectMove {
                    from: key,
                    to,
                    yaml,
                })
            }
            None => {
                let problem = format!(
                    "the applied object {key} cannot be read by this build, so it is not in force"
                );
                let fix = "apply it again in a form that this build reads, or delete it".into();
                let finding = Diagnostic {
                    severity: Severity::Error,
                    origin: None,
                    object: None,
                    field: String::new(),
                    problem,
                    fix,
                };
                self.unreadable.insert(key, finding);
                None
            }
        }
    }

    /// Adds or replaces an object. Without a time of creation it gets that of its first apply, so
    /// that a conflict has an oldest object.
    pub(crate) fn put(&mut self, mut document: Document, created: u64) {
        metadata_mut(&mut document.object)
            .creation_timestamp
            .get_or_insert(Timestamp(created));
        self.objects
            .insert(document.object.key(), Arc::new(document));
    }

    /// Removes an object, and returns it.
    pub(crate) fn remove(&mut self, key: &ObjectKey) -> Option<Arc<Document>> {
        self.objects.remove(key)
    }

    /// Removes the diagnostic of a row that this build could not read. Returns false if there was
    /// none.
    pub(crate) fn forget_unreadable(&mut self, row: &StoredObjectKey) -> bool {
        self.unreadable.remove(row).is_some()
    }
}

impl PolicySource for AppliedObjects {
    fn origin(&self) -> PolicyOrigin {
        PolicyOrigin::Api
    }
    fn documents(&self) -> Box<dyn Iterator<Item = &Arc<Document>> + '_> {
        Box::new(self.objects.values())
    }
    fn find(&self, key: &ObjectKey) -> Option<&Arc<Document>> {
        self.objects.get(key)
    }
    fn diagnostics(&self) -> Vec<Diagnostic> {
        self.set_aside
            .iter()
            .chain(self.unreadable.values())
            .cloned()
            .collect()
    }
    fn is_read(&self) -> bool {
        self.set_aside.is_none()
    }
}

fn metadata_mut(object: &mut Object) -> &mut Metadata {
    match object {
        Object::Pod(o) => &mut o.metadata,
        Object::Service(o) => &mut o.metadata,
        Object::EndpointSlice(o) => &mut o.metadata,
        Object::Endpoints(o) => &mut o.metadata,
        Object::Namespace(o) => &mut o.metadata,
        Object::ServiceAccount(o) => &mut o.metadata,
        Object::HttpRoute(o) => &mut o.metadata,
        Object::UdpRoute(o) => &mut o.metadata,
        Object::ReferenceGrant(o) => &mut o.metadata,
        Object::VirtualService(o) => &mut o.metadata,
        Object::DestinationRule(o) => &mut o.metadata,
        Object::Tenant(o) => &mut o.metadata,
        Object::GatewayReplica(o) => &mut o.metadata,
        Object::GatewayClass(o) => &mut o.metadata,
        Object::Gateway(o) => &mut o.metadata,
        Object::ListenerSet(o) => &mut o.metadata,
        Object::Node(o) => &mut o.metadata,
        Object::Throttle(o) => &mut o.metadata,
        Object::AuthorizationPolicy(o) => &mut o.metadata,
        Object::RequestAuthentication(o) => &mut o.metadata,
        Object::PeerAuthentication(o) => &mut o.metadata,
        Object::ExternalAuthorizer(o) => &mut o.metadata,
        Object::Federation(o) => &mut o.metadata,
        Object::KeyServer(o) => &mut o.metadata,
        Object::Termination(o) => &mut o.metadata,
    }
}
