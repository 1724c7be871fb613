//! Tests that a tenant's objects leave nothing behind when they are gone. They count what is stored.

use canal_model::authorization::{Authorization, AuthorizationAction, PolicyKey};
use canal_model::program::*;

use super::*;
use crate::EndpointSetId;
use crate::testing::{first_precedence, forward_to, key, route, service, tenant, workload};

/// A workload that serves port 80 at this target port.
fn serving(target_port: u16, of: &str) -> Arc<Resource> {
    let Resource::Workload(mut workload) = (*workload("w", 1, of)).clone() else {
        unreachable!("it is a workload")
    };
    workload.endpoints[0].target_port = target_port;
    Arc::new(Resource::Workload(workload))
}

/// A rule of a service that leads to another one and has a broken match.
fn rule(of: &str, to: &str) -> Arc<Resource> {
    let broken = PathMatch::Regex("(".into());
    let matched = (first_precedence(), broken);
    Arc::new(Resource::Route(RouteRule {
        parent_port: Some(80),
        ..route(key(of), "r", matched, forward_to(to, to))
    }))
}

fn deny(of: &str) -> Arc<Resource> {
    Arc::new(Resource::Authorization(Authorization {
        key: PolicyKey {
            tenant: "t".parse().unwrap(),
            namespace: "ns".parse().unwrap(),
            name: "deny".parse().unwrap(),
        },
        target: PolicyTarget::Service(key(of)),
        action: AuthorizationAction::Deny,
        rules: vec![],
        dry_run: false,
        broken: None,
    }))
}

fn termination(of: &str) -> Arc<Resource> {
    Arc::new(Resource::Termination(Termination {
        service: key(of),
        port: 80,
        certificate: canal_model::trust::TerminationCertificate::Mesh,
        clients: Default::default(),
        required: true,
        broken: None,
    }))
}

fn gone(all: &[Arc<Resource>]) -> Vec<(ResourceKind, String)> {
    let names = all.iter().map(|it| (it.kind(), it.name()));
    names.collect()
}

fn set_of(snapshot: &Snapshot, name: &str) -> Option<EndpointSetId> {
    let service = snapshot.tenant("t")?.service(&key(name))?;
    Some(service.port(80)?.slot)
}

fn endpoint_id(snapshot: &Snapshot, name: &str) -> u64 {
    let set = snapshot.set(set_of(snapshot, name).unwrap());
    set.unwrap().endpoints[0].id
}

#[test]
fn services_under_ever_new_names_leave_nothing_behind() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    builder.apply(&[tenant()], &[], Generation(1));
    // In half of the rounds, the service is gone before what names it.
    for n in 0..3_000 {
        let (of, to) = (format!("s-{n}"), format!("t-{n}"));
        let all = [
            service(&of, &[80, 81]),
            workload("w", 1, &of),
            rule(&of, &to),
            deny(&of),
            termination(&of),
        ];
        builder.apply(&all, &[], Generation(2));
        assert!(builder.route_faults() > 0 && builder.terminated.len() == 1);
        let gone = gone(&all);
        if n % 2 == 0 {
            builder.apply(&[], &gone[..1], Generation(3));
            builder.apply(&[], &gone[1..], Generation(3));
        } else {
            builder.apply(&[], &gone[1..], Generation(3));
            builder.apply(&[], &gone[..1], Generation(3));
        }
        assert_eq!(builder.services.len(), 0, "round {n}");
    }
    // Those of the ports and of the rule's target, once.
    assert_eq!(builder.snapshot.sets.len(), 3);
    assert_eq!(builder.set_uses.len(), 0);
    assert_eq!((builder.faults.len(), builder.terminated.len()), (0, 0));
    assert_eq!(builder.workloads.uids().count(), 0);
    assert!(builder.withheld.is_empty());
}

#[test]
fn names_of_services_that_never_come_leave_nothing_behind() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    for n in 0..100 {
        let name = format!("s-{n}");
        let all = [deny(&name), termination(&name), workload("w", 1, &name)];
        builder.apply(&all, &[], Generation(1));
        // The next round's workload replaces this one, and its policy that policy.
        assert!(builder.services.len() <= 1, "round {n}");
    }
    builder.apply(&[], &gone(&[workload("w", 1, "s")]), Generation(2));
    assert_eq!(builder.services.len(), 0);
}

