//! When a replica counts as dead, and when as back. Pure; [`crate::probe`] asks the replicas.

/// Failures in a row that make it dead.
pub const DOWN_AFTER: u8 = 2;
/// Answers in a row that bring it back.
pub const UP_AFTER: u8 = 2;

/// What one probe learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard {
    /// It is ready, or draining: sessions live there, so packets go there.
    Alive,
    /// It answers, but is neither: a process that lacks something. That is no reason to take its sessions from it, and none to bring back one
    /// that was dead.
    Unready,
    /// It does not answer, or refuses, or says that its data path stands still.
    Nothing,
    /// The prober itself was late: nothing was learned.
    Void,
}

/// A replica as its edge sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Health {
    pub up: bool,
    /// Probes in a row that spoke against `up`.
    pub against: u8,
}

impl Health {
    /// Believed of the start value.
    pub fn new(up: bool) -> Self {
        Self { up, against: 0 }
    }
}

/// The health after one more probe.
pub fn decide_health(now: Health, heard: Heard) -> Health {
    let against = match (now.up, heard) {
        (_, Heard::Void) => return now,
        (_, Heard::Unready) | (true, Heard::Alive) | (false, Heard::Nothing) => 0,
        (true, Heard::Nothing) | (false, Heard::Alive) => now.against + 1,
    };
    let enough = if now.up { DOWN_AFTER } else { UP_AFTER };
    if against >= enough { Health::new(!now.up) } else { Health { against, ..now } }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A start, what is heard (`+` alive, `u` unready, `-` nothing, `v` void), and what it is held for after each (`U` up, `d` down).
    #[test]
    fn two_against_it_turn_it_and_nothing_less() {
        for (name, start, heard, held) in [
            ("stays up", true, "++++", "UUUU"),
            ("one failure is none", true, "-+-+-+", "UUUUUU"),
            ("two failures in a row", true, "+--", "UUd"),
            ("stays down", false, "----", "dddd"),
            ("one answer is none", false, "+-+-", "dddd"),
            ("two answers in a row", false, "-++", "ddU"),
            ("dies and comes back", true, "--++--", "UddUUd"),
            ("an unready process is not dead", true, "-u-u-uuu", "UUUUUUUU"),
            ("an unready process is not back", false, "uuu+u+", "dddddd"),
            ("a late prober learns nothing", true, "-vvv-", "UUUUd"),
            ("a late prober learns nothing of the dead", false, "+vv+", "dddU"),
        ] {
            let mut health = Health::new(start);
            let got: String = heard
                .chars()
                .map(|c| {
                    let heard = match c {
                        '+' => Heard::Alive,
                        'u' => Heard::Unready,
                        '-' => Heard::Nothing,
                        _ => Heard::Void,
                    };
                    health = decide_health(health, heard);
                    if health.up { 'U' } else { 'd' }
                })
                .collect();
            assert_eq!(got, held, "{name}");
        }
    }
}
