//! Every protocol through two node proxies and the cloud tier, IPv4 and IPv6, by two tenants with
//! the same addresses and names at the same time: real clients, real servers, every byte checked.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{ClientOutcome, Mesh, root};
use canal_timing::{deadline, is_timed, slack};

/// Tenants with the same pods.
const TENANTS: [&str; 2] = ["alpha", "beta"];
const CLIENT: &str = "alpha/default/client-0";
/// A sample client's own timeout of one call or run. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of a large body: in the timing tier, and in the gate.
const LARGE_BODY: [&str; 2] = ["104857600", "10485760"];

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| Mesh::up("mesh.yaml", "e2e-proto"))
}

/// Returns the service's address as a URL or dial string contains it, for both families.
fn both(n: u16, port: u16) -> [String; 2] {
    [
        format!("10.101.0.{n}:{port}"),
        format!("[fd00:101::{n}]:{port}"),
    ]
}

/// Runs a command in the client pods of both tenants at once. Returns the tenants' names with the
/// output.
fn in_both(argv: &[&str]) -> [(&'static str, ClientOutcome); 2] {
    let started = TENANTS.map(|tenant| {
        (
            tenant,
            mesh().spawn(&format!("{tenant}/default/client-0"), argv),
        )
    });
    started.map(|(tenant, child)| {
        (
            tenant,
            mesh().end(&format!("{tenant}: {}", argv.join(" ")), child),
        )
    })
}

/// Maximum number of calls that gRPC's client cancels until it reports one as cancelled. A call in
/// two is reported; ten in a row are not by chance.
const CANCEL_TRIES_MAX: u32 = 10;

/// Runs `canal-samples` in both tenants at once. The client itself checks what it gets and prints
/// `"ok": true`. Returns alpha's output.
fn sample(argv: &[&str]) -> serde_json::Value {
    let timeout_ms = deadline(CALL_TIMEOUT).as_millis().to_string();
    // Every client but this one has a timeout of its own.
    let limit = if argv[0] == "blob-client" {
        vec![]
    } else {
        vec!["--timeout-ms", timeout_ms.as_str()]
    };
    let all: Vec<&str> = ["canal-samples"]
        .into_iter()
        .chain(argv.iter().copied())
        .chain(limit)
        .collect();
    let [alpha, _] = in_both(&all).map(|(tenant, output)| {
        let json = output.json();
        assert!(
            json["ok"] == true && output.code == Some(0),
            "{}\n{json}\n{}\n{}",
            output.command,
            output.stderr,
            mesh().logs()
        );
        for answered_by in json["served_by"]
            .as_object()
            .into_iter()
            .flat_map(|by| by.keys())
        {
            assert!(
                answered_by.ends_with(tenant),
                "{tenant} was answered by {answered_by}"
            );
        }
        json
    });
    alpha
}

/// Transfers bodies of every mode, framing and size from one address, one after the other. It stops
/// at the first that is not right.
const BODIES: &str = "for mode in get put echo; do for framing in length chunked trailers; do for size in 0 1 16384 1048577; do \
    out=$(canal-samples blob-client \"$0\" --protocol \"$1\" --mode $mode --framing $framing --size $size 2>&1) \
    || { echo \"$mode $framing $size: $out\"; exit 1; }; done; done; done; echo all right";

/// Bodies of every framing, version and direction; large ones once per direction, version and
/// family.
#[test]
fn http_bodies_arrive_byte_exact() {
    for (port, protocol) in [
        (80, "h1"),
        (81, "h2"),
        (82, "h1"),
        (82, "h2"),
        (80, "h2"),
        (81, "h1"),
    ] {
        for address in both(10, port) {
            let url = format!("http://{address}");
            for (tenant, output) in in_both(&["sh", "-c", BODIES, &url, protocol]) {
                assert_eq!(
                    output.expect_success().trim(),
                    "all right",
                    "{tenant}: {url}: {protocol}"
                );
            }
        }
    }
}

#[test]
fn large_bodies_arrive_byte_exact() {
    let size = LARGE_BODY[usize::from(!is_timed())];
    for (port, protocol) in [(80, "h1"), (81, "h2")] {
        for (address, framing) in both(10, port).iter().zip(["length", "chunked"]) {
            let url = format!("http://{address}");
            for mode in ["get", "put"] {
                sample(&[
                    "blob-client",
                    &url,
                    "--mode",
                    mode,
                    "--framing",
                    framing,
                    "--size",
                    size,
                    "--protocol",
                    protocol,
                ]);
            }
        }
    }
}

#[test]
fn keep_alive_load_is_answered_without_a_loss() {
    let [v4, v6] = both(10, 80).map(|a| format!("http://{a}/blob?size=100"));
    for protocol in ["h1", "h2"] {
        let count: u32 = if is_timed() { 4000 } else { 1000 };
        let report = sample(&[
            "load",
            &v4,
            &v6,
            "-n",
            &count.to_string(),
            "-c",
            "16",
            "--protocol",
            protocol,
        ]);
        assert_eq!(report["succeeded"], count, "{report}");
    }
    let report = sample(&["load", &v4, "-n", "300", "-c", "4", "--no-keepalive"]);
    assert_eq!(report["succeeded"], 300, "{report}");
}

#[test]
fn grpc_unary_streams_trailers_and_statuses() {
    for address in both(20, 9000) {
        for mode in ["unary", "server-stream", "client-stream", "bidi"] {
            // One empty message, many small ones, and some that exceed HTTP/2's initial window of
            // 64 KiB.
            for (count, size) in [("1", "0"), ("50", "1000"), ("4", "2000000")] {
                sample(&[
                    "grpc-client",
                    &address,
                    "--mode",
                    mode,
                    "--count",
                    count,
                    "--size",
                    size,
                ]);
            }
            // A status message with characters that gRPC must percent-encode.
            sample(&[
                "grpc-client",
                &address,
                "--mode",
                mode,
                "--count",
                "3",
                // RESOURCE_EXHAUSTED: any status but OK would do.
                "--status",
                "8",
                "--status-message",
                "a/b %",
            ]);
        }
        // Messages 100 ms apart, so that each passes alone and not with the next one.
        sample(&[
            "grpc-client",
            &address,
            "--mode",
            "bidi",
            "--count",
            "5",
            "--interval-ms",
            "100",
            "--metadata",
            "x-echo-a=b",
        ]);
    }
}

/// The gRPC project's own interop client against its own server: the cases that need no special
/// channel.
#[test]
fn grpc_interop_passes() {
    let cases = [
        "empty_unary",
        "large_unary",
        "client_streaming",
        "server_streaming",
        "ping_pong",
        "empty_stream",
        "cancel_after_begin",
        "cancel_after_first_response",
        "timeout_on_sleeping_server",
        "status_code_and_message",
        "special_status_message",
        "custom_metadata",
        "unimplemented_method",
        "unimplemented_service",
    ];
    let client = root().join(".tools/bin/grpc-interop-client");
    let client = client.to_str().expect("a UTF-8 path");
    for host in ["10.101.0.21", "fd00:101::21"] {
        for case in cases {
            let argv = [
                client,
                "-server_host",
                host,
                "-server_port",
                "9100",
                "-test_case",
                case,
            ];
            // The client cancels its call and then asks for the result. If it does not run in
            // between, the answer is there before its own library has seen the cancellation, and
            // the client takes either.
            let tries = if case == "cancel_after_begin" {
                CANCEL_TRIES_MAX
            } else {
                1
            };
            for attempt in 1..=tries {
                let outputs = in_both(&argv);
                if attempt == tries || outputs.iter().all(|(_, output)| output.code == Some(0)) {
                    outputs
                        .into_iter()
                        .for_each(|(_, output)| drop(output.expect_success()));
                    break;
                }
            }
        }
    }
}

#[test]
fn web_sockets_echo_and_close() {
    for address in both(30, 8081) {
        for (count, size) in [("20", "64"), ("5", "1000000")] {
            sample(&[
                "ws-client",
                &format!("ws://{address}/"),
                "--count",
                count,
                "--size",
                size,
            ]);
        }
    }
}

/// kosoku's cases (Autobahn's set) through the mesh. A case may end as it ends without the mesh,
/// and no worse.
#[test]
fn web_socket_conformance_is_the_servers_own() {
    let direct = kosoku_verdicts("alpha/default/ws-0", "127.0.0.1:8081");
    let meshed = kosoku_verdicts(CLIENT, "10.101.0.30:8081");
    assert!(meshed.len() > 200, "only {} cases were run", meshed.len());
    assert_eq!(direct.len(), meshed.len());
    for (case, verdict) in &direct {
        // NON-STRICT is a pass that depends on how bytes were cut into segments, which a relay may
        // change.
        let passed = meshed.get(case) == Some(verdict)
            || (verdict == "OK" && meshed.get(case).is_some_and(|v| v == "NON-STRICT"));
        assert!(
            passed,
            "case {case} directly: {verdict}, through the mesh: {:?}",
            meshed.get(case)
        );
        assert_ne!(
            verdict, "FAILED",
            "case {case} fails even without the mesh: the sample server is at fault"
        );
    }
}

/// Returns kosoku's verdicts of all cases. kosoku gives each echo a time that no option sets, so in
/// the gate a case that failed is run again.
fn kosoku_verdicts(host: &str, address: &str) -> BTreeMap<String, String> {
    let mut verdicts = kosoku(host, address, &["-x", "9.*", "-x", "12.*", "-x", "13.*"]);
    for _ in 1..slack() {
        let failed: Vec<String> = verdicts
            .iter()
            .filter(|(_, verdict)| *verdict == "FAILED")
            .map(|(case, _)| case.clone())
            .collect();
        if failed.is_empty() {
            break;
        }
        let selection: Vec<&str> = failed.iter().flat_map(|case| ["-i", case]).collect();
        verdicts.extend(kosoku(host, address, &selection));
    }
    verdicts
}

/// Runs the cases that `selection` names, and returns kosoku's verdict of each.
fn kosoku(host: &str, address: &str, selection: &[&str]) -> BTreeMap<String, String> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let program = root().join(".tools/python/bin/kosoku");
    let (program, reports) = (
        program.to_str().expect("a UTF-8 path"),
        dir.path().to_str().expect("a UTF-8 path"),
    );
    let argv = [
        &[program, "-m", "fuzzingclient"],
        selection,
        &["-o", reports, address],
    ]
    .concat();
    let output = mesh().run(host, &argv);
    let report = std::fs::read_to_string(dir.path().join("index.json"))
        .unwrap_or_else(|e| panic!("{e}: {output:?}"));
    let report: serde_json::Value = serde_json::from_str(&report).expect("kosoku's report is JSON");
    let agents = report.as_object().expect("agents");
    let cases = agents
        .values()
        .next()
        .and_then(|a| a.as_object())
        .expect("cases");
    cases
        .iter()
        .map(|(case, r)| {
            (
                case.clone(),
                r["behavior"].as_str().unwrap_or("?").to_string(),
            )
        })
        .collect()
}

