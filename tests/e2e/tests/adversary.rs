//! An attacker with raw sockets in a tenant's pod and node tries to reach another tenant, to
//! impersonate one, and to bypass the edge. Every frame must end in a counted refusal. The victim
//! tenant must lose nothing, receive only its own packets, and not be delayed. `attacks/open.rs`
//! tests what Canal refuses without a virtual switch before it.

use std::process::Child;
use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{Mesh, SERVICE_INNER_ADDRESS, deadline_ms, until};
use canal_timing::{deadline, is_timed, timed};

/// Number of frames of each attack. Any number will do that no other refusal reaches by chance,
/// because each frame must be counted.
const FRAMES: u64 = 2000;
/// Duration of the victim's requests during an attack, and their number per second in the timing
/// tier. An attack is over in less. 200 requests show one percent of loss (`GOODPUT_PERCENT_MIN`).
const VICTIM_SECONDS: u64 = 2;
const VICTIM_RATE: u64 = 100;
/// A request of the victim is answered within this time. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
/// Minimum percentage of the victim's requests that get a response. Two of 200 may be lost to a
/// stall of the test's machine.
const GOODPUT_PERCENT_MIN: u64 = 99;
/// A refusal is visible in metrics within this time. Agents read their programs' counters every two
/// seconds. It only has to exceed what a quiet machine needs: in the gate, `deadline` waits a
/// minute or more.
const SEEN_WITHIN: Duration = Duration::from_secs(8);

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| Mesh::up("mesh.yaml", "e2e-adversary"))
}

fn address(host: &str) -> String {
    let environment = mesh()
        .world
        .host(host)
        .unwrap_or_else(|e| panic!("{host}: {e}"))
        .environment;
    environment
        .ip4
        .unwrap_or_else(|| panic!("{host} has no IPv4 address"))
        .to_string()
}

/// Refusals of the kernel itself, for a source without a reverse route and for an address without
/// an owner: the file of `/proc`, the group, the counter.
const KERNEL: [(&str, &str, &str); 4] = [
    ("netstat", "TcpExt:", "IPReversePathFilter"),
    ("netstat", "IpExt:", "InNoRoutes"),
    ("snmp", "Ip:", "InAddrErrors"),
    ("snmp", "Ip:", "OutNoRoutes"),
];

/// Returns the number of refusals of a host's kernel so far.
fn kernels(host: &str) -> u64 {
    let read = || {
        ["netstat", "snmp"].map(|file| {
            (
                file,
                std::fs::read_to_string(format!("/proc/thread-self/net/{file}")),
            )
        })
    };
    let files = mesh()
        .world
        .inside(host, read)
        .unwrap_or_else(|e| panic!("{host}: {e}"));
    let text = |file: &str| {
        files
            .iter()
            .find(|(name, _)| *name == file)
            .and_then(|(_, text)| text.as_ref().ok())
            .expect("the kernel's counters")
    };
    let counted = |(file, group, counter): &(&str, &str, &str)| {
        // The file has a line of names, then a line of numbers.
        let mut lines = text(file)
            .lines()
            .filter(|line| line.starts_with(group))
            .map(str::split_whitespace);
        let (mut names, mut numbers) = (lines.next()?, lines.next()?);
        numbers
            .nth(names.position(|name| name == *counter)?)?
            .parse::<u64>()
            .ok()
    };
    KERNEL
        .iter()
        .map(|one| counted(one).unwrap_or_else(|| panic!("{host}: {one:?} is missing")))
        .sum()
}

/// Returns the number of all refusals and drops in the world so far.
fn refusals() -> u64 {
    let world = &mesh().world;
    let mut all = 0;
    for host in world.hosts().unwrap() {
        let name = &host.environment.name;
        if name.starts_with("gw-") || name.starts_with("edge-") {
            let metrics = mesh().metrics(name);
            let dropped = metrics
                .lines()
                .filter(|l| l.contains("_packets_total{") && l.contains("what=\"drop_"));
            all += dropped
                .filter_map(|l| l.rsplit(' ').next()?.parse::<u64>().ok())
                .sum::<u64>();
        }
        if let Ok(refused) = world.refused(name) {
            all += refused.tcp
                + refused.other
                + refused.foreign
                + refused.source
                + refused.fragment
                + refused.vni
                + refused.peer
                + refused.provider
                + refused.keys;
        }
        if name.contains("-n") || name.contains('/') {
            all += kernels(name);
        }
    }
    all
}

