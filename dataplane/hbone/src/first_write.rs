//! Transport that delays the first write of a connection. Its first frames are collected and leave
//! in one record and one packet. Separately, each frame would cost both ends a system call and a
//! wake-up. It passes everything through once they have left, and does not interpret HTTP/2.

use std::cell::Cell;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum number of bytes that are delayed; more are written at once. The preface, SETTINGS and
/// the HEADERS of a CONNECT fit in. Nobody measured where the copy costs more than the system call
/// that it saves.
const COALESCE_BYTES_MAX: usize = 4 << 10;
/// Number of idle polls after which the bytes leave, at a flush or at the next read that finds
/// nothing. The read matters because a task that waits for the peer's first bytes may never flush
/// again. Between two polls of the task, all other ready tasks have run and the kernel was polled
/// for events. One poll is for the peer's preface, and one for the output of the task that its
/// request spawned.
const YIELDS_BEFORE_FLUSH: u8 = 3;
/// Number of idle polls after which the bytes leave if the peer has sent nothing. The first is this
/// side's own turn, and after the second nothing that is ready is left; a client's first bytes do
/// not wait for a peer's preface.
const SILENT_RESTS: u8 = 2;

/// A transport whose first bytes are delayed.
#[derive(Debug)]
pub(super) struct DelayedFirstWrite<IO> {
    io: IO,
    first: First,
}

#[derive(Debug)]
enum First {
    Held {
        bytes: Vec<u8>,
        rests: u8,
        has_read: bool,
    },
    Leaving {
        bytes: Vec<u8>,
        at: usize,
    },
    /// The first bytes have left; everything passes through.
    Gone,
}

impl<IO> DelayedFirstWrite<IO> {
    pub(super) fn new(io: IO) -> Self {
        Self {
            io,
            first: First::Held {
                bytes: Vec::new(),
                rests: 0,
                has_read: false,
            },
        }
    }
}

/// A transport that counts the bytes read from it.
#[derive(Debug)]
pub(super) struct Counted<IO> {
    pub(super) io: IO,
    pub(super) read: Rc<Cell<u64>>,
}

impl<IO: AsyncRead + Unpin> AsyncRead for Counted<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        this.read
            .set(this.read.get() + (buf.filled().len() - before) as u64);
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Counted<IO> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, buf)
    }
    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(cx, bufs)
    }
    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

/// Wakes the task again after all other ready tasks have run and the kernel was polled.
fn wake_after_others(cx: &mut Context<'_>) {
    let _ = pin!(tokio::task::yield_now()).poll(cx);
}

impl<IO: AsyncWrite + Unpin> DelayedFirstWrite<IO> {
    /// Writes the delayed bytes and flushes them.
    fn poll_leave(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let First::Held { bytes, .. } = &mut self.first {
            self.first = First::Leaving {
                bytes: std::mem::take(bytes),
                at: 0,
            };
        }
        if let First::Leaving { bytes, at } = &mut self.first {
            while *at < bytes.len() {
                match ready!(Pin::new(&mut self.io).poll_write(cx, &bytes[*at..]))? {
                    0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                    n => *at += n,
                }
            }
            self.first = First::Gone;
        }
        Pin::new(&mut self.io).poll_flush(cx)
    }

