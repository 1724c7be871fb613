//! Tests of JWT validation with tokens and keys generated here: which tokens are accepted, which
//! are refused, and the effect on the request.

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{self, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RsaKeyPair};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use canal_model::authorization::PolicyTarget;

use super::*;

/// Any time in which the tests' tokens are valid; January 2027.
const NOW: u64 = 1_800_000_000;

enum Signer {
    Rsa(RsaKeyPair),
    P256(EcdsaKeyPair),
    P384(EcdsaKeyPair),
    Ed25519(Ed25519KeyPair),
}

fn b64(bytes: impl AsRef<[u8]>) -> String {
    URL_SAFE_NO_PAD.encode(bytes)
}

impl Signer {
    fn jwk(&self, extra: serde_json::Value) -> serde_json::Value {
        let point = |crv: &str, key: &[u8]| {
            let half = key.len() / 2;
            serde_json::json!({"kty": "EC", "crv": crv, "x": b64(&key[1..=half]), "y": b64(&key[half + 1..])})
        };
        let mut key = match self {
            Signer::Rsa(pair) => {
                let components =
                    signature::RsaPublicKeyComponents::<Vec<u8>>::from(pair.public_key());
                serde_json::json!({"kty": "RSA", "n": b64(components.n), "e": b64(components.e)})
            }
            Signer::P256(pair) => point("P-256", pair.public_key().as_ref()),
            Signer::P384(pair) => point("P-384", pair.public_key().as_ref()),
            Signer::Ed25519(pair) => {
                serde_json::json!({"kty": "OKP", "crv": "Ed25519", "x": b64(pair.public_key())})
            }
        };
        key.as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        key
    }

    fn sign(&self, alg: &str, message: &[u8]) -> Vec<u8> {
        let random = SystemRandom::new();
        match self {
            Signer::Rsa(pair) => {
                let encoding: &'static dyn signature::RsaEncoding = match alg {
                    "RS256" => &signature::RSA_PKCS1_SHA256,
                    "RS384" => &signature::RSA_PKCS1_SHA384,
                    "RS512" => &signature::RSA_PKCS1_SHA512,
                    "PS256" => &signature::RSA_PSS_SHA256,
                    "PS384" => &signature::RSA_PSS_SHA384,
                    _ => &signature::RSA_PSS_SHA512,
                };
                let mut signed = vec![0; pair.public_modulus_len()];
                pair.sign(encoding, &random, message, &mut signed).unwrap();
                signed
            }
            Signer::P256(pair) | Signer::P384(pair) => {
                pair.sign(&random, message).unwrap().as_ref().to_vec()
            }
            Signer::Ed25519(pair) => pair.sign(message).as_ref().to_vec(),
        }
    }
}

fn token_with(
    header: serde_json::Value,
    claims: serde_json::Value,
    sign: impl FnOnce(&[u8]) -> Vec<u8>,
) -> String {
    let message = format!("{}.{}", b64(header.to_string()), b64(claims.to_string()));
    let signed = sign(message.as_bytes());
    format!("{message}.{}", b64(signed))
}

fn p256() -> Signer {
    Signer::P256(EcdsaKeyPair::generate(&signature::ECDSA_P256_SHA256_FIXED_SIGNING).unwrap())
}

fn rule(keys: Option<&[serde_json::Value]>) -> JwtRule {
    JwtRule {
        issuer: "iss".into(),
        audiences: vec![],
        keys: keys.map(|keys| serde_json::json!({"keys": keys}).to_string()),
        headers: vec![],
        parameters: vec![],
        cookies: vec![],
        forward: false,
        payload_header: None,
        claim_headers: vec![],
    }
}

fn tokens(rules: Vec<JwtRule>, broken: bool) -> JwtRequirements {
    let key = canal_model::authorization::PolicyKey {
        tenant: "alpha".parse().unwrap(),
        namespace: "default".parse().unwrap(),
        name: "jwt".parse().unwrap(),
    };
    let broken = broken.then(|| "it is".to_string());
    JwtRequirements::new(vec![Arc::new(JwtIssuers::new(&Authentication {
        key,
        target: PolicyTarget::Tenant,
        rules,
        broken,
    }))])
}

