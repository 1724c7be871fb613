//! One tenant's DNS queries against another's, over TCP and UDP: whatever one tenant's clients do,
//! the other's queries are answered. They need root. Nothing depends on time.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use canal_model::ids::{Generation, ServiceId, TenantName};
use canal_model::program::*;
use canal_net::sys::Netns;
use canal_redirector_agent::dns::DnsServer;
use canal_runtime::drain::{self, DrainTrigger};
use canal_runtime::metrics::Registry;
use canal_southbound_client::{ResourceState, Update, UpdateSource};
use canal_testing::netns::ProcessNetns;
use hickory_proto::op::{Message, Query};
use hickory_proto::rr::{Name, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

/// Number of tenants in the tests; the last one is the victim. Ten have more than enough questions
/// for the queue; fewer would too.
const TENANTS: usize = 11;
/// Maximum number of TCP connections of the server, as in `docs/operations/limits.md`.
const CONNECTIONS_MAX: usize = 256;

fn patience() -> Duration {
    canal_timing::deadline(Duration::from_secs(60))
}

fn name(tenant: usize) -> TenantName {
    format!("t{tenant}").parse().unwrap()
}

/// Returns the address of a tenant's tier service.
fn home(tenant: usize) -> IpAddr {
    format!("fdca:a1:0:240::{:x}", tenant + 1).parse().unwrap()
}

/// Creates a network namespace whose loopback device has the addresses of the tenants.
fn tenants_netns() -> ProcessNetns {
    let net = ProcessNetns::new();
    for tenant in 0..TENANTS {
        net.ip(&format!("addr add {}/128 dev lo nodad", home(tenant)));
    }
    net
}

/// Runs a test in such a namespace on one thread, so that the server runs only while the test
/// waits.
fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    let net = tenants_netns();
    let run = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(test())
    };
    Netns::open(net.path()).unwrap().enter(run).unwrap();
}

struct DnsFixture {
    dns: DnsServer,
    registry: Registry,
    _trigger: DrainTrigger,
}

impl DnsFixture {
    /// Starts a server that knows all tenants.
    fn new() -> Self {
        let (registry, (trigger, drain)) = (Registry::new(), drain::tree());
        let dns = DnsServer::start(
            "[::]:53".parse().unwrap(),
            "az1".parse().unwrap(),
            &registry,
            &drain,
            drain.watcher(),
        )
        .unwrap();
        let address = |service: String, id: usize| {
            Arc::new(Resource::Address(GatewayAddress {
                service: service.parse().unwrap(),
                id: ServiceId::new(u32::try_from(id).unwrap()).unwrap(),
                az: "az1".parse().unwrap(),
                addresses: vec!["10.0.1.1".parse().unwrap()],
                network: None,
                open: true,
            }))
        };
        let of = |tenant| {
            [
                // The IDs of both services are different for all tenants.
                address(format!("{}/canal-system/gateway", name(tenant)), tenant + 1),
                address(format!("{}/default/web", name(tenant)), tenant + 101),
            ]
        };
        let all: Vec<_> = (0..TENANTS).flat_map(of).collect();
        let generation = Generation(1);
        let update = Update {
            origin: UpdateSource::Controller,
            generation,
            upserts: all.clone(),
            removals: vec![],
        };
        dns.apply(&update, &ResourceState::of_resources(all, generation));
        Self {
            dns,
            registry,
            _trigger: trigger,
        }
    }

