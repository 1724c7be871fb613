//! Attacks inside HTTP: false identities, false destinations, and paths, methods and messages that
//! two readers could read differently.

use std::time::Duration;

use canal_e2e::raw::{h2_frames, h2_is_over, h2_request, raw, raw_text};
use canal_timing::deadline;

use super::attack_world::{Attack, AttackOutcome, AttackWorld, BETA, CLIENT, INTRUDER, poll};

/// Address of the web service behind the policy on paths.
const RAW: &str = "10.101.0.17";
/// Types of the frames that end an HTTP/2 stream and connection, and of its responses (RFC 9113
/// §6).
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;
const HEADERS: u8 = 1;
/// Raw bytes of a client that may send them are answered within this time. A raw connection that is
/// silent for two seconds counts as refused, so such a client tries again. It only has to exceed
/// what a quiet machine needs: in the gate, `deadline` waits a minute or more.
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);

pub(crate) fn attacks() -> Vec<Attack> {
    [names(), claims(), paths(), methods(), framing(), streams()]
        .into_iter()
        .flatten()
        .collect()
}

/// Alpha's service by any name that beta can write.
fn names() -> Vec<Attack> {
    let alphas = |s: &AttackWorld| {
        s.by_alpha(
            CLIENT,
            "http://10.101.0.90/headers",
            &["-H", "Host: secret.default.svc.cluster.local"],
        )
    };
    let beta = |name, url: &'static str, header: &'static str| {
        Attack::new(
            name,
            move |s: &AttackWorld| s.by_alpha(BETA, url, &["-H", header]),
            alphas,
        )
    };
    vec![
        // Each line sends the request to an address that both tenants have, or that only alpha has.
        beta("Host of alpha's service", "http://10.101.0.10/headers", "Host: secret.default.svc.cluster.local"),
        beta("Host of alpha's service, with its trust domain", "http://10.101.0.10/headers", "Host: secret.default.alpha.example"),
        beta("Host of alpha's service by its address", "http://10.101.0.10/headers", "Host: 10.101.0.90"),
        beta("the address of alpha's service", "http://10.101.0.90/headers", "X-Canal-Tenant: alpha"),
        Attack::new(
            "an absolute target of alpha's service",
            |s| {
                let request = "GET http://secret.default.svc.cluster.local/headers HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n";
                let answer = raw_text(&s.mesh, BETA, "10.101.0.10", 80, request, "blob-alpha");
                AttackOutcome::of(answer.contains("blob-alpha"), answer)
            },
            alphas,
        ),
        // A proxy and an application could each believe another Host, so the gateway must refuse.
        Attack::new(
            "two Hosts",
            |s| {
                let request = "GET /headers HTTP/1.1\r\nHost: web\r\nHost: secret.default.svc.cluster.local\r\nConnection: close\r\n\r\n";
                let answer = raw_text(&s.mesh, BETA, "10.101.0.10", 80, request, " 200 ");
                AttackOutcome::of(answer.contains(" 200 "), answer)
            },
            alphas,
        )
        .counted("gateway", "canal_gateway_refused_requests_total", &["side=\"client\""]),
    ]
}

