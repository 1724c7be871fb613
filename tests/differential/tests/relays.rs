//! Listeners of generated Gateways that relay connections, as gateway replicas serve them, compared
//! with the oracle. Every tenant follows from its seed.

use canal_compiler::ir_ingress::GatewayIr;
use canal_compiler::oracle::RoutingVerdict;
use canal_compiler::oracle_ingress::ArrivalTransport;
use canal_compiler::oracle_relay::{RelayVerdict, decide};
use canal_differential::target::served_by_replica;
use canal_gateway_config::{PortTermination, RouteOutcome, Snapshot};
use canal_identity::{ClientIdentityFactory, ListenerChoice};
use canal_model::ids::ServiceKey;
use canal_model::program::AppProtocol;

use crate::ingress::{Draw, HOSTS, IngressRequest, NAMES, PARENTS, certificate, keyring};

/// Number of tenants with random objects; fewer in debug builds, which are slower.
const TENANTS: u64 = if cfg!(debug_assertions) { 500 } else { 5_000 };
const PORTS: [u16; 3] = [443, 5432, 9090];

/// Returns the objects of a tenant: a Gateway whose listeners mostly relay, and routes on them.
pub(crate) fn objects(draw: &mut Draw, certificate: &str) -> String {
    let mut text = PARENTS.to_owned()
        + certificate
        + "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: public, namespace: shop}\n\
           spec:\n  gatewayClassName: canal\n  listeners:\n";
    let listeners = 1 + draw.below(5);
    for n in 0..listeners {
        // The third port has no listener, so that connections meet one without.
        let port = draw.of(&PORTS[..2]);
        let host = match draw.below(4) {
            0 => String::new(),
            _ => format!(", hostname: \"{}\"", draw.of(&HOSTS)),
        };
        // Some listeners are closed: of another protocol, without a certificate, or by a conflict.
        let (protocol, tls) = match (port, draw.below(12)) {
            // Most listeners on 5432 are for TCP, and those on 443 for TLS of both modes.
            (5432, 0..8) => ("TCP", ""),
            (_, 0) => ("HTTPS", "mode: Terminate, certificateRefs: [{name: cert}]"),
            (_, 1) => ("TLS", "certificateRefs: [{name: missing}]"),
            (_, 2..7) => ("TLS", "certificateRefs: [{name: cert}]"),
            _ => ("TLS", "mode: Passthrough"),
        };
        text += &format!(
            "  - {{name: l{n}, port: {port}, protocol: {protocol}{host}{}}}\n",
            match tls {
                "" => String::new(),
                tls => format!(", tls: {{{tls}}}"),
            }
        );
    }
    for n in 0..1 + draw.below(5) {
        // TLSRoutes are drawn more often, because only they choose by the server name.
        let kind = draw.of(&["TLSRoute", "TLSRoute", "TCPRoute"]);
        let hosts: Vec<String> = (0..1 + draw.below(3))
            .map(|_| format!("\"{}\"", draw.of(&HOSTS)))
            .collect();
        let hosts = match *kind {
            "TLSRoute" => format!("  hostnames: [{}]\n", hosts.join(", ")),
            _ => String::new(),
        };
        // One route in three attaches to one listener only, and the others to all.
        let section = match draw.below(3) {
            0 => format!(", sectionName: l{}", draw.below(listeners)),
            _ => String::new(),
        };
        // Creation times repeat, so that both the older route and, at a tie, the name decide.
        let created = format!("2026-01-0{}T00:00:00Z", 1 + draw.below(3));
        text += &format!(
            "---\napiVersion: gateway.networking.k8s.io/v1\nkind: {kind}\n\
             metadata: {{name: r{n}, namespace: shop, creationTimestamp: \"{created}\"}}\n\
             spec:\n  parentRefs: [{{name: public{section}}}]\n{hosts}\
             \x20 rules: [{{backendRefs: [{{name: web, port: 80}}]}}]\n"
        );
    }
    text
}

