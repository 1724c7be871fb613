//! Alpha's operator fills every share of its configuration at once: bytes of objects, compiled bytes, resources and route tables.

use std::time::Duration;

use super::ExhaustionCase;
use super::exhaustion_world::ExhaustionWorld;

/// Services that the objects are for.
const SERVICES: usize = 20;
/// Objects of each kind that are tried, more than the shares allow.
const TRIES: usize = 150;
/// All gateways have everything within this time.
const TAKEN_WITHIN: Duration = Duration::from_secs(60);

/// Writes the object with this number.
type ObjectText = fn(usize) -> String;

fn services() -> String {
    let service = |n| {
        format!(
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: fill-{n}, namespace: default}}\nspec: {{selector: {{app: none}}, ports: \
             [{{name: http, port: 80}}]}}\n"
        )
    };
    (0..SERVICES).map(service).collect()
}

/// Returns a route with a name of its own and these conditions, one in each rule.
fn route(name: &str, conditions: impl Iterator<Item = String>) -> String {
    let rules: Vec<_> = conditions.map(|it| format!("{{matches: [{{{it}}}], backendRefs: [{{name: web-dry, port: 80}}]}}")).collect();
    let service = name.bytes().map(usize::from).sum::<usize>() % SERVICES;
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: {name}, namespace: default}}\nspec: {{parentRefs: \
         [{{group: \"\", kind: Service, name: fill-{service}}}], rules: [{}]}}\n",
        rules.join(", ")
    )
}

fn patterns(n: usize) -> String {
    let path = |at| format!("path: {{type: RegularExpression, value: '[ab]{{3000}}{at}'}}");
    route(&format!("patterns-{n}"), (0..5).map(path))
}

fn headers(n: usize) -> String {
    let header = |at| format!("headers: [{{name: x-fill, type: RegularExpression, value: '[a-z]+{at}'}}]");
    route(&format!("headers-{n}"), (0..30).map(header))
}

fn rules(n: usize) -> String {
    route(&format!("rules-{n}"), (0..500).map(|at| format!("path: {{type: Exact, value: /{at}}}")))
}

/// A policy that is compiled once for each of five Services.
fn policy(n: usize) -> String {
    let paths: Vec<_> = (0..500).map(|at| format!("/{}/{at}", "p".repeat(90))).collect();
    let targets: Vec<_> = (0..5).map(|at| format!("{{group: \"\", kind: Service, name: fill-{at}}}")).collect();
    format!(
        "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: policy-{n}, namespace: default}}\nspec: {{action: DENY, \
         targetRefs: [{}], rules: [{{to: [{{operation: {{paths: [{}]}}}}]}}]}}\n",
        targets.join(", "),
        paths.join(", ")
    )
}

/// Applies objects until the share is full. Patterns take a third of the route tables, and patterns of headers another.
fn fill(setup: &ExhaustionWorld) -> u64 {
    let operator = setup.operator();
    let mut tries = 0;
    let mut apply = |yaml: &str| {
        tries += 1;
        operator.apply("alpha", yaml).is_ok_and(|answer| answer.accepted)
    };
    apply(&services());
    let kinds: [(ObjectText, usize); 4] = [(patterns, 14), (headers, 20), (rules, TRIES), (policy, TRIES)];
    for (object, count) in kinds {
        let accepted = (0..count).take_while(|n| apply(&object(*n))).count();
        println!("accepted {accepted} of {count}, as {:.60}", object(0).replace('\n', " "));
    }
    // What gateways build of it counts too.
    setup.mesh.converge(TAKEN_WITHIN);
    tries
}

fn remove(setup: &ExhaustionWorld) {
    let routes =
        ["patterns", "headers", "rules"].into_iter().flat_map(|name| (0..TRIES).map(move |n| ("HTTPRoute", format!("{name}-{n}"))));
    let policies = (0..TRIES).map(|n| ("AuthorizationPolicy", format!("policy-{n}")));
    let services = (0..SERVICES).map(|n| ("Service", format!("fill-{n}")));
    let objects: Vec<_> = routes.chain(policies).chain(services).collect();
    setup.operator().delete_each("alpha", &objects).expect("the objects are deleted");
}

pub(super) fn cases() -> Vec<ExhaustionCase> {
    let fill = |setup: &ExhaustionWorld, _| fill(setup);
    vec![ExhaustionCase::new("every share of the configuration at once", 40, fill).restored_by(remove)]
}
