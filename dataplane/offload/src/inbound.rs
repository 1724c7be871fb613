//! Inbound capture by BPF (`bpf/inbound.bpf.c`): plaintext connections into a pod go to the proxy's
//! listeners. It opens no sockets, and the caller decides for which pods it is used. Start with
//! [`InboundPrograms::load`].
//!
//! The program stays when this process dies. It then refuses incoming connections, because a closed
//! listener leaves the map by itself.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use canal_abi::inbound::{ABI, LISTENER4, LISTENER6, VERDICTS, verdict_name};
use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, Object, ObjectBuilder, Program};

use crate::embedded::EmbeddedObject;
use crate::origins::sum_counter;
use crate::pins::{self, PinDirectory};
use crate::{OffloadError, journal, tier};

static OBJECT: &EmbeddedObject<[u8]> =
    &EmbeddedObject(*include_bytes!(concat!(env!("OUT_DIR"), "/inbound.bpf.o")));

/// Returns the compiled object, for tests of its layout.
pub fn object_bytes() -> &'static [u8] {
    &OBJECT.0
}

const SOURCE: &str = "bpf/inbound.bpf.c";
const PROGRAM: &str = "canal_inbound";
const LISTENERS: &str = "canal_inbound_listeners";
const COUNTS: &str = "canal_inbound_counts";

/// Node-wide part of inbound capture: the counters that all pods share, and the directory of the
/// links' pins.
#[derive(Debug)]
pub struct InboundPrograms {
    counts: MapHandle,
    pins: Option<PinDirectory>,
}

/// Inbound capture of one pod. Dropping it ends the capture only if nothing is pinned.
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

/// Address family of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ListenerFamily {
    V4,
    V6,
}

impl ListenerFamily {
    fn key(self) -> [u8; 4] {
        match self {
            Self::V4 => LISTENER4,
            Self::V6 => LISTENER6,
        }
        .to_ne_bytes()
    }
}

fn refused(step: &str) -> impl Fn(libbpf_rs::Error) -> OffloadError {
    move |source| OffloadError::Refused {
        object: SOURCE,
        source,
        journal: format!("{step}: {}", journal::last_words()),
    }
}

/// Loads the object. Its counters are `counts`, or its own.
fn load(counts: Option<&MapHandle>) -> Result<Object, OffloadError> {
    journal::install();
    let _ = journal::last_words();
    let mut open = ObjectBuilder::default()
        .open_memory(object_bytes())
        .map_err(refused("opening"))?;
    if let Some(counts) = counts {
        let mut map = open
            .maps_mut()
            .find(|m| m.name() == COUNTS)
            .ok_or(OffloadError::Object {
                what: "map",
                name: COUNTS,
            })?;
        map.reuse_fd(counts.as_fd())
            .map_err(refused("sharing the counters"))?;
    }
    open.load().map_err(refused("loading"))
}

impl InboundPrograms {
    /// Tests whether the kernel accepts the program, and adopts the counters of an earlier process.
    /// Without `pin_dir` nothing outlives the process.
    ///
    /// # Errors
    /// Fails if the pin directory cannot be used or the kernel refuses the object.
    pub fn load(pin_dir: Option<&Path>) -> Result<Self, OffloadError> {
        let pins = pin_dir.map(PinDirectory::open).transpose()?;
        let pin = pins
            .as_ref()
            .map(|p| p.maps().join(format!("{COUNTS}_{ABI}")));
        if let Some(counts) = pin
            .as_ref()
            .and_then(|p| MapHandle::from_pinned_path(p).ok())
            && counts.max_entries() as usize == VERDICTS.len()
        {
            load(Some(&counts))?;
            return Ok(Self { counts, pins });
        }
        let mut counts = tier::map(&load(None)?, COUNTS)?;
        if let Some(pin) = pin {
            pins::remove_file(&pin).map_err(|source| OffloadError::Pins {
                dir: pin.clone(),
                step: "removing a map of another layout",
                source,
            })?;
            counts.pin(&pin).map_err(|source| OffloadError::Map {
                map: COUNTS,
                source,
            })?;
        }
        Ok(Self { counts, pins })
    }

    /// Prepares the pod whose network namespace is at `netns`. No connection is captured before
    /// [`PodInbound::attach`]. If the program of an earlier process is still attached, it refuses
    /// connections until then.
    ///
    /// # Errors
    /// Fails if the namespace or the pod's pin directory cannot be opened, or the kernel refuses
    /// the object.
    pub fn prepare(&self, pod: &str, netns: &Path) -> Result<PodInbound, OffloadError> {
        let no_netns = |source| OffloadError::Netns {
            netns: netns.to_path_buf(),
            source,
        };
        let namespace = File::open(netns).map_err(no_netns)?;
        let inode = namespace.metadata().map_err(no_netns)?.ino();
        let pin = self
            .pins
            .as_ref()
            .map(|p| p.make_pod(pod))
            .transpose()?
            .map(|d| d.join(PROGRAM));
        let object = load(Some(&self.counts))?;
        let listeners = tier::map(&object, LISTENERS)?;
        Ok(PodInbound {
            object,
            listeners,
            link: None,
            namespace,
            inode,
            netns: netns.to_path_buf(),
            pin,
            adopted: false,
        })
    }

