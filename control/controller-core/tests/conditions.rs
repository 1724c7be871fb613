//! Tests of the conditions of Gateway API that the operators' API returns.

use canal_controller_core::ControllerLimits;
use canal_operators_api::CONDITIONS_AT_ONCE_MAX;
use canal_wire::api;
use rcgen::{CertificateParams, KeyPair};
use tonic::Code;

use crate::fixture::{ControllerFixture, Operator, write};

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
async fn controller() -> ControllerFixture {
    let object = "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {name: alpha}\n\
        spec: {vni: 1, trustDomain: alpha.example, podCidrs: [10.1.0.0/17], gatewayCidrs: [10.1.192.0/18]}\n";
    ControllerFixture::with(ControllerLimits::default(), |config| {
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
    let fixture = controller().await;
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

/// More requests than are compiled at once wait, and each is answered.
#[tokio::test]
async fn requests_beyond_the_limit_wait() {
    let fixture = controller().await;
    fixture
        .admin("ann")
        .await
        .must_apply("alpha", &[GATEWAY])
        .await;
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..4 * CONDITIONS_AT_ONCE_MAX {
        let mut ann = fixture.admin("ann").await;
        all.spawn(async move { ann.conditions("alpha").await.unwrap().objects.len() });
    }
    for objects in all.join_all().await {
        assert_eq!(objects, 1);
    }
}
