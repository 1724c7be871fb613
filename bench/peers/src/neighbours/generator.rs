//! An open-loop generator: requests of many quiet tenants, and of one noisy one, at random times that no answer delays. It measures from the
//! write of a request to the end of its answer, by one thread that sleeps until there is something to do.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::OwnedFd;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime};

/// A connection that carries HTTP/1.1 requests, one after the other or pipelined.
pub(crate) struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
    /// When the requests were written that have no answer yet, and whether they count.
    sent: VecDeque<(Instant, bool)>,
}

impl Connection {
    pub(crate) fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address).with_context(|| format!("connecting to {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self { stream, read: Vec::new(), sent: VecDeque::new() })
    }

    pub(crate) fn watch(&self, poll: &OwnedFd, number: usize) -> anyhow::Result<()> {
        Ok(epoll::add(poll, &self.stream, EventData::new_u64(number as u64), EventFlags::IN)?)
    }

    /// Writes a request. The socket's buffer has room for what is under way in these benches.
    pub(crate) fn send(&mut self, request: &[u8], counts: bool) -> anyhow::Result<()> {
        self.sent.push_back((Instant::now(), counts));
        self.stream.write_all(request).context("a request could not be written")
    }

    /// Whether every request was answered.
    pub(crate) fn is_idle(&self) -> bool {
        self.sent.is_empty()
    }

    /// Reads what has arrived; tells the status of each whole answer, how long it took, and whether it counts.
    pub(crate) fn receive(&mut self, mut answer: impl FnMut(u16, Duration, bool)) -> anyhow::Result<()> {
        let mut chunk = [0; 65_536];
        match self.stream.read(&mut chunk) {
            Ok(0) => anyhow::bail!("the proxy closed a connection"),
            Ok(n) => self.read.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e.into()),
        }
        let (now, mut taken) = (Instant::now(), 0);
        while let Some((status, length)) = whole_answer(&self.read[taken..])? {
            taken += length;
            let (sent, counts) = self.sent.pop_front().context("an answer that nobody asked for")?;
            answer(status, now.saturating_duration_since(sent), counts);
        }
        self.read.drain(..taken);
        Ok(())
    }
}

/// The status and the length of the answer at the beginning of `bytes`, if it is whole.
fn whole_answer(bytes: &[u8]) -> anyhow::Result<Option<(u16, usize)>> {
    let mut fields = [httparse::EMPTY_HEADER; 32];
    let mut head = httparse::Response::new(&mut fields);
    let httparse::Status::Complete(head_length) = head.parse(bytes)? else { return Ok(None) };
    let length = head.headers.iter().find(|f| f.name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|f| std::str::from_utf8(f.value).ok()?.parse::<usize>().ok());
    let whole = head_length + length.context("an answer without content-length")?;
    Ok((bytes.len() >= whole).then_some((head.code.unwrap_or(0), whole)))
}

/// What is asked, and how often.
pub(crate) struct Load<'a> {
    pub(crate) quiet: &'a [SocketAddr],
    pub(crate) noisy: SocketAddr,
    /// Requests a second of each quiet tenant.
    pub(crate) share: f64,
    /// Requests a second of the noisy tenant.
    pub(crate) noise: f64,
    pub(crate) seconds: f64,
    pub(crate) seed: u64,
}

/// What came of it.
#[derive(Default)]
pub(crate) struct Outcome {
    /// Milliseconds of the quiet tenants' requests, sorted.
    pub(crate) latencies: Vec<f64>,
    pub(crate) asked: u64,
    pub(crate) answered: u64,
    /// Milliseconds by which requests were written later than they should have been, sorted.
    pub(crate) lateness: Vec<f64>,
}

/// Connections of the noisy tenant.
const NOISY_CONNECTIONS: usize = 10;
/// How long answers are waited for after the last request.
const LAST_ANSWERS: Duration = Duration::from_secs(2);
/// What passes before requests count: connections and pools are there then.
const WARM: Duration = Duration::from_millis(500);

/// Runs the load to its end.
pub(crate) fn run(load: &Load<'_>, request: &[u8]) -> anyhow::Result<Outcome> {
    let poll = epoll::create(CreateFlags::CLOEXEC)?;
    let mut connections = Vec::new();
    let noisy = std::iter::repeat_n(&load.noisy, if load.noise > 0.0 { NOISY_CONNECTIONS } else { 0 });
    for address in load.quiet.iter().chain(noisy) {
        let connection = Connection::open(*address)?;
        connection.watch(&poll, connections.len())?;
        connections.push(connection);
    }
    let alarm = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
    epoll::add(&poll, &alarm, EventData::new_u64(u64::MAX), EventFlags::IN)?;
    let mut random = StdRng::seed_from_u64(load.seed);
    let total = load.share * load.quiet.len() as f64 + load.noise;
    let (quiet, begun) = (load.quiet.len(), Instant::now());
    let (counted_from, end) = (begun + WARM, begun + WARM + Duration::from_secs_f64(load.seconds));
    let mut outcome = Outcome::default();
    let (mut next, mut waiting) = (begun, 0_u64);
    let mut events = Vec::with_capacity(256);
    loop {
        let now = Instant::now();
        while next <= now && next < end {
            // One stream of arrivals for all is the same as one for each.
            let who = if random.random::<f64>() * total < load.noise {
                quiet + random.random_range(0..NOISY_CONNECTIONS)
            } else {
                random.random_range(0..quiet)
            };
            let counts = who < quiet && next >= counted_from;
            connections[who].send(request, counts)?;
            waiting += 1;
            if counts {
                outcome.asked += 1;
                outcome.lateness.push(now.saturating_duration_since(next).as_secs_f64() * 1e3);
            }
            next += Duration::from_secs_f64(-(1.0 - random.random::<f64>()).ln() / total);
        }
        if now >= end && (waiting == 0 || now >= end + LAST_ANSWERS) {
            break;
        }
        let wake = if now < end { next.min(end) } else { end + LAST_ANSWERS };
        set_alarm(&alarm, wake.saturating_duration_since(Instant::now()))?;
        epoll::wait(&poll, spare_capacity(&mut events), None)?;
        for event in events.drain(..) {
            let Some(connection) = usize::try_from(event.data.u64()).ok().and_then(|who| connections.get_mut(who)) else { continue };
            connection.receive(|status, took, counts| {
                waiting -= 1;
                if counts && status == 200 {
                    outcome.answered += 1;
                    outcome.latencies.push(took.as_secs_f64() * 1e3);
                }
            })?;
        }
    }
    outcome.latencies.sort_by(f64::total_cmp);
    outcome.lateness.sort_by(f64::total_cmp);
    Ok(outcome)
}

/// The alarm rings once, `after` from now; setting it anew silences what rang.
fn set_alarm(alarm: &OwnedFd, after: Duration) -> anyhow::Result<()> {
    // Zero would switch it off.
    let after = after.max(Duration::from_nanos(1));
    let value = Timespec { tv_sec: i64::try_from(after.as_secs())?, tv_nsec: i64::from(after.subsec_nanos()) };
    let spec = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
    timerfd_settime(alarm, TimerfdTimerFlags::empty(), &spec)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::whole_answer;

    #[test]
    fn answers_are_told_apart() {
        let two = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(whole_answer(two).ok().flatten(), Some((200, 41)));
        assert_eq!(whole_answer(&two[41..]).ok().flatten(), Some((404, 45)));
        assert_eq!(whole_answer(&two[..40]).ok().flatten(), None);
        assert!(whole_answer(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
    }
}
