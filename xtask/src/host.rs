//! Facts about the run that reports state: the commit, the machine, the day. It measures nothing.

use std::path::Path;
use std::process::Command;

use anyhow::Context;

/// Reports that a run itself changes, so that a change of them is no change of the tree.
const REPORTS: [&str; 2] = ["docs/soak/", "docs/timing.md"];

fn output(program: &str, arguments: &[&str], folder: &Path) -> anyhow::Result<String> {
    let out = Command::new(program)
        .args(arguments)
        .current_dir(folder)
        .output()
        .with_context(|| program.to_owned())?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// Returns the commit that runs, and whether the files differ from it.
pub(crate) fn commit(root: &Path) -> anyhow::Result<(String, bool)> {
    let commit = output("git", &["rev-parse", "HEAD"], root)?;
    let changed = output(
        "git",
        &["status", "--porcelain", "--untracked-files=no"],
        root,
    )?;
    Ok((
        commit,
        changed
            .lines()
            .any(|line| !REPORTS.iter().any(|report| line.contains(report))),
    ))
}

pub(crate) fn machine() -> anyhow::Result<String> {
    let read = |path: &str| std::fs::read_to_string(path).with_context(|| path.to_owned());
    let cpus = read("/proc/cpuinfo")?;
    let models: Vec<&str> = cpus
        .lines()
        .filter_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map(|(_, name)| name)
        .collect();
    let memory = read("/proc/meminfo")?;
    let kib: u64 = memory
        .split_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .unwrap_or_default();
    let kernel = read("/proc/sys/kernel/osrelease")?;
    let model = models.first().unwrap_or(&"processor of unknown model");
    Ok(format!(
        "{} × {model}, {} GiB, Linux {}",
        models.len(),
        kib.div_ceil(1 << 20),
        kernel.trim()
    ))
}

pub(crate) fn day() -> anyhow::Result<String> {
    output("date", &["--utc", "+%Y-%m-%d"], Path::new("/"))
}

pub(crate) fn moment() -> anyhow::Result<String> {
    output("date", &["--utc", "+%Y-%m-%dT%H:%M:%SZ"], Path::new("/"))
}

/// Returns the mean number of runnable processes in the last minute.
pub(crate) fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ')
        .next()
        .and_then(|word| word.parse().ok())
        .unwrap_or_default()
}

pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns a short name of this run. It is part of the names of its worlds, so that two runs on one
/// machine do not remove each other's worlds.
pub(crate) fn run_id() -> String {
    base36(std::process::id())
}

fn base36(mut number: u32) -> String {
    let mut text = String::new();
    loop {
        text.insert(0, char::from_digit(number % 36, 36).unwrap_or('0'));
        number /= 36;
        if number == 0 {
            return text;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_run_is_short() {
        assert_eq!(
            (base36(0), base36(35), base36(36)),
            ("0".into(), "z".into(), "10".into())
        );
        // The largest process id of Linux.
        assert_eq!(base36(1 << 22).len(), 5);
    }
}
