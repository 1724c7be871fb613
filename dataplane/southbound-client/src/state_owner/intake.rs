//! Intake of one response: good resources are applied, and bad ones are refused by name. If the
//! data plane refuses the whole change, bisection finds the tenants that cause it. Start with
//! [`StateOwner::take`].

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use canal_model::ids::TenantName;
use canal_model::program::{Resource, ResourceKind};
use canal_wire::discovery::DeltaDiscoveryResponse;

use super::{StateOwner, full_update, lock};
use crate::state::{NackReason, ResourceState, ValidatedChange, examine};
use crate::{ApplyFn, RefusedResource, Update, UpdateSource};

/// Answer to a response that was refused, completely or in part.
#[derive(Debug)]
pub(crate) struct NackReply {
    pub(crate) text: String,
    /// Refused resources with the reason. All others were accepted. If empty, nothing was accepted.
    pub(crate) named: Vec<(String, String)>,
}

/// Extent of the update that the callback gets for a response.
enum ChangeScope {
    Nothing,
    Change,
    Whole,
}

/// Result of a response whose envelope is valid.
struct IntakeOutcome {
    kind: ResourceKind,
    refused: Vec<RefusedResource>,
    /// Number of refused resources from earlier responses, which the answer to this response cannot
    /// name.
    earlier: usize,
}

impl StateOwner {
    /// Applies the good part of a response. `Err` is the NACK.
    pub(crate) fn take(&mut self, response: &DeltaDiscoveryResponse) -> Result<(), NackReply> {
        let kind = canal_wire::southbound::kind_of(&response.type_url)
            .map_or("unknown", ResourceKind::label);
        match self.try_take(response) {
            Ok(IntakeOutcome {
                kind: of,
                refused,
                earlier,
            }) => {
                // Even with refused resources: the others are in force.
                self.accepted(of, refused.is_empty());
                // Only a new stream can tell the controller that an acknowledged resource was
                // refused later.
                self.resync |= earlier > 0;
                if refused.is_empty() {
                    return Ok(());
                }
                let named: Vec<_> = refused
                    .iter()
                    .map(|r| (r.name.clone(), r.why.clone()))
                    .collect();
                let text = named
                    .iter()
                    // The text stays short: eight examples show an operator what is wrong, and
                    // `named` lists all.
                    .take(8)
                    .map(|(_, why)| why.as_str())
                    .collect::<Vec<_>>()
                    .join("; ");
                refused
                    .iter()
                    .for_each(|r| self.counts.refused(kind, r.label));
                self.nacked(kind, refused[0].label, &text, response);
                Err(NackReply { text, named })
            }
            Err(refusal) => {
                let text = refusal.to_string();
                self.nacked(kind, refusal.reason(), &text, response);
                Err(NackReply {
                    text,
                    named: Vec::new(),
                })
            }
        }
    }

    fn nacked(
        &self,
        kind: &str,
        reason: &'static str,
        text: &str,
        response: &DeltaDiscoveryResponse,
    ) {
        self.counts.nack(kind, reason);
        tracing::warn!(
            kind,
            reason,
            generation = response.system_version_info,
            error = text,
            "subscriber: refused a response, or a part of it; the previous resources stay in use"
        );
        self.status.send_modify(|s| {
            s.nack.insert(kind.into(), text.into());
        });
    }

