//! The conditions that Gateway API defines for the objects of a tenant, with the addresses of its
//! Gateways. The objects in force are compiled again for each request, because the catalog keeps no
//! intermediate representation; the compiler stops at the tenant's shares, as it does for a change.
//! Start at [`ConditionsService::of_tenant`].

mod answer;
mod turns;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_access::TenantLimits;
use canal_analysis::conditions::{
    ListenerConditions, ObjectConditions, ParentConditions, StatusCondition, conditions, pending,
};
use canal_catalog::{Catalog, CatalogObject, TenantCatalog};
use canal_compiler::{CompileInput, build_ir_within, service_keys};
use canal_controller_metrics::ControllerMetrics;
use canal_fleet::{FleetHandle, FleetOverview};
use canal_model::diagnostic::Diagnostic;
use canal_model::ids::{ServiceId, TenantName};
use canal_model::ingress::gateway_service;
use canal_model::policy::{Document, Object, ObjectKey, ObjectKind};
use canal_policy_sources::{compile_allowance, excesses};
use canal_wire::api;
use tokio::sync::watch;
use tonic::Status;

pub use answer::{CONDITIONS_BYTES_MAX, ConditionsStream};
pub use turns::{CONDITIONS_AT_ONCE_MAX, CONDITIONS_PER_TENANT_MAX};

use crate::views::diagnostic;
use answer::{AnswerExcess, AnswerParts, READ_TIMEOUT};
use turns::{ConditionsTurns, TurnError};

/// Answers requests of conditions, a few at a time.
pub struct ConditionsService {
    catalog: watch::Receiver<Arc<Catalog>>,
    fleet: Arc<FleetHandle>,
    limits: Arc<TenantLimits>,
    metrics: Arc<ControllerMetrics>,
    turns: Arc<ConditionsTurns>,
}

/// Reason why a request of conditions has no answer.
#[derive(Debug)]
enum ConditionsRefusal {
    /// The tenant is gone.
    Missing,
    /// The tenant has no valid Tenant object.
    NotServed,
    /// The newest state of the tenant is withheld, and no other is in force.
    Withheld(Vec<Diagnostic>),
    /// The objects compile to more than a share allows.
    Excess(Vec<Diagnostic>),
    /// The answer is too large.
    Bytes,
    Turn(TurnError),
}

impl ConditionsRefusal {
    /// Returns the name under which the refusal is counted, if it is one of a limit or a fault.
    fn name(&self) -> Option<&'static str> {
        match self {
            Self::Missing | Self::NotServed | Self::Withheld(_) => None,
            Self::Excess(_) => Some("conditions_share"),
            Self::Bytes => Some("conditions_bytes"),
            Self::Turn(TurnError::Busy) => Some("conditions_of_tenant"),
            Self::Turn(TurnError::Panic) => Some("conditions_panic"),
            Self::Turn(TurnError::Stopping) => None,
        }
    }

    fn status(self, tenant: &TenantName) -> Status {
        match self {
            Self::Missing => Status::not_found(format!(
                "there is no tenant {tenant}; fix: name one that `canal status` lists"
            )),
            Self::NotServed => Status::failed_precondition(format!(
                "tenant {tenant} has no valid Tenant object, so it is not served; fix: correct what `canal status` reports of it"
            )),
            Self::Withheld(reasons) => Status::failed_precondition(format!(
                "the newest configuration of tenant {tenant} is withheld, and the controller knows of no other in force: {}",
                sentences(&reasons)
            )),
            Self::Excess(excesses) => Status::failed_precondition(format!(
                "the conditions of tenant {tenant} were not computed: {}",
                sentences(&excesses)
            )),
            Self::Bytes => Status::resource_exhausted(format!(
                "the conditions of tenant {tenant} take more than {CONDITIONS_BYTES_MAX} bytes; fix: ask for one namespace at a time, or give the routes fewer parents"
            )),
            Self::Turn(TurnError::Busy) => Status::resource_exhausted(format!(
                "tenant {tenant} has {CONDITIONS_PER_TENANT_MAX} requests of conditions that wait or whose answers were not read; fix: read the answers, then ask again"
            )),
            Self::Turn(TurnError::Panic) => Status::internal(format!(
                "the controller failed on the objects of tenant {tenant}, which is a bug in the controller; fix: report it with the objects"
            )),
            Self::Turn(TurnError::Stopping) => {
                Status::unavailable("the controller is stopping; fix: ask again")
            }
        }
    }
}

