//! Decides the steps of a root rotation so that no request fails. The new root is published before
//! it signs. The old root stays published until no certificate that it signed is in use.
//!
//! The module is pure: the acknowledgments and the time are arguments.

/// Progress of a root rotation. It is stored on disk; each step is one write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RotationPhase {
    /// There is only one root.
    #[default]
    Steady,
    /// The old root signs; both roots are published.
    Announced,
    /// The new root signs; both roots are published.
    Switched,
}

impl RotationPhase {
    /// Returns the stored form of the phase.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Steady => "steady",
            Self::Announced => "announced",
            Self::Switched => "switched",
        }
    }

    /// Parses a text that [`RotationPhase::as_str`] returned; `None` for any other text.
    pub fn read(text: &str) -> Option<Self> {
        [Self::Steady, Self::Announced, Self::Switched]
            .into_iter()
            .find(|p| p.as_str() == text)
    }
}

/// Timeouts of a rotation, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RotationTimeouts {
    /// Time from the last acknowledgment of the new root to its first signature, so that every
    /// worker has applied the new root.
    pub settle: u64,
    /// Time from the end of the old root's last leaf in use to the end of the old root, so that
    /// handshakes in progress can finish.
    pub grace: u64,
    /// Time in one phase after which the rotation counts as overdue and is reported to the
    /// operator.
    pub overdue: u64,
}

impl Default for RotationTimeouts {
    fn default() -> Self {
        Self {
            // Workers apply an update far sooner. Nobody measured this value; the operator sets it by
            // `--ca-rotation-settle`.
            settle: 5,
            // A TLS handshake ends after 10 s at most. Nobody measured this value; the operator
            // sets it by `--ca-retire-grace`.
            grace: 60,
            // Ten times the grace. It only decides when the operator is warned.
            overdue: 600,
        }
    }
}

/// The state of a domain's rotation at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RotationState {
    pub phase: RotationPhase,
    /// Begin of the phase, in seconds since 1970.
    pub since: u64,
    /// Time since which nothing has blocked the next step, as far as this process has observed;
    /// `None` while something blocks it.
    pub clear_since: Option<u64>,
    pub now: u64,
}

/// The next step of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RotationStep {
    Stay,
    /// Sign with the new root from now on.
    Switch,
    /// Remove the old root from the bundle.
    Retire,
}

/// Decides the next step. In [`RotationPhase::Announced`], a data plane that has not acknowledged
/// the new root blocks it. In [`RotationPhase::Switched`], a leaf of the old root that has neither
/// expired nor been replaced blocks it.
pub fn decide_step(state: &RotationState, timeouts: &RotationTimeouts) -> RotationStep {
    let waited = |long: u64| {
        state
            .clear_since
            .is_some_and(|at| state.now.saturating_sub(at) >= long)
    };
    match state.phase {
        RotationPhase::Announced if waited(timeouts.settle) => RotationStep::Switch,
        RotationPhase::Switched if waited(timeouts.grace) => RotationStep::Retire,
        _ => RotationStep::Stay,
    }
}

/// Returns true if the current phase has lasted so long that an operator should investigate.
pub fn is_overdue(state: &RotationState, timeouts: &RotationTimeouts) -> bool {
    state.phase != RotationPhase::Steady
        && state.now.saturating_sub(state.since) >= timeouts.overdue
}

#[cfg(test)]
mod tests {
    use super::*;

    /// States of a rotation: phase, time since which nothing blocks it, the present time, and the
    /// step that must follow.
    const STEPS: [(&str, RotationPhase, Option<u64>, u64, RotationStep); 9] = [
        (
            "no rotation is in progress",
            RotationPhase::Steady,
            Some(0),
            1000,
            RotationStep::Stay,
        ),
        (
            "a subscriber has not acknowledged the new root",
            RotationPhase::Announced,
            None,
            1000,
            RotationStep::Stay,
        ),
        (
            "all know it since now",
            RotationPhase::Announced,
            Some(1000),
            1000,
            RotationStep::Stay,
        ),
        (
            "almost settled",
            RotationPhase::Announced,
            Some(996),
            1000,
            RotationStep::Stay,
        ),
        (
            "settled",
            RotationPhase::Announced,
            Some(995),
            1000,
            RotationStep::Switch,
        ),
        (
            "a leaf of the old root is in use",
            RotationPhase::Switched,
            None,
            1000,
            RotationStep::Stay,
        ),
        (
            "the last certificate expired a moment ago",
            RotationPhase::Switched,
            Some(941),
            1000,
            RotationStep::Stay,
        ),
        (
            "the grace is over",
            RotationPhase::Switched,
            Some(940),
            1000,
            RotationStep::Retire,
        ),
        (
            "after a clock step backwards the rotation waits",
            RotationPhase::Switched,
            Some(2000),
            1000,
            RotationStep::Stay,
        ),
    ];

    #[test]
    fn steps() {
        // Three different values, so that a case that uses the wrong timeout fails.
        let timeouts = RotationTimeouts {
            settle: 5,
            grace: 60,
            overdue: 600,
        };
        for (what, phase, clear_since, now, want) in STEPS {
            assert_eq!(
                decide_step(
                    &RotationState {
                        phase,
                        since: 0, // Only `is_overdue` reads it.
                        clear_since,
                        now
                    },
                    &timeouts
                ),
                want,
                "{what}"
            );
        }
        let state = |phase, now| RotationState {
            phase,
            since: 100,
            clear_since: None,
            now,
        };
        // A rotation is overdue 600 s after 100, the time of its last step.
        for (phase, now, want) in [
            (RotationPhase::Steady, 9999, false),
            (RotationPhase::Announced, 699, false),
            (RotationPhase::Announced, 700, true),
        ] {
            assert_eq!(is_overdue(&state(phase, now), &timeouts), want);
        }
        for phase in [
            RotationPhase::Steady,
            RotationPhase::Announced,
            RotationPhase::Switched,
        ] {
            assert_eq!(RotationPhase::read(phase.as_str()), Some(phase));
        }
        assert_eq!(RotationPhase::read("else"), None);
    }
}
