//! Canal's own objects (`canal.mesh/v1`), for which neither Kubernetes nor Istio has a kind. Only
//! the provider writes Tenants and Gateways. The structs mirror the YAML; the compiler validates
//! and interprets them.

use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU16, NonZeroU32};
use std::time::Duration;

use ipnet::IpNet;
use serde::Deserialize;

use super::Metadata;
use crate::ids::{AzName, IdError, Namespace, ObjectName, TenantName, TrustDomain, Vni};
use crate::program::OutboundTrafficPolicy;
use crate::share::Shares;
use crate::trust::{ClientCertificates, KeyAlgorithm, KeyLocation};

/// Annotation of a Service that names its home AZ.
pub const HOME_AZ_ANNOTATION: &str = "canal.mesh/home-az";

/// `canal.mesh/v1 Tenant`. Its name is the name of the tenant.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Tenant {
    pub metadata: Metadata,
    pub spec: TenantSpec,
}

/// The content of `spec:` in a Tenant.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantSpec {
    pub vni: Vni,
    pub trust_domain: TrustDomain,
    /// Address ranges of the tenant's pods.
    pub pod_cidrs: Vec<IpNet>,
    /// Address ranges of the tenant's services, with which its gateway ranges must not overlap.
    #[serde(default)]
    pub service_cidrs: Vec<IpNet>,
    /// Ranges of the gateway addresses of the tenant's services. A tenant with ranges is on the
    /// cloud tier. Ranges of one family are used in the order written, so a new range goes to the
    /// end.
    #[serde(default)]
    pub gateway_cidrs: Vec<IpNet>,
    /// Makes the tenant an ingress network: a network of clients outside the mesh, whose
    /// `gatewayCidrs` are the pool of addresses for the Gateways of all tenants.
    #[serde(default)]
    pub ingress_network: bool,
    /// Home AZ of the tenant's services, unless a service names another one
    /// ([`HOME_AZ_ANNOTATION`]).
    #[serde(default)]
    pub home_az: Option<AzName>,
    /// Policy for connections that leave the mesh.
    #[serde(
        default,
        alias = "outside",
        deserialize_with = "outbound_traffic_policy"
    )]
    pub outbound_traffic_policy: OutboundTrafficPolicy,
    /// Location and algorithm of the private keys of the tenant's workloads.
    #[serde(default)]
    pub keys: KeysSpec,
    /// The tenant's part of each shared limit, where it differs from the default.
    #[serde(default)]
    pub shares: Shares,
    /// Name servers that the tenant's pods may query directly. If empty, they are the tier's own,
    /// else the cluster's DNS service.
    #[serde(default)]
    pub resolvers: Vec<IpAddr>,
    /// Limits of the whole tenant. They apply where its own Throttles are not lower.
    #[serde(default)]
    pub default_throttle: DefaultThrottle,
    /// The mode of the direct path, on which nodes forward connections between the tenant's
    /// workloads without a gateway.
    #[serde(default)]
    pub direct_path: DirectPathMode,
}

/// The content of `spec.directPath:` in a Tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum DirectPathMode {
    /// Nodes connect directly where nothing needs a gateway, unless the Service forbids it.
    #[default]
    Auto,
    /// All connections of the tenant pass through a gateway.
    Off,
}

/// The content of `spec.keys:` in a Tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct KeysSpec {
    #[serde(alias = "place")]
    pub location: KeyLocation,
    pub algorithm: KeyAlgorithm,
    pub fallback: KeyFallback,
}

/// With `location: KeyServer`: the behavior while no key server answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum KeyFallback {
    /// New connections are refused.
    #[default]
    Refuse,
    /// Data planes use keys of their own.
    Local,
}

fn outbound_traffic_policy<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<OutboundTrafficPolicy, D::Error> {
    #[derive(Deserialize)]
    enum Word {
        Deny,
        Passthrough,
    }
    Ok(match Word::deserialize(deserializer)? {
        Word::Deny => OutboundTrafficPolicy::Deny,
        Word::Passthrough => OutboundTrafficPolicy::Passthrough,
    })
}

/// `canal.mesh/v1 GatewayReplica`. Its name is the name of the replica. There is one for each tenant that
/// the replica serves.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct GatewayReplica {
    pub metadata: Metadata,
    pub spec: GatewayReplicaSpec,
}

/// The content of `spec:` in a GatewayReplica.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct GatewayReplicaSpec {
    pub az: AzName,
    /// The replica's addresses in the tenant's overlay.
    pub addresses: Vec<IpAddr>,
    /// A draining replica takes no new connections.
    #[serde(default)]
    pub draining: bool,
}

/// `canal.mesh/v1 ExternalAuthorizer`: the authorizer for AuthorizationPolicies with `action:
/// CUSTOM`, called over gRPC (`envoy.service.auth.v3.Authorization/Check`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ExternalAuthorizer {
    pub metadata: Metadata,
    pub spec: ExternalAuthorizerSpec,
}

/// The content of `spec:` in an ExternalAuthorizer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExternalAuthorizerSpec {
    pub service: AuthorizerService,
    /// Timeout of one check; `None` means one second.
    #[serde(default)]
    pub timeout: Option<Timeout>,
    /// If true, requests pass while the authorizer does not answer.
    #[serde(default)]
    pub fail_open: bool,
    /// Request headers that the authorizer receives; an empty list sends all.
    #[serde(default)]
    pub include_request_headers: Vec<String>,
    #[serde(default)]
    pub include_request_body: Option<IncludeBody>,
}

/// The Service port at which an authorizer listens.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AuthorizerService {
    pub name: ObjectName,
    /// Namespace of the Service; `None` means the namespace of the ExternalAuthorizer.
    #[serde(default)]
    pub namespace: Option<Namespace>,
    pub port: NonZeroU16,
}

