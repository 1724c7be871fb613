//! Tables of cases for writing heads (edits, framing changes, encoding from pairs, refusals) and
//! for bodies that end early.

use canal_h1::{
    BodyReader, ForwardOptions, Framing, HeaderEdit, MessageLimits, MessageRefusal, OutHead,
    Persistence, RequestHead, RequestKind, ResponseHead, write_last_chunk,
};

const LIMITS: MessageLimits = MessageLimits::DEFAULT;
const REQUEST: &[u8] =
    b"POST /a?b HTTP/1.1\r\nHost: a\r\nX-A: 1\r\nx-request-id: 7\r\nX-a: 2\r\nCookie: c\r\nContent-Length: 5\r\n\r\nhello";

fn text(out: &OutHead, source: &[u8]) -> String {
    let mut slices = Vec::new();
    out.io_slices(source, &mut slices);
    let gathered: Vec<u8> = slices
        .iter()
        .flat_map(|slice| slice.iter().copied())
        .collect();
    let mut copied = Vec::new();
    out.write_to(source, &mut copied);
    assert_eq!(gathered, copied);
    String::from_utf8(copied).expect("cases are text")
}

fn forward_request(bytes: &[u8], plan: &ForwardOptions<'_>) -> Result<String, MessageRefusal> {
    let mut head = RequestHead::new();
    head.parse(bytes, &LIMITS)?.expect("whole");
    let mut out = OutHead::new();
    out.request(&head.view(bytes), plan)?;
    Ok(text(&out, bytes))
}

/// A case's name, the edits, and the fields of the request after them.
type EditCase = (
    &'static str,
    &'static [HeaderEdit<'static>],
    Result<&'static str, MessageRefusal>,
);

const EDIT_CASES: &[EditCase] = &[
    (
        "none",
        &[],
        Ok(
            "Host: a\r\nX-A: 1\r\nx-request-id: 7\r\nX-a: 2\r\nCookie: c\r\nContent-Length: 5\r\n\r\n",
        ),
    ),
    (
        "set replaces all, in any case",
        &[HeaderEdit::Set(b"x-a", b"3")],
        Ok("Host: a\r\nx-request-id: 7\r\nCookie: c\r\nContent-Length: 5\r\nx-a: 3\r\n\r\n"),
    ),
    (
        "set of a known name",
        &[HeaderEdit::Set(b"Cookie", b"d")],
        Ok(
            "Host: a\r\nX-A: 1\r\nx-request-id: 7\r\nX-a: 2\r\nContent-Length: 5\r\nCookie: d\r\n\r\n",
        ),
    ),
    (
        "set of the host",
        &[HeaderEdit::Set(b"host", b"b:80")],
        Ok(
            "X-A: 1\r\nx-request-id: 7\r\nX-a: 2\r\nCookie: c\r\nContent-Length: 5\r\nhost: b:80\r\n\r\n",
        ),
    ),
    (
        "remove",
        &[HeaderEdit::Remove(b"X-A"), HeaderEdit::Remove(b"cookie")],
        Ok("Host: a\r\nx-request-id: 7\r\nContent-Length: 5\r\n\r\n"),
    ),
    (
        "default",
        &[
            HeaderEdit::Default(b"x-request-id", b"8"),
            HeaderEdit::Default(b"x-b", b"9"),
        ],
        Ok(
            "Host: a\r\nX-A: 1\r\nx-request-id: 7\r\nX-a: 2\r\nCookie: c\r\nContent-Length: 5\r\nx-b: 9\r\n\r\n",
        ),
    ),
    (
        "add",
        &[HeaderEdit::Add(b"X-A", b"3")],
        Ok(
            "Host: a\r\nX-A: 1\r\nx-request-id: 7\r\nX-a: 2\r\nCookie: c\r\nContent-Length: 5\r\nX-A: 3\r\n\r\n",
        ),
    ),
    (
        "host added",
        &[HeaderEdit::Add(b"host", b"b")],
        Err(MessageRefusal::UnwritableField),
    ),
    (
        "host set twice",
        &[
            HeaderEdit::Set(b"host", b"b"),
            HeaderEdit::Set(b"Host", b"c"),
        ],
        Err(MessageRefusal::UnwritableField),
    ),
    (
        "host not a host",
        &[HeaderEdit::Set(b"host", b"b/c")],
        Err(MessageRefusal::UnwritableField),
    ),
    (
        "host removed",
        &[HeaderEdit::Remove(b"host")],
        Err(MessageRefusal::MissingHost),
    ),
    (
        "length set",
        &[HeaderEdit::Set(b"content-length", b"6")],
        Err(MessageRefusal::UnwritableField),
    ),
    (
        "coding removed",
        &[HeaderEdit::Remove(b"transfer-encoding")],
        Err(MessageRefusal::UnwritableField),
    ),
    (
        "connection added",
        &[HeaderEdit::Add(b"connection", b"x-a")],
        Err(MessageRefusal::UnwritableField),
    ),
    (
        "value with line end",
        &[HeaderEdit::Add(b"x", b"a\r\nb: c")],
        Err(MessageRefusal::UnwritableField),
    ),
    (
        "value with LF",
        &[HeaderEdit::Set(b"x", b"a\nb")],
        Err(MessageRefusal::UnwritableField),
    ),
    (
        "value with NUL",
        &[HeaderEdit::Set(b"x", b"a\0")],
        Err(MessageRefusal::UnwritableField),
    ),
    (
        "value with space around",
        &[HeaderEdit::Set(b"x", b" a")],
        Err(MessageRefusal::UnwritableField),
    ),
    (
        "name with colon",
        &[HeaderEdit::Set(b"x:", b"a")],
        Err(MessageRefusal::UnwritableField),
    ),
    (
        "empty name",
        &[HeaderEdit::Remove(b"")],
        Err(MessageRefusal::UnwritableField),
    ),
];

