//! Injects the faults that a rule asks for: a delay, and an abort in place of the endpoint's
//! response. Which request gets which is a decision of `canal_model::route_faults`.
//!
//! The delay precedes everything else. An aborted request is authorized like one that the gateway
//! answers, because no endpoint authorizes it. Start with [`HttpRequest::inject_faults`].

use std::time::Duration;

use canal_gateway_config::MatchedFilters;
use canal_gateway_http::proxy_error::{ProxyError, ResponseFlag};

use super::{HttpDownstream, HttpRequest};
use crate::route::RoutedRequest;

impl<D: HttpDownstream> HttpRequest<D> {
    /// Delays the request, and ends it, as the rule says.
    ///
    /// # Errors
    /// The request is aborted, a policy denies it, or the client left during the delay.
    pub(super) async fn inject_faults(&mut self, routed: &RoutedRequest) -> Result<(), ProxyError> {
        let matched = routed.matched.as_deref();
        let Some(policy) = matched.and_then(MatchedFilters::faults) else {
            return Ok(());
        };
        let faults = policy.decide(self.state.worker.random());
        let is_delayed = match faults.delay {
            Some(time) => self.delay(time).await?,
            None => false,
        };
        let Some(status) = faults.abort else {
            return Ok(());
        };
        self.authorize_answer(routed).await?;
        Err(ProxyError::Aborted { status, is_delayed })
    }

    /// Waits for this time, unless too many requests of the tenant wait already. Returns whether
    /// the request was delayed.
    async fn delay(&mut self, time: Duration) -> Result<bool, ProxyError> {
        let worker = self.state.worker.clone();
        let Some(_permit) = self.state.session.account.begin_delay() else {
            worker.counts.fault_delay("overflow");
            return Ok(false);
        };
        worker.counts.fault_delay("delayed");
        let client = &mut self.client;
        let gone = std::future::poll_fn(|cx| client.poll_client_gone(cx));
        tokio::select! {
            () = gone => return Err(ProxyError::ClientGone),
            () = tokio::time::sleep(time) => {}
        }
        self.state.record.flag = ResponseFlag::DelayInjected;
        Ok(true)
    }
}
