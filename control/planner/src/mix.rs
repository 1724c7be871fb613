//! A fixed hash for choices that are free but must be the same each time. It uses no randomness:
//! equal words give equal numbers.

/// Applies splitmix64's finalizer to the words in turn.
pub(crate) fn mix(words: [u64; 3]) -> u64 {
    words
        .into_iter()
        .fold(0x9e37_79b9_7f4a_7c15, |state, word| {
            // The constants are splitmix64's.
            let mut z = (state ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
            z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ z >> 31
        })
}
