//! Inbound capture by BPF (`bpf/inbound.bpf.c`): plaintext connections into a pod go to the proxy's listeners. Opens no sockets, and knows
//! no policy: whoever calls says which pods. Start at [`Inbound::load`].
//!
//! The program stays when this process dies, and then refuses what comes in, because a closed listener leaves the map by itself.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use canal_abi::inbound::{ABI, LISTENER4, LISTENER6, VERDICTS, verdict_name};
use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, Program};

use crate::origins::sum_counter;
use crate::pins::{self, Pins};
use crate::{OffloadError, journal, tier};

/// Aligned as ELF wants it.
#[repr(C, align(8))]
struct Embedded<B: ?Sized>(B);
static OBJECT: &Embedded<[u8]> = &Embedded(*include_bytes!(concat!(env!("OUT_DIR"), "/inbound.bpf.o")));

/// The compiled object, for tests of its layout.
pub fn object_bytes() -> &'static [u8] {
    &OBJECT.0
}

const SOURCE: &str = "bpf/inbound.bpf.c";
const PROGRAM: &str = "canal_inbound";
const LISTENERS: &str = "canal_inbound_listeners";
const COUNTS: &str = "canal_inbound_counts";

/// The node's part: the counters that all pods share, and where links are pinned.
#[derive(Debug)]
pub struct Inbound {
    counts: MapHandle,
    pins: Option<Pins>,
}

/// A pod whose plaintext connections are taken. Dropping it lets go only if nothing is pinned.
#[derive(Debug)]
pub struct PodInbound {
    object: Object,
    listeners: MapHandle,
    link: Option<Link>,
    namespace: File,
    inode: u64,
    netns: PathBuf,
    pin: Option<PathBuf>,
    adopted: bool,
}

/// Which listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    fn key(self) -> [u8; 4] {
        match self {
            Self::V4 => LISTENER4,
            Self::V6 => LISTENER6,
        }
        .to_ne_bytes()
    }
}

fn refused(step: &str) -> impl Fn(libbpf_rs::Error) -> OffloadError {
    move |source| OffloadError::Refused { object: SOURCE, source, journal: format!("{step}: {}", journal::last_words()) }
}

/// Loads the object; its counters are `counts`, or its own.
fn load(counts: Option<&MapHandle>) -> Result<Object, OffloadError> {
    journal::install();
    let _ = journal::last_words();
    let mut open = ObjectBuilder::default().open_memory(object_bytes()).map_err(refused("opening"))?;
    if let Some(counts) = counts {
        let mut map = open.maps_mut().find(|m| m.name() == COUNTS).ok_or(OffloadError::Object { what: "map", name: COUNTS })?;
        map.reuse_fd(counts.as_fd()).map_err(refused("sharing the counters"))?;
    }
    open.load().map_err(refused("loading"))
}

impl Inbound {
    /// Whether the kernel takes the program; takes over the counters of an earlier process. Without `pin_dir` nothing outlives the process.
    pub fn load(pin_dir: Option<&Path>) -> Result<Self, OffloadError> {
        let pins = pin_dir.map(Pins::open).transpose()?;
        let pin = pins.as_ref().map(|p| p.maps().join(format!("{COUNTS}_{ABI}")));
        if let Some(counts) = pin.as_ref().and_then(|p| MapHandle::from_pinned_path(p).ok())
            && counts.max_entries() as usize == VERDICTS.len()
        {
            load(Some(&counts))?;
            return Ok(Self { counts, pins });
        }
        let mut counts = tier::map(&load(None)?, COUNTS)?;
        if let Some(pin) = pin {
            pins::remove_file(&pin).map_err(|source| OffloadError::Pins {
                dir: pin.clone(),
                step: "removing a map that does not fit",
                source,
            })?;
            counts.pin(&pin).map_err(|source| OffloadError::Map { map: COUNTS, source })?;
        }
        Ok(Self { counts, pins })
    }

    /// Prepares the pod whose network namespace is at `netns`. Nothing is taken before [`PodInbound::attach`], unless an earlier process's
    /// program still is there: that one goes on refusing until then.
    pub fn prepare(&self, pod: &str, netns: &Path) -> Result<PodInbound, OffloadError> {
        let no_netns = |source| OffloadError::Netns { netns: netns.to_path_buf(), source };
        let namespace = File::open(netns).map_err(no_netns)?;
        let inode = namespace.metadata().map_err(no_netns)?.ino();
        let pin = self.pins.as_ref().map(|p| p.make_pod(pod)).transpose()?.map(|d| d.join(PROGRAM));
        let object = load(Some(&self.counts))?;
        let listeners = tier::map(&object, LISTENERS)?;
        Ok(PodInbound { object, listeners, link: None, namespace, inode, netns: netns.to_path_buf(), pin, adopted: false })
    }

