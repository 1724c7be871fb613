//! Finds regular expressions that take much of the memory which the rules of a Service may use.

use std::sync::Arc;

use canal_ir::ir::{Ir, ServiceIr};
use canal_ir::limits::REGEXES_PER_SERVICE_BYTES_MAX;
use canal_ir::pattern;
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::{Document, ObjectKind};
use canal_model::program::{HttpMatch, PathMatch};

use crate::AnalysisDiagnostics;

/// An expression is costly if fewer than this number of its size fit on a Service.
/// So one of more than 48 KiB is reported. Nobody measured this value.
const FITTING_MIN: usize = 64;

pub(crate) fn check(documents: &[Arc<Document>], ir: &Ir, report: &mut AnalysisDiagnostics) {
    let of_services = ir.services.values().flat_map(ServiceIr::tables);
    let of_gateways = ir.ingress.iter().map(|gateway| &gateway.routes);
    for table in of_services.chain(of_gateways) {
        for rule in table.rules() {
            for http in &rule.matches {
                check_match(documents, http, report);
            }
            let filters = rule.filters.as_deref();
            let regex = filters.and_then(|filters| filters.rewrite.path_regex.as_ref());
            if let Some((regex, http)) = regex.zip(rule.matches.first()) {
                let cost = pattern::substitution_cost(regex);
                check_cost(documents, http, &regex.pattern, cost, report);
            }
        }
    }
}

fn check_match(documents: &[Arc<Document>], http: &HttpMatch, report: &mut AnalysisDiagnostics) {
    let path = match &http.path {
        PathMatch::Regex(pattern) => Some(pattern),
        _ => None,
    };
    let values = http.headers.iter().chain(&http.query);
    let of_values = values.filter_map(|condition| condition.value.regex());
    for expression in path.into_iter().chain(of_values) {
        check_cost(
            documents,
            http,
            expression,
            pattern::cost(expression),
            report,
        );
    }
}

/// Reports an expression of the rule with this match if it takes much.
fn check_cost(
    documents: &[Arc<Document>],
    http: &HttpMatch,
    expression: &str,
    cost: Result<usize, String>,
    report: &mut AnalysisDiagnostics,
) {
    let costly = cost
        .ok()
        .filter(|bytes| *bytes > REGEXES_PER_SERVICE_BYTES_MAX / FITTING_MIN);
    let Some(bytes) = costly else {
        return;
    };
    let object = &http.precedence.object;
    let document = documents.iter().find(|document| {
        let key = document.object.key();
        *object == format!("{}/{}/{}", key.kind, key.namespace, key.name)
    });
    let Some(document) = document else { return };
    let list = match document.object.kind() {
        ObjectKind::VirtualService => "http",
        _ => "rules",
    };
    // A diagnostic stays short, however long the expression is.
    let short: String = expression.chars().take(80).collect();
    let problem = format!(
        "the regular expression {short:?} takes {bytes} of the {REGEXES_PER_SERVICE_BYTES_MAX} bytes that those of a Service may take"
    );
    let fix = "match exactly or by a prefix, or write fewer and smaller repetitions";
    let field = format!("spec.{list}[{}]", http.precedence.indexes[0]);
    report.warn(Code::CostlyRegex, document, field, problem, fix);
}
