//! Capture by BPF: loads `bpf/capture.bpf.c` once per node, puts it on pods' cgroups, and keeps it there when this process dies.
//!
//! With a pin directory a captured pod stays captured: while no proxy runs its connections are refused, never let out in the clear.
//! The next process adopts links and maps, and replaces the programs in place. Without one (tests) everything goes with the process.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use canal_abi::capture::{ORIGINS_MAX, VERDICTS, verdict_name};
use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, MapCore, MapHandle, Object, ObjectBuilder, Program, ProgramMut};

use crate::origins::{Origins, sum_counter};
use crate::pins::{self, Pins};
use crate::{OffloadError, journal, sys};

/// Aligned as ELF wants it.
#[repr(C, align(8))]
struct Embedded<B: ?Sized>(B);
static OBJECT: &Embedded<[u8]> = &Embedded(*include_bytes!(concat!(env!("OUT_DIR"), "/capture.bpf.o")));

/// The compiled object, for tests of its layout.
pub fn object_bytes() -> &'static [u8] {
    &OBJECT.0
}

/// In the order of attachment: nothing is taken before it can be published and answered for.
const PROGRAMS: [&str; 5] = ["canal_sockops", "canal_getpeername4", "canal_getpeername6", "canal_connect4", "canal_connect6"];
const MAPS: [&str; 5] = ["canal_sockets", "canal_origins", "canal_origin_pods", "canal_origin_taken", "canal_counts"];

/// How to load.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where to keep links and maps; `None`: nothing outlives the process.
    pub pin_dir: Option<PathBuf>,
    /// Size of the table of connections that wait for the proxy.
    pub origins_max: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { pin_dir: None, origins_max: ORIGINS_MAX }
    }
}

/// The loaded programs.
#[derive(Debug)]
pub struct Capture {
    object: Object,
    origins: Origins,
    counts: MapHandle,
    pins: Option<Pins>,
}

/// A captured pod. Dropping it detaches the programs only if nothing is pinned.
#[derive(Debug)]
pub struct PodCapture {
    links: Vec<Link>,
    /// How many links were found pinned and kept; the rest are new.
    adopted: usize,
}

impl PodCapture {
    /// Whether every link was taken over from an earlier process, so that there was no gap.
    pub fn is_adopted(&self) -> bool {
        self.adopted == self.links.len()
    }
}

/// Whether a pod's processes are still there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CgroupState {
    Gone,
    Empty,
    Populated,
}

/// Reads `cgroup.events`.
pub fn cgroup_state(cgroup: &Path) -> CgroupState {
    match fs::read_to_string(cgroup.join("cgroup.events")) {
        Err(_) => CgroupState::Gone,
        Ok(events) if events.lines().any(|l| l == "populated 1") => CgroupState::Populated,
        Ok(_) => CgroupState::Empty,
    }
}

