//! Rows of the certificate authorities: roots with their keys, issued certificates, and fetched
//! JWKS.
//!
//! The controller interprets a trust domain's state; this module only stores it.

use canal_model::ids::{TenantName, TrustDomain};
use redb::{ReadableTable, TableDefinition};
use serde::{Deserialize, Serialize};

use crate::StoredAuthority;
use crate::database::{Store, TransactionOutcome};
use crate::error::StoreError;
use crate::fleet::{json, row};
use crate::seal::{StoreKey, is_sealed, plaintext_key, sealed};

type DomainKey = (&'static str, &'static str);
type DomainRow = (&'static [u8], &'static str);
type KeyAndPem = (Vec<u8>, String);

/// Maps `(tenant, trust domain)` to `(PKCS#8 DER, PEM)` of the root that signs.
pub(crate) const AUTHORITIES: TableDefinition<DomainKey, DomainRow> =
    TableDefinition::new("authorities");
/// Maps `(tenant, trust domain)` to `(PKCS#8 DER, PEM)` of the root that is being introduced or
/// retired.
pub(crate) const AUTHORITIES_SECOND: TableDefinition<DomainKey, DomainRow> =
    TableDefinition::new("authorities-second");
/// Maps `(tenant, trust domain)` to the state that belongs to the roots, a text in the controller's
/// format.
pub(crate) const TRUST: TableDefinition<DomainKey, &str> = TableDefinition::new("trust");
/// Maps `(tenant, trust domain, serial)` to a JSON [`StoredCertificate`].
pub(crate) const ISSUED: TableDefinition<(&str, &str, &str), &[u8]> =
    TableDefinition::new("issued");
/// Maps `(tenant, URI)` to a JWKS.
pub(crate) const JWKS: TableDefinition<(&str, &str), &str> = TableDefinition::new("jwks");

/// The stored state of one trust domain's certificate authority.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StoredTrust {
    /// The root that signs; `None` if its key is in files or in another process.
    pub first: Option<StoredAuthority>,
    /// The root that is being introduced or retired by a rotation.
    pub second: Option<StoredAuthority>,
    /// The state in the controller's own format.
    pub state: String,
}

/// One certificate in the issuance log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredCertificate {
    /// The serial number, in hexadecimal.
    pub serial: String,
    /// The SPIFFE ID in the certificate.
    pub identity: String,
    /// DNS names in the certificate, in addition to the identity.
    #[serde(default)]
    pub names: Vec<String>,
    /// The subscriber that received the certificate.
    pub holder: String,
    /// Fingerprint of the certificate that signed it; for an external CA, of the first configured
    /// root.
    pub root: String,
    /// Time of issue, in seconds since 1970.
    pub issued: u64,
    /// Time of expiry, in seconds since 1970.
    pub until: u64,
}

/// The name of a trust domain, qualified by its tenant.
pub type DomainName = (TenantName, TrustDomain);

impl Store {
    /// Returns the certificate authorities of all trust domains, with their keys unsealed.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`], [`StoreError::Damaged`] or [`StoreError::Key`].
    pub fn trusts(&self) -> Result<Vec<(DomainName, StoredTrust)>, StoreError> {
        let mut found: std::collections::BTreeMap<DomainName, StoredTrust> = Default::default();
        let (firsts, seconds, states) = self.read(|tx| {
            let rows = |table: TableDefinition<DomainKey, DomainRow>| -> Result<Vec<(DomainName, KeyAndPem)>, redb::Error> {
                let mut out = Vec::new();
                for entry in tx.open_table(table)?.iter()? {
                    let (k, v) = entry?;
                    out.push((domain(k.value())?, (v.value().0.to_vec(), v.value().1.to_string())));
                }
                Ok(out)
            };
            let mut states = Vec::new();
            for entry in tx.open_table(TRUST)?.iter()? {
                let (k, v) = entry?;
                states.push((domain(k.value())?, v.value().to_string()));
            }
            Ok((rows(AUTHORITIES)?, rows(AUTHORITIES_SECOND)?, states))
        })?;
        // Unsealing has its own errors, so it happens after the read transaction.
        for (name, row) in firsts {
            let first = self.open_row(&name, row)?;
            found.entry(name).or_default().first = Some(first);
        }
        for (name, row) in seconds {
            let second = self.open_row(&name, row)?;
            found.entry(name).or_default().second = Some(second);
        }
        for (name, state) in states {
            found.entry(name).or_default().state = state;
        }
        Ok(found.into_iter().collect())
    }

