//! The supervisor's socket: one JSON request per line, one JSON answer per line.
//! Carries, does not act.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::life::Pulse;
use crate::seat::Seat;
use crate::topology::Pod;

/// A request or answer longer than this is refused: the largest world's status is far below.
const MESSAGE_BYTES_MAX: u64 = 16 << 20;
/// Longer than the longest order: a process has 35 s to end.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// What a world may be asked.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// All hosts with their pulses.
    Status,
    /// Run a host's process.
    Start { host: String },
    /// End a host's process, and leave it so.
    Stop { host: String },
    /// End a host's process and run it again.
    Restart { host: String },
    /// Make the replicas of a pod.
    AddPod { tenant: String, pod: Box<Pod> },
    /// Remove one pod.
    RemovePod { uid: String },
    /// Make a gateway of a backend in an AZ.
    AddGateway { name: String, az: String, backend: String },
    /// End a gateway's process and remove it.
    RemoveGateway { name: String },
    /// Cut an AZ off from the others, with its hosts alive or not.
    CutAz { az: String, hosts_die: bool },
    /// Undo that.
    HealAz { az: String },
    /// Take a host's link down, or up again.
    Link { host: String, up: bool },
    /// Take the world down.
    Down,
}

/// A host or pod of a living world.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Host {
    /// Where it is.
    pub seat: Seat,
    /// How its process is.
    pub pulse: Pulse,
}

impl Host {
    /// Its own IPv4 address: a pod's, or the underlay's.
    pub fn ip4(&self) -> Option<Ipv4Addr> {
        self.seat.ip4
    }

    /// Its own IPv6 address; hosts of the underlay have none.
    pub fn ip6(&self) -> Option<Ipv6Addr> {
        self.seat.ip6
    }

    /// A gateway's or node's addresses inside a tenant's overlay.
    pub fn overlay(&self, tenant: &str) -> Option<(Ipv4Addr, Ipv6Addr)> {
        self.seat.overlay.get(tenant).copied()
    }

    /// Id of its process while that runs.
    pub fn pid(&self) -> Option<u32> {
        self.pulse.pid
    }
}

/// The answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// Done.
    Done,
    /// All hosts.
    Hosts(Vec<Host>),
    /// Names of what was made.
    Names(Vec<String>),
    /// Refused, and why.
    Refused(String),
}

/// Asks once. Errors: the socket is dead or the answer unreadable.
pub(crate) fn ask(socket: &Path, request: &Request) -> std::io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWER_WITHIN))?;
    write_line(&mut stream, request)?;
    read_line(&mut BufReader::new(stream))?.ok_or_else(|| std::io::ErrorKind::UnexpectedEof.into())
}

pub(crate) fn write_line(out: &mut impl Write, message: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    out.write_all(&line)
}

/// The next message, or nothing at the end.
pub(crate) fn read_line<T: for<'de> Deserialize<'de>>(input: &mut impl BufRead) -> std::io::Result<Option<T>> {
    let mut line = Vec::new();
    input.take(MESSAGE_BYTES_MAX).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_line_by_line_and_not_for_ever() {
        let mut text = Vec::new();
        write_line(&mut text, &Request::Down).expect("written");
        write_line(&mut text, &Request::Start { host: "gw1".into() }).expect("written");
        let mut input = BufReader::new(text.as_slice());
        assert!(matches!(read_line(&mut input), Ok(Some(Request::Down))));
        assert!(matches!(read_line(&mut input), Ok(Some(Request::Start { host })) if host == "gw1"));
        assert!(matches!(read_line::<Request>(&mut input), Ok(None)));
        let mut endless = BufReader::new(std::io::repeat(b' '));
        assert!(read_line::<Request>(&mut endless).is_err());
    }
}
