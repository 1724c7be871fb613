//! The filters of one backend, joined with those of its rule when routes are resolved, so that a
//! request has one set of filters. It changes no message. Start with [`of_backend`].

use std::sync::Arc;

use canal_model::program::{RouteAction, RouteRule};
use canal_model::route_filters::{HeaderModifier, RouteFilters, UrlRewrite};

use crate::mutations::is_spelling_of;

/// Filters of the requests to each backend of a rule; `None` for a backend that has none of its own.
pub(super) type BackendFilters = Box<[Option<Arc<RouteFilters>>]>;

/// Resolves the filters of the backends of a rule; `None` if no backend has any.
pub(super) fn resolve(rule: &RouteRule) -> Option<BackendFilters> {
    let RouteAction::Split(backends) = &rule.action else {
        return None;
    };
    let has_filters = backends.iter().any(|backend| backend.filters.is_some());
    has_filters.then(|| {
        let filters = (0..backends.len()).map(|at| of_backend(rule, at).map(Arc::new));
        filters.collect()
    })
}

/// Returns the filters of the rule, followed by those of its backend at this position; `None` if that
/// backend has none of its own.
pub fn of_backend(rule: &RouteRule, at: usize) -> Option<RouteFilters> {
    let RouteAction::Split(backends) = &rule.action else {
        return None;
    };
    let second = backends.get(at)?.filters.as_deref()?;
    let none = RouteFilters::default();
    let first = rule.filters.as_deref().unwrap_or(&none);
    // A change of a request's header changes every spelling of the name, one of a response's only
    // the name.
    let spells = |one: &str, other: &str| is_spelling_of(one.as_bytes(), other.as_bytes());
    let equals = |one: &str, other: &str| one == other;
    let rewrites_path = second.rewrite.path.is_some() || second.rewrite.path_regex.is_some();
    let of_path = if rewrites_path { second } else { first };
    let of_path = &of_path.rewrite;
    Some(RouteFilters {
        request_headers: join(&first.request_headers, &second.request_headers, spells),
        response_headers: join(&first.response_headers, &second.response_headers, equals),
        rewrite: UrlRewrite {
            host: second.rewrite.host.clone().or(first.rewrite.host.clone()),
            path: of_path.path.clone(),
            path_regex: of_path.path_regex.clone(),
        },
    })
}

/// Returns the changes that have the effect of `first` and then `second`. `is_same`: a change of the
/// one header changes the other.
fn join(
    first: &HeaderModifier,
    second: &HeaderModifier,
    is_same: impl Fn(&str, &str) -> bool,
) -> HeaderModifier {
    let stays = |name: &str| {
        let set = second.set.iter().map(|(name, _)| name);
        !second.remove.iter().chain(set).any(|it| is_same(it, name))
    };
    let kept = |pairs: &[(String, String)]| {
        let pairs = pairs.iter().filter(|(name, _)| stays(name));
        pairs.cloned().collect::<Vec<_>>()
    };
    let removed_too = second
        .remove
        .iter()
        .filter(|name| !first.remove.contains(name));
    HeaderModifier {
        set: [kept(&first.set), second.set.clone()].concat(),
        add: [kept(&first.add), second.add.clone()].concat(),
        remove: first.remove.iter().chain(removed_too).cloned().collect(),
    }
}
