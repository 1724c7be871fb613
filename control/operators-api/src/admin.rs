//! The operators' API: checks which operator may make a request, and converts results to API
//! messages. `canal-policy-sources` decides what a write request does, and the catalog writer
//! carries it out. Start at the [`Admin`] implementation.

use std::sync::Arc;

use canal_access::{AuthenticatedClient, TenantLimits, now_seconds};
use canal_catalog::{Catalog, CatalogObject};
use canal_controller_metrics::{self as metrics, ControllerMetrics};
use canal_fleet::{FleetHandle, FleetOverview};
use canal_model::identity::{Identity, components};
use canal_model::ids::{IdError, ReplicaName, ServiceKey, TenantName};
use canal_model::policy::ObjectKind;
use canal_model::principal::Principal;
use canal_policy_sources::{
    ApplyOutcome, PendingChanges, QueuedWrite, SourceHealth, WriteError, WriteRequest,
};
use canal_runtime::ShareHolder;
use canal_southbound::{ShareReport, Subscribers};
use canal_store::{DomainName, Store, StoreError};
use canal_trust::{DomainError, RevocationTarget, TrustAuthorities, TrustOperationError};
use canal_wire::api;
use canal_wire::api::admin_server::Admin;
use tokio::sync::watch;
use tonic::{Code, Request, Response, Status};

use crate::conditions::{ConditionsService, ConditionsStream};
use crate::observe::{self, ObservationContext, ObservationStream};
use crate::operator::{OperatorCall, OperatorScope};
use crate::share_status;
use crate::views::{diagnostic, object, tenant_status};

/// Maximum number of files in one Apply or Diff request.
/// A tenant's folder may have as many.
pub const FILES_MAX: usize = 4096;

/// The service of the operators' API.
pub struct AdminService {
    pub catalog: watch::Receiver<Arc<Catalog>>,
    pub changes: Arc<PendingChanges>,
    pub health: Arc<SourceHealth>,
    pub subscribers: Arc<Subscribers>,
    pub observations: Arc<ObservationContext>,
    pub conditions: ConditionsService,
    pub fleet: Arc<FleetHandle>,
    pub trust: Arc<TrustAuthorities>,
    pub store: Arc<Store>,
    pub limits: Arc<TenantLimits>,
    pub metrics: Arc<ControllerMetrics>,
}

#[tonic::async_trait]
impl Admin for AdminService {
    async fn apply(
        &self,
        request: Request<api::ApplyRequest>,
    ) -> Result<Response<api::ApplyResponse>, Status> {
        let mut call = self.operator("apply", &request)?;
        let api::ApplyRequest {
            tenant,
            files,
            dry_run,
        } = request.into_inner();
        let outcome = self
            .write(&mut call, &tenant, WriteRequest::Apply(files), dry_run)
            .await?;
        Ok(Response::new(api::ApplyResponse {
            accepted: outcome.accepted,
            generation: outcome.generation.0,
            // A refused request has changed nothing.
            changes_left_out: if outcome.accepted {
                outcome.changes_left_out
            } else {
                0
            },
            changes: if outcome.accepted {
                outcome.changes
            } else {
                Vec::new()
            },
            diagnostics: outcome.diagnostics.iter().map(diagnostic).collect(),
        }))
    }

    async fn diff(
        &self,
        request: Request<api::ApplyRequest>,
    ) -> Result<Response<api::DiffResponse>, Status> {
        let mut call = self.operator("diff", &request)?;
        let api::ApplyRequest { tenant, files, .. } = request.into_inner();
        // A diff is the dry run of an apply.
        let outcome = self
            .write(&mut call, &tenant, WriteRequest::Diff(files), true)
            .await?;
        Ok(Response::new(api::DiffResponse {
            changes: outcome.changes,
            diagnostics: outcome.diagnostics.iter().map(diagnostic).collect(),
            changes_left_out: outcome.changes_left_out,
        }))
    }

    async fn delete(
        &self,
        request: Request<api::DeleteRequest>,
    ) -> Result<Response<api::DeleteResponse>, Status> {
        let mut call = self.operator("delete", &request)?;
        let api::DeleteRequest {
            tenant,
            objects,
            ignore_missing,
            all,
        } = request.into_inner();
        let write = match all {
            false => WriteRequest::Delete {
                objects,
                ignore_missing,
            },
            true if objects.is_empty() => WriteRequest::DeleteAll,
            true => {
                return Err(Status::invalid_argument(
                    "the request names objects and also requests all; fix: send only one of them",
                ));
            }
        };
        let outcome = self.write(&mut call, &tenant, write, false).await?;
        Ok(Response::new(api::DeleteResponse {
            accepted: outcome.accepted,
            generation: outcome.generation.0,
            changes_left_out: if outcome.accepted {
                outcome.changes_left_out
            } else {
                0
            },
            changes: if outcome.accepted {
                outcome.changes
            } else {
                Vec::new()
            },
            diagnostics: outcome.diagnostics.iter().map(diagnostic).collect(),
        }))
    }

