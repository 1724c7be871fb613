//! Tenants without node proxies connect by TLS that the gateway terminates: with a certificate of
//! the mesh, or with their own, whose key stays in the tenant's own key server, which may refuse at
//! any time. No gateway ever has either key. Interfaces on the host distinguish their containers.

use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::credential::{Leaf, PemCredential, TestAuthority};
use canal_e2e::memory::{self, Publics};
use canal_e2e::{Mesh, until};
use canal_timing::deadline;
use canal_world::topology::{
    TenantKeysTopology, TopologyKeyAlgorithm, TopologyKeyFallback, TopologyKeyLocation,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use serde_json::Value;

/// A pod on a node that runs no part of the mesh, and another tenant's.
const BARE: &str = "alpha/default/bare-0";
const BETA_BARE: &str = "beta/default/bare-0";
/// Maximum time of a step on a quiet machine: a change is in force, or a process serves. It only
/// has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(15);
const SHOP: &str = "shop.example.com";

/// The CAs of alpha's identities and of its shop's public certificate.
struct ProxylessCase {
    mesh: Mesh,
    dir: tempfile::TempDir,
    alpha: TestAuthority,
    shop: PemCredential,
}

const TERMINATIONS: &str = "---\napiVersion: canal.mesh/v1\nkind: Termination\nmetadata: {name: web, namespace: default}\n\
    spec: {targetRef: {kind: Service, name: web}, port: 443, certificate: {mesh: {}}}\n\
    ---\napiVersion: canal.mesh/v1\nkind: Termination\nmetadata: {name: web-open, namespace: default}\n\
    spec: {targetRef: {kind: Service, name: web-open}, port: 443, certificate: {keyServer: alpha-ks}}\n\
    ---\napiVersion: canal.mesh/v1\nkind: Termination\nmetadata: {name: web-strict, namespace: default}\n\
    spec: {targetRef: {kind: Service, name: web-strict}, port: 443, certificate: {mesh: {}}, clientCertificates: Required, required: true}\n";

fn setup() -> &'static ProxylessCase {
    static SETUP: OnceLock<ProxylessCase> = OnceLock::new();
    SETUP.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            std::fs::write(&path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        };
        let (alpha, public) = (
            TestAuthority::root("alpha"),
            TestAuthority::root("the world's"),
        );
        // The test has the CA's key, so that it can issue certificates for clients.
        for (name, text) in [
            ("root-cert.pem", alpha.pem()),
            ("cert-chain.pem", alpha.pem()),
            ("key.pem", alpha.key_pem()),
        ] {
            write(&format!("ca/alpha.example/{name}"), &text);
        }
        write("alpha.pem", &alpha.pem());
        write("public.pem", &public.pem());
        let shop = public.issue(&Leaf::named(SHOP));
        write("tls/default.web-open.crt", &shop.chain);
        write("tls/default.web-open.key", &shop.key);
        write("tls/allow.yaml", ALLOWED);
        // Alpha's keys are only in key servers, and no local key takes their place.
        let mesh = Mesh::up_with("trust.yaml", "e2e-bare", |topology| {
            let keys = TenantKeysTopology {
                location: TopologyKeyLocation::KeyServer,
                algorithm: TopologyKeyAlgorithm::EcdsaP256,
                fallback: TopologyKeyFallback::Refuse,
            };
            topology.tenants[0].keys = Some(keys);
            topology
                .key_servers
                .iter_mut()
                .filter(|server| server.tenant.is_some())
                .for_each(|server| {
                    server.tls_dir = Some(dir.path().join("tls"));
                });
            let controller = topology
                .controller
                .as_mut()
                .and_then(|c| c.process.as_mut())
                .expect("the world has a controller");
            controller.args.extend([
                "--ca-dir".into(),
                dir.path().join("ca").display().to_string(),
            ]);
        });
        mesh.apply("alpha", TERMINATIONS);
        ProxylessCase {
            mesh,
            dir,
            alpha,
            shop,
        }
    })
}

/// The allow list with the shop's service, and one that has no key although the list allows it.
const ALLOWED: &str = "allow: {default/web-open: [gateway/*], other/web-open: [gateway/*]}\n";

/// Requests a page over TLS; `more` are the client's own arguments.
fn page(pod: &str, service: &str, name: &str, roots: &str, more: &[&str]) -> Value {
    let setup = setup();
    let service = if service.contains('.') {
        service.to_owned()
    } else {
        format!("{service}.default")
    };
    let address = format!("{service}.svc.cluster.local:443");
    let roots = setup.dir.path().join(roots).display().to_string();
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
    setup
        .mesh
        .run(
            pod,
            &argv
                .into_iter()
                .chain(more.iter().copied())
                .collect::<Vec<_>>(),
        )
        .json()
}

