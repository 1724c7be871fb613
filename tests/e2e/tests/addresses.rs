//! Addresses that applications see as their clients'. Over TCP, and over an HTTP connection that
//! serves one client, it is the pod's own address. It is a gateway's if a connection serves many
//! clients or another tenant's, and never the server's own. Nothing that a client claims changes
//! this.

use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{Mesh, until};
use canal_timing::deadline;
use serde_json::Value;

const CLIENT: &str = "alpha/default/client-0";
const OTHER: &str = "alpha/default/other-0";
const BARE: &str = "alpha/default/bare-0";
/// Maximum time of a step on a quiet machine: a change is in force, or a process serves. It only
/// has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(15);

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let mesh = Mesh::up("addresses.yaml", "e2e-addresses");
        until(deadline(STEP_TIMEOUT), "every service answers", || {
            (10..14).all(|n| mesh.code(CLIENT, &url(n), &[]) == 200)
        });
        mesh
    })
}

fn url(n: u32) -> String {
    format!("http://10.101.0.{n}/headers")
}

fn url6(n: u32) -> String {
    format!("http://[fd00:101::{n}]/headers")
}

/// Returns all addresses of a pod.
fn addresses(pod: &str) -> Vec<IpAddr> {
    let host = mesh()
        .world
        .host(pod)
        .unwrap_or_else(|e| panic!("{pod}: {e}"));
    let (v4, v6) = (
        host.ip4().expect("an IPv4 address"),
        host.ip6().expect("an IPv6 address"),
    );
    vec![v4.into(), v6.into()]
}

fn address(pod: &str, v4: bool) -> IpAddr {
    addresses(pod)
        .into_iter()
        .find(|ip| ip.is_ipv4() == v4)
        .expect("an address of the family")
}

/// The address that the server sees, and the `x-forwarded-for` that it gets.
struct SeenAddresses {
    peer: SocketAddr,
    forwarded: String,
}

fn observe_addresses(pod: &str, url: &str, more: &[&str]) -> SeenAddresses {
    let argv: Vec<&str> = ["curl", "-sS", "-g", "--max-time", "60", url]
        .into_iter()
        .chain(more.iter().copied())
        .collect();
    let json: Value = mesh().run(pod, &argv).json();
    let headers = json["headers"].as_array().into_iter().flatten();
    let forwarded = headers
        .filter(|pair| pair[0] == "x-forwarded-for")
        .filter_map(|pair| pair[1].as_str())
        .collect::<Vec<_>>()
        .join(", ");
    SeenAddresses {
        peer: json["peer"]
            .as_str()
            .and_then(|p| p.parse().ok())
            .unwrap_or_else(|| panic!("{url}: {json}")),
        forwarded,
    }
}

/// Returns whether the address is a gateway's: neither the server's nor one of alpha's pods.
fn is_gateways(peer: IpAddr) -> bool {
    let pods = [
        "web-0",
        "own-0",
        "raw-0",
        "guarded-0",
        "client-0",
        "other-0",
        "bare-0",
    ];
    !peer.is_loopback()
        && !pods
            .iter()
            .any(|pod| addresses(&format!("alpha/default/{pod}")).contains(&peer))
}

/// Over TCP, by the service's address and by the pod's, in both families, with the client's own
/// port.
#[test]
fn tcp_application_sees_the_client_pod() {
    let raw = "alpha/default/raw-0";
    for v4 in [true, false] {
        let pod = SocketAddr::new(address(raw, v4), 8080);
        for (target, pods) in [
            (if v4 { url(12) } else { url6(12) }, [CLIENT, OTHER]),
            (format!("http://{pod}/headers"), [CLIENT, OTHER]),
        ] {
            for client in pods {
                assert_eq!(
                    observe_addresses(client, &target, &[]).peer.ip(),
                    address(client, v4),
                    "{client} to {target}"
                );
            }
        }
    }
    let bound = observe_addresses(CLIENT, &url(12), &["--local-port", "45678"]);
    assert_eq!(
        bound.peer.port(),
        45678,
        "the client's own port is used if it is free"
    );
    // The server is its own client here; only in this case may it see its own address.
    assert_eq!(
        observe_addresses(raw, &url(12), &[]).peer.ip(),
        address(raw, true)
    );
}

