//! Packets that the mesh does not carry: decides for each pod whether they are stopped or watched,
//! and reports their counts.
//!
//! `canal_offload::pod_guard` filters the packets, or `canal_offload::nft_guard` where BPF is
//! refused.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use canal_model::limits::UDP_PORTS_PER_WORKLOAD_MAX;
use canal_model::program::OutboundTrafficPolicy;
use canal_offload::OffloadError;
use canal_offload::nft_guard::NftPodGuard;
use canal_offload::pod_guard::{
    OutsidePackets, PodGuard, StoppedPacket, UDP_PORTS_MAX, UdpExcess, UdpFromTier, Verdict,
    is_stopped, verdict_name,
};
use canal_runtime::metrics::CounterFamily;

use crate::pod::LocalPod;
use crate::snapshot::NodeTenantView;

/// Minimum time between two log lines about a pod's stopped packets, however many it sends. An
/// operator sees two lines a minute for each pod, whatever it sends; the counters have every
/// packet.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

// Every set of ports that a compiler can name fits into a guard.
const _: () = assert!(UDP_PORTS_PER_WORKLOAD_MAX == UDP_PORTS_MAX);

/// A pod's packet counts by verdict, as the dump contains them.
pub type PacketCounts = Arc<ArcSwap<BTreeMap<String, u64>>>;

/// Treatment of a pod's packets that the mesh does not carry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketPolicy {
    pub outside: OutsidePackets,
    pub resolvers: Vec<IpAddr>,
    pub udp: UdpFromTier,
}

/// Derives the policy from the tenant's configuration. A closed tenant has no open UDP port,
/// because nothing of it is served.
pub fn decide_packets(pod_uid: &str, tenant: &NodeTenantView) -> PacketPolicy {
    let outside = match tenant.tenant.outbound_traffic_policy {
        OutboundTrafficPolicy::Deny => OutsidePackets::Stop,
        OutboundTrafficPolicy::Passthrough => OutsidePackets::Watch,
    };
    let ports = if tenant.rules.closed {
        BTreeSet::new()
    } else {
        tenant.udp_ports(pod_uid).clone()
    };
    // Without a port the tier's ranges do not matter, and their changes need not reach the pod's
    // guard.
    let tier = if ports.is_empty() {
        BTreeSet::new()
    } else {
        tenant.tier_ranges()
    };
    PacketPolicy {
        outside,
        resolvers: tenant.resolvers(),
        udp: UdpFromTier { ports, tier },
    }
}

/// The mechanism that filters a pod's packets.
#[derive(Debug)]
pub enum Guard {
    Bpf(Box<PodGuard>),
    Nft(NftPodGuard),
}

