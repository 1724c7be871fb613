//! Passes an update of the southbound state to the parts of the gateway, in the order that keeps
//! each of them safe. It decides nothing about the resources.

use canal_gateway_engine::GatewayEngine;
use canal_model::program::ResourceKind;
use canal_southbound_client::{RefusedResource, ResourceState, Update, UpdateSource};
use canal_tls::TrustStore;

use crate::tier::ReplicaTasks;

/// Applies an update and returns the resources that cannot be used.
pub(crate) fn apply_update(
    trust: &TrustStore,
    engine: &GatewayEngine,
    replica: Option<&ReplicaTasks>,
    update: &Update,
    state: &ResourceState,
) -> Vec<RefusedResource> {
    // Trust is applied first and without waiting, so that a revocation takes effect even while the
    // engine is busy.
    let mut refused = canal_identity::apply_bundles(trust, state);
    // Tenants are closed before the engine applies anything, so that no new resource of a tenant
    // that is now closed is used.
    engine.close_tenants(state.closed().keys().cloned().collect());
    match update.origin {
        UpdateSource::Snapshot => {
            let all: Vec<_> = ResourceKind::ALL
                .iter()
                .flat_map(|k| state.of(*k).cloned())
                .collect();
            engine.replace(&all, update.generation);
        }
        UpdateSource::Controller => {
            engine.apply(&update.upserts, &update.removals, update.generation)
        }
    }
    // The redirector is updated after the engine, so that a session that a new table leads here
    // finds its service.
    if let Some(replica) = replica {
        refused.extend(replica.apply(update, state));
    }
    refused
}

#[cfg(test)]
mod tests {
    //! Tests of the configuration in force while one tenant's tables are being built. The order of
    //! events decides, not the clock.

    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use canal_gateway_config::testing::tenant_named;
    use canal_gateway_engine::{EngineDependencies, GatewayConfig};
    use canal_model::ids::{Generation, ServiceId};
    use canal_model::program::*;
    use canal_runtime::drain;
    use canal_runtime::metrics::Registry;
    use canal_testing::TestCa;

    use super::*;

    /// Builds a tenant whose services have 22 large regular expressions each.
    fn large() -> Vec<Arc<Resource>> {
        let name = || "alpha".parse().unwrap();
        let service = |n: u32| Service {
            key: format!("alpha/default/s{n}").parse().unwrap(),
            id: ServiceId::new(n + 1).unwrap(),
            hostname: format!("s{n}"),
            vips: vec![],
            ports: vec![],
            upstream_pool: Default::default(),
            policy_paths: Default::default(),
            load_balancers: Vec::new(),
        };
        let matching = |place: u32| HttpMatch {
            precedence: Precedence {
                class: 0,
                specificity: [0; 5],
                created: 0,
                object: String::new(),
                indexes: [place, 0],
            },
            path: PathMatch::Regex(format!("/{place}/[ab]{{3000}}")),
            method: None,
            headers: vec![],
            query: vec![],
        };
        // The repetition makes 3,000 states of 24 bytes: 22 such expressions take about half of the
        // 3 MiB that a service may have.
        let (kind, rule) = (|| "HTTPRoute".to_string(), || "0".to_string());
        let route = |n: u32| RouteRule {
            key: RouteKey {
                tenant: name(),
                kind: kind(),
                namespace: "default".parse().unwrap(),
                name: format!("s{n}").parse().unwrap(),
                rule: rule(),
            },
            parent: service(n).key,
            parent_port: None,
            consumer: None,
            hosts: vec![],
            matches: (0..22).map(matching).collect(),
            filters: None,
            attempts: None,
            faults: None,
            cors: None,
            mirrors: Vec::new(),
            // No request is sent, so the rule needs no backend.
            action: RouteAction::Split(vec![]),
        };
        // 64 services take longer to compile than the updates below need.
        let services =
            (0..64).flat_map(|n| [Resource::Service(service(n)), Resource::Route(route(n))]);
        std::iter::once(tenant_named("alpha"))
            .chain(services.map(Arc::new))
            .collect()
    }

    #[tokio::test]
    async fn revocations_are_in_force_before_one_tenants_large_tables() {
        let (registry, (_trigger, drain)) = (Registry::new(), drain::tree());
        let around = EngineDependencies {
            registry: registry.clone(),
            drain,
            identities: None,
            certificates: None,
            log: None,
            dns: None,
        };
        let config = GatewayConfig {
            replica: "gw-1".into(),
            // No traffic runs here, so one worker without a core of its own is enough.
            workers: 1,
            pin: false,
            ..GatewayConfig::default()
        };
        let engine = GatewayEngine::start(config, around).unwrap();
        let (trust, ca) = (TrustStore::new(&registry), TestCa::new("beta"));
        let mut all = large();
        let apply = |all: &[Arc<Resource>], upserts: Vec<Arc<Resource>>, generation: u64| {
            let generation = Generation(generation);
            let update = Update {
                origin: UpdateSource::Controller,
                generation,
                upserts,
                removals: vec![],
            };
            let state = ResourceState::of_resources(all.to_vec(), generation);
            assert!(apply_update(&trust, &engine, None, &update, &state).is_empty());
        };
        let started = Instant::now();
        apply(&all, all.clone(), 1);
        let first = started.elapsed();
        let seen = trust.view(&"beta".parse().unwrap());
        // The first round introduces the bundle, the second one revokes a certificate.
        // The serial number 7 is arbitrary, because no connection presents a certificate here.
        for revoked in [vec![], vec![ca.revocations(&[7])]] {
            let before = seen.current().generation();
            let bundle = ca.bundle("beta", "beta.example", false, revoked);
            all.retain(|resource| resource.kind() != ResourceKind::Bundle);
            all.push(bundle.clone());
            // The controller's generation may repeat here, since the trust store counts its own.
            apply(&all, vec![bundle], 2);
            assert_ne!(seen.current().generation(), before);
        }
        let taken = started.elapsed();
        // A revocation after the tables are built would prove nothing.
        assert_eq!(
            engine.dump(None)["tenants_building"],
            serde_json::json!(["alpha"]),
            "alpha's tables are still being built"
        );
        canal_timing::assert_time(
            "time until a first state with large tables is taken",
            first,
            // As long as a revocation may take, which would wait behind it.
            Duration::from_secs(1),
        );
        canal_timing::assert_time(
            // docs/security.md: a revoked identity has no open session one second after the order.
            "time until a revocation is in force behind large tables",
            taken,
            Duration::from_secs(1),
        );
    }
}
