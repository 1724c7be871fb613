//! Two edges in one AZ behind one tunnel end: one that dies, one that is removed and returns, an
//! agent that is killed. Also the tunnels of aggregation: how they spread over a replica's cores,
//! and how to find one session in them. The clients count the losses; nothing here retries.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::process::Child;
use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{Mesh, until};
use canal_timing::{assert_losses, assert_time, deadline, is_timed, timed};
use canal_world::Signal;
use serde_json::Value;

/// A pod behind a node proxy, and one whose node runs no part of the mesh.
const MESHED: &str = "alpha/default/client-0";
const PROXYLESS: &str = "beta/default/client-0";
/// The edges of az1.
const EDGES: [&str; 2] = ["edge-1", "edge-3"];
/// Replicas of az1, and the number of cores on which each receives.
const REPLICAS: [&str; 2] = ["gw-1", "gw-2"];
/// The fewest that can differ; the test machine has two.
const CORES: u16 = 2;
/// The other edge takes over within this time; TCP retransmits the segments that were in transit
/// through the dead one.
const GAP_MAX: Duration = Duration::from_secs(1);
/// A client of the timing tier waits this long for a response. It only has to exceed what a quiet
/// machine needs: in the gate, `deadline` waits a minute or more.
const ANSWERED_WITHIN: Duration = Duration::from_secs(3);
/// Loads of the timing tier go on for this long after an event. Eight times `GAP_MAX`, so that a
/// later gap would be in the report.
const LOADED_FOR: Duration = Duration::from_secs(8);
/// It only has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or
/// more.
const SETTLED_WITHIN: Duration = Duration::from_secs(30);
/// Simultaneous sessions of one pod: about a thousand at each replica. So a core's share is large
/// against its spread by chance.
const SESSIONS: u64 = 2000;
/// The same in the gate, which checks only that each core has some.
const GATE_SESSIONS: u64 = 300;
/// Packets of a load that show that an edge carries it: two seconds of the 25 requests that each
/// load sends in a second.
const CARRIED_MIN: u64 = 50;

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let mesh = Mesh::up_with("tier.yaml", "e2e-edges", |topology| {
            let second = topology
                .edges
                .iter()
                .find(|edge| edge.name == EDGES[0])
                .expect("it is in the file")
                .clone();
            topology.edges.push(canal_world::topology::Component {
                name: EDGES[1].into(),
                ..second
            });
            topology.gateways.retain(|gateway| {
                REPLICAS.contains(&gateway.name.as_str()) || gateway.name == "gw-4"
            });
            topology
                .gateways
                .iter_mut()
                .for_each(|gateway| gateway.receive_cores = CORES);
        });
        for client in [MESHED, PROXYLESS] {
            until(
                deadline(SETTLED_WITHIN),
                &format!("{client} is answered"),
                || mesh.code(client, &url(), &[]) == 200,
            );
        }
        mesh
    })
}

fn url() -> String {
    "http://web-0.default.svc.cluster.local:80/blob?size=100".into()
}

/// Starts loads of both clients, on persistent and on new connections, which run until the test
/// stops them.
fn loads() -> Vec<(String, Child)> {
    let load = |client: &str, what: &str, extra: &[&str]| {
        let (url, timeout_ms) = (url(), deadline(ANSWERED_WITHIN).as_millis().to_string());
        let argv = [
            &[
                "canal-samples",
                "load",
                &url,
                "-r",
                "25",
                "-c",
                "8",
                "-d",
                "600",
                "--timeout-ms",
                &timeout_ms,
            ],
            extra,
        ]
        .concat();
        (format!("{client}, {what}"), mesh().spawn(client, &argv))
    };
    let of = |client| {
        [
            load(client, "kept", &[]),
            load(client, "new", &["--no-keepalive"]),
        ]
    };
    [MESHED, PROXYLESS].into_iter().flat_map(of).collect()
}

