//! Takes pods' connections: BPF where the kernel grants it, nftables loudly where it does not. Chooses between the two; what they do is
//! `canal-offload`'s.

use std::net::SocketAddr;
use std::path::Path;

use canal_kit::sys;
use canal_offload::OffloadError;
use canal_offload::capture::{CgroupState, Options, PodCapture, cgroup_state};
use canal_offload::inbound::Inbound;
use canal_offload::interface_guard;
use canal_offload::nft::Redirect;
use canal_offload::nft_guard::{self, NftPodGuard};
use canal_offload::origins::{ORIGIN_AGE_MAX, Origins};
use canal_offload::pod_guard::{self, PodGuards};
use canal_wire::hbone::PROXY_MARK;
use tokio::net::TcpStream;

use crate::config::CaptureChoice;
use crate::packets::{Guard, PodPackets};
use crate::pod::Pod;

/// How a pod's connections are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Bpf,
    Nft,
}

impl Mode {
    /// As metrics and the dump show it.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Bpf => "bpf",
            Mode::Nft => "nft",
        }
    }
}

/// What to do after BPF was tried; `None`: nothing is left.
pub fn decide_mode(choice: CaptureChoice, bpf_works: bool) -> Option<Mode> {
    match (choice, bpf_works) {
        (CaptureChoice::Nft, _) | (CaptureChoice::Auto, false) => Some(Mode::Nft),
        (CaptureChoice::Auto | CaptureChoice::Bpf, true) => Some(Mode::Bpf),
        (CaptureChoice::Bpf, false) => None,
    }
}

/// The node's means of capture.
#[derive(Debug)]
pub struct Capture {
    choice: CaptureChoice,
    bpf: Option<canal_offload::capture::Capture>,
    /// The same for plaintext into pods.
    inbound: Option<Inbound>,
    /// The same for what the mesh does not carry.
    guards: Option<PodGuards>,
    /// Why BPF is not used although it was wanted.
    pub fallback: Option<String>,
}

/// A captured pod. Dropping it lets nothing go that is pinned.
#[derive(Debug)]
pub enum Taken {
    Bpf(PodCapture),
    Nft(Redirect),
}

/// Where a pod's captured connections were going.
#[derive(Debug, Clone)]
pub enum OriginSource {
    Bpf(Origins),
    Conntrack,
}

impl Taken {
    /// How.
    pub fn mode(&self) -> Mode {
        match self {
            Taken::Bpf(_) => Mode::Bpf,
            Taken::Nft(_) => Mode::Nft,
        }
    }

    /// Whether the pod was not captured before. Unknown with nftables, where redirected connections look like any others.
    pub fn is_new(&self) -> bool {
        matches!(self, Taken::Bpf(capture) if !capture.is_adopted())
    }
}

impl OriginSource {
    /// The original destination of an accepted connection; `None`: it was not captured, or was forgotten.
    pub fn take(&self, netns_cookie: u64, accepted: &TcpStream, peer: SocketAddr) -> Option<SocketAddr> {
        match self {
            OriginSource::Bpf(origins) => origins.take(netns_cookie, peer),
            OriginSource::Conntrack => {
                let local = accepted.local_addr().ok()?;
                sys::original_destination(accepted).ok().filter(|origin| *origin != local)
            }
        }
    }
}

fn warn_of_fallback(what: &str, why: &OffloadError) {
    tracing::warn!("CAPTURE BY NFTABLES for {what}: BPF was refused: {why}");
    // Loudly: the log's level may hide a warning, and this costs every connection of the node.
    eprintln!("canal-node: CAPTURE BY NFTABLES for {what}: BPF was refused: {why}");
}

