//! Fallback where BPF is refused: nftables in the pod's own namespace redirects its TCP to the
//! proxy. It costs conntrack and NAT per packet. The table is part of the namespace, so it outlives
//! the proxy and fails closed. The caller must warn that the fallback is in use. This module
//! handles TCP only; `nft_guard` handles the rest. Start with [`Redirect::apply`].

use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use canal_abi::capture::OUTBOUND_PORT;
use canal_abi::inbound::{HBONE_PORT, INBOUND_PORT};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::OffloadError;

/// Directory at which cgroup paths in nft rules begin, regardless of what is mounted there
/// (nftables, src/datatype.c).
const NFT_CGROUPS: &str = "/sys/fs/cgroup";

/// Cgroup of a pod as nft rules match it: its depth below the cgroup2 mount, and its path in nft's
/// spelling.
#[derive(Debug, Clone, PartialEq, Eq)]
struct CgroupMatch {
    level: usize,
    path: String,
}

impl CgroupMatch {
    /// Finds the match of a cgroup. `mounts` is the text of /proc/self/mounts. The mount is found
    /// by its type, because on machines that also use cgroup v1 it is next to the other mounts.
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
        let level = cgroup
            .strip_prefix(mount)
            .map(|below| below.components().count())
            .unwrap_or_default();
        let path = cgroup
            .strip_prefix(NFT_CGROUPS)
            .ok()
            .and_then(Path::to_str)
            .filter(|p| !p.contains(['"', '\\', '\n']));
        match path {
            Some(path) if level > 0 => Ok(Self {
                level,
                path: path.to_string(),
            }),
            _ => Err(format!(
                "nftables cannot match cgroup {}; fix: mount cgroup2 below {NFT_CGROUPS}",
                cgroup.display()
            )),
        }
    }

    fn of(cgroup: &Path) -> Result<Self, String> {
        Self::new(
            cgroup,
            &std::fs::read_to_string("/proc/self/mounts")
                .map_err(|e| format!("/proc/self/mounts: {e}"))?,
        )
    }
}

/// Returns the rules for outbound connections. A connection of a socket in the pod's cgroup is
/// redirected regardless of its mark: any process with CAP_NET_RAW may set one (since Linux 5.17;
/// CAP_NET_ADMIN before). Of the other sockets, those with a mark are the proxy's own. An exception
/// by port would let an application reach that port anywhere unencrypted.
fn rules(marks: &[u32], pod: &CgroupMatch) -> String {
    let CgroupMatch { level, path } = pod;
    let marks = marks
        .iter()
        .map(|mark| format!("{mark:#x}"))
        .collect::<Vec<_>>()
        .join(", ");
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
    meta mark {{ {marks} }} accept
    meta l4proto tcp counter redirect to :{OUTBOUND_PORT}
  }}
}}
"
    )
}

/// Returns the rules for connections from outside. Only a SYN starts a translation, so open
/// connections continue.
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

/// Redirects plaintext connections into the pod at `netns` to the proxy's port; replaces an older
/// table in the same transaction. While no proxy listens there, the connections are refused.
///
/// # Errors
/// Returns [`OffloadError::Nft`] if nft refuses the rules.
pub fn take_inbound(netns: &Path) -> Result<(), OffloadError> {
    nft(netns, &inbound_rules()).map(drop)
}

/// Reverts [`take_inbound`]; it is no error if there is no table.
///
/// # Errors
/// Returns [`OffloadError::Nft`] if nft does not remove the table.
pub fn leave_inbound(netns: &Path) -> Result<(), OffloadError> {
    nft(
        netns,
        "table inet canal_inbound\ndelete table inet canal_inbound\n",
    )
    .map(drop)
}

/// Redirection of one pod. Dropping it changes nothing; see [`Redirect::remove`].
#[derive(Debug)]
pub struct Redirect {
    netns: PathBuf,
}

impl Redirect {
    /// Installs the table in the namespace at `netns`; replaces an older one in the same
    /// transaction. `cgroup` is the pod's. `marks` are those of the proxy's sockets, which are in
    /// another cgroup.
    ///
    /// # Errors
    /// Returns [`OffloadError::Nft`] if nft cannot match the cgroup or refuses the rules.
    pub fn apply(netns: &Path, cgroup: &Path, marks: &[u32]) -> Result<Self, OffloadError> {
        let pod = CgroupMatch::of(cgroup).map_err(|why| OffloadError::Nft {
            netns: netns.to_path_buf(),
            why,
        })?;
        nft(netns, &rules(marks, &pod))?;
        Ok(Self {
            netns: netns.to_path_buf(),
        })
    }