#[derive(Default)]
struct Asking {
    query: Option<String>,
    headers: Vec<(&'static str, String)>,
}

impl RoutableRequest for Asking {
    fn host(&self) -> &[u8] {
        b"web"
    }
    fn method(&self) -> &[u8] {
        b"GET"
    }
    fn path(&self) -> &[u8] {
        b"/x"
    }
    fn query(&self) -> Option<&[u8]> {
        self.query.as_deref().map(str::as_bytes)
    }
    fn header(&self, name: &str, visit: &mut dyn FnMut(&[u8])) {
        self.headers
            .iter()
            .filter(|(n, _)| *n == name)
            .for_each(|(_, value)| visit(value.as_bytes()));
    }
}

fn bearer(token: &str) -> Asking {
    Asking {
        headers: vec![("authorization", format!("Bearer {token}"))],
        ..Asking::default()
    }
}

/// Repeats the check until all required signatures are verified. Also returns the number of
/// verifications.
async fn drive(
    tokens: &JwtRequirements,
    request: &Asking,
    (cache, now): (&TokenCache, u64),
    changes: &mut RequestMutations,
) -> (Result<Option<Arc<Token>>, TokenError>, u32) {
    let (memory, work, mut verified) = (cache.of(1), VerificationBudget::default(), 0);
    loop {
        match tokens.check(request, (cache, &memory), now, changes) {
            Ok(token) => return (Ok(token), verified),
            Err(TokenCheckError::Bad(bad)) => return (Err(bad), verified),
            Err(TokenCheckError::Verify(todo)) => {
                verified += u32::from(verify(&memory, &work, todo, now).await.is_some())
            }
        }
    }
}

fn drive_now(
    tokens: &JwtRequirements,
    request: &Asking,
    at: (&TokenCache, u64),
    changes: &mut RequestMutations,
) -> (Result<Option<Arc<Token>>, TokenError>, u32) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(drive(tokens, request, at, changes))
}

fn check(
    tokens: &JwtRequirements,
    request: &Asking,
) -> (Result<Option<Arc<Token>>, TokenError>, RequestMutations) {
    let mut changes = RequestMutations::default();
    (
        drive_now(tokens, request, (&TokenCache::default(), NOW), &mut changes).0,
        changes,
    )
}

#[test]
fn every_algorithm_is_checked_with_keys_of_its_kind_only() {
    let rsa = Signer::Rsa(RsaKeyPair::generate(KeySize::Rsa2048).unwrap());
    let p384 =
        Signer::P384(EcdsaKeyPair::generate(&signature::ECDSA_P384_SHA384_FIXED_SIGNING).unwrap());
    let ed = Signer::Ed25519(Ed25519KeyPair::generate().unwrap());
    let cases = [
        (
            &rsa,
            &["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"][..],
        ),
        (&p256(), &["ES256"]),
        (&p384, &["ES384"]),
        (&ed, &["EdDSA"]),
    ];
    let claims = || serde_json::json!({"iss": "iss", "sub": "s", "exp": NOW + 10});
    for (signer, algorithms) in cases {
        let own = tokens(
            vec![rule(Some(&[signer.jwk(serde_json::json!({}))]))],
            false,
        );
        for alg in algorithms {
            let token = token_with(serde_json::json!({"alg": alg}), claims(), |m| {
                signer.sign(alg, m)
            });
            let (checked, changes) = check(&own, &bearer(&token));
            assert_eq!(
                checked.unwrap().unwrap().principal.as_deref(),
                Some("iss/s"),
                "{alg}"
            );
            assert_eq!(
                changes.headers().collect::<Vec<_>>(),
                [("authorization", None)],
                "the token is not forwarded"
            );
            let (message, signed) = token.rsplit_once('.').unwrap();
            let mut bytes = URL_SAFE_NO_PAD.decode(signed).unwrap();
            // One changed bit makes the signature invalid.
            *bytes.last_mut().unwrap() ^= 1;
            let forged = format!("{message}.{}", b64(bytes));
            assert_eq!(
                check(&own, &bearer(&forged)).0.unwrap_err(),
                TokenError::Signature,
                "{alg}"
            );
            for other in [p256(), Signer::Ed25519(Ed25519KeyPair::generate().unwrap())] {
                let others = tokens(vec![rule(Some(&[other.jwk(serde_json::json!({}))]))], false);
                assert!(check(&others, &bearer(&token)).0.is_err(), "{alg}");
            }
        }
    }
    // Algorithm confusion: no signature, the public key as a shared secret, and RSA with SHA-1.
    let own = tokens(vec![rule(Some(&[rsa.jwk(serde_json::json!({}))]))], false);
    for alg in ["none", "HS256", "hs512", "RS1"] {
        let token = token_with(serde_json::json!({"alg": alg}), claims(), |_| b"x".to_vec());
        assert_eq!(
            check(&own, &bearer(&token)).0.unwrap_err(),
            TokenError::Algorithm,
            "{alg}"
        );
    }
}

