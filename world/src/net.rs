//! Runs batches with one process per namespace and program, several namespaces in parallel, and
//! reads the kernel's counters. `tool_batch` decides what the lines contain. Start at
//! [`Tools::run`].

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, IoContext, Result};
use crate::sys;
use crate::tool_batch::{Forwarding, REFUSALS, Tool, ToolBatch, settings};

/// Directory in which `ip netns` stores its names.
pub(crate) const NETNS_DIR: &str = "/run/netns";

/// Returns the file of a named network namespace.
pub(crate) fn netns_path(name: &str) -> PathBuf {
    Path::new(NETNS_DIR).join(name)
}

impl Tool {
    fn program(self) -> &'static str {
        match self {
            Tool::Ip => "ip",
            Tool::Bridge => "bridge",
            Tool::Tc => "tc",
            Tool::Nft => "nft",
        }
    }

    /// Returns the program with the options with which it reads lines from standard input.
    fn command(self, netns: Option<&str>) -> Command {
        let mut command = Command::new(self.program());
        match (self, netns) {
            // nft has no option for a namespace, so the process is moved into it.
            (Tool::Nft, _) => command.args(["-f", "-"]),
            (_, Some(netns)) => command.args(["-n", netns, "-batch", "-"]),
            (_, None) => command.args(["-batch", "-"]),
        };
        command
    }
}

/// Checks that all programs exist. The error names the first missing one and its package.
pub(crate) fn check_tools() -> Result<()> {
    for (program, package) in [
        ("ip", "iproute2"),
        ("bridge", "iproute2"),
        ("tc", "iproute2"),
        ("nft", "nftables"),
    ] {
        let found = Command::new(program)
            .arg("-V")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .stdin(Stdio::null())
            .status();
        if found.is_err() {
            let fix = format!("install it: apt-get install {package}");
            return Err(Error::Machine {
                what: format!("the program {program:?}"),
                fix,
            });
        }
    }
    Ok(())
}

/// Runs batches of commands in namespaces.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tools {
    /// cgroup in which the programs run. Programs that build a world run in one of its cgroups,
    /// because a killed builder must not leave a program that continues to build.
    pub(crate) cgroup: Option<PathBuf>,
}

impl Tools {
    /// Runs one batch. The error contains the program's own message and the line at which it
    /// stopped.
    pub(crate) fn run(&self, batch: &ToolBatch) -> Result<()> {
        if batch.lines.is_empty() {
            return Ok(());
        }
        let program = batch.tool.program();
        let mut command = batch.tool.command(batch.netns.as_deref());
        let netns = batch
            .netns
            .as_deref()
            .filter(|_| batch.tool == Tool::Nft)
            .map(netns_path);
        let entry = sys::ProcessEntry::open(netns.as_deref(), self.cgroup.as_deref());
        sys::enter_on_exec(
            &mut command,
            entry.tried("cannot enter namespace for", program)?,
        );
        let started = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = started.tried("cannot start", program)?;
        let mut text = batch.lines.join("\n");
        text.push('\n');
        if let Some(mut input) = child.stdin.take() {
            // A program that stopped reading explains it on stderr.
            let _ = input.write_all(text.as_bytes());
        }
        let output = child.wait_with_output().tried("cannot wait for", program)?;
        if output.status.success() {
            return Ok(());
        }
        Err(refusal(
            batch,
            program,
            &String::from_utf8_lossy(&output.stderr),
        ))
    }

    /// Runs the batches of each namespace in order, and the namespaces in parallel.
    pub(crate) fn run_all(&self, namespaces: &[Vec<ToolBatch>]) -> Result<()> {
        each(namespaces, |batches| {
            batches.iter().try_for_each(|batch| self.run(batch))
        })
    }
}

/// Builds the error. The line number in "Command failed -:7" is replaced by the line's text.
fn refusal(batch: &ToolBatch, program: &'static str, stderr: &str) -> Error {
    let line = stderr.split("-:").nth(1).map(|rest| {
        rest.chars()
            .take_while(char::is_ascii_digit)
            .collect::<String>()
    });
    let line = line
        .and_then(|digits| digits.parse::<usize>().ok())
        .and_then(|number| batch.lines.get(number.wrapping_sub(1)));
    let message = match line {
        Some(line) => format!(
            "{} (at: {program} {line})",
            stderr.trim().replace('\n', "; ")
        ),
        None => stderr.trim().replace('\n', "; "),
    };
    Error::Tool {
        tool: program,
        netns: batch.netns.clone().unwrap_or_else(|| "the machine".into()),
        message,
    }
}

