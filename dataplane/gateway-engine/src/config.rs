//! Configuration of an engine: addresses and settings, with their defaults and text form. Its limits
//! and timeouts are in `canal-gateway-limits`.
//!
//! It opens nothing.

use std::net::SocketAddr;
use std::str::FromStr;

use canal_gateway_limits::limits::{GatewayLimits, GatewayTimeouts};
use canal_model::ids::{AzName, ServiceKey};
use canal_net::sys::SourceAddresses;

/// A plaintext listener that belongs to one service, for benchmarks, proxyless clients and tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlainListener {
    pub address: SocketAddr,
    pub service: ServiceKey,
    pub port: u16,
}

/// Settings that make an engine a replica of the cloud tier. Such an engine dials endpoints with
/// the tenant's VNI as the socket mark. It accepts plaintext connections to service addresses
/// inside the tier (`canal_wire::tier`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloudTierConfig {
    /// Address that accepts plaintext connections, usually `[::]:15009`. The local address and port
    /// of a connection alone identify the service and port. The kernel can therefore steer all of
    /// them to this one listener.
    pub plain: SocketAddr,
    /// Source addresses for connections to endpoints.
    pub sources: SourceAddresses,
}

/// Error for a `--plain` value that is not of the form `ADDR:PORT=TENANT/NAMESPACE/SERVICE:PORT`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "plain listener {text:?}: {why}; fix: write ADDRESS:PORT=TENANT/NAMESPACE/SERVICE:PORT, e.g. 127.0.0.1:8080=alpha/default/web:80"
)]
pub struct InvalidPlainListener {
    text: String,
    why: String,
}

impl FromStr for PlainListener {
    type Err = InvalidPlainListener;
    fn from_str(s: &str) -> Result<Self, InvalidPlainListener> {
        let bad = |why: String| InvalidPlainListener {
            text: s.into(),
            why,
        };
        let (address, target) = s
            .split_once('=')
            .ok_or_else(|| bad("there is no '='".into()))?;
        let (service, port) = target
            .rsplit_once(':')
            .ok_or_else(|| bad("the service has no port".into()))?;
        Ok(Self {
            address: address
                .parse()
                .map_err(|e| bad(format!("{address}: {e}")))?,
            service: service.parse().map_err(|e| bad(format!("{e}")))?,
            port: port
                .parse()
                .ok()
                .filter(|p| *p > 0)
                .ok_or_else(|| bad(format!("port {port:?} is not 1 to 65535")))?,
        })
    }
}

/// Headers, other than `x-forwarded-for`, that describe the client to applications.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ForwardedHeaders {
    /// `x-forwarded-client-cert` names the client's verified identity. A client's own header of
    /// that name is always removed.
    pub client_cert: bool,
    /// A client's own `x-forwarded-proto` reaches the application, for tenants whose ingress is a
    /// pod.
    pub keeps_proto: bool,
}

/// Settings of an engine. The default has no listeners.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// Name of this replica. `Gateway` resources of that name assign its addresses to tenants.
    pub replica: String,
    /// AZ whose endpoints are preferred, if set.
    pub az: Option<AzName>,
    /// Number of workers; 0 means one per core.
    pub workers: usize,
    /// Pins each worker to a core.
    pub pin: bool,
    /// Addresses that accept HBONE, usually `[::]:15008`.
    pub hbone: Vec<SocketAddr>,
    pub plain: Vec<PlainListener>,
    /// `None` if the engine is not a replica of the cloud tier.
    pub tier: Option<CloudTierConfig>,
    pub forwarded: ForwardedHeaders,
    pub limits: GatewayLimits,
    pub times: GatewayTimeouts,
}

impl Default for GatewayConfig {
    fn default() -> Self {
        Self {
            replica: String::new(),
            az: None,
            workers: 0,
            pin: true,
            hbone: Vec::new(),
            plain: Vec::new(),
            tier: None,
            forwarded: ForwardedHeaders::default(),
            limits: GatewayLimits::default(),
            times: GatewayTimeouts::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_listeners_are_read_or_refused_with_the_reason() {
        let plain: PlainListener = "127.0.0.1:8080=alpha/default/web:80".parse().unwrap();
        assert_eq!(
            (
                plain.address.port(),
                plain.service.to_string().as_str(),
                plain.port
            ),
            (8080, "alpha/default/web", 80)
        );
        assert!(
            "[::1]:8080=alpha/default/web:80"
                .parse::<PlainListener>()
                .is_ok()
        );
        for (bad, why) in [
            ("127.0.0.1:8080", "no '='"),
            ("8080=alpha/default/web:80", "8080: "),
            ("127.0.0.1:8080=alpha/web:80", "tenant/namespace/name"),
            ("127.0.0.1:8080=alpha/default/web", "no port"),
            ("127.0.0.1:8080=alpha/default/web:0", "not 1 to 65535"),
        ] {
            let error = bad.parse::<PlainListener>().unwrap_err().to_string();
            assert!(
                error.contains(why) && error.contains("write ADDRESS"),
                "{bad}: {error}"
            );
        }
    }
}
