//! Tests that keys sign verifiably, and are in plaintext in memory only while they sign.

use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, RSA_PSS_2048_8192_SHA256, UnparsedPublicKey};
use rustls_pki_types::{PrivatePkcs1KeyDer, PrivatePkcs8KeyDer};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::*;

fn vault() -> Arc<Vault> {
    Arc::new(Vault::new().unwrap())
}

#[test]
fn signatures_verify_and_foreign_schemes_are_refused() {
    let vault = vault();
    let ecdsa = PrivateKey::generate(&vault, KeyAlgorithm::EcdsaP256).unwrap();
    let signature = ecdsa
        .sign(SignatureScheme::ECDSA_NISTP256_SHA256, b"message")
        .unwrap();
    UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &ecdsa.public)
        .verify(b"message", &signature)
        .unwrap();
    assert_eq!(
        ecdsa.sign(SignatureScheme::RSA_PSS_SHA256, b"message"),
        Err(PrivateKeyError::Scheme)
    );
    assert_eq!(
        ecdsa.sign(SignatureScheme::ECDSA_NISTP384_SHA384, b"message"),
        Err(PrivateKeyError::Scheme)
    );
    let rsa = PrivateKey::generate(&vault, KeyAlgorithm::Rsa2048).unwrap();
    let signature = rsa
        .sign(SignatureScheme::RSA_PSS_SHA256, b"message")
        .unwrap();
    UnparsedPublicKey::new(&RSA_PSS_2048_8192_SHA256, &rsa.public)
        .verify(b"message", &signature)
        .unwrap();
    assert_eq!(
        rsa.sign(SignatureScheme::ECDSA_NISTP256_SHA256, b"message"),
        Err(PrivateKeyError::Scheme)
    );
    assert_eq!(
        (ecdsa.queue(), rsa.queue()),
        (OperationQueue::Ecdsa, OperationQueue::Rsa)
    );
    assert!(
        ecdsa.is(KeyAlgorithm::EcdsaP256)
            && !ecdsa.is(KeyAlgorithm::Rsa2048)
            && rsa.is(KeyAlgorithm::Rsa2048)
    );
}

#[test]
fn files_may_hold_any_usual_form() {
    let vault = vault();
    let pair = EcdsaKeyPair::generate(&ECDSA_P384_SHA384_ASN1_SIGNING).unwrap();
    let p384 = PrivatePkcs8KeyDer::from(pair.to_pkcs8v1().unwrap().as_ref().to_vec());
    assert_eq!(
        PrivateKey::read(&vault, &p384.into()).unwrap().form,
        KeyType::P384
    );
    let pair = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
    let pkcs8 = pair.as_der().unwrap().as_ref().to_vec();
    // PKCS#8 adds 26 bytes before the PKCS#1 key.
    let pkcs1 = PrivatePkcs1KeyDer::from(pkcs8[26..].to_vec());
    assert_eq!(
        PrivateKey::read(&vault, &pkcs1.into()).unwrap().form,
        KeyType::Rsa
    );
    assert_eq!(
        PrivateKey::read(&vault, &PrivatePkcs8KeyDer::from(pkcs8).into())
            .unwrap()
            .form,
        KeyType::Rsa
    );
    for bad in [vec![], vec![0x30, 0x00], vec![7; KEY_BYTES_MAX + 1]] {
        assert_eq!(
            PrivateKey::read(&vault, &PrivatePkcs8KeyDer::from(bad).into()).unwrap_err(),
            PrivateKeyError::Form
        );
    }
}

/// Locked by a test that searches memory, because another test's pages contain copies of what it
/// searches.
static SEARCH: Mutex<()> = Mutex::new(());

fn search_alone() -> MutexGuard<'static, ()> {
    SEARCH.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns how often any of `needles` is in this process's writable memory.
fn count_in_memory(needles: &[Vec<u8>]) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let memory = std::fs::File::open("/proc/self/mem").unwrap();
    let mut count = 0;
    let mut page = vec![0u8; 1 << 20];
    for line in maps
        .lines()
        .filter(|l| l.split(' ').nth(1).is_some_and(|p| p.starts_with("rw")))
    {
        let (range, _) = line.split_once(' ').unwrap();
        let (from, to) = range.split_once('-').unwrap();
        let (mut at, to) = (
            u64::from_str_radix(from, 16).unwrap(),
            u64::from_str_radix(to, 16).unwrap(),
        );
        while at < to {
            let n = memory
                .read_at(
                    &mut page[..usize::try_from((to - at).min(1 << 20)).unwrap()],
                    at,
                )
                .unwrap_or(0);
            if n == 0 {
                break;
            }
            count += needles
                .iter()
                .map(|needle| found_in(&page[..n], needle))
                .sum::<usize>();
            // The blocks overlap, so that no needle is missed at a border.
            at += if n > 4096 { n as u64 - 512 } else { n as u64 };
        }
        page.fill(0);
    }
    count
}

