//! The world of the attacks, who is in it, and what an attack is. Alpha's keys are in key servers; both tenants' authorities are the test's
//! own, so that it has any certificate that could be stolen.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use canal_e2e::credential::{Authority, Credential, Leaf};
use canal_e2e::hbone::{Opened, Tunnel, tunnel};
use canal_e2e::{Mesh, until};
use canal_world::topology::{KeyAlgorithm, KeyFallback, KeyPlace, Keys, Vswitch};
use canal_world::{Refused, Topology};
use sha2::{Digest, Sha256};

/// Who may.
pub(crate) const CLIENT: &str = "alpha/default/client-0";
/// A member of the same tenant who may not.
pub(crate) const INTRUDER: &str = "alpha/default/intruder-0";
/// The other tenant's.
pub(crate) const BETA: &str = "beta/default/client-0";
/// The gateways' address for pods in az1, which every tenant has.
pub(crate) const GATEWAY: &str = "10.102.2.1:15008";
/// Frames that an attack by frames sends.
pub(crate) const FRAMES: u64 = 50;
/// Token of beta's own operator.
pub(crate) const BETA_OPERATOR: &str = "a-token-of-betas-operator-0123456789abcdef";

/// What was accepted is in force everywhere within this time, if it ever is.
const SETTLED_WITHIN: Duration = Duration::from_secs(5);

/// What came of a probe.
pub(crate) struct Seen {
    /// Whether it got what it was after.
    pub(crate) reached: bool,
    /// What was said, for messages.
    pub(crate) said: String,
}

impl Seen {
    pub(crate) fn of(reached: bool, said: impl std::fmt::Debug) -> Self {
        Self { reached, said: format!("{said:?}").chars().take(400).collect() }
    }
}

/// Where a refusal is counted.
#[derive(Debug)]
pub(crate) enum Counter {
    /// At all hosts of a kind: family and labels.
    Metric(&'static str, &'static str, Vec<&'static str>),
    /// By the underlay's routers and beta's node, of packets.
    Packets(fn(&Refused) -> u64),
}

impl Counter {
    pub(crate) fn read(&self, stage: &Stage) -> u64 {
        match self {
            Self::Metric(kind, family, labels) => stage.mesh.counted_at(kind, family, labels),
            Self::Packets(field) => ["router-az1", "router-az2", "beta-n1"]
                .iter()
                .filter_map(|host| stage.mesh.world.refused(host).ok())
                .map(|r| field(&r))
                .sum(),
        }
    }

    /// All that the same counters say of other packets or requests: they show where those went that were not counted as they should be.
    pub(crate) fn siblings(&self, stage: &Stage) -> String {
        let Self::Metric(kind, family, _) = self else { return String::new() };
        let hosts = stage.mesh.world.hosts().unwrap_or_default();
        let of_kind = hosts.iter().filter(|host| host.seat.kind == *kind && host.pulse.pid.is_some()).map(|host| &host.seat.name);
        let lines = |name: &String| -> Vec<String> {
            let metrics = stage.mesh.metrics(name);
            metrics.lines().filter(|l| l.starts_with(family) && !l.ends_with(" 0")).map(|l| format!("{name}: {l}")).collect()
        };
        of_kind.flat_map(lines).collect::<Vec<_>>().join("\n")
    }
}

type Probe = Box<dyn Fn(&Stage) -> Seen>;

/// An attack, and the same by who may.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    pub(crate) attempt: Probe,
    pub(crate) control: Probe,
    pub(crate) counter: Option<Counter>,
    /// So many refusals must be counted.
    pub(crate) refusals_min: u64,
}

impl Attack {
    pub(crate) fn new(name: &'static str, attempt: impl Fn(&Stage) -> Seen + 'static, control: impl Fn(&Stage) -> Seen + 'static) -> Self {
        Self { name, attempt: Box::new(attempt), control: Box::new(control), counter: None, refusals_min: 1 }
    }

    /// Each of its frames must be counted, so that none passed.
    pub(crate) fn each_frame(self) -> Self {
        Self { refusals_min: FRAMES, ..self }
    }

    /// Its sender is told and ends with the first.
    pub(crate) fn once(self) -> Self {
        Self { refusals_min: 1, ..self }
    }

    pub(crate) fn counted(mut self, kind: &'static str, family: &'static str, labels: &[&'static str]) -> Self {
        self.counter = Some(Counter::Metric(kind, family, labels.to_vec()));
        self
    }

    pub(crate) fn dropped(mut self, field: fn(&Refused) -> u64) -> Self {
        self.counter = Some(Counter::Packets(field));
        self
    }
}

/// The world.
pub(crate) struct Stage {
    pub(crate) mesh: Mesh,
    authorities: [Authority; 2],
    _files: tempfile::TempDir,
}

impl Stage {
    /// A certificate as a member of a tenant has it.
    pub(crate) fn member(&self, tenant: &str, account: &str) -> Credential {
        self.issued(tenant, &format!("spiffe://{tenant}.example/ns/default/sa/{account}"))
    }

    /// A certificate that a tenant's authority signed for any identity.
    pub(crate) fn issued(&self, tenant: &str, identity: &str) -> Credential {
        self.authorities[usize::from(tenant == "beta")].issue(&Leaf::of(identity))
    }

