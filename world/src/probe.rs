//! Probes once whether a host is ready. It runs on a thread that is already inside the network
//! namespace from which to probe. That thread is in no cgroup of the world, so probes are never
//! captured. Start at [`holds`].

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::host_environment::HostEnvironment;
use crate::launch;
use crate::topology::{Check, Readiness};

/// Maximum length of a status line; a longer one is a failure. "HTTP/1.1 503 Service Unavailable"
/// has 32 bytes.
const STATUS_LINE_MAX: usize = 256;

/// Returns whether the check succeeds now. Takes at most [`Readiness::TIMEOUT_MS`].
pub(crate) fn holds(check: &Check, environment: &HostEnvironment) -> bool {
    let deadline = Instant::now() + Duration::from_millis(Readiness::TIMEOUT_MS);
    let address = environment.ip4.map(IpAddr::V4);
    match (check, address) {
        (Check::Tcp { port }, Some(ip)) => connect(SocketAddr::new(ip, *port), deadline).is_some(),
        (Check::Http { port, path }, Some(ip)) => {
            status(SocketAddr::new(ip, *port), path, deadline)
                .is_some_and(|code| (200..400).contains(&code))
        }
        (Check::Exec(argv), _) => exits_well(launch::command(environment, argv), deadline),
        (Check::Tcp { .. } | Check::Http { .. }, None) => false,
    }
}

fn left(deadline: Instant) -> Option<Duration> {
    deadline
        .checked_duration_since(Instant::now())
        .filter(|left| !left.is_zero())
}

fn connect(to: SocketAddr, deadline: Instant) -> Option<TcpStream> {
    TcpStream::connect_timeout(&to, left(deadline)?).ok()
}

fn status(to: SocketAddr, path: &str, deadline: Instant) -> Option<u16> {
    let mut stream = connect(to, deadline)?;
    stream.set_write_timeout(left(deadline)).ok()?;
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {to}\r\nUser-Agent: canal-world\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut seen = Vec::new();
    let mut chunk = [0_u8; STATUS_LINE_MAX];
    loop {
        stream.set_read_timeout(Some(left(deadline)?)).ok()?;
        let count = stream.read(&mut chunk).ok().filter(|count| *count > 0)?;
        seen.extend_from_slice(&chunk[..count]);
        if seen.contains(&b'\n') {
            return status_code(&seen);
        }
        if seen.len() > STATUS_LINE_MAX {
            return None;
        }
    }
}

/// Parses a status line such as `HTTP/1.1 200 OK`.
fn status_code(line: &[u8]) -> Option<u16> {
    let line = std::str::from_utf8(line.split(|byte| *byte == b'\n').next()?).ok()?;
    let mut words = line.split_whitespace();
    words
        .next()
        .filter(|version| version.starts_with("HTTP/1."))?;
    words.next()?.parse().ok()
}

fn exits_well(command: crate::Result<Command>, deadline: Instant) -> bool {
    let Ok(mut command) = command else {
        return false;
    };
    let Ok(mut child) = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
    else {
        return false;
    };
    let in_time = ended_by(&child, deadline);
    if !in_time {
        // An error means that the process has just ended by itself.
        let _ = child.kill();
    }
    child.wait().is_ok_and(|status| in_time && status.success())
}

/// Returns whether the child ends before the deadline. The caller must still wait for it.
fn ended_by(child: &Child, deadline: Instant) -> bool {
    let Some(left) = left(deadline) else {
        return false;
    };
    let Ok(pidfd) = pidfd_open(Pid::from_child(child), PidfdFlags::empty()) else {
        return false;
    };
    let wait = Timespec::try_from(left).ok();
    poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], wait.as_ref()).is_ok_and(|count| count > 0)
}

/// Sends a signal to a child that may already have ended.
pub(crate) fn signal(pidfd: impl AsFd, signal: Signal) {
    // An ended process needs no signal.
    let _ = pidfd_send_signal(pidfd, signal);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_lines() {
        let cases: [(&str, &[u8], Option<u16>); 5] = [
            ("plain", b"HTTP/1.1 200 OK\r\n", Some(200)),
            ("no reason", b"HTTP/1.0 503\n", Some(503)),
            ("not http", b"SSH-2.0-OpenSSH 200\n", None),
            ("not a number", b"HTTP/1.1 abc\n", None),
            ("not text", b"\xff\xfe\n", None),
        ];
        for (name, line, expected) in cases {
            assert_eq!(status_code(line), expected, "{name}");
        }
    }

    /// Answers one connection with these bytes, and waits until the client closes it. Returns the
    /// status and the time that the client took, which had this much.
    fn answered(bytes: &'static [u8], within: Duration) -> (Option<u16>, Duration) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let to = listener.local_addr().expect("an address");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a caller");
            // A client that has read enough may be gone.
            let _ = stream.write_all(bytes);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        let started = Instant::now();
        let code = status(to, "/", started + within);
        let took = started.elapsed();
        server.join().expect("served");
        (code, took)
    }

    #[test]
    fn answers_are_bounded_in_length_and_time() {
        let short = Duration::from_millis(200);
        let within = canal_timing::deadline(short);
        assert_eq!(
            answered(b"HTTP/1.1 204 No Content\r\n\r\n", within).0,
            Some(204)
        );
        let (code, took) = answered(&[b'x'; STATUS_LINE_MAX + 1], within);
        assert!(
            code.is_none() && took < within,
            "a line without an end is no answer"
        );
        let (code, took) = answered(b"HTTP/1.1 20", short);
        assert!(
            code.is_none() && took >= short,
            "a partial answer is no answer"
        );
        canal_timing::assert_time(
            "time until a probe gives half an answer up",
            took,
            Duration::from_secs(2),
        );
    }
}
