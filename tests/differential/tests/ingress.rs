//! Listeners of generated Gateways as gateway replicas serve them, compared with the oracle. Every
//! tenant follows from its seed.

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_compiler::ir_ingress::GatewayIr;
use canal_compiler::oracle::{OracleClient, OracleRequest, RoutingVerdict};
use canal_compiler::oracle_ingress::{ArrivalTransport, IngressVerdict, decide, validation_of};
use canal_differential::target::served_by_replica;
use canal_gateway_config::{ListenerClients, PortTermination, RouteOutcome, Snapshot};
use canal_identity::{ClientIdentityFactory, ListenerChoice};
use canal_model::client_attributes::SCHEME;
use canal_model::client_validation::ClientValidationMode;
use canal_model::identity::Identity;
use canal_model::ids::ServiceKey;
use canal_model::listener_filters::ListenerFilter;
use canal_router::{RoutableRequest, routing_path};
use canal_runtime::metrics::Registry;
use canal_tls::{Credential, TrustStore};

/// Number of tenants with random objects; fewer in debug builds, which are slower. Nobody measured
/// how many are enough.
const TENANTS: u64 = if cfg!(debug_assertions) { 200 } else { 2_000 };
pub(crate) const HOSTS: [&str; 7] = [
    "a.example.com",
    "b.example.com",
    "*.example.com",
    "*.com",
    "x.a.example.com",
    "*.a.example.com",
    "other.test",
];
const ASKED: [&str; 9] = [
    "a.example.com",
    "A.example.com.",
    "b.example.com",
    "x.a.example.com",
    "y.a.example.com",
    "example.com",
    "other.test",
    "nothing.test",
    "",
];
/// Server names that clients send.
pub(crate) const NAMES: [Option<&str>; 5] = [
    None,
    Some("a.example.com"),
    Some("y.a.example.com"),
    Some("b.example.com"),
    Some("other.test"),
];
const PATHS: [&str; 4] = ["/", "/one", "/one/two", "/three"];
/// Ports of requests. No listener has the last one, so that requests to it find none.
const PORTS: [u16; 3] = [80, 443, 9090];
const REQUESTS: [(&str, &str); 6] = [
    ("GET", "/"),
    ("GET", "/one"),
    ("GET", "//one/./two"),
    ("GET", "/one/"),
    ("POST", "/one/two"),
    ("POST", "/four/two"),
];

/// A generator of numbers (splitmix64).
pub(crate) struct Draw(pub(crate) u64);

impl Draw {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }

    pub(crate) fn of<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

pub(crate) const PARENTS: &str = "apiVersion: canal.mesh/v1
kind: Tenant
metadata: {name: alpha}
spec: {vni: 101, trustDomain: alpha.example, podCidrs: [10.1.0.0/16], gatewayCidrs: [10.250.0.0/20]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.96.0.1, selector: {app: web}, ports: [{name: http, port: 80}]}
---
";