    /// `ip:port` of a pod's application.
    pub(crate) fn pod(&self, pod: &str, port: u16) -> String {
        format!("{}:{port}", self.mesh.address(pod))
    }

    /// Opens a tunnel from a pod's network.
    pub(crate) fn tunnel(&self, from: &str, to: &str, credential: &Credential, authority: &str, headers: &[(&str, &str)]) -> Seen {
        let mut asked = Tunnel::new(from, to.parse().unwrap_or_else(|e| panic!("{to}: {e}")), Some(credential), authority);
        for (name, value) in headers {
            asked = asked.with(name, value);
        }
        seen(&tunnel(&self.mesh.world, &asked))
    }

    /// A page's head and body, as curl gets them in a pod; or what curl says.
    pub(crate) fn page(&self, pod: &str, url: &str, more: &[&str]) -> String {
        let argv = ["curl", "-sS", "-g", "--path-as-is", "--max-time", "5", "-D", "-", url];
        let said = self.mesh.run(pod, &argv.into_iter().chain(more.iter().copied()).collect::<Vec<_>>());
        if said.stdout.is_empty() { said.stderr } else { said.stdout }
    }

    /// Whether a page was served by alpha's application.
    pub(crate) fn by_alpha(&self, pod: &str, url: &str, more: &[&str]) -> Seen {
        let page = self.page(pod, url, more);
        Seen::of(page.contains("blob-alpha"), page)
    }

    /// Waits until every data plane runs a generation, if it comes to that: an attack goes on all the same.
    pub(crate) fn settle(&self, generation: u64) {
        let started = Instant::now();
        let is_there = || {
            let status = self.mesh.canal(&["status", "-o", "json"]).json();
            status["generation"].as_u64() >= Some(generation) && self.mesh.is_converged()
        };
        while started.elapsed() < SETTLED_WITHIN && !is_there() {
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Whether a page was served at all.
    pub(crate) fn served(&self, pod: &str, url: &str, more: &[&str]) -> Seen {
        let page = self.page(pod, url, more);
        Seen::of(page.starts_with("HTTP/1.1 200") || page.starts_with("HTTP/2 200"), page)
    }
}

/// Looks until it is there, or this time is over.
pub(crate) fn look(within: Duration, sight: impl Fn() -> Seen) -> Seen {
    let started = Instant::now();
    loop {
        let seen = sight();
        if seen.reached || started.elapsed() > within {
            return seen;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

pub(crate) fn seen(opened: &Opened) -> Seen {
    Seen::of(opened.reached(), opened)
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

/// What alpha has that beta has not, and who may what in alpha.
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

/// The world, brought up once.
pub(crate) fn stage() -> &'static Stage {
    static STAGE: OnceLock<Stage> = OnceLock::new();
    STAGE.get_or_init(|| set("e2e-attacks", |_| ()))
}

/// The same with a virtual switch that lets everything pass. The provider's pages are where only their own hosts reach them, as operators
/// set them up who have no network of their own.
pub(crate) fn open_stage() -> &'static Stage {
    static STAGE: OnceLock<Stage> = OnceLock::new();
    STAGE.get_or_init(|| {
        set("e2e-open", |topology| {
            topology.vswitch = Vswitch::Open;
            let own = topology.gateways.iter_mut().chain(&mut topology.key_servers).chain(&mut topology.edges);
            for process in own.filter_map(|component| component.process.as_mut()) {
                process.args.extend(["--metrics-addr".into(), "127.0.0.1:15020".into()]);
            }
        })
    })
}

fn set(name: &str, change: impl FnOnce(&mut Topology)) -> Stage {
    let files = tempfile::tempdir().expect("a directory");
    let authorities = authorities(files.path());
    let mesh = Mesh::up_with("trust.yaml", name, |topology| {
        let keys = Keys { place: KeyPlace::KeyServer, algorithm: KeyAlgorithm::EcdsaP256, fallback: KeyFallback::Refuse };
        topology.tenants[0].keys = Some(keys);
        let controller = topology.controller.as_mut().and_then(|c| c.process.as_mut()).expect("the world has a controller");
        controller.args.extend(["--ca-dir".into(), files.path().display().to_string()]);
        change(topology);
    });
    admit_operator(&mesh);
    let client = mesh.address(CLIENT).to_string();
    mesh.apply("alpha", &ALPHA.replace("CLIENT_IP", &client));
    let stage = Stage { mesh, authorities, _files: files };
    until(Duration::from_secs(20), "alpha is served", || stage.by_alpha(CLIENT, "http://10.101.0.90/headers", &[]).reached);
    until(Duration::from_secs(20), "beta is served", || stage.served(BETA, "http://10.101.0.10/headers", &[]).reached);
    stage
}

/// Beta gets an operator of its own.
fn admit_operator(mesh: &Mesh) {
    let path = mesh.world.dir().join("principals.yaml");
    let list = std::fs::read_to_string(&path).expect("the principals");
    let digest: String = Sha256::digest(BETA_OPERATOR).iter().map(|byte| format!("{byte:02x}")).collect();
    let more = format!("{}\n- {{tokenSha256: {digest}, kind: operator, name: beta-op, tenant: beta}}\n", list.trim_end());
    std::fs::write(&path, more).expect("the principals");
}
