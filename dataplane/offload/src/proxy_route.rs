//! Route that makes the proxy's IPv6 addresses local in a pod's namespace, because IPv6 has only
//! one loopback address. IPv4 needs no route: all of 127.0.0.0/8 is local. Start with [`add`].

use std::io;
use std::net::Ipv6Addr;
use std::path::Path;

use canal_abi::capture::{PROXY_V6_BITS, proxy_v6};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

use crate::OffloadError;
use crate::tc_hook::within;

// Numbers of linux/rtnetlink.h and linux/netlink.h.
const RTM_NEWROUTE: u16 = 24;
const NLMSG_ERROR: u16 = 2;
/// Flags NLM_F_REQUEST, ACK, CREATE and REPLACE.
const FLAGS: u16 = 0x1 | 0x4 | 0x400 | 0x100;
const RT_TABLE_LOCAL: u8 = 255;
const RTPROT_STATIC: u8 = 4;
const RTN_LOCAL: u8 = 2;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_PREFSRC: u16 = 7;
/// Index of the loopback device, which is the first device of every namespace.
const LOOPBACK: u32 = 1;
const HEADER_BYTES: usize = 16;

/// Adds the route to the namespace at `netns`; an existing route stays. Returns false if the
/// namespace has no IPv6 on its loopback device.
///
/// # Errors
/// Fails if the namespace cannot be entered or the kernel refuses the route.
pub fn add(netns: &Path) -> Result<bool, OffloadError> {
    let failed = |source| OffloadError::Route {
        netns: netns.to_path_buf(),
        source,
    };
    match within(Some(netns), request)? {
        Ok(()) => Ok(true),
        Err(e) if is_without_ipv6(&e) => Ok(false),
        Err(e) => Err(failed(e)),
    }
}

/// Returns true for the kernel's errors where IPv6 is disabled, or where loopback is down or has no
/// address.
fn is_without_ipv6(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP | libc::EACCES | libc::EINVAL | libc::ENETDOWN)
    )
}

fn request() -> io::Result<()> {
    // Protocol `None` is 0, which is NETLINK_ROUTE.
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    sendto(
        &socket,
        &message(),
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    // The reply is one error message, which quotes the request.
    let mut answer = [0; 1024];
    let (_, n) = recv(&socket, &mut answer, RecvFlags::empty())?;
    let code = answer[..n.min(1024)]
        .get(HEADER_BYTES..HEADER_BYTES + 4)
        .and_then(|b| b.try_into().ok())
        .map(i32::from_ne_bytes);
    match (u16::from_ne_bytes([answer[4], answer[5]]), code) {
        (NLMSG_ERROR, Some(0)) => Ok(()),
        (NLMSG_ERROR, Some(code)) => Err(io::Error::from_raw_os_error(-code)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Builds `struct nlmsghdr`, `struct rtmsg` and three attributes. The preferred source stays the
/// loopback address: it shows that the application did not choose one.
fn message() -> Vec<u8> {
    let mut body = vec![
        libc::AF_INET6 as u8,
        PROXY_V6_BITS,
        0,
        0,
        RT_TABLE_LOCAL,
        RTPROT_STATIC,
        0,
        RTN_LOCAL,
        0,
        0,
        0,
        0,
    ];
    for (kind, value) in [
        (RTA_DST, proxy_v6().octets().to_vec()),
        (RTA_OIF, LOOPBACK.to_ne_bytes().to_vec()),
        (RTA_PREFSRC, Ipv6Addr::LOCALHOST.octets().to_vec()),
    ] {
        body.extend((value.len() as u16 + 4).to_ne_bytes());
        body.extend(kind.to_ne_bytes());
        body.extend(value);
    }
    let mut message = ((HEADER_BYTES + body.len()) as u32).to_ne_bytes().to_vec();
    message.extend(RTM_NEWROUTE.to_ne_bytes());
    message.extend(FLAGS.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message
}
