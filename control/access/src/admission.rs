//! Decides whether a connection may stay open. A connection counts against its source until a valid
//! token is received, and then against the token's owner. `connection` closes it, and `listener`
//! accepts it. Start at [`ConnectionAdmission`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use canal_catalog::Catalog;
use canal_model::ids::TenantName;
use canal_model::program::{Resource, ResourceKind};
use canal_runtime::{ShareHolder, ShareRefusal, TenantLimit, TenantPermit};
use ipnet::IpNet;
use tokio::sync::watch;

/// Prefix lengths of the ranges by which unknown sources are counted, for IPv4 and IPv6.
/// A /64 is one IPv6 subnet (RFC 4291 §2.5.4), all of whose addresses one host can use. The /24 was
/// chosen: its addresses mostly have one owner.
const RANGE_BITS: (u8, u8) = (24, 64);

/// The permit of one open connection: first its source's, then its owner's.
pub struct ConnectionAdmission {
    is_authorized: AtomicBool,
    permit: Mutex<Option<TenantPermit>>,
    /// Limit on connections whose owner is known.
    connections: TenantLimit,
}

impl ConnectionAdmission {
    /// Creates the state of a connection that was just accepted. `permit` is of the limit on
    /// unauthenticated connections.
    pub fn new(permit: TenantPermit, connections: TenantLimit) -> Arc<Self> {
        Arc::new(Self {
            is_authorized: AtomicBool::new(false),
            permit: Mutex::new(Some(permit)),
            connections,
        })
    }

    /// Resolves when the connection must give way to another one while it is still unauthenticated.
    pub fn revoked(&self) -> impl Future<Output = ()> + Send + use<> {
        let revoked = self
            .permit
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(TenantPermit::revoked);
        async move {
            match revoked {
                Some(revoked) => revoked.await,
                None => std::future::pending().await,
            }
        }
    }

    /// True once a request on the connection had a valid token.
    pub fn is_authorized(&self) -> bool {
        self.is_authorized.load(Ordering::Acquire)
    }

    /// Records that a request with a valid token arrived: from now on the connection counts against
    /// `holder`.
    ///
    /// # Errors
    /// The holder has its whole share of connections, or all are taken. The connection stays
    /// unauthenticated.
    pub fn authorize(&self, holder: &ShareHolder) -> Result<(), ShareRefusal> {
        if self.is_authorized() {
            return Ok(());
        }
        // The permit is replaced as a whole, so a panic elsewhere cannot leave it inconsistent.
        let mut permit = self.permit.lock().unwrap_or_else(PoisonError::into_inner);
        // Another request on the connection may have authorized it meanwhile.
        if self.is_authorized() {
            return Ok(());
        }
        *permit = Some(self.connections.take(holder, 1)?);
        self.is_authorized.store(true, Ordering::Release);
        Ok(())
    }
}

/// Owners of source addresses according to one catalog.
#[derive(Debug, Default)]
pub struct Sources {
    /// Tenant of each node address; `None` if several tenants claim the address.
    nodes: BTreeMap<IpAddr, Option<TenantName>>,
    /// Underlay addresses of gateway replicas.
    provider: BTreeSet<IpAddr>,
    pods: PodRanges,
}

/// Pod ranges of all tenants. A lookup tries each prefix length that occurs, so at most 33 or 129
/// of them, however many ranges there are.
#[derive(Debug, Default)]
struct PodRanges {
    /// Tenant of each range; `None` if several tenants have the same range.
    owners: HashMap<IpNet, Option<TenantName>>,
    /// Prefix lengths that occur, for IPv4 and for IPv6.
    lengths: [BTreeSet<u8>; 2],
}

impl PodRanges {
    fn insert(&mut self, range: IpNet, tenant: &TenantName) {
        let range = range.trunc();
        self.lengths[usize::from(range.addr().is_ipv6())].insert(range.prefix_len());
        let owner = self
            .owners
            .entry(range)
            .or_insert_with(|| Some(tenant.clone()));
        if owner.as_ref() != Some(tenant) {
            *owner = None;
        }
    }

