//! Requests, rules, and the simple reference with which the router is compared.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use canal_model::program::{
    Backend, BackendTarget, HostMatch, HttpMatch, METHOD, PathMatch, Precedence, RouteAction,
    RouteKey, RouteRule, TextMatch, ValueMatch,
};
use canal_router::RoutableRequest;
use regex_automata::meta::Regex;

/// Request as the tests write it.
#[derive(Debug, Clone, Default)]
pub(crate) struct RuleRequest {
    pub(crate) host: String,
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: Option<String>,
    pub(crate) headers: Vec<(String, String)>,
}

impl RoutableRequest for RuleRequest {
    fn host(&self) -> &[u8] {
        self.host.as_bytes()
    }
    fn method(&self) -> &[u8] {
        self.method.as_bytes()
    }
    fn path(&self) -> &[u8] {
        self.path.as_bytes()
    }
    fn query(&self) -> Option<&[u8]> {
        self.query.as_deref().map(str::as_bytes)
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        assert_eq!(name, name.to_ascii_lowercase());
        self.headers
            .iter()
            .filter(|(given, _)| given.eq_ignore_ascii_case(name))
            .for_each(|(_, value)| visit(value.as_bytes()));
    }
}

/// Creates a rule that the tests identify by its name.
pub(crate) fn rule(name: &str, hosts: Vec<HostMatch>, matches: Vec<HttpMatch>) -> Arc<RouteRule> {
    let id = |text: &str| text.parse().expect("valid");
    Arc::new(RouteRule {
        key: RouteKey {
            tenant: "t".parse().expect("valid"),
            kind: "HTTPRoute".into(),
            namespace: "ns".parse().expect("valid"),
            name: "routes".parse().expect("valid"),
            rule: name.into(),
        },
        parent: id("t/ns/svc"),
        parent_port: None,
        consumer: None,
        hosts,
        matches,
        filters: None,
        attempts: None,
        faults: None,
        cors: None,
        mirrors: Vec::new(),
        action: RouteAction::Split(vec![Backend {
            weight: 1,
            filters: None,
            target: BackendTarget::Service {
                service: id("t/ns/svc"),
                port: 80,
                subset: Default::default(),
            },
        }]),
    })
}

thread_local! {
    static REGEXES: RefCell<HashMap<String, Regex>> = RefCell::default();
}

/// Matches the whole text with one regex of its own.
fn regex(pattern: &str, text: &str) -> bool {
    let compile = || Regex::new(&format!(r"\A(?:{pattern})\z")).expect("valid");
    REGEXES.with_borrow_mut(|known| {
        known
            .entry(pattern.to_owned())
            .or_insert_with(compile)
            .is_match(text)
    })
}

fn text_holds(want: &TextMatch, text: &str) -> bool {
    match want {
        TextMatch::Exact(want) => want == text,
        TextMatch::Prefix(want) => text.starts_with(want),
        TextMatch::Regex(pattern) => regex(pattern, text),
        TextMatch::Present => true,
        TextMatch::Not(unwanted) => !text_holds(unwanted, text),
    }
}

/// Applies the Gateway API's definition literally: split both at `/`, drop a trailing empty element
/// of the prefix, compare element by element.
fn element_prefix_holds(prefix: &str, path: &str) -> bool {
    let mut want: Vec<&str> = prefix.split('/').collect();
    if want.last() == Some(&"") {
        want.pop();
    }
    let have: Vec<&str> = path.split('/').collect();
    prefix.starts_with('/')
        && path.starts_with('/')
        && have.len() >= want.len()
        && have[..want.len()] == want[..]
}

fn path_holds(want: &PathMatch, path: &str) -> bool {
    match want {
        PathMatch::Exact(want) => want == path,
        PathMatch::ElementPrefix(prefix) => element_prefix_holds(prefix, path),
        PathMatch::StringPrefix(prefix) => path.starts_with(prefix.as_str()),
        PathMatch::Regex(pattern) => regex(pattern, path),
    }
}

fn host_holds(hosts: &[HostMatch], host: &str) -> bool {
    let host = host.to_ascii_lowercase();
    hosts.is_empty()
        || hosts.iter().any(|want| match want {
            HostMatch::Exact(want) => *want == host,
            HostMatch::Suffix(suffix) => {
                host.len() > suffix.len() && host.ends_with(suffix.as_str())
            }
        })
}

/// Tests conditions on values. The first of several conditions on one name counts; what is excluded
/// counts beside it. `value` returns what the request has.
fn values_hold(conditions: &[ValueMatch], value: impl Fn(&ValueMatch) -> bool) -> bool {
    let excludes = |condition: &ValueMatch| matches!(condition.value, TextMatch::Not(_));
    let is_first = |i: usize| {
        let mut earlier = conditions[..i].iter();
        excludes(&conditions[i])
            || !earlier.any(|it| it.name == conditions[i].name && !excludes(it))
    };
    (0..conditions.len())
        .filter(|&i| is_first(i))
        .all(|i| value(&conditions[i]))
}

fn match_holds(want: &HttpMatch, request: &RuleRequest) -> bool {
    let header = |condition: &ValueMatch| {
        let lines: Vec<&str> = match condition.name.as_str() {
            METHOD => vec![request.method.as_str()],
            name => {
                let headers = request.headers.iter();
                let same = headers.filter(|(n, _)| n.eq_ignore_ascii_case(name));
                same.map(|(_, v)| v.as_str()).collect()
            }
        };
        let joined = lines.join(",");
        match &condition.value {
            TextMatch::Not(unwanted) if **unwanted == TextMatch::Present => lines.is_empty(),
            // Each line alone and all joined: a second line must not hide the first.
            TextMatch::Not(unwanted) => {
                let mut texts = lines.into_iter().chain([joined.as_str()]);
                !texts.any(|text| text_holds(unwanted, text))
            }
            wanted => !lines.is_empty() && text_holds(wanted, &joined),
        }
    };
    let query = |condition: &ValueMatch| {
        let name = condition.name.as_str();
        let pairs = request
            .query
            .iter()
            .flat_map(|query| query.split('&'))
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        pairs
            .filter(|(n, _)| *n == name)
            .map(|(_, v)| v)
            .next()
            .is_some_and(|text| text_holds(&condition.value, text))
    };
    path_holds(&want.path, &request.path)
        && want
            .method
            .as_ref()
            .is_none_or(|method| *method == request.method)
        && values_hold(&want.headers, header)
        && values_hold(&want.query, query)
}

/// Finds the winner by reading every match of every rule. Returns the name of its rule and the
/// index of the match.
pub(crate) fn naive(
    rules: &[Arc<RouteRule>],
    port: u16,
    request: &RuleRequest,
) -> Option<(String, usize)> {
    let mut best: Option<(&Precedence, &RouteRule, usize)> = None;
    for rule in rules.iter().filter(|rule| {
        rule.parent_port.is_none_or(|p| p == port) && host_holds(&rule.hosts, &request.host)
    }) {
        for (place, candidate) in rule
            .matches
            .iter()
            .enumerate()
            .filter(|(_, candidate)| match_holds(candidate, request))
        {
            if best.is_none_or(|(precedence, _, _)| candidate.precedence < *precedence) {
                best = Some((&candidate.precedence, rule, place));
            }
        }
    }
    best.map(|(_, rule, place)| (rule.key.rule.clone(), place))
}
