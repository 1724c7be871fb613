//! The dynamic threshold of a limit whose permits cannot be revoked: how much must stay free for
//! tenants that have little or nothing. It counts nothing and revokes nothing. Start at
//! [`decide_free_needed`].

use canal_model::share::ShareKind;

/// The part of a limit that only holders with a small amount may take: an eighth.
/// docs/design/0007-fairness.md explains why it is needed. The eighth was chosen, and nobody
/// measured another.
const NEWCOMERS_DIVISOR: u64 = 8;
/// Number of holders that this part serves at least. Each may take an equal part of it, and at
/// least 1.
/// So a holder has a 128th of the whole in any case. The number was chosen.
const NEWCOMERS: u64 = 16;
/// While other holders are present, a holder may have at most this many times what stays free,
/// besides the part for small amounts.
/// With a share of 25 %, three holders have all of theirs and the fourth a third of it
/// (docs/design/0007-fairness.md).
const FREE_FACTOR: u64 = 2;

/// Decides how much of a limit of `whole` must stay free after a holder's amount has grown to
/// `wanted`, while other holders are present.
///
/// Shares alone do not protect a limit whose permits cannot be revoked, because the shares of some
/// tenants add up to the whole. A holder may therefore grow only to a multiple of what stays free.
/// That is the dynamic threshold of shared switch buffers (Choudhury and Hahne, IEEE/ACM
/// Transactions on Networking 6(2), 1998): it falls as the whole fills. An eighth of the whole is
/// left to holders with small amounts, which need nothing to stay free. So at least fifteen tenants
/// more are served, however many others take all that they can; of a whole below 128, as many as
/// its eighth.
pub fn decide_free_needed(wanted: u64, whole: u64) -> u64 {
    let newcomers = whole.div_ceil(NEWCOMERS_DIVISOR);
    if wanted <= (newcomers / NEWCOMERS).max(1) {
        0
    } else {
        newcomers + wanted.div_ceil(FREE_FACTOR)
    }
}

/// Decides whether the threshold applies to a permit of this kind.
pub(super) fn decide_applies(kind: ShareKind, is_revocable: bool) -> bool {
    match kind {
        // These amounts are read from a store at a start, in another order than they were accepted
        // in. A threshold could then refuse what was accepted before. Their shares are absolute and
        // small parts of the whole.
        ShareKind::ConfigurationBytes
        | ShareKind::CompiledBytes
        | ShareKind::CompiledResources
        | ShareKind::RouteTableBytes => false,
        // A permit that can be revoked at first becomes irrevocable later: a connection gets to
        // work, a ClientHello becomes whole.
        ShareKind::GatewayConnections | ShareKind::GatewayHandshakes => true,
        // A revocable permit gives way to any holder that has less.
        _ => !is_revocable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threshold_falls_as_the_whole_fills_and_small_amounts_need_nothing_free() {
        for (wanted, whole, needed) in [
            (1, 1, 0),
            (1, 8, 0),
            (2, 8, 2),
            (1, 72, 0),
            (2, 72, 10),
            (18, 72, 18),
            (64, 8192, 0),
            (65, 8192, 1057),
            (u64::MAX, 8, 1 << 63 | 1),
        ] {
            assert_eq!(
                decide_free_needed(wanted, whole),
                needed,
                "{wanted} of {whole}"
            );
        }
    }
}
