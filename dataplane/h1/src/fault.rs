//! The slow, exact reading of a head that the fast one refused: finds the first fault from the left and names it.
//! It never accepts anything; a head without a fault here is simply unfinished.

use crate::bytes::{is_ows, is_target_byte, is_token_byte, is_value_byte};
use crate::limits::{EMPTY_LINES_MAX, Limits};
use crate::refusal::Refusal;

/// `Ok(None)`: the bytes end before a fault shows. `Ok(Some(at))`: fine up to `at`.
pub(crate) type Walk = Result<Option<usize>, Refusal>;

/// The first fault of a request head.
pub(crate) fn of_request(head: &[u8], limits: &Limits) -> Option<Refusal> {
    walk_request(head, limits).err()
}

/// The first fault of a response head.
pub(crate) fn of_response(head: &[u8], limits: &Limits) -> Option<Refusal> {
    walk_response(head, limits).err()
}

/// The first fault of a trailer section.
pub(crate) fn of_fields(section: &[u8], limits: &Limits) -> Option<Refusal> {
    walk_fields(section, 0, limits).err()
}

fn walk_request(head: &[u8], limits: &Limits) -> Walk {
    let Some(at) = walk_empty_lines(head)? else { return Ok(None) };
    let Some(at) = walk_request_line(head, at, limits)? else { return Ok(None) };
    walk_fields(head, at, limits)
}

fn walk_response(head: &[u8], limits: &Limits) -> Walk {
    let Some(at) = walk_empty_lines(head)? else { return Ok(None) };
    let Some(at) = walk_status_line(head, at, limits)? else { return Ok(None) };
    walk_fields(head, at, limits)
}

fn walk_empty_lines(head: &[u8]) -> Walk {
    let mut at = 0;
    for _ in 0..=EMPTY_LINES_MAX {
        match head.get(at) {
            None => return Ok(None),
            Some(b'\r' | b'\n') => match walk_line_end(head, at)? {
                None => return Ok(None),
                Some(next) => at = next,
            },
            Some(b' ' | b'\t') => return Err(Refusal::LeadingWhitespace),
            Some(_) => return Ok(Some(at)),
        }
    }
    Err(Refusal::TooManyEmptyLines)
}

/// `at` is at a CR or LF: a whole CR LF, or why not.
fn walk_line_end(head: &[u8], at: usize) -> Walk {
    if head[at] == b'\n' {
        return Err(Refusal::BareLf);
    }
    match head.get(at + 1) {
        None => Ok(None),
        Some(b'\n') => Ok(Some(at + 2)),
        Some(_) => Err(Refusal::BareCr),
    }
}

/// A byte that ends a line or must not be in one, where a part of the start line was expected.
fn decide_stray(head: &[u8], at: usize, otherwise: Refusal) -> Walk {
    match head[at] {
        0 => Err(Refusal::NulByte),
        b'\r' | b'\n' => match walk_line_end(head, at)? {
            None => Ok(None),
            Some(_) => Err(otherwise),
        },
        _ => Err(otherwise),
    }
}

pub(crate) fn walk_request_line(head: &[u8], start: usize, limits: &Limits) -> Walk {
    let Some(method_end) = walk_method(head, start, limits)? else { return Ok(None) };
    let Some(target_end) = walk_target(head, method_end + 1, limits)? else { return Ok(None) };
    let (method, target) = (&head[start..method_end], &head[method_end + 1..target_end]);
    let at = target_end + 1;
    let Some((major, minor)) = walk_version(head, at)? else { return Ok(None) };
    if (method, target, major, minor) == (b"PRI", b"*", b'2', b'0') {
        return Err(Refusal::Http2Preface);
    }
    let after = at + VERSION_LEN;
    match head.get(after) {
        None => Ok(None),
        Some(b) if b.is_ascii_digit() || *b == b'.' => Err(Refusal::BadVersion),
        Some(_) if major != b'1' || minor > b'1' => Err(Refusal::UnsupportedVersion),
        Some(b'\r' | b'\n') => walk_line_end(head, after),
        Some(_) => decide_stray(head, after, Refusal::BadRequestLine),
    }
}

fn walk_method(head: &[u8], start: usize, limits: &Limits) -> Walk {
    for at in start.. {
        if at - start > limits.method_bytes_max {
            return Err(Refusal::MethodTooLong);
        }
        match head.get(at) {
            None => return Ok(None),
            Some(b' ') if at > start => return Ok(Some(at)),
            Some(&b) if is_token_byte(b) => {}
            Some(b'\r' | b'\n') => return decide_stray(head, at, Refusal::BadRequestLine),
            Some(_) => return decide_stray(head, at, Refusal::BadMethod),
        }
    }
    Ok(None)
}

