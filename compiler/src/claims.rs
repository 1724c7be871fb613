//! What a tenant takes for itself of what all tenants share, and who must yield when two take the same. The only place
//! where tenants meet: everything else is compiled tenant by tenant.

use std::collections::BTreeSet;
use std::net::IpAddr;

use canal_model::diagnostic::{Diagnostic, Severity};
use canal_model::ids::{Namespace, ObjectName, ReplicaName, TenantName, TrustDomain, Vni};
use canal_model::policy::{ObjectKey, ObjectKind};
use canal_model::tier::overlap;
use ipnet::IpNet;

/// What one tenant claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    pub tenant: TenantName,
    /// `None` while the tenant has no valid Tenant object; it then gets no resources either.
    pub isolation: Option<Isolation>,
    pub gateways: Vec<GatewayClaim>,
}

/// What sets a tenant apart from all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Isolation {
    pub vni: Vni,
    pub trust_domain: TrustDomain,
    pub pod_cidrs: Vec<IpNet>,
    /// Not empty: the tenant is on the cloud tier, which tells tenants apart by VNI alone.
    pub gateway_cidrs: Vec<IpNet>,
}

impl Isolation {
    /// All ranges, with the field that says each.
    fn ranges(&self) -> impl Iterator<Item = (String, &IpNet)> {
        let named = |field: &'static str| move |(at, net)| (format!("spec.{field}[{at}]"), net);
        let pods = self.pod_cidrs.iter().enumerate().map(named("podCidrs"));
        pods.chain(self.gateway_cidrs.iter().enumerate().map(named("gatewayCidrs")))
    }

    fn is_on_tier(&self) -> bool {
        !self.gateway_cidrs.is_empty()
    }
}

/// The addresses by which a replica knows that a connection is for this tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayClaim {
    pub replica: ReplicaName,
    pub addresses: Vec<IpAddr>,
}

/// Who must yield, and why.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Collisions {
    /// Tenants whose resources must not be sent out: all of them, since their isolation is not certain.
    pub withheld: BTreeSet<TenantName>,
    /// In the order of the tenants given.
    pub diagnostics: Vec<(TenantName, Diagnostic)>,
}

/// Compares the claims of all tenants, given in the order in which the controller first saw them: a newcomer yields, so that
/// nobody can take a running tenant's place. A tenant that yields does not defend its claims against those after it.
pub fn collisions<'a>(claims: impl IntoIterator<Item = &'a Claims>) -> Collisions {
    let mut found = Collisions::default();
    let mut seen: Vec<&Claims> = Vec::new();
    for newcomer in claims {
        let before = found.diagnostics.len();
        for elder in &seen {
            clashes(elder, newcomer, &mut |diagnostic| found.diagnostics.push((newcomer.tenant.clone(), diagnostic)));
        }
        if found.diagnostics.len() > before {
            found.withheld.insert(newcomer.tenant.clone());
        } else {
            seen.push(newcomer);
        }
    }
    found
}

fn clashes(elder: &Claims, newcomer: &Claims, report: &mut impl FnMut(Diagnostic)) {
    let other = &elder.tenant;
    let mut error = |kind: ObjectKind, name: &str, field: &str, problem: String, mend: &str| {
        let object = ObjectName::new(name).ok().zip(Namespace::new("default").ok());
        report(Diagnostic {
            severity: Severity::Error,
            origin: None,
            object: object.map(|(name, namespace)| ObjectKey { kind, namespace, name }),
            field: field.to_owned(),
            problem,
            mend: mend.to_owned(),
        });
    };
    if let (Some(old), Some(new)) = (&elder.isolation, &newcomer.isolation) {
        let name = newcomer.tenant.as_str();
        if old.vni == new.vni {
            let problem = format!("VNI {} is already tenant {other}'s, so their packets would mix", new.vni.get());
            error(ObjectKind::Tenant, name, "spec.vni", problem, "give every tenant its own VNI");
        }
        if old.trust_domain == new.trust_domain {
            let problem = format!("trust domain {} is already tenant {other}'s, so their identities would mix", new.trust_domain);
            error(ObjectKind::Tenant, name, "spec.trustDomain", problem, "give every tenant its own trust domain");
        }
        let apart_by_vni = old.is_on_tier() && new.is_on_tier();
        for (field, net) in new.ranges().filter(|_| !apart_by_vni) {
            if let Some((_, taken)) = old.ranges().find(|(_, taken)| overlap(taken, net)) {
                let problem = format!("{net} overlaps {taken} of tenant {other}; outside the cloud tier tenants are told apart by address");
                let mend = "choose a range that no other tenant uses, or give both tenants gatewayCidrs";
                error(ObjectKind::Tenant, name, &field, problem, mend);
            }
        }
    }
    for new in &newcomer.gateways {
        let same_replica = elder.gateways.iter().filter(|old| old.replica == new.replica);
        let taken: BTreeSet<&IpAddr> = same_replica.flat_map(|old| &old.addresses).collect();
        for (at, address) in new.addresses.iter().enumerate().filter(|(_, address)| taken.contains(address)) {
            let problem = format!("{address} is already the address at which this replica serves tenant {other}");
            let mend = "give the replica an own address in every tenant's overlay";
            error(ObjectKind::Gateway, new.replica.as_str(), &format!("spec.addresses[{at}]"), problem, mend);
        }
    }
}
