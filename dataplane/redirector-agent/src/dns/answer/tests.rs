//! Tests from bytes to bytes: content of responses, truncation, and that no bytes cause a panic.

use super::super::zone::decide_zones;
use super::super::zone::tests::address;
use super::*;

fn zones() -> DnsZones {
    let many: Vec<String> = (1..=100).map(|n| format!("10.9.0.{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let all = [
        address(
            "alpha/default/web",
            7,
            "az1",
            &["10.0.1.1", "fd00::1"],
            true,
        ),
        address("alpha/default/four", 9, "az1", &["10.0.1.4"], true),
        address("alpha/default/many", 10, "az1", &many, true),
        address("alpha/canal-system/gateway", 5, "az1", &["10.0.1.5"], true),
        address("beta/default/db", 8, "az1", &["10.0.1.1"], true),
    ];
    decide_zones(all.iter(), 42)
}

fn query_message(name: &str, kind: RecordType) -> Message {
    let mut message = Message::new();
    message
        .set_id(0)
        .set_recursion_desired(true)
        .add_query(Query::query(Name::from_ascii(name).unwrap(), kind));
    message
}

fn reply(
    message: &Message,
    tenant: &str,
    transport: DnsTransport,
) -> (Message, &'static str, usize) {
    let reply = decide_reply(
        &message.to_vec().unwrap(),
        &zones(),
        &tenant.parse().unwrap(),
        &"az1".parse().unwrap(),
        transport,
    );
    let bytes = reply.bytes.unwrap();
    (
        Message::from_vec(&bytes).unwrap(),
        reply.result,
        bytes.len(),
    )
}

/// Tenant, name and type of a question, and of its answer the code, the numbers of answers and
/// authorities, and the result.
type AnswerCase = (
    &'static str,
    &'static str,
    RecordType,
    ResponseCode,
    usize,
    usize,
    &'static str,
);

const ANSWER_CASES: [AnswerCase; 23] = [
    (
        "alpha",
        "web.default.svc.cluster.local.",
        RecordType::A,
        ResponseCode::NoError,
        1,
        0,
        "answered",
    ),
    (
        "alpha",
        "WEB.Default.svc.cluster.local.",
        RecordType::AAAA,
        ResponseCode::NoError,
        1,
        0,
        "answered",
    ),
    (
        "alpha",
        "web.default.",
        RecordType::ANY,
        ResponseCode::NoError,
        2,
        0,
        "answered",
    ),
    (
        "alpha",
        "four.default.svc.cluster.local.",
        RecordType::AAAA,
        ResponseCode::NoError,
        0,
        1,
        "no_data",
    ),
    (
        "alpha",
        "web.default.svc.cluster.local.",
        RecordType::TXT,
        ResponseCode::NoError,
        0,
        1,
        "no_data",
    ),
    (
        "alpha",
        "four.default.",
        RecordType::AAAA,
        ResponseCode::NoError,
        0,
        0,
        "no_data",
    ),
    (
        "alpha",
        "default.svc.cluster.local.",
        RecordType::A,
        ResponseCode::NoError,
        0,
        1,
        "no_data",
    ),
    (
        "alpha",
        "cluster.local.",
        RecordType::SOA,
        ResponseCode::NoError,
        1,
        0,
        "answered",
    ),
    (
        "alpha",
        "none.default.svc.cluster.local.",
        RecordType::A,
        ResponseCode::NXDomain,
        0,
        1,
        "unknown",
    ),
    (
        "alpha",
        "db.default.svc.cluster.local.",
        RecordType::A,
        ResponseCode::NXDomain,
        0,
        1,
        "unknown",
    ),
    (
        "beta",
        "web.default.svc.cluster.local.",
        RecordType::A,
        ResponseCode::NXDomain,
        0,
        1,
        "unknown",
    ),
    (
        "gamma",
        "web.default.svc.cluster.local.",
        RecordType::A,
        ResponseCode::NXDomain,
        0,
        1,
        "unknown",
    ),
    (
        "alpha",
        "none.default.",
        RecordType::A,
        ResponseCode::NXDomain,
        0,
        0,
        "unknown",
    ),
    (
        "alpha",
        "none.default.svc.",
        RecordType::AAAA,
        ResponseCode::NXDomain,
        0,
        0,
        "unknown",
    ),
    (
        "alpha",
        "none.",
        RecordType::A,
        ResponseCode::NXDomain,
        0,
        0,
        "unknown",
    ),
    (
        "alpha",
        "default.",
        RecordType::A,
        ResponseCode::NoError,
        0,
        0,
        "no_data",
    ),
    (
        "alpha",
        "com.",
        RecordType::DS,
        ResponseCode::Refused,
        0,
        0,
        "refused",
    ),
    (
        "alpha",
        "none.default.",
        RecordType::MX,
        ResponseCode::Refused,
        0,
        0,
        "refused",
    ),
    (
        "alpha",
        "example.com.",
        RecordType::A,
        ResponseCode::Refused,
        0,
        0,
        "refused",
    ),
    (
        "gamma",
        "none.",
        RecordType::A,
        ResponseCode::NXDomain,
        0,
        0,
        "unknown",
    ),
    (
        "alpha",
        "www.example.com.",
        RecordType::A,
        ResponseCode::Refused,
        0,
        0,
        "refused",
    ),
    (
        "alpha",
        ".",
        RecordType::NS,
        ResponseCode::Refused,
        0,
        0,
        "refused",
    ),
    (
        "alpha",
        "cluster.local.",
        RecordType::AXFR,
        ResponseCode::Refused,
        0,
        0,
        "refused",
    ),
];

#[test]
fn answers_are_by_family_and_missing_names_have_an_soa() {
    for (tenant, name, kind, code, answers, authorities, result) in ANSWER_CASES {
        let (answer, given, _) = reply(&query_message(name, kind), tenant, DnsTransport::Udp);
        let got = (
            answer.response_code(),
            answer.answers().len(),
            answer.name_servers().len(),
            given,
        );
        assert_eq!(
            got,
            (code, answers, authorities, result),
            "{tenant} {name} {kind}"
        );
        assert!(
            answer
                .answers()
                .iter()
                .chain(answer.name_servers())
                .all(|r| r.ttl() == TTL),
            "{name}"
        );
        // The question comes back unchanged, including its case, because clients compare it.
        assert_eq!(answer.queries()[0].name().to_ascii(), name);
        assert!(
            answer.recursion_desired()
                && !answer.recursion_available()
                && answer.extensions().is_none()
        );
    }
}

#[test]
fn large_answers_are_cut_on_udp_only() {
    let name = "many.default.svc.cluster.local.";
    for (payload, transport, most, truncated) in [
        (None, DnsTransport::Udp, 512, true),
        (Some(4096), DnsTransport::Udp, 1232, true),
        (Some(100), DnsTransport::Udp, 512, true),
        (None, DnsTransport::Tcp, 65535, false),
    ] {
        let mut message = query_message(name, RecordType::A);
        if let Some(payload) = payload {
            message
                .set_edns(Edns::new())
                .extensions_mut()
                .as_mut()
                .unwrap()
                .set_max_payload(payload);
        }
        let (answer, result, length) = reply(&message, "alpha", transport);
        assert!(length <= most, "{payload:?}: {length}");
        assert_eq!(
            (
                answer.truncated(),
                answer.answers().len(),
                result == "truncated"
            ),
            (truncated, if truncated { 0 } else { 100 }, truncated)
        );
        assert_eq!(answer.extensions().is_some(), payload.is_some());
    }
}

#[test]
fn unserved_queries_get_an_error_code() {
    let mut other = query_message("web.default.", RecordType::A);
    other.set_op_code(OpCode::Notify);
    assert_eq!(
        reply(&other, "alpha", DnsTransport::Udp).0.response_code(),
        ResponseCode::NotImp
    );
    let mut two = query_message("web.default.", RecordType::A);
    two.add_query(Query::query(
        Name::from_ascii("four.default.").unwrap(),
        RecordType::A,
    ));
    assert_eq!(
        reply(&two, "alpha", DnsTransport::Udp).0.response_code(),
        ResponseCode::FormErr
    );
    let mut chaos = query_message("web.default.", RecordType::A);
    chaos.queries_mut()[0].set_query_class(DNSClass::CH);
    assert_eq!(
        reply(&chaos, "alpha", DnsTransport::Udp).0.response_code(),
        ResponseCode::Refused
    );
    let mut future = query_message("web.default.", RecordType::A);
    future
        .set_edns(Edns::new())
        .extensions_mut()
        .as_mut()
        .unwrap()
        .set_version(1);
    let (answer, result, _) = reply(&future, "alpha", DnsTransport::Udp);
    assert_eq!(
        (result, answer.extensions().as_ref().unwrap().version()),
        ("bad_version", 0)
    );
    assert_eq!(
        answer.extensions().as_ref().unwrap().rcode_high(),
        1,
        "BADVERS is 16"
    );
    let mut response = query_message("web.default.", RecordType::A);
    response.set_message_type(MessageType::Response);
    let silence = decide_reply(
        &response.to_vec().unwrap(),
        &zones(),
        &"alpha".parse().unwrap(),
        &"az1".parse().unwrap(),
        DnsTransport::Udp,
    );
    assert_eq!(silence, DnsReply::silence("not_a_query"));
}

#[test]
fn no_bytes_cause_a_panic() {
    let (zones, tenant, az) = (zones(), "alpha".parse().unwrap(), "az1".parse().unwrap());
    let good = query_message("web.default.svc.cluster.local.", RecordType::A)
        .to_vec()
        .unwrap();
    for n in 0..20_000 {
        let bytes: Vec<u8> = if n % 2 == 0 {
            (0..rand::random_range(0..200))
                .map(|_| rand::random())
                .collect()
        } else {
            let mut bytes = good.clone();
            for _ in 0..rand::random_range(1..6) {
                let at = rand::random_range(0..bytes.len());
                bytes[at] = rand::random();
            }
            bytes.truncate(rand::random_range(0..=bytes.len()));
            bytes
        };
        for transport in [DnsTransport::Udp, DnsTransport::Tcp] {
            let reply = decide_reply(&bytes, &zones, &tenant, &az, transport);
            if let Some(answer) = reply.bytes {
                assert!(
                    answer.len() >= 12 && answer[2] & 0x80 != 0 && answer[..2] == bytes[..2],
                    "{bytes:?}"
                );
            }
        }
    }
}
