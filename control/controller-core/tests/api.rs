//! Tests of the operators' API: an apply is carried out completely or not at all, and a refusal
//! states its reasons. Tenants do not affect each other.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::fixture::{
    ControllerFixture, Operator, errors, gateway, route, service, tenant, tenant_object, wait_limit,
};
use canal_controller_core::{ControllerLimits, FILES_MAX};
use canal_model::program::ResourceKind;
use canal_wire::api::change::ChangeKind;
use tonic::Code;

fn whats(changes: &[canal_wire::api::Change]) -> Vec<String> {
    changes
        .iter()
        .map(|c| format!("{:?} {} {}/{}", c.what(), c.kind, c.namespace, c.name))
        .collect()
}

#[tokio::test]
async fn an_apply_is_refused_whole_with_all_its_errors() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut ann = fixture.admin("ann").await;
    let mut s = fixture.subscribe("g1").await;
    s.settle().await;
    // The values to which the refused apply must not add.
    let (before, generation) = (ann.names("alpha", "").await, ann.status().await.generation);
    let broken_route = route("bad", "a", &[("nowhere", 1)]);
    // One apply with four kinds of errors: an unknown field, a missing backend, broken YAML, and an
    // object of the provider.
    let typo = service(1, "typo", 9).replace("selector", "selektor");
    let refused = ann
        .apply(
            "alpha",
            &[
                &service(1, "good", 8),
                &typo,
                &broken_route,
                "kind: [",
                &tenant_object("alpha", 9),
            ],
        )
        .await
        .unwrap();
    assert!(!refused.accepted && refused.changes.is_empty());
    let found = errors(&refused.diagnostics).join("\n");
    for part in [
        "f1.yaml:4 Service shop/typo spec.selektor",
        "f2.yaml:",
        "nowhere",
        "f3.yaml:1",
        "only the provider",
    ] {
        assert!(found.contains(part), "{part} is not in\n{found}");
    }
    assert!(refused.diagnostics.iter().all(|d| !d.fix.is_empty()));
    assert_eq!(ann.names("alpha", "").await, before, "nothing was changed");
    assert_eq!(
        (s.settle().await, ann.status().await.generation),
        (vec![], generation),
        "nothing was published"
    );
}

/// Checks that a dry run and a diff report a change of a service and another new one, and apply
/// neither.
async fn dry_run_and_diff_change_nothing(ann: &mut Operator, second: &str, generation: u64) {
    let dry = ann.dry_run("alpha", &[second]).await.unwrap();
    assert!(dry.accepted && whats(&dry.changes) == ["Changed Service shop/c"]);
    let diff = ann
        .diff("alpha", &[second, &service(1, "d", 5)])
        .await
        .unwrap();
    let texts: Vec<(ChangeKind, Vec<&str>)> = diff
        .changes
        .iter()
        .map(|c| {
            (
                c.what(),
                c.diff
                    .lines()
                    .filter(|l| l.starts_with(['+', '-']) && l.contains("clusterIP"))
                    .collect(),
            )
        })
        .collect();
    assert_eq!(texts.len(), 2);
    assert!(
        texts[0].0 == ChangeKind::Changed
            && texts[0].1.len() == 2
            && texts[0].1[0].starts_with('-')
            && texts[0].1[1].starts_with('+'),
        "{texts:?}"
    );
    assert!(
        texts[1].0 == ChangeKind::Created && texts[1].1.len() == 1,
        "{texts:?}"
    );
    assert_eq!(
        ann.status().await.generation,
        generation,
        "neither changed anything"
    );
}

/// Checks the delete of a service that a route names, of one that is missing, and of an unknown
/// kind.
async fn delete_with_warnings(ann: &mut Operator) {
    // The route still names the service: the delete is accepted, and the operator is warned of what
    // it breaks.
    let gone = ann
        .delete("alpha", &[("service", "shop", "c")], false)
        .await
        .unwrap();
    assert!(gone.accepted && !gone.diagnostics.is_empty(), "{gone:?}");
    let missing = ann
        .delete(
            "alpha",
            &[("service", "shop", "c"), ("moon", "", "x")],
            false,
        )
        .await
        .unwrap();
    assert!(
        !missing.accepted && errors(&missing.diagnostics).len() == 2,
        "{missing:?}"
    );
    assert!(
        ann.delete("alpha", &[("service", "shop", "c")], true)
            .await
            .unwrap()
            .accepted
    );
}

