//! AuthorizationPolicy, RequestAuthentication and PeerAuthentication (`security.istio.io`): Istio's v1 schema. A list that is absent asks
//! nothing; one that is there and empty is a mistake, which the compiler tells apart.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::Metadata;
use crate::ids::{Namespace, ObjectName};
use crate::program::Labels;

/// Namespaces whose policies are for the whole tenant: Istio's root namespace, and Canal's.
pub const ROOT_NAMESPACES: [&str; 2] = ["istio-system", "canal-system"];

/// Annotation of an AuthorizationPolicy: `true` judges, counts and logs it, and enforces nothing.
pub const DRY_RUN_ANNOTATION: &str = "istio.io/dry-run";

/// `security.istio.io AuthorizationPolicy`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AuthorizationPolicy {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: AuthorizationPolicySpec,
}

/// `spec:` of an AuthorizationPolicy.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct AuthorizationPolicySpec {
    pub selector: Option<WorkloadSelector>,
    pub target_ref: Option<PolicyTargetRef>,
    pub target_refs: Option<Vec<PolicyTargetRef>>,
    /// Without rules it never matches: an ALLOW then allows nothing.
    pub rules: Vec<AuthorizationRule>,
    pub action: PolicyAction,
    /// Whom a CUSTOM asks.
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
    /// Empty: Kubernetes' own objects.
    #[serde(default)]
    pub group: String,
    pub kind: String,
    pub name: ObjectName,
    /// Only the policy's own.
    #[serde(default)]
    pub namespace: Option<Namespace>,
}

/// What a policy does when it matches.
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
    /// An ExternalAuthorizer: `name`, of the policy's or a root namespace, or `namespace/name`.
    pub name: String,
}

/// Matches if one of `from`, one of `to` and all of `when` do. What is absent asks nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct AuthorizationRule {
    pub from: Option<Vec<From>>,
    pub to: Option<Vec<To>>,
    pub when: Option<Vec<Condition>>,
}

/// One item of `from:`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct From {
    pub source: Option<Source>,
}

/// Values, as written; see [`Source`], [`Operation`] and [`Condition`].
pub type Values = Option<Vec<String>>;

/// Who asks. All that is given must hold; of a list, one value.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Source {
    pub principals: Values,
    pub not_principals: Values,
    pub request_principals: Values,
    pub not_request_principals: Values,
    pub namespaces: Values,
    pub not_namespaces: Values,
    /// `namespace/account`, or an account of the policy's namespace.
    pub service_accounts: Values,
    pub not_service_accounts: Values,
    pub ip_blocks: Values,
    pub not_ip_blocks: Values,
    pub remote_ip_blocks: Values,
    pub not_remote_ip_blocks: Values,
    /// Of the principal; `prefix*` too.
    pub trust_domains: Values,
    pub not_trust_domains: Values,
}

/// One item of `to:`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct To {
    pub operation: Option<Operation>,
}

/// What is asked. All that is given must hold; of a list, one value.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Operation {
    pub hosts: Values,
    pub not_hosts: Values,
    pub ports: Values,
    pub not_ports: Values,
    pub methods: Values,
    pub not_methods: Values,
    pub paths: Values,
    pub not_paths: Values,
}

/// One item of `when:`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    pub key: String,
    pub values: Values,
    pub not_values: Values,
}

/// `security.istio.io RequestAuthentication`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RequestAuthentication {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: RequestAuthenticationSpec,
}

/// `spec:` of a RequestAuthentication.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RequestAuthenticationSpec {
    pub selector: Option<WorkloadSelector>,
    pub target_ref: Option<PolicyTargetRef>,
    pub target_refs: Option<Vec<PolicyTargetRef>>,
    pub jwt_rules: Vec<JwtRule>,
}

/// Tokens of one issuer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct JwtRule {
    pub issuer: String,
    #[serde(default)]
    pub audiences: Vec<String>,
    /// Where the issuer's keys are.
    #[serde(default, alias = "jwks_uri")]
    pub jwks_uri: Option<String>,
    /// The keys themselves (RFC 7517, JSON).
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

/// A header that holds a token.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct JwtHeader {
    pub name: String,
    /// What stands before the token, e.g. `Bearer `.
    #[serde(default)]
    pub prefix: String,
}

/// A claim that is carried on.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ClaimToHeader {
    pub header: String,
    /// Names of nested claims are parted by dots.
    pub claim: String,
}

/// `security.istio.io PeerAuthentication`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PeerAuthentication {
    pub metadata: Metadata,
    #[serde(default)]
    pub spec: PeerAuthenticationSpec,
}

/// `spec:` of a PeerAuthentication.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PeerAuthenticationSpec {
    pub selector: Option<WorkloadSelector>,
    pub mtls: MutualTls,
    /// By the workload's port; only beside a selector.
    pub port_level_mtls: BTreeMap<String, MutualTls>,
}

/// Whether peers must prove who they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct MutualTls {
    pub mode: MutualTlsMode,
}

/// See [`MutualTls`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum MutualTlsMode {
    /// As a wider policy says.
    #[default]
    Unset,
    Disable,
    Permissive,
    Strict,
}
