//! Tests of routes: which listeners they attach to, for which hosts, and what is said if there are
//! none.

use std::fmt::Write;

use canal_attachment::{
    ATTACHED_HOSTS_PER_ROUTE_MAX, COMPARISONS_PER_TENANT_MAX, LISTENER_PARENTS_PER_ROUTE_MAX,
    RouteParents,
};
use canal_model::policy::Object;

use crate::fixture::{GROUP, gateway, listener_set, read, resolved, texts};

/// Attaches an HTTPRoute in the namespace `shop`; returns each listener with its hosts, and what was
/// reported.
fn attached(gateways: &str, spec: &str) -> (Vec<String>, Vec<String>) {
    attached_of("HTTPRoute", gateways, spec)
}

/// Attaches a route of this kind in the namespace `shop`.
fn attached_of(kind: &str, gateways: &str, spec: &str) -> (Vec<String>, Vec<String>) {
    let route = format!(
        "{GROUP}\nkind: {kind}\nmetadata: {{name: r, namespace: shop}}\nspec: {{{spec}}}\n"
    );
    let documents = read(&format!("{gateways}{route}"), false);
    let (mut all, _) = resolved(&documents);
    let route = documents.last().unwrap();
    let (parents, hostnames) = match &route.object {
        Object::HttpRoute(object) => (&object.spec.parent_refs, &object.spec.hostnames),
        Object::GrpcRoute(object) => (&object.spec.parent_refs, &object.spec.hostnames),
        _ => panic!("the last object is the route"),
    };
    let mut found = Vec::new();
    let parents = RouteParents {
        document: route,
        namespace: &route.object.metadata().namespace,
        parents,
        hostnames,
    };
    let attachments = all.attach(&parents, &mut |it| found.push(it)).attachments;
    let listeners: Vec<_> = all.gateways().collect();
    let text = |attachment: &canal_attachment::Attachment| {
        let gateway = listeners
            .iter()
            .find(|gateway| gateway.service == attachment.gateway)
            .unwrap();
        let listener = &gateway.listeners[attachment.listener].listener;
        let mut text = format!("{} {}", gateway.service.name, listener.name);
        for host in &attachment.hosts {
            write!(text, " {host:?}").unwrap();
        }
        text
    };
    (attachments.iter().map(text).collect(), texts(&found))
}

const WEB: &str = "listeners: [\
    {name: any, port: 80, protocol: HTTP, allowedRoutes: {namespaces: {from: All}}}, \
    {name: one, port: 80, protocol: HTTP, hostname: one.example, allowedRoutes: {namespaces: {from: All}}}, \
    {name: own, port: 81, protocol: HTTP}, \
    {name: team, port: 82, protocol: HTTP, allowedRoutes: {namespaces: {from: Selector, selector: {matchLabels: {team: a}}}}}, \
    {name: tls, port: 443, protocol: HTTPS, allowedRoutes: {namespaces: {from: All}}}]";

#[test]
fn listeners_take_the_kinds_of_routes_that_they_allow() {
    let all = "namespaces: {from: All}";
    let of = |name: &str, port: u16, kinds: &str| {
        format!("{{name: {name}, port: {port}, protocol: HTTP, allowedRoutes: {{{all}{kinds}}}}}")
    };
    let gateways = gateway(
        "web",
        &format!(
            "listeners: [{}, {}, {}]",
            of("any", 80, ""),
            of("http", 81, ", kinds: [{kind: HTTPRoute}]"),
            of("grpc", 82, ", kinds: [{kind: GRPCRoute}]"),
        ),
    );
    let parent = |more: &str| format!("parentRefs: [{{name: web, namespace: infra{more}}}]");
    for (kind, other) in [("HTTPRoute", "grpc"), ("GRPCRoute", "http")] {
        let own = if other == "grpc" { "http" } else { "grpc" };
        let (found, reported) = attached_of(kind, &gateways, &parent(""));
        let expected = ["any", own].map(|name| format!("web.gateway {name} None"));
        assert_eq!((found, reported), (expected.to_vec(), Vec::new()), "{kind}");
        let (found, reported) =
            attached_of(kind, &gateways, &parent(&format!(", sectionName: {other}")));
        let problem = format!("no listener of Gateway infra/web allows {kind}s of namespace shop");
        let expected = vec![format!("spec.parentRefs[0]: {problem}")];
        assert_eq!((found, reported), (Vec::new(), expected), "{kind}");
    }
}

