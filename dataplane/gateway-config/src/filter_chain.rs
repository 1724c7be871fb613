//! The filters of a request, resolved when the snapshot is built.
//!
//! A chain only names the filters: `serve` in the engine's `pipeline.rs` runs each of them at one
//! place. The chain of a request is the union of those of its rule and of the endpoint set.
//! Authorization is no filter: it is a phase of every request, so that no chain can omit it. Start
//! with [`FilterChain`].

use canal_model::ids::ServiceKey;
use canal_model::program::{Backend, RouteRule};

use super::DestinationPolicy;
use super::route_mirrors::is_of_backend;

/// A set of filters: a bit each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FilterChain(u16);

impl FilterChain {
    /// Buffers the beginning of the body, because an external authorizer may read it. It runs once,
    /// before an endpoint is selected.
    const BUFFER_BODY: Self = Self(1);
    /// Changes heads as the rule's filters say: the request's when it is sent to an endpoint, and
    /// the response's.
    const CHANGE_HEADS: Self = Self(2);
    /// Answers the request as the rule says. It runs once, before an endpoint is selected.
    const ANSWER: Self = Self(4);
    /// Limits the time of the request and sends it again as the rule says. It runs around the
    /// attempts.
    const LIMIT_ATTEMPTS: Self = Self(8);
    /// Delays and aborts requests as the rule says. It runs once, before all others.
    const INJECT_FAULTS: Self = Self(16);
    /// Shares responses with scripts of other origins as the rule says, when the head is sent.
    const SHARE_RESPONSES: Self = Self(32);
    /// Answers a preflight. It runs once, before an endpoint is selected. The request decides about
    /// it, not the rule alone.
    const ANSWER_PREFLIGHT: Self = Self(64);
    /// Sends copies of requests as the rule says. It runs once, when an attempt has a connection.
    const COPY_REQUESTS: Self = Self(128);
    /// Calls the authorizer that the rule names, once the policies allow the request.
    const CALL_AUTHORIZER: Self = Self(256);
    /// Sends the headers that the filters of the listener set. These ran before the request was
    /// routed.
    const KEEP_LISTENER_CHANGES: Self = Self(512);
    /// The filters that read the rule of a request that is forwarded.
    const OF_MATCHED_RULE: Self = Self(
        Self::CHANGE_HEADS.0
            | Self::LIMIT_ATTEMPTS.0
            | Self::INJECT_FAULTS.0
            | Self::SHARE_RESPONSES.0
            | Self::COPY_REQUESTS.0
            | Self::CALL_AUTHORIZER.0,
    );
    /// The filters that run once, before an endpoint is selected.
    const BEFORE_BALANCE: Self = Self(
        Self::BUFFER_BODY.0 | Self::ANSWER.0 | Self::INJECT_FAULTS.0 | Self::ANSWER_PREFLIGHT.0,
    );

