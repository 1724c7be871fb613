//! The answer to a request of conditions: messages within a limit of bytes, which are sent as fast
//! as the operator reads them. Start at [`AnswerParts`] and [`ConditionsStream::send`].

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use canal_controller_metrics::ControllerMetrics;
use canal_wire::api;
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tonic::Status;

use super::turns::AnswerPermit;

/// Maximum bytes of the conditions in one answer.
/// A tenant's default share of configuration is 8 MiB, and the conditions of most objects take less
/// than their text; those of a route count for each of its parents.
pub const CONDITIONS_BYTES_MAX: usize = 16 << 20;
/// Bytes of the conditions in one message of an answer, from which the next message begins. As much
/// of an unread answer stays in the queues of its stream.
const PART_BYTES: usize = 64 << 10;
/// Time within which an answer must be read.
/// Dumps and metrics of data planes have the same (docs/operations/limits.md).
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// The messages of one answer.
#[derive(Debug, Default)]
pub(super) struct AnswerParts {
    parts: Vec<api::ConditionsResponse>,
    bytes: usize,
    /// Bytes of the last message.
    part_bytes: usize,
}

/// The conditions have more than [`CONDITIONS_BYTES_MAX`] bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct AnswerExcess;

impl AnswerParts {
    /// Adds the reasons why the newest state of the tenant is not in force.
    pub(super) fn add_withheld(&mut self, reasons: Vec<api::Diagnostic>) {
        self.parts.push(api::ConditionsResponse {
            objects: Vec::new(),
            withheld: reasons,
        });
    }

    /// Adds the conditions of one object.
    ///
    /// # Errors
    /// They do not fit.
    pub(super) fn add(&mut self, object: api::ObjectStatus) -> Result<(), AnswerExcess> {
        let bytes = object.encoded_len();
        self.bytes += bytes;
        if self.bytes > CONDITIONS_BYTES_MAX {
            return Err(AnswerExcess);
        }
        if self.part_bytes >= PART_BYTES || self.parts.is_empty() {
            self.parts.push(api::ConditionsResponse::default());
            self.part_bytes = 0;
        }
        self.part_bytes += bytes;
        if let Some(part) = self.parts.last_mut() {
            part.objects.push(object);
        }
        Ok(())
    }
}

/// An answer that is being sent.
#[derive(Debug)]
pub struct ConditionsStream {
    parts: mpsc::Receiver<api::ConditionsResponse>,
    /// Number of messages that are still to come.
    left: usize,
}

impl ConditionsStream {
    /// Sends an answer. The tenant's next answer is made when this one was read, when the operator
    /// no longer waits for it, or when the time for reading it is over.
    pub(super) fn send(
        AnswerParts { parts, .. }: AnswerParts,
        permit: AnswerPermit,
        metrics: Arc<ControllerMetrics>,
        timeout: Duration,
    ) -> Self {
        let left = parts.len();
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(async move {
            let send_all = async {
                for part in parts {
                    // The operator no longer reads.
                    if sender.send(part).await.is_err() {
                        return;
                    }
                }
            };
            if tokio::time::timeout(timeout, send_all).await.is_err() {
                metrics.refuse("conditions_unread");
            }
            drop(permit);
        });
        Self {
            parts: receiver,
            left,
        }
    }
}

impl Stream for ConditionsStream {
    type Item = Result<api::ConditionsResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.parts.poll_recv(context).map(|part| match part {
            Some(part) => {
                self.left -= 1;
                Some(Ok(part))
            }
            None if self.left == 0 => None,
            None => {
                self.left = 0;
                Some(Err(Status::deadline_exceeded(
                    "the answer was not read in time; fix: ask again, and read the answer at once",
                )))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use canal_controller_metrics::GaugeValues;
    use tokio_stream::StreamExt;

    use super::super::turns::ConditionsTurns;
    use super::*;

    fn object(bytes: usize) -> api::ObjectStatus {
        api::ObjectStatus {
            name: "x".repeat(bytes),
            ..api::ObjectStatus::default()
        }
    }

    async fn permit(turns: &Arc<ConditionsTurns>) -> AnswerPermit {
        let tenant = "alpha".parse().unwrap();
        turns.run(&tenant, || || ()).await.unwrap().1
    }

    #[test]
    fn an_answer_beyond_its_bytes_is_refused() {
        let mut parts = AnswerParts::default();
        // 16 of these and their headers exceed the limit.
        let added = (0..100).take_while(|_| parts.add(object(1 << 20)).is_ok());
        assert_eq!(added.count(), 15);
    }

    #[tokio::test]
    async fn an_answer_comes_whole_in_small_messages() {
        let turns = ConditionsTurns::new();
        let metrics = Arc::new(ControllerMetrics::default());
        let mut parts = AnswerParts::default();
        for _ in 0..1_000 {
            parts.add(object(1 << 10)).unwrap();
        }
        let stream = ConditionsStream::send(parts, permit(&turns).await, metrics, READ_TIMEOUT);
        let parts: Vec<_> = stream.map(Result::unwrap).collect().await;
        let objects: usize = parts.iter().map(|part| part.objects.len()).sum();
        assert_eq!(objects, 1_000);
        let largest = parts.iter().map(Message::encoded_len).max().unwrap();
        assert!(largest < 2 * PART_BYTES, "{largest}");
        // The answer was read, so that the next is made.
        drop(permit(&turns).await);
    }

    #[tokio::test]
    async fn a_reset_answer_makes_room_for_the_next() {
        let turns = ConditionsTurns::new();
        let metrics = Arc::new(ControllerMetrics::default());
        for _ in 0..100 {
            let mut parts = AnswerParts::default();
            for _ in 0..4 {
                parts.add(object(PART_BYTES)).unwrap();
            }
            let permit = permit(&turns).await;
            drop(ConditionsStream::send(
                parts,
                permit,
                metrics.clone(),
                READ_TIMEOUT,
            ));
        }
    }

    #[tokio::test]
    async fn an_answer_that_is_not_read_ends_with_an_error() {
        let turns = ConditionsTurns::new();
        let metrics = Arc::new(ControllerMetrics::default());
        let mut parts = AnswerParts::default();
        for _ in 0..4 {
            parts.add(object(PART_BYTES)).unwrap();
        }
        let first = permit(&turns).await;
        let mut stream = ConditionsStream::send(parts, first, metrics.clone(), Duration::ZERO);
        // The next answer is made when the time for reading this one is over.
        drop(permit(&turns).await);
        let mut read = Vec::new();
        while let Some(part) = stream.next().await {
            read.push(part.map(|part| part.objects.len()));
        }
        let [Ok(1), Err(status)] = read.as_slice() else {
            panic!("{read:?}")
        };
        assert_eq!(status.code(), tonic::Code::DeadlineExceeded);
        let text = metrics.render(&GaugeValues::default());
        let line = "canal_controller_refused_total{reason=\"conditions_unread\"} 1\n";
        assert!(text.contains(line), "{text}");
    }
}
