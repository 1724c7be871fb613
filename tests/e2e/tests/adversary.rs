//! An attacker with raw sockets, in a tenant's pod and in a tenant's node, tries to reach another tenant, to impersonate one, and to bypass
//! the edge. Every frame must end in a counted refusal. The victim tenant is watched: it loses nothing, receives nothing that is not its
//! own, and is not delayed. `attacks/open.rs` tests what Canal refuses without a virtual switch before it.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use canal_e2e::Mesh;

/// Number of frames of each attack.
const FRAMES: u64 = 2000;
/// Requests of the victim per second during an attack.
const VICTIM_RATE: u64 = 100;
/// Minimum percentage of the victim's requests that get a response.
const GOODPUT_PERCENT_MIN: u64 = 99;
/// A refusal is visible in metrics within this time.
const SEEN_WITHIN: Duration = Duration::from_secs(8);

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| Mesh::up("mesh.yaml", "e2e-adversary"))
}

fn address(host: &str) -> String {
    let environment = mesh().world.host(host).unwrap_or_else(|e| panic!("{host}: {e}")).environment;
    environment.ip4.unwrap_or_else(|| panic!("{host} has no IPv4 address")).to_string()
}

/// Refusals of the kernel itself, for a source without a reverse route and for an address without an owner: the file of `/proc`, the group,
/// the counter.
const KERNEL: [(&str, &str, &str); 4] = [
    ("netstat", "TcpExt:", "IPReversePathFilter"),
    ("netstat", "IpExt:", "InNoRoutes"),
    ("snmp", "Ip:", "InAddrErrors"),
    ("snmp", "Ip:", "OutNoRoutes"),
];

/// Returns the number of refusals of a host's kernel so far.
fn kernels(host: &str) -> u64 {
    let read = || ["netstat", "snmp"].map(|file| (file, std::fs::read_to_string(format!("/proc/thread-self/net/{file}"))));
    let files = mesh().world.inside(host, read).unwrap_or_else(|e| panic!("{host}: {e}"));
    let text =
        |file: &str| files.iter().find(|(name, _)| *name == file).and_then(|(_, text)| text.as_ref().ok()).expect("the kernel's counters");
    let counted = |(file, group, counter): &(&str, &str, &str)| {
        // The file has a line of names, then a line of numbers.
        let mut lines = text(file).lines().filter(|line| line.starts_with(group)).map(str::split_whitespace);
        let (mut names, mut numbers) = (lines.next()?, lines.next()?);
        numbers.nth(names.position(|name| name == *counter)?)?.parse::<u64>().ok()
    };
    KERNEL.iter().map(|one| counted(one).unwrap_or_else(|| panic!("{host}: {one:?} is missing"))).sum()
}

