//! Resolves mirrors of a rule: the filter `RequestMirror` of HTTPRoutes and GRPCRoutes, and `mirror`
//! and `mirrors` of VirtualServices. They are about quality of service: a mirror that cannot be had
//! is reported, and requests are served without it.

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::gateway_api::{
    BackendRef, GrpcRouteFilter, GrpcRule, HttpRouteFilter, HttpRule, RouteBackendRef,
};
use canal_model::policy::istio::{Destination, VirtualServiceRoute};
use canal_model::policy::mirrors::HttpRequestMirrorFilter;
use canal_model::program::{BackendTarget, RouteAction, RouteMirror};
use canal_model::request_fraction::RequestFraction;
use canal_model::route_filters::RouteFilters;

use super::route_fields::{FieldIssue, RuleContext};
use super::route_filters::changes_requests;
use crate::limits::{BACKENDS_PER_RULE_MAX, MIRRORS_PER_RULE_MAX};

/// Resolves the mirrors of an HTTPRoute's rule and of its backends. `resolve` finds the Service of a
/// mirror.
pub(super) fn of_http_route(
    written: &HttpRule,
    resolve: &dyn Fn(&BackendRef) -> Result<BackendTarget, FieldIssue>,
    rule: &mut RuleContext<'_>,
) -> Vec<RouteMirror> {
    let mirror = |it: &'_ HttpRouteFilter| it.request_mirror.clone();
    of_route(
        (&written.filters, &written.backend_refs),
        mirror,
        resolve,
        rule,
    )
}

/// Resolves the mirrors of a GRPCRoute's rule. `resolve` finds the Service of a mirror.
pub(super) fn of_grpc_route(
    written: &GrpcRule,
    resolve: &dyn Fn(&BackendRef) -> Result<BackendTarget, FieldIssue>,
    rule: &mut RuleContext<'_>,
) -> Vec<RouteMirror> {
    let mirror = |it: &'_ GrpcRouteFilter| it.request_mirror.clone();
    of_route(
        (&written.filters, &written.backend_refs),
        mirror,
        resolve,
        rule,
    )
}

/// Resolves the mirrors among the filters of a rule, then among those of each backend.
fn of_route<F>(
    (of_rule, backends): (&[F], &[RouteBackendRef<F>]),
    mirror_of: impl Fn(&F) -> Option<HttpRequestMirrorFilter>,
    resolve: &dyn Fn(&BackendRef) -> Result<BackendTarget, FieldIssue>,
    rule: &mut RuleContext<'_>,
) -> Vec<RouteMirror> {
    let mut mirrors = Vec::new();
    let of_rule = (String::new(), None, of_rule);
    let of_backends = backends.iter().enumerate().map(|(at, backend)| {
        let number = u16::try_from(at).ok();
        (
            format!("backendRefs[{at}]."),
            number,
            backend.filters.as_slice(),
        )
    });
    let lists = std::iter::once(of_rule).chain(of_backends);
    let filters = lists.flat_map(|(prefix, backend, filters)| {
        let filters = filters.iter().enumerate();
        filters.map(move |(at, filter)| (format!("{prefix}filters[{at}]"), backend, filter))
    });
    for (field, backend, filter) in filters {
        let Some(mirror) = mirror_of(filter) else {
            continue;
        };
        let field = format!("{field}.requestMirror");
        let target = resolve(&mirror.backend_ref).map_err(|issue| FieldIssue {
            field: format!("backendRef.{}", issue.field),
            ..issue
        });
        let fraction = fraction_of(&mirror);
        add(&mut mirrors, (target, fraction, backend), &field, rule);
    }
    mirrors
}

fn fraction_of(mirror: &HttpRequestMirrorFilter) -> Result<RequestFraction, FieldIssue> {
    let (field, numerator, denominator) = match (mirror.percent, mirror.fraction) {
        (None, None) => return Ok(RequestFraction::ALL),
        (Some(percent), None) => ("percent", percent, 100),
        (None, Some(fraction)) => (
            "fraction",
            fraction.numerator,
            fraction.denominator.unwrap_or(100),
        ),
        (Some(_), Some(_)) => {
            let problem = "percent and fraction exclude each other";
            return Err(FieldIssue::new("percent", problem, "write one of them"));
        }
    };
    // Rounded down to millionths, which Envoy counts in.
    let millionths = (denominator > 0 && (0..=denominator).contains(&numerator))
        .then(|| i128::from(numerator) * 1_000_000 / i128::from(denominator));
    millionths
        .and_then(|millionths| u32::try_from(millionths).ok())
        .and_then(RequestFraction::of_millionths)
        .ok_or_else(|| {
            let problem = format!("{numerator} of {denominator} is no part of the requests");
            FieldIssue::new(field, problem, "write a number from 0 to the whole")
        })
}

