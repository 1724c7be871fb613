//! Regular expressions that rewrite paths, with the limits of those that match paths. All matches in
//! a path are replaced, as by RE2's GlobalReplace. Start with [`PathSubstitution::compile`].

use canal_model::limits::{
    SUBSTITUTED_PATH_BYTES_MAX, SUBSTITUTION_GROUPS_MAX, SUBSTITUTIONS_PER_PATH_MAX,
};
use canal_model::route_filters::RegexSubstitution;
use regex_automata::Input;
use regex_automata::meta::{self, Regex};
use regex_automata::nfa::thompson::{self, WhichCaptures};
use regex_automata::util::captures::Captures;
use regex_automata::util::primitives::PatternID;
use regex_automata::util::syntax;

use crate::limits::RouterLimits;
use crate::regexes::{is_unicode_needed, syntax_of};

/// Maximum work on one path: the bytes of the automaton times those of the path that its searches
/// may read. A search whose states do not fit into its cache follows all of them for each byte. The
/// whole took some 20 ms (a core of a cloud machine, 2026), in which the worker serves nobody else.
const SUBSTITUTION_WORK_MAX: u64 = 64 << 20;

/// Reason why a path is not rewritten. The gateway refuses its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SubstitutionRefusal {
    /// The path is too long, before or after.
    Length,
    /// The path has too many matches.
    Matches,
    /// Finding the matches could take too long.
    Work,
    /// The rewritten path is not UTF-8.
    Encoding,
}

impl SubstitutionRefusal {
    /// Returns the name of the reason as logs show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Length => "rewritten_path_length",
            Self::Matches => "rewritten_path_matches",
            Self::Work => "rewritten_path_work",
            Self::Encoding => "rewritten_path_encoding",
        }
    }
}

/// A compiled regular expression, and what takes the place of its matches.
#[derive(Debug)]
pub struct PathSubstitution {
    written: RegexSubstitution,
    regex: Regex,
    /// Work of one byte that a search reads.
    work: u64,
    parts: Box<[SubstitutionPart]>,
}

/// Part of the text that takes the place of a match.
#[derive(Debug, PartialEq, Eq)]
enum SubstitutionPart {
    Text(String),
    Group(usize),
}

impl PathSubstitution {
    /// Compiles an expression. Returns `None` if it is not valid or beyond the limits; the compiler
    /// has refused such a rule.
    pub fn compile(written: &RegexSubstitution, limits: &RouterLimits) -> Option<Self> {
        let pattern = &written.pattern;
        if pattern.len() > limits.regex_text_bytes_max {
            return None;
        }
        let syntax = syntax_of(is_unicode_needed(pattern).ok()?);
        let hir = syntax::parse_with(pattern, &syntax).ok()?;
        let config = thompson::Config::new()
            .which_captures(WhichCaptures::All)
            .utf8(false)
            .nfa_size_limit(Some(limits.regex_bytes_max));
        let nfa = thompson::Compiler::new()
            .configure(config)
            .build_from_hir(&hir)
            .ok()?;
        // A search keeps the places of all groups for each state.
        let groups = nfa.group_info().group_len(PatternID::ZERO);
        let bytes = nfa.memory_usage() * groups;
        if groups > 1 + SUBSTITUTION_GROUPS_MAX || bytes > limits.regex_bytes_max {
            return None;
        }
        let parts = parts(&written.substitution, groups)?;
        let config = meta::Config::new()
            .utf8_empty(false)
            .backtrack(false)
            .onepass_size_limit(Some(limits.regex_bytes_max))
            .nfa_size_limit(Some(limits.regexes_bytes_max))
            .hybrid_cache_capacity(limits.regex_cache_bytes + limits.regex_cache_factor * bytes);
        let regex = Regex::builder()
            .configure(config)
            .build_from_hir(&hir)
            .ok()?;
        Some(Self {
            written: written.clone(),
            regex,
            work: bytes as u64,
            parts,
        })
    }

    /// Returns the expression from which this was compiled.
    pub fn written(&self) -> &RegexSubstitution {
        &self.written
    }

    /// Returns the memory of the automaton.
    pub fn memory_bytes(&self) -> usize {
        self.regex.memory_usage()
    }

