//! Reports of a data plane to the fleet service, periodically and after changes, over one
//! connection at a time. It neither makes the reports nor decides what the responses mean: its
//! [`ReportHandler`] does. Start at [`ReportLoop::run`].

use std::sync::Arc;
use std::time::Duration;

use canal_wire::fleet::fleet_client::FleetClient;
use tokio::sync::watch;
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use super::{ControllerConnection, ControllerEndpoint};
use canal_runtime::backoff::Backoff;
use canal_runtime::drain::DrainObserver;
use canal_runtime::metrics::CounterFamily;

/// Makes one kind of report and applies the responses to it.
pub trait ReportHandler: Send + Sync + 'static {
    type Report: Clone + Send;
    type Answer: Send;

    /// Notes that the next report is the first over a new connection, which may lead to another
    /// controller.
    fn begin(&self) {}

    /// Returns the report to send now, or `None` if no report is to be sent now.
    fn report(&self) -> impl Future<Output = Option<Self::Report>> + Send;

    /// Sends a report by the RPC of its kind.
    fn send(
        fleet: &mut FleetClient<Channel>,
        report: Request<Self::Report>,
    ) -> impl Future<Output = Result<Response<Self::Answer>, Status>> + Send;

    /// Returns the report interval in milliseconds that the controller requests, or 0 if it
    /// requests none.
    fn requested_interval_ms(answer: &Self::Answer) -> u32;

    /// Applies all orders of a response.
    ///
    /// # Errors
    /// Returns the value that cannot be parsed; then no order of the response is applied.
    fn apply(&self, answer: Self::Answer) -> Result<(), String>;

    /// Returns a receiver that changes when there is something new to report.
    fn news(&self) -> watch::Receiver<u64>;
}

/// Time limits of one kind of report.
#[derive(Debug, Clone, Copy)]
pub struct ReportTiming {
    /// Report interval if the controller requests none.
    pub interval: Duration,
    /// Bounds of the interval that the controller may request.
    pub interval_bounds: (Duration, Duration),
    /// Minimum time between two reports. A change is reported at once, but not earlier than this
    /// after the last report.
    pub interval_min: Duration,
    /// Timeout of connecting, and of each report.
    pub timeout: Duration,
    /// Bounds of the wait after a failure.
    pub backoff: (Duration, Duration),
}

impl ReportTiming {
    /// Returns the time until the next report.
    fn interval_after(&self, requested_ms: u32) -> Duration {
        match requested_ms {
            0 => self.interval,
            ms => Duration::from_millis(ms.into())
                .clamp(self.interval_bounds.0, self.interval_bounds.1),
        }
    }
}

/// Outcome of one report, or of a connection attempt for one. The names are the labels of the
/// counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReportOutcome {
    Applied,
    BadOrders,
    Unconnected,
    Refused,
    Late,
    Last,
    LastFailed,
}

impl ReportOutcome {
    fn name(self) -> &'static str {
        match self {
            Self::Applied => "ok",
            Self::BadOrders => "bad_orders",
            Self::Unconnected => "connect",
            Self::Refused => "refused",
            Self::Late => "timeout",
            Self::Last => "last",
            Self::LastFailed => "last_failed",
        }
    }
}

/// Failure of a connection, after which the next controller is tried.
struct ReportFailure {
    outcome: ReportOutcome,
    why: String,
}

/// The controllers that receive the reports, the time limits, and the counter of the outcomes by
/// label `result`.
#[derive(Clone)]
pub struct ReportLoop {
    pub controller: ControllerEndpoint,
    pub timing: ReportTiming,
    pub outcomes: CounterFamily,
}

impl ReportLoop {
    /// Reports until forced to end. After a failure it continues with the next controller.
    pub async fn run(self, handler: Arc<impl ReportHandler>, end: DrainObserver) {
        let mut backoff = Backoff::new(self.timing.backoff.0, self.timing.backoff.1);
        for attempt in 0.. {
            let failure = tokio::select! {
                failure = self.report_to(attempt, &*handler, &mut backoff) => failure,
                () = end.forced() => return,
            };
            self.count(failure.outcome);
            tracing::warn!(
                reason = failure.outcome.name(),
                why = failure.why,
                "reports: cannot report to the controller; the last orders stay in force"
            );
            tokio::select! {
                () = tokio::time::sleep(backoff.next_wait()) => {}
                () = end.forced() => return,
            }
        }
    }

