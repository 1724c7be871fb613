//! The network namespace that a bench runs in. It knows no proxy.

use anyhow::Context;

use crate::origin;

/// Set in the child that runs inside the private network namespace.
const INSIDE: &str = "CANAL_BENCH_INSIDE";

/// Runs this program again in a network namespace of its own, which goes when it goes: nothing can reach it, and it can reach nothing. The
/// caller goes on only inside.
pub fn enter() -> anyhow::Result<()> {
    if std::env::var_os(INSIDE).is_some() {
        return Ok(());
    }
    let script = format!("ip link set lo up && ip address add {} dev lo && exec \"$0\" \"$@\"", origin::NETWORK);
    let status = std::process::Command::new("unshare")
        .args(["--net", "--kill-child", "--fork", "--", "sh", "-c", &script])
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1")
        .status()
        .context("unshare: network namespaces need root; run this as root")?;
    std::process::exit(status.code().unwrap_or(1))
}
