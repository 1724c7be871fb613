//! Faults and errors in the gateway, compared with the oracle: generated policies and random numbers,
//! and the statuses and headers that clients see.

use std::time::Duration;

use canal_gateway_config::jwt::TokenError;
use canal_gateway_http::proxy_error::{ExtAuthzDenial, ProxyError};
use canal_gateway_http::reply_fields::changed_fields;
use canal_model::request_fraction::RequestFraction;
use canal_model::route_faults::{AbortStatus, FaultAbort, FaultDelay, FaultPolicy};
use canal_model::route_filters::{HeaderModifier, RouteFilters};
use canal_oracle::answers::error_headers;
use canal_oracle::faults::{OracleAbort, injected};
use proptest::collection::{btree_map, btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

fn fractions() -> impl Strategy<Value = RequestFraction> {
    prop_oneof![Just(0), Just(1), Just(1_000_000), 0..=1_000_000u32]
        .prop_filter_map("more than all", RequestFraction::of_millionths)
}

fn policies() -> impl Strategy<Value = FaultPolicy> {
    let status = prop_oneof![
        (200..600u16).prop_map(AbortStatus::Http),
        (0..=AbortStatus::GRPC_MAX).prop_map(AbortStatus::Grpc),
    ];
    let delay = (1..10_000u64, fractions()).prop_map(|(millis, fraction)| FaultDelay {
        time: Duration::from_millis(millis),
        fraction,
    });
    let abort =
        (status, fractions()).prop_map(|(status, fraction)| FaultAbort { status, fraction });
    (option::of(delay), option::of(abort)).prop_map(|(delay, abort)| FaultPolicy { delay, abort })
}

/// Names of headers that errors have, and of one that none has.
const NAMES: [&str; 4] = ["content-type", "retry-after", "www-authenticate", "x-a"];

fn names() -> impl Strategy<Value = String> {
    select(NAMES.to_vec()).prop_map(str::to_owned)
}

fn modifiers() -> impl Strategy<Value = HeaderModifier> {
    let pairs = || btree_map(names(), "[a-c]", 0..3).prop_map(|pairs| pairs.into_iter().collect());
    let removed = btree_set(names(), 0..3).prop_map(|names| names.into_iter().collect());
    (pairs(), pairs(), removed).prop_map(|(set, add, remove)| HeaderModifier { set, add, remove })
}

fn pair(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn headers_of_errors_are_those_of_the_oracle(
        changes in option::of(modifiers()),
        status in select(vec![401, 403, 503]),
        written in option::of(vec((names(), "[d-f]"), 0..3)),
    ) {
        let text = pair("content-type", "text/plain; charset=utf-8");
        let (error, mut own) = match (&written, status) {
            (Some(written), _) => {
                let headers = written.iter().map(|(name, value)| (name.clone(), value.clone().into_bytes()));
                let headers = headers.collect();
                let denial = ExtAuthzDenial { status, headers, body: String::new() };
                (ProxyError::Rejected(Box::new(denial)), vec![])
            }
            (None, 503) => (ProxyError::NoEndpoint, vec![pair("retry-after", "1")]),
            (None, 401) => {
                let challenge = pair("www-authenticate", "Bearer error=\"invalid_token\"");
                (ProxyError::Unauthenticated(TokenError::Malformed), vec![challenge])
            }
            (None, _) => (ProxyError::ExtAuthzFailed("x"), vec![]),
        };
        let written = written.unwrap_or_default();
        if !written.iter().any(|(name, _)| name == "content-type") {
            own.push(text);
        }
        let filters = changes.clone().map(|response_headers| RouteFilters { response_headers, ..RouteFilters::default() });
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let sent = changed_fields(&error, changes.as_ref());
        let mut sent: Vec<_> = sent.map(|(name, value)| (text(name), text(value))).collect();
        sent.sort_by(|a, b| a.0.cmp(&b.0));
        prop_assert_eq!(sent, error_headers([filters.as_ref(), None], &own, &written));
    }

    #[test]
    fn the_gateway_injects_what_the_oracle_does(
        policy in policies(),
        random in prop_oneof![Just(0), Just(u64::MAX), any::<u64>()],
        is_grpc in any::<bool>(),
    ) {
        let faults = policy.decide(random);
        let abort = faults.abort.map(|status| {
            let error = ProxyError::Aborted { status, is_delayed: faults.delay.is_some() };
            OracleAbort {
                // `local_reply` answers gRPC requests with status 200.
                status: if is_grpc { 200 } else { error.status() },
                grpc_status: is_grpc.then(|| error.grpc_status()),
                text: "fault filter abort",
            }
        });
        prop_assert_eq!((faults.delay, abort), injected(&policy, random, is_grpc));
    }
}
