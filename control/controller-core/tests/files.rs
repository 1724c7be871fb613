//! Tests of the configuration directory as a source: changes take effect, accidents do not.

use std::fs;
use std::time::{Duration, Instant};

use crate::fixture::{
    ControllerFixture, ManualSubscriber, ReceivedResources, errors, gateway, pod, service, tenant,
    tenant_object, wait_limit,
};
use canal_model::program::ResourceKind;

fn ready(held: &ReceivedResources, name: &str) -> Option<bool> {
    held.get(&(ResourceKind::Workload, format!("alpha/shop/{name}")))
        .map(|(_, r)| match r {
            canal_model::program::Resource::Workload(w) => w.ready,
            _ => false,
        })
}

async fn findings(fixture: &ControllerFixture, part: &str) {
    let mut root = fixture.admin("root").await;
    let until = Instant::now() + wait_limit();
    loop {
        let found = errors(&root.status().await.diagnostics);
        if found.iter().any(|f| f.contains(part)) {
            return;
        }
        assert!(Instant::now() < until, "{part:?} is not in {found:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn readiness_and_pods_follow_the_files() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut s = fixture.subscribe("g1").await;
    s.settle().await;
    fixture.write("alpha/pods/ignored.yaml", "");
    fixture.write("alpha/c-0.yaml", &pod(1, "c-0", "a", "n1", 5, false));
    s.until("a pod that is not ready", |h| {
        ready(h, "c-0") == Some(false)
    })
    .await;
    fixture.write("alpha/c-0.yaml", &pod(1, "c-0", "a", "n1", 5, true));
    s.until("its readiness", |h| ready(h, "c-0") == Some(true))
        .await;
    fs::remove_file(fixture.path("alpha/c-0.yaml")).unwrap();
    s.until("its end", |h| ready(h, "c-0").is_none()).await;
    assert_eq!(
        s.log.last().map(String::as_str),
        Some("Workload -alpha/shop/c-0")
    );
}

#[tokio::test]
async fn a_new_tenant_appears_without_a_restart() {
    let fixture = ControllerFixture::empty().await;
    let mut s = fixture.subscribe("n1").await;
    s.settle().await;
    fixture.write("alpha/mesh.yaml", &tenant("alpha", 1));
    s.until("the tenant", |h| {
        h.contains_key(&(ResourceKind::Service, "alpha/shop/b".into()))
    })
    .await;
}

#[tokio::test]
async fn accidents_take_nothing_away() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut s = fixture.subscribe("g1").await;
    s.settle().await;
    let held = s.names();
    let aside = fixture.dir.path().join("aside");

    let text = tenant("alpha", 1);
    // The mapping in which the file ends is not closed.
    let cut = text.find("clusterIP").expect("a Service with an address");
    fixture.write("alpha/mesh.yaml", &text[..cut]);
    // The diagnostic proves that the controller read the damaged file before the subscriber
    // settles.
    findings(&fixture, "mesh.yaml").await;
    assert_eq!(
        (s.settle().await, s.names()),
        (vec![], held.clone()),
        "a file cut off in the middle"
    );
    fixture.write("alpha/mesh.yaml", &tenant("alpha", 1));

    fs::rename(fixture.path("alpha"), &aside).unwrap();
    findings(&fixture, "vanished").await;
    assert_eq!(
        (s.settle().await, s.names()),
        (vec![], held.clone()),
        "the folder was removed"
    );
    assert!(
        fixture
            .metric("canal_controller_source_stale_seconds{tenant=\"alpha\"}")
            .await
            > 0.0
    );
    fs::rename(&aside, fixture.path("alpha")).unwrap();

    fs::rename(fixture.path(""), &aside).unwrap();
    findings(&fixture, "the configuration directory cannot be read").await;
    assert_eq!(
        (s.settle().await, s.names()),
        (vec![], held),
        "the configuration directory was removed"
    );
    fs::rename(&aside, fixture.path("")).unwrap();
}

#[tokio::test]
async fn an_emptied_folder_is_meant() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut s = fixture.subscribe("n1").await;
    s.settle().await;
    fs::remove_file(fixture.path("alpha/mesh.yaml")).unwrap();
    // The trust bundle of Canal's own components stays: it is not the tenant's.
    s.until("the end of all that is alpha's", |h| {
        h.keys()
            .all(|(_, name)| name == "canal-system/components.canal")
    })
    .await;
    fs::remove_dir(fixture.path("alpha")).unwrap();
    let mut root = fixture.admin("root").await;
    let until = Instant::now() + wait_limit();
    while root.status().await.tenants.len() > 1 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(
        root.status().await.tenants.len(),
        1,
        "the tenant is forgotten"
    );
}

