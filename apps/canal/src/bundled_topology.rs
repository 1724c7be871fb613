//! The demo's world, which is built into the binary so that `canal demo` needs no source tree; and
//! the reading of topology files. Start at [`load`].

use std::path::{Path, PathBuf};
use std::sync::Arc;

use canal_world::{Topology, TopologyProblem};

use crate::admin;
use crate::exit::{ExitStatus, VerbError, VerbResult};
use crate::running_world::{self, RunningWorld};
use crate::verbs::apply;

/// Routes of tenant alpha in the demo. They are applied and not read from files, because one step
/// changes their weights.
pub(crate) const ALPHA_ROUTES: &str = include_str!("../../../demo/alpha/routes.yaml");

/// All files of the demo, with their relative paths.
const FILES: [(&str, &str); 6] = [
    ("world.yaml", include_str!("../../../demo/world.yaml")),
    (
        "alpha/services.yaml",
        include_str!("../../../demo/alpha/services.yaml"),
    ),
    ("alpha/routes.yaml", ALPHA_ROUTES),
    (
        "beta/services.yaml",
        include_str!("../../../demo/beta/services.yaml"),
    ),
    (
        "beta/routes.yaml",
        include_str!("../../../demo/beta/routes.yaml"),
    ),
    (
        "gamma/services.yaml",
        include_str!("../../../demo/gamma/services.yaml"),
    ),
];

/// A topology with the files that it refers to, which are needed until the world is up.
#[derive(Debug)]
pub(crate) struct BundledTopology {
    pub(crate) topology: Topology,
    /// Directory of the demo's files. It is removed when this is dropped.
    _files: Option<tempfile::TempDir>,
}

/// Returns the topology of `demo`, or of a file.
pub(crate) fn load(name: &str) -> VerbResult<BundledTopology> {
    if name == "demo" {
        return demo();
    }
    let path = Path::new(name);
    if !path.exists() {
        return Err(VerbError::new(
            ExitStatus::Missing,
            name,
            "there is no such file",
            "name a topology file, or `demo`",
        ));
    }
    Ok(BundledTopology {
        topology: read(path)?,
        _files: None,
    })
}

/// Directory of the demo's files for a persistent world. It is always the same, so that bringing
/// the demo up again finds the same world.
const LASTING: &str = "/run/canal/scenery";

/// Prefix of the names of temporary directories. The process id follows.
const TEMPORARY: &str = "canal-scenery-";