/// Resolves the mirrors of a VirtualService's rule. `resolve` finds the Service of a destination.
pub(super) fn of_virtual_service(
    written: &VirtualServiceRoute,
    resolve: &dyn Fn(&Destination) -> Result<BackendTarget, FieldIssue>,
    rule: &mut RuleContext<'_>,
) -> Vec<RouteMirror> {
    let VirtualServiceRoute {
        mirror,
        mirror_percentage,
        mirror_percent,
        mirrors: several,
        ..
    } = written;
    let mut mirrors = Vec::new();
    if let Some(destination) = mirror {
        // `mirror` itself is the destination, so its fields have no such prefix.
        let target = resolve(destination).map_err(|issue| FieldIssue {
            field: issue.field.trim_start_matches("destination.").to_owned(),
            ..issue
        });
        let fraction = match (mirror_percentage, mirror_percent) {
            // As in Istio, the deprecated mirrorPercent counts only without mirrorPercentage.
            (Some(percentage), _) => Ok(percentage.value.0),
            (None, None) => Ok(RequestFraction::ALL),
            (None, Some(percent)) => {
                let percent = u32::try_from(*percent).ok().map(f64::from);
                let fraction = percent.and_then(RequestFraction::of_percent);
                fraction.ok_or_else(|| {
                    let problem = "the deprecated mirrorPercent is not from 0 to 100";
                    FieldIssue::new("", problem, "write mirrorPercentage")
                })
            }
        };
        add(&mut mirrors, (target, fraction, None), "mirror", rule);
    }
    // Only a warning, because no copy changes what the client receives.
    if mirror.is_some() && !several.is_empty() {
        let problem = "mirror and mirrors exclude each other; both are sent";
        let issue = FieldIssue::new("", problem, "write all in mirrors");
        rule.warning("mirrors", issue);
    }
    if several.len() > BACKENDS_PER_RULE_MAX {
        let problem = format!("the rule has more than {BACKENDS_PER_RULE_MAX} mirrors");
        let issue = FieldIssue::new("", problem, "use fewer; those behind them get no request")
            .with_code(Code::LimitExceeded);
        rule.warning("mirrors", issue);
    }
    // A rule's mirrors are read for each port of each Service.
    let read = several.iter().take(BACKENDS_PER_RULE_MAX);
    for (at, policy) in read.enumerate() {
        let target = resolve(&policy.destination);
        let percentage = policy.percentage;
        let fraction = Ok(percentage.map_or(RequestFraction::ALL, |it| it.value.0));
        let field = format!("mirrors[{at}]");
        add(&mut mirrors, (target, fraction, None), &field, rule);
    }
    mirrors
}

/// Returns the destinations of the mirrors of a VirtualService's rule.
pub(super) fn destinations(written: &VirtualServiceRoute) -> impl Iterator<Item = &Destination> {
    let several = written.mirrors.iter().map(|policy| &policy.destination);
    written.mirror.iter().chain(several)
}

/// Leaves out mirrors in other namespaces if the filters of the rule or a backend change requests. The policies of a mirror
/// authorize the request as the client sent it, so another namespace's route could send it what its
/// policies deny.
pub(super) fn guard(
    mirrors: &mut Vec<RouteMirror>,
    filters: Option<&RouteFilters>,
    action: &RouteAction,
    rule: &mut RuleContext<'_>,
) {
    let of_backends = match action {
        RouteAction::Split(backends) => backends.as_slice(),
        RouteAction::Answer(_) | RouteAction::Refuse { .. } => &[],
    };
    let mut of_backends = of_backends.iter().map(|backend| backend.filters.as_deref());
    if !changes_requests(filters) && !of_backends.any(changes_requests) {
        return;
    }
    mirrors.retain(|mirror| {
        let BackendTarget::Service { service, .. } = &mirror.target else {
            return false;
        };
        let is_permitted = rule.may_change_requests_to(&service.namespace);
        if !is_permitted {
            let problem = format!(
                "the rule changes requests, so it cannot copy them to namespace {}, whose policies authorize them unchanged; requests are served, and not copied there",
                service.namespace
            );
            let issue = FieldIssue::new("", problem, "mirror to a Service of this namespace")
                .with_code(Code::ChangedAcrossNamespaces);
            rule.warning("", issue);
        }
        is_permitted
    });
}

/// A mirror as it is read: its target, its part of the requests, and the position of the backend whose
/// requests are copied, if not all are.
type ReadMirror = (
    Result<BackendTarget, FieldIssue>,
    Result<RequestFraction, FieldIssue>,
    Option<u16>,
);

/// Adds a mirror, unless it is broken or gets no request.
fn add(
    mirrors: &mut Vec<RouteMirror>,
    (target, fraction, backend): ReadMirror,
    field: &str,
    rule: &mut RuleContext<'_>,
) {
    let (target, fraction) = match (target, fraction) {
        (Ok(target), Ok(fraction)) => (target, fraction),
        (Err(issue), _) | (_, Err(issue)) => {
            let problem = format!("{}; requests are served, and not copied", issue.problem);
            rule.warning(field, FieldIssue { problem, ..issue });
            return;
        }
    };
    if mirrors.len() == MIRRORS_PER_RULE_MAX {
        let problem = format!("the rule has more than {MIRRORS_PER_RULE_MAX} mirrors");
        let issue = FieldIssue::new("", problem, "use fewer; this one gets no request")
            .with_code(Code::LimitExceeded);
        rule.warning(field, issue);
    } else if fraction != RequestFraction::NONE {
        mirrors.push(RouteMirror {
            target,
            fraction,
            backend,
        });
    }
}

/// Returns the mirrors of a rule with this action. Only what is sent to an endpoint is copied.
pub(super) fn of_action(mirrors: &[RouteMirror], action: &RouteAction) -> Vec<RouteMirror> {
    match action {
        RouteAction::Split(_) => mirrors.to_vec(),
        RouteAction::Answer(_) | RouteAction::Refuse { .. } => Vec::new(),
    }
}
