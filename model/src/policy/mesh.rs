//! Canal's own objects (`canal.mesh/v1`): what neither Kubernetes nor Istio has. Only the provider writes Tenants and Gateways.

use std::net::{IpAddr, SocketAddr};
use std::num::{NonZeroU16, NonZeroU32};
use std::time::Duration;

use ipnet::IpNet;
use serde::Deserialize;

use super::Metadata;
use crate::ids::{AzName, IdError, Namespace, ObjectName, TenantName, TrustDomain, Vni};
use crate::program::OutsideMesh;
use crate::share::Shares;
use crate::trust::{ClientCertificates, KeyAlgorithm, KeyPlace};

/// Annotation of a Service: the AZ it lives in.
pub const HOME_AZ_ANNOTATION: &str = "canal.mesh/home-az";

/// `canal.mesh/v1 Tenant`; its name is the tenant's.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Tenant {
    pub metadata: Metadata,
    pub spec: TenantSpec,
}

/// `spec:` of a Tenant.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantSpec {
    pub vni: Vni,
    pub trust_domain: TrustDomain,
    /// Where the tenant's pods have their addresses.
    pub pod_cidrs: Vec<IpNet>,
    /// Where the tenant's services have their addresses; empty: not checked.
    #[serde(default)]
    pub service_cidrs: Vec<IpNet>,
    /// Where the tenant's services have their gateway addresses. With it the tenant is on the cloud tier. Ranges of one family follow each
    /// other in the order written, so a new one goes to the end.
    #[serde(default)]
    pub gateway_cidrs: Vec<IpNet>,
    /// The AZ in which the tenant's services live, where they do not say otherwise themselves ([`HOME_AZ_ANNOTATION`]).
    #[serde(default)]
    pub home_az: Option<AzName>,
    /// What happens to connections that leave the mesh.
    #[serde(default, deserialize_with = "outside")]
    pub outside: OutsideMesh,
    /// Where private keys of the tenant's workloads are.
    #[serde(default)]
    pub keys: KeysSpec,
    /// How much of each shared limit the tenant may take, where the provider wants other than the default.
    #[serde(default)]
    pub shares: Shares,
    /// Name servers that the tenant's pods may ask directly; empty: the tier's own, else the cluster's DNS service.
    #[serde(default)]
    pub resolvers: Vec<IpAddr>,
    /// Limits of the whole tenant that hold where its own Throttles do not say less.
    #[serde(default)]
    pub default_throttle: DefaultThrottle,
}

/// `spec.keys:` of a Tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct KeysSpec {
    pub place: KeyPlace,
    pub algorithm: KeyAlgorithm,
    pub fallback: KeyFallback,
}

/// With `place: KeyServer`: what happens while no key server answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub enum KeyFallback {
    /// No new connections.
    #[default]
    Refuse,
    /// Data planes hold keys of their own.
    Local,
}

fn outside<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<OutsideMesh, D::Error> {
    #[derive(Deserialize)]
    enum Word {
        Deny,
        Passthrough,
    }
    Ok(match Word::deserialize(deserializer)? {
        Word::Deny => OutsideMesh::Deny,
        Word::Passthrough => OutsideMesh::Passthrough,
    })
}

/// `canal.mesh/v1 Gateway`; its name is the replica's. One per tenant that the replica serves.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Gateway {
    pub metadata: Metadata,
    pub spec: GatewaySpec,
}

/// `spec:` of a Gateway.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct GatewaySpec {
    pub az: AzName,
    /// The replica's addresses in the tenant's overlay.
    pub addresses: Vec<IpAddr>,
    /// Takes no new connections.
    #[serde(default)]
    pub draining: bool,
}

/// `canal.mesh/v1 ExternalAuthorizer`: whom an AuthorizationPolicy with `action: CUSTOM` asks, over gRPC
/// (`envoy.service.auth.v3.Authorization/Check`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ExternalAuthorizer {
    pub metadata: Metadata,
    pub spec: ExternalAuthorizerSpec,
}

/// `spec:` of an ExternalAuthorizer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExternalAuthorizerSpec {
    pub service: AuthorizerService,
    /// `None`: one second.
    #[serde(default)]
    pub timeout: Option<Timeout>,
    /// Requests pass while it does not answer.
    #[serde(default)]
    pub fail_open: bool,
    /// Request headers that it is shown; empty: all.
    #[serde(default)]
    pub include_request_headers: Vec<String>,
    #[serde(default)]
    pub include_request_body: Option<IncludeBody>,
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct AuthorizerService {
    pub name: ObjectName,
    /// `None`: the object's own.
    #[serde(default)]
    pub namespace: Option<Namespace>,
    pub port: NonZeroU16,
}