/// Returns the number of all refusals and drops in the world so far.
fn refusals() -> u64 {
    let world = &mesh().world;
    let mut all = 0;
    for host in world.hosts().unwrap() {
        let name = &host.environment.name;
        if name.starts_with("gw-") || name.starts_with("edge-") {
            let metrics = mesh().metrics(name);
            let dropped = metrics.lines().filter(|l| l.contains("_packets_total{") && l.contains("what=\"drop_"));
            all += dropped.filter_map(|l| l.rsplit(' ').next()?.parse::<u64>().ok()).sum::<u64>();
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

/// Returns the attacks: name, host, and arguments of the peer program.
fn attacks() -> Vec<(&'static str, &'static str, Vec<String>)> {
    let (edge, replica, node) = (address("edge-1"), address("gw-1"), address("alpha-n1"));
    let pod = address("beta/default/client-0");
    let words = |text: String| text.split(' ').map(str::to_string).collect::<Vec<_>>();
    let tenant = |vni: u32, via: &str, from: &str, to: &str| words(format!("from={from} to={to} vni={vni} via={via}"));
    vec![
        ("another tenant's VNI, from a node to the edge", "beta-n1", tenant(101, &edge, &format!("{pod}:999"), "10.102.2.3:15008")),
        ("the tier's VNI, from a node to the edge", "beta-n1", tenant(827_553, &edge, "240.0.0.3:15008", &format!("{pod}:999"))),
        ("the tier's VNI, from a node to a replica", "beta-n1", tenant(827_553, &replica, &format!("{pod}:999"), "240.0.0.3:15008")),
        ("the own VNI, but round the edge to a replica", "beta-n1", tenant(102, &replica, &format!("{pod}:999"), "240.0.0.3:15008")),
        ("another tenant's VNI, to that tenant's node", "beta-n1", tenant(101, &node, "10.1.2.2:999", "10.1.1.2:8080")),
        ("a pod of another node, by the own VNI", "beta-n1", tenant(102, &edge, "10.1.2.2:999", "10.102.2.3:15008")),
        ("no pod of the tenant, by the own VNI", "beta-n1", tenant(102, &edge, "192.0.2.1:999", "10.102.2.3:15008")),
        ("a new session to a replica's own address", "beta-n1", tenant(102, &edge, &format!("{pod}:999"), &format!("{replica}:15021"))),
        ("a new session to the controller, by the overlay", "beta-n1", tenant(102, &edge, &format!("{pod}:999"), "250.1.0.1:15012")),
        ("a gateway address that is no service's", "beta-n1", tenant(102, &edge, &format!("{pod}:999"), "10.102.3.200:80")),
        ("a service's inner address, from a pod", "beta/default/client-0", words(format!("from={pod}:999 to=240.0.0.3:80"))),
        ("a replica's source, from a pod", "beta/default/client-0", words(format!("from={replica}:999 to=10.1.2.2:8080"))),
        ("a service's source, from a pod", "beta/default/client-0", words("from=240.0.0.3:999 to=10.1.2.2:8080".into())),
        ("another pod's source, from a pod", "beta/default/client-0", words("from=10.1.2.2:999 to=10.102.2.3:15008".into())),
        ("VXLAN of its own, from a pod", "beta/default/client-0", tenant(101, &edge, "10.1.1.2:999", "10.102.2.3:15008")),
        ("the underlay, from a pod", "beta/default/client-0", words(format!("from={pod}:999 to={node}:15021"))),
    ]
}

/// Starts the victim's requests for this long, to a pod in the other AZ.
fn victim(seconds: &str) -> std::process::Child {
    let rate = VICTIM_RATE.to_string();
    let argv =
        ["canal-samples", "load", "http://10.101.0.10:80/blob?size=1000", "-r", &rate, "-c", "8", "-d", seconds, "--timeout-ms", "2000"];
    mesh().spawn("alpha/default/client-0", &argv)
}

/// Ends a watch and returns the harm to the victim, if any.
fn suffered(watch: std::process::Child, seconds: u64) -> (String, Option<String>) {
    let report = mesh().end("the victim's requests", watch).json();
    let count = |name: &str| report[name].as_u64().unwrap_or(0);
    let own = report["served_by"].as_object().map_or(0, |served| served.iter().filter(|(name, _)| name.ends_with("alpha")).count());
    let all = report["served_by"].as_object().map_or(0, serde_json::Map::len);
    let line = format!("alpha: {} of {} requests failed, p99 {} ms", count("failed"), count("requests"), report["latency_ms"]["p99"]);
    let is_served = count("requests") >= seconds * VICTIM_RATE * 9 / 10
        && count("succeeded") * 100 >= count("requests") * GOODPUT_PERCENT_MIN
        && (own, all) == (1, 1);
    (line, (!is_served).then(|| report.to_string()))
}

#[test]
fn no_forged_frame_passes() {
    let (line, wrong) = suffered(victim("2"), 2);
    println!("quiet: {line}");
    assert!(wrong.is_none(), "the victim is not served even without an attack: {wrong:?}");
    let peer = canal_e2e::bin("canal-world-peer");
    let peer = peer.to_str().expect("a UTF-8 path");
    for (attack, host, words) in attacks() {
        let before = refusals();
        let count = format!("count={FRAMES}");
        let argv: Vec<&str> = [peer, "spoof"].into_iter().chain(words.iter().map(String::as_str)).chain([count.as_str()]).collect();
        let watch = victim("2");
        std::thread::sleep(Duration::from_millis(300));
        let output = mesh().run(host, &argv);
        // A kernel that refuses to send has refused too.
        if output.code == Some(0) {
            // Agents read their programs' counters every few seconds.
            let started = Instant::now();
            let mut refused = refusals() - before;
            while refused < FRAMES && started.elapsed() < SEEN_WITHIN {
                std::thread::sleep(Duration::from_millis(100));
                refused = refusals() - before;
            }
            println!("{attack}: {} refused of {FRAMES} frames", refused);
            assert!(refused >= FRAMES, "{attack}: only {refused} of {FRAMES} frames were refused: {output:?}");
        } else {
            println!("{attack}: refused by the sender's own kernel: {}", output.stderr.trim());
            // `EPERM` is the pod guard's result for packets that the mesh does not carry.
            let is_refused = output.stderr.contains("os error") || output.stderr.contains("PermissionDenied");
            assert!(is_refused, "{attack}: {output:?}");
        }
        let (line, wrong) = suffered(watch, 2);
        println!("  meanwhile {line}");
        assert!(wrong.is_none(), "{attack}: the victim suffered: {wrong:?}");
    }
    for tenant in ["alpha", "beta"] {
        let output =
            mesh().run(&format!("{tenant}/default/client-0"), &["canal-samples", "blob-client", "http://10.101.0.10:80", "--size", "1000"]);
        assert_eq!(output.json()["ok"], true, "{tenant} is served as before");
    }
}
