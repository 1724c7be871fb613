//! The command line of the gateway: flags, and their conversion to [`GatewayProcessConfig`]. This
//! module starts nothing.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use canal_gateway_engine::{
    BUFFER_BYTES_MIN, CloudTierConfig, ForwardedHeaders, GatewayConfig, GatewayLimits,
    PlainListener,
};
use canal_keyserver_client::ServerAddress;
use canal_model::ids::{AzName, BackendName, ReplicaName};
use canal_net::sys::{SourceAddresses, cores};
use canal_redirector_agent::kernel::default_pin_dir;
use canal_southbound_client::controller_client::ControllerEndpoint;
use canal_telemetry::access_log::LogSink;
use canal_wire::tier::{TUNNEL_PORT, replica_address6};
use clap::{ArgGroup, Parser};

use crate::process::{GatewayProcessConfig, ProgramSource};
use crate::tier::TierConfig;

/// A gateway replica of Canal: does the Layer-7 work for all tenants that the controller
/// configures.
#[derive(Debug, Parser)]
#[command(version, about, group = ArgGroup::new("feed").required(true))]
#[command(after_help = "Examples:
  canal-gateway --replica gw-1 --az az1 --controller https://250.1.0.1:15012 --root-ca root.pem --token-file token --data-dir /var/lib/canal
  canal-gateway --replica bench --az az1 --snapshot compiled --data-dir /tmp/gw --plain 127.0.0.1:8080=alpha/default/web:80")]
pub struct GatewayFlags {
    /// This replica's name, as in the GatewayReplica objects.
    #[arg(long, env = "CANAL_REPLICA")]
    replica: ReplicaName,
    /// The availability zone of this replica.
    #[arg(long)]
    az: AzName,
    /// Prefer endpoints of this AZ as long as one of them is ready.
    #[arg(long)]
    prefer_az: bool,
    /// The controller, as https://HOST:PORT; repeat for several.
    #[arg(long = "controller", group = "feed", requires = "root_ca", requires = "token_file", value_parser = ControllerEndpoint::parse_address)]
    controllers: Vec<String>,
    /// PEM file of the CA that signed the controller's certificate.
    #[arg(long)]
    root_ca: Option<PathBuf>,
    /// File with the bearer token by which the controller identifies this replica.
    #[arg(long)]
    token_file: Option<PathBuf>,
    /// A key server, as AZ=NAME@IP:PORT; repeat for several. Those of --az are tried first.
    #[arg(long = "key-server", requires = "controllers")]
    key_servers: Vec<ServerAddress>,
    /// Serve this compiled snapshot (`canal compile`) without a controller. HBONE is off, because
    /// nothing issues certificates.
    #[arg(long, group = "feed")]
    snapshot: Option<PathBuf>,
    /// Directory of the last good configuration and the certificates.
    #[arg(long)]
    data_dir: PathBuf,
    /// Address on which HBONE is accepted.
    #[arg(long, default_value = "[::]:15008")]
    hbone_addr: SocketAddr,
    /// A listener without TLS for one service: ADDRESS:PORT=TENANT/NAMESPACE/SERVICE:PORT; repeat
    /// for several.
    #[arg(long)]
    plain: Vec<PlainListener>,
    /// Worker threads; 0 is one per core.
    #[arg(long, default_value_t = 0)]
    workers: usize,
    /// Let workers move between cores.
    #[arg(long)]
    no_pin: bool,
    /// Read-only pages for operators: /metrics, /logging (GET), /version. /config_dump, /tap,
    /// /logging (POST) and /quitquitquit are on the unix socket admin.sock in --data-dir.
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
    /// File for the access log, or `off`; default is stdout.
    #[arg(long)]
    access_log: Option<PathBuf>,
    /// Log filter for stderr, e.g. info or info,canal_gateway_engine=debug.
    #[arg(long, default_value = "info")]
    pub(crate) log: String,
    /// How long requests may continue after SIGTERM, in seconds.
    // As Kubernetes' default `terminationGracePeriodSeconds`.
    #[arg(long, default_value_t = 30)]
    drain_seconds: u64,
    /// Maximum accepted connections of the process.
    #[arg(long, default_value_t = GatewayLimits::default().connections)]
    max_connections: u64,
    /// Maximum accepted connections of one tenant.
    #[arg(long, default_value_t = GatewayLimits::default().tenant_connections)]
    max_tenant_connections: u64,
    /// Maximum requests in flight in the process.
    #[arg(long, default_value_t = GatewayLimits::default().requests)]
    max_requests: u64,
    /// Maximum requests in flight of one tenant.
    #[arg(long, default_value_t = GatewayLimits::default().tenant_requests)]
    max_tenant_requests: u64,
    /// Maximum bytes that the streams of all tenants together hold for readers that do not read.
    /// Each tenant's share of them is in its Tenant object (gatewayBufferBytes).
    #[arg(long, default_value_t = GatewayLimits::default().buffer_bytes, value_parser = clap::value_parser!(u64).range(BUFFER_BYTES_MIN..))]
    max_buffer_bytes: u64,
    /// Send the client's identity to applications in x-forwarded-client-cert. A client's own
    /// x-forwarded-client-cert never reaches them.
    #[arg(long)]
    forward_client_cert: bool,
    /// Let a client's own x-forwarded-proto reach applications, for tenants with a pod as ingress.
    /// Otherwise the gateway sets it to the client's protocol.
    #[arg(long)]
    keep_forwarded_proto: bool,
    /// Be a replica of this backend of the cloud tier: sessions come from edges through the
    /// redirector, which this process attaches to --device. Without it the gateway serves on its
    /// own addresses, as in the GatewayReplica objects.
    #[arg(
        long,
        requires = "underlay",
        requires = "controllers",
        help_heading = "Cloud tier"
    )]
    backend: Option<BackendName>,
    /// This replica's underlay address, from 250.0.0.0/8; endpoints are dialed from it.
    #[arg(long, requires = "backend", help_heading = "Cloud tier")]
    underlay: Option<Ipv4Addr>,
    /// The device that has the underlay address.
    #[arg(long, default_value = "eth0", help_heading = "Cloud tier")]
    device: String,
    /// Directory where the redirector's maps are pinned; the machine's bpffs if it is mounted, else
    /// a folder in --data-dir.
    #[arg(long, help_heading = "Cloud tier")]
    pin_dir: Option<PathBuf>,
    /// Tunnels to the edge that flows share; default is 10 per core. 0 gives each flow its own
    /// source port.
    #[arg(long, value_parser = clap::value_parser!(u16).range(0..=i64::from(u16::MAX - TUNNEL_PORT)), help_heading = "Cloud tier")]
    tunnels: Option<u16>,
    /// Largest inner packet of the tier, in bytes: the underlay's MTU minus 50.
    // For an underlay with Ethernet's 1,500. IPv6 needs 1,280 (RFC 8200 §5), and 65,485 is the
    // largest IP packet less the 50.
    #[arg(long, default_value_t = 1450, value_parser = clap::value_parser!(u32).range(1280..=65_485), help_heading = "Cloud tier")]
    tier_mtu: u32,
    /// A sysfs that shows the devices of this process's network namespace; receive packet steering
    /// is read there.
    #[arg(long, default_value = "/sys", help_heading = "Cloud tier")]
    sysfs: PathBuf,
    /// Address on which plain connections inside the tier are accepted. Only the redirector leads
    /// there.
    #[arg(long, default_value = "[::]:15009", help_heading = "Cloud tier")]
    plain_addr: SocketAddr,
    /// Address on which the tenants' DNS queries are accepted. The port must be 53, which clients
    /// use.
    #[arg(long, default_value = "[::]:53", help_heading = "Cloud tier")]
    dns_addr: SocketAddr,
    /// How long new sessions are still accepted after SIGTERM, while the controller moves the
    /// service's buckets away, in milliseconds.
    // Replicas and edges report 200 ms apart while tables move, so that ten reports fit. Nobody
    // measured this value.
    #[arg(long, default_value_t = 2000, help_heading = "Cloud tier")]
    drain_grace_ms: u64,
}

