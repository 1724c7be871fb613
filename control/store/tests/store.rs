//! Tests of the store's public interface: transactions, limits, service ids, generations,
//! authorities, and the errors for unusable directories.

use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use canal_model::fleet::ReplicaState;
use canal_model::ids::{AzName, Generation, ReplicaNumber, ServiceId, ServiceKey, TenantName, Vni};
use canal_model::plan::{ChainMember, Plan, PlannedService, PlannedTable, UnmetConstraint};
use canal_model::program::BUCKETS;
use canal_store::{
    ObjectEdit, ObjectMove, Store, StoreError, StoreLimits, StoredEdge, StoredObjectKey,
    StoredReplica,
};

fn open(dir: &Path) -> Store {
    Store::open(dir, StoreLimits::default()).unwrap()
}

fn key(tenant: &str, name: &str) -> StoredObjectKey {
    StoredObjectKey {
        tenant: TenantName::new(tenant).unwrap(),
        kind: "HTTPRoute".into(),
        namespace: "shop".into(),
        name: name.into(),
    }
}

fn put(tenant: &str, name: &str, yaml: &str) -> ObjectEdit {
    ObjectEdit::Put {
        key: key(tenant, name),
        yaml: yaml.into(),
    }
}

fn names(s: &Store) -> Vec<String> {
    s.objects()
        .unwrap()
        .into_iter()
        .map(|o| {
            format!(
                "{}:{}={}@{}",
                o.key.tenant, o.key.name, o.yaml, o.generation
            )
        })
        .collect()
}

#[test]
fn an_apply_is_one_transaction_and_survives_opening_again() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    s.apply(
        &[
            put("alpha", "a", "1"),
            put("alpha", "b", "1"),
            put("beta", "a", "9"),
        ],
        Generation(1),
        100,
    )
    .unwrap();
    s.apply(
        &[
            put("alpha", "a", "2"),
            ObjectEdit::Delete {
                key: key("alpha", "b"),
            },
            ObjectEdit::Delete {
                key: key("alpha", "none"),
            },
        ],
        Generation(2),
        200,
    )
    .unwrap();
    let want = ["alpha:a=2@2", "beta:a=9@1"];
    assert_eq!(names(&s), want);
    drop(s);
    let s = open(dir.path());
    assert_eq!(names(&s), want);
    assert_eq!(
        s.objects().unwrap()[0].created,
        100,
        "a change keeps the time of creation"
    );
    let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(s.path()), 0o600);
}

#[test]
fn limits_refuse_the_whole_apply() {
    let dir = tempfile::tempdir().unwrap();
    let limits = StoreLimits {
        // Each limit is so small that one case exceeds it by one.
        objects_per_tenant: 2,
        object_bytes: 8,
        edits: 3,
        ..StoreLimits::default()
    };
    let s = Store::open(dir.path(), limits).unwrap();
    s.apply(&[put("alpha", "a", "1")], Generation(1), 0)
        .unwrap();
    let cases: [(&str, Vec<ObjectEdit>, &str); 4] = [
        (
            "one object too many",
            vec![put("alpha", "b", "1"), put("alpha", "c", "1")],
            "objects_per_tenant",
        ),
        (
            "one byte too many",
            vec![put("alpha", "b", "1"), put("alpha", "a", "123456789")],
            "object_bytes",
        ),
        (
            "one edit too many",
            (0..4).map(|_| put("beta", "a", "1")).collect(),
            "edits",
        ),
        (
            "another tenant's free objects do not count",
            vec![
                put("beta", "a", "1"),
                put("beta", "b", "1"),
                put("beta", "c", "1"),
            ],
            "objects_per_tenant",
        ),
    ];
    for (what, edits, name) in cases {
        let e = s.apply(&edits, Generation(2), 0).unwrap_err();
        assert_eq!((e.name(), e.is_limit()), (name, true), "{what}: {e}");
        // The first write is all that there is after each refusal.
        assert_eq!(names(&s), ["alpha:a=1@1"], "{what}");
    }
    s.apply(&[put("alpha", "b", "12345678")], Generation(2), 0)
        .unwrap();
    s.apply(
        &[
            put("alpha", "c", "1"),
            ObjectEdit::Delete {
                key: key("alpha", "a"),
            },
        ],
        Generation(3),
        0,
    )
    .unwrap();
    assert_eq!(names(&s), ["alpha:b=12345678@2", "alpha:c=1@3"]);
}

