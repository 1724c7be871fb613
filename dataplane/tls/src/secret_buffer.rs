//! A byte buffer for frames with traffic secrets: bytes that are removed, or left behind when it
//! grows, are erased. It does not lock memory and does not parse frames.

use std::ops::Deref;

use zeroize::Zeroize;

/// Bytes of which no copy stays in freed memory. Behind its length there are only zeros, or bytes
/// that [`SecretBuffer::spare`] gave out.
#[derive(Default)]
pub struct SecretBuffer {
    bytes: Vec<u8>,
}

impl std::fmt::Debug for SecretBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SecretBuffer({} bytes)", self.bytes.len())
    }
}

impl SecretBuffer {
    /// Creates an empty buffer that owns no memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the bytes with space for `most` more. As long as no more are written, they are not
    /// reallocated.
    pub fn spare(&mut self, most: usize) -> &mut Vec<u8> {
        if self.bytes.capacity() - self.bytes.len() < most {
            let mut larger =
                Vec::with_capacity((self.bytes.len() + most).max(2 * self.bytes.capacity()));
            larger.extend_from_slice(&self.bytes);
            self.wipe();
            self.bytes = larger;
        }
        &mut self.bytes
    }

    /// Removes the first `length` bytes, or all if there are fewer.
    pub fn consume(&mut self, length: usize) {
        let length = length.min(self.bytes.len());
        let rest = self.bytes.len() - length;
        self.bytes.copy_within(length.., 0);
        self.bytes[rest..].zeroize();
        self.bytes.truncate(rest);
    }

    /// Removes all bytes; the memory stays allocated.
    pub fn wipe(&mut self) {
        // `Vec`'s own `zeroize` would write to all of its capacity.
        self.bytes.as_mut_slice().zeroize();
        self.bytes.clear();
    }
}

impl Deref for SecretBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for SecretBuffer {
    fn drop(&mut self) {
        self.wipe();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    // The length of SHA-384's secrets, the longest of the mesh's suites.
    const SECRET_BYTES: usize = 48;

    /// Returns byte `at` of a secret that, as a whole, only the tested memory contains.
    fn byte(at: usize) -> u8 {
        (at as u8)
            .wrapping_mul(37)
            .wrapping_add(std::process::id() as u8)
            ^ 0xa5
    }

    /// Returns how often this process's writable memory contains the middle of the secret. The ends
    /// may be overwritten by the allocator's free lists.
    fn copies() -> usize {
        let (maps, memory) = (
            std::fs::read_to_string("/proc/self/maps").unwrap(),
            File::open("/proc/self/mem").unwrap(),
        );
        let mut found = 0;
        let mut block = vec![0; 1 << 20];
        for line in maps.lines().filter(|l| l.contains("rw-p")) {
            let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let (mut at, end) = (
                u64::from_str_radix(from, 16).unwrap(),
                u64::from_str_radix(to, 16).unwrap(),
            );
            while at < end {
                let length = block.len().min((end - at) as usize);
                if memory.read_exact_at(&mut block[..length], at).is_err() {
                    break;
                }
                let (first, middle) = (byte(16), |w: &[u8]| {
                    w.iter().enumerate().all(|(i, b)| *b == byte(16 + i))
                });
                let starts = block[..length]
                    .iter()
                    .enumerate()
                    .filter(|(_, b)| **b == first)
                    .map(|(i, _)| i);
                found += starts
                    .filter(|i| {
                        block[..length]
                            .get(*i..i + SECRET_BYTES - 32)
                            .is_some_and(middle)
                    })
                    .count();
                // The bytes that were read must not be found as well.
                block[..length].zeroize();
                at += length as u64;
            }
        }
        found
    }

    fn fill(bytes: &mut Vec<u8>, secrets: usize) {
        for _ in 0..secrets {
            bytes.extend((0..SECRET_BYTES).map(byte));
            bytes.extend_from_slice(&[0; 16]);
        }
    }

    #[test]
    fn no_copy_of_a_secret_is_left_in_freed_memory() {
        let before = copies();
        // A plain vector has copies, which the search must find. It is looked at before it is
        // freed, because another test's thread may then write into its memory.
        let mut plain = Vec::new();
        fill(&mut plain, 500);
        assert!(
            copies() >= before + 400,
            "the search finds nothing, so it proves nothing"
        );
        plain.zeroize();
        let before = copies();
        let mut buffer = SecretBuffer::new();
        for _ in 0..400 {
            fill(buffer.spare(SECRET_BYTES + 16), 1);
        }
        buffer.consume(100 * 64);
        assert_eq!(buffer.len(), 300 * 64);
        buffer.wipe();
        fill(buffer.spare(1 << 16), 500);
        drop(buffer);
        assert!(
            copies() <= before,
            "{} copies more than before",
            copies() - before
        );
    }

    #[test]
    fn bytes_are_those_that_were_written() {
        let mut buffer = SecretBuffer::new();
        let mut model = Vec::new();
        for n in 0..200usize {
            let piece: Vec<u8> = (0..n).map(|i| (i * n) as u8).collect();
            buffer.spare(piece.len()).extend_from_slice(&piece);
            model.extend_from_slice(&piece);
            let less = n / 2;
            buffer.consume(less);
            model.drain(..less);
            assert_eq!(&*buffer, model.as_slice());
        }
        buffer.consume(usize::MAX);
        assert!(buffer.is_empty());
    }
}
