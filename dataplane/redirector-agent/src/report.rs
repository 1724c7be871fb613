//! Time limits of a replica's reports, and the parser of the controller's orders. The reports are
//! made in [`crate::agent`] and sent by `canal-southbound-client`.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::time::Duration;

use canal_southbound_client::controller_client::report_loop::ReportTiming;
use canal_wire::fleet::ReplicaReportResponse;

use crate::desired_maps::ControllerOrders;

/// Time limits of the reports. Changes are not reported more often than every 100 ms, because a
/// report scans the kernel's sockets.
pub(crate) const TIMING: ReportTiming = ReportTiming {
    interval: Duration::from_millis(500),
    // What an order of the controller may be; another is cut to these bounds.
    interval_bounds: (Duration::from_millis(100), Duration::from_secs(10)),
    interval_min: Duration::from_millis(100),
    // As long as the controller waits until a replica that no edge probes counts as down.
    timeout: Duration::from_secs(3),
    backoff: (Duration::from_millis(50), Duration::from_secs(2)),
};
/// Timeout of the last report of a process that ends. Shorter than that of other reports, because
/// the process is to end.
pub(crate) const LAST_TIMEOUT: Duration = Duration::from_secs(1);

/// Parses the orders. The error is the value that does not parse; then none of the orders applies.
pub(crate) fn decide_orders(orders: &ReplicaReportResponse) -> Result<ControllerOrders, String> {
    let address = |text: &String| {
        text.parse::<Ipv4Addr>()
            .map_err(|_| text.chars().take(80).collect::<String>())
    };
    let edge = if orders.edge.is_empty() {
        None
    } else {
        Some(address(&orders.edge)?)
    };
    let hosts = orders
        .hosts
        .iter()
        .map(address)
        .collect::<Result<BTreeSet<_>, _>>()?;
    let number = u16::try_from(orders.number).map_err(|_| orders.number.to_string())?;
    Ok(ControllerOrders {
        number,
        edge,
        hosts,
        drain: orders.drain,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_applied_completely_or_not_at_all() {
        let orders = |number, edge: &str, hosts: &[&str]| ReplicaReportResponse {
            number,
            edge: edge.into(),
            hosts: hosts.iter().map(ToString::to_string).collect(),
            drain: true,
            ..ReplicaReportResponse::default()
        };
        let read = decide_orders(&orders(3, "", &["250.1.0.2", "250.1.0.1", "250.1.0.2"])).unwrap();
        assert_eq!(
            (read.number, read.edge, read.hosts.len(), read.drain),
            (3, None, 2, true)
        );
        for (bad, what) in [
            (orders(70_000, "", &[]), "70000"),
            (orders(3, "edge", &[]), "edge"),
            (orders(3, "", &["250.1.0"]), "250.1.0"),
        ] {
            assert_eq!(decide_orders(&bad), Err(what.to_string()));
        }
    }
}
