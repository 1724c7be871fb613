//! The node proxy's time per session, by the activity of its threads (`perf record` on the
//! processor's clock), and the lower bound for any key server. It prints figures and does not
//! assess them.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};

use crate::exchange;
use crate::figure_spread::FigureSpread;
use crate::limits;
use crate::load::{ConnectPace, LoadRun};
use crate::scene::{AsymmetricMode, CertificateAlgorithm, KeyBenchWorld, Network};

#[derive(clap::Args)]
pub(crate) struct ProfileFlags {
    #[arg(long, value_enum, default_value_t = CertificateAlgorithm::Ecdsa)]
    algorithm: CertificateAlgorithm,
    // One flow at a time, so that no thread waits for another flow's work.
    #[arg(long, default_value_t = 1)]
    concurrency: usize,
    /// Seconds of load for each mode and round
    // 25,000 samples of a busy thread.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Number of worlds in which each mode is measured, in turn
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Share of a core for the node proxy
    #[arg(long, default_value_t = 0.15)]
    share: f64,
    #[arg(long, value_enum, default_value_t = Network::Apart)]
    network: Network,
}

/// Samples per second of each running thread.
/// A prime number, so that samples do not fall in step with periodic timers.
const SAMPLES_PER_SECOND: &str = "4999";
/// Exchanges per round, for the cost of an exchange.
/// At about 200 µs each they take less than a second.
const EXCHANGES: u32 = 3_000;
/// Requests of a handshake to a key server.
/// The first begins the handshake, and the second brings the client's flight.
const REQUESTS_PER_HANDSHAKE: f64 = 2.0;

/// Activity of a sampled thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ThreadActivity {
    Cryptography,
    Tls,
    Keys,
    Runtime,
    Memory,
    Rest,
    Enter,
    Send,
    Deliver,
    Receive,
    Poll,
    Switch,
    Open,
    Kernel,
}

impl ThreadActivity {
    const ALL: [ThreadActivity; 14] = [
        ThreadActivity::Cryptography,
        ThreadActivity::Tls,
        ThreadActivity::Keys,
        ThreadActivity::Runtime,
        ThreadActivity::Memory,
        ThreadActivity::Rest,
        ThreadActivity::Enter,
        ThreadActivity::Send,
        ThreadActivity::Deliver,
        ThreadActivity::Receive,
        ThreadActivity::Poll,
        ThreadActivity::Switch,
        ThreadActivity::Open,
        ThreadActivity::Kernel,
    ];

    fn name(self) -> &'static str {
        match self {
            ThreadActivity::Cryptography => "cryptography and hashes (aws-lc)",
            ThreadActivity::Tls => "TLS and certificates (rustls, webpki, x509)",
            ThreadActivity::Keys => "asking key servers (`keyserver-client`, keyrpc)",
            ThreadActivity::Runtime => "runtime (tokio, mio, clock)",
            ThreadActivity::Memory => "allocator, moving memory",
            ThreadActivity::Rest => "rest of the node proxy and its libraries",
            ThreadActivity::Enter => "kernel: entering and leaving system calls",
            ThreadActivity::Send => "kernel: sending",
            ThreadActivity::Deliver => "kernel: what a send delivers on the sender's time",
            ThreadActivity::Receive => "kernel: receiving",
            ThreadActivity::Poll => "kernel: epoll, looking",
            ThreadActivity::Switch => "kernel: epoll, giving the core up and getting it back",
            ThreadActivity::Open => "kernel: accept, options, close",
            ThreadActivity::Kernel => "kernel: rest",
        }
    }

    /// Returns whether a key server can take over this activity.
    fn is_taken(self) -> bool {
        matches!(self, ThreadActivity::Cryptography | ThreadActivity::Tls)
    }
}

/// Samples of one mode.
#[derive(Default)]
struct ProfileResult {
    /// CPU time of the node proxy in each round, in µs.
    node_us: Vec<f64>,
    samples: [f64; ThreadActivity::ALL.len()],
}

impl ProfileResult {
    fn us(&self, part: ThreadActivity) -> f64 {
        let all: f64 = self.samples.iter().sum();
        FigureSpread::of(self.node_us.clone()).median * self.samples[part as usize] / all
    }
}

