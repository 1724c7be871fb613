//! The world of the exhaustion cases: both tenants with keys in key servers and the test's own authorities, limits small enough to be reached.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use canal_e2e::controller::Caller;
use canal_e2e::credential::{Authority, Credential, Leaf};
use canal_e2e::{Mesh, until};
use canal_wire::CONTROLLER_PORT;
use canal_world::topology::{KeyAlgorithm, KeyFallback, KeyPlace, Keys};
use sha2::{Digest, Sha256};

/// The attacker's pod, its node, and the far pod that serves it.
pub(super) const ALPHA: &str = "alpha/default/client-0";
pub(super) const ALPHA_NODE: &str = "alpha-n1";
pub(super) const ALPHA_WEB: &str = "10.101.0.10:80";
/// The victim's pod.
pub(super) const BETA: &str = "beta/default/client-0";
pub(super) const BETA_WEB: &str = "10.101.0.10:80";
/// The identity by which beta's node speaks with the parts of Canal, whose keys are never in a key server.
pub(super) const BETA_NODE: &str = "spiffe://components.canal/ns/beta/sa/node.beta-n1";
/// The gateways' address for pods in az1, which every tenant has: which tenant's it is follows from the VNI.
pub(super) const GATEWAY: &str = "10.102.2.1:15008";
/// Tokens of the tenants' own operators.
pub(super) const ALPHA_OPERATOR: &str = "a-token-of-alphas-operator-0123456789abcdef";
pub(super) const BETA_OPERATOR: &str = "a-token-of-betas-operator-0123456789abcdef";

/// What each kind of process may hold in memory (RSS), whatever a tenant does. Unoptimised test builds are within it too.
const MEMORY_MAX_MIB: [(&str, u64); 5] = [("gateway", 512), ("controller", 768), ("edge", 256), ("node", 256), ("keyServer", 256)];

/// The world, and the largest memory seen of each process.
pub(super) struct Stage {
    pub(super) mesh: Mesh,
    authorities: [Authority; 2],
    peaks: Mutex<BTreeMap<String, (String, u64)>>,
    _files: tempfile::TempDir,
}

impl Stage {
    /// A certificate as a member of a tenant has it.
    pub(super) fn member(&self, tenant: &str, account: &str) -> Credential {
        let identity = format!("spiffe://{tenant}.example/ns/default/sa/{account}");
        self.authorities[usize::from(tenant == "beta")].issue(&Leaf::of(&identity))
    }

    /// `ip:port` of the application of a tenant's far pod `web`, as tunnels name it.
    pub(super) fn web(&self, tenant: &str) -> String {
        format!("{}:8080", self.mesh.address(&format!("{tenant}/default/web-0")))
    }

    /// The gateways as alpha reaches them.
    pub(super) fn gateway(&self) -> SocketAddr {
        GATEWAY.parse().expect("an address")
    }

    /// The controller as nodes reach it.
    pub(super) fn controller(&self) -> SocketAddr {
        SocketAddr::from((self.mesh.address("controller"), CONTROLLER_PORT))
    }

    /// Alpha's operator, who calls from alpha's node.
    pub(super) fn operator(&self) -> Caller<'_> {
        Caller::with_token(&self.mesh.world, ALPHA_NODE, ALPHA_OPERATOR)
    }

    /// Looks at the memory of every process; says which is over its bound.
    pub(super) fn memory_complaint(&self) -> Option<String> {
        let mut peaks = self.peaks.lock().expect("nobody panics in there");
        let mut over = None;
        for host in self.mesh.world.hosts().unwrap_or_default() {
            let Some((_, max)) = MEMORY_MAX_MIB.iter().find(|(kind, _)| *kind == host.seat.kind) else { continue };
            let Some(mib) = host.pulse.pid.and_then(resident_mib) else { continue };
            let peak = peaks.entry(host.seat.name.clone()).or_insert((host.seat.kind.clone(), 0));
            peak.1 = peak.1.max(mib);
            if mib > *max {
                over = Some(format!("{} holds {mib} MiB, more than {max}", host.seat.name));
            }
        }
        over
    }

    /// The largest memory seen, a line for each process.
    pub(super) fn memory(&self) -> String {
        let mut text = String::from("most memory held, MiB:");
        for (name, (_, mib)) in self.peaks.lock().expect("nobody panics in there").iter() {
            // Writing to a String cannot fail.
            let _ = write!(text, " {name} {mib}");
        }
        text
    }
}

/// The most that a process ever held (VmHWM), so that a peak between two looks is seen too.
fn resident_mib(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? / 1024)
}

fn authorities(dir: &std::path::Path) -> [Authority; 2] {
    ["alpha", "beta"].map(|tenant| {
        let root = Authority::root(tenant);
        let domain = dir.join(format!("{tenant}.example"));
        std::fs::create_dir_all(&domain).expect("a directory");
        for (name, text) in [("root-cert.pem", root.pem()), ("cert-chain.pem", root.pem()), ("key.pem", root.key_pem())] {
            std::fs::write(domain.join(name), text).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        root
    })
}

/// Each tenant gets an operator of its own.
fn admit_operators(mesh: &Mesh) {
    let path = mesh.world.dir().join("principals.yaml");
    let mut list = std::fs::read_to_string(&path).expect("the principals").trim_end().to_owned();
    for (tenant, token) in [("alpha", ALPHA_OPERATOR), ("beta", BETA_OPERATOR)] {
        let digest: String = Sha256::digest(token).iter().map(|byte| format!("{byte:02x}")).collect();
        list.push_str(&format!("\n- {{tokenSha256: {digest}, kind: operator, name: {tenant}-op, tenant: {tenant}}}"));
    }
    std::fs::write(&path, list + "\n").expect("the principals");
}

/// The world, brought up once.
pub(super) fn stage() -> &'static Stage {
    static STAGE: OnceLock<Stage> = OnceLock::new();
    STAGE.get_or_init(|| {
        let files = tempfile::tempdir().expect("a directory");
        let authorities = authorities(files.path());
        let mesh = Mesh::up_with("trust.yaml", "e2e-exhaustion", |topology| {
            for tenant in &mut topology.tenants {
                tenant.keys = Some(Keys { place: KeyPlace::KeyServer, algorithm: KeyAlgorithm::EcdsaP256, fallback: KeyFallback::Refuse });
            }
            let controller = topology.controller.as_mut().and_then(|c| c.process.as_mut()).expect("the world has a controller");
            controller.args.extend(["--ca-dir".into(), files.path().display().to_string()]);
        });
        admit_operators(&mesh);
        let stage = Stage { mesh, authorities, peaks: Mutex::default(), _files: files };
        for pod in [ALPHA, BETA] {
            let url = format!("http://{ALPHA_WEB}/blob?size=1");
            until(Duration::from_secs(20), "both tenants are served", || stage.mesh.code(pod, &url, &[]) == 200);
        }
        until(Duration::from_secs(20), "operators are known", || {
            let operator = Caller::with_token(&stage.mesh.world, "beta-n1", BETA_OPERATOR);
            stage.operator().get("alpha").is_ok() && operator.get("beta").is_ok()
        });
        stage
    })
}
