//! Clients outside the tenants reach services through Gateways: each at an address of its own on
//! the clients' network, over whichever replica is up.

use std::path::Path;
use std::time::Duration;

use canal_e2e::credential::{Leaf, PemCredential, TestAuthority};
use canal_e2e::{Mesh, load_while, until};
use canal_timing::deadline;
use serde_json::Value;

const CLIENT: &str = "clients/default/client-0";
/// Maximum time of a step on a quiet machine: a change is in force, or a process serves. It only
/// has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(15);
/// The address that alpha requests, and the lowest of the pool, which beta gets.
const ALPHA: &str = "198.19.0.40";
const BETA: &str = "198.19.0.33";
/// The address of alpha's Gateway for HTTPS.
const SECURE: &str = "198.19.0.41";

fn gateway(addresses: &str) -> String {
    format!(
        "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: public, namespace: default}}\n\
         spec: {{gatewayClassName: canal, {addresses}listeners: [{{name: http, port: 80, protocol: HTTP}}]}}\n\
         ---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: shop, namespace: default}}\n\
         spec: {{parentRefs: [{{name: public}}], hostnames: [shop.example.com], rules: [{{backendRefs: [{{name: web, port: 80}}]}}]}}\n"
    )
}

/// Returns the status of a request of the client's.
fn code(mesh: &Mesh, address: &str, host: &str) -> u16 {
    let resolve = format!("{host}:80:{address}");
    mesh.code(
        CLIENT,
        &format!("http://{host}/headers"),
        &["--resolve", &resolve],
    )
}

/// Returns what an application received of a request of the client's.
fn received(mesh: &Mesh, address: &str) -> Value {
    let url = format!("http://{address}/headers");
    mesh.run(
        CLIENT,
        &["curl", "-sS", "-H", "host: shop.example.com", &url],
    )
    .json()
}

#[test]
fn clients_outside_the_tenants_reach_services_at_gateways() {
    let mesh = Mesh::up("ingress.yaml", "e2e-ingress");
    mesh.apply(
        "alpha",
        &gateway(&format!("addresses: [{{value: {ALPHA}}}], ")),
    );
    mesh.apply("beta", &gateway(""));
    for address in [ALPHA, BETA] {
        until(
            deadline(STEP_TIMEOUT),
            &format!("{address} answers"),
            || code(&mesh, address, "shop.example.com") == 200,
        );
    }
    // The address alone decides the tenant, and the host decides the routes.
    for (address, tenant) in [(ALPHA, "alpha"), (BETA, "beta")] {
        let received = received(&mesh, address);
        assert_eq!(received["version"], tenant, "{received}");
        let client = mesh.address(CLIENT).to_string();
        let forwarded = serde_json::json!(["x-forwarded-for", client]);
        let headers = received["headers"].as_array().expect("headers");
        assert!(headers.contains(&forwarded), "{received}");
        assert_eq!(code(&mesh, address, "unknown.example.com"), 404);
    }
    // Nothing listens at an address that no Gateway has, nor at a Gateway's port without a
    // listener. Port 15008 is HBONE's, which only members of the mesh may reach.
    assert_eq!(code(&mesh, "198.19.0.35", "shop.example.com"), 0);
    for port in [81, 15008] {
        assert_eq!(
            mesh.code(CLIENT, &format!("http://{ALPHA}:{port}/"), &[]),
            0
        );
    }
    a_gateway_serves_https(&mesh);
    a_gateway_of_istio_serves_https(&mesh);
    a_gateway_reads_proxy_headers_and_asks_an_authorizer(&mesh);
    each_replica_serves_alone(&mesh);
    a_gateway_without_an_address_disturbs_no_other(&mesh);
    mesh.canal(&[
        "delete", "--tenant", "beta", "Gateway", "public", "-n", "default",
    ])
    .expect_success();
    // A deleted Gateway's address must not serve on, and must not take alpha's with it.
    until(
        deadline(STEP_TIMEOUT),
        "beta's address is free again",
        || code(&mesh, BETA, "shop.example.com") == 0,
    );
    assert_eq!(code(&mesh, ALPHA, "shop.example.com"), 200);
}

