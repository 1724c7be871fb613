//! Tables of fields of the Kubernetes and Istio APIs that Canal does not implement: which are
//! harmless, and what to report for the others.
//!
//! A field in no table is unknown and refused too: ignoring a filter or a condition would allow
//! traffic that its author wanted to stop.

use canal_model::policy::ObjectKind;
use canal_yaml::tree::{YamlNode, YamlValue};

/// Treatment of a field that the object's type does not have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FieldVerdict {
    /// The field has no meaning for the mesh.
    Noise,
    /// Ignoring the field could change what is allowed, so it is an error.
    Refused {
        problem: &'static str,
        fix: &'static str,
    },
    /// The field requests something that Canal does not do, but ignoring it allows no additional
    /// traffic, so it is a warning.
    LeftOut {
        problem: &'static str,
        fix: &'static str,
    },
    /// No table contains the field.
    Unknown,
}

/// A known field: its pattern, the values under which it is harmless, and why it is refused
/// otherwise.
struct KnownField {
    pattern: &'static str,
    harmless: Harmless,
    problem: &'static str,
    fix: &'static str,
}

enum Harmless {
    Never,
    LeftOut,
    /// Harmless if the value is this text, this `true`/`false`, a list of only this text, or empty.
    When(&'static str),
}

const fn never(pattern: &'static str, problem: &'static str, fix: &'static str) -> KnownField {
    KnownField {
        pattern,
        harmless: Harmless::Never,
        problem,
        fix,
    }
}
const fn unless(
    pattern: &'static str,
    value: &'static str,
    problem: &'static str,
    fix: &'static str,
) -> KnownField {
    KnownField {
        pattern,
        harmless: Harmless::When(value),
        problem,
        fix,
    }
}

const fn left_out(pattern: &'static str, problem: &'static str, fix: &'static str) -> KnownField {
    KnownField {
        pattern,
        harmless: Harmless::LeftOut,
        problem,
        fix,
    }
}

const REMOVE: &str = "remove the field";

/// `metadata` fields that the API server manages itself.
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

/// A field that was renamed in a release. The old name is accepted for one more release.
pub(crate) struct RenamedField {
    kind: ObjectKind,
    /// Path in the object; its last element is the old name.
    pub(crate) path: &'static [&'static str],
    pub(crate) new_name: &'static str,
}

/// Renamed fields. The types accept the old names by serde's `alias`; this table produces the
/// warning.
const RENAMED: [RenamedField; 2] = [
    RenamedField {
        kind: ObjectKind::Tenant,
        path: &["spec", "outside"],
        new_name: "outboundTrafficPolicy",
    },
    RenamedField {
        kind: ObjectKind::Tenant,
        path: &["spec", "keys", "place"],
        new_name: "location",
    },
];

/// Returns the renamed fields of a kind.
pub(crate) fn renamed_fields(kind: ObjectKind) -> impl Iterator<Item = &'static RenamedField> {
    RENAMED.iter().filter(move |renamed| renamed.kind == kind)
}

const METADATA: [KnownField; 1] = [never(
    "metadata.generateName",
    "only an API server can generate names",
    "write metadata.name",
)];

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

const SERVICE: [KnownField; 5] = [
    unless(
        "spec.internalTrafficPolicy",
        "Cluster",
        "endpoints on the same node only are not supported in this version",
        "write Cluster or remove the field",
    ),
    unless(
        "spec.publishNotReadyAddresses",
        "false",
        "requests to endpoints that are not ready are not supported in this version",
        REMOVE,
    ),
    left_out(
        "spec.trafficDistribution",
        "preferring near endpoints is not supported in this version",
        REMOVE,
    ),
    left_out(
        "spec.externalIPs",
        "addresses from outside the mesh are not supported in this version",
        "use clusterIPs",
    ),
    unless(
        "spec.externalName",
        "",
        "names outside the mesh are not supported in this version",
        REMOVE,
    ),
];

const ROUTE: [KnownField; 7] = [
    never(
        "spec.parentRefs[].sectionName",
        "ports are not attached to by name in this version",
        "use port",
    ),
    never(
        "spec.useDefaultGateways",
        "routes attach to Services only in this version",
        "list the Services in parentRefs",
    ),
    never(
        "spec.rules[].filters",
        "header changes, redirects, rewrites and mirrors are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.rules[].backendRefs[].filters",
        "header changes, redirects, rewrites and mirrors are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.rules[].timeouts",
        "timeouts of routes are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.rules[].retry",
        "retries are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.rules[].sessionPersistence",
        "session persistence is not supported in this version",
        REMOVE,
    ),
];