    async fn get(
        &self,
        request: Request<api::GetRequest>,
    ) -> Result<Response<api::GetResponse>, Status> {
        let mut call = self.operator("get", &request)?;
        let request = request.into_inner();
        let tenant = call.tenant_of(&request.tenant)?;
        let kind = match request.kind.as_str() {
            "" => None,
            word => Some(ObjectKind::from_word(word).ok_or_else(|| unknown_kind(word))?),
        };
        let catalog = self.catalog.borrow().clone();
        let view = catalog.tenants.get(&tenant).ok_or_else(|| {
            call.set_outcome("missing");
            unknown_tenant(&tenant)
        })?;
        let is_wanted = |l: &&CatalogObject| {
            let key = l.document.object.key();
            kind.is_none_or(|k| k == key.kind)
                && (request.namespace.is_empty() || request.namespace == key.namespace.as_str())
                && (request.name.is_empty() || request.name == key.name.as_str())
        };
        let mut objects: Vec<api::Object> = view
            .objects
            .iter()
            .filter(is_wanted)
            .map(|l| object(l, view))
            .collect();
        objects.sort_by(|a, b| {
            (&a.kind, &a.namespace, &a.name).cmp(&(&b.kind, &b.namespace, &b.name))
        });
        call.set_outcome("accepted");
        Ok(Response::new(api::GetResponse { objects }))
    }

    async fn status(
        &self,
        request: Request<api::StatusRequest>,
    ) -> Result<Response<api::StatusResponse>, Status> {
        let mut call = self.operator("status", &request)?;
        call.set_outcome("accepted");
        let operator = &call.scope;
        let catalog = self.catalog.borrow().clone();
        let tenants = catalog
            .tenants
            .iter()
            .filter(|(name, _)| operator.may_see(name));
        let reports = self.subscribers.share_reports();
        let response = api::StatusResponse {
            generation: catalog.generation.0,
            version: env!("CARGO_PKG_VERSION").into(),
            store: self.store.id().to_string(),
            subscribers: self.visible_subscribers(operator, &catalog),
            shares: self.shares(operator, &reports),
            tenants: tenants
                .clone()
                .map(|(name, view)| tenant_status(name, view))
                .collect(),
            diagnostics: self
                .findings(operator)
                .into_iter()
                .chain(tenants.flat_map(|(_, v)| v.diagnostics.iter().map(diagnostic)))
                .chain(share_status::omissions(&reports, operator))
                .collect(),
        };
        Ok(Response::new(response))
    }

    type ConditionsStream = ConditionsStream;

    async fn conditions(
        &self,
        request: Request<api::ConditionsRequest>,
    ) -> Result<Response<ConditionsStream>, Status> {
        let mut call = self.operator("conditions", &request)?;
        let api::ConditionsRequest { tenant, namespace } = request.into_inner();
        let tenant = call.tenant_of(&tenant)?;
        // Names that no tenant has must not fill the queue of requests.
        if !self.catalog.borrow().tenants.contains_key(&tenant) {
            call.set_outcome("missing");
            return Err(unknown_tenant(&tenant));
        }
        let found = self.conditions.of_tenant(&tenant, namespace).await;
        call.set_outcome(match &found {
            Ok(_) => "accepted",
            Err(status) if status.code() == Code::NotFound => "missing",
            Err(_) => "refused",
        });
        found.map(Response::new)
    }

    async fn fleet(
        &self,
        request: Request<api::FleetRequest>,
    ) -> Result<Response<api::FleetResponse>, Status> {
        let mut call = self.operator("fleet", &request)?;
        call.set_outcome("accepted");
        let operator = &call.scope;
        Ok(Response::new(
            self.overview()
                .fleet_response(operator.is_provider(), |tenant| operator.may_see(tenant)),
        ))
    }

    async fn drain_replica(
        &self,
        request: Request<api::ReplicaRequest>,
    ) -> Result<Response<api::ReplicaResponse>, Status> {
        self.order_drain("drain", request, true).await
    }

