//! What the mesh does not carry: says for each pod whether such packets are stopped or watched, and tells operators what became of them.
//! Judges no packet itself; `canal_offload::pod_guard` does, or where BPF is refused `canal_offload::nft_guard`.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use canal_kit::metrics::Counters;
use canal_model::limits::UDP_PORTS_PER_WORKLOAD_MAX;
use canal_model::program::OutsideMesh;
use canal_offload::OffloadError;
use canal_offload::nft_guard::NftPodGuard;
use canal_offload::pod_guard::{
    OutsidePackets, PodGuard, StoppedPacket, UDP_PORTS_MAX, UdpExcess, UdpFromTier, Verdict, is_stopped, verdict_name,
};

use crate::pod::Pod;
use crate::view::TenantView;

/// A pod's stopped packets are logged at most so often, whatever it sends.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

// All ports that a compiler may name fit into a guard.
const _: () = assert!(UDP_PORTS_PER_WORKLOAD_MAX == UDP_PORTS_MAX);

/// A pod's packets by verdict, as the dump shows them.
pub type PacketCounts = Arc<ArcSwap<BTreeMap<String, u64>>>;

/// What becomes of a pod's packets that the mesh does not carry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketPolicy {
    pub outside: OutsidePackets,
    pub resolvers: Vec<IpAddr>,
    pub udp: UdpFromTier,
}

/// Decides by what the tenant says. Of a closed tenant no port is open: nothing of it is served.
pub fn decide_packets(pod_uid: &str, tenant: &TenantView) -> PacketPolicy {
    let outside = match tenant.tenant.outside {
        OutsideMesh::Deny => OutsidePackets::Stop,
        OutsideMesh::Passthrough => OutsidePackets::Watch,
    };
    let ports = if tenant.rules.closed { BTreeSet::new() } else { tenant.udp_ports(pod_uid).clone() };
    // Without a port the tier does not matter, and its changes need not reach the pod.
    let tier = if ports.is_empty() { BTreeSet::new() } else { tenant.tier_ranges() };
    PacketPolicy { outside, resolvers: tenant.resolvers(), udp: UdpFromTier { ports, tier } }
}

/// What judges a pod's packets.
#[derive(Debug)]
pub enum Guard {
    Bpf(Box<PodGuard>),
    Nft(NftPodGuard),
}

impl Guard {
    /// Brings the policy about, and says how many resolvers, and what of UDPRoutes, it has no room for.
    fn set(&self, policy: &PacketPolicy) -> Result<(usize, UdpExcess), OffloadError> {
        Ok(match self {
            Guard::Bpf(guard) => (guard.set(policy.outside, &policy.resolvers)?, guard.set_udp(&policy.udp)?),
            Guard::Nft(guard) => (guard.set(policy.outside, &policy.resolvers)?, guard.set_udp(&policy.udp)?),
        })
    }

    fn counters(&self) -> Result<Vec<(Verdict, u64)>, OffloadError> {
        match self {
            Guard::Bpf(guard) => guard.counters(),
            Guard::Nft(guard) => guard.counters(),
        }
    }

    fn exposed_interfaces(&self) -> &[String] {
        match self {
            Guard::Bpf(guard) => guard.exposed_interfaces(),
            Guard::Nft(guard) => guard.exposed_interfaces(),
        }
    }

    /// The packet that was stopped last; nft remembers none.
    fn last_stopped(&self) -> StoppedPacket {
        match self {
            Guard::Bpf(guard) => guard.last_stopped().unwrap_or_default(),
            Guard::Nft(_) => StoppedPacket::default(),
        }
    }
}

/// The pod guard of one pod that is served, or was.
#[derive(Debug)]
pub struct PodPackets {
    guard: Guard,
    policy: Option<PacketPolicy>,
    counts: PacketCounts,
    /// Stopped packets that no log line has counted yet, and when the last one was written.
    unlogged: u64,
    /// Why one of them was stopped.
    reason: String,
    logged: Option<Instant>,
}

