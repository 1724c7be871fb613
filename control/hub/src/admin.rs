//! The operators' API: who may ask for what, and the answers' form. What a wish does is `apply`, who does it is `writer`.

use std::sync::Arc;

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::identity::{Identity, components};
use canal_model::ids::{IdError, ReplicaName, ServiceKey, TenantName};
use canal_model::policy::ObjectKind;
use canal_model::principal::Principal;
use canal_model::program::Kind;
use canal_runtime::ShareHolder;
use canal_store::{DomainName, StoreError};
use canal_wire::api;
use canal_wire::api::admin_server::Admin;
use tonic::{Request, Response, Status};

use crate::apply::Wish;
use crate::catalog::{Catalog, Listed, TenantView};
use crate::changes::{Outcome, WishError, WishRequest};
use crate::fleet::{Overview, ShareReport};
use crate::metrics;
use crate::share_status;
use crate::shared::{Shared, now_seconds};
use crate::trust::{OrderError, OrderFault, Target, Trust};

/// Files in one Apply or Diff.
pub const FILES_MAX: usize = 4096;

pub(crate) struct AdminService {
    pub(crate) shared: Arc<Shared>,
}

/// An operator and what it may see.
pub(crate) struct Operator {
    name: String,
    /// `None`: the provider, who may touch all.
    tenant: Option<TenantName>,
}

impl Operator {
    #[cfg(test)]
    pub(crate) fn of_test(tenant: Option<&str>) -> Self {
        Self { name: "test".into(), tenant: tenant.map(|tenant| tenant.parse().unwrap()) }
    }

    pub(crate) fn is_provider(&self) -> bool {
        self.tenant.is_none()
    }

    pub(crate) fn may_see(&self, tenant: &TenantName) -> bool {
        self.tenant.as_ref().is_none_or(|own| own == tenant)
    }

    /// The tenant a request is about. Whether a foreign tenant exists is nobody's business.
    fn tenant_of(&self, named: &str) -> Result<TenantName, Status> {
        match (&self.tenant, named) {
            (Some(own), "") => Ok(own.clone()),
            (Some(own), named) if own.as_str() == named => Ok(own.clone()),
            (Some(own), _) => Err(Status::permission_denied(format!("this token is for tenant {own} only"))),
            (None, "") => Err(Status::invalid_argument("name the tenant")),
            (None, named) => TenantName::new(named).map_err(|e| Status::invalid_argument(e.to_string())),
        }
    }
}

#[tonic::async_trait]
impl Admin for AdminService {
    async fn apply(&self, request: Request<api::ApplyRequest>) -> Result<Response<api::ApplyResponse>, Status> {
        let operator = self.operator("apply", &request)?;
        let api::ApplyRequest { tenant, files, dry_run } = request.into_inner();
        let outcome = self.wish("apply", &operator, &tenant, Wish::Apply(files), dry_run).await?;
        Ok(Response::new(api::ApplyResponse {
            accepted: outcome.accepted,
            generation: outcome.generation.0,
            changes: if outcome.accepted { without_text(outcome.changes) } else { Vec::new() },
            diagnostics: outcome.diagnostics.iter().map(diagnostic).collect(),
        }))
    }

    async fn diff(&self, request: Request<api::ApplyRequest>) -> Result<Response<api::DiffResponse>, Status> {
        let operator = self.operator("diff", &request)?;
        let api::ApplyRequest { tenant, files, .. } = request.into_inner();
        let outcome = self.wish("diff", &operator, &tenant, Wish::Apply(files), true).await?;
        Ok(Response::new(api::DiffResponse { changes: outcome.changes, diagnostics: outcome.diagnostics.iter().map(diagnostic).collect() }))
    }

