//! Tokens that cost work: requests under rules with very many keys, and open requests when rules
//! are added.

use std::time::Duration;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use canal_model::authorization::{Authentication, JwtRule, PolicyTarget};
use canal_model::program::Resource;
use http::Request;

use crate::client::HttpClient;
use crate::fixture::{EngineSetup, GatewayFixture, TENANT, key};
use crate::http2;
use crate::origin::OriginServer;
use crate::policies::{named, patient};

fn b64(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

/// Signs tokens with a key whose ID is `k`.
pub(crate) struct TokenSigner(EcdsaKeyPair);

impl TokenSigner {
    pub(crate) fn new() -> Self {
        Self(EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap())
    }

    pub(crate) fn jwk(&self) -> serde_json::Value {
        let public = self.0.public_key().as_ref();
        serde_json::json!({"kty": "EC", "crv": "P-256", "kid": "k", "x": b64(&public[1..33]), "y": b64(&public[33..])})
    }

    pub(crate) fn token(&self, subject: usize) -> String {
        let claims = serde_json::json!({"iss": "iss", "sub": subject.to_string()});
        let message = format!(
            "{}.{}",
            b64(r#"{"alg":"ES256","kid":"k"}"#),
            b64(claims.to_string())
        );
        let signed = self
            .0
            .sign(&SystemRandom::new(), message.as_bytes())
            .unwrap();
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
    Resource::Authentication(Authentication {
        key: named(name),
        target,
        rules: (0..rules).map(|_| rule()).collect(),
        broken: None,
    })
}

/// Returns an RSA public key with a random modulus. It verifies nothing, but costs as much as a
/// real key.
fn rsa_key() -> serde_json::Value {
    let mut n = [0; 256];
    aws_lc_rs::rand::fill(&mut n).unwrap();
    (n[0], n[255]) = (n[0] | 0x80, n[255] | 1);
    serde_json::json!({"kty": "RSA", "kid": "k", "n": b64(n), "e": "AQAB"})
}

/// One such request used to cost 6,400 verifications, during which all other tenants of the worker
/// waited.
#[tokio::test]
async fn request_with_a_token_for_thousands_of_keys_costs_sixteen_verifications() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    fixture.apply(
        // 10 resources with 10 rules each and 64 keys per rule.
        (0..10)
            .map(|n| {
                authentication(&format!("jwt-{n}"), 10, || {
                    (0..64).map(|_| rsa_key()).collect()
                })
            })
            .collect(),
    );
    let forged = format!(
        "{}.{}.{}",
        b64(r#"{"alg":"RS256","kid":"k"}"#),
        b64(r#"{"iss":"iss","sub":"s"}"#),
        // 256 bytes are the length of an RS256 signature with a key of 2048 bits.
        b64([1; 256])
    );
    let request = format!("GET / HTTP/1.1\r\nHost: web\r\nAuthorization: Bearer {forged}\r\n\r\n");
    // The second and third have a result in the cache.
    for _ in 0..3 {
        assert_eq!(HttpClient::once(fixture.web, &request).await.status, 401);
    }
    // One request may cost 16 verifications, and the result is kept for the repeated token.
    assert_eq!(
        fixture.metric(
            "canal_gateway_token_verifications_total",
            &["result=\"not_signed\""]
        ),
        16.0
    );
    assert_eq!(
        fixture.metric(
            "canal_gateway_tokens_total",
            &["result=\"token_too_many_keys\""]
        ),
        3.0
    );
    assert_eq!(
        HttpClient::get(fixture.web, "/").await.status,
        200,
        "a missing token is no error"
    );
}

/// Requests a stream with a token, and returns its client once the first bytes of the response have
/// come.
async fn open_watch(fixture: &GatewayFixture, token: String, more: &str) -> HttpClient {
    let mut client = HttpClient::connect(fixture.web).await;
    client
        .send(
            format!(
                "GET /watch HTTP/1.1\r\nHost: web\r\nAuthorization: Bearer {token}\r\n{more}\r\n"
            )
            .as_bytes(),
        )
        .await;
    let whole = |seen: &[u8]| {
        seen.ends_with(b"hi\r\n")
            || (seen.starts_with(b"HTTP/1.1 101") && seen.ends_with(b"\r\n\r\n"))
    };
    while !whole(&client.buffer) {
        assert_eq!(
            tokio::time::timeout(
                canal_timing::deadline(Duration::from_secs(10)),
                client.more()
            )
            .await,
            Ok(true),
            "{more}"
        );
    }
    client
}

/// When rules are added while requests are open, the signatures of these requests are verified in
/// the background, and the result decides.
#[tokio::test]
async fn open_requests_have_their_tokens_verified_when_rules_come() {
    let origin = patient().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let (own, other) = (TokenSigner::new(), TokenSigner::new());
    let open = async |token: String, more: &str| open_watch(&fixture, token, more).await;
    const UPGRADE: &str = "Connection: upgrade\r\nUpgrade: websocket\r\n";
    // Each a plain response and an upgraded connection, with distinct tokens, so none is verified
    // for another.
    let mut admitted = [
        open(own.token(1), "").await,
        open(own.token(2), UPGRADE).await,
    ];
    let mut cut = [
        open(other.token(3), "").await,
        open(other.token(4), UPGRADE).await,
    ];
    let h2 = http2::connect(&fixture).await;
    let request = Request::get("http://web/watch")
        .header("authorization", format!("Bearer {}", other.token(5)))
        .body(())
        .unwrap();
    let mut stream = h2
        .ready()
        .await
        .unwrap()
        .send_request(request, true)
        .unwrap()
        .0
        .await
        .unwrap()
        .into_body();
    assert_eq!(&stream.data().await.unwrap().unwrap()[..], b"hi");
    fixture.apply(vec![authentication("jwt", 1, || vec![own.jwk()])]);
    for client in &mut cut {
        assert!(!client.closed().await, "cut, not ended");
    }
    let ended = tokio::time::timeout(
        canal_timing::deadline(Duration::from_secs(10)),
        stream.data(),
    )
    .await
    .expect("an end within 10 s");
    assert!(ended.unwrap().is_err());
    fixture
        .until(
            "canal_gateway_reauthorized_total",
            &["result=\"allowed\""],
            2.0,
        )
        .await;
    for client in &mut admitted {
        assert!(
            // A cut would follow within 100 ms, the interval of reauthorization.
            tokio::time::timeout(Duration::from_millis(300), client.more())
                .await
                .is_err(),
            "it lives on"
        );
    }
    // Two connections and the HTTP/2 stream.
    assert_eq!(
        fixture.metric("canal_gateway_reauthorized_total", &["result=\"denied\""]),
        3.0
    );
    let verified = |result: &str| {
        fixture.metric(
            "canal_gateway_token_verifications_total",
            &[&format!("result=\"{result}\"")],
        )
    };
    assert_eq!((verified("signed"), verified("not_signed")), (2.0, 3.0));
    // A rule change that retains the keys costs no verification.
    fixture.apply(vec![authentication("jwt", 2, || {
        vec![own.jwk(), other.jwk()]
    })]);
    // The same two clients once more.
    fixture
        .until(
            "canal_gateway_reauthorized_total",
            &["result=\"allowed\""],
            4.0,
        )
        .await;
    assert_eq!((verified("signed"), verified("not_signed")), (2.0, 3.0));
}
