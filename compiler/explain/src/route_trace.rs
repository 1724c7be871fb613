//! Describes why one match of the routes decides about a request, and why the others do not. The
//! oracle decides. Start at [`trace_matches`].

use canal_compiler::oracle::{self, OracleRequest, UnmetCondition};
use canal_compiler::text;
use canal_model::ingress::host_order;
use canal_model::program::{HostMatch, HttpMatch, Precedence, RouteKey, RouteRule};

/// One match of a rule that could apply to a request, and why it decides or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatchTrace {
    pub rule: RouteKey,
    /// The hosts and conditions of the match, as text.
    pub conditions: String,
    pub standing: MatchStanding,
}

/// How a match of a rule compares with the others for one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MatchStanding {
    /// Of all matches that hold, it is the first.
    Decides,
    /// The first condition that does not hold, as text.
    Unmet(String),
    /// It holds too, but another match comes first; the text says why.
    Later(String),
}

/// A match of a rule, with the host of the Gateway's listener for which it applies. At a service that
/// host is `None`.
pub(super) type CandidateMatch<'a> = (Option<&'a HostMatch>, &'a RouteRule, &'a HttpMatch);

/// Returns the trace of each candidate. The candidates are in match order, and `request` is in the
/// form in which they are compared with it.
pub(super) fn trace_matches<'a>(
    candidates: impl Iterator<Item = CandidateMatch<'a>>,
    request: &OracleRequest,
) -> Vec<MatchTrace> {
    let mut winner: Option<CandidateMatch<'a>> = None;
    let traces = candidates.map(|candidate| {
        let (host, rule, http) = candidate;
        let standing = match (oracle::unmet(&rule.hosts, http, request), winner) {
            (Some(condition), _) => {
                MatchStanding::Unmet(describe_unmet(condition, rule, http, request))
            }
            (None, Some(winner)) => MatchStanding::Later(describe_order(&winner, &candidate)),
            (None, None) => {
                winner = Some(candidate);
                MatchStanding::Decides
            }
        };
        MatchTrace {
            rule: rule.key.clone(),
            conditions: describe_match(host, rule, http, request),
            standing,
        }
    });
    traces.collect()
}

fn describe_match(
    host: Option<&HostMatch>,
    rule: &RouteRule,
    http: &HttpMatch,
    request: &OracleRequest,
) -> String {
    // A connection that is relayed has no method: its rules match on the server name only.
    if request.method.is_empty() {
        return match host {
            Some(host) => format!("server name {}", text::host(Some(host))),
            None => "any connection".to_owned(),
        };
    }
    // A listener takes the hosts of its routes one by one.
    let hosts = match host {
        Some(host) => format!("host {} ", text::host(Some(host))),
        None => text::hosts(&rule.hosts),
    };
    format!("{hosts}{}", text::http_match(http))
}

fn describe_unmet(
    condition: UnmetCondition<'_>,
    rule: &RouteRule,
    http: &HttpMatch,
    request: &OracleRequest,
) -> String {
    let wanted = match condition {
        UnmetCondition::Host => text::hosts(&rule.hosts).trim_end().to_owned(),
        UnmetCondition::Path => text::path_match(&http.path),
        UnmetCondition::Method(method) => format!("method = {method}"),
        UnmetCondition::Header(header) => text::condition("header", header),
        UnmetCondition::Query(parameter) => text::condition("query", parameter),
    };
    match oracle::compared_value(condition, request) {
        Some(value) => format!("not so: {wanted} (it is {value:?})"),
        None => format!("not so: {wanted} (there is none)"),
    }
}

/// Describes why `winner` comes before `other` in match order.
fn describe_order(winner: &CandidateMatch<'_>, other: &CandidateMatch<'_>) -> String {
    let (winner_host, _, winner_match) = *winner;
    let (host, rule, http) = *other;
    if host_order(winner_host) != host_order(host) {
        let (host, winner_host) = (text::host(host), text::host(winner_host));
        return format!("its host {host} is less specific than {winner_host}");
    }
    describe_precedence(&winner_match.precedence, &http.precedence, &rule.key.kind).to_owned()
}

/// Describes the first field by which `second` comes after `first`. `kind` is the kind of its object.
fn describe_precedence(first: &Precedence, second: &Precedence, kind: &str) -> &'static str {
    if first.class != second.class {
        return "it is a fallback";
    }
    let mut pairs = first.specificity.iter().zip(&second.specificity);
    if let Some(field) = pairs.position(|(first, second)| first != second) {
        return describe_specificity(kind, field);
    }
    if first.created != second.created {
        return "its object is younger";
    }
    if first.object != second.object {
        return "its object comes later by kind, namespace and name";
    }
    let [rule, place] = [0, 1].map(|at| first.indexes[at] != second.indexes[at]);
    match (rule, place) {
        (true, _) => "its rule comes later in its object",
        (false, true) => "it comes later in its rule",
        // One object is attached twice to the port.
        (false, false) => "it comes later by the name of its rule",
    }
}

/// Describes a match that is less specific in a field of [`Precedence::specificity`].
fn describe_specificity(kind: &str, field: usize) -> &'static str {
    match (kind, field) {
        ("GRPCRoute", 0) => "its condition on the service is less specific",
        ("GRPCRoute", 1) => "its condition on the method is less specific",
        ("GRPCRoute", _) => "it has fewer conditions on headers",
        (_, 0) => "exact paths come first, then regular expressions, then prefixes",
        (_, 1) => "its path is shorter",
        (_, 2) => "it has no condition on the method",
        (_, 3) => "it has fewer conditions on headers",
        _ => "it has fewer conditions on query parameters",
    }
}
