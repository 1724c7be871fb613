//! Capture of plaintext into a pod: starts and stops its redirection to the proxy, and ends
//! connections from before it.
//!
//! Policies require it ([`PodPolicy::guards_plaintext`]). [`crate::routing`] decides on each
//! connection.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use canal_offload::sockets::{self, ConnectionFilter, SocketInfo};
use canal_offload::{OffloadError, nft};
use canal_runtime::metrics::{CounterFamily, MetricFamily, Registry, SharedCounter, SharedGauge};
use canal_wire::hbone::PROXY_MARKS;

use crate::authorization::PodPolicy;
use crate::capture::{CaptureBackend, CaptureMode};
use crate::plaintext_state::{HookState, PlaintextHook};
use crate::pod::LocalPod;
use crate::pod_context::PodContext;
use crate::routing::decide_plain;
use crate::telemetry;

/// Time to wait for listeners before capturing the plaintext of a pod that is already served.
/// Without listeners, connections would be refused for a moment; after the timeout they are. A
/// worker opens a listener in milliseconds, so the timeout means that a worker is stuck. The
/// policies that demand the capture must not wait for it.
const LISTENERS_TIMEOUT: Duration = Duration::from_millis(500);

/// Change to make to a pod's plaintext capture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaintextCaptureStep {
    Nothing,
    /// Redirect plaintext to the proxy from now on.
    Take,
    /// Let plaintext reach the application from now on.
    Leave,
}

/// Decides the step from what policies require and from the present state.
pub fn decide_step(wanted: bool, is_guarded: bool) -> PlaintextCaptureStep {
    match (wanted, is_guarded) {
        (true, false) => PlaintextCaptureStep::Take,
        (false, true) => PlaintextCaptureStep::Leave,
        _ => PlaintextCaptureStep::Nothing,
    }
}

/// Returns a predicate for probes: connections from a process of this node to a port that the pod
/// declares for probes. Other connections of such a process are authorized like any others.
pub fn is_probe(trusted: bool, ports: &BTreeSet<u16>) -> impl Fn(SocketAddr, SocketAddr) -> bool {
    move |peer, destination| {
        trusted && ports.contains(&destination.port()) && sockets::is_here(peer, destination)
    }
}

/// Returns the older connections that policies do not allow.
pub fn decide_older(
    policy: &PodPolicy,
    open: Vec<SocketInfo>,
    from_node: impl Fn(SocketAddr, SocketAddr) -> bool,
) -> Vec<SocketInfo> {
    open.into_iter()
        .filter(|c| decide_plain(policy, c.local, c.remote, &from_node).is_err())
        .collect()
}

/// Starts and stops plaintext capture of the node's pods, and counts.
#[derive(Debug)]
pub struct PlaintextCapture {
    guarded: SharedGauge,
    failures: SharedCounter,
    closed: CounterFamily,
    /// True if the node's own processes may reach pods' probe ports regardless of policy.
    trusts_node: bool,
}

impl PlaintextCapture {
    pub fn new(registry: &Registry, trusts_node: bool) -> Self {
        let gauge = MetricFamily::new(
            "canal_node_plaintext_captured_pods",
            "Pods whose plaintext connections are captured.",
            &[],
        );
        let failures = MetricFamily::new(
            "canal_node_plaintext_capture_failures_total",
            "Plaintext connections that could not be captured; this is retried.",
            &[],
        );
        Self {
            guarded: registry.gauges(gauge).shared(&[]),
            failures: registry.counters(failures).shared(&[]),
            closed: registry.counters(telemetry::closed_family()),
            trusts_node,
        }
    }

    /// Starts the capture for a new pod if its policies require it, before any worker listens.
    /// Until then the pod's plaintext connections are refused.
    pub fn begin(&self, capture: &CaptureBackend, context: &PodContext) {
        let pod = context.pod.load();
        if !context.policy.load().guards_plaintext() {
            return capture.forget_guard(&pod);
        }
        if self.prepare(capture, context, &pod) {
            self.attach(capture, context, &pod);
        }
    }

    /// Starts and stops the capture for served pods as their policies require now. The pods in
    /// `changed` have new policies, so their older connections are reauthorized as well.
    pub async fn follow(
        &self,
        capture: &CaptureBackend,
        contexts: &[&PodContext],
        changed: &[&PodContext],
    ) {
        let mut fresh = Vec::new();
        for context in contexts {
            let is_guarded = context.plaintext.is_guarded();
            match decide_step(context.policy.load().guards_plaintext(), is_guarded) {
                PlaintextCaptureStep::Take
                    if self.prepare(capture, context, &context.pod.load()) =>
                {
                    fresh.push(*context)
                }
                PlaintextCaptureStep::Leave => self.release(context),
                PlaintextCaptureStep::Take | PlaintextCaptureStep::Nothing => {}
            }
        }
        // Listeners open before the capture starts, so that no captured connection is reset.
        let listening = async {
            for context in &fresh {
                context.plaintext.listened().await;
            }
        };
        if !fresh.is_empty() {
            // After the timeout the pods are captured anyway.
            let _ = tokio::time::timeout(LISTENERS_TIMEOUT, listening).await;
        }
        // Attaching programs and reading the kernel's list of connections block, so other tasks of
        // this thread move on.
        tokio::task::block_in_place(|| {
            for context in &fresh {
                self.attach(capture, context, &context.pod.load());
            }
            for context in contexts
                .iter()
                .filter(|r| changed.iter().chain(&fresh).any(|c| std::ptr::eq(**r, *c)))
            {
                self.end_older(context);
            }
        });
        self.guarded
            .set(contexts.iter().filter(|r| r.plaintext.is_guarded()).count() as i64);
    }

