//! Builds the bytes of a DNS response from those of a query (RFC 1035, 2308, 6891). Pure: the zones
//! are an argument, and nothing is sent.

use std::net::IpAddr;

use canal_model::ids::{AzName, TenantName};
use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::{A, AAAA, SOA};
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};

use super::zone::{DnsZones, ZoneLookup};

/// Seconds for which responses, including negative ones, may be cached. Clients leave an AZ that
/// closes within this time. So a client resolves again every two seconds at most. Zero would make
/// each connection wait for a query.
pub const TTL: u32 = 2;
/// Largest UDP response in bytes, chosen so that it needs no fragments (DNS flag day 2020).
pub const UDP_MAX: u16 = 1232;
/// Largest UDP response to a client without EDNS, in bytes (RFC 1035 4.2.1).
const UDP_PLAIN: u16 = 512;

/// Transport on which a query arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DnsTransport {
    Udp,
    Tcp,
}

/// Response to send, if any, and the label by which it is counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DnsReply {
    pub bytes: Option<Vec<u8>>,
    pub result: &'static str,
}

impl DnsReply {
    fn silence(result: &'static str) -> Self {
        Self {
            bytes: None,
            result,
        }
    }
}

/// Builds the response to one message from a client of `tenant`, at a replica in `az`.
pub fn decide_reply(
    query: &[u8],
    zones: &DnsZones,
    tenant: &TenantName,
    az: &AzName,
    transport: DnsTransport,
) -> DnsReply {
    let Ok(query_message) = Message::from_vec(query) else {
        return malformed(query);
    };
    if query_message.message_type() != MessageType::Query {
        // A response to a response would make two servers exchange messages forever.
        return DnsReply::silence("not_a_query");
    }
    let mut answer = Message::new();
    answer
        .set_id(query_message.id())
        .set_message_type(MessageType::Response)
        .set_op_code(query_message.op_code());
    answer.set_recursion_desired(query_message.recursion_desired());
    // One question suffices even for the refusal of several.
    answer.add_queries(query_message.queries().iter().take(1).cloned());
    if let Some(edns) = query_message.extensions() {
        let mut own = Edns::new();
        own.set_max_payload(UDP_MAX).set_version(0);
        answer.set_edns(own);
        // RFC 6891 §6.1.3: an unknown EDNS version is answered before the query is read.
        if edns.version() > 0 {
            return encode_reply(
                answer,
                ResponseCode::BADVERS,
                "bad_version",
                transport,
                &query_message,
            );
        }
    }
    if query_message.op_code() != OpCode::Query {
        return encode_reply(
            answer,
            ResponseCode::NotImp,
            "not_implemented",
            transport,
            &query_message,
        );
    }
    // No DNS software sends several questions, and their answers would be ambiguous.
    let [question] = query_message.queries() else {
        return encode_reply(
            answer,
            ResponseCode::FormErr,
            "malformed",
            transport,
            &query_message,
        );
    };
    let (code, result) = fill(&mut answer, question, zones, tenant, az);
    encode_reply(answer, code, result, transport, &query_message)
}

/// Handles bytes that are not a message: the client gets FORMERR if they could be a query.
fn malformed(query: &[u8]) -> DnsReply {
    match query {
        [a, b, flags, _, ..] if query.len() >= 12 && flags & 0x80 == 0 => {
            let answer = Message::error_msg(
                u16::from_be_bytes([*a, *b]),
                OpCode::Query,
                ResponseCode::FormErr,
            );
            DnsReply {
                bytes: answer.to_vec().ok(),
                result: "malformed",
            }
        }
        _ => DnsReply::silence("malformed"),
    }
}

