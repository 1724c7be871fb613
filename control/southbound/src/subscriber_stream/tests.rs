//! Tests of the subscriber stream with a model subscriber: it keeps what it is sent, checks every
//! response, and may refuse resources.

use std::collections::{BTreeMap, BTreeSet};

use canal_catalog::{CompiledTenant, LOG_BYTES_MAX, LOG_DELTAS_MAX};
use canal_compiler::claims::{GatewayClaim, Isolation, TenantClaims};
use canal_model::ids::TenantName;
use canal_model::program::{
    self, Backend, BackendTarget, HttpMatch, PathMatch, Precedence, Resource, RouteAction,
    RouteKey, RouteRule, Service, TunnelProtocol, Workload,
};
use canal_wire::discovery::Status as WireStatus;
use canal_wire::southbound::{decode, manifest};

use super::*;

mod lowering;
mod parts;
mod refused;
mod stream_world;

use stream_world::{StreamWorld, TenantScript, TestSubscriber, gateway, node, shop, tenant};

/// Returns all kinds except manifests, which the model subscriber compares and does not log.
fn all_kinds() -> Vec<String> {
    let kinds = ResourceKind::ALL
        .iter()
        .filter(|kind| **kind != ResourceKind::Manifest);
    kinds.map(|kind| format!("{kind:?}")).collect()
}

fn request(kind: ResourceKind) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        type_url: kind.type_url().into(),
        ..DeltaDiscoveryRequest::default()
    }
}

#[test]
fn each_subscriber_sees_its_scope_and_no_more() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a", "b"]));
    w.set(
        "beta",
        &TenantScript {
            gateways: ["g2".to_string()].into(),
            ..shop(&["x"])
        },
    );
    let cases: [(&str, Principal, &[&str]); 5] = [
        (
            "a node: its tenant, gateways, services and own workloads",
            node("alpha", "n0"),
            &[
                "Tenant alpha",
                "GatewayReplica alpha/g1",
                "Service alpha/shop/a",
                "Service alpha/shop/b",
                "Workload alpha/shop/a-0",
            ],
        ),
        (
            "a node without workloads",
            node("beta", "n9"),
            &[
                "Tenant beta",
                "GatewayReplica beta/g2",
                "Service beta/shop/x",
            ],
        ),
        (
            "a gateway: all of the tenants it serves",
            gateway("g2"),
            &[
                "Tenant beta",
                "GatewayReplica beta/g2",
                "Service beta/shop/x",
                "Workload beta/shop/x-0",
                "Route beta/HTTPRoute/shop/x/0",
            ],
        ),
        ("a gateway that serves no tenant", gateway("g9"), &[]),
        (
            "a node of a tenant that is not there",
            node("gamma", "n0"),
            &[],
        ),
    ];
    for (what, principal, want) in cases {
        let mut c = TestSubscriber::new(principal);
        c.settle(&w);
        assert_eq!(c.names(), want, "{what}");
        assert!(c.is_converged(), "{what}");
    }
}

#[test]
fn every_kind_is_answered_once_in_order_even_with_nothing() {
    let mut w = StreamWorld::default();
    let mut c = TestSubscriber::new(node("alpha", "n0"));
    assert_eq!(c.settle(&w), all_kinds());
    assert_eq!(c.settle(&w), [""; 0]);
    w.set("alpha", &shop(&["a"]));
    let all = [
        "Tenant +alpha",
        "GatewayReplica +alpha/g1",
        "Service +alpha/shop/a",
        "Workload +alpha/shop/a-0",
    ];
    assert_eq!(c.settle(&w), all);
    w.set("beta", &shop(&["x"]));
    assert_eq!(
        c.settle(&w),
        [""; 0],
        "another tenant's change is no message"
    );
}

#[test]
fn new_things_come_parents_first_and_go_children_first() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a"]));
    let mut c = TestSubscriber::new(gateway("g1"));
    c.settle(&w);
    let mut script = shop(&["a", "b"]);
    script.services.remove("a");
    script.workloads.remove("a-0");
    script.routes.remove("a");
    w.set("alpha", &script);
    let want = [
        "Service +alpha/shop/b",
        "Workload +alpha/shop/b-0",
        "Route +alpha/HTTPRoute/shop/b/0",
        "Route -alpha/HTTPRoute/shop/a/0",
        "Workload -alpha/shop/a-0",
        "Service -alpha/shop/a",
    ];
    assert_eq!(c.settle(&w), want);
    w.remove("alpha");
    let want = [
        "Route -alpha/HTTPRoute/shop/b/0",
        "Workload -alpha/shop/b-0",
        "Service -alpha/shop/b",
        "GatewayReplica -alpha/g1",
        "Tenant -alpha",
    ];
    assert_eq!(c.settle(&w), want);
    assert_eq!(c.names(), [""; 0]);
}

