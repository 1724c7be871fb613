//! What the underlay must track of a thousand client sessions: its session table (`bpf/sessions.bpf.c`) on the routers' ends of the replicas'
//! links. With aggregation it is bounded by tunnels and replicas, whatever the number of sessions; without, it is not.

use std::path::Path;
use std::time::Duration;

use canal_e2e::Mesh;
use canal_offload::sessions::Sessions;

const SESSIONS: u64 = 1000;
/// Source ports towards a replica, and from it: said to the edge and to the replica, so that the bound is not the machine's.
const TUNNELS: u64 = 16;
/// Sessions of a replica that are no tunnel's: to the controller, health probes, metrics.
const OWN: u64 = 6;
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

/// Sessions outside and inside of the tunnels while a pod holds a thousand.
fn hold(mesh: &Mesh, pod: &str, replicas: &[&str]) -> (Vec<u64>, u64) {
    let addresses = mesh.resolve(pod, "tcp.default.svc.cluster.local");
    assert_eq!(addresses.len(), 2, "{pod}: both families: {addresses:?}");
    let targets: Vec<String> = addresses.iter().map(|a| if a.is_ipv6() { format!("[{a}]:7000") } else { format!("{a}:7000") }).collect();
    let tables = watch(mesh, replicas);
    let count = SESSIONS.to_string();
    let mut argv = vec!["canal-samples", "sessions", &targets[0], &targets[1], "-n", &count, "--open-rate", "500"];
    argv.extend(["--interval-ms", "1000", "-d", "4"]);
    let report = mesh.run(pod, &argv).json();
    assert_eq!(report["ok"], true, "{pod}: {report}");
    let seen: Vec<(u64, u64)> = tables.iter().map(|table| table.sessions().unwrap()).collect();
    (seen.iter().map(|(outer, _)| *outer).collect(), seen.iter().map(|(_, inner)| inner).sum())
}

#[test]
fn sessions_at_the_underlay_are_bounded_by_tunnels_and_replicas() {
    let mesh = mesh();
    // While buckets move, replicas pass packets on to each other, by tunnels of their own.
    mesh.rest(Duration::from_secs(60));
    let [(_, aggregated), (_, plain)] = TIER;
    let (outer, inner) = hold(&mesh, "beta/default/client-0", aggregated);
    println!("{SESSIONS} sessions, aggregated: {outer:?} at the underlay, {inner} inside");
    // Each client's session, and the one to the endpoint that the replica dialled for it.
    assert!(inner >= 2 * SESSIONS, "{inner} inside: the table did not see them all");
    // Both ends of a tunnel have their own source ports.
    assert!(outer.iter().all(|one| *one <= 2 * TUNNELS + OWN), "{outer:?} are more than {TUNNELS} tunnels each way");

    let (outer, inner) = hold(&mesh, "beta/default/client-far-0", plain);
    println!("{SESSIONS} sessions, a source port for each flow: {outer:?} at the underlay, {inner} inside");
    assert!(inner >= 2 * SESSIONS, "{inner} inside: the table did not see them all");
    let all: u64 = outer.iter().sum();
    assert!(all > SESSIONS / 2, "{outer:?}: without aggregation the table should be long: does it see anything?");
}
