//! Istio's certificate service: who may have which identity, and the audit line on each answer. What a certificate holds is
//! `canal-authority`'s, who signs it is `trust`'s; that a node runs a workload is the registry's.

use std::sync::Arc;

use canal_authority::{Refusal, decide_lifetime};
use canal_compiler::scope;
use canal_model::identity::{COMPONENTS, Identity, component_identity, components, gateway_identity};
use canal_model::ids::{ServiceKey, TenantName, TrustDomain};
use canal_model::principal::Principal;
use canal_model::program::{Kind, Resource};
use canal_model::trust::{KeyAlgorithm, KeyPlace, KeyPolicy};
use canal_runtime::ShareHolder;
use canal_wire::citadel::istio_certificate_service_server::IstioCertificateService;
use canal_wire::citadel::{IstioCertificateRequest, IstioCertificateResponse};
use prost_types::value::Kind as Value;
use tonic::{Code, Request, Response, Status};

use crate::catalog::{Catalog, TenantView};
use crate::metrics;
use crate::shared::Shared;
use crate::shares::holder_of;
use crate::trust::{Done, IssueError, Order};

/// The metadata field that names the identity asked for (istio/api security/v1alpha1, as ztunnel sends it).
const IMPERSONATED: &str = "ImpersonatedIdentity";
/// The metadata field that names the service whose host names the certificate is to have beside the gateway's identity.
const SERVICE: &str = "Service";

/// Why nobody may have the identity asked for. The texts say what would have to be so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Denied {
    #[error("metadata.{IMPERSONATED} is missing; name the identity, as in spiffe://<trust domain>/ns/<namespace>/sa/<service account>")]
    NoIdentity,
    #[error("{0}")]
    Form(String),
    #[error("an operator or an edge gets no identity; use a node's, a gateway's or a key server's token")]
    Operator,
    #[error("{0} belongs to no tenant that you serve")]
    TrustDomain(TrustDomain),
    #[error("{0} is the gateways' own identity, which no node gets")]
    Reserved(Identity),
    #[error("no pod with the identity {0} runs on your node, as far as the registry says; try again once the pod is registered")]
    NotOnNode(Identity),
    #[error("a gateway gets only {0}")]
    NotGateway(Identity),
    #[error("the tenant's sources cannot be read at the moment, so nobody can say what runs where; try again")]
    RegistryIncomplete,
    #[error(
        "the tenant's keys are in key servers, which alone get certificates of {0}; set spec.keys.fallback to Local to allow others too"
    )]
    KeysInKeyServer(TrustDomain),
    #[error("no entitlement of the tenant names {0}, or its keys are not in key servers; try again once the registry has it")]
    NotEntitled(Identity),
    #[error("{0} is a part of Canal that you are not; ask for your own")]
    NotComponent(Identity),
    #[error("metadata.{SERVICE}: {0}; write tenant/namespace/name")]
    ServiceForm(String),
    #[error("{0} is no service of the tenant")]
    ServiceUnknown(ServiceKey),
    #[error("host names of a service go with {0} only")]
    ServiceNotGateway(Identity),
}

impl Denied {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::NoIdentity => "no_identity",
            Self::Form(_) => "identity_form",
            Self::Operator => "operator",
            Self::TrustDomain(_) => "trust_domain",
            Self::Reserved(_) => "reserved",
            Self::NotOnNode(_) => "not_on_node",
            Self::NotGateway(_) => "not_gateway",
            Self::RegistryIncomplete => "registry_incomplete",
            Self::KeysInKeyServer(_) => "keys_in_key_server",
            Self::NotEntitled(_) => "not_entitled",
            Self::NotComponent(_) => "not_component",
            Self::ServiceForm(_) => "service_form",
            Self::ServiceUnknown(_) => "service_unknown",
            Self::ServiceNotGateway(_) => "service_not_gateway",
        }
    }

    fn code(&self) -> Code {
        match self {
            Self::NoIdentity | Self::Form(_) | Self::ServiceForm(_) | Self::ServiceNotGateway(_) => Code::InvalidArgument,
            Self::RegistryIncomplete => Code::Unavailable,
            _ => Code::PermissionDenied,
        }
    }
}

/// What a requester may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Grant {
    /// Its own identity as a part of Canal.
    Component(Identity),
    /// An identity of a tenant.
    Workload { tenant: TenantName, identity: Identity, names: Vec<String>, rsa: bool },
}

