//! Limits of the controller that tenants share: one of each kind, their metrics, and the bytes of
//! each tenant's configuration. The code that takes from a limit decides what happens when it is
//! full. Start at [`TenantLimits`].

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use canal_catalog::{Catalog, TenantCatalog};
use canal_controller_metrics::{self as metrics, GaugeValues};
use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::TenantName;
use canal_model::principal::Principal;
use canal_model::program::{Resource, ResourceKind};
use canal_model::share::{ShareKind, Shares};
use canal_runtime::share::TenantLimitUsage;
use canal_runtime::{
    RevocationOrder, ShareHolder, ShareRefusal, TenantLimit, TenantLimitConfig, TenantPermit,
};

/// Maximum number of changes of all tenants that wait for the writer or are being prepared.
/// A tenant's default share is 23 of them: 10 % of what the provider's part leaves. Nobody
/// measured this value; memory is bounded by [`QUEUED_CHANGE_BYTES_MAX`].
pub const QUEUED_CHANGES_MAX: u64 = 256;
/// Maximum bytes of the changes of all tenants that wait or are being prepared.
/// These are 16 requests of the largest size (`REQUEST_BYTES_MAX`); the default share of a tenant
/// holds three.
pub const QUEUED_CHANGE_BYTES_MAX: u64 = 1 << 30;
/// Maximum bytes of all tenants' objects.
/// After the provider's part, 460 tenants can use their whole default share of 8 MiB.
pub const CONFIGURATION_BYTES_MAX: u64 = 4 << 30;
/// Maximum bytes of the resources that the compiler makes of all tenants' objects.
/// After the provider's part, 307 tenants can use their whole default share of 24 MiB.
pub const COMPILED_BYTES_MAX: u64 = 8 << 30;
/// Maximum number of the resources that the compiler makes of all tenants' objects.
/// After the provider's part, 150 tenants can use their whole default share of 30,000.
pub const COMPILED_RESOURCES_MAX: u64 = 5_000_000;
/// Maximum bytes of the route tables of all tenants' services in a gateway that serves all of them.
/// After the provider's part, 57 tenants can use their whole default share of 128 MiB.
pub const ROUTE_TABLE_BYTES_MAX: u64 = 8 << 30;
/// Maximum bytes that the streams of all data planes are charged for names that the controller does
/// not have itself.
/// These are 16 streams of the largest charge (`STREAM_NAME_BYTES_MAX`); the default share of a
/// tenant holds three. Beyond it, the stream that adds names ends.
const SUBSCRIPTION_BYTES_MAX: u64 = 1 << 30;
/// Divisor for the part of a limit that only the provider may take: a tenth.
/// Gateways and operators of the provider are served from it when tenants use up the rest. The
/// tenth was chosen, and nobody measured what they need.
const RESERVE_DIVISOR: u64 = 10;

/// Amounts of all limits of the controller that tenants share, as the provider sets them.
#[derive(Debug, Clone)]
pub struct SharedCapacities {
    /// Changes that wait for the writer or are being prepared.
    pub queued_changes: u64,
    /// Bytes of the changes that wait or are being prepared.
    pub queued_change_bytes: u64,
    /// Bytes of all tenants' objects.
    pub configuration_bytes: u64,
    /// Bytes of the resources that the compiler makes of the objects.
    pub compiled_bytes: u64,
    /// Number of resources that the compiler makes of the objects.
    pub compiled_resources: u64,
    /// Bytes of the route tables that gateways build of the resources.
    pub route_table_bytes: u64,
    /// Connections on which a request had a valid token.
    pub connections: u64,
    /// Connections that have not sent a valid token.
    pub unauthenticated: u64,
    /// Certificates in the issuance log that have not expired.
    pub certificates: u64,
    /// Streams of subscribers that are open.
    pub streams: u64,
    /// Observations of operators that are open at once.
    pub observations: u64,
    /// Shares of tenants for which the provider configured none.
    pub shares: Shares,
}

/// All limits of the controller that tenants share.
pub struct TenantLimits {
    pub queued_changes: TenantLimit,
    pub queued_change_bytes: TenantLimit,
    pub configuration: TenantAmounts,
    pub compiled: TenantAmounts,
    pub compiled_resources: TenantAmounts,
    pub route_tables: TenantAmounts,
    pub connections: TenantLimit,
    pub unauthenticated: TenantLimit,
    pub certificates: TenantLimit,
    pub streams: TenantLimit,
    pub subscription_bytes: TenantLimit,
    /// Observations of operators that are open at once.
    pub observations: TenantLimit,
}

