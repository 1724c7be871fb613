//! Periodic work on certificate authorities: rotation steps, renewal of revocation lists, scans of
//! `--ca-dir`, pruning of the issuance log. The decisions are in `canal_ca::decide_step` and
//! [`issuance_log::in_use`]. Start at [`run_maintenance`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use canal_access::{Principals, now_seconds};
use canal_ca::{RotationPhase, RotationState, RotationStep, decide_step};
use canal_catalog::Catalog;
use canal_compiler::scope;
use canal_controller_metrics::{self as metrics, ControllerMetrics};
use canal_model::principal::Principal;
use canal_model::program::{Resource, ResourceKind};
use canal_southbound::Subscribers;
use canal_store::DomainName;
use tokio::sync::watch;

use super::{DomainState, TrustAuthorities, issuance_log, locked};

/// Interval between two maintenance runs.
/// A changed file in `--ca-dir`, and a due step of a rotation, wait this long at most.
const MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Number of runs after which expired certificates are removed from the issuance log.
/// These are ten minutes: an expired certificate counts in its tenant's share for so long.
/// Certificates live for 24 hours by default.
const PRUNE_EVERY_N_RUNS: u64 = 600;

/// Handles of the controller that the maintenance uses.
pub struct MaintenanceContext {
    pub trust: Arc<TrustAuthorities>,
    pub catalog: watch::Receiver<Arc<Catalog>>,
    pub principals: watch::Receiver<Arc<Principals>>,
    /// Registry of the data planes that have acknowledged a new root.
    pub subscribers: Arc<Subscribers>,
    pub metrics: Arc<ControllerMetrics>,
}

/// Runs maintenance until the controller stops.
pub async fn run_maintenance(context: Arc<MaintenanceContext>) {
    let mut looks = 0_u64;
    loop {
        tokio::time::sleep(MAINTENANCE_INTERVAL).await;
        looks += 1;
        let context = context.clone();
        let done = tokio::task::spawn_blocking(move || {
            maintain_once(&context, looks.is_multiple_of(PRUNE_EVERY_N_RUNS))
        });
        if done.await.is_err() {
            tracing::error!(
                "trust: maintenance of the CAs failed, which is a bug in the controller; retrying"
            );
        }
    }
}

/// Runs maintenance once; `prune` removes expired certificates from the log.
fn maintain_once(context: &MaintenanceContext, prune: bool) {
    let (trust, now) = (&context.trust, now_seconds());
    trust.look_at_folders(now);
    let names: Vec<DomainName> = locked(&trust.domains).keys().cloned().collect();
    for name in &names {
        trust.renew_lists(name, now);
        trust.replace(context, name, now);
    }
    if prune && let Err(e) = trust.issuance_log.prune(&trust.store, now) {
        context
            .metrics
            .count(metrics::STORE_ERRORS, &[("reason", e.name())]);
        tracing::warn!(error = %e, "trust: could not remove expired certificates from the issuance log; retrying");
    }
}

impl TrustAuthorities {
    /// Takes the next step of a root's rotation, if it is due.
    fn replace(&self, context: &MaintenanceContext, name: &DomainName, now: u64) {
        let Some(domain) = locked(&self.domains).get(name).cloned() else {
            return;
        };
        let phase = domain.phase();
        if phase == RotationPhase::Steady {
            locked(&self.clear).remove(name);
            locked(&self.waiting).remove(name);
            return;
        }
        let waiting = match phase {
            RotationPhase::Announced => subscribers_without_root(context, name, &domain),
            // Only `Switched` is left.
            _ => self.leaves_left(name, &domain, now),
        };
        // The waiting time begins again whenever something blocks the rotation.
        let clear_since = match waiting.is_empty() {
            true => Some(*locked(&self.clear).entry(name.clone()).or_insert(now)),
            false => {
                locked(&self.clear).remove(name);
                None
            }
        };
        locked(&self.waiting).insert(name.clone(), waiting);
        let state = RotationState {
            phase,
            since: domain.record.since,
            clear_since,
            now,
        };
        let stepped = match decide_step(&state, &self.rotation_timeouts) {
            RotationStep::Stay => return,
            RotationStep::Switch => self.step(name, phase, |d| d.switch(now)),
            RotationStep::Retire => self.step(name, phase, |d| d.retire(now)),
        };
        // The waiting time of one phase does not count for the next.
        locked(&self.clear).remove(name);
        match stepped {
            Ok(true) => {
                tracing::info!(target: "audit", tenant = %name.0, domain = %name.1, from = phase.as_str(), "trust: a root rotation took its next step")
            }
            // An operator took the step first.
            Ok(false) => {}
            Err(e) => {
                context
                    .metrics
                    .count(metrics::STORE_ERRORS, &[("reason", e.name())]);
                tracing::error!(tenant = %name.0, domain = %name.1, error = %e, "trust: could not store the next step of a root rotation; retrying");
            }
        }
    }

