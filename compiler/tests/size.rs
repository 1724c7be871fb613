//! Compiles a large tenant: it has all of its resources, and the cost of a compile grows with the
//! tenant and with nothing else. Prints the measured times (`--nocapture`).

use std::fmt::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_compiler::compile;
use canal_model::program::{Resource, ResourceKind};
use canal_timing::{is_timed, timed};

use crate::parsed_tenant::ParsedTenant;

/// Returns a tenant with this many services, each with ten rules, a policy and four pods.
fn tenant(services: usize) -> String {
    let mut yaml = String::from(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: alpha}\nspec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.0.0.0/10]}\n",
    );
    for s in 0..services {
        let (high, low) = (s / 250, s % 250);
        write!(yaml, "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s{s}}}\nspec: {{clusterIP: 10.96.{high}.{low}, selector: {{app: s{s}}}, ports: [{{name: http, port: 80}}]}}\n").unwrap();
        write!(yaml, "---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: r{s}}}\nspec:\n  parentRefs: [{{group: '', kind: Service, name: s{s}}}]\n  rules:\n").unwrap();
        for r in 0..10 {
            writeln!(yaml, "  - {{matches: [{{path: {{value: /r{r}}}, headers: [{{name: x-user, value: u{r}}}]}}], backendRefs: [{{name: s{s}, port: 80, weight: 9}}, {{name: s0, port: 80}}]}}").unwrap();
        }
        write!(yaml, "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: a{s}}}\nspec: {{selector: {{matchLabels: {{app: s{s}}}}}, rules: [{{from: [{{source: {{serviceAccounts: [u{s}]}}}}], to: [{{operation: {{methods: [GET], paths: [/r*]}}}}]}}]}}\n").unwrap();
        for p in 0..4 {
            write!(yaml, "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: p{s}-{p}, labels: {{app: s{s}, version: v{p}}}, annotations: {{canal.mesh/az: az1}}}}\nspec: {{nodeName: n{p}}}\nstatus: {{podIP: 10.{p}.{high}.{low}, conditions: [{{type: Ready, status: 'True'}}]}}\n").unwrap();
        }
    }
    yaml
}

/// Returns the shortest time for parsing and for compiling, of three tries in the timing tier.
fn time(services: usize) -> (Duration, Duration) {
    let yaml = tenant(services);
    let mut best = (Duration::MAX, Duration::MAX);
    for _ in 0..if is_timed() { 3 } else { 1 } {
        let begin = Instant::now();
        let parsed = canal_sources::parse("size.yaml", &yaml);
        let read = begin.elapsed();
        assert!(parsed.is_clean(), "{:?}", parsed.diagnostics.first());
        let documents = parsed.documents.into_iter().map(Arc::new).collect();
        let tenant = ParsedTenant::of("alpha", documents);
        let begin = Instant::now();
        let output = compile(&tenant.input());
        best = (best.0.min(read), best.1.min(begin.elapsed()));
        assert_eq!(output.diagnostics, []);
        let count = |kind: ResourceKind| {
            output
                .resources
                .iter()
                .filter(|resource: &&Resource| resource.kind() == kind)
                .count()
        };
        assert_eq!(
            (
                count(ResourceKind::Service),
                count(ResourceKind::Route),
                count(ResourceKind::Workload)
            ),
            (services, services * 10, services * 4)
        );
        assert_eq!(count(ResourceKind::Authorization), services);
    }
    println!(
        "{services} services, {} rules, {} bytes: read in {:?}, compiled in {:?}",
        services * 10,
        yaml.len(),
        best.0,
        best.1
    );
    best
}

#[test]
fn a_compile_grows_with_the_tenant_only() {
    let (_, small) = time(250);
    let (_, large) = time(1000);
    // On a machine with other load, four times the input may take six times as long; quadratic cost
    // would take sixteen times as long.
    timed!(
        large < small * 10,
        "compiling four times the services takes less than ten times as long"
    );
}
