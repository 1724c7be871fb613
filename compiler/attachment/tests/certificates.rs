//! Tests of the certificates of HTTPS listeners: which references are usable, and what is reported
//! of the others.

use canal_attachment::{CERTIFICATES_PER_LISTENER_MAX, CERTIFICATES_PER_TENANT_MAX};
use rcgen::{CertificateParams, KeyPair};

use crate::fixture::{GROUP, gateway, listener_set, listeners, read, resolved, texts};

/// Returns Secrets with one certificate, of these names in one namespace.
fn secrets(namespace: &str, names: &[String]) -> String {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["www.example.com".to_owned()]).unwrap();
    let indented = |pem: String| pem.replace('\n', "\n    ");
    let entries = format!(
        "type: kubernetes.io/tls\nstringData:\n  tls.crt: |\n    {}\n  tls.key: |\n    {}\n---\n",
        indented(params.self_signed(&key).unwrap().pem()),
        indented(key.serialize_pem())
    );
    let head = |name| {
        format!(
            "apiVersion: v1\nkind: Secret\nmetadata: {{name: {name}, namespace: {namespace}}}\n"
        )
    };
    names.iter().map(|name| head(name) + &entries).collect()
}

fn secret(namespace: &str, name: &str) -> String {
    secrets(namespace, &[name.to_owned()])
}

fn https(tls: &str) -> String {
    format!(
        "listeners: [{{name: a, port: 443, protocol: HTTPS, tls: {{{tls}}}}}, {{name: b, port: 80, protocol: HTTP}}]"
    )
}

#[test]
fn a_reference_that_is_wrong_closes_its_listener_with_the_reason() {
    // YQ== is the letter a: base64, and neither a certificate nor a key.
    let objects = secret("infra", "cert")
        + &secret("other", "cert")
        + "apiVersion: v1\nkind: Secret\nmetadata: {name: opaque, namespace: infra}\ndata: {a: YQ==}\n---\n\
           apiVersion: v1\nkind: Secret\nmetadata: {name: broken, namespace: infra}\ntype: kubernetes.io/tls\ndata: {tls.crt: YQ==, tls.key: YQ==}\n---\n";
    let no_grant = "spec.listeners[0].tls.certificateRefs[0]: no ReferenceGrant lets Gateways in infra use Secret other/cert";
    let invalid = Some("InvalidCertificateRef");
    for (tls, reason, expected) in [
        ("certificateRefs: [{name: cert}]", None, ""),
        (
            "mode: Terminate, certificateRefs: [{kind: Secret, name: cert}]",
            None,
            "",
        ),
        (
            "mode: Passthrough, certificateRefs: [{name: cert}]",
            Some("Invalid"),
            "spec.listeners[0].tls.mode: mode \"Passthrough\" is not one of HTTPS listeners",
        ),
        (
            "mode: Terminate",
            invalid,
            "spec.listeners[0].tls.certificateRefs: a listener that terminates TLS needs a certificate",
        ),
        (
            "certificateRefs: [{kind: ConfigMap, name: cert}]",
            invalid,
            "spec.listeners[0].tls.certificateRefs[0]: a certificate cannot be a \"ConfigMap\" of group \"\"",
        ),
        (
            "certificateRefs: [{group: a.b, name: cert}]",
            invalid,
            "spec.listeners[0].tls.certificateRefs[0]: a certificate cannot be a \"Secret\" of group \"a.b\"",
        ),
        (
            "certificateRefs: [{name: missing}]",
            invalid,
            "spec.listeners[0].tls.certificateRefs[0]: there is no Secret infra/missing",
        ),
        (
            "certificateRefs: [{name: opaque}]",
            invalid,
            "spec.listeners[0].tls.certificateRefs[0]: Secret infra/opaque is not of type kubernetes.io/tls",
        ),
        (
            "certificateRefs: [{name: broken}]",
            invalid,
            "spec.listeners[0].tls.certificateRefs[0]: Secret infra/broken: tls.crt has no certificate",
        ),
        (
            "certificateRefs: [{name: cert, namespace: other}]",
            Some("RefNotPermitted"),
            no_grant,
        ),
        // Of several references, those that resolve are used.
        (
            "certificateRefs: [{name: missing}, {name: cert}]",
            None,
            "spec.listeners[0].tls.certificateRefs[0]: there is no Secret infra/missing",
        ),
    ] {
        let documents = read(&(objects.clone() + &gateway("web", &https(tls))), false);
        let (all, found) = resolved(&documents);
        // The gateway's other listener, b, must stay open in every case.
        let expected_listeners = [("a".to_owned(), reason), ("b".to_owned(), None)];
        assert_eq!(listeners(&all), expected_listeners, "{tls}");
        // An empty text stands for no finding.
        let expected: Vec<&str> = expected.split('\n').filter(|it| !it.is_empty()).collect();
        assert_eq!(texts(&found), expected, "{tls}");
        // A certificate is loaded only for a listener that is open.
        let certificates = all.gateways().map(|it| it.certificates.len());
        assert_eq!(
            certificates.sum::<usize>(),
            usize::from(reason.is_none()),
            "{tls}"
        );
    }
}