#[test]
fn request_edits() {
    for (name, edits, want) in EDIT_CASES {
        let got = forward_request(
            REQUEST,
            &ForwardOptions {
                edits,
                framing: Framing::Length(5),
                ..ForwardOptions::default()
            },
        );
        let want = want.map(|fields| format!("POST /a?b HTTP/1.1\r\n{fields}"));
        assert_eq!(got, want, "{name}");
    }
}

/// A case's name, the options, and the request that is written.
type PlanCase = (
    &'static str,
    ForwardOptions<'static>,
    Result<String, MessageRefusal>,
);

fn plan_cases() -> Vec<PlanCase> {
    let base = "Host: a\r\nX-A: 1\r\nx-request-id: 7\r\nX-a: 2\r\nCookie: c\r\n";
    let plan = |framing| ForwardOptions {
        framing,
        ..ForwardOptions::default()
    };
    vec![
        (
            "chunked instead",
            plan(Framing::Chunked),
            Ok(format!(
                "POST /a?b HTTP/1.1\r\n{base}transfer-encoding: chunked\r\n\r\n"
            )),
        ),
        (
            "other length",
            plan(Framing::Length(6)),
            Ok(format!(
                "POST /a?b HTTP/1.1\r\n{base}content-length: 6\r\n\r\n"
            )),
        ),
        (
            "no body",
            plan(Framing::None),
            Ok(format!("POST /a?b HTTP/1.1\r\n{base}\r\n")),
        ),
        (
            "target and close",
            ForwardOptions {
                target: Some(b"/new?q"),
                persistence: Persistence::Close,
                ..ForwardOptions::default()
            },
            Ok(format!(
                "POST /new?q HTTP/1.1\r\n{base}connection: close\r\n\r\n"
            )),
        ),
        (
            "target with space",
            ForwardOptions {
                target: Some(b"/a b"),
                ..ForwardOptions::default()
            },
            Err(MessageRefusal::UnwritableLine),
        ),
        (
            "target with line end",
            ForwardOptions {
                target: Some(b"/ HTTP/1.1\r\nX: y"),
                ..ForwardOptions::default()
            },
            Err(MessageRefusal::UnwritableLine),
        ),
        (
            "absolute target",
            ForwardOptions {
                target: Some(b"http://b/"),
                ..ForwardOptions::default()
            },
            Err(MessageRefusal::UnwritableLine),
        ),
        (
            "empty target",
            ForwardOptions {
                target: Some(b""),
                ..ForwardOptions::default()
            },
            Err(MessageRefusal::UnwritableLine),
        ),
        (
            "upgrade with line end",
            ForwardOptions {
                upgrade: Some(b"a\r\nb"),
                ..ForwardOptions::default()
            },
            Err(MessageRefusal::UnwritableField),
        ),
    ]
}

#[test]
fn request_plans() {
    for (name, plan, want) in plan_cases() {
        assert_eq!(forward_request(REQUEST, &plan), want, "{name}");
    }
    assert_eq!(
        forward_request(b"GET / HTTP/1.0\r\n\r\n", &ForwardOptions::default()),
        Err(MessageRefusal::MissingHost)
    );
    let hosted = ForwardOptions {
        edits: &[HeaderEdit::Default(b"host", b"svc")],
        ..ForwardOptions::default()
    };
    assert_eq!(
        forward_request(b"GET / HTTP/1.0\r\n\r\n", &hosted),
        Ok("GET / HTTP/1.1\r\nhost: svc\r\n\r\n".into())
    );
    assert_eq!(
        forward_request(b"GET http://h/ HTTP/1.0\r\n\r\n", &hosted),
        Ok("GET / HTTP/1.1\r\nhost: h\r\n\r\n".into())
    );
    let replaced = ForwardOptions {
        edits: &[HeaderEdit::Set(b"host", b"svc")],
        ..ForwardOptions::default()
    };
    assert_eq!(
        forward_request(b"GET http://h/ HTTP/1.0\r\n\r\n", &replaced),
        Ok("GET / HTTP/1.1\r\nhost: svc\r\n\r\n".into())
    );
}

