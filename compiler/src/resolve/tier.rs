//! Resolves a tenant's requests to the cloud tier: the tier's own service, and the home AZs of
//! services. The planner decides which gateways serve which services.

use std::collections::BTreeMap;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{AzName, ServiceKey};
use canal_model::policy::canal::HOME_AZ_ANNOTATION;
use canal_model::program::{Service, Tenant, UpstreamPool};
use canal_model::tier::{TIER_SERVICE, tier_service};

use super::tenant_objects::TenantObjects;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::names::hostname;
use crate::{CompileInput, has_tier_service};

/// Adds the tier's own service and returns the home AZs of services; does nothing for a tenant that
/// is not on the cloud tier.
pub(crate) fn resolve(
    input: &CompileInput<'_>,
    tenant: Option<&Tenant>,
    corpus: &TenantObjects<'_>,
    services: &mut BTreeMap<ServiceKey, Service>,
    report: &mut DiagnosticCollector,
) -> BTreeMap<ServiceKey, AzName> {
    let on_tier = tenant.filter(|tenant| !tenant.gateway_cidrs.is_empty());
    let mut of_tenant = corpus.tenants.iter().filter(|sourced| {
        tenant.is_some_and(|t| t.name.as_str() == sourced.object.metadata.name.as_str())
    });
    // Of several Tenants of this name the last counts, as in `tenant::own_object`.
    let own = of_tenant.next_back();
    if on_tier.is_some() && own.is_some_and(|own| has_tier_service(&own.object.spec)) {
        add_own(input, corpus, services, report);
    }
    let requested = own.and_then(|sourced| Some((sourced, sourced.object.spec.home_az.clone()?)));
    if let (Some((sourced, _)), None) = (&requested, on_tier) {
        let problem = "the tenant is not on the cloud tier, so its services have no home AZ";
        report.warning(
            Code::NotOnCloudTier,
            sourced.document,
            "spec.homeAz",
            problem,
            "write spec.gatewayCidrs, or remove the field",
        );
    }
    let mut homes: BTreeMap<ServiceKey, AzName> = BTreeMap::new();
    if let (Some((_, home)), Some(_)) = (requested, on_tier) {
        homes.extend(services.keys().map(|key| (key.clone(), home.clone())));
    }
    // A Service's own annotation overrides the tenant's home AZ.
    for service in &corpus.services {
        let metadata = &service.object.metadata;
        let Some(written) = metadata.annotations.get(HOME_AZ_ANNOTATION) else {
            continue;
        };
        let field = format!("metadata.annotations[{HOME_AZ_ANNOTATION:?}]");
        let key = ServiceKey {
            tenant: input.tenant.clone(),
            namespace: metadata.namespace.clone(),
            name: metadata.name.clone(),
        };
        match AzName::new(written) {
            Err(error) => report.error(
                Code::InvalidAnnotation,
                service.document,
                field,
                error.problem(),
                error.fix(),
            ),
            Ok(_) if on_tier.is_none() => {
                let problem =
                    "the tenant is not on the cloud tier, so its services have no home AZ";
                report.warning(
                    Code::NotOnCloudTier,
                    service.document,
                    field,
                    problem,
                    "remove the annotation, or request gatewayCidrs from the provider",
                );
            }
            Ok(home) if services.contains_key(&key) => drop(homes.insert(key, home)),
            // A Service that was left out has a diagnostic already.
            Ok(_) => {}
        }
    }
    homes
}

/// Adds the tier's own service for CONNECTs to pod addresses and DNS. It has no virtual address:
/// clients reach it at its gateway addresses.
fn add_own(
    input: &CompileInput<'_>,
    corpus: &TenantObjects<'_>,
    services: &mut BTreeMap<ServiceKey, Service>,
    report: &mut DiagnosticCollector,
) {
    let key = tier_service(input.tenant);
    for sourced in &corpus.services {
        let metadata = &sourced.object.metadata;
        if (metadata.namespace.as_str(), metadata.name.as_str()) == TIER_SERVICE {
            let problem = format!(
                "{}/{} is the name of the tier's own service, so this one is left out",
                key.namespace, key.name
            );
            report.error(
                Code::ReservedServiceName,
                sourced.document,
                "metadata.name",
                problem,
                "rename the Service",
            );
        }
    }
    let Some(id) = input.service_ids.get(&key).copied() else {
        report.general(
            Code::ServiceIdsExhausted,
            format!("the tier's own service {key} has no service ID, so pods cannot be dialled"),
            "remove services that are not needed",
        );
        // A tenant's Service of this name must not take its place.
        services.remove(&key);
        return;
    };
    services.insert(
        key.clone(),
        Service {
            id,
            hostname: hostname(&key),
            key,
            vips: Vec::new(),
            ports: Vec::new(),
            upstream_pool: UpstreamPool::default(),
            policy_paths: Default::default(),
        },
    );
}
