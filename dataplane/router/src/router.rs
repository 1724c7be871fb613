//! Finds the rule for a request: host groups, one walk along the path, regexes, then the conditions
//! of the candidates in order. `build` makes the table. Start with [`Router::find`].

use std::sync::Arc;

use canal_model::client_attributes::is_client_attribute;
use canal_model::program::{Backend, PathMatch, RouteAction, RouteRule};
use canal_model::route_filters::RouteAnswer;
use hashbrown::{HashMap, HashSet};
use smallvec::SmallVec;

use crate::condition::{Conditions, QueryPairs};
use crate::host::{canonical, suffixes};
use crate::index::{CandidateList, NodeCandidates, PathIndex, Rank, ReachedNode, TrieNodeId};
use crate::regexes::{Automaton, RegexWork};
use crate::request::RoutableRequest;

/// Port of a rule that applies to every port of its service.
pub(crate) const ANY_PORT: u16 = 0;
/// Index of the conditions of a match that has only a path.
pub(crate) const NO_CONDITIONS: u32 = u32::MAX;
/// Status for requests of a rule that has a broken match. The client made no
/// mistake, and a retry would not help, so it is neither a 4xx nor 503.
const BROKEN_RULE_STATUS: u16 = 500;
/// Reason of the refusal of a request for which regexes could take too long.
const REGEX_WORK_REASON: &str = "the regular expressions of the service could take too long for the request; shorten them, or the text that they match";
/// Rank of a search that has found no match yet.
const NONE: Rank = Rank::MAX;

/// One match. Its index in `Router::matches` is its rank.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CompiledMatch {
    pub(crate) rule: u32,
    pub(crate) match_index: u32,
    pub(crate) conditions: u32,
    pub(crate) port: u16,
}

/// Matches of one host, of one suffix, or of any host.
#[derive(Debug)]
pub(crate) struct HostMatches {
    pub(crate) root: TrieNodeId,
    /// Candidates at the root itself, to which no entry of the index leads.
    pub(crate) ends: NodeCandidates,
    /// Matches whose path text does not begin with `/`, so that the index cannot contain them.
    pub(crate) odd: Box<[Rank]>,
    /// Hosts with the same path regexes share them.
    pub(crate) regexes: Option<Arc<PathRegexes>>,
}

/// All path regexes of a host group in one automaton. Pattern `i` belongs to `ranks[i]`; ranks are
/// ascending.
#[derive(Debug)]
pub(crate) struct PathRegexes {
    pub(crate) automaton: Automaton,
    pub(crate) ranks: Box<[Rank]>,
}

/// Rules of one service, compiled for searches.
#[derive(Debug)]
pub struct Router {
    pub(crate) index: PathIndex,
    /// Matches for any host. They are stored inline because in nearly every service these are all
    /// matches.
    pub(crate) any_host: HostMatches,
    /// Matches for exact hosts and for suffixes. The index maps a host to a position in this list.
    pub(crate) groups: Box<[HostMatches]>,
    pub(crate) has_exact_hosts: bool,
    pub(crate) has_suffix_hosts: bool,
    pub(crate) matches: Box<[CompiledMatch]>,
    pub(crate) conditions: Box<[Conditions]>,
    pub(crate) rules: Box<[Arc<RouteRule>]>,
    /// Rules with a broken match, and the text of the fault.
    pub(crate) broken: HashMap<u32, Box<str>>,
}

/// Result of a search. The rule itself is read only on demand: with many rules it is not in the
/// cache, and a caller with its own state per [`RouteMatch::index`] may not need it.
#[derive(Debug, Clone, Copy)]
pub struct RouteMatch<'a> {
    router: &'a Router,
    /// Index of the rule in [`Router::rules`].
    pub index: usize,
    /// Index of the match within the rule.
    pub match_index: usize,
    /// True if the match was not decided, because its regexes could take too long.
    is_undecided: bool,
}