/// Returns what is wrong and what to do, for each diagnostic.
fn sentences(diagnostics: &[Diagnostic]) -> String {
    let each = diagnostics.iter();
    let each = each.map(|it| format!("{}; fix: {}", it.problem, it.fix));
    each.collect::<Vec<_>>().join("; ")
}

impl ConditionsService {
    pub fn new(
        catalog: watch::Receiver<Arc<Catalog>>,
        fleet: Arc<FleetHandle>,
        limits: Arc<TenantLimits>,
        metrics: Arc<ControllerMetrics>,
    ) -> Self {
        Self {
            catalog,
            fleet,
            limits,
            metrics,
            turns: ConditionsTurns::new(),
        }
    }

    /// Returns the conditions of a tenant's objects in a namespace; of all of them if it is empty.
    ///
    /// # Errors
    /// The tenant is not served, a limit is reached, or the controller failed on the objects.
    pub(crate) async fn of_tenant(
        &self,
        tenant: &TenantName,
        namespace: String,
    ) -> Result<ConditionsStream, Status> {
        // A request that waits keeps no state of the tenant, which may change meanwhile.
        let begin = || {
            let catalog = self.catalog.borrow().clone();
            let (name, fleet, limits) = (tenant.clone(), self.fleet.clone(), self.limits.clone());
            move || {
                let fleet = FleetOverview::of(&fleet, &catalog);
                let view = catalog.tenants.get(&name);
                let view = view.ok_or(ConditionsRefusal::Missing)?;
                answer(&name, &namespace, view, &fleet, &limits)
            }
        };
        let done = self.turns.run(tenant, begin).await;
        let answered = done
            .map_err(ConditionsRefusal::Turn)
            .and_then(|(answer, permit)| Ok((answer?, permit)));
        match answered {
            Ok((parts, permit)) => {
                let metrics = self.metrics.clone();
                Ok(ConditionsStream::send(parts, permit, metrics, READ_TIMEOUT))
            }
            Err(refusal) => {
                if let Some(name) = refusal.name() {
                    self.metrics.refuse(name);
                }
                Err(refusal.status(tenant))
            }
        }
    }
}

/// Compiles the objects in force, and returns their conditions. Objects that are not in force have
/// conditions that say so.
fn answer(
    tenant: &TenantName,
    namespace: &str,
    view: &TenantCatalog,
    fleet: &FleetOverview,
    limits: &TenantLimits,
) -> Result<AnswerParts, ConditionsRefusal> {
    let objects = view.objects_in_force();
    let withheld = view.withheld.as_ref();
    // Without an object in force there are no conditions, only the reasons for that.
    if let Some(withheld) = withheld.filter(|_| objects.is_empty()) {
        return Err(ConditionsRefusal::Withheld(withheld.reasons.clone()));
    }
    let documents: Vec<Arc<Document>> = objects.iter().map(|it| it.document.clone()).collect();
    let mut all = of_objects_in_force(tenant, &documents, limits)?;
    let mut parts = AnswerParts::default();
    let changes = match withheld {
        Some(withheld) => {
            parts.add_withheld(withheld.reasons.iter().map(diagnostic).collect());
            WithheldObjects::of(objects, &view.objects)
        }
        None => WithheldObjects::default(),
    };
    all.extend(pending(&changes.new, &view.diagnostics));
    all.sort_by(|a, b| a.object.cmp(&b.object));
    let requesting = requesting_addresses(&documents);
    for mut object in all {
        // An empty name stands for all namespaces.
        if !namespace.is_empty() && namespace != object.object.namespace.as_str() {
            continue;
        }
        let is_withheld = changes.keys.contains(&object.object);
        let is_requesting = requesting.contains(&object.object);
        let addresses = set_addresses(tenant, fleet, &mut object, is_requesting);
        let status = api::ObjectStatus {
            is_withheld,
            ..status_of(object, addresses)
        };
        parts
            .add(status)
            .map_err(|AnswerExcess| ConditionsRefusal::Bytes)?;
    }
    Ok(parts)
}

