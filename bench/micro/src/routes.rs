//! Router operations: lookups and rebuilds over sets of rules of several sizes and shapes. Requests
//! visit all rules in random order, so that large sets include the cost of cache misses.

use std::hint::black_box;
use std::sync::Arc;

use canal_model::program::{
    Backend, BackendTarget, HostMatch, HttpMatch, PathMatch, Precedence, RouteAction, RouteKey,
    RouteRule,
};
use canal_model::route_table::RouteTable;
use canal_router::{HostTable, RoutableRequest, Router, RouterLimits};

use crate::BenchOperation;

/// Shape of a set of rules.
#[derive(Debug, Clone, Copy)]
pub struct RuleSet {
    pub name: &'static str,
    pub hosts: usize,
    /// Number of paths per host.
    pub paths: usize,
    pub kind: RuleKind,
}

/// Kind of the rules' matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RuleKind {
    /// Half exact paths, half element prefixes, of four segments.
    Paths,
    /// Istio string prefixes that end inside a segment.
    StringPrefixes,
    Regexes,
}

/// Sets whose memory is measured.
pub const SETS: &[RuleSet] = &[
    RuleSet {
        name: "1 host x 1",
        hosts: 1,
        paths: 1,
        kind: RuleKind::Paths,
    },
    RuleSet {
        name: "1 host x 1k",
        hosts: 1,
        paths: 1_000,
        kind: RuleKind::Paths,
    },
    RuleSet {
        name: "1 host x 10k",
        hosts: 1,
        paths: 10_000,
        kind: RuleKind::Paths,
    },
    RuleSet {
        name: "1 host x 100k",
        hosts: 1,
        paths: 100_000,
        kind: RuleKind::Paths,
    },
    RuleSet {
        name: "10k hosts x 10",
        hosts: 10_000,
        paths: 10,
        kind: RuleKind::Paths,
    },
    RuleSet {
        name: "1 host x 10k string prefixes",
        hosts: 1,
        paths: 10_000,
        kind: RuleKind::StringPrefixes,
    },
    RuleSet {
        name: "1 host x 10",
        hosts: 1,
        paths: 10,
        kind: RuleKind::Paths,
    },
    RuleSet {
        name: "1 host x 20 regexes",
        hosts: 1,
        paths: 20,
        kind: RuleKind::Regexes,
    },
];

/// Number of requests that lookups cycle through.
/// More than the caches of a core hold, so that a lookup of a large set misses them.
const REQUESTS: usize = 1 << 16;

impl RuleSet {
    /// Returns the rules of the generated route table.
    pub fn rules(&self) -> Vec<Arc<RouteRule>> {
        (0..self.hosts * self.paths).map(|i| self.rule(i)).collect()
    }

    fn host(&self, i: usize) -> String {
        format!("svc-{}.tenant.example", i / self.paths)
    }

    fn path(&self, i: usize) -> String {
        let i = i % self.paths;
        format!("/api/v{}/resource-{}/item-{i}", i % 3, i % 97)
    }

    fn rule(&self, i: usize) -> Arc<RouteRule> {
        let path = self.path(i);
        // Half of the paths are exact and half are prefixes, as real tables mix them.
        let path = match self.kind {
            RuleKind::Paths if i.is_multiple_of(2) => PathMatch::Exact(path),
            RuleKind::Paths => PathMatch::ElementPrefix(path),
            RuleKind::StringPrefixes => PathMatch::StringPrefix(path),
            RuleKind::Regexes => PathMatch::Regex(format!("{path}/[a-z]+/[0-9]+")),
        };
        // All rules have the same precedence, as in one HTTPRoute; only their indexes order them.
        let precedence = Precedence {
            class: 0,
            // The values are inverted specificities; only that they are equal matters here.
            specificity: [0, u32::MAX - 30, 1, 0, 0],
            created: 1_790_000_000,
            object: "HTTPRoute/bookinfo/routes".into(),
            indexes: [i as u32, 0],
        };
        let id = |what: &str| {
            what.parse()
                .unwrap_or_else(|_| unreachable!("the fixture's names are valid"))
        };
        Arc::new(RouteRule {
            key: RouteKey {
                tenant: name("tenant"),
                kind: "HTTPRoute".into(),
                namespace: name("bookinfo"),
                name: name("routes"),
                rule: format!("{i}"),
            },
            parent: id("tenant/bookinfo/reviews"),
            parent_port: None,
            consumer: None,
            // A single host means a rule without hosts, which holds for any.
            hosts: if self.hosts == 1 {
                Vec::new()
            } else {
                vec![HostMatch::Exact(self.host(i))]
            },
            matches: vec![HttpMatch {
                precedence,
                path,
                method: None,
                headers: Vec::new(),
                query: Vec::new(),
            }],
            filters: None,
            attempts: None,
            faults: None,
            cors: None,
            mirrors: Vec::new(),
            action: RouteAction::Split(vec![Backend {
                weight: 1,
                filters: None,
                target: BackendTarget::Service {
                    service: id("tenant/bookinfo/reviews"),
                    port: 9080,
                    subset: Default::default(),
                },
            }]),
        })
    }

