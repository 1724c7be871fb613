//! What the mesh does not carry: says for each pod whether such packets are stopped or watched, and tells operators what became of them.
//! Judges no packet itself; `canal_offload::pod_guard` does, or where BPF is refused `canal_offload::nft_guard`.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use canal_kit::metrics::Counters;
use canal_model::program::OutsideMesh;
use canal_offload::OffloadError;
use canal_offload::nft_guard::NftPodGuard;
use canal_offload::pod_guard::{OutsidePackets, PodGuard, StoppedPacket, Verdict, is_stopped, verdict_name};

use crate::pod::Pod;
use crate::view::TenantView;

/// A pod's stopped packets are logged at most so often, whatever it sends.
const LOG_INTERVAL: Duration = Duration::from_secs(30);

/// A pod's packets by verdict, as the dump shows them.
pub type PacketCounts = Arc<ArcSwap<BTreeMap<String, u64>>>;

/// What becomes of a pod's packets that the mesh does not carry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PacketPolicy {
    pub outside: OutsidePackets,
    pub resolvers: Vec<IpAddr>,
}

/// Decides by what the tenant says.
pub fn decide_packets(tenant: &TenantView) -> PacketPolicy {
    let outside = match tenant.tenant.outside {
        OutsideMesh::Deny => OutsidePackets::Stop,
        OutsideMesh::Passthrough => OutsidePackets::Watch,
    };
    PacketPolicy { outside, resolvers: tenant.resolvers() }
}

/// What judges a pod's packets.
#[derive(Debug)]
pub enum Guard {
    Bpf(PodGuard),
    Nft(NftPodGuard),
}

impl Guard {
    fn set(&self, policy: &PacketPolicy) -> Result<usize, OffloadError> {
        match self {
            Guard::Bpf(guard) => guard.set(policy.outside, &policy.resolvers),
            Guard::Nft(guard) => guard.set(policy.outside, &policy.resolvers),
        }
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
        let Some(wanted) = tenant.map(decide_packets).filter(|wanted| self.policy.as_ref() != Some(wanted)) else { return };
        match self.guard.set(&wanted) {
            Ok(omitted) => {
                if omitted > 0 {
                    tracing::warn!(pod = pod.uid, omitted, "pod guard: more resolvers than it holds; pods cannot ask the rest");
                }
                tracing::info!(pod = pod.uid, outside = ?wanted.outside, resolvers = ?wanted.resolvers, "pod guard: policy set");
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
