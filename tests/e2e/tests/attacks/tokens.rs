//! Attacks on JSON Web Tokens (RFC 8725): forged algorithms, wrong claims, headers that claim a
//! token; and attacks on the controller by URLs of key sets that it fetches.

use std::time::Duration;

use canal_e2e::controller::Caller;
use canal_timing::deadline;

use super::attack_world::{Attack, AttackOutcome, AttackWorld, BETA, BETA_OPERATOR, CLIENT, poll};

/// The controller tries to fetch a new key set within this time. It only has to exceed what a quiet
/// machine needs: in the gate, `deadline` waits a minute or more.
const FETCHED_WITHIN: Duration = Duration::from_secs(3);
/// The gateways have a fetched key set within this time. It only has to exceed what a quiet machine
/// needs: in the gate, `deadline` waits a minute or more.
const KNOWN_WITHIN: Duration = Duration::from_secs(5);
/// Time for which the test checks that a forbidden key set is not fetched. A key set that is
/// permitted is fetched well before.
const HIDDEN_FOR: Duration = Duration::from_secs(1);
const URL: &str = "http://10.101.0.14/headers";
const GOOD: &str = r#"{"sub": "me", "aud": "shop"}"#;

fn token(setup: &AttackWorld, query: &str, claims: &str) -> String {
    let url = format!("http://127.0.0.1:8090/token?{query}");
    setup
        .mesh
        .run("issuer", &["curl", "-sS", "-X", "POST", "-d", claims, &url])
        .expect_success()
}

fn with(setup: &AttackWorld, token: &str) -> AttackOutcome {
    setup.served(
        CLIENT,
        URL,
        &["-H", &format!("authorization: Bearer {token}")],
    )
}

fn good(setup: &AttackWorld) -> AttackOutcome {
    with(setup, &token(setup, "kid=first", GOOD))
}

fn refused(attack: Attack) -> Attack {
    attack.counted("gateway", "canal_gateway_tokens_total", &[])
}

/// Returns attacks with a token of the issuer that is forged or not for this service.
fn wrong_tokens() -> Vec<Attack> {
    let forged = |name, query: &'static str, claims: &'static str| {
        refused(Attack::new(
            name,
            move |s: &AttackWorld| with(s, &token(s, query, claims)),
            good,
        ))
    };
    vec![
        // `forge` lets the issuer sign wrongly.
        forged("JWT: alg none", "kid=first&forge=none", GOOD),
        forged(
            "JWT: HMAC with the public key",
            "kid=first&forge=hmac",
            GOOD,
        ),
        forged(
            "JWT: HMAC with the public key of EC",
            "kid=curve&forge=hmac",
            GOOD,
        ),
        forged(
            "JWT: one bit of the signature",
            "kid=first&forge=bits",
            GOOD,
        ),
        forged(
            "JWT: another issuer",
            "kid=first",
            r#"{"iss": "https://evil.example", "aud": "shop", "sub": "me"}"#,
        ),
        forged(
            "JWT: another audience",
            "kid=first",
            r#"{"aud": "bank", "sub": "me"}"#,
        ),
        // The times of the next two are in 2001 and 2096.
        forged(
            "JWT: ended",
            "kid=first",
            r#"{"aud": "shop", "sub": "me", "exp": 1000000000}"#,
        ),
        forged(
            "JWT: not yet",
            "kid=first",
            r#"{"aud": "shop", "sub": "me", "nbf": 4000000000}"#,
        ),
    ]
}

