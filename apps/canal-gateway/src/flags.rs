//! The command line: what an operator may say, and the settings it means. Nothing is started here.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use canal_gateway_engine::{EngineConfig, ForwardedHeaders, Limits, Plain, Tier};
use canal_kit::controller::Controller;
use canal_kit::keys::ServerAddress;
use canal_kit::log::Sink;
use canal_kit::sys::{Sources, cores};
use canal_model::ids::{AzName, BackendName, ReplicaName};
use canal_redirector::kernel::default_pin_dir;
use canal_wire::tier::{TUNNEL_PORT, replica_address6};
use clap::{ArgGroup, Parser};

use crate::process::{Config, Feed};
use crate::tier::TierConfig;

/// A gateway replica of Canal: does the Layer-7 work for all tenants it is told of.
#[derive(Debug, Parser)]
#[command(version, about, group = ArgGroup::new("feed").required(true))]
#[command(after_help = "Examples:
  canal-gateway --replica gw-1 --az az1 --controller https://250.1.0.1:15012 --root-ca root.pem --token-file token --data-dir /var/lib/canal
  canal-gateway --replica bench --az az1 --snapshot compiled --data-dir /tmp/gw --plain 127.0.0.1:8080=alpha/default/web:80")]
pub struct GatewayFlags {
    /// This replica's name, as in the Gateway objects.
    #[arg(long, env = "CANAL_REPLICA")]
    replica: ReplicaName,
    /// The availability zone this replica is in.
    #[arg(long)]
    az: AzName,
    /// Prefer endpoints of the own AZ while one of them is ready.
    #[arg(long)]
    prefer_az: bool,
    /// The controller, as https://HOST:PORT; repeat for several.
    #[arg(long = "controller", group = "feed", requires = "root_ca", requires = "token_file", value_parser = controller_address)]
    controllers: Vec<String>,
    /// PEM file of the CA that signed the controller's certificate.
    #[arg(long)]
    root_ca: Option<PathBuf>,
    /// File with the bearer token that the controller knows this replica by.
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// A key server, as AZ=NAME@IP:PORT; repeat for several. Those of --az are asked first.
    #[arg(long = "key-server", requires = "controllers")]
    key_servers: Vec<ServerAddress>,
    /// Serve this compiled snapshot (`canal compile`) and know no controller. HBONE is off: there is nobody to give certificates.
    #[arg(long, group = "feed")]
    snapshot: Option<PathBuf>,
    /// Where the last good configuration and the certificates are kept.
    #[arg(long)]
    data_dir: PathBuf,
    /// Where HBONE is accepted.
    #[arg(long, default_value = "[::]:15008")]
    hbone_addr: SocketAddr,
    /// A listener without TLS for one service: ADDRESS:PORT=TENANT/NAMESPACE/SERVICE:PORT; repeat for several.
    #[arg(long)]
    plain: Vec<Plain>,
    /// Worker threads; 0 is one per core.
    #[arg(long, default_value_t = 0)]
    workers: usize,
    /// Let workers move between cores.
    #[arg(long)]
    no_pin: bool,
    /// Operators' pages that change nothing: /metrics, /logging (GET), /version. /config_dump, /tap, /logging (POST) and /quitquitquit are on
    /// the unix socket admin.sock in --data-dir.
    #[arg(long, default_value = "127.0.0.1:15000")]
    admin_addr: SocketAddr,
    /// /metrics: names every tenant; give an address of the network that only operators reach.
    #[arg(long, default_value = "0.0.0.0:15020")]
    metrics_addr: SocketAddr,
    /// /healthz/ready.
    #[arg(long, default_value = "0.0.0.0:15021")]
    readiness_addr: SocketAddr,
    /// File for the access log, or `off`; stdout if not given.
    #[arg(long)]
    access_log: Option<PathBuf>,
    /// What to tell on stderr, e.g. info or info,canal_gateway_engine=debug.
    #[arg(long, default_value = "info")]
    pub(crate) log: String,
    /// How long requests may go on after SIGTERM, in seconds.
    #[arg(long, default_value_t = 30)]
    drain_seconds: u64,
    /// Accepted connections of the process.
    #[arg(long, default_value_t = Limits::default().connections)]
    max_connections: u64,
    /// Accepted connections of one tenant.
    #[arg(long, default_value_t = Limits::default().tenant_connections)]
    max_tenant_connections: u64,
    /// Requests in flight in the process.
    #[arg(long, default_value_t = Limits::default().requests)]
    max_requests: u64,
    /// Requests in flight of one tenant.
    #[arg(long, default_value_t = Limits::default().tenant_requests)]
    max_tenant_requests: u64,
    /// Tell applications who the client is, in x-forwarded-client-cert. A client's own x-forwarded-client-cert never reaches them.
    #[arg(long)]
    forward_client_cert: bool,
    /// Let a client's own x-forwarded-proto reach applications, for tenants whose ingress is a pod. Else it says what the client spoke with
    /// the gateway.
    #[arg(long)]
    keep_forwarded_proto: bool,
    /// Be a replica of this backend of the cloud tier: sessions come from edges through the redirector, which this process keeps on
    /// --device. Without it the gateway serves on its own addresses, as Gateway objects say.
    #[arg(long, requires = "underlay", requires = "controllers", help_heading = "Cloud tier")]
    backend: Option<BackendName>,
    /// This replica's underlay address, from 250.0.0.0/8; endpoints are dialled from it.
    #[arg(long, requires = "backend", help_heading = "Cloud tier")]
    underlay: Option<Ipv4Addr>,
    /// The device that has the underlay address.
    #[arg(long, default_value = "eth0", help_heading = "Cloud tier")]
    device: String,
    /// Where the redirector's maps are pinned; the machine's bpffs if it is mounted, else a folder in --data-dir.
    #[arg(long, help_heading = "Cloud tier")]
    pin_dir: Option<PathBuf>,
    /// Tunnels to the edge that flows share; 10 per core if not given, 0: each flow has a source port of its own.
    #[arg(long, value_parser = clap::value_parser!(u16).range(0..=i64::from(u16::MAX - TUNNEL_PORT)), help_heading = "Cloud tier")]
    tunnels: Option<u16>,
    /// Largest inner packet of the tier, bytes: the underlay's MTU less 50.
    #[arg(long, default_value_t = 1450, value_parser = clap::value_parser!(u32).range(1280..=65_485), help_heading = "Cloud tier")]
    tier_mtu: u32,
    /// Where plain connections inside the tier are accepted. Only the redirector leads there.
    #[arg(long, default_value = "[::]:15009", help_heading = "Cloud tier")]
    plain_addr: SocketAddr,
    /// Where the tenants' DNS queries are taken. The port must be the one that clients ask, 53.
    #[arg(long, default_value = "[::]:53", help_heading = "Cloud tier")]
    dns_addr: SocketAddr,
    /// How long new sessions are still taken after SIGTERM, while the controller moves the service's buckets away, in milliseconds.
    #[arg(long, default_value_t = 2000, help_heading = "Cloud tier")]
    drain_grace_ms: u64,
}

