//! Slow and exact reading of a head that the fast parser in `scan` did not accept. It finds the
//! first fault from the left and names it. It never accepts a head; a head without a fault here is
//! unfinished. Start with [`of_request`].

use crate::bytes::{is_ows, is_target_byte, is_token_byte, is_value_byte};
use crate::limits::{EMPTY_LINES_MAX, MessageLimits};
use crate::refusal::MessageRefusal;

/// Result of reading one part of a head. `Ok(Some(at))`: no fault up to `at`. `Ok(None)`: the bytes
/// end before any fault shows.
pub(crate) type WalkResult = Result<Option<usize>, MessageRefusal>;

/// Returns the first fault of a request head.
pub(crate) fn of_request(head: &[u8], limits: &MessageLimits) -> Option<MessageRefusal> {
    walk_request(head, limits).err()
}

/// Returns the first fault of a response head. LF without CR is no fault there.
pub(crate) fn of_response(head: &[u8], limits: &MessageLimits) -> Option<MessageRefusal> {
    match walk_response(head, limits).err() {
        Some(MessageRefusal::BareLf) => walk_response(&with_cr(head), limits).err(),
        fault => fault,
    }
}

/// Returns the head with a CR inserted before each LF that has none.
fn with_cr(head: &[u8]) -> Vec<u8> {
    let mut whole = Vec::with_capacity(head.len() + head.len() / 16);
    for &b in head {
        if b == b'\n' && whole.last() != Some(&b'\r') {
            whole.push(b'\r');
        }
        whole.push(b);
    }
    whole
}

/// Returns the first fault of a trailer section.
pub(crate) fn of_fields(section: &[u8], limits: &MessageLimits) -> Option<MessageRefusal> {
    walk_fields(section, 0, limits).err()
}

fn walk_request(head: &[u8], limits: &MessageLimits) -> WalkResult {
    let Some(at) = walk_empty_lines(head)? else {
        return Ok(None);
    };
    let Some(at) = walk_request_line(head, at, limits)? else {
        return Ok(None);
    };
    walk_fields(head, at, limits)
}

fn walk_response(head: &[u8], limits: &MessageLimits) -> WalkResult {
    let Some(at) = walk_empty_lines(head)? else {
        return Ok(None);
    };
    let Some(at) = walk_status_line(head, at, limits)? else {
        return Ok(None);
    };
    walk_fields(head, at, limits)
}

fn walk_empty_lines(head: &[u8]) -> WalkResult {
    let mut at = 0;
    for _ in 0..=EMPTY_LINES_MAX {
        match head.get(at) {
            None => return Ok(None),
            Some(b'\r' | b'\n') => match walk_line_end(head, at)? {
                None => return Ok(None),
                Some(next) => at = next,
            },
            Some(b' ' | b'\t') => return Err(MessageRefusal::LeadingWhitespace),
            Some(_) => return Ok(Some(at)),
        }
    }
    Err(MessageRefusal::TooManyEmptyLines)
}

/// Reads a line end. The byte at `at` is CR or LF; anything but CR LF is a fault.
fn walk_line_end(head: &[u8], at: usize) -> WalkResult {
    if head[at] == b'\n' {
        return Err(MessageRefusal::BareLf);
    }
    match head.get(at + 1) {
        None => Ok(None),
        Some(b'\n') => Ok(Some(at + 2)),
        Some(_) => Err(MessageRefusal::BareCr),
    }
}

/// Names the fault of a byte where a part of the start line was expected. NUL and malformed line
/// ends have their own names; `otherwise` names any other byte.
fn decide_stray(head: &[u8], at: usize, otherwise: MessageRefusal) -> WalkResult {
    match head[at] {
        0 => Err(MessageRefusal::NulByte),
        b'\r' | b'\n' => match walk_line_end(head, at)? {
            None => Ok(None),
            Some(_) => Err(otherwise),
        },
        _ => Err(otherwise),
    }
}

pub(crate) fn walk_request_line(head: &[u8], start: usize, limits: &MessageLimits) -> WalkResult {
    let Some(method_end) = walk_method(head, start, limits)? else {
        return Ok(None);
    };
    let Some(target_end) = walk_target(head, method_end + 1, limits)? else {
        return Ok(None);
    };
    let (method, target) = (&head[start..method_end], &head[method_end + 1..target_end]);
    let at = target_end + 1;
    let Some((major, minor)) = walk_version(head, at)? else {
        return Ok(None);
    };
    if (method, target, major, minor) == (b"PRI", b"*", b'2', b'0') {
        return Err(MessageRefusal::Http2Preface);
    }
    let after = at + VERSION_LEN;
    match head.get(after) {
        None => Ok(None),
        // More digits, as in `HTTP/1.10`, make the version malformed, not unsupported.
        Some(b) if b.is_ascii_digit() || *b == b'.' => Err(MessageRefusal::BadVersion),
        Some(_) if major != b'1' || minor > b'1' => Err(MessageRefusal::UnsupportedVersion),
        Some(b'\r' | b'\n') => walk_line_end(head, after),
        Some(_) => decide_stray(head, after, MessageRefusal::BadRequestLine),
    }
}

fn walk_method(head: &[u8], start: usize, limits: &MessageLimits) -> WalkResult {
    for at in start.. {
        if at - start > limits.method_bytes_max {
            return Err(MessageRefusal::MethodTooLong);
        }
        match head.get(at) {
            None => return Ok(None),
            Some(b' ') if at > start => return Ok(Some(at)),
            Some(&b) if is_token_byte(b) => {}
            Some(b'\r' | b'\n') => return decide_stray(head, at, MessageRefusal::BadRequestLine),
            Some(_) => return decide_stray(head, at, MessageRefusal::BadMethod),
        }
    }
    Ok(None)
}

