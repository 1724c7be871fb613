//! Kinds of documents: those that Canal reads, and what to report for the others. It does not look
//! into the documents.

use canal_model::policy::ObjectKind;

use crate::renamed::renamed_kind;

/// Treatment of a whole document whose kind Canal does not read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum UnknownKindAction {
    /// Canal reads the kind, but not in this `apiVersion`.
    OtherVersion(ObjectKind),
    /// An object that only concerns Kubernetes itself.
    Skipped,
    /// A kind that Canal never reads, because it belongs to another implementation.
    Foreign(&'static ForeignKind),
    /// A policy kind, which must not be ignored.
    Refused,
}

/// A kind that only another implementation can read, and how to say the same to Canal.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ForeignKind {
    group: &'static str,
    kind: &'static str,
    pub(crate) problem: &'static str,
    pub(crate) fix: &'static str,
}

const FOREIGN_KINDS: [ForeignKind; 4] = [
    ForeignKind {
        group: "networking.istio.io",
        kind: "EnvoyFilter",
        problem: "EnvoyFilter changes Envoy's configuration, and Canal runs no Envoy; the object has no effect",
        fix: "write what it does as a VirtualService or HTTPRoute (routing), Throttle (rate limits), AuthorizationPolicy with action CUSTOM and ExternalAuthorizer (ext_authz), or RequestAuthentication (JWT)",
    },
    ForeignKind {
        group: "extensions.istio.io",
        kind: "WasmPlugin",
        problem: "WasmPlugin loads code into Envoy, and Canal runs no Envoy; the object has no effect",
        fix: "let an ExternalAuthorizer decide about requests, with an AuthorizationPolicy of action CUSTOM, or write RequestAuthentication for JWT",
    },
    ForeignKind {
        group: "networking.k8s.io",
        kind: "Ingress",
        problem: "Ingress is for ingress controllers, and Canal reads Gateway API; the object has no effect",
        fix: "write its hosts, paths and backends as an HTTPRoute, as `ingress2gateway print` does",
    },
    ForeignKind {
        group: "networking.k8s.io",
        kind: "IngressClass",
        problem: "IngressClass is for ingress controllers, and Canal reads Gateway API; the object has no effect",
        fix: "remove it",
    },
];

/// API groups whose objects do not affect traffic.
const IGNORED_API_GROUPS: [&str; 20] = [
    "",
    "apps",
    "batch",
    "autoscaling",
    "policy",
    "rbac.authorization.k8s.io",
    "storage.k8s.io",
    "scheduling.k8s.io",
    "coordination.k8s.io",
    "apiextensions.k8s.io",
    "discovery.k8s.io",
    "admissionregistration.k8s.io",
    "apiregistration.k8s.io",
    "node.k8s.io",
    "events.k8s.io",
    "certificates.k8s.io",
    "snapshot.storage.k8s.io",
    "monitoring.coreos.com",
    "cert-manager.io",
    "argoproj.io",
];

/// Returns the kind of a document, or the treatment of a document of an unknown kind.
pub(crate) fn kind_of(api_version: &str, kind: &str) -> Result<ObjectKind, UnknownKindAction> {
    if let Some(renamed) = renamed_kind(api_version, kind) {
        return Ok(renamed.kind);
    }
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    let known = ObjectKind::ALL
        .into_iter()
        .find(|k| k.yaml_kind() == kind && group_of(*k) == group);
    match known {
        Some(known) if known.api_versions().contains(&api_version) => Ok(known),
        Some(known) => Err(UnknownKindAction::OtherVersion(known)),
        None => Err(unknown_kind(group, kind)),
    }
}

fn unknown_kind(group: &str, kind: &str) -> UnknownKindAction {
    let foreign = FOREIGN_KINDS
        .iter()
        .find(|foreign| foreign.group == group && foreign.kind == kind);
    match foreign {
        Some(foreign) => UnknownKindAction::Foreign(foreign),
        None if IGNORED_API_GROUPS.contains(&group) => UnknownKindAction::Skipped,
        None => UnknownKindAction::Refused,
    }
}

