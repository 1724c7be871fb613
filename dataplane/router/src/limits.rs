//! What one service may cost a gateway at most. Each limit has a fault of its own and a test that reaches it.

/// Limits for the rules of one service. Units are in the names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Matches of all rules together.
    pub matches_max: usize,
    /// The text of one regex.
    pub regex_text_bytes_max: usize,
    /// The automaton of one regex.
    pub regex_bytes_max: usize,
    /// All automata of the service.
    pub regexes_bytes_max: usize,
    /// The cache that one worker builds up while it runs one automaton.
    pub regex_cache_bytes_max: usize,
}

impl Limits {
    /// The defaults.
    pub const DEFAULT: Limits = Limits {
        matches_max: 1_000_000,
        regex_text_bytes_max: 4096,
        regex_bytes_max: 256 * 1024,
        regexes_bytes_max: 4 * 1024 * 1024,
        regex_cache_bytes_max: 512 * 1024,
    };
}

const _: () = assert!(Limits::DEFAULT.regex_bytes_max <= Limits::DEFAULT.regexes_bytes_max);

impl Default for Limits {
    fn default() -> Self {
        Self::DEFAULT
    }
}
