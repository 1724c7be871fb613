//! Regular expressions for texts that are not part of a match, such as origins. They have the same
//! limits as those of conditions, and match whole texts too.

use crate::limits::RouterLimits;
use crate::regexes::{Automaton, AutomatonBudget, RegexWork};

/// Maximum length of a text, in bytes. That of an origin is some 270: a scheme, a name of at most 253
/// bytes and a port. Many expressions may be run in one text, so a longer one matches none.
pub const PATTERN_TEXT_BYTES_MAX: usize = 512;

/// Compiled expressions, by their number.
#[derive(Debug)]
pub struct TextPatterns(Box<[Option<Automaton>]>);

impl TextPatterns {
    /// Compiles expressions. One that is not valid, or beyond the limits, matches nothing.
    pub fn compile<'p>(patterns: impl Iterator<Item = &'p str>, limits: &RouterLimits) -> Self {
        let mut budget = AutomatonBudget::new(limits);
        let patterns = patterns.map(|pattern| {
            let checked = budget.check("origin", pattern).ok()?;
            budget.compile(std::iter::once(&checked))
        });
        Self(patterns.collect())
    }

    /// Returns whether the expression with this number matches the whole text.
    pub fn is_match(&self, index: usize, text: &[u8]) -> bool {
        let pattern = self.0.get(index).and_then(Option::as_ref);
        let is_short = text.len() <= PATTERN_TEXT_BYTES_MAX;
        is_short && pattern.is_some_and(|pattern| pattern.is_match(text, &RegexWork::new()))
    }

    /// Returns the memory of the automata.
    pub fn memory_bytes(&self) -> usize {
        self.0.iter().flatten().map(Automaton::memory_usage).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_texts_and_broken_ones_nothing() {
        let patterns = [r"https://[a-z]+\.example", "(", "b*"];
        let compiled = TextPatterns::compile(patterns.into_iter(), &RouterLimits::DEFAULT);
        assert!(compiled.is_match(0, b"https://a.example"));
        assert!(!compiled.is_match(0, b"https://a.example.evil"));
        assert!(!compiled.is_match(1, b"("));
        assert!(compiled.is_match(2, b"bb") && !compiled.is_match(2, b"ab"));
        assert!(!compiled.is_match(3, b""));
        let mut longest = vec![b'b'; PATTERN_TEXT_BYTES_MAX];
        assert!(compiled.is_match(2, &longest));
        longest.push(b'b');
        assert!(!compiled.is_match(2, &longest));
        assert!(compiled.memory_bytes() > 0);
    }
}
