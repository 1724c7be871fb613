//! The tier's name service as pods without a node proxy use it. It returns the gateway address of
//! the local AZ first and alone, and another AZ's only while the local one is closed. It knows the
//! names of one tenant only, in both families, over UDP and TCP. Two tenants query servers with the
//! same addresses.

use std::net::{IpAddr, TcpStream};
use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{DnsAnswer, Mesh, query, query_tcp, query_udp, until};
use canal_timing::{assert_time, deadline};
use canal_world::{Signal, World};

const NEAR: &str = "beta/default/client-0";
const FAR: &str = "beta/default/client-far-0";
/// Gateway address number 1 of each AZ's part, IPv4 and IPv6.
const SERVERS1: [&str; 2] = ["10.102.2.1", "fd00:102::2000:0:0:1"];
const SERVERS2: [&str; 2] = ["10.102.4.1", "fd00:102::4000:0:0:1"];
/// The AZs' parts of the gateway addresses: 10.102.(2a).0/23, fd00:102::(a*2)000:0:0:0/67.
const PARTS1: [&str; 2] = ["10.102.2.", "fd00:102::2000:"];
const PARTS2: [&str; 2] = ["10.102.4.", "fd00:102::4000:"];
/// Responses may be cached for this many seconds: clients leave an AZ that closes within this time.
const TTL: u32 = 2;
/// DNS knows a closed AZ within this time: two missed probes, a report, an update.
const CLOSED_WITHIN: Duration = Duration::from_secs(3);
/// A service that has started, or is back, has its address in DNS within this time. It only has to
/// exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const OPEN_WITHIN: Duration = Duration::from_secs(20);
/// Buckets have stopped moving this long after the world is up. It only has to exceed what a quiet
/// machine needs: in the gate, `deadline` waits a minute or more.
const RESTED_WITHIN: Duration = Duration::from_secs(60);
/// A connect is answered within this time. It only has to exceed what a quiet machine needs: in the
/// gate, `deadline` waits a minute or more.
const CONNECTED_WITHIN: Duration = Duration::from_secs(2);

type DnsQueryFn = fn(&World, &str, IpAddr, &[u8]) -> Option<DnsAnswer>;

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let mesh = Mesh::up("tier.yaml", "e2e-dns");
        // The assignment of replicas is queried below, and services still move while the first
        // replica is alone.
        mesh.rest(deadline(RESTED_WITHIN));
        let asked = [(NEAR, SERVERS1, PARTS1), (FAR, SERVERS2, PARTS2)];
        until(deadline(OPEN_WITHIN), "each AZ answers for itself", || {
            asked.iter().all(|(pod, servers, parts)| {
                names().iter().all(|name| {
                    [0, 1]
                        .into_iter()
                        .all(|v6| is_in(&query_all(&mesh, pod, servers[0], name, v6), parts[v6]))
                })
            })
        });
        mesh
    })
}

fn names() -> Vec<String> {
    (0..4)
        .map(|n| format!("web-{n}.default.svc.cluster.local."))
        .chain(["tcp.default.svc.cluster.local.".to_string()])
        .collect()
}

fn address(text: &str) -> IpAddr {
    text.parse()
        .unwrap_or_else(|_| panic!("{text} is an address"))
}

fn query_all(mesh: &Mesh, pod: &str, server: &str, name: &str, v6: usize) -> Option<DnsAnswer> {
    query_udp(&mesh.world, pod, address(server), &query(name, v6 == 1))
}

/// Returns whether the response has exactly one address, and it is in this part.
fn is_in(answer: &Option<DnsAnswer>, part: &str) -> bool {
    matches!(answer, Some(DnsAnswer { addresses, .. }) if matches!(addresses.as_slice(), [(one, _)] if one.to_string().starts_with(part)))
}

#[test]
fn the_local_azs_address_alone_is_the_answer() {
    let mesh = mesh();
    let (udp, tcp): (DnsQueryFn, DnsQueryFn) = (query_udp, query_tcp);
    for (pod, servers, parts) in [
        (NEAR, SERVERS1, PARTS1),
        (FAR, SERVERS2, PARTS2),
        (NEAR, SERVERS2, PARTS2),
    ] {
        for server in servers {
            for (transport, query_all) in [("UDP", udp), ("TCP", tcp)] {
                for (v6, part) in parts.iter().enumerate() {
                    for name in [
                        "web-0.default.svc.cluster.local.",
                        "web-0.default.",
                        "WEB-0.Default.svc.cluster.local.",
                    ] {
                        let answer =
                            query_all(&mesh.world, pod, address(server), &query(name, v6 == 1));
                        let case = format!("{pod} asks {server} by {transport} for {name}");
                        assert!(is_in(&answer, part), "{case}: {answer:?}");
                        assert_eq!(answer.map(|a| a.addresses[0].1), Some(TTL), "{case}");
                    }
                }
            }
        }
    }
}

