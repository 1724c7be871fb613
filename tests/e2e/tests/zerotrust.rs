//! Policies on real traffic: authorization at layers 4 and 7, for requests, connections and
//! plaintext; decisions by tokens and an external authorizer; what a change ends. `canal explain`
//! must report the same results.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::OnceLock;
use std::time::Duration;

use canal_e2e::{Mesh, until};
use canal_timing::{deadline, slack};

const CLIENT: &str = "alpha/default/client-0";
const INTRUDER: &str = "alpha/default/intruder-0";
/// Maximum time of a step on a quiet machine: a change is in force, or a process serves. It only
/// has to exceed what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);

fn mesh() -> &'static Mesh {
    static MESH: OnceLock<Mesh> = OnceLock::new();
    MESH.get_or_init(|| {
        let mesh = Mesh::up("trust.yaml", "e2e-policy");
        until(deadline(STEP_TIMEOUT), "every service answers", || {
            (10..18).all(|n| mesh.code(CLIENT, &url(n, "/headers"), &[]) == 200)
        });
        mesh
    })
}

/// Returns a web service's URL by the last number of its address: 10 is web, 11 web-l7, 12 web-dry,
/// 13 web-ask, 14 web-jwt, 15 web-strict, 16 web-open, 17 web-raw.
fn url(n: u32, path: &str) -> String {
    format!("http://10.101.0.{n}{path}")
}

/// Returns an AuthorizationPolicy for the pods of one application.
fn policy(name: &str, app: &str, annotations: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: {name}, namespace: default, annotations: {{{annotations}}}}}\n\
         spec:\n  selector: {{matchLabels: {{app: {app}}}}}\n{spec}"
    )
}

/// Returns whether `canal explain` allows the same request; `more` are curl's arguments.
fn explained(pod: &str, to: &str, path: &str, more: &[&str]) -> bool {
    let account = pod
        .rsplit('/')
        .next()
        .and_then(|name| name.strip_suffix("-0"))
        .expect("the first of its kind");
    let from = format!("default/{account}");
    let mut argv = vec![
        "explain", "--tenant", "alpha", "--from", &from, "--to", to, "--path", path, "-o", "json",
    ];
    let headers: Vec<String> = more
        .iter()
        .filter_map(|word| word.split_once(": "))
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    headers
        .iter()
        .for_each(|header| argv.extend(["--header", header]));
    let method = more.iter().skip_while(|word| **word != "-X").nth(1);
    argv.extend(method.into_iter().flat_map(|method| ["--method", method]));
    mesh().canal(&argv).json()["passes"] == true
}

/// Returns what gateways and nodes counted for a policy.
fn counted_decisions(action: &str, policy: &str) -> u64 {
    // A gateway's label has the namespace and the policy, a node's has the tenant before them.
    let labels = [format!("action=\"{action}\""), format!("{policy}\"")];
    let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
    ["gateway", "node"]
        .iter()
        .map(|kind| mesh().counted_at(kind, "canal_authorization_total", &labels))
        .sum()
}

