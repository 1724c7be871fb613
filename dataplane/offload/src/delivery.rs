//! Prepares a pod's network namespace so that the node proxy can connect to its applications from
//! addresses that are not the pod's. Packets with the mark of such connections are delivered
//! inside, replies included. It uses rules and routes (rtnetlink(7)) and three sysctls. The caller
//! decides from which address a connection comes. Start with [`install`].
//!
//! An application that sets the mark itself gains nothing: its packets do not leave the namespace
//! at all. Marks do not cross namespaces, so no process outside can set it.

use std::io;
use std::net::Ipv6Addr;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, sendto, socket_with};

use crate::OffloadError;
use crate::peer::{links, receive};
use crate::tc_hook::within;

/// Routing table whose routes deliver everything locally. The next constant is the preference of
/// the rule that leads marked packets to it. Any number will do that no other routes of the pod
/// use, and a preference before the main table's 32,766.
const TABLE: u32 = 1539;
const RULE_PREFERENCE: u32 = 100;
/// Metric of the routes through devices other than loopback, for sockets that are bound to a
/// device. It ranks them after loopback's route. IPv6 routes without a metric have 1,024.
const DEVICE_METRIC: u32 = 2_000;
const LOOPBACK_INDEX: u32 = 1;
/// Devices of a pod that get a route at most, which is more than any pod has.
const DEVICES_MAX: usize = 64;

/// IPv6 address that applications see as their client where the client's own address cannot be
/// used. It is assigned to no interface, and applications' own rules do not name it. IPv4 uses
/// 127.0.0.6.
pub const SUBSTITUTE_V6: Ipv6Addr = Ipv6Addr::new(0xfd63, 0x616e, 0x616c, 0, 0, 0, 0, 6);

/// Settings by which an accepted socket, and a reset or an ICMP error without a socket, gets the
/// mark of the packet that it replies to.
const SYSCTLS_V4: [&str; 2] = [
    "/proc/sys/net/ipv4/tcp_fwmark_accept",
    "/proc/sys/net/ipv4/fwmark_reflect",
];
const SYSCTL_V6: &str = "/proc/sys/net/ipv6/fwmark_reflect";

// Numbers of linux/rtnetlink.h and linux/fib_rules.h. They belong to the kernel's stable interface.
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
const REQUEST_ACK: u16 = 1 | 4;
const CREATE_EXCLUSIVE: u16 = 0x400 | 0x200;
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
const RTA_PRIORITY: u16 = 6;
const RTA_TABLE: u16 = 15;
const FRA_PRIORITY: u16 = 6;
const FRA_FWMARK: u16 = 10;
const FRA_TABLE: u16 = 15;
const RT_TABLE_LOCAL: u32 = 255;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_HOST: u8 = 254;
const RTN_LOCAL: u8 = 2;
const FR_ACT_TO_TBL: u8 = 1;
const HEADER: usize = 16;

/// Parts of the preparation that a namespace has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Delivery {
    /// True if marked packets are delivered inside.
    pub has_routes: bool,
    /// True if replies are marked as well, so that any address may be a client's.
    pub is_transparent: bool,
    /// True if [`SUBSTITUTE_V6`] is delivered inside without marks.
    pub has_substitute_v6: bool,
    /// Parts that the kernel refused, with the reason; empty if everything is installed.
    pub missing: String,
}

/// Prepares the namespace at `netns` as far as the kernel permits; what exists already stays. `v6`
/// means that the pod has IPv6 addresses.
///
/// # Errors
/// Fails if the namespace cannot be entered. Refusals of the kernel are in [`Delivery::missing`].
pub fn install(netns: &Path, mark: u32, v6: bool) -> Result<Delivery, OffloadError> {
    within(Some(netns), || {
        let mut delivery = Delivery::default();
        let routes = routes(mark, v6);
        let marks = mark_answers(v6);
        delivery.has_routes = routes.is_ok();
        delivery.is_transparent = routes.is_ok() && marks.is_ok();
        delivery.missing = [routes, marks]
            .into_iter()
            .filter_map(Result::err)
            .collect::<Vec<_>>()
            .join("; ");
        if !delivery.is_transparent && v6 {
            delivery.has_substitute_v6 = substitute(RTM_NEWROUTE, CREATE_EXCLUSIVE).is_ok();
        }
        delivery
    })
}

/// Removes rules and routes; it is no error if there are none. The sysctls stay, because they have
/// no effect without marks.
///
/// # Errors
/// Fails if the namespace cannot be entered or the kernel refuses a removal.
pub fn remove(netns: &Path, mark: u32) -> Result<(), OffloadError> {
    let failed = |source| OffloadError::Netns {
        netns: netns.to_path_buf(),
        source,
    };
    let removed = within(Some(netns), || -> io::Result<()> {
        let socket = rtnetlink()?;
        for family in [libc::AF_INET, libc::AF_INET6] {
            ignore_missing(change(&socket, RTM_DELRULE, 0, &rule(family, mark)))?;
            // Each request removes one route, so it is repeated until there is none.
            for _ in 0..=DEVICES_MAX {
                if let Err(ended) =
                    change(&socket, RTM_DELROUTE, 0, &route(family, TABLE, None, &[]))
                {
                    ignore_missing(Err(ended))?;
                    break;
                }
            }
        }
        ignore_missing(substitute(RTM_DELROUTE, 0))
    })?;
    removed.map_err(failed)
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        // These errors mean that there is no such rule, route or device, or that the kernel lacks
        // the address family.
        Err(e)
            if matches!(
                e.raw_os_error(),
                Some(
                    libc::ENOENT
                        | libc::ESRCH
                        | libc::ENODEV
                        | libc::EAFNOSUPPORT
                        | libc::EOPNOTSUPP
                )
            ) =>
        {
            Ok(())
        }
        other => other,
    }
}

