//! Capture of pods' connections: by BPF where the kernel permits it, otherwise by nftables with a
//! loud warning.
//!
//! This module selects the mechanism; `canal-offload` implements both.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use canal_model::ids::TenantName;
use canal_net::sys;
use canal_offload::OffloadError;
use canal_offload::capture::{CaptureOptions, CgroupState, PodCapture, cgroup_state};
use canal_offload::connect_tables::ConnectTables;
use canal_offload::delivery::{self, Delivery};
use canal_offload::inbound::InboundPrograms;
use canal_offload::interface_guard;
use canal_offload::nft::Redirect;
use canal_offload::nft_guard::{self, NftPodGuard};
use canal_offload::origins::{ORIGIN_AGE_MAX, Origins};
use canal_offload::pod_guard::{self, PodGuards};
use canal_wire::hbone::{DELIVERY_MARK, PROXY_MARKS};
use tokio::net::TcpStream;

use crate::config::CaptureChoice;
use crate::packets::{Guard, PodPackets};
use crate::pod::LocalPod;

/// Mechanism that captures a pod's connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CaptureMode {
    Bpf,
    Nft,
}

impl CaptureMode {
    /// Returns the name in metrics and in the dump.
    pub fn name(self) -> &'static str {
        match self {
            CaptureMode::Bpf => "bpf",
            CaptureMode::Nft => "nft",
        }
    }
}

/// Selects the mode after BPF was tried; `None`: BPF is required and does not work.
pub fn decide_mode(choice: CaptureChoice, bpf_works: bool) -> Option<CaptureMode> {
    match (choice, bpf_works) {
        (CaptureChoice::Nft, _) | (CaptureChoice::Auto, false) => Some(CaptureMode::Nft),
        (CaptureChoice::Auto | CaptureChoice::Bpf, true) => Some(CaptureMode::Bpf),
        (CaptureChoice::Bpf, false) => None,
    }
}

/// Capture programs of this node, as far as they are loaded.
#[derive(Debug)]
pub struct CaptureBackend {
    choice: CaptureChoice,
    bpf: Option<canal_offload::capture::CapturePrograms>,
    /// Programs that redirect plaintext into pods; `None`: nftables redirect it.
    inbound: Option<InboundPrograms>,
    /// Programs that filter packets which the mesh does not carry; `None`: nftables filter them.
    guards: Option<PodGuards>,
    /// Reason why nftables capture although BPF was configured.
    pub fallback: Option<String>,
    tenant_numbers: Mutex<HashMap<TenantName, u32>>,
}

/// A captured pod. Dropping it releases nothing that is pinned.
#[derive(Debug)]
pub enum CapturedPod {
    /// Capture by BPF, with the cookie of the pod's network namespace.
    Bpf(PodCapture, u64),
    Nft(Redirect),
}

/// Source of the original destinations of a pod's captured connections.
#[derive(Debug, Clone)]
pub enum OriginSource {
    Bpf(Origins),
    Conntrack,
}

impl CapturedPod {
    /// Returns the mechanism that captures the pod.
    pub fn mode(&self) -> CaptureMode {
        match self {
            CapturedPod::Bpf(..) => CaptureMode::Bpf,
            CapturedPod::Nft(_) => CaptureMode::Nft,
        }
    }

    /// Returns whether the pod was not captured before. Always `false` with nftables, where
    /// redirected connections look like any others.
    pub fn is_new(&self) -> bool {
        matches!(self, CapturedPod::Bpf(capture, _) if !capture.is_adopted())
    }

    /// Returns the key of the pod's entry in the connect hook's tables; `None`: nftables capture
    /// the pod.
    pub fn netns_cookie(&self) -> Option<u64> {
        match self {
            CapturedPod::Bpf(_, cookie) => Some(*cookie),
            CapturedPod::Nft(_) => None,
        }
    }
}

impl OriginSource {
    /// Takes the original destination of an accepted connection; `None`: the connection was not
    /// captured, or its entry was dropped.
    pub fn take(
        &self,
        netns_cookie: u64,
        accepted: &TcpStream,
        peer: SocketAddr,
    ) -> Option<SocketAddr> {
        match self {
            OriginSource::Bpf(origins) => {
                origins.take(netns_cookie, peer, accepted.local_addr().ok()?.ip())
            }
            OriginSource::Conntrack => {
                let local = accepted.local_addr().ok()?;
                sys::original_destination(accepted)
                    .ok()
                    .filter(|origin| *origin != local)
            }
        }
    }
}

