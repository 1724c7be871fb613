//! An external CA: CFSSL signs certificates for the controller, which is the registration
//! authority. While it is unavailable no open connection ends. The controller never requests a
//! certificate that CFSSL may not sign.

use std::path::Path;
use std::time::Duration;

use canal_e2e::credential::TestAuthority;
use canal_e2e::{Mesh, until};
use canal_timing::{assert_losses, deadline, is_timed, slack};
use canal_world::{Signal, Topology};
use serde_json::json;

const CLIENT: &str = "alpha/default/client-0";
/// Maximum time of a step on a quiet machine: a change is in force, or a process serves. It only
/// has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(20);
/// The controller has given up its attempts at a CA that is gone within this time.
/// Its attempts take 9.6 s at most (`ATTEMPT` of canal-trust); this is four times that.
const REFUSED_WITHIN: Duration = Duration::from_secs(40);
/// Seconds for which certificates are valid in the timing tier, which waits for renewals. The
/// shortest life that the controller issues, so that renewals come after 30 s.
const LIFE_SECONDS: u32 = 60;
/// Key of cfssl's configuration and of the controller's `auth-key`.
const AUTH_KEY: &str = "00112233445566778899aabbccddeeff";

/// Writes the files of cfssl, and the controller's settings for it.
fn write(dir: &Path, root: &TestAuthority) {
    let write = |path: &str, text: &str| {
        let path = dir.join(path);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        std::fs::write(&path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    };
    let profile = json!({
        "usages": ["digital signature", "server auth", "client auth"], "expiry": "1h", "auth_key": "canal",
        // The SPIFFE ID is a URI among the subject alternative names.
        "allowed_extensions": ["2.5.29.17"],
    });
    let config = json!({
        "signing": {"default": profile, "profiles": {"mesh": profile}},
        "auth_keys": {"canal": {"type": "standard", "key": AUTH_KEY}},
    });
    write("cfssl/config.json", &config.to_string());
    write("cfssl/ca.pem", &root.pem());
    write("cfssl/ca-key.pem", &root.key_pem());
    write("ca/alpha.example/root-cert.pem", &root.pem());
    write("ca/alpha.example/auth-key", AUTH_KEY);
    write("ca/alpha.example/profile", "mesh");
}

fn with_cfssl(topology: &mut Topology, dir: &Path) {
    let controller = topology
        .controller
        .as_mut()
        .and_then(|c| c.process.as_mut())
        .expect("the world has a controller");
    let ca = dir.join("ca").display().to_string();
    let life = format!("{}s", LIFE_SECONDS * slack());
    let args = [
        "--svid-ttl",
        &life,
        "--ca-dir",
        &ca,
        "--external-ca",
        "alpha.example=http://cfssl:8888",
    ];
    controller.args.extend(args.map(str::to_owned));
    let mut cfssl = topology.hosts[0].clone();
    cfssl.name = "cfssl".into();
    let process = cfssl.process.as_mut().expect("the host runs something");
    let at = |file: &str| dir.join("cfssl").join(file).display().to_string();
    let (ca, key, config) = (at("ca.pem"), at("ca-key.pem"), at("config.json"));
    let command = [
        "cfssl", "serve", "-address", "0.0.0.0", "-port", "8888", "-ca", &ca, "-ca-key", &key,
        "-config", &config,
    ];
    process.command = command.map(str::to_owned).into();
    process.readiness = Some(canal_world::topology::Readiness {
        check: canal_world::topology::Check::Tcp { port: 8888 },
        period_ms: 200,
    });
    topology.hosts.push(cfssl);
}

/// CFSSL hangs, then returns: open connections continue, and certificates are renewed in time.
fn hang(mesh: &Mesh) {
    let load = mesh.spawn(
        CLIENT,
        &[
            "canal-samples",
            "load",
            "http://10.101.0.10/blob?size=100",
            "-r",
            "50",
            "-c",
            "4",
            "-d",
            "50",
        ],
    );
    mesh.world.kill("cfssl", Signal::Stop).unwrap();
    std::thread::sleep(Duration::from_secs(20));
    mesh.world.kill("cfssl", Signal::Cont).unwrap();
    let report = mesh.end("load while the authority hangs", load).json();
    println!("load while the authority hangs: {report}");
    assert_losses(
        "requests lost while the authority hangs",
        report["failed"].as_u64().unwrap_or(u64::MAX),
        0,
    );
}

#[test]
fn another_process_signs() {
    let (dir, root) = (
        tempfile::tempdir().expect("a directory"),
        TestAuthority::root("the company's root"),
    );
    write(dir.path(), &root);
    let mesh = Mesh::up_with("trust.yaml", "e2e-cfssl", |topology| {
        with_cfssl(topology, dir.path())
    });
    until(
        deadline(STEP_TIMEOUT),
        "the mesh works with certificates of cfssl's",
        || mesh.code(CLIENT, "http://10.101.0.10/headers", &[]) == 200,
    );
    let status = mesh
        .canal(&["ca", "status", "--tenant", "alpha", "-o", "json"])
        .json();
    // Certificates work in both cases, so the source and cfssl's own log show who signed.
    assert_eq!(status["domains"][0]["source"], "external", "{status}");
    let log = std::fs::read_to_string(mesh.world.log("cfssl").unwrap()).unwrap();
    assert!(log.contains("signed certificate"), "{log}");
    // Whether certificates are renewed in time after a hang is a matter of time.
    if is_timed() {
        hang(&mesh);
    }
    mesh.world.stop("cfssl").unwrap();
    // A new pod needs a certificate now.
    let topology = Topology::load(canal_e2e::root().join("tests/e2e/worlds/trust.yaml"))
        .expect("the topology");
    let mut guest = topology.tenants[0]
        .pods
        .iter()
        .find(|pod| pod.name == "client")
        .expect("alpha has a client")
        .clone();
    // A service account of its own, because an identity that exists has a certificate already.
    (guest.name, guest.service_account) = ("guest".into(), "guest".into());
    mesh.world.add_pod("alpha", &guest).unwrap();
    let refused = || {
        mesh.counted(
            "controller",
            "canal_controller_certificates_refused_total",
            &["reason=\"external_"],
        )
    };
    until(
        deadline(REFUSED_WITHIN),
        "without cfssl the controller reports an error",
        || refused() > 0,
    );
    mesh.world.start("cfssl").unwrap();
    let guest = "alpha/default/guest-0";
    until(
        deadline(REFUSED_WITHIN),
        "cfssl signs for the guest once it runs again",
        || mesh.code(guest, "http://10.101.0.10/headers", &[]) == 200,
    );
    assert_eq!(
        mesh.code(CLIENT, "http://10.101.0.10/headers", &[]),
        200,
        "a client that had a certificate is still served"
    );
}
