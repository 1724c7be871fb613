//! The filters of the rule that a request matched: which mutations they make of the request, and
//! which headers of the response they change. It reads and writes no message.

use std::cell::RefCell;
use std::sync::Arc;

use canal_model::program::{PathMatch, RouteAction, RouteRule};
use canal_model::route_attempts::AttemptPolicy;
use canal_model::route_authorizer::RouteAuthorizer;
use canal_model::route_faults::FaultPolicy;
use canal_model::route_filters::{HeaderModifier, PathRewrite, RegexSubstitution, RouteFilters};
use canal_router::{PathSubstitution, RoutableRequest, TextPatterns};
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::mutations::RequestMutations;
use crate::route_cors::{self, CorsOutcome};
use crate::route_mirrors::SelectedMirror;
use crate::route_reply::RouteReply;

/// The reason for which a rewritten path with a dot segment is refused, as logs show it.
pub const REWRITTEN_DOT_SEGMENT: &str = "rewritten_dot_segment";

/// A rule with filters, and the match of it that holds for the request.
#[derive(Debug, Clone)]
pub struct MatchedFilters {
    rule: Arc<RouteRule>,
    match_index: usize,
    /// Filters of the rule and then of the backend; `None` if the backend has none of its own.
    of_backend: Option<Arc<RouteFilters>>,
    /// Compiled expression that rewrites the path, if the rule's is valid.
    substitution: Option<Arc<PathSubstitution>>,
    /// Outcome of the rule's cross-origin policy for the request.
    cors: Option<CorsOutcome>,
    /// Mirrors that get a copy of the request, until the copies begin.
    mirrors: RefCell<Vec<SelectedMirror>>,
}

impl MatchedFilters {
    /// Combines a rule with the position of the match that holds.
    pub fn new(rule: &Arc<RouteRule>, match_index: usize) -> Self {
        Self {
            rule: rule.clone(),
            match_index,
            of_backend: None,
            substitution: None,
            cors: None,
            mirrors: RefCell::default(),
        }
    }

    /// Sets the filters of the rule and then of the backend, which
    /// [`of_backend`](crate::backend_filters::of_backend) joins.
    #[must_use]
    pub fn with_backend(mut self, filters: Option<Arc<RouteFilters>>) -> Self {
        self.of_backend = filters;
        self
    }

    /// Sets the compiled expression that rewrites the path.
    #[must_use]
    pub fn with_substitution(mut self, compiled: Arc<PathSubstitution>) -> Self {
        self.substitution = Some(compiled);
        self
    }

    /// Decides what the rule's cross-origin policy does with the request. `patterns` are its regular
    /// expressions.
    #[must_use]
    pub fn with_cors<R: RoutableRequest>(
        mut self,
        patterns: Option<&TextPatterns>,
        request: &R,
    ) -> Self {
        let filtered = self.filters().map(|filters| &filters.response_headers);
        let policy = self.rule.cors.as_deref();
        self.cors = policy.map(|policy| route_cors::decide(policy, patterns, filtered, request));
        self
    }

    /// Sets the mirrors that get a copy of the request.
    #[must_use]
    pub(crate) fn with_mirrors(mut self, mirrors: Vec<SelectedMirror>) -> Self {
        self.mirrors = RefCell::new(mirrors);
        self
    }

    /// Returns the mirrors that get a copy of the request, once.
    pub fn take_mirrors(&self) -> Vec<SelectedMirror> {
        self.mirrors.take()
    }

    /// Returns the rule that the request matched.
    pub fn rule(&self) -> &Arc<RouteRule> {
        &self.rule
    }

    /// Returns the rule and the authorizer that it names, if it names one.
    pub fn authorizer(&self) -> Option<(&RouteRule, &RouteAuthorizer)> {
        let authorizer = self.rule.filters.as_deref()?.authorizer.as_deref()?;
        Some((&self.rule, authorizer))
    }

    /// Returns the outcome of the rule's cross-origin policy, if it has one.
    pub fn cors(&self) -> Option<&CorsOutcome> {
        self.cors.as_ref()
    }

    /// Returns the answer to the request if it is a preflight that the gateway answers.
    pub fn preflight(&self) -> Option<&RouteReply> {
        match self.cors() {
            Some(CorsOutcome::Preflight(reply)) => Some(reply),
            _ => None,
        }
    }

    fn filters(&self) -> Option<&RouteFilters> {
        let of_rule = self.rule.filters.as_deref();
        self.of_backend.as_deref().or(of_rule)
    }

