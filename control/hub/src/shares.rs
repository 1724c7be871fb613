//! The controller's limits that tenants share: one of each kind, their metrics, and the bytes that each tenant's configuration has. What is
//! refused when one is full is the business of whoever takes from it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::ids::TenantName;
use canal_model::principal::Principal;
use canal_model::program::{Kind, Resource};
use canal_model::share::{ShareKind, Shares};
use canal_runtime::share::TenantLimitUsage;
use canal_runtime::{GiveWay, ShareHolder, ShareRefusal, TenantLimit, TenantLimitConfig, TenantPermit};

use crate::catalog::{Catalog, TenantView};
use crate::hub::Limits;
use crate::metrics::{self, Gauges};

/// Changes that wait for the writer or are worked on, of all tenants together.
pub const QUEUED_CHANGES_MAX: u64 = 256;
/// Bytes of the changes that wait or are worked on, of all tenants together.
pub const QUEUED_CHANGE_BYTES_MAX: u64 = 1 << 30;
/// Bytes of all tenants' objects.
pub const CONFIGURATION_BYTES_MAX: u64 = 4 << 30;
/// Bytes of what the compiler makes of all tenants' objects.
pub const COMPILED_BYTES_MAX: u64 = 8 << 30;
/// Bytes of names that the streams of all data planes bring and the controller does not have itself.
const SUBSCRIPTION_BYTES_MAX: u64 = 1 << 30;
/// The part of a limit that only the provider may take: a tenth.
const RESERVE_DIVISOR: u64 = 10;

/// All limits of the controller that tenants share.
pub(crate) struct TenantLimits {
    pub(crate) queued_changes: TenantLimit,
    pub(crate) queued_change_bytes: TenantLimit,
    pub(crate) configuration: TenantBytes,
    pub(crate) compiled: TenantBytes,
    pub(crate) connections: TenantLimit,
    pub(crate) unauthenticated: TenantLimit,
    pub(crate) certificates: TenantLimit,
    pub(crate) streams: TenantLimit,
    pub(crate) subscription_bytes: TenantLimit,
}

impl TenantLimits {
    pub(crate) fn new(limits: &Limits) -> Self {
        let limit = |kind, capacity: u64| {
            let reserve = capacity / RESERVE_DIVISOR;
            TenantLimit::new(TenantLimitConfig { kind, capacity, reserve, give_way: GiveWay::Oldest })
        };
        let this = Self {
            queued_changes: limit(ShareKind::QueuedChanges, limits.queued_changes),
            queued_change_bytes: limit(ShareKind::QueuedChangeBytes, limits.queued_change_bytes),
            configuration: TenantBytes::new(limit(ShareKind::ConfigurationBytes, limits.configuration_bytes)),
            compiled: TenantBytes::new(limit(ShareKind::CompiledBytes, limits.compiled_bytes)),
            connections: limit(ShareKind::ControllerConnections, limits.connections as u64),
            unauthenticated: limit(ShareKind::ControllerUnauthenticated, limits.unauthenticated as u64),
            certificates: limit(ShareKind::Certificates, limits.issued as u64),
            streams: limit(ShareKind::ControllerStreams, limits.streams as u64),
            subscription_bytes: limit(ShareKind::SubscriptionBytes, SUBSCRIPTION_BYTES_MAX),
        };
        for limit in this.all() {
            limit.set_default_share(limits.shares.get(limit.kind()));
        }
        this
    }

    fn all(&self) -> [&TenantLimit; 9] {
        [
            &self.queued_changes,
            &self.queued_change_bytes,
            &self.configuration.limit,
            &self.compiled.limit,
            &self.connections,
            &self.unauthenticated,
            &self.certificates,
            &self.streams,
            &self.subscription_bytes,
        ]
    }

    /// Sets the shares that the provider wrote, tenant by tenant.
    pub(crate) fn set_shares<'a>(&self, tenants: impl Iterator<Item = (&'a TenantName, &'a Shares)> + Clone) {
        self.all().into_iter().for_each(|limit| limit.set_shares(tenants.clone()));
    }

    /// The shares that stand in the Tenants of a catalog.
    pub(crate) fn follow(&self, catalog: &Catalog) {
        self.set_shares(catalog.tenants.iter().filter_map(|(name, view)| Some((name, shares_of(view)?))));
    }

    /// Who holds how much of each limit.
    pub(crate) fn usage(&self) -> Vec<TenantLimitUsage> {
        self.all().into_iter().map(TenantLimit::usage).collect()
    }

    /// Adds what is used, and what was refused, to the metrics.
    #[allow(clippy::cast_precision_loss, reason = "shares are at most 2^53, counts far below")]
    pub(crate) fn gauges(&self, g: &mut Gauges) {
        for usage in self.usage() {
            let limit = ("limit", usage.kind.label());
            let (mut refused, mut revoked) = (usage.refused_before, usage.revoked_before);
            for holder in &usage.holders {
                // Ranges of addresses have no end, so they are told together.
                let name = match &holder.holder {
                    ShareHolder::Provider => "",
                    ShareHolder::Tenant(name) => name.as_str(),
                    ShareHolder::Network(_) => {
                        refused += holder.refused;
                        revoked += holder.revoked;
                        continue;
                    }
                };
                let labels = [limit, ("tenant", name)];
                g.set(metrics::SHARE_USED, &labels, holder.used as f64);
                g.set(metrics::SHARE_MAX, &labels, holder.max as f64);
                g.set(metrics::SHARE_REFUSED, &labels, holder.refused as f64);
                g.set(metrics::SHARE_REVOKED, &labels, holder.revoked as f64);
            }
            let unknown = [limit, ("tenant", "(unknown)")];
            g.set(metrics::SHARE_REFUSED, &unknown, refused as f64);
            g.set(metrics::SHARE_REVOKED, &unknown, revoked as f64);
        }
    }
}