#[test]
fn a_reconnect_sends_only_changed_resources() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a", "b", "c"]));
    let mut c = TestSubscriber::new(gateway("g1"));
    c.settle(&w);
    c.reconnect();
    assert_eq!(c.settle(&w), all_kinds(), "nothing changed");
    let mut script = shop(&["a", "b", "c"]);
    script.services.insert("a".into(), 77);
    script.routes.remove("b");
    w.set("alpha", &script);
    c.reconnect();
    let rest = all_kinds()
        .into_iter()
        .skip(3)
        .chain(["Route -alpha/HTTPRoute/shop/b/0".to_owned()]);
    let want: Vec<String> = ["Tenant", "GatewayReplica", "Service +alpha/shop/a"]
        .map(str::to_owned)
        .into_iter()
        .chain(rest)
        .collect();
    assert_eq!(c.settle(&w), want);
    c.resources.insert(
        (ResourceKind::Service, "alpha/shop/old".into()),
        (
            "no version of ours".into(),
            c.resources.values().next().unwrap().1.clone(),
        ),
    );
    c.check_parents = false;
    c.reconnect();
    assert!(
        c.settle(&w)
            .contains(&"Service -alpha/shop/old".to_string())
    );
    assert!(c.is_converged());
}

#[test]
fn changes_gather_while_an_answer_is_owed() {
    let mut w = StreamWorld::default();
    let mut script = shop(&["a"]);
    w.set("alpha", &script);
    let mut c = TestSubscriber::new(gateway("g1"));
    c.settle(&w);
    script.services.insert("a".into(), 100);
    w.set("alpha", &script);
    let owed = c.session.next_response(&w.catalog).unwrap();
    for i in 0..1000 {
        script.services.insert("a".into(), 200 + i);
        script.services.insert(format!("t{}", i % 3), 5000 + i);
        w.set("alpha", &script);
        assert!(
            c.session.next_response(&w.catalog).is_none(),
            "nothing is sent before the answer"
        );
    }
    c.answer(owed);
    c.log.clear();
    let first = c.settle(&w);
    assert_eq!(
        first,
        ["Service +alpha/shop/a +alpha/shop/t0 +alpha/shop/t1 +alpha/shop/t2"],
        "a thousand changes, one message"
    );
    assert!(c.is_converged());
}

#[test]
fn a_subscriber_behind_the_change_log_gets_a_correct_state() {
    let mut w = StreamWorld::default();
    let mut script = shop(&["a", "b"]);
    w.set("alpha", &script);
    let mut c = TestSubscriber::new(gateway("g1"));
    c.settle(&w);
    script.routes.remove("b");
    w.set("alpha", &script);
    for i in 0..2 * LOG_DELTAS_MAX as u32 {
        script.services.insert("a".into(), 10 + i);
        w.set("alpha", &script);
    }
    let v = &w.catalog.tenants[&tenant("alpha")];
    assert!(
        v.deltas_after(Generation(1)).is_none(),
        "the log is bounded"
    );
    assert_eq!(
        c.settle(&w),
        ["Service +alpha/shop/a", "Route -alpha/HTTPRoute/shop/b/0"]
    );
    assert_eq!(c.session.take_behind_log(), 1);
}

