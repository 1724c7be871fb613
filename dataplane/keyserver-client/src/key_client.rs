//! Client of the key servers: one channel per worker and key server, and the selection of the
//! server for a request. Servers of this AZ come first, then the others. A circuit breaker skips a
//! server that does not answer. Handshakes and signatures are in `remote_handshake` and
//! `remote_signing`. Start with [`KeyClient::start`].

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use canal_model::identity::{Identity, components};
use canal_model::ids::AzName;
use canal_model::trust::KeyServer;
use canal_runtime::metrics::Registry;
use canal_tls::{Credential, KeyServerError, TrustStore, TrustView};
use canal_wire::keyrpc::{KeyName, KeyRequest, RefusalAttribution, SpkiHash};
use tokio::time::Instant;

use super::channel::{KeyServerAnswer, KeyServerCall, KeyServerChannel};
use super::circuit_breaker::CircuitBreaker;
use super::counts::{HandshakeCounters, KeyClientCounters, KeyServerFailure};
use super::server_address::{self, KeyServerTarget, ServerAddress};
use super::signing_threads::{SigningThreads, THREADS, WAITING_MAX};

/// Timeout of a key server's answer before the next server is tried. A signature takes
/// milliseconds, so an answer that is later means a server that is dead or overloaded. Nobody
/// measured the value.
pub const ANSWER_TIMEOUT: Duration = Duration::from_millis(250);
/// Factor of the timeout for the last server that can be tried, because there is no better one.
/// That server has a second, of the 10 s of a handshake.
pub const LAST_SERVER_TIMEOUT_FACTOR: u32 = 4;

/// Configuration of the key client.
#[derive(Debug, Clone)]
pub struct KeyClientConfig {
    /// AZ in which this process runs.
    pub az: AzName,
    /// Key servers of the provider, in any order.
    pub servers: Vec<ServerAddress>,
    /// Component identity of this process (`canal_model::identity::component_identity`), with which
    /// the channels authenticate.
    pub me: Identity,
    /// Timeout of a key server's answer, see [`ANSWER_TIMEOUT`].
    pub trip: Duration,
}

/// One key server with its circuit breaker and counters.
#[derive(Debug)]
pub(super) struct KeyServerState {
    pub(super) target: KeyServerTarget,
    pub(super) circuit: CircuitBreaker,
    tally: HandshakeCounters,
}

impl KeyServerState {
    fn new(place: KeyServerTarget, counts: &KeyClientCounters) -> Self {
        Self {
            tally: counts.tally(&place.name),
            target: place,
            circuit: CircuitBreaker::new(),
        }
    }

    /// Counts a handshake that this server completed.
    pub(super) fn record_handshake(&self) {
        self.tally.handshakes.inc();
    }
}

/// Key servers in the order in which they are tried.
pub(super) type KeyServerOrder = Arc<[Arc<KeyServerState>]>;

struct Inner {
    number: usize,
    az: AzName,
    trip: Duration,
    own: Credential,
    /// Trust view of Canal's own components.
    trust: TrustView,
    provider: KeyServerOrder,
    /// Tenants' own key servers by target, so that their state survives a change of configuration.
    tenants: Mutex<HashMap<KeyServerTarget, Arc<KeyServerState>>>,
    counts: Arc<KeyClientCounters>,
    /// Threads for signatures, started with the first signature.
    threads: OnceLock<SigningThreads>,
}

/// Client of the key servers for one process. Clones share everything; each worker has its own
/// channels.
#[derive(Clone)]
pub struct KeyClient {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for KeyClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list()
            .entries(self.inner.provider.iter().map(|k| &k.target.name))
            .finish()
    }
}

thread_local! {
    /// Channels of this worker, by client and server.
    static CHANNELS: RefCell<HashMap<(usize, KeyServerTarget), KeyServerChannel>> = RefCell::default();
}

