//! The command line: what an operator may say, and the settings it means. Nothing is started here.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use canal_keys::EngineConfig;
use canal_keys::lanes::LaneConfig;
use canal_keys::limits::Shares;
use canal_kit::controller::Controller;
use canal_kit::sys;
use canal_model::ids::{AzName, ObjectName, TenantName};
use canal_model::principal::Principal;
use clap::Parser;

use crate::process::Config;

/// A key server of Canal: holds private keys that nodes and gateways do without, and does the handshakes and signatures that they are entitled
/// to. Keys are in its memory alone, sealed, and are made anew after a restart.
#[derive(Debug, Parser)]
#[command(version, about)]
#[command(after_help = "Examples:
  canal-keyserver --name ks-1 --az az1 --controller https://250.1.0.1:15012 --root-ca root.pem --token-file token --data-dir /var/lib/canal
  canal-keyserver --name own --az az1 --tenant alpha --tls-dir /etc/alpha/tls --controller https://250.1.0.1:15012 --root-ca root.pem --token-file token --data-dir /var/lib/canal")]
pub(crate) struct Flags {
    /// This key server's name, as the controller's principals file has it.
    #[arg(long, env = "CANAL_KEY_SERVER")]
    name: ObjectName,
    /// The availability zone this key server is in.
    #[arg(long)]
    az: AzName,
    /// The controller, as https://HOST:PORT; repeat for several.
    #[arg(long = "controller", required = true, value_parser = controller_address)]
    controllers: Vec<String>,
    /// PEM file of the CA that signed the controller's certificate.
    #[arg(long)]
    root_ca: PathBuf,
    /// File with the bearer token that the controller knows this key server by.
    #[arg(long)]
    token_file: PathBuf,
    /// Where the last good configuration is kept. No key is ever in it.
    #[arg(long)]
    data_dir: PathBuf,
    /// Where requesters' channels are accepted.
    #[arg(long, default_value = "[::]:15013")]
    listen: SocketAddr,
    /// Be this tenant's own key server, not the provider's.
    #[arg(long, help_heading = "Keyless")]
    tenant: Option<TenantName>,
    /// The tenant's own keys: NAME.crt (PEM chain, leaf first) and NAME.key, and allow.yaml, which says who may have signatures with them.
    #[arg(long, requires = "tenant", help_heading = "Keyless")]
    tls_dir: Option<PathBuf>,
    /// Threads for ECDSA, and as many for RSA; 0 is one per core.
    #[arg(long, default_value_t = 0)]
    workers: usize,
    /// How long an RSA key that was just used stays open, in milliseconds; 0: it is opened for each batch. Opening costs four signatures.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=1000))]
    rsa_open_ms: u64,
    /// Requests of one requester under way.
    #[arg(long, default_value_t = Shares::default().requester)]
    max_requester_requests: usize,
    /// Requests of one tenant under way.
    #[arg(long, default_value_t = Shares::default().tenant)]
    max_tenant_requests: usize,
    /// Channels of requesters.
    #[arg(long, default_value_t = Shares::default().channels)]
    max_channels: u64,
    /// Operators' pages that change nothing: /metrics, /logging (GET), /version. /config_dump, /logging (POST) and /quitquitquit are on the
    /// unix socket admin.sock in --data-dir.
    #[arg(long, default_value = "127.0.0.1:15000")]
    admin_addr: SocketAddr,
    /// /metrics: names every tenant; give an address of the network that only operators reach.
    #[arg(long, default_value = "0.0.0.0:15020")]
    metrics_addr: SocketAddr,
    /// /healthz/ready.
    #[arg(long, default_value = "0.0.0.0:15021")]
    readiness_addr: SocketAddr,
    /// What to tell on stderr, e.g. info or info,canal_keys=debug.
    #[arg(long, default_value = "info")]
    pub(crate) log: String,
    /// How long handshakes may go on after SIGTERM, in seconds.
    #[arg(long, default_value_t = 10)]
    drain_seconds: u64,
    /// Go on where the kernel does not let memory be locked. For tests: keys may then reach the disk by way of swap.
    #[arg(long)]
    pub(crate) allow_unlocked: bool,
}

fn controller_address(given: &str) -> Result<String, String> {
    let address = given.strip_prefix("https://").unwrap_or(given).trim_end_matches('/');
    match address.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0) => Ok(address.to_string()),
        _ => Err("write https://HOST:PORT".into()),
    }
}

impl Flags {
    /// The settings they mean.
    pub(crate) fn config(self) -> Config {
        let workers = if self.workers == 0 { sys::cores().len() } else { self.workers };
        Config {
            name: self.name.to_string(),
            engine: EngineConfig {
                principal: Principal::KeyServer { name: self.name, az: self.az, tenant: self.tenant },
                lanes: LaneConfig { workers, linger: Duration::from_millis(self.rsa_open_ms) },
                shares: Shares { requester: self.max_requester_requests, tenant: self.max_tenant_requests, channels: self.max_channels },
                tls_dir: self.tls_dir,
            },
            controller: Controller { addresses: self.controllers, root: self.root_ca, token: self.token_file },
            data_dir: self.data_dir,
            listen: self.listen,
            admin: self.admin_addr,
            metrics: self.metrics_addr,
            readiness: self.readiness_addr,
            drain_limit: Duration::from_secs(self.drain_seconds),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REST: [&str; 10] =
        ["--az", "az1", "--controller", "https://127.0.0.1:15012", "--root-ca", "r", "--token-file", "t", "--data-dir", "d"];

    fn parsed(more: &[&str]) -> Result<Config, String> {
        let all = ["canal-keyserver", "--name", "ks-1"].iter().chain(&REST).chain(more);
        Flags::try_parse_from(all).map(Flags::config).map_err(|e| e.to_string())
    }

    #[test]
    fn flags_mean_settings() {
        let config = parsed(&[]).unwrap();
        assert_eq!(config.engine.principal.to_string(), "keyserver ks-1");
        assert_eq!(config.listen.port(), canal_wire::keyrpc::PORT);
        assert_eq!(config.controller.addresses, ["127.0.0.1:15012"]);
        let config = parsed(&["--tenant", "alpha", "--tls-dir", "/x", "--workers", "3", "--rsa-open-ms", "0"]).unwrap();
        assert_eq!(config.engine.principal.to_string(), "keyserver alpha/ks-1");
        assert_eq!((config.engine.lanes.workers, config.engine.lanes.linger), (3, Duration::ZERO));
        for (bad, text) in [
            (&["--tls-dir", "/x"][..], "--tenant"),
            (&["--rsa-open-ms", "1001"], "1001"),
            (&["--controller", "nowhere"], "HOST:PORT"),
            (&["--tenant", "A"], "tenant name"),
        ] {
            let error = parsed(bad).err().unwrap_or_default();
            assert!(error.contains(text), "{bad:?}: {error}");
        }
    }
}
