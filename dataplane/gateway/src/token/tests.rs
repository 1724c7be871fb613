//! Tokens made here with keys made here: what is accepted, what is not, and what becomes of the request.

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeySize;
use aws_lc_rs::signature::{self, EcdsaKeyPair, Ed25519KeyPair, KeyPair, RsaKeyPair};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use canal_model::authorization::PolicyTarget;

use super::*;

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
                let components = signature::RsaPublicKeyComponents::<Vec<u8>>::from(pair.public_key());
                serde_json::json!({"kty": "RSA", "n": b64(components.n), "e": b64(components.e)})
            }
            Signer::P256(pair) => point("P-256", pair.public_key().as_ref()),
            Signer::P384(pair) => point("P-384", pair.public_key().as_ref()),
            Signer::Ed25519(pair) => serde_json::json!({"kty": "OKP", "crv": "Ed25519", "x": b64(pair.public_key())}),
        };
        key.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
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
            Signer::P256(pair) | Signer::P384(pair) => pair.sign(&random, message).unwrap().as_ref().to_vec(),
            Signer::Ed25519(pair) => pair.sign(message).as_ref().to_vec(),
        }
    }
}

fn token_with(header: serde_json::Value, claims: serde_json::Value, sign: impl FnOnce(&[u8]) -> Vec<u8>) -> String {
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

fn tokens(rules: Vec<JwtRule>, broken: bool) -> Tokens {
    let key = canal_model::authorization::PolicyKey {
        tenant: "alpha".parse().unwrap(),
        namespace: "default".parse().unwrap(),
        name: "jwt".parse().unwrap(),
    };
    let broken = broken.then(|| "it is".to_string());
    Tokens::new(vec![Arc::new(Issuers::new(&Authentication { key, target: PolicyTarget::Tenant, rules, broken }))])
}

#[derive(Default)]
struct Asking {
    query: Option<String>,
    headers: Vec<(&'static str, String)>,
}

impl Request for Asking {
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
        self.headers.iter().filter(|(n, _)| *n == name).for_each(|(_, value)| visit(value.as_bytes()));
    }
}

fn bearer(token: &str) -> Asking {
    Asking { headers: vec![("authorization", format!("Bearer {token}"))], ..Asking::default() }
}

/// Asks until all that has to be verified is; gives the number of verifications too.
async fn drive(
    tokens: &Tokens,
    request: &Asking,
    (cache, now): (&Cache, u64),
    changes: &mut Changes,
) -> (Result<Option<Arc<Token>>, BadToken>, u32) {
    let (memory, work, mut verified) = (cache.of(1), VerificationBudget::default(), 0);
    loop {
        match tokens.check(request, (cache, &memory), now, changes) {
            Ok(token) => return (Ok(token), verified),
            Err(TokenError::Bad(bad)) => return (Err(bad), verified),
            Err(TokenError::Verify(todo)) => verified += u32::from(verify(&memory, &work, todo, now).await.is_some()),
        }
    }
}

fn drive_now(tokens: &Tokens, request: &Asking, at: (&Cache, u64), changes: &mut Changes) -> (Result<Option<Arc<Token>>, BadToken>, u32) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(drive(tokens, request, at, changes))
}

fn check(tokens: &Tokens, request: &Asking) -> (Result<Option<Arc<Token>>, BadToken>, Changes) {
    let mut changes = Changes::default();
    (drive_now(tokens, request, (&Cache::default(), NOW), &mut changes).0, changes)
}

