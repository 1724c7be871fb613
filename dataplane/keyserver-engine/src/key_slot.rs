//! [`KeySlot`]: the key of a name, and its predecessor while peers may still be presented the predecessor's certificates.
//!
//! The sources of keys are in other modules.

use std::sync::Arc;
use std::time::Instant;

use canal_wire::keyrpc::SpkiHash;

use crate::certified_key::CertifiedPrivateKey;
use crate::limits::PREDECESSOR_RETENTION;

/// The key of a name, and its predecessor.
#[derive(Debug)]
pub(crate) struct KeySlot {
    current: Arc<CertifiedPrivateKey>,
    /// The replaced key, and the time of its replacement.
    predecessor: Option<(Instant, Arc<CertifiedPrivateKey>)>,
}

impl KeySlot {
    /// Replaces the content of a slot by another key, or by other certificates of the same key.
    pub(crate) fn after(
        before: Option<Self>,
        current: Arc<CertifiedPrivateKey>,
        now: Instant,
    ) -> Self {
        let before = before.and_then(|slot| {
            if slot.current.spki == current.spki {
                slot.predecessor
            } else {
                Some((now, slot.current))
            }
        });
        Self {
            current,
            predecessor: before,
        }
    }

    /// Returns the key for all operations that begin now.
    pub(crate) fn current(&self) -> &Arc<CertifiedPrivateKey> {
        &self.current
    }

    /// Returns the key of certificates that a peer is presented.
    pub(crate) fn by_spki(
        &self,
        spki: &SpkiHash,
        now: Instant,
    ) -> Option<&Arc<CertifiedPrivateKey>> {
        let before = self
            .predecessor
            .as_ref()
            .filter(|(since, _)| now.duration_since(*since) < PREDECESSOR_RETENTION)
            .map(|(_, before)| before);
        std::iter::once(&self.current)
            .chain(before)
            .find(|key| key.spki == *spki)
    }

    /// Drops a predecessor whose certificates are no longer presented.
    pub(crate) fn tidy(&mut self, now: Instant) {
        self.predecessor
            .take_if(|(since, _)| now.duration_since(*since) >= PREDECESSOR_RETENTION);
    }
}

#[cfg(test)]
mod tests {
    use canal_testing::{TestCa, identity};
    use rustls_pki_types::pem::PemObject;
    use rustls_pki_types::{CertificateDer, PrivateKeyDer};

    use super::*;
    use crate::key::PrivateKey;
    use crate::vault::Vault;

    #[test]
    fn a_replaced_key_signs_while_its_certificates_may_be_shown() {
        let (ca, vault, web) = (
            TestCa::new("alpha"),
            Arc::new(Vault::new().unwrap()),
            "spiffe://alpha.example/ns/shop/sa/web",
        );
        let made = |_| {
            let issued = ca.issue_with(&identity(web), |_| {});
            let key = PrivateKey::read(
                &vault,
                &PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).unwrap(),
            )
            .unwrap();
            let chain = CertificateDer::pem_slice_iter(issued.chain.as_bytes())
                .collect::<Result<_, _>>()
                .unwrap();
            let name = canal_wire::keyrpc::KeyName::Identity(identity(web));
            Arc::new(
                CertifiedPrivateKey::new(
                    name,
                    "alpha".parse().unwrap(),
                    Arc::new(key),
                    chain,
                    None,
                )
                .unwrap(),
            )
        };
        let [first, second, third] = [0, 1, 2].map(made);
        let start = Instant::now();
        let is = |slot: &KeySlot, key: &Arc<CertifiedPrivateKey>, now| {
            slot.by_spki(&key.spki, now)
                .is_some_and(|found| Arc::ptr_eq(found, key))
        };
        let slot = KeySlot::after(None, first.clone(), start);
        assert!(is(&slot, &first, start) && !is(&slot, &second, start));
        let mut slot = KeySlot::after(Some(slot), second.clone(), start);
        // Just before the retention ends, and when it ends.
        let (late, over) = (
            start + PREDECESSOR_RETENTION.mul_f64(0.99),
            start + PREDECESSOR_RETENTION,
        );
        assert!(Arc::ptr_eq(slot.current(), &second) && is(&slot, &second, over));
        assert!(is(&slot, &first, late) && !is(&slot, &first, over));
        slot.tidy(late);
        // One reference is the test's, the other the slot's.
        assert_eq!(Arc::strong_count(&first), 2);
        slot.tidy(over);
        assert_eq!(Arc::strong_count(&first), 1, "it is released");
        // Other certificates of the same key do not replace the predecessor; another key does.
        let slot = KeySlot::after(Some(slot), third.clone(), start);
        let slot = KeySlot::after(Some(slot), third.clone(), late);
        assert!(is(&slot, &second, late) && !is(&slot, &second, over) && !is(&slot, &first, start));
    }
}