/// Compiles objects within the tenant's shares, and returns their conditions.
fn of_objects_in_force(
    tenant: &TenantName,
    documents: &[Arc<Document>],
    limits: &TenantLimits,
) -> Result<Vec<ObjectConditions>, ConditionsRefusal> {
    // Conditions depend on which services have an id, not on which id.
    let service_ids = service_keys(tenant, documents)
        .into_iter()
        .zip((1..).map_while(|id| ServiceId::new(id).ok()))
        .collect();
    let input = CompileInput {
        tenant,
        documents,
        service_ids: &service_ids,
        jwks: &BTreeMap::new(),
    };
    let max = compile_allowance(limits, tenant);
    let (ir, diagnostics) = build_ir_within(&input, max).map_err(|size| {
        let objections = excesses(limits, tenant, size, max).into_iter();
        ConditionsRefusal::Excess(objections.map(|objection| objection.finding).collect())
    })?;
    let ir = ir.ok_or(ConditionsRefusal::NotServed)?;
    Ok(conditions(documents, &ir, &diagnostics))
}

/// The objects of which the newest text is not in force.
#[derive(Default)]
struct WithheldObjects {
    keys: BTreeSet<ObjectKey>,
    /// Those of which no text is in force.
    new: Vec<Arc<Document>>,
}

impl WithheldObjects {
    fn of(in_force: &[CatalogObject], newest: &[CatalogObject]) -> Self {
        let by_key = |objects: &[CatalogObject]| -> BTreeMap<ObjectKey, Arc<Document>> {
            let objects = objects.iter();
            objects
                .map(|it| (it.document.object.key(), it.document.clone()))
                .collect()
        };
        let (in_force, newest) = (by_key(in_force), by_key(newest));
        let differs = |key: &&ObjectKey| match (in_force.get(*key), newest.get(*key)) {
            (Some(a), Some(b)) => !Arc::ptr_eq(a, b) && a.text != b.text,
            _ => true,
        };
        let keys = in_force.keys().chain(newest.keys()).filter(differs);
        let is_new = |(key, _): &(&ObjectKey, &Arc<Document>)| !in_force.contains_key(*key);
        let new = newest.iter().filter(is_new);
        Self {
            keys: keys.cloned().collect(),
            new: new.map(|(_, document)| document.clone()).collect(),
        }
    }
}

/// Returns the Gateways that name the addresses that they want.
fn requesting_addresses(documents: &[Arc<Document>]) -> BTreeSet<ObjectKey> {
    let requesting = documents.iter().filter(|document| match &document.object {
        Object::Gateway(gateway) => !gateway.spec.addresses.is_empty(),
        _ => false,
    });
    requesting.map(|document| document.object.key()).collect()
}

/// Returns the addresses of a Gateway. A Gateway that the tier has not given one is not programmed.
fn set_addresses(
    tenant: &TenantName,
    fleet: &FleetOverview,
    object: &mut ObjectConditions,
    is_requesting: bool,
) -> Vec<String> {
    let ObjectKey {
        kind,
        namespace,
        name,
    } = &object.object;
    let mut conditions = object.conditions.iter_mut();
    let programmed = conditions.find(|it| it.kind == "Programmed" && it.is_true);
    let (ObjectKind::Gateway, Some(programmed), Some(service)) =
        (kind, programmed, gateway_service(tenant, namespace, name))
    else {
        return Vec::new();
    };
    // The tier does not know a new Gateway at once.
    let placed = fleet.explain(&service, false).unwrap_or_default();
    let tables = placed.tables.into_iter();
    let addresses: Vec<String> = tables.flat_map(|table| table.addresses).collect();
    if addresses.is_empty() {
        programmed.is_true = false;
        programmed.reason = match is_requesting {
            true => "AddressNotUsable",
            false => "AddressNotAssigned",
        };
        programmed.message = placed.unmet_constraints.join("; ").into();
    }
    addresses
}

fn status_of(object: ObjectConditions, addresses: Vec<String>) -> api::ObjectStatus {
    api::ObjectStatus {
        kind: object.object.kind.as_str().to_owned(),
        namespace: object.object.namespace.to_string(),
        name: object.object.name.to_string(),
        conditions: object.conditions.into_iter().map(condition).collect(),
        addresses,
        is_withheld: false,
        attached_listener_sets: saturated(object.attached_listener_sets),
        listeners: object.listeners.into_iter().map(listener).collect(),
        parents: object.parents.into_iter().map(parent).collect(),
    }
}