fn warn_of_fallback(what: &str, why: &OffloadError) {
    tracing::warn!(what, %why, "capture: the kernel refused BPF; falling back to nftables");
    // On stderr as well: the log's level may hide a warning, and the fallback costs every
    // connection of the node.
    eprintln!(
        "canal-node: capture of {what} falls back to nftables: the kernel refused BPF: {why}"
    );
}

impl CaptureBackend {
    /// Creates a backend without BPF programs.
    fn new(choice: CaptureChoice, fallback: Option<String>) -> Self {
        Self {
            choice,
            bpf: None,
            inbound: None,
            guards: None,
            fallback,
            tenant_numbers: Mutex::default(),
        }
    }

    /// Loads BPF unless nftables are configured, and adopts the pins of an earlier process in
    /// `pin_dir`.
    ///
    /// # Errors
    /// BPF is required and the kernel refuses it, or it refuses the pod guards although it accepts
    /// the capture programs.
    pub fn start(choice: CaptureChoice, pin_dir: &Path) -> Result<Self, OffloadError> {
        // Nothing falls back here, so there is no reason to report.
        if choice == CaptureChoice::Nft {
            return Ok(Self::new(choice, None));
        }
        let options = CaptureOptions {
            pin_dir: Some(pin_dir.to_path_buf()),
            ..CaptureOptions::default()
        };
        let (bpf, why) = match canal_offload::capture::CapturePrograms::load(&options) {
            Ok(c) => (Some(c), None),
            Err(e) => (None, Some(e)),
        };
        if let Some(c) = bpf.as_ref().filter(|c| !c.is_durable()) {
            let pods = c.pinned_pods().len();
            tracing::warn!(
                pin_dir = %pin_dir.display(), pods,
                "capture: this process's bpffs ends with its mount namespace, so pods do not stay captured after the process; fix: set --bpf-pin-dir to a bpffs that the machine keeps mounted"
            );
        }
        match (decide_mode(choice, bpf.is_some()), why) {
            // BPF is required.
            (None, Some(e)) => Err(e),
            (_, Some(e)) => {
                warn_of_fallback("this node", &e);
                Ok(Self::new(choice, Some(e.to_string())))
            }
            (_, None) => {
                let inbound = match InboundPrograms::load(Some(pin_dir)) {
                    Ok(inbound) => Some(inbound),
                    // The operator requires BPF, so no fallback is permitted.
                    Err(e) if choice == CaptureChoice::Bpf => return Err(e),
                    Err(e) => {
                        warn_of_fallback("plaintext into this node's pods", &e);
                        None
                    }
                };
                // A kernel that accepts the other programs accepts these, and a pod without a guard
                // would send past the mesh: no fallback.
                let guards = Some(PodGuards::load(Some(pin_dir))?);
                Ok(Self {
                    bpf,
                    inbound,
                    guards,
                    ..Self::new(choice, None)
                })
            }
        }
    }

    /// Returns the BPF programs that redirect plaintext into pods; `None`: nftables must redirect
    /// it.
    pub fn inbound(&self) -> Option<&InboundPrograms> {
        self.inbound.as_ref()
    }

    /// Permits nftables to redirect a pod's plaintext after BPF failed with `error`.
    ///
    /// # Errors
    /// Returns `error` itself if BPF is required.
    pub fn fall_back(&self, pod: &str, error: OffloadError) -> Result<(), OffloadError> {
        if self.choice == CaptureChoice::Bpf {
            return Err(error);
        }
        warn_of_fallback(&format!("plaintext into {pod}"), &error);
        Ok(())
    }

    /// Stops the redirection of plaintext into a pod that an earlier process started.
    pub fn forget_guard(&self, pod: &LocalPod) {
        let Some(inbound) = self.inbound.as_ref().filter(|i| i.is_pinned(&pod.uid)) else {
            return;
        };
        if let Err(error) = inbound.forget(&pod.uid) {
            tracing::warn!(pod = pod.uid, %error, "capture: cannot release the pod's plaintext; plaintext into the pod stays refused");
        }
    }

