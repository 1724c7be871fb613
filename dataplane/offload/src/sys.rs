//! System calls that no safe crate offers: bpffs mounts, the namespace cookie, the BPF clock,
//! program information. All `unsafe` code of this crate is here.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Socket option `SO_NETNS_COOKIE` (asm-generic/socket.h). libc 0.2 does not define it on every
/// target.
const SO_NETNS_COOKIE: libc::c_int = 71;

fn path_c(p: &Path) -> io::Result<CString> {
    CString::new(p.as_os_str().as_bytes())
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "the path contains a NUL byte"))
}

/// Mounts a bpffs on `dir`, readable by root only.
pub(crate) fn mount_bpffs(dir: &Path) -> io::Result<()> {
    let target = path_c(dir)?;
    // SAFETY: all pointers are NUL-terminated strings that live across the call.
    let rc = unsafe {
        libc::mount(
            c"canal-bpf".as_ptr(),
            target.as_ptr(),
            c"bpf".as_ptr(),
            0,
            c"mode=0700".as_ptr().cast(),
        )
    };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Unmounts `dir` as soon as it is no longer busy.
pub(crate) fn unmount(dir: &Path) -> io::Result<()> {
    let target = path_c(dir)?;
    // SAFETY: the pointer is a NUL-terminated string that lives across the call.
    let rc = unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
    if rc == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns the cookie of the network namespace in which `socket` was created. It is the first part
/// of an origin's key.
///
/// # Errors
/// Fails if the kernel does not know the socket option.
pub fn netns_cookie(socket: impl AsFd) -> io::Result<u64> {
    let mut cookie = 0u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: `cookie` is 8 writable bytes and `len` says so; the descriptor is borrowed for the
    // call.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            std::ptr::from_mut(&mut cookie).cast(),
            std::ptr::from_mut(&mut len),
        )
    };
    if rc == 0 {
        Ok(cookie)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns the time of the clock that `bpf_ktime_get_ns` reads, in nanoseconds.
pub(crate) fn ktime_ns() -> u64 {
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `t` is writable; CLOCK_MONOTONIC always exists on Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

fn program_info(program: BorrowedFd<'_>) -> io::Result<libbpf_sys::bpf_prog_info> {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut len = size_of_val(&info) as u32;
    // SAFETY: `info` is `len` writable bytes whose pointers are all null, so the kernel fills only
    // the fixed fields.
    let rc = unsafe {
        libbpf_sys::bpf_obj_get_info_by_fd(
            program.as_raw_fd(),
            std::ptr::from_mut(&mut info).cast(),
            &mut len,
        )
    };
    if rc == 0 {
        Ok(info)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns the number of instructions that the verifier walked before it accepted the program.
pub(crate) fn verified_instructions(program: BorrowedFd<'_>) -> io::Result<u32> {
    program_info(program).map(|i| i.verified_insns)
}

/// Returns the ID by which the kernel lists the program.
pub(crate) fn program_id(program: BorrowedFd<'_>) -> io::Result<u32> {
    program_info(program).map(|i| i.id)
}
