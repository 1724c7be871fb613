//! Tier worlds without the mesh's programs: routes, packets that routers refuse, gateways that are
//! added and removed, AZs that fail. Needs root.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::scene;
use crate::scene::{client_output, dial, dial_in_vain, vanishes};
use canal_timing::deadline;
use canal_world::{ProcessPhase, RefusedPackets, Signal, Topology, World};

/// Maximum time of an event on a quiet machine. In the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(15);

/// Reads the tier topology and replaces the mesh's programs by `sleep`.
fn topology(tag: &str, change: impl Fn(String) -> String) -> Topology {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/tier.yaml");
    let text = change(std::fs::read_to_string(&file).expect("the tier topology"));
    let mut topology =
        Topology::parse(&file, &text).unwrap_or_else(|problems| panic!("{problems:#?}"));
    let components = topology
        .controller
        .iter_mut()
        .chain(&mut topology.edges)
        .chain(&mut topology.gateways);
    let proxies = topology
        .tenants
        .iter_mut()
        .flat_map(|tenant| &mut tenant.nodes)
        .filter_map(|node| node.proxy.as_mut());
    for process in components
        .filter_map(|component| component.process.as_mut())
        .chain(proxies)
    {
        process.command = vec!["sleep".into(), "infinity".into()];
    }
    topology.renamed(&scene::name(tag)).expect("a name")
}

fn world(tag: &str) -> World {
    let world = World::up(&topology(tag, |text| text), &scene::options(true))
        .unwrap_or_else(|error| panic!("{error}"));
    world
        .wait_ready(deadline(2 * STEP_TIMEOUT))
        .unwrap_or_else(|error| panic!("{error}"));
    world
}

/// Configures on an edge what its program would do for alpha's node in its AZ: a tunnel end with a
/// gateway address and a replica's address behind it.
fn stand_in(world: &World) {
    let address = |host: &str| world.host(host).expect("a host").ip4().expect("an address");
    let (edge, node, mac) = (address("edge-1"), address("a-n1"), "02:04:00:00:00:01");
    let script = format!(
        "set -e
        ip link add vx101 mtu 1500 address 02:ca:0a:01:01:01 type vxlan id 101 local {edge} dstport 4789 nolearning
        for net in 10.1.200.1/32 250.1.0.77/32 fd00:1:0:c:2000::1/128 fdca:a1:0:250::fa01:4d/128; do ip addr add $net dev vx101; done
        ip link set vx101 up
        ip neigh replace 10.1.1.1 lladdr {mac} dev vx101 nud permanent
        ip neigh replace fd00:1::1:1 lladdr {mac} dev vx101 nud permanent
        ip route add 10.1.1.0/24 via 10.1.1.1 onlink dev vx101 src 250.1.0.77
        ip route add fd00:1::1:0/112 via fd00:1::1:1 onlink dev vx101 src fdca:a1:0:250::fa01:4d
        bridge fdb append {mac} dev vx101 dst {node}"
    );
    client_output(world, "edge-1", &["sh", "-c", &script])
        .unwrap_or_else(|error| panic!("{error}"));
}

/// A listener in a host, as long as this value exists.
struct HostListener(Child);

impl HostListener {
    fn on(world: &World, host: &str) -> Self {
        let mut command = world
            .exec(host, &["canal-world-peer", "listen", "8080"])
            .expect("a command");
        let mut child = command.stdout(Stdio::piped()).spawn().expect("started");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("a line");
        assert_eq!(line, "listening on 8080\n");
        Self(child)
    }
}