    /// Returns the count of each verdict of the program that redirects plaintext into pods.
    pub fn inbound_counters(&self) -> Vec<(String, u64)> {
        self.inbound
            .as_ref()
            .and_then(|i| i.counters().ok())
            .unwrap_or_default()
    }

    /// Returns the mode of all pods that have not fallen back to nftables.
    pub fn mode(&self) -> CaptureMode {
        if self.bpf.is_some() {
            CaptureMode::Bpf
        } else {
            CaptureMode::Nft
        }
    }

    /// Captures a pod. Once this returns, the pod's connections reach the proxy or are refused.
    ///
    /// # Errors
    /// The pod's namespace or cgroup is unusable, or the kernel refuses the mechanism that the
    /// configuration requires.
    pub fn take(&self, pod: &LocalPod) -> Result<(CapturedPod, OriginSource), OffloadError> {
        let nft = || {
            Redirect::apply(&pod.netns, &pod.cgroup, &PROXY_MARKS)
                .map(|r| (CapturedPod::Nft(r), OriginSource::Conntrack))
        };
        let Some(bpf) = &self.bpf else { return nft() };
        // The tables come before the programs, so that no connection meets a program without an
        // entry.
        let cookie = bpf
            .tables()
            .put_pod(&pod.netns, &pod.ips, self.tenant_number(&pod.tenant))?;
        match bpf.attach(&pod.uid, &pod.cgroup) {
            Ok(taken) => Ok((
                CapturedPod::Bpf(taken, cookie),
                OriginSource::Bpf(bpf.origins().of_pod()),
            )),
            Err(e) if self.choice == CaptureChoice::Auto => {
                warn_of_fallback(&pod.uid, &e);
                nft()
            }
            Err(e) => Err(e),
        }
    }

    /// Guards a captured pod's packets that the mesh does not carry, with the mechanism that
    /// captures its connections.
    ///
    /// # Errors
    /// The guard could not be attached.
    pub fn guard_packets(
        &self,
        pod: &LocalPod,
        taken: &CapturedPod,
    ) -> Result<PodPackets, OffloadError> {
        let guard = match (&self.guards, taken) {
            (Some(guards), CapturedPod::Bpf(..)) => Guard::Bpf(Box::new(guards.attach(
                &pod.uid,
                &pod.cgroup,
                &pod.netns,
            )?)),
            _ => Guard::Nft(NftPodGuard::attach(&pod.netns)?),
        };
        Ok(PodPackets::new(pod, guard))
    }

    /// Prepares the pod's namespace so that its applications can be dialed from their clients'
    /// addresses, as far as the kernel permits. Logs an error if something is missing.
    pub fn prepare_delivery(pod: &LocalPod) -> Delivery {
        let v6 = pod.ips.iter().any(IpAddr::is_ipv6);
        let prepared = delivery::install(&pod.netns, DELIVERY_MARK, v6);
        let delivery = prepared.unwrap_or_else(|e| Delivery {
            missing: e.to_string(),
            ..Delivery::default()
        });
        if !delivery.is_transparent {
            tracing::error!(
                pod = pod.uid,
                missing = delivery.missing,
                "node: client addresses cannot be preserved; the pod's applications see a substitute for every client"
            );
        }
        delivery
    }

    /// Returns whether a pod that is gone may be released: no process is left in its cgroup that
    /// could send unencrypted traffic.
    pub fn may_release(pod: &LocalPod) -> bool {
        cgroup_state(&pod.cgroup) != CgroupState::Populated
    }

    /// Releases a pod. An nftables table goes with the pod's namespace.
    pub fn release(&self, pod: &LocalPod, taken: CapturedPod, packets: PodPackets) {
        if let Err(error) = packets.release() {
            tracing::warn!(pod = pod.uid, %error, "pod guard: cannot release; the pod's packets stay stopped");
        }
        // Usually the namespace is gone, and the routes with it.
        if pod.netns.exists()
            && let Err(error) = delivery::remove(&pod.netns, DELIVERY_MARK)
        {
            tracing::warn!(pod = pod.uid, %error, "node: cannot remove the routes for client addresses; they stay, without effect");
        }
        let (Some(bpf), CapturedPod::Bpf(taken, cookie)) = (&self.bpf, taken) else {
            return;
        };
        if let Err(e) = bpf.release(&pod.uid, Some(taken)) {
            tracing::warn!(pod = pod.uid, %e, "capture: cannot remove the pod's pins; they stay");
        }
        if let Err(error) = bpf.tables().remove_pod(cookie) {
            tracing::warn!(pod = pod.uid, %error, "capture: the pod's entry stays in the connect hook's tables");
        }
    }

