//! The conditions that Gateway API defines for the objects of a tenant, with the addresses of its
//! Gateways. The objects in force are compiled again for each request, because the catalog keeps no
//! intermediate representation. Start at [`ConditionsService::of_tenant`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_analysis::conditions::{
    ListenerConditions, ObjectConditions, ParentConditions, StatusCondition, conditions,
};
use canal_catalog::TenantCatalog;
use canal_compiler::{CompileInput, build_ir, service_keys};
use canal_fleet::FleetOverview;
use canal_model::ids::{ServiceId, TenantName};
use canal_model::ingress::gateway_service;
use canal_model::policy::{Document, Object, ObjectKey, ObjectKind};
use canal_wire::api;
use tokio::sync::Semaphore;
use tonic::Status;

/// Number of tenants that are compiled at once for requests of conditions. Further requests wait, so
/// that operators who ask often do not take the processors from the compilation of changes.
pub const CONDITIONS_AT_ONCE_MAX: usize = 1;

/// Answers requests of conditions, a few at a time.
#[derive(Debug)]
pub struct ConditionsService {
    turns: Semaphore,
}

impl Default for ConditionsService {
    fn default() -> Self {
        Self {
            turns: Semaphore::new(CONDITIONS_AT_ONCE_MAX),
        }
    }
}

impl ConditionsService {
    /// Returns the conditions of a tenant's objects.
    ///
    /// # Errors
    /// If the tenant has no valid Tenant object, so that it is not served.
    pub(crate) async fn of_tenant(
        &self,
        tenant: TenantName,
        view: Arc<TenantCatalog>,
        fleet: FleetOverview,
    ) -> Result<api::ConditionsResponse, Status> {
        let cancelled = || Status::unavailable("the controller is stopping");
        let _turn = self.turns.acquire().await.map_err(|_| cancelled())?;
        let compiled = tokio::task::spawn_blocking(move || compile(&tenant, &view, &fleet));
        compiled.await.map_err(|_| cancelled())?
    }
}

fn compile(
    tenant: &TenantName,
    view: &TenantCatalog,
    fleet: &FleetOverview,
) -> Result<api::ConditionsResponse, Status> {
    let objects = view.objects.iter();
    let documents: Vec<Arc<Document>> = objects.map(|it| it.document.clone()).collect();
    // Conditions depend on which services have an id, not on which id.
    let service_ids = service_keys(tenant, &documents)
        .into_iter()
        .zip((1..).map_while(|id| ServiceId::new(id).ok()))
        .collect();
    let (ir, diagnostics) = build_ir(&CompileInput {
        tenant,
        documents: &documents,
        service_ids: &service_ids,
        jwks: &BTreeMap::new(),
    });
    let ir = ir.ok_or_else(|| {
        Status::failed_precondition(format!(
            "tenant {tenant} has no valid Tenant object, so it is not served; fix: correct what `canal status` reports of it"
        ))
    })?;
    let requesting: BTreeSet<ObjectKey> = documents
        .iter()
        .filter(|document| match &document.object {
            Object::Gateway(gateway) => !gateway.spec.addresses.is_empty(),
            _ => false,
        })
        .map(|document| document.object.key())
        .collect();
    let all = conditions(&documents, &ir, &diagnostics);
    let objects = all.into_iter().map(|mut object| {
        let is_requesting = requesting.contains(&object.object);
        let addresses = set_addresses(tenant, fleet, &mut object, is_requesting);
        status_of(object, addresses)
    });
    Ok(api::ConditionsResponse {
        objects: objects.collect(),
    })
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
        programmed.message = placed.unmet_constraints.join("; ");
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
        message: condition.message,
    }
}

fn saturated(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
