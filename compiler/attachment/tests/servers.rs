//! Tests of Gateways of Istio: the listeners of their servers, what closes or leaves out a server, and
//! the VirtualServices that bind to them.

use canal_attachment::{
    ATTACHED_HOSTS_PER_ROUTE_MAX, BoundRules, LISTENERS_PER_GATEWAY_MAX, gateway_name,
};
use canal_model::ids::Namespace;
use canal_model::program::HostMatch;
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};

use crate::fixture::{gateway, listeners, read, resolved, texts};

fn istio_gateway(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: networking.istio.io/v1\nkind: Gateway\nmetadata: {{name: {name}, namespace: infra}}\nspec: {{{spec}}}\n---\n"
    )
}

fn server(name: &str, port: u16, rest: &str) -> String {
    format!("{{port: {{name: {name}, number: {port}, protocol: HTTP}}, {rest}}}")
}

/// Returns the listeners of some servers, each with the reason why it is closed, and what was
/// reported.
fn of_servers(servers: &[String]) -> (Vec<(String, Option<&'static str>)>, Vec<String>) {
    let text = istio_gateway("web", &format!("servers: [{}]", servers.join(", ")));
    let documents = read(&text, true);
    let (all, found) = resolved(&documents);
    (listeners(&all), texts(&found))
}

#[test]
fn a_gateway_is_served_if_its_selector_selects_canals_ingress() {
    for (selector, is_own) in [
        ("{}", true),
        ("{istio: ingressgateway}", true),
        ("{app: istio-ingressgateway, istio: ingressgateway}", true),
        ("{istio: egressgateway}", false),
        ("{istio: ingressgateway, team: a}", false),
    ] {
        let servers = server("http", 80, "hosts: [\"*\"]");
        let text = istio_gateway(
            "web",
            &format!("selector: {selector}, servers: [{servers}]"),
        );
        let documents = read(&text, false);
        let (all, found) = resolved(&documents);
        assert_eq!(all.gateways().count(), usize::from(is_own), "{selector}");
        let expected = "spec.selector: the selector selects no ingress of Canal's, so Canal ignores the Gateway";
        let expected: &[&str] = if is_own { &[] } else { &[expected] };
        assert_eq!(texts(&found), expected, "{selector}");
    }
}

#[test]
fn what_canal_does_not_serve_closes_its_own_server() {
    let https = |tls: &str| {
        format!("{{port: {{name: https, number: 443, protocol: HTTPS}}, hosts: [\"*\"]{tls}}}")
    };
    for (server, reason, problem) in [
        (
            https(", tls: {mode: SIMPLE}"),
            "Invalid",
            "spec.servers[1].tls.credentialNames: a server that terminates TLS needs a certificate",
        ),
        (
            https(", tls: {mode: SIMPLE, credentialName: a, credentialNames: [b]}"),
            "Invalid",
            "spec.servers[1].tls.credentialNames: only one of credentialName and credentialNames may be set",
        ),
        (
            https(", tls: {mode: SIMPLE, credentialName: missing}"),
            "InvalidCertificateRef",
            "spec.servers[1].tls.credentialName: there is no Secret infra/missing",
        ),
        (
            https(", tls: {mode: SIMPLE, credentialName: \"a/b\"}"),
            "InvalidCertificateRef",
            "spec.servers[1].tls.credentialName: \"a/b\" is not the name of a Secret",
        ),
        (
            https(&format!(
                ", tls: {{mode: SIMPLE, credentialNames: [{}]}}",
                vec!["a"; 65].join(", ")
            )),
            "Invalid",
            "spec.servers[1].tls.credentialNames: the server has 65 certificates, more than 64",
        ),
        (
            https(""),
            "Invalid",
            "spec.servers[1].tls: a server for HTTPS or TLS needs TLS settings",
        ),
        (
            server("odd", 81, "hosts: [\"*\"], tls: {mode: SIMPLE}"),
            "Invalid",
            "spec.servers[1].tls: a server for HTTP has no TLS settings but httpsRedirect",
        ),
        (
            server("odd", 15008, "hosts: [\"*\"]"),
            "Invalid",
            "spec.servers[1].port.number: port 15008 is that of Canal's own connections",
        ),
        (
            "{port: {name: udp, number: 9000, protocol: UDP}, hosts: [\"*\"]}".to_owned(),
            "UnsupportedProtocol",
            "spec.servers[1].port.protocol: servers of protocol \"UDP\" are not served in this version",
        ),
        (
            "{port: {name: tcp, number: 9000, protocol: TCP}, hosts: [\"*\"], tls: {mode: SIMPLE}}"
                .to_owned(),
            "Invalid",
            "spec.servers[1].tls: a server for TCP has no TLS settings",
        ),
        (
            "{port: {name: tls, number: 9000, protocol: TLS}, hosts: [\"*\"]}".to_owned(),
            "Invalid",
            "spec.servers[1].tls: a server for HTTPS or TLS needs TLS settings",
        ),
        (
            "{port: {name: tls, number: 9000, protocol: TLS}, hosts: [\"*\"], tls: {mode: AUTO_PASSTHROUGH}}"
                .to_owned(),
            "Invalid",
            "spec.servers[1].tls.mode: TLS of mode \"AUTO_PASSTHROUGH\" is not served in this version",
        ),
    ] {
        // Istio compares the names of protocols in any case.
        let first = "{port: {name: http, number: 80, protocol: http2}, hosts: [a.example]}";
        let (found, reported) = of_servers(&[first.to_owned(), server]);
        assert_eq!(found[0], ("http".to_owned(), None), "{problem}");
        assert_eq!(found[1].1, Some(reason), "{problem}");
        assert_eq!(reported, [problem]);
    }
    // A field that Canal does not know closes its own server only.
    let odd = server("odd", 81, "hosts: [\"*\"], colour: red");
    let (found, _) = of_servers(&[server("http", 80, "hosts: [\"*\"]"), odd]);
    let reasons: Vec<_> = found.iter().map(|(_, reason)| *reason).collect();
    assert_eq!(reasons, [None, Some("Invalid")]);
}

/// Returns a Secret of namespace `infra` with these entries.
fn secret(name: &str, kind: &str, entries: &[(&str, &str)]) -> String {
    let mut text = format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: {name}, namespace: infra}}\ntype: {kind}\nstringData:\n"
    );
    for (entry, pem) in entries {
        let pem = pem.trim_end().replace('\n', "\n    ");
        text += &format!("  {entry}: |\n    {pem}\n");
    }
    text + "---\n"
}