impl<'a> RouteMatch<'a> {
    /// Returns the rule that won.
    pub fn rule(&self) -> &'a Arc<RouteRule> {
        &self.router.rules[self.index]
    }

    /// Returns the decision for the request.
    pub fn action(&self) -> RouteDecision<'a> {
        // A wider rule must not take the request.
        if self.is_undecided {
            return RouteDecision::Refuse {
                status: BROKEN_RULE_STATUS,
                reason: REGEX_WORK_REASON,
            };
        }
        match (
            &self.rule().action,
            self.router.broken.get(&(self.index as u32)),
        ) {
            (RouteAction::Refuse { status, reason }, _) => RouteDecision::Refuse {
                status: *status,
                reason,
            },
            (RouteAction::Answer(_) | RouteAction::Split(_), Some(reason)) => {
                RouteDecision::Refuse {
                    status: BROKEN_RULE_STATUS,
                    reason,
                }
            }
            (RouteAction::Answer(answer), None) => RouteDecision::Answer(answer),
            (RouteAction::Split(backends), None) => RouteDecision::Split(backends),
        }
    }
}

/// Decision for a request that matched a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteDecision<'a> {
    /// Choose a backend with [`crate::pick`].
    Split(&'a [Backend]),
    /// Answer the request.
    Answer(&'a RouteAnswer),
    /// Fail closed: respond with this status and log the reason.
    Refuse { status: u16, reason: &'a str },
}

impl Router {
    /// Finds the match with the smallest precedence among those that hold for a request to this
    /// port of the service.
    pub fn find<R: RoutableRequest>(&self, port: u16, request: &R) -> Option<RouteMatch<'_>> {
        let mut search = RouteSearch {
            router: self,
            request,
            path: request.path(),
            port,
            query: None,
            best: NONE,
            work: RegexWork::new(),
            undecided: None,
        };
        search.visit(&self.any_host);
        // The host is folded to lower case only if a rule names a host.
        if self.has_exact_hosts || self.has_suffix_hosts {
            search.visit_hosts();
        }
        let rank = search.undecided.unwrap_or(search.best);
        let found = self.matches.get(rank as usize)?;
        Some(RouteMatch {
            router: self,
            index: found.rule as usize,
            match_index: found.match_index as usize,
            is_undecided: search.undecided.is_some(),
        })
    }

    /// Returns true if a rule for this port requires more of the path than that it exists. Then two
    /// interpretations of a path can lead to two rules, so the caller must normalize it.
    pub fn reads_path(&self, port: u16) -> bool {
        let of_port = self
            .rules
            .iter()
            .filter(|rule| rule.parent_port.is_none_or(|own| own == port));
        let reads = |path: &PathMatch| match path {
            PathMatch::ElementPrefix(text) | PathMatch::StringPrefix(text) => {
                !matches!(text.as_str(), "" | "/")
            }
            PathMatch::Exact(_) | PathMatch::Regex(_) => true,
        };
        of_port
            .flat_map(|rule| &rule.matches)
            .any(|http| reads(&http.path))
    }

    /// Returns true if a rule for this port depends on an attribute of the client
    /// ([`RoutableRequest::client_attribute`]).
    pub fn reads_client(&self, port: u16) -> bool {
        let rules = self.rules.iter();
        let of_port = rules.filter(|rule| rule.parent_port.is_none_or(|own| own == port));
        let mut conditions = of_port
            .flat_map(|rule| &rule.matches)
            .flat_map(|http| &http.headers);
        conditions.any(|condition| is_client_attribute(&condition.name))
    }

    /// Returns the number of rules.
    pub fn rule_count(&self) -> usize {
        self.rules.len()
    }

    /// Returns the rules, sorted by key.
    pub fn rules(&self) -> &[Arc<RouteRule>] {
        &self.rules
    }

    /// Returns the bytes on the heap, without the rules themselves, because they are shared.
    pub fn memory_bytes(&self) -> usize {
        let mut counted = HashSet::new();
        let group = |group: &HostMatches| {
            let regexes = |r: &PathRegexes| {
                size_of::<PathRegexes>() + r.automaton.memory_usage() + size_of_val(&*r.ranks)
            };
            let own = group
                .regexes
                .as_ref()
                .filter(|shared| counted.insert(Arc::as_ptr(shared)));
            size_of_val(&*group.odd) + own.map_or(0, |own| regexes(own))
        };
        self.index.memory_bytes()
            + size_of_val(&*self.groups)
            + self
                .groups
                .iter()
                .chain([&self.any_host])
                .map(group)
                .sum::<usize>()
            + size_of_val(&*self.matches)
            + size_of_val(&*self.conditions)
            + self
                .conditions
                .iter()
                .map(Conditions::memory_bytes)
                .sum::<usize>()
            + size_of_val(&*self.rules)
            + self.broken.allocation_size()
    }
}

/// State of one search. Lists are in order of rank, so each is read only as long as it can still
/// win.
struct RouteSearch<'a, R> {
    router: &'a Router,
    request: &'a R,
    path: &'a [u8],
    port: u16,
    query: Option<QueryPairs<'a>>,
    best: Rank,
    work: RegexWork,
    /// The first match whose regexes exceeded the work. It would have beaten the best one, so the
    /// search ends.
    undecided: Option<Rank>,
}

