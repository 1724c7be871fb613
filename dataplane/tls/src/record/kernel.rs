//! A TLS 1.3 connection after a remote handshake whose records the kernel encrypts and decrypts
//! (kTLS). Content other than data is handled here, by the rules of
//! [`RecordStream`](super::RecordStream). This module performs no handshake and no cryptography.
//! Start with [`hand_over`].
//!
//! The kernel cannot give a connection back once it has keys. So a connection is handed over before
//! its first record in each direction, or not at all. A kernel before 6.14 cannot accept new keys
//! later: there, a connection ends when its keys reach their limit, and its rotate hint is set
//! before.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use canal_net::sys::{self, TlsDirection, TlsKeys};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use super::codec::{
    ALERT, CLOSING, DecryptedRecord, EndpointRole, HANDSHAKE, HEADER, PLAINTEXT_MAX,
    PostHandshakeReader, RecordContent, RecordError, RecordPrefix, TAG, UPDATE, front, pair,
};
use super::schedule::{MeshCipherSuite, TrafficKeyParts, TrafficSecret};
use super::{ReceiveState, TrafficSecrets, broken};
use crate::transport::{RotateHint, Transport};

/// Minimum space of a reader. A reader with less is served from a buffer, so that an alert arrives
/// in one piece.
/// An alert has two bytes; the rest lets a short reader get more from one system call.
const ROOM_MIN: usize = 1 << 10;
/// Bytes of a record in addition to its data: header, content type and tag.
const AROUND: u64 = (HEADER + 1 + TAG) as u64;
/// First and longest wait before the next check whether TCP has all bytes. TCP has them within a
/// round trip as a rule, so the first is short.
const SEND_QUEUE_POLL_BACKOFF: (Duration, Duration) =
    (Duration::from_millis(1), Duration::from_millis(50));

/// Number of reads after which the kernel is queried for the number of records. With full records
/// in reads of 256 KiB, 65,536 records pass between two queries, far fewer than the quarter of 2^24
/// that is left when the connection stops taking new streams.
const COUNT: u32 = 1 << 12;

/// Result of a hand-over attempt.
pub(crate) enum KtlsHandover<IO> {
    Done(Box<KernelStream<IO>>),
    /// The connection is unchanged. The reason is a counter's label.
    Not(IO, &'static str),
}

/// A connection whose records the kernel encrypts and decrypts.
pub struct KernelStream<IO> {
    io: IO,
    side: EndpointRole,
    /// Reader of the content other than data.
    post_handshake: PostHandshakeReader,
    /// Secrets of both directions, which are used for key updates only.
    own: TrafficSecret,
    peers: TrafficSecret,
    bits: usize,
    /// Decrypted bytes; those from `read` on are not read yet.
    plaintext: Vec<u8>,
    read: usize,
    receive_state: ReceiveState,
    said_close: bool,
    /// Alert that waits to be sent.
    saying: Option<[u8; 2]>,
    /// The peer requested a key update that has not been sent yet.
    owes_update: bool,
    /// Minimum number of records under the present key.
    records: u64,
    limit: u64,
    /// Number of reads that returned records.
    reads: u32,
    rotate_hint: RotateHint,
    sealed: SentRecordCount,
    queue_poll: Option<(Pin<Box<Sleep>>, Duration)>,
}

/// Counts that show whether TCP has all encrypted bytes.
struct SentRecordCount {
    /// Bytes that TCP had at the hand-over.
    before: u64,
    /// Number of records under earlier keys.
    records: u64,
    /// Content bytes of those records and of the records under the present key.
    content: u64,
}

impl<IO> std::fmt::Debug for KernelStream<IO> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "KernelStream {{ receive_state: {:?}, said_close: {} }}",
            self.receive_state, self.said_close
        )
    }
}

/// Returns whether the kernel can replace keys. It matters only before this side's own key update:
/// once that is sent, there must be new keys.
pub(crate) fn kernel_rekeys() -> bool {
    static REKEYS: LazyLock<bool> = LazyLock::new(|| {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut numbers = release
            .split(['.', '-'])
            .map_while(|n| n.trim().parse::<u32>().ok());
        (numbers.next(), numbers.next()) >= (Some(6), Some(14))
    });
    *REKEYS
}