#[test]
fn routes_attach_by_parent_namespace_and_host() {
    let gateways = gateway("web", WEB);
    let labels =
        "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {team: a}}\n---\n";
    let parent = |more: &str| format!("parentRefs: [{{name: web, namespace: infra{more}}}]");
    for (labels, spec, expected) in [
        (
            "",
            parent(""),
            vec!["web.gateway any None", "web.gateway one None"],
        ),
        ("", parent(", sectionName: any"), vec!["web.gateway any None"]),
        (labels, parent(", port: 82"), vec!["web.gateway team None"]),
        (
            "",
            parent("") + ", hostnames: [a.example]",
            vec!["web.gateway any Some(Exact(\"a.example\"))"],
        ),
        (
            "",
            parent(", sectionName: one") + ", hostnames: ['*.example', one.example]",
            vec![
                "web.gateway one Some(Exact(\"one.example\")) Some(Suffix(\".example\"))",
            ],
        ),
        (
            "",
            "parentRefs: [{name: web, namespace: infra, sectionName: any}, {name: web, namespace: infra, port: 80, sectionName: any}]".to_owned(),
            vec!["web.gateway any None"],
        ),
        // Parents without listeners are not this crate's.
        ("", "parentRefs: [{group: '', kind: Service, name: web}]".to_owned(), vec![]),
    ] {
        let (listeners, found) = attached(&format!("{labels}{gateways}"), &spec);
        assert_eq!(listeners, expected, "{spec}: {found:?}");
        assert_eq!(found, [""; 0], "{spec}");
    }
}

#[test]
fn a_route_that_attaches_to_nothing_is_told_why() {
    let gateways = gateway("web", WEB)
        + &gateway("other", "listeners: []")
            .replace("gatewayClassName: canal", "gatewayClassName: other");
    for (parent, expected) in [
        (
            "{name: none, namespace: infra}",
            ".name: there is no Gateway infra/none",
        ),
        ("{name: web}", ".name: there is no Gateway shop/web"),
        (
            "{name: other, namespace: infra}",
            ".name: Gateway infra/other is not Canal's",
        ),
        (
            "{kind: ListenerSet, name: web, namespace: infra}",
            ".name: there is no ListenerSet infra/web",
        ),
        (
            "{name: web, namespace: infra, sectionName: no}",
            ".sectionName: Gateway infra/web has no listener named \"no\"",
        ),
        (
            "{name: web, namespace: infra, port: 8080}",
            ".port: Gateway infra/web has no listener with port 8080",
        ),
        (
            "{name: web, namespace: infra, sectionName: own}",
            ": no listener of Gateway infra/web allows HTTPRoutes of namespace shop",
        ),
        (
            "{name: web, namespace: infra, sectionName: team}",
            ": no listener of Gateway infra/web allows HTTPRoutes of namespace shop",
        ),
        (
            "{name: web, namespace: infra, sectionName: tls}",
            ": the route's listeners of Gateway infra/web are closed: a listener that terminates TLS needs a certificate",
        ),
        (
            "{name: web, namespace: infra, sectionName: one}",
            ": no listener of Gateway infra/web has a hostname in common with the route",
        ),
    ] {
        // The listener `one` has another hostname than a.example.
        // The route is in namespace shop, which neither `own` (Same) nor `team` (label team: a)
        // allows.
        let spec = format!("parentRefs: [{parent}], hostnames: [a.example]");
        let (listeners, found) = attached(&gateways, &spec);
        assert_eq!(listeners, [""; 0], "{parent}");
        assert_eq!(found, [format!("spec.parentRefs[0]{expected}")]);
    }
}

#[test]
fn routes_attach_to_the_listeners_of_a_set_by_its_name() {
    let gateways = gateway(
        "web",
        "allowedListeners: {namespaces: {from: All}}, listeners: [{name: a, port: 80, protocol: HTTP}]",
    ) + &listener_set("set", "shop", "{name: a, port: 81, protocol: HTTP}");
    let (listeners, _) = attached(&gateways, "parentRefs: [{kind: ListenerSet, name: set}]");
    assert_eq!(listeners, ["web.gateway shop/set/a None"]);
    // A parent of kind Gateway names the Gateway's own listeners only.
    let (listeners, found) = attached(
        &gateways,
        "parentRefs: [{name: web, namespace: infra, port: 81}]",
    );
    assert_eq!(listeners, [""; 0], "{found:?}");
}

