//! One observation: lines as fast as the reader and the rate limit allow, or one complete answer.
//! It sends no more than its credit.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use canal_model::ids::TenantName;
use canal_runtime::metrics::SharedCounter;
use canal_runtime::{ShareHolder, TenantPermit};
use canal_wire::observe::{ObserveAnswer, ObserveBegin, ObserveEnd, Subject};
use canal_wire::{OBSERVE_ANSWER_COST, OBSERVE_DATA_BYTES_MAX, OBSERVE_TIME_MAX};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

use super::{Lines, ObservationContext, TapFilter, subject_name, whole};
use crate::access_log::count_lines;

/// Bytes of lines per second that one observation carries, with a burst of the same size. More
/// lines wait in its queue and are dropped when the queue is full. More than a person can read; it
/// bounds what a tap of a busy gateway costs the controller. Nobody measured the value.
pub const LINE_BYTES_PER_SECOND: usize = 256 << 10;

/// Output of an observation: the credit and the channel to the connection.
pub(super) struct Outgoing {
    pub(super) id: u64,
    pub(super) credit: Arc<Semaphore>,
    pub(super) answers: mpsc::Sender<ObserveAnswer>,
}

/// Reasons why an observation ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum ObservationError {
    /// The reader or the connection is gone.
    #[error("the reader has disconnected")]
    Gone,
    #[error("{why}")]
    Refused { reason: &'static str, why: String },
}

impl ObservationError {
    pub(super) fn refused(reason: &'static str, why: impl Into<String>) -> Self {
        Self::Refused {
            reason,
            why: why.into(),
        }
    }
}

impl Outgoing {
    /// Waits for credit and sends the data, which is at most [`OBSERVE_DATA_BYTES_MAX`] long.
    pub(super) async fn send(&self, data: Vec<u8>, dropped: u64) -> Result<(), ObservationError> {
        self.answer(ObserveAnswer {
            id: self.id,
            data,
            dropped,
            ..ObserveAnswer::default()
        })
        .await
    }

    async fn answer(&self, answer: ObserveAnswer) -> Result<(), ObservationError> {
        let cost =
            u32::try_from(answer.data.len() as u64 + OBSERVE_ANSWER_COST).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        let permit = self
            .credit
            .acquire_many(cost)
            .await
            .map_err(|_| ObservationError::Gone)?;
        // Spent credit comes back from the controller, not when the permit is dropped.
        permit.forget();
        self.answers
            .send(answer)
            .await
            .map_err(|_| ObservationError::Gone)
    }

    async fn end(&self, end: ObserveEnd) {
        // If the reader is gone, the end is not needed.
        let _ = self
            .answer(ObserveAnswer {
                id: self.id,
                end: Some(end),
                ..ObserveAnswer::default()
            })
            .await;
    }
}

/// Runs one observation to its end.
pub(super) async fn run(observer: Arc<ObservationContext>, begin: ObserveBegin, out: Outgoing) {
    let subject = begin.subject();
    observer.begun.shared(&[subject_name(subject)]).inc();
    let end = match serve(&observer, subject, begin, &out).await {
        Ok(()) => ObserveEnd::default(),
        Err(ObservationError::Gone) => return,
        Err(ObservationError::Refused { reason, why }) => {
            observer
                .refused
                .shared(&[subject_name(subject), reason])
                .inc();
            ObserveEnd {
                reason: reason.into(),
                why,
            }
        }
    };
    out.end(end).await;
}

async fn serve(
    observer: &Arc<ObservationContext>,
    subject: Subject,
    begin: ObserveBegin,
    out: &Outgoing,
) -> Result<(), ObservationError> {
    let some = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    let tenant = some(&begin.tenant)
        .map(|name| TenantName::new(&name))
        .transpose();
    let tenant = tenant.map_err(|error| ObservationError::refused("form", error.to_string()))?;
    // The permit comes first, so that a refused observation costs nothing.
    let permit = permit(observer, tenant.as_ref())?;
    let work = async {
        match subject {
            Subject::Tap => {
                let filter = TapFilter {
                    tenant: some(&begin.tenant),
                    service: some(&begin.service),
                    path: some(&begin.path),
                    status: some(&begin.status),
                };
                let tap = observer
                    .sources
                    .tap
                    .as_ref()
                    .ok_or_else(|| unserved(subject))?;
                let lines = tap(filter).ok_or_else(|| {
                    ObservationError::refused(
                        "busy",
                        "the maximum number of taps is open; fix: end some of them",
                    )
                })?;
                follow_lines(observer, subject, lines, out).await
            }
            Subject::Logs => {
                let logs = observer
                    .sources
                    .logs
                    .as_ref()
                    .ok_or_else(|| unserved(subject))?;
                let tail = usize::try_from(begin.tail).unwrap_or(usize::MAX);
                let (recent, lines) = logs.read(tenant.as_ref(), tail, begin.follow);
                send_recent(recent, out).await?;
                match lines {
                    Some(lines) => follow_lines(observer, subject, lines, out).await,
                    None => Ok(()),
                }
            }
            Subject::ConfigDump | Subject::Metrics => {
                whole::send(observer, subject, tenant, out).await
            }
            Subject::Unspecified => Err(unserved(subject)),
        }
    };
    // In a full limit, a new observation of a smaller holder may revoke this one's permit.
    tokio::select! {
        done = work => done,
        () = permit.revoked() => Err(ObservationError::refused("revoked", "the observation was ended in favour of another one; fix: end some of them")),
    }
}

