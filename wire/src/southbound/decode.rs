//! Converts wire messages to `canal_model::program`. This is the only point where southbound values
//! are validated.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::str::FromStr;

use canal_model::client_attributes::is_client_attribute;
use canal_model::ids::{IdError, ServiceId, ServiceKey, Vni};
use canal_model::limits::{DIRECT_PORTS_PER_WORKLOAD_MAX, UDP_PORTS_PER_WORKLOAD_MAX, WEIGHT_MAX};
use canal_model::program as p;
use canal_model::route_filters::RouteFilters;
use canal_model::share::{ShareFormatError, Shares};
use ipnet::IpNet;

use super::{
    ResourceDecodeError, consumer_rule, decode_trust, load_balancers, route_answers,
    route_attempts, route_authorizer, route_cors, route_faults, route_filters, route_mirrors,
};
use crate::program as w;

/// Carries the resource's name, so that each error names the resource.
pub(super) struct DecodeContext<'a>(pub(super) &'a str);

impl DecodeContext<'_> {
    pub(super) fn err<T>(
        &self,
        field: &'static str,
        why: impl ToString,
    ) -> Result<T, ResourceDecodeError> {
        Err(ResourceDecodeError::Field {
            what: self.0.into(),
            field,
            why: why.to_string(),
        })
    }
    pub(super) fn name<T: FromStr<Err = IdError>>(
        &self,
        field: &'static str,
        s: &str,
    ) -> Result<T, ResourceDecodeError> {
        s.parse().or_else(|e: IdError| self.err(field, e))
    }
    pub(super) fn need<T>(
        &self,
        field: &'static str,
        v: Option<T>,
    ) -> Result<T, ResourceDecodeError> {
        v.map_or_else(|| self.err(field, "is missing"), Ok)
    }
    pub(super) fn port(&self, field: &'static str, n: u32) -> Result<u16, ResourceDecodeError> {
        match u16::try_from(n) {
            Ok(n) if n > 0 => Ok(n),
            _ => self.err(field, format!("{n} is not a port from 1 to 65535")),
        }
    }
    pub(super) fn status(&self, field: &'static str, n: u32) -> Result<u16, ResourceDecodeError> {
        if (400..600).contains(&n) {
            Ok(n as u16)
        } else {
            self.err(field, format!("{n} is not an error status from 400 to 599"))
        }
    }
    pub(super) fn addresses(
        &self,
        field: &'static str,
        v: &[String],
    ) -> Result<Vec<IpAddr>, ResourceDecodeError> {
        v.iter()
            .map(|a| {
                a.parse()
                    .or_else(|_| self.err(field, format!("{a:?} is not an IP address")))
            })
            .collect()
    }
    pub(super) fn cidrs(
        &self,
        field: &'static str,
        v: &[String],
    ) -> Result<Vec<IpNet>, ResourceDecodeError> {
        v.iter()
            .map(|c| {
                c.parse()
                    .or_else(|_| self.err(field, format!("{c:?} is not a CIDR")))
            })
            .collect()
    }
    pub(super) fn key(
        &self,
        field: &'static str,
        k: Option<w::ServiceKey>,
    ) -> Result<ServiceKey, ResourceDecodeError> {
        let k = self.need(field, k)?;
        Ok(ServiceKey {
            tenant: self.name(field, &k.tenant)?,
            namespace: self.name(field, &k.namespace)?,
            name: self.name(field, &k.name)?,
        })
    }
}

pub(super) fn tenant(name: &str, t: w::Tenant) -> Result<p::Tenant, ResourceDecodeError> {
    let at = DecodeContext(name);
    // An unknown number reads as Deny, so it fails closed.
    let outside = match t.outbound_traffic_policy() {
        w::tenant::OutboundTrafficPolicy::Deny => p::OutboundTrafficPolicy::Deny,
        w::tenant::OutboundTrafficPolicy::Passthrough => p::OutboundTrafficPolicy::Passthrough,
    };
    Ok(p::Tenant {
        name: at.name("name", &t.name)?,
        vni: Vni::new(t.vni).or_else(|e| at.err("vni", e))?,
        trust_domain: at.name("trust_domain", &t.trust_domain)?,
        pod_cidrs: at.cidrs("pod_cidrs", &t.pod_cidrs)?,
        gateway_cidrs: at.cidrs("gateway_cidrs", &t.gateway_cidrs)?,
        outbound_traffic_policy: outside,
        keys: decode_trust::key_policy(&at, t.keys)?,
        shares: shares(&at, &t.shares)?,
        resolvers: at.addresses("resolvers", &t.resolvers)?,
    })
}