#[test]
fn a_certificate_of_the_mesh_ends_tls_at_the_gateway() {
    let name = "web.default.svc.cluster.local";
    until(deadline(STEP_TIMEOUT), "TLS ends at the gateway", || {
        page(BARE, "web", name, "alpha.pem", &[])["ok"] == true
    });
    let report = page(BARE, "web", name, "alpha.pem", &["-n", "20"]);
    assert!(
        report["ok"] == true && report["version"] == "TLSv1_3",
        "{report}"
    );
    assert!(
        report["body"]
            .as_str()
            .is_some_and(|body| body.contains("/headers")),
        "the application answered: {report}"
    );
    let names = report["chain"][0]["names"].to_string();
    assert!(
        names.contains(&format!("DNS:{name}"))
            && names.contains("spiffe://alpha.example/ns/canal-system/sa/gateway"),
        "{report}"
    );
    assert_eq!(
        page(BARE, "web", name, "public.pem", &[])["ok"],
        false,
        "no other root signed it"
    );
    assert_eq!(
        page(
            BARE,
            "web",
            "other.default.svc.cluster.local",
            "alpha.pem",
            &[]
        )["ok"],
        false,
        "the certificate has no other name"
    );
}

/// The shop's key is the tenant's. Its key server signs exactly while its list allows it.
#[test]
fn the_tenants_own_key_stays_in_its_key_server_which_may_refuse() {
    let setup = setup();
    until(deadline(STEP_TIMEOUT), "the shop is served", || {
        page(BARE, "web-open", SHOP, "public.pem", &[])["ok"] == true
    });
    // The key is used repeatedly before gateways are searched for it.
    let report = page(BARE, "web-open", SHOP, "public.pem", &["-n", "20"]);
    assert_eq!(report["ok"], true, "{report}");
    let leaf = CertificateDer::from_pem_slice(setup.shop.chain.as_bytes()).expect("a certificate");
    let publics = Publics::from([(memory::point(&leaf), "the shop".to_owned())]);
    for gateway in ["gw-1", "gw-2", "gw-3"] {
        let pid = setup
            .mesh
            .world
            .host(gateway)
            .unwrap()
            .pid()
            .expect("it runs");
        let files = memory::in_files(&setup.mesh.world.dir().join("data").join(gateway), &publics);
        let found: Vec<_> = memory::in_process(pid, &publics)
            .into_iter()
            .chain(files)
            .collect();
        assert!(found.is_empty(), "{gateway}: {found:?}");
    }
    // Without this, a search that finds nothing would also leave the gateways clean.
    let stored = memory::in_files(&setup.mesh.world.dir().join("data/alpha-ks/tls"), &publics);
    assert!(
        !stored.is_empty(),
        "the search finds the key in its key server's files"
    );
    let list = setup.mesh.world.dir().join("data/alpha-ks/tls/allow.yaml");
    std::fs::write(&list, "allow: {}\n").expect("the list");
    // The key server reads the list for each signature, so the result changes with the next
    // handshake.
    assert_eq!(
        page(BARE, "web-open", SHOP, "public.pem", &[])["ok"],
        false,
        "the next signature is refused"
    );
    assert_eq!(
        page(
            BARE,
            "web",
            "web.default.svc.cluster.local",
            "alpha.pem",
            &[]
        )["ok"],
        true,
        "other keys still sign"
    );
    std::fs::write(&list, ALLOWED).expect("the list");
    assert_eq!(
        page(BARE, "web-open", SHOP, "public.pem", &[])["ok"],
        true,
        "the next signature is granted again"
    );
    // Nothing falls back to another key, since the shop's key is nowhere else.
    setup.mesh.world.stop("alpha-ks").unwrap();
    assert_eq!(
        page(BARE, "web-open", SHOP, "public.pem", &[])["ok"],
        false,
        "without the key server there is no signature"
    );
    setup.mesh.world.start("alpha-ks").unwrap();
    until(deadline(STEP_TIMEOUT), "the shop is served again", || {
        page(BARE, "web-open", SHOP, "public.pem", &[])["ok"] == true
    });
}

