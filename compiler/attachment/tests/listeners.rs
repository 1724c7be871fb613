//! Tests of listeners: which Gateways have any, which of them are closed, and what ListenerSets add.

use canal_attachment::{LISTENERS_PER_GATEWAY_MAX, LISTENERS_PER_TENANT_MAX};

use crate::fixture::{GROUP, gateway, listener_set, listeners, read, resolved, texts};

#[test]
fn a_listener_that_is_wrong_closes_itself_only() {
    for (listener, reason) in [
        ("port: 80, protocol: HTTP", None),
        ("port: 80, protocol: HTTP, hostname: ''", None),
        (
            // Gateway API allows lower case only.
            "port: 80, protocol: HTTP, hostname: A.example",
            Some("Invalid"),
        ),
        ("port: 80, protocol: HTTP, tls: {}", Some("Invalid")),
        ("port: 443, protocol: HTTPS", Some("InvalidCertificateRef")),
        ("port: 443, protocol: TLS, tls: {mode: Passthrough}", None),
        ("port: 443, protocol: TLS", Some("InvalidCertificateRef")),
        (
            "port: 443, protocol: TLS, tls: {mode: Terminate, certificateRefs: [{name: missing}]}",
            Some("InvalidCertificateRef"),
        ),
        (
            "port: 443, protocol: TLS, tls: {mode: Other}",
            Some("UnsupportedValue"),
        ),
        (
            "port: 443, protocol: TLS, tls: {mode: Passthrough}, allowedRoutes: {kinds: [{kind: HTTPRoute}]}",
            Some("InvalidRouteKinds"),
        ),
        // A TCP listener has no hosts, so that the field means nothing.
        ("port: 80, protocol: TCP, hostname: '*'", None),
        (
            "port: 80, protocol: TCP, tls: {mode: Passthrough}",
            Some("Invalid"),
        ),
        (
            "port: 80, protocol: TCP, allowedRoutes: {kinds: [{kind: TCPRoute}]}",
            None,
        ),
        ("port: 80, protocol: UDP", Some("UnsupportedProtocol")),
        // Names of protocols are compared with their case.
        ("port: 80, protocol: http", Some("UnsupportedProtocol")),
        ("port: 80, protocol: HTTP, colour: red", Some("Invalid")),
        // A field's name that looks like the end of an index must not hide the fault.
        ("port: 80, protocol: HTTP, 'a].b': red", Some("Invalid")),
        (
            "port: 80, protocol: HTTP, allowedRoutes: {namespaces: {from: Some}}",
            Some("Invalid"),
        ),
        (
            "port: 80, protocol: HTTP, allowedRoutes: {kinds: [{kind: TCPRoute}]}",
            Some("InvalidRouteKinds"),
        ),
        (
            // One kind that the protocol knows is enough; the other is only reported.
            "port: 80, protocol: HTTP, allowedRoutes: {kinds: [{kind: TCPRoute}, {kind: HTTPRoute}]}",
            None,
        ),
    ] {
        // The second listener shows that the fault of the first closes only that one.
        let other = "{name: other, port: 8080, protocol: HTTP}";
        let text = gateway(
            "web",
            &format!("listeners: [{{name: a, {listener}}}, {other}]"),
        );
        let documents = read(&text, true);
        let (all, _) = resolved(&documents);
        let expected = vec![("a".to_owned(), reason), ("other".to_owned(), None)];
        assert_eq!(listeners(&all), expected, "{listener}");
    }
}

