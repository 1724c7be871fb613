//! One response taken in: what is good of it is applied, what is bad is refused by name, and a refusal of the whole by the caller is traced
//! to the tenants that cause it. Start reading at [`Holder::take`].

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use canal_model::ids::TenantName;
use canal_model::program::{Kind, Resource};
use canal_wire::discovery::DeltaDiscoveryResponse;

use super::held::{Holder, lock, whole};
use super::state::{Change, Refusal, State, examine};
use super::{Apply, Origin, RefusedResource, Update, kind_name};

/// The answer to a response that was not taken, or not whole.
#[derive(Debug)]
pub(super) struct Nack {
    pub(super) text: String,
    /// Refused resources with the reason. Everything else was taken; empty: nothing was.
    pub(super) named: Vec<(String, String)>,
}

/// What the caller is told of a response.
enum Tell {
    Nothing,
    Change,
    Whole,
}

/// What came of a response whose envelope is good.
struct Outcome {
    kind: Kind,
    refused: Vec<RefusedResource>,
    /// Refused resources that an earlier response brought, so that this one's answer cannot name them.
    earlier: usize,
}

impl Holder {
    /// Takes in what is good of a response; `Err` is the nack.
    pub(super) fn take(&mut self, response: &DeltaDiscoveryResponse) -> Result<(), Nack> {
        let kind = canal_wire::southbound::kind_of(&response.type_url).map_or("unknown", kind_name);
        match self.try_take(response) {
            Ok(Outcome { kind: of, refused, earlier }) => {
                self.accepted(of, refused.is_empty());
                self.resync |= earlier > 0;
                if refused.is_empty() {
                    return Ok(());
                }
                let named: Vec<_> = refused.iter().map(|r| (r.name.clone(), r.why.clone())).collect();
                let text = named.iter().take(8).map(|(_, why)| why.as_str()).collect::<Vec<_>>().join("; ");
                refused.iter().for_each(|r| self.counts.refused(kind, r.label));
                self.nacked(kind, refused[0].label, &text, response);
                Err(Nack { text, named })
            }
            Err(refusal) => {
                let text = refusal.to_string();
                self.nacked(kind, refusal.reason(), &text, response);
                Err(Nack { text, named: Vec::new() })
            }
        }
    }

    fn nacked(&self, kind: &str, reason: &'static str, text: &str, response: &DeltaDiscoveryResponse) {
        self.counts.nack(kind, reason);
        tracing::warn!(kind, reason, generation = response.system_version_info, error = text, "refused a response, or a part of it");
        self.status.send_modify(|s| {
            s.nack.insert(kind.into(), text.into());
        });
    }

    fn try_take(&mut self, response: &DeltaDiscoveryResponse) -> Result<Outcome, Refusal> {
        if let Some(incoming) = self.incoming.take() {
            return self.try_replace(incoming, response);
        }
        let mut state = lock(&self.state);
        let (change, mut refused) = examine(&state, &self.kinds, response)?;
        let kind = change.kind;
        let said_something = !(response.resources.is_empty() && response.removed_resources.is_empty());
        let tell = match (self.status.borrow().ready, self.is_answered_with(kind)) {
            // A response that names nothing changes nothing; one of which nothing was new still moves the generation.
            (true, _) if !said_something => Tell::Nothing,
            (true, _) => Tell::Change,
            (false, true) => Tell::Whole,
            // Until every kind was answered there is only a part of a state: services without their routes, say. Nobody may serve by that.
            (false, false) => Tell::Nothing,
        };
        let watches = self.kinds.contains(&Kind::Manifest);
        let mut earlier = 0;
        match tell {
            Tell::Nothing => _ = advance(&mut state, &change, &refused, &self.kinds, watches),
            Tell::Change => refused.extend(tell_change(&mut self.apply, &mut state, change, &refused, &self.kinds, watches)),
            Tell::Whole => {
                let undo = advance(&mut state, &change, &refused, &self.kinds, watches);
                let told = State::default();
                let all = match tell_whole(&mut self.apply, &told, &mut state, Origin::Controller, &self.kinds, watches) {
                    Ok(all) => all,
                    Err(why) => {
                        state.undo(undo);
                        return Err(Refusal::Caller(why));
                    }
                };
                let (here, before): (Vec<_>, Vec<_>) = all.into_iter().partition(|r| r.kind == kind && is_in(response, &r.name));
                refused.extend(here);
                earlier = before.len();
            }
        }
        self.dirty |= said_something;
        Ok(Outcome { kind, refused, earlier })
    }

