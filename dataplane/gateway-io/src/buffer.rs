//! Read buffer ([`Inbox`]), write buffer ([`Outbox`]), and a worker's spare blocks ([`Blocks`]).
//!
//! A connection occupies a block only while bytes are in flight. No IO is done here.

use std::cell::RefCell;
use std::io::IoSlice;
use std::rc::Rc;

use bytes::{Buf, Bytes, BytesMut};
use smallvec::SmallVec;

/// Size of a read block, bytes. It fits an ordinary head with a small body, and one TLS record.
pub const BLOCK: usize = 16 << 10;
/// Most spare blocks per worker; further ones are returned to the allocator. They take 8 MiB per
/// worker. Nobody measured this value.
pub const SPARE_BLOCKS_MAX: usize = 512;
/// Largest piece, in bytes, that is copied behind the head: one copy costs less than one more
/// vector in the kernel. Nobody measured where the two cost the same.
pub const COPIED_BYTES_MAX: usize = 1 << 10;
/// Most vectors of one write. The list is on the stack: 256 bytes. More pieces take another write.
const VECTORS: usize = 16;

/// A worker's spare blocks. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Blocks {
    spare: Rc<RefCell<Vec<BytesMut>>>,
}

impl Blocks {
    fn take(&self) -> BytesMut {
        self.spare
            .borrow_mut()
            .pop()
            .unwrap_or_else(|| BytesMut::with_capacity(BLOCK))
    }

    fn give(&self, mut block: BytesMut) {
        block.clear();
        let mut spare = self.spare.borrow_mut();
        // `try_reclaim` recovers the space in front if the block is not shared. A grown or shared
        // block is not reused.
        if spare.len() < SPARE_BLOCKS_MAX
            && block.try_reclaim(BLOCK)
            && block.capacity() <= 2 * BLOCK
        {
            spare.push(block);
        }
    }
}

/// Bytes read and not consumed yet. They are in a block of the inbox or in a chunk from the tunnel;
/// never both contain bytes.
#[derive(Debug)]
pub struct Inbox {
    blocks: Blocks,
    block: Option<BytesMut>,
    chunk: Bytes,
}

impl Inbox {
    pub fn new(blocks: &Blocks) -> Self {
        Self {
            blocks: blocks.clone(),
            block: None,
            chunk: Bytes::new(),
        }
    }

    /// Returns the bytes that were read but not consumed.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        match &self.block {
            Some(block) if self.chunk.is_empty() => block,
            _ => &self.chunk,
        }
    }

    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes().is_empty()
    }

    /// Returns the block to read into. It has space for at least one byte, and for at least
    /// [`BLOCK`] in total.
    pub fn read_block(&mut self) -> &mut BytesMut {
        let chunk = std::mem::take(&mut self.chunk);
        let blocks = &self.blocks;
        let block = self.block.get_or_insert_with(|| blocks.take());
        block.extend_from_slice(&chunk);
        if block.capacity() - block.len() < BLOCK / 4 {
            block.reserve(BLOCK);
        }
        block
    }

    /// Takes over bytes from the tunnel, without a copy if the inbox is empty.
    pub fn adopt(&mut self, bytes: Bytes) {
        if self.is_empty() {
            self.chunk = bytes;
        } else {
            // A message that spans chunks is rare, but it must be contiguous.
            let block = self.read_block();
            block.extend_from_slice(&bytes);
        }
    }

    /// Discards the first `n` bytes, and returns the block to the worker when no bytes are left.
    #[inline]
    pub fn advance(&mut self, n: usize) {
        if self.chunk.is_empty() {
            if let Some(block) = &mut self.block {
                block.advance(n);
            }
        } else {
            self.chunk.advance(n);
        }
        self.release();
    }

    /// Takes the first `n` bytes without a copy.
    pub fn take(&mut self, n: usize) -> Bytes {
        if self.chunk.is_empty() {
            self.block
                .as_mut()
                .map_or_else(Bytes::new, |block| block.split_to(n).freeze())
        } else {
            self.chunk.split_to(n)
        }
    }

    /// Takes all bytes without a copy.
    pub fn take_all(&mut self) -> Bytes {
        let bytes = self.take(self.len());
        self.release();
        bytes
    }

    /// Returns an empty block to the worker.
    #[inline]
    pub fn release(&mut self) {
        if self.block.as_ref().is_some_and(BytesMut::is_empty)
            && let Some(block) = self.block.take()
        {
            self.blocks.give(block);
        }
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.blocks.give(block);
        }
    }
}

/// Bytes to be written, in order: a head in memory of its own, then pieces that refer to other
/// memory.
#[derive(Debug, Default)]
pub struct Outbox {
    head: Vec<u8>,
    head_at: usize,
    pieces: SmallVec<[Bytes; 4]>,
}

impl Outbox {
    /// Returns the head, to append small data. A piece that is still waiting is copied into it to
    /// preserve the order; that is rare.
    pub fn head(&mut self) -> &mut Vec<u8> {
        for piece in self.pieces.drain(..) {
            self.head.extend_from_slice(&piece);
        }
        &mut self.head
    }

    /// Appends the first `n` bytes of `inbox`: small ones by copy, large ones by reference.
    pub fn push_from(&mut self, inbox: &mut Inbox, n: usize) {
        if n <= COPIED_BYTES_MAX && self.pieces.is_empty() {
            self.head.extend_from_slice(&inbox.bytes()[..n]);
            inbox.advance(n);
        } else {
            self.pieces.push(inbox.take(n));
            inbox.release();
        }
    }

