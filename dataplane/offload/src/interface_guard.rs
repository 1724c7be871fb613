//! The interface guard (`bpf/interface_guard.bpf.c`): puts it on the host's side of containers' interfaces, and says which tenant's container
//! with which MAC and addresses is behind each. It decides nothing about who gets an interface. Start at [`InterfaceGuard::load`].
//!
//! Filters hold the program and its maps, so that interfaces stay guarded when this process dies; with pins the next process goes on with
//! the same maps, and replaces the program between two packets.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use canal_abi::interface_guard::{GuardedInterface, INTERFACE_GUARD_COUNTS, InterfaceAddressKey};
use libbpf_rs::{MapHandle, Object, ProgramInput};
use rustix::net::netdevice::{index_to_name, name_to_index};
use rustix::net::{AddressFamily, SocketType};

use crate::entries::Entries;
use crate::hook::{Direction, Hook, within};
use crate::origins::sum_counter;
use crate::tier::{self, TierPins};
use crate::{OffloadError, sys};

/// Aligned as ELF wants it.
#[repr(C, align(8))]
struct Embedded<B: ?Sized>(B);
static OBJECT: &Embedded<[u8]> = &Embedded(*include_bytes!(concat!(env!("OUT_DIR"), "/interface_guard.bpf.o")));

/// The compiled object, for tests of its layout.
pub fn object_bytes() -> &'static [u8] {
    &OBJECT.0
}

const SOURCE: &str = "bpf/interface_guard.bpf.c";
const PROGRAM: &str = "canal_interface_guard";
const PINS: &str = "interface-guard";
const MAPS: &[&str] = &["canal_guarded_interfaces", "canal_interface_addresses", "canal_interface_guard_counts"];

/// The container behind an interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceBinding {
    /// The host's side of the container's interface.
    pub device: String,
    /// The tenant's VNI.
    pub vni: u32,
    /// The container's MAC.
    pub mac: [u8; 6],
    /// The container's addresses.
    pub addresses: BTreeSet<IpAddr>,
}

/// What an interface's container was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedFrames {
    pub device: String,
    pub vni: u32,
    /// Frames since the interface was bound.
    pub frames: u64,
    /// The source of the last one that was refused for its address.
    pub last_address: Option<IpAddr>,
}

