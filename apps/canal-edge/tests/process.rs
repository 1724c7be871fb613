//! Tests of the real process in its own namespace, beside a fake controller and fake replicas. Maps
//! are filled, and replicas fail and recover. The agent is stopped, killed and started again
//! without the controller. Entries and programs that are removed externally are restored.

use std::fs;
use std::time::{Duration, Instant};

use crate::fixture;
use crate::fixture::{EdgeMachine, ReplicaPage};
use crate::frames::{ACK, OuterHeaders, SYN, read, tcp};
use canal_abi::tier::{AddressKey, NodeKey};
use canal_model::program::{Node, Resource, ResourceKind};
use canal_offload::edge::{EdgeProgram as Loaded, EdgeProgramSettings};
use canal_timing::{assert_time, timed};

/// Opens the maps like another process.
fn maps(m: &EdgeMachine) -> Loaded {
    let settings = EdgeProgramSettings {
        address: [250, 1, 0, 1].into(),
        tunnels: 1,
        aggregate: true,
        tunnel_port: 40_000,
        mtu: 1450,
    };
    Loaded::load(&settings, Some(&m.pins())).unwrap()
}

/// Returns the replica's state in the kernel's map: 1 is up, 2 is down.
fn up(m: &EdgeMachine, number: u32) -> Option<u32> {
    maps(m).replicas().get(&number).unwrap().map(|r| r.state)
}

/// With the controller's maps the program forwards a client's packet to a replica, and the answer
/// back.
fn a_packet_crosses_and_its_answer_returns(m: &EdgeMachine) {
    for (client, to, inside) in [
        ("10.1.1.5:4711", "10.255.32.1:80", "240.0.0.5:80"),
        ("[fd01:1::5]:4711", "[fd02::1]:80", "[fdca:a1:0:240::5]:80"),
    ] {
        let loaded = maps(m);
        let request =
            OuterHeaders::new("172.16.0.1", "250.1.0.1", 101).frame(&tcp(client, to, SYN, b""));
        // A replica that does not run for a moment is down to the edge, and the next one gets the
        // packet.
        m.until("the head of the chain gets the packet", || {
            let line = read(&loaded.test_run(&request).unwrap().frame);
            line.starts_with("250.1.0.1 > 250.1.0.11 vni 0xca0a1 hop 0 ") && line.contains(inside)
        });
        let sent = loaded
            .test_run(
                &OuterHeaders::new("250.1.0.12", "250.1.0.1", 0xca0a1).frame(&tcp(
                    inside,
                    client,
                    SYN | ACK,
                    b"",
                )),
            )
            .unwrap();
        let line = read(&sent.frame);
        assert!(
            line.starts_with("250.1.0.1 > 172.16.0.1 vni 0x65 hop 0 02ca0a010002 > 020000000001: ")
                && line.contains(to),
            "{line}"
        );
    }
}

/// Checks that the dump and the kernel show what the controller sent.
fn maps_have_the_controllers_resources(m: &EdgeMachine) {
    let dump = m.dump();
    assert_eq!(
        (
            dump["device"]["mtu"].as_u64(),
            dump["program"]["attached"].as_bool()
        ),
        (Some(1450), Some(true)),
        "{dump}"
    );
    let loaded = maps(m);
    assert_eq!(
        loaded
            .addresses()
            .get(&AddressKey::new(101, "fd02::1".parse().unwrap()))
            .unwrap()
            .unwrap()
            .service,
        5
    );
    assert!(
        loaded
            .nodes()
            .get(&NodeKey::new(101, [172, 16, 0, 1].into()))
            .unwrap()
            .is_some()
    );
    assert_eq!(
        loaded
            .tables()
            .get(&5)
            .unwrap()
            .map(|t| (t.vni, t.version, t.chain[127])),
        Some((101, 3, [1, 2, 0, 0, 0, 0, 0, 0]))
    );
}

