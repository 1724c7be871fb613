//! AuthorizationPolicy, RequestAuthentication and PeerAuthentication (`security.istio.io`) with
//! Istio's v1 schema. An absent list is no condition. A list that is present and empty is an error;
//! the types distinguish the two for the compiler.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::Metadata;
use crate::ids::{Namespace, ObjectName};
use crate::program::Labels;

/// Namespaces whose policies apply to the whole tenant: Istio's root namespace, and Canal's.
pub const ROOT_NAMESPACES: [&str; 2] = ["istio-system", "canal-system"];

/// Annotation of an AuthorizationPolicy: with `true` the policy is evaluated, counted and logged,
/// but not enforced.
pub const DRY_RUN_ANNOTATION: &str = "istio.io/dry-run";

/// An object of kind AuthorizationPolicy (`security.istio.io`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AuthorizationPolicy {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: AuthorizationPolicySpec,
}

/// The content of `spec:` in an AuthorizationPolicy.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AuthorizationPolicySpec {
    pub selector: Option<WorkloadSelector>,
    pub target_ref: Option<PolicyTargetRef>,
    pub target_refs: Option<Vec<PolicyTargetRef>>,
    /// Rules of the policy. Without rules it never matches: an ALLOW then allows nothing.
    pub rules: Vec<AuthorizationRule>,
    pub action: PolicyAction,
    /// External authorizer of a CUSTOM policy.
    pub provider: Option<Provider>,
}

/// The workloads that carry all these labels.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WorkloadSelector {
    pub match_labels: Labels,
}

/// An object that a policy is attached to (Istio's PolicyTargetReference).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PolicyTargetRef {
    /// API group; empty means Kubernetes' core group.
    #[serde(default)]
    pub group: String,
    pub kind: String,
    pub name: ObjectName,
    /// Namespace of the target; only the policy's own is valid.
    #[serde(default)]
    pub namespace: Option<Namespace>,
}

/// The effect of a policy when it matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum PolicyAction {
    #[default]
    Allow,
    Deny,
    Audit,
    Custom,
}

/// `provider:` of a CUSTOM policy.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct Provider {
    /// Name of an ExternalAuthorizer: `name` in the policy's or a root namespace, or
    /// `namespace/name`.
    pub name: String,
}

/// A rule matches if one of `from`, one of `to` and all of `when` match. An absent list is no
/// condition.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct AuthorizationRule {
    pub from: Option<Vec<FromClause>>,
    pub to: Option<Vec<ToClause>>,
    pub when: Option<Vec<WhenCondition>>,
}

/// One item of `from:` in a rule.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct FromClause {
    pub source: Option<SourceSpec>,
}

/// A list of values as written; see [`SourceSpec`], [`OperationSpec`] and [`WhenCondition`].
pub type StringList = Option<Vec<String>>;

/// Conditions on the client. All fields that are set must hold; of a list, one value must match.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SourceSpec {
    pub principals: StringList,
    pub not_principals: StringList,
    pub request_principals: StringList,
    pub not_request_principals: StringList,
    pub namespaces: StringList,
    pub not_namespaces: StringList,
    /// Service accounts as `namespace/account`, or an account in the policy's namespace.
    pub service_accounts: StringList,
    pub not_service_accounts: StringList,
    pub ip_blocks: StringList,
    pub not_ip_blocks: StringList,
    pub remote_ip_blocks: StringList,
    pub not_remote_ip_blocks: StringList,
    /// Trust domains of the principal; `prefix*` is allowed.
    pub trust_domains: StringList,
    pub not_trust_domains: StringList,
}

/// One item of `to:` in a rule.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct ToClause {
    pub operation: Option<OperationSpec>,
}

/// Conditions on the request. All fields that are set must hold; of a list, one value must match.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OperationSpec {
    pub hosts: StringList,
    pub not_hosts: StringList,
    pub ports: StringList,
    pub not_ports: StringList,
    pub methods: StringList,
    pub not_methods: StringList,
    pub paths: StringList,
    pub not_paths: StringList,
}

/// One item of `when:` in a rule.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WhenCondition {
    pub key: String,
    pub values: StringList,
    pub not_values: StringList,
}

/// An object of kind RequestAuthentication (`security.istio.io`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RequestAuthentication {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: RequestAuthenticationSpec,
}

/// The content of `spec:` in a RequestAuthentication.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RequestAuthenticationSpec {
    pub selector: Option<WorkloadSelector>,
    pub target_ref: Option<PolicyTargetRef>,
    pub target_refs: Option<Vec<PolicyTargetRef>>,
    pub jwt_rules: Vec<JwtRule>,
}

/// The JWTs of one issuer and where requests carry them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JwtRule {
    pub issuer: String,
    #[serde(default)]
    pub audiences: Vec<String>,
    /// URL of the issuer's key set.
    #[serde(default, alias = "jwks_uri")]
    pub jwks_uri: Option<String>,
    /// The key set itself (RFC 7517, JSON).
    #[serde(default)]
    pub jwks: Option<String>,
    #[serde(default)]
    pub from_headers: Vec<JwtHeader>,
    #[serde(default)]
    pub from_params: Vec<String>,
    #[serde(default)]
    pub from_cookies: Vec<String>,
    #[serde(default)]
    pub output_payload_to_header: Option<String>,
    #[serde(default)]
    pub output_claim_to_headers: Vec<ClaimToHeader>,
    #[serde(default)]
    pub forward_original_token: bool,
}

/// A header that carries a token.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct JwtHeader {
    pub name: String,
    /// Text before the token, e.g. `Bearer `.
    #[serde(default)]
    pub prefix: String,
}

/// A claim that is forwarded in a header.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ClaimToHeader {
    pub header: String,
    /// Path of the claim; names of nested claims are separated by dots.
    pub claim: String,
}

/// An object of kind PeerAuthentication (`security.istio.io`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PeerAuthentication {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: PeerAuthenticationSpec,
}

/// The content of `spec:` in a PeerAuthentication.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PeerAuthenticationSpec {
    pub selector: Option<WorkloadSelector>,
    pub mtls: MutualTls,
    /// Modes of single ports, by the workload's port; only valid with a selector.
    pub port_level_mtls: BTreeMap<String, MutualTls>,
}

/// The `mtls` section of a PeerAuthentication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct MutualTls {
    pub mode: MutualTlsMode,
}

/// The mode of mTLS; see [`MutualTls`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum MutualTlsMode {
    /// The mode of a wider policy applies.
    #[default]
    Unset,
    Disable,
    Permissive,
    Strict,
}
