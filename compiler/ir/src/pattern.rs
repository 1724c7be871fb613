//! Regular expressions as everywhere in Canal: RE2 syntax over bytes; the whole text must match.
//! Classes such as `\w` and `[^x]` are of ASCII or bytes, as in RE2. Only a pattern that names
//! Unicode's properties (`\p{L}`) is read with Unicode, as a whole, as the router reads it.

use std::borrow::Cow;

use regex_automata::meta::{self, Regex};
use regex_automata::nfa::thompson::{self, NFA, WhichCaptures};
use regex_automata::util::primitives::PatternID;
use regex_automata::util::syntax;

use canal_model::limits::{
    SUBSTITUTED_PATH_BYTES_MAX, SUBSTITUTION_GROUPS_MAX, SUBSTITUTIONS_PER_PATH_MAX,
};
use canal_model::route_filters::RegexSubstitution;

use crate::limits::{
    REGEX_AUTOMATON_BYTES_MAX, REGEX_BYTES_MAX, REGEX_NESTING_MAX, TEXT_BYTES_MAX,
};

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
    let unicode = is_unicode_needed(pattern)?;
    let automaton = automaton(&anchor(pattern), unicode, WhichCaptures::None)?;
    Ok(PatternCost {
        bytes: automaton.memory_usage(),
        unicode,
    })
}

fn automaton(pattern: &str, unicode: bool, captures: WhichCaptures) -> Result<NFA, String> {
    let limits = thompson::Config::new()
        .utf8(false)
        .which_captures(captures)
        .nfa_size_limit(Some(REGEX_AUTOMATON_BYTES_MAX));
    let mut compiler = thompson::Compiler::new();
    let compiler = compiler.syntax(config(unicode)).configure(limits);
    compiler.build(pattern).map_err(|_| too_large())
}

fn too_large() -> String {
    format!("the regular expression needs more than {REGEX_AUTOMATON_BYTES_MAX} bytes of memory")
}

/// Returns the bytes of memory that the expression of a substitution needs. A search keeps the
/// places of all groups, so that they multiply it.
///
/// # Errors
/// Fails with the problem as a sentence without a full stop, if the expression is invalid, exceeds a
/// limit or lacks a group that the substitution names.
pub fn substitution_cost(written: &RegexSubstitution) -> Result<usize, String> {
    let unicode = is_unicode_needed(&written.pattern)?;
    let automaton = automaton(&written.pattern, unicode, WhichCaptures::All)?;
    // Group 0 is the whole match.
    let groups = automaton.group_info().group_len(PatternID::ZERO) - 1;
    if groups > SUBSTITUTION_GROUPS_MAX {
        return Err(format!(
            "the regular expression has {groups} groups, more than {SUBSTITUTION_GROUPS_MAX}; (?:...) makes none"
        ));
    }
    // `?` and `#` would end the path inside the substitution.
    let is_of_path = |byte: u8| byte > b' ' && byte < 0x7f && !b"?#".contains(&byte);
    if !written.substitution.bytes().all(is_of_path) {
        return Err("the substitution has characters that are in no path".to_owned());
    }
    if written.substitution.len() > TEXT_BYTES_MAX {
        return Err(format!(
            "the substitution has more than {TEXT_BYTES_MAX} bytes"
        ));
    }
    let mut rest = written.substitution.chars();
    while let Some(next) = rest.next() {
        if next != '\\' {
            continue;
        }
        // As in RE2, two backslashes write one, and a backslash with a digit writes a group.
        match rest.next() {
            Some('\\') => {}
            Some(digit @ '0'..='9') if digit as usize - '0' as usize <= groups => {}
            Some(digit @ '0'..='9') => {
                return Err(format!(
                    "the substitution names group {digit}, and the regular expression has {groups}"
                ));
            }
            _ => {
                return Err(
                    "a backslash of the substitution has neither a digit nor a backslash behind it"
                        .to_owned(),
                );
            }
        }
    }
    let bytes = automaton.memory_usage() * (1 + groups);
    if bytes > REGEX_AUTOMATON_BYTES_MAX {
        return Err(too_large());
    }
    Ok(bytes)
}

