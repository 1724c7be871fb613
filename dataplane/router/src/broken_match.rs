//! Faults of a rule that the compiler did not detect. A fault breaks one match; the rest of the
//! service works.

use canal_model::program::RouteKey;

/// One broken match. It matches no request, and requests that the rule's other matches match are
/// refused with 500.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rule {rule}, match {match_index}: {kind}")]
pub struct BrokenMatch {
    pub rule: RouteKey,
    /// Index of the match within its rule, from 0.
    pub match_index: usize,
    pub kind: BrokenMatchKind,
}

impl BrokenMatch {
    /// Returns the value of the counter label.
    pub fn name(&self) -> &'static str {
        match self.kind {
            BrokenMatchKind::RegexSyntax { .. } => "regex_syntax",
            BrokenMatchKind::RegexTooLong { .. } => "regex_too_long",
            BrokenMatchKind::RegexTooLarge { .. } => "regex_too_large",
            BrokenMatchKind::RegexesTooLarge { .. } => "regexes_too_large",
            BrokenMatchKind::TooManyMatches { .. } => "too_many_matches",
        }
    }
}

/// Fault of a match; its text ends with the fix.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BrokenMatchKind {
    #[error("regex {pattern:?} of the {field} is not valid: {reason}; fix: write it in RE2 syntax")]
    RegexSyntax {
        field: String,
        pattern: String,
        reason: String,
    },
    #[error("regex of the {field} has {bytes} bytes; fix: use at most {max}")]
    RegexTooLong {
        field: String,
        bytes: usize,
        max: usize,
    },
    #[error(
        "regex {pattern:?} of the {field} needs an automaton of more than {max} bytes; fix: use smaller repetitions or classes"
    )]
    RegexTooLarge {
        field: String,
        pattern: String,
        max: usize,
    },
    #[error(
        "regex {pattern:?} of the {field} makes the service's automata exceed {max} bytes; fix: use fewer or smaller regexes"
    )]
    RegexesTooLarge {
        field: String,
        pattern: String,
        max: usize,
    },
    #[error("the service has more than {max} matches; fix: split it")]
    TooManyMatches { max: usize },
}
