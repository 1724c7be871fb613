//! Capture by BPF: loads `bpf/capture.bpf.c` once per node and attaches it to pods' cgroups. It
//! stays attached when this process dies. Start with [`CapturePrograms::load`].
//!
//! With a pin directory a captured pod stays captured: while no proxy runs, its connections are
//! refused and never leave unencrypted. The next process adopts links and maps and replaces the
//! programs in place. Without a pin directory (tests) everything ends with the process.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use canal_abi::capture::{DESTINATIONS_MAX, ORIGINS_MAX, VERDICTS, verdict_name};
use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, MapCore, MapHandle, Object, ObjectBuilder, Program, ProgramMut};

use crate::connect_tables::ConnectTables;
use crate::embedded::EmbeddedObject;
use crate::origins::{Origins, sum_counter};
use crate::pins::{self, PinDirectory};
use crate::{OffloadError, journal, sys};

static OBJECT: &EmbeddedObject<[u8]> =
    &EmbeddedObject(*include_bytes!(concat!(env!("OUT_DIR"), "/capture.bpf.o")));

/// Returns the compiled object, for tests of its layout.
pub fn object_bytes() -> &'static [u8] {
    &OBJECT.0
}

/// Programs in the order of attachment. The connect hooks come last: a connection is captured only
/// once its origin can be published and its addresses can be restored.
const PROGRAMS: [&str; 7] = [
    "canal_sockops",
    "canal_getpeername4",
    "canal_getpeername6",
    "canal_getsockname4",
    "canal_getsockname6",
    "canal_connect4",
    "canal_connect6",
];
/// Maps that outlive the process. The tables of the connect hook do not: without a proxy all
/// connections are refused.
const MAPS: [&str; 5] = [
    "canal_sockets",
    "canal_origins",
    "canal_origin_pods",
    "canal_origin_taken",
    "canal_counts",
];

/// Options for loading the programs.
#[derive(Debug, Clone)]
pub struct CaptureOptions {
    /// Directory of the pins of links and maps; with `None` nothing outlives the process.
    pub pin_dir: Option<PathBuf>,
    /// Capacity of the table of connections that wait for the proxy.
    pub origins_max: u32,
    /// Capacity of the table of single addresses that have a verdict at `connect()`.
    pub destinations_max: u32,
}

impl Default for CaptureOptions {
    fn default() -> Self {
        Self {
            pin_dir: None,
            origins_max: ORIGINS_MAX,
            destinations_max: DESTINATIONS_MAX,
        }
    }
}

/// Loaded capture programs of a node, with their maps.
#[derive(Debug)]
pub struct CapturePrograms {
    object: Object,
    origins: Origins,
    tables: ConnectTables,
    counts: MapHandle,
    pins: Option<PinDirectory>,
}

/// Capture of one pod. Dropping it detaches the programs only if nothing is pinned.
#[derive(Debug)]
pub struct PodCapture {
    links: Vec<Link>,
    /// Number of links that an earlier process had pinned and that were adopted; the others are
    /// new.
    adopted: usize,
}

impl PodCapture {
    /// Returns true if every link was adopted from an earlier process, so that there was no gap.
    pub fn is_adopted(&self) -> bool {
        self.adopted == self.links.len()
    }
}

/// State of a pod's cgroup, which shows whether the pod's processes still exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupState {
    Gone,
    Empty,
    Populated,
}

/// Reads the state of a cgroup from `cgroup.events`.
pub fn cgroup_state(cgroup: &Path) -> CgroupState {
    match fs::read_to_string(cgroup.join("cgroup.events")) {
        Err(_) => CgroupState::Gone,
        Ok(events) if events.lines().any(|l| l == "populated 1") => CgroupState::Populated,
        Ok(_) => CgroupState::Empty,
    }
}

