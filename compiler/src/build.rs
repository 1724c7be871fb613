//! From checked rules to the order in which they are tried, port by port.

use std::collections::BTreeMap;

use canal_model::ids::ServiceKey;
use canal_model::program::{Precedence, RouteRule};

use crate::ir::{Chain, Ir, Link, RuleIr, ServiceIr};
use crate::resolve::Checked;

/// `None` if the tenant may not be sent out.
pub(crate) fn build(checked: Checked) -> Option<Ir> {
    let tenant = checked.tenant?;
    let mut rules: BTreeMap<ServiceKey, Vec<RouteRule>> = BTreeMap::new();
    for rule in checked.rules {
        rules.entry(rule.parent.clone()).or_default().push(rule);
    }
    let services = checked.services.into_iter().map(|(key, service)| {
        let mut own = rules.remove(&key).unwrap_or_default();
        own.sort_by(|a, b| a.key.cmp(&b.key));
        let own: Vec<RuleIr> = own.into_iter().map(rule).collect();
        let chains = service.ports.iter().map(|port| chain(port.port, &own)).collect();
        (key, ServiceIr { service, rules: own, chains })
    });
    Some(Ir {
        tenant,
        gateways: checked.gateways,
        services: services.collect(),
        workloads: checked.workloads,
        nodes: checked.nodes,
        throttles: checked.throttles,
        homes: checked.homes,
        security: checked.security,
    })
}

fn rule(rule: RouteRule) -> RuleIr {
    RuleIr { key: rule.key, port: rule.parent_port, hosts: rule.hosts, matches: rule.matches, action: rule.action }
}

fn chain(port: u16, rules: &[RuleIr]) -> Chain {
    let mut links: Vec<(&Precedence, Link)> = Vec::new();
    for (number, rule) in rules.iter().enumerate().filter(|(_, rule)| rule.port.is_none_or(|own| own == port)) {
        links.extend(rule.matches.iter().enumerate().map(|(place, http)| (&http.precedence, Link { rule: number, place })));
    }
    // Equal precedence happens only where one object is attached twice to one port; the key's order decides.
    links.sort_by_key(|(precedence, link)| (*precedence, link.rule));
    Chain { port, links: links.into_iter().map(|(_, link)| link).collect() }
}
