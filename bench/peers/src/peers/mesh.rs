//! A real controller on the load's core, and gateways that it configures: with certificates, so
//! that they speak HBONE.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use canal_bench_peers::canal::{self, BenchListener};
use canal_bench_peers::origin;
use canal_bench_peers::process::{LOAD_CORE, PROXY_CORE, PinnedProcess};
use sha2::{Digest, Sha256};

use super::canal::configure;
use super::{PeerFolders, loopback};
use crate::tls_origin;

/// Address of such a gateway's HBONE listener in the tenant.
pub(super) const HBONE: SocketAddr =
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 99, 255, 1)), 15_008);
/// Address of its plain listener for service `s0`.
pub(super) const PLAIN_LISTENER: SocketAddr =
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 18_085);
/// The service whose only pod is behind mTLS.
pub(crate) const SECURE_SERVICE: &str = "10.79.255.1:80";

/// Token of the gateway. Nothing else reaches this network.
const TOKEN: &str = "bench";
/// Shares of the tenant: its 10,000 services with 100,000 routes exceed the default ones.
const SHARES: &str = "shares: {configurationBytes: 33554432, compiledBytes: 268435456, compiledResources: 200000, routeTableBytes: 1073741824}";
/// A gateway has its configuration and certificates within this time.
/// Nobody measured this value; it only ends a start that failed.
const READY_MAX: Duration = Duration::from_secs(30);

/// A running controller, with the files that its gateways need.
pub(super) struct BenchMesh {
    dir: PathBuf,
    controller: PinnedProcess,
}

impl BenchMesh {
    pub(super) fn start(
        folders: &PeerFolders,
        name: &str,
        size: (usize, usize),
    ) -> anyhow::Result<Self> {
        let dir = folders.dir.join(format!("mesh-{name}"));
        configure(
            &dir.join("config/bench"),
            &(canal::tenant("bench", 1, SHARES) + &more()),
            size,
        )?;
        folders
            .certificates
            .give_authority(&dir.join("authorities"))?;
        // The controller's list has hashes of tokens only.
        let hash: String = Sha256::digest(TOKEN)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        std::fs::write(
            dir.join("principals.yaml"),
            format!("- {{tokenSha256: {hash}, kind: gateway, name: bench, az: az1}}\n"),
        )?;
        std::fs::write(dir.join("token"), TOKEN)?;
        let mut argv = vec![folders.now.controller()?];
        let folder_flags = [
            ("--data-dir", "data"),
            ("--config-dir", "config"),
            ("--principals", "principals.yaml"),
            ("--infra-dir", "infra"),
            ("--ca-dir", "authorities"),
        ];
        for (flag, file) in folder_flags {
            argv.extend([
                flag.to_owned(),
                dir.join(file).to_string_lossy().into_owned(),
            ]);
        }
        // Both controllers run at the same time, so each has a port.
        let listen = loopback(if name == "large" { 18_101 } else { 18_100 });
        let rest = format!(
            "--listen {listen} --admin-addr 127.0.0.1:0 --metrics-addr 127.0.0.1:0 --log warn"
        );
        argv.extend(rest.split(' ').map(str::to_owned));
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        // The controller shares the load's core, so that it takes no time from the proxy's.
        let controller = PinnedProcess::start(
            &argv,
            LOAD_CORE,
            listen,
            &folders.dir.join(format!("controller-{name}.log")),
        )?;
        // CPU time after the start must not count as the proxy's.
        controller.settle()?;
        Ok(Self { dir, controller })
    }

    /// Starts a gateway that has only its token, and waits until it is ready.
    pub(super) fn gateway(
        &self,
        folders: &PeerFolders,
        data: &Path,
        address: SocketAddr,
    ) -> anyhow::Result<PinnedProcess> {
        let (controller, hbone) = (
            format!("https://{}", self.controller.address),
            HBONE.to_string(),
        );
        let [root, token] = ["infra/root.pem", "token"]
            .map(|file| self.dir.join(file).to_string_lossy().into_owned());
        let feed = [
            ["--controller", &controller],
            ["--root-ca", &root],
            ["--token-file", &token],
            ["--hbone-addr", &hbone],
            ["--access-log", "off"],
        ];
        let argv = folders.now.gateway_fed(
            feed.as_flattened(),
            data,
            &[BenchListener {
                address: PLAIN_LISTENER,
                tenant: "bench".into(),
            }],
        );
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        let log = folders.dir.join("canal.log");
        let mut gateway = PinnedProcess::start(&argv, PROXY_CORE, PLAIN_LISTENER, &log)?;
        // The start waited for the plain listener; the load goes elsewhere.
        gateway.address = address;
        let begun = Instant::now();
        // Configuration and certificates arrive after the listeners are open.
        while let Err(lacking) = readiness() {
            let log_text = || std::fs::read_to_string(&log).unwrap_or_default();
            anyhow::ensure!(
                begun.elapsed() < READY_MAX,
                "the gateway is not ready after {READY_MAX:?}: {lacking}; its output: {}",
                log_text()
            );
            // Short beside `READY_MAX`.
            std::thread::sleep(Duration::from_millis(50));
        }
        gateway.settle()?;
        Ok(gateway)
    }
}

/// Reads the gateway's readiness page. The error names the missing parts.
fn readiness() -> Result<(), String> {
    let fetch = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(loopback(canal::READINESS_PORT))?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(
            b"GET /healthz/ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        )?;
        let mut log_text = String::new();
        stream.read_to_string(&mut log_text)?;
        Ok(log_text)
    };
    match fetch() {
        Ok(log_text) if log_text.starts_with("HTTP/1.1 200") => Ok(()),
        Ok(log_text) => Err(log_text),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns the gateway's address, and a service whose pod is behind a node proxy.
fn more() -> String {
    let (hbone, pod, port) = (HBONE.ip(), tls_origin::ADDRESS.ip(), origin::PORT);
    let address = SECURE_SERVICE.trim_end_matches(":80");
    format!(
        "---\napiVersion: canal.mesh/v1\nkind: GatewayReplica\nmetadata: {{name: bench}}\nspec: {{az: az1, addresses: [{hbone}]}}\n---\n\
         apiVersion: v1\nkind: Pod\nmetadata: {{name: secure, namespace: default, labels: {{app: secure}}, annotations: {{canal.mesh/az: az1}}}}\n\
         spec: {{nodeName: n1, serviceAccountName: origin, containers: [{{name: c, ports: [{{containerPort: {port}}}]}}]}}\n\
         status: {{podIP: {pod}, podIPs: [{{ip: {pod}}}], conditions: [{{type: Ready, status: \"True\"}}]}}\n---\n\
         apiVersion: v1\nkind: Service\nmetadata: {{name: secure, namespace: default}}\n\
         spec: {{clusterIP: {address}, selector: {{app: secure}}, ports: [{{name: http, port: 80, targetPort: {port}}}]}}\n"
    )
}