fn permit(
    observer: &ObservationContext,
    tenant: Option<&TenantName>,
) -> Result<TenantPermit, ObservationError> {
    let holder = tenant.map_or(ShareHolder::Provider, |tenant| {
        ShareHolder::Tenant(tenant.clone())
    });
    let taken = observer.limit.take_revocable(&holder, 1);
    taken.map_err(|refusal| {
        let why = format!(
            "{holder} has the maximum number of observations on this data plane ({}); fix: end some of them",
            refusal.reason()
        );
        ObservationError::refused("busy", why)
    })
}

fn unserved(subject: Subject) -> ObservationError {
    ObservationError::refused(
        "unserved",
        format!("this data plane has no {}", subject_name(subject)),
    )
}

/// Sends the retained lines, oldest first.
async fn send_recent(recent: Vec<Bytes>, out: &Outgoing) -> Result<(), ObservationError> {
    let mut batch = Vec::new();
    for lines in recent {
        if batch.len() + lines.len() > OBSERVE_DATA_BYTES_MAX && !batch.is_empty() {
            out.send(std::mem::take(&mut batch), 0).await?;
        }
        batch.extend_from_slice(&lines);
    }
    if batch.is_empty() {
        Ok(())
    } else {
        out.send(batch, 0).await
    }
}

/// Sends lines as they arrive, batched, at no more than [`LINE_BYTES_PER_SECOND`].
async fn follow_lines(
    observer: &ObservationContext,
    subject: Subject,
    mut lines: Lines,
    out: &Outgoing,
) -> Result<(), ObservationError> {
    let counter = observer.dropped.shared(&[subject_name(subject)]);
    let mut pace = Pace::new();
    let longest = tokio::time::sleep(OBSERVE_TIME_MAX);
    tokio::pin!(longest);
    // Lines that were taken from the queue but did not fit into the last batch.
    let mut next: Option<Bytes> = None;
    loop {
        let first = match next.take() {
            Some(lines) => lines,
            None => tokio::select! {
                () = &mut longest => {
                    let why = format!("an observation lasts at most {} s; fix: begin another one", OBSERVE_TIME_MAX.as_secs());
                    return Err(ObservationError::refused("time", why));
                }
                lines = lines.recv() => lines.ok_or_else(|| ObservationError::refused("ended", "the process is ending"))?,
            },
        };
        let mut batch = Vec::with_capacity(first.len());
        let mut dropped = 0;
        add(&mut batch, &first, &mut dropped);
        // Half of the limit: a batch grows by what is in the queue now and does not wait for more.
        while batch.len() < OBSERVE_DATA_BYTES_MAX / 2
            && let Some(more) = lines.try_recv()
        {
            if batch.len() + more.len() > OBSERVE_DATA_BYTES_MAX {
                next = Some(more);
                break;
            }
            add(&mut batch, &more, &mut dropped);
        }
        dropped += lines.take_dropped();
        count(&counter, dropped);
        pace.wait(batch.len()).await;
        out.send(batch, dropped).await?;
    }
}

/// Appends lines to a batch. Lines that are longer than an answer may be are dropped and counted.
fn add(batch: &mut Vec<u8>, lines: &Bytes, dropped: &mut u64) {
    if lines.len() > OBSERVE_DATA_BYTES_MAX {
        *dropped += count_lines(lines);
    } else {
        batch.extend_from_slice(lines);
    }
}

fn count(counter: &SharedCounter, dropped: u64) {
    if dropped > 0 {
        counter.add(dropped);
    }
}

/// A token bucket of [`LINE_BYTES_PER_SECOND`].
struct Pace {
    /// Time at which the rate has paid for all bytes sent.
    paid: Instant,
}

impl Pace {
    fn new() -> Self {
        Self {
            paid: Instant::now(),
        }
    }

    /// Waits until `bytes` more bytes may be sent.
    async fn wait(&mut self, bytes: usize) {
        let now = Instant::now();
        let cost = Duration::from_secs_f64(bytes as f64 / LINE_BYTES_PER_SECOND as f64);
        self.paid = self.paid.max(now) + cost;
        // One second's worth of bytes may be sent in advance.
        tokio::time::sleep_until(self.paid - Duration::from_secs(1).min(self.paid - now)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_pace_allows_a_seconds_worth_at_once_and_then_its_rate() {
        let mut pace = Pace::new();
        let begun = Instant::now();
        pace.wait(LINE_BYTES_PER_SECOND).await;
        let waited = begun.elapsed();
        assert!(waited < Duration::from_millis(10), "{waited:?}");
        pace.wait(LINE_BYTES_PER_SECOND).await;
        pace.wait(LINE_BYTES_PER_SECOND).await;
        let waited = begun.elapsed();
        assert!(
            (Duration::from_millis(1_990)..Duration::from_millis(2_020)).contains(&waited),
            "{waited:?}"
        );
        tokio::time::sleep(Duration::from_secs(60)).await;
        let again = Instant::now();
        pace.wait(2 * LINE_BYTES_PER_SECOND).await;
        let waited = again.elapsed();
        assert!(
            (Duration::from_millis(990)..Duration::from_millis(1_020)).contains(&waited),
            "{waited:?}"
        );
    }
}
