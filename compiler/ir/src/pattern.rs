//! Regular expressions as everywhere in Canal: RE2 syntax over bytes; the whole text must match.
//! Classes such as `\w` and `[^x]` are of ASCII or bytes, as in RE2. Only a pattern that names
//! Unicode's properties (`\p{L}`) is read with Unicode, as a whole, as the router reads it.

use std::borrow::Cow;

use regex_automata::meta::{self, Regex};
use regex_automata::nfa::thompson::{self, WhichCaptures};
use regex_automata::util::syntax;

use crate::limits::{REGEX_AUTOMATON_BYTES_MAX, REGEX_BYTES_MAX, REGEX_NESTING_MAX};

/// Returns the bytes of memory that a pattern needs.
///
/// # Errors
/// Fails with the problem as a sentence without a full stop, if the pattern is invalid or exceeds a
/// limit.
pub fn cost(pattern: &str) -> Result<usize, String> {
    Ok(measure(pattern)?.bytes)
}

/// Cost and requirements of a valid pattern.
struct PatternCost {
    bytes: usize,
    /// The pattern is valid with Unicode only.
    unicode: bool,
}

fn measure(pattern: &str) -> Result<PatternCost, String> {
    if pattern.len() > REGEX_BYTES_MAX {
        return Err(format!(
            "the regular expression has {} bytes, more than {REGEX_BYTES_MAX}",
            pattern.len()
        ));
    }
    // The bare pattern is parsed first, so that `a)|(b` does not become valid by the group that is
    // put around it.
    let unicode = is_unicode_needed(pattern)?;
    let automaton = thompson::Compiler::new()
        .syntax(config(unicode))
        .configure(
            thompson::Config::new()
                .utf8(false)
                .which_captures(WhichCaptures::None)
                .nfa_size_limit(Some(REGEX_AUTOMATON_BYTES_MAX)),
        )
        .build(&anchor(pattern))
        .map_err(|_| {
            format!(
                "the regular expression needs more than {REGEX_AUTOMATON_BYTES_MAX} bytes of memory"
            )
        })?;
    Ok(PatternCost {
        bytes: automaton.memory_usage(),
        unicode,
    })
}

/// Compiles a pattern; `None` if [`cost`] refuses it.
pub fn compile(pattern: &str) -> Option<Regex> {
    let unicode = measure(pattern).ok()?.unicode;
    meta::Builder::new()
        .syntax(config(unicode))
        .configure(Regex::config().utf8_empty(false))
        .build(&anchor(pattern))
        .ok()
}

/// Writes the literal texts between `\Q` and `\E` with escapes: these marks are RE2 syntax, and the
/// parser of the compiler and of data planes does not know them. A missing `\E` is at the end of
/// the pattern. In a class they are no marks, in RE2 either.
pub fn without_quotes(pattern: &str) -> Cow<'_, str> {
    const BEGIN: &str = "\\Q";
    const END: &str = "\\E";
    if !pattern.contains(BEGIN) {
        return Cow::Borrowed(pattern);
    }
    let mut plain = String::with_capacity(pattern.len());
    let mut rest = pattern;
    while let Some(first) = rest.chars().next() {
        if let Some(quoted) = rest.strip_prefix(BEGIN) {
            let (literal, after) = quoted.split_once(END).unwrap_or((quoted, ""));
            for c in literal.chars() {
                // The parser refuses an escape of these two.
                if c.is_ascii_punctuation() && !matches!(c, '<' | '>') {
                    plain.push('\\');
                }
                plain.push(c);
            }
            rest = after;
            continue;
        }
        let length = match first {
            '\\' => escape_length(rest),
            '[' => class_length(rest),
            c => c.len_utf8(),
        };
        let (unquoted, after) = rest.split_at(length);
        plain.push_str(unquoted);
        rest = after;
    }
    Cow::Owned(plain)
}

