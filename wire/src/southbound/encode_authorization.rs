//! Converts security policies to wire messages.

use canal_model::authorization as a;

use super::encode::key;
use crate::program as w;

fn policy(k: &a::PolicyKey) -> Option<w::PolicyKey> {
    Some(w::PolicyKey {
        tenant: k.tenant.to_string(),
        namespace: k.namespace.to_string(),
        name: k.name.to_string(),
    })
}

fn target(t: &a::PolicyTarget) -> Option<w::PolicyTarget> {
    use w::policy_target::{Target, Workloads};
    let target = match t {
        a::PolicyTarget::Tenant => Target::Tenant(true),
        a::PolicyTarget::Namespace(namespace) => Target::Namespace(namespace.to_string()),
        a::PolicyTarget::Workloads { namespace, labels } => Target::Workloads(Workloads {
            namespace: namespace
                .as_ref()
                .map(ToString::to_string)
                .unwrap_or_default(),
            labels: labels.clone(),
        }),
        a::PolicyTarget::Service(service) => {
            return key(service).map(|k| w::PolicyTarget {
                target: Some(Target::Service(k)),
            });
        }
    };
    Some(w::PolicyTarget {
        target: Some(target),
    })
}

fn one_match(m: &a::AttributeMatch) -> w::Match {
    use w::r#match::Match;
    let m = match m {
        a::AttributeMatch::Exact(s) => Match::Exact(s.clone()),
        a::AttributeMatch::Prefix(s) => Match::Prefix(s.clone()),
        a::AttributeMatch::Suffix(s) => Match::Suffix(s.clone()),
        a::AttributeMatch::Present => Match::Present(true),
        a::AttributeMatch::Template(s) => Match::Template(s.clone()),
        a::AttributeMatch::Network(net) => Match::Network(net.to_string()),
        a::AttributeMatch::Port(port) => Match::Port((*port).into()),
    };
    w::Match { r#match: Some(m) }
}

fn attribute(a: &a::Attribute) -> w::Attribute {
    use w::attribute::Kind;
    let kind = match a {
        a::Attribute::SourcePrincipal => Kind::SourcePrincipal,
        a::Attribute::SourceNamespace => Kind::SourceNamespace,
        a::Attribute::SourceServiceAccount => Kind::SourceServiceAccount,
        a::Attribute::SourceAddress => Kind::SourceAddress,
        a::Attribute::RemoteAddress => Kind::RemoteAddress,
        a::Attribute::RequestPrincipal => Kind::RequestPrincipal,
        a::Attribute::RequestAudience => Kind::RequestAudience,
        a::Attribute::RequestPresenter => Kind::RequestPresenter,
        a::Attribute::RequestClaim(_) => Kind::RequestClaim,
        a::Attribute::Header(_) => Kind::Header,
        a::Attribute::Host => Kind::Host,
        a::Attribute::Method => Kind::Method,
        a::Attribute::Path => Kind::Path,
        a::Attribute::DestinationPort => Kind::DestinationPort,
        a::Attribute::DestinationAddress => Kind::DestinationAddress,
        a::Attribute::ServerName => Kind::ServerName,
    };
    let path = match a {
        a::Attribute::RequestClaim(path) => path.clone(),
        a::Attribute::Header(name) => vec![name.clone()],
        _ => Vec::new(),
    };
    w::Attribute {
        kind: kind.into(),
        path,
    }
}

fn all(clauses: &[a::Clause]) -> w::All {
    let clause = |c: &a::Clause| w::Clause {
        attribute: Some(attribute(&c.attribute)),
        any: c.any.iter().map(one_match).collect(),
        none: c.none.iter().map(one_match).collect(),
    };
    w::All {
        clauses: clauses.iter().map(clause).collect(),
    }
}

fn rule(r: &a::PolicyRule) -> w::Rule {
    w::Rule {
        from: r.from.iter().map(|c| all(c)).collect(),
        to: r.to.iter().map(|c| all(c)).collect(),
        when: (!r.when.is_empty()).then(|| all(&r.when)),
    }
}

impl From<&a::Authorization> for w::Authorization {
    fn from(p: &a::Authorization) -> Self {
        use w::authorization::Action;
        let action = match &p.action {
            a::AuthorizationAction::Allow => Some(Action::Allow(true)),
            a::AuthorizationAction::Deny => Some(Action::Deny(true)),
            a::AuthorizationAction::Audit => Some(Action::Audit(true)),
            a::AuthorizationAction::Custom(authorizer) => policy(authorizer).map(Action::Custom),
        };
        Self {
            key: policy(&p.key),
            target: target(&p.target),
            action,
            rules: p.rules.iter().map(rule).collect(),
            dry_run: p.dry_run,
            broken: p.broken.clone(),
        }
    }
}

impl From<&a::Authentication> for w::Authentication {
    fn from(p: &a::Authentication) -> Self {
        use w::jwt_rule::{ClaimHeader, Header};
        let rule = |r: &a::JwtRule| w::JwtRule {
            issuer: r.issuer.clone(),
            audiences: r.audiences.clone(),
            keys: r.keys.clone(),
            headers: r
                .headers
                .iter()
                .map(|(name, prefix)| Header {
                    name: name.clone(),
                    prefix: prefix.clone(),
                })
                .collect(),
            parameters: r.parameters.clone(),
            cookies: r.cookies.clone(),
            forward: r.forward,
            payload_header: r.payload_header.clone(),
            claim_headers: r
                .claim_headers
                .iter()
                .map(|(name, claim)| ClaimHeader {
                    name: name.clone(),
                    claim: claim.clone(),
                })
                .collect(),
        };
        Self {
            key: policy(&p.key),
            target: target(&p.target),
            rules: p.rules.iter().map(rule).collect(),
            broken: p.broken.clone(),
        }
    }
}

fn mode(m: a::PeerMode) -> w::peer_authentication::Mode {
    use w::peer_authentication::Mode;
    match m {
        a::PeerMode::Strict => Mode::Strict,
        a::PeerMode::Permissive => Mode::Permissive,
        a::PeerMode::Disable => Mode::Disable,
    }
}

impl From<&a::PeerAuthentication> for w::PeerAuthentication {
    fn from(p: &a::PeerAuthentication) -> Self {
        Self {
            key: policy(&p.key),
            target: target(&p.target),
            mode: p
                .mode
                .map_or(w::peer_authentication::Mode::Unset, mode)
                .into(),
            ports: p
                .ports
                .iter()
                .map(|(port, m)| (u32::from(*port), mode(*m).into()))
                .collect(),
            created: p.created,
        }
    }
}

impl From<&a::Authorizer> for w::Authorizer {
    fn from(x: &a::Authorizer) -> Self {
        Self {
            key: policy(&x.key),
            service: key(&x.service),
            port: x.port.into(),
            timeout_ms: u32::try_from(x.timeout.as_millis()).unwrap_or(u32::MAX),
            fail_open: x.fail_open,
            headers: x.headers.clone(),
            body_bytes: x.body_bytes,
        }
    }
}
