//! Limits of what one service may cost a gateway. Each limit has a fault of its own and a test that
//! reaches it.

/// Maximum work of the regexes for one request: bytes of each automaton that is run, times bytes of
/// the text in which it is run. An automaton whose states do not fit into its cache follows all of
/// them for each byte. The whole took some 200 ms (a core of a cloud machine, 2026), in which the
/// worker serves nobody else. Nearly all automata have a few KiB, and nearly all texts some hundred
/// bytes.
pub const REGEX_WORK_MAX: u64 = 512 << 20;

/// Limits for the rules of one service. The units are in the names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterLimits {
    /// Limit of the matches of all rules together.
    pub matches_max: usize,
    /// Limit of the text of one regex.
    pub regex_text_bytes_max: usize,
    /// Limit of the automaton of one regex.
    pub regex_bytes_max: usize,
    /// Limit of all automata of the service together.
    pub regexes_bytes_max: usize,
    /// Limit of the same automata where a path regex counts once for each set of hosts that has an
    /// automaton with it.
    pub joined_regexes_bytes_max: usize,
    /// Limit of the regexes that may be refused for their size; further ones are refused unread, so
    /// that their number costs no time.
    pub regex_refusals_max: usize,
    /// Cache that one worker may build while it runs one automaton, beside
    /// [`RouterLimits::regex_cache_factor`].
    pub regex_cache_bytes: usize,
    /// Bytes of that cache for each byte of the automaton.
    pub regex_cache_factor: usize,
}

impl RouterLimits {
    /// Limits that a gateway uses by default.
    pub const DEFAULT: RouterLimits = RouterLimits {
        // A rank has 31 bits (`RANKS_MAX`); 80 bytes for an entry make some 80 MB.
        matches_max: 1_000_000,
        // Four times the compiler's limit, so only a controller of another build exceeds it.
        regex_text_bytes_max: 4096,
        // The compiler's limit too, with the same library.
        regex_bytes_max: 256 * 1024,
        // Sixteen of the largest; the compiler permits 3 MiB.
        regexes_bytes_max: 4 * 1024 * 1024,
        // Twice the above: nobody measured how many sets of hosts share a regex.
        joined_regexes_bytes_max: 8 * 1024 * 1024,
        // Each refusal has cost the building of an automaton up to its limit.
        regex_refusals_max: 64,
        // Nobody measured the cache; if it is full, it is emptied and built again while matching.
        regex_cache_bytes: 16 * 1024,
        regex_cache_factor: 4,
    };
}

const _: () =
    assert!(RouterLimits::DEFAULT.regex_bytes_max <= RouterLimits::DEFAULT.regexes_bytes_max);
const _: () = assert!(
    RouterLimits::DEFAULT.regexes_bytes_max <= RouterLimits::DEFAULT.joined_regexes_bytes_max
);

impl Default for RouterLimits {
    fn default() -> Self {
        Self::DEFAULT
    }
}
