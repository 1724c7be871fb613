//! Tests of the validation of clients at listeners for HTTPS: which authorities a port has, and what
//! closes its listeners.

use canal_attachment::{CLIENT_CA_BYTES_PER_TENANT_MAX, TenantListeners};
use canal_model::limits::{CLIENT_CA_BYTES_MAX, CLIENT_CA_CERTIFICATES_MAX};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair};

use crate::fixture::{GROUP, gateway, listener_set, listeners, read, resolved, texts};

/// Returns the certificate of a new authority, which has at least this many bytes.
fn authority(bytes: usize) -> String {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let name = "a".repeat(bytes);
    params.distinguished_name.push(DnType::CommonName, name);
    params
        .self_signed(&KeyPair::generate().unwrap())
        .unwrap()
        .pem()
}

fn indented(pem: &str) -> String {
    pem.trim_end().replace('\n', "\n    ")
}

fn config_map(namespace: &str, name: &str, entry: &str, pem: &str) -> String {
    let pem = indented(pem);
    format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, namespace: {namespace}}}\ndata:\n  {entry}: |\n    {pem}\n---\n"
    )
}

/// Returns a Secret for the listeners.
fn secret(namespace: &str) -> String {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec!["www.example.com".to_owned()]).unwrap();
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: cert, namespace: {namespace}}}\ntype: kubernetes.io/tls\nstringData:\n  tls.crt: |\n    {}\n  tls.key: |\n    {}\n---\n",
        indented(&params.self_signed(&key).unwrap().pem()),
        indented(&key.serialize_pem())
    )
}

const LISTENERS: &str = "listeners: [{name: a, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}, \
     {name: b, port: 8443, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}, {name: c, port: 80, protocol: HTTP}]";

fn validation(refs: &str) -> String {
    format!("validation: {{caCertificateRefs: [{refs}]}}")
}

/// Returns the validations of all Gateways as text: mode, ports and number of authorities.
fn validations(all: &TenantListeners) -> Vec<String> {
    let found = all.gateways().flat_map(|it| it.client_validations());
    found
        .map(|it| {
            format!(
                "{} {:?} {}",
                it.mode.as_str(),
                it.ports,
                it.authorities.count
            )
        })
        .collect()
}

