//! The agent itself: takes states and orders, has the maps written, looks for owned sessions, makes reports. The one place where these
//! meet; what each of them decides is in its own module.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use canal_kit::controller::Controller;
use canal_kit::drain::Drain;
use canal_kit::metrics::Registry;
use canal_kit::southbound::{Origin, State, Update};
use canal_model::ids::{AzName, BackendName};
use canal_model::program::{Kind, Resource};
use canal_wire::fleet::{self, ReplicaState};
use serde_json::json;
use tokio::sync::watch;

use crate::content::{Content, ContentRules, Orders, decide_behind, decide_content, decide_parting, table};
use crate::counts::Counts;
use crate::keeper::{Keeper, Kernel};
use crate::report::{self, Desk};
use crate::sockets::{LookError, Owned, Sockets};

/// The kinds that the maps are made of.
const KINDS: [Kind; 4] = [Kind::Tenant, Kind::Table, Kind::Replica, Kind::Throttle];
/// How often what could not be written is tried again, programs are looked after, and counters are read.
const AUDIT: Duration = Duration::from_secs(1);
/// A look at the kernel's sockets that takes longer is given up: what is not whole says nothing.
const LOOK_LIMIT: Duration = Duration::from_secs(5);
/// A look's time is followed by so many times as long without one: a fiftieth of a core at most.
const LOOK_REST: u32 = 49;
/// While nothing moves, a look is made so often: it tells no more than the one before.
const LOOK_QUIET: Duration = Duration::from_secs(1);

/// Who this replica is.
#[derive(Debug, Clone)]
pub struct Config {
    pub az: AzName,
    pub backend: BackendName,
    pub underlay: Ipv4Addr,
    pub version: String,
    /// Where to report; `None` reports to nobody.
    pub controller: Option<Controller>,
    /// Where orders are kept over restarts, so that a process that starts while no controller answers knows its number and its edge.
    pub orders: PathBuf,
    /// Where sessions are looked for.
    pub sockets: Sockets,
}

/// The gateway's sessions: open now, and taken since it started.
pub type Sessions = Box<dyn Fn() -> (u64, u64) + Send + Sync>;

/// A running agent. Clones share it.
#[derive(Clone)]
pub struct Agent {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    counts: Counts,
    sessions: Sessions,
    held: Mutex<Holding>,
    looked: Mutex<Looked>,
    news: watch::Sender<u64>,
    parting: watch::Sender<bool>,
}

struct Holding {
    keeper: Keeper,
    resources: Vec<Arc<Resource>>,
    orders: Option<Orders>,
    wanted: Content,
    /// Of the newest state, and of the newest one that the maps hold whole.
    told: u64,
    generation: u64,
    /// Elements that are not written.
    failed: usize,
    draining: bool,
    leaving: bool,
    /// Since when it drains, by order or by itself.
    drains_since: Option<Instant>,
    /// A state came from the controller, not only from disk.
    live: bool,
    /// May own sessions that somebody must know of.
    behind: bool,
}

/// The last looks.
#[derive(Default)]
struct Looked {
    owned: Owned,
    /// What the look before saw: the kernel's list may skip one that was moved in it at that moment.
    before: Owned,
    generation: u64,
    versions: std::collections::HashMap<u32, u32>,
    /// When the last one began, and what it took.
    last: Option<(Instant, Duration)>,
    error: String,
}

/// What a look is made for.
#[derive(Default)]
struct Purpose {
    needed: bool,
    draining: bool,
    generation: u64,
    versions: std::collections::HashMap<u32, u32>,
}

/// Whether to look now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// Nobody needs to know.
    Needless,
    Rest,
    Look,
}

/// A look is due at once after a change of tables or of what was seen, but never more of them than their rest allows.
fn decide_turn(purpose: &Purpose, looked: &Looked, now: Instant) -> Turn {
    let buckets = |owned: &Owned| owned.iter().map(|(id, of)| (*id, of.buckets)).collect::<Vec<_>>();
    let moves = || {
        purpose.draining
            || (purpose.generation, &purpose.versions) != (looked.generation, &looked.versions)
            || buckets(&looked.owned) != buckets(&looked.before)
    };
    match looked.last.map(|(begun, took)| (now.saturating_duration_since(begun), took)) {
        _ if !purpose.needed => Turn::Needless,
        Some((since, took)) if since < took * (LOOK_REST + 1) => Turn::Rest,
        Some((since, _)) if since < LOOK_QUIET && !moves() => Turn::Rest,
        _ => Turn::Look,
    }
}

