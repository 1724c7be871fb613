//! Resolves RequestAuthentications: which JWTs are valid. A broken object refuses all requests that
//! it targets. An issuer without keys has no valid token.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::authorization::{
    Authentication, JWT_RULES_MAX, JwtRule, KEYS_BYTES_MAX, PolicyKey, VALUE_BYTES_MAX, VALUES_MAX,
};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::TenantName;
use canal_model::policy::istio_security::{self, RequestAuthentication};

use crate::target::{PolicyTargets, TargetSelector, keys, targets};
use crate::values::{claim, header};
use crate::{PolicyResolver, key};
use canal_diagnostics::DiagnosticCollector;
use canal_diagnostics::Sourced;
use canal_ir::limits::{JWKS_URI_BYTES_MAX, JWKS_URIS_PER_TENANT_MAX};
use canal_ir::resource_budget::ResourceBudget;

type AuthenticationResolver<'a> = PolicyResolver<'a, RequestAuthentication>;

/// Headers that describe the request itself; claims must not be written to them.
const FRAMING: [&str; 8] = [
    "host",
    "connection",
    "content-length",
    "transfer-encoding",
    "upgrade",
    "te",
    "trailer",
    "x-forwarded-for",
];

/// Key sets that were fetched, and those that are needed.
pub struct KeySets<'a> {
    pub fetched: &'a BTreeMap<String, String>,
    pub required_uris: BTreeSet<String>,
}