/// Fills in the records for the question. Returns the response code, and the label by which the
/// query is counted.
fn fill(
    answer: &mut Message,
    question: &Query,
    zones: &DnsZones,
    tenant: &TenantName,
    az: &AzName,
) -> (ResponseCode, &'static str) {
    let refused = (ResponseCode::Refused, "refused");
    let kind = question.query_type();
    // Zone transfers would show all of a tenant's services to each of its clients.
    if question.query_class() != DNSClass::IN || matches!(kind, RecordType::AXFR | RecordType::IXFR)
    {
        return refused;
    }
    // A tenant without services has an empty zone.
    let (empty, name) = (super::zone::DnsZone::default(), question.name());
    let zone = zones.of(tenant).unwrap_or(&empty);
    let found = match labels(name) {
        Some(labels) => zone.find(&labels.iter().map(String::as_str).collect::<Vec<_>>(), az),
        None => ZoneLookup::Foreign,
    };
    // Another server may have records of other types for a short name, such as a domain's mail
    // servers.
    let is_address = matches!(kind, RecordType::A | RecordType::AAAA | RecordType::ANY);
    let is_short = !is_inside(name) && !matches!(found, ZoneLookup::Service(_));
    if found == ZoneLookup::Foreign || (is_short && !is_address) {
        return refused;
    }
    answer.set_authoritative(true);
    // SOA serials wrap around (RFC 1982), so the low bits suffice.
    let serial = zones.generation as u32;
    match found {
        ZoneLookup::Service(mut addresses) => {
            // Clients use the first address, so the order depends on the query's ID. A service may
            // have no address, for which there is no remainder.
            let at = usize::from(answer.id())
                .checked_rem(addresses.len())
                .unwrap_or(0);
            addresses.rotate_left(at);
            let wanted = addresses.into_iter().filter_map(|ip| rdata(ip, kind));
            answer.add_answers(wanted.map(|data| Record::from_rdata(name.clone(), TTL, data)));
        }
        // Only the zone's own name has an SOA record.
        ZoneLookup::Between
            if kind == RecordType::SOA && name.num_labels() == 2 && is_inside(name) =>
        {
            answer.add_answers(soa(serial));
        }
        // Other names have no records of their own; `found_nothing` says below whether they exist.
        _ => {}
    }
    if !answer.answers().is_empty() {
        return (ResponseCode::NoError, "answered");
    }
    // Clients may cache a negative response only if it has an SOA record (RFC 2308).
    if name.num_labels() >= 2 && is_inside(name) {
        answer.add_name_servers(soa(serial));
    }
    if found_nothing(zone, name, az) {
        (ResponseCode::NXDomain, "unknown")
    } else {
        (ResponseCode::NoError, "no_data")
    }
}

fn found_nothing(zone: &super::zone::DnsZone, name: &Name, az: &AzName) -> bool {
    labels(name).is_some_and(|labels| {
        zone.find(&labels.iter().map(String::as_str).collect::<Vec<_>>(), az) == ZoneLookup::Unknown
    })
}

fn is_inside(name: &Name) -> bool {
    labels(name)
        .is_some_and(|labels| labels.ends_with(&["cluster".to_string(), "local".to_string()]))
}

/// Returns the labels in lower case; `None` if one is not plain text, which all names of services
/// are.
fn labels(name: &Name) -> Option<Vec<String>> {
    let plain = |label: &[u8]| {
        label
            .iter()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
    };
    name.iter()
        .map(|label| plain(label).then(|| String::from_utf8_lossy(label).to_ascii_lowercase()))
        .collect()
}

fn rdata(ip: IpAddr, kind: RecordType) -> Option<RData> {
    match (ip.to_canonical(), kind) {
        (IpAddr::V4(v4), RecordType::A | RecordType::ANY) => Some(RData::A(A(v4))),
        (IpAddr::V6(v6), RecordType::AAAA | RecordType::ANY) => Some(RData::AAAA(AAAA(v6))),
        _ => None,
    }
}

/// Returns the SOA record for negative responses (RFC 2308). Its last number is how long they may
/// be cached.
fn soa(serial: u32) -> Option<Record> {
    let name = |text: &str| Name::from_ascii(text).ok();
    let soa = SOA::new(
        name("ns.dns.cluster.local.")?,
        name("hostmaster.cluster.local.")?,
        serial,
        // Refresh, retry and expire are for secondary servers (RFC 1035 §3.3.13), of which there
        // are none.
        7200,
        1800,
        86400,
        TTL,
    );
    Some(Record::from_rdata(
        name("cluster.local.")?,
        TTL,
        RData::SOA(soa),
    ))
}

/// Encodes the response. One that is too large for its transport is sent without records and marked
/// as truncated.
fn encode_reply(
    mut answer: Message,
    code: ResponseCode,
    result: &'static str,
    transport: DnsTransport,
    query_message: &Message,
) -> DnsReply {
    answer.set_response_code(code);
    if let (ResponseCode::BADVERS, Some(edns)) = (code, answer.extensions_mut()) {
        edns.set_rcode_high(code.high());
    }
    let most = match (transport, query_message.extensions()) {
        (DnsTransport::Tcp, _) => u16::MAX,
        (DnsTransport::Udp, None) => UDP_PLAIN,
        (DnsTransport::Udp, Some(edns)) => edns.max_payload().clamp(UDP_PLAIN, UDP_MAX),
    };
    match answer.to_vec() {
        Ok(bytes) if bytes.len() <= usize::from(most) => DnsReply {
            bytes: Some(bytes),
            result,
        },
        Ok(_) => {
            answer.take_answers();
            answer.take_name_servers();
            answer.set_truncated(true);
            DnsReply {
                bytes: answer.to_vec().ok(),
                result: "truncated",
            }
        }
        Err(_) => DnsReply::silence("not_encoded"),
    }
}

#[cfg(test)]
mod tests;
