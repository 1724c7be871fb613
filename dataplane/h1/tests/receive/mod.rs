//! Receiver of requests in pieces, shared by the codec's tests. It feeds the codec, forwards the
//! head and collects the payload.

use canal_h1::{
    BodyPart, BodyReader, ForwardOptions, HeaderEdit, MessageLimits, MessageRefusal, OutHead,
    RequestHead,
};

const LIMITS: MessageLimits = MessageLimits::DEFAULT;

/// Result of receiving one request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReceiveOutcome {
    Unfinished,
    RefusedHead(MessageRefusal),
    RefusedBody(MessageRefusal),
    Whole {
        forwarded: Vec<u8>,
        payload: Vec<u8>,
        consumed: usize,
        trailers: Vec<(Vec<u8>, Vec<u8>)>,
    },
}

/// Feeds `bytes` in pieces that end at `cuts`, as reads from a socket would.
pub(crate) fn receive(bytes: &[u8], cuts: &[usize]) -> ReceiveOutcome {
    let mut head = RequestHead::new();
    let mut ends: Vec<usize> = cuts.to_vec();
    ends.push(bytes.len());
    let mut ends = ends.into_iter().peekable();
    let head_len = loop {
        let Some(&end) = ends.peek() else {
            return ReceiveOutcome::Unfinished;
        };
        match head.parse(&bytes[..end], &LIMITS) {
            Err(refusal) => return ReceiveOutcome::RefusedHead(refusal),
            Ok(Some(len)) => break len,
            Ok(None) => ends.next(),
        };
    };
    let view = head.view(bytes);
    let forwarded = forward(&head, bytes);
    let mut body = BodyReader::new(view.framing());
    let (mut at, mut payload) = (head_len, Vec::new());
    for end in ends {
        loop {
            let step = match body.read(&bytes[at..end], &LIMITS) {
                Err(refusal) => return ReceiveOutcome::RefusedBody(refusal),
                Ok(step) => step,
            };
            let input = &bytes[at..end];
            at += step.consumed;
            match step.part {
                BodyPart::Data(span) => payload.extend_from_slice(&input[span]),
                BodyPart::NeedInput => break,
                BodyPart::End => {
                    let trailers = body
                        .trailers(input)
                        .iter()
                        .map(|f| (f.name.to_vec(), f.value.to_vec()))
                        .collect();
                    return ReceiveOutcome::Whole {
                        forwarded,
                        payload,
                        consumed: at,
                        trailers,
                    };
                }
            }
        }
    }
    ReceiveOutcome::Unfinished
}

pub(crate) fn forward(head: &RequestHead, bytes: &[u8]) -> Vec<u8> {
    let view = head.view(bytes);
    let mut out = OutHead::new();
    // The gateway does the same: a request without any host gets the service's.
    let edits = [HeaderEdit::Default(b"host", b"svc")];
    let plan = ForwardOptions {
        edits: &edits,
        framing: view.framing(),
        upgrade: view.upgrade(),
        accepts_trailers: view.accepts_trailers(),
        ..ForwardOptions::default()
    };
    out.request(&view, &plan)
        .expect("a head that was accepted can be forwarded");
    let mut sent = Vec::new();
    out.write_to(bytes, &mut sent);
    assert_eq!(sent.len(), out.byte_len());
    sent
}
