//! Socket steering (`bpf/socket_steering.bpf.c`): assigns a replica's sessions to service addresses
//! to the gateway's listening sockets. It does not open sockets. Start with
//! [`SocketSteering::attach`].
//!
//! The program stays when this process dies. It then refuses sessions to services, because a closed
//! socket leaves the map by itself.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use canal_abi::tier::{
    LISTENER_DNS4, LISTENER_HBONE4, LISTENER_PLAIN4, STEERING_COUNTS, steering_count_name,
};
use libbpf_rs::query::LinkTypeInfo;
use libbpf_rs::{ErrorKind, Link, MapCore, MapFlags, MapHandle, Object, Program};

use crate::OffloadError;
use crate::embedded::EmbeddedObject;
use crate::origins::sum_counter;
use crate::tier::{self, TierPins};

static OBJECT: &EmbeddedObject<[u8]> = &EmbeddedObject(*include_bytes!(concat!(
    env!("OUT_DIR"),
    "/socket_steering.bpf.o"
)));

/// Returns the compiled object, for tests of its layout.
pub fn object_bytes() -> &'static [u8] {
    &OBJECT.0
}

const PROGRAM: &str = "canal_steer";
const SOURCE: &str = "bpf/socket_steering.bpf.c";
const MAP: &str = "canal_service_listeners";
const MAPS: &[&str] = &[MAP, "canal_steering_counts"];
const LINK: &str = "link";

/// Listener that takes a kind of sessions to service addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServiceListener {
    /// TCP port 15008 of every service address.
    Hbone,
    /// Any other TCP port of a service address.
    Plain,
    /// UDP port 53 of every service address.
    Dns,
}

impl ServiceListener {
    fn key(self) -> [u8; 4] {
        match self {
            Self::Hbone => LISTENER_HBONE4,
            Self::Plain => LISTENER_PLAIN4,
            Self::Dns => LISTENER_DNS4,
        }
        .to_ne_bytes()
    }
}

/// Loaded program. Dropping it detaches the program only if nothing is pinned.
#[derive(Debug)]
pub struct SocketSteering {
    object: Object,
    link: Link,
    pins: Option<TierPins>,
    steering: MapHandle,
    counts: MapHandle,
    adopted: bool,
}

impl SocketSteering {
    /// Attaches the program to the network namespace at the path `netns`, or to this thread's. A
    /// link that an earlier process pinned for the same namespace gets the new program without a
    /// gap.
    ///
    /// # Errors
    /// Fails if the namespace or the pin directory cannot be opened, or if the kernel refuses the
    /// program or its attachment.
    pub fn attach(netns: Option<&Path>, pin_dir: Option<&Path>) -> Result<Self, OffloadError> {
        let path = netns.map_or_else(
            || PathBuf::from("/proc/thread-self/ns/net"),
            Path::to_path_buf,
        );
        let no_netns = |source| OffloadError::Netns {
            netns: path.clone(),
            source,
        };
        let namespace = File::open(&path).map_err(no_netns)?;
        let inode = namespace.metadata().map_err(no_netns)?.ino();
        let pins = pin_dir
            .map(|d| TierPins::open(d, "socket_steering"))
            .transpose()?;
        let object = tier::load(SOURCE, object_bytes(), MAPS, pins.as_ref(), None)?;
        let refused = |source| OffloadError::Refused {
            object: SOURCE,
            source,
            journal: "attaching to the network namespace".into(),
        };
        let pin = pins.as_ref().map(|p| p.maps().join(LINK));
        let program = tier::program(&object, PROGRAM)?;
        // The link of an earlier process gets the new program in place, so no session is refused
        // between.
        let old = pin.as_deref().and_then(|p| adopt(p, inode, &program));
        let adopted = old.is_some();
        let link = match (old, &pin) {
            (Some(link), _) => link,
            (None, pin) => {
                let mut link = program
                    .attach_netns(namespace.as_raw_fd())
                    .map_err(refused)?;
                if let Some(p) = pin {
                    link.pin(p).map_err(refused)?;
                }
                link
            }
        };
        // The link runs the new program now, so nothing uses the pins of older versions.
        if let Some(p) = &pins {
            p.forget_other_versions();
        }
        Ok(Self {
            steering: tier::map(&object, MAP)?,
            counts: tier::map(&object, "canal_steering_counts")?,
            object,
            link,
            pins,
            adopted,
        })
    }