/// Returns a valid set of claims, of which `extra` changes some.
fn claims_with(extra: serde_json::Value) -> serde_json::Value {
    let mut claims =
        serde_json::json!({"iss": "iss", "sub": "s", "aud": ["x", "web/"], "exp": NOW + 10});
    claims
        .as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    claims
}

/// Returns changes of the claims, and the reasons why the token is refused then.
fn claim_cases() -> Vec<(&'static str, serde_json::Value, Option<TokenError>)> {
    vec![
        ("valid", serde_json::json!({}), None),
        ("one audience", serde_json::json!({"aud": "web"}), None),
        (
            "another audience",
            serde_json::json!({"aud": "shop"}),
            Some(TokenError::Audience),
        ),
        (
            "no audience",
            serde_json::json!({"aud": null}),
            Some(TokenError::Audience),
        ),
        (
            "another issuer",
            serde_json::json!({"iss": "other"}),
            Some(TokenError::Issuer),
        ),
        // The leeway is 60 s (`LEEWAY`).
        (
            "expired within the leeway",
            serde_json::json!({"exp": NOW - 59}),
            None,
        ),
        (
            // The token is refused from the very second at which the leeway ends.
            "expired",
            serde_json::json!({"exp": NOW - 60}),
            Some(TokenError::Expired),
        ),
        (
            "expired as a fraction",
            serde_json::json!({"exp": NOW as f64 - 100.5}),
            Some(TokenError::Expired),
        ),
        (
            "an expiry that is no time",
            serde_json::json!({"exp": "soon"}),
            Some(TokenError::Malformed),
        ),
        (
            "not before, within the leeway",
            serde_json::json!({"nbf": NOW + 60}),
            None,
        ),
        (
            "not before",
            serde_json::json!({"nbf": NOW + 61}),
            Some(TokenError::NotYet),
        ),
        (
            "issued in the future",
            serde_json::json!({"iat": NOW + 61}),
            Some(TokenError::NotYet),
        ),
    ]
}

/// Returns tokens with other headers, or that are no tokens, and the reasons why they are refused.
/// `signed` makes a token with a header.
fn header_cases(
    signed: impl Fn(serde_json::Value) -> String,
) -> Vec<(&'static str, String, Option<TokenError>)> {
    vec![
        (
            "another kid",
            signed(serde_json::json!({"alg": "ES256", "kid": "k2"})),
            Some(TokenError::NoKey),
        ),
        ("no kid", signed(serde_json::json!({"alg": "ES256"})), None),
        (
            "something critical",
            signed(serde_json::json!({"alg": "ES256", "crit": ["x"]})),
            Some(TokenError::Critical),
        ),
        ("no token", "opaque".into(), Some(TokenError::Malformed)),
        (
            "two dots and nothing",
            "..".into(),
            Some(TokenError::Malformed),
        ),
        (
            "five parts",
            "a.b.c.d.e".into(),
            Some(TokenError::Malformed),
        ),
        (
            "too long",
            "a".repeat(jws::TOKEN_BYTES_MAX + 1),
            Some(TokenError::TooLong),
        ),
    ]
}

