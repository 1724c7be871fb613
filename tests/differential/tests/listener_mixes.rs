//! Gateways and ListenerSets with random mixes of listeners of all protocols, and routes of all
//! kinds on them: everything compiles and reaches a gateway replica, which serves each open listener
//! and no closed one.

use canal_compiler::ir_ingress::{GatewayIr, ListenerIr};
use canal_differential::target::served_by_replica;
use canal_gateway_config::{PortTermination, PortView, RouteOutcome, ServiceView, Snapshot};
use canal_identity::ListenerChoice;
use canal_model::ingress::{ListenerProtocol, host_order};
use canal_model::program::{AppProtocol, HostMatch};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use crate::ingress::{IngressRequest, PARENTS, certificate, keyring};

/// Port 15008 is one that no listener may have.
const PORTS: [u16; 5] = [80, 443, 5432, 53, 15008];
const HOSTS: [&str; 6] = [
    "a.example.com",
    "b.example.com",
    "*.example.com",
    "*.a.example.com",
    "*.com",
    "not a host",
];
/// Protocols with their TLS settings.
const PROTOCOLS: [&str; 10] = [
    "HTTP",
    "HTTP, tls: {mode: Terminate}",
    "HTTPS, tls: {certificateRefs: [{name: cert}]}",
    "HTTPS, tls: {certificateRefs: [{name: missing}]}",
    "HTTPS, tls: {mode: Passthrough}",
    "TLS, tls: {mode: Passthrough}",
    "TLS, tls: {certificateRefs: [{name: cert}]}",
    "TCP",
    "UDP",
    "example.com/other",
];
const KINDS: [&str; 5] = ["HTTPRoute", "GRPCRoute", "TLSRoute", "TCPRoute", "UDPRoute"];

#[derive(Debug, Clone)]
struct WrittenListener {
    /// Names repeat now and then.
    name: u8,
    port: u16,
    protocol: &'static str,
    host: Option<&'static str>,
    kind: Option<&'static str>,
}

impl WrittenListener {
    fn yaml(&self) -> String {
        let Self { name, port, .. } = self;
        let protocol = self.protocol;
        let host = self.host.map(|host| format!(", hostname: \"{host}\""));
        let kind = self
            .kind
            .map(|kind| format!(", allowedRoutes: {{kinds: [{{kind: {kind}}}]}}"));
        format!(
            "  - {{name: l{name}, port: {port}, protocol: {protocol}{}{}}}\n",
            host.unwrap_or_default(),
            kind.unwrap_or_default()
        )
    }
}

#[derive(Debug, Clone)]
struct WrittenRoute {
    kind: &'static str,
    hosts: Vec<&'static str>,
    /// Fields of its parent.
    parent: &'static str,
    has_backend: bool,
}

impl WrittenRoute {
    fn yaml(&self, name: usize) -> String {
        let Self { kind, parent, .. } = self;
        let hosts: Vec<String> = self.hosts.iter().map(|it| format!("\"{it}\"")).collect();
        let hosts = match *kind {
            "TCPRoute" | "UDPRoute" => String::new(),
            _ => format!("  hostnames: [{}]\n", hosts.join(", ")),
        };
        let backend = if self.has_backend { "web" } else { "missing" };
        format!(
            "---\napiVersion: gateway.networking.k8s.io/v1\nkind: {kind}\nmetadata: {{name: r{name}, namespace: shop}}\n\
             spec:\n  parentRefs: [{{{parent}}}]\n{hosts}  rules: [{{backendRefs: [{{name: {backend}, port: 80}}]}}]\n"
        )
    }
}

fn listener() -> impl Strategy<Value = WrittenListener> {
    let kind = option::weighted(0.1, select(&KINDS[..]));
    let host = option::weighted(0.6, select(&HOSTS[..]));
    let fields = (
        0..12u8,
        select(&PORTS[..]),
        select(&PROTOCOLS[..]),
        host,
        kind,
    );
    fields.prop_map(|(name, port, protocol, host, kind)| WrittenListener {
        name,
        port,
        protocol,
        host,
        kind,
    })
}

fn route() -> impl Strategy<Value = WrittenRoute> {
    const PARENTS: [&str; 5] = [
        "name: public",
        "name: public, port: 443",
        "name: public, sectionName: l3",
        "kind: ListenerSet, name: more",
        "group: \"\", kind: Service, name: web",
    ];
    let hosts = vec(select(&HOSTS[..]), 0..3);
    let fields = (
        select(&KINDS[..]),
        hosts,
        select(&PARENTS[..]),
        prop::bool::weighted(0.8),
    );
    fields.prop_map(|(kind, hosts, parent, has_backend)| WrittenRoute {
        kind,
        hosts,
        parent,
        has_backend,
    })
}