impl Drop for HostListener {
    fn drop(&mut self) {
        // A process that has already ended is as good as a killed one.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Checks that hosts of the tier have no devices or addresses but their own, because their own
/// programs build the overlay.
fn check_hosts_of_the_tier(world: &World) {
    for host in ["edge-1", "gw-1a"] {
        let devices: Vec<String> = world
            .traffic(host)
            .expect("counters")
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(
            devices,
            ["lo", "eth0"],
            "{host} is built by its own programs"
        );
        for (setting, value) in [
            ("ip_forward", "0"),
            ("conf/all/rp_filter", "0"),
            ("conf/eth0/rp_filter", "1"),
        ] {
            assert_eq!(
                client_output(
                    world,
                    host,
                    &["cat", &format!("/proc/sys/net/ipv4/{setting}")]
                ),
                Ok(value.into()),
                "{host}: {setting}"
            );
        }
        assert!(
            world
                .host(host)
                .expect("a host")
                .environment
                .overlay
                .is_empty()
        );
    }
}

/// Dials through the overlay: name, host, destination, and the address that the destination sees.
const DIALS: [(&str, &str, &str, &str); 8] = [
    (
        "a pod to a gateway address",
        "alpha/client-0",
        "10.1.200.1:8080",
        "10.1.1.3",
    ),
    (
        "the same, IPv6",
        "alpha/client-0",
        "[fd00:1:0:c:2000::1]:8080",
        "fd00:1::1:3",
    ),
    (
        "a node to a gateway address",
        "a-n1",
        "10.1.200.1:8080",
        "10.1.1.1",
    ),
    (
        "the same, IPv6",
        "a-n1",
        "[fd00:1:0:c:2000::1]:8080",
        "fd00:1::1:1",
    ),
    (
        "a replica to a pod",
        "edge-1",
        "10.1.1.2:8080",
        "250.1.0.77",
    ),
    (
        "the same, IPv6",
        "edge-1",
        "[fd00:1::1:2]:8080",
        "fdca:a1:0:250::fa01:4d",
    ),
    (
        "a replica to a node",
        "edge-1",
        "10.1.1.1:8080",
        "250.1.0.77",
    ),
    (
        "the same, IPv6",
        "edge-1",
        "[fd00:1::1:1]:8080",
        "fdca:a1:0:250::fa01:4d",
    ),
];

/// Checks that faults on the path to an edge take effect although its programs would process
/// packets before nft there.
fn follow_faults(world: &World) {
    world.cut_one_way("a-n1", "edge-1").expect("cut");
    dial_in_vain(world, "alpha/client-0", "10.1.200.1:8080", "cut");
    world.heal("a-n1", "edge-1").expect("healed");
    dial(world, "alpha/client-0", "10.1.200.1:8080").expect("healed");
    world.lose("a-n1", "edge-1", 100).expect("lost");
    dial_in_vain(world, "alpha/client-0", "10.1.200.1:8080", "lost");
    world.heal_all().expect("healed");
    world.link_down("edge-1").expect("down");
    dial_in_vain(world, "alpha/client-0", "10.1.200.1:8080", "down");
    world.link_up("edge-1").expect("up");
    dial(world, "alpha/client-0", "10.1.200.1:8080").expect("up");
}

#[test]
fn overlapping_tenants_live_side_by_side_and_their_routes_lead_to_edges() {
    let world = world("tier");
    for tenant in ["alpha", "beta"] {
        assert_eq!(
            dial(&world, &format!("{tenant}/client-0"), "10.1.2.2:8080"),
            Ok("you are 10.1.1.3".into()),
            "{tenant}"
        );
    }
    check_hosts_of_the_tier(&world);
    stand_in(&world);
    let _listeners = [
        HostListener::on(&world, "edge-1"),
        HostListener::on(&world, "a-n1"),
    ];
    for (name, from, to, seen) in DIALS {
        assert_eq!(
            dial(&world, from, to),
            Ok(format!("you are {seen}")),
            "{name}"
        );
    }
    // Replicas dial pods. Pods dial neither replicas nor anything else in the tier.
    for to in [
        "250.1.0.77:8080",
        "[fdca:a1:0:250::fa01:4d]:8080",
        "240.0.0.1:80",
        "[fdca:a1:0:240::1]:80",
    ] {
        let refused = dial_in_vain(&world, "alpha/client-0", to, to);
        assert!(refused.contains("ConnectionRefused"), "{to}: {refused}");
    }
    client_output(
        &world,
        "alpha/client-0",
        &["canal-world-peer", "udp", "250.1.0.77:53"],
    )
    .expect_err("no datagrams to replicas");
    assert_eq!(
        world.refused("router-az1").expect("counters"),
        RefusedPackets::default()
    );
    // Nodes reach only the controller and key servers of the provider's hosts.
    dial_in_vain(&world, "a-n1", "250.1.0.2:8080", "an edge's own port");
    assert!(world.refused("router-az1").expect("counters").provider > 0);

    follow_faults(&world);
}

fn ip(world: &World, host: &str) -> String {
    world
        .host(host)
        .expect("a host")
        .ip4()
        .expect("an address")
        .to_string()
}

/// Returns packets of a node of beta: name, arguments of the peer program, and the router's counts.
fn tunnel_cases(world: &World) -> Vec<(&'static str, String, RefusedPackets)> {
    let ip = |host: &str| ip(world, host);
    // The counts show which rule refused the packet. 827553 is 0xca0a1, the tier's VNI; beta has
    // VNI 102.
    let vni = RefusedPackets {
        vni: 1,
        ..RefusedPackets::default()
    };
    let peer = RefusedPackets {
        peer: 1,
        ..RefusedPackets::default()
    };
    vec![
        (
            "another tenant's VNI",
            format!("vni=101 via={}", ip("edge-1")),
            vni,
        ),
        (
            "the tier's VNI to a replica",
            format!("vni=827553 hop=1 via={}", ip("gw-1a")),
            vni,
        ),
        (
            "the tier's VNI to an edge",
            format!("vni=827553 via={}", ip("edge-1")),
            vni,
        ),
        (
            "another tenant's node",
            format!("vni=102 via={}", ip("a-n1")),
            peer,
        ),
        (
            "a node of another AZ",
            format!("vni=102 via={}", ip("a-n2")),
            peer,
        ),
        ("a replica", format!("vni=102 via={}", ip("gw-1a")), peer),
        (
            "another node's address",
            format!("vni=102 outer={} via={}", ip("a-n1"), ip("edge-1")),
            RefusedPackets {
                source: 1,
                ..RefusedPackets::default()
            },
        ),
        (
            "an edge's address",
            format!("vni=827553 outer={} via={}", ip("edge-1"), ip("gw-1a")),
            RefusedPackets {
                source: 1,
                ..RefusedPackets::default()
            },
        ),
        // `torn` sends two fragments, the first of which ends before the VNI; each is refused.
        (
            "a VNI behind the fold",
            format!(
                "vni=101 torn=true outer={} via={}",
                ip("b-n1"),
                ip("edge-1")
            ),
            RefusedPackets {
                fragment: 2,
                ..RefusedPackets::default()
            },
        ),
        (
            "what it may",
            format!("vni=102 via={}", ip("edge-1")),
            RefusedPackets::default(),
        ),
        (
            "what it may in another AZ",
            format!("vni=102 via={}", ip("b-n2")),
            RefusedPackets::default(),
        ),
    ]
}

/// Checks that a pod cannot tunnel out of its node, and that it uses no source address but its own.
fn refuse_tunnels_of_a_pod(world: &World) {
    let before = (
        scene::silence(world, "b-n1"),
        world.refused("b-n1").expect("counters").other,
    );
    for order in [
        format!(
            "from=10.1.1.3:1 to=10.1.200.1:80 vni=102 via={}",
            ip(world, "edge-1")
        ),
        "from=10.1.2.3:1 to=10.1.200.1:80".to_owned(),
        "from=250.1.0.3:1 to=10.1.200.1:80".to_owned(),
        "from=240.0.0.1:1 to=10.1.200.1:80".to_owned(),
    ] {
        let words: Vec<&str> = ["canal-world-peer", "spoof"]
            .into_iter()
            .chain(order.split(' '))
            .collect();
        client_output(world, "beta/client-0", &words)
            .unwrap_or_else(|error| panic!("{order}: {error}"));
    }
    assert_eq!(
        (
            scene::sent(world, "b-n1"),
            world.refused("b-n1").expect("counters").other
        ),
        (before.0, before.1 + 1)
    );
}

#[test]
fn routers_refuse_forbidden_tunnels_of_a_tenants_node() {
    let world = world("switch");
    let inner = ["spoof", "from=10.1.1.2:4711", "to=10.1.200.1:80"];
    for (name, order, expected) in tunnel_cases(&world) {
        let before = world.refused("router-az1").expect("counters");
        let words: Vec<&str> = ["canal-world-peer"]
            .into_iter()
            .chain(inner)
            .chain(order.split(' '))
            .collect();
        let sent =
            client_output(&world, "b-n1", &words).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(
            sent.starts_with("sent 1 syn 10.1.1.2:4711 > 10.1.200.1:80 in vni "),
            "{sent}"
        );
        // The sender never fails: only the router's counters show whether a packet passed.
        let now = world.refused("router-az1").expect("counters");
        let counts = |refused: &RefusedPackets| {
            [refused.source, refused.fragment, refused.vni, refused.peer]
        };
        let more: Vec<u64> = counts(&now)
            .iter()
            .zip(counts(&before))
            .map(|(now, before)| now - before)
            .collect();
        assert_eq!(more, counts(&expected), "{name}");
    }
    refuse_tunnels_of_a_pod(&world);
    // A misspelt word must be refused, or a case could test less than it says.
    let wrong = client_output(
        &world,
        "b-n1",
        &[
            "canal-world-peer",
            "spoof",
            "from=10.1.1.2:1",
            "to=10.1.1.3:1",
            "colour=red",
        ],
    );
    assert!(
        wrong
            .expect_err("an unknown word")
            .contains("is unknown here")
    );
}

/// Lists what a machine contains of a world's gateways: namespaces, mounts, cgroups, files,
/// devices, principals.
fn list_gateway_traces(world: &World) -> Vec<String> {
    let mut traces: Vec<String> = scene::remains(world.name())
        .into_iter()
        // Processes are listed by ids, which are not comparable.
        .filter(|item| !item.starts_with("process"))
        .collect();
    // The ids of mounts are not comparable.
    traces.iter_mut().for_each(|item| {
        *item = item
            .split(' ')
            .filter(|word| word.contains("cnl-") || word.contains('/'))
            .collect()
    });
    for dir in ["tokens", "data", "etc"] {
        let entries = std::fs::read_dir(world.dir().join(dir)).expect(dir);
        traces.extend(
            entries
                .flatten()
                .map(|entry| format!("{dir}/{}", entry.file_name().to_string_lossy())),
        );
    }
    let groups = world.host("gw-1a").expect("a gateway").environment.cgroup;
    let groups = std::fs::read_dir(groups.parent().expect("a parent")).expect("cgroups");
    traces.extend(
        groups
            .flatten()
            .filter(|entry| entry.path().is_dir())
            .map(|entry| format!("cgroup {}", entry.file_name().to_string_lossy())),
    );
    traces.extend(
        world
            .traffic("router-az1")
            .expect("counters")
            .into_iter()
            .map(|(name, _)| format!("device {name}")),
    );
    traces.push(std::fs::read_to_string(world.dir().join("principals.yaml")).expect("principals"));
    traces.extend(
        world
            .hosts()
            .expect("hosts")
            .into_iter()
            .map(|host| host.environment.name),
    );
    traces.sort();
    traces
}

/// Checks that gateways with a wrong name, AZ or backend are refused, and that only gateways are
/// removed.
fn refuse_wrong_gateways(world: &World) {
    for (name, az, backend, answer) in [
        ("gw-1a", "az1", "b1", "the name \"gw-1a\" is already taken"),
        (
            "edge-1",
            "az1",
            "b1",
            "the name \"edge-1\" is already taken",
        ),
        (
            "gw-9",
            "az9",
            "b1",
            "there is no AZ \"az9\" with an edge; fix: use one of: az1, az2",
        ),
        ("GW", "az1", "b1", "name: \"GW\" is not a name"),
        ("gw-9", "az1", "b_1", "backend: \"b_1\" is not a name"),
    ] {
        let refused = world
            .add_gateway(name, az, backend)
            .expect_err(answer)
            .to_string();
        assert!(refused.contains(answer), "{refused}");
    }
    for name in ["edge-1", "a-n1"] {
        let refused = world.remove_gateway(name).expect_err(name).to_string();
        assert!(
            refused.contains("is not a gateway of a world with edges"),
            "{refused}"
        );
    }
}

#[test]
fn gateways_come_and_go_without_a_trace() {
    let world = world("fleet");
    let before = list_gateway_traces(&world);
    let mut addresses = Vec::new();
    // Names repeat every five rounds, so that a name that was removed can be used again. Nobody
    // derived the number of rounds.
    for round in 0..50 {
        let name = format!("gw-x{}", round % 5);
        world
            .add_gateway(&name, "az1", "b1")
            .unwrap_or_else(|error| panic!("{round}: {error}"));
        world
            .wait_host_ready(&name, deadline(STEP_TIMEOUT))
            .expect("ready");
        addresses.push(
            world
                .host(&name)
                .expect("a host")
                .ip4()
                .expect("an address"),
        );
        // One round is enough for what holds in each.
        if round == 0 {
            let principals =
                std::fs::read_to_string(world.dir().join("principals.yaml")).expect("principals");
            // A gateway that was added must be reachable, and faults must reach it too.
            assert!(principals.contains("gw-x0") && list_gateway_traces(&world) != before);
            let _listener = HostListener::on(&world, &name);
            for from in ["gw-3a", "edge-1"] {
                dial(&world, from, &format!("{}:8080", addresses[0]))
                    .unwrap_or_else(|error| panic!("from {from}: {error}"));
            }
            world.cut("gw-3a", &name).expect("cut");
            dial_in_vain(&world, "gw-3a", &format!("{}:8080", addresses[0]), "cut");
            world.heal("gw-3a", &name).expect("healed");
            world.link_down(&name).expect("down");
            world.link_up(&name).expect("up");
            world.kill(&name, Signal::Kill).expect("killed");
        }
        world
            .remove_gateway(&name)
            .unwrap_or_else(|error| panic!("{round}: {error}"));
    }
    assert_eq!(list_gateway_traces(&world), before);
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), 50, "no address was given again");

