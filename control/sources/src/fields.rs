//! Tables of fields of the Kubernetes and Istio APIs that Canal does not implement: which are
//! harmless, and what to report for the others.
//!
//! A field in no table is unknown and refused too: ignoring a filter or a condition would allow
//! traffic that its author wanted to stop.

mod destination_rule;

use canal_model::policy::ObjectKind;
use canal_yaml::tree::{YamlNode, YamlValue};

use destination_rule::DESTINATION_RULE;

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
    /// Left out if the function holds for the value, else refused.
    LeftOutIf(fn(&YamlNode) -> bool),
    /// Harmless if the function holds for the value, else refused.
    If(fn(&YamlNode) -> bool),
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

/// The field is left out if `is_about_quality` holds for its value, else refused.
const fn left_out_if(
    pattern: &'static str,
    is_about_quality: fn(&YamlNode) -> bool,
    problem: &'static str,
    fix: &'static str,
) -> KnownField {
    KnownField {
        pattern,
        harmless: Harmless::LeftOutIf(is_about_quality),
        problem,
        fix,
    }
}

const REMOVE: &str = "remove the field";
/// Fix for a field about quality of service, without which requests are served.
const KEEP_OR_REMOVE: &str = "keep it for a version that does it, or remove it";

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

const METADATA: [KnownField; 1] = [never(
    "metadata.generateName",
    "only an API server can generate names",
    "write metadata.name",
)];

/// Fields of EndpointSlices and Endpoints that say where an endpoint is, beside its address.
const ENDPOINT_NOISE: [&str; 16] = [
    "endpoints[].conditions.serving",
    "endpoints[].conditions.terminating",
    "endpoints[].hostname",
    "endpoints[].targetRef",
    "endpoints[].nodeName",
    "endpoints[].zone",
    "endpoints[].hints",
    "endpoints[].deprecatedTopology",
    "ports[].appProtocol",
    "subsets[].addresses[].hostname",
    "subsets[].addresses[].nodeName",
    "subsets[].addresses[].targetRef",
    "subsets[].notReadyAddresses[].hostname",
    "subsets[].notReadyAddresses[].nodeName",
    "subsets[].notReadyAddresses[].targetRef",
    "subsets[].ports[].appProtocol",
];

/// Fields of Namespaces and ServiceAccounts that only an API server and the kubelet read.
const ACCOUNT_NOISE: [&str; 4] = [
    "spec",
    "secrets",
    "imagePullSecrets",
    "automountServiceAccountToken",
];

/// Fields of Secrets that only an API server reads.
const SECRET_NOISE: [&str; 1] = ["immutable"];

/// Fields of ConfigMaps that only an API server and the kubelet read.
const CONFIG_MAP_NOISE: [&str; 2] = ["immutable", "binaryData"];

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
    left_out_if(
        "spec.publishNotReadyAddresses",
        |_| true,
        "requests to endpoints that are not ready are not supported in this version; those that are ready get all",
        KEEP_OR_REMOVE,
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
    left_out(
        "spec.externalName",
        "names outside the mesh are not supported in this version",
        REMOVE,
    ),
];

/// Fields of routes that say nothing of requests: UDPRoutes, TLSRoutes and TCPRoutes.
const RELAY_ROUTE: [KnownField; 2] = [
    USE_DEFAULT_GATEWAYS,
    never(
        "spec.rules[].filters",
        "a route of this kind has no filters",
        REMOVE,
    ),
];

const USE_DEFAULT_GATEWAYS: KnownField = never(
    "spec.useDefaultGateways",
    "routes attach to Services only in this version",
    "list the Services in parentRefs",
);

/// Fields of Gateways and GatewayClasses about objects that other implementations make.
const GATEWAY_NOISE: [&str; 3] = [
    "spec.description",
    "spec.infrastructure.labels",
    "spec.infrastructure.annotations",
];

const GATEWAY: [KnownField; 5] = [
    left_out(
        "spec.tls.backend",
        "the Gateway has no client certificate: it reaches backends by the mesh's own TLS",
        KEEP_OR_REMOVE,
    ),
    unless(
        "spec.defaultScope",
        "None",
        "a Gateway of routes that name no parent is not supported in this version",
        "name the Gateway in the routes",
    ),
    never(
        "spec.addresses[].routability",
        "Canal has one kind of address for Gateways",
        REMOVE,
    ),
    never("spec.listeners[].tls.options", TLS_OPTIONS, REMOVE),
    never(
        "spec.listeners[].tls.frontendValidation",
        CLIENT_CERTIFICATES,
        USE_FRONTEND,
    ),
];

