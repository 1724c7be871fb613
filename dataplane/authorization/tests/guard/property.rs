//! Properties over random policies and facts. The policy set agrees with a simple evaluator, and a
//! decision made with little knowledge is never contradicted with more knowledge.

use std::sync::Arc;

use canal_authorization::{AuthorizationDecision, PolicySet};
use canal_model::authorization::{
    AllOf, Attribute, AttributeMatch, Authorization, AuthorizationAction, Clause, PolicyRule,
    PolicyTarget,
};
use proptest::prelude::*;

use crate::language::{ParsedFacts, key};

const VALUES: [&str; 4] = ["a/x", "a/y", "b/x", "b"];

fn attribute() -> impl Strategy<Value = Attribute> {
    prop_oneof![
        Just(Attribute::SourcePrincipal),
        Just(Attribute::Method),
        Just(Attribute::Path),
        Just(Attribute::Header("h".into()))
    ]
}

fn matching() -> impl Strategy<Value = AttributeMatch> {
    prop_oneof![
        3 => proptest::sample::select(&VALUES[..]).prop_map(|v| AttributeMatch::Exact(v.into())),
        1 => Just(AttributeMatch::Prefix("a".into())),
        1 => Just(AttributeMatch::Prefix("a/".into())),
        1 => Just(AttributeMatch::Suffix("/x".into())),
        1 => Just(AttributeMatch::Present),
    ]
}

fn clause() -> impl Strategy<Value = Clause> {
    let list = || proptest::collection::vec(matching(), 0..3);
    (attribute(), list(), list())
        .prop_filter("one list is not empty", |(_, a, n)| {
            !a.is_empty() || !n.is_empty()
        })
        .prop_map(|(attribute, any, none)| Clause {
            attribute,
            any,
            none,
        })
}

fn all() -> impl Strategy<Value = AllOf> {
    proptest::collection::vec(clause(), 0..3)
}

fn policy() -> impl Strategy<Value = Authorization> {
    let rule = (
        proptest::collection::vec(all(), 0..3),
        proptest::collection::vec(all(), 0..2),
        all(),
    )
        .prop_map(|(from, to, when)| PolicyRule { from, to, when });
    let action = prop_oneof![
        4 => Just(AuthorizationAction::Allow), 4 => Just(AuthorizationAction::Deny), 1 => Just(AuthorizationAction::Audit),
        1 => Just(AuthorizationAction::Custom(key("y"))), 1 => Just(AuthorizationAction::Custom(key("z"))),
    ];
    (
        action,
        proptest::collection::vec(rule, 0..3),
        prop::bool::weighted(0.1),
        prop::bool::weighted(0.05),
    )
        .prop_map(|(action, rules, dry_run, broken)| Authorization {
            key: key("p"),
            target: PolicyTarget::Tenant,
            action,
            rules,
            dry_run,
            broken: broken.then(|| "broken".into()),
        })
}

fn parsed_facts() -> impl Strategy<Value = ParsedFacts> {
    let values =
        proptest::option::weighted(0.7, proptest::sample::subsequence(VALUES.to_vec(), 0..3));
    (
        proptest::collection::btree_map(attribute(), values, 4),
        prop::bool::weighted(0.2),
    )
        .prop_map(|(values, foreign)| ParsedFacts {
            values: values
                .into_iter()
                .map(|(a, v)| (a, v.map(|v| v.into_iter().map(Into::into).collect())))
                .collect(),
            foreign,
        })
}

/// Kind of a decision, without the names of policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PlainDecision {
    Allow,
    Deny,
    CallAuthorizer,
    Undecided,
}

fn plain(verdict: AuthorizationDecision<'_>) -> PlainDecision {
    match verdict {
        AuthorizationDecision::Allow => PlainDecision::Allow,
        AuthorizationDecision::Deny { .. } => PlainDecision::Deny,
        AuthorizationDecision::CallAuthorizer { .. } => PlainDecision::CallAuthorizer,
        AuthorizationDecision::Undecided { .. } => PlainDecision::Undecided,
    }
}

/// Istio's definitions, implemented literally. `None` stands for an unknown value.
mod naive {
    use super::*;

    fn text(m: &AttributeMatch, value: &str) -> bool {
        match m {
            AttributeMatch::Exact(t) => t == value,
            AttributeMatch::Prefix(t) => value.starts_with(t.as_str()),
            AttributeMatch::Suffix(t) => value.ends_with(t.as_str()),
            AttributeMatch::Present => !value.is_empty(),
            _ => unreachable!("not generated"),
        }
    }