/// DENY comes before ALLOW; methods, paths, headers and principals; once anything is allowed,
/// everything else is denied.
#[test]
fn layer_7_policies_allow_and_deny() {
    let allow = "  action: ALLOW\n  rules:\n  - from: [{source: {principals: [alpha.example/ns/default/sa/client]}}]\n    \
                 to: [{operation: {methods: [GET, PUT], paths: [/headers, /blob*]}}]\n";
    let deny = "  action: DENY\n  rules:\n  - to: [{operation: {paths: [/blob], methods: [PUT]}}]\n    \
                when: [{key: \"request.headers[x-kind]\", notValues: [friendly]}]\n";
    let yaml = policy("l7-allow", "web-l7", "", allow) + &policy("l7-deny", "web-l7", "", deny);
    mesh().apply("alpha", &yaml);
    let put: &[&str] = &["-X", "PUT", "-d", "x"];
    let cases: [(&str, &str, &str, &[&str], u16); 8] = [
        (
            "allowed client, allowed request",
            CLIENT,
            "/headers",
            &[],
            200,
        ),
        ("a prefix", CLIENT, "/blob?size=3", &[], 200),
        (
            "the query is not the path",
            CLIENT,
            "/headers?x=/blob",
            &[],
            200,
        ),
        ("another path", CLIENT, "/status/204", &[], 403),
        ("another method", CLIENT, "/headers", &["-X", "DELETE"], 403),
        ("another principal", INTRUDER, "/headers", &[], 403),
        ("deny before allow", CLIENT, "/blob", put, 403),
        (
            "what deny leaves out",
            CLIENT,
            "/blob",
            &["-X", "PUT", "-d", "x", "-H", "x-kind: friendly"],
            200,
        ),
    ];
    for (what, pod, path, more, expected) in cases {
        assert_eq!(mesh().code(pod, &url(11, path), more), expected, "{what}");
        // `canal explain` evaluates the same policies offline and must agree with the gateway.
        assert_eq!(
            explained(pod, "web-l7:80", path, more),
            expected == 200,
            "{what}: `canal explain` says what happened"
        );
    }
    // Envoy's body for a denied request; clients and operators look for it.
    let output = mesh()
        .run(INTRUDER, &["curl", "-sS", &url(11, "/headers")])
        .expect_success();
    assert!(output.contains("RBAC: access denied"), "{output}");
    until(
        deadline(STEP_TIMEOUT),
        "the denying policy is counted by its name",
        || counted_decisions("deny", "default/l7-deny") >= 1,
    );
}

/// On TCP, a gateway and a node decide by principals and ports alone.
#[test]
fn layer_4_policies_hold_on_tcp() {
    let spec = "  action: ALLOW\n  rules:\n  - from: [{source: {principals: [alpha.example/ns/default/sa/client]}}]\n    \
                to: [{operation: {ports: [\"7000\"]}}]\n";
    mesh().apply("alpha", &policy("l4", "echo-l4", "", spec));
    let echoes = |pod: &str, port: u16| {
        let mode = if port == 7000 { "echo" } else { "source" };
        let argv = [
            "canal-samples",
            "tcp-client",
            &format!("10.101.0.51:{port}"),
            "--mode",
            mode,
            "--size",
            "1000",
            "--timeout-ms",
            "60000",
        ];
        mesh().run(pod, &argv).code == Some(0)
    };
    for (what, pod, port, expected) in [
        ("who may", CLIENT, 7000, true),
        ("another port", CLIENT, 7003, false),
        ("another principal", INTRUDER, 7000, false),
        (
            "another principal of another node",
            "alpha/default/client-far-0",
            7000,
            false,
        ),
    ] {
        assert_eq!(echoes(pod, port), expected, "{what}");
        assert_eq!(
            explained(pod, &format!("echo-l4:{port}"), "/", &[]),
            expected,
            "{what}: `canal explain` says what happened"
        );
    }
}

/// Dry runs and audits are counted and change nothing.
#[test]
fn dry_runs_and_audits_only_count() {
    let all = "  rules: [{}]\n";
    let dry = policy(
        "dry",
        "web-dry",
        "istio.io/dry-run: \"true\"",
        &format!("  action: DENY\n{all}"),
    );
    let audit = policy("audit", "web-dry", "", &format!("  action: AUDIT\n{all}"));
    mesh().apply("alpha", &(dry + &audit));
    for _ in 0..5 {
        assert_eq!(mesh().code(INTRUDER, &url(12, "/headers"), &[]), 200);
    }
    // A request is counted when it is over, which may be after its response.
    until(deadline(STEP_TIMEOUT), "the dry run is counted", || {
        counted_decisions("dry_run_deny", "default/dry") >= 5
    });
    until(deadline(STEP_TIMEOUT), "the audit is counted", || {
        counted_decisions("audit", "default/audit") >= 5
    });
}

