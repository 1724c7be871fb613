//! Fixture of a server with a handler per CONNECT, and a pool that is configured to reach it.

use std::cell::RefCell;
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use canal_identity::{ClientIdentity, ServerIdentity};
use canal_model::identity::Identity;
use canal_model::ids::TenantName;
use canal_runtime::drain::{self, DrainTrigger, DrainWatcher};
use canal_runtime::metrics::Registry;
use canal_testing::{TestCa, identity};
use canal_tls::{Certificate, Credential, CredentialWriter, TrustStore, TrustView};
use http::HeaderMap;
use tokio::net::TcpListener;
use tokio::task::LocalSet;

use crate::{
    ConnectAuthority, ConnectResult, HboneCounters, HboneError, HbonePool, IncomingConnect,
    OpenTunnel, PoolConfig, ServerConfig, TunnelTarget, serve,
};

pub(super) const ALICE: &str = "spiffe://alpha.example/ns/shop/sa/alice";
pub(super) const BOB: &str = "spiffe://alpha.example/ns/shop/sa/bob";

pub(super) struct HboneFixture {
    pub(super) ca: TestCa,
    pub(super) registry: Registry,
    pub(super) counters: HboneCounters,
    pub(super) pool: HbonePool,
    pub(super) target: TunnelTarget,
    /// Trust store of both sides, empty at first.
    pub(super) store: TrustStore,
    /// Writer that replaces the client's certificate.
    pub(super) renew: CredentialWriter,
    /// Result of each connection of the server.
    pub(super) served: Rc<RefCell<Vec<Result<(), String>>>>,
}

/// Runs a test where `spawn_local` works, and fails it if it hangs.
pub(super) fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    LocalSet::new().block_on(&runtime, async {
        tokio::time::timeout(canal_timing::deadline(Duration::from_secs(30)), test)
            .await
            .expect("the test hangs");
    });
}

pub(super) fn authority() -> ConnectAuthority {
    "10.1.1.2:80".parse().unwrap()
}

pub(super) fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Waits until `holds` returns true, for an effect of another task.
pub(super) async fn until(what: &str, holds: impl Fn() -> bool) {
    let started = tokio::time::Instant::now();
    while !holds() {
        let waited = started.elapsed();
        assert!(waited < canal_timing::deadline(ms(5000)), "never: {what}");
        tokio::time::sleep(ms(10)).await;
    }
}

/// Listens on the address of a listener that is closing.
pub(super) async fn listen_again(address: SocketAddr) -> TcpListener {
    let started = tokio::time::Instant::now();
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(e) => {
                let waited = started.elapsed();
                assert!(waited < canal_timing::deadline(ms(5000)), "{address}: {e}");
                tokio::time::sleep(ms(5)).await;
            }
        }
    }
}

impl HboneFixture {
    /// Creates a pool whose target is `address`, without a server.
    pub(super) fn towards(address: SocketAddr, config: PoolConfig) -> Self {
        let ca = TestCa::new("alpha");
        let registry = Registry::new();
        let counters = HboneCounters::new(&registry, &registry.shard());
        let (renew, credential) = Credential::empty(identity(ALICE));
        renew.replace(ca.issue(&identity(ALICE)));
        let expected: Arc<[Identity]> = Arc::from([identity(BOB)]);
        let store = TrustStore::new(&registry);
        let source =
            ClientIdentity::new(credential).trusting(store.view(&"alpha".parse().unwrap()));
        let target = TunnelTarget {
            source,
            expected,
            address,
            netns: None,
            mark: None,
        };
        let pool = HbonePool::new(config, counters.clone());
        Self {
            ca,
            registry,
            counters,
            pool,
            target,
            store,
            renew,
            served: Rc::default(),
        }
    }

