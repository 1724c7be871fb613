//! A tiny network peer for tests in worlds: `listen PORT`, `dial ADDRESS [SECONDS]`, `pour ADDRESS
//! BYTES`, `udp ADDRESS`, the measuring commands of `probe`, and the attacker's `spoof …`. It needs
//! nothing that a bare machine lacks.
#![forbid(unsafe_code)]

mod packet;
mod probe;
mod spoof;

use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

/// Timeout for a peer that may not answer. A lost SYN is repeated once within it, after 1 s. Tests
/// of refused packets wait all of it, so it is short.
const TIMEOUT: Duration = Duration::from_secs(2);

fn main() -> std::io::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["listen", port] => listen(number(port)? as u16),
        ["dial", address] => dial(target(address)?, TIMEOUT),
        ["dial", address, seconds] => dial(target(address)?, Duration::from_secs(number(seconds)?)),
        ["pour", address, bytes] => pour(target(address)?, number(bytes)?),
        ["udp", address] => udp(target(address)?),
        ["echo", port] => probe::echo(number(port)? as u16),
        ["rtt", address, count] => {
            probe::tcp_round_trips(target(address)?, number(count)? as usize)
        }
        ["rtt-udp", address, count, bytes] => probe::udp_round_trips(
            target(address)?,
            number(count)? as usize,
            number(bytes)? as usize,
        ),
        ["datagrams", address, count, bytes, rate] => probe::datagrams(
            target(address)?,
            number(count)?,
            number(bytes)? as usize,
            number(rate)?.max(1),
        ),
        ["digest", address, bytes] => probe::digest(target(address)?, number(bytes)? as usize),
        ["spoof", order @ ..] => spoof::spoof(order),
        _ => {
            let usage = "usage: canal-world-peer listen PORT | dial ADDRESS [SECONDS] | pour ADDRESS BYTES | udp ADDRESS | echo PORT | rtt ADDRESS COUNT | \
                rtt-udp ADDRESS COUNT BYTES | datagrams ADDRESS COUNT BYTES RATE | digest ADDRESS BYTES | ";
            Err(std::io::Error::other(format!("{usage}{}", spoof::USAGE)))
        }
    }
}

fn number(text: &str) -> std::io::Result<u64> {
    text.parse().map_err(std::io::Error::other)
}

fn target(text: &str) -> std::io::Result<SocketAddr> {
    text.parse().map_err(std::io::Error::other)
}

/// Listens on both IP families. It answers `GET` with a page that contains the client's address,
/// and discards anything else.
fn listen(port: u16) -> std::io::Result<()> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))?;
    println!("listening on {port}");
    for stream in listener.incoming() {
        let stream = stream?;
        std::thread::spawn(move || serve(stream));
    }
    Ok(())
}

fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    let peer = stream.peer_addr()?.ip().to_canonical();
    let mut chunk = vec![0; 1 << 16];
    let count = stream.read(&mut chunk)?;
    if chunk[..count].starts_with(b"GET ") {
        let body = format!("you are {peer}\n");
        return write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
    }
    while stream.read(&mut chunk)? > 0 {}
    stream.write_all(b"done")
}

/// Sends a request and prints the last line of the response.
fn dial(to: SocketAddr, timeout: Duration) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, timeout)?;
    stream.set_read_timeout(Some(timeout))?;
    stream.write_all(b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    println!("{}", answer.lines().last().unwrap_or_default());
    Ok(())
}

/// Sends this many bytes, waits until they have arrived, and prints bits per second.
fn pour(to: SocketAddr, bytes: u64) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(to)?;
    let started = Instant::now();
    let chunk = vec![b'x'; 1 << 16];
    let mut left = bytes;
    while left > 0 {
        let count = left.min(chunk.len() as u64);
        stream.write_all(&chunk[..count as usize])?;
        left -= count;
    }
    stream.shutdown(std::net::Shutdown::Write)?;
    stream.read_to_end(&mut Vec::new())?;
    println!(
        "{:.0}",
        bytes as f64 * 8.0 / started.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Sends two datagrams, the second only if the first causes no error. An unreachable destination
/// causes one.
fn udp(to: SocketAddr) -> std::io::Result<()> {
    let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.connect(to)?;
    socket.set_read_timeout(Some(TIMEOUT))?;
    socket.send(b"one")?;
    match socket.recv(&mut [0; 16]) {
        Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => Err(error),
        _ => socket.send(b"two").map(drop),
    }
}
