//! Who asks key servers: keeps a channel per worker and key server, and chooses whom to ask: the own AZ's first, then others; one that does not
//! answer is left alone for a moment.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use canal_model::identity::{Identity, components};
use canal_model::ids::AzName;
use canal_model::trust::KeyServer;
use canal_wire::keyrpc::{Blame, KeyName, Request, SpkiHash};
use tokio::time::Instant;

use super::KeyError;
use super::channel::{Answer, Channel, Exchange};
use super::circuit::Circuit;
use super::counts::{Counts, Failure, Tally};
use super::server::{self, Place, ServerAddress};
use super::signed::{THREADS, Threads, WAITING_MAX};
use crate::certs::CertificateSource;
use crate::metrics::Registry;
use crate::tls::{Credential, TrustStore, TrustView};

/// How long a key server may take to answer before the next one is asked.
pub const TRIP: Duration = Duration::from_millis(250);
/// The last that could be asked may take so many times as long: there is no better one.
pub const LAST_TRIPS: u32 = 4;

/// Who asks whom.
#[derive(Debug, Clone)]
pub struct RequesterConfig {
    /// The own AZ.
    pub az: AzName,
    /// The provider's key servers, in any order.
    pub servers: Vec<ServerAddress>,
    /// The own component identity (`canal_model::identity::component_identity`), which the channels prove.
    pub me: Identity,
    /// How long a key server may take to answer; [`TRIP`].
    pub trip: Duration,
}

/// One key server with what is known of how it does.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) place: Place,
    circuit: Circuit,
    tally: Tally,
}

impl Known {
    fn new(place: Place, counts: &Counts) -> Self {
        Self { tally: counts.tally(&place.name), place, circuit: Circuit::new() }
    }

    /// Counts what it did.
    pub(super) fn shook(&self) {
        self.tally.handshakes.inc();
    }
}

/// Key servers in the order in which they are asked.
pub(super) type Servers = Arc<[Arc<Known>]>;

struct Inner {
    number: usize,
    az: AzName,
    trip: Duration,
    own: Credential,
    /// Of Canal's own parts.
    trust: TrustView,
    provider: Servers,
    /// Tenants' own, by place, so that what is known of them outlives a change of configuration.
    tenants: Mutex<HashMap<Place, Arc<Known>>>,
    counts: Arc<Counts>,
    /// For signatures, started with the first.
    threads: OnceLock<Threads>,
}

/// Asks key servers on behalf of one process. Clones share everything; channels are each worker's own.
#[derive(Clone)]
pub struct Requester {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for Requester {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.inner.provider.iter().map(|k| &k.place.name)).finish()
    }
}

thread_local! {
    /// This worker's channels.
    static CHANNELS: RefCell<HashMap<(usize, Place), Channel>> = RefCell::default();
}

impl Requester {
    /// `certificates` gets a certificate for `config.me` that stays in memory; `trust` says which key servers' certificates are revoked. Nothing
    /// is connected before something is asked.
    ///
    /// Metrics: `canal_keys_*`, see docs/operations/counters.md.
    pub fn start(config: RequesterConfig, certificates: &CertificateSource, trust: &TrustStore, registry: &Registry) -> Self {
        Self::with_credential(config.clone(), certificates.want_in_memory(&config.me), trust, registry)
    }

    /// [`Requester::start`] with the component's certificate given.
    pub fn with_credential(config: RequesterConfig, own: Credential, trust: &TrustStore, registry: &Registry) -> Self {
        static LAST: AtomicUsize = AtomicUsize::new(0);
        let counts = Arc::new(Counts::new(registry));
        let known = |place| Arc::new(Known::new(place, &counts));
        let provider = server::order(&config.az, config.servers).into_iter().map(known).collect();
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
        Self { inner: Arc::new(inner) }
    }

    /// The provider's.
    pub(super) fn provider(&self) -> Servers {
        self.inner.provider.clone()
    }

    /// A tenant's own.
    pub(super) fn of_tenant(&self, server: &KeyServer) -> Servers {
        let mut tenants = self.inner.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        let places = server::of_tenant(&self.inner.az, server).into_iter();
        places
            .map(|place| {
                let new = || Arc::new(Known::new(place.clone(), &self.inner.counts));
                tenants.entry(place.clone()).or_insert_with(new).clone()
            })
            .collect()
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.inner.counts
    }

    /// Counts a handshake with a local key because no key server answered.
    pub(crate) fn fell_back(&self) {
        self.inner.counts.fell_back();
    }

    pub(super) fn threads(&self) -> &Threads {
        self.inner.threads.get_or_init(|| Threads::start(THREADS, WAITING_MAX))
    }

