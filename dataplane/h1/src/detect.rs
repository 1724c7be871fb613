//! Telling HTTP/1.1, HTTP/2 and opaque bytes apart by what a client sends first. It consumes nothing and has no clock:
//! protocols in which the server speaks first need a timeout of the caller's.

use crate::fault;
use crate::limits::Limits;
use crate::refusal::Refusal;

/// What every HTTP/2 client sends first (RFC 9113 §3.4).
pub const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What the first bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detected {
    /// A whole request line of some HTTP/1 version.
    Http1,
    /// The HTTP/2 preface.
    Http2,
    /// Neither: relay it as bytes.
    Opaque,
    /// Not enough bytes to tell.
    NeedInput,
}

/// Decides from the first bytes of a connection.
pub fn detect(first: &[u8], limits: &Limits) -> Detected {
    if first.starts_with(HTTP2_PREFACE) {
        return Detected::Http2;
    }
    if HTTP2_PREFACE.starts_with(first) {
        return Detected::NeedInput;
    }
    match fault::walk_request_line(first, 0, limits) {
        Ok(Some(_)) => Detected::Http1,
        Ok(None) => Detected::NeedInput,
        // A request line in all but its version is better refused by the HTTP side than relayed.
        Err(Refusal::UnsupportedVersion | Refusal::TargetTooLong) => Detected::Http1,
        Err(_) => Detected::Opaque,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes() {
        let cases: &[(&[u8], Detected)] = &[
            (b"", Detected::NeedInput),
            (b"GET / HT", Detected::NeedInput),
            (b"GET / HTTP/1.1\r\n", Detected::Http1),
            (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", Detected::Http1),
            (b"GET / HTTP/3.0\r\n", Detected::Http1),
            (b"PRI", Detected::NeedInput),
            (HTTP2_PREFACE, Detected::Http2),
            (b"PRI * HTTP/2.0\r\n\r\nXX", Detected::Opaque),
            (b"PING\r\n", Detected::Opaque),
            (b"get key\r\n", Detected::Opaque),
            (b"*1\r\n$4\r\nPING\r\n", Detected::Opaque),
            (b"\x16\x03\x01\x02\x00", Detected::Opaque),
            (b"SSH-2.0-x\r\n", Detected::Opaque),
            (b"\r\nGET / HTTP/1.1\r\n", Detected::Opaque),
        ];
        for (bytes, want) in cases {
            assert_eq!(detect(bytes, &Limits::DEFAULT), *want, "{:?}", String::from_utf8_lossy(bytes));
        }
    }
}