/// Returns a Secret with a certificate.
fn secret(name: &str, certificate: &PemCredential) -> String {
    let indented = |pem: &str| pem.trim_end().replace('\n', "\n    ");
    let (chain, key) = (indented(&certificate.chain), indented(&certificate.key));
    format!(
        "---\napiVersion: v1\nkind: Secret\nmetadata: {{name: {name}, namespace: default}}\ntype: kubernetes.io/tls\n\
         stringData:\n  tls.crt: |\n    {chain}\n  tls.key: |\n    {key}\n"
    )
}

/// A Gateway whose port 80 redirects to its port 443, where one listener is for one host and the
/// other one for the rest of the domain.
fn secure_gateway() -> String {
    let https = |name: &str, host: &str| {
        format!(
            "{{name: {name}, port: 443, protocol: HTTPS, hostname: \"{host}\", tls: {{certificateRefs: [{{name: {name}}}]}}}}"
        )
    };
    let (shop, wild) = (
        https("shop", "shop.example.com"),
        https("wild", "*.example.com"),
    );
    let missing = https("missing", "missing.example.com");
    format!(
        "---\napiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: secure, namespace: default}}\n\
         spec: {{gatewayClassName: canal, addresses: [{{value: {SECURE}}}], listeners: [{{name: http, port: 80, protocol: HTTP}}, {shop}, {wild}, {missing}]}}\n\
         ---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: to-https, namespace: default}}\n\
         spec: {{parentRefs: [{{name: secure, sectionName: http}}], rules: [{{filters: [{{type: RequestRedirect, requestRedirect: {{scheme: https, statusCode: 301}}}}]}}]}}\n\
         ---\napiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: secure, namespace: default}}\n\
         spec: {{parentRefs: [{{name: secure, port: 443}}], rules: [{{backendRefs: [{{name: web, port: 80}}]}}]}}\n"
    )
}

/// Returns the status of a request by HTTPS, 0 if the handshake fails.
fn https_code(mesh: &Mesh, roots: &str, host: &str, more: &[&str]) -> u16 {
    https_code_at(mesh, SECURE, roots, host, more)
}

/// Returns the status of a request by HTTPS to an address, 0 if the handshake fails.
fn https_code_at(mesh: &Mesh, address: &str, roots: &str, host: &str, more: &[&str]) -> u16 {
    let resolve = format!("{host}:443:{address}");
    let own = ["--cacert", roots, "--resolve", &resolve];
    let url = format!("https://{host}/headers");
    mesh.code(CLIENT, &url, &[&own, more].concat())
}

/// Clients outside reach alpha by HTTPS: the server name selects the listener, and a changed
/// certificate fails no request.
fn a_gateway_serves_https(mesh: &Mesh) {
    let dir = tempfile::tempdir().expect("a directory");
    let authority = TestAuthority::root("the world's");
    let roots = dir.path().join("roots.pem");
    std::fs::write(&roots, authority.pem()).expect("a file in a temporary directory");
    let roots = roots.display().to_string();
    let shop = authority.issue(&Leaf::named("shop.example.com"));
    let wild = authority.issue(&Leaf::named("*.example.com"));
    let secrets = secret("shop", &shop) + &secret("wild", &wild);
    mesh.apply("alpha", &(secrets + &secure_gateway()));
    until(deadline(STEP_TIMEOUT), "the Gateway serves HTTPS", || {
        https_code(mesh, &roots, "shop.example.com", &[]) == 200
    });
    assert_eq!(https_code(mesh, &roots, "a.example.com", &[]), 200);
    let refused = |reason: &str| {
        let label = format!("reason=\"{reason}\"");
        mesh.counted_at(
            "gateway",
            "canal_gateway_refused_connections_total",
            &[&label],
        )
    };
    for (host, reason) in [
        ("other.test", "unrecognized_name"),
        ("missing.example.com", "no_certificate"),
    ] {
        assert_eq!(https_code(mesh, &roots, host, &[]), 0, "{host}");
        until(deadline(STEP_TIMEOUT), reason, || refused(reason) > 0);
    }
    // The connection is for one listener, and the host is another's. A host that no listener has is
    // not misdirected.
    let host = ["-H", "host: a.example.com"];
    assert_eq!(https_code(mesh, &roots, "shop.example.com", &host), 421);
    let host = ["-H", "host: other.test"];
    assert_eq!(https_code(mesh, &roots, "shop.example.com", &host), 404);
    a_redirect_leads_to_https(mesh, &roots);
    // Operators read Secrets back; the key must not be in any output.
    let shown = mesh.canal(&[
        "get", "--tenant", "alpha", "Secret", "shop", "-n", "default", "-o", "yaml",
    ]);
    let key = shop.key.lines().nth(1).expect("a key in PEM");
    assert!(
        !shown.stdout.contains(key),
        "a key is shown: {}",
        shown.stdout
    );
    a_changed_certificate_fails_no_request(mesh, &roots, &authority);
    a_listener_validates_clients(mesh, &roots, dir.path());
    mesh.canal(&[
        "delete", "--tenant", "alpha", "Gateway", "secure", "-n", "default",
    ])
    .expect_success();
}

