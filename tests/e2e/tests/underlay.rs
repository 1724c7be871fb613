//! The state that the underlay keeps for a thousand client sessions: its session table
//! (`bpf/session_count.bpf.c`) on the routers' ends of the replicas' links. With aggregation the
//! number of tunnels and replicas bounds it, whatever the number of sessions; without aggregation
//! nothing does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use canal_e2e::{Mesh, until};
use canal_offload::sessions::{OuterSession, SessionTable};
use canal_timing::deadline;

/// Many times the bound of 38 that aggregation allows (`TUNNELS`, `OWN`).
const SESSIONS: u64 = 1000;
/// Source ports towards a replica and from it. Edge and replica are configured with this number, so
/// that the machine does not set the bound.
const TUNNELS: u64 = 16;
/// Sessions of a replica that belong to no tunnel: to the controller, health probes, metrics. As
/// many as were counted; a connection that the mesh adds must be added here.
const OWN: usize = 6;
/// Time within which the sessions are open and counted on the routers. It only has to exceed what a
/// quiet machine needs: in the gate, `deadline` waits a minute or more.
const SEEN_WITHIN: Duration = Duration::from_secs(8);
/// RFC 7348 §5.
const VXLAN_PORT: u16 = 4789;
/// First port that the kernel chooses for a socket without a port. Linux's default of
/// `net.ipv4.ip_local_port_range`.
const EPHEMERAL: u16 = 32768;
const TIER: [(&str, &[&str]); 2] = [
    ("az1", &["gw-1", "gw-2", "gw-3", "gw-6"]),
    ("az2", &["gw-4", "gw-5"]),
];

fn mesh() -> Mesh {
    let tunnels = TUNNELS.to_string();
    Mesh::up_with("tier.yaml", "e2e-under", |topology| {
        for part in topology.edges.iter_mut().chain(&mut topology.gateways) {
            let args = &mut part.process.as_mut().expect("it runs").args;
            args.extend(["--tunnels".to_string(), tunnels.clone()]);
            if part.name == "edge-2" {
                args.push("--no-aggregate".to_string());
            }
        }
    })
}

/// Watches the links of these replicas from their router.
fn watch(mesh: &Mesh, replicas: &[&str]) -> Vec<SessionTable> {
    let router = |az: &str| {
        mesh.world
            .host(&format!("router-{az}"))
            .unwrap()
            .environment
            .netns
    };
    let link = |replica: &str| {
        let environment = mesh.world.host(replica).unwrap().environment;
        let device = environment.router_device.expect("a replica has a link");
        SessionTable::attach(Some(Path::new(&router(&environment.az))), &device)
            .unwrap_or_else(|e| panic!("{replica}: {e}"))
    };
    replicas.iter().map(|replica| link(replica)).collect()
}

/// Sessions of a link: source ports from one end of a tunnel to the other, by sender and receiver,
/// and all other peers.
#[derive(Debug, Default)]
struct LinkSessions {
    tunnels: BTreeMap<(IpAddr, IpAddr), BTreeSet<u16>>,
    own: BTreeSet<(u8, SocketAddr)>,
    /// Total number, each connection separately.
    sessions: u64,
}

impl LinkSessions {
    fn of(sessions: &[OuterSession]) -> LinkSessions {
        let mut link = LinkSessions {
            sessions: sessions.len() as u64,
            ..LinkSessions::default()
        };
        for OuterSession {
            protocol,
            ends: [one, other],
        } in sessions
        {
            let (from, to) = if one.port() == VXLAN_PORT {
                (other, one)
            } else {
                (one, other)
            };
            if to.port() == VXLAN_PORT {
                link.tunnels
                    .entry((from.ip(), to.ip()))
                    .or_default()
                    .insert(from.port());
            } else {
                link.own.extend(
                    [one, other]
                        .into_iter()
                        .filter(|end| end.port() < EPHEMERAL)
                        .map(|end| (*protocol, *end)),
                );
            }
        }
        link
    }

    /// Returns whether each direction of each tunnel has at most the configured source ports, and
    /// there is nothing else but what every replica has.
    fn is_bounded(&self) -> bool {
        self.sessions <= 2 * TUNNELS + OWN as u64
            && self
                .tunnels
                .values()
                .all(|ports| ports.len() as u64 <= TUNNELS)
            && self.own.len() <= OWN
    }

