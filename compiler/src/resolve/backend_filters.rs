//! Resolves the filters of one backend: `backendRefs[].filters` of HTTPRoutes and GRPCRoutes, and
//! `route[].headers` of VirtualServices. A filter that cannot be honoured refuses the requests of
//! its backend; those of the others are served.

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::gateway_api::{GrpcRouteFilter, HttpRouteFilter, HttpRouteMatch};
use canal_model::policy::istio::Headers;
use canal_model::program::Backend;
use canal_model::route_filters::RouteFilters;

use super::route_fields::{FieldIssue, RuleContext};
use super::route_filters;

/// Adds the filters of an HTTPRoute's backend at `field` to it. `matches` are those of the rule.
pub(super) fn add_http(
    backend: &mut Backend,
    written: &[HttpRouteFilter],
    matches: &[HttpRouteMatch],
    field: &str,
    rule: &mut RuleContext<'_>,
) {
    let field_of = |at: usize| format!("{field}.filters[{at}]");
    add(backend, rule, |rule| {
        let mut modifiers = Vec::new();
        for (at, filter) in written.iter().enumerate() {
            match filter.kind.as_str() {
                "RequestRedirect" | "CORS" => {
                    let problem = format!(
                        "a filter of type {} for one backend is not supported in this version",
                        filter.kind
                    );
                    let issue = FieldIssue::new("type", problem, "write it in the rule's filters")
                        .with_code(Code::UnsupportedFilter);
                    rule.broken(&field_of(at), issue);
                }
                _ => modifiers.push((field_of(at), filter)),
            }
        }
        route_filters::of_filters(&modifiers, matches, rule)
    });
}

/// Adds the filters of a GRPCRoute's backend at `field` to it.
pub(super) fn add_grpc(
    backend: &mut Backend,
    written: &[GrpcRouteFilter],
    field: &str,
    rule: &mut RuleContext<'_>,
) {
    let filters: Vec<_> = written.iter().map(route_filters::as_http_filter).collect();
    add_http(backend, &filters, &[], field, rule);
}

/// Adds the header changes of a VirtualService's destination at `field` to its backend.
pub(super) fn add_headers(
    backend: &mut Backend,
    written: Option<&Headers>,
    field: &str,
    rule: &mut RuleContext<'_>,
) {
    if let Some(headers) = written {
        let field = format!("{field}.headers");
        add(backend, rule, |rule| {
            let mut filters = RouteFilters::default();
            route_filters::add_headers(&mut filters, headers, &field, rule);
            (!filters.is_empty()).then(|| Box::new(filters))
        });
    }
}

/// Adds what `resolve` returns to a backend. If it breaks the rule, only the backend refuses.
fn add<'d>(
    backend: &mut Backend,
    rule: &mut RuleContext<'d>,
    resolve: impl FnOnce(&mut RuleContext<'d>) -> Option<Box<RouteFilters>>,
) {
    let of_rule = rule.broken.take();
    backend.filters = resolve(rule);
    let of_backend = std::mem::replace(&mut rule.broken, of_rule);
    if let Some(reason) = of_backend {
        rule.refuse_backend(backend, reason);
    }
}
