//! Formats resources as text for people and golden files: one or a few lines per resource. No
//! program parses the text.

use std::collections::BTreeSet;
use std::fmt::Display;

use canal_model::client_attributes::ClientAttribute;
use canal_model::client_validation::ClientValidation;
use canal_model::ids::ServiceKey;
use canal_model::ingress::gateway_object;
use canal_model::listener_filters::ListenerFilter;
use canal_model::load_balancing::{HashKey, HashTableKind, LoadBalancer, PortLoadBalancer};
use canal_model::program::{
    AppProtocol, Backend, BackendTarget, DirectAudience, DirectEndpoint, GatewayAddress,
    GatewayReplica, HostMatch, HttpMatch, IngressGateway, Labels, ListenerCertificate, Node,
    OutboundTrafficPolicy, PathMatch, PolicyPaths, RateLimit, RelayProtocol, Replica, Resource,
    RouteAction, RouteKey, RouteMirror, RouteObject, RouteRule, Service, ServicePort, Tenant,
    TextMatch, Throttle, TunnelProtocol, UpstreamPool, ValueMatch, Workload,
};
use canal_model::request_fraction::RequestFraction;
use canal_model::route_attempts::{
    AttemptPolicy, BackoffJitter, RetryBackoff, RouteTimeouts, TimeoutSpan,
};
use canal_model::route_authorizer::{RouteAuthorizer, RouteAuthorizerProtocol};
use canal_model::route_cors::{CorsDialect, CorsList, CorsPolicy, OriginHost, OriginMatch};
use canal_model::route_faults::{AbortStatus, FaultPolicy};
use canal_model::route_filters::{
    HeaderModifier, PathRewrite, RedirectPort, RouteAnswer, RouteFilters,
};

use crate::text_security;

/// Formats a resource of any kind.
pub fn resource(resource: &Resource) -> String {
    match resource {
        Resource::Tenant(it) => tenant(it),
        Resource::GatewayReplica(it) => gateway_replica(it),
        Resource::Service(it) => [
            vec![service(it)],
            it.ports.iter().map(|p| format!("  {}", port(p))).collect(),
            load_balancers(it),
        ]
        .concat()
        .join("\n"),
        Resource::Ingress(it) => ingress(it),
        Resource::ListenerCertificate(it) => listener_certificate(it),
        Resource::Workload(it) => workload(it),
        Resource::Route(it) => route(it),
        Resource::Node(it) => node(it),
        Resource::Replica(it) => replica(it),
        Resource::Address(it) => address(it),
        Resource::Table(it) => format!("table {} az {} version {}", it.service, it.az, it.version),
        Resource::Throttle(it) => throttle(it),
        Resource::DirectEndpoint(it) => direct_endpoint(it),
        Resource::Bundle(it) => text_security::bundle(it),
        Resource::KeyServer(it) => text_security::key_server(it),
        Resource::Authorizer(it) => text_security::authorizer(it),
        Resource::Authorization(it) => text_security::authorization(it),
        Resource::Authentication(it) => text_security::authentication(it),
        Resource::PeerAuthentication(it) => text_security::peer_authentication(it),
        Resource::Termination(it) => text_security::termination(it),
        Resource::Entitlement(it) => text_security::entitlement(it),
        // Kinds that the compiler and the planner do not make.
        _ => format!("{} {}", resource.kind().label(), resource.name()),
    }
}

pub fn node(node: &Node) -> String {
    let mac: Vec<String> = node.mac.iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "node {}/{} az {} at {} mac {} pods {}",
        node.tenant,
        node.name,
        node.az,
        node.underlay,
        mac.join(":"),
        list(&node.pod_cidrs)
    )
}

fn replica(replica: &Replica) -> String {
    let state = if replica.up { "up" } else { "down" };
    format!(
        "replica {} number {} backend {} az {} at {} {state}",
        replica.name,
        replica.number.get(),
        replica.backend,
        replica.az,
        replica.underlay
    )
}

