//! Computes the bytes that route rules take in a gateway: its tables, its copies of the rules, and
//! the automata of regular expressions. The figures are measured and rounded up;
//! `tests/differential/tests/weights.rs` compares them with the router's own. Nothing is refused
//! here. Start at [`RouteWeights::add`].

use std::collections::HashSet;

use canal_model::ids::{Namespace, ServiceKey};
use canal_model::program::{
    BackendTarget, HostMatch, HttpMatch, PathMatch, RouteAction, RouteRule, TextMatch,
};
use canal_model::route_attempts::AttemptPolicy;
use canal_model::route_authorizer::{RouteAuthorizer, RouteAuthorizerProtocol};
use canal_model::route_cors::{CorsList, CorsPolicy, OriginHost, OriginMatch};
use canal_model::route_faults::FaultPolicy;
use canal_model::route_filters::{HeaderModifier, PathRewrite, RouteAnswer, RouteFilters};

use crate::pattern;

/// Bytes of a rule with its keys: as it was received, as it was read, and in the snapshot of the
/// gateway.
/// Measured and rounded up (see the head of this file).
const RULE_BYTES: u64 = 3072;
/// Bytes of a match without its texts.
/// Measured and rounded up.
const MATCH_BYTES: u64 = 512;
/// Bytes of a match in the tables of one host, besides its path.
/// Measured and rounded up.
const HOST_ENTRY_BYTES: u64 = 128;
/// Bytes of one segment of a path in the tables of one host.
/// Measured and rounded up.
const SEGMENT_BYTES: u64 = 128;
/// Bytes of a condition, of a host or of a label, without its texts.
/// Measured and rounded up.
const FIELD_BYTES: u64 = 256;
/// Bytes of a backend without its texts.
/// Measured and rounded up.
const BACKEND_BYTES: u64 = 512;
/// Copies of a text: as it was received, as it was read, and in the tables.
const TEXT_COPIES: u64 = 3;
/// Bytes of the smallest automaton, with the caches that workers build while they run it.
/// Measured and rounded up.
pub const AUTOMATON_BYTES: u64 = 64 << 10;
/// Bytes for each byte that the states of a regular expression take. The automaton exists for both
/// directions and has spare capacity, and the caches of workers grow with it.
/// Measured and rounded up.
pub const STATES_FACTOR: u64 = 8;

/// The weights of a tenant's rules so far.
#[derive(Debug, Default)]
pub struct RouteWeights {
    /// Hosts of route tables that have an automaton for their paths; `None` stands for any host. A
    /// service has a table for all clients, and one for each namespace with rules of its own.
    hosts_with_automaton: HashSet<(ServiceKey, Option<Namespace>, Option<HostMatch>)>,
}

impl RouteWeights {
    /// Returns the bytes that one more rule takes in a gateway.
    pub fn add(&mut self, rule: &RouteRule) -> u64 {
        let key = [
            rule.key.kind.len(),
            rule.key.rule.len(),
            rule.key.name.as_str().len(),
            rule.parent.name.as_str().len(),
            rule.consumer.as_ref().map_or(0, |it| it.as_str().len()),
        ];
        let hosts: u64 = rule
            .hosts
            .iter()
            .map(|host| field_bytes(host_text(host).len()))
            .sum();
        let matches: u64 = rule
            .matches
            .iter()
            .map(|http| self.match_bytes(rule, http))
            .sum();
        RULE_BYTES
            + TEXT_COPIES * key.iter().sum::<usize>() as u64
            + hosts
            + matches
            + action_bytes(&rule.action)
            + rule.filters.as_deref().map_or(0, filter_bytes)
            + rule.attempts.as_deref().map_or(0, attempt_bytes)
            + rule.cors.as_deref().map_or(0, cors_bytes)
            + rule.mirrors.len() as u64 * (BACKEND_BYTES + FIELD_BYTES)
            + rule
                .faults
                .as_deref()
                .map_or(0, |_| field_bytes(size_of::<FaultPolicy>()))
    }

    fn match_bytes(&mut self, rule: &RouteRule, http: &HttpMatch) -> u64 {
        // The gateway has tables of their own for each host, and the rules without a host in one
        // table.
        let copies = rule.hosts.len().max(1) as u64;
        let path = match &http.path {
            PathMatch::Regex(pattern) => {
                copies * states_bytes(pattern) + self.path_automata(rule) * AUTOMATON_BYTES
            }
            PathMatch::Exact(text)
            | PathMatch::ElementPrefix(text)
            | PathMatch::StringPrefix(text) => {
                let segments = text.bytes().filter(|byte| *byte == b'/').count() as u64;
                copies * (segments * SEGMENT_BYTES + text.len() as u64)
                    + TEXT_COPIES * text.len() as u64
            }
        };
        let conditions = http.headers.iter().chain(&http.query);
        let conditions =
            conditions.map(|condition| condition_bytes(condition.name.len(), &condition.value));
        MATCH_BYTES + copies * HOST_ENTRY_BYTES + path + conditions.sum::<u64>()
    }

    /// Returns how many automata a path pattern of the rule adds. All path patterns of one host of
    /// a service are in one automaton.
    fn path_automata(&mut self, rule: &RouteRule) -> u64 {
        let any = rule.hosts.is_empty().then_some(None);
        let hosts = any.into_iter().chain(rule.hosts.iter().cloned().map(Some));
        hosts
            .filter(|host| {
                let place = (rule.parent.clone(), rule.consumer.clone(), host.clone());
                self.hosts_with_automaton.insert(place)
            })
            .count() as u64
    }
}

