//! Filters of a Gateway's listener: each request passes them in order, before a rule is selected. The
//! first that refuses ends the request.
//!
//! Start with [`HttpRequest::run_listener_filters`].

use std::sync::Arc;

use canal_gateway_config::RequestMutations;
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_http::routing_views::ChangedRequest;
use canal_model::ingress::gateway_object;
use canal_model::listener_filters::ListenerFilter;
use canal_router::{RoutableRequest, normalize_path};

use super::{HttpDownstream, HttpRequest};
use crate::authorize::{AuthorizationState, ext_authz, route_authorizer};
use crate::destination::ResolvedDestination;
use crate::route::{self, RoutedRequest};

/// Status if a filter could not be resolved, as for a rule whose authorizer is not known.
const UNRESOLVED_STATUS: u16 = 500;

/// What the filters of a listener made of a request.
pub(super) struct PassedListener {
    pub(super) changes: RequestMutations,
}

impl PassedListener {
    /// Returns a request with the changes.
    pub(super) fn of<'a, R>(&'a self, request: &'a R) -> ChangedRequest<'a, R> {
        ChangedRequest {
            request,
            changes: &self.changes,
        }
    }
}

impl<D: HttpDownstream> HttpRequest<D> {
    /// Passes the filters of the listener, then routes the request.
    ///
    /// # Errors
    /// A filter refuses the request, or no usable route or service exists.
    pub(super) async fn run_listener_filters(
        &mut self,
        routed: &mut RoutedRequest,
    ) -> Result<(), ProxyError> {
        // A filter may wait for seconds. If the listener has other filters then, the request passes
        // these too: no request is served under a configuration that would have refused it.
        while let Some(filters) = routed.listener_filters.take() {
            let changes = self.run_filters(&filters, routed).await?;
            let state = &mut self.state;
            let (head, _) = self.client.head();
            let passed = (&filters, &changes);
            let (worker, session) = (state.worker.clone(), state.session.clone());
            let result = (&mut *routed, &mut state.record);
            route::after_filters(&worker, &session, &head, passed, result)?;
            state.passed = Some(Box::new(PassedListener { changes }));
        }
        Ok(())
    }

    async fn run_filters(
        &mut self,
        filters: &Arc<[ListenerFilter]>,
        routed: &RoutedRequest,
    ) -> Result<RequestMutations, ProxyError> {
        let authorizers = filters.iter().map(|filter| match filter {
            ListenerFilter::Authorize(authorizer) => Ok(authorizer),
            ListenerFilter::Refuse => Err(ProxyError::Route {
                status: UNRESOLVED_STATUS,
                reason: "the authorizer of the listener could not be resolved".to_owned(),
            }),
        });
        let authorizers = authorizers.collect::<Result<Vec<_>, _>>()?;
        if self.state.info.has_body() {
            let bytes = authorizers.iter().map(|it| it.body_bytes).max();
            // One byte more tells a body that is too large.
            let wanted = bytes
                .filter(|bytes| *bytes > 0)
                .map_or(0, |bytes| bytes + 1);
            self.buffer_bytes(wanted as usize).await?;
        }
        let (worker, session) = (&self.state.worker, &self.state.session);
        let (head, authority) = self.client.head();
        let mut trial = AuthorizationState::default();
        // The authorizer judges the path in the form in which it is routed and forwarded.
        let paths = routed.view.set.policy_paths;
        trial.changes.path =
            normalize_path(head.path(), paths).map_err(|why| ProxyError::UnsafePath(why.name()))?;
        let name = listener_name(&routed.resolved);
        for authorizer in authorizers {
            let context = ext_authz::CheckContext {
                trial: &trial,
                protocol: self.state.record.protocol_text(),
                body: self.state.body.as_ref(),
            };
            let checked = (name.as_str(), authorizer);
            let request = (&head, authority);
            let check = route_authorizer::check(worker, session, checked, request, &context, None);
            let agreed = check.await?;
            // The last filter that sets a header decides, as their order says.
            agreed.apply(&head, &mut trial.changes);
        }
        Ok(trial.changes)
    }
}

/// Returns the name of the Gateway of a listener, for counters and logs.
fn listener_name(resolved: &ResolvedDestination) -> String {
    let ResolvedDestination::Service { service, .. } = resolved else {
        return String::new();
    };
    let key = &service.names.key;
    let (kind, name) = match gateway_object(key) {
        Some((kind, name)) => (kind.as_str(), name),
        None => ("", key.name.as_str()),
    };
    format!("{kind}/{}/{name}", key.namespace)
}
