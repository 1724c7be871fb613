//! Key servers with RSA keys, with revoked channels, and under faults: killed, hung, partitioned,
//! slow, flooded, given garbage. Both tenants keep their keys there. Alpha lets data planes make
//! their own keys while no key server responds, beta does not. Clients that make a new handshake
//! for each request count the handshakes.

use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::controller::Caller;
use canal_e2e::credential::{Leaf, PemCredential, TestAuthority, request_with_key};
use canal_e2e::hbone::{TunnelAttempt, TunnelLoad, TunnelRequest, load, tunnel};
use canal_e2e::keys::{KeyServerReply, Requester};
use canal_e2e::{Mesh, until};
use canal_timing::{assert_losses, assert_time, deadline, is_timed, timed};
use canal_wire::keyrpc::{FRAME_MAX, KeyName, PORT};
use canal_world::topology::{
    TenantKeysTopology, TopologyKeyAlgorithm, TopologyKeyFallback, TopologyKeyLocation,
};
use canal_world::{Impairment, Signal};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::Value;

/// Maximum time of a step on a quiet machine: a change is in force, or a process serves. It only
/// has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
/// Simultaneous clients of each tenant. Nobody derived the number: more handshakes at a time would
/// measure the two cores.
const CLIENTS: usize = 3;
/// Maximum time of a handshake during a fault, shorter than any timeout. A requester has tried
/// every key server by then: 250 ms each, and a second for the last.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The key server in the AZ of the servers under test.
const NEAR: &str = "ks-2";
/// Address of both tenants' gateways in az1, whose own key server is the first.
const GATEWAY: &str = "10.102.2.1:15008";
const GATEWAYS_KEY_SERVER: &str = "ks-1";
/// Number of gateways in that AZ. As in the world's file.
const GATEWAYS: usize = 2;

/// rsaEncryption (RFC 8017 A.1), DER.
const RSA_ENCRYPTION: [u8; 11] = [6, 9, 42, 134, 72, 134, 247, 13, 1, 1, 1];
const TERMINATION: &str = "---\napiVersion: canal.mesh/v1\nkind: Termination\nmetadata: {name: web-open, namespace: default}\n\
    spec: {targetRef: {kind: Service, name: web-open}, port: 443, certificate: {mesh: {}}}\n";

/// Returns a CA for each tenant, so that the test has certificates for its clients.
fn authorities() -> &'static (tempfile::TempDir, [TestAuthority; 2]) {
    static FILES: OnceLock<(tempfile::TempDir, [TestAuthority; 2])> = OnceLock::new();
    FILES.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let roots = ["alpha", "beta"].map(|tenant| {
            let root = TestAuthority::root(tenant);
            let domain = dir.path().join(format!("{tenant}.example"));
            std::fs::create_dir_all(&domain).expect("a directory");
            for (name, text) in [
                ("root-cert.pem", root.pem()),
                ("cert-chain.pem", root.pem()),
                ("key.pem", root.key_pem()),
            ] {
                std::fs::write(domain.join(name), text).unwrap_or_else(|e| panic!("{name}: {e}"));
            }
            root
        });
        (dir, roots)
    })
}

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let mesh = Mesh::up_with("trust.yaml", "e2e-keys", |topology| {
            for (tenant, fallback) in topology
                .tenants
                .iter_mut()
                // Alpha falls back to local keys and beta refuses, so that each test sees both
                // policies.
                .zip([TopologyKeyFallback::Local, TopologyKeyFallback::Refuse])
            {
                tenant.keys = Some(TenantKeysTopology {
                    location: TopologyKeyLocation::KeyServer,
                    algorithm: TopologyKeyAlgorithm::EcdsaP256,
                    fallback,
                });
            }
            // The link of the nearer one has a relay, so that it can become slow.
            for server in topology
                .key_servers
                .iter_mut()
                .filter(|server| server.name == NEAR)
            {
                server.impairment = Some(Impairment::default());
            }
            let controller = topology
                .controller
                .as_mut()
                .and_then(|c| c.process.as_mut())
                .expect("the world has a controller");
            // Tests sign certificates for their own clients with these CAs.
            controller.args.extend([
                "--ca-dir".into(),
                authorities().0.path().display().to_string(),
            ]);
        });
        for tenant in ["alpha", "beta"] {
            let client = format!("{tenant}/default/client-0");
            until(
                deadline(STEP_TIMEOUT),
                "gateways serve both tenants",
                || mesh.code(&client, "http://10.101.0.10/headers", &[]) == 200,
            );
            // Nodes need a key of a key server too, which they may get later than gateways.
            until(
                deadline(STEP_TIMEOUT),
                "the nodes themselves serve both tenants",
                || handshake(&mesh, tenant).reached(),
            );
        }
        mesh
    })
}

