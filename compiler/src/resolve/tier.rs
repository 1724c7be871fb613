//! What a tenant and its services ask of the cloud tier: the tier's own service, and where services want to live. Which gateways serve
//! whom is the planner's.

use std::collections::BTreeMap;

use canal_model::ids::{AzName, ServiceKey};
use canal_model::policy::mesh::HOME_AZ_ANNOTATION;
use canal_model::program::{Service, Tenant};
use canal_model::tier::{TIER_SERVICE, tier_service};

use super::corpus::Corpus;
use crate::Input;
use crate::names::hostname;
use crate::report::Report;

/// Adds the tier's own service, and says where services want to live; nothing for a tenant that is not on the cloud tier.
pub(crate) fn resolve(
    input: &Input<'_>,
    tenant: Option<&Tenant>,
    corpus: &Corpus<'_>,
    services: &mut BTreeMap<ServiceKey, Service>,
    report: &mut Report,
) -> BTreeMap<ServiceKey, AzName> {
    let on_tier = tenant.filter(|tenant| !tenant.gateway_cidrs.is_empty());
    if on_tier.is_some() {
        add_own(input, corpus, services, report);
    }
    let of_tenant = corpus.tenants.iter().filter(|said| tenant.is_some_and(|t| t.name.as_str() == said.object.metadata.name.as_str()));
    let asked = of_tenant.clone().next().and_then(|said| Some((said, said.object.spec.home_az.clone()?)));
    if let (Some((said, _)), None) = (&asked, on_tier) {
        let problem = "the tenant is not on the cloud tier, so its services live in no AZ";
        report.warning(said.document, "spec.homeAz", problem, "write spec.gatewayCidrs, or remove the field");
    }
    let mut homes: BTreeMap<ServiceKey, AzName> = BTreeMap::new();
    if let (Some((_, home)), Some(_)) = (asked, on_tier) {
        homes.extend(services.keys().map(|key| (key.clone(), home.clone())));
    }
    for service in &corpus.services {
        let metadata = &service.object.metadata;
        let Some(written) = metadata.annotations.get(HOME_AZ_ANNOTATION) else { continue };
        let field = format!("metadata.annotations[{HOME_AZ_ANNOTATION:?}]");
        let key = ServiceKey { tenant: input.tenant.clone(), namespace: metadata.namespace.clone(), name: metadata.name.clone() };
        match AzName::new(written) {
            Err(error) => report.error(service.document, field, error.to_string(), "write the name of an AZ"),
            Ok(_) if on_tier.is_none() => {
                let problem = "the tenant is not on the cloud tier, so its services live in no AZ";
                report.warning(service.document, field, problem, "remove the annotation, or ask the provider for gatewayCidrs");
            }
            Ok(home) if services.contains_key(&key) => drop(homes.insert(key, home)),
            Ok(_) => {}
        }
    }
    homes
}

/// The tier's own service: CONNECTs to pod addresses, and DNS. It has no virtual address: clients reach it at its gateway addresses.
fn add_own(input: &Input<'_>, corpus: &Corpus<'_>, services: &mut BTreeMap<ServiceKey, Service>, report: &mut Report) {
    let key = tier_service(input.tenant);
    for said in &corpus.services {
        let metadata = &said.object.metadata;
        if (metadata.namespace.as_str(), metadata.name.as_str()) == TIER_SERVICE {
            let problem = format!("{}/{} is the name of the tier's own service", key.namespace, key.name);
            report.error(said.document, "metadata.name", problem, "rename the Service; this one is left out");
        }
    }
    let Some(id) = input.service_ids.get(&key).copied() else {
        report.general(
            format!("the tier's own service {key} has no service ID, so pods cannot be dialled"),
            "remove services that are not needed",
        );
        services.remove(&key);
        return;
    };
    services.insert(key.clone(), Service { id, hostname: hostname(&key), key, vips: Vec::new(), ports: Vec::new() });
}
