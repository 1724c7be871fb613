//! The facts that a token with a valid signature adds to a request: its principal, audiences,
//! presenter and the claims that policies name. The module does not decide whether the token is
//! accepted. Start with [`claimed`].

use std::collections::BTreeMap;

use canal_model::authorization::{Attribute, Authorization, JwtRule};
use serde_json::Value as Json;

use canal_oracle::authorization::OracleValue;

/// Returns the facts from a valid token.
pub(super) fn claimed(
    rule: &JwtRule,
    claims: &Json,
    audiences: Vec<String>,
    policies: &[&Authorization],
) -> BTreeMap<Attribute, Vec<OracleValue>> {
    let values = |texts: Vec<String>| {
        texts
            .into_iter()
            .map(OracleValue::Text)
            .collect::<Vec<OracleValue>>()
    };
    // A principal has an issuer and a subject.
    let subject = claims
        .get("sub")
        .and_then(Json::as_str)
        .filter(|subject| !subject.is_empty() && !rule.issuer.is_empty());
    let principal = subject.map(|subject| format!("{}/{subject}", rule.issuer));
    let mut seen = BTreeMap::from([
        (
            Attribute::RequestPrincipal,
            values(principal.into_iter().collect()),
        ),
        (Attribute::RequestAudience, values(audiences)),
        (
            Attribute::RequestPresenter,
            values(texts(claims.get("azp"))),
        ),
    ]);
    let clauses = policies
        .iter()
        .flat_map(|policy| &policy.rules)
        .flat_map(|rule| rule.from.iter().chain(&rule.to).chain([&rule.when]));
    // Of all claims, only those that a policy reads are of interest.
    for attribute in clauses.flatten().map(|clause| &clause.attribute) {
        if let Attribute::RequestClaim(path) = attribute {
            let claim = path
                .iter()
                .try_fold(claims, |claims, name| claims.get(name));
            let mut found = texts(claim);
            // These claims are lists in one text, separated by spaces.
            if matches!(path.as_slice(), [name] if name == "scope" || name == "permission") {
                found = found
                    .iter()
                    .flat_map(|text| text.split(' '))
                    .filter(|text| !text.is_empty())
                    .map(str::to_owned)
                    .collect();
            }
            seen.insert(attribute.clone(), values(found));
        }
    }
    seen
}

/// Returns the texts of a claim: of the claim itself, or of the items of its list.
pub(super) fn texts(claim: Option<&Json>) -> Vec<String> {
    let one = |value: &Json| match value {
        Json::String(text) => Some(text.clone()),
        Json::Bool(_) | Json::Number(_) => Some(value.to_string()),
        _ => None,
    };
    match claim {
        Some(Json::Array(items)) => items.iter().filter_map(one).collect(),
        Some(value) => one(value).into_iter().collect(),
        None => Vec::new(),
    }
}
