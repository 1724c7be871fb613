//! One requester's channel: its requests under way, from their frames to their answers. Who may use what is `rights`' and `files`' business, when work
//! is done is `lanes`'; bytes come and go in `wire`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use canal_kit::keys::SecretBuffer;
use canal_kit::metrics::SharedGauge;
use canal_model::identity::Identity;
use canal_model::ids::TenantName;
use canal_wire::keyrpc::{Begin, Done, FRAME_MAX, Frame, KeyName, Refusal, Request, Response, Role, SpkiHash};
use rustls::SignatureScheme;
use tokio::sync::Notify;

use crate::certified::Certified;
use crate::counts::{Counts, Operation};
use crate::files::{self, Files};
use crate::handshake::{self, Handshake, Step, Terms};
use crate::key::KeyError;
use crate::lanes::{Lanes, Work};
use crate::ledger::{Ledger, Place};
use crate::limits::{HANDSHAKE_BYTES_MAX, HANDSHAKE_TIME, OUTBOX_MAX, SIGN_TIME};
use crate::provision::Provisioner;
use crate::rights::{Caller, Claim, Rights};

/// Why a request is refused, for whom it counts, and what operators read.
#[derive(Debug)]
struct No {
    name: Refusal,
    tenant: Option<TenantName>,
    text: String,
}

impl No {
    fn new(name: Refusal, text: impl Into<String>) -> Self {
        Self { name, tenant: None, text: text.into() }
    }

    fn of(self, tenant: &TenantName) -> Self {
        Self { tenant: Some(tenant.clone()), ..self }
    }
}

/// How far a request is.
#[derive(Debug)]
enum Progress {
    /// Waits for its key, or is queued, or worked on; what the peer sends meanwhile is kept.
    Busy { pending: Vec<u8> },
    /// The peer's turn.
    Peer(Box<Handshake>),
}

/// One request among all that ever were: ids may come again, serial numbers do not.
#[derive(Debug, Clone, Copy)]
struct Ticket {
    id: u64,
    serial: u64,
    deadline: Instant,
}

struct Entry {
    ticket: Ticket,
    operation: Operation,
    key: KeyName,
    tenant: TenantName,
    progress: Progress,
    place: Place,
    _under_way: Option<UnderWay>,
}

/// One handshake in the gauge.
struct UnderWay(SharedGauge);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

/// What is to be written, whole frames.
#[derive(Debug, Default)]
struct Outbox {
    /// Secrets of sessions are in it.
    bytes: SecretBuffer,
    full: bool,
}

/// What all channels share.
pub(crate) struct Core {
    pub(crate) rights: ArcSwap<Rights>,
    pub(crate) provisioner: Provisioner,
    pub(crate) files: Option<Files>,
    pub(crate) lanes: Lanes<Job>,
    pub(crate) ledger: Ledger,
    pub(crate) counts: Counts,
}

impl Core {
    /// The key of what a peer is shown: that of the name, or the one before it.
    fn shown(&self, certified: Arc<Certified>, shown: Option<SpkiHash>) -> Result<Arc<Certified>, No> {
        let Some(spki) = shown.filter(|spki| *spki != certified.spki) else { return Ok(certified) };
        let before = match &certified.name {
            KeyName::File(service) => self.files.as_ref().and_then(|files| files.shown(service, &spki)),
            name => self.provisioner.shown(name, &spki),
        };
        before.ok_or_else(|| No::new(Refusal::OtherKey, format!("{} has another key here than the one shown", certified.name)))
    }
}

/// A requester's channel.
pub(crate) struct Channel {
    core: Arc<Core>,
    caller: Caller,
    table: Mutex<HashMap<u64, Entry>>,
    outbox: Mutex<Outbox>,
    /// Something is to be written, or the outbox is full.
    pub(crate) wake: Notify,
    /// Takes nothing new.
    closing: AtomicBool,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The end of a request that must not take longer than `most`.
fn deadline(asked_ms: u32, most: Duration) -> Instant {
    let asked = Duration::from_millis(asked_ms.into());
    Instant::now() + if asked.is_zero() { most } else { asked.min(most) }
}

impl Channel {
    pub(crate) fn new(core: Arc<Core>, caller: Caller) -> Arc<Self> {
        Arc::new(Self {
            core,
            caller,
            table: Mutex::default(),
            outbox: Mutex::default(),
            wake: Notify::new(),
            closing: AtomicBool::new(false),
        })
    }

    /// From now on new requests are refused.
    pub(crate) fn close(&self) {
        self.closing.store(true, Relaxed);
    }

