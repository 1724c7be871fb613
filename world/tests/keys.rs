//! Access to key servers: which hosts reach them, which are refused and counted, and a key server
//! with a delayed link. Needs root.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::scene;
use crate::scene::{dial, dial_in_vain};
use canal_timing::{assert_time, deadline};
use canal_world::{KEYS_PORT, Topology, World};

/// Brings up the tier topology with key servers that answer `canal-world-peer dial`. `sleep`
/// replaces the mesh's programs.
fn world(tag: &str) -> World {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies/tier.yaml");
    let text = std::fs::read_to_string(&file).expect("the tier topology");
    let listen = format!(
        "command: [canal-world-peer, listen, \"{KEYS_PORT}\"], readiness: {{tcp: {{port: {KEYS_PORT}}}}}"
    );
    let servers = format!(
        "hosts:\n- {{name: load, az: az1}}\nkeyServers:\n- {{name: ks-1, az: az1, delay: 0ms, {listen}}}\n- {{name: beta-ks, az: az2, tenant: beta, {listen}}}\ntenants:\n"
    );
    let text = text.replacen("tenants:\n", &servers, 1);
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
    let topology = topology.renamed(&scene::name(tag)).expect("a name");
    let world =
        World::up(&topology, &scene::options(true)).unwrap_or_else(|error| panic!("{error}"));
    world
        .wait_ready(deadline(scene::STEP_TIMEOUT))
        .unwrap_or_else(|error| panic!("{error}"));
    world
}

fn address(world: &World, host: &str) -> String {
    let address = world.host(host).expect("a host").ip4().expect("an address");
    format!("{address}:{KEYS_PORT}")
}

#[test]
fn only_requesters_reach_key_servers() {
    let world = world("keys");
    for (from, to, expected) in [
        ("a-n1", "ks-1", true),
        ("b-n2", "ks-1", true),
        ("gw-1a", "ks-1", true),
        ("gw-4b", "ks-1", true),
        // Edges, other hosts, key servers and pods never need a key server.
        ("edge-1", "ks-1", false),
        ("load", "ks-1", false),
        ("beta-ks", "ks-1", false),
        ("alpha/shop/client-0", "ks-1", false),
        ("b-n1", "beta-ks", true),
        ("gw-1a", "beta-ks", true),
        ("a-n1", "beta-ks", false),
        ("ks-1", "beta-ks", false),
        ("beta/shop/client-0", "beta-ks", false),
    ] {
        let address = address(&world, to);
        if expected {
            dial(&world, from, &address).unwrap_or_else(|error| panic!("{from} to {to}: {error}"));
        } else {
            dial_in_vain(&world, from, &address, &format!("{from} to {to}"));
        }
    }
    let counted = |router: &str| world.refused(router).expect("counters").keys;
    // Refusals are counted on the router of the dialled server, and both AZs have cases.
    assert!(
        counted("router-az1") > 0 && counted("router-az2") > 0,
        "{} {}",
        counted("router-az1"),
        counted("router-az2")
    );
    let objects = std::fs::read_to_string(world.config_dir("beta").join("_keyservers.yaml"))
        .expect("beta's key servers");
    assert!(
        objects.contains("beta-ks") && objects.contains(":15013"),
        "{objects}"
    );
    assert!(!world.config_dir("alpha").join("_keyservers.yaml").exists());
    let principals =
        std::fs::read_to_string(world.dir().join("principals.yaml")).expect("principals");
    // The world has two key servers: ks-1 and beta-ks.
    assert_eq!(principals.matches("keyserver").count(), 2, "{principals}");
}

#[test]
fn a_link_is_late_for_as_long_as_wished() {
    let world = world("slow");
    let took = || {
        let started = Instant::now();
        dial(&world, "a-n1", &address(&world, "ks-1")).expect("it is delayed, not lost");
        started.elapsed()
    };
    let late = Duration::from_millis(150);
    let before = took();
    let slow = world
        .delay("ks-1", late)
        .unwrap_or_else(|error| panic!("{error}"));
    let during = took();
    drop(slow);
    let after = took();
    assert!(
        during >= 4 * late,
        "connecting and asking are two round trips: {during:?}"
    );
    assert_time("time of a dial before a link is late", before, 2 * late);
    assert_time("time of a dial after a link was late", after, 2 * late);
    let refused = world
        .delay("gw-1a", late)
        .expect_err("a link without a relay")
        .to_string();
    assert!(
        refused.contains("has no relay; fix: write `delay: 0ms`"),
        "{refused}"
    );
}
