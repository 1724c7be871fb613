//! Test with thousands of services: an AZ is closed as fast as with a few, whatever else is
//! computed at that moment.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use crate::fixture;
use crate::fixture::{ControllerFixture, ManualSubscriber, with_token};
use canal_controller_core::{ControllerLimits, SilenceTimeouts};
use canal_model::program::Resource;
use canal_timing::assert_time;
use canal_wire::fleet::fleet_client::FleetClient;
use canal_wire::fleet::{EdgeReportRequest, ReplicaProbe, ReplicaReportRequest};
use tonic::transport::Channel;

/// Number of services. `make soak PART=services` uses the number that the tier is made for; without
/// optimization the same takes ten times as long.
const SERVICES: u32 = if cfg!(debug_assertions) { 600 } else { 16_000 };
/// Time until all members have everything.
/// Nobody measured the least value; it only ends a start that hangs.
const START: Duration = Duration::from_secs(300);
/// The default of `edge_silent`.
const SILENT: Duration = Duration::from_millis(1500);

const PRINCIPALS: [(&str, &str); 8] = [
    ("r1", "kind: gateway, name: r1, az: az1, backend: b1"),
    ("r2", "kind: gateway, name: r2, az: az1, backend: b2"),
    ("r3", "kind: gateway, name: r3, az: az2, backend: b3"),
    ("r4", "kind: gateway, name: r4, az: az2, backend: b4"),
    ("e1", "kind: edge, name: e1, az: az1"),
    ("e2", "kind: edge, name: e2, az: az2"),
    ("m1", "kind: node, name: m1, tenant: beta, az: az1"),
    ("root", "kind: operator, name: root"),
];

fn tenant(name: &str, vni: u8, services: u32) -> String {
    let mut text = format!(
        "apiVersion: canal.mesh/v1\nkind: Tenant\nmetadata: {{name: {name}}}\nspec: {{vni: {vni}, trustDomain: {name}.example, \
         podCidrs: [10.1.0.0/17], gatewayCidrs: [10.128.0.0/12], shares: {{compiledResources: 100000}}}}\n"
    );
    for n in 1..=services {
        let ip = std::net::Ipv4Addr::from_bits(0x0a60_0000 + n);
        let spec =
            format!("clusterIP: {ip}, selector: {{app: s{n}}}, ports: [{{name: http, port: 80}}]");
        write!(text, "---\napiVersion: v1\nkind: Service\nmetadata: {{name: s{n}, namespace: shop}}\nspec: {{{spec}}}\n").unwrap();
    }
    text
}

/// A fake replica or edge, with the resources that it receives.
struct FakeTierMember {
    token: &'static str,
    subscriber: ManualSubscriber,
    client: FleetClient<Channel>,
}

impl FakeTierMember {
    async fn new(fixture: &ControllerFixture, token: &'static str) -> Self {
        let client = FleetClient::new(fixture.channel().await);
        Self {
            token,
            subscriber: ManualSubscriber::open(fixture.channel().await, token, BTreeMap::new())
                .await,
            client,
        }
    }
    /// Receives responses, and reports. Returns false if the controller has ended.
    async fn report(&mut self) -> bool {
        self.subscriber.drain(Duration::from_millis(20)).await;
        let n: u8 = self.token[1..].parse().unwrap();
        if self.token.starts_with('e') {
            let seen = (1..=4_u8)
                .filter(|r| (r - 1) / 2 + 1 == n)
                .map(|r| ReplicaProbe {
                    replica: format!("r{r}"),
                    up: true,
                })
                .collect();
            let (az, underlay) = (format!("az{n}"), format!("250.{n}.0.2"));
            let state = EdgeReportRequest {
                az,
                underlay,
                generation: self.subscriber.generation,
                seen,
                ..EdgeReportRequest::default()
            };
            self.client
                .edge_report(with_token(state, self.token))
                .await
                .is_ok()
        } else {
            let az = (n - 1) / 2 + 1;
            let state = ReplicaReportRequest {
                backend: format!("b{n}"),
                az: format!("az{az}"),
                underlay: format!("250.{az}.0.{}", n + 10),
                generation: self.subscriber.content,
                ..ReplicaReportRequest::default()
            };
            self.client
                .replica_report(with_token(state, self.token))
                .await
                .is_ok()
        }
    }
}