    /// Removes the tables: from now on the pod's traffic leaves and enters unchanged.
    ///
    /// # Errors
    /// Returns [`OffloadError::Nft`] if nft does not remove the tables.
    pub fn remove(netns: &Path) -> Result<(), OffloadError> {
        nft(netns, "table inet canal\ndelete table inet canal\ntable inet canal_inbound\ndelete table inet canal_inbound\n").map(drop)
    }

    /// Returns the path of the namespace that has the table.
    pub fn netns(&self) -> &Path {
        &self.netns
    }
}

/// Returns the original destination of a redirected connection, from conntrack. If it equals
/// `local`, the connection was not redirected.
///
/// # Errors
/// Returns [`OffloadError::Origin`] if conntrack does not know the connection, or if it was not
/// redirected.
pub fn original_destination(
    accepted: impl AsFd,
    local: SocketAddr,
) -> Result<SocketAddr, OffloadError> {
    let s = socket2::SockRef::from(&accepted);
    let origin = if local.is_ipv4() {
        s.original_dst_v4()
    } else {
        s.original_dst_v6()
    };
    let origin = origin.map_err(OffloadError::Origin)?.as_socket();
    match origin {
        Some(o) if o != local => Ok(o),
        _ => Err(OffloadError::Origin(io::Error::new(
            io::ErrorKind::NotFound,
            "the connection was made to the proxy's own port",
        ))),
    }
}

/// Runs a script in the namespace at `netns` and returns its output.
pub(crate) fn nft(netns: &Path, script: &str) -> Result<String, OffloadError> {
    let refused = |why: String| OffloadError::Nft {
        netns: netns.to_path_buf(),
        why,
    };
    let ns = std::fs::File::open(netns).map_err(|source| OffloadError::Netns {
        netns: netns.to_path_buf(),
        source,
    })?;
    // A network namespace belongs to a thread, and children inherit it: a new thread enters it,
    // starts nft, and ends.
    let run = std::thread::scope(|s| {
        let in_namespace = s.spawn(|| -> io::Result<std::process::Output> {
            move_into_link_name_space(ns.as_fd(), Some(LinkNameSpaceType::Network))?;
            let mut child = Command::new("nft")
                .args(["-f", "-"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()?;
            // Taken out, so that it closes after the script, and nft sees the end of its input.
            if let Some(mut stdin) = child.stdin.take() {
                stdin.write_all(script.as_bytes())?;
            }
            child.wait_with_output()
        });
        in_namespace
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread that runs nft panicked")))
    });
    match run {
        Ok(o) if o.status.success() => Ok(String::from_utf8_lossy(&o.stdout).into_owned()),
        Ok(o) => Err(refused(
            String::from_utf8_lossy(&o.stderr)
                .lines()
                // nft repeats the script below its first line, which alone has the cause.
                .next()
                .unwrap_or("no reason given")
                .to_string(),
        )),
        Err(e) => Err(refused(format!("cannot run nft: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_is_matched_on_every_kind_of_mount() {
        let unified = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0";
        let hybrid = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\nc2 /sys/fs/cgroup/unified cgroup2 rw 0 0";
        for (case, mounts, cgroup, level, path) in [
            (
                "unified",
                unified,
                "/sys/fs/cgroup/kube/pod1",
                2,
                "kube/pod1",
            ),
            (
                "hybrid",
                hybrid,
                "/sys/fs/cgroup/unified/kube/pod1",
                2,
                "unified/kube/pod1",
            ),
        ] {
            assert_eq!(
                CgroupMatch::new(Path::new(cgroup), mounts),
                Ok(CgroupMatch {
                    level,
                    path: path.into()
                }),
                "{case}"
            );
        }
        for (case, mounts, cgroup) in [
            ("the root, which is everybody's", unified, "/sys/fs/cgroup"),
            ("version 1", hybrid, "/sys/fs/cgroup/cpu/pod1"),
            ("elsewhere", "c2 /mnt/c2 cgroup2 rw 0 0", "/mnt/c2/pod1"),
            ("a path that ends the rule", unified, "/sys/fs/cgroup/a\"b"),
        ] {
            assert!(
                CgroupMatch::new(Path::new(cgroup), mounts)
                    .unwrap_err()
                    .contains("fix: "),
                "{case}"
            );
        }
    }
}