    /// Prepares the capture and requests listeners. Returns whether it succeeded.
    fn prepare(&self, capture: &CaptureBackend, context: &PodContext, pod: &LocalPod) -> bool {
        let prepared = match (context.mode, capture.inbound()) {
            (CaptureMode::Bpf, Some(inbound)) => inbound
                .prepare(&pod.uid, &pod.netns)
                .map(|p| PlaintextHook::Bpf(Box::new(p))),
            _ => Ok(PlaintextHook::Nft),
        };
        let guard =
            prepared.or_else(|e| capture.fall_back(&pod.uid, e).map(|()| PlaintextHook::Nft));
        let done = self.settle(context, pod, guard);
        context.plaintext.set_must_listen(done);
        done
    }

    fn settle(
        &self,
        context: &PodContext,
        pod: &LocalPod,
        guard: Result<PlaintextHook, OffloadError>,
    ) -> bool {
        let mut state = context.plaintext.state();
        match guard {
            Ok(guard) => *state = HookState::Guarded(guard),
            Err(error) => {
                self.failures.inc();
                tracing::error!(pod = pod.uid, %error, "node: cannot capture plaintext into the pod although policies require it; retrying");
                *state = HookState::Failed(error.to_string());
            }
        }
        matches!(&*state, HookState::Guarded(_))
    }

    fn attach(&self, capture: &CaptureBackend, context: &PodContext, pod: &LocalPod) {
        let attached = match &mut *context.plaintext.state() {
            HookState::Guarded(PlaintextHook::Bpf(inbound)) => inbound.attach().map(|()| None),
            HookState::Guarded(PlaintextHook::Nft) => nft::take_inbound(&pod.netns).map(|()| None),
            HookState::Open | HookState::Failed(_) => return,
        };
        let guard = attached.or_else(|e| {
            capture
                .fall_back(&pod.uid, e)
                .and_then(|()| nft::take_inbound(&pod.netns))
                .map(|()| Some(PlaintextHook::Nft))
        });
        match guard {
            Ok(None) => tracing::info!(
                pod = pod.uid,
                how = context.plaintext.describe(),
                "node: captured plaintext into the pod"
            ),
            Ok(Some(nft)) => drop(self.settle(context, pod, Ok(nft))),
            Err(e) => drop(self.settle(context, pod, Err(e))),
        }
    }

    fn release(&self, context: &PodContext) {
        let pod = context.pod.load();
        let left = match std::mem::take(&mut *context.plaintext.state()) {
            HookState::Guarded(PlaintextHook::Bpf(inbound)) => inbound.release(),
            HookState::Guarded(PlaintextHook::Nft) => nft::leave_inbound(&pod.netns),
            HookState::Open | HookState::Failed(_) => Ok(()),
        };
        context.plaintext.set_must_listen(false);
        match left {
            Ok(()) => tracing::info!(
                pod = pod.uid,
                "node: released plaintext into the pod; the application receives it directly"
            ),
            Err(error) => {
                tracing::warn!(pod = pod.uid, %error, "node: cannot release plaintext into the pod; it stays refused")
            }
        }
    }

    /// Resets connections that a pod dialed before it was captured, since they would go on
    /// unencrypted.
    pub fn end_dialled(&self, pod: &LocalPod) {
        match sockets::dialled(&pod.netns, &pod.cgroup)
            .and_then(|open| sockets::reset(&pod.netns, &open))
        {
            Ok(0) => {}
            Ok(n) => {
                self.closed.shared(&["older_outbound"]).add(n);
                tracing::info!(
                    pod = pod.uid,
                    n,
                    "node: reset connections that the pod opened before its capture"
                );
            }
            Err(error) => {
                self.failures.inc();
                tracing::error!(pod = pod.uid, %error, "node: cannot reset connections that the pod opened before its capture; they may continue unencrypted");
            }
        }
    }

    /// Resets connections from before the capture that policies do not allow, since they go on
    /// without the proxy.
    fn end_older(&self, context: &PodContext) {
        let pod = context.pod.load();
        if !context.plaintext.is_guarded() {
            return;
        }
        // Under nftables the application's own outbound sockets have real remote addresses, so only
        // a listening port shows the direction.
        let which = if context.mode == CaptureMode::Bpf {
            ConnectionFilter::All
        } else {
            ConnectionFilter::Listening
        };
        let ended = sockets::inbound(&pod.netns, &pod.cgroup, &PROXY_MARKS, which)
            .map(|open| {
                decide_older(
                    &context.policy.load(),
                    open,
                    is_probe(self.trusts_node, &pod.probe_ports),
                )
            })
            .and_then(|over| sockets::reset(&pod.netns, &over));
        match ended {
            Ok(0) => {}
            Ok(n) => {
                self.closed.shared(&["older_plaintext"]).add(n);
                tracing::info!(
                    pod = pod.uid,
                    n,
                    "node: ended older plaintext connections that policies no longer admit"
                );
            }
            Err(error) => {
                self.failures.inc();
                tracing::error!(pod = pod.uid, %error, "node: cannot end older plaintext connections into the pod; they may continue");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plaintext_into_a_pod_is_captured_while_policies_need_it() {
        for (wanted, is_guarded, step) in [
            (true, false, PlaintextCaptureStep::Take),
            (true, true, PlaintextCaptureStep::Nothing),
            (false, true, PlaintextCaptureStep::Leave),
            (false, false, PlaintextCaptureStep::Nothing),
        ] {
            assert_eq!(
                decide_step(wanted, is_guarded),
                step,
                "wanted {wanted}, guarded {is_guarded}"
            );
        }
    }
}
