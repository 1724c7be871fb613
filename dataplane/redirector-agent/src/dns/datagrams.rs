//! DNS over UDP: receives the questions of all tenants from one socket, and answers them in turns.
//! A flood of one tenant's questions delays and drops no other tenant's. Connections are not served
//! here: `server` does that. Start at [`DatagramService::run`].

use std::io::IoSliceMut;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use canal_model::ids::ServiceId;
use canal_wire::tier;
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use tokio::io::Interest;

use super::answer::DnsTransport;
use super::questions::{QuestionFate, QuestionQueue, WaitingQuestion};
use super::server::DnsState;

/// Datagrams that are received in one call.
const BATCH: usize = quinn_udp::BATCH_SIZE;
/// Calls that receive, between answers. A call takes far less time than an answer, so the kernel's
/// queue is empty in between even in a flood. Excess questions are then dropped here, by tenant,
/// and not in the kernel's queue. With a batch of 32 datagrams they are 512 questions. Nobody
/// measured which number is best.
const RECEIVES_MAX: usize = 16;
/// Answers between two calls that receive. As many as one call receives (`BATCH`).
const ANSWERS_MAX: usize = 32;
/// Buffer for one datagram in bytes; the kernel may have joined several in it. It is the longest
/// UDP datagram.
const DATAGRAM_MAX: usize = 65_535;
/// Maximum bytes of a question over UDP. One question with any usual option is far shorter. The
/// limit is that of a response (`UDP_MAX`).
const QUESTION_BYTES_MAX: usize = 1232;

/// The task that serves the UDP socket.
pub(super) struct DatagramService {
    inner: Arc<DnsState>,
    state: UdpSocketState,
    buffers: Vec<Vec<u8>>,
    waiting: QuestionQueue,
}

impl DatagramService {
    pub(super) fn new(inner: Arc<DnsState>, state: UdpSocketState) -> Self {
        Self {
            inner,
            state,
            buffers: vec![vec![0; DATAGRAM_MAX]; BATCH],
            waiting: QuestionQueue::default(),
        }
    }

    /// Serves until the socket fails.
    pub(super) async fn run(mut self) {
        loop {
            if self.waiting.is_empty()
                && let Err(error) = self.inner.socket.readable().await
            {
                tracing::error!(%error, "redirector: the DNS socket failed; DNS over UDP is not served any more");
                return;
            }
            self.receive();
            for _ in 0..ANSWERS_MAX {
                let Some(question) = self.waiting.pop() else {
                    break;
                };
                self.answer(&question);
            }
            // Other tasks run, and the reactor learns of new datagrams.
            tokio::task::yield_now().await;
        }
    }

    /// Queues what the kernel has received.
    fn receive(&mut self) {
        for _ in 0..RECEIVES_MAX {
            let mut metas = [RecvMeta::default(); BATCH];
            let mut slices: Vec<IoSliceMut<'_>> = self
                .buffers
                .iter_mut()
                .map(|buffer| IoSliceMut::new(buffer))
                .collect();
            let socket = &self.inner.socket;
            let received = socket.try_io(Interest::READABLE, || {
                self.state
                    .recv(UdpSockRef::from(socket), &mut slices, &mut metas)
            });
            drop(slices);
            let count = received.unwrap_or(0);
            for (buffer, meta) in self.buffers.iter().zip(&metas).take(count) {
                queue_questions(
                    &self.inner,
                    &mut self.waiting,
                    &buffer[..meta.len.min(buffer.len())],
                    meta,
                );
            }
            if count < BATCH {
                return;
            }
        }
    }

    fn answer(&self, question: &WaitingQuestion) {
        let reply = self
            .inner
            .reply(&question.bytes, question.to, DnsTransport::Udp);
        self.inner.count("udp", reply.result);
        if let Some(bytes) = reply.bytes {
            self.send(question.from, question.to, &bytes);
        }
    }

    /// Sends a response. A failure is only counted, because UDP is best effort.
    fn send(&self, to: SocketAddr, from: IpAddr, bytes: &[u8]) {
        let transmit = Transmit {
            destination: to,
            ecn: None,
            contents: bytes,
            segment_size: None,
            src_ip: Some(from),
        };
        let socket = &self.inner.socket;
        let sent = socket.try_io(Interest::WRITABLE, || {
            self.state.try_send(UdpSockRef::from(socket), &transmit)
        });
        if let Err(error) = sent {
            self.inner.count("udp", "not_sent");
            tracing::debug!(%error, %to, "redirector: could not send a DNS response; the client repeats its query");
        }
    }
}

/// Queues the questions of a received buffer. The kernel may have joined several datagrams of equal
/// size in it.
fn queue_questions(
    inner: &DnsState,
    waiting: &mut QuestionQueue,
    received: &[u8],
    meta: &RecvMeta,
) {
    let Some(to) = meta.dst_ip else {
        return inner.count("udp", "no_address");
    };
    let Some(tenant) = tier::service_of(to).filter(|_| inner.has_home(to)) else {
        return received
            .chunks(meta.stride.max(1))
            .for_each(|_| inner.count("udp", "no_tenant"));
    };
    for bytes in received.chunks(meta.stride.max(1)) {
        if bytes.len() > QUESTION_BYTES_MAX {
            inner.count("udp", "too_long");
            continue;
        }
        match waiting.push(
            tenant,
            WaitingQuestion {
                from: meta.addr,
                to,
                bytes: bytes.to_vec(),
            },
        ) {
            QuestionFate::Queued => {}
            QuestionFate::Refused => count_dropped(inner, tenant, "tenant_busy"),
            QuestionFate::Displaced(largest) => count_dropped(inner, largest, "displaced"),
        }
    }
}

/// Counts a dropped question of a tenant.
fn count_dropped(inner: &DnsState, tenant: ServiceId, result: &str) {
    inner.count("udp", result);
    inner.count_dropped(tenant, result);
}
