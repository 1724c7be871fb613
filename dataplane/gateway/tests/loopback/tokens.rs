//! Tokens that cost work: of requests whose rules have very many keys, and of what is open when rules come.

use std::time::Duration;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use canal_model::authorization::{Authentication, JwtRule, PolicyTarget};
use canal_model::program::Resource;
use http::Request;

use crate::client::Client;
use crate::http2;
use crate::origin::Origin;
use crate::policies::{named, patient};
use crate::rig::{Plot, Rig, TENANT, key};

fn b64(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Signs tokens whose key is called `k`.
struct Issuer(EcdsaKeyPair);

impl Issuer {
    fn new() -> Self {
        Self(EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap())
    }

    fn jwk(&self) -> serde_json::Value {
        let public = self.0.public_key().as_ref();
        serde_json::json!({"kty": "EC", "crv": "P-256", "kid": "k", "x": b64(&public[1..33]), "y": b64(&public[33..])})
    }

    fn token(&self, subject: usize) -> String {
        let claims = serde_json::json!({"iss": "iss", "sub": subject.to_string()});
        let message = format!("{}.{}", b64(r#"{"alg":"ES256","kid":"k"}"#), b64(claims.to_string()));
        let signed = self.0.sign(&SystemRandom::new(), message.as_bytes()).unwrap();
        format!("{message}.{}", b64(signed.as_ref()))
    }
}

fn authentication(name: &str, rules: usize, keys: impl Fn() -> Vec<serde_json::Value>) -> Resource {
    let rule = || JwtRule {
        issuer: "iss".into(),
        audiences: vec![],
        keys: Some(serde_json::json!({"keys": keys()}).to_string()),
        headers: vec![],
        parameters: vec![],
        cookies: vec![],
        forward: false,
        payload_header: None,
        claim_headers: vec![],
    };
    let target = PolicyTarget::Service(key(TENANT, "web"));
    Resource::Authentication(Authentication { key: named(name), target, rules: (0..rules).map(|_| rule()).collect(), broken: None })
}

/// A key of random digits: it verifies nothing, and costs as much as any.
fn rsa_key() -> serde_json::Value {
    let mut n = [0; 256];
    aws_lc_rs::rand::fill(&mut n).unwrap();
    (n[0], n[255]) = (n[0] | 0x80, n[255] | 1);
    serde_json::json!({"kty": "RSA", "kid": "k", "n": b64(n), "e": "AQAB"})
}

/// One such request used to be 6,400 verifications, for which all other tenants of the worker waited.
#[tokio::test]
async fn request_with_a_token_for_thousands_of_keys_costs_sixteen_verifications() {
    let origin = Origin::echo().await;
    let rig = Rig::new(Plot::default(), &[origin.address]);
    rig.apply((0..10).map(|n| authentication(&format!("jwt-{n}"), 10, || (0..64).map(|_| rsa_key()).collect())).collect());
    let forged = format!("{}.{}.{}", b64(r#"{"alg":"RS256","kid":"k"}"#), b64(r#"{"iss":"iss","sub":"s"}"#), b64([1; 256]));
    let request = format!("GET / HTTP/1.1\r\nHost: web\r\nAuthorization: Bearer {forged}\r\n\r\n");
    for _ in 0..3 {
        assert_eq!(Client::once(rig.web, &request).await.status, 401);
    }
    assert_eq!(rig.metric("canal_gateway_token_verifications_total", &["result=\"not_signed\""]), 16.0);
    assert_eq!(rig.metric("canal_gateway_tokens_total", &["result=\"token_too_many_keys\""]), 3.0);
    assert_eq!(Client::get(rig.web, "/").await.status, 200, "no token is no fault");
}

/// Rules that come while requests are open: their signatures are verified beside what goes on, and decide.
#[tokio::test]
async fn open_requests_have_their_tokens_verified_when_rules_come() {
    let origin = patient().await;
    let rig = Rig::new(Plot::default(), &[origin.address]);
    let (own, other) = (Issuer::new(), Issuer::new());
    let open = async |token: String, more: &str| {
        let mut client = Client::connect(rig.web).await;
        client.send(format!("GET /watch HTTP/1.1\r\nHost: web\r\nAuthorization: Bearer {token}\r\n{more}\r\n").as_bytes()).await;
        let whole = |seen: &[u8]| seen.ends_with(b"hi\r\n") || (seen.starts_with(b"HTTP/1.1 101") && seen.ends_with(b"\r\n\r\n"));
        while !whole(&client.buffer) {
            assert_eq!(tokio::time::timeout(Duration::from_secs(10), client.more()).await, Ok(true), "{more}");
        }
        client
    };
    const UPGRADE: &str = "Connection: upgrade\r\nUpgrade: websocket\r\n";
    let mut kept = [open(own.token(1), "").await, open(own.token(2), UPGRADE).await];
    let mut cut = [open(other.token(3), "").await, open(other.token(4), UPGRADE).await];
    let h2 = http2::connect(&rig).await;
    let request = Request::get("http://web/watch").header("authorization", format!("Bearer {}", other.token(5))).body(()).unwrap();
    let mut stream = h2.ready().await.unwrap().send_request(request, true).unwrap().0.await.unwrap().into_body();
    assert_eq!(&stream.data().await.unwrap().unwrap()[..], b"hi");
    rig.apply(vec![authentication("jwt", 1, || vec![own.jwk()])]);
    for client in &mut cut {
        assert!(!client.closed().await, "cut, not ended");
    }
    let ended = tokio::time::timeout(Duration::from_secs(10), stream.data()).await.expect("an end within 10 s");
    assert!(ended.unwrap().is_err());
    rig.until("canal_gateway_rejudged_total", &["result=\"allowed\""], 2.0).await;
    for client in &mut kept {
        assert!(tokio::time::timeout(Duration::from_millis(300), client.more()).await.is_err(), "it lives on");
    }
    assert_eq!(rig.metric("canal_gateway_rejudged_total", &["result=\"denied\""]), 3.0);
    let verified = |result: &str| rig.metric("canal_gateway_token_verifications_total", &[&format!("result=\"{result}\"")]);
    assert_eq!((verified("signed"), verified("not_signed")), (2.0, 3.0));
    // Rules that change while their keys stay cost no verification.
    rig.apply(vec![authentication("jwt", 2, || vec![own.jwk(), other.jwk()])]);
    rig.until("canal_gateway_rejudged_total", &["result=\"allowed\""], 4.0).await;
    assert_eq!((verified("signed"), verified("not_signed")), (2.0, 3.0));
}
