//! Inputs at the compiler's limits: a router accepts everything that the compiler accepts, because
//! a rule that a router refused would have no diagnostic. [`RoutingComparison::of`] fails if a
//! router refuses a rule. The compiler's own tests check where its limits are.

use std::fmt::Write;

use canal_compiler::limits::{REGEX_BYTES_MAX, REGEX_NESTING_MAX};
use canal_compiler::oracle::{OracleClient, OracleRequest, RoutingVerdict};
use canal_differential::policy::Policy;
use canal_differential::{RoutingComparison, RoutingTally};

const SHOP: &str = include_str!("../cases/_shop.yaml");

/// Compiles the shop with these rules of one HTTPRoute on `web`.
fn comparison(hosts: &str, rules: &str) -> RoutingComparison {
    let parents = r#"[{group: "", kind: Service, name: web, port: 80}]"#;
    let metadata = "{name: r, namespace: shop}";
    let route = format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {metadata}\nspec:\n  \
         parentRefs: {parents}\n  hostnames: {hosts}\n  rules:\n{rules}"
    );
    let policy = Policy::of(&[
        ("shop".to_owned(), SHOP.to_owned()),
        ("route".to_owned(), route),
    ]);
    RoutingComparison::of(&policy.input()).expect("the tenant is valid")
}

fn rule(matches: &str) -> String {
    format!("  - {{matches: [{{{matches}}}], backendRefs: [{{name: web, port: 80}}]}}\n")
}

fn get(target: &str, host: &str, header: Option<&str>) -> OracleRequest {
    OracleRequest {
        service: "alpha/shop/web".parse().unwrap(),
        port: 80,
        host: host.to_owned(),
        method: "GET".to_owned(),
        target: target.to_owned(),
        headers: header
            .map(|value| ("x-a".to_owned(), value.to_owned()))
            .into_iter()
            .collect(),
        client: OracleClient::default(),
    }
}

fn is_split(comparison: &RoutingComparison, request: &OracleRequest) -> bool {
    let verdict = comparison
        .compare(request, &mut RoutingTally::default())
        .unwrap_or_else(|difference| panic!("{difference}"));
    matches!(verdict, RoutingVerdict::Split { .. })
}

/// One pattern as a path and as a header, within a limit and beyond it.
#[test]
fn one_regular_expression() {
    let nested = |depth: usize, open: &str, close: &str| {
        format!("{}a{}", open.repeat(depth), close.repeat(depth))
    };
    let deepest = REGEX_NESTING_MAX as usize;
    let long = |bytes: usize| "a".repeat(bytes);
    // Repetitions and alternations nest two levels each: the operator and its group. The slash of
    // the path adds a byte and a level, so what is accepted ends one before each limit.
    for (what, pattern, accepted) in [
        ("groups", nested(deepest - 1, "(", ")"), true),
        ("groups", nested(deepest + 1, "(", ")"), false),
        ("repetitions", nested(deepest / 2 - 1, "(", ")?"), true),
        ("repetitions", nested(deepest, "(", ")?"), false),
        ("alternations", nested(deepest / 2 - 1, "(b|", ")"), true),
        ("alternations", nested(deepest, "(b|", ")"), false),
        (
            "classes",
            // Below the limit of nesting.
            format!("{}a{}", "[".repeat(40), "]".repeat(40)),
            true,
        ),
        ("length", long(REGEX_BYTES_MAX - 1), true),
        ("length", long(REGEX_BYTES_MAX + 1), false),
        // Both are short and nest little, so only the size of the automaton decides.
        ("memory", "(abc|d[e-z]){400}".to_owned(), true),
        ("memory", "((abc|d[e-z]){200}){50}".to_owned(), false),
    ] {
        let path = rule(&format!(
            "path: {{type: RegularExpression, value: '/{pattern}'}}"
        ));
        let header = rule(&format!(
            "path: {{value: /h}}, headers: [{{name: x-a, value: '{pattern}', type: RegularExpression}}]"
        ));
        // The request must match the pattern, or a refused rule would look like one that does not
        // match.
        let comparison = comparison("[]", &(path + &header));
        let fits = if what == "length" {
            pattern.clone()
        } else if what == "memory" {
            "abc".repeat(400)
        } else {
            "a".to_owned()
        };
        for request in [
            get(&format!("/{fits}"), "web", None),
            get("/h", "web", Some(&fits)),
        ] {
            assert_eq!(
                is_split(&comparison, &request),
                accepted,
                "{what}: {request:?}"
            );
        }
    }
}

/// The maximum number for a service, for several hosts: each host has its own automaton.
#[test]
fn all_regular_expressions_of_a_service() {
    for hosts in ["[]", "[a.example.com, '*.example.com', b.example.com]"] {
        let mut rules = String::new();
        for number in 0..200 {
            // The first repetition suffices for a path: the longer it is, the sooner so large an
            // automaton exceeds the work of one request (`REGEX_WORK_MAX`).
            let pattern = format!("/{number}(abc|d[e-z]){{1,300}}");
            let header = "headers: [{name: x-a, value: '[ab]+', type: RegularExpression}]";
            write!(
                rules,
                "{}",
                rule(&format!(
                    "path: {{type: RegularExpression, value: '{pattern}'}}, {header}"
                ))
            )
            .unwrap();
        }
        let comparison = comparison(hosts, &rules);
        // The oracle compiles every expression again for every request, so few requests are enough.
        for (number, fits) in [(0, true), (1, true), (30, true), (199, false)] {
            let path = format!("/{number}abc");
            for (header, holds) in [("ab", true), ("c", false)] {
                assert_eq!(
                    is_split(&comparison, &get(&path, "a.example.com", Some(header))),
                    fits && holds,
                    "{number} on {hosts}"
                );
            }
        }
    }
}