#[test]
fn an_earlier_snapshots_set_is_never_the_set_of_another_service() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let one = [tenant(), service("a", &[80]), workload("w", 1, "a")];
    let first = builder.apply(&one, &[], Generation(1));
    let of_first = set_of(&first, "a").unwrap();
    builder.apply(&[], &gone(&one[1..]), Generation(2));
    let other = [service("b", &[80]), workload("w", 2, "b")];
    let last = builder.apply(&other, &[], Generation(3));
    let of_last = set_of(&last, "b").unwrap();
    assert_eq!(builder.snapshot.sets.len(), 1, "the slot is the same");
    assert!(last.set(of_first).is_none() && first.set(of_last).is_none());
    let workloads = |snapshot: &Snapshot, id| snapshot.set(id).unwrap().endpoints.len();
    assert_eq!(
        (workloads(&first, of_first), workloads(&last, of_last)),
        (1, 1)
    );
}

#[test]
fn a_service_whose_workloads_stay_is_known_when_it_returns() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let all = [tenant(), service("a", &[80]), workload("w", 1, "a")];
    let first = builder.apply(&all, &[], Generation(1));
    builder.apply(&[], &gone(&all[1..2]), Generation(2));
    assert_eq!(builder.services.len(), 1);
    let back = builder.apply(&all[1..2], &[], Generation(3));
    assert_eq!(endpoint_id(&back, "a"), endpoint_id(&first, "a"));
}

/// Asserts that a workload's endpoints have other IDs once connections to it are opened in another
/// way: its idle connections have no tunnel, or one to another identity.
fn assert_new_ids_for_connections_of_another_kind(builder: &mut SnapshotBuilder) {
    let changed = |change: &dyn Fn(&mut Workload)| {
        let Resource::Workload(mut workload) = (*serving(8080, "a")).clone() else {
            unreachable!("it is a workload")
        };
        change(&mut workload);
        Arc::new(Resource::Workload(workload))
    };
    let changes: [&dyn Fn(&mut Workload); 3] =
        [&|_| {}, &|it| it.tunnel = TunnelProtocol::None, &|it| {
            it.service_account = "other".parse().unwrap()
        }];
    let mut known = HashSet::new();
    for change in changes {
        let next = builder.apply(&[changed(change)], &[], Generation(5));
        let id = endpoint_id(&next, "a");
        let same = builder.apply(&[changed(change)], &[], Generation(5));
        assert_eq!(endpoint_id(&same, "a"), id);
        assert!(known.insert(id));
    }
    builder.apply(&[serving(8080, "a")], &[], Generation(5));
}

#[test]
fn a_workload_has_ids_only_of_the_ports_that_it_serves() {
    let mut builder = SnapshotBuilder::new("gw", None, None);
    let all = [tenant(), service("a", &[80]), serving(8080, "a")];
    let first = builder.apply(&all, &[], Generation(1));
    let unready = |at| {
        let Resource::Workload(mut workload) = (*serving(at, "a")).clone() else {
            unreachable!("it is a workload")
        };
        workload.ready = false;
        Arc::new(Resource::Workload(workload))
    };
    builder.apply(&[unready(8080)], &[], Generation(2));
    let same = builder.apply(&[serving(8080, "a")], &[], Generation(3));
    assert_eq!(
        endpoint_id(&same, "a"),
        endpoint_id(&first, "a"),
        "it serves the port, ready or not"
    );
    for port in 8081..8181 {
        builder.apply(&[serving(port, "a")], &[], Generation(4));
        let workload = builder.workloads.get(&"t".parse().unwrap(), "t/ns/w");
        assert_eq!(workload.unwrap().ids.len(), 1);
    }
    let back = builder.apply(&[serving(8080, "a")], &[], Generation(5));
    assert_ne!(endpoint_id(&back, "a"), endpoint_id(&first, "a"));
    assert_new_ids_for_connections_of_another_kind(&mut builder);
    // A removed workload's IDs are part of it, so no others are looked at.
    builder.apply(&[], &gone(&all[2..]), Generation(6));
    assert_eq!(builder.workloads.uids().count(), 0);
    let again = builder.apply(&all[2..], &[], Generation(7));
    assert_ne!(endpoint_id(&again, "a"), endpoint_id(&back, "a"));
}
