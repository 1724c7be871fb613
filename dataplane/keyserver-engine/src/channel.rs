//! One requester's channel: its requests in progress, from their frames to their responses.
//!
//! `entitlements` and `tenant_key_files` decide on the use of keys. `operation_pool` schedules the
//! operations. `engine` reads and writes the bytes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use canal_model::identity::Identity;
use canal_model::ids::TenantName;
use canal_runtime::metrics::SharedGauge;
use canal_tls::SecretBuffer;
use canal_wire::keyrpc::{
    FRAME_MAX, Frame, HandshakeRequest, HandshakeResult, HandshakeRole, KeyName, KeyRefusal,
    KeyRequest, KeyResponse, SpkiHash,
};
use rustls::SignatureScheme;
use tokio::sync::Notify;

use crate::certified_key::CertifiedPrivateKey;
use crate::counts::{KeyOperation, KeyServerCounters};
use crate::entitlements::{ChannelPeer, EntitlementIndex, KeyClaim};
use crate::handshake::{self, HandshakeParams, HandshakeStep, RelayedHandshake};
use crate::key::PrivateKeyError;
use crate::limits::{HANDSHAKE_BYTES_MAX, HANDSHAKE_TIME, OUTBOX_MAX, SIGN_TIME};
use crate::operation_pool::{OperationPool, PoolTask};
use crate::provision::Provisioner;
use crate::quotas::{QuotaPermit, Quotas};
use crate::tenant_key_files::{self, TenantKeyFiles};

/// Reason why a request is refused, the tenant for which it counts, and the text for operators.
#[derive(Debug)]
struct RequestRejection {
    name: KeyRefusal,
    tenant: Option<TenantName>,
    text: String,
}

impl RequestRejection {
    fn new(name: KeyRefusal, text: impl Into<String>) -> Self {
        Self {
            name,
            tenant: None,
            text: text.into(),
        }
    }

    fn of(self, tenant: &TenantName) -> Self {
        Self {
            tenant: Some(tenant.clone()),
            ..self
        }
    }
}

/// Progress of one request in the table.
#[derive(Debug)]
enum RequestProgress {
    /// The request waits for its key, is queued, or is being worked on. Bytes that the peer sends
    /// meanwhile are in `pending`.
    Busy { pending: Vec<u8> },
    /// The handshake waits for bytes of its peer.
    Peer(Box<RelayedHandshake>),
}

/// Identifies one request among all that ever were: ids may be reused, serial numbers are not.
#[derive(Debug, Clone, Copy)]
struct RequestTicket {
    id: u64,
    serial: u64,
    deadline: Instant,
}

struct ChannelEntry {
    ticket: RequestTicket,
    operation: KeyOperation,
    key: KeyName,
    tenant: TenantName,
    progress: RequestProgress,
    permit: QuotaPermit,
    in_flight: Option<HandshakeGaugeGuard>,
}

/// Counts one handshake in the gauge until it is dropped.
struct HandshakeGaugeGuard(SharedGauge);

