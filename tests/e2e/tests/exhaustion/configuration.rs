//! Alpha's operator fills every share of its configuration at once: bytes of objects, compiled
//! bytes, resources and route tables. This module fills the shares and describes their contents;
//! `full_shares.rs` checks the effects on other tenants.

use std::time::Duration;

use canal_model::share::ShareKind;
use canal_timing::deadline;

use super::ExhaustionCase;
use super::exhaustion_world::ExhaustionWorld;

/// Number of services that the objects name: the maximum for one policy.
const SERVICES: usize = 16;
/// Pods that one Service selects. Nobody derived the number: it makes endpoint sets that are large,
/// and fits into 250 addresses of 20 networks.
const PODS: usize = 5_000;
/// Number of routes with regular expressions. With them a third of the share of route tables is in
/// use.
pub(super) const PATTERNS: usize = 14;
/// All gateways have everything within this time. It only has to exceed what a quiet machine needs:
/// in the gate, `deadline` waits a minute or more.
const TAKEN_WITHIN: Duration = Duration::from_secs(60);
/// A share counts as full from this part of it on, in percent. The steps fill 95 to 99 percent; the
/// rest is for sizes that differ between builds.
const FULL_PERCENT: u64 = 90;

/// Shares of what a tenant's configuration takes, and their names in metrics.
pub(super) const CONFIGURATION_SHARES: [(ShareKind, &str); 4] = [
    (ShareKind::ConfigurationBytes, "configuration_bytes"),
    (ShareKind::CompiledBytes, "compiled_bytes"),
    (ShareKind::CompiledResources, "compiled_resources"),
    (ShareKind::RouteTableBytes, "route_table_bytes"),
];

/// Writes the object with this number.
type ObjectText = fn(usize) -> String;

fn service(name: &str, app: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: default}}\nspec: {{selector: {{app: {app}}}, ports: [{{name: \
         http, port: 80}}]}}\n"
    )
}

fn services() -> String {
    (0..SERVICES)
        .map(|n| service(&format!("fill-{n}"), "none"))
        .chain([service("fill-pods", "p")])
        .collect()
}

