//! Making a router: matches into order, hosts into groups, paths into the index, regexes into automata. Broken matches are left out.

use std::sync::Arc;

use canal_model::program::{HostMatch, HttpMatch, PathMatch, RouteRule};
use hashbrown::HashMap;

use crate::condition::Conditions;
use crate::fault::{Fault, FaultKind};
use crate::host::canonical;
use crate::index::{Ends, IndexBuilder, Node, RANKS_MAX, Rank};
use crate::limits::Limits;
use crate::regexes::{Budget, Checked};
use crate::router::{ANY_PORT, Group, Match, NO_CONDITIONS, PathRegexes, Router};

/// One match of one rule, on its way in.
struct Candidate<'a> {
    rule: u32,
    place: usize,
    http: &'a HttpMatch,
}

/// A group in the making.
struct OpenGroup {
    root: Node,
    /// Matches whose text does not begin with `/`.
    odd: Vec<Rank>,
    patterns: Vec<(Rank, Checked)>,
}

impl OpenGroup {
    fn new(index: &mut IndexBuilder) -> Self {
        OpenGroup { root: index.root(), odd: Vec::new(), patterns: Vec::new() }
    }

    fn close(self, ends: &[Ends], regexes: Option<Box<PathRegexes>>) -> Group {
        Group { root: self.root, ends: ends[self.root as usize], odd: self.odd.into(), regexes }
    }

    fn add(&mut self, index: &mut IndexBuilder, path: &PathMatch, pattern: Option<&Checked>, rank: Rank) {
        match path {
            PathMatch::Exact(text) if text.starts_with('/') => index.add_exact(self.root, text, rank),
            PathMatch::ElementPrefix(text) if text.starts_with('/') => index.add_element_prefix(self.root, text, rank),
            PathMatch::StringPrefix(text) if text.starts_with('/') => index.add_string_prefix(self.root, text, rank),
            PathMatch::Regex(_) => self.patterns.extend(pattern.map(|pattern| (rank, pattern.clone()))),
            _ => self.odd.push(rank),
        }
    }
}

struct RouterBuilder<'a> {
    rules: &'a [Arc<RouteRule>],
    budget: Budget<'a>,
    index: IndexBuilder,
    any_host: OpenGroup,
    groups: Vec<OpenGroup>,
    has_exact_hosts: bool,
    has_suffix_hosts: bool,
    matches: Vec<Match>,
    conditions: Vec<Conditions>,
    faults: Vec<Fault>,
    broken: HashMap<u32, Box<str>>,
}

impl Router {
    /// The router of one service, and what was wrong with its rules.
    ///
    /// All matches are ordered by their precedence, equal ones by their rule's key. A faulty match catches nothing; what the other
    /// matches of its rule catch is refused with 500, because the rule no longer means what its writer meant. Other rules are not
    /// touched.
    pub fn build(rules: &[Arc<RouteRule>], limits: &Limits) -> (Router, Vec<Fault>) {
        let mut candidates: Vec<Candidate<'_>> = Vec::with_capacity(rules.len());
        for (i, rule) in rules.iter().enumerate() {
            candidates.extend(rule.matches.iter().enumerate().map(|(place, http)| Candidate { rule: i as u32, place, http }));
        }
        // Equal precedence happens where one object is attached twice: then the keys decide, not the order in which rules arrived.
        let key = |candidate: &Candidate<'_>| &rules[candidate.rule as usize].key;
        candidates.sort_by(|a, b| a.http.precedence.cmp(&b.http.precedence).then_with(|| key(a).cmp(key(b))));
        let mut index = IndexBuilder::new();
        let mut builder = RouterBuilder {
            rules,
            budget: Budget::new(limits),
            any_host: OpenGroup::new(&mut index),
            groups: Vec::new(),
            index,
            has_exact_hosts: false,
            has_suffix_hosts: false,
            matches: Vec::with_capacity(candidates.len()),
            conditions: Vec::new(),
            faults: Vec::new(),
            broken: HashMap::new(),
        };
        for candidate in &candidates {
            if let Err(kind) = builder.add(candidate, limits) {
                builder.blame(candidate.rule, candidate.place, kind);
            }
        }
        builder.finish(rules.into())
    }
}

