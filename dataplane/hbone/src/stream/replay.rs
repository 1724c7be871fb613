//! Bytes of a request that a tunnel has sent and that may have to be sent again: references without
//! copies, up to a limit. It does not decide whether to send them again.

use bytes::Bytes;

/// Maximum number of bytes of one request that are retained for a retry. A longer request is not
/// retained.
pub const REPLAY_BYTES_MAX: usize = 64 << 10;

/// Bytes that were sent on a stream and may have to be sent again on another one.
#[derive(Debug, Default)]
pub(super) struct Replay {
    pieces: Vec<Bytes>,
    bytes: usize,
}

impl Replay {
    pub(super) fn push(&mut self, piece: Bytes) {
        self.bytes = self.bytes.saturating_add(piece.len());
        if self.bytes > REPLAY_BYTES_MAX {
            self.pieces = Vec::new();
        } else {
            self.pieces.push(piece);
        }
    }

    /// Returns all pieces, unless there were too many bytes.
    pub(super) fn into_pieces(self) -> Option<Vec<Bytes>> {
        (self.bytes <= REPLAY_BYTES_MAX).then_some(self.pieces)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_the_bound_is_buffered() {
        let half = Bytes::from(vec![1; REPLAY_BYTES_MAX / 2]);
        let mut replay = Replay::default();
        replay.push(half.clone());
        replay.push(half.clone());
        replay.push(Bytes::new());
        replay.push(Bytes::from_static(b"!"));
        assert!(replay.pieces.is_empty() && replay.into_pieces().is_none());
        let mut replay = Replay::default();
        replay.push(half.clone());
        assert_eq!(replay.into_pieces(), Some(vec![half]));
    }
}
