//! Reports to the controller and takes its orders, again and again: one controller after the other until one hears. What is reported, and
//! what orders mean, is the agent's.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::Duration;

use canal_kit::backoff::Backoff;
use canal_kit::controller::{Connection, Controller};
use canal_kit::drain::Watcher;
use canal_wire::fleet::fleet_client::FleetClient;
use canal_wire::fleet::{ReplicaOrders, ReplicaState};
use tokio::sync::watch;

use crate::content::Orders;
use crate::counts::Counts;

/// If the controller does not say.
const PAUSE: Duration = Duration::from_millis(500);
/// The controller's wish for the next report is kept within these.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// News goes at once, but not more often than this: each report looks at the kernel's sockets.
const PAUSE_NEWS: Duration = Duration::from_millis(100);
/// For the connection, and for each report.
const TIMEOUT: Duration = Duration::from_secs(3);
/// For the last report of a process that ends.
const LAST_TIMEOUT: Duration = Duration::from_secs(1);
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// Makes reports and takes orders.
pub(crate) trait Desk: Send + Sync + 'static {
    /// The report to send now.
    fn report(&self) -> impl Future<Output = ReplicaState> + Send;
    /// What came back.
    fn orders(&self, orders: Orders);
    /// Changes when there is news.
    fn news(&self) -> watch::Receiver<u64>;
}

/// When to report after these orders.
fn decide_pause(orders: &ReplicaOrders) -> Duration {
    match orders.next_ms {
        0 => PAUSE,
        ms => Duration::from_millis(ms.into()).clamp(PAUSES.0, PAUSES.1),
    }
}

/// Orders as they are meant; `Err` says what cannot be read, and then none of them is taken.
fn decide_orders(orders: &ReplicaOrders) -> Result<Orders, String> {
    let address = |text: &String| text.parse::<Ipv4Addr>().map_err(|_| text.chars().take(80).collect::<String>());
    let edge = if orders.edge.is_empty() { None } else { Some(address(&orders.edge)?) };
    let hosts = orders.hosts.iter().map(address).collect::<Result<BTreeSet<_>, _>>()?;
    let number = u16::try_from(orders.number).map_err(|_| orders.number.to_string())?;
    Ok(Orders { number, edge, hosts, drain: orders.drain })
}

/// Reports until forced to end.
pub(crate) async fn run(controller: Controller, desk: std::sync::Arc<impl Desk>, counts: Counts, end: Watcher) {
    let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1);
    for attempt in 0.. {
        let talk = async {
            match connect(&controller, attempt).await {
                Ok(connection) => talk(&connection, &*desk, &counts, &mut backoff).await,
                Err(failed) => failed,
            }
        };
        let (reason, why) = tokio::select! {
            failed = talk => failed,
            () = end.forced() => return,
        };
        counts.report(reason);
        tracing::warn!(reason, why, "a report did not reach the controller; sessions go on by what is known");
        tokio::select! {
            () = tokio::time::sleep(backoff.next_wait()) => {}
            () = end.forced() => return,
        }
    }
}

/// One last report, to the first controller that hears.
pub(crate) async fn last(controller: &Controller, state: ReplicaState, counts: &Counts) {
    let told = tokio::time::timeout(LAST_TIMEOUT, async {
        for attempt in 0..controller.addresses.len() {
            let Ok(connection) = connect(controller, attempt).await else { continue };
            if FleetClient::new(connection.channel.clone()).replica_report(connection.request(state.clone())).await.is_ok() {
                return true;
            }
        }
        false
    });
    counts.report(if told.await == Ok(true) { "last" } else { "last_failed" });
}

async fn connect(controller: &Controller, attempt: usize) -> Result<Connection, (&'static str, String)> {
    match tokio::time::timeout(TIMEOUT, controller.connect(attempt)).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(error)) => Err(("connect", error.to_string())),
        Err(_) => Err(("connect", format!("no connection within {TIMEOUT:?}"))),
    }
}

/// Reports over one connection until it fails.
async fn talk(connection: &Connection, desk: &impl Desk, counts: &Counts, backoff: &mut Backoff) -> (&'static str, String) {
    let mut fleet = FleetClient::new(connection.channel.clone());
    let mut news = desk.news();
    loop {
        news.borrow_and_update();
        let state = desk.report().await;
        let orders = match tokio::time::timeout(TIMEOUT, fleet.replica_report(connection.request(state))).await {
            Ok(Ok(orders)) => orders.into_inner(),
            Ok(Err(status)) => return ("refused", format!("{}: {status}", connection.address)),
            Err(_) => return ("timeout", format!("{}: no answer within {TIMEOUT:?}", connection.address)),
        };
        backoff.reset();
        match decide_orders(&orders) {
            Ok(orders) => {
                counts.report("ok");
                desk.orders(orders);
            }
            Err(what) => {
                counts.report("bad_orders");
                tracing::warn!(what, controller = connection.address, "orders that cannot be read; none is taken");
            }
        }
        tokio::time::sleep(PAUSE_NEWS).await;
        tokio::select! {
            () = tokio::time::sleep(decide_pause(&orders).saturating_sub(PAUSE_NEWS)) => {}
            changed = news.changed() => if changed.is_err() {
                // The process is ending.
                std::future::pending::<()>().await;
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_taken_whole_or_not_at_all() {
        let orders = |number, edge: &str, hosts: &[&str]| ReplicaOrders {
            number,
            edge: edge.into(),
            hosts: hosts.iter().map(ToString::to_string).collect(),
            drain: true,
            next_ms: 0,
        };
        let read = decide_orders(&orders(3, "", &["250.1.0.2", "250.1.0.1", "250.1.0.2"])).unwrap();
        assert_eq!((read.number, read.edge, read.hosts.len(), read.drain), (3, None, 2, true));
        for (bad, what) in [(orders(70_000, "", &[]), "70000"), (orders(3, "edge", &[]), "edge"), (orders(3, "", &["250.1.0"]), "250.1.0")]
        {
            assert_eq!(decide_orders(&bad), Err(what.to_string()));
        }
        for (next_ms, want) in [(0, 500), (1, 100), (250, 250), (60_000, 10_000)] {
            assert_eq!(decide_pause(&ReplicaOrders { next_ms, ..ReplicaOrders::default() }), Duration::from_millis(want), "{next_ms}");
        }
    }
}
