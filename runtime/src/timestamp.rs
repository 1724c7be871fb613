//! The text of a wall-clock time in logs (RFC 3339). It reads no clock.

use std::fmt;
use std::time::SystemTime;

use time::UtcDateTime;

/// Shows a time in UTC with milliseconds, e.g. `2026-11-21T04:05:06.789Z`. Times before 1970 are
/// shown as 1970.
#[derive(Debug, Clone, Copy)]
pub struct Rfc3339Time(pub SystemTime);

impl fmt::Display for Rfc3339Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self
            .0
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
        let at = UtcDateTime::from_unix_timestamp(seconds).unwrap_or(UtcDateTime::MAX);
        let (year, month, day) = at.to_calendar_date();
        let (hour, minute, second) = at.as_hms();
        let month = u8::from(month);
        write!(
            f,
            "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z",
            since.subsec_millis()
        )
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_shown_as_rfc_3339_in_utc() {
        for (millis, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (951_827_696_789, "2000-02-29T12:34:56.789Z"),
            (1_709_251_199_999, "2024-02-29T23:59:59.999Z"),
            (1_735_689_600_000, "2025-01-01T00:00:00.000Z"),
            (1_795_233_906_789, "2026-11-21T04:05:06.789Z"),
            (4_102_444_800_001, "2100-01-01T00:00:00.001Z"),
            (4_107_542_399_999, "2100-02-28T23:59:59.999Z"),
        ] {
            assert_eq!(
                Rfc3339Time(SystemTime::UNIX_EPOCH + Duration::from_millis(millis)).to_string(),
                text
            );
        }
        let before = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
        assert_eq!(Rfc3339Time(before).to_string(), "1970-01-01T00:00:00.000Z");
    }
}