const LISTENER_SET: [KnownField; 2] = [
    never("spec.listeners[].tls.options", TLS_OPTIONS, REMOVE),
    never(
        "spec.listeners[].tls.frontendValidation",
        CLIENT_CERTIFICATES,
        USE_FRONTEND,
    ),
];

const TLS_OPTIONS: &str = "Canal has no TLS options of its own";
const CLIENT_CERTIFICATES: &str =
    "Gateway API has the validation of clients at the Gateway since v1.4";
const USE_FRONTEND: &str = "write it as spec.tls.frontend of the Gateway";

const HTTP_ROUTE: [KnownField; 4] = [
    USE_DEFAULT_GATEWAYS,
    EXTENSION_REF,
    BACKEND_EXTENSION_REF,
    SESSION_PERSISTENCE,
];

const GRPC_ROUTE: [KnownField; 4] = [
    USE_DEFAULT_GATEWAYS,
    EXTENSION_REF,
    BACKEND_EXTENSION_REF,
    SESSION_PERSISTENCE,
];

const EXTENSION_REF: KnownField = never(
    "spec.rules[].filters[].extensionRef",
    "filters of other implementations are not supported in this version",
    "remove the filter",
);

const BACKEND_EXTENSION_REF: KnownField = never(
    "spec.rules[].backendRefs[].filters[].extensionRef",
    "filters of other implementations are not supported in this version",
    "remove the filter",
);

const SESSION_PERSISTENCE: KnownField = left_out(
    "spec.rules[].sessionPersistence",
    "session persistence is not supported in this version; requests of a session are balanced like others",
    KEEP_OR_REMOVE,
);

/// Settings of the gateway's own files, and of clients' certificates.
const SERVER_CLIENTS: &str =
    "clients are validated by authorities only, which the Secret of the server names";
const SERVER_FILES: &str = "certificates are read from Secrets only";
const SERVER_FILES_FIX: &str = "name a Secret in credentialName";
const SERVER_CIPHERS: &str = "Canal serves TLS 1.2 and 1.3 with ciphers of its own choice";

const ISTIO_GATEWAY: [KnownField; 16] = [
    unless(
        "spec.servers[].bind",
        "0.0.0.0",
        "a Gateway has one address, which Canal chooses",
        REMOVE,
    ),
    left_out(
        "spec.servers[].defaultEndpoint",
        "default endpoints have no effect, as in Istio",
        REMOVE,
    ),
    left_out(
        "spec.servers[].port.targetPort",
        "target ports have no effect, as in Istio",
        REMOVE,
    ),
    never(
        "spec.servers[].tls.serverCertificate",
        SERVER_FILES,
        SERVER_FILES_FIX,
    ),
    never(
        "spec.servers[].tls.privateKey",
        SERVER_FILES,
        SERVER_FILES_FIX,
    ),
    never(
        "spec.servers[].tls.tlsCertificates",
        SERVER_FILES,
        SERVER_FILES_FIX,
    ),
    never(
        "spec.servers[].tls.caCertificates",
        SERVER_FILES,
        "write ca.crt into the Secret",
    ),
    never("spec.servers[].tls.caCrl", SERVER_CLIENTS, REMOVE),
    never("spec.servers[].tls.crl", SERVER_CLIENTS, REMOVE),
    never("spec.servers[].tls.subjectAltNames", SERVER_CLIENTS, REMOVE),
    never(
        "spec.servers[].tls.verifyCertificateSpki",
        SERVER_CLIENTS,
        REMOVE,
    ),
    never(
        "spec.servers[].tls.verifyCertificateHash",
        SERVER_CLIENTS,
        REMOVE,
    ),
    never(
        "spec.servers[].tls.insecureSkipVerify",
        SERVER_CLIENTS,
        REMOVE,
    ),
    unless(
        "spec.servers[].tls.minProtocolVersion",
        "TLSV1_2",
        SERVER_CIPHERS,
        "write TLSV1_2 or remove the field",
    ),
    unless(
        "spec.servers[].tls.maxProtocolVersion",
        "TLSV1_3",
        SERVER_CIPHERS,
        "write TLSV1_3 or remove the field",
    ),
    never("spec.servers[].tls.cipherSuites", SERVER_CIPHERS, REMOVE),
];

