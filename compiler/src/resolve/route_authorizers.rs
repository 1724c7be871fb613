//! Resolves the filter `ExternalAuth` of an HTTPRoute's rule, or of a listener. It restricts who
//! reaches the backends, so a broken one breaks its rule.

use canal_model::authorization::AUTHORIZER_BODY_BYTES_MAX;
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::external_auth::{
    ForwardBodyConfig, HttpAuthConfig, HttpExternalAuthFilter,
};
use canal_model::policy::gateway_api::{BackendRef, HttpRule};
use canal_model::program::BackendTarget;
use canal_model::route_authorizer::{
    ROUTE_AUTHORIZER_HEADERS_MAX, ROUTE_AUTHORIZER_PATH_BYTES_MAX, RouteAuthorizer,
    RouteAuthorizerProtocol,
};

use super::route_fields::{FieldIssue, RuleContext, header_name};
use super::route_filters::sent_path;

/// Resolves the authorizer of an HTTPRoute's rule; `None` if it names none, or is broken. `resolve`
/// finds the server's Service.
pub(super) fn of_http_route(
    written: &HttpRule,
    resolve: &dyn Fn(&BackendRef) -> Result<BackendTarget, FieldIssue>,
    rule: &mut RuleContext<'_>,
) -> Option<Box<RouteAuthorizer>> {
    let mut filters = written.filters.iter().enumerate();
    let (at, filter) = filters.find_map(|(at, it)| Some((at, it.external_auth.as_ref()?)))?;
    match read(filter, resolve) {
        Ok(authorizer) => Some(Box::new(authorizer)),
        Err(issue) => {
            rule.broken(&format!("filters[{at}].externalAuth"), issue);
            None
        }
    }
}

/// Resolves a filter.
///
/// # Errors
/// A field of the filter is not valid, or its server is not found.
pub(super) fn read(
    written: &HttpExternalAuthFilter,
    resolve: &dyn Fn(&BackendRef) -> Result<BackendTarget, FieldIssue>,
) -> Result<RouteAuthorizer, FieldIssue> {
    let HttpExternalAuthFilter {
        protocol,
        backend_ref,
        grpc,
        http,
        forward_body,
    } = written;
    // Gateway API: a protocol excludes the settings of the other one, and its own are optional.
    let (protocol, headers) = match (protocol.as_str(), grpc, http) {
        ("GRPC", grpc, None) => {
            let listed = grpc.as_ref().map(|it| it.allowed_headers.as_slice());
            let headers = names(listed.unwrap_or_default(), "grpc.allowedHeaders")?;
            (RouteAuthorizerProtocol::Grpc, headers)
        }
        ("HTTP", None, http) => read_http(&http.clone().unwrap_or_default())?,
        _ => {
            let problem = format!(
                "the protocol is {protocol:?}, and the field of another one is set, or it is unknown"
            );
            let fix = "write HTTP, with or without http, or GRPC, with or without grpc";
            return Err(FieldIssue::new("protocol", problem, fix));
        }
    };
    let target = resolve(backend_ref).map_err(|issue| at("backendRef", issue))?;
    let BackendTarget::Service { service, port, .. } = target else {
        return Err(FieldIssue::new(
            "backendRef",
            "it names no Service",
            "name a Service",
        ));
    };
    Ok(RouteAuthorizer {
        service,
        port,
        protocol,
        headers,
        body_bytes: body_bytes(forward_body.as_ref())?,
    })
}

fn read_http(
    written: &HttpAuthConfig,
) -> Result<(RouteAuthorizerProtocol, Vec<String>), FieldIssue> {
    let HttpAuthConfig {
        path,
        allowed_headers,
        allowed_response_headers,
    } = written;
    if path.len() > ROUTE_AUTHORIZER_PATH_BYTES_MAX {
        let problem = format!("it has more than {ROUTE_AUTHORIZER_PATH_BYTES_MAX} bytes");
        let issue = FieldIssue::new("http.path", problem, "write a shorter path");
        return Err(issue.with_code(Code::LimitExceeded));
    }
    let path_prefix = match path.as_str() {
        "" => String::new(),
        path => sent_path(path).map_err(|issue| at("http.path", issue))?,
    };
    let protocol = RouteAuthorizerProtocol::Http {
        path_prefix,
        response_headers: names(allowed_response_headers, "http.allowedResponseHeaders")?,
    };
    Ok((protocol, names(allowed_headers, "http.allowedHeaders")?))
}

/// Returns the names of headers in lower case.
fn names(written: &[String], field: &str) -> Result<Vec<String>, FieldIssue> {
    if written.len() > ROUTE_AUTHORIZER_HEADERS_MAX {
        let problem = format!("there are more than {ROUTE_AUTHORIZER_HEADERS_MAX} headers");
        let issue = FieldIssue::new(field, problem, "list fewer");
        return Err(issue.with_code(Code::LimitExceeded));
    }
    let names = written.iter();
    names
        .map(|name| header_name(name).map_err(|issue| at(field, issue)))
        .collect()
}

fn body_bytes(written: Option<&ForwardBodyConfig>) -> Result<u32, FieldIssue> {
    let size = written.map_or(0, |body| body.max_size);
    let bytes = u32::try_from(size).ok();
    let bytes = bytes.filter(|bytes| *bytes <= AUTHORIZER_BODY_BYTES_MAX);
    bytes.ok_or_else(|| {
        let problem = format!("{size} is not from 0 to {AUTHORIZER_BODY_BYTES_MAX} bytes");
        FieldIssue::new(
            "forwardBody.maxSize",
            problem,
            "write a number of that range",
        )
        .with_code(Code::LimitExceeded)
    })
}

/// Returns the issue at a field below `field`.
fn at(field: &str, issue: FieldIssue) -> FieldIssue {
    let field = match issue.field.as_str() {
        "" => field.to_owned(),
        inner => format!("{field}.{inner}"),
    };
    FieldIssue { field, ..issue }
}
