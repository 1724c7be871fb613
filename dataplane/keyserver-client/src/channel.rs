//! One mTLS connection to one key server with many requests in flight: it sends frames in batches,
//! and passes answers to their requests. `key_client` selects the key server.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use canal_net::sys::{self, ConnectOptions};
use canal_tls::{Credential, PeerTrustWatch, PeerVerifier, SecretBuffer, TrustView};
use canal_wire::keyrpc::{self, KeyRequest, KeyResponse};
use hashbrown::HashMap;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use zeroize::Zeroizing;

use super::counts::{KeyClientCounters, KeyServerFailure};
use super::server_address::KeyServerTarget;
use super::write_pacing::{OutstandingFrame, WritePacer};

/// Maximum number of requests in flight on one channel. Half of what the key server permits one
/// requester over all its channels (8,192).
pub const IN_FLIGHT_MAX: usize = 4096;
/// Maximum number of bytes that wait to be written on one channel. 1 KiB for each request in
/// flight. Beyond either limit the request goes to the next server.
pub const QUEUE_MAX: usize = 4 << 20;
/// Minimum space for a read. One TLS record.
const READ_BYTES: usize = 16 << 10;
/// Maximum time for which frames are delayed; see [`WritePacer`]. A handshake takes more than a
/// round trip and a signature anyway, so a millisecond does not show.
const FRAME_DELAY_MAX: Duration = Duration::from_millis(1);
/// Timeout of TCP and TLS to a key server. TCP repeats a lost SYN once within it, after 1 s.
/// Requests go to other servers meanwhile.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Silence after which a PING is sent, and after which the channel is closed if it lasts as long
/// again. An idle channel to a dead server is found after 10 s; under load, `ANSWER_TIMEOUT` and
/// the circuit breaker find it sooner.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Number of parts of a timeout, see [`KeyServerCall::answer_within`]. With four parts, a stall of
/// the process as a whole costs a quarter of the timeout at most.
const TIMEOUT_PARTS: u32 = 4;
/// Interval at which the answer to a PING is checked. A fiftieth of the timeout (`ANSWER_TIMEOUT`).
const PING_CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// Request ID of PINGs; handshakes count up from 1.
const PING_ID: u64 = 0;

/// A key server's answer to one request.
pub(super) enum KeyServerAnswer {
    Send(Vec<u8>),
    Done(Box<OwnedHandshakeResult>),
    Signature(Vec<u8>),
    Certificates(Vec<Vec<u8>>),
    Refused(keyrpc::KeyRefusal, String),
}

/// Owned form of the key server's handshake result.
pub(super) struct OwnedHandshakeResult {
    pub(super) bytes: Vec<u8>,
    pub(super) consumed: usize,
    pub(super) suite: u16,
    pub(super) alpn: Vec<u8>,
    pub(super) client_traffic: Zeroizing<Vec<u8>>,
    pub(super) server_traffic: Zeroizing<Vec<u8>>,
    pub(super) peer: canal_model::identity::Identity,
    pub(super) leaf: Vec<u8>,
    /// Certificates above the leaf. Empty, and so without cost, if a root signs leaves.
    pub(super) above: Vec<u8>,
}

/// A connection to a key server, open or being opened. Clones share it. Any thread may send
/// requests; the thread that created it runs it.
#[derive(Clone)]
pub(super) struct KeyServerChannel {
    inner: Arc<Inner>,
}

struct Inner {
    target: KeyServerTarget,
    counts: Arc<KeyClientCounters>,
    table: Mutex<PendingRequests>,
    wake: Notify,
    over: AtomicBool,
    why: Mutex<KeyServerFailure>,
    started: Instant,
    /// Milliseconds from `started` to the last read.
    last_read_millis: AtomicU64,
}

#[derive(Default)]
struct PendingRequests {
    out: Vec<u8>,
    frames: u64,
    waiting: HashMap<u64, PendingRequest>,
    last: u64,
    pace: WritePacer,
}

