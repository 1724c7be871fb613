//! Field names known to the codec, interned by a perfect hash that is checked at compile time.
//! Unknown names are not interned. Start with [`FieldName::of`].

macro_rules! names {
    ($($variant:ident = $text:literal,)*) => {
        /// Field name as one byte. [`FieldName::Other`] stands for every name that is not in the
        /// table.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum FieldName {
            Other = 0,
            $($variant,)*
        }

        const KNOWN: &[(FieldName, &str)] = &[$((FieldName::$variant, $text),)*];

        impl FieldName {
            /// All known names with their text, without [`FieldName::Other`].
            pub const ALL: &'static [(FieldName, &'static str)] = KNOWN;
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

// A mask of names is a u64 with one bit per name; bit 0 is Other.
const _: () = assert!(KNOWN.len() <= 63);

/// Hash of a name: its length and three of its letters, folded to lower case by bit 5. Other token
/// characters may collide, because the text is compared afterwards.
const fn slot(text: &[u8]) -> u8 {
    let n = text.len();
    let (first, middle, last) = (text[0] | 32, text[n / 2] | 32, text[n - 1] | 32);
    (n as u8)
        .wrapping_mul(141)
        .wrapping_add(first.wrapping_mul(235))
        .wrapping_add(middle.wrapping_mul(106))
        .wrapping_add(last.wrapping_mul(145))
}

/// Table from slot to 1 + index in `KNOWN`. It does not compile if two names share a slot.
static SLOTS: [u8; 256] = {
    let mut slots = [0u8; 256];
    let mut i = 0;
    while i < KNOWN.len() {
        let s = slot(KNOWN[i].1.as_bytes()) as usize;
        assert!(
            slots[s] == 0,
            "two known names share a slot: choose other multipliers in `slot`"
        );
        slots[s] = i as u8 + 1;
        i += 1;
    }
    slots
};

/// Compares eight bytes of a known name with eight of `text`, in any case. Interning is a third of
/// parsing, so names are not compared byte by byte.
#[inline]
fn is_same_word(known: u64, text: u64) -> bool {
    const BYTES: u64 = 0x0101_0101_0101_0101;
    // Upper and lower case differ in bit 5. Letters have bit 6; in digits and hyphens, which have
    // not, bit 5 counts too.
    let counted = (BYTES * 0xdf) | ((!known >> 1) & (BYTES * 0x20));
    (known ^ text) & counted == 0
}

/// Returns true if `text`, in any case, equals `known`, which has lower-case letters, digits and
/// hyphens.
#[inline]
fn is_same_name(known: &[u8], text: &[u8]) -> bool {
    if known.len() != text.len() {
        return false;
    }
    // The last bytes are compared first: they overlap those of the word before them, so that no
    // byte is compared on its own.
    match (known.last_chunk::<8>(), text.last_chunk::<8>()) {
        (Some(known_end), Some(text_end)) => {
            let is_same = |known: &[u8; 8], text: &[u8; 8]| {
                is_same_word(u64::from_le_bytes(*known), u64::from_le_bytes(*text))
            };
            let (known_words, _) = known.as_chunks::<8>();
            let (text_words, _) = text.as_chunks::<8>();
            let mut words = known_words.iter().zip(text_words);
            is_same(known_end, text_end) && words.all(|(known, text)| is_same(known, text))
        }
        _ => is_same_word(short_word(known), short_word(text)),
    }
}

/// Returns the bytes of a text of less than eight bytes, some of them twice. Texts of the same
/// length have theirs at the same places.
#[inline]
fn short_word(text: &[u8]) -> u64 {
    match (text.first_chunk::<4>(), text.last_chunk::<4>()) {
        (Some(first), Some(last)) => {
            u64::from(u32::from_le_bytes(*first)) << 32 | u64::from(u32::from_le_bytes(*last))
        }
        _ => text
            .iter()
            .fold(0, |word, byte| word << 8 | u64::from(*byte)),
    }
}