fn member(tenant: &str) -> PemCredential {
    let authority = &authorities().1[usize::from(tenant == "beta")];
    authority.issue(&Leaf::of(&format!(
        "spiffe://{tenant}.example/ns/default/sa/client"
    )))
}

/// Runs a client of a tenant: a handshake with the node of the tenant's web pod, and one request.
fn with_client<T>(mesh: &Mesh, tenant: &str, work: impl FnOnce(&TunnelRequest<'_>) -> T) -> T {
    let (member, pod) = (
        member(tenant),
        mesh.address(&format!("{tenant}/default/web-0")),
    );
    let (host, authority) = (format!("{tenant}/default/client-0"), format!("{pod}:8080"));
    work(&TunnelRequest::new(
        &host,
        (pod, 15008).into(),
        Some(&member),
        &authority,
    ))
}

fn handshake(mesh: &Mesh, tenant: &str) -> TunnelAttempt {
    with_client(mesh, tenant, |handshake| tunnel(&mesh.world, handshake))
}

/// Runs a client through a gateway, which makes the handshake with the client.
fn through_gateway(tenant: &str) -> TunnelAttempt {
    with_client(mesh(), tenant, |handshake| {
        tunnel(
            &mesh().world,
            &TunnelRequest {
                to: GATEWAY.parse().expect("an address"),
                ..handshake.clone()
            },
        )
    })
}

/// Makes handshakes of both tenants during an event, in the timing tier. The gate has no load,
/// because each of its figures would depend on the machine.
fn under_load(seconds: u64, happens: impl FnOnce()) -> Vec<(&'static str, TunnelLoad)> {
    let mesh = mesh();
    if !is_timed() {
        happens();
        return Vec::new();
    }
    std::thread::scope(|scope| {
        let loads = ["alpha", "beta"].map(|tenant| {
            (
                tenant,
                scope.spawn(move || {
                    with_client(mesh, tenant, |handshake| {
                        load(&mesh.world, handshake, CLIENTS, seconds)
                    })
                }),
            )
        });
        std::thread::sleep(Duration::from_secs(2));
        happens();
        loads
            .map(|(tenant, running)| (tenant, running.join().expect("the load ends")))
            .into()
    })
}

fn unharmed(what: &str, loads: &[(&str, TunnelLoad)]) {
    for (tenant, load) in loads {
        let TunnelLoad {
            reached,
            again,
            failed,
            slowest,
        } = load;
        println!(
            "{what}: {tenant}: {reached} handshakes, {again} at the second try, {} failed, the slowest {slowest:?}",
            failed.len()
        );
        // Handshakes that a key server had begun are lost with it: at most those in progress when
        // it ended and when it returned.
        assert_losses(
            &format!("handshakes lost that were under way, {what}, {tenant}"),
            *again,
            2 * CLIENTS as u64,
        );
        assert_losses(
            &format!("handshakes lost twice, {what}, {tenant}"),
            failed.len() as u64,
            0,
        );
        timed!(
            *reached > 20,
            "more than 20 handshakes are made, {what}, {tenant}"
        );
        assert_time(
            &format!("time of the slowest handshake, {what}, {tenant}"),
            *slowest,
            TIMEOUT,
        );
    }
}

/// Returns the number of handshakes by a key server, as nodes count them.
fn used(server: &str) -> u64 {
    mesh().counted_at(
        "node",
        "canal_keys_answers_total",
        &[&format!("server=\"{server}\"")],
    )
}

/// Checks that the near key server is used again, without a restart of any process.
fn recovered(what: &str, pids: &[Option<u32>]) {
    let before = used(NEAR);
    until(
        deadline(STEP_TIMEOUT),
        &format!("{what}: the near key server is used again"),
        || {
            handshake(mesh(), "alpha");
            used(NEAR) > before
        },
    );
    assert_eq!(requesters(), pids, "{what}: no process was restarted");
}

fn requesters() -> Vec<Option<u32>> {
    [
        "alpha-n1", "alpha-n2", "beta-n1", "beta-n2", "gw-1", "gw-2", "gw-3",
    ]
    .map(|host| mesh().world.host(host).unwrap().pid())
    .into()
}

#[test]
fn a_killed_key_server_is_replaced_by_the_other_az_s() {
    let (world, pids, other) = (&mesh().world, requesters(), used("ks-1"));
    let loads = under_load(10, || {
        world.kill(NEAR, Signal::Kill).unwrap();
        world.stop(NEAR).unwrap();
        for tenant in ["alpha", "beta"] {
            until(
                deadline(STEP_TIMEOUT),
                "the key server of the other AZ serves both tenants",
                || handshake(mesh(), tenant).reached(),
            );
        }
        if is_timed() {
            std::thread::sleep(Duration::from_secs(4));
        }
        world.start(NEAR).unwrap();
    });
    unharmed("killed", &loads);
    assert!(
        used("ks-1") > other,
        "the key server of the other AZ was used and counted"
    );
    world.wait_host_ready(NEAR, deadline(STEP_TIMEOUT)).unwrap();
    recovered("killed", &pids);
}

#[test]
fn a_hung_key_server_is_left_alone() {
    let (world, pids) = (&mesh().world, requesters());
    let loads = under_load(10, || {
        world.kill(NEAR, Signal::Stop).unwrap();
        std::thread::sleep(Duration::from_secs(5));
        world.kill(NEAR, Signal::Cont).unwrap();
    });
    unharmed("hung", &loads);
    recovered("hung", &pids);
}

#[test]
fn a_key_server_that_is_cut_off_is_left_alone() {
    let (world, pids) = (&mesh().world, requesters());
    let loads = under_load(10, || {
        for node in ["alpha-n2", "beta-n2"] {
            world.cut(node, NEAR).unwrap();
        }
        std::thread::sleep(Duration::from_secs(5));
        for node in ["alpha-n2", "beta-n2"] {
            world.heal(node, NEAR).unwrap();
        }
    });
    unharmed("cut off", &loads);
    recovered("cut off", &pids);
}

#[test]
fn a_slow_key_server_delays_and_loses_nothing() {
    let (world, pids) = (&mesh().world, requesters());
    let loads = under_load(12, || {
        let slow = world.delay(NEAR, Duration::from_millis(50)).unwrap();
        std::thread::sleep(Duration::from_secs(6));
        drop(slow);
    });
    unharmed("50 ms late", &loads);
    recovered("slow", &pids);
}

#[test]
fn a_flood_of_one_tenant_affects_no_other() {
    let mesh = mesh();
    let alpha = std::thread::scope(|scope| {
        let flood = scope.spawn(move || {
            with_client(mesh, "beta", |handshake| {
                load(&mesh.world, handshake, 150, 12)
            })
        });
        std::thread::sleep(Duration::from_secs(2));
        let alpha = with_client(mesh, "alpha", |handshake| {
            load(&mesh.world, handshake, 2, 8)
        });
        let flood = flood.join().expect("the flood ends");
        println!(
            "the flood: {} handshakes, {} failed",
            flood.reached,
            flood.failed.len()
        );
        alpha
    });
    unharmed("flooded", &[("alpha", alpha)]);
}

fn kill_and_stop(server: &str) {
    mesh().world.kill(server, Signal::Kill).unwrap();
    mesh().world.stop(server).unwrap();
}

fn start_and_wait(server: &str) {
    mesh().world.start(server).unwrap();
    mesh()
        .world
        .wait_host_ready(server, deadline(STEP_TIMEOUT))
        .unwrap();
}

/// Returns what both gateways together counted.
fn counted_at_gateways(family: &str, labels: &[&str]) -> u64 {
    let gateways = ["gw-1", "gw-2"].iter();
    gateways
        .map(|gateway| mesh().counted(gateway, family, labels))
        .sum()
}

/// Gateways use the other AZ's key server when their own is gone, and follow the tenant's policy
/// when all are gone, as nodes do.
#[test]
fn a_gateway_without_its_key_server_follows_policy() {
    let pids = requesters();
    let counted = counted_at_gateways;
    let local = || counted("canal_keys_fallbacks_total", &[]);
    let by = |server: &str| {
        counted(
            "canal_keys_answers_total",
            &[&format!("server=\"{server}\""), "what=\"handshake\""],
        )
    };
    let own = by(GATEWAYS_KEY_SERVER);
    until(
        deadline(STEP_TIMEOUT),
        "the gateways' own key server is used",
        || {
            ["alpha", "beta"]
                .iter()
                .all(|tenant| through_gateway(tenant).reached())
                && by(GATEWAYS_KEY_SERVER) > own
        },
    );
    let (other, before) = (by("ks-2"), local());
    kill_and_stop(GATEWAYS_KEY_SERVER);
    for tenant in ["alpha", "beta"] {
        until(
            deadline(STEP_TIMEOUT),
            "the key server of the other AZ serves the gateways",
            || through_gateway(tenant).reached(),
        );
    }
    assert!(
        by("ks-2") > other,
        "the handshakes of the other AZ's key server are counted"
    );
    assert!(
        counted(
            "canal_keys_failures_total",
            &[&format!("server=\"{GATEWAYS_KEY_SERVER}\"")]
        ) > 0,
        "the failures of the killed key server are counted"
    );
    // A key server was left, so not even alpha needed its local fallback.
    assert_eq!(local(), before, "no handshake used a local key");
    kill_and_stop("ks-2");
    let refused = || {
        counted(
            "canal_tls_refused_total",
            &["side=\"server\"", "reason=\"no_key_server\""],
        )
    };
    until(
        deadline(STEP_TIMEOUT),
        "alpha's gateways have keys of their own",
        || through_gateway("alpha").reached(),
    );
    assert!(local() > before, "handshakes with local keys are counted");
    // Beta's fallback is `Refuse`.
    let before = refused();
    let answer = through_gateway("beta");
    assert!(
        matches!(answer, TunnelAttempt::Refused(_)),
        "beta's gateways may not use local keys: {answer:?}"
    );
    until(
        deadline(STEP_TIMEOUT),
        "the refusal of beta's handshake is counted by its name",
        || refused() > before,
    );
    [GATEWAYS_KEY_SERVER, "ks-2"]
        .into_iter()
        .for_each(start_and_wait);
    until(
        deadline(STEP_TIMEOUT),
        "beta's handshakes succeed again",
        || through_gateway("beta").reached(),
    );
    let own = by(GATEWAYS_KEY_SERVER);
    until(
        deadline(STEP_TIMEOUT),
        "the gateways' own key server is used again",
        || through_gateway("alpha").reached() && by(GATEWAYS_KEY_SERVER) > own,
    );
    recovered("all dead, for gateways", &pids);
}

/// Edits a tenant's key settings, as an operator does.
fn change_keys(tenant: &str, from: (&str, &str), to: (&str, &str)) {
    let path = mesh()
        .world
        .dir()
        .join("config")
        .join(tenant)
        .join("_tenant.yaml");
    let text = std::fs::read_to_string(&path).expect("the Tenant object");
    let changed = text.replace(from.0, to.0).replace(from.1, to.1);
    assert_ne!(changed, text, "{text}");
    std::fs::write(&path, changed).expect("written");
    mesh().converge(deadline(STEP_TIMEOUT));
}

/// Returns the number of operations that key servers did for beta with RSA keys.
fn by_rsa(kind: &str) -> u64 {
    let labels = [
        format!("kind=\"{kind}\""),
        "algorithm=\"rsa\"".to_owned(),
        "tenant=\"beta\"".to_owned(),
    ];
    mesh().counted_at(
        "keyServer",
        "canal_key_operations_total",
        &labels.each_ref().map(String::as_str),
    )
}

/// Connects a client without a node proxy, by TLS that a gateway terminates with a certificate of
/// the service.
fn terminated() -> Result<(), Value> {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), authorities().1[1].pem()).expect("written");
    let (name, roots) = (
        "web-open.default.svc.cluster.local",
        file.path().display().to_string(),
    );
    let address = format!("{name}:443");
    let argv = [
        "canal-samples",
        "tls-client",
        &address,
        "--name",
        name,
        "--roots",
        &roots,
        "--path",
        "/headers",
        "--timeout-ms",
        "60000",
    ];
    let report = mesh().run("beta/default/bare-0", &argv).json();
    let is_well = report["ok"] == true && report["chain"][0]["names"].to_string().contains(name);
    if is_well { Ok(()) } else { Err(report) }
}

