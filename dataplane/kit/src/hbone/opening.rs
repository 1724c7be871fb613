//! The transport of a connection at its beginning: its first frames wait for each other and leave in one record and one packet, where each
//! would cost both ends a system call and a wake-up. Does nothing once they have left, and knows nothing of HTTP/2.

use std::cell::Cell;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// More than so many bytes wait for nothing.
const HELD_MAX: usize = 4 << 10;
/// A flush lets them leave once nothing was there to be read so often, and so does the next time that nothing is, as who waits for the peer's
/// first word may never flush again. Between two turns of the task all other ready tasks ran and the kernel was asked for what has come: one is
/// for the peer's preface, one for what the task that its request spawned made of it.
const RESTS: u8 = 3;
/// For a peer that has said nothing by then nobody waits any longer.
const SILENT_RESTS: u8 = 2;

/// A transport whose first bytes wait.
#[derive(Debug)]
pub(super) struct Opening<IO> {
    io: IO,
    first: First,
}

#[derive(Debug)]
enum First {
    Held {
        bytes: Vec<u8>,
        rests: u8,
        heard: bool,
    },
    Leaving {
        bytes: Vec<u8>,
        at: usize,
    },
    /// From here on all goes through.
    Gone,
}

impl<IO> Opening<IO> {
    pub(super) fn new(io: IO) -> Self {
        Self { io, first: First::Held { bytes: Vec::new(), rests: 0, heard: false } }
    }
}

/// A transport that counts the bytes read from it.
#[derive(Debug)]
pub(super) struct Counted<IO> {
    pub(super) io: IO,
    pub(super) read: Rc<Cell<u64>>,
}

impl<IO: AsyncRead + Unpin> AsyncRead for Counted<IO> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        this.read.set(this.read.get() + (buf.filled().len() - before) as u64);
        Poll::Ready(Ok(()))
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Counted<IO> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, buf)
    }
    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
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

/// Has the task run once more after all others that are ready, and after the kernel was asked.
fn again(cx: &mut Context<'_>) {
    let _ = pin!(tokio::task::yield_now()).poll(cx);
}

impl<IO: AsyncWrite + Unpin> Opening<IO> {
    /// Writes what was held, and flushes it.
    fn poll_leave(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let First::Held { bytes, .. } = &mut self.first {
            self.first = First::Leaving { bytes: std::mem::take(bytes), at: 0 };
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

    /// Whether what is written now waits: so much of it is there, and so much comes.
    fn takes(&self, more: usize) -> bool {
        matches!(&self.first, First::Held { bytes, .. } if bytes.len() + more <= HELD_MAX)
    }
}

impl<IO: AsyncRead + AsyncWrite + Unpin> AsyncRead for Opening<IO> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Poll::Ready(read) = Pin::new(&mut this.io).poll_read(cx, buf) {
            if let First::Held { heard, .. } = &mut this.first {
                *heard = true;
            }
            return Poll::Ready(read);
        }
        let leaves = match &mut this.first {
            First::Held { bytes, .. } if bytes.is_empty() => false,
            First::Held { rests, heard, .. } => {
                *rests += 1;
                *rests > RESTS || !*heard && *rests >= SILENT_RESTS
            }
            First::Leaving { .. } => true,
            First::Gone => return Poll::Pending,
        };
        if !leaves {
            again(cx);
        } else if let Poll::Ready(Err(e)) = this.poll_leave(cx) {
            return Poll::Ready(Err(e));
        }
        Poll::Pending
    }
}

impl<IO: AsyncWrite + Unpin> AsyncWrite for Opening<IO> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let all = bufs.iter().map(|buf| buf.len()).sum();
        if this.takes(all)
            && let First::Held { bytes, .. } = &mut this.first
        {
            bufs.iter().for_each(|buf| bytes.extend_from_slice(buf));
            return Poll::Ready(Ok(all));
        }
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
            First::Held { bytes, rests, .. } if !bytes.is_empty() && *rests < RESTS => {
                again(cx);
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

    /// Counts what leaves.
    struct Counting {
        io: DuplexStream,
        writes: u32,
    }

    impl AsyncRead for Counting {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.io).poll_read(cx, buf)
        }
    }

    impl AsyncWrite for Counting {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
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

    fn pair() -> (Opening<Counting>, DuplexStream) {
        let (io, peer) = duplex(64 << 10);
        (Opening::new(Counting { io, writes: 0 }), peer)
    }

    async fn hears(peer: &mut DuplexStream, want: &[u8]) {
        let mut got = vec![0; want.len()];
        tokio::time::timeout(Duration::from_secs(5), peer.read_exact(&mut got)).await.expect("in time").unwrap();
        assert_eq!(got, want);
    }

    async fn say(io: &mut Opening<Counting>, what: &[u8]) {
        io.write_all(what).await.unwrap();
        io.flush().await.unwrap();
    }

    #[tokio::test]
    async fn what_is_said_on_the_peers_first_word_leaves_with_the_own() {
        let (mut io, mut peer) = pair();
        peer.write_all(b"preface").await.unwrap();
        let own = async {
            let mut got = [0; 7];
            say(&mut io, b"settings ").await;
            io.read_exact(&mut got).await.unwrap();
            say(&mut io, b"answer").await;
            io.read_exact(&mut got[..1]).await.unwrap();
            assert_eq!(io.io.writes, 1);
            say(&mut io, b"more").await;
            assert_eq!(io.io.writes, 2, "afterwards nothing waits");
        };
        let other = async {
            hears(&mut peer, b"settings answer").await;
            peer.write_all(b"!").await.unwrap();
            hears(&mut peer, b"more").await;
        };
        tokio::join!(own, other);
    }

    #[tokio::test]
    async fn a_silent_peer_hears_the_first_word_all_the_same() {
        let (mut io, mut peer) = pair();
        say(&mut io, b"settings").await;
        assert_eq!(io.io.writes, 0);
        let mut got = [0];
        tokio::select! {
            _ = io.read(&mut got) => panic!("nobody said anything"),
            () = hears(&mut peer, b"settings") => {}
        }
    }

    #[tokio::test]
    async fn much_waits_for_nothing() {
        let (mut io, mut peer) = pair();
        io.write_all(&[1; HELD_MAX]).await.unwrap();
        assert_eq!(io.io.writes, 0);
        io.write_all(&[2]).await.unwrap();
        assert_eq!(io.io.writes, 2);
        hears(&mut peer, &[&[1; HELD_MAX][..], &[2]].concat()).await;
    }

    #[tokio::test]
    async fn an_end_says_what_waits() {
        let (mut io, mut peer) = pair();
        say(&mut io, b"goaway").await;
        io.shutdown().await.unwrap();
        hears(&mut peer, b"goaway").await;
    }
}
