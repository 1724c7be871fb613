//! Session scan: finds the sessions of this network namespace by service and bucket.
//!
//! It uses the kernel's socket diagnostics (`NETLINK_SOCK_DIAG`, `linux/inet_diag.h`). The kernel
//! filters out sockets without a service address inside the tier, so the gateway's own connections
//! cost almost nothing. The agent decides when to scan, and what a result means.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_model::ids::ServiceId;
use canal_wire::tier;
use socket2::{Domain, Protocol, Socket, Type};

/// Values of `AF_NETLINK`, `NETLINK_SOCK_DIAG`, and the socket families (`linux/socket.h`,
/// `linux/netlink.h`).
const NETLINK: i32 = 16;
const SOCK_DIAG: i32 = 4;
const V4: u8 = 2;
const V6: u8 = 10;
/// Values of `SOCK_DIAG_BY_FAMILY`; `NLM_F_REQUEST | NLM_F_DUMP`; `NLMSG_NOOP`, `NLMSG_ERROR`,
/// `NLMSG_DONE`.
const BY_FAMILY: u16 = 20;
const DUMP: u16 = 0x301;
const NOOP: u16 = 1;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// Values of `INET_DIAG_REQ_BYTECODE`, and of the filter's operations `INET_DIAG_BC_JMP` and
/// `INET_DIAG_BC_S_COND`.
const FILTER: u16 = 1;
const JUMP: u8 = 1;
const IS_LOCAL: u8 = 7;
/// Value of `IPPROTO_TCP` in a request.
const TCP: u8 = 6;
/// States that count as sessions, one bit each (`net/tcp_states.h`): all but `TCP_CLOSE` (7) and
/// `TCP_LISTEN` (10). Half-open sessions (3 and 12) and those in TIME_WAIT (6) count, because they
/// still answer packets.
const SESSIONS: u32 = 0x1ffe & !(1 << 7 | 1 << 10);
/// Service addresses inside the tier, `240.0.0.0/8` and `fdca:a1:0:240::/96`, as in
/// [`tier::service_of`].
const SERVICES_V4: Ipv4Addr = Ipv4Addr::new(240, 0, 0, 0);
const SERVICES_V6: Ipv6Addr = Ipv6Addr::new(0xfdca, 0xa1, 0, 0x240, 0, 0, 0, 0);
/// Sizes of `nlmsghdr`, `inet_diag_req_v2` and `inet_diag_msg` in bytes.
const HEAD: usize = 16;
const REQUEST: usize = 56;
const MESSAGE: usize = 72;
/// Buffer for one piece of a dump in bytes; the kernel sends at most 32 KiB.
const PIECE_MAX: usize = 64 << 10;
/// Timeout of one piece. The kernel needs micro- to milliseconds for it; without one for so long
/// the dump has stopped.
const PIECE_TIMEOUT: Duration = Duration::from_secs(1);

/// Open sessions of one service on this replica: a bit per bucket, and their number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServiceSessions {
    /// One bit per bucket, with bucket 0 as the least significant.
    pub buckets: u128,
    pub sessions: u32,
}

/// All sessions of this replica, by service.
pub type OwnedSessions = BTreeMap<ServiceId, ServiceSessions>;

/// Reason why a scan is unusable.
#[derive(Debug, thiserror::Error)]
pub enum SessionScanError {
    #[error(
        "requesting the TCP sockets from the kernel: {0}; fix: use a kernel with CONFIG_INET_TCP_DIAG (or load the module tcp_diag), and allow netlink sockets"
    )]
    Io(#[from] io::Error),
    /// No result is better than one that misses sessions.
    #[error("the kernel's sockets were not all read in time")]
    Late,
    #[error("the kernel's answer on its TCP sockets has an unknown format: {0}")]
    Format(&'static str),
}

/// Scans once, and gives up at the given instant.
type SessionScanFn = dyn Fn(Instant) -> Result<OwnedSessions, SessionScanError> + Send + Sync;

/// Finds one client's sessions (service and port), and gives up at the given instant.
type Find =
    dyn Fn(SocketAddr, Instant) -> Result<Vec<(ServiceId, u16)>, SessionScanError> + Send + Sync;

/// Finds sessions in the kernel or another source. Clones share it.
#[derive(Clone)]
pub struct SessionScanner {
    scan: Arc<SessionScanFn>,
    find: Arc<Find>,
}

impl SessionScanner {
    /// Creates a scanner of the kernel's sockets in the network namespace of the scanning thread.
    pub fn kernel() -> Self {
        Self::of(
            |until| scan_kernel(|| Instant::now() > until),
            |client, until| find(client, || Instant::now() > until),
        )
    }

    /// Creates a scanner of another source.
    pub fn of(
        scan: impl Fn(Instant) -> Result<OwnedSessions, SessionScanError> + Send + Sync + 'static,
        find: impl Fn(SocketAddr, Instant) -> Result<Vec<(ServiceId, u16)>, SessionScanError>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self {
            scan: Arc::new(scan),
            find: Arc::new(find),
        }
    }

    /// Returns all sessions. Blocks the thread.
    ///
    /// # Errors
    /// The scan failed, or was incomplete at `until`.
    pub fn scan(&self, until: Instant) -> Result<OwnedSessions, SessionScanError> {
        (self.scan)(until)
    }

    /// Returns a client's sessions: service and service port. Blocks the thread. Tenants' addresses
    /// may overlap, so several tenants may have a client with this address.
    ///
    /// # Errors
    /// The scan failed, or was incomplete at `until`.
    pub fn find(
        &self,
        client: SocketAddr,
        until: Instant,
    ) -> Result<Vec<(ServiceId, u16)>, SessionScanError> {
        (self.find)(client, until)
    }
}

impl std::fmt::Debug for SessionScanner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sockets")
    }
}