/// Where clients must present a certificate, only members are admitted; without TLS no connection
/// is.
#[test]
fn clients_may_have_to_prove_themselves() {
    let setup = setup();
    let member = setup
        .alpha
        .issue(&Leaf::of("spiffe://alpha.example/ns/default/sa/bare"));
    // The name is right, but the issuer is not the tenant's CA.
    let foreign =
        TestAuthority::root("nobody").issue(&Leaf::of("spiffe://alpha.example/ns/default/sa/bare"));
    let file = |name: &str, text: &str| {
        let path = setup.dir.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    };
    let own = [
        file("member.crt", &member.chain),
        file("member.key", &member.key),
    ];
    let theirs = [
        file("foreign.crt", &foreign.chain),
        file("foreign.key", &foreign.key),
    ];
    let ask = |with: Option<&[String; 2]>| {
        let words = with.map(|[cert, key]| ["--cert", cert, "--key", key]);
        page(
            BARE,
            "web-strict",
            "web-strict.default.svc.cluster.local",
            "alpha.pem",
            // A client without a certificate has no such options.
            words.as_ref().map_or(&[][..], |words| &words[..]),
        )
    };
    until(deadline(STEP_TIMEOUT), "a member is admitted", || {
        ask(Some(&own))["ok"] == true
    });
    assert_eq!(
        ask(Some(&theirs))["ok"],
        false,
        "a client with the right name of another CA is refused"
    );
    assert_eq!(
        ask(None)["ok"],
        false,
        "a client without a certificate is refused"
    );
    // Plaintext to the TLS port must not reach the application either.
    assert_ne!(
        setup.mesh.code(
            BARE,
            "http://web-strict.default.svc.cluster.local:443/headers",
            &[]
        ),
        200,
        "plaintext is refused"
    );
}

/// A tenant's user that may create a service with the shop's name in another namespace cannot act
/// as the shop.
#[test]
fn a_key_is_of_one_namespace() {
    const OTHER: &str = "---\napiVersion: v1\nkind: Service\nmetadata: {name: web-open, namespace: other}\n\
        spec: {clusterIP: 10.101.0.99, clusterIPs: [10.101.0.99], selector: {app: web-open}, ports: [{name: https, port: 443, targetPort: 8080, appProtocol: http}]}\n\
        ---\napiVersion: canal.mesh/v1\nkind: Termination\nmetadata: {name: web-open, namespace: other}\n\
        spec: {targetRef: {kind: Service, name: web-open}, port: 443, certificate: {keyServer: alpha-ks}}\n";
    let refused = || {
        setup().mesh.counted(
            "alpha-ks",
            "canal_key_refusals_total",
            &["name=\"unknown_key\""],
        )
    };
    let before = refused();
    setup().mesh.apply("alpha", OTHER);
    until(
        deadline(STEP_TIMEOUT),
        "the service's key is requested and does not exist",
        || {
            let report = page(BARE, "web-open.other", SHOP, "public.pem", &[]);
            assert!(
                report["ok"] == false && report["chain"].is_null(),
                "another namespace speaks with the shop's key: {report}"
            );
            refused() > before
        },
    );
    assert_eq!(
        page(BARE, "web-open", SHOP, "public.pem", &[])["ok"],
        true,
        "the shop does"
    );
}

/// A tenant that names another tenant's key server gets nothing from it.
#[test]
fn no_tenant_borrows_anothers_key_server() {
    let setup = setup();
    let address = setup.mesh.address("alpha-ks");
    let borrowed = format!(
        "---\napiVersion: canal.mesh/v1\nkind: KeyServer\nmetadata: {{name: alpha-ks, namespace: default}}\nspec: {{addresses: [\"{address}:15013\"]}}\n\
         ---\napiVersion: canal.mesh/v1\nkind: Termination\nmetadata: {{name: web-open, namespace: default}}\n\
         spec: {{targetRef: {{kind: Service, name: web-open}}, port: 443, certificate: {{keyServer: alpha-ks}}}}\n"
    );
    setup.mesh.apply("beta", &borrowed);
    std::thread::sleep(Duration::from_secs(2));
    for _ in 0..5 {
        let report = page(BETA_BARE, "web-open", SHOP, "public.pem", &[]);
        assert!(
            report["ok"] == false && report["chain"].is_null(),
            "beta speaks with alpha's key: {report}"
        );
    }
    until(deadline(STEP_TIMEOUT), "alpha does", || {
        page(BARE, "web-open", SHOP, "public.pem", &[])["ok"] == true
    });
}