/// Decodes a tenant's shares. An unknown kind comes from a newer controller and concerns a limit
/// that this build does not have.
fn shares(
    at: &DecodeContext<'_>,
    written: &BTreeMap<String, String>,
) -> Result<Shares, ResourceDecodeError> {
    let mut shares = Shares::default();
    for (key, share) in written {
        let share = share
            .parse()
            .or_else(|e: ShareFormatError| at.err("shares", e))?;
        if let Some(kind) = Shares::kind(key) {
            shares.set(kind, share);
        }
    }
    Ok(shares)
}

pub(super) fn gateway(name: &str, g: w::Gateway) -> Result<p::GatewayReplica, ResourceDecodeError> {
    let at = DecodeContext(name);
    Ok(p::GatewayReplica {
        tenant: at.name("tenant", &g.tenant)?,
        replica: at.name("replica", &g.replica)?,
        az: at.name("az", &g.az)?,
        addresses: at.addresses("addresses", &g.addresses)?,
        draining: g.draining,
    })
}

fn protocol(a: w::AppProtocol) -> p::AppProtocol {
    match a {
        w::AppProtocol::Detect => p::AppProtocol::Detect,
        w::AppProtocol::Http1 => p::AppProtocol::Http1,
        w::AppProtocol::Http2 => p::AppProtocol::Http2,
        w::AppProtocol::Grpc => p::AppProtocol::Grpc,
        w::AppProtocol::Tcp => p::AppProtocol::Tcp,
    }
}

pub(super) fn service(name: &str, s: w::Service) -> Result<p::Service, ResourceDecodeError> {
    let at = DecodeContext(name);
    let ports = s
        .ports
        .iter()
        .map(|x| {
            Ok(p::ServicePort {
                port: at.port("ports.port", x.port)?,
                name: x.name.clone(),
                protocol: protocol(x.protocol()),
            })
        })
        .collect::<Result<_, ResourceDecodeError>>()?;
    let upstream_pool = match s.upstream_pool() {
        w::UpstreamPool::Shared => p::UpstreamPool::Shared,
        w::UpstreamPool::PerClient => p::UpstreamPool::PerClient,
    };
    let policy_paths = match s.policy_paths() {
        w::PolicyPaths::Strict => p::PolicyPaths::Strict,
        w::PolicyPaths::Legacy => p::PolicyPaths::Legacy,
    };
    Ok(p::Service {
        upstream_pool,
        policy_paths,
        load_balancers: load_balancers::decode(&at, &s.load_balancers)?,
        vips: at.addresses("vips", &s.vips)?,
        id: ServiceId::new(s.id).or_else(|e| at.err("id", e))?,
        ports,
        key: at.key("key", s.key)?,
        hostname: s.hostname,
    })
}

pub(super) fn direct_endpoint(
    name: &str,
    d: w::DirectEndpoint,
) -> Result<p::DirectEndpoint, ResourceDecodeError> {
    let at = DecodeContext(name);
    for (field, count) in [("serves", d.serves.len()), ("own_ports", d.own_ports.len())] {
        if count > DIRECT_PORTS_PER_WORKLOAD_MAX {
            return at.err(
                field,
                format!("has {count} ports, more than {DIRECT_PORTS_PER_WORKLOAD_MAX}"),
            );
        }
    }
    // Nodes dial the pod itself, so without an address every connection to it would fail.
    if d.addresses.is_empty() {
        return at.err("addresses", "is empty");
    }
    let mut serves = Vec::with_capacity(d.serves.len());
    for port in d.serves {
        let service = at.key("serves.service", port.service)?;
        // Another tenant's service here would route that tenant's connections to this pod.
        if service.tenant.as_str() != d.tenant {
            return at.err(
                "serves.service",
                format!("{service} belongs to another tenant"),
            );
        }
        serves.push(p::DirectPort {
            service,
            port: at.port("serves.port", port.port)?,
        });
    }
    Ok(p::DirectEndpoint {
        tenant: at.name("tenant", &d.tenant)?,
        namespace: at.name("namespace", &d.namespace)?,
        name: at.name("name", &d.name)?,
        service_account: at.name("service_account", &d.service_account)?,
        az: at.name("az", &d.az)?,
        addresses: at.addresses("addresses", &d.addresses)?,
        serves,
        own_ports: d
            .own_ports
            .iter()
            .map(|n| at.port("own_ports", *n))
            .collect::<Result<_, _>>()?,
        // A node receives the endpoint itself, not the list of nodes that receive it.
        audience: Default::default(),
    })
}