    fn open_row(
        &self,
        name: &DomainName,
        (key, certificate): KeyAndPem,
    ) -> Result<StoredAuthority, StoreError> {
        // The row may contain the key unsealed, so this copy is wiped too.
        let key = zeroize::Zeroizing::new(key);
        Ok(StoredAuthority {
            key: plaintext_key(self.key.as_ref(), &key, &domain_text(name))?,
            certificate,
        })
    }

    /// Stores the authorities of some trust domains, all or none. A new root must be on disk before
    /// its first certificate is returned: certificates of a root that was lost cannot be trusted
    /// again.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`] or [`StoreError::Key`].
    pub fn put_trusts(&self, all: &[(DomainName, StoredTrust)]) -> Result<(), StoreError> {
        let seal = |name: &DomainName,
                    a: &Option<StoredAuthority>|
         -> Result<Option<KeyAndPem>, StoreError> {
            let row = a.as_ref().map(|a| {
                Ok((
                    sealed(self.key.as_ref(), &a.key, &domain_text(name))?,
                    a.certificate.clone(),
                ))
            });
            row.transpose()
        };
        let mut rows = Vec::new();
        // All keys are sealed before the transaction, so a failure to seal changes nothing.
        for (name, trust) in all {
            rows.push((
                name,
                seal(name, &trust.first)?,
                seal(name, &trust.second)?,
                trust.state.as_str(),
            ));
        }
        self.write(|tx| {
            let mut states = tx.open_table(TRUST)?;
            let mut tables = [
                tx.open_table(AUTHORITIES)?,
                tx.open_table(AUTHORITIES_SECOND)?,
            ];
            for ((tenant, domain), first, second, state) in &rows {
                let key = (tenant.as_str(), domain.as_str());
                for (table, row) in tables.iter_mut().zip([first, second]) {
                    match row {
                        Some((sealed, pem)) => {
                            _ = table.insert(key, (sealed.as_slice(), pem.as_str()))?
                        }
                        // The key of a root that was replaced must not stay on the disk.
                        None => _ = table.remove(key)?,
                    }
                }
                states.insert(key, *state)?;
            }
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })
    }

    /// Seals keys that are stored unsealed, if the store has a key for it. Returns the number of
    /// keys that were unsealed.
    pub(crate) fn seal_all(&self) -> Result<usize, StoreError> {
        let is_open = |table: TableDefinition<DomainKey, DomainRow>| {
            self.read(|tx| {
                let mut open = 0;
                for entry in tx.open_table(table)?.iter()? {
                    open += usize::from(!is_sealed(entry?.1.value().0));
                }
                Ok(open)
            })
        };
        let open = is_open(AUTHORITIES)? + is_open(AUTHORITIES_SECOND)?;
        // All keys are opened even if nothing is to be sealed: a wrong store key must fail before
        // the controller serves.
        let all = self.trusts()?;
        if self.key.is_some() && open > 0 {
            self.put_trusts(&all)?;
        }
        Ok(open)
    }

    /// Returns all certificates in the issuance log.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`] or [`StoreError::Damaged`].
    pub fn issued(&self) -> Result<Vec<(DomainName, StoredCertificate)>, StoreError> {
        self.read(|tx| {
            let mut out = Vec::new();
            for entry in tx.open_table(ISSUED)?.iter()? {
                let (k, v) = entry?;
                let (tenant, trust_domain, _) = k.value();
                out.push((
                    domain((tenant, trust_domain))?,
                    row("issued certificate", v.value())?,
                ));
            }
            Ok(out)
        })
    }