#[test]
fn an_object_of_the_largest_size_is_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    let largest = "x".repeat(canal_store::OBJECT_BYTES_MAX);
    s.apply(&[put("alpha", "a", &largest)], Generation(1), 0)
        .unwrap();
    let e = s
        .apply(&[put("alpha", "b", &(largest + "x"))], Generation(2), 0)
        .unwrap_err();
    assert_eq!(e.name(), "object_bytes");
}

#[test]
fn service_ids_are_stable_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let services: Vec<ServiceKey> = ["alpha/shop/a", "beta/shop/a", "alpha/shop/b"]
        .iter()
        .map(|s| s.parse().unwrap())
        .collect();
    let s = open(dir.path());
    let first = s.service_ids(&services, 1).unwrap();
    assert_eq!(
        first
            .values()
            .collect::<std::collections::HashSet<_>>()
            .len(),
        3
    );
    assert_eq!(s.release_service_ids(|k| *k == services[0], 2).unwrap(), 2);
    assert_eq!(
        s.release_service_ids(|k| *k == services[0], 3).unwrap(),
        0,
        "released once"
    );
    drop(s);
    let s = open(dir.path());
    assert_eq!(
        s.service_ids(&services, 4).unwrap(),
        first,
        "the same names get the same ids back"
    );
    let new: ServiceKey = "gamma/shop/a".parse().unwrap();
    let id = s.service_ids(std::slice::from_ref(&new), 5).unwrap()[&new];
    assert!(!first.values().any(|v| *v == id));
}

#[test]
fn service_ids_run_out_loudly_and_come_back_after_the_quarantine() {
    let dir = tempfile::tempdir().unwrap();
    let s = Store::open(
        dir.path(),
        StoreLimits {
            service_ids: 2,
            ..StoreLimits::default()
        },
    )
    .unwrap();
    let k = |n: &str| -> ServiceKey { format!("alpha/shop/{n}").parse().unwrap() };
    let b = s.service_ids(&[k("a"), k("b")], 10).unwrap()[&k("b")];
    assert_eq!(
        s.service_ids(&[k("c")], 10).unwrap_err().name(),
        "service_ids"
    );
    s.release_service_ids(|key| *key == k("a"), 20).unwrap();
    assert_eq!(
        s.service_ids(&[k("c")], 21).unwrap_err().name(),
        "service_ids",
        "still in quarantine"
    );
    let later = 20 + canal_store::SERVICE_ID_QUARANTINE_SECONDS;
    assert_eq!(s.service_ids(&[k("c")], later).unwrap()[&k("c")], b);
    drop(s);
    let s = Store::open(
        dir.path(),
        StoreLimits {
            service_ids: 2,
            ..StoreLimits::default()
        },
    )
    .unwrap();
    assert_eq!(s.service_ids(&[k("a"), k("c")], later).unwrap()[&k("c")], b);
}

#[test]
fn a_tenant_that_used_up_its_service_ids_leaves_the_others_theirs() {
    let dir = tempfile::tempdir().unwrap();
    let s = Store::open(
        dir.path(),
        StoreLimits {
            tenant_service_ids: 2,
            ..StoreLimits::default()
        },
    )
    .unwrap();
    let k = |n: &str| -> ServiceKey { n.parse().unwrap() };
    for name in ["alpha/shop/a", "alpha/shop/b"] {
        s.service_ids(&[k(name)], 10).unwrap();
        s.release_service_ids(|key| *key == k(name), 10).unwrap();
    }
    let refused = s.service_ids(&[k("alpha/shop/c")], 11).unwrap_err();
    assert!(
        refused.is_limit()
            && refused.name() == "tenant_service_ids"
            && refused.to_string().contains("tenant alpha"),
        "{refused}"
    );
    s.service_ids(&[k("beta/shop/c")], 11).unwrap();
    s.service_ids(&[k("alpha/shop/a")], 11).unwrap();
}