/// Returns what a replica does with a connection: how it relays it and by which rule, or how it ends
/// it.
pub(crate) fn served(
    snapshot: &Snapshot,
    key: &ServiceKey,
    transport: ArrivalTransport<'_>,
    port: u16,
) -> String {
    let service = snapshot
        .tenant("alpha")
        .and_then(|tenant| tenant.service(key));
    let view = service.and_then(|service| service.port(port));
    // The port has no listener, or those it has serve HTTP and relay nothing.
    let Some(view) = view.filter(|view| view.protocol == AppProtocol::Tcp) else {
        return "no listener".to_owned();
    };
    let name = match transport {
        ArrivalTransport::Plaintext => None,
        ArrivalTransport::Tls(name) => name,
    };
    let how = match (view.termination.as_deref(), transport) {
        (None, _) => "plain",
        (Some(_), ArrivalTransport::Plaintext) => return "reset".to_owned(),
        (Some(PortTermination::Passthrough), _) => "passed",
        (Some(PortTermination::Relay(listeners)), _) if listeners.passes_through(name) => "passed",
        (Some(PortTermination::Relay(listeners)), _) => match listeners.choose(name) {
            ListenerChoice::NoListener => return "unrecognized_name".to_owned(),
            ListenerChoice::NoCertificate => return "no_certificate".to_owned(),
            ListenerChoice::Terminator(_) => "terminated",
        },
        (other, _) => panic!("{other:?}"),
    };
    // A port that is relayed as plain TCP knows no server name.
    let host = match how {
        "plain" => "",
        _ => name.unwrap_or_default(),
    };
    let routes = service.and_then(|service| service.routes.as_ref());
    let routes = routes.expect("a Gateway has routes");
    let connection = IngressRequest {
        method: "",
        host,
        path: "/",
    };
    // Each rule has one backend, so the random number 0 decides nothing.
    match routes.decide(port, &connection, 0) {
        (RouteOutcome::Target(_), Some(found)) => format!("{how} {}", found.rule.key),
        (RouteOutcome::Nowhere, _) => match how {
            "terminated" => "terminated and reset".to_owned(),
            _ => "reset".to_owned(),
        },
        other => panic!("{other:?}"),
    }
}

/// Returns what the oracle says that a replica does with a connection.
pub(crate) fn expected(gateway: &GatewayIr, transport: ArrivalTransport<'_>, port: u16) -> String {
    let is_tcp = |gateway: &GatewayIr| {
        let of_port = gateway.ports().get(&port).map(ToString::to_string);
        of_port.as_deref() == Some("TCP")
    };
    let text = match decide(gateway, transport, port) {
        RelayVerdict::NoListener => "no listener",
        RelayVerdict::WrongTransport | RelayVerdict::NoRoute => "reset",
        RelayVerdict::NoServerName => "unrecognized_name",
        RelayVerdict::ClosedToHandshakes(_) => "no_certificate",
        RelayVerdict::Relayed {
            is_terminated,
            verdict,
            ..
        } => match verdict {
            RoutingVerdict::NoRule if is_terminated => "terminated and reset",
            RoutingVerdict::NoRule => "reset",
            RoutingVerdict::Split { rule, .. } => {
                let how = match is_terminated {
                    true => "terminated",
                    false if is_tcp(gateway) => "plain",
                    false => "passed",
                };
                return format!("{how} {rule}");
            }
            other => panic!("{other:?}"),
        },
    };
    text.to_owned()
}

/// The number of compared connections, and of those that met what the test is about.
#[derive(Debug, Default)]
struct ConnectionCounts {
    compared: usize,
    plain: usize,
    passed: usize,
    terminated: usize,
    refused: usize,
}

fn compare(seed: u64, text: &str, keyring: &ClientIdentityFactory, counts: &mut ConnectionCounts) {
    let (ir, snapshot) = served_by_replica(text, keyring);
    let gateway = &ir.ingress[0];
    for port in PORTS {
        let names = NAMES.map(ArrivalTransport::Tls);
        for transport in [ArrivalTransport::Plaintext].into_iter().chain(names) {
            let expected = expected(gateway, transport, port);
            let got = served(&snapshot, &gateway.service, transport, port);
            assert_eq!(
                got, expected,
                "seed {seed}: {port} {transport:?}\n{text}\n{ir}"
            );
            counts.compared += 1;
            counts.plain += usize::from(got.starts_with("plain "));
            counts.passed += usize::from(got.starts_with("passed "));
            counts.terminated += usize::from(got.starts_with("terminated "));
            counts.refused += usize::from(!got.contains('/') && got != "no listener");
        }
    }
}

