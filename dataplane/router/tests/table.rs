//! Tests the router by tables of cases: path kinds, hosts, conditions, order, faults and limits.

use std::sync::Arc;

use crate::rules::{RuleRequest, naive, rule};
use canal_model::program::{
    HostMatch, HttpMatch, PathMatch, Precedence, RouteAction, RouteRule, TextMatch, ValueMatch,
};
use canal_model::route_table::RouteTable;
use canal_router::{BrokenMatch, REGEX_WORK_MAX, RouteDecision, Router, RouterLimits};

/// Parses a request written as `[METHOD ][host]/path[?query][ name:value …]`.
fn request(text: &str) -> RuleRequest {
    let mut words = text.split(' ');
    let mut first = words.next().unwrap_or_default();
    let mut request = RuleRequest {
        method: "GET".into(),
        ..RuleRequest::default()
    };
    if !first.contains('/') && first != "*" {
        request.method = first.into();
        first = words.next().unwrap_or_default();
    }
    let (host, path) = first.split_at(first.find('/').unwrap_or_default());
    request.host = host.into();
    match path.split_once('?') {
        Some((path, query)) => (request.path, request.query) = (path.into(), Some(query.into())),
        None => request.path = path.into(),
    }
    request.headers = words
        .filter_map(|word| word.split_once(':'))
        .map(|(name, value)| (name.into(), value.into()))
        .collect();
    request
}

/// Creates a match whose precedence is `place` alone.
fn matching(place: u32, path: PathMatch) -> HttpMatch {
    let precedence = Precedence {
        class: 0,
        specificity: [0; 5],
        created: 0,
        object: String::new(),
        indexes: [place, 0],
    };
    HttpMatch {
        precedence,
        path,
        method: None,
        headers: Vec::new(),
        query: Vec::new(),
    }
}

fn build(rules: &[Arc<RouteRule>]) -> Router {
    let (router, faults) = Router::build(&RouteTable::new(rules.to_vec()), &RouterLimits::DEFAULT);
    assert_eq!(faults, []);
    router
}

/// Checks requests against rules; `want` is the rule's name, empty for none.
fn check(rules: &[Arc<RouteRule>], cases: &[(&str, &str)]) {
    let router = build(rules);
    for (text, want) in cases {
        let request = request(text);
        let found = router
            .find(80, &request)
            .map(|found| (found.rule().key.rule.clone(), found.match_index));
        assert_eq!(found.as_ref().map_or("", |(name, _)| name), *want, "{text}");
        assert_eq!(
            naive(rules, 80, &request),
            found,
            "{text}: the reference differs"
        );
    }
}

/// Creates rules of one match each, for any host. The order of writing is the precedence.
fn paths(paths: &[(&str, PathMatch)]) -> Vec<Arc<RouteRule>> {
    paths
        .iter()
        .enumerate()
        .map(|(i, (name, path))| rule(name, vec![], vec![matching(i as u32, path.clone())]))
        .collect()
}

fn exact(path: &str) -> PathMatch {
    PathMatch::Exact(path.into())
}
fn element(path: &str) -> PathMatch {
    PathMatch::ElementPrefix(path.into())
}
fn string(path: &str) -> PathMatch {
    PathMatch::StringPrefix(path.into())
}
fn regex(path: &str) -> PathMatch {
    PathMatch::Regex(path.into())
}
fn value(name: &str, value: TextMatch) -> ValueMatch {
    ValueMatch {
        name: name.into(),
        value,
    }
}

#[test]
fn exact_paths() {
    let rules = paths(&[
        ("root", exact("/")),
        ("a", exact("/a")),
        ("a/", exact("/a/")),
        ("a//b", exact("/a//b")),
        ("*", exact("*")),
    ]);
    check(
        &rules,
        &[
            ("/", "root"),
            ("/a", "a"),
            ("/a/", "a/"),
            ("/a/b", ""),
            ("/a//b", "a//b"),
            ("/A", ""),
            ("//", ""),
            ("/a%20", ""),
            ("/a?x=y", "a"),
        ],
    );
    let star = RuleRequest {
        path: "*".into(),
        ..RuleRequest::default()
    };
    assert_eq!(
        build(&rules)
            .find(80, &star)
            .map(|found| found.rule().key.rule.as_str()),
        Some("*")
    );
}

