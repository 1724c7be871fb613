//! Stable codes of diagnostics, such as `CANAL0102`. A code names what a diagnostic is about, whatever
//! its sentence says, so that scripts and documents can refer to it.
//!
//! A code is never used again for something else: a code that nothing reports any more stays in the
//! table. `docs/diagnostics.md` and the golden list of all codes are generated from it.

use std::fmt;
use std::str::FromStr;

/// What a user should know about a code, whatever the object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodeDescription {
    /// Name of the code, such as `UnknownField`.
    pub name: &'static str,
    /// Statement of the problem, without a full stop.
    pub title: &'static str,
    /// Consequence of the problem, in one or two sentences.
    pub why: &'static str,
    /// Instruction that usually fixes the problem.
    pub fix: &'static str,
    /// Condition and reason of Gateway API in which the problem shows, if there is one.
    pub condition: Option<(&'static str, &'static str)>,
}

/// The text is not a code of a diagnostic.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a code of a diagnostic; fix: write a code such as CANAL0102")]
pub struct DiagnosticCodeError(pub String);

macro_rules! diagnostic_codes {
    ($($number:literal $name:ident {
        title: $title:literal,
        why: $why:literal,
        fix: $fix:literal,
        condition: $condition:expr,
    })*) => {
        /// The code of a diagnostic. Its number is part of the interface and never changes.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u16)]
        pub enum DiagnosticCode {
            $(#[doc = $title] $name = $number,)*
        }

        impl DiagnosticCode {
            /// All codes, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Returns what a user should know about the code.
            pub const fn description(self) -> CodeDescription {
                match self {
                    $(Self::$name => CodeDescription {
                        name: stringify!($name),
                        title: $title,
                        why: $why,
                        fix: $fix,
                        condition: $condition,
                    },)*
                }
            }
        }
    };
}

impl DiagnosticCode {
    /// Returns the number of the code; its hundreds tell the subject.
    pub const fn number(self) -> u16 {
        self as u16
    }

    /// Returns the subject that the codes with the same hundreds have in common.
    pub const fn subject(self) -> &'static str {
        match self.number() / 100 {
            1 => "Files, documents and fields",
            2 => "The Tenant and its network",
            3 => "Services, endpoints, pods and nodes",
            4 => "Routes, VirtualServices and DestinationRules",
            5 => "Gateways, listeners and what attaches to them",
            6 => "Policies of access",
            7 => "Trust, keys, termination of TLS and throttles",
            _ => "Limits of a tenant",
        }
    }
}

impl fmt::Display for DiagnosticCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CANAL{:04}", self.number())
    }
}

impl FromStr for DiagnosticCode {
    type Err = DiagnosticCodeError;

    /// Reads `CANAL0102`, or the name of a code, such as `UnknownField`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut all = Self::ALL.iter().copied();
        let is_named = |code: &Self| {
            code.to_string().eq_ignore_ascii_case(text) || code.description().name == text
        };
        all.find(is_named)
            .ok_or_else(|| DiagnosticCodeError(text.chars().take(80).collect()))
    }
}

