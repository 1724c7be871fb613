//! The filters of a request, resolved when the snapshot is built.
//!
//! A chain only names the filters: `serve` in the engine's `pipeline.rs` runs each of them at one
//! place. The chain of a request is the union of those of its rule, of the endpoint set and of the
//! client. Start with [`FilterChain`].

use canal_model::ids::ServiceKey;
use canal_model::program::RouteRule;

use super::DestinationPolicy;

/// A set of filters: a bit each. The filters run in the order of their bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FilterChain(u8);

impl FilterChain {
    /// Buffers the beginning of the body, because an external authorizer may read it. It runs once,
    /// before an endpoint is selected.
    const BUFFER_BODY: Self = Self(1);
    /// Authorizes the request. It runs for each endpoint that is selected.
    const AUTHORIZE: Self = Self(1 << 1);
    /// The filters that run once, before an endpoint is selected.
    const BEFORE_BALANCE: Self = Self::BUFFER_BODY;

    /// Returns the filters that policies require.
    pub fn of_policies<'a>(policies: impl IntoIterator<Item = &'a DestinationPolicy>) -> Self {
        policies.into_iter().fold(Self::default(), |chain, policy| {
            let has_authorizer = policy.policies.authorizers().next().is_some();
            let authorizers = if has_authorizer {
                Self::BUFFER_BODY
            } else {
                Self::default()
            };
            chain.with(Self::AUTHORIZE).with(authorizers)
        })
    }

    /// Returns the filters of a rule for requests to one of its backends. `dialled` are the filters
    /// that the policies of the rule's service require. They apply in addition to those of the
    /// backend's endpoints if the backend is another service.
    pub(crate) fn of_rule(rule: &RouteRule, backend: &ServiceKey, dialled: Self) -> Self {
        if *backend == rule.parent {
            // The policies of the service's endpoints include those of the service.
            Self::default()
        } else {
            dialled
        }
    }

    /// Returns the filters that a client requires. A federated client is checked even where no
    /// policy applies.
    pub fn of_client(is_federated: bool) -> Self {
        if is_federated {
            Self::AUTHORIZE
        } else {
            Self::default()
        }
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

    /// True if the request is authorized at each endpoint that is selected.
    #[inline]
    pub fn authorizes(self) -> bool {
        self.has(Self::AUTHORIZE)
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
    fn each_filter_has_its_own_bit_and_a_chain_without_filters_is_empty() {
        let none = FilterChain::default();
        assert_eq!(FilterChain::of_policies([]), none);
        assert_eq!(FilterChain::of_client(false), none);
        assert_eq!(FilterChain::of_client(true), FilterChain::AUTHORIZE);
        let both = FilterChain::BUFFER_BODY.with(FilterChain::AUTHORIZE);
        for (chain, filters) in [
            (none, (false, false)),
            (FilterChain::BUFFER_BODY, (true, false)),
            (FilterChain::AUTHORIZE, (false, true)),
            (both, (true, true)),
        ] {
            assert_eq!(
                (chain.buffers_body(), chain.authorizes()),
                filters,
                "{chain:?}"
            );
            assert_eq!(chain.runs_before_balance(), filters.0, "{chain:?}");
        }
    }
}