/// A tenant with a Gateway and a ListenerSet.
#[derive(Debug, Clone)]
struct WrittenTenant {
    own: Vec<WrittenListener>,
    of_set: Vec<WrittenListener>,
    routes: Vec<WrittenRoute>,
    /// Whether the Gateway validates clients of its ports for HTTPS.
    validates: bool,
}

fn tenant() -> impl Strategy<Value = WrittenTenant> {
    let fields = (
        vec(listener(), 0..8),
        vec(listener(), 0..4),
        vec(route(), 0..8),
        prop::bool::weighted(0.3),
    );
    fields.prop_map(|(own, of_set, routes, validates)| WrittenTenant {
        own,
        of_set,
        routes,
        validates,
    })
}

impl WrittenTenant {
    fn yaml(&self, certificate: &str) -> String {
        let list = |listeners: &[WrittenListener]| match listeners {
            [] => "  listeners: []\n".to_owned(),
            some => {
                let all = some.iter().map(WrittenListener::yaml);
                format!("  listeners:\n{}", all.collect::<String>())
            }
        };
        let frontend = if self.validates {
            "  tls: {frontend: {default: {validation: {caCertificateRefs: [{group: \"\", kind: ConfigMap, name: clients}]}}}}\n"
        } else {
            ""
        };
        let routes = self.routes.iter().enumerate();
        let routes: String = routes.map(|(at, route)| route.yaml(at)).collect();
        format!(
            "{PARENTS}{certificate}apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: public, namespace: shop}}\n\
             spec:\n  gatewayClassName: canal\n  allowedListeners: {{namespaces: {{from: Same}}}}\n{frontend}{}\
             ---\napiVersion: gateway.networking.k8s.io/v1\nkind: ListenerSet\nmetadata: {{name: more, namespace: shop}}\n\
             spec:\n  parentRef: {{name: public}}\n{}{routes}",
            list(&self.own),
            list(&self.of_set),
        )
    }
}

/// Returns a name that the host matches.
fn sample(host: Option<&HostMatch>) -> String {
    match host {
        Some(HostMatch::Exact(name)) => name.clone(),
        Some(HostMatch::Suffix(domain)) => format!("zz{domain}"),
        None => "nothing.test".to_owned(),
    }
}

fn is_for(host: Option<&HostMatch>, name: &str) -> bool {
    match host {
        Some(HostMatch::Exact(own)) => own == name,
        Some(HostMatch::Suffix(domain)) => name.ends_with(domain.as_str()),
        None => true,
    }
}

/// Returns the listener of a port to which a name belongs.
fn owner<'a>(gateway: &'a GatewayIr, port: u16, name: &str) -> Option<&'a ListenerIr> {
    let listeners = gateway.listeners.iter();
    let of_port = listeners.filter(|it| {
        let listener = &it.listener;
        let is_served = !matches!(listener.protocol, ListenerProtocol::Other(_));
        is_served && listener.port == port && is_for(listener.host.as_ref(), name)
    });
    of_port.min_by_key(|it| {
        (
            host_order(it.listener.host.as_ref()),
            it.listener.closed.is_some(),
        )
    })
}

/// Returns whether one of the listener's routes has the name.
fn has_route(listener: &ListenerIr, name: &str) -> bool {
    let mut hosts = listener.virtual_hosts.iter();
    hosts.any(|it| is_for(it.host.as_ref(), name) && !it.routes.is_empty())
}

/// Checks that the port is served by the protocol of its listener.
fn check_port(view: &PortView, protocol: &ListenerProtocol) -> Result<(), TestCaseError> {
    let termination = view.termination.as_deref();
    let (is_right, app) = match protocol {
        ListenerProtocol::Http => (termination.is_none(), AppProtocol::Http1),
        ListenerProtocol::Https => {
            let is_right = matches!(termination, Some(PortTermination::Gateway(_)));
            (is_right, AppProtocol::Http1)
        }
        ListenerProtocol::Tls | ListenerProtocol::TerminatedTls => {
            let is_right = matches!(
                termination,
                Some(PortTermination::Passthrough | PortTermination::Relay(_))
            );
            (is_right, AppProtocol::Tcp)
        }
        ListenerProtocol::Tcp => (termination.is_none(), AppProtocol::Tcp),
        ListenerProtocol::Other(_) => (false, AppProtocol::Detect),
    };
    prop_assert!(is_right, "{protocol}: {termination:?}");
    prop_assert_eq!(view.protocol, app);
    Ok(())
}

