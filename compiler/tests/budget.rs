//! Tests that the compiler stops at what a tenant may take, and that it counts what multiplies:
//! rules by parents, by hosts and by ports, pods by services, and regular expressions by the memory
//! of their automata.

use std::fmt::Write;

use canal_compiler::limits::DIAGNOSTICS_OF_SEVERITY_MAX;
use canal_compiler::resource_budget::CompiledSize;
use canal_compiler::route_weight::{AUTOMATON_BYTES, STATES_FACTOR};
use canal_compiler::{CompileOutput, build_ir_within, compile_within};

use crate::parsed_tenant::ParsedTenant;

const TENANT: &str = "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: alpha}\nspec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.1.0.0/16]}\n";

fn within(yaml: &str, max: CompiledSize) -> CompileOutput {
    let text = format!("{TENANT}---\n{yaml}");
    compile_within(
        &ParsedTenant::parse("alpha", "budget.yaml", &text).input(),
        max,
    )
}

fn services(count: usize, ports: usize) -> String {
    let ports: Vec<String> = (1..=ports)
        .map(|port| format!("{{name: http-{port}, port: {port}}}"))
        .collect();
    let ports = ports.join(", ");
    let mut text = String::new();
    for n in 0..count {
        let spec = format!(
            "{{clusterIP: 10.96.{}.{}, selector: {{app: web}}, ports: [{ports}]}}",
            n / 250,
            n % 250 + 1
        );
        write!(
            text,
            "apiVersion: v1\nkind: Service\nmetadata: {{name: s{n}}}\nspec: {spec}\n---\n"
        )
        .unwrap();
    }
    text
}

fn route(name: &str, parents: usize, more: &str) -> String {
    let parents: Vec<String> = (0..parents)
        .map(|n| format!("{{group: '', kind: Service, name: s{n}}}"))
        .collect();
    let parents = parents.join(", ");
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: {name}}}\nspec: {{parentRefs: [{parents}], {more}}}\n---\n"
    )
}

fn regexes(patterns: impl Iterator<Item = String>) -> String {
    let rule = |pattern| {
        format!(
            "{{matches: [{{path: {{type: RegularExpression, value: '{pattern}'}}}}], backendRefs: [{{name: s0, port: 1}}]}}"
        )
    };
    format!(
        "rules: [{}]",
        patterns.map(rule).collect::<Vec<_>>().join(", ")
    )
}

/// Checks that the compiler stops before it has counted twice the limit.
#[track_caller]
fn stops(yaml: &str, max: CompiledSize) {
    let output = within(yaml, max);
    assert!(
        output.is_stopped && output.resources.is_empty(),
        "{:?}",
        output.size
    );
    let text = format!("{TENANT}---\n{yaml}");
    let tenant = ParsedTenant::parse("alpha", "budget.yaml", &text);
    // The IR alone, for the conditions of objects, stops at the same place.
    let stopped = build_ir_within(&tenant.input(), max).unwrap_err();
    assert!(stopped.exceeds(&max), "{stopped:?}");
    let bytes = |size: &CompiledSize| (size.bytes, size.route_table_bytes);
    assert_eq!(bytes(&stopped), bytes(&output.size));
    let twice = |amount: u64| amount.saturating_mul(2);
    let bound = CompiledSize {
        bytes: twice(max.bytes),
        resources: twice(max.resources),
        route_table_bytes: twice(max.route_table_bytes),
    };
    assert!(
        !output.size.exceeds(&bound),
        "the compiler went on beyond its budget: {:?}",
        output.size
    );
    assert!(
        !within(&services(1, 1), max).is_stopped,
        "the amounts are enough for a small tenant"
    );
}

