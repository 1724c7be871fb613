//! Defines what policies mean: a slow and simple interpreter of authorization, against which every
//! faster one is compared. It takes facts as given: it does not parse HTTP, validate tokens or call
//! authorizers.
//!
//! The rules, which every faster implementation must follow:
//! - Order: a broken policy denies; then CUSTOM, then DENY, then ALLOW (Istio). Without an ALLOW
//!   policy everything is allowed, except to a foreign peer.
//! - A fact is known, absent (known to have no value) or unknown (this hop cannot observe it). A
//!   clause about an unknown fact may hold or not, and three-valued logic (Kleene's) propagates
//!   that. If it affects the result, the decision is [`OracleDecision::Undecided`].
//! - Texts are compared byte by byte. Hosts are compared without case, without a trailing dot, and
//!   without port unless the match has one.
//! - A claim or another attribute with several values matches if one of them does, and `none` fails
//!   if one of them does.
//! - IPv4 addresses in IPv6 form are IPv4 addresses.
//! - In path templates, `{*}` is one or more bytes without `/`, and `{**}` is anything.
//! - A rule allows a foreign peer only through a clause on its principal of which every match names
//!   the whole trust domain.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use canal_model::authorization::{
    AllOf, Attribute, AttributeMatch, Authorization, AuthorizationAction, Clause,
    PeerAuthentication, PeerMode, PolicyKey, PolicyRule, PolicyTarget,
};
use canal_model::ids::{Namespace, ServiceKey};
use canal_model::ingress::gateway_labels;
use canal_model::program::{Labels, PolicyPaths};

/// One value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OracleValue {
    Text(String),
    Address(IpAddr),
    Port(u16),
}

/// The facts about a connection or request that a hop has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OracleFacts {
    /// Values of each attribute; an empty list means that the attribute is absent.
    pub values: BTreeMap<Attribute, Vec<OracleValue>>,
    /// If true, attributes that are not in `values` are absent; else they are unknown.
    pub is_complete: bool,
    /// Attributes that are unknown in any case.
    pub unseen: BTreeSet<Attribute>,
    /// True if the peer belongs to another tenant, with which this one federates.
    pub is_foreign: bool,
}

/// Three-valued truth. `Maybe` contains the first attribute that is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OracleTruth {
    No,
    Maybe(Attribute),
    Yes,
}

/// The decision of a destination's policies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OracleDecision {
    Allow,
    /// The policies deny. `policy` is `None` if no ALLOW policy matched; `rule` is `None` if the
    /// policy is broken.
    Deny {
        policy: Option<PolicyKey>,
        rule: Option<usize>,
    },
    /// An authorizer has to decide. If it allows the request, [`decide`] is called again with the
    /// authorizer in `agreed`.
    CallAuthorizer {
        authorizer: PolicyKey,
        policy: PolicyKey,
    },
    Undecided {
        policy: PolicyKey,
        attribute: Attribute,
    },
}

/// The effect that a policy would have had, if it only reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OracleShadowMatch {
    Audit,
    WouldDeny,
    WouldAllow,
    WouldCallAuthorizer,
}

/// The destination of a connection or request.
#[derive(Debug, Clone, Copy)]
pub struct OracleDestination<'a> {
    /// Namespace and labels of the destination workload.
    pub workload: Option<(&'a Namespace, &'a Labels)>,
    /// Service through which the workload was addressed.
    pub service: Option<&'a ServiceKey>,
}

/// Returns whether a policy with this target applies to the destination.
pub fn is_for(target: &PolicyTarget, destination: &OracleDestination<'_>) -> bool {
    let OracleDestination { workload, service } = *destination;
    match target {
        PolicyTarget::Service(wanted) => service == Some(wanted),
        PolicyTarget::Tenant => workload.is_some(),
        PolicyTarget::Namespace(wanted) => {
            workload.is_some_and(|(namespace, _)| namespace == wanted)
        }
        PolicyTarget::Workloads {
            namespace: wanted,
            labels: wanted_labels,
        } => workload.is_some_and(|(namespace, labels)| {
            (wanted.is_none() || wanted.as_ref() == Some(namespace))
                && wanted_labels.iter().all(|(k, v)| labels.get(k) == Some(v))
        }),
    }
}