    async fn undrain_replica(
        &self,
        request: Request<api::ReplicaRequest>,
    ) -> Result<Response<api::ReplicaResponse>, Status> {
        self.order_drain("undrain", request, false).await
    }

    async fn forget_replica(
        &self,
        request: Request<api::ReplicaRequest>,
    ) -> Result<Response<api::ReplicaResponse>, Status> {
        let mut call = self.provider("forget", &request)?;
        let name = request.into_inner().name;
        let known = parsed::<ReplicaName>(&name)?;
        match self.fleet.mark_gone(&known) {
            None => {
                call.set_outcome("missing");
                Err(no_replica(&name))
            }
            // A replica that still reports would register again at once.
            Some(false) => {
                call.set_outcome("refused");
                Err(Status::failed_precondition(format!(
                    "{name} reported a moment ago; fix: drain it and end its process first"
                )))
            }
            Some(true) => {
                call.set_outcome("accepted");
                tracing::info!(target: "audit", replica = name, "admin API: an operator declared the replica gone");
                Ok(Response::new(api::ReplicaResponse {
                    replica: self.overview().replica(&name),
                }))
            }
        }
    }

    async fn explain_service(
        &self,
        request: Request<api::ExplainRequest>,
    ) -> Result<Response<api::ExplainResponse>, Status> {
        let mut call = self.operator("explain", &request)?;
        let key = parsed::<ServiceKey>(&request.get_ref().service)?;
        call.tenant_of(key.tenant.as_str())?;
        let explained = self.overview().explain(&key, call.scope.is_provider());
        call.set_outcome(if explained.is_some() {
            "accepted"
        } else {
            "missing"
        });
        explained.map(Response::new).ok_or_else(|| {
            Status::not_found(format!(
                "the cloud tier has no service {key}; fix: name one that `canal get services` lists"
            ))
        })
    }

    async fn find_sessions(
        &self,
        request: Request<api::SessionsRequest>,
    ) -> Result<Response<api::SessionsResponse>, Status> {
        let mut call = self.operator("sessions", &request)?;
        let request = request.into_inner();
        let tenant = call.tenant_of(&request.tenant)?;
        let found = canal_fleet::find_sessions(&self.fleet, &tenant, &request.client).await;
        call.set_outcome(if found.is_ok() { "accepted" } else { "refused" });
        found.map(Response::new)
    }

    async fn trust(
        &self,
        request: Request<api::TrustRequest>,
    ) -> Result<Response<api::TrustResponse>, Status> {
        let mut call = self.operator("ca_status", &request)?;
        let request = request.into_inner();
        let only = match request.tenant.as_str() {
            "" => None,
            named => Some(call.tenant_of(named)?),
        };
        call.set_outcome("accepted");
        let operator = &call.scope;
        let catalog = self.catalog.borrow().clone();
        let seen = catalog
            .tenants
            .iter()
            .filter(|(name, _)| operator.may_see(name) && only.as_ref().is_none_or(|o| o == *name));
        let domains = seen.filter_map(|(name, view)| {
            Some((
                name.clone(),
                view.claims.isolation.as_ref()?.trust_domain.clone(),
            ))
        });
        // The trust domain of Canal's own components is the provider's.
        let own = Some(components())
            .filter(|own| operator.is_provider() && only.as_ref().is_none_or(|o| *o == own.0));
        let domains = domains.chain(own);
        let now = now_seconds();
        let domains = domains
            .map(|name| self.trust.status(&name, request.certificates, now))
            .collect();
        Ok(Response::new(api::TrustResponse {
            domains,
            note: String::new(),
        }))
    }

    async fn rotate_root(
        &self,
        request: Request<api::RotateRequest>,
    ) -> Result<Response<api::TrustResponse>, Status> {
        let call = self.operator("ca_rotate", &request)?;
        let request = request.into_inner();
        let act = move |trust: &TrustAuthorities, name: &DomainName| {
            trust.rotate(name, request.force).map(str::to_string)
        };
        self.run_trust_order(call, &request.tenant, act).await
    }

