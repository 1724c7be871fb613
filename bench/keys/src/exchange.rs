//! The requester's cost of one bare exchange with another core: the kernel's part, which is a lower
//! bound for any key server. It prints one line.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::thread::{CpuSet, sched_setaffinity};

/// Bytes that a handshake sends in each direction, roughly.
/// A ClientHello and the client's flight with its certificate have about as many.
const BYTES: usize = 1300;
/// Time until a response: a signature and a key exchange.
/// It only has to be long enough that the requester sleeps meanwhile.
const WORK: Duration = Duration::from_micros(200);
/// Exchanges before the measured ones, so that caches and the scheduler have settled. Nobody
/// measured fewer.
const WARM: u32 = 1_000;
const SCHEDSTAT: &str = "/proc/thread-self/schedstat";

#[derive(clap::Args)]
pub(crate) struct Flags {
    /// Exchanges, one after the other
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,
}

pub(crate) fn run(flags: &Flags) -> anyhow::Result<()> {
    let cost = cost(flags.count)?;
    println!(
        "an exchange of {BYTES} bytes each way costs the asker {:.1} µs of CPU",
        cost.as_secs_f64() * 1e6
    );
    Ok(())
}

/// Returns the requester's mean CPU time of an exchange.
pub(crate) fn cost(count: u32) -> anyhow::Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0").context("127.0.0.1")?;
    let address = listener.local_addr()?;
    let answering = thread::spawn(move || answer(&listener));
    // A separate thread, so that the caller's thread is not pinned to one core.
    let asking = thread::spawn(move || {
        send_requests(TcpStream::connect(address).context("connect")?, count)
    });
    let cost = asking
        .join()
        .map_err(|_| anyhow::anyhow!("the requesting thread panicked"))??;
    answering
        .join()
        .map_err(|_| anyhow::anyhow!("the answering thread panicked"))??;
    Ok(cost)
}

/// Responds on core 1, until the requester closes.
fn answer(listener: &TcpListener) -> anyhow::Result<()> {
    stay_on(1)?;
    let (mut stream, _) = listener.accept().context("accept")?;
    stream.set_nodelay(true)?;
    let mut buffer = [0; BYTES];
    while stream.read_exact(&mut buffer).is_ok() {
        let end = Instant::now() + WORK;
        while Instant::now() < end {}
        stream.write_all(&buffer)?;
    }
    Ok(())
}

/// Sends requests on core 0. Returns the mean CPU time of an exchange after the first ones.
fn send_requests(mut stream: TcpStream, count: u32) -> anyhow::Result<Duration> {
    stay_on(0)?;
    stream.set_nodelay(true)?;
    let mut buffer = [0; BYTES];
    let mut exchanges = |count| -> anyhow::Result<()> {
        for _ in 0..count {
            stream.write_all(&buffer)?;
            stream.read_exact(&mut buffer)?;
        }
        Ok(())
    };
    exchanges(WARM)?;
    let before = used()?;
    exchanges(count)?;
    Ok((used()? - before) / count)
}

fn stay_on(core: usize) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).with_context(|| format!("core {core}"))
}

/// Returns the CPU time of the calling thread.
fn used() -> anyhow::Result<Duration> {
    let text = std::fs::read_to_string(SCHEDSTAT).context(SCHEDSTAT)?;
    text.split_whitespace()
        .next()
        .and_then(|ns| ns.parse().ok())
        .map(Duration::from_nanos)
        .context(SCHEDSTAT)
}
