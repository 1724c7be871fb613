//! Interface guard (`bpf/interface_guard.bpf.c`): attaches the program to the host's side of
//! containers' interfaces. Writes for each interface the tenant, MAC and addresses of the container
//! behind it. It does not decide which container gets an interface. Start with
//! [`InterfaceGuard::load`].
//!
//! Filters hold the program and its maps, so interfaces stay guarded when this process dies. With
//! pins the next process continues with the same maps and replaces the program between two packets.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use canal_abi::interface_guard::{GuardedInterface, INTERFACE_GUARD_COUNTS, InterfaceAddressKey};
use libbpf_rs::{MapHandle, Object, ProgramInput};
use rustix::net::netdevice::{index_to_name, name_to_index};
use rustix::net::{AddressFamily, SocketType};

use crate::embedded::EmbeddedObject;
use crate::entries::Entries;
use crate::origins::sum_counter;
use crate::tc_hook::{Direction, Hook, within};
use crate::tier::{self, TierPins};
use crate::{OffloadError, sys};

static OBJECT: &EmbeddedObject<[u8]> = &EmbeddedObject(*include_bytes!(concat!(
    env!("OUT_DIR"),
    "/interface_guard.bpf.o"
)));

/// Returns the compiled object, for tests of its layout.
pub fn object_bytes() -> &'static [u8] {
    &OBJECT.0
}

const SOURCE: &str = "bpf/interface_guard.bpf.c";
const PROGRAM: &str = "canal_interface_guard";
const PINS: &str = "interface-guard";
const MAPS: &[&str] = &[
    "canal_guarded_interfaces",
    "canal_interface_addresses",
    "canal_interface_guard_counts",
];

/// Container behind an interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceBinding {
    /// Name of the host's side of the container's interface.
    pub device: String,
    /// VNI of the container's tenant.
    pub vni: u32,
    /// MAC address of the container.
    pub mac: [u8; 6],
    /// Addresses that the container may use.
    pub addresses: BTreeSet<IpAddr>,
}

/// Frames of one interface's container that the guard has refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedFrames {
    pub device: String,
    pub vni: u32,
    /// Number of refused frames since the interface was bound.
    pub frames: u64,
    /// Source address of the last frame that was refused because of its source address.
    pub last_address: Option<IpAddr>,
}

/// Loaded program with its maps. Dropping it changes nothing on the interfaces.
#[derive(Debug)]
pub struct InterfaceGuard {
    object: Object,
    netns: Option<PathBuf>,
    pins: Option<TierPins>,
    interfaces: Entries<u32, GuardedInterface>,
    addresses: Entries<InterfaceAddressKey, u32>,
    counts: MapHandle,
}

impl InterfaceGuard {
    /// Loads the program and adopts pinned maps. `netns` is the namespace of the interfaces; with
    /// `None` it is this thread's.
    ///
    /// # Errors
    /// Fails if the pin directory cannot be used or the kernel refuses the object.
    pub fn load(netns: Option<&Path>, pin_dir: Option<&Path>) -> Result<Self, OffloadError> {
        let pins = pin_dir.map(|dir| TierPins::open(dir, PINS)).transpose()?;
        let object = tier::load(SOURCE, object_bytes(), MAPS, pins.as_ref(), None)?;
        Ok(Self {
            netns: netns.map(Path::to_path_buf),
            pins,
            interfaces: Entries::of(&object, "canal_guarded_interfaces")?,
            addresses: Entries::of(&object, "canal_interface_addresses")?,
            counts: tier::map(&object, "canal_interface_guard_counts")?,
            object,
        })
    }

    /// Guards exactly the interfaces of `bindings`. Returns the devices that could not be guarded,
    /// with the reason: a device that does not exist does not stop the others. A device whose
    /// binding cannot be written is guarded nevertheless, and everything from it is refused.
    ///
    /// # Errors
    /// Fails if the namespace cannot be entered or the maps cannot be read.
    pub fn apply(
        &self,
        bindings: &[InterfaceBinding],
    ) -> Result<BTreeMap<String, OffloadError>, OffloadError> {
        let mut failed = BTreeMap::new();
        let mut wanted = HashMap::new();
        for binding in bindings {
            if let Err(error) = self.bind(binding) {
                failed.insert(binding.device.clone(), error);
            }
            // A device that exists and could not be bound stays guarded.
            if let Ok(index) = within(self.netns.as_deref(), || index_of(&binding.device))? {
                wanted.insert(index, binding);
            }
        }
        for index in self
            .interfaces
            .all()?
            .into_keys()
            .filter(|index| !wanted.contains_key(index))
        {
            self.release(index)?;
        }
        for key in self.addresses.all()?.into_keys() {
            let is_wanted = wanted
                .get(&key.interface)
                .is_some_and(|binding| keys(key.interface, binding).any(|own| own == key));
            if !is_wanted {
                self.addresses.remove(&key)?;
            }
        }
        Ok(failed)
    }

