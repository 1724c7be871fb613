//! IDs of a workload as an endpoint. They are part of the workload, so they are gone with it, and no
//! change of one workload looks at those of others. Start with [`EndpointIds::assign`].

use std::net::IpAddr;

use canal_model::identity::Identity;
use canal_model::ids::{ServiceKey, Vni};
use canal_model::program::TunnelProtocol;

use super::WorkloadView;

/// IDs of one workload as an endpoint, by the port at which it is dialled, in ascending order.
#[derive(Debug, Default)]
pub(crate) struct EndpointIds(Box<[(u16, u64)]>);

/// How connections to a workload are opened.
#[derive(Clone, Copy)]
pub(crate) struct WorkloadPlace<'a> {
    pub(crate) addresses: &'a [IpAddr],
    pub(crate) vni: Option<Vni>,
    pub(crate) tunnel: TunnelProtocol,
    /// Identity that the workload's node must prove.
    pub(crate) identity: Option<&'a Identity>,
}

impl EndpointIds {
    /// Returns the IDs of a workload at a place, which serves these ports. It keeps those
    /// of the workload `before` where a new connection would be opened as an idle one was: one to an
    /// address that the workload has left may lead to another workload by now, and one without a
    /// tunnel must not outlive the change of a workload to a tunnel.
    pub(crate) fn assign(
        before: Option<&WorkloadView>,
        place: WorkloadPlace<'_>,
        serves: &[(ServiceKey, u16, u16)],
        mut next_id: impl FnMut() -> u64,
    ) -> Self {
        let WorkloadPlace {
            addresses,
            vni,
            tunnel,
            identity,
        } = place;
        let is_same_place = |it: &&WorkloadView| {
            it.vni == vni
                && it.tunnel == tunnel
                && it.identity.first() == identity
                && it.addresses.first() == addresses.first()
                && other_family(&it.addresses) == other_family(addresses)
        };
        let before = before.filter(is_same_place);
        let mut ports: Vec<u16> = serves.iter().map(|(.., target)| *target).collect();
        ports.sort_unstable();
        ports.dedup();
        let ids = ports.into_iter().map(|port| {
            let known = before.and_then(|it| it.ids.get(port));
            (port, known.unwrap_or_else(&mut next_id))
        });
        Self(ids.collect())
    }

    /// Returns the ID of the endpoint at a port.
    pub(crate) fn get(&self, port: u16) -> Option<u64> {
        let at = self.0.binary_search_by_key(&port, |(port, _)| *port).ok()?;
        self.0.get(at).map(|(_, id)| *id)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Returns the first address that is not of the IP family of the first one.
pub(crate) fn other_family(addresses: &[IpAddr]) -> Option<IpAddr> {
    let first = addresses.first()?;
    let mut others = addresses.iter();
    let other = others.find(|other| other.is_ipv4() != first.is_ipv4());
    other.copied()
}
