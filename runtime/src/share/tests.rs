//! Tests of the limit that tenants share: single cases, and its invariants on random histories.

use canal_model::share::{Share, ShareKind, Shares};
use proptest::prelude::*;

use super::*;

/// A kind without a threshold, for the tests of what is independent of it.
const KIND: ShareKind = ShareKind::ConfigurationBytes;

fn limit(capacity: u64, reserve: u64, revocation_order: RevocationOrder) -> TenantLimit {
    let limit = TenantLimit::new(TenantLimitConfig {
        kind: KIND,
        capacity,
        reserve,
        revocation_order,
    });
    limit.set_default_share(Share::Percent(50));
    limit
}

fn tenant(name: &str) -> ShareHolder {
    ShareHolder::Tenant(name.parse().expect("a tenant's name"))
}

fn used(limit: &TenantLimit, holder: &ShareHolder) -> u64 {
    limit
        .usage()
        .holders
        .iter()
        .find(|u| u.holder == *holder)
        .map_or(0, |u| u.used)
}

#[test]
fn a_tenant_uses_up_to_its_share_and_returns_it() {
    let limit = limit(10, 0, RevocationOrder::OldestFirst);
    let alpha = tenant("alpha");
    let held: Vec<_> = (0..5).map(|_| limit.take(&alpha, 1).unwrap()).collect();
    assert_eq!(limit.take(&alpha, 1).unwrap_err(), ShareRefusal::Share);
    drop(held);
    assert_eq!(used(&limit, &alpha), 0);
    assert!(limit.take(&alpha, 5).is_ok());
    assert_eq!(
        limit.usage().holders[0].refused,
        1,
        "the refusal is still counted"
    );
}

#[test]
fn a_tenant_with_its_own_share_can_use_all_of_it() {
    let limit = limit(100, 0, RevocationOrder::OldestFirst);
    let mut shares = Shares::default();
    shares.set(KIND, Share::Amount(80));
    let name = "alpha".parse().unwrap();
    limit.set_shares([(&name, &shares)]);
    assert!(limit.take(&tenant("alpha"), 80).is_ok());
    assert_eq!(
        limit.take(&tenant("beta"), 80).unwrap_err(),
        ShareRefusal::Share
    );
}

#[tokio::test]
async fn displacing_take_revokes_the_holders_own_oldest_permit() {
    let limit = limit(10, 0, RevocationOrder::OldestFirst);
    let (alpha, beta) = (tenant("alpha"), tenant("beta"));
    let fixed = limit.take(&alpha, 1).unwrap();
    let flood: Vec<_> = (0..4)
        .map(|_| limit.take_replacing(&alpha, 1).unwrap())
        .collect();
    let other = limit.take_replacing(&beta, 1).unwrap();
    let newest = limit.take_replacing(&alpha, 1).unwrap();
    flood[0].revoked().await;
    assert_eq!(
        flood
            .iter()
            .map(TenantPermit::is_revoked)
            .collect::<Vec<_>>(),
        [true, false, false, false]
    );
    assert!(!other.is_revoked() && !newest.is_revoked() && !fixed.is_revoked());
    assert_eq!(used(&limit, &alpha), 5);
    // A holder without a revocable permit of its own is refused as usual.
    drop((flood, newest, fixed));
    let _all = limit.take(&alpha, 5).unwrap();
    assert_eq!(
        limit.take_replacing(&alpha, 1).unwrap_err(),
        ShareRefusal::Share
    );
    assert!(!other.is_revoked());
}

#[tokio::test]
async fn revocable_permit_is_revoked_and_fixed_one_is_not() {
    let limit = limit(2, 0, RevocationOrder::OldestFirst);
    limit.set_default_share(Share::Percent(100));
    let alpha = tenant("alpha");
    let (mut first, mut second) = (
        limit.take_revocable(&alpha, 1).unwrap(),
        limit.take_revocable(&alpha, 1).unwrap(),
    );
    first.keep();
    second.keep();
    assert_eq!(
        limit.take_replacing(&alpha, 1).unwrap_err(),
        ShareRefusal::Share
    );
    second.offer();
    let third = limit.take_replacing(&alpha, 1).unwrap();
    second.revoked().await;
    assert!(!first.is_revoked());
    // A revoked permit stays revoked, whatever its owner does next.
    second.keep();
    second.offer();
    second.revoked().await;
    drop(third);
    assert_eq!(limit.used(), 1);
}