#[test]
fn every_algorithm_is_checked_with_keys_of_its_kind_only() {
    let rsa = Signer::Rsa(RsaKeyPair::generate(KeySize::Rsa2048).unwrap());
    let p384 = Signer::P384(EcdsaKeyPair::generate(&signature::ECDSA_P384_SHA384_FIXED_SIGNING).unwrap());
    let ed = Signer::Ed25519(Ed25519KeyPair::generate().unwrap());
    let cases = [
        (&rsa, &["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"][..]),
        (&p256(), &["ES256"]),
        (&p384, &["ES384"]),
        (&ed, &["EdDSA"]),
    ];
    let claims = || serde_json::json!({"iss": "iss", "sub": "s", "exp": NOW + 10});
    for (signer, algorithms) in cases {
        let own = tokens(vec![rule(Some(&[signer.jwk(serde_json::json!({}))]))], false);
        for alg in algorithms {
            let token = token_with(serde_json::json!({"alg": alg}), claims(), |m| signer.sign(alg, m));
            let (checked, changes) = check(&own, &bearer(&token));
            assert_eq!(checked.unwrap().unwrap().principal, "iss/s", "{alg}");
            assert_eq!(changes.headers().collect::<Vec<_>>(), [("authorization", None)], "the token is not forwarded");
            let (message, signed) = token.rsplit_once('.').unwrap();
            let mut bytes = URL_SAFE_NO_PAD.decode(signed).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            let forged = format!("{message}.{}", b64(bytes));
            assert_eq!(check(&own, &bearer(&forged)).0.unwrap_err(), BadToken::Signature, "{alg}");
            for other in [p256(), Signer::Ed25519(Ed25519KeyPair::generate().unwrap())] {
                let others = tokens(vec![rule(Some(&[other.jwk(serde_json::json!({}))]))], false);
                assert!(check(&others, &bearer(&token)).0.is_err(), "{alg}");
            }
        }
    }
    // Confused on purpose: nothing signed, and the public key as a shared secret.
    let own = tokens(vec![rule(Some(&[rsa.jwk(serde_json::json!({}))]))], false);
    for alg in ["none", "HS256", "hs512", "RS1"] {
        let token = token_with(serde_json::json!({"alg": alg}), claims(), |_| b"x".to_vec());
        assert_eq!(check(&own, &bearer(&token)).0.unwrap_err(), BadToken::Algorithm, "{alg}");
    }
}

#[test]
fn claims_and_times_are_checked() {
    let signer = p256();
    let jwk = signer.jwk(serde_json::json!({"kid": "k1"}));
    let wanted = tokens(vec![JwtRule { audiences: vec!["web".into()], ..rule(Some(&[jwk])) }], false);
    let whole = |extra: serde_json::Value| {
        let mut claims = serde_json::json!({"iss": "iss", "sub": "s", "aud": ["x", "web/"], "exp": NOW + 10});
        claims.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        claims
    };
    let cases = [
        ("valid", serde_json::json!({}), None),
        ("one audience", serde_json::json!({"aud": "web"}), None),
        ("another audience", serde_json::json!({"aud": "shop"}), Some(BadToken::Audience)),
        ("no audience", serde_json::json!({"aud": null}), Some(BadToken::Audience)),
        ("another issuer", serde_json::json!({"iss": "other"}), Some(BadToken::Issuer)),
        ("expired within the leeway", serde_json::json!({"exp": NOW - 59}), None),
        ("expired", serde_json::json!({"exp": NOW - 60}), Some(BadToken::Expired)),
        ("expired as a fraction", serde_json::json!({"exp": NOW as f64 - 100.5}), Some(BadToken::Expired)),
        ("an expiry that is no time", serde_json::json!({"exp": "soon"}), Some(BadToken::Malformed)),
        ("not before, within the leeway", serde_json::json!({"nbf": NOW + 60}), None),
        ("not before", serde_json::json!({"nbf": NOW + 61}), Some(BadToken::NotYet)),
        ("issued in the future", serde_json::json!({"iat": NOW + 61}), Some(BadToken::NotYet)),
    ];
    for (name, extra, want) in cases {
        let token = token_with(serde_json::json!({"alg": "ES256", "kid": "k1"}), whole(extra), |m| signer.sign("ES256", m));
        assert_eq!(check(&wanted, &bearer(&token)).0.err(), want, "{name}");
    }
    let signed = |header: serde_json::Value| token_with(header, whole(serde_json::json!({})), |m| signer.sign("ES256", m));
    for (name, token, want) in [
        ("another kid", signed(serde_json::json!({"alg": "ES256", "kid": "k2"})), Some(BadToken::NoKey)),
        ("no kid", signed(serde_json::json!({"alg": "ES256"})), None),
        ("something critical", signed(serde_json::json!({"alg": "ES256", "crit": ["x"]})), Some(BadToken::Critical)),
        ("no token", "opaque".into(), Some(BadToken::Malformed)),
        ("two dots and nothing", "..".into(), Some(BadToken::Malformed)),
        ("five parts", "a.b.c.d.e".into(), Some(BadToken::Malformed)),
        ("too long", "a".repeat(jws::TOKEN_BYTES_MAX + 1), Some(BadToken::TooLong)),
    ] {
        assert_eq!(check(&wanted, &bearer(&token)).0.err(), want, "{name}");
    }
    assert!(check(&wanted, &Asking::default()).0.unwrap().is_none(), "no token is no fault");
    let token = signed(serde_json::json!({"alg": "ES256"}));
    assert_eq!(check(&tokens(vec![rule(None)], false), &bearer(&token)).0.unwrap_err(), BadToken::NoKeys);
    assert_eq!(check(&tokens(vec![], true), &Asking::default()).0.unwrap_err(), BadToken::Broken);
    let many = (0..=TOKENS_MAX).map(|_| ("authorization", format!("Bearer {token}"))).collect();
    assert_eq!(check(&wanted, &Asking { headers: many, query: None }).0.unwrap_err(), BadToken::TooMany);
}

