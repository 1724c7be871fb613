//! The replica's one VXLAN device and the configuration that sends packets into it: addresses,
//! routes, rules, the neighbor entry, sysctls. The `ip` program sets them up, because operators
//! inspect them with `ip` too. [`decide_batch`] decides what to do, without IO. Start with
//! [`make`].

use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::{Command, Stdio};

use canal_abi::tier::{EDGE_MAC, REPLICA_MAC, TIER_NET6, VXLAN_PORT};

use crate::OffloadError;

/// Name of the tunnel device.
pub(crate) const TUNNEL_DEVICE: &str = "tier0";
/// Routing table of everything that leaves through the device. The next three are the preferences
/// of the rules that lead to it. They select packets from services, marked packets, and the
/// kernel's ICMPv6 errors about services, whose source the program on the device rewrites to the
/// service's. The numbers are the first byte of the services' network, 240.0.0.0/8, and those
/// behind it. Preferences below 32,766 come before the main table.
const TABLE: u32 = 240;
const RULE_SERVICE: u32 = 240;
const RULE_MARK: u32 = 241;
const RULE_ERROR: u32 = 242;
const SERVICE4: &str = "240.0.0.0/8";
const SERVICE6: &str = "fdca:a1:0:240::/96";
/// Addresses of the edge as a neighbor on the device. Any addresses will do, because no packet is
/// sent to them.
const NEXT4: &str = "169.254.202.1";
const NEXT6: &str = "fe80::ca:1";

/// Desired properties of the tunnel device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TunnelDevice {
    pub(crate) address: Ipv4Addr,
    pub(crate) mtu: u32,
    pub(crate) port: u16,
    pub(crate) ports: u16,
}

/// Actual state of the device and the rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct TunnelDeviceState {
    /// Output of `ip -details -oneline link show`; `None` if there is no such device.
    link: Option<String>,
    /// Output of `ip rule show` for each family.
    rules4: String,
    rules6: String,
    has_ipv6: bool,
}

fn mac(m: [u8; 6]) -> String {
    m.map(|b| format!("{b:02x}")).join(":")
}

fn source_ports(t: &TunnelDevice) -> Option<String> {
    // The kernel excludes the last port.
    let end = u32::from(t.port) + u32::from(t.ports);
    (t.ports > 0).then(|| format!("srcport {} {}", t.port, end.min(65535)))
}

/// Returns true if the existing device is the desired one, as far as a property cannot be changed
/// on an existing device.
fn fits(link: &str, t: &TunnelDevice) -> bool {
    let ports = source_ports(t).unwrap_or_else(|| "srcport 0 0".into());
    link.contains("vxlan external")
        && link.contains(&format!("dstport {VXLAN_PORT} "))
        && link.contains(&format!("{ports} "))
}

fn has_rule(rules: &str, preference: u32) -> bool {
    rules
        .lines()
        .any(|l| l.starts_with(&format!("{preference}:")))
}

