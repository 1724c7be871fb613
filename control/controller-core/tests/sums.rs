//! Ten tenants use all that they can get of one of the controller's limits at the same time, and an
//! eleventh is served.

use std::collections::BTreeMap;

use crate::fixture::{ControllerFixture, ManualSubscriber, write_principals};
use canal_controller_core::ControllerLimits;
use tonic::{Code, Status};

/// The tokens of each tenant's operator and node. The last tenant is added later.
const TOKENS: [(&str, &str); 11] = [
    ("o0", "n0"),
    ("o1", "n1"),
    ("o2", "n2"),
    ("o3", "n3"),
    ("o4", "n4"),
    ("o5", "n5"),
    ("o6", "n6"),
    ("o7", "n7"),
    ("o8", "n8"),
    ("o9", "n9"),
    ("o10", "n10"),
];

/// Starts a controller that knows the operator and the node of eleven tenants.
async fn eleven_tenants(limits: ControllerLimits) -> ControllerFixture {
    ControllerFixture::tuned(limits, |config| {
        let rows: Vec<_> = TOKENS
            .iter()
            .flat_map(|(operator, node)| {
                let tenant = operator.replacen('o', "t", 1);
                let of_operator = format!("kind: operator, name: {operator}, tenant: {tenant}");
                [
                    (*operator, of_operator),
                    (
                        *node,
                        format!("kind: node, name: {node}, tenant: {tenant}, az: az1"),
                    ),
                ]
            })
            .collect();
        let rows: Vec<_> = rows
            .iter()
            .map(|(token, rest)| (*token, rest.as_str()))
            .collect();
        write_principals(&config.principals, &rows);
    })
    .await
}

fn is_refused<T>(done: &Result<T, Status>) -> bool {
    done.as_ref()
        .is_err_and(|status| status.code() == Code::ResourceExhausted)
}

#[tokio::test]
async fn connections_of_ten_tenants_leave_some_to_an_eleventh() {
    let fixture = eleven_tenants(ControllerLimits {
        connections: 80,
        ..ControllerLimits::default()
    })
    .await;
    let (mut held, mut counts) = (Vec::new(), Vec::new());
    for (operator, _) in &TOKENS[..10] {
        let tenant = operator.replacen('o', "t", 1);
        let before = held.len();
        loop {
            let mut connection = fixture.admin(operator).await;
            if is_refused(&connection.get(&tenant, "Service").await) {
                break;
            }
            held.push(connection);
        }
        counts.push(held.len() - before);
    }
    let mut eleventh = fixture.admin(TOKENS[10].0).await;
    let served = eleventh.get("t10", "Service").await;
    assert!(!is_refused(&served), "{counts:?}: {served:?}");
    assert_eq!(counts, [18, 18, 18, 6, 2, 1, 1, 1, 1, 1]);
    let refused = fixture
        .metric("canal_share_refused_total{limit=\"controller_connections\",tenant=\"t4\"}")
        .await;
    assert!((refused - 1.0).abs() < f64::EPSILON, "{refused}");
}

#[tokio::test]
async fn streams_of_ten_tenants_leave_some_to_an_eleventh() {
    let fixture = eleven_tenants(ControllerLimits {
        streams: 24,
        ..ControllerLimits::default()
    })
    .await;
    let mut held = Vec::new();
    for (_, node) in TOKENS[..10].iter().cycle().take(30) {
        held.extend(
            ManualSubscriber::try_open(fixture.channel().await, node, BTreeMap::new()).await,
        );
    }
    let eleventh =
        ManualSubscriber::try_open(fixture.channel().await, TOKENS[10].1, BTreeMap::new()).await;
    assert!(eleventh.is_ok(), "{:?}", eleventh.err());
    let own = fixture
        .metric("canal_share_used{limit=\"controller_streams\",tenant=\"t10\"}")
        .await;
    assert!((own - 1.0).abs() < f64::EPSILON, "{own}");
    let all: Vec<f64> = {
        let mut all = Vec::new();
        for n in 0..10 {
            all.push(
                fixture
                    .metric(&format!(
                        "canal_share_used{{limit=\"controller_streams\",tenant=\"t{n}\"}}"
                    ))
                    .await,
            );
        }
        all
    };
    assert!(
        all.iter().sum::<f64>() >= 20.0,
        "the limit was reached: {all:?}"
    );
}
