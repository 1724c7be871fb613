//! The command line of the key server: flags, and their conversion to [`KeyServerProcessConfig`].
//! This module starts nothing.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use canal_keyserver_engine::KeyServerConfig;
use canal_keyserver_engine::limits::QuotaShares;
use canal_keyserver_engine::operation_pool::OperationPoolConfig;
use canal_model::ids::{AzName, ObjectName, TenantName};
use canal_model::principal::Principal;
use canal_net::sys;
use canal_southbound_client::controller_client::ControllerEndpoint;
use clap::Parser;

use crate::process::KeyServerProcessConfig;

/// A key server of Canal: stores private keys for nodes and gateways, and does the handshakes and
/// signatures to which they are entitled. Keys are only in its memory, sealed, and are generated
/// again after a restart.
#[derive(Debug, Parser)]
#[command(version, about)]
#[command(after_help = "Examples:
  canal-keyserver --name ks-1 --az az1 --controller https://250.1.0.1:15012 --root-ca root.pem --token-file token --data-dir /var/lib/canal
  canal-keyserver --name own --az az1 --tenant alpha --tls-dir /etc/alpha/tls --controller https://250.1.0.1:15012 --root-ca root.pem --token-file token --data-dir /var/lib/canal")]
pub(crate) struct Flags {
    /// This key server's name, as in the controller's principals file.
    #[arg(long, env = "CANAL_KEY_SERVER")]
    name: ObjectName,
    /// The availability zone of this key server.
    #[arg(long)]
    az: AzName,
    /// The controller, as https://HOST:PORT; repeat for several.
    #[arg(long = "controller", required = true, value_parser = ControllerEndpoint::parse_address)]
    controllers: Vec<String>,
    /// PEM file of the CA that signed the controller's certificate.
    #[arg(long)]
    root_ca: PathBuf,
    /// File with the bearer token by which the controller identifies this key server.
    #[arg(long)]
    token_file: PathBuf,
    /// Directory of the last good configuration. It never contains a key.
    #[arg(long)]
    data_dir: PathBuf,
    /// Address on which requesters connect.
    #[arg(long, default_value = "[::]:15013")]
    listen: SocketAddr,
    /// Be this tenant's own key server, not the provider's.
    #[arg(long, help_heading = "Keyless")]
    tenant: Option<TenantName>,
    /// The tenant's own keys: NAME.crt (PEM chain, leaf first), NAME.key, and allow.yaml, which
    /// lists the requesters that may get signatures with them.
    #[arg(long, requires = "tenant", help_heading = "Keyless")]
    tls_dir: Option<PathBuf>,
    /// Threads for ECDSA, and the same number for RSA; 0 is one per core.
    #[arg(long, default_value_t = 0)]
    workers: usize,
    /// How long a plaintext RSA key stays in memory after its last use, in milliseconds; 0 opens it
    /// for each batch. Opening costs four signatures.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(0..=1000))]
    rsa_open_ms: u64,
    /// Maximum requests in flight of one requester.
    #[arg(long, default_value_t = QuotaShares::default().requester)]
    max_requester_requests: usize,
    /// Maximum requests in flight of one tenant.
    #[arg(long, default_value_t = QuotaShares::default().tenant)]
    max_tenant_requests: usize,
    /// Maximum number of requesters' channels.
    #[arg(long, default_value_t = QuotaShares::default().channels)]
    max_channels: u64,
    /// Read-only pages for operators: /metrics, /logging (GET), /version. /config_dump, /logging
    /// (POST) and /quitquitquit are on the unix socket admin.sock in --data-dir.
    #[arg(long, default_value = "127.0.0.1:15000")]
    admin_addr: SocketAddr,
    /// /metrics, with the names of all tenants; use an address that only operators can reach.
    #[arg(long, default_value = "0.0.0.0:15020")]
    metrics_addr: SocketAddr,
    /// Add the names that metrics had in earlier versions to /metrics; docs/operations/renamed.md
    /// lists them. The next release does not have this flag.
    #[arg(long)]
    pub(crate) legacy_metric_names: bool,
    /// /healthz/ready.
    #[arg(long, default_value = "0.0.0.0:15021")]
    readiness_addr: SocketAddr,
    /// Log filter for stderr, e.g. info or info,canal_keyserver_engine=debug.
    #[arg(long, default_value = "info")]
    pub(crate) log: String,
    /// How long handshakes may continue after SIGTERM, in seconds.
    // A handshake ends after 10 s at most.
    #[arg(long, default_value_t = 10)]
    drain_seconds: u64,
    /// Start even if the kernel does not allow locking memory. For tests only: keys may then be
    /// swapped to disk.
    #[arg(long)]
    pub(crate) allow_unlocked: bool,
}

impl Flags {
    /// Returns the settings that the flags define.
    pub(crate) fn config(self) -> KeyServerProcessConfig {
        let workers = if self.workers == 0 {
            sys::cores().len()
        } else {
            self.workers
        };
        KeyServerProcessConfig {
            name: self.name.to_string(),
            engine: KeyServerConfig {
                principal: Principal::KeyServer {
                    name: self.name,
                    az: self.az,
                    tenant: self.tenant,
                },
                pool: OperationPoolConfig {
                    workers,
                    linger: Duration::from_millis(self.rsa_open_ms),
                },
                shares: QuotaShares {
                    requester: self.max_requester_requests,
                    tenant: self.max_tenant_requests,
                    channels: self.max_channels,
                },
                tls_dir: self.tls_dir,
            },
            controller: ControllerEndpoint {
                addresses: self.controllers,
                root: self.root_ca,
                token: self.token_file,
            },
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

    const REST: [&str; 10] = [
        "--az",
        "az1",
        "--controller",
        "https://127.0.0.1:15012",
        "--root-ca",
        "r",
        "--token-file",
        "t",
        "--data-dir",
        "d",
    ];

    fn parsed(more: &[&str]) -> Result<KeyServerProcessConfig, String> {
        let all = ["canal-keyserver", "--name", "ks-1"]
            .iter()
            .chain(&REST)
            .chain(more);
        Flags::try_parse_from(all)
            .map(Flags::config)
            .map_err(|e| e.to_string())
    }

    #[test]
    fn flags_mean_settings() {
        let config = parsed(&[]).unwrap();
        assert_eq!(config.engine.principal.to_string(), "keyserver ks-1");
        assert_eq!(config.listen.port(), canal_wire::keyrpc::PORT);
        assert_eq!(config.controller.addresses, ["127.0.0.1:15012"]);
        let config = parsed(&[
            "--tenant",
            "alpha",
            "--tls-dir",
            "/x",
            "--workers",
            "3",
            "--rsa-open-ms",
            "0",
        ])
        .unwrap();
        assert_eq!(config.engine.principal.to_string(), "keyserver alpha/ks-1");
        assert_eq!(
            (config.engine.pool.workers, config.engine.pool.linger),
            (3, Duration::ZERO)
        );
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