const VIRTUAL_SERVICE: [KnownField; 27] = [
    unless(
        "spec.exportTo",
        "*",
        "a limited audience is not supported in this version",
        "remove the field: routes apply to all clients of the tenant",
    ),
    never(
        "spec.tls",
        "routing TLS by server name is not supported in this version",
        REMOVE,
    ),
    never(
        "spec.tcp",
        "routing TCP is not supported in this version",
        "remove the field; TCP goes to the service that was dialled",
    ),
    never(
        "spec.http[].redirect",
        "redirects are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].directResponse",
        "direct responses are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].delegate",
        "delegation is not supported in this version",
        "write the rules in this object",
    ),
    never(
        "spec.http[].rewrite",
        "rewrites are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].timeout",
        "timeouts of routes are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].retries",
        "retries are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].fault",
        "fault injection is not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].mirror",
        "mirrors are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].mirrors",
        "mirrors are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].mirrorPercent",
        "mirrors are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].mirrorPercentage",
        "mirrors are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].corsPolicy",
        "CORS is not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].headers",
        "header changes are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].route[].headers",
        "header changes are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].match[].scheme",
        "the scheme cannot be matched in this version",
        REMOVE,
    ),
    never(
        "spec.http[].match[].sourceLabels",
        "the client's labels cannot be matched in this version",
        REMOVE,
    ),
    never(
        "spec.http[].match[].sourceNamespace",
        "the client's namespace cannot be matched in this version",
        REMOVE,
    ),
    unless(
        "spec.http[].match[].gateways",
        "mesh",
        "requests from other gateways than `mesh` are not supported in this version",
        "write mesh or remove the field",
    ),
    unless(
        "spec.http[].match[].ignoreUriCase",
        "false",
        "matching without case is not supported in this version",
        "use uri.regex with (?i)",
    ),
    never(
        "spec.http[].match[].withoutHeaders",
        "matching the absence of a header is not supported in this version",
        "put a rule that matches the header before this one",
    ),
    unless(
        "spec.http[].match[].statPrefix",
        "",
        "a custom metrics prefix is not supported in this version",
        REMOVE,
    ),
    never(
        "spec.http[].route[].destination.port.name",
        "ports are not named in this version",
        "use port.number",
    ),
    never(
        "spec.http[].match[].uri.ignoreCase",
        "matching without case is not supported in this version",
        "use regex with (?i)",
    ),
    never(
        "spec.http[].mirror_percent",
        "mirrors are not supported in this version",
        REMOVE,
    ),
];

const DESTINATION_RULE: [KnownField; 4] = [
    never(
        "spec.trafficPolicy",
        "load balancing, connection pools, outlier detection and TLS settings are not supported in this version",
        REMOVE,
    ),
    never(
        "spec.subsets[].trafficPolicy",
        "load balancing, connection pools, outlier detection and TLS settings are not supported in this version",
        REMOVE,
    ),
    unless(
        "spec.exportTo",
        "*",
        "a limited audience is not supported in this version",
        "remove the field",
    ),
    never(
        "spec.workloadSelector",
        "rules for some clients only are not supported in this version",
        REMOVE,
    ),
];

const AUTHORIZATION_POLICY: [KnownField; 1] = [never(
    "spec.selector.matchExpressions",
    "workloads can be selected only by equality of labels",
    "use matchLabels",
)];

const REQUEST_AUTHENTICATION: [KnownField; 3] = [
    never(
        "spec.selector.matchExpressions",
        "workloads can be selected only by equality of labels",
        "use matchLabels",
    ),
    left_out(
        "spec.jwtRules[].timeout",
        "the controller uses its own timeout for fetching keys",
        REMOVE,
    ),
    never(
        "spec.jwtRules[].spaceDelimitedClaims",
        "other claims than `scope` and `permission` are not split",
        REMOVE,
    ),
];

