//! Normal form of a path, so that a route, a policy and the endpoint cannot understand one path in two ways (RFC 3986 §6.2.2). It decodes
//! unreserved characters, merges slashes and resolves dot segments. It does not decide which paths need it: [`crate::Router::reads_path`]
//! and policies do. Start with [`normalize_path`].

/// Reason why a path has no normal form: servers interpret it in different ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AmbiguousPath {
    /// The path contains `%2F`, `%5C` or `\`, which is a separator for some servers and not for others.
    Separator,
    /// The path contains `%00` or another control character.
    Control,
    /// The path contains `%` without two hexadecimal digits.
    Escape,
    /// A segment `..` has no segment above it.
    AboveRoot,
    /// The path does not begin with a slash.
    Relative,
    /// A segment is `..;x`, `.;x` or `;x`. Servers that drop path parameters resolve it as `..`, `.` or nothing.
    DotParameter,
}

impl AmbiguousPath {
    /// Returns the name of the reason as logs show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Separator => "path_with_escaped_slashes",
            Self::Control => "path_with_control_characters",
            Self::Escape => "path_with_bad_escape",
            Self::AboveRoot => "path_above_root",
            Self::Relative => "path_is_relative",
            Self::DotParameter => "path_with_dot_parameters",
        }
    }
}

/// Normalizes a path without its query. Returns `None` if the path already has its normal form.
///
/// # Errors
/// Returns the reason why servers could interpret the path in different ways.
pub fn normalize_path(path: &[u8]) -> Result<Option<String>, AmbiguousPath> {
    if path == b"*" {
        return Ok(None);
    }
    if path.first() != Some(&b'/') {
        return Err(AmbiguousPath::Relative);
    }
    if is_plain(path) {
        return Ok(None);
    }
    let decoded = decode(path)?;
    let mut segments: Vec<&[u8]> = Vec::new();
    let mut parts = decoded.split(|b| *b == b'/').skip(1).peekable();
    // True if the path ends in a slash: then it names what is below its last segment.
    let mut open = false;
    while let Some(part) = parts.next() {
        let last = parts.peek().is_none();
        match part {
            b"" | b"." => open = last,
            b".." => {
                segments.pop().ok_or(AmbiguousPath::AboveRoot)?;
                open = last;
            }
            part if has_dot_parameter(part) => return Err(AmbiguousPath::DotParameter),
            part => {
                segments.push(part);
                open = false;
            }
        }
    }
    let mut made = Vec::with_capacity(path.len());
    for segment in &segments {
        made.push(b'/');
        made.extend_from_slice(segment);
    }
    if segments.is_empty() || open {
        made.push(b'/');
    }
    if made == path {
        return Ok(None);
    }
    // Request targets contain visible ASCII only; the codecs have refused all other bytes.
    String::from_utf8(made).map(Some).map_err(|_| AmbiguousPath::Control)
}

/// Returns true if the segment becomes `..`, `.` or nothing once a server drops its parameters, written with `;` or `%3B`.
fn has_dot_parameter(segment: &[u8]) -> bool {
    let dots = segment.iter().take_while(|b| **b == b'.').count();
    dots <= 2 && (segment[dots..].starts_with(b";") || segment[dots..].starts_with(b"%3B"))
}

/// Bytes that may have another form, or that may change the form of their neighbors.
static ODD: [bool; 256] = {
    let mut odd = [false; 256];
    let mut byte = 0;
    while byte < 256 {
        odd[byte] = byte <= 0x20 || byte >= 0x7f || byte == b'%' as usize || byte == b'\\' as usize;
        byte += 1;
    }
    odd
};

/// Returns true if nothing in the path could have another form. Most paths are plain, and they need no memory.
fn is_plain(path: &[u8]) -> bool {
    let mut before = 0;
    for &byte in path {
        if ODD[byte as usize] || (before == b'/' && matches!(byte, b'/' | b'.' | b';')) {
            return false;
        }
        before = byte;
    }
    true
}