/// Checks that a replica that fails gets no more packets and is reported, and that it comes back.
fn follow_a_death_and_a_recovery(m: &EdgeMachine, two: ReplicaPage) -> ReplicaPage {
    // When a replica fails, no more packets go to it, and the controller is notified within a
    // second.
    let died = Instant::now();
    two.close(&m.ns);
    m.until("down in the kernel", || up(m, 2) == Some(2));
    let took = m.until("down at the controller", || {
        m.newest_report().unwrap().1 == [("g1".to_string(), true), ("g2".to_string(), false)]
    });
    assert_time(
        "time until the controller hears of a dead replica",
        died.elapsed(),
        Duration::from_secs(2),
    );
    assert_time(
        "time from a found death to its report",
        took,
        Duration::from_millis(500),
    );
    assert!(
        m.fetch("GET", 15020, "/metrics")
            .1
            .contains("canal_edge_replica_changes_total{to=\"down\"} ")
    );
    let two = ReplicaPage::open(&m.ns, [250, 1, 0, 12]);
    m.until("back", || up(m, 2) == Some(1));
    let took = m.until("back at the controller", || {
        m.newest_report().unwrap().1.iter().all(|(_, up)| *up)
    });
    assert_time(
        "time from a found recovery to its report",
        took,
        Duration::from_millis(500),
    );
    two
}

/// Checks that a draining replica, which keeps its sessions, still receives packets.
fn keep_a_draining_replica(m: &EdgeMachine, one: &ReplicaPage) {
    one.draining
        .store(true, std::sync::atomic::Ordering::Relaxed);
    m.until("heard", || {
        m.fetch("GET", 15020, "/metrics")
            .1
            .contains("canal_edge_probes_total{result=\"draining\"}")
    });
    std::thread::sleep(Duration::from_millis(800));
    m.until(
        "still up, or again after a moment in which it did not run",
        || up(m, 1) == Some(1),
    );
}

#[test]
fn maps_follow_the_controller_and_replicas_are_followed_by_probes() {
    let m = EdgeMachine::new();
    let (one, two) = (
        ReplicaPage::open(&m.ns, [250, 1, 0, 11]),
        ReplicaPage::open(&m.ns, [250, 1, 0, 12]),
    );
    let edge = m.edge();
    edge.ready();
    maps_have_the_controllers_resources(&m);

    // Reports are sent twice a second with the token, and their responses contain the hosts.
    let script = m
        .controller
        .lock()
        .unwrap()
        .as_ref()
        .unwrap()
        .script
        .clone();
    script.lock().unwrap().orders.hosts = vec!["250.2.0.1".into()];
    m.until("hosts", || {
        m.dump()["hosts"].to_string().contains("250.2.0.1")
    });
    assert_eq!(script.lock().unwrap().subscribers, ["edge~edge-1"]);
    let reported = || script.lock().unwrap().reports.len();
    let before = reported();
    // 2.1 s hold four reports at two a second, with one more or less at the ends, and one more if
    // the state of a replica changes meanwhile, because changes are reported at once.
    std::thread::sleep(Duration::from_millis(2100));
    timed!(
        (3..=6).contains(&(reported() - before)),
        "an edge reports three to six times in two seconds"
    );
    m.until("reports go on", || reported() >= before + 3);
    let report = script.lock().unwrap().reports.last().unwrap().1.clone();
    assert_eq!(
        (
            report.az.as_str(),
            report.underlay.as_str(),
            report.generation
        ),
        ("az1", "250.1.0.1", 1)
    );

    a_packet_crosses_and_its_answer_returns(&m);

    // From now on the regular reports are a second apart, but changes are reported at once.
    script.lock().unwrap().orders.next_ms = 1000;
    let before = reported();
    // The first of these reports may still follow the old interval.
    m.until("the order has arrived", || reported() >= before + 2);

    let two = follow_a_death_and_a_recovery(&m, two);

    keep_a_draining_replica(&m, &one);

    // Removed resources disappear from the maps.
    m.controller
        .lock()
        .unwrap()
        .as_ref()
        .unwrap()
        .publish(|all| all.retain(|r| !r.name().contains("shop")));
    m.until("gone", || {
        m.dump()["addresses"].as_array().is_some_and(Vec::is_empty)
    });
    assert!(maps(&m).tables().get(&5).unwrap().is_none());
    assert!(
        m.metric("canal_edge_map_entries{map=\"canal_tables\"} 0")
            // 16,384 is the capacity of the map.
            && m.metric("canal_edge_map_limit{map=\"canal_tables\"} 16384")
    );
    one.close(&m.ns);
    two.close(&m.ns);
}

