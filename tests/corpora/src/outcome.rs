//! Whether a diagnostic means that Canal does not do what a document says, or that the API itself
//! demands the diagnostic. It reads no documents.

use canal_model::diagnostic::Diagnostic;

/// Problems that the API of the document demands an implementation to report, and the place that
/// says so; the document counts as loaded. Every other diagnostic counts against its document.
const DEMANDED: [(&str, &str); 28] = [
    (
        "there is no Gateway ",
        "ParentReference.name: a route without its parent waits for it, without a condition",
    ),
    (
        "has the same hostname on port ",
        "ListenerConditionReason HostnameConflict: Conflicted",
    ),
    (
        "cannot attach to the listener",
        "ListenerConditionReason InvalidRouteKinds: ResolvedRefs",
    ),
    (
        "is not a protocol of listeners that Canal knows",
        "ListenerConditionReason UnsupportedProtocol: Accepted",
    ),
    (
        "Canal has no parameters of kind ",
        "GatewayConditionReason InvalidParameters: Accepted",
    ),
    (
        "there is no Service ",
        "HTTPRoute: ResolvedRefs BackendNotFound; Istio: 503",
    ),
    (
        "has no TCP port ",
        "HTTPRoute: NoMatchingParent, BackendNotFound",
    ),
    (
        "has no port named ",
        "ParentReference.sectionName: NoMatchingParent",
    ),
    (
        "does not allow ",
        "ReferenceGrant: ResolvedRefs RefNotPermitted",
    ),
    // A route on a listener that is closed for one of these reasons waits for it.
    (
        "no ReferenceGrant lets ",
        "ListenerConditionReason RefNotPermitted: ResolvedRefs",
    ),
    (
        "there is no Secret ",
        "ListenerConditionReason InvalidCertificateRef: ResolvedRefs",
    ),
    (
        "a certificate cannot be a ",
        "ListenerConditionReason InvalidCertificateRef: ResolvedRefs",
    ),
    (
        "has no listener named ",
        "RouteConditionReason NoMatchingParent: Accepted",
    ),
    (
        "has no listener with port ",
        "RouteConditionReason NoMatchingParent: Accepted",
    ),
    (
        " has a hostname in common with the route",
        "RouteConditionReason NoMatchingListenerHostname: Accepted",
    ),
    (
        " allows HTTPRoutes of namespace ",
        "RouteConditionReason NotAllowedByListeners: Accepted",
    ),
    (
        " allows GRPCRoutes of namespace ",
        "RouteConditionReason NotAllowedByListeners: Accepted",
    ),
    (
        " takes no ListenerSets of ",
        "ListenerSetConditionReason NotAllowed: Accepted",
    ),
    (
        "selects no ingress of Canal's",
        "Gateway.selector: IST0101 ReferencedResourceNotFound",
    ),
    (
        " is not Canal's",
        "ParentReference, VirtualService.gateways: an object of another implementation",
    ),
    (
        "no server of Gateway ",
        "VirtualService.hosts: IST0132 VirtualServiceHostNotFoundInGateway",
    ),
    (
        "the object is not exported to namespace ",
        "VirtualService.exportTo",
    ),
    (
        " is not a service of this tenant",
        "VirtualService.hosts, Destination.host: a route of a host without a service is kept; 503",
    ),
    (
        "the route is attached to nothing",
        "CommonRouteSpec.parentRefs is optional",
    ),
    (
        "the rule has no backend, so it answers ",
        "HTTPRouteRule.backendRefs",
    ),
    ("all weights are 0", "HTTPRouteRule.backendRefs"),
    ("only the first condition counts", "HTTPRouteMatch.headers"),
    ("has no subset ", "VirtualService Destination.subset: 503"),
];

/// Fields about which the API demands a condition, whatever is wrong with them.
const DEMANDED_FIELDS: [(&str, &str); 2] = [
    (
        "spec.listeners[].tls.certificateRefs[]",
        "ListenerConditionReason InvalidCertificateRef, RefNotPermitted: ResolvedRefs",
    ),
    (
        "spec.servers[].tls.credentialName",
        "ServerTLSSettings.credentialName: the server waits for its Secret",
    ),
];

/// Hints about a document that does what it says.
const HINTS: [&str; 9] = [
    "over which there is no gRPC",
    // The cluster forwards other transports, as it does beside Istio.
    "is not TCP; the mesh does not carry it",
    "the service has no selector and no EndpointSlice",
    "the service has no address, so no client can dial it",
    "to which HTTP rules do not apply",
    "is an unknown protocol; a connection's first bytes decide",
    "no selected pod has a container port named",
    "the pod does not name its zone",
    "no request has such a path",
];

/// The meaning of a diagnostic for the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Meaning {
    /// The document does what it says.
    Hint,
    /// The API demands the diagnostic, so the document is loaded.
    Demanded,
    /// Canal does not do what the document says.
    NotLoaded,
}

/// Returns the meaning of a diagnostic.
pub(crate) fn meaning_of(diagnostic: &Diagnostic) -> Meaning {
    let problem = diagnostic.problem.as_str();
    let field = canal_yaml::path::pattern(&diagnostic.field);
    if DEMANDED_FIELDS.iter().any(|(known, _)| *known == field)
        || DEMANDED.iter().any(|(text, _)| problem.contains(text))
    {
        Meaning::Demanded
    } else if HINTS.iter().any(|text| problem.contains(text)) {
        Meaning::Hint
    } else {
        Meaning::NotLoaded
    }
}

/// Returns the reason of a diagnostic without what is particular to its document: indexes and
/// quoted texts.
pub(crate) fn reason_of(field: &str, problem: &str) -> String {
    let mut reason = canal_yaml::path::pattern(field);
    if !reason.is_empty() {
        reason.push_str(": ");
    }
    // Every second part of the text stands between quotes.
    for (at, part) in problem.split('"').enumerate() {
        reason.push_str(if at % 2 == 0 { part } else { "…" });
    }
    reason
}