#[test]
fn the_change_log_keeps_a_limited_number_of_replaced_entries() {
    let mut w = StreamWorld::default();
    let mut script = shop(&["a"]);
    // Each removed Service takes at least 512 bytes.
    let many = 0..(LOG_BYTES_MAX / 512) as u32;
    script
        .services
        .extend(many.map(|n| (format!("s{n}"), 100 + n)));
    w.set("alpha", &script);
    let mut c = TestSubscriber::new(gateway("g1"));
    c.settle(&w);
    script.services.insert("a".into(), 2);
    w.set("alpha", &script);
    c.settle(&w);
    assert_eq!(c.session.take_behind_log(), 0, "a small change is logged");
    script.services.retain(|name, _| name == "a");
    w.set("alpha", &script);
    let alpha = &w.catalog.tenants[&tenant("alpha")];
    assert!(
        alpha.deltas_after(Generation(2)).is_none(),
        "removed resources are not stored"
    );
    c.settle(&w);
    assert_eq!(
        c.session.take_behind_log(),
        1,
        "the subscriber was compared with the whole tenant"
    );
    let left = |(kind, _): &&(ResourceKind, String)| *kind == ResourceKind::Service;
    assert_eq!(c.resources.keys().filter(left).count(), 1);
    assert!(c.is_converged());
}

#[test]
fn unreadable_resources_are_not_removed() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a"]));
    let mut c = TestSubscriber::new(node("alpha", "n0"));
    c.settle(&w);
    let held = c.names();
    let mut fresh = StreamWorld {
        catalog: Catalog {
            generation: Generation(100),
            ..Catalog::default()
        },
    };
    fresh.set(
        "alpha",
        &TenantScript {
            is_partial: true,
            ..TenantScript::default()
        },
    );
    c.reconnect();
    c.settle(&fresh);
    assert_eq!(
        c.names(),
        held,
        "a restarted controller that cannot read the files removes nothing"
    );
    let mut script = shop(&["a"]);
    script.services.clear();
    script.workloads.clear();
    script.routes.clear();
    fresh.set("alpha", &script);
    c.settle(&fresh);
    assert_eq!(
        c.names(),
        ["Tenant alpha", "GatewayReplica alpha/g1"],
        "removals are sent once the subscriber accepts them"
    );
}

#[test]
fn a_gateway_follows_the_tenants_it_serves() {
    let mut w = StreamWorld::default();
    let script = shop(&["a"]);
    w.set("alpha", &script);
    let mut c = TestSubscriber::new(gateway("g2"));
    c.settle(&w);
    assert_eq!(c.names(), [""; 0]);
    let mut both = script.clone();
    both.gateways.insert("g2".into());
    w.set("alpha", &both);
    c.settle(&w);
    assert_eq!(c.names().len(), 6);
    assert!(
        w.catalog
            .newest_in_scope(
                &gateway("g2"),
                &[true; ResourceKind::ALL.len()],
                Generation(1)
            )
            .is_some()
    );
    w.set("alpha", &script);
    c.settle(&w);
    assert_eq!(c.names(), [""; 0]);
}

#[test]
fn names_may_be_subscribed_one_by_one() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a", "b"]));
    let mut s = SubscriberStream::new(gateway("g1"), SessionLimits::default());
    let ask = |names: &[&str], drop: &[&str]| DeltaDiscoveryRequest {
        resource_names_subscribe: names.iter().map(ToString::to_string).collect(),
        resource_names_unsubscribe: drop.iter().map(ToString::to_string).collect(),
        ..request(ResourceKind::Service)
    };
    let sent_names = |s: &mut SubscriberStream, w: &StreamWorld| {
        let mut lines = Vec::new();
        while let Some(r) = s.next_response(&w.catalog) {
            let names = r
                .resources
                .iter()
                .map(|r| format!("+{}", r.name))
                .chain(r.removed_resources.iter().map(|n| format!("-{n}")));
            lines.push(names.collect::<Vec<_>>().join(" "));
            let ack = DeltaDiscoveryRequest {
                response_nonce: r.nonce,
                ..request(ResourceKind::Service)
            };
            assert_eq!(s.handle_request_alone(ack).unwrap(), SubscriberMessage::Ack);
        }
        lines
    };
    s.handle_request_alone(ask(
        // A service, a name without a resource, a tenant that does not exist, and a name of no
        // valid form.
        &[
            "alpha/shop/a",
            "alpha/shop/none",
            "nobody/x/y",
            "not a name!",
        ],
        &[],
    ))
    .unwrap();
    assert_eq!(
        sent_names(&mut s, &w),
        ["+alpha/shop/a -alpha/shop/none -nobody/x/y -not a name!"]
    );
    s.handle_request_alone(ask(&["alpha/shop/a"], &[])).unwrap();
    assert_eq!(
        sent_names(&mut s, &w),
        ["+alpha/shop/a"],
        "a repeated request sends it again"
    );
    s.handle_request_alone(ask(&["alpha/shop/b"], &["alpha/shop/a"]))
        .unwrap();
    assert_eq!(sent_names(&mut s, &w), ["+alpha/shop/b"]);
    w.set(
        "alpha",
        &TenantScript {
            // New ids, so that both services differ from what was sent.
            services: [("a".to_string(), 40), ("b".to_string(), 41)].into(),
            ..shop(&["a", "b"])
        },
    );
    assert_eq!(
        sent_names(&mut s, &w),
        ["+alpha/shop/b"],
        "what was unsubscribed is not sent"
    );
    s.handle_request_alone(ask(&["*"], &[])).unwrap();
    assert_eq!(sent_names(&mut s, &w), ["+alpha/shop/a"]);
    s.handle_request_alone(ask(&[], &["*", "alpha/shop/b"]))
        .unwrap();
    assert_eq!(
        (sent_names(&mut s, &w), s.progress().resources),
        (vec![], 0),
        "the subscriber drops resources that it no longer requests"
    );

    let mut on_demand = SubscriberStream::new(gateway("g1"), SessionLimits::default());
    on_demand.handle_request_alone(ask(&["*"], &["*"])).unwrap();
    assert_eq!(
        sent_names(&mut on_demand, &w),
        [""],
        "subscribe and unsubscribe *: nothing, as ztunnel's on-demand mode asks"
    );
}