impl Agent {
    /// Adopts the maps and starts to report. Nothing is written to them before the first [`Agent::apply`].
    pub fn start(config: Config, kernel: Box<dyn Kernel>, sessions: Sessions, registry: &Registry, drain: &Drain) -> Result<Self, String> {
        let counts = Counts::new(registry);
        let kept = read_orders(&config.orders);
        let held = Holding {
            keeper: Keeper::adopt(kernel, counts.clone())?,
            resources: Vec::new(),
            orders: kept,
            wanted: Content::default(),
            told: 0,
            generation: 0,
            failed: 0,
            draining: false,
            leaving: false,
            drains_since: None,
            live: false,
            behind: false,
        };
        let inner = Arc::new(Inner {
            counts: counts.clone(),
            sessions,
            held: Mutex::new(held),
            looked: Mutex::default(),
            news: watch::channel(0).0,
            parting: watch::channel(false).0,
            config,
        });
        let agent = Self { inner };
        if let Some(controller) = agent.inner.config.controller.clone() {
            tokio::spawn(report::run(controller, agent.inner.clone(), counts, drain.watcher()));
        }
        let (audited, end) = (agent.clone(), drain.watcher());
        tokio::spawn(async move {
            tokio::select! {
                () = audited.audit() => {}
                () = end.forced() => {}
            }
        });
        Ok(agent)
    }

    /// Takes a state: writes what differs. The whole state is given, so a lost update costs nothing. Gives the resources that are left out
    /// because they are beyond their tenant's share of a map: kind, name and why.
    pub fn apply(&self, update: &Update, state: &State) -> Vec<(Kind, String, String)> {
        let concerns = update.upserts.iter().any(|r| KINDS.contains(&r.kind())) || update.removals.iter().any(|(k, _)| KINDS.contains(k));
        let mut held = self.inner.held();
        let first = held.told == 0 || (!held.live && update.origin == Origin::Controller);
        held.live |= update.origin == Origin::Controller;
        held.told = update.generation.0;
        if concerns || first || update.origin == Origin::Snapshot {
            held.resources = KINDS.iter().flat_map(|k| state.of(*k).cloned()).collect();
            self.inner.settle(&mut held);
        } else if held.failed == 0 {
            held.generation = held.told;
        }
        let omitted = held.wanted.omitted.iter().map(|entry| (entry.kind, entry.name.clone(), entry.why.clone())).collect();
        drop(held);
        self.inner.tell();
        omitted
    }

    /// Opens the doors: sessions come from now on.
    pub fn open_doors(&self) -> Result<(), String> {
        self.inner.held().keeper.kernel().open_doors()
    }

    /// Lets go of the gateway's sockets if the doors were never opened.
    pub fn forget_doors(&self) {
        self.inner.held().keeper.kernel().forget_doors();
    }

    /// From now on reports say that this replica wants no new sessions.
    pub fn drain(&self) {
        let mut held = self.inner.held();
        held.draining = true;
        self.inner.weigh(&mut held);
        drop(held);
        self.inner.tell();
    }

    /// Whether clients should take their sessions elsewhere: this replica drains, and new sessions are led to others.
    pub fn parting(&self) -> watch::Receiver<bool> {
        self.inner.parting.subscribe()
    }

    /// The last words: everything is closed, or ends now.
    pub async fn leave(&self) {
        let Some(controller) = &self.inner.config.controller else { return };
        {
            let mut held = self.inner.held();
            (held.draining, held.leaving) = (true, true);
        }
        report::last(controller, self.inner.state(), &self.inner.counts).await;
    }

    /// Why the replica cannot serve yet.
    pub fn ready(&self) -> Result<(), String> {
        let held = self.inner.held();
        match () {
            () if held.told == 0 => Err("the redirector has no bucket tables yet".into()),
            () if held.orders.is_none() => Err("no controller has taken this replica's report yet".into()),
            () => Ok(()),
        }
    }

