//! Converts `canal_model::program` to wire messages. Encoding cannot fail, because the model's
//! values are valid.

use canal_model::client_attributes::is_client_attribute;
use canal_model::ids::ServiceKey;
use canal_model::program as p;

use super::{consumer_rule, encode_trust, route_answers};
use crate::program as w;

impl From<&p::Tenant> for w::Tenant {
    fn from(t: &p::Tenant) -> Self {
        let outside = match t.outbound_traffic_policy {
            p::OutboundTrafficPolicy::Deny => w::tenant::OutboundTrafficPolicy::Deny,
            p::OutboundTrafficPolicy::Passthrough => w::tenant::OutboundTrafficPolicy::Passthrough,
        };
        Self {
            name: t.name.to_string(),
            vni: t.vni.get(),
            trust_domain: t.trust_domain.to_string(),
            pod_cidrs: t.pod_cidrs.iter().map(ToString::to_string).collect(),
            gateway_cidrs: t.gateway_cidrs.iter().map(ToString::to_string).collect(),
            outbound_traffic_policy: outside.into(),
            keys: encode_trust::key_policy(&t.keys),
            shares: t
                .shares
                .iter()
                .map(|(kind, share)| (kind.key().to_owned(), share.to_string()))
                .collect(),
            resolvers: t.resolvers.iter().map(ToString::to_string).collect(),
        }
    }
}

impl From<&p::GatewayReplica> for w::Gateway {
    fn from(g: &p::GatewayReplica) -> Self {
        Self {
            tenant: g.tenant.to_string(),
            replica: g.replica.to_string(),
            az: g.az.to_string(),
            addresses: g.addresses.iter().map(ToString::to_string).collect(),
            draining: g.draining,
        }
    }
}

pub(super) fn host(host: &p::HostMatch) -> w::HostMatch {
    use w::host_match::Host;
    w::HostMatch {
        host: Some(match host {
            p::HostMatch::Exact(name) => Host::Exact(name.clone()),
            p::HostMatch::Suffix(domain) => Host::Suffix(domain.clone()),
        }),
    }
}

pub(super) fn key(k: &ServiceKey) -> Option<w::ServiceKey> {
    Some(w::ServiceKey {
        tenant: k.tenant.to_string(),
        namespace: k.namespace.to_string(),
        name: k.name.to_string(),
    })
}

fn protocol(a: p::AppProtocol) -> w::AppProtocol {
    match a {
        p::AppProtocol::Detect => w::AppProtocol::Detect,
        p::AppProtocol::Http1 => w::AppProtocol::Http1,
        p::AppProtocol::Http2 => w::AppProtocol::Http2,
        p::AppProtocol::Grpc => w::AppProtocol::Grpc,
        p::AppProtocol::Tcp => w::AppProtocol::Tcp,
    }
}

fn upstream_pool(pool: p::UpstreamPool) -> w::UpstreamPool {
    match pool {
        p::UpstreamPool::Shared => w::UpstreamPool::Shared,
        p::UpstreamPool::PerClient => w::UpstreamPool::PerClient,
    }
}

fn policy_paths(paths: p::PolicyPaths) -> w::PolicyPaths {
    match paths {
        p::PolicyPaths::Strict => w::PolicyPaths::Strict,
        p::PolicyPaths::Legacy => w::PolicyPaths::Legacy,
    }
}

impl From<&p::Service> for w::Service {
    fn from(s: &p::Service) -> Self {
        Self {
            key: key(&s.key),
            id: s.id.get(),
            hostname: s.hostname.clone(),
            vips: s.vips.iter().map(ToString::to_string).collect(),
            ports: s
                .ports
                .iter()
                .map(|x| w::ServicePort {
                    port: x.port.into(),
                    name: x.name.clone(),
                    protocol: protocol(x.protocol).into(),
                })
                .collect(),
            upstream_pool: upstream_pool(s.upstream_pool).into(),
            policy_paths: policy_paths(s.policy_paths).into(),
            load_balancers: s.load_balancers.iter().map(Into::into).collect(),
        }
    }
}

fn labels(l: &p::Labels) -> p::Labels {
    l.clone()
}