    fn try_take(&mut self, response: &DeltaDiscoveryResponse) -> Result<IntakeOutcome, NackReason> {
        // While another state is coming in, every response belongs to it.
        if let Some(incoming) = self.incoming.take() {
            return self.try_replace(incoming, response);
        }
        let mut state = lock(&self.state);
        let (change, mut refused) = examine(&state, &self.kinds, response)?;
        let kind = change.kind;
        let said_something =
            !(response.resources.is_empty() && response.removed_resources.is_empty());
        let tell = match (self.status.borrow().ready, self.is_answered_with(kind)) {
            // A response without names changes nothing. One without news still advances the
            // generation.
            (true, _) if !said_something => ChangeScope::Nothing,
            (true, _) => ChangeScope::Change,
            (false, true) => ChangeScope::Whole,
            // Until every kind was answered, the state is incomplete, for example services without
            // their routes. It must not be served.
            (false, false) => ChangeScope::Nothing,
        };
        let watches = self.kinds.contains(&ResourceKind::Manifest);
        let mut earlier = 0;
        match tell {
            ChangeScope::Nothing => {
                // Nothing is delivered that the caller could refuse, so nothing is ever undone.
                _ = advance(&mut state, &change, &refused, &self.kinds, watches)
            }
            ChangeScope::Change => refused.extend(deliver_change(
                &mut self.apply,
                &mut state,
                change,
                &refused,
                &self.kinds,
                watches,
            )),
            ChangeScope::Whole => {
                let undo = advance(&mut state, &change, &refused, &self.kinds, watches);
                // The caller has received nothing before this first whole state.
                let delivered = ResourceState::default();
                let all = match deliver_whole(
                    &mut self.apply,
                    &delivered,
                    &mut state,
                    UpdateSource::Controller,
                    &self.kinds,
                    watches,
                ) {
                    Ok(all) => all,
                    Err(why) => {
                        state.undo(undo);
                        return Err(NackReason::Caller(why));
                    }
                };
                let (in_response, of_earlier): (Vec<_>, Vec<_>) = all
                    .into_iter()
                    .partition(|r| r.kind == kind && is_in(response, &r.name));
                refused.extend(in_response);
                earlier = of_earlier.len();
            }
        }
        self.dirty |= said_something;
        Ok(IntakeOutcome {
            kind,
            refused,
            earlier,
        })
    }

    /// Applies a response to the incoming state, of another store or a new start. The old state
    /// stays in use until the new one is complete, and is then replaced at once: resources of two
    /// stores are never mixed.
    fn try_replace(
        &mut self,
        mut incoming: ResourceState,
        response: &DeltaDiscoveryResponse,
    ) -> Result<IntakeOutcome, NackReason> {
        let (change, mut refused) = match examine(&incoming, &self.kinds, response) {
            Ok(examined) => examined,
            Err(refusal) => {
                self.incoming = Some(incoming);
                return Err(refusal);
            }
        };
        let kind = change.kind;
        let watches = self.kinds.contains(&ResourceKind::Manifest);
        let undo = advance(&mut incoming, &change, &refused, &self.kinds, watches);
        // A subscriber without manifests cannot wait for them.
        let is_sealed = !watches || incoming.unsealed.is_empty();
        if !self.is_answered_with(kind) || !is_sealed {
            self.incoming = Some(incoming);
            return Ok(IntakeOutcome {
                kind,
                refused,
                earlier: 0,
            });
        }
        let mut state = lock(&self.state);
        // The callback got no state before the subscription was ready.
        let delivered = if self.status.borrow().ready {
            state.clone()
        } else {
            ResourceState::default()
        };
        let all = match deliver_whole(
            &mut self.apply,
            &delivered,
            &mut incoming,
            UpdateSource::Controller,
            &self.kinds,
            watches,
        ) {
            Ok(all) => all,
            Err(why) => {
                // A corrected response continues from the state before this one.
                incoming.undo(undo);
                self.incoming = Some(incoming);
                return Err(NackReason::Caller(why));
            }
        };
        let is_other_store = incoming.store != state.store;
        tracing::warn!(
            store = incoming.store.map(tracing::field::display),
            old = state.store.map(tracing::field::display),
            generation = incoming.generation().0,
            "subscriber: a complete new state has replaced the previous one"
        );
        *state = incoming;
        let (in_response, of_earlier): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|r| r.kind == kind && is_in(response, &r.name));
        refused.extend(in_response);
        self.dirty = true;
        if is_other_store {
            self.counts.store_replaced();
        }
        Ok(IntakeOutcome {
            kind,
            refused,
            earlier: of_earlier.len(),
        })
    }
}

fn is_in(response: &DeltaDiscoveryResponse, name: &str) -> bool {
    response.resources.iter().any(|r| r.name == name)
        || response.removed_resources.iter().any(|n| n == name)
}