#[test]
fn written_share_overrides_the_processs_default() {
    let limit = limit(100, 0, RevocationOrder::OldestFirst);
    limit.set_default_share(Share::Amount(10));
    let mut shares = Shares::default();
    // The written value equals the table's default.
    shares.set(KIND, KIND.default_share());
    let name = "alpha".parse().unwrap();
    limit.set_shares([(&name, &shares)]);
    assert!(limit.take(&tenant("alpha"), 50).is_ok());
    assert_eq!(
        limit.take(&tenant("beta"), 11).unwrap_err(),
        ShareRefusal::Share
    );
}

#[test]
fn reserve_is_only_the_providers() {
    let limit = limit(10, 4, RevocationOrder::OldestFirst);
    let _a = limit.take(&tenant("alpha"), 3).unwrap();
    let _b = limit.take(&tenant("beta"), 3).unwrap();
    assert_eq!(
        limit.take(&tenant("gamma"), 1).unwrap_err(),
        ShareRefusal::Full
    );
    assert!(limit.take(&ShareHolder::Provider, 4).is_ok());
    assert_eq!(
        limit.take(&ShareHolder::Provider, 5).unwrap_err(),
        ShareRefusal::Full
    );
}

#[tokio::test]
async fn full_limit_revokes_the_oldest_permit_of_the_largest_holder() {
    let limit = limit(4, 0, RevocationOrder::OldestFirst);
    limit.set_default_share(Share::Percent(100));
    let alpha: Vec<_> = (0..3)
        .map(|_| limit.take_revocable(&tenant("alpha"), 1).unwrap())
        .collect();
    let _beta = limit.take_revocable(&tenant("beta"), 1).unwrap();
    let _gamma = limit.take_revocable(&tenant("gamma"), 1).unwrap();
    alpha[0].revoked().await;
    assert_eq!(
        alpha
            .iter()
            .map(TenantPermit::is_revoked)
            .collect::<Vec<_>>(),
        [true, false, false]
    );
    assert_eq!((used(&limit, &tenant("alpha")), limit.usage().used), (2, 4));
    drop(alpha);
    assert_eq!(
        limit.usage().used,
        2,
        "a revoked permit is not given back twice"
    );
}

#[test]
fn a_full_limit_revokes_the_newest_permit_if_so_configured() {
    let limit = limit(3, 0, RevocationOrder::NewestFirst);
    limit.set_default_share(Share::Percent(100));
    let alpha: Vec<_> = (0..3)
        .map(|_| limit.take_revocable(&tenant("alpha"), 1).unwrap())
        .collect();
    let _beta = limit.take(&tenant("beta"), 1).unwrap();
    assert_eq!(
        alpha
            .iter()
            .map(TenantPermit::is_revoked)
            .collect::<Vec<_>>(),
        [false, false, true]
    );
}

#[test]
fn equal_holders_do_not_throw_each_other_out() {
    let limit = limit(4, 0, RevocationOrder::OldestFirst);
    let _alpha: Vec<_> = (0..2)
        .map(|_| limit.take_revocable(&tenant("alpha"), 1).unwrap())
        .collect();
    let _beta: Vec<_> = (0..2)
        .map(|_| limit.take_revocable(&tenant("beta"), 1).unwrap())
        .collect();
    assert_eq!(
        limit.take(&tenant("gamma"), 2).unwrap_err(),
        ShareRefusal::Full
    );
    assert!(limit.take_revocable(&tenant("alpha"), 1).is_err());
}

#[test]
fn fixed_permit_is_never_revoked() {
    let limit = limit(2, 0, RevocationOrder::OldestFirst);
    limit.set_default_share(Share::Percent(100));
    let mut alpha: Vec<_> = (0..2)
        .map(|_| limit.take_revocable(&tenant("alpha"), 1).unwrap())
        .collect();
    alpha.iter_mut().for_each(TenantPermit::keep);
    assert_eq!(
        limit.take(&tenant("beta"), 1).unwrap_err(),
        ShareRefusal::Full
    );
    assert!(!alpha[0].is_revoked());
}