fn address(address: &GatewayAddress) -> String {
    let state = if address.open { "open" } else { "closed" };
    let network = address.network.map(|vni| format!(" network {}", vni.get()));
    format!(
        "address {} id {} az {} at {}{} {state}",
        address.service,
        address.id.get(),
        address.az,
        list(&address.addresses),
        network.unwrap_or_default()
    )
}

/// The text names no certificate: its digest would change with each test.
pub fn client_validation(validation: &ClientValidation) -> String {
    let ports: Vec<String> = validation.ports.iter().map(ToString::to_string).collect();
    let listeners: Vec<String> = validation.listeners.iter().cloned().collect();
    let of = match listeners.as_slice() {
        [] => String::new(),
        some => format!(" of {}", list(some)),
    };
    format!(
        "validation {} of clients at {}{of} by {} authorities",
        validation.mode.as_str(),
        list(&ports),
        validation.authorities.count
    )
}

pub(crate) fn proxied_ports(ports: &BTreeSet<u16>) -> String {
    let ports: Vec<String> = ports.iter().map(ToString::to_string).collect();
    format!("PROXY protocol at {}", list(&ports))
}

fn ingress(gateway: &IngressGateway) -> String {
    let mut text = format!("ingress {} id {}", gateway.key, gateway.id.get());
    if gateway.trusted_proxies > 0 {
        text += &format!(" trusted proxies {}", gateway.trusted_proxies);
    }
    if !gateway.proxied_ports.is_empty() {
        text += &format!("\n  {}", proxied_ports(&gateway.proxied_ports));
    }
    for validation in &gateway.client_validations {
        text += &format!("\n  {}", client_validation(validation));
    }
    for listener in &gateway.listeners {
        let state = if listener.is_open { "open" } else { "closed" };
        let (name, port, of) = (&listener.name, listener.port, host(listener.host.as_ref()));
        let protocol = match (listener.relay, &listener.certificates) {
            (Some(RelayProtocol::TlsPassthrough), _) => " tls passthrough",
            (Some(RelayProtocol::TerminatedTls), _) => " tls terminate",
            (Some(RelayProtocol::Tcp), _) => " tcp",
            (None, Some(_)) => " https",
            (None, None) => "",
        };
        text += &format!("\n  listener {name} {port}{protocol} for {of} {state}");
        for (namespace, secret) in listener.certificates.iter().flatten() {
            text += &format!("\n    certificate {namespace}/{secret}");
        }
        for filter in &listener.filters {
            text += &format!("\n    filter {}", listener_filter(filter));
        }
        for virtual_host in &listener.virtual_hosts {
            let routes = virtual_host.routes.iter();
            let routes: Vec<String> = routes.map(route_object).collect();
            let of = host(virtual_host.host.as_ref());
            text += &format!("\n    host {of} routes {}", list(&routes));
        }
    }
    text
}

/// Formats the Gateway for which a service stands, by its kind, namespace and name.
pub fn gateway(service: &ServiceKey) -> String {
    match gateway_object(service) {
        Some((kind, name)) => format!("{} {}/{name}", kind.as_str(), service.namespace),
        None => service.to_string(),
    }
}

fn route_object(route: &RouteObject) -> String {
    let RouteObject {
        namespace,
        name,
        kind,
    } = route;
    format!("{kind}/{namespace}/{name}")
}

/// The text shows nothing of the key, not even a digest.
fn listener_certificate(it: &ListenerCertificate) -> String {
    let (namespace, name) = &it.secret;
    format!(
        "certificate {namespace}/{name} of {} for {}",
        it.gateway,
        list(&it.certificate.names)
    )
}

pub fn throttle(throttle: &Throttle) -> String {
    let of = throttle
        .service
        .as_ref()
        .map_or_else(|| throttle.tenant.to_string(), ToString::to_string);
    let rate = |rate: RateLimit| format!("{}/s burst {}", rate.per_second, rate.burst);
    let requests = if throttle.requests == RateLimit::default() {
        String::new()
    } else {
        format!(" requests {}", rate(throttle.requests))
    };
    format!(
        "throttle {of} sessions {} packets {}{requests}",
        rate(throttle.sessions),
        rate(throttle.packets)
    )
}