/// Removes the directories of processes that were killed before they could remove them.
pub(crate) fn remove_stale() {
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name
            .strip_prefix(TEMPORARY)
            .and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            // Another process may remove the directory at the same time.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// Works like [`load`], for a world that outlives this process.
pub(crate) fn load_lasting(name: &str) -> VerbResult<Topology> {
    if name != "demo" {
        return Ok(load(name)?.topology);
    }
    let directory = Path::new(LASTING);
    unpack(directory).map_err(|problem| {
        VerbError::failed(
            LASTING,
            problem,
            "run the same command with sudo, because worlds need root",
        )
    })?;
    read(&directory.join("world.yaml"))
}

/// Removes the files that [`load_lasting`] wrote, when no world is left.
pub(crate) fn forget_lasting() {
    // The parent stays if it contains other files. Missing files need no removal.
    let _ = std::fs::remove_dir_all(LASTING);
    let _ = Path::new(LASTING).parent().map(std::fs::remove_dir);
}

/// Returns the demo's topology, with its files in a temporary directory.
pub(crate) fn demo() -> VerbResult<BundledTopology> {
    let failed = |problem: std::io::Error| {
        VerbError::failed(
            "demo",
            problem,
            "check that the temporary directory has space",
        )
    };
    remove_stale();
    let prefix = format!("{TEMPORARY}{}-", std::process::id());
    let files = tempfile::Builder::new()
        .prefix(&prefix)
        .tempdir()
        .map_err(failed)?;
    unpack(files.path()).map_err(failed)?;
    Ok(BundledTopology {
        topology: read(&files.path().join("world.yaml"))?,
        _files: Some(files),
    })
}

/// Applies the objects of the demo's tenants, once the controller answers. Repeating it changes
/// nothing.
pub(crate) async fn install_demo_keys(running: &Arc<RunningWorld>) -> VerbResult {
    let mut admin = admin::connect_in(running.clone()).await?;
    apply::apply_text(
        &mut admin,
        "alpha",
        "alpha/routes.yaml",
        ALPHA_ROUTES.to_owned(),
    )
    .await
    .map(|_| ())
}

/// Writes the demo's files into a directory.
pub(crate) fn unpack(directory: &Path) -> std::io::Result<()> {
    for (name, text) in FILES {
        let path: PathBuf = directory.join(name);
        std::fs::create_dir_all(path.parent().unwrap_or(directory))?;
        std::fs::write(path, text)?;
    }
    Ok(())
}

fn read(path: &Path) -> VerbResult<Topology> {
    Topology::load(path).map_err(|problems| refused(&problems))
}

/// Returns all mistakes of a topology as one error.
pub(crate) fn refused(problems: &[TopologyProblem]) -> VerbError {
    let lines: Vec<String> = problems.iter().map(TopologyProblem::to_string).collect();
    VerbError::new(ExitStatus::Failed, "", lines.join("\n"), "")
}

/// Returns the requested name, with this process's id appended if a world of that name is already
/// up.
pub(crate) fn free_name(base: &str) -> VerbResult<String> {
    let names = running_world::names()?;
    Ok(if names.iter().any(|name| name == base) {
        format!("{base}-{}", std::process::id() % 1_000_000)
    } else {
        base.to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demos_topology_is_sound_and_complete() {
        let scenery = demo().unwrap();
        let topology = &scenery.topology;
        assert_eq!(
            (
                topology.azs.len(),
                topology.edges.len(),
                topology.gateways.len(),
                topology.tenants.len()
            ),
            // Each AZ has an edge and two gateways. The tenants are alpha, beta, gamma and
            // `outside`.
            (2, 2, 4, 4)
        );
        // Beta's routes are in a file; alpha's are applied by a step of the demo.
        for tenant in &topology.tenants {
            // alpha and beta have three pods of reviews (v1 to v3) for the steps that route by
            // version, and alpha a v4 that fails. No step loads reviews of gamma.
            let (files, reviews) = match tenant.name.as_str() {
                "alpha" => (1, 4),
                "beta" => (2, 3),
                "outside" => (0, 0),
                _ => (1, 0),
            };
            assert_eq!(tenant.config.len(), files, "{}", tenant.name);
            assert_eq!(
                tenant
                    .pods
                    .iter()
                    .filter(|pod| pod.name.starts_with("reviews-"))
                    .count(),
                reviews,
                "{}",
                tenant.name
            );
            // Clients outside the tenants have addresses of their own.
            if tenant.name.as_str() == "outside" {
                continue;
            }
            assert_eq!(
                (tenant.pods4, tenant.pods6),
                (topology.tenants[0].pods4, topology.tenants[0].pods6),
                "{}",
                tenant.name
            );
        }
    }

    #[test]
    fn every_file_of_the_demo_is_built_in() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo");
        for folder in ["", "alpha", "beta", "gamma"] {
            for file in crate::files::yaml_files(&root.join(folder)).unwrap() {
                let name = file
                    .strip_prefix(&root)
                    .unwrap()
                    .to_str()
                    .unwrap()
                    .to_owned();
                assert!(
                    FILES.iter().any(|(built_in, _)| *built_in == name),
                    "{name} is not built in"
                );
            }
        }
    }

    #[test]
    fn leftovers_of_a_killed_process_are_removed() {
        let stale = std::env::temp_dir().join(format!("{TEMPORARY}{}-test", u32::MAX));
        std::fs::create_dir_all(&stale).unwrap();
        let mine = demo().unwrap();
        assert!(!stale.exists() && mine.topology.file.exists());
    }

    #[test]
    fn a_file_that_is_not_there_is_missing() {
        assert_eq!(
            load("/nowhere/world.yaml").unwrap_err().exit,
            ExitStatus::Missing
        );
    }
}