#[test]
fn limits_of_one_stream() {
    let limits = SessionLimits {
        names: 3,
        ..SessionLimits::default()
    };
    let mut s = SubscriberStream::new(gateway("g1"), limits);
    let names = (0..4).map(|i| format!("n{i}")).collect();
    let refused = s
        .handle_request_alone(DeltaDiscoveryRequest {
            resource_names_subscribe: names,
            ..request(ResourceKind::Service)
        })
        .unwrap_err();
    assert_eq!(
        refused,
        StreamLimitError::TooManyNames { named: 4, limit: 3 }
    );

    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a", "b", "c", "d", "e"]));
    let mut c = TestSubscriber::with_limits(
        node("alpha", "n9"),
        SessionLimits {
            // A response of 600 bytes holds fewer than five services.
            response_bytes: 600,
            ..SessionLimits::default()
        },
    );
    let services: Vec<String> = c
        .settle(&w)
        .into_iter()
        .filter(|l| l.starts_with("Service"))
        .collect();
    // The log has one line for each response with Services.
    assert!(services.len() > 1, "{services:?}");
    assert_eq!(
        c.resources
            .keys()
            .filter(|(k, _)| *k == ResourceKind::Service)
            .count(),
        5
    );
}

#[test]
fn removals_follow_their_replacements_across_several_responses() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a", "b", "c", "d", "e"]));
    let mut c = TestSubscriber::with_limits(
        gateway("g1"),
        SessionLimits {
            response_bytes: 600,
            ..SessionLimits::default()
        },
    );
    c.settle(&w);
    // The names of the new Services sort behind those of the removed ones.
    w.set("alpha", &shop(&["v", "w", "x", "y", "z"]));
    let services: Vec<String> = c
        .settle(&w)
        .into_iter()
        .filter(|line| line.starts_with("Service"))
        .collect();
    let changes: String = services.concat();
    let last_put = changes.rfind('+').unwrap();
    let first_removal = changes.find(" -").unwrap();
    assert!(
        services.len() > 1 && last_put < first_removal,
        "{services:?}"
    );
}

#[test]
fn a_tenant_that_fits_into_one_response_is_not_split() {
    let mut w = StreamWorld::default();
    let names = ["a", "b", "c", "d", "e"];
    for tenant in ["alpha", "beta"] {
        w.set(tenant, &shop(&names));
    }
    // Ten Services take about 2,000 bytes.
    let mut c = TestSubscriber::with_limits(
        gateway("g1"),
        SessionLimits {
            response_bytes: 1500,
            ..SessionLimits::default()
        },
    );
    let services: Vec<String> = c
        .settle(&w)
        .into_iter()
        .filter(|line| line.starts_with("Service"))
        .collect();
    let of = |tenant: &str| {
        let all = names.map(|name| format!(" +{tenant}/shop/{name}"));
        format!("Service{}", all.concat())
    };
    assert_eq!(services, [of("alpha"), of("beta")]);
}

mod limits;

