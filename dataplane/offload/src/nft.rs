//! The fallback where BPF is refused: nftables in the pod's own namespace redirects its TCP to the proxy. Costs conntrack and NAT per
//! packet; the table lives in the namespace, so it, too, outlives the proxy and fails closed. The caller says loudly that it is used. Only
//! TCP is looked at here; the rest is `nft_guard`'s.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use canal_abi::capture::OUTBOUND_PORT;
use canal_abi::inbound::{HBONE_PORT, INBOUND_PORT};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::OffloadError;

/// Where cgroup paths of nft rules begin, whatever is mounted there (nftables, src/datatype.c).
const NFT_CGROUPS: &str = "/sys/fs/cgroup";

/// A pod's cgroup as nft rules match it: its depth below the cgroup2 mount, and its path as nft spells it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CgroupMatch {
    level: usize,
    path: String,
}

impl CgroupMatch {
    /// `mounts` is what /proc/self/mounts says. The mount is found by its type: on machines with cgroup v1 as well it lies beside the others.
    fn new(cgroup: &Path, mounts: &str) -> Result<Self, String> {
        let mount = mounts
            .lines()
            .filter_map(|line| {
                let mut words = line.split(' ').skip(1);
                let at = Path::new(words.next()?);
                (words.next()? == "cgroup2" && cgroup.starts_with(at)).then_some(at)
            })
            .max_by_key(|at| at.components().count())
            .ok_or_else(|| format!("{} is on no cgroup2 mount; fix: name the pod's cgroup v2 directory in its file", cgroup.display()))?;
        let level = cgroup.strip_prefix(mount).map(|below| below.components().count()).unwrap_or_default();
        let path = cgroup.strip_prefix(NFT_CGROUPS).ok().and_then(Path::to_str).filter(|p| !p.contains(['"', '\\', '\n']));
        match path {
            Some(path) if level > 0 => Ok(Self { level, path: path.to_string() }),
            _ => Err(format!("nftables cannot match cgroup {}; fix: mount cgroup2 below {NFT_CGROUPS}", cgroup.display())),
        }
    }

    fn of(cgroup: &Path) -> Result<Self, String> {
        Self::new(cgroup, &std::fs::read_to_string("/proc/self/mounts").map_err(|e| format!("/proc/self/mounts: {e}"))?)
    }
}