#[tokio::test]
async fn objects_live_and_die_by_the_api() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut ann = fixture.admin("ann").await;
    // The two versions of the Service differ in their address only.
    let (first, second) = (service(1, "c", 3), service(1, "c", 4));
    let done = ann
        .apply(
            "alpha",
            &[&format!("{first}---\n{}", route("r", "c", &[("a", 1)]))],
        )
        .await
        .unwrap();
    assert_eq!(
        whats(&done.changes),
        ["Created Service shop/c", "Created HTTPRoute shop/r"]
    );
    let again = ann.apply("alpha", &[&first]).await.unwrap();
    assert_eq!(
        (whats(&again.changes), again.generation),
        (vec!["Unchanged Service shop/c".into()], done.generation),
        "an unchanged object makes no generation"
    );

    dry_run_and_diff_change_nothing(&mut ann, &second, done.generation).await;

    let changed = ann.apply("alpha", &[&second]).await.unwrap();
    assert!(changed.generation > done.generation);
    let object = ann
        .get("alpha", "svc")
        .await
        .unwrap()
        .into_iter()
        .find(|o| o.name == "c")
        .unwrap();
    assert_eq!(
        (
            object.api_version.as_str(),
            object.origin.as_str(),
            object.yaml.as_str()
        ),
        ("v1", "api", second.as_str())
    );
    // Kinds are accepted as kubectl does, in the plural and with capitals too.
    let listed = ann.names("alpha", "Services").await;
    assert_eq!(
        listed,
        [
            "Service shop/a (mesh.yaml)",
            "Service shop/b (mesh.yaml)",
            "Service shop/c (api)"
        ]
    );

    delete_with_warnings(&mut ann).await;
}

#[tokio::test]
async fn an_apply_may_not_break_other_objects() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut ann = fixture.admin("ann").await;
    ann.must_apply(
        "alpha",
        &[&service(1, "c", 3), &route("r", "c", &[("c", 1)])],
    )
    .await;
    let other_port = service(1, "c", 3).replace("port: 80", "port: 81");
    let refused = ann.apply("alpha", &[&other_port]).await.unwrap();
    assert!(
        !refused.accepted && errors(&refused.diagnostics)[0].contains("HTTPRoute shop/r"),
        "{refused:?}"
    );
    let both = ann
        .apply(
            "alpha",
            &[
                &other_port,
                &route("r", "c", &[("c", 1)]).replace("port: 80", "port: 81"),
            ],
        )
        .await
        .unwrap();
    assert!(both.accepted, "{:?}", errors(&both.diagnostics));
}

#[tokio::test]
async fn an_old_error_in_another_object_does_not_block_an_apply() {
    let fixture = ControllerFixture::two_tenants().await;
    fixture.write(
        "alpha/broken.yaml",
        &route("broken", "a", &[("nowhere", 1)]),
    );
    let mut ann = fixture.admin("ann").await;
    let until = Instant::now() + wait_limit();
    while ann.status().await.tenants[0].errors == 0 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    ann.must_apply("alpha", &[&service(1, "c", 3)]).await;
    let shown = ann.get("alpha", "httproute").await.unwrap();
    assert!(
        shown[0].diagnostics[0].problem.contains("nowhere"),
        "{:?}",
        shown[0]
    );
}

/// Checks that a tenant's operator changes no object of the provider.
async fn refuse_provider_objects(ann: &mut Operator) {
    for yaml in [tenant_object("alpha", 9), gateway(1, "g7")] {
        let refused = ann.apply("alpha", &[&yaml]).await.unwrap();
        assert!(
            !refused.accepted && errors(&refused.diagnostics)[0].contains("provider"),
            "{refused:?}"
        );
    }
    let refused = ann
        .delete(
            "alpha",
            &[("tenant", "", "alpha"), ("gatewayreplica", "", "g1")],
            false,
        )
        .await
        .unwrap();
    assert_eq!((refused.accepted, refused.changes.len()), (false, 0));
}

