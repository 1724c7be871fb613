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

/// Folds eight letters to lower case at once: carries out of the low seven bits show which bytes
/// are `A` to `Z`.
fn lower(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let low = word & (ONES * 0x7f);
    let after_z = low + ONES * (0x7f - b'Z' as u64);
    let from_a = low + ONES * (0x80 - b'A' as u64);
    let upper = !word & (from_a ^ after_z) & (ONES * 0x80);
    word | (upper >> 2)
}

/// Returns true if `text`, in any case, equals `known`, which is lower case. Interning is a third
/// of parsing, so names are compared eight bytes at a time.
fn is_same_name(known: &[u8], text: &[u8]) -> bool {
    if known.len() != text.len() {
        return false;
    }
    let (Some(known_end), Some(text_end)) = (known.last_chunk::<8>(), text.last_chunk::<8>())
    else {
        return text.eq_ignore_ascii_case(known);
    };
    // The last eight bytes overlap the word before them, so no byte is compared on its own.
    let is_same = |known: &[u8; 8], text: &[u8; 8]| {
        u64::from_le_bytes(*known) == lower(u64::from_le_bytes(*text))
    };
    let (known_words, _) = known.as_chunks::<8>();
    let (text_words, _) = text.as_chunks::<8>();
    is_same(known_end, text_end)
        && known_words
            .iter()
            .zip(text_words)
            .all(|(k, t)| is_same(k, t))
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