/// A tenant that requires RSA gets it wherever its keys are: on its nodes and gateways, in key
/// servers for handshakes, and for signatures alone. The requests go from one node through a
/// gateway to another.
#[test]
fn a_tenant_with_rsa_keys_is_served_wherever_they_are() {
    let mesh = mesh();
    let served = || mesh.code("beta/default/client-0", "http://10.101.0.10/headers", &[]) == 200;
    // Keys move from key servers to hosts, back to key servers, and to the settings before: RSA is
    // required in each place.
    change_keys("beta", ("KeyServer", "EcdsaP256"), ("Local", "Rsa2048"));
    let stored = mesh.world.dir().join("data/beta-n2/certs");
    let rsa = |chain: &str| {
        let der = CertificateDer::from_pem_slice(chain.as_bytes()).expect("a certificate");
        der.windows(RSA_ENCRYPTION.len())
            .any(|part| part == RSA_ENCRYPTION)
    };
    let chains = || -> Vec<String> {
        // A file that was replaced since the directory was read is left out; the check is repeated.
        let files = std::fs::read_dir(&stored)
            .into_iter()
            .flatten()
            .filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
        files
            .filter_map(|text| {
                Some(
                    serde_json::from_str::<Value>(&text).ok()?["chain"]
                        .as_str()?
                        .to_owned(),
                )
            })
            .collect()
    };
    until(
        deadline(STEP_TIMEOUT),
        "local: the node has RSA keys",
        || chains().iter().any(|chain| rsa(chain)),
    );
    until(
        deadline(STEP_TIMEOUT),
        "local: the pod of RSA keys answers by the gateway",
        // The gateway, the node and the pod have keys of their own, and all must have changed to
        // RSA.
        || served() && through_gateway("beta").reached() && handshake(mesh, "beta").reached(),
    );
    assert_eq!(by_rsa("handshake_server"), 0, "no key server was used");
    change_keys("beta", ("Local", "Rsa2048"), ("KeyServer", "Rsa2048"));
    until(
        deadline(STEP_TIMEOUT),
        "handshakes: key servers serve both ends and the gateway",
        || {
            let answered =
                served() && through_gateway("beta").reached() && handshake(mesh, "beta").reached();
            // The gateway and the endpoint's node are servers of one handshake each.
            answered && by_rsa("handshake_client") > 0 && by_rsa("handshake_server") > 1
        },
    );
    assert!(
        !mesh
            .world
            .dir()
            .join("data/beta-n2/certs")
            .read_dir()
            .is_ok_and(|mut files| files.next().is_some()),
        "no key stays on the node"
    );
    mesh.apply("beta", TERMINATION);
    until(
        deadline(STEP_TIMEOUT),
        "signatures: the gateway ends TLS",
        || terminated().is_ok(),
    );
    // A gateway that terminates TLS asks only for signatures.
    assert!(by_rsa("sign") > 0, "RSA signatures are counted");
    change_keys("beta", ("KeyServer", "Rsa2048"), ("KeyServer", "EcdsaP256"));
    until(
        deadline(STEP_TIMEOUT),
        "the tenant is served with its first settings again",
        || served() && handshake(mesh, "beta").reached(),
    );
}