    /// Returns the tables of the connect hook; `None`: nftables capture, which have no such tables.
    pub fn connect_tables(&self) -> Option<&ConnectTables> {
        self.bpf.as_ref().map(|bpf| bpf.tables())
    }

    /// Returns the tenant's number in the connect hook's tables, which is stable for the life of
    /// this process.
    pub fn tenant_number(&self, tenant: &TenantName) -> u32 {
        let mut numbers = self
            .tenant_numbers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let next = numbers.len() as u32 + 1;
        *numbers.entry(tenant.clone()).or_insert(next)
    }

    /// Forgets the origins of connections that were never accepted, and pods whose cgroup
    /// disappeared while no proxy ran.
    pub fn sweep(&self, known: impl Fn(&str) -> bool) {
        let Some(bpf) = &self.bpf else { return };
        let swept = bpf.origins().sweep(ORIGIN_AGE_MAX);
        if swept > 0 {
            tracing::debug!(
                swept,
                "capture: removed the destinations of connections that were never accepted"
            );
        }
        for pod in bpf.forget_gone(known) {
            tracing::info!(
                pod,
                "capture: released a pod whose cgroup was removed while no proxy ran"
            );
        }
    }

    /// Removes the maps of older versions. Call it once this process has attached all pods of the
    /// node.
    pub fn settled(&self) {
        if let Some(bpf) = &self.bpf {
            bpf.forget_other_versions();
        }
    }

    /// Returns the count of each verdict of the capture programs, and the number of swept origins.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let Some(bpf) = &self.bpf else {
            return Vec::new();
        };
        let mut all = bpf.counters().unwrap_or_default();
        all.push(("swept".into(), bpf.origins().swept()));
        all
    }
}

/// Releases every pod of the node, and stops guarding interfaces, on an operator's request. Removes
/// the pins, the private bpffs, and the tables in the namespaces of `pods`.
///
/// # Errors
/// Returns the first failure. A failure does not prevent the other steps.
pub fn release_all(pin_dir: &Path, pods: &[LocalPod]) -> Result<(), OffloadError> {
    let tables = pods
        .iter()
        .filter(|p| p.netns.exists())
        .map(|p| Redirect::remove(&p.netns));
    let mut tables: Vec<_> = tables.collect();
    tables.extend(
        pods.iter()
            .filter(|p| p.netns.exists())
            .map(|p| pod_guard::release_interfaces(&p.netns)),
    );
    tables.extend(
        pods.iter()
            .filter(|p| p.netns.exists())
            .map(|p| nft_guard::remove(&p.netns)),
    );
    tables.extend(
        pods.iter()
            .filter(|p| p.netns.exists())
            .map(|p| delivery::remove(&p.netns, DELIVERY_MARK)),
    );
    tables.push(interface_guard::remove(None, pin_dir));
    let pins = canal_offload::capture::release_all(pin_dir);
    tables.into_iter().chain([pins]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nftables_is_used_only_if_configured_or_bpf_is_refused() {
        for (choice, bpf_works, mode) in [
            (CaptureChoice::Auto, true, Some(CaptureMode::Bpf)),
            (CaptureChoice::Auto, false, Some(CaptureMode::Nft)),
            (CaptureChoice::Bpf, true, Some(CaptureMode::Bpf)),
            (CaptureChoice::Bpf, false, None),
            (CaptureChoice::Nft, true, Some(CaptureMode::Nft)),
            (CaptureChoice::Nft, false, Some(CaptureMode::Nft)),
        ] {
            assert_eq!(
                decide_mode(choice, bpf_works),
                mode,
                "{choice:?} {bpf_works}"
            );
        }
    }
}
