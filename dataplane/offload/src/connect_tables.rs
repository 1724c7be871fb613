//! Tables by which `bpf/capture.bpf.c` refuses at `connect()` what the proxy would refuse. This
//! module writes them, tenant by tenant. It does not decide about destinations. Start with
//! [`ConnectTables::update_tenant`].
//!
//! A destination that a tenant may reach before and after an update is never refused in between. A
//! tenant without an entry is left to the proxy.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::Path;

pub use canal_abi::capture::{CONNECT_REFUSALS, ConnectRefusals, Destination, Verdict};
use canal_abi::capture::{
    CapturedPod, CapturedTenant, DESTINATIONS_MAX, DestinationKey, RANGES_MAX, RangeKey,
};
use ipnet::IpNet;
use libbpf_rs::Object;

use crate::OffloadError;
use crate::entries::Entries;
use crate::proxy_route;
use crate::reconcile::{MapWrites, ReconcilerPass};
use crate::sys::netns_cookie;
use crate::tc_hook::within;

/// Single addresses of one tenant. The proxy decides for a tenant with more. A quarter, so that one
/// tenant leaves room for others: 65,536.
pub const TENANT_DESTINATIONS_MAX: usize = DESTINATIONS_MAX as usize / 4;
/// Address ranges of one tenant. The proxy decides for a tenant with more. A 64th: 256. A tenant
/// has up to 16 gateway ranges; the rest is for ranges of pods.
pub const TENANT_RANGES_MAX: usize = RANGES_MAX as usize / 64;

/// Verdicts for all destinations of one tenant's pods.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TenantDestinations {
    /// Verdict that refuses everything but the pod itself.
    pub all: Option<Verdict>,
    /// Verdict that refuses a destination that is neither in `addresses` nor in `ranges`.
    pub outside: Option<Verdict>,
    /// Single addresses. They take precedence over ranges.
    pub addresses: BTreeMap<IpAddr, Destination>,
    /// Address ranges, of which the longest that contains an address decides. `None` marks a range
    /// of pods, of which only reserved ports are refused.
    pub ranges: BTreeMap<IpNet, Option<Verdict>>,
}

impl TenantDestinations {
    /// Returns true if the tenant fits into its share of the tables.
    pub fn fits(&self) -> bool {
        self.addresses.len() <= TENANT_DESTINATIONS_MAX && self.ranges.len() <= TENANT_RANGES_MAX
    }

    fn entry(&self) -> CapturedTenant {
        let number = |v: Option<Verdict>| v.map_or(0, |v| v as u32);
        CapturedTenant {
            all: number(self.all),
            outside: number(self.outside),
        }
    }
}

/// Maps of the connect hook. They live as long as the programs that use them and are not pinned: a
/// new process fills its own.
#[derive(Debug)]
pub struct ConnectTables {
    pods: Entries<u64, CapturedPod>,
    tenants: Entries<u32, CapturedTenant>,
    destinations: Entries<DestinationKey, Destination>,
    ranges: Entries<RangeKey, u32>,
    refusals: Entries<u64, ConnectRefusals>,
}

impl ConnectTables {
    pub(crate) fn of(object: &Object) -> Result<Self, OffloadError> {
        Ok(Self {
            pods: Entries::of(object, "canal_captured_pods")?,
            tenants: Entries::of(object, "canal_captured_tenants")?,
            destinations: Entries::of(object, "canal_destinations")?,
            ranges: Entries::of(object, "canal_ranges")?,
            refusals: Entries::of(object, "canal_connect_refusals")?,
        })
    }

    /// Writes the entry of the pod that has the namespace at `netns` and these addresses, and makes
    /// the proxy's IPv6 addresses local there. Returns the namespace's cookie. Open connections
    /// keep the addresses that they already show.
    ///
    /// # Errors
    /// Fails if the namespace cannot be entered or a map cannot be written.
    pub fn put_pod(&self, netns: &Path, ips: &[IpAddr], tenant: u32) -> Result<u64, OffloadError> {
        let failed = |source| OffloadError::Netns {
            netns: netns.to_path_buf(),
            source,
        };
        let cookie = within(Some(netns), || {
            netns_cookie(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?)
        })?
        .map_err(failed)?;
        let spreads_v6 = proxy_route::add(netns).unwrap_or_else(|error| {
            tracing::warn!(%error, "capture: cannot make the proxy's IPv6 addresses local in the pod; each of its source ports reaches one IPv6 destination at a time");
            false
        });
        if self.refusals.get(&cookie)?.is_none() {
            self.refusals.put(&cookie, &ConnectRefusals::default())?;
        }
        self.pods
            .put(&cookie, &CapturedPod::new(ips, tenant, spreads_v6))?;
        Ok(cookie)
    }