    /// Assigns the sessions of `listener` to `socket`: a listening TCP socket, or a bound UDP
    /// socket for [`ServiceListener::Dns`]. An IPv6 socket that is not IPv6-only serves both
    /// families, an IPv4 socket only its own. One socket of a reuse-port group stands for all. When
    /// the socket closes, the sessions are refused.
    ///
    /// # Errors
    /// Returns [`OffloadError::Map`] if the kernel does not accept the socket.
    pub fn set(&self, listener: ServiceListener, socket: &impl AsFd) -> Result<(), OffloadError> {
        let fd = u64::from(socket.as_fd().as_raw_fd().cast_unsigned());
        self.steering
            .update(&listener.key(), &fd.to_ne_bytes(), MapFlags::ANY)
            .map_err(|source| OffloadError::Map { map: MAP, source })
    }

    /// Removes the socket of `listener`, so that its sessions are refused. It is no error if there
    /// is none.
    ///
    /// # Errors
    /// Returns [`OffloadError::Map`] if the kernel refuses the removal.
    pub fn clear_sockets(&self, listener: ServiceListener) -> Result<(), OffloadError> {
        match self.steering.delete(&listener.key()) {
            Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::InvalidInput) => {
                Err(OffloadError::Map {
                    map: MAP,
                    source: e,
                })
            }
            _ => Ok(()),
        }
    }

    /// Returns true if a socket serves `listener` now.
    pub fn is_open(&self, listener: ServiceListener) -> bool {
        self.steering
            .lookup(&listener.key(), MapFlags::ANY)
            .is_ok_and(|v| v.is_some())
    }

    /// Returns true if the link of an earlier process was adopted, so that there was no gap.
    pub fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Returns every counter's name and its count since the maps were created.
    ///
    /// # Errors
    /// Fails if the counter map cannot be read.
    pub fn counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        STEERING_COUNTS
            .into_iter()
            .map(|c| Ok((steering_count_name(c), sum_counter(&self.counts, c as u32)?)))
            .collect()
    }

    /// Returns the program's name and the number of instructions that the verifier walked, which a
    /// test compares with a budget.
    ///
    /// # Errors
    /// Fails if the kernel gives no information about the program.
    pub fn verified_insns(&self) -> Result<(&'static str, u32), OffloadError> {
        Ok((
            PROGRAM,
            tier::verified_insns(&self.object, SOURCE, PROGRAM)?,
        ))
    }

    /// Detaches the program from the namespace and removes the pins.
    ///
    /// # Errors
    /// Fails if the link cannot be detached or a pin cannot be removed.
    pub fn remove(self) -> Result<(), OffloadError> {
        self.link.detach().map_err(|source| OffloadError::Refused {
            object: SOURCE,
            source,
            journal: "detaching".into(),
        })?;
        self.pins.map_or(Ok(()), |p| p.remove())
    }
}

/// Adopts the link pinned at `pin`: it runs our program from now on. Returns `None` if there is no
/// link or it belongs to another namespace.
fn adopt(pin: &Path, netns_inode: u64, program: &Program<'_>) -> Option<Link> {
    let mut link = Link::open(pin).ok()?;
    let ours =
        matches!(link.info().ok()?.info, LinkTypeInfo::NetNs(n) if u64::from(n.ino) == netns_inode);
    if ours && link.update_prog(program).is_ok() {
        return Some(link);
    }
    if let Err(e) = fs::remove_file(pin) {
        tracing::warn!(pin = %pin.display(), %e, "socket steering: cannot remove a stale pin; it stays");
    }
    None
}
