//! Faults in the gateway, compared with the oracle: generated policies and random numbers, and the
//! statuses that clients see.

use std::time::Duration;

use canal_gateway_http::proxy_error::ProxyError;
use canal_model::request_fraction::RequestFraction;
use canal_model::route_faults::{AbortStatus, FaultAbort, FaultDelay, FaultPolicy};
use canal_oracle::faults::{OracleAbort, injected};
use proptest::option;
use proptest::prelude::*;

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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

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
