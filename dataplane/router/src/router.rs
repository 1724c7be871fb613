//! Finding the rule for a request: host groups, one walk down the path, regexes, then the conditions of the candidates in order.

use std::sync::Arc;

use canal_model::program::{Backend, PathMatch, RouteAction, RouteRule};
use hashbrown::HashMap;
use regex_automata::meta::Regex;
use smallvec::SmallVec;

use crate::condition::{Conditions, QueryPairs};
use crate::host::{canonical, suffixes};
use crate::index::{Ends, Index, List, Node, Rank, Reached};
use crate::regexes::matching;
use crate::request::Request;

/// A rule for every port of its service.
pub(crate) const ANY_PORT: u16 = 0;
/// A match with nothing but a path.
pub(crate) const NO_CONDITIONS: u32 = u32::MAX;
/// Status of a rule with a faulty match.
const BROKEN_RULE_STATUS: u16 = 500;
/// No match found yet.
const NONE: Rank = Rank::MAX;

/// One match; its place in the array is its rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Match {
    pub(crate) rule: u32,
    pub(crate) place: u32,
    pub(crate) conditions: u32,
    pub(crate) port: u16,
}

/// The matches of one host, of one suffix, or of any host.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) root: Node,
    pub(crate) ends: Ends,
    pub(crate) odd: Box<[Rank]>,
    pub(crate) regexes: Option<Box<PathRegexes>>,
}

/// All path regexes of a group in one automaton; pattern `i` belongs to `ranks[i]`, ascending.
#[derive(Debug)]
pub(crate) struct PathRegexes {
    pub(crate) automaton: Regex,
    pub(crate) ranks: Box<[Rank]>,
}

/// The rules of one service, ready to be searched.
#[derive(Debug)]
pub struct Router {
    pub(crate) index: Index,
    /// The matches for any host: in nearly every service all of them, so they are not a pointer away.
    pub(crate) any_host: Group,
    /// Those for hosts and suffixes; the index keeps their numbers.
    pub(crate) groups: Box<[Group]>,
    pub(crate) has_exact_hosts: bool,
    pub(crate) has_suffix_hosts: bool,
    pub(crate) matches: Box<[Match]>,
    pub(crate) conditions: Box<[Conditions]>,
    pub(crate) rules: Box<[Arc<RouteRule>]>,
    /// Rules with a faulty match, and the fault's text.
    pub(crate) broken: HashMap<u32, Box<str>>,
}

/// What a search gave. The rule itself is not read before it is asked for: among many rules it is out of the cache, and a caller
/// that keeps its own state by [`Found::index`] may not need it.
#[derive(Debug, Clone, Copy)]
pub struct Found<'a> {
    router: &'a Router,
    /// The rule's place in [`Router::rules`].
    pub index: usize,
    /// Which of the rule's matches held.
    pub place: usize,
}

impl<'a> Found<'a> {
    /// The rule.
    pub fn rule(&self) -> &'a Arc<RouteRule> {
        &self.router.rules[self.index]
    }

    /// What to do with the request.
    pub fn action(&self) -> Action<'a> {
        match (&self.rule().action, self.router.broken.get(&(self.index as u32))) {
            (RouteAction::Refuse { status, reason }, _) => Action::Refuse { status: *status, reason },
            (RouteAction::Split(_), Some(reason)) => Action::Refuse { status: BROKEN_RULE_STATUS, reason },
            (RouteAction::Split(backends), None) => Action::Split(backends),
        }
    }
}

/// What to do with the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action<'a> {
    /// Share out with [`crate::pick`].
    Split(&'a [Backend]),
    /// Fail closed: answer this status and log the reason.
    Refuse { status: u16, reason: &'a str },
}

impl Router {
    /// The rule with the smallest precedence among those that hold for a request to this port of the service.
    pub fn find<R: Request>(&self, port: u16, request: &R) -> Option<Found<'_>> {
        let mut search = Search { router: self, request, path: request.path(), port, query: None, best: NONE };
        search.visit(&self.any_host);
        if self.has_exact_hosts || self.has_suffix_hosts {
            search.visit_hosts();
        }
        let found = self.matches.get(search.best as usize)?;
        Some(Found { router: self, index: found.rule as usize, place: found.place as usize })
    }

    /// Whether a rule for this port asks of the path more than that there is one: then two readings of a path can lead to two places.
    pub fn reads_path(&self, port: u16) -> bool {
        let of_port = self.rules.iter().filter(|rule| rule.parent_port.is_none_or(|own| own == port));
        let reads = |path: &PathMatch| match path {
            PathMatch::ElementPrefix(text) | PathMatch::StringPrefix(text) => !matches!(text.as_str(), "" | "/"),
            PathMatch::Exact(_) | PathMatch::Regex(_) => true,
        };
        of_port.flat_map(|rule| &rule.matches).any(|http| reads(&http.path))
    }

    /// How many rules it holds.
    pub fn rule_count(&self) -> usize {
        self.rules.len()
    }

    /// Its rules, in the order given.
    pub fn rules(&self) -> &[Arc<RouteRule>] {
        &self.rules
    }

    /// Bytes on the heap, without the rules themselves, which are shared.
    pub fn memory_bytes(&self) -> usize {
        let group = |group: &Group| {
            let regexes = |r: &PathRegexes| size_of::<PathRegexes>() + r.automaton.memory_usage() + size_of_val(&*r.ranks);
            size_of_val(&*group.odd) + group.regexes.as_deref().map_or(0, regexes)
        };
        self.index.memory_bytes()
            + size_of_val(&*self.groups)
            + self.groups.iter().chain([&self.any_host]).map(group).sum::<usize>()
            + size_of_val(&*self.matches)
            + size_of_val(&*self.conditions)
            + self.conditions.iter().map(Conditions::memory_bytes).sum::<usize>()
            + size_of_val(&*self.rules)
            + self.broken.allocation_size()
    }
}

