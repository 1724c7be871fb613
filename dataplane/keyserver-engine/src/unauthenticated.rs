//! Connections whose requester has not authenticated yet: how many are permitted by address and by
//! network, and which gives way.
//!
//! `engine` reads them. A new connection is never refused while an older one of its own address or
//! network can be closed.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use canal_model::share::{Share, ShareKind};
use canal_runtime::limits::show_shares;
use canal_runtime::metrics::Registry;
use canal_runtime::{
    RevocationOrder, ShareHolder, ShareRefusal, TenantLimit, TenantLimitConfig, TenantPermit,
};
use ipnet::IpNet;

use crate::limits::{
    PROVED_ADDRESSES_MAX, RETURNING_MAX, UNAUTHENTICATED_PER_IP_MAX, UNPROVED_MAX,
};

/// Prefix lengths (IPv4, IPv6) of networks whose addresses count together: the nodes of one tenant,
/// or of one rack.
const NETWORK_PREFIX: (u8, u8) = (24, 64);

/// Addresses at which a requester authenticated once, the latest last.
#[derive(Debug, Default)]
struct ProvedAddresses {
    positions: HashMap<IpAddr, u64>,
    order: VecDeque<(IpAddr, u64)>,
    last: u64,
}

impl ProvedAddresses {
    fn insert(&mut self, address: IpAddr) {
        self.last += 1;
        self.positions.insert(address, self.last);
        self.order.push_back((address, self.last));
        // Entries that are not the latest of their address are removed on the same occasion.
        while self.positions.len() > PROVED_ADDRESSES_MAX
            || self.order.len() > 2 * PROVED_ADDRESSES_MAX
        {
            let Some((oldest, at)) = self.order.pop_front() else {
                return;
            };
            if self.positions.get(&oldest) == Some(&at) {
                self.positions.remove(&oldest);
            }
        }
    }
}

/// All unauthenticated connections, with their limits.
#[derive(Debug)]
pub(crate) struct Unauthenticated {
    addresses: TenantLimit,
    unproved: TenantLimit,
    returning: TenantLimit,
    proved: Mutex<ProvedAddresses>,
}

/// Counts a connection that has not authenticated until it is dropped.
#[derive(Debug)]
pub(crate) struct UnauthenticatedPermit {
    address: TenantPermit,
    network: TenantPermit,
}

impl UnauthenticatedPermit {
    /// Resolves when the connection has to give way to a newer one.
    pub(crate) async fn revoked(&self) {
        tokio::select! {
            () = self.address.revoked() => {}
            () = self.network.revoked() => {}
        }
    }
}

fn network(address: IpAddr, (v4, v6): (u8, u8)) -> ShareHolder {
    let prefix = if address.is_ipv4() { v4 } else { v6 };
    // The prefixes are constants that fit both families.
    ShareHolder::Network(
        IpNet::new(address, prefix).map_or(IpNet::from(address), |net| net.trunc()),
    )
}

impl Unauthenticated {
    /// Exports the usage of both pools in `registry`.
    pub(crate) fn new(registry: &Registry) -> Self {
        let limit = |capacity| {
            let kind = ShareKind::KeyServerUnauthenticated;
            TenantLimit::new(TenantLimitConfig {
                kind,
                capacity,
                reserve: 0,
                revocation_order: RevocationOrder::OldestFirst,
            })
        };
        // There are at most as many addresses as connections in both pools.
        let addresses = limit(UNPROVED_MAX + RETURNING_MAX + 2);
        addresses.set_default_share(Share::Amount(UNAUTHENTICATED_PER_IP_MAX));
        let (unproved, returning) = (limit(UNPROVED_MAX), limit(RETURNING_MAX));
        for pool in [&unproved, &returning] {
            show_shares(registry, pool);
        }
        Self {
            addresses,
            unproved,
            returning,
            proved: Mutex::default(),
        }
    }

    /// Counts a connection from `address`; older ones may have to give way.
    ///
    /// # Errors
    /// The pool is full of other networks' connections, none of which has more than this one would.
    pub(crate) fn take(&self, address: IpAddr) -> Result<UnauthenticatedPermit, ShareRefusal> {
        let address = address.to_canonical();
        let has_proved = self
            .proved
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .positions
            .contains_key(&address);
        let pool = if has_proved {
            &self.returning
        } else {
            &self.unproved
        };
        let network = pool.take_replacing(&network(address, NETWORK_PREFIX), 1)?;
        let address = self
            .addresses
            .take_replacing(&ShareHolder::Network(address.into()), 1)?;
        Ok(UnauthenticatedPermit { address, network })
    }

    /// Records that a requester authenticated from `address`.
    pub(crate) fn record_proof(&self, address: IpAddr) {
        self.proved
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(address.to_canonical());
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn is_revoked(permit: &UnauthenticatedPermit) -> bool {
        permit.address.is_revoked() || permit.network.is_revoked()
    }

    fn at(network: u8, host: u8) -> IpAddr {
        Ipv4Addr::new(10, 0, network, host).into()
    }

    #[test]
    fn an_addresss_newest_connection_replaces_its_oldest() {
        let all = Unauthenticated::new(&Registry::new());
        let held: Vec<_> = (0..=UNAUTHENTICATED_PER_IP_MAX)
            .map(|_| all.take(at(1, 1)).unwrap())
            .collect();
        assert_eq!(held.iter().map(is_revoked).filter(|r| *r).count(), 1);
        assert!(is_revoked(&held[0]));
    }

    #[test]
    fn silent_connections_of_sixteen_addresses_do_not_block_others() {
        let all = Unauthenticated::new(&Registry::new());
        // Silent connections from the attacker's network, twice as many as are permitted.
        let silent: Vec<_> = (0..2 * UNPROVED_MAX)
            .map(|n| all.take(at(1, (n % 16) as u8)).unwrap())
            .collect();
        let others: Vec<_> = (0..64).map(|n| all.take(at(2, n)).unwrap()).collect();
        assert!(others.iter().all(|p| !is_revoked(p)));
        // A new address in the attacker's own network is admitted as well.
        let near = all.take(at(1, 200)).unwrap();
        assert!(!is_revoked(&near));
        assert!(silent.iter().filter(|p| !is_revoked(p)).count() as u64 <= UNPROVED_MAX / 2);
    }

    #[test]
    fn authenticated_addresses_have_reserved_capacity() {
        let all = Unauthenticated::new(&Registry::new());
        all.record_proof(at(9, 9));
        // One connection from each of as many networks as are permitted connections: no network is
        // the largest.
        let _silent: Vec<_> = (0..UNPROVED_MAX)
            .map(|n| {
                all.take(Ipv4Addr::new(11, (n / 256) as u8, n as u8, 1).into())
                    .unwrap()
            })
            .collect();
        assert_eq!(all.take(at(8, 8)).unwrap_err(), ShareRefusal::Full);
        assert!(all.take(at(9, 9)).is_ok());
    }

    #[test]
    fn proved_addresses_are_bounded_and_the_latest_stay() {
        let mut proved = ProvedAddresses::default();
        for n in 0..3 * PROVED_ADDRESSES_MAX {
            proved.insert(Ipv4Addr::from(n as u32).into());
            proved.insert(at(1, 1));
        }
        assert!(
            proved.positions.len() <= PROVED_ADDRESSES_MAX
                && proved.order.len() <= 2 * PROVED_ADDRESSES_MAX
        );
        assert!(proved.positions.contains_key(&at(1, 1)));
    }
}