#[test]
fn listeners_relay_as_the_oracle_says() {
    let mut counts = ConnectionCounts::default();
    let (certificate, keyring) = (certificate(), keyring());
    for seed in 0..TENANTS {
        let text = objects(&mut Draw(seed), &certificate);
        compare(seed, &text, &keyring, &mut counts);
    }
    counts.check();
}

impl ConnectionCounts {
    /// Checks that enough connections were compared, and enough of each kind.
    fn check(&self) {
        let compared = self.compared;
        let counts = self;
        let least = [
            counts.plain,
            counts.passed,
            counts.terminated,
            counts.refused,
        ]
        .into_iter()
        .min();
        assert!(
            compared >= 9_000 && least.is_some_and(|least| least * 100 > compared),
            "{counts:?}"
        );
    }
}

/// Returns the objects of a tenant: a Gateway of Istio with some servers, and VirtualServices with
/// rules of each kind.
pub(crate) fn istio_objects(draw: &mut Draw, certificate: &str) -> String {
    let mut text = PARENTS.to_owned()
        + certificate
        + "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {name: public, namespace: shop}\n\
           spec:\n  selector: {istio: ingressgateway}\n  servers:\n";
    for n in 0..1 + draw.below(5) {
        // As in `objects`, the third port stays without a server.
        let port = draw.of(&PORTS[..2]);
        let host = match draw.below(4) {
            0 => "*",
            _ => *draw.of(&HOSTS),
        };
        // Some servers are closed, and some are left out because of a conflict.
        let (protocol, tls) = match (port, draw.below(12)) {
            // As in `objects`, most servers on 5432 are for TCP, and those on 443 for TLS of both
            // modes.
            (5432, 0..8) => ("TCP", ""),
            (_, 0) => ("HTTPS", ", tls: {mode: SIMPLE, credentialName: cert}"),
            (_, 1) => ("TLS", ", tls: {mode: SIMPLE, credentialName: missing}"),
            (_, 2..7) => ("TLS", ", tls: {mode: SIMPLE, credentialName: cert}"),
            _ => ("TLS", ", tls: {mode: PASSTHROUGH}"),
        };
        text += &format!(
            "  - {{port: {{number: {port}, name: p{n}, protocol: {protocol}}}, hosts: [\"{host}\"]{tls}}}\n"
        );
    }
    for n in 0..1 + draw.below(4) {
        let host = match draw.below(2) {
            0 => "*",
            _ => *draw.of(&HOSTS),
        };
        // Creation times repeat, as in `objects`.
        let created = format!("2026-01-0{}T00:00:00Z", 1 + draw.below(3));
        text += &format!(
            "---\napiVersion: networking.istio.io/v1\nkind: VirtualService\n\
             metadata: {{name: v{n}, namespace: shop, creationTimestamp: \"{created}\"}}\n\
             spec:\n  hosts: [\"{host}\"]\n  gateways: [public]\n"
        );
        for list in ["tls", "tcp", "http"] {
            let count = draw.below(3);
            // A key without entries would be null, not an empty list.
            if count > 0 {
                text += &format!("  {list}:\n");
            }
            for _ in 0..count {
                // One rule in three is of one port only.
                let port = match draw.below(3) {
                    0 => format!("port: {}, ", draw.of(&PORTS[..2])),
                    _ => String::new(),
                };
                let names: Vec<String> = (0..1 + draw.below(2))
                    .map(|_| format!("\"{}\"", draw.of(&HOSTS)))
                    .collect();
                let condition = match list {
                    "tls" => format!("match: [{{{port}sniHosts: [{}]}}], ", names.join(", ")),
                    "tcp" => format!("match: [{{{port}gateways: [public]}}], "),
                    // Rules of `http` apply to no connection that is relayed, so they need no
                    // condition.
                    _ => String::new(),
                };
                text += &format!(
                    "  - {{{condition}route: [{{destination: {{host: web, port: {{number: 80}}}}}}]}}\n"
                );
            }
        }
    }
    text
}

#[test]
fn servers_of_istio_relay_as_the_oracle_says() {
    let mut counts = ConnectionCounts::default();
    let (certificate, keyring) = (certificate(), keyring());
    for seed in 0..TENANTS {
        let text = istio_objects(&mut Draw(seed), &certificate);
        compare(seed, &text, &keyring, &mut counts);
    }
    counts.check();
}
