//! `canal-node`: parses flags, and runs the node proxy in a runtime. The node proxy itself is
//! `canal-node-proxy`. Start at [`main`].

#![forbid(unsafe_code)]

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use canal_keyserver_client::ServerAddress;
use canal_model::ids::{AzName, NodeName};
use canal_node_proxy::config::{self, CaptureChoice, NodeConfig, PodLimits};
use canal_node_proxy::{capture, node, pod_reconciler};
use canal_runtime::logging;
use canal_runtime::metrics::show_legacy_names;
use canal_southbound_client::controller_client::ControllerEndpoint;
use canal_telemetry::access_log::LogSink;
use clap::{Parser, ValueEnum};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The node proxy of Canal: captures the connections of this node's pods and carries them to the
/// mesh's gateways with the pods' own identities. Runs as root on every node.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Flags {
    /// This node's name, as in the pods' spec.nodeName.
    #[arg(long, env = "CANAL_NODE")]
    node: NodeName,
    /// The availability zone of this node; gateways of the same zone are tried first.
    #[arg(long)]
    az: AzName,
    /// Name of this cluster in metrics and in the metadata sent to peers.
    #[arg(long, default_value = "")]
    cluster: String,
    /// The controller, as https://HOST:PORT; repeat for several.
    #[arg(long = "controller", required = true, value_parser = ControllerEndpoint::parse_address)]
    controllers: Vec<String>,
    /// PEM file of the CA that signed the controller's certificate.
    #[arg(long)]
    root_ca: PathBuf,
    /// File with the bearer token by which the controller identifies this node.
    #[arg(long)]
    token_file: PathBuf,
    /// A key server, as AZ=NAME@IP:PORT; repeat for several. Those of this node's AZ are tried
    /// first.
    #[arg(long = "key-server")]
    key_servers: Vec<ServerAddress>,
    /// Directory of the last good configuration and the certificates.
    #[arg(long)]
    data_dir: PathBuf,
    /// The directory with one JSON file per pod of this node.
    #[arg(long)]
    pods_dir: PathBuf,
    /// How to capture: auto falls back to nftables, with a warning, if the kernel refuses BPF.
    #[arg(long, value_enum, default_value_t = Captures::Auto)]
    capture: Captures,
    /// Where capture is pinned while no proxy runs: a directory on a bpffs, or one where a bpffs
    /// may be mounted. [default:
    /// /sys/fs/bpf/canal-node-NODE if that is a bpffs, else DATA_DIR/bpffs]
    #[arg(long)]
    bpf_pin_dir: Option<PathBuf>,
    /// Release all pods of this node (their connections leave uncaptured) and all guarded
    /// interfaces, and exit. For uninstalling.
    #[arg(long)]
    release: bool,
    /// Worker threads; 0 is one per core.
    #[arg(long, default_value_t = 0)]
    workers: usize,
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
    /// File for the access log; default is stdout.
    #[arg(long)]
    access_log: Option<PathBuf>,
    /// Log filter for stderr, e.g. info or info,canal_node_proxy=debug.
    #[arg(long, default_value = "info")]
    log: String,
    /// How long open connections may continue after SIGTERM, in seconds.
    // As Kubernetes' default `terminationGracePeriodSeconds`.
    #[arg(long, default_value_t = 30)]
    drain_seconds: u64,
    /// Authorize plaintext connections from this node's own processes to pods' probe ports like all
    /// others. A kubelet's probes then fail unless policies allow them.
    #[arg(long)]
    no_node_probes: bool,
    /// JSON file with the containers of this host that have their own interface and no node proxy:
    /// each may send only with its own MAC and addresses. Give it to this program or to the host's
    /// canal-edge, not to both.
    #[arg(long)]
    interface_bindings: Option<PathBuf>,
    /// Maximum captured connections per pod.
    #[arg(long, default_value_t = PodLimits::default().outbound)]
    max_outbound: u64,
    /// Maximum tunnels into a pod, and the same number of plaintext connections if policies apply
    /// to them.
    #[arg(long, default_value_t = PodLimits::default().inbound)]
    max_inbound: u64,
    /// Maximum HBONE connections into a pod.
    #[arg(long, default_value_t = PodLimits::default().hbone)]
    max_hbone: u64,
    /// Maximum bytes that the tunnels of all pods together hold for readers that do not read. Each
    /// tenant's share of them is in its Tenant object (nodeBufferBytes).
    #[arg(long, default_value_t = config::BUFFER_BYTES, value_parser = clap::value_parser!(u64).range(config::BUFFER_BYTES_MIN..))]
    max_buffer_bytes: u64,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Captures {
    Auto,
    Bpf,
    Nft,
}

