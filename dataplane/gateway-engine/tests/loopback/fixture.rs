//! Fixture: an engine with a plain listener, the resources that tests apply to it, and access to
//! its metrics.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use canal_gateway_engine::{
    CloudTierConfig, EngineDependencies, ForwardedHeaders, GatewayConfig, GatewayEngine,
    GatewayLimits, GatewayTimeouts, PlainListener, ServiceCertificateFn,
};
use canal_identity::ClientIdentityFactory;
use canal_model::ids::{Generation, ServiceId, ServiceKey, Vni};
use canal_model::program::*;
use canal_runtime::drain::{self, DrainTrigger};
use canal_runtime::metrics::Registry;
use canal_telemetry::access_log::AccessLog;

pub(crate) const TENANT: &str = "alpha";
pub(crate) const LOCALHOST: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

/// Waits until `holds` returns true.
pub(crate) async fn until(what: &str, holds: impl Fn() -> bool) {
    let started = Instant::now();
    while !holds() {
        let waited = started.elapsed();
        assert!(
            waited < canal_timing::deadline(Duration::from_secs(10)),
            "never: {what}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

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
        outbound_traffic_policy: OutboundTrafficPolicy::Deny,
        resolvers: Vec::new(),
        keys: Default::default(),
        shares: Default::default(),
    })
}

pub(crate) fn service(
    tenant: &str,
    name: &str,
    vip: &str,
    ports: &[(u16, AppProtocol)],
) -> Resource {
    service_with_id(tenant, name, 1, vip, ports)
}

pub(crate) fn service_with_id(
    tenant: &str,
    name: &str,
    id: u32,
    vip: &str,
    ports: &[(u16, AppProtocol)],
) -> Resource {
    Resource::Service(Service {
        key: key(tenant, name),
        id: ServiceId::new(id).unwrap(),
        hostname: format!("{name}.default.svc.cluster.local"),
        vips: vec![vip.parse().unwrap()],
        ports: ports
            .iter()
            .map(|(port, protocol)| ServicePort {
                port: *port,
                name: "p".into(),
                protocol: *protocol,
            })
            .collect(),
        upstream_pool: Default::default(),
        policy_paths: Default::default(),
        load_balancers: Vec::new(),
    })
}

/// Builds a pod at `address` that serves `service` on port 80.
pub(crate) fn pod(tenant: &str, name: &str, address: SocketAddr, service: &str) -> Workload {
    Workload {
        tenant: tenant.parse().unwrap(),
        namespace: "default".parse().unwrap(),
        name: name.parse().unwrap(),
        service_account: service.parse().unwrap(),
        node: "n1".parse().unwrap(),
        az: "az1".parse().unwrap(),
        addresses: vec![address.ip()],
        labels: [
            ("app".to_string(), service.to_string()),
            ("version".to_string(), name.to_string()),
        ]
        .into(),
        ready: true,
        tunnel: TunnelProtocol::None,
        endpoints: vec![EndpointPort {
            service: key(tenant, service),
            port: 80,
            target_port: address.port(),
        }],
        udp_ports: Default::default(),
    }
}

/// Builds a route of `service` that applies `action` to requests that match `http`.
pub(crate) fn route(
    service: &str,
    name: &str,
    place: u32,
    http: HttpMatch,
    action: RouteAction,
) -> Resource {
    let mut http = http;
    http.precedence.indexes = [place, 0];
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
        consumer: None,
        hosts: vec![],
        matches: vec![http],
        filters: None,
        attempts: None,
        faults: None,
        cors: None,
        mirrors: Vec::new(),
        action,
    })
}

pub(crate) fn prefix(path: &str) -> HttpMatch {
    let precedence = Precedence {
        class: 0,
        specificity: [0; 5],
        created: 0,
        object: String::new(),
        indexes: [0, 0],
    };
    HttpMatch {
        precedence,
        path: PathMatch::StringPrefix(path.into()),
        method: None,
        headers: vec![],
        query: vec![],
    }
}

pub(crate) fn to(service: &str, subset: &[(&str, &str)], weight: u32) -> Backend {
    let subset = subset
        .iter()
        .map(|(k, v)| (k.to_string(), v.to_string()))
        .collect::<BTreeMap<_, _>>();
    Backend {
        weight,
        filters: None,
        target: BackendTarget::Service {
            service: key(TENANT, service),
            port: 80,
            subset,
        },
    }
}

