//! Prepares commands that run inside a host, and bounds their logs. The caller starts the commands.
//! Start at [`command`].

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, IoContext, Result};
use crate::host_environment::{HostEnvironment, find_program};
use crate::sys;

/// Prepares a command inside the host: in its namespace and cgroup, with its /etc files,
/// environment and directory. The caller chooses the standard streams.
///
/// # Errors
///
/// The program is not found, or the host is gone.
pub(crate) fn command(
    environment: &HostEnvironment,
    argv: &[impl AsRef<OsStr>],
) -> Result<Command> {
    let Some((program, rest)) = argv.split_first() else {
        return Err(Error::Machine {
            what: "a command to run".into(),
            fix: "name a program".into(),
        });
    };
    let mut command = Command::new(resolve(environment, program.as_ref())?);
    command
        .args(rest)
        .env_clear()
        .envs(&environment.env)
        .current_dir(&environment.data);
    let (hosts, resolv) = (
        environment.etc.join("hosts"),
        environment.etc.join("resolv.conf"),
    );
    let binds = [
        (hosts.as_path(), Path::new("/etc/hosts")),
        (resolv.as_path(), Path::new("/etc/resolv.conf")),
    ];
    let entry = sys::ProcessEntry::open(Some(&environment.netns), Some(&environment.cgroup))
        .and_then(|entry| entry.bind_private_files(environment.hostname(), &binds));
    sys::enter_on_exec(
        &mut command,
        entry.tried("cannot enter host", &environment.netns)?,
    );
    Ok(command)
}

/// Finds the program's path in the host's own PATH before anything is started, so that the error
/// can contain that PATH.
fn resolve(environment: &HostEnvironment, program: &OsStr) -> Result<PathBuf> {
    let name = program.to_string_lossy();
    let path = environment.env.get("PATH").map_or("", String::as_str);
    let dirs: Vec<PathBuf> = std::env::split_paths(path).collect();
    find_program(&name, &dirs).ok_or_else(|| Error::Machine {
        what: format!("the program {name:?}"),
        fix: format!("build or install it; the search path is {path}"),
    })
}

/// Redirects the command's output to the host's log.
pub(crate) fn log_to(command: &mut Command, environment: &HostEnvironment) -> Result<()> {
    // Append mode, because the supervisor may truncate the file while the process writes.
    let out = File::options()
        .create(true)
        .append(true)
        .open(&environment.log)
        .tried("cannot open log", &environment.log)?;
    let err = out.try_clone().tried("cannot open log", &environment.log)?;
    command.stdin(Stdio::null()).stdout(out).stderr(err);
    Ok(())
}

/// Truncates a log that is larger than `max` bytes, after copying it to `NAME.1`. Lines written
/// during the copy are lost; that is the price of a bounded log.
pub(crate) fn bound_log(log: &Path, max: u64) -> Result<()> {
    if std::fs::metadata(log).map_or(0, |found| found.len()) <= max {
        return Ok(());
    }
    let mut old = log.as_os_str().to_owned();
    old.push(".1");
    std::fs::copy(log, &old).tried("cannot copy log", log)?;
    let file = File::options()
        .write(true)
        .open(log)
        .tried("cannot open log", log)?;
    file.set_len(0).tried("cannot cut log", log)
}
