//! Generates timeouts and retries of rules: valid ones, and some that break their rule.

use std::time::Duration;

use canal_model::policy::attempts::{HttpRetry, HttpRouteRetry, HttpRouteTimeouts, IstioDuration};
use canal_model::policy::canal::Timeout;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use crate::vocabulary::words;

const RETRY_ON: [&str; 8] = [
    "",
    "5xx",
    "gateway-error,connect-failure,refused-stream",
    "retriable-status-codes,503,404",
    "unavailable, cancelled,reset",
    "retriable-headers",
    "reset-before-request,retriable-4xx,internal",
    "sometimes",
];

fn time() -> impl Strategy<Value = Duration> {
    select(vec![0u64, 1, 250, 1000, 90_000]).prop_map(Duration::from_millis)
}

pub(crate) fn of_http_route()
-> impl Strategy<Value = (Option<HttpRouteTimeouts>, Option<HttpRouteRetry>)> {
    let timeouts =
        (option::of(time()), option::of(time())).prop_map(|(request, backend)| HttpRouteTimeouts {
            request: request.map(Timeout),
            backend_request: backend.map(Timeout),
        });
    let codes = prop::collection::vec(select(vec![404u16, 500, 503, 503, 200]), 0..3);
    let attempts = option::of(select(vec![0i64, 1, 3, 1000, -1]));
    let retry = (codes, attempts, option::of(time()));
    let retry = retry.prop_map(|(codes, attempts, backoff)| HttpRouteRetry {
        codes,
        attempts,
        backoff: backoff.map(Timeout),
    });
    (
        option::weighted(0.2, timeouts),
        option::weighted(0.2, retry),
    )
}

pub(crate) fn of_virtual_service()
-> impl Strategy<Value = (Option<IstioDuration>, Option<HttpRetry>)> {
    let time =
        || select(vec![1u64, 250, 90_000]).prop_map(|it| IstioDuration(Duration::from_millis(it)));
    let retries = (
        select(vec![0i32, 1, 2, 5, 1000, -1]),
        option::weighted(0.3, time()),
        words(&RETRY_ON),
        option::weighted(0.2, any::<bool>()),
        option::weighted(0.2, any::<bool>()),
        option::weighted(0.3, time()),
    );
    let retries =
        retries.prop_map(
            |(attempts, per_try, retry_on, remote, previous, backoff)| HttpRetry {
                attempts,
                per_try_timeout: per_try,
                retry_on,
                retry_remote_localities: remote,
                retry_ignore_previous_hosts: previous,
                backoff,
            },
        );
    (
        option::weighted(0.2, time()),
        option::weighted(0.3, retries),
    )
}