/// An attack: its name, its host, and the arguments of the peer program.
type PeerAttack = (&'static str, &'static str, Vec<String>);

fn words(text: String) -> Vec<String> {
    text.split(' ').map(str::to_string).collect()
}

/// Returns the arguments of a packet in a tunnel of this VNI.
fn tenant(vni: u32, via: &str, from: &str, to: &str) -> Vec<String> {
    words(format!("from={from} to={to} vni={vni} via={via}"))
}

fn attacks_of_a_node() -> Vec<PeerAttack> {
    // Beta attacks: its VNI is 102, alpha's is 101, and 827553 is the tier's (`TIER_VNI`).
    let (edge, replica, node) = (address("edge-1"), address("gw-1"), address("alpha-n1"));
    // 999 stands for any source port, and 10.102.2.3 is a service's gateway address.
    let pod = address("beta/default/client-0");
    vec![
        (
            "another tenant's VNI, from a node to the edge",
            "beta-n1",
            tenant(101, &edge, &format!("{pod}:999"), "10.102.2.3:15008"),
        ),
        (
            "the tier's VNI, from a node to the edge",
            "beta-n1",
            tenant(
                827_553,
                &edge,
                &format!("{SERVICE_INNER_ADDRESS}:15008"),
                &format!("{pod}:999"),
            ),
        ),
        (
            "the tier's VNI, from a node to a replica",
            "beta-n1",
            tenant(
                827_553,
                &replica,
                &format!("{pod}:999"),
                &format!("{SERVICE_INNER_ADDRESS}:15008"),
            ),
        ),
        (
            "the own VNI, but round the edge to a replica",
            "beta-n1",
            tenant(
                102,
                &replica,
                &format!("{pod}:999"),
                &format!("{SERVICE_INNER_ADDRESS}:15008"),
            ),
        ),
        (
            "another tenant's VNI, to that tenant's node",
            "beta-n1",
            tenant(101, &node, "10.1.2.2:999", "10.1.1.2:8080"),
        ),
        (
            "a pod of another node, by the own VNI",
            "beta-n1",
            tenant(102, &edge, "10.1.2.2:999", "10.102.2.3:15008"),
        ),
        (
            "no pod of the tenant, by the own VNI",
            "beta-n1",
            tenant(102, &edge, "192.0.2.1:999", "10.102.2.3:15008"),
        ),
        (
            "a new session to a replica's own address",
            "beta-n1",
            tenant(
                102,
                &edge,
                &format!("{pod}:999"),
                &format!("{replica}:15021"),
            ),
        ),
        (
            "a new session to the controller, by the overlay",
            "beta-n1",
            tenant(102, &edge, &format!("{pod}:999"), "250.1.0.1:15012"),
        ),
        (
            "a gateway address that is no service's",
            "beta-n1",
            tenant(102, &edge, &format!("{pod}:999"), "10.102.3.200:80"),
        ),
    ]
}

fn attacks_of_a_pod() -> Vec<PeerAttack> {
    let (edge, replica, node) = (address("edge-1"), address("gw-1"), address("alpha-n1"));
    let pod = address("beta/default/client-0");
    vec![
        (
            "a service's inner address, from a pod",
            "beta/default/client-0",
            words(format!("from={pod}:999 to={SERVICE_INNER_ADDRESS}:80")),
        ),
        (
            "a replica's source, from a pod",
            "beta/default/client-0",
            words(format!("from={replica}:999 to=10.1.2.2:8080")),
        ),
        (
            "a service's source, from a pod",
            "beta/default/client-0",
            words(format!("from={SERVICE_INNER_ADDRESS}:999 to=10.1.2.2:8080")),
        ),
        (
            "another pod's source, from a pod",
            "beta/default/client-0",
            words("from=10.1.2.2:999 to=10.102.2.3:15008".into()),
        ),
        (
            "VXLAN of its own, from a pod",
            "beta/default/client-0",
            tenant(101, &edge, "10.1.1.2:999", "10.102.2.3:15008"),
        ),
        (
            "the underlay, from a pod",
            "beta/default/client-0",
            words(format!("from={pod}:999 to={node}:15021")),
        ),
    ]
}

