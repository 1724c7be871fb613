//! `canal-edge`: parses flags, and runs the edge's agent in a runtime. The agent itself is
//! `canal-edge-agent`. Start at [`main`].

#![forbid(unsafe_code)]

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use canal_edge_agent::config::{EdgeConfig, EdgeDeviceConfig, TUNNELS_PER_CORE, VXLAN_OVERHEAD};
use canal_edge_agent::{device, kernel};
use canal_model::ids::{AzName, EdgeName};
use canal_net::sys;
use canal_runtime::logging;
use canal_runtime::metrics::show_legacy_names;
use canal_southbound_client::controller_client::ControllerEndpoint;
use clap::Parser;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The edge of Canal's cloud tier in one availability zone: carries tenants' packets to the gateway
/// replicas and back. Its program forwards in the kernel, with or without this process. Runs as
/// root.
#[derive(Debug, Parser)]
#[command(version, about)]
#[command(after_help = "Examples:
  canal-edge --edge edge-1 --az az1 --address 250.1.0.1 --controller https://250.0.0.1:15012 --root-ca root.pem --token-file token --data-dir /var/lib/canal
  canal-edge --edge edge-1 --az az1 --address 250.1.0.1 --data-dir /var/lib/canal --detach")]
struct Flags {
    /// This edge's name.
    #[arg(long, env = "CANAL_EDGE")]
    edge: EdgeName,
    /// The availability zone of this edge.
    #[arg(long)]
    az: AzName,
    /// This host's underlay address.
    #[arg(long)]
    address: Ipv4Addr,
    /// The tunnel end that all edges of the AZ share: an address of this host's loopback, to which
    /// routers have a route through each edge. [default: --address, which is for an AZ with one
    /// edge]
    #[arg(long)]
    anycast: Option<Ipv4Addr>,
    /// The device by which all packets arrive and leave.
    #[arg(long, default_value = "eth0")]
    device: String,
    /// Where the maps are pinned while no agent runs: a directory on a bpffs, or one where a bpffs
    /// may be mounted. [default:
    /// /sys/fs/bpf/canal-edge-EDGE if that is a bpffs, else DATA_DIR/bpffs]
    #[arg(long)]
    pin_dir: Option<PathBuf>,
    /// The controller, as https://HOST:PORT; repeat for several.
    #[arg(long = "controller", required_unless_present = "detach", value_parser = ControllerEndpoint::parse_address)]
    controllers: Vec<String>,
    /// PEM file of the CA that signed the controller's certificate.
    #[arg(long, required_unless_present = "detach")]
    root_ca: Option<PathBuf>,
    /// File with the bearer token by which the controller identifies this edge.
    #[arg(long, required_unless_present = "detach")]
    token_file: Option<PathBuf>,
    /// Directory of the last good configuration.
    #[arg(long)]
    data_dir: PathBuf,
    /// Source ports, and so sessions on the underlay, toward each replica. [default: those that the
    /// replica's receive hash spreads over its cores, 10 per core of the replica; until it has
    /// named any, 10 per core of this host]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=25_000))]
    tunnels: Option<u16>,
    /// Give each flow its own source port, as RFC 7348 recommends, instead of sharing the tunnels.
    #[arg(long)]
    no_aggregate: bool,
    /// Largest inner packet, in bytes; larger ones are answered by ICMP. [default: the device's MTU
    /// - 50]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1280..=65_535))]
    mtu: Option<u32>,
    /// JSON file with the containers of this host that have no node proxy and their own interface;
    /// read again when it changes. The packets that each may send are checked on its interface: see
    /// docs/security.md.
    #[arg(long)]
    interface_bindings: Option<PathBuf>,
    /// Remove program and maps and exit: the edge no longer forwards anything. For uninstalling;
    /// stop the agent first.
    #[arg(long)]
    detach: bool,
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
    legacy_metric_names: bool,
    /// /healthz/ready.
    #[arg(long, default_value = "0.0.0.0:15021")]
    readiness_addr: SocketAddr,
    /// Log filter for stderr, e.g. info or info,canal_edge_agent=debug.
    #[arg(long, default_value = "info")]
    log: String,
}

impl Flags {
    /// Returns the settings that the flags define. Reads properties of the machine if a default
    /// depends on them.
    fn config(self) -> anyhow::Result<EdgeConfig> {
        let mtu = match self.mtu {
            Some(mtu) => mtu,
            // Detaching needs no MTU.
            None if self.detach => 0,
            None => device::mtu(&self.device)
                .with_context(|| format!("reading the MTU of {}; fix: name the device of the underlay in --device, or set --mtu", self.device))?
                .checked_sub(VXLAN_OVERHEAD)
                // IPv6 needs a link that carries 1280 bytes (RFC 8200 §5).
                .filter(|mtu| *mtu >= 1280)
                .with_context(|| format!("the MTU of {} leaves less than 1280 bytes inside VXLAN; fix: raise it, or set --mtu", self.device))?,
        };
        // The multiplication below saturates as well, so a huge machine gets the largest number.
        let cores = u16::try_from(sys::cores().len()).unwrap_or(u16::MAX);
        let pin_dir = self.pin_dir.unwrap_or_else(|| {
            canal_offload::default_tier_pin_dir("canal-edge", self.edge.as_str(), &self.data_dir)
        });
        Ok(EdgeConfig {
            device: EdgeDeviceConfig {
                device: self.device,
                pin_dir,
                // Replicas answer to the address to which their routers send, whichever edge of the
                // AZ it is.
                address: self.anycast.unwrap_or(self.address),
                tunnels: self
                    .tunnels
                    .unwrap_or(cores.saturating_mul(TUNNELS_PER_CORE)),
                aggregate: !self.no_aggregate,
                mtu,
            },
            underlay: self.address,
            has_own_tunnels: self.tunnels.is_some(),
            edge: self.edge,
            az: self.az,
            controller: ControllerEndpoint {
                addresses: self.controllers,
                // clap requires both files except with --detach, which connects to no controller.
                root: self.root_ca.unwrap_or_default(),
                token: self.token_file.unwrap_or_default(),
            },
            data_dir: self.data_dir,
            admin: self.admin_addr,
            metrics: self.metrics_addr,
            readiness: self.readiness_addr,
            interface_bindings: self.interface_bindings,
        })
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let flags = Flags::parse();
    let level = logging::start(&flags.log).context("--log")?;
    if flags.legacy_metric_names {
        show_legacy_names();
    }
    let (detach, config) = (flags.detach, flags.config()?);
    if detach {
        kernel::detach(&config.device).context("--detach")?;
        return Ok(ExitCode::SUCCESS);
    }
    // For control work only: packets never leave the kernel, and probes have a thread of their own.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // Two, so that one that is busy does not stop the others' timers.
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the runtime; fix: raise the limits of threads and open files (ulimit -u, ulimit -n)")?;
    let clean = runtime.block_on(canal_edge_agent::run(config, level))?;
    // Only tasks that block a thread are left, such as a DNS lookup. They must not delay the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(if clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(3)
    })
}