/// Returns the number of records that keys may protect, which tests shorten.
fn limit() -> u64 {
    #[cfg(any(test, feature = "testing"))]
    if let Some(records) = crate::testing::records_max() {
        return records;
    }
    super::codec::RECORDS_MAX
}

/// Records that the peer sent directly after the handshake, decrypted.
struct EarlyRecords {
    plain: Vec<u8>,
    post_handshake: PostHandshakeReader,
    records: u64,
}

/// Decrypts complete records with data, and tickets. `None` means that there is other content,
/// after which the kernel could not continue.
fn open_early(
    secrets: &TrafficSecrets<'_>,
    early: &[u8],
) -> Result<Option<EarlyRecords>, RecordError> {
    let (mut plain, mut records) = (Vec::new(), 0);
    if early.is_empty() {
        return Ok(Some(EarlyRecords {
            plain,
            post_handshake: PostHandshakeReader::new(secrets.side),
            records,
        }));
    }
    let (_, mut opener) = pair(secrets.suite, secrets.side, secrets.client, secrets.server)?;
    // The records are copied, because decryption is in place and the user-space record layer may
    // have to repeat it.
    let mut rest = &mut early.to_vec()[..];
    while !rest.is_empty() {
        let Ok(RecordPrefix::Whole(whole)) = front(rest) else {
            return Ok(None);
        };
        let (record, behind) = std::mem::take(&mut rest).split_at_mut(whole);
        rest = behind;
        records += 1;
        match opener.open(record) {
            Ok(DecryptedRecord::Data(length)) => {
                plain.extend_from_slice(&record[HEADER..HEADER + length])
            }
            Ok(DecryptedRecord::Control { update: false }) => {}
            _ => return Ok(None),
        }
    }
    Ok(opener
        .into_talk(records)
        .map(|post_handshake| EarlyRecords {
            plain,
            post_handshake,
            records,
        }))
}

/// Gives the kernel the keys, if it can continue where the handshake ended. `early` are bytes that
/// were read after the handshake's last record.
///
/// # Errors
/// The kernel accepted one direction and then refused the other, so the connection is unusable.
/// [`RecordError::Keys`] for a suite that the mesh does not use, or for secrets that do not fit the
/// suite.
pub(crate) fn hand_over<IO: Transport>(
    io: IO,
    secrets: &TrafficSecrets<'_>,
    early: &[u8],
) -> io::Result<KtlsHandover<IO>> {
    let none = || broken(RecordError::Keys);
    let suite = MeshCipherSuite::of(secrets.suite).ok_or_else(none)?;
    let parts = |traffic| TrafficKeyParts::of(suite, traffic).ok_or_else(none);
    let (client, server) = (parts(secrets.client)?, parts(secrets.server)?);
    let (own, peers) = if secrets.side == EndpointRole::Client {
        (client, server)
    } else {
        (server, client)
    };
    let Some(tcp) = io.tcp() else {
        return Ok(KtlsHandover::Not(io, "no_socket"));
    };
    let Some(early) = open_early(secrets, early).map_err(broken)? else {
        // The kernel could not continue after this content, so the record layer stays in this
        // process.
        return Ok(KtlsHandover::Not(io, "early"));
    };
    let keys = |parts: &TrafficKeyParts<'_>, sequence| {
        TlsKeys::new(parts.key, &parts.iv, sequence).ok_or_else(none)
    };
    // This side has sent no record with its application keys yet.
    let (out, into) = (keys(&own, 0)?, keys(&peers, early.records)?);
    let secret =
        |parts: &TrafficKeyParts<'_>| TrafficSecret::new(suite, parts.secret).ok_or_else(none);
    let (own_secret, peers_secret) = (secret(&own)?, secret(&peers)?);
    let attached = sys::tls_attach(tcp).and_then(|()| sys::tcp_bytes_queued(tcp));
    // Without the number of bytes that TCP has, the sent records could not be counted.
    let Ok(Some(before)) = attached else {
        return Ok(KtlsHandover::Not(io, "refused"));
    };
    // Older kernels support only the sending direction. So the receiving one is tried first, while
    // the hand-over can still be refused.
    if sys::tls_keys(tcp, TlsDirection::In, &into).is_err() {
        return Ok(KtlsHandover::Not(io, "refused"));
    }
    sys::tls_keys(tcp, TlsDirection::Out, &out)?;
    Ok(KtlsHandover::Done(Box::new(KernelStream {
        // The kernel's interface names the suite by the size of its key.
        bits: own.key.len() * 8,
        io,
        side: secrets.side,
        post_handshake: early.post_handshake,
        own: own_secret,
        peers: peers_secret,
        plaintext: early.plain,
        read: 0,
        receive_state: ReceiveState::Open,
        said_close: false,
        saying: None,
        owes_update: false,
        records: 0,
        limit: limit(),
        reads: 0,
        rotate_hint: RotateHint::new(),
        sealed: SentRecordCount {
            before,
            records: 0,
            content: 0,
        },
        queue_poll: None,
    })))
}

