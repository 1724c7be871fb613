//! Codec operations over heads as wrk and a browser send them, and over a chunked body.

use std::hint::black_box;

use canal_h1::{
    BodyPart, BodyReader, CHUNK_END, ChunkStart, ForwardOptions, Framing, HeaderEdit, LAST_CHUNK,
    MessageLimits, OutHead, RequestHead, RequestKind, ResponseHead,
};

use crate::BenchOperation;

/// A request as wrk sends it.
const SMALL_REQUEST: &[u8] =
    b"GET /productpage HTTP/1.1\r\nHost: productpage.bookinfo:9080\r\n\r\n";
const SMALL_RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\nServer: nginx/1.22.1\r\nDate: Sat, 21 Nov 2026 03:00:00 GMT\r\nContent-Type: text/plain\r\nContent-Length: 23\r\nConnection: keep-alive\r\n\r\n";
/// A request with twenty fields.
const BROWSER_REQUEST: &[u8] = b"GET /productpage?u=normal&theme=dark HTTP/1.1\r\nHost: productpage.bookinfo.svc.cluster.local:9080\r\nConnection: keep-alive\r\nCache-Control: max-age=0\r\nsec-ch-ua: \"Chromium\";v=\"142\", \"Not_A Brand\";v=\"99\"\r\nsec-ch-ua-mobile: ?0\r\nsec-ch-ua-platform: \"Linux\"\r\nDNT: 1\r\nUpgrade-Insecure-Requests: 1\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0.0.0 Safari/537.36\r\nAccept: text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8\r\nSec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: navigate\r\nSec-Fetch-User: ?1\r\nSec-Fetch-Dest: document\r\nReferer: http://productpage.bookinfo.svc.cluster.local:9080/\r\nAccept-Encoding: gzip, deflate, br, zstd\r\nAccept-Language: en-GB,en;q=0.9,de;q=0.8\r\nCookie: session=9f8b7c6d5e4f3a2b1c0d; theme=dark; consent=all\r\nX-Request-Id: 6f1c1a52-0d55-4b52-9d2b-6f3e1c1a5200\r\ntraceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n\r\n";
const BROWSER_RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\nServer: gunicorn\r\nDate: Sat, 21 Nov 2026 03:00:00 GMT\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: 15066\r\nCache-Control: no-store, max-age=0\r\nVary: Cookie, Accept-Encoding\r\nSet-Cookie: session=9f8b7c6d5e4f3a2b1c0d; HttpOnly; Path=/; SameSite=Lax\r\nETag: \"5f2c-5a1b2c3d4e5f6\"\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: SAMEORIGIN\r\nReferrer-Policy: same-origin\r\nStrict-Transport-Security: max-age=31536000\r\n\r\n";

/// Size of one chunk of the body, and their number: 16 KiB together, which is one TLS record.
const CHUNK_BYTES: usize = 1024;
const CHUNKS: usize = 16;

const EDITS: &[HeaderEdit<'_>] = &[
    HeaderEdit::Default(b"x-request-id", b"6f1c1a52-0d55-4b52-9d2b-6f3e1c1a5201"),
    HeaderEdit::Add(b"x-forwarded-for", b"10.1.1.2"),
    HeaderEdit::Set(b"x-forwarded-proto", b"http"),
];

pub(crate) fn operations() -> Vec<BenchOperation> {
    let operation = |name, target_ns, make| BenchOperation {
        name,
        make,
        target_ns,
    };
    vec![
        operation("parse request, 1 field", None, || {
            parse_request(SMALL_REQUEST)
        }),
        operation("parse response, 5 fields", None, || {
            parse_response(SMALL_RESPONSE)
        }),
        operation("parse both heads, small", Some(1000.0), || {
            both(SMALL_REQUEST, SMALL_RESPONSE)
        }),
        operation("parse request, 20 fields", None, || {
            parse_request(BROWSER_REQUEST)
        }),
        operation("parse response, 12 fields", None, || {
            parse_response(BROWSER_RESPONSE)
        }),
        operation("parse both heads, browser", Some(1000.0), || {
            both(BROWSER_REQUEST, BROWSER_RESPONSE)
        }),
        operation("write request, 1 field + 3", None, || {
            write_request(SMALL_REQUEST)
        }),
        operation("write request, 20 fields + 3", None, || {
            write_request(BROWSER_REQUEST)
        }),
        operation("write response, 12 fields + 1", None, || {
            write_response(BROWSER_RESPONSE)
        }),
        operation("read 16 chunks of 1 KiB", None, read_chunks),
        operation("skim 16 chunks of 1 KiB", None, skim_chunks),
    ]
}