fn pod(n: usize) -> String {
    let ip = format!("10.1.{}.{}", 100 + n / 250, 1 + n % 250);
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata: {{name: p{n}, namespace: default, labels: {{app: p}}}}\nspec: {{}}\nstatus: {{podIP: {ip}, conditions: \
         [{{type: Ready, status: \"True\"}}]}}\n"
    )
}

/// Returns a route with a name of its own and these conditions, one in each rule.
fn route(kind: &str, n: usize, conditions: impl Iterator<Item = String>) -> String {
    let rules: Vec<_> = conditions
        .map(|it| format!("{{matches: [{{{it}}}], backendRefs: [{{name: web-dry, port: 80}}]}}"))
        .collect();
    format!(
        "---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: {kind}-{n}, namespace: default}}\nspec: {{parentRefs: \
         [{{group: \"\", kind: Service, name: fill-{}}}], rules: [{}]}}\n",
        n % SERVICES,
        rules.join(", ")
    )
}

/// Returns the text of a route with regular expressions, each of which has a large automaton.
/// `variant` is part of each.
pub(super) fn patterns(n: usize, variant: char) -> String {
    let path =
        |at| format!("path: {{type: RegularExpression, value: '[ab]{{3000}}{variant}{at}'}}");
    route("patterns", n, (0..5).map(path))
}

fn headers(n: usize) -> String {
    let header =
        |at| format!("headers: [{{name: x-fill, type: RegularExpression, value: '[a-z]+{at}'}}]");
    route("headers", n, (0..30).map(header))
}

fn rules(n: usize) -> String {
    route(
        "rules",
        n,
        (0..1024).map(|at| format!("path: {{type: Exact, value: /{at}}}")),
    )
}

/// A policy that is compiled once for each Service.
fn policy(kind: &str, n: usize, paths: &str) -> String {
    let targets: Vec<_> = (0..SERVICES)
        .map(|at| format!("{{group: \"\", kind: Service, name: fill-{at}}}"))
        .collect();
    format!(
        "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: {kind}-{n}, namespace: default}}\nspec: {{action: DENY, \
         targetRefs: [{}], rules: [{{to: [{{operation: {{paths: [{paths}]}}}}]}}]}}\n",
        targets.join(", ")
    )
}

fn short_policy(n: usize) -> String {
    policy("short", n, "/x")
}

fn long_policy(n: usize) -> String {
    let paths: Vec<_> = (0..400)
        .map(|at| format!("/{}/{at}", "p".repeat(90)))
        .collect();
    policy("long", n, &paths.join(", "))
}

/// A Service with an annotation, which takes bytes and nothing else.
fn padding(n: usize) -> String {
    let note = "x".repeat(20_000);
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: pad-{n}, namespace: default, annotations: {{note: {note}}}}}\nspec: {{selector: \
         {{app: none}}, ports: [{{name: http, port: 80}}]}}\n"
    )
}

/// Objects of one kind: their text, and the share that they fill up to a part of it.
struct FillStep {
    name: &'static str,
    object: ObjectText,
    /// Number of objects in the first change. Their size shows how many more fit.
    first: usize,
    /// The share's name in metrics and the part in percent; `None` if there are no more objects.
    share: Option<(&'static str, u64)>,
}

/// Steps that fill the shares, in this order. Path patterns take a third of the route tables,
/// header patterns another third, and rules the rest. Padding takes the bytes that all others left.
const STEPS: [FillStep; 7] = [
    FillStep {
        name: "pods",
        object: pod,
        first: PODS,
        share: None,
    },
    FillStep {
        name: "patterns",
        object: |n| patterns(n, 'a'),
        first: PATTERNS,
        share: None,
    },
    FillStep {
        name: "headers",
        object: headers,
        first: 20,
        share: None,
    },
    FillStep {
        name: "rules",
        object: rules,
        first: 1,
        share: Some(("route_table_bytes", 98)),
    },
    FillStep {
        name: "short policies",
        object: short_policy,
        first: 100,
        share: Some(("compiled_resources", 95)),
    },
    FillStep {
        name: "long policies",
        object: long_policy,
        first: 1,
        share: Some(("compiled_bytes", 97)),
    },
    FillStep {
        name: "padding",
        object: padding,
        first: 1,
        share: Some(("configuration_bytes", 99)),
    },
];

/// Applies the objects with these numbers, which must be accepted.
fn apply(setup: &ExhaustionWorld, step: &FillStep, numbers: std::ops::Range<usize>) {
    let objects: String = numbers.map(step.object).collect();
    let answer = setup
        .operator()
        .apply("alpha", &objects)
        .unwrap_or_else(|status| panic!("{}: {status}", step.name));
    assert!(
        answer.accepted,
        "{}: {:?}",
        step.name,
        answer.diagnostics.first()
    );
}

/// Applies as many objects of a kind as fit. Returns how many.
fn grow(setup: &ExhaustionWorld, step: &FillStep) -> usize {
    let taken = || {
        step.share
            .map_or(0, |(limit, _)| used(setup, "alpha", limit))
    };
    let before = taken();
    apply(setup, step, 0..step.first);
    let Some((limit, percent)) = step.share else {
        return step.first;
    };
    let each = taken()
        .saturating_sub(before)
        .div_ceil(step.first as u64)
        .max(1);
    let left =
        (counted(setup, "canal_share_max", "alpha", limit) * percent / 100).saturating_sub(taken());
    let all = step.first + (left / each) as usize;
    apply(setup, step, step.first..all);
    all
}

/// Applies objects until every share is full. Returns their number.
pub(super) fn fill(setup: &ExhaustionWorld) -> u64 {
    let answer = setup
        .operator()
        .apply("alpha", &services())
        .expect("alpha's operator gets answers");
    assert!(answer.accepted, "{:?}", answer.diagnostics);
    let mut objects = 0;
    for step in &STEPS {
        let (began, accepted) = (std::time::Instant::now(), grow(setup, step));
        println!(
            "{accepted} {} in {:?}, {}",
            step.name,
            began.elapsed(),
            setup.memory_now()
        );
        objects += accepted as u64;
    }
    // What gateways build of it counts too.
    setup.mesh.converge(deadline(TAKEN_WITHIN));
    let full = CONFIGURATION_SHARES.map(|(kind, name)| {
        let (used, max) = (
            used(setup, "alpha", name),
            counted(setup, "canal_share_max", "alpha", name),
        );
        println!("{}: {used} of {max}", kind.key());
        used * 100 >= max * FULL_PERCENT
    });
    assert_eq!(full, [true; 4], "every share is full");
    objects
}

fn counted(setup: &ExhaustionWorld, family: &str, tenant: &str, limit: &str) -> u64 {
    setup.mesh.counted(
        "controller",
        family,
        &[
            &format!("limit=\"{limit}\""),
            &format!("tenant=\"{tenant}\""),
        ],
    )
}

/// Returns what a tenant has of a limit at the controller; 0 if the controller shows nothing of it.
pub(super) fn used(setup: &ExhaustionWorld, tenant: &str, limit: &str) -> u64 {
    counted(setup, "canal_share_used", tenant, limit)
}

/// Removes all that was applied for alpha.
pub(super) fn remove(setup: &ExhaustionWorld) {
    setup
        .provider()
        .delete_all("alpha")
        .expect("the provider may delete all");
}

pub(super) fn cases() -> Vec<ExhaustionCase> {
    let fill = |setup: &ExhaustionWorld, _| fill(setup);
    vec![
        ExhaustionCase::new("every share of the configuration at once", 1000, fill)
            .restored_by(remove),
    ]
}
