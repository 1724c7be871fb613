//! A subscriber, what it told its caller, and resources to tell it of.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use canal_model::authorization as a;
use canal_model::program::{Kind, OutsideMesh, Resource, Service, Tenant};
use canal_wire::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource as Envelope};
use canal_wire::southbound::{encode, manifest, type_url};
use tempfile::TempDir;

use crate::drain::{self, Trigger};
use crate::metrics::Registry;
use crate::southbound::session::Timing;
use crate::southbound::{Apply, Origin, RefusedResource, Subscriber, SubscriberConfig};
use crate::testing::FakeController;

pub(super) fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// A tenant whose content differs with `vni`.
pub(super) fn tenant(name: &str, vni: u32) -> Resource {
    Resource::Tenant(Tenant {
        name: name.parse().unwrap(),
        vni: canal_model::ids::Vni::new(vni).unwrap(),
        trust_domain: format!("{name}.example").parse().unwrap(),
        pod_cidrs: vec!["10.1.0.0/16".parse().unwrap()],
        gateway_cidrs: vec![],
        outside: OutsideMesh::Deny,
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
    })
}

/// Kinds of a subscriber that closes tenants.
pub(super) const SEALED: [Kind; 4] = [Kind::Tenant, Kind::Service, Kind::Authorization, Kind::Manifest];

/// A policy that denies everything.
pub(super) fn policy(tenant: &str, name: &str) -> Resource {
    Resource::Authorization(a::Authorization {
        key: a::PolicyKey { tenant: tenant.parse().unwrap(), namespace: "shop".parse().unwrap(), name: name.parse().unwrap() },
        target: a::PolicyTarget::Tenant,
        action: a::Action::Deny,
        rules: vec![a::Rule::default()],
        dry_run: false,
        broken: None,
    })
}

/// The manifest of resources that came with these generations.
pub(super) fn seal(tenant: &str, resources: &[(&Resource, u64)]) -> Resource {
    let all: Vec<_> = resources.iter().map(|(r, generation)| (r.kind(), r.name(), format!("v{generation}"))).collect();
    let all = all.iter().map(|(kind, name, version)| (*kind, name.as_str(), version.as_str()));
    Resource::Manifest(manifest::compute(&tenant.parse().unwrap(), all))
}

/// A response; versions are `v<generation>`.
pub(super) fn response(generation: u64, kind: Kind, put: &[Resource], remove: &[&str]) -> DeltaDiscoveryResponse {
    let envelope = |r: &Resource| Envelope {
        name: r.name(),
        version: format!("v{generation}"),
        resource: Some(prost_types::Any { type_url: type_url(kind).into(), value: encode(r) }),
    };
    DeltaDiscoveryResponse {
        system_version_info: generation.to_string(),
        type_url: type_url(kind).into(),
        resources: put.iter().map(envelope).collect(),
        removed_resources: remove.iter().map(ToString::to_string).collect(),
        nonce: format!("n{generation}"),
        control_plane: None,
    }
}

/// What the caller was told: origin, generation, names put, names removed, and how many tenants and services it then saw.
pub(super) type Told = (Origin, u64, Vec<String>, Vec<String>, (usize, usize));

pub(super) struct Rig {
    pub(super) folder: TempDir,
    pub(super) registry: Registry,
    pub(super) told: Arc<Mutex<Vec<Told>>>,
    /// The caller refuses while it is set.
    pub(super) refuse: Arc<AtomicBool>,
    /// Resources of these names the caller cannot use.
    pub(super) unusable: Arc<Mutex<BTreeSet<String>>>,
    /// Resources of these names the caller has no room for.
    pub(super) no_room: Arc<Mutex<BTreeSet<String>>>,
    /// Tenants that were closed when the caller was told last.
    pub(super) closed: Arc<Mutex<Vec<String>>>,
    pub(super) trigger: Trigger,
    drain: drain::Drain,
}