impl CapturePrograms {
    /// Loads the programs and adopts the maps of an earlier process if they fit.
    ///
    /// # Errors
    /// Fails if the pin directory cannot be used or the kernel refuses the object.
    pub fn load(options: &CaptureOptions) -> Result<Self, OffloadError> {
        // Before libbpf loads anything: a refusal quotes the verifier's last messages.
        journal::install();
        let pins = options
            .pin_dir
            .as_deref()
            .map(PinDirectory::open)
            .transpose()?;
        let object = match (load_object(options, pins.as_ref()), &pins) {
            (Err(OffloadError::Load { source, journal }), Some(p)) if has_maps(p) => {
                // The pinned maps have the same ABI number but another shape (a size changed).
                // Connections in progress lose their origin and are reset, which is better than no
                // capture.
                tracing::warn!(%source, journal, "capture: the pinned maps have another layout; starting with new maps");
                p.forget_maps().map_err(|source| OffloadError::Pins {
                    dir: p.maps(),
                    step: "removing maps of another layout",
                    source,
                })?;
                load_object(options, pins.as_ref())?
            }
            (loaded, _) => loaded?,
        };
        let handle = |name: &'static str| -> Result<MapHandle, OffloadError> {
            let map = object
                .maps()
                .find(|m| m.name() == name)
                .ok_or(OffloadError::Object { what: "map", name })?;
            MapHandle::try_from(&map).map_err(|source| OffloadError::Map { map: name, source })
        };
        let origins = Origins::new(
            handle("canal_origins")?,
            handle("canal_origin_pods")?,
            handle("canal_origin_taken")?,
        );
        let counts = handle("canal_counts")?;
        let tables = ConnectTables::of(&object)?;
        Ok(Self {
            object,
            origins,
            tables,
            counts,
            pins,
        })
    }

    /// Captures the pod whose processes are in `cgroup`. Links that an earlier process pinned for
    /// the same cgroup are adopted: their programs are replaced by this object's, atomically per
    /// hook.
    ///
    /// # Errors
    /// Fails if the cgroup cannot be opened, or if a program cannot be attached or pinned.
    pub fn attach(&self, pod: &str, cgroup: &Path) -> Result<PodCapture, OffloadError> {
        let bad_cgroup = |source| OffloadError::Cgroup {
            cgroup: cgroup.to_path_buf(),
            source,
        };
        let dir = File::open(cgroup).map_err(bad_cgroup)?;
        let cgroup_id = dir.metadata().map_err(bad_cgroup)?.ino();
        let pin_dir = self.pins.as_ref().map(|p| p.make_pod(pod)).transpose()?;
        let mut captured = PodCapture {
            links: Vec::with_capacity(PROGRAMS.len()),
            adopted: 0,
        };
        for name in PROGRAMS {
            let err = |source| OffloadError::Attach {
                program: name,
                cgroup: cgroup.to_path_buf(),
                source,
            };
            let program = self.program(name)?;
            let pin = pin_dir.as_ref().map(|d| d.join(name));
            if let Some(link) = pin.as_deref().and_then(|p| adopt(p, cgroup_id, &program)) {
                captured.links.push(link);
                captured.adopted += 1;
                continue;
            }
            let mut link = program.attach_cgroup(dir.as_raw_fd()).map_err(err)?;
            if let Some(p) = pin {
                link.pin(&p).map_err(err)?;
            }
            captured.links.push(link);
        }
        Ok(captured)
    }

    /// Ends the capture of a pod: from now on its connections leave as they are. It is only for
    /// pods whose cgroup is removed or empty, or at an operator's command.
    ///
    /// # Errors
    /// Fails if a link cannot be detached or a pin cannot be removed.
    pub fn release(&self, pod: &str, captured: Option<PodCapture>) -> Result<(), OffloadError> {
        if let Some(p) = &self.pins {
            return p.forget_pod(pod);
        }
        for link in captured.iter().flat_map(|c| &c.links) {
            // Closing the link is not enough: the kernel would detach it only some time later.
            link.detach().map_err(|source| OffloadError::Refused {
                object: "capture",
                source,
                journal: "detaching".into(),
            })?;
        }
        Ok(())
    }

    /// Returns the pods that this process or an earlier one has pinned.
    pub fn pinned_pods(&self) -> Vec<String> {
        self.pins
            .as_ref()
            .map(PinDirectory::pods)
            .unwrap_or_default()
    }

    /// Releases pinned pods that are not `known` and whose cgroup the kernel has removed, and
    /// returns their names. They ended while no proxy ran. Other unknown pods stay captured, and so
    /// refused, until their cgroup is removed too.
    pub fn forget_gone(&self, known: impl Fn(&str) -> bool) -> Vec<String> {
        let Some(pins) = &self.pins else {
            return Vec::new();
        };
        let gone = |pod: &String| {
            !known(pod)
                && PROGRAMS
                    .iter()
                    .all(|name| is_detached(&pins.pod(pod).join(name)))
        };
        pins.pods()
            .into_iter()
            .filter(gone)
            .filter(|pod| pins.forget_pod(pod).is_ok())
            .collect()
    }

    /// Returns true if capture outlives this process: it is pinned, and not only in a mount that
    /// ends with this process's own mount namespace.
    pub fn is_durable(&self) -> bool {
        self.pins.as_ref().is_some_and(PinDirectory::is_durable)
    }

    /// Removes the maps of other versions. Call it when all pods are attached again, because then
    /// no link uses them.
    pub fn forget_other_versions(&self) {
        if let Some(p) = &self.pins {
            p.forget_other_abis();
        }
    }

    /// Returns the table of original destinations of captured connections.
    pub fn origins(&self) -> &Origins {
        &self.origins
    }

    /// Returns the tables of pods and of destinations that the connect hook refuses.
    pub fn tables(&self) -> &ConnectTables {
        &self.tables
    }

    /// Returns every verdict's name and its count since the maps were created, over all pods of the
    /// node.
    ///
    /// # Errors
    /// Fails if the counter map cannot be read.
    pub fn counters(&self) -> Result<Vec<(String, u64)>, OffloadError> {
        VERDICTS
            .into_iter()
            .map(|v| Ok((verdict_name(v), sum_counter(&self.counts, v as u32)?)))
            .collect()
    }

    /// Returns each program's name and the number of instructions that the verifier walked for it,
    /// which a test compares with a budget.
    ///
    /// # Errors
    /// Fails if the kernel gives no information about a program.
    pub fn verified_instructions(&self) -> Result<Vec<(&'static str, u32)>, OffloadError> {
        PROGRAMS
            .into_iter()
            .map(|name| {
                let err = |e: std::io::Error| OffloadError::Load {
                    source: e.into(),
                    journal: String::new(),
                };
                Ok((
                    name,
                    sys::verified_instructions(self.program(name)?.as_fd()).map_err(err)?,
                ))
            })
            .collect()
    }

    fn program(&self, name: &'static str) -> Result<ProgramMut<'_>, OffloadError> {
        self.object
            .progs_mut()
            .find(|p| p.name() == name)
            .ok_or(OffloadError::Object {
                what: "program",
                name,
            })
    }
}