/// Next action of the writer.
enum WriteTurn {
    Write(Vec<u8>, u64),
    /// Wait for more frames, for at most [`FRAME_DELAY_MAX`].
    Hold,
    Rest,
}

impl PendingRequests {
    /// Returns whether the writer must be woken for the bytes after the first `before`, because it
    /// must write them or start to delay.
    fn must_wake_writer(&self, before: usize) -> bool {
        before == 0 || self.pace.should_write(self.out.len())
    }

    fn turn(&mut self) -> WriteTurn {
        if self.pace.should_write(self.out.len()) {
            self.pace.record_write();
            return WriteTurn::Write(
                std::mem::take(&mut self.out),
                std::mem::take(&mut self.frames),
            );
        }
        if self.out.is_empty() {
            WriteTurn::Rest
        } else {
            WriteTurn::Hold
        }
    }
}

/// Answers to one request so far, and the waker of its waiter. It is an entry of the table, because
/// a queue per request would cost more than the request.
#[derive(Default)]
struct PendingRequest {
    answers: VecDeque<KeyServerAnswer>,
    waker: Option<Waker>,
    frame: OutstandingFrame,
}

/// One request with its answers. It is abandoned if it is dropped before its end.
pub(super) struct KeyServerCall {
    channel: KeyServerChannel,
    id: u64,
    is_over: bool,
    sent_at: Instant,
}