/// Each key server has its own key for a service. A gateway presents one server's certificates for
/// a while, and never lets another sign for them. A key server that dies loses the handshakes that
/// it was about to sign; one that returns loses none.
#[test]
fn a_service_s_key_is_one_key_server_s() {
    let mesh = mesh();
    mesh.apply("beta", TERMINATION);
    until(deadline(STEP_TIMEOUT), "the gateway ends TLS", || {
        terminated().is_ok()
    });
    let all_of = |what: &str| {
        (0..20).for_each(|n| {
            terminated().unwrap_or_else(|e| panic!("{what}, {n}: {e}\n{}", mesh.logs()))
        })
    };
    all_of("both");
    kill_and_stop(GATEWAYS_KEY_SERVER);
    let failed = (0..20).filter(|_| terminated().is_err()).count();
    println!("the gateways' own key server killed: {failed} of 20 handshakes failed");
    assert!(
        failed <= GATEWAYS,
        "at most one handshake of each gateway fails: {failed}"
    );
    start_and_wait(GATEWAYS_KEY_SERVER);
    all_of("back");
    mesh.canal(&["delete", "--tenant", "beta", "Termination", "web-open"])
        .expect_success();
    mesh.converge(deadline(STEP_TIMEOUT));
}

/// Returns a component's certificate, obtained with its own token.
fn component(host: &str, identity: &str) -> PemCredential {
    let (csr, key) = request_with_key(&[identity]);
    let chain = Caller::as_itself(&mesh().world, host)
        .certificate(identity, &csr, None)
        .unwrap_or_else(|e| panic!("{identity}: {e}"));
    PemCredential {
        chain: chain[..chain.len() - 1].concat(),
        key,
    }
}

