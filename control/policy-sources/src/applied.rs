//! The source "API": the objects that operators applied, as the store has them. `plan_apply`
//! decides how a request changes them. Start at [`AppliedObjects`].

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_catalog::PolicyOrigin;
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::Generation;
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
    /// Objects whose row has the old name of their kind, by the key to which the row moves, each
    /// with its generation.
    renamed: BTreeMap<StoredObjectKey, (Generation, ObjectKey)>,
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
    /// still be deleted. Returns the move of a row whose object's kind has a new name. Such a row
    /// must be loaded before one that is at the new key already; of the two, that with the later
    /// generation counts, as it does for [`canal_store::Store::move_objects`].
    pub fn load(&mut self, object: StoredObject) -> Option<ObjectMove> {
        let StoredObject {
            key,
            yaml,
            created,
            generation,
        } = object;
        if let Some((moved, object)) = self.renamed.remove(&key) {
            if moved > generation {
                return None;
            }
            // The row at the new key is newer, so it replaces the one that moved there.
            self.objects.remove(&object);
            self.unreadable.remove(&key);
        }
        let parsed = parse("api", &yaml);
        let fault = parsed
            .diagnostics
            .into_iter()
            .find(|d| d.severity == Severity::Error);
        // A row holds one object.
        match parsed.documents.into_iter().next() {
            Some(document) => {
                let to = StoredObjectKey {
                    kind: document.object.kind().as_str().to_owned(),
                    ..key.clone()
                };
                let yaml = document.text.to_string();
                let object = document.object.key();
                self.put(document, created);
                self.unreadable.extend(fault.map(|f| (to.clone(), f)));
                // The kind has kept its name, so the row stays at its key.
                if to.kind == key.kind {
                    return None;
                }
                self.renamed.insert(to.clone(), (generation, object));
                Some(ObjectMove {
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
                    code: Code::StaleObjects,
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
        Object::Secret(o) => &mut o.metadata,
        Object::ConfigMap(o) => &mut o.metadata,
        Object::ClusterTrustBundle(o) => &mut o.metadata,
        Object::HttpRoute(o) => &mut o.metadata,
        Object::GrpcRoute(o) => &mut o.metadata,
        Object::UdpRoute(o) => &mut o.metadata,
        Object::TlsRoute(o) => &mut o.metadata,
        Object::TcpRoute(o) => &mut o.metadata,
        Object::ReferenceGrant(o) => &mut o.metadata,
        Object::IstioGateway(o) => &mut o.metadata,
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
        Object::OffloadPreference(o) => &mut o.metadata,
        Object::TrafficPriority(o) => &mut o.metadata,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(kind: &str, addresses: &str, generation: u64) -> StoredObject {
        StoredObject {
            key: StoredObjectKey {
                tenant: "alpha".parse().unwrap(),
                kind: kind.to_owned(),
                namespace: "default".to_owned(),
                name: "gw".to_owned(),
            },
            yaml: format!(
                "apiVersion: canal.mesh/v1\nkind: {kind}\nmetadata: {{name: gw}}\nspec: {{az: az1, addresses: [{addresses}]}}\n"
            ),
            created: 100,
            generation: Generation(generation),
        }
    }

    #[test]
    fn of_two_rows_of_one_object_the_later_counts() {
        for (old, new, expected) in [(1, 2, "10.0.0.2"), (2, 1, "10.0.0.1"), (1, 1, "10.0.0.2")] {
            let mut applied = AppliedObjects::default();
            assert!(applied.load(row("Gateway", "10.0.0.1", old)).is_some());
            assert!(
                applied
                    .load(row("GatewayReplica", "10.0.0.2", new))
                    .is_none()
            );
            let objects: Vec<_> = applied.objects.values().collect();
            assert_eq!(objects.len(), 1);
            assert!(objects[0].text.contains(expected), "{old} {new}");
            assert!(!applied.has_unreadable());
        }
        // A later row that cannot be read leaves nothing of the earlier one in force.
        let mut applied = AppliedObjects::default();
        applied.load(row("Gateway", "10.0.0.1", 1));
        let broken = StoredObject {
            yaml: "no: object".to_owned(),
            ..row("GatewayReplica", "", 2)
        };
        assert!(applied.load(broken).is_none());
        assert!(applied.objects.is_empty() && applied.has_unreadable());
    }
}