/// Removes every pin under `dir`, which releases all pods of the node. `canal-node --release` uses
/// it.
///
/// # Errors
/// Fails if a pin cannot be removed or the bpffs cannot be unmounted.
pub fn release_all(dir: &Path) -> Result<(), OffloadError> {
    pins::release(dir)
}

fn has_maps(p: &PinDirectory) -> bool {
    fs::read_dir(p.maps()).is_ok_and(|mut d| d.next().is_some())
}

fn load_object(
    options: &CaptureOptions,
    pins: Option<&PinDirectory>,
) -> Result<Object, OffloadError> {
    let _ = journal::last_words();
    let err = |source| OffloadError::Load {
        source,
        journal: journal::last_words(),
    };
    let mut open = ObjectBuilder::default()
        .open_memory(object_bytes())
        .map_err(err)?;
    for mut map in open.maps_mut() {
        if map.name() == "canal_destinations" {
            map.set_max_entries(options.destinations_max).map_err(err)?;
        }
        let Some(name) = MAPS.into_iter().find(|n| map.name() == *n) else {
            continue;
        };
        if name == "canal_origins" {
            map.set_max_entries(options.origins_max).map_err(err)?;
        }
        if let Some(p) = pins {
            map.set_pin_path(p.maps().join(name)).map_err(err)?;
        }
    }
    open.load().map_err(err)
}

/// Returns true if the link at `pin` is not attached to a cgroup any more, or does not exist. The
/// kernel detaches it when the cgroup is removed.
fn is_detached(pin: &Path) -> bool {
    match Link::open(pin).and_then(|l| l.info()) {
        Ok(info) => matches!(info.info, LinkTypeInfo::Cgroup(c) if c.cgroup_id == 0),
        Err(_) => !pin.exists(),
    }
}

/// Adopts a link that an earlier process pinned: it runs our program from now on. Returns `None` if
/// the link does not exist or belongs to another cgroup, i.e. to a pod that was created again under
/// its old name while no proxy ran.
pub(crate) fn adopt(pin: &Path, cgroup_id: u64, program: &Program<'_>) -> Option<Link> {
    let mut link = Link::open(pin).ok()?;
    let ours =
        matches!(link.info().ok()?.info, LinkTypeInfo::Cgroup(c) if c.cgroup_id == cgroup_id);
    if ours && link.update_prog(program).is_ok() {
        return Some(link);
    }
    if let Err(e) = fs::remove_file(pin) {
        tracing::warn!(pin = %pin.display(), %e, "capture: cannot remove a stale pin; it stays");
    }
    None
}
