//! Cache of the leaves that a key server verified, per worker, because the same few peers return
//! often. It verifies nothing.

use std::cell::RefCell;
use std::sync::Arc;

use canal_model::identity::Identity;
use canal_wire::keyrpc::IssuerChain;
use hashbrown::HashMap;
use rustls_pki_types::CertificateDer;

use super::verified_chain::PeerLeaf;
use super::verify;

/// Maximum number of leaves that a worker caches. When it is exceeded, the cache is cleared. Nobody
/// measured how many peers a worker has.
const LEAVES_MAX: usize = 1024;

/// Cached leaves by certificate, by the issuers above it, and by identity.
type LeafCacheMap = HashMap<(Box<[u8]>, Box<[u8]>, Identity), Arc<PeerLeaf>>;

thread_local! {
    static KNOWN: RefCell<LeafCacheMap> = RefCell::default();
}

/// Returns the data to retain of `leaf` and of the issuers `above` it ([`IssuerChain::bytes`]),
/// which a key server verified as those of `peer`.
///
/// # Errors
/// The certificate or the issuers cannot be parsed, or the certificate does not name `peer`.
pub fn leaf_of(
    leaf: Vec<u8>,
    above: Vec<u8>,
    peer: &Identity,
) -> Result<Arc<PeerLeaf>, &'static str> {
    let key = (
        leaf.into_boxed_slice(),
        above.into_boxed_slice(),
        peer.clone(),
    );
    KNOWN.with_borrow_mut(|known| {
        if let Some(found) = known.get(&key) {
            return Ok(found.clone());
        }
        let read = Arc::new(read(&CertificateDer::from(&*key.0), &key.1, peer)?);
        if known.len() >= LEAVES_MAX {
            known.clear();
        }
        known.insert(key, read.clone());
        Ok(read)
    })
}

fn read(
    leaf: &CertificateDer<'_>,
    above: &[u8],
    peer: &Identity,
) -> Result<PeerLeaf, &'static str> {
    let unreadable = |_| "a peer's certificate that cannot be read";
    let above = IssuerChain::read(above).map_err(|_| "a peer's chain that cannot be read")?;
    let (names, until) = verify::uris_and_end(leaf).map_err(unreadable)?;
    if !names.contains(&peer.to_string()) {
        return Err("a peer that its certificate does not name");
    }
    PeerLeaf::from_key_server(peer.clone(), leaf, above, until).map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use canal_wire::keyrpc::IssuerSerial;

    use super::*;
    use canal_testing::TestCa;

    #[test]
    fn leaves_beyond_the_cache_are_parsed_again() {
        let ca = TestCa::new("alpha");
        let one: Identity = "spiffe://alpha.example/ns/a/sa/one".parse().unwrap();
        let two: Identity = "spiffe://alpha.example/ns/a/sa/two".parse().unwrap();
        let leaf = ca.issue(&one).chain()[0].to_vec();
        let first = leaf_of(leaf.clone(), vec![], &one).unwrap();
        assert!(Arc::ptr_eq(
            &first,
            &leaf_of(leaf.clone(), vec![], &one).unwrap()
        ));
        assert!(
            leaf_of(leaf.clone(), vec![], &two).is_err(),
            "what is remembered is of one peer"
        );
        assert!(leaf_of(b"?".to_vec(), vec![], &one).is_err());
        // The same leaf with other issuers is another chain: a revocation in one does not concern
        // the other.
        let mut above = Vec::new();
        IssuerSerial {
            issuer: b"x",
            serial: &[5],
        }
        .append(&mut above)
        .unwrap();
        let other = leaf_of(leaf.clone(), above.clone(), &one).unwrap();
        assert_eq!(
            (other.above().bytes(), first.above().links().count()),
            (&above[..], 0)
        );
        assert!(Arc::ptr_eq(
            &other,
            &leaf_of(leaf.clone(), above, &one).unwrap()
        ));
        assert!(leaf_of(leaf.clone(), b"?".to_vec(), &one).is_err());
        KNOWN.with_borrow_mut(|known| {
            for n in known.len()..LEAVES_MAX {
                known.insert(
                    (n.to_be_bytes().into(), [].into(), one.clone()),
                    first.clone(),
                );
            }
        });
        leaf_of(ca.issue(&two).chain()[0].to_vec(), vec![], &two).unwrap();
        // A full cache is emptied before the next leaf enters.
        assert_eq!(KNOWN.with_borrow(HashMap::len), 1);
    }
}