/// Returns whether a policy with this target applies to the clients of the Gateway for which a
/// service stands. As a workload is, a Gateway is in its namespace, and has labels that select it.
pub fn is_for_gateway(target: &PolicyTarget, service: &ServiceKey) -> bool {
    let Some(labels) = gateway_labels(service) else {
        return false;
    };
    let gateway = OracleDestination {
        workload: Some((&service.namespace, &labels)),
        service: Some(service),
    };
    is_for(target, &gateway)
}

/// Returns whether a policy with this target authorizes the requests to a service that a gateway
/// answers itself. They reach no workload, so the policies of all ready workloads of the dialled
/// port do, each with its labels in `workloads`. Without any, nobody knows whose policies apply, so
/// all that select workloads of the namespace do.
pub fn is_for_answers(target: &PolicyTarget, service: &ServiceKey, workloads: &[&Labels]) -> bool {
    if let (PolicyTarget::Workloads { namespace, .. }, true) = (target, workloads.is_empty()) {
        return namespace.as_ref().is_none_or(|of| *of == service.namespace);
    }
    let none = Labels::new();
    let nobody = [&none];
    let workloads: &[&Labels] = if workloads.is_empty() {
        &nobody
    } else {
        workloads
    };
    workloads.iter().any(|labels| {
        let destination = OracleDestination {
            workload: Some((&service.namespace, labels)),
            service: Some(service),
        };
        is_for(target, &destination)
    })
}

/// Returns the decision of a destination's policies, given the authorizers that have `agreed`. The
/// order of policies affects only which policy is named.
pub fn decide(
    policies: &[&Authorization],
    facts: &OracleFacts,
    agreed: &BTreeSet<PolicyKey>,
) -> OracleDecision {
    // Dry runs decide nothing. Audits stay, because a broken one denies; their rules are evaluated
    // by `hits` only.
    let enforced: Vec<&Authorization> = policies.iter().copied().filter(|p| !p.dry_run).collect();
    // A broken policy denies everything, so no other policy needs to be evaluated.
    if let Some(broken) = enforced.iter().find(|policy| policy.broken.is_some()) {
        return OracleDecision::Deny {
            policy: Some(broken.key.clone()),
            rule: None,
        };
    }
    let of = |action: &AuthorizationAction| {
        enforced
            .iter()
            .copied()
            .filter(|policy| policy.action == *action)
            .collect::<Vec<_>>()
    };
    let mut undecided = Vec::new();
    // CUSTOM policies are evaluated per authorizer, so that each authorizer is called at most once.
    let mut authorizers: Vec<&PolicyKey> = Vec::new();
    for policy in &enforced {
        match &policy.action {
            AuthorizationAction::Custom(authorizer) if !authorizers.contains(&authorizer) => {
                authorizers.push(authorizer)
            }
            // Other actions call no authorizer, and each authorizer is listed once.
            _ => {}
        }
    }
    // The order is Istio's: CUSTOM, DENY, ALLOW.
    for authorizer in authorizers {
        match first(
            &of(&AuthorizationAction::Custom(authorizer.clone())),
            facts,
            false,
        ) {
            FirstMatch::Yes(policy, _) if !agreed.contains(authorizer) => {
                return OracleDecision::CallAuthorizer {
                    authorizer: authorizer.clone(),
                    policy: policy.key.clone(),
                };
            }
            FirstMatch::Maybe(policy, attribute) => undecided.push((policy.key.clone(), attribute)),
            // An authorizer that agreed decides nothing more; DENY and ALLOW policies follow.
            FirstMatch::Yes(..) | FirstMatch::No => {}
        }
    }
    match first(&of(&AuthorizationAction::Deny), facts, false) {
        FirstMatch::Yes(policy, rule) => {
            return OracleDecision::Deny {
                policy: Some(policy.key.clone()),
                rule: Some(rule),
            };
        }
        FirstMatch::Maybe(policy, attribute) => undecided.push((policy.key.clone(), attribute)),
        FirstMatch::No => {}
    }
    // A foreign peer needs an ALLOW rule even if the destination has no ALLOW policy.
    let allows = of(&AuthorizationAction::Allow);
    if !allows.is_empty() || facts.is_foreign {
        match first(&allows, facts, facts.is_foreign) {
            FirstMatch::Yes(..) => {}
            FirstMatch::Maybe(policy, attribute) => undecided.push((policy.key.clone(), attribute)),
            FirstMatch::No => {
                return OracleDecision::Deny {
                    policy: None,
                    rule: None,
                };
            }
        }
    }
    // The first one is named; a policy that cannot be evaluated outranks an ALLOW.
    match undecided.into_iter().next() {
        Some((policy, attribute)) => OracleDecision::Undecided { policy, attribute },
        None => OracleDecision::Allow,
    }
}

