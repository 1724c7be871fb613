//! Fixture of a subscriber: the updates that its callback received, and resources to send to it.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use canal_model::authorization as a;
use canal_model::program::{OutboundTrafficPolicy, Resource, ResourceKind, Service, Tenant};
use canal_runtime::drain::{self, DrainTrigger};
use canal_runtime::metrics::Registry;
use canal_testing::FakeController;
use canal_wire::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource as Envelope};
use canal_wire::southbound::{encode, manifest};
use tempfile::TempDir;

use crate::controller_client::ControllerEndpoint;
use crate::session::StreamTiming;
use crate::{ApplyFn, RefusedResource, Subscriber, SubscriberConfig, UpdateSource};

/// Least time between two writes of the state file. A fifth of the default, so that tests need not
/// wait for a second.
pub(super) const WRITE_INTERVAL: Duration = Duration::from_millis(200);

pub(super) fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Returns a tenant whose content depends on `vni`.
pub(super) fn tenant(name: &str, vni: u32) -> Resource {
    Resource::Tenant(Tenant {
        name: name.parse().unwrap(),
        vni: canal_model::ids::Vni::new(vni).unwrap(),
        trust_domain: format!("{name}.example").parse().unwrap(),
        pod_cidrs: vec!["10.1.0.0/16".parse().unwrap()],
        gateway_cidrs: vec![],
        outbound_traffic_policy: OutboundTrafficPolicy::Deny,
        resolvers: Vec::new(),
        keys: Default::default(),
        shares: Default::default(),
    })
}

pub(super) fn service(name: &str, id: u32) -> Resource {
    Resource::Service(Service {
        key: format!("alpha/shop/{name}").parse().unwrap(),
        id: canal_model::ids::ServiceId::new(id).unwrap(),
        hostname: format!("{name}.shop.svc.cluster.local"),
        vips: vec!["10.96.0.1".parse().unwrap()],
        ports: Vec::new(),
        upstream_pool: Default::default(),
        policy_paths: Default::default(),
        load_balancers: Vec::new(),
    })
}

/// Kinds of a subscriber that closes tenants.
pub(super) const SEALED: [ResourceKind; 4] = [
    ResourceKind::Tenant,
    ResourceKind::Service,
    ResourceKind::Authorization,
    ResourceKind::Manifest,
];

/// Returns a policy that denies everything.
pub(super) fn policy(tenant: &str, name: &str) -> Resource {
    Resource::Authorization(a::Authorization {
        key: a::PolicyKey {
            tenant: tenant.parse().unwrap(),
            namespace: "shop".parse().unwrap(),
            name: name.parse().unwrap(),
        },
        target: a::PolicyTarget::Tenant,
        action: a::AuthorizationAction::Deny,
        rules: vec![a::PolicyRule::default()],
        dry_run: false,
        broken: None,
    })
}

/// Returns the manifest of resources that arrived with these generations.
pub(super) fn seal(tenant: &str, resources: &[(&Resource, u64)]) -> Resource {
    let all: Vec<_> = resources
        .iter()
        .map(|(r, generation)| (r.kind(), r.name(), format!("v{generation}")))
        .collect();
    let all = all
        .iter()
        .map(|(kind, name, version)| (*kind, name.as_str(), version.as_str()));
    Resource::Manifest(manifest::compute(&tenant.parse().unwrap(), all))
}

/// Returns a response whose versions are `v<generation>`.
pub(super) fn response(
    generation: u64,
    kind: ResourceKind,
    put: &[Resource],
    remove: &[&str],
) -> DeltaDiscoveryResponse {
    let envelope = |r: &Resource| Envelope {
        name: r.name(),
        version: format!("v{generation}"),
        resource: Some(prost_types::Any {
            type_url: kind.type_url().into(),
            value: encode(r),
        }),
    };
    DeltaDiscoveryResponse {
        system_version_info: generation.to_string(),
        type_url: kind.type_url().into(),
        resources: put.iter().map(envelope).collect(),
        removed_resources: remove.iter().map(ToString::to_string).collect(),
        nonce: format!("n{generation}"),
        ..DeltaDiscoveryResponse::default()
    }
}

/// An update as the callback received it: origin, generation, names put, names removed, and the
/// number of tenants and services in the state.
pub(super) type ReceivedUpdate = (UpdateSource, u64, Vec<String>, Vec<String>, (usize, usize));

pub(super) struct SubscriptionFixture {
    pub(super) folder: TempDir,
    pub(super) registry: Registry,
    pub(super) updates: Arc<Mutex<Vec<ReceivedUpdate>>>,
    /// If true, the callback refuses everything.
    pub(super) refuse: Arc<AtomicBool>,
    /// Names of resources that the callback cannot use.
    pub(super) unusable: Arc<Mutex<BTreeSet<String>>>,
    /// Names of resources that do not fit.
    pub(super) no_room: Arc<Mutex<BTreeSet<String>>>,
    /// Tenants that were closed at the last call.
    pub(super) closed: Arc<Mutex<Vec<String>>>,
    pub(super) trigger: DrainTrigger,
    drain: drain::DrainWatcher,
}

