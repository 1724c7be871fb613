//! Builds a router: groups matches by host, and puts paths into the index and regexes into
//! automata. Broken matches are left out. The order of the matches comes with the route table.
//! Start with [`Router::build`].

use std::sync::Arc;

use canal_model::program::{HostMatch, HttpMatch, PathMatch, RouteRule};
use canal_model::route_table::RouteTable;
use hashbrown::HashMap;

use crate::broken_match::{BrokenMatch, BrokenMatchKind};
use crate::condition::Conditions;
use crate::host::canonical;
use crate::index::{NodeCandidates, PathIndexBuilder, RANKS_MAX, Rank, TrieNodeId};
use crate::limits::RouterLimits;
use crate::regexes::{AutomatonBudget, ValidatedPattern};
use crate::router::{ANY_PORT, CompiledMatch, HostMatches, NO_CONDITIONS, PathRegexes, Router};

/// One match of one rule that is to be added.
struct Candidate<'a> {
    rule: u32,
    match_index: usize,
    http: &'a HttpMatch,
}

/// Matches of one host, of one suffix or of any host, while the router is built.
struct OpenGroup {
    root: TrieNodeId,
    /// Matches whose path text does not begin with `/`.
    odd: Vec<Rank>,
    patterns: Vec<(Rank, ValidatedPattern)>,
}

impl OpenGroup {
    fn new(index: &mut PathIndexBuilder) -> Self {
        OpenGroup {
            root: index.root(),
            odd: Vec::new(),
            patterns: Vec::new(),
        }
    }

    fn close(self, ends: &[NodeCandidates], regexes: Option<Arc<PathRegexes>>) -> HostMatches {
        HostMatches {
            root: self.root,
            ends: ends[self.root as usize],
            odd: self.odd.into(),
            regexes,
        }
    }

    fn add(
        &mut self,
        index: &mut PathIndexBuilder,
        path: &PathMatch,
        pattern: Option<&ValidatedPattern>,
        rank: Rank,
    ) {
        match path {
            PathMatch::Exact(text) if text.starts_with('/') => {
                index.add_exact(self.root, text, rank)
            }
            PathMatch::ElementPrefix(text) if text.starts_with('/') => {
                index.add_element_prefix(self.root, text, rank)
            }
            PathMatch::StringPrefix(text) if text.starts_with('/') => {
                index.add_string_prefix(self.root, text, rank)
            }
            PathMatch::Regex(_) => self
                .patterns
                .extend(pattern.map(|pattern| (rank, pattern.clone()))),
            _ => self.odd.push(rank),
        }
    }
}

struct RouterBuilder<'a> {
    rules: &'a [Arc<RouteRule>],
    budget: AutomatonBudget<'a>,
    index: PathIndexBuilder,
    any_host: OpenGroup,
    groups: Vec<OpenGroup>,
    has_exact_hosts: bool,
    has_suffix_hosts: bool,
    matches: Vec<CompiledMatch>,
    conditions: Vec<Conditions>,
    faults: Vec<BrokenMatch>,
    broken: HashMap<u32, Box<str>>,
}

impl Router {
    /// Builds the router of one service. Also returns the faults of its rules.
    ///
    /// The rank of a match is its position in the table's order. A broken match matches no request.
    /// Requests that the other matches of its rule match are refused with 500, because the rule no
    /// longer means what its author meant. Other rules are not affected.
    pub fn build(table: &RouteTable, limits: &RouterLimits) -> (Router, Vec<BrokenMatch>) {
        let mut index = PathIndexBuilder::new();
        let mut builder = RouterBuilder {
            rules: table.rules(),
            budget: AutomatonBudget::new(limits),
            any_host: OpenGroup::new(&mut index),
            groups: Vec::new(),
            index,
            has_exact_hosts: false,
            has_suffix_hosts: false,
            matches: Vec::with_capacity(table.order().len()),
            conditions: Vec::new(),
            faults: Vec::new(),
            broken: HashMap::new(),
        };
        for at in table.order() {
            let candidate = Candidate {
                rule: at.rule as u32,
                match_index: at.match_index,
                http: table.entry(*at).1,
            };
            if let Err(kind) = builder.add(&candidate, limits) {
                builder.record_broken_match(candidate.rule, candidate.match_index, kind);
            }
        }
        builder.finish(table.rules().into())
    }
}

