//! The relay of a link: a process that carries whole Ethernet frames between the devices `end-a`
//! and `end-b` of its own namespace, with delay and losses, in order. One thread carries each
//! direction. `relay::queue` decides about each frame. Start at [`relay_link`].
//!
//! In its working directory it listens on `link.sock`: one request per line, and one [`LinkReport`]
//! as the response.

pub(crate) mod queue;

use std::io::{BufReader, ErrorKind};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::control::{read_line, write_line};
use crate::error::{IoContext, Result};
use crate::impairment::Impairment;
use crate::sys::packets::{BATCH, PacketSocket, ReceiveBatch, Received, SendBatch};
use queue::{DelayQueue, FrameVerdict, LINK_QUEUE_BYTES_MAX};

/// The relay's devices: toward the router and toward the host of the link. In a link between AZs:
/// toward the first AZ and the second.
pub(crate) const DEVICES: [&str; 2] = ["end-a", "end-b"];
/// Path of the relay's socket, relative to its working directory.
pub(crate) const SOCKET: &str = "link.sock";
/// A relay that does not answer within this time hangs. It answers between two frames; nobody
/// measured how long a busy machine needs.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Interval between two readings of the kernel's drop counter while a direction has no frames. The
/// counter is only shown to people.
const REST: Duration = Duration::from_millis(500);
/// Maximum interval between two reads of the socket while frames are queued. No new frame can be
/// due before a queued one, and the kernel timestamps each arrival. So this interval delays no
/// frame, and one read returns many of them.
const COLLECT: Duration = Duration::from_millis(1);
/// A frame that waited for the relay longer than this is late. Shorter waits are subtracted from
/// the delay. Without a limit, a relay that stood still for long would send frames without any
/// delay.
const AGE_MAX: Duration = Duration::from_secs(1);
/// Scheduling priority before the machine's other processes, so that their load does not show as
/// delay of the link. Half of the way to the highest, -20.
const NICENESS: i32 = -10;
/// Bytes of the offload header before a frame (`struct virtio_net_hdr`).
const OFFLOAD_HEADER_BYTES: u64 = 10;

/// A request to a relay.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum RelayRequest {
    /// Returns the state of the link.
    Report,
    /// Changes the impairment. Frames that are already queued leave at their old times.
    Impair(Impairment),
}

/// State of a link that has a relay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkReport {
    /// The current impairment of the link.
    pub impairment: Impairment,
    /// Frames from the router to the host, or from the first AZ to the second.
    pub a_to_b: LinkCounters,
    /// Frames from the host to the router, or from the second AZ to the first.
    pub b_to_a: LinkCounters,
    /// CPU time of the relay in steps of 10 ms. It includes the kernel's work at the next hop,
    /// which runs inside the sending call.
    pub cpu: Duration,
}

/// Counters of the frames of one direction since the relay started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkCounters {
    /// Frames that left the relay toward the other end.
    pub frames: u64,
    /// Bytes of the frames that left, including Ethernet headers.
    pub bytes: u64,
    /// Frames dropped at random according to `loss`.
    pub dropped_loss: u64,
    /// Frames dropped because too many bytes were queued ([`queue::LINK_QUEUE_BYTES_MAX`]).
    pub dropped_queue: u64,
    /// Frames dropped by the kernel because the relay did not read fast enough.
    pub dropped_socket: u64,
    /// Frames dropped because the next device was down or full.
    pub dropped_device: u64,
    /// Frames dropped because they were larger than any MTU of a world.
    pub dropped_oversize: u64,
}

/// The counters of [`LinkCounters`] in the form in which threads update them.
#[derive(Debug, Default)]
struct LinkCounting {
    frames: AtomicU64,
    bytes: AtomicU64,
    loss: AtomicU64,
    queue: AtomicU64,
    socket: AtomicU64,
    device: AtomicU64,
    oversize: AtomicU64,
}

