//! Compares the router with a scan of all matches, over generated rules and requests. The alphabets
//! are small, so that requests hit rules.

use std::sync::Arc;

use crate::rules::{RuleRequest, naive, rule};
use canal_model::program::{
    HostMatch, HttpMatch, PathMatch, Precedence, RouteRule, TextMatch, ValueMatch,
};
use canal_model::route_table::RouteTable;
use canal_router::{Router, RouterLimits};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

fn path() -> impl Strategy<Value = String> {
    "(/(a|b|ab|abc||a-segment-too-long-to-lie-in-the-table)){1,4}"
}

fn path_match() -> impl Strategy<Value = PathMatch> {
    prop_oneof![
        3 => path().prop_map(PathMatch::Exact),
        3 => path().prop_map(PathMatch::ElementPrefix),
        3 => path().prop_map(PathMatch::StringPrefix),
        1 => select(vec!["", "a", "*"]).prop_map(|odd| PathMatch::StringPrefix(odd.into())),
        1 => select(vec!["*", "a"]).prop_map(|odd| PathMatch::Exact(odd.into())),
        2 => select(vec!["/a.*", "/[ab]+", "/a|/b", "(/ab?c?)+", ".*b", "/", "/(a|ab)(/.*)?"]).prop_map(|p| PathMatch::Regex(p.into())),
    ]
}

fn text_match() -> impl Strategy<Value = TextMatch> {
    let negated = |text: TextMatch| prop_oneof![5 => Just(text.clone()), 1 => Just(TextMatch::Not(Box::new(text)))];
    wanted_text().prop_flat_map(negated)
}

fn wanted_text() -> impl Strategy<Value = TextMatch> {
    prop_oneof![
        select(vec!["", "1", "12"]).prop_map(|text| TextMatch::Exact(text.into())),
        select(vec!["", "1"]).prop_map(|text| TextMatch::Prefix(text.into())),
        select(vec!["1*", "[12]+", "2|1,1"]).prop_map(|text| TextMatch::Regex(text.into())),
        Just(TextMatch::Present),
    ]
}

fn values() -> impl Strategy<Value = Vec<ValueMatch>> {
    vec(
        (select(vec!["x", "y", ":method"]), text_match()).prop_map(|(name, value)| ValueMatch {
            name: name.into(),
            value,
        }),
        0..3,
    )
}

fn http_match() -> impl Strategy<Value = HttpMatch> {
    let precedence = (0..2u8, vec(0..2u32, 5), 0..2u64, 0..3u32).prop_map(
        |(class, specificity, created, place)| Precedence {
            class,
            specificity: specificity.try_into().expect("five"),
            created,
            object: String::new(),
            indexes: [place, 0],
        },
    );
    let method = option::weighted(0.3, select(vec!["GET", "POST"]).prop_map(String::from));
    (precedence, path_match(), method, values(), values()).prop_map(
        |(precedence, path, method, headers, query)| HttpMatch {
            precedence,
            path,
            method,
            headers,
            query,
        },
    )
}

fn hosts() -> impl Strategy<Value = Vec<HostMatch>> {
    let one = prop_oneof![
        select(vec!["a", "a.b", "c.a.b"]).prop_map(|host| HostMatch::Exact(host.into())),
        select(vec![".b", ".a.b"]).prop_map(|suffix| HostMatch::Suffix(suffix.into())),
    ];
    prop_oneof![2 => Just(vec![]), 1 => vec(one, 1..3)]
}

/// Generates rules. Precedence is a total order in the model, so equal ones get a distinct position
/// in the set.
fn rule_set() -> impl Strategy<Value = Vec<Arc<RouteRule>>> {
    vec(
        (
            hosts(),
            vec(http_match(), 1..4),
            option::weighted(0.2, select(vec![80u16, 81])),
        ),
        0..12,
    )
    .prop_map(|rules| {
        let build = |(i, (hosts, mut matches, port)): (usize, (_, Vec<HttpMatch>, _))| {
            for (j, http) in matches.iter_mut().enumerate() {
                http.precedence.object = format!("{i:03}");
                http.precedence.indexes[1] = j as u32;
            }
            let mut rule = Arc::unwrap_or_clone(rule(&i.to_string(), hosts, matches));
            rule.parent_port = port;
            Arc::new(rule)
        };
        rules.into_iter().enumerate().map(build).collect()
    })
}

fn request() -> impl Strategy<Value = RuleRequest> {
    let headers = vec(
        (
            select(vec!["x", "X", "y"]),
            select(vec!["", "1", "12", "2"]),
        ),
        0..3,
    );
    let query = option::of(
        select(vec!["", "x", "x=1", "y=12&x=1", "x=2&x=1", "&&y=", "z=1"]).prop_map(String::from),
    );
    let host = select(vec!["", "a", "A", "a.b", "c.a.b", "d.a.b", "b", "x.b"]);
    let path = prop_oneof![8 => path(), 1 => select(vec!["*", "", "a"]).prop_map(String::from)];
    (host, select(vec!["GET", "POST"]), path, query, headers).prop_map(
        |(host, method, path, query, headers)| RuleRequest {
            host: host.into(),
            method: method.into(),
            path,
            query,
            headers: headers
                .into_iter()
                .map(|(name, value)| (name.into(), value.into()))
                .collect(),
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_router_agrees_with_a_scan(rules in rule_set(), requests in vec(request(), 1..20)) {
        let (router, faults) = Router::build(&RouteTable::new(rules.clone()), &RouterLimits::DEFAULT);
        prop_assert_eq!(faults, vec![]);
        for request in &requests {
            let found = router.find(80, request).map(|found| (found.rule().key.rule.clone(), found.match_index));
            prop_assert_eq!(found, naive(&rules, 80, request), "{:?}", request);
        }
    }
}
