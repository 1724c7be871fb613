//! Tests of the order in which tenants' changes are in force. The test pauses a build between two
//! of its steps; nothing measures time.

use canal_model::authorization::*;
use canal_model::ids::{ServiceId, ServiceKey};
use canal_model::load_balancing::{
    ConsistentHash, HashKey, HashTableKind, LoadBalancer, PortLoadBalancer,
};
use canal_model::program::*;

use super::*;
use crate::testing::{self, first_precedence, tenant_named as tenant};

/// Limit of bytes for a build without waiting: no table fits, so each change with routes waits.
const NOTHING: usize = 0;

fn key(tenant: &str, service: &str) -> ServiceKey {
    format!("{tenant}/ns/{service}").parse().unwrap()
}

fn service(tenant: &str, name: &str) -> Arc<Resource> {
    Arc::new(Resource::Service(Service {
        key: key(tenant, name),
        id: ServiceId::new(1).unwrap(),
        hostname: format!("{name}.ns"),
        vips: vec![],
        ports: vec![ServicePort {
            port: 80,
            name: String::new(),
            protocol: AppProtocol::Http1,
        }],
        upstream_pool: Default::default(),
        policy_paths: Default::default(),
        load_balancers: Vec::new(),
    }))
}

/// Builds the route of a service, which has the service's name.
fn route(tenant: &str, service: &str, path: &str) -> Arc<Resource> {
    let matched = (first_precedence(), PathMatch::Regex(path.into()));
    let action = RouteAction::Split(vec![]);
    let rule = testing::route(key(tenant, service), service, matched, action);
    Arc::new(Resource::Route(rule))
}

fn policy(tenant: &str, name: &str, target: PolicyTarget) -> Arc<Resource> {
    let key = PolicyKey {
        tenant: tenant.parse().unwrap(),
        namespace: "ns".parse().unwrap(),
        name: name.parse().unwrap(),
    };
    let action = AuthorizationAction::Deny;
    Arc::new(Resource::Authorization(Authorization {
        key,
        target,
        action,
        rules: vec![],
        dry_run: false,
        broken: None,
    }))
}

fn deny(tenant: &str, name: &str) -> Arc<Resource> {
    policy(tenant, name, PolicyTarget::Tenant)
}

fn names(list: &[&str]) -> BTreeSet<TenantName> {
    list.iter().map(|name| name.parse().unwrap()).collect()
}

/// Builds with the tenants alpha and beta, each with the services `a`, `b` and `c`.
struct BuildsFixture {
    builds: TenantBuilds,
    generation: u64,
}

impl BuildsFixture {
    fn empty() -> Self {
        Self {
            builds: TenantBuilds::new(SnapshotBuilder::new("gw", None, None)),
            generation: 0,
        }
    }

    fn new() -> Self {
        let mut fixture = Self::empty();
        let of = |name: &str| {
            [
                tenant(name),
                service(name, "a"),
                service(name, "b"),
                service(name, "c"),
            ]
        };
        fixture.apply(&[of("alpha"), of("beta")].concat());
        fixture
    }

    fn change(
        &mut self,
        upserts: &[Arc<Resource>],
        removals: &[(ResourceKind, &str)],
        bytes_max: usize,
    ) -> Arc<Snapshot> {
        self.generation += 1;
        let removals: Vec<_> = removals
            .iter()
            .map(|(kind, name)| (*kind, name.to_string()))
            .collect();
        self.builds
            .apply(upserts, &removals, Generation(self.generation), bytes_max)
    }

    fn apply(&mut self, upserts: &[Arc<Resource>]) -> Arc<Snapshot> {
        self.change(upserts, &[], NOTHING)
    }

    /// Runs one step, and returns its tenant and the snapshot that it completes.
    fn step(&mut self) -> Option<(String, Option<Arc<Snapshot>>)> {
        let step = self.builds.next_step()?;
        let tenant = step.tenant().to_string();
        Some((tenant, self.builds.finish(step.run())))
    }