impl LinkCounting {
    fn read(&self) -> LinkCounters {
        LinkCounters {
            frames: self.frames.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            dropped_loss: self.loss.load(Relaxed),
            dropped_queue: self.queue.load(Relaxed),
            dropped_socket: self.socket.load(Relaxed),
            dropped_device: self.device.load(Relaxed),
            dropped_oversize: self.oversize.load(Relaxed),
        }
    }
}

/// State that the threads of a relay share.
#[derive(Debug, Default)]
struct RelayState {
    impairment: Mutex<Impairment>,
    directions: [LinkCounting; 2],
}

impl RelayState {
    fn impairment(&self) -> MutexGuard<'_, Impairment> {
        self.impairment
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self) -> LinkReport {
        let [a_to_b, b_to_a] = &self.directions;
        LinkReport {
            impairment: *self.impairment(),
            a_to_b: a_to_b.read(),
            b_to_a: b_to_a.read(),
            cpu: own_cpu(),
        }
    }
}

/// User and system time of this process, from fields 14 and 15 of `/proc/self/stat` (proc(5)).
fn own_cpu() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = text.rsplit(')').next().unwrap_or_default();
    let ticks: u64 = after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|word| word.parse::<u64>().ok())
        .sum();
    // USER_HZ is 100 on every Linux platform.
    Duration::from_millis(ticks * 10)
}

/// Carries the frames of a link between the devices `end-a` and `end-b` of this network namespace
/// until the process is killed. A world's supervisor starts one such process for each link with
/// `delay`, `jitter` or `loss`.
///
/// # Errors
///
/// A device is missing, or the caller may not open packet sockets.
pub fn relay_link(impairment: Impairment, seed: u64) -> Result<()> {
    // Neither call is needed for correct results; without them delays are less exact.
    let _ = rustix::process::setpriority_process(None, NICENESS);
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    // A relay that was killed has left its socket.
    let _ = std::fs::remove_file(SOCKET);
    let [a, b] = DEVICES.map(|device| {
        PacketSocket::open(device)
            .tried("cannot open a packet socket on", device)
            .map(Arc::new)
    });
    let (a, b) = (a?, b?);
    let shared = Arc::new(RelayState {
        impairment: Mutex::new(impairment),
        directions: Default::default(),
    });
    for (index, (from, to)) in [(Arc::clone(&a), Arc::clone(&b)), (b, a)]
        .into_iter()
        .enumerate()
    {
        let shared = Arc::clone(&shared);
        let seed = seed ^ index as u64;
        let thread = std::thread::Builder::new().name(format!("from-{}", DEVICES[index]));
        thread
            .spawn(move || carry(&shared, index, &from, &to, seed))
            .tried("cannot start a thread for", DEVICES[index])?;
    }
    let listener = UnixListener::bind(SOCKET).tried("cannot listen on", SOCKET)?;
    for stream in listener.incoming().flatten() {
        // A client that has gone needs no response.
        let _ = answer(&shared, stream);
    }
    Ok(())
}

fn answer(shared: &RelayState, stream: UnixStream) -> std::io::Result<()> {
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    stream.set_write_timeout(Some(ANSWER_WITHIN))?;
    match read_line::<RelayRequest>(&mut BufReader::new(stream.try_clone()?))? {
        None => return Ok(()),
        Some(RelayRequest::Report) => {}
        Some(RelayRequest::Impair(impairment)) => *shared.impairment() = impairment,
    }
    write_line(&mut &stream, &shared.report())
}

fn send_request(socket: &Path, request: RelayRequest) -> Result<LinkReport> {
    let answered = || -> std::io::Result<LinkReport> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(ANSWER_WITHIN))?;
        write_line(&mut &stream, &request)?;
        read_line(&mut BufReader::new(stream))?.ok_or_else(|| ErrorKind::UnexpectedEof.into())
    };
    answered().tried("no answer of the link's relay on", socket)
}

/// Returns the state of the link whose relay has this working directory.
///
/// # Errors
///
/// The relay does not answer.
pub fn link_report(dir: &Path) -> Result<LinkReport> {
    send_request(&dir.join(SOCKET), RelayRequest::Report)
}