#[test]
fn key_sets_keep_what_can_be_used() {
    let (one, two) = (p256(), p256());
    let token = |signer: &Signer, kid: &str| {
        let claims = serde_json::json!({"iss": "iss", "sub": "s"});
        token_with(serde_json::json!({"alg": "ES256", "kid": kid}), claims, |m| signer.sign("ES256", m))
    };
    // While keys are exchanged there are two, and for a moment two of one name.
    let both = [one.jwk(serde_json::json!({"kid": "k"})), two.jwk(serde_json::json!({"kid": "k", "alg": "ES256", "use": "sig"}))];
    let set = tokens(vec![rule(Some(&both))], false);
    assert!(check(&set, &bearer(&token(&one, "k"))).0.is_ok() && check(&set, &bearer(&token(&two, "k"))).0.is_ok());
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
    let many: Vec<_> = (0..=keys::KEYS_MAX).map(|n| one.jwk(serde_json::json!({"kid": n.to_string()}))).collect();
    assert_eq!(KeySet::parse(&serde_json::json!({"keys": many}).to_string()).ignored(), 1);
}

#[test]
fn tokens_are_found_taken_out_and_told_on() {
    let signer = p256();
    let keys = [signer.jwk(serde_json::json!({}))];
    let claims = serde_json::json!({
        "iss": "iss", "sub": "s", "azp": "p", "groups": ["a", "b"], "scope": "read write", "realm": {"level": 7}, "admin": true,
    });
    let token = token_with(serde_json::json!({"alg": "ES256"}), claims, |m| signer.sign("ES256", m));
    let told = JwtRule {
        headers: vec![("x-jwt".into(), "".into())],
        parameters: vec!["jwt".into()],
        cookies: vec!["session".into()],
        payload_header: Some("x-payload".into()),
        claim_headers: vec![
            ("x-groups".into(), vec!["groups".into()]),
            ("x-level".into(), vec!["realm".into(), "level".into()]),
            ("x-none".into(), vec!["nothing".into()]),
        ],
        ..rule(Some(&keys))
    };
    let payload = token.split('.').nth(1).unwrap().to_string();
    let from = |headers: &[(&'static str, String)], query: Option<String>| {
        let spoofed = [("x-groups", "root".to_string()), ("x-payload", "spoofed".to_string())];
        Asking { headers: headers.iter().cloned().chain(spoofed).collect(), query }
    };
    let set = tokens(vec![told.clone()], false);
    let cookie = format!("a=1; session={token}; b=2");
    for (name, request, changed) in [
        ("header", from(&[("x-jwt", token.clone())], None), ("x-jwt", None)),
        ("cookie", from(&[("cookie", cookie)], None), ("cookie", Some(&b"a=1; b=2"[..]))),
    ] {
        let (checked, changes) = check(&set, &request);
        assert!(checked.unwrap().is_some(), "{name}");
        let mut all: Vec<_> = changes.headers().collect();
        all.sort();
        let payload = ("x-payload", Some(payload.as_bytes()));
        let mut want = vec![changed, payload, ("x-groups", Some(&b"a,b"[..])), ("x-level", Some(b"7")), ("x-none", None)];
        want.sort();
        assert_eq!(all, want, "{name}");
    }
    let (checked, changes) = check(&set, &from(&[], Some(format!("q=1&jwt={token}&r"))));
    assert!(checked.unwrap().is_some());
    assert_eq!(changes.target(b"/x", Some(b"q=1&jwt=x&r")).unwrap(), b"/x?q=1&r");
    let (checked, changes) = check(&set, &from(&[], None));
    assert!(checked.unwrap().is_none());
    assert_eq!(changes.value("x-groups"), None);
    assert!(changes.says("x-groups") && changes.says("x-payload"), "a client's own copies go without a token too");
    let (_, changes) = check(&tokens(vec![JwtRule { forward: true, ..told }], false), &from(&[("x-jwt", token.clone())], None));
    assert!(!changes.says("x-jwt"));
    let checked = check(&set, &from(&[("x-jwt", token)], None)).0.unwrap().unwrap();
    let values = |path: &[&str]| {
        let path: Vec<String> = path.iter().map(ToString::to_string).collect();
        let mut values = Vec::new();
        checked.look(&path, &mut |value| {
            values.push(String::from_utf8(value.to_vec()).unwrap());
            false
        });
        values.join(" ")
    };
    let got = [values(&["groups"]), values(&["scope"]), values(&["realm", "level"]), values(&["admin"]), values(&["realm"])];
    assert_eq!(got, ["a b", "read write", "7", "true", ""]);
    assert_eq!(checked.presenter(), Some("p"));
}

#[test]
fn verified_tokens_are_remembered_with_their_keys_and_up_to_a_bound() {
    let signer = p256();
    let set = || tokens(vec![rule(Some(&[signer.jwk(serde_json::json!({}))]))], false);
    let token = |n: u64, exp: u64| {
        let claims = serde_json::json!({"iss": "iss", "sub": n.to_string(), "exp": exp});
        token_with(serde_json::json!({"alg": "ES256"}), claims, |m| signer.sign("ES256", m))
    };
    let (cache, own) = (Cache::default(), set());
    let ask = |tokens: &Tokens, token: &str, now| drive_now(tokens, &bearer(token), (&cache, now), &mut Changes::default()).0;
    let first = token(0, NOW + 100);
    let (one, again) = (ask(&own, &first, NOW).unwrap().unwrap(), ask(&own, &first, NOW).unwrap().unwrap());
    assert!(Arc::ptr_eq(&one, &again) && cache.len() == 1);
    assert_eq!(ask(&own, &first, NOW + 160).unwrap_err(), BadToken::Expired, "remembered no longer than it is valid");
    let other = ask(&set(), &first, NOW).unwrap().unwrap();
    assert!(!Arc::ptr_eq(&one, &other), "other keys, or the same told again: verified anew");
    let name = |n: u64| cache.name(n, b"x");
    for n in 0..2 * cache::ENTRIES_MAX as u64 {
        cache.put(name(n), one.clone(), 0, NOW);
    }
    assert!(cache.len() <= cache::ENTRIES_MAX);
}

/// A public key of random digits: it verifies nothing, and costs as much as any.
fn rsa_key(kid: Option<&str>) -> serde_json::Value {
    let mut n: [u8; 256] = std::array::from_fn(|_| rand::random());
    (n[0], n[255]) = (n[0] | 0x80, n[255] | 1);
    let mut key = serde_json::json!({"kty": "RSA", "n": b64(n), "e": "AQAB"});
    if let Some(kid) = kid {
        key["kid"] = kid.into();
    }
    key
}

/// Ten RequestAuthentications of ten rules of one issuer, each with what `keys` gives.
fn hundred_rules(keys: impl Fn() -> Vec<serde_json::Value>) -> Tokens {
    let issuers = (0..10).map(|n| {
        let key = canal_model::authorization::PolicyKey {
            tenant: "alpha".parse().unwrap(),
            namespace: "default".parse().unwrap(),
            name: format!("jwt-{n}").parse().unwrap(),
        };
        let rules = (0..10).map(|_| rule(Some(&keys()))).collect();
        Arc::new(Issuers::new(&Authentication { key, target: PolicyTarget::Tenant, rules, broken: None }))
    });
    Tokens::new(issuers.collect())
}

fn forged(kid: Option<&str>, n: u64) -> String {
    let mut header = serde_json::json!({"alg": "RS256"});
    if let Some(kid) = kid {
        header["kid"] = kid.into();
    }
    token_with(header, serde_json::json!({"iss": "iss", "sub": n.to_string()}), |_| vec![1; 256])
}

/// 6,400 keys used to be 6,400 verifications, in one go.
#[test]
fn request_has_sixteen_signatures_verified_at_most_and_again_none() {
    for kid in [None, Some("k")] {
        let (tokens, cache) = (hundred_rules(|| (0..keys::KEYS_MAX).map(|_| rsa_key(kid)).collect()), Cache::default());
        let request = bearer(&forged(kid, 0));
        let ask = |now| drive_now(&tokens, &request, (&cache, now), &mut Changes::default());
        let (refused, verified) = ask(NOW);
        assert_eq!((refused.unwrap_err(), verified), (BadToken::TooManyKeys, VERIFICATIONS_PER_REQUEST_MAX), "{kid:?}");
        let (refused, verified) = ask(NOW + 5);
        assert_eq!((refused.unwrap_err(), verified), (BadToken::TooManyKeys, 0), "{kid:?}: remembered");
        assert!(ask(NOW + 20).1 > 0, "{kid:?}: not for long");
    }
}

#[test]
fn equal_keys_of_many_rules_are_verified_once() {
    let signer = Signer::Rsa(RsaKeyPair::generate(KeySize::Rsa2048).unwrap());
    let keys: Vec<_> =
        (0..keys::KEYS_MAX - 1).map(|n| rsa_key(Some(&n.to_string()))).chain([signer.jwk(serde_json::json!({"kid": "own"}))]).collect();
    let (tokens, cache) = (hundred_rules(|| keys.clone()), Cache::default());
    let own = token_with(serde_json::json!({"alg": "RS256", "kid": "own"}), serde_json::json!({"iss": "iss", "sub": "s"}), |m| {
        signer.sign("RS256", m)
    });
    for (token, want) in [(own, None), (forged(Some("own"), 1), Some(BadToken::Signature))] {
        let (checked, verified) = drive_now(&tokens, &bearer(&token), (&cache, NOW), &mut Changes::default());
        assert_eq!((checked.err(), verified), (want, 1));
    }
    // Other rules with the same keys: what a key has signed stays known.
    let again = hundred_rules(|| keys.clone());
    assert_eq!(drive_now(&again, &bearer(&forged(Some("own"), 1)), (&cache, NOW), &mut Changes::default()).1, 0);
}

#[test]
fn token_without_kid_is_tried_with_four_keys() {
    let signer = p256();
    let others = |n: usize| (0..n).map(|_| p256().jwk(serde_json::json!({}))).collect::<Vec<_>>();
    let token = token_with(serde_json::json!({"alg": "ES256"}), serde_json::json!({"iss": "iss", "sub": "s"}), |m| signer.sign("ES256", m));
    let own = signer.jwk(serde_json::json!({}));
    let last_of = |n: usize| tokens(vec![rule(Some(&[others(n - 1), vec![own.clone()]].concat()))], false);
    assert!(check(&last_of(4), &bearer(&token)).0.is_ok());
    assert_eq!(check(&last_of(5), &bearer(&token)).0.unwrap_err(), BadToken::TooManyKeys);
    // Keys of another kind are no candidates.
    let mixed = [(0..9).map(|_| rsa_key(None)).collect(), vec![own]].concat();
    assert!(check(&tokens(vec![rule(Some(&mixed))], false), &bearer(&token)).0.is_ok());
}

/// Between two verifications of a tenant, all else that is ready has its turn, however many of the tenant's requests wait.
#[tokio::test(flavor = "current_thread")]
async fn other_connections_have_their_turn_between_two_verifications() {
    let (tokens, cache) = (std::rc::Rc::new(hundred_rules(|| (0..8).map(|_| rsa_key(None)).collect())), std::rc::Rc::new(Cache::default()));
    let local = tokio::task::LocalSet::new();
    let attackers: Vec<_> = (0..3)
        .map(|n| {
            let (tokens, cache) = (tokens.clone(), cache.clone());
            local.spawn_local(async move { drive(&tokens, &bearer(&forged(None, n)), (&cache, NOW), &mut Changes::default()).await.1 })
        })
        .collect();
    let memory = cache.of(1);
    let victim = local.spawn_local(async move {
        let (mut turns, mut seen) = (0, 0);
        while seen < 3 * VERIFICATIONS_PER_REQUEST_MAX as usize && turns < 10_000 {
            let [_, verified, _] = memory.sizes();
            assert!(verified <= seen + 1, "{} verifications between two turns", verified - seen);
            (seen, turns) = (verified, turns + 1);
            tokio::task::yield_now().await;
        }
        seen
    });
    local.await;
    assert_eq!(victim.await.unwrap(), 48);
    for attacker in attackers {
        assert_eq!(attacker.await.unwrap(), VERIFICATIONS_PER_REQUEST_MAX);
    }
}

#[test]
fn memory_of_verifications_is_bounded_per_tenant() {
    let cache = Cache::default();
    let (one, two) = (cache.of(1), cache.of(2));
    two.remember([9; 32], [9; 16], true, NOW);
    for n in 0..3 * cache::VERIFICATIONS_MAX as u64 {
        let digest = cache.name(n, b"x");
        one.remember(digest, [0; 16], n % 2 == 0, NOW);
        one.refuse(digest, BadToken::Signature, NOW);
    }
    assert!(one.sizes().iter().all(|size| *size <= cache::VERIFICATIONS_MAX), "{:?}", one.sizes());
    assert_eq!(two.is_signed(&[9; 32], &[9; 16], NOW), Some(true), "another tenant's flood drives nothing out");
    assert_eq!(two.is_signed(&[9; 32], &[9; 16], NOW + 301), None);
}
