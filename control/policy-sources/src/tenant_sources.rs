//! One tenant's sources and their compiled result: the objects of all sources are compiled
//! together. Pure. Start at [`TenantSources::compile`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_catalog::{CatalogObject, CompiledTenant, PolicyOrigin};
use canal_compiler::claims::TenantClaims;
use canal_compiler::resource_budget::CompiledSize;
use canal_compiler::{CompileInput, compile_within, service_keys};
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{ServiceId, ServiceKey, TenantName};
use canal_model::policy::{Document, Object, ObjectKey};
use canal_sources::add_positions;

use crate::applied::AppliedObjects;
use crate::source::{PolicySource, ReadContent, SourceState};
use crate::tenant_compiler::{CheckedOutput, TenantCompiler};

/// All sources of one tenant.
#[derive(Debug, Clone)]
pub struct TenantSources {
    /// Name of the tenant that changed.
    pub name: TenantName,
    /// Content of the sources that are read, which the tenant has a place in.
    read: BTreeMap<PolicyOrigin, Arc<ReadContent>>,
    /// Sources whose content is unknown, because something in them was not read since this start.
    unread: BTreeSet<PolicyOrigin>,
    /// Objects that operators applied.
    applied: AppliedObjects,
    /// Fetched key sets by URI.
    jwks: BTreeMap<String, String>,
    /// Reasons why key sets could not be fetched, by URI.
    jwks_faults: BTreeMap<String, String>,
}

impl TenantSources {
    /// Returns the sources of a tenant that has nothing.
    pub fn new(name: TenantName) -> Self {
        Self {
            name,
            read: BTreeMap::new(),
            unread: BTreeSet::new(),
            applied: AppliedObjects::default(),
            jwks: BTreeMap::new(),
            jwks_faults: BTreeMap::new(),
        }
    }

    /// Returns the sources by precedence. A source of which the tenant has nothing may be left out.
    pub fn by_precedence(&self) -> impl Iterator<Item = &dyn PolicySource> {
        let mut sources: Vec<&dyn PolicySource> = self
            .read
            .values()
            .map(|content| content.as_ref() as &dyn PolicySource)
            .collect();
        sources.push(&self.applied);
        sources.sort_by_key(|source| source.origin());
        sources.into_iter()
    }

    /// Returns the objects that operators applied.
    pub fn applied(&self) -> &AppliedObjects {
        &self.applied
    }

    /// Gives access to the objects that operators applied, to change them.
    pub fn applied_mut(&mut self) -> &mut AppliedObjects {
        &mut self.applied
    }

    /// Replaces the objects that operators applied. If some were not loaded, the content of that
    /// source is unknown.
    pub fn set_applied(&mut self, applied: AppliedObjects) {
        match applied.is_read() {
            true => _ = self.unread.remove(&PolicyOrigin::Api),
            false => _ = self.unread.insert(PolicyOrigin::Api),
        }
        self.applied = applied;
    }

    /// Records that the tenant had objects in a source before this start, which were not read yet.
    pub fn expect(&mut self, origin: PolicyOrigin) {
        self.unread.insert(origin);
    }

    /// Adds a key set that was fetched before this start.
    pub fn load_key_set(&mut self, uri: String, set: String) {
        self.jwks.insert(uri, set);
    }

    /// True if all sources of the tenant are known.
    pub fn is_complete(&self) -> bool {
        self.unread.is_empty()
    }

    /// True if the tenant has something in the source, or may have.
    pub fn has(&self, origin: PolicyOrigin) -> bool {
        self.unread.contains(&origin)
            || self
                .by_precedence()
                .any(|source| source.origin() == origin && !source.is_empty())
    }

    /// Returns the bytes of all objects' texts, of all sources.
    pub fn bytes(&self) -> u64 {
        self.by_precedence()
            .flat_map(|source| source.documents())
            .map(|document| document.text.len() as u64)
            .sum()
    }

    /// Applies the state of a source that is read. Returns false if nothing differs.
    pub fn take_state(&mut self, state: SourceState) -> bool {
        let origin = state.origin();
        match state {
            SourceState::Read(content) => {
                // The content is known once it has been read completely.
                let was_unread = content.is_read() && self.unread.remove(&origin);
                let differs = was_unread
                    || self
                        .read
                        .get(&origin)
                        .is_none_or(|before| !before.is_same(&content));
                self.read.insert(origin, content);
                differs
            }
            SourceState::Gone { finding, .. } => {
                let Some(before) = self.read.remove(&origin) else {
                    return false;
                };
                // Removing an empty folder means that the tenant is to go; a full one that vanishes
                // is an accident.
                if !before.is_empty() {
                    self.read.insert(origin, Arc::new(before.retained(finding)));
                }
                true
            }
        }
    }