#[test]
fn tcp_half_closes_and_resets_are_carried() {
    for (mode, port) in [
        ("echo", 7000),
        ("drain", 7001),
        ("greet", 7002),
        ("source", 7003),
        ("reset", 7004),
    ] {
        for address in both(50, port) {
            for size in [
                "1",
                "65536",
                if is_timed() { "20000000" } else { "2000000" },
            ] {
                sample(&["tcp-client", &address, "--mode", mode, "--size", size]);
            }
        }
    }
}

/// A port whose name declares no protocol, with a server that sends first.
#[test]
fn server_first_protocols_work_without_a_hint() {
    for address in both(50, 7006) {
        sample(&["tcp-client", &address, "--mode", "greet", "--size", "10"]);
    }
}

/// A server that never reads stops its client after bounded buffers: back-pressure crosses both
/// proxies and the gateway. Each proxy holds at most 2 MiB; the rest are the kernel's buffers of
/// three connections, up to 4 MiB for sending and 6 MiB for receiving.
#[test]
fn back_pressure_crosses_the_mesh() {
    for address in both(50, 7005) {
        let report = sample(&[
            "tcp-client",
            &address,
            "--mode",
            "stall",
            "--size",
            "1000000000",
        ]);
        let sent = report["sent"].as_u64().unwrap_or(u64::MAX);
        assert!(
            sent < 24 << 20,
            "{sent} bytes were taken for a server that reads none"
        );
    }
}

