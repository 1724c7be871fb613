//! One mTLS connection to one key server, with many requests under way: frames out in batches, answers to whoever asked. Which key server is
//! asked is `requester`'s choice.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use canal_wire::keyrpc::{self, Request, Response};
use hashbrown::HashMap;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use zeroize::Zeroizing;

use super::counts::{Counts, Failure};
use super::pace::{Asked, Pace};
use super::secret_buffer::SecretBuffer;
use super::server::Place;
use crate::sys::{self, ConnectOptions};
use crate::tls::{self, Credential, Judge, Standing, TrustView};

/// Requests under way on one channel.
pub const IN_FLIGHT_MAX: usize = 4096;
/// Bytes that wait to be written on one channel.
pub const QUEUE_MAX: usize = 4 << 20;
/// Room for what is read at once, at least.
const READ_BYTES: usize = 16 << 10;
/// Frames are held back for so long at most; see [`Pace`].
const HOLD: Duration = Duration::from_millis(1);
/// TCP and TLS to a key server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A channel is pinged after such a silence, and closed after as much again.
const PING: Duration = Duration::from_secs(5);
/// See [`Exchange::answer_within`].
const PARTS: u32 = 4;
/// How often it is looked whether a ping was answered.
const LOOK: Duration = Duration::from_millis(5);
/// Of pings; handshakes count up from 1.
const PING_ID: u64 = 0;

/// What a key server answered, for one request.
pub(super) enum Answer {
    Send(Vec<u8>),
    Done(Box<Done>),
    Signature(Vec<u8>),
    Certificates(Vec<Vec<u8>>),
    Refused(keyrpc::Refusal, String),
}

/// [`keyrpc::Done`], owned.
pub(super) struct Done {
    pub(super) bytes: Vec<u8>,
    pub(super) consumed: usize,
    pub(super) suite: u16,
    pub(super) alpn: Vec<u8>,
    pub(super) client_traffic: Zeroizing<Vec<u8>>,
    pub(super) server_traffic: Zeroizing<Vec<u8>>,
    pub(super) peer: canal_model::identity::Identity,
    pub(super) leaf: Vec<u8>,
    /// Empty, and so without cost, where a root signs leaves.
    pub(super) above: Vec<u8>,
}

/// A connection to a key server, up or coming up. Clones share it; any thread may ask, the thread that made it carries it.
#[derive(Clone)]
pub(super) struct Channel {
    inner: Arc<Inner>,
}

struct Inner {
    place: Place,
    counts: Arc<Counts>,
    table: Mutex<Table>,
    wake: Notify,
    over: AtomicBool,
    why: Mutex<Failure>,
    started: Instant,
    /// Milliseconds since `started` when something was last heard.
    heard: AtomicU64,
}

#[derive(Default)]
struct Table {
    out: Vec<u8>,
    frames: u64,
    waiting: HashMap<u64, Waiting>,
    last: u64,
    pace: Pace,
}

/// What the writer is to do.
enum Turn {
    Write(Vec<u8>, u64),
    /// Until there is more to do, or [`HOLD`] is over.
    Hold,
    Rest,
}

impl Table {
    /// Whether the writer is to be told of bytes behind the first `before`: it is to write, or to hold what is first.
    fn tell(&self, before: usize) -> bool {
        before == 0 || self.pace.due(self.out.len())
    }

    fn turn(&mut self) -> Turn {
        if self.pace.due(self.out.len()) {
            self.pace.wrote();
            return Turn::Write(std::mem::take(&mut self.out), std::mem::take(&mut self.frames));
        }
        if self.out.is_empty() { Turn::Rest } else { Turn::Hold }
    }
}

/// What a request was answered so far, and who waits for more: a slot of the table, because a queue of its own for each request would cost
/// more than the request.
#[derive(Default)]
struct Waiting {
    answers: VecDeque<Answer>,
    waker: Option<Waker>,
    asked: Asked,
}

/// One request with its answers. Dropped before its end it is abandoned.
pub(super) struct Exchange {
    channel: Channel,
    id: u64,
    ended: bool,
    asked: Instant,
}

impl Channel {
    /// Starts it on the calling runtime. Requests may be made at once; they wait for it to come up.
    pub(super) fn start(place: Place, own: Credential, trust: TrustView, counts: Arc<Counts>) -> Self {
        let inner = Arc::new(Inner {
            place,
            counts,
            table: Mutex::default(),
            wake: Notify::new(),
            over: AtomicBool::new(false),
            why: Mutex::new(Failure::Lost),
            started: Instant::now(),
            heard: AtomicU64::new(0),
        });
        let channel = Self { inner };
        let (mine, guard) = (channel.clone(), Over(channel.clone()));
        tokio::spawn(async move {
            let _guard = guard;
            if let Err((why, text)) = mine.carry(own, trust).await {
                *mine.inner.why.lock().unwrap_or_else(PoisonError::into_inner) = why;
                tracing::warn!(server = mine.inner.place.name, address = %mine.inner.place.address, reason = why.name(), why = text, "channel to key server");
            }
        });
        channel
    }