#[test]
fn a_store_keeps_its_id_and_another_store_has_other_ids() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let service: ServiceKey = "alpha/shop/a".parse().unwrap();
    let of = |dir: &tempfile::TempDir| {
        let store = open(dir.path());
        (
            store.id(),
            store
                .service_ids(std::slice::from_ref(&service), 1)
                .unwrap()[&service],
        )
    };
    let first = of(&dirs[0]);
    assert_eq!(of(&dirs[0]), first, "for ever");
    let second = of(&dirs[1]);
    assert!(
        second.0 != first.0 && second.1 != first.1,
        "{first:?} {second:?}"
    );
}

#[test]
fn a_second_controller_on_the_same_store_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path());
    let refused = Store::open(dir.path(), StoreLimits::default())
        .err()
        .unwrap();
    assert_eq!(refused.name(), "open");
    let text = refused.to_string();
    assert!(
        text.contains("another process has it open") && text.contains("--data-dir"),
        "{text}"
    );
    let id = first.id();
    drop(first);
    assert_eq!(
        open(dir.path()).id(),
        id,
        "the store opens once the first process has ended"
    );
}

#[test]
fn a_preview_of_service_ids_assigns_none() {
    let dir = tempfile::tempdir().unwrap();
    let s = Store::open(
        dir.path(),
        StoreLimits {
            service_ids: 2,
            ..StoreLimits::default()
        },
    )
    .unwrap();
    let k = |n: &str| -> ServiceKey { format!("alpha/shop/{n}").parse().unwrap() };
    let a = s.service_ids(&[k("a")], 1).unwrap()[&k("a")];
    let mut next = None;
    for other in ["b", "c", "d"] {
        let preview = s.preview_service_ids(&[k("a"), k(other)], 2).unwrap();
        assert!(
            preview[&k("a")] == a && preview[&k(other)] != a,
            "{preview:?}"
        );
        assert_eq!(
            *next.get_or_insert(preview[&k(other)]),
            preview[&k(other)],
            "nothing was given out"
        );
    }
    assert_eq!(
        s.preview_service_ids(&[k("b"), k("c")], 2)
            .unwrap_err()
            .name(),
        "service_ids"
    );
    assert_eq!(Some(s.service_ids(&[k("z")], 3).unwrap()[&k("z")]), next);
}

#[test]
fn tenants_keep_the_order_in_which_they_came() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    let t = |n: &str| TenantName::new(n).unwrap();
    for name in ["zeta", "alpha", "mid", "alpha"] {
        s.admit_tenant(&t(name), name == "mid").unwrap();
    }
    s.forget_tenant(&t("zeta")).unwrap();
    s.admit_tenant(&t("zeta"), true).unwrap();
    s.admit_tenant(&t("mid"), false).unwrap();
    drop(s);
    let s = open(dir.path());
    assert_eq!(s.tenants().unwrap(), [t("alpha"), t("mid"), t("zeta")]);
    assert_eq!(
        ["alpha", "mid", "zeta", "none"].map(|n| s.has_files(&t(n)).unwrap()),
        [false, false, true, false]
    );
}

#[test]
fn generations_never_go_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut last = 0;
    for round in 0..4 {
        let s = open(dir.path());
        for _ in 0..3 {
            let g = s.next_generation().unwrap().0;
            assert!(g > last, "round {round}: {g} after {last}");
            last = g;
        }
        if round % 2 == 0 {
            s.settle().unwrap();
            let exact = s.generation().0;
            drop(s);
            assert_eq!(
                open(dir.path()).generation().0,
                exact,
                "an orderly end leaves no gap"
            );
        }
    }
}

#[test]
fn the_reserve_is_renewed_before_it_is_used_up() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    let n = canal_store::GENERATIONS_RESERVED * 2;
    for want in 1..=n {
        assert_eq!(s.next_generation().unwrap().0, want);
    }
    drop(s);
    assert!(open(dir.path()).generation().0 >= n);
}

#[test]
fn an_unusable_folder_or_file_has_a_fix() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    let foreign = dir.path().join("foreign");
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(
        foreign.join("controller.redb"),
        "this is not a database, and longer than a few bytes".repeat(200),
    )
    .unwrap();
    let held = dir.path().join("held");
    let _keeper = open(&held);
    for (what, path, fix) in [
        ("a file in the folder's place", file, "--data-dir"),
        ("a foreign file", foreign, "store"),
        ("held", held, "stop the other"),
    ] {
        let Err(e) = Store::open(&path, StoreLimits::default()) else {
            panic!("{what}: opened")
        };
        assert!(e.to_string().contains(fix), "{what}: {e}");
    }
}