/// The rules. What a socket of the pod's cgroup dials is taken whatever its mark, which any process with CAP_NET_RAW may set (since Linux
/// 5.17; CAP_NET_ADMIN before). Of other sockets the marked ones are the proxy's own. An exception by port would let an application
/// reach that port anywhere in the clear.
fn rules(mark: u32, pod: &CgroupMatch) -> String {
    let CgroupMatch { level, path } = pod;
    let of_pod = format!("socket cgroupv2 level {level} \"{path}\"");
    format!(
        "table inet canal
delete table inet canal
table inet canal {{
  chain output {{
    type nat hook output priority -100; policy accept;
    ip daddr 127.0.0.0/8 accept
    ip6 daddr ::1 accept
    {of_pod} meta l4proto tcp counter redirect to :{OUTBOUND_PORT}
    meta mark {mark:#x} accept
    meta l4proto tcp counter redirect to :{OUTBOUND_PORT}
  }}
}}
"
    )
}

/// The rules for what comes in from outside. Only a SYN opens a translation: connections that are open already go on.
fn inbound_rules() -> String {
    format!(
        "table inet canal_inbound
delete table inet canal_inbound
table inet canal_inbound {{
  chain prerouting {{
    type nat hook prerouting priority -100; policy accept;
    iifname \"lo\" accept
    tcp dport {HBONE_PORT} accept
    tcp flags & (syn | ack) == syn counter redirect to :{INBOUND_PORT}
  }}
}}
"
    )
}

/// Takes plaintext connections into the pod at `netns` to the proxy's port, replacing an older table in the same transaction. They are
/// refused while nobody listens there.
pub fn take_inbound(netns: &Path) -> Result<(), OffloadError> {
    nft(netns, &inbound_rules()).map(drop)
}

/// Undoes [`take_inbound`]; nothing there is fine.
pub fn leave_inbound(netns: &Path) -> Result<(), OffloadError> {
    nft(netns, "table inet canal_inbound\ndelete table inet canal_inbound\n").map(drop)
}

/// A pod's redirection. Dropping it changes nothing; see [`Redirect::remove`].
#[derive(Debug)]
pub struct Redirect {
    netns: PathBuf,
}

impl Redirect {
    /// Puts the table into the namespace at `netns`, replacing an older one in the same transaction. `cgroup` is the pod's; `mark` that of the
    /// proxy's sockets, which are in another.
    pub fn apply(netns: &Path, cgroup: &Path, mark: u32) -> Result<Self, OffloadError> {
        let pod = CgroupMatch::of(cgroup).map_err(|why| OffloadError::Nft { netns: netns.to_path_buf(), why })?;
        nft(netns, &rules(mark, &pod))?;
        Ok(Self { netns: netns.to_path_buf() })
    }

    /// Takes the tables away: from now on the pod's traffic leaves, and comes in, as it is.
    pub fn remove(netns: &Path) -> Result<(), OffloadError> {
        nft(netns, "table inet canal\ndelete table inet canal\ntable inet canal_inbound\ndelete table inet canal_inbound\n").map(drop)
    }

    /// Where the table is.
    pub fn netns(&self) -> &Path {
        &self.netns
    }
}

/// Where a redirected connection was going, from conntrack. An answer equal to `local` means that it was not redirected.
pub fn original_destination(accepted: impl AsFd, local: SocketAddr) -> Result<SocketAddr, OffloadError> {
    let s = socket2::SockRef::from(&accepted);
    let origin = if local.is_ipv4() { s.original_dst_v4() } else { s.original_dst_v6() };
    let origin = origin.map_err(OffloadError::Origin)?.as_socket();
    match origin {
        Some(o) if o != local => Ok(o),
        _ => Err(OffloadError::Origin(io::Error::new(io::ErrorKind::NotFound, "the connection was made to the proxy's own port"))),
    }
}

/// Runs a script in the namespace at `netns`, and gives what it lists.
pub(crate) fn nft(netns: &Path, script: &str) -> Result<String, OffloadError> {
    let refused = |why: String| OffloadError::Nft { netns: netns.to_path_buf(), why };
    let ns = std::fs::File::open(netns).map_err(|source| OffloadError::Netns { netns: netns.to_path_buf(), source })?;
    // A namespace is a thread's, and children inherit it: a thread of its own goes there, starts nft, and ends.
    let run = std::thread::scope(|s| {
        let in_namespace = s.spawn(|| -> io::Result<std::process::Output> {
            move_into_link_name_space(ns.as_fd(), Some(LinkNameSpaceType::Network))?;
            let mut child =
                Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
            if let Some(mut stdin) = child.stdin.take() {
                stdin.write_all(script.as_bytes())?;
            }
            child.wait_with_output()
        });
        in_namespace.join().unwrap_or_else(|_| Err(io::Error::other("the thread that runs nft panicked")))
    });
    match run {
        Ok(o) if o.status.success() => Ok(String::from_utf8_lossy(&o.stdout).into_owned()),
        Ok(o) => Err(refused(String::from_utf8_lossy(&o.stderr).lines().next().unwrap_or("no reason given").to_string())),
        Err(e) => Err(refused(format!("cannot run nft: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_is_matched_on_every_kind_of_mount() {
        let unified = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0";
        let hybrid =
            "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\nc2 /sys/fs/cgroup/unified cgroup2 rw 0 0";
        for (case, mounts, cgroup, level, path) in [
            ("unified", unified, "/sys/fs/cgroup/kube/pod1", 2, "kube/pod1"),
            ("hybrid", hybrid, "/sys/fs/cgroup/unified/kube/pod1", 2, "unified/kube/pod1"),
        ] {
            assert_eq!(CgroupMatch::new(Path::new(cgroup), mounts), Ok(CgroupMatch { level, path: path.into() }), "{case}");
        }
        for (case, mounts, cgroup) in [
            ("the root, which is everybody's", unified, "/sys/fs/cgroup"),
            ("version 1", hybrid, "/sys/fs/cgroup/cpu/pod1"),
            ("elsewhere", "c2 /mnt/c2 cgroup2 rw 0 0", "/mnt/c2/pod1"),
            ("a path that ends the rule", unified, "/sys/fs/cgroup/a\"b"),
        ] {
            assert!(CgroupMatch::new(Path::new(cgroup), mounts).unwrap_err().contains("fix: "), "{case}");
        }
    }
}
