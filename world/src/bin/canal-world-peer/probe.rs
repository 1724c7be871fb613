//! Measures what a link does to packets from an application's point of view: round-trip times,
//! losses, and whether content stays intact. Tests evaluate the results.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

/// First byte of a connection. `ECHO` requests an answer to each message, `DIGEST` one digest at
/// the end.
const ECHO: u8 = b'e';
const DIGEST: u8 = b'd';
/// Timeout for connecting and for one answer. Far above a round trip over the links of any test
/// that waits for an answer, whose delays are milliseconds.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Number of datagrams that are sent without a pause. A pause for each datagram would take longer
/// than the datagrams of a fast run are apart.
const BURST: u64 = 16;

/// Answers connections and datagrams of both IP families on `port` until the process is killed.
pub(crate) fn echo(port: u16) -> std::io::Result<()> {
    let datagrams = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))?;
    std::thread::spawn(move || -> std::io::Result<()> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let (count, from) = datagrams.recv_from(&mut buffer)?;
            datagrams.send_to(&buffer[..count], from)?;
        }
    });
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))?;
    println!("answering on {port}");
    for stream in listener.incoming() {
        let stream = stream?;
        std::thread::spawn(move || answer(stream));
    }
    Ok(())
}

fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    let (mut chunk, mut digest) = (vec![0; 1 << 16], Sha256::new());
    loop {
        let count = stream.read(&mut chunk)?;
        match (kind[0], count) {
            (ECHO, 0) => return Ok(()),
            (ECHO, _) => stream.write_all(&chunk[..count])?,
            (_, 0) => return stream.write_all(hex(digest).as_bytes()),
            (_, _) => digest.update(&chunk[..count]),
        }
    }
}

fn hex(digest: Sha256) -> String {
    digest
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Prints the round-trip times of `count` messages over one connection, sent one after the other,
/// in microseconds: minimum, median, maximum.
pub(crate) fn tcp_round_trips(to: SocketAddr, count: usize) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, TIMEOUT)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(&[ECHO])?;
    let mut byte = [0];
    print_times(count, || {
        stream.write_all(&[1])?;
        stream.read_exact(&mut byte)
    })
}

/// Prints the round-trip times of `count` datagrams of `bytes` bytes in microseconds: minimum,
/// median, maximum. Each must come back unchanged.
pub(crate) fn udp_round_trips(to: SocketAddr, count: usize, bytes: usize) -> std::io::Result<()> {
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    let sent = content(bytes);
    let mut got = vec![0; bytes + 1];
    print_times(count, || {
        socket.send(&sent)?;
        let count = socket.recv(&mut got)?;
        if got[..count] == sent {
            Ok(())
        } else {
            Err(std::io::Error::other("the returned datagram differs"))
        }
    })
}

fn print_times(
    count: usize,
    mut round_trip: impl FnMut() -> std::io::Result<()>,
) -> std::io::Result<()> {
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let begun = Instant::now();
        round_trip()?;
        times.push(begun.elapsed().as_micros());
        // So that one exchange does not wait behind another.
        std::thread::sleep(Duration::from_millis(1));
    }
    times.sort_unstable();
    println!("{} {} {}", times[0], times[count / 2], times[count - 1]);
    Ok(())
}

/// Sends `count` datagrams of `bytes` bytes at `rate` per second, and reads no answers.
pub(crate) fn datagrams(
    to: SocketAddr,
    count: u64,
    bytes: usize,
    rate: u64,
) -> std::io::Result<()> {
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    let sent = content(bytes);
    let begun = Instant::now();
    for number in 0..count {
        // The error of an unreachable destination is ignored: only the sending counts.
        let _ = socket.send_to(&sent, to);
        if number % BURST == BURST - 1 {
            let due = begun + Duration::from_nanos(number * 1_000_000_000 / rate);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    }
    Ok(())
}

/// Sends this many bytes, and verifies what arrived by its digest. Prints bits per second.
pub(crate) fn digest(to: SocketAddr, bytes: usize) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let sent = content(bytes);
    let begun = Instant::now();
    stream.write_all(&[DIGEST])?;
    stream.write_all(&sent)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut got = String::new();
    stream.read_to_string(&mut got)?;
    let took = begun.elapsed();
    let mut expected = Sha256::new();
    expected.update(&sent);
    if got != hex(expected) {
        return Err(std::io::Error::other(
            "the received bytes differ from the sent bytes",
        ));
    }
    println!("{:.0}", bytes as f64 * 8.0 / took.as_secs_f64());
    Ok(())
}

/// Returns bytes in which no two sections are equal.
fn content(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..bytes.div_ceil(8))
        .flat_map(|_| next())
        .take(bytes)
        .collect()
}