    /// Whether an earlier process left this pod's connections taken.
    pub fn is_pinned(&self, pod: &str) -> bool {
        self.pins.as_ref().is_some_and(|p| p.pod(pod).join(PROGRAM).exists())
    }

    /// Lets a pod's connections through, though an earlier process took them: nothing asks for it any more.
    pub fn forget(&self, pod: &str) -> Result<(), OffloadError> {
        let Some(pin) = self.pins.as_ref().map(|p| p.pod(pod).join(PROGRAM)) else { return Ok(()) };
        pins::remove_file(&pin).map_err(|source| OffloadError::Pins { dir: pin, step: "removing a pod's link", source })
    }

    /// Every verdict's name and count since the map was made, over all pods of the node.
    pub fn counters(&self) -> Result<Vec<(String, u64)>, OffloadError> {
        VERDICTS.into_iter().map(|v| Ok((verdict_name(v), sum_counter(&self.counts, v as u32)?))).collect()
    }
}

impl PodInbound {
    /// Gives the pod's connections of one family to `socket`, a listening TCP socket of the pod's namespace; one socket of a reuse-port group
    /// stands for all. When the socket closes, they are refused.
    pub fn listen(&self, family: Family, socket: &impl AsFd) -> Result<(), OffloadError> {
        let fd = u64::from(socket.as_fd().as_raw_fd().cast_unsigned());
        self.listeners
            .update(&family.key(), &fd.to_ne_bytes(), MapFlags::ANY)
            .map_err(|source| OffloadError::Map { map: LISTENERS, source })
    }

    /// From here on connections from outside go to the listeners, or are refused. A program that an earlier process left is replaced
    /// without a gap. Again: nothing happens.
    pub fn attach(&mut self) -> Result<(), OffloadError> {
        if self.link.is_some() {
            return Ok(());
        }
        let program = tier::program(&self.object, PROGRAM)?;
        if let Some(link) = self.pin.as_deref().and_then(|p| adopt(p, self.inode, &program)) {
            (self.link, self.adopted) = (Some(link), true);
            return Ok(());
        }
        let failed = refused("attaching to the pod's network namespace");
        let mut link = program.attach_netns(self.namespace.as_raw_fd()).map_err(&failed)?;
        if let Some(pin) = &self.pin {
            link.pin(pin).map_err(&failed)?;
        }
        self.link = Some(link);
        Ok(())
    }

    /// Whether [`PodInbound::attach`] was successful.
    pub fn is_attached(&self) -> bool {
        self.link.is_some()
    }

    /// Whether an earlier process's place was taken over, so that there was no gap.
    pub fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Where.
    pub fn netns(&self) -> &Path {
        &self.netns
    }

    /// The program's name and how many instructions the verifier walked: the budget that a test holds.
    pub fn verified_instructions(&self) -> Result<(&'static str, u32), OffloadError> {
        Ok((PROGRAM, tier::verified_insns(&self.object, SOURCE, PROGRAM)?))
    }

    /// Lets the pod's connections through from now on.
    pub fn release(self) -> Result<(), OffloadError> {
        if let Some(pin) = &self.pin {
            pins::remove_file(pin).map_err(|source| OffloadError::Pins { dir: pin.clone(), step: "removing a pod's link", source })?;
        }
        self.link.map_or(Ok(()), |l| l.detach().map_err(refused("detaching")))
    }
}

/// The link pinned at `pin`, running our program from now on; `None` if it is not there or on another namespace (a pod that was made
/// again under its old name while no proxy ran).
fn adopt(pin: &Path, netns_inode: u64, program: &Program<'_>) -> Option<Link> {
    let mut link = Link::open(pin).ok()?;
    let ours = matches!(link.info().ok()?.info, LinkTypeInfo::NetNs(n) if u64::from(n.ino) == netns_inode);
    if ours && link.update_prog(program).is_ok() {
        return Some(link);
    }
    if let Err(e) = fs::remove_file(pin) {
        tracing::warn!(pin = %pin.display(), %e, "cannot remove a stale pin");
    }
    None
}
