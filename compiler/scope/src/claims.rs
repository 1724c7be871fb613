//! Compares the claims of tenants on shared identifiers (VNI, trust domain, addresses), and decides
//! which tenant yields if two claim the same. Tenants are compared nowhere else: everything else is
//! compiled tenant by tenant. Start at [`collisions`].

use std::collections::BTreeSet;
use std::net::IpAddr;

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::diagnostic_code::DiagnosticCode;
use canal_model::ids::{Namespace, ObjectName, ReplicaName, TenantName, TrustDomain, Vni};
use canal_model::policy::{ObjectKey, ObjectKind};
use canal_model::tier::overlap;
use ipnet::IpNet;

/// The shared identifiers that one tenant claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantClaims {
    pub tenant: TenantName,
    /// `None` while the tenant has no valid Tenant object; it then gets no resources either.
    pub isolation: Option<Isolation>,
    pub gateways: Vec<GatewayClaim>,
}

/// The properties that separate a tenant from all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Isolation {
    pub vni: Vni,
    pub trust_domain: TrustDomain,
    pub pod_cidrs: Vec<IpNet>,
    /// Ranges of gateway addresses. If not empty, the tenant is on the cloud tier, which separates
    /// tenants by VNI alone.
    pub gateway_cidrs: Vec<IpNet>,
}

impl Isolation {
    /// Iterates over all ranges, each with the field that contains it.
    fn ranges(&self) -> impl Iterator<Item = (String, &IpNet)> {
        let named = |field: &'static str| move |(at, net)| (format!("spec.{field}[{at}]"), net);
        let pods = self.pod_cidrs.iter().enumerate().map(named("podCidrs"));
        pods.chain(
            self.gateway_cidrs
                .iter()
                .enumerate()
                .map(named("gatewayCidrs")),
        )
    }

    fn is_on_tier(&self) -> bool {
        !self.gateway_cidrs.is_empty()
    }
}

/// The addresses at which a replica serves this tenant. They identify the tenant of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayClaim {
    pub replica: ReplicaName,
    pub addresses: Vec<IpAddr>,
}

/// The tenants that must yield, and why.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClaimConflicts {
    /// Tenants of which no resources may be published, because their isolation is not certain.
    pub withheld: BTreeSet<TenantName>,
    /// Diagnostics in the order of the given tenants.
    pub diagnostics: Vec<(TenantName, Diagnostic)>,
}

/// Compares the claims of all tenants, given in the order in which the controller first saw them.
///
/// The later tenant yields, so that no tenant can displace a running one. A tenant that yields does
/// not defend its claims against later ones.
pub fn collisions<'a>(claims: impl IntoIterator<Item = &'a TenantClaims>) -> ClaimConflicts {
    let mut found = ClaimConflicts::default();
    let mut seen: Vec<&TenantClaims> = Vec::new();
    for newer in claims {
        let before = found.diagnostics.len();
        for older in &seen {
            clashes(older, newer, &mut |diagnostic| {
                found.diagnostics.push((newer.tenant.clone(), diagnostic))
            });
        }
        if found.diagnostics.len() > before {
            found.withheld.insert(newer.tenant.clone());
        } else {
            seen.push(newer);
        }
    }
    found
}

/// Reports the claims of `newer` that `older` has made already. Tenants and replicas have no
/// namespace of their own; the reports name the one their objects are in, `default`.
fn clashes(older: &TenantClaims, newer: &TenantClaims, report: &mut impl FnMut(Diagnostic)) {
    let other = &older.tenant;
    let mut error = |kind: ObjectKind, name: &str, field: &str, problem: String, fix: &str| {
        // A name that no object can have leaves the diagnostic without an object.
        let object = ObjectName::new(name)
            .ok()
            .zip(Namespace::new("default").ok());
        report(Diagnostic {
            severity: Severity::Error,
            code: DiagnosticCode::TenantConflict,
            origin: None,
            object: object.map(|(name, namespace)| ObjectKey {
                kind,
                namespace,
                name,
            }),
            field: field.to_owned(),
            problem,
            fix: fix.to_owned(),
        });
    };
    if let (Some(old), Some(new)) = (&older.isolation, &newer.isolation) {
        let name = newer.tenant.as_str();
        if old.vni == new.vni {
            let problem = format!(
                "VNI {} already belongs to tenant {other}; packets of the two tenants would mix",
                new.vni.get()
            );
            error(
                ObjectKind::Tenant,
                name,
                "spec.vni",
                problem,
                "give every tenant its own VNI",
            );
        }
        if old.trust_domain == new.trust_domain {
            let problem = format!(
                "trust domain {} already belongs to tenant {other}; identities of the two tenants would mix",
                new.trust_domain
            );
            error(
                ObjectKind::Tenant,
                name,
                "spec.trustDomain",
                problem,
                "give every tenant its own trust domain",
            );
        }
        // On the cloud tier VNIs separate tenants, so their ranges may overlap if both tenants are
        // on it.
        let apart_by_vni = old.is_on_tier() && new.is_on_tier();
        for (field, net) in new.ranges().filter(|_| !apart_by_vni) {
            if let Some((_, taken)) = old.ranges().find(|(_, taken)| overlap(taken, net)) {
                let problem = format!(
                    "{net} overlaps {taken} of tenant {other}; outside the cloud tier tenants are distinguished by address"
                );
                let fix =
                    "choose a range that no other tenant uses, or give both tenants gatewayCidrs";
                error(ObjectKind::Tenant, name, &field, problem, fix);
            }
        }
    }
    for new in &newer.gateways {
        // Addresses of different replicas do not conflict: those are in different network
        // namespaces or on different machines.
        let same_replica = older
            .gateways
            .iter()
            .filter(|old| old.replica == new.replica);
        let taken: BTreeSet<&IpAddr> = same_replica.flat_map(|old| &old.addresses).collect();
        let addresses = new.addresses.iter().enumerate();
        for (at, address) in addresses.filter(|(_, address)| taken.contains(address)) {
            let problem = format!(
                "{address} is already the address at which this replica serves tenant {other}"
            );
            let fix = "give the replica an own address in every tenant's overlay";
            error(
                ObjectKind::GatewayReplica,
                new.replica.as_str(),
                &format!("spec.addresses[{at}]"),
                problem,
                fix,
            );
        }
    }
}