/// A name that only one tenant has: that tenant's servers know it, the other's, with the same
/// addresses, do not.
#[test]
fn names_are_a_tenants_own() {
    let mesh = mesh();
    let service = "apiVersion: v1\nkind: Service\nmetadata: {name: secret, namespace: default}\nspec:\n  clusterIP: 10.101.0.99\n  \
                   clusterIPs: [10.101.0.99, \"fd00:101::99\"]\n  selector: {app: web}\n  ports: [{name: http, port: 80, targetPort: 8080}]\n";
    let secret = "secret.default.svc.cluster.local.";
    mesh.apply("alpha", service);
    let (alpha, beta) = ("alpha/default/client-0", NEAR);
    // A new service has no gateway address until the next plan reaches the name servers.
    until(
        deadline(OPEN_WITHIN),
        "alpha's new service has a name",
        || is_in(&query_all(mesh, alpha, SERVERS1[0], secret, 0), PARTS1[0]),
    );
    let (udp, tcp): (DnsQueryFn, DnsQueryFn) = (query_udp, query_tcp);
    // Names of other namespaces and suffixes of the cluster's domain do not exist; other domains
    // are refused, of which `secret.other.` could be one.
    for (pod, name, code) in [
        (alpha, secret, "No Error"),
        (beta, secret, "Non-Existent Domain"),
        (
            beta,
            "web-0.other.svc.cluster.local.",
            "Non-Existent Domain",
        ),
        (beta, "example.com.", "Query Refused"),
        (beta, "secret.other.", "Query Refused"),
        (beta, "secret.default.", "Non-Existent Domain"),
        (beta, "secret.default.svc.", "Non-Existent Domain"),
        (beta, "secret.", "Non-Existent Domain"),
    ] {
        for server in SERVERS1 {
            for v6 in [false, true] {
                for query_all in [udp, tcp] {
                    let answer = query_all(&mesh.world, pod, address(server), &query(name, v6))
                        .unwrap_or_else(|| panic!("{pod}: {server} is mute"));
                    assert_eq!(answer.code.to_str(), code, "{pod} asks {server} for {name}");
                    assert_eq!(
                        answer.addresses.is_empty(),
                        code != "No Error",
                        "{pod} asks {server} for {name}: {answer:?}"
                    );
                }
            }
        }
    }
    mesh.canal(&["delete", "--tenant", "alpha", "Service", "secret"])
        .expect_success();
}

/// A resolver ends with the name as it was written, after all suffixes of its search list: a typo
/// is no outage.
#[test]
fn unknown_short_names_are_no_reason_to_try_again() {
    const PROGRAM: &str = "import socket, sys\ntry: socket.getaddrinfo(sys.argv[1], 80)\nexcept socket.gaierror as e: print(e.errno == \
                           socket.EAI_NONAME, e)\nelse: print('found')";
    let asked = |name: &str| mesh().run(NEAR, &["python3", "-c", PROGRAM, name]).stdout;
    for name in [
        "nope",
        "nope.default",
        "nope.default.svc",
        "nope.default.svc.cluster.local",
    ] {
        assert!(asked(name).starts_with("True"), "{name}: {}", asked(name));
    }
    assert_eq!(asked("web-0.default").trim(), "found");
}

/// The replicas of one service in AZ 1 die, and one replica of the name service survives: it
/// returns AZ 2's address until they are back.
#[test]
fn another_azs_address_is_the_answer_only_while_the_local_one_is_closed() {
    let mesh = mesh();
    let servers = mesh.heads("beta/canal-system/gateway", "az1");
    let (service, replicas) = ["web-0", "web-1", "web-2", "web-3", "tcp"]
        .iter()
        .map(|name| (*name, mesh.heads(&format!("beta/default/{name}"), "az1")))
        .find(|(_, replicas)| {
            !replicas.is_empty() && servers.iter().any(|server| !replicas.contains(server))
        })
        .unwrap_or_else(|| {
            panic!("every service has all replicas of the name service: {servers:?}")
        });
    let name = format!("{service}.default.svc.cluster.local.");
    let all = |part: [&str; 2]| {
        SERVERS1.iter().all(|server| {
            [0, 1]
                .into_iter()
                .all(|v6| is_in(&query_all(mesh, NEAR, server, &name, v6), part[v6]))
        })
    };
    assert!(all(PARTS1), "{name} is AZ 1's");
    for replica in &replicas {
        // The kill keeps the replica from draining, and the stop its supervisor from a restart.
        mesh.world.kill(replica, Signal::Kill).unwrap();
        mesh.world.stop(replica).unwrap();
    }
    let closed = until(
        deadline(OPEN_WITHIN),
        "AZ 2's address is the answer",
        || all(PARTS2),
    );
    assert_time(
        "time until DNS answers with the other AZ's address",
        closed,
        CLOSED_WITHIN,
    );
    let far = query_all(mesh, FAR, SERVERS2[0], &name, 0);
    assert!(
        is_in(&far, PARTS2[0]),
        "AZ 2's own answer is what it was: {far:?}"
    );
    // A client that uses the returned address is served.
    let port = if service == "tcp" { 7000 } else { 80 };
    let target = (far.expect("asked above").addresses[0].0, port);
    let dialled = mesh
        .world
        .inside(NEAR, || {
            TcpStream::connect_timeout(&target.into(), deadline(CONNECTED_WITHIN))
        })
        .unwrap();
    assert!(dialled.is_ok(), "{target:?}: {dialled:?}");
    for replica in &replicas {
        mesh.world.start(replica).unwrap();
    }
    let opened = until(
        deadline(OPEN_WITHIN),
        "AZ 1's address is the answer again",
        || all(PARTS1),
    );
    println!(
        "{name} on {replicas:?}: AZ 2's address after {closed:?}, AZ 1's again {opened:?} after the start"
    );
}
