//! The doors of a replica (`bpf/doors.bpf.c`): which listening sockets of the gateway take sessions to service addresses. Opens no sockets.
//! Start at [`Doors::attach`].
//!
//! The program stays when this process dies, and then refuses what is for services, because a closed socket leaves its door by itself.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use canal_abi::tier::{DOOR_DNS4, DOOR_HBONE4, DOOR_PLAIN4, DOORS_COUNTS, doors_count_name};
use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{ErrorKind, Link, MapCore, MapFlags, MapHandle, Object, Program};

use crate::OffloadError;
use crate::origins::sum_counter;
use crate::tier::{self, TierPins};

/// Aligned as ELF wants it.
#[repr(C, align(8))]
struct Embedded<B: ?Sized>(B);
static OBJECT: &Embedded<[u8]> = &Embedded(*include_bytes!(concat!(env!("OUT_DIR"), "/doors.bpf.o")));

/// The compiled object, for tests of its layout.
pub fn object_bytes() -> &'static [u8] {
    &OBJECT.0
}

const PROGRAM: &str = "canal_door";
const SOURCE: &str = "bpf/doors.bpf.c";
const MAP: &str = "canal_doors";
const MAPS: &[&str] = &[MAP, "canal_doors_counts"];
const LINK: &str = "link";

/// Which sessions to a service address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Door {
    /// TCP port 15008.
    Hbone,
    /// Any other TCP port.
    Plain,
    /// UDP port 53.
    Dns,
}

impl Door {
    fn key(self) -> [u8; 4] {
        match self {
            Self::Hbone => DOOR_HBONE4,
            Self::Plain => DOOR_PLAIN4,
            Self::Dns => DOOR_DNS4,
        }
        .to_ne_bytes()
    }
}

/// The loaded program. Dropping it takes it away only if nothing is pinned.
#[derive(Debug)]
pub struct Doors {
    object: Object,
    link: Link,
    pins: Option<TierPins>,
    doors: MapHandle,
    counts: MapHandle,
    adopted: bool,
}

impl Doors {
    /// Puts the program on the network namespace at the path `netns`, or on this thread's. A link that an earlier process pinned for
    /// the same namespace gets the new program without a gap.
    pub fn attach(netns: Option<&Path>, pin_dir: Option<&Path>) -> Result<Self, OffloadError> {
        let path = netns.map_or_else(|| PathBuf::from("/proc/thread-self/ns/net"), Path::to_path_buf);
        let no_netns = |source| OffloadError::Netns { netns: path.clone(), source };
        let namespace = File::open(&path).map_err(no_netns)?;
        let inode = namespace.metadata().map_err(no_netns)?.ino();
        let pins = pin_dir.map(|d| TierPins::open(d, "doors")).transpose()?;
        let object = tier::load(SOURCE, object_bytes(), MAPS, pins.as_ref(), None)?;
        let refused = |source| OffloadError::Refused { object: SOURCE, source, journal: "attaching to the network namespace".into() };
        let pin = pins.as_ref().map(|p| p.maps().join(LINK));
        let program = tier::program(&object, PROGRAM)?;
        let old = pin.as_deref().and_then(|p| adopt(p, inode, &program));
        let adopted = old.is_some();
        let link = match (old, &pin) {
            (Some(link), _) => link,
            (None, pin) => {
                let mut link = program.attach_netns(namespace.as_raw_fd()).map_err(refused)?;
                if let Some(p) = pin {
                    link.pin(p).map_err(refused)?;
                }
                link
            }
        };
        if let Some(p) = &pins {
            p.forget_other_versions();
        }
        Ok(Self { doors: tier::map(&object, MAP)?, counts: tier::map(&object, "canal_doors_counts")?, object, link, pins, adopted })
    }

    /// Opens a door: `socket` is a listening TCP socket, or for [`Door::Dns`] a bound UDP one. An IPv6 socket that is not IPv6-only serves
    /// both families, an IPv4 one only its own. One socket of a reuse-port group stands for all. The door shuts when the socket closes.
    pub fn set(&self, door: Door, socket: &impl AsFd) -> Result<(), OffloadError> {
        let fd = u64::from(socket.as_fd().as_raw_fd().cast_unsigned());
        self.doors.update(&door.key(), &fd.to_ne_bytes(), MapFlags::ANY).map_err(|source| OffloadError::Map { map: MAP, source })
    }

    /// Shuts a door. One that is shut is fine.
    pub fn shut(&self, door: Door) -> Result<(), OffloadError> {
        match self.doors.delete(&door.key()) {
            Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::InvalidInput) => Err(OffloadError::Map { map: MAP, source: e }),
            _ => Ok(()),
        }
    }

    /// Whether a socket is in the door now.
    pub fn is_open(&self, door: Door) -> bool {
        self.doors.lookup(&door.key(), MapFlags::ANY).is_ok_and(|v| v.is_some())
    }

    /// Whether an earlier process's place on the namespace was taken over, so that there was no gap.
    pub fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Every counter's name and its count since the maps were made.
    pub fn counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        DOORS_COUNTS.into_iter().map(|c| Ok((doors_count_name(c), sum_counter(&self.counts, c as u32)?))).collect()
    }

    /// The program's name and how many instructions the verifier walked: the budget that a test holds.
    pub fn verified_insns(&self) -> Result<(&'static str, u32), OffloadError> {
        Ok((PROGRAM, tier::verified_insns(&self.object, SOURCE, PROGRAM)?))
    }

    /// Takes the program off the namespace and removes the pins.
    pub fn remove(self) -> Result<(), OffloadError> {
        self.link.detach().map_err(|source| OffloadError::Refused { object: SOURCE, source, journal: "detaching".into() })?;
        self.pins.map_or(Ok(()), |p| p.remove())
    }
}

/// The link pinned at `pin`, running our program from now on; `None` if it is not there or on another namespace.
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