    /// Returns whether `more` bytes still fit among the delayed ones.
    fn takes(&self, more: usize) -> bool {
        matches!(&self.first, First::Held { bytes, .. } if bytes.len() + more <= COALESCE_BYTES_MAX)
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncRead for DelayedFirstWrite<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Poll::Ready(read) = Pin::new(&mut this.io).poll_read(cx, buf) {
            if let First::Held {
                has_read: heard, ..
            } = &mut this.first
            {
                *heard = true;
            }
            return Poll::Ready(read);
        }
        let leaves = match &mut this.first {
            First::Held { bytes, .. } if bytes.is_empty() => false,
            First::Held {
                rests,
                has_read: heard,
                ..
            } => {
                *rests += 1;
                *rests > YIELDS_BEFORE_FLUSH || !*heard && *rests >= SILENT_RESTS
            }
            First::Leaving { .. } => true,
            First::Gone => return Poll::Pending,
        };
        // Another poll may bring more bytes to send in the same packet.
        if !leaves {
            wake_after_others(cx);
        } else if let Poll::Ready(Err(e)) = this.poll_leave(cx) {
            return Poll::Ready(Err(e));
        }
        Poll::Pending
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for DelayedFirstWrite<IO> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let all = bufs.iter().map(|buf| buf.len()).sum();
        if this.takes(all)
            && let First::Held { bytes, .. } = &mut this.first
        {
            bufs.iter().for_each(|buf| bytes.extend_from_slice(buf));
            return Poll::Ready(Ok(all));
        }
        // Too many bytes to delay: the earlier ones go first, so that the order stays.
        if !matches!(this.first, First::Gone) {
            ready!(this.poll_leave(cx))?;
        }
        Pin::new(&mut this.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        match &this.first {
            First::Held { bytes, rests, .. }
                if !bytes.is_empty() && *rests < YIELDS_BEFORE_FLUSH =>
            {
                wake_after_others(cx);
                Poll::Ready(Ok(()))
            }
            First::Held { bytes, .. } if bytes.is_empty() => Pin::new(&mut this.io).poll_flush(cx),
            _ => this.poll_leave(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !matches!(this.first, First::Gone) {
            ready!(this.poll_leave(cx))?;
        }
        Pin::new(&mut this.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    /// Counts the writes that reach the transport.
    struct CountedWrites {
        io: DuplexStream,
        writes: u32,
    }

    impl AsyncRead for CountedWrites {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_read(cx, buf)
        }
    }

    impl AsyncWrite for CountedWrites {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &[u8],
        ) -> Poll<io::Result<usize>> {
            self.writes += 1;
            Pin::new(&mut self.io).poll_write(cx, buf)
        }
        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_flush(cx)
        }
        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_shutdown(cx)
        }
    }

    fn pair() -> (DelayedFirstWrite<CountedWrites>, DuplexStream) {
        let (io, peer) = duplex(64 << 10);
        (
            DelayedFirstWrite::new(CountedWrites { io, writes: 0 }),
            peer,
        )
    }

    async fn expect_bytes(peer: &mut DuplexStream, want: &[u8]) {
        let mut got = vec![0; want.len()];
        tokio::time::timeout(Duration::from_secs(5), peer.read_exact(&mut got))
            .await
            .expect("in time")
            .unwrap();
        assert_eq!(got, want);
    }

    async fn write_and_flush(io: &mut DelayedFirstWrite<CountedWrites>, what: &[u8]) {
        io.write_all(what).await.unwrap();
        io.flush().await.unwrap();
    }

    #[tokio::test]
    async fn replies_to_the_first_read_are_sent_with_the_first_write() {
        let (mut io, mut peer) = pair();
        peer.write_all(b"preface").await.unwrap();
        let own = async {
            let mut got = [0; 7];
            write_and_flush(&mut io, b"settings ").await;
            io.read_exact(&mut got).await.unwrap();
            write_and_flush(&mut io, b"answer").await;
            io.read_exact(&mut got[..1]).await.unwrap();
            assert_eq!(io.io.writes, 1);
            write_and_flush(&mut io, b"more").await;
            assert_eq!(io.io.writes, 2, "afterwards nothing waits");
        };
        let other = async {
            expect_bytes(&mut peer, b"settings answer").await;
            peer.write_all(b"!").await.unwrap();
            expect_bytes(&mut peer, b"more").await;
        };
        tokio::join!(own, other);
    }

    #[tokio::test]
    async fn a_silent_peer_gets_the_first_write_after_the_timeout() {
        let (mut io, mut peer) = pair();
        write_and_flush(&mut io, b"settings").await;
        assert_eq!(io.io.writes, 0);
        let mut got = [0];
        tokio::select! {
            _ = io.read(&mut got) => panic!("the peer sent bytes"),
            () = expect_bytes(&mut peer, b"settings") => {}
        }
    }

    #[tokio::test]
    async fn much_waits_for_nothing() {
        let (mut io, mut peer) = pair();
        io.write_all(&[1; COALESCE_BYTES_MAX]).await.unwrap();
        assert_eq!(io.io.writes, 0);
        io.write_all(&[2]).await.unwrap();
        assert_eq!(io.io.writes, 2);
        expect_bytes(&mut peer, &[&[1; COALESCE_BYTES_MAX][..], &[2]].concat()).await;
    }

    #[tokio::test]
    async fn an_end_flushes_the_pending_write() {
        let (mut io, mut peer) = pair();
        write_and_flush(&mut io, b"goaway").await;
        io.shutdown().await.unwrap();
        expect_bytes(&mut peer, b"goaway").await;
    }
}
