//! Tests that no tenant's work, bytes or mistakes at the controller delay or cost another tenant.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::fixture::{
    ControllerFixture, ManualSubscriber, Operator, errors, service, tenant_object, wait_limit,
    with_token,
};
use canal_controller_core::ControllerLimits;
use canal_model::program::ResourceKind;
use canal_model::share::{Share, ShareKind};
use canal_policy_sources::CHANGES_BYTES_MAX;
use canal_timing::timed;
use tonic::Code;

/// Waits for a condition.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + wait_limit();
    while !holds().await {
        assert!(Instant::now() < end, "{what} did not come");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn two_tenants(config: &std::path::Path) {
    for (name, n) in [("alpha", 1), ("beta", 2)] {
        std::fs::create_dir(config.join(name)).unwrap();
        std::fs::write(config.join(name).join("t.yaml"), tenant_object(name, n)).unwrap();
    }
}

/// Returns objects that take long to read, compile and compare.
fn large(services: usize) -> String {
    let mut text = String::new();
    for n in 0..services {
        let (a, b) = (n / 250, n % 250 + 1);
        let spec = format!(
            "clusterIP: 10.91.{a}.{b}, selector: {{app: x{n}}}, ports: [{{name: http, port: 80}}]"
        );
        write!(text, "---\napiVersion: v1\nkind: Service\nmetadata: {{name: x{n}, namespace: shop}}\nspec: {{{spec}}}\n").unwrap();
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn large_dry_runs_of_one_tenant_hold_up_no_other_change() {
    let fixture = ControllerFixture::with(
        ControllerLimits {
            // Two workers: one stays free while the first tenant's change is compiled.
            compile_workers: 2,
            ..ControllerLimits::default()
        },
        two_tenants,
    )
    .await;
    // 8,000 services take seconds to compile, which leaves time for the changes of others.
    let text = large(8_000);
    let mut diffs = tokio::task::JoinSet::new();
    let done = Arc::new(AtomicUsize::new(0));
    // Twice as many as there are workers.
    for _ in 0..4 {
        let (mut ann, text) = (fixture.admin("ann").await, text.clone());
        let done = done.clone();
        diffs.spawn(async move {
            ann.diff("alpha", &[&text]).await.unwrap();
            done.fetch_add(1, Ordering::Relaxed)
        });
    }
    // All four dry runs have arrived, and one is being prepared.
    let waiting = async || {
        fixture
            .metric("canal_share_used{limit=\"queued_changes\",tenant=\"alpha\"}")
            .await
    };
    let done = || done.load(Ordering::Relaxed);
    // A dry run that has already ended leaves fewer than four, and would never satisfy the first
    // part.
    until("four dry runs", async || {
        waiting().await >= 4.0 || done() > 0
    })
    .await;
    let mut bob = fixture.admin("bob").await;
    bob.must_apply("beta", &[&service(2, "a", 1)]).await;
    bob.diff("beta", &[&service(2, "b", 2)]).await.unwrap();
    fixture
        .admin("ann")
        .await
        .must_apply("alpha", &[&service(1, "mine", 9)])
        .await;
    let is_first = done() == 0 && waiting().await >= 4.0;
    timed!(
        is_first,
        "changes of others are in force before the first of four large dry runs is done"
    );
    // What is to be seen was seen, and the dry runs would take seconds more.
    diffs.abort_all();
}

#[tokio::test]
async fn changes_beyond_a_tenants_share_are_refused_by_name() {
    let mut limits = ControllerLimits::default();
    limits
        .shares
        .set(ShareKind::QueuedChangeBytes, Share::Amount(2_000));
    let fixture = ControllerFixture::with(limits, two_tenants).await;
    let (mut ann, mut bob, mut root) = (
        fixture.admin("ann").await,
        fixture.admin("bob").await,
        fixture.admin("root").await,
    );
    let text = service(1, "a", 1) + &"# more\n".repeat(500);
    let refused = ann.diff("alpha", &[&text]).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(
        refused
            .message()
            .contains("alpha has too many changes in progress (queued_change_bytes: share); fix: "),
        "{refused}"
    );
    bob.must_apply("beta", &[&service(2, "a", 1)]).await;
    root.diff("alpha", &[&text]).await.unwrap();
    let shares = ann.status().await.shares;
    assert!(
        shares.iter().all(|s| s.tenant == "alpha"),
        "a tenant sees its own: {shares:?}"
    );
    let refusals = |shares: &[canal_wire::api::ShareUse]| {
        shares
            .iter()
            .find(|s| s.tenant == "alpha" && s.limit == "queued_change_bytes")
            .map(|s| (s.max, s.refused, s.component.clone()))
    };
    assert_eq!(refusals(&shares), Some((2_000, 1, "controller".into())));
    let all = root.status().await.shares;
    assert!(
        refusals(&all).is_some() && all.iter().any(|s| s.tenant == "beta"),
        "{all:?}"
    );
}

/// Checks that a tenant beyond its share changes nothing, that other tenants are not affected, and
/// that the provider removes its objects.
async fn use_a_smaller_share(fixture: &ControllerFixture, n1: &mut ManualSubscriber) {
    let (mut ann, mut bob, mut root) = (
        fixture.admin("ann").await,
        fixture.admin("bob").await,
        fixture.admin("root").await,
    );
    let refused = ann
        .apply("alpha", &[&service(1, "small", 9)])
        .await
        .unwrap();
    assert!(
        errors(&refused.diagnostics)
            .iter()
            .any(|e| e.contains("configurationBytes is 20000")),
        "{refused:?}"
    );
    assert_eq!(bob.names("beta", "service").await.len(), 1);
    let refused = ann.delete_all("alpha").await.unwrap();
    assert!(
        !refused.accepted && errors(&refused.diagnostics)[0].contains("only the provider"),
        "{refused:?}"
    );
    let removed = root.delete_all("alpha").await.unwrap();
    assert_eq!(
        (removed.accepted, removed.changes.len()),
        (true, 4),
        "{:?}",
        errors(&removed.diagnostics)
    );
    n1.until("the end of the services", |h| {
        !h.keys()
            .any(|(k, n)| *k == ResourceKind::Service && n.starts_with("alpha/"))
    })
    .await;
    ann.must_apply("alpha", &[&service(1, "small", 9)]).await;
}

#[tokio::test]
async fn a_tenants_bytes_are_bounded_and_the_provider_can_remove_them() {
    // Four padded objects of 8,000 bytes fit, and a fifth does not.
    const SHARE: u64 = 40_000;
    let mut limits = ControllerLimits::default();
    limits
        .shares
        .set(ShareKind::ConfigurationBytes, Share::Amount(SHARE));
    let mut fixture = ControllerFixture::with(limits, two_tenants).await;
    let (mut ann, mut bob) = (fixture.admin("ann").await, fixture.admin("bob").await);
    let padded = |n: u8| {
        let text = service(1, &format!("s{n}"), n);
        text.replace(
            "namespace: shop}",
            &format!(
                "namespace: shop, annotations: {{note: {}}}}}",
                "x".repeat(8_000)
            ),
        )
    };
    for n in 1..=4 {
        ann.must_apply("alpha", &[&padded(n)]).await;
    }
    let refused = ann.apply("alpha", &[&padded(5)]).await.unwrap();
    let said = errors(&refused.diagnostics).join("; ");
    assert!(
        !refused.accepted && said.contains("configurationBytes is 40000"),
        "{said}"
    );
    assert!(
        !errors(
            &ann.dry_run("alpha", &[&padded(5)])
                .await
                .unwrap()
                .diagnostics
        )
        .is_empty()
    );
    bob.must_apply("beta", &[&service(2, "a", 1)]).await;
    // Files count as well; their earlier content stays in force.
    let mut n1 = fixture.subscribe("n1").await;
    n1.settle().await;
    let held = n1.names();
    fixture.write("alpha/more.yaml", &padded(6));
    until("a finding", async || {
        errors(&ann.status().await.diagnostics)
            .iter()
            .any(|e| e.contains("configurationBytes"))
    })
    .await;
    n1.settle().await;
    assert_eq!(n1.names(), held);
    std::fs::remove_file(fixture.path("alpha/more.yaml")).unwrap();
    // A smaller share sets the tenant aside at the next start, and no other tenant.
    let held = n1.resources.clone();
    drop((n1, ann, bob));
    fixture.stop().await;
    fixture
        .config
        .limits
        .shares
        // Alpha's four objects exceed the half of its share.
        .set(ShareKind::ConfigurationBytes, Share::Amount(20_000));
    fixture.start().await;
    let mut n1 = ManualSubscriber::open(fixture.channel().await, "n1", held.clone()).await;
    n1.settle().await;
    assert_eq!(
        n1.names(),
        held.keys()
            .map(|(k, n)| format!("{k:?} {n}"))
            .collect::<Vec<_>>(),
        "data planes keep what they hold"
    );
    use_a_smaller_share(&fixture, &mut n1).await;
}

#[tokio::test]
async fn compiled_bytes_are_bounded_too() {
    let mut limits = ControllerLimits::default();
    limits
        .shares
        .set(ShareKind::CompiledBytes, Share::Amount(3_000));
    let fixture = ControllerFixture::with(limits, two_tenants).await;
    let mut ann = fixture.admin("ann").await;
    ann.must_apply("alpha", &[&service(1, "a", 1)]).await;
    let refused = ann.apply("alpha", &[&large(200)]).await.unwrap();
    assert!(
        !refused.accepted
            && errors(&refused.diagnostics)
                .join(";")
                .contains("compiledBytes is 3000"),
        "{refused:?}"
    );
    ann.must_apply("alpha", &[&service(1, "b", 2)]).await;
}

/// N1: each rule of a route is a resource, however short, so their number has a share as well.
#[tokio::test]
async fn compiled_resources_are_bounded_too() {
    let mut limits = ControllerLimits::default();
    limits
        // 100 resources lie between the 50 and the 120 rules that are applied below.
        .shares
        .set(ShareKind::CompiledResources, Share::Amount(100));
    let fixture = ControllerFixture::with(limits, two_tenants).await;
    let mut ann = fixture.admin("ann").await;
    ann.must_apply("alpha", &[&service(1, "a", 1)]).await;
    let rules = |count: usize| {
        let rule = |n| {
            format!(
                "{{matches: [{{path: {{type: Exact, value: /{n}}}}}], backendRefs: [{{name: a, port: 80}}]}}"
            )
        };
        let rules = (0..count).map(rule).collect::<Vec<_>>().join(", ");
        format!(
            "apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: many, namespace: shop}}\nspec: {{parentRefs: \
             [{{group: \"\", kind: Service, name: a}}], rules: [{rules}]}}\n"
        )
    };
    let refused = ann.apply("alpha", &[&rules(120)]).await.unwrap();
    assert!(
        !refused.accepted
            && errors(&refused.diagnostics)
                .join(";")
                .contains("resources, and its share of compiledResources is 100")
    );
    ann.must_apply("alpha", &[&rules(50)]).await;
    let used = "canal_share_used{limit=\"compiled_resources\",tenant=\"alpha\"}";
    // Each of the 50 rules is a resource, beside the services.
    assert!(fixture.metric(used).await > 50.0);
    // The provider's setting for one tenant holds at the next change.
    fixture.write(
        "alpha/t.yaml",
        // 500 is more than the 120 rules that were refused above.
        &tenant_object("alpha", 1).replace("spec: {", "spec: {shares: {compiledResources: 500}, "),
    );
    let max = "canal_share_max{limit=\"compiled_resources\",tenant=\"alpha\"}";
    until("the share of the Tenant object", async || {
        fixture.metric(max).await >= 500.0
    })
    .await;
    ann.must_apply("alpha", &[&rules(120)]).await;
}

/// Services with routes of this many rules, each with a regular expression of 3,000 states.
fn patterns(services: usize, rules: usize) -> String {
    let mut text = String::new();
    for n in 0..services {
        let rule = |at| {
            let path = format!("{{type: RegularExpression, value: '[ab]{{3000}}{at}'}}");
            format!("{{matches: [{{path: {path}}}], backendRefs: [{{name: x{n}, port: 80}}]}}")
        };
        let rules = (0..rules).map(rule).collect::<Vec<_>>().join(", ");
        let (a, b) = (n / 250, n % 250 + 1);
        let spec = format!(
            "clusterIP: 10.91.{a}.{b}, selector: {{app: x}}, ports: [{{name: http, port: 80}}]"
        );
        write!(
            text,
            "---\napiVersion: v1\nkind: Service\nmetadata: {{name: x{n}, namespace: shop}}\nspec: {{{spec}}}\n---\napiVersion: \
             gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: x{n}, namespace: shop}}\nspec: {{parentRefs: [{{group: \"\", \
             kind: Service, name: x{n}}}], rules: [{rules}]}}\n"
        )
        .unwrap();
    }
    text
}

/// N2: regular expressions count what their automata take in each gateway, over all services.
#[tokio::test]
async fn route_tables_are_bounded_over_all_services() {
    let fixture = ControllerFixture::with(ControllerLimits::default(), two_tenants).await;
    let (mut ann, mut root) = (fixture.admin("ann").await, fixture.admin("root").await);
    let used = "canal_share_used{limit=\"route_table_bytes\",tenant=\"alpha\"}";
    // 450 services with 22 expressions each exceed the default share of 128 MiB many times.
    let refused = ann.apply("alpha", &[&patterns(450, 22)]).await.unwrap();
    let said = errors(&refused.diagnostics).join("; ");
    let share = ShareKind::RouteTableBytes.default_share().of(u64::MAX);
    assert!(
        !refused.accepted && said.contains(&format!("its share of routeTableBytes is {share}")),
        "{said}"
    );
    let counted: u64 = said
        .split("at least ")
        .nth(1)
        .and_then(|rest| rest.split(' ').next()?.parse().ok())
        .expect("a number of bytes");
    assert!(
        // A compiler that read on beyond the share would count several times as much.
        (share..2 * share).contains(&counted),
        "the compiler stopped there: {said}"
    );
    assert_eq!(
        ann.names("alpha", "service").await.len(),
        0,
        "nothing was changed"
    );
    let diff = ann.diff("alpha", &[&patterns(450, 22)]).await.unwrap();
    assert!(
        errors(&diff.diagnostics)
            .join("; ")
            .contains("routeTableBytes"),
        "{:?}",
        errors(&diff.diagnostics)
    );
    let refusals = fixture
        .metric("canal_share_refused_total{limit=\"route_table_bytes\",tenant=\"alpha\"}")
        .await;
    // One refusal of the apply, and one of the diff.
    assert_eq!(refusals, 2.0);
    ann.must_apply("alpha", &[&patterns(2, 22)]).await;
    // 44 automata of 72 KB and more; each counts eight times (`STATES_FACTOR`).
    assert!(fixture.metric(used).await > 44.0 * 8.0 * 72_000.0);
    // Files that exceed the share are withheld, with the reason.
    fixture.write(
        "alpha/many.yaml",
        &patterns(450, 22).replace("name: x", "name: y"), // None of the names above.
    );
    until("a finding", async || {
        errors(&ann.status().await.diagnostics)
            .iter()
            .any(|e| e.contains("routeTableBytes"))
    })
    .await;
    assert_eq!(
        fixture
            .metric("canal_controller_changes_withheld_total{reason=\"route_table_bytes\"}")
            .await,
        1.0
    );
    // The operator's own connection counts as well.
    drop(ann);
    root.delete_all("alpha").await.unwrap();
    std::fs::remove_file(fixture.path("alpha/many.yaml")).unwrap();
    std::fs::remove_file(fixture.path("alpha/t.yaml")).unwrap();
    let taken = |shares: Vec<canal_wire::api::ShareUse>| {
        shares
            .into_iter()
            .filter(|s| s.tenant == "alpha")
            .map(|s| s.used)
            .sum::<u64>()
    };
    until("the end of all permits of alpha", async || {
        taken(root.status().await.shares) == 0
    })
    .await;
    // The folder of a tenant goes once it is empty.
    std::fs::remove_dir(fixture.path("alpha")).unwrap();
    until("the end of alpha", async || {
        root.status()
            .await
            .tenants
            .iter()
            .all(|tenant| tenant.tenant != "alpha")
    })
    .await;
    assert_eq!(taken(root.status().await.shares), 0);
}

/// A reduced share removes nothing from data planes: after a start they keep their resources until
/// the tenant fits again.
#[tokio::test]
async fn a_reduced_share_does_not_remove_resources_from_data_planes() {
    let mut fixture = ControllerFixture::with(ControllerLimits::default(), two_tenants).await;
    let mut ann = fixture.admin("ann").await;
    ann.must_apply("alpha", &[&patterns(2, 2)]).await;
    let mut n1 = fixture.subscribe("n1").await;
    n1.settle().await;
    let held = n1.resources.clone();
    drop((n1, ann));
    fixture.stop().await;
    fixture
        .config
        .limits
        .shares
        // The two services exceed 100,000 bytes: one expression alone takes 72 KB and more.
        .set(ShareKind::RouteTableBytes, Share::Amount(100_000));
    fixture.start().await;
    let mut n1 = ManualSubscriber::open(fixture.channel().await, "n1", held.clone()).await;
    n1.settle().await;
    assert_eq!(
        n1.names(),
        held.keys()
            .map(|(k, n)| format!("{k:?} {n}"))
            .collect::<Vec<_>>()
    );
    let mut ann = fixture.admin("ann").await;
    assert!(
        errors(&ann.status().await.diagnostics)
            .iter()
            .any(|e| e.contains("routeTableBytes is 100000"))
    );
    let done = ann
        .delete(
            "alpha",
            &[
                ("HTTPRoute", "shop", "x0"),
                ("HTTPRoute", "shop", "x1"),
                ("Service", "shop", "x1"),
            ],
            false,
        )
        .await;
    assert!(done.unwrap().accepted);
    n1.until("the end of one service", |h| {
        !h.keys().any(|(_, n)| n.as_str() == "alpha/shop/x1")
    })
    .await;
}

/// Services with an annotation of this size each.
fn padded(services: std::ops::Range<usize>, bytes: usize) -> String {
    let mut text = String::new();
    for n in services {
        let metadata = format!(
            "{{name: x{n}, namespace: shop, annotations: {{note: {}}}}}",
            "x".repeat(bytes)
        );
        let spec = format!(
            "{{clusterIP: 10.91.0.{}, selector: {{app: x}}, ports: [{{name: http, port: 80}}]}}",
            n + 1
        );
        write!(
            text,
            "---\napiVersion: v1\nkind: Service\nmetadata: {metadata}\nspec: {spec}\n"
        )
        .unwrap();
    }
    text
}

/// N3: the answer to a Diff was as large as the objects.
#[tokio::test]
async fn a_diff_response_is_bounded_and_counts_omitted_lines() {
    let fixture = ControllerFixture::with(ControllerLimits::default(), two_tenants).await;
    let mut ann = fixture.admin("ann").await;
    let diff = ann.diff("alpha", &[&padded(0..12, 500_000)]).await.unwrap();
    assert_eq!(errors(&diff.diagnostics), [""; 0]);
    let bytes: usize = diff.changes.iter().map(|change| change.diff.len()).sum();
    assert!(
        diff.changes.len() >= 4 && bytes > 2_000_000 && bytes <= CHANGES_BYTES_MAX,
        "{bytes} bytes"
    );
    assert_eq!(diff.changes.len() as u64 + diff.changes_left_out, 12);
    let applied = ann
        .apply("alpha", &[&padded(0..12, 500_000)])
        .await
        .unwrap();
    assert!(
        applied.accepted && applied.changes.len() == 12 && applied.changes_left_out == 0,
        "an Apply lists names"
    );
}

/// N3: a request with more than the tenant may have is not read to its end.
#[tokio::test]
async fn objects_beyond_the_share_are_not_read() {
    let mut limits = ControllerLimits::default();
    limits
        .shares
        .set(ShareKind::ConfigurationBytes, Share::Amount(100_000));
    let fixture = ControllerFixture::with(limits, two_tenants).await;
    let mut ann = fixture.admin("ann").await;
    let files = [padded(0..3, 50_000), "broken: [".to_owned()];
    let found = errors(
        &ann.diff("alpha", &files.each_ref().map(String::as_str))
            .await
            .unwrap()
            .diagnostics,
    );
    assert!(
        found.len() == 1 && found[0].contains("its share of configurationBytes is 100000"),
        "{found:?}"
    );
    let applied = ann
        .apply("alpha", &files.each_ref().map(String::as_str))
        .await
        .unwrap();
    assert!(
        // The values are arbitrary; the status must repeat them.
        !applied.accepted && errors(&applied.diagnostics).len() == 1,
        "{:?}",
        errors(&applied.diagnostics)
    );
}

/// The component, the tenant, and the numbers that are used, refused and revoked.
type SeenUse = (String, String, u64, u64, u64);

/// Returns the use that data planes report, without the controller's own.
fn of(shares: Vec<canal_wire::api::ShareUse>) -> Vec<SeenUse> {
    let planes = shares.into_iter().filter(|s| s.component != "controller");
    planes
        .map(|s| (s.component, s.tenant, s.used, s.refused, s.revoked))
        .collect()
}

fn seen_use(component: &str, tenant: &str, used: u64) -> SeenUse {
    (component.to_string(), tenant.to_string(), used, 2, 1)
}

/// Checks that an operator sees the use and the omissions of its own tenant, and the provider those
/// of all.
async fn check_visible_use(ann: &mut Operator, bob: &mut Operator, root: &mut Operator) {
    let status = ann.status().await;
    assert_eq!(
        of(status.shares),
        [
            // `of` leaves out the use that the controller itself reports.
            seen_use("gateway g1", "alpha", 7),
            seen_use("nodes", "alpha", 7)
        ]
    );
    let found = errors(&status.diagnostics);
    assert!(
        found.iter().any(|e| e.contains("alpha/shop/a@az1")
            && e.contains("gateway g1 has no capacity for the resource")),
        "{found:?}"
    );
    let status = bob.status().await;
    assert_eq!(of(status.shares), [seen_use("gateway g1", "beta", 8)]);
    assert_eq!(
        errors(&status.diagnostics),
        [""; 0],
        "alpha's is not beta's business"
    );
    let all = of(root.status().await.shares);
    assert_eq!(
        all,
        [
            seen_use("gateway g1", "alpha", 7),
            seen_use("gateway g1", "beta", 8),
            seen_use("nodes", "alpha", 7)
        ]
    );
}

#[tokio::test]
async fn status_shows_a_tenants_use_and_omissions_at_data_planes() {
    use canal_wire::fleet::fleet_client::FleetClient;
    use canal_wire::fleet::{OmittedResource, ShareRow, ShareState};
    let fixture = ControllerFixture::two_tenants().await;
    let mut fleet = FleetClient::new(fixture.channel().await);
    let limit = ShareKind::GatewayConnections.label();
    let row = |tenant: &str, used| ShareRow {
        limit: limit.into(),
        tenant: tenant.into(),
        used,
        max: 100,
        refused: 2,
        revoked: 1,
    };
    let omitted = OmittedResource {
        tenant: "alpha".into(),
        kind: "BucketTable".into(),
        name: "alpha/shop/a@az1".into(),
        why: "full".into(),
    };
    let state = ShareState {
        rows: vec![row("alpha", 7), row("beta", 8)],
        omitted: vec![omitted],
    };
    // The report of a data plane that is not connected is not stored.
    fleet
        .share_report(with_token(state.clone(), "g1"))
        .await
        .unwrap();
    let (mut ann, mut bob, mut root) = (
        fixture.admin("ann").await,
        fixture.admin("bob").await,
        fixture.admin("root").await,
    );
    assert_eq!(of(root.status().await.shares), []);
    let (mut g1, mut n1) = (fixture.subscribe("g1").await, fixture.subscribe("n1").await);
    g1.settle().await;
    n1.settle().await;
    fleet
        .share_report(with_token(state.clone(), "g1"))
        .await
        .unwrap();
    // A node's report counts for its own tenant only.
    fleet
        .share_report(with_token(state.clone(), "n1"))
        .await
        .unwrap();
    check_visible_use(&mut ann, &mut bob, &mut root).await;
    let refused = fleet
        // An operator is no data plane, so it has nothing to report.
        .share_report(with_token(state, "ann"))
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    // The report of a data plane is dropped when it disconnects.
    drop(g1);
    until("the end of its report", async || {
        of(root.status().await.shares)
            .iter()
            .all(|s| s.0 != "gateway g1")
    })
    .await;
}