    /// Refuses the current content of the sources that are read because of `excess`; the documents
    /// of `before` stay. If none were known, the content of the source counts as unknown.
    pub(crate) fn refuse_growth(&mut self, before: Option<&TenantSources>, excess: &Diagnostic) {
        let mut origins: BTreeSet<PolicyOrigin> = self.read.keys().copied().collect();
        if origins.is_empty() {
            // Operators see the diagnostic of a source, and the applied objects were within the
            // share when they were applied.
            origins.insert(PolicyOrigin::Files);
        }
        for origin in origins {
            let content = match before.and_then(|before| before.read.get(&origin)) {
                Some(before) => before.retained(excess.clone()),
                None => {
                    self.unread.insert(origin);
                    ReadContent::new(origin, Vec::new(), vec![excess.clone()])
                }
            };
            self.read.insert(origin, Arc::new(content));
        }
    }

    /// Applies a key set, or the reason why there is none. Returns false if nothing differs.
    pub(crate) fn take_key_set(
        &mut self,
        wanted: &BTreeSet<String>,
        uri: &str,
        set: Option<&str>,
        fault: Option<&str>,
    ) -> bool {
        let is_new = set.is_some_and(|set| self.jwks.get(uri).map(String::as_str) != Some(set));
        let is_same_fault = self.jwks_faults.get(uri).map(String::as_str) == fault;
        match fault {
            Some(fault) => _ = self.jwks_faults.insert(uri.into(), fault.into()),
            None => _ = self.jwks_faults.remove(uri),
        }
        // Unwanted key sets are dropped, or a tenant that renames them could fill the memory.
        self.jwks.retain(|uri, _| wanted.contains(uri));
        self.jwks_faults.retain(|uri, _| wanted.contains(uri));
        self.jwks
            .extend(set.map(|set| (uri.to_string(), set.to_string())));
        is_new || !is_same_fault
    }

    /// True if nothing is left of the tenant, and that is certain.
    pub fn is_gone(&self) -> bool {
        self.read.is_empty() && self.is_complete() && self.applied.is_empty()
    }

    /// Returns the object that is in force instead of an applied one with this key, and the source
    /// that has it.
    pub(crate) fn preferred_to_applied(&self, key: &ObjectKey) -> Option<CatalogObject> {
        let mut before_api = self
            .by_precedence()
            .take_while(|source| source.origin() < PolicyOrigin::Api);
        before_api.find_map(|source| {
            Some(CatalogObject {
                document: source.find(key)?.clone(),
                origin: source.origin(),
            })
        })
    }

    /// Returns every object in force: of those with one key, that of the source with the highest
    /// precedence.
    pub fn objects(&self) -> Vec<CatalogObject> {
        let mut out = Vec::new();
        let mut preferred: Vec<&dyn PolicySource> = Vec::new();
        for source in self.by_precedence() {
            let is_first = preferred.is_empty();
            let in_force = source.documents().filter(|d| {
                is_first
                    || preferred
                        .iter()
                        .all(|other| other.find(&d.object.key()).is_none())
            });
            out.extend(in_force.map(|document| CatalogObject {
                document: document.clone(),
                origin: source.origin(),
            }));
            preferred.push(source);
        }
        out
    }

    /// Returns the services that need IDs.
    pub fn service_keys(&self) -> BTreeSet<ServiceKey> {
        let documents: Vec<Arc<Document>> =
            self.objects().into_iter().map(|l| l.document).collect();
        service_keys(&self.name, &documents)
    }

