//! The mesh as applications observe it through sockets: names, source ports, refusals. Unmodified
//! programs (Python's own sockets, curl, vsftpd) observe the same as without the mesh. It covers
//! IPv4 and IPv6, services and pods.

use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{Mesh, until};
use canal_timing::{assert_time, deadline};
use serde_json::Value;

const CLIENT: &str = "alpha/default/client-0";
const SERVER: &str = "alpha/default/tcp-0";
const NODE: &str = "alpha-n1";
/// A refused `connect()` returns within this time. A refusal in the kernel takes no round trip; a
/// lost SYN would take a second or more.
const REFUSED_WITHIN: Duration = Duration::from_secs(1);
/// The node reads the kernel's counters every two seconds. It only has to exceed what a quiet
/// machine needs: in the gate, `deadline` waits a minute or more.
const COUNTED_WITHIN: Duration = Duration::from_secs(10);

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| Mesh::up("mesh.yaml", "e2e-sockets"))
}

/// Runs a Python program in the client's pod, and returns its output as JSON.
fn python(program: &str, args: &[&str]) -> Value {
    let program = format!("import errno, json, socket, sys, time\n{program}");
    let argv: Vec<&str> = ["python3", "-c", &program]
        .into_iter()
        .chain(args.iter().copied())
        .collect();
    mesh().run(CLIENT, &argv).json()
}

/// Returns the pod's address of each family.
fn addresses(pod: &str) -> [String; 2] {
    let output = mesh()
        .run(pod, &["ip", "-j", "addr", "show", "scope", "global"])
        .json();
    ["inet", "inet6"].map(|family| {
        let all = output
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|device| device["addr_info"].as_array())
            .flatten();
        let own = all
            .filter(|a| a["family"] == family)
            .find_map(|a| a["local"].as_str());
        own.unwrap_or_else(|| panic!("{pod} has no {family} address: {output}"))
            .to_owned()
    })
}

const NAMES: &str = r#"
to, port, protocol, bind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
s = socket.socket(socket.AF_INET6 if ":" in to else socket.AF_INET, socket.SOCK_STREAM, protocol)
s.settimeout(60)
if bind: s.bind((bind, 0))
before = s.getsockname()[:2]
s.connect((to, port))
# Before the end: a socket that both ends have closed has no peer.
own, peer = s.getsockname(), s.getpeername()
s.sendall(b"hello"); s.shutdown(socket.SHUT_WR)
got = b""
while True:
    more = s.recv(100)
    if not more: break
    got += more
print(json.dumps({"own": own[0], "port": own[1] > 0, "peer": list(peer[:2]), "echo": got.decode()}))
"#;

/// H6, H12: the socket's own address and the peer's, of every kind of socket.
#[test]
fn names_are_those_without_the_mesh() {
    let [own4, own6] = addresses(CLIENT);
    let [pod4, pod6] = addresses(SERVER);
    let mapped = format!("::ffff:{own4}");
    // IPPROTO_MPTCP: such sockets must be captured like TCP's.
    const MPTCP: &str = "262";
    // The case, the destination, the socket's protocol number, the address to bind, and the own
    // address to expect.
    for (case, to, protocol, bind, own) in [
        ("a service", "10.101.0.50", "0", "", &own4),
        ("a service, IPv6", "fd00:101::50", "0", "", &own6),
        ("a pod", &*pod4, "0", "", &own4),
        ("a pod, IPv6", &*pod6, "0", "", &own6),
        (
            "IPv4 from an IPv6 socket",
            "::ffff:10.101.0.50",
            "0",
            "",
            &mapped,
        ),
        ("MPTCP", "10.101.0.50", MPTCP, "", &own4),
        ("MPTCP, IPv6", "fd00:101::50", MPTCP, "", &own6),
        (
            "bound to the own address",
            "10.101.0.50",
            "0",
            &*own4,
            &own4,
        ),
        (
            "bound to the own IPv6 address",
            "fd00:101::50",
            "0",
            &*own6,
            &own6,
        ),
    ] {
        let seen = python(NAMES, &[to, "7000", protocol, bind]);
        assert_eq!(
            (seen["own"].as_str(), &seen["port"]),
            (Some(own.as_str()), &Value::Bool(true)),
            "{case}: {seen}"
        );
        assert_eq!(
            (seen["peer"][0].as_str(), seen["peer"][1].as_u64()),
            (Some(to), Some(7000)),
            "{case}: {seen}"
        );
        assert_eq!(seen["echo"], "hello", "{case}: {seen}");
    }
}

