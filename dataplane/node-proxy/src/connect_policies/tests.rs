//! Tests that the tables refuse exactly what the routing decision refuses.

use std::net::{IpAddr, SocketAddr};

use canal_model::program as p;

use super::*;
use crate::routing::tests::pod;
use crate::routing::{OutboundRoute, decide_outbound};

/// Evaluates the tables as `refusal_of` in bpf/capture.bpf.c does. The kernel's own results are in
/// canal-offload's tests.
fn refusal(of: &TenantDestinations, own: &[IpAddr], to: SocketAddr) -> Option<u32> {
    let reserved = [15001, 15006, 15008]
        .contains(&to.port())
        .then_some(Verdict::CANAL_CAPTURE_REFUSED_RESERVED_PORT as u32);
    if own.contains(&to.ip()) {
        return reserved;
    }
    if let Some(all) = of.all {
        return Some(all as u32);
    }
    if let Some(destination) = of.addresses.get(&to.ip()) {
        let is_open =
            destination.port_be[..usize::from(destination.ports)].contains(&to.port().to_be());
        return (!is_open && destination.refused != 0).then_some(destination.refused);
    }
    let longest = of
        .ranges
        .iter()
        .filter(|(range, _)| range.contains(&to.ip()))
        .max_by_key(|(range, _)| range.prefix_len());
    match longest {
        Some((_, Some(verdict))) => Some(*verdict as u32),
        Some((_, None)) => reserved,
        None => of.outside.map(|v| v as u32),
    }
}

const ADDRESSES: [&str; 24] = [
    "10.96.0.1",
    "fd96::1",
    "10.96.0.2",
    "10.96.0.9",
    "10.96.7.7",
    "10.1.7.7",
    "fd01::7",
    "10.1.1.2",
    "fd01::2",
    "10.1.255.1",
    "10.9.1.2",
    "fd09::2",
    "10.9.2.2",
    "10.9.1.4",
    "10.9.7.7",
    "10.9.1.1",
    "10.9.2.1",
    "10.8.1.2",
    "192.0.2.1",
    "192.0.2.53",
    "192.0.2.54",
    "fd77::1",
    "10.9.200.7",
    "10.1.200.7",
];
/// The first and the last, those of the test's services, DNS, and the proxy's own.
const PORTS: [u16; 9] = [1, 53, 80, 443, 9080, 15001, 15006, 15008, 65535];

/// Compares both decisions for every address and port. Returns how many are refused.
fn compare(case: &str, view: &NodeSnapshot, pod: &crate::pod::LocalPod) -> usize {
    let destinations = decide_destinations(view.tenant(&pod.tenant).unwrap());
    let all = ADDRESSES
        .iter()
        .flat_map(|ip| PORTS.map(|port| SocketAddr::new(ip.parse().unwrap(), port)));
    let mut refused = 0;
    for to in all {
        let at_connect = refusal(&destinations, &pod.ips, to);
        let decided = decide_outbound(view, pod, to);
        let wanted = decided.as_ref().err().map(|reason| {
            let at = REASONS
                .iter()
                .position(|r| r == reason)
                .unwrap_or_else(|| panic!("{case}: {to}: {reason:?} is not known at connect"));
            CONNECT_REFUSALS[at] as u32
        });
        assert_eq!(at_connect, wanted, "{case}: {to}: {decided:?}");
        refused += usize::from(at_connect.is_some());
    }
    refused
}

#[test]
fn connect_refuses_exactly_as_the_proxy_decides() {
    let (deny, pod_) = pod(p::OutboundTrafficPolicy::Deny);
    let (pass, _) = pod(p::OutboundTrafficPolicy::Passthrough);
    let refused = (
        compare("deny", &deny, &pod_),
        compare("passthrough", &pass, &pod_),
    );
    assert!(refused.0 > refused.1 && refused.1 > 0, "{refused:?}");
    let (mut closed, _) = pod(p::OutboundTrafficPolicy::Passthrough);
    closed.close(&pod_.tenant);
    let own = pod_.ips.len() * (PORTS.len() - 3);
    assert_eq!(
        compare("closed", &closed, &pod_),
        ADDRESSES.len() * PORTS.len() - own,
        "everything but the pod itself"
    );
    assert!(matches!(
        decide_outbound(&closed, &pod_, "10.1.1.2:80".parse().unwrap()),
        Ok(OutboundRoute::Own(_))
    ));
}

#[test]
fn pod_range_inside_a_gateway_range_is_the_gateways() {
    let (view, pod_) = pod(p::OutboundTrafficPolicy::Deny);
    let mut tenant = (*view.tenant(&pod_.tenant).unwrap().tenant).clone();
    for (pods, gateways) in [
        ("10.9.200.0/24", "10.9.0.0/16"),
        ("10.1.0.0/16", "10.1.200.0/24"),
        ("10.1.0.0/16", "10.1.0.0/16"),
    ] {
        tenant.pod_cidrs = vec![pods.parse().unwrap()];
        tenant.gateway_cidrs = vec![gateways.parse().unwrap()];
        let resources = [p::Resource::Tenant(tenant.clone())];
        let view =
            NodeSnapshot::from_resources(view.generation, resources.iter(), &"n1".parse().unwrap());
        compare(pods, &view, &pod_);
    }
}

#[test]
fn service_with_more_ports_than_an_element_holds_is_left_to_the_proxy() {
    let (view, pod_) = pod(p::OutboundTrafficPolicy::Deny);
    let tenant = view.tenant(&pod_.tenant).unwrap();
    let mut service = (**tenant.service("10.96.0.1".parse().unwrap()).unwrap()).clone();
    let port = |port| p::ServicePort {
        port,
        name: "x".into(),
        protocol: p::AppProtocol::Http1,
    };
    service.ports = (1..=13).map(port).collect();
    assert_eq!(of_service(&service).ports, 13);
    service.ports.push(port(14));
    assert_eq!(
        of_service(&service),
        Destination::default(),
        "no port of it is refused"
    );
}

#[test]
fn refusals_are_counted_since_the_last_read() {
    let mut before = ConnectRefusals::default();
    before.count[1] = 5;
    let mut now = before;
    assert_eq!(decide_refusals(&before, &now), []);
    now.count[0] = 2;
    now.count[1] = 6;
    now.last[0].ip = "10.96.0.1"
        .parse::<std::net::Ipv4Addr>()
        .unwrap()
        .to_ipv6_mapped()
        .octets();
    now.last[0].port_be = 81u16.to_be();
    let found = decide_refusals(&before, &now);
    let wanted = ConnectRefusal {
        reason: NodeRefusal::UnknownPort,
        count: 2,
        destination: "10.96.0.1:81".parse().unwrap(),
    };
    assert_eq!((found.len(), found[0], found[1].count), (2, wanted, 1));
}
