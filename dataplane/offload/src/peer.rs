//! Network devices of a namespace and their other ends, as the kernel lists them (rtnetlink(7)). It
//! changes nothing. Start with [`devices`].

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with,
};

use crate::OffloadError;
use crate::tc_hook::within;

// Numbers of linux/netlink.h, linux/rtnetlink.h, linux/if_link.h and linux/net_namespace.h. They
// belong to the kernel's stable interface.
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWNSID: u16 = 88;
const RTM_GETNSID: u16 = 90;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const REQUEST: u16 = 1;
const DUMP: u16 = 0x300;
const IFLA_IFNAME: u16 = 3;
const IFLA_LINK: u16 = 5;
const IFLA_LINK_NETNSID: u16 = 37;
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
const HEADER: usize = 16;
/// Size in bytes of `struct ifinfomsg`; the next constant is that of `struct rtgenmsg` with its
/// padding.
const LINK: usize = 16;
const NAMESPACE: usize = 4;
const IFF_LOOPBACK: u32 = 8;
/// Size in bytes of the largest block in which the kernel writes its replies.
const BLOCK: usize = 64 << 10;

/// Destination of the frames that a device sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OtherEnd {
    /// The device with this index in this thread's own namespace.
    Here(u32),
    /// Another device of the same namespace, which the frames therefore do not leave.
    Inside,
    /// A device of another namespace, or no device that the kernel knows.
    Outside,
}

/// Network device other than loopback.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) other_end: OtherEnd,
}

/// Network device as the kernel describes it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct LinkInfo {
    pub(crate) index: u32,
    flags: u32,
    name: String,
    link: Option<u32>,
    namespace: Option<i32>,
}

/// Returns the devices of the namespace at `netns`, as seen from this thread's own namespace.
pub(crate) fn devices(netns: &Path) -> Result<Vec<Device>, OffloadError> {
    let failed = |source| OffloadError::Netns {
        netns: netns.to_path_buf(),
        source,
    };
    let own = File::open("/proc/thread-self/ns/net").map_err(failed)?;
    let listed = within(
        Some(netns),
        || -> io::Result<(Vec<LinkInfo>, Option<i32>)> {
            // Protocol `None` is 0, which is NETLINK_ROUTE.
            let socket = socket_with(
                AddressFamily::NETLINK,
                SocketType::RAW,
                SocketFlags::CLOEXEC,
                None,
            )?;
            // Links come first, because the kernel assigns an ID to a namespace only when it lists
            // a link into it.
            let links = links(&socket)?;
            Ok((links, number_of(&socket, &own)?))
        },
    )?;
    let (links, own) = listed.map_err(failed)?;
    Ok(links
        .into_iter()
        .filter(|l| l.flags & IFF_LOOPBACK == 0)
        .map(|l| device(l, own))
        .collect())
}

fn device(link: LinkInfo, own: Option<i32>) -> Device {
    let other_end = match (link.link, link.namespace) {
        (Some(index), Some(of)) if own == Some(of) && index != 0 => OtherEnd::Here(index),
        (Some(_), None) => OtherEnd::Inside,
        _ => OtherEnd::Outside,
    };
    Device {
        name: link.name,
        other_end,
    }
}

/// Returns the name of the device with this index in this thread's own namespace.
pub(crate) fn name_of(index: u32) -> io::Result<String> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    Ok(rustix::net::netdevice::index_to_name(&socket, index)?)
}

fn request(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let mut r = Vec::with_capacity(HEADER + body.len());
    r.extend(((HEADER + body.len()) as u32).to_ne_bytes());
    r.extend(kind.to_ne_bytes());
    r.extend(flags.to_ne_bytes());
    r.extend([0; 8]);
    r.extend(body);
    r
}

