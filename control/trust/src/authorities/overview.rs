//! The state of the certificate authorities for `canal ca status` and the metrics. It changes
//! nothing.

use std::sync::Arc;

use canal_ca::{RotationState, TenantAuthority, is_overdue, root_fingerprint};
use canal_controller_metrics::{self as metrics, GaugeValues};
use canal_model::identity::Identity;
use canal_store::{DomainName, StoredCertificate};
use canal_wire::api;

use super::{AuthoritySource, DomainState, TrustAuthorities, locked};

/// Maximum number of certificates in one response; the newest are listed.
/// A row has a few hundred bytes, so the response stays far below the largest message (200 MiB).
pub(crate) const LISTED_MAX: usize = 10_000;

impl TrustAuthorities {
    /// Returns the state of one trust domain as an operator sees it.
    pub fn status(
        &self,
        name: &DomainName,
        with_certificates: bool,
        now: u64,
    ) -> api::TrustDomainStatus {
        // The catalog may name a domain whose first root could not be created or stored yet. Such a
        // domain has no entry, and its status shows no roots.
        let domain = locked(&self.domains).get(name).cloned().unwrap_or_default();
        let rows = self.unexpired(name, now);
        let source = self.source(&name.1);
        let state = RotationState {
            phase: domain.phase(),
            since: domain.record.since,
            // Only the decision on the next step needs it, which is not made here.
            clear_since: None,
            now,
        };
        let mut waiting = locked(&self.waiting).get(name).cloned().unwrap_or_default();
        // The answer must not grow with the number of data planes.
        waiting.truncate(LISTED_MAX);
        api::TrustDomainStatus {
            tenant: name.0.to_string(),
            trust_domain: name.1.to_string(),
            source: source.name().into(),
            phase: state.phase.as_str().into(),
            since: domain.record.since,
            roots: roots(&source, &domain, &rows),
            waiting,
            overdue: is_overdue(&state, &self.rotation_timeouts),
            issued: rows.len() as u64,
            revoked: unexpired_revocations(&domain, now) as u64,
            blocked_identities: domain
                .record
                .blocked_identities
                .iter()
                .map(Identity::to_string)
                .collect(),
            crl_number: domain.record.crl_number,
            error: fault(&source),
            bundle: self.roots(name).unwrap_or_default(),
            certificates: if with_certificates {
                certificates(rows, &domain)
            } else {
                Vec::new()
            },
        }
    }

    /// Returns the certificates on record that have not expired. Expired ones stay on record until
    /// they are pruned, and nobody can use them.
    fn unexpired(&self, name: &DomainName, now: u64) -> Vec<Arc<StoredCertificate>> {
        let mut rows = self.issuance_log.of(name);
        rows.retain(|r| r.until > now);
        rows
    }

    /// Sets the gauges of one trust domain. They count as [`TrustAuthorities::status`] does.
    #[allow(
        clippy::cast_precision_loss,
        reason = "seconds since 1970 are far below 2^52"
    )]
    pub fn gauges(&self, name: &DomainName, now: u64, g: &mut GaugeValues) {
        // The catalog may name a domain whose first root could not be created or stored yet. Such a
        // domain has no entry.
        let domain = locked(&self.domains).get(name).cloned().unwrap_or_default();
        let label = [("tenant", name.0.as_str()), ("domain", name.1.as_str())];
        let source = self.source(&name.1);
        let signer = match &source {
            AuthoritySource::Files(folder) => folder.authority.clone(),
            AuthoritySource::External(..) => None,
            AuthoritySource::Infra(infra) => Some(infra.clone()),
            AuthoritySource::Own => domain.own.as_ref().map(|own| own.signing.clone()),
        };
        // Prometheus has floating-point numbers, which are exact up to 2^53.
        if let Some(signer) = signer {
            g.set(metrics::CA_NOT_AFTER, &label, signer.not_after() as f64);
        }
        g.set(
            metrics::CA_FAULT,
            &label,
            f64::from(u8::from(!fault(&source).is_empty())),
        );
        g.set(
            metrics::CA_REVOKED,
            &label,
            unexpired_revocations(&domain, now) as f64,
        );
        g.set(
            metrics::CA_BLOCKED,
            &label,
            domain.record.blocked_identities.len() as f64,
        );
        g.set(
            metrics::CA_ISSUED,
            &label,
            self.unexpired(name, now).len() as f64,
        );
        g.set(
            metrics::CA_WAITING,
            &label,
            locked(&self.waiting).get(name).map_or(0, Vec::len) as f64,
        );
    }
}

/// Returns the number of revoked certificates that have not expired.
fn unexpired_revocations(domain: &DomainState, now: u64) -> usize {
    let revoked = domain.record.revoked.iter();
    revoked.filter(|r| r.until > now).count()
}

fn fault(source: &AuthoritySource) -> String {
    match source {
        AuthoritySource::Own | AuthoritySource::Infra(_) => String::new(),
        AuthoritySource::Files(folder) | AuthoritySource::External(_, folder) => {
            match &folder.fault {
                Some(fault) => fault.clone(),
                None if folder.roots.is_empty() => {
                    "its folder in --ca-dir contains no usable CA".into()
                }
                None => String::new(),
            }
        }
    }
}

fn roots(
    source: &AuthoritySource,
    domain: &DomainState,
    rows: &[Arc<StoredCertificate>],
) -> Vec<api::RootStatus> {
    let leaves = |fingerprint: &str| {
        rows.iter()
            .filter(|r| r.root == fingerprint && !domain.is_revoked(&r.serial))
            .count() as u64
    };
    let signer = |a: &Arc<TenantAuthority>, signs| api::RootStatus {
        fingerprint: a.fingerprint().into(),
        signs,
        not_after: a.not_after(),
        leaves: leaves(a.fingerprint()),
    };
    match source {
        AuthoritySource::Own => {
            let own = domain.own.iter();
            own.flat_map(|own| {
                std::iter::once(signer(&own.signing, true))
                    .chain(own.other.iter().map(|s| signer(s, false)))
            })
            .collect()
        }
        AuthoritySource::Files(folder) => {
            folder.authority.iter().map(|a| signer(a, true)).collect()
        }
        AuthoritySource::Infra(infra) => vec![signer(infra, true)],
        AuthoritySource::External(_, folder) => {
            // The first root in the file counts as the one that signs; its expiry is not parsed.
            let one = |(at, root): (usize, &String)| {
                let fingerprint = root_fingerprint(root);
                api::RootStatus {
                    signs: at == 0,
                    not_after: 0,
                    leaves: leaves(&fingerprint),
                    fingerprint,
                }
            };
            folder.roots.iter().enumerate().map(one).collect()
        }
    }
}

fn certificates(
    mut rows: Vec<Arc<StoredCertificate>>,
    domain: &DomainState,
) -> Vec<api::IssuedCertificate> {
    rows.sort_by(|a, b| (b.issued, &a.serial).cmp(&(a.issued, &b.serial)));
    rows.truncate(LISTED_MAX);
    let one = |r: Arc<StoredCertificate>| api::IssuedCertificate {
        serial: r.serial.clone(),
        identity: r.identity.clone(),
        holder: r.holder.clone(),
        issued: r.issued,
        not_after: r.until,
        revoked: domain.is_revoked(&r.serial),
        root: r.root.clone(),
    };
    rows.into_iter().map(one).collect()
}
