//! Rate limit of certificate requests: one token bucket per principal. Pure: time is an argument.

use std::collections::HashMap;

/// Burst and long-term rate of certificate requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CertificateRate {
    /// Certificates at once, after a time without requests.
    pub burst: u32,
    /// Certificates per second in the long run.
    pub per_second: u32,
}

/// Rate of a node, or of a tenant's own key server: the pods of a full node at once, and some
/// restarts.
/// A node has at most 1,000 pods (docs/operations/limits.md). With 5 a second, all of them have new
/// certificates after 200 s.
pub const TENANT_RATE: CertificateRate = CertificateRate {
    burst: 1_000,
    per_second: 5,
};
/// Rate of a gateway or key server of the provider, which holds identities of many tenants.
/// Nobody measured these values: the burst is that of 20 nodes, and the rate that of 40
/// ([`TENANT_RATE`]).
pub const PROVIDER_RATE: CertificateRate = CertificateRate {
    burst: 20_000,
    per_second: 200,
};
/// Maximum number of principals before those with a full bucket are forgotten.
/// Twice the number of principals (`PRINCIPALS_MAX`), so that only removed principals can exceed
/// it.
const BUCKETS_MAX: usize = 20_000;

#[derive(Debug)]
struct Bucket {
    tokens: f64,
    /// Time of the last refill in milliseconds.
    at: u64,
    rate: CertificateRate,
}

impl Bucket {
    fn refill(&mut self, now: u64) {
        let passed =
            f64::from(u32::try_from(now.saturating_sub(self.at)).unwrap_or(u32::MAX)) / 1000.0;
        self.tokens = (self.tokens + passed * f64::from(self.rate.per_second))
            .min(f64::from(self.rate.burst));
        self.at = now;
    }
}

/// Token buckets of all principals.
#[derive(Debug, Default)]
pub(crate) struct CertificateRates(HashMap<String, Bucket>);

impl CertificateRates {
    /// Takes one certificate from the bucket of `principal`; returns false if it requested too
    /// many. `now` is in milliseconds of a clock that never goes back.
    pub(crate) fn take(&mut self, principal: &str, rate: CertificateRate, now: u64) -> bool {
        if self.0.len() >= BUCKETS_MAX && !self.0.contains_key(principal) {
            // A full bucket is like a new one, so nothing is lost with it.
            self.0.retain(|_, bucket| {
                bucket.refill(now);
                bucket.tokens < f64::from(bucket.rate.burst)
            });
        }
        let fresh = || Bucket {
            tokens: f64::from(rate.burst),
            at: now,
            rate,
        };
        let bucket = self.0.entry(principal.to_string()).or_insert_with(fresh);
        bucket.refill(now);
        if bucket.tokens < 1.0 {
            return false;
        }
        bucket.tokens -= 1.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_principal_has_its_burst_then_its_rate_and_others_are_not_touched() {
        let rate = CertificateRate {
            burst: 10,
            per_second: 2,
        };
        let mut rates = CertificateRates::default();
        let taken = |rates: &mut CertificateRates, who: &str, now| {
            (0..100).filter(|_| rates.take(who, rate, now)).count()
        };
        assert_eq!(taken(&mut rates, "node alpha/n1", 0), 10);
        assert_eq!(taken(&mut rates, "node alpha/n1", 499), 0);
        assert_eq!(taken(&mut rates, "node beta/m1", 499), 10);
        assert_eq!(taken(&mut rates, "node alpha/n1", 1_500), 3);
        assert_eq!(
            taken(&mut rates, "node alpha/n1", 1_000_000),
            10,
            "rest is worth no more than the burst"
        );
    }
}