/// Returns Secrets in which servers find their certificates and the authorities of clients.
fn mutual_secrets() -> String {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["a.example".to_owned()]).unwrap();
    let chain = params.self_signed(&key).unwrap().pem();
    let key_pem = key.serialize_pem();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = params.self_signed(&key).unwrap().pem();
    // Secrets with two authorities are distinguished from those with one by their count.
    let other = KeyPair::generate().unwrap();
    let two = format!("{ca}{}", params.self_signed(&other).unwrap().pem());
    let tls = [("tls.crt", chain.as_str()), ("tls.key", key_pem.as_str())];
    let whole = |entry: &'static str, ca: &str, rest: &[(&str, &str)]| {
        let entries = [&tls[..], &[(entry, ca)], rest].concat();
        entries
            .iter()
            .map(|(name, pem)| ((*name).to_owned(), (*pem).to_owned()))
            .collect::<Vec<_>>()
    };
    let of = |name: &str, kind: &str, entries: Vec<(String, String)>| {
        let entries: Vec<(&str, &str)> = entries
            .iter()
            .map(|(name, pem)| (name.as_str(), pem.as_str()))
            .collect();
        secret(name, kind, &entries)
    };
    let generic = [("cert", chain.as_str()), ("key", key_pem.as_str())];
    [
        secret("bare", "kubernetes.io/tls", &tls),
        of("whole", "kubernetes.io/tls", whole("ca.crt", &ca, &[])),
        of("opaque", "Opaque", whole("ca.crt", &ca, &[])),
        secret(
            "generic",
            "Opaque",
            &[
                &generic[..],
                &[("cacert", two.as_str()), ("ca.crt", ca.as_str())],
            ]
            .concat(),
        ),
        // Only the existence of the list is read, so any text will do.
        of(
            "revoking",
            "Opaque",
            whole("ca.crt", &ca, &[("ca.crl", "list")]),
        ),
        of("broken", "Opaque", whole("ca.crt", "no PEM", &[])),
        // The authorities of `split` are in a Secret of their own.
        secret("split", "kubernetes.io/tls", &tls),
        secret("split-cacert", "Opaque", &[("ca.crt", two.as_str())]),
    ]
    .concat()
}

