//! One trust domain as it stands: its roots, the phase of their replacement, what is revoked and who is barred. Decides, and keeps nothing:
//! the caller writes it down before it is in force.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use canal_authority::{CRL_LIFETIME_SECONDS, ForeignCrl, Phase, Refusal, RevokedSerial, TenantAuthority};
use canal_model::identity::Identity;
use canal_model::ids::TrustDomain;
use canal_store::{StoredAuthority, StoredCertificate, StoredTrust};
use serde::{Deserialize, Serialize};

/// Revoked certificates of one trust domain that have not ended.
pub const REVOKED_MAX: usize = 10_000;
/// Identities of one trust domain that are barred.
pub const BARRED_MAX: usize = 10_000;
/// A revoked certificate stays in the list for so long after its end (RFC 5280 §3.3: at least one list more).
const REVOKED_AFTER_END_SECONDS: u64 = 3600;

/// A certificate that was revoked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Revoked {
    pub(crate) serial: String,
    /// Fingerprint of who signed it, who must sign the list.
    pub(crate) root: String,
    at: u64,
    pub(crate) until: u64,
}

/// What is kept beside the keys.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Kept {
    phase: String,
    pub(crate) since: u64,
    pub(crate) crl_number: u64,
    crl_made: u64,
    /// By the signer's fingerprint; those that came with files too.
    crls: BTreeMap<String, Vec<String>>,
    /// The lists of the files that are in `crls`.
    foreign: Vec<String>,
    pub(crate) revoked: Vec<Revoked>,
    pub(crate) barred: BTreeSet<String>,
}

/// The roots that Canal made.
#[derive(Clone)]
pub(crate) struct Own {
    /// It signs.
    pub(crate) first: Arc<TenantAuthority>,
    /// It comes or goes.
    pub(crate) second: Option<Arc<TenantAuthority>>,
}

/// One trust domain's state.
#[derive(Clone, Default)]
pub(crate) struct Domain {
    pub(crate) own: Option<Own>,
    pub(crate) kept: Kept,
}

/// Why an order on a trust domain is not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OrderFault {
    #[error("the authority of {0} is not Canal's own: replace its files, or its root, where it comes from")]
    NotOwn(TrustDomain),
    #[error("no certificate with serial {0} is on record; `canal ca status --certificates` lists them")]
    UnknownSerial(String),
    #[error("{0} is not of trust domain {1}")]
    Foreign(Identity, TrustDomain),
    #[error("{0} is not barred")]
    NotBarred(String),
    #[error("{REVOKED_MAX} certificates of the trust domain are revoked, which is the limit; replace its root")]
    RevokedMax,
    #[error("{BARRED_MAX} identities of the trust domain are barred, which is the limit; restore some")]
    BarredMax,
    #[error(transparent)]
    Refused(#[from] Refusal),
}

impl OrderFault {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::NotOwn(_) => "not_own",
            Self::UnknownSerial(_) => "unknown_serial",
            Self::Foreign(..) => "foreign_identity",
            Self::NotBarred(_) => "not_barred",
            Self::RevokedMax => "revoked_max",
            Self::BarredMax => "barred_max",
            Self::Refused(r) => r.name(),
        }
    }
}

impl Domain {
    /// As it was kept.
    pub(crate) fn read(domain: &TrustDomain, stored: &StoredTrust) -> Result<Self, String> {
        let load = |a: &StoredAuthority| TenantAuthority::load(domain, &a.key, &a.certificate).map(Arc::new).map_err(|e| e.to_string());
        let own = match &stored.first {
            Some(first) => Some(Own { first: load(first)?, second: stored.second.as_ref().map(load).transpose()? }),
            None => None,
        };
        let kept =
            if stored.state.is_empty() { Kept::default() } else { serde_json::from_str(&stored.state).map_err(|e| e.to_string())? };
        Ok(Self { own, kept })
    }

