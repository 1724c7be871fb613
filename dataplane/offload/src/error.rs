//! Error type of this crate. Its text shows operators where the error occurred, what the kernel
//! reported, and the fix.

use std::path::PathBuf;

/// Reason why a kernel facility cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OffloadError {
    /// libbpf or the verifier refused the capture object.
    #[error(
        "bpf/capture.bpf.c was refused by the kernel: {source}; libbpf: {journal}; fix: run as root (CAP_BPF, CAP_NET_ADMIN, CAP_SYS_ADMIN) on Linux 5.18 or newer"
    )]
    Load {
        source: libbpf_rs::Error,
        journal: String,
    },
    /// libbpf or the verifier refused one of the other objects.
    #[error(
        "{object} was refused by the kernel: {source}; libbpf: {journal}; fix: run as root (CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON) on Linux 6.1 or newer with its BTF in /sys/kernel/btf/vmlinux"
    )]
    Refused {
        object: &'static str,
        source: libbpf_rs::Error,
        journal: String,
    },
    /// A program could not be attached to a device, or detached from it.
    #[error(
        "device {device} (namespace {netns:?}): {source}; fix: check that it exists and that the kernel has CONFIG_NET_CLS_BPF and CONFIG_NET_SCH_INGRESS"
    )]
    Hook {
        device: String,
        netns: Option<PathBuf>,
        source: libbpf_rs::Error,
    },
    /// The interface of a container does not exist on this host.
    #[error(
        "interface {device} cannot be found: {source}; fix: name the host's side of the container's interface"
    )]
    Interface {
        device: String,
        source: std::io::Error,
    },
    /// The replica's tunnel device, or the routes and rules that lead packets into it, could not be
    /// created.
    #[error(
        "tunnel device tier0: {step}: {why}; fix: run as root (CAP_NET_ADMIN) with the ip program (Debian: apt-get install iproute2) and a kernel with CONFIG_VXLAN"
    )]
    Tunnel { step: String, why: String },
    /// A test run of a program over a frame failed.
    #[error("{program} cannot be test-run: {source}")]
    Trial {
        program: &'static str,
        source: libbpf_rs::Error,
    },
    /// The embedded object lacks a map, program or section that this code names: the two were not
    /// built from one tree.
    #[error(
        "the embedded BPF object has no {what} {name:?}; fix: rebuild canal-offload from a clean tree"
    )]
    Object {
        what: &'static str,
        name: &'static str,
    },
    /// A program could not be attached to a cgroup.
    #[error(
        "cannot attach {program} to cgroup {cgroup}: {source}; fix: name a directory of a cgroup v2 mount that this process may write to"
    )]
    Attach {
        program: &'static str,
        cgroup: PathBuf,
        source: libbpf_rs::Error,
    },
    /// The pod's cgroup directory cannot be read.
    #[error(
        "cannot open cgroup {cgroup}: {source}; fix: name a directory on a cgroup v2 mount in the pod's file"
    )]
    Cgroup {
        cgroup: PathBuf,
        source: std::io::Error,
    },
    /// A map could not be read or written.
    #[error("BPF map {map}: {source}")]
    Map {
        map: &'static str,
        source: libbpf_rs::Error,
    },
    /// A map has no capacity for one more element.
    #[error(
        "BPF map {map} is full: it has space for {capacity} elements; fix: reduce what this host serves"
    )]
    Full { map: &'static str, capacity: u32 },
    /// The pin directory cannot be used.
    #[error(
        "BPF pin directory {dir}: {step}: {source}; fix: give --bpf-pin-dir a path on a bpffs, or one where this process may mount a bpffs"
    )]
    Pins {
        dir: PathBuf,
        step: &'static str,
        source: std::io::Error,
    },
    /// A pod's network namespace cannot be entered.
    #[error(
        "network namespace {netns}: {source}; fix: name an existing namespace in the pod's file, e.g. /run/netns/NAME"
    )]
    Netns {
        netns: PathBuf,
        source: std::io::Error,
    },
    /// The command `nft` is missing or refused the rules.
    #[error(
        "nftables in {netns}: {why}; fix: install the nft command (Debian: apt-get install nftables), on a kernel with nft NAT"
    )]
    Nft { netns: PathBuf, why: String },
    /// The connections of a namespace cannot be listed, or one of them cannot be reset.
    #[error(
        "connections in {netns}: {step}: {source}; fix: run as root (CAP_NET_ADMIN) on a kernel with CONFIG_INET_DIAG_DESTROY"
    )]
    Sockets {
        netns: PathBuf,
        step: &'static str,
        source: std::io::Error,
    },
    /// The route of the proxy's IPv6 addresses cannot be added to a pod's namespace.
    #[error("IPv6 route in {netns}: {source}; fix: run canal-node with CAP_NET_ADMIN")]
    Route {
        netns: PathBuf,
        source: std::io::Error,
    },
    /// The original destination of a redirected connection is not available.
    #[error("the original destination is unknown: {0}")]
    Origin(std::io::Error),
}

impl OffloadError {
    /// Returns true if a map had no capacity for the element.
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }
}
