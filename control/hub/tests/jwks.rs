//! Key sets that tenants name by URI: who may be asked, what is taken, what stays when it cannot be had. A small HTTP server plays the issuer.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::rig::{PATIENCE, Rig, Subscriber, tenant};
use canal_hub::Limits;
use canal_model::program::{Kind, Resource};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// What the issuer answers, and how often it was asked and said that nothing changed.
struct Issuer {
    body: String,
    status: &'static str,
    asked: usize,
    unchanged: usize,
}

async fn issuer() -> (std::net::SocketAddr, Arc<Mutex<Issuer>>) {
    let state = Arc::new(Mutex::new(Issuer { body: set("one"), status: "200 OK", asked: 0, unchanged: 0 }));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, held) = (listener.local_addr().unwrap(), state.clone());
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = listener.accept().await {
            let mut head = vec![0; 4096];
            let n = tcp.read(&mut head).await.unwrap_or(0);
            let head = String::from_utf8_lossy(&head[..n]).to_lowercase();
            let answer = {
                let mut issuer = held.lock().unwrap();
                issuer.asked += 1;
                let etag = format!("\"{}\"", issuer.body.len());
                if issuer.status == "200 OK" && head.contains(&format!("if-none-match: {etag}")) {
                    issuer.unchanged += 1;
                    "HTTP/1.1 304 Not Modified\r\n\r\n".to_string()
                } else {
                    format!("HTTP/1.1 {}\r\netag: {etag}\r\ncontent-length: {}\r\n\r\n{}", issuer.status, issuer.body.len(), issuer.body)
                }
            };
            let _ = tcp.write_all(answer.as_bytes()).await;
        }
    });
    (address, state)
}

fn set(kid: &str) -> String {
    format!("{{\"keys\":[{{\"kty\":\"EC\",\"crv\":\"P-256\",\"kid\":\"{kid}\",\"x\":\"AA\",\"y\":\"AA\"}}]}}")
}

fn authentication(name: &str, uri: &str) -> String {
    format!(
        "apiVersion: security.istio.io/v1\nkind: RequestAuthentication\nmetadata: {{name: {name}, namespace: shop}}\n\
         spec: {{jwtRules: [{{issuer: \"https://issuer.example\", jwksUri: \"{uri}\"}}]}}\n"
    )
}

fn keys(s: &Subscriber, name: &str) -> Option<String> {
    match s.held.get(&(Kind::Authentication, format!("alpha/shop/{name}"))) {
        Some((_, Resource::Authentication(a))) => a.rules[0].keys.clone(),
        other => panic!("{name}: {other:?}"),
    }
}

async fn until_keys(s: &mut Subscriber, name: &'static str, want: Option<&'static str>) {
    let at = (Kind::Authentication, format!("alpha/shop/{name}"));
    s.until(name, |h| match h.get(&at) {
        Some((_, Resource::Authentication(a))) => {
            a.rules[0].keys.as_deref().map_or(want.is_none(), |k| want.is_some_and(|w| k.contains(w)))
        }
        _ => false,
    })
    .await;
}

async fn rig(issuer: std::net::SocketAddr) -> Rig {
    Rig::tuned(Limits::default(), |config| {
        config.jwks.hosts = vec![issuer.to_string().parse().unwrap()];
        config.jwks.refresh = Duration::from_millis(300);
    })
    .await
}