pub fn direct_endpoint(endpoint: &DirectEndpoint) -> String {
    let mut line = format!(
        "direct {} sa {} az {} at {}",
        endpoint.uid(),
        endpoint.service_account,
        endpoint.az,
        list(&endpoint.addresses)
    );
    for served in &endpoint.serves {
        line += &format!("\n  serves {}:{}", served.service, served.port);
    }
    let own: Vec<u16> = endpoint.own_ports.iter().copied().collect();
    line += &format!("\n  own ports {}", list(&own));
    match &endpoint.audience {
        DirectAudience::Tenant => line,
        DirectAudience::Nodes(nodes) => {
            line + &format!("\n  sent to {}", list(&nodes.iter().collect::<Vec<_>>()))
        }
    }
}

pub fn tenant(tenant: &Tenant) -> String {
    let outside = match tenant.outbound_traffic_policy {
        OutboundTrafficPolicy::Deny => "deny",
        OutboundTrafficPolicy::Passthrough => "passthrough",
    };
    let pods = list(&tenant.pod_cidrs);
    let gateways = if tenant.gateway_cidrs.is_empty() {
        String::new()
    } else {
        format!(" gateways {}", list(&tenant.gateway_cidrs))
    };
    let keys = text_security::keys(&tenant.keys);
    let resolvers = if tenant.resolvers.is_empty() {
        String::new()
    } else {
        format!(" resolvers {}", list(&tenant.resolvers))
    };
    format!(
        "tenant {} vni {} trust {} pods {pods}{gateways} outside {outside}{keys}{resolvers}",
        tenant.name,
        tenant.vni.get(),
        tenant.trust_domain
    )
}

pub fn gateway_replica(replica: &GatewayReplica) -> String {
    let draining = if replica.draining { " draining" } else { "" };
    format!(
        "gateway {}/{} az {} at {}{draining}",
        replica.tenant,
        replica.replica,
        replica.az,
        list(&replica.addresses)
    )
}

pub fn service(service: &Service) -> String {
    let pool = if service.upstream_pool == UpstreamPool::PerClient {
        " pool per-client"
    } else {
        ""
    };
    let paths = if service.policy_paths == PolicyPaths::Legacy {
        " paths legacy"
    } else {
        ""
    };
    format!(
        "service {} id {} host {} vips {}{pool}{paths}",
        service.key,
        service.id.get(),
        service.hostname,
        list(&service.vips)
    )
}

/// Formats the load balancers of a service, one per line.
pub fn load_balancers(service: &Service) -> Vec<String> {
    let line = |it: &PortLoadBalancer| {
        let subset = subset_suffix(&it.subset);
        format!(
            "  balance {}{subset}: {}",
            it.port,
            load_balancer(&it.load_balancer)
        )
    };
    service.load_balancers.iter().map(line).collect()
}

pub fn load_balancer(it: &LoadBalancer) -> String {
    let hash = match it {
        LoadBalancer::LeastRequest => return "least request".to_owned(),
        LoadBalancer::RoundRobin => return "round robin".to_owned(),
        LoadBalancer::Random => return "random".to_owned(),
        LoadBalancer::ConsistentHash(hash) => hash,
    };
    let key = match &hash.key {
        HashKey::Header(name) => format!("header {name}"),
        HashKey::Cookie(cookie) => {
            let path = if cookie.path.is_empty() {
                String::new()
            } else {
                format!(" path {}", cookie.path)
            };
            let ttl = cookie
                .ttl_seconds
                .map(|ttl| format!(" generated for {ttl}s"));
            format!("cookie {}{path}{}", cookie.name, ttl.unwrap_or_default())
        }
        HashKey::SourceIp => "source address".to_owned(),
        HashKey::QueryParameter(name) => format!("query parameter {name}"),
    };
    let table = match hash.table {
        HashTableKind::Ring { size_min } => format!("ring of {size_min}"),
        HashTableKind::Maglev { size } => format!("maglev of {size}"),
    };
    format!("hash of {key}, {table}")
}

