//! Observation of a data plane by operators through the controller: taps, access log lines,
//! configuration and metrics. The data plane opens one stream for it, over the connection of the
//! subscription, and answers the controller's orders within bounds. The controller decides which
//! operator may observe what. This module and the process separate the tenants' data before it
//! leaves the process. Start with [`serve`].

mod session;
mod whole;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use canal_model::ids::TenantName;
use canal_model::share::ShareKind;
use canal_runtime::drain::DrainObserver;
use canal_runtime::limits::show_shares;
use canal_runtime::metrics::{CounterFamily, MetricFamily, Registry};
use canal_runtime::{RevocationOrder, TenantLimit, TenantLimitConfig};
use canal_southbound_client::controller_client::ControllerConnection;
use canal_wire::observe::observation_client::ObservationClient;
use canal_wire::observe::observe_order::Order;
use canal_wire::observe::{ObserveAnswer, ObserveBegin, ObserveOrder, Subject};
use canal_wire::{OBSERVATIONS_PER_DATA_PLANE_MAX, OBSERVE_WINDOW_BYTES};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::AbortHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

use crate::access_log::LogTails;

pub use crate::access_log::{LineSender, Lines, QUEUE_BYTES_MAX, line_queue};
pub use session::LINE_BYTES_PER_SECOND;
pub use whole::{WHOLE_ANSWER_BYTES_MAX, WHOLE_ANSWERS_MAX};

/// Answers of all observations that wait for the connection.
/// At `OBSERVE_DATA_BYTES_MAX` each they take 1 MiB.
const ANSWERS_MAX: usize = 32;
/// Time after which a stream that ended is opened again. So a controller that restarts gets one
/// attempt a second from each data plane.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Filter of the requests that a tap shows. Empty fields match all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TapFilter {
    pub tenant: Option<String>,
    /// Service in the form `namespace/name`.
    pub service: Option<String>,
    /// Prefix that a request path must have.
    pub path: Option<String>,
    /// Status as `503` or `5xx`.
    pub status: Option<String>,
}

/// Begins a tap. It returns `None` if the maximum number of taps is open.
pub type TapFn = Box<dyn Fn(TapFilter) -> Option<Lines> + Send + Sync>;
/// Returns the configuration in use: all of it, or the part of one tenant. It contains no secrets.
pub type DumpFn = Box<dyn Fn(Option<&TenantName>) -> serde_json::Value + Send + Sync>;

/// Data that a process can show.
pub struct ObserveSources {
    pub dump: DumpFn,
    /// `None` for a process that handles no requests.
    pub tap: Option<TapFn>,
    /// `None` for a process without an access log.
    pub logs: Option<LogTails>,
    pub registry: Registry,
}

impl ObserveSources {
    fn subjects(&self) -> Vec<Subject> {
        let some = [
            (self.tap.is_some(), Subject::Tap),
            (self.logs.is_some(), Subject::Logs),
        ];
        let some = some
            .into_iter()
            .filter(|(has, _)| *has)
            .map(|(_, subject)| subject);
        some.chain([Subject::ConfigDump, Subject::Metrics])
            .collect()
    }
}

/// State that all observations share.
struct ObservationContext {
    sources: ObserveSources,
    /// Limit of observations, charged to the tenant that is shown. The provider has a reserve.
    limit: TenantLimit,
    /// Limit of config dumps and metrics in memory.
    whole: TenantLimit,
    begun: CounterFamily,
    refused: CounterFamily,
    dropped: CounterFamily,
}

impl ObservationContext {
    fn new(sources: ObserveSources) -> Self {
        let limit = |capacity: usize, reserve: usize| {
            let kind = ShareKind::Observations;
            TenantLimit::new(TenantLimitConfig {
                kind,
                capacity: capacity as u64,
                reserve: reserve as u64,
                revocation_order: RevocationOrder::OldestFirst,
            })
        };
        let registry = &sources.registry;
        let counters =
            |name, help, labels| registry.counters(MetricFamily::new(name, help, labels));
        // The reserve is for the provider, so tenants cannot keep it from observing an outage.
        // Nobody measured the quarter.
        let (limit, whole) = (
            limit(
                OBSERVATIONS_PER_DATA_PLANE_MAX,
                OBSERVATIONS_PER_DATA_PLANE_MAX / 4,
            ),
            limit(WHOLE_ANSWERS_MAX, 1),
        );
        show_shares(registry, &limit);
        let begun = counters(
            "canal_observations_total",
            "Observations that the controller started on this data plane.",
            &["subject"],
        );
        let refused = counters(
            "canal_observations_refused_total",
            "Observations refused or ended early, by reason.",
            &["subject", "reason"],
        );
        let dropped = counters(
            "canal_observations_lines_dropped_total",
            "Lines that observations left out: the reader was slow, or there were too many.",
            &["subject"],
        );
        Self {
            limit,
            whole,
            begun,
            refused,
            dropped,
            sources,
        }
    }
}