fn walk_target(head: &[u8], start: usize, limits: &Limits) -> Walk {
    for at in start.. {
        if at - start > limits.target_bytes_max {
            return Err(Refusal::TargetTooLong);
        }
        match head.get(at) {
            None => return Ok(None),
            Some(b' ') if at > start => return Ok(Some(at)),
            Some(&b) if is_target_byte(b) => {}
            Some(b' ' | b'\t') => return Err(Refusal::BadRequestLine),
            // `GET /` and nothing more is what HTTP/0.9 sent.
            Some(b'\r' | b'\n') => return decide_stray(head, at, if at > start { Refusal::Http09 } else { Refusal::BadRequestLine }),
            Some(_) => return decide_stray(head, at, Refusal::BadTarget),
        }
    }
    Ok(None)
}

const VERSION_LEN: usize = "HTTP/1.1".len();

/// `HTTP/d.d`: both digits.
fn walk_version(head: &[u8], at: usize) -> Result<Option<(u8, u8)>, Refusal> {
    for (i, want) in b"HTTP/d.d".iter().enumerate() {
        let Some(&b) = head.get(at + i) else { return Ok(None) };
        let fits = if *want == b'd' { b.is_ascii_digit() } else { b == *want };
        if !fits {
            return decide_stray(head, at + i, Refusal::BadVersion).map(|_| None);
        }
    }
    Ok(Some((head[at + 5], head[at + 7])))
}

fn walk_status_line(head: &[u8], start: usize, limits: &Limits) -> Walk {
    let Some((major, minor)) = walk_version(head, start)? else { return Ok(None) };
    let at = start + VERSION_LEN;
    match head.get(at) {
        None => return Ok(None),
        Some(_) if major != b'1' || minor > b'1' => return Err(Refusal::UnsupportedVersion),
        Some(b' ') => {}
        Some(_) => return decide_stray(head, at, Refusal::BadStatusLine),
    }
    for i in 1..=3 {
        match head.get(at + i) {
            None => return Ok(None),
            Some(b) if b.is_ascii_digit() && (i > 1 || *b != b'0') => {}
            Some(_) => return decide_stray(head, at + i, Refusal::BadStatus),
        }
    }
    let at = at + 4;
    match head.get(at) {
        None => return Ok(None),
        Some(b' ' | b'\r' | b'\n') => {}
        Some(b) if b.is_ascii_digit() => return Err(Refusal::BadStatus),
        Some(_) => return decide_stray(head, at, Refusal::BadStatusLine),
    }
    walk_text(head, start, at, limits)
}

/// The rest of a line whose first byte is at `start`: value bytes up to CR LF.
fn walk_text(head: &[u8], start: usize, from: usize, limits: &Limits) -> Walk {
    for at in from.. {
        match head.get(at) {
            None => return Ok(None),
            Some(b'\r' | b'\n') => return walk_line_end(head, at),
            Some(_) if at - start >= limits.field_bytes_max => return Err(Refusal::FieldTooLong),
            Some(0) => return Err(Refusal::NulByte),
            Some(&b) if is_value_byte(b) => {}
            Some(_) => return Err(Refusal::ControlByte),
        }
    }
    Ok(None)
}

fn walk_fields(head: &[u8], start: usize, limits: &Limits) -> Walk {
    let mut at = start;
    for count in 0.. {
        match head.get(at) {
            None => return Ok(None),
            Some(b'\r' | b'\n') => return walk_line_end(head, at),
            Some(b' ' | b'\t') if count == 0 => return Err(Refusal::LeadingWhitespace),
            Some(b' ' | b'\t') => return Err(Refusal::ObsFold),
            Some(_) if count >= limits.headers_max => return Err(Refusal::TooManyHeaders),
            Some(_) => match walk_field(head, at, limits)? {
                None => return Ok(None),
                Some(next) => at = next,
            },
        }
    }
    Ok(None)
}

fn walk_field(head: &[u8], start: usize, limits: &Limits) -> Walk {
    for at in start.. {
        match head.get(at) {
            None => return Ok(None),
            Some(_) if at - start >= limits.field_bytes_max => return Err(Refusal::FieldTooLong),
            Some(b':') if at == start => return Err(Refusal::EmptyFieldName),
            Some(b':') => return walk_text(head, start, at + 1, limits),
            Some(&b) if is_token_byte(b) => {}
            Some(b'\r' | b'\n') => return decide_stray(head, at, Refusal::MissingColon),
            Some(&b) if is_ows(b) => {
                let Some(next) = head[at..].iter().find(|&&b| !is_ows(b)) else { return Ok(None) };
                return Err(if *next == b':' { Refusal::SpaceBeforeColon } else { Refusal::BadFieldName });
            }
            Some(_) => return decide_stray(head, at, Refusal::BadFieldName),
        }
    }
    Ok(None)
}