impl RouterBuilder<'_> {
    fn record_broken_match(&mut self, rule: u32, place: usize, kind: BrokenMatchKind) {
        let fault = BrokenMatch {
            rule: self.rules[rule as usize].key.clone(),
            match_index: place,
            kind,
        };
        self.broken
            .entry(rule)
            .or_insert_with(|| fault.to_string().into());
        self.faults.push(fault);
    }

    fn add(
        &mut self,
        candidate: &Candidate<'_>,
        limits: &RouterLimits,
    ) -> Result<(), BrokenMatchKind> {
        let max = limits.matches_max.min(RANKS_MAX);
        if self.matches.len() >= max {
            return Err(BrokenMatchKind::TooManyMatches { max });
        }
        let rule = &self.rules[candidate.rule as usize];
        // Everything that can fail comes first, so that a match is added completely or not at all.
        let conditions = Conditions::of(candidate.http, &mut self.budget)?;
        let pattern = match &candidate.http.path {
            PathMatch::Regex(pattern) => Some(self.budget.check("path", pattern)?),
            _ => None,
        };
        let rank = self.matches.len() as Rank;
        let path = &candidate.http.path;
        if rule.hosts.is_empty() {
            self.any_host
                .add(&mut self.index, path, pattern.as_ref(), rank);
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
        let (place, port) = (
            candidate.match_index as u32,
            rule.parent_port.unwrap_or(ANY_PORT),
        );
        self.matches.push(CompiledMatch {
            rule: candidate.rule,
            match_index: place,
            conditions,
            port,
        });
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
        // A host that is named twice must not add a candidate twice.
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    fn finish(mut self, rules: Box<[Arc<RouteRule>]>) -> (Router, Vec<BrokenMatch>) {
        let mut known = HashMap::new();
        let any_patterns = std::mem::take(&mut self.any_host.patterns);
        let any_regexes = self.automaton(&any_patterns, &mut known);
        let open = std::mem::take(&mut self.groups);
        let regexes: Vec<_> = open
            .iter()
            .map(|group| self.automaton(&group.patterns, &mut known))
            .collect();
        let (index, ends) = self.index.finish();
        let router = Router {
            index,
            any_host: self.any_host.close(&ends, any_regexes),
            groups: open
                .into_iter()
                .zip(regexes)
                .map(|(group, regexes)| group.close(&ends, regexes))
                .collect(),
            has_exact_hosts: self.has_exact_hosts,
            has_suffix_hosts: self.has_suffix_hosts,
            matches: self.matches.into(),
            conditions: self.conditions.into(),
            broken: self.broken,
            rules,
        };
        (router, self.faults)
    }

    /// Compiles one automaton from the patterns of a host; hosts with the same patterns share it.
    /// If it is too large as a whole, all these matches are broken.
    fn automaton(
        &mut self,
        patterns: &[(Rank, ValidatedPattern)],
        known: &mut HashMap<Box<[Rank]>, Option<Arc<PathRegexes>>>,
    ) -> Option<Arc<PathRegexes>> {
        let ranks: Box<[Rank]> = patterns.iter().map(|&(rank, _)| rank).collect();
        if let Some(shared) = known.get(&ranks) {
            return shared.clone();
        }
        let made = if patterns.is_empty() {
            None
        } else {
            self.compile_automaton(patterns, ranks.clone())
        };
        known.insert(ranks, made.clone());
        made
    }

    fn compile_automaton(
        &mut self,
        patterns: &[(Rank, ValidatedPattern)],
        ranks: Box<[Rank]>,
    ) -> Option<Arc<PathRegexes>> {
        let Some(automaton) = self
            .budget
            .compile(patterns.iter().map(|(_, checked)| checked))
        else {
            for rank in ranks {
                let CompiledMatch {
                    rule,
                    match_index: place,
                    ..
                } = self.matches[rank as usize];
                let fault = self.budget.overflow("path", "(all of the host)");
                self.record_broken_match(rule, place as usize, fault);
            }
            return None;
        };
        Some(Arc::new(PathRegexes { automaton, ranks }))
    }
}