pub fn port(port: &ServicePort) -> String {
    let protocol = match port.protocol {
        AppProtocol::Detect => "detect",
        AppProtocol::Http1 => "http1",
        AppProtocol::Http2 => "http2",
        AppProtocol::Grpc => "grpc",
        AppProtocol::Tcp => "tcp",
    };
    let name = if port.name.is_empty() {
        String::new()
    } else {
        format!(" {}", port.name)
    };
    format!("port {}{name} {protocol}", port.port)
}

pub fn workload(workload: &Workload) -> String {
    let labels: Vec<String> = workload
        .labels
        .iter()
        .map(|(k, v)| format!("{k}={v}"))
        .collect();
    let mut line = format!(
        "workload {} sa {} node {} az {} at {}",
        workload.uid(),
        workload.service_account,
        workload.node,
        workload.az,
        list(&workload.addresses)
    );
    line += if workload.ready {
        " ready"
    } else {
        " not ready"
    };
    if workload.tunnel == TunnelProtocol::None {
        line += " plain";
    }
    line += &format!(" labels {}", list(&labels));
    for endpoint in &workload.endpoints {
        line += &format!(
            "\n  serves {}:{} on {}",
            endpoint.service, endpoint.port, endpoint.target_port
        );
    }
    if !workload.udp_ports.is_empty() {
        let ports: Vec<u16> = workload.udp_ports.iter().copied().collect();
        line += &format!("\n  takes UDP from the tier on {}", list(&ports));
    }
    line
}

fn route(rule: &RouteRule) -> String {
    let port = rule
        .parent_port
        .map(|port| format!(":{port}"))
        .unwrap_or_default();
    let consumer = rule.consumer.as_ref();
    let consumer = consumer.map_or_else(String::new, |it| format!(" from clients of {it}"));
    let mut lines = vec![format!(
        "route {} for {}{port}{consumer}",
        rule.key, rule.parent
    )];
    for http in &rule.matches {
        let p = &http.precedence;
        let order = format!(
            "{}/{}/{}/{}/{}",
            p.class,
            numbers(&p.specificity),
            p.created,
            p.object,
            numbers(&p.indexes)
        );
        lines.push(format!(
            "  when {}{} order {order}",
            hosts(&rule.hosts),
            http_match(http)
        ));
    }
    lines.push(format!("  => {}{}", action(&rule.action), effects(rule)));
    lines.join("\n")
}

/// Formats numbers of a precedence. Inverted numbers are printed as negative ones, because that is
/// easier to read.
fn numbers(numbers: &[u32]) -> String {
    let shown: Vec<String> = numbers
        .iter()
        .map(|n| {
            // Precedence stores some numbers as u32::MAX minus the number, so that larger ones come
            // first.
            if *n > u32::MAX / 2 {
                format!("-{}", u32::MAX - n)
            } else {
                n.to_string()
            }
        })
        .collect();
    shown.join(",")
}

/// Formats the origin of a rule, without its tenant.
pub fn origin(key: &RouteKey) -> String {
    format!("{} {}/{} {}", key.kind, key.namespace, key.name, key.rule)
}

/// Formats hosts with a space after them; returns an empty text for any host.
pub fn hosts(hosts: &[HostMatch]) -> String {
    if hosts.is_empty() {
        return String::new();
    }
    let shown: Vec<String> = hosts.iter().map(|it| host(Some(it))).collect();
    format!("host {} ", shown.join("|"))
}

/// Formats one host; `None` is any host.
pub fn host(host: Option<&HostMatch>) -> String {
    match host {
        Some(HostMatch::Exact(name)) => name.clone(),
        Some(HostMatch::Suffix(domain)) => format!("*{domain}"),
        None => "any host".to_owned(),
    }
}

/// Formats a condition on the path.
pub fn path_match(path: &PathMatch) -> String {
    match path {
        PathMatch::Exact(path) => format!("path = {path:?}"),
        PathMatch::ElementPrefix(path) => format!("path under {path:?}"),
        PathMatch::StringPrefix(path) => format!("path from {path:?}"),
        PathMatch::Regex(pattern) => format!("path ~ {pattern:?}"),
    }
}