    async fn revoke(
        &self,
        request: Request<api::RevokeRequest>,
    ) -> Result<Response<api::TrustResponse>, Status> {
        let call = self.operator("ca_revoke", &request)?;
        let request = request.into_inner();
        let target = match (request.identity.as_str(), request.serial.as_str()) {
            ("", "") => {
                return Err(Status::invalid_argument(
                    "the request names no certificate; fix: name an identity or a serial",
                ));
            }
            (identity, "") => RevocationTarget::Identity(parsed::<Identity>(identity)?),
            ("", serial) => RevocationTarget::Serial(
                serial
                    .trim_start_matches("0x")
                    .replace(':', "")
                    .to_ascii_lowercase(),
            ),
            _ => {
                return Err(Status::invalid_argument(
                    "the request names an identity and a serial; fix: name only one of them",
                ));
            }
        };
        self.run_trust_order(call, &request.tenant, move |trust, name| match &target {
            // Another trust domain's CA issued the identity's certificates.
            RevocationTarget::Identity(identity) if identity.trust_domain != name.1 => {
                Err(DomainError::Foreign(identity.clone(), name.1.clone()).into())
            }
            _ => trust.revoke(name, &target),
        })
        .await
    }

    type ObserveStream = ObservationStream;

    async fn observe(
        &self,
        request: Request<api::ObserveRequest>,
    ) -> Result<Response<ObservationStream>, Status> {
        let mut call = self.operator("observe", &request)?;
        let client = AuthenticatedClient::of(&request)?;
        let begun = observe::begin(&self.observations, &call.scope, &client, request.get_ref());
        call.set_outcome(match &begun {
            Ok(_) => "accepted",
            Err(status) if status.code() == Code::PermissionDenied => {
                self.metrics.refuse("foreign_tenant");
                "denied"
            }
            Err(status) if status.code() == Code::NotFound => "missing",
            Err(_) => "refused",
        });
        begun.map(Response::new)
    }

    async fn restore(
        &self,
        request: Request<api::RevokeRequest>,
    ) -> Result<Response<api::TrustResponse>, Status> {
        let call = self.operator("ca_restore", &request)?;
        let request = request.into_inner();
        let identity = parsed::<Identity>(&request.identity)?;
        self.run_trust_order(call, &request.tenant, move |trust, name| {
            trust.restore(name, &identity)
        })
        .await
    }
}

fn unknown_tenant(tenant: &TenantName) -> Status {
    Status::not_found(format!(
        "there is no tenant {tenant}; fix: name one that `canal status` lists"
    ))
}

fn parsed<T: std::str::FromStr<Err = IdError>>(text: &str) -> Result<T, Status> {
    text.parse()
        .map_err(|e: IdError| Status::invalid_argument(e.to_string()))
}

/// Converts a store error to a gRPC status. It is never `UNAVAILABLE`: the controller is reachable,
/// and repeating the request does not help.
fn store_status(e: &StoreError) -> Status {
    if e.is_limit() {
        Status::resource_exhausted(e.to_string())
    } else {
        Status::internal(e.to_string())
    }
}

fn no_replica(name: &str) -> Status {
    Status::not_found(format!(
        "no replica {name} is registered; fix: name one that `canal gateway list` shows"
    ))
}

impl AdminService {
    /// Returns the request of an operator, which is counted when it is dropped; any other principal
    /// gets `PERMISSION_DENIED`.
    fn operator<T>(
        &self,
        verb: &'static str,
        request: &Request<T>,
    ) -> Result<OperatorCall, Status> {
        let client = AuthenticatedClient::of(request)?;
        let (name, tenant) = match client.principal {
            Principal::Operator { name, tenant } => (name, tenant),
            other => {
                self.metrics.count(
                    metrics::API_REQUESTS,
                    &[("verb", verb), ("outcome", "denied")],
                );
                self.metrics.refuse("not_an_operator");
                return Err(Status::permission_denied(format!(
                    "{other} is not an operator; fix: use an operator's token"
                )));
            }
        };
        Ok(OperatorCall::new(
            OperatorScope::new(name.to_string(), tenant),
            verb,
            self.metrics.clone(),
        ))
    }

    /// Returns the request of an operator of the provider; any other gets `PERMISSION_DENIED`.
    fn provider<T>(
        &self,
        verb: &'static str,
        request: &Request<T>,
    ) -> Result<OperatorCall, Status> {
        let mut call = self.operator(verb, request)?;
        if call.scope.is_provider() {
            return Ok(call);
        }
        call.set_outcome("denied");
        self.metrics.refuse("not_the_provider");
        Err(Status::permission_denied(
            "only the provider's operators may do this, because the tier serves all tenants; fix: use a token without a tenant",
        ))
    }

    fn overview(&self) -> FleetOverview {
        FleetOverview::of(&self.fleet, &self.catalog.borrow().clone())
    }