impl PodPackets {
    /// Of a pod that was just guarded; what it is until a tenant is known, the kernel has kept or set.
    pub fn new(pod: &Pod, guard: Guard) -> Self {
        for interface in guard.exposed_interfaces() {
            tracing::warn!(
                pod = pod.uid,
                interface,
                "pod guard: nothing of it is on this node's end of the interface; a process with CAP_NET_ADMIN in the pod could remove the guard"
            );
        }
        Self { guard, policy: None, counts: PacketCounts::default(), unlogged: 0, reason: String::new(), logged: None }
    }

    /// What has been counted, for others to look at.
    pub fn counts(&self) -> PacketCounts {
        self.counts.clone()
    }

    /// Brings about what the tenant wants now; `None`: it is not known, and the pod stays as it is.
    pub fn follow(&mut self, pod: &Pod, tenant: Option<&TenantView>) {
        let Some(wanted) = tenant.map(|t| decide_packets(&pod.uid, t)).filter(|wanted| self.policy.as_ref() != Some(wanted)) else {
            return;
        };
        match self.guard.set(&wanted) {
            Ok((omitted, udp)) => {
                if omitted > 0 {
                    tracing::warn!(pod = pod.uid, omitted, "pod guard: more resolvers than it holds; pods cannot ask the rest");
                }
                if udp != UdpExcess::default() {
                    let UdpExcess { ports, ranges } = udp;
                    tracing::warn!(
                        pod = pod.uid,
                        ports,
                        ranges,
                        "pod guard: more UDP ports or addresses of the tier than it holds; the rest is stopped"
                    );
                }
                let PacketPolicy { outside, resolvers, udp } = &wanted;
                tracing::info!(pod = pod.uid, ?outside, ?resolvers, udp_ports = ?udp.ports, tier = ?udp.tier, "pod guard: policy set");
                self.policy = Some(wanted);
            }
            Err(error) => tracing::error!(pod = pod.uid, %error, "pod guard: cannot set the policy; the one before stays, trying again"),
        }
    }

    /// Reads the kernel's counters into `all`, by tenant, and logs what was stopped.
    pub fn read(&mut self, pod: &Pod, all: &Counters) {
        let now = match self.guard.counters() {
            Ok(now) => now,
            Err(error) => return self.miss(pod, &error, all),
        };
        let before = self.counts.load();
        let mut next = BTreeMap::new();
        for (verdict, now) in now.into_iter().filter(|(_, now)| *now > 0) {
            let name = verdict_name(verdict);
            let new = now.saturating_sub(before.get(&name).copied().unwrap_or_default());
            if new > 0 {
                all.shared(&[pod.tenant.as_str(), &name]).add(new);
            }
            if new > 0 && is_stopped(verdict) {
                self.unlogged += new;
                self.reason.clone_from(&name);
            }
            next.insert(name, now);
        }
        self.counts.store(Arc::new(next));
        self.log(pod);
    }

    /// What was stopped cannot be told: that is told.
    fn miss(&mut self, pod: &Pod, error: &OffloadError, all: &Counters) {
        all.shared(&[pod.tenant.as_str(), "unread"]).inc();
        if self.logged.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
            tracing::error!(pod = pod.uid, %error, "pod guard: its counters cannot be read; it guards on, trying again");
            self.logged = Some(Instant::now());
        }
    }

    fn log(&mut self, pod: &Pod) {
        if self.unlogged == 0 || self.logged.is_some_and(|at| at.elapsed() < LOG_INTERVAL) {
            return;
        }
        let last = self.guard.last_stopped();
        tracing::warn!(
            pod = pod.uid,
            packets = self.unlogged,
            reason = last.reason().map_or_else(|| self.reason.clone(), verdict_name),
            protocol = last.protocol,
            outgoing = last.is_outgoing != 0,
            remote = %last.remote(),
            "pod guard: packets outside the mesh were stopped; the last one is described"
        );
        self.unlogged = 0;
        self.logged = Some(Instant::now());
    }

    /// Lets the pod's packets pass.
    pub fn release(self) -> Result<(), OffloadError> {
        match self.guard {
            Guard::Bpf(guard) => guard.release(),
            Guard::Nft(guard) => guard.release(),
        }
    }
}

