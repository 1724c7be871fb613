//! Streams on HTTP/2 connections to endpoints: a request takes a stream, and opens the connection
//! if it is the first. One task drives each connection.
//!
//! Start with [`acquire_stream`].

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;

use bytes::Bytes;
use canal_gateway_http::heads;
use canal_gateway_http::interim::InterimResponses;
use canal_gateway_http::proxy_error::ProxyError;
use canal_gateway_io::io::PrefixedIo;
use canal_gateway_io::scheduler::Scheduler;
use canal_gateway_limits::http2_settings;
use canal_hbone::WindowGrowth;
use futures::FutureExt;
use h2::RecvStream;
use h2::client::{ResponseFuture, SendRequest};
use http::Response;

use super::{TunnelMetadata, connect};
use crate::endpoints::{Http2Upstream, SelectedEndpoint, StreamPermit};
use crate::worker::Worker;

/// Waits for the final response. Interim responses are dropped, within the limits of a request: the
/// h2 crate queues those that nobody takes without a bound.
///
/// # Errors
/// The endpoint sent more interim responses than allowed, or ended the stream.
pub(crate) async fn final_response(
    response: &mut ResponseFuture,
) -> Result<Response<RecvStream>, ProxyError> {
    let mut interim = InterimResponses::default();
    poll_fn(|cx| {
        while let Poll::Ready(Some(Ok(head))) = response.poll_informational(cx) {
            interim.count(heads::byte_len(head.headers()), false)?;
        }
        let polled = Pin::new(&mut *response).poll(cx);
        polled.map_err(|_| ProxyError::UpstreamReset)
    })
    .await
}

/// Takes a stream on a connection to the endpoint. Opens a connection if all are full.
pub(crate) async fn acquire_stream(
    worker: &Rc<Worker>,
    chosen: &SelectedEndpoint,
    introduction: TunnelMetadata<'_>,
) -> Result<(StreamPermit, SendRequest<Bytes>), ProxyError> {
    let place = StreamPermit::take(
        chosen,
        worker.shared.config.limits.http2_per_endpoint,
        worker.clock.now(),
    );
    if place.reused {
        worker.counts.reused.inc();
        if place.connection().is_withheld() {
            worker.hbone.placed_without_credit();
        }
    } else {
        open(worker, chosen, place.connection(), introduction).await?;
    }
    let send = place.connection().handle().await?;
    // This waits for a stream if the peer allows no more at the moment.
    match send.ready().await {
        Ok(send) => Ok((place, send)),
        Err(_) => {
            place.connection().close(None);
            Err(ProxyError::UpstreamRefused)
        }
    }
}

/// Connects and starts the driver task. It runs in the request that came first. If that request is
/// dropped, the waiting requests fail and retry.
async fn open(
    worker: &Rc<Worker>,
    chosen: &SelectedEndpoint,
    on: &Rc<Http2Upstream>,
    introduction: TunnelMetadata<'_>,
) -> Result<(), ProxyError> {
    struct AbandonGuard<'a>(&'a Http2Upstream, bool);
    impl Drop for AbandonGuard<'_> {
        fn drop(&mut self) {
            if self.1 {
                // Nothing was sent, so this error lets the waiting requests retry.
                self.0.close(Some(ProxyError::UpstreamRefused));
            }
        }
    }
    let mut guard = AbandonGuard(on, true);
    // The UID of a workload begins with its tenant, which pays for the bytes of this connection.
    let account = chosen
        .endpoint()
        .workload
        .uid
        .split('/')
        .next()
        .and_then(|tenant| worker.account(tenant));
    let flow_account = worker.hbone.account(
        account
            .as_ref()
            .map(|account| worker.buffer_budget(&account.tenant)),
    );
    let outcome = async {
        let io = connect(worker, chosen, introduction).await?;
        // Nothing was read before. The wrapper counts the bytes by which the window grows.
        let counted = PrefixedIo::new(Bytes::new(), io);
        let growth = WindowGrowth::begin(
            http2_settings::STREAM_WINDOW_MAX,
            flow_account.clone(),
            counted.read.clone(),
        );
        let failed = |e: h2::Error| ProxyError::Connect {
            why: format!("{}: HTTP/2: {e}", chosen.address),
        };
        let opened = http2_settings::http2_client(growth.stream_window())
            .handshake::<_, Bytes>(counted)
            .await
            .map_err(failed)?;
        Ok::<_, ProxyError>((opened, growth))
    };
    let outcome = outcome.await;
    // From here on, the result closes or opens the connection.
    guard.1 = false;
    match outcome {
        Err(fault) => {
            on.close(Some(fault.clone()));
            Err(fault)
        }
        Ok(((send, mut connection), mut growth)) => {
            on.set_open(send, flow_account);
            // The reference is weak, so that the driver does not extend the connection's life
            // beyond its endpoint and its requests.
            let (on, counts) = (Rc::downgrade(on), worker.counts.clone());
            let queue = account.map(|account| account.queue.clone());
            tokio::task::spawn_local(async move {
                let driven = std::future::poll_fn(|cx| {
                    growth.apply_to_client(&mut connection);
                    connection.poll_unpin(cx)
                });
                if let Err(e) = Scheduler::run_for(queue, pin!(driven)).await {
                    counts.http2_error("upstream", &e);
                }
                if let Some(on) = on.upgrade() {
                    on.close(None);
                }
            });
            Ok(())
        }
    }
}
