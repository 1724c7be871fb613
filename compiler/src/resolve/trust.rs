//! Whom a tenant trusts, and where its keys are: federations, its own key servers, and which identities run on which node.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::identity::{COMPONENTS, Identity, PROVIDER, gateway_identity};
use canal_model::ids::{NodeName, ObjectName, TenantName, TrustDomain};
use canal_model::policy::mesh;
use canal_model::program::{Tenant, Workload};
use canal_model::trust::{Entitlement, IDENTITIES_MAX, KEY_SERVER_ADDRESSES_MAX, KeyPlace, KeyServer, Requester};

use super::addresses::reserved;
use super::corpus::Said;
use crate::limits::{FEDERATIONS_PER_TENANT_MAX, KEY_SERVERS_PER_TENANT_MAX};
use crate::report::Report;

/// The tenants with which this one says that it federates.
pub(crate) fn federations(
    tenant: &Tenant,
    said: &[Said<'_, mesh::Federation>],
    report: &mut Report,
) -> BTreeSet<(TenantName, TrustDomain)> {
    let mut all = BTreeSet::new();
    for said in said {
        let mesh::FederationSpec { tenant: other, trust_domain } = &said.object.spec;
        if *other == tenant.name || other.as_str() == PROVIDER {
            let problem = format!("{other} is nobody to federate with");
            report.error(said.document, "spec.tenant", problem, "write another tenant's name, or remove the object");
        } else if *trust_domain == tenant.trust_domain || trust_domain.as_str() == COMPONENTS {
            let problem = format!("{trust_domain} is not another tenant's trust domain");
            report.error(said.document, "spec.trustDomain", problem, "write the other tenant's, or remove the object");
        } else if all.len() >= FEDERATIONS_PER_TENANT_MAX {
            let problem = format!("the tenant federates with more than {FEDERATIONS_PER_TENANT_MAX} others; this one is left out");
            report.error(said.document, "", problem, "remove federations");
        } else {
            all.insert((other.clone(), trust_domain.clone()));
        }
    }
    all
}

/// The tenant's own key servers, sorted by name. Of two with one name the elder is used; a broken one is not there at all, and what needs it
/// is broken.
pub(crate) fn key_servers(tenant: &TenantName, said: &[Said<'_, mesh::KeyServer>], report: &mut Report) -> Vec<KeyServer> {
    let mut all: BTreeMap<ObjectName, KeyServer> = BTreeMap::new();
    for said in said {
        let name = &said.object.metadata.name;
        let addresses = &said.object.spec.addresses;
        let mend = "write from 1 to 16 addresses";
        if all.contains_key(name) {
            let problem = format!("there is a KeyServer {name} already; namespaces do not tell them apart");
            report.error(said.document, "metadata.name", problem, "rename one of them");
        } else if all.len() >= KEY_SERVERS_PER_TENANT_MAX {
            let problem = format!("the tenant has more than {KEY_SERVERS_PER_TENANT_MAX} key servers; this one is left out");
            report.error(said.document, "", problem, "remove key servers");
        } else if addresses.is_empty() && said.fault("spec.addresses").is_none() {
            report.error(said.document, "spec.addresses", "the key server has no address", mend);
        } else if addresses.len() > KEY_SERVER_ADDRESSES_MAX {
            let problem = format!("it has {} addresses, more than {KEY_SERVER_ADDRESSES_MAX}", addresses.len());
            report.error(said.document, "spec.addresses", problem, mend);
        } else if let Some((at, why)) = addresses.iter().enumerate().find_map(|(at, a)| reserved(a.ip()).map(|why| (at, why))) {
            let problem = format!("{} {why}", addresses[at].ip());
            report.error(said.document, format!("spec.addresses[{at}]"), problem, "write the address of the tenant's own key server");
        } else if let Some(at) = addresses.iter().position(|address| address.port() == 0) {
            report.error(said.document, format!("spec.addresses[{at}]"), "port 0 is none", "write the key server's port, such as 15013");
        } else if said.fault("spec").is_none() {
            all.insert(name.clone(), KeyServer { tenant: tenant.clone(), name: name.clone(), addresses: addresses.clone() });
        }
    }
    all.into_values().collect()
}

/// The identities that run on each node, for key servers; sorted by node. Only for a tenant whose keys are there.
pub(crate) fn entitlements(tenant: &Tenant, workloads: &[Workload], report: &mut Report) -> Vec<Entitlement> {
    if tenant.keys.place != KeyPlace::KeyServer {
        return Vec::new();
    }
    let gateway = gateway_identity(tenant.trust_domain.clone());
    let mut nodes: BTreeMap<&NodeName, BTreeSet<Identity>> = BTreeMap::new();
    for workload in workloads {
        let identity = Identity {
            trust_domain: tenant.trust_domain.clone(),
            namespace: workload.namespace.clone(),
            service_account: workload.service_account.clone(),
        };
        // No pod may be the gateway, whatever it is called.
        if identity != gateway {
            nodes.entry(&workload.node).or_default().insert(identity);
        }
    }
    let mut all = Vec::new();
    for (node, mut identities) in nodes {
        if identities.len() > IDENTITIES_MAX {
            let problem =
                format!("node {node} runs {} identities, more than {IDENTITIES_MAX}; key servers refuse the rest", identities.len());
            report.general(problem, "spread the pods over more nodes, or share service accounts");
            identities = identities.into_iter().take(IDENTITIES_MAX).collect();
        }
        let identities = identities.into_iter().collect();
        all.push(Entitlement { tenant: tenant.name.clone(), requester: Requester::Node(node.clone()), identities });
    }
    all
}
