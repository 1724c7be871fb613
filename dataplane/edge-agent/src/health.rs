//! Decides when a replica counts as down and when as up again. Pure; [`crate::probe`] sends the
//! probes.

/// Consecutive failures after which a replica is down. One probe may be lost, or meet a replica
/// that is short of CPU for a moment. A third would add `PROBE_INTERVAL` and its timeout, 0.4 s, to
/// the second within which new connections avoid a dead replica.
pub const DOWN_AFTER: u8 = 2;
/// Consecutive successes after which a replica is up again. As many as [`DOWN_AFTER`], so that one
/// result flips nothing in either direction.
pub const UP_AFTER: u8 = 2;

/// The result of one probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeResult {
    /// The replica is ready or draining. Its sessions live there, so packets are sent there.
    Alive,
    /// The replica answers but is neither ready nor draining: its process lacks something. This
    /// neither takes a replica down nor brings it up again.
    Unready,
    /// The replica does not answer, refuses, or reports that its data path is stuck.
    Nothing,
    /// The prober itself was late, so the probe has no result.
    Void,
}

/// A replica's health as this edge observes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaHealth {
    pub up: bool,
    /// Consecutive probes that contradict `up`.
    pub against: u8,
}

impl ReplicaHealth {
    /// Starts in the given state with no probe counted against it.
    pub fn new(up: bool) -> Self {
        Self { up, against: 0 }
    }
}

/// Returns the health after one more probe.
pub fn decide_health(now: ReplicaHealth, heard: ProbeResult) -> ReplicaHealth {
    let against = match (now.up, heard) {
        (_, ProbeResult::Void) => return now,
        (_, ProbeResult::Unready) | (true, ProbeResult::Alive) | (false, ProbeResult::Nothing) => 0,
        (true, ProbeResult::Nothing) | (false, ProbeResult::Alive) => now.against + 1,
    };
    let enough = if now.up { DOWN_AFTER } else { UP_AFTER };
    if against >= enough {
        ReplicaHealth::new(!now.up)
    } else {
        ReplicaHealth { against, ..now }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Per case: the start, the probe results (`+` alive, `u` unready, `-` nothing, `v` void), and
    /// the health after each (`U` up, `d` down).
    #[test]
    fn two_consecutive_probes_flip_health() {
        for (name, start, heard, held) in [
            ("stays up", true, "++++", "UUUU"),
            ("one failed probe changes nothing", true, "-+-+-+", "UUUUUU"),
            ("two failures in a row", true, "+--", "UUd"),
            ("stays down", false, "----", "dddd"),
            (
                "one successful probe changes nothing",
                false,
                "+-+-",
                "dddd",
            ),
            ("two answers in a row", false, "-++", "ddU"),
            ("goes down and comes up again", true, "--++--", "UddUUd"),
            (
                "an unready process is not dead",
                true,
                "-u-u-uuu",
                "UUUUUUUU",
            ),
            ("an unready process is not back", false, "uuu+u+", "dddddd"),
            ("a late prober learns nothing", true, "-vvv-", "UUUUd"),
            (
                "a late prober learns nothing of the dead",
                false,
                "+vv+",
                "dddU",
            ),
        ] {
            let mut health = ReplicaHealth::new(start);
            let got: String = heard
                .chars()
                .map(|c| {
                    let heard = match c {
                        '+' => ProbeResult::Alive,
                        'u' => ProbeResult::Unready,
                        '-' => ProbeResult::Nothing,
                        _ => ProbeResult::Void,
                    };
                    health = decide_health(health, heard);
                    if health.up { 'U' } else { 'd' }
                })
                .collect();
            assert_eq!(got, held, "{name}");
        }
    }
}
