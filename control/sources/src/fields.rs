//! Fields of the real APIs that Canal does not have: which are harmless, and what to say about the others. A field that is in
//! no list is unknown, and refused too: to ignore a filter or a condition would let through what its writer meant to stop.

use canal_model::policy::ObjectKind;

use crate::tree::{Node, Value};

/// What to do about a field that the object's type does not have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Without meaning for the mesh.
    Noise,
    Refused {
        problem: &'static str,
        mend: &'static str,
    },
    /// Says something that the mesh does not do, but nothing opens by leaving it out.
    LeftOut {
        problem: &'static str,
        mend: &'static str,
    },
    Unknown,
}

/// A known field: its pattern, the only values (or none) under which it is harmless, and why it is refused otherwise.
struct Entry {
    pattern: &'static str,
    harmless: Harmless,
    problem: &'static str,
    mend: &'static str,
}

enum Harmless {
    Never,
    LeftOut,
    /// As a text, or as `true`/`false`, or a list of only these; also when empty.
    When(&'static str),
}

const fn never(pattern: &'static str, problem: &'static str, mend: &'static str) -> Entry {
    Entry { pattern, harmless: Harmless::Never, problem, mend }
}
const fn unless(pattern: &'static str, value: &'static str, problem: &'static str, mend: &'static str) -> Entry {
    Entry { pattern, harmless: Harmless::When(value), problem, mend }
}

const fn left_out(pattern: &'static str, problem: &'static str, mend: &'static str) -> Entry {
    Entry { pattern, harmless: Harmless::LeftOut, problem, mend }
}

const REMOVE: &str = "remove the field";

/// `metadata` fields that an API server keeps for itself.
const METADATA_NOISE: [&str; 8] = [
    "metadata.uid",
    "metadata.resourceVersion",
    "metadata.generation",
    "metadata.managedFields",
    "metadata.selfLink",
    "metadata.ownerReferences",
    "metadata.finalizers",
    "metadata.deletionGracePeriodSeconds",
];

const METADATA: [Entry; 1] = [never("metadata.generateName", "only an API server can generate names", "write metadata.name")];

const SERVICE_NOISE: [&str; 10] = [
    "spec.ipFamilies",
    "spec.ipFamilyPolicy",
    "spec.ports[].nodePort",
    "spec.sessionAffinityConfig",
    "spec.externalTrafficPolicy",
    "spec.healthCheckNodePort",
    "spec.loadBalancerClass",
    "spec.loadBalancerIP",
    "spec.loadBalancerSourceRanges",
    "spec.allocateLoadBalancerNodePorts",
];

const SERVICE: [Entry; 5] = [
    unless(
        "spec.internalTrafficPolicy",
        "Cluster",
        "endpoints on the same node only are not in this version",
        "write Cluster or remove the field",
    ),
    unless("spec.publishNotReadyAddresses", "false", "requests to endpoints that are not ready are not in this version", REMOVE),
    left_out("spec.trafficDistribution", "preferring near endpoints is not in this version", REMOVE),
    left_out("spec.externalIPs", "addresses from outside the mesh are not in this version", "use clusterIPs"),
    unless("spec.externalName", "", "names outside the mesh are not in this version", REMOVE),
];

const ROUTE: [Entry; 7] = [
    never("spec.parentRefs[].sectionName", "ports are not attached to by name in this version", "use port"),
    never("spec.useDefaultGateways", "routes attach to Services only in this version", "list the Services in parentRefs"),
    never("spec.rules[].filters", "header changes, redirects, rewrites and mirrors are not in this version", REMOVE),
    never("spec.rules[].backendRefs[].filters", "header changes, redirects, rewrites and mirrors are not in this version", REMOVE),
    never("spec.rules[].timeouts", "timeouts of routes are not in this version", REMOVE),
    never("spec.rules[].retry", "retries are not in this version", REMOVE),
    never("spec.rules[].sessionPersistence", "session persistence is not in this version", REMOVE),
];

const VIRTUAL_SERVICE: [Entry; 27] = [
    unless(
        "spec.exportTo",
        "*",
        "a limited audience is not in this version",
        "remove the field: routes hold for all clients of the tenant",
    ),
    never("spec.tls", "routing TLS by server name is not in this version", REMOVE),
    never("spec.tcp", "routing TCP is not in this version", "remove the field; TCP goes to the service that was dialled"),
    never("spec.http[].redirect", "redirects are not in this version", REMOVE),
    never("spec.http[].directResponse", "direct responses are not in this version", REMOVE),
    never("spec.http[].delegate", "delegation is not in this version", "write the rules in this object"),
    never("spec.http[].rewrite", "rewrites are not in this version", REMOVE),
    never("spec.http[].timeout", "timeouts of routes are not in this version", REMOVE),
    never("spec.http[].retries", "retries are not in this version", REMOVE),
    never("spec.http[].fault", "fault injection is not in this version", REMOVE),
    never("spec.http[].mirror", "mirrors are not in this version", REMOVE),
    never("spec.http[].mirrors", "mirrors are not in this version", REMOVE),
    never("spec.http[].mirrorPercent", "mirrors are not in this version", REMOVE),
    never("spec.http[].mirrorPercentage", "mirrors are not in this version", REMOVE),
    never("spec.http[].corsPolicy", "CORS is not in this version", REMOVE),
    never("spec.http[].headers", "header changes are not in this version", REMOVE),
    never("spec.http[].route[].headers", "header changes are not in this version", REMOVE),
    never("spec.http[].match[].scheme", "the scheme cannot be matched in this version", REMOVE),
    never("spec.http[].match[].sourceLabels", "the client's labels cannot be matched in this version", REMOVE),
    never("spec.http[].match[].sourceNamespace", "the client's namespace cannot be matched in this version", REMOVE),
    unless(
        "spec.http[].match[].gateways",
        "mesh",
        "requests from other gateways than `mesh` are not in this version",
        "write mesh or remove the field",
    ),
    unless("spec.http[].match[].ignoreUriCase", "false", "matching without case is not in this version", "use uri.regex with (?i)"),
    never(
        "spec.http[].match[].withoutHeaders",
        "matching the absence of a header is not in this version",
        "put a rule that matches the header before this one",
    ),
    unless("spec.http[].match[].statPrefix", "", "an own metrics prefix is not in this version", REMOVE),
    never("spec.http[].route[].destination.port.name", "ports are not named in this version", "use port.number"),
    never("spec.http[].match[].uri.ignoreCase", "matching without case is not in this version", "use regex with (?i)"),
    never("spec.http[].mirror_percent", "mirrors are not in this version", REMOVE),
];

const DESTINATION_RULE: [Entry; 4] = [
    never("spec.trafficPolicy", "load balancing, connection pools, outlier detection and TLS settings are not in this version", REMOVE),
    never(
        "spec.subsets[].trafficPolicy",
        "load balancing, connection pools, outlier detection and TLS settings are not in this version",
        REMOVE,
    ),
    unless("spec.exportTo", "*", "a limited audience is not in this version", "remove the field"),
    never("spec.workloadSelector", "rules for some clients only are not in this version", REMOVE),
];

const AUTHORIZATION_POLICY: [Entry; 1] =
    [never("spec.selector.matchExpressions", "workloads are selected by equal labels only", "use matchLabels")];

const REQUEST_AUTHENTICATION: [Entry; 3] = [
    never("spec.selector.matchExpressions", "workloads are selected by equal labels only", "use matchLabels"),
    left_out("spec.jwtRules[].timeout", "the controller has a time of its own for fetching keys", REMOVE),
    never("spec.jwtRules[].spaceDelimitedClaims", "other claims than `scope` and `permission` are not split", REMOVE),
];

/// Judges the field of `kind` at `pattern` (a path without numbers), which holds `value`.
pub(crate) fn judge(kind: ObjectKind, pattern: &str, value: Option<&Node>) -> Verdict {
    if matches!(pattern, "apiVersion" | "kind" | "status") || METADATA_NOISE.contains(&pattern) {
        return Verdict::Noise;
    }
    let entries: &[Entry] = match kind {
        // A pod's containers, volumes and statuses are for the kubelet, as are a node's taints, images and capacities.
        ObjectKind::Pod | ObjectKind::Node if pattern.starts_with("spec.") || pattern.starts_with("status.") => return Verdict::Noise,
        ObjectKind::Service if SERVICE_NOISE.contains(&pattern) => return Verdict::Noise,
        ObjectKind::Service => &SERVICE,
        ObjectKind::HttpRoute | ObjectKind::UdpRoute => &ROUTE,
        ObjectKind::VirtualService => &VIRTUAL_SERVICE,
        ObjectKind::DestinationRule => &DESTINATION_RULE,
        ObjectKind::Pod
        | ObjectKind::Node
        | ObjectKind::ReferenceGrant
        | ObjectKind::Tenant
        | ObjectKind::Gateway
        | ObjectKind::Throttle
        | ObjectKind::ExternalAuthorizer
        | ObjectKind::Federation
        | ObjectKind::KeyServer
        | ObjectKind::Termination
        | ObjectKind::PeerAuthentication => &[],
        ObjectKind::AuthorizationPolicy => &AUTHORIZATION_POLICY,
        ObjectKind::RequestAuthentication => &REQUEST_AUTHENTICATION,
    };
    let Some(entry) = entries.iter().chain(&METADATA).find(|entry| entry.pattern == pattern) else { return Verdict::Unknown };
    match entry.harmless {
        Harmless::When(wanted) if value.is_some_and(|value| says_only(value, wanted)) => Verdict::Noise,
        Harmless::LeftOut => Verdict::LeftOut { problem: entry.problem, mend: entry.mend },
        Harmless::When(_) | Harmless::Never => Verdict::Refused { problem: entry.problem, mend: entry.mend },
    }
}

fn says_only(node: &Node, wanted: &str) -> bool {
    match &node.value {
        Value::Null => true,
        Value::Bool(value) => value.to_string() == wanted,
        Value::Text(text) => text == wanted || text.is_empty(),
        Value::List(items) => items.iter().all(|item| item.text() == Some(wanted)),
        Value::Unsigned(_) | Value::Signed(_) | Value::Float(_) | Value::Map(_) => false,
    }
}

/// What to do with a whole document whose kind Canal does not read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stranger {
    /// The kind itself is fine, but not in this `apiVersion`.
    OtherVersion(ObjectKind),
    /// Something for Kubernetes itself.
    Skipped,
    /// Policy, which must not be ignored.
    Refused,
}

