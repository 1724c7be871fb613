//! Generates mirrors of rules. Most rules have none, and some of the mirrors are broken.

use canal_model::policy::faults::{Percent, PercentValue};
use canal_model::policy::gateway_api::BackendRef;
use canal_model::policy::istio::{HttpRouteDestination, VirtualServiceRoute};
use canal_model::policy::mirrors::{HttpMirrorPolicy, HttpRequestMirrorFilter, MirrorFraction};
use canal_model::request_fraction::RequestFraction;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

/// Generates the mirrors of a rule of an HTTPRoute or GRPCRoute, to backends such as these.
pub(crate) fn of_filters(
    backend_ref: impl Strategy<Value = BackendRef>,
) -> impl Strategy<Value = Vec<HttpRequestMirrorFilter>> {
    let fraction =
        (0..4i64, option::of(1..4i64)).prop_map(|(numerator, denominator)| MirrorFraction {
            numerator,
            denominator,
        });
    let mirror = (
        backend_ref,
        option::weighted(0.3, -1..102i64),
        option::weighted(0.3, fraction),
    );
    let mirror = mirror.prop_map(|(backend_ref, percent, fraction)| HttpRequestMirrorFilter {
        backend_ref,
        percent,
        fraction,
    });
    prop_oneof![8 => Just(Vec::new()), 2 => vec(mirror, 1..4)]
}

/// Generates the mirrors of a VirtualService's rule, to destinations such as these, in a rule that
/// has nothing else.
pub(crate) fn of_virtual_service(
    destination: impl Strategy<Value = HttpRouteDestination> + Clone,
) -> impl Strategy<Value = VirtualServiceRoute> {
    let percentage = || {
        option::of(select(vec![0, 1, 500_000, 1_000_000]).prop_filter_map(
            "more than all",
            |millionths| {
                let value = PercentValue(RequestFraction::of_millionths(millionths)?);
                Some(Percent { value })
            },
        ))
    };
    let several =
        (destination.clone(), percentage()).prop_map(|(to, percentage)| HttpMirrorPolicy {
            destination: to.destination,
            percentage,
        });
    let mirrors = (
        option::weighted(0.1, destination),
        percentage(),
        option::weighted(0.1, -1..102i64),
        prop_oneof![9 => Just(Vec::new()), 1 => vec(several, 1..3)],
    );
    mirrors.prop_map(
        |(mirror, mirror_percentage, mirror_percent, mirrors)| VirtualServiceRoute {
            mirror: mirror.map(|to| to.destination),
            mirror_percentage,
            mirror_percent,
            mirrors,
            ..VirtualServiceRoute::default()
        },
    )
}
