//! What can be wrong with a rule that the compiler let through. A fault breaks one match; the rest of the service works.

use canal_model::program::RouteKey;

/// One broken match: it catches nothing, and what its rule's other matches catch is refused with 500.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rule {rule}, match {place}: {kind}")]
pub struct Fault {
    pub rule: RouteKey,
    /// Which of the rule's matches, from 0.
    pub place: usize,
    pub kind: FaultKind,
}

impl Fault {
    /// The counter label.
    pub fn name(&self) -> &'static str {
        match self.kind {
            FaultKind::RegexSyntax { .. } => "regex_syntax",
            FaultKind::RegexTooLong { .. } => "regex_too_long",
            FaultKind::RegexTooLarge { .. } => "regex_too_large",
            FaultKind::RegexesTooLarge { .. } => "regexes_too_large",
            FaultKind::TooManyMatches { .. } => "too_many_matches",
        }
    }
}

/// What is wrong, and the mend.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FaultKind {
    #[error("regex {pattern:?} of the {field} is not valid: {reason}; write it in RE2 syntax")]
    RegexSyntax { field: String, pattern: String, reason: String },
    #[error("regex of the {field} has {bytes} bytes; use at most {max}")]
    RegexTooLong { field: String, bytes: usize, max: usize },
    #[error("regex {pattern:?} of the {field} needs an automaton of more than {max} bytes; use smaller repetitions or classes")]
    RegexTooLarge { field: String, pattern: String, max: usize },
    #[error("regex {pattern:?} of the {field} brings the service's automata over {max} bytes; use fewer or smaller regexes")]
    RegexesTooLarge { field: String, pattern: String, max: usize },
    #[error("the service has more than {max} matches; split it")]
    TooManyMatches { max: usize },
}
