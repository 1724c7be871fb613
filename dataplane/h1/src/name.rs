//! Field names known to the codec, interned by a perfect hash that is checked at compile time. Unknown names stay bytes.

macro_rules! names {
    ($($variant:ident = $text:literal,)*) => {
        /// A field name as one byte. [`Name::Other`] stands for every name not in the table.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Name {
            Other = 0,
            $($variant,)*
        }

        const KNOWN: &[(Name, &str)] = &[$((Name::$variant, $text),)*];

        impl Name {
            /// All known names, without [`Name::Other`].
            pub const ALL: &'static [(Name, &'static str)] = KNOWN;
        }
    };
}

names! {
    Host = "host", ContentLength = "content-length", TransferEncoding = "transfer-encoding", Connection = "connection",
    KeepAlive = "keep-alive", ProxyConnection = "proxy-connection", ProxyAuthenticate = "proxy-authenticate",
    ProxyAuthorization = "proxy-authorization", ProxyAuthenticationInfo = "proxy-authentication-info", Te = "te",
    Trailer = "trailer", Upgrade = "upgrade", Http2Settings = "http2-settings", Expect = "expect", MaxForwards = "max-forwards",
    Date = "date", Server = "server", Via = "via", ContentType = "content-type", ContentEncoding = "content-encoding",
    ContentLanguage = "content-language", ContentRange = "content-range", Accept = "accept", AcceptEncoding = "accept-encoding",
    AcceptLanguage = "accept-language", AcceptRanges = "accept-ranges", Authorization = "authorization", Cookie = "cookie",
    SetCookie = "set-cookie", UserAgent = "user-agent", Referer = "referer", Origin = "origin", CacheControl = "cache-control",
    Pragma = "pragma", Age = "age", Expires = "expires", Etag = "etag", LastModified = "last-modified", Vary = "vary",
    Location = "location", IfMatch = "if-match", IfNoneMatch = "if-none-match", IfModifiedSince = "if-modified-since",
    IfUnmodifiedSince = "if-unmodified-since", IfRange = "if-range", Range = "range", RetryAfter = "retry-after",
    Forwarded = "forwarded", XForwardedFor = "x-forwarded-for", XForwardedProto = "x-forwarded-proto",
    XForwardedHost = "x-forwarded-host", XRequestId = "x-request-id", Traceparent = "traceparent", Tracestate = "tracestate",
    GrpcTimeout = "grpc-timeout", GrpcStatus = "grpc-status", GrpcMessage = "grpc-message",
    SecWebsocketKey = "sec-websocket-key", SecWebsocketVersion = "sec-websocket-version",
    SecWebsocketAccept = "sec-websocket-accept", SecWebsocketProtocol = "sec-websocket-protocol",
    SecWebsocketExtensions = "sec-websocket-extensions", Priority = "priority",
}

// Names index bits of a u64 in masks; bit 0 is Other.
const _: () = assert!(KNOWN.len() <= 63);

/// Length and three letters, folded to lower case by bit 5 (token characters stay distinct enough: the text is compared after).
const fn slot(text: &[u8]) -> u8 {
    let n = text.len();
    let (first, middle, last) = (text[0] | 32, text[n / 2] | 32, text[n - 1] | 32);
    (n as u8)
        .wrapping_mul(141)
        .wrapping_add(first.wrapping_mul(235))
        .wrapping_add(middle.wrapping_mul(106))
        .wrapping_add(last.wrapping_mul(145))
}

/// Slot → 1 + index in `KNOWN`; building it fails to compile if two names share a slot.
static SLOTS: [u8; 256] = {
    let mut slots = [0u8; 256];
    let mut i = 0;
    while i < KNOWN.len() {
        let s = slot(KNOWN[i].1.as_bytes()) as usize;
        assert!(slots[s] == 0, "two known names share a slot: choose other multipliers in `slot`");
        slots[s] = i as u8 + 1;
        i += 1;
    }
    slots
};

/// Eight letters at once to lower case: carries out of the low seven bits tell which bytes are `A` to `Z`.
fn lower(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let low = word & (ONES * 0x7f);
    let after_z = low + ONES * (0x7f - b'Z' as u64);
    let from_a = low + ONES * (0x80 - b'A' as u64);
    let upper = !word & (from_a ^ after_z) & (ONES * 0x80);
    word | (upper >> 2)
}