    /// Returns true if an earlier process left this pod's inbound capture pinned.
    pub fn is_pinned(&self, pod: &str) -> bool {
        self.pins
            .as_ref()
            .is_some_and(|p| p.pod(pod).join(PROGRAM).exists())
    }

    /// Ends the inbound capture that an earlier process left for a pod, when no policy needs it any
    /// more.
    ///
    /// # Errors
    /// Fails if the pin cannot be removed.
    pub fn forget(&self, pod: &str) -> Result<(), OffloadError> {
        let Some(pin) = self.pins.as_ref().map(|p| p.pod(pod).join(PROGRAM)) else {
            return Ok(());
        };
        pins::remove_file(&pin).map_err(|source| OffloadError::Pins {
            dir: pin,
            step: "removing a pod's link",
            source,
        })
    }

    /// Returns every verdict's name and its count since the map was created, over all pods of the
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
}

impl PodInbound {
    /// Assigns the pod's connections of one family to `socket`, a listening TCP socket of the pod's
    /// namespace. One socket of a reuse-port group stands for all. When the socket closes, the
    /// connections are refused.
    ///
    /// # Errors
    /// Returns [`OffloadError::Map`] if the kernel does not accept the socket.
    pub fn listen(&self, family: ListenerFamily, socket: &impl AsFd) -> Result<(), OffloadError> {
        let fd = u64::from(socket.as_fd().as_raw_fd().cast_unsigned());
        self.listeners
            .update(&family.key(), &fd.to_ne_bytes(), MapFlags::ANY)
            .map_err(|source| OffloadError::Map {
                map: LISTENERS,
                source,
            })
    }

    /// Starts the capture: from now on connections from outside go to the listeners or are refused.
    /// A program that an earlier process left is replaced without a gap. A repeated call does
    /// nothing.
    ///
    /// # Errors
    /// Fails if the program cannot be attached or pinned.
    pub fn attach(&mut self) -> Result<(), OffloadError> {
        if self.link.is_some() {
            return Ok(());
        }
        let program = tier::program(&self.object, PROGRAM)?;
        if let Some(link) = self
            .pin
            .as_deref()
            .and_then(|p| adopt(p, self.inode, &program))
        {
            (self.link, self.adopted) = (Some(link), true);
            return Ok(());
        }
        let failed = refused("attaching to the pod's network namespace");
        let mut link = program
            .attach_netns(self.namespace.as_raw_fd())
            .map_err(&failed)?;
        if let Some(pin) = &self.pin {
            link.pin(pin).map_err(&failed)?;
        }
        self.link = Some(link);
        Ok(())
    }

    /// Returns true if [`PodInbound::attach`] was successful.
    pub fn is_attached(&self) -> bool {
        self.link.is_some()
    }

    /// Returns true if the link of an earlier process was adopted, so that there was no gap.
    pub fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Returns the path of the pod's network namespace.
    pub fn netns(&self) -> &Path {
        &self.netns
    }

    /// Returns the program's name and the number of instructions that the verifier walked, which a
    /// test compares with a budget.
    ///
    /// # Errors
    /// Fails if the kernel gives no information about the program.
    pub fn verified_instructions(&self) -> Result<(&'static str, u32), OffloadError> {
        Ok((
            PROGRAM,
            tier::verified_insns(&self.object, SOURCE, PROGRAM)?,
        ))
    }

    /// Ends the capture: the pod's connections are not redirected from now on.
    ///
    /// # Errors
    /// Fails if the pin cannot be removed or the link cannot be detached.
    pub fn release(self) -> Result<(), OffloadError> {
        if let Some(pin) = &self.pin {
            pins::remove_file(pin).map_err(|source| OffloadError::Pins {
                dir: pin.clone(),
                step: "removing a pod's link",
                source,
            })?;
        }
        self.link
            .map_or(Ok(()), |l| l.detach().map_err(refused("detaching")))
    }
}

/// Adopts the link pinned at `pin`: it runs our program from now on. Returns `None` if there is no
/// link or it belongs to another namespace, i.e. to a pod that was created again under its old name
/// while no proxy ran.
fn adopt(pin: &Path, netns_inode: u64, program: &Program<'_>) -> Option<Link> {
    let mut link = Link::open(pin).ok()?;
    let ours =
        matches!(link.info().ok()?.info, LinkTypeInfo::NetNs(n) if u64::from(n.ino) == netns_inode);
    if ours && link.update_prog(program).is_ok() {
        return Some(link);
    }
    if let Err(e) = fs::remove_file(pin) {
        tracing::warn!(pin = %pin.display(), %e, "plaintext capture: cannot remove a stale pin; it stays");
    }
    None
}
