//! An open-loop generator: requests of many quiet tenants, and of one noisy one, at random times
//! that do not depend on responses. It measures from the write of a request to the end of its
//! response, with one thread that sleeps until its next event.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context;
use canal_bench_peers::answer::read_complete_answer;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::fd::OwnedFd;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// A connection that carries HTTP/1.1 requests, one after the other or pipelined.
pub(crate) struct LoadConnection {
    stream: TcpStream,
    read: Vec<u8>,
    /// Write times of the requests that have no response yet, and whether they count.
    sent: VecDeque<(Instant, bool)>,
}

impl LoadConnection {
    pub(crate) fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let stream =
            TcpStream::connect(address).with_context(|| format!("connecting to {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            read: Vec::new(),
            sent: VecDeque::new(),
        })
    }

    pub(crate) fn watch(&self, poll: &OwnedFd, number: usize) -> anyhow::Result<()> {
        Ok(epoll::add(
            poll,
            &self.stream,
            EventData::new_u64(number as u64),
            EventFlags::IN,
        )?)
    }

    /// Writes a request. The socket's buffer is large enough for the requests in progress in these
    /// benches.
    pub(crate) fn send(&mut self, request: &[u8], counts: bool) -> anyhow::Result<()> {
        self.sent.push_back((Instant::now(), counts));
        self.stream
            .write_all(request)
            .context("a request could not be written")
    }

    /// Returns whether every request has its response.
    pub(crate) fn is_idle(&self) -> bool {
        self.sent.is_empty()
    }

    /// Reads the available bytes. Reports the status of each complete response, its duration, and
    /// whether it counts.
    pub(crate) fn receive(
        &mut self,
        mut answer: impl FnMut(u16, Duration, bool),
    ) -> anyhow::Result<()> {
        let mut chunk = [0; 65_536];
        match self.stream.read(&mut chunk) {
            Ok(0) => anyhow::bail!("the proxy closed a connection"),
            Ok(n) => self.read.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e.into()),
        }
        let (now, mut taken) = (Instant::now(), 0);
        while let Some((status, length)) = read_complete_answer(&self.read[taken..])? {
            taken += length;
            let (sent, counts) = self
                .sent
                .pop_front()
                .context("an answer without a request")?;
            answer(status, now.saturating_duration_since(sent), counts);
        }
        self.read.drain(..taken);
        Ok(())
    }
}

/// Requests and rates of a load.
pub(crate) struct LoadSpec<'a> {
    pub(crate) quiet: &'a [SocketAddr],
    pub(crate) noisy: SocketAddr,
    /// Requests per second of each quiet tenant.
    pub(crate) share: f64,
    /// Requests per second of the noisy tenant.
    pub(crate) noise: f64,
    pub(crate) seconds: f64,
    pub(crate) seed: u64,
}

/// Times and counts that one load measured of its requests.
#[derive(Default)]
pub(crate) struct LoadOutcome {
    /// Durations of the quiet tenants' requests in milliseconds, sorted.
    pub(crate) latencies: Vec<f64>,
    pub(crate) sent_quiet: u64,
    pub(crate) answered: u64,
    /// Milliseconds by which requests were written later than scheduled, sorted.
    pub(crate) lateness: Vec<f64>,
}

/// Connections of the noisy tenant.
/// Nobody measured other numbers.
const NOISY_CONNECTIONS: usize = 10;
/// Time to wait for responses after the last request.
/// A request without a response by then counts as unanswered.
const LAST_ANSWERS: Duration = Duration::from_secs(2);
/// Time before requests count: afterwards connections and pools exist.
/// Nobody measured a shorter time.
const WARM: Duration = Duration::from_millis(500);

