//! A gateway's place, held by the kit's HBONE server: it shows what the node sent and answers as the test says.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use canal_kit::copy::Leg;
use canal_kit::drain::{self, Drain, Trigger};
use canal_kit::hbone::{Asked, HboneCounters, Incoming, ServerConfig, serve};
use canal_kit::metrics::Registry;
use canal_kit::sys::{self, ListenOptions, Netns};
use canal_kit::tls::{Credential, ServerIdentity};
use canal_model::identity::Identity;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::LocalSet;

/// What it does with a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    /// Sends the authority and ends.
    Tell,
    /// Sends back what comes, and ends when that ends.
    Echo,
    /// Answers 200, waits for a byte, resets.
    Reset,
    /// Answers 200, tells when the peer resets.
    Watch,
    /// Answers with this status.
    Refuse(u16),
    /// Accepts TCP and says nothing.
    Mute,
    /// Answers 200 and never reads.
    Stall,
}

/// What it saw.
#[derive(Debug)]
pub enum Saw {
    Connect { authority: String, headers: http::HeaderMap, peer: Identity, source: String },
    Ended(String),
}

/// Stops when dropped.
pub struct Gateway {
    pub saw: Receiver<Saw>,
    pub connections: Arc<AtomicUsize>,
    trigger: Option<Trigger>,
    /// Of the connections since the last [`Gateway::part`], and those of earlier ones, which must not be lost while these live.
    newest: Arc<Mutex<(Trigger, Drain)>>,
    parted: Mutex<Vec<Trigger>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Gateway {
    /// Listens at `address`:15008 in `netns` as whom `credential` says.
    pub fn listen(netns: Netns, address: &str, does: Does, credential: Credential) -> Self {
        let server = ServerIdentity::new("alpha".parse().unwrap(), credential);
        let address = format!("{address}:15008").parse().unwrap();
        let (tell, saw) = channel();
        let (up, is_up) = channel();
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = connections.clone();
        let (trigger, drain) = drain::tree();
        let newest = Arc::new(Mutex::new(drain::tree()));
        let current = newest.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            LocalSet::new().block_on(&runtime, async move {
                let listener = sys::listen(Some(&netns), address, &ListenOptions::default()).unwrap();
                up.send(()).unwrap();
                loop {
                    let (tcp, source) = tokio::select! {
                        () = drain.draining() => break,
                        accepted = listener.accept() => accepted.unwrap(),
                    };
                    counted.fetch_add(1, Ordering::Relaxed);
                    let (server, tell, drain) = (server.clone(), tell.clone(), current.lock().unwrap().1.clone());
                    tokio::task::spawn_local(connection(server, tcp, source.to_string(), tell, drain, does));
                }
                // The address may be another's from here on.
                drop(listener);
                drain.forced().await;
            });
        });
        is_up.recv_timeout(Duration::from_secs(5)).unwrap();
        Self { saw, connections, trigger: Some(trigger), newest, parted: Mutex::default(), thread: Some(thread) }
    }

    pub fn next(&self) -> Saw {
        self.saw.recv_timeout(Duration::from_secs(10)).expect("the gateway saw nothing")
    }

    /// The next CONNECT's authority.
    pub fn authority(&self) -> String {
        let Saw::Connect { authority, .. } = self.next() else { panic!("no CONNECT") };
        authority
    }

    /// How the tunnel ended.
    pub fn ended(&self) -> String {
        let Saw::Ended(how) = self.next() else { panic!("a CONNECT") };
        how
    }

    /// GOAWAY to all, and no new connections; open tunnels may finish.
    pub fn drain(&self) {
        self.trigger.as_ref().unwrap().drain(Duration::from_secs(60));
        self.part();
    }

    /// GOAWAY to all that are connected; new connections are welcome.
    pub fn part(&self) {
        let (trigger, _) = std::mem::replace(&mut *self.newest.lock().unwrap(), drain::tree());
        trigger.drain(Duration::from_secs(60));
        self.parted.lock().unwrap().push(trigger);
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        drop(self.trigger.take());
        self.newest.lock().unwrap().0.force();
        self.parted.lock().unwrap().clear();
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}

async fn connection(server: ServerIdentity, tcp: tokio::net::TcpStream, source: String, tell: Sender<Saw>, drain: Drain, does: Does) {
    if does == Does::Mute {
        drain.forced().await;
        return drop(tcp);
    }
    let Ok((tls, peer)) = server.accept(tcp).await else { return };
    let registry = Registry::new();
    let counters = HboneCounters::new(&registry, &registry.shard());
    let who = peer.identity.clone();
    let on_request = move |asked: Asked| {
        let Ok(incoming) = asked else { return };
        let (authority, headers) = (incoming.authority.to_string(), incoming.headers.clone());
        let _ = tell.send(Saw::Connect { authority: authority.clone(), headers, peer: who.clone(), source: source.clone() });
        tokio::task::spawn_local(tunnel(incoming, authority, tell.clone(), does));
    };
    let _ = serve(tls, peer, &ServerConfig::default(), &counters, drain, on_request).await;
}

async fn tunnel(incoming: Incoming, authority: String, tell: Sender<Saw>, does: Does) {
    if let Does::Refuse(status) = does {
        return incoming.refuse(status);
    }
    let mut headers = http::HeaderMap::new();
    headers.insert("baggage", "k8s.namespace.name=canal-system".parse().unwrap());
    let mut s = incoming.accept(headers).unwrap();
    let how = match does {
        Does::Tell => {
            s.write_all(authority.as_bytes()).await.unwrap();
            s.shutdown().await.unwrap();
            drain_rest(&mut s).await
        }
        Does::Echo => {
            let (near, mut far) = tokio::net::UnixStream::pair().unwrap();
            tokio::task::spawn_local(async move {
                let (mut r, mut w) = far.split();
                let _ = tokio::io::copy(&mut r, &mut w).await;
                let _ = w.shutdown().await;
            });
            format!("{:?}", copy_unix(&mut s, near).await)
        }
        Does::Reset => {
            let _ = s.read_u8().await;
            s.abort();
            "reset".into()
        }
        Does::Watch => {
            let how = drain_rest(&mut s).await;
            let _ = s.shutdown().await;
            how
        }
        Does::Stall => {
            tokio::time::sleep(Duration::from_secs(3600)).await;
            String::new()
        }
        Does::Refuse(_) | Does::Mute => unreachable!("answered above"),
    };
    let _ = tell.send(Saw::Ended(how));
}

async fn drain_rest(s: &mut canal_kit::hbone::HboneStream) -> String {
    let mut n = 0usize;
    let mut block = vec![0; 64 << 10];
    loop {
        match s.read(&mut block).await {
            Ok(0) => return format!("end after {n}"),
            Ok(k) => n += k,
            Err(e) => return format!("{:?} after {n}", e.kind()),
        }
    }
}

/// Byte for byte and half-close for half-close, by hand: the kit's copy is what is under test.
async fn copy_unix(s: &mut canal_kit::hbone::HboneStream, near: tokio::net::UnixStream) -> std::io::Result<u64> {
    let (mut from, mut to) = near.into_split();
    let (mut r, mut w) = tokio::io::split(s);
    let up = async {
        let n = tokio::io::copy(&mut r, &mut to).await;
        let _ = to.shutdown().await;
        n
    };
    let down = async {
        tokio::io::copy(&mut from, &mut w).await?;
        w.shutdown().await
    };
    let (n, d) = tokio::join!(up, down);
    d.and(n)
}