fn group_of(kind: ObjectKind) -> &'static str {
    kind.api_versions()
        .first()
        .and_then(|version| version.split_once('/'))
        .map_or("", |(group, _)| group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_distinguished_by_group() {
        for (api_version, kind, expected) in [
            ("v1", "Pod", Ok(ObjectKind::Pod)),
            ("v1", "Node", Ok(ObjectKind::Node)),
            ("canal.mesh/v1", "Throttle", Ok(ObjectKind::Throttle)),
            // The old name of the kind, see `renamed.rs`.
            ("canal.mesh/v1", "Gateway", Ok(ObjectKind::GatewayReplica)),
            (
                "gateway.networking.k8s.io/v1",
                "Gateway",
                Ok(ObjectKind::Gateway),
            ),
            (
                "networking.istio.io/v1alpha3",
                "Gateway",
                Ok(ObjectKind::IstioGateway),
            ),
            (
                "gateway.networking.k8s.io/v1beta1",
                "HTTPRoute",
                Ok(ObjectKind::HttpRoute),
            ),
            (
                "gateway.networking.k8s.io/v1alpha2",
                "HTTPRoute",
                Err(UnknownKindAction::OtherVersion(ObjectKind::HttpRoute)),
            ),
            (
                "networking.istio.io/v1alpha3",
                "VirtualService",
                Ok(ObjectKind::VirtualService),
            ),
            (
                "security.istio.io/v1",
                "AuthorizationPolicy",
                Ok(ObjectKind::AuthorizationPolicy),
            ),
            (
                "security.istio.io/v1beta1",
                "PeerAuthentication",
                Ok(ObjectKind::PeerAuthentication),
            ),
            (
                "security.istio.io/v1alpha1",
                "RequestAuthentication",
                Err(UnknownKindAction::OtherVersion(
                    ObjectKind::RequestAuthentication,
                )),
            ),
            (
                "security.istio.io/v1",
                "MeshPolicy",
                Err(UnknownKindAction::Refused),
            ),
            ("canal.mesh/v1", "KeyServer", Ok(ObjectKind::KeyServer)),
            ("apps/v1", "Deployment", Err(UnknownKindAction::Skipped)),
            ("v1", "ServiceAccount", Ok(ObjectKind::ServiceAccount)),
            ("v1", "Endpoints", Ok(ObjectKind::Endpoints)),
            (
                "discovery.k8s.io/v1beta1",
                "EndpointSlice",
                Err(UnknownKindAction::OtherVersion(ObjectKind::EndpointSlice)),
            ),
            ("v1", "ConfigMap", Ok(ObjectKind::ConfigMap)),
            ("v1", "PersistentVolume", Err(UnknownKindAction::Skipped)),
            (
                "networking.k8s.io/v1",
                "NetworkPolicy",
                Err(UnknownKindAction::Refused),
            ),
            // An unknown kind of the groups in `IGNORED_API_GROUPS`, as of the core group, is
            // skipped.
            ("v1", "HTTPRoute", Err(UnknownKindAction::Skipped)),
            ("example.com/v1", "Thing", Err(UnknownKindAction::Refused)),
        ] {
            assert_eq!(kind_of(api_version, kind), expected, "{api_version} {kind}");
        }
    }

    #[test]
    fn a_kind_has_the_versions_in_which_its_api_served_it() {
        for (version, is_served) in [("v1", true), ("v1alpha2", true), ("v1beta1", false)] {
            let kind = kind_of(&format!("gateway.networking.k8s.io/{version}"), "UDPRoute");
            let expected = match is_served {
                true => Ok(ObjectKind::UdpRoute),
                false => Err(UnknownKindAction::OtherVersion(ObjectKind::UdpRoute)),
            };
            assert_eq!(kind, expected, "{version}");
        }
    }

    #[test]
    fn kinds_of_other_implementations_are_refused_with_what_says_the_same() {
        for (api_version, kind, named) in [
            (
                "networking.istio.io/v1alpha3",
                "EnvoyFilter",
                "ExternalAuthorizer",
            ),
            (
                "extensions.istio.io/v1alpha1",
                "WasmPlugin",
                "ExternalAuthorizer",
            ),
            ("networking.k8s.io/v1", "Ingress", "HTTPRoute"),
        ] {
            let Err(UnknownKindAction::Foreign(foreign)) = kind_of(api_version, kind) else {
                panic!("{kind} is not foreign");
            };
            assert!(foreign.problem.starts_with(kind), "{}", foreign.problem);
            assert!(foreign.fix.contains(named), "{}", foreign.fix);
        }
        for kind in ["ServiceMonitor", "PodMonitor"] {
            let action = kind_of("monitoring.coreos.com/v1", kind);
            assert_eq!(action, Err(UnknownKindAction::Skipped));
        }
        let policy = kind_of("networking.k8s.io/v1", "NetworkPolicy");
        assert_eq!(policy, Err(UnknownKindAction::Refused));
    }
}
