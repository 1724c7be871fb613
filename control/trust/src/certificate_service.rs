//! Istio's certificate service: decides which principal may have which identity, and writes the
//! audit line of each response. `canal-ca` decides what a certificate contains, and `trust` which
//! CA signs it. Which workloads run on a node comes from the catalog. Start at [`decide_grant`].

use std::sync::Arc;

use canal_access::{AuthenticatedClient, holder_of, principal_name};
use canal_ca::{CsrError, decide_lifetime};
use canal_catalog::{Catalog, TenantCatalog};
use canal_compiler::scope;
use canal_controller_metrics::{self as metrics, ControllerMetrics};
use canal_model::identity::{
    COMPONENTS, Identity, component_identity, components, gateway_identity,
};
use canal_model::ids::{ServiceKey, TenantName, TrustDomain};
use canal_model::principal::Principal;
use canal_model::program::{Resource, ResourceKind};
use canal_model::trust::{KeyAlgorithm, KeyLocation, KeyPolicy};
use canal_runtime::ShareHolder;
use canal_wire::citadel::istio_certificate_service_server::IstioCertificateService;
use canal_wire::citadel::{IstioCertificateRequest, IstioCertificateResponse};
use prost_types::value::Kind as Value;
use tokio::sync::watch;
use tonic::{Code, Request, Response, Status};

use crate::authorities::{
    CertificateRate, IssuanceRequest, IssueError, IssuedChain, TrustAuthorities,
};

/// Metadata field with the requested identity (istio/api security/v1alpha1, as ztunnel sends it).
const IMPERSONATED: &str = "ImpersonatedIdentity";
/// Metadata field with the service whose host names the certificate contains besides the gateway's
/// identity.
const SERVICE: &str = "Service";

/// Reason why a principal may not have the requested identity. Each text states the condition that
/// the request violates.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum IdentityDenied {
    #[error(
        "metadata.{IMPERSONATED} is missing; fix: name the identity, as in spiffe://<trust domain>/ns/<namespace>/sa/<service account>"
    )]
    NoIdentity,
    #[error("{0}")]
    Form(String),
    #[error(
        "an operator or an edge gets no identity; fix: use a node's, a gateway's or a key server's token"
    )]
    Operator,
    #[error(
        "{0} belongs to no tenant that you serve; fix: request an identity of a tenant with pods on your node or services on your gateway"
    )]
    TrustDomain(TrustDomain),
    #[error(
        "{0} is the gateways' own identity, which nodes cannot get; fix: give the pod another service account"
    )]
    Reserved(Identity),
    #[error(
        "no pod with the identity {0} runs on your node according to the registry; fix: try again once the pod is registered"
    )]
    NotOnNode(Identity),
    #[error("a gateway gets only {0}; fix: request that identity")]
    NotGateway(Identity),
    #[error(
        "the tenant's sources cannot be read at the moment, so the controller does not know which pods run on your node; fix: try again"
    )]
    RegistryIncomplete,
    #[error(
        "the tenant's keys are in key servers, so only key servers get certificates of {0}; fix: set spec.keys.fallback to Local to allow others too"
    )]
    KeysInKeyServer(TrustDomain),
    #[error(
        "no entitlement of the tenant names {0}, or its keys are not in key servers; fix: try again once the registry has it"
    )]
    NotEntitled(Identity),
    #[error("{0} is the identity of another component of Canal; fix: request your own")]
    NotComponent(Identity),
    #[error("metadata.{SERVICE}: {0}")]
    ServiceForm(String),
    #[error("{0} is not a service of the tenant; fix: name one of its services")]
    ServiceUnknown(ServiceKey),
    #[error(
        "only {0} may get a certificate with host names of a service; fix: request that identity"
    )]
    ServiceNotGateway(Identity),
}

impl IdentityDenied {
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
            Self::NoIdentity
            | Self::Form(_)
            | Self::ServiceForm(_)
            | Self::ServiceNotGateway(_) => Code::InvalidArgument,
            Self::RegistryIncomplete => Code::Unavailable,
            _ => Code::PermissionDenied,
        }
    }
}

/// The certificate that a principal may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CertificateGrant {
    /// The principal's own identity as a component of Canal.
    Component(Identity),
    /// An identity of a tenant's workload, or the gateways' identity in the tenant.
    Workload {
        tenant: TenantName,
        identity: Identity,
        names: Vec<String>,
        rsa: bool,
    },
}

