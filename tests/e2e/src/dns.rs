//! A DNS client without a resolver library, in a host's namespace: one query, one server. It does
//! not check the results.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use canal_timing::deadline;
use canal_world::World;
use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};

/// Timeout of a query. As the resolver of a pod waits for a server (`world/src/services.rs`).
const TIMEOUT: Duration = Duration::from_secs(1);
/// DNS's port.
const PORT: u16 = 53;

/// The parts of a DNS server's response that tests check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsAnswer {
    /// Response code, RFC 1035 4.1.1.
    pub code: ResponseCode,
    /// Addresses in order, each with its TTL in seconds.
    pub addresses: Vec<(IpAddr, u32)>,
}

/// Returns a query for the addresses of one family.
pub fn query(name: &str, is_v6: bool) -> Vec<u8> {
    let name = Name::from_ascii(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    let mut message = Message::new();
    message.set_id(0xca01).set_recursion_desired(true);
    message.add_query(Query::query(
        name,
        if is_v6 {
            RecordType::AAAA
        } else {
            RecordType::A
        },
    ));
    message.to_vec().expect("a short question")
}

fn read(bytes: &[u8]) -> Option<DnsAnswer> {
    let message = Message::from_vec(bytes).ok()?;
    let addresses = message
        .answers()
        .iter()
        .filter_map(|record| Some((record.data().ip_addr()?, record.ttl())))
        .collect();
    Some(DnsAnswer {
        code: message.response_code(),
        addresses,
    })
}

/// Sends the query over UDP, in the gate every second again until its deadline, as a resolver does
/// (RFC 1035 4.2.1): a question that arrives while a replica is replaced may be lost. `None`: no
/// answer in time, or none that can be read.
pub fn query_udp(world: &World, host: &str, server: IpAddr, question: &[u8]) -> Option<DnsAnswer> {
    let started = Instant::now();
    loop {
        let answer = query_udp_within(TIMEOUT, world, host, server, question);
        if answer.is_some() || started.elapsed() >= deadline(TIMEOUT) {
            return answer;
        }
    }
}

/// Sends the query over UDP once, and waits this long for the answer.
pub fn query_udp_within(
    timeout: Duration,
    world: &World,
    host: &str,
    server: IpAddr,
    question: &[u8],
) -> Option<DnsAnswer> {
    let any = if server.is_ipv6() {
        "[::]:0"
    } else {
        "0.0.0.0:0"
    };
    let socket = world
        .inside(host, || UdpSocket::bind(any))
        .unwrap_or_else(|e| panic!("{host}: {e}"))
        .ok()?;
    socket.set_read_timeout(Some(timeout)).ok()?;
    socket.connect((server, PORT)).ok()?;
    socket.send(question).ok()?;
    let mut buffer = [0; 2048];
    let length = socket.recv(&mut buffer).ok()?;
    read(&buffer[..length])
}

/// Sends the query over TCP (RFC 1035 4.2.2).
pub fn query_tcp(world: &World, host: &str, server: IpAddr, question: &[u8]) -> Option<DnsAnswer> {
    let dial = || TcpStream::connect_timeout(&SocketAddr::from((server, PORT)), deadline(TIMEOUT));
    let mut stream = world
        .inside(host, dial)
        .unwrap_or_else(|e| panic!("{host}: {e}"))
        .ok()?;
    stream.set_read_timeout(Some(deadline(TIMEOUT))).ok()?;
    let length = u16::try_from(question.len()).ok()?;
    stream
        .write_all(&[&length.to_be_bytes()[..], question].concat())
        .ok()?;
    let mut length = [0; 2];
    stream.read_exact(&mut length).ok()?;
    let mut answer = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut answer).ok()?;
    read(&answer)
}
