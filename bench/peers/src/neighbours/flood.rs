//! A tenant that sends requests at the maximum rate, for a path without a backend: the proxy
//! responds itself, so that neither the origin nor the load's core is the bottleneck. It measures
//! only the number of responses.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags};
use rustix::process::setpriority_process;
use rustix::thread::gettid;

use crate::generator::LoadConnection;

/// Number of connections, each with one request in progress.
/// Enough that the proxy never waits for the flood, which has one thread. Nobody measured fewer.
const CONNECTIONS: usize = 64;

/// The thread that floods until it is stopped.
pub(crate) struct FloodThread {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<u64>>,
}

impl FloodThread {
    pub(crate) fn start(address: SocketAddr, request: Vec<u8>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        Self {
            stop,
            thread: std::thread::spawn(move || run(address, &request, &stopped)),
        }
    }

    /// Ends the flood. Returns the number of responses.
    pub(crate) fn stop(self) -> anyhow::Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread
            .join()
            .unwrap_or_else(|_| Err(anyhow::anyhow!("the flood's thread panicked")))
    }
}

fn run(address: SocketAddr, request: &[u8], stop: &AtomicBool) -> anyhow::Result<u64> {
    // The measuring thread and the origin have priority on the core that they share.
    setpriority_process(Some(gettid()), 19)?;
    let poll = epoll::create(CreateFlags::CLOEXEC)?;
    let open = |number: usize| -> anyhow::Result<LoadConnection> {
        let mut connection = LoadConnection::open(address)?;
        connection.watch(&poll, number)?;
        connection.send(request, false)?;
        Ok(connection)
    };
    let mut connections = (0..CONNECTIONS)
        .map(open)
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut answers = 0;
    let mut events = Vec::with_capacity(CONNECTIONS);
    // A closed loop: each connection sends its next request when the last one was answered.
    while !stop.load(Ordering::Relaxed) {
        epoll::wait(&poll, spare_capacity(&mut events), None)?;
        for event in events.drain(..) {
            let Some(number) = usize::try_from(event.data.u64())
                .ok()
                .filter(|number| *number < CONNECTIONS)
            // The events carry the numbers given above, so this is never reached.
            else {
                continue;
            };
            let connection = &mut connections[number];
            // A refusal counts too, because it costs the proxy work.
            let received = connection.receive(|_, _, _| answers += 1);
            let sent = received.and_then(|()| {
                if connection.is_idle() {
                    connection.send(request, false)
                } else {
                    Ok(())
                }
            });
            // Some proxies close a connection after an error response; the flood then opens the
            // next one.
            if sent.is_err() {
                connections[number] = open(number)?;
            }
        }
    }
    Ok(answers)
}
