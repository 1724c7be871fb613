//! Makes commands that run inside a seat. The caller starts them.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result, Tried};
use crate::seat::{Seat, find_program};
use crate::sys;

/// A command inside the host: its namespace, cgroup, /etc files, environment and directory.
/// Standard streams are the caller's to choose.
///
/// Errors: the program is nowhere, or the host is gone.
pub(crate) fn command(seat: &Seat, argv: &[impl AsRef<OsStr>]) -> Result<Command> {
    let Some((program, rest)) = argv.split_first() else {
        return Err(Error::Machine { what: "a command to run".into(), mend: "name a program".into() });
    };
    let mut command = Command::new(resolve(seat, program.as_ref())?);
    command.args(rest).env_clear().envs(&seat.env).current_dir(&seat.data);
    let (hosts, resolv) = (seat.etc.join("hosts"), seat.etc.join("resolv.conf"));
    let binds = [(hosts.as_path(), Path::new("/etc/hosts")), (resolv.as_path(), Path::new("/etc/resolv.conf"))];
    let entry = sys::Entry::open(Some(&seat.netns), Some(&seat.cgroup)).and_then(|entry| entry.furnish(seat.hostname(), &binds));
    sys::enter_on_exec(&mut command, entry.tried("cannot enter host", &seat.netns)?);
    Ok(command)
}

/// The program's path, looked up in the host's own PATH before anything is started, so that the
/// error can say where it was sought.
fn resolve(seat: &Seat, program: &OsStr) -> Result<PathBuf> {
    let name = program.to_string_lossy();
    let path = seat.env.get("PATH").map_or("", String::as_str);
    let dirs: Vec<PathBuf> = std::env::split_paths(path).collect();
    find_program(&name, &dirs).ok_or_else(|| Error::Machine {
        what: format!("the program {name:?}"),
        mend: format!("build or install it; it was sought in {path}"),
    })
}

/// Sends the command's output to the seat's log.
pub(crate) fn log_to(command: &mut Command, seat: &Seat) -> Result<()> {
    // Append mode: the supervisor may cut the file while the process writes.
    let out = File::options().create(true).append(true).open(&seat.log).tried("cannot open log", &seat.log)?;
    let err = out.try_clone().tried("cannot open log", &seat.log)?;
    command.stdin(Stdio::null()).stdout(out).stderr(err);
    Ok(())
}

/// Cuts a log that grew over `max` bytes: what it held moves to `NAME.1`. Lines written during
/// the copy are lost; a bounded log is worth that.
pub(crate) fn bound_log(log: &Path, max: u64) -> Result<()> {
    if std::fs::metadata(log).map_or(0, |found| found.len()) <= max {
        return Ok(());
    }
    let mut old = log.as_os_str().to_owned();
    old.push(".1");
    std::fs::copy(log, &old).tried("cannot copy log", log)?;
    let file = File::options().write(true).open(log).tried("cannot open log", log)?;
    file.set_len(0).tried("cannot cut log", log)
}
