//! Regular expressions as everywhere in Canal: RE2 syntax over bytes, without Unicode classes; the whole text must match.

use regex_automata::meta::{self, Regex};
use regex_automata::nfa::thompson::{self, WhichCaptures};
use regex_automata::util::syntax;

use crate::limits::{REGEX_AUTOMATON_BYTES_MAX, REGEX_BYTES_MAX, REGEX_NESTING_MAX};

/// Returns the bytes of memory that a pattern needs.
///
/// # Errors
/// Fails with the problem as a sentence without a full stop, if the pattern is invalid or exceeds a limit.
pub(crate) fn cost(pattern: &str) -> Result<usize, String> {
    if pattern.len() > REGEX_BYTES_MAX {
        return Err(format!("the regular expression has {} bytes, more than {REGEX_BYTES_MAX}", pattern.len()));
    }
    // The bare pattern is parsed first, so that `a)|(b` does not become valid by the group that is put around it.
    syntax::parse_with(pattern, &config().nest_limit(REGEX_NESTING_MAX))
        .map_err(|error| format!("the regular expression cannot be read: {}", reason(&error.to_string())))?;
    thompson::Compiler::new()
        .syntax(config())
        .configure(thompson::Config::new().utf8(false).which_captures(WhichCaptures::None).nfa_size_limit(Some(REGEX_AUTOMATON_BYTES_MAX)))
        .build(&whole(pattern))
        .map(|automaton| automaton.memory_usage())
        .map_err(|_| format!("the regular expression needs more than {REGEX_AUTOMATON_BYTES_MAX} bytes of memory"))
}

/// Compiles a pattern; `None` if [`cost`] refuses it.
pub(crate) fn compile(pattern: &str) -> Option<Regex> {
    cost(pattern).ok()?;
    meta::Builder::new().syntax(config()).configure(Regex::config().utf8_empty(false)).build(&whole(pattern)).ok()
}

fn whole(pattern: &str) -> String {
    format!(r"\A(?:{pattern})\z")
}

fn config() -> syntax::Config {
    // The anchors and the group around a pattern add two levels of nesting.
    syntax::Config::new().unicode(false).utf8(false).nest_limit(REGEX_NESTING_MAX + 2)
}

/// Extracts the problem from a parser error: it is in the last line.
fn reason(error: &str) -> &str {
    let last = error.lines().last().unwrap_or(error);
    last.strip_prefix("error: ").unwrap_or(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_text_must_match() {
        for (pattern, text, expected) in [
            ("a|ab", "ab", true),
            ("a|ab", "abc", false),
            ("/v[0-9]+/.*", "/v1/x", true),
            ("/v[0-9]+/.*", "x/v1/x", false),
            ("(?i)Jason", "jASON", true),
            ("", "", true),
            ("", "a", false),
            (".*", "\u{e9}", true),
            ("\\d", "\u{0665}", false),
        ] {
            assert_eq!(compile(pattern).unwrap().is_match(text), expected, "{pattern:?} {text:?}");
        }
    }

    #[test]
    fn patterns_beyond_the_bounds_are_refused() {
        let long = "a".repeat(REGEX_BYTES_MAX + 1);
        for pattern in ["(", "a)|(b", "(?=a)", "\\1", "(a{500}){500}", long.as_str(), "(?x)a#"] {
            assert!(cost(pattern).is_err(), "{pattern:?}");
            assert!(compile(pattern).is_none(), "{pattern:?}");
        }
        assert!(cost(&long[1..]).is_ok());
        let nested = |depth: usize| format!("{}a{}", "(".repeat(depth), ")".repeat(depth));
        let deepest = REGEX_NESTING_MAX as usize;
        assert!(compile(&nested(deepest)).is_some_and(|regex| regex.is_match("a")));
        assert!(cost(&nested(deepest + 1)).is_err_and(|problem| problem.contains("nested")));
    }
}