    /// Returns the mutations of the request: those of its authorization, then those of the filters.
    /// A header that authorization determines stays as it is. `path` is the path in the form that
    /// routes compare.
    ///
    /// # Errors
    /// The rewritten path exceeds a limit, or has a dot segment, which nobody judged: `/static../x`
    /// with the prefix `/static` would become `/files/../x`. The error is the reason as logs show it.
    pub fn request(
        &self,
        authorized: Option<&RequestMutations>,
        path: &str,
    ) -> Result<RequestMutations, &'static str> {
        let mut changes = authorized.cloned().unwrap_or_default();
        let Some(filters) = self.filters() else {
            return Ok(changes);
        };
        let is_free = |name: &str| !authorized.is_some_and(|changes| changes.determines(name));
        let HeaderModifier { set, add, remove } = &filters.request_headers;
        for name in remove.iter().filter(|name| is_free(name)) {
            changes.remove(name);
        }
        for (name, value) in set.iter().filter(|(name, _)| is_free(name)) {
            changes.set(name, value.as_bytes());
        }
        for (name, value) in add.iter().filter(|(name, _)| is_free(name)) {
            changes.add(name, value.as_bytes());
        }
        changes.host.clone_from(&filters.rewrite.host);
        // `OPTIONS *` is about the server, and has no path.
        if path.starts_with('/') {
            if let Some(rewrite) = &filters.rewrite.path {
                changes.path = Some(self.rewritten(rewrite, path).ok_or(REWRITTEN_DOT_SEGMENT)?);
            } else if let Some(regex) = &filters.rewrite.path_regex {
                changes.path = Some(self.substituted(regex, path)?);
            }
        }
        Ok(changes)
    }

    /// Returns the path after a substitution.
    fn substituted(&self, regex: &RegexSubstitution, path: &str) -> Result<String, &'static str> {
        // Each expression is compiled with the rule. One without it is beyond the limits.
        let compiled = self.substitution.as_ref();
        let compiled = compiled.filter(|compiled| compiled.written() == regex);
        let compiled = compiled.ok_or("rewrite_not_compiled")?;
        let made = compiled.replace(path).map_err(|why| why.name())?;
        if has_dot_segment(&made) {
            return Err(REWRITTEN_DOT_SEGMENT);
        }
        let slash = if made.starts_with('/') { "" } else { "/" };
        Ok(format!("{slash}{made}"))
    }

    /// Returns the path after `rewrite`; `None` if it has a dot segment.
    pub(crate) fn rewritten(&self, rewrite: &PathRewrite, path: &str) -> Option<String> {
        let matched = self.rule.matches.get(self.match_index)?;
        let rewritten = rewritten_path(rewrite, &matched.path, path);
        (!has_dot_segment(&rewritten)).then_some(rewritten)
    }

    /// Returns the timeouts and retries that the rule asks for, if any.
    pub fn attempts(&self) -> Option<&AttemptPolicy> {
        self.rule.attempts.as_deref()
    }

    /// Returns the faults that the rule injects, if any.
    pub fn faults(&self) -> Option<&FaultPolicy> {
        self.rule.faults.as_deref()
    }

    pub(crate) fn action(&self) -> &RouteAction {
        &self.rule.action
    }

    /// Returns the changes of the headers of a response that the gateway makes because of an error, if
    /// there are any. Such a response is not shared with scripts of other origins.
    pub fn error_headers(&self) -> Option<&HeaderModifier> {
        let changes = self.filters().map(|filters| &filters.response_headers);
        changes.filter(|headers| !headers.is_empty())
    }

    /// Returns the changes of the response's headers, if there are any.
    pub fn response_headers(&self) -> Option<&HeaderModifier> {
        let changes = match &self.cors {
            Some(CorsOutcome::Response(changes)) => Some(changes),
            _ => return self.error_headers(),
        };
        changes.filter(|headers| !headers.is_empty())
    }
}

/// Applies the changes that a rule's filters make of a response's headers.
pub fn edit_response(changes: Option<&HeaderModifier>, headers: &mut HeaderMap) {
    let Some(HeaderModifier { set, add, remove }) = changes else {
        return;
    };
    for name in remove {
        headers.remove(name.as_str());
    }
    for (name, value) in set.iter().filter_map(parsed) {
        headers.insert(name, value);
    }
    for (name, value) in add.iter().filter_map(parsed) {
        headers.append(name, value);
    }
}

