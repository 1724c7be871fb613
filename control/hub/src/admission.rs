//! Whether a connection may stay: on the account of its source until a token is known, then on its owner's. What closes it is
//! `connection`; who accepts it is `listener`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use canal_model::ids::TenantName;
use canal_model::program::{Kind, Resource};
use canal_runtime::{ShareHolder, ShareRefusal, TenantLimit, TenantPermit};
use ipnet::IpNet;
use tokio::sync::watch;

use crate::catalog::Catalog;

/// Sources are counted by ranges of so many bits: IPv4 and IPv6.
const RANGE_BITS: (u8, u8) = (24, 64);

/// One connection's right to be open.
pub(crate) struct Admission {
    is_authorized: AtomicBool,
    permit: Mutex<Option<TenantPermit>>,
    /// Of connections whose owner is known.
    connections: TenantLimit,
}

impl Admission {
    /// A connection just accepted. `permit`: of the unauthenticated ones.
    pub(crate) fn new(permit: TenantPermit, connections: TenantLimit) -> Arc<Self> {
        Arc::new(Self { is_authorized: AtomicBool::new(false), permit: Mutex::new(Some(permit)), connections })
    }

    /// Ends when the connection has to give way to another, if it is unauthenticated still.
    pub(crate) fn revoked(&self) -> impl Future<Output = ()> + Send + use<> {
        let revoked = self.permit.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(TenantPermit::revoked);
        async move {
            match revoked {
                Some(revoked) => revoked.await,
                None => std::future::pending().await,
            }
        }
    }

    /// True once a request on it had a valid token.
    pub(crate) fn is_authorized(&self) -> bool {
        self.is_authorized.load(Ordering::Acquire)
    }

    /// A request with a valid token came: from now on the connection is its owner's.
    ///
    /// # Errors
    /// The owner has its share of connections, or all are taken. The connection stays what it was.
    pub(crate) fn authorize(&self, holder: &ShareHolder) -> Result<(), ShareRefusal> {
        if self.is_authorized() {
            return Ok(());
        }
        // Replaced whole, so a panic elsewhere does not spoil it.
        let mut permit = self.permit.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_authorized() {
            return Ok(());
        }
        *permit = Some(self.connections.take(holder, 1)?);
        self.is_authorized.store(true, Ordering::Release);
        Ok(())
    }
}

/// Whose an address is, as far as one catalog says.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    /// `None`: several tenants say that it is theirs.
    nodes: BTreeMap<IpAddr, Option<TenantName>>,
    /// Gateway replicas.
    provider: BTreeSet<IpAddr>,
    pods: PodRanges,
}

/// Ranges of pods, to be found by their longest and all shorter prefixes: as many looks as there are lengths, at most 33 or 129, however many
/// ranges there are.
#[derive(Debug, Default)]
struct PodRanges {
    /// `None`: several tenants have the same range.
    owners: HashMap<IpNet, Option<TenantName>>,
    /// The lengths of prefixes that occur, of IPv4 and of IPv6.
    lengths: [BTreeSet<u8>; 2],
}

impl PodRanges {
    fn insert(&mut self, range: IpNet, tenant: &TenantName) {
        let range = range.trunc();
        self.lengths[usize::from(range.addr().is_ipv6())].insert(range.prefix_len());
        let owner = self.owners.entry(range).or_insert_with(|| Some(tenant.clone()));
        if owner.as_ref() != Some(tenant) {
            *owner = None;
        }
    }

    /// The ranges that an address is looked for in.
    fn candidates(&self, address: IpAddr) -> impl Iterator<Item = IpNet> {
        let lengths = &self.lengths[usize::from(address.is_ipv6())];
        lengths.iter().filter_map(move |length| Some(IpNet::new(address, *length).ok()?.trunc()))
    }

    /// The one tenant that says an address is its pods', if there is just one.
    fn owner(&self, address: IpAddr) -> Option<&TenantName> {
        let mut found = self.candidates(address).filter_map(|range| self.owners.get(&range));
        let first = found.next()?.as_ref()?;
        found.all(|other| other.as_ref() == Some(first)).then_some(first)
    }
}

/// Keeps what addresses mean up to date with the catalog, on a thread of its own: neither who accepts nor who publishes waits for it.
pub(crate) async fn follow(mut catalogs: watch::Receiver<Arc<Catalog>>, sources: watch::Sender<Arc<Sources>>) {
    loop {
        let catalog = catalogs.borrow_and_update().clone();
        // It fails only when the controller ends.
        let Ok(of_catalog) = tokio::task::spawn_blocking(move || Sources::of(&catalog)).await else { return };
        if sources.send(Arc::new(of_catalog)).is_err() || catalogs.changed().await.is_err() {
            return;
        }
    }
}

