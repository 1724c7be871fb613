//! Filters of a Gateway's listener (`listeners[].filters.requests` of Gateway API, GEP-5224): what decides about its requests before routes do. Types only.

use crate::route_authorizer::RouteAuthorizer;

/// Maximum number of filters of one listener (as in Gateway API).
pub const LISTENER_FILTERS_MAX: usize = 16;

/// A filter that each request of a listener passes, in order, before a route is selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenerFilter {
    /// A server decides. Headers that it sets are those that routes match.
    Authorize(RouteAuthorizer),
    /// The server is not known, so all requests get 500.
    Refuse,
}