/// Returns the commands that turn the actual state into the desired one, for `ip -4 -batch` and `ip
/// -6 -batch`. Commands that must not be repeated are left out if they have been executed already.
fn decide_batch(found: &TunnelDeviceState, t: &TunnelDevice) -> [Vec<String>; 2] {
    let dev = TUNNEL_DEVICE;
    let mut b = Vec::new();
    // These properties of an existing device cannot be changed, so it is replaced.
    if found.link.as_deref().is_some_and(|l| !fits(l, t)) {
        b.push(format!("link del {dev}"));
    }
    if !found.link.as_deref().is_some_and(|l| fits(l, t)) {
        // Without ports of its own, the kernel selects the source port by the flow.
        let ports = source_ports(t).unwrap_or_default();
        b.push(
            format!(
                "link add {dev} address {} type vxlan external dstport {VXLAN_PORT} {ports}",
                mac(REPLICA_MAC)
            )
            .trim_end()
            .into(),
        );
        if found.has_ipv6 {
            // The device needs no link-local address, for which the kernel would send discovery
            // packets.
            b.push(format!("link set {dev} addrgenmode none"));
        }
    }
    b.push(format!("link set {dev} mtu {} up", t.mtu));
    // No interface has the services' addresses, so this route makes their sessions local.
    b.push(format!("route replace local {SERVICE4} dev lo"));
    b.push(format!(
        "neigh replace {NEXT4} lladdr {} nud permanent dev {dev}",
        mac(EDGE_MAC)
    ));
    // `onlink`, because the device has no IPv4 subnet in which the neighbor would be.
    b.push(format!(
        "route replace default via {NEXT4} dev {dev} onlink table {TABLE}"
    ));
    // Unlike `route replace`, `rule add` must not be repeated.
    if !has_rule(&found.rules4, RULE_SERVICE) {
        b.push(format!(
            "rule add pref {RULE_SERVICE} from {SERVICE4} lookup {TABLE}"
        ));
    }
    // Packets of a connection that the gateway dials have the tenant's VNI as their mark, so any
    // mark but 0 selects the table.
    if !has_rule(&found.rules4, RULE_MARK) {
        b.push(format!(
            "rule add pref {RULE_MARK} not fwmark 0/0xffffffff lookup {TABLE}"
        ));
    }
    let v4 = std::mem::take(&mut b);
    if !found.has_ipv6 {
        return [v4, b];
    }
    // The replica's inner address contains its underlay address, from which other hosts derive it.
    let own = Ipv6Addr::from_bits(u128::from(TIER_NET6) << 64 | u128::from(t.address.to_bits()));
    // `nodad`, because no other host answers on the device, and detection would delay the address.
    b.push(format!("addr replace {own}/128 dev {dev} nodad"));
    b.push(format!("route replace local {SERVICE6} dev lo"));
    b.push(format!(
        "neigh replace {NEXT6} lladdr {} nud permanent dev {dev}",
        mac(EDGE_MAC)
    ));
    b.push(format!(
        "route replace default via {NEXT6} dev {dev} table {TABLE}"
    ));
    if !has_rule(&found.rules6, RULE_SERVICE) {
        b.push(format!(
            "rule add pref {RULE_SERVICE} from {SERVICE6} lookup {TABLE}"
        ));
    }
    if !has_rule(&found.rules6, RULE_MARK) {
        b.push(format!(
            "rule add pref {RULE_MARK} not fwmark 0/0xffffffff lookup {TABLE}"
        ));
    }
    // ICMPv6 errors of the replica itself come from its own address, which the rule for services
    // does not cover.
    if !has_rule(&found.rules6, RULE_ERROR) {
        b.push(format!(
            "rule add pref {RULE_ERROR} from {own} ipproto ipv6-icmp lookup {TABLE}"
        ));
    }
    [v4, b]
}

/// Settings of the namespace and of the device, under /proc/sys/net.
const SYSCTLS: &[(&str, &str)] = &[
    // Tenants' addresses are routed by mark or by source, so there is no reverse path for an
    // address alone.
    ("ipv4/conf/tier0/rp_filter", "0"),
    ("ipv4/conf/tier0/src_valid_mark", "1"),
    // TCP metrics learned about a pod's address must not be applied to another tenant's pod with
    // that address.
    ("ipv4/tcp_no_metrics_save", "1"),
    // Replies of the kernel itself must go to the tenant whose packet they answer.
    ("ipv4/fwmark_reflect", "1"),
    ("ipv6/fwmark_reflect", "1"),
    // A local route makes IPv4 addresses bindable, IPv6 ones not. Without this, a reply to a
    // datagram could not have the service's address as its source.
    ("ipv6/ip_nonlocal_bind", "1"),
    ("ipv6/conf/tier0/accept_ra", "0"),
    ("ipv6/conf/tier0/accept_dad", "0"),
    ("ipv6/conf/tier0/router_solicitations", "0"),
];

fn failed(step: &str, why: impl std::fmt::Display) -> OffloadError {
    OffloadError::Tunnel {
        step: step.to_string(),
        why: why.to_string(),
    }
}

fn ip(args: &[&str], input: Option<&str>) -> Result<(bool, String, String), OffloadError> {
    let no_ip = |e: std::io::Error| failed("running ip", format!("{e}; install iproute2"));
    let mut child = Command::new("ip")
        .args(args)
        .stdin(if input.is_some() {
            Stdio::piped()
        } else {
            Stdio::null()
        })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(no_ip)?;
    if let (Some(text), Some(mut stdin)) = (input, child.stdin.take()) {
        stdin.write_all(text.as_bytes()).map_err(no_ip)?;
    }
    let out = child.wait_with_output().map_err(no_ip)?;
    let text = |b: Vec<u8>| String::from_utf8_lossy(&b).trim().to_string();
    Ok((out.status.success(), text(out.stdout), text(out.stderr)))
}

fn find() -> Result<TunnelDeviceState, OffloadError> {
    let rules = |family| ip(&[family, "rule", "show"], None).map(|(_, text, _)| text);
    let has_ipv6 = fs::read_to_string("/proc/sys/net/ipv6/conf/default/disable_ipv6")
        .is_ok_and(|off| off.trim() == "0");
    let (is_there, link, _) = ip(
        &["-details", "-oneline", "link", "show", "dev", TUNNEL_DEVICE],
        None,
    )?;
    Ok(TunnelDeviceState {
        link: is_there.then_some(link),
        rules4: rules("-4")?,
        rules6: if has_ipv6 {
            rules("-6")?
        } else {
            String::new()
        },
        has_ipv6,
    })
}