    /// Runs all steps; returns the tenants in the order in which their tables were in force, and
    /// the last snapshot.
    fn finish(&mut self) -> (Vec<String>, Option<Arc<Snapshot>>) {
        let (mut order, mut last) = (Vec::new(), None);
        while let Some((tenant, snapshot)) = self.step() {
            if let Some(snapshot) = snapshot {
                order.push(tenant);
                last = Some(snapshot);
            }
        }
        (order, last)
    }

    fn waiting(&self) -> Vec<String> {
        self.builds.waiting().map(ToString::to_string).collect()
    }
}

/// Returns the services of a tenant that have routes.
fn routed(snapshot: &Snapshot, tenant: &str) -> Vec<String> {
    let mut list: Vec<String> = snapshot
        .tenant(tenant)
        .map(|t| {
            t.services()
                .filter(|s| s.routes.is_some())
                .map(|s| s.names.key.name.to_string())
                .collect()
        })
        .unwrap_or_default();
    list.sort();
    list
}

fn policies(snapshot: &Snapshot, tenant: &str) -> Vec<String> {
    snapshot
        .tenant(tenant)
        .map(|t| t.policies.list())
        .unwrap_or_default()
}

fn is_closed(snapshot: &Snapshot, tenant: &str) -> bool {
    snapshot.tenant(tenant).is_some_and(|t| t.closed)
}

fn large(tenant: &str) -> [Arc<Resource>; 3] {
    ["a", "b", "c"].map(|service| route(tenant, service, "/[ab]{30}"))
}

#[test]
fn others_changes_are_in_force_between_the_steps_of_a_large_one() {
    let mut fixture = BuildsFixture::new();
    let held = fixture.apply(&large("alpha"));
    assert_eq!(
        (routed(&held, "alpha"), fixture.waiting()),
        (vec![], vec!["alpha".to_string()])
    );
    for n in 0..2 {
        assert!(
            fixture.step().unwrap().1.is_none(),
            "alpha's tables are published whole"
        );
        let next = fixture.apply(&[deny("beta", &format!("deny-{n}"))]);
        assert_eq!(
            policies(&next, "beta").len(),
            n + 1,
            "in force between two steps"
        );
        assert_eq!(
            (routed(&next, "alpha"), next.generation),
            (vec![], Generation(fixture.generation))
        );
    }
    let (tenant, whole) = fixture.step().unwrap();
    assert_eq!(
        (tenant.as_str(), routed(&whole.unwrap(), "alpha").join("")),
        ("alpha", "abc".to_string())
    );
    assert!(fixture.step().is_none() && fixture.waiting().is_empty());
}

#[test]
fn a_change_that_arrives_during_a_step_is_in_force_before_its_end() {
    let mut fixture = BuildsFixture::new();
    fixture.apply(&large("alpha"));
    let running = fixture.builds.next_step().unwrap();
    let meanwhile = fixture.change(
        &[deny("beta", "deny")],
        &[(ResourceKind::Service, "beta/ns/a")],
        NOTHING,
    );
    assert_eq!(policies(&meanwhile, "beta").len(), 1);
    assert!(
        meanwhile
            .tenant("beta")
            .unwrap()
            .service(&key("beta", "a"))
            .is_none()
    );
    assert!(fixture.builds.finish(running.run()).is_none());
    assert_eq!(fixture.finish().0, ["alpha"]);
}

#[test]
fn fitting_routes_apply_at_once_and_those_with_fewest_regexes_first() {
    let mut fixture = BuildsFixture::new();
    let both = [large("alpha").to_vec(), vec![route("beta", "a", "/b")]].concat();
    let next = fixture.change(&both, &[], 1);
    assert_eq!(
        (routed(&next, "beta"), routed(&next, "alpha")),
        (vec!["a".to_string()], vec![])
    );
    assert_eq!(fixture.finish().0, ["alpha"]);
    let next = fixture.change(
        &[route("alpha", "a", "/x"), route("beta", "a", "/x")],
        &[],
        usize::MAX,
    );
    assert_eq!(
        (next.generation, fixture.waiting().len()),
        (Generation(3), 0)
    );
}

