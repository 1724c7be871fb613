//! Attacks by objects that a tenant may write: they try to make the mesh connect, fetch or respond
//! for the tenant where it may not do so itself. Beta's operator applies them, beta's client sends
//! requests; the objects themselves are accepted.

use std::time::Duration;

use canal_e2e::controller::Caller;

use super::attack_world::{Attack, AttackOutcome, AttackWorld, BETA, BETA_OPERATOR, CLIENT};

const OWN: &str = "http://10.101.0.10/headers";

fn operator(setup: &AttackWorld) -> Caller<'_> {
    Caller::with_token(&setup.mesh.world, "controller", BETA_OPERATOR)
}

/// Applies objects for beta, sends the request, and removes the objects.
fn with(
    setup: &AttackWorld,
    yaml: &str,
    objects: &[(&str, &str)],
    ask: impl Fn() -> AttackOutcome,
) -> AttackOutcome {
    let applied = operator(setup).apply("beta", yaml);
    // A change that was refused as a whole changed nothing.
    if let Some(answer) = applied.as_ref().ok().filter(|answer| answer.accepted) {
        setup.settle(answer.generation);
    }
    let seen = ask();
    for (kind, name) in objects {
        // An object that was not accepted does not exist.
        let _ = operator(setup).delete("beta", kind, name);
    }
    let answer_text = applied.map(|answer| {
        (
            answer.accepted,
            answer
                .diagnostics
                .into_iter()
                .map(|found| found.problem)
                .collect::<Vec<_>>(),
        )
    });
    AttackOutcome::of(seen.reached, (seen.output, answer_text))
}

fn route(rule: &str) -> String {
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: deputy, namespace: default}}\n\
         spec:\n  parentRefs: [{{group: \"\", kind: Service, name: web}}]\n  rules:\n  - {rule}\n"
    )
}

const ROUTE: &[(&str, &str)] = &[("HTTPRoute", "deputy")];
/// A backend of beta's own.
const TO_OWN: &str = "backendRefs: [{name: web-open, port: 80}]";

/// A route whose backend would be alpha's.
fn routed(name: &'static str, more: &'static str, backend: &'static str) -> Attack {
    Attack::new(
        name,
        move |s: &AttackWorld| {
            with(s, &(more.to_owned() + &route(backend)), ROUTE, || {
                s.by_alpha(BETA, OWN, &[])
            })
        },
        |s| with(s, &route(TO_OWN), ROUTE, || s.served(BETA, OWN, &[])),
    )
}

const GRANT: &str = "apiVersion: gateway.networking.k8s.io/v1beta1\nkind: ReferenceGrant\nmetadata: {name: grant, namespace: secret}\n\
                     spec: {from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: default}], to: [{group: \"\", kind: Service}]}\n---\n";
const EXTERNAL: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: external, namespace: default}\n\
                        spec: {type: ExternalName, externalName: secret.default.svc.cluster.local, ports: [{name: http, port: 80}]}\n---\n";

pub(crate) fn attacks() -> Vec<Attack> {
    let mut all = vec![
        routed(
            "a route to alpha's service",
            "",
            "backendRefs: [{name: secret, port: 80}]",
        ),
        routed(
            "a route to alpha's service by a long name",
            "",
            "backendRefs: [{name: secret.default.svc.cluster.local, port: 80}]",
        ),
        routed(
            "a route across namespaces, granted to oneself",
            GRANT,
            "backendRefs: [{name: web, namespace: secret, port: 80}]",
        ),
        routed(
            "a route to an ExternalName of alpha's service",
            EXTERNAL,
            "backendRefs: [{name: external, port: 80}]",
        ),
        routed(
            "a route that rewrites the Host to alpha's",
            "",
            "filters: [{type: URLRewrite, urlRewrite: {hostname: secret.default.svc.cluster.local}}]\n    backendRefs: [{name: web-open, port: 80}]",
        ),
        routed(
            "a route that claims to be alpha's",
            "",
            "filters: [{type: RequestHeaderModifier, requestHeaderModifier: {set: [{name: canal-source, value: \"spiffe://alpha.example/ns/default/sa/client\"}]}}]\n    \
             backendRefs: [{name: secret, port: 80}]",
        ),
        // Beta gets no response to a mirrored request, so `mirrored` reads the counter of alpha's.
        Attack::new("a mirror to alpha's service", mirrored, |s| {
            with(s, &route(TO_OWN), ROUTE, || s.served(BETA, OWN, &[]))
        }),
    ];
    all.extend(endpoints());
    all.extend(objects());
    all
}

fn mirrored(setup: &AttackWorld) -> AttackOutcome {
    let heard = || {
        setup
            .mesh
            .counted_at("gateway", "istio_requests_total", &["tenant=\"alpha\""])
    };
    let before = heard();
    let rule = format!(
        "filters: [{{type: RequestMirror, requestMirror: {{backendRef: {{name: secret, port: 80}}}}}}]\n    {TO_OWN}"
    );
    let output = with(setup, &route(&rule), ROUTE, || {
        (0..5).for_each(|_| drop(setup.page(BETA, OWN, &[])));
        setup.served(BETA, OWN, &[])
    });
    std::thread::sleep(Duration::from_secs(1));
    AttackOutcome::of(heard() > before, output.output)
}

