//! Ten tenants take all that they can get of a limit at the same time, and an eleventh is served.
//! The limits are small. Nothing here depends on time.

use std::net::SocketAddr;
use std::time::Duration;

use canal_e2e::controller::Caller;
use canal_e2e::credential::{Leaf, TestAuthority, request};
use canal_e2e::flood::{ConnectionFlood, Hold};
use canal_e2e::hbone::{TunnelRequest, tunnel};
use canal_e2e::{Mesh, until};
use canal_timing::deadline;
use canal_wire::CONTROLLER_PORT;
use canal_world::Topology;

use super::exhaustion_world::{ALPHA_WEB, GATEWAY};
use super::gateway::half_hello;

/// Tenants that take all that they can get. Together they hold two and a half times what a gateway
/// accepts (`EACH`).
const GREEDY: usize = 10;
/// The eleventh.
const LAST: &str = "t10";
/// Connections that a gateway accepts.
const GATEWAY_CONNECTIONS: &str = "400";
/// Connections without a token that the controller accepts.
const CONTROLLER_UNAUTHENTICATED: &str = "100";
/// Connections that each greedy tenant holds: a quarter of what a gateway accepts.
const EACH: usize = 100;
/// All eleven tenants are served within this time. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const READY_WITHIN: Duration = Duration::from_secs(20);
/// The limits are in use, and the eleventh has been served several times, within this time. Nobody
/// derived the duration.
const FLOOD_LASTS: Duration = Duration::from_secs(2);

/// Replaces the tenants by eleven small ones, and makes the limits small.
fn eleven(topology: &mut Topology, authorities: &str) {
    let like = topology
        .tenants
        .iter()
        .find(|tenant| tenant.name == "beta")
        .expect("a tenant to copy")
        .clone();
    // The test needs neither key servers nor the identity provider.
    topology.key_servers.clear();
    topology.hosts.clear();
    topology.tenants = (0..=GREEDY)
        .map(|n| {
            let mut tenant = like.clone();
            let (name, node) = (format!("t{n}"), format!("t{n}-n1"));
            tenant.nodes.retain(|node| node.name == "beta-n1");
            tenant
                .nodes
                .iter_mut()
                .for_each(|it| it.name.clone_from(&node));
            tenant
                // One node and two pods for each tenant keep the world small.
                .pods
                .retain(|pod| ["web", "client"].contains(&pod.name.as_str()));
            tenant
                .pods
                .iter_mut()
                .for_each(|pod| pod.nodes = vec![node.clone()]);
            // VNIs must differ; trust domains are derived from names.
            (tenant.vni, tenant.trust_domain, tenant.name) =
                (201 + n as u32, format!("{name}.example"), name);
            tenant
        })
        .collect();
    // One gateway, so that all tenants share its limits.
    topology.gateways.retain(|gateway| gateway.name == "gw-1");
    for gateway in topology
        .gateways
        .iter_mut()
        .filter_map(|gateway| gateway.process.as_mut())
    {
        gateway
            .args
            .extend(["--max-connections", GATEWAY_CONNECTIONS].map(str::to_owned));
    }
    let controller = topology
        .controller
        .as_mut()
        .and_then(|c| c.process.as_mut())
        .expect("the world has a controller");
    controller.args.extend(
        [
            "--unauthenticated-connections",
            CONTROLLER_UNAUTHENTICATED,
            "--ca-dir",
            authorities,
        ]
        .map(str::to_owned),
    );
}

/// Floods from a host of each greedy tenant at the same time while `work` runs.
fn beside(mesh: &Mesh, host: &str, to: SocketAddr, hold: &Hold<'_>, work: impl FnOnce()) {
    std::thread::scope(|scope| {
        for n in 0..GREEDY {
            let (host, hold) = (host.replace('?', &n.to_string()), hold.clone());
            scope.spawn(move || {
                ConnectionFlood {
                    host: &host,
                    to,
                    connections: EACH,
                    hold,
                    lasts: FLOOD_LASTS,
                }
                .run(&mesh.world)
            });
        }
        work();
    });
}

/// A limit that is full, and the kind of process that has it.
#[derive(Clone, Copy)]
struct FullLimit {
    kind: &'static str,
    name: &'static str,
}