/// Headers with which a client claims to be another.
fn claims() -> Vec<Attack> {
    // A forged header changes nothing: the policy denies the client by its certificate.
    let denied = |attack: Attack| {
        attack.counted("gateway", "canal_authorization_total", &["action=\"deny\""])
    };
    // 10.101.0.11 is the Service of `web-l7`, 12 that of `web-dry`, and 16 that of `web-open`.
    let client = |s: &AttackWorld| s.served(CLIENT, "http://10.101.0.11/headers", &[]);
    let intruder = |name, header: &'static str| {
        denied(Attack::new(
            name,
            move |s: &AttackWorld| {
                s.served(INTRUDER, "http://10.101.0.11/headers", &["-H", header])
            },
            client,
        ))
    };
    vec![
        intruder(
            "x-forwarded-client-cert of another",
            "x-forwarded-client-cert: By=spiffe://alpha.example/ns/default/sa/web-l7;URI=spiffe://alpha.example/ns/default/sa/client",
        ),
        intruder(
            "canal-source of another",
            "canal-source: spiffe://alpha.example/ns/default/sa/client",
        ),
        intruder(
            "baggage of another",
            "baggage: k8s.namespace.name=default,k8s.pod.name=client-0",
        ),
        intruder(
            "x-authz-user and its like",
            "x-authz-user: alpha.example/ns/default/sa/client",
        ),
        // The policy admits the client's address, which the gateway must not take from a header.
        denied(Attack::new(
            "x-forwarded-for of an address that may",
            |s| {
                let header = format!("x-forwarded-for: {}", s.mesh.address(CLIENT));
                s.served(INTRUDER, "http://10.101.0.16/headers", &["-H", &header])
            },
            |s| s.served(CLIENT, "http://10.101.0.16/headers", &[]),
        )),
        denied(Attack::new(
            "forwarded of an address that may",
            |s| {
                let header = format!("forwarded: for=\"{}:99\"", s.mesh.address(CLIENT));
                s.served(INTRUDER, "http://10.101.0.12/headers", &["-H", &header])
            },
            |s| s.served(CLIENT, "http://10.101.0.12/headers", &[]),
        )),
    ]
}

/// Paths that an application could take for `/headers`, which the intruder may not request.
fn paths() -> Vec<Attack> {
    let client = |s: &AttackWorld| s.served(CLIENT, &format!("http://{RAW}/headers"), &[]);
    let variant = |name, path: &'static str| {
        Attack::new(
            name,
            move |s: &AttackWorld| s.served(INTRUDER, &format!("http://{RAW}{path}"), &[]),
            client,
        )
    };
    let denied = |attack: Attack| {
        attack.counted("gateway", "canal_authorization_total", &["action=\"deny\""])
    };
    let refused =
        |attack: Attack| attack.counted("gateway", "canal_gateway_refused_requests_total", &[]);
    vec![
        denied(variant("the path itself", "/headers")),
        denied(variant("an encoded letter", "/%68eaders")),
        denied(variant("every letter encoded", "/%68%65%61%64%65%72%73")),
        denied(variant("two slashes", "//headers")),
        denied(variant("a dot segment", "/./headers")),
        denied(variant("an encoded dot segment", "/%2e/headers")),
        denied(variant("two dots", "/blob/../headers")),
        denied(variant("two encoded dots", "/blob/%2e%2e/headers")),
        denied(variant("two dots, one encoded", "/blob/.%2E/headers")),
        denied(variant("a query", "/headers?a=/blob")),
        refused(variant("an encoded slash", "/blob%2f..%2fheaders")),
        refused(variant("an encoded backslash", "/blob%5c..%5cheaders")),
        refused(variant("a NUL", "/headers%00")),
        refused(variant("above the root", "/../../headers")),
        variant("a parameter", "/headers;a=b"),
        variant("another case", "/HEADERS"),
        variant("encoded twice", "/%2568eaders"),
        variant("a fragment, encoded", "/headers%23"),
    ]
}

fn methods() -> Vec<Attack> {
    let put: &[&str] = &["-X", "PUT", "-d", "x"];
    let client = move |s: &AttackWorld| s.served(CLIENT, &format!("http://{RAW}/blob"), put);
    let denied = |attack: Attack| {
        attack.counted("gateway", "canal_authorization_total", &["action=\"deny\""])
    };
    let over = |name, header: &'static str| {
        denied(Attack::new(
            name,
            move |s: &AttackWorld| {
                s.served(
                    INTRUDER,
                    &format!("http://{RAW}/blob"),
                    &["-X", "PUT", "-d", "x", "-H", header],
                )
            },
            client,
        ))
    };
    vec![
        over(
            "a method overridden by a header",
            "X-HTTP-Method-Override: GET",
        ),
        over("the same by another", "X-HTTP-Method: GET"),
        Attack::new(
            "a method in lower case",
            |s| {
                let request = "put /blob HTTP/1.1\r\nHost: w\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx";
                let answer = raw_text(&s.mesh, INTRUDER, RAW, 80, request, "sha256");
                AttackOutcome::of(answer.contains("sha256"), answer)
            },
            client,
        ),
    ]
}

