//! A server with a handler per CONNECT, and a pool that knows how to reach it.

use std::cell::RefCell;
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use canal_model::identity::Identity;
use canal_model::ids::TenantName;
use http::HeaderMap;
use tokio::net::TcpListener;
use tokio::task::LocalSet;

use crate::drain::{self, Drain, Trigger};
use crate::hbone::{Asked, Authority, HboneCounters, HboneError, Incoming, Opened, Pool, PoolConfig, ServerConfig, Target, serve};
use crate::metrics::Registry;
use crate::testing::{TestCa, identity};
use crate::tls::{Certificate, ClientIdentity, Credential, CredentialWriter, ServerIdentity, TrustStore, TrustView};

pub(super) const ALICE: &str = "spiffe://alpha.example/ns/shop/sa/alice";
pub(super) const BOB: &str = "spiffe://alpha.example/ns/shop/sa/bob";

pub(super) struct Rig {
    pub(super) ca: TestCa,
    pub(super) registry: Registry,
    pub(super) counters: HboneCounters,
    pub(super) pool: Pool,
    pub(super) target: Target,
    /// What both sides believe; told nothing at first.
    pub(super) store: TrustStore,
    /// Replaces the client's certificate.
    pub(super) renew: CredentialWriter,
    /// What each connection the server had came to.
    pub(super) served: Rc<RefCell<Vec<Result<(), String>>>>,
}

/// Runs a test where `spawn_local` works, and fails it rather than hang.
pub(super) fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    LocalSet::new().block_on(&runtime, async {
        tokio::time::timeout(Duration::from_secs(120), test).await.expect("the test hangs");
    });
}

pub(super) fn authority() -> Authority {
    "10.1.1.2:80".parse().unwrap()
}

pub(super) fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Waits until `holds`, for something that another task is about to do.
pub(super) async fn until(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..500 {
        if holds() {
            return;
        }
        tokio::time::sleep(ms(10)).await;
    }
    panic!("never: {what}");
}

impl Rig {
    /// A pool pointed at `address`, without a server.
    pub(super) fn towards(address: SocketAddr, config: PoolConfig) -> Self {
        let ca = TestCa::new("alpha");
        let registry = Registry::new();
        let counters = HboneCounters::new(&registry, &registry.shard());
        let (renew, credential) = Credential::empty(identity(ALICE));
        renew.replace(ca.issue(&identity(ALICE)));
        let expected: Arc<[Identity]> = Arc::from([identity(BOB)]);
        let store = TrustStore::new(&registry);
        let source = ClientIdentity::new(credential).trusting(store.view(&"alpha".parse().unwrap()));
        let target = Target { source, expected, address, netns: None, mark: None };
        let pool = Pool::new(config, counters.clone());
        Self { ca, registry, counters, pool, target, store, renew, served: Rc::default() }
    }

    /// A pool and a server on loopback whose CONNECTs go to `handler`.
    pub(super) async fn new<F, R>(config: PoolConfig, server: ServerConfig, handler: F) -> (Self, Trigger)
    where
        F: Fn(Incoming) -> R + Clone + 'static,
        R: Future<Output = ()> + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let rig = Self::towards(listener.local_addr().unwrap(), config);
        let (trigger, drain) = drain::tree();
        rig.listen(listener, server, drain, handler);
        (rig, trigger)
    }

    /// Accepts until `drain` is forced; connections drain with it.
    pub(super) fn listen<F, R>(&self, listener: TcpListener, config: ServerConfig, drain: Drain, handler: F)
    where
        F: Fn(Incoming) -> R + Clone + 'static,
        R: Future<Output = ()> + 'static,
    {
        let identity = ServerIdentity::new(TenantName::new("alpha").unwrap(), self.ca.credential(&identity(BOB))).trusting(self.trust());
        let (counters, served) = (self.counters.clone(), self.served.clone());
        tokio::task::spawn_local(async move {
            loop {
                let tcp = tokio::select! {
                    accepted = listener.accept() => accepted.unwrap().0,
                    () = drain.draining() => return,
                };
                let (identity, config, counters) = (identity.clone(), config.clone(), counters.clone());
                let (served, drain, handler) = (served.clone(), drain.clone(), handler.clone());
                tokio::task::spawn_local(async move {
                    let result = match identity.accept(tcp).await {
                        Ok((io, peer)) => {
                            let hand_out = |asked: Asked| {
                                if let Ok(incoming) = asked {
                                    tokio::task::spawn_local(handler(incoming));
                                }
                            };
                            serve(io, peer, &config, &counters, drain, hand_out).await.map_err(|e| e.to_string())
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

    /// The number that revocation lists know the certificate by.
    pub(super) fn numbered(&self, id: &str, serial: u64) -> Certificate {
        let i = self.ca.issue_with(&identity(id), |p| p.serial_number = Some(serial.into()));
        Certificate::from_pem(&i.key, &i.chain, &self.ca.root_pem()).unwrap()
    }

    pub(super) fn revoke(&self, serials: &[u64]) {
        self.store.replace([self.ca.bundle("alpha", "alpha.example", false, vec![self.ca.revocations(serials)])]).unwrap();
    }

    pub(super) async fn open(&self) -> Result<Opened, HboneError> {
        self.pool.open(&self.target, &authority(), HeaderMap::new()).await
    }

    /// The value of a metric line that starts so.
    pub(super) fn metric(&self, start: &str) -> u64 {
        let text = self.registry.render();
        let line = text.lines().find(|l| l.starts_with(start));
        line.and_then(|l| l.rsplit(' ').next()).map_or(0, |v| v.parse().unwrap())
    }
}

/// Accepts and sends back what it gets.
pub(super) async fn echo(incoming: Incoming) {
    let stream = incoming.accept(HeaderMap::new()).unwrap();
    let (mut r, mut w) = tokio::io::split(stream);
    if tokio::io::copy(&mut r, &mut w).await.is_ok() {
        let _ = tokio::io::AsyncWriteExt::shutdown(&mut w).await;
    }
}

/// Accepts and holds the tunnel until the client ends it.
pub(super) async fn hold(incoming: Incoming) {
    let mut stream = incoming.accept(HeaderMap::new()).unwrap();
    let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
}