    /// For `/config_dump`.
    pub fn dump(&self) -> serde_json::Value {
        let held = self.inner.held();
        let looked = self.inner.looked();
        let mut tables: Vec<_> = held.keeper.have().tables.values().filter_map(|r| table(r)).collect();
        tables.sort_by(|a, b| a.service.cmp(&b.service));
        let own = held.orders.as_ref().map(|o| o.number);
        let row = |t: &&canal_model::program::BucketTable| {
            let heads = t.chains.iter().filter(|c| c.first().map(|n| n.get()) == own).count();
            let of = looked.owned.get(&t.id).copied().unwrap_or_default();
            json!({
                "service": t.service.to_string(), "id": t.id.get(), "vni": t.vni.get(), "version": t.version,
                "heads_here": heads, "owned_buckets": of.buckets.count_ones(), "owned_sessions": of.sessions,
            })
        };
        json!({
            "generation": held.generation,
            "behind": held.failed,
            "draining": held.draining,
            "orders": held.orders.as_ref().map(|o| json!({
                "number": o.number, "edge": o.edge.map(|e| e.to_string()), "drain": o.drain,
                "hosts": o.hosts.iter().map(ToString::to_string).collect::<Vec<_>>(),
            })),
            "replicas": held.keeper.have().replicas.iter()
                .map(|(n, s)| json!({"number": n, "underlay": s.address.to_string(), "up": s.up})).collect::<Vec<_>>(),
            "tables": tables.iter().map(row).collect::<Vec<_>>(),
            "looked_at_generation": looked.generation,
            "look_error": looked.error,
        })
    }

    async fn audit(&self) {
        loop {
            tokio::time::sleep(AUDIT).await;
            let mut held = self.inner.held();
            if held.failed > 0 {
                self.inner.settle(&mut held);
            } else {
                self.inner.weigh(&mut held);
            }
            match held.keeper.kernel().repair() {
                Ok(true) => {
                    self.inner.counts.repaired();
                    tracing::warn!("somebody took the redirector's programs away; they are back");
                }
                Ok(false) => {}
                Err(error) => tracing::error!(error, "the redirector's programs are not in place and cannot be put there"),
            }
            match held.keeper.kernel().counts() {
                Ok(counts) => self.inner.counts.packets(&counts),
                Err(error) => tracing::warn!(error, "the redirector's counters cannot be read"),
            }
        }
    }
}

impl Inner {
    fn held(&self) -> MutexGuard<'_, Holding> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn looked(&self) -> MutexGuard<'_, Looked> {
        self.looked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self) {
        self.news.send_modify(|n| *n += 1);
    }

    /// Writes what should be there. A generation counts once all of it is in the maps.
    fn settle(&self, held: &mut Holding) {
        if held.told == 0 {
            return;
        }
        let rules = ContentRules { held: Some(&held.keeper) };
        let wanted = decide_content(held.resources.iter(), &self.config.az, held.orders.as_ref(), &rules);
        held.wanted = wanted;
        let Holding { keeper, wanted, orders, live, .. } = held;
        let failed = keeper.reconcile(wanted, *live);
        let number = orders.as_ref().map_or(0, |o| o.number);
        let behind = number != 0 && wanted.tables.values().filter_map(|r| table(r)).any(|t| decide_behind(t, number));
        (held.failed, held.behind) = (failed, behind);
        if failed == 0 {
            held.generation = held.told;
        }
        self.weigh(held);
    }

    /// Says anew whether clients should leave.
    fn weigh(&self, held: &mut Holding) {
        let drains = held.draining || held.orders.as_ref().is_some_and(|o| o.drain);
        held.drains_since = drains.then(|| held.drains_since.unwrap_or_else(Instant::now));
        let number = held.orders.as_ref().map_or(0, |o| o.number);
        let parts = decide_parting(
            held.drains_since.map(|since| since.elapsed()),
            number,
            held.keeper.have().tables.values().filter_map(|r| table(r)),
        );
        self.parting.send_if_modified(|was| std::mem::replace(was, parts) != parts);
    }

    fn purpose(&self) -> Purpose {
        let held = self.held();
        let versions = held.keeper.have().tables.iter().filter_map(|(id, r)| Some((*id, table(r)?.version))).collect();
        let draining = held.draining || held.orders.as_ref().is_some_and(|o| o.drain);
        Purpose { needed: held.behind || draining, draining, generation: held.generation, versions }
    }