    /// Has a replica drain, or stop draining.
    async fn order_drain(
        &self,
        verb: &'static str,
        request: Request<api::ReplicaRequest>,
        drain: bool,
    ) -> Result<Response<api::ReplicaResponse>, Status> {
        let mut call = self.provider(verb, &request)?;
        let name = request.into_inner().name;
        let replica = parsed::<ReplicaName>(&name)?;
        let (fleet, store) = (self.fleet.clone(), self.store.clone());
        // The outcome, should the thread or the operator end before the order is carried out.
        call.set_outcome("canceled");
        // The order is on disk before it is acknowledged.
        let done =
            tokio::task::spawn_blocking(move || fleet.order_drain(&store, &replica, drain)).await;
        let is_there =
            done.map_err(|_| Status::internal("the order could not be stored; fix: try again"))?;
        let is_there = is_there.map_err(|e| {
            call.set_outcome("store");
            store_status(&e)
        })?;
        call.set_outcome(if is_there { "accepted" } else { "missing" });
        if !is_there {
            return Err(no_replica(&name));
        }
        tracing::info!(target: "audit", operator = call.scope.name, replica = name, verb, "admin API: carried out an operator's order");
        Ok(Response::new(api::ReplicaResponse {
            replica: self.overview().replica(&name),
        }))
    }

    /// Calls `act` with the CA of the tenant's trust domain, on a thread for blocking work. Records
    /// the outcome of the operator's call, and returns the state of the domain afterwards.
    async fn run_trust_order(
        &self,
        mut call: OperatorCall,
        tenant: &str,
        act: impl FnOnce(&TrustAuthorities, &DomainName) -> Result<String, TrustOperationError>
        + Send
        + 'static,
    ) -> Result<Response<api::TrustResponse>, Status> {
        let tenant = call.tenant_of(tenant)?;
        let catalog = self.catalog.borrow().clone();
        let domain = match components() {
            // Canal's own components. Only the provider gets here: `tenant_of` has refused this
            // name to a tenant's operator.
            (provider, domain) if tenant == provider => Some(domain),
            _ => catalog
                .tenants
                .get(&tenant)
                .and_then(|view| view.claims.isolation.as_ref())
                .map(|i| i.trust_domain.clone()),
        };
        let Some(domain) = domain else {
            call.set_outcome("missing");
            return Err(Status::not_found(format!(
                "there is no tenant {tenant} with a trust domain; fix: name one that `canal ca status` lists"
            )));
        };
        let (trust, name) = (self.trust.clone(), (tenant, domain));
        // The outcome, should the thread or the operator end before the order is carried out.
        call.set_outcome("canceled");
        // Signing and writing to disk block the thread.
        let order = tokio::task::spawn_blocking(move || {
            let result = act(&trust, &name);
            result.map(|note| api::TrustResponse {
                // The operator gave an order, and did not request the list of certificates.
                domains: vec![trust.status(&name, false, now_seconds())],
                note,
            })
        });
        // The thread panicked, or the runtime shuts down.
        let done = order
            .await
            .map_err(|_| Status::internal("the order could not be carried out; fix: try again"))?;
        match done {
            Ok(response) => {
                call.set_outcome("accepted");
                tracing::info!(target: "audit", operator = call.scope.name, verb = call.verb, note = response.note, "admin API: carried out an operator's order");
                Ok(Response::new(response))
            }
            Err(e) => {
                call.set_outcome(e.name());
                Err(match &e {
                    TrustOperationError::Store(store) => store_status(store),
                    TrustOperationError::Fault(
                        DomainError::UnknownSerial(_) | DomainError::NotBlocked(_),
                    ) => Status::not_found(e.to_string()),
                    TrustOperationError::Fault(_) => Status::failed_precondition(e.to_string()),
                })
            }
        }
    }

