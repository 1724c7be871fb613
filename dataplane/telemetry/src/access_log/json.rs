//! JSON strings and RFC 3339 times, written straight into a buffer.

use std::fmt;
use std::io::Write;
use std::time::SystemTime;

/// Escapes the text that is formatted into it.
pub(super) struct Escaped<'a>(pub(super) &'a mut Vec<u8>);

impl fmt::Write for Escaped<'_> {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        escape(self.0, s);
        Ok(())
    }
}

/// Escapes a string (RFC 8259 §7): quotation mark, reverse solidus and control characters. Spans
/// between them are copied whole.
pub(super) fn escape(out: &mut Vec<u8>, s: &str) {
    let bytes = s.as_bytes();
    let mut from = 0;
    for (i, c) in bytes.iter().enumerate() {
        if *c >= 0x20 && *c != b'"' && *c != b'\\' {
            continue;
        }
        out.extend_from_slice(&bytes[from..i]);
        from = i + 1;
        match c {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            c => {
                let _ = write!(out, "\\u{c:04x}");
            }
        }
    }
    out.extend_from_slice(&bytes[from..]);
}

/// Writes a time such as `2026-08-22T10:11:12.345Z`.
pub(super) fn time(out: &mut Vec<u8>, at: SystemTime) {
    let _ = write!(out, "{}", canal_runtime::Rfc3339Time(at));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_survive_a_json_reader() {
        for s in [
            "",
            "plain",
            "\"quoted\" \\ back",
            "line\nfeed\r\ttab",
            "\u{0}\u{1f}\u{7f}é🦀",
        ] {
            let mut out = vec![b'"'];
            escape(&mut out, s);
            out.push(b'"');
            assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), s);
        }
    }
}
