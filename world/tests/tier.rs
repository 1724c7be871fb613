//! Tier worlds without the mesh's programs: who is routed where, what routers refuse, gateways that come and go, AZs that fall.
//! Needs root.

mod scene;

use std::path::Path;
use std::time::Duration;

use canal_world::{Phase, Refused, Signal, Topology, World};
use scene::{becomes, run, said};

const SOON: Duration = Duration::from_secs(15);

/// The tier topology with `sleep` in place of the mesh's programs.
fn topology(tag: &str, change: impl Fn(String) -> String) -> Topology {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/tier.yaml");
    let text = change(std::fs::read_to_string(&file).expect("the tier topology"));
    let mut topology = Topology::parse(&file, &text).unwrap_or_else(|problems| panic!("{problems:#?}"));
    let components = topology.controller.iter_mut().chain(&mut topology.edges).chain(&mut topology.gateways);
    let proxies = topology.tenants.iter_mut().flat_map(|tenant| &mut tenant.nodes).filter_map(|node| node.proxy.as_mut());
    for process in components.filter_map(|component| component.process.as_mut()).chain(proxies) {
        process.command = vec!["sleep".into(), "infinity".into()];
    }
    topology.renamed(&scene::name(tag)).expect("a name")
}

fn world(tag: &str) -> World {
    let world = World::up(&topology(tag, |text| text), &scene::options(true)).unwrap_or_else(|error| panic!("{error}"));
    world.wait_ready(Duration::from_secs(30)).unwrap_or_else(|error| panic!("{error}"));
    world
}

fn refused(world: &World, host: &str) -> Refused {
    world.refused(host).unwrap_or_else(|error| panic!("{error}"))
}

/// Gives an edge what its program would do for one tenant, for one node: a tunnel end, with one of its gateway addresses and one of
/// its AZ's replicas' behind it.
fn stand_in(world: &World, edge: &str, vni: u32, node: &str, addresses: &[&str]) {
    let ip = |host: &str| world.host(host).expect("a host").ip4().expect("an address");
    let device = format!("vx{vni}");
    let mut lines = vec![
        format!("link add {device} mtu 1500 address 02:ca:0a:01:00:02 type vxlan id {vni} local {} dstport 4789 nolearning", ip(edge)),
        format!("link set {device} up"),
        format!("neigh replace 10.1.1.1 lladdr 02:04:00:00:00:01 dev {device} nud permanent"),
        format!("neigh replace fd00:1::1:1 lladdr 02:04:00:00:00:01 dev {device} nud permanent"),
    ];
    lines.extend(addresses.iter().map(|address| format!("addr add {address} dev {device} nodad")));
    lines.push(format!("route add 10.1.1.0/24 via 10.1.1.1 onlink dev {device}"));
    lines.push(format!("route add fd00:1::1:0/112 via fd00:1::1:1 onlink dev {device}"));
    for line in lines {
        let line = if line.contains(':') && line.contains("nodad") && !line.contains("::") { line.replace(" nodad", "") } else { line };
        said(world, edge, &["sh", "-c", &format!("ip {line}")]).unwrap_or_else(|error| panic!("{line}: {error}"));
    }
    let fdb = format!("bridge fdb append 02:04:00:00:00:01 dev {device} dst {}", ip(node));
    said(world, edge, &["sh", "-c", &fdb]).expect("a remote");
}

#[test]
fn a_tier_comes_up_with_overlapping_tenants_and_its_routes_lead_to_edges() {
    let world = world("tier");
    // One address, two tenants: each hears its own pod.
    for tenant in ["alpha", "beta"] {
        let answer = said(&world, &format!("{tenant}/client-0"), &["canal-world-peer", "dial", "10.1.2.2:8080"]);
        assert_eq!(answer, Ok("you are 10.1.1.3".into()), "{tenant}");
    }
    for host in ["edge-1", "gw-1a"] {
        let devices: Vec<String> = world.traffic(host).expect("counters").into_iter().map(|(name, _)| name).collect();
        assert_eq!(devices, ["lo", "eth0"], "{host} is built by its own programs");
        assert_eq!(said(&world, host, &["cat", "/proc/sys/net/ipv4/ip_forward"]), Ok("0".into()));
        assert!(world.host(host).expect("a host").seat.overlay.is_empty());
    }
}