    /// Returns the filters that policies require.
    pub fn of_policies<'a>(policies: impl IntoIterator<Item = &'a DestinationPolicy>) -> Self {
        let has_authorizer = policies
            .into_iter()
            .any(|policy| policy.policies.authorizers().next().is_some());
        if has_authorizer {
            Self::BUFFER_BODY
        } else {
            Self::default()
        }
    }

    /// Returns the filters of a rule for requests to one of its backends, at this position, which is
    /// `service`. `dialled` are the filters that the policies of the rule's service require. They apply in addition to those of the
    /// backend's endpoints if the backend is another service.
    pub(crate) fn of_rule(
        rule: &RouteRule,
        (at, backend): (usize, &Backend),
        service: &ServiceKey,
        dialled: Self,
    ) -> Self {
        let of_policies = if *service == rule.parent {
            // The policies of the service's endpoints include those of the service.
            Self::default()
        } else {
            dialled
        };
        let mut chain = of_policies.with(Self::of_authorizer(rule));
        if rule.filters.is_some() || backend.filters.is_some() {
            chain = chain.with(Self::CHANGE_HEADS);
        }
        if rule.attempts.is_some() {
            chain = chain.with(Self::LIMIT_ATTEMPTS);
        }
        if rule.faults.is_some() {
            chain = chain.with(Self::INJECT_FAULTS);
        }
        if rule.cors.is_some() {
            chain = chain.with(Self::SHARE_RESPONSES);
        }
        if rule.mirrors.iter().any(|mirror| is_of_backend(mirror, at)) {
            chain = chain.with(Self::COPY_REQUESTS);
        }
        chain
    }

    /// Returns the filters of a rule that names an authorizer, which may read bodies.
    pub fn of_authorizer(rule: &RouteRule) -> Self {
        let filters = rule.filters.as_deref();
        match filters.and_then(|filters| filters.authorizer.as_ref()) {
            None => Self::default(),
            Some(authorizer) if authorizer.body_bytes > 0 => {
                Self::CALL_AUTHORIZER.with(Self::BUFFER_BODY)
            }
            Some(_) => Self::CALL_AUTHORIZER,
        }
    }

    /// Returns the filter of a request that has passed the filters of its listener.
    pub fn of_listener() -> Self {
        Self::KEEP_LISTENER_CHANGES
    }

    /// Returns the filter of a rule whose requests the gateway answers itself.
    pub fn of_answer() -> Self {
        Self::ANSWER
    }

    /// Returns the filter of a preflight, which the gateway answers itself.
    pub fn of_preflight() -> Self {
        Self::ANSWER_PREFLIGHT
    }

    /// Returns the filters of both chains.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// True if a filter runs before an endpoint is selected.
    #[inline]
    pub fn runs_before_balance(self) -> bool {
        self.has(Self::BEFORE_BALANCE)
    }

    /// True if the beginning of the body is buffered.
    #[inline]
    pub fn buffers_body(self) -> bool {
        self.has(Self::BUFFER_BODY)
    }

    /// True if the gateway answers the request itself.
    #[inline]
    pub fn answers(self) -> bool {
        self.has(Self::ANSWER)
    }

    /// True if the request is a preflight that the gateway answers itself.
    #[inline]
    pub fn answers_preflight(self) -> bool {
        self.has(Self::ANSWER_PREFLIGHT)
    }

    /// True if the rule names an authorizer.
    #[inline]
    pub fn calls_authorizer(self) -> bool {
        self.has(Self::CALL_AUTHORIZER)
    }

    /// True if the request is authorized even where no policy applies: its rule names an authorizer,
    /// or it passed one of its listener.
    #[inline]
    pub fn is_authorized(self) -> bool {
        self.has(Self(
            Self::CALL_AUTHORIZER.0 | Self::KEEP_LISTENER_CHANGES.0,
        ))
    }

    /// True if the rule sends copies of requests.
    #[inline]
    pub fn copies_requests(self) -> bool {
        self.has(Self::COPY_REQUESTS)
    }

    /// True if the rule injects faults.
    #[inline]
    pub fn injects_faults(self) -> bool {
        self.has(Self::INJECT_FAULTS)
    }

    /// True if the rule's filters change heads.
    #[inline]
    pub fn changes_heads(self) -> bool {
        self.has(Self::CHANGE_HEADS)
    }

    /// True if the rule limits the time of requests, or says when they are sent again.
    #[inline]
    pub fn limits_attempts(self) -> bool {
        self.has(Self::LIMIT_ATTEMPTS)
    }

    /// True if a filter reads the rule of a request that is forwarded.
    #[inline]
    pub fn reads_rule(self) -> bool {
        self.has(Self::OF_MATCHED_RULE)
    }

    #[inline]
    fn has(self, any: Self) -> bool {
        self.0 & any.0 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_without_filters_is_empty() {
        let none = FilterChain::default();
        assert_eq!(FilterChain::of_policies([]), none);
        assert!(!none.buffers_body() && !none.runs_before_balance());
        let both = none.with(FilterChain::BUFFER_BODY);
        assert!(both.buffers_body() && both.runs_before_balance());
        let heads = none.with(FilterChain::CHANGE_HEADS);
        assert!(heads.changes_heads() && !heads.runs_before_balance());
        let answer = FilterChain::of_answer();
        assert!(answer.answers() && answer.runs_before_balance() && !answer.buffers_body());
        assert!(!both.answers() && !heads.answers());
        let attempts = none.with(FilterChain::LIMIT_ATTEMPTS);
        assert!(attempts.limits_attempts() && attempts.reads_rule());
        assert!(!attempts.changes_heads() && !attempts.runs_before_balance());
        let faults = none.with(FilterChain::INJECT_FAULTS);
        assert!(faults.injects_faults() && faults.reads_rule() && faults.runs_before_balance());
        let preflight = FilterChain::of_preflight();
        assert!(preflight.answers_preflight() && preflight.runs_before_balance());
        let shared = none.with(FilterChain::SHARE_RESPONSES);
        assert!(shared.reads_rule() && !shared.runs_before_balance());
        let copies = none.with(FilterChain::COPY_REQUESTS);
        assert!(copies.copies_requests() && copies.reads_rule() && !copies.runs_before_balance());
        let checked = none.with(FilterChain::CALL_AUTHORIZER);
        assert!(
            checked.calls_authorizer() && checked.reads_rule() && !checked.runs_before_balance()
        );
        let passed = FilterChain::of_listener();
        assert!(passed.is_authorized() && checked.is_authorized() && !heads.is_authorized());
        assert!(!passed.calls_authorizer() && !passed.reads_rule());
        assert!(!passed.runs_before_balance());
        assert!(heads.reads_rule() && !heads.limits_attempts() && !both.reads_rule());
    }
}
