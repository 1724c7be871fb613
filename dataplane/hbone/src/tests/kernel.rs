//! Remote handshakes over TCP in a kernel with TLS: both ends are handed over, and pools replace
//! connections whose keys are spent. The cases run in user-mode Linux, because the host's kernel
//! may have no TLS.

use std::pin::Pin;
use std::sync::Arc;

use canal_identity::{ClientIdentity, ClientIdentityFactory, ServerIdentity};
use canal_keyserver_client::{KeyClient, KeyClientConfig, parse_key_server};
use canal_model::identity::Identity;
use canal_model::trust::{KeyAlgorithm, KeyLocation, KeyPolicy};
use canal_runtime::drain;
use canal_runtime::metrics::Registry;
use canal_testing::user_mode_linux;
use canal_testing::{FakeKeyServer, TestCa, identity};
use canal_tls::{MtlsStream, TrustStore};
use http::HeaderMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{LocalSet, spawn_local};

use super::fixture::{ALICE, BOB, echo, ms};
use crate::{
    ConnectResult, HboneCounters, HbonePool, PoolConfig, ServerConfig, TunnelTarget, serve,
};

type KernelCaseFn = fn() -> Pin<Box<dyn Future<Output = ()>>>;
/// Cases that run inside user-mode Linux, by name.
const INSIDE: [(&str, KernelCaseFn); 2] = [
    ("a key server's handshake is handed over", || {
        Box::pin(both_ends_are_the_kernels())
    }),
    (
        "a pool's connection that is worn is followed by another",
        || Box::pin(worn_connections_are_followed_by_others()),
    ),
];

/// Boots user-mode Linux and lets it run [`inside`].
#[test]
fn remote_handshakes_are_handed_to_a_kernel_that_has_tls() {
    let said = user_mode_linux::run("tests::kernel::inside");
    for (name, _) in INSIDE {
        assert!(
            said.contains(&format!("lab: ok {name}\n")),
            "not said: {name}\n{said}"
        );
    }
    assert!(said.contains("lab: all done\n"), "{said}");
}

/// Does nothing in the host's kernel: it is the first process of another kernel.
#[test]
fn inside() {
    user_mode_linux::first_process(|modules| {
        modules.load(&user_mode_linux::TLS);
        modules.load(&user_mode_linux::CIPHER);
        for (name, case) in INSIDE {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime
                .block_on(async {
                    tokio::time::timeout(canal_timing::deadline(ms(30_000)), case()).await
                })
                .unwrap_or_else(|_| panic!("hangs: {name}"));
            user_mode_linux::print_line(&format!("ok {name}"));
        }
    });
}

async fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
    (near.unwrap(), far.unwrap().0)
}

/// A key server with the keys of two identities, and a client of it.
struct RemoteKeyFixture {
    registry: Registry,
    ca: Arc<TestCa>,
    requester: KeyClient,
    store: TrustStore,
    _server: FakeKeyServer,
}

impl RemoteKeyFixture {
    async fn new() -> Self {
        let (registry, components, ca) = (
            Registry::new(),
            TestCa::new("components"),
            Arc::new(TestCa::new("alpha")),
        );
        let server = FakeKeyServer::start(&components, "ks1").await;
        for id in [ALICE, BOB] {
            server.hold(id, ca.issue(&identity(id)));
        }
        let me = identity("spiffe://components.canal/ns/canal-system/sa/gateway.r1");
        let servers = vec![parse_key_server(&format!("az1=ks1@{}", server.address)).unwrap()];
        let config = KeyClientConfig {
            az: "az1".parse().unwrap(),
            servers,
            me: me.clone(),
            trip: ms(500) * canal_timing::slack(),
        };
        let store = TrustStore::new(&registry);
        let requester = KeyClient::start(config, components.credential(&me), &store, &registry);
        store
            .replace([ca.bundle("alpha", "alpha.example", false, vec![])])
            .unwrap();
        Self {
            registry,
            ca,
            requester,
            store,
            _server: server,
        }
    }

    fn pair(&self, id: &str, location: KeyLocation) -> (ServerIdentity, ClientIdentity) {
        let policy = KeyPolicy {
            location,
            algorithm: KeyAlgorithm::EcdsaP256,
            local_fallback: false,
        };
        let ca = self.ca.clone();
        let factory = ClientIdentityFactory::of(
            Arc::new(move |id| ca.credential(id)),
            Some(self.requester.clone()),
            self.store.clone(),
        );
        factory.pair(&"alpha".parse().unwrap(), &policy, &identity(id))
    }