#[test]
fn a_tenants_policies_do_not_wait_for_its_own_tables_and_its_traffic_keeps_its_order() {
    let mut fixture = BuildsFixture::new();
    fixture.apply(&large("alpha"));
    let next = fixture.apply(&[deny("alpha", "deny"), service("alpha", "d")]);
    let has_d = |snapshot: &Snapshot| {
        snapshot
            .tenant("alpha")
            .unwrap()
            .service(&key("alpha", "d"))
            .is_some()
    };
    assert_eq!((policies(&next, "alpha").len(), has_d(&next)), (1, false));
    // The newest change of a resource counts, also if it is a removal.
    fixture.change(
        &[route("alpha", "d", "/d")],
        &[(ResourceKind::Route, "alpha/HTTPRoute/ns/a/0")],
        NOTHING,
    );
    let whole = (0..3)
        .filter_map(|_| fixture.step().unwrap().1)
        .next_back()
        .unwrap();
    assert_eq!(
        (routed(&whole, "alpha").join(""), has_d(&whole)),
        ("abc".to_string(), false),
        "the first change, and nothing of the next"
    );
    let (order, last) = fixture.finish();
    assert_eq!(
        (order, routed(&last.unwrap(), "alpha").join("")),
        (vec!["alpha".to_string()], "bcd".to_string())
    );
}

#[test]
fn a_new_tenant_appears_whole_and_with_its_newest_policies() {
    let mut fixture = BuildsFixture::empty();
    let services = ["a", "b", "c"].map(|name| service("alpha", name));
    let all = [
        vec![
            tenant("alpha"),
            deny("alpha", "old"),
            tenant("beta"),
            deny("beta", "deny"),
        ],
        large("alpha").to_vec(),
    ];
    let first = fixture.apply(&[all.concat(), services.to_vec()].concat());
    assert!(
        first.tenant("alpha").is_none() && first.tenant("beta").is_some(),
        "beta is served before alpha is built"
    );
    assert!(first.tenant_of(&"alpha.example".parse().unwrap()).is_none());
    let next = fixture.change(
        &[deny("alpha", "new")],
        &[(ResourceKind::Authorization, "alpha/ns/old")],
        NOTHING,
    );
    assert!(
        next.tenant("alpha").is_none(),
        "its policies alone would not keep it from being served without its routes"
    );
    let (order, last) = fixture.finish();
    let last = last.unwrap();
    assert_eq!(
        (order, routed(&last, "alpha").join("")),
        (vec!["alpha".to_string()], "abc".to_string())
    );
    assert_eq!(
        policies(&last, "alpha"),
        ["AuthorizationPolicy alpha/ns/new"]
    );
}

#[test]
fn a_tenant_that_opens_stays_closed_until_it_is_built() {
    let mut fixture = BuildsFixture::new();
    fixture.builds.close_tenants(names(&["alpha", "beta"]));
    let closed = fixture.apply(&large("alpha"));
    assert!(is_closed(&closed, "alpha") && is_closed(&closed, "beta"));
    fixture.builds.close_tenants(names(&[]));
    let next = fixture.apply(&[]);
    assert_eq!(
        (is_closed(&next, "alpha"), is_closed(&next, "beta")),
        (true, false)
    );
    fixture.apply(&[service("alpha", "d")]);
    let whole = (0..3)
        .filter_map(|_| fixture.step().unwrap().1)
        .next_back()
        .unwrap();
    assert!(
        is_closed(&whole, "alpha"),
        "a later change of it still waits"
    );
    assert!(!is_closed(&fixture.finish().1.unwrap(), "alpha"));
}

#[test]
fn responses_of_one_batch_are_published_together() {
    let mut fixture = BuildsFixture::new();
    let [a, b, c] = large("alpha");
    fixture.apply(&[a, service("alpha", "old")]);
    fixture.generation -= 1;
    fixture.apply(&[b, route("alpha", "a", "/newer")]);
    fixture.apply(&[c]);
    let mut published = Vec::new();
    while let Some((_, snapshot)) = fixture.step() {
        published.extend(snapshot.map(|snapshot| routed(&snapshot, "alpha").join("")));
    }
    assert_eq!(
        published,
        ["ab", "abc"],
        "two responses of the first batch, then the next batch"
    );
}