    /// As it is to be kept.
    pub(crate) fn stored(&self) -> StoredTrust {
        let row = |a: &Arc<TenantAuthority>| StoredAuthority { key: a.key(), certificate: a.certificate().to_string() };
        StoredTrust {
            first: self.own.as_ref().map(|own| row(&own.first)),
            second: self.own.as_ref().and_then(|own| own.second.as_ref()).map(row),
            // A map of strings cannot fail to be written.
            state: serde_json::to_string(&self.kept).unwrap_or_default(),
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        Phase::read(&self.kept.phase).unwrap_or_default()
    }

    fn begin(&mut self, phase: Phase, now: u64) {
        self.kept.phase = phase.as_str().into();
        self.kept.since = now;
    }

    /// Begins the replacement of the root by `new`.
    pub(crate) fn announce(&mut self, new: TenantAuthority, now: u64) {
        if let Some(own) = &mut self.own {
            own.second = Some(Arc::new(new));
            self.begin(Phase::Announced, now);
        }
    }

    /// The new root signs from now on.
    pub(crate) fn switch(&mut self, now: u64) {
        if let Some(own) = &mut self.own
            && let Some(second) = &mut own.second
        {
            std::mem::swap(&mut own.first, second);
            self.begin(Phase::Switched, now);
        }
    }

    /// The old root is told no more.
    pub(crate) fn retire(&mut self, now: u64) {
        if let Some(own) = &mut self.own
            && let Some(old) = own.second.take()
        {
            self.kept.crls.remove(old.fingerprint());
            self.kept.revoked.retain(|r| r.root != old.fingerprint());
        }
        self.begin(Phase::Steady, now);
    }

    /// Revokes certificates; those that are revoked already stay as they were.
    pub(crate) fn revoke<'a>(&mut self, certificates: impl Iterator<Item = &'a StoredCertificate>, now: u64) -> Result<usize, OrderFault> {
        let known: BTreeSet<String> = self.kept.revoked.iter().map(|r| r.serial.clone()).collect();
        let new: Vec<Revoked> = certificates
            .filter(|c| !known.contains(&c.serial))
            .map(|c| Revoked { serial: c.serial.clone(), root: c.root.clone(), at: now, until: c.until })
            .collect();
        self.kept.revoked.retain(|r| r.until.saturating_add(REVOKED_AFTER_END_SECONDS) > now);
        if self.kept.revoked.len() + new.len() > REVOKED_MAX {
            return Err(OrderFault::RevokedMax);
        }
        let count = new.len();
        self.kept.revoked.extend(new);
        Ok(count)
    }

    /// The identity gets no more certificates.
    pub(crate) fn bar(&mut self, identity: &str) -> Result<(), OrderFault> {
        if self.kept.barred.len() >= BARRED_MAX && !self.kept.barred.contains(identity) {
            return Err(OrderFault::BarredMax);
        }
        self.kept.barred.insert(identity.into());
        Ok(())
    }

    /// True where the lists are half through their life.
    pub(crate) fn lists_are_old(&self, now: u64) -> bool {
        !self.kept.crls.is_empty() && !self.kept.revoked.is_empty() && now.saturating_sub(self.kept.crl_made) >= CRL_LIFETIME_SECONDS / 2
    }

    /// True where what came with the files is not what is told.
    pub(crate) fn lists_differ(&self, foreign: &[ForeignCrl]) -> bool {
        !self.kept.foreign.iter().eq(foreign.iter().map(|f| &f.pem))
    }

    /// Makes all lists anew. `signers` are those that can sign now; lists of others stay while something in them has not ended.
    pub(crate) fn make_lists(&mut self, signers: &[Arc<TenantAuthority>], foreign: &[ForeignCrl], now: u64) -> Result<(), Refusal> {
        self.kept.revoked.retain(|r| r.until.saturating_add(REVOKED_AFTER_END_SECONDS) > now);
        let number = self.kept.crl_number + 1;
        let mut made = BTreeMap::new();
        for (at, signer) in signers.iter().enumerate() {
            let of_signer = self.kept.revoked.iter().filter(|r| r.root == signer.fingerprint());
            let rows: Vec<RevokedSerial> = of_signer.map(|r| RevokedSerial { serial: bytes(&r.serial), at: r.at }).collect();
            let beside = if at == 0 { foreign } else { &[] };
            let lists = signer.crls(&rows, beside, number, now)?;
            if !lists.is_empty() {
                made.insert(signer.fingerprint().to_string(), lists);
            }
        }
        for (fingerprint, lists) in &self.kept.crls {
            let is_needed = self.kept.revoked.iter().any(|r| r.root == *fingerprint && r.until > now);
            // Two lists of one issuer's name with two keys would have every chain refused.
            let is_apart = !signers.iter().any(|s| s.fingerprint() == fingerprint || lists.iter().any(|l| s.is_issuer_of(l)));
            if is_needed && is_apart {
                made.insert(fingerprint.clone(), lists.clone());
            }
        }
        if made != self.kept.crls {
            (self.kept.crl_number, self.kept.crl_made) = (number, now);
        }
        self.kept.crls = made;
        self.kept.foreign = foreign.iter().map(|f| f.pem.clone()).collect();
        Ok(())
    }

    /// The lists that are told.
    pub(crate) fn lists(&self) -> Vec<String> {
        self.kept.crls.values().flatten().cloned().collect()
    }

