//! The namespaces of a bench: private network, processes and mounts, which disappear with it
//! however it ends. It starts no proxy.

use anyhow::Context;

use crate::origin;

/// Variable that is set in the child inside the private namespaces.
const INSIDE: &str = "CANAL_BENCH_INSIDE";

/// Folder of temporary files inside: memory that only this run sees.
const FILES: &str = "/mnt";

/// Runs this program again in private namespaces that have no connection to the outside. They
/// disappear with the child, and the child ends with this process, even if it is killed: no
/// process, file or device is left. Only the child returns from this function.
pub fn enter() -> anyhow::Result<()> {
    if std::env::var_os(INSIDE).is_some() {
        return Ok(());
    }
    let here = std::env::current_dir()?;
    anyhow::ensure!(
        !here.starts_with(FILES),
        "{} is below {FILES}, which is covered while the bench runs; fix: move the checkout",
        here.display()
    );
    // Envoy writes files in /dev/shm. Ports are scarce if each request has its own connection.
    let script = format!(
        "set -e; mount -t tmpfs canal-bench {FILES}; mount -t tmpfs canal-bench /dev/shm; ip link set lo up; ip address add {} dev lo; \
         echo 20000 65000 > /proc/sys/net/ipv4/ip_local_port_range; exec \"$0\" \"$@\"",
        origin::NETWORK
    );
    let status = std::process::Command::new("setpriv")
        .args([
            "--pdeathsig",
            "KILL",
            "unshare",
            "--net",
            "--pid",
            "--mount-proc",
            "--kill-child",
            "--fork",
            "--",
            "sh",
            "-c",
            &script,
        ])
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1")
        .env("TMPDIR", FILES)
        .status()
        .context("setpriv and unshare: namespaces need root; fix: run this as root")?;
    std::process::exit(status.code().unwrap_or(1))
}