fn listener(listener: ListenerConditions) -> api::ListenerStatus {
    let kinds = listener.supported_kinds.iter();
    api::ListenerStatus {
        name: listener.name,
        attached_routes: saturated(listener.attached_routes),
        supported_kinds: kinds.map(|kind| kind.as_str().to_owned()).collect(),
        conditions: listener.conditions.into_iter().map(condition).collect(),
    }
}

fn parent(parent: ParentConditions) -> api::ParentStatus {
    api::ParentStatus {
        index: saturated(parent.index),
        parent: parent.parent,
        conditions: parent.conditions.into_iter().map(condition).collect(),
    }
}

fn condition(condition: StatusCondition) -> api::Condition {
    api::Condition {
        r#type: condition.kind.to_owned(),
        is_true: condition.is_true,
        reason: condition.reason.to_owned(),
        message: condition.message.to_string(),
    }
}

fn saturated(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use canal_access::SharedCapacities;
    use canal_model::share::{Share, ShareKind, Shares};

    use super::*;

    const OBJECTS: &str = "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: alpha}\n\
        spec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.1.0.0/17], gatewayCidrs: [10.1.192.0/18]}\n\
        ---\napiVersion: v1\nkind: Service\nmetadata: {name: web}\n\
        spec: {clusterIP: 10.96.0.1, selector: {app: web}, ports: [{name: http, port: 80}]}\n\
        ---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {name: many}\n\
        spec:\n  parentRefs: [{group: '', kind: Service, name: web}]\n  rules:\n";

    fn limits(resources: u64) -> TenantLimits {
        let mut shares = Shares::default();
        shares.set(ShareKind::CompiledResources, Share::Amount(resources));
        TenantLimits::new(&SharedCapacities {
            queued_changes: 1,
            queued_change_bytes: 1,
            configuration_bytes: 1 << 20,
            compiled_bytes: 1 << 30,
            compiled_resources: 1 << 20,
            route_table_bytes: 1 << 30,
            connections: 1,
            unauthenticated: 1,
            certificates: 1,
            streams: 1,
            observations: 1,
            shares,
        })
    }

    /// A compilation for conditions must not take more memory than the one that put the objects into
    /// force.
    #[test]
    fn objects_beyond_a_share_are_not_compiled() {
        let mut text = OBJECTS.to_owned();
        for rule in 0..100 {
            text.push_str(&format!(
                "  - {{matches: [{{path: {{type: Exact, value: /{rule}}}}}], backendRefs: [{{name: web, port: 80}}]}}\n"
            ));
        }
        let documents = canal_sources::parse("mesh.yaml", &text).documents;
        let documents: Vec<_> = documents.into_iter().map(Arc::new).collect();
        let tenant = "alpha".parse().unwrap();
        let within = of_objects_in_force(&tenant, &documents, &limits(1_000)).unwrap();
        assert_eq!(within.len(), 1);
        let refusal = of_objects_in_force(&tenant, &documents, &limits(50)).unwrap_err();
        assert_eq!(refusal.name(), Some("conditions_share"));
        let status = refusal.status(&tenant);
        assert_eq!(status.code(), tonic::Code::FailedPrecondition);
        // The compiler stopped at the first resource beyond the share.
        let expected = "would have at least 51 resources, and its share of compiledResources is 50; fix: delete or shorten objects";
        assert!(status.message().contains(expected), "{status}");
    }

    #[test]
    fn each_limit_and_fault_is_counted_by_a_name_of_its_own() {
        let refusals = [
            ConditionsRefusal::Excess(Vec::new()),
            ConditionsRefusal::Bytes,
            ConditionsRefusal::Turn(TurnError::Busy),
            ConditionsRefusal::Turn(TurnError::Panic),
        ];
        let tenant = "alpha".parse().unwrap();
        let found = refusals.map(|it| (it.name().unwrap(), it.status(&tenant).code()));
        assert_eq!(
            found,
            [
                ("conditions_share", tonic::Code::FailedPrecondition),
                ("conditions_bytes", tonic::Code::ResourceExhausted),
                ("conditions_of_tenant", tonic::Code::ResourceExhausted),
                ("conditions_panic", tonic::Code::Internal),
            ]
        );
    }
}