pub fn http_match(http: &HttpMatch) -> String {
    let mut parts = vec![path_match(&http.path)];
    parts.extend(
        http.method
            .iter()
            .map(|method| format!("method = {method}")),
    );
    parts.extend(
        http.headers
            .iter()
            .map(|header| condition("header", header)),
    );
    parts.extend(
        http.query
            .iter()
            .map(|parameter| condition("query", parameter)),
    );
    parts.join(", ")
}

/// Formats a condition on a header or a query parameter, which `what` names.
pub fn condition(what: &str, condition: &ValueMatch) -> String {
    let value = text(&condition.value);
    match ClientAttribute::of_name(&condition.name) {
        Some(ClientAttribute::Scheme) => format!("scheme {value}"),
        Some(ClientAttribute::SourceNamespace) => format!("client's namespace {value}"),
        Some(ClientAttribute::SourceLabel(key)) => format!("client's label {key} {value}"),
        None => format!("{what} {} {value}", condition.name),
    }
}

fn text(condition: &TextMatch) -> String {
    match condition {
        TextMatch::Exact(value) => format!("= {value:?}"),
        TextMatch::Prefix(value) => format!("from {value:?}"),
        TextMatch::Regex(value) => format!("~ {value:?}"),
        TextMatch::Present => "present".to_owned(),
        TextMatch::Not(unwanted) => format!("not {}", text(unwanted)),
    }
}

/// Formats all that a rule does with its requests beside its action, with a comma before each.
pub fn effects(rule: &RouteRule) -> String {
    filters(rule.filters.as_deref())
        + &attempts(rule.attempts.as_deref())
        + &faults(rule.faults.as_deref())
        + &cors(rule.cors.as_deref())
        + &mirrors(&rule.mirrors)
}

/// Formats the filters of a rule or backend, with a comma before each; returns an empty text for
/// none.
fn filters(filters: Option<&RouteFilters>) -> String {
    let Some(filters) = filters else {
        return String::new();
    };
    let authorizer = filters.authorizer.as_deref();
    let mut text = authorizer.map_or_else(String::new, |it| format!(", {}", checked_by(it)));
    text += &header_changes("request", &filters.request_headers);
    text += &header_changes("response", &filters.response_headers);
    if let Some(host) = &filters.rewrite.host {
        text += &format!(", host becomes {host:?}");
    }
    if let Some(regex) = &filters.rewrite.path_regex {
        let (pattern, substitution) = (&regex.pattern, &regex.substitution);
        text += &format!(", what {pattern:?} matches in the path becomes {substitution:?}");
    }
    text + &path_change(filters.rewrite.path.as_ref())
}

/// Formats a filter of a listener.
pub fn listener_filter(filter: &ListenerFilter) -> String {
    match filter {
        ListenerFilter::Authorize(authorizer) => checked_by(authorizer),
        ListenerFilter::Refuse => "refuse 500".to_owned(),
    }
}

/// Formats the authorizer of a rule or a listener.
fn checked_by(authorizer: &RouteAuthorizer) -> String {
    let RouteAuthorizer {
        service,
        port,
        protocol,
        headers,
        body_bytes,
    } = authorizer;
    let server = format!("{}/{}:{port}", service.namespace, service.name);
    let list = |of: &str, names: &[String]| match names {
        [] => String::new(),
        names => format!(" with {of} headers {}", names.join(" ")),
    };
    let mut text = match protocol {
        RouteAuthorizerProtocol::Grpc => format!("checked by {server} over gRPC"),
        RouteAuthorizerProtocol::Http {
            path_prefix,
            response_headers,
        } => {
            let listed = list("response", response_headers);
            format!("checked by {server} over HTTP below {path_prefix:?}{listed}")
        }
    };
    text += &list("request", headers);
    if *body_bytes > 0 {
        text += &format!(" and bodies of {body_bytes} bytes");
    }
    text
}

