//! Registry of subscribers and their progress. The subscriber streams write it; `canal status` and
//! the metrics read it. Start at [`Subscribers`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use canal_access::{Principals, holder_of, principal_name};
use canal_catalog::{Catalog, ResourceId, ResourceOwner};
use canal_model::ids::{Generation, TenantName};
use canal_model::principal::Principal;
use canal_model::program::ResourceKind;
use canal_runtime::{ShareHolder, ShareRefusal, TenantLimit, TenantPermit};
use canal_wire::api;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::delivery::DeliveryProgress;
use crate::share_report::ShareReport;
use crate::subscriber_stream::{STREAM_NAME_BYTES_MAX, SubscriberProgress, TenantRefusals};

/// Maximum number of open streams of all subscribers together.
/// These are two for each of 10,000 principals (`PRINCIPALS_MAX`): while a data plane reconnects,
/// its old stream may still be open.
pub const STREAMS_MAX: usize = 20_000;
/// Maximum number of open streams of one principal: the current one, and those whose end was not
/// noticed yet. The oldest gives way.
/// Nobody measured this value: one that a network failure left and one of a restart before are
/// enough.
pub const STREAMS_PER_PRINCIPAL_MAX: usize = 3;
/// Maximum bytes that the streams of one principal are charged for names that the controller does
/// not have itself. It equals the limit of one stream, so that three of them hold no more. The
/// oldest gives way.
pub const PRINCIPAL_NAME_BYTES_MAX: usize = STREAM_NAME_BYTES_MAX;

/// A refusal that lasts longer is an alarm: the refused resource is not in force there, and its
/// tenant may be closed.
/// Changes spread within a second, so that a refusal that the next change repairs raises no alarm.
/// Nobody measured this value.
pub(crate) const STANDING_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of refused resources that one line of `canal status` names.
/// The line then states how many more there are.
const REFUSED_NAMED_MAX: usize = 4;

/// The registry of subscribers and their streams.
pub struct Subscribers {
    /// Limit on open streams, each of which counts against its principal's holder.
    limit: TenantLimit,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    next: u64,
    records: BTreeMap<Principal, SubscriberRecord>,
}

/// One open stream of a principal.
struct StreamRecord {
    superseded: CancellationToken,
    permit: TenantPermit,
    /// Bytes that the stream is charged for names that the catalog does not have.
    name_bytes: usize,
}

/// State of one principal across its streams.
#[derive(Default)]
struct SubscriberRecord {
    /// Open streams by age; the last is the current one.
    streams: BTreeMap<u64, StreamRecord>,
    progress: SubscriberProgress,
    bytes_sent: u64,
    responses_sent: u64,
    nacks: u64,
    connects: u64,
    last_seen_ms: u64,
    version: String,
    /// Newest generation of which a resource was sent, on any of the streams.
    content: Generation,
    unacked_since: Option<Instant>,
    /// Time since which a refusal stands, on any of the streams.
    refused_since: Option<Instant>,
    /// Last report of the data plane on its limits.
    shares: Arc<ShareReport>,
}

impl SubscriberRecord {
    /// Ends the oldest stream in favor of a newer one of the principal; its permit is free at once.
    fn supersede_oldest(&mut self) {
        if let Some((_, oldest)) = self.streams.pop_first() {
            oldest.superseded.cancel();
        }
    }

    /// Returns the generation up to which everything was acknowledged, except resources of tenants
    /// with standing refusals.
    fn acked_through(&self) -> Generation {
        let p = &self.progress;
        let is_whole =
            !p.refusals.contains_key(&None) && p.acked >= p.target && self.unacked_since.is_none();
        // Nothing in scope is outstanding, so generations out of scope count as acknowledged too.
        if is_whole { p.compared } else { p.acked }
    }
}

/// The holder may not open another stream.
#[derive(Debug, thiserror::Error)]
#[error(
    "{holder} may open no more streams ({limit}: {}); fix: end those of data planes that are not needed, or have the provider set spec.shares.{limit} of the Tenant, or run another controller for some of them",
    .reason.reason()
)]
pub(crate) struct TooManyStreams {
    holder: ShareHolder,
    limit: &'static str,
    reason: ShareRefusal,
}

