//! How a root is replaced without a request lost: the new one is told before it signs, and the old one is told until nothing that it signed
//! is in use. Pure: who knows what, and the time, are arguments.

/// Where a replacement stands. It is kept on disk; each step is one write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Phase {
    /// One root.
    #[default]
    Steady,
    /// The old root signs, both are told.
    Announced,
    /// The new root signs, both are told.
    Switched,
}

impl Phase {
    /// As it is written down.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Steady => "steady",
            Self::Announced => "announced",
            Self::Switched => "switched",
        }
    }

    /// Reads what [`Phase::as_str`] wrote.
    pub fn read(text: &str) -> Option<Self> {
        [Self::Steady, Self::Announced, Self::Switched].into_iter().find(|p| p.as_str() == text)
    }
}

/// How patient a replacement is, seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// Between the last acknowledgement of the new root and its first signature: what is acknowledged must have reached every worker.
    pub settle: u64,
    /// Between the end of the old root's last leaf in use and the old root's: handshakes begun with it must have ended.
    pub grace: u64,
    /// After so long in one phase an operator is told that something is in the way.
    pub overdue: u64,
}

impl Default for Patience {
    fn default() -> Self {
        Self { settle: 5, grace: 60, overdue: 600 }
    }
}

/// What is known of the domain at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sight {
    pub phase: Phase,
    /// Seconds since 1970 at which the phase began.
    pub since: u64,
    /// Since when nothing has been in the way, as far as this process saw; `None` while something is.
    pub clear_since: Option<u64>,
    pub now: u64,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Stay,
    /// Sign with the new root from now on.
    Switch,
    /// Drop the old root.
    Retire,
}

/// The next step. In [`Phase::Announced`] a data plane that did not acknowledge the new root is in the way, in [`Phase::Switched`] a leaf of
/// the old root that has neither ended nor been replaced.
pub fn decide_step(sight: &Sight, patience: &Patience) -> Step {
    let waited = |long: u64| sight.clear_since.is_some_and(|at| sight.now.saturating_sub(at) >= long);
    match sight.phase {
        Phase::Announced if waited(patience.settle) => Step::Switch,
        Phase::Switched if waited(patience.grace) => Step::Retire,
        _ => Step::Stay,
    }
}

/// Whether an operator should look: the phase has lasted too long.
pub fn is_overdue(sight: &Sight, patience: &Patience) -> bool {
    sight.phase != Phase::Steady && sight.now.saturating_sub(sight.since) >= patience.overdue
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps() {
        let patience = Patience { settle: 5, grace: 60, overdue: 600 };
        for (what, phase, clear_since, now, want) in [
            ("nothing goes on", Phase::Steady, Some(0), 1000, Step::Stay),
            ("somebody does not know the new root", Phase::Announced, None, 1000, Step::Stay),
            ("all know it since now", Phase::Announced, Some(1000), 1000, Step::Stay),
            ("almost settled", Phase::Announced, Some(996), 1000, Step::Stay),
            ("settled", Phase::Announced, Some(995), 1000, Step::Switch),
            ("a leaf of the old root is in use", Phase::Switched, None, 1000, Step::Stay),
            ("the last one went a moment ago", Phase::Switched, Some(941), 1000, Step::Stay),
            ("the grace is over", Phase::Switched, Some(940), 1000, Step::Retire),
            ("a clock that went back waits", Phase::Switched, Some(2000), 1000, Step::Stay),
        ] {
            assert_eq!(decide_step(&Sight { phase, since: 0, clear_since, now }, &patience), want, "{what}");
        }
        let sight = |phase, now| Sight { phase, since: 100, clear_since: None, now };
        for (phase, now, want) in [(Phase::Steady, 9999, false), (Phase::Announced, 699, false), (Phase::Announced, 700, true)] {
            assert_eq!(is_overdue(&sight(phase, now), &patience), want);
        }
        for phase in [Phase::Steady, Phase::Announced, Phase::Switched] {
            assert_eq!(Phase::read(phase.as_str()), Some(phase));
        }
        assert_eq!(Phase::read("else"), None);
    }
}