/// Ends the loads. The gate checks that no client with a long timeout lost a request. The timing
/// tier checks that clients with a short timeout lost none, and that no gap was longer than
/// [`GAP_MAX`].
fn unharmed(what: &str, loads: Vec<(String, Child)>) {
    if is_timed() {
        std::thread::sleep(LOADED_FOR);
    }
    let reports: Vec<(String, Value)> = loads
        .into_iter()
        .map(|(load, child)| (load, mesh().stop(what, child).json()))
        .collect();
    for (load, report) in &reports {
        println!(
            "{what}: {load}: {} of {} failed, gap {} ms",
            report["failed"], report["requests"], report["gap_ms_max"]
        );
    }
    for (load, report) in reports {
        let failed = report["failed"].as_u64().expect("a count");
        assert!(is_timed() || failed == 0, "{what}: {load}: {report}");
        assert_losses(&format!("requests lost when {what}: {load}"), failed, 0);
        let gap = Duration::from_secs_f64(report["gap_ms_max"].as_f64().expect("a gap") / 1000.0);
        assert_time(
            &format!("time without a response when {what}: {load}"),
            gap,
            GAP_MAX,
        );
        timed!(
            report["requests"].as_u64() > Some(100),
            "more than 100 requests are sent when {what}: {load}"
        );
    }
}

/// Returns the number of service packets that an edge sent to replicas.
fn carried(edge: &str) -> u64 {
    mesh().counted(edge, "canal_edge_packets_total", &["what=\"to_replica\""])
}

/// Waits until both edges have carried packets since.
fn both_carry(before: [u64; 2]) {
    until(deadline(SETTLED_WITHIN), "both edges carry", || {
        EDGES
            .iter()
            .zip(before)
            .all(|(edge, before)| carried(edge) > before + CARRIED_MIN)
    });
}

/// T16. Both edges carry packets before. Then the link of one goes down, which to routers is a dead
/// host; the other carries everything.
#[test]
fn a_dead_edge_loses_no_session_and_delays_under_a_second() {
    let mesh = mesh();
    let before = EDGES.map(carried);
    let loads_running = loads();
    both_carry(before);
    mesh.world.link_down(EDGES[1]).unwrap();
    let alone = carried(EDGES[0]);
    until(
        deadline(SETTLED_WITHIN),
        "the other edge carries all traffic",
        || carried(EDGES[0]) > alone + 2 * CARRIED_MIN,
    );
    unharmed("an edge's host dies", loads_running);
    until(
        deadline(SETTLED_WITHIN),
        "az1 is open to all services",
        || {
            let open = mesh.canal(&["gateway", "status", "-o", "json"]).json();
            let services = open["services"].as_array().expect("services");
            services
                .iter()
                .all(|service| service["open_azs"].to_string().contains("az1"))
        },
    );
    mesh.world.link_up(EDGES[1]).unwrap();
    mesh.converge(deadline(SETTLED_WITHIN));
}

/// The program continues to forward, and the new agent adopts the maps.
#[test]
fn a_killed_edge_agent_affects_no_traffic() {
    let mesh = mesh();
    let before = EDGES.map(carried);
    let loads_running = loads();
    both_carry(before);
    mesh.world.kill(EDGES[0], Signal::Kill).unwrap();
    mesh.world
        .wait_host_ready(EDGES[0], deadline(SETTLED_WITHIN))
        .unwrap();
    unharmed("an edge's agent is killed", loads_running);
    mesh.converge(deadline(SETTLED_WITHIN));
}