#[test]
fn unchanged_lines_are_one_span() {
    let mut head = RequestHead::new();
    head.parse(REQUEST, &LIMITS)
        .expect("accepted")
        .expect("whole");
    let mut out = OutHead::new();
    let edits = [HeaderEdit::Add(b"x-new", b"1")];
    out.request(
        &head.view(REQUEST),
        &ForwardOptions {
            edits: &edits,
            framing: Framing::Length(5),
            ..ForwardOptions::default()
        },
    )
    .expect("writable");
    assert_eq!(out.piece_count(), 2);
}

#[test]
fn encoded_requests() {
    let pairs: &[(&[u8], &[u8])] = &[
        (b"cookie", b"a=1"),
        (b"host", b"other"),
        (b"te", b"trailers"),
        (b"x", b"y"),
        (b"cookie", b"b=2"),
        (b"content-length", b"9"),
        (b"transfer-encoding", b"chunked"),
        (b"connection", b"close"),
    ];
    let encode =
        |method: &[u8], authority: &[u8], pairs: &[(&[u8], &[u8])], plan: &ForwardOptions<'_>| {
            let mut out = OutHead::new();
            out.encode_request(method, authority, pairs.iter().copied(), plan)
                .map(|()| text(&out, &[]))
        };
    let plan = ForwardOptions {
        target: Some(b"/x"),
        framing: Framing::Chunked,
        accepts_trailers: true,
        ..ForwardOptions::default()
    };
    // The authority replaces Host, and cookies become one line (RFC 9113 §8.2.3, §8.3.1). The codec
    // writes the fields of framing and connection itself.
    assert_eq!(
        encode(b"POST", b"svc:80", pairs, &plan),
        Ok("POST /x HTTP/1.1\r\nhost: svc:80\r\nx: y\r\ncookie: a=1; b=2\r\ntransfer-encoding: chunked\r\nte: trailers\r\nconnection: te\r\n\r\n".into())
    );
    let edited = ForwardOptions {
        edits: &[
            HeaderEdit::Set(b"cookie", b"z"),
            HeaderEdit::Set(b"host", b"h"),
            HeaderEdit::Default(b"x", b"no"),
        ],
        ..plan
    };
    assert_eq!(
        encode(b"POST", b"svc:80", pairs, &edited),
        Ok("POST /x HTTP/1.1\r\nx: y\r\ncookie: z\r\nhost: h\r\ntransfer-encoding: chunked\r\nte: trailers\r\nconnection: te\r\n\r\n"
            .into())
    );
    let plain = ForwardOptions {
        target: Some(b"/x"),
        ..ForwardOptions::default()
    };
    assert_eq!(
        encode(b"PO ST", b"a", &[], &plain),
        Err(MessageRefusal::UnwritableLine)
    );
    assert_eq!(
        encode(b"GET", b"", &[], &plain),
        Err(MessageRefusal::BadHost)
    );
    assert_eq!(
        encode(b"GET", b"a", &[(b"x", b"a\r\nb: c")], &plain),
        Err(MessageRefusal::UnwritableField)
    );
    assert_eq!(
        encode(b"GET", b"a", &[(b"x y", b"a")], &plain),
        Err(MessageRefusal::UnwritableField)
    );
    assert_eq!(
        encode(b"GET", b"a", &[(b":path", b"/")], &plain),
        Err(MessageRefusal::UnwritableField)
    );
    assert_eq!(
        encode(b"GET", b"a", &[(b"cookie", b"a\nb")], &plain),
        Err(MessageRefusal::UnwritableField)
    );
}