#[test]
fn element_prefixes() {
    check(
        &paths(&[
            ("abc", element("/abc")),
            ("x/y", element("/x/y/")),
            ("x", element("/x/")),
            ("q//", element("/q//")),
        ]),
        &[
            ("/abc", "abc"),
            ("/abc/", "abc"),
            ("/abc/def", "abc"),
            ("/abc//", "abc"),
            ("/abcd", ""),
            ("/ab", ""),
            ("/x", "x"),
            ("/x/", "x"),
            ("/x/y", "x/y"),
            ("/x/y/z", "x/y"),
            ("/x/yz", "x"),
            // Only one final slash is ignored, so the prefix `/q//` has the elements `q` and an
            // empty one.
            ("/q", ""),
            ("/q/", "q//"),
            ("/q//", "q//"),
            ("/q/r", ""),
            ("/", ""),
        ],
    );
    check(
        &paths(&[("root", element("/"))]),
        &[("/", "root"), ("/x", "root"), ("//", "root")],
    );
    // The target of `OPTIONS *` is no path (RFC 9112 §3.2.4), so not even `/` matches it.
    let star = RuleRequest {
        path: "*".into(),
        ..RuleRequest::default()
    };
    assert!(
        build(&paths(&[("root", element("/"))]))
            .find(80, &star)
            .is_none()
    );
}

#[test]
fn string_prefixes() {
    check(
        &paths(&[
            ("ab", string("/ab")),
            ("a", string("/a")),
            ("c/", string("/c/")),
            ("c/d", string("/c/d")),
            ("q/rs", string("/q/rs")),
        ]),
        &[
            // The first rule that matches wins, even if a later one has a longer prefix.
            ("/ab", "ab"),
            ("/abc", "ab"),
            ("/ab/c", "ab"),
            ("/a", "a"),
            ("/axe/b", "a"),
            ("/c", ""),
            ("/c/", "c/"),
            ("/c/d", "c/"),
            ("/q/r", ""),
            ("/q/rs", "q/rs"),
            ("/q/rst/u", "q/rs"),
            ("/q", ""),
        ],
    );
    check(
        &paths(&[("all", string("/"))]),
        &[("/", "all"), ("/x/y", "all")],
    );
    let everything = build(&paths(&[("empty", string(""))]));
    for path in ["", "*", "/", "/a"] {
        assert!(
            everything
                .find(
                    80,
                    &RuleRequest {
                        path: path.into(),
                        ..RuleRequest::default()
                    }
                )
                .is_some(),
            "{path:?}"
        );
    }
}

#[test]
fn regexes_match_whole_paths() {
    check(
        &paths(&[
            ("digits", regex(r"/u/\d+")),
            ("alt", regex("/a|/b")),
            ("dotall", regex("/d.*")),
            ("flag", regex("(?i)/case")),
            ("letters", regex(r"/l/\pL+")),
        ]),
        &[
            ("/u/12", "digits"),
            ("/u/12x", ""),
            ("/x/u/12", ""),
            ("/u/", ""),
            ("/a", "alt"),
            ("/b", "alt"),
            ("/ab", ""),
            ("/a/", ""),
            ("/d", "dotall"),
            ("/dx/y", "dotall"),
            ("/CASE", "flag"),
            ("/l/ab", "letters"),
            ("/l/a1", ""),
        ],
    );
}

