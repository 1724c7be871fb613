//! Making a router: matches into order, hosts into groups, paths into the index, regexes into automata. Broken matches are left out.

use std::sync::Arc;

use canal_model::program::{HostMatch, HttpMatch, PathMatch, RouteRule};
use hashbrown::HashMap;

use crate::condition::Conditions;
use crate::fault::{Fault, FaultKind};
use crate::host::canonical;
use crate::index::{IndexBuilder, Node, Rank};
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

struct RouterBuilder<'a> {
    rules: &'a [Arc<RouteRule>],
    budget: Budget<'a>,
    index: IndexBuilder,
    groups: Vec<OpenGroup>,
    any_host: Option<u32>,
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
    /// All matches are ordered by their precedence. A faulty match catches nothing; what the other matches of its rule catch is
    /// refused with 500, because the rule no longer means what its writer meant. Other rules are not touched.
    pub fn build(rules: impl IntoIterator<Item = Arc<RouteRule>>, limits: &Limits) -> (Router, Vec<Fault>) {
        let rules: Box<[Arc<RouteRule>]> = rules.into_iter().collect();
        let mut candidates: Vec<Candidate<'_>> = Vec::with_capacity(rules.len());
        for (i, rule) in rules.iter().enumerate() {
            candidates.extend(rule.matches.iter().enumerate().map(|(place, http)| Candidate { rule: i as u32, place, http }));
        }
        candidates.sort_by(|a, b| a.http.precedence.cmp(&b.http.precedence));
        let mut builder = RouterBuilder {
            rules: &rules,
            budget: Budget::new(limits),
            index: IndexBuilder::new(),
            groups: Vec::new(),
            any_host: None,
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
        builder.finish(rules.clone())
    }
}

impl RouterBuilder<'_> {
    fn blame(&mut self, rule: u32, place: usize, kind: FaultKind) {
        let fault = Fault { rule: self.rules[rule as usize].key.clone(), place, kind };
        self.broken.entry(rule).or_insert_with(|| fault.to_string().into());
        self.faults.push(fault);
    }

    fn add(&mut self, candidate: &Candidate<'_>, limits: &Limits) -> Result<(), FaultKind> {
        if self.matches.len() >= limits.matches_max {
            return Err(FaultKind::TooManyMatches { max: limits.matches_max });
        }
        let rule = &self.rules[candidate.rule as usize];
        // All that can fail comes first: a match is put in as a whole or not at all.
        let conditions = Conditions::of(candidate.http, &mut self.budget)?;
        let pattern = match &candidate.http.path {
            PathMatch::Regex(pattern) => Some(self.budget.check("path", pattern)?),
            _ => None,
        };
        let rank = self.matches.len() as Rank;
        for group in self.groups_of(&rule.hosts) {
            match &pattern {
                Some(pattern) => self.groups[group as usize].patterns.push((rank, pattern.clone())),
                None => self.add_path(group, &candidate.http.path, rank),
            }
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
        if hosts.is_empty() {
            let fresh = self.groups.len() as u32;
            let group = *self.any_host.get_or_insert(fresh);
            return vec![self.open(group)];
        }
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
            groups.push(self.open(group));
        }
        // A host named twice must not make a candidate twice.
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    /// Makes the group if its number is the next one.
    fn open(&mut self, group: u32) -> u32 {
        if group as usize == self.groups.len() {
            let root = self.index.root();
            self.groups.push(OpenGroup { root, odd: Vec::new(), patterns: Vec::new() });
        }
        group
    }

    fn add_path(&mut self, group: u32, path: &PathMatch, rank: Rank) {
        let group = &mut self.groups[group as usize];
        match path {
            PathMatch::Exact(text) if text.starts_with('/') => self.index.add_exact(group.root, text, rank),
            PathMatch::ElementPrefix(text) if text.starts_with('/') => self.index.add_element_prefix(group.root, text, rank),
            PathMatch::StringPrefix(text) if text.starts_with('/') => self.index.add_string_prefix(group.root, text, rank),
            _ => group.odd.push(rank),
        }
    }

    fn finish(mut self, rules: Box<[Arc<RouteRule>]>) -> (Router, Vec<Fault>) {
        let mut groups = Vec::with_capacity(self.groups.len());
        for open in std::mem::take(&mut self.groups) {
            let regexes = self.automaton(open.patterns);
            groups.push(Group { root: open.root, odd: open.odd.into(), regexes });
        }
        let router = Router {
            index: self.index.finish(),
            groups: groups.into(),
            any_host: self.any_host,
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
    fn automaton(&mut self, patterns: Vec<(Rank, Checked)>) -> Option<Box<PathRegexes>> {
        if patterns.is_empty() {
            return None;
        }
        let (ranks, checked): (Vec<Rank>, Vec<Checked>) = patterns.into_iter().unzip();
        let Some(automaton) = self.budget.compile(&checked) else {
            for rank in ranks {
                let Match { rule, place, .. } = self.matches[rank as usize];
                let fault = self.budget.overflow("path", "(all of the host)");
                self.blame(rule, place as usize, fault);
            }
            return None;
        };
        Some(Box::new(PathRegexes { automaton, ranks: ranks.into() }))
    }
}
