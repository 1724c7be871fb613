//! Tests of the conditions of Gateway API that the operators' API returns.

use std::time::{Duration, Instant};

use canal_controller_core::ControllerLimits;
use canal_model::share::{Share, ShareKind};
use canal_operators_api::CONDITIONS_PER_TENANT_MAX;
use canal_wire::api;
use rcgen::{CertificateParams, KeyPair};
use tonic::Code;

use crate::fixture::{ControllerFixture, Operator, wait_limit, write};

/// Returns a Secret with a certificate for a host.
fn secret(host: &str) -> String {
    let key = KeyPair::generate().unwrap();
    let certificate = CertificateParams::new(vec![host.to_owned()])
        .unwrap()
        .self_signed(&key)
        .unwrap();
    let indented = |pem: &str| pem.trim_end().replace('\n', "\n    ");
    let (chain, key) = (indented(&certificate.pem()), indented(&key.serialize_pem()));
    format!(
        "apiVersion: v1\nkind: Secret\nmetadata: {{name: web, namespace: shop}}\ntype: kubernetes.io/tls\n\
         stringData:\n  tls.crt: |\n    {chain}\n  tls.key: |\n    {key}\n"
    )
}

const GATEWAY: &str = "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: edge, namespace: shop}\n\
    spec: {gatewayClassName: canal, listeners: [{name: web, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: web}]}}]}\n";

/// Starts a controller with a tenant on the cloud tier, which serves Gateways.
async fn controller(limits: ControllerLimits) -> ControllerFixture {
    let object = "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: alpha}\n\
        spec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.1.0.0/17], gatewayCidrs: [10.1.192.0/18]}\n";
    ControllerFixture::with(limits, |config| {
        write(config, "alpha/mesh.yaml", object);
    })
    .await
}

/// Returns the conditions of the listener of the only Gateway, as `Type=status`.
async fn of_listener(operator: &mut Operator) -> Vec<String> {
    let found = operator.conditions("alpha").await.unwrap();
    let mut objects = found.objects.iter();
    let gateway = objects
        .find(|it| it.kind == "Gateway" && it.namespace == "shop" && it.name == "edge")
        .unwrap();
    let conditions = gateway.listeners[0].conditions.iter();
    let text = |it: &api::Condition| format!("{}={}", it.r#type, it.is_true);
    conditions.map(text).collect()
}

/// No operator can read the keys of Secrets, but conditions depend on them.
#[tokio::test]
async fn a_listener_with_a_certificate_is_programmed() {
    let fixture = controller(ControllerLimits::default()).await;
    let mut ann = fixture.admin("ann").await;
    ann.must_apply("alpha", &[GATEWAY]).await;
    let found = of_listener(&mut ann).await;
    assert!(
        found.contains(&"ResolvedRefs=false".to_owned()),
        "{found:?}"
    );
    ann.must_apply("alpha", &[&secret("web.example.com")]).await;
    let found = of_listener(&mut ann).await;
    for condition in ["Accepted=true", "ResolvedRefs=true", "Programmed=true"] {
        assert!(found.contains(&condition.to_owned()), "{found:?}");
    }
    let denied = ann.conditions("beta").await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied);
}

/// Several operators of a tenant may ask at the same time.
#[tokio::test]
async fn requests_at_the_same_time_are_all_answered() {
    let fixture = controller(ControllerLimits::default()).await;
    fixture
        .admin("ann")
        .await
        .must_apply("alpha", &[GATEWAY])
        .await;
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..CONDITIONS_PER_TENANT_MAX {
        let mut ann = fixture.admin("ann").await;
        all.spawn(async move { ann.conditions("alpha").await.unwrap().objects.len() });
    }
    for objects in all.join_all().await {
        assert_eq!(objects, 1);
    }
}

/// Returns a Gateway and a route on it whose regular expressions exceed the share of `small_shares`.
fn large(gateway: &str) -> String {
    // One of these takes 72 KB in a gateway.
    let rule = |n: usize| {
        format!(
            "{{matches: [{{path: {{type: RegularExpression, value: \"/{n}[ab]{{3000}}\"}}}}], \
             backendRefs: [{{name: web, port: 80}}]}}"
        )
    };
    let rules = [1, 2].map(rule).join(", ");
    format!(
        "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {{name: {gateway}, namespace: shop}}\n\
         spec: {{gatewayClassName: canal, listeners: [{{name: web, port: 80, protocol: HTTP}}]}}\n---\n\
         apiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop}}\n\
         spec: {{clusterIP: 10.96.0.1, selector: {{app: web}}, ports: [{{name: http, port: 80}}]}}\n---\n\
         apiVersion: gateway.networking.k8s.io/v1\nkind: HTTPRoute\nmetadata: {{name: large, namespace: shop}}\n\
         spec: {{parentRefs: [{{name: {gateway}}}], rules: [{rules}]}}\n"
    )
}