/// Returns all devices of the socket's namespace.
pub(crate) fn links(socket: &OwnedFd) -> io::Result<Vec<LinkInfo>> {
    sendto(
        socket,
        &request(RTM_GETLINK, REQUEST | DUMP, &[0; LINK]),
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    let mut links = Vec::new();
    while !receive(socket, &mut |kind, body| {
        if kind == RTM_NEWLINK {
            links.extend(link(body));
        }
    })? {}
    Ok(links)
}

/// Returns the ID by which the socket's namespace knows `namespace`; `None` if it has no ID.
fn number_of(socket: &OwnedFd, namespace: &File) -> io::Result<Option<i32>> {
    let mut body = vec![0; NAMESPACE];
    body.extend(8u16.to_ne_bytes());
    body.extend(NETNSA_FD.to_ne_bytes());
    body.extend(namespace.as_fd().as_raw_fd().to_ne_bytes());
    sendto(
        socket,
        &request(RTM_GETNSID, REQUEST, &body),
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    let mut number = None;
    receive(socket, &mut |kind, body| {
        if kind == RTM_NEWNSID {
            each_attribute(body.get(NAMESPACE..).unwrap_or_default(), |of, value| {
                number = value
                    .try_into()
                    .ok()
                    .map(i32::from_ne_bytes)
                    .filter(|n| of == NETNSA_NSID && *n >= 0)
                    .or(number);
            });
        }
    })?;
    Ok(number)
}

/// Receives one block of messages. Returns true if it was the last.
pub(crate) fn receive(socket: &OwnedFd, each: &mut dyn FnMut(u16, &[u8])) -> io::Result<bool> {
    let mut block = vec![0; BLOCK];
    let (_, n) = recv(socket, &mut block, RecvFlags::empty())?;
    read(&block[..n.min(BLOCK)], each)
}

/// Parses one block of messages. A truncated message ends the block.
fn read(mut block: &[u8], each: &mut dyn FnMut(u16, &[u8])) -> io::Result<bool> {
    while let (Some(length), Some(kind)) = (
        bytes(block, 0).map(u32::from_ne_bytes),
        bytes(block, 4).map(u16::from_ne_bytes),
    ) {
        let Some(body) = block.get(HEADER..length as usize) else {
            break;
        };
        match kind {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => {
                let code = bytes(body, 0).map_or(libc::EBADMSG, |b| -i32::from_ne_bytes(b));
                return if code == 0 {
                    Ok(true)
                } else {
                    Err(io::Error::from_raw_os_error(code))
                };
            }
            kind => each(kind, body),
        }
        block = block
            .get((length as usize).next_multiple_of(4)..)
            .unwrap_or_default();
    }
    Ok(false)
}

fn bytes<const N: usize>(of: &[u8], at: usize) -> Option<[u8; N]> {
    of.get(at..at + N)?.try_into().ok()
}

fn each_attribute(mut attributes: &[u8], mut each: impl FnMut(u16, &[u8])) {
    while let (Some(length), Some(kind)) = (
        bytes(attributes, 0).map(u16::from_ne_bytes),
        bytes(attributes, 2).map(u16::from_ne_bytes),
    ) {
        let length = usize::from(length);
        let Some(value) = attributes.get(4..length) else {
            return;
        };
        // The two upper bits of the kind are flags.
        each(kind & 0x3fff, value);
        attributes = attributes
            .get(length.next_multiple_of(4)..)
            .unwrap_or_default();
    }
}

fn link(body: &[u8]) -> Option<LinkInfo> {
    let mut link = LinkInfo {
        index: u32::from_ne_bytes(bytes(body, 4)?),
        flags: u32::from_ne_bytes(bytes(body, 8)?),
        ..LinkInfo::default()
    };
    each_attribute(body.get(LINK..)?, |kind, value| match kind {
        IFLA_IFNAME => {
            link.name = String::from_utf8_lossy(value)
                .trim_end_matches('\0')
                .to_string()
        }
        IFLA_LINK => link.link = value.try_into().ok().map(u32::from_ne_bytes),
        IFLA_LINK_NETNSID => link.namespace = value.try_into().ok().map(i32::from_ne_bytes),
        _ => {}
    });
    Some(link)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_devices_other_end_is_here_only_in_this_namespace() {
        let of = |link, namespace| {
            device(
                LinkInfo {
                    index: 2,
                    flags: 0,
                    name: "eth0".into(),
                    link,
                    namespace,
                },
                Some(3),
            )
            .other_end
        };
        assert_eq!(of(Some(7), Some(3)), OtherEnd::Here(7));
        assert_eq!(
            of(Some(7), Some(4)),
            OtherEnd::Outside,
            "another namespace's device of that number"
        );
        assert_eq!(of(Some(7), None), OtherEnd::Inside);
        assert_eq!(
            of(None, None),
            OtherEnd::Outside,
            "a device without another end"
        );
    }

    #[test]
    fn a_block_that_is_cut_short_is_read_as_far_as_it_goes() {
        let mut body = vec![0; LINK];
        body[8] = 1;
        body.extend([9, 0, 3, 0, b'e', b't', b'h', b'0', 0, 0, 0, 0]);
        body.extend([8, 0, 5, 0, 7, 0, 0, 0]);
        let block = request(RTM_NEWLINK, 0, &body);
        for cut in 0..block.len() {
            let mut seen = 0;
            assert!(
                !read(&block[..cut], &mut |_, _| seen += 1).unwrap() && seen == 0,
                "{cut}"
            );
        }
        let mut found = None;
        assert!(!read(&block, &mut |_, body| found = link(body)).unwrap());
        assert_eq!(
            found,
            Some(LinkInfo {
                index: 0,
                flags: 1,
                name: "eth0".into(),
                link: Some(7),
                namespace: None
            })
        );
    }
}