#[test]
fn kinds_mix_in_order() {
    // Only the precedence decides, not the kind of path. Istio's is the written order; the compiler
    // puts Gateway API's order into the same field.
    let all = [
        ("r", regex("/a/.*")),
        ("s", string("/a/b")),
        ("e", element("/a")),
        ("x", exact("/a/b")),
    ];
    check(&paths(&all), &[("/a/b", "r"), ("/a", "e"), ("/a/c", "r")]);
    let mut reversed = all.clone();
    reversed.reverse();
    check(
        &paths(&reversed),
        &[("/a/b", "x"), ("/a/bc", "e"), ("/a", "e")],
    );
    let specific = [
        ("x", exact("/a/b")),
        ("long", element("/a/b")),
        ("short", element("/a")),
        ("root", element("/")),
    ];
    check(
        &paths(&specific),
        &[
            ("/a/b", "x"),
            ("/a/b/", "long"),
            ("/a/bc", "short"),
            ("/b", "root"),
        ],
    );
}

#[test]
fn hosts() {
    let host = |name: &str, hosts: &[&str], place| {
        let hosts = hosts.iter().map(|host| match host.strip_prefix('*') {
            Some(suffix) => HostMatch::Suffix(suffix.into()),
            None => HostMatch::Exact((*host).into()),
        });
        rule(name, hosts.collect(), vec![matching(place, element("/"))])
    };
    let rules = [
        host("a", &["a.x", "a.x", "b.x"], 0),
        host("wild", &["*.x"], 1),
        host("deep", &["*.b.x"], 0),
        host("any", &[], 5),
        host("c", &["c.y"], 9),
    ];
    check(
        &rules,
        &[
            ("a.x/", "a"),
            ("A.X/", "a"),
            ("b.x/", "a"),
            ("c.x/", "wild"),
            ("x/", "any"),
            ("c.b.x/", "deep"),
            ("d.c.x/", "wild"),
            ("/", "any"),
            // Precedence is global over hosts. The compiler decides whether a fallback for any host
            // ranks behind the others.
            ("c.y/", "any"),
        ],
    );
}

#[test]
fn ports() {
    let mut only = (*rule("only", vec![], vec![matching(0, element("/"))])).clone();
    only.parent_port = Some(8080);
    let rules = [
        Arc::new(only),
        rule("every", vec![], vec![matching(1, element("/"))]),
    ];
    let router = build(&rules);
    for (port, want) in [(80, "every"), (8080, "only")] {
        assert_eq!(
            router
                .find(port, &request("/"))
                .map(|found| found.rule().key.rule.as_str()),
            Some(want)
        );
    }
}

#[test]
fn methods_headers_and_query() {
    let with = |place, change: fn(&mut HttpMatch)| {
        let mut http = matching(place, element("/"));
        change(&mut http);
        http
    };
    let one = |name, http| rule(name, vec![], vec![http]);
    let rules = [
        one("post", with(0, |m| m.method = Some("POST".into()))),
        one(
            "exact",
            with(1, |m| {
                m.headers = vec![value("x-a", TextMatch::Exact("1".into()))]
            }),
        ),
        one(
            "prefix",
            with(2, |m| {
                m.headers = vec![value("x-a", TextMatch::Prefix("2".into()))]
            }),
        ),
        one(
            "regex",
            with(3, |m| {
                m.headers = vec![value("x-a", TextMatch::Regex("[34]+".into()))]
            }),
        ),
        one(
            "present",
            with(4, |m| m.headers = vec![value("x-b", TextMatch::Present)]),
        ),
        // Gateway API: of entries with equal names in any case, only the first counts.
        one(
            "first",
            with(5, |m| {
                m.headers = vec![
                    value("x-c", TextMatch::Exact("1".into())),
                    value("x-c", TextMatch::Exact("2".into())),
                ]
            }),
        ),
        one(
            "both",
            with(6, |m| {
                m.headers = vec![value("x-d", TextMatch::Present)];
                m.query = vec![
                    value("q", TextMatch::Exact("1".into())),
                    value("r", TextMatch::Regex("a*".into())),
                ];
            }),
        ),
        one(
            "query",
            with(7, |m| m.query = vec![value("q", TextMatch::Present)]),
        ),
        one("rest", with(8, |_| {})),
    ];
    check(
        &rules,
        &[
            ("POST /", "post"),
            // Methods are compared with their case (RFC 9110 §9.1).
            ("post /", "rest"),
            ("/ x-a:1", "exact"),
            ("/ X-A:1", "exact"),
            ("/ x-a:12", "rest"),
            ("/ x-a:23", "prefix"),
            ("/ x-a:343", "regex"),
            ("/ x-a:345", "rest"),
            // The values of a repeated header are joined with commas (RFC 9110 §5.3).
            ("/ x-a:1 x-a:1", "rest"),
            ("/ x-a:2 x-a:9", "prefix"),
            ("/ x-b:", "present"),
            ("/ x-c:1", "first"),
            ("/ x-c:2", "rest"),
            ("/?q=1&r=aa x-d:y", "both"),
            // A parameter without `=` has the empty value, and of a repeated one the first counts.
            ("/?q=1&r x-d:y", "both"),
            ("/?q=1&r=b x-d:y", "query"),
            ("/?q=2&q=1&r=a x-d:y", "query"),
            ("/?q=1&r=a", "query"),
            ("/?x=1&q", "query"),
            ("/?Q=1", "rest"),
            ("/?xq=1", "rest"),
            ("/?q%3d=1", "rest"),
            ("/?", "rest"),
        ],
    );
}