#[test]
fn parents_and_hosts_beyond_the_limits_are_left_out() {
    let listener = |at: usize| {
        format!(
            "{{name: l{at}, port: {}, protocol: HTTP, allowedRoutes: {{namespaces: {{from: All}}}}}}",
            at + 1
        )
    };
    let all: Vec<String> = (0..=LISTENER_PARENTS_PER_ROUTE_MAX).map(listener).collect();
    let many = gateway("web", &format!("listeners: [{}]", all.join(", ")));
    let parent = |at| format!("{{name: web, namespace: infra, sectionName: l{at}}}");
    let parents: Vec<String> = (0..=LISTENER_PARENTS_PER_ROUTE_MAX).map(parent).collect();
    let (listeners, found) = attached(&many, &format!("parentRefs: [{}]", parents.join(", ")));
    assert_eq!(listeners.len(), LISTENER_PARENTS_PER_ROUTE_MAX);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("parents with listeners"), "{found:?}");
    // A parent that is repeated is one parent.
    let parents = vec![parent(0); LISTENER_PARENTS_PER_ROUTE_MAX + 1];
    let (listeners, found) = attached(&many, &format!("parentRefs: [{}]", parents.join(", ")));
    assert_eq!((listeners.len(), found.len()), (1, 0), "{found:?}");

    let listeners = 128;
    let all: Vec<String> = (0..listeners).map(listener).collect();
    let gateways = gateway("web", &format!("listeners: [{}]", all.join(", ")));
    let count = ATTACHED_HOSTS_PER_ROUTE_MAX / (listeners - 1) + 1;
    let hosts: Vec<String> = (0..count).map(|at| format!("h{at}.example")).collect();
    let spec = format!(
        "parentRefs: [{{name: web, namespace: infra}}], hostnames: [{}]",
        hosts.join(", ")
    );
    let (listeners, found) = attached(&gateways, &spec);
    assert_eq!(listeners.len(), ATTACHED_HOSTS_PER_ROUTE_MAX / count);
    assert!(found[0].contains("hosts on its listeners"), "{found:?}");
}

#[test]
fn comparisons_beyond_the_limit_of_the_tenant_are_not_made() {
    let listeners = 512;
    let all: Vec<String> = (1..=listeners)
        .map(|port| {
            format!("{{name: l{port}, port: {port}, protocol: HTTP, hostname: one.example, allowedRoutes: {{namespaces: {{from: All}}}}}}")
        })
        .collect();
    let hosts: Vec<String> = (0..256).map(|at| format!("h{at}.other")).collect();
    let text = gateway("web", &format!("listeners: [{}]", all.join(", ")))
        + &format!(
            "{GROUP}\nkind: HTTPRoute\nmetadata: {{name: r, namespace: shop}}\nspec: {{parentRefs: [{{name: web, namespace: infra}}], hostnames: [{}]}}\n",
            hosts.join(", ")
        );
    let documents = read(&text, false);
    let (mut all, _) = resolved(&documents);
    let route = documents.last().unwrap();
    let Object::HttpRoute(object) = &route.object else {
        panic!("the last object is the route");
    };
    let parents = RouteParents {
        document: route,
        namespace: &object.metadata.namespace,
        parents: &object.spec.parent_refs,
        hostnames: &object.spec.hostnames,
    };
    // Each attempt compares 256 hosts with 512 listeners, after the listeners and their selectors.
    let within = COMPARISONS_PER_TENANT_MAX / (listeners * (256 + 2));
    let mut found = Vec::new();
    for _ in 0..within + 2 {
        assert_eq!(
            all.attach(&parents, &mut |it| found.push(it)).attachments,
            []
        );
    }
    let texts = texts(&found);
    let are_refused: Vec<bool> = texts.iter().map(|it| it.contains("comparisons")).collect();
    let mut expected = vec![false; within];
    expected.extend([true, true]);
    assert_eq!(are_refused, expected);
}