/// Timeout of the gateway for an authorizer that responds at once. Only an authorizer that does not
/// respond meets it.
const AUTHORIZED_WITHIN: Duration = Duration::from_secs(1);

/// Returns the tenant's authorizer with this timeout.
fn authorizer_with(timeout: &str) -> String {
    format!(
        "---\napiVersion: canal.mesh/v1\nkind: ExternalAuthorizer\nmetadata: {{name: ours, namespace: default}}\n\
             spec: {{service: {{name: authz, port: 9191}}, timeout: {timeout}, includeRequestBody: {{maxBytes: 100}}}}\n"
    )
}

/// CUSTOM calls the tenant's own authorizer, sends it the permitted fields, and enforces its
/// decision, and its status if that is unusual. Without a response it refuses.
#[test]
fn an_external_authorizer_is_called_and_obeyed() {
    let timeout = format!("{}s", (AUTHORIZED_WITHIN * slack()).as_secs());
    let authorizer = authorizer_with(&timeout);
    let custom = "  action: CUSTOM\n  provider: {name: ours}\n  rules:\n  - to: [{operation: {notPaths: [/health]}}]\n";
    mesh().apply(
        "alpha",
        &(authorizer.clone() + &policy("ask", "web-ask", "", custom)),
    );
    // The sample authorizer obeys the word in `x-authz`. `teapot` answers with status 418, and
    // `fail` ends its call with an error, which is no answer.
    for (word, expected) in [
        ("allow", 200),
        ("deny", 403),
        ("teapot", 418),
        ("fail", 403),
    ] {
        assert_eq!(
            mesh().code(
                CLIENT,
                &url(13, "/headers"),
                &["-H", &format!("x-authz: {word}")]
            ),
            expected,
            "{word}"
        );
    }
    let (secret, user) = ("x-authz-secret: s", "x-authz-user: forged");
    let headers = url(13, "/headers");
    let argv = ["curl", "-sS", "-d", "a body", "-H", secret, "-H", user];
    let argv = [&argv[..], &[headers.as_str()]].concat();
    let seen = mesh().run(CLIENT, &argv).expect_success();
    assert!(
        seen.contains("alpha.example/ns/default/sa/client"),
        "the authorizer's header is passed on: {seen}"
    );
    assert!(
        !seen.contains("forged") && !seen.contains("x-authz-secret"),
        "only the authorizer's own headers are passed on: {seen}"
    );
    let log = mesh().world.log("alpha/default/authz-0").unwrap();
    until(
        deadline(STEP_TIMEOUT),
        "the authorizer has printed its request",
        || {
            // A log that cannot be read yet is read again.
            let asked = std::fs::read_to_string(&log).unwrap_or_default();
            asked.contains("a body") && asked.contains("\"path\":\"/headers\"")
        },
    );
    assert_eq!(
        mesh().code(CLIENT, &url(13, "/health"), &["-H", "x-authz: deny"]),
        200,
        "requests outside the rule are not sent to the authorizer"
    );
    // The hanging authorizer must be abandoned after its timeout; a short one keeps the test short.
    mesh().apply("alpha", &authorizer_with("1s"));
    assert_eq!(
        mesh().code(CLIENT, &url(13, "/headers"), &["-H", "x-authz: hang"]),
        403,
        "an authorizer that hangs denies"
    );
    mesh().apply("alpha", &authorizer);
    mesh().world.stop("alpha/default/authz-0").unwrap();
    assert_eq!(
        mesh().code(CLIENT, &url(13, "/headers"), &[]),
        403,
        "a missing answer denies"
    );
    mesh().apply(
        "alpha",
        &authorizer_with(&format!("{timeout}, failOpen: true")),
    );
    until(
        deadline(STEP_TIMEOUT),
        "fails open if the tenant configures it",
        || mesh().code(CLIENT, &url(13, "/headers"), &[]) == 200,
    );
    mesh().apply("alpha", &authorizer);
    mesh().world.start("alpha/default/authz-0").unwrap();
    until(deadline(STEP_TIMEOUT), "the authorizer is back", || {
        mesh().code(CLIENT, &url(13, "/headers"), &[]) == 200
    });
}