/// One open stream; dropping it removes it from the registry.
pub(crate) struct OpenStream {
    registry: Arc<Subscribers>,
    principal: Principal,
    id: u64,
    /// Canceled when the stream gives way to a newer one of the same principal.
    pub(crate) superseded: CancellationToken,
}

impl Subscribers {
    /// Creates a registry; `limit` is the limit on open streams.
    pub fn new(limit: TenantLimit) -> Arc<Self> {
        Arc::new(Self {
            limit,
            inner: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every update leaves the records consistent, so a panic elsewhere does not spoil them.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a new stream of `principal`. If the principal has as many streams as it may, its
    /// oldest one ends. If the limit on all streams is reached, the oldest stream of the tenant
    /// with the most streams ends.
    ///
    /// # Errors
    /// The holder has its whole share, or the limit is full and no other stream can give way.
    pub(crate) fn open(
        self: &Arc<Self>,
        principal: &Principal,
    ) -> Result<OpenStream, TooManyStreams> {
        let mut inner = self.lock();
        // Old streams end before the permit is taken, so that a tenant with its whole share can
        // reconnect its data planes.
        if let Some(record) = inner.records.get_mut(principal) {
            while record.streams.len() >= STREAMS_PER_PRINCIPAL_MAX {
                record.supersede_oldest();
            }
        }
        let holder = holder_of(principal);
        let taken = self.limit.take_revocable(&holder, 1);
        let permit = taken.map_err(|reason| TooManyStreams {
            holder,
            limit: self.limit.kind().key(),
            reason,
        })?;
        inner.next += 1;
        let id = inner.next;
        let superseded = CancellationToken::new();
        let record = inner.records.entry(principal.clone()).or_default();
        record.connects += 1;
        record.streams.insert(
            id,
            StreamRecord {
                superseded: superseded.clone(),
                permit,
                name_bytes: 0,
            },
        );
        record.last_seen_ms = now_ms();
        Ok(OpenStream {
            registry: self.clone(),
            principal: principal.clone(),
            id,
            superseded,
        })
    }

    /// Returns what a data plane has acknowledged.
    pub fn delivery_progress(&self, principal: &Principal) -> DeliveryProgress {
        let inner = self.lock();
        let Some(record) = inner.records.get(principal) else {
            return DeliveryProgress::default();
        };
        let behind = record
            .progress
            .refusals
            .iter()
            .filter_map(|(owner, r)| Some((owner.clone()?, r.acked)));
        DeliveryProgress {
            acked_through: record.acked_through(),
            content: record.content,
            behind: behind.collect(),
        }
    }

    /// Returns whether a data plane acknowledged everything of `kind` and `tenant` up to
    /// `generation`; `None` if it is not connected.
    pub fn has(
        &self,
        principal: &Principal,
        tenant: &TenantName,
        kind: ResourceKind,
        generation: Generation,
    ) -> Option<bool> {
        let inner = self.lock();
        let record = inner
            .records
            .get(principal)
            .filter(|r| !r.streams.is_empty())?;
        let p = &record.progress;
        let acked_through = p
            .refusals
            .get(&Some(tenant.clone()))
            .map_or_else(|| record.acked_through(), |r| r.acked);
        Some(p.kinds[kind as usize] && acked_through >= generation)
    }

    /// Stores the report of a connected data plane on its limits.
    pub fn note_shares(&self, principal: &Principal, report: Arc<ShareReport>) {
        if let Some(record) = self
            .lock()
            .records
            .get_mut(principal)
            .filter(|record| !record.streams.is_empty())
        {
            record.shares = report;
        }
    }

    /// Returns the last report of each connected data plane on its limits.
    pub fn share_reports(&self) -> Vec<(Principal, Arc<ShareReport>)> {
        let inner = self.lock();
        let connected = inner
            .records
            .iter()
            .filter(|(_, record)| !record.streams.is_empty());
        connected
            .map(|(principal, record)| (principal.clone(), record.shares.clone()))
            .collect()
    }

    /// Returns the numbers of subscribers that are connected, by kind, that have everything in
    /// their scope, and that refuse something. Also returns the longest time that one has owed an
    /// ACK or NACK, in seconds.
    pub fn summary(&self, catalog: &Catalog) -> SubscriberSummary {
        let inner = self.lock();
        let mut s = SubscriberSummary::default();
        for (principal, r) in inner.records.iter().filter(|(_, r)| !r.streams.is_empty()) {
            *s.connected.entry(principal_name(principal)).or_insert(0) += 1;
            s.converged += u64::from(
                r.progress.nack.is_empty()
                    && r.progress.acked >= wanted_generation(principal, &r.progress, catalog),
            );
            s.standing += u64::from(
                r.refused_since
                    .is_some_and(|since| since.elapsed() > STANDING_AFTER),
            );
            s.unacked_seconds = s
                .unacked_seconds
                .max(r.unacked_since.map_or(0.0, |t| t.elapsed().as_secs_f64()));
        }
        s
    }

    /// Lists all subscribers that connected since the start, as `canal status` shows them.
    pub fn list(
        &self,
        catalog: &Catalog,
        visible: impl Fn(&Principal) -> bool,
    ) -> Vec<api::Subscriber> {
        let inner = self.lock();
        inner
            .records
            .iter()
            .filter(|(p, _)| visible(p))
            .map(|(p, r)| api_subscriber(p, r, catalog))
            .collect()
    }

    /// Lists subscribers like [`Subscribers::list`], for an operator that may see only some
    /// tenants. It names only refusals of these tenants, and shows how far these are.
    pub fn list_for(
        &self,
        catalog: &Catalog,
        visible: impl Fn(&Principal) -> bool,
        may_see: impl Fn(&TenantName) -> bool,
    ) -> Vec<api::Subscriber> {
        let inner = self.lock();
        let narrowed = |(principal, record): (&Principal, &SubscriberRecord)| {
            let own: Vec<_> = record
                .progress
                .refusals
                .iter()
                .filter(|(owner, _)| owner.as_ref().is_some_and(&may_see))
                .collect();
            let acked = own
                .iter()
                .map(|(_, r)| r.acked)
                .chain([record.progress.acked])
                .min()
                .unwrap_or_default()
                .0;
            api::Subscriber {
                nack: refusal_text(&own),
                generation_acked: acked,
                ..api_subscriber(principal, record, catalog)
            }
        };
        inner
            .records
            .iter()
            .filter(|(p, _)| visible(p))
            .map(narrowed)
            .collect()
    }
}

/// Removes disconnected subscribers that are no longer principals, whenever the principals change.
pub async fn follow(registry: Arc<Subscribers>, mut principals: watch::Receiver<Arc<Principals>>) {
    while principals.changed().await.is_ok() {
        let current = principals.borrow_and_update().clone();
        registry
            .lock()
            .records
            .retain(|p, record| !record.streams.is_empty() || current.has_principal(p));
    }
}

/// Numbers of all subscribers for the metrics.
#[derive(Debug, Default)]
pub struct SubscriberSummary {
    pub connected: BTreeMap<&'static str, u64>,
    pub converged: u64,
    pub unacked_seconds: f64,
    /// Data planes that have refused something for longer than [`STANDING_AFTER`].
    pub standing: u64,
}

impl OpenStream {
    /// Resolves when the stream must give way to another tenant's.
    pub(crate) fn revoked(&self) -> impl Future<Output = ()> + Send + use<> {
        let inner = self.registry.lock();
        let stream = inner
            .records
            .get(&self.principal)
            .and_then(|record| record.streams.get(&self.id));
        let revoked = stream.map(|stream| stream.permit.revoked());
        async move {
            match revoked {
                Some(revoked) => revoked.await,
                // The stream is superseded, and no longer in the registry.
                None => std::future::pending().await,
            }
        }
    }

    /// Records that a message arrived.
    pub(crate) fn record_message(
        &self,
        progress: SubscriberProgress,
        is_waiting: bool,
        is_nack: bool,
    ) {
        self.update(|r| {
            r.last_seen_ms = now_ms();
            r.nacks += u64::from(is_nack);
            r.progress = progress;
            r.unacked_since = is_waiting.then_some(Instant::now());
        });
    }

    /// Records the bytes that this stream is charged for names that the catalog does not have.
    /// While all streams of the principal exceed [`PRINCIPAL_NAME_BYTES_MAX`], the oldest ends.
    /// Returns how many ended.
    pub(crate) fn holds_names(&self, bytes: usize) -> usize {
        let mut inner = self.registry.lock();
        let Some(record) = inner.records.get_mut(&self.principal) else {
            return 0;
        };
        // A stream that gave way is no longer counted.
        match record.streams.get_mut(&self.id) {
            Some(stream) if stream.name_bytes != bytes => stream.name_bytes = bytes,
            _ => return 0,
        }
        let mut ended = 0;
        while record.streams.len() > 1
            && record
                .streams
                .values()
                .map(|stream| stream.name_bytes)
                .sum::<usize>()
                > PRINCIPAL_NAME_BYTES_MAX
        {
            record.supersede_oldest();
            ended += 1;
        }
        ended
    }

    /// Records that a response, or a part of one, with `bytes` was handed to the connection.
    pub(crate) fn sent(&self, progress: SubscriberProgress, bytes: usize, is_last_part: bool) {
        self.update(|r| {
            r.bytes_sent += bytes as u64;
            r.responses_sent += u64::from(is_last_part);
            r.content = r.content.max(progress.content);
            r.progress = progress;
            r.unacked_since.get_or_insert_with(Instant::now);
        });
    }

    /// Records that the stream was compared with a newer catalog.
    pub(crate) fn record_progress(&self, progress: SubscriberProgress) {
        self.update(|r| r.progress = progress);
    }

    /// Records which build the subscriber runs.
    pub(crate) fn record_build(&self, version: &str) {
        // The subscriber chose this text, which stays in memory. Canal's own are far shorter.
        self.update(|r| r.version = version.chars().take(100).collect());
    }

    /// Updates the principal's record, if this is its newest stream: an old one that lingers must
    /// not overwrite newer progress.
    fn update(&self, f: impl FnOnce(&mut SubscriberRecord)) {
        let mut inner = self.registry.lock();
        if let Some(record) = inner.records.get_mut(&self.principal)
            && record
                .streams
                .last_key_value()
                .is_some_and(|(id, _)| *id == self.id)
        {
            f(record);
            record.refused_since = match record.progress.nack.is_empty() {
                true => None,
                false => record.refused_since.or_else(|| Some(Instant::now())),
            };
        }
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let mut inner = self.registry.lock();
        if let Some(record) = inner.records.get_mut(&self.principal) {
            record.streams.remove(&self.id);
            if record.streams.is_empty() {
                record.unacked_since = None;
                record.shares = Arc::default();
            }
        }
    }
}

/// Returns the newest generation in the scope of a subscriber, even if its stream was not compared
/// with it yet or is closed.
fn wanted_generation(
    principal: &Principal,
    progress: &SubscriberProgress,
    catalog: &Catalog,
) -> Generation {
    let newer = catalog.newest_in_scope(principal, &progress.kinds, progress.compared);
    newer.map_or(progress.target, |g| g.max(progress.target))
}

/// Formats the refusals of some tenants as one line.
fn refusal_text(of: &[(&ResourceOwner, &TenantRefusals)]) -> String {
    let all = of.iter().flat_map(|(_, r)| &r.examples);
    let one =
        |((kind, name), why): &(ResourceId, String)| format!("{} {name}: {why}", kind.label());
    let mut text = all
        .take(REFUSED_NAMED_MAX)
        .map(one)
        .collect::<Vec<_>>()
        .join("; ");
    let more = of
        .iter()
        .map(|(_, r)| r.count)
        .sum::<usize>()
        .saturating_sub(REFUSED_NAMED_MAX);
    if more > 0 {
        text.push_str(&format!("; and {more} more"));
    }
    text
}

/// Converts a subscriber's record to its form in the API. The acknowledged generation is that of
/// the tenant furthest behind.
fn api_subscriber(
    principal: &Principal,
    r: &SubscriberRecord,
    catalog: &Catalog,
) -> api::Subscriber {
    let (name, tenant, az) = match principal {
        Principal::Node { name, tenant, az } => {
            (name.to_string(), tenant.to_string(), az.to_string())
        }
        Principal::Gateway { name, az } => (name.to_string(), String::new(), az.to_string()),
        Principal::Edge { name, az } => (name.to_string(), String::new(), az.to_string()),
        Principal::KeyServer { name, az, tenant } => (
            name.to_string(),
            // A key server without a tenant is the provider's.
            tenant.as_ref().map(ToString::to_string).unwrap_or_default(),
            az.to_string(),
        ),
        Principal::Operator { name, .. } => (name.to_string(), String::new(), String::new()),
    };
    api::Subscriber {
        kind: principal_name(principal).into(),
        name,
        tenant,
        az,
        connected: !r.streams.is_empty(),
        generation_wanted: wanted_generation(principal, &r.progress, catalog).0,
        generation_sent: r.progress.sent.0,
        generation_acked: r
            .progress
            .refusals
            .values()
            .map(|of_tenant| of_tenant.acked)
            // A tenant that refuses keeps its own generation; all others share one.
            .chain([r.progress.acked])
            .min()
            .unwrap_or_default()
            .0,
        nack: r.progress.nack.clone(),
        resources: r.progress.resources as u64,
        bytes_sent: r.bytes_sent,
        responses_sent: r.responses_sent,
        nacks: r.nacks,
        // The first connection is no reconnection.
        reconnects: r.connects.saturating_sub(1),
        last_seen_ms: r.last_seen_ms,
        version: r.version.clone(),
    }
}

fn now_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node_of(tenant: &str, name: &str) -> Principal {
        Principal::Node {
            name: name.parse().unwrap(),
            tenant: tenant.parse().unwrap(),
            az: "az1".parse().unwrap(),
        }
    }

    fn node(name: &str) -> Principal {
        node_of("alpha", name)
    }

    /// Creates a registry of which `reserve` streams are only for the provider. A tenant may take
    /// all the others.
    fn subscribers(capacity: u64, reserve: u64) -> Arc<Subscribers> {
        let kind = canal_model::share::ShareKind::ControllerStreams;
        let revocation_order = canal_runtime::RevocationOrder::OldestFirst;
        let limit = TenantLimit::new(canal_runtime::TenantLimitConfig {
            kind,
            capacity,
            reserve,
            revocation_order,
        });
        limit.set_default_share(canal_model::share::Share::Percent(100));
        Subscribers::new(limit)
    }

    #[test]
    fn a_tenant_with_all_streams_does_not_block_streams_of_others() {
        // Alpha may take the 9 streams that are not the provider's reserve.
        let s = subscribers(10, 1);
        let mine: Vec<OpenStream> = (0..9)
            .map(|n| s.open(&node(&format!("n{n}"))).unwrap())
            .collect();
        let revoked = || {
            let inner = s.lock();
            mine.iter()
                .map(|o| {
                    inner.records[&o.principal].streams[&o.id]
                        .permit
                        .is_revoked()
                })
                .filter(|is| *is)
                .count()
        };
        let refused = s
            .open(&node("n9"))
            .err()
            .expect("alpha has its share")
            .to_string();
        assert!(
            refused.contains("alpha may open no more streams (controllerStreams: share)"),
            "{refused}"
        );
        let gateway = Principal::Gateway {
            name: "g1".parse().unwrap(),
            az: "az1".parse().unwrap(),
        };
        let provider: Vec<_> = (0..3).map(|_| s.open(&gateway).unwrap()).collect();
        // The first of the gateway's streams uses the reserve, and each further one ends a stream
        // of alpha.
        assert_eq!(revoked(), 2, "each stream beyond the reserve revokes one");
        let beta: Vec<_> = (0..3)
            .map(|n| s.open(&node_of("beta", &format!("n{n}"))).unwrap())
            .collect();
        // Each of beta's streams ends one more of alpha's.
        assert_eq!(revoked(), 5);
        assert!(
            s.open(&node_of("beta", "n3")).is_err(),
            "beta would have as many as alpha, so no stream of alpha is ended"
        );
        // The oldest streams were revoked: n4 has the fifth of them.
        assert!(
            s.lock().records[&node("n4")]
                .streams
                .values()
                .all(|stream| stream.permit.is_revoked())
        );
        // A data plane that reconnects at a full limit replaces its own oldest stream.
        let gateway_again = s.open(&gateway).unwrap();
        assert!(provider[0].superseded.is_cancelled() && revoked() == 5);
        drop((mine, provider, beta, gateway_again));
        assert_eq!(s.limit.used(), 0);
    }

    #[test]
    fn streams_are_limited_in_all_and_per_principal() {
        // Four streams in all, of which none is reserved for the provider.
        let s = subscribers(4, 0);
        // STREAMS_PER_PRINCIPAL_MAX streams; the next one replaces the oldest.
        let old: Vec<OpenStream> = (0..3).map(|_| s.open(&node("n1")).unwrap()).collect();
        assert!(old.iter().all(|o| !o.superseded.is_cancelled()));
        let newest = s.open(&node("n1")).unwrap();
        assert_eq!(
            old.iter()
                .map(|o| o.superseded.is_cancelled())
                .collect::<Vec<_>>(),
            [true, false, false]
        );
        let other = s.open(&node("n2")).unwrap();
        // Four streams are open, which is the limit: three of n1 and one of n2.
        assert!(
            s.open(&node("n3"))
                .is_err_and(|e| e.to_string().contains("alpha"))
        );
        // Each stream that ends leaves its place to another.
        drop(other);
        drop(s.open(&node("n3")).unwrap());

        old[1].record_progress(SubscriberProgress {
            resources: 9,
            ..SubscriberProgress::default()
        });
        newest.record_progress(SubscriberProgress {
            resources: 4,
            ..SubscriberProgress::default()
        });
        // The newest stream represents a principal that has several.
        let list = s.list(&Catalog::default(), |_| true);
        let row = |l: &[api::Subscriber], i: usize| {
            (
                l[i].name.clone(),
                l[i].connected,
                l[i].resources,
                l[i].reconnects,
            )
        };
        // Four streams of n1 were opened, and the first is no reconnection.
        assert_eq!(row(&list, 0), ("n1".into(), true, 4, 3));
        drop((old, newest));
        let list = s.list(&Catalog::default(), |p| *p == node("n1"));
        assert_eq!((list.len(), row(&list, 0)), (1, ("n1".into(), false, 4, 3)));
    }

    #[test]
    fn names_of_a_principal_are_limited_over_all_its_streams() {
        // A sixteenth of what one stream may hold.
        const PART: usize = PRINCIPAL_NAME_BYTES_MAX / 16;
        let s = subscribers(9, 0);
        let streams: Vec<OpenStream> = (0..3).map(|_| s.open(&node("n1")).unwrap()).collect();
        let other = s.open(&node("n2")).unwrap();
        let ended = || {
            streams
                .iter()
                .map(|stream| stream.superseded.is_cancelled())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (
                streams[0].holds_names(9 * PART),
                streams[1].holds_names(7 * PART)
            ),
            (0, 0),
            "exactly what one stream may hold"
        );
        assert_eq!(
            (
                streams[1].holds_names(7 * PART),
                other.holds_names(16 * PART)
            ),
            (0, 0)
        );
        assert_eq!(streams[2].holds_names(1), 1);
        assert_eq!(ended(), [true, false, false], "the oldest is ended");
        assert_eq!(streams[0].holds_names(10 * PART), 0, "and counts no more");
        assert_eq!(
            (streams[2].holds_names(16 * PART), ended()),
            (1, vec![true, true, false])
        );
        assert!(
            !other.superseded.is_cancelled(),
            "another principal's names are its own"
        );
    }
}
