//! Resolves the rules of TLSRoutes and TCPRoutes (Gateway API): all connections of a rule go to its
//! backends. `http_route` attaches the rules to their parents.

use canal_model::policy::gateway_api::RelayRule;
use canal_model::program::{HttpMatch, PathMatch};

use super::destination::{DestinationIndex, RouteOrigin};
use super::http_route::{ResolvedRule, backends};
use super::route_effects::RouteEffects;
use super::route_fields::RuleContext;
use crate::precedence::{self, MatchSpecificity};

/// Resolves a rule of a route. It matches all that its listener and its hosts leave.
pub(super) fn resolve_rule(
    origin: RouteOrigin<'_>,
    place: usize,
    written: &RelayRule,
    to: &DestinationIndex<'_>,
    rule: &mut RuleContext<'_>,
) -> ResolvedRule {
    let path = PathMatch::ElementPrefix("/".to_owned());
    let counted = MatchSpecificity {
        path: &path,
        has_method: false,
        headers: 0,
        query: 0,
    };
    let everything = HttpMatch {
        precedence: precedence::gateway_api(rule.document, [place, 0], &counted),
        path,
        method: None,
        headers: Vec::new(),
        query: Vec::new(),
    };
    let backends = backends(origin, written.backend_refs.iter().cloned(), to, rule);
    ResolvedRule {
        matches: vec![everything],
        action: rule.action("backendRefs", backends),
        effects: RouteEffects::of_connections(),
    }
}