#[test]
fn several_matches_of_one_rule() {
    let rules = [
        rule(
            "two",
            vec![],
            vec![matching(3, exact("/b")), matching(1, exact("/a"))],
        ),
        rule("one", vec![], vec![matching(2, element("/"))]),
    ];
    check(&rules, &[("/a", "two"), ("/b", "one")]);
    assert_eq!(
        build(&rules)
            .find(80, &request("/a"))
            .map(|found| found.match_index),
        Some(1)
    );
}

#[test]
fn equal_precedence_is_decided_by_the_order_given() {
    let rules = [
        rule("first", vec![], vec![matching(0, element("/"))]),
        rule("second", vec![], vec![matching(0, exact("/a"))]),
    ];
    check(&rules, &[("/a", "first")]);
}

#[test]
fn nothing_matches_nothing() {
    check(&[], &[("/", ""), ("a/b", "")]);
}

#[test]
fn refusing_rules() {
    let mut refusing = (*rule("no", vec![], vec![matching(0, element("/"))])).clone();
    refusing.action = RouteAction::Refuse {
        status: 503,
        reason: "broken".into(),
    };
    let router = build(&[Arc::new(refusing)]);
    let action = router.find(80, &request("/")).map(|found| found.action());
    assert_eq!(
        action,
        Some(RouteDecision::Refuse {
            status: 503,
            reason: "broken"
        })
    );
}

#[test]
fn a_request_whose_regexes_could_take_too_long_goes_to_no_wider_rule() {
    // Its states do not fit into a cache, so that each byte costs all of them.
    let slow = "[ab]*a[ab]{3000}c";
    let is_slow = || TextMatch::Regex(slow.into());
    let header = |text| HttpMatch {
        headers: vec![value("x-a", text)],
        ..matching(1, element("/"))
    };
    let query = HttpMatch {
        query: vec![value("q", is_slow())],
        ..matching(1, element("/"))
    };
    let path = matching(1, PathMatch::Regex(format!("/{slow}")));
    for http in [
        header(is_slow()),
        header(TextMatch::Not(Box::new(is_slow()))),
        query,
        path,
    ] {
        let router = build(&[
            rule("first", vec![], vec![matching(0, exact("/first"))]),
            rule("slow", vec![], vec![http]),
            rule("wide", vec![], vec![matching(2, element("/"))]),
        ]);
        let found = |path: &str, length: u64| {
            let text = "a".repeat(length as usize);
            let path = path.replace('*', &text);
            let request = request(&format!("{path}?q={text} x-a:{text}"));
            let found = router.find(80, &request).unwrap();
            let is_refused = matches!(found.action(), RouteDecision::Refuse { status: 500, .. });
            (found.rule().key.rule.clone(), is_refused)
        };
        assert!(!found("/*", 10).1);
        // The automaton has more than 64 KiB.
        let too_long = REGEX_WORK_MAX / (64 << 10);
        assert_eq!(found("/*", too_long), ("slow".into(), true));
        assert_eq!(found("/first", too_long), ("first".into(), false));
    }
}

