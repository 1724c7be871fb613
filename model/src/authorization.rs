//! Security policy as data planes run it, lowered from AuthorizationPolicy, RequestAuthentication,
//! PeerAuthentication and ExternalAuthorizer. Types only: `canal_compiler::oracle` defines what
//! they mean, and `dataplane/authorization` evaluates them.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use ipnet::IpNet;

use crate::ids::{Namespace, ObjectName, ServiceKey, TenantName};
use crate::program::Labels;

/// Maximum number of rules in a policy (Istio's own limit).
pub const RULES_MAX: usize = 512;
/// Maximum number of alternatives in a rule's `from`, and in its `to` (Istio's own limit).
pub const ALTERNATIVES_MAX: usize = 512;
/// Maximum number of clauses that must hold together.
/// Nobody measured this value.
pub const CLAUSES_MAX: usize = 64;
/// Maximum number of values in a list (a clause's matches, audiences, ports).
/// Each is compared with a request. Nobody measured this value.
pub const VALUES_MAX: usize = 1024;
/// Maximum size of one value, name or prefix.
/// A text in a route may have as many (`TEXT_BYTES_MAX` of the compiler).
pub const VALUE_BYTES_MAX: usize = 4096;
/// Maximum number of names in the path of a claim.
/// Nobody measured this value; claims of issuers are nested a few levels.
pub const CLAIM_DEPTH_MAX: usize = 16;
/// Maximum number of issuers in a RequestAuthentication.
/// As many key sets of a tenant are fetched (`JWKS_URIS_MAX`), so that each rule can have its own.
pub const JWT_RULES_MAX: usize = 64;
/// Maximum size of a JWT key set.
/// As large as the largest set that the controller fetches (`JWKS_BYTES_MAX`).
pub const KEYS_BYTES_MAX: usize = 256 << 10;
/// Maximum size of the reason why an object is broken; a longer text is truncated.
/// The controller writes at most 200 characters, which have at most 800 bytes.
pub const REASON_BYTES_MAX: usize = 1024;
/// Longest timeout that an [`Authorizer`] may have.
/// A request waits for it, and counts in the tenant's share of requests. Nobody measured this
/// value.
pub const AUTHORIZER_TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// Maximum number of bytes of a request body that an [`Authorizer`] may receive.
/// Each body counts twice in `gatewayBodyBytes`, so 2,048 of the largest fit into its 256 MiB.
pub const AUTHORIZER_BODY_BYTES_MAX: u32 = 64 << 10;

/// Identifies one policy object of a tenant; unique among objects of its kind. Written
/// `tenant/namespace/name`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PolicyKey {
    pub tenant: TenantName,
    pub namespace: Namespace,
    pub name: ObjectName,
}

impl fmt::Display for PolicyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.tenant, self.namespace, self.name)
    }
}

/// The destinations of a policy. Data planes evaluate the target themselves, so that one edit of a
/// policy is one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyTarget {
    /// All destinations of the tenant: the object is in the tenant's root namespace and has no
    /// selector.
    Tenant,
    Namespace(Namespace),
    /// The workloads of `namespace` that carry all `labels`. `None` means every namespace. `labels`
    /// is never empty.
    Workloads {
        namespace: Option<Namespace>,
        labels: Labels,
    },
    /// Requests to this service, regardless of the workload that serves them.
    Service(ServiceKey),
}

/// A lowered AuthorizationPolicy. It matches when one of `rules` does; without rules it never
/// matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authorization {
    pub key: PolicyKey,
    pub target: PolicyTarget,
    pub action: AuthorizationAction,
    pub rules: Vec<PolicyRule>,
    /// The policy is evaluated, counted and logged, but never enforced.
    pub dry_run: bool,
    /// The reason why the source is broken. Such a policy denies everything that it targets,
    /// whatever its action, unless it is a dry run.
    pub broken: Option<String>,
}

/// The effect of a match. Policies are evaluated in the order Custom, Deny, Allow (Istio); Audit
/// has no effect on the decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AuthorizationAction {
    Allow,
    Deny,
    Audit,
    /// An [`Authorizer`] of the tenant decides.
    Custom(PolicyKey),
}

/// A rule matches when one of `from` holds (or it is empty), one of `to` holds (or it is empty),
/// and `when` holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PolicyRule {
    pub from: Vec<AllOf>,
    pub to: Vec<AllOf>,
    pub when: AllOf,
}

/// A conjunction of clauses: all must hold. An empty list holds.
pub type AllOf = Vec<Clause>;

/// A condition on one attribute.
///
/// It holds when the attribute's value matches one of `any` (or `any` is empty), and none of
/// `none`. An attribute without a value matches nothing. An attribute with several values (a claim
/// that is a list) matches if one of them does. At least one of the lists is not empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clause {
    pub attribute: Attribute,
    pub any: Vec<AttributeMatch>,
    pub none: Vec<AttributeMatch>,
}

