//! Time limits of an edge's reports, and the parser of the controller's orders. The reports are
//! made in [`crate::agent`], and sent by `canal-southbound-client`: at every change and regularly,
//! because the controller closes the AZ's entry without reports.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use canal_abi::tier::TUNNELS_MAX;
use canal_southbound_client::controller_client::report_loop::ReportTiming;
use canal_wire::fleet::{EdgeReportResponse, SessionQuery};
use canal_wire::tier::SESSION_QUERIES_MAX;

use crate::config::{REPORT_INTERVAL, REPORT_TIMEOUT};
use crate::desired_maps::Tunnels;

/// Time limits of the reports. The AZ's entry is closed after 1.5 s without a report, so every
/// interval and wait is shorter.
pub(crate) const TIMING: ReportTiming = ReportTiming {
    interval: REPORT_INTERVAL,
    interval_bounds: (Duration::from_millis(100), Duration::from_millis(1000)),
    // A change of health is reported at once.
    interval_min: Duration::ZERO,
    timeout: REPORT_TIMEOUT,
    // The first is short, because another controller usually answers.
    backoff: (Duration::from_millis(50), Duration::from_millis(1000)),
};

/// The controller's orders after parsing.
#[derive(Debug, Clone, PartialEq)]
pub struct Orders {
    pub hosts: BTreeSet<Ipv4Addr>,
    /// The tunnels with their version; `None` if the edge already has them.
    pub tunnels: Option<(u64, Tunnels)>,
    /// Sessions whose path operators request.
    pub queries: Vec<SessionQuery>,
}

/// Parses the orders in a response.
///
/// # Errors
/// Returns the text that is not an address; none of the orders is then applied.
pub fn read_orders(orders: EdgeReportResponse, has_tunnels: u64) -> Result<Orders, String> {
    let address = |host: &String| {
        host.parse::<Ipv4Addr>()
            .map_err(|_| host.chars().take(80).collect::<String>())
    };
    let hosts = orders.hosts.iter().map(address).collect::<Result<_, _>>()?;
    let ports = |bytes: &[u8]| {
        let ports = bytes
            .chunks_exact(2)
            .take(TUNNELS_MAX)
            .map(|port| u16::from_be_bytes([port[0], port[1]]));
        Arc::new(ports.filter(|port| *port != 0).collect())
    };
    let tunnels = orders
        .tunnels
        .iter()
        .map(|of| Ok((address(&of.underlay)?, ports(&of.ports))))
        .collect::<Result<Tunnels, String>>()?;
    let tunnels =
        (orders.tunnels_version != has_tunnels).then_some((orders.tunnels_version, tunnels));
    Ok(Orders {
        hosts,
        tunnels,
        queries: orders
            .queries
            .into_iter()
            .take(SESSION_QUERIES_MAX)
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use canal_wire::fleet::ReplicaTunnels;

    use super::*;

    #[test]
    fn orders_are_applied_whole_or_not_at_all() {
        let orders = |hosts: &[&str]| EdgeReportResponse {
            hosts: hosts.iter().map(ToString::to_string).collect(),
            ..EdgeReportResponse::default()
        };
        assert_eq!(
            read_orders(orders(&["250.1.0.2", "250.1.0.1", "250.1.0.2"]), 0)
                .unwrap()
                .hosts
                .len(),
            2
        );
        assert_eq!(
            read_orders(orders(&["250.1.0.2", "250.1.0"]), 0),
            Err("250.1.0".to_string())
        );
        let tunnels = |underlay: &str| {
            // Port 40,001, port 0, which is skipped, and half a port.
            let tunnels = vec![ReplicaTunnels {
                underlay: underlay.into(),
                ports: vec![0x9c, 0x41, 0, 0, 0x9c],
            }];
            EdgeReportResponse {
                tunnels,
                tunnels_version: 4,
                ..EdgeReportResponse::default()
            }
        };
        // The second argument is the version of the tunnels that the edge has.
        let read = read_orders(tunnels("250.1.0.9"), 3).unwrap().tunnels;
        assert_eq!(
            read,
            Some((
                4,
                [(Ipv4Addr::new(250, 1, 0, 9), Arc::new(vec![40_001]))].into()
            ))
        );
        assert_eq!(
            read_orders(tunnels("250.1.0.9"), 4).unwrap().tunnels,
            None,
            "it has them"
        );
        assert_eq!(read_orders(tunnels("gw-1"), 3), Err("gw-1".to_string()));
    }
}