fn decode(path: &[u8]) -> Result<Vec<u8>, AmbiguousPath> {
    let mut made = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b'\\' => return Err(AmbiguousPath::Separator),
            b'%' => {
                let hex = |at: usize| rest.get(at).and_then(|b| (*b as char).to_digit(16));
                let (Some(high), Some(low)) = (hex(0), hex(1)) else { return Err(AmbiguousPath::Escape) };
                let decoded = (high * 16 + low) as u8;
                match decoded {
                    b'/' | b'\\' => return Err(AmbiguousPath::Separator),
                    0..=0x1f | 0x7f => return Err(AmbiguousPath::Control),
                    b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => made.push(decoded),
                    _ => made.extend([b'%', rest[0].to_ascii_uppercase(), rest[1].to_ascii_uppercase()]),
                }
                rest = &rest[2..];
            }
            0..=0x20 | 0x7f => return Err(AmbiguousPath::Control),
            other => made.push(*other),
        }
    }
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_one_form_or_none() {
        for (path, want) in [
            ("/", Ok(None)),
            ("*", Ok(None)),
            ("/a/b", Ok(None)),
            ("/a/b/", Ok(None)),
            ("/a.b/..c/...", Ok(None)),
            ("/a%20b", Ok(None)),
            ("/a;x=1/b", Ok(None)),
            ("//", Ok(Some("/"))),
            ("//a///b//", Ok(Some("/a/b/"))),
            ("/a/./b", Ok(Some("/a/b"))),
            ("/a/.", Ok(Some("/a/"))),
            ("/a/..", Ok(Some("/"))),
            ("/a/b/../c", Ok(Some("/a/c"))),
            ("/a/b/..", Ok(Some("/a/"))),
            ("/a/b/../", Ok(Some("/a/"))),
            ("/%61dmin", Ok(Some("/admin"))),
            ("/%41%7e%2D%5f", Ok(Some("/A~-_"))),
            ("/a%2e%2e/b", Ok(Some("/a../b"))),
            ("/a/%2e%2E/b", Ok(Some("/b"))),
            ("/a/%2e/b", Ok(Some("/a/b"))),
            ("/a%3fb", Ok(Some("/a%3Fb"))),
            ("/a%c3%a9", Ok(Some("/a%C3%A9"))),
            ("/%2561", Ok(None)),
            ("/%252e%252e/a", Ok(None)),
            ("/a%2fb", Err(AmbiguousPath::Separator)),
            ("/a%2Fb", Err(AmbiguousPath::Separator)),
            ("/a%5cb", Err(AmbiguousPath::Separator)),
            ("/a\\b", Err(AmbiguousPath::Separator)),
            ("/a%00", Err(AmbiguousPath::Control)),
            ("/a%0d%0a", Err(AmbiguousPath::Control)),
            ("/a%7F", Err(AmbiguousPath::Control)),
            ("/a%", Err(AmbiguousPath::Escape)),
            ("/a%4", Err(AmbiguousPath::Escape)),
            ("/a%zz", Err(AmbiguousPath::Escape)),
            ("/..", Err(AmbiguousPath::AboveRoot)),
            ("/a/../..", Err(AmbiguousPath::AboveRoot)),
            ("/%2e%2e/etc", Err(AmbiguousPath::AboveRoot)),
            ("/a/../../a", Err(AmbiguousPath::AboveRoot)),
            ("/public/..;/admin", Err(AmbiguousPath::DotParameter)),
            ("/public/..;x=1/admin", Err(AmbiguousPath::DotParameter)),
            ("/public/%2e%2e;/admin", Err(AmbiguousPath::DotParameter)),
            ("/public/..%3b/admin", Err(AmbiguousPath::DotParameter)),
            ("/public/.;/admin", Err(AmbiguousPath::DotParameter)),
            ("/public/;/admin", Err(AmbiguousPath::DotParameter)),
            ("/public/;x", Err(AmbiguousPath::DotParameter)),
            ("/a/...;x/b;", Ok(None)),
            ("/a..;x", Ok(None)),
            ("a/b", Err(AmbiguousPath::Relative)),
            ("", Err(AmbiguousPath::Relative)),
        ] {
            let got = normalize_path(path.as_bytes());
            assert_eq!(got.as_ref().map(Option::as_deref), want.as_ref().map(|w| *w), "{path}");
            if let Ok(Some(again)) = got {
                assert_eq!(normalize_path(again.as_bytes()), Ok(None), "{path}: its normal form is normal");
            }
        }
    }
}