    async fn delete(&self, request: Request<api::DeleteRequest>) -> Result<Response<api::DeleteResponse>, Status> {
        let operator = self.operator("delete", &request)?;
        let api::DeleteRequest { tenant, objects, ignore_missing, all } = request.into_inner();
        let wish = match all {
            false => Wish::Delete { objects, ignore_missing },
            true if objects.is_empty() => Wish::DeleteAll,
            true => return Err(Status::invalid_argument("the request names objects and says all; fix: send one of both")),
        };
        let outcome = self.wish("delete", &operator, &tenant, wish, false).await?;
        Ok(Response::new(api::DeleteResponse {
            accepted: outcome.accepted,
            generation: outcome.generation.0,
            changes: if outcome.accepted { without_text(outcome.changes) } else { Vec::new() },
            diagnostics: outcome.diagnostics.iter().map(diagnostic).collect(),
        }))
    }

    async fn get(&self, request: Request<api::GetRequest>) -> Result<Response<api::GetResponse>, Status> {
        let operator = self.operator("get", &request)?;
        let request = request.into_inner();
        let tenant = operator.tenant_of(&request.tenant).inspect_err(|_| self.shared.refuse("foreign_tenant"))?;
        let kind = match request.kind.as_str() {
            "" => None,
            word => Some(ObjectKind::from_word(word).ok_or_else(|| unknown_kind(word))?),
        };
        let catalog = self.shared.catalog.borrow().clone();
        let view = catalog.tenants.get(&tenant).ok_or_else(|| Status::not_found(format!("there is no tenant {tenant}")))?;
        let is_wanted = |l: &&Listed| {
            let key = l.document.object.key();
            kind.is_none_or(|k| k == key.kind)
                && (request.namespace.is_empty() || request.namespace == key.namespace.as_str())
                && (request.name.is_empty() || request.name == key.name.as_str())
        };
        let mut objects: Vec<api::Object> = view.objects.iter().filter(is_wanted).map(|l| object(l, view)).collect();
        objects.sort_by(|a, b| (&a.kind, &a.namespace, &a.name).cmp(&(&b.kind, &b.namespace, &b.name)));
        self.done("get", "accepted");
        Ok(Response::new(api::GetResponse { objects }))
    }

    async fn status(&self, request: Request<api::StatusRequest>) -> Result<Response<api::StatusResponse>, Status> {
        let operator = self.operator("status", &request)?;
        let catalog = self.shared.catalog.borrow().clone();
        let tenants = catalog.tenants.iter().filter(|(name, _)| operator.may_see(name));
        let reports = self.shared.subscribers.share_reports();
        let response = api::StatusResponse {
            generation: catalog.generation.0,
            version: env!("CARGO_PKG_VERSION").into(),
            store: self.shared.store.id().to_string(),
            subscribers: self.subscribers(&operator, &catalog),
            shares: self.shares(&operator, &reports),
            tenants: tenants.clone().map(|(name, view)| tenant_status(name, view)).collect(),
            diagnostics: self
                .findings(&operator)
                .into_iter()
                .chain(tenants.flat_map(|(_, v)| v.diagnostics.iter().map(diagnostic)))
                .chain(share_status::omissions(&reports, &operator))
                .collect(),
        };
        self.done("status", "accepted");
        Ok(Response::new(response))
    }

    async fn fleet(&self, request: Request<api::FleetRequest>) -> Result<Response<api::FleetResponse>, Status> {
        let operator = self.operator("fleet", &request)?;
        let overview = self.overview();
        self.done("fleet", "accepted");
        Ok(Response::new(overview.whole(operator.is_provider(), |tenant| operator.may_see(tenant))))
    }

    async fn drain_replica(&self, request: Request<api::ReplicaRequest>) -> Result<Response<api::ReplicaResponse>, Status> {
        self.order("drain", request, |shared, name| shared.fleet.order_drain(&shared.store, name, true)).await
    }

    async fn undrain_replica(&self, request: Request<api::ReplicaRequest>) -> Result<Response<api::ReplicaResponse>, Status> {
        self.order("undrain", request, |shared, name| shared.fleet.order_drain(&shared.store, name, false)).await
    }