/// Returns the attacks.
fn attacks() -> Vec<PeerAttack> {
    [attacks_of_a_node(), attacks_of_a_pod()].concat()
}

/// Starts the victim's requests, to a pod in the other AZ, and waits until they are served. In the
/// gate each connection sends when it was answered.
fn victim() -> Child {
    let served = || mesh().counted_at("gateway", "istio_requests_total", &["tenant=\"alpha\""]);
    let before = served();
    let (rate, seconds, timeout) = (
        VICTIM_RATE.to_string(),
        VICTIM_SECONDS.to_string(),
        deadline_ms(ANSWERED_WITHIN),
    );
    let mut argv = vec![
        "canal-samples",
        "load",
        "http://10.101.0.10:80/blob?size=1000",
        "-c",
        "8",
        "-d",
        &seconds,
        "--timeout-ms",
        &timeout,
    ];
    if is_timed() {
        argv.extend(["-r", &rate]);
    }
    let watch = mesh().spawn("alpha/default/client-0", &argv);
    until(
        deadline(ANSWERED_WITHIN),
        "the victim's requests are served",
        || served() > before,
    );
    watch
}

/// Ends a watch, and asserts that the victim was served by its own application only and, in the
/// gate, without a loss.
fn assert_unharmed(attack: &str, watch: Child) {
    let report = mesh().end("the victim's requests", watch).json();
    let count = |name: &str| report[name].as_u64().unwrap_or(0);
    println!(
        "  alpha: {} of {} requests failed, p99 {} ms",
        count("failed"),
        count("requests"),
        report["latency_ms"]["p99"]
    );
    let by: Vec<&String> = report["served_by"]
        .as_object()
        .into_iter()
        .flat_map(serde_json::Map::keys)
        .collect();
    assert!(
        matches!(by.as_slice(), [one] if one.ends_with("alpha")),
        "{attack}: the victim was not served by its own: {report}"
    );
    assert!(
        is_timed() || report["failed"] == 0,
        "{attack}: the victim lost requests: {report}"
    );
    timed!(
        count("requests") >= VICTIM_SECONDS * VICTIM_RATE * 9 / 10,
        "rate of the victim, {attack}"
    );
    timed!(
        count("succeeded") * 100 >= count("requests") * GOODPUT_PERCENT_MIN,
        "goodput of the victim, {attack}"
    );
}

#[test]
fn no_forged_frame_passes() {
    assert_unharmed("without an attack", victim());
    let peer = canal_e2e::bin("canal-world-peer");
    let peer = peer.to_str().expect("a UTF-8 path");
    for (attack, host, words) in attacks() {
        let before = refusals();
        let count = format!("count={FRAMES}");
        let argv: Vec<&str> = [peer, "spoof"]
            .into_iter()
            .chain(words.iter().map(String::as_str))
            .chain([count.as_str()])
            .collect();
        // The victim's load runs during the attack, and its report is compared below.
        let watch = victim();
        let output = mesh().run(host, &argv);
        // A kernel that refuses to send has refused too.
        if output.code == Some(0) {
            println!("{attack}: {}", output.stdout.trim());
            // Agents read their programs' counters every few seconds.
            until(
                deadline(SEEN_WITHIN),
                &format!("{attack}: {FRAMES} refusals are counted"),
                || refusals() - before >= FRAMES,
            );
        } else {
            println!(
                "{attack}: refused by the sender's own kernel: {}",
                output.stderr.trim()
            );
            // `EPERM` is the pod guard's result for packets that the mesh does not carry.
            let is_refused =
                output.stderr.contains("os error") || output.stderr.contains("PermissionDenied");
            assert!(is_refused, "{attack}: {output:?}");
        }
        // Alpha and beta have the same addresses, so a frame that passed would show as an answer of
        // beta's.
        assert_unharmed(attack, watch);
    }
    // Both tenants must still be served: a refusal must not leave state that blocks the attacker's
    // own.
    for tenant in ["alpha", "beta"] {
        let output = mesh().run(
            &format!("{tenant}/default/client-0"),
            &[
                "canal-samples",
                "blob-client",
                "http://10.101.0.10:80",
                "--size",
                "1000",
            ],
        );
        assert_eq!(output.json()["ok"], true, "{tenant} is served as before");
    }
}