pub(crate) fn run(flags: &ProfileFlags) -> anyhow::Result<()> {
    println!("Processor: {}.", limits::processor());
    if Command::new("perf")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_err()
    {
        println!(
            "\n**SKIPPED: `perf` is not installed, so the node proxy cannot be profiled. fix: install linux-perf.**"
        );
        return Ok(());
    }
    let mut seen: [ProfileResult; AsymmetricMode::ALL.len()] = Default::default();
    let mut exchanges = Vec::new();
    for round in 0..flags.rounds as usize {
        for at in (0..AsymmetricMode::ALL.len()).map(|n| (n + round) % AsymmetricMode::ALL.len()) {
            eprintln!(
                "{}, round {} of {}",
                AsymmetricMode::ALL[at].name(),
                round + 1,
                flags.rounds
            );
            watch(flags, AsymmetricMode::ALL[at], &mut seen[at])?;
        }
        exchanges.push(exchange::cost(EXCHANGES)?.as_secs_f64() * 1e6);
    }
    print(flags, &seen, FigureSpread::of(exchanges));
    Ok(())
}

fn watch(
    flags: &ProfileFlags,
    mode: AsymmetricMode,
    seen: &mut ProfileResult,
) -> anyhow::Result<()> {
    let scene = KeyBenchWorld::up(flags.algorithm, mode, flags.network)?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("perf.data");
    let mut watching = record(scene.node(), &file)?;
    let run = LoadRun {
        pace: ConnectPace::Concurrency(flags.concurrency),
        seconds: flags.seconds,
        share: Some(flags.share),
        handshakes: true,
    };
    let measured = scene.run(&run);
    // perf writes its data when it receives SIGINT.
    let id = i32::try_from(watching.id())
        .ok()
        .and_then(rustix::process::Pid::from_raw)
        .context("perf has a process id")?;
    rustix::process::kill_process(id, rustix::process::Signal::INT)?;
    // perf was ended by a signal, so its status says nothing. Missing data fails below.
    watching.wait()?;
    // A failed load is reported only now, because perf had to end in any case.
    seen.node_us.push(measured?.node_us);
    let script = Command::new("perf")
        .args(["script", "-F", "ip,sym,dso", "-i"])
        .arg(&file)
        .stderr(Stdio::null())
        .output()
        .context("perf")?;
    let text = String::from_utf8_lossy(&script.stdout);
    let mut samples = 0;
    // `perf script` separates stacks by empty lines.
    for stack in text.split("\n\n").filter(|stack| !stack.trim().is_empty()) {
        let frames: Vec<StackFrame<'_>> = stack.lines().filter_map(StackFrame::read).collect();
        // A stack without frames has no part.
        if let Some(part) = part(&frames) {
            seen.samples[part as usize] += 1.0;
            samples += 1;
        }
    }
    ensure!(samples > 0, "perf saw nothing of process {}", scene.node());
    Ok(())
}

fn record(process: u32, file: &Path) -> anyhow::Result<Child> {
    let mut command = Command::new("perf");
    command
        .args([
            "record",
            "-q",
            "-F",
            SAMPLES_PER_SECOND,
            "-e",
            "cpu-clock",
            "-g",
            "-p",
            &process.to_string(),
            "-o",
        ])
        .arg(file);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("perf")
}

/// One line of a stack.
#[derive(Debug, Clone, Copy)]
struct StackFrame<'a> {
    symbol: &'a str,
    object: &'a str,
}

impl<'a> StackFrame<'a> {
    /// `ADDRESS SYMBOL (OBJECT)`.
    fn read(line: &'a str) -> Option<Self> {
        let (_, rest) = line.trim().split_once(' ')?;
        let (symbol, object) = rest.rsplit_once(" (")?;
        Some(Self {
            symbol,
            object: object.trim_end_matches(')'),
        })
    }
}