/// Returns how often the needle is in the block.
fn found_in(block: &[u8], needle: &[u8]) -> usize {
    let is_there = |at: usize| {
        block
            .get(at..at + needle.len())
            .is_some_and(|found| found.iter().zip(needle).all(|(a, b)| *a == b ^ MASK))
    };
    memchr::memchr_iter(needle[0] ^ MASK, block)
        .filter(|at| is_there(*at))
        .count()
}

/// Needles are masked, so that the search does not find itself.
const MASK: u8 = 0x5a;

/// Returns the masked secret as a big-endian integer, and in the word order of a bignum.
fn needles(secret: &[u8]) -> Vec<Vec<u8>> {
    [
        secret.iter().map(|b| b ^ MASK).collect(),
        secret.iter().rev().map(|b| b ^ MASK).collect(),
    ]
    .into()
}

fn keys() -> Vec<(OperationQueue, PrivateKey, SignatureScheme, Vec<Vec<u8>>)> {
    let vault = vault();
    let ecdsa = PrivateKey::generate(&vault, KeyAlgorithm::EcdsaP256).unwrap();
    let rsa = PrivateKey::generate(&vault, KeyAlgorithm::Rsa2048).unwrap();
    let (scalar, prime) = {
        let ecdsa = vault.open(&ecdsa.sealed, &ecdsa.public).unwrap();
        let rsa = vault.open(&rsa.sealed, &rsa.public).unwrap();
        // PKCS#8 with RFC 5915 inside: the scalar follows the tag 0x04 0x20 of the inner OCTET
        // STRING.
        let at = ecdsa
            .windows(5)
            .position(|w| w == [0x02, 0x01, 0x01, 0x04, 0x20])
            .unwrap()
            + 5;
        // The first prime: the fifth INTEGER of 1024 bits and its leading zero.
        let at_prime = rsa
            .windows(4)
            .position(|w| w == [0x02, 0x81, 0x81, 0x00])
            .unwrap()
            + 4;
        (
            needles(&ecdsa[at..at + 32]),
            needles(&rsa[at_prime..at_prime + 64]),
        )
    };
    vec![
        (
            OperationQueue::Ecdsa,
            ecdsa,
            SignatureScheme::ECDSA_NISTP256_SHA256,
            scalar,
        ),
        (
            OperationQueue::Rsa,
            rsa,
            SignatureScheme::RSA_PSS_SHA256,
            prime,
        ),
    ]
}

#[test]
fn a_key_is_in_memory_only_while_it_signs() {
    let _alone = search_alone();
    for (queue, key, scheme, needles) in keys() {
        assert_eq!(count_in_memory(&needles), 0, "{queue:?}: before");
        {
            let _batch = SigningBatch::begin(Duration::ZERO);
            key.sign(scheme, b"message").unwrap();
            assert!(
                count_in_memory(&needles) > 0,
                "{queue:?}: the scan must find a key that is open"
            );
        }
        assert_eq!(count_in_memory(&needles), 0, "{queue:?}: after a batch");
        for _ in 0..20 {
            key.sign(scheme, b"message").unwrap();
        }
        assert_eq!(
            count_in_memory(&needles),
            0,
            "{queue:?}: after single operations"
        );
    }
}

#[test]
fn an_rsa_key_lingers_and_is_wiped_when_it_rests() {
    let _alone = search_alone();
    for (queue, key, scheme, needles) in keys() {
        let sign = |linger| {
            let _batch = SigningBatch::begin(linger);
            key.sign(scheme, b"message").unwrap();
        };
        // The key must linger longer than the search takes.
        sign(OPEN_TIME_MAX * 1000);
        OPENED.with_borrow_mut(|o| {
            o.keys
                .iter_mut()
                .for_each(|h| h.since += OPEN_TIME_MAX * 1000)
        });
        assert_eq!(
            (count_in_memory(&needles) > 0, wipe_idle()),
            (queue == OperationQueue::Rsa, queue == OperationQueue::Rsa),
            "{queue:?}: just after the batch"
        );
        // A key does not stay open forever, however often it is used.
        OPENED.with_borrow_mut(|o| {
            o.keys
                .iter_mut()
                .for_each(|h| h.since -= OPEN_TIME_MAX * 1002)
        });
        assert!(!wipe_idle());
        assert_eq!(count_in_memory(&needles), 0, "{queue:?}: after its time");
        let short = Duration::from_millis(20);
        sign(short);
        std::thread::sleep(short);
        assert!(!wipe_idle());
        assert_eq!(count_in_memory(&needles), 0, "{queue:?}: after a rest");
    }
}

#[test]
fn a_thread_has_few_keys_open() {
    let vault = vault();
    let _batch = SigningBatch::begin(Duration::ZERO);
    for _ in 0..OPEN_MAX + 5 {
        let key = PrivateKey::generate(&vault, KeyAlgorithm::EcdsaP256).unwrap();
        key.sign(SignatureScheme::ECDSA_NISTP256_SHA256, b"message")
            .unwrap();
    }
    assert_eq!(OPENED.with_borrow(|o| o.keys.len()), OPEN_MAX);
}