#[tokio::test]
async fn accidents_across_a_restart_take_nothing_away_either() {
    type Accident = fn(&ControllerFixture);
    let accidents: [(&str, Accident); 3] = [
        ("the folder vanished", |r| {
            fs::rename(r.path("alpha"), r.dir.path().join("aside")).unwrap()
        }),
        // The services were behind the cut, and must not count as removed.
        ("the file is cut off", |r| {
            r.write(
                "alpha/mesh.yaml",
                &(tenant_object("alpha", 1) + "---\n" + &gateway(1, "g1") + "---\nkind: ["),
            )
        }),
        ("the file is another thing", |r| {
            fs::remove_file(r.path("alpha/mesh.yaml")).unwrap();
            fs::create_dir(r.path("alpha/mesh.yaml")).unwrap();
        }),
    ];
    for (what, accident) in accidents {
        let mut fixture = ControllerFixture::two_tenants().await;
        let mut s = fixture.subscribe("n1").await;
        s.settle().await;
        let (names, held) = (s.names(), s.resources.clone());
        drop(s);
        fixture.stop().await;
        accident(&fixture);
        fixture.start().await;
        // The subscriber returns with what it held, so a removal would be in its first response.
        let mut s = ManualSubscriber::open(fixture.channel().await, "n1", held).await;
        s.settle().await;
        assert_eq!(s.names(), names, "{what}");
        // After the accident, changes of the files still take effect.
        // Only in one of the accidents a directory has the file's name.
        let _ = fs::remove_dir(fixture.path("alpha/mesh.yaml"));
        fixture.write(
            "alpha/mesh.yaml",
            &(tenant("alpha", 1).replace("name: b,", "name: c,")),
        );
        s.until("the fixed files", |h| {
            h.contains_key(&(ResourceKind::Service, "alpha/shop/c".into()))
                && !h.contains_key(&(ResourceKind::Service, "alpha/shop/b".into()))
        })
        .await;
    }
}

#[tokio::test]
async fn a_file_owns_its_objects() {
    let fixture = ControllerFixture::two_tenants().await;
    let mut ann = fixture.admin("ann").await;
    let refused = ann.apply("alpha", &[&service(1, "a", 77)]).await.unwrap();
    let found = errors(&refused.diagnostics);
    assert!(
        !refused.accepted && found[0].contains("mesh.yaml"),
        "{found:?}"
    );
    let refused = ann
        .delete("alpha", &[("svc", "shop", "a")], true)
        .await
        .unwrap();
    assert!(!refused.accepted && errors(&refused.diagnostics)[0].contains("mesh.yaml"));
    // A file later contains an object that was applied: the file wins, and the tenant gets a
    // warning.
    ann.must_apply("alpha", &[&service(1, "c", 3)]).await;
    fixture.write("alpha/more.yaml", &service(1, "c", 4));
    let until = Instant::now() + wait_limit();
    while ann.status().await.tenants[0].warnings == 0 && Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(
        ann.names("alpha", "svc")
            .await
            .contains(&"Service shop/c (more.yaml)".to_string())
    );
    fs::remove_file(fixture.path("alpha/more.yaml")).unwrap();
    while !ann
        .names("alpha", "svc")
        .await
        .contains(&"Service shop/c (api)".to_string())
    {
        assert!(Instant::now() < until);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn service_ids_survive_everything() {
    let mut fixture = ControllerFixture::two_tenants().await;
    let id = |s: &ManualSubscriber, name: &str| match s
        .resources
        .get(&(ResourceKind::Service, name.to_string()))
    {
        Some((_, canal_model::program::Resource::Service(s))) => s.id.get(),
        other => panic!("{name}: {other:?}"),
    };
    let mut s = fixture.subscribe("n1").await;
    s.settle().await;
    let (a, b) = (id(&s, "alpha/shop/a"), id(&s, "alpha/shop/b"));
    let mut m = fixture.subscribe("m1").await;
    m.settle().await;
    let others = [id(&m, "beta/shop/a"), id(&m, "beta/shop/b")];
    assert!(
        a != b && !others.contains(&a) && !others.contains(&b),
        "unique across tenants"
    );
    fixture.write(
        "alpha/mesh.yaml",
        &tenant("alpha", 1).replace("metadata: {name: b,", "metadata: {name: z,"),
    );
    s.until("b's end", |h| {
        !h.contains_key(&(ResourceKind::Service, "alpha/shop/b".into()))
    })
    .await;
    fixture.stop().await;
    fixture.write("alpha/mesh.yaml", &tenant("alpha", 1));
    fixture.start().await;
    let mut s = fixture.subscribe("n1").await;
    s.settle().await;
    assert_eq!((id(&s, "alpha/shop/a"), id(&s, "alpha/shop/b")), (a, b));
}
