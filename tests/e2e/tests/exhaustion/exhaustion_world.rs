//! The world of the exhaustion cases: both tenants have keys in key servers and the test's own CAs.
//! In the gate alpha's shares are small.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use canal_e2e::controller::Caller;
use canal_e2e::credential::{Leaf, PemCredential, TestAuthority};
use canal_e2e::{Mesh, until};
use canal_timing::{deadline, is_timed};
use canal_wire::CONTROLLER_PORT;
use canal_world::topology::{
    TenantKeysTopology, TopologyKeyAlgorithm, TopologyKeyFallback, TopologyKeyLocation,
};
use sha2::{Digest, Sha256};

/// The attacker's pod, its node, and the remote pod that serves it.
pub(super) const ALPHA: &str = "alpha/default/client-0";
pub(super) const ALPHA_NODE: &str = "alpha-n1";
pub(super) const ALPHA_WEB: &str = "10.101.0.10:80";
/// The pod of the victim, tenant beta.
pub(super) const BETA: &str = "beta/default/client-0";
pub(super) const BETA_WEB: &str = "10.101.0.10:80";
/// The identity of beta's node towards Canal's components. Its key is never in a key server.
pub(super) const BETA_NODE: &str = "spiffe://components.canal/ns/beta/sa/node.beta-n1";
/// The gateways' address for pods in az1, the same for every tenant: the VNI determines the tenant.
pub(super) const GATEWAY: &str = "10.102.2.1:15008";
/// Tokens of the tenants' own operators.
pub(super) const ALPHA_OPERATOR: &str = "a-token-of-alphas-operator-0123456789abcdef";
pub(super) const BETA_OPERATOR: &str = "a-token-of-betas-operator-0123456789abcdef";

/// Both tenants are served, and their operators known, within this time. It only has to exceed what
/// a quiet machine needs: in the gate, `deadline` waits a minute or more.
const READY_WITHIN: Duration = Duration::from_secs(20);

/// Maximum memory (RSS) of each kind of process, whatever a tenant does. Unoptimized test builds
/// stay within it too.
const MEMORY_MAX_MIB: [(&str, u64); 5] = [
    ("gateway", 512),
    ("controller", 768),
    ("edge", 256),
    ("node", 320),
    ("keyServer", 256),
];

/// The world, and the largest observed memory of each process.
pub(super) struct ExhaustionWorld {
    pub(super) mesh: Mesh,
    authorities: [TestAuthority; 2],
    peaks: Mutex<BTreeMap<String, (String, u64)>>,
    _files: tempfile::TempDir,
}

impl ExhaustionWorld {
    /// Returns a certificate like that of a tenant's workload.
    pub(super) fn member(&self, tenant: &str, account: &str) -> PemCredential {
        let identity = format!("spiffe://{tenant}.example/ns/default/sa/{account}");
        self.authorities[usize::from(tenant == "beta")].issue(&Leaf::of(&identity))
    }

    /// Returns `ip:port` of the application of a tenant's remote pod `web`, as tunnels name it.
    pub(super) fn web(&self, tenant: &str) -> String {
        format!(
            "{}:8080",
            self.mesh.address(&format!("{tenant}/default/web-0"))
        )
    }

    /// Returns the gateways' address for alpha.
    pub(super) fn gateway(&self) -> SocketAddr {
        GATEWAY.parse().expect("an address")
    }

    /// Returns the controller's address for nodes.
    pub(super) fn controller(&self) -> SocketAddr {
        SocketAddr::from((self.mesh.address("controller"), CONTROLLER_PORT))
    }