/// Runs `work` for every item, on as many threads as there are cores. The first error ends it and
/// is returned.
pub(crate) fn each<I: Sync>(items: &[I], work: impl Fn(&I) -> Result<()> + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    let lane = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = work(item) {
                next.store(items.len(), Ordering::Relaxed);
                let mut failure = failure
                    .lock()
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
                failure.get_or_insert(error);
                return;
            }
        }
    };
    let lanes = std::thread::available_parallelism()
        .map_or(2, usize::from)
        .min(items.len());
    std::thread::scope(|scope| {
        for _ in 0..lanes {
            scope.spawn(lane);
        }
    });
    failure
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
        .map_or(Ok(()), Err)
}

/// Writes kernel settings inside a namespace. A setting that this kernel lacks is no error, because
/// the kernel lacks the behavior too.
pub(crate) fn configure_space(netns: &str, forwarding: Forwarding) -> Result<()> {
    let path = netns_path(netns);
    let written = sys::in_netns(&path, || {
        for (name, value) in settings(forwarding) {
            let path = Path::new("/proc/sys").join(name);
            match std::fs::write(&path, value) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error).tried("cannot set", path);
                }
                _ => {}
            }
        }
        Ok(())
    });
    written.tried("cannot enter namespace", &path)?
}

/// Counters of packets that a host refused. A node refuses what its pods send to an uncaptured VIP,
/// another tenant, the underlay or the world outside. A gateway refuses what arrives by the wrong
/// overlay. The routers of a tier world refuse tunnels that a tenant's node may not have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefusedPackets {
    /// TCP segments. The host answers them with a reset.
    pub tcp: u64,
    /// All other packets. The host answers them with "port unreachable", the only answer that every
    /// UDP socket receives.
    pub other: u64,
    /// At a gateway: packets to or from an address that does not belong to the tenant of the
    /// overlay by which they arrived.
    pub foreign: u64,
    /// At a router: packets of a tenant's node with another underlay address than its own.
    pub source: u64,
    /// At a router: fragments from a tenant's node.
    pub fragment: u64,
    /// At a router: VXLAN packets of a tenant's node with a VNI that is not the tenant's, or too
    /// short to contain one.
    pub vni: u64,
    /// At a router: VXLAN packets of a tenant's node to neither a node of the tenant nor an edge.
    pub peer: u64,
    /// At a router: other packets of a tenant's node to a host of the provider, except to the
    /// controller and key servers.
    pub provider: u64,
    /// At a router: packets to a key server from a host that may not use it.
    pub keys: u64,
}

/// Reads the counters of refused packets of a node, gateway or router.
pub(crate) fn refused(netns: &Path) -> Result<RefusedPackets> {
    let mut command = Command::new("nft");
    command.arg("list counters table").arg(REFUSALS);
    let entry =
        sys::ProcessEntry::open(Some(netns), None).tried("cannot enter namespace", netns)?;
    sys::enter_on_exec(&mut command, entry);
    let output = command
        .stdin(Stdio::null())
        .output()
        .tried("cannot start", "nft")?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::Tool {
            tool: "nft",
            netns: netns.display().to_string(),
            message,
        });
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let count = |name: &str| counted(&text, &format!("refused_{name}"));
    Ok(RefusedPackets {
        tcp: count("tcp"),
        other: count("other"),
        foreign: count("foreign"),
        source: count("source"),
        fragment: count("fragment"),
        vni: count("vni"),
        peer: count("peer"),
        provider: count("provider"),
        keys: count("keys"),
    })
}

/// Finds the packets of `counter NAME { packets 3 bytes 180 }`, which spans several lines.
fn counted(text: &str, name: &str) -> u64 {
    let mut words = text
        .split_whitespace()
        .skip_while(|word| *word != name)
        .skip_while(|word| *word != "packets");
    words
        .nth(1)
        .and_then(|number| number.parse().ok())
        .unwrap_or(0)
}

/// Bytes and packets through one interface.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub rx_bytes: u64,
    pub rx_packets: u64,
    pub tx_bytes: u64,
    pub tx_packets: u64,
}

/// Returns the counters of every interface in a namespace, by name.
pub(crate) fn traffic(netns: &Path) -> Result<Vec<(String, Traffic)>> {
    let text = sys::in_netns(netns, || {
        std::fs::read_to_string("/proc/thread-self/net/dev")
    });
    let text = text
        .and_then(|text| text)
        .tried("cannot read counters of", netns)?;
    Ok(text.lines().skip(2).filter_map(device_line).collect())
}

/// Parses a line `  eth0: rx_bytes rx_packets …(8 fields) tx_bytes tx_packets …`.
fn device_line(line: &str) -> Option<(String, Traffic)> {
    let (name, numbers) = line.split_once(':')?;
    let numbers: Vec<u64> = numbers
        .split_whitespace()
        .filter_map(|number| number.parse().ok())
        .collect();
    let at = |index: usize| numbers.get(index).copied();
    let traffic = Traffic {
        rx_bytes: at(0)?,
        rx_packets: at(1)?,
        tx_bytes: at(8)?,
        tx_packets: at(9)?,
    };
    Some((name.trim().to_owned(), traffic))
}
