//! Tokens in policies, on real connections: principals and claims of valid tokens, and the refusal
//! of others.

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use canal_model::authorization::*;
use canal_model::program::*;

use super::{clause, named, policy, rule};
use crate::client::{ClientResponse, HttpClient};
use crate::fixture::{EngineSetup, GatewayFixture, TENANT, key};
use crate::origin::OriginServer;

/// An issuer with one key.
struct TokenIssuer(EcdsaKeyPair);

impl TokenIssuer {
    fn new() -> Self {
        Self(EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap())
    }

    fn jwk(&self) -> serde_json::Value {
        let (b64, public) = (
            |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes),
            self.0.public_key().as_ref(),
        );
        serde_json::json!({"kty": "EC", "crv": "P-256", "kid": "k", "x": b64(&public[1..33]), "y": b64(&public[33..])})
    }

    fn token(&self, claims: &serde_json::Value) -> String {
        let b64 = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let message = format!(
            "{}.{}",
            b64(br#"{"alg":"ES256","kid":"k"}"#),
            b64(claims.to_string().as_bytes())
        );
        let signed = self
            .0
            .sign(&SystemRandom::new(), message.as_bytes())
            .unwrap();
        format!("{message}.{}", b64(signed.as_ref()))
    }
}

/// Requires tokens of issuer `iss`, signed with one of `keys`.
fn authentication(keys: &[&serde_json::Value]) -> Resource {
    Resource::Authentication(Authentication {
        key: named("jwt"),
        target: PolicyTarget::Service(key(TENANT, "web")),
        rules: vec![JwtRule {
            issuer: "iss".into(),
            audiences: vec![],
            keys: Some(serde_json::json!({"keys": keys}).to_string()),
            headers: vec![],
            parameters: vec![],
            cookies: vec![],
            forward: false,
            payload_header: None,
            claim_headers: vec![("x-user".into(), vec!["sub".into()])],
        }],
        broken: None,
    })
}

#[tokio::test]
async fn tokens_without_a_subject_have_no_principal() {
    let (issuer, origin) = (TokenIssuer::new(), OriginServer::echo().await);
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let principal = clause(Attribute::RequestPrincipal, &["*"]);
    fixture.apply(vec![
        authentication(&[&issuer.jwk()]),
        policy(
            "users",
            AuthorizationAction::Allow,
            vec![rule(vec![principal])],
        ),
    ]);
    for (claims, status) in [
        (serde_json::json!({"iss": "iss", "sub": "ann"}), 200),
        (serde_json::json!({"iss": "iss"}), 403),
        (serde_json::json!({"iss": "iss", "sub": ""}), 403),
        (serde_json::json!({"iss": "iss", "sub": 7}), 403),
    ] {
        let request = format!(
            "GET / HTTP/1.1\r\nHost: web\r\nAuthorization: Bearer {}\r\n\r\n",
            issuer.token(&claims)
        );
        assert_eq!(
            HttpClient::once(fixture.web, &request).await.status,
            status,
            "{claims}"
        );
    }
}

/// Requests `/` with a token, and with headers that only the gateway sets.
async fn get_with(fixture: &GatewayFixture, token: &str) -> ClientResponse {
    let request = format!(
        "GET /?a=1 HTTP/1.1\r\nHost: web\r\nX-User: root\r\nX_User: root\r\nAuthorization: Bearer {token}\r\n\r\n"
    );
    HttpClient::once(fixture.web, &request).await
}

/// Checks that tokens are refused that have expired, have another issuer, are malformed, or were
/// changed. `admin` is a valid token.
async fn refuse_invalid_tokens(fixture: &GatewayFixture, issuer: &TokenIssuer, admin: &str) {
    let token = |claims: serde_json::Value| issuer.token(&claims);
    let other = token(serde_json::json!({"iss": "iss", "sub": "root", "role": "admin"}));
    let glued = format!(
        "{}.{}",
        other.rsplit_once('.').unwrap().0,
        admin.rsplit_once('.').unwrap().1
    );
    for (bad, why) in [
        (
            token(serde_json::json!({"iss": "iss", "sub": "ann", "role": "admin", "exp": 1})),
            "token_expired",
        ),
        (
            token(serde_json::json!({"iss": "other", "sub": "ann", "role": "admin"})),
            "token_issuer",
        ),
        (
            format!("{}.e30.x", admin.split('.').next().unwrap()),
            "token_malformed",
        ),
        (glued, "token_signature"),
    ] {
        let answer = get_with(fixture, &bad).await;
        assert_eq!(
            (answer.status, answer.field("www-authenticate")),
            (401, Some("Bearer error=\"invalid_token\"")),
            "{why}"
        );
        assert_eq!(
            fixture.metric(
                "canal_gateway_tokens_total",
                &[&format!("result=\"{why}\"")]
            ),
            1.0,
            "{why}"
        );
    }
}

#[tokio::test]
async fn valid_tokens_are_admitted_and_invalid_ones_refused() {
    let issuer = TokenIssuer::new();
    let (jwk, token) = (issuer.jwk(), |claims: serde_json::Value| {
        issuer.token(&claims)
    });
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(EngineSetup::default(), &[origin.address]);
    let claim = clause(Attribute::RequestClaim(vec!["role".into()]), &["admin"]);
    fixture.apply(vec![
        authentication(&[&jwk]),
        policy(
            "admins",
            AuthorizationAction::Allow,
            vec![rule(vec![claim])],
        ),
    ]);
    let get = async |token: &str| get_with(&fixture, token).await;
    let admin = token(serde_json::json!({"iss": "iss", "sub": "ann", "role": "admin"}));
    // The second request finds the token among the verified ones.
    for _ in 0..2 {
        let answer = get(&admin).await;
        assert_eq!(answer.status, 200);
        let head = answer.text().to_ascii_lowercase();
        assert!(
            head.contains("x-user: ann\r\n")
                && !head.contains("root")
                && !head.contains("authorization"),
            "{head}"
        );
    }
    assert_eq!(
        get(&token(
            serde_json::json!({"iss": "iss", "sub": "bob", "role": "guest"})
        ))
        .await
        .status,
        403
    );
    assert_eq!(
        HttpClient::get(fixture.web, "/").await.status,
        403,
        // A request without a token is not refused as such, but lacks the claim.
        "no token is no fault, but it opens nothing"
    );
    assert_eq!(
        HttpClient::get(fixture.web, &format!("/?access_token={admin}&b"))
            .await
            .status,
        200
    );
    refuse_invalid_tokens(&fixture, &issuer, &admin).await;
    // The key is withdrawn, so tokens that were verified with it are no longer valid.
    // The same public key under another key ID.
    let other = serde_json::json!({"kty": "EC", "crv": "P-256", "kid": "other", "x": jwk["x"], "y": jwk["y"]});
    fixture.apply(vec![authentication(&[&other])]);
    assert_eq!(get(&admin).await.status, 401);
    // A broken RequestAuthentication fails closed.
    let broken = Authentication {
        key: named("jwt"),
        target: PolicyTarget::Tenant,
        rules: vec![],
        broken: Some("it is".into()),
    };
    fixture.apply(vec![Resource::Authentication(broken)]);
    assert_eq!(HttpClient::get(fixture.web, "/").await.status, 401);
}