#[cfg(test)]
mod tests {
    use canal_model::ids::{Generation, Vni};
    use canal_model::program::{Gateway, Resource, Tenant, Tunnel, Workload};

    use super::*;
    use crate::view::View;

    const POD: &str = "alpha/b/app-0";

    fn tenant() -> Resource {
        Resource::Tenant(Tenant {
            name: "alpha".parse().unwrap(),
            vni: Vni::new(1).unwrap(),
            trust_domain: "alpha.example".parse().unwrap(),
            pod_cidrs: vec!["10.1.0.0/16".parse().unwrap()],
            gateway_cidrs: vec!["10.9.0.0/20".parse().unwrap(), "fd09::/64".parse().unwrap()],
            outside: OutsideMesh::Deny,
            resolvers: Vec::new(),
            keys: Default::default(),
            shares: Default::default(),
        })
    }

    fn gateway(address: &str) -> Resource {
        Resource::Gateway(Gateway {
            tenant: "alpha".parse().unwrap(),
            replica: "gw1".parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec![address.parse().unwrap()],
            draining: false,
        })
    }

    fn workload(node: &str, udp_ports: &[u16]) -> Resource {
        Resource::Workload(Workload {
            tenant: "alpha".parse().unwrap(),
            namespace: "b".parse().unwrap(),
            name: "app-0".parse().unwrap(),
            service_account: "app".parse().unwrap(),
            node: node.parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec![],
            labels: Default::default(),
            ready: true,
            tunnel: Tunnel::Hbone,
            endpoints: vec![],
            udp_ports: udp_ports.iter().copied().collect(),
        })
    }

    /// What the pod's guard is told: ports, and the tier's addresses.
    fn told(all: &[Resource]) -> (Vec<u16>, Vec<String>) {
        let view = View::from_resources(Generation(1), all.iter(), &"n1".parse().unwrap());
        let PacketPolicy { outside, udp, .. } = decide_packets(POD, view.tenant(&"alpha".parse().unwrap()).unwrap());
        assert_eq!(outside, OutsidePackets::Stop);
        (udp.ports.into_iter().collect(), udp.tier.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_guard_is_told_the_ports_of_udp_routes_and_where_the_tier_is() {
        let tier = ["10.1.255.1/32", "10.9.0.0/20", "240.0.0.0/4", "fd09::/64", "fdca:a1::/48"].map(str::to_owned).to_vec();
        let replica = || gateway("10.1.255.1");
        assert_eq!(told(&[tenant(), replica(), workload("n1", &[5353, 53])]), (vec![53, 5353], tier.clone()));
        let mapped = gateway("::ffff:10.1.255.1");
        assert_eq!(told(&[tenant(), mapped, workload("n1", &[53])]), (vec![53], tier), "the same address");
        let nothing = (Vec::new(), Vec::new());
        for (case, all) in [
            ("no route names a port", vec![tenant(), replica(), workload("n1", &[])]),
            ("the pod is another node's", vec![tenant(), replica(), workload("n2", &[53])]),
            ("the workload is gone", vec![tenant(), replica()]),
        ] {
            assert_eq!(told(&all), nothing, "{case}");
        }
    }

    #[test]
    fn of_a_closed_tenant_no_port_is_open() {
        let all = [tenant(), workload("n1", &[53])];
        let mut view = View::from_resources(Generation(1), all.iter(), &"n1".parse().unwrap());
        let alpha = "alpha".parse().unwrap();
        assert_eq!(decide_packets(POD, view.tenant(&alpha).unwrap()).udp.ports.len(), 1);
        view.close(&alpha);
        assert_eq!(decide_packets(POD, view.tenant(&alpha).unwrap()).udp, UdpFromTier::default());
    }
}