pub(super) fn workload(name: &str, x: w::Workload) -> Result<p::Workload, ResourceDecodeError> {
    let at = DecodeContext(name);
    // An unknown number reads as HBONE, so that no connection is sent unencrypted by mistake.
    let tunnel = match x.tunnel_protocol() {
        w::workload::TunnelProtocol::Hbone => p::TunnelProtocol::Hbone,
        w::workload::TunnelProtocol::None => p::TunnelProtocol::None,
    };
    let endpoints = x
        .endpoints
        .into_iter()
        .map(|e| {
            Ok(p::EndpointPort {
                service: at.key("endpoints.service", e.service)?,
                port: at.port("endpoints.port", e.port)?,
                target_port: at.port("endpoints.target_port", e.target_port)?,
            })
        })
        .collect::<Result<_, ResourceDecodeError>>()?;
    if x.udp_ports.len() > UDP_PORTS_PER_WORKLOAD_MAX {
        return at.err(
            "udp_ports",
            format!(
                "has {} ports, more than {UDP_PORTS_PER_WORKLOAD_MAX}",
                x.udp_ports.len()
            ),
        );
    }
    let udp_ports = x
        .udp_ports
        .iter()
        .map(|n| at.port("udp_ports", *n))
        .collect::<Result<_, ResourceDecodeError>>()?;
    Ok(p::Workload {
        tenant: at.name("tenant", &x.tenant)?,
        namespace: at.name("namespace", &x.namespace)?,
        name: at.name("name", &x.name)?,
        service_account: at.name("service_account", &x.service_account)?,
        node: at.name("node", &x.node)?,
        az: at.name("az", &x.az)?,
        addresses: at.addresses("addresses", &x.addresses)?,
        labels: x.labels,
        ready: x.ready,
        tunnel,
        endpoints,
        udp_ports,
    })
}

fn text(
    at: &DecodeContext<'_>,
    field: &'static str,
    t: Option<w::TextMatch>,
) -> Result<p::TextMatch, ResourceDecodeError> {
    use w::text_match::Text;
    // An absent oneof is a kind of match that this build does not know: matching anything instead
    // would fail open.
    Ok(match at.need(field, t.and_then(|t| t.text))? {
        Text::Exact(s) => p::TextMatch::Exact(s),
        Text::Prefix(s) => p::TextMatch::Prefix(s),
        Text::Regex(s) => p::TextMatch::Regex(s),
        Text::Present(_) => p::TextMatch::Present,
        Text::Not(unwanted) => match self::text(at, field, Some(*unwanted))? {
            p::TextMatch::Not(_) => return at.err(field, "is negated twice"),
            unwanted => p::TextMatch::Not(Box::new(unwanted)),
        },
        // `values` has taken those that stand where they may.
        Text::OfClient(_) => return at.err(field, "is inside another condition, or of a query"),
    })
}

/// Decodes conditions on headers, which may be attributes of the client.
fn headers(
    at: &DecodeContext<'_>,
    v: Vec<w::ValueMatch>,
) -> Result<Vec<p::ValueMatch>, ResourceDecodeError> {
    use w::text_match::Text;
    let field = "matches.headers";
    let decoded = v.into_iter().map(|m| {
        let is_known = is_client_attribute(&m.name);
        let value = match m.value {
            Some(w::TextMatch {
                text: Some(Text::OfClient(value)),
            }) if is_known => Some(*value),
            // Without the attribute, the rule would match more or fewer clients than meant.
            value if is_known != is_of_client(value.as_ref()) => {
                return at.err(field, format!("has the unknown attribute {:?}", m.name));
            }
            value => value,
        };
        let value = text(at, field, value)?;
        Ok(p::ValueMatch {
            name: m.name,
            value,
        })
    });
    decoded.collect()
}