impl FullLimit {
    /// Returns how many holders were refused or gave way so far.
    fn refusals(self, mesh: &Mesh) -> u64 {
        let label = format!("limit=\"{}\"", self.name);
        let families = ["canal_share_refused_total", "canal_share_revoked_total"];
        families
            .map(|family| mesh.counted_at(self.kind, family, &[&label]))
            .iter()
            .sum()
    }
}

/// Writes a CA as the folder of a trust domain.
fn write_authority(root: &TestAuthority, domain: &std::path::Path) {
    std::fs::create_dir_all(domain).expect("a directory");
    for (name, text) in [
        ("root-cert.pem", root.pem()),
        ("cert-chain.pem", root.pem()),
        ("key.pem", root.key_pem()),
    ] {
        std::fs::write(domain.join(name), text).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

#[test]
fn ten_tenants_at_a_limit_at_once_leave_some_of_it_to_an_eleventh() {
    let files = tempfile::tempdir().expect("a directory");
    let began = std::time::Instant::now();
    let root = TestAuthority::root(LAST);
    // The test signs for the eleventh tenant, whose client it plays.
    let domain = files.path().join(format!("{LAST}.example"));
    write_authority(&root, &domain);
    let mesh = Mesh::up_with("trust.yaml", "e2e-sums", |topology| {
        eleven(topology, &files.path().display().to_string())
    });
    let client = format!("{LAST}/default/client-0");
    let url = format!("http://{ALPHA_WEB}/headers");
    until(deadline(READY_WITHIN), "the eleventh is served", || {
        mesh.code(&client, &url, &[]) == 200
    });
    println!("the mesh is up after {:?}", began.elapsed());
    let gateway: SocketAddr = GATEWAY.parse().expect("an address");
    let controller = SocketAddr::from((mesh.address("controller"), CONTROLLER_PORT));
    let credential = root.issue(&Leaf::of(&format!(
        "spiffe://{LAST}.example/ns/default/sa/client"
    )));
    let web = format!("{}:8080", mesh.address(&format!("{LAST}/default/web-0")));
    let node = format!("spiffe://components.canal/ns/{LAST}/sa/node.{LAST}-n1");
    let connects = || {
        let opened = tunnel(
            &mesh.world,
            &TunnelRequest::new(&client, gateway, Some(&credential), &web),
        );
        assert!(
            opened.reached(),
            "a new connection of the eleventh: {opened:?}"
        );
    };
    let calls = || {
        let issued = Caller::as_itself(&mesh.world, &format!("{LAST}-n1")).certificate(
            &node,
            &request(&[&node]),
            None,
        );
        assert!(issued.is_ok(), "a certificate of the eleventh: {issued:?}");
    };
    // `?` is the number of a greedy tenant.
    let (pod, node_host) = ("t?/default/client-0", "t?-n1");
    let exhaust =
        |host: &str, to: SocketAddr, hold: Hold<'_>, limit: FullLimit, served: &dyn Fn()| {
            // A refusal, or an old connection that gave way, shows that the limit is reached.
            let before = limit.refusals(&mesh);
            beside(&mesh, host, to, &hold, || {
                until(
                    deadline(FLOOD_LASTS),
                    &format!("{} is full", limit.name),
                    || limit.refusals(&mesh) > before,
                );
                // Several times, because one success could meet a moment with free capacity.
                (0..5).for_each(|_| served());
            });
            println!(
                "{}: {} gave way or were refused",
                limit.name,
                limit.refusals(&mesh) - before
            );
        };
    let of_gateway = |name| FullLimit {
        kind: "gateway",
        name,
    };
    exhaust(
        pod,
        gateway,
        Hold::Silent,
        of_gateway("gateway_connections"),
        &connects,
    );
    exhaust(
        pod,
        gateway,
        Hold::Bytes(half_hello()),
        of_gateway("gateway_connections"),
        &connects,
    );
    let unauthenticated = FullLimit {
        kind: "controller",
        name: "controller_unauthenticated_connections",
    };
    exhaust(node_host, controller, Hold::Silent, unauthenticated, &calls);
    println!("all after {:?}", began.elapsed());
}
