//! The protocol of the supervisor's socket: one JSON request per line and one JSON response per
//! line. It carries requests and does not act on them; `supervisor` does.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::host_environment::HostEnvironment;
use crate::process_supervisor::ProcessStatus;
use crate::topology::PodTemplate;

/// Maximum length of a request or response; longer ones are refused. The largest world's status is
/// far below. Nobody measured the value; 2,000 hosts at 8 KiB each would fit.
const MESSAGE_BYTES_MAX: u64 = 16 << 20;
/// Timeout for a response: longer than the longest request, because a process has 35 s to end.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// A request to a world's supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum WorldRequest {
    /// Returns all hosts with the status of their processes.
    Status,
    /// Starts a host's process if it is not running.
    Start { host: String },
    /// Ends a host's process, which stays ended.
    Stop { host: String },
    /// Ends a host's process and starts it again.
    Restart { host: String },
    /// Creates the replicas of a pod.
    AddPod {
        tenant: String,
        pod: Box<PodTemplate>,
    },
    /// Removes one pod from the world.
    RemovePod { uid: String },
    /// Creates a gateway of a backend in an AZ.
    AddGateway {
        name: String,
        az: String,
        backend: String,
    },
    /// Ends a gateway's process and removes the gateway.
    RemoveGateway { name: String },
    /// Cuts an AZ off from the others, and optionally kills its hosts' processes.
    CutAz { az: String, hosts_die: bool },
    /// Reverts the effects of `CutAz`.
    HealAz { az: String },
    /// Takes a host's link down or up.
    Link { host: String, up: bool },
    /// Takes the world down and ends the supervisor.
    Down,
}

/// State of a host or pod of a running world.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostStatus {
    /// The host's namespaces, addresses and files.
    pub environment: HostEnvironment,
    /// Status of the host's process.
    pub process: ProcessStatus,
}

impl HostStatus {
    /// IPv4 address of the pod, or of the host on the underlay.
    pub fn ip4(&self) -> Option<Ipv4Addr> {
        self.environment.ip4
    }

    /// IPv6 address of the pod; underlay hosts have none.
    pub fn ip6(&self) -> Option<Ipv6Addr> {
        self.environment.ip6
    }

    /// Returns the addresses of a gateway or node inside a tenant's overlay.
    pub fn overlay(&self, tenant: &str) -> Option<(Ipv4Addr, Ipv6Addr)> {
        self.environment.overlay.get(tenant).copied()
    }

    /// Process id while the host's process runs.
    pub fn pid(&self) -> Option<u32> {
        self.process.pid
    }
}

/// A response of a world's supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum WorldResponse {
    /// The request was carried out.
    Done,
    /// The current state of all hosts.
    Hosts(Vec<HostStatus>),
    /// Names of the created pods.
    Names(Vec<String>),
    /// The request was refused, for this reason.
    Refused(String),
}

/// Sends one request and reads its response. It fails if the supervisor does not answer or the
/// response is not readable.
pub(crate) fn send_request(
    socket: &Path,
    request: &WorldRequest,
) -> std::io::Result<WorldResponse> {
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

/// Reads the next message. Returns `None` at the end of the input.
pub(crate) fn read_line<T: for<'de> Deserialize<'de>>(
    input: &mut impl BufRead,
) -> std::io::Result<Option<T>> {
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
        write_line(&mut text, &WorldRequest::Down).expect("written");
        write_line(&mut text, &WorldRequest::Start { host: "gw1".into() }).expect("written");
        let mut input = BufReader::new(text.as_slice());
        assert!(matches!(
            read_line(&mut input),
            Ok(Some(WorldRequest::Down))
        ));
        assert!(
            matches!(read_line(&mut input), Ok(Some(WorldRequest::Start { host })) if host == "gw1")
        );
        assert!(matches!(read_line::<WorldRequest>(&mut input), Ok(None)));
        let mut endless = BufReader::new(std::io::repeat(b' '));
        assert!(read_line::<WorldRequest>(&mut endless).is_err());
    }
}
