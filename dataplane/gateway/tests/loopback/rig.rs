//! An engine with one plain listener per service, fed with resources written as in a world; and what to look at when it is over.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use canal_gateway_engine::{Engine, EngineConfig, ForwardedHeaders, Limits, Plain, Surroundings, Tier, Times, WantService};
use canal_kit::drain::{self, Trigger};
use canal_kit::keys::Keyring;
use canal_kit::log::AccessLog;
use canal_kit::metrics::Registry;
use canal_model::ids::{Generation, ServiceId, ServiceKey, Vni};
use canal_model::program::*;

pub(crate) const TENANT: &str = "alpha";
pub(crate) const LOCALHOST: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

pub(crate) fn key(tenant: &str, name: &str) -> ServiceKey {
    format!("{tenant}/default/{name}").parse().unwrap()
}

pub(crate) fn tenant(name: &str, vni: u32) -> Resource {
    Resource::Tenant(Tenant {
        name: name.parse().unwrap(),
        vni: Vni::new(vni).unwrap(),
        trust_domain: format!("{name}.example").parse().unwrap(),
        pod_cidrs: vec![],
        gateway_cidrs: vec![],
        outside: OutsideMesh::Deny,
        resolvers: Vec::new(),
        keys: Default::default(),
        shares: Default::default(),
    })
}

pub(crate) fn service(tenant: &str, name: &str, vip: &str, ports: &[(u16, AppProtocol)]) -> Resource {
    service_with_id(tenant, name, 1, vip, ports)
}

pub(crate) fn service_with_id(tenant: &str, name: &str, id: u32, vip: &str, ports: &[(u16, AppProtocol)]) -> Resource {
    Resource::Service(Service {
        key: key(tenant, name),
        id: ServiceId::new(id).unwrap(),
        hostname: format!("{name}.default.svc.cluster.local"),
        vips: vec![vip.parse().unwrap()],
        ports: ports.iter().map(|(port, protocol)| ServicePort { port: *port, name: "p".into(), protocol: *protocol }).collect(),
    })
}

/// A pod at `address` that serves `service` on port 80.
pub(crate) fn pod(tenant: &str, name: &str, address: SocketAddr, service: &str) -> Workload {
    Workload {
        tenant: tenant.parse().unwrap(),
        namespace: "default".parse().unwrap(),
        name: name.parse().unwrap(),
        service_account: service.parse().unwrap(),
        node: "n1".parse().unwrap(),
        az: "az1".parse().unwrap(),
        addresses: vec![address.ip()],
        labels: [("app".to_string(), service.to_string()), ("version".to_string(), name.to_string())].into(),
        ready: true,
        tunnel: Tunnel::None,
        endpoints: vec![EndpointPort { service: key(tenant, service), port: 80, target_port: address.port() }],
        udp_ports: Default::default(),
    }
}

/// A rule of `service` that sends what matches `path` as `matches` says to `backends`.
pub(crate) fn route(service: &str, name: &str, place: u32, http: HttpMatch, action: RouteAction) -> Resource {
    let mut http = http;
    http.precedence.place = [place, 0];
    Resource::Route(RouteRule {
        key: RouteKey {
            tenant: TENANT.parse().unwrap(),
            kind: "VirtualService".into(),
            namespace: "default".parse().unwrap(),
            name: name.parse().unwrap(),
            rule: "0".into(),
        },
        parent: key(TENANT, service),
        parent_port: None,
        hosts: vec![],
        matches: vec![http],
        action,
    })
}

pub(crate) fn prefix(path: &str) -> HttpMatch {
    let precedence = Precedence { class: 0, specificity: [0; 5], created: 0, object: String::new(), place: [0, 0] };
    HttpMatch { precedence, path: PathMatch::StringPrefix(path.into()), method: None, headers: vec![], query: vec![] }
}

pub(crate) fn to(service: &str, subset: &[(&str, &str)], weight: u32) -> Backend {
    let subset = subset.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect::<BTreeMap<_, _>>();
    Backend { weight, target: BackendTarget::Service { service: key(TENANT, service), port: 80, subset } }
}