impl Drop for HandshakeGaugeGuard {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

/// Whole frames that wait to be written.
#[derive(Debug, Default)]
struct FrameQueue {
    /// Encoded frames, which contain secrets of sessions.
    bytes: SecretBuffer,
    full: bool,
}

/// State that all channels share.
pub(crate) struct EngineContext {
    pub(crate) rights: ArcSwap<EntitlementIndex>,
    pub(crate) provisioner: Provisioner,
    pub(crate) files: Option<TenantKeyFiles>,
    pub(crate) pool: OperationPool<KeyJob>,
    pub(crate) quotas: Quotas,
    pub(crate) counts: KeyServerCounters,
}

impl EngineContext {
    /// Returns the key of certificates that a peer is presented: the key of the name, or its
    /// predecessor.
    fn presented_key(
        &self,
        certified: Arc<CertifiedPrivateKey>,
        shown: Option<SpkiHash>,
    ) -> Result<Arc<CertifiedPrivateKey>, RequestRejection> {
        let Some(spki) = shown.filter(|spki| *spki != certified.spki) else {
            return Ok(certified);
        };
        let before = match &certified.name {
            KeyName::File(service) => self
                .files
                .as_ref()
                .and_then(|files| files.presented_key(service, &spki)),
            name => self.provisioner.presented_key(name, &spki),
        };
        before.ok_or_else(|| {
            RequestRejection::new(
                KeyRefusal::OtherKey,
                format!(
                    "{} has another key on this key server than the presented certificate",
                    certified.name
                ),
            )
        })
    }
}

/// Channel of one requester with its requests.
pub(crate) struct RequesterChannel {
    core: Arc<EngineContext>,
    caller: ChannelPeer,
    table: Mutex<HashMap<u64, ChannelEntry>>,
    outbox: Mutex<FrameQueue>,
    /// Notified when there is something to write, or the outbox is full.
    pub(crate) wake: Notify,
    /// True if new requests are refused.
    closing: AtomicBool,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the deadline of a request that may not take longer than `most`.
fn deadline(asked_ms: u32, most: Duration) -> Instant {
    let timeout = Duration::from_millis(asked_ms.into());
    Instant::now()
        + if timeout.is_zero() {
            most
        } else {
            timeout.min(most)
        }
}

impl RequesterChannel {
    pub(crate) fn new(core: Arc<EngineContext>, caller: ChannelPeer) -> Arc<Self> {
        Arc::new(Self {
            core,
            caller,
            table: Mutex::default(),
            outbox: Mutex::default(),
            wake: Notify::new(),
            closing: AtomicBool::new(false),
        })
    }

    /// Refuses new requests from now on.
    pub(crate) fn close(&self) {
        self.closing.store(true, Relaxed);
    }

    /// Returns whether no request is in progress and the writer has taken all responses.
    pub(crate) fn idle(&self) -> bool {
        lock(&self.table).is_empty() && lock(&self.outbox).bytes.is_empty()
    }

    /// Returns whether there are requests whose deadline may pass, or the channel is closing.
    pub(crate) fn waits(&self) -> bool {
        self.closing.load(Relaxed) || !lock(&self.table).is_empty()
    }

    /// Drops all requests and responses, because the channel has ended.
    pub(crate) fn clear(&self) {
        self.close();
        lock(&self.table).clear();
        lock(&self.outbox).bytes.wipe();
    }

    /// Returns whether the requester reads too slowly for the channel to continue.
    pub(crate) fn full(&self) -> bool {
        lock(&self.outbox).full
    }

    /// Takes the bytes to write, and leaves the emptied buffer of the previous write.
    pub(crate) fn take(&self, mut spare: SecretBuffer) -> SecretBuffer {
        spare.wipe();
        std::mem::replace(&mut lock(&self.outbox).bytes, spare)
    }

    fn enqueue_response(&self, id: u64, response: &KeyResponse<'_>) {
        let mut outbox = lock(&self.outbox);
        if outbox.full {
            return;
        }
        // With capacity for any frame, so that encoding does not leave a smaller copy behind.
        if let Err(error) = response.encode(id, outbox.bytes.spare(FRAME_MAX)) {
            self.core.counts.refused(KeyRefusal::Failed, None);
            let text = error.to_string();
            // A refusal always fits into a frame.
            let _ = KeyResponse::Refused {
                name: KeyRefusal::Failed,
                text: &text,
            }
            .encode(id, outbox.bytes.spare(FRAME_MAX));
        }
        outbox.full = outbox.bytes.len() > OUTBOX_MAX;
        drop(outbox);
        self.wake.notify_one();
    }

    fn refuse(&self, id: u64, no: &RequestRejection) {
        self.core.counts.refused(no.name, no.tenant.as_ref());
        tracing::debug!(requester = %self.caller.requester, name = %no.name, text = no.text, "key server: refused a request");
        self.enqueue_response(
            id,
            &KeyResponse::Refused {
                name: no.name,
                text: &no.text,
            },
        );
    }

