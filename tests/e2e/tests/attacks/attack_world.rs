//! The world of the attacks with its tenants, and the definition of an attack. Alpha's keys are in
//! key servers. Both tenants' CAs are the test's own, so that it has any certificate that an
//! attacker could steal.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use canal_e2e::credential::{Leaf, PemCredential, TestAuthority};
use canal_e2e::hbone::{TunnelAttempt, TunnelRequest, tunnel};
use canal_e2e::{Mesh, until};
use canal_timing::deadline;
use canal_world::topology::{
    TenantKeysTopology, TopologyKeyAlgorithm, TopologyKeyFallback, TopologyKeyLocation, Vswitch,
};
use canal_world::{RefusedPackets, Topology};
use sha2::{Digest, Sha256};

/// The client that is authorized.
pub(crate) const CLIENT: &str = "alpha/default/client-0";
/// A member of the same tenant that is not authorized.
pub(crate) const INTRUDER: &str = "alpha/default/intruder-0";
/// A client of the other tenant.
pub(crate) const BETA: &str = "beta/default/client-0";
/// Address of the gateways for pods in az1, the same for every tenant.
pub(crate) const GATEWAY: &str = "10.102.2.1:15008";
/// Number of frames of an attack by frames. Any number will do that no other refusal reaches by
/// chance, because each frame must be counted.
pub(crate) const FRAMES: u64 = 50;
/// Token of beta's own operator.
pub(crate) const BETA_OPERATOR: &str = "a-token-of-betas-operator-0123456789abcdef";

/// An accepted change is in force everywhere within this time, if ever. It only has to exceed what
/// a quiet machine needs: in the gate, `deadline` waits a minute or more.
const SETTLED_WITHIN: Duration = Duration::from_secs(5);
/// A page is served within this time. It only has to exceed what a quiet machine needs: in the
/// gate, `deadline` waits a minute or more.
const SERVED_WITHIN: Duration = Duration::from_secs(5);
/// Both tenants are served within this time. It only has to exceed what a quiet machine needs: in
/// the gate, `deadline` waits a minute or more.
const READY_WITHIN: Duration = Duration::from_secs(20);

/// Result of a probe, and its output.
pub(crate) struct AttackOutcome {
    /// True if the attack succeeded.
    pub(crate) reached: bool,
    /// Output of the probe, for messages.
    pub(crate) output: String,
}

impl AttackOutcome {
    pub(crate) fn of(reached: bool, output: impl std::fmt::Debug) -> Self {
        Self {
            reached,
            output: format!("{output:?}").chars().take(400).collect(),
        }
    }
}

/// The counter that must count a refusal.
#[derive(Debug)]
pub(crate) enum RefusalCounter {
    /// A metric family and labels, at all hosts of a kind.
    Metric(&'static str, &'static str, Vec<&'static str>),
    /// Packets refused by the underlay's routers and beta's node.
    Packets(fn(&RefusedPackets) -> u64),
}

impl RefusalCounter {
    pub(crate) fn read(&self, setup: &AttackWorld) -> u64 {
        match self {
            Self::Metric(kind, family, labels) => setup.mesh.counted_at(kind, family, labels),
            Self::Packets(field) => ["router-az1", "router-az2", "beta-n1"]
                .iter()
                .filter_map(|host| setup.mesh.world.refused(host).ok())
                .map(|r| field(&r))
                .sum(),
        }
    }

    /// Returns the values of the same counters with other labels: they show where packets or
    /// requests were counted instead.
    pub(crate) fn siblings(&self, setup: &AttackWorld) -> String {
        let Self::Metric(kind, family, _) = self else {
            return String::new();
        };
        let hosts = setup.mesh.world.hosts().unwrap_or_default();
        let of_kind = hosts
            .iter()
            .filter(|host| host.environment.kind == *kind && host.process.pid.is_some())
            .map(|host| &host.environment.name);
        let lines = |name: &String| -> Vec<String> {
            let metrics = setup.mesh.metrics(name);
            metrics
                .lines()
                .filter(|l| l.starts_with(family) && !l.ends_with(" 0"))
                .map(|l| format!("{name}: {l}"))
                .collect()
        };
        of_kind.flat_map(lines).collect::<Vec<_>>().join("\n")
    }
}

type ProbeFn = Box<dyn Fn(&AttackWorld) -> AttackOutcome>;

/// An attack, and the same probe by an authorized client.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    pub(crate) attempt: ProbeFn,
    pub(crate) control: ProbeFn,
    pub(crate) counter: Option<RefusalCounter>,
    /// Minimum number of refusals that must be counted.
    pub(crate) refusals_min: u64,
}