/// Checks that the status has the tenants and subscribers that an operator may see, and no others.
async fn check_visible_status(ann: &mut Operator, bob: &mut Operator, root: &mut Operator) {
    let seen = |s: &canal_wire::api::StatusResponse| {
        let tenants: Vec<String> = s.tenants.iter().map(|t| t.tenant.clone()).collect();
        (
            tenants,
            s.subscribers
                .iter()
                .map(|s| s.name.clone())
                .collect::<Vec<_>>(),
        )
    };
    assert_eq!(
        seen(&ann.status().await),
        (vec!["alpha".into()], vec!["n1".into()])
    );
    assert_eq!(
        seen(&bob.status().await),
        (vec!["beta".into()], vec!["m1".into()])
    );
    assert_eq!(
        seen(&root.status().await),
        (
            vec!["alpha".into(), "beta".into()],
            vec!["m1".into(), "n1".into()]
        )
    );
}

#[tokio::test]
async fn operators_stay_within_their_tenant() {
    let fixture = ControllerFixture::two_tenants().await;
    let (mut ann, mut bob, mut root) = (
        fixture.admin("ann").await,
        fixture.admin("bob").await,
        fixture.admin("root").await,
    );
    let mut n1 = fixture.admin("n1").await;
    // Connected data planes appear in each operator's status below.
    let (_s1, _s2) = (fixture.subscribe("n1").await, fixture.subscribe("m1").await);
    let text = service(1, "c", 3);
    let codes = [
        (
            "another tenant's objects: apply",
            ann.apply("beta", &[&text]).await.err().map(|e| e.code()),
        ),
        (
            "diff",
            ann.diff("beta", &[&text]).await.err().map(|e| e.code()),
        ),
        ("get", ann.get("beta", "").await.err().map(|e| e.code())),
        (
            "a tenant that is not there",
            // The same code as for another tenant, so that an operator cannot probe which tenants
            // exist.
            ann.get("gamma", "").await.err().map(|e| e.code()),
        ),
        (
            "delete",
            ann.delete("beta", &[("svc", "shop", "a")], false)
                .await
                .err()
                .map(|e| e.code()),
        ),
        ("a node", n1.get("alpha", "").await.err().map(|e| e.code())),
    ];
    for (what, code) in codes {
        assert_eq!(code, Some(Code::PermissionDenied), "{what}");
    }
    // The provider's operator has no tenant of its own, so it must name one.
    assert_eq!(
        root.get("", "").await.unwrap_err().code(),
        Code::InvalidArgument
    );
    assert_eq!(
        root.get("gamma", "").await.unwrap_err().code(),
        Code::NotFound
    );
    assert_eq!(
        root.get("alpha", "moon").await.unwrap_err().code(),
        Code::InvalidArgument
    );
    assert_eq!(
        fixture
            .admin("nobody")
            .await
            .get("alpha", "")
            .await
            .unwrap_err()
            .code(),
        Code::Unauthenticated
    );

    refuse_provider_objects(&mut ann).await;

    check_visible_status(&mut ann, &mut bob, &mut root).await;
    assert_eq!(
        // The tenant has the two services of its files.
        ann.get("", "svc").await.unwrap().len(),
        2,
        "without a tenant, an operator sees its own"
    );
}

#[tokio::test]
async fn a_tenant_can_be_made_and_unmade_by_the_provider() {
    let fixture = ControllerFixture::empty().await;
    let mut root = fixture.admin("root").await;
    let early = root.apply("alpha", &[&service(1, "a", 1)]).await.unwrap();
    assert!(
        !early.accepted && errors(&early.diagnostics)[0].contains("no Tenant object"),
        "{early:?}"
    );
    root.must_apply("alpha", &[&tenant("alpha", 1)]).await;
    let mut n1 = fixture.subscribe("n1").await;
    n1.settle().await;
    assert!(n1.has(ResourceKind::Service, "alpha/shop/a"));
    assert_eq!(root.get("alpha", "").await.unwrap().len(), 6);
    let all = [
        ("tenant", "", "alpha"),
        ("gatewayreplica", "", "g1"),
        ("svc", "shop", "a"),
        ("svc", "shop", "b"),
        ("pod", "shop", "a-0"),
        ("pod", "shop", "b-0"),
    ];
    assert!(root.delete("alpha", &all, false).await.unwrap().accepted);
    n1.settle().await;
    assert_eq!(
        n1.names(),
        ["Bundle canal-system/components.canal"],
        "what is no tenant's stays"
    );
    assert_eq!(
        root.get("alpha", "").await.unwrap_err().code(),
        Code::NotFound
    );
}

