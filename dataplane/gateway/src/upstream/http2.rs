//! Places on HTTP/2 connections to endpoints: a request takes one, and opens the connection if it came first. A task drives each.

use std::rc::Rc;

use bytes::Bytes;
use h2::client::SendRequest;

use super::{Introduction, connect};
use crate::endpoints::{Chosen, Multiplexed, Place};
use crate::fault::Fault;
use crate::io::Rewound;
use crate::limits;
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
    let outcome = async {
        let io = connect(worker, chosen, introduction).await?;
        let rewound = Rewound { first: Bytes::new(), io };
        let failed = |e: h2::Error| Fault::Connect { why: format!("{}: HTTP/2: {e}", chosen.endpoint().address) };
        limits::http2_client().handshake::<_, Bytes>(rewound).await.map_err(failed)
    };
    let outcome = outcome.await;
    guard.1 = false;
    match outcome {
        Err(fault) => {
            on.close(Some(fault.clone()));
            Err(fault)
        }
        Ok((send, connection)) => {
            on.opened(send);
            // Weak: the connection lives as long as its endpoint and its requests, not the other way round.
            let (on, counts) = (Rc::downgrade(on), worker.counts.clone());
            tokio::task::spawn_local(async move {
                if let Err(e) = connection.await {
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