#[test]
fn garbage_affects_no_handshake() {
    let mesh = mesh();
    let credential = component(
        "beta-n2",
        "spiffe://components.canal/ns/beta/sa/node.beta-n2",
    );
    let requester = Requester {
        world: &mesh.world,
        host: "beta-n2",
        server: NEAR,
        credential: Some(&credential),
    };
    assert_eq!(requester.ping(), KeyServerReply::Pong);
    let frame = |length: u32, rest: &[u8]| [&length.to_be_bytes()[..], rest].concat();
    // The noise is the same in each run, so that a failure repeats. Its first bytes are too large a
    // length.
    let noise: Vec<u8> = (0..FRAME_MAX).map(|n| (n * 7919 % 251) as u8).collect();
    let cases = [
        ("a length beyond all", frame(u32::MAX, b"x")),
        ("a length below all", frame(1, b"x")),
        // A frame's body begins with eight bytes of ID and one of kind.
        ("an unknown kind", frame(9, &[0, 0, 0, 0, 0, 0, 0, 1, 0xff])),
        (
            "a body that ends too early",
            frame(9, &[0, 0, 0, 0, 0, 0, 0, 1, 1]),
        ),
        ("noise", noise.clone()),
    ];
    // Eight seconds of load outlast the cases. Nobody measured a shorter time.
    let loads = under_load(8, || {
        for (what, bytes) in &cases {
            let answer = requester.send(bytes);
            assert!(
                matches!(
                    &answer,
                    KeyServerReply::Closed(_) | KeyServerReply::Refused(_)
                ),
                "{what}: {answer:?}"
            );
        }
        // Garbage that is not even TLS.
        let to = mesh.address(NEAR);
        let tcp = mesh.world.inside("beta-n2", || {
            let mut stream = std::net::TcpStream::connect((to, PORT))?;
            std::io::Write::write_all(&mut stream, &noise)
        });
        // A reset is as right as an end; the handshakes of others are what counts.
        println!("noise without TLS: {tcp:?}");
    });
    unharmed("garbage", &loads);
    assert_eq!(
        requester.ping(),
        KeyServerReply::Pong,
        "the key server still serves"
    );
}

