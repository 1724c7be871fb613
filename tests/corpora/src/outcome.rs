//! Whether a diagnostic means that Canal does not do what a document says, or that the API itself
//! demands the diagnostic. Codes decide, and not sentences. It reads no documents.

use canal_model::diagnostic::Diagnostic;
use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::policy::ObjectKind;

/// Problems that the API of the document demands an implementation to report, and the place that
/// says so; the document counts as loaded. Every other diagnostic counts against its document.
const DEMANDED: [(Code, &str); 30] = [
    (
        Code::UnresolvedParent,
        "ParentReference.name: a route without its parent waits for it, without a condition",
    ),
    (
        Code::RouteWithoutParent,
        "CommonRouteSpec.parentRefs is optional",
    ),
    (
        Code::ParentPortNotFound,
        "RouteConditionReason NoMatchingParent: Accepted",
    ),
    (
        Code::UnresolvedBackend,
        "RouteConditionReason BackendNotFound: ResolvedRefs; Istio: 503",
    ),
    (
        Code::BackendPortNotFound,
        "RouteConditionReason BackendNotFound: ResolvedRefs",
    ),
    (
        Code::UnsupportedBackend,
        "RouteConditionReason InvalidKind: ResolvedRefs",
    ),
    (
        Code::BackendNotPermitted,
        "RouteConditionReason RefNotPermitted: ResolvedRefs",
    ),
    (
        Code::BackendProtocolMismatch,
        "RouteConditionReason UnsupportedProtocol: ResolvedRefs",
    ),
    (
        Code::UnresolvedSubset,
        "VirtualService Destination.subset: 503",
    ),
    (
        Code::UnresolvedHost,
        "VirtualService.hosts, Destination.host: a route of a host without a service is kept; 503",
    ),
    (Code::RuleWithoutBackend, "HTTPRouteRule.backendRefs"),
    (Code::ZeroWeights, "HTTPRouteRule.backendRefs"),
    (Code::DuplicateCondition, "HTTPRouteMatch.headers"),
    (
        Code::ForeignGatewayClass,
        "ParentReference, VirtualService.gateways, Gateway.selector: an object of another implementation",
    ),
    (
        Code::UnsupportedParameters,
        "GatewayConditionReason InvalidParameters: Accepted",
    ),
    (
        Code::UnsupportedAddress,
        "GatewayConditionReason UnsupportedAddress: Accepted",
    ),
    (
        Code::UnknownListenerProtocol,
        "ListenerConditionReason UnsupportedProtocol: Accepted",
    ),
    (
        Code::ListenerConflict,
        "ListenerConditionReason HostnameConflict, ProtocolConflict: Conflicted",
    ),
    (
        Code::UnsupportedRouteKind,
        "ListenerConditionReason InvalidRouteKinds: ResolvedRefs",
    ),
    (
        Code::InvalidCertificate,
        "ListenerConditionReason InvalidCertificateRef: ResolvedRefs; ServerTLSSettings.credentialName",
    ),
    (
        Code::CertificateNotPermitted,
        "ListenerConditionReason RefNotPermitted: ResolvedRefs",
    ),
    (
        Code::InvalidCaCertificate,
        "ListenerConditionReason InvalidCACertificateRef, InvalidCACertificateKind: ResolvedRefs",
    ),
    (
        Code::InsecureClientValidation,
        "GatewayConditionType InsecureFrontendValidationMode",
    ),
    (
        Code::UnresolvedGateway,
        "ListenerSetConditionReason ParentNotAccepted: Accepted",
    ),
    (
        Code::ListenerSetNotAllowed,
        "ListenerSetConditionReason NotAllowed: Accepted",
    ),
    (
        Code::NoMatchingListener,
        "RouteConditionReason NoMatchingParent: Accepted",
    ),
    (
        Code::RouteNotAllowed,
        "RouteConditionReason NotAllowedByListeners: Accepted; VirtualService.exportTo",
    ),
    (
        Code::NoMatchingListenerHostname,
        "RouteConditionReason NoMatchingListenerHostname: Accepted; IST0132",
    ),
    (
        Code::HostnameTaken,
        "GRPCRouteSpec.hostnames: the older route keeps the host",
    ),
    (
        Code::ListenerClosed,
        "RouteConditionReason Pending: Accepted, unless Canal does not serve the listener",
    ),
];

/// Hints about a document that does what it says.
const HINTS: [Code; 8] = [
    // The cluster forwards other transports, as it does beside Istio.
    Code::PortNotCarried,
    Code::ServiceWithoutEndpoints,
    Code::ServiceWithoutAddress,
    Code::OpaqueParentPort,
    Code::UnknownAppProtocol,
    Code::UnresolvedTargetPort,
    Code::UnknownZone,
    Code::UnmatchablePath,
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

/// Returns the diagnostics of one tenant, each with its meaning.
pub(crate) fn meanings(diagnostics: &[Diagnostic]) -> Vec<(&Diagnostic, Meaning)> {
    let mut found: Vec<(&Diagnostic, Meaning)> = diagnostics
        .iter()
        .map(|diagnostic| (diagnostic, meaning_of(diagnostic.code)))
        .collect();
    let has_listeners = |diagnostic: &Diagnostic| {
        let object = diagnostic.object.as_ref();
        object.is_none_or(|it| matches!(it.kind, ObjectKind::Gateway | ObjectKind::ListenerSet))
    };
    // A route does not say which object closed its listener. If Canal lacks anything that a Gateway
    // asks for, that may be the reason, so the route is not loaded either.
    let is_any_listener_lacking = found
        .iter()
        .any(|(diagnostic, meaning)| *meaning == Meaning::NotLoaded && has_listeners(diagnostic));
    for (diagnostic, meaning) in &mut found {
        if diagnostic.code == Code::ListenerClosed && is_any_listener_lacking {
            *meaning = Meaning::NotLoaded;
        }
    }
    found
}

fn meaning_of(code: Code) -> Meaning {
    if DEMANDED.iter().any(|(demanded, _)| *demanded == code) {
        Meaning::Demanded
    } else if HINTS.contains(&code) {
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
