//! The demo's world as it is built into the binary, so that `canal demo` needs no source tree, and where topologies are read from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use canal_world::{Problem, Topology};

use crate::admin;
use crate::exit::{Exit, Failure, Outcome};
use crate::realm::{self, Realm};
use crate::verbs::apply;

/// Tenant alpha's routes in the demo, which are applied and not read from files: one step changes their weights.
pub(crate) const ALPHA_ROUTES: &str = include_str!("../../../demo/alpha/routes.yaml");

/// All files of the demo, with their paths relative to each other.
const FILES: [(&str, &str); 6] = [
    ("world.yaml", include_str!("../../../demo/world.yaml")),
    ("alpha/services.yaml", include_str!("../../../demo/alpha/services.yaml")),
    ("alpha/routes.yaml", ALPHA_ROUTES),
    ("beta/services.yaml", include_str!("../../../demo/beta/services.yaml")),
    ("beta/routes.yaml", include_str!("../../../demo/beta/routes.yaml")),
    ("gamma/services.yaml", include_str!("../../../demo/gamma/services.yaml")),
];

/// A topology and the files it refers to, which are needed until the world is up.
#[derive(Debug)]
pub(crate) struct Scenery {
    pub(crate) topology: Topology,
    /// Holds the demo's files; removed when this is dropped.
    _files: Option<tempfile::TempDir>,
}

/// The topology of `demo`, or of a file.
pub(crate) fn load(name: &str) -> Outcome<Scenery> {
    if name == "demo" {
        return demo();
    }
    let path = Path::new(name);
    if !path.exists() {
        return Err(Failure::new(Exit::Missing, name, "there is no such file", "name a topology file, or `demo`"));
    }
    Ok(Scenery { topology: read(path)?, _files: None })
}

/// Where the demo's files lie while a lasting world was made from them. Always the same, so that bringing it up twice is once.
const LASTING: &str = "/run/canal/scenery";

/// How the names of temporary directories begin; the process's number follows.
const TEMPORARY: &str = "canal-scenery-";

/// Removes the directories of processes that were killed before they could.
pub(crate) fn remove_stale() {
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(TEMPORARY).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists()) {
            // Another process may remove it at the same time.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// As [`load`], for a world that outlives this process.
pub(crate) fn load_lasting(name: &str) -> Outcome<Topology> {
    if name != "demo" {
        return Ok(load(name)?.topology);
    }
    let directory = Path::new(LASTING);
    unpack(directory).map_err(|problem| Failure::failed(LASTING, problem, "worlds need root: run the same command with sudo"))?;
    read(&directory.join("world.yaml"))
}

/// Removes what [`load_lasting`] wrote, when no world is left.
pub(crate) fn forget_lasting() {
    // Somebody else's files in the parent keep it; files that are not there need no removal.
    let _ = std::fs::remove_dir_all(LASTING);
    let _ = Path::new(LASTING).parent().map(std::fs::remove_dir);
}

/// The demo's topology.
pub(crate) fn demo() -> Outcome<Scenery> {
    let failed = |problem: std::io::Error| Failure::failed("demo", problem, "is there room in the temporary directory?");
    remove_stale();
    let prefix = format!("{TEMPORARY}{}-", std::process::id());
    let files = tempfile::Builder::new().prefix(&prefix).tempdir().map_err(failed)?;
    unpack(files.path()).map_err(failed)?;
    Ok(Scenery { topology: read(&files.path().join("world.yaml"))?, _files: Some(files) })
}

/// Applies what the demo's tenants apply, once the controller answers. Doing it again changes nothing.
pub(crate) async fn dress_demo(realm: &Arc<Realm>) -> Outcome {
    let mut admin = admin::connect_in(realm.clone()).await?;
    apply::apply_text(&mut admin, "alpha", "alpha/routes.yaml", ALPHA_ROUTES.to_owned()).await.map(|_| ())
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

fn read(path: &Path) -> Outcome<Topology> {
    Topology::load(path).map_err(|problems| refused(&problems))
}

/// All mistakes of a topology in one failure.
pub(crate) fn refused(problems: &[Problem]) -> Failure {
    let lines: Vec<String> = problems.iter().map(Problem::to_string).collect();
    Failure::new(Exit::Failed, "", lines.join("\n"), "")
}

/// `wish`, or `wish` with this process's number where a world of that name is already up.
pub(crate) fn free_name(wish: &str) -> Outcome<String> {
    let names = realm::names()?;
    Ok(if names.iter().any(|name| name == wish) { format!("{wish}-{}", std::process::id() % 1_000_000) } else { wish.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demos_topology_is_sound_and_complete() {
        let scenery = demo().unwrap();
        let topology = &scenery.topology;
        assert_eq!((topology.azs.len(), topology.edges.len(), topology.gateways.len(), topology.tenants.len()), (2, 2, 4, 3));
        for tenant in &topology.tenants {
            let (files, reviews) = match tenant.name.as_str() {
                "alpha" => (1, 3),
                "beta" => (2, 3),
                _ => (1, 0),
            };
            assert_eq!(tenant.config.len(), files, "{}", tenant.name);
            assert_eq!(tenant.pods.iter().filter(|pod| pod.name.starts_with("reviews-")).count(), reviews, "{}", tenant.name);
            assert_eq!((tenant.pods4, tenant.pods6), (topology.tenants[0].pods4, topology.tenants[0].pods6), "{}", tenant.name);
        }
    }

    #[test]
    fn every_file_of_the_demo_is_built_in() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo");
        for folder in ["", "alpha", "beta", "gamma"] {
            for file in crate::files::yaml_files(&root.join(folder)).unwrap() {
                let name = file.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                assert!(FILES.iter().any(|(built_in, _)| *built_in == name), "{name} is not built in");
            }
        }
    }

    #[test]
    fn what_a_killed_process_left_is_removed() {
        let stale = std::env::temp_dir().join(format!("{TEMPORARY}{}-test", u32::MAX));
        std::fs::create_dir_all(&stale).unwrap();
        let mine = demo().unwrap();
        assert!(!stale.exists() && mine.topology.file.exists());
    }

    #[test]
    fn a_file_that_is_not_there_is_missing() {
        assert_eq!(load("/nowhere/world.yaml").unwrap_err().exit, Exit::Missing);
    }
}