#[test]
fn claims_and_times_are_checked() {
    let signer = p256();
    let jwk = signer.jwk(serde_json::json!({"kid": "k1"}));
    let wanted = tokens(
        vec![JwtRule {
            audiences: vec!["web".into()],
            ..rule(Some(&[jwk]))
        }],
        false,
    );
    for (name, extra, want) in claim_cases() {
        let token = token_with(
            serde_json::json!({"alg": "ES256", "kid": "k1"}),
            claims_with(extra),
            |m| signer.sign("ES256", m),
        );
        assert_eq!(check(&wanted, &bearer(&token)).0.err(), want, "{name}");
    }
    let signed = |header: serde_json::Value| {
        token_with(header, claims_with(serde_json::json!({})), |m| {
            signer.sign("ES256", m)
        })
    };
    for (name, token, want) in header_cases(signed) {
        assert_eq!(check(&wanted, &bearer(&token)).0.err(), want, "{name}");
    }
    assert!(
        check(&wanted, &Asking::default()).0.unwrap().is_none(),
        "a missing token is no error"
    );
    let token = signed(serde_json::json!({"alg": "ES256"}));
    assert_eq!(
        check(&tokens(vec![rule(None)], false), &bearer(&token))
            .0
            .unwrap_err(),
        TokenError::NoKeys
    );
    assert_eq!(
        check(&tokens(vec![], true), &Asking::default())
            .0
            .unwrap_err(),
        TokenError::Broken
    );
    // One token more than a request may have.
    let many = (0..=TOKENS_MAX)
        .map(|_| ("authorization", format!("Bearer {token}")))
        .collect();
    assert_eq!(
        check(
            &wanted,
            &Asking {
                headers: many,
                query: None
            }
        )
        .0
        .unwrap_err(),
        TokenError::TooMany
    );
}