    /// Processes one frame of the requester.
    pub(crate) fn receive(self: &Arc<Self>, frame: Frame<'_>) {
        let id = frame.id;
        let done = match frame.request() {
            Err(malformed) => Err(RequestRejection::new(
                KeyRefusal::Malformed,
                malformed.to_string(),
            )),
            Ok(KeyRequest::Ping) => {
                self.enqueue_response(id, &KeyResponse::Pong);
                Ok(())
            }
            Ok(KeyRequest::Abandon) => {
                lock(&self.table).remove(&id);
                Ok(())
            }
            // A handshake in progress may end during a drain; only new requests are refused.
            Ok(KeyRequest::More { bytes }) => self.more(id, bytes),
            Ok(_) if self.closing.load(Relaxed) => Err(RequestRejection::new(
                KeyRefusal::Draining,
                "this key server is shutting down",
            )),
            Ok(KeyRequest::Begin(begin)) => self.begin(id, &begin),
            Ok(KeyRequest::Sign {
                key,
                presented: shown,
                scheme,
                deadline_ms,
                input,
            }) => self.sign(
                id,
                key,
                shown,
                scheme,
                deadline(deadline_ms, SIGN_TIME),
                input,
            ),
            Ok(KeyRequest::Chain { key }) => self.chain(id, key),
        };
        if let Err(no) = done {
            self.refuse(id, &no);
        }
    }

    fn begin(
        self: &Arc<Self>,
        id: u64,
        begin: &HandshakeRequest<'_>,
    ) -> Result<(), RequestRejection> {
        let key = KeyName::Identity(begin.identity.clone());
        let claim = self.decide(&key)?;
        let operation = match begin.role {
            HandshakeRole::Client => KeyOperation::ClientHandshake,
            HandshakeRole::Server => KeyOperation::ServerHandshake,
        };
        let role = begin.role;
        let alpn: Vec<Vec<u8>> = begin.alpn.iter().map(|p| p.to_vec()).collect();
        let expected: Arc<[Identity]> = begin.expected.as_slice().into();
        let bytes = begin.bytes.to_vec();
        let until = deadline(begin.deadline_ms, HANDSHAKE_TIME);
        let ticket = self.enter(id, operation, &key, &claim.tenant, until)?;
        self.with_key(ticket, key, claim, move |channel, ticket, certified| {
            channel.launch(
                ticket,
                WorkerOperation::Begin {
                    terms: HandshakeParams {
                        certified,
                        role,
                        alpn,
                        expected,
                    },
                    bytes,
                },
            );
            Ok(())
        });
        Ok(())
    }

    fn sign(
        self: &Arc<Self>,
        id: u64,
        key: KeyName,
        shown: Option<SpkiHash>,
        scheme: u16,
        until: Instant,
        input: &[u8],
    ) -> Result<(), RequestRejection> {
        if !handshake::signable(input, &key) {
            return Err(RequestRejection::new(
                KeyRefusal::Input,
                "this key server signs only messages that a TLS handshake with this kind of key signs",
            ));
        }
        let scheme = SignatureScheme::from(scheme);
        let input = input.to_vec();
        let then = move |channel: &Arc<Self>, ticket, certified: Arc<CertifiedPrivateKey>| {
            let certified = channel.core.presented_key(certified, shown)?;
            if !certified.key.schemes().contains(&scheme) {
                return Err(RequestRejection::new(
                    KeyRefusal::Scheme,
                    format!("the key of {} cannot sign with {scheme:?}", certified.name),
                ));
            }
            channel.launch(
                ticket,
                WorkerOperation::Sign {
                    certified,
                    scheme,
                    input,
                },
            );
            Ok(())
        };
        self.with(id, KeyOperation::Signature, key, until, then)
    }

    fn chain(self: &Arc<Self>, id: u64, key: KeyName) -> Result<(), RequestRejection> {
        self.with(
            id,
            KeyOperation::Chain,
            key,
            deadline(0, SIGN_TIME),
            |channel, ticket, certified| {
                channel.end(ticket, |_| {
                    let chain = certified.chain.iter().map(|c| &**c).collect();
                    channel.core.counts.count_operation(
                        KeyOperation::Chain,
                        certified.key.queue(),
                        &certified.tenant,
                    );
                    channel.enqueue_response(ticket.id, &KeyResponse::Certificates { chain });
                });
                Ok(())
            },
        )
    }