/// The part of a request's body that the authorizer receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IncludeBody {
    pub max_bytes: u32,
}

/// A duration in Gateway API's form (GEP-2257): `1h30m`, `2s`, `500ms`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Timeout(pub Duration);

impl TryFrom<String> for Timeout {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        let form = || IdError::Form {
            what: "time",
            value: text.chars().take(40).collect(),
            form: "1h30m, 2s or 500ms",
        };
        let (mut rest, mut sum, mut parts) = (text.as_str(), Duration::ZERO, 0);
        while !rest.is_empty() {
            // GEP-2257: up to four parts, each with 1 to 5 digits. "ms" is tried before "m" and
            // "s".
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let number: u64 = rest[..digits]
                .parse()
                .ok()
                .filter(|_| (1..=5).contains(&digits))
                .ok_or_else(form)?;
            let after = &rest[digits..];
            let units: [(&str, u64); 4] = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
            let (unit, millis) = units
                .into_iter()
                .find(|(unit, _)| after.starts_with(unit))
                .ok_or_else(form)?;
            (rest, sum, parts) = (
                &after[unit.len()..],
                sum + Duration::from_millis(number * millis),
                parts + 1,
            );
        }
        if (1..=4).contains(&parts) {
            Ok(Self(sum))
        } else {
            Err(form())
        }
    }
}

/// `canal.mesh/v1 Federation`: members of another tenant may connect where an ALLOW policy names
/// them. It takes effect once that tenant has a Federation for this tenant too.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Federation {
    pub metadata: Metadata,
    pub spec: FederationSpec,
}

/// The content of `spec:` in a Federation.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FederationSpec {
    /// Name of the other tenant.
    pub tenant: TenantName,
    pub trust_domain: TrustDomain,
}

/// `canal.mesh/v1 KeyServer`: a tenant's own key server, for keys that never leave it (keyless
/// TLS). Its name is the name of the server.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct KeyServer {
    pub metadata: Metadata,
    pub spec: KeyServerSpec,
}

/// The content of `spec:` in a KeyServer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct KeyServerSpec {
    /// Addresses as `ip:port`, in the order in which requesters try them.
    pub addresses: Vec<SocketAddr>,
}

/// `canal.mesh/v1 Termination`: the gateway terminates TLS for clients without a node proxy.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Termination {
    pub metadata: Metadata,
    pub spec: TerminationSpec,
}

/// The content of `spec:` in a Termination.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TerminationSpec {
    /// A Service in the Termination's namespace.
    pub target_ref: TargetRef,
    /// Number of a port of the Service.
    pub port: NonZeroU16,
    #[serde(default)]
    pub certificate: CertificateSpec,
    #[serde(default)]
    pub client_certificates: ClientCertificates,
    /// If true, plaintext connections to this port are refused.
    #[serde(default)]
    pub required: bool,
}

/// Source of the certificate. Exactly one of the two fields is set.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CertificateSpec {
    /// The certificate is one of the tenant's trust domain.
    pub mesh: Option<MeshCertificate>,
    /// The certificate is the tenant's own. Its key is in the KeyServer of this name.
    pub key_server: Option<ObjectName>,
}

/// A certificate of the mesh; it has no parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub struct MeshCertificate {}

/// `canal.mesh/v1 Throttle`: early limits of one service, or of the whole tenant, at each gateway
/// replica.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Throttle {
    pub metadata: Metadata,
    pub spec: ThrottleSpec,
}

/// `spec:` of a Throttle. An absent limit means no limit.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ThrottleSpec {
    /// A Service in the Throttle's namespace; `None` means the whole tenant.
    #[serde(default)]
    pub target_ref: Option<TargetRef>,
    /// Limit on the rate of new sessions.
    #[serde(default)]
    pub sessions: Option<ThrottleRate>,
    #[serde(default)]
    pub packets: Option<ThrottleRate>,
    /// Limit of the requests that all gateway replicas together forward.
    #[serde(default)]
    pub requests: Option<ThrottleRate>,
}

/// `spec.defaultThrottle:` of a Tenant: the provider's limits of the whole tenant. The tenant's own
/// limits can only be lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct DefaultThrottle {
    pub sessions: Option<ThrottleRate>,
    pub packets: Option<ThrottleRate>,
    pub requests: Option<ThrottleRate>,
}

/// The object that a Throttle or Termination applies to (Gateway API's LocalPolicyTargetReference).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct TargetRef {
    /// API group; empty means Kubernetes' core group.
    #[serde(default)]
    pub group: String,
    pub kind: String,
    pub name: ObjectName,
}

/// A token bucket: tokens per second, and the size of the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ThrottleRate {
    pub per_second: NonZeroU32,
    /// Maximum burst; `None` means the tokens of one second.
    #[serde(default)]
    pub burst: Option<NonZeroU32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_gateway_apis() {
        for (text, want) in [
            ("500ms", Some(500)),
            ("1s", Some(1_000)),
            ("1m30s", Some(90_000)),
            ("1h2m3s4ms", Some(3_723_004)),
            ("0s", Some(0)),
            ("99999h", Some(359_996_400_000)),
            ("", None),
            ("5", None),
            ("s", None),
            ("1.5s", None),
            ("-1s", None),
            ("100000s", None),
            ("1s1s1s1s1s", None),
            ("1 s", None),
            ("1\u{e4}", None),
        ] {
            let got = Timeout::try_from(text.to_owned())
                .ok()
                .map(|timeout| timeout.0.as_millis());
            assert_eq!(got, want, "{text:?}");
        }
    }
}