impl KeyServerChannel {
    /// Starts the channel on the calling runtime. Requests may be sent at once; they wait until it
    /// is connected.
    pub(super) fn start(
        place: KeyServerTarget,
        own: Credential,
        trust: TrustView,
        counts: Arc<KeyClientCounters>,
    ) -> Self {
        let inner = Arc::new(Inner {
            target: place,
            counts,
            table: Mutex::default(),
            wake: Notify::new(),
            over: AtomicBool::new(false),
            why: Mutex::new(KeyServerFailure::Lost),
            started: Instant::now(),
            last_read_millis: AtomicU64::new(0),
        });
        let channel = Self { inner };
        let (mine, guard) = (channel.clone(), FailPendingOnDrop(channel.clone()));
        tokio::spawn(async move {
            let _guard = guard;
            if let Err((why, text)) = mine.carry(own, trust).await {
                *mine
                    .inner
                    .why
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner) = why;
                tracing::warn!(server = mine.inner.target.name, address = %mine.inner.target.address, reason = why.name(), why = text, "key client: the channel to a key server ended; the next request opens another");
            }
        });
        channel
    }

    /// Returns whether the channel has ended, so that no request can be sent.
    pub(super) fn is_over(&self) -> bool {
        self.inner.over.load(Relaxed)
    }

    /// Returns the reason why the channel ended.
    pub(super) fn why(&self) -> KeyServerFailure {
        *self
            .inner
            .why
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a request and returns the call that receives its answers.
    pub(super) fn send_request(
        &self,
        request: &KeyRequest<'_>,
    ) -> Result<KeyServerCall, KeyServerFailure> {
        let mut table = self.table();
        if self.is_over() {
            return Err(self.why());
        }
        if table.waiting.len() >= IN_FLIGHT_MAX || table.out.len() >= QUEUE_MAX {
            return Err(KeyServerFailure::Busy);
        }
        let (id, before) = (table.last + 1, table.out.len());
        request
            .encode(id, &mut table.out)
            .map_err(|_| KeyServerFailure::Malformed)?;
        (table.last, table.frames) = (id, table.frames + 1);
        let mut waiting = PendingRequest::default();
        table.pace.queue(&mut waiting.frame);
        table.waiting.insert(id, waiting);
        self.wake_writer(table, before);
        Ok(KeyServerCall {
            channel: self.clone(),
            id,
            is_over: false,
            sent_at: Instant::now(),
        })
    }

    fn send_frame(&self, id: u64, request: &KeyRequest<'_>) -> Result<(), KeyServerFailure> {
        let mut table = self.table();
        if self.is_over() {
            return Err(self.why());
        }
        let before = table.out.len();
        request
            .encode(id, &mut table.out)
            .map_err(|_| KeyServerFailure::Malformed)?;
        table.frames += 1;
        let PendingRequests { waiting, pace, .. } = &mut *table;
        if let Some(waiting) = waiting.get_mut(&id) {
            pace.queue(&mut waiting.frame);
        }
        self.wake_writer(table, before);
        Ok(())
    }

    fn wake_writer(&self, table: MutexGuard<'_, PendingRequests>, before: usize) {
        let tell = table.must_wake_writer(before);
        drop(table);
        if tell {
            self.inner.wake.notify_one();
        }
    }

    fn table(&self) -> MutexGuard<'_, PendingRequests> {
        self.inner
            .table
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn last_read(&self) -> Instant {
        self.inner.started + Duration::from_millis(self.inner.last_read_millis.load(Relaxed))
    }

    /// Connects and runs the channel until it ends.
    async fn carry(
        &self,
        own: Credential,
        trust: TrustView,
    ) -> Result<(), (KeyServerFailure, String)> {
        let up = tokio::time::timeout(CONNECT_TIMEOUT, self.connect(own, trust)).await;
        let (stream, mut trust_watch) = up.map_err(|_| {
            (
                KeyServerFailure::Connect,
                format!("not up in {CONNECT_TIMEOUT:?}"),
            )
        })??;
        let _open = self.inner.counts.channel(&self.inner.target.name);
        let (read, write) = tokio::io::split(stream);
        let lost = |e: io::Error| (KeyServerFailure::Lost, e.to_string());
        tokio::select! {
            ended = self.read(read) => ended,
            ended = self.write(write) => ended.map_err(lost),
            why = trust_watch.wait_for_loss() => Err((KeyServerFailure::Revoked, format!("its certificate is {}", why.name()))),
            () = self.watch() => Err((KeyServerFailure::Lost, format!("silent for {:?}", 2 * PING_INTERVAL))),
        }
    }

    async fn connect(
        &self,
        own: Credential,
        trust: TrustView,
    ) -> Result<(TlsStream<TcpStream>, PeerTrustWatch), (KeyServerFailure, String)> {
        let place = &self.inner.target;
        let certificate = own.current().ok_or_else(|| {
            (
                KeyServerFailure::NoCertificate,
                format!("{} has no certificate yet", own.identity()),
            )
        })?;
        let failed = |e: &dyn std::fmt::Display| (KeyServerFailure::Connect, e.to_string());
        let verifier = PeerVerifier::new(
            own.identity().trust_domain.clone(),
            certificate.bundle(),
            trust,
        )
        .map_err(|e| failed(&e))?;
        let (expected, alpn): (Arc<[_]>, _) =
            (Arc::from([place.identity.clone()]), [keyrpc::ALPN.to_vec()]);
        let config = canal_tls::client_config(
            certificate.signing().clone(),
            verifier.clone(),
            expected.clone(),
            &alpn,
        )
        .map_err(|e| failed(&e))?;
        let options = ConnectOptions {
            timeout: CONNECT_TIMEOUT,
            ..ConnectOptions::default()
        };
        let tcp = sys::connect(None, place.address, &options)
            .await
            .map_err(|e| failed(&e))?;
        // The verifier compares identities, so the hello needs no server name.
        let no_name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
        let connected = TlsConnector::from(Arc::new(config))
            .connect(no_name, tcp)
            .await;
        let stream = connected.map_err(|e| failed(&canal_tls::TlsError::from(e)))?;
        // A channel lives long, so the trust in its peer is watched after the handshake.
        let (_, leaf) = verifier
            .peer(
                canal_tls::PeerRole::Server,
                Some(&expected),
                stream.get_ref().1.peer_certificates(),
            )
            .map_err(|e| failed(&e))?;
        Ok((stream, verifier.trust_watch(leaf)))
    }

    fn mark(&self) {
        let now = u64::try_from(self.inner.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.inner.last_read_millis.store(now, Relaxed);
    }

    async fn read(
        &self,
        mut read: ReadHalf<TlsStream<TcpStream>>,
    ) -> Result<(), (KeyServerFailure, String)> {
        let malformed = |e: keyrpc::FrameError| (KeyServerFailure::Malformed, e.to_string());
        // The frames may contain traffic secrets of connections.
        let mut buffer = SecretBuffer::new();
        loop {
            let mut at = 0;
            while let Some((frame, length)) = keyrpc::split(&buffer[at..]).map_err(malformed)? {
                let id = frame.id;
                let answer = owned(frame.response().map_err(malformed)?);
                at += length;
                if let Some(answer) = answer {
                    self.hand_out(id, answer);
                }
            }
            buffer.consume(at);
            match read.read_buf(buffer.spare(READ_BYTES)).await {
                Ok(0) => return Err((KeyServerFailure::Lost, "closed by the key server".into())),
                Ok(_) => self.mark(),
                Err(e) => return Err((KeyServerFailure::Lost, e.to_string())),
            }
        }
    }

    fn hand_out(&self, id: u64, answer: KeyServerAnswer) {
        let mut table = self.table();
        let PendingRequests { waiting, pace, .. } = &mut *table;
        // Answers to requests that were abandoned in the meantime are dropped.
        let waker = waiting.get_mut(&id).and_then(|waiting| {
            pace.record_answer(&mut waiting.frame);
            waiting.answers.push_back(answer);
            waiting.waker.take()
        });
        let due = table.pace.should_write(table.out.len());
        drop(table);
        if due {
            self.inner.wake.notify_one();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Writes the queued frames. All frames queued since the last write go in one write.
    async fn write(&self, mut write: WriteHalf<TlsStream<TcpStream>>) -> io::Result<()> {
        loop {
            let turn = self.table().turn();
            match turn {
                WriteTurn::Rest => self.inner.wake.notified().await,
                WriteTurn::Hold => {
                    if tokio::time::timeout(FRAME_DELAY_MAX, self.inner.wake.notified())
                        .await
                        .is_err()
                    {
                        self.table().pace.record_abandoned();
                    }
                }
                WriteTurn::Write(batch, frames) => {
                    self.inner.counts.wrote(frames);
                    write.write_all(&batch).await?;
                    write.flush().await?;
                }
            }
        }
    }

    /// Ends when the key server stays silent after a PING.
    async fn watch(&self) {
        loop {
            tokio::time::sleep_until(self.last_read() + PING_INTERVAL).await;
            if self.last_read().elapsed() < PING_INTERVAL {
                continue;
            }
            let before = self.last_read();
            if self.send_frame(PING_ID, &KeyRequest::Ping).is_err() {
                return;
            }
            tokio::time::sleep(PING_INTERVAL).await;
            if self.last_read() == before {
                return;
            }
        }
    }
}

/// Marks a channel as ended, whatever the reason, and wakes its waiters.
struct FailPendingOnDrop(KeyServerChannel);

impl Drop for FailPendingOnDrop {
    fn drop(&mut self) {
        let mut table = self.0.table();
        self.0.inner.over.store(true, Relaxed);
        (table.out, table.frames) = (Vec::new(), 0);
        // Answers that have arrived already can still be read.
        let wakers: Vec<Waker> = table
            .waiting
            .values_mut()
            .filter_map(|waiting| waiting.waker.take())
            .collect();
        drop(table);
        wakers.into_iter().for_each(Waker::wake);
    }
}

fn owned(response: KeyResponse<'_>) -> Option<KeyServerAnswer> {
    Some(match response {
        KeyResponse::Send { bytes } => KeyServerAnswer::Send(bytes.to_vec()),
        KeyResponse::Done(d) => KeyServerAnswer::Done(Box::new(OwnedHandshakeResult {
            bytes: d.bytes.to_vec(),
            consumed: d.consumed as usize,
            suite: d.suite,
            alpn: d.alpn.to_vec(),
            client_traffic: Zeroizing::new(d.client_traffic.to_vec()),
            server_traffic: Zeroizing::new(d.server_traffic.to_vec()),
            peer: d.peer,
            leaf: d.leaf.to_vec(),
            above: d.above.bytes().to_vec(),
        })),
        KeyResponse::Signature { bytes } => KeyServerAnswer::Signature(bytes.to_vec()),
        KeyResponse::Certificates { chain } => {
            KeyServerAnswer::Certificates(chain.into_iter().map(<[u8]>::to_vec).collect())
        }
        KeyResponse::Refused { name, text } => KeyServerAnswer::Refused(name, text.to_string()),
        KeyResponse::Pong => return None,
    })
}

impl KeyServerCall {
    /// Returns the next answer; `None` when the channel has ended.
    pub(super) async fn answer(&mut self) -> Option<KeyServerAnswer> {
        let (channel, id) = (&self.channel, self.id);
        let answer = std::future::poll_fn(|cx| {
            let mut table = channel.table();
            let Some(waiting) = table.waiting.get_mut(&id) else {
                return Poll::Ready(None);
            };
            match waiting.answers.pop_front() {
                Some(answer) => Poll::Ready(Some(answer)),
                None if channel.is_over() => Poll::Ready(None),
                None => {
                    waiting.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await;
        self.is_over = !matches!(answer, Some(KeyServerAnswer::Send(_)));
        answer
    }

    /// Sends more of the peer's bytes.
    pub(super) fn more(&self, bytes: &[u8]) -> Result<(), KeyServerFailure> {
        bytes.chunks(keyrpc::MORE_BYTES_MAX).try_for_each(|bytes| {
            self.channel
                .send_frame(self.id, &KeyRequest::More { bytes })
        })
    }

    /// Returns whether the key server has sent anything, for any request, since this request was
    /// sent.
    pub(super) fn has_server_answered(&self) -> bool {
        self.channel.last_read() > self.sent_at
    }

    /// Waits for [`KeyServerCall::answer`] with a timeout. The timeout is split into parts and so
    /// counts only while this worker runs: a process that got no CPU for a while reads the answers
    /// that arrived meanwhile before it reports a timeout.
    pub(super) async fn answer_within(
        &mut self,
        timeout: Duration,
    ) -> Option<Option<KeyServerAnswer>> {
        for _ in 0..TIMEOUT_PARTS {
            if let Ok(answer) = tokio::time::timeout(timeout / TIMEOUT_PARTS, self.answer()).await {
                return Some(answer);
            }
        }
        None
    }

    /// Sends a PING. Returns `false` if the key server does not answer within `timeout`, which
    /// counts as in [`KeyServerCall::answer_within`].
    pub(super) async fn alive(&self, timeout: Duration) -> bool {
        let before = Instant::now();
        if self.channel.send_frame(PING_ID, &KeyRequest::Ping).is_err() {
            return false;
        }
        // The time of the last read has a resolution of one millisecond.
        let heard = || self.channel.last_read() + Duration::from_millis(1) >= before;
        for _ in 0..timeout.div_duration_f32(PING_CHECK_INTERVAL) as u32 {
            if heard() {
                return true;
            }
            tokio::time::sleep(PING_CHECK_INTERVAL).await;
        }
        heard()
    }

    /// Returns the reason why there was no answer.
    pub(super) fn why(&self) -> KeyServerFailure {
        self.channel.why()
    }
}

impl Drop for KeyServerCall {
    fn drop(&mut self) {
        let mut table = self.channel.table();
        if let Some(mut waiting) = table.waiting.remove(&self.id) {
            table.pace.record_answer(&mut waiting.frame);
        }
        drop(table);
        if !self.is_over {
            // This fails only on a channel that has ended.
            let _ = self.channel.send_frame(self.id, &KeyRequest::Abandon);
        }
    }
}
