//! Defines what the filters of a rule mean: the request that the endpoint receives. It is slow and
//! simple, and shares no code with data planes.
//!
//! The rules, which every faster implementation must follow:
//! - The filters of the rule come first, then those of the backend, which see what the rule's left.
//!   But a path that the backend's filters rewrite is the one that matched: theirs replaces that of
//!   the rule.
//! - Headers are removed first, then set, then added. A header that is set or removed is removed in
//!   every spelling with `_` for `-` too.
//! - A path is rewritten in the form that routes compare
//!   ([`crate::authorization::routing_path`]); the query stays as it was sent.
//! - Gateway API (HTTPPathModifier): the elements of the prefix are replaced; a slash at the end of
//!   the prefix or of the replacement has no meaning. Istio: the text of the prefix is replaced.
//! - Istio's `uriRegexRewrite` replaces every match in the path, as RE2's GlobalReplace.
//! - A path that gets a dot segment by its rewrite is not forwarded.
//! - A match without a prefix (exact, regular expression) has its whole path replaced.

use canal_model::program::PathMatch;
use canal_model::route_filters::{PathRewrite, RegexSubstitution, RouteFilters};

use crate::authorization::routing_path;

/// The parts of a request that filters change: as the client sent them, or as the endpoint receives
/// them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardedRequest {
    pub host: String,
    /// The path with its query.
    pub target: String,
    /// Headers; as the endpoint receives them, sorted by name, which is in lower case. The values
    /// of one header are in the order sent.
    pub headers: Vec<(String, String)>,
}

/// Returns the request that the endpoint receives after a match on `matched`, with the filters of
/// the rule and then of the backend; `None` if the rewritten path has a dot segment, so that the
/// gateway answers 400. `substitute` replaces what a regular expression matches; `None` if the path
/// is too long for it.
pub fn forwarded(
    filters: [Option<&RouteFilters>; 2],
    matched: &PathMatch,
    sent: ForwardedRequest,
    substitute: impl Fn(&RegexSubstitution, &str) -> Option<String>,
) -> Option<ForwardedRequest> {
    let [of_rule, of_backend] = filters;
    let mut of_rule = of_rule.cloned();
    if let (Some(of_rule), Some(of_backend)) = (&mut of_rule, of_backend)
        && (of_backend.rewrite.path.is_some() || of_backend.rewrite.path_regex.is_some())
    {
        of_rule.rewrite.path = None;
        of_rule.rewrite.path_regex = None;
    }
    let changed = changed(of_rule.as_ref(), matched, sent, &substitute)?;
    self::changed(of_backend, matched, changed, &substitute)
}

/// Returns the request after one set of filters.
fn changed(
    filters: Option<&RouteFilters>,
    matched: &PathMatch,
    sent: ForwardedRequest,
    substitute: &impl Fn(&RegexSubstitution, &str) -> Option<String>,
) -> Option<ForwardedRequest> {
    let ForwardedRequest {
        mut host,
        mut target,
        headers,
    } = sent;
    let mut headers: Vec<(String, String)> = headers
        .into_iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .collect();
    if let Some(filters) = filters {
        let changes = &filters.request_headers;
        // Many servers take `_` and `-` in a name for the same (CGI), so both spellings go.
        let dashed = |name: &str| name.replace('_', "-");
        for name in changes
            .remove
            .iter()
            .chain(changes.set.iter().map(|(name, _)| name))
        {
            headers.retain(|(sent, _)| dashed(sent) != dashed(name));
        }
        headers.extend(changes.set.iter().chain(&changes.add).cloned());
        if let Some(rewritten) = &filters.rewrite.host {
            host.clone_from(rewritten);
        }
        if let Some(rewrite) = &filters.rewrite.path {
            target = rewritten_target(rewrite, matched, &target);
        }
        if let Some(regex) = &filters.rewrite.path_regex {
            // A substitution that exceeds its limits refuses the request.
            target = substituted_target(&target, |path| substitute(regex, path))?;
        }
        if filters.rewrite.path.is_some() || filters.rewrite.path_regex.is_some() {
            // The backend would resolve the dot segment to another path than the rule names.
            if has_dot_segment(&target) {
                return None;
            }
        }
    }
    // The order of names means nothing; the stable sort keeps the order of one name's values.
    headers.sort_by(|a, b| a.0.cmp(&b.0));
    Some(ForwardedRequest {
        host,
        target,
        headers,
    })
}

/// Returns the response headers that the client receives, of those that the endpoint sends: changed
/// by the filters of the rule and then of the backend, and sorted by name. A response's header is
/// removed or set in its own spelling only.
pub fn returned(
    filters: [Option<&RouteFilters>; 2],
    sent: &[(String, String)],
) -> Vec<(String, String)> {
    let mut headers: Vec<_> = sent
        .iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value.clone()))
        .collect();
    for filters in filters.into_iter().flatten() {
        let changes = &filters.response_headers;
        let set = changes.set.iter().map(|(name, _)| name);
        for name in changes.remove.iter().chain(set) {
            headers.retain(|(sent, _)| sent != name);
        }
        headers.extend(changes.set.iter().chain(&changes.add).cloned());
    }
    headers.sort_by(|a, b| a.0.cmp(&b.0));
    headers
}

/// Returns whether the path of a target has a dot segment, also with a path parameter.
pub(crate) fn has_dot_segment(target: &str) -> bool {
    let path = target.split('?').next().unwrap_or_default();
    // A regular expression may make an escape that its server decodes.
    let path = path.replace("%2e", ".").replace("%2E", ".");
    path.split(['/', ';'])
        .any(|part| part == "." || part == "..")
}

/// Returns the target with its path changed by `substitute`.
fn substituted_target(target: &str, substitute: impl Fn(&str) -> Option<String>) -> Option<String> {
    let (path, query) = match target.split_once('?') {
        Some((path, query)) => (path, format!("?{query}")),
        None => (target, String::new()),
    };
    let path = routing_path(path);
    if !path.starts_with('/') {
        return Some(target.to_owned());
    }
    let new = substitute(&path)?;
    let slash = if new.starts_with('/') { "" } else { "/" };
    Some(format!("{slash}{new}{query}"))
}

pub(crate) fn rewritten_target(rewrite: &PathRewrite, matched: &PathMatch, target: &str) -> String {
    let (path, query) = match target.split_once('?') {
        Some((path, query)) => (path, format!("?{query}")),
        None => (target, String::new()),
    };
    let path = routing_path(path);
    if !path.starts_with('/') {
        return target.to_owned();
    }
    let new = match (rewrite, matched) {
        (PathRewrite::Full(new), _)
        | (PathRewrite::Prefix(new), PathMatch::Exact(_) | PathMatch::Regex(_)) => new.clone(),
        (PathRewrite::Prefix(new), PathMatch::StringPrefix(prefix)) => {
            format!("{new}{}", &path[prefix.len()..])
        }
        (PathRewrite::Prefix(new), PathMatch::ElementPrefix(prefix)) => {
            let count = |text: &str| text.split('/').filter(|part| !part.is_empty()).count();
            let rest: Vec<&str> = path.split('/').skip(1 + count(prefix)).collect();
            let new = new.trim_end_matches('/');
            if rest.is_empty() {
                new.to_owned()
            } else {
                format!("{new}/{}", rest.join("/"))
            }
        }
    };
    let slash = if new.starts_with('/') { "" } else { "/" };
    format!("{slash}{new}{query}")
}