fn parse_request(bytes: &'static [u8]) -> Box<dyn FnMut()> {
    let mut head = RequestHead::new();
    Box::new(move || {
        black_box(
            head.parse(black_box(bytes), &MessageLimits::DEFAULT)
                .is_ok_and(|len| len.is_some()),
        );
    })
}

fn parse_response(bytes: &'static [u8]) -> Box<dyn FnMut()> {
    let mut head = ResponseHead::new();
    Box::new(move || {
        black_box(
            head.parse(
                black_box(bytes),
                &MessageLimits::DEFAULT,
                RequestKind::Ordinary,
            )
            .is_ok_and(|len| len.is_some()),
        );
    })
}

fn both(request: &'static [u8], response: &'static [u8]) -> Box<dyn FnMut()> {
    let (mut request, mut response) = (parse_request(request), parse_response(response));
    Box::new(move || {
        request();
        response();
    })
}

/// The head is parsed in advance. Writing ends with one contiguous buffer, as a gateway sends small
/// heads.
fn write_request(bytes: &'static [u8]) -> Box<dyn FnMut()> {
    let mut head = RequestHead::new();
    assert!(matches!(
        head.parse(bytes, &MessageLimits::DEFAULT),
        Ok(Some(_))
    ));
    // No head of this file is longer, so that the buffer never grows while it is measured.
    let (mut out, mut sent) = (OutHead::new(), Vec::with_capacity(4096));
    Box::new(move || {
        let view = head.view(black_box(bytes));
        let plan = ForwardOptions {
            edits: EDITS,
            framing: view.framing(),
            ..ForwardOptions::default()
        };
        sent.clear();
        if out.request(&view, &plan).is_ok() {
            out.write_to(bytes, &mut sent);
        }
        black_box(sent.len());
    })
}

fn write_response(bytes: &'static [u8]) -> Box<dyn FnMut()> {
    let mut head = ResponseHead::new();
    assert!(matches!(
        head.parse(bytes, &MessageLimits::DEFAULT, RequestKind::Ordinary),
        Ok(Some(_))
    ));
    let (mut out, mut sent) = (OutHead::new(), Vec::with_capacity(4096));
    Box::new(move || {
        let view = head.view(black_box(bytes));
        let plan = ForwardOptions {
            edits: &[HeaderEdit::Set(b"server", b"canal")],
            framing: view.framing(),
            ..ForwardOptions::default()
        };
        sent.clear();
        if out.response(&view, &plan).is_ok() {
            out.write_to(bytes, &mut sent);
        }
        black_box(sent.len());
    })
}

fn chunked_body() -> Vec<u8> {
    let mut body = Vec::new();
    for start in std::iter::repeat_n(ChunkStart::new(CHUNK_BYTES), CHUNKS).flatten() {
        body.extend_from_slice(start.as_bytes());
        body.extend_from_slice(&[b'x'; CHUNK_BYTES]);
        body.extend_from_slice(CHUNK_END);
    }
    body.extend_from_slice(LAST_CHUNK);
    body
}

fn read_chunks() -> Box<dyn FnMut()> {
    let body = chunked_body();
    Box::new(move || {
        let mut reader = BodyReader::new(Framing::Chunked);
        let (mut at, mut payload) = (0, 0);
        while let Ok(step) = reader.read(black_box(&body[at..]), &MessageLimits::DEFAULT) {
            at += step.consumed;
            match step.part {
                BodyPart::Data(span) => payload += span.len(),
                BodyPart::NeedInput | BodyPart::End => break,
            }
        }
        assert_eq!(payload, CHUNKS * CHUNK_BYTES);
    })
}

fn skim_chunks() -> Box<dyn FnMut()> {
    let body = chunked_body();
    Box::new(move || {
        let skim =
            BodyReader::new(Framing::Chunked).skim(black_box(&body), &MessageLimits::DEFAULT);
        assert!(skim.is_ok_and(|skim| skim.is_end));
    })
}
