//! Generates cross-origin resource sharing of rules: valid policies, and some that break their rule.

use std::time::Duration;

use canal_model::policy::attempts::IstioDuration;
use canal_model::policy::cors::{CorsPolicy, HttpCorsFilter};
use canal_model::policy::istio::StringMatch;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use crate::vocabulary::words;

const ORIGINS: [&str; 6] = [
    "https://a.example",
    "http://a.example:8080",
    "https://*.example",
    "https://*",
    "*",
    "a.example",
];
const METHODS: [&str; 4] = ["GET", "PUT", "*", "get"];
const HEADERS: [&str; 4] = ["x-a", "X-B", "*", "x a"];

pub(crate) fn of_http_route() -> impl Strategy<Value = HttpCorsFilter> {
    let lists = (
        vec(words(&ORIGINS), 0..2),
        vec(words(&METHODS), 0..2),
        vec(words(&HEADERS), 0..2),
        vec(words(&HEADERS[..3]), 0..3),
    );
    let max_age = option::of(prop::sample::select(vec![1i64, 3600]));
    (lists, option::of(any::<bool>()), max_age).prop_map(
        |((allow_origins, allow_methods, allow_headers, expose_headers), credentials, max_age)| {
            HttpCorsFilter {
                allow_origins,
                allow_credentials: credentials,
                allow_methods,
                allow_headers,
                expose_headers,
                max_age,
            }
        },
    )
}

pub(crate) fn of_virtual_service() -> impl Strategy<Value = Option<CorsPolicy>> {
    let origin = prop_oneof![
        words(&ORIGINS).prop_map(|text| StringMatch {
            exact: Some(text),
            ..StringMatch::default()
        }),
        words(&["https://a", "*"]).prop_map(|text| StringMatch {
            prefix: Some(text),
            ..StringMatch::default()
        }),
        // The last pattern does not compile, so the rule that has it is broken.
        words(&[r"https://[a-z]+\.example", ".*", "("]).prop_map(|text| StringMatch {
            regex: Some(text),
            ..StringMatch::default()
        }),
    ];
    // Lists are short and often empty, because an absent field and a list decide differently.
    // The fourth method and the fourth header would break the rule; HTTPRoutes above have them.
    let lists = (
        vec(origin, 0..3),
        vec(words(&METHODS[..3]), 0..3),
        vec(words(&HEADERS[..3]), 0..3),
        vec(words(&HEADERS[..3]), 0..3),
    );
    // `allowOrigin` is deprecated in favour of `allowOrigins`, but still read.
    let more = (
        vec(words(&ORIGINS), 0..2),
        option::of(Just(IstioDuration(Duration::from_secs(5)))),
        option::of(any::<bool>()),
        option::of(words(&["UNSPECIFIED", "FORWARD", "IGNORE"])),
    );
    let policy = (lists, more).prop_map(|(lists, more)| {
        let (allow_origins, allow_methods, allow_headers, expose_headers) = lists;
        let (allow_origin, max_age, allow_credentials, unmatched_preflights) = more;
        CorsPolicy {
            allow_origin,
            allow_origins,
            allow_methods,
            allow_headers,
            expose_headers,
            max_age,
            allow_credentials,
            unmatched_preflights,
        }
    });
    // The policy is rare, because it answers requests before anything else can be compared.
    option::weighted(0.1, policy)
}