/// Sends a request to the identity provider.
fn issuer(method: &str, path: &str, body: &str) -> String {
    mesh()
        .run(
            "issuer",
            &[
                "curl",
                "-sS",
                "-X",
                method,
                "-d",
                body,
                &format!("http://127.0.0.1:8090{path}"),
            ],
        )
        .expect_success()
}

fn with_token(token: &str, path: &str) -> u16 {
    mesh().code(
        CLIENT,
        &url(14, path),
        &["-H", &format!("authorization: Bearer {token}")],
    )
}

const STAFF: &str = r#"{"sub": "me", "aud": "shop", "group": ["guests", "staff"]}"#;
const FILED: &str = r#"{"iss": "https://file.example", "sub": "me", "group": "staff"}"#;

/// Returns a token of the test's issuer with these claims.
fn token(query: &str, claims: &str) -> String {
    issuer("POST", &format!("/token?{query}"), claims)
}

/// Returns a case's name, its token, and the status of the response.
fn token_cases() -> Vec<(&'static str, String, u16)> {
    vec![
        // The issuer also has an EC key, and the tenant's file has a copy of the issuer's keys.
        ("an EC key", token("kid=curve", STAFF), 200),
        ("keys of a file", token("kid=first", FILED), 200),
        (
            // A token that is not valid gets 401; a valid one that no policy admits gets 403, as in
            // Istio.
            "no claim",
            token("kid=first", r#"{"sub": "me", "aud": "shop"}"#),
            403,
        ),
        (
            "another audience",
            token(
                "kid=first",
                r#"{"sub": "me", "aud": "bank", "group": "staff"}"#,
            ),
            401,
        ),
        (
            "another issuer",
            token(
                "kid=first",
                r#"{"iss": "https://evil.example", "group": "staff"}"#,
            ),
            401,
        ),
        // 1000000000 is in 2001, and 4000000000 below is in 2096.
        (
            "ended",
            token(
                "kid=first",
                r#"{"aud": "shop", "group": "staff", "exp": 1000000000}"#,
            ),
            401,
        ),
        (
            "not yet",
            token(
                "kid=first",
                r#"{"aud": "shop", "group": "staff", "nbf": 4000000000}"#,
            ),
            401,
        ),
        ("one bit", token("kid=first&forge=bits", STAFF), 401),
    ]
}

/// Keys by URL, replaced while in use; keys from a file; claims in policies.
#[test]
fn tokens_are_checked_by_keys_from_url_and_file() {
    let file = mesh().world.config_dir("alpha").join("jwks.json");
    std::fs::write(&file, issuer("GET", "/jwks", "")).expect("the tenant's own key set");
    let rules = "  jwtRules:\n  - {issuer: \"https://issuer.example\", audiences: [shop], jwksUri: \"http://issuer:8090/jwks\"}\n  \
                 - {issuer: \"https://file.example\", jwksUri: \"file:jwks.json\", outputPayloadToHeader: x-payload}\n";
    let checks = "---\napiVersion: security.istio.io/v1\nkind: RequestAuthentication\nmetadata: {name: jwt, namespace: default}\n\
                  spec:\n  selector: {matchLabels: {app: web-jwt}}\n";
    let needs = "  action: ALLOW\n  rules:\n  - from: [{source: {requestPrincipals: [\"*\"]}}]\n    \
                 when: [{key: \"request.auth.claims[group]\", values: [staff]}]\n";
    mesh().apply(
        "alpha",
        &(checks.to_owned() + rules + &policy("jwt", "web-jwt", "", needs)),
    );
    until(
        deadline(STEP_TIMEOUT),
        "the controller has fetched the keys",
        || with_token(&token("kid=first", STAFF), "/headers") == 200,
    );
    for (what, token, expected) in token_cases() {
        assert_eq!(with_token(&token, "/headers"), expected, "{what}");
    }
    // No token at all is allowed by the RequestAuthentication; only the policy requires a
    // principal.
    assert_eq!(
        mesh().code(CLIENT, &url(14, "/headers"), &[]),
        403,
        "a request without a token has no principal"
    );
    let argv = [
        "curl",
        "-sS",
        "-H",
        &format!("authorization: Bearer {}", token("kid=first", FILED)),
        &url(14, "/headers"),
    ];
    assert!(
        mesh()
            .run(CLIENT, &argv)
            .expect_success()
            .contains("x-payload"),
        "the payload is forwarded if the tenant configures it"
    );
    // A key is replaced: tokens of the old key are refused, those of the new one are accepted,
    // nothing is restarted.
    let old = token("kid=first", STAFF);
    issuer("POST", "/keys?kid=second&alg=RS256", "");
    until(deadline(STEP_TIMEOUT), "the new key is known", || {
        with_token(&token("kid=second", STAFF), "/headers") == 200
    });
    // Both keys are valid while issuers replace one, so nothing is refused in between.
    assert_eq!(
        with_token(&old, "/headers"),
        200,
        "the old key is still accepted"
    );
    issuer("DELETE", "/keys?kid=first", "");
    until(deadline(STEP_TIMEOUT), "the old key is forgotten", || {
        with_token(&old, "/headers") == 401
    });
    until(deadline(STEP_TIMEOUT), "the tokens are counted", || {
        // More tokens than ten were sent above.
        mesh().counted_at("gateway", "canal_gateway_tokens_total", &[]) > 10
    });
}

/// Plaintext of a pod on a node that runs no part of the mesh is refused where mTLS is required,
/// and accepted and evaluated elsewhere.
#[test]
fn strict_refuses_plaintext_and_permissive_accepts_it() {
    let bare = "alpha/default/bare-0";
    let direct = |pod: &str| {
        format!(
            "http://{}:8080/headers",
            mesh().address(&format!("alpha/default/{pod}-0"))
        )
    };
    let peers = |name: &str, app: &str, spec: &str| {
        format!(
            "---\napiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {{name: {name}, namespace: default}}\n\
             spec: {{selector: {{matchLabels: {{app: {app}}}}}, {spec}}}\n"
        )
    };
    // Without a PeerAuthentication the mode is PERMISSIVE, as in Istio.
    assert_eq!(
        mesh().code(bare, &direct("web-strict"), &[]),
        200,
        "by default both are accepted"
    );
    mesh().apply(
        "alpha",
        &(peers("strict", "web-strict", "mtls: {mode: STRICT}")
            + &peers("open", "web-open", "mtls: {mode: PERMISSIVE}")),
    );
    // Code 0 is a connection that was closed: STRICT refuses before any HTTP.
    until(deadline(STEP_TIMEOUT), "plaintext is refused", || {
        mesh().code(bare, &direct("web-strict"), &[]) == 0
    });
    assert_eq!(
        mesh().code(CLIENT, &direct("web-strict"), &[]),
        200,
        "mTLS is not refused"
    );
    // 15 is the Service of `web-strict`.
    assert_eq!(
        mesh().code(CLIENT, &url(15, "/headers"), &[]),
        200,
        "mTLS by the Service is not refused either"
    );
    assert_eq!(
        mesh().code(bare, &direct("web-open"), &[]),
        200,
        "plaintext is accepted elsewhere"
    );
    let reason = ["direction=\"inbound\"", "reason=\"strict_plaintext\""];
    until(deadline(STEP_TIMEOUT), "the refusal is counted", || {
        mesh().counted("alpha-n2", "canal_node_refused_total", &reason) > 0
    });
    // Plaintext has no principal; a policy that names one does not allow it.
    let named =
        "  action: ALLOW\n  rules:\n  - from: [{source: {principals: [\"alpha.example/*\"]}}]\n";
    mesh().apply("alpha", &policy("open", "web-open", "", named));
    until(
        deadline(STEP_TIMEOUT),
        "a client without an identity does not match a principal",
        // A direct connection is refused by the node as a connection, hence code 0 and not 403.
        || mesh().code(bare, &direct("web-open"), &[]) == 0,
    );
    assert_eq!(mesh().code(CLIENT, &direct("web-open"), &[]), 200);
}

/// A rule that no hop on the path can evaluate denies, and the reason names it.
#[test]
fn a_rule_that_no_hop_can_evaluate_denies() {
    let methods = "  action: ALLOW\n  rules:\n  - to: [{operation: {methods: [GET]}}]\n";
    mesh().apply("alpha", &policy("methods", "echo", "", methods));
    let argv = [
        "canal-samples",
        "tcp-client",
        "10.101.0.50:7000",
        "--mode",
        "echo",
        "--size",
        "10",
        "--timeout-ms",
        // A timeout would look like a refusal, so it is long even for a slow machine.
        "60000",
    ];
    until(deadline(STEP_TIMEOUT), "TCP has no methods", || {
        mesh().run(CLIENT, &argv).code != Some(0)
    });
    until(
        deadline(STEP_TIMEOUT),
        "the undecided rule is counted",
        || counted_decisions("undecided", "default/methods") > 0,
    );
    // A connection to a pod's address is authorized by the pod's node, which cannot observe paths:
    // a rule that only a gateway can evaluate denies there.
    let paths = "  action: ALLOW\n  rules:\n  - to: [{operation: {paths: [/headers]}}]\n";
    mesh().apply("alpha", &policy("paths", "web-raw", "", paths));
    assert_eq!(
        mesh().code(CLIENT, &url(17, "/headers"), &[]),
        200,
        "the gateway authorizes"
    );
    assert_eq!(mesh().code(CLIENT, &url(17, "/blob?size=1"), &[]), 403);
    let bare = mesh().code(
        "alpha/default/bare-0",
        &format!(
            "http://{}:8080/headers",
            mesh().address("alpha/default/web-raw-0")
        ),
        &[],
    );
    assert_eq!(bare, 0, "the node alone cannot authorize");
}

/// A change ends open work that is no longer allowed, and nothing else.
#[test]
fn a_change_of_policy_ends_open_connections() {
    // Enough to be spread over all replicas and workers; any such number would do.
    const SESSIONS: usize = 20;
    let count = SESSIONS.to_string();
    let sessions = |pod: &str| {
        // The sessions last, and wait for answers, longer than the test: only the policy ends them.
        let argv = [
            "canal-samples",
            "sessions",
            "10.101.0.52:7000",
            "-n",
            &count,
            "--interval-ms",
            "200",
            "-d",
            "600",
        ];
        mesh().spawn(pod, &[&argv[..], &["--patience-ms", "60000"]].concat())
    };
    // The number of connections to a port of a server's pod.
    let open_at = |pod: &str, port: u16| {
        let filter = format!("-Htn state established sport = :{port}");
        let argv: Vec<&str> = std::iter::once("ss").chain(filter.split(' ')).collect();
        mesh().run(pod, &argv).stdout.lines().count()
    };
    let (kept, ended) = (sessions(CLIENT), sessions(INTRUDER));
    // The client sends 3,000 messages, longer than the test: only the policy ends the WebSocket.
    let argv = [
        "canal-samples",
        "ws-client",
        "ws://10.101.0.61:8081/",
        "--count",
        "3000",
        "--interval-ms",
        "200",
    ];
    let socket = mesh().spawn(INTRUDER, &[&argv[..], &["--timeout-ms", "60000"]].concat());
    until(deadline(STEP_TIMEOUT), "all are connected", || {
        open_at("alpha/default/echo-live-0", 7000) >= 2 * SESSIONS
            && open_at("alpha/default/ws-0", 8081) >= 1
    });
    let closed = || {
        mesh().counted_at("node", "canal_node_closed_total", &[])
            + mesh().counted_at("gateway", "canal_gateway_reauthorized_total", &[])
    };
    // A DENY that names one client: all others keep what they have.
    let before = closed();
    let others = "  action: DENY\n  rules:\n  - from: [{source: {principals: [alpha.example/ns/default/sa/intruder]}}]\n";
    mesh().apply(
        "alpha",
        &(policy("live", "echo-live", "", others) + &policy("ws", "ws", "", others)),
    );
    // Each hop counts the connections that it closes, so the counters alone do not show that all
    // are closed.
    until(
        deadline(STEP_TIMEOUT),
        "connections that are no longer allowed end",
        || open_at("alpha/default/echo-live-0", 7000) <= SESSIONS,
    );
    until(
        deadline(STEP_TIMEOUT),
        "connections have been closed",
        || closed() >= before + SESSIONS as u64,
    );
    let ended = mesh()
        .stop("sessions of clients that are no longer allowed", ended)
        .json();
    let kept = mesh()
        .stop("sessions of clients that are still allowed", kept)
        .json();
    let socket = mesh().end("a WebSocket of a client that is no longer allowed", socket);
    // The client opens broken sessions again, and each of these breaks as well.
    assert_eq!(kept["broken"], 0, "{kept}");
    assert!(
        ended["broken"].as_u64() >= Some(SESSIONS as u64),
        "all sessions that are no longer allowed end: {ended}"
    );
    // The client's own exit code shows that it ended by itself, not at its time limit.
    assert_eq!(socket.code, Some(1), "{socket:?}");
}

/// A datagram of a pod to a pod of another node, under `outboundTrafficPolicy: Deny`: it never
/// leaves, its sender gets EPERM, the node counts it.
#[test]
fn a_datagram_to_another_nodes_pod_does_not_arrive() {
    const SERVER: &str = "alpha/default/web-0";
    let mesh = mesh();
    let environment = mesh.world.host(SERVER).unwrap().environment;
    for address in [
        IpAddr::from(environment.ip4.unwrap()),
        environment.ip6.unwrap().into(),
    ] {
        let any = if address.is_ipv4() {
            "0.0.0.0:0"
        } else {
            "[::]:0"
        };
        let receiver = mesh
            .world
            .inside(SERVER, || UdpSocket::bind(any))
            .unwrap()
            .unwrap();
        receiver
            // A datagram inside the world arrives within milliseconds; the wait is for one that
            // must not come.
            .set_read_timeout(Some(Duration::from_secs(1)))
            .unwrap();
        let to = SocketAddr::new(address, receiver.local_addr().unwrap().port());
        let sent = mesh.run(CLIENT, &["canal-world-peer", "udp", &to.to_string()]);
        assert!(
            sent.code != Some(0) && sent.stderr.contains("PermissionDenied"),
            "{to}: {sent:?}"
        );
        assert!(
            receiver.recv(&mut [0; 8]).is_err(),
            "{to}: a datagram arrived in the clear"
        );
    }
    let stopped = || {
        mesh.counted_at(
            "node",
            "canal_pod_guard_packets_total",
            &["tenant=\"alpha\"", "verdict=\"stopped_udp\""],
        )
    };
    until(deadline(STEP_TIMEOUT), "the node counts both", || {
        stopped() >= 2
    });
    // `canal status` warns of traffic in the clear; here none left the node.
    let page = mesh.canal(&["status"]);
    assert!(!page.stdout.contains("in the clear"), "{page:?}");
}