#[test]
fn a_service_that_came_with_its_waiting_routes_is_withheld() {
    let mut fixture = BuildsFixture::new();
    let has = |snapshot: &Snapshot, name: &str| {
        snapshot
            .tenant("alpha")
            .unwrap()
            .service(&key("alpha", name))
            .is_some()
    };
    assert!(
        has(&fixture.apply(&[service("alpha", "d")]), "d"),
        "no routes are known yet"
    );
    fixture.generation -= 1;
    let next = fixture.apply(&[route("alpha", "d", "/d"), route("alpha", "a", "/a")]);
    assert!(
        !has(&next, "d") && has(&next, "a"),
        "a was there before the batch"
    );
    let whole = fixture.finish().1.unwrap();
    assert_eq!(
        (has(&whole, "d"), routed(&whole, "alpha").join("")),
        (true, "ad".to_string())
    );
}

#[test]
fn a_tenant_is_closed_and_deleted_at_once_whatever_waits() {
    let mut fixture = BuildsFixture::new();
    fixture.apply(&[large("alpha"), large("beta")].concat());
    fixture.builds.close_tenants(names(&["alpha"]));
    let next = fixture.change(&[], &[(ResourceKind::Tenant, "beta")], NOTHING);
    assert!(is_closed(&next, "alpha") && next.tenant("beta").unwrap().is_gone());
}

#[test]
fn a_complete_state_drops_queued_changes() {
    let mut fixture = BuildsFixture::new();
    fixture.apply(&large("alpha"));
    let running = fixture.builds.next_step().unwrap();
    let state = [
        tenant("alpha"),
        service("alpha", "a"),
        route("alpha", "a", "/new"),
        tenant("beta"),
    ];
    let next = fixture.builds.replace(&state, Generation(9), NOTHING);
    assert!(next.tenant("beta").unwrap().services().next().is_none());
    assert!(
        fixture.builds.finish(running.run()).is_none(),
        "a step of a build that was dropped has no effect"
    );
    let (order, last) = fixture.finish();
    assert_eq!(
        (order, routed(&last.unwrap(), "alpha").join("")),
        (vec!["alpha".to_string()], "a".to_string())
    );
}

#[test]
fn unchanged_routes_are_not_compiled_again() {
    let mut fixture = BuildsFixture::new();
    let first = fixture.change(&large("alpha"), &[], usize::MAX);
    let routes = |snapshot: &Snapshot, name: &str| {
        snapshot
            .tenant("alpha")
            .unwrap()
            .service(&key("alpha", name))
            .unwrap()
            .routes
            .as_ref()
            .unwrap()
            .compiled()
            .clone()
    };
    // Equal rules, a policy of the service, and the service itself.
    let target = PolicyTarget::Service(key("alpha", "a"));
    let next = fixture.apply(
        &[
            large("alpha").to_vec(),
            vec![policy("alpha", "deny", target), service("alpha", "a")],
        ]
        .concat(),
    );
    assert_eq!(fixture.waiting().len(), 0);
    assert!(Arc::ptr_eq(&routes(&first, "a"), &routes(&next, "a")));
    fixture.apply(&[route("alpha", "a", "/new")]);
    let last = fixture.finish().1.unwrap();
    assert!(!Arc::ptr_eq(&routes(&first, "a"), &routes(&last, "a")));
    assert!(
        Arc::ptr_eq(&routes(&first, "b"), &routes(&last, "b")),
        "one service changed"
    );
}

#[test]
fn routes_that_arrived_before_their_service_are_built_with_it() {
    let mut fixture = BuildsFixture::new();
    fixture.apply(&[route("alpha", "d", "/d")]);
    assert_eq!(fixture.waiting().len(), 0, "nothing to build yet");
    let next = fixture.apply(&[service("alpha", "d")]);
    assert!(
        next.tenant("alpha")
            .unwrap()
            .service(&key("alpha", "d"))
            .is_none(),
        "never without its routes"
    );
    assert_eq!(routed(&fixture.finish().1.unwrap(), "alpha"), ["d"]);
}

