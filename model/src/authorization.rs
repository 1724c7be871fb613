//! Who may do what, as data planes run it: lowered from AuthorizationPolicy, RequestAuthentication, PeerAuthentication and
//! ExternalAuthorizer. Types only; what they mean is `canal_compiler::oracle`, and `dataplane/guard` runs it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use ipnet::IpNet;

use crate::ids::{Namespace, ObjectName, ServiceKey, TenantName};
use crate::program::Labels;

/// Rules of a policy at most (Istio's own limit).
pub const RULES_MAX: usize = 512;
/// Alternatives in a rule's `from`, and in its `to`, at most (Istio's own limit).
pub const ALTERNATIVES_MAX: usize = 512;
/// Clauses that must hold together at most.
pub const CLAUSES_MAX: usize = 64;
/// Values of a list (a clause's matches, audiences, ports) at most.
pub const VALUES_MAX: usize = 1024;
/// Bytes of one value, name or prefix at most.
pub const VALUE_BYTES_MAX: usize = 4096;
/// Names in the path of a claim at most.
pub const CLAIM_DEPTH_MAX: usize = 16;
/// Issuers of a RequestAuthentication at most.
pub const JWT_RULES_MAX: usize = 64;
/// Bytes of a key set at most.
pub const KEYS_BYTES_MAX: usize = 256 << 10;
/// Bytes of the reason why something is broken at most; a longer one is cut.
pub const REASON_BYTES_MAX: usize = 1024;
/// Longest time that an [`Authorizer`] may have.
pub const AUTHORIZER_TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// Bytes of a body that an [`Authorizer`] may be shown.
pub const AUTHORIZER_BODY_BYTES_MAX: u32 = 64 << 10;

/// Names one policy object of a tenant; unique among those of its kind. Written `tenant/namespace/name`.
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

/// The destinations that a policy is for. A data plane matches them itself, so that one edit of a policy is one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyTarget {
    /// All of the tenant: the object is in the tenant's root namespace and selects nothing.
    Tenant,
    Namespace(Namespace),
    /// The workloads of `namespace` (`None`: of every namespace) that carry all `labels`. Never without labels.
    Workloads {
        namespace: Option<Namespace>,
        labels: Labels,
    },
    /// Requests to this service, whichever workload serves them.
    Service(ServiceKey),
}

/// An AuthorizationPolicy. It matches when one of `rules` does; without rules it never matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authorization {
    pub key: PolicyKey,
    pub target: PolicyTarget,
    pub action: Action,
    pub rules: Vec<Rule>,
    /// Judged, counted and logged; never enforced.
    pub dry_run: bool,
    /// The source was broken, and this says how. Such a policy denies all that it targets, whatever its action, unless it is a dry run.
    pub broken: Option<String>,
}

/// What a match does. Order among policies: Custom, then Deny, then Allow (Istio); Audit decides nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    Allow,
    Deny,
    Audit,
    /// Ask an [`Authorizer`] of the tenant.
    Custom(PolicyKey),
}

/// Matches when one of `from` holds (or it is empty), one of `to` holds (or it is empty), and `when` holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rule {
    pub from: Vec<All>,
    pub to: Vec<All>,
    pub when: All,
}

/// All clauses must hold; an empty list holds.
pub type All = Vec<Clause>;

/// Holds when the attribute's value matches one of `any` (or `any` is empty), and none of `none`. An attribute without a value matches
/// nothing; one with several values (a claim that is a list) matches if one of them does. Never both lists empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clause {
    pub attribute: Attribute,
    pub any: Vec<Match>,
    pub none: Vec<Match>,
}