    /// Appends the host and path of a request that matches rule `i`.
    fn request(&self, i: usize, texts: &mut Vec<u8>) -> BenchRequest {
        let more = match self.kind {
            RuleKind::Paths if i.is_multiple_of(2) => "",
            RuleKind::Paths => "/more",
            RuleKind::StringPrefixes => "",
            RuleKind::Regexes => "/abc/123",
        };
        let start = texts.len();
        texts.extend_from_slice(self.host(i).as_bytes());
        let path = texts.len();
        texts.extend_from_slice(self.path(i).as_bytes());
        texts.extend_from_slice(more.as_bytes());
        BenchRequest {
            start,
            path,
            end: texts.len(),
        }
    }
}

fn name<T: std::str::FromStr>(text: &str) -> T {
    text.parse()
        .unwrap_or_else(|_| unreachable!("the fixture's names are valid"))
}

/// A request's host and path, contiguous in one buffer in the order of the lookups: at a gateway,
/// too, the request is in the cache, and only the routes are not.
struct BenchRequest {
    start: usize,
    path: usize,
    end: usize,
}

struct RequestTexts<'a>(&'a BenchRequest, &'a [u8]);

impl RoutableRequest for RequestTexts<'_> {
    fn host(&self) -> &[u8] {
        &self.1[self.0.start..self.0.path]
    }
    fn path(&self) -> &[u8] {
        &self.1[self.0.path..self.0.end]
    }
    fn method(&self) -> &[u8] {
        b"GET"
    }
    fn query(&self) -> Option<&[u8]> {
        None
    }
    fn header(&self, _: &str, _: &mut dyn FnMut(&[u8])) {}
}

pub(crate) fn operations() -> Vec<BenchOperation> {
    let operation = |name, target_ns, make| BenchOperation {
        name,
        make,
        target_ns,
    };
    vec![
        // The targets in nanoseconds are those of docs/performance.md.
        operation("route, 1 host x 1", Some(200.0), || lookups(&SETS[0])),
        operation("route, 1 host x 1k", Some(200.0), || lookups(&SETS[1])),
        operation("route, 1 host x 10k", Some(200.0), || lookups(&SETS[2])),
        operation("route, 1 host x 100k", Some(200.0), || lookups(&SETS[3])),
        operation("route, 10k hosts x 10", Some(200.0), || lookups(&SETS[4])),
        operation("route, 10k services x 10", Some(200.0), services),
        operation("route, 10k string prefixes", None, || lookups(&SETS[5])),
        operation("route, 20 regexes", None, || lookups(&SETS[7])),
        operation("rebuild a service of 10 rules", None, || rebuild(&SETS[6])),
        operation("rebuild a service of 1k rules", None, || rebuild(&SETS[1])),
        operation("rebuild a service of 100k rules", None, || {
            rebuild(&SETS[3])
        }),
    ]
}

fn lookups(set: &RuleSet) -> Box<dyn FnMut()> {
    let (router, faults) = Router::build(&RouteTable::new(set.rules()), &RouterLimits::DEFAULT);
    assert_eq!(faults, []);
    let count = set.hosts * set.paths;
    let mut texts = Vec::new();
    // A small set needs few requests. Four for each rule is a choice that nobody measured.
    let requests: Vec<BenchRequest> = (0..REQUESTS.min(count * 4))
        // A large odd step visits the rules in an order that no prefetcher predicts.
        .map(|i| set.request(i.wrapping_mul(2_654_435_761) % count, &mut texts))
        .collect();
    assert!(
        requests
            .iter()
            .all(|request| router.find(80, &RequestTexts(request, &texts)).is_some())
    );
    let mut next = 0;
    Box::new(move || {
        let request = RequestTexts(&requests[next], &texts);
        next = if next + 1 == requests.len() {
            0
        } else {
            next + 1
        };
        assert!(black_box(router.find(80, black_box(&request))).is_some());
    })
}

/// Like a listener for many services: a host table, then the service's own router.
fn services() -> Box<dyn FnMut()> {
    const SERVICES: usize = 10_000;
    let set = RuleSet {
        hosts: SERVICES,
        paths: 10,
        ..SETS[0]
    };
    let rules = set.rules();
    let mut table = HostTable::new();
    // The host table has decided already, so the service's own rules hold for any host.
    for (i, rules) in rules.chunks(set.paths).enumerate() {
        let any_host: Vec<_> = rules
            .iter()
            .map(|rule| {
                Arc::new(RouteRule {
                    hosts: Vec::new(),
                    ..RouteRule::clone(rule)
                })
            })
            .collect();
        table.insert(
            &set.host(i * set.paths),
            Router::build(&RouteTable::new(any_host), &RouterLimits::DEFAULT).0,
        );
    }
    let mut texts = Vec::new();
    let requests: Vec<BenchRequest> = (0..REQUESTS)
        // Multiplicative hashing visits rules in a scattered order, so that caches do not hide
        // their memory.
        .map(|i| set.request(i.wrapping_mul(2_654_435_761) % rules.len(), &mut texts))
        .collect();
    let mut next = 0;
    Box::new(move || {
        let request = RequestTexts(&requests[next], &texts);
        next = if next + 1 == requests.len() {
            0
        } else {
            next + 1
        };
        // Rules without a parent port hold for any port, so 80 stands for all.
        let found = table
            .get(request.host())
            .and_then(|router| router.find(80, black_box(&request)));
        assert!(black_box(found).is_some());
    })
}

fn rebuild(set: &RuleSet) -> Box<dyn FnMut()> {
    let rules = set.rules();
    Box::new(move || {
        let (router, _) = Router::build(
            &RouteTable::new(black_box(&rules).clone()),
            &RouterLimits::DEFAULT,
        );
        black_box(router.rule_count());
    })
}