    /// Adds certificates to the issuance log. Call it before they are returned to subscribers.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`].
    pub fn add_issued(&self, all: &[(DomainName, StoredCertificate)]) -> Result<(), StoreError> {
        self.write(|tx| {
            let mut table = tx.open_table(ISSUED)?;
            for ((tenant, domain), c) in all {
                table.insert(
                    (tenant.as_str(), domain.as_str(), c.serial.as_str()),
                    json(c)?.as_slice(),
                )?;
            }
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })
    }

    /// Removes certificates that expired before `now` (seconds since 1970) from the issuance log.
    /// Returns their number.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`] or [`StoreError::Damaged`].
    pub fn prune_issued(&self, now: u64) -> Result<usize, StoreError> {
        let ended: Vec<_> = self
            .issued()?
            .into_iter()
            .filter(|(_, c)| c.until < now)
            .collect();
        if !ended.is_empty() {
            self.write(|tx| {
                let mut table = tx.open_table(ISSUED)?;
                for ((tenant, domain), c) in &ended {
                    table.remove((tenant.as_str(), domain.as_str(), c.serial.as_str()))?;
                }
                Ok(TransactionOutcome::Commit { before: Vec::new() })
            })?;
        }
        Ok(ended.len())
    }

    /// Returns the JWKS of the last successful fetches, by tenant and URI.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`] or [`StoreError::Damaged`].
    pub fn jwks(&self) -> Result<Vec<(TenantName, String, String)>, StoreError> {
        self.read(|tx| {
            let mut out = Vec::new();
            for entry in tx.open_table(JWKS)?.iter()? {
                let (k, v) = entry?;
                let tenant = TenantName::new(k.value().0)
                    .map_err(|e| redb::Error::Corrupted(e.to_string()))?;
                out.push((tenant, k.value().1.to_string(), v.value().to_string()));
            }
            Ok(out)
        })
    }

    /// Stores a fetched JWKS, or removes it if `body` is `None`.
    ///
    /// # Errors
    /// Returns [`StoreError::Disk`].
    pub fn put_jwks(
        &self,
        tenant: &TenantName,
        uri: &str,
        body: Option<&str>,
    ) -> Result<(), StoreError> {
        self.write(|tx| {
            let mut table = tx.open_table(JWKS)?;
            match body {
                Some(body) => _ = table.insert((tenant.as_str(), uri), body)?,
                None => _ = table.remove((tenant.as_str(), uri))?,
            }
            Ok(TransactionOutcome::Commit { before: Vec::new() })
        })
    }
}

impl Store {
    /// Opens the store like [`Store::open`], with private keys sealed under `key`. Keys that were
    /// stored unsealed are sealed now.
    ///
    /// # Errors
    /// Returns the errors of [`Store::open`], or [`StoreError::Key`] if keys are sealed and `key`
    /// does not open them.
    pub fn open_with(
        dir: &std::path::Path,
        limits: crate::StoreLimits,
        key: Option<StoreKey>,
    ) -> Result<Self, StoreError> {
        let mut store = Self::open_unsealed(dir, limits)?;
        store.key = key;
        let lay_open = store.seal_all()?;
        if store.key.is_some() && lay_open > 0 {
            // Unused pages still contain the unsealed keys; compacting the file removes them.
            store.compact()?;
            tracing::info!(
                keys = lay_open,
                "store: sealed the private keys that were stored unsealed"
            );
        }
        Ok(store)
    }
}

fn domain_text((tenant, domain): &DomainName) -> String {
    format!("{tenant}/{domain}")
}

fn domain((tenant, domain): (&str, &str)) -> Result<DomainName, redb::Error> {
    let damaged = |e: canal_model::ids::IdError| redb::Error::Corrupted(e.to_string());
    Ok((
        TenantName::new(tenant).map_err(damaged)?,
        TrustDomain::new(domain).map_err(damaged)?,
    ))
}