diagnostic_codes! {
    101 InvalidYaml {
        title: "the document is not YAML",
        why: "Nothing of the document can be read, so none of its objects is in force.",
        fix: "Correct the document from the position on.",
        condition: None,
    }
    102 UnknownField {
        title: "the object has no such field",
        why: "A field that nobody reads may be a misspelled restriction, so the part of the object around it fails closed.",
        fix: "Correct the name or remove the field.",
        condition: None,
    }
    103 UnsupportedField {
        title: "the field is one of the API that this version does not implement",
        why: "Without the field the object could allow or route more than its author meant, so the part around it fails closed.",
        fix: "Remove the field, or write what the diagnostic suggests in its place.",
        condition: Some(("Accepted", "UnsupportedValue")),
    }
    104 IgnoredField {
        title: "the field has no effect in this version",
        why: "Requests are served without what the field asks for, such as a preference or a timeout.",
        fix: "Remove the field, or keep it for a version that implements it.",
        condition: None,
    }
    105 InvalidValue {
        title: "the value of the field is not valid",
        why: "The field does not mean what its author meant, so the part of the object around it fails closed.",
        fix: "Write a value of the form that the diagnostic names.",
        condition: Some(("Accepted", "UnsupportedValue")),
    }
    106 RenamedField {
        title: "the field is written under its old name",
        why: "The next release does not accept the old name, and the object then fails closed.",
        fix: "Write the new name.",
        condition: None,
    }
    107 RenamedKind {
        title: "the kind is written under its old name",
        why: "The next release does not accept the old name, and the object is then not read.",
        fix: "Write the new name of the kind.",
        condition: None,
    }
    108 UnsupportedVersion {
        title: "the kind is not supported in this apiVersion",
        why: "The object is not read, so it has no effect.",
        fix: "Write a supported apiVersion.",
        condition: None,
    }
    109 UnsupportedKind {
        title: "the kind is not supported",
        why: "The object is not read. It may be a policy, whose restriction is then missing.",
        fix: "Remove the object, or write what it does with a supported kind.",
        condition: None,
    }
    110 SkippedKind {
        title: "the kind does not concern the mesh",
        why: "Canal leaves such objects to Kubernetes, so the object changes nothing in the mesh.",
        fix: "Leave the object to Kubernetes, or keep it out of these files.",
        condition: None,
    }
    111 ForeignKind {
        title: "only another implementation can read the kind",
        why: "The object configures a component that Canal does not run, such as Envoy, so it has no effect.",
        fix: "Write what it does with the kinds that the diagnostic names.",
        condition: None,
    }
    112 InvalidDocument {
        title: "the document is not an object",
        why: "A document without apiVersion, kind and a valid name is no object, so it has no effect.",
        fix: "Write apiVersion, kind, metadata.name and spec.",
        condition: None,
    }
    113 DuplicateObject {
        title: "the object is defined more than once",
        why: "Only one of the definitions is in force; changes of the other one have no effect.",
        fix: "Remove one of the definitions or rename it.",
        condition: None,
    }
    114 UnreadableSource {
        title: "a file or directory cannot be read",
        why: "Its objects cannot be updated. What was read from it before stays in force.",
        fix: "Make it a file or directory that the reader can read.",
        condition: None,
    }
    115 StaleObjects {
        title: "objects of an earlier version stay in force",
        why: "The present version cannot be used, so changes in it do not take effect.",
        fix: "Correct the errors that are reported of the same file or object.",
        condition: None,
    }
    116 DeprecatedField {
        title: "the field is deprecated in its API",
        why: "A later version of the API may drop the field, and other implementations may ignore it.",
        fix: "Write the field that replaces it.",
        condition: None,
    }
    117 InvalidAnnotation {
        title: "the value of the annotation is not valid",
        why: "The annotation is ignored and the default applies.",
        fix: "Write one of the values that the diagnostic names.",
        condition: None,
    }
    118 IneffectiveField {
        title: "the field has no effect as it is written",
        why: "A value or a second field that it needs is missing, or another field excludes it.",
        fix: "Write what is missing, or remove the field.",
        condition: None,
    }
    119 ConflictingFields {
        title: "fields of the object exclude each other",
        why: "It is not certain which of the fields is meant, so the part of the object around them fails closed.",
        fix: "Write only one of them.",
        condition: Some(("Accepted", "UnsupportedValue")),
    }
    120 MissingField {
        title: "a required field is missing or empty",
        why: "Without it the object, or a part of it, has no meaning and is not in force.",
        fix: "Write the field.",
        condition: Some(("Accepted", "UnsupportedValue")),
    }
    121 InternalError {
        title: "the controller failed on the input",
        why: "This is a bug of Canal. The configuration that was in force stays in force.",
        fix: "Report it with the input, and revert the newest change.",
        condition: None,
    }
    122 UnknownNamespace {
        title: "the namespace does not exist",
        why: "The files define namespaces, and this one is not among them. An object in a namespace that does not exist cannot be created, and a reference to it finds nothing.",
        fix: "Correct the name or define the Namespace.",
        condition: None,
    }
    123 WriteRefused {
        title: "the change is refused",
        why: "The object would not stay as it is sent: another source or writer owns it, or the request is too large.",
        fix: "Change the object where it is owned, or send a smaller request.",
        condition: None,
    }
    124 DeprecatedApi {
        title: "the apiVersion or kind is deprecated",
        why: "A later version of the API or of Kubernetes may not serve it any more.",
        fix: "Write the apiVersion or kind that replaces it.",
        condition: None,
    }
    201 MissingTenant {
        title: "the tenant has no valid Tenant object",
        why: "Without it the isolation of the tenant is not certain, so none of its objects is in force.",
        fix: "Write a Tenant object with the name of the tenant.",
        condition: None,
    }
    202 OtherTenant {
        title: "the Tenant object belongs to another tenant",
        why: "The object is in the configuration of a tenant with another name and is ignored there.",
        fix: "Move the object or correct its name.",
        condition: None,
    }
    203 ReservedName {
        title: "the name or number is reserved for the provider",
        why: "A tenant with it would not be isolated from the components of Canal.",
        fix: "Choose another one.",
        condition: None,
    }
    204 MissingRange {
        title: "the tenant or node has no address range",
        why: "Traffic is sent only to addresses in the ranges, so pods outside of them are unreachable.",
        fix: "Write the ranges of the addresses.",
        condition: None,
    }
    205 ReservedAddress {
        title: "the address or range cannot be used",
        why: "It is reserved for the provider, or no host can have it on a network.",
        fix: "Choose an address or a private range such as 10.1.0.0/16.",
        condition: None,
    }
    206 OverlappingRanges {
        title: "two address ranges overlap",
        why: "It is not certain to which of them an address belongs, so one of the ranges is not used.",
        fix: "Choose ranges that do not overlap.",
        condition: None,
    }
    207 RangeTooSmall {
        title: "the address range is too small",
        why: "Each AZ gets a part of the range, and the part must hold at least two addresses.",
        fix: "Write a larger range.",
        condition: None,
    }
    208 TenantConflict {
        title: "another tenant has the identifier already",
        why: "Traffic or identities of the two tenants would mix, so the younger tenant is not in force.",
        fix: "Give every tenant identifiers of its own.",
        condition: None,
    }
    209 NotOnCloudTier {
        title: "the tenant is not on the cloud tier",
        why: "The object or field is about the gateways of the cloud tier, so it has no effect for this tenant.",
        fix: "Have the provider set gatewayCidrs in the Tenant, or remove it.",
        condition: None,
    }
    301 InvalidServiceName {
        title: "the name cannot be the name of a Service",
        why: "The name of a Service is one label of a host name, and clients could not resolve this one.",
        fix: "Use 1 to 63 lower-case letters, digits and '-', without dots.",
        condition: None,
    }
    302 UnsupportedServiceType {
        title: "the type of the Service is not supported",
        why: "The Service has no endpoints in the mesh, and routes to it answer 500.",
        fix: "Use type ClusterIP.",
        condition: None,
    }
    303 ServiceWithoutAddress {
        title: "the Service has no address",
        why: "No client can dial the Service by its name.",
        fix: "Write spec.clusterIPs, or clusterIP: None if clients dial the pods themselves.",
        condition: None,
    }
    304 AddressConflict {
        title: "the address belongs to another object or cannot be used",
        why: "The older object keeps the address, so traffic to it does not reach this one.",
        fix: "Give every object an address of its own.",
        condition: None,
    }
    305 PortNotCarried {
        title: "the mesh does not carry the protocol of the port",
        why: "The address of the Service refuses the port.",
        fix: "Use TCP, or let clients reach the port past the mesh.",
        condition: None,
    }
    306 DuplicatePort {
        title: "a port is defined twice",
        why: "Only the first definition is in force.",
        fix: "Remove one of them.",
        condition: None,
    }
    307 UnknownAppProtocol {
        title: "the protocol of the port is not known",
        why: "The first bytes of each connection decide, which costs time and fails for protocols in which the server speaks first.",
        fix: "Write a known appProtocol, such as http, grpc or tcp.",
        condition: None,
    }
    308 PortWithoutProtocol {
        title: "the port does not declare its protocol",
        why: "The first bytes of each connection decide, which costs time and fails for protocols in which the server speaks first. Rules about HTTP may then not apply.",
        fix: "Set appProtocol, or name the port PROTOCOL or PROTOCOL-NAME, such as http-web.",
        condition: None,
    }
    309 UnresolvedTargetPort {
        title: "no selected pod has the target port",
        why: "The port of the Service has no endpoint, so requests to it fail.",
        fix: "Name a port of the containers, or write its number.",
        condition: None,
    }
    310 ServiceWithoutEndpoints {
        title: "the Service has neither a selector nor EndpointSlices",
        why: "The Service has no endpoint, so requests to it fail.",
        fix: "Write the labels of its pods, or an EndpointSlice with their addresses.",
        condition: None,
    }
    311 EndpointsIgnored {
        title: "the endpoints are not used",
        why: "The Service has a selector, which alone decides about its endpoints.",
        fix: "Remove the selector of the Service, or this object.",
        condition: None,
    }
    312 EndpointsWithoutService {
        title: "the endpoints belong to no Service",
        why: "Nothing reads endpoints of a Service that does not exist.",
        fix: "Create the Service or correct the name.",
        condition: None,
    }
    313 EndpointNotPod {
        title: "the endpoint is not a pod of the namespace",
        why: "Only pods have an identity, so the address gets no traffic.",
        fix: "Write the address of a pod of the same namespace.",
        condition: None,
    }
    314 AddressOutsideRanges {
        title: "the address is outside the ranges of the tenant",
        why: "No traffic is sent to the address.",
        fix: "Add its range to spec.podCidrs of the Tenant, or correct the address.",
        condition: None,
    }
    315 HostNetworkPod {
        title: "the pod uses the network of its node",
        why: "The mesh cannot tell the pod from other processes of the node and leaves it out.",
        fix: "Give the pod a network of its own.",
        condition: None,
    }
    316 UnknownZone {
        title: "the zone of the pod or node is not known",
        why: "Endpoints near the client cannot be preferred, and a node without an AZ is left out.",
        fix: "Name the zone in the label or annotation.",
        condition: None,
    }
    317 InvalidNode {
        title: "the node cannot be reached by the cloud tier",
        why: "An address or MAC of the node is missing or not valid, so edges do not send to its pods.",
        fix: "Write the underlay address and the MAC of its tunnel device.",
        condition: None,
    }
    318 InvalidReplica {
        title: "the gateway replica cannot serve the tenant",
        why: "Its name or address is missing or not valid, so the replica gets no traffic of the tenant.",
        fix: "Write a valid name and its address in the overlay of the tenant.",
        condition: None,
    }
    319 ReservedServiceName {
        title: "the name belongs to the service of the tier",
        why: "The Service of the tenant is left out.",
        fix: "Rename the Service.",
        condition: None,
    }
    320 SelectorMatchesNoPod {
        title: "the selector selects no pod",
        why: "The Service has no endpoint, so requests to it fail.",
        fix: "Correct the labels of the selector or of the pods.",
        condition: None,
    }
    321 ConflictingTargetPorts {
        title: "Services declare one port of a pod with different protocols",
        why: "The gateway speaks the protocol of the Service that a client dials, and the pod may not understand it.",
        fix: "Declare one protocol in all Services, or use separate ports.",
        condition: None,
    }
    401 RouteWithoutParent {
        title: "the route is attached to nothing",
        why: "Without a parent no request is compared with the rules.",
        fix: "Name a Gateway or a Service in spec.parentRefs.",
        condition: Some(("Accepted", "NoMatchingParent")),
    }
    402 UnresolvedParent {
        title: "the parent of the route does not exist",
        why: "The route does not apply to any request of this parent.",
        fix: "Create the parent or correct the name.",
        condition: Some(("Accepted", "NoMatchingParent")),
    }
    403 UnsupportedParent {
        title: "the route cannot attach to a parent of this kind",
        why: "The route does not apply to any request of this parent.",
        fix: "Name a Gateway, a ListenerSet or a Service.",
        condition: None,
    }
    404 OtherNamespace {
        title: "the object is in another namespace than what it configures",
        why: "It would apply only to clients of its own namespace, which this version does not support for objects of its kind, so it has no effect.",
        fix: "Move the object into the namespace of the Service.",
        condition: Some(("Accepted", "UnsupportedValue")),
    }
    405 ParentPortNotFound {
        title: "the parent has no such port or section",
        why: "The route does not apply to any request of this parent.",
        fix: "Name a port that the Service has.",
        condition: Some(("Accepted", "NoMatchingParent")),
    }
    406 OpaqueParentPort {
        title: "the port is opaque TCP",
        why: "HTTP rules do not apply to connections whose protocol is not HTTP.",
        fix: "Set the appProtocol of the port to http if it speaks HTTP.",
        condition: None,
    }
    407 InvalidHostname {
        title: "the host name is not valid",
        why: "The rules cannot be limited to the host, so they refuse their requests.",
        fix: "Write a lower-case name such as reviews.example.com or *.example.com.",
        condition: Some(("Accepted", "UnsupportedValue")),
    }
    408 UnresolvedBackend {
        title: "the backend does not exist",
        why: "The share of requests that the backend should get answers 500, or UNAVAILABLE for gRPC.",
        fix: "Create the Service or correct the name.",
        condition: Some(("ResolvedRefs", "BackendNotFound")),
    }
    409 BackendPortNotFound {
        title: "the backend has no such port",
        why: "The share of requests that the backend should get answers 500, or UNAVAILABLE for gRPC.",
        fix: "Write a port of the Service.",
        condition: Some(("ResolvedRefs", "BackendNotFound")),
    }
    410 UnsupportedBackend {
        title: "the backend is of a kind that is not supported",
        why: "The share of requests that the backend should get answers 500, or UNAVAILABLE for gRPC.",
        fix: "Refer to a Service.",
        condition: Some(("ResolvedRefs", "InvalidKind")),
    }
    411 BackendNotPermitted {
        title: "no ReferenceGrant permits the reference",
        why: "A backend in another namespace needs the consent of that namespace. Until then its share of requests answers 500.",
        fix: "Write a ReferenceGrant in the namespace of the backend.",
        condition: Some(("ResolvedRefs", "RefNotPermitted")),
    }
    412 UnresolvedSubset {
        title: "the subset does not exist or is broken",
        why: "The share of requests that the subset should get answers 500.",
        fix: "Define the subset in a DestinationRule of the host.",
        condition: None,
    }
    413 RuleWithoutBackend {
        title: "the rule has no backend",
        why: "Requests that match the rule are answered with an error.",
        fix: "Name a Service to which the requests go.",
        condition: None,
    }
    414 ZeroWeights {
        title: "all weights of the rule are 0",
        why: "Requests that match the rule are answered with 503.",
        fix: "Give at least one backend a weight above 0.",
        condition: None,
    }
    415 InvalidRegex {
        title: "the regular expression is not valid",
        why: "The condition cannot be evaluated, so the rule refuses its requests.",
        fix: "Use RE2 syntax; the whole text must match.",
        condition: Some(("Accepted", "UnsupportedValue")),
    }
    416 UnmatchablePath {
        title: "no request has such a path",
        why: "Paths are compared in their normal form, so the rule never matches.",
        fix: "Write the path as it arrives, without // and with upper-case %-escapes.",
        condition: None,
    }
    417 InvalidPath {
        title: "the path is not valid",
        why: "The condition cannot be evaluated, so the rule refuses its requests.",
        fix: "Write an absolute path such as /reviews, without a query.",
        condition: Some(("Accepted", "UnsupportedValue")),
    }
    418 DuplicateCondition {
        title: "a name is compared twice in one match",
        why: "Only the first condition counts, so the match may be wider than meant.",
        fix: "Remove one of the conditions.",
        condition: None,
    }
    419 UnsupportedFilter {
        title: "the filter is not valid or not supported",
        why: "A filter may restrict what the application receives, so the rule refuses its requests.",
        fix: "Remove the filter or correct its type.",
        condition: Some(("Accepted", "UnsupportedValue")),
    }
    420 ProtectedHeader {
        title: "the gateway sets the header itself",
        why: "A route that changed it could forge what the application trusts, so the rule refuses its requests.",
        fix: "Remove the entry.",
        condition: Some(("Accepted", "UnsupportedValue")),
    }
    421 ChangedAcrossNamespaces {
        title: "the rule changes requests for another namespace",
        why: "The policies of the backend authorize the request as the client sent it, so the changed one is refused.",
        fix: "Change the request in a route of the namespace of the backend.",
        condition: None,
    }
    422 ConflictingActions {
        title: "the rule both answers requests and forwards them",
        why: "It is not certain which is meant, so the rule refuses its requests.",
        fix: "Remove one of them.",
        condition: Some(("Accepted", "UnsupportedValue")),
    }
    423 RouteConflict {
        title: "another object routes the same host or port",
        why: "Only one of the objects is in force there; rules of the other one never apply.",
        fix: "Write all rules in one object, or give the objects different hosts.",
        condition: None,
    }
    424 UnresolvedHost {
        title: "the host is not a Service of the tenant",
        why: "The object has no effect for this host.",
        fix: "Write the name of a Service, or name.namespace.",
        condition: None,
    }
    425 UnsupportedGateway {
        title: "the gateway of the VirtualService is not supported",
        why: "The rules do not apply at this gateway.",
        fix: "Write mesh, or attach an HTTPRoute to a Gateway.",
        condition: None,
    }
    426 MatchNeverApplies {
        title: "the match never applies",
        why: "It names a gateway or port at which the rule does not arrive.",
        fix: "Correct the match or remove it.",
        condition: None,
    }
    427 DuplicateSubset {
        title: "the subset is defined twice",
        why: "The older definition is used; changes of the other one have no effect.",
        fix: "Remove one of them.",
        condition: None,
    }
    428 BackendProtocolMismatch {
        title: "the backend does not speak the protocol of the route",
        why: "Requests for the backend fail, because the two ends do not speak the same protocol.",
        fix: "Set the appProtocol of the port of the Service.",
        condition: Some(("ResolvedRefs", "UnsupportedProtocol")),
    }
    429 DatagramsNotCarried {
        title: "the cloud tier does not carry datagrams",
        why: "The route only opens the ports of the pods.",
        fix: "Let clients use TCP.",
        condition: None,
    }
    430 ShadowedRule {
        title: "earlier rules get all requests of the rule",
        why: "The rule never matches, so what it configures never happens.",
        fix: "Move the rule before the one that the diagnostic names, or remove it.",
        condition: None,
    }
    431 ShadowedMatch {
        title: "an earlier match gets all requests of the match",
        why: "The match has no effect; requests that it describes follow the earlier one.",
        fix: "Remove the match, or make the earlier one narrower.",
        condition: None,
    }
    432 UnusedSubset {
        title: "no route sends requests to the subset",
        why: "The subset has no effect. A route that should use it may name another one.",
        fix: "Name the subset in a VirtualService, or remove it.",
        condition: None,
    }
    433 SubsetMatchesNoPod {
        title: "the labels of the subset select no pod of the Service",
        why: "Requests for the subset find no endpoint and fail.",
        fix: "Correct the labels of the subset or of the pods.",
        condition: None,
    }
    434 CostlyRegex {
        title: "the regular expression is costly",
        why: "It takes much of the memory that the rules of a Service may use, at every gateway.",
        fix: "Use an exact or prefix match, or a shorter expression without large repetitions.",
        condition: None,
    }
    501 UnresolvedGatewayClass {
        title: "the GatewayClass does not exist",
        why: "Canal ignores the Gateway, so no request arrives at it.",
        fix: "Name the class canal, or write a GatewayClass with the controllerName of Canal.",
        condition: None,
    }
    502 ForeignGatewayClass {
        title: "the GatewayClass belongs to another controller",
        why: "Canal ignores the object.",
        fix: "Name a GatewayClass of Canal if Canal shall serve it.",
        condition: None,
    }
    503 UnsupportedParameters {
        title: "the parameters are not supported",
        why: "All listeners of the Gateway are closed.",
        fix: "Remove the reference to the parameters.",
        condition: Some(("Accepted", "InvalidParameters")),
    }
    504 UnsupportedAddress {
        title: "the address of the Gateway is not supported",
        why: "All listeners of the Gateway are closed, because it may not be reachable by another address.",
        fix: "Write an IPAddress of the pool of the tier, or remove it.",
        condition: Some(("Accepted", "UnsupportedAddress")),
    }
    505 GatewayWithoutListener {
        title: "the Gateway has no listener",
        why: "No request arrives at the Gateway.",
        fix: "Write at least one listener.",
        condition: None,
    }
    506 InvalidListener {
        title: "the listener is not valid",
        why: "The listener is closed.",
        fix: "Correct the field.",
        condition: Some(("Accepted", "Invalid")),
    }
    507 UnsupportedProtocol {
        title: "the protocol of the listener is not served",
        why: "The listener is closed.",
        fix: "Use protocol HTTP, HTTPS, TLS or TCP.",
        condition: Some(("Accepted", "UnsupportedProtocol")),
    }
    508 ListenerConflict {
        title: "two listeners are not distinct",
        why: "It is not certain which of them gets a request, so a listener is closed.",
        fix: "Give the listeners different names, and different ports or host names.",
        condition: Some(("Conflicted", "HostnameConflict")),
    }
    509 UnsupportedRouteKind {
        title: "the listener allows a kind of route that cannot attach",
        why: "Routes of this kind do not attach to the listener.",
        fix: "Write HTTPRoute or GRPCRoute.",
        condition: Some(("ResolvedRefs", "InvalidRouteKinds")),
    }
    510 InvalidCertificate {
        title: "a certificate of the listener cannot be used",
        why: "The listener serves with its other certificates, and is closed if it has none.",
        fix: "Name a Secret of type kubernetes.io/tls with a valid certificate and key.",
        condition: Some(("ResolvedRefs", "InvalidCertificateRef")),
    }
    511 CertificateNotPermitted {
        title: "no ReferenceGrant permits the use of the Secret",
        why: "A certificate of another namespace needs the consent of that namespace.",
        fix: "Write a ReferenceGrant in the namespace of the Secret.",
        condition: Some(("ResolvedRefs", "RefNotPermitted")),
    }
    512 UnresolvedGateway {
        title: "the Gateway of the ListenerSet does not exist",
        why: "The ListenerSet adds no listener.",
        fix: "Create the Gateway or correct the name.",
        condition: Some(("Accepted", "ParentNotAccepted")),
    }
    513 ListenerSetNotAllowed {
        title: "the Gateway does not allow the ListenerSet",
        why: "The ListenerSet adds no listener.",
        fix: "Allow its namespace in spec.allowedListeners of the Gateway.",
        condition: Some(("Accepted", "NotAllowed")),
    }
    514 NoMatchingListener {
        title: "the Gateway has no listener that the route names",
        why: "The route does not apply to requests at this Gateway.",
        fix: "Name a listener that the Gateway has.",
        condition: Some(("Accepted", "NoMatchingParent")),
    }
    515 RouteNotAllowed {
        title: "no listener allows the route",
        why: "The listener limits the namespaces and kinds of its routes, so the route does not apply there.",
        fix: "Allow the namespace and kind in allowedRoutes of the listener.",
        condition: Some(("Accepted", "NotAllowedByListeners")),
    }
    516 NoMatchingListenerHostname {
        title: "no listener has a host name in common with the route",
        why: "No request for a host of the route arrives at these listeners.",
        fix: "Correct the host names of the route or of the listener.",
        condition: Some(("Accepted", "NoMatchingListenerHostname")),
    }
    517 ListenerClosed {
        title: "the listeners of the route are closed",
        why: "No request arrives at a closed listener.",
        fix: "Correct what is reported of the listener.",
        condition: Some(("Accepted", "Pending")),
    }
    518 HostnameTaken {
        title: "a route of the other kind has the host name",
        why: "HTTPRoutes and GRPCRoutes have no host name of a listener in common; the older route keeps it.",
        fix: "Give the two routes different host names or listeners.",
        condition: Some(("Accepted", "HostnameConflict")),
    }
    519 InvalidCaCertificate {
        title: "a reference of a Gateway leads to no certificates of authorities",
        why: "Clients of these authorities are refused. If no reference is usable, the listeners of the port are closed.",
        fix: "Write the authorities' certificates as PEM in the entry ca.crt of a ConfigMap.",
        condition: Some(("ResolvedRefs", "InvalidCACertificateRef")),
    }
    520 InsecureClientValidation {
        title: "a Gateway serves clients without a valid certificate",
        why: "The mode AllowInsecureFallback leaves it to applications to refuse such clients.",
        fix: "Write AllowValidOnly once all clients have certificates.",
        condition: Some(("InsecureFrontendValidationMode", "ConfigurationChanged")),
    }
    521 UnknownListenerProtocol {
        title: "the protocol of the listener is none of Gateway API",
        why: "The listener is closed.",
        fix: "Use protocol HTTP, HTTPS, TLS or TCP.",
        condition: Some(("Accepted", "UnsupportedProtocol")),
    }
    601 UnsupportedTarget {
        title: "the policy cannot have a target of this kind",
        why: "It is not certain what the policy protects, so it applies to the widest target and denies, or has no effect if it restricts nothing.",
        fix: "Target a Service, select workloads, or cover the namespace.",
        condition: Some(("Accepted", "Invalid")),
    }
    602 UnresolvedTarget {
        title: "the target of the policy does not exist",
        why: "The policy applies to nothing until the target exists.",
        fix: "Create the target or correct the name.",
        condition: Some(("Accepted", "TargetNotFound")),
    }
    603 TargetConflict {
        title: "another object has the same target",
        why: "Only the older object is in force.",
        fix: "Remove one of them.",
        condition: Some(("Accepted", "Conflicted")),
    }
    604 InvalidCondition {
        title: "a condition of the policy is not valid",
        why: "The condition cannot be evaluated, so the policy denies everything that it targets.",
        fix: "Write a value of the form that the diagnostic names.",
        condition: None,
    }
    605 SuspiciousValue {
        title: "the value probably does not mean what is meant",
        why: "The value is compared as a plain text, so the condition may never hold.",
        fix: "Write an exact value, a prefix or a suffix.",
        condition: None,
    }
    606 NeverMatches {
        title: "the policy never matches",
        why: "A policy that restricts only what it matches restricts nothing, so it denies instead.",
        fix: "Write a rule, or remove the policy.",
        condition: None,
    }
    607 UnresolvedAuthorizer {
        title: "the external authorizer does not exist or is broken",
        why: "Nobody can decide about the requests, so they are denied.",
        fix: "Create the ExternalAuthorizer or correct the name.",
        condition: None,
    }
    608 UnenforceableCondition {
        title: "no hop can evaluate the condition",
        why: "On some path every hop lacks the attribute, so requests that match the rest of the rule are denied, or the rule never matches.",
        fix: "Use attributes of a connection, declare the protocol of the port, or limit the rule to other ports.",
        condition: None,
    }
    609 KeySetUnavailable {
        title: "the keys of the issuer are not available",
        why: "Without keys no token of the issuer is valid.",
        fix: "Make the URL reachable for the controller, or write the keys in jwks.",
        condition: None,
    }
    610 InvalidKeySet {
        title: "the keys of the issuer are not valid",
        why: "Without keys no token of the issuer is valid.",
        fix: "Write a key set (RFC 7517) with at least one key.",
        condition: None,
    }
    611 InvalidAuthorizer {
        title: "the external authorizer cannot be called",
        why: "Policies that name it deny, because nobody can decide about the requests.",
        fix: "Name a Service with a port that speaks gRPC.",
        condition: None,
    }
    612 PolicyMatchesNoPod {
        title: "the selector of the policy selects no pod",
        why: "The policy protects nothing. A misspelled label leaves the pods that it should protect open.",
        fix: "Correct the labels of the selector or of the pods.",
        condition: None,
    }
    613 ClaimsWithoutAuthentication {
        title: "the policy reads claims of tokens that nothing verifies",
        why: "A token that no RequestAuthentication verifies has no claims, so the rule never matches.",
        fix: "Write a RequestAuthentication for the issuer of the tokens.",
        condition: None,
    }
    701 InvalidFederation {
        title: "the tenant cannot federate with this one",
        why: "The federation is not in force, so clients of the other tenant are not trusted.",
        fix: "Write the name and trust domain of another tenant.",
        condition: None,
    }
    702 InvalidKeyServer {
        title: "the key server is not valid",
        why: "The key server is left out, and objects that name it are broken.",
        fix: "Write from 1 to 16 valid addresses with ports.",
        condition: None,
    }
    703 UnresolvedKeyServer {
        title: "the key server does not exist",
        why: "The Termination has no certificate, so its port refuses connections.",
        fix: "Create the KeyServer or correct the name.",
        condition: None,
    }
    704 InvalidTermination {
        title: "the Termination has no certificate, or two",
        why: "Its port refuses connections.",
        fix: "Write mesh: {} or keyServer: NAME.",
        condition: None,
    }
    705 EmptyThrottle {
        title: "the Throttle limits nothing",
        why: "The object has no effect.",
        fix: "Write sessions, packets or requests, each with perSecond.",
        condition: None,
    }
    706 NotActedOn {
        title: "the object is read, and not acted on yet",
        why: "Traffic is handled as without the object.",
        fix: "Nothing is wrong with the object; it takes effect in a later version.",
        condition: None,
    }
    707 PreferencesDisagree {
        title: "two OffloadPreferences disagree about a target",
        why: "The target is never used for the traffic that both are about.",
        fix: "Write the same value in both, or let only one of them name the target.",
        condition: None,
    }
    801 LimitExceeded {
        title: "a limit on the size of objects is exceeded",
        why: "What is beyond the limit is left out or fails closed, so that one tenant cannot exhaust what all share.",
        fix: "Use fewer or smaller parts, or split the object.",
        condition: None,
    }
    802 ShareExceeded {
        title: "the tenant exceeds its share",
        why: "The new configuration is refused, and the one before stays in force.",
        fix: "Delete or shorten objects, or have the provider raise the share.",
        condition: None,
    }
    803 ServiceIdsExhausted {
        title: "no service ID is left",
        why: "The Service or Gateway is left out.",
        fix: "Remove Services that are not needed.",
        condition: None,
    }
    804 RegexMemoryExceeded {
        title: "the regular expressions take too much memory",
        why: "The rule refuses its requests.",
        fix: "Use prefixes, or fewer and shorter expressions.",
        condition: None,
    }
    805 ResourceRefused {
        title: "data planes would refuse the resource",
        why: "The resource is left out, and what it protects fails closed.",
        fix: "Make the object smaller, or change the value that the diagnostic names.",
        condition: None,
    }
    806 DiagnosticsLeftOut {
        title: "further diagnostics are left out",
        why: "The list is limited, so that errors that are not shown may exist.",
        fix: "Correct those that are shown, then check again.",
        condition: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_in_order_and_distinct() {
        assert!(DiagnosticCode::ALL.is_sorted_by(|a, b| a.number() < b.number()));
        assert_eq!(DiagnosticCode::UnknownField.to_string(), "CANAL0102");
    }

    #[test]
    fn a_code_is_read_by_number_and_by_name() {
        for code in DiagnosticCode::ALL {
            assert_eq!(code.to_string().parse(), Ok(*code));
            assert_eq!(code.description().name.parse(), Ok(*code));
        }
        assert!("CANAL9999".parse::<DiagnosticCode>().is_err());
    }

    #[test]
    fn every_description_is_whole() {
        for code in DiagnosticCode::ALL {
            let CodeDescription {
                title, why, fix, ..
            } = code.description();
            assert!(!title.ends_with('.'), "{code}: {title}");
            assert!(why.ends_with('.') && fix.ends_with('.'), "{code}");
        }
    }
}
