//! Protocol sniffing: distinguishes HTTP/1.1, HTTP/2 and opaque bytes by the first bytes that a
//! client sends. It consumes nothing and has no clock. For protocols in which the server sends
//! first, the caller needs a timeout. Start with [`detect`].

use crate::diagnose;
use crate::limits::MessageLimits;
use crate::refusal::MessageRefusal;

/// Connection preface with which every HTTP/2 client begins (RFC 9113 §3.4).
pub const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Protocol that the first bytes belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detected {
    /// The bytes begin with a whole request line of some HTTP/1 version.
    Http1,
    /// The bytes begin with the HTTP/2 preface.
    Http2,
    /// The bytes are neither, so the caller relays them as bytes.
    Opaque,
    /// More bytes are needed for a decision.
    NeedInput,
}

/// Decides the protocol from the first bytes of a connection.
pub fn detect(first: &[u8], limits: &MessageLimits) -> Detected {
    if first.starts_with(HTTP2_PREFACE) {
        return Detected::Http2;
    }
    if HTTP2_PREFACE.starts_with(first) {
        return Detected::NeedInput;
    }
    match diagnose::walk_request_line(first, 0, limits) {
        Ok(Some(_)) => Detected::Http1,
        Ok(None) => Detected::NeedInput,
        // A request line with another version or with too long a target is still HTTP: better
        // refused by the HTTP side than relayed.
        Err(MessageRefusal::UnsupportedVersion | MessageRefusal::TargetTooLong) => Detected::Http1,
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
            assert_eq!(
                detect(bytes, &MessageLimits::DEFAULT),
                *want,
                "{:?}",
                String::from_utf8_lossy(bytes)
            );
        }
    }
}