/// Returns the objects of a tenant: a Gateway with some listeners, and some routes on them.
pub(crate) fn objects(draw: &mut Draw, certificate: &str) -> String {
    let mut text = PARENTS.to_owned()
        + certificate
        + "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: public, namespace: shop}\n\
           spec:\n  gatewayClassName: canal\n  listeners:\n";
    // Gateways of one to five listeners on two ports and seven hosts conflict now and then.
    let listeners = 1 + draw.below(5);
    for n in 0..listeners {
        // The third port has no listener, so that `compare` meets one without.
        let port = draw.of(&PORTS[..2]);
        let host = match draw.below(3) {
            0 => String::new(),
            _ => format!(", hostname: \"{}\"", draw.of(&HOSTS)),
        };
        // Some listeners are closed: of another protocol, without a certificate, or by a conflict.
        let protocol = match (port, draw.below(4)) {
            // Most listeners on 443 use HTTPS, and few on 80, because mixed protocols conflict.
            (80, 0) | (443, 1..) => "HTTPS",
            _ => "HTTP",
        };
        // One certificate in six is missing, so that most listeners with TLS are open.
        let tls = match (protocol, draw.below(6)) {
            ("HTTP", _) => "",
            (_, 0) => ", tls: {certificateRefs: [{name: missing}]}",
            _ => ", tls: {certificateRefs: [{name: cert}]}",
        };
        text += &format!("  - {{name: l{n}, port: {port}, protocol: {protocol}{host}{tls}}}\n");
    }
    let mut counts = [0; 2];
    for _ in 0..1 + draw.below(5) {
        let hosts: Vec<String> = (0..draw.below(4))
            .map(|_| format!("\"{}\"", draw.of(&HOSTS)))
            .collect();
        // One route in three attaches to one listener only, and the others to all.
        let section = match draw.below(3) {
            0 => format!(", sectionName: l{}", draw.below(listeners)),
            _ => String::new(),
        };
        // Routes of both kinds have hosts in common; the older one keeps them.
        let is_grpc = draw.below(6) == 0;
        let kind = if is_grpc { "GRPCRoute" } else { "HTTPRoute" };
        // A route of each kind may have the same name.
        let name = counts[usize::from(is_grpc)];
        counts[usize::from(is_grpc)] += 1;
        // Creation times repeat, so that both the older route and, at a tie, the name decide.
        let created = format!("2026-01-0{}T00:00:00Z", 1 + draw.below(3));
        text += &format!(
            "---\napiVersion: gateway.networking.k8s.io/v1\nkind: {kind}\n\
             metadata: {{name: r{name}, namespace: shop, creationTimestamp: \"{created}\"}}\n\
             spec:\n  parentRefs: [{{name: public{section}}}]\n  hostnames: [{}]\n  rules:\n",
            hosts.join(", ")
        );
        for _ in 0..1 + draw.below(3) {
            let kind = draw.of(&["Exact", "PathPrefix"]);
            let path = draw.of(&PATHS);
            let condition = match draw.of(&["service: one", "service: one, method: two", ""]) {
                // Only a GRPCRoute matches by service and method.
                _ if !is_grpc => format!("path: {{type: {kind}, value: {path}}}"),
                &"" => String::new(),
                names => format!("method: {{{names}}}"),
            };
            text += &format!(
                "  - {{matches: [{{{condition}}}], backendRefs: [{{name: web, port: 80}}]}}\n"
            );
        }
    }
    text
}

pub(crate) struct IngressRequest<'a> {
    pub(crate) method: &'a str,
    pub(crate) host: &'a str,
    pub(crate) path: &'a str,
}

impl RoutableRequest for IngressRequest<'_> {
    fn host(&self) -> &[u8] {
        self.host.as_bytes()
    }
    fn method(&self) -> &[u8] {
        self.method.as_bytes()
    }
    fn path(&self) -> &[u8] {
        self.path.as_bytes()
    }
    fn query(&self) -> Option<&[u8]> {
        None
    }
    fn header(&self, _: &str, _: &mut dyn FnMut(&[u8])) {}
}

/// A request on a connection.
pub(crate) struct ArrivedRequest<'a>(
    pub(crate) IngressRequest<'a>,
    pub(crate) ArrivalTransport<'a>,
);

impl RoutableRequest for ArrivedRequest<'_> {
    fn host(&self) -> &[u8] {
        self.0.host()
    }
    fn method(&self) -> &[u8] {
        self.0.method()
    }
    fn path(&self) -> &[u8] {
        self.0.path()
    }
    fn query(&self) -> Option<&[u8]> {
        self.0.query()
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        self.0.header(name, visit);
    }
    fn client_attribute(&self, name: &str) -> Option<&[u8]> {
        match (name, self.1) {
            (SCHEME, ArrivalTransport::Plaintext) => Some(b"http"),
            (SCHEME, ArrivalTransport::Tls(_)) => Some(b"https"),
            _ => None,
        }
    }
}

/// Returns a Secret with a certificate.
pub(crate) fn certificate() -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["a.example.com".to_owned()]).unwrap();
    let indented = |pem: String| pem.replace('\n', "\n    ");
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: cert, namespace: shop}}\ntype: kubernetes.io/tls\n\
         stringData:\n  tls.crt: |\n    {}\n  tls.key: |\n    {}\n---\n",
        indented(params.self_signed(&key).unwrap().pem()),
        indented(key.serialize_pem())
    )
}

/// Returns a Secret with the authorities of clients, for servers of a Gateway of Istio.
pub(crate) fn authorities() -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let pem = params.self_signed(&key).unwrap().pem();
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: cert-cacert, namespace: shop}}\n\
         stringData:\n  ca.crt: |\n    {}\n---\n",
        pem.trim_end().replace('\n', "\n    ")
    )
}