const ONE_PORT: &str = r#"
family = socket.AF_INET6 if ":" in sys.argv[2] else socket.AF_INET
streams = []
for to in sys.argv[2:]:
    host, port = to.rsplit(" ", 1)
    s = socket.socket(family, socket.SOCK_STREAM)
    s.settimeout(60)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("", int(sys.argv[1])))
    try:
        s.connect((host, int(port)))
    except OSError as e:
        print(json.dumps({"error": errno.errorcode[e.errno], "to": to})); sys.exit(0)
    streams.append(s)
for s in streams: s.sendall(b"x"); s.shutdown(socket.SHUT_WR)
print(json.dumps({"ports": [s.getsockname()[1] for s in streams], "bytes": [len(s.recv(100)) > 0 for s in streams]}))
"#;

/// H11: one source port, several destinations at once.
#[test]
fn one_source_port_leads_to_several_destinations() {
    let [pod4, pod6] = addresses(SERVER);
    for (port, service, pod) in [(40555, "10.101.0.50", pod4), (40556, "fd00:101::50", pod6)] {
        let to = [
            format!("{service} 7000"),
            format!("{service} 7002"),
            format!("{pod} 7000"),
        ];
        let seen = python(ONE_PORT, &[&port.to_string(), &to[0], &to[1], &to[2]]);
        assert_eq!(
            seen["ports"],
            serde_json::json!([port, port, port]),
            "{seen}"
        );
        assert_eq!(
            seen["bytes"],
            serde_json::json!([true, true, true]),
            "{seen}"
        );
    }
}

const CONNECT: &str = r#"
seen = {}
for to in sys.argv[1:]:
    host, port = to.rsplit(" ", 1)
    s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    s.settimeout(60)
    began = time.monotonic()
    code = s.connect_ex((host, int(port)))
    seen[to] = [errno.errorcode.get(code, "connected"), time.monotonic() - began]
    s.close()
print(json.dumps(seen))
"#;

