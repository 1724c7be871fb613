//! Resolves the rules of GRPCRoutes (Gateway API): a gRPC request is a POST of `/service/method`, so
//! a rule becomes one about HTTP requests. `http_route` attaches the rules to their parents.

use std::borrow::Cow;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::gateway_api::{
    BackendRef, GrpcMethodMatch, GrpcRouteMatch, GrpcRule, Method, RouteBackendRef,
    ValueConditionType,
};
use canal_model::program::{AppProtocol, Backend, BackendTarget, HttpMatch, PathMatch};

use super::backend_filters;
use super::destination::{DestinationIndex, RouteOrigin};
use super::http_route::{ResolvedRule, backends, header_conditions, matches};
use super::route_effects::RouteEffects;
use super::route_fields::{FieldIssue, RuleContext, short, text};
use crate::precedence::{self, GrpcMatchSpecificity, GrpcNameMatch};
use canal_ir::pattern;

/// A service or method that may be anything.
const ANY_NAME: &str = "[^/]+";

/// Resolves a rule of a GRPCRoute.
pub(super) fn resolve_rule(
    origin: RouteOrigin<'_>,
    place: usize,
    written: &GrpcRule,
    to: &DestinationIndex<'_>,
    rule: &mut RuleContext<'_>,
) -> ResolvedRule {
    let resolve = |backend: &BackendRef| to.of_backend_ref(origin, backend);
    let mut effects = RouteEffects::of_grpc_route(written, &resolve, rule);
    let matches = matches(&written.matches, rule, &|at, condition, rule| {
        http_match([place, at], condition, rule)
    });
    let references = written.backend_refs.iter().map(RouteBackendRef::reference);
    let mut backends = backends(origin, references, to, rule);
    for (at, (backend, written)) in backends.iter_mut().zip(&written.backend_refs).enumerate() {
        warn_of_protocol(at, backend, to, rule);
        let field = format!("backendRefs[{at}]");
        backend_filters::add_grpc(backend, &written.filters, &field, rule);
    }
    let action = rule.action("backendRefs", backends);
    ResolvedRule {
        matches,
        action: effects.guard(action, rule),
        effects,
    }
}

/// Warns about a backend to which the gateway does not send HTTP/2.
fn warn_of_protocol(
    at: usize,
    backend: &Backend,
    to: &DestinationIndex<'_>,
    rule: &mut RuleContext<'_>,
) {
    let BackendTarget::Service { service, port, .. } = &backend.target else {
        return;
    };
    let service = to.services.get(service);
    let mut ports = service.iter().flat_map(|service| &service.ports);
    if ports.any(|it| it.port == *port && it.protocol == AppProtocol::Http1) {
        let problem = format!("port {port} is HTTP/1.1, over which there is no gRPC");
        let fix = "set the port's appProtocol to kubernetes.io/h2c or grpc";
        let issue = FieldIssue::new("port", problem, fix).with_code(Code::BackendProtocolMismatch);
        rule.warning(&format!("backendRefs[{at}]"), issue);
    }
}

/// Resolves a match. A broken condition is left out, which is safe because the whole rule is then
/// refused.
fn http_match(
    place: [usize; 2],
    written: &GrpcRouteMatch,
    rule: &mut RuleContext<'_>,
) -> HttpMatch {
    let field = format!("matches[{}]", place[1]);
    let mut path = PathMatch::ElementPrefix("/".to_owned());
    let [mut service, mut method] = [GrpcNameMatch::Any; 2];
    if let Some(condition) = &written.method {
        let names = names(condition);
        match path_match(names, rule) {
            Ok(checked) => {
                path = checked;
                [service, method] = names;
            }
            Err(issue) => rule.broken(&format!("{field}.method"), issue),
        }
    }
    let headers = header_conditions(&format!("{field}.headers"), &written.headers, rule);
    let counted = GrpcMatchSpecificity {
        service,
        method,
        headers: headers.len(),
    };
    HttpMatch {
        precedence: precedence::grpc(rule.document, place, &counted),
        path,
        method: Some(Method::Post.as_str().to_owned()),
        headers,
        query: Vec::new(),
    }
}