impl TenantLimits {
    /// Creates the limits with these capacities. Nothing has been taken of them.
    pub fn new(capacities: &SharedCapacities) -> Self {
        let limit = |kind, capacity: u64| {
            let reserve = capacity / RESERVE_DIVISOR;
            // Connections that should have authenticated long ago end first. Nobody measured which
            // order suits streams.
            TenantLimit::new(TenantLimitConfig {
                kind,
                capacity,
                reserve,
                revocation_order: RevocationOrder::OldestFirst,
            })
        };
        let this = Self {
            queued_changes: limit(ShareKind::QueuedChanges, capacities.queued_changes),
            queued_change_bytes: limit(
                ShareKind::QueuedChangeBytes,
                capacities.queued_change_bytes,
            ),
            configuration: TenantAmounts::new(limit(
                ShareKind::ConfigurationBytes,
                capacities.configuration_bytes,
            )),
            compiled: TenantAmounts::new(limit(
                ShareKind::CompiledBytes,
                capacities.compiled_bytes,
            )),
            compiled_resources: TenantAmounts::new(limit(
                ShareKind::CompiledResources,
                capacities.compiled_resources,
            )),
            route_tables: TenantAmounts::new(limit(
                ShareKind::RouteTableBytes,
                capacities.route_table_bytes,
            )),
            connections: limit(ShareKind::ControllerConnections, capacities.connections),
            unauthenticated: limit(
                ShareKind::ControllerUnauthenticated,
                capacities.unauthenticated,
            ),
            certificates: limit(ShareKind::Certificates, capacities.certificates),
            streams: limit(ShareKind::ControllerStreams, capacities.streams),
            subscription_bytes: limit(ShareKind::SubscriptionBytes, SUBSCRIPTION_BYTES_MAX),
            observations: limit(ShareKind::Observations, capacities.observations),
        };
        for limit in this.all() {
            limit.set_default_share(capacities.shares.get(limit.kind()));
        }
        this
    }

    fn all(&self) -> [&TenantLimit; 12] {
        [
            &self.queued_changes,
            &self.queued_change_bytes,
            &self.configuration.limit,
            &self.compiled.limit,
            &self.compiled_resources.limit,
            &self.route_tables.limit,
            &self.connections,
            &self.unauthenticated,
            &self.certificates,
            &self.streams,
            &self.subscription_bytes,
            &self.observations,
        ]
    }

