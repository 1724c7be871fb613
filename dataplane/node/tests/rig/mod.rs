//! A pod on a node, in a throwaway namespace and cgroup, served by the real roads: real capture, real listeners, real TLS. Around it
//! stand a gateway made of the kit's HBONE server and applications in processes of their own. Only southbound and the controller's
//! certificates are given by hand.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

pub mod app;
pub mod gateway;
#[path = "../../../offload/tests/lab/mod.rs"]
pub mod lab;
pub mod raw;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_kit::drain::{self, Trigger};
use canal_kit::log::{AccessLog, Sink};
use canal_kit::metrics::Registry;
use canal_kit::sys::Netns as OpenNetns;
use canal_kit::testing::TestCa;
use canal_kit::tls::{ClientIdentity, Credential, CredentialWriter, ServerIdentity};
use canal_kit::worker::Workers;
use canal_model::identity::Identity;
use canal_model::ids::{Generation, ServiceId, Vni};
use canal_model::program as p;
use canal_node_proxy::accept;
use canal_node_proxy::capture::{Capture, Taken};
use canal_node_proxy::config::{CaptureChoice, Limits};
use canal_node_proxy::guard::Guards;
use canal_node_proxy::pod::Pod;
use canal_node_proxy::pods;
use canal_node_proxy::room::{Room, RoomIdentity};
use canal_node_proxy::telemetry::Party;
use canal_node_proxy::view::View;
use canal_node_proxy::worker::{self, Shared};
use gateway::{Does, Gateway};
use lab::{Cgroup, Client, Netns};

/// The entry of the child that [`Rig::app`] starts.
#[test]
fn the_client() {
    if let Some(case) = lab::case() {
        app::run(&case);
    }
}

pub const TRUST_DOMAIN: &str = "alpha.example";
pub const POD_V4: &str = "10.77.0.2";
pub const POD_V6: &str = "fd77::2";
/// The gateways: near (this node's AZ) and far.
pub const NEAR: &str = "10.77.255.1";
pub const FAR: &str = "10.77.255.2";
/// On the cloud tier: where tunnels to pods are opened, in this node's AZ.
pub const FOR_PODS: &str = "10.77.255.9";

/// What a test wants otherwise.
pub struct Setup {
    pub outside: p::OutsideMesh,
    pub capture: CaptureChoice,
    pub limits: Limits,
    pub workers: usize,
    /// The trust domain that the view says; the pod's own certificate is always of [`TRUST_DOMAIN`].
    pub trust_domain: &'static str,
    /// Whether the pod has its certificate from the start.
    pub certificate: bool,
    pub gateways: &'static [(&'static str, &'static str)],
    /// Gateway addresses of the service, by AZ, and whether they are open. With some, the tenant is on the cloud tier.
    pub addresses: &'static [(&'static str, &'static str, bool)],
    /// Whether the proxy runs where the pod's interface leads to, as on a node.
    pub on_node: bool,
    /// The tenant's policies, and whom it federates with: any kind of resource.
    pub policies: Vec<p::Resource>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            outside: p::OutsideMesh::Deny,
            capture: CaptureChoice::Bpf,
            limits: Limits::default(),
            workers: 1,
            trust_domain: TRUST_DOMAIN,
            certificate: true,
            gateways: &[("near", NEAR)],
            addresses: &[],
            on_node: false,
            policies: Vec::new(),
        }
    }
}

/// Everything around one pod.
pub struct Rig {
    pub ns: Netns,
    /// What the pod's interface leads to: gateways, and 192.0.2.1.
    pub outside: Netns,
    pub cg: Cgroup,
    pub ca: TestCa,
    pub registry: Registry,
    pub room: Arc<Room>,
    pub shared: Arc<Shared>,
    pub credential: CredentialWriter,
    pub trigger: Trigger,
    pub workers: Workers,
    guards: Guards,
    capture: Option<(Capture, Taken)>,
    pins: PathBuf,
    dir: tempfile::TempDir,
}

pub fn identity(s: &str) -> Identity {
    format!("spiffe://{TRUST_DOMAIN}/{s}").parse().unwrap()
}

impl Rig {
    pub fn new(setup: &Setup) -> Self {
        let (ns, outside) = (Netns::new(), Netns::bare());
        join(&ns, &outside);
        let path = outside.path();
        // Threads are born where their makers are.
        let start = move || Self::start(setup, ns, outside);
        if setup.on_node { lab::within(&path, start) } else { start() }
    }

