//! The state of one trust domain: its roots, the phase of their rotation, revoked certificates and
//! blocked identities. It decides, and stores nothing itself: the caller writes the state to disk
//! before it is in force. Start at [`DomainState`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_ca::{
    CRL_LIFETIME_SECONDS, CsrError, ImportedCrl, RevokedSerial, RotationPhase, TenantAuthority,
};
use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use canal_store::{StoredAuthority, StoredCertificate, StoredTrust};
use serde::{Deserialize, Serialize};

/// Maximum number of revoked certificates of one trust domain that have not expired.
/// A list of so many has about half a megabyte, which every data plane that trusts the domain gets
/// with each renewal.
pub const REVOKED_MAX: usize = 10_000;
/// Maximum number of blocked identities of one trust domain.
pub const BLOCKED_MAX: usize = canal_model::trust::BLOCKED_IDENTITIES_MAX;
/// Time in seconds for which a revoked certificate stays on the list after it expired (RFC 5280
/// §3.3: at least one list more).
const REVOKED_AFTER_END_SECONDS: u64 = 3600;

/// A certificate that was revoked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RevokedCertificate {
    pub(crate) serial: String,
    /// Fingerprint of the CA that signed the certificate, and that must sign the list.
    pub(crate) root: String,
    at: u64,
    pub(crate) until: u64,
}

/// The state that is stored besides the keys.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct DomainRecord {
    phase: String,
    pub(crate) since: u64,
    pub(crate) crl_number: u64,
    crl_made: u64,
    /// Revocation lists by the signer's fingerprint, including those from files.
    crls: BTreeMap<String, Vec<String>>,
    /// Revocation lists from files, which are part of `crls`.
    foreign: Vec<String>,
    pub(crate) revoked: Vec<RevokedCertificate>,
    pub(crate) blocked_identities: BTreeSet<Identity>,
}

/// The roots that Canal itself created.
#[derive(Clone)]
pub(crate) struct ManagedRoots {
    /// Root that signs certificates now.
    pub(crate) signing: Arc<TenantAuthority>,
    /// Root that is announced, or that is no longer used to sign.
    pub(crate) other: Option<Arc<TenantAuthority>>,
}

/// The state of one trust domain.
#[derive(Clone, Default)]
pub(crate) struct DomainState {
    pub(crate) own: Option<ManagedRoots>,
    pub(crate) record: DomainRecord,
}

/// Reason why an operator's order on a trust domain is not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DomainError {
    #[error(
        "Canal does not manage the CA of {0}; fix: replace its files, or its root, at their source"
    )]
    NotOwn(TrustDomain),
    #[error(
        "no certificate with serial {0} is on record; fix: take one that `canal ca status --certificates` lists"
    )]
    UnknownSerial(String),
    #[error("{0} is not of trust domain {1}; fix: name an identity of that trust domain")]
    Foreign(Identity, TrustDomain),
    #[error("{0} is not blocked; fix: take one that `canal ca status` lists as blocked")]
    NotBlocked(String),
    #[error(
        "{REVOKED_MAX} certificates of the trust domain are revoked, which is the limit; fix: replace its root"
    )]
    RevokedMax,
    #[error(
        "{BLOCKED_MAX} identities of the trust domain are blocked, which is the limit; fix: restore some"
    )]
    BlockedMax,
    #[error(transparent)]
    Refused(#[from] CsrError),
}

impl DomainError {
    /// Returns the name of the reason, as the outcome of an operator's request.
    pub fn name(&self) -> &'static str {
        match self {
            Self::NotOwn(_) => "not_own",
            Self::UnknownSerial(_) => "unknown_serial",
            Self::Foreign(..) => "foreign_identity",
            Self::NotBlocked(_) => "not_blocked",
            Self::RevokedMax => "revoked_max",
            Self::BlockedMax => "blocked_max",
            Self::Refused(r) => r.name(),
        }
    }
}