    /// Creates a pool and a server on loopback whose CONNECT requests go to `handler`.
    pub(super) async fn new<F, R>(
        config: PoolConfig,
        server: ServerConfig,
        handler: F,
    ) -> (Self, DrainTrigger)
    where
        F: Fn(IncomingConnect) -> R + Clone + 'static,
        R: Future<Output = ()> + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let fixture = Self::towards(listener.local_addr().unwrap(), config);
        let (trigger, drain) = drain::tree();
        fixture.listen(listener, server, drain, handler);
        (fixture, trigger)
    }

    /// Accepts until `drain` begins; connections drain with it.
    pub(super) fn listen<F, R>(
        &self,
        listener: TcpListener,
        config: ServerConfig,
        drain: DrainWatcher,
        handler: F,
    ) where
        F: Fn(IncomingConnect) -> R + Clone + 'static,
        R: Future<Output = ()> + 'static,
    {
        let identity = ServerIdentity::new(
            TenantName::new("alpha").unwrap(),
            self.ca.credential(&identity(BOB)),
        )
        .trusting(self.trust());
        let (counters, served) = (self.counters.clone(), self.served.clone());
        tokio::task::spawn_local(async move {
            loop {
                let tcp = tokio::select! {
                    accepted = listener.accept() => accepted.unwrap().0,
                    () = drain.draining() => return,
                };
                let (identity, config, counters) =
                    (identity.clone(), config.clone(), counters.clone());
                let (served, drain, handler) = (served.clone(), drain.clone(), handler.clone());
                tokio::task::spawn_local(async move {
                    let result = match identity.accept(tcp).await {
                        Ok((io, peer)) => {
                            let hand_out = |asked: ConnectResult| {
                                // `serve` has already answered a request that it refuses.
                                if let Ok(incoming) = asked {
                                    tokio::task::spawn_local(handler(incoming));
                                }
                            };
                            serve(io, peer, &config, &counters, drain, hand_out)
                                .await
                                .map_err(|e| e.to_string())
                        }
                        Err(e) => Err(e.to_string()),
                    };
                    served.borrow_mut().push(result);
                });
            }
        });
    }

    pub(super) fn trust(&self) -> TrustView {
        self.store.view(&"alpha".parse().unwrap())
    }

    /// Issues a certificate with this serial number, by which revocation lists refer to it.
    pub(super) fn numbered(&self, id: &str, serial: u64) -> Certificate {
        let i = self
            .ca
            .issue_with(&identity(id), |p| p.serial_number = Some(serial.into()));
        Certificate::from_pem(&i.key, &i.chain, &self.ca.root_pem()).unwrap()
    }

    pub(super) fn revoke(&self, serials: &[u64]) {
        self.store
            .replace([self.ca.bundle(
                "alpha",
                "alpha.example",
                false,
                vec![self.ca.revocations(serials)],
            )])
            .unwrap();
    }

    pub(super) async fn open(&self) -> Result<OpenTunnel, HboneError> {
        self.pool
            .open(&self.target, &authority(), HeaderMap::new())
            .await
    }

    /// Returns the value of the metric line that starts with `start`.
    pub(super) fn metric(&self, start: &str) -> u64 {
        let text = self.registry.render();
        let line = text.lines().find(|l| l.starts_with(start));
        line.and_then(|l| l.rsplit(' ').next())
            .map_or(0, |v| v.parse().unwrap())
    }
}

/// Accepts the tunnel and sends back the bytes that it receives.
pub(super) async fn echo(incoming: IncomingConnect) {
    let stream = incoming.accept(HeaderMap::new()).unwrap();
    let (mut r, mut w) = tokio::io::split(stream);
    if tokio::io::copy(&mut r, &mut w).await.is_ok() {
        let _ = tokio::io::AsyncWriteExt::shutdown(&mut w).await;
    }
}

/// Accepts the tunnel and leaves it open until the client ends it.
pub(super) async fn hold(incoming: IncomingConnect) {
    let mut stream = incoming.accept(HeaderMap::new()).unwrap();
    let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
}
