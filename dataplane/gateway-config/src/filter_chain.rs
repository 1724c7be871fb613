//! The filters of a route, resolved when the snapshot is built.
//!
//! A chain only names the filters, so that a route without filters costs a request one comparison.
//! `ClientTraffic::filter` runs them, after *route* and before *balance*. Start with
//! [`FilterChain`].

use super::DestinationPolicy;

/// Filters of one route: a bit each. They run in the order of their bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FilterChain(u8);

impl FilterChain {
    /// Buffers the beginning of the body, because an external authorizer may read it.
    const BUFFER_BODY: Self = Self(1);

    /// Returns the filters that policies require.
    pub fn of_policies<'a>(policies: impl IntoIterator<Item = &'a DestinationPolicy>) -> Self {
        let asks_authorizer = policies
            .into_iter()
            .any(|policy| policy.policies.authorizers().next().is_some());
        if asks_authorizer {
            Self::BUFFER_BODY
        } else {
            Self::default()
        }
    }

    /// Returns the filters of both chains.
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// True if the route has no filter.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// True if a filter of the route requires the beginning of the body to be buffered.
    pub fn buffers_body(self) -> bool {
        self.0 & Self::BUFFER_BODY.0 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_are_empty_unless_something_asks_for_a_filter() {
        assert!(FilterChain::of_policies([]).is_empty());
        let both = FilterChain::default().with(FilterChain::BUFFER_BODY);
        assert!(!both.is_empty() && both.buffers_body());
    }
}