    /// Finds the key of a name of any kind, if the caller may use it, and continues with it.
    fn with<F>(
        self: &Arc<Self>,
        id: u64,
        operation: KeyOperation,
        key: KeyName,
        until: Instant,
        then: F,
    ) -> Result<(), RequestRejection>
    where
        F: FnOnce(
                &Arc<Self>,
                RequestTicket,
                Arc<CertifiedPrivateKey>,
            ) -> Result<(), RequestRejection>
            + Send
            + 'static,
    {
        // A tenant's allow list decides on keys from files; entitlements decide on all others.
        if let KeyName::File(service) = &key {
            let files = self.core.files.as_ref().ok_or_else(|| {
                RequestRejection::new(
                    KeyRefusal::UnknownKey,
                    "this key server has no keys from files",
                )
            })?;
            let tenant = files.tenant();
            // The controller's entitlement is checked first: the allow list may name only gateways
            // that serve the tenant.
            if !self.core.rights.load().serves(&self.caller, tenant) {
                let text = format!(
                    "{} does not serve tenant {tenant} according to the controller",
                    self.caller.requester
                );
                return Err(RequestRejection::new(KeyRefusal::NotEntitled, text).of(tenant));
            }
            if service.tenant != *tenant {
                return Err(RequestRejection::new(
                    KeyRefusal::UnknownTenant,
                    format!("{service}: this is tenant {tenant}'s key server"),
                )
                .of(tenant));
            }
            let refused = |r| {
                let (by, files) = (
                    &self.caller.requester,
                    tenant_key_files::expected_files(service),
                );
                let text = match r {
                    KeyRefusal::NotAllowed => {
                        format!(
                            "the tenant's {} does not allow {by} to use the key of {service}",
                            tenant_key_files::ALLOW
                        )
                    }
                    _ => format!(
                        "there is no key of {service}; fix: provide both {files} in usable form"
                    ),
                };
                RequestRejection::new(r, text).of(tenant)
            };
            let certified = files.find(service, &self.caller).map_err(refused)?;
            let ticket = self.enter(id, operation, &key, tenant, until)?;
            self.settle(ticket, then(self, ticket, certified));
            return Ok(());
        }
        let claim = self.decide(&key)?;
        let ticket = self.enter(id, operation, &key, &claim.tenant, until)?;
        self.with_key(ticket, key, claim, then);
        Ok(())
    }

    fn decide(&self, key: &KeyName) -> Result<KeyClaim, RequestRejection> {
        let text = |r| match r {
            KeyRefusal::UnknownTenant => {
                format!(
                    "{key}: its tenant is unknown to this key server, or keeps its keys elsewhere"
                )
            }
            _ => format!(
                "according to the controller {key} does not run on {}",
                self.caller.requester
            ),
        };
        self.core
            .rights
            .load()
            .decide(&self.caller, key)
            .map_err(|r| RequestRejection::new(r, text(r)))
    }

    fn enter(
        &self,
        id: u64,
        operation: KeyOperation,
        key: &KeyName,
        tenant: &TenantName,
        deadline: Instant,
    ) -> Result<RequestTicket, RequestRejection> {
        let refused = |r| {
            RequestRejection::new(r, "the maximum number of requests is in progress").of(tenant)
        };
        let is_handshake = matches!(
            operation,
            KeyOperation::ClientHandshake | KeyOperation::ServerHandshake
        );
        // A handshake may wait long for its peer, so it gives way to other tenants'; everything
        // else ends in a moment.
        let permit = self
            .core
            .quotas
            .take(tenant, &self.caller.requester, is_handshake)
            .map_err(refused)?;
        let mut table = lock(&self.table);
        // Two requests with one id could not be distinguished in their answers.
        if table.contains_key(&id) {
            return Err(RequestRejection::new(
                KeyRefusal::DuplicateRequest,
                "a request with this id is in progress",
            )
            .of(tenant));
        }
        // Only handshakes stay for many frames, so only they are counted as in flight.
        let in_flight = is_handshake.then(|| {
            self.core.counts.handshakes.add(1);
            HandshakeGaugeGuard(self.core.counts.handshakes.clone())
        });
        // Numbers requests of all channels: a requester may use an id again, and a late answer to
        // the former request must not reach the new one.
        static LAST: AtomicU64 = AtomicU64::new(0);
        let ticket = RequestTicket {
            id,
            serial: LAST.fetch_add(1, Relaxed),
            deadline,
        };
        let entry = ChannelEntry {
            ticket,
            operation,
            key: key.clone(),
            tenant: tenant.clone(),
            progress: RequestProgress::Busy {
                pending: Vec::new(),
            },
            permit,
            in_flight,
        };
        table.insert(id, entry);
        Ok(ticket)
    }