impl DomainState {
    /// Loads the state as it was stored.
    ///
    /// # Errors
    /// A key, a certificate or the record cannot be read; a blocked identity that cannot be parsed
    /// would be admitted again.
    pub(crate) fn read(domain: &TrustDomain, stored: &StoredTrust) -> Result<Self, String> {
        let load = |a: &StoredAuthority| {
            TenantAuthority::load(domain, &a.key, &a.certificate)
                .map(Arc::new)
                .map_err(|e| e.to_string())
        };
        let own = match &stored.first {
            Some(first) => Some(ManagedRoots {
                signing: load(first)?,
                other: stored.second.as_ref().map(load).transpose()?,
            }),
            None => None,
        };
        let record = if stored.state.is_empty() {
            DomainRecord::default()
        } else {
            serde_json::from_str(&stored.state).map_err(|e| e.to_string())?
        };
        Ok(Self { own, record })
    }

    /// Returns the state in the form in which it is stored.
    pub(crate) fn stored(&self) -> StoredTrust {
        let row = |a: &Arc<TenantAuthority>| StoredAuthority {
            key: a.key(),
            certificate: a.certificate().to_string(),
        };
        StoredTrust {
            first: self.own.as_ref().map(|own| row(&own.signing)),
            second: self
                .own
                .as_ref()
                .and_then(|own| own.other.as_ref())
                .map(row),
            // Serializing this record cannot fail: it has only texts, numbers, and maps of texts.
            state: serde_json::to_string(&self.record).unwrap_or_default(),
        }
    }

    pub(crate) fn phase(&self) -> RotationPhase {
        RotationPhase::read(&self.record.phase).unwrap_or_default()
    }

    fn begin(&mut self, phase: RotationPhase, now: u64) {
        self.record.phase = phase.as_str().into();
        self.record.since = now;
    }

    /// Begins the rotation to the root `new`, which does not sign yet.
    pub(crate) fn announce(&mut self, new: TenantAuthority, now: u64) {
        if let Some(own) = &mut self.own {
            own.other = Some(Arc::new(new));
            self.begin(RotationPhase::Announced, now);
        }
    }

    /// Makes the new root the one that signs.
    pub(crate) fn switch(&mut self, now: u64) {
        if let Some(own) = &mut self.own
            && let Some(second) = &mut own.other
        {
            std::mem::swap(&mut own.signing, second);
            self.begin(RotationPhase::Switched, now);
        }
    }

    /// Removes the old root, which is no longer published, with its lists.
    pub(crate) fn retire(&mut self, now: u64) {
        if let Some(own) = &mut self.own
            && let Some(old) = own.other.take()
        {
            self.record.crls.remove(old.fingerprint());
            self.record.revoked.retain(|r| r.root != old.fingerprint());
        }
        self.begin(RotationPhase::Steady, now);
    }

