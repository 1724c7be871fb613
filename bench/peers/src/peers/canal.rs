//! The gateway as a peer. A state file configures it if it needs no certificates. A controller does
//! so if it needs certificates, or if the case measures a gateway with a controller.

use std::path::Path;

use canal_bench_peers::canal::{self, BenchListener, Build};
use canal_bench_peers::process::{PROXY_CORE, PinnedProcess};

use super::mesh::{self, BenchMesh};
use super::{PeerFolders, loopback};
use crate::case::{ProxyCase, ROUTES, SERVICES};

/// Port of a gateway with a state file.
const PORT: u16 = 18_081;

pub(super) fn start(folders: &PeerFolders, case: ProxyCase) -> anyhow::Result<PinnedProcess> {
    match case {
        ProxyCase::Http1 | ProxyCase::Close | ProxyCase::H2c => {
            by_snapshot(folders, &folders.now, ("canal", 1, 1), "")
        }
        ProxyCase::Policies => by_snapshot(
            folders,
            &folders.now,
            ("canal-policies", 1, 1),
            &canal::policies(),
        ),
        ProxyCase::OneService | ProxyCase::ManyServices => {
            by_controller(folders, true, mesh::HBONE)
        }
        ProxyCase::Mtls => by_controller(folders, false, mesh::HBONE),
    }
}

pub(super) fn start_before(
    folders: &PeerFolders,
    _case: ProxyCase,
) -> anyhow::Result<PinnedProcess> {
    by_snapshot(
        folders,
        folders.before.as_ref().unwrap_or(&folders.now),
        ("canal-before", 1, 1),
        "",
    )
}

/// Starts a gateway with 10,000 services x 10 routes; the requests go to one of them.
pub(super) fn start_100k(folders: &PeerFolders, _case: ProxyCase) -> anyhow::Result<PinnedProcess> {
    by_snapshot(folders, &folders.now, ("canal-100k", SERVICES, ROUTES), "")
}

/// Starts such a gateway with a controller.
pub(super) fn start_controlled(
    folders: &PeerFolders,
    _case: ProxyCase,
) -> anyhow::Result<PinnedProcess> {
    by_controller(folders, true, mesh::PLAIN_LISTENER)
}

/// Writes the configuration of one tenant. `tenant` has the objects other than services; the
/// services have prefix routes.
pub(super) fn configure(
    folder: &Path,
    tenant: &str,
    (services, routes): (usize, usize),
) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("tenant.yaml"), tenant)?;
    let prefixes = || {
        (1..routes)
            .map(|r| format!("/api/v{r}/things"))
            .chain([String::from("/")])
    };
    for (n, chunk) in (0..services).collect::<Vec<_>>().chunks(500).enumerate() {
        let text: String = chunk
            .iter()
            .map(|s| canal::service(*s, prefixes()))
            .collect();
        std::fs::write(folder.join(format!("services-{n}.yaml")), text)?;
    }
    Ok(())
}

/// Starts a gateway with a state file; one with policies has an access log too.
fn by_snapshot(
    folders: &PeerFolders,
    build: &Build,
    (name, services, routes): (&str, usize, usize),
    policies: &str,
) -> anyhow::Result<PinnedProcess> {
    let snapshot = folders.dir.join(format!("{name}.snapshot"));
    // Compiling 100,000 routes takes long, so later runs use the same file.
    if !snapshot.exists() {
        let config = folders.dir.join(name);
        configure(
            &config.join("bench"),
            &(canal::tenant("bench", 1, "") + policies),
            (services, routes),
        )?;
        build.compile(&config, &snapshot)?;
    }
    let file = folders
        .dir
        .join("canal-access.log")
        .to_string_lossy()
        .into_owned();
    // The last run's log would occupy memory.
    let _ = std::fs::remove_file(&file);
    // Other proxies log in the case of policies only, so Canal does too.
    let log = if policies.is_empty() { "off" } else { &file };
    let listener = BenchListener {
        address: loopback(PORT),
        tenant: "bench".into(),
    };
    let feed = [
        "--snapshot",
        &snapshot.to_string_lossy(),
        "--access-log",
        log,
    ];
    let argv = build.gateway_fed(
        &feed,
        &folders.dir.join(format!("data-{name}")),
        std::slice::from_ref(&listener),
    );
    let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
    PinnedProcess::start(
        &argv,
        PROXY_CORE,
        listener.address,
        &folders.dir.join("canal.log"),
    )
}

/// Starts a gateway without configuration, which a controller configures; the load goes to
/// `address`.
fn by_controller(
    folders: &PeerFolders,
    is_large: bool,
    address: std::net::SocketAddr,
) -> anyhow::Result<PinnedProcess> {
    let cell = &folders.meshes[usize::from(is_large)];
    let mesh = match cell.get() {
        Some(mesh) => mesh,
        None => {
            let (name, size) = if is_large {
                ("large", (SERVICES, ROUTES))
            } else {
                ("small", (1, 1))
            };
            let mesh = BenchMesh::start(folders, name, size)?;
            cell.get_or_init(|| mesh)
        }
    };
    folders.starts.set(folders.starts.get() + 1);
    mesh.gateway(
        folders,
        &folders.dir.join(format!("data-{}", folders.starts.get())),
        address,
    )
}