/// API groups whose objects say nothing about traffic.
const BYSTANDER_GROUPS: [&str; 11] = [
    "",
    "apps",
    "batch",
    "autoscaling",
    "policy",
    "rbac.authorization.k8s.io",
    "storage.k8s.io",
    "scheduling.k8s.io",
    "coordination.k8s.io",
    "apiextensions.k8s.io",
    "discovery.k8s.io",
];

/// The kind of a document, or how it is strange.
pub(crate) fn kind_of(api_version: &str, kind: &str) -> Result<ObjectKind, Stranger> {
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    let known = ObjectKind::ALL.into_iter().find(|k| k.as_str() == kind && group_of(*k) == group);
    match known {
        Some(known) if known.api_versions().contains(&api_version) => Ok(known),
        Some(known) => Err(Stranger::OtherVersion(known)),
        None if BYSTANDER_GROUPS.contains(&group) && kind != "List" => Err(Stranger::Skipped),
        None => Err(Stranger::Refused),
    }
}

fn group_of(kind: ObjectKind) -> &'static str {
    kind.api_versions().first().and_then(|version| version.split_once('/')).map_or("", |(group, _)| group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_told_apart_by_group() {
        for (api_version, kind, expected) in [
            ("v1", "Pod", Ok(ObjectKind::Pod)),
            ("v1", "Node", Ok(ObjectKind::Node)),
            ("canal.mesh/v1", "Throttle", Ok(ObjectKind::Throttle)),
            ("canal.mesh/v1", "Gateway", Ok(ObjectKind::Gateway)),
            ("gateway.networking.k8s.io/v1", "Gateway", Err(Stranger::Refused)),
            ("networking.istio.io/v1", "Gateway", Err(Stranger::Refused)),
            ("gateway.networking.k8s.io/v1beta1", "HTTPRoute", Ok(ObjectKind::HttpRoute)),
            ("gateway.networking.k8s.io/v1alpha2", "HTTPRoute", Err(Stranger::OtherVersion(ObjectKind::HttpRoute))),
            ("gateway.networking.k8s.io/v1alpha2", "UDPRoute", Ok(ObjectKind::UdpRoute)),
            ("gateway.networking.k8s.io/v1", "UDPRoute", Err(Stranger::OtherVersion(ObjectKind::UdpRoute))),
            ("networking.istio.io/v1alpha3", "VirtualService", Ok(ObjectKind::VirtualService)),
            ("security.istio.io/v1", "AuthorizationPolicy", Ok(ObjectKind::AuthorizationPolicy)),
            ("security.istio.io/v1beta1", "PeerAuthentication", Ok(ObjectKind::PeerAuthentication)),
            ("security.istio.io/v1alpha1", "RequestAuthentication", Err(Stranger::OtherVersion(ObjectKind::RequestAuthentication))),
            ("security.istio.io/v1", "MeshPolicy", Err(Stranger::Refused)),
            ("canal.mesh/v1", "KeyServer", Ok(ObjectKind::KeyServer)),
            ("apps/v1", "Deployment", Err(Stranger::Skipped)),
            ("v1", "ServiceAccount", Err(Stranger::Skipped)),
            ("networking.k8s.io/v1", "NetworkPolicy", Err(Stranger::Refused)),
            ("v1", "List", Err(Stranger::Refused)),
            ("v1", "HTTPRoute", Err(Stranger::Skipped)),
            ("example.com/v1", "Thing", Err(Stranger::Refused)),
        ] {
            assert_eq!(kind_of(api_version, kind), expected, "{api_version} {kind}");
        }
    }

    #[test]
    fn harmless_values_of_refused_fields_are_tolerated() {
        for (kind, pattern, yaml, noise) in [
            (ObjectKind::Service, "spec.internalTrafficPolicy", "Cluster", true),
            (ObjectKind::Service, "spec.internalTrafficPolicy", "Local", false),
            (ObjectKind::Service, "spec.publishNotReadyAddresses", "false", true),
            (ObjectKind::Service, "spec.publishNotReadyAddresses", "true", false),
            (ObjectKind::VirtualService, "spec.exportTo", "['*']", true),
            (ObjectKind::VirtualService, "spec.exportTo", "['.']", false),
            (ObjectKind::VirtualService, "spec.http[].match[].ignoreUriCase", "true", false),
            (ObjectKind::VirtualService, "spec.http[].match[].gateways", "[mesh]", true),
            (ObjectKind::HttpRoute, "spec.rules[].filters", "[]", false),
            (ObjectKind::HttpRoute, "metadata.uid", "x", true),
            (ObjectKind::HttpRoute, "spec.rules", "x", false),
            (ObjectKind::Pod, "spec.containers[].image", "x", true),
            (ObjectKind::Pod, "specs", "x", false),
            (ObjectKind::Node, "status.capacity", "{cpu: 4}", true),
            (ObjectKind::Throttle, "spec.requests", "x", false),
            (ObjectKind::AuthorizationPolicy, "spec.selector.matchExpressions", "[x]", false),
            (ObjectKind::RequestAuthentication, "spec.jwtRules[].spaceDelimitedClaims", "[x]", false),
        ] {
            let node = crate::tree::parse(yaml).unwrap();
            assert_eq!(judge(kind, pattern, Some(&node)) == Verdict::Noise, noise, "{kind} {pattern}: {yaml}");
        }
    }
}