    /// Sets the shares that the provider configured for each tenant.
    pub fn set_shares<'a>(
        &self,
        tenants: impl Iterator<Item = (&'a TenantName, &'a Shares)> + Clone,
    ) {
        self.all()
            .into_iter()
            .for_each(|limit| limit.set_shares(tenants.clone()));
    }

    /// Sets the shares from the Tenant objects of a catalog.
    pub fn follow(&self, catalog: &Catalog) {
        self.set_shares(
            catalog
                .tenants
                .iter()
                .filter_map(|(name, view)| Some((name, shares_of(view)?))),
        );
    }

    /// Returns how much each holder has taken of each limit.
    pub fn usage(&self) -> Vec<TenantLimitUsage> {
        self.all().into_iter().map(TenantLimit::usage).collect()
    }

    /// Sets the metrics of use, refusals and revocations of each limit.
    #[allow(
        clippy::cast_precision_loss,
        reason = "shares are at most 2^53, counts far below"
    )]
    pub fn gauges(&self, g: &mut GaugeValues) {
        for usage in self.usage() {
            let limit = ("limit", usage.kind.label());
            let (mut refused, mut revoked) = (usage.refused_before, usage.revoked_before);
            for holder in &usage.holders {
                // The number of address ranges is unbounded, so they share one label value.
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

/// Returns the shares that the provider wrote into the tenant's Tenant object.
pub fn shares_of(view: &TenantCatalog) -> Option<&Shares> {
    view.of(ResourceKind::Tenant)
        .find_map(|e| match e.resource.as_ref() {
            Resource::Tenant(tenant) => Some(&tenant.shares),
            _ => None,
        })
}

/// Returns the holder whose share a principal uses.
pub fn holder_of(principal: &Principal) -> ShareHolder {
    match principal {
        Principal::Node { tenant, .. }
        | Principal::KeyServer {
            tenant: Some(tenant),
            ..
        }
        | Principal::Operator {
            tenant: Some(tenant),
            ..
        } => ShareHolder::Tenant(tenant.clone()),
        Principal::Gateway { .. }
        | Principal::Edge { .. }
        | Principal::KeyServer { .. }
        | Principal::Operator { .. } => ShareHolder::Provider,
    }
}

/// Bytes that one stream is charged for names. They count against its principal's holder until the
/// stream ends.
#[derive(Default)]
pub struct StreamNames {
    bytes: u64,
    permit: Option<TenantPermit>,
}

impl StreamNames {
    /// Changes the amount of `holder` to `bytes` in total: takes the difference, or returns the
    /// excess.
    ///
    /// # Errors
    /// The holder has its whole share, or the limit is full.
    pub fn set(
        &mut self,
        bytes: u64,
        limit: &TenantLimit,
        holder: &ShareHolder,
    ) -> Result<(), ShareRefusal> {
        match &mut self.permit {
            _ if bytes == self.bytes => return Ok(()),
            Some(permit) if bytes < self.bytes => permit.shrink(self.bytes - bytes),
            Some(permit) => permit.grow(bytes - self.bytes)?,
            none => *none = Some(limit.take(holder, bytes)?),
        }
        self.bytes = bytes;
        Ok(())
    }
}

/// A limit on what tenants keep, such as bytes or resources, and the amount that each tenant has
/// taken of it.
pub struct TenantAmounts {
    limit: TenantLimit,
    amounts: Mutex<BTreeMap<TenantName, (u64, TenantPermit)>>,
}

impl TenantAmounts {
    fn new(limit: TenantLimit) -> Self {
        Self {
            limit,
            amounts: Mutex::default(),
        }
    }

    /// Returns the amount that a tenant has taken.
    pub fn get(&self, tenant: &TenantName) -> u64 {
        self.amounts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(tenant)
            .map_or(0, |(amount, _)| *amount)
    }

    /// Sets the amount that a tenant has taken. A smaller amount is always accepted.
    ///
    /// # Errors
    /// The tenant's share, or the whole limit, does not allow the amount; nothing changes.
    pub fn set(&self, tenant: &TenantName, amount: u64) -> Result<(), Box<Diagnostic>> {
        // The map is consistent after each statement, so a panic elsewhere does not spoil it.
        let mut held = self.amounts.lock().unwrap_or_else(PoisonError::into_inner);
        let done = match held.get_mut(tenant) {
            Some((now, permit)) if amount > *now => {
                permit.grow(amount - *now).map(|()| *now = amount)
            }
            Some((now, permit)) => {
                permit.shrink(*now - amount);
                *now = amount;
                Ok(())
            }
            None => self
                .limit
                .take(&ShareHolder::Tenant(tenant.clone()), amount)
                .map(|permit| {
                    held.insert(tenant.clone(), (amount, permit));
                }),
        };
        if amount == 0 {
            held.remove(tenant);
        }
        done.map_err(|_| self.excess(tenant, amount))
    }

    /// Checks an amount against the tenant's share, as [`TenantAmounts::set`] does, and takes
    /// nothing. A refusal is counted.
    ///
    /// # Errors
    /// The amount exceeds the share and what the tenant has already taken.
    pub fn check(&self, tenant: &TenantName, amount: u64) -> Result<(), Box<Diagnostic>> {
        let (holder, held) = (ShareHolder::Tenant(tenant.clone()), self.get(tenant));
        if amount <= self.limit.max(&holder) || amount <= held {
            return Ok(());
        }
        Err(self.refuse(tenant, amount))
    }

    /// Counts a refusal of an amount that exceeds the share, and returns its diagnostic. Nothing is
    /// taken.
    pub fn refuse(&self, tenant: &TenantName, amount: u64) -> Box<Diagnostic> {
        // The limit refuses the difference, because it exceeds the share, and counts that.
        drop(self.limit.take(
            &ShareHolder::Tenant(tenant.clone()),
            amount.saturating_sub(self.get(tenant)),
        ));
        self.excess(tenant, amount)
    }

    /// Returns the largest amount that [`TenantAmounts::check`] accepts for the tenant now.
    pub fn allowance(&self, tenant: &TenantName) -> u64 {
        self.limit
            .max(&ShareHolder::Tenant(tenant.clone()))
            .max(self.get(tenant))
    }

    /// Returns the diagnostic for an amount that exceeds the tenant's share.
    fn excess(&self, tenant: &TenantName, amount: u64) -> Box<Diagnostic> {
        let kind = self.limit.kind();
        let max = self.limit.max(&ShareHolder::Tenant(tenant.clone()));
        let what = match kind {
            // Compiling stops at the share, so the whole amount is not known.
            ShareKind::CompiledBytes | ShareKind::CompiledResources => {
                "the resources compiled from the objects would have at least"
            }
            ShareKind::RouteTableBytes => {
                "the route tables that each gateway builds from the objects would take at least"
            }
            _ => "the objects together would have",
        };
        let shorten = match kind {
            ShareKind::RouteTableBytes => {
                "delete or shorten rules, above all those with regular expressions and many hosts"
            }
            _ => "delete or shorten objects",
        };
        Box::new(Diagnostic {
            severity: Severity::Error,
            code: Code::ShareExceeded,
            origin: None,
            object: None,
            field: String::new(),
            problem: format!(
                "tenant {tenant}: {what} {amount} {}, and its share of {} is {max}",
                kind.unit(),
                kind.key()
            ),
            fix: format!(
                "{shorten}, or have the provider set spec.shares.{} of the Tenant",
                kind.key()
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use canal_model::share::Share;

    fn amounts(capacity: u64, share: u64) -> TenantAmounts {
        let config = TenantLimitConfig {
            kind: ShareKind::ConfigurationBytes,
            capacity,
            reserve: 0,
            revocation_order: RevocationOrder::OldestFirst,
        };
        let limit = TenantLimit::new(config);
        limit.set_default_share(Share::Amount(share));
        TenantAmounts::new(limit)
    }

    #[test]
    fn names_of_ten_tenants_leave_bytes_to_an_eleventh() {
        let (kind, capacity, reserve) = (
            ShareKind::SubscriptionBytes,
            1 << 20,
            (1 << 20) / RESERVE_DIVISOR,
        );
        let limit = TenantLimit::new(TenantLimitConfig {
            kind,
            capacity,
            reserve,
            revocation_order: RevocationOrder::OldestFirst,
        });
        let holder = |n: usize| ShareHolder::Tenant(format!("t{n}").parse().unwrap());
        let mut streams: Vec<_> = (0..11).map(|_| StreamNames::default()).collect();
        for (n, stream) in streams[..10].iter_mut().enumerate() {
            let bytes = (1..)
                .map(|names| names * 300)
                .take_while(|bytes| stream.set(*bytes, &limit, &holder(n)).is_ok())
                .last();
            assert!(bytes.is_some(), "tenant {n}");
        }
        streams[10].set(3_000, &limit, &holder(10)).unwrap();
        assert_eq!(
            streams[0].set(1 << 19, &limit, &holder(0)).unwrap_err(),
            ShareRefusal::Share
        );
    }

    #[test]
    fn a_tenants_amount_grows_to_its_share_and_always_shrinks() {
        let limit = amounts(1000, 100);
        let [a, b]: [TenantName; 2] = ["alpha", "beta"].map(|n| n.parse().unwrap());
        limit.set(&a, 100).unwrap();
        let refused = limit.set(&a, 101).unwrap_err();
        assert!(
            refused.problem.contains("tenant alpha")
                && refused.problem.contains("configurationBytes is 100"),
            "{refused}"
        );
        assert_eq!(
            (limit.get(&a), limit.get(&b)),
            (100, 0),
            "no permit was taken"
        );
        limit.set(&b, 100).unwrap();
        limit.limit.set_default_share(Share::Amount(10));
        limit.set(&a, 90).unwrap();
        let refusals = || {
            limit
                .limit
                .usage()
                .holders
                .iter()
                .map(|holder| holder.refused)
                .sum::<u64>()
        };
        let before = refusals();
        assert!(limit.check(&a, 90).is_ok() && limit.check(&a, 91).is_err());
        assert_eq!(
            (refusals(), limit.get(&a)),
            (before + 1, 90),
            "the refusal is counted, and no permit was taken"
        );
        limit.set(&a, 0).unwrap();
        assert!(limit.set(&a, 11).is_err());
        assert_eq!(limit.limit.usage().used, 100);
    }
}