    /// Takes in a response of another store. What is held of the old one stays in force until the new state is whole, and then gives way at
    /// once: resources of two stores are never mixed.
    fn try_replace(&mut self, mut incoming: State, response: &DeltaDiscoveryResponse) -> Result<Outcome, Refusal> {
        let (change, mut refused) = match examine(&incoming, &self.kinds, response) {
            Ok(examined) => examined,
            Err(refusal) => {
                self.incoming = Some(incoming);
                return Err(refusal);
            }
        };
        let kind = change.kind;
        let watches = self.kinds.contains(&Kind::Manifest);
        let undo = advance(&mut incoming, &change, &refused, &self.kinds, watches);
        // Who is told no manifests cannot wait for them.
        let is_sealed = !watches || incoming.unsealed.is_empty();
        if !self.is_answered_with(kind) || !is_sealed {
            self.incoming = Some(incoming);
            return Ok(Outcome { kind, refused, earlier: 0 });
        }
        let mut state = lock(&self.state);
        // Until it is ready, the caller was told nothing.
        let told = if self.status.borrow().ready { state.clone() } else { State::default() };
        let all = match tell_whole(&mut self.apply, &told, &mut incoming, Origin::Controller, &self.kinds, watches) {
            Ok(all) => all,
            Err(why) => {
                incoming.undo(undo);
                self.incoming = Some(incoming);
                return Err(Refusal::Caller(why));
            }
        };
        tracing::warn!(
            store = incoming.store.map(tracing::field::display),
            old = told.store.map(tracing::field::display),
            generation = incoming.generation().0,
            "the state of another controller's store has replaced what was held"
        );
        *state = incoming;
        let (here, before): (Vec<_>, Vec<_>) = all.into_iter().partition(|r| r.kind == kind && is_in(response, &r.name));
        refused.extend(here);
        self.dirty = true;
        self.counts.store_replaced();
        Ok(Outcome { kind, refused, earlier: before.len() })
    }
}

fn is_in(response: &DeltaDiscoveryResponse, name: &str) -> bool {
    response.resources.iter().any(|r| r.name == name) || response.removed_resources.iter().any(|n| n == name)
}

/// Moves the state by a change; refused security resources close their tenants at once.
fn advance(state: &mut State, change: &Change, refused: &[RefusedResource], kinds: &[Kind], watches: bool) -> super::state::Undo {
    let undo = state.apply(change);
    if watches {
        refused.iter().for_each(|r| state.close_refused(r.kind, &r.name, &r.why));
        state.review(change.kind, &change.tenants, kinds);
    }
    undo
}

/// Moves the state and tells the caller. What the caller refuses is taken back, by name; if it refuses the whole, it is told
/// again in halves, down to single tenants.
fn tell_change(
    apply: &mut Apply,
    state: &mut State,
    change: Change,
    refused: &[RefusedResource],
    kinds: &[Kind],
    watches: bool,
) -> Vec<RefusedResource> {
    let undo = advance(state, &change, refused, kinds, watches);
    match ask(apply, &change.update, state) {
        Ok(list) if list.is_empty() => Vec::new(),
        Ok(list) => {
            list.iter().for_each(|r| state.restore(&undo, r.kind, &r.name));
            close_and_tell(apply, state, &list, watches);
            list
        }
        Err(why) => {
            state.undo(undo);
            if let Some([first, second]) = change.split() {
                // The closures of what was refused before go with the first part, and stay.
                let mut all = tell_change(apply, state, first, refused, kinds, watches);
                all.extend(tell_change(apply, state, second, &[], kinds, watches));
                return all;
            }
            let list: Vec<_> = change.names().map(|name| RefusedResource::by_caller(change.kind, name, &why)).collect();
            state.generation = state.generation.max(change.update.generation);
            let closures: Vec<_> = refused.iter().chain(&list).cloned().collect();
            close_and_tell(apply, state, &closures, watches);
            list
        }
    }
}

/// Closes the tenants of refused security resources and tells the caller, which may not serve them from now on.
fn close_and_tell(apply: &mut Apply, state: &mut State, refused: &[RefusedResource], watches: bool) {
    if watches {
        refused.iter().for_each(|r| state.close_refused(r.kind, &r.name, &r.why));
    }
    let nothing = Update { origin: Origin::Controller, generation: state.generation(), upserts: Vec::new(), removals: Vec::new() };
    if let Err(why) = ask(apply, &nothing, state) {
        tracing::error!(why, "the data plane refuses a state that it had accepted");
    }
}