    fn start(setup: &Setup, ns: Netns, outside: Netns) -> Self {
        let (cg, dir) = (Cgroup::new(), tempfile::tempdir().unwrap());
        let pod = pod(&ns, &cg);
        let registry = Registry::new();
        let log = AccessLog::start(Sink::File(dir.path().join("access.log")), &registry).unwrap();
        let shared = Arc::new(Shared::new("az1".parse().unwrap(), registry.clone(), log, true));
        shared.view.store(Arc::new(view(setup)));
        let pins = dir.path().join("bpffs");
        let capture = Capture::start(setup.capture, &pins).unwrap();
        let (taken, origins) = capture.take(&pod).unwrap();
        let ca = TestCa::new("alpha");
        let own = identity("ns/b/sa/app");
        let party = Party::of_pod(&pod, "c1", "az1", Some(&own));
        let room = Arc::new(Room::new(pod, party, taken.mode(), origins, &setup.limits, &registry).unwrap());
        let (credential, place) = Credential::empty(own.clone());
        if setup.certificate {
            credential.replace(ca.issue(&own));
        }
        room.identify(Arc::new(RoomIdentity {
            trust_domain: TRUST_DOMAIN.parse().unwrap(),
            keys: Default::default(),
            client: ClientIdentity::new(place.clone()).trusting(shared.trust.view(&"alpha".parse().unwrap())),
            server: ServerIdentity::new("alpha".parse().unwrap(), place.clone()).trusting(shared.trust.view(&"alpha".parse().unwrap())),
            identity: own.clone(),
            credential: Some(place),
        }));
        let (trigger, drain) = drain::tree();
        let workers = worker::start(setup.workers, &shared, drain.clone()).unwrap();
        let guards = Guards::new(&registry, true);
        renew(&shared, &room);
        guards.begin(&capture, &room);
        accept::open(&workers, &room, &drain);
        let capture = Some((capture, taken));
        let rig = Self { ns, outside, cg, ca, registry, room, shared, credential, trigger, workers, guards, capture, pins, dir };
        rig.until("listeners", || rig.room.listeners() == 4 * setup.workers as u64);
        rig
    }

    /// What the node does when the controller says this from now on.
    pub fn tell(&self, setup: &Setup) {
        self.shared.trust.replace(setup.policies.iter().cloned().map(Arc::new)).unwrap();
        self.shared.view.store(Arc::new(view(setup)));
        let changed = renew(&self.shared, &self.room);
        worker::reconsider(&self.workers);
        let (capture, _) = self.capture.as_ref().unwrap();
        let changed: &[&Room] = if changed { &[&self.room] } else { &[] };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let follow = || runtime.block_on(self.guards.follow(capture, &[&self.room], changed));
        if setup.on_node { self.outside.within(follow) } else { follow() }
    }

    /// The pod's namespace, for sockets of the test's own.
    pub fn netns(&self) -> OpenNetns {
        OpenNetns::open(self.ns.path()).unwrap()
    }
    /// The namespace the pod's interface leads to.
    pub fn outside_netns(&self) -> OpenNetns {
        OpenNetns::open(self.outside.path()).unwrap()
    }

    /// An application in the pod.
    pub fn app(&self, case: &str, args: &[&str]) -> Client {
        Client::start(&self.ns, Some(&self.cg), case, args)
    }

    /// A gateway outside, with the identity that gateways have.
    pub fn gateway(&self, address: &str, does: Does) -> Gateway {
        self.impostor(address, does, &identity("ns/canal-system/sa/gateway"))
    }

    /// Somebody at a gateway's address.
    pub fn impostor(&self, address: &str, does: Does, who: &Identity) -> Gateway {
        Gateway::listen(self.outside_netns(), address, does, self.ca.credential(who))
    }

