//! Tests of key sets that tenants name by URI: which servers are contacted, and which sets are
//! accepted. The last good set stays when a set is not available. A small HTTP server is the fake
//! issuer.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::fixture::{ControllerFixture, ManualSubscriber, tenant, wait_limit};
use canal_controller_core::ControllerLimits;
use canal_model::program::{Resource, ResourceKind};
use canal_timing::assert_time;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// State of the fake issuer: its response, and how often it was requested and responded that
/// nothing changed.
struct FakeIssuer {
    body: String,
    status: &'static str,
    requests: usize,
    unchanged: usize,
}

async fn issuer() -> (std::net::SocketAddr, Arc<Mutex<FakeIssuer>>) {
    let state = Arc::new(Mutex::new(FakeIssuer {
        body: set("one"),
        status: "200 OK",
        requests: 0,
        unchanged: 0,
    }));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, held) = (listener.local_addr().unwrap(), state.clone());
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            let mut head = vec![0; 4096];
            let n = tcp.read(&mut head).await.unwrap_or(0);
            let head = String::from_utf8_lossy(&head[..n]).to_lowercase();
            let answer = {
                let mut issuer = held.lock().unwrap();
                issuer.requests += 1;
                let etag = format!("\"{}\"", issuer.body.len());
                if issuer.status == "200 OK" && head.contains(&format!("if-none-match: {etag}")) {
                    issuer.unchanged += 1;
                    "HTTP/1.1 304 Not Modified\r\n\r\n".to_string()
                } else {
                    format!(
                        "HTTP/1.1 {}\r\netag: {etag}\r\ncontent-length: {}\r\n\r\n{}",
                        issuer.status,
                        issuer.body.len(),
                        issuer.body
                    )
                }
            };
            let _ = tcp.write_all(answer.as_bytes()).await;
        }
    });
    (address, state)
}

fn set(kid: &str) -> String {
    format!(
        "{{\"keys\":[{{\"kty\":\"EC\",\"crv\":\"P-256\",\"kid\":\"{kid}\",\"x\":\"AA\",\"y\":\"AA\"}}]}}"
    )
}

fn authentication(name: &str, uri: &str) -> String {
    format!(
        "apiVersion: security.istio.io/v1\nkind: RequestAuthentication\nmetadata: {{name: {name}, namespace: shop}}\n\
         spec: {{jwtRules: [{{issuer: \"https://issuer.example\", jwksUri: \"{uri}\"}}]}}\n"
    )
}

fn keys(s: &ManualSubscriber, name: &str) -> Option<String> {
    match s
        .resources
        .get(&(ResourceKind::Authentication, format!("alpha/shop/{name}")))
    {
        Some((_, Resource::Authentication(a))) => a.rules[0].keys.clone(),
        other => panic!("{name}: {other:?}"),
    }
}

async fn until_keys(s: &mut ManualSubscriber, name: &'static str, want: Option<&'static str>) {
    let at = (ResourceKind::Authentication, format!("alpha/shop/{name}"));
    s.until(name, |h| match h.get(&at) {
        Some((_, Resource::Authentication(a))) => a.rules[0]
            .keys
            .as_deref()
            .map_or(want.is_none(), |k| want.is_some_and(|w| k.contains(w))),
        _ => false,
    })
    .await;
}

async fn fixture(issuer: std::net::SocketAddr) -> ControllerFixture {
    ControllerFixture::tuned(ControllerLimits::default(), |config| {
        config.jwks.hosts = vec![issuer.to_string().parse().unwrap()];
        config.jwks.refresh = Duration::from_millis(300);
    })
    .await
}