/// The property of a request or connection that a clause tests.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Attribute {
    /// `trust.domain/ns/x/sa/y` from the verified certificate, without `spiffe://`. Plaintext
    /// connections have none.
    SourcePrincipal,
    SourceNamespace,
    /// `namespace/service account` from the verified certificate.
    SourceServiceAccount,
    /// Address of the peer as the first authenticated hop saw it. Matched by
    /// [`AttributeMatch::Network`].
    SourceAddress,
    /// Address of the client from `x-forwarded-for`, as far as that header is trusted; else the
    /// peer's. Matched by [`AttributeMatch::Network`].
    RemoteAddress,
    /// `issuer/subject` of a valid JWT.
    RequestPrincipal,
    RequestAudience,
    RequestPresenter,
    /// A claim of a valid JWT, given by its path, which is never empty.
    RequestClaim(Vec<String>),
    /// A request header, given by its lower-case name.
    Header(String),
    /// The request's host, compared without case. The port is compared only if the match has one.
    Host,
    Method,
    /// The request's path, normalized and without the query. This module does not define the
    /// normalization.
    Path,
    /// The destination workload's port. Matched by [`AttributeMatch::Port`].
    DestinationPort,
    /// The destination's address. Matched by [`AttributeMatch::Network`].
    DestinationAddress,
    /// The server name of a TLS connection that the gateway terminates.
    ServerName,
}

impl Attribute {
    /// Returns whether a hop that does not parse HTTP can observe the attribute.
    pub fn is_l4(&self) -> bool {
        matches!(
            self,
            Self::SourcePrincipal
                | Self::SourceNamespace
                | Self::SourceServiceAccount
                | Self::SourceAddress
                | Self::DestinationPort
                | Self::DestinationAddress
        )
    }
}

/// The pattern that an attribute's value must match.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum AttributeMatch {
    Exact(String),
    Prefix(String),
    Suffix(String),
    /// Any value that is not empty.
    Present,
    /// A path template of Istio: `{*}` matches one segment, `{**}` any number of them.
    Template(String),
    Network(IpNet),
    Port(u16),
}

impl AttributeMatch {
    /// Returns whether this match applies to values of `attribute`: networks to addresses, ports to
    /// ports, templates to paths.
    pub fn fits(&self, attribute: &Attribute) -> bool {
        match attribute {
            Attribute::SourceAddress | Attribute::RemoteAddress | Attribute::DestinationAddress => {
                matches!(self, Self::Network(_))
            }
            Attribute::DestinationPort => matches!(self, Self::Port(_)),
            Attribute::Path => !matches!(self, Self::Network(_) | Self::Port(_)),
            _ => matches!(
                self,
                Self::Exact(_) | Self::Prefix(_) | Self::Suffix(_) | Self::Present
            ),
        }
    }
}

/// A lowered RequestAuthentication: which JWTs are valid. A request with a token that none of
/// `rules` accepts is refused with 401. A request without a token passes, with no request
/// principal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authentication {
    pub key: PolicyKey,
    pub target: PolicyTarget,
    pub rules: Vec<JwtRule>,
    /// The reason why the source is broken. While it is set, requests that the object targets are
    /// refused.
    pub broken: Option<String>,
}

/// The JWTs of one issuer and where requests carry them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JwtRule {
    pub issuer: String,
    /// Accepted audiences; an empty list accepts any.
    pub audiences: Vec<String>,
    /// The key set (RFC 7517, JSON) that the controller has now. `None` if it could not be fetched
    /// yet: every token of this issuer is refused.
    pub keys: Option<String>,
    /// Headers that may carry the token: the lower-case name and the prefix before the token. If
    /// `headers`, `parameters` and `cookies` are all empty, the token is in `authorization: Bearer
    /// ` or in the query parameter `access_token`.
    pub headers: Vec<(String, String)>,
    pub parameters: Vec<String>,
    pub cookies: Vec<String>,
    /// The token stays in the forwarded request.
    pub forward: bool,
    /// Lower-case name of a header that forwards the token's payload (base64url).
    pub payload_header: Option<String>,
    /// Lower-case names of headers, each with the path of the claim that it forwards.
    pub claim_headers: Vec<(String, Vec<String>)>,
}

/// A lowered PeerAuthentication. The most specific target decides, and among equal targets the
/// oldest object. A port's own mode precedes `mode`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAuthentication {
    pub key: PolicyKey,
    pub target: PolicyTarget,
    /// Mode of the whole workload; `None` inherits the mode of a wider target.
    pub mode: Option<PeerMode>,
    /// Modes of single ports, by the workload's port.
    pub ports: BTreeMap<u16, PeerMode>,
    /// Creation time of the object, in seconds since 1970.
    pub created: u64,
}

/// The transport that a workload accepts. A broken object is Strict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PeerMode {
    /// The workload accepts only mTLS.
    Strict,
    /// The workload accepts mTLS and plaintext.
    #[default]
    Permissive,
    /// The workload accepts both, like Permissive: the mesh never strips mTLS. It is a separate
    /// variant so that users see what they wrote.
    Disable,
}

/// A lowered ExternalAuthorizer: Envoy's `envoy.service.auth.v3.Authorization/Check` over gRPC, at
/// a service of the same tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authorizer {
    pub key: PolicyKey,
    pub service: ServiceKey,
    pub port: u16,
    pub timeout: Duration,
    /// If true, requests pass while the authorizer does not answer. False, the default, refuses
    /// them.
    pub fail_open: bool,
    /// Lower-case names of the request headers that the authorizer receives; an empty list sends
    /// all.
    pub headers: Vec<String>,
    /// Maximum number of bytes of the body that the authorizer receives; 0 sends none.
    pub body_bytes: u32,
}