/// Returns the audit policies and dry runs that certainly matched, each with the matching rule.
pub fn hits(
    policies: &[&Authorization],
    facts: &OracleFacts,
) -> Vec<(PolicyKey, Option<usize>, OracleShadowMatch)> {
    let mut found = Vec::new();
    for policy in policies {
        let hit = match (&policy.action, policy.dry_run, policy.broken.is_some()) {
            (_, false, true) => continue,
            (_, true, true) => {
                found.push((policy.key.clone(), None, OracleShadowMatch::WouldDeny));
                continue;
            }
            (AuthorizationAction::Audit, ..) => OracleShadowMatch::Audit,
            (_, false, _) => continue,
            (AuthorizationAction::Allow, ..) => OracleShadowMatch::WouldAllow,
            (AuthorizationAction::Deny, ..) => OracleShadowMatch::WouldDeny,
            (AuthorizationAction::Custom(_), ..) => OracleShadowMatch::WouldCallAuthorizer,
        };
        if let FirstMatch::Yes(_, rule) = first(&[*policy], facts, false) {
            found.push((policy.key.clone(), Some(rule), hit));
        }
    }
    found
}

enum FirstMatch<'a> {
    No,
    Maybe(&'a Authorization, Attribute),
    Yes(&'a Authorization, usize),
}

/// Returns the first policy that matches; else the first that may match.
fn first<'a>(policies: &[&'a Authorization], facts: &OracleFacts, named: bool) -> FirstMatch<'a> {
    let mut maybe = FirstMatch::No;
    for policy in policies {
        // A certain match takes precedence over an earlier possible one, inside each policy and
        // then among policies.
        let truths: Vec<OracleTruth> = policy
            .rules
            .iter()
            .map(|rule| rule_holds(rule, facts, named))
            .collect();
        if let Some(rule) = truths.iter().position(|truth| *truth == OracleTruth::Yes) {
            return FirstMatch::Yes(policy, rule);
        }
        if let (FirstMatch::No, Some(OracleTruth::Maybe(attribute))) = (
            &maybe,
            truths.iter().find(|truth| **truth != OracleTruth::No),
        ) {
            maybe = FirstMatch::Maybe(policy, attribute.clone());
        }
    }
    maybe
}

/// Returns whether a rule matches; with `named` only by a clause that names the peer.
pub fn rule_holds(rule: &PolicyRule, facts: &OracleFacts, named: bool) -> OracleTruth {
    let by_when = rule.when.iter().any(names_peer);
    let one_of = |alternatives: &[AllOf]| {
        if alternatives.is_empty() {
            OracleTruth::Yes
        } else {
            any(alternatives, facts)
        }
    };
    let from = match named && !by_when {
        false => one_of(&rule.from),
        true => any(
            &rule
                .from
                .iter()
                .filter(|all| all.iter().any(names_peer))
                .cloned()
                .collect::<Vec<AllOf>>(),
            facts,
        ),
    };
    both(both(from, one_of(&rule.to)), all_hold(&rule.when, facts))
}

fn any(alternatives: &[AllOf], facts: &OracleFacts) -> OracleTruth {
    let truths: Vec<OracleTruth> = alternatives
        .iter()
        .map(|all| all_hold(all, facts))
        .collect();
    if truths.contains(&OracleTruth::Yes) {
        OracleTruth::Yes
    } else {
        truths
            .into_iter()
            .find(|truth| *truth != OracleTruth::No)
            .unwrap_or(OracleTruth::No)
    }
}

