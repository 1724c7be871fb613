//! JSON's strings and RFC 3339 times, written straight into a buffer.

use std::fmt;
use std::io::Write;
use std::time::SystemTime;

/// Escapes what is displayed into it.
pub(super) struct Escaped<'a>(pub(super) &'a mut Vec<u8>);

impl fmt::Write for Escaped<'_> {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        escape(self.0, s);
        Ok(())
    }
}

/// RFC 8259 §7: quotation mark, reverse solidus and control characters; spans between them are copied whole.
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

/// `2026-08-22T10:11:12.345Z`.
pub(super) fn time(out: &mut Vec<u8>, at: SystemTime) {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let (secs, millis) = (since.as_secs(), since.subsec_millis());
    let (year, month, day) = date(secs / 86_400);
    let (h, m, s) = (secs / 3600 % 24, secs / 60 % 60, secs % 60);
    let _ = write!(out, "{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}.{millis:03}Z");
}

/// Days since 1970 to a Gregorian date: Howard Hinnant's `civil_from_days`, for dates from 1970 on.
fn date(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, of_era) = (z / 146_097, z % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (year + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_are_rfc_3339() {
        for (millis, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_827_696_789, "2000-02-29T12:34:56.789Z"),
            (1_709_251_199_999, "2024-02-29T23:59:59.999Z"),
            (1_735_689_600_000, "2025-01-01T00:00:00.000Z"),
            (4_102_444_800_001, "2100-01-01T00:00:00.001Z"),
        ] {
            let mut out = Vec::new();
            time(&mut out, SystemTime::UNIX_EPOCH + Duration::from_millis(millis));
            assert_eq!(String::from_utf8(out).unwrap(), text);
        }
    }

    #[test]
    fn strings_survive_a_json_reader() {
        for s in ["", "plain", "\"quoted\" \\ back", "line\nfeed\r\ttab", "\u{0}\u{1f}\u{7f}é🦀"] {
            let mut out = vec![b'"'];
            escape(&mut out, s);
            out.push(b'"');
            assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), s);
        }
    }
}
