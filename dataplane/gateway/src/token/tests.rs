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

fn check(tokens: &Tokens, request: &Asking) -> (Result<Option<Arc<Token>>, BadToken>, Changes) {
    let mut changes = Changes::default();
    (tokens.check(request, &Cache::default(), NOW, &mut changes), changes)
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
    let ask = |tokens: &Tokens, token: &str, now| tokens.check(&bearer(token), &cache, now, &mut Changes::default());
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