/// Returns whether all clauses hold.
pub fn all_hold(all: &[Clause], facts: &OracleFacts) -> OracleTruth {
    all.iter()
        .map(|clause| clause_holds(clause, facts))
        .fold(OracleTruth::Yes, both)
}

fn both(a: OracleTruth, b: OracleTruth) -> OracleTruth {
    match (a, b) {
        (OracleTruth::No, _) | (_, OracleTruth::No) => OracleTruth::No,
        (OracleTruth::Maybe(attribute), _) | (_, OracleTruth::Maybe(attribute)) => {
            OracleTruth::Maybe(attribute)
        }
        (OracleTruth::Yes, OracleTruth::Yes) => OracleTruth::Yes,
    }
}

/// Returns whether a clause names the peer's whole trust domain.
fn names_peer(clause: &Clause) -> bool {
    let is_whole = |m: &AttributeMatch| match m {
        AttributeMatch::Exact(_) => true,
        AttributeMatch::Prefix(text) => text.contains('/'),
        AttributeMatch::Suffix(_)
        | AttributeMatch::Present
        | AttributeMatch::Template(_)
        | AttributeMatch::Network(_)
        | AttributeMatch::Port(_) => false,
    };
    clause.attribute == Attribute::SourcePrincipal
        && !clause.any.is_empty()
        && clause.any.iter().all(is_whole)
}

/// Returns whether a clause holds.
pub fn clause_holds(clause: &Clause, facts: &OracleFacts) -> OracleTruth {
    let values: &[OracleValue] = match facts.values.get(&clause.attribute) {
        _ if facts.unseen.contains(&clause.attribute) => {
            return OracleTruth::Maybe(clause.attribute.clone());
        }
        Some(values) => values,
        None if facts.is_complete => &[],
        None => return OracleTruth::Maybe(clause.attribute.clone()),
    };
    let one_of = |matches: &[AttributeMatch]| {
        values.iter().any(|value| {
            matches
                .iter()
                .any(|m| match_holds(&clause.attribute, m, value))
        })
    };
    let holds = (clause.any.is_empty() || one_of(&clause.any)) && !one_of(&clause.none);
    if holds {
        OracleTruth::Yes
    } else {
        OracleTruth::No
    }
}

fn match_holds(attribute: &Attribute, m: &AttributeMatch, value: &OracleValue) -> bool {
    let is_host = *attribute == Attribute::Host;
    match (m, value) {
        (AttributeMatch::Present, OracleValue::Text(text)) => !text.is_empty(),
        (AttributeMatch::Present, _) => true,
        (AttributeMatch::Exact(wanted), OracleValue::Text(text)) if is_host => {
            host(text, wanted) == wanted.to_lowercase()
        }
        (AttributeMatch::Prefix(wanted), OracleValue::Text(text)) if is_host => {
            host(text, wanted).starts_with(&wanted.to_lowercase())
        }
        (AttributeMatch::Suffix(wanted), OracleValue::Text(text)) if is_host => {
            host(text, wanted).ends_with(&wanted.to_lowercase())
        }
        (AttributeMatch::Exact(wanted), OracleValue::Text(text)) => text == wanted,
        (AttributeMatch::Prefix(wanted), OracleValue::Text(text)) => {
            text.starts_with(wanted.as_str())
        }
        (AttributeMatch::Suffix(wanted), OracleValue::Text(text)) => {
            text.ends_with(wanted.as_str())
        }
        (AttributeMatch::Template(template), OracleValue::Text(path)) => {
            template_holds(template, path)
        }
        (AttributeMatch::Network(net), OracleValue::Address(address)) => {
            net.contains(&address.to_canonical())
        }
        (AttributeMatch::Port(wanted), OracleValue::Port(port)) => wanted == port,
        _ => false,
    }
}

