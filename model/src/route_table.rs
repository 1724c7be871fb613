//! The route rules of one service in match order, and their division by clients. The compiler's IR and
//! the gateway's router use this type; no other code orders rules. It does not decide which matches
//! hold. Start at [`RouteTable::new`].

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ids::Namespace;
use crate::program::{HttpMatch, RouteRule};

/// The rules of one service, and the order in which their matches are tried for a request.
///
/// A rule carries the precedence of each of its matches. A table therefore has the same order on
/// both sides of the wire, in whatever order the rules arrive. An index in a list would be wrong as
/// soon as a data plane lacks one rule or holds an older version of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RouteTable {
    rules: Box<[Arc<RouteRule>]>,
    order: Box<[MatchRef]>,
}

/// A match of a rule, by its indexes in [`RouteTable::rules`] and [`RouteRule::matches`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatchRef {
    pub rule: usize,
    pub match_index: usize,
}

/// Rules of a service for the clients of each namespace that has any.
pub type ConsumerRules = BTreeMap<Namespace, Vec<Arc<RouteRule>>>;

/// Returns the rules of a service by the clients to which they apply: those for all clients, and those
/// for the clients of one namespace, which have a table of their own.
pub fn by_consumer(
    rules: impl IntoIterator<Item = Arc<RouteRule>>,
) -> (Vec<Arc<RouteRule>>, ConsumerRules) {
    let (mut of_all, mut of_consumers) = (Vec::new(), ConsumerRules::new());
    for rule in rules {
        match rule.consumer.clone() {
            None => of_all.push(rule),
            Some(consumer) => of_consumers.entry(consumer).or_default().push(rule),
        }
    }
    (of_all, of_consumers)
}

impl RouteTable {
    /// Creates the table of these rules, which belong to one service and are given in any order.
    ///
    /// The match with the smallest precedence comes first. Two matches have equal precedence only
    /// if one object is attached twice to one port; then the order of the rules' keys decides.
    pub fn new(mut rules: Vec<Arc<RouteRule>>) -> Self {
        rules.sort_by(|a, b| a.key.cmp(&b.key));
        let matches = rules.iter().enumerate().flat_map(|(rule, it)| {
            (0..it.matches.len()).map(move |match_index| MatchRef { rule, match_index })
        });
        let mut order: Box<[MatchRef]> = matches.collect();
        order.sort_by_key(|it| (&rules[it.rule].matches[it.match_index].precedence, it.rule));
        Self {
            rules: rules.into(),
            order,
        }
    }

    /// Returns the rules, sorted by key.
    pub fn rules(&self) -> &[Arc<RouteRule>] {
        &self.rules
    }

    /// Returns the matches of all rules in match order.
    pub fn order(&self) -> &[MatchRef] {
        &self.order
    }

    /// Returns the rule and the match that an entry of [`RouteTable::order`] names.
    ///
    /// # Panics
    /// Panics if the entry is of a table with other rules.
    pub fn entry(&self, at: MatchRef) -> (&Arc<RouteRule>, &HttpMatch) {
        let rule = &self.rules[at.rule];
        (rule, &rule.matches[at.match_index])
    }

    /// Iterates over the rules and matches that apply to a port of the service, in match order.
    pub fn on_port(
        &self,
        port: u16,
    ) -> impl Iterator<Item = (&Arc<RouteRule>, &HttpMatch)> + Clone {
        self.order
            .iter()
            .map(|at| self.entry(*at))
            .filter(move |(rule, _)| rule.parent_port.is_none_or(|own| own == port))
    }

    /// Returns whether a rule applies to a port of the service.
    pub fn concerns(&self, port: u16) -> bool {
        self.on_port(port).next().is_some()
    }

    /// Returns the rules, sorted by key.
    pub fn into_rules(self) -> Box<[Arc<RouteRule>]> {
        self.rules
    }
}