/// Decides whether `principal` may have the identity `requested`, with the host names of `service`
/// if one is given.
pub(crate) fn decide_grant(
    catalog: &Catalog,
    principal: &Principal,
    requested: Option<&str>,
    service: Option<&str>,
) -> Result<CertificateGrant, IdentityDenied> {
    let requested = requested
        .filter(|a| !a.is_empty())
        .ok_or(IdentityDenied::NoIdentity)?;
    let requested: Identity = requested
        .parse()
        .map_err(|e: canal_model::ids::IdError| IdentityDenied::Form(e.to_string()))?;
    // An edge only forwards packets, and an operator is no data plane, so neither needs an
    // identity.
    if matches!(
        principal,
        Principal::Operator { .. } | Principal::Edge { .. }
    ) {
        return Err(IdentityDenied::Operator);
    }
    // No tenant may have the trust domain of Canal's components, so it is checked before the
    // tenants'.
    if requested.trust_domain.as_str() == COMPONENTS {
        let is_own =
            service.is_none() && component_identity(principal).as_ref() == Some(&requested);
        return if is_own {
            Ok(CertificateGrant::Component(requested))
        } else {
            Err(IdentityDenied::NotComponent(requested))
        };
    }
    let own = catalog.admitted(principal).find(|(_, view)| {
        // Only claims in force count. A tenant that claims the trust domain of another one is
        // withheld, so at most one view has it.
        view.claims
            .isolation
            .as_ref()
            .is_some_and(|i| i.trust_domain == requested.trust_domain)
    });
    let Some((tenant, view)) = own else {
        return Err(match principal {
            // The trust domain may be in a source that was not read yet.
            Principal::Node { tenant, .. }
                if catalog.tenants.get(tenant).is_some_and(|v| !v.complete) =>
            {
                IdentityDenied::RegistryIncomplete
            }
            // No tenant has the trust domain, or the caller does not serve its tenant.
            _ => IdentityDenied::TrustDomain(requested.trust_domain),
        });
    };
    let keys = key_policy(view);
    decide_holder(catalog, view, principal, &requested, keys)?;
    let names = match service {
        Some(service) => decide_names(view, tenant, &requested, service)?,
        None => Vec::new(),
    };
    Ok(CertificateGrant::Workload {
        tenant: tenant.clone(),
        identity: requested,
        names,
        rsa: keys.algorithm == KeyAlgorithm::Rsa2048,
    })
}

/// Decides whether `principal` may hold a certificate of the identity.
fn decide_holder(
    catalog: &Catalog,
    view: &TenantCatalog,
    principal: &Principal,
    requested: &Identity,
    keys: KeyPolicy,
) -> Result<(), IdentityDenied> {
    let gateway = gateway_identity(requested.trust_domain.clone());
    let is_gateways = *requested == gateway;
    // With keys in key servers, gateways and nodes hold keys only as a local fallback.
    let may_hold_keys = keys.location == KeyLocation::Local || keys.local_fallback;
    match principal {
        Principal::Gateway { .. } if !is_gateways => Err(IdentityDenied::NotGateway(gateway)),
        Principal::Node { .. } if is_gateways => Err(IdentityDenied::Reserved(gateway)),
        // The workload may be in a source that was not read yet.
        Principal::Node { name, .. } if !view.runs(name, requested) && !view.complete => {
            Err(IdentityDenied::RegistryIncomplete)
        }
        Principal::Node { name, .. } if !view.runs(name, requested) => {
            Err(IdentityDenied::NotOnNode(requested.clone()))
        }
        Principal::Gateway { .. } | Principal::Node { .. } if may_hold_keys => Ok(()),
        Principal::Gateway { .. } | Principal::Node { .. } => Err(IdentityDenied::KeysInKeyServer(
            requested.trust_domain.clone(),
        )),
        // The provider's key servers hold keys only of tenants that chose key servers.
        Principal::KeyServer { tenant: None, .. } if keys.location != KeyLocation::KeyServer => {
            Err(IdentityDenied::NotEntitled(requested.clone()))
        }
        Principal::KeyServer { .. } => {
            let mut visible = view
                .of(ResourceKind::Entitlement)
                .filter(|e| scope::visible(&e.resource, principal, &catalog.placement));
            let is_entitled = visible.any(
                |e| matches!(e.resource.as_ref(), Resource::Entitlement(e) if e.identities.contains(requested)),
            );
            match is_entitled {
                true => Ok(()),
                // The entitlement may be in a source that was not read yet.
                false if !view.complete => Err(IdentityDenied::RegistryIncomplete),
                false => Err(IdentityDenied::NotEntitled(requested.clone())),
            }
        }
        // The caller refused these already.
        Principal::Operator { .. } | Principal::Edge { .. } => Err(IdentityDenied::Operator),
    }
}

/// Returns where the tenant's private keys are stored, and their algorithm.
pub fn key_policy(view: &TenantCatalog) -> KeyPolicy {
    let tenant = view
        .of(ResourceKind::Tenant)
        .find_map(|e| match e.resource.as_ref() {
            Resource::Tenant(tenant) => Some(tenant.keys),
            _ => None,
        });
    tenant.unwrap_or_default()
}