    /// Nothing is under way, and all answers are on their way.
    pub(crate) fn idle(&self) -> bool {
        lock(&self.table).is_empty() && lock(&self.outbox).bytes.is_empty()
    }

    /// Whether there are requests whose time may run out.
    pub(crate) fn waits(&self) -> bool {
        self.closing.load(Relaxed) || !lock(&self.table).is_empty()
    }

    /// The channel is gone: so is all that is under way on it.
    pub(crate) fn clear(&self) {
        self.close();
        lock(&self.table).clear();
        lock(&self.outbox).bytes.wipe();
    }

    /// Whether the requester reads too slowly to go on with.
    pub(crate) fn full(&self) -> bool {
        lock(&self.outbox).full
    }

    /// Takes what is to be written, and leaves the emptied buffer of the last time.
    pub(crate) fn take(&self, mut spare: SecretBuffer) -> SecretBuffer {
        spare.wipe();
        std::mem::replace(&mut lock(&self.outbox).bytes, spare)
    }

    fn say(&self, id: u64, response: &Response<'_>) {
        let mut outbox = lock(&self.outbox);
        if outbox.full {
            return;
        }
        // With room for any frame, so that encoding does not leave a smaller copy behind.
        if let Err(error) = response.encode(id, outbox.bytes.spare(FRAME_MAX)) {
            self.core.counts.refused(Refusal::Failed, None);
            let text = error.to_string();
            // A refusal always fits.
            let _ = Response::Refused { name: Refusal::Failed, text: &text }.encode(id, outbox.bytes.spare(FRAME_MAX));
        }
        outbox.full = outbox.bytes.len() > OUTBOX_MAX;
        drop(outbox);
        self.wake.notify_one();
    }

    fn refuse(&self, id: u64, no: &No) {
        self.core.counts.refused(no.name, no.tenant.as_ref());
        tracing::debug!(requester = %self.caller.requester, name = %no.name, text = no.text, "refused");
        self.say(id, &Response::Refused { name: no.name, text: &no.text });
    }

    /// Takes one frame.
    pub(crate) fn receive(self: &Arc<Self>, frame: Frame<'_>) {
        let id = frame.id;
        let done = match frame.request() {
            Err(malformed) => Err(No::new(Refusal::Malformed, malformed.to_string())),
            Ok(Request::Ping) => {
                self.say(id, &Response::Pong);
                Ok(())
            }
            Ok(Request::Abandon) => {
                lock(&self.table).remove(&id);
                Ok(())
            }
            Ok(Request::More { bytes }) => self.more(id, bytes),
            Ok(_) if self.closing.load(Relaxed) => Err(No::new(Refusal::Draining, "this key server is about to end")),
            Ok(Request::Begin(begin)) => self.begin(id, &begin),
            Ok(Request::Sign { key, shown, scheme, deadline_ms, input }) => {
                self.sign(id, key, shown, scheme, deadline(deadline_ms, SIGN_TIME), input)
            }
            Ok(Request::Chain { key }) => self.chain(id, key),
        };
        if let Err(no) = done {
            self.refuse(id, &no);
        }
    }

    fn begin(self: &Arc<Self>, id: u64, begin: &Begin<'_>) -> Result<(), No> {
        let key = KeyName::Identity(begin.identity.clone());
        let claim = self.decide(&key)?;
        let operation = match begin.role {
            Role::Client => Operation::ClientHandshake,
            Role::Server => Operation::ServerHandshake,
        };
        let role = begin.role;
        let alpn: Vec<Vec<u8>> = begin.alpn.iter().map(|p| p.to_vec()).collect();
        let expected: Arc<[Identity]> = begin.expected.as_slice().into();
        let bytes = begin.bytes.to_vec();
        let until = deadline(begin.deadline_ms, HANDSHAKE_TIME);
        let ticket = self.enter(id, operation, &key, &claim.tenant, until)?;
        self.with_key(ticket, key, claim, move |channel, ticket, certified| {
            channel.launch(ticket, Task::Begin { terms: Terms { certified, role, alpn, expected }, bytes });
            Ok(())
        });
        Ok(())
    }