#[tokio::test]
async fn a_new_tenant_cannot_claim_values_of_an_existing_tenant() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut root = fixture.admin("root").await;
    let cases = [
        (
            "the same VNI",
            // Another pod range than alpha's, so that only the VNI is the same.
            tenant_object("gamma", 1).replace("10.1.", "10.3."),
        ),
        (
            "the same trust domain",
            tenant_object("gamma", 3).replace("gamma.example", "alpha.example"),
        ),
        (
            // 10.1.7.0/24 lies inside alpha's pod range, 10.1.0.0/16.
            "the same pod range",
            tenant_object("gamma", 3).replace("10.3.0.0/16", "10.1.7.0/24"),
        ),
    ];
    for (what, yaml) in cases {
        let refused = root.apply("gamma", &[&yaml]).await.unwrap();
        assert!(
            !refused.accepted && errors(&refused.diagnostics)[0].contains("alpha"),
            "{what}: {refused:?}"
        );
    }
    // An older tenant cannot push a younger one out either: the tenant that changes yields.
    let mut s = fixture.subscribe("m1").await;
    s.settle().await;
    fixture.write(
        "alpha/mesh.yaml",
        &tenant("alpha", 1).replace("vni: 1,", "vni: 2,"),
    );
    let until = Instant::now() + wait_limit();
    while root.status().await.diagnostics.is_empty() && Instant::now() < until {
        // Polls are cheap; the deadline bounds the wait.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let found = errors(&root.status().await.diagnostics);
    assert!(found[0].contains("beta"), "{found:?}");
    assert_eq!(s.settle().await, [""; 0], "beta does not notice");
    let mut n1 = fixture.subscribe("n1").await;
    n1.settle().await;
    assert!(
        n1.has(ResourceKind::Tenant, "alpha") && n1.has(ResourceKind::Service, "alpha/shop/a"),
        "alpha's last good state stays"
    );
    assert!(
        fixture
            .metric("canal_controller_changes_withheld_total{reason=\"clash\"}")
            .await
            >= 1.0
    );
    // Once beta is gone, alpha's new VNI is free.
    // The 2 is beta's former VNI.
    fixture.write("beta/mesh.yaml", "");
    n1.until("the new VNI", |held| {
        held.values().any(
            |(_, r)| matches!(r, canal_model::program::Resource::Tenant(t) if t.vni.get() == 2),
        )
    })
    .await;
}

