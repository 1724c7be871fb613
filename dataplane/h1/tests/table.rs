//! Checks every case of `canal_h1::cases` as a whole, split at every byte, and byte by byte. The
//! result must always be the same.

use crate::receive::{ReceiveOutcome, forward, receive};
use canal_h1::cases::{
    AcceptedRequest, RequestCase, RequestWant, ResponseWant, requests, responses,
};
use canal_h1::{ForwardOptions, MessageLimits, MessageRefusal, OutHead, RequestHead, ResponseHead};

const LIMITS: MessageLimits = MessageLimits::DEFAULT;

fn check(case: &RequestCase, outcome: &ReceiveOutcome, how: &str) {
    let name = case.name;
    match (case.want, outcome) {
        (RequestWant::Refuse(want), ReceiveOutcome::RefusedHead(got)) => {
            assert_eq!(*got, want, "{name} {how}")
        }
        (RequestWant::RefuseBody(want), ReceiveOutcome::RefusedBody(got)) => {
            assert_eq!(*got, want, "{name} {how}")
        }
        (
            RequestWant::Accept(want),
            ReceiveOutcome::Whole {
                forwarded,
                payload,
                consumed,
                ..
            },
        ) => {
            check_accepted(case, &want, (forwarded, payload, *consumed), how);
        }
        (want, got) => panic!("{name} {how}: want {want:?}, got {got:?}"),
    }
}

fn check_accepted(
    case: &RequestCase,
    want: &AcceptedRequest,
    (forwarded, payload, consumed): (&[u8], &[u8], usize),
    how: &str,
) {
    let name = case.name;
    // The table leaves out long heads, which are forwarded unchanged.
    if !want.forwarded.is_empty() {
        assert_eq!(
            String::from_utf8_lossy(forwarded),
            want.forwarded,
            "{name} {how}"
        );
    }
    assert_eq!(
        String::from_utf8_lossy(payload),
        want.payload,
        "{name} {how}"
    );
    assert_eq!(
        String::from_utf8_lossy(&case.bytes[consumed..]),
        want.rest,
        "{name} {how}"
    );
    // The codec must accept its own output, with the same meaning.
    let mut again = RequestHead::new();
    assert_eq!(
        again.parse(forwarded, &LIMITS),
        Ok(Some(forwarded.len())),
        "{name} {how}"
    );
    assert_eq!(
        again.view(forwarded).framing(),
        want.framing,
        "{name} {how}"
    );
    assert_eq!(
        forward(&again, forwarded),
        forwarded,
        "{name} {how}: forwarding is not idempotent"
    );
}

#[test]
fn requests_whole() {
    for case in requests() {
        check(&case, &receive(&case.bytes, &[]), "whole");
    }
}

#[test]
fn requests_split_at_every_byte() {
    for case in requests() {
        // Oversized cases are split only near their ends and at every 1021st byte: splitting 64 KiB
        // everywhere takes minutes.
        let len = case.bytes.len();
        for cut in
            (1..len).filter(|&cut| len < 2000 || cut < 40 || cut + 40 > len || cut % 1021 == 0)
        {
            check(
                &case,
                &receive(&case.bytes, &[cut]),
                &format!("split at {cut}"),
            );
        }
    }
}

#[test]
fn requests_byte_by_byte() {
    for case in requests() {
        let cuts: Vec<usize> = (1..case.bytes.len()).collect();
        check(&case, &receive(&case.bytes, &cuts), "byte by byte");
    }
}

#[test]
fn request_names_are_unique_and_every_request_refusal_is_reached() {
    let cases = requests();
    assert!(cases.len() >= 150, "{}", cases.len());
    let names: std::collections::BTreeSet<_> = cases.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), cases.len());
    // No request reaches these: responses, truncation and writing have tests of their own, and
    // BadHead is the fallback of the others.
    let outside_table = [
        MessageRefusal::BadHead,
        MessageRefusal::BadStatusLine,
        MessageRefusal::BadStatus,
        MessageRefusal::UnexpectedUpgrade,
        MessageRefusal::TruncatedBody,
        MessageRefusal::UnwritableField,
        MessageRefusal::UnwritableLine,
    ];
    for refusal in MessageRefusal::ALL
        .iter()
        .filter(|refusal| !outside_table.contains(refusal))
    {
        let reached =
            cases.iter().any(|case| matches!(case.want, RequestWant::Refuse(want) | RequestWant::RefuseBody(want) if want == *refusal));
        assert!(reached, "no case reaches {refusal:?}");
    }
}

#[test]
fn responses_whole_and_split() {
    for case in responses() {
        let whole = receive_response(case.bytes, case.request_kind, None);
        for cut in (1..case.bytes.len()).map(Some) {
            assert_eq!(
                receive_response(case.bytes, case.request_kind, cut),
                whole,
                "{} cut {cut:?}",
                case.name
            );
        }
        match (case.want, whole) {
            (ResponseWant::Refuse(want), Err(got)) => assert_eq!(got, want, "{}", case.name),
            (
                ResponseWant::Accept {
                    framing,
                    keep_alive,
                    forwarded,
                },
                Ok(got),
            ) => {
                let text = String::from_utf8_lossy(&got.2);
                assert_eq!(
                    (got.0, got.1, &*text),
                    (framing, keep_alive, forwarded),
                    "{}",
                    case.name
                );
            }
            (want, got) => panic!("{}: want {want:?}, got {got:?}", case.name),
        }
    }
}

type ResponseOutcome = Result<(canal_h1::Framing, bool, Vec<u8>), MessageRefusal>;

fn receive_response(
    bytes: &[u8],
    asked: canal_h1::RequestKind,
    cut: Option<usize>,
) -> ResponseOutcome {
    let mut head = ResponseHead::new();
    if let Some(cut) = cut {
        head.parse(&bytes[..cut], &LIMITS, asked)?;
    }
    let len = head
        .parse(bytes, &LIMITS, asked)?
        .expect("response cases are whole");
    assert_eq!(len, bytes.len());
    let view = head.view(bytes);
    let mut out = OutHead::new();
    let plan = ForwardOptions {
        framing: view.framing(),
        upgrade: view.upgrade(),
        ..ForwardOptions::default()
    };
    out.response(&view, &plan)
        .expect("a head that was accepted can be forwarded");
    let mut sent = Vec::new();
    out.write_to(bytes, &mut sent);
    Ok((view.framing(), view.keep_alive(), sent))
}