impl KeyClient {
    /// Creates a client whose channels present `own`, the certificate of `config.me`. `trust` has
    /// the revocations of key servers' certificates. The client connects at the first request.
    ///
    /// Metrics: `canal_keys_*`, see docs/operations/counters.md.
    pub fn start(
        config: KeyClientConfig,
        own: Credential,
        trust: &TrustStore,
        registry: &Registry,
    ) -> Self {
        static LAST: AtomicUsize = AtomicUsize::new(0);
        let counts = Arc::new(KeyClientCounters::new(registry));
        let known = |place| Arc::new(KeyServerState::new(place, &counts));
        let provider = server_address::order(&config.az, config.servers)
            .into_iter()
            .map(known)
            .collect();
        let inner = Inner {
            number: LAST.fetch_add(1, Relaxed),
            az: config.az,
            trip: config.trip,
            own,
            trust: trust.view(&components().0),
            provider,
            tenants: Mutex::default(),
            counts,
            threads: OnceLock::new(),
        };
        Self {
            inner: Arc::new(inner),
        }
    }

    /// Returns the provider's key servers.
    pub(super) fn provider(&self) -> KeyServerOrder {
        self.inner.provider.clone()
    }

    /// Returns a tenant's own key servers.
    pub(super) fn of_tenant(&self, server: &KeyServer) -> KeyServerOrder {
        let mut tenants = self
            .inner
            .tenants
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let places = server_address::of_tenant(&self.inner.az, server).into_iter();
        places
            .map(|place| {
                let new = || Arc::new(KeyServerState::new(place.clone(), &self.inner.counts));
                tenants.entry(place.clone()).or_insert_with(new).clone()
            })
            .collect()
    }

    pub(super) fn counts(&self) -> &KeyClientCounters {
        &self.inner.counts
    }

    /// Counts a handshake with a local key because no key server answered.
    pub fn record_fallback(&self) {
        self.inner.counts.fell_back();
    }

    pub(super) fn threads(&self) -> &SigningThreads {
        self.inner
            .threads
            .get_or_init(|| SigningThreads::start(THREADS, WAITING_MAX))
    }

    pub(super) fn round_trip_timeout(&self) -> Duration {
        self.inner.trip
    }

    /// Returns this worker's channel, and opens a new one if the last has ended.
    fn channel(&self, place: &KeyServerTarget) -> KeyServerChannel {
        CHANNELS.with_borrow_mut(|channels| {
            let key = (self.inner.number, place.clone());
            match channels.get(&key) {
                Some(c) if !c.is_over() => c.clone(),
                _ => {
                    let new = KeyServerChannel::start(
                        place.clone(),
                        self.inner.own.clone(),
                        self.inner.trust.clone(),
                        self.inner.counts.clone(),
                    );
                    channels.insert(key, new.clone());
                    new
                }
            }
        })
    }

    /// Waits for this process's own certificate, which may not be there yet when the process
    /// starts. That is not a key server's fault.
    async fn wait_for_certificate(&self) -> Result<(), KeyServerError> {
        let own = &self.inner.own;
        let is_there = own.current().is_some()
            || tokio::time::timeout(self.inner.trip, own.first())
                .await
                .is_ok_and(|first| first.is_some());
        if is_there {
            return Ok(());
        }
        self.inner.counts.record_unavailable();
        let problem = format!("{} has no certificate yet", own.identity());
        Err(KeyServerError::NoKeyServer(problem))
    }