    refuse_wrong_gateways(&world);
    // Gateways of the file can be removed too, and several at once.
    std::thread::scope(|scope| {
        for name in ["gw-1a", "gw-1b", "gw-4a"] {
            let world = &world;
            scope.spawn(move || world.remove_gateway(name).expect("removed"));
        }
    });
    assert_eq!(
        world
            .hosts()
            .expect("hosts")
            .iter()
            .filter(|host| host.environment.kind == "gateway")
            .count(),
        // The file has eight gateways, of which three were removed.
        5
    );
    world
        .add_gateway("gw-1a", "az2", "b9")
        .expect("the name is free");
    assert_eq!(world.host("gw-1a").expect("a host").environment.az, "az2");
    let name = world.name().to_owned();
    world.down().expect("down");
    vanishes(&name);

    let old = scene::world("nofleet", scene::SMOKE);
    let refused = old
        .add_gateway("gw9", "az1", "b1")
        .expect_err("no tier")
        .to_string();
    assert!(refused.contains("this world has no edges"), "{refused}");
    old.remove_gateway("gw1").expect_err("no tier");
}

#[test]
fn an_az_falls_and_rises() {
    let world = world("az");
    let _listeners = ["gw-1a", "gw-1b", "gw-3a"].map(|host| HostListener::on(&world, host));
    let ip = |host: &str| {
        format!(
            "{}:8080",
            world.host(host).expect("a host").ip4().expect("an address")
        )
    };
    let (near, far, theirs) = (ip("gw-1b"), ip("gw-3a"), ip("gw-1a"));
    let phase = |host: &str| world.host(host).expect("a host").process.phase;

    world.cut_az("az2", false).expect("cut");
    let lost = dial_in_vain(&world, "gw-1a", &far, "cut");
    assert!(
        lost.contains("TimedOut") || lost.contains("WouldBlock"),
        "a black hole, not {lost}"
    );
    dial(&world, "gw-1a", &near).expect("its own AZ");
    dial(&world, "gw-3b", &far).expect("the other AZ from inside");
    dial_in_vain(&world, "gw-3b", &theirs, "cut from the other side too");
    assert_eq!(
        (phase("edge-2"), phase("alpha/web-1")),
        (ProcessPhase::Running, ProcessPhase::Running)
    );
    world.heal_az("az2").expect("healed");
    dial(&world, "gw-1a", &far).expect("healed");
    dial(&world, "gw-3b", &theirs).expect("healed");

    // A process that an operator stopped must not start with its AZ again.
    world.stop("gw-4b").expect("stopped by hand");
    world.cut_az("az2", true).expect("cut");
    // A supervisor restarts a process that ends unexpectedly after 250 ms.
    std::thread::sleep(Duration::from_millis(600));
    for host in ["edge-2", "gw-3a", "a-n2", "alpha/web-1", "beta/free-1"] {
        assert_eq!(
            phase(host),
            ProcessPhase::Stopped,
            "{host} is dead and stays so"
        );
    }
    for host in ["controller", "edge-1", "alpha/web-0"] {
        assert_eq!(phase(host), ProcessPhase::Running, "{host} lives");
    }
    world.heal_az("az2").expect("healed");
    for host in ["edge-2", "gw-3a", "a-n2", "alpha/web-1", "beta/free-1"] {
        world
            .wait_host_ready(host, deadline(STEP_TIMEOUT))
            .unwrap_or_else(|error| panic!("{error}"));
    }
    assert_eq!(
        phase("gw-4b"),
        ProcessPhase::Stopped,
        "what was stopped before stays so"
    );
    assert_eq!(
        dial(&world, "alpha/client-0", "10.1.2.2:8080"),
        Ok("you are 10.1.1.3".into())
    );
    let unknown = world
        .cut_az("az7", true)
        .expect_err("no such AZ")
        .to_string();
    assert!(
        unknown.contains("there is no AZ \"az7\"; fix: use one of: az1, az2"),
        "{unknown}"
    );
}