/// Tells the caller a whole state, in place of `told`, which is empty the first time. What it refuses is taken out of the state. If it
/// refuses all, the tenants are told in halves, down to single ones, and those that are refused are left out; `Err`: none was accepted.
pub(super) fn tell_whole(
    apply: &mut Apply,
    told: &State,
    state: &mut State,
    origin: Origin,
    kinds: &[Kind],
    watches: bool,
) -> Result<Vec<RefusedResource>, String> {
    let all = Update { origin, removals: told.missing_in(state), ..whole(kinds, state) };
    let refused = match ask(apply, &all, state) {
        Ok(list) => list,
        Err(why) => tell_halves(apply, told, state, &all, why, watches)?,
    };
    if refused.is_empty() {
        return Ok(refused);
    }
    refused.iter().for_each(|r| state.remove(r.kind, &r.name));
    close_and_tell(apply, state, &refused, watches);
    Ok(refused)
}

/// Resources of one tenant, or of the provider.
type Part<'a> = Vec<&'a std::sync::Arc<Resource>>;

/// A state that is built up of what the caller accepts.
struct BuildUp<'a> {
    apply: &'a mut Apply,
    told: &'a State,
    /// The state that resources are taken from.
    from: &'a State,
    /// What an update says beside its resources.
    all: &'a Update,
    watches: bool,
    accepted: State,
    has_accepted: bool,
    refused: Vec<RefusedResource>,
}

impl BuildUp<'_> {
    /// Adds what the caller accepts of some parts, which it is told together, then in halves: a few tenants that it refuses among T cost some
    /// 2 log T tellings each.
    fn add(&mut self, parts: &[Part<'_>]) {
        let mut next = self.accepted.clone();
        parts.iter().flatten().for_each(|r| next.copy(self.from, r.kind(), &r.name()));
        // A data plane that replaces everything at a snapshot is told the whole of what is accepted so far.
        let upserts = Kind::ALL.iter().flat_map(|k| next.of(*k).cloned()).collect();
        // What was told before goes with the first part that is accepted.
        let removals = if self.has_accepted { Vec::new() } else { self.told.missing_in(&next) };
        match (ask(self.apply, &Update { upserts, removals, ..self.all.clone() }, &next), parts) {
            (Ok(list), _) => {
                // It is not told again, and its tenant not served without it from the next telling on.
                for r in &list {
                    next.remove(r.kind, &r.name);
                    if self.watches {
                        next.close_refused(r.kind, &r.name, &r.why);
                    }
                }
                (self.accepted, self.has_accepted) = (next, true);
                self.refused.extend(list);
            }
            (Err(why), [one]) => self.refused.extend(one.iter().map(|r| RefusedResource::by_caller(r.kind(), r.name(), &why))),
            (Err(_), _) => {
                let (first, second) = parts.split_at(parts.len() / 2);
                self.add(first);
                self.add(second);
            }
        }
    }
}

/// Builds the state up by tenants, the provider's resources first; gives those of the tenants that the caller refuses.
fn tell_halves(
    apply: &mut Apply,
    told: &State,
    state: &mut State,
    all: &Update,
    why: String,
    watches: bool,
) -> Result<Vec<RefusedResource>, String> {
    let mut by_tenant: BTreeMap<Option<TenantName>, Part<'_>> = BTreeMap::new();
    for resource in &all.upserts {
        by_tenant.entry(resource.tenant().cloned()).or_default().push(resource);
    }
    let parts: Vec<_> = by_tenant.into_values().collect();
    tracing::warn!(tenants = parts.len(), why, "a whole state is refused: it is told in halves, to find out by whose resources");
    let accepted = State { store: state.store, generation: state.generation(), closed: state.closed().clone(), ..State::default() };
    let mut build_up = BuildUp { apply, told, from: state, all, watches, accepted, has_accepted: false, refused: Vec::new() };
    // The whole is known to be refused.
    let (first, second) = parts.split_at(parts.len() / 2);
    [first, second].into_iter().filter(|half| !half.is_empty() && half.len() < parts.len()).for_each(|half| build_up.add(half));
    let BuildUp { accepted, has_accepted, refused, .. } = build_up;
    if !has_accepted {
        return Err(why);
    }
    *state = accepted;
    Ok(refused)
}

/// Asks the caller. A panic there is a refusal: a configuration that trips a bug must not take the data plane down.
pub(super) fn ask(apply: &mut Apply, update: &Update, state: &State) -> Result<Vec<RefusedResource>, String> {
    catch_unwind(AssertUnwindSafe(|| apply(update, state))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string).or_else(|| panic.downcast_ref::<String>().cloned());
        Err(format!("applying it panicked: {}", text.unwrap_or_default()))
    })
}