impl Attack {
    pub(crate) fn new(
        name: &'static str,
        attempt: impl Fn(&AttackWorld) -> AttackOutcome + 'static,
        control: impl Fn(&AttackWorld) -> AttackOutcome + 'static,
    ) -> Self {
        Self {
            name,
            attempt: Box::new(attempt),
            control: Box::new(control),
            counter: None,
            refusals_min: 1,
        }
    }

    /// Requires a count for each frame, so that none passed.
    pub(crate) fn each_frame(self) -> Self {
        Self {
            refusals_min: FRAMES,
            ..self
        }
    }

    /// Requires one refusal: the sender gets an error and stops at the first.
    pub(crate) fn once(self) -> Self {
        Self {
            refusals_min: 1,
            ..self
        }
    }

    pub(crate) fn counted(
        mut self,
        kind: &'static str,
        family: &'static str,
        labels: &[&'static str],
    ) -> Self {
        self.counter = Some(RefusalCounter::Metric(kind, family, labels.to_vec()));
        self
    }

    pub(crate) fn dropped(mut self, field: fn(&RefusedPackets) -> u64) -> Self {
        self.counter = Some(RefusalCounter::Packets(field));
        self
    }
}

/// The world, with the CAs of both tenants.
pub(crate) struct AttackWorld {
    pub(crate) mesh: Mesh,
    authorities: [TestAuthority; 2],
    _files: tempfile::TempDir,
}

impl AttackWorld {
    /// Returns a certificate like that of a tenant's workload.
    pub(crate) fn member(&self, tenant: &str, account: &str) -> PemCredential {
        self.issued(
            tenant,
            &format!("spiffe://{tenant}.example/ns/default/sa/{account}"),
        )
    }

    /// Returns a certificate of a tenant's CA for any identity.
    pub(crate) fn issued(&self, tenant: &str, identity: &str) -> PemCredential {
        self.authorities[usize::from(tenant == "beta")].issue(&Leaf::of(identity))
    }

    /// Returns `ip:port` of a pod's application.
    pub(crate) fn pod(&self, pod: &str, port: u16) -> String {
        format!("{}:{port}", self.mesh.address(pod))
    }

    /// Opens a tunnel from a pod's network.
    pub(crate) fn tunnel(
        &self,
        from: &str,
        to: &str,
        credential: &PemCredential,
        authority: &str,
        headers: &[(&str, &str)],
    ) -> AttackOutcome {
        let mut asked = TunnelRequest::new(
            from,
            to.parse().unwrap_or_else(|e| panic!("{to}: {e}")),
            Some(credential),
            authority,
        );
        for (name, value) in headers {
            asked = asked.with(name, value);
        }
        outcome_of(&tunnel(&self.mesh.world, &asked))
    }

    /// Returns a page's head and body as curl in a pod gets them, or curl's error.
    pub(crate) fn page(&self, pod: &str, url: &str, more: &[&str]) -> String {
        let seconds = deadline(SERVED_WITHIN).as_secs().to_string();
        let argv = [
            "curl",
            "-sS",
            "-g",
            "--path-as-is",
            "--max-time",
            &seconds,
            "-D",
            "-",
            url,
        ];
        let output = self.mesh.run(
            pod,
            &argv
                .into_iter()
                .chain(more.iter().copied())
                .collect::<Vec<_>>(),
        );
        if output.stdout.is_empty() {
            output.stderr
        } else {
            output.stdout
        }
    }

    /// Tests whether alpha's application served a page.
    pub(crate) fn by_alpha(&self, pod: &str, url: &str, more: &[&str]) -> AttackOutcome {
        let page = self.page(pod, url, more);
        AttackOutcome::of(page.contains("blob-alpha"), page)
    }

