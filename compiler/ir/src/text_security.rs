//! Formats resources of zero trust as text for people and golden files: policies, trust, keys. No
//! program parses the text.

use canal_model::authorization::{
    Attribute, AttributeMatch, Authentication, Authorization, AuthorizationAction, Authorizer,
    Clause, JwtRule, PeerAuthentication, PeerMode, PolicyRule, PolicyTarget,
};
use canal_model::trust::{
    ClientCertificates, Entitlement, KeyAlgorithm, KeyLocation, KeyPolicy, KeyServer, Termination,
    TerminationCertificate, TrustBundle,
};

use crate::text::list;

/// Formats a key policy; returns an empty text for the default.
pub fn keys(keys: &KeyPolicy) -> String {
    if *keys == KeyPolicy::default() {
        return String::new();
    }
    let place = match keys.location {
        KeyLocation::Local => "local",
        KeyLocation::KeyServer => "in key servers",
    };
    let algorithm = match keys.algorithm {
        KeyAlgorithm::EcdsaP256 => "ecdsa-p256",
        KeyAlgorithm::Rsa2048 => "rsa-2048",
    };
    let fallback = if keys.local_fallback { " or local" } else { "" };
    format!(" keys {algorithm} {place}{fallback}")
}

pub fn bundle(bundle: &TrustBundle) -> String {
    let federated = if bundle.federated { " federated" } else { "" };
    format!(
        "bundle {}/{} roots {} revoked {}{federated}",
        bundle.tenant,
        bundle.trust_domain,
        bundle.roots.len(),
        bundle.revoked.len()
    )
}

pub fn key_server(server: &KeyServer) -> String {
    format!(
        "key server {}/{} at {}",
        server.tenant,
        server.name,
        list(&server.addresses)
    )
}

pub fn authorizer(it: &Authorizer) -> String {
    let body = if it.body_bytes == 0 {
        String::new()
    } else {
        format!(" body {} bytes", it.body_bytes)
    };
    let headers = if it.headers.is_empty() {
        "all".to_owned()
    } else {
        it.headers.join(",")
    };
    let open = if it.fail_open { " fails open" } else { "" };
    format!(
        "authorizer {} at {}:{} within {}ms headers {headers}{body}{open}",
        it.key,
        it.service,
        it.port,
        it.timeout.as_millis()
    )
}

/// Formats the target of a policy.
pub fn target(target: &PolicyTarget) -> String {
    match target {
        PolicyTarget::Tenant => "all".into(),
        PolicyTarget::Namespace(namespace) => format!("namespace {namespace}"),
        PolicyTarget::Workloads { namespace, labels } => {
            let labels: Vec<String> = labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
            let namespace = namespace
                .as_ref()
                .map_or_else(|| "any namespace".to_owned(), |n| format!("namespace {n}"));
            format!("workloads {} in {namespace}", labels.join(","))
        }
        PolicyTarget::Service(service) => format!("service {service}"),
    }
}

/// Formats the action of a policy.
pub fn action(action: &AuthorizationAction) -> String {
    match action {
        AuthorizationAction::Allow => "allow".into(),
        AuthorizationAction::Deny => "deny".into(),
        AuthorizationAction::Audit => "audit".into(),
        AuthorizationAction::Custom(authorizer) => format!("custom {authorizer}"),
    }
}

/// Formats an attribute, as the key of `when` if there is one.
pub fn attribute(attribute: &Attribute) -> String {
    match attribute {
        Attribute::SourcePrincipal => "source.principal".into(),
        Attribute::SourceNamespace => "source.namespace".into(),
        Attribute::SourceServiceAccount => "source.serviceAccount".into(),
        Attribute::SourceAddress => "source.ip".into(),
        Attribute::RemoteAddress => "remote.ip".into(),
        Attribute::RequestPrincipal => "request.auth.principal".into(),
        Attribute::RequestAudience => "request.auth.audiences".into(),
        Attribute::RequestPresenter => "request.auth.presenter".into(),
        Attribute::RequestClaim(path) => format!("request.auth.claims[{}]", path.join("][")),
        Attribute::Header(name) => format!("request.headers[{name}]"),
        Attribute::Host => "request.host".into(),
        Attribute::Method => "request.method".into(),
        Attribute::Path => "request.path".into(),
        Attribute::DestinationPort => "destination.port".into(),
        Attribute::DestinationAddress => "destination.ip".into(),
        Attribute::ServerName => "connection.sni".into(),
    }
}

