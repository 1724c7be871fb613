//! Generates faults of VirtualServices: valid ones, and some that break their rule.

use std::time::Duration;

use canal_model::policy::attempts::IstioDuration;
use canal_model::policy::faults::{
    HttpFaultAbort, HttpFaultDelay, HttpFaultInjection, Percent, PercentValue,
};
use canal_model::request_fraction::RequestFraction;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use crate::vocabulary::words;

fn percentage() -> impl Strategy<Value = Option<Percent>> {
    let millionths = select(vec![0u32, 1, 123_456, 500_000, 1_000_000]);
    let percent = millionths.prop_filter_map("more than all", RequestFraction::of_millionths);
    option::weighted(
        0.9,
        percent.prop_map(|value| Percent {
            value: PercentValue(value),
        }),
    )
}

pub(crate) fn of_virtual_service() -> impl Strategy<Value = Option<HttpFaultInjection>> {
    let time = select(vec![1u64, 250]).prop_map(|it| IstioDuration(Duration::from_millis(it)));
    let percent = select(vec![0i64, 10, 100, 101]);
    let delay = (
        option::weighted(0.9, time),
        percentage(),
        option::weighted(0.2, percent),
    );
    let delay = delay.prop_map(|(fixed_delay, percentage, percent)| HttpFaultDelay {
        fixed_delay,
        percentage,
        percent,
    });
    let abort = (
        option::weighted(0.6, select(vec![200i64, 429, 503, 600])),
        option::weighted(0.4, words(&["UNAVAILABLE", "OK", "SAD"])),
        percentage(),
    );
    let abort = abort.prop_map(|(http_status, grpc_status, percentage)| HttpFaultAbort {
        http_status,
        grpc_status,
        percentage,
    });
    let fault = (option::of(delay), option::of(abort));
    option::weighted(
        0.2,
        fault.prop_map(|(delay, abort)| HttpFaultInjection { delay, abort }),
    )
}