    /// Removes a request from the table and sends its last response, unless it was abandoned or is
    /// over. Both happen under one lock: bytes that the peer sends meanwhile are refused after that
    /// response, never before it.
    fn end(&self, ticket: RequestTicket, reply: impl FnOnce(&ChannelEntry)) {
        let mut table = lock(&self.table);
        if table
            .get(&ticket.id)
            .is_some_and(|e| e.ticket.serial == ticket.serial)
            && let Some(entry) = table.remove(&ticket.id)
        {
            reply(&entry);
        }
    }

    /// Continues with a key that is available, or once it is.
    fn with_key<F>(self: &Arc<Self>, ticket: RequestTicket, key: KeyName, claim: KeyClaim, then: F)
    where
        F: FnOnce(
                &Arc<Self>,
                RequestTicket,
                Arc<CertifiedPrivateKey>,
            ) -> Result<(), RequestRejection>
            + Send
            + 'static,
    {
        if let Some(certified) = self.core.provisioner.find(&key) {
            return self.settle(ticket, then(self, ticket, certified));
        }
        let channel = self.clone();
        tokio::spawn(async move {
            let obtained = channel
                .core
                .provisioner
                .obtain(&key, &claim, ticket.deadline.into())
                .await;
            let certified = obtained.map_err(|why| {
                RequestRejection::new(KeyRefusal::NoCertificate, format!("{key}: {why}"))
                    .of(&claim.tenant)
            });
            // The entitlement may have ended while the key was obtained.
            let done = certified
                .and_then(|c| channel.decide(&key).map(|_| c))
                .and_then(|c| then(&channel, ticket, c));
            channel.settle(ticket, done);
        });
    }

    fn settle(&self, ticket: RequestTicket, done: Result<(), RequestRejection>) {
        if let Err(no) = done {
            self.end(ticket, |entry| {
                self.refuse(ticket.id, &no.of(&entry.tenant))
            });
        }
    }

    fn more(self: &Arc<Self>, id: u64, bytes: &[u8]) -> Result<(), RequestRejection> {
        let mut table = lock(&self.table);
        let unknown = || {
            RequestRejection::new(
                KeyRefusal::UnknownRequest,
                "no handshake with this id is in progress: it ended or timed out",
            )
        };
        // Only a handshake takes further bytes.
        let entry = table
            .get_mut(&id)
            .filter(|e| e.in_flight.is_some())
            .ok_or_else(unknown)?;
        let (tenant, key, ticket) = (entry.tenant.clone(), entry.key.clone(), entry.ticket);
        let refused = match &mut entry.progress {
            // The entitlement may have ended since the handshake began.
            _ if let Err(no) = self.decide(&key) => no,
            // A worker has the handshake, so the bytes wait here and are bounded here.
            RequestProgress::Busy { pending }
                if pending.len() + bytes.len() > HANDSHAKE_BYTES_MAX =>
            {
                RequestRejection::new(
                    KeyRefusal::HandshakeBytes,
                    format!("the peer sent more than {HANDSHAKE_BYTES_MAX} bytes"),
                )
            }
            RequestProgress::Busy { pending } => {
                pending.extend_from_slice(bytes);
                return Ok(());
            }
            // Replaced before the lock is released, so that no second frame starts a worker.
            progress @ RequestProgress::Peer(_) => {
                let busy = RequestProgress::Busy {
                    pending: Vec::new(),
                };
                if let RequestProgress::Peer(handshake) = std::mem::replace(progress, busy) {
                    drop(table);
                    self.launch(
                        ticket,
                        WorkerOperation::More {
                            handshake,
                            bytes: bytes.to_vec(),
                        },
                    );
                }
                return Ok(());
            }
        };
        table.remove(&id);
        Err(refused.of(&tenant))
    }