#[test]
fn refused_take_revokes_no_permit() {
    let limit = limit(10, 0, RevocationOrder::OldestFirst);
    limit.set_default_share(Share::Percent(100));
    let alpha: Vec<_> = (0..6)
        .map(|_| limit.take_revocable(&tenant("alpha"), 1).unwrap())
        .collect();
    let beta: Vec<_> = (0..4)
        .map(|_| limit.take_revocable(&tenant("beta"), 1).unwrap())
        .collect();
    // Alpha could lose only one permit before it has less than gamma would get.
    assert_eq!(
        limit.take(&tenant("gamma"), 5).unwrap_err(),
        ShareRefusal::Full
    );
    let mut gamma = limit.take(&tenant("gamma"), 0).unwrap();
    assert_eq!(gamma.grow(5).unwrap_err(), ShareRefusal::Full);
    assert!(alpha.iter().chain(&beta).all(|permit| !permit.is_revoked()));
    // Three are available: two from alpha, which then has as many as beta, and one from beta.
    gamma.grow(3).unwrap();
    let lost =
        |permits: &[TenantPermit]| permits.iter().filter(|permit| permit.is_revoked()).count();
    assert_eq!((lost(&alpha), lost(&beta), limit.used()), (2, 1, 10));
}

#[test]
fn several_large_holders_lose_permits_in_turn() {
    let limit = limit(12, 0, RevocationOrder::NewestFirst);
    limit.set_default_share(Share::Percent(100));
    let held = |name: &str, count: u64| {
        (0..count)
            .map(|_| limit.take_revocable(&tenant(name), 1).unwrap())
            .collect::<Vec<_>>()
    };
    let (alpha, beta) = (held("alpha", 7), held("beta", 5));
    let _provider = limit.take(&ShareHolder::Provider, 6).unwrap();
    assert_eq!(
        (
            used(&limit, &tenant("alpha")),
            used(&limit, &tenant("beta"))
        ),
        (3, 3)
    );
    let fixed = |permits: &[TenantPermit]| {
        permits
            .iter()
            .map(|permit| !permit.is_revoked())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        fixed(&alpha),
        [true, true, true, false, false, false, false]
    );
    assert_eq!(fixed(&beta), [true, true, true, false, false]);
}

#[test]
fn replacing_take_that_is_refused_revokes_none_of_its_own() {
    let limit = limit(10, 0, RevocationOrder::OldestFirst);
    let alpha = tenant("alpha");
    let _kept = limit.take(&alpha, 3).unwrap();
    let own = [(); 2].map(|()| limit.take_replacing(&alpha, 1).unwrap());
    // The provider lowers the share below what the tenant's irrevocable permits take.
    limit.set_default_share(Share::Amount(3));
    assert_eq!(
        limit.take_replacing(&alpha, 1).unwrap_err(),
        ShareRefusal::Share
    );
    assert!(own.iter().all(|permit| !permit.is_revoked()));
    assert_eq!(limit.used(), 5);
}

#[test]
fn revocations_of_forgotten_holders_are_still_reported() {
    let limit = limit(1, 0, RevocationOrder::OldestFirst);
    limit.set_default_share(Share::Percent(100));
    let network = |n: u32| ShareHolder::Network(ipnet::Ipv4Net::new(n.into(), 32).unwrap().into());
    // Alpha is refused once and loses one permit; each network loses one permit to its next take.
    let alpha = limit.take_replacing(&tenant("alpha"), 1).unwrap();
    let last = limit.take_replacing(&tenant("alpha"), 1).unwrap();
    assert!(alpha.is_revoked());
    assert_eq!(
        limit.take(&tenant("alpha"), 1).unwrap_err(),
        ShareRefusal::Share
    );
    drop(last);
    for n in 0..20_000 {
        let first = limit.take_replacing(&network(n), 1).unwrap();
        let _second = limit.take_replacing(&network(n), 1).unwrap();
        assert!(first.is_revoked());
    }
    let usage = limit.usage();
    assert!(usage.holders.len() <= 4097, "{}", usage.holders.len());
    let listed: u64 = usage.holders.iter().map(|u| u.revoked).sum();
    assert_eq!(
        listed + usage.revoked_before,
        20_001,
        "nothing that was revoked is lost"
    );
    // Takes from endless addresses do not reset a tenant's counters.
    let own = usage
        .holders
        .iter()
        .find(|u| u.holder == tenant("alpha"))
        .expect("the tenant is listed");
    assert_eq!((own.refused, own.revoked), (1, 1));
}

