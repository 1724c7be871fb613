//! The limit of the matches that gateways compile for the hosts of listeners: beyond it a listener
//! closes, and those before it work.

use std::fmt::Write;

use canal_compiler::limits::{
    HOST_MATCHES_PER_TENANT_MAX, HOSTS_PER_ROUTE_MAX, RULES_PER_ROUTE_MAX,
};
use canal_compiler::resource_budget::CompiledSize;
use canal_compiler::{build_ir, compile_within};

use crate::parsed_tenant::ParsedTenant;

const OBJECTS: &str = "
apiVersion: canal.mesh/v1
kind: Tenant
metadata: {name: alpha}
spec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.1.0.0/16], gatewayCidrs: [10.2.0.0/20]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.0.1, selector: {app: web}, ports: [{name: http, port: 80}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: small}
spec: {gatewayClassName: canal, listeners: [{name: http, port: 80, protocol: HTTP}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: large}
spec: {gatewayClassName: canal, listeners: [{name: one, port: 80, protocol: HTTP}, {name: two, port: 81, protocol: HTTP}]}
";

/// Returns a route of many rules that is on all hosts, and for each of some hosts a route of its
/// own: the hosts have different sets of routes, which all have the many rules.
fn routes(own: usize) -> String {
    let mut text = OBJECTS.to_owned();
    let mut route = |name: &str, hosts: &[usize], rules: usize| {
        let hosts: Vec<String> = hosts.iter().map(|n| format!("h{n}.example.com")).collect();
        write!(
            text,
            "---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: {name}}}\n\
             spec:\n  parentRefs: [{{name: large, sectionName: two}}]\n  hostnames: [{}]\n  rules:\n",
            hosts.join(", ")
        )
        .unwrap();
        for rule in 0..rules {
            let path = format!("{{type: Exact, value: /{name}/{rule}}}");
            writeln!(
                text,
                "  - {{matches: [{{path: {path}}}], backendRefs: [{{name: web, port: 80}}]}}"
            )
            .unwrap();
        }
    };
    let all: Vec<usize> = (0..HOSTS_PER_ROUTE_MAX).collect();
    route("all", &all, RULES_PER_ROUTE_MAX);
    for host in 0..own {
        route(&format!("of-{host}"), &[host], 1);
    }
    text
}

/// Returns the listeners that are closed, and the diagnostics about them.
fn closed(text: &str) -> (Vec<String>, Vec<String>) {
    let tenant = ParsedTenant::parse("alpha", "limits.yaml", text);
    let (ir, diagnostics) = build_ir(&tenant.input());
    let gateways = ir.unwrap().ingress.into_iter();
    let listeners = gateways.flat_map(|gateway| gateway.listeners);
    let closed = listeners.filter(|it| it.listener.closed.is_some());
    (
        closed.map(|it| it.listener.name).collect(),
        diagnostics.iter().map(|it| it.problem.clone()).collect(),
    )
}

#[test]
fn a_listener_with_too_many_matches_on_its_hosts_closes() {
    let per_host = RULES_PER_ROUTE_MAX + 1;
    let most = (HOST_MATCHES_PER_TENANT_MAX - RULES_PER_ROUTE_MAX) / per_host;
    assert_eq!(closed(&routes(most)), (vec![], vec![]));
    let (closed, problems) = closed(&routes(most + 1));
    assert_eq!(closed, ["two"]);
    let [problem] = problems.as_slice() else {
        panic!("{problems:?}")
    };
    assert!(problem.contains("more than 262144 matches"), "{problem}");
}

#[test]
fn a_route_counts_for_each_table_that_gateways_build_of_it() {
    let compiled = |own: usize, route_table_bytes: u64| {
        let tenant = ParsedTenant::parse("alpha", "limits.yaml", &routes(own));
        let max = CompiledSize {
            route_table_bytes,
            ..CompiledSize::UNLIMITED
        };
        compile_within(&tenant.input(), max)
    };
    let size = |own: usize| compiled(own, u64::MAX).size.route_table_bytes;
    // Each host with a route of its own has a table, with all rules of the common route.
    let (none, one, nine) = (size(0), size(1), size(9));
    assert!(nine - one > 8 * (none / 2), "{none} {one} {nine}");
    let within = compiled(9, nine);
    assert!(within.diagnostics.is_empty() && !within.is_stopped);
    let beyond = compiled(9, nine - 1);
    assert!(!beyond.is_stopped, "the listener alone is closed");
    let [problem] = beyond.diagnostics.as_slice() else {
        panic!("{:?}", beyond.diagnostics)
    };
    assert!(problem.problem.contains("listener two"), "{problem}");
    assert!(problem.problem.contains("routeTableBytes"), "{problem}");
}