/// A thief of a node's token and certificate may use the keys of workloads on that node, and
/// nothing else.
#[test]
fn a_stolen_node_certificate_signs_only_for_its_own_pods() {
    // The channel certificate is obtained with the node's token, as a thief could.
    let credential = component(
        "beta-n1",
        "spiffe://components.canal/ns/beta/sa/node.beta-n1",
    );
    let requester = Requester {
        world: &mesh().world,
        host: "beta-n1",
        server: "ks-1",
        credential: Some(&credential),
    };
    let key = |identity: &str| KeyName::Identity(identity.parse().expect("an identity"));
    let own = "spiffe://beta.example/ns/default/sa/client";
    assert!(
        matches!(requester.sign(key(own)), KeyServerReply::Signature(_)),
        "the key of the node's own pod signs: {:?}",
        requester.sign(key(own))
    );
    assert_eq!(
        requester.begin(own.parse().expect("an identity")),
        KeyServerReply::Handshake
    );
    for (what, identity) in [
        (
            "another node's pod",
            "spiffe://beta.example/ns/default/sa/web",
        ),
        (
            "the gateway's",
            "spiffe://beta.example/ns/canal-system/sa/gateway",
        ),
        (
            "another tenant's",
            "spiffe://alpha.example/ns/default/sa/client",
        ),
        (
            "another tenant's gateway",
            "spiffe://alpha.example/ns/canal-system/sa/gateway",
        ),
        (
            "a component's",
            "spiffe://components.canal/ns/canal-system/sa/gateway.gw-1",
        ),
        // An identity that does not exist is refused like one that exists, so that the reply
        // reveals nothing.
        ("nobody's", "spiffe://beta.example/ns/default/sa/nobody"),
    ] {
        for answer in [
            requester.sign(key(identity)),
            requester.chain(key(identity)),
            requester.begin(identity.parse().expect("an identity")),
        ] {
            let refused = matches!(&answer, KeyServerReply::Refused(name) if ["not_entitled", "unknown_tenant"].contains(&name.as_str()));
            assert!(refused, "{what}: {answer:?}");
        }
    }
}