    /// Sends one last report within `timeout` to the first controller that accepts it.
    pub async fn send_last<H: ReportHandler>(&self, report: H::Report, timeout: Duration) {
        let sent = tokio::time::timeout(timeout, async {
            for attempt in 0..self.controller.addresses.len() {
                let Ok(connection) = self.connect(attempt).await else {
                    continue;
                };
                let mut fleet = FleetClient::new(connection.channel.clone());
                if H::send(&mut fleet, connection.request(report.clone()))
                    .await
                    .is_ok()
                {
                    return true;
                }
            }
            false
        });
        self.count(if sent.await == Ok(true) {
            ReportOutcome::Last
        } else {
            ReportOutcome::LastFailed
        });
    }

    fn count(&self, outcome: ReportOutcome) {
        self.outcomes.shared(&[outcome.name()]).inc();
    }

    async fn connect(&self, attempt: usize) -> Result<ControllerConnection, ReportFailure> {
        let failure = |why| ReportFailure {
            outcome: ReportOutcome::Unconnected,
            why,
        };
        match tokio::time::timeout(self.timing.timeout, self.controller.connect(attempt)).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(error)) => Err(failure(error.to_string())),
            Err(_) => Err(failure(format!(
                "no connection within {:?}",
                self.timing.timeout
            ))),
        }
    }

    /// Reports to the `attempt`-th controller until its connection fails.
    async fn report_to<H: ReportHandler>(
        &self,
        attempt: usize,
        handler: &H,
        backoff: &mut Backoff,
    ) -> ReportFailure {
        let connection = match self.connect(attempt).await {
            Ok(connection) => connection,
            Err(failure) => return failure,
        };
        let mut fleet = FleetClient::new(connection.channel.clone());
        let mut news = handler.news();
        handler.begin();
        loop {
            // Marked before the report is made: a change during the making is reported by the next
            // report.
            news.borrow_and_update();
            let Some(report) = handler.report().await else {
                wait(self.timing.interval, &mut news).await;
                continue;
            };
            let answer = match self.exchange::<H>(&connection, &mut fleet, report).await {
                Ok(answer) => answer,
                Err(failure) => return failure,
            };
            // Even a response with bad orders shows that the controller is reachable.
            backoff.reset();
            let interval = self
                .timing
                .interval_after(H::requested_interval_ms(&answer));
            match handler.apply(answer) {
                Ok(()) => self.count(ReportOutcome::Applied),
                Err(value) => {
                    self.count(ReportOutcome::BadOrders);
                    tracing::warn!(
                        value,
                        controller = connection.address,
                        "reports: the orders cannot be parsed; none is applied"
                    );
                }
            }
            // Frequent news must not raise the rate of reports above one per `interval_min`.
            tokio::time::sleep(self.timing.interval_min).await;
            wait(interval.saturating_sub(self.timing.interval_min), &mut news).await;
        }
    }

    async fn exchange<H: ReportHandler>(
        &self,
        connection: &ControllerConnection,
        fleet: &mut FleetClient<Channel>,
        report: H::Report,
    ) -> Result<H::Answer, ReportFailure> {
        match tokio::time::timeout(
            self.timing.timeout,
            H::send(fleet, connection.request(report)),
        )
        .await
        {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(ReportFailure {
                outcome: ReportOutcome::Refused,
                why: format!("{}: {status}", connection.address),
            }),
            Err(_) => {
                let why = format!(
                    "{}: no answer within {:?}",
                    connection.address, self.timing.timeout
                );
                Err(ReportFailure {
                    outcome: ReportOutcome::Late,
                    why,
                })
            }
        }
    }
}

/// Waits until the interval is over or there is news.
async fn wait(interval: Duration, news: &mut watch::Receiver<u64>) {
    tokio::select! {
        () = tokio::time::sleep(interval) => {}
        changed = news.changed() => if changed.is_err() {
            // The sender is gone, so the process is ending.
            std::future::pending::<()>().await;
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requested_interval_is_clamped_and_zero_means_the_default() {
        let ms = Duration::from_millis;
        let timing = ReportTiming {
            interval: ms(500),
            interval_bounds: (ms(100), ms(10_000)),
            interval_min: ms(100),
            timeout: ms(1000),
            backoff: (ms(50), ms(1000)),
        };
        for (requested, want) in [(0, 500), (1, 100), (250, 250), (60_000, 10_000)] {
            assert_eq!(timing.interval_after(requested), ms(want), "{requested}");
        }
    }
}