/// How much of a request's body is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IncludeBody {
    pub max_bytes: u32,
}

/// A time in Gateway API's form (GEP-2257): `1h30m`, `2s`, `500ms`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Timeout(pub Duration);

impl TryFrom<String> for Timeout {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        let form = || IdError::Form { what: "time", given: text.chars().take(40).collect(), form: "1h30m, 2s or 500ms" };
        let (mut rest, mut sum, mut parts) = (text.as_str(), Duration::ZERO, 0);
        while !rest.is_empty() {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let number: u64 = rest[..digits].parse().ok().filter(|_| (1..=5).contains(&digits)).ok_or_else(form)?;
            let after = &rest[digits..];
            let units: [(&str, u64); 4] = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
            let (unit, millis) = units.into_iter().find(|(unit, _)| after.starts_with(unit)).ok_or_else(form)?;
            (rest, sum, parts) = (&after[unit.len()..], sum + Duration::from_millis(number * millis), parts + 1);
        }
        if (1..=4).contains(&parts) { Ok(Self(sum)) } else { Err(form()) }
    }
}

/// `canal.mesh/v1 Federation`: members of another tenant may connect, where an ALLOW policy names them. In force once that tenant has one for
/// this tenant too.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Federation {
    pub metadata: Metadata,
    pub spec: FederationSpec,
}

/// `spec:` of a Federation.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FederationSpec {
    /// The other one.
    pub tenant: TenantName,
    pub trust_domain: TrustDomain,
}

/// `canal.mesh/v1 KeyServer`: a tenant's own, for keys that never leave it (keyless TLS). Its name is the server's.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct KeyServer {
    pub metadata: Metadata,
    pub spec: KeyServerSpec,
}

/// `spec:` of a KeyServer.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct KeyServerSpec {
    /// Asked in this order; `ip:port`.
    pub addresses: Vec<SocketAddr>,
}

/// `canal.mesh/v1 Termination`: TLS of clients without a node proxy ends at the gateway.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Termination {
    pub metadata: Metadata,
    pub spec: TerminationSpec,
}

/// `spec:` of a Termination.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TerminationSpec {
    /// A Service in the Termination's namespace.
    pub target_ref: TargetRef,
    /// Of the Service.
    pub port: NonZeroU16,
    #[serde(default)]
    pub certificate: CertificateSpec,
    #[serde(default)]
    pub client_certificates: ClientCertificates,
    /// Plain connections to this port are refused.
    #[serde(default)]
    pub required: bool,
}

/// Exactly one of the two.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CertificateSpec {
    /// One of the tenant's trust domain.
    pub mesh: Option<MeshCertificate>,
    /// The tenant's own, whose key is in the KeyServer of this name.
    pub key_server: Option<ObjectName>,
}

/// Nothing is to be said about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
pub struct MeshCertificate {}

/// `canal.mesh/v1 Throttle`: early limits of one service, or of the whole tenant, at each gateway replica.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Throttle {
    pub metadata: Metadata,
    pub spec: ThrottleSpec,
}

/// `spec:` of a Throttle. A limit that is absent is none.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ThrottleSpec {
    /// A Service in the Throttle's namespace; `None`: the whole tenant.
    #[serde(default)]
    pub target_ref: Option<TargetRef>,
    /// New sessions.
    #[serde(default)]
    pub sessions: Option<ThrottleRate>,
    #[serde(default)]
    pub packets: Option<ThrottleRate>,
    /// Requests that the gateway replicas forward, all together.
    #[serde(default)]
    pub requests: Option<ThrottleRate>,
}

/// `spec.defaultThrottle:` of a Tenant: the provider's limits of the whole tenant. The tenant's own can only be lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(default)]
pub struct DefaultThrottle {
    pub sessions: Option<ThrottleRate>,
    pub packets: Option<ThrottleRate>,
    pub requests: Option<ThrottleRate>,
}

/// What a Throttle is for (Gateway API's LocalPolicyTargetReference).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct TargetRef {
    /// Empty: Kubernetes' own objects.
    #[serde(default)]
    pub group: String,
    pub kind: String,
    pub name: ObjectName,
}

/// So many per second, and so many at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ThrottleRate {
    pub per_second: NonZeroU32,
    /// `None`: those of one second.
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
            let got = Timeout::try_from(text.to_owned()).ok().map(|timeout| timeout.0.as_millis());
            assert_eq!(got, want, "{text:?}");
        }
    }
}