#[test]
fn the_program_forwards_on_without_an_agent_and_the_next_agent_adopts_it_without_the_controller() {
    let m = EdgeMachine::new();
    let edge = m.edge();
    edge.ready();
    // No replica page is open in this test. State 2 is `CANAL_REPLICA_DOWN`.
    m.until("both are down: no replica answers probes", || {
        (up(&m, 1), up(&m, 2)) == (Some(2), Some(2))
    });
    drop(m.controller.lock().unwrap().take());
    let first = m.ns.program();
    assert!(first.is_some());
    assert_eq!(edge.terminate(), Some(0));
    assert_eq!(m.ns.program(), first, "stopped in order: still there");
    assert_eq!(up(&m, 1), Some(2));

    let edge = m.edge();
    edge.ready();
    let second = m.ns.program();
    assert!(
        second.is_some() && second != first,
        "the agent's own program, in the place of the earlier one's"
    );
    let dump = m.dump();
    assert_eq!(
        (
            dump["southbound"]["live"].as_bool(),
            dump["tables"].as_array().map(Vec::len)
        ),
        (Some(false), Some(1)),
        "{dump}"
    );
    assert_eq!(
        dump["replicas"][0]["up"].as_bool(),
        Some(false),
        "what the earlier agent found is newer than the controller's word"
    );
    edge.kill();
    assert_eq!(m.ns.program(), second, "killed: still there");
    assert_eq!(
        // The fixture's table is that of service 5, and has version 3.
        maps(&m).tables().get(&5).unwrap().map(|t| t.version),
        Some(3)
    );

    // An operator's --detach removes the program, and it can be repeated.
    for _ in 0..2 {
        let detached = m.output(&["--detach"]);
        assert!(
            detached.status.success(),
            "{}",
            String::from_utf8_lossy(&detached.stderr)
        );
        assert_eq!(m.ns.program(), None);
        assert!(
            !m.pins()
                .join(format!("edge-v{}", canal_abi::tier::ABI))
                .exists()
        );
    }

    // The controller and the pins are gone, so this agent has the snapshot alone.
    let edge = m.edge();
    edge.ready();
    assert_eq!(
        maps(&m).tables().get(&5).unwrap().map(|t| t.version),
        Some(3)
    );
    assert_eq!(edge.terminate(), Some(0));
}

#[test]
fn externally_flushed_programs_and_maps_are_reinstalled() {
    let m = EdgeMachine::new();
    let edge = m.edge();
    edge.ready();
    // Three ways in which another program could remove parts of the edge's.
    for (what, flush) in [
        (
            "attachment",
            Box::new(|m: &EdgeMachine| drop(m.ns.tc("qdisc del dev eth0 clsact")))
                as Box<dyn Fn(&EdgeMachine)>,
        ),
        (
            "elements",
            Box::new(|m| {
                maps(m)
                    .addresses()
                    .remove(&AddressKey::new(101, "10.255.32.1".parse().unwrap()))
                    .unwrap()
            }),
        ),
        (
            "pins",
            Box::new(|m| {
                let dir = fs::read_dir(m.pins())
                    .unwrap()
                    .flatten()
                    .find(|e| e.file_name().to_string_lossy().starts_with("edge-"));
                fs::remove_dir_all(dir.unwrap().path()).unwrap();
            }),
        ),
    ] {
        flush(&m);
        let took = m.until(what, || {
            m.metric(&format!("canal_edge_repairs_total{{what=\"{what}\"}} 1"))
        });
        // The agent checks every 2 s (`PROGRAM_CHECK_INTERVAL`), so 5 s hold two checks and the
        // repair.
        assert_time(
            &format!("time until removed {what} are installed again"),
            took,
            Duration::from_secs(5),
        );
        assert!(m.ns.program().is_some(), "{what}");
        assert!(
            maps(&m)
                .addresses()
                .get(&AddressKey::new(101, "10.255.32.1".parse().unwrap()))
                .unwrap()
                .is_some(),
            "{what}"
        );
        assert_eq!(m.fetch("GET", 15021, "/healthz/ready").0, 200);
    }
    assert!(
        m.log().contains("removed externally") && m.log().contains("changed externally"),
        "{}",
        m.log()
    );
    assert_eq!(edge.terminate(), Some(0));
}