impl Capture {
    /// Loads the programs; takes over the maps of an earlier process if they fit.
    pub fn load(options: &Options) -> Result<Self, OffloadError> {
        journal::install();
        let pins = options.pin_dir.as_deref().map(Pins::open).transpose()?;
        let object = match (load_object(options, pins.as_ref()), &pins) {
            (Err(OffloadError::Load { source, journal }), Some(p)) if has_maps(p) => {
                // Pinned maps of the same ABI number but another shape (a size changed): connections in flight lose their origin and
                // are reset, which is better than no capture.
                tracing::warn!(%source, journal, "the pinned maps do not fit; starting with new ones");
                p.forget_maps().map_err(|source| OffloadError::Pins { dir: p.maps(), step: "removing maps that do not fit", source })?;
                load_object(options, pins.as_ref())?
            }
            (loaded, _) => loaded?,
        };
        let handle = |name: &'static str| -> Result<MapHandle, OffloadError> {
            let map = object.maps().find(|m| m.name() == name).ok_or(OffloadError::Object { what: "map", name })?;
            MapHandle::try_from(&map).map_err(|source| OffloadError::Map { map: name, source })
        };
        let origins = Origins::new(handle("canal_origins")?, handle("canal_origin_pods")?, handle("canal_origin_taken")?);
        let counts = handle("canal_counts")?;
        Ok(Self { object, origins, counts, pins })
    }

    /// Captures the pod whose processes live in `cgroup`. Links pinned by an earlier process for the same cgroup are adopted: their
    /// programs are replaced by this object's, atomically per hook.
    pub fn attach(&self, pod: &str, cgroup: &Path) -> Result<PodCapture, OffloadError> {
        let bad_cgroup = |source| OffloadError::Cgroup { cgroup: cgroup.to_path_buf(), source };
        let dir = File::open(cgroup).map_err(bad_cgroup)?;
        let cgroup_id = dir.metadata().map_err(bad_cgroup)?.ino();
        let pin_dir = self.pins.as_ref().map(|p| p.make_pod(pod)).transpose()?;
        let mut captured = PodCapture { links: Vec::with_capacity(PROGRAMS.len()), adopted: 0 };
        for name in PROGRAMS {
            let err = |source| OffloadError::Attach { program: name, cgroup: cgroup.to_path_buf(), source };
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

    /// Lets a pod go: its connections leave as they are from now on. Only for pods whose cgroup is gone or empty, or at an operator's word.
    pub fn release(&self, pod: &str, captured: Option<PodCapture>) -> Result<(), OffloadError> {
        if let Some(p) = &self.pins {
            return p.forget_pod(pod);
        }
        for link in captured.iter().flat_map(|c| &c.links) {
            // Not only closed, after which the kernel detaches it some time later.
            link.detach().map_err(|source| OffloadError::Refused { object: "capture", source, journal: "detaching".into() })?;
        }
        Ok(())
    }

    /// Pods that an earlier process or this one has pinned.
    pub fn pinned_pods(&self) -> Vec<String> {
        self.pins.as_ref().map(Pins::pods).unwrap_or_default()
    }

    /// Lets go of pinned pods that are not `known` and whose cgroup the kernel has removed: pods that went while no proxy ran. Others that
    /// are not known stay captured, and so refused, until their cgroup goes too.
    pub fn forget_gone(&self, known: impl Fn(&str) -> bool) -> Vec<String> {
        let Some(pins) = &self.pins else { return Vec::new() };
        let gone = |pod: &String| !known(pod) && PROGRAMS.iter().all(|name| is_detached(&pins.pod(pod).join(name)));
        pins.pods().into_iter().filter(gone).filter(|pod| pins.forget_pod(pod).is_ok()).collect()
    }

    /// Whether capture outlives this process: it is pinned, and not only in a mount that this process's own mount namespace takes along.
    pub fn is_durable(&self) -> bool {
        self.pins.as_ref().is_some_and(Pins::is_durable)
    }

    /// All pods are attached anew: maps of other versions are not in use any more.
    pub fn forget_other_versions(&self) {
        if let Some(p) = &self.pins {
            p.forget_other_abis();
        }
    }

    /// Where captured connections were going.
    pub fn origins(&self) -> &Origins {
        &self.origins
    }

    /// Every verdict's name and count since the maps were made, over all pods of the node.
    pub fn counters(&self) -> Result<Vec<(String, u64)>, OffloadError> {
        VERDICTS.into_iter().map(|v| Ok((verdict_name(v), sum_counter(&self.counts, v as u32)?))).collect()
    }

    /// Each program's name and how many instructions the verifier walked for it: the budget that a test holds.
    pub fn verified_instructions(&self) -> Result<Vec<(&'static str, u32)>, OffloadError> {
        PROGRAMS
            .into_iter()
            .map(|name| {
                let err = |e: std::io::Error| OffloadError::Load { source: e.into(), journal: String::new() };
                Ok((name, sys::verified_instructions(self.program(name)?.as_fd()).map_err(err)?))
            })
            .collect()
    }

    fn program(&self, name: &'static str) -> Result<ProgramMut<'_>, OffloadError> {
        self.object.progs_mut().find(|p| p.name() == name).ok_or(OffloadError::Object { what: "program", name })
    }
}

/// Removes every pin under `dir`: all pods of the node are let go. For `canal-node --release`.
pub fn release_all(dir: &Path) -> Result<(), OffloadError> {
    pins::release(dir)
}

fn has_maps(p: &Pins) -> bool {
    fs::read_dir(p.maps()).is_ok_and(|mut d| d.next().is_some())
}

fn load_object(options: &Options, pins: Option<&Pins>) -> Result<Object, OffloadError> {
    let _ = journal::last_words();
    let err = |source| OffloadError::Load { source, journal: journal::last_words() };
    let mut open = ObjectBuilder::default().open_memory(object_bytes()).map_err(err)?;
    for mut map in open.maps_mut() {
        let Some(name) = MAPS.into_iter().find(|n| map.name() == *n) else { continue };
        if name == "canal_origins" {
            map.set_max_entries(options.origins_max).map_err(err)?;
        }
        if let Some(p) = pins {
            map.set_pin_path(p.maps().join(name)).map_err(err)?;
        }
    }
    open.load().map_err(err)
}

/// Whether the link at `pin` is on no cgroup any more (the kernel detaches it when the cgroup goes), or is not there at all.
fn is_detached(pin: &Path) -> bool {
    match Link::open(pin).and_then(|l| l.info()) {
        Ok(info) => matches!(info.info, LinkTypeInfo::Cgroup(c) if c.cgroup_id == 0),
        Err(_) => !pin.exists(),
    }
}

/// A link that an earlier process pinned, running our program from now on; `None` if it is not there or belongs to another cgroup (a
/// pod that was made again under its old name while no proxy ran).
pub(crate) fn adopt(pin: &Path, cgroup_id: u64, program: &Program<'_>) -> Option<Link> {
    let mut link = Link::open(pin).ok()?;
    let ours = matches!(link.info().ok()?.info, LinkTypeInfo::Cgroup(c) if c.cgroup_id == cgroup_id);
    if ours && link.update_prog(program).is_ok() {
        return Some(link);
    }
    if let Err(e) = fs::remove_file(pin) {
        tracing::warn!(pin = %pin.display(), %e, "cannot remove a stale pin");
    }
    None
}
