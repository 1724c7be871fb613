//! Pod guard of the nftables fallback. Rules in the pod's namespace stop or count what the mesh
//! does not carry. Rules on the node's end of its interfaces do so for frames that were written
//! past the pod's stack. The caller decides between stopping and counting. Start with
//! [`NftPodGuard::attach`].
//!
//! It is weaker than `bpf/pod.bpf.c`. On the node's end nft sees no socket, so TCP that a packet
//! socket writes passes. Packet sockets can read what comes in. A process with CAP_NET_ADMIN in the
//! pod can remove the pod's own rules, but not the node's.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use canal_abi::pod::{
    ARP_BYTES_MAX, DNS_PORT, LISTENER_BYTES_MAX, NEIGHBOUR_BYTES_MAX, RESOLVERS_MAX, VERDICTS,
    Verdict, verdict_name,
};

use ipnet::IpNet;

use crate::OffloadError;
use crate::nft::nft;
use crate::peer::{self, OtherEnd};
use crate::pod_guard::{OutsidePackets, UdpExcess, UdpFromTier};

/// Name of the table in the pod's namespace.
const OF_POD: &str = "inet canal_packets";
/// Path of this thread's own network namespace.
const OWN: &str = "/proc/thread-self/ns/net";

/// Matches of packets that the mesh does not carry, each with the last part of its counters' names.
/// The last one matches everything.
const OUTSIDE: [(&str, &str); 4] = [
    ("meta l4proto udp", "udp"),
    ("meta l4proto { icmp, ipv6-icmp }", "icmp"),
    ("meta l4proto sctp", "sctp"),
    ("", "protocol"),
];

/// Node's end of one of the pod's interfaces.
#[derive(Debug, Clone, PartialEq, Eq)]
struct NodeEnd {
    table: String,
    device: String,
}

/// Guard of one pod by nft. Dropping it changes nothing; see [`NftPodGuard::release`].
#[derive(Debug)]
pub struct NftPodGuard {
    netns: PathBuf,
    ends: Vec<NodeEnd>,
    exposed: Vec<String>,
}

fn ends_of(netns: &Path) -> Result<(Vec<NodeEnd>, Vec<String>), OffloadError> {
    let (mut ends, mut exposed) = (Vec::new(), Vec::new());
    for device in peer::devices(netns)? {
        match device.other_end {
            OtherEnd::Inside => {}
            OtherEnd::Here(index) => {
                let name = peer::name_of(index).map_err(|source| OffloadError::Netns {
                    netns: netns.to_path_buf(),
                    source,
                })?;
                ends.push(NodeEnd {
                    table: format!("netdev canal_pod_{index}"),
                    device: name,
                });
            }
            OtherEnd::Outside => exposed.push(device.name),
        }
    }
    Ok((ends, exposed))
}

impl NftPodGuard {
    /// Guards the pod in the namespace at `netns`. A new pod is in mode *stop* until
    /// [`NftPodGuard::set`] changes it. A pod that an earlier process guarded keeps its state. An
    /// interface counts as exposed if this kernel accepts no rules on its node's end.
    ///
    /// # Errors
    /// Fails if the namespace cannot be entered or nft refuses the pod's rules.
    pub fn attach(netns: &Path) -> Result<Self, OffloadError> {
        let (ends, mut exposed) = ends_of(netns)?;
        if !is_there(netns, OF_POD) {
            nft(netns, &pod_rules(OutsidePackets::Stop, &[], false))?;
        }
        let mut taken = Vec::new();
        for end in ends {
            let is_taken = is_there(Path::new(OWN), &end.table)
                || nft(Path::new(OWN), &node_rules(&end, OutsidePackets::Stop, &[]))
                    .inspect_err(|error| tracing::warn!(device = end.device, %error, "pod guard: no rules on the node's end"))
                    .is_ok();
            if is_taken {
                taken.push(end);
            } else {
                exposed.push(end.device);
            }
        }
        Ok(Self {
            netns: netns.to_path_buf(),
            ends: taken,
            exposed,
        })
    }

    /// Sets the treatment of packets that the mesh does not carry, and the resolvers to which DNS
    /// passes in any mode. Returns how many resolvers beyond [`RESOLVERS_MAX`] were omitted.
    ///
    /// # Errors
    /// Returns [`OffloadError::Nft`] if nft refuses the rules.
    pub fn set(
        &self,
        outside: OutsidePackets,
        resolvers: &[IpAddr],
    ) -> Result<usize, OffloadError> {
        let allowed = &resolvers[..resolvers.len().min(RESOLVERS_MAX)];
        // The node's end comes first: it must not stop what the pod's rules let out from now on.
        for end in &self.ends {
            nft(Path::new(OWN), &node_rules(end, outside, allowed))?;
        }
        nft(
            &self.netns,
            &pod_rules(outside, allowed, !self.ends.is_empty()),
        )?;
        Ok(resolvers.len() - allowed.len())
    }

