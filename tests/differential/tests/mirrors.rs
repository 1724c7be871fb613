//! Mirrors in the gateway, compared with the oracle: which get a copy of a request.

use canal_gateway_config::route_mirrors::draw;
use canal_model::program::{BackendTarget, Labels, RouteMirror};
use canal_model::request_fraction::RequestFraction;
use canal_oracle::mirrors::copied;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn mirrors() -> impl Strategy<Value = RouteMirror> {
    let fraction = prop_oneof![Just(0), Just(1), Just(1_000_000), 0..=1_000_000u32]
        .prop_filter_map("more than all", RequestFraction::of_millionths);
    let backend = option::of(0..2u16);
    (fraction, backend).prop_map(|(fraction, backend)| RouteMirror {
        target: BackendTarget::Service {
            service: "alpha/shop/copies".parse().expect("a key"),
            port: 80,
            subset: Labels::new(),
        },
        fraction,
        backend,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_gateway_copies_what_the_oracle_does(
        mirrors in vec(mirrors(), 0..5),
        randoms in vec(prop_oneof![Just(0), Just(u64::MAX), any::<u64>()], 5),
        backend in 0..2u16,
    ) {
        let mut numbers = randoms.iter().copied();
        let drawn: Vec<_> = draw(&mirrors, usize::from(backend), || numbers.next().expect("one for each mirror"))
            .map(|at| &mirrors[at])
            .collect();
        let expected = copied(&mirrors, backend, &randoms);
        prop_assert_eq!(drawn, expected);
    }
}