#[test]
fn refusals_of_endless_sources_do_not_fill_the_memory() {
    let limit = limit(2, 0, RevocationOrder::OldestFirst);
    let _all = limit.take(&ShareHolder::Provider, 2).unwrap();
    for n in 0..20_000u32 {
        let source = ShareHolder::Network(ipnet::Ipv4Net::new(n.into(), 32).unwrap().into());
        assert!(limit.take(&source, 1).is_err());
    }
    let usage = limit.usage();
    assert!(usage.holders.len() <= 4097, "{}", usage.holders.len());
    let listed: u64 = usage.holders.iter().map(|u| u.refused).sum();
    assert_eq!(listed + usage.refused_before, 20_000, "no refusal is lost");
}

/// One step of a random history.
#[derive(Debug, Clone)]
enum LedgerStep {
    Take { holder: u8, amount: u64, method: u8 },
    Grow { at: usize, amount: u64 },
    Shrink { at: usize, amount: u64 },
    Drop { at: usize },
}

fn step() -> impl Strategy<Value = LedgerStep> {
    prop_oneof![
        4 => (0..4u8, 0..6u64, 0..3u8).prop_map(|(holder, amount, method)| LedgerStep::Take { holder, amount, method }),
        1 => (any::<usize>(), 0..4u64).prop_map(|(at, amount)| LedgerStep::Grow { at, amount }),
        1 => (any::<usize>(), 0..4u64).prop_map(|(at, amount)| LedgerStep::Shrink { at, amount }),
        2 => any::<usize>().prop_map(|at| LedgerStep::Drop { at }),
    ]
}

fn holder(n: u8) -> ShareHolder {
    if n == 0 {
        ShareHolder::Provider
    } else {
        tenant(["alpha", "beta", "gamma"][usize::from(n) - 1])
    }
}

fn revoked(limit: &TenantLimit) -> u64 {
    limit.usage().holders.iter().map(|u| u.revoked).sum()
}

proptest! {
    #[test]
    fn no_history_breaks_the_bounds(capacity in 1..24u64, reserve in 0..8u64, steps in prop::collection::vec(step(), 0..80)) {
        let limit = limit(capacity, reserve, RevocationOrder::OldestFirst);
        let mut permits: Vec<TenantPermit> = Vec::new();
        for step in steps {
            let len = permits.len().max(1);
            match step {
                LedgerStep::Take { holder: n, amount, method } => {
                    let before = revoked(&limit);
                    let taken = match method {
                        0 => limit.take(&holder(n), amount),
                        1 => limit.take_revocable(&holder(n), amount),
                        _ => limit.take_replacing(&holder(n), amount),
                    };
                    prop_assert!(taken.is_ok() || revoked(&limit) == before);
                    permits.extend(taken);
                }
                LedgerStep::Grow { at, amount } => {
                    let before = revoked(&limit);
                    let grown = permits.get_mut(at % len).map(|p| p.grow(amount));
                    prop_assert!(grown.is_none_or(|grown| grown.is_ok()) || revoked(&limit) == before);
                }
                LedgerStep::Shrink { at, amount } => { let _ = permits.get_mut(at % len).map(|p| p.shrink(amount)); }
                LedgerStep::Drop { at } => if !permits.is_empty() { permits.swap_remove(at % len); }
            }
            let usage = limit.usage();
            prop_assert!(usage.used <= capacity);
            prop_assert_eq!(usage.used, usage.holders.iter().map(|u| u.used).sum::<u64>());
            for u in &usage.holders {
                prop_assert!(u.used <= u.max, "{:?}", u);
            }
        }
        permits.clear();
        prop_assert_eq!(limit.usage().used, 0);
    }
}

/// Way in which the owners of a kind's permits take them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PermitUse {
    /// The permit is never revoked.
    Fixed,
    /// The permit can be revoked until it is dropped.
    Revocable,
    /// The permit can be revoked at first, and then is kept.
    Kept,
    /// The permit is never revoked, and the share is an absolute amount, far below the whole.
    Stored,
    /// Something else than a ledger divides the limit.
    Elsewhere,
}