/// Returns the mode in which a replica validates the clients of a handshake, if it does.
fn validation_served(
    snapshot: &Snapshot,
    key: &ServiceKey,
    port: u16,
    server_name: Option<&str>,
) -> Option<ClientValidationMode> {
    let service = snapshot.tenant("alpha")?.service(key)?;
    let Some(PortTermination::Gateway(listeners)) = service.port(port)?.termination.as_deref()
    else {
        return None;
    };
    match listeners.clients(server_name) {
        ListenerClients::Unasked => None,
        ListenerClients::Validated(verifier) => Some(verifier.mode()),
        ListenerClients::Refused => panic!("the authorities are valid"),
    }
}

/// Returns what a replica does with a request: the rule, a status, or the end of the connection.
pub(crate) fn served(
    snapshot: &Snapshot,
    key: &ServiceKey,
    transport: ArrivalTransport<'_>,
    port: u16,
    request: IngressRequest<'_>,
) -> String {
    let IngressRequest { host, path, .. } = request;
    let service = snapshot
        .tenant("alpha")
        .and_then(|tenant| tenant.service(key));
    // No listener has the port.
    let Some(view) = service.and_then(|service| service.port(port)) else {
        return "reset".to_owned();
    };
    assert!(view.routed, "a Gateway has no endpoints of its own");
    let routes = service.and_then(|service| service.routes.as_ref());
    let routes = routes.expect("a Gateway has routes");
    match (transport, view.termination.as_deref()) {
        (ArrivalTransport::Plaintext, None) => {}
        (ArrivalTransport::Tls(name), Some(PortTermination::Gateway(listeners))) => {
            match listeners.choose(name) {
                ListenerChoice::NoListener => return "unrecognized_name".to_owned(),
                ListenerChoice::NoCertificate => return "no_certificate".to_owned(),
                ListenerChoice::Terminator(_) => {}
            }
            if routes.is_misdirected(port, name, host.as_bytes()) {
                return "421".to_owned();
            }
        }
        // TLS came to a port without it, or plaintext to a port with it.
        _ => return "reset".to_owned(),
    }
    let filters = routes.listener_filters(port, host.as_bytes());
    if filters.is_some_and(|filters| filters.contains(&ListenerFilter::Refuse)) {
        return "500".to_owned();
    }
    let normal = routing_path(path.as_bytes()).filter(|_| view.routed_by_path);
    // As in the gateway: a path is normalized only for rules that read it, and a normal one stays.
    let path = normal.as_deref().unwrap_or(path);
    let request = ArrivedRequest(IngressRequest { path, ..request }, transport);
    // Each rule has one backend, so the random number 0 decides nothing.
    match routes.decide(port, &request, 0) {
        (RouteOutcome::Target(_) | RouteOutcome::Answer, Some(found)) => found.rule.key.to_string(),
        (RouteOutcome::Nowhere, _) => "404".to_owned(),
        other => panic!("{other:?}"),
    }
}

/// Returns what the oracle says that a replica does with a request.
pub(crate) fn expected(
    gateway: &GatewayIr,
    transport: ArrivalTransport<'_>,
    request: &OracleRequest,
) -> String {
    let text = match decide(gateway, transport, request) {
        IngressVerdict::NoListener | IngressVerdict::WrongTransport => "reset",
        IngressVerdict::NoServerName => "unrecognized_name",
        IngressVerdict::ClosedToHandshakes(_) => "no_certificate",
        IngressVerdict::Misdirected => "421",
        IngressVerdict::NoHost | IngressVerdict::Closed(_) => "404",
        IngressVerdict::RefusedByFilter(_) => "500",
        IngressVerdict::Routed { verdict, .. } => match verdict {
            RoutingVerdict::NoRule => "404",
            RoutingVerdict::Split { rule, .. } | RoutingVerdict::Answer { rule, .. } => {
                return rule.to_string();
            }
            other => panic!("{other:?}"),
        },
    };
    text.to_owned()
}

/// Returns identities that make no certificate, which listeners do not need.
pub(crate) fn keyring() -> ClientIdentityFactory {
    let trust = TrustStore::new(&Registry::new());
    ClientIdentityFactory::of(
        Arc::new(|id: &Identity| Credential::empty(id.clone()).1),
        None,
        trust,
    )
}

/// The number of compared requests, and of those that met what the test is about.
#[derive(Debug, Default)]
struct RequestCounts {
    compared: usize,
    /// Requests by the kind of the object that has their rule.
    routed: BTreeMap<String, usize>,
    secured: usize,
    /// Handshakes with listeners that validate clients.
    validated: usize,
    /// Arrivals at ports of the PROXY protocol.
    proxied: usize,
    /// Requests that a filter refuses whose server is missing.
    refused: usize,
}

