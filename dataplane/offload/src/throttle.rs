//! Early limits in the form of the redirector's map: token buckets. This module is pure;
//! [`crate::redirector`] writes them, and the BPF program takes tokens.

use canal_abi::tier::{BUCKETS, Throttle, TokenBucket};

/// One token in the unit of a bucket's `tokens`, which is nanoseconds times tokens per second.
const TOKEN_UNITS: u64 = 1_000_000_000;
/// Largest burst. It is more than any link carries in a second, and its product with
/// [`TOKEN_UNITS`] still fits 64 bits.
const BURST_MAX: u64 = 10_000_000_000;

/// One limit, as a rate and a burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThrottleLimit {
    /// Tokens per second; 0 removes the limit.
    pub rate: u64,
    /// Largest number of tokens; at least 1 and at most 10^10.
    pub burst: u64,
}

/// Early limits of a service or a tenant, with the part of them that this replica may use. `None`
/// means that there is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ThrottleLimits {
    /// Limit of new sessions: TCP SYNs and UDP datagrams.
    pub sessions: Option<ThrottleLimit>,
    /// Limit of packets of any kind, as the stack sees them: a GSO packet counts once.
    pub packets: Option<ThrottleLimit>,
    /// Part of the limits that this replica may use, in 1/[`BUCKETS`]; 0 means all of it.
    pub part: u32,
}

impl ThrottleLimit {
    fn written(limit: Option<Self>) -> (u64, u64) {
        limit
            .filter(|l| l.rate > 0)
            .map_or((0, 0), |l| (l.rate, l.burst.clamp(1, BURST_MAX)))
    }
}

fn applied(
    limit: Option<ThrottleLimit>,
    part: u32,
    old: Option<&TokenBucket>,
    now_ns: u64,
) -> TokenBucket {
    let (rate, burst) = ThrottleLimit::written(limit);
    // The program does the same: a bucket holds at least what one packet costs.
    let full = if burst == 0 {
        0
    } else {
        (burst * TOKEN_UNITS).max(cost(part))
    };
    let refused = old.map_or(0, |o| o.refused);
    match old {
        Some(o) if o.rate > 0 => TokenBucket {
            rate,
            burst,
            tokens: o.tokens.min(full),
            at_ns: o.at_ns,
            refused,
        },
        _ => TokenBucket {
            rate,
            burst,
            tokens: full,
            at_ns: now_ns,
            refused,
        },
    }
}

/// Returns what one packet costs at a replica that has this part of a limit.
fn cost(part: u32) -> u64 {
    (TOKEN_UNITS * BUCKETS as u64)
        .checked_div(part.into())
        .unwrap_or(TOKEN_UNITS)
}

impl ThrottleLimits {
    /// Returns the map's value once these limits are in force at `now_ns`. A bucket that already
    /// had a limit keeps its tokens, up to the new burst.
    pub(crate) fn applied_to(&self, old: Option<&Throttle>, now_ns: u64) -> Throttle {
        Throttle {
            lock: 0,
            part: self.part,
            sessions: applied(self.sessions, self.part, old.map(|o| &o.sessions), now_ns),
            packets: applied(self.packets, self.part, old.map(|o| &o.packets), now_ns),
        }
    }

    /// Returns true if the limits are already in force.
    pub(crate) fn are_in(&self, wider: &Throttle) -> bool {
        let same = |limit, b: &TokenBucket| ThrottleLimit::written(limit) == (b.rate, b.burst);
        self.part == wider.part
            && same(self.sessions, &wider.sessions)
            && same(self.packets, &wider.packets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_limits_start_full_and_changed_ones_keep_what_they_have() {
        let limits = |rate, burst| ThrottleLimits {
            sessions: Some(ThrottleLimit { rate, burst }),
            ..ThrottleLimits::default()
        };
        // 7 and later 99 are the time: a changed limit keeps the bucket's own, so that the tokens
        // since then are added.
        let first = limits(10, 5).applied_to(None, 7);
        assert_eq!(
            first.sessions,
            TokenBucket {
                rate: 10,
                burst: 5,
                tokens: 5 * TOKEN_UNITS,
                at_ns: 7,
                refused: 0
            }
        );
        assert_eq!(
            first.packets,
            TokenBucket {
                at_ns: 7,
                ..TokenBucket::default()
            }
        );
        assert!(
            limits(10, 5).are_in(&first)
                && !limits(11, 5).are_in(&first)
                && !limits(10, 6).are_in(&first)
        );
        let mut used = first;
        used.sessions.tokens = 2 * TOKEN_UNITS;
        used.sessions.refused = 3;
        for (case, to, tokens) in [
            ("wider", limits(20, 50), 2),
            ("narrower", limits(20, 1), 1),
            ("lifted", ThrottleLimits::default(), 0),
        ] {
            let now = to.applied_to(Some(&used), 99);
            assert_eq!(
                (
                    now.sessions.tokens / TOKEN_UNITS,
                    now.sessions.at_ns,
                    now.sessions.refused
                ),
                (tokens, 7, 3),
                "{case}"
            );
        }
        // A part is in 128ths of the limit, because a service has 128 buckets.
        let part = ThrottleLimits {
            part: 1,
            ..limits(1, 5)
        }
        .applied_to(None, 0);
        assert_eq!(
            (part.part, part.sessions.tokens),
            (1, 128 * TOKEN_UNITS),
            "one packet of a replica with 1/128 of the limit costs so much"
        );
        assert!(!limits(1, 5).are_in(&part));
        assert_eq!(
            limits(1, 0).applied_to(None, 0).sessions.burst,
            1,
            "nothing could ever pass"
        );
        assert_eq!(
            limits(1, u64::MAX).applied_to(None, 0).sessions.tokens,
            BURST_MAX * TOKEN_UNITS,
            "no overflow"
        );
    }
}
