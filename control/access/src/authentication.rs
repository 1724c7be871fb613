//! Authenticates requests by their bearer token, before a byte of their body is read. It does not
//! decide what a client may do. Start at [`Authenticator::interceptor`].

use std::sync::Arc;

use canal_controller_metrics::ControllerMetrics;
use canal_model::principal::Principal;
use canal_model::share::ShareKind;
use tokio::sync::watch;
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

use crate::admission::ConnectionAdmission;
use crate::principals::{Principals, TOKEN_BYTES_MAX, TokenHash};
use crate::shares::holder_of;

/// A client whose bearer token is valid.
#[derive(Clone)]
pub struct AuthenticatedClient {
    /// The principal that the token stands for.
    pub principal: Principal,
    token: TokenHash,
}

impl AuthenticatedClient {
    /// Creates a client whose token nobody knows.
    #[cfg(test)]
    pub(crate) fn new(principal: Principal) -> Self {
        Self {
            principal,
            token: TokenHash::of(""),
        }
    }

    /// Returns the client of a request that an [`Authenticator`] has let through.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` if no interceptor authenticated the request.
    pub fn of<T>(request: &Request<T>) -> Result<Self, Status> {
        request.extensions().get::<Self>().cloned().ok_or_else(|| {
            Status::unauthenticated(
                "the request has no token; fix: send authorization: Bearer <token>",
            )
        })
    }
}

/// Knows which token stands for which principal at this moment.
#[derive(Clone)]
pub struct Authenticator {
    principals: watch::Receiver<Arc<Principals>>,
    metrics: Arc<ControllerMetrics>,
}

impl Authenticator {
    /// Creates an authenticator that follows `principals`.
    pub fn new(
        principals: watch::Receiver<Arc<Principals>>,
        metrics: Arc<ControllerMetrics>,
    ) -> Self {
        Self {
            principals,
            metrics,
        }
    }

    /// Returns the principals, which change with their file.
    pub fn principals(&self) -> watch::Receiver<Arc<Principals>> {
        self.principals.clone()
    }

    /// Returns the client that the request's bearer token stands for.
    fn authenticate(&self, metadata: &MetadataMap) -> Result<AuthenticatedClient, Status> {
        let refused = |reason: &str, text: &str| {
            self.metrics.refuse(reason);
            Status::unauthenticated(text)
        };
        let header = metadata.get("authorization").ok_or_else(|| {
            refused(
                "no_token",
                "the request has no token; fix: send authorization: Bearer <token>",
            )
        })?;
        let token =
            header
                .to_str()
                .ok()
                .and_then(|h| h.split_once(' '))
                .filter(|(scheme, token)| {
                    scheme.eq_ignore_ascii_case("bearer")
                        && !token.is_empty()
                        && token.len() <= TOKEN_BYTES_MAX
                });
        let Some((_, token)) = token else {
            return Err(refused(
                "token_form",
                "write the header as authorization: Bearer <token>",
            ));
        };
        let token = TokenHash::of(token.trim());
        let principal = self.principals.borrow().find(&token).cloned();
        let principal = principal.ok_or_else(|| {
            refused(
                "unknown_token",
                "the token is unknown; fix: request a current one from the provider",
            )
        })?;
        Ok(AuthenticatedClient { principal, token })
    }

    /// Returns an interceptor that authenticates a request before a byte of its body is read, so
    /// that unauthenticated clients cost nothing.
    pub fn interceptor(
        &self,
    ) -> impl FnMut(Request<()>) -> Result<Request<()>, Status> + Clone + use<> {
        let authenticator = self.clone();
        move |mut request| {
            let client = authenticator.authenticate(request.metadata())?;
            // From now on the connection counts against the token's owner, not against its source.
            if let Some(admission) = request.extensions().get::<Arc<ConnectionAdmission>>() {
                let holder = holder_of(&client.principal);
                admission.authorize(&holder).map_err(|refusal| {
                    authenticator.metrics.refuse("connections");
                    let which = ShareKind::ControllerConnections.key();
                    let text = format!(
                        "{holder} may open no more connections ({which}: {}); fix: close some of them",
                        refusal.reason()
                    );
                    Status::resource_exhausted(text)
                })?;
            }
            request.extensions_mut().insert(client);
            Ok(request)
        }
    }

    /// True while the client's token still stands for the same principal.
    pub fn is_current(&self, client: &AuthenticatedClient) -> bool {
        self.principals.borrow().find(&client.token) == Some(&client.principal)
    }
}
