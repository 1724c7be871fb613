//! One limit of each family is reached by alpha, whose shares are small here: its holder is refused
//! and counted, while beta's clients, whose timeouts are long, get all their responses. Nothing
//! here depends on time.

use std::net::SocketAddr;
use std::time::Duration;

use canal_e2e::controller::Caller;
use canal_e2e::credential::request;
use canal_e2e::flood::{ConnectionFlood, Hold};
use canal_e2e::{Mesh, until};
use canal_model::program::ResourceKind;
use canal_model::share::ShareKind;
use canal_timing::deadline;
use canal_wire::keyrpc::PORT;

use super::control::{COMPONENT, padded};
use super::exhaustion_world::{ALPHA, ALPHA_NODE, ALPHA_WEB, ExhaustionWorld};
use super::gateway::half_hello;
use super::victim::assert_served;

/// Alpha's shares, as in `spec.shares` of its Tenant.
const SHARES: &str = "{gatewayConnections: 40, gatewayUnauthenticated: 20, gatewayHandshakes: 4, gatewayRequests: 8, certificates: 1, \
                      controllerUnauthenticated: 50, controllerStreams: 1, configurationBytes: 1000000, compiledResources: 2000, \
                      routeTableBytes: 20000000}";
/// Duration of an attack, which is repeated until a refusal is counted. Long enough for a
/// connection and its refusal; several attacks are short so that all cases end in minutes.
const LASTS: Duration = Duration::from_millis(800);
/// A refusal is visible in metrics within this time. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const SEEN_WITHIN: Duration = Duration::from_secs(8);

/// A limit, and an attack that reaches it.
struct LimitCase {
    name: &'static str,
    /// The share of alpha's that is full; `None` if the limit belongs to source networks.
    share: Option<ShareKind>,
    attack: fn(&ExhaustionWorld),
    /// Returns the number of refusals so far.
    refusals: fn(&Mesh) -> u64,
}