/// A stolen channel certificate ends at once when an operator revokes it; the node that it was
/// stolen from continues with its own.
#[test]
fn a_stolen_channel_certificate_is_revoked_at_once() {
    let (mesh, identity) = (mesh(), "spiffe://components.canal/ns/beta/sa/node.beta-n2");
    let stolen = component("beta-n2", identity);
    let requester = |credential| Requester {
        world: &mesh.world,
        host: "beta-n2",
        server: NEAR,
        credential: Some(credential),
    };
    assert_eq!(requester(&stolen).ping(), KeyServerReply::Pong);
    let status = mesh
        .canal(&[
            "ca",
            "status",
            "--tenant",
            "canal-system",
            "--certificates",
            "-o",
            "json",
        ])
        .json();
    let all = status["domains"][0]["certificates"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    // The stolen certificate is the newest: it was issued at the beginning of this test.
    let newest = all
        .iter()
        .filter(|c| c["identity"] == identity)
        .max_by_key(|c| c["issued"].as_u64())
        .unwrap_or_else(|| panic!("{status}"));
    mesh.canal(&[
        "ca",
        "revoke",
        "--tenant",
        "canal-system",
        "--serial",
        newest["serial"].as_str().expect("a serial"),
    ])
    .expect_success();
    until(deadline(STEP_TIMEOUT), "the thief is refused", || {
        matches!(requester(&stolen).ping(), KeyServerReply::Closed(_))
    });
    // The node has another certificate of the same identity; the revocation names one serial.
    assert!(
        handshake(mesh, "beta").reached(),
        "the node's own certificate still works"
    );
    assert_eq!(
        requester(&component("beta-n2", identity)).ping(),
        KeyServerReply::Pong,
        "another certificate of the same identity still works"
    );
}

/// Without any key server, alpha continues with keys of its data planes and reports it; beta
/// refuses, by name. Both recover without intervention.
#[test]
fn without_any_key_server_policy_decides() {
    let (mesh, pids) = (mesh(), requesters());
    ["ks-1", "ks-2"].into_iter().for_each(kill_and_stop);
    let local = || mesh.counted_at("node", "canal_keys_fallbacks_total", &[]);
    let before = local();
    until(
        deadline(STEP_TIMEOUT),
        "alpha continues with local keys",
        || handshake(mesh, "alpha").reached(),
    );
    assert!(local() > before, "handshakes with local keys are counted");
    let refused = handshake(mesh, "beta");
    assert!(
        matches!(refused, TunnelAttempt::Refused(_)),
        "beta refuses without a key server: {refused:?}"
    );
    let counted = || {
        mesh.counted_at(
            "node",
            "canal_tls_refused_total",
            &["reason=\"no_key_server\""],
        )
    };
    until(
        deadline(STEP_TIMEOUT),
        "beta's refusal is counted by its name",
        || counted() > 0,
    );
    ["ks-1", "ks-2"].into_iter().for_each(start_and_wait);
    until(
        deadline(STEP_TIMEOUT),
        "beta's handshakes succeed again",
        || handshake(mesh, "beta").reached(),
    );
    recovered("all dead", &pids);
}