    fn launch(self: &Arc<Self>, ticket: RequestTicket, task: WorkerOperation) {
        let certified = task.certified();
        let (queue, tenant) = (certified.key.queue(), certified.tenant.clone());
        self.core.pool.push(
            queue,
            &tenant,
            KeyJob {
                channel: self.clone(),
                ticket,
                task: Some(task),
            },
        );
    }

    /// Refuses handshakes whose peers let their time run out, and those that gave way to other
    /// tenants'. Queued requests are checked when a worker takes them.
    pub(crate) fn sweep(&self) {
        let now = Instant::now();
        let mut late = Vec::new();
        lock(&self.table).retain(|id, entry| {
            let is_late = entry.ticket.deadline <= now;
            let ends = (is_late || entry.permit.is_revoked()) && matches!(entry.progress, RequestProgress::Peer(_));
            if ends {
                let no = if is_late {
                    RequestRejection::new(KeyRefusal::HandshakeTime, "the peer did not finish the handshake in time")
                } else {
                    RequestRejection::new(
                        KeyRefusal::RequesterBusy,
                        "the tenant has the most handshakes in progress, and its oldest was ended in favour of another tenant's",
                    )
                };
                late.push((*id, no.of(&entry.tenant)));
            }
            !ends
        });
        for (id, no) in late {
            self.refuse(id, &no);
        }
    }

    fn finish(self: &Arc<Self>, ticket: RequestTicket, answer: OperationResult) {
        let id = ticket.id;
        match answer {
            // The requester does not wait for an answer any more.
            OperationResult::Abandoned => {}
            OperationResult::Refused { alert, name, text } => self.end(ticket, |entry| {
                // The alert is for the peer, and precedes the refusal for the requester.
                if !alert.is_empty() {
                    self.enqueue_response(id, &KeyResponse::Send { bytes: &alert });
                }
                self.refuse(id, &RequestRejection::new(name, text).of(&entry.tenant));
            }),
            OperationResult::Signature { certified, bytes } => self.end(ticket, |_| {
                self.core.counts.count_operation(
                    KeyOperation::Signature,
                    certified.key.queue(),
                    &certified.tenant,
                );
                self.enqueue_response(id, &KeyResponse::Signature { bytes: &bytes });
            }),
            OperationResult::Step { handshake, send } => self.resume(ticket, handshake, &send),
            OperationResult::Done {
                certified,
                finished,
            } => self.end(ticket, |entry| {
                self.core.counts.count_operation(
                    entry.operation,
                    certified.key.queue(),
                    &certified.tenant,
                );
                let done = HandshakeResult {
                    bytes: &finished.send,
                    // A handshake's bytes are limited (`HANDSHAKE_BYTES_MAX`), so their number
                    // always fits.
                    consumed: u32::try_from(finished.consumed).unwrap_or(u32::MAX),
                    suite: finished.suite,
                    alpn: &finished.alpn,
                    client_traffic: &finished.client_traffic,
                    server_traffic: &finished.server_traffic,
                    peer: finished.peer.clone(),
                    leaf: &finished.leaf,
                    above: finished.peer_leaf.above(),
                };
                self.enqueue_response(id, &KeyResponse::Done(done));
            }),
        }
    }