/// Objects for pods that do not exist: the gateway would dial the addresses in them.
fn endpoints() -> Vec<Attack> {
    // No other Service has the address 10.101.0.95. On beta-n3 runs no node proxy, so a gateway
    // would dial the address itself.
    let trap = |address: &str, port: u16| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: trap, namespace: default}}\n\
             spec: {{clusterIP: 10.101.0.95, selector: {{app: trap}}, ports: [{{name: http, port: 80, targetPort: {port}}}]}}\n---\n\
             apiVersion: v1\nkind: Pod\nmetadata: {{name: trap, namespace: default, labels: {{app: trap}}, annotations: {{canal.mesh/tunnel: none}}}}\n\
             spec: {{nodeName: beta-n3, serviceAccountName: default}}\n\
             status: {{phase: Running, podIP: {address}, podIPs: [{{ip: {address}}}], conditions: [{{type: Ready, status: \"True\"}}]}}\n"
        )
    };
    let objects: &[(&str, &str)] = &[("Pod", "trap"), ("Service", "trap")];
    let dialled = move |s: &AttackWorld, address: String, port: u16, path: &'static str| {
        let url = format!("http://10.101.0.95{path}");
        let yaml = trap(&address, port);
        // A failed request alone proves nothing, because some of these addresses have no listener.
        // The compiler must name the reason for which no gateway gets the address.
        let reason = format!("{address} is in none of the tenant's pod ranges");
        let is_refused = operator(s).diff("beta", &yaml).is_ok_and(|answer| {
            answer
                .diagnostics
                .iter()
                .any(|diagnostic| diagnostic.problem.contains(&reason))
        });
        with(s, &yaml, objects, || {
            let page = s.page(BETA, &url, &[]);
            AttackOutcome::of(page.contains(" 200") || !is_refused, (is_refused, page))
        })
    };
    // The control of each attack: beta reaches its own service by the same gateway.
    let own = |s: &AttackWorld| s.served(BETA, OWN, &[]);
    vec![
        Attack::new(
            "a Pod with the controller's address",
            move |s| {
                dialled(
                    s,
                    s.mesh.address("controller").to_string(),
                    // 15020 serves metrics and 15000 the admin pages; both would answer a dial.
                    15020,
                    "/metrics",
                )
            },
            own,
        ),
        Attack::new(
            "a Pod with a gateway's address",
            move |s| dialled(s, s.mesh.address("gw-1").to_string(), 15020, "/metrics"),
            own,
        ),
        Attack::new(
            "a Pod with the gateway's loopback",
            move |s| dialled(s, "127.0.0.1".into(), 15000, "/config_dump"),
            own,
        ),
        Attack::new(
            "a Pod with a link-local address",
            move |s| dialled(s, "169.254.0.1".into(), 15020, "/metrics"),
            own,
        ),
        Attack::new(
            "a Pod with the identity provider's address",
            move |s| dialled(s, s.mesh.address("issuer").to_string(), 8090, "/jwks"),
            own,
        ),
    ]
}

/// Objects that a tenant may not write.
fn objects() -> Vec<Attack> {
    let applied = |s: &AttackWorld, tenant: &str, yaml: &str| {
        let answer = operator(s).apply(tenant, yaml);
        let taken = answer.as_ref().is_ok_and(|answer| answer.accepted);
        AttackOutcome::of(taken, answer.map(|answer| answer.diagnostics))
    };
    // The control: beta writes an object that selects nothing, which it may.
    let harmless = "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: harmless, namespace: default}\n\
                    spec: {selector: {matchLabels: {app: nobody}}, action: DENY, rules: [{}]}\n";
    let own = move |s: &AttackWorld| applied(s, "beta", harmless);
    let tenant = "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: NAME}\n\
                  spec: {vni: 101, trustDomain: alpha.example, podCidrs: [10.1.0.0/16], serviceCidrs: [10.101.0.0/16]}\n";
    let mut all = vec![
        Attack::new(
            "another trust domain for oneself",
            move |s| applied(s, "beta", &tenant.replace("NAME", "beta")),
            own,
        ),
        Attack::new(
            "another tenant's Tenant",
            move |s| applied(s, "beta", &tenant.replace("NAME", "alpha")),
            own,
        ),
        Attack::new(
            "a policy of alpha's, written by beta",
            move |s| applied(s, "alpha", harmless),
            own,
        ),
        Attack::new(
            "a GatewayReplica of one's own",
            move |s| {
                let gateway = "apiVersion: canal.mesh/v1\nkind: GatewayReplica\nmetadata: {name: gw-1}\nspec: {az: az1, addresses: [10.1.1.2]}\n";
                applied(s, "beta", gateway)
            },
            own,
        ),
    ];
    // Beta may write this object, so the attack is the tunnel: without an object of alpha's it must
    // not open.
    all.push(Attack::new(
        "a federation that alpha has not declared",
        |s| {
            let federation = "apiVersion: canal.mesh/v1\nkind: Federation\nmetadata: {name: alpha, namespace: default}\n\
                              spec: {tenant: alpha, trustDomain: alpha.example}\n";
            with(s, federation, &[("Federation", "alpha")], || {
                let member = s.member("beta", "client");
                s.tunnel(CLIENT, super::attack_world::GATEWAY, &member, &s.pod("alpha/default/web-0", 8080), &[])
            })
        },
        |s| s.tunnel(CLIENT, super::attack_world::GATEWAY, &s.member("alpha", "client"), &s.pod("alpha/default/web-0", 8080), &[]),
    ));
    all
}
