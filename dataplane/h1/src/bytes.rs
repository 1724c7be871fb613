//! Character classes of RFC 9110 §5.5–5.6 and RFC 9112 as lookup tables, and lists of tokens. No state.

const TOKEN: u8 = 1;
const TARGET: u8 = 2;
const VALUE: u8 = 4;
const HOST: u8 = 8;

static CLASS: [u8; 256] = {
    let mut class = [0u8; 256];
    let mut b = 0usize;
    while b < 256 {
        let c = b as u8;
        let token = c.is_ascii_alphanumeric()
            || matches!(c, b'!' | b'#' | b'$' | b'%' | b'&' | b'\'' | b'*' | b'+' | b'-' | b'.' | b'^' | b'_' | b'`' | b'|' | b'~');
        if token {
            class[b] |= TOKEN;
        }
        // A fragment never travels in a target; browsers do send |, {, } and the like unescaped.
        if c > 0x20 && c < 0x7f && c != b'#' {
            class[b] |= TARGET;
        }
        if c.is_ascii_alphanumeric() || matches!(c, b'-' | b'.' | b'_' | b'~') {
            class[b] |= HOST;
        }
        if c == b'\t' || (c >= 0x20 && c != 0x7f) {
            class[b] |= VALUE;
        }
        b += 1;
    }
    class
};

#[inline]
pub(crate) fn is_token_byte(b: u8) -> bool {
    CLASS[b as usize] & TOKEN != 0
}

#[inline]
pub(crate) fn is_target_byte(b: u8) -> bool {
    CLASS[b as usize] & TARGET != 0
}

/// Bytes of a host name: no percent escapes and no sub-delimiters, since no name that resolves has them.
#[inline]
pub(crate) fn is_host_byte(b: u8) -> bool {
    CLASS[b as usize] & HOST != 0
}

/// Visible bytes, obs-text, space and tab.
#[inline]
pub(crate) fn is_value_byte(b: u8) -> bool {
    CLASS[b as usize] & VALUE != 0
}

pub(crate) fn is_token(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(|&b| is_token_byte(b))
}

pub(crate) fn is_target(text: &[u8]) -> bool {
    // Arithmetic instead of the table: the compiler turns this into vector code.
    !text.is_empty() && text.iter().fold(true, |ok, &b| ok & (b > 0x20) & (b < 0x7f) & (b != b'#'))
}

pub(crate) fn is_value(text: &[u8]) -> bool {
    text.iter().fold(true, |ok, &b| ok & ((b >= 0x20) | (b == b'\t')) & (b != 0x7f))
}

pub(crate) fn is_ows(b: u8) -> bool {
    b == b' ' || b == b'\t'
}

/// Without spaces and tabs at both ends.
pub(crate) fn trim(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] = text {
        text = rest;
    }
    while let [rest @ .., b' ' | b'\t'] = text {
        text = rest;
    }
    text
}

/// The elements of a comma list, trimmed, empty ones left out (RFC 9110 §5.6.1.2).
pub(crate) fn elements(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|&b| b == b',').map(trim).filter(|e| !e.is_empty())
}
