//! Reports about requests: metrics, access log, tap, config dump; and the headers that describe
//! clients to applications.

use std::time::Duration;

use canal_gateway_engine::{Filter, ForwardedHeaders};
use canal_model::authorization::{Authentication, JwtRule, PolicyTarget};
use canal_model::program::{AppProtocol, Resource};

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, TENANT};
use crate::hbone::{LoopbackMesh, local};
use crate::http2;
use crate::origin::OriginServer;

const POST: &str = "POST /a?b=c HTTP/1.1\r\nHost: web:80\r\nUser-Agent: test/1\r\nX-Request-Id: id-1\r\nContent-Length: 5\r\n\r\nhello";

#[tokio::test]
async fn requests_are_counted_with_istios_names() {
    let origin = OriginServer::named("web-body").await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    for _ in 0..3 {
        HttpClient::once(fixture.web, POST).await;
    }
    let labels = [
        "tenant=\"alpha\"",
        "reporter=\"waypoint\"",
        "destination_workload=\"web\"",
        "destination_app=\"web\"",
        "destination_version=\"web-0\"",
        "destination_service=\"web.default.svc.cluster.local\"",
        "destination_service_name=\"web\"",
        "destination_service_namespace=\"default\"",
        "request_protocol=\"http\"",
        "response_code=\"200\"",
        "response_flags=\"-\"",
        "connection_security_policy=\"none\"",
    ];
    fixture.until("istio_requests_total", &labels, 3.0).await;
    assert_eq!(
        fixture.metric("istio_request_duration_milliseconds_count", &labels),
        3.0
    );
    assert_eq!(fixture.metric("istio_request_bytes_sum", &labels), 15.0);
    assert_eq!(fixture.metric("istio_response_bytes_sum", &labels), 24.0);
    assert!(
        fixture.metric(
            "istio_request_duration_milliseconds_bucket",
            &[labels[0], "le=\"1000\""]
        ) == 3.0
    );
}