/// Checks what a replica does for a name at a port.
fn check_name(
    gateway: &GatewayIr,
    service: &ServiceView,
    port: u16,
    name: &str,
) -> Result<(), TestCaseError> {
    let Some(owner) = owner(gateway, port, name) else {
        // A name of no listener is the subject of `ingress.rs`.
        return Ok(());
    };
    let view = service.port(port);
    prop_assert!(view.is_some(), "port {port} is not served");
    let is_open = owner.listener.closed.is_none();
    if is_open {
        check_port(view.unwrap(), &owner.listener.protocol)?;
    }
    if let Some(PortTermination::Gateway(listeners) | PortTermination::Relay(listeners)) =
        view.unwrap().termination.as_deref()
    {
        let is_passed = listeners.passes_through(Some(name));
        let choice = listeners.choose(Some(name));
        let is_terminated = matches!(choice, ListenerChoice::Terminator(_));
        // Without its Secret, an open listener has no certificate yet.
        let has_certificate = !owner.listener.certificates.is_empty();
        let terminates = is_open && owner.listener.protocol.terminates_tls();
        prop_assert_eq!(
            is_terminated,
            terminates && has_certificate,
            "{} {}",
            port,
            name
        );
        if is_open {
            prop_assert_eq!(is_passed, !terminates, "{} {}", port, name);
        }
        prop_assert!(
            !matches!(choice, ListenerChoice::NoListener),
            "{port} {name}"
        );
    }
    let routes = service.routes.as_ref().expect("a Gateway has routes");
    let request = IngressRequest {
        method: "POST",
        host: name,
        path: "/",
    };
    // Whether a rule matches does not depend on the random number, here 0.
    let (outcome, _) = routes.decide(port, &request, 0);
    let is_routed = outcome != RouteOutcome::Nowhere;
    let expected = is_open && has_route(owner, name);
    prop_assert_eq!(is_routed, expected, "{} {}: {:?}", port, name, outcome);
    Ok(())
}

fn check(text: &str, snapshot: &Snapshot, gateway: &GatewayIr) -> Result<(), TestCaseError> {
    let service = snapshot
        .tenant("alpha")
        .and_then(|tenant| tenant.service(&gateway.service));
    let open = || {
        let listeners = gateway.listeners.iter().map(|it| &it.listener);
        listeners.filter(|it| it.closed.is_none())
    };
    let Some(service) = service else {
        prop_assert_eq!(open().count(), 0, "the Gateway is not served\n{}", text);
        return Ok(());
    };
    for listener in open() {
        let name = sample(listener.host.as_ref());
        let of_name = owner(gateway, listener.port, &name).map(|it| &it.listener.name);
        // Nothing has precedence over an open listener for a name of just its own host.
        prop_assert_eq!(of_name, Some(&listener.name));
    }
    let served = gateway.ports();
    for port in service.ports.iter() {
        prop_assert!(served.contains_key(&port.port), "{} is served", port.port);
    }
    for port in PORTS {
        for listener in &gateway.listeners {
            check_name(
                gateway,
                service,
                port,
                &sample(listener.listener.host.as_ref()),
            )?;
        }
        check_name(gateway, service, port, "nothing.test")?;
    }
    Ok(())
}

#[test]
fn every_open_listener_of_any_mix_is_served() {
    let (certificate, keyring) = (certificate(), keyring());
    let clients = certificate
        .replace("kind: Secret", "kind: ConfigMap")
        .replace("name: cert,", "name: clients,")
        .replace("type: kubernetes.io/tls\n", "")
        .replace("stringData", "data")
        .replace("tls.crt", "ca.crt");
    let certificates = format!(
        "{certificate}{}---\n",
        // A ConfigMap of client CAs has no private key.
        clients.split("  tls.key").next().unwrap()
    );
    let config = ProptestConfig {
        // Fewer in debug builds, which are slower.
        cases: if cfg!(debug_assertions) { 400 } else { 4_000 },
        ..ProptestConfig::default()
    };
    let mut open = [0; 4];
    let cases = proptest::test_runner::TestRunner::new(config);
    let counted = std::cell::RefCell::new(&mut open);
    let mut cases = cases;
    let found = cases.run(&tenant(), |tenant| {
        let text = tenant.yaml(&certificates);
        let (ir, snapshot) = served_by_replica(&text, &keyring);
        let gateway = &ir.ingress[0];
        for listener in gateway.listeners.iter().map(|it| &it.listener) {
            let at = match listener.protocol {
                ListenerProtocol::Http => 0,
                ListenerProtocol::Https => 1,
                ListenerProtocol::Tls | ListenerProtocol::TerminatedTls => 2,
                ListenerProtocol::Tcp => 3,
                ListenerProtocol::Other(_) => continue,
            };
            counted.borrow_mut()[at] += u32::from(listener.closed.is_none());
        }
        check(&text, &snapshot, gateway)
    });
    if let Err(error) = found {
        panic!("{error}");
    }
    // Otherwise little would have been checked.
    assert!(
        // A twentieth of the fewest cases.
        open.iter().all(|count| *count > 20),
        "open listeners: {open:?}"
    );
}