/// Applies a change to the state. Refused security resources close their tenants at once.
fn advance(
    state: &mut ResourceState,
    change: &ValidatedChange,
    refused: &[RefusedResource],
    kinds: &[ResourceKind],
    watches: bool,
) -> crate::state::Rollback {
    let undo = state.apply(change);
    if watches {
        refused
            .iter()
            .for_each(|r| state.close_refused(r.kind, &r.name, &r.why));
        state.review(change.kind, &change.tenants, kinds);
    }
    undo
}

/// Applies a change and calls the callback. Resources that it refuses are restored by name. If it
/// refuses the whole change, the two halves are tried, down to single tenants.
fn deliver_change(
    apply: &mut ApplyFn,
    state: &mut ResourceState,
    change: ValidatedChange,
    refused: &[RefusedResource],
    kinds: &[ResourceKind],
    watches: bool,
) -> Vec<RefusedResource> {
    let undo = advance(state, &change, refused, kinds, watches);
    match call_apply(apply, &change.update, state) {
        Ok(list) if list.is_empty() => Vec::new(),
        Ok(list) => {
            list.iter()
                .for_each(|r| state.restore(&undo, r.kind, &r.name));
            close_and_deliver(apply, state, &list, watches);
            list
        }
        Err(why) => {
            state.undo(undo);
            if let Some([first, second]) = change.split() {
                // The closures of the earlier refusals go with the first half and stay.
                let mut all = deliver_change(apply, state, first, refused, kinds, watches);
                all.extend(deliver_change(apply, state, second, &[], kinds, watches));
                return all;
            }
            let list: Vec<_> = change
                .names()
                .map(|name| RefusedResource::by_caller(change.kind, name, &why))
                .collect();
            state.generation = state.generation.max(change.update.generation);
            let closures: Vec<_> = refused.iter().chain(&list).cloned().collect();
            close_and_deliver(apply, state, &closures, watches);
            list
        }
    }
}

/// Closes the tenants of refused security resources, and announces that to the callback, which must
/// not serve them from now on.
fn close_and_deliver(
    apply: &mut ApplyFn,
    state: &mut ResourceState,
    refused: &[RefusedResource],
    watches: bool,
) {
    if watches {
        refused
            .iter()
            .for_each(|r| state.close_refused(r.kind, &r.name, &r.why));
    }
    let nothing = Update {
        origin: UpdateSource::Controller,
        generation: state.generation(),
        upserts: Vec::new(),
        removals: Vec::new(),
    };
    if let Err(why) = call_apply(apply, &nothing, state) {
        tracing::error!(
            why,
            "subscriber: the data plane refuses a state that it had accepted, which is a bug"
        );
    }
}

/// Passes a whole state to the callback, in place of `delivered`, which is empty the first time.
/// Resources that it refuses are removed from the state. If it refuses everything, halves of the
/// tenants are tried, down to single tenants, and refused tenants are left out. `Err` means that no
/// tenant was accepted.
pub(crate) fn deliver_whole(
    apply: &mut ApplyFn,
    delivered: &ResourceState,
    state: &mut ResourceState,
    origin: UpdateSource,
    kinds: &[ResourceKind],
    watches: bool,
) -> Result<Vec<RefusedResource>, String> {
    let all = Update {
        origin,
        removals: delivered.missing_in(state),
        ..full_update(kinds, state)
    };
    let refused = match call_apply(apply, &all, state) {
        Ok(list) => list,
        Err(why) => deliver_halves(apply, delivered, state, &all, why, watches)?,
    };
    if refused.is_empty() {
        return Ok(refused);
    }
    refused.iter().for_each(|r| state.remove(r.kind, &r.name));
    close_and_deliver(apply, state, &refused, watches);
    Ok(refused)
}

/// Resources of one tenant, or of the provider.
type ResourcePart<'a> = Vec<&'a std::sync::Arc<Resource>>;

/// A state that is built from the parts that the callback accepts.
struct BuildUp<'a> {
    apply: &'a mut ApplyFn,
    delivered: &'a ResourceState,
    /// State from which resources are taken.
    from: &'a ResourceState,
    /// Update that gives the values other than resources.
    all: &'a Update,
    /// Whether the subscriber receives manifests.
    watches: bool,
    accepted: ResourceState,
    has_accepted: bool,
    refused: Vec<RefusedResource>,
}