    async fn forget_replica(&self, request: Request<api::ReplicaRequest>) -> Result<Response<api::ReplicaResponse>, Status> {
        let name = request.get_ref().name.clone();
        self.provider("forget", &request)?;
        let known = parsed::<ReplicaName>(&name)?;
        match self.shared.fleet.declare_gone(&known) {
            None => Err(no_replica(&name)),
            Some(false) => {
                self.done("forget", "refused");
                Err(Status::failed_precondition(format!("{name} was heard a moment ago; drain it and end its process first")))
            }
            Some(true) => {
                self.done("forget", "accepted");
                tracing::info!(target: "audit", replica = name, "an operator declared the replica gone");
                Ok(Response::new(api::ReplicaResponse { replica: self.overview().replica(&name) }))
            }
        }
    }

    async fn explain_service(&self, request: Request<api::ExplainRequest>) -> Result<Response<api::ExplainResponse>, Status> {
        let operator = self.operator("explain", &request)?;
        let key = parsed::<ServiceKey>(&request.get_ref().service)?;
        operator.tenant_of(key.tenant.as_str()).inspect_err(|_| self.shared.refuse("foreign_tenant"))?;
        let explained = self.overview().explain(&key, operator.is_provider());
        self.done("explain", if explained.is_some() { "accepted" } else { "missing" });
        explained.map(Response::new).ok_or_else(|| Status::not_found(format!("the cloud tier has no service {key}")))
    }

    async fn trust(&self, request: Request<api::TrustRequest>) -> Result<Response<api::TrustResponse>, Status> {
        let operator = self.operator("ca_status", &request)?;
        let request = request.into_inner();
        let only = match request.tenant.as_str() {
            "" => None,
            named => Some(operator.tenant_of(named).inspect_err(|_| self.shared.refuse("foreign_tenant"))?),
        };
        let catalog = self.shared.catalog.borrow().clone();
        let seen = catalog.tenants.iter().filter(|(name, _)| operator.may_see(name) && only.as_ref().is_none_or(|o| o == *name));
        let domains = seen.filter_map(|(name, view)| Some((name.clone(), view.claims.isolation.as_ref()?.trust_domain.clone())));
        let own = Some(components()).filter(|own| operator.is_provider() && only.as_ref().is_none_or(|o| *o == own.0));
        let domains = domains.chain(own);
        let now = now_seconds();
        let domains = domains.map(|name| self.shared.trust.status(&name, request.certificates, now)).collect();
        self.done("ca_status", "accepted");
        Ok(Response::new(api::TrustResponse { domains, note: String::new() }))
    }

    async fn rotate_root(&self, request: Request<api::RotateRequest>) -> Result<Response<api::TrustResponse>, Status> {
        let operator = self.operator("ca_rotate", &request)?;
        let request = request.into_inner();
        let act = move |trust: &Trust, name: &DomainName| trust.rotate(name, request.force).map(str::to_string);
        self.on_trust("ca_rotate", &operator, &request.tenant, act).await
    }

    async fn revoke(&self, request: Request<api::RevokeRequest>) -> Result<Response<api::TrustResponse>, Status> {
        let operator = self.operator("ca_revoke", &request)?;
        let request = request.into_inner();
        let target = match (request.identity.as_str(), request.serial.as_str()) {
            ("", "") => return Err(Status::invalid_argument("name an identity or a serial")),
            (identity, "") => Target::Identity(parsed::<Identity>(identity)?),
            ("", serial) => Target::Serial(serial.trim_start_matches("0x").replace(':', "").to_ascii_lowercase()),
            _ => return Err(Status::invalid_argument("name an identity or a serial, not both")),
        };
        self.on_trust("ca_revoke", &operator, &request.tenant, move |trust, name| match &target {
            Target::Identity(identity) if identity.trust_domain != name.1 => {
                Err(OrderFault::Foreign(identity.clone(), name.1.clone()).into())
            }
            _ => trust.revoke(name, &target),
        })
        .await
    }

