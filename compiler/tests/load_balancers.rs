//! Tests of the limits on load balancers: what exceeds them has the default, with a warning, and
//! requests are served.

use std::fmt::Write;

use canal_compiler::resource_budget::CompiledSize;
use canal_compiler::{CompileOutput, compile_within};
use canal_model::diagnostic::Severity;
use canal_model::load_balancing::{HASH_ENTRIES_PER_SERVICE_MAX, LOAD_BALANCERS_PER_SERVICE_MAX};
use canal_model::program::Resource;

use crate::parsed_tenant::{ParsedTenant, assert_decodes};

const TENANT: &str = "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: alpha}\nspec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.1.0.0/16]}\n";

/// Compiles a service with these ports and a DestinationRule with this content.
fn compiled(ports: usize, spec: &str, max: CompiledSize) -> CompileOutput {
    let mut all = String::new();
    for port in 1..=ports {
        write!(all, "{{name: http-{port}, port: {port}}}, ").unwrap();
    }
    let text = format!(
        "{TENANT}---\napiVersion: v1\nkind: Service\nmetadata: {{name: web}}\nspec: {{clusterIP: 10.96.0.1, selector: {{app: web}}, ports: [{all}]}}\n---\napiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: web}}\nspec: {{host: web, {spec}}}\n"
    );
    let output = compile_within(
        &ParsedTenant::parse("alpha", "limits.yaml", &text).input(),
        max,
    );
    assert!(!output.is_stopped);
    assert_decodes(&output);
    output
}

fn load_balancers(output: &CompileOutput) -> usize {
    let services = output.resources.iter();
    let counts = services.filter_map(|resource| match resource {
        Resource::Service(service) => Some(service.load_balancers.len()),
        _ => None,
    });
    counts.sum()
}

#[track_caller]
fn warned(output: &CompileOutput, problem: &str) {
    let mut warnings = output.diagnostics.iter();
    assert!(
        warnings.any(|it| it.severity == Severity::Warning && it.problem.contains(problem)),
        "{problem}: {:?}",
        output.diagnostics
    );
}

#[test]
fn hash_tables_beyond_the_limit_of_a_service_are_not_built() {
    let fitting = (HASH_ENTRIES_PER_SERVICE_MAX / 65_537) as usize;
    let spec = "trafficPolicy: {loadBalancer: {consistentHash: {useSourceIp: true, maglev: {}}}}";
    let output = compiled(fitting, spec, CompiledSize::UNLIMITED);
    assert_eq!(
        (load_balancers(&output), output.diagnostics.len()),
        (fitting, 0)
    );
    let output = compiled(fitting + 3, spec, CompiledSize::UNLIMITED);
    assert_eq!(load_balancers(&output), fitting);
    warned(&output, "have more than 524288 entries");
}

#[test]
fn hash_tables_beyond_the_share_of_the_tenant_are_not_built() {
    let spec = "trafficPolicy: {loadBalancer: {consistentHash: {useSourceIp: true}}}";
    let all = compiled(10, spec, CompiledSize::UNLIMITED);
    let bytes = all.size.route_table_bytes;
    assert!(bytes >= 10 * 1024 * 10, "{bytes}");
    let half = CompiledSize {
        route_table_bytes: bytes / 2,
        ..CompiledSize::UNLIMITED
    };
    let output = compiled(10, spec, half);
    assert_eq!((load_balancers(&all), load_balancers(&output)), (10, 5));
    warned(&output, "exceeds the tenant's share routeTableBytes");
}

#[test]
fn load_balancers_beyond_the_limit_of_a_service_are_the_default() {
    let subsets: Vec<String> = (0..LOAD_BALANCERS_PER_SERVICE_MAX / 2)
        .map(|n| format!("{{name: s{n}, labels: {{n: s{n}}}}}"))
        .collect();
    let spec = format!(
        "trafficPolicy: {{loadBalancer: {{simple: RANDOM}}}}, subsets: [{}]",
        subsets.join(", ")
    );
    let output = compiled(3, &spec, CompiledSize::UNLIMITED);
    assert_eq!(load_balancers(&output), LOAD_BALANCERS_PER_SERVICE_MAX);
    warned(&output, "has more than 1024 load balancers");
}
