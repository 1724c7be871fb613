//! Raw bytes from a captured pod: HTTP that no client library would write, and HTTP/2 frames. It
//! does not check the results.

use std::io::Read;
use std::process::Stdio;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::Mesh;

/// Preface of HTTP/2 (RFC 9113 §3.4), then empty SETTINGS.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Frame types (RFC 9113 §6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
/// Length of a frame's header (RFC 9113 §4.1).
const FRAME_HEAD: usize = 9;

/// Script with the arguments host, port, and base64 of the bytes to send. It ends with its input,
/// after two seconds at the latest; its output ends with the connection.
const SCRIPT: &str = "exec 3<>/dev/tcp/$1/$2 && echo $3 | base64 -d >&3 && { cat <&3 & exec >&-; read -r -t 2 _; kill $!; } 2>/dev/null";

/// Sends bytes from a pod through capture and returns the received bytes. It stops when the other
/// side ends the connection, when `is_over` returns true for the bytes so far, or after two
/// seconds.
pub fn raw(
    mesh: &Mesh,
    pod: &str,
    host: &str,
    port: u16,
    bytes: &[u8],
    is_over: impl Fn(&[u8]) -> bool,
) -> Vec<u8> {
    let mut command = mesh.command(
        pod,
        &[
            "bash",
            "-c",
            SCRIPT,
            "_",
            host,
            &port.to_string(),
            &STANDARD.encode(bytes),
        ],
    );
    let mut child = command
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap_or_else(|e| panic!("{pod}: bash: {e}"));
    let mut out = child.stdout.take().expect("it was started with pipes");
    let (mut received, mut chunk) = (Vec::new(), [0; 4096]);
    // The script's own limit of two seconds ends the output, so the read needs no timeout.
    while !is_over(&received) {
        match out
            .read(&mut chunk)
            .unwrap_or_else(|e| panic!("{pod}: bash: {e}"))
        {
            0 => break,
            length => received.extend_from_slice(&chunk[..length]),
        }
    }
    // The script ends when its input ends.
    drop(child.stdin.take());
    child.wait().unwrap_or_else(|e| panic!("{pod}: bash: {e}"));
    received
}

/// Sends text like [`raw`], until the response contains `word` in any case.
pub fn raw_text(mesh: &Mesh, pod: &str, host: &str, port: u16, text: &str, word: &str) -> String {
    let has_word = |received: &[u8]| {
        String::from_utf8_lossy(received)
            .to_lowercase()
            .contains(word)
    };
    String::from_utf8_lossy(&raw(mesh, pod, host, port, text.as_bytes(), has_word)).into_owned()
}

/// Returns an HTTP/2 request with exactly these fields, pseudo fields included, in this order (RFC
/// 7541 §6.2.2, never indexed, no Huffman).
pub fn h2_request(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name, value] {
            // One byte of length is enough for the texts of tests.
            block.push(
                u8::try_from(text.len())
                    .ok()
                    .filter(|length| *length < 127)
                    .expect("a short text"),
            );
            block.extend_from_slice(text.as_bytes());
        }
    }
    let length = u32::try_from(block.len())
        .expect("a short block")
        .to_be_bytes();
    // HEADERS with END_HEADERS and END_STREAM on stream 1.
    [PREFACE, &length[1..], &[1, 5, 0, 0, 0, 1], &block].concat()
}

/// Returns type, flags and payload of each frame of an HTTP/2 response; the last may be truncated.
pub fn h2_frames(mut bytes: &[u8]) -> Vec<(u8, u8, Vec<u8>)> {
    let mut frames = Vec::new();
    while bytes.len() >= FRAME_HEAD {
        let end = (FRAME_HEAD + length_of(bytes)).min(bytes.len());
        frames.push((bytes[3], bytes[4], bytes[FRAME_HEAD..end].to_vec()));
        bytes = &bytes[end..];
    }
    frames
}

/// Returns whether everything has arrived that can arrive on the only stream of a connection: its
/// end or its reset, complete (RFC 9113 §5.1).
pub fn h2_is_over(mut bytes: &[u8]) -> bool {
    while bytes.len() >= FRAME_HEAD && bytes.len() >= FRAME_HEAD + length_of(bytes) {
        let (kind, ends_stream, stream) = (bytes[3], bytes[4] & 1 == 1, &bytes[5..FRAME_HEAD]);
        if stream == [0, 0, 0, 1]
            && (kind == RST_STREAM || matches!(kind, DATA | HEADERS) && ends_stream)
        {
            return true;
        }
        bytes = &bytes[FRAME_HEAD + length_of(bytes)..];
    }
    false
}

fn length_of(frame: &[u8]) -> usize {
    usize::from(frame[0]) << 16 | usize::from(frame[1]) << 8 | usize::from(frame[2])
}

#[cfg(test)]
mod tests {
    use super::h2_is_over;

    #[test]
    fn the_end_of_a_stream_is_seen() {
        let frame =
            |kind: u8, flags: u8, stream: u8| vec![0, 0, 2, kind, flags, 0, 0, 0, stream, 9, 9];
        let settings = frame(4, 1, 0);
        for (what, bytes, expected) in [
            ("nothing", vec![], false),
            ("acknowledged settings", settings.clone(), false),
            (
                "a head with a body to come",
                [settings.clone(), frame(1, 4, 1)].concat(),
                false,
            ),
            (
                "a head alone",
                [settings.clone(), frame(1, 5, 1)].concat(),
                true,
            ),
            (
                "the last of the body",
                [frame(1, 4, 1), frame(0, 1, 1)].concat(),
                true,
            ),
            (
                "the last of the body, cut",
                [frame(1, 4, 1), frame(0, 1, 1)[..10].to_vec()].concat(),
                false,
            ),
            ("a reset", [settings, frame(3, 0, 1)].concat(), true),
            ("a reset of another", frame(3, 0, 3), false),
        ] {
            assert_eq!(h2_is_over(&bytes), expected, "{what}");
        }
    }
}