impl Guard {
    /// Applies the policy. Returns how many resolvers, and how many UDP ports and tier ranges, did
    /// not fit.
    fn set(&self, policy: &PacketPolicy) -> Result<(usize, UdpExcess), OffloadError> {
        Ok(match self {
            Guard::Bpf(guard) => (
                guard.set(policy.outside, &policy.resolvers)?,
                guard.set_udp(&policy.udp)?,
            ),
            Guard::Nft(guard) => (
                guard.set(policy.outside, &policy.resolvers)?,
                guard.set_udp(&policy.udp)?,
            ),
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

    /// Returns the packet that was stopped last; nftables record none.
    fn last_stopped(&self) -> StoppedPacket {
        match self {
            Guard::Bpf(guard) => guard.last_stopped().unwrap_or_default(),
            Guard::Nft(_) => StoppedPacket::default(),
        }
    }
}

/// Pod guard of one pod that is served or leaving.
#[derive(Debug)]
pub struct PodPackets {
    guard: Guard,
    policy: Option<PacketPolicy>,
    counts: PacketCounts,
    /// Number of stopped packets that no log line has reported yet.
    unlogged: u64,
    /// Verdict of one of the unreported packets.
    reason: String,
    /// Time of the last log line.
    logged: Option<Instant>,
}

impl PodPackets {
    /// Takes over the guard of a pod that was just captured. Until the tenant is known, the policy
    /// is the one that the kernel retained from an earlier process, or the one that attaching has
    /// set.
    pub fn new(pod: &LocalPod, guard: Guard) -> Self {
        for interface in guard.exposed_interfaces() {
            tracing::warn!(
                pod = pod.uid,
                interface,
                "pod guard: no part of it is on this node's end of the interface; a process with CAP_NET_ADMIN in the pod could remove the guard"
            );
        }
        Self {
            guard,
            policy: None,
            counts: PacketCounts::default(),
            unlogged: 0,
            reason: String::new(),
            logged: None,
        }
    }

    /// Returns the shared counts, for readers such as the dump.
    pub fn counts(&self) -> PacketCounts {
        self.counts.clone()
    }

    /// Applies the tenant's present policy if it differs. `None`: the tenant is unknown and the
    /// guard stays as it is.
    pub fn follow(&mut self, pod: &LocalPod, tenant: Option<&NodeTenantView>) {
        let Some(wanted) = tenant
            .map(|t| decide_packets(&pod.uid, t))
            .filter(|wanted| self.policy.as_ref() != Some(wanted))
        else {
            return;
        };
        match self.guard.set(&wanted) {
            Ok((omitted, udp)) => {
                if omitted > 0 {
                    tracing::warn!(
                        pod = pod.uid,
                        omitted,
                        "pod guard: more resolvers than its capacity; pods cannot query the rest"
                    );
                }
                if udp != UdpExcess::default() {
                    let UdpExcess { ports, ranges } = udp;
                    tracing::warn!(
                        pod = pod.uid,
                        ports,
                        ranges,
                        "pod guard: more UDP ports or tier addresses than it has space for; packets to the rest are stopped"
                    );
                }
                let PacketPolicy {
                    outside,
                    resolvers,
                    udp,
                } = &wanted;
                tracing::info!(pod = pod.uid, ?outside, ?resolvers, udp_ports = ?udp.ports, tier = ?udp.tier, "pod guard: policy set");
                self.policy = Some(wanted);
            }
            Err(error) => {
                tracing::error!(pod = pod.uid, %error, "pod guard: cannot set the policy; the previous one stays in force; retrying")
            }
        }
    }

    /// Adds the kernel's new counts to `all`, by tenant and verdict, and logs stopped packets.
    pub fn read(&mut self, pod: &LocalPod, all: &CounterFamily) {
        let now = match self.guard.counters() {
            Ok(now) => now,
            Err(error) => return self.miss(pod, &error, all),
        };
        let before = self.counts.load();
        let mut next = BTreeMap::new();
        for (verdict, now) in now.into_iter().filter(|(_, now)| *now > 0) {
            let name = verdict_name(verdict);
            // The kernel's counters are totals; the metric gets only the difference since the last
            // reading.
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

    /// Counts and logs that the kernel's counters are unreadable, since stopped packets go
    /// unnoticed meanwhile.
    fn miss(&mut self, pod: &LocalPod, error: &OffloadError, all: &CounterFamily) {
        all.shared(&[pod.tenant.as_str(), "unread"]).inc();
        if self.logged.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
            tracing::error!(pod = pod.uid, %error, "pod guard: its counters cannot be read; the guard stays in force; retrying");
            self.logged = Some(Instant::now());
        }
    }

    fn log(&mut self, pod: &LocalPod) {
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

    /// Removes the guard, so that the pod's packets pass.
    ///
    /// # Errors
    /// The guard could not be removed; the packets stay stopped.
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
    use canal_model::program::{GatewayReplica, Resource, Tenant, TunnelProtocol, Workload};

    use super::*;
    use crate::snapshot::NodeSnapshot;

    const POD: &str = "alpha/b/app-0";

    fn tenant() -> Resource {
        Resource::Tenant(Tenant {
            name: "alpha".parse().unwrap(),
            vni: Vni::new(1).unwrap(),
            trust_domain: "alpha.example".parse().unwrap(),
            pod_cidrs: vec!["10.1.0.0/16".parse().unwrap()],
            gateway_cidrs: vec!["10.9.0.0/20".parse().unwrap(), "fd09::/64".parse().unwrap()],
            outbound_traffic_policy: OutboundTrafficPolicy::Deny,
            resolvers: Vec::new(),
            keys: Default::default(),
            shares: Default::default(),
        })
    }

    fn gateway(address: &str) -> Resource {
        Resource::GatewayReplica(GatewayReplica {
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
            tunnel: TunnelProtocol::Hbone,
            endpoints: vec![],
            udp_ports: udp_ports.iter().copied().collect(),
        })
    }

    /// Returns the ports and the tier ranges that the pod's guard gets.
    fn udp_settings(all: &[Resource]) -> (Vec<u16>, Vec<String>) {
        let view = NodeSnapshot::from_resources(Generation(1), all.iter(), &"n1".parse().unwrap());
        let PacketPolicy { outside, udp, .. } =
            decide_packets(POD, view.tenant(&"alpha".parse().unwrap()).unwrap());
        assert_eq!(outside, OutsidePackets::Stop);
        (
            udp.ports.into_iter().collect(),
            udp.tier.iter().map(ToString::to_string).collect(),
        )
    }

    #[test]
    fn a_guard_gets_the_ports_of_udp_routes_and_the_tiers_addresses() {
        let tier = [
            "10.1.255.1/32",
            "10.9.0.0/20",
            "240.0.0.0/4",
            "fd09::/64",
            "fdca:a1::/48",
        ]
        .map(str::to_owned)
        .to_vec();
        let replica = || gateway("10.1.255.1");
        assert_eq!(
            udp_settings(&[tenant(), replica(), workload("n1", &[5353, 53])]),
            (vec![53, 5353], tier.clone())
        );
        let mapped = gateway("::ffff:10.1.255.1");
        assert_eq!(
            udp_settings(&[tenant(), mapped, workload("n1", &[53])]),
            (vec![53], tier),
            "the same address"
        );
        let nothing = (Vec::new(), Vec::new());
        for (case, all) in [
            (
                "no route names a port",
                vec![tenant(), replica(), workload("n1", &[])],
            ),
            (
                "the pod is another node's",
                vec![tenant(), replica(), workload("n2", &[53])],
            ),
            ("the workload was removed", vec![tenant(), replica()]),
        ] {
            assert_eq!(udp_settings(&all), nothing, "{case}");
        }
    }

    #[test]
    fn of_a_closed_tenant_no_port_is_open() {
        let all = [tenant(), workload("n1", &[53])];
        let mut view =
            NodeSnapshot::from_resources(Generation(1), all.iter(), &"n1".parse().unwrap());
        let alpha = "alpha".parse().unwrap();
        assert_eq!(
            decide_packets(POD, view.tenant(&alpha).unwrap())
                .udp
                .ports
                .len(),
            1
        );
        view.close(&alpha);
        assert_eq!(
            decide_packets(POD, view.tenant(&alpha).unwrap()).udp,
            UdpFromTier::default()
        );
    }
}