/// Returns the conditions on the service and on the method.
fn names(written: &GrpcMethodMatch) -> [GrpcNameMatch<'_>; 2] {
    [&written.service, &written.method].map(|name| {
        // Gateway API: an empty name is one that is not written.
        let name = name.as_deref().filter(|name| !name.is_empty());
        match (name, written.kind) {
            (None, _) => GrpcNameMatch::Any,
            (Some(name), ValueConditionType::Exact) => GrpcNameMatch::Exact(name),
            (Some(name), ValueConditionType::RegularExpression) => GrpcNameMatch::Regex(name),
        }
    })
}

fn path_match(
    [service, method]: [GrpcNameMatch<'_>; 2],
    rule: &mut RuleContext<'_>,
) -> Result<PathMatch, FieldIssue> {
    let is_service = |text: &str| {
        let text = text.strip_prefix('.').unwrap_or(text);
        text.split('.').all(is_identifier)
    };
    check_name("service", service, is_service)?;
    check_name("method", method, is_identifier)?;
    let pattern = match (service, method) {
        (GrpcNameMatch::Any, GrpcNameMatch::Any) => {
            let problem = "neither a service nor a method is written";
            let fix = "write one of them, or remove the field to match every request";
            return Err(FieldIssue::new("", problem, fix).with_code(Code::MissingField));
        }
        (GrpcNameMatch::Exact(service), GrpcNameMatch::Exact(method)) => {
            return text(&format!("/{service}/{method}")).map(PathMatch::Exact);
        }
        (GrpcNameMatch::Exact(service), GrpcNameMatch::Any) => {
            return text(&format!("/{service}/")).map(PathMatch::StringPrefix);
        }
        _ => format!(
            "/{}/{}",
            expression("service", service)?,
            expression("method", method)?
        ),
    };
    rule.regex(&pattern).map(PathMatch::Regex)
}

/// Checks a name as the GRPCRoute CRD does (Gateway API v1.7.0 GRPCMethodMatch).
fn check_name(
    field: &'static str,
    name: GrpcNameMatch<'_>,
    is_valid: impl Fn(&str) -> bool,
) -> Result<(), FieldIssue> {
    match name {
        GrpcNameMatch::Exact(name) if !is_valid(name) => {
            let problem = format!("{:?} is not the name of a gRPC {field}", short(name));
            let fix = "write names as in service: shop.Cart and method: AddItem";
            Err(FieldIssue::new(field, problem, fix))
        }
        _ => Ok(()),
    }
}

fn is_identifier(text: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.bytes().all(is_part)
        && text
            .bytes()
            .next()
            .is_some_and(|byte| !byte.is_ascii_digit())
}

/// Returns the regular expression of a name, for a part of that of a path.
fn expression<'n>(
    field: &'static str,
    name: GrpcNameMatch<'n>,
) -> Result<Cow<'n, str>, FieldIssue> {
    Ok(match name {
        GrpcNameMatch::Any => ANY_NAME.into(),
        GrpcNameMatch::Exact(name) => name.replace('.', "\\.").into(),
        GrpcNameMatch::Regex(written) => {
            let plain = pattern::without_quotes(written);
            // An expression that is valid only in the path, such as `a)|(b`, means something else.
            pattern::cost(&plain).map_err(|problem| {
                FieldIssue::new(field, problem, "use RE2 syntax; the whole name must match")
                    .with_code(Code::InvalidRegex)
            })?;
            format!("(?:{plain})").into()
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_protocol_buffers() {
        for (text, expected) in [
            ("Cart", true),
            ("_add2", true),
            ("2add", false),
            ("", false),
            ("a-b", false),
            ("a/b", false),
            ("caf\u{e9}", false),
        ] {
            assert_eq!(is_identifier(text), expected, "{text:?}");
        }
    }
}
