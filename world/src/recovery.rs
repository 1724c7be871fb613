//! Recovery after a crash. A new world takes over the controller's store and root from a crashed
//! world of the same name, so that applied objects outlive the crash. This module decides what is
//! preserved; `garbage_collect` removes the rest. Start at [`decide`].

use std::path::{Path, PathBuf};

use crate::state::{WorldPaths, WorldRecord};

/// The leftovers that [`crate::World::up`] found, and their treatment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Store of the crashed world of this name.
    pub store: StoreRecovery,
    /// Persistent worlds of other names that were leftovers. They were removed together with the
    /// objects applied to them.
    pub removed: Vec<String>,
}

/// Treatment of the controller's store of a crashed world of the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreRecovery {
    /// A crashed world of this name did not exist or had no store.
    #[default]
    Nothing,
    /// The crashed world was built again with its store: applied objects are in force.
    Kept,
    /// The crashed world had another topology: the objects applied to it are gone.
    Dropped,
}

/// Decides whether a leftover's store is taken over. `old` is the record of the leftover; `None` if
/// it is not readable.
pub(crate) fn decide(
    old: Option<&WorldRecord>,
    new: &WorldRecord,
    has_store: bool,
) -> StoreRecovery {
    let Some(old) = old.filter(|old| old.owner.is_none() && has_store) else {
        return StoreRecovery::Nothing;
    };
    // A store of another topology names services, tenants and replicas that this world may not
    // have.
    if new.owner.is_none() && old.fingerprint == new.fingerprint {
        StoreRecovery::Kept
    } else {
        StoreRecovery::Dropped
    }
}

/// Returns whether a controller has written anything.
pub(crate) fn has_store(paths: &WorldPaths) -> bool {
    std::fs::read_dir(store_dir(paths)).is_ok_and(|mut entries| entries.next().is_some())
}

fn store_dir(paths: &WorldPaths) -> PathBuf {
    paths.data("controller")
}

/// Returns the paths that are preserved while the rest of a crashed world is removed. They include
/// the record, so that another crash in between is handled in the same manner.
pub(crate) fn kept_paths(paths: &WorldPaths) -> Vec<PathBuf> {
    vec![store_dir(paths), paths.infra(), paths.record()]
}

/// Removes everything in `dir` except `retained` and its parent directories.
pub(crate) fn remove_beside(dir: &Path, retained: &[PathBuf]) -> std::io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        if retained.contains(&path) {
            continue;
        }
        if retained.iter().any(|inside| inside.starts_with(&path)) {
            remove_beside(&path, retained)?;
        } else if path.symlink_metadata()?.is_dir() {
            std::fs::remove_dir_all(&path)?;
        } else {
            std::fs::remove_file(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_lasting_world_gets_its_store_back() {
        let record = |owner, fingerprint: &str| WorldRecord {
            owner,
            fingerprint: fingerprint.into(),
            bin_dirs: Vec::new(),
        };
        let (lasting, other, ephemeral) =
            (record(None, "a"), record(None, "b"), record(Some(7), "a"));
        for (old, new, has_store, want) in [
            (Some(&lasting), &lasting, true, StoreRecovery::Kept),
            (Some(&lasting), &lasting, false, StoreRecovery::Nothing),
            (Some(&lasting), &other, true, StoreRecovery::Dropped),
            (Some(&lasting), &ephemeral, true, StoreRecovery::Dropped),
            (Some(&ephemeral), &lasting, true, StoreRecovery::Nothing),
            (None, &lasting, true, StoreRecovery::Nothing),
        ] {
            assert_eq!(
                decide(old, new, has_store),
                want,
                "{old:?} {new:?} {has_store}"
            );
        }
    }

    #[test]
    fn everything_beside_the_store_is_removed() {
        let dir = std::env::temp_dir().join(format!("canal-recovery-{}", std::process::id()));
        let path = |name: &str| dir.join(name);
        for name in ["data/controller", "data/gw-1", "logs"] {
            std::fs::create_dir_all(path(name)).unwrap();
        }
        for name in [
            "data/controller/store",
            "data/gw-1/snapshot",
            "logs/a.log",
            "operator.token",
        ] {
            std::fs::write(path(name), "x").unwrap();
        }
        remove_beside(&dir, &[path("data/controller")]).unwrap();
        assert!(path("data/controller/store").exists());
        assert!(
            ["data/gw-1", "logs", "operator.token"]
                .iter()
                .all(|name| !path(name).exists())
        );
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