fn header_changes(of: &str, headers: &HeaderModifier) -> String {
    let mut text = String::new();
    for name in &headers.remove {
        text += &format!(", {of} header {name} removed");
    }
    for (name, value) in &headers.set {
        text += &format!(", {of} header {name} set to {value:?}");
    }
    for (name, value) in &headers.add {
        text += &format!(", {of} header {name} added {value:?}");
    }
    text
}

/// Formats the timeouts and retries of a rule, with a comma before each; returns an empty text for
/// none.
pub fn attempts(policy: Option<&AttemptPolicy>) -> String {
    let Some(attempts) = policy else {
        return String::new();
    };
    let RouteTimeouts {
        request,
        attempt,
        span,
    } = attempts.timeouts;
    let of = match span {
        TimeoutSpan::Whole => "",
        TimeoutSpan::AfterRequest => " after the body",
    };
    let mut text = String::new();
    if let Some(time) = request {
        text += &format!(", timeout {time:?}{of}");
    }
    if let Some(time) = attempt {
        text += &format!(", timeout of an attempt {time:?}{of}");
    }
    match &attempts.retries {
        None => text,
        Some(retries) if retries.max == 0 => text + ", no retries",
        Some(retries) => {
            let conditions = retries.on.iter().map(|it| it.name().to_owned());
            let statuses = retries.statuses.iter().map(u16::to_string);
            let on: Vec<String> = conditions.chain(statuses).collect();
            let RetryBackoff { base, max, jitter } = retries.backoff;
            let least = match jitter {
                BackoffJitter::Full => "up to ",
                BackoffJitter::AboveBase => "",
            };
            let (most, on) = (retries.max, on.join(","));
            text + &format!(", {most} retries on {on} after {least}{base:?} growing to {max:?}")
        }
    }
}

/// Formats the faults of a rule, with a comma before each; returns an empty text for none.
pub fn faults(policy: Option<&FaultPolicy>) -> String {
    let Some(FaultPolicy { delay, abort }) = policy else {
        return String::new();
    };
    let mut text = String::new();
    if let Some(delay) = delay {
        text += &format!(", delay {:?} for {}", delay.time, percent(delay.fraction));
    }
    if let Some(abort) = abort {
        let status = match abort.status {
            AbortStatus::Http(status) => status.to_string(),
            AbortStatus::Grpc(status) => format!("gRPC {status}"),
        };
        text += &format!(", abort with {status} for {}", percent(abort.fraction));
    }
    text
}

/// Formats cross-origin resource sharing, with a comma before it; returns an empty text for none.
pub fn cors(policy: Option<&CorsPolicy>) -> String {
    let Some(policy) = policy else {
        return String::new();
    };
    let origins = policy.origins.iter().map(|origin| match origin {
        OriginMatch::Any => "any".to_owned(),
        OriginMatch::Exact(text) => format!("= {text:?}"),
        OriginMatch::Prefix(text) => format!("from {text:?}"),
        OriginMatch::Regex(pattern) => format!("~ {pattern:?}"),
        OriginMatch::Host { scheme, host, port } => {
            let host = match host {
                OriginHost::Any => "*".to_owned(),
                OriginHost::Exact(name) => name.clone(),
                OriginHost::Suffix(end) => format!("*{end}"),
            };
            format!("{}://{host}:{port}", scheme.text())
        }
    });
    let mut text = format!(", origins {}", list(&origins.collect::<Vec<_>>()));
    for (what, names) in [("methods", &policy.methods), ("headers", &policy.headers)] {
        text += &match names {
            CorsList::Unnamed => String::new(),
            CorsList::Requested => format!(" {what} as requested"),
            CorsList::Listed(names) => format!(" {what} {names}"),
        };
    }
    if let Some(names) = &policy.exposed {
        text += &format!(" exposed {names}");
    }
    if let Some(seconds) = policy.max_age {
        text += &format!(" for {seconds}s");
    }
    // False is the default, so only the exception is shown.
    if policy.credentials {
        text += " with credentials";
    }
    text + match policy.dialect {
        CorsDialect::GatewayApi => "",
        CorsDialect::IstioForward => ", other preflights forwarded",
        CorsDialect::IstioIgnore => ", other preflights answered",
    }
}