#[test]
fn a_tenant_whose_tables_cannot_be_put_in_force_is_closed_alone() {
    let mut fixture = BuildsFixture::new();
    fixture.apply(&large("alpha"));
    let next = fixture.builds.fail(&"alpha".parse().unwrap());
    assert_eq!(
        (
            is_closed(&next, "alpha"),
            is_closed(&next, "beta"),
            fixture.waiting().len()
        ),
        (true, false, 0)
    );
    assert!(
        is_closed(&fixture.apply(&[deny("alpha", "deny")]), "alpha"),
        "a later change does not bring back what was lost"
    );
    let state = [tenant("alpha"), tenant("beta")];
    assert!(!is_closed(
        &fixture.builds.replace(&state, Generation(9), NOTHING),
        "alpha"
    ));
}

#[test]
fn a_table_whose_build_panics_closes_its_tenant_alone() {
    let panicking = [
        service("alpha", crate::build::PANICKING),
        route("alpha", crate::build::PANICKING, "/"),
    ];
    // In a step, and in the change itself.
    for bytes_max in [NOTHING, IMMEDIATE_BYTES_MAX] {
        let mut fixture = BuildsFixture::new();
        fixture.apply(&[route("beta", "a", "/a")]);
        let mut last = fixture.change(&panicking, &[], bytes_max);
        while let Some((_, snapshot)) = fixture.step() {
            last = snapshot.unwrap_or(last);
        }
        assert!(is_closed(&last, "alpha") && !is_closed(&last, "beta"));
        assert_eq!(routed(&last, "beta"), ["a"]);
        assert_eq!(fixture.waiting().len(), 0);
        // Others change as before.
        let later = fixture.change(&[route("beta", "b", "/b")], &[], IMMEDIATE_BYTES_MAX);
        assert_eq!(routed(&later, "beta"), ["a", "b"]);
        assert!(is_closed(&later, "alpha"));
        let state = [tenant("alpha"), tenant("beta")];
        let whole = fixture.builds.replace(&state, Generation(9), NOTHING);
        assert!(!is_closed(&whole, "alpha"));
    }
}

/// A service with a hash table, and workloads that serve it.
fn hashing(tenant: &str, name: &str) -> Arc<Resource> {
    let Resource::Service(mut hashing) = (*service(tenant, name)).clone() else {
        unreachable!("it is a service")
    };
    hashing.load_balancers = vec![PortLoadBalancer {
        port: 80,
        subset: Labels::new(),
        load_balancer: LoadBalancer::ConsistentHash(Box::new(ConsistentHash {
            key: HashKey::SourceIp,
            table: HashTableKind::Ring { size_min: 64 },
        })),
    }];
    Arc::new(Resource::Service(hashing))
}

fn workload(tenant: &str, of: &str, host: u8) -> Arc<Resource> {
    let Resource::Workload(mut workload) = (*crate::testing::workload("w", host, of)).clone()
    else {
        unreachable!("it is a workload")
    };
    workload.tenant = tenant.parse().unwrap();
    workload.name = format!("{of}-{host}").parse().unwrap();
    workload.endpoints[0].service = key(tenant, of);
    Arc::new(Resource::Workload(workload))
}

/// Returns the positions of endpoints of which a service's hash table has entries; `None` if it has
/// no table.
fn hashed(snapshot: &Snapshot, tenant: &str, service: &str) -> Option<BTreeSet<usize>> {
    let view = snapshot.tenant(tenant).unwrap();
    let port = view.service(&key(tenant, service)).unwrap().port(80);
    let set = snapshot.set(port.unwrap().slot).unwrap();
    match &set.load_balancing {
        crate::LoadBalancing::ConsistentHash(it) => Some(it.positions(0, 1024).collect()),
        _ => None,
    }
}