    /// Nothing can be asked any more.
    pub(super) fn is_over(&self) -> bool {
        self.inner.over.load(Relaxed)
    }

    /// Why it is over.
    pub(super) fn why(&self) -> Failure {
        *self.inner.why.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a request.
    pub(super) fn ask(&self, request: &Request<'_>) -> Result<Exchange, Failure> {
        let mut table = self.table();
        if self.is_over() {
            return Err(self.why());
        }
        if table.waiting.len() >= IN_FLIGHT_MAX || table.out.len() >= QUEUE_MAX {
            return Err(Failure::Busy);
        }
        let (id, before) = (table.last + 1, table.out.len());
        request.encode(id, &mut table.out).map_err(|_| Failure::Malformed)?;
        (table.last, table.frames) = (id, table.frames + 1);
        let mut waiting = Waiting::default();
        table.pace.queue(&mut waiting.asked);
        table.waiting.insert(id, waiting);
        self.tell(table, before);
        Ok(Exchange { channel: self.clone(), id, ended: false, asked: Instant::now() })
    }

    fn say(&self, id: u64, request: &Request<'_>) -> Result<(), Failure> {
        let mut table = self.table();
        if self.is_over() {
            return Err(self.why());
        }
        let before = table.out.len();
        request.encode(id, &mut table.out).map_err(|_| Failure::Malformed)?;
        table.frames += 1;
        let Table { waiting, pace, .. } = &mut *table;
        if let Some(waiting) = waiting.get_mut(&id) {
            pace.queue(&mut waiting.asked);
        }
        self.tell(table, before);
        Ok(())
    }

    fn tell(&self, table: MutexGuard<'_, Table>, before: usize) {
        let tell = table.tell(before);
        drop(table);
        if tell {
            self.inner.wake.notify_one();
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.inner.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heard(&self) -> Instant {
        self.inner.started + Duration::from_millis(self.inner.heard.load(Relaxed))
    }

    /// Brings it up and runs it until it ends.
    async fn carry(&self, own: Credential, trust: TrustView) -> Result<(), (Failure, String)> {
        let up = tokio::time::timeout(CONNECT_TIMEOUT, self.connect(own, trust)).await;
        let (stream, mut standing) = up.map_err(|_| (Failure::Connect, format!("not up in {CONNECT_TIMEOUT:?}")))??;
        let _open = self.inner.counts.channel(&self.inner.place.name);
        let (read, write) = tokio::io::split(stream);
        let lost = |e: io::Error| (Failure::Lost, e.to_string());
        tokio::select! {
            ended = self.read(read) => ended,
            ended = self.write(write) => ended.map_err(lost),
            why = standing.fallen() => Err((Failure::Revoked, format!("its certificate is {}", why.name()))),
            () = self.watch() => Err((Failure::Lost, format!("silent for {:?}", 2 * PING))),
        }
    }

    async fn connect(&self, own: Credential, trust: TrustView) -> Result<(TlsStream<TcpStream>, Standing), (Failure, String)> {
        let place = &self.inner.place;
        let certificate = own.current().ok_or_else(|| (Failure::NoCertificate, format!("no certificate of {} yet", own.identity())))?;
        let failed = |e: &dyn std::fmt::Display| (Failure::Connect, e.to_string());
        let judge = Judge::new(own.identity().trust_domain.clone(), certificate.bundle(), trust).map_err(|e| failed(&e))?;
        let (expected, alpn): (Arc<[_]>, _) = (Arc::from([place.identity.clone()]), [keyrpc::ALPN.to_vec()]);
        let config = tls::client_config(certificate.signing().clone(), judge.clone(), expected.clone(), &alpn).map_err(|e| failed(&e))?;
        let options = ConnectOptions { timeout: CONNECT_TIMEOUT, ..ConnectOptions::default() };
        let tcp = sys::connect(None, place.address, &options).await.map_err(|e| failed(&e))?;
        let no_name = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
        let connected = TlsConnector::from(Arc::new(config)).connect(no_name, tcp).await;
        let stream = connected.map_err(|e| failed(&tls::TlsError::from(e)))?;
        let (_, leaf) = judge.peer(tls::Role::Server, Some(&expected), stream.get_ref().1.peer_certificates()).map_err(|e| failed(&e))?;
        Ok((stream, judge.standing(leaf)))
    }

    fn mark(&self) {
        let now = u64::try_from(self.inner.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.inner.heard.store(now, Relaxed);
    }

    async fn read(&self, mut read: ReadHalf<TlsStream<TcpStream>>) -> Result<(), (Failure, String)> {
        let malformed = |e: keyrpc::Malformed| (Failure::Malformed, e.to_string());
        // Secrets of connections may be in it.
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
                Ok(0) => return Err((Failure::Lost, "closed by the key server".into())),
                Ok(_) => self.mark(),
                Err(e) => return Err((Failure::Lost, e.to_string())),
            }
        }
    }

    fn hand_out(&self, id: u64, answer: Answer) {
        let mut table = self.table();
        let Table { waiting, pace, .. } = &mut *table;
        // Answers to what was abandoned meanwhile go nowhere.
        let waker = waiting.get_mut(&id).and_then(|waiting| {
            pace.settle(&mut waiting.asked);
            waiting.answers.push_back(answer);
            waiting.waker.take()
        });
        let due = table.pace.due(table.out.len());
        drop(table);
        if due {
            self.inner.wake.notify_one();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// All frames that were queued since the last write go in one.
    async fn write(&self, mut write: WriteHalf<TlsStream<TcpStream>>) -> io::Result<()> {
        loop {
            let turn = self.table().turn();
            match turn {
                Turn::Rest => self.inner.wake.notified().await,
                Turn::Hold => {
                    if tokio::time::timeout(HOLD, self.inner.wake.notified()).await.is_err() {
                        self.table().pace.give_up();
                    }
                }
                Turn::Write(batch, frames) => {
                    self.inner.counts.wrote(frames);
                    write.write_all(&batch).await?;
                    write.flush().await?;
                }
            }
        }
    }

    /// Ends when the key server is silent though pinged.
    async fn watch(&self) {
        loop {
            tokio::time::sleep_until(self.heard() + PING).await;
            if self.heard().elapsed() < PING {
                continue;
            }
            let before = self.heard();
            if self.say(PING_ID, &Request::Ping).is_err() {
                return;
            }
            tokio::time::sleep(PING).await;
            if self.heard() == before {
                return;
            }
        }
    }
}

/// Marks a channel over, whatever ended it, and fails who waits.
struct Over(Channel);

impl Drop for Over {
    fn drop(&mut self) {
        let mut table = self.0.table();
        self.0.inner.over.store(true, Relaxed);
        (table.out, table.frames) = (Vec::new(), 0);
        // What was answered already can still be taken.
        let wakers: Vec<Waker> = table.waiting.values_mut().filter_map(|waiting| waiting.waker.take()).collect();
        drop(table);
        wakers.into_iter().for_each(Waker::wake);
    }
}

fn owned(response: Response<'_>) -> Option<Answer> {
    Some(match response {
        Response::Send { bytes } => Answer::Send(bytes.to_vec()),
        Response::Done(d) => Answer::Done(Box::new(Done {
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
        Response::Signature { bytes } => Answer::Signature(bytes.to_vec()),
        Response::Certificates { chain } => Answer::Certificates(chain.into_iter().map(<[u8]>::to_vec).collect()),
        Response::Refused { name, text } => Answer::Refused(name, text.to_string()),
        Response::Pong => return None,
    })
}

impl Exchange {
    /// The next answer; `None` when the channel is over.
    pub(super) async fn answer(&mut self) -> Option<Answer> {
        let (channel, id) = (&self.channel, self.id);
        let answer = std::future::poll_fn(|cx| {
            let mut table = channel.table();
            let Some(waiting) = table.waiting.get_mut(&id) else { return Poll::Ready(None) };
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
        self.ended = !matches!(answer, Some(Answer::Send(_)));
        answer
    }

    /// Gives more of the peer's bytes.
    pub(super) fn more(&self, bytes: &[u8]) -> Result<(), Failure> {
        bytes.chunks(keyrpc::MORE_BYTES_MAX).try_for_each(|bytes| self.channel.say(self.id, &Request::More { bytes }))
    }

    /// Whether the key server said anything to anyone since this was asked.
    pub(super) fn heard_since(&self) -> bool {
        self.channel.heard() > self.asked
    }

    /// [`Exchange::answer`], for so long. Time counts as far as this worker runs: in parts, so that a process that got no processor for a while
    /// reads what was answered meanwhile before it says that nothing was.
    pub(super) async fn answer_within(&mut self, patience: Duration) -> Option<Option<Answer>> {
        for _ in 0..PARTS {
            if let Ok(answer) = tokio::time::timeout(patience / PARTS, self.answer()).await {
                return Some(answer);
            }
        }
        None
    }

    /// Asks whether the key server lives; `false`: it did not say so in time, which counts as in [`Exchange::answer_within`].
    pub(super) async fn alive(&self, patience: Duration) -> bool {
        let before = Instant::now();
        if self.channel.say(PING_ID, &Request::Ping).is_err() {
            return false;
        }
        // Milliseconds are what is known of when it was heard.
        let heard = || self.channel.heard() + Duration::from_millis(1) >= before;
        for _ in 0..patience.div_duration_f32(LOOK) as u32 {
            if heard() {
                return true;
            }
            tokio::time::sleep(LOOK).await;
        }
        heard()
    }

    /// Why there was no answer.
    pub(super) fn why(&self) -> Failure {
        self.channel.why()
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        let mut table = self.channel.table();
        if let Some(mut waiting) = table.waiting.remove(&self.id) {
            table.pace.settle(&mut waiting.asked);
        }
        drop(table);
        if !self.ended {
            // Fails only on a channel that is over.
            let _ = self.channel.say(self.id, &Request::Abandon);
        }
    }
}
