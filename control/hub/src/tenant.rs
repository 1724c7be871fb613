//! One tenant's sources and what they come to: files and applied objects side by side, compiled as one. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use canal_compiler::claims::Claims;
use canal_compiler::{Input, Output, compile, service_keys};
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::{Document, Metadata, Object, ObjectKey, Timestamp};
use canal_sources::pinpoint;

use crate::catalog::{Compiled, Listed};

/// What a tenant's directory said when it was last readable.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) documents: Vec<Arc<Document>>,
    pub(crate) diagnostics: Vec<Diagnostic>,
    /// The file that says each object.
    by_key: HashMap<ObjectKey, Arc<str>>,
}

impl Files {
    pub(crate) fn new(documents: Vec<Arc<Document>>, diagnostics: Vec<Diagnostic>) -> Self {
        let by_key = documents.iter().map(|d| (d.object.key(), d.origin.file.clone())).collect();
        Self { documents, diagnostics, by_key }
    }

    /// True where no file says anything: the tenant may go.
    pub(crate) fn say_nothing(&self) -> bool {
        self.documents.is_empty() && self.diagnostics.is_empty()
    }

    /// The same files after their folder vanished.
    pub(crate) fn vanished(&self, tenant: &TenantName) -> Self {
        let finding = Diagnostic {
            severity: Severity::Error,
            origin: None,
            object: None,
            field: String::new(),
            problem: format!("the folder of tenant {tenant} has vanished; what it said stays in force"),
            mend: "bring it back, or put an empty folder in its place to say that the objects are to go".into(),
        };
        Self::new(self.documents.clone(), vec![finding])
    }

    pub(crate) fn is_same(&self, other: &Files) -> bool {
        let same = |(a, b): (&Arc<Document>, &Arc<Document>)| Arc::ptr_eq(a, b) || a == b;
        self.diagnostics == other.diagnostics
            && self.documents.len() == other.documents.len()
            && self.documents.iter().zip(&other.documents).all(same)
    }
}

/// One object applied by the API.
#[derive(Debug, Clone)]
pub(crate) struct Applied {
    pub(crate) document: Arc<Document>,
}

impl Applied {
    /// An object without a time of creation gets that of its first apply, so that conflicts have an elder.
    pub(crate) fn new(document: Document, created: u64) -> Self {
        let mut document = document;
        metadata_mut(&mut document.object).creation_timestamp.get_or_insert(Timestamp(created));
        Self { document: Arc::new(document) }
    }
}

