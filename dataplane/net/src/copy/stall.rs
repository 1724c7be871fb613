//! Detects that a sink accepts nothing: pure counts of ticks for each direction, and the timer that
//! gives the ticks. It moves no byte and ends nothing.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// Interval at which a transfer that waits for its sink is checked. A quarter of the second in
/// which a reset passes a stalled hop (`BROKEN_TICKS_MAX`).
pub const STALL_TICK: Duration = Duration::from_millis(250);
/// Ticks without progress after which the bytes of a broken leg are given up: a reset passes a
/// stalled hop within a second.
const BROKEN_TICKS_MAX: u32 = 4;

/// Progress of one direction, as it was found at the last ticks.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct StallWatch {
    moved: Option<u64>,
    /// Ticks in a row at which the sink had accepted nothing since the tick before.
    ticks: u32,
}

impl StallWatch {
    /// Records a tick: whether the direction holds bytes that the sink does not accept, and how
    /// many bytes it has moved.
    pub fn tick(&mut self, is_blocked: bool, moved: u64) {
        if !is_blocked {
            *self = Self::default();
        } else if self.moved == Some(moved) {
            self.ticks = self.ticks.saturating_add(1);
        } else {
            *self = Self {
                moved: Some(moved),
                ticks: 0,
            };
        }
    }

    /// Returns whether the sink has accepted nothing for a whole tick. The source is looked after
    /// then, though it is not read.
    pub fn is_stalled(&self) -> bool {
        self.ticks > 0
    }

    /// Returns whether the bytes of a broken source had their time.
    pub fn is_over(&self) -> bool {
        self.ticks >= BROKEN_TICKS_MAX
    }
}

/// The timer of the ticks, which runs only while a sink accepts nothing.
#[derive(Debug, Default)]
pub struct StallTimer(Option<Pin<Box<Sleep>>>);

impl StallTimer {
    /// Returns whether a tick is due. The timer starts with the first poll that wants it, and stops
    /// at the tick after the last.
    pub fn poll(&mut self, cx: &mut Context<'_>, is_wanted: bool) -> bool {
        if self.0.is_none() && !is_wanted {
            return false;
        }
        let sleep = self
            .0
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(STALL_TICK)));
        if sleep.as_mut().poll(cx).is_pending() {
            return false;
        }
        if is_wanted {
            sleep.as_mut().reset(Instant::now() + STALL_TICK);
            // Registers the waker of the next tick.
            if let Poll::Ready(()) = sleep.as_mut().poll(cx) {
                cx.waker().wake_by_ref();
            }
        } else {
            self.0 = None;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_direction_stalls_when_nothing_moved_for_a_tick_and_starts_anew_with_progress() {
        let mut watch = StallWatch::default();
        for (is_blocked, moved, is_stalled, is_over) in [
            (true, 0, false, false),
            (true, 0, true, false),
            (true, 1, false, false),
            (true, 1, true, false),
            (false, 1, false, false),
            (true, 1, false, false),
            (true, 1, true, false),
            (true, 1, true, false),
            (true, 1, true, false),
            (true, 1, true, true),
            (true, 2, false, false),
        ] {
            watch.tick(is_blocked, moved);
            assert_eq!(
                (watch.is_stalled(), watch.is_over()),
                (is_stalled, is_over),
                "{is_blocked} {moved}"
            );
        }
    }

    #[tokio::test]
    async fn the_timer_ticks_while_it_has_users() {
        let mut timer = StallTimer::default();
        let mut poll = async |is_wanted: bool| {
            std::future::poll_fn(|cx| Poll::Ready(timer.poll(cx, is_wanted))).await
        };
        assert!(!poll(false).await && !poll(true).await);
        tokio::time::sleep(STALL_TICK).await;
        assert!(poll(true).await && !poll(true).await);
        tokio::time::sleep(STALL_TICK).await;
        assert!(poll(false).await, "the last tick");
        tokio::time::sleep(STALL_TICK).await;
        assert!(!poll(false).await && !poll(true).await, "it starts anew");
    }
}