    /// Hands all TCP connections to the server, as a gateway does.
    fn accept(&self) {
        let dns = self.dns.clone();
        let listener = std::net::TcpListener::bind("[::]:53").unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let local = stream.local_addr().unwrap().ip();
                let tenant = (0..TENANTS).find(|tenant| home(*tenant) == local).unwrap();
                tokio::spawn(dns.take(stream.into_std().unwrap(), &name(tenant)));
            }
        });
    }

    fn metric(&self, line: &str) -> u64 {
        let text = self.registry.render();
        text.lines()
            .filter_map(|l| l.strip_prefix(line)?.trim().parse::<u64>().ok())
            .sum()
    }

    async fn until(&self, line: &str, at_least: u64) {
        let started = Instant::now();
        while self.metric(line) < at_least {
            let waited = started.elapsed();
            assert!(
                waited < canal_timing::deadline(Duration::from_secs(60)),
                "{line} is {}, not {at_least}",
                self.metric(line)
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Builds a query with this number as its ID.
fn query(id: u16) -> Vec<u8> {
    let mut query = Message::new();
    query.set_id(id).add_query(Query::query(
        Name::from_ascii("web.default.svc.cluster.local.").unwrap(),
        RecordType::A,
    ));
    query.to_vec().unwrap()
}

/// Returns whether a query over a new TCP connection is answered.
async fn is_answered(tenant: usize) -> bool {
    let asked = async {
        let mut stream = TcpStream::connect((home(tenant), 53)).await?;
        let query = query(7);
        stream
            .write_all(&[&(query.len() as u16).to_be_bytes()[..], &query].concat())
            .await?;
        let mut answer = vec![0; stream.read_u16().await?.into()];
        stream.read_exact(&mut answer).await?;
        std::io::Result::Ok(Message::from_vec(&answer).unwrap().answers().len() == 1)
    };
    let answered = tokio::time::timeout(patience(), asked)
        .await
        .expect("an answer or an end");
    answered
        .inspect_err(|error| println!("{}: {error}", name(tenant)))
        .unwrap_or(false)
}

/// Opens silent connections to the address of a tenant.
async fn silent(tenant: usize, count: usize) -> Vec<TcpStream> {
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(TcpStream::connect((home(tenant), 53)).await.unwrap());
    }
    all
}

#[test]
fn silent_connections_of_ten_tenants_leave_dns_over_tcp_to_an_eleventh() {
    run(|| async {
        let fixture = DnsFixture::new();
        fixture.accept();
        // One tenant alone, then nine more.
        let mut held = silent(0, CONNECTIONS_MAX).await;
        fixture
            .until(
                "canal_share_revoked_total{limit=\"dns_connections\",tenant=\"t0\"} ",
                192,
            )
            .await;
        assert!(is_answered(TENANTS - 1).await, "one tenant is silent");
        for tenant in 1..TENANTS - 1 {
            held.extend(silent(tenant, 100).await);
        }
        for n in 0..20 {
            assert!(is_answered(TENANTS - 1).await, "query {n}");
            assert!(
                is_answered(n % (TENANTS - 1)).await,
                "a query of a tenant with silent connections"
            );
        }
        assert_eq!(
            fixture.metric("canal_dns_queries_total{transport=\"tcp\",result=\"too_many\"} "),
            0
        );
        assert!(
            fixture.metric("canal_dns_queries_total{transport=\"tcp\",result=\"displaced\"} ")
                >= 192
        );
        assert_eq!(
            fixture.metric("canal_share_revoked_total{limit=\"dns_connections\",tenant=\"t10\"} "),
            0
        );
        assert!(fixture.metric("canal_share_used{limit=\"dns_connections\",tenant=\"t1\"} ") <= 64);
    });
}

/// The kernel has queued many questions of ten tenants, and then one of an eleventh, when the
/// server gets to run.
#[test]
fn question_of_an_eleventh_tenant_is_answered_in_its_turn_and_not_last() {
    /// Questions of each of the ten tenants, more than may wait.
    const FLOOD: u16 = 300;
    run(|| async {
        let fixture = DnsFixture::new();
        // Nothing waits here, so the server does not run before all questions are sent.
        let client = std::net::UdpSocket::bind("[::]:0").unwrap();
        for n in 0..FLOOD {
            for tenant in 0..TENANTS - 1 {
                client.send_to(&query(n), (home(tenant), 53)).unwrap();
            }
        }
        client.send_to(&query(1), (home(TENANTS - 1), 53)).unwrap();
        client.set_nonblocking(true).unwrap();
        let client = UdpSocket::from_std(client).unwrap();
        let (mut before, mut answer) = (0, [0; 2000]);
        let until_own = async {
            while client.recv_from(&mut answer).await.unwrap().1.ip() != home(TENANTS - 1) {
                before += 1;
            }
        };
        tokio::time::timeout(patience(), until_own)
            .await
            .expect("the eleventh tenant gets an answer");
        // The server receives up to 512 datagrams between 32 answers.
        let rounds = (usize::from(FLOOD) * TENANTS).div_ceil(512);
        assert!(
            before <= 32 * rounds + TENANTS,
            "{before} answers came first"
        );
        let dropped = |tenant| {
            fixture.metric(&format!(
                "canal_dns_dropped_questions_total{{tenant=\"t{tenant}\",reason=\"tenant_busy\"}} "
            ))
        };
        // What a tenant has too much is dropped, and counted by tenant.
        assert!((0..TENANTS - 1).all(|tenant| (1..u64::from(FLOOD)).contains(&dropped(tenant))));
        assert_eq!(dropped(TENANTS - 1), 0);
    });
}
