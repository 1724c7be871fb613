//! Character classes of RFC 9110 §5.5–5.6 and RFC 9112 as lookup tables, and iteration over
//! comma-separated lists. It has no state.

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
            || matches!(
                c,
                b'!' | b'#'
                    | b'$'
                    | b'%'
                    | b'&'
                    | b'\''
                    | b'*'
                    | b'+'
                    | b'-'
                    | b'.'
                    | b'^'
                    | b'_'
                    | b'`'
                    | b'|'
                    | b'~'
            );
        if token {
            class[b] |= TOKEN;
        }
        // A fragment is never part of a request target. Browsers do send |, {, } and the like
        // unescaped, so these pass.
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

/// Returns true for bytes of a host name. Percent escapes and sub-delimiters are excluded, because
/// no name that resolves contains them.
#[inline]
pub(crate) fn is_host_byte(b: u8) -> bool {
    CLASS[b as usize] & HOST != 0
}

/// Returns true for visible bytes, obs-text, space and tab: the bytes of a field value.
#[inline]
pub(crate) fn is_value_byte(b: u8) -> bool {
    CLASS[b as usize] & VALUE != 0
}

pub(crate) fn is_token(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(|&b| is_token_byte(b))
}

pub(crate) fn is_target(text: &[u8]) -> bool {
    // Arithmetic instead of the table, because the compiler vectorizes it.
    !text.is_empty()
        && text
            .iter()
            .fold(true, |ok, &b| ok & (b > 0x20) & (b < 0x7f) & (b != b'#'))
}

pub(crate) fn is_value(text: &[u8]) -> bool {
    text.iter().fold(true, |ok, &b| {
        ok & ((b >= 0x20) | (b == b'\t')) & (b != 0x7f)
    })
}

pub(crate) fn is_ows(b: u8) -> bool {
    b == b' ' || b == b'\t'
}

/// Returns the text without spaces and tabs at either end.
pub(crate) fn trim(mut text: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] = text {
        text = rest;
    }
    while let [rest @ .., b' ' | b'\t'] = text {
        text = rest;
    }
    text
}

/// Iterates over the elements of a comma-separated list: trimmed, without empty ones (RFC 9110
/// §5.6.1.2).
pub(crate) fn elements(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value
        .split(|&b| b == b',')
        .map(trim)
        .filter(|e| !e.is_empty())
}