/// Returns all sessions of both families.
fn scan_kernel(late: impl FnMut() -> bool) -> Result<OwnedSessions, SessionScanError> {
    let mut owned = OwnedSessions::new();
    dump(late, &mut |session| add(&mut owned, session))?;
    Ok(owned)
}

/// Returns one client's sessions in both families.
fn find(
    client: SocketAddr,
    late: impl FnMut() -> bool,
) -> Result<Vec<(ServiceId, u16)>, SessionScanError> {
    let mut sessions = Vec::new();
    dump(late, &mut |(service, port, of)| {
        if of == client {
            sessions.push((service, port));
        }
    })?;
    Ok(sessions)
}

/// Session of a socket: service, service port, client.
type SocketSession = (ServiceId, u16, SocketAddr);

fn add(owned: &mut OwnedSessions, (service, port, client): SocketSession) {
    let of = owned.entry(service).or_default();
    of.buckets |= 1 << tier::bucket(client, port, service);
    of.sessions = of.sessions.saturating_add(1);
}

/// Passes all sessions of both families to `take`. After each piece, `late` returns whether to give
/// up.
fn dump(
    mut late: impl FnMut() -> bool,
    take: &mut dyn FnMut(SocketSession),
) -> Result<(), SessionScanError> {
    // One socket per family: the rest of an unfinished dump could be read as the next one's.
    for family in [V4, V6] {
        let socket = Socket::new(
            Domain::from(NETLINK),
            Type::DGRAM,
            Some(Protocol::from(SOCK_DIAG)),
        )?;
        socket.set_read_timeout(Some(PIECE_TIMEOUT))?;
        socket.send(&request(family))?;
        let mut piece = vec![0; PIECE_MAX];
        loop {
            let length = match (&socket).read(&mut piece) {
                Ok(length) => length,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    return Err(SessionScanError::Late);
                }
                Err(e) => return Err(e.into()),
            };
            if read(&piece[..length], family, take)? {
                break;
            }
            if late() {
                return Err(SessionScanError::Late);
            }
        }
    }
    Ok(())
}

/// Builds the request for all sessions of one family whose local address is a service's.
fn request(family: u8) -> Vec<u8> {
    let filter = filter(family);
    let attribute = 4 + filter.len();
    let mut message = Vec::with_capacity(HEAD + REQUEST + attribute);
    message.extend_from_slice(&((HEAD + REQUEST + attribute) as u32).to_ne_bytes());
    message.extend_from_slice(&BY_FAMILY.to_ne_bytes());
    message.extend_from_slice(&DUMP.to_ne_bytes());
    message.extend_from_slice(&u32::from(family).to_ne_bytes());
    message.extend_from_slice(&[0; 4]);
    message.extend_from_slice(&[family, TCP, 0, 0]);
    message.extend_from_slice(&SESSIONS.to_ne_bytes());
    // The rest is zero, because the request is not for a single socket.
    message.resize(HEAD + REQUEST, 0);
    message.extend_from_slice(&(attribute as u16).to_ne_bytes());
    message.extend_from_slice(&FILTER.to_ne_bytes());
    message.extend_from_slice(&filter);
    message
}