impl From<&p::Workload> for w::Workload {
    fn from(x: &p::Workload) -> Self {
        let tunnel = match x.tunnel {
            p::TunnelProtocol::Hbone => w::workload::TunnelProtocol::Hbone,
            p::TunnelProtocol::None => w::workload::TunnelProtocol::None,
        };
        Self {
            tenant: x.tenant.to_string(),
            namespace: x.namespace.to_string(),
            name: x.name.to_string(),
            service_account: x.service_account.to_string(),
            node: x.node.to_string(),
            az: x.az.to_string(),
            addresses: x.addresses.iter().map(ToString::to_string).collect(),
            labels: labels(&x.labels),
            ready: x.ready,
            tunnel_protocol: tunnel.into(),
            endpoints: x
                .endpoints
                .iter()
                .map(|e| w::EndpointPort {
                    service: key(&e.service),
                    port: e.port.into(),
                    target_port: e.target_port.into(),
                })
                .collect(),
            udp_ports: x.udp_ports.iter().copied().map(u32::from).collect(),
        }
    }
}

impl From<&p::DirectEndpoint> for w::DirectEndpoint {
    fn from(d: &p::DirectEndpoint) -> Self {
        Self {
            tenant: d.tenant.to_string(),
            namespace: d.namespace.to_string(),
            name: d.name.to_string(),
            service_account: d.service_account.to_string(),
            az: d.az.to_string(),
            addresses: d.addresses.iter().map(ToString::to_string).collect(),
            serves: d
                .serves
                .iter()
                .map(|s| w::DirectPort {
                    service: key(&s.service),
                    port: s.port.into(),
                })
                .collect(),
            own_ports: d.own_ports.iter().copied().map(u32::from).collect(),
        }
    }
}

fn text(t: &p::TextMatch) -> w::TextMatch {
    use w::text_match::Text;
    let text = match t {
        p::TextMatch::Exact(s) => Text::Exact(s.clone()),
        p::TextMatch::Prefix(s) => Text::Prefix(s.clone()),
        p::TextMatch::Regex(s) => Text::Regex(s.clone()),
        p::TextMatch::Present => Text::Present(true),
        p::TextMatch::Not(unwanted) => Text::Not(Box::new(self::text(unwanted))),
    };
    w::TextMatch { text: Some(text) }
}

fn values(v: &[p::ValueMatch]) -> Vec<w::ValueMatch> {
    v.iter()
        .map(|m| {
            let value = text(&m.value);
            let value = if is_client_attribute(&m.name) {
                let text = w::text_match::Text::OfClient(Box::new(value));
                w::TextMatch { text: Some(text) }
            } else {
                value
            };
            w::ValueMatch {
                name: m.name.clone(),
                value: Some(value),
            }
        })
        .collect()
}

pub(super) fn http_match(m: &p::HttpMatch) -> w::HttpMatch {
    use w::path_match::Path;
    let path = match &m.path {
        p::PathMatch::Exact(s) => Path::Exact(s.clone()),
        p::PathMatch::ElementPrefix(s) => Path::ElementPrefix(s.clone()),
        p::PathMatch::StringPrefix(s) => Path::StringPrefix(s.clone()),
        p::PathMatch::Regex(s) => Path::Regex(s.clone()),
    };
    let c = &m.precedence;
    w::HttpMatch {
        precedence: Some(w::Precedence {
            class: c.class.into(),
            specificity: c.specificity.to_vec(),
            created: c.created,
            object: c.object.clone(),
            position: c.indexes.to_vec(),
        }),
        path: Some(w::PathMatch { path: Some(path) }),
        method: m.method.clone().unwrap_or_default(),
        headers: values(&m.headers),
        query: values(&m.query),
    }
}

fn refuse(status: u16, reason: &str) -> w::Refuse {
    w::Refuse {
        status: status.into(),
        reason: reason.into(),
    }
}

pub(super) fn backend(b: &p::Backend) -> w::Backend {
    use w::backend::Target;
    let target = match &b.target {
        p::BackendTarget::Service {
            service,
            port,
            subset,
        } => {
            let service = w::ServiceTarget {
                service: key(service),
                port: (*port).into(),
                subset: labels(subset),
            };
            match &b.filters {
                None => Target::Service(service),
                Some(filters) => Target::FilteredService(w::FilteredTarget {
                    service: Some(service),
                    filters: Some(w::RouteFilters::from(&**filters)),
                }),
            }
        }
        p::BackendTarget::Refuse { status, reason } => Target::Refuse(refuse(*status, reason)),
    };
    w::Backend {
        weight: b.weight,
        target: Some(target),
    }
}

