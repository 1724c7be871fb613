//! Applications that need more of a socket than the capture tests' do. Run in the child.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use socket2::SockRef;

use super::lab::{self, pause, say};

fn dial(to: &str) -> TcpStream {
    let t = TcpStream::connect(to.parse::<SocketAddr>().unwrap()).unwrap();
    t.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    t
}

/// A byte at each position that neighbours and other streams do not have.
pub fn pattern(i: u64) -> u8 {
    ((i.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 56) as u8
}

/// Sends `n` bytes, closes its half, and reads all of it back.
fn echo(to: &str, n: u64) {
    let mut t = dial(to);
    let mut w = t.try_clone().unwrap();
    let writer = std::thread::spawn(move || {
        let mut at = 0;
        while at < n {
            let block: Vec<u8> = (at..n.min(at + 50_000)).map(pattern).collect();
            w.write_all(&block).unwrap();
            at += block.len() as u64;
        }
        w.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let (mut got, mut right, mut block) = (0u64, true, vec![0; 64 << 10]);
    loop {
        match t.read(&mut block) {
            Ok(0) => break,
            Ok(k) => {
                right &= block[..k].iter().enumerate().all(|(i, b)| *b == pattern(got + i as u64));
                got += k as u64;
            }
            Err(e) => return say(format!("error {:?} after {got}", e.kind())),
        }
    }
    writer.join().unwrap();
    say(format!("{got} right={right}"));
}

/// Sends a byte and goes with a reset when told to.
fn reset(to: &str) {
    let mut t = dial(to);
    t.write_all(b"x").unwrap();
    say("up");
    pause();
    SockRef::from(&t).set_linger(Some(Duration::ZERO)).unwrap();
}

/// Sends a byte and says how reading ends.
fn read_end(to: &str) {
    let mut t = dial(to);
    if let Err(e) = t.write_all(b"x") {
        return say(format!("write {:?}", e.kind()));
    }
    let mut rest = Vec::new();
    match t.read_to_end(&mut rest) {
        Ok(n) => say(format!("end after {n}")),
        Err(e) => say(format!("{:?}", e.kind())),
    }
}

/// Writes without blocking until nothing is taken for a second; says how much was.
fn flood(to: &str) {
    let mut t = dial(to);
    t.set_nonblocking(true).unwrap();
    let (block, mut sent, mut quiet) = (vec![7; 64 << 10], 0u64, 0);
    while quiet < 100 {
        match t.write(&block) {
            Ok(n) => (sent, quiet) = (sent + n as u64, 0),
            Err(_) => {
                quiet += 1;
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
    say(sent);
}

/// Stays connected until told to end, and ends in order.
fn stay(to: &str) {
    let mut t = dial(to);
    t.write_all(b"x").unwrap();
    say("up");
    pause();
    t.shutdown(std::net::Shutdown::Write).unwrap();
    let _ = t.read_to_end(&mut Vec::new());
}

/// `n` short connections from each of four threads, each echoed; says how many came back right.
fn many(to: &str, n: u64) {
    let one = |i: u64| -> std::io::Result<bool> {
        let mut t = dial(to);
        t.write_all(&i.to_be_bytes())?;
        t.shutdown(std::net::Shutdown::Write)?;
        let mut back = Vec::new();
        t.read_to_end(&mut back)?;
        Ok(back == i.to_be_bytes())
    };
    let all = |k: u64| (0..n).filter(|i| matches!(one(k * n + i), Ok(true))).count();
    let right: usize = std::thread::scope(|s| {
        let threads: Vec<_> = (0..4).map(|k| s.spawn(move || all(k))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).sum()
    });
    say(right);
}

/// Runs the named case.
pub fn run(case: &[String]) {
    match case[0].as_str() {
        "echo" => echo(&case[1], case[2].parse().unwrap()),
        "reset" => reset(&case[1]),
        "read_end" => read_end(&case[1]),
        "flood" => flood(&case[1]),
        "stay" => stay(&case[1]),
        "many" => many(&case[1], case[2].parse().unwrap()),
        _ => lab::client::run(case),
    }
}