pub fn one_match(it: &AttributeMatch) -> String {
    match it {
        AttributeMatch::Exact(s) => format!("{s:?}"),
        AttributeMatch::Prefix(s) if s.is_empty() => "there".into(),
        AttributeMatch::Prefix(s) => format!("from {s:?}"),
        AttributeMatch::Suffix(s) => format!("to {s:?}"),
        AttributeMatch::Present => "present".into(),
        AttributeMatch::Template(s) => format!("like {s:?}"),
        AttributeMatch::Network(net) => net.to_string(),
        AttributeMatch::Port(port) => port.to_string(),
    }
}

/// Formats a clause of a policy.
pub fn clause(clause: &Clause) -> String {
    let matches =
        |list: &[AttributeMatch]| list.iter().map(one_match).collect::<Vec<_>>().join(" | ");
    let mut text = attribute(&clause.attribute);
    if !clause.any.is_empty() {
        text += &format!(" is {}", matches(&clause.any));
    }
    if !clause.none.is_empty() {
        text += &format!(" is not {}", matches(&clause.none));
    }
    text
}

fn all(clauses: &[Clause]) -> String {
    if clauses.is_empty() {
        "anything".into()
    } else {
        clauses.iter().map(clause).collect::<Vec<_>>().join(", ")
    }
}

fn rule(number: usize, rule: &PolicyRule) -> String {
    let mut lines = vec![format!("  rule {number}")];
    lines.extend(
        rule.from
            .iter()
            .map(|from| format!("    from {}", all(from))),
    );
    lines.extend(rule.to.iter().map(|to| format!("    to {}", all(to))));
    if !rule.when.is_empty() {
        lines.push(format!("    when {}", all(&rule.when)));
    }
    lines.join("\n")
}

fn broken(reason: Option<&String>) -> String {
    reason
        .map(|reason| format!("\n  broken: {reason}"))
        .unwrap_or_default()
}

pub fn authorization(it: &Authorization) -> String {
    let dry = if it.dry_run { " dry run" } else { "" };
    let head = format!(
        "authorization {} for {} {}{dry}{}",
        it.key,
        target(&it.target),
        action(&it.action),
        broken(it.broken.as_ref())
    );
    std::iter::once(head)
        .chain(
            it.rules
                .iter()
                .enumerate()
                .map(|(number, it)| rule(number, it)),
        )
        .collect::<Vec<_>>()
        .join("\n")
}

fn jwt(rule: &JwtRule) -> String {
    let mut text = format!(
        "  issuer {:?} audiences {}",
        rule.issuer,
        list(&rule.audiences)
    );
    text += &rule.keys.as_ref().map_or_else(
        || " without keys".into(),
        |keys| format!(" keys {} bytes", keys.len()),
    );
    for (name, prefix) in &rule.headers {
        text += &format!(" header {name} {prefix:?}");
    }
    for (what, names) in [("parameter", &rule.parameters), ("cookie", &rule.cookies)] {
        text.extend(names.iter().map(|name| format!(" {what} {name}")));
    }
    if rule.forward {
        text += " forward";
    }
    if let Some(header) = &rule.payload_header {
        text += &format!(" payload to {header}");
    }
    for (header, claim) in &rule.claim_headers {
        text += &format!(" claim [{}] to {header}", claim.join("]["));
    }
    text
}

pub fn authentication(it: &Authentication) -> String {
    let head = format!(
        "authentication {} for {}{}",
        it.key,
        target(&it.target),
        broken(it.broken.as_ref())
    );
    std::iter::once(head)
        .chain(it.rules.iter().map(jwt))
        .collect::<Vec<_>>()
        .join("\n")
}

fn mode(mode: PeerMode) -> &'static str {
    match mode {
        PeerMode::Strict => "strict",
        PeerMode::Permissive => "permissive",
        PeerMode::Disable => "disable",
    }
}

pub fn peer_authentication(it: &PeerAuthentication) -> String {
    let ports: String = it
        .ports
        .iter()
        .map(|(port, m)| format!(" port {port} {}", mode(*m)))
        .collect();
    format!(
        "peer authentication {} for {} {}{ports} created {}",
        it.key,
        target(&it.target),
        it.mode.map_or("unset", mode),
        it.created
    )
}

pub fn termination(it: &Termination) -> String {
    let certificate = match &it.certificate {
        TerminationCertificate::Mesh => "mesh".to_owned(),
        TerminationCertificate::KeyServer(name) => format!("key server {name}"),
    };
    let clients = match it.clients {
        ClientCertificates::None => "none",
        ClientCertificates::Optional => "optional",
        ClientCertificates::Required => "required",
    };
    let required = if it.required { " only" } else { "" };
    format!(
        "termination {}:{} certificate {certificate} clients {clients}{required}{}",
        it.service,
        it.port,
        broken(it.broken.as_ref())
    )
}

pub fn entitlement(it: &Entitlement) -> String {
    format!(
        "entitlement {}/{} to {}",
        it.tenant,
        it.requester,
        list(&it.identities)
    )
}
