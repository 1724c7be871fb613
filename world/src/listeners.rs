//! Queries the kernel whether a process listens on a TCP port (`sock_diag(7)`). It lists listening
//! sockets only. `/proc/net/tcp` also walks every bucket of the machine's table of connections,
//! which takes milliseconds, and many hosts of a world query at once. Start at [`has_listener`].

use std::io::{self, ErrorKind, Read};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

/// `AF_NETLINK`, `NETLINK_SOCK_DIAG`, `AF_INET` and `AF_INET6` (`linux/socket.h`,
/// `linux/netlink.h`).
const NETLINK: i32 = 16;
const SOCK_DIAG: i32 = 4;
const FAMILIES: [u8; 2] = [2, 10];
/// `SOCK_DIAG_BY_FAMILY`; `NLM_F_REQUEST | NLM_F_DUMP`; `NLMSG_ERROR`, `NLMSG_DONE`.
const BY_FAMILY: u16 = 20;
const DUMP: u16 = 0x301;
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// `IPPROTO_TCP`, and the bit of the state `TCP_LISTEN` (`net/tcp_states.h`).
const TCP: u8 = 6;
const LISTENING: u32 = 1 << 10;
/// Bytes of `nlmsghdr` and `inet_diag_req_v2`, and the offset of the local port in `inet_diag_msg`.
const HEAD: usize = 16;
const REQUEST: usize = 56;
const PORT: usize = 4;
/// Bytes of one piece of an answer; the kernel sends at most 32 KiB.
const PIECE_MAX: usize = 64 << 10;
/// Time for one piece, for which the kernel needs less than a millisecond.
const PIECE_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns whether a process listens on the TCP port in the calling thread's namespace. A failed or
/// late answer counts as no listener, because the caller repeats the query.
pub(crate) fn has_listener(port: u16) -> bool {
    FAMILIES
        .iter()
        .any(|family| find_listener(*family, port).unwrap_or(false))
}

fn find_listener(family: u8, port: u16) -> io::Result<bool> {
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
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            read => read?,
        };
        match read_piece(&piece[..length], port) {
            PieceContent::Listener => return Ok(true),
            PieceContent::End => return Ok(false),
            PieceContent::Others => {}
        }
    }
}

/// Builds the request for all listening sockets of a family.
fn request(family: u8) -> Vec<u8> {
    let mut message = Vec::with_capacity(HEAD + REQUEST);
    message.extend_from_slice(&((HEAD + REQUEST) as u32).to_ne_bytes());
    message.extend_from_slice(&BY_FAMILY.to_ne_bytes());
    message.extend_from_slice(&DUMP.to_ne_bytes());
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(&[family, TCP, 0, 0]);
    message.extend_from_slice(&LISTENING.to_ne_bytes());
    // The rest is zero, because the request is not for a single socket.
    message.resize(HEAD + REQUEST, 0);
    message
}

/// Content of one piece of the kernel's answer.
#[derive(Debug, PartialEq, Eq)]
enum PieceContent {
    /// A socket listens on the port.
    Listener,
    /// Only sockets on other ports; more pieces may come.
    Others,
    /// The last piece: the end of the dump, an error, or bytes that are no message.
    End,
}

fn read_piece(mut piece: &[u8], port: u16) -> PieceContent {
    while !piece.is_empty() {
        let word = |at: usize| {
            piece
                .get(at..at + 4)
                .and_then(|bytes| Some(u32::from_ne_bytes(bytes.try_into().ok()?)))
        };
        let (Some(length), Some(kind)) = (word(0), word(4)) else {
            return PieceContent::End;
        };
        // In memory the kind precedes the flags.
        let [low, high, ..] = kind.to_ne_bytes();
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let Some(body) = piece.get(HEAD..length) else {
            return PieceContent::End;
        };
        match u16::from_ne_bytes([low, high]) {
            DONE | ERROR => return PieceContent::End,
            BY_FAMILY if body.get(PORT..PORT + 2) == Some(&port.to_be_bytes()) => {
                return PieceContent::Listener;
            }
            _ => {}
        }
        // Messages are padded to 4 bytes, except perhaps the last one.
        piece = piece.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    PieceContent::Others
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_of_both_families_are_found_and_connections_are_none() {
        for address in ["127.0.0.1:0", "0.0.0.0:0", "[::1]:0", "[::]:0"] {
            let listener = std::net::TcpListener::bind(address).expect(address);
            let port = listener.local_addr().expect("an address").port();
            assert!(has_listener(port), "{address}");
            let client = std::net::TcpStream::connect(listener.local_addr().expect("an address"))
                .expect("a connection");
            let (_server, _) = listener.accept().expect("accepted");
            drop(listener);
            assert!(
                !has_listener(port),
                "{address}: a connection is no listener"
            );
            assert!(
                !has_listener(client.local_addr().expect("an address").port()),
                "{address}: nor is a client"
            );
        }
    }

    #[test]
    fn invalid_bytes_end_the_listing_of_listeners() {
        let message = |kind: u16, body: &[u8]| {
            let mut bytes = ((HEAD + body.len()) as u32).to_ne_bytes().to_vec();
            bytes.extend_from_slice(&kind.to_ne_bytes());
            bytes.resize(HEAD, 0);
            bytes.extend_from_slice(body);
            bytes
        };
        let socket = |port: u16| {
            message(
                BY_FAMILY,
                &[&[2, 10, 0, 0], &port.to_be_bytes()[..], &[0; 66]].concat(),
            )
        };
        let both = [socket(80), socket(15_001)].concat();
        for (name, bytes, expected) in [
            ("the second", both.clone(), PieceContent::Listener),
            ("others", socket(80), PieceContent::Others),
            (
                "an end",
                [socket(80), message(DONE, &[0; 4]), socket(15_001)].concat(),
                PieceContent::End,
            ),
            ("an error", message(ERROR, &[0xff; 4]), PieceContent::End),
            ("cut", both[..20].to_vec(), PieceContent::End),
            ("no head", vec![1, 2, 3], PieceContent::End),
        ] {
            assert_eq!(read_piece(&bytes, 15_001), expected, "{name}");
        }
    }
}