    /// Replaces all matches in a path.
    ///
    /// # Errors
    /// The path exceeds a limit, or is no text any more.
    pub fn replace(&self, path: &str) -> Result<String, SubstitutionRefusal> {
        if path.len() > SUBSTITUTED_PATH_BYTES_MAX {
            return Err(SubstitutionRefusal::Length);
        }
        let mut found = self.regex.create_captures();
        let mut made = Vec::with_capacity(path.len());
        let (mut at, mut last_end, mut count) = (0, None, 0);
        let mut work_left = SUBSTITUTION_WORK_MAX;
        while at <= path.len() {
            // A search may read the whole rest, and find a match at its beginning all the same.
            let work = self.work * (path.len() - at) as u64;
            work_left = work_left
                .checked_sub(work)
                .ok_or(SubstitutionRefusal::Work)?;
            let input = Input::new(path).span(at..path.len());
            self.regex.search_captures(&input, &mut found);
            let Some(whole) = found.get_match() else {
                break;
            };
            made.extend_from_slice(&path.as_bytes()[at..whole.start()]);
            at = whole.end();
            // RE2: nothing directly behind a match is no match. The search goes on one character later.
            if whole.is_empty() && last_end == Some(at) {
                let next = path.get(at..).and_then(|rest| rest.chars().next());
                let length = next.map_or(1, char::len_utf8);
                made.extend_from_slice(path.as_bytes().get(at..at + length).unwrap_or_default());
                at += length;
                continue;
            }
            count += 1;
            if count > SUBSTITUTIONS_PER_PATH_MAX {
                return Err(SubstitutionRefusal::Matches);
            }
            self.append(&mut made, path, &found);
            if made.len() > SUBSTITUTED_PATH_BYTES_MAX {
                return Err(SubstitutionRefusal::Length);
            }
            last_end = Some(at);
        }
        made.extend_from_slice(path.as_bytes().get(at..).unwrap_or_default());
        if made.len() > SUBSTITUTED_PATH_BYTES_MAX {
            return Err(SubstitutionRefusal::Length);
        }
        String::from_utf8(made).map_err(|_| SubstitutionRefusal::Encoding)
    }

    fn append(&self, made: &mut Vec<u8>, path: &str, found: &Captures) {
        for part in &self.parts {
            match part {
                SubstitutionPart::Text(text) => made.extend_from_slice(text.as_bytes()),
                SubstitutionPart::Group(group) => {
                    // A group that took no part in the match is empty.
                    let span = found.get_group(*group);
                    made.extend_from_slice(span.map_or(&[], |span| &path.as_bytes()[span.range()]));
                }
            }
        }
    }
}