    /// Tries one server after the other until one answers. Returns the server, the rest of the
    /// exchange, and its first answer.
    pub(super) async fn first(
        &self,
        servers: &KeyServerOrder,
        request: &KeyRequest<'_>,
    ) -> Result<(Arc<KeyServerState>, KeyServerCall, KeyServerAnswer), KeyServerError> {
        let counts = &self.inner.counts;
        let mut tried = Vec::new();
        self.wait_for_certificate().await?;
        for (n, known) in servers.iter().enumerate() {
            let name = &known.target.name;
            // A later server whose circuit breaker is open is not tried, so it is no better one.
            let now = Instant::now();
            let is_last = !servers[n + 1..].iter().any(|it| it.circuit.may_allow(now));
            let timeout = if is_last {
                self.inner.trip * LAST_SERVER_TIMEOUT_FACTOR
            } else {
                self.inner.trip
            };
            if !known.circuit.allows(now) {
                counts.failed(name, KeyServerFailure::CircuitOpen);
                tried.push(format!("{name}: {}", KeyServerFailure::CircuitOpen.name()));
                continue;
            }
            let start = Instant::now();
            let why = match self.channel(&known.target).send_request(request) {
                Err(why) => why,
                Ok(mut exchange) => match exchange.answer_within(timeout).await {
                    Some(Some(KeyServerAnswer::Refused(why, text))) => {
                        known.circuit.record_success();
                        counts.refused(name, why);
                        // A refusal because of the request or the peer would be the same at every
                        // server.
                        if why.attribution() != RefusalAttribution::Server {
                            return Err(KeyServerError::Refused {
                                server: name.clone(),
                                name: why,
                                text,
                            });
                        }
                        tried.push(format!("{name}: {why}: {text}"));
                        continue;
                    }
                    Some(Some(answer)) => {
                        known.circuit.record_success();
                        known.tally.trip(start.elapsed());
                        return Ok((known.clone(), exchange, answer));
                    }
                    Some(None) => exchange.why(),
                    // The server answers others, so it is only slow with this request; the circuit
                    // breaker does not count that.
                    None if exchange.has_server_answered() => {
                        counts.failed(name, KeyServerFailure::Deadline);
                        tried.push(format!("{name}: no answer within {timeout:?}"));
                        continue;
                    }
                    None => KeyServerFailure::Deadline,
                },
            };
            counts.failed(name, why);
            // `Busy` is a limit of this side and does not indicate a fault of the server.
            if why != KeyServerFailure::Busy && known.circuit.record_failure(Instant::now()) {
                tracing::warn!(
                    server = name,
                    "key client: a key server does not answer; its circuit breaker is open"
                );
            }
            tried.push(format!("{name}: {}", why.name()));
        }
        counts.record_unavailable();
        Err(KeyServerError::NoKeyServer(if tried.is_empty() {
            "there is none".into()
        } else {
            tried.join(", ")
        }))
    }

    /// Requests a signature with the key whose certificate is presented (`shown`), from the first
    /// server that has it and answers.
    pub(super) async fn sign(
        &self,
        servers: &KeyServerOrder,
        key: KeyName,
        shown: SpkiHash,
        scheme: u16,
        input: &[u8],
    ) -> Result<Vec<u8>, KeyServerError> {
        let deadline_ms = u32::try_from((self.inner.trip * LAST_SERVER_TIMEOUT_FACTOR).as_millis())
            .unwrap_or(u32::MAX);
        let request = KeyRequest::Sign {
            key,
            presented: Some(shown),
            scheme,
            deadline_ms,
            input,
        };
        let (known, _, answer) = self.first(servers, &request).await?;
        match answer {
            KeyServerAnswer::Signature(bytes) => {
                known.tally.signatures.inc();
                Ok(bytes)
            }
            _ => Err(KeyServerError::Answer {
                server: known.target.name.clone(),
                what: "not a signature",
            }),
        }
    }

    /// Returns a key's certificates (DER, leaf first), and the key servers, starting with the one
    /// that has this key: another server may have another key.
    pub(super) async fn chain(
        &self,
        servers: &KeyServerOrder,
        key: KeyName,
    ) -> Result<(Vec<Vec<u8>>, KeyServerOrder), KeyServerError> {
        let (known, _, answer) = self.first(servers, &KeyRequest::Chain { key }).await?;
        match answer {
            KeyServerAnswer::Certificates(chain) if !chain.is_empty() => {
                let others = servers.iter().filter(|other| !Arc::ptr_eq(other, &known));
                Ok((
                    chain,
                    std::iter::once(&known).chain(others).cloned().collect(),
                ))
            }
            _ => Err(KeyServerError::Answer {
                server: known.target.name.clone(),
                what: "no certificates",
            }),
        }
    }
}