/// What the provider wrote into a tenant's Tenant.
pub(crate) fn shares_of(view: &TenantView) -> Option<&Shares> {
    view.of(Kind::Tenant).find_map(|e| match &e.resource {
        Resource::Tenant(tenant) => Some(&tenant.shares),
        _ => None,
    })
}

/// On whose account a principal takes.
pub(crate) fn holder_of(principal: &Principal) -> ShareHolder {
    match principal {
        Principal::Node { tenant, .. }
        | Principal::KeyServer { tenant: Some(tenant), .. }
        | Principal::Operator { tenant: Some(tenant), .. } => ShareHolder::Tenant(tenant.clone()),
        Principal::Gateway { .. } | Principal::Edge { .. } | Principal::KeyServer { .. } | Principal::Operator { .. } => {
            ShareHolder::Provider
        }
    }
}

/// Bytes of the names that one stream brought, on its principal's account until the stream ends. They never become fewer before.
#[derive(Default)]
pub(crate) struct StreamNames {
    bytes: u64,
    permit: Option<TenantPermit>,
}

impl StreamNames {
    /// Takes what `holder` needs for `bytes` in all.
    ///
    /// # Errors
    /// The holder has its share, or all is taken.
    pub(crate) fn grow_to(&mut self, bytes: u64, limit: &TenantLimit, holder: &ShareHolder) -> Result<(), ShareRefusal> {
        let more = bytes.saturating_sub(self.bytes);
        match &mut self.permit {
            _ if more == 0 => return Ok(()),
            Some(permit) => permit.grow(more)?,
            none => *none = Some(limit.take(holder, more)?),
        }
        self.bytes = bytes;
        Ok(())
    }
}

/// Bytes that tenants keep: a limit, and what each tenant holds of it.
pub(crate) struct TenantBytes {
    limit: TenantLimit,
    held: Mutex<BTreeMap<TenantName, (u64, TenantPermit)>>,
}

impl TenantBytes {
    fn new(limit: TenantLimit) -> Self {
        Self { limit, held: Mutex::default() }
    }

    /// What a tenant holds.
    pub(crate) fn get(&self, tenant: &TenantName) -> u64 {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).get(tenant).map_or(0, |(bytes, _)| *bytes)
    }

    /// Sets what a tenant holds. Less is always taken.
    ///
    /// # Errors
    /// The tenant's share, or the whole limit, does not allow it; everything is as before.
    pub(crate) fn set(&self, tenant: &TenantName, bytes: u64) -> Result<(), Box<Diagnostic>> {
        // The tables are whole after each line.
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let done = match held.get_mut(tenant) {
            Some((now, permit)) if bytes > *now => permit.grow(bytes - *now).map(|()| *now = bytes),
            Some((now, permit)) => {
                permit.shrink(*now - bytes);
                *now = bytes;
                Ok(())
            }
            None => self.limit.take(&ShareHolder::Tenant(tenant.clone()), bytes).map(|permit| {
                held.insert(tenant.clone(), (bytes, permit));
            }),
        };
        if bytes == 0 {
            held.remove(tenant);
        }
        done.map_err(|_| self.excess(tenant, bytes))
    }

    /// Whether [`TenantBytes::set`] would be refused for the tenant's share; takes nothing.
    pub(crate) fn check(&self, tenant: &TenantName, bytes: u64) -> Result<(), Box<Diagnostic>> {
        let max = self.limit.max(&ShareHolder::Tenant(tenant.clone()));
        if bytes > max && bytes > self.get(tenant) { Err(self.excess(tenant, bytes)) } else { Ok(()) }
    }

    fn excess(&self, tenant: &TenantName, bytes: u64) -> Box<Diagnostic> {
        let kind = self.limit.kind();
        let max = self.limit.max(&ShareHolder::Tenant(tenant.clone()));
        let what = match kind {
            ShareKind::CompiledBytes => "what the compiler makes of the objects",
            _ => "the objects together",
        };
        Box::new(Diagnostic {
            severity: Severity::Error,
            origin: None,
            object: None,
            field: String::new(),
            problem: format!("tenant {tenant}: {what} would have {bytes} bytes, and its share of {} is {max}", kind.key()),
            mend: format!("delete or shorten objects, or have the provider set spec.shares.{} of the Tenant", kind.key()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use canal_model::share::Share;

    fn bytes(capacity: u64, share: u64) -> TenantBytes {
        let config = TenantLimitConfig { kind: ShareKind::ConfigurationBytes, capacity, reserve: 0, give_way: GiveWay::Oldest };
        let limit = TenantLimit::new(config);
        limit.set_default_share(Share::Amount(share));
        TenantBytes::new(limit)
    }

    #[test]
    fn a_tenants_bytes_grow_to_its_share_and_always_shrink() {
        let limit = bytes(1000, 100);
        let [a, b]: [TenantName; 2] = ["alpha", "beta"].map(|n| n.parse().unwrap());
        limit.set(&a, 100).unwrap();
        let refused = limit.set(&a, 101).unwrap_err();
        assert!(refused.problem.contains("tenant alpha") && refused.problem.contains("configurationBytes is 100"), "{refused}");
        assert_eq!((limit.get(&a), limit.get(&b)), (100, 0), "nothing was taken");
        limit.set(&b, 100).unwrap();
        limit.limit.set_default_share(Share::Amount(10));
        limit.set(&a, 90).unwrap();
        assert!(limit.check(&a, 90).is_ok() && limit.check(&a, 91).is_err());
        limit.set(&a, 0).unwrap();
        assert!(limit.set(&a, 11).is_err());
        assert_eq!(limit.limit.usage().used, 100);
    }
}
