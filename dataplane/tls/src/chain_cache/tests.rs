//! Tests of what the cache of verified chains retains, and for how long.

use std::time::Duration;

use canal_runtime::metrics::Registry;
use canal_testing::{TestCa, identity};
use rustls_pki_types::UnixTime;

use super::{CHAINS_MAX, ChainCache, ChainKey};
use crate::verify::{ExpectedPeer, verified_for_test};
use crate::{PeerRole, PeerVerifier, TrustSnapshot, TrustView};

const ALICE: &str = "spiffe://alpha.example/ns/shop/sa/alice";

#[test]
fn cached_chains_expire_with_the_certificate_and_are_bounded() {
    let registry = Registry::new();
    let cache = ChainCache::new(&registry);
    let ca = TestCa::new("alpha");
    let leaf = ca.issue(&identity(ALICE)).chain()[0].clone();
    let trust = TrustSnapshot::of_bundles([&bundle_of(&ca)]).unwrap();
    let anchors = trust
        .anchors(&identity(ALICE).trust_domain)
        .unwrap()
        .clone();
    let verifier = PeerVerifier {
        own: identity(ALICE).trust_domain,
        fallback: anchors,
        trust: TrustView::without_bundles(),
    };
    // 31,557,600 s are a year of 365.25 days.
    // The test CA's certificates are valid from 2020 to 2120.
    let at =
        |year: u64| UnixTime::since_unix_epoch(Duration::from_secs((year - 1970) * 31_557_600));
    let members = ExpectedPeer::Members(verifier.own.clone());
    assert!(
        verifier
            .verify_peer(PeerRole::Client, &members, &leaf, &[], at(2026))
            .is_ok()
    );
    assert!(
        verifier
            .verify_peer(PeerRole::Client, &members, &leaf, &[], at(2125))
            .is_err()
    );
    let verified = verified_for_test(&identity(ALICE), &leaf);
    let key = |n: u64| ChainKey::of(&leaf, &[], n, PeerRole::Client);
    cache.put(key(0), verified.clone());
    assert!(cache.get(&key(0), at(2026)).is_some());
    assert!(cache.get(&key(0), at(2125)).is_none() && cache.get(&key(0), at(2001)).is_none());
    assert!(cache.get(&key(1), at(2026)).is_none());
    // Three times what fits, so that half of the cache is dropped several times.
    for n in 0..3 * CHAINS_MAX as u64 {
        cache.put(key(n), verified.clone());
        // The entry is looked up all the time and therefore stays.
        assert!(cache.get(&key(0), at(2026)).is_some(), "{n}");
    }
    assert!(cache.len() <= CHAINS_MAX, "{}", cache.len());
}

fn bundle_of(ca: &TestCa) -> canal_model::trust::TrustBundle {
    match &*ca.bundle("alpha", "alpha.example", false, vec![]) {
        canal_model::program::Resource::Bundle(b) => b.clone(),
        other => panic!("{other:?}"),
    }
}