/// Returns the bytes that the states of a pattern take. A pattern that is refused has none.
fn states_bytes(pattern: &str) -> u64 {
    TEXT_COPIES * pattern.len() as u64
        + STATES_FACTOR * pattern::cost(pattern).unwrap_or_default() as u64
}

fn field_bytes(text: usize) -> u64 {
    FIELD_BYTES + TEXT_COPIES * text as u64
}

fn host_text(host: &HostMatch) -> &str {
    match host {
        HostMatch::Exact(text) | HostMatch::Suffix(text) => text,
    }
}

fn filter_bytes(filters: &RouteFilters) -> u64 {
    let modifier = |headers: &HeaderModifier| {
        let pairs = headers.set.iter().chain(&headers.add);
        let pairs = pairs.map(|(name, value)| field_bytes(name.len() + value.len()));
        let removed = headers.remove.iter().map(|name| field_bytes(name.len()));
        pairs.chain(removed).sum::<u64>()
    };
    let host = filters.rewrite.host.as_ref().map_or(0, String::len);
    let path = path_len(filters.rewrite.path.as_ref());
    let regex = filters.rewrite.path_regex.as_ref().map_or(0, |regex| {
        let states = pattern::substitution_cost(regex).unwrap_or_default() as u64;
        field_bytes(regex.pattern.len() + regex.substitution.len())
            + STATES_FACTOR * states
            + AUTOMATON_BYTES
    });
    let authorizer = filters.authorizer.as_deref().map_or(0, authorizer_bytes);
    regex
        + authorizer
        + field_bytes(host + path)
        + modifier(&filters.request_headers)
        + modifier(&filters.response_headers)
}

/// Returns the bytes of the authorizer of a rule or a listener.
pub(crate) fn authorizer_bytes(authorizer: &RouteAuthorizer) -> u64 {
    let names = |names: &[String]| {
        names
            .iter()
            .map(|name| field_bytes(name.len()))
            .sum::<u64>()
    };
    let of_protocol = match &authorizer.protocol {
        RouteAuthorizerProtocol::Grpc => 0,
        RouteAuthorizerProtocol::Http {
            path_prefix,
            response_headers,
        } => field_bytes(path_prefix.len()) + names(response_headers),
    };
    BACKEND_BYTES + names(&authorizer.headers) + of_protocol
}

fn attempt_bytes(attempts: &AttemptPolicy) -> u64 {
    let statuses = attempts.retries.as_ref().map_or(0, |it| it.statuses.len());
    field_bytes(size_of::<AttemptPolicy>() + statuses * size_of::<u16>())
}

fn cors_bytes(policy: &CorsPolicy) -> u64 {
    let list = |list: &CorsList| match list {
        CorsList::Listed(names) => names.len(),
        CorsList::Unnamed | CorsList::Requested => 0,
    };
    let exposed = policy.exposed.as_ref().map_or(0, String::len);
    let names = list(&policy.methods) + list(&policy.headers) + exposed;
    let origins = policy.origins.iter().map(|origin| match origin {
        OriginMatch::Any => 0,
        OriginMatch::Exact(text) | OriginMatch::Prefix(text) => field_bytes(text.len()),
        OriginMatch::Regex(pattern) => {
            field_bytes(pattern.len()) + states_bytes(pattern) + AUTOMATON_BYTES
        }
        OriginMatch::Host { host, .. } => field_bytes(match host {
            OriginHost::Any => 0,
            OriginHost::Exact(text) | OriginHost::Suffix(text) => text.len(),
        }),
    });
    field_bytes(size_of::<CorsPolicy>() + names) + origins.sum::<u64>()
}

fn path_len(path: Option<&PathRewrite>) -> usize {
    path.map_or(
        0,
        |(PathRewrite::Full(text) | PathRewrite::Prefix(text))| text.len(),
    )
}

fn action_bytes(action: &RouteAction) -> u64 {
    match action {
        RouteAction::Refuse { reason, .. } => field_bytes(reason.len()),
        RouteAction::Answer(answer) => match &**answer {
            RouteAnswer::Direct(direct) => field_bytes(direct.body.len()),
            RouteAnswer::Redirect(redirect) => {
                let host = redirect.host.as_ref().map_or(0, String::len);
                let query = redirect.query.as_ref().map_or(0, String::len);
                field_bytes(host + query + path_len(redirect.path.as_ref()))
            }
        },
        RouteAction::Split(backends) => {
            let target = |target: &BackendTarget| match target {
                BackendTarget::Refuse { reason, .. } => field_bytes(reason.len()),
                BackendTarget::Service {
                    service, subset, ..
                } => {
                    let labels = subset
                        .iter()
                        .map(|(name, value)| field_bytes(name.len() + value.len()))
                        .sum::<u64>();
                    TEXT_COPIES * service.name.as_str().len() as u64 + labels
                }
            };
            backends
                .iter()
                .map(|backend| {
                    let filters = backend.filters.as_deref().map_or(0, filter_bytes);
                    BACKEND_BYTES + target(&backend.target) + filters
                })
                .sum()
        }
    }
}

/// Returns the bytes of a condition on a text with a name of this length.
fn condition_bytes(name: usize, condition: &TextMatch) -> u64 {
    match condition {
        TextMatch::Exact(text) | TextMatch::Prefix(text) => field_bytes(name + text.len()),
        TextMatch::Regex(pattern) => {
            field_bytes(name + pattern.len()) + states_bytes(pattern) + AUTOMATON_BYTES
        }
        TextMatch::Present => field_bytes(name),
        TextMatch::Not(unwanted) => field_bytes(0) + condition_bytes(name, unwanted),
    }
}