    async fn restore(&self, request: Request<api::RevokeRequest>) -> Result<Response<api::TrustResponse>, Status> {
        let operator = self.operator("ca_restore", &request)?;
        let request = request.into_inner();
        let identity = parsed::<Identity>(&request.identity)?;
        self.on_trust("ca_restore", &operator, &request.tenant, move |trust, name| trust.restore(name, &identity)).await
    }
}

fn parsed<T: std::str::FromStr<Err = IdError>>(text: &str) -> Result<T, Status> {
    text.parse().map_err(|e: IdError| Status::invalid_argument(e.to_string()))
}

fn no_replica(name: &str) -> Status {
    Status::not_found(format!("no replica {name} is registered"))
}

impl AdminService {
    fn operator<T>(&self, verb: &'static str, request: &Request<T>) -> Result<Operator, Status> {
        let caller = self.shared.caller(request)?;
        match caller.principal {
            Principal::Operator { name, tenant } => Ok(Operator { name: name.to_string(), tenant }),
            other => {
                self.done(verb, "denied");
                self.shared.refuse("not_an_operator");
                Err(Status::permission_denied(format!("{other} is not an operator; use an operator's token")))
            }
        }
    }

    /// A request that only the provider may make.
    fn provider<T>(&self, verb: &'static str, request: &Request<T>) -> Result<Operator, Status> {
        let operator = self.operator(verb, request)?;
        if operator.is_provider() {
            return Ok(operator);
        }
        self.done(verb, "denied");
        self.shared.refuse("not_the_provider");
        Err(Status::permission_denied("only the provider's operators may do this: the tier serves all tenants"))
    }

    fn overview(&self) -> Overview {
        Overview::of(&self.shared.fleet, &self.shared.catalog.borrow().clone())
    }

    /// Carries out an order on one replica; `act` says whether there is such a replica.
    async fn order(
        &self,
        verb: &'static str,
        request: Request<api::ReplicaRequest>,
        act: impl FnOnce(&Shared, &ReplicaName) -> Result<bool, StoreError> + Send + 'static,
    ) -> Result<Response<api::ReplicaResponse>, Status> {
        let operator = self.provider(verb, &request)?;
        let name = request.into_inner().name;
        let (shared, replica) = (self.shared.clone(), parsed::<ReplicaName>(&name)?);
        // The order is on disk before it is acknowledged.
        let done = tokio::task::spawn_blocking(move || act(&shared, &replica)).await;
        let is_there = done.map_err(|_| Status::internal("the order could not be kept; try again"))?;
        let is_there = is_there.map_err(|e| {
            self.done(verb, "store");
            Status::unavailable(e.to_string())
        })?;
        self.done(verb, if is_there { "accepted" } else { "missing" });
        if !is_there {
            return Err(no_replica(&name));
        }
        tracing::info!(target: "audit", operator = operator.name, replica = name, verb, "an operator's order");
        Ok(Response::new(api::ReplicaResponse { replica: self.overview().replica(&name) }))
    }

