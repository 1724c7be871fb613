//! Plaintext connections into a pod: whether they are taken to the proxy, how, and what becomes of those that were made before. When they
//! must be is for policies to say ([`PodPolicy::guards_plaintext`]); who may come in is decided in [`crate::decide`].

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use canal_kit::metrics::{Counters, Family, Registry, SharedCounter, SharedGauge};
use canal_offload::sockets::{self, Connection, Which};
use canal_offload::{OffloadError, nft};
use canal_wire::hbone::PROXY_MARK;

use crate::authorization::PodPolicy;
use crate::capture::{Capture, Mode};
use crate::decide::decide_plain;
use crate::plaintext::{Guard, State};
use crate::pod::Pod;
use crate::room::Room;
use crate::telemetry;

/// Listeners are waited for so long before a pod that is already served is guarded: without them, connections would be refused for a
/// moment. After it they are.
const LISTENERS_PATIENCE: Duration = Duration::from_millis(500);

/// What has to be done with a pod's plaintext connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Nothing,
    /// Take them from now on.
    Take,
    /// Let them through from now on.
    Leave,
}

/// Decides by what policies want and what is.
pub fn decide_step(wanted: bool, is_guarded: bool) -> Step {
    match (wanted, is_guarded) {
        (true, false) => Step::Take,
        (false, true) => Step::Leave,
        _ => Step::Nothing,
    }
}

/// Whether a connection is a probe: to a port that the pod declares for them, by a process of this node's own. Any other connection of such a
/// process is judged like anybody's.
pub fn is_probe(trusted: bool, ports: &BTreeSet<u16>) -> impl Fn(SocketAddr, SocketAddr) -> bool {
    move |peer, destination| trusted && ports.contains(&destination.port()) && sockets::is_here(peer, destination)
}

/// Older connections that may not stay.
pub fn decide_older(policy: &PodPolicy, open: Vec<Connection>, from_node: impl Fn(SocketAddr, SocketAddr) -> bool) -> Vec<Connection> {
    open.into_iter().filter(|c| decide_plain(policy, c.local, c.remote, &from_node).is_err()).collect()
}

/// Takes and leaves pods' plaintext connections; counts.
#[derive(Debug)]
pub struct Guards {
    guarded: SharedGauge,
    failures: SharedCounter,
    closed: Counters,
    /// Whether the node's own processes reach pods' probe ports whatever policies say.
    trusts_node: bool,
}

impl Guards {
    pub fn new(registry: &Registry, trusts_node: bool) -> Self {
        let gauge = Family::new("canal_node_guarded_pods", "Pods whose plaintext connections are taken to the proxy.", &[]);
        let failures = Family::new("canal_node_guard_failures_total", "Plaintext connections that could not be taken; tried again.", &[]);
        Self {
            guarded: registry.gauges(gauge).shared(&[]),
            failures: registry.counters(failures).shared(&[]),
            closed: registry.counters(telemetry::closed_family()),
            trusts_node,
        }
    }

    /// Does for a new pod what its policies want, before anybody listens: until then its plaintext connections are refused.
    pub fn begin(&self, capture: &Capture, room: &Room) {
        let pod = room.pod.load();
        if !room.policy.load().guards_plaintext() {
            return capture.forget_guard(&pod);
        }
        if self.prepare(capture, room, &pod) {
            self.attach(capture, room, &pod);
        }
    }

    /// Does for pods that are served what their policies want now. `changed`: those with other policies than before, whose older
    /// connections are looked at as well.
    pub async fn follow(&self, capture: &Capture, rooms: &[&Room], changed: &[&Room]) {
        let mut fresh = Vec::new();
        for room in rooms {
            let is_guarded = room.plaintext.is_guarded();
            match decide_step(room.policy.load().guards_plaintext(), is_guarded) {
                Step::Take if self.prepare(capture, room, &room.pod.load()) => fresh.push(*room),
                Step::Leave => self.leave(room),
                Step::Take | Step::Nothing => {}
            }
        }
        let listening = async {
            for room in &fresh {
                room.plaintext.listened().await;
            }
        };
        if !fresh.is_empty() {
            // Whether in time or not: guarded they must be.
            let _ = tokio::time::timeout(LISTENERS_PATIENCE, listening).await;
        }
        tokio::task::block_in_place(|| {
            for room in &fresh {
                self.attach(capture, room, &room.pod.load());
            }
            for room in rooms.iter().filter(|r| changed.iter().chain(&fresh).any(|c| std::ptr::eq(**r, *c))) {
                self.end_older(room);
            }
        });
        self.guarded.set(rooms.iter().filter(|r| r.plaintext.is_guarded()).count() as i64);
    }

