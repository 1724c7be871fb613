//! A TLS 1.3 connection whose handshake somebody else did, and whose records the kernel seals and opens (kTLS). What is said in records
//! besides data is heard and said here, by the rules of [`RecordStream`](super::RecordStream); no handshake, no cryptography.
//!
//! There is no way back once the kernel has keys, so a connection is handed over whole, in front of its first record in each direction, or
//! not at all. A kernel before 6.14 cannot take other keys later: there, a connection ends when their time is over, and says so before.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use super::codec::{
    ALERT, CLOSING, Front, HANDSHAKE, HEADER, Opened, PLAINTEXT_MAX, RecordError, Said, Side, TAG, Talk, UPDATE, front, pair,
};
use super::schedule::{Parts, Secret, Suite};
use super::{Heard, Secrets, broken};
use crate::sys::{self, TlsKeys, TlsWay};
use crate::tls::stream::{Transport, Worn};

/// A reader with less room than this is served from a buffer, so that an alert comes whole.
const ROOM_MIN: usize = 1 << 10;
/// What a record is longer than its data: header, content type and tag.
const AROUND: u64 = (HEADER + 1 + TAG) as u64;
/// How long to wait, at first and at most, before looking again whether TCP has everything.
const LOOK: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// After so many reads the kernel is asked how many records they were.
const COUNT: u32 = 1 << 12;

/// What became of an attempt.
pub(in crate::tls) enum HandOver<IO> {
    Done(Box<KernelStream<IO>>),
    /// Nothing happened to the connection. The reason is a counter's label.
    Not(IO, &'static str),
}

/// The connection.
pub(in crate::tls) struct KernelStream<IO> {
    io: IO,
    side: Side,
    /// What came besides data.
    talk: Talk,
    /// Of what goes out, and of what comes in; for a key update only.
    own: Secret,
    peers: Secret,
    bits: usize,
    /// Opened and not yet read, from `read` on.
    kept: Vec<u8>,
    read: usize,
    heard: Heard,
    said_close: bool,
    /// An alert that is to be said.
    saying: Option<[u8; 2]>,
    /// The peer asked for new keys, and was not answered yet.
    owes_update: bool,
    /// Records under the present key, at least.
    records: u64,
    limit: u64,
    /// Reads that had records.
    reads: u32,
    worn: Worn,
    sealed: Sealed,
    look: Option<(Pin<Box<Sleep>>, Duration)>,
}

/// By what one can tell whether TCP has all that was sealed.
struct Sealed {
    /// What TCP had at the hand-over.
    before: u64,
    /// Records under former keys.
    records: u64,
    /// Their content, and that of the present key's.
    content: u64,
}

impl<IO> std::fmt::Debug for KernelStream<IO> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KernelStream {{ heard: {:?}, said_close: {} }}", self.heard, self.said_close)
    }
}

/// Whether keys can be replaced. Asked in front of the own key update alone: once that is said there must be new keys.
fn kernel_rekeys() -> bool {
    static REKEYS: LazyLock<bool> = LazyLock::new(|| {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let mut numbers = release.split(['.', '-']).map_while(|n| n.trim().parse::<u32>().ok());
        (numbers.next(), numbers.next()) >= (Some(6), Some(14))
    });
    *REKEYS
}

/// Records that are the keys' time.
#[cfg(not(test))]
fn limit() -> u64 {
    super::codec::RECORDS_MAX
}
#[cfg(test)]
use tests::limit;

/// What the peer sent behind the handshake, opened.
struct Early {
    plain: Vec<u8>,
    talk: Talk,
    records: u64,
}

/// Opens whole records with data, and tickets. `None`: there is more to it, and the kernel could not go on from there.
fn open_early(secrets: &Secrets<'_>, early: &[u8]) -> Result<Option<Early>, RecordError> {
    let (mut plain, mut records) = (Vec::new(), 0);
    if early.is_empty() {
        return Ok(Some(Early { plain, talk: Talk::new(secrets.side), records }));
    }
    let (_, mut opener) = pair(secrets.suite, secrets.side, secrets.client, secrets.server)?;
    // A copy, as it is opened in place and somebody else may have to do it again.
    let mut rest = &mut early.to_vec()[..];
    while !rest.is_empty() {
        let Ok(Front::Whole(whole)) = front(rest) else { return Ok(None) };
        let (record, behind) = std::mem::take(&mut rest).split_at_mut(whole);
        rest = behind;
        records += 1;
        match opener.open(record) {
            Ok(Opened::Data(length)) => plain.extend_from_slice(&record[HEADER..HEADER + length]),
            Ok(Opened::Control { update: false }) => {}
            _ => return Ok(None),
        }
    }
    Ok(opener.into_talk(records).map(|talk| Early { plain, talk, records }))
}