/// Returns the reasons why the listeners `a` and `b` are closed, the validations and the problems.
fn outcome(objects: &str, frontend: &str) -> ([Option<&'static str>; 2], Vec<String>, Vec<String>) {
    let spec = format!("tls: {{frontend: {{{frontend}}}}}, {LISTENERS}");
    let text = format!("{objects}{}{}", secret("infra"), gateway("web", &spec));
    let documents = read(&text, true);
    let (all, found) = resolved(&documents);
    let closed = listeners(&all);
    assert_eq!(closed[2], ("c".to_owned(), None), "HTTP has no validation");
    ([closed[0].1, closed[1].1], validations(&all), texts(&found))
}

#[test]
fn a_port_has_its_own_validation_or_the_default() {
    let (one, two) = (authority(1), authority(2));
    let objects = config_map("infra", "one", "ca.crt", &one)
        // An authority that is written twice counts once, so `both` has two.
        + &config_map("infra", "both", "ca.crt", &format!("{one}{two}{one}"))
        + &format!(
            "apiVersion: certificates.k8s.io/v1beta1\nkind: ClusterTrustBundle\nmetadata: {{name: bundle}}\nspec:\n  trustBundle: |\n    {}\n---\n",
            indented(&two)
        )
        + &format!(
            "apiVersion: v1\nkind: Secret\nmetadata: {{name: opaque, namespace: infra}}\nstringData:\n  ca.crt: |\n    {}\n---\n",
            indented(&format!("{one}{two}"))
        );
    let own = validation("{group: '', kind: ConfigMap, name: one}");
    let both = validation("{group: '', kind: ConfigMap, name: both}");
    let opaque = validation("{group: '', kind: Secret, name: opaque}");
    let bundle = validation("{group: certificates.k8s.io, kind: ClusterTrustBundle, name: bundle}");
    let lenient = "validation: {mode: AllowInsecureFallback, caCertificateRefs: [{group: '', kind: ConfigMap, name: one}]}";
    for (frontend, expected) in [
        ("default: {}".to_owned(), vec![]),
        (
            format!("default: {{{own}}}"),
            vec!["AllowValidOnly {443, 8443} 1"],
        ),
        (
            format!("default: {{{own}}}, perPort: [{{port: 8443, tls: {{{both}}}}}]"),
            vec!["AllowValidOnly {443} 1", "AllowValidOnly {8443} 2"],
        ),
        // Settings of a port replace all of the default.
        (
            format!("default: {{{own}}}, perPort: [{{port: 443, tls: {{}}}}]"),
            vec!["AllowValidOnly {8443} 1"],
        ),
        (
            format!("default: {{}}, perPort: [{{port: 443, tls: {{{bundle}}}}}]"),
            vec!["AllowValidOnly {443} 1"],
        ),
        (
            format!("default: {{}}, perPort: [{{port: 443, tls: {{{opaque}}}}}]"),
            vec!["AllowValidOnly {443} 2"],
        ),
        (
            format!("default: {{{lenient}}}, perPort: [{{port: 443, tls: {{{own}}}}}]"),
            vec!["AllowValidOnly {443} 1", "AllowInsecureFallback {8443} 1"],
        ),
    ] {
        let (closed, found, problems) = outcome(&objects, &frontend);
        assert_eq!(closed, [None, None], "{frontend}");
        assert_eq!(found, expected, "{frontend}");
        let warns = problems
            .iter()
            .any(|it| it.contains("InsecureFrontendValidationMode"));
        assert_eq!(warns, frontend.contains("Insecure"), "{problems:?}");
    }
}

#[test]
fn a_validation_without_authorities_closes_the_listeners_of_its_ports() {
    let objects = config_map("infra", "one", "ca.crt", &authority(1))
        + &config_map("infra", "other", "root.pem", &authority(1))
        + &config_map("infra", "broken", "ca.crt", "none")
        + &config_map("certs", "far", "ca.crt", &authority(1));
    let invalid = Some("InvalidCACertificateRef");
    for (refs, reason, expected) in [
        (
            "{group: '', kind: ConfigMap, name: missing}",
            invalid,
            "there is no ConfigMap infra/missing",
        ),
        (
            "{group: '', kind: ConfigMap, name: other}",
            invalid,
            "ConfigMap infra/other has no entry ca.crt",
        ),
        (
            "{group: '', kind: ConfigMap, name: broken}",
            invalid,
            "ConfigMap infra/broken: ca.crt has no certificate",
        ),
        (
            "{group: '', kind: ConfigMap, name: far, namespace: certs}",
            Some("RefNotPermitted"),
            "no ReferenceGrant lets Gateways in infra use ConfigMap certs/far",
        ),
        (
            "{group: '', kind: Service, name: cert}",
            Some("InvalidCACertificateKind"),
            "authorities cannot be a \"Service\" of group \"\"",
        ),
        // The Secret with the certificate of the listeners.
        (
            "{group: '', kind: Secret, name: cert}",
            invalid,
            "Secret infra/cert has no entry ca.crt",
        ),
        (
            "{group: '', kind: Secret, name: far, namespace: certs}",
            Some("RefNotPermitted"),
            "no ReferenceGrant lets Gateways in infra use Secret certs/far",
        ),
        (
            "{group: certificates.k8s.io, kind: ClusterTrustBundle, name: missing}",
            invalid,
            "there is no ClusterTrustBundle missing",
        ),
        (
            "{group: certificates.k8s.io, kind: ClusterTrustBundle, name: a, namespace: infra}",
            invalid,
            "ClusterTrustBundle a has no namespace",
        ),
        ("", Some("Invalid"), "a validation has 1 to 8 references"),
        (
            &"{group: '', kind: ConfigMap, name: one}, ".repeat(9),
            Some("Invalid"),
            "a validation has 1 to 8 references",
        ),
    ] {
        // The other port has none.
        let own = validation(refs);
        let frontend = format!("default: {{}}, perPort: [{{port: 443, tls: {{{own}}}}}]");
        let (closed, found, problems) = outcome(&objects, &frontend);
        assert_eq!((closed, found), ([reason, None], vec![]), "{refs}");
        assert!(problems[0].ends_with(expected), "{problems:?}");
    }
    // The authorities of other references are used.
    let refs =
        "{group: '', kind: ConfigMap, name: missing}, {group: '', kind: ConfigMap, name: one}";
    let (closed, found, _) = outcome(&objects, &format!("default: {{{}}}", validation(refs)));
    assert_eq!(closed, [None, None]);
    assert_eq!(found, ["AllowValidOnly {443, 8443} 1"]);
}

#[test]
fn settings_that_are_broken_close_all_listeners_for_https() {
    let objects = config_map("infra", "one", "ca.crt", &authority(1));
    let own = "caCertificateRefs: [{group: '', kind: ConfigMap, name: one}]";
    let invalid = Some("Invalid");
    for (frontend, expected) in [
        ("".to_owned(), [invalid, invalid]),
        ("colour: red, default: {}".to_owned(), [invalid, invalid]),
        (
            format!("default: {{validation: {{{own}, depth: 3}}}}"),
            [invalid, invalid],
        ),
        (
            format!("default: {{validation: {{{own}, mode: Never}}}}"),
            [invalid, invalid],
        ),
        (
            "default: {}, perPort: [{port: 443, tls: {}}, {port: 443, tls: {}}]".to_owned(),
            [invalid, None],
        ),
    ] {
        let (closed, found, _) = outcome(&objects, &frontend);
        assert_eq!((closed, found), (expected, vec![]), "{frontend}");
    }
}

#[test]
fn a_certificate_for_backends_closes_nothing() {
    let spec = format!("tls: {{backend: {{clientCertificateRef: {{name: a}}}}}}, {LISTENERS}");
    let documents = read(&(secret("infra") + &gateway("web", &spec)), true);
    let (all, _) = resolved(&documents);
    assert!(listeners(&all).iter().all(|(_, closed)| closed.is_none()));
}

#[test]
fn a_grant_names_config_maps_and_a_listener_set_has_the_validation_of_its_gateway() {
    let grant = |kind: &str| {
        format!(
            "{GROUP}\nkind: ReferenceGrant\nmetadata: {{name: grant, namespace: certs}}\n\
             spec: {{from: [{{group: gateway.networking.k8s.io, kind: Gateway, namespace: infra}}], to: [{{group: '', kind: {kind}}}]}}\n---\n"
        )
    };
    let far = validation("{group: '', kind: ConfigMap, name: far, namespace: certs}");
    let own = gateway(
        "web",
        &format!(
            "tls: {{frontend: {{default: {{{far}}}}}}}, allowedListeners: {{namespaces: {{from: All}}}}, listeners: [{{name: c, port: 80, protocol: HTTP}}]"
        ),
    );
    let listener = "{name: s, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: cert}]}}";
    for (kind, reason) in [("ConfigMap", None), ("Secret", Some("RefNotPermitted"))] {
        let text = config_map("certs", "far", "ca.crt", &authority(1))
            + &secret("shop")
            + &grant(kind)
            + &own
            + &listener_set("set", "shop", listener);
        let documents = read(&text, false);
        let (all, _) = resolved(&documents);
        let expected = [("c".to_owned(), None), ("shop/set/s".to_owned(), reason)];
        assert_eq!(listeners(&all), expected, "{kind}");
        let expected = reason.is_none().then_some("AllowValidOnly {443} 1");
        assert_eq!(validations(&all), Vec::from_iter(expected), "{kind}");
    }
}

#[test]
fn authorities_beyond_the_limits_are_not_used() {
    let some = |count: usize| -> String { (0..count).map(authority).collect() };
    let half = CLIENT_CA_CERTIFICATES_MAX / 2;
    let objects = config_map("infra", "half", "ca.crt", &some(half))
        + &config_map("infra", "more", "ca.crt", &some(half + 1));
    let refs = "{group: '', kind: ConfigMap, name: half}, {group: '', kind: ConfigMap, name: more}";
    let (_, found, problems) = outcome(&objects, &format!("default: {{{}}}", validation(refs)));
    assert_eq!(found, [format!("AllowValidOnly {{443, 8443}} {half}")]);
    assert!(
        problems[0].contains("more than 64 certificates"),
        "{problems:?}"
    );
    // Each Gateway counts the bytes of its own validation.
    // The subject is in the certificate twice, and in base64.
    let large = authority(CLIENT_CA_BYTES_MAX / 6);
    let count = CLIENT_CA_BYTES_PER_TENANT_MAX / large.len();
    let one = validation("{group: '', kind: ConfigMap, name: large}");
    let spec = format!("tls: {{frontend: {{default: {{{one}}}}}}}, {LISTENERS}");
    let gateways: String = (0..=count)
        .map(|n| gateway(&format!("web-{n:03}"), &spec))
        .collect();
    let text = config_map("infra", "large", "ca.crt", &large) + &secret("infra") + &gateways;
    let documents = read(&text, false);
    let (all, found) = resolved(&documents);
    assert_eq!(validations(&all).len(), count);
    let beyond = texts(&found);
    assert_eq!(beyond.len(), 1);
    assert!(
        beyond[0].contains("the tenant's validations have more than"),
        "{beyond:?}"
    );
}