    /// Carries out an order on a tenant's authority.
    async fn on_trust(
        &self,
        verb: &'static str,
        operator: &Operator,
        tenant: &str,
        act: impl FnOnce(&Trust, &DomainName) -> Result<String, OrderError> + Send + 'static,
    ) -> Result<Response<api::TrustResponse>, Status> {
        let tenant = operator.tenant_of(tenant).inspect_err(|_| {
            self.done(verb, "denied");
            self.shared.refuse("foreign_tenant");
        })?;
        let catalog = self.shared.catalog.borrow().clone();
        let domain = match components() {
            // A tenant's operator has no other name than its own accepted above.
            (provider, domain) if tenant == provider => Some(domain),
            _ => catalog.tenants.get(&tenant).and_then(|view| view.claims.isolation.as_ref()).map(|i| i.trust_domain.clone()),
        };
        let Some(domain) = domain else {
            self.done(verb, "missing");
            return Err(Status::not_found(format!("there is no tenant {tenant} with a trust domain")));
        };
        let (shared, name) = (self.shared.clone(), (tenant, domain));
        let order = tokio::task::spawn_blocking(move || {
            let said = act(&shared.trust, &name);
            said.map(|note| api::TrustResponse { domains: vec![shared.trust.status(&name, false, now_seconds())], note })
        });
        let done = order.await.map_err(|_| Status::internal("the order could not be carried out; try again"))?;
        match done {
            Ok(response) => {
                self.done(verb, "accepted");
                tracing::info!(target: "audit", operator = operator.name, verb, note = response.note, "an operator's order");
                Ok(Response::new(response))
            }
            Err(e) => {
                self.done(verb, e.name());
                Err(match &e {
                    OrderError::Store(_) => Status::unavailable(e.to_string()),
                    OrderError::Fault(OrderFault::UnknownSerial(_) | OrderFault::NotBarred(_)) => Status::not_found(e.to_string()),
                    OrderError::Fault(_) => Status::failed_precondition(e.to_string()),
                })
            }
        }
    }

    async fn wish(&self, verb: &'static str, operator: &Operator, tenant: &str, wish: Wish, dry_run: bool) -> Result<Outcome, Status> {
        let tenant = operator.tenant_of(tenant).inspect_err(|_| {
            self.done(verb, "denied");
            self.shared.refuse("foreign_tenant");
        })?;
        if let Wish::Apply(files) = &wish
            && files.len() > FILES_MAX
        {
            self.shared.refuse("files");
            return Err(Status::invalid_argument(format!("{} files in one request, at most {FILES_MAX} are taken", files.len())));
        }
        let holder = operator.tenant.clone().map_or(ShareHolder::Provider, ShareHolder::Tenant);
        let request = WishRequest { tenant: tenant.clone(), wish, is_provider: operator.is_provider(), dry_run, holder };
        let outcome = self.shared.changes.wish(request).await.map_err(|e| {
            let (outcome, is_limit) = match &e {
                WishError::Store(store) => ("store", store.is_limit()),
                WishError::Busy { limit, .. } => (*limit, true),
                WishError::Moved => ("moved", false),
                WishError::Stopping => ("stopping", false),
            };
            self.done(verb, outcome);
            if is_limit { Status::resource_exhausted(e.to_string()) } else { Status::unavailable(e.to_string()) }
        })?;
        self.done(verb, if outcome.accepted { "accepted" } else { "refused" });
        if !dry_run {
            tracing::info!(
                target: "audit", operator = operator.name, %tenant, verb, accepted = outcome.accepted, generation = %outcome.generation,
                changes = outcome.changes.len(), findings = outcome.diagnostics.len(), "an operator's wish"
            );
        }
        Ok(outcome)
    }

    /// A tenant's operator sees what its tenant holds of each limit, the provider what everybody holds at the controller and where it is
    /// tight at data planes.
    fn shares(&self, operator: &Operator, reports: &[(Principal, Arc<ShareReport>)]) -> Vec<api::ShareUse> {
        let mut out = share_status::of_controller(&self.shared.tenant_limits.usage(), operator);
        out.extend(share_status::of_data_planes(reports, operator));
        out
    }

    /// What is wrong with the configuration directory concerns the provider only.
    fn findings(&self, operator: &Operator) -> Vec<api::Diagnostic> {
        let sources = self.shared.sources.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        sources.findings.iter().filter(|_| operator.is_provider()).map(diagnostic).collect()
    }

    fn done(&self, verb: &str, outcome: &str) {
        self.shared.metrics.count(metrics::API_REQUESTS, &[("verb", verb), ("outcome", outcome)]);
    }

