//! Short language for policies, facts and decisions, so that a case fits on a line. It decides
//! nothing itself. Start with [`decide`].
//!
//! Policies are written as `allow p { from principal=a,b* ns!=x ; to method=GET ; when header:x=1 }
//! { … } | deny q …`. An attribute that the facts do not mention is absent; `attribute=?` is
//! unknown.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use canal_authorization::{
    AttributeValue, AttributeVisibility, Attributes, AuthorizationDecision, PolicySet, name,
};
use canal_model::authorization::{
    AllOf, Attribute, AttributeMatch, Authorization, AuthorizationAction, Clause, PolicyKey,
    PolicyRule, PolicyTarget,
};

pub(crate) fn key(name: &str) -> PolicyKey {
    PolicyKey {
        tenant: "alpha".parse().unwrap(),
        namespace: "default".parse().unwrap(),
        name: name.parse().unwrap(),
    }
}

pub(crate) fn policies(text: &str) -> Vec<Arc<Authorization>> {
    text.split('|')
        .map(str::trim)
        .filter(|p| !p.is_empty())
        .map(|p| Arc::new(policy(p)))
        .collect()
}

fn policy(text: &str) -> Authorization {
    let (head, rules) = text.split_once('{').map_or((text, ""), |(head, rules)| {
        (head, rules.trim().strip_suffix('}').unwrap())
    });
    let mut words = head.split_whitespace();
    let (action, policy_name) = (words.next().unwrap(), words.next().unwrap());
    let rest: Vec<&str> = words.collect();
    let has_rules = text.contains('{');
    let rules = if has_rules {
        rules.split("} {").map(|r| rule(r.trim())).collect()
    } else {
        Vec::new()
    };
    Authorization {
        key: key(policy_name),
        target: PolicyTarget::Tenant,
        action: match action {
            "allow" => AuthorizationAction::Allow,
            "deny" => AuthorizationAction::Deny,
            "audit" => AuthorizationAction::Audit,
            custom => AuthorizationAction::Custom(key(custom.strip_prefix("custom:").unwrap())),
        },
        rules,
        dry_run: rest.contains(&"dry"),
        broken: rest.contains(&"broken").then(|| "it is broken".into()),
    }
}

fn rule(text: &str) -> PolicyRule {
    let mut rule = PolicyRule::default();
    for part in text.split(';').map(str::trim).filter(|p| !p.is_empty()) {
        let (what, clauses) = part.split_once(' ').unwrap();
        let all = clauses_of(clauses);
        match what {
            "from" => rule.from.push(all),
            "to" => rule.to.push(all),
            "when" => rule.when.extend(all),
            other => panic!("{other}"),
        }
    }
    rule
}

fn clauses_of(text: &str) -> AllOf {
    let mut all: BTreeMap<Attribute, Clause> = BTreeMap::new();
    for word in text.split_whitespace() {
        let (name, values, not) = match word.split_once("!=") {
            Some((name, values)) => (name, values, true),
            None => word.split_once('=').map(|(n, v)| (n, v, false)).unwrap(),
        };
        let attribute = attribute(name);
        let matches = values.split(',').map(|v| match_of(&attribute, v));
        let clause = all.entry(attribute.clone()).or_insert_with(|| Clause {
            attribute: attribute.clone(),
            any: vec![],
            none: vec![],
        });
        if not {
            clause.none.extend(matches)
        } else {
            clause.any.extend(matches)
        }
    }
    all.into_values().collect()
}

pub(crate) fn attribute(name: &str) -> Attribute {
    match name {
        "principal" => Attribute::SourcePrincipal,
        "ns" => Attribute::SourceNamespace,
        "account" => Attribute::SourceServiceAccount,
        "ip" => Attribute::SourceAddress,
        "remote" => Attribute::RemoteAddress,
        "user" => Attribute::RequestPrincipal,
        "audience" => Attribute::RequestAudience,
        "presenter" => Attribute::RequestPresenter,
        "host" => Attribute::Host,
        "method" => Attribute::Method,
        "path" => Attribute::Path,
        "port" => Attribute::DestinationPort,
        "to-ip" => Attribute::DestinationAddress,
        "sni" => Attribute::ServerName,
        other => match other.split_once(':') {
            Some(("header", h)) => Attribute::Header(h.into()),
            Some(("claim", c)) => Attribute::RequestClaim(c.split('.').map(Into::into).collect()),
            _ => panic!("attribute {other}"),
        },
    }
}