    /// Looks at the kernel's sockets if somebody must know what is there. The versions are those from before the look.
    async fn look(&self) {
        let purpose = self.purpose();
        let begun = Instant::now();
        {
            let mut looked = self.looked();
            match decide_turn(&purpose, &looked, begun) {
                Turn::Needless => {
                    *looked = Looked { generation: purpose.generation, ..Looked::default() };
                    return;
                }
                Turn::Rest => {
                    self.counts.look("spared", 0);
                    return;
                }
                Turn::Look => {}
            }
        }
        let sockets = self.config.sockets.clone();
        let read = tokio::task::spawn_blocking(move || sockets.look(begun + LOOK_LIMIT)).await;
        let took = begun.elapsed();
        let mut looked = self.looked();
        looked.last = Some((begun, took));
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        match read.unwrap_or_else(|e| Err(LookError::Io(std::io::Error::other(e)))) {
            Ok(owned) => {
                self.counts.look("ok", micros);
                self.counts.owned(owned.values().map(|o| u64::from(o.sessions)).sum());
                looked.before = std::mem::replace(&mut looked.owned, owned);
                (looked.generation, looked.versions) = (purpose.generation, purpose.versions);
                looked.error.clear();
            }
            Err(error) => {
                // The last whole look stands, with the generation that it was made at.
                self.counts.look(if matches!(error, LookError::Late) { "late" } else { "failed" }, micros);
                looked.error = error.to_string();
                tracing::warn!(%error, "owned sessions are not known anew");
            }
        }
    }

    fn state(&self) -> ReplicaState {
        let (sessions, accepted) = (self.sessions)();
        let (draining, leaving) = {
            let held = self.held();
            (held.draining, held.leaving)
        };
        let looked = self.looked();
        ReplicaState {
            backend: self.config.backend.to_string(),
            az: self.config.az.to_string(),
            underlay: self.config.underlay.to_string(),
            generation: looked.generation,
            draining,
            leaving,
            owned: if leaving { Vec::new() } else { owned(&looked) },
            sessions,
            accepted,
            version: self.config.version.clone(),
        }
    }
}

/// The report's part: what this look or the one before saw.
fn owned(looked: &Looked) -> Vec<fleet::Owned> {
    let mut all = looked.owned.clone();
    for (id, of) in &looked.before {
        all.entry(*id).or_default().buckets |= of.buckets;
    }
    let version = |id: u32| looked.versions.get(&id).copied().unwrap_or(0);
    all.into_iter()
        .map(|(id, of)| fleet::Owned {
            service: id.get(),
            table_version: version(id.get()),
            buckets: of.buckets.to_le_bytes().to_vec(),
            sessions: of.sessions,
        })
        .collect()
}

impl Desk for Inner {
    async fn report(&self) -> ReplicaState {
        self.look().await;
        self.state()
    }

    fn orders(&self, orders: Orders) {
        let mut held = self.held();
        if held.orders.as_ref() != Some(&orders) {
            if held.orders.as_ref().map(|o| (o.number, o.edge)) != Some((orders.number, orders.edge)) {
                keep_orders(&self.config.orders, &orders);
            }
            held.orders = Some(orders);
            self.settle(&mut held);
        }
    }

    fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }
}

/// An earlier process's number and edge. A drain is not remembered: a replica that was started again shall serve.
pub(crate) fn read_orders(path: &std::path::Path) -> Option<Orders> {
    let value: serde_json::Value = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
    let number = u16::try_from(value["number"].as_u64()?).ok()?;
    let address = |v: &serde_json::Value| v.as_str()?.parse().ok();
    let hosts = value["hosts"].as_array()?.iter().filter_map(address).collect();
    Some(Orders { number, edge: address(&value["edge"]), hosts, drain: false })
}

fn keep_orders(path: &std::path::Path, orders: &Orders) {
    let hosts: Vec<String> = orders.hosts.iter().map(ToString::to_string).collect();
    let text = json!({"number": orders.number, "edge": orders.edge.map(|e| e.to_string()), "hosts": hosts}).to_string();
    let (new, write) = (path.with_extension("new"), |new: &PathBuf| std::fs::write(new, text).and_then(|()| std::fs::rename(new, path)));
    if let Err(error) = write(&new) {
        tracing::warn!(path = %path.display(), %error, "orders are not kept; a restart without a controller would not know them");
    }
}

#[cfg(test)]
mod tests;