/// A connection that serves many clients comes from a gateway, which names the client. A connection
/// for one client, which the service's annotation requests, comes from that client.
#[test]
fn http_application_sees_gateway_and_the_client_in_its_header() {
    for v4 in [true, false] {
        let (shared, own) = if v4 {
            (url(10), url(11))
        } else {
            (url6(10), url6(11))
        };
        for client in [CLIENT, OTHER] {
            let pooled = observe_addresses(client, &shared, &[]);
            assert!(is_gateways(pooled.peer.ip()), "{}", pooled.peer);
            assert_eq!(pooled.forwarded, address(client, v4).to_string());
            for _ in 0..3 {
                let single = observe_addresses(client, &own, &[]);
                assert_eq!(single.peer.ip(), address(client, v4), "{client}");
                assert_eq!(single.forwarded, address(client, v4).to_string());
            }
        }
    }
}

/// A client can claim anything: about itself in headers, and about others in a tunnel of its own.
#[test]
fn forged_source_addresses_are_refused() {
    let other = address(OTHER, true);
    let forged = format!("forwarded: for=\"{other}:4711\"");
    let output = observe_addresses(
        CLIENT,
        &url(11),
        &[
            "-H",
            &forged,
            "-H",
            "canal-source: spiffe://alpha.example/ns/default/sa/web",
        ],
    );
    assert_eq!(output.peer.ip(), address(CLIENT, true));
}

/// A client without mTLS connects to a pod whose policies apply to plaintext.
#[test]
fn plaintext_client_is_seen_by_guarded_application() {
    let guarded = SocketAddr::new(address("alpha/default/guarded-0", true), 8080);
    let target = format!("http://{guarded}/headers");
    assert_eq!(
        observe_addresses(BARE, &target, &[]).peer.ip(),
        address(BARE, true),
        "past every gateway, through the guard"
    );
    assert_eq!(
        observe_addresses(CLIENT, &url(13), &[]).peer.ip(),
        address(CLIENT, true),
        "the server sees the client's address over the mesh too"
    );
    until(deadline(STEP_TIMEOUT), "the node reports the pod", || {
        mesh().counted("alpha-n2", "canal_node_plaintext_captured_pods", &[]) >= 1
    });
    assert_eq!(
        mesh().counted("alpha-n2", "canal_node_substituted_pods", &[]),
        0
    );
}

/// Policies evaluate the address that the application sees.
#[test]
fn remote_ip_blocks_match_the_client_pods_address() {
    let addresses = "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: own-only, namespace: default}\n\
                     spec:\n  selector: {matchLabels: {app: raw}}\n  action: DENY\n  rules:\n  - from: [{source: {remoteIpBlocks: [ADDRESS/32]}}]\n";
    mesh().apply(
        "alpha",
        &addresses.replace("ADDRESS", &address(OTHER, true).to_string()),
    );
    let code = |pod: &str| mesh().code(pod, &url(12), &[]);
    until(deadline(STEP_TIMEOUT), "the one address is denied", || {
        code(OTHER) == 0
    });
    assert_eq!(code(CLIENT), 200, "another pod of the same identity");
    mesh()
        .canal(&[
            "delete",
            "--tenant",
            "alpha",
            "authorizationpolicy",
            "own-only",
        ])
        .expect_success();
    until(deadline(STEP_TIMEOUT), "nothing is denied", || {
        code(OTHER) == 200
    });
}

/// Sentinel and Cluster read the other Redis's own address.
#[test]
fn redis_sees_its_replica_by_its_own_address() {
    let (master, replica) = ("alpha/default/redis-0", "alpha/default/replica-0");
    let ip = address(master, true).to_string();
    let cli = |pod: &str, words: &[&str]| {
        let argv: Vec<&str> = ["redis-cli", "-h", "127.0.0.1"]
            .into_iter()
            .chain(words.iter().copied())
            .collect();
        mesh().run(pod, &argv).stdout
    };
    cli(replica, &["replicaof", &ip, "6379"]);
    let expected = format!("slave0:ip={}", address(replica, true));
    until(
        deadline(STEP_TIMEOUT),
        "the master lists its replica",
        || cli(master, &["info", "replication"]).contains(&expected),
    );
    cli(replica, &["replicaof", "no", "one"]);
}