fn small_shares() -> ControllerLimits {
    let mut limits = ControllerLimits::default();
    limits
        .shares
        .set(ShareKind::RouteTableBytes, Share::Amount(100_000));
    limits
}

/// Returns the conditions of the tenant's objects once they are such that `done` holds.
async fn conditions_until(
    operator: &mut Operator,
    what: &str,
    done: impl Fn(&api::ConditionsResponse) -> bool,
) -> api::ConditionsResponse {
    let end = Instant::now() + wait_limit();
    loop {
        let found = operator.conditions("alpha").await.unwrap();
        if done(&found) {
            return found;
        }
        assert!(Instant::now() < end, "{what} did not come: {found:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns the status of an object, which must be there.
fn status_of<'a>(
    all: &'a api::ConditionsResponse,
    kind: &str,
    name: &str,
) -> &'a api::ObjectStatus {
    let mut objects = all.objects.iter();
    objects
        .find(|it| it.kind == kind && it.name == name)
        .unwrap_or_else(|| panic!("no {kind} {name} in {all:?}"))
}

fn texts(conditions: &[api::Condition]) -> Vec<String> {
    let text = |it: &api::Condition| format!("{}={} {}", it.r#type, it.is_true, it.reason);
    conditions.iter().map(text).collect()
}

/// Conditions never claim what is not served: those of withheld objects say so, and those of others
/// are of the objects in force.
#[tokio::test]
async fn conditions_are_of_what_is_in_force() {
    let fixture = controller(small_shares()).await;
    fixture.write("alpha/edge.yaml", GATEWAY);
    let mut ann = fixture.admin("ann").await;
    let has_edge = |all: &api::ConditionsResponse| !all.objects.is_empty();
    conditions_until(&mut ann, "the Gateway", has_edge).await;
    fixture.write("alpha/large.yaml", &large("late"));
    let is_withheld = |all: &api::ConditionsResponse| !all.withheld.is_empty();
    let found = conditions_until(&mut ann, "a withheld state", is_withheld).await;
    assert!(
        found.withheld[0]
            .problem
            .contains("its share of routeTableBytes is 100000"),
        "{found:?}"
    );
    let edge = status_of(&found, "Gateway", "edge");
    assert!(!edge.is_withheld && edge.listeners.len() == 1, "{edge:?}");
    let late = status_of(&found, "Gateway", "late");
    assert!(late.is_withheld);
    assert_eq!(
        texts(&late.conditions),
        ["Accepted=false Pending", "Programmed=false Pending"]
    );
    let route = status_of(&found, "HTTPRoute", "large");
    assert_eq!(
        texts(&route.parents[0].conditions),
        ["Accepted=false Pending"]
    );
    // A change of an object in force is withheld with the rest.
    let two = GATEWAY.replace(
        "listeners: [",
        "listeners: [{name: more, port: 80, protocol: HTTP}, ",
    );
    fixture.write("alpha/edge.yaml", &two);
    let is_changed = |all: &api::ConditionsResponse| status_of(all, "Gateway", "edge").is_withheld;
    let found = conditions_until(&mut ann, "a withheld change", is_changed).await;
    assert_eq!(status_of(&found, "Gateway", "edge").listeners.len(), 1);
    std::fs::remove_file(fixture.path("alpha/large.yaml")).unwrap();
    let is_settled = |all: &api::ConditionsResponse| all.withheld.is_empty();
    let found = conditions_until(&mut ann, "the newest state", is_settled).await;
    assert_eq!(found.objects.len(), 1);
    let edge = status_of(&found, "Gateway", "edge");
    assert!(!edge.is_withheld && edge.listeners.len() == 2, "{edge:?}");
}

/// After a start the controller does not know which state was in force before.
#[tokio::test]
async fn a_state_withheld_since_the_start_has_no_conditions() {
    let object = "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: alpha}\n\
        spec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.1.0.0/17], gatewayCidrs: [10.1.192.0/18]}\n";
    let fixture = ControllerFixture::with(small_shares(), |config| {
        write(config, "alpha/mesh.yaml", object);
        write(config, "alpha/large.yaml", &large("late"));
    })
    .await;
    let refused = fixture.admin("ann").await.conditions("alpha").await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let said = refused.message();
    assert!(
        said.contains("is withheld")
            && said.contains("routeTableBytes is 100000")
            && said.contains("fix: "),
        "{said}"
    );
}