/// Decides how to treat the field of `kind` at `pattern` (a path without indexes) that contains
/// `value`.
pub(crate) fn classify_field(
    kind: ObjectKind,
    pattern: &str,
    value: Option<&YamlNode>,
) -> FieldVerdict {
    if matches!(pattern, "apiVersion" | "kind" | "status") || METADATA_NOISE.contains(&pattern) {
        return FieldVerdict::Noise;
    }
    let entries: &[KnownField] = match kind {
        // The kubelet uses a pod's containers, volumes and statuses, and a node's taints, images
        // and capacities.
        ObjectKind::Pod | ObjectKind::Node
            if pattern.starts_with("spec.") || pattern.starts_with("status.") =>
        {
            return FieldVerdict::Noise;
        }
        ObjectKind::Service if SERVICE_NOISE.contains(&pattern) => return FieldVerdict::Noise,
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
    let Some(entry) = entries
        .iter()
        .chain(&METADATA)
        .find(|entry| entry.pattern == pattern)
    else {
        return FieldVerdict::Unknown;
    };
    match entry.harmless {
        Harmless::When(wanted) if value.is_some_and(|value| has_only_value(value, wanted)) => {
            FieldVerdict::Noise
        }
        Harmless::Never if value.is_some_and(is_empty_list) => FieldVerdict::Noise,
        Harmless::LeftOut => FieldVerdict::LeftOut {
            problem: entry.problem,
            fix: entry.fix,
        },
        Harmless::When(_) | Harmless::Never => FieldVerdict::Refused {
            problem: entry.problem,
            fix: entry.fix,
        },
    }
}

/// Returns true for an empty list, which Helm charts write for an unused feature.
fn is_empty_list(node: &YamlNode) -> bool {
    matches!(&node.value, YamlValue::List(items) if items.is_empty())
}

fn has_only_value(node: &YamlNode, wanted: &str) -> bool {
    match &node.value {
        YamlValue::Null => true,
        YamlValue::Bool(value) => value.to_string() == wanted,
        YamlValue::Text(text) => text == wanted || text.is_empty(),
        YamlValue::List(items) => items.iter().all(|item| item.text() == Some(wanted)),
        YamlValue::Unsigned(_) | YamlValue::Signed(_) | YamlValue::Float(_) | YamlValue::Map(_) => {
            false
        }
    }
}

/// Treatment of a whole document whose kind Canal does not read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum UnknownKindAction {
    /// Canal reads the kind, but not in this `apiVersion`.
    OtherVersion(ObjectKind),
    /// An object that only concerns Kubernetes itself.
    Skipped,
    /// A policy kind, which must not be ignored.
    Refused,
}