/// Whether `principal` may have the identity `asked`, with the host names of `service` if that is given.
pub(crate) fn decide_grant(catalog: &Catalog, principal: &Principal, asked: Option<&str>, service: Option<&str>) -> Result<Grant, Denied> {
    let asked = asked.filter(|a| !a.is_empty()).ok_or(Denied::NoIdentity)?;
    let asked: Identity = asked.parse().map_err(|e: canal_model::ids::IdError| Denied::Form(e.to_string()))?;
    if matches!(principal, Principal::Operator { .. } | Principal::Edge { .. }) {
        return Err(Denied::Operator);
    }
    // Before any tenant is looked at: no tenant may have this domain.
    if asked.trust_domain.as_str() == COMPONENTS {
        let is_own = service.is_none() && component_identity(principal).as_ref() == Some(&asked);
        return if is_own { Ok(Grant::Component(asked)) } else { Err(Denied::NotComponent(asked)) };
    }
    let own = catalog.admitted(principal).find(|(_, view)| {
        // A domain that two tenants claim belongs to neither until the compiler has settled it, so only live claims count.
        view.claims.isolation.as_ref().is_some_and(|i| i.trust_domain == asked.trust_domain)
    });
    let Some((tenant, view)) = own else {
        return Err(match principal {
            Principal::Node { tenant, .. } if catalog.tenants.get(tenant).is_some_and(|v| !v.complete) => Denied::RegistryIncomplete,
            _ => Denied::TrustDomain(asked.trust_domain),
        });
    };
    let keys = key_policy(view);
    decide_holder(catalog, view, principal, &asked, keys)?;
    let names = match service {
        Some(service) => decide_names(view, tenant, &asked, service)?,
        None => Vec::new(),
    };
    Ok(Grant::Workload { tenant: tenant.clone(), identity: asked, names, rsa: keys.algorithm == KeyAlgorithm::Rsa2048 })
}

/// Whether `principal` is one whom the identity belongs with.
fn decide_holder(catalog: &Catalog, view: &TenantView, principal: &Principal, asked: &Identity, keys: KeyPolicy) -> Result<(), Denied> {
    let gateway = gateway_identity(asked.trust_domain.clone());
    let is_gateways = *asked == gateway;
    let may_hold_keys = keys.place == KeyPlace::Local || keys.local_fallback;
    match principal {
        Principal::Gateway { .. } if !is_gateways => Err(Denied::NotGateway(gateway)),
        Principal::Node { .. } if is_gateways => Err(Denied::Reserved(gateway)),
        Principal::Node { name, .. } if !view.runs(name, asked) && !view.complete => Err(Denied::RegistryIncomplete),
        Principal::Node { name, .. } if !view.runs(name, asked) => Err(Denied::NotOnNode(asked.clone())),
        Principal::Gateway { .. } | Principal::Node { .. } if may_hold_keys => Ok(()),
        Principal::Gateway { .. } | Principal::Node { .. } => Err(Denied::KeysInKeyServer(asked.trust_domain.clone())),
        // The provider's key servers hold only what tenants put there.
        Principal::KeyServer { tenant: None, .. } if keys.place != KeyPlace::KeyServer => Err(Denied::NotEntitled(asked.clone())),
        Principal::KeyServer { .. } => {
            let mut told = view.of(Kind::Entitlement).filter(|e| scope::visible(&e.resource, principal, &catalog.whereabouts));
            let is_entitled = told.any(|e| matches!(&e.resource, Resource::Entitlement(e) if e.identities.contains(asked)));
            match is_entitled {
                true => Ok(()),
                false if !view.complete => Err(Denied::RegistryIncomplete),
                false => Err(Denied::NotEntitled(asked.clone())),
            }
        }
        Principal::Operator { .. } | Principal::Edge { .. } => Err(Denied::Operator),
    }
}

/// How the tenant's keys are kept.
pub(crate) fn key_policy(view: &TenantView) -> KeyPolicy {
    let tenant = view.of(Kind::Tenant).find_map(|e| match &e.resource {
        Resource::Tenant(tenant) => Some(tenant.keys),
        _ => None,
    });
    tenant.unwrap_or_default()
}