fn controller_address(given: &str) -> Result<String, String> {
    let address = given.strip_prefix("https://").unwrap_or(given).trim_end_matches('/');
    match address.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok_and(|p| p > 0) => Ok(address.to_string()),
        _ => Err("write https://HOST:PORT".into()),
    }
}

impl GatewayFlags {
    fn tier(&self) -> Option<TierConfig> {
        let (backend, underlay) = (self.backend.clone()?, self.underlay?);
        let most = u16::MAX - TUNNEL_PORT;
        Some(TierConfig {
            backend,
            az: self.az.clone(),
            underlay,
            device: self.device.clone(),
            pin_dir: self.pin_dir.clone().unwrap_or_else(|| default_pin_dir(self.replica.as_str(), &self.data_dir)),
            tunnels: self.tunnels.unwrap_or_else(|| u16::try_from(10 * cores().len()).unwrap_or(most).min(most)),
            mtu: self.tier_mtu,
            dns: self.dns_addr,
            grace: Duration::from_millis(self.drain_grace_ms),
        })
    }

    /// The settings they mean.
    pub(crate) fn config(self) -> Config {
        let tier = self.tier();
        let sources = |t: &TierConfig| Sources { v4: Some(t.underlay), v6: Some(replica_address6(t.underlay)) };
        let feed = match (self.snapshot, self.root_ca, self.token_file) {
            (Some(file), ..) => Feed::Snapshot(file),
            (None, root, token) => Feed::Controller(Controller {
                addresses: self.controllers,
                root: root.unwrap_or_default(),
                token: token.unwrap_or_default(),
            }),
        };
        let access_log = match self.access_log {
            None => Some(Sink::Stdout),
            Some(p) if p.as_os_str() == "off" => None,
            Some(p) => Some(Sink::File(p)),
        };
        let hbone = if matches!(feed, Feed::Controller(_)) { vec![self.hbone_addr] } else { Vec::new() };
        let limits = Limits {
            connections: self.max_connections,
            tenant_connections: self.max_tenant_connections,
            requests: self.max_requests,
            tenant_requests: self.max_tenant_requests,
            ..Limits::default()
        };
        Config {
            engine: EngineConfig {
                replica: self.replica.to_string(),
                az: self.prefer_az.then_some(self.az.clone()),
                workers: self.workers,
                pin: !self.no_pin,
                hbone,
                plain: self.plain,
                tier: tier.as_ref().map(|t| Tier { plain: self.plain_addr, sources: sources(t) }),
                forwarded: ForwardedHeaders { client_cert: self.forward_client_cert, keeps_proto: self.keep_forwarded_proto },
                limits,
                ..EngineConfig::default()
            },
            tier,
            az: self.az,
            name: self.replica,
            key_servers: self.key_servers,
            feed,
            data_dir: self.data_dir,
            admin: self.admin_addr,
            metrics: self.metrics_addr,
            readiness: self.readiness_addr,
            access_log,
            drain_limit: Duration::from_secs(self.drain_seconds),
        }
    }
}