/// API groups whose objects do not affect traffic.
const IGNORED_API_GROUPS: [&str; 11] = [
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

/// Returns the kind of a document, or the treatment of a document of an unknown kind.
pub(crate) fn kind_of(api_version: &str, kind: &str) -> Result<ObjectKind, UnknownKindAction> {
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    let known = ObjectKind::ALL
        .into_iter()
        .find(|k| k.as_str() == kind && group_of(*k) == group);
    match known {
        Some(known) if known.api_versions().contains(&api_version) => Ok(known),
        Some(known) => Err(UnknownKindAction::OtherVersion(known)),
        None if IGNORED_API_GROUPS.contains(&group) && kind != "List" => {
            Err(UnknownKindAction::Skipped)
        }
        None => Err(UnknownKindAction::Refused),
    }
}

fn group_of(kind: ObjectKind) -> &'static str {
    kind.api_versions()
        .first()
        .and_then(|version| version.split_once('/'))
        .map_or("", |(group, _)| group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_distinguished_by_group() {
        for (api_version, kind, expected) in [
            ("v1", "Pod", Ok(ObjectKind::Pod)),
            ("v1", "Node", Ok(ObjectKind::Node)),
            ("canal.mesh/v1", "Throttle", Ok(ObjectKind::Throttle)),
            ("canal.mesh/v1", "Gateway", Ok(ObjectKind::Gateway)),
            (
                "gateway.networking.k8s.io/v1",
                "Gateway",
                Err(UnknownKindAction::Refused),
            ),
            (
                "networking.istio.io/v1",
                "Gateway",
                Err(UnknownKindAction::Refused),
            ),
            (
                "gateway.networking.k8s.io/v1beta1",
                "HTTPRoute",
                Ok(ObjectKind::HttpRoute),
            ),
            (
                "gateway.networking.k8s.io/v1alpha2",
                "HTTPRoute",
                Err(UnknownKindAction::OtherVersion(ObjectKind::HttpRoute)),
            ),
            (
                "gateway.networking.k8s.io/v1alpha2",
                "UDPRoute",
                Ok(ObjectKind::UdpRoute),
            ),
            (
                "gateway.networking.k8s.io/v1",
                "UDPRoute",
                Err(UnknownKindAction::OtherVersion(ObjectKind::UdpRoute)),
            ),
            (
                "networking.istio.io/v1alpha3",
                "VirtualService",
                Ok(ObjectKind::VirtualService),
            ),
            (
                "security.istio.io/v1",
                "AuthorizationPolicy",
                Ok(ObjectKind::AuthorizationPolicy),
            ),
            (
                "security.istio.io/v1beta1",
                "PeerAuthentication",
                Ok(ObjectKind::PeerAuthentication),
            ),
            (
                "security.istio.io/v1alpha1",
                "RequestAuthentication",
                Err(UnknownKindAction::OtherVersion(
                    ObjectKind::RequestAuthentication,
                )),
            ),
            (
                "security.istio.io/v1",
                "MeshPolicy",
                Err(UnknownKindAction::Refused),
            ),
            ("canal.mesh/v1", "KeyServer", Ok(ObjectKind::KeyServer)),
            ("apps/v1", "Deployment", Err(UnknownKindAction::Skipped)),
            ("v1", "ServiceAccount", Err(UnknownKindAction::Skipped)),
            (
                "networking.k8s.io/v1",
                "NetworkPolicy",
                Err(UnknownKindAction::Refused),
            ),
            ("v1", "List", Err(UnknownKindAction::Refused)),
            ("v1", "HTTPRoute", Err(UnknownKindAction::Skipped)),
            ("example.com/v1", "Thing", Err(UnknownKindAction::Refused)),
        ] {
            assert_eq!(kind_of(api_version, kind), expected, "{api_version} {kind}");
        }
    }

    #[test]
    fn harmless_values_of_refused_fields_are_tolerated() {
        for (kind, pattern, yaml, noise) in [
            (
                ObjectKind::Service,
                "spec.internalTrafficPolicy",
                "Cluster",
                true,
            ),
            (
                ObjectKind::Service,
                "spec.internalTrafficPolicy",
                "Local",
                false,
            ),
            (
                ObjectKind::Service,
                "spec.publishNotReadyAddresses",
                "false",
                true,
            ),
            (
                ObjectKind::Service,
                "spec.publishNotReadyAddresses",
                "true",
                false,
            ),
            (ObjectKind::VirtualService, "spec.exportTo", "['*']", true),
            (ObjectKind::VirtualService, "spec.exportTo", "['.']", false),
            (
                ObjectKind::VirtualService,
                "spec.http[].match[].ignoreUriCase",
                "true",
                false,
            ),
            (
                ObjectKind::VirtualService,
                "spec.http[].match[].gateways",
                "[mesh]",
                true,
            ),
            (ObjectKind::HttpRoute, "spec.rules[].filters", "[]", true),
            (
                ObjectKind::HttpRoute,
                "spec.rules[].filters",
                "[{type: RequestMirror}]",
                false,
            ),
            (ObjectKind::HttpRoute, "spec.rules[].filters", "{}", false),
            (ObjectKind::HttpRoute, "metadata.uid", "x", true),
            (ObjectKind::HttpRoute, "spec.rules", "x", false),
            (ObjectKind::Pod, "spec.containers[].image", "x", true),
            (ObjectKind::Pod, "specs", "x", false),
            (ObjectKind::Node, "status.capacity", "{cpu: 4}", true),
            (ObjectKind::Throttle, "spec.requests", "x", false),
            (
                ObjectKind::AuthorizationPolicy,
                "spec.selector.matchExpressions",
                "[x]",
                false,
            ),
            (
                ObjectKind::RequestAuthentication,
                "spec.jwtRules[].spaceDelimitedClaims",
                "[x]",
                false,
            ),
        ] {
            let node = canal_yaml::tree::parse(yaml).unwrap();
            assert_eq!(
                classify_field(kind, pattern, Some(&node)) == FieldVerdict::Noise,
                noise,
                "{kind} {pattern}: {yaml}"
            );
        }
    }
}
