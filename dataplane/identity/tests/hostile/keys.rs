//! Keys of the attacker and its TLS 1.3 key schedule with SHA-256 and AES-128-GCM (RFC 8446 §5.2,
//! §7). They are independent of the code under test.

use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::agreement::{self, PrivateKey, UnparsedPublicKey};
use aws_lc_rs::kem::{Ciphertext, DecapsulationKey, ML_KEM_768};
use aws_lc_rs::{digest, hmac};

use super::craft::{DATA, HYBRID, P256, X25519, record, share, vec8, vec16};

pub(crate) type Secret = [u8; 32];

fn mac(key: &[u8], parts: &[u8]) -> Secret {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), parts);
    tag.as_ref().try_into().unwrap()
}

pub(crate) fn hash(bytes: &[u8]) -> Secret {
    digest::digest(&digest::SHA256, bytes)
        .as_ref()
        .try_into()
        .unwrap()
}

/// Computes HKDF-Expand-Label for at most one block.
fn expand(secret: &Secret, label: &str, context: &[u8], len: usize) -> Vec<u8> {
    let head = u16::try_from(len).unwrap().to_be_bytes();
    let label = vec8(format!("tls13 {label}").as_bytes());
    mac(secret, &[&head, &label[..], &vec8(context), &[1]].concat())[..len].to_vec()
}

fn derive(secret: &Secret, label: &str, transcript: &[u8]) -> Secret {
    expand(secret, label, &hash(transcript), 32)
        .try_into()
        .unwrap()
}

/// Secrets of one TLS connection.
#[derive(Clone)]
pub(crate) struct Schedule {
    pub(crate) client: Secret,
    pub(crate) server: Secret,
    master: Secret,
}

impl Schedule {
    /// Derives the handshake secrets; `transcript` ends with the ServerHello.
    pub(crate) fn new(shared: &[u8], transcript: &[u8]) -> Self {
        let early = mac(&[0; 32], &[0; 32]);
        let handshake = mac(&derive(&early, "derived", &[]), shared);
        let master = mac(&derive(&handshake, "derived", &[]), &[0; 32]);
        let (client, server) = (
            derive(&handshake, "c hs traffic", transcript),
            derive(&handshake, "s hs traffic", transcript),
        );
        Self {
            client,
            server,
            master,
        }
    }

    /// Derives the traffic secrets of client and server; `transcript` ends with the server's
    /// Finished.
    pub(crate) fn traffic(&self, transcript: &[u8]) -> (Secret, Secret) {
        (
            derive(&self.master, "c ap traffic", transcript),
            derive(&self.master, "s ap traffic", transcript),
        )
    }
}

/// Computes the content of a Finished message.
pub(crate) fn finished(traffic: &Secret, transcript: &[u8]) -> Vec<u8> {
    let key = expand(traffic, "finished", &[], 32);
    mac(&key, &hash(transcript)).to_vec()
}

/// One direction of encrypted records.
pub(crate) struct RecordDirection {
    secret: Secret,
    key: LessSafeKey,
    iv: Vec<u8>,
    pub(crate) sequence: u64,
}

impl RecordDirection {
    pub(crate) fn new(secret: &Secret) -> Self {
        let key = LessSafeKey::new(
            UnboundKey::new(&AES_128_GCM, &expand(secret, "key", &[], 16)).unwrap(),
        );
        Self {
            secret: *secret,
            key,
            iv: expand(secret, "iv", &[], 12),
            sequence: 0,
        }
    }

    /// Returns the direction after a KeyUpdate.
    pub(crate) fn updated(&self) -> Self {
        Self::new(
            &expand(&self.secret, "traffic upd", &[], 32)
                .try_into()
                .unwrap(),
        )
    }

    fn nonce(&mut self) -> Nonce {
        let mut nonce: [u8; 12] = self.iv[..].try_into().unwrap();
        nonce[4..]
            .iter_mut()
            .zip(self.sequence.to_be_bytes())
            .for_each(|(n, s)| *n ^= s);
        self.sequence += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts `inner`, which consists of content, its type and padding.
    pub(crate) fn seal(&mut self, inner: &[u8]) -> Vec<u8> {
        let length = u16::try_from(inner.len() + 16).unwrap().to_be_bytes();
        let head = [DATA, 3, 3, length[0], length[1]];
        let (nonce, mut body) = (self.nonce(), inner.to_vec());
        self.key
            .seal_in_place_append_tag(nonce, Aad::from(head), &mut body)
            .unwrap();
        record(DATA, &body)
    }

    /// Decrypts a record with its header, and returns content and type if it belongs to this
    /// direction.
    pub(crate) fn open(&mut self, record: &[u8]) -> Option<(u8, Vec<u8>)> {
        let before = self.sequence;
        let (nonce, mut body) = (self.nonce(), record[5..].to_vec());
        let Ok(plain) = self
            .key
            .open_in_place(nonce, Aad::from(&record[..5]), &mut body)
        else {
            self.sequence = before;
            return None;
        };
        let end = plain.iter().rposition(|b| *b != 0)?;
        Some((plain[end], plain[..end].to_vec()))
    }
}

/// Key pairs that live for the whole test run, so that tables of cases are values.
pub(crate) struct Keys {
    x25519: PrivateKey,
    p256: PrivateKey,
    kem: DecapsulationKey,
}

impl Keys {
    pub(crate) fn new() -> Self {
        Self {
            x25519: PrivateKey::generate(&agreement::X25519).unwrap(),
            p256: PrivateKey::generate(&agreement::ECDH_P256).unwrap(),
            kem: DecapsulationKey::generate(&ML_KEM_768).unwrap(),
        }
    }

    /// Returns the public key in the form of a key share.
    pub(crate) fn public(&self, group: u16) -> Vec<u8> {
        let plain = |k: &PrivateKey| k.compute_public_key().unwrap().as_ref().to_vec();
        match group {
            X25519 => plain(&self.x25519),
            P256 => plain(&self.p256),
            HYBRID => [
                self.kem
                    .encapsulation_key()
                    .unwrap()
                    .key_bytes()
                    .unwrap()
                    .as_ref(),
                &plain(&self.x25519),
            ]
            .concat(),
            _ => unreachable!("the attacker has no keys of other groups"),
        }
    }

    pub(crate) fn share(&self, group: u16) -> Vec<u8> {
        share(group, &self.public(group))
    }

    /// Computes the shared secret of a client with the server's share, or of a server (not hybrid)
    /// with the client's.
    pub(crate) fn agree(&self, group: u16, peer: &[u8]) -> Vec<u8> {
        let with = |mine: &PrivateKey, peer: &[u8]| {
            let peer = UnparsedPublicKey::new(mine.algorithm(), peer);
            agreement::agree(mine, peer, (), |secret| Ok(secret.to_vec())).unwrap()
        };
        match group {
            X25519 => with(&self.x25519, peer),
            P256 => with(&self.p256, peer),
            HYBRID => {
                let (ciphertext, peer) = peer.split_at(1088);
                let secret = self.kem.decapsulate(Ciphertext::from(ciphertext)).unwrap();
                [secret.as_ref(), &with(&self.x25519, peer)].concat()
            }
            _ => unreachable!("the attacker has no keys of other groups"),
        }
    }
}

/// Returns the message that replaces the first ClientHello in the transcript after a
/// HelloRetryRequest (RFC 8446 §4.4.1).
pub(crate) fn rolled_up(first: &[u8]) -> Vec<u8> {
    [&[254][..], &[0], &vec16(&hash(first))].concat()
}
