//! A path in its normal form, so that a policy and the endpoint cannot read two things in it: unreserved characters decoded, slashes merged,
//! dot segments resolved (RFC 3986 §6.2.2). A path that endpoints read in different ways has no normal form. Pure.

/// Why a path has no normal form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unsafe {
    /// `%2F`, `%5C` or `\`: a separator for some, not for others.
    Separator,
    /// `%00`, or another control character.
    Control,
    /// `%` without two hexadecimal digits.
    Escape,
    /// `..` where there is nothing above.
    AboveRoot,
    /// It does not begin with a slash.
    Relative,
}

impl Unsafe {
    /// The word in logs.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Separator => "path_with_escaped_slashes",
            Self::Control => "path_with_control_characters",
            Self::Escape => "path_with_bad_escape",
            Self::AboveRoot => "path_above_root",
            Self::Relative => "path_is_relative",
        }
    }
}

/// The normal form; `None` if that is what it has.
pub(super) fn normal(path: &[u8]) -> Result<Option<String>, Unsafe> {
    if path == b"*" {
        return Ok(None);
    }
    if path.first() != Some(&b'/') {
        return Err(Unsafe::Relative);
    }
    if is_plain(path) {
        return Ok(None);
    }
    let decoded = decode(path)?;
    let mut segments: Vec<&[u8]> = Vec::new();
    let mut parts = decoded.split(|b| *b == b'/').skip(1).peekable();
    // Whether the path ends in a slash: then it names what is below its last segment.
    let mut open = false;
    while let Some(part) = parts.next() {
        let last = parts.peek().is_none();
        match part {
            b"" | b"." => open = last,
            b".." => {
                segments.pop().ok_or(Unsafe::AboveRoot)?;
                open = last;
            }
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
    // Heads hold visible ASCII only in their targets; what else there is was refused where they were read.
    String::from_utf8(made).map(Some).map_err(|_| Unsafe::Control)
}

/// Nothing in it could have another form: most paths, and they cost no memory.
fn is_plain(path: &[u8]) -> bool {
    let odd = |b: &u8| matches!(b, b'%' | b'\\' | 0..=0x20 | 0x7f..);
    !path.iter().any(odd) && !path.windows(2).any(|two| matches!(two, b"//" | b"/."))
}

fn decode(path: &[u8]) -> Result<Vec<u8>, Unsafe> {
    let mut made = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        match byte {
            b'\\' => return Err(Unsafe::Separator),
            b'%' => {
                let hex = |at: usize| rest.get(at).and_then(|b| (*b as char).to_digit(16));
                let (Some(high), Some(low)) = (hex(0), hex(1)) else { return Err(Unsafe::Escape) };
                let decoded = (high * 16 + low) as u8;
                match decoded {
                    b'/' | b'\\' => return Err(Unsafe::Separator),
                    0..=0x1f | 0x7f => return Err(Unsafe::Control),
                    b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => made.push(decoded),
                    _ => made.extend([b'%', rest[0].to_ascii_uppercase(), rest[1].to_ascii_uppercase()]),
                }
                rest = &rest[2..];
            }
            0..=0x20 | 0x7f => return Err(Unsafe::Control),
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
            ("/a%2fb", Err(Unsafe::Separator)),
            ("/a%2Fb", Err(Unsafe::Separator)),
            ("/a%5cb", Err(Unsafe::Separator)),
            ("/a\\b", Err(Unsafe::Separator)),
            ("/a%00", Err(Unsafe::Control)),
            ("/a%0d%0a", Err(Unsafe::Control)),
            ("/a%7F", Err(Unsafe::Control)),
            ("/a%", Err(Unsafe::Escape)),
            ("/a%4", Err(Unsafe::Escape)),
            ("/a%zz", Err(Unsafe::Escape)),
            ("/..", Err(Unsafe::AboveRoot)),
            ("/a/../..", Err(Unsafe::AboveRoot)),
            ("/%2e%2e/etc", Err(Unsafe::AboveRoot)),
            ("/a/../../a", Err(Unsafe::AboveRoot)),
            ("a/b", Err(Unsafe::Relative)),
            ("", Err(Unsafe::Relative)),
        ] {
            let got = normal(path.as_bytes());
            assert_eq!(got.as_ref().map(Option::as_deref), want.as_ref().map(|w| *w), "{path}");
            if let Ok(Some(again)) = got {
                assert_eq!(normal(again.as_bytes()), Ok(None), "{path}: its normal form is normal");
            }
        }
    }
}