    /// Appends bytes: small ones by copy, large ones by reference.
    pub fn push(&mut self, bytes: Bytes) {
        if bytes.len() <= COPIED_BYTES_MAX && self.pieces.is_empty() {
            self.head.extend_from_slice(&bytes);
        } else if !bytes.is_empty() {
            self.pieces.push(bytes);
        }
    }

    /// Appends bytes of static lifetime, for example a delimiter.
    pub fn push_static(&mut self, bytes: &'static [u8]) {
        if self.pieces.is_empty() {
            self.head.extend_from_slice(bytes);
        } else {
            self.pieces.push(Bytes::from_static(bytes));
        }
    }

    pub fn is_empty(&self) -> bool {
        self.head_at == self.head.len() && self.pieces.is_empty()
    }

    pub fn len(&self) -> usize {
        self.head.len() - self.head_at + self.pieces.iter().map(Bytes::len).sum::<usize>()
    }

    pub fn clear(&mut self) {
        self.head.clear();
        self.head_at = 0;
        self.pieces.clear();
    }

    /// Returns the contiguous bytes if there is exactly one span.
    pub fn single(&self) -> Option<&[u8]> {
        match (self.head_at < self.head.len(), self.pieces.as_slice()) {
            (true, []) => Some(&self.head[self.head_at..]),
            (false, [piece]) => Some(piece),
            _ => None,
        }
    }

    /// Returns the spans in order, at most [`VECTORS`].
    pub fn vectors(&self) -> SmallVec<[IoSlice<'_>; VECTORS]> {
        let head = Some(&self.head[self.head_at..]).filter(|h| !h.is_empty());
        head.into_iter()
            .chain(self.pieces.iter().map(|p| &p[..]))
            .take(VECTORS)
            .map(IoSlice::new)
            .collect()
    }

    /// Removes the first `n` bytes, which were written.
    pub fn advance(&mut self, mut n: usize) {
        let head = (self.head.len() - self.head_at).min(n);
        self.head_at += head;
        n -= head;
        while n > 0 {
            let piece = &mut self.pieces[0];
            let part = piece.len().min(n);
            piece.advance(part);
            n -= part;
            if piece.is_empty() {
                self.pieces.remove(0);
            }
        }
        if self.is_empty() {
            self.clear();
        }
    }

    /// Takes the next piece as owned bytes, because tunnels send them without a copy. Return the
    /// unsent rest with [`Outbox::put_back`].
    pub fn pop(&mut self) -> Option<Bytes> {
        if self.head_at < self.head.len() {
            let head = Bytes::from(std::mem::take(&mut self.head));
            let at = std::mem::take(&mut self.head_at);
            return Some(head.slice(at..));
        }
        self.head.clear();
        self.head_at = 0;
        (!self.pieces.is_empty()).then(|| self.pieces.remove(0))
    }

    /// Puts back, in front, the unsent bytes of a piece from [`Outbox::pop`].
    pub fn put_back(&mut self, bytes: Bytes) {
        self.pieces.insert(0, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(o: &Outbox) -> Vec<u8> {
        o.vectors().iter().flat_map(|v| v.to_vec()).collect()
    }

    #[test]
    fn an_empty_inbox_frees_its_block_and_chunks_are_not_copied() {
        let blocks = Blocks::default();
        let mut inbox = Inbox::new(&blocks);
        inbox.read_block().extend_from_slice(b"hello");
        inbox.advance(2);
        assert_eq!(inbox.bytes(), b"llo");
        inbox.advance(3);
        assert!(inbox.block.is_none() && blocks.spare.borrow().len() == 1);
        let chunk = Bytes::from_static(b"abc");
        inbox.adopt(chunk.clone());
        assert_eq!(inbox.bytes().as_ptr(), chunk.as_ptr());
        inbox.adopt(Bytes::from_static(b"def"));
        assert_eq!(inbox.bytes(), b"abcdef");
        assert_eq!(&inbox.take(4)[..], b"abcd");
        assert_eq!(&inbox.take_all()[..], b"ef");
        assert!(inbox.is_empty());
    }

    #[test]
    fn an_outbox_keeps_the_order_of_small_and_large_parts() {
        let blocks = Blocks::default();
        let mut inbox = Inbox::new(&blocks);
        let large = vec![b'x'; COPIED_BYTES_MAX + 1];
        inbox.read_block().extend_from_slice(&large);
        let mut out = Outbox::default();
        out.head().extend_from_slice(b"head");
        out.push_from(&mut inbox, large.len());
        out.push_static(b"\r\n");
        out.push(Bytes::from_static(b"tail"));
        let want = [b"head", large.as_slice(), b"\r\ntail"].concat();
        assert_eq!(all(&out), want);
        out.advance(10);
        assert_eq!(all(&out), want[10..]);
        out.head().extend_from_slice(b"more");
        assert_eq!(all(&out), [&want[10..], b"more"].concat());
        let n = all(&out).len();
        out.advance(n);
        assert!(out.is_empty() && out.single().is_none());
    }

    #[test]
    fn a_tunnel_accepts_data_in_pieces() {
        let mut out = Outbox::default();
        out.push_static(b"head");
        out.push(Bytes::from(vec![1u8; 5000]));
        out.advance(1);
        let mut first = out.pop().unwrap();
        assert_eq!(&first[..], b"ead");
        first.advance(1);
        out.put_back(first);
        assert_eq!(&out.pop().unwrap()[..], b"ad");
        assert_eq!(out.pop().unwrap().len(), 5000);
        assert!(out.pop().is_none() && out.is_empty());
    }
}
