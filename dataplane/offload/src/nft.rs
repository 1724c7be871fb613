//! The fallback where BPF is refused: nftables in the pod's own namespace redirects its TCP to the proxy. Costs conntrack and NAT per
//! packet; the table lives in the namespace, so it, too, outlives the proxy and fails closed. The caller says loudly that it is used.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use canal_abi::capture::OUTBOUND_PORT;
use canal_abi::inbound::{HBONE_PORT, INBOUND_PORT};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::OffloadError;

/// The rules. Only loopback and the proxy's own marked sockets are left alone: an exception by port would let an application reach
/// that port anywhere in the clear. Setting the mark takes CAP_NET_ADMIN over the pod's namespace.
fn rules(mark: u32) -> String {
    format!(
        "table inet canal
delete table inet canal
table inet canal {{
  chain output {{
    type nat hook output priority -100; policy accept;
    meta mark {mark:#x} accept
    ip daddr 127.0.0.0/8 accept
    ip6 daddr ::1 accept
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
    nft(netns, &inbound_rules())
}

/// Undoes [`take_inbound`]; nothing there is fine.
pub fn leave_inbound(netns: &Path) -> Result<(), OffloadError> {
    nft(netns, "table inet canal_inbound\ndelete table inet canal_inbound\n")
}

/// A pod's redirection. Dropping it changes nothing; see [`Redirect::remove`].
#[derive(Debug)]
pub struct Redirect {
    netns: PathBuf,
}

impl Redirect {
    /// Puts the table into the namespace at `netns`, replacing an older one in the same transaction. `mark` is that of the proxy's sockets.
    pub fn apply(netns: &Path, mark: u32) -> Result<Self, OffloadError> {
        nft(netns, &rules(mark))?;
        Ok(Self { netns: netns.to_path_buf() })
    }

    /// Takes the tables away: from now on the pod's traffic leaves, and comes in, as it is.
    pub fn remove(netns: &Path) -> Result<(), OffloadError> {
        nft(netns, "table inet canal\ndelete table inet canal\ntable inet canal_inbound\ndelete table inet canal_inbound\n")
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

fn nft(netns: &Path, script: &str) -> Result<(), OffloadError> {
    let refused = |why: String| OffloadError::Nft { netns: netns.to_path_buf(), why };
    let ns = std::fs::File::open(netns).map_err(|source| OffloadError::Netns { netns: netns.to_path_buf(), source })?;
    // A namespace is a thread's, and children inherit it: a thread of its own goes there, starts nft, and ends.
    let run = std::thread::scope(|s| {
        let in_namespace = s.spawn(|| -> io::Result<std::process::Output> {
            move_into_link_name_space(ns.as_fd(), Some(LinkNameSpaceType::Network))?;
            let mut child =
                Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
            if let Some(mut stdin) = child.stdin.take() {
                stdin.write_all(script.as_bytes())?;
            }
            child.wait_with_output()
        });
        in_namespace.join().unwrap_or_else(|_| Err(io::Error::other("the thread that runs nft panicked")))
    });
    match run {
        Ok(o) if o.status.success() => Ok(()),
        Ok(o) => Err(refused(String::from_utf8_lossy(&o.stderr).lines().next().unwrap_or("no reason given").to_string())),
        Err(e) => Err(refused(format!("cannot run nft: {e}"))),
    }
}