#[test]
fn a_grant_names_the_kind_the_namespace_and_the_secret() {
    let grant = |from: &str, to: &str| {
        format!(
            "apiVersion: gateway.networking.k8s.io/v1beta1\nkind: ReferenceGrant\nmetadata: {{name: grant, namespace: other}}\n\
             spec: {{from: [{{group: gateway.networking.k8s.io, {from}}}], to: [{{{to}}}]}}\n---\n"
        )
    };
    let own = "kind: Gateway, namespace: infra";
    for (from, to, reason) in [
        (own, "group: '', kind: Secret", None),
        (own, "group: '', kind: Secret, name: cert", None),
        (
            own,
            "group: '', kind: Secret, name: b",
            Some("RefNotPermitted"),
        ),
        (own, "group: '', kind: Service", Some("RefNotPermitted")),
        (
            "kind: Gateway, namespace: shop",
            "group: '', kind: Secret",
            Some("RefNotPermitted"),
        ),
        (
            "kind: ListenerSet, namespace: infra",
            "group: '', kind: Secret",
            Some("RefNotPermitted"),
        ),
    ] {
        let listener = https("certificateRefs: [{name: cert, namespace: other}]");
        let text = secret("other", "cert") + &grant(from, to) + &gateway("web", &listener);
        let documents = read(&text, false);
        let (all, _) = resolved(&documents);
        assert_eq!(listeners(&all)[0].1, reason, "{from} {to}");
    }
}

#[test]
fn a_listener_set_names_secrets_of_its_own_namespace() {
    let listener = "{name: s, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}";
    let own = gateway(
        "web",
        "allowedListeners: {namespaces: {from: All}}, listeners: [{name: b, port: 80, protocol: HTTP}]",
    );
    for (namespace, reason) in [("shop", None), ("infra", Some("InvalidCertificateRef"))] {
        let text = secret(namespace, "cert") + &own + &listener_set("set", "shop", listener);
        let documents = read(&text, false);
        let (all, _) = resolved(&documents);
        let expected = [("b".to_owned(), None), ("shop/set/s".to_owned(), reason)];
        assert_eq!(listeners(&all), expected, "{namespace}");
    }
}

#[test]
fn a_closed_listener_takes_no_certificate() {
    let tls = "tls: {certificateRefs: [{name: cert}]}";
    let text = secret("infra", "cert")
        + &gateway(
            "web",
            &format!(
                "listeners: [{{name: a, port: 443, protocol: HTTPS, {tls}}}, {{name: b, port: 443, protocol: HTTP}}]"
            ),
        );
    let documents = read(&text, false);
    let (all, _) = resolved(&documents);
    let conflict = Some("ProtocolConflict");
    let expected = [("a".to_owned(), conflict), ("b".to_owned(), conflict)];
    assert_eq!(listeners(&all), expected);
    assert!(all.gateways().all(|it| it.certificates.is_empty()));
}

#[test]
fn certificates_beyond_the_limits_close_their_listeners() {
    let name = |n: usize| format!("cert-{n}");
    let references = |from: usize, count: usize| {
        let all: Vec<String> = (from..from + count)
            .map(|n| format!("{{name: {}}}", name(n)))
            .collect();
        format!("certificateRefs: [{}]", all.join(", "))
    };
    // One certificate more than the tenant may have.
    let names: Vec<String> = (0..=CERTIFICATES_PER_TENANT_MAX).map(name).collect();
    let objects = secrets("infra", &names);
    // Each listener has as many as it may, and together they have all that the tenant may.
    let listener = |n: usize, tls: &str| {
        format!(
            "{{name: l{n}, port: 443, hostname: h{n}.example, protocol: HTTPS, tls: {{{tls}}}}}"
        )
    };
    let count = CERTIFICATES_PER_TENANT_MAX / CERTIFICATES_PER_LISTENER_MAX;
    let mut all: Vec<String> = (0..count)
        .map(|n| {
            let first = n * CERTIFICATES_PER_LISTENER_MAX;
            listener(n, &references(first, CERTIFICATES_PER_LISTENER_MAX))
        })
        .collect();
    // This listener has one reference more than a listener may have.
    all.push(listener(
        count,
        &references(0, CERTIFICATES_PER_LISTENER_MAX + 1),
    ));
    // This one names the certificate with which the tenant would have too many.
    all.push(listener(
        count + 1,
        &references(CERTIFICATES_PER_TENANT_MAX, 1),
    ));
    // A certificate that the Gateway has already counts once.
    all.push(listener(count + 2, &references(0, 1)));
    let text = format!(
        "{objects}{GROUP}\nkind: Gateway\nmetadata: {{name: web, namespace: infra}}\nspec: {{gatewayClassName: canal, listeners: [{}]}}\n",
        all.join(", ")
    );
    let documents = read(&text, false);
    let (all, found) = resolved(&documents);
    let closed: Vec<_> = listeners(&all)
        .into_iter()
        .filter(|it| it.1.is_some())
        .collect();
    let invalid = Some("InvalidCertificateRef");
    let expected = [
        (format!("l{count}"), invalid),
        (format!("l{}", count + 1), invalid),
    ];
    assert_eq!(closed, expected);
    let texts = texts(&found);
    assert!(
        texts[0].contains("has 65 certificates, more than 64"),
        "{texts:?}"
    );
    assert!(
        texts[1].contains("more than 1024 certificates"),
        "{texts:?}"
    );
}