#[test]
fn listeners_for_tls_share_a_port_whether_they_terminate_it_or_not() {
    let passed = "{name: passed, port: 443, protocol: TLS, hostname: a.example.com, tls: {mode: Passthrough}}";
    for (other, [of_passed, of_other]) in [
        // Without a certificate, one is closed and the other is not.
        (
            "TLS, hostname: b.example.com",
            [None, Some("InvalidCertificateRef")],
        ),
        (
            "TLS, hostname: a.example.com",
            [Some("HostnameConflict"); 2],
        ),
        (
            "HTTPS, hostname: b.example.com",
            [Some("ProtocolConflict"); 2],
        ),
        ("TCP", [Some("ProtocolConflict"); 2]),
    ] {
        let other_listener = format!("{{name: other, port: 443, protocol: {other}}}");
        let text = gateway("web", &format!("listeners: [{passed}, {other_listener}]"));
        let documents = read(&text, true);
        let (all, _) = resolved(&documents);
        let expected = vec![
            ("passed".to_owned(), of_passed),
            ("other".to_owned(), of_other),
        ];
        assert_eq!(listeners(&all), expected, "{other}");
    }
}

#[test]
fn what_is_wrong_with_a_gateway_closes_all_its_listeners() {
    let listener = "listeners: [{name: a, port: 80, protocol: HTTP}]";
    for (field, reason) in [
        ("addresses: []", None),
        ("addresses: [{value: 192.0.2.1}]", None),
        // A type without a value requests no address in particular.
        ("addresses: [{type: IPAddress}]", None),
        (
            "addresses: [{type: Hostname, value: a.example}]",
            Some("UnsupportedAddress"),
        ),
        ("addresses: [{value: a}]", Some("UnsupportedAddress")),
        (
            // Loopback, unspecified and multicast addresses are not those of one host on a network.
            "addresses: [{value: 127.0.0.1}]",
            Some("UnsupportedAddress"),
        ),
        ("addresses: [{value: '::'}]", Some("UnsupportedAddress")),
        ("addresses: [{value: ff02::1}]", Some("UnsupportedAddress")),
        (
            "infrastructure: {labels: {a: b}, annotations: {c: d}}",
            None,
        ),
        (
            "infrastructure: {parametersRef: {group: g, kind: K, name: n}}",
            Some("InvalidParameters"),
        ),
        // The validation of clients concerns listeners for HTTPS, and this one is for HTTP.
        ("tls: {frontend: {}}", None),
        ("colour: red", Some("Invalid")),
        // A faulty `allowedListeners` admits no ListenerSets and concerns no listener of the
        // Gateway.
        ("allowedListeners: {colour: red}", None),
    ] {
        let documents = read(&gateway("web", &format!("{field}, {listener}")), true);
        let (all, _) = resolved(&documents);
        assert_eq!(listeners(&all), [("a".to_owned(), reason)], "{field}");
    }
    // Without a port the second listener is not in the list, so positions in it mean nothing.
    let text = gateway(
        "web",
        "listeners: [{name: b, protocol: HTTP}, {name: a, port: 80, protocol: HTTP}]",
    );
    let documents = read(&text, true);
    let (all, _) = resolved(&documents);
    assert_eq!(listeners(&all), [("a".to_owned(), Some("Invalid"))]);
}

#[test]
fn only_gateways_of_canals_classes_have_listeners() {
    let class = |name: &str, spec: &str| {
        format!("{GROUP}\nkind: GatewayClass\nmetadata: {{name: {name}}}\nspec: {{{spec}}}\n---\n")
    };
    let classes = [
        class(
            "own",
            "controllerName: canal.mesh/gateway, description: ours",
        ),
        class("other", "controllerName: example.com/other"),
        class(
            "tuned",
            "controllerName: canal.mesh/gateway, parametersRef: {group: g, kind: K, name: n}",
        ),
    ]
    .concat();
    for (name, expected) in [
        ("canal", Some(None)),
        ("own", Some(None)),
        ("tuned", Some(Some("InvalidParameters"))),
        ("other", None),
        ("missing", None),
    ] {
        let gateway = gateway("web", "listeners: [{name: a, port: 80, protocol: HTTP}]").replace(
            "gatewayClassName: canal",
            &format!("gatewayClassName: {name}"),
        );
        let documents = read(&format!("{classes}{gateway}"), true);
        let (all, found) = resolved(&documents);
        let expected: Vec<_> = expected
            .map(|reason| ("a".to_owned(), reason))
            .into_iter()
            .collect();
        assert_eq!(listeners(&all), expected, "{name}");
        let is_ignored = texts(&found)
            .iter()
            .any(|text| text.starts_with("spec.gatewayClassName: "));
        assert_eq!(is_ignored, expected.is_empty(), "{name}: {found:?}");
    }
}

