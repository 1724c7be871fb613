//! Searches for private keys where none may be: in all memory that a process can write, and in
//! files. It recognizes an ECDSA P-256 key by its public key: it computes the point for every 32
//! bytes that could be a scalar. It reports what it finds and does not assess it.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use aws_lc_rs::agreement::{ECDH_P256, PrivateKey};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// Length of a P-256 scalar in bytes.
const SCALAR: usize = 32;
/// Memory is read in chunks of this size, which overlap by the length of a key. Any size that fits
/// into memory beside the process will do; an overlap of a page is more than any form of a key has.
const CHUNK_BYTES: usize = 4 << 20;
const OVERLAP_BYTES: usize = 4096;
/// Memory that was never written is skipped in units of this size. The size of the kernel's pages.
const PAGE: usize = 4096;
/// Minimum number of different bytes among 32. Random bytes repeat so rarely that one key in 10^9
/// would be missed.
const DIFFERENT_MIN: u32 = 20;

/// Owner of each public key, by its point (SEC 1 §2.3.3, uncompressed).
pub type Publics = HashMap<Vec<u8>, String>;

/// A private key that was found.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct FoundKey {
    /// Owner of the key, by its certificate.
    pub owner: String,
    /// The memory region or the file that has the key.
    pub location: String,
}

/// Returns the point of a certificate's P-256 key.
pub fn point(certificate_der: &[u8]) -> Vec<u8> {
    // AlgorithmIdentifier of id-ecPublicKey with prime256v1, then a BIT STRING of 66 bytes with no
    // unused bits (RFC 5480 §2).
    let before: &[u8] = &[
        0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a, 0x86,
        0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
    ];
    let at = certificate_der
        .windows(before.len())
        .position(|window| window == before)
        .expect("a certificate with a P-256 key")
        + before.len();
    certificate_der[at..at + 65].to_vec()
}

/// Searches all memory that a process can write.
pub fn in_process(pid: u32, publics: &Publics) -> Vec<FoundKey> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))
        .unwrap_or_else(|e| panic!("process {pid}: {e}"));
    let memory =
        File::open(format!("/proc/{pid}/mem")).unwrap_or_else(|e| panic!("process {pid}: {e}"));
    let mut found = Vec::new();
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (Some(range), Some(rights)) = (words.next(), words.next()) else {
            continue;
        };
        let name = words.last().unwrap_or_default();
        // A key in use is in writable memory; `[vvar]` and `[vdso]` belong to the kernel.
        if !rights.starts_with("rw") || name.starts_with("[v") {
            continue;
        }
        let (from, to) = range.split_once('-').expect("a range");
        let number = |text: &str| u64::from_str_radix(text, 16).expect("a hexadecimal number");
        let (mut at, end) = (number(from), number(to));
        while at < end {
            let mut chunk = vec![0; CHUNK_BYTES.min((end - at) as usize)];
            // A page may vanish meanwhile; unreadable memory contains nothing.
            let length = memory.read_at(&mut chunk, at).unwrap_or(0);
            if length == 0 {
                break;
            }
            found.extend(
                in_bytes(&chunk[..length], publics)
                    .into_iter()
                    .map(|owner| FoundKey {
                        owner,
                        location: format!("memory {line}"),
                    }),
            );
            // The next chunk begins before the end of this one, so that no key is cut at the
            // border.
            at += (length.max(OVERLAP_BYTES + 1) - OVERLAP_BYTES) as u64;
            // A chunk within the overlap is the region's last; stepping on would read it again.
            if length <= OVERLAP_BYTES {
                break;
            }
        }
    }
    // The overlap is searched twice.
    found.sort();
    found.dedup();
    found
}

/// Searches every file below a directory.
pub fn in_files(dir: &Path, publics: &Publics) -> Vec<FoundKey> {
    let mut found = Vec::new();
    let mut dirs: Vec<PathBuf> = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
            let (path, kind) = (entry.path(), entry.file_type());
            match kind {
                // The kernel's BPF objects are not files.
                Ok(kind) if kind.is_dir() && !path.ends_with("bpffs") => dirs.push(path),
                Ok(kind) if kind.is_file() => {
                    let bytes = std::fs::read(&path).unwrap_or_default();
                    found.extend(in_bytes(&bytes, publics).into_iter().map(|owner| FoundKey {
                        owner,
                        location: path.display().to_string(),
                    }));
                }
                _ => {}
            }
        }
    }
    found.sort();
    found.dedup();
    found
}