    fn and(each: impl Iterator<Item = Option<bool>>) -> Option<bool> {
        let each: Vec<_> = each.collect();
        if each.contains(&Some(false)) {
            Some(false)
        } else if each.contains(&None) {
            None
        } else {
            Some(true)
        }
    }

    fn or(each: impl Iterator<Item = Option<bool>>) -> Option<bool> {
        and(each.map(|e| e.map(|e| !e))).map(|e| !e)
    }

    fn clause(c: &Clause, given: &ParsedFacts) -> Option<bool> {
        let values = match given.values.get(&c.attribute) {
            None => &Vec::new(),
            Some(known) => known.as_ref()?,
        };
        let one_of =
            |list: &[AttributeMatch]| list.iter().any(|m| values.iter().any(|v| text(m, v)));
        Some((c.any.is_empty() || one_of(&c.any)) && !one_of(&c.none))
    }

    fn names(all: &AllOf) -> bool {
        let whole = |m: &AttributeMatch| {
            matches!(m, AttributeMatch::Exact(_))
                || matches!(m, AttributeMatch::Prefix(p) if p.contains('/'))
        };
        all.iter().any(|c| {
            c.attribute == Attribute::SourcePrincipal
                && !c.any.is_empty()
                && c.any.iter().all(whole)
        })
    }

    fn rule(r: &PolicyRule, given: &ParsedFacts, named: bool) -> Option<bool> {
        let all = |all: &AllOf| and(all.iter().map(|c| clause(c, given)));
        let from: Vec<AllOf> = if r.from.is_empty() {
            vec![vec![]]
        } else {
            r.from.clone()
        };
        let to: Vec<AllOf> = if r.to.is_empty() {
            vec![vec![]]
        } else {
            r.to.clone()
        };
        let from = from.iter().filter(|f| !named || names(f) || names(&r.when));
        and([or(from.map(all)), or(to.iter().map(all)), all(&r.when)].into_iter())
    }

    pub(super) fn decide(policies: &[Arc<Authorization>], given: &ParsedFacts) -> PlainDecision {
        let real = || policies.iter().filter(|p| !p.dry_run);
        if real().any(|p| p.broken.is_some()) {
            return PlainDecision::Deny;
        }
        let matched = |wanted: fn(&AuthorizationAction) -> bool, named| {
            or(real()
                .filter(|p| wanted(&p.action))
                .flat_map(|p| p.rules.iter())
                .map(|r| rule(r, given, named)))
        };
        let custom = matched(|a| matches!(a, AuthorizationAction::Custom(_)), false);
        let deny = matched(|a| *a == AuthorizationAction::Deny, false);
        let allow = if given.foreign || real().any(|p| p.action == AuthorizationAction::Allow) {
            matched(|a| *a == AuthorizationAction::Allow, given.foreign)
        } else {
            Some(true)
        };
        match (custom, deny, allow) {
            (Some(true), ..) => PlainDecision::CallAuthorizer,
            (_, Some(true), _) | (_, _, Some(false)) => PlainDecision::Deny,
            (Some(false), Some(false), Some(true)) => PlainDecision::Allow,
            _ => PlainDecision::Undecided,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_guard_agrees_with_the_definition(policies in proptest::collection::vec(policy().prop_map(Arc::new), 0..5), given in parsed_facts()) {
        let set = PolicySet::new(&policies);
        prop_assert_eq!(plain(set.decide(&given)), naive::decide(&policies, &given));
    }

    /// Checks that the decision of a hop with little knowledge stands once another hop knows the
    /// rest.
    #[test]
    fn more_knowledge_never_contradicts(
        policies in proptest::collection::vec(policy().prop_map(Arc::new), 0..5),
        given in parsed_facts(),
        rest in proptest::collection::vec(proptest::sample::subsequence(VALUES.to_vec(), 0..3), 4),
    ) {
        let mut more = given.clone();
        for (value, rest) in more.values.values_mut().zip(rest) {
            value.get_or_insert_with(|| rest.into_iter().map(Into::into).collect());
        }
        let set = PolicySet::new(&policies);
        let (little, whole) = (plain(set.decide(&given)), plain(set.decide(&more)));
        prop_assert_ne!(whole, PlainDecision::Undecided);
        // A hop may know that a request is denied while another hop must still call an authorizer
        // first.
        let stands = little == PlainDecision::Undecided || little == whole || (little == PlainDecision::Deny && whole == PlainDecision::CallAuthorizer);
        prop_assert!(stands, "{:?} became {:?}", little, whole);
    }
}
