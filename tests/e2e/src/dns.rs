//! DNS as a client without a resolver library speaks it, from a host's namespace: one question, one server, no retries. Judges nothing.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use canal_world::World;
use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};

/// How long a server may take.
const PATIENCE: Duration = Duration::from_secs(1);
const PORT: u16 = 53;

/// What a server said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// How it went, as RFC 1035 4.1.1 names it.
    pub code: ResponseCode,
    /// The addresses, in order, and for how many seconds each may be kept.
    pub addresses: Vec<(IpAddr, u32)>,
}

/// A question for the addresses of one family.
pub fn query(name: &str, is_v6: bool) -> Vec<u8> {
    let name = Name::from_ascii(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    let mut message = Message::new();
    message.set_id(0xca01).set_recursion_desired(true);
    message.add_query(Query::query(name, if is_v6 { RecordType::AAAA } else { RecordType::A }));
    message.to_vec().expect("a short question")
}

fn read(bytes: &[u8]) -> Option<Answer> {
    let message = Message::from_vec(bytes).ok()?;
    let addresses = message.answers().iter().filter_map(|record| Some((record.data().ip_addr()?, record.ttl()))).collect();
    Some(Answer { code: message.response_code(), addresses })
}

/// Asks over UDP. `None`: no answer in time, or none that can be read.
pub fn ask_udp(world: &World, host: &str, server: IpAddr, question: &[u8]) -> Option<Answer> {
    let any = if server.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    let socket = world.inside(host, || UdpSocket::bind(any)).unwrap_or_else(|e| panic!("{host}: {e}")).ok()?;
    socket.set_read_timeout(Some(PATIENCE)).ok()?;
    socket.connect((server, PORT)).ok()?;
    socket.send(question).ok()?;
    let mut room = [0; 2048];
    let length = socket.recv(&mut room).ok()?;
    read(&room[..length])
}

/// Asks over TCP (RFC 1035 4.2.2).
pub fn ask_tcp(world: &World, host: &str, server: IpAddr, question: &[u8]) -> Option<Answer> {
    let dial = || TcpStream::connect_timeout(&SocketAddr::from((server, PORT)), PATIENCE);
    let mut stream = world.inside(host, dial).unwrap_or_else(|e| panic!("{host}: {e}")).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let length = u16::try_from(question.len()).ok()?;
    stream.write_all(&[&length.to_be_bytes()[..], question].concat()).ok()?;
    let mut length = [0; 2];
    stream.read_exact(&mut length).ok()?;
    let mut answer = vec![0; u16::from_be_bytes(length).into()];
    stream.read_exact(&mut answer).ok()?;
    read(&answer)
}
