//! Drives what happens to authorities with time: steps of a root's replacement, lists that grow old, files that change, records that end.
//! The decisions are `canal_authority::decide_step` and `ledger::in_use`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use canal_authority::{Phase, Sight, Step, decide_step};
use canal_compiler::scope;
use canal_model::principal::Principal;
use canal_model::program::{Kind, Resource};
use canal_store::DomainName;

use super::{Domain, Trust, ledger, locked};
use crate::metrics;
use crate::shared::{Shared, now_seconds};

/// How often everything is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How often ended certificates leave the record, in looks.
const PRUNE_LOOKS: u64 = 600;

/// Runs until the controller stops.
pub(crate) async fn turn(shared: Arc<Shared>) {
    let mut looks = 0_u64;
    loop {
        tokio::time::sleep(LOOK).await;
        looks += 1;
        let shared = shared.clone();
        let looked = tokio::task::spawn_blocking(move || look(&shared, looks.is_multiple_of(PRUNE_LOOKS)));
        if looked.await.is_err() {
            tracing::error!("a look at the authorities failed, which is a fault of the controller; it is tried again");
        }
    }
}

fn look(shared: &Shared, prune: bool) {
    let (trust, now) = (&shared.trust, now_seconds());
    trust.look_at_folders(now);
    let names: Vec<DomainName> = locked(&trust.domains).keys().cloned().collect();
    for name in &names {
        trust.renew_lists(name, now);
        trust.replace(shared, name, now);
    }
    if prune && let Err(e) = trust.ledger.prune(&trust.store, now) {
        shared.metrics.count(metrics::STORE_ERRORS, &[("reason", e.name())]);
        tracing::warn!(error = %e, "ended certificates stay on record for now");
    }
}

impl Trust {
    /// Takes the next step of a root's replacement, if it is time.
    fn replace(&self, shared: &Shared, name: &DomainName, now: u64) {
        let Some(domain) = locked(&self.domains).get(name).cloned() else { return };
        let phase = domain.phase();
        if phase == Phase::Steady {
            locked(&self.clear).remove(name);
            locked(&self.waiting).remove(name);
            return;
        }
        let waiting = match phase {
            Phase::Announced => unaware(shared, name, &domain),
            _ => self.leaves_left(name, &domain, now),
        };
        let clear_since = match waiting.is_empty() {
            true => Some(*locked(&self.clear).entry(name.clone()).or_insert(now)),
            false => {
                locked(&self.clear).remove(name);
                None
            }
        };
        locked(&self.waiting).insert(name.clone(), waiting);
        let sight = Sight { phase, since: domain.kept.since, clear_since, now };
        let stepped = match decide_step(&sight, &self.patience) {
            Step::Stay => return,
            Step::Switch => self.step(name, phase, |d| d.switch(now)),
            Step::Retire => self.step(name, phase, |d| d.retire(now)),
        };
        // What was clear for one phase says nothing about the next.
        locked(&self.clear).remove(name);
        match stepped {
            Ok(true) => {
                tracing::info!(target: "audit", tenant = %name.0, domain = %name.1, from = phase.as_str(), "a root's replacement went on")
            }
            Ok(false) => {}
            Err(e) => {
                shared.metrics.count(metrics::STORE_ERRORS, &[("reason", e.name())]);
                tracing::error!(tenant = %name.0, domain = %name.1, error = %e, "a root's replacement waits for the store");
            }
        }
    }

    /// Certificates of the old root that may still be shown, as `holder: identity`.
    fn leaves_left(&self, name: &DomainName, domain: &Domain, now: u64) -> Vec<String> {
        let Some(old) = domain.own.as_ref().and_then(|own| own.second.as_ref()) else { return Vec::new() };
        let rows = self.ledger.of(name);
        let left = ledger::in_use(&rows, old.fingerprint(), |serial| domain.is_revoked(serial), now);
        left.map(|row| format!("{}: {} until {}", row.holder, row.identity, row.until)).collect()
    }

    /// Who holds a certificate of the trust domain that has not ended.
    fn holders(&self, name: &DomainName, now: u64) -> BTreeSet<String> {
        self.ledger.of(name).iter().filter(|row| row.until > now).map(|row| row.holder.clone()).collect()
    }
}

/// Data planes that do not know the new root for certain: those that are told of it and have not acknowledged it, and those that hold
/// certificates and are not connected. One that may no longer speak to the controller is not waited for.
fn unaware(shared: &Shared, name: &DomainName, domain: &Domain) -> Vec<String> {
    let Some(new) = domain.own.as_ref().and_then(|own| own.second.as_ref()) else { return Vec::new() };
    let now = now_seconds();
    let catalog = shared.catalog.borrow().clone();
    let principals = shared.principals.borrow().clone();
    let mut out = BTreeSet::new();
    for (tenant, view) in &catalog.tenants {
        let entry = view.of(Kind::Bundle).find_map(|entry| match &entry.resource {
            Resource::Bundle(bundle) if bundle.trust_domain == name.1 => Some((entry.changed, bundle)),
            _ => None,
        });
        let Some((told, bundle)) = entry else { continue };
        if !bundle.roots.iter().any(|root| root == new.certificate()) {
            out.insert(format!("the controller itself: tenant {tenant} is not told yet"));
            continue;
        }
        let own = view.claims.isolation.as_ref().map(|i| (tenant.clone(), i.trust_domain.clone()));
        let holders = own.map(|own| shared.trust.holders(&own, now)).unwrap_or_default();
        for principal in principals.all().filter(|p| !matches!(p, Principal::Edge { .. } | Principal::Operator { .. })) {
            if !scope::admits(&view.claims, principal, &catalog.whereabouts) {
                continue;
            }
            match shared.subscribers.has(principal, tenant, Kind::Bundle, told) {
                Some(true) => {}
                Some(false) => _ = out.insert(format!("{principal}: has not acknowledged it")),
                None if holders.contains(&principal.to_string()) => _ = out.insert(format!("{principal}: is not connected")),
                None => {}
            }
        }
    }
    out.into_iter().collect()
}