async fn counted(fixture: &ControllerFixture, outcome: &str) {
    let until = Instant::now() + wait_limit();
    let line =
        format!("canal_controller_jwks_fetches_total{{tenant=\"alpha\",outcome=\"{outcome}\"}}");
    while fixture.metric(&line).await < 1.0 {
        assert!(Instant::now() < until, "{line}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_key_set_is_fetched_refreshed_and_retained_on_failure() {
    let (address, issuer) = issuer().await;
    let mut fixture = fixture(address).await;
    let uri = format!("http://{address}/keys");
    fixture.write(
        "alpha/mesh.yaml",
        &(tenant("alpha", 1) + "---\n" + &authentication("web", &uri)),
    );
    let mut g1 = fixture.subscribe("g1").await;
    until_keys(&mut g1, "web", Some("one")).await;
    // A 304 proves that the set is fetched again with its ETag.
    counted(&fixture, "unchanged").await;
    issuer.lock().unwrap().body = set("second");
    until_keys(&mut g1, "web", Some("second")).await;
    for (status, body, outcome) in [
        ("500 Broken", set("third"), "status"),
        ("302 Found", set("third"), "redirect"),
        ("200 OK", "{\"no\":\"keys\"}".to_string(), "form"),
        (
            "200 OK",
            format!(
                // The padding alone has as many bytes as the limit, so the body exceeds it.
                "{{\"keys\":[],\"x\":\"{}\"}}",
                "x".repeat(canal_controller_core::JWKS_BYTES_MAX)
            ),
            "bytes",
        ),
    ] {
        {
            let mut issuer = issuer.lock().unwrap();
            (issuer.status, issuer.body) = (status, body);
        }
        // The counter proves that the issuer's answer was read before the key set is checked.
        counted(&fixture, outcome).await;
    }
    g1.settle().await;
    assert!(
        keys(&g1, "web").unwrap().contains("second"),
        "the last good one stays"
    );
    let mut root = fixture.admin("root").await;
    let diagnostics = root.status().await.diagnostics;
    assert!(
        diagnostics
            .iter()
            .any(|d| d.problem.contains("the last good key set is in force")),
        "{diagnostics:?}"
    );
    // The last good set also stays across a restart while the issuer is broken.
    drop((g1, root));
    fixture.stop().await;
    fixture.start().await;
    let mut g1 = fixture.subscribe("g1").await;
    g1.settle().await;
    assert!(keys(&g1, "web").unwrap().contains("second"));
    {
        let mut issuer = issuer.lock().unwrap();
        (issuer.status, issuer.body) = ("200 OK", set("fourth"));
    }
    until_keys(&mut g1, "web", Some("fourth")).await;
}

#[tokio::test]
async fn slow_issuers_of_one_tenant_hold_up_no_other() {
    let (address, _) = issuer().await;
    // This server accepts connections and sends nothing.
    let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let slow = mute.local_addr().unwrap();
    let fixture = ControllerFixture::tuned(ControllerLimits::default(), |config| {
        config.jwks.hosts = vec![
            address.to_string().parse().unwrap(),
            slow.to_string().parse().unwrap(),
        ];
    })
    .await;
    // 40 slow issuers are ten times the fetches that a tenant may have at once,
    // JWKS_FETCHES_PER_TENANT_MAX.
    let many: Vec<String> = (0..40)
        .map(|i| authentication(&format!("slow{i}"), &format!("http://{slow}/{i}")))
        .collect();
    fixture.write(
        "alpha/mesh.yaml",
        &(tenant("alpha", 1) + "---\n" + &many.join("---\n")),
    );
    let mut g1 = fixture.subscribe("g1").await;
    g1.until("alpha", |h| {
        h.contains_key(&(ResourceKind::Authentication, "alpha/shop/slow39".into()))
    })
    .await;
    let begun = Instant::now();
    fixture.write(
        "beta/mesh.yaml",
        &(tenant("beta", 2) + "---\n" + &authentication("web", &format!("http://{address}/keys"))),
    );
    let mut g2 = fixture.subscribe("g2").await;
    g2.until("beta's keys", |h| {
        match h.get(&(ResourceKind::Authentication, "beta/shop/web".into())) {
            Some((_, Resource::Authentication(a))) => a.rules[0].keys.is_some(),
            _ => false,
        }
    })
    .await;
    // One fetch that waits for a slow issuer takes 5 s: beta must not wait for even one of them.
    assert_time(
        "time until a tenant has its keys beside one with slow issuers",
        begun.elapsed(),
        Duration::from_secs(4),
    );
    // Held until here: a closed port would refuse at once, and no issuer would be slow.
    drop(mute);
}

#[tokio::test]
async fn unlisted_hosts_are_not_fetched_and_files_stay_in_the_folder() {
    let (address, unlisted) = issuer().await;
    let (other, _) = issuer().await;
    let fixture = fixture(other).await;
    let cases = [
        (
            "foreign",
            format!("http://{address}/keys"),
            "host_not_allowed",
        ),
        ("escape", "file:../beta/secret.json".into(), "file"),
        ("missing", "file:keys/none.json".into(), "file"),
        ("inside", "file:keys/own.json".into(), "fetched"),
    ];
    std::fs::create_dir_all(fixture.path("alpha/keys")).unwrap();
    std::fs::create_dir_all(fixture.path("beta")).unwrap();
    std::fs::write(fixture.path("beta/secret.json"), set("secret")).unwrap();
    std::fs::write(fixture.path("alpha/keys/own.json"), set("own")).unwrap();
    let objects: Vec<String> = cases
        .iter()
        .map(|(name, uri, _)| authentication(name, uri))
        .collect();
    fixture.write(
        "alpha/mesh.yaml",
        &(tenant("alpha", 1) + "---\n" + &objects.join("---\n")),
    );
    let mut g1 = fixture.subscribe("g1").await;
    until_keys(&mut g1, "inside", Some("own")).await;
    for (name, _, outcome) in &cases {
        counted(&fixture, outcome).await;
        assert_eq!(keys(&g1, name).is_some(), *outcome == "fetched", "{name}");
    }
    // The host that is not listed got no request.
    assert_eq!(unlisted.lock().unwrap().requests, 0);
    // A key set in a file is read again after the refresh interval.
    std::fs::write(fixture.path("alpha/keys/own.json"), set("changed")).unwrap();
    until_keys(&mut g1, "inside", Some("changed")).await;
    let mut root = fixture.admin("root").await;
    let until = Instant::now() + wait_limit();
    while !root
        .status()
        .await
        .diagnostics
        .iter()
        .any(|d| d.problem.contains("--jwks-hosts"))
    {
        assert!(Instant::now() < until, "the operator gets a diagnostic");
        // Polls are cheap; the deadline bounds the wait.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