impl RouterBuilder<'_> {
    fn blame(&mut self, rule: u32, place: usize, kind: FaultKind) {
        let fault = Fault { rule: self.rules[rule as usize].key.clone(), place, kind };
        self.broken.entry(rule).or_insert_with(|| fault.to_string().into());
        self.faults.push(fault);
    }

    fn add(&mut self, candidate: &Candidate<'_>, limits: &Limits) -> Result<(), FaultKind> {
        let max = limits.matches_max.min(RANKS_MAX);
        if self.matches.len() >= max {
            return Err(FaultKind::TooManyMatches { max });
        }
        let rule = &self.rules[candidate.rule as usize];
        // All that can fail comes first: a match is put in as a whole or not at all.
        let conditions = Conditions::of(candidate.http, &mut self.budget)?;
        let pattern = match &candidate.http.path {
            PathMatch::Regex(pattern) => Some(self.budget.check("path", pattern)?),
            _ => None,
        };
        let rank = self.matches.len() as Rank;
        let path = &candidate.http.path;
        if rule.hosts.is_empty() {
            self.any_host.add(&mut self.index, path, pattern.as_ref(), rank);
        }
        for group in self.groups_of(&rule.hosts) {
            self.groups[group as usize].add(&mut self.index, path, pattern.as_ref(), rank);
        }
        let conditions = match conditions {
            None => NO_CONDITIONS,
            Some(conditions) => {
                self.conditions.push(conditions);
                self.conditions.len() as u32 - 1
            }
        };
        let (place, port) = (candidate.place as u32, rule.parent_port.unwrap_or(ANY_PORT));
        self.matches.push(Match { rule: candidate.rule, place, conditions, port });
        Ok(())
    }

    fn groups_of(&mut self, hosts: &[HostMatch]) -> Vec<u32> {
        let mut groups: Vec<u32> = Vec::with_capacity(hosts.len());
        for host in hosts {
            let fresh = self.groups.len() as u32;
            let group = match host {
                HostMatch::Exact(name) => {
                    self.has_exact_hosts = true;
                    self.index.exact_host(&canonical(name.as_bytes()), fresh)
                }
                HostMatch::Suffix(suffix) => {
                    self.has_suffix_hosts = true;
                    self.index.suffix_host(&canonical(suffix.as_bytes()), fresh)
                }
            };
            if group == fresh {
                self.groups.push(OpenGroup::new(&mut self.index));
            }
            groups.push(group);
        }
        // A host named twice must not make a candidate twice.
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    fn finish(mut self, rules: Box<[Arc<RouteRule>]>) -> (Router, Vec<Fault>) {
        let any_patterns = std::mem::take(&mut self.any_host.patterns);
        let any_regexes = self.automaton(&any_patterns);
        let open = std::mem::take(&mut self.groups);
        let regexes: Vec<_> = open.iter().map(|group| self.automaton(&group.patterns)).collect();
        let (index, ends) = self.index.finish();
        let router = Router {
            index,
            any_host: self.any_host.close(&ends, any_regexes),
            groups: open.into_iter().zip(regexes).map(|(group, regexes)| group.close(&ends, regexes)).collect(),
            has_exact_hosts: self.has_exact_hosts,
            has_suffix_hosts: self.has_suffix_hosts,
            matches: self.matches.into(),
            conditions: self.conditions.into(),
            broken: self.broken,
            rules,
        };
        (router, self.faults)
    }

    /// One automaton for the host's patterns; if it does not fit as a whole, all its matches are faulty.
    fn automaton(&mut self, patterns: &[(Rank, Checked)]) -> Option<Box<PathRegexes>> {
        if patterns.is_empty() {
            return None;
        }
        let Some(automaton) = self.budget.compile(patterns.iter().map(|(_, checked)| checked)) else {
            for &(rank, _) in patterns {
                let Match { rule, place, .. } = self.matches[rank as usize];
                let fault = self.budget.overflow("path", "(all of the host)");
                self.blame(rule, place as usize, fault);
            }
            return None;
        };
        Some(Box::new(PathRegexes { automaton, ranks: patterns.iter().map(|&(rank, _)| rank).collect() }))
    }
}
