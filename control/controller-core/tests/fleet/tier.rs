//! A controller with tenants alpha and beta on the tier, whose principals are replicas, edges,
//! nodes and operators.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use canal_controller_core::{ControllerLimits, SilenceTimeouts};
use canal_timing::slack;

use crate::fixture;
use crate::fixture::{ControllerFixture, ManualSubscriber, pod, service, wait_limit};

const PRINCIPALS: [(&str, &str); 11] = [
    ("r1", "kind: gateway, name: r1, az: az1, backend: b1"),
    ("r2", "kind: gateway, name: r2, az: az1, backend: b1"),
    ("r3", "kind: gateway, name: r3, az: az1, backend: b2"),
    ("r4", "kind: gateway, name: r4, az: az2, backend: b3"),
    ("e1", "kind: edge, name: e1, az: az1"),
    ("e1b", "kind: edge, name: e1b, az: az1"),
    ("e2", "kind: edge, name: e2, az: az2"),
    ("n1", "kind: node, name: n1, tenant: alpha, az: az1"),
    ("m1", "kind: node, name: m1, tenant: beta, az: az1"),
    ("root", "kind: operator, name: root"),
    ("ann", "kind: operator, name: ann, tenant: alpha"),
];

pub(super) fn tier_tenant(name: &str, vni: u8) -> String {
    let object = format!(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: {name}}}\nspec: {{vni: {vni}, trustDomain: {name}.example, \
         podCidrs: [10.1.0.0/17], gatewayCidrs: [10.1.192.0/18]}}\n"
    );
    [
        object,
        service(1, "a", 1),
        pod(1, "a-0", "a", "n1", 1, true),
    ]
    .join("---\n")
}

pub(super) fn times() -> SilenceTimeouts {
    let ms = |quiet| slack() * Duration::from_millis(quiet);
    SilenceTimeouts {
        edge_silent: ms(600),
        replica_silent: ms(800),
        gone: ms(1200),
        grace: ms(1500),
        lag: ms(1500),
    }
}

/// Timeouts that no component reaches even on a busy machine, for tests without silent components.
pub(super) fn patient_times() -> SilenceTimeouts {
    let never = 2 * wait_limit();
    SilenceTimeouts {
        edge_silent: never,
        replica_silent: never,
        gone: never,
        lag: never,
        ..times()
    }
}

/// Starts a controller with tenants alpha and beta on the tier, at the same addresses. Each has a
/// service and a gateway, so that an AZ has four tables and four addresses.
pub(super) async fn tier() -> ControllerFixture {
    tier_with(times()).await
}

/// Starts the controller of [`tier`] with other timeouts.
pub(super) async fn tier_with(fleet: SilenceTimeouts) -> ControllerFixture {
    let limits = ControllerLimits {
        fleet,
        ..ControllerLimits::default()
    };
    let fixture = ControllerFixture::with(limits, |config| {
        for (name, vni) in [("alpha", 1), ("beta", 2)] {
            std::fs::create_dir(config.join(name)).unwrap();
            std::fs::write(config.join(name).join("all.yaml"), tier_tenant(name, vni)).unwrap();
        }
    });
    let fixture = fixture.await;
    fixture::write_principals(&fixture.config.principals, &PRINCIPALS);
    let until = Instant::now() + wait_limit();
    while fixture.metric("canal_controller_generation").await < 1.0 || !knows(&fixture, "e1").await
    {
        assert!(Instant::now() < until, "the principals were not read again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    fixture
}

async fn knows(fixture: &ControllerFixture, token: &'static str) -> bool {
    ManualSubscriber::try_open(fixture.channel().await, token, BTreeMap::new())
        .await
        .is_ok()
}