#[test]
fn key_sets_retain_only_usable_keys() {
    let (one, two) = (p256(), p256());
    let token = |signer: &Signer, kid: &str| {
        let claims = serde_json::json!({"iss": "iss", "sub": "s"});
        token_with(
            serde_json::json!({"alg": "ES256", "kid": kid}),
            claims,
            |m| signer.sign("ES256", m),
        )
    };
    // While keys are rotated, a set has two keys, for a moment with the same ID.
    let both = [
        one.jwk(serde_json::json!({"kid": "k"})),
        two.jwk(serde_json::json!({"kid": "k", "alg": "ES256", "use": "sig"})),
    ];
    let set = tokens(vec![rule(Some(&both))], false);
    assert!(
        check(&set, &bearer(&token(&one, "k"))).0.is_ok()
            && check(&set, &bearer(&token(&two, "k"))).0.is_ok()
    );
    let bad = [
        serde_json::json!({"kty": "oct", "k": "c2VjcmV0"}),
        one.jwk(serde_json::json!({"use": "enc"})),
        one.jwk(serde_json::json!({"alg": "ES512"})),
        serde_json::json!({"kty": "RSA", "n": b64([255u8; 128]), "e": "AQAB"}),
        serde_json::json!({"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}),
        serde_json::json!("no key"),
    ];
    let parsed = KeySet::parse(&serde_json::json!({"keys": bad}).to_string());
    assert_eq!(parsed.ignored(), bad.len());
    assert_eq!(KeySet::parse("no json").ignored(), 1);
    let many: Vec<_> = (0..=keys::KEYS_MAX)
        .map(|n| one.jwk(serde_json::json!({"kid": n.to_string()})))
        .collect();
    assert_eq!(
        KeySet::parse(&serde_json::json!({"keys": many}).to_string()).ignored(),
        1
    );
}

/// Returns a rule that finds tokens in a header, a parameter and a cookie, and that sends claims
/// on.
fn rule_of_all_places(keys: &[serde_json::Value]) -> JwtRule {
    JwtRule {
        headers: vec![("x-jwt".into(), "".into())],
        parameters: vec!["jwt".into()],
        cookies: vec!["session".into()],
        payload_header: Some("x-payload".into()),
        claim_headers: vec![
            ("x-groups".into(), vec!["groups".into()]),
            ("x-level".into(), vec!["realm".into(), "level".into()]),
            ("x-none".into(), vec!["nothing".into()]),
        ],
        ..rule(Some(keys))
    }
}

/// Returns a request whose client also sends its own values of headers that only the gateway may
/// set.
fn from(headers: &[(&'static str, String)], query: Option<String>) -> Asking {
    let spoofed = [
        ("x-groups", "root".to_string()),
        ("x-payload", "spoofed".to_string()),
    ];
    Asking {
        headers: headers.iter().cloned().chain(spoofed).collect(),
        query,
    }
}

#[test]
fn tokens_are_found_removed_and_forwarded() {
    let signer = p256();
    let keys = [signer.jwk(serde_json::json!({}))];
    let claims = serde_json::json!({
        "iss": "iss", "sub": "s", "azp": "p", "groups": ["a", "b"], "scope": "read write", "realm": {"level": 7}, "admin": true,
    });
    let token = token_with(serde_json::json!({"alg": "ES256"}), claims, |m| {
        signer.sign("ES256", m)
    });
    let rule = rule_of_all_places(&keys);
    let payload = token.split('.').nth(1).unwrap().to_string();
    let set = tokens(vec![rule.clone()], false);
    let cookie = format!("a=1; session={token}; b=2");
    for (name, request, changed) in [
        (
            "header",
            from(&[("x-jwt", token.clone())], None),
            ("x-jwt", None),
        ),
        (
            "cookie",
            from(&[("cookie", cookie)], None),
            ("cookie", Some(&b"a=1; b=2"[..])),
        ),
    ] {
        let (checked, changes) = check(&set, &request);
        assert!(checked.unwrap().is_some(), "{name}");
        let mut all: Vec<_> = changes.headers().collect();
        all.sort();
        let payload = ("x-payload", Some(payload.as_bytes()));
        let mut want = vec![
            changed,
            payload,
            ("x-groups", Some(&b"a,b"[..])),
            ("x-level", Some(b"7")),
            // The rule names a claim that the token lacks, and a client's own copy must not replace
            // it.
            ("x-none", None),
        ];
        want.sort();
        assert_eq!(all, want, "{name}");
    }
    let (checked, changes) = check(&set, &from(&[], Some(format!("q=1&jwt={token}&r"))));
    assert!(checked.unwrap().is_some());
    assert_eq!(
        changes.target(b"/x", Some(b"q=1&jwt=x&r")).unwrap(),
        b"/x?q=1&r"
    );
    let (checked, changes) = check(&set, &from(&[], None));
    assert!(checked.unwrap().is_none());
    assert_eq!(changes.value("x-groups"), None);
    assert!(
        changes.sets_or_removes("x-groups") && changes.sets_or_removes("x-payload"),
        "a client's own copies go without a token too"
    );
    let (_, changes) = check(
        &tokens(
            vec![JwtRule {
                forward: true,
                ..rule
            }],
            false,
        ),
        &from(&[("x-jwt", token.clone())], None),
    );
    assert!(!changes.sets_or_removes("x-jwt"));
    let checked = check(&set, &from(&[("x-jwt", token)], None))
        .0
        .unwrap()
        .unwrap();
    let values = |path: &[&str]| {
        let path: Vec<String> = path.iter().map(ToString::to_string).collect();
        let mut values = Vec::new();
        checked.visit_claim(&path, &mut |value| {
            values.push(String::from_utf8(value.to_vec()).unwrap());
            false
        });
        values.join(" ")
    };
    let got = [
        values(&["groups"]),
        values(&["scope"]),
        values(&["realm", "level"]),
        values(&["admin"]),
        values(&["realm"]), // An object is no value.
    ];
    assert_eq!(got, ["a b", "read write", "7", "true", ""]);
    assert_eq!(checked.presenter(), Some("p"));
}

#[test]
fn verified_tokens_are_remembered_with_their_keys_and_up_to_a_bound() {
    let signer = p256();
    let set = || {
        tokens(
            vec![rule(Some(&[signer.jwk(serde_json::json!({}))]))],
            false,
        )
    };
    let token = |n: u64, exp: u64| {
        let claims = serde_json::json!({"iss": "iss", "sub": n.to_string(), "exp": exp});
        token_with(serde_json::json!({"alg": "ES256"}), claims, |m| {
            signer.sign("ES256", m)
        })
    };
    let (cache, own) = (TokenCache::default(), set());
    let ask = |tokens: &JwtRequirements, token: &str, now| {
        drive_now(
            tokens,
            &bearer(token),
            (&cache, now),
            &mut RequestMutations::default(),
        )
        .0
    };
    let first = token(0, NOW + 100);
    let (one, again) = (
        ask(&own, &first, NOW).unwrap().unwrap(),
        ask(&own, &first, NOW).unwrap().unwrap(),
    );
    assert!(Arc::ptr_eq(&one, &again) && cache.len() == 1);
    // 100 s of life and 60 s of leeway.
    assert_eq!(
        ask(&own, &first, NOW + 160).unwrap_err(),
        TokenError::Expired,
        "cached no longer than it is valid"
    );
    let other = ask(&set(), &first, NOW).unwrap().unwrap();
    assert!(
        !Arc::ptr_eq(&one, &other),
        "other keys, or the same received again: verified anew"
    );
    let name = |n: u64| cache.name(n, b"x");
    // Twice as many as fit, so the cache must drop entries.
    for n in 0..2 * cache::ENTRIES_MAX as u64 {
        cache.put(name(n), one.clone(), 0, NOW);
    }
    assert!(cache.len() <= cache::ENTRIES_MAX);
}

/// Returns an RSA public key with a random modulus. It verifies nothing, but costs as much as a
/// real key.
fn rsa_key(kid: Option<&str>) -> serde_json::Value {
    let mut n: [u8; 256] = std::array::from_fn(|_| rand::random());
    (n[0], n[255]) = (n[0] | 0x80, n[255] | 1);
    let mut key = serde_json::json!({"kty": "RSA", "n": b64(n), "e": "AQAB"});
    if let Some(kid) = kid {
        key["kid"] = kid.into();
    }
    key
}

/// Returns ten RequestAuthentications with ten rules each for one issuer; each rule gets its keys
/// from `keys`.
fn hundred_rules(keys: impl Fn() -> Vec<serde_json::Value>) -> JwtRequirements {
    let issuers = (0..10).map(|n| {
        let key = canal_model::authorization::PolicyKey {
            tenant: "alpha".parse().unwrap(),
            namespace: "default".parse().unwrap(),
            name: format!("jwt-{n}").parse().unwrap(),
        };
        let rules = (0..10).map(|_| rule(Some(&keys()))).collect();
        Arc::new(JwtIssuers::new(&Authentication {
            key,
            target: PolicyTarget::Tenant,
            rules,
            broken: None,
        }))
    });
    JwtRequirements::new(issuers.collect())
}

fn forged(kid: Option<&str>, n: u64) -> String {
    let mut header = serde_json::json!({"alg": "RS256"});
    if let Some(kid) = kid {
        header["kid"] = kid.into();
    }
    token_with(
        header,
        serde_json::json!({"iss": "iss", "sub": n.to_string()}),
        |_| vec![1; 256],
    )
}

/// An earlier version did 6,400 verifications for 6,400 keys, without a pause.
#[test]
fn request_has_sixteen_signatures_verified_at_most_and_again_none() {
    for kid in [None, Some("k")] {
        let (tokens, cache) = (
            hundred_rules(|| (0..keys::KEYS_MAX).map(|_| rsa_key(kid)).collect()),
            TokenCache::default(),
        );
        let request = bearer(&forged(kid, 0));
        let ask = |now| {
            drive_now(
                &tokens,
                &request,
                (&cache, now),
                &mut RequestMutations::default(),
            )
        };
        let (refused, verified) = ask(NOW);
        assert_eq!(
            (refused.unwrap_err(), verified),
            (TokenError::TooManyKeys, VERIFICATIONS_PER_REQUEST_MAX),
            "{kid:?}"
        );
        let (refused, verified) = ask(NOW + 5);
        assert_eq!(
            (refused.unwrap_err(), verified),
            (TokenError::TooManyKeys, 0),
            "{kid:?}: remembered"
        );
        assert!(ask(NOW + 20).1 > 0, "{kid:?}: not for long");
    }
}

#[test]
fn equal_keys_of_many_rules_are_verified_once() {
    let signer = Signer::Rsa(RsaKeyPair::generate(KeySize::Rsa2048).unwrap());
    let keys: Vec<_> = (0..keys::KEYS_MAX - 1)
        .map(|n| rsa_key(Some(&n.to_string())))
        .chain([signer.jwk(serde_json::json!({"kid": "own"}))])
        .collect();
    let (tokens, cache) = (hundred_rules(|| keys.clone()), TokenCache::default());
    let own = token_with(
        serde_json::json!({"alg": "RS256", "kid": "own"}),
        serde_json::json!({"iss": "iss", "sub": "s"}),
        |m| signer.sign("RS256", m),
    );
    for (token, want) in [
        (own, None),
        (forged(Some("own"), 1), Some(TokenError::Signature)),
    ] {
        let (checked, verified) = drive_now(
            &tokens,
            &bearer(&token),
            (&cache, NOW),
            &mut RequestMutations::default(),
        );
        assert_eq!((checked.err(), verified), (want, 1));
    }
    // Other rules with the same keys: the result of a key's verification is still known.
    let again = hundred_rules(|| keys.clone());
    assert_eq!(
        drive_now(
            &again,
            &bearer(&forged(Some("own"), 1)),
            (&cache, NOW),
            &mut RequestMutations::default()
        )
        .1,
        0
    );
}

#[test]
fn token_without_kid_is_tried_with_four_keys() {
    let signer = p256();
    let others = |n: usize| {
        (0..n)
            .map(|_| p256().jwk(serde_json::json!({})))
            .collect::<Vec<_>>()
    };
    let token = token_with(
        serde_json::json!({"alg": "ES256"}),
        serde_json::json!({"iss": "iss", "sub": "s"}),
        |m| signer.sign("ES256", m),
    );
    let own = signer.jwk(serde_json::json!({}));
    let last_of = |n: usize| {
        tokens(
            vec![rule(Some(&[others(n - 1), vec![own.clone()]].concat()))],
            false,
        )
    };
    assert!(check(&last_of(4), &bearer(&token)).0.is_ok());
    assert_eq!(
        check(&last_of(5), &bearer(&token)).0.unwrap_err(),
        TokenError::TooManyKeys
    );
    // Keys of another type are not candidates.
    let mixed = [(0..9).map(|_| rsa_key(None)).collect(), vec![own]].concat();
    assert!(
        check(&tokens(vec![rule(Some(&mixed))], false), &bearer(&token))
            .0
            .is_ok()
    );
}

/// Between two verifications of one tenant, all other ready tasks run, however many of the tenant's
/// requests wait.
#[tokio::test(flavor = "current_thread")]
async fn other_connections_have_their_turn_between_two_verifications() {
    let (tokens, cache) = (
        // Eight keys of each of the hundred rules are far more than a request may try; nobody
        // measured fewer.
        std::rc::Rc::new(hundred_rules(|| (0..8).map(|_| rsa_key(None)).collect())),
        std::rc::Rc::new(TokenCache::default()),
    );
    let local = tokio::task::LocalSet::new();
    // Several requests of one tenant must not take turns among themselves only.
    let attackers: Vec<_> = (0..3)
        .map(|n| {
            let (tokens, cache) = (tokens.clone(), cache.clone());
            local.spawn_local(async move {
                drive(
                    &tokens,
                    &bearer(&forged(None, n)),
                    (&cache, NOW),
                    &mut RequestMutations::default(),
                )
                .await
                .1
            })
        })
        .collect();
    let memory = cache.of(1);
    let victim = local.spawn_local(async move {
        let (mut turns, mut seen) = (0, 0);
        // The second condition ends the loop if a verification never comes.
        while seen < 3 * VERIFICATIONS_PER_REQUEST_MAX as usize && turns < 10_000 {
            let [_, verified, _] = memory.sizes();
            assert!(
                verified <= seen + 1,
                "{} verifications between two turns",
                verified - seen
            );
            (seen, turns) = (verified, turns + 1);
            tokio::task::yield_now().await;
        }
        seen
    });
    local.await;
    // Three requests with 16 verifications each.
    assert_eq!(victim.await.unwrap(), 48);
    for attacker in attackers {
        assert_eq!(attacker.await.unwrap(), VERIFICATIONS_PER_REQUEST_MAX);
    }
}

#[test]
fn memory_of_verifications_is_bounded_per_tenant() {
    let cache = TokenCache::default();
    let (one, two) = (cache.of(1), cache.of(2));
    two.remember([9; 32], [9; 16], true, NOW);
    for n in 0..3 * cache::VERIFICATIONS_MAX as u64 {
        let digest = cache.name(n, b"x");
        one.remember(digest, [0; 16], n % 2 == 0, NOW);
        one.refuse(digest, TokenError::Signature, NOW);
    }
    assert!(
        one.sizes()
            .iter()
            .all(|size| *size <= cache::VERIFICATIONS_MAX),
        "{:?}",
        one.sizes()
    );
    assert_eq!(
        two.is_signed(&[9; 32], &[9; 16], NOW),
        Some(true),
        "another tenant's flood drives nothing out"
    );
    assert_eq!(two.is_signed(&[9; 32], &[9; 16], NOW + 301), None);
}