/// The loaded program and its maps. Dropping it changes nothing on the interfaces.
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
    /// Loads the program and takes over pinned maps. `netns` is the namespace of the interfaces; `None`: this thread's.
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

    /// Guards the interfaces of `bindings` and no others. Gives the devices that could not be guarded, and why: one that is not there does
    /// not hold up the others. A device whose binding cannot be written is guarded all the same: everything from it is refused.
    pub fn apply(&self, bindings: &[InterfaceBinding]) -> Result<BTreeMap<String, OffloadError>, OffloadError> {
        let mut failed = BTreeMap::new();
        let mut wanted = HashMap::new();
        for binding in bindings {
            if let Err(error) = self.bind(binding) {
                failed.insert(binding.device.clone(), error);
            }
            // One that is there and could not be bound stays guarded.
            if let Ok(index) = within(self.netns.as_deref(), || index_of(&binding.device))? {
                wanted.insert(index, binding);
            }
        }
        for index in self.interfaces.all()?.into_keys().filter(|index| !wanted.contains_key(index)) {
            self.release(index)?;
        }
        for key in self.addresses.all()?.into_keys() {
            let is_wanted = wanted.get(&key.interface).is_some_and(|binding| keys(key.interface, binding).any(|own| own == key));
            if !is_wanted {
                self.addresses.remove(&key)?;
            }
        }
        Ok(failed)
    }

    /// The program before the binding: in between, nothing gets through that should not.
    fn bind(&self, binding: &InterfaceBinding) -> Result<(), OffloadError> {
        let hook = self.hook(&binding.device);
        let program = tier::program(&self.object, PROGRAM)?;
        if !self.is_guarded(&binding.device) {
            hook.attach(program.as_fd())?;
        }
        let index = within(self.netns.as_deref(), || index_of(&binding.device))??;
        let held = self.interfaces.get(&index)?;
        if held.is_none_or(|held| (held.vni, held.mac) != (binding.vni, binding.mac)) {
            self.interfaces.put(&index, &GuardedInterface { vni: binding.vni, mac: binding.mac, ..GuardedInterface::default() })?;
        }
        for key in keys(index, binding) {
            if self.addresses.get(&key)? != Some(binding.vni) {
                self.addresses.put(&key, &binding.vni)?;
            }
        }
        Ok(())
    }

    /// Takes the guard off an interface that nobody is bound to any more.
    fn release(&self, index: u32) -> Result<(), OffloadError> {
        if let Some(device) = within(self.netns.as_deref(), || name_of(index))? {
            self.hook(&device).detach(tier::program(&self.object, PROGRAM)?.as_fd())?;
        }
        self.interfaces.remove(&index)
    }

    fn hook(&self, device: &str) -> Hook {
        Hook { netns: self.netns.clone(), device: device.to_owned(), direction: Direction::Ingress }
    }

    /// Whether this process's program is on the device (somebody may have flushed its filters, or made the device anew).
    pub fn is_guarded(&self, device: &str) -> bool {
        let Ok(program) = tier::program(&self.object, PROGRAM) else { return false };
        let own = sys::program_id(program.as_fd()).ok();
        own.is_some() && self.hook(device).program_id(program.as_fd()) == own
    }

    /// What each interface's container was refused, by device. Interfaces that are gone are left out.
    pub fn refused(&self) -> Result<Vec<RefusedFrames>, OffloadError> {
        let mut refused = Vec::new();
        for (index, held) in self.interfaces.all()? {
            if let Some(device) = within(self.netns.as_deref(), || name_of(index))? {
                refused.push(RefusedFrames { device, vni: held.vni, frames: held.refused, last_address: held.last_refused() });
            }
        }
        refused.sort_by(|a, b| a.device.cmp(&b.device));
        Ok(refused)
    }

    /// Every counter's name and its count since the maps were made.
    pub fn counts(&self) -> Result<Vec<(&'static str, u64)>, OffloadError> {
        INTERFACE_GUARD_COUNTS.into_iter().map(|(count, name)| Ok((name, sum_counter(&self.counts, count as u32)?))).collect()
    }

    /// How many instructions the verifier walked: the budget that a test holds.
    pub fn verified_insns(&self) -> Result<u32, OffloadError> {
        tier::verified_insns(&self.object, SOURCE, PROGRAM)
    }

    /// Takes the guard off all interfaces, and removes the pins.
    pub fn remove(self) -> Result<(), OffloadError> {
        self.apply(&[])?;
        self.pins.map_or(Ok(()), |pins| pins.remove())
    }

    /// Runs the program over one frame as if it came from the interface with this index; counters count it. For tests.
    pub fn trial(&self, index: u32, frame: &[u8]) -> Result<u32, OffloadError> {
        // The kernel takes a context's `ifindex` only of a device of the namespace; the 11th word of `struct __sk_buff` (linux/bpf.h).
        let mut context = [0u8; 192];
        context[40..44].copy_from_slice(&index.to_ne_bytes());
        let input = ProgramInput { data_in: Some(frame), context_in: Some(&mut context), ..ProgramInput::default() };
        let program = tier::program(&self.object, PROGRAM)?;
        Ok(program.test_run(input).map_err(|source| OffloadError::Trial { program: PROGRAM, source })?.return_value)
    }
}

fn keys(index: u32, binding: &InterfaceBinding) -> impl Iterator<Item = InterfaceAddressKey> {
    binding.addresses.iter().map(move |address| InterfaceAddressKey::new(index, *address))
}

fn index_of(device: &str) -> Result<u32, OffloadError> {
    let failed = |e: rustix::io::Errno| OffloadError::Interface { device: device.to_owned(), source: io::Error::from(e) };
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).map_err(failed)?;
    name_to_index(&socket, device).map_err(failed)
}

fn name_of(index: u32) -> Option<String> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None).ok()?;
    index_to_name(&socket, index).ok()
}

/// Takes away what an earlier process left: the guard on all interfaces, and the pins. Nothing there is fine.
pub fn remove(netns: Option<&Path>, pin_dir: &Path) -> Result<(), OffloadError> {
    let names = std::fs::read_dir(pin_dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let has_pins = names.into_iter().any(|name| name.to_string_lossy().starts_with(PINS));
    if has_pins { InterfaceGuard::load(netns, Some(pin_dir))?.remove() } else { Ok(()) }
}