impl FieldName {
    /// Interns a name given in any case. Returns [`FieldName::Other`] if it is unknown or empty.
    #[inline]
    pub fn of(text: &[u8]) -> FieldName {
        if text.is_empty() {
            return FieldName::Other;
        }
        match SLOTS[slot(text) as usize] {
            0 => FieldName::Other,
            i => {
                let (name, known) = KNOWN[i as usize - 1];
                if is_same_name(known.as_bytes(), text) {
                    name
                } else {
                    FieldName::Other
                }
            }
        }
    }

    /// Returns the name in lower case; empty for [`FieldName::Other`].
    pub const fn text(self) -> &'static str {
        match self as u8 {
            0 => "",
            i => KNOWN[i as usize - 1].1,
        }
    }

    /// Returns the bit of this name in a mask of names.
    #[inline]
    pub const fn bit(self) -> u64 {
        1 << self as u8
    }
}

const fn mask(names: &[FieldName]) -> u64 {
    let mut m = 0;
    let mut i = 0;
    while i < names.len() {
        m |= names[i].bit();
        i += 1;
    }
    m
}

/// Fields that concern one connection only (RFC 9110 §7.6.1). The writer restores `te: trailers` on
/// its own, because that value passes.
pub(crate) const HOP_BY_HOP: u64 = mask(&[
    FieldName::Connection,
    FieldName::KeepAlive,
    FieldName::ProxyConnection,
    FieldName::ProxyAuthenticate,
    FieldName::ProxyAuthorization,
    FieldName::ProxyAuthenticationInfo,
    FieldName::Te,
    FieldName::TransferEncoding,
    FieldName::Upgrade,
    FieldName::Http2Settings,
]);

/// Fields that the codec itself writes from framing and persistence. An edit of one of them is
/// refused.
pub(crate) const RESERVED: u64 = HOP_BY_HOP | FieldName::ContentLength.bit();

/// Fields that a trailer section must not carry, because they frame, route, modify or authenticate
/// the message (RFC 9110 §6.5.1).
pub(crate) const NOT_IN_TRAILERS: u64 = HOP_BY_HOP
    | mask(&[
        FieldName::Host,
        FieldName::ContentLength,
        FieldName::Trailer,
        FieldName::Expect,
        FieldName::MaxForwards,
        FieldName::CacheControl,
        FieldName::Pragma,
        FieldName::Range,
        FieldName::IfMatch,
        FieldName::IfNoneMatch,
        FieldName::IfModifiedSince,
        FieldName::IfUnmodifiedSince,
        FieldName::IfRange,
        FieldName::Authorization,
        FieldName::Cookie,
        FieldName::SetCookie,
        FieldName::ContentEncoding,
        FieldName::ContentType,
        FieldName::ContentRange,
        FieldName::Age,
        FieldName::Date,
        FieldName::Expires,
        FieldName::Location,
        FieldName::RetryAfter,
        FieldName::Vary,
        FieldName::XForwardedFor,
        FieldName::XForwardedProto,
        FieldName::XForwardedHost,
        FieldName::Forwarded,
    ]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_name_is_found_in_any_case() {
        for (name, text) in FieldName::ALL {
            assert_eq!(FieldName::of(text.as_bytes()), *name);
            assert_eq!(FieldName::of(text.to_ascii_uppercase().as_bytes()), *name);
            assert_eq!(name.text(), *text);
        }
        for other in [
            "",
            "x",
            "hosts",
            "h0st",
            "content_length",
            "transfer-encodinh",
            "\u{8}ost",
        ] {
            assert_eq!(
                FieldName::of(other.as_bytes()),
                FieldName::Other,
                "{other:?}"
            );
        }
    }

    #[test]
    fn words_and_short_texts_are_compared_as_bytes_are() {
        let known = (b'a'..=b'z').chain(b'0'..=b'9').chain([b'-']);
        for known in known {
            for byte in 0..=u8::MAX {
                let want = known.eq_ignore_ascii_case(&byte);
                for shift in 0..8 {
                    let (mut word, mut other) = ([b'a'; 8], [b'A'; 8]);
                    (word[shift], other[shift]) = (known, byte);
                    for length in shift + 1..=8 {
                        let is_same = is_same_name(&word[..length], &other[..length]);
                        assert_eq!(is_same, want, "{known:#x} {byte:#x} {shift} {length}");
                    }
                }
            }
        }
    }
}