#[test]
fn redis_answers() {
    for host in ["10.101.0.40", "fd00:101::40"] {
        let ask = |tenant: &str, argv: &[&str]| {
            let all: Vec<&str> = ["redis-cli", "-h", host]
                .into_iter()
                .chain(argv.iter().copied())
                .collect();
            mesh()
                .run(&format!("{tenant}/default/client-0"), &all)
                .expect_success()
        };
        for tenant in TENANTS {
            assert_eq!(ask(tenant, &["ping"]).trim(), "PONG");
            assert_eq!(ask(tenant, &["set", "k", tenant]).trim(), "OK");
        }
        for tenant in TENANTS {
            assert_eq!(
                ask(tenant, &["get", "k"]).trim(),
                tenant,
                "each tenant has its own redis behind the one address"
            );
        }
    }
}

/// A pod's own address works like a service's, and the mesh carries the connection.
#[test]
fn pods_are_reached_by_their_address() {
    let hosts = mesh().world.hosts().unwrap();
    let environment = &hosts
        .iter()
        .find(|h| h.environment.name == "alpha/default/blob-0")
        .expect("the pod is in the world")
        .environment;
    for address in [
        environment.ip4.map(|a| a.to_string()),
        environment.ip6.map(|a| format!("[{a}]")),
    ] {
        let address = address.expect("pods are dual stack");
        sample(&[
            "blob-client",
            &format!("http://{address}:8080"),
            "--size",
            "100000",
        ]);
    }
}