#[test]
fn resources_beyond_a_share_are_refused_by_name_and_others_applied() {
    let m = EdgeMachine::new();
    let edge = m.edge();
    edge.ready();
    // Alpha has the default share of each map.
    let share = canal_model::share::ShareKind::EdgeMapEntries
        .default_share()
        .of(canal_abi::tier::PREFIXES_MAX.into()) as u32;
    let many = |n: u32| -> Vec<_> {
        (0..n)
            .map(|i| {
                // Each prefix is another one; a group of an IPv6 address has 16 bits.
                format!("fd03::{:x}:{:x}/128", i >> 16, i & 0xffff)
                    .parse()
                    .unwrap()
            })
            .collect()
    };
    let node = |n: u32| {
        let Some(Resource::Node(n1)) = fixture::resources()
            .into_iter()
            .find(|r| r.kind() == ResourceKind::Node)
        else {
            unreachable!()
        };
        Resource::Node(Node {
            name: "n2".parse().unwrap(),
            underlay: [172, 16, 0, 2].into(),
            pod_cidrs: many(n),
            ..n1
        })
    };
    let publish = |change: &dyn Fn(&mut Vec<Resource>)| {
        m.controller
            .lock()
            .unwrap()
            .as_ref()
            .unwrap()
            .publish(change)
    };
    let nodes = |n: u32| {
        m.metric(&format!(
            "canal_edge_map_entries{{map=\"canal_nodes\"}} {n}"
        ))
    };
    // The first node already uses two entries.
    publish(&|all| all.push(node(share - 2)));
    m.until("the share is used up", || {
        m.metric(&format!(
            "canal_edge_map_entries{{map=\"canal_prefixes\"}} {share}"
        ))
    });
    // The number of nodes in the map depends on the fixture, so it is read here; it is below nine.
    let before = (1..9).find(|n| nodes(*n)).unwrap();
    // One update contains one prefix too many, and a resource that fits.
    publish(&|all| {
        *all.last_mut().unwrap() = node(share - 1);
        let Some(Resource::Node(n2)) = all.last().cloned() else {
            unreachable!()
        };
        all.push(Resource::Node(Node {
            name: "n3".parse().unwrap(),
            underlay: [172, 16, 0, 3].into(),
            pod_cidrs: Vec::new(),
            ..n2
        }));
    });
    m.until("refused", || {
        m.metric("canal_edge_map_refused_total{map=\"canal_prefixes\",tenant=\"alpha\"} 1")
    });
    m.until("the other resources are accepted", || nodes(before + 1));
    let refused = format!("does not fit canal_prefixes: its tenant's share is {share} entries");
    assert!(
        m.log().contains(&refused) && m.log().contains("alpha/n2 fd03::"),
        "{}",
        m.log()
    );
    assert!(m.metric(&format!(
        "canal_edge_map_entries{{map=\"canal_prefixes\"}} {share}"
    )));
    assert_eq!(m.fetch("GET", 15021, "/healthz/ready").0, 200);
    publish(&|all| all.truncate(all.len() - 2));
    // Both added nodes are gone, so only the two prefixes of the first node remain.
    m.until("room again", || {
        m.metric("canal_edge_map_entries{map=\"canal_prefixes\"} 2")
    });
    assert_eq!(edge.terminate(), Some(0));
}