#[test]
fn a_newer_layout_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = open(dir.path()).path().to_path_buf();
    let db = redb::Database::create(&path).unwrap();
    let tx = db.begin_write().unwrap();
    tx.open_table(redb::TableDefinition::<&str, u64>::new("counters"))
        .unwrap()
        .insert("layout", 7)
        .unwrap();
    tx.commit().unwrap();
    drop(db);
    let Err(e) = Store::open(dir.path(), StoreLimits::default()) else {
        panic!("opened")
    };
    assert!(matches!(e, StoreError::Layout { layout: 7, .. }), "{e}");
}

// ---- fleet ----

fn register(s: &Store, name: &str) -> Result<StoredReplica, StoreError> {
    let az: AzName = "az1".parse().unwrap();
    s.register(
        &name.parse().unwrap(),
        &"b1".parse().unwrap(),
        (&az, 1),
        Ipv4Addr::new(250, 1, 0, 9),
    )
}

fn planned(n: u32, version: u32, heads: &[u32]) -> (ServiceId, PlannedService) {
    let member = |bucket: usize| ChainMember {
        replica: ReplicaNumber::new(heads[bucket % heads.len()]).unwrap(),
        owner_until_version: 0,
    };
    let chains = (0..BUCKETS).map(|bucket| vec![member(bucket)]).collect();
    let table = PlannedTable {
        version,
        confirmed: version,
        reports_received: 5,
        closing: 0,
        chains,
    };
    let service = PlannedService {
        key: format!("alpha/shop/s{n}").parse().unwrap(),
        vni: Vni::new(1).unwrap(),
        number: n,
        network: None,
        placement: None,
        tables: [("az1".parse().unwrap(), std::sync::Arc::new(table))].into(),
    };
    (ServiceId::new(n).unwrap(), service)
}

#[test]
fn replicas_keep_the_lowest_free_number_until_they_are_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    let number = |s: &Store, name: &str| register(s, name).unwrap().number.get();
    assert_eq!(["a", "b", "c", "a"].map(|n| number(&s, n)), [1, 2, 3, 1]);
    let mut b = register(&s, "b").unwrap();
    (b.state, b.drain) = (ReplicaState::Active, true);
    s.put_replica(&b).unwrap();
    let row = |name: &str, n| StoredEdge {
        // Both edges of the AZ share one anycast address.
        name: name.parse().unwrap(),
        az: "az2".parse().unwrap(),
        underlay: Ipv4Addr::new(250, 2, 0, n),
        anycast: Some(Ipv4Addr::new(250, 2, 255, 1)),
    };
    // e1 replaces e0 below and has its address.
    let (edge, second) = (row("e1", 2), row("e2", 3));
    // The AZ's number is 2.
    s.put_edge(&row("e0", 2), &[], 2).unwrap();
    s.put_edge(&second, &[], 2).unwrap();
    s.put_edge(&edge, &["e0".parse().unwrap()], 2).unwrap();
    let before = s.fleet().unwrap();
    // Only one handle may have the file open.
    drop(s);
    let s = open(dir.path());
    assert_eq!(s.fleet().unwrap(), before);
    assert_eq!(
        (
            before.replicas.len(),
            &before.replicas[1],
            &before.edges[..]
        ),
        (3, &b, &[edge.clone(), second][..])
    );
    s.forget_edge(&"e2".parse().unwrap()).unwrap();
    assert_eq!(s.fleet().unwrap().edges, [edge]);
    assert_eq!(before.azs.values().copied().collect::<Vec<_>>(), [1, 2]);
    s.forget_replica(&"a".parse().unwrap()).unwrap();
    s.forget_replica(&"nobody".parse().unwrap()).unwrap();
    assert_eq!(
        ["d", "a"].map(|n| number(&s, n)),
        [1, 4],
        "a freed number is given to the next, and only to one"
    );
    assert!(
        register(&s, "b").unwrap().drain,
        "an order to drain outlives a new registration"
    );
}

