//! Places on HTTP/2 connections to endpoints: a request takes one, and opens the connection if it came first. A task drives each.

use std::pin::pin;
use std::rc::Rc;

use bytes::Bytes;
use canal_kit::hbone::WindowGrowth;
use futures::FutureExt;
use h2::client::SendRequest;

use super::{Introduction, connect};
use crate::endpoints::{Chosen, Multiplexed, Place};
use crate::fault::Fault;
use crate::io::Rewound;
use crate::limits;
use crate::scheduler::Scheduler;
use crate::worker::Worker;

/// A place on a connection to the endpoint, opened if all are full.
pub(crate) async fn place(
    worker: &Rc<Worker>,
    chosen: &Chosen,
    introduction: Introduction<'_>,
) -> Result<(Place, SendRequest<Bytes>), Fault> {
    let place = Place::take(chosen.state(), worker.shared.config.limits.http2_per_endpoint, worker.clock.now());
    if place.reused {
        worker.counts.reused.inc();
    } else {
        open(worker, chosen, place.connection(), introduction).await?;
    }
    let send = place.connection().handle().await?;
    // Waits for a stream if the peer allows no more now.
    match send.ready().await {
        Ok(send) => Ok((place, send)),
        Err(_) => {
            place.connection().close(None);
            Err(Fault::UpstreamRefused)
        }
    }
}

/// Connects and starts the driver. Runs in the request that came first; should that be dropped, those who wait fail with it and try again.
async fn open(worker: &Rc<Worker>, chosen: &Chosen, on: &Rc<Multiplexed>, introduction: Introduction<'_>) -> Result<(), Fault> {
    struct Abandoned<'a>(&'a Multiplexed, bool);
    impl Drop for Abandoned<'_> {
        fn drop(&mut self) {
            if self.1 {
                self.0.close(Some(Fault::UpstreamRefused));
            }
        }
    }
    let mut guard = Abandoned(on, true);
    let account = chosen.endpoint().workload.uid.split('/').next().and_then(|tenant| worker.account(tenant));
    let budget = account.as_ref().map(|account| worker.window_budget(&account.tenant));
    let outcome = async {
        let io = connect(worker, chosen, introduction).await?;
        let rewound = Rewound::new(Bytes::new(), io);
        let growth = WindowGrowth::begin(limits::WINDOWS_MAX, budget.as_ref(), rewound.read.clone());
        let failed = |e: h2::Error| Fault::Connect { why: format!("{}: HTTP/2: {e}", chosen.endpoint().address) };
        let opened = limits::http2_client(growth.sizes()).handshake::<_, Bytes>(rewound).await.map_err(failed)?;
        Ok::<_, Fault>((opened, growth))
    };
    let outcome = outcome.await;
    guard.1 = false;
    match outcome {
        Err(fault) => {
            on.close(Some(fault.clone()));
            Err(fault)
        }
        Ok(((send, mut connection), mut growth)) => {
            on.opened(send);
            // Weak: the connection lives as long as its endpoint and its requests, not the other way round.
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