    /// Returns the ranges that could contain the address, one per prefix length.
    fn candidates(&self, address: IpAddr) -> impl Iterator<Item = IpNet> {
        let lengths = &self.lengths[usize::from(address.is_ipv6())];
        lengths
            .iter()
            .filter_map(move |length| Some(IpNet::new(address, *length).ok()?.trunc()))
    }

    /// Returns the tenant whose pods have the address, if exactly one tenant claims it.
    fn owner(&self, address: IpAddr) -> Option<&TenantName> {
        let mut found = self
            .candidates(address)
            .filter_map(|range| self.owners.get(&range));
        let first = found.next()?.as_ref()?;
        found
            .all(|other| other.as_ref() == Some(first))
            .then_some(first)
    }
}

/// Keeps [`Sources`] up to date with the catalog. The work runs on a thread of its own, so neither
/// the listener nor the catalog writer waits for it.
pub async fn follow(
    mut catalogs: watch::Receiver<Arc<Catalog>>,
    sources: watch::Sender<Arc<Sources>>,
) {
    loop {
        let catalog = catalogs.borrow_and_update().clone();
        // The task fails only when the controller stops.
        let Ok(of_catalog) = tokio::task::spawn_blocking(move || Sources::of(&catalog)).await
        else {
            return;
        };
        if sources.send(Arc::new(of_catalog)).is_err() || catalogs.changed().await.is_err() {
            return;
        }
    }
}

impl Sources {
    /// Derives the owners of addresses from a catalog.
    pub fn of(catalog: &Catalog) -> Self {
        let mut sources = Self::default();
        let replicas = catalog
            .provider
            .iter()
            .flat_map(|view| view.of(ResourceKind::Replica));
        sources
            .provider
            .extend(replicas.filter_map(|entry| match entry.resource.as_ref() {
                Resource::Replica(replica) => Some(IpAddr::from(replica.underlay)),
                _ => None,
            }));
        for (tenant, view) in &catalog.tenants {
            for entry in view.of(ResourceKind::Node) {
                let Resource::Node(node) = entry.resource.as_ref() else {
                    continue;
                };
                let owner = sources
                    .nodes
                    .entry(node.underlay.into())
                    .or_insert_with(|| Some(tenant.clone()));
                if owner.as_ref() != Some(tenant) {
                    *owner = None;
                }
            }
            for entry in view.of(ResourceKind::Tenant) {
                let Resource::Tenant(declared) = entry.resource.as_ref() else {
                    continue;
                };
                declared
                    .pod_cidrs
                    .iter()
                    .for_each(|range| sources.pods.insert(*range, tenant));
            }
        }
        sources
    }

    /// Returns the holder that a connection from `source` counts against until its token is known.
    /// It is the provider for a replica's address, or the one tenant whose node or pods have the
    /// address. For any other address it is the range around it.
    pub fn holder(&self, source: SocketAddr) -> ShareHolder {
        let address = source.ip().to_canonical();
        if self.provider.contains(&address) {
            return ShareHolder::Provider;
        }
        if let Some(Some(tenant)) = self.nodes.get(&address) {
            return ShareHolder::Tenant(tenant.clone());
        }
        // A node address that several tenants claim is not attributed to a pod range either.
        match self.pods.owner(address) {
            Some(tenant) if !self.nodes.contains_key(&address) => {
                ShareHolder::Tenant(tenant.clone())
            }
            _ => ShareHolder::Network(range(address)),
        }
    }
}

fn range(address: IpAddr) -> IpNet {
    let bits = if address.is_ipv4() {
        RANGE_BITS.0
    } else {
        RANGE_BITS.1
    };
    IpNet::new(address, bits).map_or_else(|_| IpNet::from(address), |net| net.trunc())
}

#[cfg(test)]
mod tests {
    use super::*;
    use canal_model::share::ShareKind;
    use canal_runtime::{RevocationOrder, TenantLimitConfig};

