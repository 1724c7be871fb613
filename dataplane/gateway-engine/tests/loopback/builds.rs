//! Large tables of one tenant on a real engine: what of other tenants is in force before them. The
//! order of events decides, not the clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_gateway_engine::PlainListener;
use canal_model::authorization::{
    Authorization, AuthorizationAction, PolicyKey, PolicyRule, PolicyTarget,
};
use canal_model::ids::Generation;
use canal_model::program::*;

use crate::client::HttpClient;
use crate::fixture::{
    EngineSetup, GatewayFixture, LOCALHOST, TENANT, key, pod, prefix, service_with_id, tenant,
    until,
};
use crate::origin::OriginServer;

/// Services of the tenant with large tables. Together they compile to many times what a change may
/// compile at once.
const SERVICES: u32 = 48;
/// Status of the requests that the large change refuses. No other response of the tests has it.
const CHANGED: u16 = 418;

/// Builds services with as many large regexes as one service may have. The first service, `web`,
/// refuses all other requests.
fn large(of: &str) -> Vec<Resource> {
    let name = |n: u32| {
        if n == 0 {
            "web".to_string()
        } else {
            format!("s{n}")
        }
    };
    let rule = |n: u32| {
        let regex = |i: u32| {
            let mut http = prefix("");
            http.precedence.indexes = [i, 0];
            http.path = PathMatch::Regex(format!("/{n}/{i}/[ab]{{3000}}"));
            http
        };
        // The limit is `REGEXES_PER_SERVICE_BYTES_MAX`, 3 MiB of automata.
        let mut all: Vec<HttpMatch> = (0..22).map(regex).collect();
        let mut rest = prefix("/");
        // After all the regexes, which have the indexes 0 to 21.
        rest.precedence.indexes = [99, 0];
        all.push(rest);
        Resource::Route(RouteRule {
            key: RouteKey {
                tenant: of.parse().unwrap(),
                kind: "HTTPRoute".into(),
                namespace: "default".parse().unwrap(),
                name: name(n).parse().unwrap(),
                rule: "0".into(),
            },
            parent: key(of, &name(n)),
            parent_port: None,
            consumer: None,
            hosts: vec![],
            matches: all,
            filters: None,
            attempts: None,
            faults: None,
            cors: None,
            mirrors: Vec::new(),
            action: RouteAction::Refuse {
                status: CHANGED,
                reason: "changed".into(),
            },
        })
    };
    let services = (1..SERVICES).map(|n| {
        service_with_id(
            of,
            &name(n),
            100 + n,
            // No client dials these services, so they may share an address.
            "10.99.0.1",
            &[(80, AppProtocol::Http1)],
        )
    });
    services.chain((0..SERVICES).map(rule)).collect()
}

fn deny(of: &str) -> Resource {
    let key = PolicyKey {
        tenant: of.parse().unwrap(),
        namespace: "default".parse().unwrap(),
        name: "deny".parse().unwrap(),
    };
    Resource::Authorization(Authorization {
        key,
        target: PolicyTarget::Tenant,
        action: AuthorizationAction::Deny,
        rules: vec![PolicyRule::default()],
        dry_run: false,
        broken: None,
    })
}

/// Builds a tenant whose service `web` has one endpoint.
fn web_of(name: &str, vni: u32, origin: &OriginServer) -> Vec<Resource> {
    let web = service_with_id(name, "web", vni, "10.96.0.9", &[(80, AppProtocol::Http1)]);
    vec![
        tenant(name, vni),
        web,
        Resource::Workload(pod(name, "web-0", origin.address, "web")),
    ]
}

fn listener(of: &str) -> PlainListener {
    PlainListener {
        address: LOCALHOST,
        service: key(of, "web"),
        port: 80,
    }
}

#[tokio::test]
async fn others_policies_are_in_force_before_one_tenants_large_tables() {
    let origin = OriginServer::echo().await;
    let fixture = GatewayFixture::new(
        EngineSetup {
            plain: vec![listener("beta")],
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    fixture.apply(web_of("beta", 2, &origin));
    let (alpha, beta) = (fixture.web, fixture.engine.plain_addresses()[1]);
    assert_eq!(HttpClient::get(beta, "/").await.status, 200);
    let changes = (large(TENANT), vec![deny("beta")]);
    let started = Instant::now();
    fixture.apply(changes.0);
    fixture.apply(changes.1);
    assert_eq!(HttpClient::get(beta, "/").await.status, 403);
    let taken = started.elapsed();
    // Behind the compilation of alpha's tables, which takes longer than this, the policy would be
    // late.
    canal_timing::assert_time(
        "time until another tenant's DENY is in force behind large tables",
        taken,
        Duration::from_secs(1),
    );
    // A tenant's own policy waits neither, and its routes are still the old ones.
    assert_eq!(
        HttpClient::get(alpha, "/").await.status,
        200,
        "the large tables are built later"
    );
    assert_eq!(fixture.metric("canal_gateway_tenants_building", &[]), 1.0);
    assert_eq!(
        fixture.engine.dump(None)["tenants_building"],
        serde_json::json!([TENANT])
    );
    fixture.apply(vec![deny(TENANT)]);
    assert_eq!(HttpClient::get(alpha, "/").await.status, 403);
    fixture.change(
        vec![],
        &[
            (ResourceKind::Authorization, "alpha/default/deny"),
            (ResourceKind::Authorization, "beta/default/deny"),
        ],
    );
    assert_eq!(HttpClient::get(beta, "/").await.status, 200);
    fixture.until_built().await;
    assert_eq!(HttpClient::get(alpha, "/").await.status, CHANGED);
    assert_eq!(
        fixture.metric("canal_gateway_broken_route_matches", &[]),
        0.0
    );
}

#[tokio::test]
async fn tenant_with_large_tables_appears_after_all_others_of_a_whole_state() {
    let origin = OriginServer::echo().await;
    let plain = vec![listener("beta"), listener("gamma")];
    let fixture = GatewayFixture::new(
        EngineSetup {
            plain,
            ..EngineSetup::default()
        },
        &[origin.address],
    );
    let addresses = fixture.engine.plain_addresses();
    let all = [
        large("gamma"),
        web_of("gamma", 3, &origin),
        web_of("beta", 2, &origin),
    ]
    .concat();
    let all: Vec<_> = all.into_iter().map(Arc::new).collect();
    fixture.engine.replace(&all, Generation(9));
    assert_eq!(HttpClient::get(addresses[1], "/").await.status, 200);
    let mut early = HttpClient::connect(addresses[2]).await;
    early.send(b"GET / HTTP/1.1\r\nHost: web\r\n\r\n").await;
    assert_eq!(
        early.answer().await.map(|answer| answer.status),
        None,
        "not served before its routes are built"
    );
    assert_eq!(
        fixture.engine.dump(None)["tenants_building"],
        serde_json::json!(["gamma"])
    );
    fixture.until_built().await;
    assert_eq!(HttpClient::get(addresses[2], "/").await.status, CHANGED);
}

impl GatewayFixture {
    async fn until_built(&self) {
        until("all tables are built", || {
            self.metric("canal_gateway_tenants_building", &[]) == 0.0
        })
        .await;
    }
}