#[test]
fn containers_interfaces_stay_guarded_until_they_are_detached() {
    let m = EdgeMachine::new();
    m.ns.ip("link add to-a type veth peer name in-a");
    for device in ["to-a", "in-a"] {
        m.ns.ip(&format!("link set {device} up"));
    }
    m.ns.ip("addr add 10.99.0.9/24 dev in-a");
    // The configured MAC is not that of the container.
    let text = r#"{"containers": [{"interface": "to-a", "tenant": "alpha", "vni": 101, "mac": "02:00:00:00:00:0a", "addresses": ["10.99.0.9"]}]}"#;
    fs::write(m.bindings(), text).unwrap();
    let guarded = || m.ns.has_filter("to-a", "canal_interface");
    let edge = m.edge();
    edge.ready();
    m.until("guarded", || {
        m.metric("canal_interface_guard_interfaces{state=\"guarded\"} 1")
    });
    assert!(guarded());
    let socket =
        m.ns.within(|| std::net::UdpSocket::bind("10.99.0.9:0").unwrap());
    // The guard refuses the neighbor discovery that this send causes.
    let _ = socket.send_to(b"x", "10.99.0.10:9");
    let refused = "canal_interface_guard_refused_total{interface=\"to-a\",tenant=\"alpha\"} ";
    m.until("refused and counted", || {
        let page = m.fetch("GET", 15020, "/metrics").1;
        page.lines()
            .filter_map(|line| line.strip_prefix(refused))
            .any(|n| n != "0")
    });
    assert!(
        m.log().contains("dropped frames of a container"),
        "{}",
        m.log()
    );
    // A file with a mistake changes nothing.
    fs::write(m.bindings(), "{").unwrap();
    m.until("not applied", || {
        m.metric("canal_interface_guard_file_errors_total{reason=\"format\"} 1")
    });
    assert!(guarded());
    // Another tool removes the guard; the agent must notice.
    m.ns.tc("qdisc del dev to-a clsact");
    m.until("reinstalled", guarded);
    edge.kill();
    assert!(guarded(), "no agent runs");
    let edge = m.edge();
    edge.ready();
    m.until("the file is still wrong", || {
        m.metric("canal_interface_guard_file_errors_total{reason=\"format\"} 1")
    });
    assert!(guarded(), "what an earlier agent bound stays");
    assert_eq!(edge.terminate(), Some(0));
    let detached = m.output(&["--detach"]);
    assert!(
        detached.status.success(),
        "{}",
        String::from_utf8_lossy(&detached.stderr)
    );
    assert!(
        !guarded()
            && !m
                .pins()
                .join(format!("interface-guard-v{}", canal_abi::tier::ABI))
                .exists(),
        "nothing stays"
    );
}

#[test]
fn the_admin_page_sets_the_level_and_ends_the_agent_in_order() {
    let m = EdgeMachine::new();
    let mut edge = m.edge();
    edge.ready();
    assert_eq!(m.fetch("POST", 15000, "/quitquitquit").0, 403);
    assert_eq!(
        m.fetch_socket("POST", "/logging?level=canal_edge_agent=debug")
            .0,
        200
    );
    assert_eq!(
        m.fetch("GET", 15000, "/version").1.trim(),
        env!("CARGO_PKG_VERSION")
    );
    m.until("counted", || {
        m.fetch("GET", 15020, "/metrics")
            .1
            .contains("canal_edge_packets_total{what=\"drop_unknown_source\"} 0")
    });
    assert!(
        m.fetch("GET", 15020, "/metrics")
            .1
            .contains("canal_edge_verified_instructions{program=\"canal_edge\"} ")
    );
    assert_eq!(m.fetch_socket("POST", "/quitquitquit").0, 200);
    assert_eq!(edge.child.wait().unwrap().code(), Some(0));
    assert!(m.ns.program().is_some());
}

#[test]
fn bad_flags_and_paths_are_reported_in_one_line() {
    let m = EdgeMachine::new();
    for (args, expected) in [
        (&["--controller", "nowhere"][..], "write https://HOST:PORT"),
        (&["--log", "!!"], "--log"),
        (&["--device", "eth7"], "MTU of eth7"),
        (&["--mtu", "1200"], "1280"),
        (&["--tunnels", "0"], "1..=25000"),
    ] {
        let out = m.output(args);
        let error_text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(
            !out.status.success() && error_text.contains(expected),
            "{args:?}: {error_text}"
        );
    }
}