#[test]
fn the_tiers_input_files_are_written() {
    let world = world("tfiles");
    let read = |path: &str| {
        std::fs::read_to_string(world.dir().join(path))
            .unwrap_or_else(|error| panic!("{path}: {error}"))
    };
    let parse =
        |text: &str| -> Vec<serde_json::Value> { serde_saphyr::from_multiple(text).expect("YAML") };
    let tenant = &parse(&read("config/alpha/_tenant.yaml"))[0];
    assert_eq!(
        tenant["spec"]["gatewayCidrs"],
        serde_json::json!(["10.1.192.0/18", "fd00:1:0:c::/64"])
    );
    let nodes = parse(&read("config/beta/_nodes.yaml"));
    assert_eq!(nodes.len(), 4);
    // Addresses and MAC follow from the plan (`plan.rs`).
    let expected = serde_json::json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": "b-n2",
            "labels": {"topology.kubernetes.io/zone": "az2"},
            "annotations": {"canal.mesh/vtep-mac": "02:04:00:00:00:02"},
        },
        "spec": {"podCIDRs": ["10.1.2.0/24", "fd00:1::2:0/112"]},
        "status": {"addresses": [{"type": "InternalIP", "address": "10.202.0.7"}]},
    });
    assert_eq!(nodes[1], expected);
    assert!(!world.config_dir("alpha").join("_gateways.yaml").exists());
    let principals = parse(&read("principals.yaml")).remove(0);
    let of = |name: &str| {
        let list = principals.as_array().expect("a list");
        list.iter()
            .find(|entry| entry["name"] == name)
            .unwrap_or_else(|| panic!("{name}"))
            .clone()
    };
    let (edge, gateway) = (of("edge-2"), of("gw-3b"));
    assert_eq!(
        (&edge["kind"], &edge["az"]),
        (&"edge".into(), &"az2".into())
    );
    assert_eq!(
        (&gateway["kind"], &gateway["az"], &gateway["backend"]),
        (&"gateway".into(), &"az2".into(), &"b3".into())
    );

    let inside = |host: &str, file: &str| client_output(&world, host, &["cat", file]).expect(file);
    let resolver = inside("beta/free-1", "/etc/resolv.conf");
    assert!(
        resolver.starts_with(
            "nameserver 10.1.208.1\nnameserver 10.1.200.1\nsearch shop.svc.cluster.local "
        ),
        "{resolver}"
    );
    // A pod that finds services by DNS must not find them in its files.
    assert!(!inside("beta/free-1", "/etc/hosts").contains("web"));
    assert!(
        inside("beta/client-0", "/etc/hosts").contains("10.1.128.10 web web.shop"),
        "captured pods find services in their files"
    );
    assert!(!inside("beta/client-0", "/etc/resolv.conf").contains("nameserver"));
    assert_eq!(
        world
            .host("gw-1a")
            .expect("a host")
            .environment
            .router_device
            .as_deref(),
        // The controller and edge-1 are the hosts before it.
        Some("h3")
    );
}