impl Capture {
    /// Loads BPF if it is wanted; takes over what an earlier process left in `pin_dir`.
    pub fn start(choice: CaptureChoice, pin_dir: &Path) -> Result<Self, OffloadError> {
        if choice == CaptureChoice::Nft {
            return Ok(Self { choice, bpf: None, inbound: None, guards: None, fallback: None });
        }
        let options = Options { pin_dir: Some(pin_dir.to_path_buf()), ..Options::default() };
        let (bpf, why) = match canal_offload::capture::Capture::load(&options) {
            Ok(c) => (Some(c), None),
            Err(e) => (None, Some(e)),
        };
        if let Some(c) = bpf.as_ref().filter(|c| !c.is_durable()) {
            let pods = c.pinned_pods().len();
            tracing::warn!(
                pin_dir = %pin_dir.display(), pods,
                "this process has its own mount namespace, and the bpffs in it goes when the process does: pods would NOT stay captured. Give --bpf-pin-dir on a bpffs that the machine keeps mounted"
            );
        }
        match (decide_mode(choice, bpf.is_some()), why) {
            (None, Some(e)) => Err(e),
            (_, Some(e)) => {
                warn_of_fallback("this node", &e);
                Ok(Self { choice, bpf: None, inbound: None, guards: None, fallback: Some(e.to_string()) })
            }
            (_, None) => {
                let inbound = match Inbound::load(Some(pin_dir)) {
                    Ok(inbound) => Some(inbound),
                    Err(e) if choice == CaptureChoice::Bpf => return Err(e),
                    Err(e) => {
                        warn_of_fallback("plaintext into this node's pods", &e);
                        None
                    }
                };
                // The kernel that takes the others takes this one, and a pod without it would speak past the mesh: no fallback.
                let guards = Some(PodGuards::load(Some(pin_dir))?);
                Ok(Self { choice, bpf, inbound, guards, fallback: None })
            }
        }
    }

    /// BPF's means to take plaintext into pods; `None`: nftables has to.
    pub fn inbound(&self) -> Option<&Inbound> {
        self.inbound.as_ref()
    }

    /// Whether nftables may take a pod's plaintext after BPF failed with `error`; if not, that stays the error.
    pub fn fall_back(&self, pod: &str, error: OffloadError) -> Result<(), OffloadError> {
        if self.choice == CaptureChoice::Bpf {
            return Err(error);
        }
        warn_of_fallback(&format!("plaintext into {pod}"), &error);
        Ok(())
    }

    /// Lets plaintext into a pod through, though an earlier process took it.
    pub fn forget_guard(&self, pod: &Pod) {
        let Some(inbound) = self.inbound.as_ref().filter(|i| i.is_pinned(&pod.uid)) else { return };
        if let Err(error) = inbound.forget(&pod.uid) {
            tracing::warn!(pod = pod.uid, %error, "plaintext into the pod stays refused");
        }
    }

    /// Every verdict of the program on plaintext into pods, and its count.
    pub fn inbound_counters(&self) -> Vec<(String, u64)> {
        self.inbound.as_ref().and_then(|i| i.counters().ok()).unwrap_or_default()
    }

    /// How pods are taken unless one refuses.
    pub fn mode(&self) -> Mode {
        if self.bpf.is_some() { Mode::Bpf } else { Mode::Nft }
    }

    /// Captures a pod. From the moment this returns its connections reach the proxy or are refused.
    pub fn take(&self, pod: &Pod) -> Result<(Taken, OriginSource), OffloadError> {
        let nft = || Redirect::apply(&pod.netns, &pod.cgroup, PROXY_MARK).map(|r| (Taken::Nft(r), OriginSource::Conntrack));
        let Some(bpf) = &self.bpf else { return nft() };
        match bpf.attach(&pod.uid, &pod.cgroup) {
            Ok(taken) => Ok((Taken::Bpf(taken), OriginSource::Bpf(bpf.origins().of_pod()))),
            Err(e) if self.choice == CaptureChoice::Auto => {
                warn_of_fallback(&pod.uid, &e);
                nft()
            }
            Err(e) => Err(e),
        }
    }