/// The request that a message hides.
const HIDDEN: &str = "GET /headers HTTP/1.1\r\nHost: w\r\nX-Hidden: yes\r\n\r\n";

/// The control of hidden requests: the same request, pipelined behind another one.
fn pipelined(s: &AttackWorld) -> AttackOutcome {
    let request = format!("GET /blob?size=1 HTTP/1.1\r\nHost: w\r\n\r\n{HIDDEN}");
    // A silent connection looks like a refusal, so the control may try again.
    poll(deadline(ANSWERED_WITHIN), || {
        let answer = raw_text(&s.mesh, CLIENT, RAW, 80, &request, "x-hidden");
        AttackOutcome::of(answer.to_lowercase().contains("x-hidden"), answer)
    })
}

/// Messages that hide a forbidden request if two hops disagree on where the first one ends. Lengths
/// of 0, 4 and 5 end the body before the hidden request; 58 is more than the hidden request has.
fn framing() -> Vec<Attack> {
    let refused = |name, head: &'static str, body: String| {
        let attempt = move |s: &AttackWorld| {
            let request = format!("POST /blob?size=1 HTTP/1.1\r\nHost: w\r\n{head}\r\n\r\n{body}");
            let answer = raw_text(&s.mesh, INTRUDER, RAW, 80, &request, "x-hidden");
            AttackOutcome::of(answer.to_lowercase().contains("x-hidden"), answer)
        };
        Attack::new(name, attempt, pipelined).counted(
            "gateway",
            "canal_gateway_refused_requests_total",
            &["side=\"client\""],
        )
    };
    vec![
        refused(
            "both lengths, the first counts",
            "Content-Length: 5\r\nTransfer-Encoding: chunked",
            format!("0\r\n\r\n{HIDDEN}"),
        ),
        refused(
            "both lengths, the second counts",
            "Transfer-Encoding: chunked\r\nContent-Length: 4",
            format!("0\r\n\r\n{HIDDEN}"),
        ),
        refused(
            "two lengths",
            "Content-Length: 0\r\nContent-Length: 58",
            HIDDEN.into(),
        ),
        refused("a length with a sign", "Content-Length: +0", HIDDEN.into()),
        refused("a list of lengths", "Content-Length: 0, 58", HIDDEN.into()),
        refused(
            "chunked, misspelt",
            "Transfer-Encoding: xchunked",
            format!("0\r\n\r\n{HIDDEN}"),
        ),
        refused(
            "chunked, twice",
            "Transfer-Encoding: chunked, chunked",
            format!("0\r\n\r\n{HIDDEN}"),
        ),
        refused(
            "chunked, behind a blank",
            "Transfer-Encoding : chunked",
            format!("0\r\n\r\n{HIDDEN}"),
        ),
        refused(
            "chunked, on a folded line",
            "Transfer-Encoding:\r\n chunked",
            format!("0\r\n\r\n{HIDDEN}"),
        ),
        refused(
            "a chunk's size with a sign",
            "Transfer-Encoding: chunked",
            format!("+0\r\n\r\n{HIDDEN}"),
        ),
        refused(
            "lines that end in LF alone",
            "X: y\nContent-Length: 0",
            HIDDEN.into(),
        ),
        refused(
            "a NUL in a value",
            "X: a\0b\r\nContent-Length: 0",
            HIDDEN.into(),
        ),
        // A gateway ignores this upgrade, which RFC 9113 no longer has, so it counts no refusal.
        Attack::new(
            "an upgrade to HTTP/2 in the clear",
            |s| {
                // The settings are valid: 100 streams and a window of 65,535 bytes.
                let request = "GET /headers HTTP/1.1\r\nHost: w\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n";
                let answer = raw_text(&s.mesh, INTRUDER, RAW, 80, request, "x-served-by");
                AttackOutcome::of(
                    answer.contains(" 101 ") || answer.contains("x-served-by"),
                    answer,
                )
            },
            pipelined,
        ),
    ]
}