#[test]
fn a_link_can_be_narrow() {
    let narrow = |text: String| {
        text.replace(
            "name: gw-1a, az: az1, backend: b1",
            "name: gw-1a, az: az1, backend: b1, mtu: 1400",
        )
        .replace(
            "{name: free, namespace: shop,",
            "{name: free, namespace: shop, mtu: 1300,",
        )
    };
    let world = World::up(&topology("narrow", narrow), &scene::options(true))
        .unwrap_or_else(|error| panic!("{error}"));
    // A link's MTU is set at both ends, so that neither sends what the other drops.
    for (host, device, mtu) in [
        ("gw-1a", "eth0", 1400),
        // The number of a router's device is that of the host: gw-1a is the third.
        ("router-az1", "h3", 1400),
        // The default: 1500 in overlays and 100 more for the headers of the underlay.
        ("gw-1b", "eth0", 1600),
        ("free-0", "eth0", 1300),
        ("b-free1", "p2", 1300),
    ] {
        let link =
            client_output(&world, host, &["ip", "-o", "link", "show", device]).expect("a link");
        assert!(link.contains(&format!(" mtu {mtu} ")), "{host}: {link}");
    }
    for (host, far, device, mtu) in [
        ("gw-1b", "router-az1", "h4", 1500),
        // 1280 is the smallest MTU of IPv6 (RFC 8200 §5).
        ("free-0", "b-free1", "p2", 1280),
    ] {
        world.set_mtu(host, mtu).expect("a link");
        for (host, device) in [(host, "eth0"), (far, device)] {
            let link =
                client_output(&world, host, &["ip", "-o", "link", "show", device]).expect("a link");
            assert!(
                link.contains(&format!(" mtu {mtu} ")),
                "{host}, live: {link}"
            );
        }
    }
    // A router has several links, so a single MTU of it does not exist.
    assert!(
        world
            .set_mtu("router-az1", 1500)
            .is_err_and(|error| error.to_string().contains("router-az1"))
    );
    world
        .add_gateway("gw-1c", "az2", "b1")
        .expect("like the first of its backend");
    assert!(
        client_output(&world, "gw-1c", &["ip", "-o", "link", "show", "eth0"])
            .expect("a link")
            .contains(" mtu 1400 ")
    );
}