/// Returns the activity of a stack, innermost frame first. Outside the kernel only the innermost
/// frame is known: there are no frame pointers.
fn part(frames: &[StackFrame<'_>]) -> Option<ThreadActivity> {
    let first = frames.first()?;
    Some(
        if first.object.contains("[kernel") || first.object.contains("[unknown]") {
            kernel_part(frames)
        } else {
            own_part(first)
        },
    )
}

fn own_part(frame: &StackFrame<'_>) -> ThreadActivity {
    let StackFrame { symbol, object } = *frame;
    let has = |words: &[&str]| words.iter().any(|word| symbol.contains(word));
    // The vDSO reads the clock.
    if object.contains("vdso") {
        return ThreadActivity::Runtime;
    }
    if object.contains("libc.so") {
        // Of libc, only copies and allocations have a part of their own.
        return if symbol.contains("mem") || symbol.contains("alloc") {
            ThreadActivity::Memory
        } else {
            ThreadActivity::Rest
        };
    }
    // The symbol of a generic function names several crates; the most specific ones come first.
    if has(&["canal_keyserver_client", "keyrpc"]) {
        return ThreadActivity::Keys;
    }
    if has(&[
        "rustls",
        "webpki",
        "x509_parser",
        "asn1_rs",
        "der_parser",
        "nom::",
        "untrusted::",
        "canal_tls",
        "canal_identity",
    ]) {
        return ThreadActivity::Tls;
    }
    if has(&[
        "aws_lc",
        "ecp_nistz",
        "p256",
        "mlkem",
        "mlk_",
        "25519",
        "keccak",
        "aesni",
        "gcm",
        "bignum_",
        "bn_",
        "sha2",
        "sha5",
        "evp_",
        "EVP_",
    ]) {
        return ThreadActivity::Cryptography;
    }
    if has(&["tokio", "mio::", "std::time", "futures_"]) {
        return ThreadActivity::Runtime;
    }
    if symbol.starts_with("mi_")
        || symbol.starts_with("_mi_")
        || has(&[
            "__rust_alloc",
            "__rust_dealloc",
            "__rust_realloc",
            "alloc::raw_vec",
        ])
    {
        return ThreadActivity::Memory;
    }
    ThreadActivity::Rest
}

fn kernel_part(frames: &[StackFrame<'_>]) -> ThreadActivity {
    let called = frames
        .iter()
        .find_map(|frame| frame.symbol.strip_prefix("__x64_sys_"));
    let passes = |names: &[&str]| {
        frames
            .iter()
            .any(|frame| names.iter().any(|name| frame.symbol.starts_with(name)))
    };
    // In this build of the kernel not every call has its own frame.
    let writes = matches!(called, Some("sendto" | "sendmsg" | "write" | "writev"))
        || passes(&["do_writev", "ksys_write"]);
    match called {
        // A packet to a local socket is delivered on the time of the thread that sends it.
        _ if writes && passes(&["handle_softirqs", "__do_softirq", "net_rx_action"]) => {
            ThreadActivity::Deliver
        }
        _ if writes => ThreadActivity::Send,
        Some("recvfrom" | "recvmsg" | "read" | "readv") => ThreadActivity::Receive,
        Some("epoll_wait" | "epoll_pwait" | "epoll_pwait2")
            if passes(&["schedule", "__schedule"]) =>
        {
            ThreadActivity::Switch
        }
        Some("epoll_wait" | "epoll_pwait" | "epoll_pwait2") => ThreadActivity::Poll,
        // Only a connection's begin and end need these calls.
        Some(
            "accept4" | "setsockopt" | "getsockopt" | "getsockname" | "close" | "epoll_ctl"
            | "shutdown" | "fcntl",
        ) => ThreadActivity::Open,
        // Work that a close defers.
        _ if passes(&["task_work_run"]) => ThreadActivity::Open,
        // A stack without the call's frame was sampled at the kernel's entry or exit.
        None if passes(&[
            "do_syscall_64",
            "entry_SYSCALL_64",
            "syscall_",
            "exit_to_user_mode",
        ]) =>
        {
            ThreadActivity::Enter
        }
        _ => ThreadActivity::Kernel,
    }
}

fn print(
    flags: &ProfileFlags,
    seen: &[ProfileResult; AsymmetricMode::ALL.len()],
    exchange: FigureSpread,
) {
    let node = |at: usize| FigureSpread::of(seen[at].node_us.clone());
    let (name, concurrency) = (flags.algorithm.name(), flags.concurrency);
    println!(
        "\n{name}, {concurrency} at once: CPU of the node proxy for a session, µs, by what it was found doing.\n"
    );
    println!(
        "| | {} |\n|---|---|---|---|",
        AsymmetricMode::ALL.map(AsymmetricMode::name).join(" | ")
    );
    for part in ThreadActivity::ALL {
        println!(
            "| {} | {} |",
            part.name(),
            [0, 1, 2]
                .map(|at| format!("{:.0}", seen[at].us(part)))
                .join(" | ")
        );
    }
    println!(
        "| together (least–most of the rounds) | {} |",
        [0, 1, 2].map(|at| format!("{:#.0}", node(at))).join(" | ")
    );
    // Modes are in the order of `AsymmetricMode::ALL`: 0 is none, 2 is remote.
    let (none, remote) = (node(0).median, node(2).median);
    let taken: f64 = ThreadActivity::ALL
        .into_iter()
        .filter(|part| part.is_taken())
        .map(|part| seen[0].us(part))
        .sum();
    // The lower bound: no key server can save more than `taken`, and each handshake needs its
    // exchanges.
    let (free, floor) = (
        none - taken,
        none - taken + REQUESTS_PER_HANDSHAKE * exchange.median,
    );
    let percent = |now: f64| 100.0 * (now / none - 1.0);
    println!(
        "\nRemote beside none: {:+.0} %. What a key server can take of none is {taken:.0} µs: were asking it free, {free:.0} µs would be left ({:+.0} %). A bare \
         exchange with another core, one packet each way and nothing done with it, costs {exchange:#.0} µs; with {REQUESTS_PER_HANDSHAKE:.0} of them the floor is {floor:.0} µs ({:+.0} %).",
        percent(remote),
        percent(free),
        percent(floor)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(stack: &str) -> Option<ThreadActivity> {
        part(
            &stack
                .lines()
                .filter_map(StackFrame::read)
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn stacks_are_of_their_parts() {
        // Each stack has the part of its innermost frame, unless system calls decide.
        for (stack, wanted) in [
            (
                "  55aa __ecp_nistz256_mul_montq (/bin/canal-node)",
                Some(ThreadActivity::Cryptography),
            ),
            (
                "  55aa canal_keyserver_client::channel::KeyServerChannel::ask (/bin/canal-node)",
                Some(ThreadActivity::Keys),
            ),
            (
                "  55aa <rustls::crypto::aws_lc_rs::x as core::Y (z)>::f (/bin/canal-node)",
                Some(ThreadActivity::Tls),
            ),
            (
                "  7faa __memmove_avx_unaligned_erms (/usr/lib/libc.so.6)",
                Some(ThreadActivity::Memory),
            ),
            (
                "  7faa h2::server::f (/bin/canal-node)",
                Some(ThreadActivity::Rest),
            ),
            (
                "  ffff tcp_ack ([kernel.kallsyms])\n ffff net_rx_action ([kernel.kallsyms])\n ffff __x64_sys_sendto ([kernel.kallsyms])",
                Some(ThreadActivity::Deliver),
            ),
            (
                "  ffff tcp_sendmsg ([kernel.kallsyms])\n ffff __x64_sys_writev ([kernel.kallsyms])",
                Some(ThreadActivity::Send),
            ),
            (
                "  ffff finish_task_switch ([kernel.kallsyms])\n ffff schedule ([kernel.kallsyms])\n ffff __x64_sys_epoll_wait ([kernel.kallsyms])",
                Some(ThreadActivity::Switch),
            ),
            (
                "  ffff tcp_sendmsg ([kernel.kallsyms])\n ffff do_writev ([kernel.kallsyms])\n ffff do_syscall_64 ([kernel.kallsyms])",
                Some(ThreadActivity::Send),
            ),
            (
                "  ffff do_syscall_64 ([kernel.kallsyms])\n 7faa epoll_wait (/usr/lib/libc.so.6)",
                Some(ThreadActivity::Enter),
            ),
            ("", None),
        ] {
            assert_eq!(of(stack), wanted, "{stack}");
        }
    }
}
