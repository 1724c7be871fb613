//! From a query's bytes to the answer's (RFC 1035, 2308, 6891). Pure: what is known is given, nothing is sent.

use std::net::IpAddr;

use canal_model::ids::{AzName, TenantName};
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::{A, AAAA, SOA};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

use super::zone::{Found, Zones};

/// Seconds that answers, also negative ones, may be kept: an AZ that closes is left within this time.
pub const TTL: u32 = 2;
/// Largest UDP answer, so that it needs no fragments (DNS flag day 2020).
pub const UDP_MAX: u16 = 1232;
/// Largest UDP answer to a client without EDNS (RFC 1035 4.2.1).
const UDP_PLAIN: u16 = 512;

/// How the query came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Udp,
    Tcp,
}

/// What to send, if anything, and the name that it is counted by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    pub bytes: Option<Vec<u8>>,
    pub result: &'static str,
}

impl Reply {
    fn silence(result: &'static str) -> Self {
        Self { bytes: None, result }
    }
}

/// Answers one message of a client of `tenant`, at a replica in `az`.
pub fn decide_reply(query: &[u8], zones: &Zones, tenant: &TenantName, az: &AzName, transport: Transport) -> Reply {
    let Ok(asked) = Message::from_vec(query) else { return malformed(query) };
    if asked.message_type() != MessageType::Query {
        // Answering answers would let two servers talk for ever.
        return Reply::silence("not_a_query");
    }
    let mut answer = Message::new();
    answer.set_id(asked.id()).set_message_type(MessageType::Response).set_op_code(asked.op_code());
    answer.set_recursion_desired(asked.recursion_desired());
    answer.add_queries(asked.queries().iter().take(1).cloned());
    if let Some(edns) = asked.extensions() {
        let mut own = Edns::new();
        own.set_max_payload(UDP_MAX).set_version(0);
        answer.set_edns(own);
        if edns.version() > 0 {
            return say(answer, ResponseCode::BADVERS, "bad_version", transport, &asked);
        }
    }
    if asked.op_code() != OpCode::Query {
        return say(answer, ResponseCode::NotImp, "not_implemented", transport, &asked);
    }
    let [question] = asked.queries() else { return say(answer, ResponseCode::FormErr, "malformed", transport, &asked) };
    let (code, result) = fill(&mut answer, question, zones, tenant, az);
    say(answer, code, result, transport, &asked)
}

/// Not a message: the client is told so, if it looks like one that asks.
fn malformed(query: &[u8]) -> Reply {
    match query {
        [a, b, flags, _, ..] if query.len() >= 12 && flags & 0x80 == 0 => {
            let answer = Message::error_msg(u16::from_be_bytes([*a, *b]), OpCode::Query, ResponseCode::FormErr);
            Reply { bytes: answer.to_vec().ok(), result: "malformed" }
        }
        _ => Reply::silence("malformed"),
    }
}

/// Answers the question. Gives the code, and the name it is counted by.
fn fill(answer: &mut Message, question: &Query, zones: &Zones, tenant: &TenantName, az: &AzName) -> (ResponseCode, &'static str) {
    let refused = (ResponseCode::Refused, "refused");
    let kind = question.query_type();
    if question.query_class() != DNSClass::IN || matches!(kind, RecordType::AXFR | RecordType::IXFR) {
        return refused;
    }
    // A tenant without services has an empty zone.
    let (empty, name) = (super::zone::Zone::default(), question.name());
    let zone = zones.of(tenant).unwrap_or(&empty);
    let found = match labels(name) {
        Some(labels) => zone.find(&labels.iter().map(String::as_str).collect::<Vec<_>>(), az),
        None => Found::Foreign,
    };
    if found == Found::Foreign {
        return refused;
    }
    answer.set_authoritative(true);
    let serial = zones.generation as u32;
    match found {
        Found::Service(mut addresses) => {
            // Clients take the first: each shall be first now and then.
            let at = usize::from(answer.id()).checked_rem(addresses.len()).unwrap_or(0);
            addresses.rotate_left(at);
            let wanted = addresses.into_iter().filter_map(|ip| rdata(ip, kind));
            answer.add_answers(wanted.map(|data| Record::from_rdata(name.clone(), TTL, data)));
        }
        Found::Between if kind == RecordType::SOA && name.num_labels() == 2 => {
            answer.add_answers(soa(serial));
        }
        _ => {}
    }
    if !answer.answers().is_empty() {
        return (ResponseCode::NoError, "answered");
    }
    if name.num_labels() >= 2 && is_inside(name) {
        answer.add_name_servers(soa(serial));
    }
    if found_nothing(zone, name, az) { (ResponseCode::NXDomain, "unknown") } else { (ResponseCode::NoError, "no_data") }
}

fn found_nothing(zone: &super::zone::Zone, name: &Name, az: &AzName) -> bool {
    labels(name).is_some_and(|labels| zone.find(&labels.iter().map(String::as_str).collect::<Vec<_>>(), az) == Found::Unknown)
}

fn is_inside(name: &Name) -> bool {
    labels(name).is_some_and(|labels| labels.ends_with(&["cluster".to_string(), "local".to_string()]))
}

/// The labels in lower case; `None` if one is not plain text, which no service's is.
fn labels(name: &Name) -> Option<Vec<String>> {
    let plain = |label: &[u8]| label.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
    name.iter().map(|label| plain(label).then(|| String::from_utf8_lossy(label).to_ascii_lowercase())).collect()
}

fn rdata(ip: IpAddr, kind: RecordType) -> Option<RData> {
    match (ip.to_canonical(), kind) {
        (IpAddr::V4(v4), RecordType::A | RecordType::ANY) => Some(RData::A(A(v4))),
        (IpAddr::V6(v6), RecordType::AAAA | RecordType::ANY) => Some(RData::AAAA(AAAA(v6))),
        _ => None,
    }
}

/// The authority for negative answers (RFC 2308): how long they may be kept is its last number.
fn soa(serial: u32) -> Option<Record> {
    let name = |text: &str| Name::from_ascii(text).ok();
    let soa = SOA::new(name("ns.dns.cluster.local.")?, name("hostmaster.cluster.local.")?, serial, 7200, 1800, 86400, TTL);
    Some(Record::from_rdata(name("cluster.local.")?, TTL, RData::SOA(soa)))
}

/// Words the answer; one that is too large for its transport is cut to nothing but the news that it is.
fn say(mut answer: Message, code: ResponseCode, result: &'static str, transport: Transport, asked: &Message) -> Reply {
    answer.set_response_code(code);
    if let (ResponseCode::BADVERS, Some(edns)) = (code, answer.extensions_mut()) {
        edns.set_rcode_high(code.high());
    }
    let most = match (transport, asked.extensions()) {
        (Transport::Tcp, _) => u16::MAX,
        (Transport::Udp, None) => UDP_PLAIN,
        (Transport::Udp, Some(edns)) => edns.max_payload().clamp(UDP_PLAIN, UDP_MAX),
    };
    match answer.to_vec() {
        Ok(bytes) if bytes.len() <= usize::from(most) => Reply { bytes: Some(bytes), result },
        Ok(_) => {
            answer.take_answers();
            answer.take_name_servers();
            answer.set_truncated(true);
            Reply { bytes: answer.to_vec().ok(), result: "truncated" }
        }
        Err(_) => Reply::silence("not_encoded"),
    }
}

#[cfg(test)]
mod tests;