    /// Revokes certificates; those that are revoked already stay as they were. Returns how many are
    /// new.
    ///
    /// # Errors
    /// [`DomainError::RevokedMax`] if more than [`REVOKED_MAX`] would be revoked.
    pub(crate) fn revoke<'a>(
        &mut self,
        certificates: impl Iterator<Item = &'a StoredCertificate>,
        now: u64,
    ) -> Result<usize, DomainError> {
        let known: BTreeSet<String> = self
            .record
            .revoked
            .iter()
            .map(|r| r.serial.clone())
            .collect();
        let new: Vec<RevokedCertificate> = certificates
            .filter(|c| !known.contains(&c.serial))
            .map(|c| RevokedCertificate {
                serial: c.serial.clone(),
                root: c.root.clone(),
                at: now,
                until: c.until,
            })
            .collect();
        self.record
            .revoked
            .retain(|r| r.until.saturating_add(REVOKED_AFTER_END_SECONDS) > now);
        if self.record.revoked.len() + new.len() > REVOKED_MAX {
            return Err(DomainError::RevokedMax);
        }
        let count = new.len();
        self.record.revoked.extend(new);
        Ok(count)
    }

    /// Blocks an identity, which gets no more certificates.
    pub(crate) fn bar(&mut self, identity: &Identity) -> Result<(), DomainError> {
        if self.record.blocked_identities.len() >= BLOCKED_MAX
            && !self.record.blocked_identities.contains(identity)
        {
            return Err(DomainError::BlockedMax);
        }
        self.record.blocked_identities.insert(identity.clone());
        Ok(())
    }

    /// True if the revocation lists are past half of their lifetime.
    pub(crate) fn lists_are_old(&self, now: u64) -> bool {
        !self.record.crls.is_empty()
            && !self.record.revoked.is_empty()
            && now.saturating_sub(self.record.crl_made) >= CRL_LIFETIME_SECONDS / 2
    }

    /// True if the revocation lists from the files are not those that are published.
    pub(crate) fn lists_differ(&self, foreign: &[ImportedCrl]) -> bool {
        !self
            .record
            .foreign
            .iter()
            .eq(foreign.iter().map(|f| &f.pem))
    }

    /// Signs all revocation lists again. `signers` are the CAs that can sign now. Lists of others
    /// stay while something on them has not expired.
    pub(crate) fn make_lists(
        &mut self,
        signers: &[Arc<TenantAuthority>],
        foreign: &[ImportedCrl],
        now: u64,
    ) -> Result<(), CsrError> {
        self.record
            .revoked
            .retain(|r| r.until.saturating_add(REVOKED_AFTER_END_SECONDS) > now);
        let number = self.record.crl_number + 1;
        let mut made = BTreeMap::new();
        for (at, signer) in signers.iter().enumerate() {
            let of_signer = self
                .record
                .revoked
                .iter()
                .filter(|r| r.root == signer.fingerprint());
            let rows: Vec<RevokedSerial> = of_signer
                .map(|r| RevokedSerial {
                    serial: bytes(&r.serial),
                    at: r.at,
                })
                .collect();
            // Imported lists are published once, beside the first CA's.
            let beside = if at == 0 { foreign } else { &[] };
            let lists = signer.crls(&rows, beside, number, now)?;
            if !lists.is_empty() {
                made.insert(signer.fingerprint().to_string(), lists);
            }
        }
        for (fingerprint, lists) in &self.record.crls {
            let is_needed = self
                .record
                .revoked
                .iter()
                .any(|r| r.root == *fingerprint && r.until > now);
            // Two lists with one issuer name and two keys would make verifiers refuse every chain.
            let is_apart = !signers
                .iter()
                .any(|s| s.fingerprint() == fingerprint || lists.iter().any(|l| s.is_issuer_of(l)));
            if is_needed && is_apart {
                made.insert(fingerprint.clone(), lists.clone());
            }
        }
        // The number rises only with a new list (RFC 5280 §5.2.3).
        if made != self.record.crls {
            (self.record.crl_number, self.record.crl_made) = (number, now);
        }
        self.record.crls = made;
        self.record.foreign = foreign.iter().map(|f| f.pem.clone()).collect();
        Ok(())
    }

    /// Returns the revocation lists that are published.
    pub(crate) fn lists(&self) -> Vec<String> {
        self.record.crls.values().flatten().cloned().collect()
    }

    /// Returns the blocked identities, which are published too: a certificate of theirs that
    /// another program signed with this CA is on no list.
    pub(crate) fn blocked(&self) -> Vec<Identity> {
        self.record.blocked_identities.iter().cloned().collect()
    }

    /// True if the certificate with this serial is revoked.
    pub(crate) fn is_revoked(&self, serial: &str) -> bool {
        self.record.revoked.iter().any(|r| r.serial == serial)
    }
}

