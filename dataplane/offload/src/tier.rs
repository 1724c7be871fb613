//! Shared code of the tier's loaders (edge, redirector, socket steering, interface guard,
//! sessions): pins keyed by [`ABI`], and loading an object with its maps. Start with [`load`].
//!
//! Maps are pinned at `<dir>/<program>-v<ABI>/<map>`. There are no links for the programs on
//! devices: the devices' filters hold them, see [`crate::tc_hook`].

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use canal_abi::tier::ABI;
use libbpf_rs::{MapCore, MapHandle, Object, ObjectBuilder, ProgramMut};

use crate::{OffloadError, journal, pins, sys};

/// Directory on a bpffs with the pins of one loader.
#[derive(Debug, Clone)]
pub(crate) struct TierPins {
    root: PathBuf,
    what: &'static str,
    durable: bool,
}

impl TierPins {
    /// Mounts a bpffs on `dir` unless `dir` is on one already. `what` names the loader.
    pub(crate) fn open(dir: &Path, what: &'static str) -> Result<Self, OffloadError> {
        let durable = pins::make_usable(dir)?;
        let p = Self {
            root: dir.to_path_buf(),
            what,
            durable,
        };
        p.make_maps()?;
        Ok(p)
    }

    fn make_maps(&self) -> Result<(), OffloadError> {
        fs::create_dir_all(self.maps()).map_err(|source| OffloadError::Pins {
            dir: self.maps(),
            step: "creating a directory in it",
            source,
        })
    }

    pub(crate) fn is_durable(&self) -> bool {
        self.durable
    }

    /// Returns the directory in which the maps of this ABI are pinned.
    pub(crate) fn maps(&self) -> PathBuf {
        self.root.join(format!("{}-v{ABI}", self.what))
    }

    pub(crate) fn has_maps(&self) -> bool {
        fs::read_dir(self.maps()).is_ok_and(|mut d| d.next().is_some())
    }

    /// Returns a number that identifies the pinned maps and changes when new ones replace them;
    /// `None` if no map is pinned.
    pub(crate) fn maps_inode(&self) -> Option<u64> {
        fs::metadata(self.maps())
            .ok()
            .filter(|_| self.has_maps())
            .map(|m| m.ino())
    }

    fn forget_maps(&self) -> Result<(), OffloadError> {
        pins::remove_tree(&self.maps()).map_err(|source| OffloadError::Pins {
            dir: self.maps(),
            step: "removing maps",
            source,
        })
    }

    /// Removes the maps of other ABIs, because no program uses them any more.
    pub(crate) fn forget_other_versions(&self) {
        let (keep, prefix) = (self.maps(), format!("{}-v", self.what));
        for e in fs::read_dir(&self.root).into_iter().flatten().flatten() {
            if e.path() != keep
                && e.file_name().to_string_lossy().starts_with(&prefix)
                && pins::remove_tree(&e.path()).is_err()
            {
                tracing::warn!(pins = %e.path().display(), "pins: cannot remove the pins of an older version; fix: remove the folder by hand");
            }
        }
    }

    /// Removes this loader's pins of all versions, and the directory if it is empty then.
    pub(crate) fn remove(&self) -> Result<(), OffloadError> {
        self.forget_other_versions();
        self.forget_maps()?;
        let is_empty = fs::read_dir(&self.root).is_ok_and(|d| {
            d.flatten()
                .all(|e| !e.file_type().is_ok_and(|t| t.is_dir()))
        });
        if is_empty {
            pins::release(&self.root)
        } else {
            Ok(())
        }
    }
}

/// Part of libbpf's message about a pinned map that differs from the object's. Any other failure
/// leaves the maps alone.
const MISFIT: &str = "parameter mismatch";

/// Loads `bytes`. Maps named in `pinned` are adopted from `pins` or pinned there. `settings` is a
/// read-only section and its contents.
pub(crate) fn load(
    name: &'static str,
    bytes: &[u8],
    pinned: &[&str],
    pins: Option<&TierPins>,
    settings: Option<(&'static str, &[u8])>,
) -> Result<Object, OffloadError> {
    journal::install();
    match (try_load(name, bytes, pinned, pins, settings), pins) {
        (
            Err(OffloadError::Refused {
                source, journal, ..
            }),
            Some(p),
        ) if journal.contains(MISFIT) => {
            // The pinned maps have the same ABI number but another shape. Forwarding stops until
            // the agent has filled new ones, which is better than forever.
            tracing::warn!(%source, journal, "tier: the pinned maps have another layout; nothing is forwarded until new maps are filled");
            p.forget_maps()?;
            p.make_maps()?;
            try_load(name, bytes, pinned, pins, settings)
        }
        (loaded, _) => loaded,
    }
}

fn try_load(
    name: &'static str,
    bytes: &[u8],
    pinned: &[&str],
    pins: Option<&TierPins>,
    settings: Option<(&'static str, &[u8])>,
) -> Result<Object, OffloadError> {
    let _ = journal::last_words();
    let err = |source| OffloadError::Refused {
        object: name,
        source,
        journal: journal::last_words(),
    };
    let mut open = ObjectBuilder::default().open_memory(bytes).map_err(err)?;
    for mut map in open.maps_mut() {
        let map_name = map.name().to_string_lossy().into_owned();
        if let Some(p) = pins.filter(|_| pinned.contains(&map_name.as_str())) {
            map.set_pin_path(p.maps().join(&map_name)).map_err(err)?;
        }
        if let Some((section, value)) = settings.filter(|(s, _)| *s == map_name) {
            match map.initial_value_mut() {
                Some(present) if present.len() == value.len() => present.copy_from_slice(value),
                _ => {
                    return Err(OffloadError::Object {
                        what: "section of the right size",
                        name: section,
                    });
                }
            }
        }
    }
    open.load().map_err(err)
}

/// Returns a handle to the map `name`.
pub(crate) fn map(object: &Object, name: &'static str) -> Result<MapHandle, OffloadError> {
    let map = object
        .maps()
        .find(|m| m.name() == name)
        .ok_or(OffloadError::Object { what: "map", name })?;
    MapHandle::try_from(&map).map_err(|source| OffloadError::Map { map: name, source })
}

/// Returns the program `name` of the object.
pub(crate) fn program<'o>(
    object: &'o Object,
    name: &'static str,
) -> Result<ProgramMut<'o>, OffloadError> {
    object
        .progs_mut()
        .find(|p| p.name() == name)
        .ok_or(OffloadError::Object {
            what: "program",
            name,
        })
}

/// Returns the number of instructions that the verifier walked for a program.
pub(crate) fn verified_insns(
    object: &Object,
    source: &'static str,
    name: &'static str,
) -> Result<u32, OffloadError> {
    use std::os::fd::AsFd;
    let err = |e: std::io::Error| OffloadError::Refused {
        object: source,
        source: e.into(),
        journal: String::new(),
    };
    sys::verified_instructions(program(object, name)?.as_fd()).map_err(err)
}

/// Size of `struct __sk_buff` and offset of its `gso_size` (linux/bpf.h). Both belong to the
/// kernel's stable interface.
const CONTEXT: (usize, usize) = (192, 176);

/// Returns the context of a test run: a `struct __sk_buff` in which only the segments' size is set.
pub(crate) fn context(segment: u16) -> Vec<u8> {
    let (size, at) = CONTEXT;
    let mut context = vec![0; size];
    context[at..at + 4].copy_from_slice(&u32::from(segment).to_ne_bytes());
    context
}