    /// Attaches the program before it writes the binding. In between the program refuses everything
    /// from the interface.
    fn bind(&self, binding: &InterfaceBinding) -> Result<(), OffloadError> {
        let hook = self.hook(&binding.device);
        let program = tier::program(&self.object, PROGRAM)?;
        if !self.is_guarded(&binding.device) {
            hook.attach(program.as_fd())?;
        }
        let index = within(self.netns.as_deref(), || index_of(&binding.device))??;
        let entry = self.interfaces.get(&index)?;
        if entry.is_none_or(|entry| (entry.vni, entry.mac) != (binding.vni, binding.mac)) {
            self.interfaces.put(
                &index,
                &GuardedInterface {
                    vni: binding.vni,
                    mac: binding.mac,
                    ..GuardedInterface::default()
                },
            )?;
        }
        for key in keys(index, binding) {
            if self.addresses.get(&key)? != Some(binding.vni) {
                self.addresses.put(&key, &binding.vni)?;
            }
        }
        Ok(())
    }

    /// Removes the guard from an interface that is not bound any more.
    fn release(&self, index: u32) -> Result<(), OffloadError> {
        if let Some(device) = within(self.netns.as_deref(), || name_of(index))? {
            self.hook(&device)
                .detach(tier::program(&self.object, PROGRAM)?.as_fd())?;
        }
        self.interfaces.remove(&index)
    }

    fn hook(&self, device: &str) -> Hook {
        Hook {
            netns: self.netns.clone(),
            device: device.to_owned(),
            direction: Direction::Ingress,
        }
    }

    /// Returns true if this process's program is on the device. Another process may have flushed
    /// the device's filters, or the device may be a new one.
    pub fn is_guarded(&self, device: &str) -> bool {
        let Ok(program) = tier::program(&self.object, PROGRAM) else {
            return false;
        };
        let own = sys::program_id(program.as_fd()).ok();
        own.is_some() && self.hook(device).program_id(program.as_fd()) == own
    }

    /// Returns the refused frames of each interface's container, by device. Interfaces that do not
    /// exist any more are left out.
    ///
    /// # Errors
    /// Fails if the map cannot be read or the namespace cannot be entered.
    pub fn refused(&self) -> Result<Vec<RefusedFrames>, OffloadError> {
        let mut refused = Vec::new();
        for (index, entry) in self.interfaces.all()? {
            if let Some(device) = within(self.netns.as_deref(), || name_of(index))? {
                refused.push(RefusedFrames {
                    device,
                    vni: entry.vni,
                    frames: entry.refused,
                    last_address: entry.last_refused(),
                });
            }
        }
        refused.sort_by(|a, b| a.device.cmp(&b.device));
        Ok(refused)
    }

    /// Returns every counter's name and its count since the maps were created.
    ///
    /// # Errors
    /// Fails if the counter map cannot be read.
    pub fn counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        INTERFACE_GUARD_COUNTS
            .into_iter()
            .map(|(count, name)| Ok((name, sum_counter(&self.counts, count as u32)?)))
            .collect()
    }

    /// Returns the number of instructions that the verifier walked, which a test compares with a
    /// budget.
    ///
    /// # Errors
    /// Fails if the kernel gives no information about the program.
    pub fn verified_insns(&self) -> Result<u32, OffloadError> {
        tier::verified_insns(&self.object, SOURCE, PROGRAM)
    }

    /// Removes the guard from all interfaces, then the pins.
    ///
    /// # Errors
    /// Fails if an interface cannot be released or a pin cannot be removed.
    pub fn remove(self) -> Result<(), OffloadError> {
        self.apply(&[])?;
        self.pins.map_or(Ok(()), |pins| pins.remove())
    }

    /// Runs the program over one frame as if it came from the interface with this index. It is for
    /// tests; the counters count the frame.
    ///
    /// # Errors
    /// Fails if the kernel cannot run the program.
    pub fn test_frame(&self, index: u32, frame: &[u8]) -> Result<u32, OffloadError> {
        // The kernel accepts `ifindex` in the context only for a device of this namespace; it is
        // the 11th word of `struct __sk_buff` (linux/bpf.h).
        let mut context = [0u8; 192];
        context[40..44].copy_from_slice(&index.to_ne_bytes());
        let input = ProgramInput {
            data_in: Some(frame),
            context_in: Some(&mut context),
            ..ProgramInput::default()
        };
        let program = tier::program(&self.object, PROGRAM)?;
        Ok(program
            .test_run(input)
            .map_err(|source| OffloadError::Trial {
                program: PROGRAM,
                source,
            })?
            .return_value)
    }
}

fn keys(index: u32, binding: &InterfaceBinding) -> impl Iterator<Item = InterfaceAddressKey> {
    binding
        .addresses
        .iter()
        .map(move |address| InterfaceAddressKey::new(index, *address))
}

fn index_of(device: &str) -> Result<u32, OffloadError> {
    let failed = |e: rustix::io::Errno| OffloadError::Interface {
        device: device.to_owned(),
        source: io::Error::from(e),
    };
    let socket =
        rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).map_err(failed)?;
    name_to_index(&socket, device).map_err(failed)
}

fn name_of(index: u32) -> Option<String> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).ok()?;
    index_to_name(&socket, index).ok()
}

/// Removes what an earlier process left: the guard on all interfaces, and the pins. It is no error
/// if there is nothing.
///
/// # Errors
/// Fails if an interface cannot be released or a pin cannot be removed.
pub fn remove(netns: Option<&Path>, pin_dir: &Path) -> Result<(), OffloadError> {
    let names = std::fs::read_dir(pin_dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name());
    let has_pins = names
        .into_iter()
        .any(|name| name.to_string_lossy().starts_with(PINS));
    if has_pins {
        InterfaceGuard::load(netns, Some(pin_dir))?.remove()
    } else {
        Ok(())
    }
}
