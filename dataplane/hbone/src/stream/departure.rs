//! Tracks when the payloads passed to HTTP/2 have left: the h2 crate drops a payload once its frame
//! is written, and gives no other sign. It sends nothing. An empty frame as a probe would be
//! cheaper, but peers end a connection that has brought a hundred of them (h2 0.4.20).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

/// Number of a stream's payloads that have neither left nor been discarded.
#[derive(Debug, Clone, Default)]
pub(super) struct Departures(Arc<AtomicUsize>);

/// A payload that is counted while it lives.
struct TrackedPayload {
    payload: Bytes,
    among: Departures,
}

impl AsRef<[u8]> for TrackedPayload {
    fn as_ref(&self) -> &[u8] {
        &self.payload
    }
}

impl Drop for TrackedPayload {
    fn drop(&mut self) {
        self.among.0.fetch_sub(1, Ordering::Release);
    }
}

impl Departures {
    /// Returns the payload in the form that must be sent.
    pub(super) fn track(&self, payload: Bytes) -> Bytes {
        self.0.fetch_add(1, Ordering::Relaxed);
        Bytes::from_owner(TrackedPayload {
            payload,
            among: self.clone(),
        })
    }

    pub(super) fn are_over(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_departs_when_its_last_holder_drops_it() {
        let departures = Departures::default();
        assert!(departures.are_over());
        let (end, mut data) = (
            departures.track(Bytes::new()),
            departures.track(Bytes::from_static(b"abc")),
        );
        let first = data.split_to(1);
        assert_eq!(
            (&first[..], &data[..], end.is_empty()),
            (&b"a"[..], &b"bc"[..], true)
        );
        drop((end, first));
        assert!(!departures.are_over());
        drop(data);
        assert!(departures.are_over());
    }
}
