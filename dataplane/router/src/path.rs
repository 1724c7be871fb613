//! Normal form of a path (RFC 3986 §6.2.2). With it, a policy and the endpoint cannot understand
//! one path in two ways, and no other spelling of a path takes another route. It decodes unreserved
//! characters, merges slashes and resolves dot segments. It does not decide which paths need it:
//! [`crate::Router::reads_path`] and policies do. Start with [`normalize_path`].

use canal_model::program::PolicyPaths;

/// Reason why a path has no normal form: servers interpret it in different ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AmbiguousPath {
    /// The path contains `%2F`, `%5C` or `\`, which is a separator for some servers and not for
    /// others.
    Separator,
    /// The path contains `%00` or another control character.
    Control,
    /// The path contains `%` without two hexadecimal digits.
    Escape,
    /// A segment `..` has no segment above it.
    AboveRoot,
    /// The path does not begin with a slash.
    Relative,
    /// A segment is `..;x`, `.;x` or `;x`. Servers that drop path parameters resolve it as `..`,
    /// `.` or nothing.
    DotParameter,
    /// A segment has a parameter, written with `;` or `%3B`. Some servers drop it, others compare
    /// it.
    Parameter,
    /// The path's escapes are not UTF-8. Some servers decode overlong forms of `.` and `/` (RFC
    /// 3629 §10).
    Encoding,
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
            Self::Parameter => "path_with_parameters",
            Self::Encoding => "path_is_not_utf8",
        }
    }
}

/// Normalizes a path without its query, for a policy. Returns `None` if the path already has its
/// normal form.
///
/// # Errors
/// Returns the reason why servers could interpret the path in different ways.
pub fn normalize_path(path: &[u8], paths: PolicyPaths) -> Result<Option<String>, AmbiguousPath> {
    let made = normalize(path, &mut Err)?;
    if paths == PolicyPaths::Strict {
        let normal = made.as_ref().map_or(path, |made| made.as_bytes());
        if normal.contains(&b';') || normal.windows(3).any(|three| three == b"%3B") {
            return Err(AmbiguousPath::Parameter);
        }
        // Most paths have no escapes, and are ASCII.
        if normal.contains(&b'%') && std::str::from_utf8(&unescape(normal)).is_err() {
            return Err(AmbiguousPath::Encoding);
        }
    }
    Ok(made)
}

/// Normalizes a path without its query, for routes that no policy guards. What servers interpret in
/// different ways stays as it is, and `..` above the root leads to the root. Returns `None` if the
/// path already has its normal form.
pub fn routing_path(path: &[u8]) -> Option<String> {
    // The function accepts everything, so there is no error.
    normalize(path, &mut |_| Ok(())).unwrap_or_default()
}

/// Decides what becomes of a part of a path that servers interpret in different ways: `Ok` keeps it
/// as it is.
type DecideAmbiguous<'a> = &'a mut dyn FnMut(AmbiguousPath) -> Result<(), AmbiguousPath>;

fn normalize(path: &[u8], decide: DecideAmbiguous<'_>) -> Result<Option<String>, AmbiguousPath> {
    // RFC 9112 §3.2.4: the target of an OPTIONS request for the whole server is no path.
    if path == b"*" {
        return Ok(None);
    }
    // Joined to some base, a relative path could become any other.
    if path.first() != Some(&b'/') {
        return decide(AmbiguousPath::Relative).map(|()| None);
    }
    // Most paths are in normal form already, and nothing is allocated for them.
    if is_plain(path) {
        return Ok(None);
    }
    let decoded = decode(path, decide)?;
    let mut segments: Vec<&[u8]> = Vec::new();
    // Before the first slash there is nothing.
    let mut parts = decoded.split(|b| *b == b'/').skip(1).peekable();
    // True if the normal form ends in a slash.
    let mut open = false;
    while let Some(part) = parts.next() {
        let last = parts.peek().is_none();
        match part {
            b"" | b"." => open = last,
            b".." => {
                if segments.pop().is_none() {
                    decide(AmbiguousPath::AboveRoot)?;
                }
                open = last;
            }
            part => {
                if has_dot_parameter(part) {
                    decide(AmbiguousPath::DotParameter)?;
                }
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
    String::from_utf8(made).map_or_else(
        |_| decide(AmbiguousPath::Control).map(|()| None),
        |made| Ok(Some(made)),
    )
}

/// Returns true if the segment becomes `..`, `.` or nothing once a server drops its parameters,
/// written with `;` or `%3B`.
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

/// Returns true if nothing in the path could have another form. Most paths are plain, and they need
/// no memory.
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

fn decode(path: &[u8], decide: DecideAmbiguous<'_>) -> Result<Vec<u8>, AmbiguousPath> {
    let mut made = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b'%' => {
                let Some(decoded) = escaped(rest) else {
                    decide(AmbiguousPath::Escape)?;
                    made.push(b'%');
                    continue;
                };
                match decoded {
                    b'/' | b'\\' => decide(AmbiguousPath::Separator)?,
                    0..=0x1f | 0x7f => decide(AmbiguousPath::Control)?,
                    _ => {}
                }
                match decoded {
                    b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                        made.push(decoded)
                    }
                    _ => made.extend([
                        b'%',
                        rest[0].to_ascii_uppercase(),
                        rest[1].to_ascii_uppercase(),
                    ]),
                }
                rest = &rest[2..];
                continue;
            }
            b'\\' => decide(AmbiguousPath::Separator)?,
            0..=0x20 | 0x7f => decide(AmbiguousPath::Control)?,
            _ => {}
        }
        made.push(*byte);
    }
    Ok(made)
}

