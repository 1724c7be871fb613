//! Retry policies in the gateway, compared with the oracle: every outcome for generated policies.

use std::time::Duration;

use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_http::retry_policy::{AttemptOutcome, backoff, wants_retry};
use canal_model::route_attempts::{
    BackoffJitter, RetryBackoff, RetryCondition, RetryConditions, RetryPolicy,
};
use canal_oracle::attempts::{OracleOutcome, is_retried, wait};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

fn conditions() -> impl Strategy<Value = RetryConditions> {
    subsequence(RetryCondition::ALL.to_vec(), 0..=RetryCondition::ALL.len())
        .prop_map(|conditions| conditions.into_iter().collect())
}

fn times() -> impl Strategy<Value = RetryBackoff> {
    let base = prop_oneof![Just(0), 1..2000u64].prop_map(Duration::from_millis);
    let jitter = select(vec![BackoffJitter::Full, BackoffJitter::AboveBase]);
    (base, jitter).prop_map(|(base, jitter)| RetryBackoff::from_base(base, jitter))
}

fn policies() -> impl Strategy<Value = RetryPolicy> {
    let statuses = vec(100..600u16, 0..4).prop_map(|mut statuses| {
        statuses.sort_unstable();
        statuses
    });
    (conditions(), statuses, times()).prop_map(|(on, statuses, backoff)| RetryPolicy {
        max: 1,
        on,
        statuses,
        backoff,
    })
}

/// Returns the failures of an attempt, each with what the oracle calls it.
fn failures() -> Vec<(ProxyError, OracleOutcome)> {
    let connect = ProxyError::Connect { why: String::new() };
    vec![
        (connect, OracleOutcome::NotConnected),
        (ProxyError::UpstreamRefused, OracleOutcome::StreamRefused),
        (
            ProxyError::UpstreamClosed { reused: false },
            OracleOutcome::NoResponse,
        ),
        (
            ProxyError::UpstreamClosed { reused: true },
            OracleOutcome::NoResponse,
        ),
        (ProxyError::UpstreamUndelivered, OracleOutcome::NoResponse),
        (ProxyError::UpstreamReset, OracleOutcome::NoResponse),
        (
            ProxyError::UpstreamProtocol("http2"),
            OracleOutcome::NoResponse,
        ),
        (ProxyError::UpstreamTimeout, OracleOutcome::NoResponse),
        (ProxyError::AttemptTimeout, OracleOutcome::NoResponse),
        (ProxyError::RouteTimeout, OracleOutcome::Ended),
        (ProxyError::ClientGone, OracleOutcome::Ended),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn the_gateway_retries_what_the_oracle_does(policy in policies()) {
        for (error, outcome) in failures() {
            let wants = wants_retry(&policy, AttemptOutcome::Failed(&error));
            prop_assert_eq!(wants, is_retried(&policy, 0, outcome), "{:?}", error);
        }
        for status in 100..600 {
            for grpc_status in [None, Some(0), Some(1), Some(4), Some(8), Some(13), Some(14)] {
                let response = AttemptOutcome::Response { status, grpc_status };
                let outcome = OracleOutcome::Response { status, grpc_status };
                prop_assert_eq!(
                    wants_retry(&policy, response),
                    is_retried(&policy, 0, outcome),
                    "{} {:?}", status, grpc_status
                );
                prop_assert!(!is_retried(&policy, 1, outcome), "one is the most");
            }
        }
    }

    #[test]
    fn the_gateway_waits_as_the_oracle_does(
        times in times(),
        retry in 1..40u32,
        random in prop_oneof![Just(0), Just(u64::MAX), any::<u64>()],
    ) {
        let (shortest, longest) = wait(&times, retry);
        let waited = backoff(&times, retry, random);
        prop_assert!(shortest <= waited && waited <= longest, "{:?}", waited);
        // The random number decides about the whole range.
        let slack = Duration::from_micros(10);
        prop_assert!(random != u64::MAX || waited + slack >= longest, "{:?}", waited);
        prop_assert!(random != 0 || waited == shortest, "{:?}", waited);
    }
}
