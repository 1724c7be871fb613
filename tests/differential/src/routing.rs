//! One tenant on all targets. Reports where targets differ from the oracle, but does not decide
//! which one is right.

use std::collections::{BTreeMap, BTreeSet};

use canal_compiler::ir::Ir;
use canal_compiler::oracle::{OracleRequest, RoutingVerdict, decide, forwarded, returned};
use canal_compiler::{CompileInput, build_ir, lower};
use canal_model::ids::{AzName, ReplicaName};
use canal_model::program::RouteKey;

use crate::target::{GatewayTarget, NodeTarget, received};

/// One tenant in the oracle and on all targets.
pub struct RoutingComparison {
    pub ir: Ir,
    gateway: GatewayTarget,
    nodes: Vec<NodeTarget>,
}

/// Numbers of comparisons, by kind.
#[derive(Debug, Clone, Default)]
pub struct RoutingTally {
    /// Number of gateway verdicts that were compared with the oracle's. A node's verdicts do not
    /// count, because a node reads no request.
    pub comparisons: usize,
    /// Number of these comparisons that used an HTTP/1.1 head.
    pub http1: usize,
    /// Number of the oracle's verdicts by kind.
    pub verdicts: BTreeMap<&'static str, usize>,
    /// Number of requests to a backend that filters changed.
    pub filtered: usize,
    /// Number of requests to a backend with filters of its own.
    pub backend_filters: usize,
}

impl RoutingComparison {
    /// Compiles the input. Returns `None` without a valid Tenant.
    pub fn of(input: &CompileInput<'_>) -> Option<Self> {
        let ir = build_ir(input).0?;
        let az: AzName = "az1".parse().expect("a name");
        let replica: ReplicaName = "gw-all".parse().expect("a name");
        let placement = lower::placement_on(&ir, &replica, &"b1".parse().expect("a name"));
        let gateway =
            GatewayTarget::new(&received(&lower::gateway(&ir, &replica, &az, &placement)));
        for (key, service) in &ir.services {
            let of_consumers = service.consumers.iter();
            let of_consumers = of_consumers.map(|(namespace, routes)| (Some(namespace), routes));
            for (client, routes) in of_consumers.chain([(None, &service.routes)]) {
                assert_eq!(
                    gateway.routes(key, client),
                    Some(routes),
                    "the rules of {key} and their order are the same on both sides"
                );
            }
        }
        let names: BTreeSet<_> = ir.workloads.iter().map(|workload| &workload.node).collect();
        let nodes = names
            .into_iter()
            .map(|name| NodeTarget::new(&received(&lower::node(&ir, name, &az, &placement))))
            .collect();
        Some(Self { ir, gateway, nodes })
    }

    /// Returns the oracle's verdict if all targets agree, else the verdict of each.
    pub fn compare(
        &self,
        request: &OracleRequest,
        tally: &mut RoutingTally,
    ) -> Result<RoutingVerdict, String> {
        let expected = decide(&self.ir, request);
        let differs = |who: &str, verdict: &str| {
            let oracle = format_verdict(&expected);
            Err(format!(
                "{who} says {verdict}, the oracle {oracle}\n{request:?}\noracle: {expected:?}\n{}",
                self.ir
            ))
        };
        let verdict = self.gateway.decide(request);
        if verdict != expected {
            return differs(
                "the router",
                &format!("{} ({verdict:?})", format_verdict(&verdict)),
            );
        }
        let backends = match &expected {
            RoutingVerdict::Split { backends, .. } => backends.as_slice(),
            // Only a split forwards the request to a backend, where filters can be compared.
            _ => &[],
        };
        for (at, backend) in backends.iter().enumerate() {
            let (actual, wanted) = (
                self.gateway.forwarded(request, at),
                forwarded(&self.ir, request, at),
            );
            if actual != wanted {
                let verdict = format!("forwards {actual:?} to backend {at}, not {wanted:?}");
                return differs("the gateway", &verdict);
            }
            // The request's headers are as good as any for a response.
            let (actual, wanted_headers) = (
                self.gateway.returned(request, at),
                returned(&self.ir, request, at, &request.headers),
            );
            if actual != wanted_headers {
                let verdict = format!("returns {actual:?} of backend {at}, not {wanted_headers:?}");
                return differs("the gateway", &verdict);
            }
            tally.backend_filters += usize::from(backend.filters.is_some());
            // A comparison of filters counts only where filters changed something.
            tally.filtered += usize::from(wanted.is_some_and(|wanted| {
                (wanted.host, wanted.target) != (request.host.clone(), request.target.clone())
                    || wanted.headers.len() != request.headers.len()
            }));
        }
        // HTTP/1.1 has its own parser before the router; some requests cannot be written in it
        // (`None`).
        let over_http1 = self.gateway.decide_http1(request);
        if let Some(verdict) = &over_http1
            && *verdict != expected
        {
            return differs(
                "the router behind HTTP/1.1",
                &format!("{} ({verdict:?})", format_verdict(verdict)),
            );
        }
        // A node only needs to know whether the service exists: the gateway routes its requests.
        let is_service = expected != RoutingVerdict::NoService;
        if self
            .nodes
            .iter()
            .any(|node| node.knows(&request.service, request.port) != is_service)
        {
            return differs("a node", "otherwise whether there is such a service");
        }
        tally.comparisons += 1 + usize::from(over_http1.is_some());
        tally.http1 += usize::from(over_http1.is_some());
        *tally.verdicts.entry(kind(&expected)).or_default() += 1;
        Ok(expected)
    }
}

fn kind(verdict: &RoutingVerdict) -> &'static str {
    match verdict {
        RoutingVerdict::NoService => "no service",
        RoutingVerdict::Service { .. } => "itself",
        RoutingVerdict::Split { .. } => "split",
        RoutingVerdict::Answer { .. } => "answer",
        RoutingVerdict::Refuse { .. } => "refuse",
        RoutingVerdict::NoRule => "404",
    }
}

/// Formats a verdict briefly, as cases expect it: `OBJECT RULE` for a split.
pub fn format_verdict(verdict: &RoutingVerdict) -> String {
    let rule = |key: &RouteKey| format!("{} {}", key.name, key.rule);
    match verdict {
        RoutingVerdict::Split { rule: key, .. } => rule(key),
        RoutingVerdict::Answer { rule: key, answer } => {
            let status = answer.as_ref().map_or(400, |answer| answer.status);
            format!("answer {status} {}", rule(key))
        }
        RoutingVerdict::Refuse {
            rule: key, status, ..
        } => format!("refuse {status} {}", rule(key)),
        other => kind(other).to_owned(),
    }
}