    fn sign(self: &Arc<Self>, id: u64, key: KeyName, shown: Option<SpkiHash>, scheme: u16, until: Instant, input: &[u8]) -> Result<(), No> {
        if !handshake::signable(input, &key) {
            return Err(No::new(Refusal::Input, "only what a TLS handshake with this kind of key signs is signed"));
        }
        let scheme = SignatureScheme::from(scheme);
        let input = input.to_vec();
        let then = move |channel: &Arc<Self>, ticket, certified: Arc<Certified>| {
            let certified = channel.core.shown(certified, shown)?;
            if !certified.key.schemes().contains(&scheme) {
                return Err(No::new(Refusal::Scheme, format!("the key of {} cannot sign with {scheme:?}", certified.name)));
            }
            channel.launch(ticket, Task::Sign { certified, scheme, input });
            Ok(())
        };
        self.with(id, Operation::Signature, key, until, then)
    }

    fn chain(self: &Arc<Self>, id: u64, key: KeyName) -> Result<(), No> {
        self.with(id, Operation::Chain, key, deadline(0, SIGN_TIME), |channel, ticket, certified| {
            channel.end(ticket, |_| {
                let chain = certified.chain.iter().map(|c| &**c).collect();
                channel.core.counts.done(Operation::Chain, certified.key.lane(), &certified.tenant);
                channel.say(ticket.id, &Response::Certificates { chain });
            });
            Ok(())
        })
    }

