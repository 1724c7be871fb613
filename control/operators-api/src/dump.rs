//! The controller's state as JSON for operators and scripts: `/config_dump` on the admin socket. It
//! contains no secrets, neither tokens nor keys.

use std::net::IpAddr;
use std::time::Duration;

use canal_catalog::{Catalog, EncodedResource, TenantCatalog};
use canal_model::program::{
    AppProtocol, Backend, BackendTarget, HostMatch, HttpMatch, PathMatch, Resource, RouteAction,
    RouteMirror, TextMatch, ValueMatch,
};
use canal_model::route_attempts::{AttemptPolicy, RetryCondition, TimeoutSpan};
use canal_model::route_authorizer::{RouteAuthorizer, RouteAuthorizerProtocol};
use canal_model::route_cors::{CorsList, CorsPolicy, OriginHost, OriginMatch};
use canal_model::route_faults::{AbortStatus, FaultPolicy};
use canal_model::route_filters::{
    HeaderModifier, PathRewrite, RedirectPort, RouteAnswer, RouteFilters, UrlScheme,
};
use canal_wire::api;
use serde_json::{Value, json};

/// Returns the state of all tenants, or of the tenant `only`, and of the subscribers.
pub(crate) fn catalog(
    catalog: &Catalog,
    only: Option<&str>,
    subscribers: &[api::Subscriber],
) -> Value {
    let tenants: serde_json::Map<String, Value> = catalog
        .tenants
        .iter()
        .filter(|(name, _)| only.is_none_or(|o| o == name.as_str()))
        .map(|(name, view)| (name.to_string(), tenant(view)))
        .collect();
    json!({
        "generation": catalog.generation.0,
        "tenants": tenants,
        // The provider's resources are only in a dump of all tenants.
        "tier": catalog.provider.iter().filter(|_| only.is_none()).flat_map(|v| v.entries.values()).map(|e| entry(e)).collect::<Vec<_>>(),
        "subscribers": subscribers.iter().map(subscriber).collect::<Vec<_>>(),
    })
}

