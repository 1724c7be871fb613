//! Evaluates the fields that determine framing and the use of the connection (RFC 9112 §6, §9; RFC
//! 9110 §7.6–7.8). Its functions are pure. Start with [`decide_facts`].

use crate::bytes::{elements, is_token, trim};
use crate::field_table::{HeaderFields, Span};
use crate::limits::LENGTH_DIGITS_MAX;
use crate::name::FieldName;
use crate::refusal::MessageRefusal;

/// Framing of a message body, which determines its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Framing {
    /// The message has no body, and no field describes one.
    #[default]
    None,
    /// The body has exactly this number of bytes.
    Length(u64),
    /// The body is sent in chunks (RFC 9112 §7.1).
    Chunked,
    /// The body ends when the connection closes. Only responses may use it.
    UntilClose,
}

/// HTTP version of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, PartialOrd, Ord)]
pub enum HttpVersion {
    Http10,
    #[default]
    Http11,
}

impl HttpVersion {
    pub(crate) fn of_minor(minor: u8) -> HttpVersion {
        if minor == 0 {
            HttpVersion::Http10
        } else {
            HttpVersion::Http11
        }
    }
}

/// Values of the steering fields, before the kind of message is taken into account.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct FramingFields {
    pub(crate) length: Option<u64>,
    /// True if the length was given more than once, equal each time.
    pub(crate) folds_length: bool,
    pub(crate) chunked: bool,
    pub(crate) host: Option<Span>,
    /// Options of the Connection field: `close` here, `keep-alive` and `upgrade` in the next two
    /// fields.
    pub(crate) close: bool,
    pub(crate) keep_alive: bool,
    pub(crate) upgrade_option: bool,
    /// True if Connection names fields other than the well-known options.
    pub(crate) nominates: bool,
    /// True if TE contains `trailers`.
    pub(crate) te_trailers: bool,
    pub(crate) upgrade: Option<Span>,
    pub(crate) expects_continue: bool,
}

/// Fields that [`decide_facts`] reads. All others are skipped with one bit test.
const STEERING: u64 = FieldName::Host.bit()
    | FieldName::ContentLength.bit()
    | FieldName::TransferEncoding.bit()
    | FieldName::Connection.bit()
    | FieldName::Te.bit()
    | FieldName::Upgrade.bit()
    | FieldName::Expect.bit();

/// Treatment of faulty fields that leave no doubt about the message. One is a repeated
/// Content-Length with equal values (RFC 9110 §8.6 leaves the choice to the recipient). The other
/// is an element of Connection or Upgrade that is not a token; these fields are not forwarded as
/// they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HarmlessFaults {
    /// The message is refused.
    Refused,
    /// One of the equal lengths is used and forwarded; the rest is ignored.
    Tolerated,
}

/// Reads the steering fields in the order sent. The first faulty field determines the refusal.
pub(crate) fn decide_facts(
    fields: HeaderFields<'_>,
    faults: HarmlessFaults,
) -> Result<FramingFields, MessageRefusal> {
    let mut facts = FramingFields::default();
    // Most heads have none of these fields, which this one test shows.
    if fields.table.present & STEERING == 0 {
        return Ok(facts);
    }
    for line in &fields.table.lines {
        if line.name.bit() & STEERING == 0 {
            continue;
        }
        let value = line.value.of(fields.buf);
        match line.name {
            FieldName::Host if facts.host.is_some() => return Err(MessageRefusal::DuplicateHost),
            FieldName::Host => facts.host = Some(line.value),
            FieldName::ContentLength => match decide_length(value, facts.length) {
                Ok(length) => facts.length = Some(length),
                // Equal lengths leave no doubt; one of them is forwarded.
                Err(LengthFault::Equal(length)) if faults == HarmlessFaults::Tolerated => {
                    (facts.length, facts.folds_length) = (Some(length), true);
                }
                Err(fault) => return Err(fault.into()),
            },
            FieldName::TransferEncoding => facts.chunked = decide_coding(value, facts.chunked)?,
            FieldName::Connection => read_connection(value, faults, &mut facts)?,
            FieldName::Te => {
                facts.te_trailers |= elements(value).any(|e| e.eq_ignore_ascii_case(b"trailers"))
            }
            FieldName::Upgrade => {
                if !elements(value).all(is_protocol) || trim(value).is_empty() {
                    if faults == HarmlessFaults::Tolerated {
                        // The field is ignored instead, because Upgrade is never forwarded as it
                        // is.
                        continue;
                    }
                    return Err(MessageRefusal::BadUpgrade);
                }
                facts.upgrade = facts.upgrade.or(Some(line.value));
            }
            FieldName::Expect if value.eq_ignore_ascii_case(b"100-continue") => {
                facts.expects_continue = true
            }
            FieldName::Expect => return Err(MessageRefusal::UnknownExpectation),
            // `STEERING` has only the fields of the arms above, so no other field comes here.
            _ => {}
        }
    }
    Ok(facts)
}