#[tokio::test]
async fn the_access_log_has_a_line_per_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let origin = OriginServer::named("x").await;
    let fixture = GatewayFixture::new(
        EngineSetup {
            log: Some(path.clone()),
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    HttpClient::once(fixture.web, POST).await;
    // This head is refused, and its line comes second.
    HttpClient::once(fixture.web, "GET / HTTP/1.1\r\nHost : web\r\n\r\n").await;
    let lines = async {
        loop {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            if text.lines().count() >= 1 {
                return text;
            }
            // An interval of polling; the timeout below bounds the wait.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let text = tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), lines)
        .await
        .unwrap();
    let line: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    for (name, want) in [
        ("tenant", "alpha"),
        ("method", "POST"),
        ("path", "/a?b=c"),
        ("protocol", "HTTP/1.1"),
        ("authority", "web:80"),
        ("response_flags", "-"),
        ("user_agent", "test/1"),
        ("request_id", "id-1"),
        ("service", "default/web"),
        ("service_host", "web.default.svc.cluster.local:80"),
        ("upstream_pod", "web-0"),
    ] {
        assert_eq!(line[name], want, "{name} in {line}");
    }
    assert_eq!(
        (
            &line["response_code"],
            &line["bytes_received"],
            &line["bytes_sent"]
        ),
        // `hello` was received, and `x` sent.
        (&200.into(), &5.into(), &1.into())
    );
    assert_eq!(line["upstream_host"], origin.address.to_string());
    assert!(
        line["duration_ms"].as_f64().unwrap() >= line["upstream_service_time_ms"].as_f64().unwrap()
    );
}

#[tokio::test]
async fn the_tap_shows_requests_that_match_its_filter() {
    let origin = OriginServer::named("x").await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let tap = fixture.engine.tap();
    let mut all = tap.listen(Filter::default()).unwrap();
    let mut some = tap
        .listen(Filter {
            path: Some("/b".into()),
            service: Some("default/web".into()),
            ..Filter::default()
        })
        .unwrap();
    let mut errors = tap
        .listen(Filter {
            status: Some("5xx".into()),
            ..Filter::default()
        })
        .unwrap();
    for path in ["/a", "/b"] {
        HttpClient::get(fixture.web, path).await;
    }
    let read = |bytes: bytes::Bytes| serde_json::from_slice::<serde_json::Value>(&bytes).unwrap();
    let next = async |lines: &mut canal_telemetry::observe::Lines| {
        read(
            tokio::time::timeout(canal_timing::deadline(Duration::from_secs(5)), lines.recv())
                .await
                .unwrap()
                .unwrap(),
        )
    };
    let first = next(&mut all).await;
    assert_eq!(
        (&first["path"], &first["status"], &first["tenant"]),
        (&"/a".into(), &200.into(), &"alpha".into())
    );
    assert_eq!(next(&mut all).await["path"], "/b");
    assert_eq!(next(&mut some).await["path"], "/b");
    assert!(some.try_recv().is_none() && errors.try_recv().is_none());
}

#[tokio::test]
async fn the_dump_shows_the_served_configuration() {
    let origin = OriginServer::named("x").await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let dump = fixture.engine.dump(None);
    assert_eq!(dump["generation"], 1);
    let part = |tenant: &str| fixture.engine.dump(Some(&tenant.parse().unwrap()));
    assert_eq!(part("alpha")["tenants"], dump["tenants"]);
    let other = part("nosuch").to_string();
    assert!(
        !other.contains("alpha") && !other.contains("default/"),
        "{other}"
    );
    let service = &dump["tenants"][0]["services"][0];
    assert_eq!(
        (&service["service"], &service["rules"]),
        (&"alpha/default/web".into(), &0.into())
    );
    assert_eq!(
        service["ports"][0]["endpoints"][0],
        format!("alpha/default/web-0 {}", origin.address)
    );
}

/// Applications that were moved from Envoy trust these headers, so a client must not be able to set
/// them.
#[tokio::test]
async fn hop_headers_of_clients_reach_no_application() {
    let (one, two) = (OriginServer::echo().await, http2::origin(http2::echo).await);
    let words = [
        ("x-forwarded-client-cert", "By=spiffe://x;URI=spiffe://root"),
        ("x-envoy-internal", "true"),
        ("x-envoy-peer-metadata", "a"),
        ("x-forwarded-proto", "https"),
        ("x-kept", "yes"),
    ];
    for (protocol, origin) in [(AppProtocol::Http1, &one), (AppProtocol::Http2, &two)] {
        // `proto` is the value that applications get in either setting.
        for (forwarded, proto) in [
            (ForwardedHeaders::default(), "http"),
            (
                ForwardedHeaders {
                    client_cert: true,
                    keeps_proto: true,
                },
                "https",
            ),
        ] {
            let fixture = GatewayFixture::new(
                EngineSetup {
                    protocol,
                    forwarded,
                    ..EngineSetup::default()
                },
                &[origin.address],
            );
            let lines: String = words
                .iter()
                .map(|(name, value)| format!("{}: {value}\r\n", name.to_ascii_uppercase()))
                .collect();
            let first = HttpClient::once(
                fixture.web,
                &format!("GET / HTTP/1.1\r\nHost: web\r\n{lines}\r\n"),
            )
            .await
            .text();
            let mut request = http::Request::get("http://web/");
            for (name, value) in words {
                request = request.header(name, value);
            }
            let client = http2::connect(&fixture).await;
            let (response, _) = client
                .ready()
                .await
                .unwrap()
                .send_request(request.body(()).unwrap(), true)
                .unwrap();
            let (second, _) = http2::read_all(response.await.unwrap().into_body())
                .await
                .unwrap();
            for text in [first, String::from_utf8(second).unwrap()] {
                let text = text.to_ascii_lowercase();
                // The client proved no identity, so the header is absent whatever the option is.
                assert!(
                    !text.contains("client-cert")
                        && !text.contains("envoy")
                        && text.contains("x-kept: yes"),
                    "{text}"
                );
                let protos: Vec<_> = text
                    .lines()
                    .filter(|line| line.starts_with("x-forwarded-proto:"))
                    .collect();
                assert_eq!(
                    protos,
                    [format!("x-forwarded-proto: {proto}")],
                    "{forwarded:?}"
                );
            }
        }
    }
}

/// Returns a rule that finds tokens in the user agent and in the parameter `jwt`.
fn rule_of_odd_places() -> JwtRule {
    JwtRule {
        issuer: "iss".into(),
        audiences: vec![],
        keys: None,
        headers: vec![("user-agent".into(), String::new())],
        parameters: vec!["jwt".into()],
        cookies: vec![],
        forward: false,
        payload_header: None,
        claim_headers: vec![],
    }
}

/// Checks that a new log file is readable by the owner and its group only, as the process's umask
/// leaves it.
fn check_new_log(dir: &std::path::Path, fixture: &GatewayFixture) {
    use std::os::unix::fs::PermissionsExt;
    let new = dir.join("new.log");
    drop(
        canal_telemetry::access_log::AccessLog::start(
            canal_telemetry::access_log::LogSink::File(new.clone()),
            &fixture.registry,
        )
        .unwrap(),
    );
    assert_eq!(
        std::fs::metadata(&new).unwrap().permissions().mode() & 0o037,
        0,
        "as the process's umask leaves it, at most 0640"
    );
}

#[tokio::test]
async fn tokens_are_in_neither_log_nor_tap() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    // An older version left the file readable by all users.
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    let origin = OriginServer::named("x").await;
    let mut fixture = GatewayFixture::new(
        EngineSetup {
            log: Some(path.clone()),
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    fixture.apply(vec![Resource::Authentication(Authentication {
        key: crate::policies::named("jwt"),
        target: PolicyTarget::Service(crate::fixture::key(TENANT, "other")),
        // A rule with tokens in unusual parameters, for another service: names are redacted
        // tenant-wide.
        rules: vec![rule_of_odd_places()],
        broken: None,
    })]);
    let mut tapped = fixture.engine.tap().listen(Filter::default()).unwrap();
    let secrets = ["s3cret-1", "s3cret-2", "s3cret-3", "s3cret-4"];
    let [a, b, c, d] = secrets;
    // The tokens are redacted for a destination without policies and with the parameter's name in
    // any spelling.
    let query = format!("/a?q=1&access_token={a}&jwt={b}&access%5Ftoken={c}&r");
    let lines = format!("Host: web\r\nUser-Agent: {d}\r\n\r\n");
    assert_eq!(
        HttpClient::once(fixture.web, &format!("GET {query} HTTP/1.1\r\n{lines}"))
            .await
            .status,
        200
    );
    let client = http2::connect(&fixture).await;
    let request = http::Request::get(format!("http://web{query}"))
        .header("user-agent", d)
        .body(())
        .unwrap();
    client
        .ready()
        .await
        .unwrap()
        .send_request(request, true)
        .unwrap()
        .0
        .await
        .unwrap();
    let mut dump_text = String::new();
    // One message per request.
    for _ in 0..2 {
        dump_text += std::str::from_utf8(
            &tokio::time::timeout(
                canal_timing::deadline(Duration::from_secs(5)),
                tapped.recv(),
            )
            .await
            .unwrap()
            .unwrap(),
        )
        .unwrap();
    }
    // Workers write their buffered log lines when they end.
    fixture.drain(Duration::from_secs(2));
    // Longer than the drain, so that a forced one ends too.
    assert!(fixture.join_workers(Duration::from_secs(5)).await);
    fixture.engine.finish();
    dump_text += &std::fs::read_to_string(&path).unwrap();
    assert!(
        secrets.iter().all(|secret| !dump_text.contains(secret)),
        "{dump_text}"
    );
    let shown = "/a?q=1&access_token=[redacted]&jwt=[redacted]&access%5Ftoken=[redacted]&r";
    assert_eq!(
        dump_text.matches(shown).count(),
        4,
        "twice in the tap, twice in the log: {dump_text}"
    );
    assert_eq!(
        // Of an existing file only the access of others is taken away: 0644 becomes 0640.
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o640
    );
    check_new_log(dir.path(), &fixture);
}

#[test]
fn client_identity_is_forwarded_if_the_operator_enables_it() {
    local(|| async {
        let origin = OriginServer::echo().await;
        let forwarded = ForwardedHeaders {
            client_cert: true,
            keeps_proto: false,
        };
        let mesh = LoopbackMesh::new(EngineSetup {
            forwarded,
            ..EngineSetup::default()
        });
        let _node = mesh.pod(10, "web-0", &origin).await;
        let mut client = mesh.client("10.96.0.1:80").await;
        client.send(b"GET / HTTP/1.1\r\nHost: web\r\nX-Forwarded-Client-Cert: URI=spiffe://root\r\n\r\n").await;
        let text = client.answer().await.unwrap().text();
        assert!(
            text.contains(
                "x-forwarded-client-cert: URI=spiffe://alpha.example/ns/default/sa/client\r\n"
            ),
            "{text}"
        );
        assert!(!text.contains("root"), "{text}");
    });
}
