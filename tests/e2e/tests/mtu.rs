//! Path MTU through the whole tier: links that become narrow during a transfer, senders that learn
//! it by ICMP, and no packet that is lost silently. The client checks every byte. It pauses in the
//! middle of its body until a change has been made, so that no transfer ends before the change.

use std::net::{IpAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use canal_e2e::{Icmp, IcmpPacket, Mesh, until};
use canal_timing::deadline;
use canal_world::topology::OutsideTraffic;

/// Bytes in each direction.
const SIZE: &str = "10485760";
/// Half of a body is sent within this time, and a whole transfer ends within this time. It only has
/// to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const TRANSFER_WITHIN: Duration = Duration::from_secs(20);
/// Agents read their programs' counters every two seconds. 0.2 s more than that.
const COUNTER_READ_INTERVAL: Duration = Duration::from_millis(2200);
/// It only has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or
/// more.
const SEEN_WITHIN: Duration = Duration::from_secs(6);
const TENANTS: [&str; 2] = ["alpha", "beta"];
/// The tier in AZ 1.
const TIER1: [&str; 5] = ["edge-1", "gw-1", "gw-2", "gw-3", "gw-6"];
/// The tier in AZ 2.
const TIER2: [&str; 3] = ["edge-2", "gw-4", "gw-5"];

fn mesh(name: &str, edges: [&[&str]; 2], gateways: [&[&str]; 2]) -> Mesh {
    let of_az = |az: &str| usize::from(az == "az2");
    let mesh = Mesh::up_with("tier.yaml", name, |topology| {
        for (parts, args) in [
            (&mut topology.edges, edges),
            (&mut topology.gateways, gateways),
        ] {
            for part in parts {
                let own = args[of_az(&part.az)].iter().map(|a| a.to_string());
                part.process.as_mut().expect("it runs").args.extend(own);
            }
        }
        // The oversize datagrams are outside the mesh.
        topology
            .tenants
            .iter_mut()
            .for_each(|tenant| tenant.outside = OutsideTraffic::Passthrough);
    });
    for pod in TENANTS.iter().flat_map(|tenant| {
        ["client-0", "client-far-0"].map(|pod| format!("{tenant}/default/{pod}"))
    }) {
        until(
            deadline(Duration::from_secs(20)),
            &format!("{pod} is served"),
            || {
                let url = "http://web-0.default.svc.cluster.local:80/blob?size=10";
                mesh.run(
                    &pod,
                    &["curl", "-sSf", "--max-time", "10", "-o", "/dev/null", url],
                )
                .code
                    == Some(0)
            },
        );
    }
    mesh
}

/// Returns the service as these pods of both tenants address it: pod and URL, for each family.
/// Meshed pods dial the service's VIP, others its gateway address.
fn targets(mesh: &Mesh, pod: &str) -> Vec<(String, String)> {
    let of_tenant = |tenant: &str| {
        let pod = format!("{tenant}/default/{pod}");
        let addresses = mesh.resolve(&pod, "web-0.default.svc.cluster.local");
        assert_eq!(
            addresses.len(),
            2,
            "{pod}: web-0 has both families: {addresses:?}"
        );
        let url = |address: IpAddr| {
            if address.is_ipv6() {
                format!("http://[{address}]:80")
            } else {
                format!("http://{address}:80")
            }
        };
        addresses
            .into_iter()
            .map(|address| (pod.clone(), url(address)))
            .collect::<Vec<_>>()
    };
    TENANTS
        .iter()
        .flat_map(|tenant| of_tenant(tenant))
        .collect()
}

/// Starts a transfer in both directions, which holds half-way for as long as the file exists.
fn begin(mesh: &Mesh, pod: &str, url: &str, hold_file: &Path) -> Child {
    let (limit, hold_file) = (
        deadline(TRANSFER_WITHIN).as_secs().to_string(),
        hold_file.display().to_string(),
    );
    mesh.spawn(
        pod,
        &[
            "timeout",
            &limit,
            "canal-samples",
            "blob-client",
            url,
            "--mode",
            "echo",
            "--size",
            SIZE,
            "--hold-file",
            &hold_file,
        ],
    )
}

/// Makes the change during the transfers, which must end with every byte right.
fn check(mesh: &Mesh, pod: &str, what: &str, change: impl FnOnce()) {
    // All targets are resolved before any transfer starts, so that transfers run side by side on a
    // busy machine too.
    let targets = targets(mesh, pod);
    let dir = tempfile::tempdir().expect("a temporary directory");
    let files: Vec<PathBuf> = (0..targets.len())
        .map(|n| dir.path().join(n.to_string()))
        .collect();
    let started = Instant::now();
    let transfers = targets.into_iter().zip(&files);
    let all: Vec<(String, Child)> = transfers
        .map(|((pod, url), file)| (format!("{pod} to {url}"), begin(mesh, &pod, &url, file)))
        .collect();
    until(
        deadline(TRANSFER_WITHIN),
        &format!("{what}: half of each body is sent"),
        || files.iter().all(|file| file.exists()),
    );
    change();
    files
        .iter()
        .for_each(|file| std::fs::remove_file(file).expect("the client created it"));
    for (transfer, child) in all {
        let output = mesh.end(&format!("{what}: {transfer}"), child);
        assert_eq!(
            output.code,
            Some(0),
            "{what}: {transfer}: {output:?}\n{}",
            drops(mesh)
        );
        assert_eq!(output.json()["ok"], true, "{what}: {transfer}");
    }
    println!(
        "{what}: 10 MiB each way, twice for each tenant, in {:.1} s",
        started.elapsed().as_secs_f64()
    );
}

fn edge(mesh: &Mesh, edge: &str, what: &str) -> u64 {
    mesh.counted(
        edge,
        "canal_edge_packets_total",
        &[&format!("what=\"{what}\"")],
    )
}

/// Returns the number of fragments that edges and replicas have dropped so far.
fn fragments(mesh: &Mesh) -> u64 {
    std::thread::sleep(COUNTER_READ_INTERVAL);
    let edges = ["edge-1", "edge-2"]
        .iter()
        .map(|host| edge(mesh, host, "drop_fragment"));
    let replicas = TIER1[1..].iter().chain(&TIER2[1..]);
    edges
        .chain(replicas.map(|host| {
            mesh.counted(
                host,
                "canal_redirector_packets_total",
                &["what=\"drop_fragment\""],
            )
        }))
        .sum()
}

/// Returns the drops, for a failing test's output.
fn drops(mesh: &Mesh) -> String {
    let mut out = String::new();
    for host in TIER1.iter().chain(&TIER2) {
        let metrics = mesh
            .run(host, &["curl", "-sS", "http://127.0.0.1:15020/metrics"])
            .stdout;
        let drop_lines = metrics.lines().filter(|l| {
            l.contains("_packets_total{") && (l.contains("drop_") || l.contains("too_big"))
        });
        drop_lines
            .filter(|l| !l.ends_with(" 0"))
            .for_each(|l| out.push_str(&format!("{host}: {l}\n")));
    }
    out
}

/// Returns the number of ICMP errors that replicas' kernels received about their packets, for IPv4
/// and IPv6.
fn icmp_errors_received(mesh: &Mesh) -> [u64; 2] {
    let mut sums = [0, 0];
    for gateway in &TIER1[1..] {
        let output = mesh
            .run(
                gateway,
                &["nstat", "-asz", "IcmpInDestUnreachs", "Icmp6InPktTooBigs"],
            )
            .expect_success();
        for (sum, name) in sums
            .iter_mut()
            .zip(["IcmpInDestUnreachs", "Icmp6InPktTooBigs"])
        {
            *sum += output
                .lines()
                .filter(|l| l.starts_with(name))
                .filter_map(|l| l.split_whitespace().nth(1)?.parse::<u64>().ok())
                .sum::<u64>();
        }
    }
    sums
}

/// Removes the path MTUs that kernels learned by ICMP; otherwise they expire after ten minutes.
fn forget_paths(mesh: &Mesh) {
    for host in mesh.world.hosts().unwrap() {
        mesh.run(
            &host.environment.name,
            &[
                "sh",
                "-c",
                "ip -4 route flush cache && ip -6 route flush cache",
            ],
        )
        .expect_success();
    }
}

fn set_mtu(mesh: &Mesh, hosts: &[&str], mtu: u32) {
    hosts.iter().for_each(|host| {
        mesh.world
            .set_mtu(host, mtu)
            .unwrap_or_else(|e| panic!("{host}: {e}"))
    });
}

/// With default settings, the tier needs exactly 50 bytes more of the underlay than `--tier-mtu`.
/// Links may become narrower at any time, the tier's own and those of pods, downstream and
/// upstream: the sender learns it, apparently from the address that it dialed.
#[test]
fn transfers_go_on_when_links_narrow() {
    let mesh = mesh("e2e-mtu", [&[], &[]], [&[], &[]]);
    // A change of nothing shows that the default MTU fits, so that later failures are the links'.
    check(&mesh, "client-0", "as it comes", || {});
    check(&mesh, "client-0", "the tier's links narrow to 1500", || {
        set_mtu(&mesh, &TIER1, 1500)
    });
    // 1600 bytes is the world's MTU of these links, more than the tier needs.
    set_mtu(&mesh, &TIER1, 1600);
    assert_eq!(fragments(&mesh), 0, "{}", drops(&mesh));
    let by_edge = || edge(&mesh, "edge-1", "too_big");
    let by_replicas = || {
        TIER1[1..]
            .iter()
            .map(|host| {
                mesh.counted(
                    host,
                    "canal_redirector_packets_total",
                    &["what=\"too_big\""],
                )
            })
            .sum::<u64>()
    };
    for (what, hosts, count_too_big) in [
        (
            "the replicas' links", // They need 1500 bytes, so that 1400 is too narrow.
            &TIER1[1..],
            &by_replicas as &dyn Fn() -> u64,
        ),
        ("the edge's link", &TIER1[..1], &by_edge),
    ] {
        // A sender that has learned a path's MTU would not meet the narrow link.
        forget_paths(&mesh);
        let before = count_too_big();
        check(
            &mesh,
            "client-0",
            &format!("{what} narrow to 1400, and no sender has learned it"),
            || set_mtu(&mesh, hosts, 1400),
        );
        until(
            deadline(SEEN_WITHIN),
            &format!("{what}: senders learn the MTU"),
            || count_too_big() > before,
        );
        set_mtu(&mesh, &TIER1, 1600);
    }
    forget_paths(&mesh);
    let fragments_before = fragments(&mesh);

    let translated = edge(&mesh, "edge-1", "icmp_translated");
    // 1300 bytes is less than any MTU that senders learned above.
    let clients = TENANTS.map(|tenant| format!("{tenant}/default/client-0"));
    check(
        &mesh,
        "client-0",
        "the clients' links narrow to 1300",
        || set_mtu(&mesh, &clients.each_ref().map(String::as_str), 1300),
    );
    until(
        deadline(SEEN_WITHIN),
        "errors about answers are translated",
        || edge(&mesh, "edge-1", "icmp_translated") > translated,
    );
    set_mtu(&mesh, &clients.each_ref().map(String::as_str), 1500); // as the world began

    let before = icmp_errors_received(&mesh);
    let servers: Vec<String> = TENANTS
        .iter()
        .flat_map(|t| ["web-0", "web-1"].map(|pod| format!("{t}/default/{pod}")))
        .collect();
    let servers: Vec<&str> = servers.iter().map(String::as_str).collect();
    check(
        &mesh,
        "client-0",
        "the endpoints' links narrow to 1300",
        || set_mtu(&mesh, &servers, 1300),
    );
    let after = icmp_errors_received(&mesh);
    assert!(
        after[0] > before[0],
        "no replica heard that what it dialled has become narrow: {before:?}, {after:?}"
    );
    // ICMP must prevent fragments on the changed links; those before are in the baseline.
    assert_eq!(fragments(&mesh), fragments_before, "{}", drops(&mesh));
}

/// AZ 1: an edge that accepts less than its replicas announce, so that senders learn it by ICMP
/// only. AZ 2: edge and replicas are configured for a narrow underlay before it becomes narrow.
#[test]
fn a_narrow_tier_is_reported_to_senders() {
    let narrow_edge: &[&str] = &["--mtu", "1350"];
    let mesh = mesh(
        "e2e-mtu-n",
        [narrow_edge, narrow_edge],
        [&[], &["--tier-mtu", "1350"]],
    );
    check(&mesh, "client-0", "the edge accepts 1350 bytes", || {});
    until(deadline(SEEN_WITHIN), "senders learn the MTU", || {
        edge(&mesh, "edge-1", "too_big") > 0
    });
    check(
        &mesh,
        "client-far-0",
        "all of a tier's links narrow to 1400, as configured",
        || set_mtu(&mesh, &TIER2, 1400),
    );
    assert_eq!(fragments(&mesh), 0, "{}", drops(&mesh));
    oversize_datagrams_are_answered_as_the_gateway_address(&mesh);
}

/// A datagram that is too big, from a tenant's pod: the ICMP error comes from the datagram's
/// destination address, and is about that address. (Both tenants have the same addresses; each
/// receives its own.)
fn oversize_datagrams_are_answered_as_the_gateway_address(mesh: &Mesh) {
    let before = edge(mesh, "edge-1", "too_big");
    for tenant in TENANTS {
        let pod = format!("{tenant}/default/client-0");
        let environment = mesh.world.host(&pod).unwrap().environment;
        let own: [IpAddr; 2] = [
            environment.ip4.expect("dual stack").into(),
            environment.ip6.expect("dual stack").into(),
        ];
        for address in mesh.resolve("beta/default/client-0", "tcp.default.svc.cluster.local") {
            let is_v6 = address.is_ipv6();
            let icmp = Icmp::open(&mesh.world, &pod, is_v6);
            let from: IpAddr = own[usize::from(is_v6)];
            let socket = mesh
                .world
                .inside(&pod, || UdpSocket::bind((from, 0)))
                .unwrap()
                .unwrap();
            let source = socket.local_addr().unwrap();
            // With its headers it has 1,500 bytes, which the pod's link accepts.
            socket
                .send_to(&vec![0; if is_v6 { 1452 } else { 1472 }], (address, 9))
                .unwrap();
            let received = icmp.receive_one(deadline(Duration::from_secs(2)), |h| {
                h.about.is_some_and(|(about, ..)| about == source)
            });
            // ICMPv6 Packet Too Big, and ICMP Destination Unreachable with Fragmentation Needed.
            let kind = if is_v6 { (2, 0) } else { (3, 4) };
            let expected = IcmpPacket {
                from: address,
                kind,
                // The edge accepts 1350 bytes in this world (`--mtu`).
                mtu: 1350,
                about: Some((source, (address, 9).into(), 17)),
            };
            assert_eq!(received, Some(expected), "{pod} to {address}");
            // The sender's kernel must accept the error too, and use it for the route.
            let route = || {
                mesh.run(&pod, &["ip", "route", "get", &address.to_string()])
                    .expect_success()
            };
            until(
                deadline(SEEN_WITHIN),
                &format!("{pod} has learned the MTU"),
                || route().contains("mtu 1350"),
            );
        }
    }
    until(deadline(SEEN_WITHIN), "all four are counted", || {
        edge(mesh, "edge-1", "too_big") >= before + 4
    });
}