#[test]
fn listeners_that_are_not_distinct_are_closed() {
    let text = gateway(
        "web",
        "listeners: [{name: a, port: 80, protocol: HTTP}, {name: b, port: 80, protocol: HTTP}, \
         {name: c, port: 80, protocol: HTTP, hostname: c.example}, \
         {name: d, port: 81, protocol: HTTP}, {name: e, port: 81, protocol: HTTPS}, \
         {name: f, port: 82, protocol: HTTP}, {name: f, port: 83, protocol: HTTP}, \
         {name: g, port: 84, protocol: HTTP}]",
    );
    let documents = read(&text, false);
    let (all, found) = resolved(&documents);
    let reasons: Vec<_> = listeners(&all)
        .into_iter()
        .map(|(_, reason)| reason)
        .collect();
    let conflict = Some("HostnameConflict");
    let expected = [
        conflict,
        conflict,
        None,
        Some("ProtocolConflict"),
        Some("ProtocolConflict"),
        Some("Invalid"),
        Some("Invalid"),
        None,
    ];
    assert_eq!(reasons, expected, "{:?}", texts(&found));
}

#[test]
fn listener_sets_add_listeners_where_the_gateway_allows_them() {
    let own = "listeners: [{name: a, port: 80, protocol: HTTP}]";
    let sets = [
        listener_set("one", "shop", "{name: a, port: 81, protocol: HTTP}"),
        listener_set(
            "two",
            "infra",
            "{name: b, port: 80, protocol: HTTP}, {name: c, port: 82, protocol: HTTP}",
            // `b` has the port and the hostname of the Gateway's own listener.
        ),
    ]
    .concat();
    for (allowed, expected) in [
        ("", vec!["a"]),
        ("allowedListeners: {namespaces: {from: None}}, ", vec!["a"]),
        (
            "allowedListeners: {namespaces: {from: Same}}, ",
            vec!["a", "infra/two/b", "infra/two/c"],
        ),
        (
            "allowedListeners: {namespaces: {from: All}}, ",
            vec!["a", "shop/one/a", "infra/two/b", "infra/two/c"],
        ),
        (
            "allowedListeners: {namespaces: {from: Selector, selector: {matchLabels: {kubernetes.io/metadata.name: shop}}}}, ",
            vec!["a", "shop/one/a"],
        ),
        (
            // The unknown field may have been meant to exclude some sets, so none is admitted.
            "allowedListeners: {namespaces: {from: All}, colour: red}, ",
            vec!["a"],
        ),
    ] {
        let text = gateway("web", &format!("{allowed}{own}")) + &sets;
        let documents = read(&text, true);
        let (all, _) = resolved(&documents);
        let found = listeners(&all);
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, expected, "{allowed}");
        // The Gateway's own listener has precedence over that of the set.
        for (name, reason) in &found {
            let conflict = (name == "infra/two/b").then_some("HostnameConflict");
            assert_eq!(*reason, conflict, "{allowed} {name}");
        }
    }
}

#[test]
fn listeners_beyond_the_limit_are_left_out() {
    let many = |count: usize, first: usize| {
        let one = |at: usize| format!("{{name: l{at}, port: {}, protocol: HTTP}}", first + at);
        (0..count).map(one).collect::<Vec<_>>().join(", ")
    };
    let text = gateway(
        "web",
        &format!(
            "allowedListeners: {{namespaces: {{from: All}}}}, listeners: [{}]",
            many(LISTENERS_PER_GATEWAY_MAX - 1, 1)
        ),
    ) + &listener_set("set", "shop", &many(2, 10_000));
    let documents = read(&text, false);
    let (all, found) = resolved(&documents);
    let all = listeners(&all);
    assert_eq!(all.len(), LISTENERS_PER_GATEWAY_MAX);
    assert_eq!(all.last().unwrap(), &("shop/set/l0".to_owned(), None));
    let texts = texts(&found);
    assert_eq!(texts.len(), 1, "{texts:?}");
    assert!(texts[0].starts_with("spec.listeners[1]: "), "{texts:?}");
}