fn is_of_client(value: Option<&w::TextMatch>) -> bool {
    let text = value.and_then(|value| value.text.as_ref());
    matches!(text, Some(w::text_match::Text::OfClient(_)))
}

fn values(
    at: &DecodeContext<'_>,
    field: &'static str,
    v: Vec<w::ValueMatch>,
) -> Result<Vec<p::ValueMatch>, ResourceDecodeError> {
    v.into_iter()
        .map(|m| {
            Ok(p::ValueMatch {
                name: m.name,
                value: text(at, field, m.value)?,
            })
        })
        .collect()
}

fn http_match(
    at: &DecodeContext<'_>,
    m: w::HttpMatch,
) -> Result<p::HttpMatch, ResourceDecodeError> {
    use w::path_match::Path;
    let path = match at.need("matches.path", m.path.and_then(|x| x.path))? {
        Path::Exact(s) => p::PathMatch::Exact(s),
        Path::ElementPrefix(s) => p::PathMatch::ElementPrefix(s),
        Path::StringPrefix(s) => p::PathMatch::StringPrefix(s),
        Path::Regex(s) => p::PathMatch::Regex(s),
    };
    let c = at.need("matches.precedence", m.precedence)?;
    let (Ok(specificity), Ok(place)) = (c.specificity.try_into(), c.position.try_into()) else {
        return at.err(
            "matches.precedence",
            "needs five specificity numbers and two places",
        );
    };
    let class =
        u8::try_from(c.class).or_else(|_| at.err("matches.precedence.class", "is above 255"))?;
    Ok(p::HttpMatch {
        precedence: p::Precedence {
            class,
            specificity,
            created: c.created,
            object: c.object,
            indexes: place,
        },
        path,
        method: (!m.method.is_empty()).then_some(m.method),
        headers: headers(at, m.headers)?,
        query: values(at, "matches.query", m.query)?,
    })
}

pub(super) fn backend(
    at: &DecodeContext<'_>,
    b: w::Backend,
) -> Result<p::Backend, ResourceDecodeError> {
    use w::backend::Target;
    if b.weight > WEIGHT_MAX {
        return at.err(
            "backends.weight",
            format!("{} is above {WEIGHT_MAX}", b.weight),
        );
    }
    let mut filters = None;
    let target = match at.need("backends.target", b.target)? {
        Target::Service(target) => service_target(at, target)?,
        Target::FilteredService(target) => {
            let received = at.need("backends.filters", target.filters)?;
            let decoded = route_filters::decode(at, received)?;
            filters = Some(Box::new(decoded));
            service_target(at, at.need("backends.service", target.service)?)?
        }
        Target::Refuse(r) => p::BackendTarget::Refuse {
            status: at.status("backends.refuse.status", r.status)?,
            reason: r.reason,
        },
    };
    Ok(p::Backend {
        weight: b.weight,
        target,
        filters,
    })
}

fn service_target(
    at: &DecodeContext<'_>,
    target: w::ServiceTarget,
) -> Result<p::BackendTarget, ResourceDecodeError> {
    Ok(p::BackendTarget::Service {
        service: at.key("backends.service", target.service)?,
        port: at.port("backends.port", target.port)?,
        subset: target.subset,
    })
}

pub(super) fn host(
    at: &DecodeContext<'_>,
    written: w::HostMatch,
) -> Result<p::HostMatch, ResourceDecodeError> {
    use w::host_match::Host;
    Ok(match at.need("hosts", written.host)? {
        Host::Exact(s) => p::HostMatch::Exact(s),
        Host::Suffix(s) if s.starts_with('.') => p::HostMatch::Suffix(s),
        Host::Suffix(s) => {
            return at.err("hosts.suffix", format!("{s:?} does not start with '.'"));
        }
    })
}