/// HTTP/2 heads with two meanings, or with an HTTP/1.1 request that the client did not send.
fn streams() -> Vec<Attack> {
    let fields = |path: &'static str| {
        [
            (":method", "GET"),
            (":scheme", "http"),
            (":authority", "w"),
            (":path", path),
        ]
    };
    let good: [(&str, &str); 4] = fields("/headers");
    let ask = |s: &AttackWorld, pod: &str, fields: &[(&str, &str)]| {
        // Port 81 of the Service is declared as HTTP/2.
        let frames = h2_frames(&raw(&s.mesh, pod, RAW, 81, &h2_request(fields), h2_is_over));
        // The body of a response mirrors the request; an error contains nothing of it.
        let mirrored = frames
            .iter()
            .any(|(_, _, payload)| String::from_utf8_lossy(payload).contains("\"uri\""));
        let kinds: Vec<u8> = frames
            .iter()
            .map(|(kind, _, _)| *kind)
            .filter(|kind| [HEADERS, RST_STREAM, GOAWAY].contains(kind))
            .collect();
        AttackOutcome::of(mirrored, kinds)
    };
    let client = move |s: &AttackWorld| poll(deadline(ANSWERED_WITHIN), || ask(s, CLIENT, &good));
    let intruder = |name, fields: Vec<(&'static str, &'static str)>| {
        Attack::new(
            name,
            move |s: &AttackWorld| ask(s, INTRUDER, &fields),
            client,
        )
    };
    let with =
        |field: (&'static str, &'static str)| good.into_iter().chain([field]).collect::<Vec<_>>();
    let path = |path: &'static str| fields(path).to_vec();
    // Only what is counted reaches the gateway's own check of heads. The HTTP/2 library resets
    // malformed ones, and a policy denies the paths.
    let counted = |attack: Attack| {
        attack.counted(
            "gateway",
            "canal_gateway_refused_requests_total",
            &["side=\"client\""],
        )
    };
    vec![
        intruder(
            "HTTP/2: two paths",
            [(":path", "/blob?size=1")]
                .into_iter()
                .chain(good)
                .collect(),
        ),
        counted(intruder(
            "HTTP/2: :authority and another Host",
            with(("host", "secret.default.svc.cluster.local")),
        )),
        intruder(
            "HTTP/2: a line feed in a value",
            with(("x-a", "b\r\nx-hidden: yes")),
        ),
        intruder(
            "HTTP/2: a name in capitals",
            with((
                "X-Forwarded-Client-Cert",
                "URI=spiffe://alpha.example/ns/default/sa/client",
            )),
        ),
        intruder(
            "HTTP/2: transfer-encoding",
            with(("transfer-encoding", "chunked")),
        ),
        intruder(
            "HTTP/2: a pseudo field after others",
            [("x-a", "b")].into_iter().chain(good).collect(),
        ),
        intruder(
            "HTTP/2: an unknown pseudo field",
            with((":tenant", "alpha")),
        ),
        intruder(
            "HTTP/2: a path with a line feed",
            path("/blob?size=1 HTTP/1.1\r\nx: y"),
        ),
        intruder("HTTP/2: a path without a slash", path("headers")),
        intruder("HTTP/2: an encoded path", path("/%68eaders")),
        intruder("HTTP/2: a path with dots", path("/blob/../headers")),
    ]
}
