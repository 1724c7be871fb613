//! [`PlaintextState`]: how a pod's plaintext is captured now, and which listeners serve it.
//!
//! [`crate::plaintext_capture`] decides on changes and makes them.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use canal_net::sys;
use canal_offload::OffloadError;
use canal_offload::inbound::{ListenerFamily as Listener, PodInbound};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};

use crate::capture::CaptureMode;

/// Mechanism that redirects a pod's plaintext.
#[derive(Debug)]
pub(crate) enum PlaintextHook {
    Bpf(Box<PodInbound>),
    Nft,
}

#[derive(Debug, Default)]
pub(crate) enum HookState {
    /// Plaintext reaches the application directly and costs nothing.
    #[default]
    Open,
    Guarded(PlaintextHook),
    /// Capture is required, and failed for this reason.
    Failed(String),
}

/// State of a pod's plaintext capture, part of its [`PodContext`](crate::pod_context::PodContext).
#[derive(Debug)]
pub struct PlaintextState {
    state: Mutex<HookState>,
    /// True while workers must listen for plaintext.
    must_listen: watch::Sender<bool>,
    listeners: AtomicU64,
    listener_added: Notify,
}

impl Default for PlaintextState {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            must_listen: watch::Sender::new(false),
            listeners: AtomicU64::new(0),
            listener_added: Notify::new(),
        }
    }
}

impl PlaintextState {
    pub(crate) fn state(&self) -> MutexGuard<'_, HookState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_guarded(&self) -> bool {
        matches!(&*self.state(), HookState::Guarded(_))
    }

    /// Sets whether workers must listen from now on.
    pub(crate) fn set_must_listen(&self, wanted: bool) {
        self.must_listen
            .send_if_modified(|before| std::mem::replace(before, wanted) != wanted);
    }

    /// Resolves once a worker listens.
    pub(crate) async fn listened(&self) {
        while self.listeners() == 0 {
            self.listener_added.notified().await;
        }
    }

    /// Returns a receiver of whether workers must listen.
    pub fn must_listen(&self) -> watch::Receiver<bool> {
        self.must_listen.subscribe()
    }

    /// Adds a worker's listener, `socket`.
    ///
    /// # Errors
    /// The BPF program cannot redirect to the socket; the listener counts nevertheless.
    pub fn add_listener(&self, is_ipv4: bool, socket: &impl AsFd) -> Result<(), OffloadError> {
        let family = if is_ipv4 { Listener::V4 } else { Listener::V6 };
        let done = match &*self.state() {
            HookState::Guarded(PlaintextHook::Bpf(inbound)) => inbound.listen(family, socket),
            _ => Ok(()),
        };
        self.listeners.fetch_add(1, Relaxed);
        self.listener_added.notify_one();
        done
    }

    /// Counts that a worker closed its listener.
    pub fn closed(&self) {
        self.listeners.fetch_sub(1, Relaxed);
    }

    /// Returns the number of open listeners on all workers.
    pub fn listeners(&self) -> u64 {
        self.listeners.load(Relaxed)
    }

    /// Returns the original destination of a redirected connection; `None`: a client dialed the
    /// proxy's port directly.
    pub fn destination(&self, accepted: &TcpStream) -> Option<SocketAddr> {
        let local = accepted.local_addr().ok()?;
        match &*self.state() {
            HookState::Guarded(PlaintextHook::Nft) => sys::original_destination(accepted)
                .ok()
                .filter(|origin| *origin != local),
            _ => Some(local),
        }
    }

    /// Describes the present capture for operators.
    pub fn describe(&self) -> String {
        match &*self.state() {
            HookState::Open => "open".into(),
            HookState::Guarded(PlaintextHook::Bpf(_)) => CaptureMode::Bpf.name().into(),
            HookState::Guarded(PlaintextHook::Nft) => CaptureMode::Nft.name().into(),
            HookState::Failed(why) => format!("not captured: {why}"),
        }
    }
}