#[test]
fn replica_numbers_end() {
    let dir = tempfile::tempdir().unwrap();
    let s = Store::open(
        dir.path(),
        StoreLimits {
            replica_numbers: 2,
            ..StoreLimits::default()
        },
    )
    .unwrap();
    register(&s, "a").unwrap();
    register(&s, "b").unwrap();
    let refused = register(&s, "c").unwrap_err();
    assert!(
        refused.is_limit()
            && refused.name() == "replica_numbers"
            && refused.to_string().contains("all 2 are in use"),
        "{refused}"
    );
    assert_eq!(s.fleet().unwrap().replicas.len(), 2, "nothing was changed");
    s.forget_replica(&"b".parse().unwrap()).unwrap();
    assert_eq!(register(&s, "c").unwrap().number.get(), 2);
}

#[test]
fn a_plan_replaces_the_stored_one_completely() {
    let dir = tempfile::tempdir().unwrap();
    let s = open(dir.path());
    assert_eq!(s.plan().unwrap(), Plan::default());
    let first = Plan {
        number: 1,
        parent: 0,
        services: [planned(1, 1, &[1]), planned(2, 1, &[2])].into(),
        notes: vec![],
    };
    s.put_plan(Some(&Plan::default()), &first).unwrap();
    let note = UnmetConstraint::NoBackend {
        service: "alpha/shop/s3".parse().unwrap(),
    };
    let second = Plan {
        number: 2,
        parent: 1,
        services: [planned(2, 2, &[1, 2]), planned(3, 2, &[1])].into(),
        notes: vec![note],
    };
    s.put_plan(Some(&first), &second).unwrap();
    drop(s);
    let s = open(dir.path());
    assert_eq!(s.plan().unwrap(), second);
    // The state on disk is not certain, so every service is written.
    let third = Plan {
        number: 3,
        parent: 2,
        services: [planned(9, 3, &[4])].into(),
        notes: vec![],
    };
    s.put_plan(None, &third).unwrap();
    assert_eq!(s.plan().unwrap(), third);
}

#[test]
fn a_moved_row_keeps_its_time_and_generation_and_yields_to_a_newer_one() {
    let dir = tempfile::tempdir().unwrap();
    let limits = StoreLimits {
        objects_per_tenant: 3,
        ..StoreLimits::default()
    };
    let store = Store::open(dir.path(), limits).unwrap();
    let edits = [
        put("alpha", "a", "old a"),
        put("alpha", "b", "old b"),
        put("alpha", "c", "newer b"),
    ];
    store.apply(&edits, Generation(1), 100).unwrap();
    let moved = |from: &str, to: &str| ObjectMove {
        from: key("alpha", from),
        to: key("alpha", to),
        yaml: format!("new {from}"),
    };
    store.move_objects(&[]).unwrap();
    // The first row moves, the second finds a newer one, the third is gone.
    let moves = [moved("a", "d"), moved("b", "c"), moved("none", "e")];
    store.move_objects(&moves).unwrap();
    let expected = ["alpha:c=newer b@1", "alpha:d=new a@1"];
    assert_eq!(names(&store), expected);
    assert!(store.objects().unwrap().iter().all(|o| o.created == 100));
    // The limit counts the rows that are left.
    store
        .apply(&[put("alpha", "e", "")], Generation(2), 100)
        .unwrap();
    let refused = store.apply(&[put("alpha", "f", "")], Generation(3), 100);
    assert!(matches!(refused, Err(StoreError::ObjectsPerTenant { .. })));
    drop(store);
    let again = Store::open(dir.path(), limits).unwrap();
    assert_eq!(names(&again)[..2], expected);
}

#[test]
fn a_moved_row_replaces_one_with_an_earlier_generation() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), StoreLimits::default()).unwrap();
    let apply = |name: &str, yaml: &str, generation| {
        let edits = [put("alpha", name, yaml)];
        store.apply(&edits, Generation(generation), 100).unwrap();
    };
    // An operator went back to the earlier release, which knows only the old key.
    apply("new", "before", 1);
    apply("old", "after", 2);
    let moves = [ObjectMove {
        from: key("alpha", "old"),
        to: key("alpha", "new"),
        yaml: "after, renamed".to_owned(),
    }];
    store.move_objects(&moves).unwrap();
    assert_eq!(names(&store), ["alpha:new=after, renamed@2"]);
}