impl Rig {
    pub(super) fn new() -> Self {
        let (trigger, drain) = drain::tree();
        let (registry, folder) = (Registry::new(), tempfile::tempdir().unwrap());
        Self {
            folder,
            registry,
            told: Arc::default(),
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

    /// A subscriber of tenants and services that reaches the controller at `address`.
    pub(super) fn start_through(&self, controller: &FakeController, address: SocketAddr) -> Subscriber {
        self.start_with(controller, address, &[Kind::Tenant, Kind::Service])
    }

    /// A subscriber that is told of policies too, and closes tenants.
    pub(super) fn start_sealed(&self, controller: &FakeController) -> Subscriber {
        self.start_with(controller, controller.address, &SEALED)
    }

    pub(super) fn start_with(&self, controller: &FakeController, address: SocketAddr, kinds: &[Kind]) -> Subscriber {
        let config = SubscriberConfig {
            controller: controller.reached_through(self.folder.path(), address),
            node: "node~n1".into(),
            version: "1.0".into(),
            kinds: kinds.to_vec(),
            snapshot: self.snapshot(),
        };
        let timing =
            Timing { keepalive: (ms(100), ms(200)), first_answer: ms(2000), backoff: (ms(5), ms(50)), write: ms(200), shares: ms(50) };
        Subscriber::start_with(config, &self.registry, self.drain.clone(), self.apply(), timing)
    }

    /// Lets go of the own end of the drain, so that only the subscriber holds it.
    pub(super) fn only_subscriber(self) -> (TempDir, Trigger) {
        (self.folder, self.trigger)
    }

    pub(super) fn snapshot(&self) -> std::path::PathBuf {
        self.folder.path().join("data/snapshot")
    }

    fn apply(&self) -> Apply {
        let (told, refuse) = (self.told.clone(), self.refuse.clone());
        let (unusable, no_room, closed) = (self.unusable.clone(), self.no_room.clone(), self.closed.clone());
        Box::new(move |update, state| {
            if refuse.load(Relaxed) {
                return Err("the caller does not like it".into());
            }
            let names: Vec<_> = update.upserts.iter().map(|r| r.name()).collect();
            assert!(!names.iter().any(|n| n == "panic"), "tripped by {names:?}");
            let counts = (state.count(Kind::Tenant), state.count(Kind::Service));
            let removals = update.removals.iter().map(|(_, n)| n.clone()).collect();
            assert_eq!(update.generation, state.generation());
            *closed.lock().unwrap() = state.closed().keys().map(ToString::to_string).collect();
            told.lock().unwrap().push((update.origin, update.generation.0, names, removals, counts));
            let unusable = unusable.lock().unwrap();
            let no_room = no_room.lock().unwrap();
            let all = || Kind::ALL.iter().flat_map(|kind| state.of(*kind));
            let refused = all().filter(|r| unusable.contains(&r.name()));
            let refused = refused.map(|r| RefusedResource::by_caller(r.kind(), r.name(), "cannot be used"));
            let omitted = all().filter(|r| no_room.contains(&r.name()));
            Ok(refused.chain(omitted.map(|r| RefusedResource::for_want_of_room(r.kind(), r.name(), "is full"))).collect())
        })
    }

    pub(super) fn told(&self) -> Vec<Told> {
        std::mem::take(&mut *self.told.lock().unwrap())
    }

    pub(super) fn metric(&self, start: &str) -> u64 {
        let text = self.registry.render();
        let line = text.lines().find(|l| l.starts_with(start));
        line.and_then(|l| l.rsplit(' ').next()).map_or(0, |v| v.parse().unwrap())
    }
}

/// The resources that a nack names.
pub(super) fn refused(nack: &DeltaDiscoveryRequest) -> Vec<String> {
    let named = nack.error_detail.as_ref().map(canal_wire::southbound::refused::unpack).unwrap_or_default();
    named.into_iter().map(|(name, _)| name).collect()
}

pub(super) async fn until(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..500 {
        if holds() {
            return;
        }
        tokio::time::sleep(ms(10)).await;
    }
    panic!("never: {what}");
}
