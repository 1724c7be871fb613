//! One tenant on all targets. Says where they differ from the oracle, not who is right.

use std::collections::{BTreeMap, BTreeSet};

use canal_compiler::ir::Ir;
use canal_compiler::oracle::{Request, Verdict, decide};
use canal_compiler::{Input, build_ir, compile, lower};
use canal_model::program::RouteKey;

use crate::target::{Gateway, Node, received};

/// See the module.
pub struct Trial {
    pub ir: Ir,
    gateway: Gateway,
    nodes: Vec<Node>,
}

/// How much was compared.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Verdicts of the gateway that were held against the oracle's; a node's, which looks at no request, are not counted.
    pub comparisons: usize,
    /// Those of them that went through an HTTP/1.1 head.
    pub http1: usize,
    /// The oracle's verdicts, by kind.
    pub verdicts: BTreeMap<&'static str, usize>,
}

impl Trial {
    /// `None` without a valid Tenant.
    pub fn of(input: &Input<'_>) -> Option<Self> {
        let ir = build_ir(input).0?;
        let gateway = Gateway::new(&received(&compile(input).resources));
        let names: BTreeSet<_> = ir.workloads.iter().map(|workload| &workload.node).collect();
        let nodes = names.into_iter().map(|name| Node::new(&received(&lower::node(&ir, name)))).collect();
        Some(Self { ir, gateway, nodes })
    }

    /// The oracle's verdict, if all targets agree; else what each says.
    pub fn compare(&self, request: &Request, tally: &mut Tally) -> Result<Verdict, String> {
        let expected = decide(&self.ir, request);
        let differs = |who: &str, verdict: &str| {
            let oracle = shown(&expected);
            Err(format!("{who} says {verdict}, the oracle {oracle}\n{request:?}\noracle: {expected:?}\n{}", self.ir))
        };
        let verdict = self.gateway.decide(request);
        if verdict != expected {
            return differs("the router", &format!("{} ({verdict:?})", shown(&verdict)));
        }
        let over_http1 = self.gateway.decide_http1(request);
        if let Some(verdict) = &over_http1
            && *verdict != expected
        {
            return differs("the router behind HTTP/1.1", &format!("{} ({verdict:?})", shown(verdict)));
        }
        let is_service = expected != Verdict::NoService;
        if self.nodes.iter().any(|node| node.knows(&request.service, request.port) != is_service) {
            return differs("a node", "otherwise whether there is such a service");
        }
        tally.comparisons += 1 + usize::from(over_http1.is_some());
        tally.http1 += usize::from(over_http1.is_some());
        *tally.verdicts.entry(kind(&expected)).or_default() += 1;
        Ok(expected)
    }
}

fn kind(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::NoService => "no service",
        Verdict::Service { .. } => "itself",
        Verdict::Split { .. } => "split",
        Verdict::Refuse { .. } => "refuse",
        Verdict::NoRule => "404",
        Verdict::AmbiguousPath => "400",
    }
}

/// A verdict in a few words, as cases expect it: `OBJECT RULE` for a split.
pub fn shown(verdict: &Verdict) -> String {
    let rule = |key: &RouteKey| format!("{} {}", key.name, key.rule);
    match verdict {
        Verdict::Split { rule: key, .. } => rule(key),
        Verdict::Refuse { rule: key, status, .. } => format!("refuse {status} {}", rule(key)),
        other => kind(other).to_owned(),
    }
}