/// Returns how permits of a kind are taken.
fn use_of(kind: ShareKind) -> PermitUse {
    match kind {
        ShareKind::ControllerConnections
        | ShareKind::Certificates
        | ShareKind::SubscriptionBytes
        | ShareKind::QueuedChanges
        | ShareKind::QueuedChangeBytes
        // Handshakes at a key server can be revoked, signatures cannot.
        | ShareKind::KeyServerRequests => PermitUse::Fixed,
        ShareKind::GatewayUnauthenticated
        | ShareKind::GatewayBufferBytes
        | ShareKind::NodeBufferBytes
        | ShareKind::DnsConnections
        | ShareKind::MetricSeries
        | ShareKind::ControllerUnauthenticated
        | ShareKind::ControllerStreams
        | ShareKind::Observations => PermitUse::Revocable,
        ShareKind::GatewayConnections | ShareKind::GatewayHandshakes => PermitUse::Kept,
        ShareKind::ConfigurationBytes | ShareKind::CompiledBytes | ShareKind::CompiledResources | ShareKind::RouteTableBytes => PermitUse::Stored,
        // `tenant_usage` and `body_budget` of the gateway, its scheduler and access log, and
        // the planner's addresses, and `canal_model::share::decide_omitted`.
        ShareKind::GatewayRequests
        | ShareKind::GatewayDelayedRequests
        | ShareKind::GatewayMirroredRequests
        | ShareKind::GatewayBodyBytes
        | ShareKind::GatewayCpu
        | ShareKind::AccessLogBytes
        | ShareKind::IngressAddresses
        | ShareKind::EdgeMapEntries => PermitUse::Elsewhere,
        other => panic!("{other:?} has no case here; fix: say how its permits are taken"),
    }
}

/// Takes `amount` as the owners of the kind's permits do.
fn take_as(
    limit: &TenantLimit,
    holder: &ShareHolder,
    amount: u64,
) -> Result<TenantPermit, ShareRefusal> {
    match use_of(limit.kind()) {
        PermitUse::Revocable => limit.take_revocable(holder, amount),
        PermitUse::Kept => limit.take_replacing(holder, amount).map(|mut permit| {
            permit.keep();
            permit
        }),
        _ => limit.take(holder, amount),
    }
}

/// Creates a limit of `whole`, in the kind's default shares if these are amounts in a store. A
/// tenth is reserved.
fn limit_of(kind: ShareKind, whole: u64) -> TenantLimit {
    let unit = match kind.default_share() {
        Share::Amount(amount) if use_of(kind) == PermitUse::Stored => amount,
        _ => 1,
    };
    let capacity = whole * unit;
    TenantLimit::new(TenantLimitConfig {
        kind,
        capacity,
        reserve: capacity / 10,
        revocation_order: RevocationOrder::OldestFirst,
    })
}

#[test]
fn no_kind_lacks_a_case() {
    let elsewhere = ShareKind::ALL
        .iter()
        .filter(|kind| use_of(**kind) == PermitUse::Elsewhere)
        .count();
    assert_eq!(elsewhere, 8);
    for kind in ShareKind::ALL.iter().copied() {
        let applies =
            [true, false].map(|is_revocable| threshold::decide_applies(kind, is_revocable));
        match use_of(kind) {
            PermitUse::Kept => assert_eq!(applies, [true, true], "{kind:?}"),
            PermitUse::Stored => assert_eq!(applies, [false, false], "{kind:?}"),
            _ => assert_eq!(applies, [false, true], "{kind:?}"),
        }
    }
}

proptest! {
    // Each case fills all kinds with thousands of permits, so few cases are enough.
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Ten tenants take what they can, in any order and in any amounts, and an eleventh is served.
    #[test]
    fn ten_greedy_tenants_leave_something_to_an_eleventh(
        whole in 40..20_000u64,
        steps in prop::collection::vec((0..10usize, 1..2_000u64), 0..60),
    ) {
        for kind in ShareKind::ALL.iter().copied().filter(|kind| use_of(*kind) != PermitUse::Elsewhere) {
            let limit = limit_of(kind, whole);
            let holders: Vec<_> = (0..10).map(|n| tenant(&format!("t{n}"))).collect();
            let mut permits: Vec<_> = steps.iter().filter_map(|(at, amount)| take_as(&limit, &holders[*at], *amount).ok()).collect();
            // Whatever is left, they take too.
            for amount in (0..40).rev().map(|bits| 1u64 << bits) {
                for holder in &holders {
                    while let Ok(permit) = take_as(&limit, holder, amount) {
                        permits.push(permit);
                        if permits.len() > 4_000 || use_of(kind) == PermitUse::Revocable && limit.used() >= limit.capacity() * 9 / 10 {
                            break;
                        }
                    }
                }
            }
            let eleventh = tenant("eleventh");
            let first = if use_of(kind) == PermitUse::Revocable { 1 } else { limit.capacity() * 9 / 10 / 128 };
            let eleventh = take_as(&limit, &eleventh, first.clamp(1, limit.max(&eleventh)));
            prop_assert!(eleventh.is_ok(), "{:?}: {:?} of {:?}", kind, eleventh, limit.usage());
        }
    }
}