/// Returns a host in the form in which it is compared with `wanted`.
fn host(sent: &str, wanted: &str) -> String {
    let port_at = |text: &str| {
        text.find(':')
            .filter(|_| !text.contains(']'))
            .or_else(|| text.find("]:").map(|at| at + 1))
    };
    let lower = sent.to_lowercase();
    let (name, port) = lower.split_at(port_at(&lower).unwrap_or(lower.len()));
    let name = name.strip_suffix('.').unwrap_or(name);
    if port_at(wanted).is_some() {
        format!("{name}{port}")
    } else {
        name.to_owned()
    }
}

fn template_holds(template: &str, path: &str) -> bool {
    if let Some(rest) = template.strip_prefix("{**}") {
        return (0..=path.len())
            .any(|at| path.is_char_boundary(at) && template_holds(rest, &path[at..]));
    }
    if let Some(rest) = template.strip_prefix("{*}") {
        let segment = path.find('/').unwrap_or(path.len());
        return (1..=segment)
            .any(|at| path.is_char_boundary(at) && template_holds(rest, &path[at..]));
    }
    match (template.chars().next(), path.chars().next()) {
        (None, None) => true,
        (Some(wanted), Some(sent)) if wanted == sent => {
            template_holds(&template[wanted.len_utf8()..], &path[sent.len_utf8()..])
        }
        _ => false,
    }
}

/// Returns the peer mode of a workload at one of its ports.
pub fn peer_mode(
    policies: &[PeerAuthentication],
    destination: &OracleDestination<'_>,
    port: u16,
) -> PeerMode {
    let mut own: Vec<&PeerAuthentication> = policies
        .iter()
        .filter(|policy| is_for(&policy.target, destination))
        .collect();
    own.sort_by_key(|policy| (policy.created, policy.key.clone()));
    let oldest = |is_wide: fn(&PolicyTarget) -> bool| {
        own.iter().find(|policy| is_wide(&policy.target)).copied()
    };
    let tenant = oldest(|target| matches!(target, PolicyTarget::Tenant));
    let namespace = oldest(|target| matches!(target, PolicyTarget::Namespace(_)));
    let workload = oldest(|target| {
        matches!(
            target,
            PolicyTarget::Workloads { .. } | PolicyTarget::Service(_)
        )
    });
    let mut mode = PeerMode::default();
    // From the widest target to the narrowest: each one overrides the previous mode.
    for policy in [tenant, namespace, workload].into_iter().flatten() {
        mode = policy
            .ports
            .get(&port)
            .copied()
            .or(policy.mode)
            .unwrap_or(mode);
    }
    mode
}

/// Returns the path in its normal form: without query, with unreserved characters decoded, slashes
/// merged and dot segments resolved (RFC 3986 §6.2.2). `None` if the path has no safe
/// interpretation, because a backend may interpret it differently.
pub fn normal_path(target: &str) -> Option<String> {
    normal(target, false)
}

/// Returns the path as policies compare it; `None` if they refuse it. Strict policies refuse
/// parameters, and escapes that are not UTF-8.
pub fn policy_path(target: &str, paths: PolicyPaths) -> Option<String> {
    let is_legacy = paths == PolicyPaths::Legacy;
    normal_path(target).filter(|path| {
        is_legacy || !(path.contains([';']) || path.contains("%3B") || !is_utf8(path))
    })
}

/// Returns the path in the form that routes compare. Parts without a safe interpretation are kept
/// unchanged, except that a `..` above the root is dropped.
pub fn routing_path(target: &str) -> String {
    normal(target, true).unwrap_or_else(|| {
        target
            .split(['?', '#'])
            .next()
            .unwrap_or_default()
            .to_owned()
    })
}

fn is_utf8(path: &str) -> bool {
    let mut parts = path.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (hex, rest) = part.split_at(2);
        bytes.extend(u8::from_str_radix(hex, 16));
        bytes.extend(rest.bytes());
    }
    String::from_utf8(bytes).is_ok()
}