/// `text` in any case is `known`, which is lower case. Interning is a third of parsing, so it goes by words.
fn is_same_name(known: &[u8], text: &[u8]) -> bool {
    if known.len() != text.len() {
        return false;
    }
    let (mut wants, mut haves) = (known.chunks_exact(8), text.chunks_exact(8));
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    (&mut wants).zip(&mut haves).all(|(want, have)| word(want) == lower(word(have)))
        && haves.remainder().eq_ignore_ascii_case(wants.remainder())
}

impl Name {
    /// The id of a name in any case; [`Name::Other`] if unknown or empty.
    #[inline]
    pub fn of(text: &[u8]) -> Name {
        if text.is_empty() {
            return Name::Other;
        }
        match SLOTS[slot(text) as usize] {
            0 => Name::Other,
            i => {
                let (name, known) = KNOWN[i as usize - 1];
                if is_same_name(known.as_bytes(), text) { name } else { Name::Other }
            }
        }
    }

    /// Lower-case text; empty for [`Name::Other`].
    pub const fn text(self) -> &'static str {
        match self as u8 {
            0 => "",
            i => KNOWN[i as usize - 1].1,
        }
    }

    /// This name as a bit of a mask of names.
    #[inline]
    pub const fn bit(self) -> u64 {
        1 << self as u8
    }
}

const fn mask(names: &[Name]) -> u64 {
    let mut m = 0;
    let mut i = 0;
    while i < names.len() {
        m |= names[i].bit();
        i += 1;
    }
    m
}

/// Fields that concern one connection only (RFC 9110 §7.6.1); `te` is handled apart because `trailers` passes.
pub(crate) const HOP_BY_HOP: u64 = mask(&[
    Name::Connection,
    Name::KeepAlive,
    Name::ProxyConnection,
    Name::ProxyAuthenticate,
    Name::ProxyAuthorization,
    Name::ProxyAuthenticationInfo,
    Name::Te,
    Name::TransferEncoding,
    Name::Upgrade,
    Name::Http2Settings,
]);

/// Fields that the codec writes by itself from framing and persistence; an edit of them is refused.
pub(crate) const RESERVED: u64 = HOP_BY_HOP | Name::ContentLength.bit();

/// Fields that a trailer section must not carry (RFC 9110 §6.5.1): they frame, route, modify or authenticate.
pub(crate) const NOT_IN_TRAILERS: u64 = HOP_BY_HOP
    | mask(&[
        Name::Host,
        Name::ContentLength,
        Name::Trailer,
        Name::Expect,
        Name::MaxForwards,
        Name::CacheControl,
        Name::Pragma,
        Name::Range,
        Name::IfMatch,
        Name::IfNoneMatch,
        Name::IfModifiedSince,
        Name::IfUnmodifiedSince,
        Name::IfRange,
        Name::Authorization,
        Name::Cookie,
        Name::SetCookie,
        Name::ContentEncoding,
        Name::ContentType,
        Name::ContentRange,
        Name::Age,
        Name::Date,
        Name::Expires,
        Name::Location,
        Name::RetryAfter,
        Name::Vary,
        Name::XForwardedFor,
        Name::XForwardedProto,
        Name::XForwardedHost,
        Name::Forwarded,
    ]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_name_is_found_in_any_case() {
        for (name, text) in Name::ALL {
            assert_eq!(Name::of(text.as_bytes()), *name);
            assert_eq!(Name::of(text.to_ascii_uppercase().as_bytes()), *name);
            assert_eq!(name.text(), *text);
        }
        for other in ["", "x", "hosts", "h0st", "content_length", "transfer-encodinh", "\u{8}ost"] {
            assert_eq!(Name::of(other.as_bytes()), Name::Other, "{other:?}");
        }
    }

    #[test]
    fn words_are_lowered_as_bytes_are() {
        for b in 0..=u8::MAX {
            for shift in 0..8 {
                let mut bytes = [0xff; 8];
                bytes[shift] = b;
                let want = u64::from_le_bytes(bytes.map(|b| b.to_ascii_lowercase()));
                assert_eq!(lower(u64::from_le_bytes(bytes)), want, "{b:#x}");
            }
        }
    }
}