/// The host names by which clients know a service: its full one, and shorter ones as resolvers complete them.
fn decide_names(view: &TenantView, tenant: &TenantName, asked: &Identity, service: &str) -> Result<Vec<String>, Denied> {
    let gateway = gateway_identity(asked.trust_domain.clone());
    if *asked != gateway {
        return Err(Denied::ServiceNotGateway(gateway));
    }
    let key: ServiceKey = service.parse().map_err(|e: canal_model::ids::IdError| Denied::ServiceForm(e.to_string()))?;
    let found = view.of(Kind::Service).find_map(|e| match &e.resource {
        Resource::Service(s) if s.key == key && key.tenant == *tenant => Some(s.hostname.clone()),
        _ => None,
    });
    let hostname = found.ok_or_else(|| Denied::ServiceUnknown(key.clone()))?;
    let (name, namespace) = (&key.name, &key.namespace);
    Ok(vec![hostname, format!("{name}.{namespace}.svc"), format!("{name}.{namespace}"), name.to_string()])
}

pub(crate) struct Certificates {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl IstioCertificateService for Certificates {
    async fn create_certificate(&self, request: Request<IstioCertificateRequest>) -> Result<Response<IstioCertificateResponse>, Status> {
        let caller = self.shared.caller(&request)?;
        let request = request.into_inner();
        let (asked, service) = (field(&request, IMPERSONATED), field(&request, SERVICE));
        let catalog = self.shared.catalog.borrow().clone();
        let grant = decide_grant(&catalog, &caller.principal, asked.as_deref(), service.as_deref()).map_err(|denied| {
            self.refused(&caller.principal, asked.as_deref(), denied.name(), &denied.to_string());
            Status::new(denied.code(), denied.to_string())
        })?;
        let lifetime = decide_lifetime(request.validity_duration, self.shared.limits.svid_seconds);
        let (tenant, identity, names, rsa) = match grant {
            Grant::Component(identity) => (components().0, identity, Vec::new(), false),
            Grant::Workload { tenant, identity, names, rsa } => (tenant, identity, names, rsa),
        };
        let (csr, holder) = (request.csr, caller.principal.to_string());
        let rate = match holder_of(&caller.principal) {
            ShareHolder::Provider => self.shared.limits.provider_rate,
            _ => self.shared.limits.tenant_rate,
        };
        let order = Order { tenant, identity: identity.clone(), names, rsa, csr, lifetime_seconds: lifetime, holder, rate };
        let made = self.shared.trust.issue(order).await;
        let Done { chain, serial, not_after } = made.map_err(|e| self.failed(&caller.principal, &identity, &e))?;
        let kind = crate::principal_name(&caller.principal);
        self.shared.metrics.count(metrics::CERTIFICATES_ISSUED, &[("to", kind)]);
        let service = service.unwrap_or_default();
        tracing::info!(target: "audit", to = %caller.principal, %identity, service, serial, not_after, "issued a certificate");
        Ok(Response::new(IstioCertificateResponse { cert_chain: chain }))
    }
}

impl Certificates {
    fn failed(&self, principal: &Principal, identity: &Identity, e: &IssueError) -> Status {
        let code = match e {
            IssueError::Store(s) => {
                self.shared.metrics.count(metrics::STORE_ERRORS, &[("reason", s.name())]);
                Code::Unavailable
            }
            IssueError::Refused(Refusal::Signing(_) | Refusal::RootEnded(_)) | IssueError::Task => Code::Internal,
            IssueError::Refused(_) => Code::InvalidArgument,
            IssueError::Barred(_) => Code::PermissionDenied,
            IssueError::Files(_) | IssueError::External(_) | IssueError::Answer(_) => Code::Unavailable,
            IssueError::Ledger(_) | IssueError::Rate(..) => Code::ResourceExhausted,
        };
        self.refused(principal, Some(&identity.to_string()), e.name(), &e.to_string());
        Status::new(code, e.to_string())
    }

    fn refused(&self, principal: &Principal, asked: Option<&str>, name: &str, why: &str) {
        self.shared.metrics.count(metrics::CERTIFICATES_REFUSED, &[("reason", name)]);
        let asked: String = asked.unwrap_or_default().chars().take(300).collect();
        tracing::warn!(target: "audit", to = %principal, asked, reason = name, why, "refused a certificate");
    }
}

fn field(request: &IstioCertificateRequest, name: &str) -> Option<String> {
    match request.metadata.as_ref()?.fields.get(name)?.kind.as_ref()? {
        Value::StringValue(s) => Some(s.clone()),
        _ => None,
    }
}