/// Reads the text that takes the place of a match. Returns `None` if it names a group that the
/// expression does not have.
fn parts(substitution: &str, groups: usize) -> Option<Box<[SubstitutionPart]>> {
    let mut parts = Vec::new();
    let mut text = String::new();
    let mut rest = substitution.chars();
    while let Some(next) = rest.next() {
        if next != '\\' {
            text.push(next);
            continue;
        }
        match rest.next()? {
            '\\' => text.push('\\'),
            digit => {
                let group = digit.to_digit(10)? as usize;
                if group >= groups {
                    return None;
                }
                parts.push(SubstitutionPart::Text(std::mem::take(&mut text)));
                parts.push(SubstitutionPart::Group(group));
            }
        }
    }
    parts.push(SubstitutionPart::Text(text));
    parts.retain(|part| *part != SubstitutionPart::Text(String::new()));
    Some(parts.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compile(pattern: &str, substitution: &str) -> Option<PathSubstitution> {
        let written = RegexSubstitution {
            pattern: pattern.to_owned(),
            substitution: substitution.to_owned(),
        };
        PathSubstitution::compile(&written, &RouterLimits::DEFAULT)
    }

    #[test]
    fn all_matches_are_replaced_as_in_re2() {
        for (pattern, substitution, path, want) in [
            // Envoy's examples of RegexMatchAndSubstitute in `regex_rewrite`.
            (
                "^/service/([^/]+)(/.*)$",
                r"\2/instance/\1",
                "/service/foo/v1/api",
                "/v1/api/instance/foo",
            ),
            ("one", "two", "/xxx/one/yyy/one/zzz", "/xxx/two/yyy/two/zzz"),
            (
                "^(.*?)one(.*)$",
                r"\1two\2",
                "/xxx/one/yyy/one/zzz",
                "/xxx/two/yyy/one/zzz",
            ),
            ("(?i)/xxx/", "/yyy/", "/aaa/XxX/bbb", "/aaa/yyy/bbb"),
            // RE2's tests of GlobalReplace.
            ("b*", "bb", "ccccc", "bbcbbcbbcbbcbbcbb"),
            ("b*", "bb", "bbbbbb", "bb"),
            ("b*", "bb", "bbbbbbc", "bbcbb"),
            ("b+", "bb", "bbbbbbc", "bbc"),
            ("^a", "b", "aaa", "baa"),
            ("a.*a", r"(\0)", "aba\nabaaba", "(aba)\n(abaaba)"),
            ("", "-", "ab", "-a-b-"),
            ("(a)|(b)", r"<\1,\2>", "ab", "<a,><,b>"),
            ("a", r"\\", "a", r"\"),
            ("none", "x", "/a", "/a"),
        ] {
            let compiled = compile(pattern, substitution).unwrap();
            assert_eq!(
                compiled.replace(path).as_deref(),
                Ok(want),
                "{pattern} {path}"
            );
        }
    }

    #[test]
    fn what_is_not_valid_or_too_large_is_not_compiled() {
        let groups = "(a)".repeat(SUBSTITUTION_GROUPS_MAX);
        let compiled = compile(&groups, r"\9").unwrap();
        assert!(compiled.memory_bytes() > 0);
        for (pattern, substitution) in [
            ("(", "a"),
            ("a)|(b", "a"),
            ("(a)", r"\2"),
            ("a", r"\"),
            ("a", r"\x"),
            ("(a{500}){500}", "a"),
            (&format!("{groups}(a)"), "a"),
            (
                &"a".repeat(RouterLimits::DEFAULT.regex_text_bytes_max + 1),
                "a",
            ),
        ] {
            assert!(
                compile(pattern, substitution).is_none(),
                "{pattern} {substitution}"
            );
        }
        let repeated = |groups: &str| format!("{groups}(?:abc[d-z]){{600}}");
        assert!(compile(&repeated(""), "a").is_some());
        assert!(
            compile(&repeated("()()()()()()()()"), "a").is_none(),
            "groups multiply the memory"
        );
    }

    #[test]
    fn a_path_beyond_the_limits_is_refused() {
        let each = compile("a", "bb").unwrap();
        let half = "a".repeat(SUBSTITUTIONS_PER_PATH_MAX);
        assert!(each.replace(&half).is_ok());
        assert_eq!(
            each.replace(&format!("{half}a")),
            Err(SubstitutionRefusal::Matches)
        );
        let long = "x".repeat(SUBSTITUTED_PATH_BYTES_MAX);
        assert!(each.replace(&long).is_ok());
        assert_eq!(
            each.replace(&format!("{long}x")),
            Err(SubstitutionRefusal::Length)
        );
        let last = format!("{}a", &long[1..]);
        assert_eq!(each.replace(&last), Err(SubstitutionRefusal::Length));
        let first = format!("a{}", &long[1..]);
        assert_eq!(each.replace(&first), Err(SubstitutionRefusal::Length));
        // Each search looks for a `c` up to the end, and its states do not fit into its cache.
        let slow = compile("a(?:[ab]*a[ab]{600}c)?", "").unwrap();
        let path = |times: usize| "abbaab".repeat(times);
        assert_eq!(
            slow.replace(&path(6)).as_deref(),
            Ok("bb".repeat(9).as_str())
        );
        assert_eq!(slow.replace(&path(600)), Err(SubstitutionRefusal::Work));
        let byte = compile("^/.", "/").unwrap();
        assert_eq!(byte.replace("/\u{e9}"), Err(SubstitutionRefusal::Encoding));
        assert_eq!(
            SubstitutionRefusal::Matches.name(),
            "rewritten_path_matches"
        );
    }
}