impl FramingFields {
    /// Checks that at most one kind of field describes the body.
    pub(crate) fn check_single_framing(&self) -> Result<(), MessageRefusal> {
        // Two readers could see different bodies in such a message, which allows request smuggling
        // (RFC 9112 §6.1).
        if self.chunked && self.length.is_some() {
            Err(MessageRefusal::ContentLengthWithTransferEncoding)
        } else {
            Ok(())
        }
    }
}

/// Reason why a Content-Length cannot be used as it is.
enum LengthFault {
    Bad,
    /// The same value was given more than once.
    Equal(u64),
    Conflicting,
}

impl From<LengthFault> for MessageRefusal {
    fn from(fault: LengthFault) -> Self {
        match fault {
            LengthFault::Bad => MessageRefusal::BadContentLength,
            LengthFault::Equal(_) => MessageRefusal::DuplicateContentLength,
            LengthFault::Conflicting => MessageRefusal::ConflictingContentLength,
        }
    }
}

fn decide_length(value: &[u8], earlier: Option<u64>) -> Result<u64, LengthFault> {
    // Merging two fields gives a list such as `5, 5`, so it counts as a length given twice.
    let mut parts = value
        .split(|&b| b == b',')
        .map(|part| read_length(trim(part)));
    let first = parts.next().flatten().ok_or(LengthFault::Bad)?;
    let mut again = earlier.is_some();
    let mut equal = earlier.is_none_or(|n| n == first);
    for part in parts {
        again = true;
        equal &= part.ok_or(LengthFault::Bad)? == first;
    }
    match (again, equal) {
        (false, _) => Ok(first),
        (true, true) => Err(LengthFault::Equal(first)),
        (true, false) => Err(LengthFault::Conflicting),
    }
}

fn read_length(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > LENGTH_DIGITS_MAX {
        return None;
    }
    digits.iter().try_fold(0u64, |n, d| {
        d.is_ascii_digit().then(|| n * 10 + u64::from(d - b'0'))
    })
}

/// Reads a Transfer-Encoding, of which only `chunked` is accepted, once and last. Empty list
/// elements are refused too, because other readers disagree about `,chunked`.
fn decide_coding(value: &[u8], already_chunked: bool) -> Result<bool, MessageRefusal> {
    let mut chunked = already_chunked;
    for coding in value.split(|&b| b == b',').map(trim) {
        let name = coding.split(|&b| b == b';').next().map_or(coding, trim);
        let is_chunked = name.eq_ignore_ascii_case(b"chunked");
        if !is_token(name) || (is_chunked && coding.len() > name.len()) {
            return Err(MessageRefusal::BadTransferEncoding);
        }
        match (is_chunked, chunked) {
            (true, true) => return Err(MessageRefusal::ChunkedTwice),
            (true, false) => chunked = true,
            (false, true) => return Err(MessageRefusal::ChunkedNotFinal),
            (false, false) => return Err(MessageRefusal::UnknownTransferCoding),
        }
    }
    Ok(chunked)
}