const DESTINATION_SUBNETS: &str = "a Gateway has one address, whose ports are matched by port";
const CLIENT_LABELS: &str = "the client's labels cannot be matched in this version";
const CLIENT_NAMESPACE: &str = "the client's namespace cannot be matched in this version";

const VIRTUAL_SERVICE: [KnownField; 11] = [
    never(
        "spec.tls[].match[].destinationSubnets",
        DESTINATION_SUBNETS,
        REMOVE,
    ),
    never("spec.tls[].match[].sourceLabels", CLIENT_LABELS, REMOVE),
    never(
        "spec.tls[].match[].sourceNamespace",
        CLIENT_NAMESPACE,
        REMOVE,
    ),
    never(
        "spec.tcp[].match[].destinationSubnets",
        DESTINATION_SUBNETS,
        REMOVE,
    ),
    never("spec.tcp[].match[].sourceLabels", CLIENT_LABELS, REMOVE),
    never(
        "spec.tcp[].match[].sourceNamespace",
        CLIENT_NAMESPACE,
        REMOVE,
    ),
    left_out(
        "spec.http[].fault.delay.exponentialDelay",
        "exponential delays are not supported, as in Istio",
        "write fixedDelay",
    ),
    never(
        "spec.http[].fault.abort.http2Error",
        "resets of HTTP/2 streams are not supported, as in Istio",
        "write httpStatus or grpcStatus",
    ),
    left_out(
        "spec.http[].match[].statPrefix",
        "an own metrics prefix is not supported in this version",
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

/// Returns the fields of a kind that have no meaning for the mesh.
fn noise_of(kind: ObjectKind) -> &'static [&'static str] {
    match kind {
        ObjectKind::Service => &SERVICE_NOISE,
        ObjectKind::EndpointSlice | ObjectKind::Endpoints => &ENDPOINT_NOISE,
        ObjectKind::Namespace | ObjectKind::ServiceAccount => &ACCOUNT_NOISE,
        ObjectKind::Secret => &SECRET_NOISE,
        ObjectKind::ConfigMap => &CONFIG_MAP_NOISE,
        ObjectKind::GatewayClass | ObjectKind::Gateway => &GATEWAY_NOISE,
        _ => &[],
    }
}

/// Decides how to treat the field of `kind` at `pattern` (a path without indexes) that contains
/// `value`.
pub(crate) fn classify_field(
    kind: ObjectKind,
    pattern: &str,
    value: Option<&YamlNode>,
) -> FieldVerdict {
    // The source has read the first two. A status reports what is, and configures nothing.
    if matches!(pattern, "apiVersion" | "kind" | "status")
        || METADATA_NOISE.contains(&pattern)
        || noise_of(kind).contains(&pattern)
    {
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
        ObjectKind::Service => &SERVICE,
        ObjectKind::Gateway => &GATEWAY,
        ObjectKind::ListenerSet => &LISTENER_SET,
        ObjectKind::HttpRoute => &HTTP_ROUTE,
        ObjectKind::GrpcRoute => &GRPC_ROUTE,
        ObjectKind::UdpRoute | ObjectKind::TlsRoute | ObjectKind::TcpRoute => &RELAY_ROUTE,
        ObjectKind::IstioGateway => &ISTIO_GATEWAY,
        ObjectKind::VirtualService => &VIRTUAL_SERVICE,
        ObjectKind::DestinationRule => &DESTINATION_RULE,
        // Every undeclared field of these kinds is unknown, which is an error of the object.
        ObjectKind::Pod
        | ObjectKind::Node
        | ObjectKind::EndpointSlice
        | ObjectKind::Endpoints
        | ObjectKind::Namespace
        | ObjectKind::Secret
        | ObjectKind::ConfigMap
        | ObjectKind::ClusterTrustBundle
        | ObjectKind::ServiceAccount
        | ObjectKind::ReferenceGrant
        | ObjectKind::Tenant
        | ObjectKind::GatewayReplica
        | ObjectKind::GatewayClass
        | ObjectKind::Throttle
        | ObjectKind::ExternalAuthorizer
        | ObjectKind::Federation
        | ObjectKind::KeyServer
        | ObjectKind::Termination
        | ObjectKind::OffloadPreference
        | ObjectKind::TrafficPriority
        | ObjectKind::PeerAuthentication => &[],
        ObjectKind::AuthorizationPolicy => &AUTHORIZATION_POLICY,
        ObjectKind::RequestAuthentication => &REQUEST_AUTHENTICATION,
    };
    let pattern = destination_rule::pattern_in_table(kind, pattern);
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
        Harmless::If(is_harmless) if value.is_some_and(is_harmless) => FieldVerdict::Noise,
        // An empty list configures nothing, so it cannot be misunderstood.
        Harmless::Never | Harmless::LeftOutIf(_) if value.is_some_and(is_empty_list) => {
            FieldVerdict::Noise
        }
        // The object would do something else without such a value, not only the same less well.
        Harmless::LeftOutIf(is_about_quality) if !value.is_some_and(is_about_quality) => {
            FieldVerdict::Refused {
                problem: entry.problem,
                fix: entry.fix,
            }
        }
        Harmless::LeftOut | Harmless::LeftOutIf(_) => FieldVerdict::LeftOut {
            problem: entry.problem,
            fix: entry.fix,
        },
        Harmless::When(_) | Harmless::If(_) | Harmless::Never => FieldVerdict::Refused {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::{UnknownKindAction, kind_of};

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
            (ObjectKind::DestinationRule, "spec.exportTo", "['*']", true),
            (ObjectKind::DestinationRule, "spec.exportTo", "['.']", false),
            (ObjectKind::HttpRoute, "metadata.uid", "x", true),
            // The tables have undeclared fields only, so a declared one counts as unknown here.
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

    #[test]
    fn fields_about_quality_are_left_out_and_fields_that_restrict_are_refused() {
        for (line, is_left_out) in [
            ("HTTPRoute spec.rules[].sessionPersistence {}", true),
            (
                "HTTPRoute spec.rules[].backendRefs[].filters[].extensionRef {}",
                false,
            ),
            (
                "VirtualService spec.http[].fault.delay.exponentialDelay 1s",
                true,
            ),
            (
                "VirtualService spec.http[].fault.abort.http2Error CANCEL",
                false,
            ),
            (
                "VirtualService spec.tcp[].match[].sourceLabels {a: b}",
                false,
            ),
            ("Service spec.publishNotReadyAddresses true", true),
        ] {
            let mut parts = line.splitn(3, ' ');
            let kind = ObjectKind::from_word(parts.next().unwrap()).unwrap();
            let pattern = parts.next().unwrap();
            let node = canal_yaml::tree::parse(parts.next().unwrap()).unwrap();
            match classify_field(kind, pattern, Some(&node)) {
                FieldVerdict::LeftOut { .. } => assert!(is_left_out, "{line}"),
                FieldVerdict::Refused { .. } => assert!(!is_left_out, "{line}"),
                other => panic!("{line}: {other:?}"),
            }
        }
    }

    #[test]
    fn grpc_routes_are_read_in_two_versions_with_the_fields_of_their_own() {
        let known = Ok(ObjectKind::GrpcRoute);
        let other = Err(UnknownKindAction::OtherVersion(ObjectKind::GrpcRoute));
        for (version, expected) in [("v1", &known), ("v1alpha2", &known), ("v1beta1", &other)] {
            let found = kind_of(&format!("gateway.networking.k8s.io/{version}"), "GRPCRoute");
            assert_eq!(&found, expected, "{version}");
        }
        for (pattern, yaml, is_left_out) in [
            ("spec.rules[].sessionPersistence", "{}", true),
            ("spec.rules[].filters[].extensionRef", "{}", false),
            (
                "spec.rules[].backendRefs[].filters[].extensionRef",
                "{}",
                false,
            ),
            ("spec.useDefaultGateways", "All", false),
        ] {
            let node = canal_yaml::tree::parse(yaml).unwrap();
            let found = classify_field(ObjectKind::GrpcRoute, pattern, Some(&node));
            let is_refused = matches!(found, FieldVerdict::Refused { .. });
            let is_ignored = matches!(found, FieldVerdict::LeftOut { .. });
            assert_eq!(
                (is_ignored, is_refused),
                (is_left_out, !is_left_out),
                "{pattern}"
            );
        }
    }
}