/// What a test changes of the usual engine.
pub(crate) struct Plot {
    pub(crate) limits: Limits,
    pub(crate) times: Times,
    pub(crate) protocol: AppProtocol,
    pub(crate) hbone: Vec<SocketAddr>,
    pub(crate) keyring: Option<Keyring>,
    pub(crate) certificates: Option<WantService>,
    pub(crate) log: Option<std::path::PathBuf>,
    pub(crate) tier: Option<Tier>,
    pub(crate) request_hook: Option<canal_gateway_engine::RequestHook>,
    pub(crate) forwarded: ForwardedHeaders,
    /// Plain listeners besides that of `alpha/default/web:80`.
    pub(crate) plain: Vec<Plain>,
    pub(crate) workers: usize,
}

impl Default for Plot {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            times: Times::default(),
            protocol: AppProtocol::Http1,
            hbone: vec![],
            keyring: None,
            certificates: None,
            log: None,
            tier: None,
            request_hook: None,
            forwarded: ForwardedHeaders::default(),
            plain: vec![],
            workers: 1,
        }
    }
}

pub(crate) struct Rig {
    pub(crate) engine: Engine,
    pub(crate) registry: Registry,
    trigger: Option<Trigger>,
    /// The plain listener of `alpha/default/web:80`.
    pub(crate) web: SocketAddr,
    generation: AtomicU64,
}

impl Rig {
    /// The service `web` with these endpoints, one worker.
    pub(crate) fn new(plot: Plot, endpoints: &[SocketAddr]) -> Self {
        let registry = Registry::new();
        let (trigger, drain) = drain::tree();
        let web = Plain { address: LOCALHOST, service: key(TENANT, "web"), port: 80 };
        let config = EngineConfig {
            replica: "gw-1".into(),
            workers: plot.workers,
            pin: false,
            hbone: plot.hbone,
            plain: std::iter::once(web).chain(plot.plain).collect(),
            tier: plot.tier,
            request_hook: plot.request_hook,
            forwarded: plot.forwarded,
            limits: plot.limits,
            times: plot.times,
            ..EngineConfig::default()
        };
        let log = plot.log.map(|path| AccessLog::start(canal_kit::log::Sink::File(path), &registry).unwrap());
        let around =
            Surroundings { registry: registry.clone(), drain, keyring: plot.keyring, certificates: plot.certificates, log, dns: None };
        let engine = Engine::start(config, around).unwrap();
        let web = engine.plain_addresses()[0];
        let rig = Self { engine, registry, trigger: Some(trigger), web, generation: AtomicU64::new(0) };
        let mut all = vec![tenant(TENANT, 1), service(TENANT, "web", "10.96.0.1", &[(80, plot.protocol)])];
        all.extend(endpoints.iter().enumerate().map(|(n, address)| Resource::Workload(pod(TENANT, &format!("web-{n}"), *address, "web"))));
        rig.apply(all);
        rig
    }

    pub(crate) fn apply(&self, upserts: Vec<Resource>) {
        self.change(upserts, &[]);
    }

    pub(crate) fn change(&self, upserts: Vec<Resource>, removals: &[(Kind, &str)]) {
        let upserts: Vec<_> = upserts.into_iter().map(Arc::new).collect();
        let removals: Vec<_> = removals.iter().map(|(kind, name)| (*kind, name.to_string())).collect();
        let generation = Generation(self.generation.fetch_add(1, Ordering::Relaxed) + 1);
        self.engine.apply(&upserts, &removals, generation);
    }

    /// The sum of all series of a metric whose labels contain `labels`.
    pub(crate) fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let text = self.registry.render();
        let lines = text.lines().filter(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])));
        let wanted = lines.filter(|l| labels.iter().all(|label| l.contains(label)));
        wanted.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Waits until a metric reaches `at_least`; panics after 10 s.
    pub(crate) async fn until(&self, name: &str, labels: &[&str], at_least: f64) {
        for _ in 0..1000 {
            if self.metric(name, labels) >= at_least {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("{name}{labels:?} stays below {at_least}: {}", self.metric(name, labels));
    }

    /// Begins the drain.
    pub(crate) fn drain(&self, limit: Duration) {
        self.trigger.as_ref().unwrap().drain(limit);
    }

    /// Waits for the workers' end; `false` if they had to be forced.
    pub(crate) async fn ended(&mut self, limit: Duration) -> bool {
        let workers = self.engine.workers().clone();
        let joined = tokio::task::spawn_blocking(move || workers.join());
        tokio::time::timeout(limit, joined).await.is_ok()
    }
}