/// One search. Lists are in order of rank, so each is read only while it can still win.
struct Search<'a, R> {
    router: &'a Router,
    request: &'a R,
    path: &'a [u8],
    port: u16,
    query: Option<QueryPairs<'a>>,
    best: Rank,
}

impl<'a, R: Request> Search<'a, R> {
    fn visit_hosts(&mut self) {
        let router = self.router;
        let host = canonical(self.request.host());
        if router.has_exact_hosts
            && let Some(group) = router.index.exact_host(&host)
        {
            self.visit(&router.groups[group as usize]);
        }
        if router.has_suffix_hosts {
            for suffix in suffixes(&host) {
                if let Some(group) = router.index.suffix_host(suffix) {
                    self.visit(&router.groups[group as usize]);
                }
            }
        }
    }

    fn visit(&mut self, group: &'a Group) {
        if let [b'/', rest @ ..] = self.path {
            self.walk(Reached { node: group.root, ends: &group.ends }, rest);
        }
        for &rank in &group.odd {
            if self.is_odd_match(rank) {
                self.offer(&[rank]);
            }
        }
        if let Some(regexes) = &group.regexes
            && regexes.ranks.first().is_some_and(|&first| first < self.best)
        {
            for pattern in matching(&regexes.automaton, self.path).iter() {
                self.offer(&[regexes.ranks[pattern.as_usize()]]);
            }
        }
    }

    /// Down the path as far as the trie goes, then back up: the deepest candidates are the likely winners.
    fn walk(&mut self, root: Reached<'a>, mut rest: &'a [u8]) {
        let index = &self.router.index;
        let mut trail: SmallVec<[(Reached<'_>, &[u8]); 8]> = SmallVec::new();
        let mut reached = root;
        loop {
            trail.push((reached, rest));
            let len = memchr::memchr(b'/', rest).unwrap_or(rest.len());
            match index.child(reached.node, &rest[..len]) {
                None => break,
                Some(last) if len == rest.len() => {
                    self.offer(index.candidates(last.ends, List::Exact));
                    self.offer(index.candidates(last.ends, List::Prefix));
                    break;
                }
                Some(child) => {
                    reached = child;
                    rest = &rest[len + 1..];
                }
            }
        }
        for (reached, rest) in trail.into_iter().rev() {
            for ends in index.inside(reached, rest) {
                self.offer(index.candidates(ends, List::Prefix));
            }
            self.offer(index.candidates(reached.ends, List::Prefix));
        }
    }

    /// Takes the first of `ranks` that holds and beats the best so far.
    #[inline]
    fn offer(&mut self, ranks: &[Rank]) {
        for &rank in ranks {
            if rank >= self.best {
                return;
            }
            let candidate = self.router.matches[rank as usize];
            let holds = (candidate.port == ANY_PORT || candidate.port == self.port)
                && (candidate.conditions == NO_CONDITIONS
                    || self.router.conditions[candidate.conditions as usize].hold(self.request, &mut self.query));
            if holds {
                self.best = rank;
                return;
            }
        }
    }

    fn is_odd_match(&self, rank: Rank) -> bool {
        let Match { rule, place, .. } = self.router.matches[rank as usize];
        match &self.router.rules[rule as usize].matches[place as usize].path {
            PathMatch::Exact(text) => text.as_bytes() == self.path,
            PathMatch::StringPrefix(text) => self.path.starts_with(text.as_bytes()),
            // Elements begin with `/`; without it there is nothing to compare.
            PathMatch::ElementPrefix(_) | PathMatch::Regex(_) => false,
        }
    }
}