#[test]
fn names_resolve_as_in_a_cluster() {
    for name in [
        "blob",
        "blob.default",
        "blob.default.svc",
        "blob.default.svc.cluster.local",
    ] {
        sample(&["blob-client", &format!("http://{name}:80"), "--size", "10"]);
    }
}

/// A request to a service without a ready endpoint gets 503 with the reason, and does not hang.
#[test]
fn a_service_without_endpoints_is_unavailable() {
    let output = mesh().run(
        CLIENT,
        &[
            "curl",
            "-sS",
            "--max-time",
            "60",
            "-o",
            "/dev/null",
            "-w",
            "%{http_code}",
            "http://10.101.0.70/",
        ],
    );
    assert_eq!(output.expect_success().trim(), "503");
}

/// Destinations outside the mesh are refused by default, and so is everything of another tenant: it
/// has the same addresses, so no address can mean it; names, pods and addresses lead to the
/// client's own tenant.
#[test]
fn the_outside_is_refused_and_tenants_meet_only_themselves() {
    // No service has the first two addresses. The others are the controller's, the tier's inner
    // addresses of services, a node's with VXLAN's port, and one outside.
    let targets = [
        "10.101.77.77:80",
        "[fd00:101::7777]:80",
        "250.1.0.1:15012",
        "240.0.0.1:80",
        "[fdca:a1:0:240::1]:80",
        "10.201.0.1:4789",
        "192.0.2.1:80",
    ];
    // A refused connect ends at once; `--max-time` only ends a hang.
    for target in targets {
        for (_, output) in in_both(&[
            "curl",
            "-sS",
            "-g",
            "--max-time",
            "5",
            &format!("http://{target}/blob?size=1"),
        ]) {
            assert!(
                output.code != Some(0) && output.stdout.is_empty(),
                "{target} answered: {output:?}"
            );
        }
    }
    // Beta's pod has the same address as a pod of alpha's, so each tenant must reach its own.
    let hosts = mesh().world.hosts().unwrap();
    let environment = &hosts
        .iter()
        .find(|h| h.environment.name == "beta/default/blob-0")
        .expect("beta has a pod")
        .environment;
    let pod = format!(
        "http://{}:8080/blob?size=1",
        environment.ip4.expect("pods have an IPv4 address")
    );
    for url in [
        "http://10.101.0.10/blob?size=1",
        "http://blob.default/blob?size=1",
        &pod,
    ] {
        for (tenant, output) in in_both(&[
            "curl",
            "-sS",
            "--max-time",
            "60",
            "-o",
            "/dev/null",
            "-D",
            "-",
            url,
        ]) {
            let head = output.expect_success();
            assert!(
                head.contains(&format!("x-served-by: blob-{tenant}")),
                "{tenant} asked {url}: {head}"
            );
        }
    }
}
