//! Random policies and facts: the guard says what a naive evaluator says, and what it says of less knowledge is never contradicted by more.

use std::sync::Arc;

use canal_guard::{PolicySet, Verdict};
use canal_model::authorization::{Action, All, Attribute, Authorization, Clause, Match, PolicyTarget, Rule};
use proptest::prelude::*;

use crate::language::{Told, key};

const VALUES: [&str; 4] = ["a/x", "a/y", "b/x", "b"];

fn attribute() -> impl Strategy<Value = Attribute> {
    prop_oneof![Just(Attribute::SourcePrincipal), Just(Attribute::Method), Just(Attribute::Path), Just(Attribute::Header("h".into()))]
}

fn matching() -> impl Strategy<Value = Match> {
    prop_oneof![
        3 => proptest::sample::select(&VALUES[..]).prop_map(|v| Match::Exact(v.into())),
        1 => Just(Match::Prefix("a".into())),
        1 => Just(Match::Prefix("a/".into())),
        1 => Just(Match::Suffix("/x".into())),
        1 => Just(Match::Present),
    ]
}

fn clause() -> impl Strategy<Value = Clause> {
    let list = || proptest::collection::vec(matching(), 0..3);
    (attribute(), list(), list())
        .prop_filter("one list is not empty", |(_, a, n)| !a.is_empty() || !n.is_empty())
        .prop_map(|(attribute, any, none)| Clause { attribute, any, none })
}

fn all() -> impl Strategy<Value = All> {
    proptest::collection::vec(clause(), 0..3)
}

fn policy() -> impl Strategy<Value = Authorization> {
    let rule = (proptest::collection::vec(all(), 0..3), proptest::collection::vec(all(), 0..2), all()).prop_map(|(from, to, when)| Rule {
        from,
        to,
        when,
    });
    let action = prop_oneof![
        4 => Just(Action::Allow), 4 => Just(Action::Deny), 1 => Just(Action::Audit),
        1 => Just(Action::Custom(key("y"))), 1 => Just(Action::Custom(key("z"))),
    ];
    (action, proptest::collection::vec(rule, 0..3), prop::bool::weighted(0.1), prop::bool::weighted(0.05)).prop_map(
        |(action, rules, dry_run, broken)| Authorization {
            key: key("p"),
            target: PolicyTarget::Tenant,
            action,
            rules,
            dry_run,
            broken: broken.then(|| "broken".into()),
        },
    )
}

fn told() -> impl Strategy<Value = Told> {
    let values = proptest::option::weighted(0.7, proptest::sample::subsequence(VALUES.to_vec(), 0..3));
    (proptest::collection::btree_map(attribute(), values, 4), prop::bool::weighted(0.2)).prop_map(|(values, foreign)| Told {
        values: values.into_iter().map(|(a, v)| (a, v.map(|v| v.into_iter().map(Into::into).collect()))).collect(),
        foreign,
    })
}

/// What follows, without names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Plain {
    Allow,
    Deny,
    Ask,
    Undecided,
}

fn plain(verdict: Verdict<'_>) -> Plain {
    match verdict {
        Verdict::Allow => Plain::Allow,
        Verdict::Deny { .. } => Plain::Deny,
        Verdict::Ask { .. } => Plain::Ask,
        Verdict::Undecided { .. } => Plain::Undecided,
    }
}

/// Definitions as written, with `None` for what is not known.
mod naive {
    use super::*;

    fn text(m: &Match, value: &str) -> bool {
        match m {
            Match::Exact(t) => t == value,
            Match::Prefix(t) => value.starts_with(t.as_str()),
            Match::Suffix(t) => value.ends_with(t.as_str()),
            Match::Present => !value.is_empty(),
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

    fn clause(c: &Clause, told: &Told) -> Option<bool> {
        let values = match told.values.get(&c.attribute) {
            None => &Vec::new(),
            Some(known) => known.as_ref()?,
        };
        let one_of = |list: &[Match]| list.iter().any(|m| values.iter().any(|v| text(m, v)));
        Some((c.any.is_empty() || one_of(&c.any)) && !one_of(&c.none))
    }

    fn names(all: &All) -> bool {
        let whole = |m: &Match| matches!(m, Match::Exact(_)) || matches!(m, Match::Prefix(p) if p.contains('/'));
        all.iter().any(|c| c.attribute == Attribute::SourcePrincipal && !c.any.is_empty() && c.any.iter().all(whole))
    }

    fn rule(r: &Rule, told: &Told, named: bool) -> Option<bool> {
        let all = |all: &All| and(all.iter().map(|c| clause(c, told)));
        let from: Vec<All> = if r.from.is_empty() { vec![vec![]] } else { r.from.clone() };
        let to: Vec<All> = if r.to.is_empty() { vec![vec![]] } else { r.to.clone() };
        let from = from.iter().filter(|f| !named || names(f) || names(&r.when));
        and([or(from.map(all)), or(to.iter().map(all)), all(&r.when)].into_iter())
    }

    pub(super) fn decide(policies: &[Arc<Authorization>], told: &Told) -> Plain {
        let real = || policies.iter().filter(|p| !p.dry_run);
        if real().any(|p| p.broken.is_some()) {
            return Plain::Deny;
        }
        let matched = |wanted: fn(&Action) -> bool, named| {
            or(real().filter(|p| wanted(&p.action)).flat_map(|p| p.rules.iter()).map(|r| rule(r, told, named)))
        };
        let custom = matched(|a| matches!(a, Action::Custom(_)), false);
        let deny = matched(|a| *a == Action::Deny, false);
        let allow = if told.foreign || real().any(|p| p.action == Action::Allow) {
            matched(|a| *a == Action::Allow, told.foreign)
        } else {
            Some(true)
        };
        match (custom, deny, allow) {
            (Some(true), ..) => Plain::Ask,
            (_, Some(true), _) | (_, _, Some(false)) => Plain::Deny,
            (Some(false), Some(false), Some(true)) => Plain::Allow,
            _ => Plain::Undecided,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_guard_agrees_with_the_definition(policies in proptest::collection::vec(policy().prop_map(Arc::new), 0..5), told in told()) {
        let set = PolicySet::new(&policies);
        prop_assert_eq!(plain(set.decide(&told)), naive::decide(&policies, &told));
    }

    /// Verdicts of a hop that knows little stand when another learns the rest.
    #[test]
    fn more_knowledge_never_contradicts(
        policies in proptest::collection::vec(policy().prop_map(Arc::new), 0..5),
        told in told(),
        rest in proptest::collection::vec(proptest::sample::subsequence(VALUES.to_vec(), 0..3), 4),
    ) {
        let mut more = told.clone();
        for (value, rest) in more.values.values_mut().zip(rest) {
            value.get_or_insert_with(|| rest.into_iter().map(Into::into).collect());
        }
        let set = PolicySet::new(&policies);
        let (little, whole) = (plain(set.decide(&told)), plain(set.decide(&more)));
        prop_assert_ne!(whole, Plain::Undecided);
        // An authorizer may have to be asked before what a hop knows to be denied is denied.
        let stands = little == Plain::Undecided || little == whole || (little == Plain::Deny && whole == Plain::Ask);
        prop_assert!(stands, "{:?} became {:?}", little, whole);
    }
}