    /// Guards a captured pod's packets that the mesh does not carry, by the means that took its connections.
    pub fn guard_packets(&self, pod: &Pod, taken: &Taken) -> Result<PodPackets, OffloadError> {
        let guard = match (&self.guards, taken) {
            (Some(guards), Taken::Bpf(_)) => Guard::Bpf(Box::new(guards.attach(&pod.uid, &pod.cgroup, &pod.netns)?)),
            _ => Guard::Nft(NftPodGuard::attach(&pod.netns)?),
        };
        Ok(PodPackets::new(pod, guard))
    }

    /// Whether a pod that is gone may be let go: none of its processes is left that could talk in the clear.
    pub fn may_release(pod: &Pod) -> bool {
        cgroup_state(&pod.cgroup) != CgroupState::Populated
    }

    /// Lets a pod go. nft's table goes with the pod's namespace.
    pub fn release(&self, pod: &Pod, taken: Taken, packets: PodPackets) {
        if let Err(error) = packets.release() {
            tracing::warn!(pod = pod.uid, %error, "pod guard: cannot release; the pod's packets stay stopped");
        }
        if let (Some(bpf), Taken::Bpf(taken)) = (&self.bpf, taken)
            && let Err(e) = bpf.release(&pod.uid, Some(taken))
        {
            tracing::warn!(pod = pod.uid, %e, "the pod's pins stay");
        }
    }

    /// Housekeeping, now and then: forgets origins nobody asked for, and pods that went while no proxy ran.
    pub fn sweep(&self, known: impl Fn(&str) -> bool) {
        let Some(bpf) = &self.bpf else { return };
        let swept = bpf.origins().sweep(ORIGIN_AGE_MAX);
        if swept > 0 {
            tracing::debug!(swept, "captured connections that were never accepted");
        }
        for pod in bpf.forget_gone(known) {
            tracing::info!(pod, "let go: its cgroup went while no proxy ran");
        }
    }

    /// All of the node's pods were attached by this process: older versions' maps are not in use any more.
    pub fn settled(&self) {
        if let Some(bpf) = &self.bpf {
            bpf.forget_other_versions();
        }
    }

    /// Every verdict of the programs and its count; and origins swept.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let Some(bpf) = &self.bpf else { return Vec::new() };
        let mut all = bpf.counters().unwrap_or_default();
        all.push(("swept".into(), bpf.origins().swept()));
        all
    }
}

/// Lets every pod of the node go, at an operator's word, and guards no interface any more: pins, the private bpffs, and the tables in the
/// namespaces of `pods`. What can be done is done, whatever fails.
pub fn release_all(pin_dir: &Path, pods: &[Pod]) -> Result<(), OffloadError> {
    let tables = pods.iter().filter(|p| p.netns.exists()).map(|p| Redirect::remove(&p.netns));
    let mut tables: Vec<_> = tables.collect();
    tables.extend(pods.iter().filter(|p| p.netns.exists()).map(|p| pod_guard::release_interfaces(&p.netns)));
    tables.extend(pods.iter().filter(|p| p.netns.exists()).map(|p| nft_guard::remove(&p.netns)));
    tables.push(interface_guard::remove(None, pin_dir));
    let pins = canal_offload::capture::release_all(pin_dir);
    tables.into_iter().chain([pins]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nftables_is_used_when_asked_for_or_when_bpf_is_refused_and_only_then() {
        for (choice, bpf_works, mode) in [
            (CaptureChoice::Auto, true, Some(Mode::Bpf)),
            (CaptureChoice::Auto, false, Some(Mode::Nft)),
            (CaptureChoice::Bpf, true, Some(Mode::Bpf)),
            (CaptureChoice::Bpf, false, None),
            (CaptureChoice::Nft, true, Some(Mode::Nft)),
            (CaptureChoice::Nft, false, Some(Mode::Nft)),
        ] {
            assert_eq!(decide_mode(choice, bpf_works), mode, "{choice:?} {bpf_works}");
        }
    }
}