    /// Returns alpha's operator, which calls from alpha's node.
    pub(super) fn operator(&self) -> Caller<'_> {
        Caller::with_token(&self.mesh.world, ALPHA_NODE, ALPHA_OPERATOR)
    }

    /// Returns a caller with the provider operator's token.
    pub(super) fn provider(&self) -> Caller<'_> {
        let token = self
            .mesh
            .world
            .operator_token()
            .expect("the provider's token");
        Caller::with_token(&self.mesh.world, "controller", &token)
    }

    /// Reads the memory of every process. Returns the processes that exceed their maximum.
    pub(super) fn memory_complaint(&self) -> Option<String> {
        let mut peaks = self
            .peaks
            .lock()
            .expect("no thread panicked while holding the lock");
        let mut over = None;
        for host in self.mesh.world.hosts().unwrap_or_default() {
            let Some((_, max)) = MEMORY_MAX_MIB
                .iter()
                .find(|(kind, _)| *kind == host.environment.kind)
            else {
                continue;
            };
            let Some(mib) = host.process.pid.and_then(|pid| resident_mib(pid, "VmHWM:")) else {
                continue;
            };
            let peak = peaks
                .entry(host.environment.name.clone())
                .or_insert((host.environment.kind.clone(), 0));
            peak.1 = peak.1.max(mib);
            if mib > *max {
                over = Some(format!(
                    "{} holds {mib} MiB, more than {max}",
                    host.environment.name
                ));
            }
        }
        over
    }

    /// Returns the memory of the controller and of alpha's processes at this time.
    pub(super) fn memory_now(&self) -> String {
        let mut text = String::from("MiB:");
        for name in ["controller", "gw-1", ALPHA_NODE] {
            let pid = self
                .mesh
                .world
                .host(name)
                .ok()
                .and_then(|host| host.process.pid);
            // Writing to a `String` cannot fail.
            let _ = write!(
                text,
                " {name} {}",
                pid.and_then(|pid| resident_mib(pid, "VmRSS:"))
                    .unwrap_or_default()
            );
        }
        text
    }

    /// Returns the largest observed memory, one line per process.
    pub(super) fn memory(&self) -> String {
        let mut text = String::from("most memory held, MiB:");
        for (name, (_, mib)) in self
            .peaks
            .lock()
            .expect("no thread panicked while holding the lock")
            .iter()
        {
            // Writing to a `String` cannot fail.
            let _ = write!(text, " {name} {mib}");
        }
        text
    }
}

/// Returns a process's RSS: `VmRSS:` is the one now, `VmHWM:` the largest ever, which includes
/// peaks between two reads.
pub(super) fn resident_mib(pid: u32, which: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with(which))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? / 1024)
}

fn authorities(dir: &std::path::Path) -> [TestAuthority; 2] {
    ["alpha", "beta"].map(|tenant| {
        let root = TestAuthority::root(tenant);
        let domain = dir.join(format!("{tenant}.example"));
        std::fs::create_dir_all(&domain).expect("a directory");
        for (name, text) in [
            ("root-cert.pem", root.pem()),
            ("cert-chain.pem", root.pem()),
            ("key.pem", root.key_pem()),
        ] {
            std::fs::write(domain.join(name), text).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        root
    })
}

/// Gives each tenant its own operator.
fn admit_operators(mesh: &Mesh) {
    let path = mesh.world.dir().join("principals.yaml");
    let mut list = std::fs::read_to_string(&path)
        .expect("the principals")
        .trim_end()
        .to_owned();
    for (tenant, token) in [("alpha", ALPHA_OPERATOR), ("beta", BETA_OPERATOR)] {
        let digest: String = Sha256::digest(token)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        list.push_str(&format!(
            "\n- {{tokenSha256: {digest}, kind: operator, name: {tenant}-op, tenant: {tenant}}}"
        ));
    }
    std::fs::write(&path, list + "\n").expect("the principals");
}

/// Returns the world, which is brought up once.
pub(super) fn setup() -> &'static ExhaustionWorld {
    static SETUP: OnceLock<ExhaustionWorld> = OnceLock::new();
    SETUP.get_or_init(|| {
        let files = tempfile::tempdir().expect("a directory");
        let authorities = authorities(files.path());
        let mesh = Mesh::up_with("trust.yaml", "e2e-exhaustion", |topology| {
            // Handshakes must need key servers, so that an attack on these would be noticed.
            for tenant in &mut topology.tenants {
                tenant.keys = Some(TenantKeysTopology {
                    location: TopologyKeyLocation::KeyServer,
                    algorithm: TopologyKeyAlgorithm::EcdsaP256,
                    fallback: TopologyKeyFallback::Refuse,
                });
            }
            let controller = topology
                .controller
                .as_mut()
                .and_then(|c| c.process.as_mut())
                .expect("the world has a controller");
            controller
                .args
                .extend(["--ca-dir".into(), files.path().display().to_string()]);
        });
        admit_operators(&mesh);
        let setup = ExhaustionWorld {
            mesh,
            authorities,
            peaks: Mutex::default(),
            _files: files,
        };
        for pod in [ALPHA, BETA] {
            let url = format!("http://{ALPHA_WEB}/blob?size=1");
            until(deadline(READY_WITHIN), "both tenants are served", || {
                setup.mesh.code(pod, &url, &[]) == 200
            });
        }
        until(deadline(READY_WITHIN), "operators are known", || {
            let operator = Caller::with_token(&setup.mesh.world, "beta-n1", BETA_OPERATOR);
            setup.operator().get("alpha").is_ok() && operator.get("beta").is_ok()
        });
        // The timing tier attacks the limits of real tenants.
        if !is_timed() {
            super::limits::restrict_alpha(&setup.mesh);
        }
        setup
    })
}
