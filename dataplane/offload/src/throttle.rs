//! Early limits as the redirector's map holds them: token buckets. Pure; [`crate::redirector`] writes them, the program takes tokens.

use canal_abi::tier::{BUCKETS, Throttle, TokenBucket};

/// One token, in the unit of a bucket's `tokens`: nanoseconds times tokens per second.
const TOKEN: u64 = 1_000_000_000;
/// More than any link carries in a second, and times [`TOKEN`] still within 64 bits.
const BURST_MAX: u64 = 10_000_000_000;

/// One limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// Tokens per second; 0 lifts the limit.
    pub rate: u64,
    /// Most tokens; at least 1 and at most 10^10.
    pub burst: u64,
}

/// Early limits of a service or of a tenant, and this replica's part of them. `None`: no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// New sessions: TCP SYNs and UDP datagrams.
    pub sessions: Option<Limit>,
    /// Packets of any kind, as the stack sees them: a GSO packet is one.
    pub packets: Option<Limit>,
    /// The part that this replica may use, in 1/[`BUCKETS`]; 0: all of it.
    pub part: u32,
}

impl Limit {
    fn written(limit: Option<Self>) -> (u64, u64) {
        limit.filter(|l| l.rate > 0).map_or((0, 0), |l| (l.rate, l.burst.clamp(1, BURST_MAX)))
    }
}

fn applied(limit: Option<Limit>, part: u32, old: Option<&TokenBucket>, now_ns: u64) -> TokenBucket {
    let (rate, burst) = Limit::written(limit);
    // As the program has it: a bucket holds at least what one packet costs.
    let full = if burst == 0 { 0 } else { (burst * TOKEN).max(cost(part)) };
    let refused = old.map_or(0, |o| o.refused);
    match old {
        Some(o) if o.rate > 0 => TokenBucket { rate, burst, tokens: o.tokens.min(full), at_ns: o.at_ns, refused },
        _ => TokenBucket { rate, burst, tokens: full, at_ns: now_ns, refused },
    }
}

/// What one packet costs a replica that has this part of a limit.
fn cost(part: u32) -> u64 {
    (TOKEN * BUCKETS as u64).checked_div(part.into()).unwrap_or(TOKEN)
}

impl Limits {
    /// What the map holds after these limits came into force at `now_ns`.
    pub(crate) fn applied_to(&self, old: Option<&Throttle>, now_ns: u64) -> Throttle {
        Throttle {
            lock: 0,
            part: self.part,
            sessions: applied(self.sessions, self.part, old.map(|o| &o.sessions), now_ns),
            packets: applied(self.packets, self.part, old.map(|o| &o.packets), now_ns),
        }
    }

    /// Whether they are in force already.
    pub(crate) fn are_in(&self, held: &Throttle) -> bool {
        let same = |limit, b: &TokenBucket| Limit::written(limit) == (b.rate, b.burst);
        self.part == held.part && same(self.sessions, &held.sessions) && same(self.packets, &held.packets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_limits_start_full_and_changed_ones_keep_what_they_have() {
        let limits = |rate, burst| Limits { sessions: Some(Limit { rate, burst }), ..Limits::default() };
        let first = limits(10, 5).applied_to(None, 7);
        assert_eq!(first.sessions, TokenBucket { rate: 10, burst: 5, tokens: 5 * TOKEN, at_ns: 7, refused: 0 });
        assert_eq!(first.packets, TokenBucket { at_ns: 7, ..TokenBucket::default() });
        assert!(limits(10, 5).are_in(&first) && !limits(11, 5).are_in(&first) && !limits(10, 6).are_in(&first));
        let mut used = first;
        used.sessions.tokens = 2 * TOKEN;
        used.sessions.refused = 3;
        for (case, to, tokens) in [("wider", limits(20, 50), 2), ("narrower", limits(20, 1), 1), ("lifted", Limits::default(), 0)] {
            let now = to.applied_to(Some(&used), 99);
            assert_eq!((now.sessions.tokens / TOKEN, now.sessions.at_ns, now.sessions.refused), (tokens, 7, 3), "{case}");
        }
        let part = Limits { part: 1, ..limits(1, 5) }.applied_to(None, 0);
        assert_eq!((part.part, part.sessions.tokens), (1, 128 * TOKEN), "one packet of a replica with 1/128 of the limit costs so much");
        assert!(!limits(1, 5).are_in(&part));
        assert_eq!(limits(1, 0).applied_to(None, 0).sessions.burst, 1, "nothing could ever pass");
        assert_eq!(limits(1, u64::MAX).applied_to(None, 0).sessions.tokens, BURST_MAX * TOKEN, "no overflow");
    }
}