/// Compares a replica with the oracle for many requests to the first Gateway of a tenant.
fn compare(seed: u64, text: &str, keyring: &ClientIdentityFactory, counts: &mut RequestCounts) {
    let (ir, snapshot) = served_by_replica(text, keyring);
    let gateway = &ir.ingress[0];
    let transports = || {
        let names = NAMES.map(ArrivalTransport::Tls);
        [ArrivalTransport::Plaintext].into_iter().chain(names)
    };
    let arrivals = PORTS
        .into_iter()
        .flat_map(|port| transports().map(move |transport| (port, transport)));
    for (port, transport) in arrivals {
        let tenant = snapshot.tenant("alpha").unwrap();
        let view = tenant.service(&gateway.service);
        let is_proxied = view
            .and_then(|view| view.port(port))
            .map(|it| it.is_proxied);
        let is_asked = is_proxied.map(|_| gateway.proxied_ports.contains(&port));
        assert_eq!(is_proxied, is_asked, "seed {seed}: {port}\n{text}\n{ir}");
        counts.proxied += usize::from(is_proxied == Some(true));
        if let ArrivalTransport::Tls(name) = transport {
            let expected = validation_of(gateway, port, name).map(|it| it.mode);
            let got = validation_served(&snapshot, &gateway.service, port, name);
            assert_eq!(got, expected, "seed {seed}: {port} {name:?}\n{text}\n{ir}");
            counts.validated += usize::from(got.is_some());
        }
        for host in ASKED {
            for (method, path) in REQUESTS {
                let request = OracleRequest {
                    service: gateway.service.clone(),
                    port,
                    host: host.to_owned(),
                    method: method.to_owned(),
                    target: path.to_owned(),
                    headers: Vec::new(),
                    client: OracleClient::default(),
                };
                let expected = expected(gateway, transport, &request);
                let sent = IngressRequest { method, host, path };
                let got = served(&snapshot, &gateway.service, transport, port, sent);
                assert_eq!(
                    got, expected,
                    "seed {seed}: {port} {transport:?} {host} {method} {path}\n{text}\n{ir}"
                );
                counts.compared += 1;
                counts.refused += usize::from(got == "500");
                // A rule's key is tenant/kind/namespace/name/rule.
                if let Some(kind) = got.split('/').nth(1) {
                    *counts.routed.entry(kind.to_owned()).or_default() += 1;
                }
                let is_handshake = got != "reset" && transport != ArrivalTransport::Plaintext;
                counts.secured += usize::from(is_handshake);
            }
        }
    }
}

#[test]
fn listeners_route_as_the_oracle_says() {
    let mut counts = RequestCounts::default();
    let (certificate, keyring) = (certificate(), keyring());
    for seed in 0..TENANTS {
        let mut text = objects(&mut Draw(seed), &certificate);
        // One tenant in four has a filter, whose server is missing in half of them.
        if seed % 4 == 0 {
            let server = if seed % 8 == 0 { "gone" } else { "web" };
            let filter = format!(
                "{{name: l0, filters: {{requests: [{{type: ExternalAuth, externalAuth: {{protocol: HTTP, backendRef: {{name: {server}, port: 80}}}}}}]}},"
            );
            text = text.replacen("{name: l0,", &filter, 1);
        }
        compare(seed, &text, &keyring, &mut counts);
    }
    let compared = counts.compared;
    assert!(
        compared > 20_000
            && counts.refused > 100
            && counts.routed["HTTPRoute"] * 40 > compared
            && counts.secured * 10 > compared
            && counts.routed["GRPCRoute"] > 100,
        "{counts:?}"
    );
}