/// Returns the next secret, and its keys for the kernel.
fn next(secret: &TrafficSecret) -> Result<(TrafficSecret, TlsKeys), RecordError> {
    let make = || {
        let next = secret.next()?;
        let traffic = next.traffic()?;
        let parts = TrafficKeyParts::of(next.suite(), &traffic)?;
        let keys = TlsKeys::new(parts.key, &parts.iv, 0)?;
        Some((next, keys))
    };
    make().ok_or(RecordError::Keys)
}

/// Returns the record error that the kernel reports, or `None` for an error of the transport.
fn of_kernel(error: &io::Error) -> Option<RecordError> {
    match error.raw_os_error()? {
        libc::EBADMSG => Some(RecordError::BadRecord),
        libc::EMSGSIZE => Some(RecordError::Overflow),
        // The record header is not one of TLS.
        libc::EINVAL => Some(RecordError::Unexpected),
        _ => None,
    }
}

/// Reads records of one type.
fn poll_records(
    tcp: &TcpStream,
    cx: &mut Context<'_>,
    free: &mut ReadBuf<'_>,
) -> Poll<io::Result<(usize, Option<u8>)>> {
    loop {
        ready!(tcp.poll_read_ready(cx))?;
        match tcp.try_io(Interest::READABLE, || sys::tls_receive(tcp, free)) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            done => return Poll::Ready(done),
        }
    }
}

impl<IO> KernelStream<IO> {
    /// Returns the transport below TLS.
    pub(crate) fn get_ref(&self) -> &IO {
        &self.io
    }

    /// Returns the hint that is set when the keys are near their limit and cannot be renewed.
    pub(crate) fn rotate_hint(&self) -> &RotateHint {
        &self.rotate_hint
    }

    /// Sets the number of records that keys may protect, for tests.
    #[cfg(test)]
    fn limit(&mut self, records: u64) {
        self.limit = records;
    }
}

