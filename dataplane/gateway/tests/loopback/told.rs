//! What is told of requests: metrics, access log, tap, config dump.

use std::time::Duration;

use canal_gateway_engine::Filter;

use crate::client::Client;
use crate::origin::Origin;
use crate::rig::{Plot, Rig};

const POST: &str = "POST /a?b=c HTTP/1.1\r\nHost: web:80\r\nUser-Agent: test/1\r\nX-Request-Id: id-1\r\nContent-Length: 5\r\n\r\nhello";

#[tokio::test]
async fn requests_are_counted_with_istios_names() {
    let origin = Origin::named("web-body").await;
    let rig = Rig::new(Plot::default(), &[origin.address]);
    for _ in 0..3 {
        Client::once(rig.web, POST).await;
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
    rig.until("istio_requests_total", &labels, 3.0).await;
    assert_eq!(rig.metric("istio_request_duration_milliseconds_count", &labels), 3.0);
    assert_eq!(rig.metric("istio_request_bytes_sum", &labels), 15.0);
    assert_eq!(rig.metric("istio_response_bytes_sum", &labels), 24.0);
    assert!(rig.metric("istio_request_duration_milliseconds_bucket", &[labels[0], "le=\"1000\""]) == 3.0);
}

#[tokio::test]
async fn the_access_log_has_a_line_per_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("access.log");
    let origin = Origin::named("x").await;
    let rig = Rig::new(Plot { log: Some(path.clone()), ..Plot::default() }, &[origin.address]);
    Client::once(rig.web, POST).await;
    Client::once(rig.web, "GET / HTTP/1.1\r\nHost : web\r\n\r\n").await;
    let lines = async {
        loop {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            if text.lines().count() >= 1 {
                return text;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let text = tokio::time::timeout(Duration::from_secs(5), lines).await.unwrap();
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
    assert_eq!((&line["response_code"], &line["bytes_received"], &line["bytes_sent"]), (&200.into(), &5.into(), &1.into()));
    assert_eq!(line["upstream_host"], origin.address.to_string());
    assert!(line["duration_ms"].as_f64().unwrap() >= line["upstream_service_time_ms"].as_f64().unwrap());
}

#[tokio::test]
async fn the_tap_shows_what_its_filter_takes() {
    let origin = Origin::named("x").await;
    let rig = Rig::new(Plot::default(), &[origin.address]);
    let tap = rig.engine.tap();
    let mut all = tap.listen(Filter::default()).unwrap();
    let mut some = tap.listen(Filter { path: Some("/b".into()), service: Some("default/web".into()), ..Filter::default() }).unwrap();
    let mut errors = tap.listen(Filter { status: Some("5xx".into()), ..Filter::default() }).unwrap();
    for path in ["/a", "/b"] {
        Client::get(rig.web, path).await;
    }
    let read = |bytes: bytes::Bytes| serde_json::from_slice::<serde_json::Value>(&bytes).unwrap();
    let next = async |lines: &mut tokio::sync::mpsc::Receiver<bytes::Bytes>| {
        read(tokio::time::timeout(Duration::from_secs(5), lines.recv()).await.unwrap().unwrap())
    };
    let first = next(&mut all).await;
    assert_eq!((&first["path"], &first["status"], &first["tenant"]), (&"/a".into(), &200.into(), &"alpha".into()));
    assert_eq!(next(&mut all).await["path"], "/b");
    assert_eq!(next(&mut some).await["path"], "/b");
    assert!(some.try_recv().is_err() && errors.try_recv().is_err());
}

#[tokio::test]
async fn the_dump_shows_what_is_served() {
    let origin = Origin::named("x").await;
    let rig = Rig::new(Plot::default(), &[origin.address]);
    let dump = rig.engine.dump();
    assert_eq!(dump["generation"], 1);
    let service = &dump["tenants"][0]["services"][0];
    assert_eq!((&service["service"], &service["rules"]), (&"alpha/default/web".into(), &0.into()));
    assert_eq!(service["ports"][0]["endpoints"][0], format!("alpha/default/web-0 {}", origin.address));
}