#[test]
fn encoded_responses() {
    let pairs: &[(&[u8], &[u8])] = &[
        (b"content-length", b"9"),
        (b"x", b"y"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
    ];
    let encode = |status, describes, plan: &ForwardOptions<'_>| {
        let mut out = OutHead::new();
        out.encode_response(status, describes, pairs.iter().copied(), plan)
            .map(|()| text(&out, &[]))
    };
    let plan = |framing| ForwardOptions {
        framing,
        ..ForwardOptions::default()
    };
    let common = "x: y\r\nset-cookie: a\r\nset-cookie: b\r\n";
    assert_eq!(
        encode(200, false, &plan(Framing::Length(9))),
        Ok(format!(
            "HTTP/1.1 200 OK\r\n{common}content-length: 9\r\n\r\n"
        ))
    );
    // The length describes the body that a 200 would have (RFC 9110 §8.6), so it is kept.
    assert_eq!(
        encode(304, true, &plan(Framing::None)),
        Ok(format!(
            "HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n{common}\r\n"
        ))
    );
    assert_eq!(
        encode(204, false, &plan(Framing::None)),
        Ok(format!("HTTP/1.1 204 No Content\r\n{common}\r\n"))
    );
    // No name is registered for 799, so its reason phrase is empty.
    let close = ForwardOptions {
        persistence: Persistence::Close,
        ..plan(Framing::Chunked)
    };
    assert_eq!(
        encode(799, false, &close),
        Ok(format!(
            "HTTP/1.1 799 \r\n{common}transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        ))
    );
    // A status has exactly three digits (RFC 9112 §4).
    assert_eq!(
        encode(99, false, &plan(Framing::None)),
        Err(MessageRefusal::UnwritableLine)
    );
    assert_eq!(
        encode(1000, false, &plan(Framing::None)),
        Err(MessageRefusal::UnwritableLine)
    );
}

#[test]
fn responses_change_framing() {
    let bytes = b"HTTP/1.0 200 OK\r\nX: y\r\n\r\n";
    let mut head = ResponseHead::new();
    head.parse(bytes, &LIMITS, RequestKind::Ordinary)
        .expect("accepted")
        .expect("whole");
    let mut out = OutHead::new();
    for (framing, persistence, want) in [
        (
            Framing::Chunked,
            Persistence::Implied,
            "HTTP/1.1 200 OK\r\nX: y\r\ntransfer-encoding: chunked\r\n\r\n",
        ),
        (
            Framing::UntilClose,
            Persistence::Close,
            "HTTP/1.1 200 OK\r\nX: y\r\nconnection: close\r\n\r\n",
        ),
        (
            Framing::Length(3),
            Persistence::KeepAlive,
            "HTTP/1.1 200 OK\r\nX: y\r\ncontent-length: 3\r\nconnection: keep-alive\r\n\r\n",
        ),
    ] {
        out.response(
            &head.view(bytes),
            &ForwardOptions {
                framing,
                persistence,
                ..ForwardOptions::default()
            },
        )
        .expect("writable");
        assert_eq!(text(&out, bytes), want);
    }
}

#[test]
fn bodies_that_end_early() {
    // Only a body until the close may end with the connection; all others announce their end.
    let cases: &[(Framing, &[u8], Result<(), MessageRefusal>)] = &[
        (Framing::None, b"", Ok(())),
        (Framing::Length(0), b"", Ok(())),
        (Framing::Length(5), b"hello", Ok(())),
        (
            Framing::Length(5),
            b"hell",
            Err(MessageRefusal::TruncatedBody),
        ),
        (Framing::UntilClose, b"", Ok(())),
        (Framing::UntilClose, b"anything", Ok(())),
        (Framing::Chunked, b"", Err(MessageRefusal::TruncatedBody)),
        (
            Framing::Chunked,
            b"5\r\nhello\r\n",
            Err(MessageRefusal::TruncatedBody),
        ),
        (
            Framing::Chunked,
            b"0\r\n",
            Err(MessageRefusal::TruncatedBody),
        ),
        (
            Framing::Chunked,
            b"0\r\nA: b\r\n",
            Err(MessageRefusal::TruncatedBody),
        ),
        (Framing::Chunked, b"0\r\n\r\n", Ok(())),
    ];
    for (framing, bytes, want) in cases {
        let mut body = BodyReader::new(*framing);
        body.skim(bytes, &LIMITS).expect("sound so far");
        assert_eq!(
            body.end_of_input(),
            *want,
            "{framing:?} {:?}",
            String::from_utf8_lossy(bytes)
        );
        assert_eq!(body.is_done(), want.is_ok());
    }
}

#[test]
fn foreign_trailers_are_filtered() {
    let mut wire = Vec::new();
    write_last_chunk(
        [(&b"grpc-status"[..], &b"0"[..]), (b"content-length", b"5")],
        &mut wire,
    )
    .expect("writable");
    assert_eq!(wire, b"0\r\ngrpc-status: 0\r\n\r\n");
    assert_eq!(
        write_last_chunk([(&b"x"[..], &b"a\r\nb"[..])], &mut wire),
        Err(MessageRefusal::UnwritableField)
    );
}
