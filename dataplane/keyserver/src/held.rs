//! A key in use, and the one before it while peers may still be shown that one's certificates. Where keys come from is not known here.

use std::sync::Arc;
use std::time::Instant;

use canal_wire::keyrpc::SpkiHash;

use crate::certified::Certified;
use crate::limits::REPLACED_TIME;

/// What a name has.
#[derive(Debug)]
pub(crate) struct Held {
    current: Arc<Certified>,
    /// With the time since which it is replaced.
    before: Option<(Instant, Arc<Certified>)>,
}

impl Held {
    /// Another key, or other certificates of the same, in place of what the name had.
    pub(crate) fn after(before: Option<Self>, current: Arc<Certified>, now: Instant) -> Self {
        let before = before.and_then(|held| if held.current.spki == current.spki { held.before } else { Some((now, held.current)) });
        Self { current, before }
    }

    /// The key for all that begins now.
    pub(crate) fn current(&self) -> &Arc<Certified> {
        &self.current
    }

    /// The key of certificates that a peer is shown.
    pub(crate) fn shown(&self, spki: &SpkiHash, now: Instant) -> Option<&Arc<Certified>> {
        let before = self.before.as_ref().filter(|(since, _)| now.duration_since(*since) < REPLACED_TIME).map(|(_, before)| before);
        std::iter::once(&self.current).chain(before).find(|key| key.spki == *spki)
    }

    /// Lets go of a key that nobody is to be shown any more.
    pub(crate) fn tidy(&mut self, now: Instant) {
        self.before.take_if(|(since, _)| now.duration_since(*since) >= REPLACED_TIME);
    }
}

#[cfg(test)]
mod tests {
    use canal_kit::testing::{TestCa, identity};
    use rustls_pki_types::pem::PemObject;
    use rustls_pki_types::{CertificateDer, PrivateKeyDer};

    use super::*;
    use crate::key::PrivateKey;
    use crate::vault::Vault;

    #[test]
    fn a_replaced_key_signs_while_its_certificates_may_be_shown() {
        let (ca, vault, web) = (TestCa::new("alpha"), Arc::new(Vault::new().unwrap()), "spiffe://alpha.example/ns/shop/sa/web");
        let made = |_| {
            let issued = ca.issue_with(&identity(web), |_| {});
            let key = PrivateKey::read(&vault, &PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).unwrap()).unwrap();
            let chain = CertificateDer::pem_slice_iter(issued.chain.as_bytes()).collect::<Result<_, _>>().unwrap();
            let name = canal_wire::keyrpc::KeyName::Identity(identity(web));
            Arc::new(Certified::new(name, "alpha".parse().unwrap(), Arc::new(key), chain, None).unwrap())
        };
        let [first, second, third] = [0, 1, 2].map(made);
        let start = Instant::now();
        let is = |held: &Held, key: &Arc<Certified>, now| held.shown(&key.spki, now).is_some_and(|found| Arc::ptr_eq(found, key));
        let held = Held::after(None, first.clone(), start);
        assert!(is(&held, &first, start) && !is(&held, &second, start));
        let mut held = Held::after(Some(held), second.clone(), start);
        let (late, over) = (start + REPLACED_TIME.mul_f64(0.99), start + REPLACED_TIME);
        assert!(Arc::ptr_eq(held.current(), &second) && is(&held, &second, over));
        assert!(is(&held, &first, late) && !is(&held, &first, over));
        held.tidy(late);
        assert_eq!(Arc::strong_count(&first), 2);
        held.tidy(over);
        assert_eq!(Arc::strong_count(&first), 1, "it is let go of");
        // The same key with other certificates takes nothing away; another one does.
        let held = Held::after(Some(held), third.clone(), start);
        let held = Held::after(Some(held), third.clone(), late);
        assert!(is(&held, &second, late) && !is(&held, &second, over) && !is(&held, &first, start));
    }
}