/// Gives the kernel the keys, where it can go on from where the handshake ended. `early` are bytes that were read behind the handshake's
/// last record.
///
/// # Errors
/// Of the kernel, if it took one direction and then refused the other: such a connection is of no use any more. [`RecordError::Keys`] for a
/// suite that is not of the mesh, or secrets that are not of the suite.
pub(in crate::tls) fn hand_over<IO: Transport>(io: IO, secrets: &Secrets<'_>, early: &[u8]) -> io::Result<HandOver<IO>> {
    let none = || broken(RecordError::Keys);
    let suite = Suite::of(secrets.suite).ok_or_else(none)?;
    let parts = |traffic| Parts::of(suite, traffic).ok_or_else(none);
    let (client, server) = (parts(secrets.client)?, parts(secrets.server)?);
    let (own, peers) = if secrets.side == Side::Client { (client, server) } else { (server, client) };
    let Some(tcp) = io.tcp() else { return Ok(HandOver::Not(io, "no_socket")) };
    let Some(early) = open_early(secrets, early).map_err(broken)? else { return Ok(HandOver::Not(io, "early")) };
    let keys = |parts: &Parts<'_>, sequence| TlsKeys::new(parts.key, &parts.iv, sequence).ok_or_else(none);
    let (out, into) = (keys(&own, 0)?, keys(&peers, early.records)?);
    let secret = |parts: &Parts<'_>| Secret::new(suite, parts.secret).ok_or_else(none);
    let (own_secret, peers_secret) = (secret(&own)?, secret(&peers)?);
    let attached = sys::tls_attach(tcp).and_then(|()| sys::tcp_given(tcp));
    let Ok(Some(before)) = attached else { return Ok(HandOver::Not(io, "refused")) };
    // Older kernels know only the other way, so that this one says first whether there will be both.
    if sys::tls_keys(tcp, TlsWay::In, &into).is_err() {
        return Ok(HandOver::Not(io, "refused"));
    }
    sys::tls_keys(tcp, TlsWay::Out, &out)?;
    Ok(HandOver::Done(Box::new(KernelStream {
        bits: own.key.len() * 8,
        io,
        side: secrets.side,
        talk: early.talk,
        own: own_secret,
        peers: peers_secret,
        kept: early.plain,
        read: 0,
        heard: Heard::Open,
        said_close: false,
        saying: None,
        owes_update: false,
        records: 0,
        limit: limit(),
        reads: 0,
        worn: Worn::new(),
        sealed: Sealed { before, records: 0, content: 0 },
        look: None,
    })))
}

/// The secret's successor, and what the kernel needs of it.
fn next(secret: &Secret) -> Result<(Secret, TlsKeys), RecordError> {
    let make = || {
        let next = secret.next()?;
        let traffic = next.traffic()?;
        let parts = Parts::of(next.suite(), &traffic)?;
        let keys = TlsKeys::new(parts.key, &parts.iv, 0)?;
        Some((next, keys))
    };
    make().ok_or(RecordError::Keys)
}

/// What the kernel means, where it speaks of records and not of the transport.
fn of_kernel(error: &io::Error) -> Option<RecordError> {
    match error.raw_os_error()? {
        libc::EBADMSG => Some(RecordError::BadRecord),
        libc::EMSGSIZE => Some(RecordError::Overflow),
        // A header that is not one of TLS.
        libc::EINVAL => Some(RecordError::Unexpected),
        _ => None,
    }
}

/// Reads records of one kind.
fn poll_records(tcp: &TcpStream, cx: &mut Context<'_>, room: &mut ReadBuf<'_>) -> Poll<io::Result<(usize, Option<u8>)>> {
    loop {
        ready!(tcp.poll_read_ready(cx))?;
        match tcp.try_io(Interest::READABLE, || sys::tls_receive(tcp, room)) {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            done => return Poll::Ready(done),
        }
    }
}