/// Builds the filter in the kernel's bytecode. Each operation contains the offset of the next one
/// if its condition is met, and if not; an offset 4 bytes beyond the end excludes the socket. A
/// socket of the IPv6 family may have a mapped IPv4 address, because the gateway listens for both
/// at once.
fn filter(family: u8) -> Vec<u8> {
    let (v4, v6) = (
        local(V4, &SERVICES_V4.octets(), 8),
        local(V6, &SERVICES_V6.octets(), 96),
    );
    if family == V4 {
        return v4;
    }
    let mut either = v4;
    // If the address is not IPv4, continue behind the jump.
    let behind = (either.len() + 4) as u16;
    either[2..4].copy_from_slice(&behind.to_ne_bytes());
    either.extend_from_slice(&[JUMP, 4]);
    either.extend_from_slice(&((4 + v6.len()) as u16).to_ne_bytes());
    either.extend_from_slice(&v6);
    either
}

/// Builds the condition that the local address is in the prefix, with any port (-1):
/// `inet_diag_bc_op` and `inet_diag_hostcond`.
fn local(family: u8, prefix: &[u8], bits: u8) -> Vec<u8> {
    let length = (4 + 8 + prefix.len()) as u8;
    let mut condition = vec![IS_LOCAL, length];
    condition.extend_from_slice(&(u16::from(length) + 4).to_ne_bytes());
    condition.extend_from_slice(&[family, bits, 0, 0]);
    condition.extend_from_slice(&(-1i32).to_ne_bytes());
    condition.extend_from_slice(prefix);
    condition
}