fn batch(batches: &[Vec<String>; 2]) -> Result<(), OffloadError> {
    for (family, lines) in ["-4", "-6"]
        .into_iter()
        .zip(batches)
        .filter(|(_, lines)| !lines.is_empty())
    {
        let (done, _, stderr) = ip(&[family, "-batch", "-"], Some(&(lines.join("\n") + "\n")))?;
        if !done {
            return Err(failed(
                &format!("ip {family} -batch ({})", lines.join("; ")),
                stderr,
            ));
        }
    }
    Ok(())
}

/// Creates the device and everything that leads to it, in this thread's network namespace. What
/// exists and is correct stays.
pub(crate) fn make(t: &TunnelDevice) -> Result<(), OffloadError> {
    let found = find()?;
    batch(&decide_batch(&found, t))?;
    for (name, value) in SYSCTLS
        .iter()
        .filter(|(name, _)| found.has_ipv6 || !name.starts_with("ipv6"))
    {
        let path = Path::new("/proc/sys/net").join(name);
        // A correct setting need not be writable: in containers /proc/sys is often read-only.
        if fs::read_to_string(&path).is_ok_and(|now| now.trim() == *value) {
            continue;
        }
        fs::write(&path, value)
            .map_err(|e| failed(&format!("setting {} to {value}", path.display()), e))?;
    }
    Ok(())
}

/// Removes the device, rules and routes; the sysctls stay.
pub(crate) fn remove() -> Result<(), OffloadError> {
    let found = find()?;
    let mut b: [Vec<String>; 2] = [&found.rules4, &found.rules6].map(|rules| {
        [RULE_SERVICE, RULE_MARK, RULE_ERROR]
            .into_iter()
            .filter(|p| has_rule(rules, *p))
            .map(|p| format!("rule del pref {p}"))
            .collect()
    });
    if found.link.is_some() {
        b[0].push(format!("link del {TUNNEL_DEVICE}"));
    }
    batch(&b)?;
    // A missing route is no error, and `ip` cannot test for one in a single command.
    for (family, net) in [("-4", SERVICE4), ("-6", SERVICE6)] {
        ip(&[family, "route", "del", "local", net, "dev", "lo"], None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const WANTED: TunnelDevice = TunnelDevice {
        address: Ipv4Addr::new(250, 1, 0, 3),
        mtu: 1450,
        port: 40_000,
        ports: 20,
    };

    #[test]
    fn only_missing_links_are_created() {
        // The links differ only in their source ports, which cannot be changed on a device.
        let link = "7: tier0: <BROADCAST> mtu 1450 \\ vxlan external id 0 srcport 40000 40020 dstport 4789 ttl auto ageing 300 ";
        let other = "7: tier0: <BROADCAST> mtu 1450 \\ vxlan external id 0 srcport 40000 40040 dstport 4789 ttl auto ageing 300 ";
        let rules = "0:\tfrom all lookup local\n240:\tfrom 240.0.0.0/8 lookup 240\n241:\tnot from all fwmark 0/0xffffffff lookup 240\n\
                     242:\tfrom fdca:a1:0:250::fa01:3 ipproto ipv6-icmp lookup 240\n";
        let found = |link: Option<&str>, rules: &str, has_ipv6| TunnelDeviceState {
            link: link.map(str::to_string),
            rules4: rules.into(),
            rules6: rules.into(),
            has_ipv6,
        };
        for (case, found, adds, dels, rules, v6) in [
            // IPv4 has two rules, and IPv6 a third for its ICMP errors.
            ("nothing there", found(None, "", true), true, false, 5, true),
            (
                "all there",
                found(Some(link), rules, true),
                false,
                false,
                0,
                true,
            ),
            (
                "other source ports",
                found(Some(other), rules, true),
                true,
                true,
                0,
                true,
            ),
            ("no IPv6", found(None, "", false), true, false, 2, false),
        ] {
            let b = decide_batch(&found, &WANTED).concat();
            let has = |what: &str| b.iter().any(|l| l.contains(what));
            let counted = b.iter().filter(|l| l.contains("rule add")).count();
            assert_eq!(
                (has("link add"), has("link del"), counted, has("fdca")),
                (adds, dels, rules, v6),
                "{case}: {b:#?}"
            );
        }
    }

    #[test]
    fn ports_end_where_ports_end() {
        for (port, ports, expected) in [
            (40_000, 20, Some("srcport 40000 40020")),
            (65_530, 20, Some("srcport 65530 65535")),
            (1, 0, None),
        ] {
            assert_eq!(
                source_ports(&TunnelDevice {
                    port,
                    ports,
                    ..WANTED
                })
                .as_deref(),
                expected
            );
        }
    }
}
