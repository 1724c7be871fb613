//! Tells the controller how the edge sees its replicas: at every change, and regularly, because silence closes the AZ's entry. What it
//! orders in return is handed on.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::Duration;

use canal_kit::backoff::Backoff;
use canal_kit::controller::{Connection, Controller};
use canal_kit::drain::Watcher;
use canal_wire::fleet::fleet_client::FleetClient;
use canal_wire::fleet::{EdgeOrders, EdgeState};
use tokio::sync::watch;

use crate::config::{REPORT_PAUSE, REPORT_TIMEOUT};
use crate::counts::Counts;

/// The controller's wish for the next report is kept within these.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(1000));
/// After a failed report; the AZ's entry is closed after 1.5 s without one.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(1000));

/// Makes reports and takes orders.
pub trait Desk: Send + 'static {
    /// The report to send now; `None`: this edge forwards nothing, and silence says so.
    fn report(&self) -> Option<EdgeState>;
    /// What came back.
    fn orders(&self, hosts: BTreeSet<Ipv4Addr>);
}

/// When to report after these orders.
pub fn decide_pause(orders: &EdgeOrders) -> Duration {
    match orders.next_ms {
        0 => REPORT_PAUSE,
        ms => Duration::from_millis(ms.into()).clamp(PAUSES.0, PAUSES.1),
    }
}

/// The hosts of the orders; `Err` names one that is no address, and then none is taken.
pub fn read_hosts(orders: &EdgeOrders) -> Result<BTreeSet<Ipv4Addr>, String> {
    orders.hosts.iter().map(|h| h.parse().map_err(|_| h.chars().take(80).collect())).collect()
}

/// Reports until forced to end. `changed` is touched when there is news.
pub async fn run(controller: Controller, desk: impl Desk, mut changed: watch::Receiver<u64>, counts: Counts, end: Watcher) {
    let mut backoff = Backoff::new(BACKOFF.0, BACKOFF.1);
    for attempt in 0.. {
        let talk = async {
            match connect(&controller, attempt).await {
                Ok(connection) => talk(&connection, &desk, &mut changed, &counts, &mut backoff).await,
                Err(failed) => failed,
            }
        };
        let (reason, why) = tokio::select! {
            failed = talk => failed,
            () = end.forced() => return,
        };
        counts.report(reason);
        tracing::warn!(reason, why, "a report did not reach the controller; packets go on by what is known");
        tokio::select! {
            () = tokio::time::sleep(backoff.next_wait()) => {}
            () = end.forced() => return,
        }
    }
}

async fn connect(controller: &Controller, attempt: usize) -> Result<Connection, (&'static str, String)> {
    match tokio::time::timeout(REPORT_TIMEOUT, controller.connect(attempt)).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(error)) => Err(("connect", error.to_string())),
        Err(_) => Err(("connect", format!("no connection within {REPORT_TIMEOUT:?}"))),
    }
}

/// Reports over one connection until it fails.
async fn talk(
    connection: &Connection,
    desk: &impl Desk,
    changed: &mut watch::Receiver<u64>,
    counts: &Counts,
    backoff: &mut Backoff,
) -> (&'static str, String) {
    let mut fleet = FleetClient::new(connection.channel.clone());
    loop {
        changed.borrow_and_update();
        let Some(state) = desk.report() else {
            next(REPORT_PAUSE, changed).await;
            continue;
        };
        let answer = tokio::time::timeout(REPORT_TIMEOUT, fleet.edge_report(connection.request(state))).await;
        let orders = match answer {
            Ok(Ok(orders)) => orders.into_inner(),
            Ok(Err(status)) => return ("refused", format!("{}: {}", connection.address, status)),
            Err(_) => return ("timeout", format!("{}: no answer within {REPORT_TIMEOUT:?}", connection.address)),
        };
        backoff.reset();
        match read_hosts(&orders) {
            Ok(hosts) => {
                counts.report("ok");
                desk.orders(hosts);
            }
            Err(host) => {
                counts.report("bad_orders");
                tracing::warn!(host, controller = connection.address, "the orders name a host that is no IPv4 address; none is taken");
            }
        }
        next(decide_pause(&orders), changed).await;
    }
}

/// Waits for the pause's end, or for news.
async fn next(pause: Duration, changed: &mut watch::Receiver<u64>) {
    tokio::select! {
        () = tokio::time::sleep(pause) => {}
        news = changed.changed() => if news.is_err() {
            // The process is ending.
            std::future::pending::<()>().await;
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_controllers_wish_is_kept_within_bounds_and_its_hosts_are_whole_or_nothing() {
        for (next_ms, want) in [(0, 500), (1, 100), (250, 250), (60_000, 1000)] {
            let orders = EdgeOrders { next_ms, ..EdgeOrders::default() };
            assert_eq!(decide_pause(&orders), Duration::from_millis(want), "{next_ms}");
        }
        let orders = |hosts: &[&str]| EdgeOrders { hosts: hosts.iter().map(ToString::to_string).collect(), next_ms: 0 };
        assert_eq!(read_hosts(&orders(&["250.1.0.2", "250.1.0.1", "250.1.0.2"])).unwrap().len(), 2);
        assert_eq!(read_hosts(&orders(&["250.1.0.2", "250.1.0"])), Err("250.1.0".to_string()));
    }
}