    /// Waits for the peer, unless it has sent bytes meanwhile.
    fn resume(
        self: &Arc<Self>,
        ticket: RequestTicket,
        handshake: Box<RelayedHandshake>,
        send: &[u8],
    ) {
        let mut table = lock(&self.table);
        let Some(entry) = table
            .get_mut(&ticket.id)
            .filter(|e| e.ticket.serial == ticket.serial)
        else {
            return;
        };
        let RequestProgress::Busy { pending } = &mut entry.progress else {
            return;
        };
        if !send.is_empty() || pending.is_empty() && handshake.wants_more() {
            // Sent before the handshake may continue, so that its next bytes cannot overtake these.
            self.enqueue_response(ticket.id, &KeyResponse::Send { bytes: send });
        }
        let bytes = std::mem::take(pending);
        if bytes.is_empty() {
            entry.progress = RequestProgress::Peer(handshake);
            return;
        }
        drop(table);
        self.launch(ticket, WorkerOperation::More { handshake, bytes });
    }
}

/// Operation that a worker performs for a request.
enum WorkerOperation {
    Begin {
        terms: HandshakeParams,
        bytes: Vec<u8>,
    },
    More {
        handshake: Box<RelayedHandshake>,
        bytes: Vec<u8>,
    },
    Sign {
        certified: Arc<CertifiedPrivateKey>,
        scheme: SignatureScheme,
        input: Vec<u8>,
    },
}

impl WorkerOperation {
    fn certified(&self) -> &Arc<CertifiedPrivateKey> {
        match self {
            WorkerOperation::Begin { terms, .. } => &terms.certified,
            WorkerOperation::More { handshake, .. } => &handshake.terms().certified,
            WorkerOperation::Sign { certified, .. } => certified,
        }
    }

    fn work(self) -> OperationResult {
        match self {
            WorkerOperation::Begin { terms, bytes } => match RelayedHandshake::begin(terms) {
                Ok(handshake) => step(Box::new(handshake), &bytes),
                Err(error) => OperationResult::Refused {
                    alert: Vec::new(),
                    name: handshake::refusal(&error),
                    text: error.to_string(),
                },
            },
            WorkerOperation::More { handshake, bytes } => step(handshake, &bytes),
            WorkerOperation::Sign {
                certified,
                scheme,
                input,
            } => match certified.key.sign(scheme, &input) {
                Ok(bytes) => OperationResult::Signature { certified, bytes },
                Err(error) => {
                    let name = if error == PrivateKeyError::Scheme {
                        KeyRefusal::Scheme
                    } else {
                        KeyRefusal::Failed
                    };
                    OperationResult::Refused {
                        alert: Vec::new(),
                        name,
                        text: error.to_string(),
                    }
                }
            },
        }
    }
}

fn step(mut handshake: Box<RelayedHandshake>, bytes: &[u8]) -> OperationResult {
    match handshake.step(bytes) {
        HandshakeStep::Wait { send } => OperationResult::Step { handshake, send },
        HandshakeStep::Done(finished) => OperationResult::Done {
            certified: handshake.terms().certified.clone(),
            finished,
        },
        HandshakeStep::Failed {
            alert,
            refusal,
            text,
        } => OperationResult::Refused {
            alert,
            name: refusal,
            text,
        },
    }
}

/// Result of an operation that a worker performed.
pub(crate) enum OperationResult {
    /// The request was abandoned, or is over.
    Abandoned,
    Refused {
        alert: Vec<u8>,
        name: KeyRefusal,
        text: String,
    },
    Signature {
        certified: Arc<CertifiedPrivateKey>,
        bytes: Vec<u8>,
    },
    Step {
        handshake: Box<RelayedHandshake>,
        send: Vec<u8>,
    },
    Done {
        certified: Arc<CertifiedPrivateKey>,
        finished: Box<handshake::HandshakeOutcome>,
    },
}

/// One operation of one request.
pub(crate) struct KeyJob {
    channel: Arc<RequesterChannel>,
    ticket: RequestTicket,
    task: Option<WorkerOperation>,
}

impl PoolTask for KeyJob {
    type Answer = OperationResult;

    fn work(&mut self) -> OperationResult {
        let Some(task) = self.task.take() else {
            return OperationResult::Abandoned;
        };
        let serial = lock(&self.channel.table)
            .get(&self.ticket.id)
            .map(|e| e.ticket.serial);
        if serial != Some(self.ticket.serial) {
            return OperationResult::Abandoned;
        }
        if self.ticket.deadline <= Instant::now() {
            let text =
                "the deadline passed while the request was queued: the key server is overloaded";
            return OperationResult::Refused {
                alert: Vec::new(),
                name: KeyRefusal::Deadline,
                text: text.into(),
            };
        }
        task.work()
    }

    fn answer(self, answer: OperationResult) {
        self.channel.finish(self.ticket, answer);
    }
}