    /// Sets the pod's ports at which datagrams from the tier pass, and their replies. At all other
    /// ports they are stopped. Returns what did not fit.
    ///
    /// # Errors
    /// Returns [`OffloadError::Nft`] if nft refuses the rules.
    pub fn set_udp(&self, udp: &UdpFromTier) -> Result<UdpExcess, OffloadError> {
        let (ports, tier, left_out) = udp.split_at_capacity();
        for end in &self.ends {
            nft(Path::new(OWN), &udp_sets(&end.table, &ports, &tier))?;
        }
        nft(&self.netns, &udp_sets(OF_POD, &ports, &tier))?;
        Ok(left_out)
    }

    /// Returns every verdict and its count since the pod was first guarded.
    ///
    /// # Errors
    /// Returns [`OffloadError::Nft`] if nft does not list the counters.
    pub fn counters(&self) -> Result<Vec<(Verdict, u64)>, OffloadError> {
        let mut all = counts_of(&nft(
            &self.netns,
            &format!("list counters table {OF_POD}\n"),
        )?);
        for end in &self.ends {
            for (name, count) in counts_of(&nft(
                Path::new(OWN),
                &format!("list counters table {}\n", end.table),
            )?) {
                *all.entry(name).or_default() += count;
            }
        }
        Ok(VERDICTS
            .into_iter()
            .map(|verdict| {
                (
                    verdict,
                    all.get(&verdict_name(verdict)).copied().unwrap_or_default(),
                )
            })
            .collect())
    }

    /// Returns the pod's interfaces whose other end is not guarded.
    pub fn exposed_interfaces(&self) -> &[String] {
        &self.exposed
    }

    /// Removes the guard: the pod's packets pass from now on. A namespace that does not exist any
    /// more has no rules either.
    ///
    /// # Errors
    /// Returns [`OffloadError::Nft`] if nft does not remove a table.
    pub fn release(self) -> Result<(), OffloadError> {
        let ends = self
            .ends
            .iter()
            .map(|end| delete(Path::new(OWN), &end.table));
        let ends: Vec<_> = ends.collect();
        let of_pod = if self.netns.exists() {
            delete(&self.netns, OF_POD)
        } else {
            Ok(())
        };
        ends.into_iter().chain([of_pod]).collect()
    }
}

/// Removes the guard from the pod in the namespace at `netns`, even if another process installed
/// it. It is no error if there is none.
///
/// # Errors
/// Fails if the namespace cannot be entered or nft does not remove a table.
pub fn remove(netns: &Path) -> Result<(), OffloadError> {
    let (ends, exposed) = ends_of(netns)?;
    NftPodGuard {
        netns: netns.to_path_buf(),
        ends,
        exposed,
    }
    .release()
}

fn is_there(netns: &Path, table: &str) -> bool {
    nft(netns, &format!("list table {table}\n")).is_ok()
}

fn delete(netns: &Path, table: &str) -> Result<(), OffloadError> {
    nft(netns, &format!("table {table}\ndelete table {table}\n")).map(drop)
}

/// Parses the output of `nft list counters`: a line `counter NAME {`, then `packets N bytes M`.
fn counts_of(listed: &str) -> BTreeMap<String, u64> {
    let words: Vec<&str> = listed.split_ascii_whitespace().collect();
    let counts = words
        .windows(5)
        .filter(|w| w[0] == "counter" && w[2] == "{" && w[3] == "packets");
    counts
        .filter_map(|w| Some((w[1].to_string(), w[4].parse().ok()?)))
        .collect()
}

/// Returns the rule's statements that count a packet and then treat it as `outside` requires.
fn settle(outside: OutsidePackets, reason: &str) -> String {
    match outside {
        OutsidePackets::Stop => format!("counter name stopped_{reason} drop"),
        OutsidePackets::Watch => format!("counter name clear_{reason} accept"),
    }
}