/// Builds a rule with the matches `bad` next to a valid rule with lower precedence. The faults must
/// have these names. The bad rule's valid match on `/sound` must refuse. Its other paths and all
/// else must go to the valid rule.
fn check_fault(bad: Vec<HttpMatch>, limits: &RouterLimits, names: &[&str], text: &str) {
    let mut matches = bad;
    matches.push(matching(0, exact("/sound")));
    let rules = vec![
        rule("bad", vec![], matches),
        rule("good", vec![], vec![matching(1_000_000, element("/"))]),
    ];
    let (router, faults) = Router::build(&RouteTable::new(rules), limits);
    assert_eq!(
        faults.iter().map(BrokenMatch::name).collect::<Vec<_>>(),
        names
    );
    let shown = faults[0].to_string();
    assert!(
        shown.contains(text) && shown.starts_with("rule t/HTTPRoute/ns/routes/bad, match 0: "),
        "{shown}"
    );
    let found = |path: &str| {
        router
            .find(80, &request(path))
            .expect("the valid rule receives all requests")
    };
    assert!(matches!(
        found("/sound").action(),
        RouteDecision::Refuse { status: 500, .. }
    ));
    assert_eq!(found("/a").rule().key.rule, "good");
    assert!(matches!(found("/a").action(), RouteDecision::Split(_)));
}

#[test]
fn faults_break_one_rule_only() {
    // Small enough for short patterns to exceed them.
    let limits = RouterLimits {
        regex_text_bytes_max: 64,
        // Two of the largest do not fit into the sum.
        regex_bytes_max: 64 * 1024,
        regexes_bytes_max: 96 * 1024,
        ..RouterLimits::DEFAULT
    };
    let path = |pattern: &str| matching(1, regex(pattern));
    let header = |pattern: &str| {
        let mut http = matching(1, element("/"));
        http.headers = vec![value("x-a", TextMatch::Regex(pattern.into()))];
        http
    };
    check_fault(
        vec![path("/a(")],
        &limits,
        &["regex_syntax"],
        "unclosed group; fix: write it in RE2 syntax",
    );
    check_fault(
        vec![path("/a)|(/b")],
        &limits,
        &["regex_syntax"],
        "regex \"/a)|(/b\" of the path",
    );
    check_fault(
        vec![path(r"(/a)\1")],
        &limits,
        &["regex_syntax"],
        "backreferences are not supported",
    );
    check_fault(
        vec![path("(?=/a)/a")],
        &limits,
        &["regex_syntax"],
        "look-around",
    );
    check_fault(
        // The comment would swallow the anchor that is appended to the pattern.
        vec![path("(?x)/a # open end")],
        &limits,
        &["regex_syntax"],
        "write it in RE2 syntax",
    );
    check_fault(
        vec![header("[")],
        &limits,
        &["regex_syntax"],
        "of the header \"x-a\"",
    );
    check_fault(
        vec![path(&format!("/{}", "a".repeat(64)))],
        &limits,
        &["regex_too_long"],
        "has 65 bytes; fix: use at most 64",
    );
    check_fault(
        vec![path("/(a{100}){100}")],
        &limits,
        &["regex_too_large"],
        "more than 65536 bytes",
    );
    let large = |n| path(&format!("/(a{{{n}}}){{10}}"));
    check_fault(
        // A pattern that is refused alone uses nothing of the budget, so the next one fits.
        vec![path("/(x{1000}){1000}"), large(30)],
        &limits,
        &["regex_too_large"],
        "smaller repetitions",
    );
    let (_, faults) = Router::build(
        &RouteTable::new(vec![rule(
            "many",
            vec![],
            // Together far more than the sum permits.
            (0..40).map(|i| large(30 + i)).collect(),
        )]),
        &limits,
    );
    let mut names = faults.iter().map(|fault| fault.name());
    assert!(names.all(|it| it == "regexes_too_large"), "{faults:?}");
    // Together, some of them fit and some do not.
    assert!((1..40).contains(&faults.len()), "{}", faults.len());
}

