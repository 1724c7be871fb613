//! Deterministic bytes: byte `i` of stream `seed` is the same in every process, so any part of a
//! body can be checked without the whole. Start at [`fill`].

#![forbid(unsafe_code)]

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use hyper::body::{Body, Frame, SizeHint};
use sha2::{Digest, Sha256};

/// Number of bytes that are produced at once. Any size near a socket's buffer will do: a smaller
/// one would cost system calls, a larger one would only wait.
pub const CHUNK_BYTES: usize = 64 * 1024;

/// Returns the eight bytes of block `block`. They come from splitmix64, so that adjacent blocks
/// differ in many bits.
fn block_bytes(seed: u64, block: u64) -> [u8; 8] {
    let mut z = seed.wrapping_add(block.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).to_le_bytes()
}

/// Returns the bytes `from .. from + length` of the stream.
pub fn fill(seed: u64, from: u64, length: usize) -> Bytes {
    let mut out = BytesMut::with_capacity(length + 16);
    let skip = (from % 8) as usize;
    let mut block = from / 8;
    while out.len() < length + skip {
        out.extend_from_slice(&block_bytes(seed, block));
        block += 1;
    }
    let mut out = out.freeze().slice(skip..);
    out.truncate(length);
    out
}

/// Returns the bytes in lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            // Writing to a String does not fail.
            let _ = write!(text, "{byte:02x}");
            text
        })
}

/// Compares bytes that arrive in pieces with the stream, and digests them.
pub struct Checker {
    seed: u64,
    digest: Sha256,
    /// Number of bytes received so far.
    pub length: u64,
    /// Offset of the first byte that differs from the stream.
    pub differs_at: Option<u64>,
}

impl Checker {
    /// Expects the stream `seed` from its start.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            digest: Sha256::new(),
            length: 0,
            differs_at: None,
        }
    }

    /// Adds the next piece of the received bytes.
    pub fn take(&mut self, piece: &[u8]) {
        self.digest.update(piece);
        if self.differs_at.is_none() {
            let want = fill(self.seed, self.length, piece.len());
            if let Some(at) = want.iter().zip(piece).position(|(w, p)| w != p) {
                self.differs_at = Some(self.length + at as u64);
            }
        }
        self.length += piece.len() as u64;
    }

    /// Returns the digest of all received bytes, in hexadecimal.
    pub fn sha256(self) -> String {
        hex(&self.digest.finalize())
    }
}

/// A body of `size` bytes of stream `seed`.
pub struct PatternBody {
    seed: u64,
    position: u64,
    size: u64,
    /// Trailers that end a body whose length is not announced (chunked in HTTP/1.1); `None` if the
    /// length is announced.
    unannounced: Option<Trailers>,
}

/// Trailers at the end of a body without an announced length.
enum Trailers {
    Absent,
    /// `x-length` and `x-sha256` of the sent bytes.
    Digest(Box<Sha256>),
}

impl PatternBody {
    /// Returns a body with an announced length.
    pub fn sized(seed: u64, size: u64) -> Self {
        Self {
            seed,
            position: 0,
            size,
            unannounced: None,
        }
    }
    /// Returns a body without an announced length.
    pub fn chunked(seed: u64, size: u64) -> Self {
        Self {
            seed,
            position: 0,
            size,
            unannounced: Some(Trailers::Absent),
        }
    }
    /// Returns a body without an announced length, with the trailers `x-length` and `x-sha256`.
    pub fn with_trailers(seed: u64, size: u64) -> Self {
        Self {
            seed,
            position: 0,
            size,
            unannounced: Some(Trailers::Digest(Box::default())),
        }
    }

    /// Returns the number of bytes produced so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    fn trailers(&mut self) -> Option<HeaderMap> {
        let Some(Trailers::Digest(digest)) = self.unannounced.take() else {
            return None;
        };
        let mut trailers = HeaderMap::new();
        trailers.insert("x-length", self.size.into());
        // Hexadecimal text is always a valid header value.
        trailers.insert("x-sha256", hex(&digest.finalize()).parse().ok()?);
        Some(trailers)
    }
}

impl Body for PatternBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let left = self.size - self.position;
        if left == 0 {
            return Poll::Ready(self.trailers().map(|t| Ok(Frame::trailers(t))));
        }
        let length = usize::try_from(left)
            .unwrap_or(CHUNK_BYTES)
            .min(CHUNK_BYTES);
        let piece = fill(self.seed, self.position, length);
        self.position += length as u64;
        if let Some(Trailers::Digest(digest)) = &mut self.unannounced {
            digest.update(&piece);
        }
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.position == self.size && !matches!(self.unannounced, Some(Trailers::Digest(_)))
    }

    fn size_hint(&self) -> SizeHint {
        match self.unannounced {
            None => SizeHint::with_exact(self.size - self.position),
            Some(_) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_of_the_stream_is_the_same_bytes() {
        let whole = fill(7, 0, 1000);
        for (from, length) in [
            (0, 1),
            (1, 7),
            (7, 9),
            (8, 8),
            (13, 500),
            (999, 1),
            (1000, 0),
        ] {
            assert_eq!(
                fill(7, from as u64, length),
                whole.slice(from..from + length),
                "{from}+{length}"
            );
        }
        assert_ne!(fill(8, 0, 16), whole.slice(..16));
    }

    #[test]
    fn a_checker_names_the_first_wrong_byte() {
        let mut wrong = fill(1, 0, 100).to_vec();
        wrong[63] ^= 1;
        let mut checker = Checker::new(1);
        checker.take(&wrong[..50]);
        assert_eq!(checker.differs_at, None);
        checker.take(&wrong[50..]);
        assert_eq!((checker.differs_at, checker.length), (Some(63), 100));
    }
}
