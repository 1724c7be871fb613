//! Compares what the compiler charges a tenant for route tables with what the router's tables take.

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_compiler::compile_within;
use canal_compiler::resource_budget::CompiledSize;
use canal_differential::policy::Policy;
use canal_model::ids::ServiceKey;
use canal_model::program::{Resource, RouteRule};
use canal_model::route_table::RouteTable;
use canal_router::{Router, RouterLimits};

const BASE: &str = "
apiVersion: canal.mesh/v1
kind: Tenant
metadata: {name: alpha}
spec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.1.0.0/16]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.0.1, selector: {app: web}, ports: [{name: http, port: 80}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: r}
spec:
  parentRefs: [{group: '', kind: Service, name: web}]
";

/// Compiles a route with this text, and returns what the tenant is charged and what the routers
/// take.
fn charged_and_taken(text: &str) -> (u64, u64) {
    let text = format!("{BASE}{text}");
    let parsed = canal_sources::parse("weights.yaml", &text);
    assert!(parsed.is_clean(), "{:?}", parsed.diagnostics);
    let policy = Policy::of(&[("weights.yaml".to_owned(), text)]);
    let output = compile_within(&policy.input(), CompiledSize::UNLIMITED);
    assert_eq!(output.diagnostics, []);
    let mut services: BTreeMap<ServiceKey, Vec<Arc<RouteRule>>> = BTreeMap::new();
    for resource in output.resources {
        if let Resource::Route(rule) = resource {
            services
                .entry(rule.parent.clone())
                .or_default()
                .push(Arc::new(rule));
        }
    }
    let taken = services.into_values().map(|rules| {
        let (router, faults) = Router::build(&RouteTable::new(rules), &RouterLimits::DEFAULT);
        assert_eq!(faults, []);
        router.memory_bytes() as u64
    });
    (output.size.route_table_bytes, taken.sum())
}

#[test]
fn a_tenant_is_charged_at_least_the_size_of_its_route_tables() {
    let rules = |count: usize, condition: &dyn Fn(usize) -> String| {
        let rule = |n| {
            format!(
                "{{matches: [{{{}}}], backendRefs: [{{name: web, port: 80}}]}}",
                condition(n)
            )
        };
        format!(
            "  rules: [{}]\n",
            (0..count).map(rule).collect::<Vec<_>>().join(", ")
        )
    };
    // Many hosts, because each match counts for each of them.
    let hosts: Vec<String> = (0..100).map(|n| format!("h{n}.example.com")).collect();
    let hosts = format!("  hostnames: [{}]\n", hosts.join(", "));
    let exact = |n: usize| format!("path: {{type: Exact, value: /{n}}}");
    // Paths of a thousand segments have 2,000 bytes, half of what a text may have.
    let segments = |n: usize| format!("path: {{value: '{}/{n}'}}", "/a".repeat(1000));
    let regex = |n: usize| format!("path: {{type: RegularExpression, value: '/api/v{n}/[^/]+'}}");
    let large = |n: usize| format!("path: {{type: RegularExpression, value: '[ab]{{2000}}{n}'}}");
    let header =
        |n: usize| format!("headers: [{{name: x, type: RegularExpression, value: '[a-z]+{n}'}}]");
    let query = |n: usize| {
        format!(
            "queryParams: [{{name: x, value: '{}{n}'}}]",
            "v".repeat(1000)
        )
    };
    // Fewer rules where each is larger. Nobody derived the numbers.
    for (what, text) in [
        ("exact paths", rules(500, &exact)),
        ("long paths", rules(200, &segments)),
        ("hosts", hosts.clone() + &rules(50, &exact)),
        (
            "hosts and long paths",
            hosts.clone() + &rules(10, &segments),
        ),
        ("patterns", rules(200, &regex)),
        ("hosts and patterns", hosts + &rules(5, &regex)),
        ("large patterns", rules(20, &large)),
        ("patterns of headers", rules(100, &header)),
        ("long values", rules(200, &query)),
    ] {
        let (charged, taken) = charged_and_taken(&text);
        println!("{what}: {charged} bytes are charged, the tables take {taken}");
        assert!(
            taken <= charged,
            "{what}: {charged} bytes are charged, the tables take {taken}"
        );
    }
}