/// Replaces all matches in a path, as RE2's GlobalReplace does; `None` if the path exceeds a limit,
/// before or after. It is slow and simple, and shares no code with data planes.
pub fn substitute(written: &RegexSubstitution, path: &str) -> Option<String> {
    let unicode = is_unicode_needed(&written.pattern).ok()?;
    let mut builder = meta::Builder::new();
    let builder = builder
        .syntax(config(unicode))
        .configure(Regex::config().utf8_empty(false));
    let regex = builder.build(&written.pattern).ok()?;
    let mut made = Vec::new();
    let mut end = 0;
    let mut count = 0;
    // The iterator leaves out empty matches directly behind a match, as RE2 does.
    for found in regex.captures_iter(path) {
        let whole = found.get_match()?;
        made.extend_from_slice(&path.as_bytes()[end..whole.start()]);
        end = whole.end();
        let mut rest = written.substitution.bytes();
        while let Some(byte) = rest.next() {
            match (byte, (byte == b'\\').then(|| rest.next()).flatten()) {
                (_, Some(digit @ b'0'..=b'9')) => {
                    let span = found.get_group(usize::from(digit - b'0'));
                    made.extend(span.map_or(&[][..], |span| &path.as_bytes()[span.range()]));
                }
                (byte, _) => made.push(byte),
            }
        }
        count += 1;
    }
    made.extend_from_slice(&path.as_bytes()[end..]);
    let is_within = count <= SUBSTITUTIONS_PER_PATH_MAX
        && path.len().max(made.len()) <= SUBSTITUTED_PATH_BYTES_MAX;
    String::from_utf8(made).ok().filter(|_| is_within)
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
/// which is the common reading. It reads the bare pattern, so that `a)|(b` does not become valid by
/// a group that is put around it.
fn is_unicode_needed(pattern: &str) -> Result<bool, String> {
    if pattern.len() > REGEX_BYTES_MAX {
        return Err(format!(
            "the regular expression has {} bytes, more than {REGEX_BYTES_MAX}",
            pattern.len()
        ));
    }
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
    fn substitutions_name_groups_that_exist() {
        let of = |pattern: &str, substitution: &str| RegexSubstitution {
            pattern: pattern.to_owned(),
            substitution: substitution.to_owned(),
        };
        for (pattern, substitution, path, want) in [
            ("^/v([0-9]+)/(.*)$", r"/\2/v\1\\", "/v1/a", "/a/v1\\"),
            // As in RE2, an empty match is replaced too, but not right behind another match.
            ("b*", "bb", "/ccb", "bb/bbcbbcbb"),
            // A group that did not match is an empty text.
            ("(x)|b", r"<\1\0>", "/abb", "/a<b><b>"),
            ("x", "y", "/a", "/a"),
        ] {
            let written = of(pattern, substitution);
            assert!(substitution_cost(&written).is_ok(), "{pattern}");
            assert_eq!(
                substitute(&written, path).as_deref(),
                Some(want),
                "{pattern}"
            );
        }
        let groups = "(a)".repeat(SUBSTITUTION_GROUPS_MAX);
        assert!(substitution_cost(&of(&groups, "")).is_ok());
        // The automaton fits into the limit with one group, and not with the nine groups below.
        let large = "(abc[d-z]){600}";
        assert!(substitution_cost(&of(large, "")).is_ok());
        for (pattern, substitution, problem) in [
            ("(", "", "not valid"),
            // It would be valid only inside parentheses.
            ("a)|(b", "", "not valid"),
            (
                "(a)",
                r"\2",
                "names group 2, and the regular expression has 1",
            ),
            ("a", r"\", "backslash"),
            ("a", r"\n", "backslash"),
            ("a", "/b?c", "characters"),
            ("a", "/ b", "characters"),
            ("a", &"b".repeat(TEXT_BYTES_MAX + 1), "more than"),
            (&format!("{groups}(a)"), "", "has 10 groups"),
            (&format!("()()()()()()()(){large}"), "", "bytes of memory"),
            (&"a".repeat(REGEX_BYTES_MAX + 1), "", "more than"),
        ] {
            let refused = substitution_cost(&of(pattern, substitution)).unwrap_err();
            assert!(refused.contains(problem), "{pattern}: {refused}");
        }
        // Each slash is one match of the substitution below.
        let long = "/".repeat(SUBSTITUTED_PATH_BYTES_MAX + 1);
        assert_eq!(substitute(&of("a", "b"), &long), None);
        assert_eq!(
            substitute(&of("/", "a"), &long[..SUBSTITUTIONS_PER_PATH_MAX + 1]),
            None
        );
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