async fn counted(rig: &Rig, outcome: &str) {
    let until = Instant::now() + PATIENCE;
    let line = format!("canal_controller_jwks_fetches_total{{tenant=\"alpha\",outcome=\"{outcome}\"}}");
    while rig.metric(&line).await < 1.0 {
        assert!(Instant::now() < until, "{line}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_set_is_fetched_followed_and_kept_when_it_cannot_be_had() {
    let (address, issuer) = issuer().await;
    let mut rig = rig(address).await;
    let uri = format!("http://{address}/keys");
    rig.write("alpha/mesh.yaml", &(tenant("alpha", 1) + "---\n" + &authentication("web", &uri)));
    let mut g1 = rig.subscribe("g1").await;
    until_keys(&mut g1, "web", Some("one")).await;
    counted(&rig, "unchanged").await;
    issuer.lock().unwrap().body = set("second");
    until_keys(&mut g1, "web", Some("second")).await;
    for (status, body, outcome) in [
        ("500 Broken", set("third"), "status"),
        ("302 Found", set("third"), "redirect"),
        ("200 OK", "{\"no\":\"keys\"}".to_string(), "form"),
        ("200 OK", format!("{{\"keys\":[],\"x\":\"{}\"}}", "x".repeat(canal_hub::JWKS_BYTES_MAX)), "bytes"),
    ] {
        {
            let mut issuer = issuer.lock().unwrap();
            (issuer.status, issuer.body) = (status, body);
        }
        counted(&rig, outcome).await;
    }
    g1.settle().await;
    assert!(keys(&g1, "web").unwrap().contains("second"), "the last good one stays");
    let mut root = rig.admin("root").await;
    let told = root.status().await.diagnostics;
    assert!(told.iter().any(|d| d.problem.contains("the last good one is in force")), "{told:?}");
    // Also across a restart while the issuer is broken.
    drop((g1, root));
    rig.stop().await;
    rig.start().await;
    let mut g1 = rig.subscribe("g1").await;
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
    // It takes connections and says nothing.
    let mute = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let slow = mute.local_addr().unwrap();
    let rig = Rig::tuned(Limits::default(), |config| {
        config.jwks.hosts = vec![address.to_string().parse().unwrap(), slow.to_string().parse().unwrap()];
    })
    .await;
    let many: Vec<String> = (0..40).map(|i| authentication(&format!("slow{i}"), &format!("http://{slow}/{i}"))).collect();
    rig.write("alpha/mesh.yaml", &(tenant("alpha", 1) + "---\n" + &many.join("---\n")));
    let mut g1 = rig.subscribe("g1").await;
    g1.until("alpha", |h| h.contains_key(&(Kind::Authentication, "alpha/shop/slow39".into()))).await;
    let begun = Instant::now();
    rig.write("beta/mesh.yaml", &(tenant("beta", 2) + "---\n" + &authentication("web", &format!("http://{address}/keys"))));
    let mut g2 = rig.subscribe("g2").await;
    g2.until("beta's keys", |h| match h.get(&(Kind::Authentication, "beta/shop/web".into())) {
        Some((_, Resource::Authentication(a))) => a.rules[0].keys.is_some(),
        _ => false,
    })
    .await;
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}: beta waited for alpha", begun.elapsed());
    drop(mute);
}

#[tokio::test]
async fn nobody_is_asked_who_is_not_on_the_list_and_files_stay_inside_the_folder() {
    let (address, asked) = issuer().await;
    let (other, _) = issuer().await;
    let rig = rig(other).await;
    let cases = [
        ("foreign", format!("http://{address}/keys"), "host_not_allowed"),
        ("escape", "file:../beta/secret.json".into(), "file"),
        ("missing", "file:keys/none.json".into(), "file"),
        ("inside", "file:keys/own.json".into(), "fetched"),
    ];
    std::fs::create_dir_all(rig.path("alpha/keys")).unwrap();
    std::fs::create_dir_all(rig.path("beta")).unwrap();
    std::fs::write(rig.path("beta/secret.json"), set("secret")).unwrap();
    std::fs::write(rig.path("alpha/keys/own.json"), set("own")).unwrap();
    let objects: Vec<String> = cases.iter().map(|(name, uri, _)| authentication(name, uri)).collect();
    rig.write("alpha/mesh.yaml", &(tenant("alpha", 1) + "---\n" + &objects.join("---\n")));
    let mut g1 = rig.subscribe("g1").await;
    until_keys(&mut g1, "inside", Some("own")).await;
    for (name, _, outcome) in &cases {
        counted(&rig, outcome).await;
        assert_eq!(keys(&g1, name).is_some(), *outcome == "fetched", "{name}");
    }
    assert_eq!(asked.lock().unwrap().asked, 0);
    std::fs::write(rig.path("alpha/keys/own.json"), set("turned")).unwrap();
    until_keys(&mut g1, "inside", Some("turned")).await;
    let mut root = rig.admin("root").await;
    let until = Instant::now() + PATIENCE;
    while !root.status().await.diagnostics.iter().any(|d| d.problem.contains("--jwks-hosts")) {
        assert!(Instant::now() < until, "the operator is told");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