/// Runs the load to its end.
pub(crate) fn run(load: &LoadSpec<'_>, request: &[u8]) -> anyhow::Result<LoadOutcome> {
    let poll = epoll::create(CreateFlags::CLOEXEC)?;
    let mut connections = Vec::new();
    let noisy = if load.noise > 0.0 {
        NOISY_CONNECTIONS
    } else {
        0
    };
    let noisy = std::iter::repeat_n(&load.noisy, noisy);
    for address in load.quiet.iter().chain(noisy) {
        let connection = LoadConnection::open(*address)?;
        connection.watch(&poll, connections.len())?;
        connections.push(connection);
    }
    let alarm = timerfd_create(
        TimerfdClockId::Monotonic,
        TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
    )?;
    epoll::add(&poll, &alarm, EventData::new_u64(u64::MAX), EventFlags::IN)?;
    // A fixed seed gives each proxy the same arrivals.
    let mut random = StdRng::seed_from_u64(load.seed);
    let total = load.share * load.quiet.len() as f64 + load.noise;
    let (quiet, begun) = (load.quiet.len(), Instant::now());
    // Requests before `counted_from` only have the proxy open its connections and fill its pools.
    let (counted_from, end) = (
        begun + WARM,
        begun + WARM + Duration::from_secs_f64(load.seconds),
    );
    let mut outcome = LoadOutcome::default();
    let (mut next, mut waiting) = (begun, 0_u64);
    // One epoll_wait returns as many; the rest come with the next.
    let mut events = Vec::with_capacity(256);
    loop {
        let now = Instant::now();
        while next <= now && next < end {
            // One stream of arrivals for all tenants is equivalent to one for each.
            let tenant = if random.random::<f64>() * total < load.noise {
                quiet + random.random_range(0..NOISY_CONNECTIONS)
            } else {
                random.random_range(0..quiet)
            };
            let counts = tenant < quiet && next >= counted_from;
            connections[tenant].send(request, counts)?;
            waiting += 1;
            // Lateness of the generator itself: beyond a proxy's latency it would falsify the
            // result.
            if counts {
                outcome.sent_quiet += 1;
                outcome
                    .lateness
                    .push(now.saturating_duration_since(next).as_secs_f64() * 1e3);
            }
            // Exponential gaps make the arrivals a Poisson process, as those of many independent
            // clients are.
            next += Duration::from_secs_f64(-(1.0 - random.random::<f64>()).ln() / total);
        }
        // Responses that are late still count, up to a limit that ends a hang.
        if now >= end && (waiting == 0 || now >= end + LAST_ANSWERS) {
            break;
        }
        // The generator also wakes at the end, from which on it only waits for responses.
        let wake = if now < end {
            next.min(end)
        } else {
            end + LAST_ANSWERS
        };
        // A time that has passed while events were handled wakes at once.
        set_alarm(&alarm, wake.saturating_duration_since(Instant::now()))?;
        epoll::wait(&poll, spare_capacity(&mut events), None)?;
        for event in events.drain(..) {
            // The alarm's token is that of no connection; it only ends the wait.
            let token = usize::try_from(event.data.u64()).ok();
            let Some(connection) = token.and_then(|tenant| connections.get_mut(tenant)) else {
                continue;
            };
            // A response that is not 200 was not served, so it lowers the share of answered ones.
            connection.receive(|status, took, counts| {
                waiting -= 1;
                if counts && status == 200 {
                    outcome.answered += 1;
                    outcome.latencies.push(took.as_secs_f64() * 1e3);
                }
            })?;
        }
    }
    outcome.latencies.sort_by(f64::total_cmp); // Percentiles are read from sorted lists.
    outcome.lateness.sort_by(f64::total_cmp);
    Ok(outcome)
}

/// Arms the timer once, `after` from now; this also clears an earlier expiry.
fn set_alarm(alarm: &OwnedFd, after: Duration) -> anyhow::Result<()> {
    // Zero would disarm the timer.
    let after = after.max(Duration::from_nanos(1));
    let value = Timespec {
        tv_sec: i64::try_from(after.as_secs())?,
        tv_nsec: i64::from(after.subsec_nanos()),
    };
    let spec = Itimerspec {
        it_interval: Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        },
        it_value: value,
    };
    timerfd_settime(alarm, TimerfdTimerFlags::empty(), &spec)?;
    Ok(())
}