    /// A tenant's operator sees its own nodes, and of the gateways that serve it only how far they are.
    fn subscribers(&self, operator: &Operator, catalog: &Catalog) -> Vec<api::Subscriber> {
        let is_served = |p: &Principal| catalog.admitted(p).any(|(tenant, _)| operator.may_see(tenant));
        let is_visible = |p: &Principal| match p {
            Principal::Node { tenant, .. } => operator.may_see(tenant),
            Principal::Gateway { .. } => operator.is_provider() || is_served(p),
            Principal::Edge { .. } | Principal::KeyServer { tenant: None, .. } => operator.is_provider(),
            Principal::KeyServer { tenant: Some(tenant), .. } => operator.may_see(tenant),
            Principal::Operator { .. } => false,
        };
        if operator.is_provider() {
            return self.shared.subscribers.list(catalog, is_visible);
        }
        // A whole reason may name another tenant's objects: of refusals an operator is told its own.
        let mut list = self.shared.subscribers.list_for(catalog, is_visible, |tenant| operator.may_see(tenant));
        for s in list.iter_mut().filter(|s| s.kind == "gateway") {
            (s.resources, s.bytes_sent, s.responses_sent) = (0, 0, 0);
        }
        list
    }
}

fn unknown_kind(word: &str) -> Status {
    let known = ObjectKind::ALL.map(ObjectKind::as_str).join(", ");
    Status::invalid_argument(format!("the kind {word:?} is not known; known are {known}"))
}

fn without_text(changes: Vec<api::Change>) -> Vec<api::Change> {
    changes.into_iter().map(|c| api::Change { diff: String::new(), ..c }).collect()
}

fn object(l: &Listed, view: &TenantView) -> api::Object {
    let key = l.document.object.key();
    let findings = view.diagnostics.iter().filter(|d| d.object.as_ref() == Some(&key));
    api::Object {
        api_version: api_version(l),
        kind: key.kind.to_string(),
        namespace: key.namespace.to_string(),
        name: key.name.to_string(),
        origin: l.file.as_ref().map_or_else(|| "api".into(), ToString::to_string),
        yaml: l.document.text.to_string(),
        diagnostics: findings.map(diagnostic).collect(),
    }
}

/// As written; the typed object does not keep it.
fn api_version(l: &Listed) -> String {
    let written = l.document.text.lines().find_map(|line| line.strip_prefix("apiVersion:"));
    let written = written.map(|v| v.trim().trim_matches(['"', '\'']).to_string()).filter(|v| !v.is_empty());
    written.unwrap_or_else(|| l.document.object.kind().api_versions()[0].into())
}

pub(crate) fn diagnostic(d: &Diagnostic) -> api::Diagnostic {
    let (file, line, column) = d.origin.as_ref().map(|o| (o.file.to_string(), o.line, o.column)).unwrap_or_default();
    api::Diagnostic {
        severity: match d.severity {
            Severity::Error => api::Severity::Error,
            Severity::Warning => api::Severity::Warning,
        }
        .into(),
        file,
        line,
        column,
        object: d.object.as_ref().map(ToString::to_string).unwrap_or_default(),
        field: d.field.clone(),
        problem: d.problem.clone(),
        mend: d.mend.clone(),
    }
}

fn tenant_status(name: &TenantName, view: &TenantView) -> api::TenantStatus {
    use canal_model::program::{OutsideMesh, Resource};
    let ready = view.of(Kind::Workload).filter(|e| matches!(&e.resource, Resource::Workload(w) if w.ready)).count();
    let findings = |severity| view.diagnostics.iter().filter(|d| d.severity == severity).count() as u64;
    api::TenantStatus {
        tenant: name.to_string(),
        services: view.count(Kind::Service) as u64,
        workloads: view.count(Kind::Workload) as u64,
        workloads_ready: ready as u64,
        routes: view.count(Kind::Route) as u64,
        errors: findings(Severity::Error),
        warnings: findings(Severity::Warning),
        outside_passes: view.of(Kind::Tenant).any(|e| matches!(&e.resource, Resource::Tenant(t) if t.outside == OutsideMesh::Passthrough)),
    }
}