/// What a clause looks at.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Attribute {
    /// `trust.domain/ns/x/sa/y`, of the verified certificate, without `spiffe://`. None for plaintext.
    SourcePrincipal,
    SourceNamespace,
    /// `namespace/service account`.
    SourceServiceAccount,
    /// Of the peer, as the first authenticated hop saw it. [`Match::Network`].
    SourceAddress,
    /// The client's, by `x-forwarded-for` as far as it is trusted; else that of the peer. [`Match::Network`].
    RemoteAddress,
    /// `issuer/subject` of a valid JWT.
    RequestPrincipal,
    RequestAudience,
    RequestPresenter,
    /// A claim of a valid JWT, by its path; never empty.
    RequestClaim(Vec<String>),
    /// By lower-case name.
    Header(String),
    /// Compared without case; with the port only if the match has one.
    Host,
    Method,
    /// Normalised ([`crate::authorization`] has no opinion how), without the query.
    Path,
    /// [`Match::Port`]: the destination workload's port.
    DestinationPort,
    /// [`Match::Network`].
    DestinationAddress,
    /// The server name of TLS that ends at the gateway.
    ServerName,
}

impl Attribute {
    /// Whether a hop that reads no HTTP can know it.
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

/// How a value must look.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Match {
    Exact(String),
    Prefix(String),
    Suffix(String),
    /// Any value that is not empty.
    Present,
    /// A path template of Istio: `{*}` is one segment, `{**}` any number of them.
    Template(String),
    Network(IpNet),
    Port(u16),
}

impl Match {
    /// Whether values of `attribute` are of this match's sort: networks are for addresses, ports for ports, templates for paths.
    pub fn fits(&self, attribute: &Attribute) -> bool {
        match attribute {
            Attribute::SourceAddress | Attribute::RemoteAddress | Attribute::DestinationAddress => matches!(self, Self::Network(_)),
            Attribute::DestinationPort => matches!(self, Self::Port(_)),
            Attribute::Path => !matches!(self, Self::Network(_) | Self::Port(_)),
            _ => matches!(self, Self::Exact(_) | Self::Prefix(_) | Self::Suffix(_) | Self::Present),
        }
    }
}

/// A RequestAuthentication: which JWTs are valid. A request with a token that none of `rules` accepts is refused with 401; one without
/// a token passes, with no request principal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authentication {
    pub key: PolicyKey,
    pub target: PolicyTarget,
    pub rules: Vec<JwtRule>,
    /// The source was broken: requests that it targets are refused.
    pub broken: Option<String>,
}

/// Tokens of one issuer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JwtRule {
    pub issuer: String,
    /// Empty: any.
    pub audiences: Vec<String>,
    /// The key set (RFC 7517) as the controller has it now, JSON. `None`: it could not be had yet, so every token of this issuer is refused.
    pub keys: Option<String>,
    /// Where the token is looked for: header (lower case) and the prefix before the token. Without any place: `authorization: Bearer ` and
    /// the query parameter `access_token`.
    pub headers: Vec<(String, String)>,
    pub parameters: Vec<String>,
    pub cookies: Vec<String>,
    /// Leave the token in the request.
    pub forward: bool,
    /// Header that carries the token's payload (base64url) on; lower case.
    pub payload_header: Option<String>,
    /// Header (lower case) and the claim that it carries on.
    pub claim_headers: Vec<(String, Vec<String>)>,
}

/// A PeerAuthentication. Of several, the most specific target decides, and of those the oldest; a port's own mode before the whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAuthentication {
    pub key: PolicyKey,
    pub target: PolicyTarget,
    /// `None`: what a wider one says.
    pub mode: Option<PeerMode>,
    /// By the workload's port.
    pub ports: BTreeMap<u16, PeerMode>,
    /// Seconds since 1970 of the object's creation.
    pub created: u64,
}

/// What a workload accepts. A broken object is Strict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PeerMode {
    /// Only mTLS.
    Strict,
    /// Both.
    #[default]
    Permissive,
    /// Both as well; the mesh never strips mTLS. Kept apart because users see what they wrote.
    Disable,
}

/// An ExternalAuthorizer: Envoy's `envoy.service.auth.v3.Authorization/Check` over gRPC, at a service of the same tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authorizer {
    pub key: PolicyKey,
    pub service: ServiceKey,
    pub port: u16,
    pub timeout: Duration,
    /// What happens when it does not answer: false (default) refuses.
    pub fail_open: bool,
    /// Request headers that it is shown, lower case; empty: all.
    pub headers: Vec<String>,
    /// Bytes of the body that it is shown; 0: none.
    pub body_bytes: u32,
}
