//! Resolves a tenant's trust and keys: federations, its own key servers, and the identities on each
//! node.

use std::collections::{BTreeMap, BTreeSet};

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::identity::{COMPONENTS, Identity, SYSTEM_NAMESPACE, gateway_identity};
use canal_model::ids::{NodeName, ObjectName, TenantName, TrustDomain};
use canal_model::policy::canal;
use canal_model::program::{Tenant, Workload};
use canal_model::trust::{
    Entitlement, IDENTITIES_MAX, KEY_SERVER_ADDRESSES_MAX, KeyLocation, KeyRequester, KeyServer,
};

use super::addresses::reserved;
use super::tenant_objects::Sourced;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::{FEDERATIONS_PER_TENANT_MAX, KEY_SERVERS_PER_TENANT_MAX};

/// Returns the tenants with which this tenant declares a federation.
pub(crate) fn federations(
    tenant: &Tenant,
    declared: &[Sourced<'_, canal::Federation>],
    report: &mut DiagnosticCollector,
) -> BTreeSet<(TenantName, TrustDomain)> {
    let mut all = BTreeSet::new();
    for sourced in declared {
        let canal::FederationSpec {
            tenant: other,
            trust_domain,
        } = &sourced.object.spec;
        if *other == tenant.name || other.as_str() == SYSTEM_NAMESPACE {
            let problem = format!("{other} is not a tenant to federate with");
            report.error(
                Code::InvalidFederation,
                sourced.document,
                "spec.tenant",
                problem,
                "write another tenant's name, or remove the object",
            );
        } else if *trust_domain == tenant.trust_domain || trust_domain.as_str() == COMPONENTS {
            let problem = format!("{trust_domain} is not another tenant's trust domain");
            report.error(
                Code::InvalidFederation,
                sourced.document,
                "spec.trustDomain",
                problem,
                "write the other tenant's trust domain, or remove the object",
            );
        } else if all.len() >= FEDERATIONS_PER_TENANT_MAX {
            let problem = format!(
                "the tenant federates with more than {FEDERATIONS_PER_TENANT_MAX} others; this one is left out"
            );
            report.refuse_excess(sourced.document, "", problem, "remove federations");
        } else {
            all.insert((other.clone(), trust_domain.clone()));
        }
    }
    all
}

/// Returns the tenant's own key servers, sorted by name. If two have the same name, the older one
/// is used. A broken key server is left out, and objects that refer to it are broken.
pub(crate) fn key_servers(
    tenant: &TenantName,
    declared: &[Sourced<'_, canal::KeyServer>],
    report: &mut DiagnosticCollector,
) -> Vec<KeyServer> {
    let mut all: BTreeMap<ObjectName, KeyServer> = BTreeMap::new();
    for sourced in declared {
        let name = &sourced.object.metadata.name;
        let addresses = &sourced.object.spec.addresses;
        let fix = "write from 1 to 16 addresses";
        // An object gets one diagnostic, that of the first check that it fails.
        if all.contains_key(name) {
            let problem =
                format!("there is a KeyServer {name} already; namespaces do not distinguish them");
            report.error(
                Code::DuplicateObject,
                sourced.document,
                "metadata.name",
                problem,
                "rename one of them",
            );
        } else if all.len() >= KEY_SERVERS_PER_TENANT_MAX {
            let problem = format!(
                "the tenant has more than {KEY_SERVERS_PER_TENANT_MAX} key servers; this one is left out"
            );
            report.refuse_excess(sourced.document, "", problem, "remove key servers");
        } else if addresses.is_empty() && sourced.fault("spec.addresses").is_none() {
            // A field that could not be decoded is reported already.
            report.error(
                Code::InvalidKeyServer,
                sourced.document,
                "spec.addresses",
                "the key server has no address",
                fix,
            );
        } else if addresses.len() > KEY_SERVER_ADDRESSES_MAX {
            let problem = format!(
                "it has {} addresses, more than {KEY_SERVER_ADDRESSES_MAX}",
                addresses.len()
            );
            report.error(
                Code::InvalidKeyServer,
                sourced.document,
                "spec.addresses",
                problem,
                fix,
            );
        } else if let Some((at, why)) = addresses
            .iter()
            .enumerate()
            .find_map(|(at, a)| reserved(a.ip()).map(|why| (at, why)))
        {
            let problem = format!("{} {why}", addresses[at].ip());
            report.error(
                Code::ReservedAddress,
                sourced.document,
                format!("spec.addresses[{at}]"),
                problem,
                "write the address of the tenant's own key server",
            );
        } else if let Some(at) = addresses.iter().position(|address| address.port() == 0) {
            report.error(
                Code::InvalidKeyServer,
                sourced.document,
                format!("spec.addresses[{at}]"),
                "port 0 is not valid",
                "write the key server's port, such as 15013",
            );
        // Any other fault of the object has been reported, and leaves it out.
        } else if sourced.fault("spec").is_none() {
            all.insert(
                name.clone(),
                KeyServer {
                    tenant: tenant.clone(),
                    name: name.clone(),
                    addresses: addresses.clone(),
                },
            );
        }
    }
    all.into_values().collect()
}

/// Returns the identities on each node as entitlements for key servers, sorted by node. Only for a
/// tenant with keys in key servers.
pub(crate) fn entitlements(
    tenant: &Tenant,
    workloads: &[Workload],
    report: &mut DiagnosticCollector,
) -> Vec<Entitlement> {
    if tenant.keys.location != KeyLocation::KeyServer {
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
        // No pod may have the identity of the gateway, whatever its service account is called.
        if identity != gateway {
            nodes.entry(&workload.node).or_default().insert(identity);
        }
    }
    let mut all = Vec::new();
    for (node, mut identities) in nodes {
        if identities.len() > IDENTITIES_MAX {
            let problem = format!(
                "node {node} runs {} identities, more than {IDENTITIES_MAX}; key servers refuse the rest",
                identities.len()
            );
            report.general(
                Code::LimitExceeded,
                problem,
                "spread the pods over more nodes, or share service accounts",
            );
            identities = identities.into_iter().take(IDENTITIES_MAX).collect();
        }
        let identities = identities.into_iter().collect();
        all.push(Entitlement {
            tenant: tenant.name.clone(),
            requester: KeyRequester::Node(node.clone()),
            identities,
        });
    }
    all
}
