//! Attaches programs to devices: each is a filter of the device's clsact qdisc with a fixed handle
//! and priority. The filter holds its program and stays when this process ends, with or without a
//! bpffs. Attaching the next program replaces the old one between two packets. Start with
//! [`Hook::attach`].

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use libbpf_rs::{TC_EGRESS, TC_INGRESS, TcAttachPoint, TcHook};
use rustix::net::{AddressFamily, SocketType};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::OffloadError;

/// Priority and handle of the filter. Only Canal uses them, so that filters of other programs stay.
/// The number spells CANAL as far as hexadecimal digits can.
const PRIORITY: u32 = 0xca0;
const HANDLE: u32 = 1;

/// Direction of the packets at a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Ingress,
    Egress,
}

/// One direction of one device.
#[derive(Debug, Clone)]
pub(crate) struct Hook {
    pub(crate) netns: Option<PathBuf>,
    pub(crate) device: String,
    pub(crate) direction: Direction,
}

impl Hook {
    /// Attaches the program. It replaces the one that was attached before.
    pub(crate) fn attach(&self, program: BorrowedFd<'_>) -> Result<(), OffloadError> {
        self.with(program, |hook| {
            hook.attach_point(TC_INGRESS | TC_EGRESS).create()?;
            hook.attach_point(self.point())
                .replace(true)
                .attach()
                .map(drop)
        })
    }

    /// Detaches the program. The qdisc stays, because it may have other filters, and without any it
    /// does nothing. It is no error if there is no program or no such device.
    pub(crate) fn detach(&self, any: BorrowedFd<'_>) -> Result<(), OffloadError> {
        let gone = |e: &libbpf_rs::Error| {
            e.kind() == libbpf_rs::ErrorKind::NotFound
                || e.kind() == libbpf_rs::ErrorKind::InvalidInput
        };
        self.with(any, |hook| match hook.attach_point(self.point()).detach() {
            Err(e) if !gone(&e) => Err(e),
            _ => Ok(()),
        })
    }

    /// Returns the ID of the attached program.
    pub(crate) fn program_id(&self, any: BorrowedFd<'_>) -> Option<u32> {
        self.with(any, |hook| hook.attach_point(self.point()).query())
            .ok()
            .filter(|id| *id != 0)
    }

    fn point(&self) -> TcAttachPoint {
        match self.direction {
            Direction::Ingress => TC_INGRESS,
            Direction::Egress => TC_EGRESS,
        }
    }

    fn with<T: Send>(
        &self,
        program: BorrowedFd<'_>,
        f: impl FnOnce(&mut TcHook) -> Result<T, libbpf_rs::Error> + Send,
    ) -> Result<T, OffloadError> {
        let failed = |source| OffloadError::Hook {
            device: self.device.clone(),
            netns: self.netns.clone(),
            source,
        };
        within(self.netns.as_deref(), || {
            let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)
                .map_err(io::Error::from)?;
            let index = rustix::net::netdevice::name_to_index(&socket, &self.device)
                .map_err(io::Error::from)?;
            let mut hook = TcHook::new(program);
            f(hook
                .ifindex(index.cast_signed())
                .handle(HANDLE)
                .priority(PRIORITY))
        })?
        .map_err(failed)
    }
}

/// Runs `f` in the network namespace at `netns`, or in this thread's own.
pub(crate) fn within<T: Send>(
    netns: Option<&Path>,
    f: impl FnOnce() -> T + Send,
) -> Result<T, OffloadError> {
    let Some(path) = netns else { return Ok(f()) };
    let failed = |source| OffloadError::Netns {
        netns: path.to_path_buf(),
        source,
    };
    let ns = File::open(path).map_err(failed)?;
    // A network namespace belongs to a thread, so a new thread enters it and ends there.
    std::thread::scope(|s| {
        let there = s.spawn(|| {
            move_into_link_name_space(ns.as_fd(), Some(LinkNameSpaceType::Network))
                .map_err(io::Error::from)?;
            Ok(f())
        });
        there.join().unwrap_or_else(|_| {
            Err(io::Error::other(
                "the thread in the network namespace panicked",
            ))
        })
    })
    .map_err(failed)
}