/// Returns a transaction that creates or replaces the table with its `chains` (name, hook, rules).
/// Counters keep their values.
fn transaction(table: &str, chains: &[(&str, String, String)], resolvers: &[IpAddr]) -> String {
    let mut script = format!("table {table} {{\n");
    for verdict in VERDICTS {
        let _ = writeln!(script, "  counter {} {{}}", verdict_name(verdict));
    }
    script += "  set resolvers4 { type ipv4_addr; }\n  set resolvers6 { type ipv6_addr; }\n";
    script += UDP_SETS;
    for (chain, hook, _) in chains {
        let _ = writeln!(
            script,
            "  chain {chain} {{ type filter hook {hook} priority 0; policy accept; }}"
        );
    }
    script += "}\n";
    for (chain, ..) in chains {
        let _ = writeln!(script, "flush chain {table} {chain}");
    }
    for (set, is_v4) in [("resolvers4", true), ("resolvers6", false)] {
        let _ = writeln!(script, "flush set {table} {set}");
        let elements: Vec<String> = resolvers
            .iter()
            .map(IpAddr::to_canonical)
            .filter(|ip| ip.is_ipv4() == is_v4)
            .map(|ip| ip.to_string())
            .collect();
        if !elements.is_empty() {
            let _ = writeln!(
                script,
                "add element {table} {set} {{ {} }}",
                elements.join(", ")
            );
        }
    }
    let _ = writeln!(script, "table {table} {{");
    for (chain, _, rules) in chains {
        let _ = writeln!(script, "  chain {chain} {{\n{rules}  }}");
    }
    script + "}\n"
}

/// Sets that the rules about UDPRoutes' ports refer to; [`NftPodGuard::set_udp`] fills them.
const UDP_SETS: &str = "  set udp_ports { type inet_service; }
  set tier4 { type ipv4_addr; flags interval; auto-merge; }
  set tier6 { type ipv6_addr; flags interval; auto-merge; }\n";

/// Returns a transaction that replaces the contents of the table's UDP sets.
fn udp_sets(table: &str, ports: &BTreeSet<u16>, tier: &BTreeSet<IpNet>) -> String {
    let of_family = |is_v4: bool| {
        tier.iter()
            .filter(|range| range.addr().is_ipv4() == is_v4)
            .map(ToString::to_string)
            .collect()
    };
    let sets: [(&str, Vec<String>); 3] = [
        ("udp_ports", ports.iter().map(ToString::to_string).collect()),
        ("tier4", of_family(true)),
        ("tier6", of_family(false)),
    ];
    let mut script = format!("table {table} {{\n{UDP_SETS}}}\n");
    for (set, elements) in sets {
        let _ = writeln!(script, "flush set {table} {set}");
        if !elements.is_empty() {
            let _ = writeln!(
                script,
                "add element {table} {set} {{ {} }}",
                elements.join(", ")
            );
        }
    }
    script
}

/// Returns rules for resets without a payload, which the kernel sends for connections that
/// conntrack does not know. A raw socket's reset could carry anything behind its header. IP options
/// and extension headers are no kernel's.
fn bare_resets() -> String {
    let mut rules = String::new();
    for words in 5..=15 {
        for (family, header) in [("ip hdrlength 5", 20), ("ip6 nexthdr tcp", 40)] {
            let length = header + 4 * words;
            let _ = writeln!(
                rules,
                "    {family} tcp doff {words} meta length {length} tcp flags & (fin | syn | rst) == rst counter name passed_tcp accept"
            );
        }
    }
    rules
}