/// Returns the request authentications, sorted by key.
pub fn resolve(
    tenant: &TenantName,
    declared: &[Sourced<'_, RequestAuthentication>],
    named: PolicyTargets<'_>,
    (sets, budget): (&mut KeySets<'_>, &mut ResourceBudget),
    report: &mut DiagnosticCollector,
) -> Vec<Authentication> {
    // A key made for a further target must not be that of an object that comes later in the list.
    let mut taken: BTreeSet<PolicyKey> = declared
        .iter()
        .map(|sourced| key(tenant, &sourced.object.metadata))
        .collect();
    let mut all = Vec::new();
    for sourced in declared {
        let RequestAuthentication { metadata, spec } = sourced.object;
        let mut reading = PolicyResolver::new(sourced, report);
        let written = TargetSelector::from(sourced.object);
        let targets = targets(tenant, &written, named, &mut reading);
        let mut rules = Vec::new();
        if spec.jwt_rules.len() > JWT_RULES_MAX {
            let problem = format!(
                "there are {} rules, more than {JWT_RULES_MAX}",
                spec.jwt_rules.len()
            );
            reading.breaks(
                Code::LimitExceeded,
                "spec.jwtRules",
                problem,
                "write several objects",
            );
        } else {
            rules.extend(spec.jwt_rules.iter().enumerate().map(|(at, written)| {
                rule(&format!("spec.jwtRules[{at}]"), written, sets, &mut reading)
            }));
        }
        // A broken object refuses every request, so its rules are not evaluated.
        if reading.broken.is_some() {
            rules.clear();
        }
        let own = key(tenant, metadata);
        // A resource has one target, so each target gets a resource with a key of its own.
        for (key, target) in keys(&own, targets.len(), &taken).into_iter().zip(targets) {
            taken.insert(key.clone());
            let policy = Authentication {
                key,
                target,
                rules: rules.clone(),
                broken: reading.broken.clone(),
            };
            // The resources exceed their limit, so the rest is not compiled.
            if !budget.add_authentication(&policy) {
                return all;
            }
            all.push(policy);
        }
    }
    all.sort_by(|a, b| a.key.cmp(&b.key));
    all
}

fn rule(
    field: &str,
    written: &istio_security::JwtRule,
    sets: &mut KeySets<'_>,
    reading: &mut AuthenticationResolver<'_>,
) -> JwtRule {
    if written.issuer.is_empty() {
        reading.breaks(
            Code::MissingField,
            format!("{field}.issuer"),
            "the issuer is empty",
            "write the `iss` of its tokens",
        );
    }
    let lists = [
        ("audiences", written.audiences.len()),
        ("fromHeaders", written.from_headers.len()),
        ("fromParams", written.from_params.len()),
        ("fromCookies", written.from_cookies.len()),
        (
            "outputClaimToHeaders",
            written.output_claim_to_headers.len(),
        ),
    ];
    for (list, count) in lists.into_iter().filter(|(_, count)| *count > VALUES_MAX) {
        reading.breaks(
            Code::LimitExceeded,
            format!("{field}.{list}"),
            format!("there are {count} items, more than {VALUES_MAX}"),
            "write fewer",
        );
    }
    check_words(field, written, reading);
    let mut headers = Vec::new();
    for (at, from) in written.from_headers.iter().enumerate() {
        match header(&from.name) {
            Ok(name) => headers.push((name, from.prefix.clone())),
            Err((problem, fix)) => reading.breaks(
                Code::InvalidValue,
                format!("{field}.fromHeaders[{at}].name"),
                problem,
                fix,
            ),
        }
    }
    let mut claim_headers = Vec::new();
    for (at, to) in written.output_claim_to_headers.iter().enumerate() {
        let own = format!("{field}.outputClaimToHeaders[{at}]");
        // Both parts are read, so that a broken entry reports all of its mistakes.
        let name = output(&format!("{own}.header"), &to.header, reading);
        match claim(to.claim.split('.')) {
            Ok(claim) => claim_headers.extend(name.map(|name| (name, claim))),
            Err((problem, fix)) => {
                reading.breaks(Code::InvalidValue, format!("{own}.claim"), problem, fix)
            }
        }
    }
    let payload = written.output_payload_to_header.as_deref();
    JwtRule {
        issuer: written.issuer.clone(),
        audiences: written.audiences.clone(),
        keys: key_set(field, written, sets, reading),
        headers,
        parameters: written.from_params.clone(),
        cookies: written.from_cookies.clone(),
        forward: written.forward_original_token,
        payload_header: payload
            .and_then(|name| output(&format!("{field}.outputPayloadToHeader"), name, reading)),
        claim_headers,
    }
}

/// Reports values that are empty or too long.
fn check_words(
    field: &str,
    written: &istio_security::JwtRule,
    reading: &mut AuthenticationResolver<'_>,
) {
    let lists = [
        ("audiences", &written.audiences),
        ("fromParams", &written.from_params),
        ("fromCookies", &written.from_cookies),
    ];
    let listed = lists.into_iter().flat_map(|(name, words)| {
        words
            .iter()
            .enumerate()
            .map(move |(at, word)| (format!("{name}[{at}]"), word))
    });
    let prefixes = written
        .from_headers
        .iter()
        .enumerate()
        .map(|(at, from)| (format!("fromHeaders[{at}].prefix"), &from.prefix));
    for (name, word) in listed
        .chain([("issuer".to_owned(), &written.issuer)])
        .chain(prefixes)
    {
        // `rule` reports an empty issuer; an empty prefix means that there is none.
        let may_be_empty = name == "issuer" || name.ends_with("prefix");
        if word.is_empty() && !may_be_empty {
            reading.breaks(
                Code::MissingField,
                format!("{field}.{name}"),
                "the value is empty",
                "write one or remove it",
            );
        } else if word.len() > VALUE_BYTES_MAX {
            reading.breaks(
                Code::LimitExceeded,
                format!("{field}.{name}"),
                format!(
                    "the value has {} bytes; at most {VALUE_BYTES_MAX} are allowed",
                    word.len()
                ),
                "write a shorter one",
            );
        }
    }
}

/// Validates the name of a header to which a claim or payload is written.
fn output(field: &str, name: &str, reading: &mut AuthenticationResolver<'_>) -> Option<String> {
    if FRAMING.contains(&name.to_ascii_lowercase().as_str()) {
        reading.breaks(
            Code::InvalidValue,
            field,
            format!(
                "{name} controls how the request is transferred, so it cannot carry token data"
            ),
            "write another header, such as x-jwt-payload",
        );
        return None;
    }
    match header(name) {
        Ok(name) => Some(name),
        Err((problem, fix)) => {
            reading.breaks(Code::InvalidValue, field, problem, fix);
            None
        }
    }
}

/// Returns the keys of an issuer if they are available. A problem here disables only this issuer.
fn key_set(
    field: &str,
    written: &istio_security::JwtRule,
    sets: &mut KeySets<'_>,
    reading: &mut AuthenticationResolver<'_>,
) -> Option<String> {
    const CLOSED: &str = "so no token of this issuer is valid";
    let (field, keys) = match (&written.jwks, &written.jwks_uri) {
        // Either could be the set that the author trusts.
        (Some(_), Some(_)) => {
            reading.error(
                Code::ConflictingFields,
                format!("{field}.jwksUri"),
                format!("jwks is set too, {CLOSED}"),
                "write one of the two",
            );
            return None;
        }
        (None, None) => {
            reading.error(
                Code::MissingField,
                format!("{field}.jwksUri"),
                format!("the issuer has no keys, {CLOSED}"),
                "write jwksUri or jwks",
            );
            return None;
        }
        (Some(inline), None) => (format!("{field}.jwks"), inline),
        (None, Some(uri)) => {
            let field = format!("{field}.jwksUri");
            if let Err((problem, fix)) = check_uri(uri, sets) {
                reading.error(
                    Code::InvalidKeySet,
                    field,
                    format!("{problem}, {CLOSED}"),
                    fix,
                );
                return None;
            }
            // The controller fetches the set, and compiles the tenant again when it has it.
            sets.required_uris.insert(uri.clone());
            let Some(keys) = sets.fetched.get(uri) else {
                reading.warning(
                    Code::KeySetUnavailable,
                    field,
                    format!("the keys at {uri} are not available yet, {CLOSED}"),
                    "check that the controller can reach this URL",
                );
                return None;
            };
            (field, keys)
        }
    };
    match check_keys(keys) {
        Ok(()) => Some(keys.clone()),
        Err(problem) => {
            reading.error(
                Code::InvalidKeySet,
                field,
                format!("{problem}, {CLOSED}"),
                "write a key set (RFC 7517): {\"keys\": [...]}",
            );
            None
        }
    }
}

fn check_uri(uri: &str, sets: &KeySets<'_>) -> Result<(), (String, &'static str)> {
    let short: String = uri.chars().take(120).collect();
    if uri.len() > JWKS_URI_BYTES_MAX {
        return Err((
            format!("the URL has more than {JWKS_URI_BYTES_MAX} bytes"),
            "write a shorter one",
        ));
    }
    if !sets.required_uris.contains(uri) && sets.required_uris.len() >= JWKS_URIS_PER_TENANT_MAX {
        return Err((
            format!("the tenant has more than {JWKS_URIS_PER_TENANT_MAX} key URLs"),
            "use jwks, or fewer issuers",
        ));
    }
    let odd = |c: char| c.is_control() || c.is_whitespace() || c == '\\';
    let is_good = match uri.split_once(':') {
        Some(("file", path)) => {
            !path.is_empty()
                && !path.starts_with('/')
                && path.split('/').all(|part| !matches!(part, ".." | "." | ""))
        }
        Some(("http" | "https", rest)) => rest.strip_prefix("//").is_some_and(|rest| {
            let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
            !host.is_empty() && !host.contains('@')
        }),
        _ => false,
    };
    if is_good && !uri.contains(odd) {
        return Ok(());
    }
    Err((
        format!("{short:?} is not a valid key URL"),
        "write https://, http://, or file: and a path below the tenant's folder",
    ))
}

fn check_keys(keys: &str) -> Result<(), String> {
    if keys.len() > KEYS_BYTES_MAX {
        return Err(format!(
            "the key set has {} bytes, more than {KEYS_BYTES_MAX}",
            keys.len()
        ));
    }
    let value: serde_json::Value =
        serde_json::from_str(keys).map_err(|why| format!("the key set is not JSON ({why})"))?;
    match value.get("keys").and_then(serde_json::Value::as_array) {
        Some(keys)
            if !keys.is_empty()
                && keys
                    .iter()
                    .all(|key| key.get("kty").is_some_and(serde_json::Value::is_string)) =>
        {
            Ok(())
        }
        _ => Err("this is not a key set, or has no keys".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_keys_lead_nowhere_else() {
        let (fetched, wanted) = (BTreeMap::new(), BTreeSet::new());
        let sets = KeySets {
            fetched: &fetched,
            required_uris: wanted,
        };
        for (uri, good) in [
            ("https://issuer.example/keys?x=1", true),
            ("http://127.0.0.1:8080/keys", true),
            ("file:keys.json", true),
            ("file:keys/own.json", true),
            ("file:/etc/passwd", false),
            ("file:../beta/keys.json", false),
            ("file:a/../../x", false),
            ("file:a//x", false),
            ("file:", false),
            ("https:///keys", false),
            ("https://user@issuer/keys", false),
            ("https://issuer/a b", false),
            ("ftp://issuer/keys", false),
            ("issuer", false),
            ("", false),
        ] {
            assert_eq!(check_uri(uri, &sets).is_ok(), good, "{uri}");
        }
        assert!(
            check_uri(
                &format!("https://x/{}", "a".repeat(JWKS_URI_BYTES_MAX)),
                &sets
            )
            .is_err()
        );
    }

    #[test]
    fn key_sets_are_sets_of_keys() {
        for (text, good) in [
            (r#"{"keys":[{"kty":"EC"}]}"#, true),
            (r#"{"keys":[]}"#, false),
            (r#"{"keys":[{}]}"#, false),
            (r#"{"keys":{}}"#, false),
            ("[]", false),
            ("", false),
        ] {
            assert_eq!(check_keys(text).is_ok(), good, "{text}");
        }
        assert!(check_keys(&" ".repeat(KEYS_BYTES_MAX + 1)).is_err());
    }
}