#[test]
fn a_mutual_server_validates_clients_by_the_authorities_of_its_secret() {
    let secrets = mutual_secrets();
    let no_authority =
        |name: &str| format!("there is no Secret infra/{name} with the authorities of clients");
    for (tls, expected) in [
        ("mode: MUTUAL, credentialName: whole", Ok("AllowValidOnly 1")),
        ("mode: OPTIONAL_MUTUAL, credentialName: opaque", Ok("AllowValidOrNone 1")),
        ("mode: MUTUAL, credentialName: generic", Ok("AllowValidOnly 2")), // `cacert`, before `ca.crt`
        ("mode: MUTUAL, credentialName: split", Ok("AllowValidOnly 2")),
        ("mode: MUTUAL, credentialNames: [split, whole]", Ok("AllowValidOnly 2")), // the first
        (
            "mode: MUTUAL, credentialName: bare, caCertCredentialName: opaque",
            Ok("AllowValidOnly 1"),
        ),
        // There is no Secret opaque-cacert, so the name without its suffix counts.
        (
            "mode: MUTUAL, credentialName: bare, caCertCredentialName: opaque-cacert",
            Ok("AllowValidOnly 1"),
        ),
        (
            "mode: MUTUAL, credentialName: whole, caCertCredentialName: missing",
            Err(no_authority("missing")),
        ),
        (
            "mode: ISTIO_MUTUAL",
            Err("TLS of mode \"ISTIO_MUTUAL\" is not served in this version".to_owned()),
        ),
        (
            "mode: MUTUAL, credentialName: missing",
            Err("there is no Secret infra/missing".to_owned()),
        ),
        (
            "mode: MUTUAL, credentialName: bare",
            Err("Secret infra/bare has no entry ca.crt".to_owned()),
        ),
        (
            "mode: MUTUAL, credentialName: broken",
            Err("Secret infra/broken: ca.crt has no certificate".to_owned()),
        ),
        (
            "mode: MUTUAL, credentialName: revoking",
            Err("Secret infra/revoking has a list of revoked certificates, which is not supported in this version".to_owned()),
        ),
        (
            "mode: SIMPLE, credentialName: whole, caCertCredentialName: whole",
            Err("only a server of mode MUTUAL or OPTIONAL_MUTUAL validates clients".to_owned()),
        ),
    ] {
        let server = |name: &str, host: &str, tls: &str| {
            format!(
                "{{port: {{name: {name}, number: 443, protocol: HTTPS}}, hosts: [{host}], tls: {{{tls}}}}}"
            )
        };
        // A server without validation shares the port.
        let servers = [
            server("plain", "plain.example", "mode: SIMPLE, credentialName: bare"),
            server("own", "own.example", tls),
        ]
        .join(", ");
        let text = secrets.clone() + &istio_gateway("web", &format!("servers: [{servers}]"));
        let documents = read(&text, true);
        let (all, found) = resolved(&documents);
        let validations = all.gateways().flat_map(|it| it.client_validations());
        let validations: Vec<String> = validations
            .map(|it| {
                assert!(it.is_for(443, "own") && !it.is_for(443, "plain"), "{it:?}");
                format!("{} {}", it.mode.as_str(), it.authorities.count)
            })
            .collect();
        let closed: Vec<bool> = listeners(&all).iter().map(|it| it.1.is_some()).collect();
        match expected {
            Ok(validation) => {
                assert_eq!(texts(&found), Vec::<String>::new(), "{tls}");
                assert_eq!((validations, closed), (vec![validation.to_owned()], vec![false, false]));
            }
            Err(problem) => {
                assert!(validations.is_empty(), "{tls}");
                assert_eq!(closed, [false, true], "{tls}");
                let text = &texts(&found)[0];
                assert!(text.starts_with("spec.servers[1].tls.") && text.ends_with(&problem), "{text}");
            }
        }
    }
    // Only servers of Istio may name a Secret of no particular type.
    let listener = "listeners: [{name: a, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: opaque}]}}]";
    let documents = read(&(secrets + &gateway("web", listener)), true);
    let (all, _) = resolved(&documents);
    assert_eq!(listeners(&all)[0].1, Some("InvalidCertificateRef"));
}