/// Planned removal: routers stop sending to the edge; then it ends, and its program is removed. Its
/// return starts with its readiness.
#[test]
// The world's router spreads flows over next hops, as ECMP does in a provider's network.
fn adding_and_removing_an_edge_breaks_no_session() {
    let mesh = mesh();
    let router = mesh.world.host("router-az1").unwrap().environment.name;
    let route = |edges: &[&str]| {
        let hop = |edge: &&str| {
            let environment = mesh.world.host(edge).unwrap().environment;
            format!(
                " nexthop via {} dev {} onlink",
                environment.ip4.expect("an address"),
                environment.router_device.expect("a link")
            )
        };
        let line = format!(
            // 250.1.255.1 is the tunnel end that the edges of AZ 1 share.
            "ip route replace 250.1.255.1/32{}",
            edges.iter().map(hop).collect::<String>()
        );
        mesh.run(&router, &line.split(' ').collect::<Vec<_>>())
            .expect_success();
    };
    let before = EDGES.map(carried);
    let loads_running = loads();
    both_carry(before);
    // Routers leave the edge out before it stops, so that no packet reaches a stopped program.
    route(&EDGES[..1]);
    mesh.world.stop(EDGES[1]).unwrap();
    // A stopped agent leaves its program attached, so that packets flow without it; removal is
    // explicit.
    mesh.run(EDGES[1], &["tc", "qdisc", "del", "dev", "eth0", "clsact"])
        .expect_success();
    let before = carried(EDGES[0]);
    // Agents read their programs' counters every two seconds.
    until(
        deadline(SETTLED_WITHIN),
        "the other edge carries all traffic",
        // Twice, because one edge carries the share of both.
        || carried(EDGES[0]) > before + 2 * CARRIED_MIN,
    );
    // The order is the reverse at its return: the edge is ready before routers use it.
    mesh.world.start(EDGES[1]).unwrap();
    mesh.world
        .wait_host_ready(EDGES[1], deadline(SETTLED_WITHIN))
        .unwrap();
    route(&EDGES);
    let back = carried(EDGES[1]);
    until(
        deadline(SETTLED_WITHIN),
        "the returned edge carries packets again",
        || carried(EDGES[1]) > back + CARRIED_MIN,
    );
    unharmed("an edge is removed and added", loads_running);
    mesh.converge(deadline(SETTLED_WITHIN));
}

/// Returns the number of packets that each core of a replica received.
fn by_core(replica: &str) -> Vec<u64> {
    let core = |n: u16| {
        mesh().counted(
            replica,
            "canal_redirector_received_packets_total",
            &[&format!("core=\"{n}\"")],
        )
    };
    (0..CORES).map(core).collect()
}

/// Canal 4.4: many sessions in few tunnels, and yet spread evenly over all cores of the replica.
#[test]
fn sessions_of_tunnels_spread_over_a_replica_s_cores() {
    let mesh = mesh();
    // The gate only needs some packets on each core; the timing tier needs enough for even shares.
    let (count, sent_every_ms) = if is_timed() {
        (SESSIONS, "4000")
    } else {
        (GATE_SESSIONS, "500")
    };
    if is_timed() {
        // Sessions of earlier tests count as owned until they have left TIME_WAIT after 60 s.
        mesh.rest(Duration::from_secs(90));
    }
    let count = count.to_string();
    let addresses = mesh.resolve(PROXYLESS, "tcp.default.svc.cluster.local");
    let targets: Vec<String> = addresses
        .iter()
        .map(|ip| SocketAddr::new(*ip, 7000).to_string())
        .collect();
    let mut argv = vec!["canal-samples", "sessions"];
    argv.extend(targets.iter().map(String::as_str));
    // A session whose answer takes longer counts as broken, so the gate waits a minute.
    let patience_ms = deadline(Duration::from_secs(5)).as_millis().to_string();
    argv.extend([
        "-n",
        &count,
        // Five seconds until all are open in the timing tier.
        "--open-rate",
        "400",
        "--interval-ms",
        sent_every_ms,
        "--patience-ms",
        &patience_ms,
        // Longer than the test, which stops the client.
        "-d",
        "600",
    ]);
    let client = mesh.spawn(PROXYLESS, &argv);
    if is_timed() {
        // All 2,000 sessions are open by then, at 400 each second.
        std::thread::sleep(Duration::from_secs(12));
    }
    let before: BTreeMap<&str, Vec<u64>> = REPLICAS
        .iter()
        .map(|replica| (*replica, by_core(replica)))
        .collect();
    let since = |replica: &str| -> Vec<u64> {
        by_core(replica)
            .iter()
            .zip(&before[replica])
            .map(|(now, before)| now - before)
            .collect()
    };
    if is_timed() {
        // Each session sends three times in this time.
        std::thread::sleep(Duration::from_secs(12));
    }
    for replica in REPLICAS {
        until(
            deadline(SETTLED_WITHIN),
            &format!("every core of {replica} receives"),
            || since(replica).iter().all(|n| *n > CARRIED_MIN),
        );
        let packets = since(replica);
        // An even share is a core's expected part; with fewer packets the parts differ by chance.
        let share = packets.iter().sum::<u64>() as f64 / f64::from(CORES);
        println!("{replica}: packets of tunnels by core {packets:?}");
        timed!(
            // A third of what is sent: a thousand sessions send three times, to two cores.
            share > 500.0,
            "{replica} receives more than 500 packets a core"
        );
        let is_even = packets
            .iter()
            // The bound of `replica.rs` in the redirector agent: cores have up to a fifth more
            // tunnels.
            .all(|n| (0.7..=1.3).contains(&(*n as f64 / share)));
        timed!(
            is_even,
            "each core of {replica} receives within 30 % of its share"
        );
    }
    let report = mesh.stop("sessions", client).json();
    assert_eq!(report["ok"], true, "{report}");
}