/// Returns the length of the backslash at the beginning and the character after it.
fn escape_length(pattern: &str) -> usize {
    pattern.chars().take(2).map(char::len_utf8).sum()
}

/// Returns the length of the class at the beginning, as RE2 reads it: a `]` directly after `[` or
/// `[^` is a member.
fn class_length(pattern: &str) -> usize {
    let mut at = 1 + usize::from(pattern[1..].starts_with('^'));
    at += usize::from(pattern[at..].starts_with(']'));
    while let Some(c) = pattern[at..].chars().next() {
        let rest = &pattern[at..];
        let named = rest.strip_prefix("[:").and_then(|name| name.find(":]"));
        at += match (c, named) {
            (']', _) => return at + 1,
            ('\\', _) => escape_length(rest),
            (_, Some(name)) => "[:".len() + name + ":]".len(),
            (c, None) => c.len_utf8(),
        };
    }
    pattern.len()
}

fn anchor(pattern: &str) -> String {
    format!(r"\A(?:{pattern})\z")
}

/// Returns whether a pattern is valid with Unicode only. The error is the problem without Unicode,
/// which is the common reading.
fn is_unicode_needed(pattern: &str) -> Result<bool, String> {
    let parse = |unicode| {
        let parsed = syntax::parse_with(pattern, &config(unicode).nest_limit(REGEX_NESTING_MAX));
        parsed.map(drop).map_err(|error| {
            format!(
                "the regular expression is not valid: {}",
                reason(&error.to_string())
            )
        })
    };
    match parse(false) {
        Ok(()) => Ok(false),
        Err(_) if parse(true).is_ok() => Ok(true),
        Err(problem) => Err(problem),
    }
}

fn config(unicode: bool) -> syntax::Config {
    // The anchors and the group around a pattern add two levels of nesting.
    syntax::Config::new()
        .unicode(unicode)
        .utf8(false)
        .nest_limit(REGEX_NESTING_MAX + 2)
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
            ("/\\p{L}+", "/\u{e9}a", true),
            ("/\\p{L}+", "/1", false),
            ("/\\pL", "/a", true),
        ] {
            assert_eq!(
                compile(pattern).unwrap().is_match(text),
                expected,
                "{pattern:?} {text:?}"
            );
        }
    }

    #[test]
    fn quoted_texts_are_literals_as_in_re2() {
        for (pattern, plain, text) in [
            ("a.b", "a.b", "axb"),
            (r"\Qa.b\E.", r"a\.b.", "a.bx"),
            (r"/\Qa\E+", "/a+", "/aa"),
            (r"(?i)\Q(v1)\E|x", r"(?i)\(v1\)|x", "(V1)"),
            (r"\Qa\", r"a\\", r"a\"),
            (r"\Q\\E", r"\\", r"\"),
            (r"\\Q.", r"\\Q.", r"\Qx"),
            (r"[\]]\Q]\E", r"[\]]\]", "]]"),
            (r"[]a]\Q.\E", r"[]a]\.", "]."),
            (r"[^][:alpha:]]\Q<é\E", r"[^][:alpha:]]<é", "1<é"),
        ] {
            assert_eq!(without_quotes(pattern), plain, "{pattern:?}");
            assert!(compile(plain).unwrap().is_match(text), "{pattern:?}");
            assert_eq!(without_quotes(plain), plain, "{pattern:?} is done");
        }
        for refused in [r"[\Qa]", r"a\E", r"[a\Q]\E]"] {
            let problem = cost(&without_quotes(refused)).unwrap_err();
            assert!(problem.contains("unrecognized escape"), "{problem}");
        }
    }

    #[test]
    fn patterns_beyond_the_bounds_are_refused() {
        let long = "a".repeat(REGEX_BYTES_MAX + 1);
        for pattern in [
            "(",
            "a)|(b",
            "(?=a)",
            "\\1",
            "(a{500}){500}",
            long.as_str(),
            "(?x)a#",
        ] {
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