#[test]
fn the_first_of_two_servers_keeps_what_both_have() {
    let tcp = "{port: {name: tcp, number: 80, protocol: TCP}, hosts: [c.example]}".to_owned();
    let (found, reported) = of_servers(&[
        server("a", 80, "hosts: [a.example, \"*\"]"),
        server("a", 81, "hosts: [b.example]"),
        tcp,
        server("d", 80, "hosts: [a.example], tls: {httpsRedirect: true}"),
        server("e", 80, "hosts: [a.example, e.example]"),
        server("f", 82, "hosts: []"),
        server(
            "g",
            83,
            "hosts: [\"a.*.example\", g.example, \"x/g.example\"]",
        ),
    ]);
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a/*", "a/a.example", "e/e.example", "g"]);
    assert!(found.iter().all(|(_, reason)| reason.is_none()));
    assert_eq!(
        reported,
        [
            "spec.servers[1].port.name: an earlier server has the port name \"a\" too, so this one is left out",
            "spec.servers[2].port.protocol: listener a/* has another protocol on port 80, so this server is left out",
            "spec.servers[3].hosts[0]: listener a/a.example has the same host on port 80, and keeps it",
            "spec.servers[5].hosts: the server names no host, so it serves none",
            "spec.servers[6].hosts[0]: \"a.*.example\" is not a lower-case host name, optionally with the prefix `*.`",
        ]
    );
}

#[test]
fn servers_that_relay_are_told_apart_by_protocol_and_mode() {
    let of = |name: &str, port: u16, protocol: &str, rest: &str| {
        format!("{{port: {{name: {name}, number: {port}, protocol: {protocol}}}, {rest}}}")
    };
    let text = istio_gateway(
        "web",
        &format!(
            "servers: [{}]",
            [
                // All hosts of a server for TCP mean its port.
                of("tcp", 5432, "TCP", "hosts: [a.example, shop/b.example]"),
                of("mongo", 27017, "Mongo", "hosts: [\"*\"]"),
                of(
                    "passed",
                    443,
                    "TLS",
                    "hosts: [a.example], tls: {mode: PASSTHROUGH}"
                ),
                // Istio passes TLS through where no mode is written, for HTTPS too.
                of("default", 443, "HTTPS", "hosts: [b.example], tls: {}"),
                of(
                    "missing",
                    443,
                    "TLS",
                    "hosts: [c.example], tls: {mode: SIMPLE, credentialName: missing}",
                ),
            ]
            .join(", ")
        ),
    );
    let documents = read(&text, false);
    let (all, _) = resolved(&documents);
    let placed = all.gateways().flat_map(|gateway| &gateway.listeners);
    let found: Vec<String> = placed
        .map(|it| format!("{} {}", it.listener.name, it.listener.protocol))
        .collect();
    assert_eq!(
        found,
        [
            "tcp TCP",
            "mongo TCP",
            "passed TLS",
            "default TLS",
            "missing TLS (terminated)",
        ]
    );
    let gateway = gateway_name(&Namespace::new("infra").unwrap(), "web").unwrap();
    let from = Namespace::new("shop").unwrap();
    let host = |name: &str| Some(HostMatch::Exact(name.to_owned()));
    let mut all = all;
    for (rules, expected) in [
        (BoundRules::Tcp, vec![(0, vec![None]), (1, vec![None])]),
        (BoundRules::Tls, vec![(3, vec![host("b.example")])]),
    ] {
        let bound = all.bind(&gateway, &from, (rules, &[host("b.example")]), 0);
        let bound: Vec<_> = bound
            .unwrap()
            .into_iter()
            .map(|it| (it.listener, it.hosts))
            .collect();
        assert_eq!(bound, expected, "{rules:?}");
    }
    // No server is for HTTP, so rules for requests bind to none.
    assert!(
        all.bind(&gateway, &from, (BoundRules::Http, &[None]), 0)
            .is_err()
    );
}

#[test]
fn hosts_beyond_the_listeners_of_a_gateway_are_left_out() {
    let hosts: Vec<String> = (0..=LISTENERS_PER_GATEWAY_MAX)
        .map(|n| format!("h{n}.example"))
        .collect();
    let (found, reported) =
        of_servers(&[server("a", 80, &format!("hosts: [{}]", hosts.join(", ")))]);
    assert_eq!(found.len(), LISTENERS_PER_GATEWAY_MAX);
    assert_eq!(reported.len(), 1, "{reported:?}");
    assert!(
        reported[0].contains("more than 512 listeners"),
        "{reported:?}"
    );
}

/// Binds a VirtualService of a namespace with these hosts; returns its listeners, or the problem.
fn bound(servers: &str, from: &str, gateway: &str, hosts: &[&str]) -> Result<Vec<String>, String> {
    let text = istio_gateway("web", &format!("servers: [{servers}]"))
        + &istio_gateway("east", "selector: {istio: east}");
    let documents = read(&text, false);
    let (mut all, _) = resolved(&documents);
    let from = Namespace::new(from).unwrap();
    let gateway = gateway_name(&from, gateway).unwrap();
    let hosts: Vec<Option<HostMatch>> = hosts
        .iter()
        .map(|host| match *host {
            "*" => None,
            host => Some(canal_attachment::hostname::parse(host).unwrap()),
        })
        .collect();
    let attachments = all
        .bind(&gateway, &from, (BoundRules::Http, &hosts), 0)
        .map_err(|found| found.problem)?;
    let own = all.gateways().next().unwrap();
    let name = |listener: usize| own.listeners[listener].listener.name.clone();
    Ok(attachments.iter().map(|it| name(it.listener)).collect())
}

#[test]
fn virtual_services_bind_to_servers_that_have_a_host_of_theirs() {
    // The last server redirects and serves no rule, so no case below expects it.
    let servers = [
        server("any", 80, "hosts: [\"*\"]"),
        server("shop", 81, "hosts: [\"shop/*.example\", a.other.test]"),
        server("own", 82, "hosts: [\"./*\"]"),
        server(
            "redirect",
            83,
            "hosts: [a.example], tls: {httpsRedirect: true}",
        ),
    ]
    .join(", ");
    for (from, gateway, hosts, expected) in [
        (
            "shop",
            "infra/web",
            &["a.example"][..],
            Ok(&["any", "shop/*.example"][..]),
        ),
        // The host of server `shop` is for namespace shop only, and `.` in `own` is the Gateway's
        // namespace.
        ("other", "infra/web", &["a.example"], Ok(&["any"])),
        ("infra", "web", &["a.example"], Ok(&["any", "own"])),
        (
            "other",
            "infra/web",
            &["*"],
            Ok(&["any", "shop/a.other.test"]),
        ),
        (
            "other",
            "infra/web",
            &["*.other.test", "b.test"],
            Ok(&["any", "shop/a.other.test"]),
        ),
        (
            "shop",
            "web",
            &["*"],
            Err("there is no Gateway shop/web of Istio's kind"),
        ),
        (
            "infra",
            "east",
            &["*"],
            Err("Gateway infra/east is not Canal's"),
        ),
    ] {
        let found = bound(&servers, from, gateway, hosts);
        let expected = expected
            .map(|names| {
                names
                    .iter()
                    .map(|name| (*name).to_owned())
                    .collect::<Vec<_>>()
            })
            .map_err(str::to_owned);
        assert_eq!(found, expected, "{from} {hosts:?}");
    }
    let redirect = server(
        "redirect",
        83,
        "hosts: [a.example], tls: {httpsRedirect: true}",
    );
    // A server that redirects serves no rule, but its host is not missing from the Gateway.
    assert_eq!(
        bound(&redirect, "shop", "infra/web", &["a.example"]),
        Ok(Vec::new())
    );
    let problem = "no server of Gateway infra/web has a host of the object for namespace shop";
    assert_eq!(
        bound(&redirect, "shop", "infra/web", &["b.example"]),
        Err(problem.to_owned())
    );
}

#[test]
fn a_virtual_service_has_a_limited_number_of_hosts_on_its_listeners() {
    let servers: Vec<String> = (0..129_u16)
        .map(|n| server(&format!("s{n}"), 1000 + n, "hosts: [\"*\"]"))
        .collect();
    let names: Vec<String> = (0..128).map(|n| format!("h{n}.example")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(128 * 128, ATTACHED_HOSTS_PER_ROUTE_MAX);
    let within = bound(&servers[..128].join(", "), "shop", "infra/web", &names);
    assert_eq!(within.map(|it| it.len()), Ok(128));
    let problem = bound(&servers.join(", "), "shop", "infra/web", &names).unwrap_err();
    assert!(problem.contains("more than 16384 hosts"), "{problem}");
}