    pub fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !holds() {
            assert!(Instant::now() < end, "not in time: {what}\n{}", self.registry.render());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The sum of all series of `family` whose labels contain all of `labels` (`key="value"`).
    pub fn metric(&self, family: &str, labels: &[&str]) -> f64 {
        let text = self.registry.render();
        let of_family = |l: &&str| l.strip_prefix(family).is_some_and(|r| r.starts_with(['{', ' ']));
        let series = text.lines().filter(of_family).filter(|l| labels.iter().all(|w| l.contains(w)));
        series.map(|l| l.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    pub fn refused(&self, direction: &str, reason: &str) -> f64 {
        self.metric("canal_node_refused_total", &[&format!("direction=\"{direction}\""), &format!("reason=\"{reason}\"")])
    }

    /// The access log's lines for which `wanted` holds; waits for one.
    pub fn logged(&self, wanted: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
        let mut found = None;
        self.until("an access log line", || {
            let text = std::fs::read_to_string(self.dir.path().join("access.log")).unwrap_or_default();
            found = text.lines().map(|l| serde_json::from_str(l).unwrap()).find(&wanted);
            found.is_some()
        });
        found.unwrap()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.trigger.force();
        self.workers.join();
        drop(self.capture.take());
        canal_node_proxy::capture::release_all(&self.pins, &[]).unwrap();
    }
}

fn renew(shared: &Shared, room: &Room) -> bool {
    let (view, pod) = (shared.view.load(), room.pod.load());
    view.tenant(&pod.tenant).is_some_and(|tenant| pods::renew_policy(room, tenant, &pod))
}

fn join(pod: &Netns, outside: &Netns) {
    pod.ip(&format!("link set nowhere netns {} name out0", outside.name()));
    outside.ip("link set out0 up");
    for a in [NEAR, FAR, FOR_PODS, "192.0.2.1"] {
        outside.ip(&format!("addr add {a}/32 dev out0"));
        pod.ip(&format!("route add {a}/32 dev pod0"));
    }
    outside.ip(&format!("route add {POD_V4}/32 dev out0"));
    outside.ip("addr add fd77::9/128 dev out0 nodad");
    outside.ip(&format!("-6 route add {POD_V6}/128 dev out0"));
    pod.ip("-6 route add fd77::9/128 dev pod0");
}

fn pod(ns: &Netns, cg: &Cgroup) -> Pod {
    let text = serde_json::json!({
        "uid": "alpha/b/app-0", "namespace": "b", "name": "app-0", "serviceAccount": "app",
        "netns": ns.path(), "cgroup": cg.dir, "ips": [POD_V4, POD_V6], "labels": {"app": "app", "version": "v1"}, "probePorts": [8080],
    });
    Pod::parse("test", text.to_string().as_bytes()).unwrap()
}

fn view(setup: &Setup) -> View {
    let key = "alpha/b/shop".parse::<canal_model::ids::ServiceKey>().unwrap();
    let port = p::ServicePort { port: 80, name: "http".into(), protocol: p::AppProtocol::Http1 };
    let shop = key.clone();
    let mut all = vec![
        p::Resource::Tenant(p::Tenant {
            name: "alpha".parse().unwrap(),
            vni: Vni::new(1).unwrap(),
            trust_domain: setup.trust_domain.parse().unwrap(),
            pod_cidrs: vec!["10.77.0.0/24".parse().unwrap(), "fd77::/64".parse().unwrap()],
            gateway_cidrs: vec![],
            outside: setup.outside,
            resolvers: Vec::new(),
            keys: Default::default(),
            shares: Default::default(),
        }),
        p::Resource::Service(p::Service {
            key: key.clone(),
            id: ServiceId::new(7).unwrap(),
            hostname: "shop.b.svc.cluster.local".into(),
            vips: vec!["10.96.0.1".parse().unwrap(), "fd96::1".parse().unwrap()],
            ports: vec![port],
        }),
        p::Resource::Workload(p::Workload {
            tenant: "alpha".parse().unwrap(),
            namespace: "b".parse().unwrap(),
            name: "app-0".parse().unwrap(),
            service_account: "app".parse().unwrap(),
            node: "n1".parse().unwrap(),
            az: "az1".parse().unwrap(),
            addresses: vec![],
            labels: p::Labels::new(),
            ready: true,
            tunnel: p::Tunnel::Hbone,
            endpoints: vec![p::EndpointPort { service: key, port: 80, target_port: 8080 }],
            udp_ports: Default::default(),
        }),
    ];
    let address = |service: &canal_model::ids::ServiceKey, az: &str, at: &str, open: bool| {
        p::Resource::Address(p::GatewayAddress {
            service: service.clone(),
            id: ServiceId::new(7).unwrap(),
            az: az.parse().unwrap(),
            addresses: vec![at.parse().unwrap()],
            open,
        })
    };
    all.extend(setup.addresses.iter().map(|(az, at, open)| address(&shop, az, at, *open)));
    if !setup.addresses.is_empty() {
        all.push(address(&canal_model::tier::tier_service(&shop.tenant), "az1", FOR_PODS, true));
    }
    for (replica, address) in setup.gateways {
        all.push(p::Resource::Gateway(p::Gateway {
            tenant: "alpha".parse().unwrap(),
            replica: replica.parse().unwrap(),
            az: if *replica == "far" { "az2" } else { "az1" }.parse().unwrap(),
            addresses: vec![address.parse().unwrap()],
            draining: false,
        }));
    }
    all.extend(setup.policies.iter().cloned());
    View::from_resources(Generation(1), all.iter(), &"n1".parse().unwrap())
}