/// Searches bytes for raw, DER and PEM keys.
fn in_bytes(bytes: &[u8], publics: &Publics) -> Vec<String> {
    let mut found = Vec::new();
    let mut look = |scalar: &[u8]| found.extend(owner(scalar, publics));
    let (zeros, last) = ([0; PAGE + SCALAR], bytes.len().saturating_sub(SCALAR - 1));
    let mut at = 0;
    while at < last {
        // Most memory was never written.
        if at.is_multiple_of(PAGE) && bytes[at..].starts_with(&zeros) {
            at += PAGE;
            continue;
        }
        look(&bytes[at..at + SCALAR]);
        at += 8;
    }
    // ECPrivateKey (RFC 5915): version 1, then an OCTET STRING of 32 bytes, at any offset.
    let header: &[u8] = &[0x02, 0x01, 0x01, 0x04, 0x20];
    for at in memchr::memmem::find_iter(bytes, header) {
        look(
            bytes
                .get(at + header.len()..at + header.len() + SCALAR)
                .unwrap_or_default(),
        );
    }
    for der in pem(bytes) {
        for at in memchr::memmem::find_iter(&der, header) {
            look(
                der.get(at + header.len()..at + header.len() + SCALAR)
                    .unwrap_or_default(),
            );
        }
    }
    found
}

/// Decodes PEM private keys; a newline may also be written as in JSON.
fn pem(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mark = b"PRIVATE KEY-----";
    let marks = memchr::memmem::find_iter(bytes, mark).map(|at| at + mark.len());
    let texts = marks.map(|at| {
        let text = String::from_utf8_lossy(&bytes[at..(at + 4096).min(bytes.len())])
            .replace("\\n", "")
            .replace("\\r", "");
        text.split('-')
            .next()
            .unwrap_or_default()
            .chars()
            .filter(|letter| !letter.is_whitespace())
            .collect::<String>()
    });
    texts
        .filter_map(|text| STANDARD.decode(text).ok())
        .collect()
}

/// Returns the owner of a key of 32 bytes, in the given or in reverse order, because big numbers
/// may be stored little-endian.
fn owner(scalar: &[u8], publics: &Publics) -> Option<String> {
    // Cheap check for the most common bytes that are not a key: a word of zeros.
    if scalar.len() != SCALAR || scalar[..8] == [0; 8] || scalar[24..] == [0; 8] {
        return None;
    }
    if different(scalar) < DIFFERENT_MIN {
        return None;
    }
    let backwards: Vec<u8> = scalar.iter().rev().copied().collect();
    [scalar, &backwards].into_iter().find_map(|scalar| {
        let key = PrivateKey::from_private_key(&ECDH_P256, scalar).ok()?;
        publics
            .get(key.compute_public_key().ok()?.as_ref())
            .cloned()
    })
}

/// Returns how many different bytes there are. Every eighth byte of all memory is tested, in an
/// unoptimised build.
fn different(bytes: &[u8]) -> u32 {
    let mut seen = [0u128; 2];
    for byte in bytes {
        seen[usize::from(byte >> 7)] |= 1 << (byte & 0x7f);
    }
    seen[0].count_ones() + seen[1].count_ones()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::credential::{Leaf, TestAuthority};
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject;

    #[test]
    fn a_key_is_found_in_every_form() {
        let credential = TestAuthority::root("r").issue(&Leaf::of("spiffe://a/ns/b/sa/c"));
        let der = CertificateDer::from_pem_slice(credential.chain.as_bytes()).expect("PEM");
        let publics = Publics::from([(point(&der), "me".to_owned())]);
        let private = pem(credential.key.as_bytes()).remove(0);
        // In an ECPrivateKey (RFC 5915), version 1 and an octet string of 32 bytes precede the
        // scalar.
        let at = private
            .windows(5)
            .position(|window| window == [2, 1, 1, 4, 0x20])
            .expect("the key")
            + 5;
        let scalar = &private[at..at + SCALAR];
        // The search reads scalars at aligned addresses, and big numbers in the library's word
        // order.
        let backwards: Vec<u8> = scalar.iter().rev().copied().collect();
        // Aligned to 8 bytes, as an allocator aligns.
        let aligned = |middle: &[u8]| [&[0; 64][..], middle, &[0; 64]].concat();
        for (what, bytes, expected) in [
            ("raw", aligned(scalar), true),
            ("backwards", aligned(&backwards), true),
            (
                "DER at an odd place",
                // 13 is no multiple of any alignment.
                [&[1; 13][..], &private].concat(),
                true,
            ),
            ("PEM", credential.key.clone().into_bytes(), true),
            (
                "JSON",
                serde_json::json!({"key": credential.key})
                    .to_string()
                    .into_bytes(),
                true,
            ),
            (
                "the certificate",
                credential.chain.clone().into_bytes(),
                false,
            ),
            // Half a key, and its public part, must not be reported.
            ("half of it", aligned(&scalar[..16]), false),
        ] {
            assert_eq!(
                in_bytes(&bytes, &publics).contains(&"me".to_owned()),
                expected,
                "{what}"
            );
        }
    }
}