#[test]
fn refused_regexes_are_limited() {
    let limits = RouterLimits {
        regex_bytes_max: 64 * 1024,
        regex_refusals_max: 3,
        ..RouterLimits::DEFAULT
    };
    let mut matches: Vec<_> = (0..5)
        .map(|i| matching(i, regex(&format!("/(a{{100}}){{10{i}}}"))))
        .collect();
    matches.push(matching(9, regex("/small")));
    let names = [["regex_too_large"; 3], ["regexes_too_large"; 3]].concat();
    check_fault(matches, &limits, &names, "more than 65536 bytes");
}

#[test]
fn hosts_with_the_same_regexes_share_an_automaton_and_sets_of_them_are_limited() {
    let limits = RouterLimits {
        // One set of the patterns below fits, and the nine nested sets together do not.
        joined_regexes_bytes_max: 64 * 1024,
        ..RouterLimits::DEFAULT
    };
    let exact_host = |n: u32| HostMatch::Exact(format!("h{n}"));
    // The patterns for different `n` differ, but are nearly equal in size.
    let large = |n: u32| matching(n, regex(&format!("/(a{{3{n}}}){{10}}")));
    let build = |rules| Router::build(&RouteTable::new(rules), &limits);
    let (one, _) = build(vec![rule("r", vec![exact_host(0)], vec![large(0)])]);
    let (many, faults) = build(vec![rule(
        "r",
        (0..20).map(exact_host).collect(),
        vec![large(0)],
    )]);
    // With an automaton for each of its 20 hosts, the router would need far more than twice the
    // memory.
    assert!(faults.is_empty(), "{faults:?}");
    assert!(
        many.memory_bytes() < 2 * one.memory_bytes(),
        "{} and {}",
        many.memory_bytes(),
        one.memory_bytes()
    );
    // Every host has another set: the first one has the regexes of all rules, and the last one that
    // of one rule.
    let nested = (0..9)
        .map(|n| {
            rule(
                &format!("r{n}"),
                (0..=n).map(exact_host).collect(),
                vec![large(n)],
            )
        })
        .collect();
    let (_, faults) = build(nested);
    assert!(
        !faults.is_empty()
            && faults
                .iter()
                .all(|fault| fault.name() == "regexes_too_large"),
        "{faults:?}"
    );
}

#[test]
fn matches_are_limited() {
    let limits = RouterLimits {
        matches_max: 3,
        ..RouterLimits::DEFAULT
    };
    let rules = vec![rule(
        "r",
        vec![],
        (0..4)
            .map(|i| matching(i, exact(&format!("/{i}"))))
            .collect(),
    )];
    let (router, faults) = Router::build(&RouteTable::new(rules), &limits);
    assert_eq!(
        faults.iter().map(BrokenMatch::name).collect::<Vec<_>>(),
        ["too_many_matches"]
    );
    assert!(router.find(80, &request("/2")).is_some());
    assert!(router.find(80, &request("/3")).is_none());
}

#[test]
fn port_normalizes_the_path_if_a_rule_matches_on_it() {
    for (path, want) in [
        (element("/"), false),
        (string("/"), false),
        (string(""), false),
        (element("/a"), true),
        (string("/a"), true),
        (exact("/"), true),
        (regex("/.*"), true),
    ] {
        let mut own = paths(&[("all", element("/")), ("own", path.clone())]);
        assert_eq!(build(&own).reads_path(80), want, "{path:?}");
        Arc::make_mut(&mut own[1]).parent_port = Some(81);
        let router = build(&own);
        assert_eq!(
            (router.reads_path(80), router.reads_path(81)),
            (false, want),
            "{path:?} on another port"
        );
    }
}
