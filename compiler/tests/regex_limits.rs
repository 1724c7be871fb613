//! Tests that reach the limits of regular expressions: what is beyond refuses, and spends nothing of
//! another parent's budget.

use std::fmt::Write;
use std::sync::Arc;

use canal_compiler::build_ir;
use canal_model::program::{RouteAction, RouteRule};

use crate::limits::{BACKEND, BASE, output, route, routes};
use crate::parsed_tenant::ParsedTenant;

#[test]
fn regular_expressions_of_a_service() {
    // Each expression is small, but all together exceed the limit. The first ones continue to work.
    let rules = |count: usize| {
        let mut spec = String::from("  rules:\n");
        for number in 0..count {
            let value = format!("/{number}(abc|d[e-z]){{300}}");
            writeln!(spec, "  - {{matches: [{{path: {{type: RegularExpression, value: '{value}'}}}}], backendRefs: [{BACKEND}]}}").unwrap();
        }
        route(&spec)
    };
    let few = output(&rules(2));
    assert_eq!(few.diagnostics, []);
    let many = output(&rules(200));
    let refused = routes(&many)
        .iter()
        .filter(|rule| matches!(rule.action, RouteAction::Refuse { .. }))
        .count();
    assert!(refused > 0 && refused < 200, "{refused}");
    assert_eq!(many.diagnostics.len(), refused);
    assert!(
        many.diagnostics[0]
            .problem
            .contains("regular expressions of service default/web"),
        "{:?}",
        many.diagnostics[0]
    );
}

/// A route on two Services takes from each budget what it uses; the one that has little left takes
/// nothing else from the other.
#[test]
fn regular_expressions_of_one_service_spend_none_of_another() {
    let other = "apiVersion: v1\nkind: Service\nmetadata: {name: other}\n\
        spec: {clusterIP: 192.168.0.77, ports: [{name: http, port: 80}]}\n---\n";
    let of = |name: &str, services: &[&str], count: usize| {
        let parents = services
            .iter()
            .map(|service| format!("{{group: '', kind: Service, name: {service}}}"));
        let parents = parents.collect::<Vec<_>>().join(", ");
        let mut text = format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: {name}}}\nspec:\n  parentRefs: [{parents}]\n  rules:\n"
        );
        for number in 0..count {
            let value = format!("/{number}(abc|d[e-z]){{300}}");
            writeln!(text, "  - {{matches: [{{path: {{type: RegularExpression, value: '{value}'}}}}], backendRefs: [{BACKEND}]}}").unwrap();
        }
        text + "---\n"
    };
    let refused = |text: &str, service: &str| {
        let tenant = ParsedTenant::parse("alpha", "limits.yaml", &format!("{BASE}{other}{text}"));
        let ir = build_ir(&tenant.input()).0.unwrap();
        let service = ir
            .services
            .values()
            .find(|it| it.service.key.name.as_str() == service);
        let rules = service.unwrap().routes.rules();
        let refused = |rule: &&Arc<RouteRule>| matches!(rule.action, RouteAction::Refuse { .. });
        rules.iter().filter(refused).count()
    };
    // The first route leaves `web` little; `both` adds one expression to each Service.
    let scarce = of("a", &["web"], 200) + &of("both", &["web", "other"], 1);
    let alone = of("last", &["other"], 2);
    assert!(refused(&scarce, "web") > 0);
    assert_eq!(
        refused(&(scarce + &alone), "other"),
        1,
        "only `both` is refused"
    );
}

#[test]
fn regular_expressions_of_a_gateway_spend_none_of_a_service() {
    let gateway = "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: edge}\n\
        spec: {gatewayClassName: canal, listeners: [{name: a, port: 80, protocol: HTTP}]}\n---\n";
    let of = |name: &str, parents: &str, count: usize| {
        let mut text = format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: {name}}}\nspec:\n  parentRefs: [{parents}]\n  rules:\n"
        );
        for number in 0..count {
            let value = format!("/{number}(abc|d[e-z]){{300}}");
            writeln!(text, "  - {{matches: [{{path: {{type: RegularExpression, value: '{value}'}}}}], backendRefs: [{BACKEND}]}}").unwrap();
        }
        text + "---\n"
    };
    // The first route uses up the Gateway's memory; the second is on the Service too.
    let both = "{name: edge}, {group: '', kind: Service, name: web}";
    let text = gateway.to_owned() + &of("a", "{name: edge}", 200) + &of("b", both, 2);
    let tenant = ParsedTenant::parse("alpha", "limits.yaml", &format!("{BASE}{text}"));
    let (ir, diagnostics) = build_ir(&tenant.input());
    let ir = ir.unwrap();
    let are_refused = |rules: &[Arc<RouteRule>]| -> Vec<bool> {
        let of_b = rules.iter().filter(|rule| rule.key.name.as_str() == "b");
        of_b.map(|rule| matches!(rule.action, RouteAction::Refuse { .. }))
            .collect()
    };
    let service = ir.services.values().next().unwrap();
    assert_eq!(are_refused(service.routes.rules()), [false, false]);
    assert_eq!(are_refused(ir.ingress[0].routes.rules()), [true, true]);
    let texts = diagnostics.iter().map(|it| it.problem.as_str());
    let short = texts.filter(|it| it.contains("regular expressions of default/edge.gateway"));
    assert!(short.count() > 2);
}