    /// Returns the certificates of the old root that may still be presented, as `holder: identity`.
    fn leaves_left(&self, name: &DomainName, domain: &DomainState, now: u64) -> Vec<String> {
        let Some(old) = domain.own.as_ref().and_then(|own| own.other.as_ref()) else {
            return Vec::new();
        };
        let rows = self.issuance_log.of(name);
        let left = issuance_log::in_use(
            &rows,
            old.fingerprint(),
            |serial| domain.is_revoked(serial),
            now,
        );
        left.map(|row| format!("{}: {} until {}", row.holder, row.identity, row.until))
            .collect()
    }

    /// Returns the holders of certificates of the trust domain that have not expired.
    fn holders(&self, name: &DomainName, now: u64) -> BTreeSet<String> {
        self.issuance_log
            .of(name)
            .iter()
            .filter(|row| row.until > now)
            .map(|row| row.holder.clone())
            .collect()
    }
}

/// Returns the data planes that may lack the new root. These are the ones that must receive it and
/// have not acknowledged it, and those that hold certificates and are not connected. One that may
/// no longer connect to the controller is not waited for.
fn subscribers_without_root(
    context: &MaintenanceContext,
    name: &DomainName,
    domain: &DomainState,
) -> Vec<String> {
    // Without a new root no data plane can lack it.
    let Some(new) = domain.own.as_ref().and_then(|own| own.other.as_ref()) else {
        return Vec::new();
    };
    let now = now_seconds();
    let catalog = context.catalog.borrow().clone();
    let principals = context.principals.borrow().clone();
    let mut out = BTreeSet::new();
    for (tenant, view) in &catalog.tenants {
        let entry = view
            .of(ResourceKind::Bundle)
            .find_map(|entry| match entry.resource.as_ref() {
                Resource::Bundle(bundle) if bundle.trust_domain == name.1 => {
                    Some((entry.changed, bundle))
                }
                // Bundles of other trust domains are those of federated tenants.
                _ => None,
            });
        let Some((published_at, bundle)) = entry else {
            continue;
        };
        // Acknowledgements of an older bundle say nothing about the new root.
        if !bundle.roots.iter().any(|root| root == new.certificate()) {
            out.insert(format!(
                "the controller itself: tenant {tenant} is not published yet"
            ));
            continue;
        }
        let own = view
            .claims
            .isolation
            .as_ref()
            .map(|i| (tenant.clone(), i.trust_domain.clone()));
        let holders = own
            .map(|own| context.trust.holders(&own, now))
            .unwrap_or_default();
        // Edges and operators get no certificates.
        for principal in principals
            .all()
            .filter(|p| !matches!(p, Principal::Edge { .. } | Principal::Operator { .. }))
        {
            if !scope::admits(&view.claims, principal, &catalog.placement) {
                continue;
            }
            match context
                .subscribers
                .has(principal, tenant, ResourceKind::Bundle, published_at)
            {
                Some(true) => {}
                Some(false) => _ = out.insert(format!("{principal}: has not acknowledged it")),
                None if holders.contains(&principal.to_string()) => {
                    _ = out.insert(format!("{principal}: is not connected"))
                }
                // It has no certificate, and receives the new root when it connects.
                None => {}
            }
        }
    }
    out.into_iter().collect()
}