/// An edge's agent on the host of the bare containers, for their interfaces only: nothing of the
/// tier arrives on the device that it has here.
struct GuardOfInterfaces {
    words: Vec<String>,
    running: Option<std::process::Child>,
}

impl GuardOfInterfaces {
    const HOST: &str = "alpha-n3";

    fn start(mesh: &Mesh, bindings: &Value) -> Self {
        let dir = mesh
            .world
            .data(Self::HOST)
            .expect("the node's data")
            .join("guard");
        std::fs::create_dir_all(&dir).expect("a directory");
        let file = |name: &str, text: &str| {
            let path = dir.join(name);
            std::fs::write(&path, text).expect("written");
            path.display().to_string()
        };
        for words in [
            "link add guard0 type veth peer name guard1",
            // 1600 bytes is the MTU of the world's underlay links.
            "link set guard0 mtu 1600 up",
        ] {
            let argv: Vec<&str> = std::iter::once("ip").chain(words.split(' ')).collect();
            mesh.run(Self::HOST, &argv).expect_success();
        }
        // Pins are on a filesystem that disappears with the world.
        let pins = mesh
            .world
            .data("edge-1")
            .expect("the edge's data")
            .join("bpffs/guarded");
        let words = [
            ("--edge", "edge-n3".into()),
            ("--az", "az1".into()),
            ("--address", mesh.address(Self::HOST).to_string()),
            ("--device", "guard0".into()),
            ("--pin-dir", pins.display().to_string()),
            (
                "--controller",
                format!(
                    "https://{}:{}",
                    mesh.address("controller"),
                    canal_wire::CONTROLLER_PORT
                ),
            ),
            ("--root-ca", mesh.world.root_ca().display().to_string()),
            (
                "--token-file",
                // The agent guards interfaces by its bindings alone, so the controller need not
                // know its token.
                file("token", "a-token-that-nobody-has-0123456789abcdef"),
            ),
            ("--data-dir", dir.display().to_string()),
            (
                "--interface-bindings",
                file("bindings.json", &bindings.to_string()),
            ),
        ];
        let words: Vec<String> = words
            .into_iter()
            .flat_map(|(name, value)| [name.to_owned(), value])
            .collect();
        let argv: Vec<&str> = std::iter::once("canal-edge")
            .chain(words.iter().map(String::as_str))
            .collect();
        let running = mesh.spawn(Self::HOST, &argv);
        Self {
            words,
            running: Some(running),
        }
    }

    /// Ends the agent and removes the guards.
    fn end(mut self, mesh: &Mesh) {
        let argv: Vec<&str> = ["canal-edge", "--detach"]
            .into_iter()
            .chain(self.words.iter().map(String::as_str))
            .collect();
        if let Some(mut running) = self.running.take() {
            running.kill().expect("it runs");
            running.wait().expect("it ends");
        }
        mesh.run(Self::HOST, &argv).expect_success();
        mesh.run(Self::HOST, &["ip", "link", "del", "guard0"])
            .expect_success();
    }
}

/// Adds a second container to alpha's host, like the first one, and returns its name.
fn add_other_container(mesh: &Mesh) -> String {
    let topology =
        canal_world::Topology::load(canal_e2e::root().join("tests/e2e/worlds/trust.yaml")).unwrap();
    let mut pod = topology.tenants[0]
        .pods
        .iter()
        .find(|pod| pod.name == "bare")
        .expect("a bare pod")
        .clone();
    pod.name = "other".into();
    mesh.world.add_pod("alpha", &pod).unwrap().remove(0)
}

/// Returns a container's interface on the host, and its entry in the guard's configuration.
fn container(mesh: &Mesh, pod: &str) -> (String, serde_json::Value) {
    let environment = mesh.world.host(pod).unwrap().environment;
    let (ip4, ip6) = (
        environment.ip4.expect("an address"),
        environment.ip6.expect("an address"),
    );
    let link = mesh
        .run(pod, &["ip", "-o", "link", "show", "eth0"])
        .expect_success();
    let mac = link
        .split_once("link/ether ")
        .and_then(|(_, mac)| mac.split(' ').next())
        .unwrap_or_else(|| panic!("{link}"))
        .to_owned();
    // The name of the host's side contains the container's number on it, the last part of its
    // address.
    let interface = format!("p{}", ip4.octets()[3]);
    (
        interface.clone(),
        serde_json::json!({"interface": interface, "tenant": "alpha", "vni": 101, "mac": mac, "addresses": [ip4, ip6]}),
    )
}