impl From<&p::RouteRule> for w::Route {
    fn from(r: &p::RouteRule) -> Self {
        use w::route::Action;
        if let Some(namespace) = &r.consumer {
            return consumer_rule::encode(r, namespace);
        }
        let action = match &r.action {
            p::RouteAction::Split(b) => {
                let split = w::Split {
                    backends: b.iter().map(backend).collect(),
                };
                match &r.filters {
                    // First, because an extended action contains a strict split: a data plane that
                    // knows the one knows the other.
                    filters if is_extended(r) => extended(
                        r,
                        w::extended_action::Action::Split(w::StrictSplit {
                            split: Some(split),
                            filters: filters.as_deref().map(w::RouteFilters::from),
                        }),
                    ),
                    // Before the others, because a strict rule may have filters or none.
                    filters if is_strict(r) => Action::StrictSplit(w::StrictSplit {
                        split: Some(split),
                        filters: filters.as_deref().map(w::RouteFilters::from),
                    }),
                    None => Action::Split(split),
                    // An action of its own: a data plane that does not know filters refuses the
                    // rule and forwards nothing.
                    Some(filters) => Action::FilteredSplit(w::FilteredSplit {
                        split: Some(split),
                        filters: Some(w::RouteFilters::from(&**filters)),
                    }),
                }
            }
            p::RouteAction::Answer(answer) => {
                let answer = route_answers::encode(answer, r.filters.as_deref());
                if is_extended(r) {
                    extended(r, w::extended_action::Action::Answer(answer))
                } else {
                    Action::Answer(answer)
                }
            }
            p::RouteAction::Refuse { status, reason } => Action::Refuse(refuse(*status, reason)),
        };
        Self {
            key: Some(w::RouteKey {
                tenant: r.key.tenant.to_string(),
                kind: r.key.kind.clone(),
                namespace: r.key.namespace.to_string(),
                name: r.key.name.to_string(),
                rule: r.key.rule.clone(),
            }),
            parent: key(&r.parent),
            // 0 stands for all ports of the service.
            parent_port: r.parent_port.unwrap_or(0).into(),
            hosts: r.hosts.iter().map(host).collect(),
            matches: r.matches.iter().map(http_match).collect(),
            action: Some(action),
            attempts: r.attempts.as_deref().map(w::AttemptPolicy::from),
            faults: r.faults.as_deref().map(w::FaultPolicy::from),
            cors: r.cors.as_deref().map(w::CorsPolicy::from),
            mirrors: mirrors(r, |mirror| mirror.backend.is_none()),
            backend_mirrors: mirrors(r, |mirror| mirror.backend.is_some()),
            consumer: None,
        }
    }
}

fn mirrors(rule: &p::RouteRule, is_wanted: fn(&p::RouteMirror) -> bool) -> Vec<w::RouteMirror> {
    let mirrors = rule.mirrors.iter().filter(|mirror| is_wanted(mirror));
    mirrors.map(w::RouteMirror::from).collect()
}

/// Returns whether the rule has parts for which data planes need to know the extended action.
fn is_extended(rule: &p::RouteRule) -> bool {
    let of_backends = match &rule.action {
        p::RouteAction::Split(backends) => backends.as_slice(),
        p::RouteAction::Answer(_) | p::RouteAction::Refuse { .. } => &[],
    };
    let of_backends = of_backends.iter().map(|backend| &backend.filters);
    let mut filters = of_backends.chain([&rule.filters]).flatten();
    filters.any(|filters| filters.rewrite.path_regex.is_some() || filters.authorizer.is_some())
}

fn extended(rule: &p::RouteRule, action: w::extended_action::Action) -> w::route::Action {
    let authorizer = rule
        .filters
        .as_deref()
        .and_then(|it| it.authorizer.as_deref());
    w::route::Action::Extended(w::ExtendedAction {
        action: Some(action),
        authorizer: authorizer.map(w::RouteAuthorizer::from),
    })
}

/// Returns whether a data plane must know more fields of the rule than its action and filters.
fn is_strict(rule: &p::RouteRule) -> bool {
    let faults = rule.faults.as_deref();
    rule.cors.is_some() || faults.is_some_and(|faults| faults.abort.is_some())
}