/// Returns the rules for the pod's namespace: for what its sockets send, and for what comes in.
/// With `is_counted_outside` the node's end counts what leaves.
fn pod_rules(outside: OutsidePackets, resolvers: &[IpAddr], is_counted_outside: bool) -> String {
    // ICMPv6 types 133 to 137 are neighbour discovery, and 130 to 132 and 143 multicast listener
    // discovery. A hop limit of 255 or 1 proves that the sender is on the same link (RFC 4861, RFC
    // 3810).
    let mut out = format!(
        "    oifname \"lo\" counter name passed_loopback accept
    meta l4proto tcp ct state != invalid counter name passed_tcp accept
{}    meta l4proto tcp {}
    udp dport {DNS_PORT} ip daddr @resolvers4 counter name passed_resolver accept
    udp dport {DNS_PORT} ip6 daddr @resolvers6 counter name passed_resolver accept
    udp sport @udp_ports ip daddr @tier4 counter name passed_udp_route accept
    udp sport @udp_ports ip6 daddr @tier6 counter name passed_udp_route accept
    ip6 hoplimit 255 icmpv6 type {{ 133, 135, 136 }} counter name passed_neighbour accept
    ip6 hoplimit 1 ip6 daddr ff02::/16 icmpv6 type {{ 130, 131, 132, 143 }} counter name passed_neighbour accept\n",
        bare_resets(),
        settle(outside, "tcp")
    );
    // Conntrack relates an error to a packet that was let out: TCP, a query to a resolver, or a
    // reply to the tier.
    // The types are errors alone: unreachable, time exceeded, bad parameter, and for IPv6 too big.
    let mut into = format!(
        "    iifname \"lo\" counter name passed_loopback accept
    meta l4proto tcp counter name passed_tcp accept
    udp sport {DNS_PORT} ip saddr @resolvers4 counter name passed_resolver accept
    udp sport {DNS_PORT} ip6 saddr @resolvers6 counter name passed_resolver accept
    udp dport @udp_ports ip saddr @tier4 counter name passed_udp_route accept
    udp dport @udp_ports ip6 saddr @tier6 counter name passed_udp_route accept
    icmp type {{ 3, 11, 12 }} ct state related counter name passed_error accept
    icmpv6 type {{ 1, 2, 3, 4 }} ct state related counter name passed_error accept
    ip6 hoplimit 255 icmpv6 type {{ 133, 134, 135, 136, 137 }} counter name passed_neighbour accept
    ip6 hoplimit 1 icmpv6 type {{ 130, 131, 132, 143 }} counter name passed_neighbour accept\n"
    );
    for (what, reason) in OUTSIDE {
        // The node's end counts these packets, so this rule must not count them as outside too.
        let leaves = outside == OutsidePackets::Watch && is_counted_outside;
        let settled = if leaves {
            "counter name left_watched accept".to_string()
        } else {
            settle(outside, reason)
        };
        // Writing to a string cannot fail.
        let _ = writeln!(out, "    {what} {settled}");
        let _ = writeln!(into, "    {what} {}", settle(outside, reason));
    }
    transaction(
        OF_POD,
        &[("out", "output".into(), out), ("in", "input".into(), into)],
        resolvers,
    )
}

/// Returns the rules for the node's end of an interface, where everything arrives that leaves the
/// pod. A packet that the pod's own rules would have stopped was written past the pod's stack.
fn node_rules(end: &NodeEnd, outside: OutsidePackets, resolvers: &[IpAddr]) -> String {
    let mut out = format!(
        "    ether type arp meta length <= {ARP_BYTES_MAX} accept
    ether type != {{ ip, ip6 }} {}
    meta l4proto tcp accept
    udp dport {DNS_PORT} ip daddr @resolvers4 accept
    udp dport {DNS_PORT} ip6 daddr @resolvers6 accept
    ip frag-off & 0x1fff != 0 ip protocol udp ip daddr @resolvers4 accept
    ip frag-off & 0x3fff == 0 udp sport @udp_ports ip daddr @tier4 accept
    exthdr frag missing udp sport @udp_ports ip6 daddr @tier6 accept
    ip6 hoplimit 255 icmpv6 type {{ 133, 135, 136 }} meta length <= {NEIGHBOUR_BYTES_MAX} accept
    ip6 hoplimit 1 ip6 daddr ff02::/16 icmpv6 type {{ 130, 131, 132, 143 }} meta length <= {LISTENER_BYTES_MAX} accept\n",
        settle(outside, "frame")
    );
    for (what, reason) in OUTSIDE {
        let reason = if outside == OutsidePackets::Stop {
            "packet_socket"
        } else {
            reason
        };
        let _ = writeln!(out, "    {what} {}", settle(outside, reason));
    }
    transaction(
        &end.table,
        &[("out", format!("ingress device \"{}\"", end.device), out)],
        resolvers,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_as_nft_lists_them() {
        let listed = "table inet canal_packets {\n\tcounter stopped_udp {\n\t\tpackets 3 bytes 120\n\t}\n\tcounter passed_tcp {\n\t\tpackets 0 bytes 0\n\t}\n}\n";
        assert_eq!(
            counts_of(listed),
            [
                ("passed_tcp".to_string(), 0),
                ("stopped_udp".to_string(), 3)
            ]
            .into()
        );
    }

    #[test]
    fn every_counter_that_rules_name_is_a_verdict() {
        let end = NodeEnd {
            table: "netdev canal_pod_7".into(),
            device: "veth7".into(),
        };
        let known: Vec<String> = VERDICTS.into_iter().map(verdict_name).collect();
        for outside in [OutsidePackets::Stop, OutsidePackets::Watch] {
            for script in [
                pod_rules(outside, &[], true),
                pod_rules(outside, &[], false),
                node_rules(&end, outside, &[]),
            ] {
                let words: Vec<&str> = script.split_ascii_whitespace().collect();
                let named = words
                    .windows(3)
                    .filter(|w| w[..2] == ["counter", "name"])
                    .map(|w| w[2]);
                named.for_each(|name| assert!(known.iter().any(|k| k == name), "{name}"));
            }
        }
    }
}