#[test]
fn what_closes_a_gateway_closes_the_listeners_of_its_sets() {
    let own = "listeners: [{name: a, port: 80, protocol: HTTP}], \
        allowedListeners: {namespaces: {from: All}}";
    let set = listener_set("set", "shop", "{name: b, port: 81, protocol: HTTP}");
    for (field, reason) in [
        ("addresses: [{value: a}]", "UnsupportedAddress"),
        ("colour: red", "Invalid"),
        (
            "infrastructure: {parametersRef: {group: g, kind: K, name: n}}",
            "InvalidParameters",
        ),
    ] {
        let text = gateway("web", &format!("{field}, {own}")) + &set;
        let documents = read(&text, true);
        let (all, _) = resolved(&documents);
        let expected = [
            ("a".to_owned(), Some(reason)),
            ("shop/set/b".to_owned(), Some(reason)),
        ];
        assert_eq!(listeners(&all), expected, "{field}");
    }
}

#[test]
fn a_broken_hostname_is_the_same_as_no_other() {
    for hostname in ["A.example", "[]"] {
        let text = gateway(
            "web",
            "allowedListeners: {namespaces: {from: All}}, listeners: []",
        ) + &listener_set(
            "older",
            "shop",
            &format!("{{name: a, port: 80, protocol: HTTP, hostname: {hostname}}}"),
        ) + &listener_set("set", "other", "{name: b, port: 80, protocol: HTTP}");
        let documents = read(&text, true);
        let (all, found) = resolved(&documents);
        let expected = [
            ("shop/older/a".to_owned(), Some("Invalid")),
            ("other/set/b".to_owned(), None),
        ];
        assert_eq!(listeners(&all), expected, "{:?}", texts(&found));
    }
}

#[test]
fn the_reason_why_listeners_are_closed_is_short_and_shared() {
    let text = gateway(
        "web",
        &format!(
            "infrastructure: {{parametersRef: {{group: g, kind: {}, name: n}}}}, \
             listeners: [{{name: a, port: 80, protocol: HTTP}}, {{name: b, port: 81, protocol: HTTP}}]",
            "k".repeat(10_000)
        ),
    );
    let documents = read(&text, false);
    let (all, found) = resolved(&documents);
    let placed = all.gateways().flat_map(|gateway| &gateway.listeners);
    let faults: Vec<_> = placed.filter_map(|it| it.listener.closed.clone()).collect();
    assert_eq!(faults.len(), 2);
    assert!(std::sync::Arc::ptr_eq(&faults[0], &faults[1]));
    assert!(faults[0].problem.len() < 200, "{}", faults[0].problem);
    assert!(texts(&found).iter().all(|text| text.len() < 200));
}

#[test]
fn listeners_beyond_the_limit_of_the_tenant_are_left_out() {
    let ports: Vec<String> = (1..=LISTENERS_PER_GATEWAY_MAX)
        .map(|port| format!("{{name: l{port}, port: {port}, protocol: HTTP}}"))
        .collect();
    let spec = format!("listeners: [{}]", ports.join(", "));
    let full = LISTENERS_PER_TENANT_MAX / LISTENERS_PER_GATEWAY_MAX;
    let text: String = (0..=full)
        .map(|at| gateway(&format!("web{at}"), &spec))
        .collect();
    let documents = read(&text, false);
    let (all, found) = resolved(&documents);
    assert_eq!(listeners(&all).len(), LISTENERS_PER_TENANT_MAX);
    let texts = texts(&found);
    assert_eq!(texts.len(), 1, "{texts:?}");
    assert!(
        texts[0].starts_with("spec.listeners[0]: with this one the tenant"),
        "{texts:?}"
    );
}