/// Appendix A: the price of many sessions in one tunnel is that none of them is visible outside of
/// it.
#[test]
fn a_session_is_found_in_its_tunnel() {
    let mesh = mesh();
    for address in mesh.resolve(PROXYLESS, "tcp.default.svc.cluster.local") {
        let open = || TcpStream::connect((address, 7000));
        let stream = mesh
            .world
            .inside(PROXYLESS, open)
            .unwrap()
            .unwrap_or_else(|e| panic!("{address}: {e}"));
        let client = stream.local_addr().unwrap().to_string();
        let found = mesh
            // Any replica may own the session, so an answer from every one is needed for a complete
            // result.
            .canal(&["sessions", "beta", &client, "-o", "json"])
            .json();
        let sessions = found["sessions"].as_array().expect("sessions");
        assert_eq!(
            (sessions.len(), &found["unanswered"]),
            (1, &serde_json::json!([])),
            "{client}: {found:#}"
        );
        let session = &sessions[0];
        assert_eq!(
            (session["service"].as_str(), session["port"].as_u64()),
            (Some("beta/default/tcp"), Some(7000)),
            "{found:#}"
        );
        let owner = session["owner"].as_str().unwrap_or_default();
        assert!(REPLICAS.contains(&owner), "{found:#}");
        let paths = session["paths"].as_array().expect("paths");
        let edges: Vec<&str> = paths
            .iter()
            .filter_map(|path| path["edge"].as_str())
            .collect();
        assert_eq!(edges, EDGES, "any of them may carry it: {found:#}");
        for path in paths {
            // A bucket may have moved since the session began. Then its new replica forwards the
            // session's packets to the owner.
            let chain: Vec<&str> = path["chain"]
                .as_array()
                .expect("a chain")
                .iter()
                .filter_map(|name| name.as_str())
                .collect();
            assert_eq!(
                path["replica"].as_str(),
                chain.first().copied(),
                "{found:#}"
            );
            assert!(
                // Ports of tunnels begin at 40000 (`TUNNEL_PORT`).
                chain.contains(&owner) && path["tunnel_port"].as_u64() >= Some(40_000),
                "{found:#}"
            );
        }
        // All edges must send a session's packets to the same replica, or a dead edge would break
        // sessions.
        assert_eq!(
            (&paths[0]["tunnel_port"], &paths[0]["chain"]),
            (&paths[1]["tunnel_port"], &paths[1]["chain"]),
            "edges agree: {found:#}"
        );
        // The other tenant has a pod with the same address, and no such session.
        let other = mesh.canal(&["sessions", "alpha", &client]);
        assert!(
            other.code != Some(0) && other.stderr.contains("no replica has a session"),
            "{other:?}"
        );
        println!("{}", mesh.canal(&["sessions", "beta", &client]).stdout);
    }
}