/// Returns the label value of a subject.
fn subject_name(subject: Subject) -> &'static str {
    match subject {
        Subject::Unspecified => "unspecified",
        Subject::Tap => "tap",
        Subject::Logs => "logs",
        Subject::ConfigDump => "config_dump",
        Subject::Metrics => "metrics",
    }
}

/// Serves observations over each connection of a subscription in turn, until the drain is forced.
/// It does not delay the end of the process.
///
/// Metrics: `canal_observations_total{subject}`,
/// `canal_observations_refused_total{subject,reason}`,
/// `canal_observations_lines_dropped_total{subject}`, and `canal_share_*{limit="observations"}`.
pub async fn serve(
    mut connections: watch::Receiver<Option<ControllerConnection>>,
    sources: ObserveSources,
    forced: DrainObserver,
) {
    let observer = Arc::new(ObservationContext::new(sources));
    loop {
        let connection = tokio::select! {
            () = forced.forced() => return,
            connection = connections.wait_for(Option::is_some) => match connection {
                Ok(connection) => connection.clone(),
                Err(_) => return,
            },
        };
        let Some(connection) = connection else {
            continue;
        };
        let is_supported = tokio::select! {
            () = forced.forced() => return,
            // The subscription has a new connection, or none.
            _ = connections.changed() => continue,
            supported = follow(&connection, &observer) => supported,
        };
        // A controller of an earlier build does not implement observation; the next connection may
        // reach a newer one.
        let again = async {
            if is_supported {
                tokio::time::sleep(RETRY_INTERVAL).await
            } else {
                std::future::pending().await
            }
        };
        tokio::select! {
            () = forced.forced() => return,
            _ = connections.changed() => {}
            () = again => {}
        }
    }
}

/// An observation in progress. Dropping it ends the observation.
struct ObservationHandle {
    credit: Arc<Semaphore>,
    task: AbortHandle,
}

impl Drop for ObservationHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves one stream to its end. Returns `false` if the controller does not implement observation.
async fn follow(connection: &ControllerConnection, observer: &Arc<ObservationContext>) -> bool {
    let (answers, outbound) = mpsc::channel(ANSWERS_MAX);
    let subjects = observer
        .sources
        .subjects()
        .into_iter()
        .map(Into::into)
        .collect();
    // The first message announces what this process can show.
    // The receiver is `outbound` above, so this cannot fail.
    if answers
        .send(ObserveAnswer {
            subjects,
            ..ObserveAnswer::default()
        })
        .await
        .is_err()
    {
        return true;
    }
    let mut client = ObservationClient::new(connection.channel.clone());
    let mut orders = match client
        .serve(connection.request(ReceiverStream::new(outbound)))
        .await
    {
        Ok(orders) => orders.into_inner(),
        Err(status) => return status.code() != Code::Unimplemented,
    };
    let mut sessions = HashMap::new();
    while let Ok(Some(ObserveOrder { id, order })) = orders.message().await {
        // Observations that ended by themselves leave the map with the next order.
        sessions.retain(|_, session: &mut ObservationHandle| !session.task.is_finished());
        match order {
            Some(Order::Begin(begin)) => {
                // An ID that is used again ends its old observation: dropping the handle aborts the
                // task.
                sessions.insert(id, start(observer, id, begin, &answers));
            }
            Some(Order::Credit(more)) => {
                // The controller returns the credit of the data that it received. The unused credit
                // therefore exceeds the window by at most one answer.
                // With this bound of 512 KiB the conversion does not fail.
                let more = usize::try_from(more.min(OBSERVE_WINDOW_BYTES * 2)).unwrap_or(0);
                sessions
                    .get(&id)
                    .inspect(|session| session.credit.add_permits(more));
            }
            Some(Order::End(_)) => drop(sessions.remove(&id)),
            // A newer controller may send orders that this version does not know.
            None => {}
        }
    }
    true
}

fn start(
    observer: &Arc<ObservationContext>,
    id: u64,
    begin: ObserveBegin,
    answers: &mpsc::Sender<ObserveAnswer>,
) -> ObservationHandle {
    let credit = Arc::new(Semaphore::new(
        usize::try_from(OBSERVE_WINDOW_BYTES).unwrap_or(usize::MAX),
    ));
    let out = session::Outgoing {
        id,
        credit: credit.clone(),
        answers: answers.clone(),
    };
    let task = tokio::spawn(session::run(observer.clone(), begin, out)).abort_handle();
    ObservationHandle { credit, task }
}

#[cfg(test)]
mod tests;