    pub(super) fn trip(&self) -> Duration {
        self.inner.trip
    }

    /// This worker's channel, made anew if it is over.
    fn channel(&self, place: &Place) -> Channel {
        CHANNELS.with_borrow_mut(|channels| {
            let key = (self.inner.number, place.clone());
            match channels.get(&key) {
                Some(c) if !c.is_over() => c.clone(),
                _ => {
                    let new = Channel::start(place.clone(), self.inner.own.clone(), self.inner.trust.clone(), self.inner.counts.clone());
                    channels.insert(key, new.clone());
                    new
                }
            }
        })
    }

    /// Asks one after the other until one answers; the answer comes with the rest of the exchange and whose it is.
    pub(super) async fn first(&self, servers: &Servers, request: &Request<'_>) -> Result<(Arc<Known>, Exchange, Answer), KeyError> {
        let counts = &self.inner.counts;
        let mut tried = Vec::new();
        // At the start of a process its own certificate may be on its way: that is no key server's fault.
        if self.inner.own.current().is_none()
            && tokio::time::timeout(self.inner.trip, self.inner.own.first()).await.ok().flatten().is_none()
        {
            counts.nobody();
            return Err(KeyError::NoKeyServer(format!("there is no certificate of {} yet", self.inner.own.identity())));
        }
        for (n, known) in servers.iter().enumerate() {
            let name = &known.place.name;
            let patience = if n + 1 == servers.len() { self.inner.trip * LAST_TRIPS } else { self.inner.trip };
            if !known.circuit.allows(Instant::now()) {
                counts.failed(name, Failure::CircuitOpen);
                tried.push(format!("{name}: {}", Failure::CircuitOpen.name()));
                continue;
            }
            let start = Instant::now();
            let why = match self.channel(&known.place).ask(request) {
                Err(why) => why,
                Ok(mut exchange) => match exchange.answer_within(patience).await {
                    Some(Some(Answer::Refused(why, text))) => {
                        known.circuit.well();
                        counts.refused(name, why);
                        if why.blame() != Blame::Server {
                            return Err(KeyError::Refused { server: name.clone(), name: why, text });
                        }
                        tried.push(format!("{name}: {why}: {text}"));
                        continue;
                    }
                    Some(Some(answer)) => {
                        known.circuit.well();
                        known.tally.trip(start.elapsed());
                        return Ok((known.clone(), exchange, answer));
                    }
                    Some(None) => exchange.why(),
                    // It is slow with this one, and well.
                    None if exchange.heard_since() => {
                        counts.failed(name, Failure::Deadline);
                        tried.push(format!("{name}: no answer in {patience:?}"));
                        continue;
                    }
                    None => Failure::Deadline,
                },
            };
            counts.failed(name, why);
            if why != Failure::Busy && known.circuit.failed(Instant::now()) {
                tracing::warn!(server = name, "a key server does not answer and is left alone for a moment");
            }
            tried.push(format!("{name}: {}", why.name()));
        }
        counts.nobody();
        Err(KeyError::NoKeyServer(if tried.is_empty() { "there is none".into() } else { tried.join(", ") }))
    }

    /// A signature with the key that is `shown`, by whichever key server has it and answers.
    pub(super) async fn sign(
        &self,
        servers: &Servers,
        key: KeyName,
        shown: SpkiHash,
        scheme: u16,
        input: &[u8],
    ) -> Result<Vec<u8>, KeyError> {
        let deadline_ms = u32::try_from((self.inner.trip * LAST_TRIPS).as_millis()).unwrap_or(u32::MAX);
        let request = Request::Sign { key, shown: Some(shown), scheme, deadline_ms, input };
        let (known, _, answer) = self.first(servers, &request).await?;
        match answer {
            Answer::Signature(bytes) => {
                known.tally.signatures.inc();
                Ok(bytes)
            }
            _ => Err(KeyError::Answer { server: known.place.name.clone(), what: "not a signature" }),
        }
    }

    /// A key's certificates, DER, leaf first, and the key servers with the one first that has this key: another one's may be another key.
    pub(super) async fn chain(&self, servers: &Servers, key: KeyName) -> Result<(Vec<Vec<u8>>, Servers), KeyError> {
        let (known, _, answer) = self.first(servers, &Request::Chain { key }).await?;
        match answer {
            Answer::Certificates(chain) if !chain.is_empty() => {
                let others = servers.iter().filter(|other| !Arc::ptr_eq(other, &known));
                Ok((chain, std::iter::once(&known).chain(others).cloned().collect()))
            }
            _ => Err(KeyError::Answer { server: known.place.name.clone(), what: "no certificates" }),
        }
    }
}