/// Sets small shares in alpha's Tenant object.
pub(super) fn restrict_alpha(mesh: &Mesh) {
    let path = mesh.world.dir().join("config/alpha/_tenant.yaml");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let restricted = text.replacen("\nspec:\n", &format!("\nspec:\n  shares: {SHARES}\n"), 1);
    assert_ne!(text, restricted, "the Tenant has a spec");
    std::fs::write(&path, restricted).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

/// Returns how often a share of alpha's was full: the new holder was refused, or the oldest gave
/// way.
fn full(mesh: &Mesh, kind: &str, limit: &str) -> u64 {
    let labels = format!("limit=\"{limit}\"");
    ["canal_share_refused_total", "canal_share_revoked_total"]
        .map(|family| mesh.counted_at(kind, family, &[&labels]))
        .iter()
        .sum()
}

fn flood(setup: &ExhaustionWorld, host: &str, to: SocketAddr, connections: usize, hold: Hold<'_>) {
    ConnectionFlood {
        host,
        to,
        connections,
        hold,
        lasts: LASTS,
    }
    .run(&setup.mesh.world);
}

/// Sends requests whose bodies do not end, which stay in flight.
fn unfinished_requests(setup: &ExhaustionWorld) {
    let (ip, port) = ALPHA_WEB.split_once(':').expect("an address with a port");
    let script = format!(
        "for i in $(seq 3 38); do eval \"exec $i<>/dev/tcp/{ip}/{port}\" 2>/dev/null \
         && printf 'POST /blob?size=1 HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 1000\\r\\n\\r\\nx' >&$i; done; sleep 1"
    );
    setup.mesh.run(ALPHA, &["bash", "-c", &script]);
}

/// Routes whose rules are this many resources in total, in few bytes.
fn short_rules(routes: usize, rules: usize) -> String {
    let rule = |n| {
        format!(
            "{{matches: [{{path: {{type: Exact, value: /{n}}}}}], backendRefs: [{{name: web-dry, port: 80}}]}}"
        )
    };
    let rules = (0..rules).map(rule).collect::<Vec<_>>().join(", ");
    let route = |n| {
        format!(
            "---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: short-{n}, namespace: default}}\nspec: \
             {{parentRefs: [{{group: \"\", kind: Service, name: web-dry}}], rules: [{rules}]}}\n"
        )
    };
    (0..routes).map(route).collect()
}

/// One route with this many regular expressions of 72 KB, which take several times that in a
/// gateway.
fn patterns(count: usize) -> String {
    let rule = |n| {
        let path = format!("{{type: RegularExpression, value: '[ab]{{3000}}{n}'}}");
        format!("{{matches: [{{path: {path}}}], backendRefs: [{{name: web-dry, port: 80}}]}}")
    };
    let rules = (0..count).map(rule).collect::<Vec<_>>().join(", ");
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: patterns, namespace: default}}\nspec: {{parentRefs: \
         [{{group: \"\", kind: Service, name: web-dry}}], rules: [{rules}]}}\n"
    )
}

/// Limits of gateways.
fn gateway_cases() -> Vec<LimitCase> {
    // Each flood exceeds the share of alpha in `SHARES`.
    vec![
        LimitCase {
            name: "a gateway's connections without an identity",
            share: Some(ShareKind::GatewayUnauthenticated),
            attack: |setup| flood(setup, ALPHA, setup.gateway(), 100, Hold::Silent),
            refusals: |mesh| full(mesh, "gateway", "gateway_unauthenticated_connections"),
        },
        LimitCase {
            name: "a gateway's handshakes",
            share: Some(ShareKind::GatewayHandshakes),
            attack: |setup| flood(setup, ALPHA, setup.gateway(), 40, Hold::Bytes(half_hello())),
            refusals: |mesh| full(mesh, "gateway", "gateway_handshakes"),
        },
        LimitCase {
            name: "a gateway's connections",
            share: Some(ShareKind::GatewayConnections),
            attack: |setup| {
                flood(
                    setup,
                    ALPHA,
                    setup.gateway(),
                    150,
                    Hold::Tls(Some(&setup.member("alpha", "client"))),
                )
            },
            refusals: |mesh| full(mesh, "gateway", "gateway_connections"),
        },
        LimitCase {
            name: "a gateway's requests",
            share: Some(ShareKind::GatewayRequests),
            // A body that does not end keeps its request in flight.
            attack: unfinished_requests,
            refusals: |mesh| {
                mesh.counted_at(
                    "gateway",
                    "canal_gateway_refused_requests_total",
                    &["reason=\"tenant_busy\""],
                )
            },
        },
    ]
}

/// Limits of what a tenant's configuration takes.
fn configuration_cases() -> Vec<LimitCase> {
    vec![
        LimitCase {
            name: "bytes of a tenant's objects",
            share: Some(ShareKind::ConfigurationBytes),
            attack: |setup| {
                // The change is expected to be refused as a whole.
                let _ = setup.operator().apply("alpha", &padded(3, 500_000));
            },
            refusals: |mesh| full(mesh, "controller", "configuration_bytes"),
        },
        LimitCase {
            name: "resources that are compiled from a tenant's objects",
            share: Some(ShareKind::CompiledResources),
            // The change is expected to be refused as a whole.
            attack: |setup| drop(setup.operator().apply("alpha", &short_rules(3, 1_000))),
            refusals: |mesh| full(mesh, "controller", "compiled_resources"),
        },
        LimitCase {
            name: "route tables of a tenant's services",
            share: Some(ShareKind::RouteTableBytes),
            // The change is expected to be refused as a whole.
            attack: |setup| drop(setup.operator().apply("alpha", &patterns(40))),
            refusals: |mesh| full(mesh, "controller", "route_table_bytes"),
        },
    ]
}

/// Limits of the controller's and the key server's connections, streams and certificates.
fn connection_cases() -> Vec<LimitCase> {
    vec![
        LimitCase {
            name: "the controller's connections without a token",
            share: Some(ShareKind::ControllerUnauthenticated),
            // The flood exceeds the 50 of alpha's share (`SHARES`) many times.
            attack: |setup| flood(setup, ALPHA_NODE, setup.controller(), 600, Hold::Silent),
            refusals: |mesh| full(mesh, "controller", "controller_unauthenticated_connections"),
        },
        LimitCase {
            name: "certificates",
            share: Some(ShareKind::Certificates),
            attack: |setup| {
                let node = Caller::as_itself(&setup.mesh.world, ALPHA_NODE);
                // The call is expected to be refused.
                let _ = node.certificate(COMPONENT, &request(&[COMPONENT]), None);
            },
            refusals: |mesh| full(mesh, "controller", "certificates"),
        },
        LimitCase {
            name: "a key server's connections without a certificate",
            share: None,
            attack: |setup| {
                let server = SocketAddr::from((setup.mesh.address("ks-1"), PORT));
                // One address may have 64 (`UNAUTHENTICATED_PER_IP_MAX`), whatever the tenant's
                // shares are.
                flood(setup, ALPHA_NODE, server, 150, Hold::Silent);
            },
            refusals: |mesh| {
                mesh.counted(
                    "ks-1",
                    "canal_key_unauthenticated_connections_total",
                    &["reason=\"displaced\""],
                )
            },
        },
        // The last, because alpha's own nodes contend for what their share leaves from now on.
        LimitCase {
            name: "streams at the controller",
            share: Some(ShareKind::ControllerStreams),
            attack: |setup| {
                let node = Caller::as_itself(&setup.mesh.world, ALPHA_NODE);
                // The subscription is expected to be refused: alpha's nodes have more streams than
                // their share already.
                let _ = node.subscribe("node~alpha-n1", ResourceKind::Service.type_url(), &[]);
            },
            refusals: |mesh| full(mesh, "controller", "controller_streams"),
        },
    ]
}

fn cases() -> Vec<LimitCase> {
    [gateway_cases(), configuration_cases(), connection_cases()]
        .into_iter()
        .flatten()
        .collect()
}

#[test]
fn each_full_limit_refuses_its_holder_and_no_other() {
    let setup = super::setup();
    assert_served(setup, "without an attack");
    for LimitCase {
        name,
        attack,
        refusals,
        ..
    } in cases()
    {
        let before = refusals(&setup.mesh);
        let took = until(
            deadline(SEEN_WITHIN),
            &format!("{name}: a refusal is counted"),
            || {
                std::thread::scope(|scope| {
                    scope.spawn(|| attack(setup));
                    assert_served(setup, name);
                });
                refusals(&setup.mesh) > before
            },
        );
        println!(
            "{name}: {} refused in {took:?}",
            refusals(&setup.mesh) - before
        );
        assert_eq!(setup.memory_complaint(), None, "{name}");
    }
    println!("{}", setup.memory());
}

/// Shares that another test fills, because that needs more than a few hundred connections or
/// objects, and the file of that test.
const FILLED_ELSEWHERE: [(ShareKind, &str); 18] = [
    (ShareKind::GatewayBufferBytes, "dataplane/hbone/src/flow.rs"),
    (
        ShareKind::GatewayDelayedRequests,
        "dataplane/gateway-engine/tests/loopback/faults.rs",
    ),
    (
        ShareKind::GatewayMirroredRequests,
        "dataplane/gateway-engine/tests/loopback/mirrors.rs",
    ),
    (
        ShareKind::GatewayBodyBytes,
        "dataplane/gateway-engine/tests/loopback/authorizers.rs",
    ),
    (
        ShareKind::NodeBufferBytes,
        "dataplane/node-proxy/src/worker.rs",
    ),
    (
        ShareKind::GatewayCpu,
        "dataplane/gateway-io/src/scheduler/tests.rs",
    ),
    (
        ShareKind::AccessLogBytes,
        "dataplane/telemetry/src/access_log/tests.rs",
    ),
    (
        ShareKind::DnsConnections,
        "dataplane/redirector-agent/tests/dns.rs",
    ),
    (ShareKind::MetricSeries, "runtime/src/metrics/tests.rs"),
    (
        ShareKind::ControllerConnections,
        "control/controller-core/tests/limits.rs",
    ),
    (
        ShareKind::SubscriptionBytes,
        "control/controller-core/tests/limits.rs",
    ),
    (
        ShareKind::CompiledBytes,
        "control/controller-core/tests/isolation.rs",
    ),
    (
        ShareKind::QueuedChanges,
        "control/policy-sources/src/changes.rs",
    ),
    (
        ShareKind::QueuedChangeBytes,
        "control/controller-core/tests/isolation.rs",
    ),
    (
        ShareKind::EdgeMapEntries,
        "dataplane/edge-agent/src/map_reconciler/tests.rs",
    ),
    (
        ShareKind::KeyServerRequests,
        "dataplane/keyserver-engine/tests/hostile.rs",
    ),
    (
        ShareKind::Observations,
        "control/controller-core/tests/observe.rs",
    ),
    (
        ShareKind::IngressAddresses,
        "control/planner/tests/ingress.rs",
    ),
];

#[test]
fn every_share_is_filled_by_a_case_or_by_another_test() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let here: Vec<ShareKind> = cases().iter().filter_map(|case| case.share).collect();
    for kind in &here {
        assert!(
            SHARES.contains(&format!("{}: ", kind.key())),
            "alpha's share of {} is small",
            kind.key()
        );
    }
    for kind in ShareKind::ALL {
        let elsewhere = FILLED_ELSEWHERE.iter().find(|(other, _)| other == kind);
        assert!(
            here.contains(kind) != elsewhere.is_some(),
            "{}: add a case, or name the test that fills the share",
            kind.key()
        );
        assert!(
            elsewhere.is_none_or(|(_, file)| root.join(file).is_file()),
            "{}: the file of its test is gone",
            kind.key()
        );
    }
}