/// Formats the mirrors of a rule, with a comma before each.
pub fn mirrors(mirrors: &[RouteMirror]) -> String {
    let mirrors = mirrors.iter().map(|mirror| {
        let to = backend(&Backend {
            weight: 1,
            target: mirror.target.clone(),
            filters: None,
        });
        let to = to.strip_prefix("1 ").unwrap_or(&to);
        let from = mirror
            .backend
            .map_or(String::new(), |at| format!(" of backend {at}"));
        format!(", {}{from} copied to {to}", percent(mirror.fraction))
    });
    mirrors.collect()
}

fn percent(fraction: RequestFraction) -> String {
    format!("{}%", f64::from(fraction.millionths()) / 10_000.0)
}

/// Formats one match of a rule with what the rule does, as the IR lists it.
pub fn match_of_rule(rule: &RouteRule, http: &HttpMatch) -> String {
    format!(
        "{} => {}{} [{}]",
        http_match(http),
        action(&rule.action),
        effects(rule),
        origin(&rule.key)
    )
}

/// Formats the action of a rule.
pub fn action(action: &RouteAction) -> String {
    match action {
        RouteAction::Refuse { status, reason } => format!("refuse {status} ({reason})"),
        RouteAction::Answer(answer) => self::answer(answer),
        RouteAction::Split(backends) => {
            backends.iter().map(backend).collect::<Vec<_>>().join(" + ")
        }
    }
}

fn answer(answer: &RouteAnswer) -> String {
    let redirect = match answer {
        RouteAnswer::Direct(direct) => {
            let body = String::from_utf8_lossy(&direct.body);
            return format!("answer {} {body:?}", direct.status);
        }
        RouteAnswer::Redirect(redirect) => redirect,
    };
    let mut text = format!("redirect {}", redirect.status);
    if let Some(scheme) = redirect.scheme {
        text += &format!(", scheme becomes {}", scheme.text());
    }
    if let Some(host) = &redirect.host {
        text += &format!(", host becomes {host:?}");
    }
    text += &match redirect.port {
        RedirectPort::OfHost => String::new(),
        RedirectPort::Dialled => ", port becomes the dialled one".to_owned(),
        RedirectPort::OfScheme => ", port becomes the scheme's".to_owned(),
        RedirectPort::Number(port) => format!(", port becomes {port}"),
    };
    text += &path_change(redirect.path.as_ref());
    if let Some(query) = &redirect.query {
        text += &format!(", query becomes {query:?}");
    }
    text
}

fn path_change(path: Option<&PathRewrite>) -> String {
    match path {
        Some(PathRewrite::Full(path)) => format!(", path becomes {path:?}"),
        Some(PathRewrite::Prefix(path)) => format!(", prefix becomes {path:?}"),
        None => String::new(),
    }
}

/// Formats the labels of a subset behind what it is a subset of; empty without labels.
pub fn subset_suffix(subset: &Labels) -> String {
    let labels: Vec<String> = subset.iter().map(|(k, v)| format!("{k}={v}")).collect();
    if labels.is_empty() {
        String::new()
    } else {
        format!(" with {}", labels.join(","))
    }
}

/// Formats a backend with its weight.
pub fn backend(backend: &Backend) -> String {
    let weight = backend.weight;
    match &backend.target {
        BackendTarget::Service {
            service,
            port,
            subset,
        } => {
            let subset = subset_suffix(subset);
            let changes = filters(backend.filters.as_deref());
            let changes = match changes.strip_prefix(", ") {
                Some(changes) => format!(" ({changes})"),
                None => String::new(),
            };
            format!(
                "{weight} {}/{}:{port}{subset}{changes}",
                service.namespace, service.name
            )
        }
        BackendTarget::Refuse { status, reason } => format!("{weight} refuse {status} ({reason})"),
    }
}

pub fn list<T: Display>(items: &[T]) -> String {
    if items.is_empty() {
        return "none".to_owned();
    }
    items
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(",")
}