impl<IO: Transport> KernelStream<IO> {
    fn tcp(&self) -> io::Result<&TcpStream> {
        // The hand-over to the kernel required the socket.
        self.io
            .tcp()
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Records why the connection has ended; `alert` is for the peer.
    fn end(&mut self, error: RecordError, alert: Option<[u8; 2]>) -> io::Error {
        self.receive_state = ReceiveState::Broken(error);
        // The kernel stores a bad record as the socket's error, which would make it refuse the
        // alert.
        let _ = self.tcp().and_then(|tcp| tcp.take_error());
        if let (Some(alert), false) = (alert, self.said_close) {
            (self.said_close, self.saying) = (true, Some(alert));
        }
        broken(error)
    }

    fn fail(&mut self, error: RecordError) -> io::Error {
        self.end(error, error.alert().map(|description| [2, description]))
    }

    /// Sends a record of type `kind`.
    fn poll_send(
        &mut self,
        cx: &mut Context<'_>,
        kind: u8,
        content: &[u8],
    ) -> Poll<io::Result<()>> {
        loop {
            let tcp = self.tcp()?;
            ready!(tcp.poll_write_ready(cx))?;
            match tcp.try_io(Interest::WRITABLE, || sys::tls_send(tcp, kind, content)) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Poll::Ready(Err(e)),
                Ok(()) => {
                    self.records += 1;
                    self.sealed.content += content.len() as u64;
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }

    /// Sets the rotate hint when the keys are near their limit. The client sets it earlier, because
    /// it opens the next connection. If both closed at once, one side's reset would cut off the
    /// other's last data.
    fn check_key_usage(&mut self, records: u64) {
        let most = if self.side == EndpointRole::Client {
            self.limit / 4 * 3
        } else {
            self.limit / 8 * 7
        };
        if records >= most && !kernel_rekeys() {
            self.rotate_hint.set();
        }
    }

    /// Checks the peer's direction from time to time, because one read often returns several of its
    /// records.
    fn check_peer_key_usage(&mut self) {
        self.reads = self.reads.wrapping_add(1);
        if self.reads.is_multiple_of(COUNT)
            && let Ok(Ok(records)) = self
                .tcp()
                .map(|tcp| sys::tls_records(tcp, TlsDirection::In, self.bits))
        {
            self.check_key_usage(records);
        }
    }

    /// Sends pending content other than data: an alert, or a key update.
    fn poll_send_pending(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.owes_update && !self.said_close {
            ready!(self.poll_send(cx, HANDSHAKE, &UPDATE))?;
            self.owes_update = false;
            self.renew_own()?;
        }
        if let Some(alert) = self.saying {
            let sent = ready!(self.poll_send(cx, ALERT, &alert));
            self.saying = None;
            return Poll::Ready(sent);
        }
        Poll::Ready(Ok(()))
    }

    /// Replaces this side's keys, after the peer was notified.
    fn renew_own(&mut self) -> io::Result<()> {
        let (secret, keys) = next(&self.own).map_err(broken)?;
        let tcp = self.tcp()?;
        let under = sys::tls_records(tcp, TlsDirection::Out, self.bits)?;
        sys::tls_keys(tcp, TlsDirection::Out, &keys).map_err(|_| broken(RecordError::Rekey))?;
        (self.own, self.records) = (secret, 0);
        self.sealed.records += under;
        Ok(())
    }

    /// Replaces the peer's keys, after the peer announced that it uses the next ones.
    fn renew_peers(&mut self) -> Result<(), RecordError> {
        let (secret, keys) = next(&self.peers)?;
        let tcp = self.tcp().map_err(|_| RecordError::Keys)?;
        sys::tls_keys(tcp, TlsDirection::In, &keys).map_err(|_| RecordError::Rekey)?;
        self.peers = secret;
        Ok(())
    }

    /// Sends the content that must precede outgoing data, and checks the key limit.
    fn poll_before(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.records >= self.limit {
            if !kernel_rekeys() {
                // The end is orderly: the peer gets all data that was written.
                let error = self.end(RecordError::Rekey, Some(CLOSING));
                let _ = self.poll_send_pending(cx);
                return Poll::Ready(Err(error));
            }
            self.owes_update = true;
        }
        self.poll_send_pending(cx)
    }

    /// Performs the action that a record's content requires.
    fn apply_content(&mut self, content: RecordContent) -> Result<(), RecordError> {
        match content {
            RecordContent::Data | RecordContent::Nothing => {}
            RecordContent::Closed => self.receive_state = ReceiveState::Closed,
            RecordContent::Update { is_requested } => {
                self.renew_peers()?;
                self.owes_update |= is_requested;
            }
        }
        Ok(())
    }

    /// Reads once. Data is then in `buf` or in `plaintext`.
    fn poll_receive(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let tcp = self.io.tcp().ok_or(io::ErrorKind::NotConnected)?;
        let small = buf.remaining() < ROOM_MIN;
        // A short reader is served from a buffer, so that an alert arrives in one piece.
        let received = if small {
            self.plaintext.resize(ROOM_MIN, 0);
            poll_records(tcp, cx, &mut ReadBuf::new(&mut self.plaintext))
        } else {
            poll_records(tcp, cx, buf)
        };
        let (got, kind) = match received {
            Poll::Ready(Ok(received)) => received,
            other => {
                // An idle connection holds no buffer while it waits.
                self.plaintext = Vec::new();
                return other.map(|done| {
                    done.map(drop)
                        .map_err(|e| of_kernel(&e).map_or(e, |error| self.fail(error)))
                });
            }
        };
        // Without a record type, TCP ended before close_notify.
        let Some(kind) = kind else {
            self.plaintext.clear();
            return Poll::Ready(Err(self.fail(RecordError::Truncated)));
        };
        self.check_peer_key_usage();
        let at = buf.filled().len();
        let content = if small {
            &self.plaintext[..got]
        } else {
            &buf.initialized()[at..at + got]
        };
        let content_result = self.post_handshake.process_content(kind, content);
        // Only data stays in the buffer; other content was processed above.
        let data = if content_result == Ok(RecordContent::Data) {
            got
        } else {
            0
        };
        if small {
            self.plaintext.truncate(data);
        } else {
            buf.advance(data);
        }
        Poll::Ready(
            content_result
                .and_then(|content_result| self.apply_content(content_result))
                .map_err(|error| self.fail(error)),
        )
    }

    /// Ready once TCP has all bytes that the kernel encrypted. When TCP is full, the kernel sends
    /// the rest later, unless TCP was shut down before.
    fn poll_given(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if let Some((sleep, _)) = &mut self.queue_poll {
                ready!(sleep.as_mut().poll(cx));
            }
            let tcp = self.tcp()?;
            let records =
                self.sealed.records + sys::tls_records(tcp, TlsDirection::Out, self.bits)?;
            let all = self.sealed.before + self.sealed.content + records * AROUND;
            if sys::tcp_bytes_queued(tcp)?.is_none_or(|given| given >= all) {
                self.queue_poll = None;
                return Poll::Ready(Ok(()));
            }
            let wait = self
                .queue_poll
                .take()
                .map_or(SEND_QUEUE_POLL_BACKOFF.0, |(_, wait)| {
                    (wait * 2).min(SEND_QUEUE_POLL_BACKOFF.1)
                });
            self.queue_poll = Some((
                Box::pin(tokio::time::sleep_until(Instant::now() + wait)),
                wait,
            ));
        }
    }

    fn poll_seal(&mut self, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        if self.said_close {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        ready!(self.poll_before(cx))?;
        match ready!(Pin::new(&mut self.io).poll_write_vectored(cx, bufs)) {
            Ok(n) => {
                self.records += n.div_ceil(PLAINTEXT_MAX) as u64;
                self.sealed.content += n as u64;
                self.check_key_usage(self.records);
                Poll::Ready(Ok(n))
            }
            // The kernel reports an error of the other direction once, to the first caller.
            Err(e) => {
                let error = of_kernel(&e).map_or(e, |error| self.fail(error));
                let _ = self.poll_send_pending(cx);
                Poll::Ready(Err(error))
            }
        }
    }
}

impl<IO: Transport> AsyncRead for KernelStream<IO> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        loop {
            if this.read < this.plaintext.len() {
                let n = (this.plaintext.len() - this.read).min(buf.remaining());
                buf.put_slice(&this.plaintext[this.read..this.read + n]);
                this.read += n;
                return Poll::Ready(Ok(()));
            }
            this.read = 0;
            this.plaintext.clear();
            if buf.filled().len() > before || buf.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            match this.receive_state {
                ReceiveState::Closed => return Poll::Ready(Ok(())),
                ReceiveState::Broken(error) => return Poll::Ready(Err(broken(error))),
                ReceiveState::Open => {}
            }
            let received = ready!(this.poll_receive(cx, buf));
            if this.owes_update || this.saying.is_some() {
                // Best effort: content that is not sent now goes with the next write or flush.
                let sent = this.poll_send_pending(cx);
                if let (Ok(()), Poll::Ready(Err(e))) = (&received, sent) {
                    return Poll::Ready(Err(e));
                }
            }
            received?;
        }
    }
}

impl<IO: Transport> AsyncWrite for KernelStream<IO> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_seal(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().poll_seal(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send_pending(cx))?;
        Pin::new(&mut this.io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.said_close {
            (this.said_close, this.saying) = (true, Some(CLOSING));
        }
        ready!(this.poll_send_pending(cx))?;
        ready!(this.poll_given(cx))?;
        Pin::new(&mut this.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