/// Settings in which a test's engine differs from the default.
pub(crate) struct EngineSetup {
    pub(crate) limits: GatewayLimits,
    pub(crate) times: GatewayTimeouts,
    pub(crate) protocol: AppProtocol,
    pub(crate) hbone: Vec<SocketAddr>,
    pub(crate) keyring: Option<ClientIdentityFactory>,
    pub(crate) certificates: Option<ServiceCertificateFn>,
    pub(crate) log: Option<std::path::PathBuf>,
    pub(crate) tier: Option<CloudTierConfig>,
    pub(crate) forwarded: ForwardedHeaders,
    /// Plain listeners in addition to that of `alpha/default/web:80`.
    pub(crate) plain: Vec<PlainListener>,
    pub(crate) workers: usize,
}

impl Default for EngineSetup {
    fn default() -> Self {
        Self {
            limits: GatewayLimits::default(),
            times: GatewayTimeouts::default(),
            protocol: AppProtocol::Http1,
            hbone: vec![],
            keyring: None,
            certificates: None,
            log: None,
            tier: None,
            forwarded: ForwardedHeaders::default(),
            plain: vec![],
            workers: 1,
        }
    }
}

pub(crate) struct GatewayFixture {
    pub(crate) engine: GatewayEngine,
    pub(crate) registry: Registry,
    trigger: Option<DrainTrigger>,
    /// Address of the plain listener of `alpha/default/web:80`.
    pub(crate) web: SocketAddr,
    generation: AtomicU64,
}

impl GatewayFixture {
    /// Starts an engine whose service `web` has these endpoints.
    pub(crate) fn new(setup: EngineSetup, endpoints: &[SocketAddr]) -> Self {
        let registry = Registry::new();
        let (trigger, drain) = drain::tree();
        let web = PlainListener {
            address: LOCALHOST,
            service: key(TENANT, "web"),
            port: 80,
        };
        let config = GatewayConfig {
            replica: "gw-1".into(),
            workers: setup.workers,
            // Engines of tests that run in parallel would all be pinned to the same core.
            pin: false,
            hbone: setup.hbone,
            plain: std::iter::once(web).chain(setup.plain).collect(),
            tier: setup.tier,
            forwarded: setup.forwarded,
            limits: setup.limits,
            times: setup.times,
            ..GatewayConfig::default()
        };
        let log = setup.log.map(|path| {
            AccessLog::start(canal_telemetry::access_log::LogSink::File(path), &registry).unwrap()
        });
        let dependencies = EngineDependencies {
            registry: registry.clone(),
            drain,
            identities: setup.keyring,
            certificates: setup.certificates,
            log,
            dns: None,
        };
        let engine = GatewayEngine::start(config, dependencies).unwrap();
        let web = engine.plain_addresses()[0];
        let fixture = Self {
            engine,
            registry,
            trigger: Some(trigger),
            web,
            generation: AtomicU64::new(0),
        };
        let mut all = vec![
            tenant(TENANT, 1),
            service(TENANT, "web", "10.96.0.1", &[(80, setup.protocol)]),
        ];
        all.extend(endpoints.iter().enumerate().map(|(n, address)| {
            Resource::Workload(pod(TENANT, &format!("web-{n}"), *address, "web"))
        }));
        fixture.apply(all);
        fixture
    }

    pub(crate) fn apply(&self, upserts: Vec<Resource>) {
        self.change(upserts, &[]);
    }

    pub(crate) fn change(&self, upserts: Vec<Resource>, removals: &[(ResourceKind, &str)]) {
        let upserts: Vec<_> = upserts.into_iter().map(Arc::new).collect();
        let removals: Vec<_> = removals
            .iter()
            .map(|(kind, name)| (*kind, name.to_string()))
            .collect();
        let generation = Generation(self.generation.fetch_add(1, Ordering::Relaxed) + 1);
        self.engine.apply(&upserts, &removals, generation);
    }

    /// Returns the sum of all series of a metric whose labels contain `labels`.
    pub(crate) fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let text = self.registry.render();
        let lines = text.lines().filter(|l| {
            l.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with(['{', ' ']))
        });
        let wanted = lines.filter(|l| labels.iter().all(|label| l.contains(label)));
        wanted
            .filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// Waits until a metric reaches `at_least`.
    pub(crate) async fn until(&self, name: &str, labels: &[&str], at_least: f64) {
        until(&format!("{name}{labels:?} reaches {at_least}"), || {
            self.metric(name, labels) >= at_least
        })
        .await;
    }

    /// Begins the drain, which is forced after `limit`.
    pub(crate) fn drain(&self, limit: Duration) {
        self.trigger.as_ref().unwrap().drain(limit);
    }

    /// Waits for the workers to end; `false` if they did not end within the deadline of `limit`.
    pub(crate) async fn join_workers(&mut self, limit: Duration) -> bool {
        let workers = self.engine.workers().clone();
        let joined = tokio::task::spawn_blocking(move || workers.join());
        tokio::time::timeout(canal_timing::deadline(limit), joined)
            .await
            .is_ok()
    }
}