/// Returns the byte that the two digits at the beginning of `text` mean.
fn escaped(text: &[u8]) -> Option<u8> {
    let hex = |at: usize| text.get(at).and_then(|b| (*b as char).to_digit(16));
    Some((hex(0)? * 16 + hex(1)?) as u8)
}

/// Decodes all escapes of a path in normal form.
fn unescape(path: &[u8]) -> Vec<u8> {
    let mut made = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((byte, after)) = rest.split_first() {
        match escaped(after).filter(|_| *byte == b'%') {
            Some(decoded) => {
                made.push(decoded);
                rest = &after[2..];
            }
            None => {
                made.push(*byte);
                rest = after;
            }
        }
    }
    made
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
            // Escapes are decoded once: `%25` is a percent sign, and `61` behind it is plain text.
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
            // Three dots are a name like any other, so a parameter behind it is no dot segment.
            ("/a/...;x/b;", Ok(None)),
            ("/a..;x", Ok(None)),
            ("a/b", Err(AmbiguousPath::Relative)),
            ("", Err(AmbiguousPath::Relative)),
        ] {
            let got = normalize_path(path.as_bytes(), PolicyPaths::Legacy);
            assert_eq!(
                got.as_ref().map(Option::as_deref),
                want.as_ref().map(|w| *w),
                "{path}"
            );
            if let Ok(Some(again)) = &got {
                assert_eq!(
                    normalize_path(again.as_bytes(), PolicyPaths::Legacy),
                    Ok(None),
                    "{path}: its normal form is normal"
                );
            }
            if let Ok(made) = got {
                assert_eq!(
                    routing_path(path.as_bytes()),
                    made,
                    "{path}: routes and policies read one path"
                );
            }
        }
    }

    #[test]
    fn policies_see_no_parameters_and_no_escapes_that_are_not_utf8() {
        for (path, want) in [
            ("/admin;x", Err(AmbiguousPath::Parameter)),
            ("/admin;/", Err(AmbiguousPath::Parameter)),
            ("/admin%3bx", Err(AmbiguousPath::Parameter)),
            ("/admin%3B", Err(AmbiguousPath::Parameter)),
            ("/%61;x", Err(AmbiguousPath::Parameter)),
            ("/..;/admin", Err(AmbiguousPath::DotParameter)),
            ("/%c0%ae%c0%ae/admin", Err(AmbiguousPath::Encoding)),
            ("/public/..%c0%afadmin", Err(AmbiguousPath::Encoding)),
            ("/%e0%80%af", Err(AmbiguousPath::Encoding)),
            ("/caf%e9", Err(AmbiguousPath::Encoding)),
            ("/%ed%a0%80", Err(AmbiguousPath::Encoding)),
            ("/caf%c3%a9", Ok(Some("/caf%C3%A9"))),
            ("/%F0%9F%8C%8A", Ok(None)),
            ("/%253B", Ok(None)),
            ("/a:b,c=d", Ok(None)),
            ("/", Ok(None)),
        ] {
            let got = normalize_path(path.as_bytes(), PolicyPaths::Strict);
            assert_eq!(
                got.as_ref().map(Option::as_deref),
                want.as_ref().map(|w| *w),
                "{path}"
            );
        }
    }

    #[test]
    fn routes_read_every_path() {
        for (path, want) in [
            ("/a%2fb//c", Some("/a%2Fb/c")),
            ("/a\\b/../c", Some("/c")),
            ("/a%00/./%zz%", Some("/a%00/%zz%")),
            ("/../a", Some("/a")),
            ("/..", Some("/")),
            ("/public/..;/admin", None),
            ("/%c0%ae/x", Some("/%C0%AE/x")),
            ("a//b", None),
            ("", None),
        ] {
            assert_eq!(routing_path(path.as_bytes()).as_deref(), want, "{path}");
        }
    }
}