    fn metric(&self, start: &str) -> u64 {
        let text = self.registry.render();
        let line = text.lines().find(|l| l.starts_with(start));
        line.and_then(|l| l.rsplit(' ').next())
            .map_or(0, |v| v.parse().unwrap())
    }
}

fn bob() -> Arc<[Identity]> {
    Arc::from([identity(BOB)])
}

/// Sends data in both directions, and then closes both in order.
async fn converse(mut a: MtlsStream<TcpStream>, mut b: MtlsStream<TcpStream>) {
    let left = async {
        a.write_all(&[7; 200_000]).await.unwrap();
        a.shutdown().await.unwrap();
        let mut got = Vec::new();
        a.read_to_end(&mut got).await.unwrap();
        got
    };
    let right = async {
        let mut got = Vec::new();
        b.read_to_end(&mut got).await.unwrap();
        b.write_all(&got).await.unwrap();
        b.shutdown().await.unwrap();
    };
    assert_eq!(tokio::join!(left, right).0, [7; 200_000]);
}

/// Checks that both ends with remote keys are handed to the kernel, and that a client with a local
/// key is not.
async fn both_ends_are_the_kernels() {
    let (fixture, pair, again) = (
        RemoteKeyFixture::new().await,
        tcp_pair().await,
        tcp_pair().await,
    );
    let (server, _) = fixture.pair(BOB, KeyLocation::KeyServer);
    let (_, remote) = fixture.pair(ALICE, KeyLocation::KeyServer);
    let (_, local) = fixture.pair(ALICE, KeyLocation::Local);
    let expected = bob();
    for (client, is_kernel, (near, far)) in [(remote, true, pair), (local, false, again)] {
        let (c, s) = tokio::join!(client.connect(near, &expected), server.accept(far));
        let (c, s) = (c.unwrap().0, s.unwrap().0);
        assert!(s.is_kernel() && s.is_remote() && c.is_kernel() == is_kernel);
        converse(c, s).await;
    }
    assert_eq!(
        fixture.metric("canal_tls_kernel_connections_total{result=\"kernel\"}"),
        3
    );
    assert_eq!(fixture.metric("canal_tls_kernel_available"), 1);
}

/// Opens tunnels of a pool over connections whose keys soon reach their limit, and checks that none
/// fails.
async fn worn_connections_are_followed_by_others() {
    // Few records, so that the tunnels below exceed them several times.
    canal_tls::testing::set_records_max(Some(400));
    // A kernel that can replace keys lets a connection serve beyond the limit of its keys.
    let wear = !canal_tls::kernel_rekeys();
    let fixture = RemoteKeyFixture::new().await;
    let (server, _) = fixture.pair(BOB, KeyLocation::KeyServer);
    let (_, source) = fixture.pair(ALICE, KeyLocation::KeyServer);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let counters = HboneCounters::new(&fixture.registry, &fixture.registry.shard());
    let (_trigger, drain) = drain::tree();
    let (at_server, all) = (counters.clone(), LocalSet::new());
    all.spawn_local(async move {
        loop {
            let tcp = listener.accept().await.unwrap().0;
            let (server, counters, drain) = (server.clone(), at_server.clone(), drain.clone());
            spawn_local(async move {
                let (io, peer) = server.accept(tcp).await.unwrap();
                assert!(io.is_kernel());
                let each = |asked: ConnectResult| drop(spawn_local(echo(asked.unwrap())));
                serve(io, peer, &ServerConfig::default(), &counters, drain, each)
                    .await
                    .unwrap();
            });
        }
    });
    let pool = HbonePool::new(PoolConfig::default(), counters);
    let target = TunnelTarget {
        source,
        expected: bob(),
        address,
        netns: None,
        mark: None,
    };
    let tunnels = async {
        // Enough tunnels that several connections reach the number of records.
        for n in 0..600u32 {
            let mut tunnel = pool
                .open(&target, &"10.1.1.2:80".parse().unwrap(), HeaderMap::new())
                .await
                .unwrap()
                .stream;
            tunnel.write_all(&n.to_be_bytes()).await.unwrap();
            tunnel.shutdown().await.unwrap();
            let mut got = Vec::new();
            tunnel.read_to_end(&mut got).await.unwrap();
            assert_eq!(got, n.to_be_bytes());
        }
    };
    all.run_until(tunnels).await;
    let retired = fixture.metric("canal_hbone_closed_total{side=\"client\",reason=\"retired\"}");
    assert_eq!(retired > 1, wear, "{}", fixture.registry.render());
    assert_eq!(
        fixture.metric("canal_hbone_closed_total{side=\"client\",reason=\"error\"}"),
        0
    );
    assert_eq!(
        fixture.metric("canal_hbone_closed_total{side=\"server\",reason=\"error\"}"),
        0
    );
}