/// The address of alpha's Gateway with a port of the PROXY protocol, and one whose rules have an
/// authorizer. The service is its own authorizer: it serves the path of the allowed check, and refuses
/// that of the denied one.
const PROXIED: &str = "198.19.0.42";
const PROXIED_GATEWAY: &str = "---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: proxied, namespace: default, annotations: {canal.mesh/proxy-protocol: \"80\"}}
spec:
  gatewayClassName: canal
  addresses: [{value: 198.19.0.42}]
  listeners: [{name: proxied, port: 80, protocol: HTTP}, {name: checked, port: 8080, protocol: HTTP}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: proxied, namespace: default}
spec: {parentRefs: [{name: proxied, sectionName: proxied}], rules: [{backendRefs: [{name: web, port: 80}]}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: checked, namespace: default}
spec:
  parentRefs: [{name: proxied, sectionName: checked}]
  rules:
  - matches: [{headers: [{name: x-case, value: denied}]}]
    filters: [{type: ExternalAuth, externalAuth: {protocol: HTTP, backendRef: {name: web, port: 80}, http: {path: /status}}}]
    backendRefs: [{name: web, port: 80}]
  - filters: [{type: ExternalAuth, externalAuth: {protocol: HTTP, backendRef: {name: web, port: 80}}}]
    backendRefs: [{name: web, port: 80}]
";

/// Sends a request behind a line, over a plain connection.
const BEHIND_A_LINE: &str = "request=\"${2}GET /headers HTTP/1.1\\r\\nHost: shop.example.com\\r\\nConnection: close\\r\\n\\r\\n\"
(exec 3<>/dev/tcp/$1/80 && printf \"$request\" >&3 && cat <&3) 2>&1; true";

/// The client's address is that of the PROXY header, without which nothing is served; and a rule's
/// authorizer lets one request through and denies another.
fn a_gateway_reads_proxy_headers_and_asks_an_authorizer(mesh: &Mesh) {
    mesh.apply("alpha", PROXIED_GATEWAY);
    let checked = |more: &[&str]| {
        let url = format!("http://{PROXIED}:8080/headers");
        mesh.code(CLIENT, &url, more)
    };
    until(
        deadline(STEP_TIMEOUT),
        "the authorizer lets a request through",
        || checked(&[]) == 200,
    );
    // The service refuses the check with 400, and would serve the request itself with 200.
    until(deadline(STEP_TIMEOUT), "it denies another", || {
        checked(&["-H", "x-case: denied"]) == 400
    });
    let checks = |result: &str| {
        let labels = [format!("result=\"{result}\"")];
        let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
        mesh.counted_at("gateway", "canal_authorizer_requests_total", &labels)
    };
    assert!(checks("ok") > 0 && checks("denied") > 0);
    let behind = |line: &str| {
        let argv = ["bash", "-c", BEHIND_A_LINE, "behind", PROXIED, line];
        mesh.run(CLIENT, &argv).expect_success()
    };
    let header = format!("PROXY TCP4 203.0.113.7 {PROXIED} 4711 80\\r\\n");
    let mut answered = String::new();
    until(deadline(STEP_TIMEOUT), "the PROXY port serves", || {
        answered = behind(&header);
        answered.starts_with("HTTP/1.1 200 ")
    });
    assert!(
        answered.contains("[\"x-forwarded-for\",\"203.0.113.7\"]"),
        "{answered}"
    );
    let served = behind("");
    assert!(!served.contains("HTTP/1.1"), "{served}");
    let counter = "canal_gateway_refused_connections_total";
    let label = "reason=\"proxy_header\"";
    until(deadline(STEP_TIMEOUT), "the refusal is counted", || {
        mesh.counted_at("gateway", counter, &[label]) > 0
    });
    mesh.canal(&[
        "delete", "--tenant", "alpha", "Gateway", "proxied", "-n", "default",
    ])
    .expect_success();
}

/// A Gateway of Istio whose port 80 redirects to its port 443, with a VirtualService on both.
const ISTIO: &str = "---
apiVersion: networking.istio.io/v1
kind: Gateway
metadata: {name: istio, namespace: default}
spec:
  selector: {istio: ingressgateway}
  servers:
  - {port: {number: 80, name: http, protocol: HTTP}, hosts: [shop.example.com], tls: {httpsRedirect: true}}
  - {port: {number: 443, name: https, protocol: HTTPS}, hosts: [\"*.example.com\"], tls: {mode: SIMPLE, credentialName: istio}}
---
apiVersion: networking.istio.io/v1
kind: VirtualService
metadata: {name: istio, namespace: default}
spec:
  hosts: [shop.example.com]
  gateways: [default/istio]
  http:
  - match: [{uri: {prefix: /headers}}]
    route: [{destination: {host: web, port: {number: 80}}}]
";

/// Clients outside reach alpha through a Gateway of Istio, at an address of the pool.
fn a_gateway_of_istio_serves_https(mesh: &Mesh) {
    let dir = tempfile::tempdir().expect("a directory");
    let authority = TestAuthority::root("the world's");
    let roots = dir.path().join("roots.pem");
    std::fs::write(&roots, authority.pem()).expect("a file in a temporary directory");
    let roots = roots.display().to_string();
    let certificate = authority.issue(&Leaf::named("*.example.com"));
    mesh.apply("alpha", &(secret("istio", &certificate) + ISTIO));
    let service = ["gateway", "status", "alpha/default/istio.istio-gateway"];
    let mut address = String::new();
    until(deadline(STEP_TIMEOUT), "the Gateway has an address", || {
        let shown = mesh.canal(&service).stdout;
        let words = shown.split(|c: char| !c.is_ascii_digit() && c != '.');
        let mut addresses = words.filter(|word| word.starts_with("198.19.0."));
        address = addresses.next().unwrap_or_default().to_owned();
        !address.is_empty()
    });
    let get = |host: &str, more: &[&str]| https_code_at(mesh, &address, &roots, host, more);
    until(deadline(STEP_TIMEOUT), "the Gateway serves HTTPS", || {
        get("shop.example.com", &[]) == 200
    });
    assert_eq!(code(mesh, &address, "shop.example.com"), 301);
    assert_eq!(code(mesh, &address, "a.example.com"), 404);
    // The server takes the host, and no VirtualService does.
    assert_eq!(get("a.example.com", &[]), 404);
    assert_eq!(get("other.test", &[]), 0);
    let kind = "gateways.networking.istio.io";
    mesh.canal(&[
        "delete", "--tenant", "alpha", kind, "istio", "-n", "default",
    ])
    .expect_success();
    until(
        deadline(STEP_TIMEOUT),
        "the Gateway's address is free again",
        || get("shop.example.com", &[]) == 0,
    );
}

/// A client follows the redirect of port 80 to port 443, by HTTP/2 there.
fn a_redirect_leads_to_https(mesh: &Mesh, roots: &str) {
    let [plain, secure] = [80, 443].map(|port| format!("shop.example.com:{port}:{SECURE}"));
    let argv = [
        "curl",
        "-sS",
        "-L",
        "--cacert",
        roots,
        "--resolve",
        &plain,
        "--resolve",
        &secure,
    ];
    let format = "\n{\"code\":%{http_code},\"version\":\"%{http_version}\",\"redirects\":%{num_redirects},\"url\":\"%{url_effective}\"}";
    let url = ["-w", format, "http://shop.example.com/headers"];
    let answered = mesh
        .run(CLIENT, &[&argv[..], &url].concat())
        .expect_success();
    let (body, report) = answered
        .rsplit_once('\n')
        .expect("a report behind the body");
    let report: Value = serde_json::from_str(report).expect("a report in JSON");
    let expected = serde_json::json!({"code": 200, "version": "2", "redirects": 1, "url": "https://shop.example.com/headers"});
    assert_eq!(report, expected, "{body}");
    assert!(body.contains("[\"x-forwarded-proto\",\"https\"]"), "{body}");
}

/// Requests on new connections, and many on one connection.
const REQUESTS: &str = "url=https://shop.example.com/headers; n=0; failed=0
one() { curl -s -o /dev/null -w '%{http_code}\\n' --cacert $1 --resolve shop.example.com:443:$2 \"$url?[1-$3]\"; }
for connection in 1 2 3 4 5 6; do
  for code in $(one $1 $2 $((connection > 5 ? 200 : 1))); do n=$((n + 1)); [ $code = 200 ] || failed=$((failed + 1)); done
done
[ $failed = 0 ] && [ $n = 205 ] && ok=true || ok=false
echo \"{\\\"ok\\\": $ok, \\\"requests\\\": $n, \\\"failed\\\": $failed}\"";

fn a_changed_certificate_fails_no_request(mesh: &Mesh, roots: &str, authority: &TestAuthority) {
    let client = vec!["sh", "-c", REQUESTS, "requests", roots, SECURE];
    let clients = [(CLIENT, client.clone()), (CLIENT, client)];
    let serial = || {
        let resolve = format!("shop.example.com:443:{SECURE}");
        let argv = [
            "curl",
            "-s",
            "-o",
            "/dev/null",
            "-w",
            "%{certs}",
            "--cacert",
            roots,
        ];
        let url = ["--resolve", &resolve, "https://shop.example.com/headers"];
        mesh.run(CLIENT, &[&argv[..], &url].concat())
            .expect_success()
    };
    let before = serial();
    let ((), reports) = load_while(mesh, &clients, || {
        // Two changes, so that the second replaces a certificate that was itself loaded at run
        // time.
        for number in [2, 3] {
            let renewed = authority.issue(&Leaf {
                serial: number,
                ..Leaf::named("shop.example.com")
            });
            let last = serial();
            mesh.apply("alpha", &secret("shop", &renewed));
            // Each handshake of a replica that has the new certificate presents it.
            until(
                deadline(STEP_TIMEOUT),
                "new handshakes present the new certificate",
                || {
                    // One handshake shows one replica; ten in a row make it likely that all have
                    // the certificate.
                    (0..10).all(|_| {
                        let shown = serial();
                        shown != last && shown != before
                    })
                },
            );
        }
    });
    for report in reports {
        assert!(report.sum("requests") > 0);
        report.assert_none_lost("requests during changes of a certificate");
    }
}

/// Returns a ConfigMap with an authority of clients, and alpha's Gateway for HTTPS that validates
/// clients with it.
fn validating_gateway(authority: &TestAuthority) -> String {
    let pem = authority.pem();
    let pem = pem.trim_end().replace('\n', "\n    ");
    let validation = "tls: {frontend: {default: {validation: {caCertificateRefs: [{group: '', kind: ConfigMap, name: clients}]}}}}";
    let gateway = secure_gateway().replacen(
        "gatewayClassName: canal,",
        &format!("gatewayClassName: canal, {validation},"),
        1,
    );
    format!(
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: clients, namespace: default}}\ndata:\n  ca.crt: |\n    {pem}\n{gateway}"
    )
}

/// Only clients with a certificate of the authority that the Gateway names reach alpha; a change of
/// the authority holds for new connections.
fn a_listener_validates_clients(mesh: &Mesh, roots: &str, dir: &Path) {
    let (own, other) = (TestAuthority::root("own"), TestAuthority::root("other"));
    let client = |name: &str, authority: &TestAuthority| {
        let issued = authority.issue(&Leaf::named("client"));
        let [chain, key] = ["crt", "key"].map(|end| dir.join(format!("{name}.{end}")));
        std::fs::write(&chain, issued.chain).expect("a file in a temporary directory");
        std::fs::write(&key, issued.key).expect("a file in a temporary directory");
        [chain, key].map(|path| path.display().to_string())
    };
    let (of_own, of_other) = (client("own", &own), client("other", &other));
    let code = |[chain, key]: &[String; 2]| {
        let more = ["--cert", chain, "--key", key];
        https_code(mesh, roots, "shop.example.com", &more)
    };
    for (authority, accepted, refused) in [(&own, &of_own, &of_other), (&other, &of_other, &of_own)]
    {
        mesh.apply("alpha", &validating_gateway(authority));
        // Both replicas have the change once several connections in a row show it.
        until(
            deadline(STEP_TIMEOUT),
            "the authority's clients alone are served",
            || {
                (0..10).all(|_| {
                    code(accepted) == 200
                        && code(refused) == 0
                        && https_code(mesh, roots, "shop.example.com", &[]) == 0
                })
            },
        );
    }
    let label = "reason=\"client_certificate\"";
    let counter = "canal_gateway_refused_connections_total";
    assert!(mesh.counted_at("gateway", counter, &[label]) > 0);
    mesh.apply("alpha", &secure_gateway());
}

/// Kills one replica after the other; the other one serves both Gateways meanwhile.
fn each_replica_serves_alone(mesh: &Mesh) {
    for replica in ["gw-1", "gw-2"] {
        mesh.world
            .stop(replica)
            .unwrap_or_else(|e| panic!("{replica}: {e}"));
        for address in [ALPHA, BETA] {
            until(
                deadline(STEP_TIMEOUT),
                &format!("{address} without {replica}"),
                || (0..20).all(|_| code(mesh, address, "shop.example.com") == 200),
            );
        }
        mesh.world
            .start(replica)
            .unwrap_or_else(|e| panic!("{replica}: {e}"));
        mesh.world
            .wait_ready(deadline(STEP_TIMEOUT))
            .unwrap_or_else(|e| panic!("{replica}: {e}"));
        let count =
            |mesh: &Mesh| mesh.counted(replica, "istio_requests_total", &["response_code=\"200\""]);
        until(
            deadline(STEP_TIMEOUT),
            &format!("{replica} serves again"),
            || code(mesh, ALPHA, "shop.example.com") == 200 && count(mesh) > 0,
        );
    }
}

/// Beta requests alpha's address for a further Gateway, and gets none.
fn a_gateway_without_an_address_disturbs_no_other(mesh: &Mesh) {
    let second = gateway(&format!("addresses: [{{value: {ALPHA}}}], ")).replace("public", "second");
    mesh.apply("beta", &second.replace("name: shop", "name: second"));
    let service = ["gateway", "status", "beta/default/second.gateway"];
    until(deadline(STEP_TIMEOUT), "the reason is shown", || {
        let shown = mesh.canal(&service).stdout;
        shown.contains("no gateway address in az1: another Gateway has the address")
    });
    for (address, tenant) in [(ALPHA, "alpha"), (BETA, "beta")] {
        assert_eq!(received(mesh, address)["version"], tenant);
    }
}