impl SubscriptionFixture {
    pub(super) fn new() -> Self {
        let (trigger, drain) = drain::tree();
        let (registry, folder) = (Registry::new(), tempfile::tempdir().unwrap());
        Self {
            folder,
            registry,
            updates: Arc::default(),
            refuse: Arc::default(),
            unusable: Arc::default(),
            no_room: Arc::default(),
            closed: Arc::default(),
            trigger,
            drain,
        }
    }

    pub(super) fn start(&self, controller: &FakeController) -> Subscriber {
        self.start_through(controller, controller.address)
    }

    /// Starts a subscriber of tenants and services that reaches the controller at `address`.
    pub(super) fn start_through(
        &self,
        controller: &FakeController,
        address: SocketAddr,
    ) -> Subscriber {
        self.start_with(
            controller,
            address,
            &[ResourceKind::Tenant, ResourceKind::Service],
        )
    }

    /// Starts a subscriber that also subscribes to policies and manifests, and so closes tenants.
    pub(super) fn start_sealed(&self, controller: &FakeController) -> Subscriber {
        self.start_with(controller, controller.address, &SEALED)
    }

    pub(super) fn start_with(
        &self,
        controller: &FakeController,
        address: SocketAddr,
        kinds: &[ResourceKind],
    ) -> Subscriber {
        // The fake's crate names another copy of the type, that of the library without its tests.
        let reached = controller.reached_through(self.folder.path(), address);
        let config = SubscriberConfig {
            controller: ControllerEndpoint {
                addresses: reached.addresses,
                root: reached.root,
                token: reached.token,
            },
            node: "node~n1".into(),
            version: "1.0".into(),
            kinds: kinds.to_vec(),
            snapshot: self.snapshot(),
        };
        let timing = StreamTiming {
            keepalive: (
                ms(100) * canal_timing::slack(),
                ms(200) * canal_timing::slack(),
            ),
            first_answer: ms(2000) * canal_timing::slack(),
            backoff: (ms(5), ms(50)),
            write: WRITE_INTERVAL,
            shares: ms(50),
        };
        Subscriber::start_with(
            config,
            &self.registry,
            self.drain.clone(),
            self.apply(),
            timing,
        )
    }

    /// Drops the fixture's watcher of the drain, so that only the subscriber's is left.
    pub(super) fn only_subscriber(self) -> (TempDir, DrainTrigger) {
        (self.folder, self.trigger)
    }

    pub(super) fn snapshot(&self) -> std::path::PathBuf {
        self.folder.path().join("data/snapshot")
    }

    fn apply(&self) -> ApplyFn {
        let (updates, refuse) = (self.updates.clone(), self.refuse.clone());
        let (unusable, no_room, closed) = (
            self.unusable.clone(),
            self.no_room.clone(),
            self.closed.clone(),
        );
        Box::new(move |update, state| {
            if refuse.load(Relaxed) {
                return Err("the caller does not like it".into());
            }
            let names: Vec<_> = update.upserts.iter().map(|r| r.name()).collect();
            // A resource with this name stands for one that makes a data plane panic.
            assert!(!names.iter().any(|n| n == "panic"), "tripped by {names:?}");
            let counts = (
                state.count(ResourceKind::Tenant),
                state.count(ResourceKind::Service),
            );
            let removals = update.removals.iter().map(|(_, n)| n.clone()).collect();
            assert_eq!(update.generation, state.generation());
            *closed.lock().unwrap() = state.closed().keys().map(ToString::to_string).collect();
            updates.lock().unwrap().push((
                update.origin,
                update.generation.0,
                names,
                removals,
                counts,
            ));
            let unusable = unusable.lock().unwrap();
            let no_room = no_room.lock().unwrap();
            let all = || ResourceKind::ALL.iter().flat_map(|kind| state.of(*kind));
            let refused = all().filter(|r| unusable.contains(&r.name()));
            let refused =
                refused.map(|r| RefusedResource::by_caller(r.kind(), r.name(), "cannot be used"));
            let omitted = all().filter(|r| no_room.contains(&r.name()));
            Ok(refused
                .chain(
                    omitted
                        .map(|r| RefusedResource::for_want_of_room(r.kind(), r.name(), "is full")),
                )
                .collect())
        })
    }

    pub(super) fn updates(&self) -> Vec<ReceivedUpdate> {
        std::mem::take(&mut *self.updates.lock().unwrap())
    }

    pub(super) fn metric(&self, start: &str) -> u64 {
        let text = self.registry.render();
        let line = text.lines().find(|l| l.starts_with(start));
        line.and_then(|l| l.rsplit(' ').next())
            .map_or(0, |v| v.parse().unwrap())
    }
}

/// Returns the names of the resources that a NACK names.
pub(super) fn refused(nack: &DeltaDiscoveryRequest) -> Vec<String> {
    let named = nack
        .error_detail
        .as_ref()
        .map(canal_wire::southbound::refused::unpack)
        .unwrap_or_default();
    named.into_iter().map(|(name, _)| name).collect()
}

pub(super) async fn until(what: &str, holds: impl Fn() -> bool) {
    let started = std::time::Instant::now();
    while !holds() {
        let waited = started.elapsed();
        assert!(waited < canal_timing::deadline(ms(5000)), "never: {what}");
        tokio::time::sleep(ms(10)).await;
    }
}