    /// Whether a serial is revoked.
    pub(crate) fn is_revoked(&self, serial: &str) -> bool {
        self.kept.revoked.iter().any(|r| r.serial == serial)
    }
}

/// A serial's bytes; what is not hexadecimal has none.
fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2).filter_map(|at| u8::from_str_radix(hex.get(2 * at..2 * at + 2)?, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn td() -> TrustDomain {
        "alpha.example".parse().unwrap()
    }

    fn domain() -> Domain {
        let first = Arc::new(TenantAuthority::generate(&td(), 1_800_000_000).unwrap());
        Domain { own: Some(Own { first, second: None }), kept: Kept::default() }
    }

    fn certificate(serial: &str, root: &str, until: u64) -> StoredCertificate {
        let (identity, holder) = ("spiffe://alpha.example/ns/a/sa/b".into(), "node alpha/n1".into());
        StoredCertificate { serial: serial.into(), identity, names: vec![], holder, root: root.into(), issued: 0, until }
    }

    #[test]
    fn a_replacement_survives_being_kept_at_each_step() {
        let mut d = domain();
        let mut seen = Vec::new();
        let old = d.own.as_ref().unwrap().first.fingerprint().to_string();
        for step in 0..4 {
            match step {
                0 => {}
                1 => d.announce(TenantAuthority::generate(&td(), 1_800_000_000).unwrap(), 10),
                2 => d.switch(20),
                _ => d.retire(30),
            }
            d = Domain::read(&td(), &d.stored()).unwrap();
            let own = d.own.as_ref().unwrap();
            seen.push((d.phase(), d.kept.since, own.first.fingerprint() == old, own.second.is_some()));
        }
        let want = [
            (Phase::Steady, 0, true, false),
            (Phase::Announced, 10, true, true),
            (Phase::Switched, 20, false, true),
            (Phase::Steady, 30, false, false),
        ];
        assert_eq!(seen, want);
    }

    #[test]
    fn lists_are_made_by_who_signed_and_go_with_what_they_name() {
        let now = 1_800_000_000;
        let mut d = domain();
        let own = d.own.clone().unwrap();
        let root = own.first.fingerprint().to_string();
        d.announce(TenantAuthority::generate(&td(), now).unwrap(), now);
        let signers = |d: &Domain| {
            let own = d.own.clone().unwrap();
            std::iter::once(own.first).chain(own.second).collect::<Vec<_>>()
        };
        d.make_lists(&signers(&d), &[], now).unwrap();
        assert_eq!((d.lists().len(), d.kept.crl_number), (0, 0), "nothing is revoked, nothing is told");
        let rows = [certificate("0a", &root, now + 100), certificate("0b", &root, now + 200)];
        assert_eq!(d.revoke(rows.iter(), now), Ok(2));
        assert_eq!(d.revoke(rows.iter(), now), Ok(0), "once is enough");
        d.make_lists(&signers(&d), &[], now).unwrap();
        assert_eq!((d.lists().len(), d.kept.crl_number), (1, 1));
        assert!(d.is_revoked("0a") && !d.is_revoked("0c"));
        assert!(!d.lists_are_old(now + 100) && d.lists_are_old(now + CRL_LIFETIME_SECONDS / 2));
        // Both have ended, and a list more was told with them.
        d.make_lists(&signers(&d), &[], now + 200 + REVOKED_AFTER_END_SECONDS).unwrap();
        assert_eq!(d.lists().len(), 0);
        d.revoke([certificate("0c", &root, now + 9000)].iter(), now + 5000).unwrap();
        d.make_lists(&signers(&d), &[], now + 5000).unwrap();
        d.switch(now + 5000);
        assert_eq!(d.lists().len(), 1);
        d.retire(now + 5001);
        assert_eq!((d.lists().len(), d.kept.revoked.len()), (0, 0), "a root that is gone needs no list");
    }

    #[test]
    fn limits() {
        let mut d = domain();
        let rows: Vec<StoredCertificate> = (0..=REVOKED_MAX).map(|i| certificate(&format!("{i:08x}"), "r", 100)).collect();
        assert_eq!(d.revoke(rows.iter(), 1).unwrap_err().name(), "revoked_max");
        assert_eq!(d.revoke(rows.iter().skip(1), 1), Ok(REVOKED_MAX));
        (0..BARRED_MAX).for_each(|i| d.bar(&i.to_string()).unwrap());
        assert_eq!(d.bar("7"), Ok(()));
        assert_eq!(d.bar("x").unwrap_err().name(), "barred_max");
    }
}