    fn through_tunnels(&self) -> u64 {
        self.tunnels.values().map(|ports| ports.len() as u64).sum()
    }
}

/// Returns the links, and the sessions inside of their tunnels, while a pod holds a thousand. A
/// later read has more: the last acknowledgment of an ended session finds no owner, and passes from
/// replica to replica to the end of its chain.
fn hold(mesh: &Mesh, pod: &str, replicas: &[&str]) -> (Vec<LinkSessions>, u64) {
    let addresses = mesh.resolve(pod, "tcp.default.svc.cluster.local");
    assert_eq!(addresses.len(), 2, "{pod}: both families: {addresses:?}");
    let targets: Vec<String> = addresses
        .iter()
        .map(|a| {
            if a.is_ipv6() {
                format!("[{a}]:7000")
            } else {
                format!("{a}:7000")
            }
        })
        .collect();
    let tables = watch(mesh, replicas);
    let inner = || -> u64 { tables.iter().map(|table| table.sessions().unwrap().1).sum() };
    let count = SESSIONS.to_string();
    // Half of the sessions use each family.
    let mut argv = vec![
        "canal-samples",
        "sessions",
        &targets[0],
        &targets[1],
        "-n",
        &count,
        // Two seconds until all are open, within `SEEN_WITHIN`.
        "--open-rate",
        "500",
    ];
    // A response may be late on a busy machine; sessions that give up would change the count. They
    // last longer than the test, which stops them.
    argv.extend([
        "--interval-ms",
        "1000",
        "--patience-ms",
        "60000",
        "-d",
        "600",
    ]);
    let mut client = mesh.spawn(pod, &argv);
    // Each client has its session, and another to the endpoint that the replica dialed for it.
    until(
        deadline(SEEN_WITHIN),
        &format!("{pod}: the table has seen all sessions"),
        || inner() >= 2 * SESSIONS,
    );
    // Sessions send every second (`--interval-ms`), so each has sent once more after this wait.
    std::thread::sleep(Duration::from_millis(1200));
    let read = (
        tables
            .iter()
            .map(|table| LinkSessions::of(&table.outer()))
            .collect(),
        inner(),
    );
    // Ended sessions leave the table, so they must be open while it is read.
    assert!(
        client.try_wait().unwrap().is_none(),
        "{pod}: the sessions ended before they were read"
    );
    let report = mesh.stop("a thousand sessions", client).json();
    assert_eq!(report["ok"], true, "{pod}: {report}");
    read
}

#[test]
fn sessions_at_the_underlay_are_bounded_by_tunnels_and_replicas() {
    let mesh = mesh();
    // While buckets move, replicas forward packets to each other in tunnels of their own.
    mesh.rest(deadline(Duration::from_secs(60)));
    let [(_, aggregated), (_, plain)] = TIER;
    let (links, inner) = hold(&mesh, "beta/default/client-0", aggregated);
    let outer: Vec<u64> = links.iter().map(LinkSessions::through_tunnels).collect();
    println!(
        "{SESSIONS} sessions, aggregated: {outer:?} through tunnels at the underlay, {inner} inside"
    );
    assert!(
        links.iter().all(LinkSessions::is_bounded),
        "more than {TUNNELS} source ports each way, or more than {OWN} others: {links:#?}"
    );
    // At rest only the edge sends to replicas, and each replica sends only to the edge.
    assert!(
        links.iter().all(|link| link.tunnels.len() <= 2),
        "replicas at rest speak with others than the edge: {links:#?}"
    );

    let (links, inner) = hold(&mesh, "beta/default/client-far-0", plain);
    let outer: Vec<u64> = links.iter().map(LinkSessions::through_tunnels).collect();
    println!(
        "{SESSIONS} sessions, a source port for each flow: {outer:?} through tunnels at the underlay, {inner} inside"
    );
    let all: u64 = outer.iter().sum();
    assert!(
        all > SESSIONS / 2,
        "{outer:?}: without aggregation the table should be long: does it see anything?"
    );
}