/// Returns the metrics of the interface guard.
fn guard_metrics(mesh: &Mesh) -> String {
    let output = mesh
        .run(
            GuardOfInterfaces::HOST,
            &["curl", "-sS", "http://127.0.0.1:15020/metrics"],
        )
        .stdout;
    output
        .lines()
        .filter(|line| line.starts_with("canal_interface_guard"))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Sends frames by the addresses of the first container from the other one, as many for each
/// family.
fn send_with_foreign_addresses(mesh: &Mesh, other: &str, frames: u64) {
    let peer = canal_e2e::bin("canal-world-peer").display().to_string();
    let victim = mesh.world.host(BARE).unwrap().environment;
    let gateway = |name: &str, is_v6: bool| {
        mesh.resolve(BARE, name)
            .into_iter()
            .find(|ip| ip.is_ipv6() == is_v6)
            .expect("an address")
    };
    for (address, is_v6) in [
        (victim.ip4.map(std::net::IpAddr::from), false),
        (victim.ip6.map(std::net::IpAddr::from), true),
    ] {
        let to = gateway("web.default.svc.cluster.local", is_v6);
        let (from, to) = (
            std::net::SocketAddr::from((address.expect("an address"), 999)),
            std::net::SocketAddr::from((to, 80)),
        );
        mesh.run(
            other,
            &[
                &peer,
                "spoof",
                &format!("from={from}"),
                &format!("to={to}"),
                &format!("count={frames}"),
            ],
        )
        .expect_success();
    }
}

/// Two containers of one tenant on one host: each sends from its own address. A container that uses
/// the other's address is refused at its interface and counted, and the other is served all the
/// while.
#[test]
fn a_containers_interface_determines_its_address() {
    // Any number will do, because each frame must be counted.
    const FRAMES: u64 = 50;
    let mesh = &setup().mesh;
    let other = add_other_container(mesh);
    let ((own, first), (theirs, second)) = (container(mesh, BARE), container(mesh, &other));
    let url = "http://web.default.svc.cluster.local/headers";
    for pod in [BARE, &other] {
        until(
            deadline(STEP_TIMEOUT),
            &format!("{pod} is served before there is a guard"),
            || mesh.code(pod, url, &[]) == 200,
        );
    }
    let guard = GuardOfInterfaces::start(mesh, &serde_json::json!({"containers": [first, second]}));
    let guarded = || {
        guard_metrics(mesh).lines().any(|line| {
            line.contains("_interfaces{") && line.contains("guarded") && line.ends_with(" 2")
        })
    };
    until(
        deadline(STEP_TIMEOUT),
        "both interfaces are guarded",
        guarded,
    );
    let refused = |interface: &str| {
        let labels = [&*format!("interface=\"{interface}\""), "tenant=\"alpha\""];
        mesh.counted(
            GuardOfInterfaces::HOST,
            "canal_interface_guard_refused_total",
            &labels,
        )
    };
    for pod in [BARE, &other] {
        until(
            deadline(STEP_TIMEOUT),
            &format!("{pod} uses its own address and is served"),
            || mesh.code(pod, url, &[]) == 200,
        );
    }
    let before = (refused(&own), refused(&theirs));
    // The load lasts until it is stopped. Its timeout is long, so that only a lost request fails.
    let argv = format!("canal-samples load {url} -r 50 -c 4 -d 600 --timeout-ms 120000");
    let argv: Vec<&str> = argv.split(' ').collect();
    let served = mesh.spawn(BARE, &argv);
    send_with_foreign_addresses(mesh, &other, FRAMES);
    let took = until(
        deadline(STEP_TIMEOUT),
        "each frame is counted at its incoming interface",
        // Each family gets `FRAMES` frames.
        || refused(&theirs) - before.1 >= 2 * FRAMES,
    );
    let report = mesh
        .stop("the container whose address was used", served)
        .json();
    println!(
        "{} frames by {BARE}'s addresses from {other}: {} refused within {took:?}; {} of {BARE}'s own {} requests failed",
        2 * FRAMES,
        refused(&theirs) - before.1,
        report["failed"],
        report["requests"]
    );
    assert_eq!(
        (report["failed"].as_u64(), refused(&own)),
        (Some(0), before.0),
        "the container with its own address is served: {report}"
    );
    assert_eq!(
        mesh.code(&other, url, &[]),
        200,
        "with its own address the other is served too"
    );
    guard.end(mesh);
    mesh.world.remove_pod(&other).unwrap();
}