impl BuildUp<'_> {
    /// Adds what the callback accepts of `parts`: it tries all of them, then halves. A refused
    /// tenant among T tenants costs about 2 log T calls.
    fn add(&mut self, parts: &[ResourcePart<'_>]) {
        let mut next = self.accepted.clone();
        parts
            .iter()
            .flatten()
            .for_each(|r| next.copy(self.from, r.kind(), &r.name()));
        // A data plane may replace everything at an update from a state file, so each call has all
        // resources accepted so far.
        let upserts = ResourceKind::ALL
            .iter()
            .flat_map(|k| next.of(*k).cloned())
            .collect();
        // The removals of the earlier state go with the first part that is accepted.
        let removals = if self.has_accepted {
            Vec::new()
        } else {
            self.delivered.missing_in(&next)
        };
        match (
            call_apply(
                self.apply,
                &Update {
                    upserts,
                    removals,
                    ..self.all.clone()
                },
                &next,
            ),
            parts,
        ) {
            (Ok(list), _) => {
                // A refused resource is not passed again. From the next call on, its tenant is
                // closed.
                for r in &list {
                    next.remove(r.kind, &r.name);
                    // Only a manifest opens a closed tenant, so without manifests none is closed.
                    if self.watches {
                        next.close_refused(r.kind, &r.name, &r.why);
                    }
                }
                (self.accepted, self.has_accepted) = (next, true);
                self.refused.extend(list);
            }
            (Err(why), [one]) => self.refused.extend(
                one.iter()
                    .map(|r| RefusedResource::by_caller(r.kind(), r.name(), &why)),
            ),
            // There are at least two parts here, so both halves have parts and the recursion ends.
            (Err(_), _) => {
                let (first, second) = parts.split_at(parts.len() / 2);
                self.add(first);
                self.add(second);
            }
        }
    }
}

/// Builds the state tenant by tenant, with the provider's resources first. Returns the resources of
/// the tenants that the callback refuses.
fn deliver_halves(
    apply: &mut ApplyFn,
    delivered: &ResourceState,
    state: &mut ResourceState,
    all: &Update,
    why: String,
    watches: bool,
) -> Result<Vec<RefusedResource>, String> {
    let mut by_tenant: BTreeMap<Option<TenantName>, ResourcePart<'_>> = BTreeMap::new();
    for resource in &all.upserts {
        by_tenant
            .entry(resource.tenant().cloned())
            .or_default()
            .push(resource);
    }
    let parts: Vec<_> = by_tenant.into_values().collect();
    tracing::warn!(
        tenants = parts.len(),
        why,
        "subscriber: the data plane refuses a complete state; applying it by bisection, to find the tenant whose resources cause it"
    );
    let accepted = ResourceState {
        store: state.store,
        generation: state.generation(),
        closed: state.closed().clone(),
        ..ResourceState::default()
    };
    let mut build_up = BuildUp {
        apply,
        delivered,
        from: state,
        all,
        watches,
        accepted,
        has_accepted: false,
        refused: Vec::new(),
    };
    // The whole is known to be refused, so it is not tried again.
    let (first, second) = parts.split_at(parts.len() / 2);
    [first, second]
        .into_iter()
        // A single part has no smaller half, and the whole was tried already.
        .filter(|half| !half.is_empty() && half.len() < parts.len())
        .for_each(|half| build_up.add(half));
    let BuildUp {
        accepted,
        has_accepted,
        refused,
        ..
    } = build_up;
    // No part of the new state can be served, so the one in force stays.
    if !has_accepted {
        return Err(why);
    }
    *state = accepted;
    Ok(refused)
}

/// Calls the callback. A panic there is a refusal, because a configuration that triggers a bug must
/// not stop the data plane.
pub(crate) fn call_apply(
    apply: &mut ApplyFn,
    update: &Update,
    state: &ResourceState,
) -> Result<Vec<RefusedResource>, String> {
    catch_unwind(AssertUnwindSafe(|| apply(update, state))).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| panic.downcast_ref::<String>().cloned());
        Err(format!(
            "applying it panicked: {}",
            text.unwrap_or_default()
        ))
    })
}
