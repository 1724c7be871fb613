//! Regexes within size limits: one automaton for all path patterns of a host, and one for each
//! condition on a text. A regex always matches the whole text. Start with [`AutomatonBudget`].

use std::cell::Cell;

use regex_automata::meta::{self, Regex};
use regex_automata::nfa::thompson::{self, WhichCaptures};
use regex_automata::util::syntax;
use regex_automata::{Input, MatchKind, PatternSet};

use crate::broken_match::BrokenMatchKind;
use crate::limits::{REGEX_WORK_MAX, RouterLimits};

/// Counts the memory of a service's automata against its limit, and compiles them.
pub(crate) struct AutomatonBudget<'l> {
    limits: &'l RouterLimits,
    used_bytes: usize,
    /// Bytes of the patterns in all joined automata; a pattern counts once for each automaton that
    /// contains it.
    joined_bytes: usize,
    /// Patterns that were compiled and refused for their size.
    refused: usize,
}

/// Pattern that is valid and within the limits on its own.
#[derive(Clone)]
pub(crate) struct ValidatedPattern {
    anchored: String,
    unicode: bool,
    /// Memory of the automaton.
    bytes: usize,
}

impl<'l> AutomatonBudget<'l> {
    pub(crate) fn new(limits: &'l RouterLimits) -> Self {
        AutomatonBudget {
            limits,
            used_bytes: 0,
            joined_bytes: 0,
            refused: 0,
        }
    }

    /// Checks one pattern and charges its memory to the service's budget. `field` names the
    /// pattern's field for operators.
    pub(crate) fn check(
        &mut self,
        field: &str,
        pattern: &str,
    ) -> Result<ValidatedPattern, BrokenMatchKind> {
        let (limits, field) = (self.limits, field.to_owned());
        // Only refusals by size are counted below: they compile an automaton. This one and a syntax
        // fault end before that.
        if pattern.len() > limits.regex_text_bytes_max {
            return Err(BrokenMatchKind::RegexTooLong {
                field,
                bytes: pattern.len(),
                max: limits.regex_text_bytes_max,
            });
        }
        // Refusing a pattern costs as much time as accepting it, so the refusals of a service are
        // limited as well.
        if self.refused >= limits.regex_refusals_max {
            return Err(self.overflow(&field, pattern));
        }
        let syntax_fault = |reason| BrokenMatchKind::RegexSyntax {
            field: field.clone(),
            pattern: pattern.to_owned(),
            reason,
        };
        // The pattern must be valid on its own: `a)|(b` must not escape from the anchors.
        let unicode = is_unicode_needed(pattern).map_err(syntax_fault)?;
        let anchored = format!(r"\A(?:{pattern})\z");
        let hir = syntax::parse_with(&anchored, &syntax_of(unicode))
            .map_err(|error| syntax_fault(reason_of(&error)))?;
        // A match is all that routing needs, and paths and header values need not be UTF-8.
        let config = thompson::Config::new()
            .which_captures(WhichCaptures::None)
            .utf8(false)
            .nfa_size_limit(Some(limits.regex_bytes_max));
        let Ok(nfa) = thompson::Compiler::new()
            .configure(config)
            .build_from_hir(&hir)
        else {
            self.refused += 1;
            return Err(BrokenMatchKind::RegexTooLarge {
                field,
                pattern: pattern.to_owned(),
                max: limits.regex_bytes_max,
            });
        };
        if self.used_bytes + nfa.memory_usage() > limits.regexes_bytes_max {
            self.refused += 1;
            return Err(self.overflow(&field, pattern));
        }
        self.used_bytes += nfa.memory_usage();
        Ok(ValidatedPattern {
            anchored,
            unicode,
            bytes: nfa.memory_usage(),
        })
    }

    /// Returns the fault of a pattern with which the service's automata together exceed their
    /// limit.
    pub(crate) fn overflow(&self, field: &str, pattern: &str) -> BrokenMatchKind {
        BrokenMatchKind::RegexesTooLarge {
            field: field.to_owned(),
            pattern: pattern.to_owned(),
            max: self.limits.regexes_bytes_max,
        }
    }