/// Returns the normal form. With `keeps`, parts without a safe interpretation are kept unchanged,
/// except that a `..` above the root is dropped. Otherwise such a path has no normal form.
fn normal(target: &str, keeps: bool) -> Option<String> {
    // `split` yields the whole text if there is no query and no fragment.
    let path = target.split(['?', '#']).next().unwrap_or_default();
    let allowed = |is_safe: bool| (is_safe || keeps).then_some(());
    let mut decoded = Vec::new();
    let mut rest = path.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        let hex = after
            .get(..2)
            .and_then(|pair| std::str::from_utf8(pair).ok())
            .filter(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()));
        match (byte, hex) {
            (b'%', Some(hex)) => {
                let code = u8::from_str_radix(hex, 16).ok()?;
                // Some servers end a path at an escaped NUL, or drop control characters.
                // Some servers decode an escaped slash before they split the path, others do not.
                allowed(!matches!(code, 0..=0x1f | 0x7f | b'/' | b'\\'))?;
                // Only unreserved characters are decoded (RFC 3986 §6.2.2.2).
                if code.is_ascii_alphanumeric() || b"-._~".contains(&code) {
                    decoded.push(code);
                } else {
                    decoded.extend(format!("%{}", hex.to_ascii_uppercase()).bytes());
                }
                rest = &after[2..];
            }
            (byte, _) => {
                // Spaces and control characters are in no path (RFC 3986 §3.3).
                // A `%` here begins no valid escape; some servers treat a backslash as a slash.
                allowed(!matches!(byte, b'%' | 0..=0x20 | 0x7f | b'\\'))?;
                decoded.push(*byte);
            }
        }
    }
    let decoded = String::from_utf8(decoded).ok()?;
    // The target of OPTIONS for the whole server (RFC 9112 §3.2.4).
    if decoded == "*" {
        return Some(decoded);
    }
    // Such a target is no path, so nothing in it can be normalized.
    let Some(rest) = decoded.strip_prefix('/') else {
        return keeps.then(|| path.to_owned());
    };
    let parts: Vec<&str> = rest.split('/').collect();
    let mut segments: Vec<&str> = Vec::new();
    for part in &parts {
        match *part {
            // Slashes are merged, so that another spelling of a path takes no other route.
            "" | "." => {}
            // Routing drops a `..` above the root (RFC 3986 §5.2.4); a policy must not guess.
            ".." => allowed(segments.pop().is_some())?,
            other => {
                // A server that drops path parameters interprets these segments as `..`, `.` or an
                // empty segment.
                let has_marks = |dots: &&str| {
                    [";", "%3B"]
                        .iter()
                        .any(|mark| other.starts_with(&format!("{dots}{mark}")))
                };
                allowed(!["..", ".", ""].iter().any(has_marks))?;
                segments.push(other);
            }
        }
    }
    // An empty last segment, `.` or `..` names a folder (RFC 3986 §5.2.4).
    let is_folder = matches!(parts.last(), Some(&("" | "." | ".."))) && !segments.is_empty();
    Some(format!(
        "/{}{}",
        segments.join("/"),
        if is_folder { "/" } else { "" }
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_compared_without_case_and_port() {
        let text = |text: &str| OracleValue::Text(text.into());
        let exact = |text: &str| AttributeMatch::Exact(text.into());
        for (m, sent, want) in [
            (exact("example.com"), "Example.com", true),
            (exact("Example.com"), "example.com:8080", true),
            // As in DNS, a dot at the end names the same host.
            (exact("example.com"), "example.com.", true),
            // A value without a port matches every port, and a value with one matches only that.
            (exact("example.com"), "example.com.:80", true),
            (exact("example.com:80"), "example.com:80", true),
            (exact("example.com:80"), "example.com", false),
            (exact("example.com:80"), "example.com:8080", false),
            (
                AttributeMatch::Prefix("example.com:".into()),
                "example.com:8080",
                true,
            ),
            (
                AttributeMatch::Prefix("example.com:".into()),
                "example.com",
                false,
            ),
            (
                AttributeMatch::Prefix("exam".into()),
                "EXAMPLE.com:80",
                true,
            ),
            (
                AttributeMatch::Suffix(".com".into()),
                "example.com:80",
                true,
            ),
            (
                AttributeMatch::Suffix(".com:80".into()),
                "example.com:80",
                true,
            ),
            (exact("[fd00::1]"), "[fd00::1]:80", true),
            (exact("[fd00::1]:80"), "[fd00::1]:80", true),
            (AttributeMatch::Present, "", false),
            (AttributeMatch::Present, "x", true),
        ] {
            assert_eq!(
                match_holds(&Attribute::Host, &m, &text(sent)),
                want,
                "{m:?} {sent:?}"
            );
        }
    }

    #[test]
    fn templates_are_istios() {
        for (template, path, want) in [
            ("/foo/{*}", "/foo/bar", true),
            ("/foo/{*}", "/foo/bar/baz", false),
            ("/foo/{*}", "/foo/", false),
            ("/foo/{**}/", "/foo/bar/", true),
            ("/foo/{**}/", "/foo/bar/baz.txt/", true),
            ("/foo/{**}/", "/foo//", true),
            ("/foo/{**}/", "/foo/bar", false),
            ("/foo/{*}/bar/{**}", "/foo/buzz/bar/", true),
            ("/foo/{*}/bar/{**}", "/foo/buzz/bar/baz", true),
            ("/{**}", "/", true),
            ("/é/{*}", "/é/ü", true),
        ] {
            assert_eq!(template_holds(template, path), want, "{template} {path}");
        }
    }

    #[test]
    fn paths_have_one_safe_reading_or_none() {
        for (sent, want) in [
            ("/", Some("/")),
            ("/a", Some("/a")),
            ("/a/?q=/..", Some("/a/")),
            ("//a///b", Some("/a/b")),
            ("/a/./b/../c", Some("/a/c")),
            ("/a/..", Some("/")),
            ("/a/b/..", Some("/a/")),
            ("/%61dmin", Some("/admin")),
            ("/a%2e%2E/b", Some("/a../b")),
            ("/a/%2e%2e/b", Some("/b")),
            ("/%3a", Some("/%3A")),
            ("/public/..;/admin", None),
            ("/public/%2e%2E;x=1/admin", None),
            ("/public/..%3b/admin", None),
            ("/public/.;/admin", None),
            ("/public/;/admin", None),
            ("/a/...;x/b;", Some("/a/...;x/b;")),
            ("/..", None),
            ("/a/../../b", None),
            ("/a%2fb", None),
            ("/a%5Cb", None),
            ("/a\\b", None),
            ("/a%00", None),
            ("/a%zz", None),
            ("/a%", None),
            ("*", Some("*")),
            ("a", None),
            ("", None),
            ("/a%0a", None),
            ("/a%c3%a9", Some("/a%C3%A9")),
        ] {
            assert_eq!(normal_path(sent).as_deref(), want, "{sent:?}");
        }
    }

    #[test]
    fn strict_policies_refuse_parameters_and_other_encodings() {
        for (sent, strict, legacy) in [
            ("/admin;x", None, Some("/admin;x")),
            ("/admin%3bx", None, Some("/admin%3Bx")),
            ("/%c0%ae%c0%ae/admin", None, Some("/%C0%AE%C0%AE/admin")),
            ("/caf%e9", None, Some("/caf%E9")),
            ("/caf%C3%A9", Some("/caf%C3%A9"), Some("/caf%C3%A9")),
            ("/a%2fb", None, None),
        ] {
            assert_eq!(
                policy_path(sent, PolicyPaths::Strict).as_deref(),
                strict,
                "{sent:?}"
            );
            assert_eq!(
                policy_path(sent, PolicyPaths::Legacy).as_deref(),
                legacy,
                "{sent:?}"
            );
        }
    }

    #[test]
    fn routes_read_every_path() {
        for (sent, want) in [
            ("/a%2fb//c?q", "/a%2Fb/c"),
            ("/a\\b/../c", "/c"),
            ("/a%00/./%zz%", "/a%00/%zz%"),
            ("/../a", "/a"),
            ("/public/..;/admin", "/public/..;/admin"),
            ("a//b", "a//b"),
            ("*", "*"),
        ] {
            assert_eq!(routing_path(sent), want, "{sent:?}");
        }
    }
}
