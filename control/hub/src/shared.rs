//! What all services of the controller look at: the catalog, the principals, the store, the registry of subscribers, the counters.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use canal_model::diagnostic::Diagnostic;
use canal_model::ids::TenantName;
use canal_model::principal::Principal;
use canal_model::share::ShareKind;
use canal_store::Store;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

use crate::admission::Admission;
use crate::catalog::Catalog;
use crate::changes::Changes;
use crate::fleet::Fleet;
use crate::metrics::{self, Metrics};
use crate::principals::{Principals, TOKEN_BYTES_MAX, TokenHash};
use crate::session::SessionLimits;
use crate::shares::{TenantLimits, holder_of};
use crate::subscribers::Subscribers;
use crate::trust::{CertificateRate, Trust};
use crate::writer::Command;

/// Limits that the services apply.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ServiceLimits {
    pub(crate) session: SessionLimits,
    /// Life of workload certificates, seconds.
    pub(crate) svid_seconds: u64,
    /// How fast a tenant's component may have certificates made.
    pub(crate) tenant_rate: CertificateRate,
    /// How fast a component of the provider may.
    pub(crate) provider_rate: CertificateRate,
}

/// What is wrong with the files, beside what the compiler says of their content.
#[derive(Debug, Default)]
pub(crate) struct SourceHealth {
    /// Since when something of a tenant's cannot be read.
    pub(crate) stale: HashMap<TenantName, Instant>,
    /// On the configuration directory itself.
    pub(crate) findings: Vec<Diagnostic>,
}

pub(crate) struct Shared {
    pub(crate) catalog: watch::Sender<Arc<Catalog>>,
    pub(crate) principals: watch::Receiver<Arc<Principals>>,
    pub(crate) store: Arc<Store>,
    pub(crate) trust: Arc<Trust>,
    pub(crate) subscribers: Arc<Subscribers>,
    pub(crate) fleet: Fleet,
    pub(crate) metrics: Arc<Metrics>,
    /// Changes of tenants, on their way to the one writer.
    pub(crate) changes: Arc<Changes>,
    /// The limits that tenants share.
    pub(crate) tenant_limits: Arc<TenantLimits>,
    /// To the one writer: what passes all changes of tenants.
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) limits: ServiceLimits,
    /// What is wrong with the files.
    pub(crate) sources: Mutex<SourceHealth>,
    /// Cancelled when the controller is to end.
    pub(crate) stopping: CancellationToken,
}

/// An authenticated client.
#[derive(Clone)]
pub(crate) struct Caller {
    pub(crate) principal: Principal,
    token: TokenHash,
}

impl Shared {
    /// Whom the request's bearer token stands for.
    fn authenticate(&self, metadata: &MetadataMap) -> Result<Caller, Status> {
        let refused = |reason: &str, text: &str| {
            self.refuse(reason);
            Status::unauthenticated(text)
        };
        let header = metadata.get("authorization").ok_or_else(|| refused("no_token", "send authorization: Bearer <token>"))?;
        let token = header
            .to_str()
            .ok()
            .and_then(|h| h.split_once(' '))
            .filter(|(scheme, token)| scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() && token.len() <= TOKEN_BYTES_MAX);
        let Some((_, token)) = token else {
            return Err(refused("token_form", "write the header as authorization: Bearer <token>"));
        };
        let token = TokenHash::of(token.trim());
        let principal = self.principals.borrow().find(&token).cloned();
        let principal = principal.ok_or_else(|| refused("unknown_token", "the token is not known; ask the provider for a current one"))?;
        Ok(Caller { principal, token })
    }

    /// The caller that the interceptor found; see [`Shared::door`].
    pub(crate) fn caller<T>(&self, request: &Request<T>) -> Result<Caller, Status> {
        request.extensions().get::<Caller>().cloned().ok_or_else(|| Status::unauthenticated("send authorization: Bearer <token>"))
    }

    /// Authenticates before a byte of the request's body is read, so that strangers cost nothing.
    pub(crate) fn door(self: &Arc<Self>) -> impl FnMut(Request<()>) -> Result<Request<()>, Status> + Clone + use<> {
        let shared = self.clone();
        move |mut request| {
            let caller = shared.authenticate(request.metadata())?;
            if let Some(admission) = request.extensions().get::<Arc<Admission>>() {
                let holder = holder_of(&caller.principal);
                admission.authorize(&holder).map_err(|refusal| {
                    shared.refuse("connections");
                    let which = ShareKind::ControllerConnections.key();
                    let text = format!("{holder} has no more connections ({which}: {}); fix: close some of them", refusal.reason());
                    Status::resource_exhausted(text)
                })?;
            }
            request.extensions_mut().insert(caller);
            Ok(request)
        }
    }

    /// True while the caller's token still stands for the same principal.
    pub(crate) fn is_current(&self, caller: &Caller) -> bool {
        self.principals.borrow().find(&caller.token) == Some(&caller.principal)
    }

    /// Counts a refusal.
    pub(crate) fn refuse(&self, reason: &str) {
        self.metrics.count(metrics::REFUSED, &[("reason", reason)]);
    }
}

/// Seconds since 1970.
pub(crate) fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