#[test]
fn hash_tables_are_built_in_steps_of_their_own() {
    let mut fixture = BuildsFixture::new();
    let [one, two] = [1, 2].map(|host| workload("alpha", "h", host));
    let first = fixture.apply(&[hashing("alpha", "h"), one, two]);
    assert_eq!(hashed(&first, "alpha", "h"), None);
    let (tenant, second) = fixture.step().unwrap();
    assert_eq!(tenant, "alpha");
    assert_eq!(hashed(&second.unwrap(), "alpha", "h"), Some([0, 1].into()));
    assert!(fixture.step().is_none());
    // The endpoints change: the table before is in use until the next one is built.
    let third = workload("alpha", "h", 3);
    let gone = [(ResourceKind::Workload, "alpha/ns/h-1")];
    let stale = fixture.change(&[third], &gone, NOTHING);
    assert_eq!(hashed(&stale, "alpha", "h"), Some([0].into()));
    // They change again while it is built. Then it is in use as well, and a further one is built.
    let step = fixture.builds.next_step().unwrap().run();
    fixture.apply(&[workload("alpha", "h", 4)]);
    let late = fixture.builds.finish(step).unwrap();
    assert_eq!(hashed(&late, "alpha", "h"), Some([0, 1].into()));
    let (_, last) = fixture.step().unwrap();
    assert_eq!(hashed(&last.unwrap(), "alpha", "h"), Some([0, 1, 2].into()));
    // A change that needs no table of other endpoints needs no step.
    let shown = fixture.apply(&[hashing("alpha", "h")]);
    assert_eq!(hashed(&shown, "alpha", "h"), Some([0, 1, 2].into()));
    assert!(fixture.step().is_none());
    // Small tables are in the next snapshot.
    let at_once = fixture.change(&[workload("alpha", "h", 5)], &[], IMMEDIATE_BYTES_MAX);
    assert_eq!(hashed(&at_once, "alpha", "h").unwrap().len(), 4);
}

#[test]
fn a_table_of_earlier_endpoints_replaces_none_of_the_present_ones() {
    let mut fixture = BuildsFixture::new();
    fixture.apply(&[hashing("alpha", "h"), workload("alpha", "h", 1)]);
    let step = fixture.builds.next_step().unwrap().run();
    // While the table is built, a small change builds its own at once.
    let all = Some([0, 1].into());
    let at_once = fixture.change(&[workload("alpha", "h", 2)], &[], IMMEDIATE_BYTES_MAX);
    assert_eq!(hashed(&at_once, "alpha", "h"), all);
    let late = fixture.builds.finish(step).unwrap();
    assert_eq!(hashed(&late, "alpha", "h"), all);
    assert!(fixture.step().is_none());
}

#[test]
fn each_tenant_has_its_turn_for_hash_tables_and_routes_do_not_wait_for_them() {
    let mut fixture = BuildsFixture::new();
    let named = |tenant, name| [hashing(tenant, name), workload(tenant, name, 1)];
    let alpha = ["h", "i", "j"].map(|name| named("alpha", name)).concat();
    fixture.apply(&alpha);
    fixture.apply(&named("beta", "h"));
    fixture.apply(&[route("beta", "a", "/a")]);
    let mut order = Vec::new();
    while let Some(step) = fixture.builds.next_step() {
        let step = step.run();
        order.push((step.tenant.to_string(), step.is_of_change()));
        fixture.builds.finish(step);
    }
    let order: Vec<_> = order
        .iter()
        .map(|(tenant, is_of_change)| (tenant.as_str(), *is_of_change))
        .collect();
    let expected = [
        ("alpha", false),
        ("beta", true),
        ("beta", false),
        ("alpha", false),
        ("alpha", false),
    ];
    assert_eq!(order, expected);
}

#[test]
fn hash_tables_of_sets_that_changed_meanwhile_are_dropped() {
    let mut fixture = BuildsFixture::new();
    fixture.apply(&[hashing("alpha", "h"), workload("alpha", "h", 1)]);
    let step = fixture.builds.next_step().unwrap().run();
    // The service hashes no longer.
    let plain = service("alpha", "h");
    fixture.apply(&[plain]);
    let finished = fixture.builds.finish(step).unwrap();
    assert_eq!(hashed(&finished, "alpha", "h"), None);
    fixture.apply(&[hashing("alpha", "h")]);
    let step = fixture.builds.next_step().unwrap().run();
    // It is deleted.
    fixture.change(&[], &[(ResourceKind::Service, "alpha/ns/h")], NOTHING);
    fixture.builds.finish(step);
    // All of its endpoints are gone.
    fixture.apply(&[hashing("alpha", "h")]);
    fixture.change(&[], &[(ResourceKind::Workload, "alpha/ns/h-1")], NOTHING);
    assert!(fixture.step().is_none());
}
