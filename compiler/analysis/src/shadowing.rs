//! Finds rules and matches that no request reaches, because earlier ones get all of their requests.
//! A rule counts as shadowed only if it is so in every route table that has it.

use std::collections::BTreeMap;
use std::sync::Arc;

use canal_ir::ir::{Ir, ServiceIr};
use canal_ir::ir_ingress::GatewayIr;
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::{Document, ObjectKind};
use canal_model::program::{HttpMatch, RouteRule};
use canal_model::route_table::RouteTable;

use crate::AnalysisDiagnostics;
use crate::coverage::{covers, covers_hosts};

/// A match as its author wrote it. One that is attached several times is in several tables.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct WrittenMatch {
    /// Name of the object, as in the precedence of its matches.
    object: String,
    rule: u32,
    index: u32,
}

impl WrittenMatch {
    fn of(http: &HttpMatch) -> Self {
        let [rule, index] = http.precedence.indexes;
        Self {
            object: http.precedence.object.clone(),
            rule,
            index,
        }
    }
}

/// For each match the earlier one that gets its requests, or `None` if some of them reach it.
type Shadows = BTreeMap<WrittenMatch, Option<WrittenMatch>>;

pub(crate) fn check(documents: &[Arc<Document>], ir: &Ir, report: &mut AnalysisDiagnostics) {
    let mut shadows = Shadows::new();
    for table in ir.services.values().flat_map(ServiceIr::tables) {
        collect(table, &mut shadows, &|outer, inner| {
            covers_hosts(&outer.hosts, &inner.hosts)
        });
    }
    for gateway in &ir.ingress {
        collect(&gateway.routes, &mut shadows, &|outer, inner| {
            is_wherever(gateway, outer, inner)
        });
    }
    for document in documents {
        let key = document.object.key();
        let object = format!("{}/{}/{}", key.kind, key.namespace, key.name);
        report_shadowed(document, &object, &shadows, report);
    }
}

/// Compares each match of a table with those before it.
fn collect(
    table: &RouteTable,
    shadows: &mut Shadows,
    is_wherever: &dyn Fn(&RouteRule, &RouteRule) -> bool,
) {
    let entries: Vec<(&Arc<RouteRule>, &HttpMatch)> =
        table.order().iter().map(|at| table.entry(*at)).collect();
    for (at, (rule, http)) in entries.iter().enumerate() {
        let written = WrittenMatch::of(http);
        let shadow = entries[..at].iter().find(|(earlier, outer)| {
            let is_on_port =
                earlier.parent_port.is_none() || earlier.parent_port == rule.parent_port;
            is_on_port
                && WrittenMatch::of(outer) != written
                && covers(outer, http)
                && is_wherever(earlier, rule)
        });
        let shadow = shadow.map(|(_, outer)| WrittenMatch::of(outer));
        // One table in which requests reach the match is enough.
        let known = shadows.entry(written).or_insert_with(|| shadow.clone());
        if shadow.is_none() {
            *known = None;
        }
    }
}

/// Returns whether the route of `outer` is on every virtual host that has the route of `inner`.
fn is_wherever(gateway: &GatewayIr, outer: &RouteRule, inner: &RouteRule) -> bool {
    let (outer, inner) = (outer.key.route(), inner.key.route());
    let hosts = gateway.listeners.iter().flat_map(|it| &it.virtual_hosts);
    let mut with_inner = hosts.filter(|host| host.routes.contains(&inner)).peekable();
    // No request reaches a route without a host, which has a diagnostic of its own.
    with_inner.peek().is_some() && with_inner.all(|host| host.routes.contains(&outer))
}

/// Reports the shadowed rules of an object, and the shadowed matches of its other rules.
fn report_shadowed(
    document: &Document,
    object: &str,
    shadows: &Shadows,
    report: &mut AnalysisDiagnostics,
) {
    let mut rules: BTreeMap<u32, Vec<(u32, Option<&WrittenMatch>)>> = BTreeMap::new();
    for (written, shadow) in shadows.iter().filter(|(it, _)| it.object == object) {
        let rule = rules.entry(written.rule).or_default();
        rule.push((written.index, shadow.as_ref()));
    }
    let (list, matches) = match document.object.kind() {
        ObjectKind::VirtualService => ("http", "match"),
        _ => ("rules", "matches"),
    };
    for (rule, of_rule) in rules {
        let field = format!("spec.{list}[{rule}]");
        if of_rule.iter().all(|(_, shadow)| shadow.is_some()) {
            let first = of_rule.iter().find_map(|(_, shadow)| *shadow);
            let Some(first) = first else { continue };
            let earlier = name_of(first, object, list);
            let problem = format!("{earlier} gets every request that this rule matches");
            let fix = "put this rule before it, make its matches narrower, or remove this rule";
            report.warn(Code::ShadowedRule, document, field, problem, fix);
            continue;
        }
        for (index, shadow) in of_rule {
            let Some(shadow) = shadow else { continue };
            let earlier = format!(
                "{}.{matches}[{}]",
                name_of(shadow, object, list),
                shadow.index
            );
            let problem = format!("{earlier} gets every request that this match describes");
            let field = format!("{field}.{matches}[{index}]");
            let fix = "remove this match, or make the other one narrower";
            report.warn(Code::ShadowedMatch, document, field, problem, fix);
        }
    }
}

/// Returns the field of a rule, with its object if that is another one.
fn name_of(written: &WrittenMatch, object: &str, list: &str) -> String {
    if written.object == object {
        return format!("spec.{list}[{}]", written.rule);
    }
    let list = if written.object.starts_with("VirtualService/") {
        "http"
    } else {
        "rules"
    };
    let name = written.object.replacen('/', " ", 1);
    format!("spec.{list}[{}] of {name}", written.rule)
}