pub(crate) fn attacks() -> Vec<Attack> {
    let mut all = wrong_tokens();
    all.extend([
        refused(Attack::new(
            "JWT: another's claims under one's signature",
            |s| {
                let (own, other) = (
                    token(s, "kid=first", GOOD),
                    token(s, "kid=first", r#"{"sub": "admin", "aud": "shop"}"#),
                );
                // A signed token has three parts.
                let part =
                    |token: &str, n: usize| token.split('.').nth(n).unwrap_or_default().to_owned();
                with(
                    s,
                    &format!("{}.{}.{}", part(&own, 0), part(&other, 1), part(&own, 2)),
                )
            },
            good,
        )),
        refused(Attack::new(
            "JWT: no token but its dots",
            |s| with(s, ".."),
            good,
        )),
        // The payload header is the gateway's to set; a client's must be removed.
        Attack::new(
            "the payload of a token that was not there",
            // The value is the base64url form of the claim that subject is `me`.
            |s| s.served(CLIENT, URL, &["-H", "x-payload: eyJzdWIiOiJtZSJ9"]),
            good,
        ),
        // The gateway validates every token of a request, and one bad token refuses it. Otherwise a
        // proxy and an application could each choose another.
        Attack::new(
            "two tokens, the second good",
            |s| {
                let (bad, good) = (
                    token(s, "kid=first&forge=none", GOOD),
                    token(s, "kid=first", GOOD),
                );
                s.served(
                    CLIENT,
                    URL,
                    &[
                        "-H",
                        &format!("authorization: Bearer {bad}"),
                        "-H",
                        &format!("authorization: Bearer {good}"),
                    ],
                )
            },
            good,
        ),
    ]);
    all.extend(fetches());
    all
}

/// Key sets that the controller must not fetch: the tenant gets a diagnostic, and nothing is
/// fetched.
fn fetches() -> Vec<Attack> {
    let authentication = |uri: &str| {
        format!(
            "apiVersion: security.istio.io/v1\nkind: RequestAuthentication\nmetadata: {{name: fetch, namespace: default}}\n\
             spec: {{selector: {{matchLabels: {{app: web}}}}, jwtRules: [{{issuer: \"https://issuer.example\", jwksUri: \"{uri}\"}}]}}\n"
        )
    };
    // A token of the issuer is valid only if its keys were fetched.
    let holds = move |s: &AttackWorld, uri: &str, timeout: Duration| {
        let operator = Caller::with_token(&s.mesh.world, "controller", BETA_OPERATOR);
        let fetches = || {
            s.mesh.counted(
                "controller",
                "canal_controller_jwks_fetches_total",
                &["tenant=\"beta\""],
            )
        };
        let before = fetches();
        let applied = operator.apply("beta", &authentication(uri));
        // A change that was refused as a whole changed nothing and fetched nothing.
        if !applied.as_ref().is_ok_and(|answer| answer.accepted) {
            return AttackOutcome::of(false, applied);
        }
        // Every outcome is counted, refusals too.
        poll(deadline(FETCHED_WITHIN), || {
            AttackOutcome::of(fetches() > before, "")
        });
        let token = token(s, "kid=first", GOOD);
        let ask = || {
            s.served(
                BETA,
                "http://10.101.0.10/headers",
                &["-H", &format!("authorization: Bearer {token}")],
            )
        };
        // The wait is short for an attack, where nothing must come, and long for the control.
        let seen = poll(timeout, ask);
        // The next case has the same name and overwrites what a failed deletion leaves.
        let _ = operator.delete("beta", "RequestAuthentication", "fetch");
        AttackOutcome::of(seen.reached, (applied, seen.output))
    };
    let control =
        move |s: &AttackWorld| holds(s, "http://issuer:8090/jwks", deadline(KNOWN_WITHIN));
    let fetch = |name, uri: &'static str| {
        Attack::new(
            name,
            move |s: &AttackWorld| holds(s, uri, HIDDEN_FOR),
            control,
        )
    };
    vec![
        fetch(
            "JWKS: the controller's own loopback",
            "http://127.0.0.1:15000/config_dump",
        ),
        fetch(
            "JWKS: another port of an allowed host",
            "http://issuer:15020/metrics",
        ),
        fetch(
            "JWKS: a host that is not allowed",
            "http://gw-1:15020/metrics",
        ),
        fetch(
            "JWKS: an allowed host as a user name",
            "http://issuer:8090@gw-1:15020/jwks",
        ),
        fetch("JWKS: another tenant's file", "file:../alpha/services.yaml"),
        fetch("JWKS: a file of the machine", "file:/etc/passwd"),
        fetch("JWKS: another scheme", "gopher://issuer:8090/jwks"),
    ]
}