fn open(subscriber: &ManualSubscriber) -> BTreeMap<String, bool> {
    let of = |resource: &Resource| match resource {
        Resource::Address(a) if a.service.to_string() == "beta/shop/s1" => {
            Some((a.az.to_string(), a.open))
        }
        _ => None,
    };
    subscriber
        .resources
        .values()
        .filter_map(|(_, resource)| of(resource))
        .collect()
}

const COMPILES: &str = "canal_controller_compile_seconds_count";

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_az_is_closed_while_thousands_of_services_are_compiled() {
    let limits = ControllerLimits {
        fleet: SilenceTimeouts {
            edge_silent: SILENT,
            ..SilenceTimeouts::default()
        },
        ..ControllerLimits::default()
    };
    let write = |dir: &std::path::Path, name: &str, text: &str| {
        std::fs::create_dir_all(dir.join(name)).unwrap();
        std::fs::write(dir.join(name).join("all.yaml"), text).unwrap();
    };
    let fixture = ControllerFixture::with(limits, |config| {
        write(config, "alpha", &tenant("alpha", 1, SERVICES));
        write(config, "beta", &tenant("beta", 2, 1));
    })
    .await;
    fixture::write_principals(&fixture.config.principals, &PRINCIPALS);
    let until = Instant::now() + START;
    while ManualSubscriber::try_open(fixture.channel().await, "e1", BTreeMap::new())
        .await
        .is_err()
    {
        assert!(Instant::now() < until, "the principals were not read again");
        // This pause and those below are short beside the 1.5 s of silence that are measured.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("{SERVICES} services: started");
    let (silence, is_silent) = tokio::sync::watch::channel(false);
    for token in ["r1", "r2", "r3", "r4", "e1", "e2"] {
        let mut member = FakeTierMember::new(&fixture, token).await;
        let is_silent = is_silent.clone();
        tokio::spawn(async move {
            while !(token == "e1" && *is_silent.borrow()) && member.report().await {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
    }
    let mut node = ManualSubscriber::open(fixture.channel().await, "m1", BTreeMap::new()).await;
    let until = Instant::now() + START;
    while open(&node) != [("az1".to_owned(), true), ("az2".to_owned(), true)].into() {
        assert!(Instant::now() < until, "{:?}", open(&node));
        node.drain(Duration::from_millis(50)).await;
    }
    println!("{SERVICES} services: open in both AZs");
    let compiles = fixture.metric(COMPILES).await;
    let seconds = fixture.metric("canal_controller_compile_seconds_sum").await;
    silence.send(true).unwrap();
    let begun = Instant::now();
    // After half of the timeout the compilation has begun when the AZ is due to be closed.
    tokio::time::sleep(SILENT / 2).await;
    write(
        fixture.config.config_dir.as_ref().unwrap(),
        "alpha",
        &tenant("alpha", 1, SERVICES + 1),
    );
    let until = begun + START;
    while open(&node)["az1"] {
        assert!(Instant::now() < until, "not closed");
        node.drain(Duration::from_millis(10)).await;
    }
    let closed = begun.elapsed();
    let at_work = fixture.metric(COMPILES).await == compiles;
    println!(
        "{SERVICES} services: closed after {closed:.2?}, of which {SILENT:?} are silence; the compilation was at work: {at_work}"
    );
    let until = Instant::now() + START;
    while fixture.metric(COMPILES).await == compiles {
        assert!(Instant::now() < until, "the compilation did not end");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!(
        "compiled in {:.1} s",
        fixture.metric("canal_controller_compile_seconds_sum").await - seconds
    );
    assert!(open(&node)["az2"]);
    assert_time(
        "time until a silent edge's AZ is closed beside a long compilation",
        closed,
        SILENT + Duration::from_secs(2), // docs/timing.md has what was measured.
    );
}