fn metadata_mut(object: &mut Object) -> &mut Metadata {
    match object {
        Object::Pod(o) => &mut o.metadata,
        Object::Service(o) => &mut o.metadata,
        Object::HttpRoute(o) => &mut o.metadata,
        Object::UdpRoute(o) => &mut o.metadata,
        Object::ReferenceGrant(o) => &mut o.metadata,
        Object::VirtualService(o) => &mut o.metadata,
        Object::DestinationRule(o) => &mut o.metadata,
        Object::Tenant(o) => &mut o.metadata,
        Object::Gateway(o) => &mut o.metadata,
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

/// All that one tenant says.
#[derive(Debug, Clone)]
pub(crate) struct TenantSources {
    pub(crate) name: TenantName,
    /// `None`: the tenant has no directory.
    pub(crate) files: Option<Arc<Files>>,
    /// Its files said something before this start, and some of them were not read yet: what they say is not known.
    pub(crate) is_partial: bool,
    pub(crate) applied: BTreeMap<ObjectKey, Applied>,
    /// Rows of the store that this build cannot read, or not wholly, and why.
    pub(crate) unreadable: BTreeMap<canal_store::ObjectKey, Diagnostic>,
    /// Key sets that were fetched, by URI.
    pub(crate) jwks: BTreeMap<String, String>,
    /// Why some could not be, by URI.
    pub(crate) jwks_faults: BTreeMap<String, String>,
    /// Why what the store holds of the tenant was not even read at this start: it has more bytes than its share.
    pub(crate) set_aside: Option<Diagnostic>,
}

impl TenantSources {
    pub(crate) fn new(name: TenantName) -> Self {
        Self {
            name,
            files: None,
            is_partial: false,
            applied: BTreeMap::new(),
            unreadable: BTreeMap::new(),
            jwks: BTreeMap::new(),
            jwks_faults: BTreeMap::new(),
            set_aside: None,
        }
    }

    /// True where all that the tenant says is known.
    pub(crate) fn is_complete(&self) -> bool {
        !self.is_partial && self.set_aside.is_none()
    }

    /// Bytes of all its objects' texts, applied ones and those of files.
    pub(crate) fn bytes(&self) -> u64 {
        let files = self.files.iter().flat_map(|f| &f.documents);
        let documents = files.chain(self.applied.values().map(|a| &a.document));
        documents.map(|document| document.text.len() as u64).sum()
    }

    /// Takes back what its files say now, because of `excess`: what they said in `kept` stays. If nothing was known, nothing is certain.
    pub(crate) fn refuse_files(&mut self, kept: Option<&TenantSources>, excess: Diagnostic) {
        let documents = kept.and_then(|kept| kept.files.as_ref()).map(|files| files.documents.clone());
        self.is_partial |= documents.is_none();
        self.files = Some(Arc::new(Files::new(documents.unwrap_or_default(), vec![excess])));
    }

    /// Nothing is left of the tenant, and that is certain.
    pub(crate) fn is_gone(&self) -> bool {
        self.files.is_none() && self.is_complete() && self.applied.is_empty() && self.unreadable.is_empty()
    }

    /// The file that says `key`, if one does.
    pub(crate) fn file_of(&self, key: &ObjectKey) -> Option<Arc<str>> {
        self.files.as_ref()?.by_key.get(key).cloned()
    }

    /// Every object in force. A file wins over an applied object of the same name.
    pub(crate) fn objects(&self) -> Vec<Listed> {
        let files = self.files.iter().flat_map(|f| &f.documents);
        let said = files.map(|d| Listed { document: d.clone(), file: Some(d.origin.file.clone()) });
        let applied = self.applied.iter().filter(|(key, _)| self.file_of(key).is_none());
        said.chain(applied.map(|(_, a)| Listed { document: a.document.clone(), file: None })).collect()
    }

    /// The services that need ids.
    pub(crate) fn service_keys(&self) -> BTreeSet<ServiceKey> {
        let documents: Vec<Arc<Document>> = self.objects().into_iter().map(|l| l.document).collect();
        service_keys(&self.name, &documents)
    }

    /// Compiles all of it.
    pub(crate) fn compile(&self, service_ids: &BTreeMap<ServiceKey, ServiceId>) -> Compiled {
        let objects = self.objects();
        let documents: Vec<Arc<Document>> = objects.iter().map(|l| l.document.clone()).collect();
        let output = compile(&Input { tenant: &self.name, documents: &documents, service_ids, jwks: &self.jwks });
        let mut diagnostics: Vec<Diagnostic> = self.files.iter().flat_map(|f| f.diagnostics.clone()).collect();
        diagnostics.extend(self.set_aside.iter().chain(self.unreadable.values()).cloned());
        diagnostics.extend(self.shadowed());
        diagnostics.extend(output.diagnostics.iter().cloned().map(|d| placed(d, &documents)));
        let Output { resources, claims, homes, federations, jwks, .. } = output;
        diagnostics.extend(self.jwks_faults.iter().filter(|(uri, _)| jwks.contains(*uri)).map(|(uri, fault)| unfetched(uri, fault, self)));
        let resources = crate::wire_check::enforce(resources, &mut diagnostics);
        Compiled { resources, claims, homes, federations, jwks, diagnostics, objects, complete: self.is_complete() }
    }

    /// What goes on record when compiling failed: the objects, and nothing made of them.
    pub(crate) fn uncompiled(&self) -> Compiled {
        let claims = Claims { tenant: self.name.clone(), isolation: None, gateways: Vec::new() };
        Compiled { objects: self.objects(), complete: self.is_complete(), ..Compiled::nothing(claims) }
    }

    fn shadowed(&self) -> Vec<Diagnostic> {
        let shadowed = self.applied.keys().filter_map(|key| Some((key, self.file_of(key)?)));
        shadowed
            .map(|(key, file)| Diagnostic {
                severity: Severity::Warning,
                origin: None,
                object: Some(key.clone()),
                field: String::new(),
                problem: format!("the object was applied and {file} says it too; the file is used"),
                mend: "remove it from the file, or delete the applied one".into(),
            })
            .collect()
    }
}

/// A key set that is not had. A warning: objects that name it are as good as before, and may be applied before the set is to be had.
fn unfetched(uri: &str, fault: &str, sources: &TenantSources) -> Diagnostic {
    let kept = if sources.jwks.contains_key(uri) { "the last good one is in force" } else { "tokens of its issuer are refused" };
    Diagnostic {
        severity: Severity::Warning,
        origin: None,
        object: None,
        field: "spec.jwtRules[].jwksUri".into(),
        problem: format!("the key set {uri} could not be fetched, so {kept}: {fault}"),
        mend: "mend what the text names; it is tried again by itself".into(),
    }
}

/// The compiler knows objects; where in its object a field stands is looked up here.
fn placed(mut d: Diagnostic, documents: &[Arc<Document>]) -> Diagnostic {
    if d.field.is_empty() {
        return d;
    }
    let begins_there = |doc: &&Arc<Document>| d.origin.as_ref() == Some(&doc.origin) && d.object.as_ref() == Some(&doc.object.key());
    let object = documents.iter().find(begins_there);
    if let Some(document) = object {
        d.origin = Some(pinpoint(&document.text, &document.origin, &d.field));
    }
    d
}