#[test]
fn strange_messages_change_nothing() {
    let mut w = StreamWorld::default();
    w.set("alpha", &shop(&["a"]));
    let mut c = TestSubscriber::new(node("alpha", "n9"));
    c.settle(&w);
    let before = c.session.progress();
    let stale = |nonce: &str| DeltaDiscoveryRequest {
        response_nonce: nonce.into(),
        ..request(ResourceKind::Service)
    };
    // None of these nonces is open: one was answered, one is in the future, and two are no numbers.
    for nonce in ["1", "999", "x", "-1"] {
        assert_eq!(
            c.session.handle_request_alone(stale(nonce)).unwrap(),
            SubscriberMessage::Stale,
            "{nonce}"
        );
    }
    assert_eq!(c.session.progress(), before);
    let newer = DeltaDiscoveryRequest {
        // A type that a newer release could have.
        type_url: "type.googleapis.com/canal.program.v9.Moon".into(),
        ..DeltaDiscoveryRequest::default()
    };
    assert_eq!(
        c.session.handle_request_alone(newer.clone()).unwrap(),
        SubscriberMessage::UnknownType
    );
    let answer = c.session.next_response(&w.catalog).unwrap();
    assert_eq!(
        (answer.type_url.as_str(), answer.resources.len()),
        (newer.type_url.as_str(), 0)
    );
    c.session
        .handle_request_alone(DeltaDiscoveryRequest {
            response_nonce: answer.nonce,
            ..newer.clone()
        })
        .unwrap();
    assert!(c.session.next_response(&w.catalog).is_none() && !c.session.is_waiting());
    let mut first = SubscriberStream::new(gateway("g1"), SessionLimits::default());
    first.handle_request_alone(newer).unwrap();
    assert_eq!(
        first.next_response(&w.catalog).unwrap().system_version_info,
        "1",
        "never a generation before the one in force"
    );
}

/// Returns the versions of all resources that are in force for a principal.
fn visible_versions(
    w: &StreamWorld,
    principal: &Principal,
) -> BTreeMap<(ResourceKind, String), String> {
    w.catalog
        .admitted(principal)
        .flat_map(|(_, v)| v.entries.values())
        .filter(|e| scope::visible(&e.resource, principal, &w.catalog.placement))
        .map(|e| {
            (
                (e.resource.kind(), e.name.to_string()),
                e.version.to_string(),
            )
        })
        .collect()
}

/// Random histories of changes, late answers, refusals, reconnects and restarts. At the end the
/// subscriber holds exactly what is in force for it, except what it refuses. At no moment does a
/// resource refer to a missing one.
#[test]
fn random_histories_end_well() {
    // 400 seeds: even ones are gateways and odd ones nodes, and a third refuses resources. Nobody
    // measured how many seeds and steps are needed.
    for seed in 0..400u64 {
        // An odd state, since a generator of the xorshift family must not start at zero. The factor
        // (of SplitMix64) spreads neighboring seeds.
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut w = StreamWorld::default();
        let mut script = [shop(&["a", "b"]), shop(&["c"])];
        let principal = if seed % 2 == 0 {
            gateway("g1")
        } else {
            node("alpha", "n0")
        };
        let mut c = TestSubscriber::new(principal.clone());
        let refuses = seed % 3 == 0;
        // A refused parent is missing, so its children have no parent.
        c.check_parents = !refuses;
        let mut owed = std::collections::VecDeque::new();
        for _ in 0..120 {
            // A step is a change, a response, a late answer or a reconnect: of 8 values, three are
            // changes, two responses and two answers; the last is a reconnect in one case of four.
            match dice.roll(8) {
                0..=2 => {
                    let t = dice.roll(2);
                    dice.change(&mut script[t]);
                    w.set(["alpha", "beta"][t], &script[t]);
                }
                3..=4 => owed.extend(c.session.next_response(&w.catalog)),
                5..=6 => {
                    if refuses && dice.roll(4) == 0 {
                        c.refuses = [format!("alpha/shop/{}", dice.service())].into();
                    }
                    if let Some(response) = owed.pop_front() {
                        c.answer(response);
                    }
                }
                _ if dice.roll(4) == 0 => {
                    owed.clear();
                    c.reconnect();
                }
                _ => {}
            }
        }
        owed.drain(..).for_each(|r| c.answer(r));
        c.settle(&w);
        let want = visible_versions(&w, &principal);
        let got: BTreeMap<_, _> = c
            .resources
            .iter()
            .map(|(k, (v, _))| (k.clone(), v.clone()))
            .collect();
        if c.session.refused.is_empty() {
            assert_eq!(got, want, "seed {seed}");
            assert!(c.is_converged(), "seed {seed}: {:?}", c.session.progress());
            let admitted: Vec<String> = w
                .catalog
                .admitted(&principal)
                .map(|(t, _)| t.to_string())
                .collect();
            assert!(
                c.sealed.keys().eq(&admitted) && c.sealed.values().all(|agrees| *agrees),
                "seed {seed}: {:?}",
                c.sealed
            );
        } else {
            let differs = want
                .iter()
                // Only what is refused may differ from the catalog.
                .filter(|(k, v)| got.get(*k) != Some(v))
                .map(|(k, _)| k.clone());
            let refused: BTreeSet<(ResourceKind, String)> = c
                .session
                .refused
                .keys()
                .map(|(k, n)| (*k, n.to_string()))
                .collect();
            assert!(
                differs.collect::<BTreeSet<_>>().is_subset(&refused),
                "seed {seed}"
            );
            assert!(!c.is_converged(), "seed {seed}");
        }
    }
}