    /// Finds the key of a name of any kind, if the caller may use it, and goes on with it.
    fn with<F>(self: &Arc<Self>, id: u64, operation: Operation, key: KeyName, until: Instant, then: F) -> Result<(), No>
    where
        F: FnOnce(&Arc<Self>, Ticket, Arc<Certified>) -> Result<(), No> + Send + 'static,
    {
        if let KeyName::File(service) = &key {
            let files = self.core.files.as_ref().ok_or_else(|| No::new(Refusal::UnknownKey, "this key server has no keys from files"))?;
            let tenant = files.tenant();
            if !self.core.rights.load().serves(&self.caller, tenant) {
                let text = format!("{} does not serve tenant {tenant}, says the controller", self.caller.requester);
                return Err(No::new(Refusal::NotEntitled, text).of(tenant));
            }
            if service.tenant != *tenant {
                return Err(No::new(Refusal::UnknownTenant, format!("{service}: this is tenant {tenant}'s key server")).of(tenant));
            }
            let refused = |r| {
                let (by, files) = (&self.caller.requester, files::looked_for(service));
                let text = match r {
                    Refusal::NotAllowed => format!("the tenant's {} does not let {by} use the key of {service}", files::ALLOW),
                    _ => format!("there is no key of {service}: {files} are looked for, and not both there in usable form"),
                };
                No::new(r, text).of(tenant)
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

    fn decide(&self, key: &KeyName) -> Result<Claim, No> {
        let text = |r| match r {
            Refusal::UnknownTenant => format!("{key}: its tenant is not known here, or keeps its keys elsewhere"),
            _ => format!("the controller does not say that {key} runs on {}", self.caller.requester),
        };
        self.core.rights.load().decide(&self.caller, key).map_err(|r| No::new(r, text(r)))
    }

    fn enter(&self, id: u64, operation: Operation, key: &KeyName, tenant: &TenantName, deadline: Instant) -> Result<Ticket, No> {
        let refused = |r| No::new(r, "as much as may be is under way").of(tenant);
        let shakes = matches!(operation, Operation::ClientHandshake | Operation::ServerHandshake);
        // A handshake may wait long for its peer, and gives way to other tenants'; the rest is over in a moment.
        let place = self.core.ledger.take(tenant, &self.caller.requester, shakes).map_err(refused)?;
        let mut table = lock(&self.table);
        if table.contains_key(&id) {
            return Err(No::new(Refusal::DuplicateRequest, "the id is of a request under way").of(tenant));
        }
        let under_way = shakes.then(|| {
            self.core.counts.handshakes.add(1);
            UnderWay(self.core.counts.handshakes.clone())
        });
        static LAST: AtomicU64 = AtomicU64::new(0);
        let ticket = Ticket { id, serial: LAST.fetch_add(1, Relaxed), deadline };
        let entry = Entry {
            ticket,
            operation,
            key: key.clone(),
            tenant: tenant.clone(),
            progress: Progress::Busy { pending: Vec::new() },
            place,
            _under_way: under_way,
        };
        table.insert(id, entry);
        Ok(ticket)
    }

    /// Takes a request out of the table and says its last word, unless it was abandoned or is over. Both at once: what its peer sends
    /// meanwhile is refused behind that word, never before it.
    fn end(&self, ticket: Ticket, say: impl FnOnce(&Entry)) {
        let mut table = lock(&self.table);
        if table.get(&ticket.id).is_some_and(|e| e.ticket.serial == ticket.serial)
            && let Some(entry) = table.remove(&ticket.id)
        {
            say(&entry);
        }
    }

    /// Goes on with a key that is here, or once it is.
    fn with_key<F>(self: &Arc<Self>, ticket: Ticket, key: KeyName, claim: Claim, then: F)
    where
        F: FnOnce(&Arc<Self>, Ticket, Arc<Certified>) -> Result<(), No> + Send + 'static,
    {
        if let Some(certified) = self.core.provisioner.find(&key) {
            return self.settle(ticket, then(self, ticket, certified));
        }
        let channel = self.clone();
        tokio::spawn(async move {
            let obtained = channel.core.provisioner.obtain(&key, &claim, ticket.deadline.into()).await;
            let certified = obtained.map_err(|why| No::new(Refusal::NoCertificate, format!("{key}: {why}")).of(&claim.tenant));
            // The right to it may be gone by now.
            let done = certified.and_then(|c| channel.decide(&key).map(|_| c)).and_then(|c| then(&channel, ticket, c));
            channel.settle(ticket, done);
        });
    }

    fn settle(&self, ticket: Ticket, done: Result<(), No>) {
        if let Err(no) = done {
            self.end(ticket, |entry| self.refuse(ticket.id, &no.of(&entry.tenant)));
        }
    }

    fn more(self: &Arc<Self>, id: u64, bytes: &[u8]) -> Result<(), No> {
        let mut table = lock(&self.table);
        let unknown = || No::new(Refusal::UnknownRequest, "no handshake of this id is under way: it ended, or its time did");
        let entry = table.get_mut(&id).filter(|e| e._under_way.is_some()).ok_or_else(unknown)?;
        let (tenant, key, ticket) = (entry.tenant.clone(), entry.key.clone(), entry.ticket);
        let refused = match &mut entry.progress {
            _ if let Err(no) = self.decide(&key) => no,
            Progress::Busy { pending } if pending.len() + bytes.len() > HANDSHAKE_BYTES_MAX => {
                No::new(Refusal::HandshakeBytes, format!("the peer sent more than {HANDSHAKE_BYTES_MAX} bytes"))
            }
            Progress::Busy { pending } => {
                pending.extend_from_slice(bytes);
                return Ok(());
            }
            progress @ Progress::Peer(_) => {
                let busy = Progress::Busy { pending: Vec::new() };
                if let Progress::Peer(handshake) = std::mem::replace(progress, busy) {
                    drop(table);
                    self.launch(ticket, Task::More { handshake, bytes: bytes.to_vec() });
                }
                return Ok(());
            }
        };
        table.remove(&id);
        Err(refused.of(&tenant))
    }

    fn launch(self: &Arc<Self>, ticket: Ticket, task: Task) {
        let certified = task.certified();
        let (lane, tenant) = (certified.key.lane(), certified.tenant.clone());
        self.core.lanes.push(lane, &tenant, Job { channel: self.clone(), ticket, task: Some(task) });
    }

    /// Refuses handshakes whose peers let their time run out, and those that gave way to other tenants'. What is queued finds out when its turn comes.
    pub(crate) fn sweep(&self) {
        let now = Instant::now();
        let mut late = Vec::new();
        lock(&self.table).retain(|id, entry| {
            let is_late = entry.ticket.deadline <= now;
            let ends = (is_late || entry.place.is_revoked()) && matches!(entry.progress, Progress::Peer(_));
            if ends {
                let no = if is_late {
                    No::new(Refusal::HandshakeTime, "the peer let the handshake's time run out")
                } else {
                    No::new(
                        Refusal::RequesterBusy,
                        "the tenant has the most handshakes under way, and its oldest gave way to another tenant's",
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

    fn finish(self: &Arc<Self>, ticket: Ticket, answer: Answer) {
        let id = ticket.id;
        match answer {
            Answer::Abandoned => {}
            Answer::Refused { alert, name, text } => self.end(ticket, |entry| {
                if !alert.is_empty() {
                    self.say(id, &Response::Send { bytes: &alert });
                }
                self.refuse(id, &No::new(name, text).of(&entry.tenant));
            }),
            Answer::Signature { certified, bytes } => self.end(ticket, |_| {
                self.core.counts.done(Operation::Signature, certified.key.lane(), &certified.tenant);
                self.say(id, &Response::Signature { bytes: &bytes });
            }),
            Answer::Step { handshake, send } => self.go_on(ticket, handshake, &send),
            Answer::Done { certified, finished } => self.end(ticket, |entry| {
                self.core.counts.done(entry.operation, certified.key.lane(), &certified.tenant);
                let done = Done {
                    bytes: &finished.send,
                    consumed: u32::try_from(finished.consumed).unwrap_or(u32::MAX),
                    suite: finished.suite,
                    alpn: &finished.alpn,
                    client_traffic: &finished.client_traffic,
                    server_traffic: &finished.server_traffic,
                    peer: finished.peer.clone(),
                    leaf: &finished.leaf,
                    above: finished.shown.above(),
                };
                self.say(id, &Response::Done(done));
            }),
        }
    }

    /// The peer's turn, unless it has spoken meanwhile.
    fn go_on(self: &Arc<Self>, ticket: Ticket, handshake: Box<Handshake>, send: &[u8]) {
        let mut table = lock(&self.table);
        let Some(entry) = table.get_mut(&ticket.id).filter(|e| e.ticket.serial == ticket.serial) else { return };
        let Progress::Busy { pending } = &mut entry.progress else { return };
        if !send.is_empty() || pending.is_empty() && handshake.wants_more() {
            // Before the handshake may go on: its next words must not come first.
            self.say(ticket.id, &Response::Send { bytes: send });
        }
        let bytes = std::mem::take(pending);
        if bytes.is_empty() {
            entry.progress = Progress::Peer(handshake);
            return;
        }
        drop(table);
        self.launch(ticket, Task::More { handshake, bytes });
    }
}

/// What a worker is to do.
enum Task {
    Begin { terms: Terms, bytes: Vec<u8> },
    More { handshake: Box<Handshake>, bytes: Vec<u8> },
    Sign { certified: Arc<Certified>, scheme: SignatureScheme, input: Vec<u8> },
}

impl Task {
    fn certified(&self) -> &Arc<Certified> {
        match self {
            Task::Begin { terms, .. } => &terms.certified,
            Task::More { handshake, .. } => &handshake.terms().certified,
            Task::Sign { certified, .. } => certified,
        }
    }

    fn work(self) -> Answer {
        match self {
            Task::Begin { terms, bytes } => match Handshake::begin(terms) {
                Ok(handshake) => step(Box::new(handshake), &bytes),
                Err(error) => Answer::Refused { alert: Vec::new(), name: handshake::refusal(&error), text: error.to_string() },
            },
            Task::More { handshake, bytes } => step(handshake, &bytes),
            Task::Sign { certified, scheme, input } => match certified.key.sign(scheme, &input) {
                Ok(bytes) => Answer::Signature { certified, bytes },
                Err(error) => {
                    let name = if error == KeyError::Scheme { Refusal::Scheme } else { Refusal::Failed };
                    Answer::Refused { alert: Vec::new(), name, text: error.to_string() }
                }
            },
        }
    }
}

fn step(mut handshake: Box<Handshake>, bytes: &[u8]) -> Answer {
    match handshake.step(bytes) {
        Step::Wait { send } => Answer::Step { handshake, send },
        Step::Done(finished) => Answer::Done { certified: handshake.terms().certified.clone(), finished },
        Step::Failed { alert, refusal, text } => Answer::Refused { alert, name: refusal, text },
    }
}

/// What a worker did.
pub(crate) enum Answer {
    /// Nobody waits for it any more.
    Abandoned,
    Refused {
        alert: Vec<u8>,
        name: Refusal,
        text: String,
    },
    Signature {
        certified: Arc<Certified>,
        bytes: Vec<u8>,
    },
    Step {
        handshake: Box<Handshake>,
        send: Vec<u8>,
    },
    Done {
        certified: Arc<Certified>,
        finished: Box<handshake::Finished>,
    },
}

/// One operation of one request.
pub(crate) struct Job {
    channel: Arc<Channel>,
    ticket: Ticket,
    task: Option<Task>,
}

impl Work for Job {
    type Answer = Answer;

    fn work(&mut self) -> Answer {
        let Some(task) = self.task.take() else { return Answer::Abandoned };
        let serial = lock(&self.channel.table).get(&self.ticket.id).map(|e| e.ticket.serial);
        if serial != Some(self.ticket.serial) {
            return Answer::Abandoned;
        }
        if self.ticket.deadline <= Instant::now() {
            let text = "its time ran out before its turn came: the key server has more to do than it can";
            return Answer::Refused { alert: Vec::new(), name: Refusal::Deadline, text: text.into() };
        }
        task.work()
    }

    fn answer(self, answer: Answer) {
        self.channel.finish(self.ticket, answer);
    }
}