/// Returns the objects of a tenant: a Gateway of Istio with some servers, and VirtualServices.
pub(crate) fn istio_objects(draw: &mut Draw, certificate: &str) -> String {
    let proxied = draw.of(&["", ", annotations: {canal.mesh/proxy-protocol: \"443\"}"]);
    let mut text = format!(
        "{PARENTS}{certificate}apiVersion: networking.istio.io/v1\nkind: Gateway\n\
         metadata: {{name: public, namespace: shop{proxied}}}\n\
         spec:\n  selector: {{istio: ingressgateway}}\n  servers:\n"
    );
    for n in 0..1 + draw.below(4) {
        // As in `objects`, the third port stays without a server.
        let port = draw.of(&PORTS[..2]);
        let hosts: Vec<String> = (0..1 + draw.below(2))
            // Hosts of another namespace take no request here, and `*` takes all, so both are drawn
            // less often. Nobody measured the weights.
            .map(|_| match draw.below(4) {
                0 => "\"*\"".to_owned(),
                // VirtualServices of another namespace than theirs.
                1 => format!("\"other/{}\"", draw.of(&HOSTS)),
                _ => format!("\"{}\"", draw.of(&HOSTS)),
            })
            .collect();
        // Some servers are closed, and some are left out because of a conflict.
        let (protocol, tls) = match (port, draw.below(6)) {
            (80, 0) => ("HTTP", ", tls: {httpsRedirect: true}"),
            (80, _) => ("HTTP", ""),
            // The two modes of client certificates alternate.
            (_, 0) if n % 2 == 0 => ("HTTPS", ", tls: {mode: MUTUAL, credentialName: cert}"),
            (_, 0) => (
                "HTTPS",
                ", tls: {mode: OPTIONAL_MUTUAL, credentialName: cert}",
            ),
            (_, 1) => ("HTTPS", ", tls: {mode: SIMPLE, credentialName: missing}"),
            (_, 2) => ("TLS", ", tls: {mode: PASSTHROUGH}"),
            _ => ("HTTPS", ", tls: {mode: SIMPLE, credentialName: cert}"),
        };
        text += &format!(
            "  - {{port: {{number: {port}, name: p{n}, protocol: {protocol}}}, hosts: [{}]{tls}}}\n",
            hosts.join(", ")
        );
    }
    for n in 0..1 + draw.below(4) {
        let hosts: Vec<String> = (0..1 + draw.below(2))
            .map(|_| match draw.below(4) {
                0 => "\"*\"".to_owned(),
                _ => format!("\"{}\"", draw.of(&HOSTS)),
            })
            .collect();
        // There is no Gateway in namespace `other`.
        let gateways = draw.of(&["public", "shop/public, mesh", "public, other/public"]);
        // Creation times repeat, as in `objects`.
        let created = format!("2026-01-0{}T00:00:00Z", 1 + draw.below(3));
        text += &format!(
            "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\n\
             metadata: {{name: v{n}, namespace: shop, creationTimestamp: \"{created}\"}}\n\
             spec:\n  hosts: [{}]\n  gateways: [{gateways}]\n  http:\n",
            hosts.join(", ")
        );
        for _ in 0..1 + draw.below(3) {
            let (kind, path) = (draw.of(&["exact", "prefix"]), draw.of(&PATHS));
            // Most rules select paths, because a rule without a condition hides those behind it.
            let port = draw.of(&PORTS[..2]);
            let scheme = draw.of(&["http", "https"]);
            let condition = match draw.below(8) {
                0 => String::new(),
                // A match of the mesh matches no request at a Gateway.
                1 => "match: [{gateways: [mesh]}], ".to_owned(),
                2 => format!("match: [{{gateways: [public], uri: {{{kind}: {path}}}}}], "),
                // A port for which the Gateway has no server matches nothing, and one without a path
                // hides the rules behind it at that port only.
                3 => format!("match: [{{port: {port}, uri: {{{kind}: {path}}}}}], "),
                4 => format!("match: [{{port: {port}}}], "),
                5 => format!("match: [{{scheme: {{exact: {scheme}}}, uri: {{{kind}: {path}}}}}], "),
                _ => format!("match: [{{uri: {{{kind}: {path}}}}}], "),
            };
            text += &format!("  - {{{condition}route: [{{destination: {{host: web}}}}]}}\n");
        }
    }
    text
}

#[test]
fn gateways_of_istio_route_as_the_oracle_says() {
    let mut counts = RequestCounts::default();
    let (secrets, keyring) = (certificate() + &authorities(), keyring());
    for seed in 0..TENANTS {
        let text = istio_objects(&mut Draw(seed), &secrets);
        compare(seed, &text, &keyring, &mut counts);
    }
    let compared = counts.compared;
    assert!(
        compared > 20_000
            && counts.routed["VirtualService"] * 40 > compared
            && counts.routed["Gateway.networking.istio.io"] > 100
            && counts.validated > 50
            && counts.proxied > 100
            && counts.secured * 10 > compared,
        "{counts:?}"
    );
}
