//! Cross-origin resource sharing in the gateway, compared with the oracle: generated policies and
//! requests.

use std::sync::Arc;

use canal_gateway_config::{CorsOutcome, MatchedFilters};
use canal_model::program::{RouteAction, RouteKey, RouteRule};
use canal_model::route_cors::{CorsDialect, CorsList, CorsPolicy, OriginHost, OriginMatch};
use canal_model::route_filters::UrlScheme;
use canal_oracle::answers::OracleAnswer;
use canal_oracle::cors::{OracleCors, decide};
use canal_router::{RoutableRequest, RouterLimits, TextPatterns};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

const ORIGINS: [&str; 14] = [
    "",
    "null",
    "https://a.example",
    "https://A.Example",
    "https://a.example:443",
    "https://a.example:8443",
    "https://b.a.example",
    "https://.example",
    "https://a.example:99999",
    "http://a.example",
    "http://a.example:80",
    "https://[::1]:8443",
    "https://a.example.evil",
    "https://a.example:",
];

#[derive(Debug)]
struct CrossOriginRequest {
    method: &'static str,
    headers: Vec<(String, String)>,
}

impl RoutableRequest for CrossOriginRequest {
    fn host(&self) -> &[u8] {
        b"web"
    }
    fn method(&self) -> &[u8] {
        self.method.as_bytes()
    }
    fn path(&self) -> &[u8] {
        b"/"
    }
    fn query(&self) -> Option<&[u8]> {
        None
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        let values = self.headers.iter().filter(|(sent, _)| sent == name);
        values.for_each(|(_, value)| visit(value.as_bytes()));
    }
}

fn requests() -> impl Strategy<Value = CrossOriginRequest> {
    let header = |name: &'static str, values: &'static [&'static str]| {
        vec(select(values), 0..3).prop_map(move |values| {
            let values = values.into_iter();
            values
                .map(|value| (name.to_owned(), value.to_owned()))
                .collect::<Vec<_>>()
        })
    };
    let headers = (
        header("origin", &ORIGINS),
        header("access-control-request-method", &["", "PUT", "GET"]),
        header("access-control-request-headers", &["", "x-a, x-b"]),
    );
    let method = select(vec!["OPTIONS", "GET", "options"]);
    (method, headers).prop_map(|(method, (origin, asked, names))| CrossOriginRequest {
        method,
        headers: [origin, asked, names].concat(),
    })
}

fn origins() -> impl Strategy<Value = OriginMatch> {
    let host = select(vec![
        OriginHost::Exact("a.example".into()),
        OriginHost::Exact("[::1]".into()),
        OriginHost::Suffix(".example".into()),
        OriginHost::Any,
    ]);
    let scheme = select(vec![UrlScheme::Http, UrlScheme::Https]);
    prop_oneof![
        1 => Just(OriginMatch::Any),
        2 => select(&ORIGINS[1..]).prop_map(|text| OriginMatch::Exact(text.into())),
        2 => select(&ORIGINS[1..]).prop_map(|text| OriginMatch::Prefix(text.into())),
        2 => select(vec![r"https://[a-z]+\.example", "http.*", "null|b"])
            .prop_map(|text| OriginMatch::Regex(text.into())),
        4 => (scheme, host, select(vec![80u16, 443, 8443]))
            .prop_map(|(scheme, host, port)| OriginMatch::Host { scheme, host, port }),
    ]
}

fn policies() -> impl Strategy<Value = CorsPolicy> {
    let list = || {
        select(vec![
            CorsList::Unnamed,
            CorsList::Requested,
            CorsList::Listed("GET,PUT".into()),
        ])
    };
    (
        vec(origins(), 0..4),
        (list(), list()),
        option::of(Just("x-c,x-d".to_owned())),
        option::of(0..10u64),
        any::<bool>(),
        select(CorsDialect::ALL.to_vec()),
    )
        .prop_map(
            |(origins, (methods, headers), exposed, max_age, credentials, dialect)| CorsPolicy {
                origins,
                methods,
                headers,
                exposed,
                max_age,
                credentials,
                dialect,
            },
        )
}

fn rule(policy: &CorsPolicy) -> Arc<RouteRule> {
    Arc::new(RouteRule {
        key: RouteKey {
            tenant: "t".parse().unwrap(),
            kind: "HTTPRoute".into(),
            namespace: "ns".parse().unwrap(),
            name: "r".parse().unwrap(),
            rule: "0".into(),
        },
        parent: "t/ns/s".parse().unwrap(),
        parent_port: None,
        consumer: None,
        hosts: vec![],
        matches: vec![],
        action: RouteAction::Split(vec![]),
        filters: None,
        attempts: None,
        faults: None,
        cors: Some(Box::new(policy.clone())),
        mirrors: Vec::new(),
    })
}

/// Returns the outcome in the gateway, in the oracle's form.
fn outcome(policy: &CorsPolicy, request: &CrossOriginRequest) -> OracleCors {
    let patterns = policy.origins.iter().filter_map(|origin| match origin {
        OriginMatch::Regex(pattern) => Some(pattern.as_str()),
        _ => None,
    });
    let patterns = TextPatterns::compile(patterns, &RouterLimits::DEFAULT);
    let matched = MatchedFilters::new(&rule(policy), 0).with_cors(Some(&patterns), request);
    match matched.cors() {
        Some(CorsOutcome::Preflight(reply)) => {
            let headers = reply.headers.iter();
            let mut headers: Vec<_> = headers
                .map(|(name, value)| (name.clone(), String::from_utf8(value.clone()).unwrap()))
                .collect();
            headers.sort();
            OracleCors::Preflight(OracleAnswer {
                status: reply.status,
                headers,
                body: reply.body.clone(),
            })
        }
        Some(CorsOutcome::Response(changes)) => {
            let mut headers = [changes.set.clone(), changes.add.clone()].concat();
            headers.sort();
            OracleCors::Response {
                headers,
                removed: changes.remove.clone(),
            }
        }
        None => panic!("the rule has a policy"),
    }
}

/// Compares a whole text with a pattern of this file; shares no code with the router.
fn is_match(pattern: &str, text: &str) -> bool {
    match pattern {
        "http.*" => text.starts_with("http"),
        "null|b" => text == "null" || text == "b",
        _ => {
            let name = text.strip_prefix("https://");
            let name = name.and_then(|rest| rest.strip_suffix(".example"));
            name.is_some_and(|name| {
                !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase())
            })
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn the_gateway_shares_what_the_oracle_does(policy in policies(), request in requests()) {
        let want = decide(&policy, request.method, &request.headers, is_match);
        prop_assert_eq!(outcome(&policy, &request), want, "{:?}", request.headers);
    }
}
