//! Scrapes in progress: their maximum number, and which one gives way. `exposition` renders the
//! text.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::{Exposition, MetricFamily, Registry, lock};

/// Concurrent scrapes of one process. Further scrapes are refused and counted
/// (`canal_metrics_scrapes_refused_total`).
/// Prometheus is often run twice, for availability. Each scrape costs CPU of the process.
pub const SCRAPES_MAX: usize = 2;
/// A scrape that takes longer than this gives way when another one begins.
/// Prometheus gives up after 10 s by default, so that only slower readers reach it.
pub const SCRAPE_TIMEOUT: Duration = Duration::from_secs(60);

/// The scrapes of a registry, oldest first.
#[derive(Debug, Default)]
pub(super) struct Scrapes {
    open: Mutex<Vec<(Instant, Weak<AtomicBool>)>>,
}

/// A scrape that counts as one of [`SCRAPES_MAX`] until it is dropped. It is an iterator over the
/// pieces of the text, and ends with an error when it has to give way.
#[derive(Debug)]
pub struct Scrape {
    pieces: Exposition,
    is_over: Arc<AtomicBool>,
}

impl Scrapes {
    fn begin(&self, now: Instant) -> Option<Arc<AtomicBool>> {
        let mut open = lock(&self.open);
        open.retain(|(_, scrape)| scrape.upgrade().is_some());
        if open.len() >= SCRAPES_MAX {
            let at = open
                .iter()
                .position(|(started, _)| now >= *started + SCRAPE_TIMEOUT)?;
            if let Some(slow) = open.remove(at).1.upgrade() {
                slow.store(true, Relaxed);
            }
        }
        let is_over = Arc::new(AtomicBool::new(false));
        open.push((now, Arc::downgrade(&is_over)));
        Some(is_over)
    }
}

impl Registry {
    /// Begins a scrape if fewer than [`SCRAPES_MAX`] are in progress, or if one of them has
    /// exceeded [`SCRAPE_TIMEOUT`].
    pub fn begin_scrape(&self) -> Option<Scrape> {
        let now = Instant::now();
        let begun = self.inner.scrapes.begin(now);
        if begun.is_none() {
            let family = MetricFamily::new(
                "canal_metrics_scrapes_refused_total",
                "Scrapes refused because two others were in progress.",
                &[],
            );
            self.counters(family).shared(&[]).inc();
        }
        Some(Scrape {
            is_over: begun?,
            pieces: self.exposition_at(now),
        })
    }
}

impl Iterator for Scrape {
    type Item = io::Result<String>;

    fn next(&mut self) -> Option<io::Result<String>> {
        if self.is_over.load(Relaxed) {
            return Some(Err(io::Error::other(
                "the scrape took too long and was ended in favour of another one",
            )));
        }
        self.pieces.next().map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_third_scrape_is_refused_and_a_slow_one_is_ended() {
        let scrapes = Scrapes::default();
        let start = Instant::now();
        let (first, second) = (
            scrapes.begin(start).unwrap(),
            scrapes.begin(start + Duration::from_secs(1)).unwrap(),
        );
        assert!(scrapes.begin(start + Duration::from_secs(2)).is_none());
        drop(second);
        let third = scrapes.begin(start + Duration::from_secs(3)).unwrap();
        assert!(!first.load(Relaxed));
        let fourth = scrapes.begin(start + SCRAPE_TIMEOUT).unwrap();
        assert!(first.load(Relaxed) && !third.load(Relaxed) && !fourth.load(Relaxed));
    }

    #[test]
    fn refused_scrapes_are_counted() {
        let r = Registry::new();
        let _two = (r.begin_scrape().unwrap(), r.begin_scrape().unwrap());
        assert!(r.begin_scrape().is_none());
        assert!(
            r.render()
                .contains("canal_metrics_scrapes_refused_total 1\n")
        );
    }
}