    /// Submits a write request to the change queue, and converts its outcome to a gRPC status.
    async fn write(
        &self,
        call: &mut OperatorCall,
        tenant: &str,
        request: WriteRequest,
        dry_run: bool,
    ) -> Result<ApplyOutcome, Status> {
        let tenant = call.tenant_of(tenant)?;
        if let WriteRequest::Apply(files) | WriteRequest::Diff(files) = &request
            && files.len() > FILES_MAX
        {
            self.metrics.refuse("files");
            return Err(Status::invalid_argument(format!(
                "{} files in one request; at most {FILES_MAX} are accepted; fix: send fewer at once",
                files.len()
            )));
        }
        // The request counts against the operator's share: the provider's requests do not use up
        // the tenant's.
        let holder = call
            .scope
            .tenant()
            .cloned()
            .map_or(ShareHolder::Provider, ShareHolder::Tenant);
        let write = QueuedWrite {
            tenant: tenant.clone(),
            request,
            is_provider: call.scope.is_provider(),
            dry_run,
            holder,
        };
        // The outcome, should the operator stop waiting for it.
        call.set_outcome("canceled");
        let outcome = self.changes.write(write).await.map_err(|e| {
            let (outcome, status) = match &e {
                WriteError::Store(store) => ("store", store_status(store)),
                WriteError::Busy { limit, .. } => {
                    (*limit, Status::resource_exhausted(e.to_string()))
                }
                WriteError::Moved => ("moved", Status::aborted(e.to_string())),
                WriteError::Stopping => ("stopping", Status::unavailable(e.to_string())),
            };
            call.set_outcome(outcome);
            status
        })?;
        call.set_outcome(if outcome.accepted {
            "accepted"
        } else {
            "refused"
        });
        // A dry run changes nothing, so there is nothing to audit.
        if !dry_run {
            tracing::info!(
                target: "audit", operator = call.scope.name, %tenant, verb = call.verb, accepted = outcome.accepted,
                generation = %outcome.generation, changes = outcome.changes.len(), findings = outcome.diagnostics.len(),
                "admin API: answered an operator's write request"
            );
        }
        Ok(outcome)
    }

    /// Returns the use of shared limits that the operator may see. A tenant's operator sees its own
    /// tenant's use. The provider sees the use of all tenants at the controller, and at data planes
    /// only the shares that are nearly full.
    fn shares(
        &self,
        operator: &OperatorScope,
        reports: &[(Principal, Arc<ShareReport>)],
    ) -> Vec<api::ShareUse> {
        let mut out = share_status::of_controller(&self.limits.usage(), operator);
        out.extend(share_status::of_data_planes(reports, operator));
        out
    }

    /// Returns the diagnostics of the sources of policy themselves, which only the provider sees.
    fn findings(&self, operator: &OperatorScope) -> Vec<api::Diagnostic> {
        if !operator.is_provider() {
            return Vec::new();
        }
        self.health.findings().iter().map(diagnostic).collect()
    }

    /// Lists the subscribers that the operator may see. A tenant's operator sees its tenant's nodes
    /// and key servers, and only the progress of the gateways that serve its tenant.
    fn visible_subscribers(
        &self,
        operator: &OperatorScope,
        catalog: &Catalog,
    ) -> Vec<api::Subscriber> {
        let is_served = |p: &Principal| {
            catalog
                .admitted(p)
                .any(|(tenant, _)| operator.may_see(tenant))
        };
        let is_visible = |p: &Principal| match p {
            Principal::Node { tenant, .. } => operator.may_see(tenant),
            Principal::Gateway { .. } => operator.is_provider() || is_served(p),
            Principal::Edge { .. } | Principal::KeyServer { tenant: None, .. } => {
                operator.is_provider()
            }
            Principal::KeyServer {
                tenant: Some(tenant),
                ..
            } => operator.may_see(tenant),
            Principal::Operator { .. } => false,
        };
        if operator.is_provider() {
            return self.subscribers.list(catalog, is_visible);
        }
        // A NACK text may name another tenant's objects, so a tenant's operator sees only refusals
        // of its own resources.
        let mut list = self
            .subscribers
            .list_for(catalog, is_visible, |tenant| operator.may_see(tenant));
        // A gateway's totals include its other tenants.
        for s in list.iter_mut().filter(|s| s.kind == "gateway") {
            (s.resources, s.bytes_sent, s.responses_sent) = (0, 0, 0);
        }
        list
    }
}

fn unknown_kind(word: &str) -> Status {
    let known = ObjectKind::ALL.map(ObjectKind::as_str).join(", ");
    Status::invalid_argument(format!(
        "the kind {word:?} is unknown; fix: use one of {known}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_no_absent_controller() {
        let full = StoreError::Disk {
            path: "/data/store".into(),
            why: "No space left on device".into(),
        };
        let status = store_status(&full);
        assert!(
            status.code() == Code::Internal && status.message().contains("free some space"),
            "{status}"
        );
        let limit = StoreError::Edits { edits: 2, limit: 1 };
        assert_eq!(store_status(&limit).code(), Code::ResourceExhausted);
    }
}