/// Returns a header in the form of a map; the compiler and the decoder have validated it.
fn parsed((name, value): &(String, String)) -> Option<(HeaderName, HeaderValue)> {
    let name = HeaderName::from_bytes(name.as_bytes()).ok()?;
    Some((name, HeaderValue::from_bytes(value.as_bytes()).ok()?))
}

/// Returns the path that the endpoint receives.
fn rewritten_path(rewrite: &PathRewrite, matched: &PathMatch, path: &str) -> String {
    let (PathRewrite::Full(new) | PathRewrite::Prefix(new)) = rewrite;
    let rest = match (rewrite, matched) {
        (PathRewrite::Full(_), _)
        | (PathRewrite::Prefix(_), PathMatch::Exact(_) | PathMatch::Regex(_)) => None,
        // Istio replaces the text of the prefix and nothing else.
        (PathRewrite::Prefix(_), PathMatch::StringPrefix(prefix)) => path
            .strip_prefix(prefix.as_str())
            .map(|rest| (new.as_str(), rest)),
        // Gateway API compares elements: a slash at the end of either text has no meaning.
        (PathRewrite::Prefix(_), PathMatch::ElementPrefix(prefix)) => path
            .strip_prefix(without_last_slash(prefix))
            .map(|rest| (without_last_slash(new), rest)),
    };
    let rewritten = match rest {
        None => new.clone(),
        Some((new, rest)) => [new, rest].concat(),
    };
    if rewritten.starts_with('/') {
        rewritten
    } else {
        format!("/{rewritten}")
    }
}

/// True if a path has a dot segment for some server: many take a backslash, and slashes that are
/// written as escapes, for a separator.
fn has_dot_segment(path: &str) -> bool {
    if !path.contains(['%', '\\']) {
        return path.split('/').any(is_dot_segment);
    }
    let mut plain = path.replace('\\', "/");
    for separator in ["%2F", "%2f", "%5C", "%5c"] {
        plain = plain.replace(separator, "/");
    }
    plain.split('/').any(is_dot_segment)
}

/// True for `.` and `..`, also as escapes and with a path parameter.
fn is_dot_segment(segment: &str) -> bool {
    let name = segment.split(';').next().unwrap_or_default();
    match name.contains('%') {
        false => matches!(name, "." | ".."),
        true => matches!(
            name.to_ascii_lowercase().replace("%2e", ".").as_str(),
            "." | ".."
        ),
    }
}