/// Passes the sessions of one piece of a dump to `take`. Returns whether the dump has ended.
fn read(
    mut piece: &[u8],
    family: u8,
    take: &mut dyn FnMut(SocketSession),
) -> Result<bool, SessionScanError> {
    if piece.is_empty() {
        return Err(SessionScanError::Format("an empty piece"));
    }
    while !piece.is_empty() {
        let word = |at: usize| {
            piece
                .get(at..at + 4)
                .and_then(|b| Some(u32::from_ne_bytes(b.try_into().ok()?)))
        };
        let (Some(length), Some(kind), Some(number)) = (word(0), word(4), word(8)) else {
            return Err(SessionScanError::Format("a message without a head"));
        };
        // In memory the kind precedes the flags.
        let [low, high, ..] = kind.to_ne_bytes();
        // A length that does not fit exceeds the piece, which is refused next.
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let Some(body) = piece.get(HEAD..length) else {
            return Err(SessionScanError::Format("a truncated message"));
        };
        // The request has the family as its sequence number.
        if number != u32::from(family) {
            return Err(SessionScanError::Format("the answer to another request"));
        }
        match u16::from_ne_bytes([low, high]) {
            // Netlink requires that such a message is ignored.
            NOOP => {}
            // Both begin with a negative error number, but an old kernel's end of a dump has none.
            kind @ (DONE | ERROR) => match body
                .get(..4)
                .and_then(|b| Some(i32::from_ne_bytes(b.try_into().ok()?)))
            {
                Some(problem) if problem < 0 => {
                    // The smallest number has no negative; no kernel sends it.
                    return Err(io::Error::from_raw_os_error(problem.saturating_neg()).into());
                }
                _ if kind == DONE => return Ok(true),
                // An ERROR of 0 is an acknowledgment (netlink(7)), which ends no dump.
                _ => {}
            },
            BY_FAMILY => {
                if let Some(session) = decide_session(body)? {
                    take(session);
                }
            }
            _ => return Err(SessionScanError::Format("a message of another kind")),
        }
        // Messages are padded to 4 bytes, except perhaps the last one.
        piece = piece.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// Parses the session of a socket; `None`: another socket, from a kernel without filters.
fn decide_session(body: &[u8]) -> Result<Option<SocketSession>, SessionScanError> {
    let Some(message) = body.first_chunk::<MESSAGE>() else {
        return Err(SessionScanError::Format("a truncated socket"));
    };
    let [family, state, ..] = *message;
    // `inet_diag_sockid` follows four bytes: both ports and both addresses in network order.
    let port = |at: usize| u16::from_be_bytes([message[at], message[at + 1]]);
    let address = |at: usize| {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&message[at..at + 16]);
        match family {
            V4 => Ok(IpAddr::V4(Ipv4Addr::new(
                bytes[0], bytes[1], bytes[2], bytes[3],
            ))),
            V6 => Ok(IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()),
            _ => Err(SessionScanError::Format("a socket of another family")),
        }
    };
    let (local, client) = (address(8)?, SocketAddr::new(address(24)?, port(6)));
    if state >= 32 || SESSIONS & 1 << state == 0 {
        return Ok(None);
    }
    Ok(tier::service_of(local).map(|service| (service, port(4), client)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u32) -> ServiceId {
        ServiceId::new(n).unwrap()
    }

    fn buckets(port: u16, service: u32, clients: &[&str]) -> u128 {
        clients.iter().fold(0, |all, c| {
            all | 1 << tier::bucket(c.parse().unwrap(), port, id(service))
        })
    }

    /// Builds a message of a dump from its kind and the bytes after its header.
    fn message(family: u8, kind: u16, body: &[u8]) -> Vec<u8> {
        let length = (HEAD + body.len()) as u32;
        let head = [
            &length.to_ne_bytes()[..],
            &kind.to_ne_bytes(),
            &[0; 2],
            &u32::from(family).to_ne_bytes(),
            &[0; 4],
            body,
        ];
        head.concat()
    }

    /// Builds a socket's message as the kernel does, with an attribute at its end, because there
    /// always is one.
    fn socket(family: u8, state: u8, local: &str, client: &str) -> Vec<u8> {
        let (local, client): (SocketAddr, SocketAddr) =
            (local.parse().unwrap(), client.parse().unwrap());
        let octets = |a: SocketAddr| match (a.ip(), family) {
            (IpAddr::V4(v4), V4) => [v4.octets().as_slice(), &[0; 12]].concat(),
            (IpAddr::V4(v4), _) => v4.to_ipv6_mapped().octets().to_vec(),
            (IpAddr::V6(v6), _) => v6.octets().to_vec(),
        };
        let parts = [
            &[family, state, 0, 0][..],
            &local.port().to_be_bytes(),
            &client.port().to_be_bytes(),
            &octets(local),
            &octets(client),
        ];
        let mut body = parts.concat();
        body.resize(MESSAGE, 0);
        body.extend_from_slice(&[5, 0, 8, 0, 7, 0, 0, 0]);
        message(family, BY_FAMILY, &body)
    }

    /// Calls [`super::read`] and collects the sessions in a table.
    fn read(piece: &[u8], family: u8, owned: &mut OwnedSessions) -> Result<bool, SessionScanError> {
        super::read(piece, family, &mut |session| add(owned, session))
    }

    #[test]
    fn sessions_of_services_are_found_in_both_families() {
        let mut owned = OwnedSessions::new();
        // The second argument is the state of the socket (net/tcp_states.h): 1 is established, 3 and
        // 12 half-open, 6 TIME_WAIT, 7 closed, 8 CLOSE_WAIT, and 10 listening.
        let first = [
            socket(V4, 1, "240.0.0.7:80", "10.1.1.9:40000"),
            // Half-open sessions in both forms, and one in TIME_WAIT.
            socket(V4, 3, "240.0.0.7:80", "10.1.1.9:40001"),
            socket(V4, 12, "240.0.0.7:80", "10.1.1.10:40002"),
            socket(V4, 6, "240.0.0.7:80", "10.1.1.10:40003"),
            // A listener, a closed socket, and a connection of the gateway: a kernel without
            // filters sends them as well.
            socket(V4, 10, "240.0.0.7:80", "0.0.0.0:0"),
            socket(V4, 7, "240.0.0.7:80", "10.1.1.9:40009"),
            socket(V4, 1, "250.1.0.1:34000", "10.1.2.3:8080"),
        ];
        assert!(!read(&first.concat(), V4, &mut owned).unwrap());
        assert!(read(&message(V4, DONE, &[0; 4]), V4, &mut owned).unwrap());
        let clients = [
            "10.1.1.9:40000",
            "10.1.1.9:40001",
            "10.1.1.10:40002",
            "10.1.1.10:40003",
        ];
        let seven = buckets(80, 7, &clients);
        assert_eq!(
            owned,
            OwnedSessions::from([(
                id(7),
                ServiceSessions {
                    buckets: seven,
                    sessions: 4
                }
            )])
        );
        let second = [
            socket(V6, 1, "240.0.0.7:80", "10.1.1.9:40004"),
            socket(V6, 8, "[fdca:a1:0:240::1:203]:15008", "[fd77::9]:40005"),
            message(V6, NOOP, &[]),
            message(V6, DONE, &[]),
        ];
        assert!(read(&second.concat(), V6, &mut owned).unwrap());
        let seven = ServiceSessions {
            buckets: seven | buckets(80, 7, &["10.1.1.9:40004"]),
            sessions: 5,
        };
        let eight = ServiceSessions {
            buckets: buckets(15008, 0x01_0203, &["[fd77::9]:40005"]),
            sessions: 1,
        };
        assert_eq!(
            owned,
            OwnedSessions::from([(id(7), seven), (id(0x01_0203), eight)])
        );
    }

    #[test]
    fn an_answer_that_is_not_whole_is_an_error() {
        let one = socket(V4, 1, "240.0.0.7:80", "10.1.1.9:40000");
        let short = |n: usize| one[..n].to_vec();
        let long = {
            let mut long = one.clone();
            long[..4].copy_from_slice(&200u32.to_ne_bytes());
            long
        };
        let cases: [(&str, Vec<u8>); 8] = [
            ("nothing", Vec::new()),
            ("half a head", short(7)),
            ("shorter than its length field", short(one.len() - 1)),
            ("more than it has", long),
            ("no length", vec![0; HEAD]),
            ("a small socket", message(V4, BY_FAMILY, &[V4, 1, 0, 0])),
            ("another question", message(V6, DONE, &[0; 4])),
            ("another kind", message(V4, 99, &[])),
        ];
        for (name, piece) in cases {
            assert!(
                matches!(
                    read(&piece, V4, &mut OwnedSessions::new()),
                    Err(SessionScanError::Format(_))
                ),
                "{name}"
            );
        }
        // Family 9 is neither of the two that the scanner requests.
        let mut family = message(V4, BY_FAMILY, &one[HEAD..]);
        family[HEAD] = 9;
        assert!(matches!(
            read(&family, V4, &mut OwnedSessions::new()),
            Err(SessionScanError::Format(_))
        ));
        // The kernel may refuse a dump at its beginning or at its end.
        // -2 is ENOENT, the answer of a kernel without the module for socket diagnosis.
        for kind in [ERROR, DONE] {
            let refused = read(
                &message(V4, kind, &(-2i32).to_ne_bytes()),
                V4,
                &mut OwnedSessions::new(),
            )
            .unwrap_err()
            .to_string();
            assert!(
                refused.contains("os error 2") && refused.contains("CONFIG_INET_TCP_DIAG"),
                "{refused}"
            );
        }
    }

    #[test]
    fn random_bytes_never_panic() {
        let one = socket(V4, 1, "240.0.0.7:80", "10.1.1.9:40000");
        for _ in 0..5000 {
            let mut piece = one.repeat(3);
            for _ in 0..rand::random_range(1..8) {
                let at = rand::random_range(0..piece.len());
                piece[at] = rand::random();
            }
            piece.truncate(rand::random_range(0..=piece.len()));
            let _ = read(&piece, V4, &mut OwnedSessions::new());
        }
    }

    /// Runs the bytecode as `inet_diag_bc_run` does. Returns whether it ends exactly at the end of
    /// the code.
    fn passes(code: &[u8], family: u8, local: IpAddr) -> bool {
        let (mut at, end) = (0, code.len());
        while at < end {
            let holds = code[at] == IS_LOCAL && {
                let (of, bits, prefix) = (
                    code[at + 4],
                    usize::from(code[at + 5]),
                    &code[at + 12..at + usize::from(code[at + 1])],
                );
                let address = match (family, of, local) {
                    (V4, V4, IpAddr::V4(v4)) => v4.octets().to_vec(),
                    (V6, V6, IpAddr::V6(v6)) => v6.octets().to_vec(),
                    (V6, V4, IpAddr::V6(v6)) => v6
                        .to_ipv4_mapped()
                        .map(|v4| v4.octets().to_vec())
                        .unwrap_or_default(),
                    _ => Vec::new(),
                };
                address.get(..bits / 8) == prefix.get(..bits / 8)
            };
            at += if holds {
                usize::from(code[at + 1])
            } else {
                usize::from(u16::from_ne_bytes([code[at + 2], code[at + 3]]))
            };
        }
        at == end
    }

    #[test]
    fn the_kernel_is_queried_for_service_addresses_only() {
        for (family, local, want) in [
            (V4, "240.0.0.7", true),
            (V4, "240.255.1.2", true),
            (V4, "250.1.0.1", false),
            (V4, "127.0.0.1", false),
            (V6, "::ffff:240.0.0.7", true),
            (V6, "::ffff:250.1.0.1", false),
            (V6, "fdca:a1:0:240::7", true),
            (V6, "fdca:a1:0:250::7", false),
            (V6, "fdca:a1:0:240:1::7", false),
            (V6, "::1", false),
        ] {
            let address: IpAddr = local.parse().unwrap();
            assert_eq!(passes(&filter(family), family, address), want, "{local}");
            assert_eq!(tier::service_of(address).is_some(), want, "{local}");
        }
        for family in [V4, V6] {
            let asked = request(family);
            assert_eq!(asked.len() % 4, 0);
            assert_eq!(
                asked.len() as u32,
                u32::from_ne_bytes(asked[..4].try_into().unwrap())
            );
        }
    }
}