    /// Removes the pod's entry and its counts.
    ///
    /// # Errors
    /// Fails if a map cannot be written.
    pub fn remove_pod(&self, netns_cookie: u64) -> Result<(), OffloadError> {
        self.pods.remove(&netns_cookie)?;
        self.refusals.remove(&netns_cookie)
    }

    /// Returns the refusals of the pod in the namespace with this cookie, since its entry was
    /// created.
    ///
    /// # Errors
    /// Fails if the map cannot be read.
    pub fn refusals(&self, netns_cookie: u64) -> Result<ConnectRefusals, OffloadError> {
        Ok(self.refusals.get(&netns_cookie)?.unwrap_or_default())
    }

    /// Changes the tenant's tables from `before` to `after` by writing the difference.
    ///
    /// # Errors
    /// Fails if a map cannot be written, or is full. The tenant then has no entry and nothing is
    /// refused for it; `before` must be empty in the next call.
    pub fn update_tenant(
        &self,
        tenant: u32,
        before: &TenantDestinations,
        after: &TenantDestinations,
    ) -> Result<MapWrites, OffloadError> {
        self.write_difference(tenant, before, after).inspect_err(|_| {
            for side in [before, after] {
                if let Err(error) = self.remove_tenant(tenant, side) {
                    tracing::warn!(%error, "capture: cannot withdraw a tenant's destinations; connect() still refuses by the old ones");
                }
            }
        })
    }

    /// Removes everything that the tables contain about the tenant, its entry first.
    ///
    /// # Errors
    /// Fails if a map cannot be written.
    pub fn remove_tenant(
        &self,
        tenant: u32,
        current: &TenantDestinations,
    ) -> Result<(), OffloadError> {
        self.tenants.remove(&tenant)?;
        current
            .addresses
            .keys()
            .try_for_each(|ip| self.destinations.remove(&DestinationKey::new(tenant, *ip)))?;
        current
            .ranges
            .keys()
            .try_for_each(|range| self.ranges.remove(&range_key(tenant, *range)))
    }

    /// Writes the difference. The order matters: wider permissions come first and wider refusals
    /// last.
    fn write_difference(
        &self,
        tenant: u32,
        before: &TenantDestinations,
        after: &TenantDestinations,
    ) -> Result<MapWrites, OffloadError> {
        let entry = after.entry();
        // An entry that allows the outside is a wider permission. A tenant without an entry is
        // refused nothing, so its first entry waits until its tables are complete.
        if after.outside.is_none()
            && self
                .tenants
                .get(&tenant)?
                .is_some_and(|current| current != entry)
        {
            self.tenants.put(&tenant, &entry)?;
        }
        let destinations = self.destinations.name();
        let ranges = self.ranges.name();
        let destination = |ip: &IpAddr| DestinationKey::new(tenant, *ip);
        // In the map, 0 stands for a range that refuses nothing.
        let put_range = |range: &IpNet, v: &Option<Verdict>| {
            self.ranges
                .put(&range_key(tenant, *range), &v.map_or(0, |v| v as u32))
        };
        let mut actual = before.clone();
        let mut pass = ReconcilerPass::stopping_at_failure();
        // An address is replaced as a whole, so no port of it is refused between two sets of ports.
        pass.put_missing(
            destinations,
            &after.addresses,
            &mut actual.addresses,
            |ip, d| self.destinations.put(&destination(ip), d),
        );
        // Ranges that allow come before ranges that refuse.
        let allowing = after
            .ranges
            .iter()
            .filter(|(_, verdict)| verdict.is_none())
            .map(|(range, verdict)| (*range, *verdict))
            .collect();
        pass.put_missing(ranges, &allowing, &mut actual.ranges, put_range);
        pass.put_missing(ranges, &after.ranges, &mut actual.ranges, put_range);
        pass.remove_stale(
            destinations,
            &after.addresses,
            &mut actual.addresses,
            |ip| self.destinations.remove(&destination(ip)),
        );
        pass.remove_stale(ranges, &after.ranges, &mut actual.ranges, |range| {
            self.ranges.remove(&range_key(tenant, *range))
        });
        let writes = pass.finish()?;
        // A wider refusal of the outside comes after the addresses that remain allowed.
        if self.tenants.get(&tenant)? != Some(entry) {
            self.tenants.put(&tenant, &entry)?;
        }
        Ok(writes)
    }
}

fn range_key(tenant: u32, range: IpNet) -> RangeKey {
    RangeKey::new(tenant, range.network(), range.prefix_len())
}