/// A xorshift generator, so that the histories are the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides as u64) as usize
    }

    fn service(&mut self) -> String {
        ["a", "b", "c", "d", "e"][self.roll(5)].to_string()
    }

    /// Makes one valid edit: whatever a route or workload names exists.
    fn change(&mut self, script: &mut TenantScript) {
        let s = self.service();
        match self.roll(6) {
            5 if !script.policies.remove(&s) => _ = script.policies.insert(s),
            5 => {}
            0 => {
                script
                    .services
                    .insert(s.clone(), 1 + self.roll(1000) as u32);
            }
            1 => {
                script.services.remove(&s);
                script.routes.remove(&s);
                script.workloads.retain(|_, (service, _, _)| *service != s);
                script
                    .routes
                    .values_mut()
                    .for_each(|to| to.retain(|t| *t != s));
            }
            2 if script.services.contains_key(&s) => {
                let ready = self.roll(2) == 0;
                script.workloads.insert(
                    format!("w{}", self.roll(6)),
                    (s, format!("n{}", self.roll(2)), ready),
                );
            }
            3 => {
                script.workloads.remove(&format!("w{}", self.roll(6)));
            }
            _ => {
                let to = self.service();
                if script.services.contains_key(&s) && script.services.contains_key(&to) {
                    script.routes.insert(s, vec![to]);
                }
            }
        }
    }
}

/// Sets the replicas, the tenants and services that their backend holds, and the bucket tables.
fn fleet(
    w: &mut StreamWorld,
    generation: u64,
    replicas: &[&str],
    held: &[(&str, u32)],
    tables: &[(&str, u32)],
) {
    use canal_compiler::scope::BackendScope;
    use canal_model::ids::{ReplicaNumber, ServiceId, Vni};
    use program::{BucketTable, Replica};
    let az = || "az1".parse().unwrap();
    let replica = |(i, name): (usize, &&str)| {
        let (name, number) = (
            name.parse().unwrap(),
            ReplicaNumber::new(i as u32 + 1).unwrap(),
        );
        let underlay = std::net::Ipv4Addr::new(250, 1, 0, 3); // No test depends on it.
        Resource::Replica(Replica {
            name,
            number,
            backend: "b1".parse().unwrap(),
            az: az(),
            underlay,
            up: true,
        })
    };
    let provider = CompiledTenant::of_provider(replicas.iter().enumerate().map(replica).collect());
    // Generations must not go back, so the step is added to the generation in force.
    let generation = Generation(w.catalog.generation.0 + generation);
    w.catalog.provider = Some(Arc::new(TenantCatalog::next(
        w.catalog.provider.as_deref(),
        provider,
        generation,
    )));
    for (name, view) in &mut w.catalog.tenants {
        let table = |(_, id): &(&str, u32)| {
            let (service, id) = (
                format!("{name}/shop/a").parse().unwrap(),
                ServiceId::new(*id).unwrap(),
            );
            Arc::new(BucketTable {
                service,
                id,
                az: az(),
                vni: Vni::new(7).unwrap(),
                version: 1,
                chains: vec![vec![]; program::BUCKETS],
            })
        };
        let tables: Vec<Arc<BucketTable>> = tables
            .iter()
            .filter(|(t, _)| *t == name.as_str())
            .map(table)
            .collect();
        let planned = canal_catalog::TenantPlacement {
            tables: Arc::new(tables),
            ..Default::default()
        };
        // Names of tables end with their AZ, which the scope of data planes depends on.
        assert!(planned.resources().all(|r| r.name().ends_with("@az1")));
        if let Some(next) = view.with_tier(&planned, None, generation) {
            *view = Arc::new(next);
        }
    }
    let held = BackendScope {
        tenants: held.iter().map(|(t, _)| tenant(t)).collect(),
        services: held
            .iter()
            .map(|(_, id)| ServiceId::new(*id).unwrap())
            .collect(),
    };
    let replicas = replicas
        .iter()
        .map(|r| (r.parse().unwrap(), "b1".parse().unwrap()))
        .collect();
    w.catalog.placement = Arc::new(TierPlacement {
        replicas,
        backends: [("b1".parse().unwrap(), held)].into(),
    });
    w.catalog.generation = generation;
}