fn tenant(view: &TenantCatalog) -> Value {
    json!({
        "changed": view.changed.0,
        "complete": view.complete,
        "resources": view.entries.values().map(|e| entry(e)).collect::<Vec<_>>(),
        "findings": view.diagnostics.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

fn subscriber(s: &api::Subscriber) -> Value {
    json!({
        "kind": s.kind, "name": s.name, "tenant": s.tenant, "az": s.az, "connected": s.connected,
        "wanted": s.generation_wanted, "sent": s.generation_sent, "acked": s.generation_acked, "nack": s.nack,
        "resources": s.resources, "bytesSent": s.bytes_sent, "responsesSent": s.responses_sent, "nacks": s.nacks,
        "reconnects": s.reconnects, "version": s.version,
    })
}

fn entry(e: &EncodedResource) -> Value {
    json!({
        "kind": e.resource.kind().label(),
        "name": &*e.name,
        "version": e.version.to_string(),
        "changed": e.changed.0,
        "bytes": e.body.len(),
        "content": resource(&e.resource),
    })
}

fn addresses(a: &[IpAddr]) -> Vec<String> {
    a.iter().map(ToString::to_string).collect()
}

fn resource(r: &Resource) -> Value {
    match r {
        Resource::Tenant(t) => json!({
            "vni": t.vni.get(), "trustDomain": t.trust_domain, "outside": format!("{:?}", t.outbound_traffic_policy),
            "podCidrs": t.pod_cidrs.iter().map(ToString::to_string).collect::<Vec<_>>(),
        }),
        Resource::GatewayReplica(g) => {
            json!({ "az": g.az, "addresses": addresses(&g.addresses), "draining": g.draining })
        }
        Resource::Service(s) => json!({
            "id": s.id.get(), "hostname": s.hostname, "vips": addresses(&s.vips),
            "ports": s.ports.iter().map(|p| json!({ "port": p.port, "name": p.name, "protocol": protocol(p.protocol) })).collect::<Vec<_>>(),
        }),
        Resource::Workload(w) => json!({
            "serviceAccount": w.service_account, "node": w.node, "az": w.az, "addresses": addresses(&w.addresses), "labels": w.labels,
            "ready": w.ready, "tunnel": format!("{:?}", w.tunnel),
            "endpoints": w.endpoints.iter().map(|e| json!({ "service": e.service.to_string(), "port": e.port, "targetPort": e.target_port })).collect::<Vec<_>>(),
        }),
        Resource::Route(r) => json!({
            "parent": r.parent.to_string(), "port": r.parent_port, "consumer": r.consumer.as_ref().map(ToString::to_string), "hosts": r.hosts.iter().map(host).collect::<Vec<_>>(),
            "matches": r.matches.iter().map(http_match).collect::<Vec<_>>(), "action": action(&r.action),
            "filters": r.filters.as_deref().map(filters),
            "attempts": r.attempts.as_deref().map(attempts),
            "faults": r.faults.as_deref().map(faults),
            "cors": r.cors.as_deref().map(cors),
            "mirrors": r.mirrors.iter().map(mirror).collect::<Vec<_>>(),
        }),
        Resource::Node(n) => json!({
            "az": n.az, "underlay": n.underlay.to_string(), "podCidrs": n.pod_cidrs.iter().map(ToString::to_string).collect::<Vec<_>>(),
        }),
        Resource::Replica(r) => json!({
            "number": r.number.get(), "backend": r.backend, "az": r.az, "underlay": r.underlay.to_string(), "up": r.up,
        }),
        Resource::Address(a) => {
            json!({ "id": a.id.get(), "az": a.az, "addresses": addresses(&a.addresses), "open": a.open })
        }
        Resource::Table(t) => json!({
            "id": t.id.get(), "az": t.az, "version": t.version,
            "chains": t.chains.iter().map(|c| c.iter().map(|n| n.get()).collect::<Vec<_>>()).collect::<Vec<_>>(),
        }),
        Resource::Throttle(t) => json!({
            "service": t.service.as_ref().map(ToString::to_string),
            "sessions": [t.sessions.per_second, t.sessions.burst], "packets": [t.packets.per_second, t.packets.burst],
            "requests": [t.requests.per_second, t.requests.burst],
        }),
        // The remaining kinds are shown in the compiler's text form.
        other => json!({ "text": canal_compiler::text::resource(other) }),
    }
}

fn protocol(p: AppProtocol) -> &'static str {
    match p {
        AppProtocol::Detect => "detect",
        AppProtocol::Http1 => "http1",
        AppProtocol::Http2 => "http2",
        AppProtocol::Grpc => "grpc",
        AppProtocol::Tcp => "tcp",
    }
}

fn host(h: &HostMatch) -> String {
    match h {
        HostMatch::Exact(s) => s.clone(),
        HostMatch::Suffix(s) => format!("*{s}"),
    }
}

fn http_match(m: &HttpMatch) -> Value {
    let path = match &m.path {
        PathMatch::Exact(s) => json!({ "exact": s }),
        PathMatch::ElementPrefix(s) => json!({ "elementPrefix": s }),
        PathMatch::StringPrefix(s) => json!({ "stringPrefix": s }),
        PathMatch::Regex(s) => json!({ "regex": s }),
    };
    let values = |v: &[ValueMatch]| {
        v.iter()
            .map(|v| json!({ "name": v.name, "value": text(&v.value) }))
            .collect::<Vec<_>>()
    };
    let p = &m.precedence;
    json!({
        "path": path, "method": m.method, "headers": values(&m.headers), "query": values(&m.query),
        "precedence": json!([p.class, p.specificity, p.created, p.object, p.indexes]),
    })
}

fn text(t: &TextMatch) -> Value {
    match t {
        TextMatch::Exact(s) => json!({ "exact": s }),
        TextMatch::Prefix(s) => json!({ "prefix": s }),
        TextMatch::Regex(s) => json!({ "regex": s }),
        TextMatch::Present => json!("present"),
        TextMatch::Not(unwanted) => json!({ "not": text(unwanted) }),
    }
}

fn filters(filters: &RouteFilters) -> Value {
    let modifier = |headers: &HeaderModifier| {
        let pairs = |pairs: &[(String, String)]| {
            let pairs = pairs
                .iter()
                .map(|(name, value)| json!({ "name": name, "value": value }));
            pairs.collect::<Vec<_>>()
        };
        json!({ "set": pairs(&headers.set), "add": pairs(&headers.add), "remove": headers.remove })
    };
    let path = filters.rewrite.path.as_ref().map(path_change);
    let path_regex = filters.rewrite.path_regex.as_ref();
    let path_regex =
        path_regex.map(|it| json!({ "pattern": it.pattern, "substitution": it.substitution }));
    json!({
        "requestHeaders": modifier(&filters.request_headers),
        "responseHeaders": modifier(&filters.response_headers),
        "authorizer": filters.authorizer.as_deref().map(authorizer),
        "rewrite": { "host": filters.rewrite.host, "path": path, "pathRegex": path_regex },
    })
}

fn authorizer(authorizer: &RouteAuthorizer) -> Value {
    let protocol = match &authorizer.protocol {
        RouteAuthorizerProtocol::Grpc => json!("grpc"),
        RouteAuthorizerProtocol::Http {
            path_prefix,
            response_headers,
        } => json!({ "pathPrefix": path_prefix, "responseHeaders": response_headers }),
    };
    json!({
        "service": authorizer.service.to_string(),
        "port": authorizer.port,
        "protocol": protocol,
        "headers": authorizer.headers,
        "bodyBytes": authorizer.body_bytes,
    })
}

fn attempts(policy: &AttemptPolicy) -> Value {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let timeouts = &policy.timeouts;
    let retries = policy.retries.as_ref().map(|retries| {
        let backoff = retries.backoff;
        json!({
            "max": retries.max,
            "on": retries.on.iter().map(RetryCondition::name).collect::<Vec<_>>(),
            "statuses": retries.statuses,
            "backoffMs": [millis(backoff.base), millis(backoff.max)],
        })
    });
    json!({
        "requestTimeoutMs": timeouts.request.map(millis),
        "attemptTimeoutMs": timeouts.attempt.map(millis),
        "span": match timeouts.span {
            TimeoutSpan::Whole => "whole",
            TimeoutSpan::AfterRequest => "after request",
        },
        "retries": retries,
    })
}

fn faults(policy: &FaultPolicy) -> Value {
    let delay = policy.delay.map(|delay| {
        let time = u64::try_from(delay.time.as_millis()).unwrap_or(u64::MAX);
        json!({ "timeMs": time, "millionths": delay.fraction.millionths() })
    });
    let abort = policy.abort.map(|abort| {
        let status = match abort.status {
            AbortStatus::Http(status) => json!({ "http": status }),
            AbortStatus::Grpc(status) => json!({ "grpc": status }),
        };
        json!({ "status": status, "millionths": abort.fraction.millionths() })
    });
    json!({ "delay": delay, "abort": abort })
}

fn cors(policy: &CorsPolicy) -> Value {
    let list = |list: &CorsList| match list {
        CorsList::Unnamed => Value::Null,
        CorsList::Requested => "*".into(),
        CorsList::Listed(names) => names.as_str().into(),
    };
    let origins = policy.origins.iter().map(|origin| match origin {
        OriginMatch::Any => json!("*"),
        OriginMatch::Exact(text) => json!({ "exact": text }),
        OriginMatch::Prefix(text) => json!({ "prefix": text }),
        OriginMatch::Regex(text) => json!({ "regex": text }),
        OriginMatch::Host { scheme, host, port } => {
            let host = match host {
                OriginHost::Any => "*".to_owned(),
                OriginHost::Exact(name) => name.clone(),
                OriginHost::Suffix(end) => format!("*{end}"),
            };
            json!({ "scheme": scheme.text(), "host": host, "port": port })
        }
    });
    json!({
        "origins": origins.collect::<Vec<_>>(),
        "methods": list(&policy.methods),
        "headers": list(&policy.headers),
        "exposed": policy.exposed,
        "maxAgeSeconds": policy.max_age,
        "credentials": policy.credentials,
        "dialect": format!("{:?}", policy.dialect),
    })
}

fn mirror(mirror: &RouteMirror) -> Value {
    let (service, port) = match &mirror.target {
        BackendTarget::Service { service, port, .. } => (service.to_string(), *port),
        BackendTarget::Refuse { .. } => return Value::Null,
    };
    json!({
        "service": service,
        "port": port,
        "millionths": mirror.fraction.millionths(),
        "backend": mirror.backend,
    })
}

fn path_change(path: &PathRewrite) -> Value {
    match path {
        PathRewrite::Full(path) => json!({ "full": path }),
        PathRewrite::Prefix(text) => json!({ "prefix": text }),
    }
}

fn action(a: &RouteAction) -> Value {
    match a {
        RouteAction::Refuse { status, reason } => json!({ "refuse": status, "reason": reason }),
        RouteAction::Answer(answer) => match &**answer {
            RouteAnswer::Direct(direct) => json!({ "answer": direct.status, "body": direct.body }),
            RouteAnswer::Redirect(redirect) => json!({
                "redirect": redirect.status,
                "scheme": redirect.scheme.map(UrlScheme::text),
                "host": redirect.host,
                "port": match redirect.port {
                    RedirectPort::OfHost => json!("of host"),
                    RedirectPort::Dialled => json!("dialled"),
                    RedirectPort::OfScheme => json!("of scheme"),
                    RedirectPort::Number(port) => json!(port),
                },
                "path": redirect.path.as_ref().map(path_change),
            }),
        },
        RouteAction::Split(backends) => {
            json!({ "split": backends.iter().map(backend).collect::<Vec<_>>() })
        }
    }
}

fn backend(b: &Backend) -> Value {
    match &b.target {
        BackendTarget::Service {
            service,
            port,
            subset,
        } => {
            json!({
                "weight": b.weight,
                "service": service.to_string(),
                "port": port,
                "subset": subset,
                "filters": b.filters.as_deref().map(filters),
            })
        }
        BackendTarget::Refuse { status, reason } => {
            json!({ "weight": b.weight, "refuse": status, "reason": reason })
        }
    }
}