impl Flags {
    fn config(self) -> NodeConfig {
        NodeConfig {
            node: self.node,
            az: self.az,
            cluster: self.cluster,
            controller: ControllerEndpoint {
                addresses: self.controllers,
                root: self.root_ca,
                token: self.token_file,
            },
            key_servers: self.key_servers,
            data_dir: self.data_dir,
            pods_dir: self.pods_dir,
            capture: match self.capture {
                Captures::Auto => CaptureChoice::Auto,
                Captures::Bpf => CaptureChoice::Bpf,
                Captures::Nft => CaptureChoice::Nft,
            },
            pin_dir: self.bpf_pin_dir,
            workers: self.workers,
            admin: self.admin_addr,
            metrics: self.metrics_addr,
            readiness: self.readiness_addr,
            access_log: self.access_log.map_or(LogSink::Stdout, LogSink::File),
            trusts_node: !self.no_node_probes,
            interface_bindings: self.interface_bindings,
            drain_limit: Duration::from_secs(self.drain_seconds),
            limits: PodLimits {
                outbound: self.max_outbound,
                inbound: self.max_inbound,
                hbone: self.max_hbone,
            },
            buffer_bytes: self.max_buffer_bytes,
        }
    }
}

fn main() -> anyhow::Result<ExitCode> {
    let flags = Flags::parse();
    let level = logging::start(&flags.log).context("--log")?;
    if flags.legacy_metric_names {
        show_legacy_names();
    }
    let (release, config) = (flags.release, flags.config());
    if release {
        let found = pod_reconciler::scan(&config.pods_dir).unwrap_or_default();
        let pods: Vec<_> = found.pods.into_iter().map(|(_, pod, _)| pod).collect();
        capture::release_all(&node::pin_dir(&config), &pods).context("--release")?;
        return Ok(ExitCode::SUCCESS);
    }
    // For control work only; traffic runs on the workers' own threads.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // Two, so that one that is busy does not stop the others' timers.
        .worker_threads(2)
        .enable_all()
        .build()
        .context("starting the runtime; fix: raise the limits of threads and open files (ulimit -u, ulimit -n)")?;
    let clean = runtime.block_on(canal_node_proxy::run(config, level))?;
    // Only tasks that block a thread are left, such as a DNS lookup. They must not delay the end.
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(if clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(more: &[&str]) -> Result<Flags, clap::Error> {
        let required = [
            ["canal-node", "--node=n1", "--az=az1"].as_slice(),
            &[
                "--controller=https://c:1",
                "--root-ca=ca",
                "--token-file=token",
                "--data-dir=data",
                "--pods-dir=pods",
            ],
        ];
        Flags::try_parse_from(required.concat().into_iter().chain(more.iter().copied()))
    }

    #[test]
    fn the_operator_sets_the_budget_of_stalled_bytes() {
        assert_eq!(
            flags(&[]).unwrap().config().buffer_bytes,
            config::BUFFER_BYTES
        );
        assert_eq!(
            flags(&["--max-buffer-bytes=1048576"])
                .unwrap()
                .config()
                .buffer_bytes,
            1 << 20
        );
        assert!(
            flags(&["--max-buffer-bytes=65535"]).is_err(),
            "no stream could hold its window"
        );
    }
}
