//! Resolves Node objects: which of the tenant's pod addresses are behind which tunnel endpoint.
//! Only edges need them.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{AzName, NodeName};
use canal_model::policy::kubernetes::{self, VTEP_MAC_ANNOTATION, ZONE_LABEL};
use canal_model::program::{Node, Tenant};
use canal_model::tier::overlap;
use ipnet::IpNet;

use super::tenant_objects::Sourced;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{NODES_PER_TENANT_MAX, RANGES_PER_NODE_MAX};

/// Type of the address by which nodes reach each other.
const INTERNAL_IP: &str = "InternalIP";

/// Returns the nodes of a tenant on the cloud tier, sorted by name. Nodes with an error in a
/// required field are left out.
pub(crate) fn resolve(
    tenant: Option<&Tenant>,
    declared: &[Sourced<'_, kubernetes::Node>],
    report: &mut DiagnosticCollector,
) -> Vec<Node> {
    // A diagnostic of the Tenant already says that it is absent or invalid.
    let Some(tenant) = tenant else {
        return Vec::new();
    };
    if tenant.gateway_cidrs.is_empty() {
        for node in declared {
            let problem = "the tenant is not on the cloud tier, so its nodes are not used";
            report.warning(
                Code::NotOnCloudTier,
                node.document,
                "",
                problem,
                "leave it to Kubernetes, or write gatewayCidrs in the Tenant",
            );
        }
        return Vec::new();
    }
    if let Some(first) = declared.get(NODES_PER_TENANT_MAX) {
        let problem = format!(
            "the tenant has {} nodes, more than {NODES_PER_TENANT_MAX}; from this one on they are left out",
            declared.len()
        );
        report.refuse_excess(
            first.document,
            "",
            problem,
            "remove nodes or split the tenant",
        );
    }
    let mut taken = ClaimedNodeRanges::default();
    let mut nodes: Vec<Node> = Vec::new();
    for node in declared.iter().take(NODES_PER_TENANT_MAX) {
        nodes.extend(read(tenant, node, &mut taken, report));
    }
    nodes.sort_by(|a, b| a.name.cmp(&b.name));
    nodes
}

/// Addresses and ranges that older nodes of the tenant have.
#[derive(Default)]
struct ClaimedNodeRanges {
    underlay: BTreeMap<Ipv4Addr, NodeName>,
    /// Ranges by their first address. They do not overlap.
    ranges: BTreeMap<std::net::IpAddr, (IpNet, NodeName)>,
}

impl ClaimedNodeRanges {
    /// Returns the older node's range that overlaps `net`. Only the last range that starts before
    /// the end of `net` can overlap it.
    fn overlapping(&self, net: &IpNet) -> Option<&(IpNet, NodeName)> {
        let (_, last) = self.ranges.range(..=net.broadcast()).next_back()?;
        overlap(&last.0, net).then_some(last)
    }
}

fn read(
    tenant: &Tenant,
    sourced: &Sourced<'_, kubernetes::Node>,
    taken: &mut ClaimedNodeRanges,
    report: &mut DiagnosticCollector,
) -> Option<Node> {
    let name = NodeName::new(sourced.object.metadata.name.as_str()).ok()?;
    // All fields are read before any error returns, so that all errors are reported at once.
    let (az, mac, underlay) = (
        zone(sourced, report),
        mac(sourced, report),
        underlay(sourced, taken, report),
    );
    let pod_cidrs = ranges(tenant, sourced, taken, report);
    let node = Node {
        tenant: tenant.name.clone(),
        name,
        az: az?,
        underlay: underlay?,
        mac: mac?,
        pod_cidrs: pod_cidrs?,
    };
    taken.underlay.insert(node.underlay, node.name.clone());
    taken.ranges.extend(
        node.pod_cidrs
            .iter()
            .map(|net| (net.network(), (*net, node.name.clone()))),
    );
    Some(node)
}

fn zone(
    sourced: &Sourced<'_, kubernetes::Node>,
    report: &mut DiagnosticCollector,
) -> Option<AzName> {
    let field = format!("metadata.labels[{ZONE_LABEL:?}]");
    let Some(written) = sourced.object.metadata.labels.get(ZONE_LABEL) else {
        report.error(
            Code::UnknownZone,
            sourced.document,
            field,
            "the node does not name its AZ",
            "label it with the AZ's name",
        );
        return None;
    };
    AzName::new(written)
        .map_err(|error| {
            report.error(
                Code::UnknownZone,
                sourced.document,
                field,
                error.problem(),
                error.fix(),
            )
        })
        .ok()
}

fn mac(
    sourced: &Sourced<'_, kubernetes::Node>,
    report: &mut DiagnosticCollector,
) -> Option<[u8; 6]> {
    let field = format!("metadata.annotations[{VTEP_MAC_ANNOTATION:?}]");
    let fix = "write the MAC of its tunnel device, as 02:00:5e:10:00:01";
    let Some(written) = sourced.object.metadata.annotations.get(VTEP_MAC_ANNOTATION) else {
        report.error(
            Code::InvalidNode,
            sourced.document,
            field,
            "the node does not name the MAC of its tunnel device",
            fix,
        );
        return None;
    };
    match parse_mac(written) {
        // The lowest bit of the first byte marks a group address (IEEE 802), and no device has all
        // zeros.
        Some(mac) if mac[0] & 1 == 0 && mac != [0; 6] => Some(mac),
        Some(_) => {
            report.error(
                Code::InvalidNode,
                sourced.document,
                field,
                format!("{written} is not a unicast MAC address"),
                fix,
            );
            None
        }
        None => {
            // A diagnostic stays within a line, however long the annotation is.
            let shown: String = written.chars().take(80).collect();
            report.error(
                Code::InvalidNode,
                sourced.document,
                field,
                format!("{shown:?} is not a MAC address"),
                fix,
            );
            None
        }
    }
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let byte = |pair: &str| {
        u8::from_str_radix(pair, 16)
            .ok()
            .filter(|_| pair.len() == 2 && !pair.starts_with('+'))
    };
    let bytes: Vec<u8> = text.split(':').map(byte).collect::<Option<_>>()?;
    bytes.try_into().ok()
}

fn underlay(
    sourced: &Sourced<'_, kubernetes::Node>,
    taken: &ClaimedNodeRanges,
    report: &mut DiagnosticCollector,
) -> Option<Ipv4Addr> {
    let mut addresses = sourced
        .object
        .status
        .addresses
        .iter()
        .enumerate()
        .filter(|(_, address)| address.kind == INTERNAL_IP);
    // The tier's underlay is IPv4, so an IPv6 address of the node is passed over.
    let Some((at, address)) = addresses.find(|(_, address)| !address.address.contains(':')) else {
        let problem = "the node has no IPv4 address of type InternalIP, so no edge can reach it";
        report.error(
            Code::InvalidNode,
            sourced.document,
            "status.addresses",
            problem,
            "write the underlay address of its tunnel end",
        );
        return None;
    };
    let field = format!("status.addresses[{at}].address");
    let fix = "write the underlay address of its tunnel end";
    match address.address.parse::<Ipv4Addr>() {
        // 0.0.0.0/8 stands for hosts of the present network (RFC 1122 §3.2.1.3).
        Ok(v4)
            if v4.is_loopback()
                || v4.is_multicast()
                || v4.is_broadcast()
                || v4.octets()[0] == 0 =>
        {
            report.error(
                Code::ReservedAddress,
                sourced.document,
                field,
                format!("{v4} is not an address that a host can have on a network"),
                fix,
            );
            None
        }
        Ok(v4) => match taken.underlay.get(&v4) {
            Some(other) => {
                report.error(
                    Code::AddressConflict,
                    sourced.document,
                    field,
                    format!("{v4} is already the address of Node {other}"),
                    fix,
                );
                None
            }
            None => Some(v4),
        },
        Err(_) => {
            // A diagnostic stays within a line, however long the address is.
            let shown: String = address.address.chars().take(80).collect();
            report.error(
                Code::InvalidNode,
                sourced.document,
                field,
                format!("{shown:?} is not an IPv4 address"),
                fix,
            );
            None
        }
    }
}

/// Returns the valid ranges of a node, or `None` if there is none. A valid range is inside the
/// tenant's ranges and not an older node's.
fn ranges(
    tenant: &Tenant,
    sourced: &Sourced<'_, kubernetes::Node>,
    taken: &ClaimedNodeRanges,
    report: &mut DiagnosticCollector,
) -> Option<Vec<IpNet>> {
    let spec = &sourced.object.spec;
    // As in Kubernetes, `podCIDR` repeats the first of `podCIDRs`.
    let written: Vec<(String, IpNet)> = if spec.pod_cidrs.is_empty() {
        spec.pod_cidr
            .iter()
            .map(|net| ("spec.podCIDR".to_owned(), net.trunc()))
            .collect()
    } else {
        spec.pod_cidrs
            .iter()
            .enumerate()
            .map(|(at, net)| (format!("spec.podCIDRs[{at}]"), net.trunc()))
            .collect()
    };
    // A range that could not be parsed has a diagnostic already.
    if written.is_empty() && sourced.fault("spec").is_none() {
        report.error(
            Code::MissingRange,
            sourced.document,
            "spec.podCIDR",
            "the node has no range for its pods",
            "write the range of its pods' addresses",
        );
    }
    if let Some((field, _)) = written.get(RANGES_PER_NODE_MAX) {
        let problem = format!(
            "the node has {} ranges, more than {RANGES_PER_NODE_MAX}; the rest is left out",
            written.len()
        );
        report.refuse_excess(sourced.document, field.clone(), problem, "join ranges");
    }
    let mut good: Vec<IpNet> = Vec::new();
    for (field, net) in written.into_iter().take(RANGES_PER_NODE_MAX) {
        if !tenant.pod_cidrs.iter().any(|range| range.contains(&net)) {
            let problem = format!("{net} is in none of the tenant's pod ranges");
            report.error(
                Code::AddressOutsideRanges,
                sourced.document,
                field,
                problem,
                "choose a part of the Tenant's spec.podCidrs",
            );
        } else if let Some((other, node)) = taken.overlapping(&net) {
            report.error(
                Code::OverlappingRanges,
                sourced.document,
                field,
                format!("{net} overlaps {other} of Node {node}"),
                "give every node a range of its own",
            );
        } else if let Some(other) = good.iter().find(|other| overlap(other, &net)) {
            report.error(
                Code::OverlappingRanges,
                sourced.document,
                field,
                format!("{net} overlaps the node's own {other}"),
                "remove one of them",
            );
        } else {
            good.push(net);
        }
    }
    (!good.is_empty()).then_some(good)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_is_six_pairs() {
        for (text, mac) in [
            ("02:00:5e:10:00:01", Some([2, 0, 0x5e, 0x10, 0, 1])),
            ("02:00:5E:10:00:01", Some([2, 0, 0x5e, 0x10, 0, 1])),
            ("02:00:5e:10:00", None),
            ("02:00:5e:10:00:01:02", None),
            ("2:0:5e:10:0:1", None),
            ("02-00-5e-10-00-01", None),
            ("+2:00:5e:10:00:01", None),
            ("é2:00:5e:10:00:01", None),
            ("", None),
        ] {
            assert_eq!(parse_mac(text), mac, "{text:?}");
        }
    }
}
