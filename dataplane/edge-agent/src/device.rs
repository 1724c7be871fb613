//! Reads a device's MTU by rtnetlink (rtnetlink(7)). sysfs may show another network namespace than
//! this process's.

use std::io;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType};

/// Numbers of linux/rtnetlink.h, linux/netlink.h and linux/if_link.h. They belong to the kernel's
/// stable interface.
const RTM_GETLINK: u16 = 18;
const RTM_NEWLINK: u16 = 16;
const NLM_F_REQUEST: u16 = 1;
const IFLA_MTU: u16 = 4;
/// Sizes of `struct nlmsghdr` and `struct ifinfomsg`.
const HEADER: usize = 16;
const LINK: usize = 16;

/// Returns the MTU of `device` in this thread's network namespace, in bytes.
///
/// # Errors
/// Returns the error of the system call, or `InvalidData` if the kernel's answer contains no MTU.
pub fn mtu(device: &str) -> io::Result<u32> {
    // Without a protocol, the kernel uses 0, which is NETLINK_ROUTE.
    let socket = rustix::net::socket(AddressFamily::NETLINK, SocketType::RAW, None)?;
    let any = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    let index = rustix::net::netdevice::name_to_index(&any, device)?;
    let mut request = Vec::with_capacity(HEADER + LINK);
    request.extend(((HEADER + LINK) as u32).to_ne_bytes());
    request.extend(RTM_GETLINK.to_ne_bytes());
    request.extend(NLM_F_REQUEST.to_ne_bytes());
    // Sequence number and port stay 0: this is the only message on its socket.
    request.extend([0; 8]);
    // Family and type 0 match any.
    request.extend([0; 4]);
    request.extend(index.to_ne_bytes());
    // The flags and their mask are 0.
    request.extend([0; 8]);
    rustix::net::sendto(
        &socket,
        &request,
        SendFlags::empty(),
        &SocketAddrNetlink::new(0, 0),
    )?;
    // The kernel's reply about one device has a few KiB.
    let mut answer = vec![0; 64 << 10];
    let (_, got) = rustix::net::recv(&socket, answer.as_mut_slice(), RecvFlags::empty())?;
    answer.truncate(got);
    read(&answer).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "the kernel's answer about the device contains no MTU",
        )
    })
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// Returns the MTU in an RTM_NEWLINK message.
fn read(answer: &[u8]) -> Option<u32> {
    if word(answer, 4)? != RTM_NEWLINK {
        return None;
    }
    let mut rest = answer.get(HEADER + LINK..)?;
    loop {
        let (length, kind) = (usize::from(word(rest, 0)?), word(rest, 2)?);
        if kind == IFLA_MTU {
            return Some(u32::from_ne_bytes(rest.get(4..8)?.try_into().ok()?));
        }
        // Attributes are aligned to four bytes and include their own header of four bytes.
        rest = rest.get(length.max(4).next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_device_has_one_and_a_missing_device_is_named_an_error() {
        let kernel_mtu: u32 = std::fs::read_to_string("/sys/class/net/lo/mtu")
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        assert_eq!(mtu("lo").unwrap(), kernel_mtu);
        assert!(mtu("canal-none").is_err());
    }

    #[test]
    fn a_truncated_answer_yields_no_mtu() {
        for torn in [&[][..], &[0; 16], &[0; 40]] {
            assert_eq!(read(torn), None);
        }
    }
}
