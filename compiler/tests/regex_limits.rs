//! Tests that reach the limits of regular expressions: what is beyond refuses, and spends nothing of
//! another parent's budget.

use std::fmt::Write;
use std::sync::Arc;

use canal_compiler::build_ir;
use canal_model::program::{RouteAction, RouteRule};

use crate::limits::{BACKEND, BASE, output, route, routes};
use crate::parsed_tenant::ParsedTenant;

/// Returns the rules of an HTTPRoute, each with one regular expression. 200 of them need more memory
/// than the rules of a Service may take.
fn regex_rules(count: usize) -> String {
    let mut spec = String::from("  rules:\n");
    for number in 0..count {
        let value = format!("/{number}(abc|d[e-z]){{300}}");
        writeln!(spec, "  - {{matches: [{{path: {{type: RegularExpression, value: '{value}'}}}}], backendRefs: [{BACKEND}]}}").unwrap();
    }
    spec
}

/// Returns an HTTPRoute with these parents and so many regular expressions.
pub(crate) fn regex_route(name: &str, parents: &str, count: usize) -> String {
    let rules = regex_rules(count);
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: {name}}}\nspec:\n  parentRefs: [{parents}]\n{rules}---\n"
    )
}

/// Returns the references of a route to these Services as its parents.
pub(crate) fn service_parents(services: &[&str]) -> String {
    let parents = services.iter();
    let parents = parents.map(|name| format!("{{group: '', kind: Service, name: {name}}}"));
    parents.collect::<Vec<_>>().join(", ")
}

#[test]
fn regular_expressions_of_a_service() {
    // Each expression is small, but all together exceed the limit. The first ones continue to work.
    let few = output(&route(&regex_rules(2)));
    assert_eq!(few.diagnostics, []);
    let many = output(&route(&regex_rules(200)));
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
        regex_route(name, &service_parents(services), count)
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
    // The first route uses up the Gateway's memory; the second is on the Service too.
    let both = format!("{{name: edge}}, {}", service_parents(&["web"]));
    let routes = regex_route("a", "{name: edge}", 200) + &regex_route("b", &both, 2);
    let text = gateway.to_owned() + &routes;
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