impl<'a, R: RoutableRequest> RouteSearch<'a, R> {
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

    fn visit(&mut self, group: &'a HostMatches) {
        if let [b'/', rest @ ..] = self.path {
            self.walk(
                ReachedNode {
                    node: group.root,
                    ends: &group.ends,
                },
                rest,
            );
        }
        for &rank in &group.odd {
            if self.is_odd_match(rank) {
                self.offer(&[rank]);
            }
        }
        if let Some(regexes) = &group.regexes
            && regexes
                .ranks
                .first()
                .is_some_and(|&first| first < self.best)
        {
            let matching = regexes.automaton.matching(self.path, &self.work);
            if self.work.is_exceeded() {
                self.undecided = self.undecided.or(regexes.ranks.first().copied());
                return;
            }
            for pattern in matching.iter() {
                self.offer(&[regexes.ranks[pattern.as_usize()]]);
            }
        }
    }

    /// Walks down the path as far as the trie goes, then back up. The deepest candidates come
    /// first, because they are the likely winners.
    fn walk(&mut self, root: ReachedNode<'a>, mut rest: &'a [u8]) {
        let index = &self.router.index;
        let mut trail: SmallVec<[(ReachedNode<'_>, &[u8]); 8]> = SmallVec::new();
        let mut reached = root;
        loop {
            trail.push((reached, rest));
            let len = memchr::memchr(b'/', rest).unwrap_or(rest.len());
            match index.child(reached.node, &rest[..len]) {
                None => break,
                Some(last) if len == rest.len() => {
                    self.offer(index.candidates(last.ends, CandidateList::Exact));
                    self.offer(index.candidates(last.ends, CandidateList::Prefix));
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
                self.offer(index.candidates(ends, CandidateList::Prefix));
            }
            self.offer(index.candidates(reached.ends, CandidateList::Prefix));
        }
    }

    /// Records the first of `ranks` that holds and beats the best one so far.
    #[inline]
    fn offer(&mut self, ranks: &[Rank]) {
        for &rank in ranks {
            if rank >= self.best || self.undecided.is_some() {
                return;
            }
            let candidate = self.router.matches[rank as usize];
            let holds = (candidate.port == ANY_PORT || candidate.port == self.port)
                && (candidate.conditions == NO_CONDITIONS
                    || self.router.conditions[candidate.conditions as usize].hold(
                        self.request,
                        &mut self.query,
                        &self.work,
                    ));
            if self.work.is_exceeded() {
                self.undecided = Some(rank);
                return;
            }
            if holds {
                self.best = rank;
                return;
            }
        }
    }

    fn is_odd_match(&self, rank: Rank) -> bool {
        let CompiledMatch {
            rule,
            match_index: place,
            ..
        } = self.router.matches[rank as usize];
        match &self.router.rules[rule as usize].matches[place as usize].path {
            PathMatch::Exact(text) => text.as_bytes() == self.path,
            PathMatch::StringPrefix(text) => self.path.starts_with(text.as_bytes()),
            // Elements begin with `/`, so an element prefix without one matches nothing. Regexes
            // are never in this list.
            PathMatch::ElementPrefix(_) | PathMatch::Regex(_) => false,
        }
    }
}