fn accept_existing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        other => other,
    }
}

fn routes(mark: u32, v6: bool) -> Result<(), String> {
    let named = |what: &'static str| {
        move |e: io::Error| {
            format!(
                "{what}: {e}; fix: give the process CAP_NET_ADMIN, on a kernel with CONFIG_IP_MULTIPLE_TABLES"
            )
        }
    };
    let socket = rtnetlink().map_err(named("rtnetlink"))?;
    let devices = links(&socket).map_err(named("devices"))?;
    let families = [libc::AF_INET]
        .into_iter()
        .chain(v6.then_some(libc::AF_INET6));
    for family in families {
        // Routes come before the rule, because packets that the rule sends to the table must find a
        // route.
        // A metric below those of the devices: only a socket bound to a device takes that device's
        // route.
        let by_loopback = route(family, TABLE, Some(LOOPBACK_INDEX), &[(RTA_PRIORITY, 1)]);
        accept_existing(change(
            &socket,
            RTM_NEWROUTE,
            CREATE_EXCLUSIVE,
            &by_loopback,
        ))
        .map_err(named("route to loopback"))?;
        let others = devices
            .iter()
            .map(|d| d.index)
            .filter(|index| *index != LOOPBACK_INDEX)
            .take(DEVICES_MAX);
        // Each route has a metric of its own, because the kernel refuses a second route with the
        // same one.
        for (n, index) in (0u32..).zip(others) {
            let by_device = route(
                family,
                TABLE,
                Some(index),
                &[(RTA_PRIORITY, DEVICE_METRIC + n)],
            );
            // This route serves only sockets that are bound to the device; a device that is down
            // has none.
            let _ = change(&socket, RTM_NEWROUTE, CREATE_EXCLUSIVE, &by_device);
        }
        accept_existing(change(
            &socket,
            RTM_NEWRULE,
            CREATE_EXCLUSIVE,
            &rule(family, mark),
        ))
        .map_err(named("rule"))?;
    }
    Ok(())
}

fn mark_answers(v6: bool) -> Result<(), String> {
    for file in SYSCTLS_V4.into_iter().chain(v6.then_some(SYSCTL_V6)) {
        let is_set = std::fs::read_to_string(file).is_ok_and(|value| value.trim() == "1");
        if !is_set {
            std::fs::write(file, "1").map_err(|e| {
                format!("{file}: {e}; fix: let the node proxy write it, or set it to 1 in the pod")
            })?;
        }
    }
    Ok(())
}

fn substitute(kind: u16, flags: u16) -> io::Result<()> {
    let mut message = route(libc::AF_INET6, RT_TABLE_LOCAL, Some(LOOPBACK_INDEX), &[]);
    message[1] = 128;
    attribute(&mut message, RTA_DST, &SUBSTITUTE_V6.octets());
    accept_existing(change(&rtnetlink()?, kind, flags, &message))
}

fn rtnetlink() -> io::Result<OwnedFd> {
    // Protocol `None` is 0, which is NETLINK_ROUTE.
    Ok(socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Sends a change to the kernel and waits for its acknowledgment.
fn change(socket: &OwnedFd, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    let mut message = Vec::with_capacity(HEADER + body.len());
    message.extend(((HEADER + body.len()) as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((REQUEST_ACK | flags).to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    sendto(
        socket,
        &message,
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    receive(socket, &mut |_, _| {}).map(drop)
}

/// Builds the `struct rtmsg` of a route that delivers everything locally.
fn route(family: i32, table: u32, device: Option<u32>, numbers: &[(u16, u32)]) -> Vec<u8> {
    let mut message = vec![
        family as u8,
        0,
        0,
        0,
        0,
        RTPROT_STATIC,
        RT_SCOPE_HOST,
        RTN_LOCAL,
        0,
        0,
        0,
        0,
    ];
    attribute(&mut message, RTA_TABLE, &table.to_ne_bytes());
    if let Some(index) = device {
        attribute(&mut message, RTA_OIF, &index.to_ne_bytes());
    }
    for (kind, value) in numbers {
        attribute(&mut message, *kind, &value.to_ne_bytes());
    }
    message
}

/// Builds the `struct fib_rule_hdr` of the rule for the mark.
fn rule(family: i32, mark: u32) -> Vec<u8> {
    let mut message = vec![family as u8, 0, 0, 0, 0, 0, 0, FR_ACT_TO_TBL, 0, 0, 0, 0];
    for (kind, value) in [
        (FRA_TABLE, TABLE),
        (FRA_FWMARK, mark),
        (FRA_PRIORITY, RULE_PREFERENCE),
    ] {
        attribute(&mut message, kind, &value.to_ne_bytes());
    }
    message
}

/// Appends an attribute. The length of a value is a multiple of four bytes, so it needs no padding.
fn attribute(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    message.extend((4 + value.len() as u16).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(value);
}