    #[test]
    fn a_range_lookup_costs_one_probe_per_prefix_length() {
        let mut pods = PodRanges::default();
        let mut all: Vec<(IpNet, TenantName)> = Vec::new();
        for n in 0..2_000u32 {
            let tenant: TenantName = format!("t{}", n % 500).parse().unwrap();
            let address =
                IpAddr::from(std::net::Ipv4Addr::from(0x0a00_0000 + (n % 1_900) * 0x1003));
            let range = IpNet::new(address, [12, 20, 24, 28][n as usize % 4]).unwrap();
            pods.insert(range, &tenant);
            all.push((range, tenant));
        }
        for n in 0..4_000u32 {
            let address = IpAddr::from(std::net::Ipv4Addr::from(0x0a00_0000 + n * 0x7ff));
            assert_eq!(pods.candidates(address).count(), 4);
            let mut walked = all
                .iter()
                .filter(|(range, _)| range.contains(&address))
                .map(|(_, tenant)| tenant);
            let first = walked.next();
            let one = first.filter(|first| walked.all(|other| other == *first));
            assert_eq!(pods.owner(address), one, "{address}");
        }
        assert_eq!(pods.candidates("2001:db8::1".parse().unwrap()).count(), 0);
    }

    #[test]
    fn a_source_is_its_one_tenants_or_its_ranges() {
        let [a, b]: [TenantName; 2] = ["alpha", "beta"].map(|n| n.parse().unwrap());
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let mut pods = PodRanges::default();
        for (range, tenant) in [
            ("10.1.0.0/16", &a),
            ("10.2.0.0/16", &a),
            ("10.2.0.0/16", &b),
            ("10.3.0.0/16", &a),
            ("10.3.7.0/24", &b),
        ] {
            pods.insert(range.parse().unwrap(), tenant);
        }
        let sources = Sources {
            nodes: [(ip("250.0.0.1"), Some(a.clone())), (ip("250.0.0.2"), None)].into(),
            provider: [ip("250.0.0.9")].into(),
            pods,
        };
        for (source, want) in [
            ("250.0.0.1:1", "alpha"),
            ("250.0.0.2:1", "250.0.0.0/24"),
            ("250.0.0.9:1", "provider"),
            ("250.0.0.3:1", "250.0.0.0/24"),
            ("10.1.2.3:1", "alpha"),
            ("10.2.2.3:1", "10.2.2.0/24"),
            ("10.3.2.3:1", "alpha"),
            ("10.3.7.3:1", "10.3.7.0/24"),
            ("[::ffff:10.1.2.3]:1", "alpha"),
            ("[2001:db8:1:2:3:4:5:6]:1", "2001:db8:1:2::/64"),
        ] {
            assert_eq!(
                sources.holder(source.parse().unwrap()).to_string(),
                want,
                "{source}"
            );
        }
    }

    #[test]
    fn an_authorized_connection_counts_for_its_owner_alone() {
        let limit = |capacity| {
            let kind = ShareKind::ControllerConnections;
            TenantLimit::new(TenantLimitConfig {
                kind,
                capacity,
                reserve: 0,
                revocation_order: RevocationOrder::OldestFirst,
            })
        };
        let (unauthenticated, connections) = (limit(4), limit(1));
        let source = Sources::default().holder("192.0.2.1:5".parse().unwrap());
        let [one, two] = [(); 2].map(|()| {
            ConnectionAdmission::new(
                unauthenticated.take_replacing(&source, 1).unwrap(),
                connections.clone(),
            )
        });
        let tenant = ShareHolder::Tenant("alpha".parse().unwrap());
        one.authorize(&tenant).unwrap();
        one.authorize(&tenant).unwrap();
        assert_eq!(
            (unauthenticated.usage().used, connections.usage().used),
            (1, 1)
        );
        assert!(two.authorize(&tenant).is_err() && !two.is_authorized());
        drop(one);
        two.authorize(&tenant).unwrap();
        assert_eq!(
            (unauthenticated.usage().used, connections.usage().used),
            (0, 1)
        );
    }
}