/// N3: 400 KiB of text define two million rules, with 256 services, 1,024 rules and 8 ports.
#[test]
fn compiling_stops_at_the_number_of_resources() {
    let hosts: Vec<String> = (0..256).map(|n| format!("s{n}")).collect();
    let rule = "  - route: [{destination: {host: s1}}]\n".repeat(1024);
    let virtual_service = format!(
        "apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: v}}\nspec:\n  hosts: [{}]\n  http:\n{rule}",
        hosts.join(", ")
    );
    let max = CompiledSize {
        resources: 1_000,
        ..CompiledSize::UNLIMITED
    };
    stops(&format!("{}{virtual_service}", services(256, 8)), max);
    let rules = vec!["{backendRefs: [{name: s0, port: 1}]}"; 1024].join(", ");
    stops(
        &format!(
            "{}{}",
            services(256, 8),
            route("r", 256, &format!("rules: [{rules}]"))
        ),
        max,
    );
}

/// N3: each of these pods serves each port of each service.
#[test]
fn compiling_stops_at_the_bytes_of_served_ports() {
    let mut pods = String::new();
    for n in 0..500 {
        let spec = format!(
            "spec: {{nodeName: n1}}\nstatus: {{podIP: 10.1.{}.{}}}\n---\n",
            n / 250,
            n % 250 + 1
        );
        write!(
            pods,
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: p{n}, labels: {{app: web}}}}\n{spec}"
        )
        .unwrap();
    }
    stops(
        &format!("{}{pods}", services(200, 64)),
        CompiledSize {
            bytes: 100_000,
            ..CompiledSize::UNLIMITED
        },
    );
}

/// N2: 450 services with 22 regular expressions each were accepted in 1.3 MiB, and took 2.8 GiB in
/// each gateway.
#[test]
fn compiling_stops_at_the_bytes_of_route_tables() {
    let mut text = services(450, 1);
    for n in 0..450 {
        let rules = regexes((0..22).map(|at| format!("[ab]{{3000}}{at}")));
        text +=
            &route(&format!("r{n}"), 1, &rules).replace("name: s0}]", &format!("name: s{n}}}]"));
    }
    stops(
        &text,
        CompiledSize {
            route_table_bytes: 16 << 20,
            ..CompiledSize::UNLIMITED
        },
    );
}

#[test]
fn regular_expressions_are_charged_their_automata_for_each_host() {
    let weight = |yaml: &str| {
        within(
            &format!("{}{yaml}", services(2, 1)),
            CompiledSize::UNLIMITED,
        )
        .size
        .route_table_bytes
    };
    let plain = weight(&route(
        "r",
        1,
        "rules: [{backendRefs: [{name: s0, port: 1}]}]",
    ));
    let one = weight(&route(
        "r",
        1,
        &regexes(["[ab]{3000}".to_owned()].into_iter()),
    ));
    // 3,000 states of 24 bytes.
    let states = STATES_FACTOR * 72_000;
    assert!(one >= plain + AUTOMATON_BYTES + states, "{one}");
    let two = weight(&route(
        "r",
        1,
        &regexes((0..2).map(|n| format!("[ab]{{3000}}{n}"))),
    ));
    // A second expression adds its states to the automaton that the service has already.
    assert!(
        (states..states + AUTOMATON_BYTES).contains(&(two - one)),
        "the service has one automaton: {two}"
    );
    let hosts: Vec<String> = (0..10).map(|n| format!("h{n}.example.com")).collect();
    let hosts = format!(
        "hostnames: [{}], {}",
        hosts.join(", "),
        regexes(["[ab]{3000}".to_owned()].into_iter())
    );
    // Each host has an automaton of its own, so ten hosts cost at least ten times as much.
    assert!(
        weight(&route("r", 1, &hosts)) >= 10 * (AUTOMATON_BYTES + states),
        "each host has an automaton"
    );
    assert!(
        weight(&route(
            "r",
            2,
            &regexes(["[ab]{3000}".to_owned()].into_iter())
        )) >= 2 * one - plain,
        "each service has one too"
    );
    let condition = "rules: [{matches: [{headers: [{name: x, type: RegularExpression, value: 'a+'}]}], backendRefs: [{name: s0, port: 1}]}]";
    assert!(
        weight(&route("r", 1, condition)) >= plain + AUTOMATON_BYTES,
        "each condition has one"
    );
}