impl GatewayFlags {
    /// Returns the directory of the last good configuration, the certificates, and the operators'
    /// unix socket.
    pub fn data_dir(&self) -> &Path {
        &self.data_dir
    }

    fn tier(&self) -> Option<TierConfig> {
        let (backend, underlay) = (self.backend.clone()?, self.underlay?);
        let most = u16::MAX - TUNNEL_PORT;
        Some(TierConfig {
            backend,
            az: self.az.clone(),
            underlay,
            device: self.device.clone(),
            sysfs: self.sysfs.clone(),
            pin_dir: self
                .pin_dir
                .clone()
                .unwrap_or_else(|| default_pin_dir(self.replica.as_str(), &self.data_dir)),
            tunnels: self
                .tunnels
                .unwrap_or_else(|| u16::try_from(10 * cores().len()).unwrap_or(most).min(most)),
            mtu: self.tier_mtu,
            dns: self.dns_addr,
            grace: Duration::from_millis(self.drain_grace_ms),
        })
    }

    /// Returns the settings that the flags define.
    pub(crate) fn config(self) -> GatewayProcessConfig {
        let tier = self.tier();
        let sources = |t: &TierConfig| SourceAddresses {
            v4: Some(t.underlay),
            v6: Some(replica_address6(t.underlay)),
        };
        let feed = match (self.snapshot, self.root_ca, self.token_file) {
            (Some(file), ..) => ProgramSource::Snapshot(file),
            // clap requires both files with --controller, so the defaults are never used.
            (None, root, token) => ProgramSource::Controller(ControllerEndpoint {
                addresses: self.controllers,
                root: root.unwrap_or_default(),
                token: token.unwrap_or_default(),
            }),
        };
        let access_log = match self.access_log {
            // The default is standard output; `off` stands for no log.
            None => Some(LogSink::Stdout),
            Some(p) if p.as_os_str() == "off" => None,
            Some(p) => Some(LogSink::File(p)),
        };
        // Without a controller there are no certificates for HBONE.
        let hbone = if matches!(feed, ProgramSource::Controller(_)) {
            vec![self.hbone_addr]
        } else {
            Vec::new()
        };
        let limits = GatewayLimits {
            connections: self.max_connections,
            tenant_connections: self.max_tenant_connections,
            requests: self.max_requests,
            tenant_requests: self.max_tenant_requests,
            buffer_bytes: self.max_buffer_bytes,
            ..GatewayLimits::default()
        };
        GatewayProcessConfig {
            engine: GatewayConfig {
                replica: self.replica.to_string(),
                // Without the flag, endpoints of all AZs are equal.
                az: self.prefer_az.then_some(self.az.clone()),
                workers: self.workers,
                pin: !self.no_pin,
                hbone,
                plain: self.plain,
                tier: tier.as_ref().map(|t| CloudTierConfig {
                    plain: self.plain_addr,
                    sources: sources(t),
                }),
                forwarded: ForwardedHeaders {
                    client_cert: self.forward_client_cert,
                    keeps_proto: self.keep_forwarded_proto,
                },
                limits,
                ..GatewayConfig::default()
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
