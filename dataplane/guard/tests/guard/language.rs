//! A short language for policies, facts and verdicts, so that cases fit on a line. It decides nothing.
//!
//! `allow p { from principal=a,b* ns!=x ; to method=GET ; when header:x=1 } { … } | deny q …`. Attributes of facts are absent unless said;
//! `attribute=?` is unknown.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use canal_guard::{Facts, PolicySet, Sight, Value, Verdict, name};
use canal_model::authorization::{Action, All, Attribute, Authorization, Clause, Match, PolicyKey, PolicyTarget, Rule};

pub(crate) fn key(name: &str) -> PolicyKey {
    PolicyKey { tenant: "alpha".parse().unwrap(), namespace: "default".parse().unwrap(), name: name.parse().unwrap() }
}

pub(crate) fn policies(text: &str) -> Vec<Arc<Authorization>> {
    text.split('|').map(str::trim).filter(|p| !p.is_empty()).map(|p| Arc::new(policy(p))).collect()
}

fn policy(text: &str) -> Authorization {
    let (head, rules) = text.split_once('{').map_or((text, ""), |(head, rules)| (head, rules.trim().strip_suffix('}').unwrap()));
    let mut words = head.split_whitespace();
    let (action, policy_name) = (words.next().unwrap(), words.next().unwrap());
    let rest: Vec<&str> = words.collect();
    let has_rules = text.contains('{');
    let rules = if has_rules { rules.split("} {").map(|r| rule(r.trim())).collect() } else { Vec::new() };
    Authorization {
        key: key(policy_name),
        target: PolicyTarget::Tenant,
        action: match action {
            "allow" => Action::Allow,
            "deny" => Action::Deny,
            "audit" => Action::Audit,
            custom => Action::Custom(key(custom.strip_prefix("custom:").unwrap())),
        },
        rules,
        dry_run: rest.contains(&"dry"),
        broken: rest.contains(&"broken").then(|| "it is broken".into()),
    }
}

fn rule(text: &str) -> Rule {
    let mut rule = Rule::default();
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

fn clauses_of(text: &str) -> All {
    let mut all: BTreeMap<Attribute, Clause> = BTreeMap::new();
    for word in text.split_whitespace() {
        let (name, values, not) = match word.split_once("!=") {
            Some((name, values)) => (name, values, true),
            None => word.split_once('=').map(|(n, v)| (n, v, false)).unwrap(),
        };
        let attribute = attribute(name);
        let matches = values.split(',').map(|v| match_of(&attribute, v));
        let clause = all.entry(attribute.clone()).or_insert_with(|| Clause { attribute: attribute.clone(), any: vec![], none: vec![] });
        if not { clause.none.extend(matches) } else { clause.any.extend(matches) }
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

fn match_of(attribute: &Attribute, value: &str) -> Match {
    match attribute {
        Attribute::SourceAddress | Attribute::RemoteAddress | Attribute::DestinationAddress => {
            Match::Network(value.parse().or_else(|_| value.parse::<IpAddr>().map(Into::into)).unwrap())
        }
        Attribute::DestinationPort => Match::Port(value.parse().unwrap()),
        _ if value == "*" => Match::Present,
        _ if value.contains('{') => Match::Template(value.into()),
        _ if value.starts_with('*') => Match::Suffix(value[1..].into()),
        _ if value.ends_with('*') => Match::Prefix(value[..value.len() - 1].into()),
        _ => Match::Exact(value.into()),
    }
}

#[derive(Debug, Default, Clone)]
pub(crate) struct Told {
    /// `None`: unknown.
    pub(crate) values: BTreeMap<Attribute, Option<Vec<String>>>,
    pub(crate) foreign: bool,
}

pub(crate) fn facts(text: &str) -> Told {
    let mut told = Told::default();
    for word in text.split_whitespace() {
        match word.split_once('=') {
            None => told.foreign = word == "foreign",
            Some((name, "?")) => drop(told.values.insert(attribute(name), None)),
            Some((name, values)) => drop(told.values.insert(attribute(name), Some(values.split(',').map(Into::into).collect()))),
        }
    }
    told
}

impl Facts for Told {
    fn look(&self, attribute: &Attribute, each: &mut dyn FnMut(Value<'_>) -> bool) -> Sight {
        let Some(values) = self.values.get(attribute) else { return Sight::Known };
        let Some(values) = values else { return Sight::Unknown };
        for value in values {
            let stop = match attribute {
                Attribute::SourceAddress | Attribute::RemoteAddress | Attribute::DestinationAddress => {
                    each(Value::Address(value.parse().unwrap()))
                }
                Attribute::DestinationPort => each(Value::Port(value.parse().unwrap())),
                _ => each(Value::Text(value.as_bytes())),
            };
            if stop {
                break;
            }
        }
        Sight::Known
    }
    fn is_foreign(&self) -> bool {
        self.foreign
    }
}

/// `allow`, `deny p:0`, `deny`, `ask authorizer p`, `undecided p attribute`.
pub(crate) fn said(verdict: Verdict<'_>) -> String {
    match verdict {
        Verdict::Allow => "allow".into(),
        Verdict::Deny { policy: Some(p), rule: Some(r) } => format!("deny {}:{r}", p.name),
        Verdict::Deny { policy: Some(p), rule: None } => format!("deny {}", p.name),
        Verdict::Deny { policy: None, .. } => "deny".into(),
        Verdict::Ask { authorizer, policy, .. } => format!("ask {} {}", authorizer.name, policy.name),
        Verdict::Undecided { policy, attribute } => format!("undecided {} {}", policy.name, name(attribute)),
    }
}

pub(crate) fn decide(policies_text: &str, facts_text: &str) -> String {
    let set = PolicySet::new(&policies(policies_text));
    said(set.decide(&facts(facts_text)))
}
