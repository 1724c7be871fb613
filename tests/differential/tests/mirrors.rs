//! Mirrors in the gateway, compared with the oracle: which get a copy of a request, and the host of
//! each copy.

use canal_gateway_config::route_mirrors::{draw, shadow_host};
use canal_model::program::{BackendTarget, Labels, RouteMirror};
use canal_model::request_fraction::RequestFraction;
use canal_oracle::filters::ForwardedRequest;
use canal_oracle::mirrors::{copied, copy};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn mirrors() -> impl Strategy<Value = RouteMirror> {
    let fraction = prop_oneof![Just(0), Just(1), Just(1_000_000), 0..=1_000_000u32]
        .prop_filter_map("more than all", RequestFraction::of_millionths);
    let backend = option::of(0..2u16);
    let mirror = (fraction, any::<bool>(), backend);
    mirror.prop_map(|(fraction, shadows_host, backend)| RouteMirror {
        target: BackendTarget::Service {
            service: "alpha/shop/copies".parse().expect("a key"),
            port: 80,
            subset: Labels::new(),
        },
        fraction,
        shadows_host,
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
        host in "(web|a\\.example|\\[fd00::1\\])?(:[0-9]{2})?",
    ) {
        let expected: Vec<_> = copied(&mirrors, backend, &randoms).into_iter().map(|mirror| {
            let sent = ForwardedRequest {
                host: host.clone(),
                target: "/".to_owned(),
                headers: Vec::new(),
            };
            (mirror, copy(mirror, &sent).host)
        }).collect();
        let mut numbers = randoms.iter().copied();
        let drawn: Vec<_> = draw(&mirrors, usize::from(backend), || numbers.next().expect("one for each mirror"))
            .map(|at| {
                let mirror = &mirrors[at];
                let own = if mirror.shadows_host { shadow_host(&host) } else { host.clone() };
                (mirror, own)
            })
            .collect();
        prop_assert_eq!(drawn, expected);
    }
}