fn connect(to: &str) -> String {
    python(CONNECT, &[to])[to][0]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

/// H10: `connect()` to a destination that the node knows to be unreachable fails with ECONNREFUSED
/// and is counted by name.
#[test]
fn unreachable_destinations_are_refused_by_connect() {
    let [own4, _] = addresses(CLIENT);
    // 15001, 15006 and 15008 are the mesh's own ports, as in Istio; applications must not dial
    // them.
    let [pod4, pod6] = addresses(SERVER);
    let reserved = [
        format!("{pod4} 15008"),
        format!("{pod6} 15001"),
        format!("{own4} 15006"),
    ];
    let reached = [format!("{pod4} 7000"), format!("{pod6} 7000")];
    for (reason, refused) in [
        (
            "unknown_port",
            vec![
                "10.101.0.50 7999",
                "fd00:101::50 7999",
                "::ffff:10.101.0.50 21",
            ],
        ),
        (
            "outside_mesh",
            vec![
                // No service has the first two addresses; the others are outside the tenant's
                // ranges.
                "10.101.0.200 80",
                "fd00:101::200 80",
                "8.8.8.8 53",
                "192.0.2.1 443",
                "2001:db8::1 443",
            ],
        ),
        (
            "reserved_port",
            reserved.iter().map(String::as_str).collect(),
        ),
        (
            "gateway_address",
            // A free address of the tenant's gateway range.
            vec!["10.102.15.250 80", "10.102.15.250 15008"],
        ),
    ] {
        let counted = || {
            mesh().counted(
                NODE,
                "canal_node_refused_total",
                &["direction=\"outbound\"", &format!("reason=\"{reason}\"")],
            )
        };
        let before = counted();
        let seen = python(CONNECT, &refused);
        for to in &refused {
            assert_eq!(seen[to][0], "ECONNREFUSED", "{reason}: {to}: {seen}");
            let took = Duration::from_secs_f64(seen[to][1].as_f64().expect("seconds"));
            assert_time(
                "time until an unreachable destination is refused",
                took,
                REFUSED_WITHIN,
            );
        }
        until(deadline(COUNTED_WITHIN), reason, || {
            counted() >= before + refused.len() as u64
        });
    }
    // Refusals must not have blocked the destinations that exist.
    let reached: Vec<&str> = ["10.101.0.50 7000", "fd00:101::50 7002"]
        .into_iter()
        .chain(reached.iter().map(String::as_str))
        .collect();
    let seen = python(CONNECT, &reached);
    for to in reached {
        assert_eq!(seen[to][0], "connected", "{to}: {seen}");
    }
}

/// New and removed services take effect at once.
#[test]
fn refusals_follow_the_services() {
    const TO: &str = "10.101.0.77 7000";
    let service = "apiVersion: v1
kind: Service
metadata: {name: later, namespace: default}
spec:
  clusterIP: 10.101.0.77
  clusterIPs: [10.101.0.77]
  selector: {app: tcp}
  ports: [{name: tcp-echo, port: 7000, targetPort: 7000}]
";
    // It only has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or
    // more.
    const AT_ONCE: Duration = Duration::from_secs(5);
    assert_eq!(connect(TO), "ECONNREFUSED");
    mesh().apply("alpha", service);
    until(deadline(AT_ONCE), "reachable as soon as it exists", || {
        connect(TO) == "connected"
    });
    assert_eq!(connect("10.101.0.77 7001"), "ECONNREFUSED");
    mesh().apply(
        "alpha",
        &service.replace(
            "port: 7000, targetPort: 7000}",
            "port: 7000, targetPort: 7000}, {name: tcp-more, port: 7001, targetPort: 7001}",
        ),
    );
    until(deadline(AT_ONCE), "a further port", || {
        connect("10.101.0.77 7001") == "connected"
    });
    mesh()
        .canal(&["delete", "--tenant", "alpha", "service", "later"])
        .expect_success();
    until(
        deadline(AT_ONCE),
        "refused as soon as it is removed",
        || connect(TO) == "ECONNREFUSED",
    );
}

/// H6: an FTP client in active mode sends the server its own address. The server accepts any
/// address (`port_promiscuous`); `addresses.rs` tests which client address it sees.
#[test]
fn ftp_works_in_active_mode() {
    if mesh().run(SERVER, &["which", "vsftpd"]).code != Some(0) {
        println!("SKIPPED: active FTP: vsftpd is not installed; fix: setup/install test");
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    let root = dir.path().join("root");
    std::fs::create_dir_all(root.join("pub")).expect("a directory");
    // More than all buffers between the server and a client that has not accepted yet: a server
    // that finishes before that reports it on the control connection, and curl treats this as an
    // error (docs/compatibility.md).
    let body: Vec<u8> = (0..24_000_000u32)
        // The multiplication makes bytes that repeat nowhere nearby, so misplaced parts are
        // noticed.
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    std::fs::write(root.join("pub/f.bin"), &body).expect("a file");
    open_to_all(dir.path());
    open_to_all(&root);
    open_to_all(&root.join("pub"));
    let [pod4, pod6] = addresses(SERVER);
    let config = dir.path().join("vsftpd.conf");
    let text = format!(
        "listen=NO\nlisten_ipv6=YES\nlisten_port=2121\nbackground=NO\nanonymous_enable=YES\nlocal_enable=NO\nno_anon_password=YES\nanon_root={}\nconnect_from_port_20=NO\nseccomp_sandbox=NO\nsecure_chroot_dir={}\n",
        root.display(),
        root.display()
    );
    std::fs::write(&config, text).expect("a file");
    let mut server = mesh().spawn(SERVER, &["vsftpd", &config.to_string_lossy()]);
    until(
        // It only has to exceed what a quiet machine needs.
        deadline(Duration::from_secs(10)),
        "the FTP server listens",
        || {
            let argv = "curl -sS --max-time 10 -o /dev/null ftp://127.0.0.1:2121/";
            let argv: Vec<&str> = argv.split(' ').collect();
            mesh().run(SERVER, &argv).code == Some(0)
        },
    );
    let to = dir.path().join("got");
    for (case, host, more) in [
        // `--disable-eprt` makes curl use PORT, which has IPv4 only.
        ("PORT", pod4.clone(), &["--disable-eprt"][..]),
        ("EPRT", pod4, &[][..]),
        ("EPRT, IPv6", format!("[{pod6}]"), &[][..]),
    ] {
        let url = format!("ftp://{host}:2121/pub/f.bin");
        // With the dialog, because curl 7.88 gives an unrelated text for every failure of an active
        // transfer (curl issue 10622).
        let argv = [
            "curl",
            "-sSv",
            "-g",
            // It only ends a hang.
            "--max-time",
            "120",
            "-P",
            "-",
            "-o",
            &to.to_string_lossy(),
            &url,
        ];
        let output = mesh().run(
            CLIENT,
            &argv
                .into_iter()
                .chain(more.iter().copied())
                .collect::<Vec<_>>(),
        );
        assert_eq!(output.code, Some(0), "{case}: {output:?}");
        assert!(
            std::fs::read(&to).expect("a file") == body,
            "{case}: another file came"
        );
        std::fs::remove_file(&to).expect("a file");
    }
    // All transfers were checked, so a server that has ended by itself is no failure.
    let _ = server.kill();
    let _ = server.wait();
}

fn open_to_all(dir: &std::path::Path) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o555))
        .expect("a directory of this test's");
}