impl<IO> KernelStream<IO> {
    /// The transport below.
    pub(in crate::tls) fn get_ref(&self) -> &IO {
        &self.io
    }

    /// Resolves when most of the keys' time is over and they cannot be renewed.
    pub(in crate::tls) fn worn(&self) -> &Worn {
        &self.worn
    }

    /// What only tests say: so many records are the keys' time.
    #[cfg(test)]
    fn limit(&mut self, records: u64) {
        self.limit = records;
    }
}

impl<IO: Transport> KernelStream<IO> {
    fn tcp(&self) -> io::Result<&TcpStream> {
        // Was there when the kernel was given the connection.
        self.io.tcp().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Notes why the connection is over; `alert` is for the peer.
    fn end(&mut self, error: RecordError, alert: Option<[u8; 2]>) -> io::Error {
        self.heard = Heard::Broken(error);
        // The kernel notes that a record is bad as the socket's error, which would refuse the alert.
        let _ = self.tcp().and_then(|tcp| tcp.take_error());
        if let (Some(alert), false) = (alert, self.said_close) {
            (self.said_close, self.saying) = (true, Some(alert));
        }
        broken(error)
    }

    fn fail(&mut self, error: RecordError) -> io::Error {
        self.end(error, error.alert().map(|description| [2, description]))
    }

    /// Sends a record of `kind`.
    fn poll_send(&mut self, cx: &mut Context<'_>, kind: u8, content: &[u8]) -> Poll<io::Result<()>> {
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

    /// Looks whether it is time for another connection. The client sees it first, as it is the one who opens it: if both closed at once, the
    /// one would reset what the other says last.
    fn wear(&mut self, records: u64) {
        let most = if self.side == Side::Client { self.limit / 4 * 3 } else { self.limit / 8 * 7 };
        if records >= most && !kernel_rekeys() {
            self.worn.set();
        }
    }

    /// Looks at the peer's direction, now and then: its records are often read several at once.
    fn wear_of_peer(&mut self) {
        self.reads = self.reads.wrapping_add(1);
        if self.reads.is_multiple_of(COUNT)
            && let Ok(Ok(records)) = self.tcp().map(|tcp| sys::tls_records(tcp, TlsWay::In, self.bits))
        {
            self.wear(records);
        }
    }

    /// Says what is to be said besides data: an alert, or the key update that is owed.
    fn poll_say(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.owes_update && !self.said_close {
            ready!(self.poll_send(cx, HANDSHAKE, &UPDATE))?;
            self.owes_update = false;
            self.renew_own()?;
        }
        if let Some(alert) = self.saying {
            let said = ready!(self.poll_send(cx, ALERT, &alert));
            self.saying = None;
            return Poll::Ready(said);
        }
        Poll::Ready(Ok(()))
    }

    /// The peer was told that the next keys are used from here on.
    fn renew_own(&mut self) -> io::Result<()> {
        let (secret, keys) = next(&self.own).map_err(broken)?;
        let tcp = self.tcp()?;
        let under = sys::tls_records(tcp, TlsWay::Out, self.bits)?;
        sys::tls_keys(tcp, TlsWay::Out, &keys).map_err(|_| broken(RecordError::Rekey))?;
        (self.own, self.records) = (secret, 0);
        self.sealed.records += under;
        Ok(())
    }

    /// The peer said that it uses its next keys from here on.
    fn renew_peers(&mut self) -> Result<(), RecordError> {
        let (secret, keys) = next(&self.peers)?;
        let tcp = self.tcp().map_err(|_| RecordError::Keys)?;
        sys::tls_keys(tcp, TlsWay::In, &keys).map_err(|_| RecordError::Rekey)?;
        self.peers = secret;
        Ok(())
    }

    /// In front of data that goes out.
    fn poll_before(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.records >= self.limit {
            if !kernel_rekeys() {
                // In order: the peer has everything that was written.
                let error = self.end(RecordError::Rekey, Some(CLOSING));
                let _ = self.poll_say(cx);
                return Poll::Ready(Err(error));
            }
            self.owes_update = true;
        }
        self.poll_say(cx)
    }

    /// Does what a record's content asks for.
    fn obey(&mut self, said: Said) -> Result<(), RecordError> {
        match said {
            Said::Data | Said::Nothing => {}
            Said::Closed => self.heard = Heard::Closed,
            Said::Update { asked } => {
                self.renew_peers()?;
                self.owes_update |= asked;
            }
        }
        Ok(())
    }

    /// Reads once; data is in `buf` then, or kept.
    fn poll_receive(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let tcp = self.io.tcp().ok_or(io::ErrorKind::NotConnected)?;
        let small = buf.remaining() < ROOM_MIN;
        let received = if small {
            self.kept.resize(ROOM_MIN, 0);
            poll_records(tcp, cx, &mut ReadBuf::new(&mut self.kept))
        } else {
            poll_records(tcp, cx, buf)
        };
        let (got, kind) = match received {
            Poll::Ready(Ok(received)) => received,
            other => {
                self.kept = Vec::new();
                return other.map(|done| done.map(drop).map_err(|e| of_kernel(&e).map_or(e, |error| self.fail(error))));
            }
        };
        let Some(kind) = kind else {
            self.kept.clear();
            return Poll::Ready(Err(self.fail(RecordError::Truncated)));
        };
        self.wear_of_peer();
        let at = buf.filled().len();
        let content = if small { &self.kept[..got] } else { &buf.initialized()[at..at + got] };
        let said = self.talk.heard(kind, content);
        let data = if said == Ok(Said::Data) { got } else { 0 };
        if small {
            self.kept.truncate(data);
        } else {
            buf.advance(data);
        }
        Poll::Ready(said.and_then(|said| self.obey(said)).map_err(|error| self.fail(error)))
    }

    /// Ready once TCP has everything that the kernel sealed. What it seals when TCP is full it sends later, unless TCP was told of an end.
    fn poll_given(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if let Some((sleep, _)) = &mut self.look {
                ready!(sleep.as_mut().poll(cx));
            }
            let tcp = self.tcp()?;
            let records = self.sealed.records + sys::tls_records(tcp, TlsWay::Out, self.bits)?;
            let all = self.sealed.before + self.sealed.content + records * AROUND;
            if sys::tcp_given(tcp)?.is_none_or(|given| given >= all) {
                self.look = None;
                return Poll::Ready(Ok(()));
            }
            let wait = self.look.take().map_or(LOOK.0, |(_, wait)| (wait * 2).min(LOOK.1));
            self.look = Some((Box::pin(tokio::time::sleep_until(Instant::now() + wait)), wait));
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
                self.wear(self.records);
                Poll::Ready(Ok(n))
            }
            // The kernel says once what is wrong with the other direction, to whoever asks first.
            Err(e) => {
                let error = of_kernel(&e).map_or(e, |error| self.fail(error));
                let _ = self.poll_say(cx);
                Poll::Ready(Err(error))
            }
        }
    }
}

