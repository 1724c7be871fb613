//! Resolves Throttles: limits of a service or of the whole tenant, the tenant's own and the
//! provider's. The redirector enforces limits of sessions and packets, and the gateway enforces
//! limits of requests.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use canal_model::diagnostic_code::DiagnosticCode as Code;
use canal_model::ids::{ServiceKey, TenantName};
use canal_model::policy::ObjectKey;
use canal_model::policy::canal::{self, DefaultThrottle, ThrottleRate};
use canal_model::program::{RateLimit, Service, Tenant, Throttle};

use super::tenant_objects::Sourced;
use crate::diagnostic_collector::DiagnosticCollector;
use crate::limits::THROTTLES_PER_TENANT_MAX;

/// Returns the provider's default throttle from the Tenant object in force, which is the last one
/// with the tenant's name.
pub(crate) fn default_of(
    declared: &[Sourced<'_, canal::Tenant>],
    name: &TenantName,
) -> DefaultThrottle {
    let own = declared
        .iter()
        .rev()
        .find(|tenant| tenant.object.metadata.name.as_str() == name.as_str());
    own.map(|tenant| tenant.object.spec.default_throttle)
        .unwrap_or_default()
}

/// Returns the throttles of a tenant on the cloud tier: that of the whole tenant first, then by
/// service.
///
/// Each target has one throttle; of several the oldest is used. The provider's default limits the
/// whole tenant, and the tenant's own throttle can only lower it.
pub(crate) fn resolve(
    tenant: Option<&Tenant>,
    default: DefaultThrottle,
    declared: &[Sourced<'_, canal::Throttle>],
    services: &BTreeMap<ServiceKey, Service>,
    report: &mut DiagnosticCollector,
) -> Vec<Throttle> {
    // Without a valid Tenant object, which is reported elsewhere, the tenant gets no resources.
    let Some(tenant) = tenant else {
        return Vec::new();
    };
    if tenant.gateway_cidrs.is_empty() {
        // An error, because a limit that its author relies on is not in force.
        for throttle in declared {
            let problem = "the tenant is not on the cloud tier, so nothing is throttled";
            report.error(
                Code::NotOnCloudTier,
                throttle.document,
                "",
                problem,
                "remove it, or request gatewayCidrs from the provider",
            );
        }
        return Vec::new();
    }
    if let Some(first) = declared.get(THROTTLES_PER_TENANT_MAX) {
        let problem = format!(
            "the tenant has {} throttles, more than {THROTTLES_PER_TENANT_MAX}; from this one on they are left out",
            declared.len()
        );
        report.refuse_excess(first.document, "", problem, "remove throttles");
    }
    let mut throttles: BTreeMap<Option<ServiceKey>, (ObjectKey, Throttle)> = BTreeMap::new();
    for object in declared.iter().take(THROTTLES_PER_TENANT_MAX) {
        let Some(throttle) = read(tenant, object, services, report) else {
            continue;
        };
        // The objects are sorted by age, so the one already found is older.
        if let Some((older, _)) = throttles.get(&throttle.service) {
            let problem = format!("{older} already limits the same target; that one is used");
            report.error(
                Code::TargetConflict,
                object.document,
                "spec.targetRef",
                problem,
                "remove one of them",
            );
            continue;
        }
        throttles.insert(
            throttle.service.clone(),
            (object.document.object.key(), throttle),
        );
    }
    let mut throttles: Vec<_> = throttles
        .into_values()
        .map(|(_, throttle)| throttle)
        .collect();
    apply_default(tenant, default, &mut throttles);
    throttles
}

/// Lowers the throttle of the whole tenant to the provider's default, or adds the default if there
/// is none.
fn apply_default(tenant: &Tenant, default: DefaultThrottle, throttles: &mut Vec<Throttle>) {
    if default == DefaultThrottle::default() {
        return;
    }
    let given = Throttle {
        tenant: tenant.name.clone(),
        vni: tenant.vni,
        service: None,
        id: None,
        sessions: rate(default.sessions),
        packets: rate(default.packets),
        requests: rate(default.requests),
    };
    match throttles.first_mut().filter(|own| own.service.is_none()) {
        Some(own) => {
            own.sessions = lower(own.sessions, given.sessions);
            own.packets = lower(own.packets, given.packets);
            own.requests = lower(own.requests, given.requests);
        }
        None => throttles.insert(0, given),
    }
}

/// Returns the lower of two limits, where 0 means no limit.
fn lower(own: RateLimit, given: RateLimit) -> RateLimit {
    match (own.per_second, given.per_second) {
        (0, _) => given,
        (_, 0) => own,
        _ => RateLimit {
            per_second: own.per_second.min(given.per_second),
            burst: own.burst.min(given.burst),
        },
    }
}

fn read(
    tenant: &Tenant,
    sourced: &Sourced<'_, canal::Throttle>,
    services: &BTreeMap<ServiceKey, Service>,
    report: &mut DiagnosticCollector,
) -> Option<Throttle> {
    // If the target cannot be parsed, the limit meant for one service must not become the tenant's.
    if sourced.fault("spec.targetRef").is_some() {
        return None;
    }
    let service = target(tenant, sourced, services, report)?;
    let spec = &sourced.object.spec;
    if spec.sessions.is_none() && spec.packets.is_none() && spec.requests.is_none() {
        if sourced.fault("spec").is_none() {
            report.error(
                Code::EmptyThrottle,
                sourced.document,
                "spec",
                "the Throttle limits nothing",
                "write sessions, packets or requests, each with perSecond",
            );
        }
        return None;
    }
    Some(Throttle {
        tenant: tenant.name.clone(),
        vni: tenant.vni,
        id: service.map(|service| service.id),
        service: service.map(|service| service.key.clone()),
        sessions: rate(spec.sessions),
        packets: rate(spec.packets),
        requests: rate(spec.requests),
    })
}

/// Resolves the target. `None` means that the target is broken, `Some(None)` the whole tenant.
fn target<'s>(
    tenant: &Tenant,
    sourced: &Sourced<'_, canal::Throttle>,
    services: &'s BTreeMap<ServiceKey, Service>,
    report: &mut DiagnosticCollector,
) -> Option<Option<&'s Service>> {
    let canal::Throttle { metadata, spec } = sourced.object;
    let Some(target) = &spec.target_ref else {
        return Some(None);
    };
    // Services are in Kubernetes' core group, whose name is empty.
    if !target.group.is_empty() || target.kind != "Service" {
        let problem = format!(
            "a {:?} of group {:?} cannot be throttled",
            target.kind, target.group
        );
        report.error(
            Code::UnsupportedTarget,
            sourced.document,
            "spec.targetRef.kind",
            problem,
            "write kind: Service, or remove targetRef to limit the whole tenant",
        );
        return None;
    }
    let key = ServiceKey {
        tenant: tenant.name.clone(),
        namespace: metadata.namespace.clone(),
        name: target.name.clone(),
    };
    let found = services.get(&key);
    if found.is_none() {
        let problem = format!("there is no Service {}/{}", key.namespace, key.name);
        report.error(
            Code::UnresolvedTarget,
            sourced.document,
            "spec.targetRef.name",
            problem,
            "create it, correct the name, or move the Throttle into its namespace",
        );
    }
    found.map(Some)
}

fn rate(written: Option<ThrottleRate>) -> RateLimit {
    written.map_or_else(RateLimit::default, |rate| RateLimit {
        per_second: rate.per_second.get(),
        burst: rate.burst.map_or(rate.per_second.get(), NonZeroU32::get),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_own_limit_is_at_most_the_providers() {
        let rate = |per_second, burst| RateLimit { per_second, burst };
        for (own, given, want) in [
            (rate(0, 0), rate(100, 200), rate(100, 200)),
            (rate(50, 10), rate(100, 200), rate(50, 10)),
            (rate(500, 500), rate(100, 200), rate(100, 200)),
            (rate(50, 500), rate(100, 200), rate(50, 200)),
            (rate(50, 10), rate(0, 0), rate(50, 10)),
        ] {
            assert_eq!(lower(own, given), want, "{own:?} {given:?}");
        }
    }
}