#[test]
fn subsets_are_charged_the_endpoints_of_their_service() {
    let rules = |subsets: usize| {
        let names = || (0..subsets).map(|n| format!("v{n}"));
        let defined: Vec<String> = names()
            .map(|name| format!("{{name: {name}, labels: {{version: {name}}}}}"))
            .collect();
        let to = |name: &String| {
            format!(
                "{{match: [{{uri: {{exact: /{name}}}}}], route: [{{destination: {{host: s0, subset: {name}}}}}]}}"
            )
        };
        let named: Vec<String> = names().map(|name| to(&name)).collect();
        format!(
            "apiVersion: networking.istio.io/v1\nkind: DestinationRule\nmetadata: {{name: s0}}\nspec: {{host: s0, subsets: [{}]}}\n---\n\
             apiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{name: s0}}\nspec: {{hosts: [s0], http: [{}]}}\n---\n",
            defined.join(", "),
            // Further rules for a subset use its set.
            [named.clone(), named].concat().join(", ")
        )
    };
    let pods = |count: usize| -> String {
        (0..count)
            .map(|n| {
                format!(
                    "apiVersion: v1\nkind: Pod\nmetadata: {{name: p{n}, labels: {{app: web, version: v1}}}}\nspec: {{nodeName: n}}\nstatus: {{podIP: 10.1.0.{}, podIPs: [{{ip: 10.1.0.{}}}], conditions: [{{type: Ready, status: \"True\"}}]}}\n---\n",
                    n + 1,
                    n + 1
                )
            })
            .collect()
    };
    let bytes = |subsets, count| {
        let yaml = services(1, 1) + &rules(subsets) + &pods(count);
        within(&yaml, CompiledSize::UNLIMITED)
            .size
            .route_table_bytes
    };
    // Three more pods are in the set of each subset, whatever their labels; 128 is
    // `SET_ENDPOINT_BYTES`.
    assert_eq!(bytes(2, 7) - bytes(2, 4), 2 * 3 * 128);
    assert_eq!(bytes(5, 7) - bytes(5, 4), 5 * 3 * 128);
    // 40 subsets of 200 endpoints take one byte more than this limit.
    let yaml = services(1, 1) + &rules(40) + &pods(200);
    let max = CompiledSize {
        route_table_bytes: bytes(40, 0) + 40 * 200 * 128 - 1,
        ..CompiledSize::UNLIMITED
    };
    assert!(within(&yaml, max).is_stopped);
}

#[test]
fn a_tenants_diagnostics_are_bounded() {
    let rules =
        vec!["{backendRefs: [{name: none, port: 1}, {name: none, port: 2}]}"; 1024].join(", ");
    let routes = |count: usize| {
        (0..count)
            .map(|n| route(&format!("r{n}"), 4, &format!("rules: [{rules}]")))
            .collect::<String>()
    };
    let few = within(
        &format!("{}{}", services(4, 1), routes(1)),
        CompiledSize::UNLIMITED,
    );
    assert!(
        few.diagnostics.len() >= 2048 && few.diagnostics.len() < DIAGNOSTICS_OF_SEVERITY_MAX,
        "{}",
        few.diagnostics.len()
    );
    let many = within(
        &format!("{}{}", services(4, 1), routes(30)),
        CompiledSize::UNLIMITED,
    );
    assert_eq!(many.diagnostics.len(), DIAGNOSTICS_OF_SEVERITY_MAX + 1);
    assert!(
        many.diagnostics
            .iter()
            .any(|d| d.object.is_none() && d.problem.contains("more than 10000 errors"))
    );
}