/// Opens the store of a controller that was stopped.
async fn open_store(fixture: &ControllerFixture) -> canal_store::Store {
    let until = Instant::now() + wait_limit();
    loop {
        match canal_store::Store::open(
            &fixture.config.data_dir,
            canal_store::StoreLimits::default(),
        ) {
            Ok(store) => return store,
            Err(e) => assert!(Instant::now() < until, "{e}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_store_of_an_earlier_release_has_its_gateways_moved_to_their_new_kind() {
    let mut fixture = ControllerFixture::two_tenants().await;
    // The row is written into the store, since the API would already use the new name.
    fixture.stop().await;
    let store = open_store(&fixture).await;
    let put = |kind: &str| canal_store::ObjectEdit::Put {
        key: canal_store::StoredObjectKey {
            tenant: "alpha".parse().unwrap(),
            kind: kind.into(),
            namespace: "default".into(),
            name: "gw-old".into(),
        },
        yaml: "# ours\napiVersion: canal.mesh/v1\nkind: Gateway\nmetadata: {name: gw-old}\n\
               spec: {az: az1, addresses: [10.1.255.77]}\n"
            .into(),
    };
    store
        // The creation time, 7, is checked below: moving a row keeps its age.
        .apply(&[put("Gateway")], store.next_generation().unwrap(), 7)
        .unwrap();
    drop(store);
    fixture.start().await;
    let mut root = fixture.admin("root").await;
    let replica = "GatewayReplica default/gw-old (api)".to_string();
    assert!(
        root.names("alpha", "gatewayreplica")
            .await
            .contains(&replica)
    );
    let notes = root.status().await.diagnostics;
    assert!(
        !notes.iter().any(|note| note.problem.contains("now called")),
        "what is stored has the new name: {notes:?}"
    );
    fixture.stop().await;
    let store = open_store(&fixture).await;
    let rows: Vec<_> = store
        .objects()
        .unwrap()
        .into_iter()
        .filter(|row| row.key.name == "gw-old")
        .collect();
    assert_eq!(rows.len(), 1, "{rows:?}");
    assert_eq!(
        (rows[0].key.kind.as_str(), rows[0].created),
        ("GatewayReplica", 7)
    );
    assert!(rows[0].yaml.starts_with("# ours\n") && rows[0].yaml.contains("kind: GatewayReplica"));
    drop(store);
    // An edit names the row by its new key, so that a deletion holds after the next start.
    fixture.start().await;
    let mut root = fixture.admin("root").await;
    let gone = root
        .delete("alpha", &[("gatewayreplica", "default", "gw-old")], false)
        .await
        .unwrap();
    assert!(gone.accepted, "{gone:?}");
    assert!(
        !root
            .names("alpha", "gatewayreplica")
            .await
            .contains(&replica)
    );
}

#[tokio::test]
async fn an_unreadable_row_is_reported_and_can_be_removed() {
    let mut fixture = ControllerFixture::two_tenants().await;
    fixture
        .admin("ann")
        .await
        .must_apply("alpha", &[&service(1, "c", 3)])
        .await;
    fixture.stop().await;
    let store = open_store(&fixture).await;
    let key = |name: &str| canal_store::StoredObjectKey {
        tenant: "alpha".parse().unwrap(),
        kind: "Service".into(),
        namespace: "shop".into(),
        name: name.into(),
    };
    // Rows that this build cannot read completely: broken YAML, and an unknown field.
    let edits = [
        canal_store::ObjectEdit::Put {
            key: key("torn"),
            yaml: "kind: [".into(),
        },
        canal_store::ObjectEdit::Put {
            key: key("odd"),
            yaml: service(1, "odd", 9).replace("selector", "selektor"),
        },
    ];
    store
        .apply(&edits, store.next_generation().unwrap(), 1)
        .unwrap();
    drop(store);
    fixture.start().await;
    let mut ann = fixture.admin("ann").await;
    let found = errors(&ann.status().await.diagnostics).join("\n");
    assert!(
        found.contains("Service shop/torn cannot be read") && found.contains("selektor"),
        "{found}"
    );
    assert!(
        ann.names("alpha", "svc")
            .await
            .contains(&"Service shop/c (api)".to_string()),
        "the other rows are in force"
    );
    assert!(
        ann.delete(
            "alpha",
            &[("svc", "shop", "torn"), ("svc", "shop", "odd")],
            false
        )
        .await
        .unwrap()
        .accepted
    );
    assert_eq!(errors(&ann.status().await.diagnostics), [""; 0]);
}

#[tokio::test]
async fn limits_refuse_by_name() {
    let store = canal_store::StoreLimits {
        // Three objects: two fill the tenant up to one free place, and an apply of two exceeds it.
        objects_per_tenant: 3,
        ..canal_store::StoreLimits::default()
    };
    let fixture = ControllerFixture::with(
        ControllerLimits {
            store,
            ..ControllerLimits::default()
        },
        |config| {
            std::fs::create_dir(config.join("alpha")).unwrap();
            std::fs::write(config.join("alpha/t.yaml"), tenant_object("alpha", 1)).unwrap();
        },
    )
    .await;
    let mut ann = fixture.admin("ann").await;
    ann.must_apply("alpha", &[&service(1, "a", 1), &service(1, "b", 2)])
        .await;
    let over = ann
        .apply("alpha", &[&service(1, "c", 3), &service(1, "d", 4)])
        .await
        .unwrap_err();
    assert!(
        over.code() == Code::ResourceExhausted && over.message().contains("at most 3"),
        "{over}"
    );
    assert_eq!(
        ann.names("alpha", "svc").await,
        ["Service shop/a (api)", "Service shop/b (api)"],
        "an apply is stored whole or not at all"
    );
    // The comment has 1.3 MiB, more than the 1 MiB of OBJECT_BYTES_MAX.
    let large = service(1, "c", 3) + &"# a long comment\n".repeat(80_000);
    let refused = ann.apply("alpha", &[&large]).await.unwrap();
    assert!(
        !refused.accepted && errors(&refused.diagnostics)[0].contains("bytes"),
        "{:?}",
        errors(&refused.diagnostics)
    );
    let many: Vec<String> = (0..=FILES_MAX).map(|_| String::new()).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert_eq!(
        ann.apply("alpha", &many).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    // An apply without objects is a mistake of the caller, and is no success.
    let empty = ann.apply("alpha", &[]).await.unwrap();
    assert!(!empty.accepted, "{empty:?}");
    assert!(
        fixture
            .metric("canal_controller_store_errors_total{reason=\"objects_per_tenant\"}")
            .await
            >= 1.0
    );
    assert!(
        fixture
            .metric("canal_controller_refused_total{reason=\"files\"}")
            .await
            >= 1.0
    );
}

/// Checks which pages each address serves, and metrics of the state.
async fn check_pages_and_metrics(
    fixture: &ControllerFixture,
    admin: SocketAddr,
    metrics: SocketAddr,
) {
    for (address, path, status) in [
        (admin, "/healthz/ready", "200"),
        (metrics, "/healthz/ready", "200"),
        // The metrics address may be open to other hosts, so it serves no state.
        (metrics, "/config_dump", "404"),
        (admin, "/nothing", "404"),
    ] {
        let answer = fixture.http(address, path).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")),
            "{path}: {answer}"
        );
    }
    // The caller subscribed one node, and each tenant of two_tenants has two services.
    for (line, want) in [
        ("canal_controller_subscribers{kind=\"node\"}", 1.0),
        ("canal_controller_subscribers_converged", 1.0),
        (
            "canal_controller_resources{tenant=\"alpha\",kind=\"Service\"}",
            2.0,
        ),
        (
            "canal_controller_source_stale_seconds{tenant=\"alpha\"}",
            0.0,
        ),
    ] {
        assert!(
            (fixture.metric(line).await - want).abs() < f64::EPSILON,
            "{line}"
        );
    }
    assert!(
        fixture
            .metric("canal_controller_response_bytes_total{type=\"Service\"}")
            .await
            > 0.0
    );
    // Each of the two tenants was compiled at least once.
    assert!(
        fixture
            .metric("canal_controller_compile_seconds_count")
            .await
            >= 2.0
    );
}

#[tokio::test]
async fn the_admin_pages_show_the_state_and_no_secret() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut s = fixture.subscribe("n1").await;
    s.settle().await;
    let (admin, metrics) = (
        fixture.controller().admin_address().unwrap(),
        fixture.controller().metrics_address().unwrap(),
    );
    let socket = fixture
        .config
        .data_dir
        .join(canal_runtime::admin::SOCKET_NAME);
    // The socket shows the state of all tenants, so only the controller's own user may connect.
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(socket).unwrap().permissions())
            & 0o777,
        0o600
    );
    let dump = fixture.ask_socket("/config_dump").await;
    let json: serde_json::Value =
        serde_json::from_str(dump.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    let names: Vec<&str> = json["tenants"]["alpha"]["resources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|r| r["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "alpha",
            "alpha/g1",
            "alpha/shop/a",
            "alpha/shop/b",
            "alpha/shop/a-0",
            "alpha/shop/b-0",
            "alpha/alpha.example"
        ]
    );
    assert_eq!(
        json["subscribers"][0]["acked"],
        json["subscribers"][0]["wanted"]
    );
    let one = fixture.ask_socket("/config_dump?tenant=beta").await;
    assert!(
        fixture
            .ask_socket("/metrics")
            .await
            .contains("canal_controller_generation")
    );
    // Over TCP any local user could read it, so the page names the socket instead.
    let on_tcp = fixture.http(admin, "/config_dump").await;
    assert!(
        on_tcp.starts_with("HTTP/1.1 403")
            && on_tcp.contains("curl --unix-socket")
            && !on_tcp.contains("alpha/shop"),
        "{on_tcp}"
    );
    assert!(!one.contains("alpha/shop") && one.contains("beta/shop"));
    assert!(!dump.contains("PRIVATE") && !dump.contains("tokenSha256"));
    check_pages_and_metrics(&fixture, admin, metrics).await;
}