/// Returns the action of a rule, and its filters.
fn route_action(
    at: &DecodeContext<'_>,
    received: w::route::Action,
) -> Result<(p::RouteAction, Option<Box<RouteFilters>>), ResourceDecodeError> {
    use w::extended_action::Action as ExtendedAction;
    use w::route::Action;
    let split = |s: Option<w::Split>| -> Result<_, ResourceDecodeError> {
        let backends = at.need("split", s)?.backends.into_iter();
        let backends = backends.map(|b| backend(at, b));
        backends
            .collect::<Result<_, _>>()
            .map(p::RouteAction::Split)
    };
    let filtered = |filters: Option<w::RouteFilters>| {
        let filters = filters.map(|it| route_filters::decode(at, it));
        filters.transpose().map(|filters| filters.map(Box::new))
    };
    let answer = |received: w::Answer| -> Result<_, ResourceDecodeError> {
        let (answer, filters) = route_answers::decode(at, received)?;
        let action = p::RouteAction::Answer(Box::new(answer));
        Ok((action, filters.map(Box::new)))
    };
    Ok(match received {
        Action::Split(s) => (split(Some(s))?, None),
        Action::FilteredSplit(f) => {
            let received = at.need("filtered_split.filters", f.filters)?;
            (split(f.split)?, filtered(Some(received))?)
        }
        Action::StrictSplit(s) => (split(s.split)?, filtered(s.filters)?),
        Action::Extended(extended) => {
            let (action, mut filters) = match at.need("extended.action", extended.action)? {
                ExtendedAction::Split(s) => (split(s.split)?, filtered(s.filters)?),
                ExtendedAction::Answer(received) => answer(received)?,
            };
            if let Some(received) = extended.authorizer {
                let authorizer = route_authorizer::decode(at, received)?;
                let filters: &mut Box<RouteFilters> = filters.get_or_insert_default();
                filters.authorizer = Some(Box::new(authorizer));
            }
            (action, filters)
        }
        Action::Answer(received) => answer(received)?,
        Action::Refuse(x) => {
            let status = at.status("refuse.status", x.status)?;
            let reason = x.reason;
            (p::RouteAction::Refuse { status, reason }, None)
        }
    })
}

pub(super) fn route(name: &str, r: w::Route) -> Result<p::RouteRule, ResourceDecodeError> {
    let at = DecodeContext(name);
    let (r, consumer) = consumer_rule::decode(&at, r)?;
    let k = at.need("key", r.key)?;
    let key = p::RouteKey {
        tenant: at.name("key.tenant", &k.tenant)?,
        kind: k.kind,
        namespace: at.name("key.namespace", &k.namespace)?,
        name: at.name("key.name", &k.name)?,
        rule: k.rule,
    };
    let hosts = r
        .hosts
        .into_iter()
        .map(|written| host(&at, written))
        .collect::<Result<_, ResourceDecodeError>>()?;
    let matches = r.matches.into_iter().map(|m| http_match(&at, m));
    let matches = matches.collect::<Result<Vec<_>, _>>()?;
    // Without a match the rule could mean all requests or none.
    if matches.is_empty() {
        return at.err(
            "matches",
            "is empty: a rule without conditions has one match on the prefix \"/\"",
        );
    }
    let (action, filters) = route_action(&at, at.need("action", r.action)?)?;
    // 0 means that the rule applies to all ports of the service.
    let parent_port = if r.parent_port == 0 {
        None
    } else {
        Some(at.port("parent_port", r.parent_port)?)
    };
    let attempts = r
        .attempts
        .map(|received| route_attempts::decode(&at, received));
    let faults = r.faults.map(|received| route_faults::decode(&at, received));
    let cors = r.cors.map(|received| route_cors::decode(&at, received));
    let of_rule = r.mirrors.into_iter().map(|received| (received, false));
    let of_backends = r.backend_mirrors.into_iter();
    let mirrors = of_rule.chain(of_backends.map(|received| (received, true)));
    let mirrors = mirrors
        .map(|(received, is_of_backend)| route_mirrors::decode(&at, received, is_of_backend));
    Ok(p::RouteRule {
        key,
        parent: at.key("parent", r.parent)?,
        parent_port,
        consumer,
        hosts,
        matches,
        action,
        filters,
        attempts: attempts.transpose()?.map(Box::new),
        faults: faults.transpose()?.map(Box::new),
        cors: cors.transpose()?.map(Box::new),
        mirrors: mirrors.collect::<Result<_, _>>()?,
    })
}