    /// Waits until every data plane uses a generation. If this never happens, the attack continues
    /// all the same.
    pub(crate) fn settle(&self, generation: u64) {
        let started = Instant::now();
        let is_there = || {
            let status = self.mesh.canal(&["status", "-o", "json"]).json();
            status["generation"].as_u64() >= Some(generation) && self.mesh.is_converged()
        };
        while started.elapsed() < deadline(SETTLED_WITHIN) && !is_there() {
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Tests whether a page was served at all.
    pub(crate) fn served(&self, pod: &str, url: &str, more: &[&str]) -> AttackOutcome {
        let page = self.page(pod, url, more);
        AttackOutcome::of(
            page.starts_with("HTTP/1.1 200") || page.starts_with("HTTP/2 200"),
            page,
        )
    }
}

/// Polls until the probe succeeds or the time is over.
pub(crate) fn poll(within: Duration, sight: impl Fn() -> AttackOutcome) -> AttackOutcome {
    let started = Instant::now();
    loop {
        let seen = sight();
        if seen.reached || started.elapsed() > within {
            return seen;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

pub(crate) fn outcome_of(opened: &TunnelAttempt) -> AttackOutcome {
    AttackOutcome::of(opened.reached(), opened)
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

/// Objects that alpha has and beta has not, and alpha's policies.
const ALPHA: &str = r#"---
apiVersion: v1
kind: Service
metadata: {name: secret, namespace: default}
spec:
  clusterIP: 10.101.0.90
  clusterIPs: [10.101.0.90, "fd00:101::90"]
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: 8080}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: clients, namespace: default}
spec:
  selector: {matchLabels: {app: web-l7}}
  action: ALLOW
  rules:
  - from: [{source: {principals: [alpha.example/ns/default/sa/client]}}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: private-path, namespace: default}
spec:
  selector: {matchLabels: {app: web-raw}}
  action: DENY
  rules:
  - from: [{source: {notPrincipals: [alpha.example/ns/default/sa/client]}}]
    to: [{operation: {paths: [/headers, /headers/*]}}, {operation: {methods: [DELETE, POST, PUT]}}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: near, namespace: default}
spec:
  selector: {matchLabels: {app: web-open}}
  action: ALLOW
  rules:
  - from: [{source: {remoteIpBlocks: [CLIENT_IP]}}]
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: near-peer, namespace: default}
spec:
  selector: {matchLabels: {app: web-dry}}
  action: ALLOW
  rules:
  - from: [{source: {ipBlocks: [CLIENT_IP]}}]
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: strict, namespace: default}
spec: {selector: {matchLabels: {app: web-strict}}, mtls: {mode: STRICT}}
---
apiVersion: security.istio.io/v1
kind: RequestAuthentication
metadata: {name: jwt, namespace: default}
spec:
  selector: {matchLabels: {app: web-jwt}}
  jwtRules:
  - {issuer: "https://issuer.example", audiences: [shop], jwksUri: "http://issuer:8090/jwks", outputPayloadToHeader: x-payload}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: jwt, namespace: default}
spec:
  selector: {matchLabels: {app: web-jwt}}
  action: ALLOW
  rules:
  - from: [{source: {requestPrincipals: ["https://issuer.example/*"]}}]
"#;

/// Returns the world, which is brought up once.
pub(crate) fn setup() -> &'static AttackWorld {
    static SETUP: OnceLock<AttackWorld> = OnceLock::new();
    SETUP.get_or_init(|| set("e2e-attacks", |_| ()))
}

/// Returns the world with a virtual switch that passes everything. Only the provider's own hosts
/// reach the provider's pages, as operators without a network of their own configure it.
pub(crate) fn open_setup() -> &'static AttackWorld {
    static SETUP: OnceLock<AttackWorld> = OnceLock::new();
    SETUP.get_or_init(|| {
        set("e2e-open", |topology| {
            topology.vswitch = Vswitch::Open;
            let own = topology
                .gateways
                .iter_mut()
                .chain(&mut topology.key_servers)
                .chain(&mut topology.edges);
            for process in own.filter_map(|component| component.process.as_mut()) {
                process
                    .args
                    .extend(["--metrics-addr".into(), "127.0.0.1:15020".into()]);
            }
        })
    })
}

fn set(name: &str, change: impl FnOnce(&mut Topology)) -> AttackWorld {
    let files = tempfile::tempdir().expect("a directory");
    let authorities = authorities(files.path());
    let mesh = Mesh::up_with("trust.yaml", name, |topology| {
        let keys = TenantKeysTopology {
            location: TopologyKeyLocation::KeyServer,
            algorithm: TopologyKeyAlgorithm::EcdsaP256,
            fallback: TopologyKeyFallback::Refuse,
        };
        topology.tenants[0].keys = Some(keys);
        let controller = topology
            .controller
            .as_mut()
            .and_then(|c| c.process.as_mut())
            .expect("the world has a controller");
        controller
            .args
            .extend(["--ca-dir".into(), files.path().display().to_string()]);
        change(topology);
    });
    admit_operator(&mesh);
    let client = mesh.address(CLIENT).to_string();
    mesh.apply("alpha", &ALPHA.replace("CLIENT_IP", &client));
    let setup = AttackWorld {
        mesh,
        authorities,
        _files: files,
    };
    until(deadline(READY_WITHIN), "alpha is served", || {
        setup
            .by_alpha(CLIENT, "http://10.101.0.90/headers", &[])
            .reached
    });
    until(deadline(READY_WITHIN), "beta is served", || {
        setup
            .served(BETA, "http://10.101.0.10/headers", &[])
            .reached
    });
    setup
}

/// Gives beta an operator of its own.
fn admit_operator(mesh: &Mesh) {
    let path = mesh.world.dir().join("principals.yaml");
    let list = std::fs::read_to_string(&path).expect("the principals");
    let digest: String = Sha256::digest(BETA_OPERATOR)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let more = format!(
        "{}\n- {{tokenSha256: {digest}, kind: operator, name: beta-op, tenant: beta}}\n",
        list.trim_end()
    );
    std::fs::write(&path, more).expect("the principals");
}