fn walk_target(head: &[u8], start: usize, limits: &MessageLimits) -> WalkResult {
    for at in start.. {
        if at - start > limits.target_bytes_max {
            return Err(MessageRefusal::TargetTooLong);
        }
        match head.get(at) {
            None => return Ok(None),
            Some(b' ') if at > start => return Ok(Some(at)),
            Some(&b) if is_target_byte(b) => {}
            Some(b' ' | b'\t') => return Err(MessageRefusal::BadRequestLine),
            // HTTP/0.9 clients send `GET /` and no version.
            Some(b'\r' | b'\n') => {
                return decide_stray(
                    head,
                    at,
                    if at > start {
                        MessageRefusal::Http09
                    } else {
                        MessageRefusal::BadRequestLine
                    },
                );
            }
            Some(_) => return decide_stray(head, at, MessageRefusal::BadTarget),
        }
    }
    Ok(None)
}

const VERSION_LEN: usize = "HTTP/1.1".len();

/// Reads `HTTP/d.d` and returns both digits.
fn walk_version(head: &[u8], at: usize) -> Result<Option<(u8, u8)>, MessageRefusal> {
    for (i, want) in b"HTTP/d.d".iter().enumerate() {
        let Some(&b) = head.get(at + i) else {
            return Ok(None);
        };
        let fits = if *want == b'd' {
            b.is_ascii_digit()
        } else {
            b == *want
        };
        if !fits {
            return decide_stray(head, at + i, MessageRefusal::BadVersion).map(|_| None);
        }
    }
    Ok(Some((head[at + 5], head[at + 7])))
}

fn walk_status_line(head: &[u8], start: usize, limits: &MessageLimits) -> WalkResult {
    let Some((major, minor)) = walk_version(head, start)? else {
        return Ok(None);
    };
    let at = start + VERSION_LEN;
    match head.get(at) {
        None => return Ok(None),
        Some(_) if major != b'1' || minor > b'1' => return Err(MessageRefusal::UnsupportedVersion),
        Some(b' ') => {}
        Some(_) => return decide_stray(head, at, MessageRefusal::BadStatusLine),
    }
    for i in 1..=3 {
        match head.get(at + i) {
            None => return Ok(None),
            Some(b) if b.is_ascii_digit() && (i > 1 || *b != b'0') => {}
            Some(_) => return decide_stray(head, at + i, MessageRefusal::BadStatus),
        }
    }
    let at = at + 4;
    match head.get(at) {
        None => return Ok(None),
        Some(b' ' | b'\r' | b'\n') => {}
        Some(b) if b.is_ascii_digit() => return Err(MessageRefusal::BadStatus),
        Some(_) => return decide_stray(head, at, MessageRefusal::BadStatusLine),
    }
    walk_text(head, start, at, limits)
}

/// Reads the rest of a line whose first byte is at `start`: value bytes from `from` up to CR LF.
fn walk_text(head: &[u8], start: usize, from: usize, limits: &MessageLimits) -> WalkResult {
    for at in from.. {
        match head.get(at) {
            None => return Ok(None),
            Some(b'\r' | b'\n') => return walk_line_end(head, at),
            Some(_) if at - start >= limits.field_bytes_max => {
                return Err(MessageRefusal::FieldTooLong);
            }
            Some(0) => return Err(MessageRefusal::NulByte),
            Some(&b) if is_value_byte(b) => {}
            Some(_) => return Err(MessageRefusal::ControlByte),
        }
    }
    Ok(None)
}

fn walk_fields(head: &[u8], start: usize, limits: &MessageLimits) -> WalkResult {
    let mut at = start;
    for count in 0.. {
        match head.get(at) {
            None => return Ok(None),
            Some(b'\r' | b'\n') => return walk_line_end(head, at),
            Some(b' ' | b'\t') if count == 0 => return Err(MessageRefusal::LeadingWhitespace),
            Some(b' ' | b'\t') => return Err(MessageRefusal::ObsFold),
            Some(_) if count >= limits.headers_max => return Err(MessageRefusal::TooManyHeaders),
            Some(_) => match walk_field(head, at, limits)? {
                None => return Ok(None),
                Some(next) => at = next,
            },
        }
    }
    Ok(None)
}

fn walk_field(head: &[u8], start: usize, limits: &MessageLimits) -> WalkResult {
    for at in start.. {
        match head.get(at) {
            None => return Ok(None),
            Some(_) if at - start >= limits.field_bytes_max => {
                return Err(MessageRefusal::FieldTooLong);
            }
            Some(b':') if at == start => return Err(MessageRefusal::EmptyFieldName),
            Some(b':') => return walk_text(head, start, at + 1, limits),
            Some(&b) if is_token_byte(b) => {}
            Some(b'\r' | b'\n') => return decide_stray(head, at, MessageRefusal::MissingColon),
            // Space before the colon has a name of its own, because some servers accept it and so
            // read another field.
            Some(&b) if is_ows(b) => {
                let Some(next) = head[at..].iter().find(|&&b| !is_ows(b)) else {
                    return Ok(None);
                };
                return Err(if *next == b':' {
                    MessageRefusal::SpaceBeforeColon
                } else {
                    MessageRefusal::BadFieldName
                });
            }
            Some(_) => return decide_stray(head, at, MessageRefusal::BadFieldName),
        }
    }
    Ok(None)
}