    /// Compiles one automaton from checked patterns, numbered in their order. Returns `None` only
    /// if each pattern is within the limits and the whole is not, or if the patterns are in too
    /// many automata.
    pub(crate) fn compile<'p>(
        &mut self,
        patterns: impl Iterator<Item = &'p ValidatedPattern> + Clone,
    ) -> Option<Automaton> {
        let bytes: usize = patterns.clone().map(|pattern| pattern.bytes).sum();
        if self.joined_bytes + bytes > self.limits.joined_regexes_bytes_max {
            return None;
        }
        self.joined_bytes += bytes;
        let parse = |pattern: &ValidatedPattern| {
            syntax::parse_with(&pattern.anchored, &syntax_of(pattern.unicode)).ok()
        };
        let hirs: Vec<_> = patterns.map(parse).collect::<Option<_>>()?;
        let config = meta::Config::new()
            .match_kind(MatchKind::All)
            .utf8_empty(false)
            .which_captures(WhichCaptures::None)
            // The patterns were measured against the same limit one by one; the joined automaton is
            // a little larger.
            .nfa_size_limit(Some(self.limits.regexes_bytes_max * 2))
            // Each worker has a cache for each automaton that it runs. The compiler charges tenants
            // for it (`compiler/ir/src/route_weight.rs`).
            .hybrid_cache_capacity(
                self.limits.regex_cache_bytes + self.limits.regex_cache_factor * bytes,
            );
        let regex = Regex::builder()
            .configure(config)
            .build_many_from_hir(&hirs);
        regex.ok().map(|regex| Automaton { regex, bytes })
    }
}

/// Patterns that were compiled together.
#[derive(Debug)]
pub(crate) struct Automaton {
    regex: Regex,
    /// Memory of the automaton without its caches.
    bytes: usize,
}

/// Work that the regexes may still do for one request.
#[derive(Debug)]
pub(crate) struct RegexWork {
    /// `None` once a regex needed more than was left.
    left: Cell<Option<u64>>,
}

impl RegexWork {
    pub(crate) fn new() -> Self {
        Self {
            left: Cell::new(Some(REGEX_WORK_MAX)),
        }
    }

    /// True if a regex was not run, because it could have taken too long.
    pub(crate) fn is_exceeded(&self) -> bool {
        self.left.get().is_none()
    }

    fn take(&self, automaton: &Automaton, text: &[u8]) -> bool {
        let work = (automaton.bytes as u64).saturating_mul(text.len() as u64);
        let left = self.left.get().and_then(|left| left.checked_sub(work));
        self.left.set(left);
        left.is_some()
    }
}

impl Automaton {
    pub(crate) fn memory_usage(&self) -> usize {
        self.regex.memory_usage()
    }

    /// Returns true if the whole text matches, and false if that could take too long.
    pub(crate) fn is_match(&self, text: &[u8], work: &RegexWork) -> bool {
        let input = Input::new(text).anchored(regex_automata::Anchored::Yes);
        work.take(self, text) && self.regex.is_match(input)
    }

    /// Returns the numbers of all patterns that match the whole text, in ascending order; none if
    /// that could take too long.
    pub(crate) fn matching(&self, text: &[u8], work: &RegexWork) -> PatternSet {
        let mut set = PatternSet::new(self.regex.pattern_len());
        if work.take(self, text) {
            let input = Input::new(text).anchored(regex_automata::Anchored::Yes);
            self.regex.which_overlapping_matches(&input, &mut set);
        }
        set
    }
}

/// Returns the syntax of a pattern. RE2 reads `\w`, `\d`, `\s` and `\b` as ASCII, which gives small
/// automata. Only patterns that are not valid in that way use Unicode.
pub(crate) fn syntax_of(unicode: bool) -> syntax::Config {
    syntax::Config::new()
        .unicode(unicode)
        .utf8(false)
        .nest_limit(100)
}

pub(crate) fn is_unicode_needed(pattern: &str) -> Result<bool, String> {
    match syntax::parse_with(pattern, &syntax_of(false)) {
        Ok(_) => Ok(false),
        Err(_) => syntax::parse_with(pattern, &syntax_of(true))
            .map(|_| true)
            .map_err(|error| reason_of(&error)),
    }
}

/// Extracts the reason from the parser's message, which marks the position on several lines and
/// gives the reason on the last one.
fn reason_of(error: &impl std::fmt::Display) -> String {
    error
        .to_string()
        .lines()
        .last()
        .unwrap_or_default()
        .trim_start_matches("error: ")
        .to_owned()
}