/// Changes the impairment of a link. It fails if the relay does not answer.
pub(crate) fn impair(dir: &Path, impairment: Impairment) -> Result<LinkReport> {
    send_request(&dir.join(SOCKET), RelayRequest::Impair(impairment))
}

/// Carries one direction: reads frames that have arrived, sends frames that are due, and sleeps
/// until one of both is possible.
fn carry(shared: &RelayState, direction: usize, from: &PacketSocket, to: &PacketSocket, seed: u64) {
    let counting = &shared.directions[direction];
    let mut queue = DelayQueue::new(seed, LINK_QUEUE_BYTES_MAX);
    let (mut received, mut sending) = (ReceiveBatch::new(), SendBatch::default());
    // A thread inherits the timer slack of the thread that created it, but older kernels need the
    // call for each.
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
    loop {
        let is_idle = queue.next_due().is_none();
        match queue.next_due() {
            None => {
                let timeout = Timespec::try_from(REST).ok();
                // An interrupted poll counts as a short one.
                let _ = poll(&mut [PollFd::new(from, PollFlags::IN)], timeout.as_ref());
            }
            Some(due) => {
                std::thread::sleep(due.saturating_duration_since(Instant::now()).min(COLLECT))
            }
        }
        match from.receive(&mut received) {
            Ok(()) => take(shared, counting, &mut queue, &received),
            // A device that went down reports this error once.
            Err(error)
                if error.kind() == ErrorKind::WouldBlock
                    || error.raw_os_error() == Some(libc::ENETDOWN) => {}
            Err(_) => {
                counting.oversize.fetch_add(1, Relaxed);
            }
        }
        send(counting, &mut queue, &mut sending, to);
        // The drop counter costs a system call, so it is read only when no frames were queued.
        if is_idle {
            counting.socket.fetch_add(from.missed().into(), Relaxed);
        }
    }
}

fn take(
    shared: &RelayState,
    counting: &LinkCounting,
    queue: &mut DelayQueue,
    batch: &ReceiveBatch,
) {
    let impairment = *shared.impairment();
    let (now, wall) = (Instant::now(), SystemTime::now());
    for Received {
        frame,
        arrived,
        is_cut,
    } in batch.frames()
    {
        if is_cut {
            counting.oversize.fetch_add(1, Relaxed);
            continue;
        }
        // The time that the frame waited for this thread is part of the delay, not added to it.
        let age = arrived
            .and_then(|arrived| wall.duration_since(arrived).ok())
            .unwrap_or_default()
            .min(AGE_MAX);
        match queue.offer(&impairment, now.checked_sub(age).unwrap_or(now), frame) {
            FrameVerdict::Queued => {}
            FrameVerdict::Lost => _ = counting.loss.fetch_add(1, Relaxed),
            FrameVerdict::Overflow => _ = counting.queue.fetch_add(1, Relaxed),
        }
    }
}

/// Sends a batch of the frames that are due. Any others are due in the next iteration, before the
/// thread sleeps.
fn send(
    counting: &LinkCounting,
    queue: &mut DelayQueue,
    sending: &mut SendBatch,
    to: &PacketSocket,
) {
    let now = Instant::now();
    if queue.next_due().is_none_or(|due| due > now) {
        return;
    }
    match to.send(sending, queue.due(now, BATCH)) {
        Ok(count) => {
            let bytes: u64 = queue
                .due(now, count)
                .map(|frame| frame.len() as u64 - OFFLOAD_HEADER_BYTES)
                .sum();
            counting.frames.fetch_add(count as u64, Relaxed);
            counting.bytes.fetch_add(bytes, Relaxed);
            queue.remove(count);
        }
        // A link does not wait for its far end: the frame is dropped.
        Err(_) => {
            counting.device.fetch_add(1, Relaxed);
            queue.remove(1);
        }
    }
}
