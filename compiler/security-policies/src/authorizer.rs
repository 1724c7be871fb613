//! Resolves ExternalAuthorizers: services of the tenant that CUSTOM policies call. A broken one is
//! not published, and policies that name it are broken.

use std::collections::BTreeMap;
use std::time::Duration;

use canal_model::authorization::{
    AUTHORIZER_BODY_BYTES_MAX, AUTHORIZER_TIMEOUT_MAX, Authorizer, PolicyKey, VALUES_MAX,
};
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{ServiceKey, TenantName};
use canal_model::policy::canal::{ExternalAuthorizer, ExternalAuthorizerSpec};
use canal_model::program::{AppProtocol, Service};

use crate::values::header;
use crate::{PolicyResolver, key};
use canal_diagnostics::{DiagnosticCollector, Sourced};

/// Timeout of a check whose ExternalAuthorizer has none. Nobody measured this value; it is how long
/// a request waits for an authorizer that hangs.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(1);

pub fn resolve(
    tenant: &TenantName,
    declared: &[Sourced<'_, ExternalAuthorizer>],
    services: &BTreeMap<ServiceKey, Service>,
    report: &mut DiagnosticCollector,
) -> BTreeMap<PolicyKey, Authorizer> {
    declared
        .iter()
        .filter_map(|sourced| read(tenant, sourced, services, report))
        .map(|one| (one.key.clone(), one))
        .collect()
}

fn read(
    tenant: &TenantName,
    sourced: &Sourced<'_, ExternalAuthorizer>,
    services: &BTreeMap<ServiceKey, Service>,
    report: &mut DiagnosticCollector,
) -> Option<Authorizer> {
    let ExternalAuthorizer { metadata, spec } = sourced.object;
    let mut reading = PolicyResolver::new(sourced, report);
    let namespace = spec
        .service
        .namespace
        .as_ref()
        .unwrap_or(&metadata.namespace)
        .clone();
    let service = ServiceKey {
        tenant: tenant.clone(),
        namespace,
        name: spec.service.name.clone(),
    };
    let port = spec.service.port.get();
    check_service(&service, port, services, &mut reading);
    let timeout = timeout(spec, &mut reading);
    let body_bytes = body_bytes(spec, &mut reading);
    let headers = shown_headers(spec, &mut reading);
    let key = key(tenant, metadata);
    let is_good = reading.broken.is_none();
    is_good.then_some(Authorizer {
        key,
        service,
        port,
        timeout,
        fail_open: spec.fail_open,
        headers,
        body_bytes,
    })
}

/// Breaks the authorizer if its Service or the port does not exist, or if the port does not speak
/// gRPC.
fn check_service(
    service: &ServiceKey,
    port: u16,
    services: &BTreeMap<ServiceKey, Service>,
    reading: &mut PolicyResolver<'_, ExternalAuthorizer>,
) {
    match services
        .get(service)
        .map(|service| service.ports.iter().find(|p| p.port == port))
    {
        None => {
            let problem = format!("there is no Service {}/{}", service.namespace, service.name);
            reading.breaks(
                Code::UnresolvedTarget,
                "spec.service.name",
                problem,
                "create it or correct the name",
            );
        }
        Some(None) => {
            reading.breaks(
                Code::InvalidAuthorizer,
                "spec.service.port",
                format!("the Service has no TCP port {port}"),
                "write one of its ports",
            );
        }
        Some(Some(port)) if matches!(port.protocol, AppProtocol::Http1 | AppProtocol::Tcp) => {
            let problem = format!("port {} does not speak gRPC", port.port);
            reading.breaks(
                Code::InvalidAuthorizer,
                "spec.service.port",
                problem,
                "name the Service's port grpc, or give it appProtocol: grpc",
            );
        }
        // A port without a declared protocol may speak HTTP/2.
        Some(Some(_)) => {}
    }
}

fn timeout(
    spec: &ExternalAuthorizerSpec,
    reading: &mut PolicyResolver<'_, ExternalAuthorizer>,
) -> Duration {
    let timeout = spec.timeout.map_or(TIMEOUT_DEFAULT, |timeout| timeout.0);
    if timeout.is_zero() || timeout > AUTHORIZER_TIMEOUT_MAX {
        let problem = format!(
            "the timeout is zero or more than {} s",
            AUTHORIZER_TIMEOUT_MAX.as_secs()
        );
        reading.breaks(
            Code::InvalidValue,
            "spec.timeout",
            problem,
            "write a time such as 500ms",
        );
    }
    timeout
}

/// Returns how many bytes of a request's body the authorizer sees.
fn body_bytes(
    spec: &ExternalAuthorizerSpec,
    reading: &mut PolicyResolver<'_, ExternalAuthorizer>,
) -> u32 {
    let body_bytes = spec.include_request_body.map_or(0, |body| body.max_bytes);
    if body_bytes > AUTHORIZER_BODY_BYTES_MAX {
        let problem = format!(
            "{body_bytes} bytes are configured; at most {AUTHORIZER_BODY_BYTES_MAX} are allowed"
        );
        reading.breaks(
            Code::LimitExceeded,
            "spec.includeRequestBody.maxBytes",
            problem,
            "write a smaller number",
        );
    }
    body_bytes
}

/// Returns the headers of a request that the authorizer sees; none means all.
fn shown_headers(
    spec: &ExternalAuthorizerSpec,
    reading: &mut PolicyResolver<'_, ExternalAuthorizer>,
) -> Vec<String> {
    if spec.include_request_headers.len() > VALUES_MAX {
        let problem = format!(
            "there are {} headers, more than {VALUES_MAX}",
            spec.include_request_headers.len()
        );
        reading.breaks(
            Code::LimitExceeded,
            "spec.includeRequestHeaders",
            problem,
            "remove the field to send all headers",
        );
    }
    let mut headers = Vec::new();
    for (at, name) in spec
        .include_request_headers
        .iter()
        .enumerate()
        .take(VALUES_MAX)
    {
        match header(name) {
            Ok(name) => headers.push(name),
            Err((problem, fix)) => reading.breaks(
                Code::InvalidValue,
                format!("spec.includeRequestHeaders[{at}]"),
                problem,
                fix,
            ),
        }
    }
    headers
}