/// Returns the bytes of a hexadecimal serial; digits that are not hexadecimal are left out.
fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2)
        .filter_map(|at| u8::from_str_radix(hex.get(2 * at..2 * at + 2)?, 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn td() -> TrustDomain {
        "alpha.example".parse().unwrap()
    }

    fn domain() -> DomainState {
        let first = Arc::new(TenantAuthority::generate(&td(), 1_800_000_000).unwrap());
        DomainState {
            own: Some(ManagedRoots {
                signing: first,
                other: None,
            }),
            record: DomainRecord::default(),
        }
    }

    fn certificate(serial: &str, root: &str, until: u64) -> StoredCertificate {
        let (identity, holder) = (
            "spiffe://alpha.example/ns/a/sa/b".into(),
            "node alpha/n1".into(),
        );
        StoredCertificate {
            serial: serial.into(),
            identity,
            names: vec![],
            holder,
            root: root.into(),
            issued: 0,
            until,
        }
    }

    #[test]
    fn a_rotation_survives_a_restart_at_each_step() {
        let mut d = domain();
        let mut seen = Vec::new();
        let old = d.own.as_ref().unwrap().signing.fingerprint().to_string();
        for step in 0..4 {
            match step {
                0 => {}
                1 => d.announce(TenantAuthority::generate(&td(), 1_800_000_000).unwrap(), 10),
                2 => d.switch(20),
                _ => d.retire(30),
            }
            d = DomainState::read(&td(), &d.stored()).unwrap();
            let own = d.own.as_ref().unwrap();
            seen.push((
                d.phase(),
                d.record.since,
                own.signing.fingerprint() == old,
                own.other.is_some(),
            ));
        }
        let want = [
            (RotationPhase::Steady, 0, true, false),
            (RotationPhase::Announced, 10, true, true),
            (RotationPhase::Switched, 20, false, true),
            (RotationPhase::Steady, 30, false, false),
        ];
        assert_eq!(seen, want);
    }

    #[test]
    fn crls_are_signed_by_the_issuer_and_expire_with_their_entries() {
        // A moment in January 2027.
        let now = 1_800_000_000;
        let mut d = domain();
        let own = d.own.clone().unwrap();
        let root = own.signing.fingerprint().to_string();
        d.announce(TenantAuthority::generate(&td(), now).unwrap(), now);
        let signers = |d: &DomainState| {
            let own = d.own.clone().unwrap();
            std::iter::once(own.signing)
                .chain(own.other)
                .collect::<Vec<_>>()
        };
        d.make_lists(&signers(&d), &[], now).unwrap();
        assert_eq!(
            (d.lists().len(), d.record.crl_number),
            (0, 0),
            "nothing is revoked, nothing is published"
        );
        let rows = [
            certificate("0a", &root, now + 100),
            certificate("0b", &root, now + 200),
        ];
        assert_eq!(d.revoke(rows.iter(), now), Ok(2));
        assert_eq!(d.revoke(rows.iter(), now), Ok(0), "once is enough");
        d.make_lists(&signers(&d), &[], now).unwrap();
        assert_eq!((d.lists().len(), d.record.crl_number), (1, 1));
        assert!(d.is_revoked("0a") && !d.is_revoked("0c"));
        // A list is renewed after half of its lifetime, so it is not old after 100 s.
        assert!(!d.lists_are_old(now + 100) && d.lists_are_old(now + CRL_LIFETIME_SECONDS / 2));
        // Entries stay for REVOKED_AFTER_END_SECONDS, which have passed for both certificates.
        d.make_lists(&signers(&d), &[], now + 200 + REVOKED_AFTER_END_SECONDS)
            .unwrap();
        assert_eq!(d.lists().len(), 0);
        // Later than the list above. The certificate ends at 9000, so this list has an entry.
        d.revoke([certificate("0c", &root, now + 9000)].iter(), now + 5000)
            .unwrap();
        d.make_lists(&signers(&d), &[], now + 5000).unwrap();
        d.switch(now + 5000);
        assert_eq!(d.lists().len(), 1);
        // One second later, so that the step is not of the same moment as the switch.
        d.retire(now + 5001);
        assert_eq!(
            (d.lists().len(), d.record.revoked.len()),
            (0, 0),
            "a removed root needs no revocation list"
        );
    }

    #[test]
    fn limits() {
        let mut d = domain();
        let rows: Vec<StoredCertificate> = (0..=REVOKED_MAX)
            .map(|i| certificate(&format!("{i:08x}"), "r", 100))
            .collect();
        assert_eq!(d.revoke(rows.iter(), 1).unwrap_err().name(), "revoked_max");
        assert_eq!(d.revoke(rows.iter().skip(1), 1), Ok(REVOKED_MAX));
        let account = |name: &str| -> Identity {
            format!("spiffe://alpha.example/ns/default/sa/{name}")
                .parse()
                .unwrap()
        };
        (0..BLOCKED_MAX).for_each(|i| d.bar(&account(&i.to_string())).unwrap());
        assert_eq!(d.bar(&account("7")), Ok(()));
        assert_eq!(d.bar(&account("x")).unwrap_err().name(), "blocked_max");
    }

    #[test]
    fn a_stored_blocked_identity_that_cannot_be_read_is_an_error() {
        let mut d = domain();
        d.bar(&"spiffe://alpha.example/ns/default/sa/old".parse().unwrap())
            .unwrap();
        let mut stored = d.stored();
        let read = DomainState::read(&td(), &stored).unwrap();
        assert_eq!(read.blocked(), d.blocked());
        stored.state = stored.state.replace("spiffe://", "spiffe:/");
        let error = DomainState::read(&td(), &stored).err().unwrap();
        assert!(error.contains("identity"), "{error}");
    }
}