impl Sources {
    pub(crate) fn of(catalog: &Catalog) -> Self {
        let mut sources = Self::default();
        let replicas = catalog.provider.iter().flat_map(|view| view.of(Kind::Replica));
        sources.provider.extend(replicas.filter_map(|entry| match &entry.resource {
            Resource::Replica(replica) => Some(IpAddr::from(replica.underlay)),
            _ => None,
        }));
        for (tenant, view) in &catalog.tenants {
            for entry in view.of(Kind::Node) {
                let Resource::Node(node) = &entry.resource else { continue };
                let owner = sources.nodes.entry(node.underlay.into()).or_insert_with(|| Some(tenant.clone()));
                if owner.as_ref() != Some(tenant) {
                    *owner = None;
                }
            }
            for entry in view.of(Kind::Tenant) {
                let Resource::Tenant(said) = &entry.resource else { continue };
                said.pod_cidrs.iter().for_each(|range| sources.pods.insert(*range, tenant));
            }
        }
        sources
    }

    /// On whose account a connection from `source` is until its token is known: of the provider whose replica, of the one tenant whose node or
    /// pods have the address, else of the addresses around it.
    pub(crate) fn holder(&self, source: SocketAddr) -> ShareHolder {
        let address = source.ip().to_canonical();
        if self.provider.contains(&address) {
            return ShareHolder::Provider;
        }
        if let Some(Some(tenant)) = self.nodes.get(&address) {
            return ShareHolder::Tenant(tenant.clone());
        }
        match self.pods.owner(address) {
            Some(tenant) if !self.nodes.contains_key(&address) => ShareHolder::Tenant(tenant.clone()),
            _ => ShareHolder::Network(range(address)),
        }
    }
}

fn range(address: IpAddr) -> IpNet {
    let bits = if address.is_ipv4() { RANGE_BITS.0 } else { RANGE_BITS.1 };
    IpNet::new(address, bits).map_or_else(|_| IpNet::from(address), |net| net.trunc())
}

#[cfg(test)]
mod tests {
    use super::*;
    use canal_model::share::ShareKind;
    use canal_runtime::{GiveWay, TenantLimitConfig};

    #[test]
    fn the_ranges_of_all_tenants_cost_one_look_for_each_length_of_prefix() {
        let mut pods = PodRanges::default();
        let mut all: Vec<(IpNet, TenantName)> = Vec::new();
        for n in 0..2_000u32 {
            let tenant: TenantName = format!("t{}", n % 500).parse().unwrap();
            let address = IpAddr::from(std::net::Ipv4Addr::from(0x0a00_0000 + (n % 1_900) * 0x1003));
            let range = IpNet::new(address, [12, 20, 24, 28][n as usize % 4]).unwrap();
            pods.insert(range, &tenant);
            all.push((range, tenant));
        }
        for n in 0..4_000u32 {
            let address = IpAddr::from(std::net::Ipv4Addr::from(0x0a00_0000 + n * 0x7ff));
            assert_eq!(pods.candidates(address).count(), 4);
            let mut walked = all.iter().filter(|(range, _)| range.contains(&address)).map(|(_, tenant)| tenant);
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
        for (range, tenant) in [("10.1.0.0/16", &a), ("10.2.0.0/16", &a), ("10.2.0.0/16", &b), ("10.3.0.0/16", &a), ("10.3.7.0/24", &b)] {
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
            assert_eq!(sources.holder(source.parse().unwrap()).to_string(), want, "{source}");
        }
    }

    #[test]
    fn an_authorized_connection_counts_for_its_owner_alone() {
        let limit = |capacity| {
            let kind = ShareKind::ControllerConnections;
            TenantLimit::new(TenantLimitConfig { kind, capacity, reserve: 0, give_way: GiveWay::Oldest })
        };
        let (unauthenticated, connections) = (limit(4), limit(1));
        let source = Sources::default().holder("192.0.2.1:5".parse().unwrap());
        let [one, two] = [(); 2].map(|()| Admission::new(unauthenticated.take_replacing(&source, 1).unwrap(), connections.clone()));
        let tenant = ShareHolder::Tenant("alpha".parse().unwrap());
        one.authorize(&tenant).unwrap();
        one.authorize(&tenant).unwrap();
        assert_eq!((unauthenticated.usage().used, connections.usage().used), (1, 1));
        assert!(two.authorize(&tenant).is_err() && !two.is_authorized());
        drop(one);
        two.authorize(&tenant).unwrap();
        assert_eq!((unauthenticated.usage().used, connections.usage().used), (0, 1));
    }
}