fn read_connection(
    value: &[u8],
    faults: HarmlessFaults,
    facts: &mut FramingFields,
) -> Result<(), MessageRefusal> {
    for option in elements(value) {
        if !is_token(option) {
            // Some servers write `keep-alive, timeout=5`.
            if faults == HarmlessFaults::Tolerated {
                continue;
            }
            return Err(MessageRefusal::BadConnection);
        }
        match FieldName::of(option) {
            FieldName::KeepAlive => facts.keep_alive = true,
            FieldName::Upgrade => facts.upgrade_option = true,
            FieldName::Host | FieldName::ContentLength | FieldName::TransferEncoding => {
                return Err(MessageRefusal::ConnectionNamesFraming);
            }
            FieldName::Other if option.eq_ignore_ascii_case(b"close") => facts.close = true,
            // The writer removes these fields anyway.
            FieldName::Te | FieldName::Http2Settings | FieldName::ProxyConnection => {}
            _ => facts.nominates = true,
        }
    }
    Ok(())
}

/// Checks the syntax `token [ "/" token ]` of a protocol in Upgrade.
fn is_protocol(protocol: &[u8]) -> bool {
    let mut parts = protocol.splitn(2, |&b| b == b'/');
    parts.next().is_some_and(is_token) && parts.next().is_none_or(is_token)
}

/// Returns true if the client offers a protocol that a proxy must not pass on. After an upgrade to
/// h2c, for example, the connection would carry requests that the gateway does not read.
pub(crate) fn is_http_upgrade(value: &[u8]) -> bool {
    elements(value).any(|p| {
        let name = p.split(|&b| b == b'/').next().unwrap_or(p);
        [&b"h2c"[..], b"h2", b"h3", b"http", b"tls"]
            .iter()
            .any(|n| name.eq_ignore_ascii_case(n))
    })
}

/// Returns true if the sender keeps the connection after the message (RFC 9112 §9.3).
pub(crate) fn decide_keep_alive(version: HttpVersion, facts: &FramingFields) -> bool {
    match version {
        HttpVersion::Http11 => !facts.close,
        HttpVersion::Http10 => facts.keep_alive && !facts.close,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths() {
        for (text, want) in [
            ("0", Some(0)),
            ("5", Some(5)),
            ("005", Some(5)),
            ("999999999999999999", Some(999_999_999_999_999_999)),
            ("1000000000000000000", None),
            ("", None),
            ("+5", None),
            ("-5", None),
            ("5 5", None),
            ("0x5", None),
            ("5.", None),
            ("\u{661}", None),
        ] {
            assert_eq!(read_length(text.as_bytes()), want, "{text:?}");
        }
    }

    #[test]
    fn codings() {
        use MessageRefusal::*;
        for (text, want) in [
            ("chunked", Ok(true)),
            ("CHUNKED", Ok(true)),
            ("chunked, chunked", Err(ChunkedTwice)),
            ("chunked, gzip", Err(ChunkedNotFinal)),
            ("chunked, identity", Err(ChunkedNotFinal)),
            ("gzip, chunked", Err(UnknownTransferCoding)),
            ("gzip", Err(UnknownTransferCoding)),
            ("identity", Err(UnknownTransferCoding)),
            ("xchunked", Err(UnknownTransferCoding)),
            ("chunked;q=1", Err(BadTransferEncoding)),
            ("gzip;q=1, chunked", Err(UnknownTransferCoding)),
            ("", Err(BadTransferEncoding)),
            (",chunked", Err(BadTransferEncoding)),
            ("chunked,", Err(BadTransferEncoding)),
            ("\"chunked\"", Err(BadTransferEncoding)),
            ("chun ked", Err(BadTransferEncoding)),
        ] {
            assert_eq!(decide_coding(text.as_bytes(), false), want, "{text:?}");
        }
    }
}