impl<IO: Transport> AsyncRead for KernelStream<IO> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        loop {
            if this.read < this.kept.len() {
                let n = (this.kept.len() - this.read).min(buf.remaining());
                buf.put_slice(&this.kept[this.read..this.read + n]);
                this.read += n;
                return Poll::Ready(Ok(()));
            }
            this.read = 0;
            this.kept.clear();
            if buf.filled().len() > before || buf.remaining() == 0 {
                return Poll::Ready(Ok(()));
            }
            match this.heard {
                Heard::Closed => return Poll::Ready(Ok(())),
                Heard::Broken(error) => return Poll::Ready(Err(broken(error))),
                Heard::Open => {}
            }
            let received = ready!(this.poll_receive(cx, buf));
            if this.owes_update || this.saying.is_some() {
                // Best effort: what does not go now goes with the next write or flush.
                let said = this.poll_say(cx);
                if let (Ok(()), Poll::Ready(Err(e))) = (&received, said) {
                    return Poll::Ready(Err(e));
                }
            }
            received?;
        }
    }
}

impl<IO: Transport> AsyncWrite for KernelStream<IO> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.get_mut().poll_seal(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        self.get_mut().poll_seal(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_say(cx))?;
        Pin::new(&mut this.io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.said_close {
            (this.said_close, this.saying) = (true, Some(CLOSING));
        }
        ready!(this.poll_say(cx))?;
        ready!(this.poll_given(cx))?;
        Pin::new(&mut this.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests;
