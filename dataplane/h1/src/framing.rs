//! What the fields of a head say about framing and about the connection (RFC 9112 §6, §9; RFC 9110 §7.6–7.8). Pure decisions.

use crate::bytes::{elements, is_token, trim};
use crate::limits::LENGTH_DIGITS_MAX;
use crate::name::Name;
use crate::refusal::Refusal;
use crate::table::{Fields, Span};

/// How the length of a message body is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Framing {
    /// There is no body and no field describes one.
    #[default]
    None,
    /// Exactly so many bytes.
    Length(u64),
    /// Chunks.
    Chunked,
    /// Until the connection closes; responses only.
    UntilClose,
}

/// HTTP/1.0 or HTTP/1.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, PartialOrd, Ord)]
pub enum Version {
    Http10,
    #[default]
    Http11,
}

impl Version {
    pub(crate) fn of_minor(minor: u8) -> Version {
        if minor == 0 { Version::Http10 } else { Version::Http11 }
    }
}

/// What the steering fields said, before the kind of message is considered.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Facts {
    pub(crate) length: Option<u64>,
    pub(crate) chunked: bool,
    pub(crate) host: Option<Span>,
    /// Options of Connection.
    pub(crate) close: bool,
    pub(crate) keep_alive: bool,
    pub(crate) upgrade_option: bool,
    /// Connection names fields besides the well-known options.
    pub(crate) nominates: bool,
    /// TE contains `trailers`.
    pub(crate) te_trailers: bool,
    pub(crate) upgrade: Option<Span>,
    pub(crate) expects_continue: bool,
}

/// Fields that need a look; all others are skipped with one bit test.
const STEERING: u64 = Name::Host.bit()
    | Name::ContentLength.bit()
    | Name::TransferEncoding.bit()
    | Name::Connection.bit()
    | Name::Te.bit()
    | Name::Upgrade.bit()
    | Name::Expect.bit();

/// Reads the steering fields in the order sent; the first one that is wrong names the refusal.
pub(crate) fn decide_facts(fields: Fields<'_>) -> Result<Facts, Refusal> {
    let mut facts = Facts::default();
    if fields.table.present & STEERING == 0 {
        return Ok(facts);
    }
    let mut coded = false;
    for line in &fields.table.lines {
        if line.name.bit() & STEERING == 0 {
            continue;
        }
        let value = line.value.of(fields.buf);
        match line.name {
            Name::Host if facts.host.is_some() => return Err(Refusal::DuplicateHost),
            Name::Host => facts.host = Some(line.value),
            Name::ContentLength => facts.length = Some(decide_length(value, facts.length)?),
            Name::TransferEncoding => {
                facts.chunked = decide_coding(value, facts.chunked)?;
                coded = true;
            }
            Name::Connection => read_connection(value, &mut facts)?,
            Name::Te => facts.te_trailers |= elements(value).any(|e| e.eq_ignore_ascii_case(b"trailers")),
            Name::Upgrade => {
                if !elements(value).all(is_protocol) || trim(value).is_empty() {
                    return Err(Refusal::BadUpgrade);
                }
                facts.upgrade = facts.upgrade.or(Some(line.value));
            }
            Name::Expect if value.eq_ignore_ascii_case(b"100-continue") => facts.expects_continue = true,
            Name::Expect => return Err(Refusal::UnknownExpectation),
            _ => {}
        }
    }
    if coded && facts.length.is_some() {
        return Err(Refusal::ContentLengthWithTransferEncoding);
    }
    Ok(facts)
}

fn decide_length(value: &[u8], earlier: Option<u64>) -> Result<u64, Refusal> {
    // A list `5, 5` is what merging two fields gives: name it as such.
    if value.contains(&b',') {
        let mut parts = value.split(|&b| b == b',').map(|part| read_length(trim(part)));
        let first = parts.next().flatten().ok_or(Refusal::BadContentLength)?;
        return Err(match parts.try_fold(true, |same, part| part.map(|n| same && n == first)) {
            None => Refusal::BadContentLength,
            Some(true) => Refusal::DuplicateContentLength,
            Some(false) => Refusal::ConflictingContentLength,
        });
    }
    let length = read_length(value).ok_or(Refusal::BadContentLength)?;
    match earlier {
        None => Ok(length),
        Some(n) if n == length => Err(Refusal::DuplicateContentLength),
        Some(_) => Err(Refusal::ConflictingContentLength),
    }
}

fn read_length(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > LENGTH_DIGITS_MAX {
        return None;
    }
    digits.iter().try_fold(0u64, |n, d| d.is_ascii_digit().then(|| n * 10 + u64::from(d - b'0')))
}

/// Only `chunked`, once and last. Empty list elements are refused too: `,chunked` is read in two ways by others.
fn decide_coding(value: &[u8], already_chunked: bool) -> Result<bool, Refusal> {
    let mut chunked = already_chunked;
    for coding in value.split(|&b| b == b',').map(trim) {
        let name = coding.split(|&b| b == b';').next().map_or(coding, trim);
        let is_chunked = name.eq_ignore_ascii_case(b"chunked");
        if !is_token(name) || (is_chunked && coding.len() > name.len()) {
            return Err(Refusal::BadTransferEncoding);
        }
        match (is_chunked, chunked) {
            (true, true) => return Err(Refusal::ChunkedTwice),
            (true, false) => chunked = true,
            (false, true) => return Err(Refusal::ChunkedNotFinal),
            (false, false) => return Err(Refusal::UnknownTransferCoding),
        }
    }
    Ok(chunked)
}

fn read_connection(value: &[u8], facts: &mut Facts) -> Result<(), Refusal> {
    for option in elements(value) {
        if !is_token(option) {
            return Err(Refusal::BadConnection);
        }
        match Name::of(option) {
            Name::KeepAlive => facts.keep_alive = true,
            Name::Upgrade => facts.upgrade_option = true,
            Name::Host | Name::ContentLength | Name::TransferEncoding => return Err(Refusal::ConnectionNamesFraming),
            Name::Other if option.eq_ignore_ascii_case(b"close") => facts.close = true,
            // These are removed anyway.
            Name::Te | Name::Http2Settings | Name::ProxyConnection => {}
            _ => facts.nominates = true,
        }
    }
    Ok(())
}

/// `token [ "/" token ]`.
fn is_protocol(protocol: &[u8]) -> bool {
    let mut parts = protocol.splitn(2, |&b| b == b'/');
    parts.next().is_some_and(is_token) && parts.next().is_none_or(is_token)
}

/// True if the client offers only ways of leaving HTTP/1.1 that a proxy must not pass on: h2c by upgrade would carry
/// requests that nobody here reads.
pub(crate) fn is_http_upgrade(value: &[u8]) -> bool {
    elements(value).any(|p| {
        let name = p.split(|&b| b == b'/').next().unwrap_or(p);
        [&b"h2c"[..], b"h2", b"h3", b"http", b"tls"].iter().any(|n| name.eq_ignore_ascii_case(n))
    })
}

/// Whether the connection outlives the message, as the sender said (RFC 9112 §9.3).
pub(crate) fn decide_keep_alive(version: Version, facts: &Facts) -> bool {
    match version {
        Version::Http11 => !facts.close,
        Version::Http10 => facts.keep_alive && !facts.close,
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
        use Refusal::*;
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
