//! Views of the controller's state: generation, data planes, tenants, and the use of limits that
//! tenants share.

use canal_wire::api;
use serde::Serialize;

use super::objects::{DiagnosticView, views};

/// State of the controller and of everything that its operator may see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StatusView {
    pub generation: u64,
    /// Version of the controller that answered.
    pub version: String,
    /// Store of the controller, as 32 hexadecimal digits. IDs of services are valid within one
    /// store only.
    pub store: String,
    /// True if every data plane is connected and uses the newest generation in its scope.
    pub converged: bool,
    pub subscribers: Vec<SubscriberView>,
    pub tenants: Vec<TenantStatusView>,
    pub shares: Vec<ShareUseView>,
    pub diagnostics: Vec<DiagnosticView>,
}

impl From<&api::StatusResponse> for StatusView {
    fn from(response: &api::StatusResponse) -> Self {
        let subscribers: Vec<SubscriberView> = views(&response.subscribers);
        Self {
            generation: response.generation,
            version: response.version.clone(),
            store: response.store.clone(),
            converged: subscribers
                .iter()
                .all(|subscriber| subscriber.connected && subscriber.converged),
            subscribers,
            tenants: views(&response.tenants),
            shares: views(&response.shares),
            diagnostics: views(&response.diagnostics),
        }
    }
}

/// A data plane's subscription, and how far it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SubscriberView {
    /// `node`, `gateway`, `edge` or `keyserver`.
    pub kind: String,
    pub name: String,
    /// Tenant; empty for a data plane of the provider.
    pub tenant: String,
    pub az: String,
    pub connected: bool,
    /// True if the data plane uses the newest generation in its scope and refuses nothing.
    pub converged: bool,
    pub generation_wanted: u64,
    pub generation_sent: u64,
    pub generation_acked: u64,
    /// Last NACK; empty if none is pending.
    pub nack: String,
    pub resources: u64,
    pub bytes_sent: u64,
    pub responses_sent: u64,
    pub nacks: u64,
    pub reconnects: u64,
    /// Time of the last message, in milliseconds since 1970.
    pub last_seen_ms: u64,
    pub version: String,
}

impl SubscriberView {
    /// Returns true if the data plane uses the newest generation in its scope and refuses nothing.
    pub fn is_converged(subscriber: &api::Subscriber) -> bool {
        subscriber.generation_acked >= subscriber.generation_wanted && subscriber.nack.is_empty()
    }
}

impl From<&api::Subscriber> for SubscriberView {
    fn from(subscriber: &api::Subscriber) -> Self {
        Self {
            kind: subscriber.kind.clone(),
            name: subscriber.name.clone(),
            tenant: subscriber.tenant.clone(),
            az: subscriber.az.clone(),
            connected: subscriber.connected,
            converged: Self::is_converged(subscriber),
            generation_wanted: subscriber.generation_wanted,
            generation_sent: subscriber.generation_sent,
            generation_acked: subscriber.generation_acked,
            nack: subscriber.nack.clone(),
            resources: subscriber.resources,
            bytes_sent: subscriber.bytes_sent,
            responses_sent: subscriber.responses_sent,
            nacks: subscriber.nacks,
            reconnects: subscriber.reconnects,
            last_seen_ms: subscriber.last_seen_ms,
            version: subscriber.version.clone(),
        }
    }
}

/// Numbers of a tenant's objects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TenantStatusView {
    pub tenant: String,
    pub services: u64,
    pub workloads: u64,
    pub workloads_ready: u64,
    pub routes: u64,
    pub errors: u64,
    pub warnings: u64,
    /// `Deny`, or `Passthrough`: traffic that the mesh does not carry leaves pods unencrypted.
    pub outbound_traffic_policy: &'static str,
}

impl From<&api::TenantStatus> for TenantStatusView {
    fn from(status: &api::TenantStatus) -> Self {
        Self {
            tenant: status.tenant.clone(),
            services: status.services,
            workloads: status.workloads,
            workloads_ready: status.workloads_ready,
            routes: status.routes,
            errors: status.errors,
            warnings: status.warnings,
            outbound_traffic_policy: if status.outside_passes {
                "Passthrough"
            } else {
                "Deny"
            },
        }
    }
}

/// One tenant's use of a limit that tenants share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShareUseView {
    /// Component that has the limit: `controller`, or the name of a data plane.
    pub component: String,
    pub limit: String,
    /// Tenant; empty for the provider's components.
    pub tenant: String,
    pub unit: String,
    pub used: u64,
    pub max: u64,
    pub refused: u64,
    pub revoked: u64,
}

impl From<&api::ShareUse> for ShareUseView {
    fn from(share: &api::ShareUse) -> Self {
        Self {
            component: share.component.clone(),
            limit: share.limit.clone(),
            tenant: share.tenant.clone(),
            unit: share.unit.clone(),
            used: share.used,
            max: share.max,
            refused: share.refused,
            revoked: share.revoked,
        }
    }
}