    /// Compiles all sources of the tenant, and stops as soon as the resources exceed `max`.
    /// `compiler` is that of the tenant's last compile, which may have been one of other sources.
    /// Also returns the size of the resources; beyond `max` it is their size when the work stopped.
    pub fn compile(
        &self,
        compiler: &mut TenantCompiler,
        service_ids: &BTreeMap<ServiceKey, ServiceId>,
        max: CompiledSize,
    ) -> (CompiledTenant, CompiledSize) {
        let objects = self.objects();
        let documents: Vec<Arc<Document>> = objects.iter().map(|l| l.document.clone()).collect();
        let input = CompileInput {
            tenant: &self.name,
            documents: &documents,
            service_ids,
            jwks: &self.jwks,
        };
        let CheckedOutput {
            output,
            resources,
            refused,
            size,
        } = compiler.compile(&input, max);
        let mut diagnostics: Vec<Diagnostic> = self
            .by_precedence()
            .flat_map(|source| source.diagnostics())
            .collect();
        diagnostics.extend(self.shadowed());
        let mut compiled = output.diagnostics.clone();
        add_positions(&mut compiled, &documents);
        diagnostics.extend(compiled);
        // Key sets that no object uses any more are left out.
        diagnostics.extend(
            self.jwks_faults
                .iter()
                .filter(|(uri, _)| output.jwks.contains(*uri))
                .map(|(uri, fault)| unfetched(uri, fault, self)),
        );
        diagnostics.extend(refused);
        let complete = self.is_complete();
        (
            CompiledTenant {
                resources,
                claims: output.claims.clone(),
                home_azs: output.homes.clone(),
                ingress: output.ingress.clone(),
                federations: output.federations.clone(),
                jwks: output.jwks.clone(),
                diagnostics,
                objects,
                withheld: None,
                complete,
            },
            size,
        )
    }

    /// Returns what the tenant claims of what all tenants share. Only its Tenant and GatewayReplicas
    /// decide that, so nothing else is compiled.
    pub(crate) fn claims(&self, max: CompiledSize) -> TenantClaims {
        let objects = self.objects().into_iter().map(|object| object.document);
        let claiming = |document: &Arc<Document>| {
            matches!(
                document.object,
                Object::Tenant(_) | Object::GatewayReplica(_)
            )
        };
        let input = CompileInput {
            tenant: &self.name,
            documents: &objects.filter(claiming).collect::<Vec<_>>(),
            service_ids: &BTreeMap::new(),
            jwks: &BTreeMap::new(),
        };
        compile_within(&input, max).claims
    }

    /// Returns the result for a failed compilation: the objects, and no resources.
    pub fn uncompiled(&self) -> CompiledTenant {
        let claims = TenantClaims {
            tenant: self.name.clone(),
            isolation: None,
            gateways: Vec::new(),
        };
        CompiledTenant {
            objects: self.objects(),
            complete: self.is_complete(),
            ..CompiledTenant::nothing(claims)
        }
    }

    /// Returns a warning for each object that a source of higher precedence has too.
    fn shadowed(&self) -> Vec<Diagnostic> {
        let mut out = Vec::new();
        let mut preferred: Vec<&dyn PolicySource> = Vec::new();
        for source in self.by_precedence() {
            let twice = source
                .documents()
                .filter(|_| !preferred.is_empty())
                .filter_map(|d| {
                    let key = d.object.key();
                    let other = preferred.iter().find_map(|other| {
                        Some(CatalogObject {
                            document: other.find(&key)?.clone(),
                            origin: other.origin(),
                        })
                    })?;
                    Some((
                        CatalogObject {
                            document: d.clone(),
                            origin: source.origin(),
                        },
                        other,
                    ))
                });
            out.extend(twice.map(|(object, other)| shadowed_by(&object, &other)));
            preferred.push(source);
        }
        out
    }
}

/// Returns the warning for an object that is not in force because a source of higher precedence has
/// it too.
fn shadowed_by(object: &CatalogObject, other: &CatalogObject) -> Diagnostic {
    let (given, used) = (object.location(), other.location());
    Diagnostic {
        severity: Severity::Warning,
        code: Code::DuplicateObject,
        origin: None,
        object: Some(object.document.object.key()),
        field: String::new(),
        problem: format!("the object comes from {given} and from {used}; that of {used} is used"),
        fix: format!("remove it from {used}, or delete that of {given}"),
    }
}

/// Returns the diagnostic of a key set that is not available. It is a warning: objects that name
/// the set are valid, and may be applied before it is available.
fn unfetched(uri: &str, fault: &str, sources: &TenantSources) -> Diagnostic {
    let consequence = if sources.jwks.contains_key(uri) {
        "the last good key set is in force"
    } else {
        "tokens of its issuer are refused"
    };
    Diagnostic {
        severity: Severity::Warning,
        code: Code::KeySetUnavailable,
        origin: None,
        object: None,
        field: "spec.jwtRules[].jwksUri".into(),
        problem: format!("the key set {uri} could not be fetched, so {consequence}: {fault}"),
        fix: "fix the cause in the text; the controller retries by itself".into(),
    }
}