#[test]
fn threshold_falls_as_the_whole_fills() {
    // The controller's connections in an audit: 80, of which a tenth is the provider's.
    let limit = limit_of(ShareKind::ControllerConnections, 80);
    let mut permits = Vec::new();
    let counts: Vec<_> = (0..10)
        .map(|n| {
            let held: Vec<_> =
                std::iter::from_fn(|| limit.take(&tenant(&format!("t{n}")), 1).ok()).collect();
            permits.push(held);
            permits[n].len()
        })
        .collect();
    assert_eq!(counts, [18, 18, 18, 6, 2, 1, 1, 1, 1, 1]);
    assert_eq!(
        limit.take(&tenant("t3"), 1).unwrap_err(),
        ShareRefusal::Threshold
    );
    let _eleventh = limit.take(&tenant("t10"), 1).unwrap();
}

#[test]
fn holder_over_the_threshold_still_replaces_its_own() {
    let limit = limit_of(ShareKind::GatewayHandshakes, 80);
    let _kept: Vec<_> = (0..3)
        .flat_map(|n| (0..18).map(move |_| n))
        .map(|n| take_as(&limit, &tenant(&format!("t{n}")), 1).unwrap())
        .collect();
    let own: Vec<_> =
        std::iter::from_fn(|| limit.take_revocable(&tenant("alpha"), 1).ok()).collect();
    assert_eq!(own.len(), 6);
    let next = limit.take_replacing(&tenant("alpha"), 1).unwrap();
    assert_eq!(own.iter().filter(|permit| permit.is_revoked()).count(), 1);
    assert!(own[0].is_revoked() && !next.is_revoked());
}

#[test]
fn a_holder_at_its_share_replaces_only_its_own_oldest() {
    let config = TenantLimitConfig {
        kind: ShareKind::GatewayUnauthenticated,
        capacity: 8,
        reserve: 0,
        revocation_order: RevocationOrder::OldestFirst,
    };
    let limit = TenantLimit::new(config);
    let holder = |name: &str| ShareHolder::Tenant(name.parse().unwrap());
    limit.set_default_share(Share::Percent(50));
    let mut alpha: Vec<_> = (0..4)
        .map(|_| limit.take_replacing(&holder("alpha"), 1).unwrap())
        .collect();
    let beta = limit.take_replacing(&holder("beta"), 1).unwrap();
    alpha.push(limit.take_replacing(&holder("alpha"), 1).unwrap());
    assert_eq!(
        alpha
            .iter()
            .map(TenantPermit::is_revoked)
            .collect::<Vec<_>>(),
        [true, false, false, false, false]
    );
    assert!(!beta.is_revoked());
    // Irrevocable permits are not replaced.
    alpha.iter_mut().for_each(TenantPermit::keep);
    assert_eq!(
        limit.take_replacing(&holder("alpha"), 1).unwrap_err(),
        ShareRefusal::Share
    );
    // The limit is full and no other holder has more than gamma would, so gamma replaces its own
    // permit.
    let gamma: Vec<_> = (0..3)
        .map(|_| limit.take_replacing(&holder("gamma"), 1).unwrap())
        .collect();
    let next = limit.take_replacing(&holder("gamma"), 1).unwrap();
    assert!(gamma[0].is_revoked() && !next.is_revoked() && !beta.is_revoked());
}

#[test]
fn written_share_holds_against_another_default() {
    let limit = limit(100, 0, RevocationOrder::OldestFirst);
    let mut shares = Shares::default();
    shares.set(KIND, Share::Amount(50));
    limit.set_default_share(Share::Percent(10));
    let name = "alpha".parse().unwrap();
    limit.set_shares([(&name, &shares)]);
    assert_eq!(
        (limit.max(&tenant("alpha")), limit.max(&tenant("beta"))),
        (50, 10)
    );
}
