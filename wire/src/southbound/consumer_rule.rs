//! Wire form of a rule for the clients of one namespace. Such a rule replaces others for these clients,
//! so a data plane that does not know it must not route them. For such a data plane the route is a
//! rule that refuses every request of the port, before all other rules.

use canal_model::ids::Namespace;
use canal_model::program as p;

use super::ResourceDecodeError;
use super::decode::DecodeContext;
use super::encode::http_match;
use crate::program as w;

/// Status for all requests of the port in a data plane that does not know the rule. Another gateway may
/// serve a retry.
const UNKNOWN_STATUS: u32 = 503;
/// Reason for this status in logs.
const UNKNOWN_REASON: &str = "this gateway is too old for routes of one namespace; upgrade it";

/// Encodes a rule for clients of `namespace`.
pub(super) fn encode(rule: &p::RouteRule, namespace: &Namespace) -> w::Route {
    let mut inner = w::Route::from(&p::RouteRule {
        consumer: None,
        ..rule.clone()
    });
    let outer = w::Route {
        key: inner.key.take(),
        parent: inner.parent.take(),
        parent_port: std::mem::take(&mut inner.parent_port),
        matches: vec![http_match(&first_of_all())],
        action: Some(w::route::Action::Refuse(w::Refuse {
            status: UNKNOWN_STATUS,
            reason: UNKNOWN_REASON.to_owned(),
        })),
        ..w::Route::default()
    };
    w::Route {
        consumer: Some(Box::new(w::ConsumerRule {
            namespace: namespace.to_string(),
            rule: Some(Box::new(inner)),
        })),
        ..outer
    }
}

/// Returns the match that holds for every request, and precedes every other.
fn first_of_all() -> p::HttpMatch {
    p::HttpMatch {
        precedence: p::Precedence {
            class: 0,
            specificity: [0; 5],
            created: 0,
            object: String::new(),
            indexes: [0; 2],
        },
        path: p::PathMatch::StringPrefix(String::new()),
        method: None,
        headers: Vec::new(),
        query: Vec::new(),
    }
}

/// Returns the rule that a route carries, and the namespace of the clients to which it applies.
pub(super) fn decode(
    at: &DecodeContext<'_>,
    mut received: w::Route,
) -> Result<(w::Route, Option<Namespace>), ResourceDecodeError> {
    let Some(consumer) = received.consumer.take() else {
        return Ok((received, None));
    };
    let namespace = at.name("consumer.namespace", &consumer.namespace)?;
    let rule = *at.need("consumer.rule", consumer.rule)?;
    // A rule inside this one would be for clients of two namespaces, which none is.
    if rule.consumer.is_some() {
        return at.err("consumer.rule", "has a rule for clients in it");
    }
    let rule = w::Route {
        key: received.key,
        parent: received.parent,
        parent_port: received.parent_port,
        ..rule
    };
    Ok((rule, Some(namespace)))
}