fn match_of(attribute: &Attribute, value: &str) -> AttributeMatch {
    match attribute {
        Attribute::SourceAddress | Attribute::RemoteAddress | Attribute::DestinationAddress => {
            AttributeMatch::Network(
                value
                    .parse()
                    .or_else(|_| value.parse::<IpAddr>().map(Into::into))
                    .unwrap(),
            )
        }
        Attribute::DestinationPort => AttributeMatch::Port(value.parse().unwrap()),
        _ if value == "*" => AttributeMatch::Present,
        _ if value.contains('{') => AttributeMatch::Template(value.into()),
        _ if value.starts_with('*') => AttributeMatch::Suffix(value[1..].into()),
        _ if value.ends_with('*') => AttributeMatch::Prefix(value[..value.len() - 1].into()),
        _ => AttributeMatch::Exact(value.into()),
    }
}

#[derive(Debug, Default, Clone)]
pub(crate) struct ParsedFacts {
    /// Values by attribute; `None` means that the attribute is unknown.
    pub(crate) values: BTreeMap<Attribute, Option<Vec<String>>>,
    pub(crate) foreign: bool,
}

pub(crate) fn facts(text: &str) -> ParsedFacts {
    let mut given = ParsedFacts::default();
    for word in text.split_whitespace() {
        match word.split_once('=') {
            None => given.foreign = word == "foreign",
            Some((name, "?")) => drop(given.values.insert(attribute(name), None)),
            Some((name, values)) => drop(given.values.insert(
                attribute(name),
                Some(values.split(',').map(Into::into).collect()),
            )),
        }
    }
    given
}

impl Attributes for ParsedFacts {
    fn visit_attribute(
        &self,
        attribute: &Attribute,
        each: &mut dyn FnMut(AttributeValue<'_>) -> bool,
    ) -> AttributeVisibility {
        let Some(values) = self.values.get(attribute) else {
            return AttributeVisibility::Known;
        };
        let Some(values) = values else {
            return AttributeVisibility::Unknown;
        };
        for value in values {
            let stop = match attribute {
                Attribute::SourceAddress
                | Attribute::RemoteAddress
                | Attribute::DestinationAddress => {
                    each(AttributeValue::Address(value.parse().unwrap()))
                }
                Attribute::DestinationPort => each(AttributeValue::Port(value.parse().unwrap())),
                _ => each(AttributeValue::Text(value.as_bytes())),
            };
            if stop {
                break;
            }
        }
        AttributeVisibility::Known
    }
    fn is_foreign(&self) -> bool {
        self.foreign
    }
}

/// Formats a decision: `allow`, `deny p:0`, `deny`, `ask authorizer p`, or `undecided p attribute`.
pub(crate) fn text_of(verdict: AuthorizationDecision<'_>) -> String {
    match verdict {
        AuthorizationDecision::Allow => "allow".into(),
        AuthorizationDecision::Deny {
            policy: Some(p),
            rule: Some(r),
        } => format!("deny {}:{r}", p.name),
        AuthorizationDecision::Deny {
            policy: Some(p),
            rule: None,
        } => format!("deny {}", p.name),
        AuthorizationDecision::Deny { policy: None, .. } => "deny".into(),
        AuthorizationDecision::CallAuthorizer {
            authorizer, policy, ..
        } => format!("ask {} {}", authorizer.name, policy.name),
        AuthorizationDecision::Undecided { policy, attribute } => {
            format!("undecided {} {}", policy.name, name(attribute))
        }
    }
}

pub(crate) fn decide(policies_text: &str, facts_text: &str) -> String {
    let set = PolicySet::new(&policies(policies_text));
    text_of(set.decide(&facts(facts_text)))
}
