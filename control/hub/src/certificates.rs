//! Istio's certificate service: who may have which identity, and the audit line on each answer. What a certificate holds is
//! `canal-authority`'s; that a node runs a workload is the registry's.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use canal_authority::{Issued, Refusal, TenantAuthority, decide_lifetime};
use canal_model::identity::{Identity, gateway_identity};
use canal_model::ids::{TenantName, TrustDomain};
use canal_model::principal::Principal;
use canal_store::{Store, StoreError, StoredAuthority};
use canal_wire::citadel::istio_certificate_service_server::IstioCertificateService;
use canal_wire::citadel::{IstioCertificateRequest, IstioCertificateResponse};
use prost_types::value::Kind as Value;
use tonic::{Code, Request, Response, Status};

use crate::catalog::Catalog;
use crate::metrics;
use crate::shared::{Shared, now_seconds};

/// The metadata field that names the identity asked for (istio/api security/v1alpha1, as ztunnel sends it).
const IMPERSONATED: &str = "ImpersonatedIdentity";

/// Why nobody may have the identity asked for. The texts say what would have to be so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Denied {
    #[error("metadata.{IMPERSONATED} is missing; name the identity, as in spiffe://<trust domain>/ns/<namespace>/sa/<service account>")]
    NoIdentity,
    #[error("{0}")]
    Form(String),
    #[error("an operator gets no identity; use a node's or a gateway's token")]
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
        }
    }

    fn code(&self) -> Code {
        match self {
            Self::NoIdentity | Self::Form(_) => Code::InvalidArgument,
            Self::RegistryIncomplete => Code::Unavailable,
            Self::Operator | Self::TrustDomain(_) | Self::Reserved(_) | Self::NotOnNode(_) | Self::NotGateway(_) => Code::PermissionDenied,
        }
    }
}

