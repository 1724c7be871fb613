//! Regexes within size limits: one automaton for all path patterns of a host, one for each text condition. All match whole texts.

use regex_automata::meta::{self, Regex};
use regex_automata::nfa::thompson::{self, WhichCaptures};
use regex_automata::util::syntax;
use regex_automata::{Input, MatchKind, PatternSet};

use crate::fault::FaultKind;
use crate::limits::Limits;

/// Counts what the automata of a service cost, and compiles them.
pub(crate) struct Budget<'l> {
    limits: &'l Limits,
    used_bytes: usize,
}

/// A pattern that was checked by itself: within limits and valid.
#[derive(Clone)]
pub(crate) struct Checked {
    whole: String,
    unicode: bool,
}

impl<'l> Budget<'l> {
    pub(crate) fn new(limits: &'l Limits) -> Self {
        Budget { limits, used_bytes: 0 }
    }

    /// Checks one pattern and takes its cost from the service's budget. `field` tells an operator where it stands.
    pub(crate) fn check(&mut self, field: &str, pattern: &str) -> Result<Checked, FaultKind> {
        let (limits, field) = (self.limits, field.to_owned());
        if pattern.len() > limits.regex_text_bytes_max {
            return Err(FaultKind::RegexTooLong { field, bytes: pattern.len(), max: limits.regex_text_bytes_max });
        }
        let syntax_fault = |reason| FaultKind::RegexSyntax { field: field.clone(), pattern: pattern.to_owned(), reason };
        // The pattern must stand by itself: `a)|(b` must not get out of the anchors.
        let unicode = is_unicode_needed(pattern).map_err(syntax_fault)?;
        let whole = format!(r"\A(?:{pattern})\z");
        let hir = syntax::parse_with(&whole, &syntax_of(unicode)).map_err(|error| syntax_fault(reason_of(&error)))?;
        let config = thompson::Config::new().which_captures(WhichCaptures::None).utf8(false).nfa_size_limit(Some(limits.regex_bytes_max));
        let Ok(nfa) = thompson::Compiler::new().configure(config).build_from_hir(&hir) else {
            return Err(FaultKind::RegexTooLarge { field, pattern: pattern.to_owned(), max: limits.regex_bytes_max });
        };
        if self.used_bytes + nfa.memory_usage() > limits.regexes_bytes_max {
            return Err(self.overflow(&field, pattern));
        }
        self.used_bytes += nfa.memory_usage();
        Ok(Checked { whole, unicode })
    }

    /// The service's automata are too large together.
    pub(crate) fn overflow(&self, field: &str, pattern: &str) -> FaultKind {
        FaultKind::RegexesTooLarge { field: field.to_owned(), pattern: pattern.to_owned(), max: self.limits.regexes_bytes_max }
    }

    /// One automaton of checked patterns; their order is their number. `None` only if the parts fit and the whole does not.
    pub(crate) fn compile<'p>(&self, patterns: impl Iterator<Item = &'p Checked>) -> Option<Regex> {
        let parse = |pattern: &Checked| syntax::parse_with(&pattern.whole, &syntax_of(pattern.unicode)).ok();
        let hirs: Vec<_> = patterns.map(parse).collect::<Option<_>>()?;
        let config = meta::Config::new()
            .match_kind(MatchKind::All)
            .utf8_empty(false)
            .which_captures(WhichCaptures::None)
            // The parts were measured with the same limits; joining them costs a little more.
            .nfa_size_limit(Some(self.limits.regexes_bytes_max * 2))
            .hybrid_cache_capacity(self.limits.regex_cache_bytes_max);
        Regex::builder().configure(config).build_many_from_hir(&hirs).ok()
    }
}

/// RE2 reads `\w`, `\d`, `\s` and `\b` as ASCII, and small automata come of it; only patterns that are not valid so get Unicode.
fn syntax_of(unicode: bool) -> syntax::Config {
    syntax::Config::new().unicode(unicode).utf8(false).nest_limit(100)
}

fn is_unicode_needed(pattern: &str) -> Result<bool, String> {
    match syntax::parse_with(pattern, &syntax_of(false)) {
        Ok(_) => Ok(false),
        Err(_) => syntax::parse_with(pattern, &syntax_of(true)).map(|_| true).map_err(|error| reason_of(&error)),
    }
}

/// The parser draws the place on several lines; the last one is the reason.
fn reason_of(error: &impl std::fmt::Display) -> String {
    error.to_string().lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

/// True if the whole text matches.
pub(crate) fn is_match(regex: &Regex, text: &[u8]) -> bool {
    regex.is_match(Input::new(text).anchored(regex_automata::Anchored::Yes))
}

/// The numbers of all patterns that match the whole text, ascending.
pub(crate) fn matching(regex: &Regex, text: &[u8]) -> PatternSet {
    let mut set = PatternSet::new(regex.pattern_len());
    regex.which_overlapping_matches(&Input::new(text).anchored(regex_automata::Anchored::Yes), &mut set);
    set
}