    /// Whether it worked.
    fn prepare(&self, capture: &Capture, room: &Room, pod: &Pod) -> bool {
        let prepared = match (room.mode, capture.inbound()) {
            (Mode::Bpf, Some(inbound)) => inbound.prepare(&pod.uid, &pod.netns).map(|p| Guard::Bpf(Box::new(p))),
            _ => Ok(Guard::Nft),
        };
        let guard = prepared.or_else(|e| capture.fall_back(&pod.uid, e).map(|()| Guard::Nft));
        let done = self.settle(room, pod, guard);
        room.plaintext.want(done);
        done
    }

    fn settle(&self, room: &Room, pod: &Pod, guard: Result<Guard, OffloadError>) -> bool {
        let mut state = room.plaintext.state();
        match guard {
            Ok(guard) => *state = State::Guarded(guard),
            Err(error) => {
                self.failures.inc();
                tracing::error!(pod = pod.uid, %error, "PLAINTEXT INTO THE POD IS NOT GUARDED though policies want it; trying again");
                *state = State::Failed(error.to_string());
            }
        }
        matches!(&*state, State::Guarded(_))
    }

    fn attach(&self, capture: &Capture, room: &Room, pod: &Pod) {
        let attached = match &mut *room.plaintext.state() {
            State::Guarded(Guard::Bpf(inbound)) => inbound.attach().map(|()| None),
            State::Guarded(Guard::Nft) => nft::take_inbound(&pod.netns).map(|()| None),
            State::Open | State::Failed(_) => return,
        };
        let guard =
            attached.or_else(|e| capture.fall_back(&pod.uid, e).and_then(|()| nft::take_inbound(&pod.netns)).map(|()| Some(Guard::Nft)));
        match guard {
            Ok(None) => tracing::info!(pod = pod.uid, how = room.plaintext.describe(), "plaintext into the pod is taken"),
            Ok(Some(nft)) => drop(self.settle(room, pod, Ok(nft))),
            Err(e) => drop(self.settle(room, pod, Err(e))),
        }
    }

    fn leave(&self, room: &Room) {
        let pod = room.pod.load();
        let left = match std::mem::take(&mut *room.plaintext.state()) {
            State::Guarded(Guard::Bpf(inbound)) => inbound.release(),
            State::Guarded(Guard::Nft) => nft::leave_inbound(&pod.netns),
            State::Open | State::Failed(_) => Ok(()),
        };
        room.plaintext.want(false);
        match left {
            Ok(()) => tracing::info!(pod = pod.uid, "plaintext into the pod goes to the application again"),
            Err(error) => tracing::warn!(pod = pod.uid, %error, "plaintext into the pod stays refused"),
        }
    }

    /// Connections that a pod dialled before it was captured would go on in the clear: they are reset.
    pub fn end_dialled(&self, pod: &Pod) {
        match sockets::dialled(&pod.netns, &pod.cgroup).and_then(|open| sockets::reset(&pod.netns, &open)) {
            Ok(0) => {}
            Ok(n) => {
                self.closed.shared(&["older_outbound"]).add(n);
                tracing::info!(pod = pod.uid, n, "connections that the pod dialled before it was captured were reset");
            }
            Err(error) => {
                self.failures.inc();
                tracing::error!(pod = pod.uid, %error, "connections that the pod dialled before it was captured may go on in the clear");
            }
        }
    }

    /// Connections from before the guard go on without the proxy: those that may not stay are reset.
    fn end_older(&self, room: &Room) {
        let pod = room.pod.load();
        if !room.plaintext.is_guarded() {
            return;
        }
        // nftables leaves the application's own sockets their far addresses, so that only a listener tells directions apart.
        let which = if room.mode == Mode::Bpf { Which::All } else { Which::Listening };
        let ended = sockets::inbound(&pod.netns, &pod.cgroup, PROXY_MARK, which)
            .map(|open| decide_older(&room.policy.load(), open, is_probe(self.trusts_node, &pod.probe_ports)))
            .and_then(|over| sockets::reset(&pod.netns, &over));
        match ended {
            Ok(0) => {}
            Ok(n) => {
                self.closed.shared(&["older_plaintext"]).add(n);
                tracing::info!(pod = pod.uid, n, "older plaintext connections ended: policies do not let them in any more");
            }
            Err(error) => {
                self.failures.inc();
                tracing::error!(pod = pod.uid, %error, "older plaintext connections into the pod may go on");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_guarded_while_policies_want_it() {
        for (wanted, is_guarded, step) in
            [(true, false, Step::Take), (true, true, Step::Nothing), (false, true, Step::Leave), (false, false, Step::Nothing)]
        {
            assert_eq!(decide_step(wanted, is_guarded), step, "wanted {wanted}, guarded {is_guarded}");
        }
    }
}
