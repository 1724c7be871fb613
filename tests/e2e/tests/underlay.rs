//! What the underlay must track of a thousand client sessions: its session table (`bpf/sessions.bpf.c`) on the routers' ends of the replicas'
//! links. With aggregation it is bounded by tunnels and replicas, whatever the number of sessions; without, it is not.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};

use canal_e2e::Mesh;
use canal_offload::sessions::{OuterSession, Sessions};

const SESSIONS: u64 = 1000;
/// Source ports towards a replica, and from it: said to the edge and to the replica, so that the bound is not the machine's.
const TUNNELS: u64 = 16;
/// Sessions of a replica that are no tunnel's: to the controller, health probes, metrics.
const OWN: usize = 6;
const VXLAN_PORT: u16 = 4789;
/// The first port that the kernel gives to who asks for none.
const EPHEMERAL: u16 = 32768;
const TIER: [(&str, &[&str]); 2] = [("az1", &["gw-1", "gw-2", "gw-3", "gw-6"]), ("az2", &["gw-4", "gw-5"])];

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
fn watch(mesh: &Mesh, replicas: &[&str]) -> Vec<Sessions> {
    let router = |az: &str| mesh.world.host(&format!("router-{az}")).unwrap().seat.netns;
    let link = |replica: &str| {
        let seat = mesh.world.host(replica).unwrap().seat;
        let device = seat.router_device.expect("a replica has a link");
        Sessions::attach(Some(Path::new(&router(&seat.az))), &device).unwrap_or_else(|e| panic!("{replica}: {e}"))
    };
    replicas.iter().map(|replica| link(replica)).collect()
}

/// What a link's sessions are: source ports from one end of a tunnel to the other, by who sends to whom, and who else is spoken to.
#[derive(Debug, Default)]
struct Link {
    tunnels: BTreeMap<(IpAddr, IpAddr), BTreeSet<u16>>,
    own: BTreeSet<(u8, SocketAddr)>,
    /// In all, each connection by itself.
    sessions: u64,
}

impl Link {
    fn of(sessions: &[OuterSession]) -> Link {
        let mut link = Link { sessions: sessions.len() as u64, ..Link::default() };
        for OuterSession { protocol, ends: [one, other] } in sessions {
            let (from, to) = if one.port() == VXLAN_PORT { (other, one) } else { (one, other) };
            if to.port() == VXLAN_PORT {
                link.tunnels.entry((from.ip(), to.ip())).or_default().insert(from.port());
            } else {
                link.own.extend([one, other].into_iter().filter(|end| end.port() < EPHEMERAL).map(|end| (*protocol, *end)));
            }
        }
        link
    }

    /// Each way of each tunnel has no more source ports than it was given, and there is nothing else but what every replica has.
    fn is_bounded(&self) -> bool {
        self.sessions <= 2 * TUNNELS + OWN as u64
            && self.tunnels.values().all(|ports| ports.len() as u64 <= TUNNELS)
            && self.own.len() <= OWN
    }

    fn through_tunnels(&self) -> u64 {
        self.tunnels.values().map(|ports| ports.len() as u64).sum()
    }
}

/// The links, and the sessions inside of their tunnels, while a pod holds a thousand. What is read later has more: the last acknowledgement of
/// a session that has ended finds no owner, and is passed from replica to replica to the end of its chain.
fn hold(mesh: &Mesh, pod: &str, replicas: &[&str]) -> (Vec<Link>, u64) {
    let addresses = mesh.resolve(pod, "tcp.default.svc.cluster.local");
    assert_eq!(addresses.len(), 2, "{pod}: both families: {addresses:?}");
    let targets: Vec<String> = addresses.iter().map(|a| if a.is_ipv6() { format!("[{a}]:7000") } else { format!("{a}:7000") }).collect();
    let tables = watch(mesh, replicas);
    let inner = || -> u64 { tables.iter().map(|table| table.sessions().unwrap().1).sum() };
    let count = SESSIONS.to_string();
    let mut argv = vec!["canal-samples", "sessions", &targets[0], &targets[1], "-n", &count, "--open-rate", "500"];
    argv.extend(["--interval-ms", "1000", "-d", "10"]);
    let mut client = mesh.spawn(pod, &argv);
    let started = Instant::now();
    // Each client's session, and the one to the endpoint that the replica dialled for it.
    while inner() < 2 * SESSIONS {
        assert!(started.elapsed() < Duration::from_secs(8), "{pod}: {} inside only: the table did not see them all", inner());
        std::thread::sleep(Duration::from_millis(50));
    }
    // All of them speak once more.
    std::thread::sleep(Duration::from_millis(1200));
    let read = (tables.iter().map(|table| Link::of(&table.outer())).collect(), inner());
    assert!(client.try_wait().unwrap().is_none(), "{pod}: the sessions ended before they were read");
    let report = mesh.end("a thousand sessions", client).json();
    assert_eq!(report["ok"], true, "{pod}: {report}");
    read
}

#[test]
fn sessions_at_the_underlay_are_bounded_by_tunnels_and_replicas() {
    let mesh = mesh();
    // While buckets move, replicas pass packets on to each other, by tunnels of their own.
    mesh.rest(Duration::from_secs(60));
    let [(_, aggregated), (_, plain)] = TIER;
    let (links, inner) = hold(&mesh, "beta/default/client-0", aggregated);
    let outer: Vec<u64> = links.iter().map(Link::through_tunnels).collect();
    println!("{SESSIONS} sessions, aggregated: {outer:?} through tunnels at the underlay, {inner} inside");
    assert!(links.iter().all(Link::is_bounded), "more than {TUNNELS} source ports each way, or more than {OWN} others: {links:#?}");
    // At rest the edge alone sends to replicas, and each to the edge alone.
    assert!(links.iter().all(|link| link.tunnels.len() <= 2), "replicas at rest speak with others than the edge: {links:#?}");

    let (links, inner) = hold(&mesh, "beta/default/client-far-0", plain);
    let outer: Vec<u64> = links.iter().map(Link::through_tunnels).collect();
    println!("{SESSIONS} sessions, a source port for each flow: {outer:?} through tunnels at the underlay, {inner} inside");
    let all: u64 = outer.iter().sum();
    assert!(all > SESSIONS / 2, "{outer:?}: without aggregation the table should be long: does it see anything?");
}