#[test]
fn a_gateway_follows_the_services_of_its_backend() {
    let mut w = StreamWorld::default();
    w.set(
        "alpha",
        &TenantScript {
            gateways: BTreeSet::new(),
            ..shop(&["a"])
        },
    );
    w.set(
        "beta",
        &TenantScript {
            gateways: BTreeSet::new(),
            ..shop(&["a"])
        },
    );
    let mut c = TestSubscriber::new(gateway("r1"));
    let mut edge = TestSubscriber::new(Principal::Edge {
        name: "e1".parse().unwrap(),
        az: "az1".parse().unwrap(),
    });
    c.settle(&w);
    edge.settle(&w);
    assert_eq!(
        (c.names(), edge.names().len()),
        (vec![], 2),
        "no replica is registered; the edge has the tenants"
    );
    let tables = [("alpha", 1), ("beta", 2)];
    fleet(&mut w, 1, &["r1"], &[("alpha", 1)], &tables);
    let alpha = [
        "Tenant alpha",
        "Service alpha/shop/a",
        "Workload alpha/shop/a-0",
        "Route alpha/HTTPRoute/shop/a/0",
    ];
    c.settle(&w);
    assert_eq!(
        c.names(),
        [&alpha[..], &["Replica r1", "Table alpha/shop/a@az1"]].concat()
    );
    edge.settle(&w);
    let both = [
        "Tenant alpha",
        "Tenant beta",
        "Replica r1",
        "Table alpha/shop/a@az1",
        "Table beta/shop/a@az1",
    ];
    assert_eq!(edge.names(), both);
    // Services move: the scope changes although no resource does.
    fleet(&mut w, 1, &["r1"], &[("beta", 2)], &tables);
    c.settle(&w);
    let beta: Vec<String> = alpha.iter().map(|n| n.replace("alpha", "beta")).collect();
    assert_eq!(
        c.names(),
        [
            beta,
            vec!["Replica r1".into(), "Table beta/shop/a@az1".into()]
        ]
        .concat()
    );
    assert_eq!(edge.settle(&w), [""; 0], "an edge is not concerned");
    // No service has ID 9: the tenant stays, and its service leaves the backend.
    fleet(&mut w, 1, &["r1"], &[("beta", 9)], &tables);
    assert_eq!(c.settle(&w), ["Table -beta/shop/a@az1"]);
    // The backend has the service again, so its table comes back.
    fleet(&mut w, 1, &["r1", "r2"], &[("beta", 2)], &tables);
    assert_eq!(c.settle(&w), ["Replica +r2", "Table +beta/shop/a@az1"]);
    fleet(&mut w, 1, &["r2"], &[("beta", 2)], &[]);
    c.settle(&w);
    edge.settle(&w);
    assert_eq!(
        (c.names(), c.is_converged()),
        (vec!["Replica r2".to_string()], true),
        "r1 was forgotten: it has the tier's resources and no tenant"
    );
    assert_eq!(edge.names(), ["Tenant alpha", "Tenant beta", "Replica r2"]);
    c.reconnect();
    // The subscriber lists what it has, so each kind is answered once and without resources.
    assert_eq!(
        c.settle(&w),
        all_kinds(),
        "nothing is sent again after a reconnect"
    );
}
