//! Close report: how an application closed its end of a tunnel that carries one exchange after
//! another. This module has the header and trailer with which a gateway requests it and a node
//! sends it. It makes no decision.
//!
//! A gateway that reuses a tunnel for many requests sends the header [`CLOSE_REPORT`] with the
//! CONNECT. When the application closes, the node may end the tunnel with a trailer of that name.
//! It does so if everything after the first `delivered` bytes of the tunnel reached no application
//! and never will. Nothing is written after that. So a request may be sent again, even a POST, if
//! none of its bytes are among those. A peer that does not know the header sends no trailer. The
//! absence of the trailer therefore proves nothing.

use canal_wire::hbone::CLOSE_REPORT;
use http::{HeaderMap, HeaderName, HeaderValue};

/// Added to the value if the application reset the connection: the bytes it sent before are then
/// incomplete.
const RESET: &str = "reset";

/// Report of the application's side at the end of a connection that carried one exchange after
/// another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CloseReport {
    /// Maximum number of bytes of the tunnel, from its beginning, that have reached the
    /// application.
    pub delivered: u64,
    /// The application ended the connection with a reset.
    pub reset: bool,
}

impl CloseReport {
    /// Adds the request for a report to the headers of a CONNECT.
    pub fn request_report(headers: &mut HeaderMap) {
        headers.insert(
            HeaderName::from_static(CLOSE_REPORT),
            HeaderValue::from_static("1"),
        );
    }

    /// Returns whether a CONNECT with these headers requests a report.
    pub fn is_requested(headers: &HeaderMap) -> bool {
        headers.get(CLOSE_REPORT).is_some_and(|value| value == "1")
    }

    /// Encodes the report as a trailer section.
    pub fn trailers(self) -> HeaderMap {
        let mut map = HeaderMap::with_capacity(1);
        let text = if self.reset {
            format!("{} {RESET}", self.delivered)
        } else {
            self.delivered.to_string()
        };
        if let Ok(value) = HeaderValue::try_from(text) {
            map.insert(HeaderName::from_static(CLOSE_REPORT), value);
        }
        map
    }

    /// Decodes the report from a trailer section, if it has one.
    pub fn of_trailers(trailers: &HeaderMap) -> Option<Self> {
        let text = trailers.get(CLOSE_REPORT)?.to_str().ok()?;
        let (delivered, reset) = match text.split_once(' ') {
            None => (text, false),
            Some((delivered, RESET)) => (delivered, true),
            Some(_) => return None,
        };
        let digits = !delivered.is_empty() && delivered.bytes().all(|c| c.is_ascii_digit());
        delivered
            .parse()
            .ok()
            .filter(|_| digits)
            .map(|delivered| Self { delivered, reset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_reads_as_it_was_written_and_nothing_else_does() {
        for report in [
            CloseReport {
                delivered: 0,
                reset: false,
            },
            CloseReport {
                delivered: u64::MAX,
                reset: true,
            },
        ] {
            assert_eq!(CloseReport::of_trailers(&report.trailers()), Some(report));
        }
        for text in [
            "",
            "x",
            "-1",
            "+1",
            "1 ",
            " 1",
            "1 rese",
            "1  reset",
            "18446744073709551616",
        ] {
            let mut map = HeaderMap::new();
            map.insert(CLOSE_REPORT, HeaderValue::from_static(text));
            assert_eq!(CloseReport::of_trailers(&map), None, "{text:?}");
        }
        assert_eq!(CloseReport::of_trailers(&HeaderMap::new()), None);
    }

    #[test]
    fn close_reports_are_sent_only_on_request() {
        let mut headers = HeaderMap::new();
        assert!(!CloseReport::is_requested(&headers));
        CloseReport::request_report(&mut headers);
        assert!(CloseReport::is_requested(&headers));
    }
}