/// Whether `principal` may have the identity `asked`, and in which tenant.
pub(crate) fn decide_identity(catalog: &Catalog, principal: &Principal, asked: Option<&str>) -> Result<(TenantName, Identity), Denied> {
    let asked = asked.filter(|a| !a.is_empty()).ok_or(Denied::NoIdentity)?;
    let asked: Identity = asked.parse().map_err(|e: canal_model::ids::IdError| Denied::Form(e.to_string()))?;
    if matches!(principal, Principal::Operator { .. } | Principal::Edge { .. }) {
        return Err(Denied::Operator);
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
    let gateway = gateway_identity(asked.trust_domain.clone());
    match principal {
        Principal::Gateway { .. } if asked == gateway => Ok((tenant.clone(), asked)),
        Principal::Gateway { .. } => Err(Denied::NotGateway(gateway)),
        Principal::Node { .. } if asked == gateway => Err(Denied::Reserved(asked)),
        Principal::Node { name, .. } if view.runs(name, &asked) => Ok((tenant.clone(), asked)),
        Principal::Node { .. } if !view.complete => Err(Denied::RegistryIncomplete),
        Principal::Node { .. } => Err(Denied::NotOnNode(asked)),
        Principal::Operator { .. } | Principal::Edge { .. } => Err(Denied::Operator),
    }
}

/// The tenants' authorities, made when first needed and kept in the store.
#[derive(Default)]
pub(crate) struct Authorities {
    held: Mutex<HashMap<(TenantName, TrustDomain), Arc<TenantAuthority>>>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum AuthorityError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Refused(#[from] Refusal),
}

impl Authorities {
    /// The authority of a trust domain; blocks for a disk write when it is new.
    fn of(&self, store: &Store, tenant: &TenantName, domain: &TrustDomain, now: u64) -> Result<Arc<TenantAuthority>, AuthorityError> {
        // The lock is held while a new root is written, so that two first requests do not make two roots.
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (tenant.clone(), domain.clone());
        if let Some(a) = held.get(&key) {
            return Ok(a.clone());
        }
        let authority = match store.authority(tenant, domain)? {
            Some(kept) => TenantAuthority::load(domain, &kept.key, &kept.certificate)?,
            None => {
                let new = TenantAuthority::generate(domain, now)?;
                let kept = StoredAuthority { key: new.key(), certificate: new.certificate().to_string() };
                store.put_authority(tenant, domain, &kept)?;
                tracing::info!(target: "audit", %tenant, %domain, "made a new root for the trust domain");
                new
            }
        };
        let authority = Arc::new(authority);
        held.insert(key, authority.clone());
        Ok(authority)
    }
}

pub(crate) struct Certificates {
    pub(crate) shared: Arc<Shared>,
}

#[tonic::async_trait]
impl IstioCertificateService for Certificates {
    async fn create_certificate(&self, request: Request<IstioCertificateRequest>) -> Result<Response<IstioCertificateResponse>, Status> {
        let caller = self.shared.caller(&request)?;
        let request = request.into_inner();
        let asked = impersonated(&request);
        let catalog = self.shared.catalog.borrow().clone();
        let (tenant, identity) = decide_identity(&catalog, &caller.principal, asked.as_deref()).map_err(|denied| {
            self.refused(&caller.principal, asked.as_deref(), denied.name(), &denied.to_string());
            Status::new(denied.code(), denied.to_string())
        })?;
        let lifetime = decide_lifetime(request.validity_duration, self.shared.limits.svid_seconds);
        let shared = self.shared.clone();
        let wanted = identity.clone();
        // The first certificate of a trust domain writes its root to disk.
        let issued = tokio::task::spawn_blocking(move || -> Result<Issued, AuthorityError> {
            let now = now_seconds();
            let authority = shared.authorities.of(&shared.store, &tenant, &wanted.trust_domain, now)?;
            Ok(authority.issue(&request.csr, &wanted, lifetime, now)?)
        });
        match issued.await {
            Ok(Ok(issued)) => {
                let kind = crate::principal_name(&caller.principal);
                self.shared.metrics.count(metrics::CERTIFICATES_ISSUED, &[("to", kind)]);
                tracing::info!(
                    target: "audit", to = %caller.principal, %identity, serial = issued.serial, not_after = issued.not_after, "issued a certificate"
                );
                Ok(Response::new(IstioCertificateResponse { cert_chain: issued.chain }))
            }
            Ok(Err(e)) => Err(self.failed(&caller.principal, &identity, &e)),
            Err(_) => Err(Status::internal("the certificate could not be made; try again")),
        }
    }
}

impl Certificates {
    fn failed(&self, principal: &Principal, identity: &Identity, e: &AuthorityError) -> Status {
        let (name, code) = match e {
            AuthorityError::Store(s) => {
                self.shared.metrics.count(metrics::STORE_ERRORS, &[("reason", s.name())]);
                ("store", Code::Unavailable)
            }
            AuthorityError::Refused(r @ (Refusal::Signing(_) | Refusal::RootEnded(_))) => (r.name(), Code::Internal),
            AuthorityError::Refused(r) => (r.name(), Code::InvalidArgument),
        };
        self.refused(principal, Some(&identity.to_string()), name, &e.to_string());
        Status::new(code, e.to_string())
    }

    fn refused(&self, principal: &Principal, asked: Option<&str>, name: &str, why: &str) {
        self.shared.metrics.count(metrics::CERTIFICATES_REFUSED, &[("reason", name)]);
        let asked: String = asked.unwrap_or_default().chars().take(300).collect();
        tracing::warn!(target: "audit", to = %principal, asked, reason = name, why, "refused a certificate");
    }
}

fn impersonated(request: &IstioCertificateRequest) -> Option<String> {
    match request.metadata.as_ref()?.fields.get(IMPERSONATED)?.kind.as_ref()? {
        Value::StringValue(s) => Some(s.clone()),
        _ => None,
    }
}