fn without_last_slash(text: &str) -> &str {
    text.strip_suffix('/').unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use canal_model::program::{HttpMatch, RouteKey};

    use super::*;

    /// Returns a matched rule with these filters and a match on a string prefix.
    fn matched(prefix: &str, filters: RouteFilters) -> MatchedFilters {
        let precedence = crate::testing::first_precedence();
        let rule = RouteRule {
            key: RouteKey {
                tenant: "t".parse().unwrap(),
                kind: "VirtualService".into(),
                namespace: "ns".parse().unwrap(),
                name: "r".parse().unwrap(),
                rule: "0".into(),
            },
            parent: crate::testing::key("s"),
            parent_port: None,
            consumer: None,
            hosts: vec![],
            matches: vec![HttpMatch {
                precedence,
                path: PathMatch::StringPrefix(prefix.into()),
                method: None,
                headers: vec![],
                query: vec![],
            }],
            action: RouteAction::Split(vec![]),
            filters: Some(Box::new(filters)),
            attempts: None,
            faults: None,
            cors: None,
            mirrors: Vec::new(),
        };
        MatchedFilters::new(&Arc::new(rule), 0)
    }

    #[test]
    fn a_rewrite_that_makes_a_dot_segment_is_refused() {
        let rewrite = canal_model::route_filters::UrlRewrite {
            host: None,
            path: Some(PathRewrite::Prefix("/files/".into())),
            path_regex: None,
        };
        let filters = matched(
            "/static",
            RouteFilters {
                rewrite,
                ..RouteFilters::default()
            },
        );
        for path in [
            "/static../x",
            "/static..;a/x",
            "/static..%2Fx",
            "/static..%5cx",
            "/static..\\x",
        ] {
            assert_eq!(filters.request(None, path), Err(REWRITTEN_DOT_SEGMENT));
        }
        let changes = filters.request(None, "/static..a/x").unwrap();
        assert_eq!(changes.path.as_deref(), Some("/files/..a/x"));
    }

    #[test]
    fn a_regular_expression_rewrites_the_path() {
        let regex = |pattern: &str, substitution: &str| {
            let written = RegexSubstitution {
                pattern: pattern.to_owned(),
                substitution: substitution.to_owned(),
            };
            let rewrite = canal_model::route_filters::UrlRewrite {
                path_regex: Some(written.clone()),
                ..Default::default()
            };
            let filters = RouteFilters {
                rewrite,
                ..RouteFilters::default()
            };
            let matched = matched("/", filters);
            match PathSubstitution::compile(&written, &canal_router::RouterLimits::DEFAULT) {
                Some(compiled) => matched.with_substitution(Arc::new(compiled)),
                None => matched,
            }
        };
        for (pattern, substitution, path, want) in [
            ("^/v([0-9]+)/(.*)$", r"/\2/v\1", "/v1/a", Ok("/a/v1")),
            ("^/", "", "/a", Ok("/a")),
            ("x", ".", "/a/x/b", Err(REWRITTEN_DOT_SEGMENT)),
            ("x", ".", "/a/.x%2Fb", Err(REWRITTEN_DOT_SEGMENT)),
            ("%25", "%", "/%252e./b", Err(REWRITTEN_DOT_SEGMENT)),
            ("(", "", "/a", Err("rewrite_not_compiled")),
        ] {
            let changes = regex(pattern, substitution).request(None, path);
            let changed = changes.as_ref().map(|changes| changes.path.as_deref());
            assert_eq!(changed, want.as_ref().map(|it| Some(*it)), "{pattern}");
        }
        let star = regex("a", "b").request(None, "*").unwrap();
        assert_eq!(star.path, None);
    }

    #[test]
    fn authorization_determines_its_headers() {
        let mut authorized = RequestMutations::default();
        authorized.set("x-user", b"alice");
        authorized.remove("authorization");
        let pair = |name: &str| (name.to_owned(), "forged".to_owned());
        let headers = HeaderModifier {
            set: vec![pair("x-user"), pair("x-other")],
            add: vec![pair("authorization")],
            remove: vec!["x-user".into()],
        };
        let filters = matched(
            "/",
            RouteFilters {
                request_headers: headers,
                ..RouteFilters::default()
            },
        );
        let changes = filters.request(Some(&authorized), "/").unwrap();
        assert_eq!(changes.value("x-user"), Some(&b"alice"[..]));
        assert_eq!(changes.value("x-other"), Some(&b"forged"[..]));
        assert_eq!(changes.added().count(), 0);
    }

    #[test]
    fn only_dot_segments_are_refused() {
        for (segment, want) in [
            ("..", true),
            (".", true),
            ("..;a", true),
            (".%2E", true),
            ("%2e;a", true),
            ("%2ea", false),
            ("..a", false),
            ("", false),
        ] {
            assert_eq!(is_dot_segment(segment), want, "{segment:?}");
        }
    }

    #[test]
    fn paths_are_rewritten_as_both_apis_define() {
        let element = |prefix: &str| PathMatch::ElementPrefix(prefix.into());
        let string = |prefix: &str| PathMatch::StringPrefix(prefix.into());
        for (matched, new, path, want) in [
            // The table of Gateway API's HTTPPathModifier.replacePrefixMatch.
            (element("/foo"), "/xyz", "/foo/bar", "/xyz/bar"),
            (element("/foo"), "/xyz/", "/foo/bar", "/xyz/bar"),
            (element("/foo/"), "/xyz", "/foo/bar", "/xyz/bar"),
            (element("/foo/"), "/xyz/", "/foo/bar", "/xyz/bar"),
            (element("/foo"), "/xyz", "/foo", "/xyz"),
            (element("/foo"), "/xyz", "/foo/", "/xyz/"),
            (element("/foo"), "/", "/foo/bar", "/bar"),
            (element("/foo"), "/", "/foo/", "/"),
            (element("/foo"), "/", "/foo", "/"),
            (element("/"), "/xyz", "/foo", "/xyz/foo"),
            // Envoy's prefix_rewrite, which Istio configures.
            (string("/api/"), "/", "/api/v1", "/v1"),
            (string("/api"), "/", "/api/v1", "//v1"),
            (string("/api"), "/v2", "/api-old", "/v2-old"),
            (PathMatch::Exact("/a".into()), "/b", "/a", "/b"),
            (PathMatch::Regex("/a.*".into()), "/b", "/a/c", "/b"),
        ] {
            let rewrite = PathRewrite::Prefix(new.into());
            assert_eq!(
                rewritten_path(&rewrite, &matched, path),
                want,
                "{matched:?} {new} {path}"
            );
            let full = PathRewrite::Full("/all".into());
            assert_eq!(rewritten_path(&full, &matched, path), "/all");
        }
    }
}
