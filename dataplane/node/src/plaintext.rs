//! How a pod's plaintext connections are taken now, and who listens for them. What is to be done about them is decided and done in
//! [`crate::guard`].

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use canal_kit::sys;
use canal_offload::OffloadError;
use canal_offload::inbound::{Family as Listener, PodInbound};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};

use crate::capture::Mode;

/// What takes a pod's plaintext connections.
#[derive(Debug)]
pub(crate) enum Guard {
    Bpf(Box<PodInbound>),
    Nft,
}

#[derive(Debug, Default)]
pub(crate) enum State {
    /// They reach the application directly, and cost nothing.
    #[default]
    Open,
    Guarded(Guard),
    /// They should be guarded, and could not.
    Failed(String),
}

/// A pod's plaintext connections as its [`Room`] knows them.
#[derive(Debug)]
pub struct Plaintext {
    state: Mutex<State>,
    /// Whether workers shall listen for them.
    wanted: watch::Sender<bool>,
    listeners: AtomicU64,
    opened: Notify,
}

impl Default for Plaintext {
    fn default() -> Self {
        Self { state: Mutex::default(), wanted: watch::Sender::new(false), listeners: AtomicU64::new(0), opened: Notify::new() }
    }
}

impl Plaintext {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_guarded(&self) -> bool {
        matches!(&*self.state(), State::Guarded(_))
    }

    /// Whether workers shall listen from now on.
    pub(crate) fn want(&self, wanted: bool) {
        self.wanted.send_if_modified(|before| std::mem::replace(before, wanted) != wanted);
    }

    /// Resolves once a worker listens.
    pub(crate) async fn listened(&self) {
        while self.listeners() == 0 {
            self.opened.notified().await;
        }
    }

    /// Whether workers shall listen.
    pub fn wanted(&self) -> watch::Receiver<bool> {
        self.wanted.subscribe()
    }

    /// A worker listens with `socket`.
    pub fn opened(&self, is_ipv4: bool, socket: &impl AsFd) -> Result<(), OffloadError> {
        let family = if is_ipv4 { Listener::V4 } else { Listener::V6 };
        let done = match &*self.state() {
            State::Guarded(Guard::Bpf(inbound)) => inbound.listen(family, socket),
            _ => Ok(()),
        };
        self.listeners.fetch_add(1, Relaxed);
        self.opened.notify_one();
        done
    }

    /// It does not any more.
    pub fn closed(&self) {
        self.listeners.fetch_sub(1, Relaxed);
    }

    /// Listeners open now, over all workers.
    pub fn listeners(&self) -> u64 {
        self.listeners.load(Relaxed)
    }

    /// Where a connection that was taken had been going. `None`: it was dialled by hand.
    pub fn destination(&self, accepted: &TcpStream) -> Option<SocketAddr> {
        let local = accepted.local_addr().ok()?;
        match &*self.state() {
            State::Guarded(Guard::Nft) => sys::original_destination(accepted).ok().filter(|origin| *origin != local),
            _ => Some(local),
        }
    }

    /// How they are taken now, as operators are told.
    pub fn describe(&self) -> String {
        match &*self.state() {
            State::Open => "open".into(),
            State::Guarded(Guard::Bpf(_)) => Mode::Bpf.name().into(),
            State::Guarded(Guard::Nft) => Mode::Nft.name().into(),
            State::Failed(why) => format!("NOT GUARDED: {why}"),
        }
    }
}
