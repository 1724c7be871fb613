//! Worlds as networks: which hosts reach each other, which do not, and at what rate. Needs root.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::scene;
use crate::scene::{SMOKE, client_output, dial, dial_in_vain, run, world};
use canal_timing::{assert_time, timed};
use canal_world::World;

/// Result that a test expects of a dial.
#[derive(Clone, Copy)]
enum DialOutcome<'c> {
    /// The peer answers, and sees this source address.
    Seen(&'c str),
    /// The node refuses the connection at once.
    Refused,
    /// The caller's own namespace has no route to the address.
    NoRoute,
    /// The node has no route to the address. TCP may detect that late.
    Lost,
}

use DialOutcome::{Lost, NoRoute, Refused, Seen};

fn check(world: &World, cases: &[(&str, &str, DialOutcome<'_>)]) {
    // The longest time until a dial failed, by the error and the bound in seconds.
    let mut longest: BTreeMap<(&str, u64), Duration> = BTreeMap::new();
    for (from, to, fate) in cases {
        let started = Instant::now();
        let answer = dial(world, from, to);
        let took = started.elapsed();
        let (word, bound) = match fate {
            Seen(address) => {
                assert_eq!(answer, Ok(format!("you are {address}")), "{from} to {to}");
                continue;
            }
            Refused => ("ConnectionRefused", 1),
            NoRoute => ("Unreachable", 1),
            Lost => ("Unreachable", 3),
        };
        let complaint = answer.expect_err(&format!("{from} must not reach {to}"));
        assert!(complaint.contains(word), "{from} to {to}: {complaint}");
        let known = longest.entry((word, bound)).or_default();
        *known = took.max(*known);
    }
    for ((word, bound), took) in longest {
        assert_time(
            &format!("time until a dial fails: {word}, bound {bound} s"),
            took,
            Duration::from_secs(bound),
        );
    }
}

#[test]
fn tenants_reach_only_their_own_pods() {
    let world = world("net", SMOKE);
    check(
        &world,
        &[
            ("alpha/web-0", "10.1.1.3:8080", Seen("10.1.1.2")),
            ("alpha/web-0", "10.1.2.2:8080", Seen("10.1.1.2")),
            ("alpha/web-0", "[fd00:101::1:3]:8080", Seen("fd00:101::1:2")),
            ("alpha/web-0", "[fd00:101::2:2]:8080", Seen("fd00:101::1:2")),
            ("alpha/web-1", "10.1.255.1:8080", Seen("10.1.2.2")),
            (
                "alpha/web-1",
                "[fd00:101::ff:2]:8080",
                Seen("fd00:101::2:2"),
            ),
            ("beta/web-0", "10.2.255.2:8080", Seen("10.2.1.2")),
            ("gw1", "10.1.2.2:8080", Seen("10.1.255.1")),
            ("gw2", "[fd00:102::1:2]:8080", Seen("fd00:102::ff:2")),
            ("a-n1", "10.1.1.2:8080", Seen("10.1.1.1")),
            ("load1", "250.1.0.2:8080", Seen("250.2.0.2")),
            ("a-n2", "250.1.0.2:8080", Seen("10.202.0.3")),
        ],
    );
    check(
        &world,
        &[
            // Pods and gateway addresses of another tenant, IPv4 and IPv6.
            ("alpha/web-0", "10.2.1.2:8080", Refused),
            ("alpha/web-0", "[fd00:102::1:2]:8080", Refused),
            ("alpha/web-0", "10.2.255.1:8080", Refused),
            ("alpha/web-0", "[fd00:102::ff:1]:8080", Refused),
            // Underlay addresses: the pod's own node, another node, a gateway's own address.
            ("alpha/web-0", "10.201.0.3:8080", Refused),
            ("alpha/web-0", "10.202.0.3:8080", Refused),
            ("alpha/web-0", "250.1.0.2:8080", Refused),
            // Overlay addresses from underlay hosts.
            ("load1", "10.1.1.2:8080", NoRoute),
            ("controller", "10.1.255.1:8080", NoRoute),
            // Addresses outside the world.
            ("alpha/web-0", "192.0.2.1:80", Refused),
            ("alpha/web-0", "[2001:db8::1]:80", Refused),
            ("gw1", "192.0.2.1:80", NoRoute),
            ("load1", "192.0.2.1:80", NoRoute),
            ("a-n1", "[2001:db8::1]:80", NoRoute),
            // Addresses of pods that do not exist.
            ("alpha/web-0", "10.1.1.77:8080", Lost),
            ("alpha/web-0", "[fd00:101::2:77]:8080", Lost),
        ],
    );
}

#[test]
fn an_uncaptured_vip_is_refused_at_once_and_never_leaves_the_node() {
    let world = world("vip", SMOKE);
    let before = scene::silence(&world, "a-n1");
    let both = [
        ("alpha/web-0", "10.101.0.5:80", Refused),
        ("alpha/web-0", "[fd00:1101::5]:80", Refused),
    ];
    check(&world, &both.repeat(20));
    let udp = client_output(
        &world,
        "alpha/web-0",
        &["canal-world-peer", "udp", "10.101.0.5:53"],
    )
    .expect_err("a VIP must refuse datagrams");
    assert!(udp.contains("ConnectionRefused"), "{udp}");
    let refused = world.refused("a-n1").expect("counters");
    assert_eq!((refused.tcp, refused.other), (40, 1));
    assert_eq!(
        world.refused("b-n1").expect("counters"),
        canal_world::RefusedPackets::default()
    );
    assert_eq!(
        scene::sent(&world, "a-n1"),
        before,
        "the node sent something into underlay or overlay"
    );
}

/// Writes routes of a node of beta that lead to the addresses of alpha's gateway.
fn route_to_alpha(world: &World, device: &str) {
    // Multicast is off on a world's links, so neighbours must be entered. The MAC is that of the
    // first gateway's VXLAN device.
    for lines in [
        [
            "neigh",
            "replace",
            "10.1.255.1",
            "lladdr",
            "02:05:00:00:00:01",
            "dev",
            device,
            "nud",
            "permanent",
        ],
        [
            "neigh",
            "replace",
            "fd00:101::ff:1",
            "lladdr",
            "02:05:00:00:00:01",
            "dev",
            device,
            "nud",
            "permanent",
        ],
    ] {
        client_output(world, "b-n1", &[&["ip"], lines.as_slice()].concat()).expect("a neighbour");
    }
    // The source address is that of beta's node in its own overlay.
    for lines in [
        ["10.1.255.1/32", "10.2.1.1"],
        ["fd00:101::ff:1/128", "fd00:102::1:1"],
    ] {
        client_output(
            world,
            "b-n1",
            &[
                "ip", "route", "add", lines[0], "dev", device, "src", lines[1],
            ],
        )
        .expect("a route");
    }
}

#[test]
fn a_tenants_node_cannot_reach_another_tenants_gateway_address() {
    let world = world("spoof", SMOKE);
    // Root on a tenant's node can write any route, so the gateway must not rely on the node.
    // The node's VXLAN device is named after its tenant's VNI.
    let device = "vx102";
    route_to_alpha(&world, device);
    // The gateway counts each attempt, the second one above the first.
    for (count, to) in [(1, "10.1.255.1:8080"), (2, "[fd00:101::ff:1]:8080")] {
        dial_in_vain(&world, "b-n1", to, "it must not answer");
        assert!(
            world.refused("gw1").expect("counters").foreign >= count,
            "{to}"
        );
    }
    // A forged source inside the right overlay: alpha's address, sent by beta to beta's gateway.
    client_output(
        &world,
        "b-n1",
        &[
            "ip",
            "address",
            "add",
            "fd00:101::1:2/128",
            "dev",
            "lo",
            "nodad",
        ],
    )
    .expect("an address");
    client_output(
        &world,
        "b-n1",
        &[
            "ip",
            "route",
            "replace",
            "fd00:102::ff:1/128",
            "dev",
            device,
            "src",
            "fd00:101::1:2",
        ],
    )
    .expect("a route");
    // For IPv4 the kernel's rp_filter drops such a source, which this counter does not count; IPv6
    // has no such setting, so a rule of the gateway's does it.
    let before = world.refused("gw1").expect("counters").foreign;
    dial_in_vain(
        &world,
        "b-n1",
        "[fd00:102::ff:1]:8080",
        "it must not answer",
    );
    assert!(world.refused("gw1").expect("counters").foreign > before);
    // The other gateway is not involved, so its counters must not change.
    assert_eq!(
        world.refused("gw2").expect("counters"),
        canal_world::RefusedPackets::default()
    );
}

#[test]
fn no_interface_is_ever_outside() {
    let names = || -> Vec<String> {
        let text = std::fs::read_to_string("/proc/net/dev").expect("interfaces");
        text.lines()
            .skip(2)
            .filter_map(|line| line.split_once(':').map(|(name, _)| name.trim().to_owned()))
            .collect()
    };
    let before = names();
    let world = world("out", SMOKE);
    assert_eq!(names(), before);
    for host in world.hosts().expect("hosts") {
        let devices = world.traffic(&host.environment.name).expect("counters");
        let known = |name: &str| {
            ["lo", "eth0", "vx", "h", "x", "p"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
        };
        assert!(
            devices.iter().all(|(name, _)| known(name)),
            "{}: {devices:?}",
            host.environment.name
        );
    }
}

#[test]
fn large_packets_pass_the_tunnel_whole() {
    let world = world("mtu", SMOKE);
    for to in ["10.1.2.2:8080", "[fd00:101::2:2]:8080"] {
        client_output(
            &world,
            "alpha/web-0",
            &["canal-world-peer", "pour", to, "3000000"],
        )
        .expect("poured");
    }
    let fragments = run(
        &world,
        "a-n1",
        &[
            "sh",
            "-c",
            "cat /proc/self/net/snmp | grep ^Ip: | tail -1 | cut -d' ' -f20",
        ],
    );
    assert_eq!(
        String::from_utf8_lossy(&fragments.stdout).trim(),
        "0",
        "packets were fragmented"
    );
}

#[test]
fn rates_limit_links() {
    let yaml = SMOKE.replace(
        "controller:",
        "links: {pod: {rate: 40mbit}, interAz: {rate: 20mbit}}\ncontroller:",
    );
    let world = world("rate", &yaml);
    for (name, to, limit) in [
        ("pod", "10.1.1.3:8080", 40e6),
        ("interAz", "10.1.2.2:8080", 20e6),
    ] {
        let rate: f64 = client_output(
            &world,
            "alpha/web-0",
            &["canal-world-peer", "pour", to, "5000000"],
        )
        .expect("poured")
        .parse()
        .expect("a rate");
        assert!(rate < limit * 1.1, "{name}: {rate} is over {limit}");
        timed!(
            rate > limit * 0.5,
            "rate on a limited link to a {name} is over half of the limit"
        );
    }
}

#[test]
fn cuts_losses_and_links_down_heal() {
    let world = world("cut", SMOKE);
    let reach = |from: &str, to: &str| dial(&world, from, to).is_ok();
    let miss = |from: &str, to: &str, why: &str| drop(dial_in_vain(&world, from, to, why));
    let cases: [(&str, &str, &str, &str); 4] = [
        (
            "two hosts of the underlay",
            "gw1",
            "load1",
            "250.1.0.2:8080",
        ),
        (
            "a pod and a gateway",
            "alpha/web-1",
            "gw1",
            "10.1.255.1:8080",
        ),
        (
            "two nodes, and so their pods",
            "a-n1",
            "a-n2",
            "10.1.1.2:8080",
        ),
        ("two AZs", "router-az1", "router-az2", "10.1.1.2:8080"),
    ];
    // The path of the last two cases crosses both, since the pods are in different AZs.
    for (name, one, other, to) in cases {
        // Pods do not reach addresses of the underlay, so a host of the underlay dials those.
        let from = if to.starts_with("250") {
            "load1"
        } else {
            "alpha/web-1"
        };
        assert!(reach(from, to), "{name}: before");
        world.cut(one, other).expect("cut");
        miss(from, to, &format!("{name}: cut"));
        world.heal(one, other).expect("healed");
        assert!(reach(from, to), "{name}: healed");
    }
    // All frames, because the number is a percentage.
    world.lose("gw1", "load1", 100).expect("lost");
    miss("load1", "250.1.0.2:8080", "all answers lost");
    world.heal_all().expect("healed");
    assert!(reach("load1", "250.1.0.2:8080"));
    for host in ["gw1", "a-n1", "alpha/web-0"] {
        let to = if host == "gw1" {
            "10.1.255.1:8080"
        } else {
            "10.1.1.2:8080"
        };
        world.link_down(host).expect("down");
        miss("alpha/web-1", to, &format!("{host} is down"));
        world.link_up(host).expect("up");
        assert!(reach("alpha/web-1", to), "{host} is up again");
    }
}

#[test]
fn only_passthrough_tenants_reach_outside_addresses() {
    let yaml = SMOKE
        .replace(
            "- {name: load1, az: az2}",
            "- {name: load1, az: az2}\n- {name: shop, az: az2, outside: true, command: [canal-world-peer, listen, \"80\"]}",
        )
        .replace("  vni: 102\n", "  vni: 102\n  outboundTrafficPolicy: Passthrough\n");
    let world = world("pass", &yaml);
    let shop = world
        .host("shop")
        .expect("a host")
        .environment
        .ip4
        .expect("an address");
    check(
        &world,
        &[
            // On the underlay a pod has its node's address.
            ("beta/web-0", &format!("{shop}:80"), Seen("10.201.0.4")),
            ("alpha/web-0", &format!("{shop}:80"), Refused),
            ("beta/web-0", "250.1.0.2:8080", Refused),
        ],
    );
}