/// Returns the host names by which clients know a service: the full name, and the shorter names
/// that resolvers complete.
fn decide_names(
    view: &TenantCatalog,
    tenant: &TenantName,
    requested: &Identity,
    service: &str,
) -> Result<Vec<String>, IdentityDenied> {
    let gateway = gateway_identity(requested.trust_domain.clone());
    if *requested != gateway {
        return Err(IdentityDenied::ServiceNotGateway(gateway));
    }
    let key: ServiceKey = service
        .parse()
        .map_err(|e: canal_model::ids::IdError| IdentityDenied::ServiceForm(e.to_string()))?;
    let found = view
        .of(ResourceKind::Service)
        .find_map(|e| match e.resource.as_ref() {
            Resource::Service(s) if s.key == key && key.tenant == *tenant => {
                Some(s.hostname.clone())
            }
            _ => None,
        });
    let hostname = found.ok_or_else(|| IdentityDenied::ServiceUnknown(key.clone()))?;
    let (name, namespace) = (&key.name, &key.namespace);
    Ok(vec![
        hostname,
        format!("{name}.{namespace}.svc"),
        format!("{name}.{namespace}"),
        name.to_string(),
    ])
}

/// The service from which data planes get their certificates.
pub struct CertificateService {
    pub catalog: watch::Receiver<Arc<Catalog>>,
    pub trust: Arc<TrustAuthorities>,
    pub metrics: Arc<ControllerMetrics>,
    /// Lifetime of workload certificates in seconds.
    pub svid_seconds: u64,
    /// Rate at which a tenant's component may request certificates.
    pub tenant_rate: CertificateRate,
    /// Rate at which a component of the provider may request certificates.
    pub provider_rate: CertificateRate,
}

#[tonic::async_trait]
impl IstioCertificateService for CertificateService {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let caller = AuthenticatedClient::of(&request)?;
        let request = request.into_inner();
        let (requested, service) = (field(&request, IMPERSONATED), field(&request, SERVICE));
        let catalog = self.catalog.borrow().clone();
        let grant = decide_grant(
            &catalog,
            &caller.principal,
            requested.as_deref(),
            service.as_deref(),
        )
        .map_err(|denied| {
            self.refused(
                &caller.principal,
                requested.as_deref(),
                denied.name(),
                &denied.to_string(),
            );
            Status::new(denied.code(), denied.to_string())
        })?;
        let lifetime = decide_lifetime(request.validity_duration, self.svid_seconds);
        let (tenant, identity, names, rsa) = match grant {
            // Components belong to the provider, and have ECDSA keys only.
            CertificateGrant::Component(identity) => (components().0, identity, Vec::new(), false),
            CertificateGrant::Workload {
                tenant,
                identity,
                names,
                rsa,
            } => (tenant, identity, names, rsa),
        };
        let (csr, holder) = (request.csr, caller.principal.to_string());
        // The provider's components hold identities of many tenants, so their rate is higher.
        let rate = match holder_of(&caller.principal) {
            ShareHolder::Provider => self.provider_rate,
            _ => self.tenant_rate,
        };
        let order = IssuanceRequest {
            tenant,
            identity: identity.clone(),
            names,
            rsa,
            csr,
            lifetime_seconds: lifetime,
            holder,
            rate,
        };
        let made = self.trust.issue(order).await;
        let IssuedChain {
            chain,
            serial,
            not_after,
        } = made.map_err(|e| self.failed(&caller.principal, &identity, &e))?;
        let kind = principal_name(&caller.principal);
        self.metrics
            .count(metrics::CERTIFICATES_ISSUED, &[("to", kind)]);
        // Most requests name no service.
        let service = service.unwrap_or_default();
        tracing::info!(target: "audit", to = %caller.principal, %identity, service, serial, not_after, "trust: issued a certificate");
        Ok(Response::new(IstioCertificateResponse {
            cert_chain: chain,
        }))
    }
}

impl CertificateService {
    /// Converts an issuance error to a gRPC status, and records the refusal.
    fn failed(&self, principal: &Principal, identity: &Identity, e: &IssueError) -> Status {
        let code = match e {
            IssueError::Store(s) => {
                self.metrics
                    .count(metrics::STORE_ERRORS, &[("reason", s.name())]);
                Code::Unavailable
            }
            IssueError::Refused(CsrError::Signing(_) | CsrError::RootEnded(_))
            | IssueError::Task => Code::Internal,
            IssueError::Refused(_) => Code::InvalidArgument,
            IssueError::Blocked(_) => Code::PermissionDenied,
            IssueError::Files(_) | IssueError::External(_) | IssueError::Answer(_) => {
                Code::Unavailable
            }
            IssueError::IssuanceLog(_) | IssueError::Rate(..) => Code::ResourceExhausted,
        };
        self.refused(
            principal,
            Some(&identity.to_string()),
            e.name(),
            &e.to_string(),
        );
        Status::new(code, e.to_string())
    }

    /// Counts and logs a refused certificate request.
    fn refused(&self, principal: &Principal, requested: Option<&str>, name: &str, why: &str) {
        self.metrics
            .count(metrics::CERTIFICATES_REFUSED, &[("reason", name)]);
        // The client chose this text; its length in the log is bounded.
        let requested: String = requested.unwrap_or_default().chars().take(300).collect();
        tracing::warn!(target: "audit", to = %principal, requested, reason = name, why, "trust: refused a certificate request");
    }
}

fn field(request: &IstioCertificateRequest, name: &str) -> Option<String> {
    match request.metadata.as_ref()?.fields.get(name)?.kind.as_ref()? {
        Value::StringValue(s) => Some(s.clone()),
        _ => None,
    }
}
